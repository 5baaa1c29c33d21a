"""Norms fused with the cast of their result. Legend: M x K = the input of a norm."""

from dataclasses import dataclass, replace

import torch

from microfloat.errors import unknown_name
from microfloat.kernels import _convert, _produce
from microfloat.kernels import norms as kernels
from microfloat.recipes import Cast
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.triton._blocks import empty_scale
from microfloat.torch.backends.triton._fused import Inputs, Work, codes_of, layout, operands, plans, source_of
from microfloat.torch.backends.triton._launch import TILES, Kernel, Matrix, Warps, ceil_div, scratch, shared_words

__all__ = ["Normed", "norm_quantize", "norm_values"]

# For any number of columns but one, and for one.
_SCALED = Kernel(kernels.norm_scaled), Kernel(kernels.norm_scaled_of_one)
_BLOCKS = Kernel(kernels.norm_blocks), Kernel(kernels.norm_blocks_of_one)
_VALUES = Kernel(kernels.norm_values), Kernel(kernels.norm_values_of_one)

# Norms: of how many columns of a row at most are measured at once, and how many programs measuring is ahead of casting:
# as many as run at once, so that no cast waits, and few enough that what they read is still in the L2 cache.
_LEAST_COLUMNS, _MOST_COLUMNS = 256, 16384
_AHEAD = 360


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """What a fused norm returns: both operands, and the statistics that its backward needs (mean: LayerNorm only)."""

    row: Operand | None
    column: Operand | None
    mean: torch.Tensor | None
    inverse: torch.Tensor


def _norm_work(
    x_MK: torch.Tensor, weight_K: torch.Tensor, bias_K: torch.Tensor | None, kind: str
) -> tuple[Work, torch.Tensor | None, torch.Tensor]:
    """The producer of a norm and its statistics, still empty; a LayerNorm without bias gets zeros."""
    if kind not in ("rms", "layer"):
        raise unknown_name("kind", kind, ["rms", "layer"])
    layer = kind == "layer"
    if layer and bias_K is None:
        bias_K = torch.zeros_like(weight_K)
    rows = x_MK.shape[0]
    mean = torch.empty(rows, dtype=torch.float32, device=x_MK.device) if layer else None
    inverse = torch.empty(rows, dtype=torch.float32, device=x_MK.device)
    producer = (_produce.LAYER_NORM if layer else _produce.RMS_NORM).value
    parameters = (mean, inverse, weight_K, bias_K if layer else None)
    inputs = Inputs.of(x_MK)
    if any(t is not None and (t.stride(0) != 1 or t.data_ptr() & 7) for t in parameters[2:]):
        inputs = replace(inputs, kind=_convert.ELEMENTWISE.value)
    return Work(inputs, producer, parameters=parameters), mean, inverse


