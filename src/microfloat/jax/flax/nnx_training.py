"""Training nnx models with delayed scaling: gradients that include the state, and the optimizer that advances it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from microfloat.errors import invalid_type, invalid_value
from microfloat.jax import scaling
from microfloat.jax._max_grad import fp32_max_grad
from microfloat.jax.flax.microbatches import check_transformation, chosen, has_stepped, larger, step_counts
from microfloat.jax.flax.nnx_modules import SLOT_NAMES, DotGeneral, ScaleState, value_of
from microfloat.jax.scaling import TENSORS, DelayedState, Slot

__all__ = ["Optimizer", "grad", "value_and_grad"]

_LOG = logging.getLogger("microfloat")


def value_and_grad(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """``nnx.value_and_grad`` with respect to `wrt` and the delayed-scaling state of the models at `argnums`.

    State of a layer that is used several times accumulates by maximum. Further options are those of
    nnx.value_and_grad.
    """
    return _differentiated(nnx.value_and_grad, f, argnums, wrt, has_aux=has_aux, **options)


def grad(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """``nnx.grad`` with respect to `wrt` and the delayed-scaling state; see `value_and_grad`."""
    return _differentiated(nnx.grad, f, argnums, wrt, has_aux=has_aux, **options)


def _differentiated(
    transform: Callable, f: Callable, argnums: int | Sequence[int], wrt: Any, **options: Any
) -> Callable:
    if not callable(f):
        raise invalid_type("f", type(f), "a function of the model")
    numbers = [argnums] if isinstance(argnums, int) else argnums
    if not isinstance(numbers, tuple | list) or not numbers or not all(type(number) is int for number in numbers):
        raise invalid_value("argnums", repr(argnums), "an int or a tuple of ints", "Give the filter as wrt=.")
    states = tuple(nnx.DiffState(number, (wrt, ScaleState)) for number in numbers)

    def accumulating(*args: Any, **kwargs: Any) -> Any:
        variables = [
            variable
            for number in numbers
            for _, module in nnx.iter_modules(args[number])
            if isinstance(module, DotGeneral)
            for pair in module.variables().values()
            for variable in pair
        ]
        originals = [value_of(variable) for variable in variables]
        for variable, value in zip(variables, originals, strict=True):
            variable.set_value(lax.convert_element_type(value, fp32_max_grad))
        try:
            return f(*args, **kwargs)
        finally:
            # The cast must not leave the loss function: its dtype exists for the gradient only.
            for variable, value in zip(variables, originals, strict=True):
                variable.set_value(value)

    return transform(accumulating, argnums=states[0] if isinstance(argnums, int) else states, **options)


class Collected(nnx.Variable):
    """The largest gradient of a delayed-scaling variable since the optimizer's last step."""


class Optimizer(nnx.Optimizer):
    """`flax.nnx.Optimizer` that also advances the delayed-scaling state: same constructor and methods.

    ``update(model, grads)`` sends what `wrt` selects to optax, and the gradients of `ScaleState` to the consumer
    rule of `microfloat.jax.scaling.apply`. Gradients without that state log a warning: the scales would never move.
    Under ``optax.MultiSteps`` the state advances when the optimizer steps, by the largest amax of its microbatches.
    """

    def __init__(self, model: nnx.Module, tx: Any, *, wrt: Any = nnx.Param, **options: Any) -> None:
        if not isinstance(model, nnx.Module):
            raise invalid_type("model", type(model), "an nnx.Module")
        check_transformation(tx)
        super().__init__(model, tx, wrt=wrt, **options)
        # Variable names of the delayed ops -> the largest gradients since the last step.
        self.collected = nnx.data({})
        if step_counts(self.opt_state):
            for name, op in _delayed_ops(model):
                for leaf, variable in _leaves(op).items():
                    self.collected[_key(name, leaf)] = Collected(jnp.zeros_like(value_of(variable)))

    def update(self, model: nnx.Module, grads: Any, /, **kwargs: Any) -> Any:
        """One step; `grads` comes from `value_and_grad` or `grad` of this module."""
        if not isinstance(model, nnx.Module):
            raise invalid_type("model", type(model), "the nnx.Module that is trained")
        if not isinstance(grads, Mapping) or not grads:
            got = type(grads) if not isinstance(grads, Mapping) else "no gradient"
            raise invalid_type("grads", got, "what value_and_grad or grad of this module returned")
        before = [value_of(count) for count in step_counts(self.opt_state)]
        updates = super().update(model, grads, **kwargs)
        stepped = has_stepped(before, [value_of(count) for count in step_counts(self.opt_state)]) if before else None
        missing = [name for name, op in _delayed_ops(model) if not self._advance(op, grads, name, stepped)]
        if missing:
            _LOG.warning(
                "the gradients hold no delayed-scaling state for %s: scales do not move. "
                "Use microfloat.jax.nnx.value_and_grad, or nnx.DiffState(0, (nnx.Param, ScaleState)).",
                ", ".join(".".join(map(str, name)) for name in missing),
            )
        return updates

    def _advance(self, op: DotGeneral, grads: Any, path: tuple, stepped: Array | None) -> bool:
        """Advance one op's state by its gradient; False if `grads` does not hold it. `stepped` None: always."""
        node = grads
        for key in path:
            if key not in node:
                return False
            node = node[key]
        variables = _leaves(op)
        if any(leaf not in node for leaf in variables):
            return False
        given = {leaf: node[leaf] for leaf in variables}
        gradients = {leaf: value_of(one) if isinstance(one, nnx.Variable) else one for leaf, one in given.items()}
        if stepped is not None:
            collected = {leaf: self.collected[_key(path, leaf)] for leaf in variables}
            gradients = larger(gradients, {leaf: value_of(variable) for leaf, variable in collected.items()})
            for leaf, variable in collected.items():
                variable.set_value(jnp.where(stepped, jnp.zeros_like(gradients[leaf]), gradients[leaf]))
        slots = {
            tensor: Slot(*(gradients[f"{SLOT_NAMES[tensor]}_{kind}"] for kind in ("scale", "amax_history")))
            for tensor in op.variables()
        }
        old = cast(DelayedState, op.state())  # the recipe is delayed
        new = DelayedState(**{name: slots.get(name) for name in TENSORS}, rules=old.rules)
        step = scaling.apply
        for _ in range(next(iter(slots.values())).amax_history.ndim - 1):  # stacked layers have leading axes
            step = jax.vmap(step)
        after = step(old, new)
        after = after if stepped is None else chosen(stepped, after, old)
        for tensor, slot, _ in scaling.slots_of(after):
            for variable, value in zip(op.variables()[tensor], slot, strict=True):
                variable.set_value(value)
        return True


def _delayed_ops(model: nnx.Module) -> list[tuple[tuple, DotGeneral]]:
    return [
        (path, module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, DotGeneral) and module.recipe.is_delayed
    ]


def _leaves(op: DotGeneral) -> dict[str, ScaleState]:
    """The state variables of an op by name."""
    return {
        f"{SLOT_NAMES[tensor]}_{kind}": variable
        for tensor, pair in op.variables().items()
        for kind, variable in zip(("scale", "amax_history"), pair, strict=True)
    }


def _key(path: tuple, leaf: str) -> str:
    return ".".join(map(str, (*path, leaf)))
