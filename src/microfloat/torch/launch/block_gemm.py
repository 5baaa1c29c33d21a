"""microfloat's FP8 GEMM with 1x128 scales (`kernels.gemm.block_gemm`): where it serves, and how it is started.

It needs Triton 3.6 (Gluon) and an assembler of CUDA 12.9 or newer, which that Triton carries: older ones keep float32
arithmetic and tensor cores from overlapping.

Legend: M, N = rows of the operands, K = contraction length.
"""

import functools
import threading
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from microfloat.chips import Chip
from microfloat.kernels.constants import OWN_GEMMS
from microfloat.torch import backends

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime import JITFunction

Shape = tuple[int, int, int]
_SIDE = 128


# Where it was measured to win over the vendor's: to bfloat16, long sums, many products, and tiles that keep all
# multiprocessors busy to the end.
_LEAST_LENGTH, _LEAST_PRODUCTS, _LEAST_FILL = 4096, 2**38, 0.95


def own_gemm_is_faster(shape: tuple[int, int, int], tiles: bool, chip: Chip, processors: int = 132) -> bool:
    """True if microfloat's FP8 GEMM serves a product of M, K, N with a bfloat16 result and beats the vendor's.

    On compute capability 9.0, M a multiple of 4, K and N of 16; from 2^38 products and K of 4096 on, where tiles of C
    come in nearly whole rounds of `processors`. `tiles`: the second operand has 128x128 scales.
    """
    m, k, n = shape
    if chip.capability != (9, 0) or m * k * n < _LEAST_PRODUCTS or k < _LEAST_LENGTH:
        return False
    if m % 4 or (k | n) % 16 or m * k >= 2**37 or n * k >= 2**37:
        return False
    rows, columns = OWN_GEMMS[tiles].tile
    rounds = -(-(-(-m // rows) * -(-n // columns)) // processors)
    # The part of all multiprocessors' time that goes into elements of C, if every tile takes equally long.
    return m * n / (rounds * processors * rows * columns) >= _LEAST_FILL


def own_gemm_serves(device: torch.device, shape: Shape, tiles: bool, dtype: torch.dtype) -> bool:
    """True if microfloat's FP8 GEMM can be built, serves a product of M, K, N in `dtype`, and beats the vendor's."""
    index = backends.device_index(device)
    if index < 0 or dtype != torch.bfloat16:
        return False
    from microfloat.torch.launch import program

    chip, processors = backends.chip_of(device), program.device_of(index).multiprocessors
    return own_gemm_is_faster(shape, tiles, chip, processors) and own_gemm_is_there()


def own_gemm_adds(device: torch.device, shape: Shape) -> bool:
    """True if microfloat's FP8 GEMM can be built, and adds a product of M, K, N to float32."""
    is_hopper = device.type == "cuda" and backends.chip_of(device).capability == (9, 0)
    return is_hopper and not (shape[0] % 4 or (shape[1] | shape[2]) % 16) and own_gemm_is_there()


def own_gemm_is_there() -> bool:
    """True if this Triton can build the kernel."""
    import triton

    from microfloat.torch.launch.program import INTERPRETED

    return not INTERPRETED and tuple(triton.__version__.split(".")[:2]) == ("3", "6") and _assembler() is not None


@functools.cache
def _assembler() -> str | None:
    """The path of an assembler that is new enough."""
    from triton import knobs

    for name in ("ptxas", "ptxas_blackwell"):
        try:
            tool = getattr(knobs.nvidia, name)
        except (AttributeError, RuntimeError):
            continue
        if tuple(int(part) for part in tool.version.split(".")[:2]) >= (12, 9):
            return tool.path
    return None


# By the blocks of both operands: ROWS or MATRIX of `kernels.gemm.block_gemm`; others have scales in blocks of K.
SCALES_OF = {(1, None): 2, (None, None): 3}
ADDED = -1  # the kind of a `GroupedWork` that is a single product, added to what is there


class GroupedWork(NamedTuple):
    """The work of a launch that multiplies many groups (`kernels.gemm.block_gemm`).

    `kind`: FPROP, DGRAD or WGRAD, or ADDED for one product; `number`: of groups; `plan`: its part for this kind;
    `shape`: of C; `scales`: ROWS or MATRIX, None for blocks; `fast`: tensor cores carry the sums.
    """

    kind: int
    number: int
    plan: torch.Tensor | None
    shape: tuple[int, int]
    scales: int | None = None
    fast: bool = False


@functools.cache
def _imported() -> tuple["type[TensorDescriptor]", ModuleType, ModuleType]:
    """Modules that need Triton, which the first product imports once: a host has microseconds for a product."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from microfloat.kernels.gemm import block_gemm
    from microfloat.torch.launch import program

    return TensorDescriptor, block_gemm, program


def own_block_matmul(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype, tiles: bool,
    work: GroupedWork | None = None, into: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """``a @ b`` by `kernels.gemm.block_gemm`, whatever the size; with `work` one product for each group of rows.

    K and N multiples of 16, M of 4; of grouped products N a multiple of 128, and a K that is no number of rows.
    `into`: float32 [M, N] that a single product, by `work` ADDED, is added to.
    """
    descriptor, kernels, program = _imported()
    (m, k), b = a.shape, b.t()
    cut, shape = OWN_GEMMS[tiles], (m, b.shape[0]) if work is None else work.shape
    c = torch.empty(shape, dtype=dtype, device=a.device) if into is None else into
    scales = int(tiles) if work is None or work.scales is None else work.scales
    codes, flat = kernels.codes_layout, kernels.scale_layout
    # Descriptors of scales are read where those are of lines, and of A where B's are of tiles.
    a_scales = descriptor(a_scale, [a_scale.numel()], [1], [kernels.SCALE_BOX], flat)
    b_scales = a_scales if scales else descriptor(b_scale, [b_scale.numel()], [1], [kernels.COLUMNS], flat)
    stride = b_scale.stride(1) if scales == kernels.TILES.value else int(b_scale.dim() > 0)
    size = c.element_size()
    arguments = (
        descriptor(a, [*a.shape], [a.shape[1], 1], [kernels.PART, _SIDE], codes),
        descriptor(b, [*b.shape], [b.shape[1], 1], [kernels.COLUMNS, _SIDE], codes), a_scales, b_scales,
        a_scale, b_scale, stride,
        descriptor(c, [*shape], [shape[1], 1], [kernels.PART, _SIDE // size], kernels.output_layout(size)),
        None if work is None else c, None if work is None else work.plan, m, shape[1], k, cut.warpgroups, cut.parts,
        kernels.COLUMNS, cut.stages, cut.group, scales, work is not None and work.fast, cut.registers,
        *((0, 0) if work is None else work[:2]),
    )  # fmt: skip
    device = a.get_device()
    rows, columns = cut.tile
    programs = -(-shape[0] // rows) * -(-shape[1] // columns)
    if work is not None and into is None:  # and a row of tiles more for every group but one
        programs += work.number * -(-shape[1] // columns)
    with torch.cuda.device(device):
        kind = (scales, a.dtype, b.dtype, dtype, device, *(() if work is None else (*work[:2], work.fast)))
        start(kernels.block_gemm, min(programs, program.device_of(device).multiprocessors), arguments, kind)
    return c


_LOCK = threading.Lock()
_COMPILED: set[tuple] = set()


def start(function: "JITFunction", programs: int, arguments: tuple, kind: tuple) -> None:
    """Start the kernel; the first of its kind is compiled with the assembler that it needs."""
    options = {"num_warps": 4, "enable_fp_fusion": False}  # as JAX compiles it; the kernel names its multiply-adds
    if kind in _COMPILED:
        function[(programs,)](*arguments, **options)
        return
    from triton import knobs

    assembler = _assembler()
    with _LOCK, knobs.nvidia.scope():
        if assembler is not None:
            knobs.nvidia.ptxas = assembler  # type: ignore[assignment]
        function[(programs,)](*arguments, **options)
    _COMPILED.add(kind)
