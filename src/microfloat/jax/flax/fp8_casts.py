"""Casts of the Flax-compatible FP8 operators: quantize, dequantize, and both in one step (fake quantization).

Here `scale` is what dequantization multiplies with and quantization divides by. Every rounding that the definition
names is made, on every device: quotients are those of a true division, and no conversion stands where XLA would take
it back (docs/numerics.md 1.2). Source: docs/jax.md, "Flax's fp8_ops".
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from microfloat.errors import invalid_value
from microfloat.formats import E4M3, E5M2
from microfloat.jax._derivatives import straight_through
from microfloat.jax._max_grad import from_max_grad, is_max_grad
from microfloat.jax.backends import cuda
from microfloat.jax.flax.fp8_arguments import FP8_DTYPES, as_float_dtype, as_fp8_dtype, as_numbers
from microfloat.jax.numerics.bits import bits_of, encode, quotient, rounded, where, widened

__all__ = ["dequantize", "factors", "get_fp8_max", "qdq", "quantize", "scaled_by"]

_ELEMENTS = {"float8_e4m3fn": E4M3, "float8_e5m2": E5M2}
# The dtypes whose arithmetic is that of float32, rounded.
_NARROW = ("float32", "bfloat16", "float16")


def get_fp8_max(fp8_dtype: DTypeLike, out_dtype: DTypeLike) -> Array:
    """The largest finite value of an FP8 dtype, as `out_dtype`; InvalidValueError for other dtypes."""
    return jnp.finfo(as_fp8_dtype("fp8_dtype", fp8_dtype)).max.astype(out_dtype)


def quantize(x: ArrayLike, q_dtype: DTypeLike, scale: ArrayLike, compute_dtype: DTypeLike) -> Array:
    """``clip(x / scale, -max, max)`` rounded to nearest even in `q_dtype`; x and scale of shape () or (1,).

    The scale is rounded to `compute_dtype` first; the quotient is one of ``promote(x.dtype, compute_dtype)``.
    Infinities saturate, NaN stays. Tangents are of the FP8 dtype, so gradients through the codes are of little use.
    """
    x, scale, compute = _operands(as_numbers("x", x), scale, compute_dtype)
    q_dtype = _checked(q_dtype)
    return straight_through(_quantized(q_dtype, compute, x, scale), _clipped_quotient(q_dtype, compute, x, scale))


def dequantize(x: ArrayLike, dq_dtype: DTypeLike, scale: ArrayLike) -> Array:
    """``x * scale`` in `dq_dtype`."""
    x, scale, dtype = _operands(x, scale, dq_dtype)
    plain = x.astype(dtype) * scale.astype(dtype)
    if not _is_narrow(x.dtype, scale.dtype, dtype):
        return plain
    return straight_through(_scaled(_rounded(x, dtype), scale, dtype), plain)


def qdq(x: ArrayLike, q_dtype: DTypeLike, scale: ArrayLike, compute_dtype: DTypeLike) -> Array:
    """``dequantize(quantize(x, q_dtype, scale, compute_dtype), x.dtype, scale)``: x as FP8 would hold it.

    Gradients go straight through the rounding, and are zero where x is clipped.
    """
    x, scale, compute = _operands(as_numbers("x", x), scale, compute_dtype)
    q_dtype = _checked(q_dtype)
    codes, ratio = _quantized(q_dtype, compute, x, scale), _clipped_quotient(q_dtype, compute, x, scale)
    straight = straight_through(codes.astype(ratio.dtype), ratio) * scale.astype(ratio.dtype)
    if not _is_narrow(x.dtype, scale.dtype, ratio.dtype):
        return straight_through(codes.astype(x.dtype) * scale.astype(x.dtype), straight)
    return straight_through(_scaled(codes.astype(jnp.float32), scale, x.dtype), straight)


def factors(scale: Array, other: Array) -> tuple[Array, Array]:
    """Two float32 numbers that make up ``scale * other``: their product and 1, or both where it would be flushed."""
    scale, other = (from_max_grad(each).reshape(()) for each in (scale, other))
    product = scale * other
    flushed = product < np.float32(2.0**-126)
    pair = jnp.where(flushed, scale, product), jnp.where(flushed, other, jnp.ones_like(other))
    # Constants among them would be multiplied into one again.
    return lax.optimization_barrier(pair)


def scaled_by(values: Array, scale: Array, other: Array) -> Array:
    """``values * (scale * other)`` in float32 or wider."""
    first, second = factors(scale, other)
    return values.astype(jnp.promote_types(values.dtype, jnp.float32)) * first * second


def _checked(q_dtype: DTypeLike) -> np.dtype:
    return as_fp8_dtype("q_dtype", q_dtype)


def _operands(x: ArrayLike, scale: ArrayLike, dtype: DTypeLike) -> tuple[Array, Array, np.dtype]:
    """Float arrays; a scale of one element without axes, so that it meets an x of any rank, a larger one as it is."""
    dtype, scale = as_float_dtype("dtype", dtype), as_numbers("scale", scale)
    if not scale.size:
        raise invalid_value("scale", f"shape {scale.shape}", "one number, or one per axis that it is to scale")
    arrays = [as_numbers("x", x, narrow=True), from_max_grad(scale) if is_max_grad(scale) else scale]
    x, scale = (
        array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.promote_types(array.dtype, dtype))
        for array in arrays
    )
    return x, scale.reshape(()) if scale.size == 1 else scale, dtype


def _is_narrow(*dtypes: np.dtype) -> bool:
    return all(dtype.name in (*_NARROW, *FP8_DTYPES) for dtype in dtypes)


def _rounded(values: Array, dtype: np.dtype) -> Array:
    """Float values as float32, each a number of `dtype`, as those of FP8 are."""
    wide = widened(values)
    return wide if values.dtype.name in FP8_DTYPES else widened(wide.astype(dtype))


def _scaled(values: Array, scale: Array, dtype: np.dtype) -> Array:
    """float32 `values`, numbers of `dtype`, times the scale, in `dtype`."""
    return rounded(values * _rounded(scale, dtype), dtype)


def _clipped_quotient(q_dtype: np.dtype, compute: np.dtype, x: Array, scale: Array) -> Array:
    """``clip(x / scale, -max, max)`` in XLA's arithmetic."""
    wide = jnp.promote_types(x.dtype, compute)
    largest = get_fp8_max(q_dtype, compute).astype(wide)
    return jnp.clip(x.astype(wide) / scale.astype(compute).astype(wide), -largest, largest)


