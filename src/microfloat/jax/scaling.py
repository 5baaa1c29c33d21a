"""Delayed scaling in JAX: state in, state out, as an explicit pytree (docs/numerics.md 3.3, docs/jax.md).

State travels as its own gradient: ``jax.grad`` of a loss with respect to the state of an op returns the new state. An
op may be used several times in a step, because the update of the encode scale is *deferred*: an op turns the history of
earlier steps into the scale it uses, then records its amax at index 0. So everything in a new state but
``amax_history[0]`` follows from the old state, and `apply` takes only that one number from the gradient.

Index 0 of a history is the newest amax, index 1 the oldest kept, the last index the second newest.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from microfloat.arguments import check_int
from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import ElementFormat
from microfloat.jax.array import real_array
from microfloat.jax.numerics.bits import INFINITY_BITS, as_float, bits_of, divide, magnitude_bits, where
from microfloat.jax.transformations import as_max_grad, from_max_grad, is_max_grad
from microfloat.operands import OPERANDS, TENSORS
from microfloat.recipes import Delayed, Recipe
from microfloat.recipes.names import as_recipe

__all__ = [
    "DelayedState", "Slot", "apply", "encode_scales", "init", "max_accumulate", "merge", "microbatched", "update",
]  # fmt: skip


# The collection of Flax whose gradient is its new value.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


class Slot(NamedTuple):
    """State of one tensor: the encode scale that was used last, float32 (), and its amaxes, float32 [L]."""

    scale_enc: Array
    amax_history: Array


class SlotRule(NamedTuple):
    """The static part of a slot."""

    element: ElementFormat
    delayed: Delayed


@partial(jax.tree_util.register_dataclass, data_fields=["x", "w", "dy"], meta_fields=["rules"])
@dataclass(frozen=True)
class DelayedState:
    """The delayed-scaling state of one op: a `Slot` for each tensor with a delayed cast, and the `rules` of all."""

    x: Slot | None
    w: Slot | None
    dy: Slot | None
    rules: tuple[SlotRule | None, ...]

    def slot(self, tensor: str) -> Slot | None:
        """The slot of "x", "w" or "dy"."""
        return getattr(self, tensor)


def slot_rules(recipe: Recipe) -> tuple[SlotRule | None, ...]:
    """For x, w and dy the rule of its first delayed cast, in the order of the six operands."""
    found: dict[str, SlotRule] = {}
    for operand in OPERANDS:
        cast = recipe.casts[operand.key]
        if cast is not None and isinstance(cast.scaling, Delayed):
            found.setdefault(operand.tensor, SlotRule(cast.format.element, cast.scaling))
    return tuple(found.get(tensor) for tensor in TENSORS)


def init(recipe: Recipe | str, num_groups: int | None = None) -> DelayedState:
    """The state before the first step: encode scales 1, histories 0; with `num_groups` a stack of them, for ragged_dot.
    InvalidValueError for a recipe without delayed scaling.
    """
    recipe = as_recipe(recipe)
    if not recipe.is_delayed:
        raise invalid_value("recipe", repr(recipe), "a recipe with delayed scaling", "This one needs no state.")
    rules, lead = slot_rules(recipe), () if num_groups is None else (check_int("num_groups", num_groups, 1, 2**31 - 1),)
    slots = {
        tensor: Slot(jnp.ones(lead, jnp.float32), jnp.zeros((*lead, rule.delayed.amax_history_len), jnp.float32))
        for tensor, rule in zip(TENSORS, rules, strict=True)
        if rule is not None
    }
    return state_of(slots, rules)


def advance(slot: Slot, rule: SlotRule) -> Slot:
    """The update at the end of the previous step: a new encode scale, and the rolled history with 0 at index 0."""
    history = from_max_grad(slot.amax_history)
    scale = next_scale(history, from_max_grad(slot.scale_enc), rule.element, rule.delayed)
    return Slot(scale, jnp.concatenate([jnp.zeros((1,), jnp.float32), history[2:], history[:1]])[: history.shape[0]])


def next_scale(history: Array, scale_enc: Array, element: ElementFormat, delayed: Delayed) -> Array:
    """``min(f32(f32(max / max(A, max * 2^-126)) * 2^-margin), 2^126)``; A = 0 or not finite keeps the scale."""
    algo = delayed.amax_compute_algo
    if callable(algo):
        amax_bits = magnitude_bits(jnp.asarray(algo(history), jnp.float32).reshape(()))
    else:
        bits = magnitude_bits(history)
        amax_bits = jnp.max(bits) if algo == "max" else bits[0]
    smallest = np.float32(element.max * 2.0**-126).view(np.uint32)
    ratio = divide(np.float32(element.max), as_float(jnp.maximum(amax_bits, smallest)))
    scale = jnp.minimum(ratio * np.float32(2.0**-delayed.margin), np.float32(2.0**126))
    usable = (amax_bits > 0) & (amax_bits < INFINITY_BITS)
    return where(usable, scale, scale_enc)


def record(slot: Slot, amax: Array) -> Slot:
    """``amax_history[0] = max(amax_history[0], amax)``; a non-finite amax records nothing."""
    live = jnp.maximum(_amax_bits(slot.amax_history[0]), _amax_bits(amax))
    return Slot(slot.scale_enc, slot.amax_history.at[0].set(as_float(live)))


def _amax_bits(amax: Array) -> Array:
    """The bits of an amax that may be recorded; 0 for one that is not finite, or negative."""
    bits = bits_of(amax)
    return where(bits < INFINITY_BITS, bits, np.uint32(0))


def normal_amax(amax: Array) -> Array:
    """The amax as a gradient can carry it: a subnormal one, which a CPU would flush, becomes 2^-126."""
    bits, smallest = bits_of(amax), np.uint32(1 << 23)
    return as_float(where((bits > 0) & (bits < smallest), smallest, bits))


def encode_scales(state: DelayedState) -> dict[str, Array]:
    """The encode scale that the next step will use, per tensor: ``code = round(x * scale_enc)``."""
    _check_state("state", state)
    return {
        tensor: _stacked(partial(advance, rule=rule), slot)(slot).scale_enc.reshape(slot.amax_history.shape[:-1])
        for tensor, slot, rule in slots_of(state)
    }


def _stacked(function: Callable[..., Any], slot: Slot) -> Callable[..., Any]:
    """A function of one slot, mapped over a stack of slots: layers of a scan, groups of a ragged_dot."""
    for _ in range(np.ndim(slot.amax_history) - 1):
        function = jax.vmap(function)
    return function


def apply(old: DelayedState, new: DelayedState) -> DelayedState:
    """The state for the next step, from the state of this one and its gradient (the consumer rule).

    Scale and ring are recomputed from `old`; only ``new.amax_history[0]`` is taken over, if it is finite. A slot
    whose gradient says that it was not used (scale 0 or not finite) keeps the old state.
    """
    _check_state("old", old)
    if not isinstance(new, DelayedState):
        raise invalid_type("new", type(new), "a DelayedState, the gradient with respect to `old`")

    def stepped(slot: Slot, gradient: Slot, rule: SlotRule) -> Slot:
        scale, amax = (from_max_grad(leaf) for leaf in (gradient.scale_enc, gradient.amax_history[0]))
        used = (scale > 0) & jnp.isfinite(scale)
        return Slot(*map(partial(where, used), record(advance(slot, rule), amax), slot))

    slots = {}
    for tensor, slot, rule in slots_of(old):
        gradient = new.slot(tensor)
        if gradient is None or np.shape(gradient.amax_history) != np.shape(slot.amax_history):
            raise invalid_value("new", f"another form in slot {tensor!r}", "the gradient with respect to `old`")
        slots[tensor] = _stacked(partial(stepped, rule=rule), slot)(slot, gradient)
    return state_of(slots, old.rules)


def update(state: DelayedState, amaxes: dict[str, Array]) -> DelayedState:
    """The state for the next step from the amaxes of this one, ``{"x": ..., "w": ..., "dy": ...}``, without autodiff.
    Tensors that `amaxes` does not name keep their state.
    """
    _check_state("state", state)
    if not isinstance(amaxes, Mapping):
        raise invalid_type("amaxes", type(amaxes), "a dict of amaxes by tensor, {'x': ..., 'w': ..., 'dy': ...}")
    unknown = set(amaxes) - {tensor for tensor, _, _ in slots_of(state)}
    if unknown:
        raise invalid_value("amaxes", f"names {sorted(unknown)}", "names of slots that this state has")
    slots = {tensor: slot for tensor, slot, _ in slots_of(state)}
    for tensor, slot, rule in slots_of(state):
        if tensor in amaxes:
            amax = real_array(f"amaxes[{tensor!r}]", amaxes[tensor])
            if amax.size != 1:
                raise invalid_value(f"amaxes[{tensor!r}]", f"shape {amax.shape}", "one float32")
            slots[tensor] = record(advance(slot, rule), amax.reshape(()))
    return state_of(slots, state.rules)


def merge(old: DelayedState, gradients: Iterable[DelayedState]) -> DelayedState:
    """N microbatches as one step: the histories roll once and take the largest amax of all `gradients`."""
    _check_state("old", old)
    gradients = listed(gradients, DelayedState)
    return apply(old, largest(gradients)) if gradients else old


def listed(gradients: Iterable[Any], kind: type) -> list[Any]:
    """A list of gradients of `kind`; InvalidTypeError for a single gradient and for other values."""
    is_one = isinstance(gradients, DelayedState | Mapping | jax.Array | np.ndarray | str)
    if is_one or not isinstance(gradients, Iterable):
        needed = "a list of gradients with respect to `old`, one per microbatch"
        raise invalid_type("gradients", type(gradients), needed)
    gradients = list(gradients)
    if wrong := [type(gradient) for gradient in gradients if not isinstance(gradient, kind)]:
        raise invalid_type("gradients", wrong[0], f"a {kind.__name__} each, the gradient with respect to `old`")
    return gradients


def largest(gradients: list[Any]) -> Any:
    """The elementwise maximum of gradients with respect to the same state, float32."""
    return jax.tree.map(lambda *leaves: jnp.max(jnp.stack([from_max_grad(one) for one in leaves]), axis=0), *gradients)


def microbatched(gradient: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`gradient`, a result of jax.grad or jax.value_and_grad, over `count` parts of its arguments behind the first.

    ``microbatched(jax.value_and_grad(loss), 4)(params, x, y)`` cuts x and y along their first axes and returns the mean
    over all parts, added up in float32, and of delayed-scaling state (a DelayedState, or Flax's collection or variables
    of it) the largest gradient: N microbatches are one step. A jax.random key of shape () gives every part a key of its
    own.
    """
    if not callable(gradient):
        raise invalid_type("gradient", type(gradient), "what jax.grad or jax.value_and_grad returned")
    check_int("count", count, 1, 2**31 - 1)

    def parts(leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) and not leaf.ndim:
            return jax.random.split(leaf, count)
        if not leaf.ndim or leaf.shape[0] % count:
            raise invalid_value("batch", f"an array of shape {leaf.shape}", f"first axes that {count} divides")
        return leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:])

    def each(combine: Callable[..., Array], keep: Callable[..., Array], *trees: Any) -> Any:
        def leaf(path: tuple, *leaves: Any) -> Any:
            names = (getattr(key, "key", None) for key in path)
            is_state = _is_state(leaves[0]) or OVERWRITE_WITH_GRADIENT in names
            return jax.tree.map(keep if is_state else combine, *leaves)

        return jax.tree_util.tree_map_with_path(leaf, *trees, is_leaf=_is_state)

    def run(params: Any, *batch: Any) -> Any:
        if not jax.tree.leaves(batch):
            needed = "the arguments behind the first, which are cut along their first axes"
            raise invalid_value("batch", "no arrays", needed)
        if any(map(_is_state, jax.tree.leaves(batch, is_leaf=_is_state))):
            raise invalid_value(
                "batch", "a DelayedState", "the state in the first argument, beside the parameters",
                "Write a loss of ((w, state), x, ...): every argument behind the first is cut along its first axis.",
            )  # fmt: skip
        split = jax.tree.map(parts, batch)
        shapes = jax.eval_shape(gradient, params, *jax.tree.map(lambda leaf: leaf[0], split))
        start = jax.tree.map(lambda one: jnp.zeros(one.shape, jnp.promote_types(one.dtype, jnp.float32)), shapes)

        def add(total: Any, batch: Any) -> tuple[Any, None]:
            return each(jnp.add, jnp.maximum, total, gradient(params, *batch)), None

        total, _ = jax.lax.scan(add, start, split)
        mean = each(lambda leaf: leaf / count, lambda leaf: leaf, total)
        return jax.tree.map(lambda leaf, one: leaf.astype(one.dtype), mean, shapes)

    return run


