"""GEMMs with everything decided but their tensors: what `fp8_matmul` and `values_matmul` call, with the same arguments.

A product is a function ``(a, a_scale, b, b_scale, bias) -> [M, N]`` of operands that lie as the GEMM takes them: `a`
[M, K], `b` [K, N], scales in the layouts of `_gemm`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from microfloat.recipes import Cast, Gemm
from microfloat.torch.backends.native._block_gemm import block_matmul, is_faster_on
from microfloat.torch.backends.triton._epilogue import epilogue

__all__ = ["Product", "product"]

Product = Callable[[Any, Any, Any, Any, Any], torch.Tensor]

_scaled_mm: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
# What F.scaled_mm calls, with less host time. A torch that has it no more is asked through F.scaled_mm.
_scaled_mm_v2: Any = getattr(torch, "_scaled_mm_v2", None)
_SIDE = 128


def product(
    gemm: Gemm, forms: tuple[str, str], shape: tuple[int, int, int], bias: torch.Tensor | None, out_dtype: torch.dtype,
    device: torch.device,
) -> Product | None:  # fmt: skip
    """The product of one GEMM of M, K, N; None where there is none for its operands. `bias`: what it looks like."""
    lhs, rhs = gemm.casts
    if lhs is None or rhs is None or gemm.accumulate == "exact":
        return None
    if forms == ("values", "values"):
        return _values(lhs, rhs, shape, bias, out_dtype, device)
    blocks = _blocks(lhs, forms[0]), _blocks(rhs, forms[1])
    if blocks[0] == (1, _SIDE) and blocks[1] in ((1, _SIDE), (_SIDE, _SIDE)):
        tile, is_padded = blocks[1] == (_SIDE, _SIDE), forms[1] == "tiles"
        multiply = _block_multiplication(gemm, tile, shape, torch.float32 if bias is not None else out_dtype, device)
        return _blockwise(multiply, tile, is_padded, shape, bias, out_dtype, device)
    if blocks in (((None, None), (None, None)), ((1, None), (1, None))):
        return _wide(gemm.accumulate == "fast", shape, bias, out_dtype, device)
    return None


def _blocks(cast: Cast, form: str) -> tuple[int | None, int | None] | None:
    """The blocks of an FP8 operand with FP32 scales, as it enters its GEMM; None for any other operand."""
    if form == "codes":
        fmt = cast.format
        return fmt.block if fmt.scale.name == "FP32" and fmt.element.bits == 8 else None
    return {"folded": (1, _SIDE), "tiles": (_SIDE, _SIDE)}.get(form)


def _wide(
    fast: bool, shape: tuple[int, int, int], bias: torch.Tensor | None, out_dtype: torch.dtype, device: torch.device
) -> Product:
    """Scales per tensor or per row."""
    # A bias of another dtype than the output would be rounded to it first: add it in float32 instead.
    if bias is None or (bias.dtype == out_dtype and out_dtype != torch.float32):
        return lambda a, a_scale, b, b_scale, bias: _scaled_mm(
            a, b, a_scale, b_scale, bias, None, out_dtype, fast
        )  # fmt: skip
    finish = epilogue(shape[0], shape[2], (None, None), bias, out_dtype, device)
    return lambda a, a_scale, b, b_scale, bias: finish(
        _scaled_mm(a, b, a_scale, b_scale, None, None, torch.float32, fast), None, None, bias
    )


def _block_multiplication(
    gemm: Gemm, tile: bool, shape: tuple[int, int, int], made: torch.dtype, device: torch.device
) -> Any:
    """Which of the functions below multiplies: by our own kernel or the vendor's, asked once."""
    e4m3 = all(cast is not None and cast.format.element.name != "E5M2" for cast in gemm.casts)
    index = -1 if device.type != "cuda" else torch.cuda.current_device() if device.index is None else device.index
    if e4m3 and is_faster_on(index, shape, tile, made):
        return _own_tile_matmul if tile else _own_block_matmul
    if _scaled_mm_v2 is None:
        return _any_tile_matmul if tile else _any_block_matmul
    return _tile_matmul if tile else _block_matmul


