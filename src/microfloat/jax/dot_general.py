"""`dot_general(recipe)`: lax.dot_general with the recipe's three GEMMs, as one custom differentiation rule.

    fprop: y_MN  = cast(x, K) . cast(w, K)
    dgrad: dx_MK = cast(dy, N) . cast(w, N)
    wgrad: dw_NK = cast(dy, M) . cast(x, M)

lhs is x, rhs is w. Shapes: M free axes of lhs, N free axes of rhs, K contracted axes, each merged into one in the
order given; every entry of the batch dimensions is a matrix of its own. A matrix that a GEMM reads has its contraction
axis last: fprop (x_MK, w_NK), dgrad (dy_MN, w_KN), wgrad (dy_NM, x_KM). Source: docs/numerics.md 6, docs/jax.md.
"""

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding
from jax.typing import DTypeLike

from microfloat.arguments import check_choice
from microfloat.errors import invalid_type, invalid_value
from microfloat.jax import scaling
from microfloat.jax.array import QuantizedArray, check_array, check_dtype, real_array
from microfloat.jax.autocast import recipe_here
from microfloat.jax.backends import casts, cuda, gemms, reference
from microfloat.jax.numerics.dimensions import DimensionNumbers, DotDimensions, canonical_dimensions, einsum_by
from microfloat.jax.numerics.random import call_seed
from microfloat.jax.numerics.scales import tensor_amax
from microfloat.jax.observing import observe_backward, observe_forward, seen_by_backward
from microfloat.jax.ops import check_backend
from microfloat.jax.scaling import DelayedState, Slot
from microfloat.jax.stored import times_stored
from microfloat.jax.transformations import (
    by_maximum,
    explicit_mesh,
    max_over,
    no_derivative,
    run_automatically,
    sharding_axes,
    spec_of_product,
    sum_to_type_of,
    told_axes,
    varying_axes,
)
from microfloat.operands import GEMMS, OPERANDS_OF, Operand
from microfloat.recipes import Recipe
from microfloat.recipes.names import as_recipe

__all__ = ["CODES_NAME", "OUTPUT_NAME", "SCALES_NAME", "DotGeneral", "Einsum", "dot_general", "einsum"]

# Names of the low-precision residuals and of a GEMM's result, for rematerialisation policies.
CODES_NAME, SCALES_NAME, OUTPUT_NAME = "microfloat_codes", "microfloat_scales", "microfloat_gemm_output"


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
    return DotGeneral(*checked_options(recipe, backend, axis_names, residuals))


def checked_options(
    recipe: Recipe | str | None, backend: str, axis_names: Sequence[str], residuals: str
) -> tuple[Recipe | None, str, tuple[str, ...], str]:
    """The fields of an op from the arguments of `dot_general`."""
    recipe = None if recipe is None else as_recipe(recipe)
    check_choice("residuals", residuals, ("low", "high"))
    names = (axis_names,) if isinstance(axis_names, str) else axis_names
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise invalid_type("axis_names", repr(names), "a tuple of names of mesh axes")
    return recipe, check_backend(backend), tuple(names), residuals


@dataclass(frozen=True)
class Op:
    """The fields of an op that runs the three GEMMs of a recipe: frozen, hashable."""

    recipe: Recipe | None = None
    backend: str = "auto"
    axis_names: tuple[str, ...] = ()
    residuals: str = "low"

    def config(self, recipe: Recipe, dtype: np.dtype, *, w_is_transposed: bool) -> "Config":
        """The static part of one call."""
        return Config(recipe, dtype, self.backend, self.axis_names, self.residuals, w_is_transposed)


def words_of(recipe: Recipe | None, key: Array | None, seed: Array | int | None = None) -> Array | np.ndarray | None:
    """The call seed's words; None for a recipe that draws nothing, and where there is neither key nor seed."""
    if recipe is None or not recipe.is_stochastic or (seed is None and key is None):
        return None
    return call_seed(seed, key, repr(recipe))


