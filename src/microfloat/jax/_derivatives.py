"""Identities that say something where JAX differentiates through them, and cost nothing where it does not."""

import warnings
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
from jax import Array
from jax.custom_derivatives import SymbolicZero

from microfloat.errors import NotSupportedError

__all__ = ["no_derivative", "notice_fixed_state", "straight_through"]

_Tree = TypeVar("_Tree")


def no_derivative(message: str) -> Callable[[_Tree], _Tree]:
    """An identity over a pytree, for use under jit; differentiating it, in any mode, is NotSupportedError(message)."""

    @jax.custom_jvp
    def identity(tree: _Tree) -> _Tree:
        return tree

    @identity.defjvp
    def refuse(_primals: tuple, _tangents: tuple) -> NoReturn:
        raise NotSupportedError(message)

    return identity


@jax.custom_jvp
def straight_through(exact: Array, plain: Array) -> Array:
    """`exact`, differentiated as `plain` is: bits have no derivative."""
    del plain
    return exact


@straight_through.defjvp
def _straight_through_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return straight_through(*primals), tangents[1].astype(primals[0].dtype)


@jax.custom_vjp
def notice_fixed_state(w: Array, state: Any) -> Array:
    """`w`; a warning where a gradient is taken of w and of no leaf of the delayed-scaling state."""
    del state
    return w


def _forward(w: Any, state: Any) -> tuple[Array, None]:
    if w.perturbed and not any(leaf.perturbed for leaf in jax.tree.leaves(state, is_leaf=_is_primal)):
        warnings.warn(
            "a gradient is taken with respect to parameters but not to the delayed-scaling state: its scales never "
            "move. In nnx use microfloat.jax.nnx.grad (or value_and_grad) and microfloat.jax.nnx.Optimizer; in linen "
            "differentiate with respect to all variables (microfloat.jax.linen.TrainState). If the scales are to stay "
            "as they are, filter this warning.",
            stacklevel=2,
        )
    return w.value, None


def _is_primal(leaf: object) -> bool:
    return hasattr(leaf, "perturbed")


def _backward(_: None, g: Array | SymbolicZero) -> tuple[Array | None, None]:
    return (None if isinstance(g, SymbolicZero) else g), None


notice_fixed_state.defvjp(_forward, _backward, symbolic_zeros=True)
