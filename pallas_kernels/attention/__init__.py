"""Scaled dot-product attention: one public call in `api`, several implementations beside it."""
