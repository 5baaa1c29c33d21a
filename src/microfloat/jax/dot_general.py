"""`dot_general(recipe)`: lax.dot_general with the recipe's three GEMMs, as one custom differentiation rule.

    fprop: y_MN  = cast(x, K) . cast(w, K)
    dgrad: dx_MK = cast(dy, N) . cast(w, N)
    wgrad: dw_NK = cast(dy, M) . cast(x, M)

lhs is x, rhs is w. Shapes: M free axes of lhs, N free axes of rhs, K contracted axes, each merged into one in the
order of the call; every entry of the batch dimensions is a matrix of its own. A matrix that a GEMM reads has its
contraction axis last: fprop (x_MK, w_NK), dgrad (dy_MN, w_KN), wgrad (dy_NM, x_KM). Source: docs/numerics.md 6.
"""

import math
import typing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from microfloat.errors import invalid_value
from microfloat.jax import calls, transformations
from microfloat.jax.array import QuantizedArray, as_matrix, check_array, dequantized_spec, real_array
from microfloat.jax.autocast import recipe_here
from microfloat.jax.backends import reference
from microfloat.jax.calls import Call, Config, Op, Seed, check_shards, check_state, place, words_of
from microfloat.jax.numerics.dimensions import DimensionNumbers, DotDimensions, canonical_dimensions, einsum_by
from microfloat.jax.observing import Blocks, observe_backward, observe_forward, seen_by_backward
from microfloat.jax.ops import quantize, scaled_matmul
from microfloat.jax.scaling import DelayedState, Slot
from microfloat.operands import GEMMS
from microfloat.recipes import Cast, Recipe
from microfloat.recipes.core import folds_beside


