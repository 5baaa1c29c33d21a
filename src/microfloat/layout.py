"""The layout of an operand: shape, strides and dtype of its codes, its scales and its tensor scale.

One function of the cast, the rows and the contraction length answers for the oracle, torch, JAX and the fake results of
compiled code. Sizes may be symbolic: nothing here compares them.

| form | what a GEMM reads | codes | scale |
|---|---|---|---|
| codes | the quantized operand (docs/numerics.md 7.1) | stored elements | by blocks of the format |
| folded | MX and NVFP4 operands as FP8 with one scale for 1x128 | FP8 | float32, column-major |
| tiles | MX and NVFP4 operands as FP8 with one scale for 128x128 | FP8 | float32, rows filled up to four tiles |
| rows | MX and NVFP4 operands as FP8 with one scale for each row | FP8 | float32 |
| values | element times block scale, decoded to bfloat16 | bfloat16, in the memory of the matrix | none |

Legend: R = rows of the operand, C = its contraction length.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import E5M2, FORMATS, ElementFormat, ScaledFormat
from microfloat.recipes import Cast, Hadamard

ALIGNMENT = 16  # bytes: kernels and cuBLAS are told that addresses are multiples of it; allocations begin at one
_TILES_TOGETHER = 4  # a row of 128x128 scales is filled up to a multiple of this for its GEMM
FOLDED = {
    form: (FORMATS[name], FORMATS[f"{name}_e5m2"])
    for form, name in (("folded", "fp8_1x128"), ("tiles", "fp8_128x128"), ("rows", "fp8_row"))
}

Size = Any  # an int, or a symbol of a compiler


class Part(NamedTuple):
    """One array of an operand: its shape, its strides in elements, and the name of its dtype."""

    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    dtype: str

    @property
    def transposed(self) -> "Part":
        """The same memory, seen as the transpose."""
        return Part(self.shape[::-1], self.strides[::-1], self.dtype)


class Layout(NamedTuple):
    """The arrays of an operand; None where its format has no such array."""

    codes: Part
    scale: Part | None
    tensor_scale: Part | None


def codes_dtype(element: ElementFormat) -> str:
    """The dtype of stored codes: a float8 dtype for E4M3 and E5M2, uint8 for every other element."""
    return {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"}.get(element.name, "uint8")


def folded_format(fmt: ScaledFormat, form: str) -> ScaledFormat:
    """The FP8 format that an MX or NVFP4 operand becomes in the form "folded", "tiles" or "rows"."""
    return FOLDED[form][fmt.element == E5M2]


def stored_length(length: Size, hadamard: Hadamard | None) -> Size:
    """C as stored: whole groups of the Hadamard transform, whose padding mixes into real outputs."""
    return length if hadamard is None else -(-length // hadamard.size) * hadamard.size


def scale_grid(fmt: ScaledFormat, rows: Size, stored: Size) -> tuple[Size, ...]:
    """Shape of the scales of an operand [R, C]: () per tensor, [R, 1] per row, else one for each block."""
    block_rows, block_columns = fmt.block
    if block_rows is None:
        return ()
    return (-(-rows // block_rows), 1 if block_columns is None else -(-stored // block_columns))


def layout_of(
    cast: Cast, rows: Size, length: Size, form: str = "codes", *, of_transpose: bool = False, paired: bool = False,
    turned: bool = False,
) -> Layout:  # fmt: skip
    """The layout of the operand [R, C] that `cast` makes in `form`.

    `of_transpose`: it is made from the transpose of a matrix, in whose memory its "values" lie. `paired`: a kernel
    writes both operands of the matrix in one pass, which stores MX scales column-major. `turned`: as a GEMM that
    contracts the first axis of its right operand takes it, [C, R]; scales of 1x128 blocks are column-major either way,
    and are not turned.
    """
    stored = stored_length(length, cast.hadamard)
    tensor_scale = None if form in FOLDED else _tensor_scale(cast.tensor_scale, rows)
    if form == "values":
        in_memory = _row_major((stored, rows) if of_transpose else (rows, stored), "bfloat16")
        return Layout(in_memory if turned == of_transpose else in_memory.transposed, None, tensor_scale)
    fmt = cast.format if form == "codes" else folded_format(cast.format, form)
    element = fmt.element
    codes = _row_major((rows, -(-stored // element.codes_per_byte)), codes_dtype(element))
    grid = scale_grid(fmt, rows, stored)
    dtype = "float32" if fmt.scale.name == "FP32" else "uint8"
    if fmt.block == (1, 128) and dtype == "float32":
        scale, turned_scale = (_row_major(grid[::-1], dtype).transposed,) * 2
    else:
        if form == "tiles":
            grid = (grid[0], -(-grid[1] // _TILES_TOGETHER) * _TILES_TOGETHER)
        if paired and fmt.block == (1, 32):
            scale = _row_major(grid[::-1], dtype).transposed
        else:
            scale = _row_major(grid, dtype)
        turned_scale = scale.transposed
    return Layout(codes.transposed, turned_scale, tensor_scale) if turned else Layout(codes, scale, tensor_scale)


@dataclass(frozen=True)
class Storage:
    """The storage of a format: all that, beside its shape, decides the layout of a stored array.

    `group`: the contraction length is filled up to a multiple of it. `tensor_scale`: None, "tensor" or "row". Fields
    alone, since torch's compiler reads those of a frozen dataclass, but not its properties.
    """

    format: ScaledFormat
    group: int
    codes_per_byte: int
    codes_dtype: str
    scale_dtype: str
    tensor_scale: str | None

    @staticmethod
    def of(fmt: ScaledFormat, hadamard: Hadamard | None, tensor_scale: str | None) -> "Storage":
        """The storage of a format, under a Hadamard transform or None, with or without its tensor scale."""
        return Storage(
            fmt, hadamard.size if hadamard else 1, fmt.element.codes_per_byte, codes_dtype(fmt.element),
            str(fmt.scale.dtype), tensor_scale,
        )  # fmt: skip


def array_layout(storage: Storage, shape: tuple[Size, ...], axis: int) -> Layout:
    """The layout of a stored array that contracts `axis`: row-major, its leading axes in place of R (numerics 7.1)."""
    rows: Size = 1
    leading = leading_axes(shape, axis)
    for size in leading:
        rows = rows * size
    stored = -(-(shape[axis] if shape else 1) // storage.group) * storage.group
    grid = scale_grid(storage.format, rows, stored)
    return Layout(
        _row_major((*leading, -(-stored // storage.codes_per_byte)), storage.codes_dtype),
        _row_major(scale_shape(storage.format, shape, axis, grid), storage.scale_dtype),
        _tensor_scale(storage.tensor_scale, rows),
    )


def leading_axes(shape: tuple[Size, ...], axis: int) -> tuple[Size, ...]:
    """Sizes of all axes but `axis` (>= 0), which replace R in the shapes of an array's codes and one-row scales."""
    return (*shape[:axis], *shape[axis + 1 :]) if len(shape) > 1 else (1,)


