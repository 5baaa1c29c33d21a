"""Norms fused with the cast of their result. Legend: M x K = the input of a norm."""

from dataclasses import dataclass, replace

import torch

from microfloat.errors import unknown_name
from microfloat.kernels.constants import Band
from microfloat.kernels.device import convert, produce
from microfloat.kernels.device.squares import takes
from microfloat.kernels.producers import fused as kernels
from microfloat.kernels.producers import norm_clusters
from microfloat.kernels.tables import Pieces, pieces_of_norm
from microfloat.recipes import Cast
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.triton._fused import (
    Both,
    Inputs,
    Work,
    codes_of,
    operands,
    plans,
    quantize_work,
    scales_of,
    source_of,
    values_of_work,
)
from microfloat.torch.backends.triton._launch import (
    TILES,
    ClusterKernel,
    ClusterRefused,
    Kernel,
    Warps,
    ceil_div,
    largest_cluster,
    scratch,
)
from microfloat.torch.backends.triton._plans import CastPlan

__all__ = ["Normed", "norm_quantize", "norm_values"]

_MEASURE = Kernel(kernels.measure_rows)
# A program measures so many elements at once; of a row at most so many, and at least those of one warp's words.
_ELEMENTS, _MOST_COLUMNS, _LEAST_COLUMNS = 16384, 8192, 256
_WARPS = Warps(4)
_PIECES = {size: ClusterKernel(norm_clusters.norm_pieces, size) for size in (1, 2, 4, 8, 16)}  # by size of clusters
_without_clusters: set[int] = set()  # devices that refused one
# Tiles under which clusters hold rows, by what is cast to and the norm. With two sums to exchange there is room for the
# smaller ones only. LayerNorms to FP8 per tensor compile with "norm_scaled_long", and have not run on a GPU yet.
_TILES_BY_CLUSTERS = {
    ("scaled", produce.RMS_NORM.value): ("norm_scaled", "norm_scaled_long"),
    ("squares", produce.RMS_NORM.value): ("norm_squares", "norm_squares_long"),
    ("squares", produce.LAYER_NORM.value): ("norm_squares_long",),
}


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """What a fused norm returns: both operands, and the statistics that its backward needs (mean: LayerNorm only)."""

    row: Operand | None
    column: Operand | None
    mean: torch.Tensor | None
    inverse: torch.Tensor


def _work(x_MK: torch.Tensor, weight_K: torch.Tensor, bias_K: torch.Tensor | None, kind: str) -> Work:
    """The producer of a norm, whose statistics are still empty; a LayerNorm without bias gets zeros."""
    if kind not in ("rms", "layer"):
        raise unknown_name("kind", kind, ["rms", "layer"])
    layer = kind == "layer"
    if layer and bias_K is None:
        bias_K = torch.zeros_like(weight_K)
    inputs = Inputs.of(x_MK)
    parameters = (weight_K, bias_K if layer else None)
    if any(t is not None and (t.stride(0) != 1 or t.data_ptr() & 7) for t in parameters):
        inputs = replace(inputs, kind=convert.ELEMENTWISE.value)
    rows, device = inputs.matrix.rows, inputs.matrix.tensor.device
    mean = torch.empty(rows, dtype=torch.float32, device=device) if layer else None
    inverse = torch.empty(rows, dtype=torch.float32, device=device)
    producer = (produce.LAYER_NORM if layer else produce.RMS_NORM).value
    return Work(inputs, producer, parameters=(mean, inverse, *parameters))


