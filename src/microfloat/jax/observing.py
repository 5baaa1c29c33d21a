"""Readings of one call of an op, made where it is traced inside a watched function and carried by its results.

A watched function is traced under a context that is part of the key of JAX's caches, as the recipe of an `autocast` is,
so that an unwatched program has no trace of any of this. In it each call binds `shown_p`, an identity of its results
which takes the readings along; `microfloat.jax.watch` finds it in the jaxpr and makes the readings outputs. Sums are
float32, in units of a power of two that brings the numbers near 1 and comes first in their vector.

Legend: M = rows of x, K = in features, N = out features; R, C = rows and contraction length of an operand form.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from microfloat import watching as common
from microfloat.jax.backends import casts, reference
from microfloat.jax.calls import Call
from microfloat.jax.numerics.bits import as_code_dtype, hadamard_transform, widened
from microfloat.operands import OPERANDS_OF, Operand
from microfloat.recipes import Cast, Recipe
from microfloat.recipes.explanation import operands_of as formats_of
from microfloat.routes import OperandSpec
from microfloat.watching import BINADES, SCALES, Measured


class Subject(NamedTuple):
    """The subject of a vector of numbers: a "tensor", "rows", "noise" or a "product" (its `kind`). `more`: the format
    of the scales of rows, the number of draws of noise, or the Gemm of a product."""

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


class Blocks(NamedTuple):
    """The matrices of one call: blocks [B, R, C] of rows of x and dy, which are cast one by one, and a w per group.

    A `dot_general` has one block and one group. `is_used` [B, R]: rows of blocks that hold a row of a group, None for
    all. ``gather(x_TC)``: the blocks of a tensor. ``quantized(operand, cast, x_BRC, words)``: the operand of every
    block. ``of_group(w_GNK)``: the matrix of each block's group. ``for_each(function, *arrays)``: ``function(call,
    *arrays)`` for each group. ``sums(x_BNK)``: the sum over the blocks of each group.
    """

    call: Call
    is_used: Array | None
    gather: Callable[[Array], Array]
    quantized: Callable[..., reference.Matrix]
    of_group: Callable[[Array], Array]
    for_each: Callable[..., Any]
    sums: Callable[[Array], Array]

    @staticmethod
    def of(call: Call) -> "Blocks":
        """The one block of a `dot_general`."""

        def for_each(function: Callable[..., Any], *arrays: Array) -> Any:
            return jax.tree.map(lambda leaf: leaf[None], function(call, *(array[0] for array in arrays)))

        def quantized(operand: Operand, cast: Cast, x_BRC: Array, words: Any) -> Any:
            return for_each(partial(_quantized, operand, cast, words), x_BRC)

        return Blocks(call, None, lambda x: x[None], quantized, lambda w: w, for_each, lambda x: x)


def observe_forward(blocks: Blocks, x: Array, w: Array, y_BRN: Array, y: Array, *, stage: str) -> Array:
    """y, with the readings of x, w and y in a watched function. `y_BRN`: its blocks, or itself."""
    watch = watching.value
    if watch is None:
        return y
    uses = True, stage == "kept"
    # Behind barriers nothing here is fused with the computation.
    x, w, y_BRN = map(lax.optimization_barrier, (x, _in_groups(w), _in_groups(y_BRN)))
    readings = [*_operand(watch, blocks, "x", x, uses), *_operand(watch, blocks, "w", w, uses)]
    rows, cols = watch.part(y_BRN.shape[1]), watch.part(y_BRN.shape[2])
    factors = blocks.gather(x)[:, rows], blocks.of_group(w[:, cols])
    readings += _product(watch, blocks, "fprop", "y", y_BRN, y_BRN[:, rows, cols], *factors)
    return _shown(blocks.call.config.recipe, stage, readings, y)[0]


def seen_by_backward(x: Array, w: Array) -> tuple[Array, Array] | None:
    """The columns of x and w that the measured parts of dw and dx read; None in a function that is not watched."""
    if watching.value is None:
        return None
    part = watching.value.part(x.shape[1])
    return x[:, part], w[..., part]


def observe_backward(
    blocks: Blocks, seen: tuple[Array, Array] | None, dy: Array, products: tuple[Array, Array],
    results: tuple[Array, Array],
) -> tuple[Array, Array]:  # fmt: skip
    """dx and dw, with the readings of dy and of both products (before they are summed over a mesh)."""
    watch = watching.value
    if watch is None or seen is None:
        return results
    dy, dx, dw = map(lax.optimization_barrier, (dy, *map(_in_groups, products)))
    readings, dy_BRN = _operand(watch, blocks, "dy", dy, (True, True)), blocks.gather(dy)
    rows, inputs, outputs = (watch.part(size) for size in (dx.shape[1], dx.shape[2], dy.shape[1]))
    x_columns, w_columns = seen[0], _in_groups(seen[1])
    factors = dy_BRN[:, rows], blocks.of_group(w_columns.swapaxes(1, 2))
    readings += _product(watch, blocks, "dgrad", "dx", dx, dx[:, rows, inputs], *factors)
    factors = dy_BRN[..., outputs].swapaxes(1, 2), blocks.gather(x_columns).swapaxes(1, 2)
    readings += _product(watch, blocks, "wgrad", "dw", dw, dw[:, outputs, inputs], *factors, sums=blocks.sums)
    return _shown(blocks.call.config.recipe, "backward", readings, *results)  # type: ignore[return-value]


def _in_groups(matrix: Array) -> Array:
    return matrix if matrix.ndim == 3 else matrix[None]


def _shown(recipe: Recipe, stage: str, readings: Readings, *results: Array) -> tuple[Array, ...]:
    subjects = tuple(subject for subject, _ in readings)
    numbers = [lax.stop_gradient(numbers) for _, numbers in readings]
    return tuple(shown_p.bind(*results, *numbers, stage=stage, op=type(recipe).__name__, subjects=subjects))


def _operand(watch: Measured, blocks: Blocks, tensor: str, whole: Array, uses: tuple[bool, bool]) -> Readings:
    """Readings of both operands of a tensor that are in use, and of the formats that might be."""
    if tensor not in watch.tensors or not whole.size:
        return []
    matrices, used = (whole, None) if tensor == "w" else (blocks.gather(whole), blocks.is_used)
    subject, is_plain, asked = _asked(watch, blocks.call, tensor, whole.dtype, matrices.shape[1:], uses)
    readings = [_tensor(subject, whole)]
    if is_plain and watch.metrics.intersection(common.OF_SAMPLE):
        readings.append((subject, jax.vmap(partial(_plain_rows, watch))(matrices, used)))
    for operand, cast, words in asked:
        subject = Subject(operand.gemm, tensor, cast.format.name, "rows", cast.format.scale)
        made = _made(watch, blocks, operand, cast, matrices, words)
        readings.append((subject, jax.vmap(partial(_rows, watch, cast))(made)))
        if cast.is_stochastic and "sr_noise" in watch.metrics and used is None:
            draws = [
                _made(watch, blocks, operand, cast, matrices, np.array(seed, np.uint32)) for seed in common.NOISE_SEEDS
            ]
            errors = jnp.stack([draw.values - draw.x for draw in draws])
            noise = _stacked(errors.mean(), errors.var(axis=0, ddof=1).mean())
            readings.append((subject._replace(kind="noise", more=errors.size), noise))
    return readings


def _asked(
    watch: Measured, call: Call, tensor: str, dtype: np.dtype, shape: tuple[int, ...], uses: tuple[bool, bool]
) -> tuple[Subject, bool, list[tuple[Operand, Cast, Any]]]:
    """The subject of a tensor, if its first operand has no Cast, and the casts to measure with their seeds."""
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
    """Rows of an operand form, finite or 0, the values that a cast made of them, and all its codes and scales. `used`:
    for every scale, True if it is counted; None for all. A tensor in high precision has no `values`."""

    x: Array
    finite: Array
    values: Any = None
    operand: Any = None
    used: Array | None = None


def _quantized(operand: Operand, cast: Cast, words: Any, call: Call, matrix: Array) -> Any:
    """The bytes that the call computes with, by XLA's operations."""
    one, inputs = OperandSpec(cast, stream=operand.stream), casts.CastInputs(words, call.seed.batch, None)
    inputs = inputs._replace(scale_enc=call.scales.get(operand.tensor))
    pair = (None, one) if operand.transposed else (one, None)
    made = casts.cast_both(matrix, *pair, inputs, axes=call.axes(matrix), backend="reference")
    return made.column if operand.transposed else made.row


