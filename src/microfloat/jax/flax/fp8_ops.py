"""The Flax-compatible FP8 operators: differentiation rules, dots of codes, linen modules.

State travels as its own gradient: the cotangents of `scale` and `amax_history` are their new values. The modules cast
their state to `fp32_max_grad`, so that a second use contributes by maximum, never by sum (docs/jax.md).

Class names and state layout are Flax's, so its checkpoints load unchanged. docs/jax.md lists the differences.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen.fp8_ops import CAN_USE_EARRAY, Fp8MetaTyRules, dot_general_with_precision, fp8_meta_dtype
from jax import Array, custom_vjp, lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from microfloat.arguments import check_choice
from microfloat.errors import invalid_type, invalid_value
from microfloat.jax import transformations
from microfloat.jax.flax import fp8_casts as casts
from microfloat.jax.flax.state import STATE_NAMES, StateVariables
from microfloat.jax.numerics.bits import quotient, widened
from microfloat.jax.numerics.dimensions import DimensionNumbers, canonical_dimensions, einsum_by

__all__ = [
    "CAN_USE_EARRAY", "Fp8DirectDotGeneralOp", "Fp8DotGeneral", "Fp8DotGeneralBase", "Fp8DotGeneralOp", "Fp8Einsum",
    "Fp8MetaTyRules", "NANOOFp8DotGeneralOp", "dot_general_transpose_lhs", "dot_general_transpose_rhs",
    "dot_general_with_precision", "fm32", "fp8_meta_dtype", "fp8_scaled_dot_general", "fp32_max_grad", "in_q",
    "in_qdq", "out_dq", "out_qdq", "quantize_dequantize", "quantized_dot",
]  # fmt: skip

# The former name of `qdq`, which published guides still use.
quantize_dequantize = casts.qdq
fm32 = fp32_max_grad = transformations.max_grad_dtype()
State = tuple[Array, Array]


class Rule(NamedTuple):
    """Static: how one tensor is quantized, and the mesh axes that shard it where JAX does not know them."""

    compute_dtype: DTypeLike
    q_dtype: DTypeLike
    axis_names: tuple[str, ...] = ()


def _differentiated(forward: Callable[..., tuple], backward: Callable[..., tuple]) -> custom_vjp[Any]:
    """The function of the first result of `forward`, with both as its rule; its first argument is static."""

    def primal(*arguments: object) -> object:
        return forward(*arguments)[0]

    primal.__name__ = forward.__name__
    function = cast(custom_vjp[Any], custom_vjp(primal, nondiff_argnums=(0,)))
    function.defvjp(forward, backward)
    return function


def _updated(rule: Rule, x: Array, scale: Array, history: Array) -> State:
    """The state for this step; a derivative of a gradient takes it as a constant."""
    scale, history = map(transformations.from_max_grad, (scale, history))
    x, scale, history = lax.stop_gradient((x, scale, history))
    return casts.updated_state(x, rule.q_dtype, scale, history, rule.axis_names)


def _cotangent(rule: Rule, x: Array, new: State, old: State) -> State:
    """The state's cotangent, which is the new state."""
    told = frozenset() if transformations.varying_axes(x) else transformations.told_axes(rule.axis_names)
    scale, history = map(partial(transformations.by_maximum, told=told), new, old)
    return scale, history


def _in_qdq(rule: Rule, x: Array, scale: Array, history: Array) -> tuple:
    new = _updated(rule, x, scale, history)
    return casts.qdq(x, rule.q_dtype, new[0], rule.compute_dtype), (new, (scale, history))


# x through FP8 and back with the updated scale.
_in_qdq_op = _differentiated(_in_qdq, lambda rule, kept, g: (g, *_cotangent(rule, g, *kept)))


def _out_qdq_backward(rule: Rule, old: State, g: Array) -> tuple:
    new = _updated(rule, g, *old)
    return casts.qdq(g, rule.q_dtype, new[0], rule.compute_dtype), *_cotangent(rule, g, new, old)


# y unchanged; its cotangent goes through FP8 and back.
_out_qdq_op = _differentiated(lambda _, y, scale, history: (y, (scale, history)), _out_qdq_backward)


