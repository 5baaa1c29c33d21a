"""Readings of one call of an op, made where it is traced inside a watched function and carried by its results.

A watched function is traced under a context that is part of the key of JAX's caches, as the recipe of an `autocast` is,
so that an unwatched program has no trace of any of this. In it each call binds `shown_p`, an identity of its results
which takes the readings along; `microfloat.jax.watch` finds it in the jaxpr and makes the readings outputs. Sums are
float32, in units of a power of two that brings the numbers near 1 and comes first in their vector.

Legend: M = rows of x, K = in features, N = out features; R, C = rows and contraction length of an operand form.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from microfloat.jax.backends import casts, reference
from microfloat.jax.calls import Call
from microfloat.jax.numerics.bits import as_code_dtype, hadamard_transform, widened
from microfloat.operands import OPERANDS_OF, Operand
from microfloat.recipes import Cast, Recipe
from microfloat.recipes.explanation import operands_of as formats_of
from microfloat.watching import (
    BINADES,
    NOISE_SEEDS,
    OF_CAST,
    OF_PRODUCT,
    OF_SAMPLE,
    OF_SCALES,
    SCALES,
    Measured,
    largest_byte,
)

__all__ = [
    "BlocksOfGroups", "Subject", "observe_backward", "observe_forward", "observe_groups_backward",
    "observe_groups_forward", "seen_by_backward", "shown_p", "watching",
]  # fmt: skip


class Subject(NamedTuple):
    """The subject of a vector of numbers. `kind`: "tensor", "rows", "noise" or "product", by which the host makes
    metrics of them; `more`: all that it needs besides, the format of the scales of rows or the number of draws.
    """

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


def observe_forward(call: Call, x_MK: Array, w_NK: Array, y_MN: Array, *, stage: str) -> Array:
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
    return x_MK[:, part], w_NK[..., part]


def observe_backward(
    call: Call, seen: tuple[Array, Array] | None, dy_MN: Array, products: tuple[Array, Array],
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


class BlocksOfGroups(NamedTuple):
    """A call of `ragged_dot` as its readings see it; their vectors have an axis of blocks, or of groups.

    `is_used` [B, P]: rows of blocks that hold a row of a group. ``quantized(operand, cast, x_BPC, words)``: the operand
    of every block. ``of_group(w_GNK)``: the matrix of each block's group. ``for_each(function, *arrays)``:
    ``function(call, *arrays)`` for each group. ``sums(x_BNK)``: the sum over the blocks of each group.
    """

    call: Call
    is_used: Array
    gather: Callable[[Array], Array]
    quantized: Callable[..., reference.Matrix]
    of_group: Callable[[Array], Array]
    for_each: Callable[..., Any]
    sums: Callable[[Array], Array]


def observe_groups_forward(
    groups: BlocksOfGroups, x_TK: Array, w_GNK: Array, y_BPN: Array, y_TN: Array, *, stage: str
) -> Array:
    """`observe_forward` for the groups of rows of a `ragged_dot`."""
    watch, call = watching.value, groups.call
    if watch is None or not y_TN.size:
        return y_TN
    x, w, y = map(lax.optimization_barrier, (x_TK, w_GNK, y_BPN))
    uses, subjects = (True, stage == "kept"), []

    def of_weight(call: Call, w_NK: Array) -> list[Array]:
        found = _operand(watch, call, "w", w_NK, uses)
        subjects[:] = [subject for subject, _ in found]
        return [numbers for _, numbers in found]

    readings = _operand_of_groups(watch, groups, "x", x, uses)
    numbers = groups.for_each(of_weight, w)
    readings += zip(subjects, numbers, strict=True)
    readings += _product_of_groups(watch, groups, "fprop", "y", y_TN, y, groups.gather(x), w)
    return _shown(call.config.recipe, stage, readings, y_TN)[0]


def observe_groups_backward(
    groups: BlocksOfGroups, seen: tuple[Array, Array] | None, dy_TN: Array, dx_BPK: Array, dw_GNK: Array,
    results: tuple[Array, Array],
) -> tuple[Array, Array]:  # fmt: skip
    """`observe_backward` for the groups of rows of a `ragged_dot`; `results` are dx_TK and dw."""
    watch, call = watching.value, groups.call
    if watch is None or seen is None or not dy_TN.size:
        return results
    dy, dx, dw = map(lax.optimization_barrier, (dy_TN, dx_BPK, dw_GNK))
    readings, blocks = _operand_of_groups(watch, groups, "dy", dy, (True, True)), groups.gather(dy)
    inputs, outputs = watch.part(dx.shape[2]), watch.part(dy.shape[1])
    x_columns, w_columns = seen
    others = w_columns.swapaxes(1, 2)
    readings += _product_of_groups(watch, groups, "dgrad", "dx", results[0], dx[..., inputs], blocks, others)
    subject = Subject("wgrad", "dw", formats_of(call.config.recipe.wgrad), "")
    readings.append(_tensor(subject, dw))
    if watch.metrics.intersection(OF_PRODUCT):
        pair = blocks[..., outputs].astype(jnp.float32), groups.gather(x_columns).astype(jnp.float32)
        exact = groups.sums(jnp.einsum("bpn,bpk->bnk", *pair, precision=lax.Precision.HIGHEST))
        readings.append((subject._replace(kind="product"), jax.vmap(_errors)(exact, dw[:, outputs, inputs])))
    return _shown(call.config.recipe, "backward", readings, *results)  # type: ignore[return-value]


def _operand_of_groups(
    watch: Measured, groups: BlocksOfGroups, tensor: str, x_TC: Array, uses: tuple[bool, bool]
) -> Readings:
    """Readings of a tensor whose groups of rows are quantized separately; those of noise are left out."""
    if tensor not in watch.tensors:
        return []
    x_BPC = groups.gather(x_TC)
    subject, is_plain, asked = _asked(watch, groups.call, tensor, x_TC.dtype, x_BPC.shape[1:], uses)
    readings = [_tensor(subject, x_TC)]
    if is_plain and watch.metrics.intersection(OF_SAMPLE):
        plain = jax.vmap(lambda x, used: _rows(watch, x.astype(jnp.float32), used[:, None] & jnp.isfinite(x), None))
        readings.append((subject, plain(x_BPC, groups.is_used)))
    for operand, cast, words in asked:

        def of_block(x_PC: Array, used: Array, quantized: Any, operand: Operand = operand, cast: Cast = cast) -> Array:
            made = _made(watch, operand, cast, x_PC, quantized, used)
            return _rows(watch, made.x, made.finite, made)

        quantized = groups.quantized(operand, cast, x_BPC, words)
        subject = Subject(operand.gemm, tensor, cast.format.name, "rows", cast.format.scale)
        readings.append((subject, jax.vmap(of_block)(x_BPC, groups.is_used, quantized)))
    return readings


def _product_of_groups(
    watch: Measured, groups: BlocksOfGroups, gemm: str, name: str, whole: Array, result_BPN: Array, a_BPC: Array,
    b_GNC: Array,
) -> Readings:  # fmt: skip
    """`_product` of every block with the matrix of its group; rows of no group count in `whole` alone."""
    subject = Subject(gemm, name, formats_of(getattr(groups.call.config.recipe, gemm)), "")
    readings = [_tensor(subject, whole)]
    if watch.metrics.intersection(OF_PRODUCT):
        rows, cols = watch.part(a_BPC.shape[1]), watch.part(b_GNC.shape[1])
        a, b = a_BPC[:, rows].astype(jnp.float32), groups.of_group(b_GNC[:, cols]).astype(jnp.float32)
        exact = jnp.einsum("bpc,bnc->bpn", a, b, precision=lax.Precision.HIGHEST)
        readings.append((subject._replace(kind="product"), jax.vmap(_errors)(exact, result_BPN[:, rows, cols])))
    return readings


def _shown(recipe: Recipe, stage: str, readings: Readings, *results: Array) -> tuple[Array, ...]:
    subjects = tuple(subject for subject, _ in readings)
    numbers = [lax.stop_gradient(numbers) for _, numbers in readings]
    return tuple(shown_p.bind(*results, *numbers, stage=stage, op=type(recipe).__name__, subjects=subjects))


# ------------------------------------------------------------------------------------------------------------ readings


def _operand(watch: Measured, call: Call, tensor: str, matrix: Array, uses: tuple[bool, bool]) -> Readings:
    """Readings of both operands of a tensor that are in use, and of the formats that might be."""
    if tensor not in watch.tensors or not matrix.size:
        return []
    subject, is_plain, asked = _asked(watch, call, tensor, matrix.dtype, matrix.shape, uses)
    readings = [_tensor(subject, matrix)]
    if is_plain and watch.metrics.intersection(OF_SAMPLE):
        rows = matrix[watch.part(len(matrix))].astype(jnp.float32)
        readings.append((subject, _rows(watch, rows, jnp.isfinite(rows), None)))
    for operand, cast, words in asked:
        one = _quantized(watch, call, operand, cast, matrix, words)
        subject = Subject(operand.gemm, tensor, cast.format.name, "rows", cast.format.scale)
        readings.append((subject, _rows(watch, one.x, one.finite, one)))
        if cast.is_stochastic and "sr_noise" in watch.metrics:
            readings.append(_noise(subject, watch, call, operand, cast, matrix))
    return readings


def _asked(
    watch: Measured, call: Call, tensor: str, dtype: np.dtype, shape: tuple[int, ...], uses: tuple[bool, bool]
) -> tuple[Subject, bool, list[tuple[Operand, Cast, Any]]]:
    """The subject of a tensor, True if its first operand has no Cast, and casts in use and others, with their seeds."""
    operands, made = OPERANDS_OF[tensor], []
    for operand, used in zip(operands, uses, strict=True):
        is_cast = used and not (operand.transposed and call.reuses(tensor))
        made.append(call.cast_of(operand, shape) if is_cast else None)
    name = dtype.name if made[0] is None else made[0].cast.format.name
    in_use = [None if one is None else one.cast for one in made]
    asked = [(operand, cast, call.seed.words) for operand, cast in zip(operands, in_use, strict=True) if cast]
    asked += [(operands[0], cast, np.zeros(2, np.uint32)) for cast in watch.not_in_use(in_use)]
    return Subject(operands[0].gemm, tensor, name, "rows"), made[0] is None, asked


def _tensor(subject: Subject, matrix: Array) -> tuple[Subject, Array]:
    """Counts of finite elements, NaN and infinity, and amax, of all elements."""
    finite, nan = jnp.isfinite(matrix), jnp.isnan(matrix)
    amax = jnp.max(jnp.abs(matrix), initial=0).astype(jnp.float32)
    counts = (mask.sum(dtype=jnp.int32) for mask in (finite, nan, ~finite & ~nan))
    return subject._replace(kind="tensor"), _stacked(*counts, amax)


class _Made(NamedTuple):
    """Rows of an operand form, finite or 0, the values that a cast made of them, and all its codes and scales.

    `used`: for every scale, True if it is counted; None for all.
    """

    x: Array
    finite: Array
    values: Array
    operand: reference.Matrix
    cast: Cast
    part: slice
    used: Array | None


def _quantized(
    watch: Measured, call: Call, operand: Operand, cast: Cast, matrix: Array, words: Any
) -> _Made:  # fmt: skip
    """The bytes that the call computes with, by XLA's operations."""
    turned, one = operand.transposed, casts.CastOf(cast, operand.stream)
    inputs = casts.CastInputs(words, call.seed.batch, None, call.scales.get(operand.tensor))
    pair = (None, one) if turned else (one, None)
    made = casts.cast_both(matrix, *pair, inputs, axes=call.axes(matrix), backend="reference")
    quantized: Any = made.column if turned else made.row
    return _made(watch, operand, cast, matrix, quantized)


