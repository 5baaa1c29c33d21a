"""Exponent folding: the E8M0 scales of an MX tensor into one FP32 scale per 1x128 or 128x128 group.

Source: docs/numerics.md, section 9.
"""

import math

import numpy as np

from microfloat.errors import invalid_value
from microfloat.formats import E4M3, E5M2, FORMATS, ElementFormat, ScaledFormat, decode, encode
from microfloat.operand_shapes import codes_shape, scale_shape
from microfloat.reference._dequantize import scale_grid
from microfloat.reference._operand import block_max, spread
from microfloat.reference._quantized import Quantized, check_quantized

__all__ = ["fold"]

_TARGETS: dict[tuple, ScaledFormat] = {
    (fmt.block, fmt.element): fmt for fmt in FORMATS.values() if fmt.block in ((1, 128), (128, 128))
}


def fold(q: Quantized, block: tuple[int, int] = (1, 128)) -> tuple[Quantized, int]:
    """An MX tensor as FP8 with one FP32 scale per group, and how many elements changed their value.

    ``Eg = max(1, max_i b_i - k)``, ``q' = enc(dec(q) * 2^(b_i - Eg))``, ``scale' = 2^(Eg - 127)``; k is the largest
    shift that keeps every code in range (0 for FP8; 6, 5, 4 for E2M1, E2M3, E3M2). A group with a NaN scale is NaN
    throughout. The element is E5M2 for E5M2 codes, else E4M3. Raises InvalidValueError unless `q` is MX and `block`
    (1, 128) or (128, 128).
    """
    check_quantized("q", q)
    if q.format.scale.name != "E8M0":
        raise invalid_value("q", f"format {q.format.name}", "E8M0 scales (an MX format)", "Other scales do not fold.")
    target = E5M2 if q.format.element == E5M2 else E4M3
    fmt = _TARGETS.get((tuple(block), target)) if isinstance(block, list | tuple) else None
    if fmt is None:
        raise invalid_value("block", repr(block), "(1, 128) or (128, 128)")
    codes = q.unpacked_codes()
    element_bytes = spread(scale_grid(q), q.format.block, codes.shape).astype(np.int32)
    group_bytes = block_max(element_bytes, fmt.block)
    is_nan = group_bytes == 255
    exponent = np.maximum(group_bytes - _headroom(q.format.element, target), 1)
    with np.errstate(all="ignore"):
        values = decode(codes, q.format.element).astype(np.float64)
        shift = element_bytes - spread(exponent, fmt.block, codes.shape)
        folded = encode(np.ldexp(values, shift).astype(np.float32), target)
        restored = np.ldexp(decode(folded, target).astype(np.float64), -shift)
        in_nan_group = spread(is_nan, fmt.block, codes.shape)
        lossy = (restored != values) & ~np.isnan(values) & ~in_nan_group
        scale = np.ldexp(np.float32(1), exponent - 127).astype(np.float32)
    folded = np.where(in_nan_group, np.uint8(target.nan_code), folded)
    scale = np.where(is_nan, np.uint32(0x7FC00000).view(np.float32), scale)
    stored = scale.reshape(scale_shape(fmt, q.shape, q.axis, scale.shape))
    shape = codes_shape(q.shape, q.axis, codes.shape[1])
    return Quantized(folded.reshape(shape), stored, None, fmt, q.axis, q.shape, q.hadamard), int(lossy.sum())


def _headroom(element: ElementFormat, target: ElementFormat) -> int:
    """The largest k with ``element.max * 2^k <= target.max``: 0 between equal elements."""
    return math.floor(math.log2(target.max / element.max))
