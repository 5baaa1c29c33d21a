"""Squares (`squares`) folded to one scale per 128 elements: `fold` for whole tiles of bfloat16.

An E4M3 code is decoded to float16, where four more binades of its shift by ``2^d`` are exact, and encoded again. An
element is lossy where the shifted value is no multiple of E4M3's smallest step. Bytes of scales travel two to a word,
as amaxes do.
"""

import triton
import triton.language as tl

from microfloat.kernels.constants import ScaledCast
from microfloat.kernels.device.convert import (
    WORDS_BF16,
    WORDS_F16,
    decode,
    encode_integer,
    float_of,
    high_half,
    low_half,
)
from microfloat.kernels.device.packed import scale_word
from microfloat.kernels.device.squares import (
    both_high,
    both_low,
    larger,
    largest,
    row_factors,
    square_factors,
    store_columns,
    stored_bytes,
)

TILE = tl.constexpr(128)


@triton.constexpr_function
def folds(row, column, tile, kind, even):
    """Whether a pass of `fold` over bfloat16 words in whole tiles (`even`) is one of squares: nearest E4M3 both ways, a
    scale for every row of 128 elements.
    """
    if tile or row is None or column is None or kind != WORDS_BF16 or not even:
        return False
    return all(
        cast.MB == 3 and cast.BIAS == 7 and not cast.STOCHASTIC for cast in (ScaledCast(*row), ScaledCast(*column))
    )


@triton.jit
def shift_words(stored, group, HW: tl.constexpr):
    """Halfwise ``2^(6 + d)`` as float16, d = byte - Eg and at least -20, from bytes and the largest of their group; NaN
    in a NaN group.
    """
    exponent = larger(group, 0x00010001, HW)
    above = exponent + 0x00010001
    field = larger(stored + 0x00150015, above, HW) - exponent
    return (field << 10) | ((above & 0x01000100) * 0x7E)


@triton.jit
def scale_of(group):
    """The FP32 scale ``2^(Eg - 127)`` of a group's largest byte."""
    return float_of(tl.where(group == 255, 0x7FC00000, tl.maximum(group, 1) << 23))


@triton.jit
def sixty_fourth(word):
    """Halfwise 2^-6 of float16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 m; mov.b32 m, 0x24002400; mul.rn.f16x2 $0, $1, m; }", "=r,r", [word], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def fold_quad(a, b, c, d, shift, HW: tl.constexpr):
    """Four floats in MX's range -> (int32 of four shifted codes, what `lossy_elements` counts)."""
    if HW:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 p, q; .reg .b32 h, g, v, u, m, n; "
            "cvt.rn.satfinite.e4m3x2.f32 p, $3, $2; cvt.rn.f16x2.e4m3x2 h, p; "
            "cvt.rn.satfinite.e4m3x2.f32 p, $5, $4; cvt.rn.f16x2.e4m3x2 g, p; "
            "mul.rn.f16x2 v, h, $7; mul.rn.f16x2 u, g, $7; "
            "cvt.rn.satfinite.e4m3x2.f16x2 p, v; cvt.rn.satfinite.e4m3x2.f16x2 q, u; mov.b32 $0, {p, q}; "
            "mov.b32 m, 0x5A005A00; mov.b32 n, 0xDA00DA00; "  # adding and subtracting 192 rounds to an eighth
            "abs.f16x2 h, h; mul.rn.sat.f16x2 h, h, $6; add.rn.f16x2 v, h, m; add.rn.f16x2 v, v, n; "
            "abs.f16x2 g, g; mul.rn.sat.f16x2 g, g, $6; add.rn.f16x2 u, g, m; add.rn.f16x2 u, u, n; "
            "set.ne.u32.f16x2 v, v, h; set.ne.u32.f16x2 u, u, g; add.u32 $1, v, u; }",
            "=&r,=&r,r,r,r,r,r,r", [a, b, c, d, shift, sixty_fourth(shift)], dtype=(tl.int32, tl.int32), is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        factor = low_half(shift, WORDS_F16) * 0.015625
        p, lossy0 = fold_one(a, factor)
        q, lossy1 = fold_one(b, factor)
        r, lossy2 = fold_one(c, factor)
        s, lossy3 = fold_one(d, factor)
        return p | (q << 8) | (r << 16) | (s << 24), lossy0 + lossy1 + lossy2 + lossy3


