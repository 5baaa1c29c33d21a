"""microfloat for JAX: the same recipes, the same bits; needs jax alone (Flax only for `linen`, `nnx` and `fp8_ops`)."""

from microfloat.jax import scaling
from microfloat.jax.array import QuantizedArray
from microfloat.jax.dot_general import dot_general, einsum
from microfloat.jax.ops import dequantize, quantize, scaled_matmul

__all__ = ["QuantizedArray", "dequantize", "dot_general", "einsum", "quantize", "scaled_matmul", "scaling"]
