"""Casts and state of the Flax-compatible FP8 operators: quantize, dequantize, scales, amax histories.

Quantization divides by `scale`, ``amax / max``. Every rounding that the definition names is made, on every device
(docs/numerics.md 1.2). Source: docs/jax.md, "Flax's fp8_ops".
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from microfloat.errors import invalid_type, invalid_value, unknown_name
from microfloat.formats import E4M3, E5M2
from microfloat.jax import transformations
from microfloat.jax.array import as_dtype
from microfloat.jax.backends import cuda
from microfloat.jax.numerics.bits import bits_of, divide, encode, quotient, rounded, where, widened

__all__ = [
    "compute_amax_history", "compute_scale", "dequantize", "get_fp8_max", "qdq", "quantize",
    "quantize_dequantize_update", "update_fp8_meta",
]  # fmt: skip

_ELEMENTS = {"float8_e4m3fn": E4M3, "float8_e5m2": E5M2}
# The dtypes whose arithmetic is that of float32, rounded.
_NARROW = ("float32", "bfloat16", "float16")


def get_fp8_max(fp8_dtype: DTypeLike, out_dtype: DTypeLike) -> Array:
    """The largest finite value of an FP8 dtype, as `out_dtype`; InvalidValueError for other dtypes."""
    return jnp.finfo(as_fp8_dtype("fp8_dtype", fp8_dtype)).max.astype(out_dtype)


def quantize(x: ArrayLike, q_dtype: DTypeLike, scale: ArrayLike, compute_dtype: DTypeLike) -> Array:
    """``clip(x / scale, -max, max)``, nearest even; the scale is rounded to `compute_dtype` first, and NaN stays."""
    x, scale, compute = _operands(as_numbers("x", x), scale, compute_dtype)
    q_dtype = as_fp8_dtype("q_dtype", q_dtype)
    codes, ratio = _quantized(q_dtype, compute, x, scale), _clipped_quotient(q_dtype, compute, x, scale)
    return transformations.straight_through(codes, ratio)


def dequantize(x: ArrayLike, dq_dtype: DTypeLike, scale: ArrayLike) -> Array:
    """``x * scale`` in `dq_dtype`."""
    x, scale, dtype = _operands(x, scale, dq_dtype)
    plain = x.astype(dtype) * scale.astype(dtype)
    if not _is_narrow(x.dtype, scale.dtype, dtype):
        return plain
    return transformations.straight_through(_scaled(_rounded(x, dtype), scale, dtype), plain)


def qdq(x: ArrayLike, q_dtype: DTypeLike, scale: ArrayLike, compute_dtype: DTypeLike) -> Array:
    """``dequantize(quantize(x))``, x as FP8 would hold it; gradients go straight through, and are zero where x is
    clipped.
    """
    x, scale, compute = _operands(as_numbers("x", x), scale, compute_dtype)
    q_dtype = as_fp8_dtype("q_dtype", q_dtype)
    codes, ratio = _quantized(q_dtype, compute, x, scale), _clipped_quotient(q_dtype, compute, x, scale)
    straight = transformations.straight_through(codes.astype(ratio.dtype), ratio) * scale.astype(ratio.dtype)
    if not _is_narrow(x.dtype, scale.dtype, ratio.dtype):
        return transformations.straight_through(codes.astype(x.dtype) * scale.astype(x.dtype), straight)
    return transformations.straight_through(_scaled(codes.astype(jnp.float32), scale, x.dtype), straight)


def factors(scale: Array, other: Array) -> tuple[Array, Array]:
    """Two float32 numbers that make up ``scale * other``: their product and 1, or both where it would be flushed."""
    scale, other = (transformations.from_max_grad(each).reshape(()) for each in (scale, other))
    product = scale * other
    flushed = product < np.float32(2.0**-126)
    pair = jnp.where(flushed, scale, product), jnp.where(flushed, other, jnp.ones_like(other))
    # Constants among them would be multiplied into one again.
    return lax.optimization_barrier(pair)


def scaled_by(values: Array, scale: Array, other: Array) -> Array:
    """``values * (scale * other)`` in float32 or wider."""
    first, second = factors(scale, other)
    return values.astype(jnp.promote_types(values.dtype, jnp.float32)) * first * second


def _operands(x: ArrayLike, scale: ArrayLike, dtype: DTypeLike) -> tuple[Array, Array, np.dtype]:
    """Float arrays; a scale of one element without axes, so that it meets an x of any rank, a larger one as it is."""
    dtype, scale = as_float_dtype("dtype", dtype), as_numbers("scale", scale)
    if not scale.size:
        raise invalid_value("scale", f"shape {scale.shape}", "one number, or one per axis that it is to scale")

    def floating(array: Array) -> Array:
        is_floating = jnp.issubdtype(array.dtype, jnp.floating)
        return array if is_floating else array.astype(jnp.promote_types(array.dtype, dtype))

    scale = floating(transformations.from_max_grad(scale) if transformations.is_max_grad(scale) else scale)
    x = floating(as_numbers("x", x, narrow=True))
    return x, scale.reshape(()) if scale.size == 1 else scale, dtype


def _is_narrow(*dtypes: np.dtype) -> bool:
    return all(dtype.name in (*_NARROW, *FP8_DTYPES) for dtype in dtypes)


def _rounded(values: Array, dtype: np.dtype) -> Array:
    """Float values as float32, each a number of `dtype`; FP8 values are that already."""
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
    # XLA's conversion for chips without one rounds to float16 first.
    return lax.platform_dependent(clipped, cuda=partial(encode, element=element), default=by_conversion)


# The state

# Smallest scale that is handed out: the reciprocal of a normal float32 stays one.
_SMALLEST = np.float32(2.0**-126)


def compute_scale(amax: ArrayLike, scale: ArrayLike, fp8_max: ArrayLike, margin: float = 0) -> Array:
    """The next scale: ``1 / ((fp8_max / amax) / 2^margin)``, or the old `scale` for an amax of zero, Inf or NaN.

    Never below 2^-126; a subnormal amax counts as zero, a scale that is not positive and finite as 1.
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
    return jnp.roll(amax_history, -1).at[0].set(_measured(x, amax_history.dtype))