def _quantized(q_dtype: np.dtype, compute: np.dtype, x: Array, scale: Array) -> Array:
    wide = jnp.promote_types(x.dtype, compute)
    if not _is_narrow(x.dtype, scale.dtype, wide):
        return _clipped_quotient(q_dtype, compute, x, scale).astype(q_dtype)
    ratio = quotient(widened(x), _rounded(scale, compute), few_bits=wide == jnp.bfloat16)
    ratio, largest = _rounded(ratio, wide), np.float32(jnp.finfo(q_dtype).max)
    clipped = lax.min(lax.max(ratio, -largest), largest)
    nan = np.asarray(np.nan, q_dtype).view(np.uint8)
    sign = (bits_of(ratio) >> 24).astype(jnp.uint8) & np.uint8(0x80)
    return lax.bitcast_convert_type(where(ratio != ratio, sign | nan, _code_bytes(q_dtype, clipped)), q_dtype)


def _code_bytes(q_dtype: np.dtype, clipped: Array) -> Array:
    """The bytes of values that FP8 can hold, rounded to nearest even."""

    def by_conversion(clipped: Array) -> Array:
        return lax.bitcast_convert_type(clipped.astype(q_dtype), jnp.uint8)

    element = _ELEMENTS.get(q_dtype.name)
    if element is None or cuda.capability() is None or cuda.converts(element):
        return by_conversion(clipped)
    # XLA's conversion for chips without one goes by way of float16.
    return lax.platform_dependent(clipped, cuda=partial(encode, element=element), default=by_conversion)
