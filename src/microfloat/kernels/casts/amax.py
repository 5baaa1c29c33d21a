"""Absolute maxima of whole tensors, of rows and of columns, NaN ignored (docs/numerics.md 2.3).

A tensor's maximum needs no cleared buffer: programs meet in scratch memory (`meeting`).
"""

import triton
import triton.language as tl

from microfloat.kernels.device.convert import (
    ELEMENTWISE,
    bits_of,
    drop_nan,
    high_half,
    larger_half,
    low_half,
    magnitude_bits,
    packed_abs,
    packed_max,
    packed_reduce,
)
from microfloat.kernels.device.meeting import STORE, arrive, offer_maximum, peek, publish_maximum
from microfloat.kernels.device.tiles import Bounds, load_pair, program, tile_at, tiles_of


@triton.jit
def amax_contiguous(
    x_ptr, out_ptr, scratch_ptr, N, KIND: tl.constexpr, EVEN: tl.constexpr, HW: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """amax of N contiguous elements (N even when KIND reads words), by any number of programs.

    They take pieces of UNROLL blocks in turn, the last piece first: a matrix was mostly written from its beginning to
    its end, and a cast will read it so, and the L2 cache holds what was touched last. EVEN: whole pieces cover it.
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
    """amax of an R x C matrix of any strides: one program per tile."""
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
    """Merge the amaxes of one tile's rows and columns into those of the matrix; bounds and HOW as in `tiles`."""
    KIND: tl.constexpr = HOW.KIND
    BM: tl.constexpr = HOW.BM
    BN: tl.constexpr = HOW.BN
    R, C, row0, col0 = bounds
    rows = R - row0
    cols = C - col0
    t = tl.arange(0, BN // 8)[:, None, None]
    r = tl.arange(0, BM)[None, :, None]
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
        at = tl.arange(0, BM)
        tl.atomic_max(row_amax + row0 + at, rowmax, mask=at < rows)
    if COLUMN:
        at = tl.arange(0, BN // 8)[:, None] * 8 + tl.arange(0, 4)[None, :] * 2
        tl.atomic_max(column_amax + col0 + at, column_low, mask=at < cols)
        tl.atomic_max(column_amax + col0 + at + 1, column_high, mask=at + 1 < cols)


@triton.jit
def amax_rows_columns(
    x_ptr, row_amax, column_amax, R, C, stride_r, stride_c, ROW: tl.constexpr, COLUMN: tl.constexpr, HOW: tl.constexpr
):  # fmt: skip
    """Bits of the amax of every row and of every column (int32, cleared before) in one pass: one program per tile."""
    BM: tl.constexpr = HOW.BM
    BN: tl.constexpr = HOW.BN
    pid, R, C, stride_r, stride_c = program(R, C, stride_r, stride_c, HOW.INDEX64)
    across, tiles = tiles_of(R, C, BM, BN)
    row0, col0, x_tile = tile_at(x_ptr, tiles - 1 - pid, across, stride_r, stride_c, BM, BN)
    tile_axes(x_tile, row_amax, column_amax, Bounds(R, C, row0, col0), stride_r, stride_c, ROW, COLUMN, HOW)
