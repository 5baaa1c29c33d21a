"""Operands padded to what Blackwell's block-scaled GEMMs take: FP4 two per byte, scales in tiles of 128 x 4."""

import numpy as np
import torch
import torch.nn.functional as F

from microfloat.formats import E4M3, decode, encode
from microfloat.torch._typing import Options
from microfloat.torch.backends.base import Operand
from microfloat.torch.reference._grid import ceil_to
from microfloat.torch.tensor.packing import to_blocked


def block_scaled_arguments(a: Operand, b: Operand, out_dtype: torch.dtype, has_mxfp4: bool = True) -> Options:
    """Keyword arguments of `torch.nn.functional.scaled_mm` for ``a @ b.T``: b's rows are padded to a multiple of 16.

    MX operands of FP8, whatever their elements were, but for two of FP4 with a bfloat16 result, which torch multiplies
    as they are where `has_mxfp4`; FP8 with scales for 128 elements, powers of two, as MX (docs/numerics.md 3.4); NVFP4.
    """
    packed = a.format.element.bits == b.format.element.bits == 4
    packed = packed and ((has_mxfp4 and out_dtype == torch.bfloat16) or a.format.scale.name == "E4M3")
    level = a.tensor_scale is not None or b.tensor_scale is not None
    a_codes, a_scales, a_kinds, a_orders = _block_scaled_side(a, a.rows, packed, level)
    b_codes, b_scales, b_kinds, b_orders = _block_scaled_side(b, ceil_to(b.rows, 16), packed, level)
    return {
        "mat_a": a_codes, "mat_b": b_codes.t(), "scale_a": a_scales, "scale_recipe_a": a_kinds, "scale_b": b_scales,
        "scale_recipe_b": b_kinds, "swizzle_a": a_orders, "swizzle_b": b_orders, "output_dtype": out_dtype,
    }  # fmt: skip


def _block_scaled_side(
    operand: Operand, rows: int, packed: bool, level: bool
) -> tuple[torch.Tensor, list[torch.Tensor], list[F.ScalingType], list[F.SwizzleType]]:
    """Codes, scales, scale kinds and swizzles of one operand, padded to `rows` and a C of 32 by code 0.

    The scale of what is padded is byte 0, which is 0 or 2^-127. `packed`: FP4 stays FP4. `level`: with a tensor scale.
    """
    kinds, swizzles = F.ScalingType, F.SwizzleType
    fmt, codes, scale = operand.format, operand.codes, operand.scale
    if fmt.element.bits < 8 and not packed:
        codes = _as_e4m3(operand)
    if fmt.scale.name == "FP32":  # the E8M0 bytes of powers of two are their exponent fields
        scale = scale.view(torch.int32).bitwise_right_shift(23).to(torch.uint8)
    # One scale for 32 (16) elements of a row in the kernel; in memory, one for a tile of rows or for 128 elements.
    block_rows, block_columns = fmt.block
    assert block_rows is not None
    assert block_columns is not None
    columns = 16 if fmt.scale.name == "E4M3" else 32
    scale = scale.repeat_interleave(block_rows, 0)[: operand.rows].repeat_interleave(block_columns // columns, 1)
    per_byte = 2 if packed else 1
    width = ceil_to(operand.stored_length, 32)
    more = (0, width // per_byte - codes.shape[1], 0, rows - operand.rows)
    codes = F.pad(codes.view(torch.uint8), more).view(torch.float4_e2m1fn_x2 if packed else codes.dtype)
    scale = scale[:, : width // columns]
    scale = to_blocked(F.pad(scale, (0, width // columns - scale.shape[1], 0, rows - operand.rows)))
    if fmt.scale.name != "E4M3":
        return codes, [scale.view(torch.float8_e8m0fnu)], [kinds.BlockWise1x32], [swizzles.SWIZZLE_32_4_4]
    scales, recipes, orders = [scale.view(torch.float8_e4m3fn)], [kinds.BlockWise1x16], [swizzles.SWIZZLE_32_4_4]
    if level:
        one = torch.ones((), dtype=torch.float32, device=codes.device)
        scales.append(one if operand.tensor_scale is None else operand.tensor_scale)
        recipes, orders = [*recipes, kinds.TensorWise], [*orders, swizzles.NO_SWIZZLE]
    return codes, scales, recipes, orders


def _as_e4m3(operand: Operand) -> torch.Tensor:
    """Codes of FP6 and FP4 elements as E4M3, which holds each of their values (docs/numerics.md 9.2)."""
    element = operand.format.element
    codes = operand.codes
    if element.codes_per_byte == 2:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, : operand.stored_length]
    table = torch.from_numpy(encode(decode(np.arange(2**element.bits, dtype=np.uint8), element), E4M3)).to(codes.device)
    return table[codes.long()].view(torch.float8_e4m3fn)
