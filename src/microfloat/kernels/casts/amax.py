"""Absolute maxima of a matrix, of its rows and columns, and of its Hadamard transform; NaN is ignored.

| kernel | result | programs |
|---|---|---|
| `amax_contiguous` | amax of N elements without gaps | any number; each takes blocks in turn |
| `amax_strided` | amax of R x C elements with any strides | one for each BM x BN tile |
| `amax_rows_columns` | amax of each row and each column | one for each BM x BN tile |
| `amax_transformed` | amax, and amax of the Hadamard transform | any number; each takes BM x BN tiles in turn |

Programs combine their results in scratch memory (`grid_reduction`), so no buffer is cleared first. Source:
docs/numerics.md 2.3.
"""

import triton
import triton.language as tl

from microfloat.kernels.device import fp4
from microfloat.kernels.device.convert import (
    ELEMENTWISE,
    WORDS_BF16,
    bf16_bits,
    bits_of,
    drop_nan,
    float_of,
    high_half,
    larger_half,
    low_half,
    magnitude_bits,
    packed_abs,
    packed_max,
    packed_reduce,
)
from microfloat.kernels.device.grid_reduction import STORE, arrive, offer_maximum, peek, publish_maximum, publish_two
from microfloat.kernels.device.random import zero_again
from microfloat.kernels.device.tiles import Bounds, group_of, load_pair, program, tile_at, tile_of_program, tiles_of


