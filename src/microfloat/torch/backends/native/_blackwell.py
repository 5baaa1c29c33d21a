"""Block-scaled GEMMs of Blackwell: the arguments of torch's scaled matmul, byte for byte.

Written against the documented layouts (128x4 scale tiles, FP4 two per byte) and tested on the CPU down to what is
passed; not yet run on the hardware. Legend: R, C = rows and contraction length of an operand.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from microfloat.formats import E4M3, decode, encode
from microfloat.torch.backends.base import Operand

__all__ = ["block_scaled_arguments", "block_scaled_matmul", "swizzle_scales"]

_ALIGNMENT = 32
_COLUMNS = 16  # what columns of the result are a multiple of


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scale bytes [R, blocks] as 128x4 tiles in the order that Blackwell reads, padded with 0: 1-D uint8.

    ``out[((r // 128) * nc + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = scale[r, c]``
    (docs/numerics.md 7.2).
    """
    rows, columns = scale.shape
    padded = F.pad(scale, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _side(
    operand: Operand, rows: int, packed: bool, level: bool
) -> tuple[torch.Tensor, list[Any], list[Any], list[Any]]:
    """(codes, scales, scale kinds, swizzles) of one operand, padded to `rows` and a C of 32 by code 0.

    The scale of what is padded is byte 0, which is 0 or 2^-127. `packed`: FP4 stays FP4. `level`: with a tensor scale.
    """
    kinds, swizzles = F.ScalingType, F.SwizzleType
    fmt, codes, scale = operand.format, operand.codes, operand.scale
    if fmt.element.bits < 8 and not packed:
        codes = _as_e4m3(operand)
    if fmt.scale.name == "FP32":
        scale = _as_exponents(scale)
    # One scale for 32 (16) elements of a row in the kernel; in memory, one for a tile of rows or for 128 elements.
    block_rows, block_columns = fmt.block
    assert block_rows is not None
    assert block_columns is not None
    columns = 16 if fmt.scale.name == "E4M3" else 32
    scale = scale.repeat_interleave(block_rows, 0)[: operand.rows].repeat_interleave(block_columns // columns, 1)
    per_byte = 2 if packed else 1
    width = -(-operand.stored_length // _ALIGNMENT) * _ALIGNMENT
    more = (0, width // per_byte - codes.shape[1], 0, rows - operand.rows)
    codes = F.pad(codes.view(torch.uint8), more).view(torch.float4_e2m1fn_x2 if packed else codes.dtype)
    scale = scale[:, : width // columns]
    scale = swizzle_scales(F.pad(scale, (0, width // columns - scale.shape[1], 0, rows - operand.rows)))
    if fmt.scale.name != "E4M3":
        return codes, [scale.view(torch.float8_e8m0fnu)], [kinds.BlockWise1x32], [swizzles.SWIZZLE_32_4_4]
    scales, recipes, orders = [scale.view(torch.float8_e4m3fn)], [kinds.BlockWise1x16], [swizzles.SWIZZLE_32_4_4]
    if level:
        tensor_scale = operand.tensor_scale
        scales.append(
            torch.ones((), dtype=torch.float32, device=codes.device) if tensor_scale is None else tensor_scale
        )
        recipes, orders = [*recipes, kinds.TensorWise], [*orders, swizzles.NO_SWIZZLE]
    return codes, scales, recipes, orders


def _as_exponents(scale: torch.Tensor) -> torch.Tensor:
    """The E8M0 bytes of float32 powers of two: their exponent fields."""
    return scale.view(torch.int32).bitwise_right_shift(23).to(torch.uint8)


def _as_e4m3(operand: Operand) -> torch.Tensor:
    """Codes of FP6 and FP4 elements as E4M3, which holds each of their values (docs/numerics.md 9.2)."""
    element = operand.format.element
    codes = operand.codes
    if element.codes_per_byte == 2:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, : operand.stored_length]
    table = torch.from_numpy(encode(decode(np.arange(2**element.bits, dtype=np.uint8), element), E4M3)).to(codes.device)
    return table[codes.long()].view(torch.float8_e4m3fn)


def block_scaled_arguments(a: Operand, b: Operand, out_dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of `torch.nn.functional.scaled_mm` for ``a @ b.T``: b's rows are padded to a multiple of 16.

    MX operands of FP8, whatever their elements were, but for two of FP4 with a bfloat16 result, which torch multiplies
    as they are; FP8 with scales for 128 elements, powers of two, as MX (docs/numerics.md 3.4); NVFP4.
    """
    packed = a.format.element.bits == b.format.element.bits == 4
    packed = packed and (out_dtype == torch.bfloat16 or a.format.scale.name == "E4M3")
    level = a.tensor_scale is not None or b.tensor_scale is not None
    a_codes, a_scales, a_kinds, a_orders = _side(a, a.rows, packed, level)
    b_codes, b_scales, b_kinds, b_orders = _side(b, -(-b.rows // _COLUMNS) * _COLUMNS, packed, level)
    return {
        "mat_a": a_codes, "mat_b": b_codes.t(), "scale_a": a_scales, "scale_recipe_a": a_kinds, "scale_b": b_scales,
        "scale_recipe_b": b_kinds, "swizzle_a": a_orders, "swizzle_b": b_orders, "output_dtype": out_dtype,
    }  # fmt: skip


def block_scaled_matmul(a: Operand, b: Operand, *, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """``round(a @ b.T + bias)`` on Blackwell's block-scaled tensor cores. Not yet run on the hardware."""
    y = F.scaled_mm(**block_scaled_arguments(a, b, torch.float32 if bias is not None else out_dtype))
    if y.shape[1] != b.rows:
        y = y[:, : b.rows].contiguous()
    return y if bias is None else (y + bias.float()).to(out_dtype)
