"""What `watch` measures on a device, as passes: whole tensors, rows of an operand and their cast, products."""

from typing import NamedTuple

from microfloat.kernels.casts import measures
from microfloat.kernels.constants import MeasuredCodes
from microfloat.layout import Part
from microfloat.passes.conversions import SCALE_KINDS
from microfloat.passes.matrix import INT32_MAX, At, Buffer, Matrix, Pass, Passes, specialization
from microfloat.passes.tables import NO_SIGNS, Warps, ceil_div
from microfloat.recipes import Cast

__all__ = [
    "BIAS", "CODES", "NUMBERS", "RESULT", "SAMPLED", "SCALE", "SECOND", "TENSOR_SCALE", "WHOLE", "Scales",
    "cast_measures", "numbers_of_product", "product_measures", "rows_measures", "whole_measures", "widen_passes",
]  # fmt: skip

# Positions in the table, besides At.SOURCE = the whole tensor, the rows x, or the exact product.
WHOLE = 3  # counts of a whole tensor, which are added to
CODES, SCALE, TENSOR_SCALE = 3, 4, 5
RESULT, BIAS = 3, 4
SECOND = At.SECOND  # of two matrices
NUMBERS = measures.NUMBERS.value
SAMPLED = 1 << 14  # of more elements than so many, every k-th is sorted into binades

_COUNTED_TOGETHER = 4096
_TILE = 16, 128
_GATHERED_TOGETHER = 4096
_MULTIPLIED_TOGETHER, _STEPS = 2048, 2
_WIDENED_TOGETHER = 2048
_EIGHT_WARPS, _SIXTEEN_WARPS = Warps(8), Warps(16)


class Scales(NamedTuple):
    """Scales of rows of an operand: their shape and strides, and the stride of a tensor scale, None without one.

    A stride is 0 where all rows, or all columns, share a scale.
    """

    shape: tuple[int, int]
    strides: tuple[int, int]
    level_stride: int | None


def whole_measures(matrix: Matrix) -> Passes:
    """The pass that counts a matrix, into int64 words of the table that are zero."""
    passes, count, device = Passes(0), matrix.rows * matrix.columns, matrix.device
    scalars = count, *matrix.sizes[1:]
    constants = matrix.is_contiguous, _COUNTED_TOGETHER
    programs = min(ceil_div(count, _COUNTED_TOGETHER), 4 * device.multiprocessors)
    key = (matrix.dtype, device.number, constants, *map(specialization, scalars))
    tensors = At.SOURCE, WHOLE
    passes.launches.append(
        Pass(measures.count_whole, key, programs, tensors, scalars, constants, _EIGHT_WARPS)
    )  # fmt: skip
    return passes


def _span_of(block: int | None) -> int:
    """The number of elements whose largest and smallest magnitudes are one span: a block, or a piece of a row."""
    return block or _TILE[1]


def rows_measures(matrix: Matrix, block: int) -> Passes:
    """The passes of `cast_measures` without a cast: the sums of x alone are filled in."""
    return _measures(matrix, None, NO_SIGNS, block, Scales((0, 1), (0, 0), None))


def cast_measures(matrix: Matrix, cast: Cast, scales: Scales) -> Passes:
    """The passes that measure rows of an operand [R, C] and what `cast` made of them.

    Two results: float64 [NUMBERS], and the largest and the smallest magnitude of each span, float32 [2, R, spans].
    """
    fmt = cast.format
    height, width = fmt.block
    codes = MeasuredCodes(
        fmt.element.mantissa_bits, fmt.element.bias, float(fmt.element.max), SCALE_KINDS[fmt.scale.name], height or 1,
        width or 1, 1 if scales.level_stride is None else 2,
    )  # fmt: skip
    signs = NO_SIGNS if cast.hadamard is None else cast.hadamard.sign_mask
    return _measures(matrix, codes, signs, _span_of(width), scales)


