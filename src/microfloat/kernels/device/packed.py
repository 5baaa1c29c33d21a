"""Arithmetic on words of two bfloat16 or float16 elements, for casts with power-of-two scales (hardware forms only).

A bfloat16 times a power of two is exact unless the product is below 2^-126, where every element format rounds to zero.
So MX casts of bfloat16 inputs multiply, round and compare both halves of a word at once, without float32. All
arithmetic is `fma.rn` (compute capability 8.0 and newer); adding -0.0 keeps the sign of a zero product.
"""

import triton
import triton.language as tl

from microfloat.kernels.device.convert import (
    WORDS_BF16,
    WORDS_F16,
    bits_of,
    cvt_pair,
    cvt_quad,
    element_bits,
    high_half,
    low_half,
    packed_max,
)


@triton.jit
def fma_bf16x2(a, b, c):
    """Halfwise a * b + c, rounded once."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def min_bf16x2(a, b):
    """Halfwise minimum, NaN loses."""
    return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def factor_word(low, high):
    """Two float32 powers of two (or NaN) as one word of bfloat16."""
    return ((bits_of(low) >> 16) & 0xFFFF) | (bits_of(high) & -65536)


@triton.jit
def scale_word(word, factors):
    """Halfwise product with powers of two."""
    return fma_bf16x2(word, factors, -2147450880)  # + (-0.0, -0.0)


@triton.jit
def e2m1_codes(y):
    """Halfwise nearest-even E2M1 codes of |y| in bits 0..7 of each half; NaN gives 7.

    ``min(2v, v + 2, v / 2 + 4)`` as in `fp4.rounded_code`; adding 128 in the same operation rounds.
    """
    v = y & 0x7FFF7FFF
    a = fma_bf16x2(v, 0x40004000, 0x43004300)  # 2 v + 128
    b = fma_bf16x2(v, 0x3F803F80, 0x43024302)  # v + 130
    c = fma_bf16x2(v, 0x3F003F00, 0x43044304)  # v / 2 + 132
    return min_bf16x2(min_bf16x2(a, b), min_bf16x2(c, 0x43074307))


@triton.jit
def pack_e2m1_rows(t, y):
    """Bytes of two codes each from words t of codes and y of signs, four words of a row at once."""
    PTX: tl.constexpr = (
        "{ .reg .b32 a, b, l, h; "
        "prmt.b32 a, $1, $2, 0x6420; prmt.b32 b, $3, $4, 0x6420; "
        "prmt.b32 l, a, b, 0x6420; prmt.b32 h, a, b, 0x7531; shl.b32 h, h, 4; or.b32 $0, l, h; "
        "prmt.b32 a, $5, $6, 0x7531; prmt.b32 b, $7, $8, 0x7531; "
        "prmt.b32 l, a, b, 0x6420; prmt.b32 h, a, b, 0x7531; shr.u32 l, l, 4; "
        "and.b32 l, l, 0x08080808; and.b32 h, h, 0x80808080; or.b32 $0, $0, l; or.b32 $0, $0, h; }"
    )
    return tl.inline_asm_elementwise(PTX, "=&r,r,r,r,r,r,r,r,r", [t, y], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def pack_e2m1_columns(t0, t1, t2, t3, y0, y1, y2, y3):
    """int16 of four codes for the first and the second column, from words of four rows."""
    PTX: tl.constexpr = (
        "{ .reg .b32 a, b; "
        "prmt.b32 a, $1, $3, 0x6420; prmt.b32 b, $2, $4, 0x6420; shl.b32 b, b, 4; or.b32 $0, a, b; "
        "prmt.b32 a, $5, $7, 0x7531; prmt.b32 b, $6, $8, 0x7531; shr.u32 a, a, 4; "
        "and.b32 a, a, 0x08080808; and.b32 b, b, 0x80808080; or.b32 $0, $0, a; or.b32 $0, $0, b; "
        "prmt.b32 $0, $0, 0, 0x3120; }"
    )
    both = tl.inline_asm_elementwise(
        PTX, "=&r,r,r,r,r,r,r,r,r", [t0, t1, t2, t3, y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1
    )
    return both.to(tl.int16), (both >> 16).to(tl.int16)


@triton.jit
def small_codes(y, MB: tl.constexpr, BIAS: tl.constexpr):
    """Halfwise nearest-even codes of 6-bit elements with signs, in bits 0..7 of each half; NaN gives the largest."""
    # bfloat16 patterns of max, of the smallest normal number, and of what makes a binade the unit of addition.
    MAX: tl.constexpr = ((128 + BIAS) << 7) + (((1 << MB) - 1) << (7 - MB))
    NORMAL: tl.constexpr = (128 - BIAS) << 7
    UNIT: tl.constexpr = (7 - MB) << 7
    v = min_bf16x2(y & 0x7FFF7FFF, MAX * 65537)
    binade = packed_max(v, NORMAL * 65537, WORDS_BF16, True) & 0x7F807F80
    unit = binade + UNIT * 65537
    sum = fma_bf16x2(v, 0x3F803F80, unit)
    code = (sum - unit) + (binade >> (7 - MB)) - ((128 - BIAS) << MB) * 65537
    return code | ((y >> 10) & 0x00200020)


@triton.jit
def both_low(a, b, HW: tl.constexpr):
    """The first halves of two words."""
    if HW:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (a & 0xFFFF) | (b << 16)


@triton.jit
def both_high(a, b, HW: tl.constexpr):
    """The second halves of two words."""
    if HW:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((a >> 16) & 0xFFFF) | (b & -65536)


@triton.jit
def packed_pairs(y, MB: tl.constexpr, BIAS: tl.constexpr):
    """`encode_pair` of the halves of words of scaled bfloat16."""
    if element_bits(MB, BIAS) == 4:
        return pack_e2m1_rows(e2m1_codes(y), y)
    elif BIAS < 7:
        PTX: tl.constexpr = "prmt.b32 $0, $1, $2, 0x6420;"  # bytes 0 and 2 of a word, two words of a row at once
        return tl.inline_asm_elementwise(
            PTX, "=r,r,r", [small_codes(y, MB, BIAS)], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        return cvt_pair(low_half(y, WORDS_BF16), high_half(y, WORDS_BF16), MB)


@triton.jit
def packed_quads(y0, y1, y2, y3, MB: tl.constexpr, BIAS: tl.constexpr):
    """`encode_quad` of the first and of the second halves of words of scaled bfloat16 from four rows."""
    if element_bits(MB, BIAS) == 4:
        return pack_e2m1_columns(e2m1_codes(y0), e2m1_codes(y1), e2m1_codes(y2), e2m1_codes(y3), y0, y1, y2, y3)
    elif BIAS < 7:  # bytes 0 and 2 of the words of four rows
        a = small_codes(y0, MB, BIAS) | (small_codes(y1, MB, BIAS) << 8)
        b = small_codes(y2, MB, BIAS) | (small_codes(y3, MB, BIAS) << 8)
        return both_low(a, b, True), both_high(a, b, True)
    else:
        low = cvt_quad(
            low_half(y0, WORDS_BF16), low_half(y1, WORDS_BF16), low_half(y2, WORDS_BF16), low_half(y3, WORDS_BF16), MB
        )
        high = cvt_quad(
            high_half(y0, WORDS_BF16), high_half(y1, WORDS_BF16), high_half(y2, WORDS_BF16), high_half(y3, WORDS_BF16),
            MB,
        )  # fmt: skip
        return low, high


@triton.jit
def fold_pair(low, high, shift):
    """E4M3 codes of two floats, shifted by ``2^d`` and encoded again; 1.0 in the float16 half of each lossy element.

    `shift`: words of two float16 ``2^(6 + d)``, -20 <= d <= 0, or NaN. An E4M3 value times this is exact in float16. It
    is no multiple of E4M3's smallest step exactly where adding and subtracting 192 changes it.
    """
    PTX: tl.constexpr = (
        "{ .reg .b16 p; .reg .b32 h, u, t, n; cvt.rn.satfinite.e4m3x2.f32 p, $3, $2; cvt.rn.f16x2.e4m3x2 h, p; "
        "mul.rn.f16x2 h, h, $4; abs.f16x2 u, h; mov.b32 n, 0x3C003C00; min.f16x2 u, u, n; "
        "mov.b32 n, 0x5A005A00; add.rn.f16x2 t, u, n; sub.rn.f16x2 t, t, n; set.ne.f16x2.f16x2 $1, t, u; "
        "mov.b32 n, 0x24002400; mul.rn.f16x2 h, h, n; cvt.rn.satfinite.e4m3x2.f16x2 p, h; mov.b32 $0, {p, 0}; }"
    )
    return tl.inline_asm_elementwise(
        PTX, "=r,=r,r,r,r", [low, high, shift], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def add_f16x2(a, b):
    """Halfwise sum."""
    return tl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def count_halves(words):
    """Sum of both halves of a two-dimensional tensor of float16 pairs, as an integer."""
    low, high = low_half(words, WORDS_F16), high_half(words, WORDS_F16)
    return tl.sum(tl.sum(low + high, 1), 0).to(tl.int32)


@triton.jit
def shift_word(byte, exponent, largest):
    """Word of ``2^(6 + byte - Eg)`` in float16, twice, at least 2^-14; NaN in a NaN group."""
    field = tl.maximum(byte - exponent, -20) + 21
    half = tl.where(largest == 255, 0x7E00, field << 10)
    return half | (half << 16)
