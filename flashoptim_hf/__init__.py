"""Companded 8-bit optimizer states, paged into host RAM, for Hugging Face Trainer and Accelerate."""

from __future__ import annotations

__version__ = "0.1.0"
