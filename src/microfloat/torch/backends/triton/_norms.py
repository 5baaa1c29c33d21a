"""Norms fused with the cast of their result. Legend: M x K = the input of a norm."""

from dataclasses import dataclass, replace

import torch

from microfloat.errors import unknown_name
from microfloat.kernels import _convert, _produce
from microfloat.kernels import norms as kernels
from microfloat.recipes import Cast
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.triton._fused import Inputs, Work, plans, quantize_work, values_of_work
from microfloat.torch.backends.triton._launch import Kernel, Warps, ceil_div

__all__ = ["Normed", "norm_quantize", "norm_values"]

_MEASURE = Kernel(kernels.measure_rows)
# A program measures so many elements at once; of a row at most so many, and at least those of one warp's words.
_ELEMENTS, _MOST_COLUMNS, _LEAST_COLUMNS = 16384, 8192, 256
_WARPS = Warps(4)


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """What a fused norm returns: both operands, and the statistics that its backward needs (mean: LayerNorm only)."""

    row: Operand | None
    column: Operand | None
    mean: torch.Tensor | None
    inverse: torch.Tensor


def _measured(
    x_MK: torch.Tensor, weight_K: torch.Tensor, bias_K: torch.Tensor | None, kind: str, eps: float
) -> Work:  # fmt: skip
    """The producer of a norm, whose statistics are on their way; a LayerNorm without bias gets zeros."""
    if kind not in ("rms", "layer"):
        raise unknown_name("kind", kind, ["rms", "layer"])
    layer = kind == "layer"
    if layer and bias_K is None:
        bias_K = torch.zeros_like(weight_K)
    inputs = Inputs.of(x_MK)
    parameters = (weight_K, bias_K if layer else None)
    if any(t is not None and (t.stride(0) != 1 or t.data_ptr() & 7) for t in parameters):
        inputs = replace(inputs, kind=_convert.ELEMENTWISE.value)
    matrix = inputs.matrix
    x, rows = matrix.tensor, matrix.rows
    mean = torch.empty(rows, dtype=torch.float32, device=x.device) if layer else None
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    columns = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, 1 << (matrix.columns - 1).bit_length()))
    constants = (inputs.kind, matrix.columns % columns == 0, matrix.index64, max(1, _ELEMENTS // columns), columns)
    programs = ceil_div(rows, constants[3])
    key = (matrix.key, constants, layer)
    _MEASURE(key, programs, x.get_device(), (x, mean, inverse), (eps, *matrix.sizes), constants, _WARPS)
    producer = (_produce.LAYER_NORM if layer else _produce.RMS_NORM).value
    return Work(inputs, producer, parameters=(mean, inverse, *parameters))


def norm_quantize(
    x_MK: torch.Tensor, weight_K: torch.Tensor, bias_K: torch.Tensor | None, row_cast: Cast | None,
    column_cast: Cast | None, *, eps: float, kind: str = "rms", seed: torch.Tensor | None = None, row_stream: int = 0,
    column_stream: int = 0, amax: torch.Tensor | None = None, scale_enc: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
) -> Normed:  # fmt: skip
    """Both operands of RMSNorm ("rms") or LayerNorm ("layer") of the rows of x."""
    plans(row_cast, column_cast)  # refuses what cannot be cast before anything runs
    work = _measured(x_MK, weight_K, bias_K, kind, eps)
    (row, column), _ = quantize_work(
        work, row_cast, column_cast, seed=(seed, None), row_stream=row_stream, column_stream=column_stream,
        amax=(amax, None), scale_enc=(scale_enc, None), record=(record, None),
    )  # fmt: skip
    return Normed(row, column, *work.parameters[:2])


def norm_values(
    x_MK: torch.Tensor, weight_K: torch.Tensor, bias_K: torch.Tensor | None, *, eps: float, kind: str = "rms"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The norm in x's dtype, its amax (float32 ()), and the statistics (mean or None, inverse)."""
    work = _measured(x_MK, weight_K, bias_K, kind, eps)
    (values, amax), _ = values_of_work(work)
    return values, amax, *work.parameters[:2]
