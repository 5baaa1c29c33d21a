"""`dequantize`: codes back to values, in the fixed order of operations of docs/numerics.md 8.1."""

import torch

from microfloat.formats import E4M3
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.reference._elements import code_values, decode_codes
from microfloat.torch.backends.reference._hadamard import inverse

__all__ = ["block_scales_f32", "decode_scaled", "dequantize"]


def dequantize(operand: Operand, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of an operand, [R, C] in `dtype`, rounded once from float32.

    FP32 and E8M0 scales: ``f32(dec(code) * scale)``; NVFP4: ``f32(dec(code) * f32(dec(sb) * tensor_scale))``. A NaN
    scale gives NaN. A Hadamard transform is undone in float32 and its padding cropped.
    """
    scales = block_scales_f32(operand)
    if operand.tensor_scale is not None:
        scales = scales * operand.tensor_scale
    values = decode_scaled(operand, scales)
    if operand.hadamard is not None:
        values = inverse(values, operand.hadamard, operand.length)
    return values.to(dtype)


def block_scales_f32(operand: Operand) -> torch.Tensor:
    """Stored block scales as float32, in the shape they are stored in; NaN bytes are NaN."""
    scale, kind = operand.scale, operand.format.scale.name
    if kind == "FP32":
        return scale
    if kind == "E4M3":
        table = code_values(E4M3, scale.device)
        return table.index_select(0, scale.reshape(-1).to(torch.int32)).view(scale.shape)
    byte = scale.to(torch.int32)
    bits = (byte << 23).masked_fill_(byte == 0, 0x00400000).masked_fill_(byte == 255, 0x7FC00000)
    return bits.view(torch.float32)


def decode_scaled(operand: Operand, scales: torch.Tensor | None) -> torch.Tensor:
    """float32 [R, stored C]: code values, multiplied with `scales` of the format's blocks (None: with nothing)."""
    values = decode_codes(operand.codes, operand.format.element, operand.stored_length)
    if scales is None:
        return values
    if scales.dim() == 0 or operand.format.block == (1, None):
        return values.mul_(scales)
    rows, columns = values.shape
    block_rows, block_columns = operand.format.block[0] or 1, operand.format.block[1] or max(columns, 1)
    if block_rows > 1:
        scales = scales.repeat_interleave(block_rows, dim=0)[:rows]
    whole = columns // block_columns
    blocks = values[:, : whole * block_columns].unflatten(1, (whole, block_columns))
    blocks.mul_(scales[:, :whole, None])
    if whole * block_columns < columns:
        values[:, whole * block_columns :].mul_(scales[:, whole:])
    return values
