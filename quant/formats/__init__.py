"""Formats of quantised weights on disk, one file each, in plain NumPy: exact both ways, and free of models."""