@triton.jit
def fold_one(x, factor):
    """(code, 1 if it changed) of one float, by integer arithmetic."""
    value = decode(encode_integer(x, 0, 3, 7, False), 3, 7) * factor
    code = encode_integer(value, 0, 3, 7, False)
    changed = (decode(code, 3, 7) != value) & (value == value)  # NaN does not count
    return code, tl.where(changed, 1, 0)


@triton.jit
def lossy_elements(lossy, HW: tl.constexpr):
    """How many, from sums of what `fold_quad` gives: masks of 16 bits, up to 64 in either half, or counts."""
    if HW:
        minus = -lossy
        return 2 * (minus & 0xFFFF) + (minus >> 16)
    else:
        return lossy


@triton.jit
def row_groups(stored, HW: tl.constexpr):
    """The largest bytes of 128 elements of pairs of rows, four tensors [2, 4, 8] -> as many [4, 8]."""
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
def column_groups(stored, HW: tl.constexpr):
    """The largest bytes of 128 elements of words of two columns, [8, 8, 4] -> [8, 2, 4]."""
    return largest(tl.reshape(stored, [8, 4, 2, 4]), 1, HW)


@triton.jit
def fold_row(word, factors, shift, HW: tl.constexpr):
    """[8, 4, 8, 4] words of a row -> (int32 of four codes [8, 4, 8, 2], lossy)."""
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
    """Words of four rows -> (int32 of four codes of the first, or of the second column, lossy)."""
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
def fold_columns(words, factors, shift, out_tile, R, HW: tl.constexpr):
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
def fold_rows(words, factors, shifts, out_tile, r, w, C, HW: tl.constexpr):
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
def fold_squares(
    tile,
    row_tile,
    row_scale,
    column_tile,
    column_scale,
    R,
    C,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    HW: tl.constexpr,
):
    """Both operands of a 128 x 128 tile (`squares.load_squares`) with 1x128 scales, which go to `row_scale` and
    `column_scale` one after the other; returns the numbers of lossy elements (row operand, column operand).
    """
    r, w, words = tile
    columns, rows = square_factors(words, ROW.BIAS, ROW.RULE, COLUMN.BIAS, COLUMN.RULE, HW)
    stored_rows = ()
    for j in tl.static_range(4):
        stored_rows = stored_rows + (stored_bytes(rows[j]),)
    stored_columns = stored_bytes(columns)
    groups = row_groups(stored_rows, HW)
    group = column_groups(stored_columns, HW)  # [8, 2, 4]
    store_group_scales(groups, row_scale)
    c = tl.arange(0, 2)[None, :, None] * 64 + tl.arange(0, 8)[:, None, None] * 8
    c = c + tl.arange(0, 4)[None, None, :] * 2
    tl.store(tl.join(column_scale + c, column_scale + c + 1), scale_of(tl.join(group & 0xFF, group >> 16)))

    group = tl.reshape(tl.broadcast_to(group[:, None], [8, 4, 2, 4]), [8, 8, 4])
    lossy = fold_columns(words, columns, shift_words(stored_columns, group, HW), column_tile, R, HW) << 16
    shifts = ()
    for j in tl.static_range(4):
        shifts = shifts + (shift_words(stored_rows[j], groups[j][None], HW),)
    lossy += fold_rows(words, rows, shifts, row_tile, r, w, C, HW)
    lossy = tl.sum(tl.sum(tl.sum(lossy, 2), 1), 0)
    return lossy & 0xFFFF, lossy >> 16


@triton.jit
def store_group_scales(groups, scale_ptr):
    """Store the scales of 128 rows, from the largest bytes of pairs of them."""
    i = tl.arange(0, 8)[:, None, None]
    value = groups[0][None]
    for j in tl.static_range(1, 4):
        value = tl.where(i // 2 == j, groups[j][None], value)
    value = tl.where(i % 2 == 0, value & 0xFF, value >> 16)  # [8, 4, 8]: lane i has row i
    n = tl.arange(0, 8)[None, None, :]
    r = (n // 2) * 32 + tl.arange(0, 4)[None, :, None] * 8 + i
    tl.store(scale_ptr + r, scale_of(value), mask=n % 2 == 0)