@triton.jit
def amax_contiguous(
    x_ptr, out_ptr, scratch_ptr, N, KIND: tl.constexpr, EVEN: tl.constexpr, HW: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Amax of N contiguous elements (N is even where KIND reads words), by any number of programs.

    Programs take pieces of UNROLL blocks in turn, the last piece first: the L2 cache still holds the end of a matrix
    that was just written, and holds its beginning when a cast reads it next. EVEN: whole pieces cover the matrix.
    """
    known = peek(scratch_ptr, HW)
    lanes = tl.arange(0, BLOCK // 2)
    total = tl.zeros([BLOCK // 2], tl.int32)
    piece = (N - 1) // (BLOCK * UNROLL) - tl.program_id(0)
    while piece >= 0:
        first = piece.to(tl.int64) * (BLOCK * UNROLL)
        for step in tl.static_range(UNROLL):
            start = first + step * BLOCK
            raw, low, high = load_pair(x_ptr + start, 0, lanes, 1, N - start, 0, 1, KIND, EVEN, 0)
            if HW and KIND != ELEMENTWISE:
                total = packed_max(total, packed_abs(raw, KIND), KIND, True)
            else:
                total = tl.maximum(total, tl.maximum(magnitude_bits(low, True), magnitude_bits(high, True)))
        piece -= tl.num_programs(0)
    if HW and KIND != ELEMENTWISE:
        m = packed_reduce(total, 0, KIND, True)
        amax = larger_half(m, KIND, True)
    else:
        amax = tl.max(total, 0)
    offer_maximum(amax, known, scratch_ptr, HW)
    publish_maximum(arrive(scratch_ptr + 1, HW), tl.num_programs(0), out_ptr, scratch_ptr, STORE, HW)


@triton.jit
def amax_strided(
    x_ptr, out_ptr, scratch_ptr, R, C, stride_r, stride_c, INDEX64: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Amax of an R x C matrix with any strides: one program per tile."""
    pid, R, C, stride_r, stride_c = program(R, C, stride_r, stride_c, INDEX64)
    across, tiles = tiles_of(R, C, BM, BN)
    row0, col0, x_tile = tile_at(x_ptr, tiles - 1 - pid, across, stride_r, stride_c, BM, BN)
    r = tl.arange(0, BM)[:, None]
    w = tl.arange(0, BN // 2)[None, :]
    _raw, low, high = load_pair(x_tile, r, w, R - row0, C - col0, stride_r, stride_c, ELEMENTWISE, False, 0)
    m = tl.maximum(magnitude_bits(low, True), magnitude_bits(high, True))
    offer_maximum(tl.max(tl.max(m, 1), 0), 0, scratch_ptr, False)
    publish_maximum(arrive(scratch_ptr + 1, False), tl.num_programs(0), out_ptr, scratch_ptr, STORE, False)


@triton.jit
def tile_axes(
    x_tile, row_amax, column_amax, bounds, stride_r, stride_c, ROW: tl.constexpr, COLUMN: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """Merge the amaxes of the rows and columns of one tile into those of the matrix."""
    KIND: tl.constexpr = HOW.KIND
    R, C, row0, col0 = bounds
    rows = R - row0
    cols = C - col0
    t = tl.arange(0, HOW.BN // 8)[:, None, None]
    r = tl.arange(0, HOW.BM)[None, :, None]
    w = t * 4 + tl.arange(0, 4)[None, None, :]
    raw, low, high = load_pair(x_tile, r, w, rows, cols, stride_r, stride_c, KIND, HOW.EVEN, 0)
    if HOW.HW and KIND != ELEMENTWISE:
        m = packed_abs(raw, KIND)
        if COLUMN:
            c = packed_reduce(m, 1, KIND, True)
            column_low, column_high = drop_nan(bits_of(low_half(c, KIND))), drop_nan(bits_of(high_half(c, KIND)))
        if ROW:
            p = packed_reduce(packed_reduce(m, 2, KIND, True), 0, KIND, True)
            rowmax = larger_half(p, KIND, True)
    else:
        low, high = magnitude_bits(low, True), magnitude_bits(high, True)
        if COLUMN:
            column_low, column_high = tl.max(low, 1), tl.max(high, 1)
        if ROW:
            rowmax = tl.max(tl.max(tl.maximum(low, high), 2), 0)
    if ROW:
        at = tl.arange(0, HOW.BM)
        tl.atomic_max(row_amax + row0 + at, rowmax, mask=at < rows)
    if COLUMN:
        at = tl.arange(0, HOW.BN // 8)[:, None] * 8 + tl.arange(0, 4)[None, :] * 2
        tl.atomic_max(column_amax + col0 + at, column_low, mask=at < cols)
        tl.atomic_max(column_amax + col0 + at + 1, column_high, mask=at + 1 < cols)


@triton.jit
def amax_rows_columns(
    x_ptr, row_amax, column_amax, R, C, stride_r, stride_c, ROW: tl.constexpr, COLUMN: tl.constexpr, HOW: tl.constexpr
):
    """Bits of the amax of every row and every column (int32, zero before), in one pass: one program per tile."""
    pid, R, C, stride_r, stride_c = program(R, C, stride_r, stride_c, HOW.INDEX64)
    across, tiles = tiles_of(R, C, HOW.BM, HOW.BN)
    row0, col0, x_tile = tile_at(x_ptr, tiles - 1 - pid, across, stride_r, stride_c, HOW.BM, HOW.BN)
    tile_axes(x_tile, row_amax, column_amax, Bounds(R, C, row0, col0), stride_r, stride_c, ROW, COLUMN, HOW)


@triton.jit
def amaxes_of_groups(
    x_ptr, row_amax, group_amax, plan_ptr, tails_ptr, EACH, R, C, stride_r, stride_c, ROW: tl.constexpr,
    COLUMN: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Bits of the amaxes of rows in groups (int32, cleared before), one program per tile: of every row (ROW), and of
    every column of each group, [groups, C] (COLUMN); with neither, of each group. `EACH` as in `tiles.group_of`.
    """
    _pid, _across, source, bounds = tile_of_program(x_ptr, R, C, stride_r, stride_c, HOW, plan_ptr, tails_ptr)
    R, C, row0, col0 = bounds
    group = group_of(row0, R, plan_ptr, EACH)
    if ROW or COLUMN:
        tile_axes(
            source.x, row_amax, group_amax + group * C, bounds, source.stride_r, source.stride_c, ROW, COLUMN, HOW
        )
    else:
        r = tl.arange(0, HOW.BM)[:, None]
        w = tl.arange(0, HOW.BN // 2)[None, :]
        rows, cols, strides = R - row0, C - col0, (source.stride_r, source.stride_c)
        raw, low, high = load_pair(source.x, r, w, rows, cols, strides[0], strides[1], HOW.KIND, HOW.EVEN, 0)
        if HOW.HW and HOW.KIND != ELEMENTWISE:
            m = packed_reduce(packed_reduce(packed_abs(raw, HOW.KIND), 1, HOW.KIND, True), 0, HOW.KIND, True)
            tl.atomic_max(group_amax + group, larger_half(m, HOW.KIND, True))
        else:
            m = tl.maximum(magnitude_bits(low, True), magnitude_bits(high, True))
            tl.atomic_max(group_amax + group, tl.max(tl.max(m, 1), 0))


@triton.jit
def tile_amaxes(
    x_tile, rows, cols, stride_r, stride_c, MASK: tl.constexpr, ALONG_ROWS: tl.constexpr, HOW: tl.constexpr
):
    """Bits of the largest magnitude in each lane's part of a tile, and of its transform along columns (or rows).

    With HW the maximum of the transform is four times too large and not yet rounded.
    """
    KIND: tl.constexpr = HOW.KIND
    HW: tl.constexpr = HOW.HW
    BM: tl.constexpr = HOW.BM
    BN: tl.constexpr = HOW.BN
    if ALONG_ROWS:
        words, block = fp4.load_row_blocks(x_tile, rows, cols, stride_r, stride_c, KIND, HOW.EVEN, BN // 16, BM)
        plain = fp4.row_block_amax(words, block, KIND, True, HW)
        if HW:
            transformed = bits_of(fp4.hadamard_amax(block, MASK, KIND))
        else:
            words, block = fp4.hadamard_row_blocks(block, MASK, KIND, HW)
            transformed = fp4.row_block_amax(words, block, WORDS_BF16, True, HW)
    else:
        words, low, high = fp4.load_column_blocks(
            x_tile, rows, cols, stride_r, stride_c, KIND, HOW.EVEN, BM // 16, BN // 2
        )
        a, b = fp4.column_block_amax(words, low, high, KIND, True, HW)
        plain = tl.maximum(a, b)
        if HW:
            transformed = bits_of(tl.maximum(fp4.hadamard_amax(low, MASK, KIND), fp4.hadamard_amax(high, MASK, KIND)))
        else:
            words, low, high = fp4.hadamard_column_blocks(low, high, MASK, KIND, False, HW)
            a, b = fp4.column_block_amax(words, low, high, WORDS_BF16, True, HW)
            transformed = tl.maximum(a, b)
    return plain, transformed


@triton.jit
def amaxes(matrix, first, programs, MASK: tl.constexpr, ALONG_ROWS: tl.constexpr, HOW: tl.constexpr):
    """Bits of the amax, plain and transformed, of the tiles `first`, `first` + `programs`, ... counted from the end."""
    HW: tl.constexpr = HOW.HW
    BM: tl.constexpr = HOW.BM
    BN: tl.constexpr = HOW.BN
    x_ptr, R, C, stride_r, stride_c = matrix
    plain = tl.zeros([BN // 16, BM] if ALONG_ROWS else [BM // 16, BN // 2], tl.int32)
    transformed = plain
    across, tiles = tiles_of(R, C, BM, BN)
    tile = tiles - 1 - first
    while tile >= 0:
        stride = stride_r + 16 * zero_again(tile, HW)  # as in `nvfp4.nvfp4_tiles`
        row0, col0, x_tile = tile_at(x_ptr, tile, across, stride, stride_c, BM, BN)
        a, b = tile_amaxes(x_tile, R - row0, C - col0, stride, stride_c, MASK, ALONG_ROWS, HOW)
        plain, transformed = tl.maximum(plain, a), tl.maximum(transformed, b)
        tile -= programs
    return largest_of(plain, transformed, HW)


@triton.jit
def largest_of(plain, transformed, HW: tl.constexpr):
    """Bits of the largest of the results of `tile_amaxes`."""
    largest = tl.max(tl.max(transformed, 1), 0)
    if HW:  # rounding keeps the order
        largest = bf16_bits(float_of(largest) * 0.25, HW) << 16
    return tl.max(tl.max(plain, 1), 0), largest


@triton.jit
def amax_transformed(
    x_ptr, out_ptr, scratch_ptr, R, C, stride_r, stride_c, MASK: tl.constexpr, ALONG_ROWS: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """The amaxes of a matrix and of its Hadamard transform along columns (or rows), by any number of programs."""
    HW: tl.constexpr = HOW.HW
    known, known_transformed = peek(scratch_ptr, HW), peek(scratch_ptr + 2, HW)
    pid, R, C, stride_r, stride_c = program(R, C, stride_r, stride_c, HOW.INDEX64)
    matrix = (x_ptr, R, C, stride_r, stride_c)
    plain, transformed = amaxes(matrix, pid, tl.num_programs(0), MASK, ALONG_ROWS, HOW)
    offer_maximum(plain, known, scratch_ptr, HW)
    offer_maximum(transformed, known_transformed, scratch_ptr + 2, HW)
    publish_two(arrive(scratch_ptr + 1, HW), tl.num_programs(0), out_ptr, scratch_ptr, HW)


@triton.jit
def amaxes_of_transformed_groups(
    x_ptr, group_amax, transformed_amax, plan_ptr, tails_ptr, EACH, R, C, stride_r, stride_c, MASK: tl.constexpr,
    ALONG_ROWS: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """The same of each group of rows, as bits (int32, cleared before); one program per tile. EACH as in `group_of`."""
    _pid, _across, source, bounds = tile_of_program(x_ptr, R, C, stride_r, stride_c, HOW, plan_ptr, tails_ptr)
    R, C, row0, col0 = bounds
    plain, transformed = tile_amaxes(
        source.x, R - row0, C - col0, source.stride_r, source.stride_c, MASK, ALONG_ROWS, HOW
    )
    plain, transformed = largest_of(plain, transformed, HOW.HW)
    group = group_of(row0, R, plan_ptr, EACH)
    tl.atomic_max(group_amax + group, plain)
    tl.atomic_max(transformed_amax + group, transformed)
