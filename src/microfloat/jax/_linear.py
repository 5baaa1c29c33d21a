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
from microfloat.jax._max_grad import from_max_grad
from microfloat.jax._scales import tensor_amax
from microfloat.jax.backends import cuda, reference, select
from microfloat.jax.scaling import DelayedState, Slot
from microfloat.recipes import Cast, Delayed, Recipe
from microfloat.recipes.core import GEMMS, OPERANDS

__all__ = ["CODES_NAME", "OUTPUT_NAME", "SCALES_NAME", "Config", "Seed", "amax_carrier", "linear", "live_amax"]

# Names of the low-precision residuals and of a GEMM's result, for rematerialisation policies.
CODES_NAME, SCALES_NAME, OUTPUT_NAME = "microfloat_codes", "microfloat_scales", "microfloat_gemm_output"

# The random streams of the six operands (docs/numerics.md 5.3).
_STREAMS = {operand: stream for stream, operand in enumerate(OPERANDS)}


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


# A tensor's use in fprop and the second use, in the backward, of x and w.
_FIRST_USE = {"x": ("fprop", "lhs"), "w": ("fprop", "rhs"), "dy": ("dgrad", "lhs")}
_SECOND_USE = {"x": ("wgrad", "rhs"), "w": ("dgrad", "rhs"), "dy": ("wgrad", "lhs")}


class _Call(NamedTuple):
    """One call's context: what the casts of all six operands read."""

    config: Config
    seed: Seed
    scales: dict[str, Array]

    def cast(self, x_RC: Array, tensor: str, operand: tuple[str, str]) -> reference.Operand:
        """The operand as the recipe's table says; without a Cast it stays as it is."""
        cast = self.config.recipe.cast(*operand)
        if cast is None:
            return x_RC
        noise = None
        if cast.is_stochastic:
            if self.seed.words is None:
                raise missing_key(self.config.recipe)
            noise = reference.Noise(
                self.seed.words, _STREAMS[operand], 0 if self.seed.batch is None else self.seed.batch
            )
        scale_enc = self.scales[tensor] if isinstance(cast.scaling, Delayed) else None
        axes = sharding_axes(x_RC, self.config.axis_names)
        if tensor == "w" and self.config.w_is_transposed and cast.transposes and cuda.converts(cast.format.element):
            # As it is stored: the codes are transposed, not what they are made of, and dgrad reads them as they are.
            matrix = reference.cast_matrix(x_RC.T, cast, noise, scale_enc=scale_enc, axes=axes)
            return reference.transposed(matrix, cast.format, x_RC.shape[0])
        if tensor == "w" and self.config.w_is_transposed and operand == _FIRST_USE["w"]:
            x_RC = cuda.row_major(x_RC)
        return reference.cast_matrix(x_RC, cast, noise, scale_enc=scale_enc, axes=axes)

    def is_shared(self, tensor: str) -> bool:
        """Whether the second cast is the transposed first: one set of codes serves both (docs/numerics.md 3.1)."""
        first, second = (self.config.recipe.cast(*use[tensor]) for use in (_FIRST_USE, _SECOND_USE))
        return first is not None and first == second and first.transposes

    def keep(self, x_RC: Array, tensor: str, first: reference.Operand) -> reference.Operand:
        """What is saved for the second use: shared codes, codes along the other axis, or the original."""
        second = _SECOND_USE[tensor]
        if self.config.recipe.cast(*second) is None or self.config.residuals == "high":
            return x_RC
        matrix = first if self.is_shared(tensor) else self.cast(cuda.turned(x_RC), tensor, second)
        codes, scale, tensor_scale = typing.cast(reference.Matrix, matrix)  # a Cast made it
        if tensor_scale is not None:
            tensor_scale = checkpoint_name(tensor_scale, SCALES_NAME)
        return reference.Matrix(checkpoint_name(codes, CODES_NAME), checkpoint_name(scale, SCALES_NAME), tensor_scale)

    def second_form(self, kept: reference.Operand, tensor: str, first_cols: int) -> reference.Operand:
        """The operand of the second use, from what `keep` saved; `first_cols`: contraction length of the first."""
        if not isinstance(kept, reference.Matrix):
            return self.cast(cuda.turned(kept), tensor, _SECOND_USE[tensor])
        if not self.is_shared(tensor):
            return kept
        second = typing.cast(Cast, self.config.recipe.cast(*_SECOND_USE[tensor]))  # shared, so not None
        return reference.transposed(kept, second.format, first_cols)

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
    x, w = call.cast(x_MK, "x", _FIRST_USE["x"]), call.cast(w_NK, "w", _FIRST_USE["w"])
    return call.gemm("fprop", x, w, x_MK.shape[1], x_MK.dtype, config.dtype), state


