"""The native backend: fused casts feeding the vendor's GEMMs on a CUDA device.

`microfloat.routes` decides in which form each operand enters its GEMM, which is what `explain` prints;
`microfloat.torch.gemms` multiplies. Casts without a kernel are made by plain torch operations.
"""

from types import ModuleType

import torch

from microfloat.formats import ELEMENTS
from microfloat.passes import OperandSpec
from microfloat.passes.tables import kernel_cast
from microfloat.recipes import Cast, Recipe
from microfloat.routes import Routes, routes_of
from microfloat.torch import backends, gemms, program, reference
from microfloat.torch.backends import triton
from microfloat.torch.backends.base import Operand
from microfloat.torch.folding import FoldCounts, routes_after

__all__ = [
    "amax", "dequantize", "fold_codes", "name", "producers", "programs", "quantize", "quantize_both", "routes",
    "scaled_matmul", "turned", "why_no_program",
]  # fmt: skip

name, programs, producers = "native", program, triton
amax, fold_codes, turned = triton.amax, triton.fold_codes, triton.turned


def _caster(*casts: Cast | None) -> ModuleType:
    """The backend with kernels for these casts: triton, or the reference where one of them has none."""
    return reference if any(cast is not None and kernel_cast(cast).refusal for cast in casts) else triton


def quantize(x: torch.Tensor, cast: Cast, **options: object) -> Operand:
    """See `torch.reference.quantize`."""
    return _caster(cast).quantize(x, cast, **options)


def quantize_both(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, **options: object
) -> tuple[Operand | None, Operand | None]:
    """See `torch.reference.quantize_both`."""
    return _caster(row_cast, column_cast).quantize_both(x, row_cast, column_cast, **options)


def dequantize(operand: Operand, dtype: torch.dtype) -> torch.Tensor:
    """See `torch.reference.dequantize`."""
    by_kernel = operand.codes.is_cuda and operand.format.element.name in ELEMENTS
    return (triton if by_kernel else reference).dequantize(operand, dtype)


def scaled_matmul(
    a: Operand, b: Operand, *, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.float32,
    accumulate: str = "split",
) -> torch.Tensor:  # fmt: skip
    """``round(a @ b.T + bias)``: [M, N] in `out_dtype`, one rounding; on the format's tensor cores where they exist."""
    chip = backends.chip_of(a.codes.device)
    return gemms.scaled_matmul(a, b, chip, bias=bias, out_dtype=out_dtype, accumulate=accumulate)


def routes(recipe: Recipe, device: torch.device, counts: FoldCounts | None = None) -> Routes:
    """See `backends.base.Backend`."""
    chip = backends.chip_of(device)
    return routes_of(recipe, chip) if counts is None else routes_after(recipe, chip, counts)


def why_no_program(row: OperandSpec | None, column: OperandSpec | None) -> str:
    """See `backends.base.Backend`: the first cast that no kernel serves."""
    refusals = (kernel_cast(spec.cast).refusal for spec in (row, column) if spec is not None)
    return next((f"no kernel for {refusal}" for refusal in refusals if refusal), "")
