"""Passes bound to torch: tensors to allocate and launches to start, decided once and run many times.

A `Program` holds no data. Its launches take addresses from a table: the matrix, scratch words, the inputs of the cast
(`CastInputs`), and tensors that the program itself allocates. The first run goes through Triton, which compiles; later
runs start the compiled kernels with raw addresses, since a launch through a JITFunction examines every argument and
costs three times as much. In the interpreter the ordinary path always runs.

All that depends on Triton's version is here. Which private parts of a compiled kernel exist differs between versions,
so every form is checked before it is used, and the ordinary path remains where none fits.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton

from microfloat.kernels.casts import groups
from microfloat.kernels.device import convert, random
from microfloat.layout import ALIGNMENT, Part
from microfloat.passes import OperandSpec
from microfloat.passes.casts import cast_passes, pair_passes
from microfloat.passes.matrix import GROUP_ROWS, At, Device, Matrix, Passes, is_one_pass, specialization  # noqa: F401
from microfloat.passes.tables import Warps
from microfloat.torch._typing import Options
from microfloat.torch.backends.base import current_device, raw_stream

# True where kernels run in Triton's interpreter (on CPU tensors): decided when triton was imported.
INTERPRETED = not isinstance(convert.bits_of, triton.JITFunction)
_FOUR_WARPS = Warps(4)
_PLANNED_TOGETHER = 64  # entries of a plan of groups that one program makes


# The number of programs, and the scalars and constants behind all addresses -> (stream, *addresses) -> None.
Bind = Callable[[int, tuple], Callable[..., None]]


# The arguments before the kernel's own in the launcher of Triton 3.5 and 3.6: grid (3), stream, function, cooperative
# and dependent launch, both scratch buffers, metadata, launch metadata, both hooks.
_LAUNCHER_FORMAT = "iiiKKppOOOOOO"
_LAUNCHER_PARTS = ("launch", "launch_cooperative_grid", "launch_pdl")


def starter(compiled: Any) -> Bind | None:
    """A way to start a compiled kernel with raw addresses on the current device; None where only Triton's is safe.

    Launch hooks (a profiler's) are called as Triton calls them: while any is installed, a start goes its way.
    """
    launcher = getattr(compiled, "run", None)  # loads the binary on first use
    function, metadata = getattr(compiled, "function", None), getattr(compiled, "packed_metadata", None)
    if launcher is None or function is None or metadata is None or not callable(launcher):
        return None
    enter, leave = _hooks()
    if enter is None or leave is None or not hasattr(compiled, "launch_metadata"):
        return None

    def ordinary(programs: int, stream: int, addresses: Sequence[int | None], rest: tuple) -> None:
        about = compiled.launch_metadata((programs, 1, 1), stream, *addresses, *rest)
        launcher(programs, 1, 1, stream, function, metadata, about, enter, leave, *addresses, *rest)

    def bind_ordinary(programs: int, rest: tuple) -> Callable[..., None]:
        return lambda stream, *addresses: ordinary(programs, stream, addresses, rest)

    if not is_known(launcher):
        return bind_ordinary
    launch, cooperative, dependent = (getattr(launcher, name) for name in _LAUNCHER_PARTS)
    entering, leaving = enter.calls, leave.calls  # the chains' own lists: hooks come and go in place

    def bind(programs: int, rest: tuple) -> Callable[..., None]:
        def at(stream: int, *addresses: int | None) -> None:
            if entering or leaving:
                ordinary(programs, stream, addresses, rest)
                return
            launch(
                programs, 1, 1, stream, function, cooperative, dependent, None, None, metadata, None, None, None,
                *addresses, *rest,
            )  # fmt: skip

        return at

    return bind


def _hooks() -> tuple[Any, Any]:
    """Triton's chains of launch hooks; None in place of a chain of another form."""
    from triton import knobs

    chains = (getattr(knobs.runtime, name, None) for name in ("launch_enter_hook", "launch_exit_hook"))
    enter, leave = (chain if isinstance(getattr(chain, "calls", None), list) else None for chain in chains)
    return enter, leave


def is_known(launcher: object) -> bool:
    """True if a launcher is the one of Triton 3.5 and 3.6, for a kernel that needs no scratch memory."""
    try:
        from triton.backends.nvidia import driver
    except ImportError:
        return False
    return (
        getattr(driver, "_BASE_ARGS_FORMAT", None) == _LAUNCHER_FORMAT
        and type(launcher) is getattr(driver, "CudaLauncher", None)
        and getattr(launcher, "global_scratch_size", None) == 0
        and getattr(launcher, "profile_scratch_size", None) == 0
        and all(hasattr(launcher, name) for name in _LAUNCHER_PARTS)
    )


@dataclass(eq=False)
class Kernel:
    """A Triton kernel whose pointers come first, then scalars, then constants; compiled versions are kept by key.

    `cooperative`: all programs of a launch run at once, so that they may wait for each other. `dependent`: they begin
    while the launch before them ends, and wait for it themselves.
    """

    function: Any
    cooperative: bool = False
    dependent: bool = False
    compiled: dict[tuple, Bind] = field(default_factory=dict)

    def compile(
        self, key: tuple, programs: int, tensors: tuple[torch.Tensor | None, ...], scalars: tuple, constants: tuple,
        warps: Warps,
    ) -> Bind | None:  # fmt: skip
        """Start the kernel Triton's way, on the current device and stream, and keep the compiled version."""
        # Products and sums stay apart, as docs/numerics.md writes them; fused operations are asked for by name.
        options: Options = {"num_warps": warps.number, "maxnreg": warps.registers, "enable_fp_fusion": False}
        options |= {"launch_cooperative_grid": True} if self.cooperative else {}
        options |= {"launch_pdl": True} if self.dependent else {}
        arguments = (*[as_bytes(t) for t in tensors], *scalars, *constants)
        compiled = self.function[(programs,)](*arguments, **options)
        bind = starter(compiled)
        if bind is not None:
            self.compiled[key] = bind
        return bind

    def prepared(
        self, key: tuple, programs: int, scalars: tuple, constants: tuple, warps: Warps = _FOUR_WARPS,
        aligned: tuple[bool, ...] = (),
    ) -> "Prepared":  # fmt: skip
        """A launch that lacks only its addresses; `aligned`: True for multiples of 16 (empty: all of them)."""
        return Prepared(self, key if all(aligned) else (key, *aligned), programs, scalars, constants, warps)


@dataclass(slots=True, eq=False)
class Prepared:
    """A launch of a kernel that lacks only its stream and addresses, for callers that make it again and again.

    ``at(stream, *addresses)`` starts it on a stream of the current device; None until the first call, which takes
    tensors, has compiled it (always in the interpreter).
    """

    kernel: Kernel
    key: tuple
    programs: int
    scalars: tuple
    constants: tuple
    warps: Warps
    at: Callable[..., None] | None = None

    def __call__(self, stream: int, *tensors: torch.Tensor | None) -> None:
        """Start it on a stream of the current device. The tensors are aligned as was said when it was prepared."""
        if self.at is not None:
            self.at(stream, *[None if t is None else t.data_ptr() for t in tensors])
            return
        kernel, rest = self.kernel, (*self.scalars, *self.constants)
        if INTERPRETED:
            kernel.function[(self.programs,)](*[as_bytes(t) for t in tensors], *rest)
            return
        bind = kernel.compiled.get(self.key)
        if bind is not None:
            self.at = bind(self.programs, rest)
            self(stream, *tensors)
            return
        bind = kernel.compile(self.key, self.programs, tensors, self.scalars, self.constants, self.warps)
        if bind is not None:
            self.at = bind(self.programs, rest)


def as_bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """FP8 tensors as uint8, so that kernels store plain bytes; others as they are."""
    if tensor is not None and tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return tensor.view(torch.uint8)
    return tensor


_SCRATCH: dict[tuple[int, int], torch.Tensor] = {}
_SCRATCH_LOCK = threading.Lock()
_SCRATCH_WORDS = 8
# Words for launches under capture, by device: zero, and made before the capture, so that no graph has to clear them.
_CAPTURED: dict[int, list[torch.Tensor]] = {}
_CAPTURED_AT_ONCE, _MOST_CAPTURED = 512, 1 << 16
_made_for_captures = 0


def scratch(device: int) -> torch.Tensor:
    """Scratch memory in which the programs of one launch meet: int64 words, the first five zero before and after it.

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
    words = _SCRATCH.get((device, raw_stream(device)))
    if words is None or (not _CAPTURED[device] and _made_for_captures < _MOST_CAPTURED):
        words = _more_scratch(device)
    return words


def _more_scratch(device: int) -> torch.Tensor:
    """The words of the current stream, made where there are none; fills up the words for captures."""
    global _made_for_captures
    key = (device, raw_stream(device))
    with _SCRATCH_LOCK:
        if not _CAPTURED.get(device):
            _made_for_captures += _CAPTURED_AT_ONCE
            shape = (_CAPTURED_AT_ONCE, 2 * _SCRATCH_WORDS)  # launches that run at the same time share no cache line
            rows = torch.zeros(shape, dtype=torch.int64, device=f"cuda:{device}").unbind()
            torch.cuda.current_stream(device).synchronize()  # captures may run on any stream
            _CAPTURED[device] = list(rows)
        words = _SCRATCH.get(key)
        if words is None:
            words = _SCRATCH[key] = torch.zeros(_SCRATCH_WORDS, dtype=torch.int64, device=f"cuda:{device}")
    return words


def fast_empty(device: torch.device) -> Callable[[tuple, tuple, torch.dtype], torch.Tensor]:
    """A function ``empty(size, stride, dtype)`` that allocates on the current device with little host time."""
    # The function that Inductor's generated code calls: a third of the host time of torch.empty_strided.
    found = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    fast = getattr(found, f"_empty_strided_{device.type}", None)
    if fast is not None:
        return fast
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


DEVICES: dict[int, Device] = {}  # by number, those that were asked for


def device_of(index: int) -> Device:
    """A CUDA device (-1: the CPU) as passes see it; the hardware converts from compute capability 8.9 on."""
    device = DEVICES.get(index)
    if device is None:
        major, minor = (0, 0) if index < 0 else torch.cuda.get_device_capability(index)
        processors = 1 if index < 0 else torch.cuda.get_device_properties(index).multi_processor_count
        is_hopper = INTERPRETED or (major, minor) == (9, 0)
        conversions = not INTERPRETED and (major, minor) >= (8, 9)
        # Three programs of a cooperative launch fit on a multiprocessor; two leave space beside kernels that wait for
        # other GPUs, which a launch that needs the whole GPU would have to wait for in turn.
        at_once = 1 if index < 0 else 2 * processors
        device = DEVICES[index] = Device(index, processors, conversions, at_once, is_hopper=is_hopper)
    return device


def matrix_of(x: torch.Tensor) -> Matrix:
    """A tensor as passes see it: its last axis are the columns, all others the rows."""
    matrix = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    address = x.data_ptr()
    alignment = min(address & -address, ALIGNMENT) if address else ALIGNMENT
    dtype = str(x.dtype).removeprefix("torch.")
    (rows, columns), (stride_r, stride_c) = matrix.shape, matrix.stride()
    return Matrix(rows, columns, stride_r, stride_c, dtype, alignment, device_of(x.get_device()))


@functools.cache
def kernel_of(function: Callable, cooperative: bool = False, dependent: bool = False) -> Kernel:
    """The launcher of a kernel, which keeps its compiled versions."""
    return Kernel(function, cooperative, dependent)


class Program:
    """``run(stream, table)`` allocates, launches, and returns codes (or values), scale and tensor scale of operands."""

    __slots__ = (
        "_allocations", "_cleared", "_empty", "_prepared", "_results", "_shared", "_slices", "_starts", "layouts",
        "names",
    )  # fmt: skip

    layouts: tuple[Part | None, ...]  # of what `run` returns
    names: str  # its launches, in words

    def __init__(self, passes: Passes, device: torch.device, misaligned: frozenset[int] = frozenset()) -> None:
        """Bind passes; `misaligned`: positions up to MADE whose tensors do not begin at multiples of 16 bytes."""
        self.layouts = tuple(passes.layouts)
        self.names = " + ".join(one.kernel.__name__ for one in passes.launches)
        self._empty = fast_empty(device)
        self._results = passes.results
        self._allocations = tuple(
            None if made is None else (made.shape, made.strides, getattr(torch, made.dtype)) for made in passes.buffers
        )
        self._cleared = tuple(at for at, made in enumerate(passes.buffers) if made is not None and made.cleared)
        self._shared = tuple(
            (index, original, self.layouts[index] != self.layouts[original]) for index, original in passes.shared
        )
        self._slices = tuple(
            (one.buffer, one.offset, self._allocations[one.buffer][2].itemsize * one.offset, one.dtype)  # type: ignore
            for one in passes.slices
        )
        first_slice = At.MADE + len(self._allocations)
        self._prepared = []
        for launch in passes.launches:
            aligned = tuple(at not in misaligned if at >= 0 else passes.slices[~at].aligned for at in launch.tensors)
            table = tuple(at if at >= 0 else first_slice + ~at for at in launch.tensors)
            kernel = kernel_of(launch.kernel, launch.cooperative, launch.dependent)
            arguments = launch.key, launch.programs, launch.scalars, launch.constants, launch.warps, aligned
            self._prepared.append((kernel.prepared(*arguments), itemgetter(*table)))
        self._starts: tuple[tuple[Callable[..., None], itemgetter], ...] | None = None

    def run(self, stream: int, table: tuple[torch.Tensor | None, ...]) -> list:
        """Run on a stream of the current device, the matrix's; `table`: the tensors of all positions up to MADE."""
        empty = self._empty
        made: list = [None if one is None else empty(*one) for one in self._allocations]
        for index in self._cleared:
            made[index].zero_()
        starts = self._starts
        if starts is None:  # with tensors: what compiles the kernels, and the only way in the interpreter
            assert len(table) == At.MADE, f"{self.names}: a table of {len(table)} tensors, not of {At.MADE}"
            tensors = [*table, *made]
            for index, offset, _, dtype in self._slices:
                part = made[index].view(-1)[offset:]
                tensors.append(part if dtype is None else part.view(getattr(torch, dtype)))
            for prepared, pick in self._prepared:
                prepared(stream, *pick(tensors))
            if all(prepared.at is not None for prepared, _ in self._prepared):
                self._starts = tuple((prepared.at, pick) for prepared, pick in self._prepared)
        else:
            addresses = [tensor if tensor is None else tensor.data_ptr() for tensor in table]
            addresses += [tensor if tensor is None else tensor.data_ptr() for tensor in made]
            for index, _, offset, _ in self._slices:
                addresses.append(addresses[At.MADE + index] + offset)  # type: ignore[operator]
            for start, pick in starts:
                start(stream, *pick(addresses))
        for index, original, transposed in self._shared:
            made[index] = made[original].t() if transposed else made[original]
        return made if len(made) == self._results else made[: self._results]


def cast_program(
    x: torch.Tensor, row: OperandSpec | None, column: OperandSpec | None, *, records: bool = False,
    given_amax: bool = False, batch: int = 0, in_groups: int = 0, experts: int = 0,
    misaligned: frozenset[int] = frozenset(),
) -> Program:  # fmt: skip
    """The program that casts matrices like `x`: same sizes, strides, dtype, device and alignment.

    `row`, `column`: the operand as it lies and that of its transpose, each None where it is not asked for. `records`:
    the history that is given takes the amax. `given_amax`: the amax is given, not measured. `batch`: a word of the
    random counters. `in_groups`: the rows are those of so many groups, padded; `experts`: those of so many matrices of
    one height. `misaligned`: positions of given tensors that begin at no multiple of 16 bytes. Raises
    NotSupportedError where a cast has no kernel, or none for its form.
    """
    matrix = replace(matrix_of(x), experts=experts)
    if in_groups:
        matrix = replace(matrix, rows=padded_rows(matrix.rows, in_groups), groups=in_groups)
    passes = cast_passes(matrix, row, column, records=records, given_amax=given_amax, batch=batch)
    return Program(passes, x.device, misaligned if matrix.alignment >= ALIGNMENT else misaligned | {At.SOURCE})


def padded_rows(rows: int, groups: int) -> int:
    """An upper bound of the padded rows of `groups` groups of `rows` rows together (`kernels.casts.groups`)."""
    return (rows + groups * (GROUP_ROWS - 1)) // GROUP_ROWS * GROUP_ROWS


class GroupPlan(NamedTuple):
    """A plan of groups of rows (`kernels.casts.groups`), and its two parts for products."""

    whole: torch.Tensor
    padded_begins: torch.Tensor
    table: torch.Tensor


def plan_groups(ends: torch.Tensor, rows: int, tile_rows: int) -> GroupPlan:
    """The plan of groups of rows that end at `ends`, for products in tiles of `tile_rows`."""
    number, device = ends.shape[0], ends.get_device()
    tiles, parts = padded_rows(rows, number) // GROUP_ROWS, -(-rows // tile_rows) + number + 1
    begins = 2 * tiles + number + 1
    plan = torch.empty(begins + number + 2 + 4 * parts, dtype=torch.int32, device=ends.device)
    scalars, constants = (rows, number, tiles, parts), (tile_rows, 1 << number.bit_length(), _PLANNED_TOGETHER)
    key, programs = (*map(specialization, scalars), constants, device), -(-max(tiles, parts) // _PLANNED_TOGETHER)
    stream = 0 if device < 0 else raw_stream(device)
    kernel_of(groups.plan_groups).prepared(key, programs, scalars, constants)(stream, ends, plan)
    return GroupPlan(plan, plan[begins:], plan[begins + number + 1 :])


def pair_program(
    x: torch.Tensor, x_specs: tuple[OperandSpec | None, OperandSpec | None], w: torch.Tensor,
    w_specs: tuple[OperandSpec | None, OperandSpec | None], *, records: bool = False, draws_seed: bool = False,
) -> Program | None:  # fmt: skip
    """The program that casts two matrices in one launch, each with a scale of its own; None where that does not fit.

    `draws_seed`: it also makes the words of a call seed (SEED) from the 64 bits that were drawn (SECOND_SEED), for
    later casts; neither x nor w is rounded stochastically.
    """
    first, second = matrix_of(x), matrix_of(w)
    passes = pair_passes(first, x_specs, second, w_specs, records=records, draws_seed=draws_seed)
    if passes is None:
        return None
    matrices = (At.SOURCE, first), (At.SECOND, second)
    return Program(passes, x.device, frozenset(at for at, matrix in matrices if matrix.alignment < ALIGNMENT))


def misaligned_of(tensors: Sequence[torch.Tensor | None]) -> frozenset[int]:
    """The positions of tensors that begin at no multiple of 16 bytes."""
    low_bits = 0
    for tensor in tensors:
        if tensor is not None:
            low_bits |= tensor.data_ptr()
    if not low_bits & (ALIGNMENT - 1):
        return _ALL_ALIGNED
    low = (0 if tensor is None else tensor.data_ptr() & (ALIGNMENT - 1) for tensor in tensors)
    return frozenset(at for at, bits in enumerate(low) if bits)


_ALL_ALIGNED: frozenset[int] = frozenset()
_PROGRAMS: dict[tuple, Program] = {}
_MOST_PROGRAMS = 4096


def forget_programs() -> None:
    """Drop every program, after a change of tables or kernels that no key contains."""
    _PROGRAMS.clear()


def run_passes(
    key: tuple, make: Callable[[], Passes], device: torch.device, tensors: tuple[torch.Tensor | None, ...]
) -> list:  # fmt: skip
    """The results of passes over `tensors`, the table up to MADE but for the scratch words, on the current stream.

    The program is kept under `key`, which says all that `make` depends on, and under the alignment of the tensors.
    """
    index = -1 if device.type != "cuda" else current_device() if device.index is None else device.index
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return run_passes(key, make, device, tensors)
    misaligned = misaligned_of(tensors)
    key = (*key, index, misaligned)
    program = _PROGRAMS.get(key)
    if program is None:
        if len(_PROGRAMS) >= _MOST_PROGRAMS:  # shapes made anew for every call must not pile up
            _PROGRAMS.clear()
        program = _PROGRAMS[key] = Program(make(), device, misaligned)
    stream = 0 if index < 0 else raw_stream(index)
    given = tensors[At.WORDS + 1 :]
    missing = (None,) * (At.MADE - At.WORDS - 1 - len(given))
    return program.run(stream, (None, tensors[1], scratch(index), *given, *missing))


def split_words(draw: torch.Tensor) -> torch.Tensor:
    """The words of a call seed from 64 drawn bits: int64 [1] on the current device -> [2], below 2^32, low first."""
    device = draw.get_device()
    words = fast_empty(draw.device)((2,), (1,), torch.int64)
    _splitter(device)(0 if device < 0 else raw_stream(device), draw, words)
    return words


@functools.cache
def _splitter(device: int) -> Prepared:
    return kernel_of(random.split_words).prepared((device,), 1, (), ())
