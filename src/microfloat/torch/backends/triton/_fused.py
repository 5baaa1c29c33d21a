"""Producers fused with the cast of their result: activations, forward and backward, and norms that were measured.

Every function quantizes the value that the unfused graph would have produced, rounded to the inputs' dtype first. Casts
per tensor take a known encode scale (delayed scaling) or amax; `*_values` write the value and its amax, for current
scaling.

Legend: M x F = gate, up and their product.
"""

from dataclasses import dataclass

import torch

from microfloat.errors import NotSupportedError, unknown_name
from microfloat.kernels.casts import scaled as scaled_kernels
from microfloat.kernels.constants import How
from microfloat.kernels.device import convert, produce
from microfloat.kernels.producers import fused as kernels
from microfloat.kernels.tables import tile_of_produced_blocks
from microfloat.recipes import Cast
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.triton._blocks import empty_scale
from microfloat.torch.backends.triton._launch import TILES, Kernel, Matrix, ceil_div, scratch
from microfloat.torch.backends.triton._plans import CastPlan, operand, paired, plan_of

__all__ = [
    "ACTIVATIONS", "Both", "Inputs", "Work", "activation_backward_quantize", "activation_backward_values",
    "activation_quantize", "activation_values", "codes_of", "fuses", "operands", "plans", "quantize_work",
    "scales_of", "source_of", "values_of_work",
]  # fmt: skip

ACTIVATIONS = {
    "silu": produce.SILU.value, "gelu_tanh": produce.GELU_TANH.value, "gelu": produce.GELU.value,
    "relu": produce.RELU.value,
}  # fmt: skip

