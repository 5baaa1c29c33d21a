"""Checks of what users hand to the Flax-compatible operators: whatever JAX takes as real numbers, and nothing else."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from microfloat.errors import invalid_type, invalid_value, unknown_name
from microfloat.jax._max_grad import is_max_grad

__all__ = ["FP8_DTYPES", "as_float_dtype", "as_fp8_dtype", "as_numbers", "as_state"]

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def _as_dtype(argument: str, dtype: Any, needed: str) -> np.dtype:
    if not isinstance(dtype, str | type | np.dtype):
        dtype = getattr(dtype, "dtype", None) if callable(dtype) else None
    try:
        return jnp.dtype("none" if dtype is None else dtype)
    except TypeError:
        raise invalid_type(argument, "no dtype" if dtype is None else repr(dtype), needed) from None


def as_fp8_dtype(argument: str, dtype: Any) -> np.dtype:
    """One of the four FP8 dtypes; else an error with their names."""
    found = _as_dtype(argument, dtype, "one of " + ", ".join(FP8_DTYPES))
    if found.name not in FP8_DTYPES:
        raise unknown_name(argument, found.name, FP8_DTYPES)
    return found


def as_float_dtype(argument: str, dtype: Any) -> np.dtype:
    """A float dtype; else InvalidTypeError."""
    found = _as_dtype(argument, dtype, "a float dtype such as jnp.float32")
    if not jnp.issubdtype(found, jnp.floating):
        raise invalid_type(argument, found, "a float dtype such as jnp.float32")
    return found


def as_numbers(argument: str, x: Any, *, narrow: bool = False) -> Array:
    """`x` as an array of real numbers, of an FP8 dtype only if that may be (`narrow`); else InvalidTypeError."""
    if is_max_grad(x):
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
