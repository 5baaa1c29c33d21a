"""Block scales in the layout of block-scaled GEMMs."""

import torch

from microfloat.kernels.gemm import swizzle as kernels
from microfloat.torch.backends.triton._launch import Kernel, ceil_div

__all__ = ["swizzle_scales"]

_SWIZZLE = Kernel(kernels.swizzle_scales)
_TILES = 32


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """uint8 [R, C] -> uint8 [512 * ceil(R / 128) * ceil(C / 4)], tiles of 128 x 4, padded with 0 (numerics 7.2)."""
    rows, columns = scale.shape
    tiles = ceil_div(columns, 4)
    out = torch.empty(512 * ceil_div(rows, 128) * tiles, dtype=torch.uint8, device=scale.device)
    if out.numel() == 0:
        return out
    stride_r, stride_c = scale.stride()
    words = columns % 4 == 0 and stride_c == 1 and stride_r % 4 == 0 and scale.data_ptr() % 4 == 0
    programs = ceil_div(rows, 128) * ceil_div(tiles, _TILES)
    scalars = (rows, columns, stride_r, stride_c)
    key = (words, scale.get_device(), *[(value == 1, value % 16 == 0, value > 2**31 - 1) for value in scalars])
    _SWIZZLE(key, programs, scale.get_device(), (scale, out), scalars, (words, _TILES))
    return out
