"""Device functions that kernels call: conversions, scales, random bytes, tiles, reductions over programs."""