def _made(
    watch: Measured, operand: Operand, cast: Cast, matrix: Array, quantized: reference.Matrix,
    used: Array | None = None,
) -> _Made:  # fmt: skip
    """The measured rows of an operand; `used`: rows of `matrix` that count, None for all."""
    turned, scale = operand.transposed, quantized.scale
    form = widened(matrix.T if turned else matrix)
    values = reference.dequantize_matrix(quantized, cast.format, cast.hadamard, form.shape[1])
    part = watch.part(form.shape[0])
    finite = jnp.isfinite(form[part])
    if used is not None:
        finite &= used if turned else used[part, None]
        along = scale.shape[1 if turned else 0] if scale.ndim == 2 else 1
        blocks = jnp.pad(used, (0, -used.size % along)).reshape(along, -1).any(axis=1)
        used = jnp.broadcast_to(blocks if turned or scale.ndim < 2 else blocks[:, None], scale.shape)
    x, q = (jnp.where(finite, rows[part], 0) for rows in (form, values))
    return _Made(x, finite, q, quantized, cast, part, used)


def _rows(watch: Measured, x_RC: Array, finite: Array, made: _Made | None) -> Array:
    """The numbers of `watching.of_rows`, for rows and their cast, behind the power of two in units of which they are.

    In place of the sum of x q stands that of the error times x, which is smaller.
    """
    wanted = watch.metrics
    x, unit = _near_one(jnp.where(finite, x_RC, 0))
    noise = along = flushed = zero = clipped = 0
    spans, scales, binades, block = jnp.zeros(3), jnp.zeros(SCALES + 2), jnp.zeros(2 * BINADES), 32
    if made is not None:
        error, is_zero = made.values / unit - x, made.values == 0
        block = made.cast.format.block[1] or x.shape[1]
        if wanted.intersection(OF_CAST):
            noise, along = (error * error).sum(), (x * error).sum()
            flushed, zero = (is_zero & (made.x != 0)).sum(), (is_zero & finite).sum()
            clipped = _clipped(made) if "clip" in wanted else 0
        if wanted.intersection(OF_SCALES):
            scales = _scales(made.operand.scale, made.used)
        if "error_by_magnitude" in wanted:
            binades = _binades(x, error)
    if wanted.intersection(OF_SAMPLE):
        spans = _spanned(jnp.abs(x), block)
    counts = finite.sum(), flushed, zero, clipped
    sums = _stacked(unit, (x * x).sum(), noise, along, *counts, jnp.abs(x).max())
    return jnp.concatenate([sums, spans, scales, binades])


