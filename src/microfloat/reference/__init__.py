"""The NumPy oracle: the definition that every backend is tested against (docs/numerics.md).

One idea per private module: `_operand` (arrays as the matrix a GEMM sees), `_scales` (amax -> stored scale),
`_quantize`, `_dequantize`, `_philox`, `_hadamard`, `_packing`, `_swizzle`, `_matmul`, `_delayed`, `_fold`.
"""

from microfloat.reference._delayed import record_amax, update_delayed
from microfloat.reference._dequantize import dequantize
from microfloat.reference._fold import fold
from microfloat.reference._matmul import scaled_matmul
from microfloat.reference._packing import pack_fp4, pack_fp6, unpack_fp4, unpack_fp6
from microfloat.reference._philox import derive, philox, random_bytes
from microfloat.reference._quantize import quantize
from microfloat.reference._quantized import Quantized
from microfloat.reference._swizzle import swizzle_scales, unswizzle_scales

__all__ = [
    "Quantized", "dequantize", "derive", "fold", "pack_fp4", "pack_fp6", "philox", "quantize", "random_bytes",
    "record_amax", "scaled_matmul", "swizzle_scales", "unpack_fp4", "unpack_fp6", "unswizzle_scales", "update_delayed",
]  # fmt: skip
