"""Dots of FP8 codes with high-precision gradients, and the one-call FP8 dot_general of the Flax-compatible module."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, custom_jvp, custom_vjp, lax
from jax.typing import ArrayLike, DTypeLike

from microfloat.errors import invalid_value
from microfloat.jax import _fp8_casts as casts
from microfloat.jax import _fp8_meta as meta
from microfloat.jax._bits import quotient, widened
from microfloat.jax._collectives import sum_to_type_of
from microfloat.jax._dimensions import DimensionNumbers
from microfloat.jax._fp8_autodiff import Rule, State, accumulated, in_q_threaded, out_dq
from microfloat.jax._max_grad import from_max_grad

__all__ = [
    "dot_general_transpose_lhs", "dot_general_transpose_rhs", "dot_general_with_precision", "fp8_scaled_dot_general",
    "quantized_dot", "scaled_dot_threaded",
]  # fmt: skip

_SMALLEST = np.float32(2.0**-126)


def dot_general_transpose_lhs(
    g: Array,
    x: Array,
    y: Array,
    *,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None,
    swap_ans: bool = False,
) -> Array:
    """The cotangent of x in ``dot_general(x, y, dimension_numbers)`` for the cotangent `g`, in x's axis order.

    Only the shapes of x and the free axes of y are read. `swap_ans`: g has y's free axes before x's.
    """
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers
    x_free = [axis for axis in range(np.ndim(x)) if axis not in (*x_contract, *x_batch)]
    y_free = [axis for axis in range(np.ndim(y)) if axis not in (*y_contract, *y_batch)]
    batch = range(len(x_batch))
    first_free = len(x_batch) if swap_ans else len(x_batch) + len(x_free)
    g_axes = range(first_free, first_free + len(y_free))
    product = lax.dot_general(
        g, y, ((tuple(g_axes), tuple(y_free)), (tuple(batch), tuple(y_batch))),
        precision=precision, preferred_element_type=preferred_element_type,
    )  # fmt: skip
    # The product's axes: batch, free axes of x, then contracted axes in y's order.
    contracted = [x_axis for _, x_axis in sorted(zip(y_contract, x_contract, strict=True))]
    produced = [*x_batch, *x_free, *contracted]
    return product.transpose([produced.index(axis) for axis in range(len(produced))])


def dot_general_transpose_rhs(
    g: Array,
    x: Array,
    y: Array,
    *,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None,
) -> Array:
    """The cotangent of y in ``dot_general(x, y, dimension_numbers)`` for the cotangent `g`."""
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers
    return dot_general_transpose_lhs(
        g, y, x, dimension_numbers=((y_contract, x_contract), (y_batch, x_batch)), precision=precision,
        preferred_element_type=preferred_element_type, swap_ans=True,
    )  # fmt: skip


class DotRule(NamedTuple):
    """Static: the dot, the dtype it accumulates in, and how its output gradient is quantized."""

    dimension_numbers: DimensionNumbers
    accumulator: DTypeLike
    gradient: Rule


def _dot_primal(
    rule: DotRule, wide: tuple[Array, Array], codes: tuple[Array, Array], scales: tuple[Array, Array], state: State
) -> tuple[Array, Array, Array]:
    """(dot of the codes, state of the output gradient). `wide` are the operands that receive the gradients."""
    del wide, scales
    product = lax.dot_general(
        *codes, rule.dimension_numbers, precision=lax.Precision.DEFAULT, preferred_element_type=rule.accumulator
    )
    return product, *state


def _dot_forward(rule: DotRule, wide: tuple, codes: tuple, scales: tuple, state: State) -> tuple:
    return _dot_primal(rule, wide, codes, scales, state), (wide, codes, scales, state)


def _dot_backward(rule: DotRule, kept: tuple, cotangents: tuple) -> tuple:
    (lhs, rhs), (q_lhs, q_rhs), scales, state = kept
    g_scaled, *later = cotangents
    lhs_scale, rhs_scale = (from_max_grad(scale).reshape(()) for scale in scales)
    # The dot's own cotangent holds the product of both scales; what is quantized is the gradient of the scaled output.
    factor = jnp.maximum(lhs_scale * rhs_scale, _SMALLEST)
    g = g_scaled / factor if g_scaled.dtype == jnp.float64 else quotient(widened(g_scaled), factor)
    g = g.astype(rule.gradient.compute_dtype)
    new = meta.updated_state(g, rule.gradient.q_dtype, state[0], state[1], rule.gradient.axis_names)
    q_g = casts.quantize(g, rule.gradient.q_dtype, new[0], rule.gradient.compute_dtype)
    options = {
        "dimension_numbers": rule.dimension_numbers,
        "precision": lax.Precision.HIGHEST,
        "preferred_element_type": rule.accumulator,
    }
    g_scale = new[0].reshape(())
    d_lhs = dot_general_transpose_lhs(q_g, lhs, q_rhs, **options) * (rhs_scale * g_scale)
    d_rhs = dot_general_transpose_rhs(q_g, q_lhs, rhs, **options) * (lhs_scale * g_scale)
    gradients = tuple(
        sum_to_type_of(gradient, operand).astype(operand.dtype) for gradient, operand in ((d_lhs, lhs), (d_rhs, rhs))
    )
    return gradients, None, None, accumulated(rule.gradient, g, new, state, tuple(later))


_quantized_dot = custom_vjp(_dot_primal, nondiff_argnums=(0,))
_quantized_dot.defvjp(_dot_forward, _dot_backward)


def _static_dimensions(dimension_numbers: DimensionNumbers) -> DimensionNumbers:
    (contract, batch) = (tuple(tuple(int(axis) for axis in axes) for axes in pair) for pair in dimension_numbers)
    return contract, batch  # type: ignore[return-value]


def quantized_dot(
    lhs: Array,
    q_lhs: Array,
    lhs_scale: Array,
    rhs: Array,
    q_rhs: Array,
    rhs_scale: Array,
    out_grad_scale: Array,
    out_grad_amax_history: Array,
    dimension_numbers: DimensionNumbers,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """The dot of FP8 codes (not yet scaled: see `out_dq`), in `preferred_element_type`, None being lhs's dtype.

    Gradients go to the unquantized `lhs` and `rhs`: the output gradient is quantized to e5m2 with its delayed
    scale, then dotted with the other operand's codes. The gradient of the out_grad state is its new value.
    """
    accumulator = lhs.dtype if preferred_element_type is None else preferred_element_type
    rule = DotRule(_static_dimensions(dimension_numbers), accumulator, Rule(lhs.dtype, jnp.float8_e5m2))
    state = (jnp.asarray(out_grad_scale), jnp.asarray(out_grad_amax_history))
    scales = (jnp.asarray(lhs_scale), jnp.asarray(rhs_scale))
    return _quantized_dot(rule, (lhs, rhs), (q_lhs, q_rhs), scales, state)[0]


class DotOptions(NamedTuple):
    """Static: dtypes of one FP8 dot_general. `compute` is what quantization divides in, `out` what comes back."""

    dimension_numbers: DimensionNumbers
    compute: DTypeLike
    out: DTypeLike
    forward_dtype: DTypeLike = jnp.float8_e4m3fn
    gradient_dtype: DTypeLike = jnp.float8_e5m2
    axis_names: tuple[str, ...] = ()


def scaled_dot_threaded(
    options: DotOptions, lhs: Array, rhs: Array, states: tuple[State, State, State]
) -> tuple[Array, tuple[State, State, State]]:
    """(y, the three states handed through) of the FP8 dot: quantize both operands, dot the codes, scale the result."""
    forward = Rule(options.compute, options.forward_dtype, options.axis_names)
    gradient = Rule(lhs.dtype, options.gradient_dtype, options.axis_names)
    q_lhs, lhs_scale, *lhs_state = in_q_threaded(forward, lhs, *states[0])
    q_rhs, rhs_scale, *rhs_state = in_q_threaded(forward, rhs, *states[1])
    accumulator = jnp.promote_types(lhs.dtype, jnp.float32)
    rule = DotRule(_static_dimensions(options.dimension_numbers), accumulator, gradient)
    acc, *grad_state = _quantized_dot(rule, (lhs, rhs), (q_lhs, q_rhs), (lhs_scale, rhs_scale), states[2])
    y = out_dq(options.out, lhs_scale, rhs_scale, acc)
    return y, (tuple(lhs_state), tuple(rhs_state), tuple(grad_state))  # type: ignore[return-value]


def fp8_scaled_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: DimensionNumbers,
    precision: object = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    lhs_scale: Array | None = None,
    rhs_scale: Array | None = None,
    grad_scale: Array | None = None,
    lhs_amax_history: Array | None = None,
    rhs_amax_history: Array | None = None,
    grad_amax_history: Array | None = None,
    quantize_compute_type: DTypeLike = jnp.float32,
) -> Array:
    """lax.dot_general of both operands in FP8 (e4m3 forward, e5m2 output gradient) under delayed scaling.

    `preferred_element_type` None is `quantize_compute_type`. `precision` is ignored. Gradients of scales and
    histories are their new values.
    """
    del precision
    out = quantize_compute_type if preferred_element_type is None else preferred_element_type
    options = DotOptions(dimension_numbers, quantize_compute_type, out)
    states = {
        "lhs": (lhs_scale, lhs_amax_history), "rhs": (rhs_scale, rhs_amax_history),
        "grad": (grad_scale, grad_amax_history),
    }  # fmt: skip
    for name, pair in states.items():
        for kind, leaf in zip(("scale", "amax_history"), pair, strict=True):
            if leaf is None:
                raise invalid_value(
                    f"{name}_{kind}", "None", "float32 state", "The first scale is ones(1), the first history zeros(L)."
                )
    arrays = tuple(tuple(jnp.asarray(leaf) for leaf in pair) for pair in states.values())
    return scaled_dot_threaded(options, jnp.asarray(lhs), jnp.asarray(rhs), arrays)[0]  # type: ignore[arg-type]


@partial(custom_jvp, nondiff_argnums=(2, 3, 4))
def dot_general_with_precision(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    precision: object = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """lax.dot_general with default precision forward and highest precision in its tangents; both arguments ignored."""
    del precision, preferred_element_type
    return lax.dot_general(lhs, rhs, dimension_numbers, precision=lax.Precision.DEFAULT)


@dot_general_with_precision.defjvp
def _dot_general_with_precision_jvp(
    dimension_numbers: DimensionNumbers, _precision: object, _element_type: object, primals: tuple, tangents: tuple
) -> tuple[Array, Array]:
    (lhs, rhs), (lhs_dot, rhs_dot) = primals, tangents

    def dot(x: Array, y: Array, precision: lax.Precision) -> Array:
        return lax.dot_general(x, y, dimension_numbers, precision=precision)

    tangent = dot(lhs_dot, rhs, lax.Precision.HIGHEST) + dot(lhs, rhs_dot, lax.Precision.HIGHEST)
    return dot(lhs, rhs, lax.Precision.DEFAULT), tangent
