"""Blocks of 16 elements as 16 tensors: Hadamard transform, NVFP4 scales, and FP4 codes packed in registers.

A *block* is a tuple of 16 float32 tensors of one shape, one entry per block; it lies in the registers of one lane.
Where blocks run along rows, a lane holds 16 neighbouring columns; where they run along columns, 16 rows of two columns
(docs/numerics.md 2.4 to 2.7, 5.2 to 5.4). An *oct* is eight FP4 codes in an int32, the first in the low nibble.
"""

import triton
import triton.language as tl

from microfloat.kernels._convert import (
    ELEMENTWISE,
    WORDS_BF16,
    bf16_word,
    bits_of,
    decode,
    encode_integer,
    float_of,
    high_half,
    low_half,
    magnitude_bits,
    multiply_toward_zero,
    packed_abs,
    packed_max,
    round_bf16,
    round_by_addition,
)

# ---------------------------------------------------------------------------------------------------------- loading


@triton.jit
def unstack8(words):
    """[X, Y, 2, 4] in registers -> 8 tensors [X, Y]."""
    X: tl.constexpr = words.shape[0]
    Y: tl.constexpr = words.shape[1]
    even, odd = tl.split(tl.reshape(words, [X, Y, 4, 2]))
    w04, w26 = tl.split(tl.reshape(even, [X, Y, 2, 2]))
    w15, w37 = tl.split(tl.reshape(odd, [X, Y, 2, 2]))
    w0, w4 = tl.split(w04)
    w2, w6 = tl.split(w26)
    w1, w5 = tl.split(w15)
    w3, w7 = tl.split(w37)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def load_row_blocks(
    tile_ptr, rows, cols, stride_r, stride_c, KIND: tl.constexpr, EVEN: tl.constexpr, NB: tl.constexpr, BM: tl.constexpr
):
    """Words (a tuple of 8, or of none) and elements (16) of the blocks [NB, BM] along the rows of a tile."""
    words = ()
    block = ()
    if KIND == ELEMENTWISE:
        b = tl.arange(0, NB)[:, None] * 16
        r = tl.arange(0, BM)[None, :]
        for i in tl.static_range(16):
            x = tl.load(tile_ptr + r * stride_r + (b + i) * stride_c, mask=(r < rows) & (b + i < cols), other=0.0)
            block = block + (x.to(tl.float32),)
    else:
        b = tl.arange(0, NB)[:, None, None, None]
        r = tl.arange(0, BM)[None, :, None, None]
        w = b * 8 + tl.arange(0, 2)[None, None, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
        at = tile_ptr.to(tl.pointer_type(tl.int32)) + (r * (stride_r // 2) + w)
        if EVEN:
            raw = tl.load(at)
        else:
            raw = tl.load(at, mask=(r < rows) & (w < cols // 2), other=0)
        words = unstack8(raw)
        for i in tl.static_range(8):
            block = block + (low_half(words[i], KIND), high_half(words[i], KIND))
    return words, block


@triton.jit
def load_column_blocks(
    tile_ptr, rows, cols, stride_r, stride_c, KIND: tl.constexpr, EVEN: tl.constexpr, G: tl.constexpr, W: tl.constexpr
):
    """Words (16, or none) and the elements (16 each) of the two columns of every word: blocks [G, W] along columns."""
    words = ()
    low = ()
    high = ()
    w = tl.arange(0, W)[None, :]
    for i in tl.static_range(16):
        r = tl.arange(0, G)[:, None] * 16 + i
        if KIND == ELEMENTWISE:
            at = tile_ptr + r * stride_r + (2 * w) * stride_c
            a = tl.load(at, mask=(r < rows) & (2 * w < cols), other=0.0).to(tl.float32)
            b = tl.load(at + stride_c, mask=(r < rows) & (2 * w + 1 < cols), other=0.0).to(tl.float32)
            low = low + (a,)
            high = high + (b,)
        else:
            at = tl.multiple_of(tile_ptr.to(tl.pointer_type(tl.int32)) + (r * (stride_r // 2) + w), [8, 8])
            if EVEN:
                raw = tl.load(at)
            else:
                raw = tl.load(at, mask=(r < rows) & (w < cols // 2), other=0)
            words = words + (raw,)
            low = low + (low_half(raw, KIND),)
            high = high + (high_half(raw, KIND),)
    return words, low, high


# --------------------------------------------------------------------------------------------------------- Hadamard


@triton.jit
def _butterfly(v):
    """The four stages of the 16-point transform, distances 1, 2, 4, 8 in this order."""
    for stage in tl.static_range(4):
        out = ()
        for i in tl.static_range(16):
            if (i >> stage) & 1 == 0:
                out = out + (v[i] + v[i + (1 << stage)],)
            else:
                out = out + (v[i - (1 << stage)] - v[i],)
        v = out
    return v


@triton.jit
def hadamard_sums(block, MASK: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr):
    """``4 H diag(sgn) bf16(x)`` over 4, not yet rounded: multiply by 0.25 and round to bfloat16 to finish."""
    v = ()
    for i in tl.static_range(16):
        x = block[i]
        if KIND != WORDS_BF16:
            x = round_bf16(x, HW)
        if (MASK >> i) & 1 == 1:
            x = x * -1.0
        v = v + (x,)
    return _butterfly(v)


@triton.jit
def hadamard_row_blocks(block, MASK: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr):
    """Transformed blocks along rows: (8 words of bfloat16, 16 elements)."""
    v = hadamard_sums(block, MASK, KIND, HW)
    words = ()
    out = ()
    for i in tl.static_range(8):
        word = bf16_word(v[2 * i] * 0.25, v[2 * i + 1] * 0.25, HW)
        words = words + (word,)
        out = out + (low_half(word, WORDS_BF16), high_half(word, WORDS_BF16))
    return words, out


@triton.jit
def hadamard_column_blocks(low, high, MASK: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr):
    """Transformed blocks along two columns: (16 words of bfloat16, 16 elements each)."""
    a = hadamard_sums(low, MASK, KIND, HW)
    b = hadamard_sums(high, MASK, KIND, HW)
    words = ()
    first = ()
    second = ()
    for i in tl.static_range(16):
        word = bf16_word(a[i] * 0.25, b[i] * 0.25, HW)
        words = words + (word,)
        first = first + (low_half(word, WORDS_BF16),)
        second = second + (high_half(word, WORDS_BF16),)
    return words, first, second


# ------------------------------------------------------------------------------------------------------------- amax


@triton.jit
def words_amax(words, KIND: tl.constexpr, IGNORE_NAN: tl.constexpr):
    """Halfwise largest magnitude of a tuple of words."""
    m = packed_abs(words[0], KIND)
    for i in tl.static_range(1, len(words)):
        m = packed_max(m, packed_abs(words[i], KIND), KIND, IGNORE_NAN)
    return m


@triton.jit
def block_amax(block, IGNORE_NAN: tl.constexpr):
    """Bits of the largest magnitude of a block."""
    m = magnitude_bits(block[0], IGNORE_NAN)
    for i in tl.static_range(1, 16):
        m = tl.maximum(m, magnitude_bits(block[i], IGNORE_NAN))
    return m


@triton.jit
def row_block_amax(words, block, KIND: tl.constexpr, IGNORE_NAN: tl.constexpr, HW: tl.constexpr):
    """Bits of the amax of blocks along rows."""
    if HW and KIND != ELEMENTWISE:
        m = words_amax(words, KIND, IGNORE_NAN)
        m = tl.maximum(bits_of(low_half(m, KIND)), bits_of(high_half(m, KIND)))
        if IGNORE_NAN:
            m = tl.where(m > 0x7F800000, 0, m)
        return m
    else:
        return block_amax(block, IGNORE_NAN)


@triton.jit
def column_block_amax(words, low, high, KIND: tl.constexpr, IGNORE_NAN: tl.constexpr, HW: tl.constexpr):
    """Bits of the amaxes of the blocks of both columns."""
    if HW and KIND != ELEMENTWISE:
        m = words_amax(words, KIND, IGNORE_NAN)
        a, b = bits_of(low_half(m, KIND)), bits_of(high_half(m, KIND))
        if IGNORE_NAN:
            a, b = tl.where(a > 0x7F800000, 0, a), tl.where(b > 0x7F800000, 0, b)
        return a, b
    else:
        return block_amax(low, IGNORE_NAN), block_amax(high, IGNORE_NAN)


# -------------------------------------------------------------------------------------------------------- FP4 codes


@triton.jit
def pack_oct(t, y, FIRST: tl.constexpr, BYTE: tl.constexpr):
    """Eight codes from the given byte of t[FIRST .. FIRST + 7], with the sign bits of y."""
    if BYTE == 0:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, e, o; "
            "prmt.b32 a, $1, $3, 0x0040; prmt.b32 b, $5, $7, 0x0040; prmt.b32 e, a, b, 0x5410; "
            "prmt.b32 a, $2, $4, 0x0040; prmt.b32 b, $6, $8, 0x0040; prmt.b32 o, a, b, 0x5410; "
            "shl.b32 o, o, 4; or.b32 e, e, o; "
            "prmt.b32 a, $9, $11, 0x0073; prmt.b32 b, $13, $15, 0x0073; prmt.b32 a, a, b, 0x5410; "
            "shr.u32 a, a, 4; and.b32 a, a, 0x08080808; or.b32 e, e, a; "
            "prmt.b32 a, $10, $12, 0x0073; prmt.b32 b, $14, $16, 0x0073; prmt.b32 a, a, b, 0x5410; "
            "and.b32 a, a, 0x80808080; or.b32 $0, e, a; }",
            "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [t[FIRST], t[FIRST + 1], t[FIRST + 2], t[FIRST + 3], t[FIRST + 4], t[FIRST + 5], t[FIRST + 6], t[FIRST + 7],
             y[FIRST], y[FIRST + 1], y[FIRST + 2], y[FIRST + 3], y[FIRST + 4], y[FIRST + 5], y[FIRST + 6],
             y[FIRST + 7]],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, e, o; "
            "prmt.b32 a, $1, $3, 0x0073; prmt.b32 b, $5, $7, 0x0073; prmt.b32 e, a, b, 0x5410; "
            "prmt.b32 a, $2, $4, 0x0073; prmt.b32 b, $6, $8, 0x0073; prmt.b32 o, a, b, 0x5410; "
            "shl.b32 o, o, 4; or.b32 e, e, o; "
            "prmt.b32 a, $9, $11, 0x0073; prmt.b32 b, $13, $15, 0x0073; prmt.b32 a, a, b, 0x5410; "
            "shr.u32 a, a, 4; and.b32 a, a, 0x08080808; or.b32 e, e, a; "
            "prmt.b32 a, $10, $12, 0x0073; prmt.b32 b, $14, $16, 0x0073; prmt.b32 a, a, b, 0x5410; "
            "and.b32 a, a, 0x80808080; or.b32 $0, e, a; }",
            "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [t[FIRST], t[FIRST + 1], t[FIRST + 2], t[FIRST + 3], t[FIRST + 4], t[FIRST + 5], t[FIRST + 6], t[FIRST + 7],
             y[FIRST], y[FIRST + 1], y[FIRST + 2], y[FIRST + 3], y[FIRST + 4], y[FIRST + 5], y[FIRST + 6],
             y[FIRST + 7]],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def rounded_code(y):
    """Nearest-even E2M1 code of |y| (at most 6) in the low byte of a float's bits, NaN as 7.

    Codes are piecewise linear in the value: ``min(2v, v + 2, v / 2 + 4)``, and 2^23 added in the same operation rounds.
    """
    v = tl.abs(y)
    a = tl.minimum(tl.fma(v, 2.0, 8388608.0), v + 8388610.0)
    return tl.minimum(tl.minimum(a, tl.fma(v, 0.5, 8388612.0)), 8388615.0)


@triton.jit
def random_to_third_byte(word, INDEX: tl.constexpr):
    """Byte INDEX of a word, moved to bits 16..23; the rest is zero."""
    if INDEX == 0:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x4044;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    elif INDEX == 1:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x4144;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    elif INDEX == 2:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x4244;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x4344;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def stochastic_code(y, word, INDEX: tl.constexpr):
    """Stochastic E2M1 code of |y| (at most 6) in the top byte; below it the rest of the sum. Byte INDEX of `word`.

    Scaled by 2^-126 and truncated, the bits of a float32 are the code with 22 fraction bits (numerics 5.4).
    """
    scaled = bits_of(multiply_toward_zero(tl.minimum(tl.abs(y), 6.0), 2.0**-126))
    return (scaled << 2) + random_to_third_byte(word, INDEX)


@triton.jit
def block_octs(block, factor, random, STOCHASTIC: tl.constexpr, HW: tl.constexpr):
    """Codes of ``block * factor`` as two octs; `random`: the four Philox words of the block (uint32)."""
    if HW:
        y = ()
        t = ()
        for i in tl.static_range(16):
            yi = block[i] * factor
            y = y + (yi,)
            if STOCHASTIC:
                t = t + (stochastic_code(yi, random[i // 4], i % 4),)
            else:
                t = t + (rounded_code(yi),)
        if STOCHASTIC:
            return pack_oct(t, y, 0, 3), pack_oct(t, y, 8, 3)
        else:
            return pack_oct(t, y, 0, 0), pack_oct(t, y, 8, 0)
    else:
        first = tl.zeros_like(bits_of(block[0] * factor))
        second = first
        for i in tl.static_range(16):
            byte = 0
            if STOCHASTIC:
                byte = (random[i // 4].to(tl.int32, bitcast=True) >> (8 * (i % 4))) & 0xFF
            code = encode_integer(block[i] * factor, byte, 1, 1, STOCHASTIC)
            if i < 8:
                first = first | (code << (4 * i))
            else:
                second = second | (code << (4 * (i - 8)))
        return first, second


@triton.jit
def code_value(y, word, INDEX: tl.constexpr, STOCHASTIC: tl.constexpr, HW: tl.constexpr):
    """The value of the E2M1 code of y."""
    if HW and STOCHASTIC:
        kept = ((stochastic_code(y, word, INDEX) >> 24) << 22) & 0x01C00000
        return float_of(bits_of(float_of(kept) * 2.0**126) | (bits_of(y) & -2147483648))
    elif HW:
        return round_by_addition(y, 1, 1)
    else:
        byte = 0
        if STOCHASTIC:
            byte = (word.to(tl.int32, bitcast=True) >> (8 * INDEX)) & 0xFF
        return decode(encode_integer(y, byte, 1, 1, STOCHASTIC), 1, 1)


@triton.jit
def block_values(block, factor, value, random, STOCHASTIC: tl.constexpr, HW: tl.constexpr):
    """``decode(code of block * factor) * value``, 16 tensors."""
    out = ()
    for i in tl.static_range(16):
        word = random[i // 4] if STOCHASTIC else 0
        out = out + (code_value(block[i] * factor, word, i % 4, STOCHASTIC, HW) * value,)
    return out
