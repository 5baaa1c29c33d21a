"""Parts of passes: a device, a matrix and a cast as numbers, launches as data, and the buffers that launches fill."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from microfloat.kernels.constants import BlockCast, How, Nvfp4Cast, ScaledCast
from microfloat.kernels.device import convert
from microfloat.kernels.device.scales import (
    FOUR_OVER_SIX_MAE,
    FOUR_OVER_SIX_MSE,
    ONE_LEVEL,
    TWO_LEVEL,
    TWO_LEVEL_DIVIDED,
)
from microfloat.layout import ALIGNMENT, Part
from microfloat.passes import OperandSpec
from microfloat.passes.tables import Warps
from microfloat.recipes import Cast, Current
from microfloat.routes import family_of
from microfloat.scale_rules import e8m0_threshold

GROUP_ROWS = 128  # the padded rows of a group are a multiple of this
INT32_MAX = 2**31 - 1
NO_SIGNS = -1  # of a Hadamard transform that is not there

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

    `conversions`: the hardware forms of `kernels.device.convert` exist. `warpgroups`: it is a Hopper, which multiplies
    by them and begins launches early. `at_once`: programs of one launch that surely run at once, so that they may wait
    for each other; 0 where none may. `measures`: the amax of a matrix is a pass; elsewhere it is an input.
    `orders_scales`: block scales lie as their GEMM reads them; elsewhere in rows, and codes and values of a matrix come
    from one pass. `places`: a launch may ask for more shared memory than its kernel declares, and for how many of its
    programs share a multiprocessor (`Pass`).
    """

    number: int
    multiprocessors: int
    conversions: bool
    at_once: int = 0
    measures: bool = True
    orders_scales: bool = True
    warpgroups: bool = False
    places: bool = False


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


@dataclass(frozen=True, slots=True, eq=False)
class KernelCast:
    """A Cast as kernels take it.

    `family`: which kernel (`scaled`, `blocks`, `nvfp4`, or "" = none, with the reason in `refusal`). `scaled_cast`: the
    constant that `casts.scaled` and `casts.fold` take. `nvfp4_cast`: that of `casts.nvfp4` for codes, None in other
    families. `bare`: the cast without its Hadamard transform, where that is a pass of its own. `block`: that of the
    format. `float_scale`: scales are float32, not bytes. `epsilon`: the smallest amax of current scaling. `signs`: the
    sign mask of an NVFP4 cast's Hadamard transform, or NO_SIGNS. `is_scaled_per_row`: an NVFP4 cast has a first level
    for every row.
    """

    cast: Cast
    family: str
    refusal: str
    scaled_cast: ScaledCast
    nvfp4_cast: Nvfp4Cast | None
    bare: Cast | None
    block: tuple[int | None, int | None]
    float_scale: bool
    epsilon: float
    signs: int
    is_scaled_per_row: bool

    def block_cast(self, output: int, scale_layout: int) -> BlockCast:
        """The constant that `casts.blocks` takes; `output`: codes or values; `scale_layout`: of one-row blocks."""
        bits, bias, rule, stochastic, gradient = self.scaled_cast
        return BlockCast(
            bits, bias, int(self.float_scale), rule, self.block[1] or 0, stochastic, output, scale_layout,
            TILE=self.block[0] != 1, GRADIENT=gradient,
        )  # fmt: skip


