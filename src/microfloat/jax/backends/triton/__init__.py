"""Casts on CUDA by the Triton kernels of `microfloat.kernels`, started from inside the XLA program.

`why_unavailable` says whether they can be called here; `_launch` calls one, `_casts` knows their arguments.
"""
