"""The three GEMMs and their six operands: one custom differentiation rule over matrices, driven by the recipe's table.

Shapes: x_MK activations, w_NK weights, y_MN = x @ w.T, dy_MN its cotangent. A matrix that a GEMM reads has its
contraction axis last: fprop (x_MK, w_NK), dgrad (dy_MN, w_KN), wgrad (dy_NM, x_KM). Source: docs/numerics.md 6.
"""

import typing
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from microfloat.errors import InvalidValueError, invalid_value
from microfloat.jax import scaling
from microfloat.jax._collectives import (
    like_in_variance,
    max_over,
    on_first_device,
    once,
    sharding_axes,
    sum_to_type_of,
    told_axes,
    varying_axes,
)
from microfloat.jax._derivatives import no_derivative
from microfloat.jax._max_grad import from_max_grad
from microfloat.jax.backends import casts, cuda, reference, select
from microfloat.jax.numerics.scales import tensor_amax
from microfloat.jax.scaling import DelayedState, Slot
from microfloat.operands import GEMMS, OPERANDS
from microfloat.recipes import Delayed, Recipe

__all__ = ["CODES_NAME", "OUTPUT_NAME", "SCALES_NAME", "Config", "Seed", "amax_carrier", "linear", "live_amax"]

# Names of the low-precision residuals and of a GEMM's result, for rematerialisation policies.
CODES_NAME, SCALES_NAME, OUTPUT_NAME = "microfloat_codes", "microfloat_scales", "microfloat_gemm_output"

# The random streams of the six operands (docs/numerics.md 5.3).
_STREAMS = {operand.key: operand.stream for operand in OPERANDS}


class Config(NamedTuple):
    """Everything static about one call."""

    recipe: Recipe
    dtype: np.dtype
    backend: str
    axis_names: tuple[str, ...]
    residuals: str
    # w_NK is the transpose of an array stored as [K, N]
    w_is_transposed: bool = False


class Seed(NamedTuple):
    """The call seed's two words (None: nothing is stochastic), and the index of the matrix within a batch."""

    words: Array | None
    batch: Array | int | None


class Kept(NamedTuple):
    """What the backward reads: the rhs of dgrad and of wgrad (quantized, or the originals), seed, state, live amaxes.

    `no_x` [0, K] and `no_w` [0, K] are empty slices that carry the dtypes and the device variance of the primals.
    """

    w: reference.Operand
    x: reference.Operand
    seed: Seed
    state: DelayedState | None
    amaxes: dict[str, Array]
    no_x: Array
    no_w: Array


# The GEMM operands that a tensor becomes: first in fprop (dy: dgrad), contracted over its second axis; then, over its
# first axis, in the backward.
_USES = {
    "x": (("fprop", "lhs"), ("wgrad", "rhs")),
    "w": (("fprop", "rhs"), ("dgrad", "rhs")),
    "dy": (("dgrad", "lhs"), ("wgrad", "lhs")),
}


