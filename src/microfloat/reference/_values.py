"""Values of quantized arrays: dequantized to float32, multiplied exactly, folded into the scales of FP8.

Source: docs/numerics.md 7.3, 8.1, 8.2 and 9.
"""

import math

import ml_dtypes
import numpy as np

from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import E2M1, E4M3, E5M2, FORMATS, ScaledFormat, decode, encode
from microfloat.layout import leading_axes, scale_shape
from microfloat.reference._operand import block_max, hadamard_inverse, spread
from microfloat.reference._quantize import Quantized, check_quantized


def dequantize(q: Quantized) -> np.ndarray:
    """The values of `q` as float32, in the original shape.

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


def element_scales(q: Quantized, dtype: type = np.float32) -> np.ndarray:
    """Factors [R, C] of the codes, tensor scale included; exact in float64."""
    values = q.format.scale.values(scale_grid(q)).astype(dtype)
    if q.tensor_scale is not None:
        # A tile format has one tensor scale; [R, 1] meets one-row blocks only.
        values = values * q.tensor_scale.astype(dtype)
    return spread(values, q.format.block, (q.rows, q.length))


_ARRAY_DTYPES = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64))


def scaled_matmul(a: Quantized | np.ndarray, b: Quantized | np.ndarray) -> np.ndarray:
    """``Y[m, n] = sum_k a[m, k] * b[n, k]`` of exact element values (code x scale x tensor scale), float64 [R_a, R_b].

    An operand is a Quantized, or a float array [R, C] used as it is. No bias, no rounding: every factor is exact in
    float64. Hadamard operands are multiplied in the transformed domain. Raises InvalidValueError for operands of
    different stored contraction length or different `hadamard`. Source: docs/numerics.md 7.3 and 8.2.
    """
    a_MK, b_NK = _exact_values("a", a), _exact_values("b", b)
    transforms = [operand.hadamard if isinstance(operand, Quantized) else None for operand in (a, b)]
    if transforms[0] != transforms[1]:
        raise invalid_value(
            "b", f"hadamard {transforms[1]} against {transforms[0]} of a", "the same Hadamard on both, or on neither",
            "Quantize both with one Cast.hadamard, or dequantize the transformed operand first.",
        )  # fmt: skip
    if a_MK.shape[1] != b_NK.shape[1]:
        raise invalid_value(
            "b", f"contraction length {b_NK.shape[1]}", f"{a_MK.shape[1]}, as a has",
            "Both operands contract their quantization axis: y = a @ b.T.",
        )  # fmt: skip
    with np.errstate(all="ignore"):
        return a_MK @ b_NK.T


def _exact_values(argument: str, operand: Quantized | np.ndarray) -> np.ndarray:
    """float64 [R, C] without any rounding."""
    if isinstance(operand, Quantized):
        with np.errstate(all="ignore"):
            values = decode(operand.unpacked_codes(), operand.format.element).astype(np.float64)
            return values * element_scales(operand, np.float64)
    array = np.asarray(operand)
    if array.dtype not in _ARRAY_DTYPES:
        raise invalid_type(argument, array.dtype, "a Quantized, or a float array [R, C] in operand form")
    if array.ndim != 2:
        raise invalid_value(argument, f"shape {array.shape}", "a matrix [R, C] in operand form", "Reshape it first.")
    return array.astype(np.float64)


_TARGETS: dict[tuple, ScaledFormat] = {
    (fmt.block, fmt.element): fmt for fmt in FORMATS.values() if fmt.block in ((1, 128), (128, 128), (1, None))
}


def fold(q: Quantized, block: tuple[int, int | None] = (1, 128)) -> tuple[Quantized, int]:
    """An MX or NVFP4 tensor as FP8 with one FP32 scale per group, and how many elements changed their value.

    ``q' = enc(dec(q) * block scale / 2^E)``, ``scale' = 2^E``, for NVFP4 times its tensor scale. MX:
    ``E = max(1, max_i b_i - k) - 127``, where k is the largest shift that keeps every code in range (0 for FP8; 6, 5, 4
    for E2M1, E2M3, E3M2), and a group with a NaN scale is NaN throughout. NVFP4: E is the smallest integer >= -9 with
    ``6 * (largest block scale) <= 448 * 2^E``, and blocks with a NaN scale are NaN codes. The element is E5M2 for E5M2
    codes, else E4M3. Raises InvalidValueError for other formats, and unless `block` is (1, 128), (1, None) for whole
    rows, or (128, 128), which cannot be had of one tensor scale per row. Source: docs/numerics.md, section 9.
    """
    check_quantized("q", q)
    element, kind = q.format.element, q.format.scale.name
    if kind != "E8M0" and (kind, element) != ("E4M3", E2M1):
        needed = "E8M0 scales (an MX format) or E4M3 scales of E2M1 elements (NVFP4)"
        raise invalid_value("q", f"format {q.format.name}", needed, "Other scales do not fold.")
    target = E5M2 if element == E5M2 else E4M3
    fmt = _TARGETS.get((tuple(block), target)) if isinstance(block, list | tuple) else None
    if fmt is None:
        raise invalid_value("block", repr(block), "(1, 128), (1, None) or (128, 128)")
    if fmt.is_tile and q.tensor_scale is not None and q.tensor_scale.ndim:
        raise invalid_value("block", f"{block} with one tensor scale for each row", "(1, 128)")
    codes, grid = q.unpacked_codes(), scale_grid(q)
    with np.errstate(all="ignore"):
        if kind == "E8M0":
            block_scales = np.ldexp(1.0, grid.astype(np.int32) - 127)
            largest = block_max(spread(grid, q.format.block, codes.shape).astype(np.int32), fmt.block)
            headroom = math.floor(math.log2(target.max / element.max))  # 0 between equal elements
            is_nan, exponent = largest == 255, np.maximum(largest - headroom, 1) - 127
        else:
            block_scales = decode(grid, E4M3).astype(np.float64)
            finite = np.where(np.isnan(block_scales), 0, abs(block_scales))
            largest = block_max(spread(finite, q.format.block, codes.shape), fmt.block)
            fraction, power = np.frexp(np.maximum(largest, E4M3.step) * element.max / target.max)
            is_nan, exponent = np.zeros(largest.shape, bool), np.maximum(power - (fraction == 0.5), -9)
        values = decode(codes, element).astype(np.float64) * spread(block_scales, q.format.block, codes.shape)
        shift = spread(exponent, fmt.block, codes.shape)
        folded = encode(np.ldexp(values, -shift).astype(np.float32), target)
        in_nan_group = spread(is_nan, fmt.block, codes.shape)
        lossy = (np.ldexp(decode(folded, target).astype(np.float64), shift) != values) & ~np.isnan(values)
        scale = np.ldexp(np.float32(1), exponent).astype(np.float32)
        scale = scale if q.tensor_scale is None else scale * q.tensor_scale
    folded = np.where(in_nan_group, np.uint8(target.nan_code), folded)
    scale = np.where(is_nan, np.uint32(0x7FC00000).view(np.float32), scale)
    stored = scale.reshape(scale_shape(fmt, q.shape, q.axis, scale.shape))
    shape = (*leading_axes(q.shape, q.axis), codes.shape[1])
    changed = int((lossy & ~in_nan_group).sum())
    return Quantized(folded.reshape(shape), stored, None, fmt, q.axis, q.shape, q.hadamard), changed
