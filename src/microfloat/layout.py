"""The layout of an operand: shape, strides and dtype of its codes, its scales and its tensor scale.

One function of the cast, the rows and the contraction length answers for the oracle, torch, JAX and the fake results of
compiled code. Sizes may be symbolic: nothing here compares them.

| form | what a GEMM reads | codes | scale |
|---|---|---|---|
| codes | the quantized operand (docs/numerics.md 7.1) | stored elements | by blocks of the format |
| folded | MX operands as FP8 with one scale for 1x128 | FP8 | float32, column-major |
| tiles | MX operands as FP8 with one scale for 128x128 | FP8 | float32, rows filled up to four tiles |
| values | element times block scale, decoded to bfloat16 | bfloat16, in the memory of the matrix | none |

Legend: R = rows of the operand, C = its contraction length.
"""

from typing import Any, NamedTuple

from microfloat.formats import (
    E5M2,
    ElementFormat,
    FP8_1x128,
    FP8_1x128_E5M2,
    FP8_128x128,
    FP8_128x128_E5M2,
    ScaledFormat,
)
from microfloat.recipes import Cast

__all__ = ["FORMS", "Layout", "Part", "codes_dtype", "folded_format", "layout_of", "scale_grid", "stored_length"]

FORMS = ("codes", "folded", "tiles", "values")
_TILES_TOGETHER = 4  # a row of 128x128 scales is filled up to a multiple of this for its GEMM
_FOLDED = {"folded": (FP8_1x128, FP8_1x128_E5M2), "tiles": (FP8_128x128, FP8_128x128_E5M2)}

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
    """The dtype of stored codes: a float8 one for E4M3 and E5M2, bytes for every other element."""
    return {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"}.get(element.name, "uint8")


def folded_format(fmt: ScaledFormat, form: str) -> ScaledFormat:
    """The FP8 format that an MX operand becomes in the form "folded" or "tiles"."""
    return _FOLDED[form][fmt.element == E5M2]


def stored_length(cast: Cast, length: Size) -> Size:
    """C, filled up to a multiple of 16 where the Hadamard transform needs whole groups."""
    return -(-length // 16) * 16 if cast.hadamard is not None else length


def scale_grid(fmt: ScaledFormat, rows: Size, stored: Size) -> tuple[Size, ...]:
    """Shape of the scales of an operand [R, C]: () per tensor, [R, 1] per row, else one for each block."""
    if fmt.is_per_tensor:
        return ()
    block_rows, block_columns = fmt.block
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
    stored = stored_length(cast, length)
    level = cast.rule.two_level
    tensor_scale = None
    if level is not None and level.tensor_scale:
        tensor_scale = _row_major((rows, 1) if cast.format.tensor_scale == "row" else (), "float32")
    if form == "values":
        codes = (
            _row_major((stored, rows), "bfloat16").transposed
            if of_transpose
            else _row_major((rows, stored), "bfloat16")
        )
        return Layout(codes.transposed if turned else codes, None, tensor_scale)
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


def _row_major(shape: tuple[Size, ...], dtype: str) -> Part:
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size
    return Part(shape, tuple(strides), dtype)
