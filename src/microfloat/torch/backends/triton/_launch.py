"""Launching a Triton kernel with little host time, and what every launch needs to know about a matrix.

Triton's own call path examines every argument on every call. Here a kernel compiled once for a *key* is started
directly with raw addresses (`_direct`). The key holds everything that Triton specializes on: the constants, the dtype,
whether addresses and sizes are multiples of 16, whether a size is 1 or needs 64 bits. In the interpreter the ordinary
path runs.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton

from microfloat.kernels.constants import How
from microfloat.kernels.device import convert
from microfloat.kernels.tables import TILES, Warps, ceil_div
from microfloat.torch.backends.triton._direct import Start, starter

__all__ = [
    "INTERPRETED", "TILES", "ClusterKernel", "ClusterRefused", "Kernel", "Matrix", "Prepared", "Warps", "ceil_div",
    "compiled_conversions", "largest_cluster", "multiprocessors", "scratch",
]  # fmt: skip

# Whether kernels run in Triton's interpreter (on CPU tensors): decided when triton was imported.
INTERPRETED = not isinstance(convert.bits_of, triton.JITFunction)


_FOUR_WARPS = Warps(4)
_KINDS = {torch.bfloat16: convert.WORDS_BF16.value, torch.float16: convert.WORDS_F16.value}
_INT32_MAX = 2**31 - 1


def _specialization(value: int) -> int:
    """What Triton makes of an integer argument: 1, a multiple of 16, other; and whether it fits in 32 bits."""
    kind = 2 if value == 1 else (value & 15 == 0)
    return kind if value <= _INT32_MAX else kind + 4


class Matrix:
    """A matrix as kernels see it: address, extents, strides in elements, and how its elements may be read."""

    __slots__ = (
        "columns",
        "even_pairs",
        "even_quads",
        "index64",
        "key",
        "kind",
        "rows",
        "stride_c",
        "stride_r",
        "tensor",
    )

    def __init__(self, x: torch.Tensor) -> None:
        self.tensor = x
        rows, columns = self.rows, self.columns = x.shape
        stride_r, stride_c = self.stride_r, self.stride_c = x.stride()
        if rows == 1:
            stride_r = self.stride_r = columns
        address = x.data_ptr()
        kind = _KINDS.get(x.dtype, 0)
        # Column operands read two words at once, so rows must begin at multiples of 8 bytes; else element by element.
        if kind and (stride_c != 1 or columns & 1 or stride_r & 3 or address & 7):
            kind = 0
        self.kind = kind
        self.even_pairs, self.even_quads = columns & 1 == 0, rows & 3 == 0
        # Offsets inside a tile of 128 rows or columns, of the input and of the outputs in either layout; and the
        # number of block scales, of which there is one for 16 elements at most.
        self.index64 = 128 * max(stride_r, stride_c, rows, columns) > _INT32_MAX or rows * columns >> 4 > _INT32_MAX
        self.key = (
            x.dtype, x.get_device(), kind, self.index64, columns & 1, rows & 3,
            _specialization(rows), _specialization(columns), _specialization(stride_r), _specialization(stride_c),
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """R, C and both strides, as kernels take them."""
        return self.rows, self.columns, self.stride_r, self.stride_c

    def fills(self, tile_rows: int, tile_columns: int) -> bool:
        """Whether whole tiles cover the matrix, so that no load or store needs a mask."""
        return self.rows % tile_rows == 0 and self.columns % tile_columns == 0

    def how(self, tile_rows: int, tile_columns: int, *, units: bool = False) -> How:
        """The constants of a pass over tiles of this size; `units`: codes are stored two and four at a time."""
        even, hardware = self.fills(tile_rows, tile_columns), compiled_conversions(self.tensor.get_device())
        pairs, quads = units and self.even_pairs, units and self.even_quads
        return How(self.kind, self.kind, even, self.index64, hardware, tile_rows, tile_columns, pairs, quads)


class Kernel:
    """A Triton kernel whose pointers come first, then scalars, then constants; compiled versions are kept by key.

    `cooperative`: all programs of a launch run at once, so that they may wait for each other.
    """

    def __init__(self, function: Callable, *, cooperative: bool = False) -> None:
        self.function: Any = function
        self._options = {"enable_fp_fusion": False} | ({"launch_cooperative_grid": True} if cooperative else {})
        self._compiled: dict[tuple, Start] = {}

    def __call__(
        self, key: tuple, programs: int, device: int, tensors: tuple[torch.Tensor | None, ...], scalars: tuple,
        constants: tuple, warps: Warps = _FOUR_WARPS,
    ) -> None:  # fmt: skip
        """Start `programs` programs on the current stream of CUDA device number `device`."""
        if INTERPRETED:
            self.function[(programs,)](*[as_bytes(t) for t in tensors], *scalars, *constants)
            return
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(key, programs, device, tensors, scalars, constants, warps)
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        low_bits = 0
        for address in addresses:
            low_bits |= address or 0
        if low_bits & 15:  # rare: which of them are not multiples of 16 belongs to the key
            key = (key, *[address is None or address & 15 == 0 for address in addresses])
        start = self._compiled.get(key)
        if start is None:
            self.compile(key, programs, tensors, scalars, constants, warps)
            return
        start.start(programs, torch._C._cuda_getCurrentRawStream(device), addresses, (*scalars, *constants))

    def compile(
        self, key: tuple, programs: int, tensors: tuple[torch.Tensor | None, ...], scalars: tuple, constants: tuple,
        warps: Warps,
    ) -> Start | None:  # fmt: skip
        """Start the kernel Triton's way, on the current device and stream, and keep what it has compiled."""
        arguments = (*[as_bytes(t) for t in tensors], *scalars, *constants)
        compiled = self.function[(programs,)](*arguments, **self._options_of(warps))
        start = starter(compiled)
        if start is not None:
            self._compiled[key] = start
        return start

    def _options_of(self, warps: Warps) -> dict[str, Any]:
        # Products and sums stay apart, as docs/numerics.md writes them; fused operations are asked for by name.
        return {"num_warps": warps.number, "maxnreg": warps.registers, **self._options}

    def prepared(
        self, key: tuple, programs: int, scalars: tuple, constants: tuple, warps: Warps = _FOUR_WARPS,
        aligned: tuple[bool, ...] = (),
    ) -> "Prepared":  # fmt: skip
        """A launch with everything decided but the addresses, which will be multiples of 16 where `aligned` says so
        (nothing said: all of them)."""
        return Prepared(self, key if all(aligned) else (key, *aligned), programs, scalars, constants, warps)