def _spanned(magnitudes: Array, block: int) -> Array:
    """Three quantiles of the binades that blocks of so many elements span; NaN where no block has a number."""
    blocks = jnp.pad(magnitudes, ((0, 0), (0, -magnitudes.shape[1] % block))).reshape(-1, block)
    smallest = jnp.where(blocks == 0, jnp.inf, blocks).min(axis=1)
    spans = jnp.log2(blocks.max(axis=1)) - jnp.log2(smallest)  # of a block without a number: -inf
    return jnp.nanquantile(jnp.where(spans < 0, jnp.nan, spans), jnp.array([0.5, 0.99, 1.0]))


def _clipped(made: _Made) -> Array:
    """The number of elements beyond the largest magnitude of their block; under a Hadamard transform those of it."""
    cast, (codes, scale, outer) = made.cast, made.operand
    element = cast.format.element
    x = made.x if cast.hadamard is None else hadamard_transform(made.x, cast.hadamard)
    largest = jnp.full(codes.shape, largest_byte(element), jnp.uint8)
    largest = largest if element.codes_per_byte == 2 else as_code_dtype(largest, element)
    limit = reference.dequantize_matrix(reference.Matrix(largest, scale, outer), cast.format, None, x.shape[1])
    return (jnp.abs(x) > limit[made.part]).sum()


