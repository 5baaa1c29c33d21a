"""Passes bound to torch: tensors to allocate and launches to start, worked out once and run many times.

A `Program` holds no data. Its launches take addresses from a table: the matrix, scratch words, what the cast is given
(`CastInputs`), and what the program itself allocates. The first run goes through Triton, which compiles; later ones
start the compiled kernels with raw addresses.
"""

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from microfloat.layout import Part
from microfloat.passes import OperandSpec
from microfloat.passes.casts import cast_passes, pair_passes
from microfloat.passes.matrix import ALIGNMENT, MADE, SECOND, SOURCE, CastInputs, Device, Matrix, Pass, Passes
from microfloat.torch.backends.triton._launch import (
    ClusterKernel,
    Kernel,
    compiled_conversions,
    largest_cluster,
    multiprocessors,
    scratch,
)
from microfloat.torch.backends.triton._programs import fast_empty

__all__ = [
    "CastInputs", "Program", "cast_program", "device_of", "fast_empty", "kernel_of", "matrix_of", "pair_program",
    "scratch",
]  # fmt: skip


def device_of(index: int) -> Device:
    """A CUDA device (-1: the CPU) as passes see it."""
    return Device(index, multiprocessors(index), compiled_conversions(index), largest_cluster(index))


def matrix_of(x: torch.Tensor) -> Matrix:
    """A tensor as passes see it: its last axis are the columns, all others the rows."""
    matrix = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    address = x.data_ptr()
    alignment = min(address & -address, ALIGNMENT) if address else ALIGNMENT
    dtype = str(x.dtype).removeprefix("torch.")
    return Matrix(*matrix.shape, *matrix.stride(), dtype, alignment, device_of(x.get_device()))


@functools.cache
def kernel_of(function: Any, cooperative: bool = False, cluster: int = 0) -> Kernel:
    """The launcher of a kernel, which keeps its compiled versions."""
    return ClusterKernel(function, cluster) if cluster else Kernel(function, cooperative=cooperative)


class _Allocation(NamedTuple):
    """What `fast_empty` is given."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Program:
    """``run(stream, table)`` allocates, launches, and returns the results of the passes: for each operand codes (or
    values), scale and tensor scale, None what is not there.
    """

    __slots__ = (
        "_allocations",
        "_cleared",
        "_empty",
        "_prepared",
        "_results",
        "_shared",
        "_slices",
        "_starts",
        "layouts",
    )

    layouts: tuple[Part | None, ...]  # of what `run` returns

    def __init__(self, passes: Passes, device: torch.device, misaligned: frozenset[int] = frozenset()) -> None:
        """`misaligned`: positions up to MADE whose tensors do not begin at multiples of 16 bytes."""
        self.layouts = passes.layouts
        self._empty = fast_empty(device)
        self._results = passes.results
        self._allocations = tuple(
            None if made is None else _Allocation(made.shape, made.strides, getattr(torch, made.dtype))
            for made in passes.buffers
        )
        self._cleared = tuple(at for at, made in enumerate(passes.buffers) if made is not None and made.cleared)
        self._shared = tuple(
            (index, original, part != passes.layouts[original]) for index, original, part in passes.shared
        )
        self._slices = tuple(
            (one.buffer, one.offset, _bytes_of(passes, one.buffer) * one.offset, one.dtype) for one in passes.slices
        )
        first_slice = MADE + len(self._allocations)
        self._prepared = []
        for launch in passes.launches:
            aligned = tuple(
                at not in misaligned if at >= 0 else passes.slices[~at].aligned for at in launch.tensors
            )  # fmt: skip
            table = tuple(at if at >= 0 else first_slice + ~at for at in launch.tensors)
            self._prepared.append((_prepared(launch, aligned), itemgetter(*table)))
        self._starts: tuple[tuple[Callable[..., None], itemgetter], ...] | None = None

    def run(self, stream: int, table: tuple[torch.Tensor | None, ...]) -> list[Any]:
        """`table`: up to MADE. On a stream of the current device, which is the matrix's."""
        empty = self._empty
        made: list[Any] = [None if one is None else empty(*one) for one in self._allocations]
        for index in self._cleared:
            made[index].zero_()
        starts = self._starts
        if starts is None:
            self._first(stream, table, made)
        else:
            addresses = [tensor if tensor is None else tensor.data_ptr() for tensor in table]
            addresses += [tensor if tensor is None else tensor.data_ptr() for tensor in made]
            for index, _, offset, _ in self._slices:
                addresses.append(addresses[MADE + index] + offset)  # type: ignore[operator]
            for start, pick in starts:
                start(stream, *pick(addresses))
        for index, original, transposed in self._shared:
            made[index] = made[original].t() if transposed else made[original]
        return made if len(made) == self._results else made[: self._results]

    def _first(self, stream: int, table: tuple[torch.Tensor | None, ...], made: list[Any]) -> None:
        """With tensors: what compiles the kernels, and the only way in the interpreter."""
        tensors = [*table, *made]
        for index, offset, _, dtype in self._slices:
            part = made[index].view(-1)[offset:]
            tensors.append(part if dtype is None else part.view(getattr(torch, dtype)))
        for prepared, pick in self._prepared:
            prepared(stream, *pick(tensors))
        if all(prepared.at is not None for prepared, _ in self._prepared):
            self._starts = tuple((prepared.at, pick) for prepared, pick in self._prepared)


def _bytes_of(passes: Passes, buffer: int) -> int:
    made = passes.buffers[buffer]
    assert made is not None
    return getattr(torch, made.dtype).itemsize


def _prepared(launch: Pass, aligned: tuple[bool, ...]) -> Any:
    kernel = kernel_of(launch.kernel, launch.cooperative, launch.cluster if launch.cluster > 1 else 0)
    return kernel.prepared(launch.key, launch.programs, launch.scalars, launch.constants, launch.warps, aligned)


def cast_program(
    x: torch.Tensor, row: OperandSpec | None, column: OperandSpec | None, *, records: bool = False,
    given_amax: bool = False, batch: int = 0, misaligned: frozenset[int] = frozenset(),
) -> Program:  # fmt: skip
    """The program that casts matrices like `x`: same sizes, strides, dtype, device and alignment.

    `row`, `column`: the operand as it lies and that of its transpose, each None where it is not asked for. `records`:
    the history that is given takes the amax. `given_amax`: the amax is given, not measured. `batch`: a word of the
    random counters. `misaligned`: positions of given tensors that begin at no multiple of 16 bytes. Raises
    NotSupportedError where a cast has no kernel, or none for its form.
    """
    matrix = matrix_of(x)
    passes = cast_passes(matrix, row, column, records=records, given_amax=given_amax, batch=batch)
    return Program(passes, x.device, misaligned | _misaligned(SOURCE, matrix))


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
    return Program(passes, x.device, _misaligned(SOURCE, first) | _misaligned(SECOND, second))


def _misaligned(position: int, matrix: Matrix) -> frozenset[int]:
    return frozenset() if matrix.alignment >= ALIGNMENT else frozenset((position,))
