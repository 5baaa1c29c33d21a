"""Casts with one scale per block of a row: MX 1x32 and FP8 1x128, into the row and the column operand in one launch.

One program casts one tile of BM x BN elements. It casts along rows, where a few neighbouring lanes hold a block, and
along columns, where one thread holds 32 rows of two columns; the second reading of the tile hits the L1 cache. Whole
tiles of bfloat16 that are cast to MX both ways are read once (`squares`).

Casts are `constants.BlockCast`. For source, bounds, generator and HOW see `tiles`.
"""

import triton
import triton.language as tl

from microfloat.kernels.device import tiles
from microfloat.kernels.device.convert import (
    ELEMENTWISE,
    WORDS_BF16,
    bf16_word,
    bits_of,
    drop_nan,
    element_bits,
    encode_pair,
    encode_quad,
    float_of,
    high_half,
    larger_half,
    largest_of_four,
    low_half,
    magnitude_bits,
    packed_abs,
    packed_reduce,
    quantized_pair,
)
from microfloat.kernels.device.packed import factor_word, packed_pairs, packed_quads, scale_word
from microfloat.kernels.device.produce import LOAD, produce_rows
from microfloat.kernels.device.random import column_quads, lane_pairs, load_seed
from microfloat.kernels.device.scales import E8M0, FP32, e8m0_scale, fp32_scale
from microfloat.kernels.device.squares import cast_squares, load_squares, takes

CODES = tl.constexpr(0)
VALUES = tl.constexpr(1)
COLUMN_ALIGN = tl.constexpr(8)  # bytes of a row that a lane of a column operand reads at once


@triton.jit
def block_scale(amax_bits, epsilon, CAST: tl.constexpr):
    """Stored scale, encode factor and decode factor of a block."""
    if CAST.FAMILY == E8M0:
        stored, factor = e8m0_scale(amax_bits, CAST.BIAS, CAST.RULE)
        value = float_of(tl.where(stored == 0, 0x00400000, stored << 23))
        return stored.to(tl.uint8), factor, tl.where(stored == 255, float("nan"), value)
    else:
        stored, factor = fp32_scale(amax_bits, epsilon, CAST)
        return stored, factor, stored


@triton.jit
def rows_amax(values, IGNORE_NAN: tl.constexpr, NB: tl.constexpr, T: tl.constexpr, HOW: tl.constexpr):
    """Amax bits [NB, BM] of blocks along rows; `values`: (raw, low, high) of [NB * T, BM, ., 4] words."""
    raw, low, high = values
    if HOW.HW and HOW.KIND != ELEMENTWISE:
        m = packed_reduce(packed_reduce(packed_abs(raw, HOW.KIND), 3, HOW.KIND, IGNORE_NAN), 2, HOW.KIND, IGNORE_NAN)
        m = packed_reduce(tl.reshape(m, [NB, T, HOW.BM]), 1, HOW.KIND, IGNORE_NAN)
        return larger_half(m, HOW.KIND, IGNORE_NAN)
    else:
        m = tl.maximum(magnitude_bits(low, IGNORE_NAN), magnitude_bits(high, IGNORE_NAN))
        return tl.max(tl.reshape(tl.max(tl.max(m, 3), 2), [NB, T, HOW.BM]), 1)


@triton.jit
def largest_bits(phases, V: tl.constexpr, IGNORE_NAN: tl.constexpr):
    """Bits of the largest magnitude in four rows, among the first (V = 1) or second (V = 2) elements of words."""
    m = tl.maximum(magnitude_bits(phases[0][V], IGNORE_NAN), magnitude_bits(phases[1][V], IGNORE_NAN))
    n = tl.maximum(magnitude_bits(phases[2][V], IGNORE_NAN), magnitude_bits(phases[3][V], IGNORE_NAN))
    return tl.maximum(m, n)


@triton.jit
def columns_amax(phases, IGNORE_NAN: tl.constexpr, NB: tl.constexpr, G: tl.constexpr, HOW: tl.constexpr):
    """Amax bits [NB, W] of blocks along the first and the second column of every word.

    `phases`: tiles (raw, low, high) of shape [NB * G, Q, W], one for each of four neighbouring rows.
    """
    W: tl.constexpr = HOW.BN // 2
    if HOW.HW and HOW.KIND != ELEMENTWISE:
        m = packed_reduce(largest_of_four(phases, HOW.KIND, IGNORE_NAN), 1, HOW.KIND, IGNORE_NAN)
        m = packed_reduce(tl.reshape(m, [NB, G, W]), 1, HOW.KIND, IGNORE_NAN)
        amax_low, amax_high = bits_of(low_half(m, HOW.KIND)), bits_of(high_half(m, HOW.KIND))
        if IGNORE_NAN:
            amax_low, amax_high = drop_nan(amax_low), drop_nan(amax_high)
        return amax_low, amax_high
    else:
        m, n = largest_bits(phases, 1, IGNORE_NAN), largest_bits(phases, 2, IGNORE_NAN)
        m = tl.max(tl.reshape(tl.max(m, 1), [NB, G, W]), 1)
        return m, tl.max(tl.reshape(tl.max(n, 1), [NB, G, W]), 1)


