"""FP8 GEMMs with 1x128 scales: the vendor's, or a kernel of our own where it is faster, on Hopper, for large matrices.

`kernels.gemm.block_gemm` needs Triton 3.6 (Gluon) and an assembler of CUDA 12.9 or newer, which that Triton carries:
older ones keep float32 arithmetic and tensor cores from overlapping. Where either is missing the vendor's GEMM serves.

Operands lie as the vendor's GEMM takes them: codes `a` [M, K] and `b` [K, N] with unit stride along K; 1x128 scales
[M, K/128] and [N, K/128] with unit stride along rows, 128x128 scales ("tiles") [K/128 rounded up to 4, N/128] with unit
stride along K.

Legend: M, N = rows of the operands, K = contraction length.
"""

import functools
import threading
from typing import Any

import torch
import torch.nn.functional as F
import triton

from microfloat.chips import Chip
from microfloat.torch.backends.routes import OWN_GEMMS, own_gemm_is_faster
from microfloat.torch.backends.triton._launch import INTERPRETED, ceil_div

__all__ = ["block_matmul", "is_faster", "is_faster_on", "is_there", "own_block_matmul"]

_SIDE = 128
_ASSEMBLER = (12, 9)
_CODES = torch.float8_e4m3fn
_LOCK = threading.Lock()
_COMPILED: set[tuple] = set()


@functools.cache
def is_there() -> bool:
    """Whether this Triton can build the kernel."""
    if INTERPRETED or tuple(triton.__version__.split(".")[:2]) != ("3", "6"):
        return False
    return _assembler() is not None


@functools.cache
def _assembler() -> str | None:
    """The path of an assembler that is new enough."""
    from triton import knobs

    for name in ("ptxas", "ptxas_blackwell"):
        try:
            tool = getattr(knobs.nvidia, name)
        except (AttributeError, RuntimeError):
            continue
        if tuple(int(part) for part in tool.version.split(".")[:2]) >= _ASSEMBLER:
            return tool.path
    return None


def is_faster(shape: tuple[int, int, int], tiles: bool, dtype: torch.dtype, chip: Chip, processors: int = 132) -> bool:
    """`own_gemm_is_faster`, where this Triton can build the kernel."""
    return own_gemm_is_faster(shape, tiles, dtype, chip, processors) and is_there()


def is_faster_on(device: int, shape: tuple[int, int, int], tiles: bool, dtype: torch.dtype) -> bool:
    """`is_faster` on a CUDA device by its number; -1 is none."""
    return device >= 0 and is_faster(shape, tiles, dtype, _chip(device), _processors(device))


def block_matmul(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype, tiles: bool,
    own: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """``a @ b`` in `dtype`, by whichever GEMM is faster; `own`: True = by the kernel, None = not known yet."""
    if own is None:
        own = _is_faster_here(a, b, (a.shape[0], a.shape[1], b.shape[1]), tiles, dtype)
    if own and _lie_well(a, a_scale.t(), b.t(), b_scale.t()):
        return own_block_matmul(a, a_scale, b, b_scale, dtype, tiles)
    kinds = F.ScalingType
    b_kind = kinds.BlockWise128x128 if tiles else kinds.BlockWise1x128
    return F.scaled_mm(a, b, a_scale, kinds.BlockWise1x128, b_scale, b_kind, output_dtype=dtype)


def _is_faster_here(
    a: torch.Tensor, b: torch.Tensor, shape: tuple[int, int, int], tiles: bool, dtype: torch.dtype
) -> bool:
    return a.dtype == b.dtype == _CODES and is_faster_on(a.get_device(), shape, tiles, dtype)


def _lie_well(*tensors: torch.Tensor) -> bool:
    """Whether all are contiguous and begin at multiples of 16 bytes, as copies into shared memory need."""
    return all(tensor.is_contiguous() and tensor.data_ptr() & 15 == 0 for tensor in tensors)


def own_block_matmul(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype, tiles: bool
) -> torch.Tensor:
    """``a @ b`` by `kernels.gemm.block_gemm`, whatever the size. K and N multiples of 16, M of 4."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from microfloat.kernels.gemm import block_gemm as kernels

    (m, k), n = a.shape, b.shape[1]
    shape = OWN_GEMMS[tiles]
    c = torch.empty((m, n), dtype=dtype, device=a.device)
    codes, flat = kernels.codes_layout, kernels.scale_layout
    a_scales = TensorDescriptor(a_scale, [a_scale.numel()], [1], [kernels.SCALE_BOX], flat)
    # With tiles the descriptor of B's scales is not read.
    b_scales = a_scales if tiles else TensorDescriptor(b_scale, [b_scale.numel()], [1], [kernels.COLUMNS], flat)
    size = c.element_size()
    arguments = (
        TensorDescriptor(a, [m, k], [k, 1], [kernels.PART, _SIDE], codes),
        TensorDescriptor(b, [n, k], [k, 1], [kernels.COLUMNS, _SIDE], codes), a_scales, b_scales, b_scale,
        b_scale.stride(1) if tiles else 0,
        TensorDescriptor(c, [m, n], [n, 1], [kernels.PART, _SIDE // size], kernels.output_layout(size)), m, n, k,
        shape.warpgroups, shape.parts, kernels.COLUMNS, shape.stages, shape.group, tiles, shape.registers,
    )  # fmt: skip
    device = a.get_device()
    rows, columns = shape.tile
    programs = min(ceil_div(m, rows) * ceil_div(n, columns), _processors(device))
    with torch.cuda.device(device):
        _start(kernels.block_gemm, programs, arguments, (tiles, a.dtype, b.dtype, dtype, device))
    return c


def _start(function: Any, programs: int, arguments: tuple, kind: tuple) -> None:
    if kind in _COMPILED:
        function[(programs,)](*arguments, num_warps=4)
        return
    from triton import knobs

    assembler = _assembler()
    with _LOCK, knobs.nvidia.scope():
        if assembler is not None:
            knobs.nvidia.ptxas = assembler  # type: ignore[assignment]
        function[(programs,)](*arguments, num_warps=4)
    _COMPILED.add(kind)


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _chip(device: int) -> Chip:
    return Chip(torch.cuda.get_device_capability(device))
