"""One call under a recipe: the casts and products of its operands, its seed, and its delayed-scaling state."""

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding
from jax.typing import DTypeLike

from microfloat.arguments import check_choice
from microfloat.errors import invalid_type, invalid_value
from microfloat.jax import scaling, transformations
from microfloat.jax.array import check_dtype
from microfloat.jax.backends import casts, cuda, gemms, reference
from microfloat.jax.numerics.random import call_seed, check_key
from microfloat.jax.numerics.scales import tensor_amax
from microfloat.jax.ops import check_backend
from microfloat.jax.scaling import DelayedState, Slot
from microfloat.operands import OPERANDS_OF, Operand
from microfloat.recipes import Recipe
from microfloat.recipes.names import as_recipe
from microfloat.routes import OperandSpec

# Names of the low-precision residuals and of a GEMM's result, for rematerialisation policies.
CODES_NAME, SCALES_NAME, OUTPUT_NAME = "microfloat_codes", "microfloat_scales", "microfloat_gemm_output"

# As JAX has its own: policies for `jax.checkpoint`. The first keeps the quantized operands (1 + 1/32 bytes per element
# and axis for MXFP8), the second the result of every GEMM; everything else is computed again.
checkpoint_policies = types.SimpleNamespace(
    save_codes=jax.checkpoint_policies.save_only_these_names(CODES_NAME, SCALES_NAME),
    save_gemm_outputs=jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME),
)


Axes = frozenset[str]
Words = Array | np.ndarray | None


class Config(NamedTuple):
    """Everything static about one call; `w_is_transposed`: w_NK is the transpose of an array stored as [K, N]."""

    recipe: Recipe
    dtype: np.dtype
    backend: str
    axis_names: tuple[str, ...]
    residuals: str
    w_is_transposed: bool


@dataclass(frozen=True)
class Op:
    """The fields of an op that runs the three GEMMs of a recipe: frozen, hashable."""

    recipe: Recipe | None = None
    backend: str = "auto"
    axis_names: tuple[str, ...] = ()
    residuals: str = "low"

    def __post_init__(self) -> None:
        names: Any = (self.axis_names,) if isinstance(self.axis_names, str) else self.axis_names
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise invalid_type("axis_names", repr(names), "a tuple of names of mesh axes")
        check_backend(self.backend)
        check_choice("residuals", self.residuals, ("low", "high"))
        object.__setattr__(self, "axis_names", tuple(names))
        object.__setattr__(self, "recipe", None if self.recipe is None else as_recipe(self.recipe))

    def config(self, recipe: Recipe, dtype: np.dtype, *, w_is_transposed: bool) -> Config:
        """The static part of one call."""
        return Config(recipe, dtype, self.backend, self.axis_names, self.residuals, w_is_transposed)


def words_of(recipe: Recipe | None, key: Array | None = None, seed: Array | int | None = None) -> Words:
    """The call seed's words; None for a recipe that draws nothing, and where there is neither key nor seed."""
    if key is not None:
        check_key(key)  # under any recipe, so that the next one does not refuse it
    if recipe is None or not recipe.is_stochastic or (seed is None and key is None):
        return None
    return call_seed(seed, key, repr(recipe))


def check_state(recipe: Recipe, state: DelayedState | None, lead: tuple[int, ...] = ()) -> DelayedState | None:
    """`state`, if `recipe` needs such a state; `lead`: the leading axis of a stack of states."""
    got = "None" if state is None else type(state).__name__
    if recipe.is_delayed and not isinstance(state, DelayedState):
        remedy = f"Make the first one with microfloat.jax.scaling.init(recipe{', num_groups=G' if lead else ''})."
        raise invalid_value("state", got, f"a DelayedState for {recipe!r}", remedy)
    if not recipe.is_delayed and state is not None:
        raise invalid_value("state", got, f"None for {recipe!r}, which keeps no state")
    if state is not None and state.rules != scaling.slot_rules(recipe):
        raise invalid_value("state", "a state made for another recipe", f"scaling.init({recipe!r})")
    if state is not None:
        scaling.check_slots(state, lead)
    return state


def result_dtype(lhs: Array, preferred_element_type: DTypeLike | None) -> np.dtype:
    """The dtype of a product: `preferred_element_type`, or the dtype of lhs without one."""
    dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
    return check_dtype("preferred_element_type", dtype)


def check_sharding(out_sharding: object) -> object:
    """`out_sharding` itself if it is a sharding, a partition, a format or None; else InvalidTypeError."""
    if out_sharding is None or isinstance(out_sharding, Sharding | PartitionSpec | Format):
        return out_sharding
    raise invalid_type("out_sharding", type(out_sharding), "a jax.sharding.NamedSharding, a PartitionSpec or None")


def place(y: Array, out_sharding: object) -> Array:
    """`y` with the sharding that was asked for; None leaves it alone."""
    if check_sharding(out_sharding) is None:
        return y
    constrain = lax.with_sharding_constraint if transformations.explicit_mesh(y) is None else jax.sharding.reshard
    return constrain(y, out_sharding)


