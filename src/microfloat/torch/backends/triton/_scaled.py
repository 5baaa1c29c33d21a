"""FP8 per tensor, per row and over 128 x 128 tiles: amax, and the cast into one or both layouts."""

from dataclasses import dataclass

import torch

from microfloat.kernels.casts import amax as amax_kernels
from microfloat.kernels.casts import scaled as scaled_kernels
from microfloat.kernels.tables import AMAX_PIECES, tile_of_scaled
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.triton._launch import (
    TILES,
    Kernel,
    Matrix,
    Prepared,
    Warps,
    ceil_div,
    compiled_conversions,
    multiprocessors,
    scratch,
)
from microfloat.torch.backends.triton._plans import CastPlan, operand

__all__ = [
    "AMAX", "AXES", "GIVEN", "TILE", "Launch", "amax_launch", "axes_launch", "cast_launch", "measure_amax",
    "measure_axes", "quantize_scaled",
]  # fmt: skip

_AMAX_CONTIGUOUS = Kernel(amax_kernels.amax_contiguous)
_AMAX_STRIDED = Kernel(amax_kernels.amax_strided)
_AMAX_AXES = Kernel(amax_kernels.amax_rows_columns)
_CAST = Kernel(scaled_kernels.cast_scaled)
GIVEN, AMAX, AXES, TILE = (
    mode.value for mode in (scaled_kernels.GIVEN, scaled_kernels.AMAX, scaled_kernels.AXES, scaled_kernels.TILE)
)
_SIDE = 128  # of the tiles of FP8_128x128
_AMAX_WARPS = Warps(4)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a kernel is started with besides its tensors: the key of its compiled version, its grid, its arguments."""

    kernel: Kernel
    key: tuple
    programs: int
    scalars: tuple
    constants: tuple
    warps: Warps

    def __call__(self, device: int, *tensors: torch.Tensor | None) -> None:
        """Start it on the current stream of a device."""
        self.kernel(self.key, self.programs, device, tensors, self.scalars, self.constants, self.warps)

    def prepared(self, aligned: tuple[bool, ...] = ()) -> Prepared:
        """The same, to be started many times; `aligned`: which of its tensors begin at multiples of 16 bytes (all)."""
        return self.kernel.prepared(self.key, self.programs, self.scalars, self.constants, self.warps, aligned)


def amax_launch(matrix: Matrix) -> Launch:
    """The launch that measures a matrix; its tensors: the matrix, float32 () for the result, scratch words."""
    x = matrix.tensor
    if not x.is_contiguous():
        programs = ceil_div(matrix.rows, 32) * ceil_div(matrix.columns, 128)
        return Launch(_AMAX_STRIDED, matrix.key, programs, matrix.sizes, (matrix.index64, 32, 128), _AMAX_WARPS)
    count, device = x.numel(), x.get_device()
    kind = matrix.kind if count & 1 == 0 else 0
    block, unroll, at_once, warps = AMAX_PIECES
    pieces = ceil_div(count, block * unroll)
    constants = (kind, count % (block * unroll) == 0, compiled_conversions(device), block, unroll)
    key = (matrix.key, count & 15 == 0, count > 2**31 - 1, count == 1, constants)
    programs = min(pieces, at_once * multiprocessors(device))
    return Launch(_AMAX_CONTIGUOUS, key, programs, (count,), constants, warps)


def measure_amax(matrix: Matrix) -> torch.Tensor:
    """float32 () largest magnitude, NaN ignored, in one pass."""
    x = matrix.tensor
    device = x.get_device()
    out = torch.empty((), dtype=torch.float32, device=x.device)
    amax_launch(matrix)(device, x, out, scratch(device))
    return out


def cast_launch(
    matrix: Matrix, row: CastPlan | None, column: CastPlan | None, mode: int, *, records: bool,
    row_stream: int = 0, column_stream: int = 0,
) -> Launch:  # fmt: skip
    """The launch that casts a matrix into one or both operands (`quantize_scaled`), by one of GIVEN, AMAX, AXES, TILE.

    Its tensors: the matrix; codes of the row and of the column operand; their scales; the encode scale or the amaxes of
    rows, the amaxes of columns; the live amax to record into, scratch words; the call seed. None what is not there.
    """
    plan = row or column
    assert plan is not None
    casts = row.scaled_cast if row else None, column.scaled_cast if column else None
    tile_rows, tile_columns, warps = tile_of_scaled(*casts, mode, (matrix.rows, matrix.columns), matrix.fills)
    constants = (*casts, mode, records, matrix.how(tile_rows, tile_columns, units=True))
    key = (matrix.key, constants, warps, row_stream, column_stream)
    scalars = (row_stream, column_stream, plan.epsilon, *matrix.sizes)
    programs = ceil_div(matrix.rows, tile_rows) * ceil_div(matrix.columns, tile_columns)
    return Launch(_CAST, key, programs, scalars, constants, warps)


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
    row_scale, column_scale, source, source2, mode = None, None, None, None, TILE
    if plan.block == (None, None):
        row_scale = column_scale = torch.empty((), dtype=torch.float32, device=x.device)
        if scale_enc is not None:
            mode, source = GIVEN, scale_enc
            if plan.cast.is_gradient and record is None:  # the scale depends on what is recorded
                record = torch.zeros(1, dtype=torch.float32, device=x.device)
        else:
            mode, source = AMAX, (measure_amax(matrix) if amax is None else amax)
    elif plan.block == (1, None):
        mode = AXES
        source, source2 = measure_axes(matrix, row is not None, column is not None)
        row_scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device) if row else None
        column_scale = torch.empty((columns, 1), dtype=torch.float32, device=x.device) if column else None
    else:
        tiles = (ceil_div(rows, _SIDE), ceil_div(columns, _SIDE))
        row_scale = torch.empty(tiles, dtype=torch.float32, device=x.device) if row else None
        column_scale = torch.empty(tiles[::-1], dtype=torch.float32, device=x.device) if column else None
    row_codes = torch.empty((rows, columns), dtype=row.codes_dtype, device=x.device) if row else None
    column_codes = torch.empty((columns, rows), dtype=column.codes_dtype, device=x.device) if column else None
    launch = cast_launch(
        matrix, row, column, mode, records=record is not None, row_stream=row_stream, column_stream=column_stream
    )
    launch(
        device, x, row_codes, column_codes, row_scale, column_scale, source, source2, record,
        scratch(device) if record is not None else None, seed,
    )  # fmt: skip
    return (
        operand(row, row_codes, row_scale, rows, columns),
        operand(column, column_codes, column_scale, columns, rows),
    )


def measure_axes(matrix: Matrix, row: bool, column: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """float32 amaxes of every row [R] and of every column [C], NaN ignored, in one pass (each if asked for)."""
    x = matrix.tensor
    amaxes = torch.zeros((matrix.rows if row else 0) + (matrix.columns if column else 0), device=x.device)
    row_amax = amaxes[: matrix.rows] if row else None
    column_amax = amaxes[matrix.rows if row else 0 :] if column else None
    bits = [None if t is None else t.view(torch.int32) for t in (row_amax, column_amax)]
    axes_launch(matrix, row, column)(x.get_device(), x, *bits)
    return row_amax, column_amax


def axes_launch(matrix: Matrix, row: bool, column: bool) -> Launch:
    """The launch that measures rows and columns; its tensors: the matrix, int32 [R] and [C], cleared, for the bits."""
    tile_rows, tile_columns, warps = TILES["axes"]
    programs = ceil_div(matrix.rows, tile_rows) * ceil_div(matrix.columns, tile_columns)
    constants = (row, column, matrix.how(tile_rows, tile_columns))
    return Launch(_AMAX_AXES, (matrix.key, constants, warps), programs, matrix.sizes, constants, warps)
