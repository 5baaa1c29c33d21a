"""Readings of one call of an op, made where it is traced inside a watched function and carried by its results.

A watched function is traced under a context that is part of the key of JAX's caches, as the recipe of an `autocast` is,
so that an unwatched program has no trace of any of this. In it each call binds `shown_p`, an identity of its results
which takes the readings along; `microfloat.jax.watch` finds it in the jaxpr and makes the readings outputs. Sums are
float32, of numbers that were brought near 1 by a power of two.

Legend: M = rows of x, K = in features, N = out features; R, C = rows and contraction length of an operand form.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from microfloat.formats import ScaleFormat
from microfloat.jax.backends import casts, reference
from microfloat.jax.numerics.bits import as_code_dtype, hadamard_transform, widened
from microfloat.operands import OPERANDS_OF, Operand
from microfloat.recipes import Cast, Recipe
from microfloat.recipes.explanation import operands_of as formats_of
from microfloat.watching import BINADES, DRAWS, OF_CAST, OF_SAMPLE, OF_SCALES, SCALES, largest_byte, limits_of

if TYPE_CHECKING:
    from microfloat.jax.dot_general import Call

__all__ = ["Subject", "Watching", "observe_backward", "observe_forward", "seen_by_backward", "shown_p", "watching"]


class Watching(NamedTuple):
    """The arguments of `watch_outputs`."""

    tensors: tuple[str, ...]
    metrics: frozenset[str]
    what_if: tuple[Cast, ...]
    rows: int

    def part(self, size: int) -> slice:
        """The part of an axis that is measured: whole tiles from its middle."""
        start = 0 if size <= self.rows else size // 2 // self.rows * self.rows
        return slice(start, min(start + self.rows, size))


class Subject(NamedTuple):
    """The subject of a vector of numbers. `kind` names the sums, `more` is all that their metrics need besides."""

    gemm: str
    operand: str
    format: str
    kind: str
    more: Any = None


# Local to a thread, and in the key of every cache of traced and compiled functions.
watching = jax.make_user_context(None)

# ``results = shown_p.bind(*results, *numbers, stage=, op=, subjects=)``. stage: "forward" of a call without a gradient,
# "kept" of one with, "backward"; op: the name of the recipe's class.
shown_p = Primitive("microfloat_shown")
shown_p.multiple_results = True


def _results(*arguments: Any, subjects: tuple[Subject, ...], **_: Any) -> list[Any]:
    return list(arguments[: len(arguments) - len(subjects)])


def _batched(arguments: Sequence[Any], axes: Sequence[Any], **options: Any) -> tuple[list[Any], list[Any]]:
    """Numbers of a batch stand along their first axis."""
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arguments, axes, strict=True)]
    results = shown_p.bind(*moved, **options)
    return results, [None if axis is None else 0 for axis in axes[: len(results)]]


shown_p.def_impl(_results)
shown_p.def_abstract_eval(_results)
mlir.register_lowering(shown_p, mlir.lower_fun(_results, multiple_results=True))
batching.primitive_batchers[shown_p] = _batched

Readings = list[tuple[Subject, Array]]


def observe_forward(call: "Call", x_MK: Array, w_NK: Array, y_MN: Array, *, stage: str) -> Array:
    """y, with the readings of x, w and y in a watched function."""
    watch = watching.value
    if watch is None:
        return y_MN
    uses = True, stage == "kept"
    x, w, y = map(lax.optimization_barrier, (x_MK, w_NK, y_MN))  # nothing here is fused with the computation
    readings = [*_operand(watch, call, "x", x, uses), *_operand(watch, call, "w", w, uses)]
    rows, cols = watch.part(y.shape[0]), watch.part(y.shape[1])
    readings += _product(watch, call, "fprop", "y", y, y[rows, cols], x[rows], w[cols])
    return _shown(call.config.recipe, stage, readings, y_MN)[0]


def seen_by_backward(x_MK: Array, w_NK: Array) -> tuple[Array, Array] | None:
    """The columns of x and w that the measured parts of dw and dx read; None in a function that is not watched."""
    if watching.value is None:
        return None
    part = watching.value.part(x_MK.shape[1])
    return x_MK[:, part], w_NK[:, part]


def observe_backward(
    call: "Call", seen: tuple[Array, Array] | None, dy_MN: Array, products: tuple[Array, Array],
    results: tuple[Array, Array],
) -> tuple[Array, Array]:  # fmt: skip
    """dx and dw, with the readings of dy and of both products (before they are summed over a mesh)."""
    watch = watching.value
    if watch is None or seen is None:
        return results
    dy, dx_MK, dw_NK = map(lax.optimization_barrier, (dy_MN, *products))
    readings = _operand(watch, call, "dy", dy, (True, True))
    rows, inputs, outputs = watch.part(dy.shape[0]), watch.part(dx_MK.shape[1]), watch.part(dy.shape[1])
    x_columns, w_columns = seen
    readings += _product(watch, call, "dgrad", "dx", dx_MK, dx_MK[rows, inputs], dy[rows], w_columns.T)
    readings += _product(watch, call, "wgrad", "dw", dw_NK, dw_NK[outputs, inputs], dy[:, outputs].T, x_columns.T)
    return _shown(call.config.recipe, "backward", readings, *results)  # type: ignore[return-value]


def _shown(recipe: Recipe, stage: str, readings: Readings, *results: Array) -> tuple[Array, ...]:
    subjects = tuple(subject for subject, _ in readings)
    numbers = [lax.stop_gradient(numbers) for _, numbers in readings]
    return tuple(shown_p.bind(*results, *numbers, stage=stage, op=type(recipe).__name__, subjects=subjects))


# ------------------------------------------------------------------------------------------------------------ readings


def _operand(watch: Watching, call: "Call", tensor: str, matrix: Array, uses: tuple[bool, bool]) -> Readings:
    """Readings of both operands of a tensor that are in use, and of the formats that might be."""
    if tensor not in watch.tensors or not matrix.size:
        return []
    operands, made = OPERANDS_OF[tensor], []
    for operand, used in zip(operands, uses, strict=True):
        is_cast = used and not (operand.transposed and call.reuses(tensor))
        made.append(call.cast_of(operand, matrix.shape) if is_cast else None)
    first = made[0]
    name = matrix.dtype.name if first is None else first.cast.format.name
    readings = [_tensor(Subject(operands[0].gemm, tensor, name, "tensor"), matrix)]
    if first is None and watch.metrics.intersection(OF_SAMPLE):
        readings.append(_sample(readings[0][0], matrix[watch.part(len(matrix))], 32))
    for operand, one in zip(operands, made, strict=True):
        if one is not None:
            readings += _cast(watch, call, operand, one.cast, matrix, call.seed.words)
    for cast in watch.what_if:
        if all(one is None or one.cast.format != cast.format for one in made):
            readings += _cast(watch, call, operands[0], cast, matrix, np.zeros(2, np.uint32))
    return readings


def _tensor(subject: Subject, matrix: Array) -> tuple[Subject, Array]:
    """Counts of finite elements, NaN and infinity, and amax, of all elements."""
    finite, nan = jnp.isfinite(matrix), jnp.isnan(matrix)
    amax = jnp.max(jnp.abs(matrix), initial=0).astype(jnp.float32)
    counts = (mask.sum(dtype=jnp.int32) for mask in (finite, nan, ~finite & ~nan))
    return subject._replace(kind="tensor"), _stacked(*counts, amax)


def _sample(subject: Subject, x_RC: Array, block: int) -> tuple[Subject, Array]:
    """Peak, sum of squares, count, and quantiles of the binades that blocks of `block` elements span."""
    finite = jnp.isfinite(x_RC)
    x, _ = _near_one(jnp.abs(jnp.where(finite, x_RC, 0).astype(jnp.float32)))
    blocks = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(-1, block)
    smallest = jnp.where(blocks == 0, jnp.inf, blocks).min(axis=1)
    spans = jnp.log2(blocks.max(axis=1)) - jnp.log2(smallest)  # of a block without a number: -inf
    quantiles = jnp.nanquantile(jnp.where(spans < 0, jnp.nan, spans), jnp.array([0.5, 0.99, 1.0]))
    numbers = jnp.concatenate([_stacked(x.max(), (x * x).sum(), finite.sum()), quantiles])
    return subject._replace(kind="sample"), numbers


class _Made(NamedTuple):
    """Rows of an operand form, finite or 0, the values that a cast made of them, and all its codes and scales."""

    x: Array
    finite: Array
    values: Array
    operand: reference.Matrix


def _quantized(
    watch: Watching, call: "Call", operand: Operand, cast: Cast, matrix: Array, words: Any
) -> _Made:  # fmt: skip
    """The bytes that the call computes with, by XLA's operations."""
    turned, one = operand.transposed, casts.CastOf(cast, operand.stream)
    inputs = casts.CastInputs(words, call.seed.batch, None, call.scales.get(operand.tensor))
    pair = (None, one) if turned else (one, None)
    made = casts.cast_both(matrix, *pair, inputs, axes=call.axes(matrix), backend="reference")
    quantized: Any = made.column if turned else made.row
    form = widened(matrix.T if turned else matrix)
    values = reference.dequantize_matrix(quantized, cast.format, cast.hadamard, form.shape[1])
    part = watch.part(form.shape[0])
    finite = jnp.isfinite(form[part])
    x, q = (jnp.where(finite, rows[part], 0) for rows in (form, values))
    return _Made(x, finite, q, quantized)


