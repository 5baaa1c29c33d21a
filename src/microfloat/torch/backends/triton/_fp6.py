"""MX operands of 6 bits as files hold them: four codes in three bytes (docs/numerics.md 1.4)."""

import torch

from microfloat.errors import NotSupportedError
from microfloat.formats import ScaledFormat
from microfloat.kernels.casts import blocks as block_kernels
from microfloat.kernels.casts import fp6 as kernels
from microfloat.recipes import Cast
from microfloat.torch.backends.triton._blocks import empty_scale
from microfloat.torch.backends.triton._launch import TILES, Kernel, Matrix, ceil_div, compiled_conversions
from microfloat.torch.backends.triton._plans import plan_of

__all__ = ["dequantize_packed", "quantize_packed"]

_QUANTIZE, _DEQUANTIZE = Kernel(kernels.quantize_packed), Kernel(kernels.dequantize_packed)
_CODES = block_kernels.CODES.value
_INT32_MAX = 2**31 - 1


def _check(fmt: ScaledFormat, hadamard: object = None) -> None:
    if fmt.element.bits != 6 or fmt.scale.name != "E8M0" or fmt.block not in ((1, 32), (1, 16)) or hadamard is not None:
        raise NotSupportedError(
            f"packed codes: got {fmt.name} (blocks {fmt.block_text}, hadamard {hadamard}), needed an MX format of 6 "
            "bits with blocks of 16 or 32 elements in a row and no transform, such as mxfp6_e3m2."
        )


def quantize_packed(
    x: torch.Tensor, cast: Cast, *, seed: torch.Tensor | None = None, stream: int = 0, batch: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of matrix `x` [R, C]: packed codes uint8 [R, 3 * ceil(C / 4)] and scales uint8 [R, ceil(C / block)].

    ``pack_fp6`` of the codes that `quantize` gives, in one pass. Raises NotSupportedError for other formats.
    """
    _check(cast.format, cast.hadamard)
    plan, (rows, columns) = plan_of(cast), x.shape
    packed = torch.empty((rows, 3 * ceil_div(columns, 4)), dtype=torch.uint8, device=x.device)
    scale = empty_scale(plan, rows, columns, x.device)
    if x.numel() == 0:
        return packed, scale
    matrix, device = Matrix(x), x.get_device()
    tile_rows, tile_columns, warps = TILES["block_rows"]
    constants = (plan.constant(_CODES), columns % 16 == 0, matrix.how(tile_rows, tile_columns))
    programs = ceil_div(rows, tile_rows) * ceil_div(columns, tile_columns)
    key = (matrix.key, constants, warps, stream, batch)
    tensors = (x, packed, scale, seed)
    _QUANTIZE(key, programs, device, tensors, (stream, batch, *matrix.sizes), constants, warps)
    return packed, scale


def dequantize_packed(
    packed: torch.Tensor, scale: torch.Tensor, fmt: ScaledFormat, length: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values [R, `length`] in `dtype` of packed codes and their scales: ``f32(dec(code) * 2^(b - 127))``, rounded."""
    _check(fmt)
    rows = packed.shape[0]
    out = torch.empty((rows, length), dtype=dtype, device=packed.device)
    if out.numel() == 0:
        return out
    device = packed.get_device()
    tile_rows, tile_columns, warps = TILES["dequantize"]
    index64 = tile_rows * length > _INT32_MAX or rows > _INT32_MAX
    constants = (
        fmt.element.mantissa_bits, fmt.element.bias, fmt.block[1], dtype == torch.bfloat16, index64,
        compiled_conversions(device), tile_rows, tile_columns,
    )  # fmt: skip
    key = (dtype, device, constants, *[(value == 1, value % 16 == 0, value > _INT32_MAX) for value in (rows, length)])
    programs = ceil_div(rows, tile_rows) * ceil_div(length, tile_columns)
    tensors = (packed.contiguous(), scale.contiguous(), out)
    _DEQUANTIZE(key, programs, device, tensors, (rows, length), constants, warps)
    return out
