"""microfloat for JAX: the same recipes, the same bits; needs jax alone (Flax only for `linen`, `nnx` and `fp8_ops`)."""

from microfloat.jax import checkpoint_policies, scaling
from microfloat.jax._dot_general import dot_general, einsum
from microfloat.jax.array import QuantizedArray
from microfloat.jax.ops import dequantize, quantize, scaled_matmul

__all__ = [
    "QuantizedArray",
    "dequantize",
    "checkpoint_policies",
    "dot_general",
    "einsum",
    "quantize",
    "scaled_matmul",
    "scaling",
]
