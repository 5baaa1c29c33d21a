"""What a backend takes and returns: plain tensors in operand form, no tensor subclass, no ambient state.

Legend: R = rows of the operand form, C = its contraction length, M x K = x, N x K = w, M x N = dy.
"""

from dataclasses import dataclass

import torch

from microfloat.formats import ScaledFormat
from microfloat.recipes import Hadamard

__all__ = ["Operand", "Values", "record_amax_"]


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One quantized matrix: ``value[r, c] = decode(codes[r, c]) * scale[block of r, c] * tensor_scale``.

    `codes` [R, C'] in the dtype of the public contract (float8 for 8-bit elements, uint8 for 4 and 6 bit, FP4 packed
    two per byte); `scale` as docs/numerics.md 7.1 says (uint8 or float32); `tensor_scale` float32 () or [R, 1] or None.
    `rows`, `length`: logical R and C (C before Hadamard padding; with `hadamard` it is stored rounded up to 16).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor | None
    format: ScaledFormat
    rows: int
    length: int
    hadamard: Hadamard | None = None

    @property
    def stored_length(self) -> int:
        """C, rounded up to a multiple of 16 when the Hadamard transform padded it."""
        return -(-self.length // 16) * 16 if self.hadamard else self.length


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """One quantized matrix in operand form, decoded: ``value[r, c] = values[r, c] * tensor_scale``, exactly.

    What a GEMM without support for the format multiplies instead of codes: `values` [R, C] in bfloat16 hold element
    times block scale, which is exact there wherever it is normal (docs/numerics.md 8.2); `tensor_scale` float32 () or
    [R, 1] or None goes to the epilogue. With `hadamard` the values are in the transformed domain (C padded to 16).
    """

    values: torch.Tensor
    tensor_scale: torch.Tensor | None
    format: ScaledFormat
    rows: int
    length: int
    hadamard: Hadamard | None = None


@torch.no_grad()
def record_amax_(history: torch.Tensor, amax: torch.Tensor) -> None:
    """``history[0] = max(history[0], amax)`` in place; a non-finite amax records nothing (docs/numerics.md 3.3)."""
    live = history[0]
    live.copy_(torch.where(torch.isfinite(amax), torch.maximum(live, amax), live))