def dot_general(
    recipe: Recipe | str | None = None, *, backend: str = "auto", axis_names: tuple[str, ...] = (),
    residuals: str = "low",
) -> "DotGeneral":  # fmt: skip
    """An op with the signature of `lax.dot_general` that runs `recipe` (or the stock recipe of that name).

    None is the recipe of the `autocast` that the op is called or traced under, and high precision without one.
    `backend`: "auto", "reference" or "native". `axis_names`: under ``shard_map(check_vma=False)``, the mesh axes
    that shard the operands (otherwise JAX knows them). `residuals`: "low" keeps quantized operands for the
    backward, "high" the originals. Ops made from equal arguments are equal and hash equal, so they do not retrace.
    """
    return DotGeneral(recipe, backend, axis_names, residuals)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DotGeneral(Op):
    """The op that `dot_general` returns: frozen, hashable, callable."""

    def __call__(
        self, lhs: Array, rhs: Array | QuantizedArray, dimension_numbers: DimensionNumbers, precision: object = None,
        preferred_element_type: DTypeLike | None = None, *, out_sharding: object = None,
        state: DelayedState | None = None, key: Array | None = None, seed: Array | int | None = None,
    ) -> Array:  # fmt: skip
        """``lax.dot_general(lhs, rhs, dimension_numbers)`` under the recipe; lhs are activations, rhs weights.

        Returns lhs's dtype, or `preferred_element_type`; gradients have the dtypes of their operands. `precision`
        is for high precision alone. Delayed scaling needs `state` (its gradient is the new state), stochastic rounding
        `key`, or `seed`, the call seed itself; without one a recipe that rounds only gradients stochastically runs
        forward.

        `rhs` may be a QuantizedArray whose blocks lie along the one axis that is contracted: a weight that is stored
        quantized. lhs is then cast as the recipe's fprop casts x, or used as it is where that is None, as under
        `WeightOnly`; dx is ``dy @ dequantize(rhs)``. Raises errors of microfloat.errors at trace time, among them
        NotSupportedError for a derivative of a gradient.
        """
        if isinstance(rhs, QuantizedArray):
            y = self._times_stored(lhs, rhs, dimension_numbers, preferred_element_type, out_sharding)
            return place(y, out_sharding)
        words = words_of(recipe_here(self.recipe), key, seed)
        options = precision, preferred_element_type, out_sharding
        return self.with_words(lhs, rhs, dimension_numbers, *options, words=words, state=state)

    def with_words(
        self, lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers, precision: Any = None,
        preferred_element_type: DTypeLike | None = None, out_sharding: Any = None, *,
        words: Array | np.ndarray | None = None, state: DelayedState | None = None,
    ) -> Array:  # fmt: skip
        """The same with the words of the call seed; without them stochastic recipes run forward."""
        recipe = recipe_here(self.recipe)
        if recipe is None:
            options = precision, preferred_element_type
            return lax.dot_general(lhs, rhs, dimension_numbers, *options, out_sharding=out_sharding)
        lhs, rhs = check_array("lhs", lhs), check_array("rhs", rhs)
        dimensions = canonical_dimensions(lhs.shape, rhs.shape, dimension_numbers)
        dtype = calls.result_dtype(lhs, preferred_element_type)
        state = check_state(recipe, state)
        config = self.config(recipe, dtype, w_is_transposed=dimensions.rhs_is_transposed)
        specs = _Specs(dimensions.dimension_numbers, calls.check_sharding(out_sharding))
        static = {"config": config, "dimensions": dimensions}
        return place(transformations.run_automatically(_apply, specs, lhs, rhs, words, state, **static), out_sharding)

    def _times_stored(
        self, lhs: Array, rhs: QuantizedArray, dimension_numbers: DimensionNumbers, element_type: DTypeLike | None,
        out_sharding: object,
    ) -> Array:  # fmt: skip
        """The product with a stored weight, shaped [.., free axes of lhs, free axes of rhs]."""
        x, recipe = check_array("lhs", lhs), recipe_here(self.recipe)
        dtype = calls.result_dtype(x, element_type)
        dimensions = canonical_dimensions(x.shape, rhs.shape, dimension_numbers)
        is_one = rhs.ndim == 2 and len(dimensions.contracted) == 1 and not dimensions.batch
        if not is_one or dimensions.rhs_order[-1] != rhs.axis % 2:
            raise invalid_value(
                "dimension_numbers", f"{dimension_numbers} with a QuantizedArray of shape {rhs.shape}, axis {rhs.axis}",
                "one contracted axis of each, that of the blocks in rhs [N, K] or [K, N], and no batch axes",
                "Quantize rhs along the axis that is contracted.",
            )  # fmt: skip
        cast = None if recipe is None else recipe.fprop.lhs
        if cast is not None and (cast.is_delayed or cast.is_static or cast.is_stochastic):
            needed = "a recipe whose fprop casts x by x alone"
            raise invalid_value("recipe", repr(recipe), needed, "Use WeightOnly(...).")
        is_folded = recipe is not None and recipe.fprop.path == "folded"
        folds = cast is not None and is_folded and folds_beside(cast.format, rhs.format)
        if cast is not None and not folds and cast.format.scale != rhs.format.scale:
            raise invalid_value(
                "rhs", f"{rhs.format} ({rhs.format.scale} scales) under {recipe!r}",
                f"a format of the family of {cast.format} ({cast.format.scale} scales), as which fprop casts lhs",
                "Quantize rhs for this recipe, or use WeightOnly(...).",
            )  # fmt: skip
        specs = _Specs(dimensions.dimension_numbers, calls.check_sharding(out_sharding))
        options = {"order": dimensions.lhs_order, "static": (cast, dtype, self.backend)}
        return transformations.run_automatically(_apply_stored, specs, x, rhs, **options)

    def with_amax(
        self, lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers, *, state: DelayedState,
        gradient_slot: Array, preferred_element_type: DTypeLike | None = None,
    ) -> tuple[Array, dict[str, Array]]:  # fmt: skip
        """Delayed scaling without state in gradients: (y, amaxes of x and w) for `scaling.update`, outside autodiff.

        The gradient with respect to `gradient_slot`, a float32 zero, is the amax of dy.
        """
        recipe = recipe_here(self.recipe)
        if recipe is None or check_state(recipe, state) is None:
            raise invalid_value("recipe", repr(recipe), "a recipe with delayed scaling", "This one needs no amaxes.")
        slot = real_array("gradient_slot", gradient_slot)
        if slot.shape != ():
            raise invalid_value("gradient_slot", f"shape {slot.shape}", "a float32 zero of shape ()")
        frozen = lax.stop_gradient(state)
        dy = frozen.dy and Slot(frozen.dy.scale_enc, _amax_carrier(frozen.dy.amax_history, slot))
        frozen = DelayedState(frozen.x, frozen.w, dy, state.rules)
        y = self(lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type, state=frozen)
        tensors = {name: lax.stop_gradient(value) for name, value in (("x", lhs), ("w", rhs)) if state.slot(name)}
        axes = partial(transformations.sharding_axes, axis_names=self.axis_names)
        return y, {name: calls.live_amax(value, axes(value)) for name, value in tensors.items()}