class Seed(NamedTuple):
    """The call seed's two words (None: nothing is stochastic), and the index of the matrix within a batch."""

    words: Array | np.ndarray | None
    batch: Array | int | None


class _Cast(NamedTuple):
    """The operands of both uses of a tensor, and its amax if a cast recorded it."""

    first: reference.Operand
    second: reference.Operand
    amax: Array | None


class Call:
    """The context of one call; along the mesh axes `apart`, devices hold different matrices, not parts of one."""

    def __init__(self, config: Config, seed: Seed, state: DelayedState | None, apart: Axes = frozenset()) -> None:
        self.config, self.seed, self.state, self._apart = config, seed, state, apart
        # The encode scales of this step, () or of a stacked state [G]: the update that the previous step left open.
        self.scales = {} if state is None else scaling.encode_scales(state)

    def cast(
        self, x_RC: Array, tensor: str, uses: tuple[bool, bool] = (True, True), *, keeps: bool = False,
        records: bool = False,
    ) -> _Cast:  # fmt: skip
        """The operands of the first and the second use; one that `uses` leaves out, or without a Cast, is the tensor.
        `keeps`: the second is kept for the backward as codes, or as it is without a Cast; else it is turned."""
        is_turned = tensor == "w" and self.config.w_is_transposed
        at_once, axes = (not self.reuses(tensor), not keeps), self.axes(x_RC)
        first, second = (
            self.cast_of(operand, x_RC.shape, at_once=read) if used else None
            for operand, used, read in zip(OPERANDS_OF[tensor], uses, at_once, strict=True)
        )
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
        return transformations.sharding_axes(x, self.config.axis_names) - self._apart

    def cast_of(self, operand: Operand, shape: tuple[int, ...], *, at_once: bool = False) -> OperandSpec | None:
        """One operand as the recipe's table says, in the form that a kernel gives its GEMM; None without a Cast."""
        cast = self.config.recipe.cast(*operand.key)
        if cast is None:
            return None
        cast = cast.of_gradient if operand.tensor == "dy" else cast
        if cast.is_stochastic:
            self.check_seed()
        about = getattr(self.config.recipe, operand.gemm), operand.side, cast, shape, self.config.backend
        return OperandSpec(cast, casts.form_of(*about, at_once=at_once), stream=operand.stream)

    def keep(self, x_RC: Array, tensor: str) -> _Cast:
        """The operand of the first use, and the tensor that the backward keeps: codes, or the original if asked for."""
        if self.config.residuals == "high":
            return self.cast(x_RC, tensor, (True, False), records=True)
        made = self.cast(x_RC, tensor, (True, not self.reuses(tensor)), keeps=True, records=True)
        # The first too: a region that recomputes this product under `save_codes` recomputes no cast.
        first, second = (named(one) if isinstance(one, reference.Matrix) else one for one in made[:2])
        return made._replace(first=first, second=first if self.reuses(tensor) else second)

    def kept(self, kept: reference.Operand, tensor: str) -> reference.Operand:
        """The operand of the second use, from the tensor that `keep` saved."""
        if isinstance(kept, reference.Matrix):
            return kept
        reuses = self.reuses(tensor)
        made = self.cast(typing.cast(Array, kept), tensor, (reuses, not reuses))
        return made.first if reuses else made.second

    def read(self, name: str, b: reference.Operand, cols: int, dtype: np.dtype) -> reference.Operand:
        """The rhs of a backward GEMM from the result of `kept`: dequantized, if fprop has read it, [R, cols]."""
        gemm = getattr(self.config.recipe, name)
        if not gemm.from_fprop:
            return b
        matrix, kind = typing.cast(reference.Matrix, b), reference.kind_of(gemm.rhs, cols)
        route = gemms.route_of_plan(self._plan("fprop", cols, dtype, dtype), cuda.capability())
        form = route.rhs if name == "dgrad" else route.lhs
        if form != "codes":
            matrix, kind = reference.folded(matrix, typing.cast(reference.Kind, kind), form)
        fmt = typing.cast(reference.Kind, kind).format
        return reference.dequantize_matrix(matrix, fmt, None, cols).astype(dtype).T

    def reuses(self, tensor: str) -> bool:
        """True where backward reads the dequantized operand that fprop has read of x or w."""
        gemm = {"x": "wgrad", "w": "dgrad"}.get(tensor)
        return gemm is not None and getattr(self.config.recipe, gemm).from_fprop

    def gemm(
        self, name: str, a: reference.Operand, b: reference.Operand, cols: int, dtype: np.dtype, out: np.dtype
    ) -> Array:
        """One GEMM of the recipe, summed in float32, rounded once to `out`; `dtype` is the compute dtype."""
        return gemms.run_gemm(a, b, self._plan(name, cols, dtype, out))

    def _plan(self, name: str, cols: int, dtype: np.dtype, out: np.dtype) -> gemms.GemmPlan:
        gemm = getattr(self.config.recipe, name)
        operands = (None, None) if gemm.from_fprop else gemm.casts  # the right one is dequantized already
        kind_a, kind_b = (reference.kind_of(cast, cols) for cast in operands)
        is_turned = name == "wgrad" and self.config.w_is_transposed
        return gemms.GemmPlan(kind_a, kind_b, gemm.accumulate, gemm.path, self.config.backend, dtype, out, is_turned)

    def live_amax(self, x: Array, tensor: str, measure: Callable[[Array], Array] = tensor_amax) -> Array:
        """The amax of a tensor under delayed scaling in this step; `measure` gives the amax on one device."""
        slots = scaling.slots_of(typing.cast(DelayedState, self.state))
        reduces = next(rule.delayed.reduce_amax for name, _, rule in slots if name == tensor)
        return live_amax(x, self.axes(x), self.state, measure, reduces=reduces)

    def check_seed(self) -> None:
        """InvalidValueError where a stochastic recipe has neither key nor seed."""
        if self.seed.words is None:
            needed = f"key= (a jax.random key) or seed= for {self.config.recipe!r}, which rounds stochastically"
            raise invalid_value(
                "key", "None, and no seed", needed,
                "linen takes rngs={'sr_rng': key}, which nn.scan and nn.vmap pass on with split_rngs={'sr_rng': True}; "
                "nnx.convert and nnx.Linear take rngs=nnx.Rngs(sr_rng=0). "
                "To switch it off: disable_stochastic_rounding=True, or rounding='nearest'.",
            )  # fmt: skip