@dataclass(frozen=True, slots=True)
class _NormGrid:
    """How the programs of a norm are laid out."""

    programs: int
    lead: int
    ahead: int
    meeting: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    constants: tuple
    warps: Warps

    @staticmethod
    def of(matrix: Matrix, name: str) -> "_NormGrid":
        """That of a matrix under the tile `name` of TILES."""
        tile_rows, tile_columns, warps = TILES[name]
        device = matrix.tensor.get_device()
        columns = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, 1 << (matrix.columns - 1).bit_length()))
        rows = max(1, min(tile_rows, tile_rows * tile_columns // columns))
        groups, units = ceil_div(matrix.rows, tile_rows), tile_rows // rows
        members = ceil_div(matrix.columns, tile_columns)
        ahead = min(groups, ceil_div(_AHEAD, members))
        words = shared_words(device, 16 + groups * tile_rows * 2)
        meeting = (scratch(device), words.view(torch.int32), words[16:])
        constants = (matrix.columns % columns == 0, rows, columns, tile_rows, tile_columns)
        lead = ahead * units
        return _NormGrid(lead + groups * members, lead, ahead, meeting, constants, warps)


def norm_quantize(
    x_MK: torch.Tensor, weight_K: torch.Tensor, bias_K: torch.Tensor | None, row_cast: Cast | None,
    column_cast: Cast | None, *, eps: float, kind: str = "rms", seed: torch.Tensor | None = None, row_stream: int = 0,
    column_stream: int = 0, amax: torch.Tensor | None = None, scale_enc: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
) -> Normed:  # fmt: skip
    """Both operands of RMSNorm ("rms") or LayerNorm ("layer") of the rows of x; x is read from memory once."""
    row, column, plan = plans(row_cast, column_cast)
    work, mean, inverse = _norm_work(x_MK, weight_K, bias_K, kind)
    matrix = work.inputs.matrix
    device, x = matrix.tensor.get_device(), matrix.tensor
    is_long = max(cast.block[1] or 0 for cast in (row, column) if cast) > 64
    name = "norm_scaled" if plan.family == "scaled" else "norm_blocks_long" if is_long else "norm_blocks"
    grid = _NormGrid.of(matrix, name)
    codes = codes_of(row, column, matrix)
    shape = layout(work.inputs, *TILES[name][:2])
    if plan.family == "scaled":
        scale = torch.empty((), dtype=torch.float32, device=x.device)
        mode, source = source_of(plan, amax, scale_enc)
        constants = (
            row.scaled_cast if row else None, column.scaled_cast if column else None, mode, record is not None,
            work.producer, *shape, *grid.constants,
        )  # fmt: skip
        tensors = (x, *work.parameters, *codes, scale, source, record, *grid.meeting, seed)
        kernel, scales = _SCALED, (scale, scale)
    else:
        scales = (
            empty_scale(row, matrix.rows, matrix.columns, x.device) if row else None,
            empty_scale(column, matrix.columns, matrix.rows, x.device) if column else None,
        )
        constants = (
            row.constant(0) if row else None, column.constant(0) if column else None, work.producer, *shape,
            *grid.constants,
        )  # fmt: skip
        tensors = (x, *work.parameters, codes[0], scales[0], codes[1], scales[1], *grid.meeting[1:], seed)
        kernel = _BLOCKS
    key = (matrix.key, constants, grid.warps, row_stream, column_stream, weight_K.dtype)
    scalars = (row_stream, column_stream, eps, grid.lead, grid.ahead, *matrix.sizes)
    kernel[matrix.columns == 1](key, grid.programs, device, tensors, scalars, constants, grid.warps)
    first, second = operands(row, column, matrix, codes, scales)
    return Normed(first, second, mean, inverse)


def norm_values(
    x_MK: torch.Tensor, weight_K: torch.Tensor, bias_K: torch.Tensor | None, *, eps: float, kind: str = "rms"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The norm in x's dtype, its amax (float32 ()), and the statistics (mean or None, inverse)."""
    work, mean, inverse = _norm_work(x_MK, weight_K, bias_K, kind)
    matrix = work.inputs.matrix
    device, x = matrix.tensor.get_device(), matrix.tensor
    grid = _NormGrid.of(matrix, "norm_values")
    loads, produced, even, pairs, _, index64, hardware = layout(work.inputs, *TILES["norm_values"][:2])
    values = torch.empty((matrix.rows, matrix.columns), dtype=x.dtype, device=x.device)
    amax = torch.empty((), dtype=torch.float32, device=x.device)
    constants = (work.producer, loads, produced, even, pairs, index64, hardware, *grid.constants)
    tensors = (x, *work.parameters, values, amax, *grid.meeting)
    key = (matrix.key, constants, grid.warps, weight_K.dtype)
    kernel, scalars = _VALUES[matrix.columns == 1], (eps, grid.lead, grid.ahead, *matrix.sizes)
    kernel(key, grid.programs, device, tensors, scalars, constants, grid.warps)
    return values, amax, mean, inverse
