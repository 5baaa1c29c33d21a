"""The reference backend: every cast in plain torch ops, on any device.

Blocks run along the contraction axis, the last of the operand form [R, C]. One idea per private module: `_grid`
(blocks and chunks), `_scales` (amax -> scale), `_elements` (float32 <-> codes, random bytes), `_hadamard`, `_quantize`,
`_values` (dequantize, scaled_matmul). Other backends implement the same functions.
"""

import torch

from microfloat.torch.reference._quantize import quantize, quantize_both, transpose_operand
from microfloat.torch.reference._quantize import tensor_amax as amax
from microfloat.torch.reference._values import dequantize, fold_codes, scaled_matmul, turned

__all__ = [
    "amax", "chip_of", "dequantize", "fold_codes", "is_strict", "name", "no_programs", "producers", "programs",
    "quantize", "quantize_both", "scaled_matmul", "transpose_operand", "turned",
]  # fmt: skip

# The interface of `backends.base.Backend`.
name, programs, is_strict, producers = "reference", None, False, None
no_programs = "the reference backend casts by plain torch operations"


def chip_of(device: torch.device) -> None:
    """No chip: operands are codes, decoded and multiplied by torch operations."""
