"""MX casts folded to one FP8 scale per 128 elements (or per 128 x 128), from the original matrix.

Elements are quantized by the MX rule, block by block, and then shifted to the largest scale of their group of 128:
``q' = enc(dec(q) * 2^(b - Eg))`` (docs/numerics.md, section 9). The result is an ordinary FP8_1x128 or FP8_128x128
operand. An element changes only if its shifted value is no multiple of E4M3's smallest step; changed elements are
counted.

One program casts one 128 x 128 tile into the row and the column operand. Whole tiles of bfloat16 that are cast to E4M3
are read once (`squares`): their codes are decoded to float16, which holds the shifted values exactly over four more
binades, and encoded again.

Casts are the `constants.ScaledCast` of the MX format. For source, bounds, generator and HOW see `tiles`.
"""

import triton
import triton.language as tl

from microfloat.kernels.casts.blocks import columns_amax, rows_amax, spread_columns, spread_rows
from microfloat.kernels.constants import ScaledCast
from microfloat.kernels.device import tiles
from microfloat.kernels.device.convert import (
    WORDS_BF16,
    WORDS_F16,
    decode,
    encode_integer,
    encode_pair,
    encode_quad,
    float_of,
    high_half,
    low_half,
    quantized_pair,
)
from microfloat.kernels.device.grid_reduction import arrive, offer_count, publish_two
from microfloat.kernels.device.packed import add_f16x2, count_halves, factor_word, fold_pair, scale_word, shift_word
from microfloat.kernels.device.produce import LOAD, produce_rows
from microfloat.kernels.device.random import column_quads, lane_pairs, load_seed
from microfloat.kernels.device.scales import e8m0_scale
from microfloat.kernels.device.squares import (
    both_high,
    both_low,
    larger,
    largest,
    load_squares,
    row_factors,
    square_factors,
    store_columns,
    stored_bytes,
)

TILE = tl.constexpr(128)


@triton.constexpr_function
def folds(row, column, tile, kind, even):
    """True if `squares` serves the cast: nearest E4M3 both ways, 1x128 scales, bfloat16 in whole tiles (`even`)."""
    if tile or row is None or column is None or kind != WORDS_BF16 or not even:
        return False
    return all(
        cast.MB == 3 and cast.BIAS == 7 and not cast.STOCHASTIC for cast in (ScaledCast(*row), ScaledCast(*column))
    )


@triton.jit
def shift_words(stored, group, HW: tl.constexpr):
    """Halfwise ``2^(6 + d)`` as float16, where ``d = max(byte - Eg, -20)``; NaN in a NaN group.

    `stored`, `group`: two scale bytes to a word, and the largest bytes of their groups.
    """
    exponent = larger(group, 0x00010001, HW)
    above = exponent + 0x00010001
    field = larger(stored + 0x00150015, above, HW) - exponent
    return (field << 10) | ((above & 0x01000100) * 0x7E)


@triton.jit
def scale_of(group):
    """FP32 scale ``2^(Eg - 127)`` of a group with this largest byte."""
    return float_of(tl.where(group == 255, 0x7FC00000, tl.maximum(group, 1) << 23))


