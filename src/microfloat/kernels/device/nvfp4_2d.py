"""NVFP4 casts with 16 x 16 scales into both operands, with one load and one encoding of each element.

Both operands share the scale of a 16 x 16 tile, so the codes of the column operand are the transposed codes of the row
operand (docs/numerics.md 2.4). A lane holds half a tile, 16 rows of 8 neighbouring elements, encodes them once, and
transposes its codes in registers to 4 bytes of a row and 8 bytes of a column. A warp of 8 x 4 lanes covers 64 x 64
elements and writes whole sectors of both operands. Folded to FP8 under a scale for 128 x 128, the eight magnitudes of
a tile of 16 x 16 are eight bytes, by which its codes choose.

Shapes [8, 4, N, 4]: 8 lanes side by side, 4 below each other, N = BM / 64 x BN / 64 warps of a program, 4 words a row.
"""

import triton
import triton.language as tl

from microfloat.kernels.constants import Nvfp4Cast
from microfloat.kernels.device.convert import (
    WORDS_BF16,
    bits_of,
    decode,
    encode_integer,
    encode_quad,
    high_half,
    low_half,
    packed_max_abs,
)
from microfloat.kernels.device.fp4 import choose_bytes
from microfloat.kernels.device.scales import FOUR_OVER_SIX_MAE, e4m3_scale, fold_scales
from microfloat.kernels.device.squares import both_high, both_low, larger, largest, magnitudes
from microfloat.kernels.device.tiles import load_pair

