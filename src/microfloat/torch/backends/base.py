"""The interface of a backend: plain tensors in operand form, no tensor subclass, no ambient state.

Legend: R = rows of the operand form, C = its contraction length, M x K = x, N x K = w, M x N = dy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from microfloat.chips import Chip
from microfloat.formats import ScaledFormat
from microfloat.layout import ALIGNMENT, Layout, Part, stored_length
from microfloat.recipes import Hadamard
from microfloat.routes import Entry
from microfloat.torch._typing import TensorPart

# What torch.cuda asks torch for, without the host time of its checks; a build of torch for the CPU has neither.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None)  # type: ignore[assignment]
_Kept = TypeVar("_Kept", torch.Tensor, torch.Tensor | None)


class Backend(Protocol):
    """A module that runs casts and products: an executor of passes, or plain torch operations.

    `programs`: the module that binds passes to launches (`launch.program`), None where torch operations cast,
    for the reason `no_programs`. `is_strict`: a cast without a kernel is refused; else torch operations make it.
    `producers`: the module of kernels that produce a value and cast it at once, or None. `chip_of`: the chip whose
    GEMMs multiply on a device, by which `microfloat.routes` decides in which form operands enter them; None where
    torch operations decode and multiply them. Casts, `dequantize`, `fold_codes`, `turned`, `scaled_matmul` and `amax`
    do what those of `microfloat.torch.reference` do.
    """

    name: str
    programs: Any
    no_programs: str
    is_strict: bool
    producers: Any
    chip_of: Callable[[torch.device], Chip | None]
    quantize: Callable[..., "Operand"]
    quantize_both: Callable[..., tuple[Any, Any]]  # Operand, None for a cast that is None
    dequantize: Callable[..., torch.Tensor]
    fold_codes: Callable[..., "Operand"]
    turned: Callable[[torch.Tensor], torch.Tensor]
    scaled_matmul: Callable[..., torch.Tensor]
    amax: Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True, eq=False)
class Operand:
    """One quantized matrix: ``value[r, c] = decode(codes[r, c]) * scale[block of r, c] * tensor_scale``.

    `codes` [R, C'] in the dtype of the public contract (float8 for 8-bit elements, uint8 for 4 and 6 bit, FP4 packed
    two per byte); `scale` as in docs/numerics.md 7.1 (uint8 or float32); `tensor_scale` float32 () or [R, 1] or None.
    `rows`, `length`: logical R and C (C before Hadamard padding; with `hadamard` whole transforms are stored).
    `power_of_two`: True for FP32 scales by a rule of powers of two; None where the rule is not recorded.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor | None
    format: ScaledFormat
    rows: int
    length: int
    hadamard: Hadamard | None = None
    power_of_two: bool | None = None

    @property
    def stored_length(self) -> int:
        """C as stored, with the padding of a Hadamard transform."""
        return stored_length(self.length, self.hadamard)


class Parts(NamedTuple):
    """The tensors of one operand between its cast and its GEMM, each None where the operand has none."""

    codes: TensorPart = None  # or decoded values, or the matrix itself in high precision
    scale: TensorPart = None
    tensor_scale: TensorPart = None


NO_PARTS = Parts()


@dataclass(slots=True, eq=False)
class Operands:
    """Both operands of one tensor: `row` of the matrix itself, `column` of its transpose."""

    row: Parts = NO_PARTS
    column: Parts = NO_PARTS

    @staticmethod
    def of(parts: Sequence) -> "Operands":
        """The operands whose parts are the first six of a sequence, in order."""
        return Operands(Parts(*parts[:3]), Parts(*parts[3:6]))

    def one(self, row: bool) -> Parts:
        """The row operand, or the column operand."""
        return self.row if row else self.column

    def flat(self) -> tuple:
        """All six parts in order, as `of` takes them."""
        return *self.row, *self.column


class Saved(NamedTuple):
    """The operands that backward reads: of x for wgrad, of w for dgrad."""

    x: Parts = NO_PARTS
    w: Parts = NO_PARTS


@torch.no_grad()
def record_amax_(history: torch.Tensor, amax: torch.Tensor) -> None:
    """``history[0] = max(history[0], amax)`` in place; a non-finite amax records nothing (docs/numerics.md 3.3)."""
    live = history[0]
    live.copy_(torch.where(torch.isfinite(amax), torch.maximum(live, amax), live))


def capturing() -> bool:
    """True while the current stream records a CUDA graph: launches run at every replay, and not now."""
    # Before CUDA is initialized nothing records, and without a driver the second question raises.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in layouts and passes, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def laid(tensor: torch.Tensor | None, part: Part | None, backend: Backend | None = None) -> torch.Tensor | None:
    """The tensor in the memory order of its layout: itself, or a copy, by a kernel of `backend` where it has one."""
    if tensor is None or part is None or tensor.stride() == part.strides:
        return tensor
    if backend is not None and tensor.itemsize == 1 and tensor.dim() == 2:
        by_rows, by_columns = (part.shape[1], 1), (1, part.shape[0])
        if (tensor.stride(), part.strides) == (by_columns, by_rows):
            return backend.turned(tensor.t())
        if (tensor.stride(), part.strides) == (by_rows, by_columns):
            return backend.turned(tensor).t()
    return torch.empty_strided(part.shape, part.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def aligned(tensor: _Kept) -> _Kept:
    """The tensor, or a copy, that begins at a multiple of 16 bytes, as bound launches and cuBLAS need."""
    return tensor if tensor is None or tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def parts_of(
    operand: Operand | None, entry: Entry | None, layout: Layout | None, backend: Backend | None = None
) -> Parts:
    """Codes, scale and tensor scale of an operand [R, C], as its GEMM takes them; `backend`: transposes codes."""
    if operand is None or entry is None or layout is None:
        return NO_PARTS
    codes, scale, fmt = operand.codes, operand.scale, operand.format
    if entry.turned:
        codes = codes.t()
        # Decoded values have no scale; scales of 1x128 blocks are column-major either way.
        if scale is not None and scale.dim() and fmt.block != (1, 128):
            scale = scale.t()
    return Parts(laid(codes, layout.codes, backend), laid(scale, layout.scale), operand.tensor_scale)
