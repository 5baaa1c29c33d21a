"""`scaled_matmul`: the exact products of two quantized operands, summed in float64."""

import ml_dtypes
import numpy as np

from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import E4M3, decode
from microfloat.reference._dequantize import scale_grid
from microfloat.reference._operand import spread
from microfloat.reference._quantized import Quantized

__all__ = ["scaled_matmul"]

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
        grid, kind = scale_grid(operand), operand.format.scale.name
        if kind == "E8M0":
            scales = np.where(grid == 255, np.nan, np.ldexp(1.0, grid.astype(np.int32) - 127))
        else:
            scales = (decode(grid, E4M3) if kind == "E4M3" else grid).astype(np.float64)
        if operand.tensor_scale is not None:
            scales = scales * operand.tensor_scale.astype(np.float64)
        codes = operand.unpacked_codes()
        with np.errstate(all="ignore"):
            values = decode(codes, operand.format.element).astype(np.float64)
            return values * spread(scales, operand.format.block, codes.shape)
    array = np.asarray(operand)
    if array.dtype not in _ARRAY_DTYPES:
        raise invalid_type(argument, array.dtype, "a Quantized, or a float array [R, C] in operand form")
    if array.ndim != 2:
        raise invalid_value(argument, f"shape {array.shape}", "a matrix [R, C] in operand form", "Reshape it first.")
    return array.astype(np.float64)
