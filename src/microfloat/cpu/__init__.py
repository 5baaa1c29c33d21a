"""Casts of NumPy arrays at the speed of a CPU's memory: the bytes of `microfloat.reference`, on all cores.

For conversion of checkpoints, where a matrix is cast once and no framework is at hand. `support` says which casts have
a compiled kernel and why the others are computed by the NumPy oracle; the bytes are the same.
"""

from microfloat.cpu._casts import dequantize, quantize, support

__all__ = ["dequantize", "quantize", "support"]