def check_state(recipe: Recipe, state: DelayedState | None, lead: tuple[int, ...] = ()) -> DelayedState | None:
    """`state`, if it is the one that `recipe` needs; `lead`: the leading axis of a stack of them."""
    first = f"scaling.init(recipe{', num_groups=G' if lead else ''})"
    if recipe.is_delayed and not isinstance(state, DelayedState):
        raise invalid_value(
            "state", "None" if state is None else type(state).__name__, f"a DelayedState for {recipe!r}",
            f"Make the first one with microfloat.jax.{first}.",
        )  # fmt: skip
    if not recipe.is_delayed and state is not None:
        raise invalid_value("state", type(state).__name__, f"None for {recipe!r}, which keeps no state")
    if state is not None:
        if state.rules != scaling.slot_rules(recipe):
            raise invalid_value("state", "a state made for another recipe", f"scaling.init({recipe!r})")
        scaling.check_slots(state, lead)
    return state


@dataclass(frozen=True)
class DotGeneral(Op):
    """The op that `dot_general` returns: frozen, hashable, callable."""

    def __call__(
        self, lhs: Array, rhs: Array | QuantizedArray, dimension_numbers: DimensionNumbers,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None, *, out_sharding: object = None,
        state: DelayedState | None = None, key: Array | None = None, seed: Array | int | None = None,
    ) -> Array:  # fmt: skip
        """``lax.dot_general(lhs, rhs, dimension_numbers)`` under the recipe; lhs are activations, rhs weights.

        Returns lhs's dtype, or `preferred_element_type`; gradients have the dtypes of their operands. `precision`
        is for high precision alone: the recipe's `accumulate` decides. Delayed scaling needs `state` (its gradient is
        the new state), stochastic rounding `key`, or `seed`, the call seed itself; without one a recipe that rounds
        only gradients stochastically runs forward.

        `rhs` may be a QuantizedArray whose blocks lie along the one axis that is contracted: a weight that is stored
        quantized. lhs is then cast as the recipe's fprop casts x, or used as it is where that is None, as under
        `WeightOnly`; dx is ``dy @ dequantize(rhs)``. Raises errors of microfloat.errors at trace time, among them
        NotSupportedError for a derivative of a gradient.
        """
        if isinstance(rhs, QuantizedArray):
            x = check_array("lhs", lhs)
            dtype = x.dtype if preferred_element_type is None else preferred_element_type
            dtype = check_dtype("preferred_element_type", dtype)
            options = recipe_here(self.recipe), dtype, self.backend, check_sharding(out_sharding)
            return place(times_stored(x, rhs, dimension_numbers, *options), out_sharding)
        words = words_of(recipe_here(self.recipe), key, seed)
        options = precision, preferred_element_type, out_sharding
        return self.threaded(lhs, rhs, dimension_numbers, *options, words=words, state=state)[0]

    def threaded(
        self, lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers, precision: Any = None,
        preferred_element_type: DTypeLike | None = None, out_sharding: Any = None, *,
        words: Array | np.ndarray | None = None, state: DelayedState | None = None,
    ) -> tuple[Array, DelayedState | None]:  # fmt: skip
        """(y, the state handed through) for the call seed's words; a later use in this step takes that state.

        Without words a stochastic recipe runs forward only, if its fprop is not stochastic.
        """
        recipe = recipe_here(self.recipe)
        if recipe is None:
            options = precision, preferred_element_type
            return lax.dot_general(lhs, rhs, dimension_numbers, *options, out_sharding=out_sharding), state
        lhs, rhs = check_array("lhs", lhs), check_array("rhs", rhs)
        dimensions = canonical_dimensions(lhs.shape, rhs.shape, dimension_numbers)
        dtype = check_dtype(
            "preferred_element_type", lhs.dtype if preferred_element_type is None else preferred_element_type
        )
        state = check_state(recipe, state)
        config = self.config(recipe, dtype, w_is_transposed=dimensions.rhs_is_transposed)
        specs = _Specs(dimensions.dimension_numbers, check_sharding(out_sharding))
        y, state = run_automatically(_apply, specs, lhs, rhs, words, state, config=config, dimensions=dimensions)
        return place(y, out_sharding), state

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
        y = self(
            lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type,
            state=DelayedState(frozen.x, frozen.w, dy, state.rules),
        )  # fmt: skip
        amaxes = {
            name: _live_amax(lax.stop_gradient(value), sharding_axes(value, self.axis_names))
            for name, value in (("x", lhs), ("w", rhs))
            if state.slot(name) is not None
        }
        return y, amaxes


def check_sharding(out_sharding: object) -> object:
    """`out_sharding` itself if it is a sharding, a partition, a format or None; else InvalidTypeError."""
    if out_sharding is None or isinstance(out_sharding, Sharding | PartitionSpec | Format):
        return out_sharding
    raise invalid_type("out_sharding", type(out_sharding), "a jax.sharding.NamedSharding, a PartitionSpec or None")