def _cast(watch: Watching, call: "Call", operand: Operand, cast: Cast, matrix: Array, words: Any) -> Readings:
    made = _quantized(watch, call, operand, cast, matrix, words)
    fmt, wanted = cast.format, watch.metrics
    subject = Subject(operand.gemm, operand.tensor, fmt.name, "")
    readings = []
    if wanted.intersection(OF_SAMPLE):
        form = matrix.T if operand.transposed else matrix
        readings.append(_sample(subject, form[watch.part(len(form))], fmt.block[1] or form.shape[1]))
    if wanted.intersection(OF_CAST):
        (x, q), is_zero = _near_one(made.x, made.values)[:2], made.values == 0
        clipped = _clipped(made, cast, watch.part(matrix.shape[operand.transposed])) if "clip" in wanted else 0
        error = q - x
        counts = made.finite.sum(), (is_zero & (made.x != 0)).sum(), (is_zero & made.finite).sum(), clipped
        numbers = _stacked((x * x).sum(), (error * error).sum(), (x * error).sum(), *counts)
        readings.append((subject._replace(kind="cast"), numbers))
    if wanted.intersection(OF_SCALES):
        readings.append((subject._replace(kind="scales", more=fmt.scale), _scales(made.operand.scale, fmt.scale)))
    if "error_by_magnitude" in wanted:
        readings.append((subject._replace(kind="binades"), _binades(made.x, made.values)))
    if cast.is_stochastic and "sr_noise" in wanted:
        readings.append(_noise(subject, watch, call, operand, cast, matrix))
    return readings


