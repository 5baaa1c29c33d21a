"""`dequantize`: codes back to values, in the fixed order of operations of docs/numerics.md 8.1."""

import torch

from microfloat.formats import E4M3
from microfloat.torch.backends.base import Operand
from microfloat.torch.reference._elements import decode_codes, unpack_fp4
from microfloat.torch.reference._grid import Grid, Workspace, is_stored_across
from microfloat.torch.reference._hadamard import inverse
from microfloat.torch.reference._scales import decode_bytes

__all__ = ["block_scale_values", "decode_scaled", "dequantize"]


def dequantize(operand: Operand, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of an operand, [R, C] in `dtype`, rounded once from float32.

    FP32 and E8M0 scales: ``f32(dec(code) * scale)``; NVFP4: ``f32(dec(code) * f32(dec(sb) * tensor_scale))``. A NaN
    scale gives NaN. A Hadamard transform is undone in float32 and its padding cropped.
    """
    scales = block_scale_values(operand)
    if operand.tensor_scale is not None:
        scales = scales * operand.tensor_scale
    if operand.hadamard is None:
        return decode_scaled(operand, scales, dtype)
    values = inverse(decode_scaled(operand, scales, torch.float32), operand.hadamard)
    return values[:, : operand.length].to(dtype).contiguous()


def block_scale_values(operand: Operand) -> torch.Tensor:
    """Stored block scales as float32, in the shape and memory order that they are stored in; NaN bytes are NaN."""
    scale, kind = operand.scale, operand.format.scale.name
    if kind == "FP32":
        return scale
    if kind == "E4M3":
        across = scale.dim() == 2 and is_stored_across(scale)
        values = decode_bytes(scale.t() if across else scale, E4M3)
        return values.t() if across else values
    byte = scale.to(torch.int32)
    bits = (byte << 23).masked_fill_(byte == 0, 0x00400000).masked_fill_(byte == 255, 0x7FC00000)
    return bits.view(torch.float32)


def decode_scaled(operand: Operand, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """[R, stored C] in `dtype`: code values times float32 `scales` of the format's blocks (None: times nothing).

    The result lies in memory as the codes do: of codes that are read across it is a transposed view.
    """
    element, across = operand.format.element, is_stored_across(operand.codes)
    codes = (operand.codes.t() if across else operand.codes).view(torch.uint8)
    if scales is not None and across and scales.dim() == 2:
        scales = scales.t()
    per_byte, contraction, device = element.codes_per_byte, 0 if across else 1, codes.device
    shape = (operand.rows, operand.stored_length)
    result = torch.empty(shape[::-1] if across else shape, dtype=dtype, device=device)
    grid = Grid.of(operand.format, result, contraction)
    workspace = Workspace(device)
    for chunk in grid.chunks(device):
        (r, c), padded = chunk.shape, grid.padded(chunk)
        stored = grid.packed_window(codes, chunk, per_byte)
        if per_byte == 2:
            stored = unpack_fp4(stored, chunk.shape[contraction], contraction)
        window = result[chunk.rows, chunk.columns]
        in_place = dtype == torch.float32 and (r, c) == padded
        values = window if in_place else workspace.take("values", padded, torch.float32)
        decode_codes(stored, element, workspace, values[:r, :c])
        if scales is not None and scales.dim() == 0:
            values.mul_(scales)
        elif scales is not None:
            block_scales = scales[chunk.block_rows, chunk.block_columns]
            grid.as_blocks(values).mul_(block_scales[:, None, :, None])
        if not in_place:
            window.copy_(values[:r, :c])
    return result.t() if across else result
