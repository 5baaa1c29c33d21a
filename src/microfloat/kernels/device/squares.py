"""MX casts of whole tiles into both operands with one load: words of codes in squares of lanes (`takes`).

A lane holds a *square* of 8 rows of 8 neighbouring elements, as four words of two elements in each row. A warp of 8 x 4
lanes covers 32 x 64 elements, and with them whole blocks along rows and along columns. Both kinds of amax come from the
same registers. Codes of four rows are packed into one int32 in registers; only these words pass through shared memory,
once, so that the column operand is written in whole lines.

Magnitudes, amaxes and factors are stored two to a word as bfloat16 bits, for two neighbouring columns or rows.

Shapes [8, 4, N, 4]: 8 lanes side by side, 4 below each other, N = BM / 32 x BN / 64 warps of a program, 4 words a row.
"""

import triton
import triton.language as tl

from microfloat.kernels.constants import BlockCast
from microfloat.kernels.device.convert import (
    WORDS_BF16,
    element_bits,
    encode_pair,
    encode_quad,
    high_half,
    low_half,
    max_bf16x2_nan,
    packed_abs,
)
from microfloat.kernels.device.packed import both_high, both_low, fma_bf16x2, packed_pairs, packed_quads, scale_word
from microfloat.kernels.device.produce import produce_pair
from microfloat.kernels.device.scales import E8M0
from microfloat.kernels.device.tiles import SCALE_COLUMN_MAJOR, scale_offset


@triton.constexpr_function
def takes(row, column, kind, even):
    """True if this module serves the casts `row` and `column`: nearest MX codes of a byte, whole tiles of bfloat16."""
    if row is None or column is None or kind != WORDS_BF16 or not even:
        return False
    for cast in (BlockCast(*row), BlockCast(*column)):
        if cast.FAMILY != E8M0 or cast.BLOCK != 32 or cast.TILE or element_bits(cast.MB, cast.BIAS) == 4:
            return False
        if cast.STOCHASTIC or cast.OUTPUT != 0:
            return False
    return True


@triton.jit
def max_halves(a, b):
    """Halfwise maximum of two words of magnitudes, as integers: NaN is the largest."""
    return (tl.maximum(a >> 16, b >> 16) << 16) | tl.maximum(a & 0xFFFF, b & 0xFFFF)


@triton.jit
def larger(a, b, HW: tl.constexpr):
    """Halfwise maximum of two words of magnitudes, NaN wins."""
    if HW:
        return max_bf16x2_nan(a, b)
    else:
        return max_halves(a, b)


@triton.jit
def largest(words, AXIS: tl.constexpr, HW: tl.constexpr):
    """Halfwise maximum of words of magnitudes along an axis, NaN wins."""
    if HW:
        return tl.reduce(words, AXIS, max_bf16x2_nan)
    else:
        return tl.reduce(words, AXIS, max_halves)


@triton.jit
def magnitudes(word, HW: tl.constexpr):
    """Halfwise magnitude of a word of bfloat16."""
    if HW:
        return packed_abs(word, WORDS_BF16)
    else:
        return word & 0x7FFF7FFF


@triton.jit
def block_factors(amax, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, HW: tl.constexpr):
    """Halfwise encode factors ``2^(127 - byte)`` as bfloat16, by the rule of `scales.e8m0_scale`.

    0x7FFF, a NaN, for a block with a NaN or Inf.
    """
    EMAX: tl.constexpr = BIAS + (0 if BIAS == 15 else 1)
    # The largest amax with byte 0, minus the amount that carries into the exponent at the threshold of the mantissa.
    LEAST: tl.constexpr = ((EMAX << 7) - (0x80 - ((THRESHOLD + 0xFFFF) >> 16))) * 65537
    amax = larger(amax, LEAST, HW)
    factors = 0x7F007F00 - ((amax - LEAST) & 0x7F807F80)
    if HW:
        return fma_bf16x2(amax, 0, factors)  # Inf and NaN times zero
    else:
        low = tl.where((amax & 0xFFFF) >= 0x7F80, 0x7FFF, factors & 0xFFFF)
        high = tl.where((amax >> 16) >= 0x7F80, 0x7FFF, factors >> 16)
        return low | (high << 16)


@triton.jit
def stored_bytes(factors):
    """Scale bytes in bits 0..7 and 16..23 from encode factors; 255 for NaN."""
    return ((-8388737 - factors) >> 7) & 0x00FF00FF  # halfwise (0xFF7F - factor) >> 7, that is 254 - exponent


