"""The reference backend: every cast in plain torch ops, on any device.

Blocks run along the contraction axis, the last of the operand form [R, C]. One idea per private module: `_grid`
(blocks and chunks), `_scales` (amax -> scale), `_elements` (float32 <-> codes, random bytes), `_hadamard`, `_quantize`,
`_values` (dequantize, scaled_matmul). Other backends implement the same functions.
"""

import torch

from microfloat.passes import OperandSpec
from microfloat.recipes import Recipe
from microfloat.routes import Routes, routes_of
from microfloat.torch.reference._quantize import quantize, quantize_both, transpose_operand
from microfloat.torch.reference._quantize import tensor_amax as amax
from microfloat.torch.reference._values import dequantize, fold_codes, scaled_matmul, turned

__all__ = [
    "amax", "dequantize", "fold_codes", "name", "producers", "programs", "quantize", "quantize_both", "routes",
    "scaled_matmul", "transpose_operand", "turned", "why_no_program",
]  # fmt: skip

# The interface of `backends.base.Backend`.
name, programs, producers = "reference", None, None


def routes(recipe: Recipe, device: torch.device, counts: object = None) -> Routes:
    """See `backends.base.Backend`: operands are codes, decoded and multiplied by torch operations."""
    return routes_of(recipe, None)


def why_no_program(row: OperandSpec | None, column: OperandSpec | None) -> str:
    """See `backends.base.Backend`."""
    return "the reference backend casts by plain torch operations"
