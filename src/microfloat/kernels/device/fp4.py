"""Blocks of 16 elements in registers: loads, Hadamard transform, amaxes, and FP4 (E2M1) codes and values.

A *block* is a tuple of 16 float32 tensors of one shape, with one entry per block; one lane holds all 16 elements. Along
rows these are 16 neighbouring columns; along columns 16 rows, of two columns per lane (docs/numerics.md 5.2). The
*words* of a block hold the same elements as pairs of 16-bit floats, or only their signs. An *oct* is eight codes in an
int32, the first in the low nibble.

Hardware forms use *halves*: an int32 of two elements with their signs in bits 15 and 31. The three bits of a code start
at bit 8 of its half (nearest) or bit 9 (stochastic); the bits below are left over from rounding. The bits of a float16
scaled by 2^-14 are its E2M1 code with nine fraction bits (docs/numerics.md 5.4), so one conversion truncates two
elements, one addition rounds them, and one minimum clamps them.
"""

import triton
import triton.language as tl

from microfloat.kernels.device.convert import (
    ELEMENTWISE,
    WORDS_BF16,
    bf16_word,
    bits_of,
    decode,
    drop_nan,
    encode_integer,
    high_half,
    larger_half,
    low_half,
    magnitude_bits,
    packed_abs,
    packed_max_abs,
    round_bf16,
    round_by_addition,
)
from microfloat.kernels.device.packed import factor_word, scale_word


@triton.jit
def unstack8(words):
    """Split [X, Y, 2, 4], whose last axes are registers, into 8 tensors [X, Y]."""
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
def stack8(words):
    """Join 8 tensors [X, Y] into [X, Y, 2, 4], so that a lane stores its words four at a time."""
    even = tl.join(tl.join(words[0], words[4]), tl.join(words[2], words[6]))
    odd = tl.join(tl.join(words[1], words[5]), tl.join(words[3], words[7]))
    X: tl.constexpr = words[0].shape[0]
    Y: tl.constexpr = words[0].shape[1]
    return tl.reshape(tl.join(tl.reshape(even, [X, Y, 4]), tl.reshape(odd, [X, Y, 4])), [X, Y, 2, 4])