@triton.jit
def sixty_fourth(word):
    """Halfwise product of float16 with 2^-6."""
    PTX: tl.constexpr = "{ .reg .b32 m; mov.b32 m, 0x24002400; mul.rn.f16x2 $0, $1, m; }"
    return tl.inline_asm_elementwise(PTX, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def fold_quad(a, b, c, d, shift, HW: tl.constexpr):
    """Four scaled floats -> int32 of four shifted codes, and marks of lossy elements for `lossy_elements`."""
    if HW:
        PTX: tl.constexpr = (
            "{ .reg .b16 p, q; .reg .b32 h, g, v, u, m, n; "
            "cvt.rn.satfinite.e4m3x2.f32 p, $3, $2; cvt.rn.f16x2.e4m3x2 h, p; "
            "cvt.rn.satfinite.e4m3x2.f32 p, $5, $4; cvt.rn.f16x2.e4m3x2 g, p; "
            "mul.rn.f16x2 v, h, $7; mul.rn.f16x2 u, g, $7; "
            "cvt.rn.satfinite.e4m3x2.f16x2 p, v; cvt.rn.satfinite.e4m3x2.f16x2 q, u; mov.b32 $0, {p, q}; "
            "mov.b32 m, 0x5A005A00; mov.b32 n, 0xDA00DA00; "  # adding and subtracting 192 rounds to an eighth
            "abs.f16x2 h, h; mul.rn.sat.f16x2 h, h, $6; add.rn.f16x2 v, h, m; add.rn.f16x2 v, v, n; "
            "abs.f16x2 g, g; mul.rn.sat.f16x2 g, g, $6; add.rn.f16x2 u, g, m; add.rn.f16x2 u, u, n; "
            "set.ne.u32.f16x2 v, v, h; set.ne.u32.f16x2 u, u, g; add.u32 $1, v, u; }"
        )
        return tl.inline_asm_elementwise(
            PTX,
            "=&r,=&r,r,r,r,r,r,r",
            [a, b, c, d, shift, sixty_fourth(shift)],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        factor = low_half(shift, WORDS_F16) * 0.015625
        p, lossy0 = fold_one(a, factor)
        q, lossy1 = fold_one(b, factor)
        r, lossy2 = fold_one(c, factor)
        s, lossy3 = fold_one(d, factor)
        return p | (q << 8) | (r << 16) | (s << 24), lossy0 + lossy1 + lossy2 + lossy3


@triton.jit
def fold_one(x, factor):
    """Shifted code of one float, and 1 if the shift changed its value, by integer arithmetic."""
    value = decode(encode_integer(x, 0, 3, 7, False), 3, 7) * factor
    code = encode_integer(value, 0, 3, 7, False)
    changed = (decode(code, 3, 7) != value) & (value == value)  # NaN does not count
    return code, tl.where(changed, 1, 0)


@triton.jit
def lossy_elements(lossy, HW: tl.constexpr):
    """Number of lossy elements from sums of the marks of `fold_quad`: counts, or at most 64 masks of 16 bits a half."""
    if HW:
        minus = -lossy
        return 2 * (minus & 0xFFFF) + (minus >> 16)
    else:
        return lossy


@triton.jit
def row_groups(stored, HW: tl.constexpr):
    """Largest scale bytes over 128 elements of pairs of rows: four tensors [2, 4, 8] -> four [4, 8]."""
    first, second = largest(stored[0], 0, HW), largest(stored[1], 0, HW)
    third, fourth = largest(stored[2], 0, HW), largest(stored[3], 0, HW)
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    pairs = largest(tl.reshape(pairs, [4, 4, 2, 2, 2]), 2, HW)  # over two warps side by side
    pairs = tl.reshape(tl.broadcast_to(pairs[:, :, None], [4, 4, 2, 2, 2]), [4, 8, 2, 2])
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def fold_row(word, factors, shift, HW: tl.constexpr):
    """Words [8, 4, 8, 4] of a row -> int32 of four codes [8, 4, 8, 2], and marks of lossy elements."""
    first, second = tl.split(tl.reshape(word, [8, 4, 8, 2, 2]))
    if HW:
        first, second = scale_word(first, factors), scale_word(second, factors)
        return fold_quad(
            low_half(first, WORDS_BF16), high_half(first, WORDS_BF16), low_half(second, WORDS_BF16),
            high_half(second, WORDS_BF16), shift, HW,
        )  # fmt: skip
    else:
        factor = low_half(factors, WORDS_BF16)
        return fold_quad(
            low_half(first, WORDS_BF16) * factor, high_half(first, WORDS_BF16) * factor,
            low_half(second, WORDS_BF16) * factor, high_half(second, WORDS_BF16) * factor, shift, HW,
        )  # fmt: skip


@triton.jit
def fold_column(a, b, c, d, factors, shift, SECOND: tl.constexpr, HW: tl.constexpr):
    """Words of four rows -> int32 of four codes of their first (or SECOND) column, and marks of lossy elements."""
    if HW:
        a, b, c, d = scale_word(a, factors), scale_word(b, factors), scale_word(c, factors), scale_word(d, factors)
    if SECOND:
        a, b, c, d = (
            high_half(a, WORDS_BF16), high_half(b, WORDS_BF16), high_half(c, WORDS_BF16), high_half(d, WORDS_BF16)
        )  # fmt: skip
        factor = high_half(factors, WORDS_BF16)
    else:
        a, b, c, d = low_half(a, WORDS_BF16), low_half(b, WORDS_BF16), low_half(c, WORDS_BF16), low_half(d, WORDS_BF16)
        factor = low_half(factors, WORDS_BF16)
    if HW:
        return fold_quad(a, b, c, d, shift, HW)
    else:
        return fold_quad(a * factor, b * factor, c * factor, d * factor, shift, HW)


@triton.jit
def fold_square_columns(words, factors, shift, out_tile, R, HW: tl.constexpr):
    """Store the column operand of a tile; returns the number of lossy elements of every lane, [8, 4, 8]."""
    factors = factors[:, None, :, :]
    first, second = both_low(shift, shift, HW)[:, None, :, :], both_high(shift, shift, HW)[:, None, :, :]
    low, high = (), ()
    lossy = tl.zeros_like(words[0])
    for q in tl.static_range(2):
        a, b, c, d = words[4 * q], words[4 * q + 1], words[4 * q + 2], words[4 * q + 3]
        codes, changed = fold_column(a, b, c, d, factors, first, False, HW)
        low, lossy = low + (codes,), lossy + changed
        codes, changed = fold_column(a, b, c, d, factors, second, True, HW)
        high, lossy = high + (codes,), lossy + changed
    store_columns(low, high, out_tile, R, TILE, TILE)
    return lossy_elements(tl.sum(lossy, 3), HW)


@triton.jit
def fold_square_rows(words, factors, shifts, out_tile, r, w, C, HW: tl.constexpr):
    """Store the row operand of a tile; returns the number of lossy elements of every lane, [8, 4, 8]."""
    quad = w // 2 + tl.arange(0, 2)[None, None, None, :]
    at = out_tile.to(tl.pointer_type(tl.int32)) + (r * (C // 4) + quad)
    lossy = tl.zeros([8, 4, 8, 2], tl.int32)
    for p in tl.static_range(8):
        factor, shift = row_factors(factors[p // 2], p % 2, HW), row_factors(shifts[p // 2], p % 2, HW)
        codes, changed = fold_row(words[p], factor, shift, HW)
        tl.store(tl.multiple_of(at + p * (C // 4), [8, 8, 8, 8]), codes)
        lossy += changed
    return lossy_elements(tl.sum(lossy, 3), HW)


@triton.jit
def fold_squares(tile, outputs, bounds, ROW: tl.constexpr, COLUMN: tl.constexpr, HW: tl.constexpr):
    """Cast a 128 x 128 tile of `load_squares` both ways with 1x128 scales; returns both counts of lossy elements.

    `outputs`: codes and scales of the row operand, then of the column operand.
    """
    row_out, row_scale, column_out, column_scale = outputs
    r, w, words = tile
    R, C, row0, col0 = bounds
    row_tile, row_scale = row_out + row0.to(tl.int64) * C + col0, row_scale + (col0 // 128).to(tl.int64) * R + row0
    column_tile = column_out + col0.to(tl.int64) * R + row0
    column_scale = column_scale + (row0 // 128).to(tl.int64) * C + col0
    columns, rows = square_factors(words, ROW, COLUMN, HW)
    stored_rows = ()
    for j in tl.static_range(4):
        stored_rows = stored_rows + (stored_bytes(rows[j]),)
    stored_columns = stored_bytes(columns)
    groups = row_groups(stored_rows, HW)
    group = largest(tl.reshape(stored_columns, [8, 4, 2, 4]), 1, HW)  # [8, 2, 4], over 128 elements of two columns
    store_group_scales(groups, row_scale)
    c = tl.arange(0, 2)[None, :, None] * 64 + tl.arange(0, 8)[:, None, None] * 8
    c = c + tl.arange(0, 4)[None, None, :] * 2
    tl.store(tl.join(column_scale + c, column_scale + c + 1), scale_of(tl.join(group & 0xFF, group >> 16)))

    group = tl.reshape(tl.broadcast_to(group[:, None], [8, 4, 2, 4]), [8, 8, 4])
    lossy = fold_square_columns(words, columns, shift_words(stored_columns, group, HW), column_tile, R, HW) << 16
    shifts = ()
    for j in tl.static_range(4):
        shifts = shifts + (shift_words(stored_rows[j], groups[j][None], HW),)
    lossy += fold_square_rows(words, rows, shifts, row_tile, r, w, C, HW)
    lossy = tl.sum(tl.sum(tl.sum(lossy, 2), 1), 0)
    return lossy & 0xFFFF, lossy >> 16


@triton.jit
def store_group_scales(groups, scale_ptr):
    """Store the scales of 128 rows; `groups`: the largest bytes of pairs of rows."""
    i = tl.arange(0, 8)[:, None, None]
    value = groups[0][None]
    for j in tl.static_range(1, 4):
        value = tl.where(i // 2 == j, groups[j][None], value)
    value = tl.where(i % 2 == 0, value & 0xFF, value >> 16)  # [8, 4, 8]: lane i has row i
    n = tl.arange(0, 8)[None, None, :]
    r = (n // 2) * 32 + tl.arange(0, 4)[None, :, None] * 8 + i
    tl.store(scale_ptr + r, scale_of(value), mask=n % 2 == 0)


@triton.jit
def group_scale(largest, MB: tl.constexpr, BIAS: tl.constexpr):
    """Exponent Eg and FP32 scale ``2^(Eg - 127)`` of a group from its largest byte (255 = NaN)."""
    # How many binades the element leaves free below E4M3's largest: 6 for E2M1, 5 for E2M3, 4 for E3M2 (numerics 9.2).
    OFFSET: tl.constexpr = 0 if BIAS >= 7 else (4 if BIAS == 3 else (6 if MB == 1 else 5))
    exponent = tl.maximum(largest - OFFSET, 1)
    return exponent, float_of(tl.where(largest == 255, 0x7FC00000, exponent << 23))


@triton.jit
def group_shift(byte, exponent, largest):
    """Float32 ``2^(byte - Eg)``, at least 2^-64, where no element survives; NaN in a NaN group."""
    shift = tl.maximum(byte - exponent, -64)
    return float_of(tl.where(largest == 255, 0x7FC00000, (127 + shift) << 23))


@triton.jit
def is_lossy(shifted, BIAS: tl.constexpr):
    """1 where a shifted value is no multiple of the smallest subnormal, so that its code cannot be exact."""
    SMALLEST: tl.constexpr = 2.0**-14 if BIAS == 15 else 2.0**-6
    MAGIC: tl.constexpr = 2.0**7 if BIAS == 15 else 2.0**14
    magnitude = tl.minimum(tl.abs(shifted), SMALLEST)
    changes = ((magnitude + MAGIC) - MAGIC != magnitude) & (shifted == shifted)  # NaN does not count
    return tl.where(changes, 1, 0)


@triton.jit
def fold_rows(
    source, out_tile, scale_ptr, generator, bounds, CAST: tl.constexpr, TILE: tl.constexpr, HOW: tl.constexpr
):
    """Cast a BM x 128 tile into the row operand; returns the number of lossy elements."""
    x_tile, _y, _z, stride_r, stride_c = source
    R, C, row0, col0 = bounds
    rows = R - row0
    cols = C - col0
    T: tl.constexpr = 32 // (16 if CAST.STOCHASTIC else 8)  # lanes that share a block
    r = tiles.lane_rows(HOW.BM)
    w = tiles.lane_words(128, 32 // T)
    raw, low, high = tiles.load_pair(x_tile, r, w, rows, cols, stride_r, stride_c, HOW.KIND, HOW.EVEN, 0)
    amax = rows_amax((raw, low, high), False, 4, T, HOW)
    byte, factor = e8m0_scale(amax, CAST.BIAS, CAST.RULE)
    largest = tl.max(byte, 0)  # [HOW.BM]
    if TILE:
        largest = tl.max(largest, 0)
    exponent, scale = group_scale(largest, CAST.MB, CAST.BIAS)
    if not TILE:
        exponent, largest = exponent[None, :], largest[None, :]
    shift = group_shift(byte, exponent, largest)
    if TILE:
        tiles.store_tile_scale(scale_ptr, scale, row0 // HOW.BM, col0 // 128, (C + 127) // 128, TILE)
    else:
        rs = tl.arange(0, HOW.BM)
        tl.store(scale_ptr + (col0 // 128) * R + row0 + rs, scale, mask=rs < rows)
    if HOW.HW and CAST.MB == 3 and CAST.BIAS == 7 and not CAST.STOCHASTIC:
        words = shift_word(byte, exponent, largest)
        if HOW.KIND == WORDS_BF16:
            y = scale_word(raw, spread_rows(factor_word(factor, factor), 4, T, HOW.BM))
            low, high = low_half(y, HOW.KIND), high_half(y, HOW.KIND)
        else:
            factor = spread_rows(factor, 4, T, HOW.BM)
            low, high = low * factor, high * factor
        codes, lossy = fold_pair(low, high, spread_rows(words, 4, T, HOW.BM))
        tiles.store_pairs(out_tile, codes.to(tl.int16), r, w, rows, cols, C, 8, HOW.PAIRS, HOW.EVEN)
        return count_halves(tl.reduce(tl.reduce(lossy, 3, add_f16x2), 2, add_f16x2))
    else:
        factor = spread_rows(factor, 4, T, HOW.BM)
        shift = spread_rows(shift, 4, T, HOW.BM)
        return fold_rows_by_steps(out_tile, low * factor, high * factor, shift, generator, r, w, bounds, CAST, HOW)


@triton.jit
def fold_rows_by_steps(out_tile, low, high, shift, generator, r, w, bounds, CAST: tl.constexpr, HOW: tl.constexpr):
    """The general form of `fold_rows`, for any element, in float32."""
    TMB: tl.constexpr = CAST.MB if CAST.BIAS >= 7 else 3
    TBIAS: tl.constexpr = CAST.BIAS if CAST.BIAS >= 7 else 7
    R, C, row0, col0 = bounds
    random = 0
    if CAST.STOCHASTIC:
        seed_ptr, stream, batch = generator
        lanes = col0 // 16 + tl.arange(0, 8)[:, None]
        random = lane_pairs(load_seed(seed_ptr), row0 + tl.arange(0, HOW.BM)[None, :], lanes, stream, batch, 8, HOW.BM)
    a, b = quantized_pair(low, high, random, random >> 8, CAST.MB, CAST.BIAS, CAST.STOCHASTIC, HOW.HW)
    a, b = a * shift, b * shift
    codes = encode_pair(a, b, 0, TMB, TBIAS, False, HOW.HW)
    tiles.store_pairs(out_tile, codes, r, w, R - row0, C - col0, C, 8, HOW.PAIRS, HOW.EVEN)
    lossy = is_lossy(a, TBIAS) + is_lossy(b, TBIAS)
    return tl.sum(tl.sum(tl.sum(tl.sum(lossy, 3), 2), 1), 0)


@triton.jit
def fold_columns(
    source, out_tile, scale_ptr, generator, bounds, CAST: tl.constexpr, TILE: tl.constexpr, HOW: tl.constexpr
):
    """Cast a 128 x BN tile into the column operand; returns the number of lossy elements."""
    W: tl.constexpr = HOW.BN // 2
    R, C, row0, col0 = bounds
    rows = R - row0
    cols = C - col0
    g = tl.arange(0, 4)[:, None, None]
    w = tl.arange(0, W)[None, None, :]
    r = g * 32 + tl.arange(0, 8)[None, :, None] * 4
    phases = produce_rows(source, r, w, rows, cols, 4, LOAD, 0, 4, HOW)
    amax_low, amax_high = columns_amax(phases, False, 4, 1, HOW)
    byte_low, fl = e8m0_scale(amax_low, CAST.BIAS, CAST.RULE)
    byte_high, fh = e8m0_scale(amax_high, CAST.BIAS, CAST.RULE)
    cs = tl.arange(0, W) * 2
    if TILE:
        largest_low = tl.maximum(tl.max(tl.max(byte_low, 0), 0), tl.max(tl.max(byte_high, 0), 0))
        largest_high = largest_low
        exponent_low, scale = group_scale(largest_low, CAST.MB, CAST.BIAS)
        exponent_high = exponent_low
        shift_low = group_shift(byte_low, exponent_low, largest_low)
        shift_high = group_shift(byte_high, exponent_low, largest_low)
        tiles.store_tile_scale(scale_ptr, scale, col0 // HOW.BN, row0 // 128, (R + 127) // 128, TILE)
    else:
        largest_low, largest_high = tl.max(byte_low, 0), tl.max(byte_high, 0)
        exponent_low, scale = group_scale(largest_low, CAST.MB, CAST.BIAS)
        shift_low = group_shift(byte_low, exponent_low[None, :], largest_low[None, :])
        tl.store(scale_ptr + (row0 // 128) * C + col0 + cs, scale, mask=cs < cols)
        exponent_high, scale = group_scale(largest_high, CAST.MB, CAST.BIAS)
        shift_high = group_shift(byte_high, exponent_high[None, :], largest_high[None, :])
        tl.store(scale_ptr + (row0 // 128) * C + col0 + cs + 1, scale, mask=cs + 1 < cols)
    if HOW.HW and CAST.MB == 3 and CAST.BIAS == 7 and not CAST.STOCHASTIC:
        if not TILE:
            exponent_low, exponent_high = exponent_low[None, :], exponent_high[None, :]
            largest_low, largest_high = largest_low[None, :], largest_high[None, :]
        words_low = spread_columns(shift_word(byte_low, exponent_low, largest_low), 4, 1, W)
        words_high = spread_columns(shift_word(byte_high, exponent_high, largest_high), 4, 1, W)
        quads = tl.arange(0, 32)[None, :]
        c = tl.arange(0, W)[:, None] * 2
        low, high = (), ()
        if HOW.KIND == WORDS_BF16:
            words, factors = (), spread_columns(factor_word(fl, fh), 4, 1, W)
            for p in tl.static_range(4):
                words = words + (scale_word(phases[p][0], factors),)
            for p in tl.static_range(4):
                low = low + (low_half(words[p], HOW.KIND),)
            for p in tl.static_range(4):
                high = high + (high_half(words[p], HOW.KIND),)
        else:
            fl, fh = spread_columns(fl, 4, 1, W), spread_columns(fh, 4, 1, W)
            for p in tl.static_range(4):
                low = low + (phases[p][1] * fl,)
            for p in tl.static_range(4):
                high = high + (phases[p][2] * fh,)
        lossy = fold_quads(low, words_low, out_tile, c, 0, quads, bounds, HOW)
        lossy = add_f16x2(lossy, fold_quads(high, words_high, out_tile, c, 1, quads, bounds, HOW))
        return count_halves(tl.reduce(lossy, 1, add_f16x2))
    else:
        return fold_columns_by_steps(out_tile, phases, (fl, fh), (shift_low, shift_high), generator, bounds, CAST, HOW)


@triton.jit
def store_column_quads(codes, out_tile, columns, second, quads, bounds, HOW: tl.constexpr):
    """Store quads [4, 8, W] of the first (`second` = 0) or second (1) column of every word.

    `columns` [W, 1] and `quads` [1, 32] are local indices of first columns and of quads.
    """
    R, C, row0, col0 = bounds
    codes = tiles.transpose_quads(codes, 4, 8, HOW.BN // 2)
    tiles.store_quads(out_tile, codes, columns + second, quads, R - row0, C - col0, R, 8, HOW.QUADS, HOW.EVEN)


@triton.jit
def fold_quads(column, shifts, out_tile, columns, second, quads, bounds, HOW: tl.constexpr):
    """Store the codes of four neighbours of a column; returns the sum of their lossy halves (`fold_pair`)."""
    a, b, c, d = column
    first, lossy = fold_pair(a, b, shifts)
    last, more = fold_pair(c, d, shifts)
    store_column_quads(first | (last << 16), out_tile, columns, second, quads, bounds, HOW)
    return add_f16x2(lossy, more)


@triton.jit
def fold_columns_by_steps(out_tile, phases, factors, shifts, generator, bounds, CAST: tl.constexpr, HOW: tl.constexpr):
    """The general form of `fold_columns`, in float32; `factors` and `shifts` are pairs, for both columns of words."""
    TMB: tl.constexpr = CAST.MB if CAST.BIAS >= 7 else 3
    TBIAS: tl.constexpr = CAST.BIAS if CAST.BIAS >= 7 else 7
    W: tl.constexpr = HOW.BN // 2
    _R, _C, row0, col0 = bounds
    g = tl.arange(0, 4)[:, None, None]
    w = tl.arange(0, W)[None, None, :]
    fl, fh = spread_columns(factors[0], 4, 1, W), spread_columns(factors[1], 4, 1, W)
    sl, sh = spread_columns(shifts[0], 4, 1, W), spread_columns(shifts[1], 4, 1, W)
    rl, rh = 0, 0
    if CAST.STOCHASTIC:
        seed_ptr, stream, batch = generator
        seed = load_seed(seed_ptr)
        rl = column_quads(seed, col0 + 2 * w, row0 // 16 + g * 2, stream, batch, 2, 4, W)
        rh = column_quads(seed, col0 + 2 * w + 1, row0 // 16 + g * 2, stream, batch, 2, 4, W)
    low, high = (), ()
    for p in tl.static_range(4):
        a, b = phases[p][1] * fl, phases[p][2] * fh
        a, b = quantized_pair(a, b, rl >> (8 * p), rh >> (8 * p), CAST.MB, CAST.BIAS, CAST.STOCHASTIC, HOW.HW)
        low, high = low + (a,), high + (b,)
    low = (low[0] * sl, low[1] * sl, low[2] * sl, low[3] * sl)
    high = (high[0] * sh, high[1] * sh, high[2] * sh, high[3] * sh)
    quads = tl.arange(0, 32)[None, :]
    column = tl.arange(0, W)[:, None] * 2
    codes = encode_quad(low[0], low[1], low[2], low[3], 0, TMB, TBIAS, False, HOW.HW)
    store_column_quads(codes, out_tile, column, 0, quads, bounds, HOW)
    codes = encode_quad(high[0], high[1], high[2], high[3], 0, TMB, TBIAS, False, HOW.HW)
    store_column_quads(codes, out_tile, column, 1, quads, bounds, HOW)
    lossy = lossy_of_four(low, TBIAS) + lossy_of_four(high, TBIAS)
    return tl.sum(tl.sum(tl.sum(lossy, 2), 1), 0)


@triton.jit
def lossy_of_four(values, BIAS: tl.constexpr):
    """Number of lossy elements among four shifted values."""
    a, b, c, d = values
    return is_lossy(a, BIAS) + is_lossy(b, BIAS) + is_lossy(c, BIAS) + is_lossy(d, BIAS)


@triton.jit
def fold_blocks(
    x_ptr, row_out, row_scale, column_out, column_scale, lossy_ptr, scratch_ptr, seed_ptr, plan_ptr, tails_ptr,
    row_stream, column_stream, R, C, stride_r, stride_c, ROW: tl.constexpr, COLUMN: tl.constexpr,
    ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Fold a matrix; one program per 128 x 128 tile; int64[2] of lossy elements in the row and the column operand.

    1x128 scales are stored column-major. 128x128 scales (ROW_TILE, COLUMN_TILE > 0) are stored row by row, each row
    padded to a multiple of that number.
    """
    pid, across, source, bounds = tiles.tile_of_program(x_ptr, R, C, stride_r, stride_c, HOW, plan_ptr, tails_ptr)
    R, C, row0, col0 = bounds
    lossy_rows, lossy_columns = 0, 0
    if folds(ROW, COLUMN, ROW_TILE + COLUMN_TILE, HOW.KIND, HOW.EVEN):
        squares = load_squares(source, R - row0, C - col0, LOAD, 0, HOW)
        tiles.prefetch_later(x_ptr, pid, across, R, source.stride_r, HOW, plan_ptr)
        outputs = (row_out, row_scale, column_out, column_scale)
        lossy_rows, lossy_columns = fold_squares(squares, outputs, bounds, ROW, COLUMN, HOW.HW)
    else:
        if ROW is not None:
            row_tile, generator = row_out + row0.to(tl.int64) * C + col0, (seed_ptr, row_stream, 0)
            lossy_rows = fold_rows(source, row_tile, row_scale, generator, bounds, ROW, ROW_TILE, HOW)
        if COLUMN is not None:
            column_tile, generator = column_out + col0.to(tl.int64) * R + row0, (seed_ptr, column_stream, 0)
            lossy_columns = fold_columns(source, column_tile, column_scale, generator, bounds, COLUMN, COLUMN_TILE, HOW)
    offer_count(lossy_rows + tl.zeros([], tl.int32), scratch_ptr, HOW.HW)
    offer_count(lossy_columns + tl.zeros([], tl.int32), scratch_ptr + 2, HOW.HW)
    publish_two(arrive(scratch_ptr + 1, HOW.HW), tl.num_programs(0), lossy_ptr, scratch_ptr, HOW.HW)
