"""The seam to transformers and accelerate."""
