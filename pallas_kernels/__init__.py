"""Kernel families over arrays: attention, and what every family shares."""