SIDE = tl.constexpr(64)  # rows and columns that a warp covers
UPPER = tl.constexpr(-252645136)  # 0xF0F0F0F0: the upper nibbles of bytes
SIGNS = tl.constexpr(-2004318072)  # 0x88888888: the signs of an oct
BYTE_SIGNS = tl.constexpr(-2139062144)  # 0x80808080
MAGNITUDES = tl.constexpr((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


@triton.constexpr_function
def codes_are_shared(row, column):
    """True if both operands have the same codes: one nearest cast with 16 x 16 scales and no Hadamard transform.

    Four over six sums errors along rows first, so there the operands may differ.
    """
    row, column = Nvfp4Cast(*row), Nvfp4Cast(*column)
    shared = {"OUTPUT": 0, "ALIGNED": False, "GRADIENT": False}
    alike = row._replace(**shared) == column._replace(**shared)
    return alike and row.TILE and row.RULE < FOUR_OVER_SIX_MAE and not row.STOCHASTIC and row.SIGNS < 0


@triton.constexpr_function
def takes(row, column, kind, even, rows):
    """True if this module serves the casts `row` and `column`: shared codes, bfloat16 words, whole tiles (`even`)."""
    if row is None or column is None or kind != WORDS_BF16 or not even:
        return False
    outputs = Nvfp4Cast(*row).OUTPUT, Nvfp4Cast(*column).OUTPUT
    side = {(0, 0): 64, (3, 3): 128}.get(outputs)  # codes, or folded to 128x128
    return side is not None and rows % side == 0 and codes_are_shared(row, column)


@triton.jit
def bytes_of(a, b, selector, HW: tl.constexpr):
    """Four of the eight bytes of (a, b), chosen by the lowest nibbles of `selector` (at most 7), the lowest first."""
    if HW:
        return choose_bytes(a, b, selector)
    else:
        chosen = tl.zeros_like(a)
        for i in tl.static_range(4):
            index = (selector >> (4 * i)) & 7
            chosen |= ((tl.where(index < 4, a, b) >> (8 * (index & 3))) & 0xFF) << (8 * i)
        return chosen


@triton.jit
def merged(a, b, MASK: tl.constexpr, HW: tl.constexpr):
    """Bits of `a` where MASK is one, bits of `b` where it is zero."""
    if HW:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xE4;", "=r,r,r,r", [a, b, MASK], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (a & MASK) | (b & ~MASK)


@triton.jit
def store_in_place(at, words, HW: tl.constexpr):
    """Store two or four words behind each other, directly from their threads; Triton would first gather neighbours
    through shared memory.
    """
    if HW and len(words) == 2:
        PTX: tl.constexpr = "st.global.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0;"
        arguments = [at.to(tl.int64), words[0], words[1]]
        tl.inline_asm_elementwise(PTX, "=r,l,r,r", arguments, dtype=tl.int32, is_pure=False, pack=1)
    elif HW:
        PTX: tl.constexpr = "st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;"
        arguments = [at.to(tl.int64), words[0], words[1], words[2], words[3]]
        tl.inline_asm_elementwise(PTX, "=r,l,r,r,r,r", arguments, dtype=tl.int32, is_pure=False, pack=1)
    else:
        for i in tl.static_range(len(words)):
            tl.store(at + i, words[i])


@triton.jit
def load_halves(x_tile, rows, cols, stride_r, stride_c, BM: tl.constexpr, BN: tl.constexpr):
    """First local row and word of every lane, and sixteen tensors [8, 4, N, 4] of words."""
    WC: tl.constexpr = BN // SIDE
    n = tl.arange(0, (BM // SIDE) * WC)[None, None, :, None]
    r = (n // WC) * SIDE + tl.arange(0, 4)[None, :, None, None] * 16
    w = (n % WC) * (SIDE // 2) + tl.arange(0, 8)[:, None, None, None] * 4
    at = w + tl.arange(0, 4)[None, None, None, :]
    words = ()
    for p in tl.static_range(16):
        raw, _low, _high = load_pair(x_tile, r + p, at, rows, cols, stride_r, stride_c, WORDS_BF16, True, 0)
        words = words + (raw,)
    return r, w, words


@triton.jit
def tile_amax(words, HW: tl.constexpr):
    """Amax bits [4, 4, N] of the 16 x 16 tiles."""
    N: tl.constexpr = words[0].shape[2]
    top = magnitudes(words[0], HW)
    for p in tl.static_range(1, 16):
        if HW:
            top = packed_max_abs(top, words[p], WORDS_BF16, False)
        else:
            top = larger(top, magnitudes(words[p], HW), HW)
    top = largest(magnitudes(top, HW), 3, HW)
    top = largest(tl.reshape(top, [4, 2, 4, N]), 1, HW)
    return tl.maximum(bits_of(low_half(top, WORDS_BF16)), bits_of(high_half(top, WORDS_BF16)))


@triton.jit
def in_lanes(x):
    """Repeat values of tiles [4, 4, N] for their lanes, [8, 4, N, 1]."""
    N: tl.constexpr = x.shape[2]
    return tl.reshape(tl.broadcast_to(x[:, None], [4, 2, 4, N]), [8, 4, N])[:, :, :, None]


@triton.jit
def encoding(factor, value, decode, bad, HW: tl.constexpr):
    """Constants of `magnitude_codes` for a tile: (largest word, factor, three units).

    The hardware form clamps magnitudes to 6 scales, rounded down to bfloat16. Clamped or not, a larger element has the
    code 7, and no product reaches 7, where `code_bits` would round wrongly. In a tile with a NaN the factor is 0 and
    the units, which are 7 larger, give the code.
    """
    if HW:
        # A factor is below 2^128: 6 / factor is normal, also where the scale is 0.
        most = tl.minimum(bits_of(tl.maximum(value * decode * 6.0, 1.5 * 2.0**-126)), 0x7F7F0000)
        unit = tl.where(bad, 8388615.0, 8388608.0)
        units = (in_lanes(unit), in_lanes(unit + 2.0), in_lanes(unit + 4.0))
        return in_lanes(choose_bytes(most, most, 0x3232)), in_lanes(tl.where(bad, 0.0, factor)), units
    else:
        return 0, in_lanes(factor), ()


@triton.jit
def code_bits(y, units):
    """`fp4.rounded_code` of |y| < 7."""
    v = tl.abs(y)
    a = tl.minimum(bits_of(tl.fma(v, 2.0, units[0])), bits_of(v + units[1]))
    return tl.minimum(a, bits_of(tl.fma(v, 0.5, units[2])))


@triton.jit
def magnitude_codes(word, code, HW: tl.constexpr):
    """Codes of |word| in both halves; `code` is the result of `encoding`."""
    most, factor, units = code
    if HW:
        word = tl.inline_asm_elementwise(  # the smaller magnitude (NaN loses), the sign of the word
            "min.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [word, most], dtype=tl.int32, is_pure=True, pack=1
        )
        low, high = low_half(word, WORDS_BF16) * factor, high_half(word, WORDS_BF16) * factor
        return both_low(code_bits(low, units), code_bits(high, units), HW)
    else:
        word = magnitudes(word, HW)
        low, high = low_half(word, WORDS_BF16) * factor, high_half(word, WORDS_BF16) * factor
        return encode_integer(low, 0, 1, 1, False) | (encode_integer(high, 0, 1, 1, False) << 16)


@triton.jit
def quads(a, b, c, d, code, HW: tl.constexpr):
    """Codes of words of four rows without signs, one half per column, with the first row in the lowest nibble; and the
    bytes with the signs of the first and third row, and of the others.
    """
    codes = magnitude_codes(a, code, HW) + (magnitude_codes(b, code, HW) << 4)
    codes += (magnitude_codes(c, code, HW) << 8) + (magnitude_codes(d, code, HW) << 12)
    return codes, bytes_of(a, c, 0x7351, HW), bytes_of(b, d, 0x7351, HW)


@triton.jit
def words_apart(words):
    """The four words of every lane as tensors [8, 4, N]."""
    even, odd = tl.split(tl.reshape(words, [8, 4, words.shape[2], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def row_octs(codes, HW: tl.constexpr):
    """Octs of four rows, each [8, 4, N], from quads [8, 4, N, 4]."""
    first, second, third, fourth = words_apart(codes)
    octs = ()
    for SELECTOR in tl.static_range(0x6240, 0x7352, 0x1111):  # the first two rows' bytes, the others'
        a, b = bytes_of(first, second, SELECTOR, HW), bytes_of(third, fourth, SELECTOR, HW)
        even, odd = both_low(a, b, HW), both_high(a, b, HW)  # of columns
        octs = octs + (merged(odd << 4, even, UPPER, HW), merged(odd, even >> 4, UPPER, HW))
    return octs


@triton.jit
def store_columns(codes, out_tile, r, w, R, HW: tl.constexpr):
    """Store the column operand from four tensors of quads, 8 bytes of each column of a lane."""
    c = (w + tl.arange(0, 4)[None, None, None, :]) * 2
    at = out_tile.to(tl.pointer_type(tl.int32)) + (c * (R // 8) + r // 8)
    even = both_low(codes[0], codes[1], HW), both_low(codes[2], codes[3], HW)
    store_in_place(at, even, HW)
    store_in_place(at + R // 8, (both_high(codes[0], codes[1], HW), both_high(codes[2], codes[3], HW)), HW)


@triton.jit
def store_scales(stored, row_scale, column_scale, row0, col0, R, C, BM: tl.constexpr, BN: tl.constexpr):
    """Store the scales [4, 4, N] of tiles in the order of both operands."""
    WC: tl.constexpr = BN // SIDE
    n = tl.arange(0, (BM // SIDE) * WC)[None, None, :]
    i = row0 // 16 + (n // WC) * 4 + tl.arange(0, 4)[None, :, None]
    j = col0 // 16 + (n % WC) * 4 + tl.arange(0, 4)[:, None, None]
    tl.store(row_scale + (i * (C // 16) + j), stored.to(tl.uint8))
    tl.store(column_scale + (j * (R // 16) + i), stored.to(tl.uint8))


@triton.jit
def table_of(value, HW: tl.constexpr):
    """E4M3 codes of the eight magnitudes times `value` in the bytes of two words, and 1 in the bytes of two others for
    those that are not exact.
    """
    codes, marks = (), ()
    for half in tl.static_range(2):
        v = ()
        for i in tl.static_range(4):
            v = v + (value * MAGNITUDES[4 * half + i],)
        word = encode_quad(v[0], v[1], v[2], v[3], 0, 3, 7, False, HW)
        mark = tl.zeros_like(word)
        for i in tl.static_range(4):
            changed = (decode((word >> (8 * i)) & 0xFF, 3, 7) != v[i]) & (v[i] == v[i])  # NaN does not count
            mark |= tl.where(changed, 1 << (8 * i), 0)
        codes, marks = codes + (in_lanes(word),), marks + (in_lanes(mark),)
    return codes, marks


@triton.jit
def cast_tiles(
    halves, level, row_tile, row_scale, column_tile, column_scale, bounds, CAST: tl.constexpr, HW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Cast the tiles of `load_halves` into both operands, under the first-level scale `level`."""
    r, w, words = halves
    R, C, row0, col0 = bounds
    amax = tile_amax(words, HW)
    stored, factor, value = e4m3_scale(amax, level, CAST, False, HW)
    bad = amax > 0x7F800000
    code = encoding(factor, value, level.decode, bad, HW)
    signs = in_lanes(tl.where(bad, 0, SIGNS))
    out = row_tile.to(tl.pointer_type(tl.int32)) + (
        tl.reshape(r, [1, 4, r.shape[2]]) * (C // 8) + tl.reshape(w, [8, 1, w.shape[2]]) // 4
    )
    codes = ()
    for g in tl.static_range(4):
        q, first, second = quads(words[4 * g], words[4 * g + 1], words[4 * g + 2], words[4 * g + 3], code, HW)
        q |= merged(second, first >> 4, UPPER, HW) & signs
        codes = codes + (q,)
        octs = row_octs(q, HW)
        for p in tl.static_range(4):  # four bytes of a lane, so that neighbours are not gathered
            tl.store(tl.multiple_of(out + (4 * g + p) * (C // 8), [4, 4, 4]), octs[p])
    store_columns(codes, column_tile, r, w, R, HW)
    store_scales(stored, row_scale, column_scale, row0, col0, R, C, BM, BN)


@triton.jit
def fold_tiles(halves, level, row_tile, column_tile, R, C, CAST: tl.constexpr, HW: tl.constexpr):
    """`cast_tiles` of one tile of 128 x 128, folded: returns its scale and the number of elements that changed."""
    r, w, words = halves
    amax = tile_amax(words, HW)
    stored, factor, value = e4m3_scale(amax, level, CAST, False, HW)
    bad = amax > 0x7F800000
    code, signs = encoding(factor, value, level.decode, bad, HW), in_lanes(tl.where(bad, 0, BYTE_SIGNS))
    both = tl.reshape(stored, [16, stored.shape[2]])
    down, up = fold_scales(both, both, True)
    codes, marks = table_of(value * down, HW)
    at = row_tile.to(tl.pointer_type(tl.int32)) + (
        tl.reshape(r, [1, 4, r.shape[2]]) * (C // 4) + tl.reshape(w, [8, 1, w.shape[2]]) // 2
    )
    low, high, lossy = (), (), tl.zeros_like(words[0])
    for g in tl.static_range(4):
        q, first, second = quads(words[4 * g], words[4 * g + 1], words[4 * g + 2], words[4 * g + 3], code, HW)
        a = bytes_of(codes[0], codes[1], q, HW) | (bytes_of(first, second, 0x5140, HW) & signs)
        b = bytes_of(codes[0], codes[1], q >> 16, HW) | (bytes_of(first, second, 0x7362, HW) & signs)
        low, high = low + (a,), high + (b,)
        lossy += bytes_of(marks[0], marks[1], q, HW) + bytes_of(marks[0], marks[1], q >> 16, HW)
        for half in tl.static_range(2):
            pairs = words_apart(bytes_of(a, b, 0x7362 if half else 0x5140, HW))  # of columns, in two rows
            for SELECTOR in tl.static_range(0x5410, 0x7633, 0x2222):  # the first row, the second
                row = bytes_of(pairs[0], pairs[1], SELECTOR, HW), bytes_of(pairs[2], pairs[3], SELECTOR, HW)
                store_in_place(at + (4 * g + 2 * half + SELECTOR // 0x7000) * (C // 4), row, HW)
    c = (w + tl.arange(0, 4)[None, None, None, :]) * 2
    at = column_tile.to(tl.pointer_type(tl.int32)) + (c * (R // 4) + r // 4)
    store_in_place(at, low, HW)
    store_in_place(at + R // 4, high, HW)
    lossy = tl.sum(lossy, 3)  # at most 32 in a byte
    lossy = tl.sum(tl.sum(tl.sum((lossy & 0xFF00FF) + ((lossy >> 8) & 0xFF00FF), 2), 1), 0)
    return up * level.stored, (lossy & 0xFFFF) + (lossy >> 16)