def _is_state(node: object) -> bool:
    """True for a DelayedState, and for a variable that holds a part of one, which its class says."""
    return isinstance(node, DelayedState) or getattr(type(node), "is_delayed_scaling_state", False)


def max_accumulate(state: DelayedState) -> DelayedState:
    """The state in a dtype whose gradients accumulate by maximum; cast it once, before all uses in the loss."""
    _check_state("state", state)
    return jax.tree.map(as_max_grad, state)


def _check_state(argument: str, state: object) -> None:
    if not isinstance(state, DelayedState):
        raise invalid_type(argument, type(state), "a DelayedState", "The first one comes from scaling.init(recipe).")


def check_slots(state: DelayedState, lead: tuple[int, ...] = ()) -> None:
    """InvalidValueError unless each slot has one encode scale and a history [L], float32 or the dtype of
    `max_accumulate`. `lead`: the leading axis of a stack of them.
    """
    for tensor, slot, _ in slots_of(state):
        fits = np.size(slot.scale_enc) == math.prod(lead) and slot.amax_history.shape[:-1] == lead
        if not fits or not all(leaf.dtype == jnp.float32 or is_max_grad(leaf) for leaf in slot):
            kinds, shapes = [str(leaf.dtype) for leaf in slot], [leaf.shape for leaf in slot]
            raise invalid_value(
                f"state.{tensor}", f"scale_enc and amax_history of {kinds}, shapes {shapes}",
                f"float32 of shapes {lead} and {(*lead, 'L')}",
                "Stacked states are for vmap and scan." if not lead else "Write scaling.init(recipe, num_groups=G).",
            )  # fmt: skip


def state_of(slots: Mapping[str, Slot], rules: tuple[SlotRule | None, ...]) -> DelayedState:
    """The state with these slots; None for the tensors that `slots` does not name."""
    return DelayedState(*(slots.get(tensor) for tensor in TENSORS), rules=rules)


def slots_of(state: DelayedState) -> list[tuple[str, Slot, SlotRule]]:
    """(tensor, slot, rule) of every slot that exists."""
    found = zip(TENSORS, map(state.slot, TENSORS), state.rules, strict=True)
    return [(tensor, slot, rule) for tensor, slot, rule in found if slot is not None and rule is not None]
