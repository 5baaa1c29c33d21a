"""Differentiation rules of the Flax-compatible FP8 operators.

State travels as its own gradient: the cotangent of `scale` is the new scale, that of `amax_history` the new
history. Every rule here also hands the state through as an output and returns ``max(own new state, cotangent of
that output)``; a second use that takes the handed-through state therefore contributes by maximum, never by sum
(docs/jax.md, "Delayed scaling in plain JAX").
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import jax.numpy as jnp
from jax import Array, custom_vjp, lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from microfloat.arguments import check_choice
from microfloat.errors import invalid_value
from microfloat.jax._collectives import like_in_variance, on_first_device, once, told_axes, varying_axes
from microfloat.jax._max_grad import from_max_grad
from microfloat.jax.flax import fp8_casts as casts
from microfloat.jax.flax import fp8_meta as meta
from microfloat.jax.flax.fp8_arguments import as_float_dtype, as_fp8_dtype, as_numbers, as_state

__all__ = [
    "Rule", "State", "accumulated", "in_q", "in_q_threaded", "in_qdq", "in_qdq_threaded", "out_dq", "out_qdq",
    "out_qdq_threaded",
]  # fmt: skip

State = tuple[Array, Array]
_Result = TypeVar("_Result")


class Rule(NamedTuple):
    """Static: how one tensor is quantized, and the mesh axes that shard it where JAX does not know them."""

    compute_dtype: DTypeLike
    q_dtype: DTypeLike
    axis_names: tuple[str, ...] = ()


def _static_rule(primal: Callable[..., _Result]) -> custom_vjp[_Result]:
    """`primal` with a differentiation rule of its own; its first argument is static."""
    return cast(custom_vjp[_Result], custom_vjp(primal, nondiff_argnums=(0,)))


def accumulated(rule: Rule, x: Array, new: State, old: State, incoming: State) -> State:
    """The state's cotangent: the new state, or what a later use made of it where that is larger."""
    told = frozenset() if varying_axes(x) else told_axes(rule.axis_names)
    result = []
    for value, leaf, later in zip(new, old, incoming, strict=True):
        value = once(lax.stop_gradient(value), from_max_grad(leaf))
        value = jnp.maximum(like_in_variance(value, leaf), from_max_grad(later))
        value = on_first_device(value, told) if told else value
        result.append(lax.convert_element_type(value, leaf.dtype))
    return result[0], result[1]


@_static_rule
def in_qdq_threaded(rule: Rule, x: Array, scale: Array, history: Array) -> tuple[Array, Array, Array]:
    """(x through FP8 and back with the updated scale, scale, history)."""
    new_scale, _ = meta.updated_state(x, rule.q_dtype, scale, history, rule.axis_names)
    return casts.qdq(x, rule.q_dtype, new_scale, rule.compute_dtype), scale, history


def _in_qdq_forward(rule: Rule, x: Array, scale: Array, history: Array) -> tuple:
    new = meta.updated_state(x, rule.q_dtype, scale, history, rule.axis_names)
    return (casts.qdq(x, rule.q_dtype, new[0], rule.compute_dtype), scale, history), (new, (scale, history))


def _in_qdq_backward(rule: Rule, kept: tuple, cotangents: tuple) -> tuple:
    new, old = kept
    g, *later = cotangents
    return g, *accumulated(rule, g, new, old, tuple(later))


in_qdq_threaded.defvjp(_in_qdq_forward, _in_qdq_backward)


@_static_rule
def out_qdq_threaded(rule: Rule, y: Array, scale: Array, history: Array) -> tuple[Array, Array, Array]:
    """(y unchanged, scale, history); its cotangent goes through FP8 and back."""
    del rule
    return y, scale, history


def _out_qdq_forward(rule: Rule, y: Array, scale: Array, history: Array) -> tuple:
    del rule
    return (y, scale, history), (scale, history)


def _out_qdq_backward(rule: Rule, old: State, cotangents: tuple) -> tuple:
    g, *later = cotangents
    new = meta.updated_state(g, rule.q_dtype, *old, rule.axis_names)
    return casts.qdq(g, rule.q_dtype, new[0], rule.compute_dtype), *accumulated(rule, g, new, old, tuple(later))


out_qdq_threaded.defvjp(_out_qdq_forward, _out_qdq_backward)


def in_qdq(
    compute_dtype: DTypeLike, q_dtype: DTypeLike, inp: ArrayLike, scale: Array, amax_history: Array, mode: str = "vjp"
) -> Array:
    """`inp` as FP8 would hold it, under the updated scale. Gradients: straight through, also where it was clipped.

    The gradient of `scale` and `amax_history` is their new value. ``mode="jvp"`` is plain fake quantization for
    users of jvp and linearize: ``x + stop_gradient(qdq(x) - x)``, and no gradient for the state.
    """
    rule, inp, scale, amax_history = _checked(compute_dtype, q_dtype, inp, scale, amax_history)
    check_choice("mode", mode, ("vjp", "jvp"))
    if mode == "jvp":
        fixed, new_scale, history = lax.stop_gradient((inp, scale, amax_history))
        new_scale, _ = meta.updated_state(fixed, q_dtype, new_scale, history)
        return inp + lax.stop_gradient(casts.qdq(fixed, q_dtype, new_scale, compute_dtype) - fixed)
    return in_qdq_threaded(rule, inp, scale, amax_history)[0]