@triton.jit
def load_row_blocks(
    tile_ptr, rows, cols, stride_r, stride_c, KIND: tl.constexpr, EVEN: tl.constexpr, NB: tl.constexpr, BM: tl.constexpr
):
    """Words (8, or none if read elementwise) and elements (16) of the blocks [NB, BM] along the rows of a tile."""
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
        j = tl.arange(0, 2)[None, None, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
        w = b * 8 + j
        at = tile_ptr.to(tl.pointer_type(tl.int32)) + (r * (stride_r // 2) + b * 8) + j
        raw = tl.load(at) if EVEN else tl.load(at, mask=(r < rows) & (w < cols // 2), other=0)
        words = unstack8(raw)
        for i in tl.static_range(8):
            block = block + (low_half(words[i], KIND), high_half(words[i], KIND))
    return words, block


@triton.jit
def load_column_blocks(
    tile_ptr, rows, cols, stride_r, stride_c, KIND: tl.constexpr, EVEN: tl.constexpr, G: tl.constexpr, W: tl.constexpr
):
    """Words (16, or none) and elements (16 for each column of a word) of the blocks [G, W] along columns."""
    words = ()
    low = ()
    high = ()
    w = tl.arange(0, W)[None, :]
    g = tl.arange(0, G)[:, None] * 16
    base = tile_ptr.to(tl.pointer_type(tl.int32)) + (g * (stride_r // 2) + w)
    for i in tl.static_range(16):
        r = g + i
        if KIND == ELEMENTWISE:
            at = tile_ptr + r * stride_r + (2 * w) * stride_c
            a = tl.load(at, mask=(r < rows) & (2 * w < cols), other=0.0).to(tl.float32)
            b = tl.load(at + stride_c, mask=(r < rows) & (2 * w + 1 < cols), other=0.0).to(tl.float32)
            low = low + (a,)
            high = high + (b,)
        else:
            at = tl.multiple_of(base, [8, 8])
            base += stride_r // 2
            raw = tl.load(at) if EVEN else tl.load(at, mask=(r < rows) & (w < cols // 2), other=0)
            words = words + (raw,)
            low = low + (low_half(raw, KIND),)
            high = high + (high_half(raw, KIND),)
    return words, low, high


@triton.jit
def _butterfly(v, STAGES: tl.constexpr):
    """The first STAGES of the four stages of the 16-point transform, with distances 1, 2, 4, 8 in this order."""
    for stage in tl.static_range(STAGES):
        out = ()
        for i in tl.static_range(16):
            if (i >> stage) & 1 == 0:
                out = out + (v[i] + v[i + (1 << stage)],)
            else:
                out = out + (v[i - (1 << stage)] - v[i],)
        v = out
    return v


@triton.jit
def hadamard_inputs(block, MASK: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr):
    """``diag(sgn) bf16(x)`` of a block."""
    v = ()
    for i in tl.static_range(16):
        x = block[i]
        if KIND != WORDS_BF16:
            x = round_bf16(x, HW)
        if (MASK >> i) & 1 == 1:
            x = x * -1.0
        v = v + (x,)
    return v


@triton.jit
def hadamard_sums(block, MASK: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr):
    """``H diag(sgn) bf16(x)``, four times the transform: multiply by 0.25 and round to bfloat16 to finish."""
    return _butterfly(hadamard_inputs(block, MASK, KIND, HW), 4)


@triton.jit
def quarter_sums(block, MASK: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr):
    """A quarter of `hadamard_sums`, without overflow where only the whole sum is infinite."""
    v = _butterfly(hadamard_inputs(block, MASK, KIND, HW), 3)
    first = ()
    second = ()
    for i in tl.static_range(8):
        quarter = v[i + 8] * 0.25
        first = first + (tl.fma(v[i], 0.25, quarter),)
        second = second + (tl.fma(v[i], 0.25, quarter * -1.0),)  # a minus sign would be 0 - quarter
    return first + second


@triton.jit
def hadamard_amax(block, MASK: tl.constexpr, KIND: tl.constexpr):
    """Largest magnitude of `hadamard_sums` in float32, NaN ignored; a quarter of it, rounded, is that of the transform.

    ``max(|a + b|, |a - b|) = |a| + |b|``, so the last stage takes one addition for two elements.
    """
    v = _butterfly(hadamard_inputs(block, MASK, KIND, True), 3)
    m = tl.zeros_like(v[0])
    for i in tl.static_range(8):
        m = tl.maximum(m, tl.abs(v[i]) + tl.abs(v[i + 8]))
    return m


@triton.jit
def hadamard_row_blocks(block, MASK: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr):
    """Transform of blocks along rows: 8 words of bfloat16, and 16 elements."""
    v = hadamard_sums(block, MASK, KIND, HW)
    words = ()
    out = ()
    for i in tl.static_range(8):
        word = bf16_word(v[2 * i] * 0.25, v[2 * i + 1] * 0.25, HW)
        words = words + (word,)
        out = out + (low_half(word, WORDS_BF16), high_half(word, WORDS_BF16))
    return words, out


@triton.jit
def hadamard_column_blocks(low, high, MASK: tl.constexpr, KIND: tl.constexpr, MODEST: tl.constexpr, HW: tl.constexpr):
    """Transform of blocks along two columns: 16 words of bfloat16, and 16 elements of each column."""
    if MODEST:
        a = quarter_sums(low, MASK, KIND, HW)
        b = quarter_sums(high, MASK, KIND, HW)
    else:
        a = hadamard_sums(low, MASK, KIND, HW)
        b = hadamard_sums(high, MASK, KIND, HW)
    words = ()
    first = ()
    second = ()
    for i in tl.static_range(16):
        if MODEST:
            word = bf16_word(a[i], b[i], HW)
        else:
            word = bf16_word(a[i] * 0.25, b[i] * 0.25, HW)
        words = words + (word,)
        first = first + (low_half(word, WORDS_BF16),)
        second = second + (high_half(word, WORDS_BF16),)
    return words, first, second


@triton.jit
def words_amax(words, KIND: tl.constexpr, IGNORE_NAN: tl.constexpr):
    """Halfwise largest magnitude of a tuple of words."""
    m = words[0]
    for i in tl.static_range(1, len(words)):
        m = packed_max_abs(m, words[i], KIND, IGNORE_NAN)
    return packed_abs(m, KIND)


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
        return larger_half(words_amax(words, KIND, IGNORE_NAN), KIND, IGNORE_NAN)
    else:
        return block_amax(block, IGNORE_NAN)


@triton.jit
def column_block_amax(words, low, high, KIND: tl.constexpr, IGNORE_NAN: tl.constexpr, HW: tl.constexpr):
    """Bits of the amaxes of blocks along the first and the second column of words."""
    if HW and KIND != ELEMENTWISE:
        m = words_amax(words, KIND, IGNORE_NAN)
        a, b = bits_of(low_half(m, KIND)), bits_of(high_half(m, KIND))
        if IGNORE_NAN:
            a, b = drop_nan(a), drop_nan(b)
        return a, b
    else:
        return block_amax(low, IGNORE_NAN), block_amax(high, IGNORE_NAN)


@triton.jit
def choose_bytes(a, b, SELECTOR: tl.constexpr):
    """Four of the eight bytes of (a, b), chosen by the nibbles of SELECTOR, the lowest first."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, SELECTOR], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def sign_words(words, first, second):
    """`words`; where there are none, words that hold the signs of (first[i], second[i])."""
    if len(words) > 0:
        return words
    else:
        made = ()
        for i in tl.static_range(len(first)):
            made = made + (choose_bytes(bits_of(first[i]), bits_of(second[i]), 0x7632),)
        return made


@triton.jit
def rounded_code(y):
    """Nearest-even E2M1 code of |y|, at most 7, in the low byte of a float's bits; NaN gives 7.

    A code is piecewise linear in the value: ``min(2v, v + 2, v / 2 + 4)``. Adding 2^23 in the same operation rounds it.
    The sums are compared as integers, three of which Hopper compares at once.
    """
    v = tl.abs(y)
    a = tl.minimum(bits_of(tl.fma(v, 2.0, 8388608.0)), bits_of(v + 8388610.0))
    return tl.minimum(tl.minimum(a, bits_of(tl.fma(v, 0.5, 8388612.0))), 0x4B000007)


@triton.jit
def nearest_halves(a, b, signs):
    """Halves of the nearest codes of two elements; the code of a NaN is unspecified."""
    return choose_bytes(rounded_code(a), rounded_code(b), 0x4501) | (signs & -2147450880)


@triton.jit
def stochastic_halves(a, b, random, LOWERED: tl.constexpr):
    """Halves of the stochastic codes of two elements; the code of a NaN is unspecified.

    `random`: bytes in bits 0..7 and 16..23, which are added to the upper eight of nine fraction bits. LOWERED: the
    elements are already multiplied by 2^-14.
    """
    if not LOWERED:
        a, b = a * 2.0**-14, b * 2.0**-14
    PTX: tl.constexpr = (
        "{ .reg .b32 v, m; cvt.rz.f16x2.f32 v, $2, $1; mad.lo.u32 v, $3, 2, v; mov.b32 m, 0x0FFF0FFF; "
        "min.xorsign.abs.f16x2 $0, v, m; }"
    )
    return tl.inline_asm_elementwise(PTX, "=r,r,r,r", [a, b, random], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def row_random(random, INDEX: tl.constexpr):
    """Random bytes of elements INDEX (even) and INDEX + 1 of a block with these Philox words."""
    word = random[INDEX // 4].to(tl.int32, bitcast=True)
    if INDEX % 4 == 0:
        return choose_bytes(word, 0, 0x4140)
    else:
        return choose_bytes(word, 0, 0x4342)


@triton.jit
def column_random(low, high, INDEX: tl.constexpr):
    """Random bytes of element INDEX of two blocks with the Philox words `low` and `high`."""
    a, b = low[INDEX // 4].to(tl.int32, bitcast=True), high[INDEX // 4].to(tl.int32, bitcast=True)
    if INDEX % 4 < 2:
        both = choose_bytes(a, b, 0x5140)
    else:
        both = choose_bytes(a, b, 0x7362)
    if INDEX % 2 == 0:
        return choose_bytes(both, 0, 0x4140)
    else:
        return choose_bytes(both, 0, 0x4342)


@triton.jit
def row_halves(block, words, factor, random, STOCHASTIC: tl.constexpr, LOWERED: tl.constexpr):
    """Halves of the eight pairs of neighbours in ``block * factor``."""
    halves = ()
    for i in tl.static_range(8):
        a, b = block[2 * i] * factor, block[2 * i + 1] * factor
        if STOCHASTIC:
            halves = halves + (stochastic_halves(a, b, row_random(random, 2 * i), LOWERED),)
        else:
            halves = halves + (nearest_halves(a, b, words[i]),)
    return halves


@triton.jit
def column_halves(blocks, words, factors, random, STOCHASTIC: tl.constexpr, LOWERED: tl.constexpr):
    """Halves of the sixteen rows of two neighbouring columns; blocks, factors and Philox words are pairs."""
    halves = ()
    for i in tl.static_range(16):
        a, b = blocks[0][i] * factors[0], blocks[1][i] * factors[1]
        if STOCHASTIC:
            halves = halves + (stochastic_halves(a, b, column_random(random[0], random[1], i), LOWERED),)
        else:
            halves = halves + (nearest_halves(a, b, words[i]),)
    return halves


@triton.jit
def oct_of(even, odd, factor):
    """Oct from the upper bytes of the halves of its even and its odd elements; 0x77777777 in a NaN block."""
    codes = (even & 0x07070707) | ((odd << 4) & 0x70707070)
    codes = codes | ((even >> 4) & 0x08080808) | (odd & -2139062144)  # 0x80808080
    return tl.where(factor != factor, 0x77777777, codes)


@triton.jit
def row_oct(halves, factor, FIRST: tl.constexpr):
    """The oct (eight codes in an int32) of the pairs FIRST .. FIRST + 3."""
    a = choose_bytes(halves[FIRST], halves[FIRST + 1], 0x7531)
    b = choose_bytes(halves[FIRST + 2], halves[FIRST + 3], 0x7531)
    return oct_of(choose_bytes(a, b, 0x6420), choose_bytes(a, b, 0x7531), factor)


@triton.jit
def columns_oct(halves, factor_low, factor_high, FIRST: tl.constexpr):
    """Octs of the rows FIRST .. FIRST + 7 of the first and the second column."""
    a = choose_bytes(halves[FIRST], halves[FIRST + 2], 0x7531)
    b = choose_bytes(halves[FIRST + 4], halves[FIRST + 6], 0x7531)
    c = choose_bytes(halves[FIRST + 1], halves[FIRST + 3], 0x7531)
    d = choose_bytes(halves[FIRST + 5], halves[FIRST + 7], 0x7531)
    first = oct_of(choose_bytes(a, b, 0x6420), choose_bytes(c, d, 0x6420), factor_low)
    return first, oct_of(choose_bytes(a, b, 0x7531), choose_bytes(c, d, 0x7531), factor_high)


@triton.jit
def stochastic_oct(y, FIRST: tl.constexpr, random, bad, LOWERED: tl.constexpr):
    """Oct of the stochastic codes of y[FIRST] .. y[FIRST + 7]; 0x77777777 in a `bad` block, which has a NaN.

    Elements two apart share a word, so one selection of bytes gathers all even elements and one all odd elements. The
    bytes hold the code from bit 1 on and the sign in bit 7.
    """
    a, b = random[FIRST // 4].to(tl.int32, bitcast=True), random[FIRST // 4 + 1].to(tl.int32, bitcast=True)
    h0 = stochastic_halves(y[FIRST], y[FIRST + 2], choose_bytes(a, 0, 0x4240), LOWERED)
    h1 = stochastic_halves(y[FIRST + 4], y[FIRST + 6], choose_bytes(b, 0, 0x4240), LOWERED)
    h2 = stochastic_halves(y[FIRST + 1], y[FIRST + 3], choose_bytes(a, 0, 0x4341), LOWERED)
    h3 = stochastic_halves(y[FIRST + 5], y[FIRST + 7], choose_bytes(b, 0, 0x4341), LOWERED)
    # lop3 with 0xE4: bits of the first where the third has ones, else the second's
    PTX: tl.constexpr = (
        "{ .reg .b32 e, o, c, s, t; prmt.b32 e, $1, $2, 0x7531; prmt.b32 o, $3, $4, 0x7531; "
        "shr.u32 c, e, 1; shl.b32 t, o, 3; lop3.b32 c, c, t, 0x0F0F0F0F, 0xE4; "
        "shr.u32 s, e, 4; lop3.b32 s, s, o, 0x0F0F0F0F, 0xE4; lop3.b32 $0, c, s, 0x77777777, 0xE4; }"
    )
    oct = tl.inline_asm_elementwise(PTX, "=r,r,r,r,r", [h0, h1, h2, h3], dtype=tl.int32, is_pure=True, pack=1)
    return tl.where(bad, 0x77777777, oct)


@triton.jit
def stochastic_octs(block, factor, bad, random, LOWERED: tl.constexpr):
    """Both octs of a block, rounded stochastically."""
    y = ()
    for i in tl.static_range(16):
        y = y + (block[i] * factor,)
    return stochastic_oct(y, 0, random, bad, LOWERED), stochastic_oct(y, 8, random, bad, LOWERED)


@triton.jit
def integer_octs(block, factor, random, STOCHASTIC: tl.constexpr):
    """Both octs of a block by integer arithmetic alone."""
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
def row_octs(block, words, factor, bad, random, STOCHASTIC: tl.constexpr, LOWERED: tl.constexpr, HW: tl.constexpr):
    """Both octs of ``block * factor``; `random`: four Philox words (uint32); `bad`: the block has a NaN."""
    if not HW:
        return integer_octs(block, factor, random, STOCHASTIC)
    elif STOCHASTIC:
        return stochastic_octs(block, factor, bad, random, LOWERED)
    else:
        words = sign_words(words, block[0::2], block[1::2])
        halves = row_halves(block, words, factor, random, STOCHASTIC, LOWERED)
        return row_oct(halves, factor, 0), row_oct(halves, factor, 4)


@triton.jit
def column_octs(blocks, words, factors, bad, random, STOCHASTIC: tl.constexpr, LOWERED: tl.constexpr, HW: tl.constexpr):
    """Both octs of each of two neighbouring columns; `bad`: their blocks have a NaN."""
    if not HW:
        first = integer_octs(blocks[0], factors[0], random[0], STOCHASTIC)
        return first, integer_octs(blocks[1], factors[1], random[1], STOCHASTIC)
    elif STOCHASTIC:
        first = stochastic_octs(blocks[0], factors[0], bad[0], random[0], LOWERED)
        return first, stochastic_octs(blocks[1], factors[1], bad[1], random[1], LOWERED)
    else:
        words = sign_words(words, blocks[0], blocks[1])
        halves = column_halves(blocks, words, factors, random, STOCHASTIC, LOWERED)
        a, c = columns_oct(halves, factors[0], factors[1], 0)
        b, d = columns_oct(halves, factors[0], factors[1], 8)
        return (a, b), (c, d)


@triton.jit
def nearest_value(y, HW: tl.constexpr):
    """The value of the nearest E2M1 code of y."""
    if HW:
        return round_by_addition(y, 1, 1)
    else:
        return decode(encode_integer(y, 0, 1, 1, False), 1, 1)


@triton.jit
def integer_values(block, factor, value, random, STOCHASTIC: tl.constexpr):
    """``decode(code of block * factor) * value``, 16 tensors, by integer arithmetic."""
    out = ()
    for i in tl.static_range(16):
        byte = 0
        if STOCHASTIC:
            byte = (random[i // 4].to(tl.int32, bitcast=True) >> (8 * (i % 4))) & 0xFF
        out = out + (decode(encode_integer(block[i] * factor, byte, 1, 1, STOCHASTIC), 1, 1) * value,)
    return out


@triton.jit
def value_word(halves, scales, STOCHASTIC: tl.constexpr, FOLD: tl.constexpr):
    """Values of two codes times two block scales as a word of bfloat16 (FOLD: of float16, in whose range they are);
    exact with at most six significant bits.
    """
    if FOLD:
        word = ((halves << (0 if STOCHASTIC else 1)) & 0x0E000E00) | (halves & -2147450880)  # the value times 2^-14
        PTX: tl.constexpr = "{ .reg .b32 m; mov.b32 m, 0x74007400; mul.rn.f16x2 m, $1, m; mul.rn.f16x2 $0, m, $2; }"
        return tl.inline_asm_elementwise(PTX, "=r,r,r", [word, scales], dtype=tl.int32, is_pure=True, pack=1)
    SHIFT: tl.constexpr = 3 if STOCHASTIC else 2
    word = ((halves >> SHIFT) & 0x01C001C0) | (halves & -2147450880)  # the value times 2^-126
    return scale_word(scale_word(word, 0x7E807E80), scales)


@triton.jit
def fold_words(a, b, HW: tl.constexpr):
    """Four E4M3 codes of two words of values (HW: float16, else bfloat16) as the bytes of an int32, and the number that
    is not exact (HW: in the halves of a word of float16); NaN does not count.
    """
    if HW:
        PTX: tl.constexpr = (
            "{ .reg .b16 p, q; .reg .b32 s, t; cvt.rn.satfinite.e4m3x2.f16x2 p, $2; "
            "cvt.rn.satfinite.e4m3x2.f16x2 q, $3; mov.b32 $0, {p, q}; cvt.rn.f16x2.e4m3x2 s, p; "
            "cvt.rn.f16x2.e4m3x2 t, q; set.ne.f16x2.f16x2 s, s, $2; set.ne.f16x2.f16x2 t, t, $3; "
            "add.rn.f16x2 $1, s, t; }"
        )
        return tl.inline_asm_elementwise(PTX, "=&r,=&r,r,r", [a, b], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    codes, lossy = 0, 0
    values = (low_half(a, WORDS_BF16), high_half(a, WORDS_BF16), low_half(b, WORDS_BF16), high_half(b, WORDS_BF16))
    for i in tl.static_range(4):
        code = encode_integer(values[i], 0, 3, 7, False)
        changed = (decode(code, 3, 7) != values[i]) & (values[i] == values[i])
        codes, lossy = codes | (code << (8 * i)), lossy + tl.where(changed, 1, 0)
    return codes, lossy


@triton.jit
def scale_words(low, high, FOLD: tl.constexpr):
    """Two block scales, powers of two times at most four bits, as a word of bfloat16 (FOLD: of float16)."""
    if FOLD:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return factor_word(low, high)


@triton.jit
def row_values(
    block, words, factor, value, random, STOCHASTIC: tl.constexpr, LOWERED: tl.constexpr, FOLD: tl.constexpr,
    HW: tl.constexpr,
):  # fmt: skip
    """``decode(code of block * factor) * value`` of a block: eight words, for `fold_words` if FOLD, else bfloat16."""
    out = ()
    if HW:
        words = sign_words(words, block[0::2], block[1::2])
        halves = row_halves(block, words, factor, random, STOCHASTIC, LOWERED)
        scales = scale_words(value, value, FOLD)
        for i in tl.static_range(8):
            out = out + (value_word(halves[i], scales, STOCHASTIC, FOLD),)
    else:
        values = integer_values(block, factor, value, random, STOCHASTIC)
        for i in tl.static_range(8):
            out = out + (bf16_word(values[2 * i], values[2 * i + 1], HW),)
    return out


@triton.jit
def column_values(
    blocks, words, factors, values, random, STOCHASTIC: tl.constexpr, LOWERED: tl.constexpr, FOLD: tl.constexpr,
    HW: tl.constexpr,
):  # fmt: skip
    """`row_values` of two neighbouring columns: sixteen words, one per row."""
    out = ()
    if HW:
        words = sign_words(words, blocks[0], blocks[1])
        halves = column_halves(blocks, words, factors, random, STOCHASTIC, LOWERED)
        scales = scale_words(values[0], values[1], FOLD)
        for i in tl.static_range(16):
            out = out + (value_word(halves[i], scales, STOCHASTIC, FOLD),)
    else:
        a = integer_values(blocks[0], factors[0], values[0], random[0], STOCHASTIC)
        b = integer_values(blocks[1], factors[1], values[1], random[1], STOCHASTIC)
        for i in tl.static_range(16):
            out = out + (bf16_word(a[i], b[i], HW),)
    return out
