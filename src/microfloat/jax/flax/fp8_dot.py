"""Dots of FP8 codes with high-precision gradients, and the one-call FP8 dot_general of the Flax-compatible module."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, custom_jvp, custom_vjp, lax
from jax.typing import ArrayLike, DTypeLike

from microfloat.jax._collectives import sum_to_type_of
from microfloat.jax._derivatives import straight_through
from microfloat.jax._dimensions import DimensionNumbers, canonical_dimensions
from microfloat.jax.flax import fp8_casts as casts
from microfloat.jax.flax import fp8_meta as meta
from microfloat.jax.flax.fp8_arguments import as_float_dtype, as_numbers, as_state
from microfloat.jax.flax.fp8_autodiff import Rule, State, accumulated, in_q_threaded
from microfloat.jax.numerics.bits import quotient, widened

__all__ = [
    "dot_general_transpose_lhs", "dot_general_transpose_rhs", "dot_general_with_precision", "fp8_scaled_dot_general",
    "quantized_dot", "scaled_dot_threaded",
]  # fmt: skip


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
    """Static: the dot, the dtype it accumulates in, how its output gradient is quantized, and its result's dtype.

    `out` None: the result is the dot of the codes, not yet scaled.
    """

    dimension_numbers: DimensionNumbers
    accumulator: DTypeLike
    gradient: Rule
    out: DTypeLike | None = None


def _dot_primal(
    rule: DotRule, wide: tuple[Array, Array], codes: tuple[Array, Array], scales: tuple[Array, Array], state: State
) -> tuple[Array, Array, Array]:
    """(dot of the codes, state of the output gradient). `wide` are the operands that receive the gradients."""
    return _dot_of_codes(rule, wide, codes, scales), *state


# The rule of a first derivative is that of _quantized_dot. Derivatives of a gradient go by the two custom_jvp here,
# straight through the rounding: codes have none, and tangents of an FP8 dtype would overflow.


# Under jit, since vmap outside of jit hands NumPy arrays to a custom_jvp, which JAX 0.10 does not take.
@partial(jax.jit, static_argnums=0)
def _dot_of_codes(rule: DotRule, wide: tuple, codes: tuple, scales: tuple) -> Array:
    return _dot_and_scale(rule, wide, codes, scales)


@partial(custom_jvp, nondiff_argnums=(0,))
def _dot_and_scale(rule: DotRule, wide: tuple, codes: tuple, scales: tuple) -> Array:
    del wide
    product = _dot(rule, lax.Precision.DEFAULT, *codes)
    return product if rule.out is None else casts.scaled_by(product, *scales).astype(rule.out)


@_dot_and_scale.defjvp
def _dot_and_scale_jvp(rule: DotRule, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    result = _dot_and_scale(rule, *primals)
    _, derivative = jax.jvp(partial(_dot, rule, lax.Precision.HIGHEST), _straight(*primals), tangents[0])
    if rule.out is None:
        for factor in casts.factors(*primals[2]):
            derivative = derivative / factor
    return result, derivative.astype(result.dtype)


def _dot(rule: DotRule, precision: lax.Precision, lhs: Array, rhs: Array) -> Array:
    return lax.dot_general(
        lhs, rhs, rule.dimension_numbers, precision=precision, preferred_element_type=rule.accumulator
    )


def _straight(wide: tuple, codes: tuple, scales: tuple) -> tuple[Array, ...]:
    """The values of the codes, differentiated as the operands that were quantized."""
    return tuple(
        straight_through(casts.dequantize(code, operand.dtype, scale), operand)
        for operand, code, scale in zip(wide, codes, scales, strict=True)
    )


def _dot_forward(rule: DotRule, wide: tuple, codes: tuple, scales: tuple, state: State) -> tuple:
    return _dot_primal(rule, wide, codes, scales, state), (wide, codes, scales, state)


def _dot_backward(rule: DotRule, kept: tuple, cotangents: tuple) -> tuple:
    wide, codes, scales, state = kept
    g, *later = cotangents
    if rule.out is None:
        g = _without_scales(g, *scales)
    g = g.astype(rule.gradient.compute_dtype)
    new = meta.updated_state(g, rule.gradient.q_dtype, state[0], state[1], rule.gradient.axis_names)
    q_g = casts.quantize(g, rule.gradient.q_dtype, new[0], rule.gradient.compute_dtype)
    gradients = _operand_gradients(rule, (*wide, g), (*codes, q_g), (*scales, new[0]))
    gradients = tuple(
        sum_to_type_of(gradient, operand).astype(operand.dtype)
        for gradient, operand in zip(gradients, wide, strict=True)
    )
    return gradients, None, None, accumulated(rule.gradient, g, new, state, tuple(later))


def _without_scales(g_scaled: Array, *scales: Array) -> Array:
    """The gradient of the scaled result, from the dot's own cotangent, which holds the product of both scales."""
    for factor in casts.factors(*scales):
        plain = g_scaled / factor
        g_scaled = plain if plain.dtype == jnp.float64 else straight_through(quotient(widened(g_scaled), factor), plain)
    return g_scaled