def _blockwise(
    multiply: Any, tile: bool, is_padded: bool, shape: tuple[int, int, int], bias: torch.Tensor | None,
    out_dtype: torch.dtype, device: torch.device,
) -> Product:  # fmt: skip
    """1x128 by 128x128 (`tile`) or 1x128 scales; `is_padded`: those of tiles lie in columns of a multiple of four."""
    padded = tile and not is_padded and -(-shape[1] // _SIDE) % 4
    finish = None if bias is None else epilogue(shape[0], shape[2], (None, None), bias, out_dtype, device)
    if finish is None and not padded:
        return lambda a, a_scale, b, b_scale, bias: multiply(a, a_scale, b, b_scale, out_dtype)
    more = 4 - padded if padded else 0

    def multiplied(a: Any, a_scale: Any, b: Any, b_scale: Any, bias: Any) -> torch.Tensor:
        if more:
            b_scale = F.pad(b_scale.t(), (0, more)).t()
        if finish is None:
            return multiply(a, a_scale, b, b_scale, out_dtype)
        return finish(multiply(a, a_scale, b, b_scale, torch.float32), None, None, bias)

    return multiplied


_NONE: list[Any] = []
_BY_BLOCKS, _BY_TILES = [F.ScalingType.BlockWise1x128.value], [F.ScalingType.BlockWise128x128.value]


def _block_matmul(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: torch.dtype) -> torch.Tensor:
    return _scaled_mm_v2(a, b, [a_scale], _BY_BLOCKS, _NONE, [b_scale], _BY_BLOCKS, _NONE, None, dtype)


def _tile_matmul(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: torch.dtype) -> torch.Tensor:
    return _scaled_mm_v2(a, b, [a_scale], _BY_BLOCKS, _NONE, [b_scale], _BY_TILES, _NONE, None, dtype)


def _any_block_matmul(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: torch.dtype) -> torch.Tensor:
    return block_matmul(a, a_scale, b, b_scale, dtype, False, False)


def _any_tile_matmul(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: torch.dtype) -> torch.Tensor:
    return block_matmul(a, a_scale, b, b_scale, dtype, True, False)


def _own_block_matmul(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: torch.dtype) -> torch.Tensor:
    return block_matmul(a, a_scale, b, b_scale, dtype, False, True)


def _own_tile_matmul(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: torch.dtype) -> torch.Tensor:
    return block_matmul(a, a_scale, b, b_scale, dtype, True, True)


def _values(
    lhs: Cast, rhs: Cast, shape: tuple[int, int, int], bias: torch.Tensor | None, out_dtype: torch.dtype,
    device: torch.device,
) -> Product:  # fmt: skip
    """Decoded operands: bfloat16 products, float32 sums, tensor scales in the epilogue."""
    scales = tuple(_level(cast) for cast in (lhs, rhs))
    unscaled = scales == (None, None)
    if unscaled and out_dtype == torch.bfloat16 and (bias is None or bias.dtype == out_dtype):
        if bias is None:
            return lambda a, a_scale, b, b_scale, bias: torch.mm(a, b)
        return lambda a, a_scale, b, b_scale, bias: torch.addmm(bias, a, b)
    multiply = _float32_product if device.type == "cuda" else _float32_product_on_cpu
    if unscaled and bias is None and out_dtype == torch.float32:
        return lambda a, a_scale, b, b_scale, bias: multiply(a, b)
    finish = epilogue(shape[0], shape[2], scales, bias, out_dtype, device)
    return lambda a, a_scale, b, b_scale, bias: finish(multiply(a, b), a_scale, b_scale, bias)


def _level(cast: Cast) -> str | None:
    """Which tensor scales stand beside an operand's values: None, "tensor" or "row"."""
    level = cast.rule.two_level
    if level is None or not level.tensor_scale:
        return None
    return "row" if cast.format.tensor_scale == "row" else "tensor"


def _float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


def _float32_product_on_cpu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.float() @ b.float()