def _measure(work: Work, eps: float) -> None:
    """Fill in the statistics."""
    matrix, (mean, inverse, *_) = work.inputs.matrix, work.parameters
    columns = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, 1 << (matrix.columns - 1).bit_length()))
    rows, is_whole = max(1, _ELEMENTS // columns), matrix.columns % columns == 0
    constants = (work.inputs.kind, is_whole, matrix.index64, rows, columns)
    tensors, scalars = (matrix.tensor, mean, inverse), (eps, *matrix.sizes)
    key = (matrix.key, constants, mean is None)
    _MEASURE(key, ceil_div(matrix.rows, rows), matrix.tensor.get_device(), tensors, scalars, constants, _WARPS)


def _by_clusters(
    work: Work, row: CastPlan | None, column: CastPlan | None, *, eps: float, seed: torch.Tensor | None,
    row_stream: int, column_stream: int, amax: torch.Tensor | None, scale_enc: torch.Tensor | None,
    record: torch.Tensor | None,
) -> Both | None:  # fmt: skip
    """Both operands from one reading, the statistics too; None where no cluster can do that, and nothing has run."""
    matrix, plan = work.inputs.matrix, row or column
    assert plan is not None
    x, device = matrix.tensor, matrix.tensor.get_device()
    pieces = _pieces(work, row, column)
    if pieces is None:
        return None
    tile_rows, tile_columns, warps = TILES[pieces.name]
    codes, scales = codes_of(row, column, matrix), scales_of(row, column, matrix)
    if plan.family == "scaled":
        lane_rows, casts = 4, (row.scaled_cast if row else None, column.scaled_cast if column else None)
        mode, source = source_of(plan, amax, scale_enc)
    else:
        lane_rows, casts = 8, (row.constant(0) if row else None, column.constant(0) if column else None)
        mode, source, record = 0, None, None
    how = matrix.how(tile_rows, tile_columns, units=True)
    held = max(1, pieces.each // 2) if how.HW else pieces.each
    band = Band(lane_rows, pieces.programs, pieces.each, held, pieces.miss)
    constants = (*casts, mode, record is not None, work.producer, band, how)
    meeting = None if record is None else scratch(device)
    tensors = (x, *work.parameters, codes[0], scales[0], codes[1], scales[1], source, record, meeting, seed)
    scalars = (row_stream, column_stream, eps, *matrix.sizes[:3])
    key = (matrix.key, constants, warps, row_stream, column_stream)
    try:
        _PIECES[pieces.programs](key, matrix.rows // tile_rows, device, tensors, scalars, constants, warps)
    except ClusterRefused:
        _without_clusters.add(device)
        return None
    return operands(row, column, matrix, codes, scales)


def _pieces(work: Work, row: CastPlan | None, column: CastPlan | None) -> Pieces | None:
    """How clusters hold the rows of a norm's input; None where `norm_clusters` does not serve it."""
    matrix, plan, words = work.inputs.matrix, row or column, convert.WORDS_BF16.value
    device = matrix.tensor.get_device()
    addresses = [t.data_ptr() for t in (matrix.tensor, *work.parameters[2:]) if t is not None]
    if work.inputs.kind != words or work.parameter_dtype != matrix.tensor.dtype or device in _without_clusters:
        return None
    if matrix.index64 or matrix.stride_r & 7 or any(address & 15 for address in addresses):
        return None
    kind = "scaled"
    if plan is None or plan.family != "scaled":
        if not takes(row and row.constant(0), column and column.constant(0), words, True):
            return None
        kind = "squares"
    names = _TILES_BY_CLUSTERS.get((kind, work.producer), ())
    return pieces_of_norm(names, matrix.rows, matrix.columns, largest_cluster(device))


def norm_quantize(
    x_MK: torch.Tensor, weight_K: torch.Tensor, bias_K: torch.Tensor | None, row_cast: Cast | None,
    column_cast: Cast | None, *, eps: float, kind: str = "rms", seed: torch.Tensor | None = None, row_stream: int = 0,
    column_stream: int = 0, amax: torch.Tensor | None = None, scale_enc: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
) -> Normed:  # fmt: skip
    """Both operands of RMSNorm ("rms") or LayerNorm ("layer") of the rows of x, read once where there are clusters."""
    row, column, _ = plans(row_cast, column_cast)
    work = _work(x_MK, weight_K, bias_K, kind)
    both = _by_clusters(
        work, row, column, eps=eps, seed=seed, row_stream=row_stream, column_stream=column_stream, amax=amax,
        scale_enc=scale_enc, record=record,
    )  # fmt: skip
    if both is None:
        _measure(work, eps)
        both, _ = quantize_work(
            work, row_cast, column_cast, seed=(seed, None), row_stream=row_stream, column_stream=column_stream,
            amax=(amax, None), scale_enc=(scale_enc, None), record=(record, None),
        )  # fmt: skip
    return Normed(*both, *work.parameters[:2])


def norm_values(
    x_MK: torch.Tensor, weight_K: torch.Tensor, bias_K: torch.Tensor | None, *, eps: float, kind: str = "rms"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The norm in x's dtype, its amax (float32 ()), and the statistics (mean or None, inverse)."""
    work = _work(x_MK, weight_K, bias_K, kind)
    _measure(work, eps)
    (values, amax), _ = values_of_work(work)
    return values, amax, *work.parameters[:2]