def _scales(scale: Array, used: Array | None) -> Array:
    """Counts of float32 scales at their limits, and of all scales by byte; of float32 by the byte of the exponent."""
    flat, at_limits = scale.reshape(-1), (0, 0)
    counted = True if used is None else used.reshape(-1)
    if flat.dtype == jnp.float32:
        at_limits = ((flat <= 2.0**-126) & (flat != 0) & counted).sum(), ((flat >= 2.0**126) & counted).sum()
        flat = lax.bitcast_convert_type(flat, jnp.uint32) >> 23
    flat = jnp.where(counted, flat.astype(jnp.int32), SCALES)  # behind the last edge
    edges = jnp.searchsorted(jnp.sort(flat), jnp.arange(SCALES + 1, dtype=jnp.int32))
    return jnp.concatenate([_stacked(*at_limits), jnp.diff(edges).astype(jnp.float32)])


def _binades(x: Array, error: Array) -> Array:
    """Sums of x^2, then of the squared error, by binades below the largest magnitude; of every k-th element of many."""
    stride = max(1, x.size >> 14)
    a, d = x.reshape(-1)[::stride], error.reshape(-1)[::stride]
    which = jnp.floor(jnp.log2(jnp.abs(x).max()) - jnp.log2(jnp.abs(a)))
    in_binade = (which[:, None] == jnp.arange(BINADES, dtype=jnp.float32)).astype(jnp.float32)
    return jnp.matmul(jnp.stack([a * a, d * d]), in_binade, precision=lax.Precision.HIGHEST).reshape(-1)


