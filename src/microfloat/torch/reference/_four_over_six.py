"""four_over_six: per block, or tile, the smaller error of mapping its maximum to 6 or to 4 (docs/numerics.md 2.6).

The order of every sum is part of the definition; arXiv 2512.02010 has the idea.
"""

import torch

from microfloat.formats import ElementFormat
from microfloat.scale_rules import TwoLevel
from microfloat.torch.reference._elements import code_values, encode_integer
from microfloat.torch.reference._grid import Workspace
from microfloat.torch.reference._scales import BlockScales, TensorLevel, block_level, divide

__all__ = ["four_over_six_scales"]


def four_over_six_scales(
    blocks: torch.Tensor, block_amax: torch.Tensor, element: ElementFormat, constants: TwoLevel, tensor: TensorLevel,
    workspace: Workspace, contraction: int,
) -> BlockScales:  # fmt: skip
    """Scales of float32 `blocks` [blocks, rows, blocks, columns], which are left as they are. A tie maps to 6.

    `contraction`: the axis, 0 or 1, along which the columns of a block lie.
    """
    base = divide(block_amax, 6.0) * tensor.encode
    byte_6, value_6, factor_6 = block_level(base, constants.largest_scale, tensor)
    byte_4, value_4, factor_4 = block_level(base * 1.5, constants.largest_scale, tensor)
    error_6 = _block_error(blocks, value_6, factor_6, element, constants, tensor, workspace, contraction)
    error_4 = _block_error(blocks, value_4, factor_4, element, constants, tensor, workspace, contraction)
    to_four = error_4 < error_6
    return BlockScales(torch.where(to_four, byte_4, byte_6), torch.where(to_four, factor_4, factor_6))


def _block_error(
    blocks: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, element: ElementFormat, constants: TwoLevel,
    tensor: TensorLevel, workspace: Workspace, contraction: int,
) -> torch.Tensor:  # fmt: skip
    """One per block, in four axes: sum of |d| or d^2, ``d = f32(f32(f32(f32(dec(c) * scale) * A) / F) - x)``."""
    codes = encode_integer(blocks * factor, element, None, workspace)
    values = code_values(element, blocks.device).index_select(0, codes.view(-1).to(torch.int32)).view(blocks.shape)
    difference = divide(values.mul_(scale).mul_(tensor.amax), constants.capacity).sub_(blocks)
    errors = difference.abs_() if constants.four_over_six == "mae" else difference.square_()
    if contraction == 0:
        errors = errors.permute(2, 3, 0, 1)
    sums = torch.zeros_like(errors[..., 0])
    for column in range(errors.shape[-1]):
        sums += errors[..., column]
    sums = _pairwise_rows(sums).unsqueeze(-1)
    return sums if contraction else sums.permute(2, 3, 0, 1)


def _pairwise_rows(sums: torch.Tensor) -> torch.Tensor:
    """[blocks, rows of a tile, blocks] -> [blocks, 1, blocks] by halving, rows padded to a power of two."""
    count = 1 << (sums.shape[1] - 1).bit_length()
    sums = torch.nn.functional.pad(sums, (0, 0, 0, count - sums.shape[1]))
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums
