"""Scales, bias and the one rounding of a GEMM's float32 accumulator, in one launch."""

from collections.abc import Callable
from typing import Any

import torch

from microfloat.kernels.gemm import epilogue as kernels
from microfloat.torch.backends.triton._launch import INTERPRETED, Kernel, Warps, ceil_div
from microfloat.torch.backends.triton._programs import fast_empty
from microfloat.torch.backends.triton._scaled import Launch

__all__ = ["epilogue", "scale_and_round"]

_SCALE = Kernel(kernels.scale_and_round)
_TILE_ROWS, _TILE_COLUMNS, _WARPS = 8, 512, Warps(4)
_KINDS = {None: kernels.NONE.value, "tensor": kernels.ONE.value, "row": kernels.VECTOR.value}


def _kind(scale: torch.Tensor | None) -> int:
    return _KINDS[None if scale is None else "row" if scale.dim() else "tensor"]


def _launch(
    rows: int, columns: int, kinds: tuple[int, int], bias: torch.Tensor | None, out_dtype: torch.dtype, device: int
) -> Launch:
    """Its tensors: the accumulator, both scales, the bias, the result."""
    constants = (*kinds, bias is not None, out_dtype == torch.bfloat16, _TILE_ROWS, _TILE_COLUMNS)
    key = (
        constants, out_dtype, None if bias is None else bias.dtype, rows & 15 == 0, columns & 15 == 0, rows == 1,
        columns == 1, device,
    )  # fmt: skip
    programs = ceil_div(rows, _TILE_ROWS) * ceil_div(columns, _TILE_COLUMNS)
    return Launch(_SCALE, key, programs, (rows, columns), constants, _WARPS)


def scale_and_round(
    accumulator_MN: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None, bias: torch.Tensor | None,
    out_dtype: torch.dtype, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """``round(accumulator * f32(left * right) + f32(bias))``: float32 [M, N] -> `out_dtype` [M, N], one rounding.

    `left`: float32 (), or [M, 1], or None; `right`: (), or [N, 1], or None; `bias`: [N] or None; `out`: where to.
    """
    rows, columns = accumulator_MN.shape
    device = accumulator_MN.get_device()
    if device < 0 and not INTERPRETED:
        result = _plain(accumulator_MN, left, right, bias)
        return result.to(out_dtype) if out is None else out.copy_(result)
    if out is None:
        out = torch.empty((rows, columns), dtype=out_dtype, device=accumulator_MN.device)
    launch = _launch(rows, columns, (_kind(left), _kind(right)), bias, out_dtype, device)
    launch(device, accumulator_MN, left, right, bias, out)
    return out


def epilogue(
    rows: int, columns: int, levels: tuple[str | None, ...], bias: torch.Tensor | None, out_dtype: torch.dtype,
    device: torch.device,
) -> Callable[[Any, Any, Any, Any], torch.Tensor]:  # fmt: skip
    """`scale_and_round` of ``(accumulator, left, right, bias)``, prepared: the same launch for aligned tensors.

    `levels`: None, "tensor" or "row" for each scale; `bias`: what it looks like, or None. On the current device.
    """
    number = -1 if device.type != "cuda" else device.index
    kinds = (_KINDS[levels[0]], _KINDS[levels[1]])
    prepared = _launch(rows, columns, kinds, bias, out_dtype, number).prepared()
    empty, size, stride = fast_empty(device), (rows, columns), (columns, 1)

    def finish(accumulator: Any, left: Any, right: Any, bias: Any) -> torch.Tensor:
        out = empty(size, stride, out_dtype)
        stream = 0 if number < 0 else torch._C._cuda_getCurrentRawStream(number)
        prepared(stream, accumulator, left, right, bias, out)
        return out

    return finish


def _plain(
    accumulator_MN: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same in torch ops, for tensors that no kernel reaches."""
    factors = [scale for scale in (left, right if right is None or not right.dim() else right.t()) if scale is not None]
    y = accumulator_MN
    if factors:
        y = y * (factors[0] * factors[1] if len(factors) == 2 else factors[0])
    return y if bias is None else y + bias.float()
