"""Scales, bias and the one rounding of a GEMM's float32 accumulator, in one launch."""

import torch

from microfloat.kernels import epilogue as kernels
from microfloat.torch.backends.triton._launch import INTERPRETED, Kernel, ceil_div

__all__ = ["scale_and_round"]

_SCALE = Kernel(kernels.scale_and_round)
_TILE_ROWS, _TILE_COLUMNS = 8, 512


def _kind(scale: torch.Tensor | None) -> int:
    if scale is None:
        return kernels.NONE.value
    return kernels.VECTOR.value if scale.dim() else kernels.ONE.value


def scale_and_round(
    accumulator_MN: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None, bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """``round(accumulator * f32(left * right) + f32(bias))``: float32 [M, N] -> `out_dtype` [M, N], one rounding.

    `left`: float32 (), or [M, 1], or None; `right`: (), or [N, 1], or None; `bias`: [N] or None.
    """
    rows, columns = accumulator_MN.shape
    device = accumulator_MN.get_device()
    if device < 0 and not INTERPRETED:
        return _plain(accumulator_MN, left, right, bias).to(out_dtype)
    out = torch.empty((rows, columns), dtype=out_dtype, device=accumulator_MN.device)
    is_bf16 = out_dtype == torch.bfloat16
    constants = (_kind(left), _kind(right), bias is not None, is_bf16, _TILE_ROWS, _TILE_COLUMNS)
    key = (
        constants, out_dtype, None if bias is None else bias.dtype, rows & 15 == 0, columns & 15 == 0, rows == 1,
        columns == 1, device,
    )  # fmt: skip
    programs = ceil_div(rows, _TILE_ROWS) * ceil_div(columns, _TILE_COLUMNS)
    _SCALE(key, programs, device, (accumulator_MN, left, right, bias, out), (rows, columns), constants)
    return out


def _plain(
    accumulator_MN: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same in torch ops, for tensors that no kernel reaches."""
    factors = [scale for scale in (left, right if right is None or not right.dim() else right.t()) if scale is not None]
    y = accumulator_MN
    if factors:
        y = y * (factors[0] * factors[1] if len(factors) == 2 else factors[0])
    return y if bias is None else y + bias.float()
