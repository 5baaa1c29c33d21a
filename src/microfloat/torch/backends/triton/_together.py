"""One launch that casts one or two matrices with scales per tensor or row, measured first where that is asked for."""

from collections.abc import Sequence

from microfloat.kernels.casts import pair as kernels
from microfloat.kernels.constants import Pass
from microfloat.kernels.tables import NO_SIGNS
from microfloat.torch.backends.triton._launch import TILES, Kernel, Matrix, ceil_div, multiprocessors
from microfloat.torch.backends.triton._nvfp4 import VALUES
from microfloat.torch.backends.triton._plans import CastPlan
from microfloat.torch.backends.triton._scaled import GIVEN, Launch

__all__ = ["fits_together", "fits_values_together", "together_launch", "values_launch"]

# To measure, programs wait for each other, so all of them must run at once: a cooperative launch.
_MEASURE_AND_CAST_VALUES = Kernel(kernels.values_pair, cooperative=True)
_MEASURE_AND_CAST, _CAST = Kernel(kernels.cast_pair, cooperative=True), Kernel(kernels.cast_pair)
# Three of them fit on a multiprocessor; two leave room beside kernels that wait for other GPUs, which a launch that
# needs the whole GPU would have to wait for in turn.
_PROGRAMS_PER_MULTIPROCESSOR = 2
# Larger matrices do not stay in the L2 cache between the two readings, and their launches cost nothing beside them.
_MOST_ELEMENTS = 1 << 24


def _most_programs(device: int) -> int:
    """How many programs surely run at once. One in the interpreter, where they run one after another."""
    return 1 if device < 0 else multiprocessors(device) * _PROGRAMS_PER_MULTIPROCESSOR


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
    tiles, scalars, passes, keys = 0, [], [], []
    for matrix, row, column in matrices:
        tiles += ceil_div(matrix.rows, rows) * ceil_div(matrix.columns, columns)
        scalars += [(row or column).epsilon, *matrix.sizes]  # type: ignore[union-attr]
        casts = row.scaled_cast if row else None, column.scaled_cast if column else None
        passes.append(Pass(*casts, matrix.how(rows, columns, units=True)))
        keys.append(matrix.key)
    if len(matrices) == 1:
        scalars += [0.0, 0, 0, 0, 0]
        passes.append(None)
    device = matrices[0][0].tensor.get_device()
    constants = (mode, records, *passes)
    programs = min(tiles, _most_programs(device))
    kernel = _CAST if mode == GIVEN else _MEASURE_AND_CAST
    return Launch(kernel, (*keys, constants, warps), programs, tuple(scalars), constants, warps)


def fits_values_together(matrices: list[tuple[Matrix, CastPlan | None, CastPlan | None]]) -> bool:
    """Whether one launch is to measure and cast these matrices to NVFP4 values: no row operand is transformed, nor the
    column operand of a second matrix, and no amax is one of rows."""
    for number, (matrix, row, column) in enumerate(matrices):
        plans = [plan for plan in (row, column) if plan is not None]
        if matrix.index64 or any(plan.family != "nvfp4" or plan.is_scaled_per_row for plan in plans):
            return False
        if (row and row.signs != NO_SIGNS) or (number and column and column.signs != NO_SIGNS):
            return False
    return sum(matrix.rows * matrix.columns for matrix, *_ in matrices) <= _MOST_ELEMENTS


def values_launch(
    matrices: list[tuple[Matrix, CastPlan | None, CastPlan | None]],
    streams: Sequence[tuple[int, ...]],
    draws_seed: bool,
) -> Launch:
    """The launch that measures one or two matrices and casts them to NVFP4 values.

    Its tensors, for each of two: the matrix; values and tensor scale of the row operand, those of the column operand;
    after both the call seed, the drawn bits from which it is made (`draws_seed`) and scratch words. None what is not
    there.
    """
    rows, columns, warps = TILES["nvfp4_together"]
    tiles, scalars, passes, keys = 0, [], [], []
    for (matrix, row, column), counters in zip(matrices, streams, strict=True):
        tiles += ceil_div(matrix.rows, rows) * ceil_div(matrix.columns, columns)
        scalars += [*counters, *matrix.sizes]
        aligned = matrix.columns % 2 == 0
        first, second = (None if plan is None else plan.nvfp4_constant(VALUES, aligned) for plan in (row, column))
        passes.append(Pass(first, second, matrix.how(rows, columns)))
        keys.append(matrix.key)
    if len(matrices) == 1:
        scalars += [0, 0, 0, 0, 0, 0]
        passes.append(None)
    device = matrices[0][0].tensor.get_device()
    constants = (draws_seed, *passes)
    programs, key = min(tiles, _most_programs(device)), (*keys, *streams, constants, warps)
    return Launch(_MEASURE_AND_CAST_VALUES, key, programs, tuple(scalars), constants, warps)
