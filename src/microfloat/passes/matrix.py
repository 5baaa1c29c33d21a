"""Parts of passes: a device and a matrix as numbers, launches as data, and the buffers that launches fill."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from microfloat.kernels.constants import How
from microfloat.kernels.device import convert
from microfloat.layout import ALIGNMENT, Part
from microfloat.passes.tables import Warps

__all__ = [
    "GROUP_ROWS", "INT32_MAX", "SCALAR", "At", "Buffer", "Device", "Matrix", "Pass", "Passes", "Slice",
    "specialization",
]  # fmt: skip

GROUP_ROWS = 128  # the padded rows of a group are a multiple of this
INT32_MAX = 2**31 - 1

_KINDS = {"bfloat16": convert.WORDS_BF16.value, "float16": convert.WORDS_F16.value}
_ITEM_BYTES = {"float32": 4, "int32": 4, "int64": 8, "bfloat16": 2, "float16": 2}


class At:
    """Positions of a launch's tensors in its table: nothing; the matrix; scratch words; its `CastInputs`;
    a second matrix and its own; and from MADE on the buffers of the passes.
    """

    NOTHING, SOURCE, WORDS, SCALE_ENC, SEED, RECORD, FOLDED, TILES, AMAX, GROUPS = range(10)
    SECOND, SECOND_SCALE_ENC, SECOND_SEED, SECOND_RECORD, MADE = range(10, 15)


class Device(NamedTuple):
    """Properties of a device that passes depend on.

    `conversions`: the hardware forms of `kernels.device.convert` exist. `largest_cluster`: programs in a cluster, 0 for
    none. `warpgroups`: it is a Hopper, which multiplies by them and begins launches early. `cooperates`: launches may
    wait for all of their programs. `measures`: the amax of a matrix is a pass;
    elsewhere it is an input. `orders_scales`: block scales lie as their GEMM reads them; elsewhere in rows, and codes
    and values of a matrix come from one pass.
    """

    number: int
    multiprocessors: int
    conversions: bool
    largest_cluster: int = 0
    cooperates: bool = True
    measures: bool = True
    orders_scales: bool = True
    warpgroups: bool = False


def specialization(value: int) -> int:
    """Triton's treatment of an integer argument: 1, a multiple of 16, other; and whether it fits in 32 bits."""
    kind = 2 if value == 1 else (value & 15 == 0)
    return kind if value <= INT32_MAX else kind + 4


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix as kernels see it: extents, strides in elements, dtype, and a power of two that divides its address.

    `groups`: its rows are the padded ones of so many groups (`kernels.casts.groups`), in tiles of 128 rows at most.

    What follows from these: `sizes`, R, C and both strides, as kernels take them. `kind`, the form in which elements
    are read (`kernels.device.convert`). `index64`: 32 bits do not hold the offsets inside a tile of 128 rows or
    columns, of the input and of outputs in either layout, or the number of block scales, of which there is one for 16
    elements at most. `is_column_major`, `is_contiguous`: the transpose, or the matrix itself without gaps, lies in
    memory row by row. `key`: all that Triton specializes on.
    """

    rows: int
    columns: int
    stride_r: int
    stride_c: int
    dtype: str
    alignment: int
    device: Device
    groups: int = 0
    sizes: tuple[int, int, int, int] = field(init=False, repr=False, compare=False)
    kind: int = field(init=False, repr=False, compare=False)
    index64: bool = field(init=False, repr=False, compare=False)
    is_column_major: bool = field(init=False, repr=False, compare=False)
    is_contiguous: bool = field(init=False, repr=False, compare=False)
    key: tuple = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows, columns, stride_c = self.rows, self.columns, self.stride_c
        stride_r = columns if rows == 1 else self.stride_r
        # Column operands read two words at once, so rows must begin at multiples of 8 bytes; else element by element.
        in_words = stride_c == 1 and not columns & 1 and not stride_r & 3 and self.alignment >= 8
        kind = _KINDS.get(self.dtype, 0) if in_words else 0
        index64 = 128 * max(stride_r, stride_c, rows, columns) > INT32_MAX or rows * columns >> 4 > INT32_MAX
        sizes = rows, columns, stride_r, stride_c
        key = self.dtype, self.device.number, kind, index64, columns & 1, rows & 3, self.groups > 0
        for name, value in (
            ("sizes", sizes), ("kind", kind), ("index64", index64),
            ("is_column_major", self.stride_r == 1 and stride_c != 1 and rows > 1),
            ("is_contiguous", (stride_c == 1 or columns == 1) and (self.stride_r == columns or rows == 1)),
            ("key", (*key, *map(specialization, sizes))),
        ):  # fmt: skip
            object.__setattr__(self, name, value)

    @property
    def transposed(self) -> "Matrix":
        """The same memory, seen as the transpose."""
        return replace(
            self, rows=self.columns, columns=self.rows, stride_r=self.stride_c, stride_c=self.stride_r
        )  # fmt: skip

    def fills(self, tile_rows: int, tile_columns: int) -> bool:
        """True where whole tiles cover the matrix, so that no load or store needs a mask."""
        if self.groups and tile_rows > GROUP_ROWS:
            return False
        return self.rows % tile_rows == 0 and self.columns % tile_columns == 0

    def tiles(self, tile_rows: int, tile_columns: int) -> int:
        """The number of tiles of this size that cover it."""
        return -(-self.rows // tile_rows) * -(-self.columns // tile_columns)

    def how(self, tile_rows: int, tile_columns: int, *, units: bool = False) -> How:
        """The constants of a pass over tiles of this size; `units`: codes are stored two and four at a time."""
        even, kind = self.fills(tile_rows, tile_columns), self.kind
        pairs, quads = units and self.columns & 1 == 0, units and self.rows & 3 == 0
        return How(
            kind, kind, even, self.index64, self.device.conversions, tile_rows, tile_columns, pairs, quads
        )  # fmt: skip


class Buffer(NamedTuple):
    """A buffer to allocate; cleared where a launch adds to it. `spans_mesh`: holds amaxes of one device's part of
    a matrix, of which later passes read the maximum over all devices that hold parts.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    cleared: bool = False
    spans_mesh: bool = False