def _measures(matrix: Matrix, codes: MeasuredCodes | None, signs: int, span: int, scales: Scales) -> Passes:
    passes, (tile_rows, tile_columns) = Passes(2), _TILE
    rows, columns = matrix.rows, matrix.columns
    tiles, spans = matrix.tiles(*_TILE), ceil_div(columns, span)
    every = max(1, rows * columns // SAMPLED)
    sampled = ceil_div(rows * columns, every)
    numbers = passes.put(0, Part((NUMBERS,), (1,), "float64"))
    found_spans = passes.put(1, Part((2, rows, spans), (rows * spans, spans, 1), "float32"))
    partials = passes.add(Buffer((measures.SUMS.value, tiles), (tiles, 1), "float64", cleared=codes is None))
    sample = passes.add(Buffer((2, sampled), (sampled, 1), "float32", cleared=codes is None))

    level = At.NOTHING if scales.level_stride is None else TENSOR_SCALE
    scalars = (*matrix.sizes, *scales.strides, scales.level_stride or 0, every)
    constants = (codes, signs, span, matrix.index64 or rows * columns > INT32_MAX, tile_rows, tile_columns)
    key = (matrix.key, constants, *map(_is_wide, scalars[4:]))
    given = (At.NOTHING, At.NOTHING) if codes is None else (CODES, SCALE)
    tensors = (At.SOURCE, *given, level, numbers, partials, sample, found_spans)
    passes.launches.append(Pass(measures.measure_tiles, key, tiles, tensors, scalars, constants, _EIGHT_WARPS))

    kind = None if codes is None else codes.SCALE
    is_float = kind == SCALE_KINDS["FP32"]
    number, across = scales.shape[0] * scales.shape[1], scales.shape[1]
    scalars = tiles, sampled, number, across, *scales.strides
    constants = codes is not None, is_float, _GATHERED_TOGETHER
    key = (matrix.device.number, constants, *map(_is_wide, scalars))
    tensors = partials, sample, given[1], numbers
    programs = measures.GATHERERS.value if codes is not None else measures.SUMS.value
    passes.launches.append(Pass(measures.gather_sums, key, programs, tensors, scalars, constants, _SIXTEEN_WARPS))
    return passes


def _is_wide(value: int) -> bool:
    """All that Triton specializes on where a kernel asks for nothing else: 32 bits do not hold an integer."""
    return value > INT32_MAX


def widen_passes(a: Matrix, b: Matrix) -> Passes:
    """The pass that writes two matrices in float64, without gaps."""
    passes, (a_size, b_size) = Passes(2), (a.rows * a.columns, b.rows * b.columns)
    made = [
        passes.put(index, Part((size,), (1,), "float64")) for index, size in enumerate((a_size, b_size))
    ]  # fmt: skip
    of_a = ceil_div(a_size, _WIDENED_TOGETHER)
    scalars = *a.sizes, *b.sizes, of_a
    # Programs may reach a little beyond the last element.
    is_wide = any(one.index64 or size + _WIDENED_TOGETHER > INT32_MAX for one, size in ((a, a_size), (b, b_size)))
    constants = is_wide, _WIDENED_TOGETHER
    key = (a.dtype, b.dtype, a.device.number, constants, *map(specialization, scalars))
    programs = of_a + ceil_div(b_size, _WIDENED_TOGETHER)
    passes.launches.append(Pass(
        measures.widen, key, programs, (At.SOURCE, SECOND, *made), scalars, constants, _EIGHT_WARPS
    ))  # fmt: skip
    return passes


def numbers_of_product(rows: int, columns: int) -> int:
    """The number of float64 in which a product is compared."""
    return 4 * ceil_div(rows * columns, _MULTIPLIED_TOGETHER * _STEPS)


def product_measures(result: Matrix, bias: str | None) -> Passes:
    """The pass that compares a product with the exact one: float64 [programs, 4]. `bias`: its dtype, None without one.

    The exact product is float64 without gaps.
    """
    passes, together = Passes(1), _MULTIPLIED_TOGETHER * _STEPS
    programs = numbers_of_product(result.rows, result.columns) // 4
    found = passes.put(0, Part((programs, 4), (4, 1), "float64"))
    scalars = result.rows * result.columns, result.columns, result.stride_r, result.stride_c
    # Programs may reach a little beyond the last element.
    is_wide = result.rows * result.columns + together > INT32_MAX
    constants = bias is not None, is_wide, _STEPS, _MULTIPLIED_TOGETHER
    key = (result.dtype, bias, result.device.number, constants, *map(specialization, scalars))
    tensors = At.SOURCE, RESULT, At.NOTHING if bias is None else BIAS, found
    passes.launches.append(Pass(measures.measure_product, key, programs, tensors, scalars, constants, _EIGHT_WARPS))
    return passes