def _noise(
    subject: Subject, watch: Measured, call: Call, operand: Operand, cast: Cast, matrix: Array
) -> tuple[Subject, Array]:
    """The mean error of stochastic rounding over the seeds that watches have for it, and the mean of its variances."""
    draws = []
    for seed in NOISE_SEEDS:
        made = _quantized(watch, call, operand, cast, matrix, np.array(seed, np.uint32))
        draws.append(made.values - made.x)
    errors = jnp.stack(draws)
    return subject._replace(kind="noise", more=errors.size), _stacked(errors.mean(), errors.var(axis=0, ddof=1).mean())


def _product(
    watch: Measured, call: Call, gemm: str, name: str, whole: Array, result: Array, a_RC: Array, b_SC: Array
) -> Readings:
    """The counts of a result, and its error on a part of it: ``result ~ a @ b.T`` against float32."""
    if not whole.size:
        return []
    subject = Subject(gemm, name, formats_of(getattr(call.config.recipe, gemm)), "")
    readings = [_tensor(subject, whole)]
    if watch.metrics.intersection(OF_PRODUCT):
        a, b = (matrix.astype(jnp.float32) for matrix in (a_RC, b_SC))
        exact = jnp.matmul(a, b.T, precision=lax.Precision.HIGHEST)
        readings.append((subject._replace(kind="product"), _errors(exact, result)))
    return readings


def _errors(exact: Array, result: Array) -> Array:
    """The numbers of `watching.of_product`, behind the power of two in units of which they are."""
    counted = jnp.isfinite(exact)
    exact, unit = _near_one(jnp.where(counted, exact, 0))
    error = jnp.where(counted, result.astype(jnp.float32), 0) / unit - exact
    return _stacked(unit, (exact * exact).sum(), (error * error).sum(), (exact * error).sum())


def _near_one(x: Array) -> tuple[Array, Array]:
    """x in units of a power of two that brings its largest magnitude to 1, and that unit."""
    _, exponent = jnp.frexp(jnp.abs(x).max(initial=0))
    unit = jnp.ldexp(np.float32(1), jnp.clip(exponent, -126, 126))
    return x / unit, unit


def _stacked(*numbers: Any) -> Array:
    return jnp.stack([jnp.asarray(number).astype(jnp.float32) for number in numbers])