def in_qdq(
    compute_dtype: DTypeLike, q_dtype: DTypeLike, inp: ArrayLike, scale: Array, amax_history: Array, mode: str = "vjp"
) -> Array:
    """`inp` as FP8 would hold it, under the updated scale. Gradients: straight through, also where it was clipped.

    The gradient of the state is its new value; ``mode="jvp"``, for jvp and linearize, has none for the state.
    """
    rule, inp, scale, amax_history = _checked(compute_dtype, q_dtype, inp, scale, amax_history)
    check_choice("mode", mode, ("vjp", "jvp"))
    if mode == "jvp":
        fixed, new_scale, history = lax.stop_gradient((inp, scale, amax_history))
        new_scale, _ = casts.updated_state(fixed, q_dtype, new_scale, history)
        return inp + lax.stop_gradient(casts.qdq(fixed, q_dtype, new_scale, compute_dtype) - fixed)
    return _in_qdq_op(rule, inp, scale, amax_history)


def out_qdq(compute_dtype: DTypeLike, q_dtype: DTypeLike, out: ArrayLike, scale: Array, amax_history: Array) -> Array:
    """`out` unchanged; its gradient goes through FP8 and back. The gradient of the state is its new value."""
    return _out_qdq_op(*_checked(compute_dtype, q_dtype, out, scale, amax_history))


def _checked(
    compute_dtype: DTypeLike, q_dtype: DTypeLike, x: ArrayLike, scale: ArrayLike, history: ArrayLike
) -> tuple[Rule, Array, Array, Array]:
    rule = Rule(casts.as_float_dtype("compute_dtype", compute_dtype), casts.as_fp8_dtype("q_dtype", q_dtype))
    return rule, casts.as_numbers("x", x), *casts.as_state("", scale, history)


def _in_q(rule: Rule, x: Array, scale: Array, history: Array) -> tuple:
    new = _updated(rule, x, scale, history)
    codes = casts.quantize(x, rule.q_dtype, new[0], rule.compute_dtype)
    like = jnp.atleast_1d(x)[:0]  # has the dtype and the device variance of x
    return (codes, new[0]), (new, (scale, history), like)


def _in_q_backward(rule: Rule, kept: tuple, cotangents: tuple) -> tuple:
    """The state's cotangent; one that reaches the codes is refused, since FP8 cannot hold it."""
    new, old, like = kept
    if not isinstance(cotangents[0], SymbolicZero):
        raise invalid_value(
            "in_q", f"a cotangent of type {cotangents[0].dtype} for its codes", "codes that go into quantized_dot",
            "FP8 cannot carry a gradient: use fp8_scaled_dot_general, or quantized_dot with the unquantized operands.",
        )  # fmt: skip
    return None, *_cotangent(rule, like, new, old)


# (codes, the updated scale). Within `_scaled_dot` the gradient of x flows beside the codes.
_in_q_op = custom_vjp(lambda *arguments: _in_q(*arguments)[0], nondiff_argnums=(0,))
_in_q_op.defvjp(
    lambda rule, *primals: _in_q(rule, *(primal.value for primal in primals)), _in_q_backward, symbolic_zeros=True
)


def in_q(
    compute_dtype: DTypeLike, q_dtype: DTypeLike, inp: ArrayLike, scale: Array, amax_history: Array
) -> tuple[Array, Array]:
    """(FP8 codes of `inp`, the updated scale). Codes carry no gradient: pass `inp` to `quantized_dot` beside them."""
    return _in_q_op(*_checked(compute_dtype, q_dtype, inp, scale, amax_history))


def out_dq(dq_type: DTypeLike, lhs_scale: Array, rhs_scale: Array, out: ArrayLike) -> Array:
    """``out * (lhs_scale * rhs_scale)`` in float32, rounded once to `dq_type`; the scales get no gradient."""
    scales = lax.stop_gradient([transformations.from_max_grad(jnp.asarray(one)) for one in (lhs_scale, rhs_scale)])
    return casts.scaled_by(jnp.asarray(out), *scales).astype(dq_type)


# Dots of codes, with high-precision gradients


def dot_general_transpose_lhs(
    g: Array, x: Array, y: Array, *, dimension_numbers: DimensionNumbers, precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None, swap_ans: bool = False,
) -> Array:  # fmt: skip
    """The gradient of x in ``dot_general(x, y)`` for the gradient `g` of the result; `swap_ans`: y's axes are first."""
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers
    x_free = [axis for axis in range(np.ndim(x)) if axis not in (*x_contract, *x_batch)]
    y_free = [axis for axis in range(np.ndim(y)) if axis not in (*y_contract, *y_batch)]
    batch = range(len(x_batch))
    first_free = len(x_batch) if swap_ans else len(x_batch) + len(x_free)
    g_axes = range(first_free, first_free + len(y_free))
    # The product's axes: batch, free axes of x, then contracted axes in y's order.
    contracted = [x_axis for _, x_axis in sorted(zip(y_contract, x_contract, strict=True))]
    produced = [*x_batch, *x_free, *contracted]
    numbers = (tuple(g_axes), tuple(y_free)), (tuple(batch), tuple(y_batch))
    sharding = transformations.sharding_of(x, produced)
    product = lax.dot_general(g, y, numbers, precision, preferred_element_type, out_sharding=sharding)
    return product.transpose([produced.index(axis) for axis in range(len(produced))])