@functools.lru_cache(512)
def kernel_cast(cast: Cast) -> KernelCast:
    """The numbers of a Cast; made once."""
    fmt, element = cast.format, cast.format.element
    family, refusal = family_of(cast)
    is_e8m0 = fmt.scale.name == "E8M0"
    numbers_of_rule = e8m0_threshold(cast.rule, element) if is_e8m0 and family else int(cast.rule.power_of_two)
    scaled = ScaledCast(element.mantissa_bits, element.bias, numbers_of_rule, cast.is_stochastic, cast.is_gradient)
    nvfp4, level = None, cast.rule.two_level
    if family == "nvfp4" and level is not None:
        rule = TWO_LEVEL if level.inverse_six is not None else TWO_LEVEL_DIVIDED if level.tensor_scale else ONE_LEVEL
        if level.four_over_six is not None:
            rule = FOUR_OVER_SIX_MSE if level.four_over_six == "mse" else FOUR_OVER_SIX_MAE
        nvfp4 = Nvfp4Cast(
            rule.value, level.capacity, level.inverse_six or 0.0, cast.is_stochastic,
            NO_SIGNS if cast.hadamard is None else cast.hadamard.sign_mask, fmt.block[0] != 1,
            cast.tensor_scale == "row", OUTPUT=0, ALIGNED=False, GRADIENT=cast.is_gradient,
        )  # fmt: skip
    # Kernels of other families do not transform: they run the cast without it on the transformed matrix.
    bare = None if cast.hadamard is None or fmt.scale.name == "E4M3" else replace(cast, hadamard=None)
    epsilon = cast.scaling.amax_epsilon if isinstance(cast.scaling, Current) else 0.0
    signs, per_row = (NO_SIGNS, False) if nvfp4 is None else (nvfp4.SIGNS, bool(nvfp4.PER_ROW))
    numbers = fmt.block, fmt.scale.name == "FP32", epsilon, signs, per_row
    return KernelCast(cast, family, refusal, scaled, nvfp4, bare, *numbers)


def is_one_pass(row: OperandSpec | None, column: OperandSpec | None, orders_scales: bool = True) -> bool:
    """True where one pass makes both operands of a matrix, by their forms and casts; `orders_scales`: as of a Device.

    The casts of a family share a pass, but for Hadamard transforms that are one of their own; those with scales of a
    tensor, a row or a tile only where both measure and round alike.
    """
    if row is None or column is None:
        return False
    forms = {row.form, column.form}
    if len(forms) > 1 and forms != {"folded", "tiles"} and (orders_scales or forms != {"codes", "values"}):
        return False
    one, other = kernel_cast(row.cast), kernel_cast(column.cast)
    if one.family != other.family or one.bare is not None or other.bare is not None:
        return False
    if one.family != "scaled":
        return True
    first, second = one.scaled_cast, other.scaled_cast
    same = one.block == other.block and one.epsilon == other.epsilon
    return same and (first.RULE, first.MB) == (second.RULE, second.MB)


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
    of buffers negative. `cooperative`: all programs run at once, so that they may wait for each other. `dependent`: it
    begins while the launch before it ends, and waits for that one itself. `shared_bytes`: of shared memory that each
    program has behind what the kernel declares. `spread`: a multiprocessor takes so many of the programs at most (0: as
    many as fit).
    """

    kernel: Any
    key: tuple
    programs: int
    tensors: tuple[int, ...]
    scalars: tuple
    constants: tuple
    warps: Warps = Warps(4)
    cooperative: bool = False
    dependent: bool = False
    shared_bytes: int = 0
    spread: int = 0


class Passes:
    """Launches over a matrix, or over two, and the buffers they fill: results first, then what is in between."""

    def __init__(self, results: int) -> None:
        self.results = results
        self.buffers: list[Buffer | None] = [None] * results
        self.slices: list[Slice] = []
        self.launches: list[Pass] = []
        self.layouts: list[Part | None] = [None] * results
        self.shared: list[tuple[int, int]] = []  # a result that is another one, or its transpose

    def put(self, index: int, part: Part) -> int:
        """Make a part the result number `index`."""
        self.buffers[index], self.layouts[index] = Buffer(*part), part
        return At.MADE + index

    def share(self, index: int, original: int, part: Part) -> None:
        """Let the result number `index` be the number `original`, seen as `part`: the same, or transposed."""
        self.buffers[index], self.layouts[index] = None, part
        self.shared.append((index, original))

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