def place(y: Array, out_sharding: object) -> Array:
    """`y` with the sharding that was asked for; None leaves it alone."""
    if check_sharding(out_sharding) is None:
        return y
    constrain = lax.with_sharding_constraint if explicit_mesh(y) is None else jax.sharding.reshard
    return constrain(y, out_sharding)


def einsum(recipe: Recipe | str | None = None, **options: Any) -> "Einsum":
    """``einsum(recipe)(equation, lhs, rhs, ...)`` of two operands; the first is always x, the second w.

    `options` are those of `dot_general`.
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


# The differentiation rule over matrices


class Config(NamedTuple):
    """Everything static about one call; `w_is_transposed`: w_NK is the transpose of an array stored as [K, N]."""

    recipe: Recipe
    dtype: np.dtype
    backend: str
    axis_names: tuple[str, ...]
    residuals: str
    w_is_transposed: bool


class _Specs(NamedTuple):
    """The partitions of the results of `_apply`, as `run_automatically` asks for them."""

    dimension_numbers: DimensionNumbers
    out_sharding: object

    def __call__(self, lhs: Array, rhs: Array, *_: Any, **__: Any) -> tuple[PartitionSpec, PartitionSpec]:
        return spec_of_product(jax.typeof(lhs), jax.typeof(rhs), *self), PartitionSpec()


class Seed(NamedTuple):
    """The call seed's two words (None: nothing is stochastic), and the index of the matrix within a batch."""

    words: Array | np.ndarray | None
    batch: Array | int | None


@partial(jax.jit, static_argnames=("config", "dimensions"))
def _apply(
    lhs: Array, rhs: Array, words: Array | None, state: DelayedState | None, *, config: Config,
    dimensions: DotDimensions,
) -> tuple[Array, DelayedState | None]:  # fmt: skip
    x, w = dimensions.matrices(lhs, rhs)
    if not dimensions.batch:
        y, state = typing.cast(tuple, _linear(config, x, w, Seed(words, None), state))
    elif x.shape[0] == 0:
        y = jnp.zeros((0, x.shape[1], w.shape[1]), config.dtype)
    else:
        # Every entry of the batch is quantized alone, with its own tensor amax and `batch` word (numerics, Notation).
        index = None if words is None else jnp.arange(x.shape[0], dtype=jnp.uint32)
        each = jax.vmap(partial(_linear, config), in_axes=(0, 0, Seed(None, 0), None), out_axes=(0, None))
        y, state = each(x, w, Seed(words, index), state)
    return dimensions.result(y), state


class _Cast(NamedTuple):
    """Both operands of a tensor, the first as it lies, the second turned, and its live amax if a cast recorded it."""

    first: reference.Operand
    second: reference.Operand
    amax: Array | None


