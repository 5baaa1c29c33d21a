"""`dequantize`: codes back to float32, in the fixed order of operations of docs/numerics.md 8.1."""

import numpy as np

from microfloat.formats import E4M3, decode
from microfloat.reference._hadamard import hadamard_inverse
from microfloat.reference._operand import spread
from microfloat.reference._quantized import Quantized, check_quantized

__all__ = ["dequantize", "element_scales", "scale_grid"]


def dequantize(q: Quantized) -> np.ndarray:
    """The float32 array in its original shape that `q` stands for.

    FP32 and E8M0 scales: ``f32(dec(q) * scale)``; NVFP4: ``f32(dec(q) * f32(dec(sb) * tensor_scale))``. A NaN scale
    gives NaN. A Hadamard transform is undone in float32 (up to rounding), its padding cropped. Raises InvalidTypeError
    for anything but a Quantized.
    """
    check_quantized("q", q)
    with np.errstate(all="ignore"):
        values = decode(q.unpacked_codes(), q.format.element) * element_scales(q)
        if q.hadamard is not None:
            values = hadamard_inverse(values, q.hadamard)[:, : q.logical_length]
    transposed = len(q.shape) == 2 and q.axis == 0
    return np.ascontiguousarray(values.T) if transposed else values.reshape(q.shape)


def scale_grid(q: Quantized) -> np.ndarray:
    """Stored scales as a 2-D grid of blocks over the operand form."""
    if q.format.is_per_tensor:
        return q.scale.reshape(1, 1)
    return q.scale if q.format.is_tile else q.scale.reshape(q.rows, q.scale.shape[-1])


def element_scales(q: Quantized) -> np.ndarray:
    """float32 [R, C]: what every code is multiplied with, tensor scale included."""
    grid, kind = scale_grid(q), q.format.scale.name
    if kind == "E8M0":
        powers = np.ldexp(np.float32(1), grid.astype(np.int32) - 127)
        values = np.where(grid == 255, np.float32(np.nan), powers.astype(np.float32))
    else:
        values = decode(grid, E4M3) if kind == "E4M3" else grid
    if q.tensor_scale is not None:
        # A tile format has one tensor scale; [R, 1] meets one-row blocks only.
        values = values * q.tensor_scale
    return spread(values, q.format.block, (q.rows, q.length))
