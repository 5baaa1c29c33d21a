"""The reference backend: every cast in plain torch ops, on any device.

Blocks run along the contraction axis, the last of the operand form [R, C]. One idea per private module: `_grid`
(blocks and chunks), `_scales` (amax -> scale), `_elements` (float32 <-> codes, random bytes), `_hadamard`, `_quantize`,
`_values` (dequantize, scaled_matmul). Other backends implement the same functions.
"""

from microfloat.torch.reference._quantize import quantize, quantize_both, transpose_operand
from microfloat.torch.reference._quantize import tensor_amax as amax
from microfloat.torch.reference._values import dequantize, scaled_matmul

__all__ = ["amax", "dequantize", "quantize", "quantize_both", "scaled_matmul", "transpose_operand"]