def out_qdq(compute_dtype: DTypeLike, q_dtype: DTypeLike, out: ArrayLike, scale: Array, amax_history: Array) -> Array:
    """`out` unchanged; its gradient goes through FP8 and back. The gradient of the state is its new value."""
    return out_qdq_threaded(*_checked(compute_dtype, q_dtype, out, scale, amax_history))[0]


def _checked(
    compute_dtype: DTypeLike, q_dtype: DTypeLike, x: ArrayLike, scale: ArrayLike, history: ArrayLike
) -> tuple[Rule, Array, Array, Array]:
    rule = Rule(as_float_dtype("compute_dtype", compute_dtype), as_fp8_dtype("q_dtype", q_dtype))
    return rule, as_numbers("x", x), *as_state("", scale, history)


def _quantized_input(rule: Rule, x: Array, scale: Array, history: Array) -> tuple[Array, State]:
    new = meta.updated_state(x, rule.q_dtype, scale, history, rule.axis_names)
    return casts.quantize(x, rule.q_dtype, new[0], rule.compute_dtype), new


def _in_q_primal(rule: Rule, x: Array, scale: Array, history: Array) -> tuple[Array, Array, Array, Array]:
    """(codes, the updated scale, scale, history)."""
    codes, new = _quantized_input(rule, x, scale, history)
    return codes, new[0], scale, history


def _in_q_kept(rule: Rule, x: Array, scale: Array, history: Array) -> tuple:
    codes, new = _quantized_input(rule, x, scale, history)
    return (codes, new[0], scale, history), (new, (scale, history), _empty_like(x))


def _empty_like(x: Array) -> Array:
    """Nothing of x but its dtype and its device variance."""
    return x.reshape(-1)[:0]


# Within scaled_dot_threaded the gradient of x flows beside the codes: their own cotangent is dropped.
in_q_threaded = _static_rule(_in_q_primal)


def _in_q_backward(rule: Rule, kept: tuple, cotangents: tuple) -> tuple:
    new, old, like = kept
    return None, *accumulated(rule, like, new, old, tuple(cotangents[2:]))


in_q_threaded.defvjp(_in_q_kept, _in_q_backward)


# The public operator: a cotangent that reaches its codes is refused, since FP8 cannot hold it.
_in_q_checked = _static_rule(_in_q_primal)


def _checked_forward(rule: Rule, *primals: object) -> tuple:
    return _in_q_kept(rule, *(primal.value for primal in primals))  # type: ignore[attr-defined]


def _checked_backward(rule: Rule, kept: tuple, cotangents: tuple) -> tuple:
    new, old, like = kept
    g_codes, _, *later = cotangents
    if not isinstance(g_codes, SymbolicZero):
        raise invalid_value(
            "in_q", f"a cotangent of type {g_codes.dtype} for its codes", "codes that go into quantized_dot",
            "FP8 cannot carry a gradient: use fp8_scaled_dot_general, or quantized_dot with the unquantized operands.",
        )  # fmt: skip
    incoming = cast(State, tuple(_materialized(g, leaf) for g, leaf in zip(later, old, strict=True)))
    return None, *accumulated(rule, like, new, old, incoming)


def _materialized(cotangent: Array | SymbolicZero, leaf: Array) -> Array:
    if isinstance(cotangent, SymbolicZero):
        return like_in_variance(jnp.zeros(leaf.shape, jnp.float32), leaf)
    return cotangent


_in_q_checked.defvjp(_checked_forward, _checked_backward, symbolic_zeros=True)


def in_q(
    compute_dtype: DTypeLike, q_dtype: DTypeLike, inp: ArrayLike, scale: Array, amax_history: Array
) -> tuple[Array, Array]:
    """(FP8 codes of `inp`, the updated scale they were made with). The gradient of the state is its new value.

    The codes carry no gradient: pass `inp` to `quantized_dot` beside them. Differentiating through the codes
    themselves raises InvalidValueError, where zeros would be returned otherwise.
    """
    return _in_q_checked(*_checked(compute_dtype, q_dtype, inp, scale, amax_history))[:2]


def _out_dq_primal(dq_type: DTypeLike, lhs_scale: Array, rhs_scale: Array, out: Array) -> Array:
    return casts.scaled_by(out, lhs_scale, rhs_scale).astype(dq_type)


def _out_dq_forward(dq_type: DTypeLike, lhs_scale: Array, rhs_scale: Array, out: Array) -> tuple:
    return _out_dq_primal(dq_type, lhs_scale, rhs_scale, out), (lhs_scale, rhs_scale, _empty_like(out))


def _out_dq_backward(dq_type: DTypeLike, kept: tuple, g: Array) -> tuple:
    del dq_type
    lhs_scale, rhs_scale, like = kept
    return None, None, casts.scaled_by(g, lhs_scale, rhs_scale).astype(like.dtype)


_out_dq = _static_rule(_out_dq_primal)
_out_dq.defvjp(_out_dq_forward, _out_dq_backward)


def out_dq(dq_type: DTypeLike, lhs_scale: Array, rhs_scale: Array, out: ArrayLike) -> Array:
    """``out * (lhs_scale * rhs_scale)`` in float32, rounded once to `dq_type`; the scales get no gradient."""
    return _out_dq(dq_type, jnp.asarray(lhs_scale), jnp.asarray(rhs_scale), jnp.asarray(out))
