"""The reference backend: every cast in plain torch ops, on any device.

Blocks run along the contraction axis, the last of the operand form [R, C]. One idea per private module: `_grid`
(blocks and chunks), `_scales` (amax -> scale), `_elements` (float32 <-> codes, random bytes), `_hadamard`, `_quantize`,
`_values` (dequantize, scaled_matmul). Other backends implement the same functions.
"""

import torch

from microfloat.recipes import Cast
from microfloat.torch.backends.base import Operand
from microfloat.torch.reference._quantize import quantize_both, quantize_operand, tensor_amax, transpose_operand
from microfloat.torch.reference._values import dequantize, scaled_matmul

__all__ = ["amax", "dequantize", "quantize", "quantize_both", "scaled_matmul", "transpose_operand"]


def amax(x: torch.Tensor) -> torch.Tensor:
    """float32 () largest magnitude of matrix `x`; NaN is ignored, infinity counts (docs/numerics.md 2.3)."""
    return tensor_amax(x)


def quantize(
    x: torch.Tensor, cast: Cast, *, transposed: bool = False, seed: torch.Tensor | None = None, stream: int = 0,
    batch: int = 0, amax: torch.Tensor | None = None, scale_enc: torch.Tensor | None = None,
) -> Operand:  # fmt: skip
    """Quantize matrix `x` (float32, bfloat16 or float16, any strides) in operand form x, or x.T if `transposed`.

    `seed`: int64 [2], the words of the call seed, low first, for stochastic casts; `stream`, `batch`: counter words.
    `amax`: float32 () or [R, 1] in place of the measured one; `scale_enc`: float32 (), for delayed casts. All on x's
    device. Arguments are not validated here (`microfloat.torch.quantize` does). Source: docs/numerics.md, 2 to 5.
    """
    x_RC = x.t() if transposed else x
    operand = quantize_operand(x_RC, cast, seed=seed, stream=stream, batch=batch, amax=amax, scale_enc=scale_enc)
    operand.codes, operand.scale = _row_major(operand.codes), _row_major(operand.scale)
    if operand.tensor_scale is not None:
        operand.tensor_scale = _row_major(operand.tensor_scale)
    return operand


def _row_major(part: torch.Tensor) -> torch.Tensor:
    """`part` with the strides of a new tensor, also along axes of size 1."""
    return part.reshape(-1).view(part.shape)
