"""NVFP4 casts: FP4 codes, an E4M3 scale per block of 16 (or tile of 16 x 16), and one FP32 tensor scale.

One program casts STEPS tiles of BM x BN, one below the other, into the row and the column operand. Whole tiles of
bfloat16 with 16 x 16 scales are encoded once for both operands (`nvfp4_2d`).

Casts are `constants.Nvfp4Cast`. `streams` is (row_stream, column_stream, batch); for matrix, generator and HOW see
`tiles`. The Hadamard transform of a column operand pads R to a multiple of 16. LOWERED: the amax of a stochastic cast
is at most 2^110, so its scaled elements can be computed times 2^-14 without loss.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from microfloat.kernels.constants import Nvfp4Cast
from microfloat.kernels.device import fp4, scales
from microfloat.kernels.device.convert import WORDS_BF16, encode_e4m3_scale, float_of
from microfloat.kernels.device.grid_reduction import arrive, offer_count, publish_two
from microfloat.kernels.device.nvfp4_2d import bytes_of, cast_tiles, fold_tiles, load_halves, takes
from microfloat.kernels.device.packed import add_f16x2, count_halves
from microfloat.kernels.device.random import block_words, load_seed, zero_again, zero_like
from microfloat.kernels.device.tiles import (
    Bounds,
    group_of,
    over_columns,
    over_rows,
    prefetch_later,
    program,
    store_octs,
    store_pairs,
    store_quads,
    store_tile_scale,
    tile_of_program,
)

CODES = tl.constexpr(0)
VALUES = tl.constexpr(1)
FOLDED = tl.constexpr(2)
TILED = tl.constexpr(3)
TOGETHER = tl.constexpr(4)  # rows of 128x128 scales are padded to a multiple of this (`microfloat.layout`)


class Operand(NamedTuple):
    """Pointers of an operand: codes, scales and tensor scale to write, and the amax to read."""

    out: tl.tensor
    scale: tl.tensor | None
    tensor_scale: tl.tensor
    amax: tl.tensor


# The maximum of each block (or 16 x 16 tile) is mapped to 6 or to 4, whichever has the smaller error (docs/numerics.md
# 2.6). The order of additions is part of the definition, and no multiplication may be fused with an addition.


@triton.jit
def candidate(amax_bits, level, K: tl.constexpr, HW: tl.constexpr):
    """Stored byte, encode factor and dec(byte) of one candidate: K = 1 maps the maximum to 6, K = 1.5 to 4."""
    base = tl.div_rn(float_of(amax_bits), 6.0) * level.encode
    stored = encode_e4m3_scale(tl.minimum(base * K, 448.0), HW)
    factor, value = scales.e4m3_factor(stored, level.decode, False, HW)
    return stored, factor, value


@triton.jit
def row_error(block, factor, value, amax, CAST: tl.constexpr, HW: tl.constexpr):
    """Sum of the 16 errors of a block, from left to right."""
    total = 0.0  # 0 + error is error
    for i in tl.static_range(16):
        v = fp4.nearest_value(block[i] * factor, HW)
        d = tl.div_rn((v * value) * amax, CAST.CAPACITY) - block[i]
        if CAST.RULE == scales.FOUR_OVER_SIX_MSE:
            error = d * d
        else:
            error = tl.abs(d)
        if i == 0:
            total = error
        else:
            total = total + error
    return total


@triton.jit
def sum_tree(t, N: tl.constexpr, M: tl.constexpr):
    """Errors of rows [16 * N, M] -> errors of tiles [N, M], summed as t[i] + t[i + 8], then + 4, + 2, + 1."""
    t = tl.sum(tl.reshape(t, [N, 2, 8, M]), 1)
    t = tl.sum(tl.reshape(t, [N, 2, 4, M]), 1)
    t = tl.sum(tl.reshape(t, [N, 2, 2, M]), 1)
    return tl.sum(tl.reshape(t, [N, 2, M]), 1)


@triton.jit
def load_level(amax_ptr, index, inside, CAST: tl.constexpr):
    """First-level scale of an operand, from its amax or (PER_ROW) from the amax of each row."""
    if CAST.RULE == scales.ONE_LEVEL:
        amax = tl.zeros([], tl.float32)
    elif CAST.PER_ROW:
        amax = tl.load(amax_ptr + index, mask=inside, other=0.0)
    else:
        amax = tl.load(amax_ptr)
    return scales.tensor_level(amax, CAST)


@triton.jit
def choose_rows(
    block, amax, level, CAST: tl.constexpr, LOWERED: tl.constexpr, HW: tl.constexpr, NB: tl.constexpr, BM: tl.constexpr
):
    """Stored byte, encode factor and decoded scale of blocks along rows."""
    if CAST.RULE < scales.FOUR_OVER_SIX_MAE:
        return scales.e4m3_scale(amax, level, CAST, LOWERED, HW)
    else:
        stored6, factor6, value6 = candidate(amax, level, 1.0, HW)
        stored4, factor4, value4 = candidate(amax, level, 1.5, HW)
        error6 = row_error(block, factor6, value6, level.amax, CAST, HW)
        error4 = row_error(block, factor4, value4, level.amax, CAST, HW)
        if CAST.TILE:
            N: tl.constexpr = BM // 16
            error6 = tl.trans(sum_tree(tl.trans(error6), N, NB))
            error4 = tl.trans(sum_tree(tl.trans(error4), N, NB))
            better = (error4 < error6).to(tl.int32)
            better = tl.reshape(tl.broadcast_to(better[:, :, None], [NB, N, 16]), [NB, BM]) != 0
        else:
            better = error4 < error6
        return _chosen(better, amax, stored6, factor6, value6, stored4, factor4, value4)


@triton.jit
def _chosen(better, amax, stored6, factor6, value6, stored4, factor4, value4):
    bad = amax > 0x7F800000
    stored = tl.where(bad, 0x7F, tl.where(better, stored4, stored6))
    factor = tl.where(bad, float("nan"), tl.where(better, factor4, factor6))
    return stored, factor, tl.where(bad, float("nan"), tl.where(better, value4, value6))


@triton.jit
def choose_columns(
    low, high, amax_low, amax_high, level_low, level_high, CAST: tl.constexpr, LOWERED: tl.constexpr, HW: tl.constexpr,
    G: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Stored bytes, encode factors and decoded scales of blocks along both columns of words, as pairs."""
    if CAST.RULE < scales.FOUR_OVER_SIX_MAE:
        s, f, v = scales.e4m3_scale(amax_low, level_low, CAST, LOWERED, HW)
        if CAST.TILE:
            return (s, s), (f, f), (v, v)
        else:
            s2, f2, v2 = scales.e4m3_scale(amax_high, level_high, CAST, LOWERED, HW)
            return (s, s2), (f, f2), (v, v2)
    else:
        s6, f6, v6 = candidate(amax_low, level_low, 1.0, HW)
        s4, f4, v4 = candidate(amax_low, level_low, 1.5, HW)
        r6, g6, u6 = candidate(amax_high, level_high, 1.0, HW)
        r4, g4, u4 = candidate(amax_high, level_high, 1.5, HW)
        error6 = row_error(low, f6, v6, level_low.amax, CAST, HW)
        error4 = row_error(low, f4, v4, level_low.amax, CAST, HW)
        other6 = row_error(high, g6, u6, level_high.amax, CAST, HW)
        other4 = row_error(high, g4, u4, level_high.amax, CAST, HW)
        if CAST.TILE:
            N: tl.constexpr = W // 8
            error6 = _columns_tree(error6, other6, G, N)
            error4 = _columns_tree(error4, other4, G, N)
            better = (error4 < error6).to(tl.int32)
            better = tl.reshape(tl.broadcast_to(better[:, :, None], [G, N, 8]), [G, W]) != 0
            also = better
        else:
            better = error4 < error6
            also = other4 < other6
        s, f, v = _chosen(better, amax_low, s6, f6, v6, s4, f4, v4)
        s2, f2, v2 = _chosen(also, amax_high, r6, g6, u6, r4, g4, u4)
        return (s, s2), (f, f2), (v, v2)


