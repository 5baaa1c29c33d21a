"""Pieces of kernels: conversions, scales, random bytes, tiles, and where programs meet. No kernel that is launched."""
