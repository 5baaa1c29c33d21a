"""MX and FP8 1x128: codes and scales, values in bfloat16, or codes folded to one scale per 128 elements."""

import torch

from microfloat.formats import FP8_1x128, FP8_1x128_E5M2, FP8_128x128, FP8_128x128_E5M2
from microfloat.kernels.casts import blocks as block_kernels
from microfloat.kernels.casts import fold as fold_kernels
from microfloat.kernels.casts.fold import folds
from microfloat.kernels.device.tiles import SCALE_COLUMN_MAJOR
from microfloat.kernels.tables import tile_of_blocks
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.triton._launch import TILES, Kernel, Matrix, ceil_div, scratch
from microfloat.torch.backends.triton._plans import CastPlan, codes_dtype, operand, paired
from microfloat.torch.backends.triton._scaled import Launch

__all__ = [
    "VALUES", "blocks_launch", "empty_scale", "fold_blocks", "fold_launch", "folded_dtype", "quantize_blocks",
    "values_blocks",
]  # fmt: skip

_QUANTIZE = Kernel(block_kernels.quantize_blocks)
_FOLD = Kernel(fold_kernels.fold_blocks)
_CODES, VALUES = block_kernels.CODES.value, block_kernels.VALUES.value


def empty_scale(plan: CastPlan, rows: int, length: int, device: torch.device) -> torch.Tensor:
    """Room for the block scales of an operand of `rows` x `length`."""
    shape = (ceil_div(rows, plan.block[0] or rows), ceil_div(length, plan.block[1] or length))
    if plan.scale_layout == SCALE_COLUMN_MAJOR.value:
        return torch.empty(shape[::-1], dtype=plan.scale_dtype, device=device).t()
    return torch.empty(shape, dtype=plan.scale_dtype, device=device)


def blocks_launch(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None, output: int = _CODES, *, row_stream: int = 0,
    column_stream: int = 0, batch: int = 0,
) -> Launch:  # fmt: skip
    """The launch that casts a matrix into one or both operands.

    Its tensors: the matrix; codes (or values) and scales of the row operand, those of the column operand; the call
    seed. None what is not there.
    """
    casts = row.constant(output) if row else None, column.constant(output) if column else None
    tile_rows, tile_columns, warps = tile_of_blocks(*casts, matrix.kind, matrix.fills)
    constants = (*casts, matrix.how(tile_rows, tile_columns, units=True))
    key = (matrix.key, constants, warps, row_stream, column_stream, batch)
    scalars = (
        row_stream, column_stream, batch, row.epsilon if row else 0.0, column.epsilon if column else 0.0, *matrix.sizes
    )  # fmt: skip
    programs = ceil_div(matrix.rows, tile_rows) * ceil_div(matrix.columns, tile_columns)
    return Launch(_QUANTIZE, key, programs, scalars, constants, warps)


def _launch(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None, outputs: tuple[torch.Tensor | None, ...],
    output: int,
    seed: torch.Tensor | None, row_stream: int, column_stream: int, batch: int,
) -> None:  # fmt: skip
    launch = blocks_launch(matrix, row, column, output, row_stream=row_stream, column_stream=column_stream, batch=batch)
    launch(matrix.tensor.get_device(), matrix.tensor, *outputs, seed)


def quantize_blocks(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None, *, seed: torch.Tensor | None = None,
    row_stream: int = 0, column_stream: int = 0, batch: int = 0,
) -> tuple[Operand | None, Operand | None]:  # fmt: skip
    """Codes and scales of both operands of a matrix in one pass."""
    row, column = paired(row, column)
    rows, columns, device = matrix.rows, matrix.columns, matrix.tensor.device
    row_codes = row_scale = column_codes = column_scale = None
    if row:
        row_codes = torch.empty((rows, ceil_div(columns, row.codes_per_byte)), dtype=row.codes_dtype, device=device)
        row_scale = empty_scale(row, rows, columns, device)
    if column:
        shape = (columns, ceil_div(rows, column.codes_per_byte))
        column_codes = torch.empty(shape, dtype=column.codes_dtype, device=device)
        column_scale = empty_scale(column, columns, rows, device)
    outputs = (row_codes, row_scale, column_codes, column_scale)
    _launch(matrix, row, column, outputs, _CODES, seed, row_stream, column_stream, batch)
    return (
        operand(row, row_codes, row_scale, rows, columns),
        operand(column, column_codes, column_scale, columns, rows),
    )