def _made(watch: Measured, blocks: Blocks, operand: Operand, cast: Cast, matrices: Array, words: Any) -> _Made:
    """The measured rows of every block of x or dy, or of the w of every group, with a leading axis."""

    def of_matrix(matrix: Array, quantized: reference.Matrix, used: Array | None) -> _Made:
        turned, scale = operand.transposed, quantized.scale
        form = widened(matrix.T if turned else matrix)
        values = reference.dequantize_matrix(quantized, cast.format, cast.hadamard, form.shape[1])
        part = watch.part(form.shape[0])
        finite = jnp.isfinite(form[part])
        if used is not None:
            finite &= used if turned else used[part, None]
            along = scale.shape[1 if turned else 0] if scale.ndim == 2 else 1
            each = jnp.pad(used, (0, -used.size % along)).reshape(along, -1).any(axis=1)
            used = jnp.broadcast_to(each if turned or scale.ndim < 2 else each[:, None], scale.shape)
        x, q = (jnp.where(finite, rows[part], 0) for rows in (form, values))
        return _Made(x, finite, q, quantized, used)

    if operand.tensor == "w":
        quantized, used = blocks.for_each(partial(_quantized, operand, cast, words), matrices), None
    else:
        quantized, used = blocks.quantized(operand, cast, matrices, words), blocks.is_used
    return jax.vmap(of_matrix)(matrices, quantized, used)


