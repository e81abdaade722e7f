"""How numbers are stored."""