def _forward(config: Config, x_MK: Array, w_NK: Array, seed: Seed, state: DelayedState | None) -> tuple[tuple, Kept]:
    if config.recipe.is_stochastic and seed.words is None:
        raise missing_key(config.recipe)
    call = _Call(config, seed, _encode_scales(state))
    check_shards(config.recipe, x_MK, w_NK, GEMMS)
    x, w = call.cast(x_MK, "x", _FIRST_USE["x"]), call.cast(w_NK, "w", _FIRST_USE["w"])
    y_MN = call.gemm("fprop", x, w, x_MK.shape[1], x_MK.dtype, config.dtype)
    amaxes = {
        tensor: live_amax(value, config.axis_names, state)
        for tensor, value in (("x", x_MK), ("w", w_NK))
        if tensor in call.scales
    }
    kept = Kept(call.keep(w_NK, "w", w), call.keep(x_MK, "x", x), seed, state, amaxes, x_MK[:0], w_NK[:0])
    return (checkpoint_name(y_MN, OUTPUT_NAME), state), kept


def _backward(config: Config, kept: Kept, cotangents: tuple) -> tuple[Array, Array, None, DelayedState | None]:
    dy_MN, later = cotangents
    call = _Call(config, kept.seed, _encode_scales(kept.state))
    (rows, outputs), inputs, dtype = dy_MN.shape, kept.no_x.shape[1], kept.no_x.dtype
    dy = call.cast(dy_MN, "dy", _FIRST_USE["dy"])
    w_KN = call.second_form(kept.w, "w", inputs)
    dx_MK = call.gemm("dgrad", dy, w_KN, outputs, dtype, _gradient_dtype(kept.no_x, dy, w_KN))
    if call.is_shared("dy"):
        second = typing.cast(Cast, config.recipe.wgrad.lhs)
        dy_NM = reference.transposed(typing.cast(reference.Matrix, dy), second.format, outputs)
    else:
        dy_NM = call.cast(cuda.turned(dy_MN), "dy", _SECOND_USE["dy"])
    x_KM = call.second_form(kept.x, "x", inputs)
    dw_NK = call.gemm("wgrad", dy_NM, x_KM, rows, dtype, _gradient_dtype(kept.no_w, dy_NM, x_KM))
    dx_MK = sum_to_type_of(dx_MK, kept.no_x).astype(kept.no_x.dtype)
    dw_NK = sum_to_type_of(dw_NK, kept.no_w).astype(kept.no_w.dtype)
    return dx_MK, dw_NK, None, _state_cotangent(config, kept, dy_MN, later)


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


def live_amax(x: Array, axis_names: tuple[str, ...] = (), state: DelayedState | None = None) -> Array:
    """The amax of one tensor in this step, over all devices that share its state."""
    apart = varying_axes(*jax.tree.leaves(state))
    return max_over(tensor_amax(x.astype(jnp.float32)), sharding_axes(x, axis_names) - apart)


def _state_cotangent(config: Config, kept: Kept, dy_MN: Array, later: DelayedState | None) -> DelayedState | None:
    """The new state, which travels as the gradient of the old: this step's scales, and the ring with live amaxes."""
    state = kept.state
    if state is None:
        return None
    amaxes = {**kept.amaxes, "dy": live_amax(dy_MN, config.axis_names, state)}
    told = frozenset() if varying_axes(dy_MN) else told_axes(config.axis_names)
    slots: dict[str, Slot] = {}
    for tensor, slot, rule in scaling.slots_of(state):
        recorded = scaling.record(scaling.advance(slot, rule), amaxes[tensor])
        leaves = []
        handed = typing.cast(Slot, typing.cast(DelayedState, later).slot(tensor))  # of the structure of `state`
        for value, leaf, incoming in zip(recorded, slot, handed, strict=True):
            value = like_in_variance(once(lax.stop_gradient(value), from_max_grad(leaf)), leaf)
            value = jnp.maximum(value, from_max_grad(incoming))
            # Where JAX cannot see mesh axes it sums the cotangent over them: one device contributes.
            value = on_first_device(value, told) if told else value
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
