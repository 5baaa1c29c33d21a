"""`dequantize`: codes back to values, in the fixed order of operations of docs/numerics.md 8.1."""

import torch

from microfloat.formats import E4M3
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.reference._elements import code_values, decode_codes
from microfloat.torch.backends.reference._grid import Grid, Workspace
from microfloat.torch.backends.reference._hadamard import inverse

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


def decode_scaled(operand: Operand, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """[R, stored C] in `dtype`: code values times float32 `scales` of the format's blocks (None: times nothing)."""
    rows, columns = operand.rows, operand.stored_length
    grid = Grid.of(operand.format, rows, columns)
    per_byte = operand.format.element.codes_per_byte
    device = operand.codes.device
    result = torch.empty(rows, columns, dtype=dtype, device=device)
    workspace = Workspace(device)
    for chunk in grid.chunks(device):
        (r, c), (padded_r, padded_c) = chunk.shape, grid.padded(chunk)
        first = chunk.columns.start // per_byte
        stored = operand.codes[chunk.rows, first : first + -(-c // per_byte)]
        if not stored.is_contiguous():
            stored = workspace.take("stored", tuple(stored.shape), stored.dtype).copy_(stored)
        values = decode_codes(stored, operand.format.element, workspace)
        if scales is None:
            pass
        elif scales.dim() == 0:
            values.mul_(scales)
        else:
            if tuple(values.shape) != (padded_r, padded_c):  # fill up to whole blocks, or drop the last nibble
                padded = workspace.take("padded", (padded_r, padded_c), torch.float32)
                padded[:r, :c] = values[:, :c]
                values = padded
            window = scales[chunk.block_rows, chunk.block_columns]
            grid.as_blocks(values).mul_(window[:, None, :, None])
        result[chunk.rows, chunk.columns] = values[:r, :c]
    return result