def dot_general_transpose_rhs(g: Array, x: Array, y: Array, *, dimension_numbers: Any, **options: Any) -> Array:
    """The cotangent of y in ``dot_general(x, y, dimension_numbers)`` for the cotangent `g`."""
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers
    numbers = (y_contract, x_contract), (y_batch, x_batch)
    return dot_general_transpose_lhs(g, y, x, dimension_numbers=numbers, swap_ans=True, **options)


class DotRule(NamedTuple):
    """The dot, the dtype of its sums, how its output gradient is quantized, its dtype (None: the dot is not scaled)."""

    dimension_numbers: DimensionNumbers
    accumulator: DTypeLike
    gradient: Rule
    out: DTypeLike | None = None


# A first derivative is that of _quantized_dot. Derivatives of a gradient go straight through the rounding, since codes
# have none: a product of codes is differentiated as the product of their values, which is computed for nothing else.


@partial(jax.jit, static_argnums=0)
def _dot_of_codes(rule: DotRule, wide: tuple, codes: tuple, scales: tuple) -> Array:
    product = _dot(rule, lax.Precision.DEFAULT, *codes)
    product = product if rule.out is None else casts.scaled_by(product, *scales).astype(rule.out)
    plain = _dot(rule, lax.Precision.HIGHEST, *_straight(wide, codes, scales))
    for factor in casts.factors(*lax.stop_gradient(scales)) if rule.out is None else ():
        plain = plain / factor
    return transformations.straight_through(product, plain)


def _dot(rule: DotRule, precision: lax.Precision, lhs: Array, rhs: Array) -> Array:
    return lax.dot_general(lhs, rhs, rule.dimension_numbers, precision, rule.accumulator)


def _straight(wide: tuple, codes: tuple, scales: tuple) -> tuple[Array, ...]:
    """The values of the codes, differentiated as the operands that were quantized."""
    operands = zip(wide, *lax.stop_gradient((codes, scales)), strict=True)
    values = (casts.dequantize(code, operand.dtype, scale) for operand, code, scale in operands)
    return tuple(map(transformations.straight_through, values, wide))


def _dot_backward(rule: DotRule, kept: tuple, g: Array) -> tuple:
    wide, codes, scales, state = kept
    if rule.out is None:
        g = _without_scales(g, *scales)
    g = g.astype(rule.gradient.compute_dtype)
    new = _updated(rule.gradient, g, *state)
    q_g = casts.quantize(g, rule.gradient.q_dtype, new[0], rule.gradient.compute_dtype)
    gradients = _operand_gradients(rule, (*wide, g), (*codes, q_g), (*scales, new[0]))
    gradients = tuple(map(transformations.sum_to_type_of, gradients, wide))
    return gradients, None, None, _cotangent(rule.gradient, g, new, state)


def _without_scales(g_scaled: Array, *scales: Array) -> Array:
    """The gradient of the scaled result, from the dot's own cotangent, which holds the product of both scales."""
    for factor in casts.factors(*scales):
        plain = g_scaled / factor
        exact = plain if plain.dtype == jnp.float64 else quotient(widened(g_scaled), factor)
        g_scaled = transformations.straight_through(exact, plain)
    return g_scaled


@partial(jax.jit, static_argnums=0)
def _operand_gradients(rule: DotRule, wide: tuple, codes: tuple, scales: tuple) -> tuple[Array, ...]:
    """Gradients of both operands, from the codes of (lhs, rhs, g)."""
    lhs_scale, rhs_scale, g_scale = scales
    d_lhs, d_rhs = _transposed_dots(rule, *codes)
    exact = casts.scaled_by(d_lhs, rhs_scale, g_scale), casts.scaled_by(d_rhs, lhs_scale, g_scale)
    return tuple(map(transformations.straight_through, exact, _transposed_dots(rule, *_straight(wide, codes, scales))))


