"""Low-bit weights: what takes a dense weight's place, its product, and how it is made."""