def einsum(recipe: Recipe | str | None = None, **options: Any) -> "Einsum":
    """``einsum(recipe)(equation, lhs, rhs, ...)`` of two operands, first x, then w; `options` are those of
    `dot_general`.
    """
    return Einsum(dot_general(recipe, **options))


@dataclass(frozen=True)
class Einsum:
    """The op that `einsum` returns: frozen, hashable, callable."""

    op: DotGeneral

    def __call__(
        self, equation: str, lhs: Array, rhs: Array, precision: Any = None,
        preferred_element_type: DTypeLike | None = None, *, out_sharding: Any = None, **options: Any,
    ) -> Array:  # fmt: skip
        """The einsum of two operands under the recipe; `options` are `state`, `key` and `seed` of `DotGeneral`."""
        numbers = {"precision": precision, "preferred_element_type": preferred_element_type}
        if recipe_here(self.op.recipe) is None:
            return jnp.einsum(equation, lhs, rhs, **numbers, out_sharding=out_sharding)
        dot = partial(self.op, **numbers, **options)
        return place(einsum_by(dot, equation, check_array("lhs", lhs), check_array("rhs", rhs)), out_sharding)


class _Specs(NamedTuple):
    """The partitions of the results of `_apply` and of `_apply_stored`, as `run_automatically` asks for them."""

    dimension_numbers: DimensionNumbers
    out_sharding: object

    def __call__(self, lhs: Array, rhs: Array | QuantizedArray, *_: Any, **__: Any) -> Any:
        if isinstance(rhs, QuantizedArray):
            sharding = NamedSharding(jax.typeof(rhs.codes).sharding.mesh, dequantized_spec(rhs))
            values = jax.ShapeDtypeStruct(rhs.shape, rhs.dtype, sharding=sharding)
            return transformations.spec_of_product(jax.typeof(lhs), values, *self)
        return transformations.spec_of_product(jax.typeof(lhs), jax.typeof(rhs), *self)


@partial(jax.jit, static_argnames=("config", "dimensions"))
def _apply(
    lhs: Array, rhs: Array, words: Array | None, state: DelayedState | None, *, config: Config,
    dimensions: DotDimensions,
) -> Array:  # fmt: skip
    x, w = dimensions.matrices(lhs, rhs)
    if not dimensions.batch:
        y = _linear(config, x, w, Seed(words, None), state)
    elif x.shape[0] == 0:
        y = jnp.zeros((0, x.shape[1], w.shape[1]), config.dtype)
    else:
        # Every entry of the batch is quantized alone, with its own tensor amax and `batch` word (numerics, Notation).
        index = None if words is None else jnp.arange(x.shape[0], dtype=jnp.uint32)
        each = jax.vmap(partial(_linear, config), in_axes=(0, 0, Seed(None, 0), None))
        y = each(x, w, Seed(words, index), state)
    return dimensions.result(typing.cast(Array, y))


class _Kept(NamedTuple):
    """Residuals; `no_x`, `no_w`: empty slices [0, K] with the dtypes and the variance of the primals."""

    w: reference.Operand
    x: reference.Operand
    seed: Seed
    state: DelayedState | None
    amaxes: dict[str, Array]
    no_x: Array
    no_w: Array
    seen: tuple[Array, Array] | None = None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(config: Config, x_MK: Array, w_NK: Array, seed: Seed, state: DelayedState | None) -> Array:
    """``y_MN = x @ w.T`` under ``config.recipe``; the cotangent of `state` is the new state."""
    call = Call(config, seed, state)
    check_shards(config.recipe, x_MK, w_NK, ("fprop",))
    x, w = (call.cast(value, tensor, (True, False)).first for value, tensor in ((x_MK, "x"), (w_NK, "w")))
    y_MN = call.gemm("fprop", x, w, x_MK.shape[1], x_MK.dtype, config.dtype)
    return observe_forward(Blocks.of(call), x_MK, w_NK, y_MN, y_MN, stage="forward")


