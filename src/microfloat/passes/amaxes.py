"""Passes that measure a matrix: its amax, that of its Hadamard transform, or the amaxes of its rows and columns."""

from microfloat.kernels.casts import amax
from microfloat.layout import Part
from microfloat.passes import tables
from microfloat.passes.matrix import INT32_MAX, SCALAR, At, Buffer, Matrix, Pass, Passes
from microfloat.passes.tables import ceil_div

# Programs of `amax_transformed` on a multiprocessor, as many as fit; each compares maxima across lanes only once.
_MEASURING = 3


def amax_passes(matrix: Matrix) -> Passes:
    """The pass that measures the amax of a matrix: float32 (), NaN ignored."""
    passes = Passes(1)
    measure(passes, matrix, At.SOURCE, passes.put(0, Part(*SCALAR[:3])))
    return passes


def measure(passes: Passes, matrix: Matrix, source: int, result: int) -> None:
    """Add the launch that writes the amax of the matrix at `source` to `result`."""
    tensors = (source, result, At.WORDS)
    if not matrix.is_contiguous:
        passes.launches.append(Pass(
            amax.amax_strided, (matrix.key,), matrix.tiles(32, 128), tensors, matrix.sizes,
            (matrix.index64, 32, 128),
        ))  # fmt: skip
        return
    count, device = matrix.rows * matrix.columns, matrix.device
    block, unroll, at_once, warps = tables.AMAX_PIECES
    kind = matrix.kind if count & 1 == 0 else 0
    constants = (kind, count % (block * unroll) == 0, device.conversions, block, unroll)
    programs = min(ceil_div(count, block * unroll), at_once * device.multiprocessors)
    key = (matrix.key, count & 15 == 0, count > INT32_MAX, count == 1, constants)
    passes.launches.append(Pass(amax.amax_contiguous, key, programs, tensors, (count,), constants, warps))


def measure_groups(
    passes: Passes, matrix: Matrix, source: int, plan: tuple[int, ...], row: bool, column: bool
) -> tuple[int, int]:
    """Add the launch that measures rows in groups (an empty `plan`: one group); returns the positions of the amaxes.

    Those of rows [R] and of the columns of each group [groups, C]; without `row` and `column`, of each group [groups].
    """
    rows = matrix.rows if row else 0
    columns = (matrix.with_scales or 1) * (matrix.columns if column else 0 if row else 1)
    amaxes = passes.add(Buffer((rows + columns,), (1,), "float32", cleared=True))
    tile_rows, tile_columns, warps = tables.TILES["axes"]
    constants = (row, column, matrix.how(tile_rows, tile_columns))
    parts = [(0, rows) if row else None, (rows, columns) if columns else None]
    bits = [At.NOTHING if part is None else passes.slice(amaxes, *part, "int32") for part in parts]
    kernel, sizes = amax.amax_rows_columns, matrix.sizes
    if plan:
        kernel, sizes = amax.amaxes_of_groups, (matrix.each, *sizes)
    passes.launches.append(Pass(
        kernel, (matrix.key, constants, warps), matrix.tiles(tile_rows, tile_columns), (source, *bits, *plan), sizes,
        constants, warps,
    ))  # fmt: skip
    of_rows, of_groups = (At.NOTHING if part is None else passes.slice(amaxes, *part) for part in parts)
    return (of_rows, of_groups) if row or column else (of_groups, At.NOTHING)


def measure_transformed(
    passes: Passes, matrix: Matrix, source: int, plan: tuple[int, int], signs: int, is_row: bool
) -> tuple[int, int]:
    """Add the launch that measures a matrix and its Hadamard transform, of rows or of columns; positions of the amaxes.

    Each is one number, or one for each group where groups have scales of their own.
    """
    number = matrix.with_scales or 1
    plain = passes.add(Buffer((2 * number,), (1,), "float32", bool(matrix.with_scales), spans_mesh=True))
    transformed = passes.slice(plain, number, number)
    rows, columns, warps = tables.TILES["nvfp4_amax"]
    constants = (signs, is_row, matrix.how(rows, columns))
    kernel, programs, sizes = amax.amax_transformed, matrix.tiles(rows, columns), matrix.sizes
    tensors: tuple[int, ...] = (source, plain, At.WORDS)
    if matrix.with_scales:
        bits = (passes.slice(plain, first, number, "int32") for first in (0, number))
        kernel, tensors, sizes = amax.amaxes_of_transformed_groups, (source, *bits, *plan), (matrix.each, *sizes)
    else:
        programs = min(programs, matrix.device.multiprocessors * _MEASURING)
    passes.launches.append(Pass(kernel, (matrix.key, constants, warps), programs, tensors, sizes, constants, warps))
    return plain, transformed
