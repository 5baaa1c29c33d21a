"""GEMMs of quantized operands through torch's scaled matmul, with the layouts that each generation of chips needs.

Hopper and Ada multiply FP8 with both operands' contraction axis contiguous. Scales: () per tensor, [R, 1] per row;
1x128 blocks as [R, C/128] column-major, R a multiple of 8 (the vendor's library refuses odd ones), 128x128 tiles of the
second operand as [C/128 rounded up to 4, R/128] with unit stride along the first axis.
What no scaled matmul takes (MX and NVFP4 before Blackwell) runs as an exact bfloat16 product of `Values`.

Legend: M, N = rows of the operands, K = contraction length.
"""

import torch
import torch.nn.functional as F

from microfloat.torch.backends.base import Operand, Values
from microfloat.torch.backends.native._block_gemm import block_matmul
from microfloat.torch.backends.triton._epilogue import scale_and_round

__all__ = ["fp8_matmul", "values_matmul"]

_ALIGNMENT = 16
_BLOCK_ROWS = 8  # what rows with 1x128 scales are a multiple of
_TILE = (128, 128)
# Elements of a float32 sum that awaits its scales and its rounding: larger products are made in parts of whole rows.
_LARGEST_SUM, _ROWS = 1 << 26, 256


def fp8_matmul(
    a: Operand, b: Operand, *, bias: torch.Tensor | None, out_dtype: torch.dtype, fast: bool
) -> torch.Tensor:
    """``round(a @ b.T + bias)`` of FP8 operands with FP32 scales on FP8 tensor cores: [M, N] in `out_dtype`.

    Per-tensor, per-row, 1x128 x 1x128 and 1x128 x 128x128 scales. `fast`: the hardware accumulator along all of K.
    """
    rows, columns = a.rows, b.rows
    more_rows = -rows % _BLOCK_ROWS if a.format.block[1] == 128 else 0
    if more_rows or (a.codes.shape[1] | columns) % _ALIGNMENT:
        a, b = _aligned(a, b, more_rows)
    # A bias of another dtype than the output would be rounded to it first: add it in float32 instead.
    in_kernel = bias is None or (bias.dtype == out_dtype and out_dtype != torch.float32)
    kernel_dtype = out_dtype if in_kernel else torch.float32
    if a.format.block[1] == 128:
        y = _block_matmul(a, b, torch.float32 if bias is not None else out_dtype)
        in_kernel = bias is None
    else:
        kernel_bias = bias if in_kernel else None
        if kernel_bias is not None and b.codes.shape[0] != columns:
            kernel_bias = F.pad(kernel_bias, (0, b.codes.shape[0] - columns))
        y = _wide_matmul(a, b, kernel_bias, kernel_dtype, fast)
    if y.shape[1] != columns or y.shape[0] != rows:
        y = y[:rows, :columns].contiguous()
    return y if in_kernel else scale_and_round(y, None, None, bias, out_dtype)


def _wide_matmul(a: Operand, b: Operand, bias: torch.Tensor | None, dtype: torch.dtype, fast: bool) -> torch.Tensor:
    a_scale, b_scale = a.scale, b.scale
    if a_scale.dim() or b_scale.dim():
        a_scale = a_scale if a_scale.dim() else a_scale.expand(a.codes.shape[0], 1).contiguous()
        b_scale = (b_scale if b_scale.dim() else b_scale.expand(b.codes.shape[0], 1).contiguous()).t()
    scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return scaled_mm(a.codes, b.codes.t(), a_scale, b_scale, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def _block_matmul(a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    tiles = b.format.block == _TILE
    if tiles:
        more = -b.scale.shape[1] % 4
        b_scale = (F.pad(b.scale, (0, more)) if more else b.scale).t()  # F.pad copies even where nothing is added
    else:
        b_scale = _column_major(b.scale)
    return block_matmul(a.codes, _column_major(a.scale), b.codes.t(), b_scale, dtype, tiles)


def _column_major(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.stride(0) == 1 and scale.stride(1) == scale.shape[0] else scale.t().contiguous().t()


def _aligned(a: Operand, b: Operand, more_rows: int = 0) -> tuple[Operand, Operand]:
    """Both operands with C and b's rows padded to 16, and a's by `more_rows`: by code 0 and scale 1, which changes no
    value."""
    pad_length, pad_rows = -a.codes.shape[1] % _ALIGNMENT, -b.rows % _ALIGNMENT
    return _padded(a, more_rows, pad_length), _padded(b, pad_rows, pad_length)


def _padded(operand: Operand, more_rows: int, more_columns: int) -> Operand:
    codes = F.pad(operand.codes.view(torch.uint8), (0, more_columns, 0, more_rows)).view(operand.codes.dtype)
    scale, (block_rows, block_columns) = operand.scale, operand.format.block
    if scale.dim():
        wanted_rows = -(-codes.shape[0] // (block_rows or 1))
        wanted_columns = 1 if block_columns is None else -(-codes.shape[1] // block_columns)
        scale = F.pad(scale, (0, wanted_columns - scale.shape[1], 0, wanted_rows - scale.shape[0]), value=1.0)
    return Operand(codes, scale, None, operand.format, codes.shape[0], codes.shape[1], operand.hadamard)


def values_matmul(
    a: Values, b: Values, *, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``round(a @ b.T + bias)`` of decoded operands: bfloat16 products, float32 sums, tensor scales in the epilogue."""
    unscaled = a.tensor_scale is None and b.tensor_scale is None
    if unscaled and out_dtype == torch.bfloat16 and (bias is None or bias.dtype == out_dtype):
        return F.linear(a.values, b.values, bias)
    if unscaled and bias is None and out_dtype == torch.float32:
        return _float32_product(a.values, b.values)
    rows, columns = a.rows, b.rows
    step = max(_LARGEST_SUM // max(columns, 1) // _ROWS, 1) * _ROWS
    out = torch.empty((rows, columns), dtype=out_dtype, device=a.values.device)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        left = a.tensor_scale[part] if a.tensor_scale is not None and a.tensor_scale.dim() else a.tensor_scale
        y = _float32_product(a.values[part], b.values)
        scale_and_round(y, left, b.tensor_scale, bias, out_dtype, out[part])
    return out


def _float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b.T`` of bfloat16 matrices with the float32 accumulator as the result."""
    if a.device.type == "cuda":
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return a.float() @ b.float().t()
