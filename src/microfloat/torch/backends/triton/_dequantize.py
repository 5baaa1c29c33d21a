"""Operands back to values."""

import torch

from microfloat.kernels.casts import dequantize as kernels
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.triton._launch import TILES, Kernel, as_bytes, ceil_div, compiled_conversions
from microfloat.torch.reference._hadamard import inverse

__all__ = ["dequantize_operand"]

_DEQUANTIZE = Kernel(kernels.dequantize)
_SCALES = {"FP32": kernels.SCALE_FLOAT.value, "E8M0": kernels.SCALE_E8M0.value, "E4M3": kernels.SCALE_E4M3.value}
_INT32_MAX = 2**31 - 1


def dequantize_operand(operand: Operand, dtype: torch.dtype) -> torch.Tensor:
    """[R, C] values in `dtype` (bfloat16, float16 or float32); a Hadamard transform is undone in float32."""
    if operand.hadamard is not None:
        values = inverse(_dequantize(operand, torch.float32), operand.hadamard)
        return values[:, : operand.length].to(dtype).contiguous()
    return _dequantize(operand, dtype)


def _dequantize(operand: Operand, dtype: torch.dtype) -> torch.Tensor:
    rows, columns, fmt = operand.rows, operand.stored_length, operand.format
    codes, scale = operand.codes.contiguous(), operand.scale
    if codes.data_ptr() & 3:  # codes are read two or four bytes at once
        codes = codes.clone()
    out = torch.empty((rows, columns), dtype=dtype, device=codes.device)
    if out.numel() == 0:
        return out
    device = codes.get_device()
    tile_rows, tile_columns, warps = TILES["dequantize"]
    height, width = fmt.block[0] or 1, fmt.block[1] or tile_columns
    stride_r = stride_k = 0
    if scale.dim() == 2:
        stride_r = scale.stride(0)
        stride_k = scale.stride(1) if fmt.block[1] is not None else 0
    level = operand.tensor_scale
    level_stride = 0 if level is None or level.dim() == 0 else level.stride(0)
    index64 = tile_rows * columns > _INT32_MAX or rows > _INT32_MAX
    constants = (
        fmt.element.mantissa_bits, fmt.element.bias, _SCALES[fmt.scale.name], height, width, 1 if level is None else 2,
        dtype == torch.bfloat16, columns % 2 == 0, rows % tile_rows == 0 and columns % tile_columns == 0, index64,
        compiled_conversions(device), tile_rows, tile_columns,
    )  # fmt: skip
    scalars = (rows, columns, stride_r, stride_k, level_stride)
    key = (
        codes.dtype, dtype, scale.dtype, device, constants,
        *[(value == 1, value % 16 == 0, value > _INT32_MAX) for value in scalars],
    )  # fmt: skip
    programs = ceil_div(rows, tile_rows) * ceil_div(columns, tile_columns)
    _DEQUANTIZE(key, programs, device, (as_bytes(codes), scale, level, out), scalars, constants, warps)
    return out