# Codes have no derivative, so that of a gradient would be zeros.
differentiated_once = transformations.no_derivative(
    "grad: got a derivative of a gradient through a low-precision dot_general, needed a first derivative: codes have "
    "none. Compute this term with lax.dot_general, or put lax.stop_gradient around the arguments of the inner gradient."
)


def live_amax(
    x: Array, axes: frozenset[str], state: DelayedState | None = None,
    measure: Callable[[Array], Array] = tensor_amax, *, reduces: bool = True,
) -> Array:  # fmt: skip
    """The amax of one tensor in this step, over all devices that share its state. Without `reduces` it is the device's
    own; InvalidValueError if the state is not."""
    apart = transformations.varying_axes(*jax.tree.leaves(state))
    if reduces:
        return transformations.max_over(measure(x), axes - apart)
    if shared := transformations.varying_axes(x) - apart:
        raise invalid_value(
            "state", f"one for all devices of mesh axes {sorted(shared)}",
            "a state per device with reduce_amax=False: every device keeps its own amaxes",
            "Stack the states, pass them with in_specs=P(axis) and index [0] inside; or use reduce_amax=True.",
        )  # fmt: skip
    return measure(x)


def named(matrix: reference.Matrix) -> reference.Matrix:
    """A quantized operand under the names that policies of `jax.checkpoint` know."""
    scale, outer = checkpoint_name((matrix.scale, matrix.tensor_scale), SCALES_NAME)
    return reference.Matrix(checkpoint_name(matrix.codes, CODES_NAME), scale, outer)


def state_cotangent(call: Call, amaxes: dict[str, Array], dy_MN: Array, amax: Array | None) -> DelayedState | None:
    """The new state, which travels as the gradient of the old: this step's scales, and the ring with live amaxes."""
    state = call.state
    if state is None:
        return None
    told = frozenset() if transformations.varying_axes(dy_MN) else transformations.told_axes(call.config.axis_names)
    slots: dict[str, Slot] = {}
    for tensor, slot, rule in scaling.slots_of(state):
        if tensor == "dy":
            amaxes = {**amaxes, "dy": call.live_amax(dy_MN, "dy") if amax is None else amax}
        recorded = scaling.record(scaling.advance(slot, rule), scaling.normal_amax(amaxes[tensor]))
        axes = told if rule.delayed.reduce_amax else frozenset()  # a state of each device is not summed
        slots[tensor] = Slot(*map(partial(transformations.by_maximum, told=axes), recorded, slot))
    return scaling.state_of(slots, state.rules)


def check_shards(recipe: Recipe, x_MK: Array, w_NK: Array, names: Sequence[str], apart: Axes = frozenset()) -> None:
    """InvalidValueError for blocks that the boundaries of shards cut inside shard_map; `apart`: see `Call`."""
    of_x, of_w = (transformations.varying_axes(value) - apart for value in (x_MK, w_NK))
    contracted = {"fprop": ("K", of_x & of_w, x_MK.shape[1]), "dgrad": ("N", of_w - of_x, w_NK.shape[0])}
    contracted["wgrad"] = "M", of_x - of_w, x_MK.shape[0]
    for name in names:
        letter, axes, size = contracted[name]
        gemm = getattr(recipe, name)
        # A GEMM that reads the operands of fprop has the blocks of fprop.
        for cast in gemm.casts if axes and not gemm.from_fprop else ():
            if cast is None:
                continue
            block = max(cast.format.block[1] or 1, cast.hadamard.size if cast.hadamard is not None else 1)
            if size % block:
                raise invalid_value(
                    f"the contraction {letter} of {name}", f"shards of {size} over mesh axes {sorted(axes)}",
                    f"a multiple of the block, {block}, so that no block of {cast.format.name} is cut",
                    "Shard another axis, or choose sizes that divide. An operand that was gathered is known as whole "
                    "after lax.all_gather(..., to='invarying').",
                )  # fmt: skip
