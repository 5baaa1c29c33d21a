"""FP8 per tensor, per row and over 128 x 128 tiles: amax, and the cast into one or both layouts."""

import torch

from microfloat.kernels import amax as amax_kernels
from microfloat.kernels import scaled as scaled_kernels
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.triton._launch import TILES, Kernel, Matrix, ceil_div, compiled_conversions, scratch
from microfloat.torch.backends.triton._plans import CastPlan, operand

__all__ = ["measure_amax", "measure_axes", "quantize_scaled"]

_AMAX_CONTIGUOUS = Kernel(amax_kernels.amax_contiguous)
_AMAX_STRIDED = Kernel(amax_kernels.amax_strided)
_AMAX_AXES = Kernel(amax_kernels.amax_rows_columns)
_CAST = Kernel(scaled_kernels.cast_scaled)
_GIVEN, _AMAX, _AXES, _TILE = (
    mode.value for mode in (scaled_kernels.GIVEN, scaled_kernels.AMAX, scaled_kernels.AXES, scaled_kernels.TILE)
)
_SIDE = 128  # of the tiles of FP8_128x128
_AMAX_BLOCK = 2048


def measure_amax(matrix: Matrix) -> torch.Tensor:
    """float32 () largest magnitude, NaN ignored, in one pass."""
    x = matrix.tensor
    device = x.get_device()
    out = torch.empty((), dtype=torch.float32, device=x.device)
    hardware = compiled_conversions(device)
    if x.is_contiguous():
        count = x.numel()
        kind = matrix.kind if count & 1 == 0 else 0
        unroll = 16 if count >= 1 << 22 else 2
        constants = (kind, hardware, _AMAX_BLOCK, unroll)
        key = (matrix.key, count & 15 == 0, count > 2**31 - 1, count == 1, constants)
        programs = ceil_div(count, _AMAX_BLOCK * unroll)
        _AMAX_CONTIGUOUS(key, programs, device, (x, out, scratch(device)), (count,), constants)
    else:
        constants = (matrix.index64, 32, 128)
        programs = ceil_div(matrix.rows, 32) * ceil_div(matrix.columns, 128)
        _AMAX_STRIDED(matrix.key, programs, device, (x, out, scratch(device)), matrix.sizes, constants)
    return out


def quantize_scaled(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None, *,
    seed: torch.Tensor | None = None, row_stream: int = 0, column_stream: int = 0,
    amax: torch.Tensor | None = None, scale_enc: torch.Tensor | None = None, record: torch.Tensor | None = None,
) -> tuple[Operand | None, Operand | None]:  # fmt: skip
    """Both operands of a matrix in one pass over it (plus one for the amaxes where they span the matrix).

    The two casts agree in format, rule and epsilon. `record`: float32, whose first element takes the larger of itself
    and the amax of this matrix.
    """
    plan = row or column
    assert plan is not None
    x, device = matrix.tensor, matrix.tensor.get_device()
    rows, columns = matrix.rows, matrix.columns
    hardware = compiled_conversions(device)
    tile_rows, tile_columns, warps = TILES["cast"] if plan.block[0] != _SIDE else (_SIDE, _SIDE, TILES["cast"][2])
    even = matrix.fills(tile_rows, tile_columns)
    programs = ceil_div(rows, tile_rows) * ceil_div(columns, tile_columns)
    row_scale, column_scale, source, source2, mode = None, None, None, None, _TILE
    if plan.block == (None, None):
        row_scale = column_scale = torch.empty((), dtype=torch.float32, device=x.device)
        if scale_enc is not None:
            mode, source = _GIVEN, scale_enc
        else:
            mode, source = _AMAX, (measure_amax(matrix) if amax is None else amax)
    elif plan.block == (1, None):
        mode = _AXES
        source, source2 = measure_axes(matrix, row is not None, column is not None)
        row_scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device) if row else None
        column_scale = torch.empty((columns, 1), dtype=torch.float32, device=x.device) if column else None
    else:
        tiles = (ceil_div(rows, _SIDE), ceil_div(columns, _SIDE))
        row_scale = torch.empty(tiles, dtype=torch.float32, device=x.device) if row else None
        column_scale = torch.empty(tiles[::-1], dtype=torch.float32, device=x.device) if column else None
    row_codes = torch.empty((rows, columns), dtype=row.codes_dtype, device=x.device) if row else None
    column_codes = torch.empty((columns, rows), dtype=column.codes_dtype, device=x.device) if column else None
    constants = (
        row.scaled_cast if row else None, column.scaled_cast if column else None, mode, record is not None,
        matrix.kind, even, matrix.even_pairs, matrix.even_quads, matrix.index64, hardware, tile_rows, tile_columns,
    )  # fmt: skip
    tensors = (
        x, row_codes, column_codes, row_scale, column_scale, source, source2, record,
        scratch(device) if record is not None else None, seed,
    )  # fmt: skip
    key = (matrix.key, constants, warps, row_stream, column_stream)
    scalars = (row_stream, column_stream, plan.epsilon, *matrix.sizes)
    _CAST(key, programs, device, tensors, scalars, constants, warps)
    return (
        operand(row, row_codes, row_scale, rows, columns),
        operand(column, column_codes, column_scale, columns, rows),
    )


def measure_axes(matrix: Matrix, row: bool, column: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """float32 amaxes of every row [R] and of every column [C], NaN ignored, in one pass (each if asked for)."""
    tile_rows, tile_columns, warps = TILES["axes"]
    x = matrix.tensor
    device = x.get_device()
    amaxes = torch.zeros((matrix.rows if row else 0) + (matrix.columns if column else 0), device=x.device)
    row_amax = amaxes[: matrix.rows] if row else None
    column_amax = amaxes[matrix.rows if row else 0 :] if column else None
    even = matrix.fills(tile_rows, tile_columns)
    programs = ceil_div(matrix.rows, tile_rows) * ceil_div(matrix.columns, tile_columns)
    constants = (row, column, matrix.kind, even, matrix.index64, compiled_conversions(device), tile_rows, tile_columns)
    key = (matrix.key, constants, warps)
    bits = [None if t is None else t.view(torch.int32) for t in (row_amax, column_amax)]
    _AMAX_AXES(key, programs, device, (x, *bits), matrix.sizes, constants, warps)
    return row_amax, column_amax