def _forward(config: Config, x_MK: Array, w_NK: Array, seed: Seed, state: DelayedState | None) -> tuple[Array, _Kept]:
    call = Call(config, seed, state)
    if config.recipe.is_stochastic:
        call.check_seed()
    check_shards(config.recipe, x_MK, w_NK, GEMMS)
    x, w = call.keep(x_MK, "x"), call.keep(w_NK, "w")
    y_MN = call.gemm("fprop", x.first, w.first, x_MK.shape[1], x_MK.dtype, config.dtype)
    amaxes = {
        tensor: call.live_amax(value, tensor) if made.amax is None else made.amax
        for tensor, value, made in (("x", x_MK, x), ("w", w_NK, w))
        if tensor in call.scales
    }
    y_MN = observe_forward(Blocks.of(call), x_MK, w_NK, y_MN, y_MN, stage="kept")
    kept = _Kept(w.second, x.second, seed, state, amaxes, x_MK[:0], w_NK[:0], seen_by_backward(x_MK, w_NK))
    return checkpoint_name(y_MN, calls.OUTPUT_NAME), kept


def _backward(config: Config, kept: _Kept, dy_MN: Array) -> tuple[Array, Array, None, DelayedState | None]:
    dy_MN, no_x, no_w = calls.differentiated_once((dy_MN, kept.no_x, kept.no_w))
    call = Call(config, kept.seed, kept.state)
    (rows, outputs), dtype = dy_MN.shape, no_x.dtype

    def product(name: str, a: reference.Operand, b: reference.Operand, cols: int, primal: Array) -> Array:
        # A product that is summed over mesh axes is rounded after that.
        b = call.read(name, b, primal.shape[1], dtype)
        summed = transformations.varying_axes(*jax.tree.leaves((a, b))) - transformations.varying_axes(primal)
        return call.gemm(name, a, b, cols, dtype, jnp.dtype(jnp.float32) if summed else primal.dtype)

    dy = call.cast(dy_MN, "dy", records=True)
    dx_MK = product("dgrad", dy.first, call.kept(kept.w, "w"), outputs, no_x)
    dw_NK = product("wgrad", dy.second, call.kept(kept.x, "x"), rows, no_w)
    gradients = transformations.sum_to_type_of(dx_MK, no_x), transformations.sum_to_type_of(dw_NK, no_w)
    dx_MK, dw_NK = observe_backward(Blocks.of(call), kept.seen, dy_MN, (dx_MK, dw_NK), gradients)
    return dx_MK, dw_NK, None, calls.state_cotangent(call, kept.amaxes, dy_MN, dy.amax)


_linear.defvjp(_forward, _backward)


# `history`, whose newest amax becomes the gradient of the second argument instead of the history's own.
_amax_carrier = jax.custom_vjp(lambda history, gradient_slot: history)
_amax_carrier.defvjp(lambda history, _: (history, None), lambda _, g: (jnp.zeros_like(g), g[0]))


# The product with a weight that is stored quantized: ``y = x @ dequantize(w).T``, differentiable in x


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _multiply(x: Array, w: QuantizedArray, cast: Cast | None, dtype: np.dtype, backend: str) -> Array:
    """``x @ dequantize(w).T``, x [.., K]; under `cast` the product of x's codes, by w folded to rows of FP8 where that
    cast is one of rows and w has the scales of blocks (docs/numerics.md 9.5)."""
    a = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    a = a if cast is None else quantize(a, cast, backend=backend)
    if cast is not None and cast.format.scale != w.format.scale:
        made, kind = reference.folded(as_matrix(w), reference.Kind(w.format, w.hadamard, w.axis_size), "rows")
        w = QuantizedArray(*made, kind.format, -1, w.axis_size, w.hadamard, w.dtype, 0)
    return scaled_matmul(a, w, out_dtype=dtype, backend=backend).reshape(*x.shape[:-1], w.codes.shape[0])


def _multiply_backward(_cast: Cast | None, _dtype: np.dtype, _backend: str, kept: tuple, dy: Array) -> tuple:
    w, like = kept
    values = w.dequantize(dy.dtype)
    return jnp.dot(dy, values if w.axis % 2 else values.T).astype(like.dtype), None


_multiply.defvjp(lambda x, w, *static: (_multiply(x, w, *static), (w, jnp.zeros((), x.dtype))), _multiply_backward)


def _apply_stored(lhs: Array, rhs: QuantizedArray, *, order: tuple[int, ...], static: tuple) -> Array:
    return _multiply(lhs.transpose(order), rhs, *static)