class Call:
    """One call's context: everything that the casts and the GEMMs of its six operands read.

    `apart`: mesh axes along which devices hold other matrices, not parts of these.
    """

    def __init__(
        self, config: Config, seed: Seed, state: DelayedState | None, apart: frozenset[str] = frozenset()
    ) -> None:
        self.config, self.seed, self.state, self._apart = config, seed, state, apart
        # The encode scales of this step: the update that the previous step left open.
        slots = [] if state is None else scaling.slots_of(state)
        lead = {tensor: slot.amax_history.shape[:-1] for tensor, slot, _ in slots}  # (), of a stacked state [G]
        scales = {} if state is None else scaling.encode_scales(state)
        self.scales = {tensor: scale.reshape(lead[tensor]) for tensor, scale in scales.items()}

    def cast(
        self, x_RC: Array, tensor: str, uses: tuple[bool, bool] = (True, True), *, keeps: bool = False,
        records: bool = False,
    ) -> _Cast:  # fmt: skip
        """The operands of the first and the second use; one that `uses` leaves out, or without a Cast, is the tensor.

        `keeps`: the second is kept for the backward, as codes, and without a Cast it stays as it is, so that `kept`
        sees it; else it is turned.
        """
        is_turned = tensor == "w" and self.config.w_is_transposed
        first, second = (
            self.cast_of(operand, x_RC.shape, decodes=decodes) if used else None
            for operand, used, decodes in zip(
                OPERANDS_OF[tensor], uses, (not self.reuses(tensor), not keeps), strict=True
            )
        )
        axes = self.axes(x_RC)
        made = casts.cast_both(
            x_RC.T if is_turned else x_RC, *((second, first) if is_turned else (first, second)),
            casts.CastInputs(*self.seed, None, self.scales.get(tensor)),
            axes=axes, records=records and tensor in self.scales and not axes, backend=self.config.backend,
        )  # fmt: skip
        row, column = (made.column, made.row) if is_turned else (made.row, made.column)
        if column is None:
            column = x_RC if keeps or not uses[1] else cuda.turned(x_RC)
        return _Cast(x_RC if row is None else row, column, made.amax)

    def axes(self, x: Array) -> frozenset[str]:
        """The mesh axes that shard a tensor."""
        return sharding_axes(x, self.config.axis_names) - self._apart

    def cast_of(self, operand: Operand, shape: tuple[int, ...], *, decodes: bool = False) -> casts.CastOf | None:
        """One operand as the recipe's table says, decoded if its GEMM multiplies in bfloat16; None without a Cast."""
        cast = self.config.recipe.cast(*operand.key)
        if cast is None:
            return None
        if operand.tensor == "dy":
            cast = cast.of_gradient
        if cast.is_stochastic:
            self.check_seed()
        gemm = getattr(self.config.recipe, operand.gemm)
        decoded = decodes and casts.decodes(gemm, cast, shape, self.config.backend)
        return casts.CastOf(cast, operand.stream, decoded)

    def keep(self, x_RC: Array, tensor: str) -> _Cast:
        """The operand of the first use, and as second what the backward keeps: codes, or the original if asked for."""
        if self.config.residuals == "high":
            return self.cast(x_RC, tensor, (True, False), records=True)
        made = self.cast(x_RC, tensor, (True, not self.reuses(tensor)), keeps=True, records=True)
        # The first too: a region that recomputes this product under `save_codes` recomputes no cast.
        first, second = (named(one) if isinstance(one, reference.Matrix) else one for one in made[:2])
        return made._replace(first=first, second=first if self.reuses(tensor) else second)

    def kept(self, kept: reference.Operand, tensor: str) -> reference.Operand:
        """The operand of the second use, from what `keep` saved."""
        if isinstance(kept, reference.Matrix):
            return kept
        reuses = self.reuses(tensor)
        made = self.cast(typing.cast(Array, kept), tensor, (reuses, not reuses))
        return made.first if reuses else made.second

    def read(self, name: str, b: reference.Operand, cols: int, dtype: np.dtype) -> reference.Operand:
        """The rhs of a backward GEMM from what `kept` gives: the [R, cols] that fprop has read is dequantized."""
        gemm = getattr(self.config.recipe, name)
        if not gemm.from_fprop:
            return b
        matrix = typing.cast(reference.Matrix, b)
        return reference.dequantize_matrix(matrix, gemm.rhs.format, None, cols).astype(dtype).T

    def reuses(self, tensor: str) -> bool:
        """True where backward reads what fprop has read of x or w, dequantized."""
        gemm = {"x": "wgrad", "w": "dgrad"}.get(tensor)
        return gemm is not None and getattr(self.config.recipe, gemm).from_fprop

    def gemm(
        self, name: str, a: reference.Operand, b: reference.Operand, cols: int, dtype: np.dtype, out: np.dtype
    ) -> Array:
        """One GEMM of the recipe, summed in float32, rounded once to `out`; `dtype` is the compute dtype."""
        gemm = getattr(self.config.recipe, name)
        operands = (None, None) if gemm.from_fprop else gemm.casts  # `b` is dequantized already
        kind_a, kind_b = (reference.kind_of(cast, cols) for cast in operands)
        plan = gemms.GemmPlan(kind_a, kind_b, gemm.accumulate, gemm.path, self.config.backend, dtype, out)
        return gemms.run_gemm(a, b, plan)

    def live_amax(self, x: Array, tensor: str, measure: Callable[[Array], Array] = tensor_amax) -> Array:
        """The amax of a tensor under delayed scaling in this step; `measure` is what one device sees of it."""
        rules = {name: rule for name, _, rule in scaling.slots_of(typing.cast(DelayedState, self.state))}
        return _live_amax(x, self.axes(x), self.state, measure, reduces=rules[tensor].delayed.reduce_amax)

    def check_seed(self) -> None:
        """InvalidValueError where a stochastic recipe has neither key nor seed."""
        if self.seed.words is None:
            recipe = f"{self.config.recipe!r}, which rounds stochastically"
            raise invalid_value(
                "key", "None, and no seed", f"key= (a jax.random key) or seed= for {recipe}",
                "linen takes rngs={'sr_rng': key}, which nn.scan and nn.vmap pass on with split_rngs={'sr_rng': True}; "
                "nnx.convert and nnx.Linear take rngs=nnx.Rngs(sr_rng=0). "
                "To switch it off: disable_stochastic_rounding=True, or rounding='nearest'.",
            )  # fmt: skip