_SCALED, _BLOCKS = Kernel(kernels.produce_scaled), Kernel(kernels.produce_blocks)
_VALUES = Kernel(kernels.produce_values)
_GIVEN, _AMAX = scaled_kernels.GIVEN.value, scaled_kernels.AMAX.value
_NO_INPUTS = (None, None, None, None)
Both = tuple[Operand | None, Operand | None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One to three matrices of one shape and dtype, read alike."""

    matrix: Matrix
    others: tuple[torch.Tensor | None, torch.Tensor | None]
    kind: int
    produced_kind: int

    @staticmethod
    def of(x: torch.Tensor, y: torch.Tensor | None = None, z: torch.Tensor | None = None) -> "Inputs":
        """Inputs that lie alike, copied where they do not."""
        others = [None if t is None else t if t.stride() == x.stride() else t.contiguous() for t in (y, z)]
        if any(t is not None and t.stride() != x.stride() for t in others):
            x = x.contiguous()
        matrix = Matrix(x)
        aligned = all(t is None or t.data_ptr() & 7 == 0 for t in others)
        produced = convert.WORDS_BF16.value if x.dtype == torch.bfloat16 else convert.ELEMENTWISE.value
        return Inputs(matrix, (others[0], others[1]), matrix.kind if aligned else 0, produced)


def _function(activation: str) -> int:
    if activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS)
    return ACTIVATIONS[activation]


def fuses(row_cast: Cast | None, column_cast: Cast | None) -> bool:
    """Whether a producer can write codes of both casts in one launch."""
    try:
        plans(row_cast, column_cast)
    except NotSupportedError:
        return False
    return True


def plans(row_cast: Cast | None, column_cast: Cast | None) -> tuple[CastPlan | None, CastPlan | None, CastPlan]:
    """Plans of both casts and the one that stands for both; they must be served by one launch."""
    row = None if row_cast is None else plan_of(row_cast)
    column = None if column_cast is None else plan_of(column_cast)
    plan = row or column
    if plan is None:
        raise NotSupportedError("a fused cast needs row_cast or column_cast; use the unfused operation without them.")
    for other in (row, column):
        per_tensor = (
            other is not None and other.family == "scaled" and other.block == (None, None) and other.bare is None
        )
        blocks = other is not None and other.family == "blocks" and other.bare is None
        if other is not None and not (per_tensor or blocks):
            raise NotSupportedError(
                f"no fused kernel casts to {other.cast.format.name} (hadamard {other.cast.hadamard}); run the "
                "operation and quantize its result."
            )
        if other is not None and (other.family != plan.family or other.epsilon != plan.epsilon):
            raise NotSupportedError(
                "row_cast and column_cast of a fused kernel must be of one family; cast them apart."
            )
    if plan.family == "scaled" and row and column and row.scaled_cast != column.scaled_cast:
        raise NotSupportedError("two different per-tensor casts of one result cannot be fused; cast them apart.")
    return *paired(row, column), plan


def source_of(plan: CastPlan, amax: torch.Tensor | None, scale_enc: torch.Tensor | None) -> tuple[int, torch.Tensor]:
    """Where a cast per tensor has its scale from, and the tensor that holds it; NotSupportedError where it has none."""
    if scale_enc is not None:
        return _GIVEN, scale_enc
    if amax is None:
        raise NotSupportedError(
            f"a fused cast to {plan.cast.format.name} needs scale_enc= or amax=; without them use the *_values "
            "function, which measures the amax, and cast its result."
        )
    return _AMAX, amax


def codes_of(row: CastPlan | None, column: CastPlan | None, matrix: Matrix) -> tuple:
    """Row and column codes of a matrix of this shape."""
    rows, columns, device = matrix.rows, matrix.columns, matrix.tensor.device
    first = second = None
    if row:
        first = torch.empty((rows, ceil_div(columns, row.codes_per_byte)), dtype=row.codes_dtype, device=device)
    if column:
        second = torch.empty((columns, ceil_div(rows, column.codes_per_byte)), dtype=column.codes_dtype, device=device)
    return first, second


def scales_of(row: CastPlan | None, column: CastPlan | None, matrix: Matrix) -> tuple:
    """Scales of the row and the column operand of a matrix of this shape: the same one for both per tensor."""
    plan = row or column
    if plan is not None and plan.family == "scaled":
        scale = torch.empty((), dtype=torch.float32, device=matrix.tensor.device)
        return scale, scale
    rows, columns, device = matrix.rows, matrix.columns, matrix.tensor.device
    return (
        empty_scale(row, rows, columns, device) if row else None,
        empty_scale(column, columns, rows, device) if column else None,
    )  # fmt: skip


def operands(row: CastPlan | None, column: CastPlan | None, matrix: Matrix, codes: tuple, scales: tuple) -> Both:
    """What was written for a matrix of this shape, as its row and its column operand."""
    rows, columns = matrix.rows, matrix.columns
    return operand(row, codes[0], scales[0], rows, columns), operand(column, codes[1], scales[1], columns, rows)


def _how(inputs: Inputs, tile_rows: int, tile_columns: int) -> How:
    """The constants of a pass that reads such inputs."""
    how = inputs.matrix.how(tile_rows, tile_columns, units=True)
    return how._replace(LOADS=inputs.kind, KIND=inputs.produced_kind)


@dataclass(frozen=True, slots=True)
class Work:
    """A producer and its inputs; `parameters` (of a norm): mean, inverse, weight, bias."""

    inputs: Inputs
    producer: int
    function: int = 0
    two: bool = False
    parameters: tuple = _NO_INPUTS

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """Of weight and bias, which need not be that of the inputs."""
        return None if self.parameters[2] is None else self.parameters[2].dtype


def quantize_work(
    work: Work, row_cast: Cast | None, column_cast: Cast | None, *, seed: tuple, row_stream: int, column_stream: int,
    amax: tuple = (None, None), scale_enc: tuple = (None, None), record: tuple = (None, None),
) -> tuple[Both, Both | None]:  # fmt: skip
    """Both operands of one produced matrix, or (`work.two`) of two; a seed, an amax and so on for each."""
    row, column, plan = plans(row_cast, column_cast)
    matrix = work.inputs.matrix
    device, x = matrix.tensor.get_device(), matrix.tensor
    if plan.family == "blocks":
        casts = row.constant(0) if row else None, column.constant(0) if column else None
        kind = work.inputs.kind if work.inputs.kind == work.inputs.produced_kind else 0
        tile_rows, tile_columns, warps = tile_of_produced_blocks(*casts, kind, matrix.fills, two=work.two)
    else:
        casts = row.scaled_cast if row else None, column.scaled_cast if column else None
        tile_rows, tile_columns, warps = TILES["fused_gradients" if work.two else "fused_scaled"]
    programs = ceil_div(matrix.rows, tile_rows) * ceil_div(matrix.columns, tile_columns)
    how = _how(work.inputs, tile_rows, tile_columns)
    count = 2 if work.two else 1
    codes = [codes_of(row, column, matrix) for _ in range(count)]
    scales = [scales_of(row, column, matrix) for _ in range(count)]
    pointers = (x, *work.inputs.others, *work.parameters)
    if plan.family == "scaled":
        sources = [source_of(plan, amax[i], scale_enc[i]) for i in range(count)]
        if plan.cast.is_gradient and sources[0][0] == _GIVEN:  # its scale depends on what is recorded
            record = tuple(x.new_zeros(1, dtype=torch.float32) if one is None else one for one in record)
        outputs: list = []
        for i in range(2):
            outputs += [*codes[i], scales[i][0], sources[i][1], record[i]] if i < count else [None] * 5
        constants = (*casts, sources[0][0], record[0] is not None, work.producer, work.function, how)
        meeting = scratch(device) if record[0] is not None else None
        tensors, kernel = (*pointers, *outputs, meeting, *seed), _SCALED
    else:
        outputs = []
        for i in range(2):
            outputs += [codes[i][0], scales[i][0], codes[i][1], scales[i][1]] if i < count else [None] * 4
        constants = (*casts, work.producer, work.function, how)
        tensors, kernel = (*pointers, *outputs, *seed), _BLOCKS
    key = (matrix.key, constants, warps, row_stream, column_stream, work.parameter_dtype)
    kernel(key, programs, device, tensors, (row_stream, column_stream, plan.epsilon, *matrix.sizes), constants, warps)
    results = [operands(row, column, matrix, codes[i], scales[i]) for i in range(count)]
    return results[0], results[1] if work.two else None


def values_of_work(work: Work) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]:
    """(values, amax) of one produced matrix, or of two."""
    matrix = work.inputs.matrix
    device, x = matrix.tensor.get_device(), matrix.tensor
    tile_rows, tile_columns, warps = TILES["fused_values"]
    programs = ceil_div(matrix.rows, tile_rows) * ceil_div(matrix.columns, tile_columns)
    how = _how(work.inputs, tile_rows, tile_columns)._replace(QUADS=False)  # columns are not written
    results = [
        (torch.empty((matrix.rows, matrix.columns), dtype=x.dtype, device=x.device), torch.empty((), device=x.device))
        for _ in range(2 if work.two else 1)
    ]
    second = results[1] if work.two else (None, None)
    constants = (work.producer, work.function, how)
    tensors = (x, *work.inputs.others, *work.parameters, *results[0], *second, scratch(device))
    key = (matrix.key, constants, warps, work.parameter_dtype)
    _VALUES(key, programs, device, tensors, matrix.sizes, constants, warps)
    return results[0], results[1] if work.two else None


def _forward(x_MF: torch.Tensor, up_MF: torch.Tensor | None, activation: str) -> Work:
    producer = produce.ACTIVATE.value if up_MF is None else produce.GATE.value
    return Work(Inputs.of(x_MF, up_MF), producer, _function(activation))


def _backward(grad_MF: torch.Tensor, x_MF: torch.Tensor, up_MF: torch.Tensor | None, activation: str) -> Work:
    if up_MF is None:
        return Work(Inputs.of(x_MF, grad_MF), produce.ACTIVATE_GRADIENT.value, _function(activation))
    inputs = Inputs.of(x_MF, up_MF, grad_MF)
    return Work(inputs, produce.GATE_GRADIENTS.value, _function(activation), two=True)


def activation_quantize(
    x_MF: torch.Tensor, up_MF: torch.Tensor | None, row_cast: Cast | None, column_cast: Cast | None, *,
    activation: str = "silu", seed: torch.Tensor | None = None, row_stream: int = 0, column_stream: int = 0,
    amax: torch.Tensor | None = None, scale_enc: torch.Tensor | None = None, record: torch.Tensor | None = None,
) -> Both:  # fmt: skip
    """Both operands of ``f(x)``, or with `up` of ``f(x) * up`` (SwiGLU: activation="silu"), in one pass."""
    work = _forward(x_MF, up_MF, activation)
    result, _ = quantize_work(
        work, row_cast, column_cast, seed=(seed, None), row_stream=row_stream, column_stream=column_stream,
        amax=(amax, None), scale_enc=(scale_enc, None), record=(record, None),
    )  # fmt: skip
    return result


def activation_values(
    x_MF: torch.Tensor, up_MF: torch.Tensor | None, *, activation: str = "silu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """``f(x)`` or ``f(x) * up`` in x's dtype, and its amax (float32 ()), in one pass."""
    return values_of_work(_forward(x_MF, up_MF, activation))[0]


def activation_backward_quantize(
    grad_MF: torch.Tensor, x_MF: torch.Tensor, up_MF: torch.Tensor | None, row_cast: Cast | None,
    column_cast: Cast | None, *, activation: str = "silu", seed: tuple = (None, None), row_stream: int = 0,
    column_stream: int = 0, amax: tuple = (None, None), scale_enc: tuple = (None, None), record: tuple = (None, None),
) -> tuple[Both, Both | None]:  # fmt: skip
    """Both operands of the gradient of x, and with `up` those of the gradient of up, in one pass.

    `seed`, `amax`, `scale_enc`, `record`: one for each gradient, since each belongs to a layer (docs/numerics.md 5.3).
    """
    return quantize_work(
        _backward(grad_MF, x_MF, up_MF, activation), row_cast, column_cast, seed=seed, row_stream=row_stream,
        column_stream=column_stream, amax=amax, scale_enc=scale_enc, record=record,
    )  # fmt: skip


def activation_backward_values(
    grad_MF: torch.Tensor, x_MF: torch.Tensor, up_MF: torch.Tensor | None, *, activation: str = "silu"
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]:
    """(gradient, amax) of x, and with `up` of up, in one pass."""
    return values_of_work(_backward(grad_MF, x_MF, up_MF, activation))