@triton.jit
def spread_rows(x, NB: tl.constexpr, T: tl.constexpr, BM: tl.constexpr):
    """Repeat values of blocks [NB, BM] for their lanes, [NB * T, BM, 1, 1]."""
    return tl.reshape(tl.broadcast_to(x[:, None, :], [NB, T, BM]), [NB * T, BM])[:, :, None, None]


@triton.jit
def spread_columns(x, NB: tl.constexpr, G: tl.constexpr, W: tl.constexpr):
    """Repeat values of blocks [NB, W] for their groups of rows, [NB * G, 1, W]."""
    return tl.reshape(tl.broadcast_to(x[:, None, :], [NB, G, W]), [NB * G, W])[:, None, :]


@triton.jit
def codes_at(out_ptr, row0, element0, length, CAST: tl.constexpr):
    """Pointer to the codes of an operand at element `element0` of row `row0`; a row has `length` elements."""
    if CAST.OUTPUT == CODES and element_bits(CAST.MB, CAST.BIAS) == 4:
        return out_ptr + row0.to(tl.int64) * ((length + 1) // 2) + element0 // 2
    else:
        return out_ptr + row0.to(tl.int64) * length + element0


@triton.jit
def load_rows(source, rows, cols, LANE: tl.constexpr, PRODUCER: tl.constexpr, F: tl.constexpr, HOW: tl.constexpr):
    """Local rows, local words and values of a tile for `cast_rows`; a lane holds LANE (8 or 16) neighbours."""
    r, w = tiles.lane_rows(HOW.BM), tiles.lane_words(HOW.BN, LANE)
    return r, w, produce_rows(source, r, w, rows, cols, 1, PRODUCER, F, 0, HOW)


@triton.jit
def cast_rows(tile, out_tile, scale_ptr, generator, epsilon, bounds, CAST: tl.constexpr, HOW: tl.constexpr):
    """The row operand of one tile: blocks along C."""
    MB: tl.constexpr = CAST.MB
    BIAS: tl.constexpr = CAST.BIAS
    IGNORE_NAN: tl.constexpr = CAST.FAMILY == FP32
    BLOCK: tl.constexpr = CAST.BLOCK
    STOCHASTIC: tl.constexpr = CAST.STOCHASTIC
    HW: tl.constexpr = HOW.HW
    BM: tl.constexpr = HOW.BM
    LANE: tl.constexpr = 16 if STOCHASTIC else 8  # elements of a lane: a draw of random bytes serves 16
    T: tl.constexpr = BLOCK // LANE
    NB: tl.constexpr = HOW.BN // BLOCK
    BITS: tl.constexpr = 4 if element_bits(MB, BIAS) == 4 else 8
    R, C, row0, col0 = bounds
    rows = R - row0
    cols = C - col0
    r, w, values = tile
    raw, low, high = values[0]
    amax = rows_amax(values[0], IGNORE_NAN, NB, T, HOW)
    if CAST.TILE:
        amax = tiles.over_rows(amax, NB, BM, BLOCK)
    stored, factor, value = block_scale(amax, epsilon, CAST)
    factors = spread_rows(factor_word(factor, factor), NB, T, BM)
    factor = spread_rows(factor, NB, T, BM)
    if STOCHASTIC:
        seed_ptr, stream, batch = generator
        lanes = col0 // 16 + tl.arange(0, NB * T)[:, None]
        random = lane_pairs(load_seed(seed_ptr), row0 + tl.arange(0, BM)[None, :], lanes, stream, batch, NB * T, BM)
    else:
        random = 0
    if CAST.OUTPUT == CODES:
        if HW and HOW.KIND == WORDS_BF16 and not IGNORE_NAN and not STOCHASTIC:
            codes = packed_pairs(scale_word(raw, factors), MB, BIAS)
        else:
            codes = encode_pair(low * factor, high * factor, random, MB, BIAS, STOCHASTIC, HW)
        ld = (C // 2 if HOW.PAIRS else (C + 1) // 2) if BITS == 4 else C
        tiles.store_pairs(out_tile, codes, r, w, rows, cols, ld, BITS, HOW.PAIRS, HOW.EVEN)
        k = tl.arange(0, NB)[:, None]
        rs = tl.arange(0, BM)[None, :]
        blocks = (C + BLOCK - 1) // BLOCK
        at = scale_ptr + tiles.scale_offset(row0 + rs, col0 // BLOCK + k, R, blocks, CAST.SCALE_LAYOUT)
        if CAST.TILE:
            at = scale_ptr + (row0 + rs) // BLOCK * blocks + col0 // BLOCK + k
            tl.store(at, stored, mask=(rs < rows) & (k * BLOCK < cols) & (rs % BLOCK == 0))
        else:
            tl.store(at, stored, mask=None if HOW.EVEN else (rs < rows) & (k * BLOCK < cols))
    else:
        value = spread_rows(value, NB, T, BM)
        a, b = quantized_pair(low * factor, high * factor, random, random >> 8, MB, BIAS, STOCHASTIC, HW)
        word = bf16_word(a * value, b * value, HW)
        tiles.store_pairs(out_tile, word, r, w, rows, cols, C, 16, HOW.PAIRS, HOW.EVEN)


@triton.jit
def load_columns(source, rows, cols, BLOCK: tl.constexpr, PRODUCER: tl.constexpr, F: tl.constexpr, HOW: tl.constexpr):
    """Local rows, local words and four phases of a tile for `cast_columns`; of GATE_GRADIENTS those of both gradients.

    Each lane holds 16 or 32 rows of two columns.
    """
    Q: tl.constexpr = 8 if BLOCK >= 32 else 4
    g = tl.arange(0, HOW.BM // (4 * Q))[:, None, None]
    w = tl.arange(0, HOW.BN // 2)[None, None, :]
    r = g * (4 * Q) + tl.arange(0, Q)[None, :, None] * 4
    return r, w, produce_rows(source, r, w, rows, cols, 4, PRODUCER, F, COLUMN_ALIGN, HOW)


@triton.jit
def cast_columns(tile, out_tile, scale_ptr, generator, epsilon, bounds, CAST: tl.constexpr, HOW: tl.constexpr):
    """Cast one tile into the column operand, whose blocks run along R."""
    MB: tl.constexpr = CAST.MB
    BIAS: tl.constexpr = CAST.BIAS
    IGNORE_NAN: tl.constexpr = CAST.FAMILY == FP32
    BLOCK: tl.constexpr = CAST.BLOCK
    STOCHASTIC: tl.constexpr = CAST.STOCHASTIC
    EVEN: tl.constexpr = HOW.EVEN
    QUADS: tl.constexpr = HOW.QUADS
    HW: tl.constexpr = HOW.HW
    Q: tl.constexpr = 8 if BLOCK >= 32 else 4
    GROUPS: tl.constexpr = HOW.BM // (4 * Q)
    NB: tl.constexpr = HOW.BM // BLOCK
    G: tl.constexpr = GROUPS // NB  # threads (warps) that share a block
    W: tl.constexpr = HOW.BN // 2
    BITS: tl.constexpr = 4 if element_bits(MB, BIAS) == 4 else 8
    R, C, row0, col0 = bounds
    rows = R - row0
    cols = C - col0
    r, w, phases = tile
    amax_low, amax_high = columns_amax(phases, IGNORE_NAN, NB, G, HOW)
    if CAST.TILE:
        amax_low = tiles.over_columns(amax_low, amax_high, NB, W, BLOCK)
        amax_high = amax_low
    stored_low, factor_low, value_low = block_scale(amax_low, epsilon, CAST)
    stored_high, factor_high, value_high = block_scale(amax_high, epsilon, CAST)
    fl = spread_columns(factor_low, NB, G, W)
    fh = spread_columns(factor_high, NB, G, W)
    random_low, random_high = 0, 0
    if STOCHASTIC:
        seed_ptr, stream, batch = generator
        seed = load_seed(seed_ptr)
        block16 = row0 // 16 + tl.arange(0, GROUPS)[:, None, None] * (Q // 4)
        random_low = column_quads(seed, col0 + 2 * w, block16, stream, batch, Q // 4, GROUPS, W)
        random_high = column_quads(seed, col0 + 2 * w + 1, block16, stream, batch, Q // 4, GROUPS, W)
    if CAST.OUTPUT == CODES:
        ld = (R // 2 if QUADS else (R + 1) // 2) if BITS == 4 else R
        quads = tl.arange(0, GROUPS * Q)[None, :]
        column = tl.arange(0, W)[:, None] * 2
        if HW and HOW.KIND == WORDS_BF16 and not IGNORE_NAN and not STOCHASTIC:
            factors = spread_columns(factor_word(factor_low, factor_high), NB, G, W)
            a, b, c, d = (
                scale_word(phases[0][0], factors), scale_word(phases[1][0], factors),
                scale_word(phases[2][0], factors), scale_word(phases[3][0], factors),
            )  # fmt: skip
            codes, codes_high = packed_quads(a, b, c, d, MB, BIAS)
        else:
            a, b, c, d = phases[0][1] * fl, phases[1][1] * fl, phases[2][1] * fl, phases[3][1] * fl
            codes = encode_quad(a, b, c, d, random_low, MB, BIAS, STOCHASTIC, HW)
            a, b, c, d = phases[0][2] * fh, phases[1][2] * fh, phases[2][2] * fh, phases[3][2] * fh
            codes_high = encode_quad(a, b, c, d, random_high, MB, BIAS, STOCHASTIC, HW)
        codes = tiles.transpose_quads(codes, GROUPS, Q, W)
        tiles.store_quads(out_tile, codes, column, quads, rows, cols, ld, BITS, QUADS, EVEN)
        codes = tiles.transpose_quads(codes_high, GROUPS, Q, W)
        tiles.store_quads(out_tile, codes, column + 1, quads, rows, cols, ld, BITS, QUADS, EVEN)
        k = tl.arange(0, NB)[:, None]
        cs = tl.arange(0, W)[None, :] * 2
        blocks = (R + BLOCK - 1) // BLOCK
        at_low = scale_ptr + tiles.scale_offset(col0 + cs, row0 // BLOCK + k, C, blocks, CAST.SCALE_LAYOUT)
        at_high = scale_ptr + tiles.scale_offset(col0 + cs + 1, row0 // BLOCK + k, C, blocks, CAST.SCALE_LAYOUT)
        if CAST.TILE:
            at_low = scale_ptr + (col0 + cs) // BLOCK * blocks + row0 // BLOCK + k
            tl.store(at_low, stored_low, mask=(k * BLOCK < rows) & (cs < cols) & (cs % BLOCK == 0))
        else:
            tl.store(at_low, stored_low, mask=None if EVEN else (k * BLOCK < rows) & (cs < cols))
            tl.store(at_high, stored_high, mask=None if EVEN else (k * BLOCK < rows) & (cs + 1 < cols))
    else:
        vl = spread_columns(value_low, NB, G, W)
        vh = spread_columns(value_high, NB, G, W)
        for p in tl.static_range(4):
            random, random2 = random_low >> (8 * p), random_high >> (8 * p)
            a, b = quantized_pair(phases[p][1] * fl, phases[p][2] * fh, random, random2, MB, BIAS, STOCHASTIC, HW)
            tiles.store_pairs(out_tile, bf16_word(a * vl, b * vh, HW), r + p, w, rows, cols, C, 16, HOW.PAIRS, EVEN)


@triton.jit
def quantize_blocks(
    x_ptr, row_out, row_scale, column_out, column_scale, seed_ptr, plan_ptr, tails_ptr, row_stream, column_stream,
    batch, row_epsilon, column_epsilon, R, C, stride_r, stride_c, ROW: tl.constexpr, COLUMN: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """Cast a matrix; one program per BM x BN tile, counted along rows of tiles. ROW and COLUMN are casts, or None."""
    pid, across, source, bounds = tiles.tile_of_program(x_ptr, R, C, stride_r, stride_c, HOW, plan_ptr, tails_ptr)
    R, C, row0, col0 = bounds
    rows = R - row0
    cols = C - col0
    if takes(ROW, COLUMN, HOW.KIND, HOW.EVEN):
        squares = load_squares(source, rows, cols, LOAD, 0, HOW)
        tiles.prefetch_later(x_ptr, pid, across, R, source.stride_r, HOW, plan_ptr)
        outputs = (row_out, row_scale, column_out, column_scale)
        cast_squares(squares, outputs, bounds, ROW, COLUMN, HOW)
    else:
        # All loads first: the second reading of the tile meets the first on its way.
        if ROW is not None:
            row_words = load_rows(source, rows, cols, 16 if ROW.STOCHASTIC else 8, LOAD, 0, HOW)
        if COLUMN is not None:
            column_words = load_columns(source, rows, cols, COLUMN.BLOCK, LOAD, 0, HOW)
        if COLUMN is not None and COLUMN.OUTPUT == CODES:
            tiles.prefetch_later(x_ptr, pid, across, R, source.stride_r, HOW, plan_ptr)
        if ROW is not None:
            row_tile = codes_at(row_out, row0, col0, C, ROW)
            generator = (seed_ptr, row_stream, batch)
            cast_rows(row_words, row_tile, row_scale, generator, row_epsilon, bounds, ROW, HOW)
        if COLUMN is not None:
            if COLUMN.OUTPUT == VALUES:
                column_tile = column_out + row0.to(tl.int64) * C + col0  # in the layout of the matrix
            else:
                column_tile = codes_at(column_out, col0, row0, R, COLUMN)
            generator = (seed_ptr, column_stream, batch)
            cast_columns(column_words, column_tile, column_scale, generator, column_epsilon, bounds, COLUMN, HOW)
