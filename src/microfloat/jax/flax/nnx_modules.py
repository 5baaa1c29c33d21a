"""The nnx module that runs a recipe, its state variables, and the layers that hold it."""

import weakref
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.extend.core import get_opaque_trace_state
from jax.typing import DTypeLike

from microfloat.errors import invalid_type, invalid_value
from microfloat.jax import scaling
from microfloat.jax._derivatives import notice_fixed_state
from microfloat.jax._dimensions import DimensionNumbers, parse_einsum
from microfloat.jax.dot_general import dot_general, place
from microfloat.jax.numerics.random import call_seed
from microfloat.jax.ops import check_array
from microfloat.jax.scaling import TENSORS, DelayedState, Slot
from microfloat.recipes import Recipe

__all__ = ["DotGeneral", "Einsum", "EinsumOp", "Linear", "LinearGeneral", "ScaleState"]

SLOT_NAMES: dict[str, str] = dict(zip(TENSORS, ("input", "kernel", "output_grad"), strict=True))


class ScaleState(nnx.Variable):
    """Delayed-scaling state: never a parameter; its gradient is its new value."""


class _Threaded(NamedTuple):
    """A slot that an earlier use handed through, valid for the same variable value in the same trace only."""

    value: Array
    trace: object
    slot: Slot


# Per module, what earlier uses in the current trace handed through. nnx transforms make modules anew; an entry lives
# no longer than its module.
_THREADED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class DotGeneral(nnx.Module):
    """A module that is called like `lax.dot_general` and runs `recipe`; for ``dot_general=`` of nnx layers.

    Delayed recipes hold six `ScaleState` variables, named as in linen. Stochastic recipes draw from the stream
    ``sr_rng`` of `rngs` (or its default stream); a ``key=`` of the call takes precedence. `stacked`: the leading axes
    of a layer whose variables are stacked for nnx.scan or nnx.vmap. Further arguments are those of
    `microfloat.jax.dot_general`.
    """

    def __init__(
        self, recipe: Recipe | str, *, rngs: nnx.Rngs | None = None, stacked: tuple[int, ...] = (), **options: Any
    ) -> None:
        self.op = dot_general(recipe, **options)
        recipe = self.op.recipe
        if not isinstance(stacked, tuple | list) or not all(isinstance(size, int) and size >= 0 for size in stacked):
            raise invalid_type("stacked", repr(stacked), "a tuple of sizes: the leading axes of stacked variables")
        stacked = tuple(stacked)
        self.sr_rng: Any = nnx.data(None)
        if rngs is not None and not isinstance(rngs, nnx.Rngs):
            raise invalid_type("rngs", type(rngs), "an nnx.Rngs", "For instance nnx.Rngs(sr_rng=0).")
        if recipe.is_stochastic and rngs is not None:
            if "sr_rng" not in rngs and "default" not in rngs:
                streams = ", ".join(name for name, value in vars(rngs).items() if isinstance(value, nnx.RngStream))
                raise invalid_value(
                    "rngs", f"an nnx.Rngs with the streams {streams or 'none'}",
                    f"a stream sr_rng or a default one for {recipe!r}, which rounds stochastically",
                    "For instance nnx.Rngs(0, sr_rng=1).",
                )  # fmt: skip
            stream = rngs["sr_rng"]
            self.sr_rng = stream.split(stacked) if stacked else stream.fork()
        if recipe.is_delayed:
            fresh = scaling.init(recipe)
            for tensor, slot, _ in scaling.slots_of(fresh):
                for kind, leaf in (("scale", slot.scale_enc.reshape(1)), ("amax_history", slot.amax_history)):
                    each = ScaleState(jnp.broadcast_to(leaf, (*stacked, *leaf.shape)))
                    setattr(self, f"{SLOT_NAMES[tensor]}_{kind}", each)

    @property
    def recipe(self) -> Recipe:
        """The recipe of this op."""
        return self.op.recipe

    def variables(self) -> dict[str, tuple[ScaleState, ScaleState]]:
        """(scale, history) variables per tensor; empty for stateless recipes."""
        if not self.recipe.is_delayed:
            return {}
        return {
            tensor: (
                getattr(self, f"{SLOT_NAMES[tensor]}_scale"),
                getattr(self, f"{SLOT_NAMES[tensor]}_amax_history"),
            )
            for tensor, rule in zip(TENSORS, scaling.slot_rules(self.recipe), strict=True)
            if rule is not None
        }

    def state(self) -> DelayedState | None:
        """The delayed-scaling state as a pytree, for `microfloat.jax.scaling`."""
        if not self.recipe.is_delayed:
            return None
        slots = {tensor: Slot(*(value_of(variable) for variable in pair)) for tensor, pair in self.variables().items()}
        return DelayedState(**{name: slots.get(name) for name in TENSORS}, rules=scaling.slot_rules(self.recipe))

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: object = None,
        key: Array | None = None,
    ) -> Array:
        """``lax.dot_general`` under the recipe; lhs are activations, rhs weights. `precision` is ignored."""
        del precision
        words = None
        if self.recipe.is_stochastic and (key is not None or self.sr_rng is not None):
            words = call_seed(None, self.sr_rng() if key is None else key, repr(self.recipe))
        state = self._current_state()
        if state is not None:
            rhs = notice_fixed_state(check_array("rhs", rhs), state)
        y, handed = self.op.threaded(lhs, rhs, dimension_numbers, preferred_element_type, words, state, out_sharding)
        self._hand_on(handed)
        return y

    def _current_state(self) -> DelayedState | None:
        state = self.state()
        if state is None:
            return None
        threaded, trace = _THREADED.get(self, {}), _trace()
        slots = {}
        for tensor, slot, _ in scaling.slots_of(state):
            entry = threaded.get(tensor)
            if entry is not None and entry.value is slot.amax_history and entry.trace == trace:
                slot = entry.slot
            slots[tensor] = slot
        return DelayedState(**{name: slots.get(name) for name in TENSORS}, rules=state.rules)

    def _hand_on(self, handed: DelayedState | None) -> None:
        if handed is None:
            return
        values = {tensor: value_of(pair[1]) for tensor, pair in self.variables().items()}
        trace = _trace()
        _THREADED[self] = {
            tensor: _Threaded(values[tensor], trace, slot) for tensor, slot, _ in scaling.slots_of(handed)
        }


