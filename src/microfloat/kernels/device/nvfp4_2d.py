"""NVFP4 casts with 16 x 16 scales into both operands, with one load and one encoding of each element.

Both operands share the scale of a 16 x 16 tile, so the codes of the column operand are the transposed codes of the row
operand (docs/numerics.md 2.4). A lane holds half a tile, 16 rows of 8 neighbouring elements, encodes them once, and
transposes its codes in registers to 4 bytes of a row and 8 bytes of a column. A warp of 8 x 4 lanes covers 64 x 64
elements and writes whole sectors of both operands.

Shapes [8, 4, N, 4]: 8 lanes side by side, 4 below each other, N = BM / 64 x BN / 64 warps of a program, 4 words a row.
"""

import triton
import triton.language as tl

from microfloat.kernels.constants import Nvfp4Cast
from microfloat.kernels.device.convert import WORDS_BF16, bits_of, encode_integer, high_half, low_half, packed_max_abs
from microfloat.kernels.device.fp4 import choose_bytes
from microfloat.kernels.device.scales import FOUR_OVER_SIX_MAE, e4m3_scale
from microfloat.kernels.device.squares import both_high, both_low, larger, largest, magnitudes
from microfloat.kernels.device.tiles import load_pair

SIDE = tl.constexpr(64)  # rows and columns that a warp covers
UPPER = tl.constexpr(-252645136)  # 0xF0F0F0F0: the upper nibbles of bytes
SIGNS = tl.constexpr(-2004318072)  # 0x88888888: the signs of an oct


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
    if row is None or column is None or kind != WORDS_BF16 or not even or rows % 64 != 0:
        return False
    codes = all(Nvfp4Cast(*cast).OUTPUT == 0 for cast in (row, column))
    return codes and codes_are_shared(row, column)


@triton.jit
def byte_of(a, b, INDEX: tl.constexpr):
    """Byte INDEX of the eight bytes of (a, b)."""
    if INDEX < 4:
        return (a >> (8 * INDEX)) & 0xFF
    else:
        return (b >> (8 * (INDEX - 4))) & 0xFF


@triton.jit
def bytes_of(a, b, SELECTOR: tl.constexpr, HW: tl.constexpr):
    """Four of the eight bytes of (a, b), chosen by the nibbles of SELECTOR, the lowest first."""
    if HW:
        return choose_bytes(a, b, SELECTOR)
    else:
        chosen = byte_of(a, b, SELECTOR & 7)
        for i in tl.static_range(1, 4):
            chosen = chosen | (byte_of(a, b, (SELECTOR >> (4 * i)) & 7) << (8 * i))
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
def store_in_place(at, value, HW: tl.constexpr):
    """Store int64 values directly from their threads; Triton would first gather neighbours through shared memory."""
    if HW:
        PTX: tl.constexpr = "st.global.b64 [$1], $2; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(PTX, "=r,l,l", [at.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(at, value)


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
    return bits_of(tl.minimum(tl.minimum(tl.fma(v, 2.0, units[0]), v + units[1]), tl.fma(v, 0.5, units[2])))


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
def quads(a, b, c, d, code, signs, HW: tl.constexpr):
    """Codes of words of four rows: one half per column, with the first row in the lowest nibble."""
    codes = magnitude_codes(a, code, HW) + (magnitude_codes(b, code, HW) << 4)
    codes += (magnitude_codes(c, code, HW) << 8) + (magnitude_codes(d, code, HW) << 12)
    first, second = bytes_of(a, c, 0x7351, HW), bytes_of(b, d, 0x7351, HW)
    return codes | (merged(second, first >> 4, UPPER, HW) & signs)


@triton.jit
def row_octs(codes, HW: tl.constexpr):
    """Octs of four rows, each [8, 4, N], from quads [8, 4, N, 4]."""
    N: tl.constexpr = codes.shape[2]
    even, odd = tl.split(tl.reshape(codes, [8, 4, N, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    octs = ()
    for SELECTOR in tl.static_range(0x6240, 0x7352, 0x1111):  # the first two rows' bytes, the others'
        a, b = bytes_of(first, second, SELECTOR, HW), bytes_of(third, fourth, SELECTOR, HW)
        even, odd = both_low(a, b, HW), both_high(a, b, HW)  # of columns
        octs = octs + (merged(odd << 4, even, UPPER, HW), merged(odd, even >> 4, UPPER, HW))
    return octs


@triton.jit
def both_octs(first, second):
    """Two octs as int64."""
    return (first.to(tl.int64) & 0xFFFFFFFF) | (second.to(tl.int64) << 32)


@triton.jit
def store_columns(codes, out_tile, r, w, R, HW: tl.constexpr):
    """Store the column operand from four tensors of quads, 8 bytes of each column of a lane."""
    c = (w + tl.arange(0, 4)[None, None, None, :]) * 2
    at = out_tile.to(tl.pointer_type(tl.int64)) + (c * (R // 16) + r // 16)
    even = both_octs(both_low(codes[0], codes[1], HW), both_low(codes[2], codes[3], HW))
    odd = both_octs(both_high(codes[0], codes[1], HW), both_high(codes[2], codes[3], HW))
    store_in_place(at, even, HW)
    store_in_place(at + R // 16, odd, HW)


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
        q = quads(words[4 * g], words[4 * g + 1], words[4 * g + 2], words[4 * g + 3], code, signs, HW)
        codes = codes + (q,)
        octs = row_octs(q, HW)
        for p in tl.static_range(4):  # four bytes of a lane, so that neighbours are not gathered
            tl.store(tl.multiple_of(out + (4 * g + p) * (C // 8), [4, 4, 4]), octs[p])
    store_columns(codes, column_tile, r, w, R, HW)
    store_scales(stored, row_scale, column_scale, row0, col0, R, C, BM, BN)
