"""Data of passes: a device, a matrix and a cast as numbers; if one launch casts both operands; launches and buffers."""

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
NO_SIGNS = -1  # sign mask of a cast without a Hadamard transform

_KINDS = {"bfloat16": convert.WORDS_BF16.value, "float16": convert.WORDS_F16.value}
_ITEM_BYTES = {"float32": 4, "int32": 4, "int64": 8, "bfloat16": 2, "float16": 2}


class At:
    """Positions of tensors: none, the matrix, scratch words, its `CastInputs`; a second matrix, its; the buffers."""

    NOTHING, SOURCE, WORDS, SCALE_ENC, SEED, RECORD, FOLDED, TILES, AMAX, GROUPS = range(10)
    SECOND, SECOND_SCALE_ENC, SECOND_SEED, SECOND_RECORD, MADE = range(10, 15)


class Device(NamedTuple):
    """Properties of a device that passes depend on.

    `conversions`: it has FP8 conversions (`kernels.device.convert`). `at_once`: number of programs of a launch that are
    certain to run at the same time, so that they may wait for each other; 0 if none may. `measures`: a pass measures
    the amax of a matrix; otherwise it is an input. `orders_scales`: block scales have the order of their GEMM;
    otherwise they are row-major, and codes and values of a matrix come from one pass. `is_hopper`: its launches may
    begin early (programmatic dependent launch).
    """

    number: int
    multiprocessors: int
    conversions: bool
    at_once: int = 0
    measures: bool = True
    orders_scales: bool = True
    is_hopper: bool = False


def specialization(value: int) -> int:
    """Class of an integer argument in Triton: 1, a multiple of 16, or other; and if it fits in 32 bits."""
    kind = 2 if value == 1 else (value & 15 == 0)
    return kind if value <= INT32_MAX else kind + 4


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix as kernels see it: extents, strides in elements, dtype, and a power of two that divides its address.

    `groups`: the number of groups of its rows, which are padded (`kernels.casts.groups`); 0 without groups. `experts`:
    the number of matrices of equal height, a multiple of 128, that lie one below the other; 0 for one matrix.

    Derived fields: `sizes`: R, C and both strides, in the order of kernels. `kind`: how elements are loaded
    (`kernels.device.convert`). `index64`: offsets inside a tile of 128 rows or columns, of the input or of an output in
    either layout, or numbers of block scales exceed 32 bits. `is_column_major`: the transpose is row-major.
    `is_contiguous`: the matrix is row-major without gaps. `each`: rows of each of `experts` matrices, else 0.
    `with_scales`: number of groups with their own scales, the padded rows behind the last group counted as one. `key`:
    everything that Triton specializes on.
    """

    rows: int
    columns: int
    stride_r: int
    stride_c: int
    dtype: str
    alignment: int
    device: Device
    groups: int = 0
    experts: int = 0
    each: int = field(init=False, repr=False, compare=False)
    with_scales: int = field(init=False, repr=False, compare=False)
    sizes: tuple[int, int, int, int] = field(init=False, repr=False, compare=False)
    kind: int = field(init=False, repr=False, compare=False)
    index64: bool = field(init=False, repr=False, compare=False)
    is_column_major: bool = field(init=False, repr=False, compare=False)
    is_contiguous: bool = field(init=False, repr=False, compare=False)
    key: tuple = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows, columns, stride_c = self.rows, self.columns, self.stride_c
        stride_r = columns if rows == 1 else self.stride_r
        # Column operands load two words at once, if rows begin at multiples of 8 bytes; otherwise single elements.
        in_words = stride_c == 1 and not columns & 1 and not stride_r & 3 and self.alignment >= 8
        kind = _KINDS.get(self.dtype, 0) if in_words else 0
        index64 = 128 * max(stride_r, stride_c, rows, columns) > INT32_MAX or rows * columns >> 4 > INT32_MAX
        sizes = rows, columns, stride_r, stride_c
        each = rows // self.experts if self.experts else 0
        with_scales = self.experts or (self.groups and self.groups + 1)
        key = self.dtype, self.device.number, kind, index64, columns & 1, rows & 3, self.groups > 0
        for name, value in (
            ("sizes", sizes), ("kind", kind), ("index64", index64),
            ("is_column_major", self.stride_r == 1 and stride_c != 1 and rows > 1),
            ("is_contiguous", (stride_c == 1 or columns == 1) and (self.stride_r == columns or rows == 1)),
            ("key", (*key, *map(specialization, (*sizes, each)))), ("each", each), ("with_scales", with_scales),
        ):  # fmt: skip
            object.__setattr__(self, name, value)

    @property
    def transposed(self) -> "Matrix":
        """The transpose, in the same memory."""
        return replace(self, rows=self.columns, columns=self.rows, stride_r=self.stride_c, stride_c=self.stride_r)

    def fills(self, tile_rows: int, tile_columns: int) -> bool:
        """True if whole tiles cover the matrix, so that no load or store needs a mask."""
        if (self.groups or self.experts) and tile_rows > GROUP_ROWS:
            return False
        return self.rows % tile_rows == 0 and self.columns % tile_columns == 0

    def tiles(self, tile_rows: int, tile_columns: int) -> int:
        """Number of tiles of this size that cover the matrix."""
        return -(-self.rows // tile_rows) * -(-self.columns // tile_columns)

    def how(self, tile_rows: int, tile_columns: int, *, units: bool = False) -> How:
        """Constants of a kernel over tiles of this size; `units`: codes are stored in aligned twos and fours."""
        even, kind = self.fills(tile_rows, tile_columns), self.kind
        pairs, quads = units and self.columns & 1 == 0, units and self.rows & 3 == 0
        return How(kind, kind, even, self.index64, self.device.conversions, tile_rows, tile_columns, pairs, quads)


@dataclass(frozen=True, slots=True, eq=False)
class KernelCast:
    """A Cast as constants of kernels.

    `family`: module of the kernel ("scaled", "blocks" or "nvfp4"), or "" if no kernel serves it, for the reason in
    `refusal`. `scaled_cast`: constant of `casts.scaled` and `casts.fold`. `nvfp4_cast`: constant of `casts.nvfp4` for
    codes, None in other families. `bare`: the cast without its Hadamard transform, if the transform is a launch of its
    own, else None. `block`: block of the format. `float_scale`: scales are float32, not bytes. `epsilon`: smallest amax
    of current scaling. `signs`: sign mask of the Hadamard transform of an NVFP4 cast, or NO_SIGNS. `is_scaled_per_row`:
    an NVFP4 cast has a tensor scale for every row.
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
        """Constant of `casts.blocks`; `output`: codes or values; `scale_layout`: order of the scales."""
        bits, bias, rule, stochastic, gradient = self.scaled_cast
        return BlockCast(
            bits, bias, int(self.float_scale), rule, self.block[1] or 0, stochastic, output, scale_layout,
            TILE=self.block[0] != 1, GRADIENT=gradient,
        )  # fmt: skip