class EinsumOp(DotGeneral):
    """A module called as ``einsum(equation, input, kernel)``; for ``einsum_op=`` of nnx.Einsum."""

    def __call__(  # type: ignore[override]
        self,
        equation: str,
        lhs: Array,
        rhs: Array,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: object = None,
        key: Array | None = None,
    ) -> Array:
        """The einsum of two operands under the recipe; the first is always the input, the second the kernel."""
        del precision
        lhs, rhs = check_array("lhs", lhs), check_array("rhs", rhs)
        plan = parse_einsum(equation, lhs.ndim, rhs.ndim)
        y = super().__call__(*plan.operands(lhs, rhs), plan.dimension_numbers, None, preferred_element_type, key=key)
        return place(plan.result(y), out_sharding)


def value_of(variable: nnx.Variable) -> Array:
    """The array in a variable."""
    return variable.get_value()


def _trace() -> object:
    return get_opaque_trace_state(convention="flax")


class Linear(nnx.Linear):
    """`flax.nnx.Linear` under `recipe` (None: as Flax runs it); same parameters, same names."""

    def __init__(
        self, in_features: int, out_features: int, *, recipe: Recipe | str | None = None, rngs: nnx.Rngs, **options: Any
    ) -> None:
        if recipe is not None:
            options["dot_general"] = DotGeneral(recipe, rngs=rngs)
        super().__init__(in_features, out_features, rngs=rngs, **options)


class LinearGeneral(nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` under `recipe`; same parameters, same names."""

    def __init__(
        self, in_features: Any, out_features: Any, *, recipe: Recipe | str | None = None, rngs: nnx.Rngs, **options: Any
    ) -> None:
        if recipe is not None:
            options["dot_general"] = DotGeneral(recipe, rngs=rngs)
        super().__init__(in_features, out_features, rngs=rngs, **options)


class Einsum(nnx.Einsum):
    """`flax.nnx.Einsum` under `recipe`; same parameters, same names."""

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Any,
        bias_shape: Any = None,
        *,
        recipe: Recipe | str | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if recipe is not None:
            options["einsum_op"] = EinsumOp(recipe, rngs=rngs)
        super().__init__(einsum_str, kernel_shape, bias_shape, rngs=rngs, **options)
