"""Loads and stores of tiles of a matrix, arranged so that one thread holds whole blocks.

Triton gives the axis with contiguous addresses to neighbouring lanes, then the other axes in ascending order, and the
rest to registers. Index tensors here are shaped accordingly: thread axes first, register axes last.

Legend: R x C = the matrix in memory. The row *operand* has R rows and contracts C; the column operand is the transposed
matrix, with C rows, and contracts R. w counts words (two neighbouring elements of a row), q counts quads (four
neighbouring rows).

Functions pass arguments in bundles:

| bundle | elements |
|---|---|
| matrix | (x_ptr, R, C, stride_r, stride_c) |
| source, bounds | `Source`, `Bounds` |
| generator | (seed, stream, batch): call seed (its address, in `nvfp4` its value) and two words of the random counter |
| HOW | constants of a kernel over a matrix: `constants.How` |
"""

from typing import NamedTuple

import triton
import triton.language as tl

from microfloat.kernels.device.convert import ELEMENTWISE, high_half, low_half

# Orders of block scales: [rows, blocks], and its transpose, for FP8 block GEMMs.
SCALE_ROW_MAJOR = tl.constexpr(0)
SCALE_COLUMN_MAJOR = tl.constexpr(1)

# Prefetch distance in tiles of 128 x 128: two per multiprocessor of a Hopper, the number that is cast at once. Larger
# distances would exceed the L2 cache.
PREFETCH_AHEAD = tl.constexpr(264)


class Source(NamedTuple):
    """Pointers to a tile of up to three inputs of one shape, dtype and strides (`produce`)."""

    x: tl.tensor
    y: tl.tensor
    z: tl.tensor
    stride_r: tl.tensor
    stride_c: tl.tensor


class Bounds(NamedTuple):
    """Extents of a matrix, and first row and column of a tile."""

    R: tl.tensor
    C: tl.tensor
    row0: tl.tensor
    col0: tl.tensor


@triton.jit
def program(R, C, stride_r, stride_c, INDEX64: tl.constexpr):
    """Number of this program, extents and strides, as int64 where offsets need 64 bits."""
    pid = tl.program_id(0)
    if INDEX64:
        pid = pid.to(tl.int64)
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c, R, C = stride_r * one, stride_c * one, R * one, C * one
    return pid, R, C, stride_r, stride_c