class _Kept(NamedTuple):
    """Residuals: the rhs of dgrad and of wgrad (quantized, or the originals), seed, state, live amaxes.

    `no_x` [0, K] and `no_w` [0, K] are empty slices that carry the dtypes and the device variance of the primals.
    `seen`: columns of x and w that a watched function measures the products by.
    """

    w: reference.Operand
    x: reference.Operand
    seed: Seed
    state: DelayedState | None
    amaxes: dict[str, Array]
    no_x: Array
    no_w: Array
    seen: tuple[Array, Array] | None = None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(
    config: Config, x_MK: Array, w_NK: Array, seed: Seed, state: DelayedState | None
) -> tuple[Array, DelayedState | None]:
    """(y_MN = x @ w.T under ``config.recipe``, the state handed through).

    The cotangent of `state` is the new state, or the cotangent of the state handed through where that is larger: a
    second use that takes the latter contributes by maximum, never by sum.
    """
    call = Call(config, seed, state)
    check_shards(config.recipe, x_MK, w_NK, ("fprop",))
    x, w = (call.cast(value, tensor, (True, False)).first for value, tensor in ((x_MK, "x"), (w_NK, "w")))
    y_MN = call.gemm("fprop", x, w, x_MK.shape[1], x_MK.dtype, config.dtype)
    return observe_forward(call, x_MK, w_NK, y_MN, stage="forward"), state


def _forward(config: Config, x_MK: Array, w_NK: Array, seed: Seed, state: DelayedState | None) -> tuple[tuple, _Kept]:
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
    y_MN = observe_forward(call, x_MK, w_NK, y_MN, stage="kept")
    kept = _Kept(w.second, x.second, seed, state, amaxes, x_MK[:0], w_NK[:0], seen_by_backward(x_MK, w_NK))
    return (checkpoint_name(y_MN, OUTPUT_NAME), state), kept


# Codes have no derivative, so that of a gradient would be zeros.
differentiated_once = no_derivative(
    "grad: got a derivative of a gradient through a low-precision dot_general, needed a first derivative: codes have "
    "none. Compute this term with lax.dot_general, or put lax.stop_gradient around the arguments of the inner gradient."
)


def _backward(config: Config, kept: _Kept, cotangents: tuple) -> tuple[Array, Array, None, DelayedState | None]:
    dy_MN, later = cotangents
    dy_MN, no_x, no_w = differentiated_once((dy_MN, kept.no_x, kept.no_w))
    call = Call(config, kept.seed, kept.state)
    (rows, outputs), dtype = dy_MN.shape, no_x.dtype

    def product(name: str, a: reference.Operand, b: reference.Operand, cols: int, primal: Array) -> Array:
        # A product that is summed over mesh axes is rounded after that.
        b = call.read(name, b, primal.shape[1], dtype)
        summed = varying_axes(*jax.tree.leaves((a, b))) - varying_axes(primal)
        return call.gemm(name, a, b, cols, dtype, jnp.dtype(jnp.float32) if summed else primal.dtype)

    dy = call.cast(dy_MN, "dy", records=True)
    dx_MK = product("dgrad", dy.first, call.kept(kept.w, "w"), outputs, no_x)
    dw_NK = product("wgrad", dy.second, call.kept(kept.x, "x"), rows, no_w)
    gradients = sum_to_type_of(dx_MK, no_x).astype(no_x.dtype), sum_to_type_of(dw_NK, no_w).astype(no_w.dtype)
    dx_MK, dw_NK = observe_backward(call, kept.seen, dy_MN, (dx_MK, dw_NK), gradients)
    return dx_MK, dw_NK, None, state_cotangent(call, kept.amaxes, dy_MN, dy.amax, later)


_linear.defvjp(_forward, _backward)