def scale_shape(fmt: ScaledFormat, shape: tuple[Size, ...], axis: int, grid: tuple[Size, ...]) -> tuple[Size, ...]:
    """Shape of the scales of an array, from the `grid` of its operand: blocks of one row keep the leading axes."""
    block_rows = fmt.block[0]
    if block_rows is None:
        return ()
    return grid if block_rows > 1 else (*leading_axes(shape, axis), grid[1])


def _tensor_scale(kind: str | None, rows: Size) -> Part | None:
    return None if kind is None else _row_major((rows, 1) if kind == "row" else (), "float32")


def _row_major(shape: tuple[Size, ...], dtype: str) -> Part:
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size
    return Part(shape, tuple(strides), dtype)


Windows = list[tuple[slice, slice]]


def blocked_windows(shape: Sequence[Size], group_sizes: Any, dim: int) -> Windows:
    """The parts of a matrix of scales that are put into tiles alone: all, or groups of these sizes along axis `dim`."""
    shape = _count("rows", shape[0]), _count("cols", shape[1])
    if isinstance(dim, bool) or dim not in (0, 1):
        raise invalid_value("dim", repr(dim), "0 (groups of rows) or 1 (groups of columns)")
    if group_sizes is None:
        return [(slice(0, shape[0]), slice(0, shape[1]))]
    what, remedy = "the rows of the scales", ""
    if dim:
        what, remedy = "the columns of the scales", "Sizes count scales: those of K groups are numbers of blocks."
    whole = slice(0, shape[1 - dim])
    parts = group_windows(group_sizes, shape[dim], what, remedy)
    return [(whole, part) if dim else (part, whole) for part in parts]


def group_windows(group_sizes: Any, total: int, what: str, remedy: str = "") -> list[slice]:
    """The windows of groups of these sizes (ints, or an array that is read) that add up to `total`, in words `what`."""
    sizes, needed = group_sizes, f"ints >= 0 that add up to {total}, {what}"
    try:
        sizes = [operator.index(size) for size in (sizes.tolist() if hasattr(sizes, "tolist") else sizes)]
    except TypeError:
        raise invalid_type("group_sizes", type(group_sizes), needed) from None
    if any(size < 0 for size in sizes) or sum(sizes) != total:
        raise invalid_value("group_sizes", f"{sizes}, which add up to {sum(sizes)}", needed, remedy)
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _count(argument: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise invalid_type(argument, type(value), "an int")
    if value < 0:
        raise invalid_value(argument, value, "an int >= 0")
    return value  # as it is: it may be a symbol of a compiler


def blocked_sizes(windows: Windows, shape: Sequence[int] | None = None) -> list[int]:
    """Bytes of each window in tiles of 128 x 4; InvalidValueError unless `shape`, of 1-D bytes, holds all of them."""
    sizes = [512 * -(-(rows.stop - rows.start) // 128) * -(-(cols.stop - cols.start) // 4) for rows, cols in windows]
    if shape is not None and tuple(shape) != (sum(sizes),):
        rows, cols = windows[-1] if windows else (slice(0, 0), slice(0, 0))
        of = f"{rows.stop} x {cols.stop} scales" + (f" in {len(windows)} groups" if len(windows) != 1 else "")
        raise invalid_value("flat", f"shape {tuple(shape)}", f"({sum(sizes)},) bytes for {of}")
    return sizes


def check_scale_bytes(dtype: object, argument: str = "scale") -> None:
    """Refuse scales that are no bytes: E8M0 or E4M3, as uint8 or in their own dtype."""
    if str(dtype).removeprefix("torch.") not in ("uint8", "float8_e8m0fnu", "float8_e4m3fn"):
        needed = "uint8 scale bytes (or their float8 dtype)"
        raise invalid_type(argument, dtype, needed, "FP32 scales have no swizzled layout.")