@triton.jit
def tile_of_program(x_ptr, R, C, stride_r, stride_c, HOW: tl.constexpr, plan_ptr=None, tails_ptr=None):
    """Number of this program, number of tiles side by side, and `Source` and `Bounds` of the program's one tile.

    With a plan (`casts.groups`) bounds count padded rows, and the tile is read from x or from the buffer of tails.
    """
    pid, R, C, stride_r, stride_c = program(R, C, stride_r, stride_c, HOW.INDEX64)
    across, _tiles = tiles_of(R, C, HOW.BM, HOW.BN)
    row0, col0, x_tile = tile_at(x_ptr, pid, across, stride_r, stride_c, HOW.BM, HOW.BN)
    if plan_ptr is not None:
        first = tl.load(plan_ptr + row0 // 128)
        base = tl.where(first < 0, tails_ptr, x_ptr)
        first = tl.where(first < 0, ~first * 128, first) + row0 % 128
        x_tile = base + first.to(tl.int64) * stride_r + col0.to(tl.int64) * stride_c
    return pid, across, Source(x_tile, x_tile, x_tile, stride_r, stride_c), Bounds(R, C, row0, col0)


@triton.jit
def group_of(row, R, plan_ptr, EACH):
    """Number of the group that a padded row belongs to by the plan, or of its matrix where each has EACH rows."""
    if plan_ptr is None:
        return row // EACH
    else:
        return tl.load(plan_ptr + R // 128 + row // 128)


@triton.jit
def tiles_of(R, C, BM: tl.constexpr, BN: tl.constexpr):
    """Number of BM x BN tiles side by side, and in all."""
    across = (C + BN - 1) // BN
    return across, ((R + BM - 1) // BM) * across


@triton.jit
def tile_at(x_ptr, tile, across, stride_r, stride_c, BM: tl.constexpr, BN: tl.constexpr):
    """First row, first column and pointer of a tile; tiles are counted along rows of tiles."""
    row0 = (tile // across) * BM
    col0 = (tile % across) * BN
    return row0, col0, x_ptr + row0.to(tl.int64) * stride_r + col0.to(tl.int64) * stride_c


@triton.jit
def prefetch_later(x_ptr, tile, across, R, stride_r, HOW: tl.constexpr, plan_ptr=None):
    """Prefetch the tile PREFETCH_AHEAD behind `tile`, which a later program reads, into the L2 cache.

    It is marked `evict_last`, since the stores of all programs would evict it otherwise.
    """
    LATER: tl.constexpr = PREFETCH_AHEAD * (128 * 128) // (HOW.BM * HOW.BN)
    if HOW.HW and HOW.EVEN and HOW.LOADS != ELEMENTWISE:
        row0, col0, x_tile = tile_at(x_ptr, tile + LATER, across, stride_r, 1, HOW.BM, HOW.BN)
        if plan_ptr is not None:  # of rows in groups, full tiles alone
            first = tl.load(plan_ptr + row0 // 128, mask=row0 < R, other=-1)
            x_tile = x_ptr + (first + row0 % 128).to(tl.int64) * stride_r + col0.to(tl.int64)
            row0 = tl.where(first < 0, R, row0)
        if row0 < R:
            at = x_tile + (tl.arange(0, HOW.BM)[:, None] * stride_r + tl.arange(0, HOW.BN // 64)[None, :] * 64)
            PTX: tl.constexpr = "prefetch.global.L2::evict_last [$1]; mov.b32 $0, 0;"
            tl.inline_asm_elementwise(PTX, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_pair(
    tile_ptr, r, w, rows, cols, stride_r, stride_c, KIND: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr
):
    """Elements (r, 2w) and (r, 2w + 1) of a tile: (raw word, first, second); zeros outside `rows` x `cols`.

    ALIGN: bytes that one thread reads at once along w; 0 lets Triton choose.
    """
    if KIND == ELEMENTWISE:
        at = tile_ptr + r * stride_r + (2 * w) * stride_c
        low = tl.load(at, mask=(r < rows) & (2 * w < cols), other=0.0)
        high = tl.load(at + stride_c, mask=(r < rows) & (2 * w + 1 < cols), other=0.0)
        low, high = low.to(tl.float32), high.to(tl.float32)
        return low, low, high
    else:
        at = tile_ptr.to(tl.pointer_type(tl.int32)) + (r * (stride_r // 2) + w)
        if ALIGN > 0:
            at = tl.multiple_of(at, [ALIGN, ALIGN, ALIGN])
        raw = tl.load(at) if EVEN else tl.load(at, mask=(r < rows) & (w < cols // 2), other=0)
        return raw, low_half(raw, KIND), high_half(raw, KIND)


@triton.jit
def lane_rows(BM: tl.constexpr):
    """Local rows [1, BM, 1, 1] of a tile whose lanes hold neighbours of a row."""
    return tl.arange(0, BM)[None, :, None, None]


@triton.jit
def lane_words(BN: tl.constexpr, LANE: tl.constexpr):
    """Local words [BN / LANE, 1, LANE / 8, 4] of a row, LANE elements per lane."""
    lane = tl.arange(0, BN // LANE)[:, None, None, None] * (LANE // 2)
    return lane + tl.arange(0, LANE // 8)[None, None, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def store_pairs(tile_ptr, codes, r, w, rows, cols, ld, BITS: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr):
    """Store pairs of neighbours of a row: a byte of two nibbles, two bytes, or (BITS = 16) a word of two bfloat16.

    `ld`: bytes (or bfloat16 elements) per row. PAIRS: ld is even, so pairs are aligned and stored at once.
    """
    inside = (r < rows) & (2 * w < cols)
    if BITS == 4:
        if EVEN:
            tl.store(tile_ptr + (r * ld + w), codes.to(tl.uint8, bitcast=True))
        else:
            codes = tl.where(2 * w + 1 < cols, codes, codes & 15)
            tl.store(tile_ptr + (r * ld + w), codes.to(tl.uint8, bitcast=True), mask=inside)
    elif PAIRS:
        at = tile_ptr.to(tl.pointer_type(tl.int32 if BITS == 16 else tl.int16)) + (r * (ld // 2) + w)
        tl.store(at, codes, mask=None if EVEN else inside)
    else:
        HALF: tl.constexpr = tl.int16 if BITS == 16 else tl.int8
        at = tile_ptr.to(tl.pointer_type(HALF)) + (r * ld + 2 * w)
        tl.store(at, codes.to(HALF), mask=inside)
        tl.store(at + 1, (codes >> BITS).to(HALF), mask=(r < rows) & (2 * w + 1 < cols))


@triton.jit
def store_quads(tile_ptr, codes, c, quads, rows, cols, ld, BITS: tl.constexpr, QUADS: tl.constexpr, EVEN: tl.constexpr):
    """Store quads [columns, quads] of neighbours of a column: int32 of four bytes, or int16 of four nibbles.

    `c` [columns, 1] and `quads` [1, quads]: local indices. `ld`: bytes per column. QUADS: quads are aligned and stored
    at once; otherwise bytes are stored one by one.
    """
    inside = (4 * quads < rows) & (c < cols)
    if QUADS:
        if BITS == 4:
            at = tile_ptr.to(tl.pointer_type(tl.int16)) + (c * (ld // 2) + quads)
        else:
            at = tile_ptr.to(tl.pointer_type(tl.int32)) + (c * (ld // 4) + quads)
        tl.store(at, codes, mask=None if EVEN else inside)
    elif BITS == 4:
        for j in tl.static_range(2):
            byte = (codes >> (8 * j)) & 0xFF
            byte = tl.where(4 * quads + 2 * j + 1 < rows, byte, byte & 15)
            at = tile_ptr + (c * ld + 2 * quads + j)
            tl.store(at, byte.to(tl.uint8), mask=inside & (4 * quads + 2 * j < rows))
    else:
        for j in tl.static_range(4):
            byte = (codes >> (8 * j)) & 0xFF
            tl.store(tile_ptr + (c * ld + 4 * quads + j), byte.to(tl.uint8), mask=inside & (4 * quads + j < rows))


@triton.jit
def store_octs(tile_ptr, octs, row, index, rows, length, ld, OCTS: tl.constexpr, EVEN: tl.constexpr):
    """Store octs (int32 of eight FP4 codes) at oct `index` of row `row`; both are local and broadcast to `octs`.

    `rows`, `length`: size of the operand from the tile's origin on. `ld`: bytes per row. OCTS: octs are aligned and
    stored at once; otherwise bytes are stored one by one.
    """
    if OCTS:
        at = tile_ptr.to(tl.pointer_type(tl.int32)) + (row * (ld // 4) + index)
        tl.store(at, octs, mask=None if EVEN else (row < rows) & (8 * index < length))
    else:
        for j in tl.static_range(4):
            byte = (octs >> (8 * j)) & 0xFF
            element = 8 * index + 2 * j
            byte = tl.where(element + 1 < length, byte, byte & 15)
            at = tile_ptr + (row * ld + 4 * index + j)
            tl.store(at, byte.to(tl.uint8), mask=(row < rows) & (element < length))


@triton.jit
def transpose_quads(codes, GROUPS: tl.constexpr, Q: tl.constexpr, W: tl.constexpr):
    """Quads [GROUPS, Q, W] of one column of every word -> [W, GROUPS * Q], with contiguous rows."""
    return tl.permute(tl.reshape(codes, [GROUPS * Q, W]), [1, 0])


@triton.jit
def scale_offset(row, block, rows, blocks, LAYOUT: tl.constexpr):
    """Offset at which the scale of `block` of `row` (global indices of the operand) is stored."""
    if LAYOUT == SCALE_COLUMN_MAJOR:
        return block * rows + row
    else:
        return row * blocks + block


@triton.jit
def store_tile_scale(scale_ptr, scale, row, column, columns, MULTIPLE: tl.constexpr):
    """Store the scale of a tile; rows of scales have `columns` entries and are padded with zeros to a multiple."""
    stride = (columns + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    tl.store(scale_ptr + row * stride + column, scale)
    if MULTIPLE > 1:  # noqa: SIM102  # a constant beside a tensor
        if column == columns - 1:
            at = columns + tl.arange(0, MULTIPLE)
            tl.store(scale_ptr + row * stride + at, tl.zeros([MULTIPLE], tl.float32), mask=at < stride)


@triton.jit
def over_rows(x, N: tl.constexpr, BM: tl.constexpr, SIDE: tl.constexpr):
    """Maximum over every SIDE rows of [N, BM], repeated for each of them."""
    m = tl.max(tl.reshape(x, [N, BM // SIDE, SIDE]), 2)
    return tl.reshape(tl.broadcast_to(m[:, :, None], [N, BM // SIDE, SIDE]), [N, BM])


@triton.jit
def over_columns(a, b, N: tl.constexpr, W: tl.constexpr, SIDE: tl.constexpr):
    """Maximum over every SIDE columns, repeated for each; `a` and `b` [N, W]: first and second columns of words."""
    H: tl.constexpr = SIDE // 2
    m = tl.max(tl.reshape(tl.maximum(a, b), [N, W // H, H]), 2)
    return tl.reshape(tl.broadcast_to(m[:, :, None], [N, W // H, H]), [N, W])