def _live_amax(
    x: Array, axes: frozenset[str], state: DelayedState | None = None,
    measure: Callable[[Array], Array] = tensor_amax, *, reduces: bool = True,
) -> Array:  # fmt: skip
    """The amax of one tensor in this step, over all devices that share its state.

    Without `reduces` (``DelayedScaling(reduce_amax=False)``) it is the device's own, and so must the state be: else
    InvalidValueError.
    """
    apart = varying_axes(*jax.tree.leaves(state))
    if reduces:
        return max_over(measure(x), axes - apart)
    if shared := varying_axes(x) - apart:
        raise invalid_value(
            "state", f"one for all devices of mesh axes {sorted(shared)}",
            "a state per device with reduce_amax=False: every device keeps its own amaxes",
            "Stack the states, pass them with in_specs=P(axis) and index [0] inside; or use reduce_amax=True.",
        )  # fmt: skip
    return measure(x)


def named(matrix: reference.Matrix) -> reference.Matrix:
    """A quantized operand under the names that policies of `jax.checkpoint` know."""
    codes, scale, outer = matrix
    return reference.Matrix(
        checkpoint_name(codes, CODES_NAME), checkpoint_name(scale, SCALES_NAME),
        None if outer is None else checkpoint_name(outer, SCALES_NAME),
    )  # fmt: skip


def state_cotangent(
    call: Call, amaxes: dict[str, Array], dy_MN: Array, amax: Array | None, later: DelayedState | None
) -> DelayedState | None:
    """The new state, which travels as the gradient of the old: this step's scales, and the ring with live amaxes."""
    state = call.state
    if state is None or later is None:
        return None
    told = frozenset() if varying_axes(dy_MN) else told_axes(call.config.axis_names)
    slots: dict[str, Slot] = {}
    for tensor, slot, rule in scaling.slots_of(state):
        if tensor == "dy":
            amaxes = {**amaxes, "dy": call.live_amax(dy_MN, "dy") if amax is None else amax}
        recorded = scaling.record(scaling.advance(slot, rule), scaling.normal_amax(amaxes[tensor]))
        # `later` has the structure of `state`. A state of each device is not summed.
        incoming = typing.cast(Slot, later.slot(tensor))
        axes = told if rule.delayed.reduce_amax else frozenset()
        slots[tensor] = Slot(*map(partial(by_maximum, told=axes), recorded, slot, incoming))
    return scaling.state_of(slots, state.rules)


def check_shards(
    recipe: Recipe, x_MK: Array, w_NK: Array, names: tuple[str, ...], apart: frozenset[str] = frozenset()
) -> None:
    """Blocks must not cross the boundaries of shards: else InvalidValueError with the axis, the size and the block.

    Inside shard_map K is taken as sharded over the mesh axes that both operands vary over, M over those of x alone,
    N over those of w alone. What JAX cannot see (check_vma=False) is not checked. `apart`: see `Call`.
    """
    of_x, of_w = (varying_axes(value) - apart for value in (x_MK, w_NK))
    contracted = {
        "fprop": ("K", of_x & of_w, x_MK.shape[1]),
        "dgrad": ("N", of_w - of_x, w_NK.shape[0]),
        "wgrad": ("M", of_x - of_w, x_MK.shape[0]),
    }
    for name in names:
        letter, axes, size = contracted[name]
        gemm = getattr(recipe, name)
        for cast in gemm.casts:
            if cast is None or not axes or gemm.from_fprop:  # whose blocks are those of fprop
                continue
            block = max(cast.format.block[1] or 1, cast.hadamard.size if cast.hadamard is not None else 1)
            if size % block:
                raise invalid_value(
                    f"the contraction {letter} of {name}", f"shards of {size} over mesh axes {sorted(axes)}",
                    f"a multiple of the block, {block}, so that no block of {cast.format.name} is cut",
                    "Shard another axis, or choose sizes that divide. An operand that was gathered is known as whole "
                    "after lax.all_gather(..., to='invarying').",
                )  # fmt: skip


@jax.custom_vjp
def _amax_carrier(history: Array, gradient_slot: Array) -> Array:
    """`history`, whose newest amax becomes the gradient of `gradient_slot` instead of the history's own."""
    del gradient_slot
    return history


_amax_carrier.defvjp(
    lambda history, gradient_slot: (history, None),
    lambda _, cotangent: (jnp.zeros_like(cotangent), cotangent[0]),
)