@triton.jit
def _columns_tree(low, high, G: tl.constexpr, N: tl.constexpr):
    """Errors [G, N] of tiles from those of first and second columns [G, 8 * N], in the order of `sum_tree`."""
    a = tl.sum(tl.reshape(low, [G, N, 2, 4]), 2)
    b = tl.sum(tl.reshape(high, [G, N, 2, 4]), 2)
    a = tl.sum(tl.reshape(a, [G, N, 2, 2]), 2)
    b = tl.sum(tl.reshape(b, [G, N, 2, 2]), 2)
    return tl.sum(a, 2) + tl.sum(b, 2)


@triton.constexpr_function
def can_lower(cast):
    """True if a cast may compute its elements times 2^-14: it is stochastic and has a single amax to check."""
    if cast is None:
        return False
    cast = Nvfp4Cast(*cast)
    return cast.STOCHASTIC and not cast.PER_ROW and cast.RULE != scales.ONE_LEVEL


@triton.jit
def is_modest(amax_ptr, CAST: tl.constexpr):
    """True if elements times 2^-14 are exact: the block factor, at least ``6 / A``, stays normal unless A > 2^110."""
    if can_lower(CAST):
        return tl.load(amax_ptr) <= 2.0**110
    else:
        return True


@triton.jit
def fold_rows(made, stored, level, operand, bounds, CAST: tl.constexpr, LOWERED: tl.constexpr, HOW: tl.constexpr):
    """Store a tile of the row operand folded to FP8; returns the number of elements that changed.

    `made`: the arguments of `row_values`; `bounds`: with the stored length of a row.
    """
    R, length, row0, col0 = bounds
    block, words, factor, value, random = made
    r = tl.arange(0, HOW.BM)[None, :]
    down, up = scales.fold_scales(stored, stored, CAST.OUTPUT == TILED)
    v = fp4.row_values(block, words, factor, value * down, random, CAST.STOCHASTIC, LOWERED, True, HOW.HW)
    q = ()
    lossy = tl.zeros_like(stored)
    for i in tl.static_range(4):
        codes, changed = fp4.fold_words(v[2 * i], v[2 * i + 1], HOW.HW)
        q, lossy = q + (codes,), add_counts(lossy, changed, HOW.HW)
    codes = tl.join(tl.join(q[0], q[2]), tl.join(q[1], q[3]))  # [NB, BM, 2, 2], in order
    quad = tl.arange(0, HOW.BN // 16)[:, None, None, None] * 4
    quad += tl.arange(0, 2)[None, None, :, None] * 2 + tl.arange(0, 2)[None, None, None, :]
    out_tile = operand.out + row0.to(tl.int64) * length + col0
    sizes = (length - col0, R - row0)
    store_quads(out_tile, codes, r[:, :, None, None], quad, sizes[0], sizes[1], length, 8, CAST.ALIGNED, HOW.EVEN)
    if CAST.OUTPUT == TILED:
        store_tile_scale(operand.scale, up * level.stored, row0 // 128, col0 // 128, (length + 127) // 128, TOGETHER)
    else:
        tl.store(operand.scale + (col0 // 128) * R + row0 + r, up * level.stored, mask=r < R - row0)
    return count_halves(lossy) if HOW.HW else tl.sum(tl.sum(lossy, 1), 0)


@triton.jit
def add_counts(a, b, HW: tl.constexpr):
    """Sum of two numbers of `fold_words`."""
    return add_f16x2(a, b) if HW else a + b


@triton.jit
def fold_columns(made, stored, levels, operand, bounds, CAST: tl.constexpr, LOWERED: tl.constexpr, HOW: tl.constexpr):
    """`fold_rows` of the column operand; stored bytes and levels are pairs, for both columns of words."""
    length, C, row0, col0 = bounds
    blocks, words, factors, values, random = made
    G: tl.constexpr = HOW.BM // 16
    W: tl.constexpr = HOW.BN // 2
    if CAST.OUTPUT == TILED:
        down, up = scales.fold_scales(stored[0], stored[1], True)
        scale, tiles = up * levels[0].stored, (length + 127) // 128
        store_tile_scale(operand.scale, scale, col0 // 128, row0 // 128, tiles, TOGETHER)
        values = (values[0] * down, values[1] * down)
    else:
        c = tl.arange(0, W)[None, :] * 2
        at = operand.scale + (row0 // 128) * C + col0 + c
        down, up = scales.fold_scales(stored[0], stored[0], False)
        tl.store(at, up * levels[0].stored, mask=c < C - col0)
        down2, up = scales.fold_scales(stored[1], stored[1], False)
        tl.store(at + 1, up * levels[1].stored, mask=c + 1 < C - col0)
        values = (values[0] * down, values[1] * down2)
    v = fp4.column_values(blocks, words, factors, values, random, CAST.STOCHASTIC, LOWERED, True, HOW.HW)
    first, second = (), ()
    lossy = tl.zeros_like(stored[0])
    for i in tl.static_range(4):
        a, changed = fp4.fold_words(v[4 * i], v[4 * i + 1], HOW.HW)
        b, more = fp4.fold_words(v[4 * i + 2], v[4 * i + 3], HOW.HW)
        first, second = first + (bytes_of(a, b, 0x6420, HOW.HW),), second + (bytes_of(a, b, 0x7531, HOW.HW),)
        lossy = add_counts(lossy, add_counts(changed, more, HOW.HW), HOW.HW)
    out_tile = operand.out + col0.to(tl.int64) * length + row0
    for number in tl.static_range(2):
        q = second if number else first
        codes = tl.reshape(tl.join(tl.join(q[0], q[2]), tl.join(q[1], q[3])), [G, W, 4])
        codes = tl.reshape(tl.permute(codes, [1, 0, 2]), [W, 4 * G])
        c, quad = tl.arange(0, W)[:, None] * 2 + number, tl.arange(0, 4 * G)[None, :]
        store_quads(out_tile, codes, c, quad, length - row0, C - col0, length, 8, CAST.ALIGNED, HOW.EVEN)
    return count_halves(lossy) if HOW.HW else tl.sum(tl.sum(lossy, 1), 0)


@triton.jit
def nvfp4_rows(
    matrix, row0, col0, operand, level, generator, CAST: tl.constexpr, LOWERED: tl.constexpr, HOW: tl.constexpr
):
    """Cast one tile into the row operand; returns the number of elements that a fold changed."""
    NB: tl.constexpr = HOW.BN // 16
    x_ptr, R, C, stride_r, stride_c = matrix
    out_ptr, scale_ptr, tensor_scale_ptr, amax_ptr = operand
    seed, stream, batch, origin = generator
    x_tile = x_ptr + row0.to(tl.int64) * stride_r + col0.to(tl.int64) * stride_c
    rows = R - row0
    cols = C - col0
    words, block = fp4.load_row_blocks(x_tile, rows, cols, stride_r, stride_c, HOW.KIND, HOW.EVEN, NB, HOW.BM)
    if CAST.SIGNS >= 0:
        cols = (cols + 15) // 16 * 16
        words, block = fp4.hadamard_row_blocks(block, CAST.SIGNS, HOW.KIND, HOW.HW)
        amax = fp4.row_block_amax(words, block, WORDS_BF16, False, HOW.HW)
    else:
        amax = fp4.row_block_amax(words, block, HOW.KIND, False, HOW.HW)
    if CAST.TILE:
        amax = over_rows(amax, NB, HOW.BM, 16)
    b = tl.arange(0, NB)[:, None]
    r = tl.arange(0, HOW.BM)[None, :]
    if CAST.PER_ROW:
        level = load_level(amax_ptr, row0 + r, r < rows, CAST)
    stored, factor, value = choose_rows(block, amax, level, CAST, LOWERED, HOW.HW, NB, HOW.BM)
    random = (0, 0, 0, 0)
    if CAST.STOCHASTIC:
        zero = zero_like(amax, HOW.HW)
        random = block_words(seed, row0 - origin + r + zero, col0 // 16 + b + zero, stream, batch, HOW.HW)
    length = C
    if CAST.SIGNS >= 0:
        length = (C + 15) // 16 * 16
    inside = (r < rows) & (b * 16 < cols)
    lossy = 0
    if CAST.OUTPUT >= FOLDED:
        made = (block, words, factor, value, random)
        lossy = fold_rows(made, stored, level, operand, Bounds(R, length, row0, col0), CAST, LOWERED, HOW)
    elif CAST.OUTPUT == CODES:
        first, second = fp4.row_octs(block, words, factor, amax > 0x7F800000, random, CAST.STOCHASTIC, LOWERED, HOW.HW)
        out_tile = out_ptr + row0.to(tl.int64) * ((length + 1) // 2) + col0 // 2
        if CAST.ALIGNED and HOW.EVEN:
            both = (first.to(tl.int64) & 0xFFFFFFFF) | (second.to(tl.int64) << 32)
            at = out_tile.to(tl.pointer_type(tl.int64)) + (r * (length // 16) + b)
            tl.store(tl.multiple_of(at, [8, 8]), both)
        else:
            octs = tl.join(first, second)
            store_octs(
                out_tile, octs, tl.arange(0, HOW.BM)[None, :, None], b[:, :, None] * 2 + tl.arange(0, 2)[None, None, :],
                rows, cols, (length + 1) // 2, CAST.ALIGNED, HOW.EVEN,
            )  # fmt: skip
        if CAST.TILE:
            tiles = (C + 15) // 16
            at = scale_ptr + ((row0 + r) // 16) * tiles + col0 // 16 + b
            tl.store(at, stored.to(tl.uint8), mask=inside & (r % 16 == 0))
        else:
            at = scale_ptr + (row0 + r) * ((length + 15) // 16) + col0 // 16 + b
            tl.store(at, stored.to(tl.uint8), mask=None if HOW.EVEN else inside)
    else:
        values = fp4.row_values(block, words, factor, value, random, CAST.STOCHASTIC, LOWERED, False, HOW.HW)
        out_tile = out_ptr + row0.to(tl.int64) * length + col0
        w = b[:, :, None, None] * 8 + tl.arange(0, 2)[None, None, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
        store_pairs(
            out_tile, fp4.stack8(values), r[:, :, None, None], w, rows, cols, length, 16, CAST.ALIGNED, HOW.EVEN
        )
    if CAST.PER_ROW and CAST.OUTPUT < FOLDED:
        if col0 == 0:
            tl.store(tensor_scale_ptr + row0 + r, level.stored, mask=r < rows)
    elif CAST.OUTPUT < FOLDED:  # noqa: SIM102  # a constant beside a tensor
        if (row0 == 0) & (col0 == 0):
            tl.store(tensor_scale_ptr, level.stored)
    return lossy


@triton.jit
def nvfp4_columns(
    matrix, row0, col0, operand, level, generator, CAST: tl.constexpr, LOWERED: tl.constexpr, HOW: tl.constexpr
):
    """Cast one tile into the column operand; returns the number of elements that a fold changed."""
    G: tl.constexpr = HOW.BM // 16
    W: tl.constexpr = HOW.BN // 2
    x_ptr, R, C, stride_r, stride_c = matrix
    out_ptr, scale_ptr, tensor_scale_ptr, amax_ptr = operand
    seed, stream, batch, origin = generator
    x_tile = x_ptr + row0.to(tl.int64) * stride_r + col0.to(tl.int64) * stride_c
    rows = R - row0
    cols = C - col0
    words, low, high = fp4.load_column_blocks(x_tile, rows, cols, stride_r, stride_c, HOW.KIND, HOW.EVEN, G, W)
    length = R
    if CAST.SIGNS >= 0:
        MODEST: tl.constexpr = LOWERED and CAST.RULE == scales.TWO_LEVEL
        length = (R + 15) // 16 * 16
        rows = length - row0
        words, low, high = fp4.hadamard_column_blocks(low, high, CAST.SIGNS, HOW.KIND, MODEST, HOW.HW)
        amax_low, amax_high = fp4.column_block_amax(words, low, high, WORDS_BF16, False, HOW.HW)
    else:
        amax_low, amax_high = fp4.column_block_amax(words, low, high, HOW.KIND, False, HOW.HW)
    if CAST.TILE:
        amax_low = over_columns(amax_low, amax_high, G, W, 16)
        amax_high = amax_low
    g = tl.arange(0, G)[:, None]
    c = tl.arange(0, W)[None, :] * 2
    level_low, level_high = level, level
    if CAST.PER_ROW:
        level_low = load_level(amax_ptr, col0 + c, c < cols, CAST)
        level_high = load_level(amax_ptr, col0 + c + 1, c + 1 < cols, CAST)
    stored, factors, values = choose_columns(
        low, high, amax_low, amax_high, level_low, level_high, CAST, LOWERED, HOW.HW, G, W
    )
    random = ((0, 0, 0, 0), (0, 0, 0, 0))
    if CAST.STOCHASTIC:
        zero = zero_like(amax_low, HOW.HW)
        blocks = (row0 - origin) // 16 + g + zero
        first = block_words(seed, col0 + c + zero, blocks, stream, batch, HOW.HW)
        random = (first, block_words(seed, col0 + c + 1 + zero, blocks, stream, batch, HOW.HW))
    lossy = 0
    if CAST.OUTPUT >= FOLDED:
        made, levels = ((low, high), words, factors, values, random), (level_low, level_high)
        lossy = fold_columns(made, stored, levels, operand, Bounds(length, C, row0, col0), CAST, LOWERED, HOW)
    elif CAST.OUTPUT == CODES:
        ld = (length + 1) // 2
        out_tile = out_ptr + col0.to(tl.int64) * ld + row0 // 2
        cs = tl.arange(0, W)[:, None] * 2
        octs = tl.arange(0, 2 * G)[None, :]
        bad = (amax_low > 0x7F800000, amax_high > 0x7F800000)
        made = fp4.column_octs((low, high), words, factors, bad, random, CAST.STOCHASTIC, LOWERED, HOW.HW)
        for second in tl.static_range(2):
            codes = tl.reshape(tl.permute(tl.join(made[second][0], made[second][1]), [1, 0, 2]), [W, 2 * G])
            store_octs(out_tile, codes, cs + second, octs, cols, rows, ld, CAST.ALIGNED, HOW.EVEN)
        blocks = (length + 15) // 16
        if CAST.TILE:
            at = scale_ptr + ((col0 + c) // 16) * blocks + row0 // 16 + g
            tl.store(at, stored[0].to(tl.uint8), mask=(c % 16 == 0) & (c < cols) & (g * 16 < rows))
        else:
            at = scale_ptr + (col0 + c) * blocks + row0 // 16 + g
            tl.store(at, stored[0].to(tl.uint8), mask=None if HOW.EVEN else (c < cols) & (g * 16 < rows))
            tl.store(at + blocks, stored[1].to(tl.uint8), mask=None if HOW.EVEN else (c + 1 < cols) & (g * 16 < rows))
    else:
        values = fp4.column_values((low, high), words, factors, values, random, CAST.STOCHASTIC, LOWERED, False, HOW.HW)
        out_tile = out_ptr + row0.to(tl.int64) * C + col0
        for i in tl.static_range(16):
            w = tl.arange(0, W)[None, :]  # not c // 2: only so are neighbours seen to be neighbours
            store_pairs(out_tile, values[i], g * 16 + i, w, rows, cols, C, 16, CAST.ALIGNED, HOW.EVEN)
    if CAST.PER_ROW and CAST.OUTPUT < FOLDED:
        if row0 == 0:
            tl.store(tensor_scale_ptr + col0 + c, level_low.stored, mask=c < cols)
            tl.store(tensor_scale_ptr + col0 + c + 1, level_high.stored, mask=c + 1 < cols)
    elif CAST.OUTPUT < FOLDED:  # noqa: SIM102  # a constant beside a tensor
        if (row0 == 0) & (col0 == 0):
            tl.store(tensor_scale_ptr, level_low.stored)
    return lossy


@triton.jit
def nvfp4_tile(
    matrix, row0, col0, row, column, levels, seed, streams, ROW: tl.constexpr, COLUMN: tl.constexpr,
    LOWERED: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Cast one tile into both operands, with the results of `shared_levels` and `shared_seed`; returns the numbers of
    elements that folds changed.
    """
    row_level, column_level = levels
    row_stream, column_stream, batch, origin = streams
    lossy_rows, lossy_columns = 0, 0
    if ROW is not None:
        generator = (seed, row_stream, batch, origin)
        lossy_rows = nvfp4_rows(matrix, row0, col0, row, row_level, generator, ROW, LOWERED and can_lower(ROW), HOW)
    if COLUMN is not None:
        generator = (seed, column_stream, batch, origin)
        lossy_columns = nvfp4_columns(
            matrix, row0, col0, column, column_level, generator, COLUMN, LOWERED and can_lower(COLUMN), HOW
        )
    return lossy_rows, lossy_columns


@triton.jit
def shared_level(amax_ptr, CAST: tl.constexpr):
    """First-level scale of a whole operand; () without a cast or with one scale per row."""
    if CAST is not None and not CAST.PER_ROW:
        return load_level(amax_ptr, 0, True, CAST)
    else:
        return ()


@triton.jit
def shared_levels(row, column, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """First-level scales of both operands."""
    return shared_level(row.amax, ROW), shared_level(column.amax, COLUMN)


@triton.jit
def shared_seed(seed_ptr, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """The call seed; () where no cast is stochastic."""
    if (ROW is not None and ROW.STOCHASTIC) or (COLUMN is not None and COLUMN.STOCHASTIC):
        return load_seed(seed_ptr)
    else:
        return ()


@triton.jit
def nvfp4_2d(matrix, row0, col0, row, column, lossy_ptr, scratch_ptr, CAST: tl.constexpr, HOW: tl.constexpr):
    """Cast one tile into both operands by `device.nvfp4_2d`."""
    x_ptr, R, C, stride_r, stride_c = matrix
    row_out, row_scale, row_tensor_scale, amax_ptr = row
    column_out, column_scale, column_tensor_scale, _amax = column
    x_tile = x_ptr + row0.to(tl.int64) * stride_r + col0.to(tl.int64) * stride_c
    halves = load_halves(x_tile, R - row0, C - col0, stride_r, stride_c, HOW.BM, HOW.BN)
    level = load_level(amax_ptr, 0, True, CAST)
    PER_BYTE: tl.constexpr = 2 if CAST.OUTPUT == CODES else 1
    row_tile = row_out + row0.to(tl.int64) * (C // PER_BYTE) + col0 // PER_BYTE
    column_tile = column_out + col0.to(tl.int64) * (R // PER_BYTE) + row0 // PER_BYTE
    if CAST.OUTPUT == CODES:
        bounds = Bounds(R, C, row0, col0)
        cast_tiles(halves, level, row_tile, row_scale, column_tile, column_scale, bounds, CAST, HOW.HW, HOW.BM, HOW.BN)
        if (row0 == 0) & (col0 == 0):
            tl.store(row_tensor_scale, level.stored)
            tl.store(column_tensor_scale, level.stored)
    else:
        scale, lossy = fold_tiles(halves, level, row_tile, column_tile, R, C, CAST, HOW.HW)
        store_tile_scale(row_scale, scale, row0 // 128, col0 // 128, C // 128, TOGETHER)
        store_tile_scale(column_scale, scale, col0 // 128, row0 // 128, R // 128, TOGETHER)
        publish_counts((lossy, lossy), lossy_ptr, scratch_ptr, HOW.HW)


@triton.jit
def publish_counts(lossy, lossy_ptr, scratch_ptr, HW: tl.constexpr):
    """Add the numbers of changed elements of both operands to those of the other programs."""
    offer_count(lossy[0] + tl.zeros([], tl.int32), scratch_ptr, HW)
    offer_count(lossy[1] + tl.zeros([], tl.int32), scratch_ptr + 2, HW)
    publish_two(arrive(scratch_ptr + 1, HW), tl.num_programs(0), lossy_ptr, scratch_ptr, HW)


@triton.jit
def nvfp4_tiles(
    matrix, row, column, seed_ptr, streams, pid, lossy_ptr, scratch_ptr, ROW: tl.constexpr, COLUMN: tl.constexpr,
    LOWERED: tl.constexpr, STEPS: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Cast STEPS tiles, one below the other; a fold is counted, and takes one."""
    x_ptr, R, C, stride_r, stride_c = matrix
    levels = shared_levels(row, column, ROW, COLUMN)
    seed = shared_seed(seed_ptr, ROW, COLUMN)
    across = (C + HOW.BN - 1) // HOW.BN
    row0 = (pid // across) * (HOW.BM * (STEPS if STEPS > 1 else 1))
    col0 = (pid % across) * HOW.BN
    if STEPS <= 1:
        if lossy_ptr is not None and STEPS == 1:
            prefetch_later(x_ptr, pid, across, R, stride_r, HOW)
        lossy = nvfp4_tile(matrix, row0, col0, row, column, levels, seed, streams, ROW, COLUMN, LOWERED, HOW)
        if lossy_ptr is not None:
            publish_counts(lossy, lossy_ptr, scratch_ptr, HOW.HW)
    else:
        end = tl.minimum(row0 + HOW.BM * STEPS, R)
        while row0 < end:
            # An opaque zero keeps the offsets of rows inside the loop; computed before it, they take all registers.
            again = (x_ptr, R, C, stride_r + 16 * zero_again(row0, HOW.HW), stride_c)
            nvfp4_tile(again, row0, col0, row, column, levels, seed, streams, ROW, COLUMN, LOWERED, HOW)
            row0 += HOW.BM


@triton.jit
def quantize_nvfp4(
    x_ptr, row_out, row_scale, row_tensor_scale, column_out, column_scale, column_tensor_scale, row_amax, column_amax,
    seed_ptr, lossy_ptr, scratch_ptr, plan_ptr, tails_ptr, row_stream, column_stream, batch, EACH,
    R, C, stride_r, stride_c, STEPS: tl.constexpr, MATRIX: tl.constexpr,
):  # fmt: skip
    """Cast a matrix; one program per STEPS tiles of BM x BN. MATRIX: `constants.Pass`.

    `row_amax`, `column_amax`: pointers to float32; equal casts read the same one. `lossy_ptr`: int64[2] of elements
    that folding changed in the row and the column operand; folds alone. With STEPS = 0 a program has one tile, of rows
    in groups, each of which is cast as a matrix of its own: amaxes are those of groups, and `batch` is the group. EACH:
    the number of these amaxes with a plan (`casts.groups`), else the rows of each group.
    """
    ROW: tl.constexpr = MATRIX.ROW
    COLUMN: tl.constexpr = MATRIX.COLUMN
    HOW: tl.constexpr = MATRIX.HOW
    BN: tl.constexpr = HOW.BN
    pid, R, C, stride_r, stride_c = program(R, C, stride_r, stride_c, HOW.INDEX64)
    origin = 0
    if STEPS == 0:
        row0 = pid // ((C + BN - 1) // BN) * HOW.BM
        batch = group_of(row0, R, plan_ptr, EACH)
        if ROW is not None:
            row_amax += batch
        if COLUMN is not None:
            column_amax += batch
        if plan_ptr is not None:
            first = tl.load(plan_ptr + row0 // 128)
            x_ptr = tl.where(first < 0, tails_ptr, x_ptr)
            x_ptr += (tl.where(first < 0, ~first * 128, first) - row0).to(tl.int64) * stride_r
            origin = tl.load(plan_ptr + 2 * (R // 128) + EACH + batch)  # the group's first padded row
    matrix = (x_ptr, R, C, stride_r, stride_c)
    row = Operand(row_out, row_scale, row_tensor_scale, row_amax)
    column = Operand(column_out, column_scale, column_tensor_scale, column_amax)
    streams = (row_stream, column_stream, batch, origin)
    lowered = False
    if HOW.HW and (can_lower(ROW) or can_lower(COLUMN)):
        lowered = is_modest(row_amax, ROW) & is_modest(column_amax, COLUMN)
    if takes(ROW, COLUMN, HOW.KIND, HOW.EVEN, HOW.BM):
        # From the last tile to the first: the amax pass ended there, so these tiles are still in the L2 cache.
        tile = pid if STEPS == 0 else tl.num_programs(0) - 1 - pid  # the amax of a group is that of tile `pid`
        row0, col0 = (tile // (C // BN)) * HOW.BM, (tile % (C // BN)) * BN
        nvfp4_2d(matrix, row0, col0, row, column, lossy_ptr, scratch_ptr, ROW, HOW)
    elif lowered:
        nvfp4_tiles(matrix, row, column, seed_ptr, streams, pid, lossy_ptr, scratch_ptr, ROW, COLUMN, True, STEPS, HOW)
    else:
        nvfp4_tiles(matrix, row, column, seed_ptr, streams, pid, lossy_ptr, scratch_ptr, ROW, COLUMN, False, STEPS, HOW)


@triton.jit
def transform(x_ptr, out_ptr, R, C, stride_r, stride_c, MASK: tl.constexpr, HOW: tl.constexpr):
    """Hadamard transform along rows in bfloat16, [R, C rounded up to 16]; one program per BM x BN tile."""
    _pid, _across, source, bounds = tile_of_program(x_ptr, R, C, stride_r, stride_c, HOW)
    R, C, row0, col0 = bounds
    words, block = fp4.load_row_blocks(
        source.x, R - row0, C - col0, source.stride_r, source.stride_c, HOW.KIND, False, HOW.BN // 16, HOW.BM
    )
    words, block = fp4.hadamard_row_blocks(block, MASK, HOW.KIND, HOW.HW)
    length = (C + 15) // 16 * 16
    out_tile = out_ptr + row0.to(tl.int64) * length + col0
    b = tl.arange(0, HOW.BN // 16)[:, None]
    r = tl.arange(0, HOW.BM)[None, :]
    for i in tl.static_range(8):
        store_pairs(out_tile, words[i], r, b * 8 + i, R - row0, length - col0, length, 16, True, False)
