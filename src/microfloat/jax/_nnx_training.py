"""Training nnx models with delayed scaling: gradients that include the state, and the optimizer that advances it."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from flax import nnx
from jax import lax

from microfloat.errors import invalid_value
from microfloat.jax import scaling
from microfloat.jax._max_grad import fp32_max_grad
from microfloat.jax._nnx_modules import SLOT_NAMES, DotGeneral, ScaleState, value_of
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
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not all(isinstance(number, int) for number in numbers):
        raise invalid_value("argnums", argnums, "an int or a sequence of ints", "Give the filter as wrt=.")
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


class Optimizer(nnx.Optimizer):
    """`flax.nnx.Optimizer` that also advances the delayed-scaling state: same constructor and methods.

    ``update(model, grads)`` sends what `wrt` selects to optax, and the gradients of `ScaleState` to the consumer
    rule of `microfloat.jax.scaling.apply`. Gradients without that state log a warning: the scales would never move.
    """

    def update(self, model: nnx.Module, grads: Any, /, **kwargs: Any) -> Any:
        """One step; `grads` comes from `value_and_grad` or `grad` of this module."""
        updates = super().update(model, grads, **kwargs)
        missing = [name for name, op in _delayed_ops(model) if not _advance(op, grads, name)]
        if missing:
            _LOG.warning(
                "the gradients hold no delayed-scaling state for %s: scales do not move. "
                "Use microfloat.jax.nnx.value_and_grad, or nnx.DiffState(0, (nnx.Param, ScaleState)).",
                ", ".join(".".join(map(str, name)) for name in missing),
            )
        return updates


def _delayed_ops(model: nnx.Module) -> list[tuple[tuple, DotGeneral]]:
    return [
        (path, module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, DotGeneral) and module.recipe.is_delayed
    ]


def _advance(op: DotGeneral, grads: Any, path: tuple) -> bool:
    """Advance one op's state by its gradient; False if `grads` does not hold it."""
    node = grads
    for key in path:
        if key not in node:
            return False
        node = node[key]
    gradients = {}
    for tensor in op.variables():
        leaves = [f"{SLOT_NAMES[tensor]}_{kind}" for kind in ("scale", "amax_history")]
        if any(leaf not in node for leaf in leaves):
            return False
        values = (node[leaf] for leaf in leaves)
        gradients[tensor] = Slot(*(value_of(value) if isinstance(value, nnx.Variable) else value for value in values))
    old = cast(DelayedState, op.state())  # the recipe is delayed
    new = DelayedState(**{name: gradients.get(name) for name in TENSORS}, rules=old.rules)
    step = scaling.apply
    for _ in range(next(iter(gradients.values())).amax_history.ndim - 1):  # stacked layers have leading axes
        step = jax.vmap(step)
    for tensor, slot, _ in scaling.slots_of(step(old, new)):
        for variable, value in zip(op.variables()[tensor], slot, strict=True):
            variable.set_value(value)
    return True
