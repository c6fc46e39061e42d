"""Low-bit weights: filled by the W4A16 and quantisation issues."""