def _plain_rows(watch: Measured, matrix: Array, used: Array | None) -> Array:
    """The numbers of measured rows in high precision."""
    rows = matrix[watch.part(len(matrix))].astype(jnp.float32)
    counted = jnp.isfinite(rows) if used is None else jnp.isfinite(rows) & used[watch.part(len(matrix)), None]
    return _rows(watch, None, _Made(rows, counted))


def _rows(watch: Measured, cast: Cast | None, made: _Made) -> Array:
    """The numbers of `watching.of_rows` in units of a power of two, which stands first."""
    # In place of the sum of x q stands that of the error times x, which is smaller.
    wanted, finite = watch.metrics, made.finite
    x, unit = _near_one(jnp.where(finite, made.x, 0))
    noise = along = flushed = zero = clipped = 0
    spans, scales, binades, block = jnp.zeros(3), jnp.zeros(SCALES + 2), jnp.zeros(2 * BINADES), 32
    if cast is not None:
        error, is_zero = made.values / unit - x, made.values == 0
        block = cast.format.block[1] or x.shape[1]
        if wanted.intersection(common.OF_CAST):
            noise, along = (error * error).sum(), (x * error).sum()
            flushed, zero = (is_zero & (made.x != 0)).sum(), (is_zero & finite).sum()
            clipped = _clipped(watch, cast, made) if "clip" in wanted else 0
        if wanted.intersection(common.OF_SCALES):
            scales = _scales(made.operand.scale, made.used)
        if "error_by_magnitude" in wanted:
            binades = _binades(x, error)
    if wanted.intersection(common.OF_SAMPLE):
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


def _clipped(watch: Measured, cast: Cast, made: _Made) -> Array:
    """The number of elements, of the Hadamard transform where there is one, that are too large for their block."""
    codes, scale, outer = made.operand
    element = cast.format.element
    x = made.x if cast.hadamard is None else hadamard_transform(made.x, cast.hadamard)
    largest = jnp.full(codes.shape, common.largest_byte(element), jnp.uint8)
    largest = largest if element.codes_per_byte == 2 else as_code_dtype(largest, element)
    limit = reference.dequantize_matrix(reference.Matrix(largest, scale, outer), cast.format, None, x.shape[1])
    return (jnp.abs(x) > limit[watch.part(len(limit))]).sum()


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


def _product(
    watch: Measured, blocks: Blocks, gemm: str, name: str, whole: Array, result_BRS: Array, a_BRC: Array,
    b_BSC: Array, sums: Callable[[Array], Array] = lambda exact: exact,
) -> Readings:  # fmt: skip
    """The counts of a result, and the error of a part of it against ``sums(a @ b.T)`` in float32."""
    if not whole.size:
        return []
    table = getattr(blocks.call.config.recipe, gemm)
    subject = Subject(gemm, name, formats_of(table), "")
    readings = [_tensor(subject, whole)]
    if watch.metrics.intersection(common.OF_PRODUCT):
        a, b = (matrix.astype(jnp.float32) for matrix in (a_BRC, b_BSC))
        exact = sums(jnp.einsum("brc,bsc->brs", a, b, precision=lax.Precision.HIGHEST))
        readings.append((subject._replace(kind="product", more=table), jax.vmap(_errors)(exact, result_BRS)))
    return readings


def _errors(exact: Array, result: Array) -> Array:
    """The numbers of `watching.of_product` in units of a power of two, which stands first."""
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
