"""State of the Flax-compatible FP8 operators: delayed scales and amax histories.

Here `scale` is what dequantization multiplies with, ``amax / max``, and quantization divides by it; the recipes of
microfloat multiply by an encode scale instead (`microfloat.jax.scaling`). Source: docs/jax.md, "Flax's fp8_ops".
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from microfloat.jax._collectives import max_over, sharding_axes, varying_axes
from microfloat.jax._max_grad import from_max_grad
from microfloat.jax.flax.fp8_arguments import as_numbers
from microfloat.jax.flax.fp8_casts import get_fp8_max, qdq
from microfloat.jax.numerics.bits import divide, widened

__all__ = [
    "compute_amax_history", "compute_scale", "quantize_dequantize_update", "update_fp8_meta", "updated_state",
]  # fmt: skip

# Smallest scale that is handed out: the reciprocal of a normal float32 stays one.
_SMALLEST = np.float32(2.0**-126)


def compute_scale(amax: ArrayLike, scale: ArrayLike, fp8_max: ArrayLike, margin: float = 0) -> Array:
    """The next scale: ``1 / ((fp8_max / amax) / 2^margin)``, or the old `scale` for an amax of zero, Inf or NaN.

    Two reciprocals, as existing checkpoints have them. Never below 2^-126; a subnormal amax counts as zero; a
    stored scale that is not positive and finite counts as 1.
    """
    amax, scale, fp8_max = as_numbers("amax", amax), as_numbers("scale", scale), as_numbers("fp8_max", fp8_max)
    scale = jnp.where((scale > 0) & jnp.isfinite(scale), scale, jnp.ones_like(scale))
    usable = (amax >= _SMALLEST) & jnp.isfinite(amax)
    encode = _quotient(_quotient(fp8_max, jnp.where(usable, amax, jnp.ones_like(amax))), 2.0**margin)
    encode = jnp.where(usable, encode, _quotient(1.0, scale))
    return jnp.maximum(_quotient(1.0, encode), _SMALLEST.astype(encode.dtype))


def _quotient(x: ArrayLike, divisor: ArrayLike) -> Array:
    """``x / divisor``, correctly rounded in float32 on every device; float64 operands divide in float64."""
    dtype = jnp.result_type(x, divisor)
    wide = jnp.promote_types(dtype, jnp.float32)
    return (divide(x, divisor) if wide == jnp.float32 else jnp.divide(x, divisor)).astype(dtype)


def compute_amax_history(x: ArrayLike, amax_history: Array) -> Array:
    """The ring after this step: rolled by one, with ``max |x|`` at index 0 (0 if that is not finite, or subnormal)."""
    return _rolled(_measured(x, amax_history.dtype), amax_history)


def _measured(x: ArrayLike, dtype: np.dtype) -> Array:
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4:
        x = widened(x)
    amax = jnp.max(jnp.abs(x), initial=0).astype(dtype)
    return jnp.where((amax >= _SMALLEST) & jnp.isfinite(amax), amax, jnp.zeros_like(amax))


def _rolled(amax: Array, amax_history: Array) -> Array:
    return jnp.roll(amax_history, -1).at[0].set(amax)


def updated_state(
    x: ArrayLike, q_dtype: DTypeLike, scale: ArrayLike, amax_history: Array, axis_names: tuple[str, ...] = ()
) -> tuple[Array, Array]:
    """(scale, history) for this step in float32: the scale follows from the *old* history, then x enters the ring.

    Inside shard_map the amax is the maximum over the mesh axes that shard x but not the state.
    """
    old_scale, history = from_max_grad(jnp.asarray(scale)), from_max_grad(amax_history)
    new_scale = compute_scale(jnp.max(history), old_scale, get_fp8_max(q_dtype, jnp.float32))
    x = jnp.asarray(x)
    axes = sharding_axes(x, axis_names) - varying_axes(history)
    return new_scale, _rolled(max_over(_measured(x, jnp.dtype(jnp.float32)), axes), history)


def update_fp8_meta(x: ArrayLike, q_dtype: DTypeLike, scale: ArrayLike, amax_history: Array) -> tuple[Array, Array]:
    """(new scale, new history), in the dtypes of the old ones (float32 or `fp32_max_grad`)."""
    scale = jnp.asarray(scale)
    new_scale, new_history = updated_state(x, q_dtype, scale, amax_history)
    return lax.convert_element_type(new_scale, scale.dtype), lax.convert_element_type(new_history, amax_history.dtype)


def quantize_dequantize_update(
    x: ArrayLike, q_dtype: DTypeLike, scale: ArrayLike, amax_history: Array, compute_dtype: DTypeLike
) -> tuple[Array, Array, Array]:
    """(qdq of x under the new scale, new scale, new history)."""
    new_scale, new_history = update_fp8_meta(x, q_dtype, scale, amax_history)
    return qdq(x, q_dtype, from_max_grad(new_scale), compute_dtype), new_scale, new_history
