"""Optimizers that step once per several gradients (optax.MultiSteps): when they do, and what is collected until then.

A step's new delayed-scaling state follows from the largest amax of all its microbatches, and rolls the history once.
optax is not imported: the state of a MultiSteps is known by its fields.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from microfloat.errors import NotSupportedError, invalid_type
from microfloat.jax._max_grad import from_max_grad

__all__ = ["check_transformation", "chosen", "has_stepped", "larger", "refuse_multi_steps_outside", "step_counts"]


def check_transformation(tx: object) -> None:
    """InvalidTypeError for anything but an optax transformation, which is known by its two functions."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise invalid_type("tx", type(tx), "an optax transformation such as optax.adam(1e-3)")


def _is_multi_steps(node: Any) -> bool:
    return hasattr(node, "mini_step") and hasattr(node, "gradient_step")


def step_counts(opt_state: Any) -> list[Any]:
    """The step counter of every MultiSteps in an optimizer's state; none for an optimizer that always steps."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_multi_steps)
    return [node.gradient_step for node in nodes if _is_multi_steps(node)]


def has_stepped(before: list[Any], after: list[Any]) -> Array:
    """True where any of the counters has moved."""
    return jnp.any(jnp.stack([old != new for old, new in zip(before, after, strict=True)]))


def larger(gradient: Any, collected: Any) -> Any:
    """Elementwise maximum of two gradients with respect to the same state, float32."""
    return jax.tree.map(lambda leaf, so_far: jnp.maximum(from_max_grad(leaf), so_far), gradient, collected)


def chosen(stepped: Array, after: Any, before: Any) -> Any:
    """`after` where the optimizer has stepped, else `before`."""
    return jax.tree.map(lambda new, old: jnp.where(stepped, new, old), after, before)


def refuse_multi_steps_outside() -> None:
    """NotSupportedError if an optax.MultiSteps calls this: it would hand on an average of amaxes."""
    frame = sys._getframe(1)
    while frame is not None:
        if type(frame.f_locals.get("self")).__name__ == "MultiSteps" and frame.f_code.co_name == "init":
            raise NotSupportedError(
                "overwrite_with_gradient: got optax.MultiSteps around it, which averages amaxes, needed it outside, "
                "where it takes their maximum. Write overwrite_with_gradient(optax.MultiSteps(tx, k))."
            )
        frame = frame.f_back