def _transposed_dots(rule: DotRule, lhs: Array, rhs: Array, g: Array) -> tuple[Array, Array]:
    """The gradients of lhs and rhs of a dot whose result has the gradient `g`."""
    options: Any = {"dimension_numbers": rule.dimension_numbers, "precision": lax.Precision.HIGHEST}
    options["preferred_element_type"] = rule.accumulator
    return dot_general_transpose_lhs(g, lhs, rhs, **options), dot_general_transpose_rhs(g, lhs, rhs, **options)


# The dot of the codes; `wide` are the operands that receive the gradients.
_quantized_dot = _differentiated(lambda rule, *kept: (_dot_of_codes(rule, *kept[:3]), kept), _dot_backward)


def quantized_dot(
    lhs: Array, q_lhs: Array, lhs_scale: Array, rhs: Array, q_rhs: Array, rhs_scale: Array, out_grad_scale: Array,
    out_grad_amax_history: Array, dimension_numbers: DimensionNumbers, preferred_element_type: DTypeLike | None = None,
) -> Array:  # fmt: skip
    """The dot of FP8 codes, which `out_dq` scales; gradients go to the unquantized `lhs` and `rhs`, rounded to e5m2."""
    lhs, rhs = casts.as_numbers("lhs", lhs), casts.as_numbers("rhs", rhs)
    numbers = canonical_dimensions(lhs.shape, rhs.shape, dimension_numbers).dimension_numbers
    accumulator = lhs.dtype if preferred_element_type is None else preferred_element_type
    rule = DotRule(numbers, accumulator, Rule(lhs.dtype, jnp.float8_e5m2))
    state = casts.as_state("out_grad_", out_grad_scale, out_grad_amax_history)
    scales = (jnp.asarray(lhs_scale), jnp.asarray(rhs_scale))
    return _quantized_dot(rule, (lhs, rhs), (q_lhs, q_rhs), scales, state)


def _scaled_dot(
    dimension_numbers: DimensionNumbers, forward: Rule, gradient_dtype: DTypeLike, out: DTypeLike, lhs: Array,
    rhs: Array, states: Sequence[State],
) -> Array:  # fmt: skip
    """The FP8 dot: quantize both operands as `forward` says, dot the codes, scale the result to `out`."""
    numbers = canonical_dimensions(lhs.shape, rhs.shape, dimension_numbers).dimension_numbers
    q_lhs, lhs_scale = _in_q_op(forward, lhs, *states[0])
    q_rhs, rhs_scale = _in_q_op(forward, rhs, *states[1])
    gradient = Rule(lhs.dtype, gradient_dtype, forward.axis_names)
    rule = DotRule(numbers, jnp.promote_types(lhs.dtype, jnp.float32), gradient, out)
    return _quantized_dot(rule, (lhs, rhs), (q_lhs, q_rhs), (lhs_scale, rhs_scale), tuple(states[2]))


def _warn_of_no_effect(**arguments: object) -> None:
    """A UserWarning, as Flax has it, for arguments other than None."""
    for name, got in arguments.items():
        if got is not None:
            text = f"{name}: got {got!r}, which has no effect: the op sets it for its products itself. Leave it None."
            warnings.warn(text, UserWarning, stacklevel=3)


def fp8_scaled_dot_general(
    lhs: ArrayLike, rhs: ArrayLike, dimension_numbers: DimensionNumbers, precision: object = None,
    preferred_element_type: DTypeLike | None = None, *, lhs_scale: Array | None = None, rhs_scale: Array | None = None,
    grad_scale: Array | None = None, lhs_amax_history: Array | None = None, rhs_amax_history: Array | None = None,
    grad_amax_history: Array | None = None, quantize_compute_type: DTypeLike = jnp.float32,
) -> Array:  # fmt: skip
    """lax.dot_general of both operands in FP8 (e4m3 forward, e5m2 output gradient) under delayed scaling.

    `preferred_element_type` None is `quantize_compute_type`. Gradients of scales and histories are their new values.
    """
    _warn_of_no_effect(precision=precision)
    lhs, rhs = casts.as_numbers("lhs", lhs), casts.as_numbers("rhs", rhs)
    wanted = quantize_compute_type if preferred_element_type is None else preferred_element_type
    out = casts.as_float_dtype("preferred_element_type", wanted)
    scales, histories = (lhs_scale, rhs_scale, grad_scale), (lhs_amax_history, rhs_amax_history, grad_amax_history)
    states = list(map(casts.as_state, ("lhs_", "rhs_", "grad_"), scales, histories))
    forward = Rule(quantize_compute_type, jnp.float8_e4m3fn)
    return _scaled_dot(dimension_numbers, forward, jnp.float8_e5m2, out, lhs, rhs, states)


# Modules