class _Call(NamedTuple):
    """One call's context: what the casts of all six operands read."""

    config: Config
    seed: Seed
    scales: dict[str, Array]

    def first(self, x_RC: Array, tensor: str) -> reference.Operand:
        """The operand of the first use alone."""
        return self._cast(x_RC, tensor, (True, False))[0]

    def second(self, x_RC: Array, tensor: str) -> reference.Operand:
        """The operand of the second use alone."""
        return self._cast(x_RC, tensor, (False, True))[1]

    def both(self, x_RC: Array, tensor: str) -> tuple[reference.Operand, reference.Operand, Array | None]:
        """The operands of both uses, and the live amax of a tensor under delayed scaling."""
        return self._cast(x_RC, tensor, (True, True))

    def keep(self, x_RC: Array, tensor: str) -> tuple[reference.Operand, reference.Operand, Array | None]:
        """As `both`; the second is what the backward keeps: codes, or the original where that is asked for."""
        if self.config.residuals == "high":
            first, _, amax = self._cast(x_RC, tensor, (True, False), records=True)
            return first, x_RC, amax
        first, kept, amax = self._cast(x_RC, tensor, (True, True), keeps=True)
        if isinstance(kept, reference.Matrix):
            tensor_scale = kept.tensor_scale
            if tensor_scale is not None:
                tensor_scale = checkpoint_name(tensor_scale, SCALES_NAME)
            codes, scale = checkpoint_name(kept.codes, CODES_NAME), checkpoint_name(kept.scale, SCALES_NAME)
            kept = reference.Matrix(codes, scale, tensor_scale)
        return first, kept, amax

    def kept(self, kept: reference.Operand, tensor: str) -> reference.Operand:
        """The operand of the second use, from what `keep` saved."""
        return kept if isinstance(kept, reference.Matrix) else self.second(typing.cast(Array, kept), tensor)

    def _cast(
        self, x_RC: Array, tensor: str, uses: tuple[bool, bool], *, keeps: bool = False, records: bool | None = None
    ) -> tuple[reference.Operand, reference.Operand, Array | None]:
        """Both operands and the live amax; what `uses` does not ask for, or has no Cast, is the tensor itself.

        A tensor that is kept without a Cast stays as it is, so that `kept` sees it; else it is turned.
        """
        is_turned = tensor == "w" and self.config.w_is_transposed
        of_use = [
            self._cast_of(operand, x_RC.shape, decodes=not (keeps and second)) if used else None
            for second, (operand, used) in enumerate(zip(_USES[tensor], uses, strict=True))
        ]
        delayed = [one is not None and isinstance(one.cast.scaling, Delayed) for one in of_use]
        axes = sharding_axes(x_RC, self.config.axis_names)
        records = (all(uses) if records is None else records) and tensor in self.scales
        made: list[reference.Operand | None] = [None, None]
        amax = None
        together = [(0, 1)] if None in of_use or delayed[0] == delayed[1] else [(0,), (1,)]
        for group in together:
            wanted = [of_use[use] if use in group else None for use in (0, 1)]
            given = self._given(tensor, wanted)
            row, column = wanted[::-1] if is_turned else wanted
            operands = casts.cast_both(
                x_RC.T if is_turned else x_RC, row, column, given,
                axes=axes, records=records and not axes and amax is None, backend=self.config.backend,
            )  # fmt: skip
            pair = (operands.column, operands.row) if is_turned else (operands.row, operands.column)
            made = [old if new is None else new for old, new in zip(made, pair, strict=True)]
            amax = operands.amax if amax is None else amax
        unchanged = (x_RC, x_RC if keeps or not uses[1] else cuda.turned(x_RC))
        first, second = (other if one is None else one for one, other in zip(made, unchanged, strict=True))
        return first, second, amax

    def _cast_of(self, operand: tuple[str, str], shape: tuple[int, ...], *, decodes: bool) -> casts.CastOf | None:
        """One operand as the recipe's table says, decoded if its GEMM multiplies in bfloat16; None without a Cast."""
        cast = self.config.recipe.cast(*operand)
        if cast is None:
            return None
        if operand in _USES["dy"]:
            cast = cast.of_gradient
        if cast.is_stochastic and self.seed.words is None:
            raise missing_key(self.config.recipe)
        gemm = getattr(self.config.recipe, operand[0])
        decoded = decodes and casts.decodes(gemm, cast, shape, self.config.backend)
        return casts.CastOf(cast, _STREAMS[operand], decoded)

    def _given(self, tensor: str, wanted: list[casts.CastOf | None]) -> casts.Given:
        stochastic = any(one is not None and one.cast.is_stochastic for one in wanted)
        delayed = any(one is not None and isinstance(one.cast.scaling, Delayed) for one in wanted)
        return casts.Given(
            self.seed.words if stochastic else None, self.seed.batch if stochastic else None, None,
            self.scales[tensor] if delayed else None,
        )  # fmt: skip

    def gemm(
        self, name: str, a: reference.Operand, b: reference.Operand, cols: int, dtype: np.dtype, out: np.dtype
    ) -> Array:
        """One GEMM of the recipe, summed in float32, rounded once to `out`; `dtype` is the compute dtype."""
        gemm = getattr(self.config.recipe, name)
        kinds = [reference.kind_of(cast, cols) for cast in gemm.casts]
        plan = select.GemmPlan(kinds[0], kinds[1], gemm.accumulate, gemm.path, self.config.backend, dtype, out)
        return select.run_gemm(a, b, plan)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear(
    config: Config, x_MK: Array, w_NK: Array, seed: Seed, state: DelayedState | None
) -> tuple[Array, DelayedState | None]:
    """(y_MN = x @ w.T under ``config.recipe``, the state handed through).

    The cotangent of `state` is the new state, or the cotangent of the state handed through where that is larger: a
    second use that takes the latter contributes by maximum, never by sum.
    """
    call = _Call(config, seed, _encode_scales(state))
    check_shards(config.recipe, x_MK, w_NK, ("fprop",))
    x, w = call.first(x_MK, "x"), call.first(w_NK, "w")
    return call.gemm("fprop", x, w, x_MK.shape[1], x_MK.dtype, config.dtype), state