def _measured(x: ArrayLike, dtype: np.dtype) -> Array:
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4:
        x = widened(x)
    amax = jnp.max(jnp.abs(x), initial=0).astype(dtype)
    return jnp.where((amax >= _SMALLEST) & jnp.isfinite(amax), amax, jnp.zeros_like(amax))


def updated_state(
    x: ArrayLike, q_dtype: DTypeLike, scale: ArrayLike, amax_history: Array, axis_names: tuple[str, ...] = ()
) -> tuple[Array, Array]:
    """(scale, history) for this step in float32: the scale of the *old* history, then x enters the ring."""
    old_scale, history = transformations.from_max_grad(jnp.asarray(scale)), transformations.from_max_grad(amax_history)
    new_scale = compute_scale(jnp.max(history), old_scale, get_fp8_max(q_dtype, jnp.float32))
    x = jnp.asarray(x)
    axes = transformations.sharding_axes(x, axis_names) - transformations.varying_axes(history)
    amax = transformations.max_over(_measured(x, jnp.dtype(jnp.float32)), axes)
    return new_scale, jnp.roll(history, -1).at[0].set(amax)


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
    return qdq(x, q_dtype, transformations.from_max_grad(new_scale), compute_dtype), new_scale, new_history


# Arguments

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def as_fp8_dtype(argument: str, dtype: Any) -> np.dtype:
    """One of the four FP8 dtypes; else an error with their names."""
    found = as_dtype(argument, dtype, "one of " + ", ".join(FP8_DTYPES))
    if found.name not in FP8_DTYPES:
        raise unknown_name(argument, found.name, FP8_DTYPES)
    return found


def as_float_dtype(argument: str, dtype: Any) -> np.dtype:
    """A float dtype; else InvalidTypeError."""
    found = as_dtype(argument, dtype, "a float dtype such as jnp.float32")
    if not jnp.issubdtype(found, jnp.floating):
        raise invalid_type(argument, found, "a float dtype such as jnp.float32")
    return found


def as_numbers(argument: str, x: Any, *, narrow: bool = False) -> Array:
    """`x` as an array of real numbers, of an FP8 dtype only if that may be (`narrow`); else InvalidTypeError."""
    if transformations.is_max_grad(x):
        return x
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        raise invalid_type(argument, type(x), "an array of real numbers") from None
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise invalid_type(argument, array.dtype, "an array of real numbers")
    if not narrow and str(array.dtype).startswith(("float8", "float6_", "float4")):
        remedy = f"The op quantizes; convert {argument} with .astype."
        raise invalid_type(argument, array.dtype, "float32, bfloat16, float16 or float64", remedy)
    return array


def as_state(name: str, scale: Any, history: Any) -> tuple[Array, Array]:
    """A scale of one element and a history [L]; else an error that begins with `name`."""
    remedy = "The first scale is ones(1), the first history zeros(L)."
    for kind, leaf in (("scale", scale), ("amax_history", history)):
        if leaf is None:
            raise invalid_value(f"{name}{kind}", "None", "float32 state", remedy)
    scale, history = as_numbers(f"{name}scale", scale), as_numbers(f"{name}amax_history", history)
    if scale.size != 1:
        raise invalid_value(f"{name}scale", f"shape {scale.shape}", "shape () or (1,)", remedy)
    if history.ndim != 1 or not history.size:
        raise invalid_value(f"{name}amax_history", f"shape {history.shape}", "shape (L,)", remedy)
    return scale, history