def values_blocks(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None, *, seed: torch.Tensor | None = None,
    row_stream: int = 0, column_stream: int = 0, batch: int = 0,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """The dequantized values of both operands in bfloat16, both in the layout of the matrix; no codes are written."""
    shape, device = (matrix.rows, matrix.columns), matrix.tensor.device
    row_values = torch.empty(shape, dtype=torch.bfloat16, device=device) if row else None
    column_values = torch.empty(shape, dtype=torch.bfloat16, device=device) if column else None
    outputs = (row_values, None, column_values, None)
    _launch(matrix, row, column, outputs, VALUES, seed, row_stream, column_stream, batch)
    return row_values, column_values


def fold_blocks(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None, *, tile: bool = False,
    seed: torch.Tensor | None = None, row_stream: int = 0, column_stream: int = 0,
) -> tuple[Operand | None, Operand | None, torch.Tensor]:  # fmt: skip
    """MX operands folded to FP8_1x128 (`tile`: FP8_128x128), and int64[2]: lossy elements of the row and column one."""
    rows, columns, x = matrix.rows, matrix.columns, matrix.tensor
    device = x.get_device()
    formats = (FP8_128x128, FP8_128x128_E5M2) if tile else (FP8_1x128, FP8_1x128_E5M2)

    def allocate(plan: CastPlan | None, r: int, c: int) -> tuple:
        if plan is None:
            return None, None, None
        fmt = formats[plan.bias == 15]
        codes = torch.empty((r, c), dtype=codes_dtype(fmt.element), device=x.device)
        if tile:
            return codes, torch.empty((ceil_div(r, 128), ceil_div(c, 128)), dtype=torch.float32, device=x.device), fmt
        return codes, torch.empty((ceil_div(c, 128), r), dtype=torch.float32, device=x.device).t(), fmt

    row_codes, row_scale, row_format = allocate(row, rows, columns)
    column_codes, column_scale, column_format = allocate(column, columns, rows)
    lossy = torch.empty(2, dtype=torch.int64, device=x.device)
    launch = fold_launch(matrix, row, column, int(tile), row_stream=row_stream, column_stream=column_stream)
    launch(device, x, row_codes, row_scale, column_codes, column_scale, lossy, scratch(device), seed)
    return (
        Operand(row_codes, row_scale, None, row_format, rows, columns) if row else None,
        Operand(column_codes, column_scale, None, column_format, columns, rows) if column else None,
        lossy,
    )


def folded_dtype(plan: CastPlan) -> torch.dtype:
    """The dtype of an MX operand's folded codes."""
    return codes_dtype((FP8_1x128, FP8_1x128_E5M2)[plan.bias == 15].element)


def fold_launch(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None, tile: int, *, row_stream: int = 0,
    column_stream: int = 0,
) -> Launch:  # fmt: skip
    """The launch that folds a matrix; `tile`: 0 for 1x128 scales, else those of 128x128 tiles lie in rows of a multiple
    of it.

    Its tensors: the matrix; codes and scales of the row operand, those of the column operand; int64[2] for the lossy
    elements of each; scratch words; the call seed. None what is not there.
    """
    casts = row.scaled_cast if row else None, column.scaled_cast if column else None
    how = matrix.how(128, 128, units=True)
    constants = (*casts, tile, how)
    warps = TILES["fold_squares" if folds(*casts, tile, how.KIND, how.EVEN) else "fold"][2]
    key = (matrix.key, constants, warps, row_stream, column_stream)
    programs = ceil_div(matrix.rows, 128) * ceil_div(matrix.columns, 128)
    return Launch(_FOLD, key, programs, (row_stream, column_stream, *matrix.sizes), constants, warps)
