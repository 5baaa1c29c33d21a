"""Casts of NumPy arrays by JAX, for conversions of checkpoints (`microfloat.reference.casters`)."""

import jax.numpy as jnp
import numpy as np

from microfloat.jax.ops import quantize as quantize_array
from microfloat.recipes import Cast
from microfloat.reference import Quantized, casters

__all__ = ["quantize"]


def quantize(x: np.ndarray, cast: Cast, amax: np.ndarray | None) -> Quantized:
    """The Quantized of a matrix [R, C]; `amax` as in `microfloat.quantize`, or None to measure it."""
    made = quantize_array(jnp.asarray(x), cast, amax=None if amax is None else jnp.asarray(amax, jnp.float32))
    assert isinstance(made.codes, jnp.ndarray)
    level = None if made.tensor_scale is None else np.asarray(made.tensor_scale)
    return Quantized(_bytes(made.codes), _bytes(made.scale), level, cast.format, 1, x.shape, None)


def _bytes(part: object) -> np.ndarray:
    """Codes or scales as the oracle has them: bytes, or float32."""
    array = np.asarray(part)
    return array if array.dtype == np.float32 else array.view(np.uint8)


casters.register("jax", quantize)
