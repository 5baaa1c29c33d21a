"""The native backend: fused casts feeding the vendor's GEMMs on a CUDA device.

`microfloat.routes` decides in which form each operand enters its GEMM, which is what `explain` prints;
`microfloat.torch.launch.gemms` multiplies. Casts without a kernel are made by plain torch operations.
"""

from types import ModuleType

import torch

from microfloat.formats import ELEMENTS
from microfloat.recipes import Cast
from microfloat.routes import family_of
from microfloat.torch import backends, reference
from microfloat.torch.backends.base import Operand
from microfloat.torch.launch import gemms, program, triton

name, programs, no_programs, is_strict, producers = "native", program, "", False, triton
amax, fold_codes, turned, chip_of = triton.amax, triton.fold_codes, triton.turned, backends.chip_of


def _caster(*casts: Cast | None) -> ModuleType:
    """The backend with kernels for these casts: triton, or the reference where one of them has none."""
    return reference if any(cast is not None and family_of(cast)[1] for cast in casts) else triton


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