@functools.lru_cache(512)
def kernel_cast(cast: Cast) -> KernelCast:
    """The KernelCast of a Cast, made once."""
    fmt, element = cast.format, cast.format.element
    family, refusal = family_of(cast)
    is_e8m0 = fmt.scale.name == "E8M0"
    numbers_of_rule = e8m0_threshold(cast.rule, element) if is_e8m0 and family else int(cast.rule.power_of_two)
    scaled = ScaledCast(element.mantissa_bits, element.bias, numbers_of_rule, cast.is_stochastic, cast.is_gradient)
    nvfp4, level = None, cast.rule.two_level
    if family == "nvfp4" and level is not None:
        rule = TWO_LEVEL if level.inverse_max is not None else TWO_LEVEL_DIVIDED if level.tensor_scale else ONE_LEVEL
        if level.four_over_six is not None:
            rule = FOUR_OVER_SIX_MSE if level.four_over_six == "mse" else FOUR_OVER_SIX_MAE
        nvfp4 = Nvfp4Cast(
            rule.value, level.capacity, level.inverse_max or 0.0, cast.is_stochastic,
            NO_SIGNS if cast.hadamard is None else cast.hadamard.sign_mask, fmt.block[0] != 1,
            cast.tensor_scale == "row", OUTPUT=0, ALIGNED=False, GRADIENT=cast.is_gradient,
        )  # fmt: skip
    # Kernels of other families do not transform: the cast without the transform runs on the transformed matrix.
    bare = None if cast.hadamard is None or fmt.scale.name == "E4M3" else replace(cast, hadamard=None)
    epsilon = cast.scaling.amax_epsilon if isinstance(cast.scaling, Current) else 0.0
    signs, per_row = (NO_SIGNS, False) if nvfp4 is None else (nvfp4.SIGNS, bool(nvfp4.PER_ROW))
    numbers = fmt.block, fmt.scale.name == "FP32", epsilon, signs, per_row
    return KernelCast(cast, family, refusal, scaled, nvfp4, bare, *numbers)


def is_one_pass(row: OperandSpec | None, column: OperandSpec | None, orders_scales: bool = True) -> bool:
    """True if one launch makes both operands: casts of one family that measure alike, without a Hadamard launch."""
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
    """A buffer to allocate: zero before the first launch (`cleared`), amaxes of a part of a matrix (`spans_mesh`)."""

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

    `key`: identifies the compiled version, together with the alignment of addresses. `programs`: size of the grid.
    `tensors`: positions in the table; negative numbers are slices of buffers. `cooperative`: all programs run at the
    same time and may wait for each other. `dependent`: the launch begins while the one before ends, and waits for it
    itself.
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


class Passes:
    """Launches over one or two matrices, and the buffers that they fill: results first, then intermediate ones."""

    def __init__(self, results: int) -> None:
        self.results = results
        self.buffers: list[Buffer | None] = [None] * results
        self.slices: list[Slice] = []
        self.launches: list[Pass] = []
        self.layouts: list[Part | None] = [None] * results
        self.shared: list[tuple[int, int]] = []  # (a result, the other result whose memory it shares)

    def put(self, index: int, part: Part) -> int:
        """Let result number `index` be a buffer with the layout `part`; returns its position."""
        self.buffers[index], self.layouts[index] = Buffer(*part), part
        return At.MADE + index

    def share(self, index: int, original: int, part: Part) -> None:
        """Let result number `index` be a view with the layout `part` of result number `original`."""
        self.buffers[index], self.layouts[index] = None, part
        self.shared.append((index, original))

    def add(self, buffer: Buffer) -> int:
        """Add an intermediate buffer; returns its position."""
        self.buffers.append(buffer)
        return At.MADE + len(self.buffers) - 1

    def slice(self, position: int, offset: int, length: int, dtype: str | None = None) -> int:
        """Position of `length` elements of a buffer, from `offset` on."""
        buffer = self.buffers[position - At.MADE]
        assert buffer is not None
        aligned = offset * _ITEM_BYTES[buffer.dtype] % ALIGNMENT == 0
        self.slices.append(Slice(position - At.MADE, offset, length, dtype, aligned))
        return ~(len(self.slices) - 1)
