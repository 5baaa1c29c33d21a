"""What `quantize` returns: codes, scales, and what is needed to read them."""

from dataclasses import dataclass

import numpy as np

from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import ScaledFormat
from microfloat.operand_shapes import codes_shape, leading_axes, scale_shape
from microfloat.recipes import Hadamard
from microfloat.reference._hadamard import stored_length
from microfloat.reference._packing import unpack_fp4

__all__ = ["Quantized", "check_quantized"]


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized array: ``value = decode(codes) * scale * tensor_scale``, blocks along the contraction axis.

    * `codes`: uint8 in operand form (contraction axis last, leading axes kept), 4-bit codes packed two per byte.
    * `scale`: uint8 bytes (E8M0, E4M3) or float32; () per tensor, 2-D for tiles, else one entry per block of a row.
    * `tensor_scale`: float32 of shape () or [R, 1], or None.
    * `format`, `hadamard`: those of the Cast. `axis`: the contraction axis of the original `shape`, >= 0.

    Raises InvalidValueError for arrays whose shape or dtype is not what `format`, `axis`, `shape` and `hadamard` ask
    for. Source: docs/numerics.md 7.1 and 7.3.
    """

    codes: np.ndarray
    scale: np.ndarray
    tensor_scale: np.ndarray | None
    format: ScaledFormat
    axis: int
    shape: tuple[int, ...]
    hadamard: Hadamard | None = None

    def __post_init__(self) -> None:
        fmt, bytes_per_row = self.format, -(-self.length // self.format.element.codes_per_byte)
        rows = int(np.prod(leading_axes(self.shape, self.axis), dtype=np.int64))
        grid = tuple(
            1 if size is None else -(-extent // size)
            for extent, size in zip((rows, self.length), fmt.block, strict=True)
        )
        _check_array("codes", self.codes, np.dtype(np.uint8), codes_shape(self.shape, self.axis, bytes_per_row))
        _check_array("scale", self.scale, fmt.scale.dtype, scale_shape(fmt, self.shape, self.axis, grid))
        if self.tensor_scale is not None:
            if fmt.tensor_scale is None:
                raise invalid_value("tensor_scale", "an array", f"None, as {fmt.name} has no tensor scale")
            needed = (rows, 1) if fmt.tensor_scale == "row" else ()
            _check_array("tensor_scale", self.tensor_scale, np.dtype(np.float32), needed)

    @property
    def logical_length(self) -> int:
        """Contraction length of the original: ``shape[axis]``; 1 for a 0-d array."""
        return self.shape[self.axis] if self.shape else 1

    @property
    def length(self) -> int:
        """Stored contraction length: `logical_length`, rounded up to 16 under a Hadamard transform."""
        return stored_length(self.logical_length, self.hadamard)

    @property
    def rows(self) -> int:
        """R of the operand form [R, C]: all other axes flattened."""
        return int(np.prod(leading_axes(self.shape, self.axis), dtype=np.int64))

    def unpacked_codes(self) -> np.ndarray:
        """Codes of the operand form, one per byte: uint8 [R, length]."""
        codes = self.codes.reshape(self.rows, self.codes.shape[-1])
        return unpack_fp4(codes, self.length) if self.format.element.codes_per_byte == 2 else codes

    def __repr__(self) -> str:
        transform = f", {self.hadamard}" if self.hadamard else ""
        return (
            f"Quantized({self.format.name}, shape={self.shape}, axis={self.axis}, codes={self.codes.shape}, "
            f"scale={self.scale.dtype}{self.scale.shape}{transform})"
        )


def _check_array(argument: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray):
        raise invalid_type(argument, type(array), f"a NumPy array of {dtype}")
    if array.dtype != dtype or array.shape != shape:
        raise invalid_value(argument, f"{array.dtype}{list(array.shape)}", f"{dtype}{list(shape)}")


def check_quantized(argument: str, value: object) -> Quantized:
    """`value` itself if it is a Quantized, else InvalidTypeError."""
    if not isinstance(value, Quantized):
        raise invalid_type(argument, type(value), "a Quantized", "Call reference.quantize(x, cast) first.")
    return value