@partial(custom_jvp, nondiff_argnums=(0,))
def _operand_gradients(rule: DotRule, wide: tuple, codes: tuple, scales: tuple) -> tuple[Array, Array]:
    """Gradients of both operands, from the codes of (lhs, rhs, g)."""
    del wide
    lhs_scale, rhs_scale, g_scale = scales
    d_lhs, d_rhs = _transposed_dots(rule, *codes)
    return casts.scaled_by(d_lhs, rhs_scale, g_scale), casts.scaled_by(d_rhs, lhs_scale, g_scale)


@_operand_gradients.defjvp
def _operand_gradients_jvp(rule: DotRule, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    _, derivatives = jax.jvp(partial(_transposed_dots, rule), _straight(*primals), tangents[0])
    return _operand_gradients(rule, *primals), derivatives


def _transposed_dots(rule: DotRule, lhs: Array, rhs: Array, g: Array) -> tuple[Array, Array]:
    """The cotangents of lhs and rhs in their dot for the cotangent `g`."""
    options = {
        "dimension_numbers": rule.dimension_numbers,
        "precision": lax.Precision.HIGHEST,
        "preferred_element_type": rule.accumulator,
    }
    return dot_general_transpose_lhs(g, lhs, rhs, **options), dot_general_transpose_rhs(g, lhs, rhs, **options)


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
    lhs, rhs = as_numbers("lhs", lhs), as_numbers("rhs", rhs)
    canonical_dimensions(lhs.shape, rhs.shape, dimension_numbers)
    accumulator = lhs.dtype if preferred_element_type is None else preferred_element_type
    rule = DotRule(_static_dimensions(dimension_numbers), accumulator, Rule(lhs.dtype, jnp.float8_e5m2))
    state = as_state("out_grad_", out_grad_scale, out_grad_amax_history)
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
    rule = DotRule(_static_dimensions(options.dimension_numbers), accumulator, gradient, options.out)
    y, *grad_state = _quantized_dot(rule, (lhs, rhs), (q_lhs, q_rhs), (lhs_scale, rhs_scale), states[2])
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
    lhs, rhs = as_numbers("lhs", lhs), as_numbers("rhs", rhs)
    canonical_dimensions(lhs.shape, rhs.shape, dimension_numbers)
    wanted = quantize_compute_type if preferred_element_type is None else preferred_element_type
    out = as_float_dtype("preferred_element_type", wanted)
    options = DotOptions(dimension_numbers, quantize_compute_type, out)
    states = {
        "lhs": (lhs_scale, lhs_amax_history), "rhs": (rhs_scale, rhs_amax_history),
        "grad": (grad_scale, grad_amax_history),
    }  # fmt: skip
    checked = tuple(as_state(f"{name}_", *pair) for name, pair in states.items())
    return scaled_dot_threaded(options, lhs, rhs, checked)[0]  # type: ignore[arg-type]


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
