"""Products of 8-bit floating-point operands with their scales: one public call in `api`, several implementations."""
