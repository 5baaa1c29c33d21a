"""Block-scaled GEMMs of Blackwell: the arguments of torch's scaled matmul, byte for byte.

Written against the documented layouts (128x4 scale tiles, FP4 two per byte) and tested on the CPU down to what is
passed; not yet run on the hardware. Legend: R, C = rows and contraction length of an operand.
"""

from typing import Any

import torch
import torch.nn.functional as F

from microfloat.torch.backends.base import Operand

__all__ = ["block_scaled_arguments", "block_scaled_matmul", "swizzle_scales"]

_ALIGNMENT = 32


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scale bytes [R, blocks] as 128x4 tiles in the order that Blackwell reads, padded with 0: 1-D uint8.

    ``out[((r // 128) * nc + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = scale[r, c]``
    (docs/numerics.md 7.2).
    """
    rows, columns = scale.shape
    padded = F.pad(scale, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _side(operand: Operand) -> tuple[torch.Tensor, list[torch.Tensor], list[Any], list[Any]]:
    """(codes, scales, scale kinds, swizzles) of one operand, C padded to 32 by code 0 (scale 0 or 2^-127)."""
    kinds, swizzles = F.ScalingType, F.SwizzleType
    fmt, codes, scale = operand.format, operand.codes, operand.scale
    block_rows, block_columns = fmt.block
    assert block_rows is not None
    assert block_columns is not None
    if block_rows > 1:  # one scale per tile in memory, one per row in the kernel
        scale = scale.repeat_interleave(block_rows, 0)[: operand.rows]
    per_byte = fmt.element.codes_per_byte
    width = -(-operand.stored_length // _ALIGNMENT) * _ALIGNMENT
    codes = F.pad(codes.view(torch.uint8), (0, width // per_byte - codes.shape[1])).view(codes.dtype)
    scale = F.pad(scale, (0, width // block_columns - scale.shape[1]))
    if per_byte == 2:
        codes = codes.view(torch.float4_e2m1fn_x2)
    if fmt.scale.name == "E8M0":
        return (
            codes,
            [swizzle_scales(scale).view(torch.float8_e8m0fnu)],
            [kinds.BlockWise1x32],
            [swizzles.SWIZZLE_32_4_4],
        )
    scales, recipes, orders = (
        [swizzle_scales(scale).view(torch.float8_e4m3fn)],
        [kinds.BlockWise1x16],
        [swizzles.SWIZZLE_32_4_4],
    )
    if operand.tensor_scale is not None:
        scales, recipes = [*scales, operand.tensor_scale], [*recipes, kinds.TensorWise]
        orders = [*orders, swizzles.NO_SWIZZLE]
    return codes, scales, recipes, orders


def block_scaled_arguments(a: Operand, b: Operand, out_dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of `torch.nn.functional.scaled_mm` for ``a @ b.T`` of MX or NVFP4 operands."""
    a_codes, a_scales, a_kinds, a_orders = _side(a)
    b_codes, b_scales, b_kinds, b_orders = _side(b)
    return {
        "mat_a": a_codes, "mat_b": b_codes.t(), "scale_a": a_scales, "scale_recipe_a": a_kinds, "scale_b": b_scales,
        "scale_recipe_b": b_kinds, "swizzle_a": a_orders, "swizzle_b": b_orders, "output_dtype": out_dtype,
    }  # fmt: skip


def block_scaled_matmul(a: Operand, b: Operand, *, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """``round(a @ b.T + bias)`` on Blackwell's block-scaled tensor cores. Not yet run on the hardware."""
    y = F.scaled_mm(**block_scaled_arguments(a, b, torch.float32 if bias is not None else out_dtype))
    return y if bias is None else (y + bias.float()).to(out_dtype)