def _clipped(made: _Made, cast: Cast, part: slice) -> Array:
    """The number of elements beyond the largest magnitude of their block; under a Hadamard transform those of it."""
    fmt, (codes, scale, outer) = cast.format, made.operand
    x = made.x if cast.hadamard is None else hadamard_transform(made.x, cast.hadamard)
    if fmt.element.codes_per_byte == 2:
        largest = jnp.full_like(codes, largest_byte(fmt.element))
    else:
        largest = as_code_dtype(jnp.full(codes.shape, largest_byte(fmt.element), jnp.uint8), fmt.element)
    limit = reference.dequantize_matrix(reference.Matrix(largest, scale, outer), fmt, None, x.shape[1])[part]
    return (jnp.abs(x) > limit).sum()


def _scales(scale: Array, fmt: ScaleFormat) -> Array:
    """Counts of scales at the limits, and of every byte; of float32 of the byte of the exponent."""
    flat = scale.reshape(-1)
    if flat.dtype == jnp.float32:
        at_limits = ((flat <= 2.0**-126) & (flat != 0)).sum(), (flat >= 2.0**126).sum()
        codes = (lax.bitcast_convert_type(flat, jnp.uint32) >> 23).astype(jnp.int32)
    else:
        codes = flat.astype(jnp.int32)
        at_limits = tuple((codes == limit).sum() for limit in limits_of(fmt))
    edges = jnp.searchsorted(jnp.sort(codes), jnp.arange(SCALES + 1, dtype=jnp.int32))
    return jnp.concatenate([_stacked(*at_limits), jnp.diff(edges).astype(jnp.float32)])


