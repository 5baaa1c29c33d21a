"""One launch that casts one or two matrices with scales per tensor or row, measured first where that is asked for."""

import functools

import torch

from microfloat.kernels import pair as kernels
from microfloat.torch.backends.triton._launch import TILES, Kernel, Matrix, ceil_div, compiled_conversions
from microfloat.torch.backends.triton._plans import CastPlan
from microfloat.torch.backends.triton._scaled import GIVEN, Launch

__all__ = ["fits_together", "together_launch"]

# To measure, programs wait for each other, so all of them must run at once: a cooperative launch.
_MEASURE_AND_CAST, _CAST = Kernel(kernels.cast_pair, cooperative=True), Kernel(kernels.cast_pair)
# Three of them fit on a multiprocessor; two leave room beside kernels that wait for other GPUs, which a launch that
# needs the whole GPU would have to wait for in turn.
_PROGRAMS_PER_MULTIPROCESSOR = 2
# Larger matrices do not stay in the L2 cache between the two readings, and their launches cost nothing beside them.
_MOST_ELEMENTS = 1 << 24


@functools.cache
def _most_programs(device: int) -> int:
    """How many programs surely run at once. One in the interpreter, where they run one after another."""
    if device < 0:
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_MULTIPROCESSOR


def fits_together(first: Matrix, second: Matrix | None) -> bool:
    """Whether one launch is to cast these matrices."""
    matrices = [matrix for matrix in (first, second) if matrix is not None]
    elements = sum(matrix.rows * matrix.columns for matrix in matrices)
    return elements <= _MOST_ELEMENTS and not any(matrix.index64 for matrix in matrices)


def together_launch(
    matrices: list[tuple[Matrix, CastPlan | None, CastPlan | None]], mode: int, *, records: bool
) -> Launch:
    """The launch for matrices with the casts of their row and column operands; `mode`: GIVEN, AMAX or AXES.

    Its tensors, for each of two: the matrix; codes of both operands; scales of both; the encode scale (GIVEN) or int32
    [R + C] (AXES); the history to record into; and after both scratch words. None what is not there.
    """
    rows, columns, warps = TILES["together"]
    tiles, scalars, casts, keys = 0, [], [], []
    for matrix, row, column in matrices:
        tiles += ceil_div(matrix.rows, rows) * ceil_div(matrix.columns, columns)
        scalars += [(row or column).epsilon, *matrix.sizes]  # type: ignore[union-attr]
        reads = (matrix.kind, matrix.fills(rows, columns), matrix.even_pairs, matrix.even_quads)
        casts += [row.scaled_cast if row else None, column.scaled_cast if column else None, reads]
        keys.append(matrix.key)
    if len(matrices) == 1:
        scalars += [0.0, 0, 0, 0, 0]
        casts += [None, None, (0, False, False, False)]
    device = matrices[0][0].tensor.get_device()
    constants = (mode, records, len(matrices) == 2, *casts, compiled_conversions(device), rows, columns)
    programs = min(tiles, _most_programs(device))
    kernel = _CAST if mode == GIVEN else _MEASURE_AND_CAST
    return Launch(kernel, (*keys, constants, warps), programs, tuple(scalars), constants, warps)