class Fp8DotGeneralBase(nn.Module):
    """State and options of the FP8 operators; `axis_names`: mesh axes of the operands that JAX cannot see."""

    amax_history_length: int = 1024
    e4m3_dtype: DTypeLike = jnp.float8_e4m3fn
    e5m2_dtype: DTypeLike = jnp.float8_e5m2
    axis_names: tuple[str, ...] = ()

    def setup(self) -> None:
        """The six variables, also under the names that subclasses of Flax's class read."""
        self.state_variables = StateVariables(self, self.amax_history_length)
        for name, (scale, history) in self.state_variables.pairs.items():
            setattr(self, f"{name}_scale", scale)
            setattr(self, f"{name}_amax_history", history)

    def direct_dot(self, lhs: Array, rhs: Array, numbers: DimensionNumbers, element_type: DTypeLike | None) -> Array:
        """The dot with FP8 operands, in rhs's dtype or `element_type`."""
        out = rhs.dtype if element_type is None else element_type
        forward = Rule(rhs.dtype, self.e4m3_dtype, tuple(self.axis_names))
        states = [self.state_variables.current(name) for name in STATE_NAMES]
        return _scaled_dot(numbers, forward, self.e5m2_dtype, out, lhs, rhs, states)


class Fp8DotGeneralOp(Fp8DotGeneralBase):
    """dot_general of operands that went through FP8 and back; its output gradient does the same (fake quantization)."""

    def __call__(
        self, lhs: ArrayLike, rhs: Array, dimension_numbers: DimensionNumbers, precision: object = None,
        preferred_element_type: DTypeLike | None = None, *args: object, **kwargs: object,
    ) -> Array:  # fmt: skip
        """Computes in rhs's dtype; further arguments are accepted and ignored."""
        del precision, args, kwargs
        lhs, rhs = _operands(lhs, rhs)
        canonical_dimensions(lhs.shape, rhs.shape, dimension_numbers)
        return self._dot(lhs, rhs, dimension_numbers, preferred_element_type)

    def _dot(self, lhs: Array, rhs: Array, numbers: DimensionNumbers, element_type: DTypeLike | None) -> Array:
        def through(function: Callable, name: str, dtype: DTypeLike, value: Array) -> Array:
            rule = Rule(rhs.dtype, dtype, tuple(self.axis_names))
            return function(rule, value, *self.state_variables.current(name))

        lhs = through(_in_qdq_op, "input", self.e4m3_dtype, lhs)
        faked = through(_in_qdq_op, "kernel", self.e4m3_dtype, rhs)
        y = dot_general_with_precision(lhs, faked, numbers)
        y = through(_out_qdq_op, "output_grad", self.e5m2_dtype, y)
        return y if element_type is None else y.astype(element_type)


class Fp8DirectDotGeneralOp(Fp8DotGeneralOp):
    """dot_general of FP8 codes: they go into the dot themselves, the scales follow."""

    _dot = Fp8DotGeneralBase.direct_dot


class NANOOFp8DotGeneralOp(Fp8DotGeneralOp):
    """`Fp8DotGeneralOp` in the fnuz formats of MI300."""

    e4m3_dtype: DTypeLike = jnp.float8_e4m3fnuz
    e5m2_dtype: DTypeLike = jnp.float8_e5m2fnuz


class Fp8Einsum(Fp8DotGeneralBase):
    """An einsum of two operands with FP8 operands; the first is always the input, the second the kernel."""

    def __call__(
        self, eqn: str, lhs: ArrayLike, rhs: Array, precision: object = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Array:  # fmt: skip
        """Computes in rhs's dtype. `precision` has no effect, and a UserWarning says so."""
        _warn_of_no_effect(precision=precision)
        lhs, rhs = _operands(lhs, rhs)
        dot = partial(self.direct_dot, element_type=preferred_element_type)
        return einsum_by(dot, eqn, lhs, rhs)


def _operands(lhs: ArrayLike, rhs: ArrayLike) -> tuple[Array, Array]:
    """Both operands in rhs's dtype, the dtype to compute in: a float dtype of 16 bits or more."""
    lhs, rhs = casts.as_numbers("lhs", lhs), casts.as_numbers("rhs", rhs)
    if not jnp.issubdtype(rhs.dtype, jnp.floating):
        remedy = "The op quantizes; convert rhs with .astype."
        raise invalid_type("rhs", rhs.dtype, "float32, bfloat16, float16 or float64", remedy)
    return lhs.astype(rhs.dtype), rhs


Fp8DotGeneral = Fp8DirectDotGeneralOp
