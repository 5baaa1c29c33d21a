"""NVFP4 in its three formats: amaxes of the matrix and of its Hadamard transform, then both operands in one pass."""

import torch

from microfloat.kernels.casts import amax as amax_kernels
from microfloat.kernels.casts import nvfp4 as kernels
from microfloat.kernels.tables import NO_SIGNS, same_values, tile_of_nvfp4
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.triton._launch import TILES, Kernel, Matrix, ceil_div, multiprocessors, scratch
from microfloat.torch.backends.triton._plans import CastPlan
from microfloat.torch.backends.triton._scaled import Launch, measure_amax, measure_axes

__all__ = [
    "VALUES", "hadamard_transform", "nvfp4_launch", "quantize_nvfp4", "transformed_amax_launch", "values_nvfp4",
]  # fmt: skip

_QUANTIZE = Kernel(kernels.quantize_nvfp4)
_AMAX = Kernel(amax_kernels.amax_transformed)
_TRANSFORM = Kernel(kernels.transform)
# As many as run at once: each reads tiles until none is left, and only then are maxima compared across lanes.
_AMAX_PROGRAMS_PER_MULTIPROCESSOR = 3
_CODES, VALUES = kernels.CODES.value, kernels.VALUES.value


def _transformed_amax(matrix: Matrix, signs: int, along_rows: bool) -> torch.Tensor:
    """float32 [2]: amax of the matrix and of its transform along the columns (or rows)."""
    x = matrix.tensor
    out = torch.empty(2, dtype=torch.float32, device=x.device)
    transformed_amax_launch(matrix, signs, along_rows)(x.get_device(), x, out, scratch(x.get_device()))
    return out


def transformed_amax_launch(matrix: Matrix, signs: int, along_rows: bool) -> Launch:
    """The launch of `_transformed_amax`; its tensors: the matrix, float32 [2] for the result, scratch words."""
    tile_rows, tile_columns, warps = TILES["nvfp4_amax"]
    constants = (signs, along_rows, matrix.how(tile_rows, tile_columns))
    programs = ceil_div(matrix.rows, tile_rows) * ceil_div(matrix.columns, tile_columns)
    programs = min(programs, multiprocessors(matrix.tensor.get_device()) * _AMAX_PROGRAMS_PER_MULTIPROCESSOR)
    return Launch(_AMAX, (matrix.key, constants, warps), programs, matrix.sizes, constants, warps)


