"""The extended dtype whose cotangents add up by taking the maximum: float32 in memory, ``add(x, y) = max(x, y)``.

An operand that is cast to it once, outside of all its uses, hands back the maximum of what the uses contribute,
where plain float32 would hand back the sum. It rests on parts of JAX that are not public; when they are missing,
`CAN_USE_EARRAY` is False and `fp32_max_grad` is plain float32 (then the consumer rule of `scaling` limits the
damage). Semantics: spec of `flax.linen.fp8_ops`, docs/jax.md.
"""

import builtins
from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import Array, dtypes, lax
from jax.typing import ArrayLike

__all__ = [
    "CAN_USE_EARRAY",
    "Fp8MetaTyRules",
    "fm32",
    "fp8_meta_dtype",
    "fp32_max_grad",
    "from_max_grad",
    "is_max_grad",
]

try:  # private modules that have moved between JAX versions
    from jax._src import ad_util as _ad_util
    from jax._src import core as _core
    from jax._src import dtypes as _private_dtypes
    from jax._src import earray as _earray
    from jax._src.interpreters import pxla as _pxla

    _ExtendedDType: Any = _private_dtypes.ExtendedDType
    CAN_USE_EARRAY = hasattr(_pxla, "global_result_handlers") and hasattr(_earray, "EArray")
except (ImportError, AttributeError):  # pragma: no cover - depends on the installed JAX
    _ad_util = _core = _earray = _pxla = cast(Any, None)
    _ExtendedDType = object
    CAN_USE_EARRAY = False


class Fp8MetaTyRules:
    """What JAX asks about the extended dtype."""

    @staticmethod
    def physical_element_aval(dtype: "_MaxGradDType") -> object:
        """One float32 per element."""
        return _core.ShapedArray((), dtype.float_dtype)

    @staticmethod
    def convert_from(dtype: "_MaxGradDType", other: object) -> bool:
        """Only to its own float dtype."""
        return dtype.float_dtype == other

    @staticmethod
    def convert_to(other: object, dtype: "_MaxGradDType") -> bool:
        """Only from its own float dtype."""
        return dtype.float_dtype == other

    @staticmethod
    def add(dtype: "_MaxGradDType", x: Array, y: Array) -> Array:
        """How autodiff accumulates two contributions."""
        wide = [lax.convert_element_type(value, dtype.float_dtype) for value in (x, y)]
        return lax.convert_element_type(lax.max(*wide), dtype)

    @staticmethod
    def zero(dtype: "_MaxGradDType") -> Array:
        """The neutral element of the maximum."""
        return lax.convert_element_type(np.array(-np.inf, dtype.float_dtype), dtype)

    @staticmethod
    def tangent_dtype(dtype: "_MaxGradDType") -> "_MaxGradDType":
        """Its own tangent."""
        return dtype

    @staticmethod
    def full(shape: tuple[int, ...], fill_value: ArrayLike, dtype: "_MaxGradDType") -> Array:
        """An array of one value."""
        fill = lax.convert_element_type(fill_value, dtype.float_dtype)
        return lax.convert_element_type(lax.full(shape, fill, dtype.float_dtype), dtype)

    @staticmethod
    def global_sharded_result_handler(aval: Any, out_sharding: Any, committed: bool) -> object:
        """How an array of this dtype leaves jit."""
        physical = _core.physical_aval(aval)
        handler = _pxla.global_result_handlers[_core.ShapedArray](physical, out_sharding, committed)
        return lambda buffers: _earray.EArray(aval, handler(buffers))


class fp8_meta_dtype(dtypes.extended):
    """The abstract type of `fp32_max_grad`."""


@dataclass(frozen=True)
class _MaxGradDType(_ExtendedDType):
    float_dtype: np.dtype
    _rules: builtins.type = Fp8MetaTyRules
    type: builtins.type = fp8_meta_dtype

    @property
    def name(self) -> str:
        return f"fp8_meta{jnp.finfo(self.float_dtype).bits}"

    def __repr__(self) -> str:
        return self.name


def _add_outside_of_jit(x: Any, y: Any) -> Any:
    """Sum of two eager arrays of an extended dtype, as the dtype defines it."""
    return x.dtype._rules.add(x.dtype, x, y)


if CAN_USE_EARRAY and hasattr(_ad_util, "raw_jaxval_adders"):
    # Autodiff outside of jit looks adders up by the class of array, and JAX registers none for this class.
    _ad_util.raw_jaxval_adders.setdefault(_earray.EArray, _add_outside_of_jit)

fp32_max_grad = _MaxGradDType(jnp.dtype(jnp.float32)) if CAN_USE_EARRAY else jnp.dtype(jnp.float32)
fm32 = fp32_max_grad


def is_max_grad(x: Array) -> bool:
    """Whether `x` is of the extended dtype (ours, or another library's of the same name and meaning)."""
    return getattr(getattr(x, "dtype", None), "name", "") == "fp8_meta32"


def from_max_grad(x: Array) -> Array:
    """`x` as float32, whichever of the two dtypes it has."""
    return lax.convert_element_type(x, jnp.float32)
