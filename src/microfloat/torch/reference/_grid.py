"""A matrix divided into blocks, and cut into chunks that stay in a CPU's cache.

Casts work on a matrix in memory order, [r, c] with c contiguous: the operand form [R, C] itself, or its transpose where
the operand form is a transposed view (x.T of a stored x). `contraction`, 1 or 0, is the axis of it that a product
contracts. So no cast moves an element of a large matrix.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from microfloat.formats import ScaledFormat

# Number of modes of torch's dispatcher that are on (fake tensors, tracing); no tensor made in one may outlive it.
mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
# True inside a transform of torch.func.
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Elements per chunk. On a CPU the float32 and int32 temporaries of a chunk (2 MB each per thread) should stay in its
# caches, and be large enough to hide the cost of starting an operator; elsewhere the cut only bounds their memory.
_CPU_CHUNK_PER_THREAD = 1 << 19
_MOST_THREADS = 4  # more of them share chunks of the same size, so that kept temporaries stay below 100 MB
_DEVICE_CHUNK = 1 << 26


def chunk_budget(device: torch.device) -> int:
    """Elements of a chunk on `device`."""
    if device.type != "cpu":
        return _DEVICE_CHUNK
    return _CPU_CHUNK_PER_THREAD * min(torch.get_num_threads(), _MOST_THREADS)


def is_stored_across(x_RC: torch.Tensor) -> bool:
    """True for a matrix whose columns are contiguous in memory, such as a transposed view."""
    return x_RC.stride(0) < x_RC.stride(1) and x_RC.shape[0] > 1


def ceil_to(value: int, multiple: int) -> int:
    """The value, rounded up to a multiple."""
    return -(-value // multiple) * multiple


def spread(blocks: torch.Tensor, block: tuple[int | None, int | None], shape: Sequence[int]) -> torch.Tensor:
    """One value of each block, for each of its elements [R, C]."""
    rows, columns = block[0] or shape[0], block[1] or shape[1]
    return blocks.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


class Workspace:
    """Temporaries by name and dtype that the chunks of a call share.

    On a CPU fresh memory costs more than the arithmetic on it (page faults), so there each thread keeps its buffers
    after the call, each at most as large as two chunks; on other devices torch's own allocator keeps memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        if device.type == "cpu" and not mode_count():
            self._buffers = _kept.__dict__.setdefault("buffers", {})
            for key in [key for key, buffer in self._buffers.items() if buffer.numel() > 2 * chunk_budget(device)]:
                del self._buffers[key]

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized contiguous tensor; it is valid until the same name is taken again."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # an inference tensor could not be written to later
                buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._buffers[name, dtype] = buffer
        return buffer[:size].view(shape)


_kept = threading.local()


def reads_values(tensor: torch.Tensor) -> bool:
    """True where the host may read values to take a shortcut: on a CPU, outside of traces."""
    return tensor.device.type == "cpu" and not mode_count()


@dataclass(frozen=True)
class Chunk:
    """A window of whole blocks: element ranges, and the ranges of its blocks in the grid of scales."""

    rows: slice
    columns: slice
    block_rows: slice
    block_columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Elements of the window, without padding."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


@dataclass(frozen=True)
class Grid:
    """Blocks of `block` elements (sizes >= 1) over [rows, columns] in memory; `contraction` is the axis of products."""

    rows: int
    columns: int
    block: tuple[int, int]
    is_per_tensor: bool
    contraction: int = 1

    @staticmethod
    def of(fmt: ScaledFormat, x: torch.Tensor, contraction: int, in_one_tile: bool = False) -> "Grid":
        """The grid of a format over `x`; a per-tensor format has blocks of whole rows here, all with one scale.

        With `in_one_tile` its block is the matrix, for rules that look at all elements of a block at once.
        """
        rows, columns = x.shape
        if fmt.is_per_tensor and not in_one_tile:
            return Grid(rows, columns, (1, max(columns, 1)), True, contraction)
        block = fmt.block if contraction else fmt.block[::-1]
        return Grid(rows, columns, (block[0] or max(rows, 1), block[1] or max(columns, 1)), False, contraction)

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of the grid; empty extents have no block."""
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    def packed(self, codes_per_byte: int) -> tuple[int, int]:
        """Shape of the stored codes, which are packed along the contraction axis."""
        if self.contraction:
            return self.rows, -(-self.columns // codes_per_byte)
        return -(-self.rows // codes_per_byte), self.columns

    def packed_window(self, codes: torch.Tensor, chunk: "Chunk", codes_per_byte: int) -> torch.Tensor:
        """The stored codes of a chunk; a view."""
        cut = [chunk.rows, chunk.columns]
        packed = cut[self.contraction]
        cut[self.contraction] = slice(packed.start // codes_per_byte, -(-packed.stop // codes_per_byte))
        return codes[cut[0], cut[1]]

    def chunks(self, device: torch.device) -> Iterator[Chunk]:
        """Windows that cover the matrix; they start at multiples of the block, and of 64 along the contraction."""
        if not self.rows or not self.columns:
            return
        block_rows, block_columns = self.block
        if mode_count():  # one window for any size, since a trace would unroll the loop
            grid = (slice(0, size) for size in self.blocks)
            yield Chunk(slice(0, self.rows), slice(0, self.columns), *grid)
            return
        budget = chunk_budget(device)
        units = [1 if self.is_per_tensor else block_rows, 1 if self.is_per_tensor else block_columns]
        units[self.contraction] = math.lcm(units[self.contraction], 64)  # the largest Hadamard transform
        row_unit, column_unit = units
        column_step = ceil_to(self.columns, column_unit)
        if row_unit * column_step > budget:
            column_step = max(column_unit, budget // row_unit // column_unit * column_unit)
        row_step = max(row_unit, budget // column_step // row_unit * row_unit)
        for rows, in_rows in _windows(self.rows, row_step, block_rows):
            for columns, in_columns in _windows(self.columns, column_step, block_columns):
                yield Chunk(rows, columns, in_rows, in_columns)

    def padded(self, chunk: Chunk) -> tuple[int, int]:
        """Rows and columns of a chunk, filled up to whole blocks."""
        rows, columns = chunk.shape
        if self.is_per_tensor:
            return rows, columns
        return ceil_to(rows, self.block[0]), ceil_to(columns, self.block[1])

    def as_blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Padded [r, c] -> [blocks, rows of a block, blocks, columns of a block]; a view."""
        rows, columns = values.shape
        block_rows, block_columns = (1, max(columns, 1)) if self.is_per_tensor else self.block
        return values.view(rows // block_rows, block_rows, columns // block_columns, block_columns)


def _windows(size: int, step: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of `step` elements that cover an axis, each with its range of blocks."""
    for start in range(0, size, step):
        stop = min(start + step, size)
        yield slice(start, stop), slice(start // block, -(-stop // block))