def _amaxes(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The amax that each operand's first level needs: () of the matrix or of its transform, or one per operand row."""
    row_amax = column_amax = plain = None
    if row and row.is_scaled_per_row:
        row_amax = measure_axes(matrix, True, False)[0]
    if column and column.is_scaled_per_row:
        column_amax = measure_axes(matrix, False, True)[1]
    if column and column_amax is None and column.signs != NO_SIGNS:
        both = _transformed_amax(matrix, column.signs, along_rows=False)
        plain, column_amax = both[:1], both[1:]
    if row and row_amax is None and row.signs != NO_SIGNS:
        both = _transformed_amax(matrix, row.signs, along_rows=True)
        plain, row_amax = both[:1], both[1:]
    if plain is None and ((row and row_amax is None) or (column and column_amax is None)):
        plain = measure_amax(matrix)
    return row_amax if row_amax is not None else plain, column_amax if column_amax is not None else plain


def nvfp4_launch(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None, output: int, *, row_stream: int = 0,
    column_stream: int = 0, batch: int = 0,
) -> Launch:  # fmt: skip
    """The launch that casts a matrix into one or both operands.

    Its tensors: the matrix; codes (or values), block scales and tensor scale of the row operand, those of the column
    operand; the amax of each (the same one for equal casts); the call seed. None what is not there.
    """
    row_length = _stored(row, matrix.columns) if row else matrix.columns
    column_length = _stored(column, matrix.rows) if column else matrix.rows
    if output == _CODES:
        row_aligned, column_aligned = row_length % 8 == 0, column_length % 8 == 0
    else:
        row_aligned, column_aligned = row_length % 2 == 0, matrix.columns % 2 == 0
    casts = (
        row.nvfp4_constant(output, row_aligned) if row else None,
        column.nvfp4_constant(output, column_aligned) if column else None,
    )
    tile_rows, tile_columns, warps, steps = tile_of_nvfp4(*casts, matrix.kind, (matrix.rows, matrix.columns))
    constants = (*casts, steps, matrix.how(tile_rows, tile_columns))
    key = (matrix.key, constants, warps, row_stream, column_stream, batch)
    programs = ceil_div(matrix.rows, tile_rows * steps) * ceil_div(matrix.columns, tile_columns)
    scalars = (row_stream, column_stream, batch, *matrix.sizes)
    return Launch(_QUANTIZE, key, programs, scalars, constants, warps)


def _launch(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None, outputs: tuple[torch.Tensor | None, ...],
    amaxes: tuple[torch.Tensor | None, torch.Tensor | None], output: int, seed: torch.Tensor | None,
    row_stream: int, column_stream: int, batch: int,
) -> None:  # fmt: skip
    launch = nvfp4_launch(matrix, row, column, output, row_stream=row_stream, column_stream=column_stream, batch=batch)
    launch(matrix.tensor.get_device(), matrix.tensor, *outputs, *amaxes, seed)


def _tensor_scale(plan: CastPlan, rows: int, device: torch.device) -> torch.Tensor:
    return torch.empty((rows, 1) if plan.is_scaled_per_row else (), dtype=torch.float32, device=device)


def _stored(plan: CastPlan, length: int) -> int:
    return ceil_div(length, 16) * 16 if plan.signs != NO_SIGNS else length


def _allocate(plan: CastPlan | None, rows: int, length: int, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """Codes, block scales and tensor scale of an operand."""
    if plan is None:
        return None, None, None
    stored = _stored(plan, length)
    codes = torch.empty((rows, ceil_div(stored, 2)), dtype=torch.uint8, device=device)
    scale_rows = ceil_div(rows, 16) if plan.block[0] == 16 else rows
    scale = torch.empty((scale_rows, ceil_div(stored, 16)), dtype=torch.uint8, device=device)
    return codes, scale, _tensor_scale(plan, rows, device)


def _operand(plan: CastPlan | None, parts: tuple, rows: int, length: int) -> Operand | None:
    if plan is None:
        return None
    codes, scale, tensor_scale = parts
    two_level = plan.cast.rule.two_level
    if two_level is None or not two_level.tensor_scale:
        tensor_scale = None
    return Operand(codes, scale, tensor_scale, plan.cast.format, rows, length, plan.cast.hadamard)


def quantize_nvfp4(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None, *, seed: torch.Tensor | None = None,
    row_stream: int = 0, column_stream: int = 0, batch: int = 0,
    amaxes: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
) -> tuple[Operand | None, Operand | None]:  # fmt: skip
    """Codes, block scales and tensor scales of both operands; `amaxes` replaces the measured ones."""
    rows, columns, device = matrix.rows, matrix.columns, matrix.tensor.device
    if amaxes is None:
        amaxes = _amaxes(matrix, row, column)
    row_parts = _allocate(row, rows, columns, device)
    column_parts = _allocate(column, columns, rows, device)
    _launch(
        matrix, row, column, (*row_parts, *column_parts), amaxes, _CODES, seed, row_stream, column_stream, batch
    )  # fmt: skip
    return _operand(row, row_parts, rows, columns), _operand(column, column_parts, columns, rows)


def values_nvfp4(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None, *, seed: torch.Tensor | None = None,
    row_stream: int = 0, column_stream: int = 0, batch: int = 0,
    amaxes: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Code x block scale of both operands in bfloat16 (exact), in the layout of the matrix, and their tensor scales.

    A transformed operand stays transformed: its contraction length is rounded up to 16. Operands that have the same
    values are one tensor.
    """
    rows, columns, device = matrix.rows, matrix.columns, matrix.tensor.device
    if amaxes is None:
        amaxes = _amaxes(matrix, row, column)
    if same_values(row, column):
        values, _, scale, _ = values_nvfp4(matrix, row, None, amaxes=amaxes)
        return values, values, scale, scale
    row_values = row_scale = column_values = column_scale = None
    if row:
        row_values = torch.empty((rows, _stored(row, columns)), dtype=torch.bfloat16, device=device)
        row_scale = _tensor_scale(row, rows, device)
    if column:
        column_values = torch.empty((_stored(column, rows), columns), dtype=torch.bfloat16, device=device)
        column_scale = _tensor_scale(column, columns, device)
    outputs = (row_values, None, row_scale, column_values, None, column_scale)
    _launch(matrix, row, column, outputs, amaxes, VALUES, seed, row_stream, column_stream, batch)
    return row_values, column_values, row_scale, column_scale


def hadamard_transform(x: torch.Tensor, signs: int) -> torch.Tensor:
    """The transform of a matrix along its rows in bfloat16, C rounded up to 16 (docs/numerics.md 5.2)."""
    matrix = Matrix(x)
    tile_rows, tile_columns, warps = TILES["nvfp4"]
    out = torch.empty((matrix.rows, ceil_div(matrix.columns, 16) * 16), dtype=torch.bfloat16, device=x.device)
    constants = (signs, matrix.how(tile_rows, tile_columns)._replace(EVEN=False))  # its output has columns to fill
    programs = ceil_div(matrix.rows, tile_rows) * ceil_div(matrix.columns, tile_columns)
    _TRANSFORM((matrix.key, constants, warps), programs, x.get_device(), (x, out), matrix.sizes, constants, warps)
    return out