@triton.jit
def load_squares(source, rows, cols, PRODUCER: tl.constexpr, F: tl.constexpr, HOW: tl.constexpr):
    """First local row and word of every lane, and eight tensors [8, 4, N, 4] of words, for `cast_squares`."""
    WC: tl.constexpr = HOW.BN // 64
    n = tl.arange(0, (HOW.BM // 32) * WC)[None, None, :, None]
    r = (n // WC) * 32 + tl.arange(0, 4)[None, :, None, None] * 8
    w = (n % WC) * 32 + tl.arange(0, 8)[:, None, None, None] * 4
    at = w + tl.arange(0, 4)[None, None, None, :]
    words = ()
    for p in tl.static_range(8):
        raw, _low, _high = produce_pair(source, r + p, at, rows, cols, PRODUCER, F, WORDS_BF16, True, 0, HOW.HW)
        words = words + (raw,)
    return r, w, words


@triton.jit
def square_factors(words, ROW: tl.constexpr, COLUMN: tl.constexpr, HW: tl.constexpr):
    """Encode factors of blocks: [8, N, 4] for columns, and four tensors [2, 4, N] for pairs of rows."""
    N: tl.constexpr = words[0].shape[2]
    top = magnitudes(words[0], HW)
    rows = ()
    for j in tl.static_range(4):
        a, b = magnitudes(words[2 * j], HW), magnitudes(words[2 * j + 1], HW)
        top = larger(top, larger(a, b, HW), HW)
        a, b = largest(a, 3, HW), largest(b, 3, HW)
        pair = tl.reshape(larger(both_low(a, b, HW), both_high(a, b, HW), HW), [2, 4, 4, N])
        rows = rows + (block_factors(largest(pair, 1, HW), ROW.BIAS, ROW.RULE, HW),)
    return block_factors(largest(top, 1, HW), COLUMN.BIAS, COLUMN.RULE, HW), rows


@triton.jit
def row_factors(pair, SECOND: tl.constexpr, HW: tl.constexpr):
    """Words [8, 4, N, 1] with the factor of the first or SECOND row of pairs [2, 4, N] in both halves."""
    one = both_high(pair, pair, HW) if SECOND else both_low(pair, pair, HW)
    N: tl.constexpr = pair.shape[2]
    return tl.reshape(tl.broadcast_to(one[:, None], [2, 4, 4, N]), [8, 4, N])[:, :, :, None]


@triton.jit
def row_codes(word, factors, MB: tl.constexpr, BIAS: tl.constexpr, HW: tl.constexpr):
    """Codes of the words of a row, as int16 pairs."""
    if HW:
        return packed_pairs(scale_word(word, factors), MB, BIAS)
    else:
        low, high = low_half(word, WORDS_BF16), high_half(word, WORDS_BF16)
        first, second = low_half(factors, WORDS_BF16), high_half(factors, WORDS_BF16)
        return encode_pair(low * first, high * second, 0, MB, BIAS, False, HW)


@triton.jit
def column_codes(a, b, c, d, factors, MB: tl.constexpr, BIAS: tl.constexpr, HW: tl.constexpr):
    """Codes of the words of four rows, as int32 quads of the first and the second column."""
    if HW:
        return packed_quads(
            scale_word(a, factors), scale_word(b, factors), scale_word(c, factors), scale_word(d, factors), MB, BIAS
        )
    else:
        first, second = low_half(factors, WORDS_BF16), high_half(factors, WORDS_BF16)
        low = encode_quad(
            low_half(a, WORDS_BF16) * first, low_half(b, WORDS_BF16) * first, low_half(c, WORDS_BF16) * first,
            low_half(d, WORDS_BF16) * first, 0, MB, BIAS, False, HW,
        )  # fmt: skip
        high = encode_quad(
            high_half(a, WORDS_BF16) * second, high_half(b, WORDS_BF16) * second, high_half(c, WORDS_BF16) * second,
            high_half(d, WORDS_BF16) * second, 0, MB, BIAS, False, HW,
        )  # fmt: skip
        return low, high


@triton.jit
def store_columns(low, high, out_tile, R, BM: tl.constexpr, BN: tl.constexpr):
    """Store two quads [8, 4, N, 4] each of the first and the second column of every word."""
    quads = tl.join(tl.join(low[0], high[0]), tl.join(low[1], high[1]))  # column of a word, quad
    quads = tl.reshape(quads, [8, 4, BM // 32, BN // 64, 4, 2, 2])
    quads = tl.reshape(tl.permute(quads, [3, 0, 4, 5, 2, 1, 6]), [BN, BM // 4])
    at = out_tile.to(tl.pointer_type(tl.int32))
    at = at + (tl.arange(0, BN)[:, None] * (R // 4) + tl.arange(0, BM // 4)[None, :])
    tl.store(tl.multiple_of(at, [16, 16]), quads)


@triton.jit
def bytes_together(stored):
    """int16 of bytes 0 and 2 of a word."""
    return (stored | (stored >> 8)).to(tl.int16)


@triton.jit
def store_row_scales(factors, scale_ptr, row0, col0, R, C, LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Store the scales of rows; each of the four lanes of a block stores those of one pair of rows."""
    WC: tl.constexpr = BN // 64
    i = tl.arange(0, 4)[None, :, None, None]
    pair = factors[0][:, None]
    for j in tl.static_range(1, 4):
        pair = tl.where(i == j, factors[j][:, None], pair)
    stored = stored_bytes(pair)  # [2, 4, 4, N]
    if LAYOUT == SCALE_COLUMN_MAJOR:
        n = tl.arange(0, (BM // 32) * WC)[None, None, None, :]
        k = col0 // 32 + (n % WC) * 2 + tl.arange(0, 2)[:, None, None, None]
        r = row0 + (n // WC) * 32 + tl.arange(0, 4)[None, None, :, None] * 8 + i * 2
        at = scale_ptr + scale_offset(r, k, R, C // 32, LAYOUT)
        tl.store(at.to(tl.pointer_type(tl.int16)), bytes_together(stored))
    else:
        stored = tl.reshape(tl.join(stored, stored >> 16), [2, 4, 4, BM // 32, WC, 2])
        stored = tl.reshape(tl.permute(stored, [3, 2, 1, 5, 4, 0]), [BM, BN // 32])
        r = row0 + tl.arange(0, BM)[:, None]
        k = col0 // 32 + tl.arange(0, BN // 32)[None, :]
        tl.store(scale_ptr + scale_offset(r, k, R, C // 32, LAYOUT), stored.to(tl.uint8))


@triton.jit
def store_column_scales(factors, scale_ptr, row0, col0, R, C, LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Store the scales [8, N, 4] of columns, two to a word; each of the four lanes that hold them stores one word."""
    WC: tl.constexpr = BN // 64
    g = tl.arange(0, 4)[None, :, None, None]
    w = tl.arange(0, 4)[None, None, None, :]
    stored = tl.sum(tl.where(w == g, stored_bytes(factors)[:, None, :, :], 0), 3)  # [8, 4, N]
    if LAYOUT == SCALE_COLUMN_MAJOR:
        n = tl.arange(0, (BM // 32) * WC)[None, None, :]
        c = (n % WC) * 64 + tl.arange(0, 8)[:, None, None] * 8 + tl.arange(0, 4)[None, :, None] * 2
        at = scale_ptr + scale_offset(col0 + c, row0 // 32 + n // WC, C, R // 32, LAYOUT)
        tl.store(at.to(tl.pointer_type(tl.int16)), bytes_together(stored))
    else:
        stored = tl.reshape(tl.join(stored, stored >> 16), [8, 4, BM // 32, WC, 2])
        stored = tl.reshape(tl.permute(stored, [3, 0, 1, 4, 2]), [BN, BM // 32])
        c = col0 + tl.arange(0, BN)[:, None]
        k = row0 // 32 + tl.arange(0, BM // 32)[None, :]
        tl.store(scale_ptr + scale_offset(c, k, C, R // 32, LAYOUT), stored.to(tl.uint8))


@triton.jit
def cast_squares(tile, outputs, bounds, ROW: tl.constexpr, COLUMN: tl.constexpr, HOW: tl.constexpr):
    """Cast a tile of `load_squares` both ways; `outputs`: codes and scales of the row, then of the column operand."""
    row_out, row_scale, column_out, column_scale = outputs
    r, w, words = tile
    R, C, row0, col0 = bounds
    row_tile = row_out + row0.to(tl.int64) * C + col0
    column_tile = column_out + col0.to(tl.int64) * R + row0
    columns, rows = square_factors(words, ROW, COLUMN, HOW.HW)
    factors = columns[:, None, :, :]
    low, high = (), ()
    for q in tl.static_range(2):
        a, b = column_codes(
            words[4 * q], words[4 * q + 1], words[4 * q + 2], words[4 * q + 3], factors, COLUMN.MB, COLUMN.BIAS, HOW.HW
        )
        low, high = low + (a,), high + (b,)
    store_columns(low, high, column_tile, R, HOW.BM, HOW.BN)
    for p in tl.static_range(8):
        codes = row_codes(words[p], row_factors(rows[p // 2], p % 2, HOW.HW), ROW.MB, ROW.BIAS, HOW.HW)
        at = row_tile.to(tl.pointer_type(tl.int16)) + ((r + p) * (C // 2) + w + tl.arange(0, 4)[None, None, None, :])
        tl.store(tl.multiple_of(at, [8, 8, 8, 8]), codes)  # 8 bytes per lane
    store_row_scales(rows, row_scale, row0, col0, R, C, ROW.SCALE_LAYOUT, HOW.BM, HOW.BN)
    store_column_scales(columns, column_scale, row0, col0, R, C, COLUMN.SCALE_LAYOUT, HOW.BM, HOW.BN)
