"""Products of 16-bit activations with packed 4-bit weights: one public call in `api`, several implementations."""
