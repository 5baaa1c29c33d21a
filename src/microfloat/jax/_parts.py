"""A QuantizedArray from parts that exist already: what fits what (docs/numerics.md 7.1)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import ScaledFormat
from microfloat.jax.array import QuantizedArray
from microfloat.jax.numerics.bits import as_code_dtype
from microfloat.jax.numerics.hadamard import stored_length
from microfloat.jax.numerics.tiles import leading_axes, scale_shape
from microfloat.jax.ops import check_dtype, normalize_axis
from microfloat.recipes import Hadamard
from microfloat.recipes.core import as_scaled_format

__all__ = ["checked_parts"]


def checked_parts(
    codes: ArrayLike,
    scale: ArrayLike,
    tensor_scale: ArrayLike | None,
    format: ScaledFormat | str,
    axis: int,
    shape: tuple[int, ...] | None,
    dtype: DTypeLike,
    hadamard: Hadamard | None,
) -> QuantizedArray:
    """See `QuantizedArray.from_parts`."""
    fmt = as_scaled_format(format)
    wide = check_dtype("dtype", dtype)
    stored = _stored_codes(codes, fmt)
    if hadamard is not None and not isinstance(hadamard, Hadamard):
        raise invalid_type("hadamard", type(hadamard), "None or a Hadamard")
    if shape is None:
        shape = (*stored.shape[:-1], stored.shape[-1] * fmt.element.codes_per_byte)
        shape = shape[::-1] if normalize_axis(axis, len(shape)) == -2 else shape
    if not isinstance(shape, tuple | list) or any(
        isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0 for size in shape
    ):
        got = type(shape) if not isinstance(shape, tuple | list) else repr(shape)
        raise invalid_type("shape", got, "a tuple of sizes, such as (4, 32)")
    shape = tuple(int(size) for size in shape)
    axis = normalize_axis(axis, len(shape))
    cols = shape[axis] if shape else 1
    leading, length = leading_axes(shape, axis), stored_length(cols, hadamard)
    _check_shape("codes", stored, (*leading, -(-length // fmt.element.codes_per_byte)), fmt)
    rows = int(np.prod(leading, dtype=np.int64))
    grid = tuple(
        1 if size is None else -(-extent // size) for extent, size in zip((rows, length), fmt.block, strict=True)
    )
    scales = _part("scale", scale, jnp.float32 if fmt.scale.name == "FP32" else jnp.uint8)
    _check_shape("scale", scales, scale_shape(fmt, shape, axis, grid), fmt)
    wanted = None if tensor_scale is None else _part("tensor_scale", tensor_scale, jnp.float32)
    if wanted is not None:
        if fmt.tensor_scale is None:
            raise invalid_value("tensor_scale", "an array", f"None: {fmt.name} has none")
        _check_shape("tensor_scale", wanted, (rows, 1) if fmt.tensor_scale == "row" else (), fmt)
    return QuantizedArray(stored, scales, wanted, fmt, axis, cols, hadamard, wide, max(2 - len(shape), 0))


def _stored_codes(codes: ArrayLike, fmt: ScaledFormat) -> Array:
    """The codes in the dtype of the attribute; FP8 also from its bytes."""
    own = jnp.float8_e4m3fn if fmt.element.name == "E4M3" else jnp.float8_e5m2
    dtype = getattr(codes, "dtype", None)
    if fmt.element.bits == 8 and dtype == own:
        array = jnp.asarray(codes)
    else:
        array = _part("codes", codes, jnp.uint8)
        array = as_code_dtype(array, fmt.element) if fmt.element.bits == 8 else array
    if array.ndim < 2:
        raise invalid_value("codes", f"shape {array.shape}", "at least two axes, the contraction axis last")
    return array


def _part(argument: str, value: ArrayLike, dtype: DTypeLike) -> Array:
    given = getattr(value, "dtype", None) if isinstance(value, jax.Array | np.ndarray | np.generic) else None
    if given is None or given != jnp.dtype(dtype):
        raise invalid_type(argument, given or type(value), f"an array of {jnp.dtype(dtype)}", "View its bytes so.")
    return jnp.asarray(value)


def _check_shape(argument: str, array: Array, needed: tuple[int, ...], fmt: ScaledFormat) -> None:
    if tuple(array.shape) != tuple(needed):
        raise invalid_value(argument, f"shape {tuple(array.shape)}", f"{tuple(needed)} for {fmt.name} of this shape")
