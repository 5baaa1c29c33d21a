"""The NumPy oracle: the definition that every backend is tested against (docs/numerics.md).

One idea per private module: `_operand` (arrays as the matrix a GEMM sees), `_scales` (amax -> stored scale),
`_quantize`, `_philox`, `_packing`, `_values` (dequantize, scaled_matmul, fold), `_delayed`.
"""

from microfloat.reference._delayed import record_amax, update_delayed
from microfloat.reference._operand import hadamard_inverse, hadamard_transform
from microfloat.reference._packing import (
    from_blocked,
    pack_fp4,
    pack_fp6,
    swizzle_scales,
    to_blocked,
    unpack_fp4,
    unpack_fp6,
    unswizzle_scales,
)
from microfloat.reference._philox import derive, philox, random_bytes
from microfloat.reference._quantize import Quantized, quantize
from microfloat.reference._values import dequantize, fold, scaled_matmul

__all__ = [
    "Quantized", "dequantize", "derive", "fold", "from_blocked", "hadamard_inverse", "hadamard_transform", "pack_fp4",
    "pack_fp6", "philox", "quantize", "random_bytes", "record_amax", "scaled_matmul", "swizzle_scales", "to_blocked",
    "unpack_fp4", "unpack_fp6", "unswizzle_scales", "update_delayed",
]  # fmt: skip