def _binades(x: Array, values: Array) -> Array:
    """Sums of x^2 and of the squared error by binades below the largest magnitude; of every k-th element of many."""
    x, values, _ = _near_one(x, values)
    stride = max(1, x.size >> 14)
    a, d = x.reshape(-1)[::stride], (values - x).reshape(-1)[::stride]
    which = jnp.floor(jnp.log2(jnp.abs(x).max()) - jnp.log2(jnp.abs(a)))
    in_binade = (which[:, None] == jnp.arange(BINADES, dtype=jnp.float32)).astype(jnp.float32)
    return jnp.matmul(jnp.stack([a * a, d * d]), in_binade, precision=lax.Precision.HIGHEST).reshape(-1)


def _noise(
    subject: Subject, watch: Watching, call: "Call", operand: Operand, cast: Cast, matrix: Array
) -> tuple[Subject, Array]:
    """The mean error of stochastic rounding over a few seeds that no key gives, and the mean of its variances."""
    draws = []
    for number in range(DRAWS):
        made = _quantized(watch, call, operand, cast, matrix, np.array([number, 0x5A17], np.uint32))
        draws.append(made.values - made.x)
    errors = jnp.stack(draws)
    return subject._replace(kind="noise", more=errors.size), _stacked(errors.mean(), errors.var(axis=0, ddof=1).mean())


def _product(
    watch: Watching, call: "Call", gemm: str, name: str, whole: Array, result: Array, a_RC: Array, b_SC: Array
) -> Readings:
    """The counts of a result, and its error on a part of it: ``result ~ a @ b.T`` against float32."""
    if not whole.size:
        return []
    subject = Subject(gemm, name, formats_of(getattr(call.config.recipe, gemm)), "")
    readings = [_tensor(subject, whole)]
    if watch.metrics & {"relative_error", "cosine"}:
        a, b = (matrix.astype(jnp.float32) for matrix in (a_RC, b_SC))
        exact = jnp.matmul(a, b.T, precision=lax.Precision.HIGHEST)
        counted = jnp.isfinite(exact)
        pair = (jnp.where(counted, values.astype(jnp.float32), 0) for values in (exact, result))
        exact, result, _ = _near_one(*pair)
        error = result - exact
        numbers = _stacked((exact * exact).sum(), (error * error).sum(), (exact * error).sum())
        readings.append((subject._replace(kind="product"), numbers))
    return readings


def _near_one(x: Array, *others: Array) -> tuple[Array, ...]:
    """The arrays times one power of two that brings the largest magnitude of the first to 1; last, that power."""
    _, exponent = jnp.frexp(jnp.abs(x).max(initial=0))
    power = jnp.ldexp(np.float32(1), -jnp.clip(exponent, -126, 126))
    return *(values * power for values in (x, *others)), power


def _stacked(*numbers: Any) -> Array:
    return jnp.stack([jnp.asarray(number).astype(jnp.float32) for number in numbers])
