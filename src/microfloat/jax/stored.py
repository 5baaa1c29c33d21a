"""The product with a weight that is stored quantized: ``y = x @ dequantize(w).T``, differentiable in x."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from microfloat.errors import invalid_value
from microfloat.jax.array import QuantizedArray
from microfloat.jax.numerics.dimensions import DimensionNumbers, canonical_dimensions
from microfloat.jax.ops import dequantized_spec, quantize, scaled_matmul
from microfloat.jax.transformations import run_automatically, spec_of_product
from microfloat.recipes import Cast, Recipe

__all__ = ["times_stored"]


def times_stored(
    lhs: Array, rhs: QuantizedArray, dimension_numbers: DimensionNumbers, recipe: Recipe | None, dtype: np.dtype,
    backend: str, out_sharding: object = None,
) -> Array:  # fmt: skip
    """The product with a stored weight: [.., the free axes of lhs, those of rhs]."""
    dimensions = canonical_dimensions(lhs.shape, rhs.shape, dimension_numbers)
    is_one = rhs.ndim == 2 and len(dimensions.contracted) == 1 and not dimensions.batch
    if not is_one or dimensions.rhs_order[-1] != rhs.axis % 2:
        raise invalid_value(
            "dimension_numbers", f"{dimension_numbers} with a QuantizedArray of shape {rhs.shape}, axis {rhs.axis}",
            "one contracted axis of each, that of the blocks in rhs [N, K] or [K, N], and no batch axes",
            "Quantize rhs along the axis that is contracted.",
        )  # fmt: skip
    cast = None if recipe is None else recipe.fprop.lhs
    if cast is not None and (cast.is_delayed or cast.is_static or cast.is_stochastic):
        raise invalid_value("recipe", repr(recipe), "a recipe whose fprop casts x by x alone", "Use WeightOnly(...).")
    if cast is not None and cast.format.scale != rhs.format.scale:
        raise invalid_value(
            "rhs", f"{rhs.format} ({rhs.format.scale} scales) under {recipe!r}",
            f"a format of the family of {cast.format} ({cast.format.scale} scales), as which fprop casts lhs",
            "Quantize rhs for this recipe, or use WeightOnly(...).",
        )  # fmt: skip
    specs = _Spec(dimensions.dimension_numbers, out_sharding)
    options = {"order": dimensions.lhs_order, "cast": cast, "dtype": dtype, "backend": backend}
    return run_automatically(_transposed, specs, lhs, rhs, **options)


class _Spec(NamedTuple):
    """The partition of the product: that of `lax.dot_general` with the array that rhs stands for."""

    dimension_numbers: DimensionNumbers
    out_sharding: object

    def __call__(self, lhs: Array, rhs: QuantizedArray, **_: Any) -> PartitionSpec:
        sharding = NamedSharding(jax.typeof(rhs.codes).sharding.mesh, dequantized_spec(rhs))
        values = jax.ShapeDtypeStruct(rhs.shape, rhs.dtype, sharding=sharding)
        return spec_of_product(jax.typeof(lhs), values, *self)


def _transposed(
    lhs: Array, rhs: QuantizedArray, *, order: tuple[int, ...], cast: Cast | None, dtype: np.dtype, backend: str
) -> Array:  # fmt: skip
    return _multiply(lhs.transpose(order), rhs, cast, dtype, backend)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _multiply(x: Array, w: QuantizedArray, cast: Cast | None, dtype: np.dtype, backend: str) -> Array:
    """``x @ dequantize(w).T``, x [.., K]; under `cast` the product of x's codes."""
    shape = (*x.shape[:-1], w.codes.shape[0])
    a = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    a = a if cast is None else quantize(a, cast, backend=backend)
    return scaled_matmul(a, w, out_dtype=dtype, backend=backend).reshape(shape)


def _multiply_forward(
    x: Array, w: QuantizedArray, cast: Cast | None, dtype: np.dtype, backend: str
) -> tuple[Array, tuple[QuantizedArray, Array]]:
    return _multiply(x, w, cast, dtype, backend), (w, jnp.zeros((), x.dtype))


def _multiply_backward(
    cast: Cast | None, dtype: np.dtype, backend: str, kept: tuple[QuantizedArray, Array], dy: Array
) -> tuple[Array, None]:
    w, like = kept
    values = w.dequantize(dy.dtype)
    return jnp.dot(dy, values if w.axis % 2 else values.T).astype(like.dtype), None


_multiply.defvjp(_multiply_forward, _multiply_backward)