class ClusterRefused(Exception):
    """This Triton, or this GPU, does not start such clusters; nothing has run."""


class ClusterKernel(Kernel):
    """A kernel whose programs run in clusters of `size`: at once, and in reach of each other's shared memory.

    A call counts clusters, and raises `ClusterRefused` where there are none.
    """

    def __init__(self, function: Callable, size: int) -> None:
        super().__init__(function)
        self._size = size

    def compile(
        self, key: tuple, programs: int, tensors: tuple[torch.Tensor | None, ...], scalars: tuple, constants: tuple,
        warps: Warps,
    ) -> Start:  # fmt: skip
        """Compile the kernel without starting it, which Triton would do one program at a time, and start it."""
        compiled = self.function.warmup(
            *[as_bytes(t) for t in tensors], *scalars, *constants, grid=(programs,), **self._options_of(warps)
        )
        start = starter(compiled, self._size)
        if start is None:
            raise ClusterRefused
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        try:
            start.start(programs, stream, addresses, (*scalars, *constants))
        except RuntimeError as error:  # no room for a cluster in what there is of the GPU
            raise ClusterRefused from error
        self._compiled[key] = start
        return start


class Prepared:
    """A launch of a kernel that lacks only its stream and addresses, for callers that make it again and again.

    ``at(stream, *addresses)`` starts it on a stream of the current device; None until the first call, which takes
    tensors, has compiled it (always in the interpreter).
    """

    __slots__ = ("_constants", "_kernel", "_key", "_programs", "_scalars", "_warps", "at")

    def __init__(
        self, kernel: Kernel, key: tuple, programs: int, scalars: tuple, constants: tuple, warps: Warps
    ) -> None:
        self._kernel, self._key, self._programs, self._warps = kernel, key, programs, warps
        self._scalars, self._constants = scalars, constants
        self.at: Callable[..., None] | None = None

    def __call__(self, stream: int, *tensors: torch.Tensor | None) -> None:
        """Start it on a stream of the current device. The tensors are aligned as was said when it was prepared."""
        if self.at is not None:
            self.at(stream, *[None if t is None else t.data_ptr() for t in tensors])
            return
        kernel, rest = self._kernel, (*self._scalars, *self._constants)
        if INTERPRETED:
            kernel.function[(self._programs,)](*[as_bytes(t) for t in tensors], *rest)
            return
        start = kernel._compiled.get(self._key)
        if start is not None:
            self.at = start.bind(self._programs, rest)
            self(stream, *tensors)
            return
        start = kernel.compile(self._key, self._programs, tensors, self._scalars, self._constants, self._warps)
        if start is not None:
            self.at = start.bind(self._programs, rest)


