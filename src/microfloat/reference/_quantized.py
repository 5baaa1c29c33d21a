"""What `quantize` returns: codes, scales, and what is needed to read them."""

from dataclasses import dataclass

import numpy as np

from microfloat.errors import invalid_type
from microfloat.formats import ScaledFormat
from microfloat.recipes import Hadamard
from microfloat.reference._hadamard import stored_length
from microfloat.reference._packing import unpack_fp4

__all__ = ["Quantized"]


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized array: ``value = decode(codes) * scale * tensor_scale``, blocks along the contraction axis.

    * `codes`: uint8 in operand form (contraction axis last, leading axes kept), 4-bit codes packed two per byte.
    * `scale`: uint8 bytes (E8M0, E4M3) or float32; () per tensor, 2-D for tiles, else one entry per block of a row.
    * `tensor_scale`: float32 of shape () or [R, 1], or None.
    * `format`, `hadamard`: those of the Cast. `axis`: the contraction axis of the original `shape`, >= 0.

    Source: docs/numerics.md 7.1 and 7.3.
    """

    codes: np.ndarray
    scale: np.ndarray
    tensor_scale: np.ndarray | None
    format: ScaledFormat
    axis: int
    shape: tuple[int, ...]
    hadamard: Hadamard | None = None

    @property
    def length(self) -> int:
        """Stored contraction length: ``shape[axis]``, rounded up to 16 under a Hadamard transform."""
        return stored_length(self.shape[self.axis] if self.shape else 1, self.hadamard)

    @property
    def rows(self) -> int:
        """R of the operand form [R, C]: all other axes flattened."""
        return int(np.prod(self.codes.shape[:-1], dtype=np.int64))

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


def check_quantized(argument: str, value: object) -> Quantized:
    """`value` itself if it is a Quantized, else InvalidTypeError."""
    if not isinstance(value, Quantized):
        raise invalid_type(argument, type(value), "a Quantized", "Call reference.quantize(x, cast) first.")
    return value