SCALAR = Buffer((), (), "float32")


class Slice(NamedTuple):
    """`length` elements of a buffer from `offset` on, seen as another dtype of the same size (None: its own)."""

    buffer: int
    offset: int
    length: int
    dtype: str | None
    aligned: bool


class Pass(NamedTuple):
    """One launch of a kernel, whose parameters are tensors, then scalars, then constants.

    `key`: of the compiled version, together with the alignment of addresses. `tensors`: positions in the table, slices
    of buffers negative. `cooperative`: all programs run at once, so that they may wait for each other. `cluster`: so
    many programs run as a cluster, and `programs` counts clusters (0: none). `dependent`: it begins while the launch
    before it ends, and waits for that one itself.
    """

    kernel: Any
    key: tuple
    programs: int
    tensors: tuple[int, ...]
    scalars: tuple
    constants: tuple
    warps: Warps = Warps(4)
    cooperative: bool = False
    cluster: int = 0
    dependent: bool = False


class Passes:
    """Launches over a matrix, or over two, and the buffers they fill: results first, then what is in between."""

    def __init__(self, results: int) -> None:
        self.results = results
        self.buffers: list[Buffer | None] = [None] * results
        self.slices: list[Slice] = []
        self.launches: list[Pass] = []
        self.shared: list[tuple[int, int, Part]] = []  # a result that is another one, or its transpose; its layout

    @property
    def layouts(self) -> tuple[Part | None, ...]:
        """The layout of each result."""
        layouts: list[Part | None] = [
            None if made is None else Part(*made[:3]) for made in self.buffers[: self.results]
        ]
        for index, _, part in self.shared:
            layouts[index] = part
        return tuple(layouts)

    def put(self, index: int, part: Part) -> int:
        """Make a part the result number `index`."""
        self.buffers[index] = Buffer(*part)
        return At.MADE + index

    def share(self, index: int, original: int, part: Part) -> None:
        """Let the result number `index` be the number `original`, seen as `part`: the same, or transposed."""
        self.buffers[index] = None
        self.shared.append((index, original, part))

    def add(self, buffer: Buffer) -> int:
        """Allocate a buffer besides the results."""
        self.buffers.append(buffer)
        return At.MADE + len(self.buffers) - 1

    def slice(self, position: int, offset: int, length: int, dtype: str | None = None) -> int:
        """`length` elements of the buffer at a position, from `offset` on."""
        buffer = self.buffers[position - At.MADE]
        assert buffer is not None
        aligned = offset * _ITEM_BYTES[buffer.dtype] % ALIGNMENT == 0
        self.slices.append(Slice(position - At.MADE, offset, length, dtype, aligned))
        return ~(len(self.slices) - 1)