def _forward(config: Config, x_MK: Array, w_NK: Array, seed: Seed, state: DelayedState | None) -> tuple[tuple, Kept]:
    if config.recipe.is_stochastic and seed.words is None:
        raise missing_key(config.recipe)
    call = _Call(config, seed, _encode_scales(state))
    check_shards(config.recipe, x_MK, w_NK, GEMMS)
    x, kept_x, amax_x = call.keep(x_MK, "x")
    w, kept_w, amax_w = call.keep(w_NK, "w")
    y_MN = call.gemm("fprop", x, w, x_MK.shape[1], x_MK.dtype, config.dtype)
    amaxes = {
        tensor: live_amax(value, config.axis_names, state, reduces=_reduces(state)[tensor]) if amax is None else amax
        for tensor, value, amax in (("x", x_MK, amax_x), ("w", w_NK, amax_w))
        if tensor in call.scales
    }
    kept = Kept(kept_w, kept_x, seed, state, amaxes, x_MK[:0], w_NK[:0])
    return (checkpoint_name(y_MN, OUTPUT_NAME), state), kept


# Codes have no derivative, so that of a gradient would be zeros.
_differentiated_once = no_derivative(
    "grad: got a derivative of a gradient through a low-precision dot_general, needed a first derivative: codes have "
    "none. Compute this term with lax.dot_general, or put lax.stop_gradient around the arguments of the inner gradient."
)


def _backward(config: Config, kept: Kept, cotangents: tuple) -> tuple[Array, Array, None, DelayedState | None]:
    dy_MN, later = cotangents
    dy_MN, no_x, no_w = _differentiated_once((dy_MN, kept.no_x, kept.no_w))
    kept = kept._replace(no_x=no_x, no_w=no_w)
    call = _Call(config, kept.seed, _encode_scales(kept.state))
    (rows, outputs), dtype = dy_MN.shape, kept.no_x.dtype
    dy, dy_NM, amax = call.both(dy_MN, "dy")
    w_KN = call.kept(kept.w, "w")
    dx_MK = call.gemm("dgrad", dy, w_KN, outputs, dtype, _gradient_dtype(kept.no_x, dy, w_KN))
    x_KM = call.kept(kept.x, "x")
    dw_NK = call.gemm("wgrad", dy_NM, x_KM, rows, dtype, _gradient_dtype(kept.no_w, dy_NM, x_KM))
    dx_MK = sum_to_type_of(dx_MK, kept.no_x).astype(kept.no_x.dtype)
    dw_NK = sum_to_type_of(dw_NK, kept.no_w).astype(kept.no_w.dtype)
    return dx_MK, dw_NK, None, _state_cotangent(config, kept, dy_MN, amax, later)


linear.defvjp(_forward, _backward)


def _gradient_dtype(primal: Array, *operands: reference.Operand) -> np.dtype:
    """The primal's dtype; float32 for a product that is summed over mesh axes before it is rounded."""
    summed = varying_axes(*jax.tree.leaves(operands)) - varying_axes(primal)
    return jnp.dtype(jnp.float32) if summed else primal.dtype


def _encode_scales(state: DelayedState | None) -> dict[str, Array]:
    """The encode scale of this step per delayed tensor: the update that the previous step left open."""
    if state is None:
        return {}
    return {tensor: scale.reshape(()) for tensor, scale in scaling.encode_scales(state).items()}


def live_amax(
    x: Array, axis_names: tuple[str, ...] = (), state: DelayedState | None = None, *, reduces: bool = True
) -> Array:
    """The amax of one tensor in this step, over all devices that share its state.

    Without `reduces` (``DelayedScaling(reduce_amax=False)``) it is the device's own, and so must the state be: else
    InvalidValueError.
    """
    apart = varying_axes(*jax.tree.leaves(state))
    axes = sharding_axes(x, axis_names) - apart
    if reduces:
        return max_over(tensor_amax(x), axes)
    if shared := varying_axes(x) - apart:
        raise invalid_value(
            "state", f"one for all devices of mesh axes {sorted(shared)}",
            "a state per device with reduce_amax=False: every device keeps its own amaxes",
            "Stack the states, pass them with in_specs=P(axis) and index [0] inside; or use reduce_amax=True.",
        )  # fmt: skip
    return tensor_amax(x)


