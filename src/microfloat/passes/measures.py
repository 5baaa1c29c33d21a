"""What `watch` measures on a device, as passes: whole tensors, rows of an operand and their cast, products."""

from typing import NamedTuple

from microfloat.kernels.casts import measures
from microfloat.kernels.constants import MeasuredCodes
from microfloat.layout import Part
from microfloat.passes.conversions import SCALE_KINDS
from microfloat.passes.matrix import INT32_MAX, NO_SIGNS, At, Device, Matrix, Pass, Passes, specialization
from microfloat.passes.tables import Warps, ceil_div
from microfloat.recipes import Cast

__all__ = [
    "BIAS", "CODES", "NUMBERS", "RESULT", "ROW", "SAMPLED", "SCALE", "SECOND", "TENSOR_SCALE", "WHOLE", "Left",
    "Scales", "cast_measures", "gather_passes", "numbers_of_product", "product_measures", "rows_measures",
    "whole_measures", "widen_passes",
]  # fmt: skip

# Positions in the table, besides At.SOURCE = the whole tensor, the rows x, or the exact product.
WHOLE = 3  # counts of a whole tensor, which are added to
CODES, SCALE, TENSOR_SCALE = 3, 4, 5
RESULT, BIAS = 3, 4
SECOND = At.SECOND  # of two matrices
NUMBERS, ROW = measures.NUMBERS.value, measures.ROW.value
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


class Left(NamedTuple):
    """What the passes of one cast leave to be gathered, as `gather_sums` is told: so many tiles; sampled elements;
    scales, how many of them in a row, and their strides; blocks with spans, and pieces of each; the kind of scales.
    """

    tiles: int
    sampled: int
    scales: int
    across: int
    stride_r: int
    stride_k: int
    blocks: int
    pieces: int
    kind: int


def rows_measures(matrix: Matrix, block: int) -> tuple[Passes, Left]:
    """The passes of `cast_measures` without a cast: the sums of x alone are filled in."""
    return _measures(matrix, None, NO_SIGNS, block, Scales((0, 1), (0, 0), None))


def cast_measures(matrix: Matrix, cast: Cast, scales: Scales) -> tuple[Passes, Left]:
    """The passes that measure rows of an operand [R, C] and what `cast` made of them, for `gather_passes`.

    Three results: float64 sums of tiles, float32 [2, sampled elements] of x and its values, and the largest and the
    smallest magnitude of each span, float32 [2, R, spans].
    """
    fmt = cast.format
    height, width = fmt.block
    codes = MeasuredCodes(
        fmt.element.mantissa_bits, fmt.element.bias, float(fmt.element.max), SCALE_KINDS[fmt.scale.name], height or 1,
        width or 1, 1 if scales.level_stride is None else 2,
    )  # fmt: skip
    signs = NO_SIGNS if cast.hadamard is None else cast.hadamard.sign_mask
    return _measures(matrix, codes, signs, width, scales)


def _measures(
    matrix: Matrix, codes: MeasuredCodes | None, signs: int, block: int | None, scales: Scales
) -> tuple[Passes, Left]:
    passes, (tile_rows, tile_columns) = Passes(3), _TILE
    rows, columns = matrix.rows, matrix.columns
    span = block or tile_columns  # a block, or a piece of a row
    tiles, spans = matrix.tiles(*_TILE), ceil_div(columns, span)
    every = max(1, rows * columns // SAMPLED)
    sampled = 0 if codes is None else ceil_div(rows * columns, every)
    partials = passes.put(0, Part((measures.SUMS.value, tiles), (tiles, 1), "float64"))
    sample = At.NOTHING if codes is None else passes.put(1, Part((2, sampled), (sampled, 1), "float32"))
    found_spans = passes.put(2, Part((2, rows, spans), (rows * spans, spans, 1), "float32"))

    level = At.NOTHING if scales.level_stride is None else TENSOR_SCALE
    scalars = (*matrix.sizes, *scales.strides, scales.level_stride or 0, every)
    constants = (codes, signs, span, matrix.index64 or rows * columns > INT32_MAX, tile_rows, tile_columns)
    key = (matrix.key, constants, *map(_is_wide, scalars[4:]))
    given = (At.NOTHING, At.NOTHING) if codes is None else (CODES, SCALE)
    tensors = (At.SOURCE, *given, level, partials, sample, found_spans)
    passes.launches.append(Pass(measures.measure_tiles, key, tiles, tensors, scalars, constants, _EIGHT_WARPS))

    (scales_down, across), kind = scales.shape, 0
    if codes is not None:
        of_scale = codes.SCALE
        kind = 2 if of_scale == SCALE_KINDS["FP32"] else 1
    blocks, pieces = (rows, spans) if block is None else (rows * spans, 1)
    return passes, Left(tiles, sampled, scales_down * across, across, *scales.strides, blocks, pieces, kind)


def gather_passes(casts: int, device: Device) -> Passes:
    """The pass that gathers what the passes of so many casts left: the matrix is a table of `Left`, each
    behind five addresses: of its numbers, and of its sums, sample, scales and spans.
    """
    passes, constants = Passes(0), (_GATHERED_TOGETHER,)
    passes.launches.append(Pass(
        measures.gather_sums, (device.number, constants), casts * measures.PROGRAMS.value, (At.SOURCE,), (), constants,
        _SIXTEEN_WARPS,
    ))  # fmt: skip
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
