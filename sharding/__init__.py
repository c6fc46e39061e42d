"""Meshes, logical-axis rules and collectives; knows nothing of models or kernels."""