def _reduces(state: DelayedState | None) -> dict[str, bool]:
    """Whether the amax of a tensor under delayed scaling is the maximum over devices."""
    return {} if state is None else {name: rule.delayed.reduce_amax for name, _, rule in scaling.slots_of(state)}


def _state_cotangent(
    config: Config, kept: Kept, dy_MN: Array, amax: Array | None, later: DelayedState | None
) -> DelayedState | None:
    """The new state, which travels as the gradient of the old: this step's scales, and the ring with live amaxes."""
    state = kept.state
    if state is None:
        return None
    if amax is None:
        amax = live_amax(dy_MN, config.axis_names, state, reduces=_reduces(state).get("dy", True))
    amaxes = {**kept.amaxes, "dy": amax}
    told = frozenset() if varying_axes(dy_MN) else told_axes(config.axis_names)
    slots: dict[str, Slot] = {}
    for tensor, slot, rule in scaling.slots_of(state):
        recorded = scaling.record(scaling.advance(slot, rule), amaxes[tensor])
        leaves = []
        handed = typing.cast(Slot, typing.cast(DelayedState, later).slot(tensor))  # of the structure of `state`
        for value, leaf, incoming in zip(recorded, slot, handed, strict=True):
            value = like_in_variance(once(lax.stop_gradient(value), from_max_grad(leaf)), leaf)
            value = jnp.maximum(value, from_max_grad(incoming))
            # Where JAX cannot see mesh axes it sums the cotangent over them: one device contributes. A state of each
            # device is not summed.
            value = on_first_device(value, told) if told and rule.delayed.reduce_amax else value
            leaves.append(lax.convert_element_type(value, leaf.dtype))
        slots[tensor] = Slot(*leaves)
    return DelayedState(**{tensor: slots.get(tensor) for tensor in scaling.TENSORS}, rules=state.rules)


def check_shards(recipe: Recipe, x_MK: Array, w_NK: Array, gemms: tuple[str, ...]) -> None:
    """Blocks must not cross the boundaries of shards: else InvalidValueError with the axis, the size and the block.

    Inside shard_map K is taken as sharded over the mesh axes that both operands vary over, M over those of x alone,
    N over those of w alone. What JAX cannot see (check_vma=False) is not checked.
    """
    of_x, of_w = varying_axes(x_MK), varying_axes(w_NK)
    contracted = {
        "fprop": ("K", of_x & of_w, x_MK.shape[1]),
        "dgrad": ("N", of_w - of_x, w_NK.shape[0]),
        "wgrad": ("M", of_x - of_w, x_MK.shape[0]),
    }
    for name in gemms:
        letter, axes, size = contracted[name]
        for cast in getattr(recipe, name).casts:
            if cast is None:
                continue
            block = 1 if cast.format.block[1] is None else cast.format.block[1]
            block = block if cast.hadamard is None else max(block, cast.hadamard.size)
            if axes and size % block:
                raise invalid_value(
                    f"the contraction {letter} of {name}", f"shards of {size} over mesh axes {sorted(axes)}",
                    f"a multiple of the block, {block}, so that no block of {cast.format.name} is cut",
                    "Shard another axis, or choose sizes that divide. An operand that was gathered is known as whole "
                    "after lax.all_gather(..., to='invarying').",
                )  # fmt: skip


def missing_key(recipe: Recipe) -> InvalidValueError:
    """The error for a stochastic recipe without a key."""
    return invalid_value(
        "key", "None, and no seed", f"key= (a jax.random key) or seed= for {recipe!r}, which rounds stochastically",
        "linen takes rngs={'sr_rng': key}, nnx.convert and nnx.Linear rngs=nnx.Rngs(sr_rng=0). "
        "To switch it off: disable_stochastic_rounding=True, or rounding='nearest'.",
    )  # fmt: skip


@jax.custom_vjp
def amax_carrier(history: Array, gradient_slot: Array) -> Array:
    """`history`, whose newest amax becomes the gradient of `gradient_slot` instead of the history's own."""
    del gradient_slot
    return history


def _carrier_forward(history: Array, gradient_slot: Array) -> tuple[Array, None]:
    del gradient_slot
    return history, None


def _carrier_backward(_: None, cotangent: Array) -> tuple[Array, Array]:
    return jnp.zeros_like(cotangent), cotangent[0]


amax_carrier.defvjp(_carrier_forward, _carrier_backward)