def as_bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """FP8 tensors as uint8, so that kernels store plain bytes; others as they are."""
    if tensor is not None and tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return tensor.view(torch.uint8)
    return tensor


_HARDWARE: dict[int, bool] = {}


def compiled_conversions(device: int) -> bool:
    """Whether the hardware forms of `kernels.device.convert` exist on a device (-1 = CPU): compute capability 8.9 and
    newer.
    """
    if INTERPRETED or device < 0:
        return False
    known = _HARDWARE.get(device)
    if known is None:
        known = _HARDWARE[device] = torch.cuda.get_device_capability(device) >= (8, 9)
    return known


@functools.cache
def largest_cluster(device: int) -> int:
    """How many programs a cluster may have on a device: one in the interpreter, none before Hopper and, until it has
    run there, after it.
    """
    if INTERPRETED or device < 0:
        return int(INTERPRETED)
    return 16 if torch.cuda.get_device_capability(device) == (9, 0) else 0


@functools.cache
def multiprocessors(device: int) -> int:
    """How many multiprocessors a CUDA device has; 1 for the CPU (-1), where programs run one after another."""
    return 1 if device < 0 else torch.cuda.get_device_properties(device).multi_processor_count


_SCRATCH: dict[tuple[int, int], torch.Tensor] = {}
_SCRATCH_LOCK = threading.Lock()
_SCRATCH_WORDS = 8
# Words for launches under capture, by device: zero, and made before the capture, so that no graph has to clear them.
_CAPTURED: dict[int, list[torch.Tensor]] = {}
_CAPTURED_AT_ONCE, _MOST_CAPTURED = 512, 1 << 16
_made_for_captures = 0


def scratch(device: int) -> torch.Tensor:
    """int64 words, the first five of them zero: where the programs of one launch meet. Every launch leaves them so.

    One set per stream, since launches of a stream follow each other. A launch that is being captured into a CUDA graph
    gets its own for good, since the graph may be replayed on any stream.
    """
    if device < 0:
        return torch.zeros(_SCRATCH_WORDS, dtype=torch.int64)
    if torch._C._cuda_isCurrentStreamCapturing():
        free = _CAPTURED.get(device)
        try:
            return free.pop()  # type: ignore[union-attr]
        except (AttributeError, IndexError):  # none left, or none made: a set of the graph's, cleared inside the graph
            return torch.zeros(_SCRATCH_WORDS, dtype=torch.int64, device=f"cuda:{device}")
    words = _SCRATCH.get((device, torch._C._cuda_getCurrentRawStream(device)))
    if words is None or (not _CAPTURED[device] and _made_for_captures < _MOST_CAPTURED):
        words = _more_scratch(device)
    return words


def _more_scratch(device: int) -> torch.Tensor:
    """The words of the current stream, made where there are none; and those for the next captures."""
    global _made_for_captures
    place = (device, torch._C._cuda_getCurrentRawStream(device))
    with _SCRATCH_LOCK:
        if not _CAPTURED.get(device):
            _made_for_captures += _CAPTURED_AT_ONCE
            shape = (_CAPTURED_AT_ONCE, 2 * _SCRATCH_WORDS)  # launches that run at the same time share no cache line
            rows = torch.zeros(shape, dtype=torch.int64, device=f"cuda:{device}").unbind()
            torch.cuda.current_stream(device).synchronize()  # captures may run on any stream
            _CAPTURED[device] = list(rows)
        words = _SCRATCH.get(place)
        if words is None:
            words = _SCRATCH[place] = torch.zeros(_SCRATCH_WORDS, dtype=torch.int64, device=f"cuda:{device}")
    return words
