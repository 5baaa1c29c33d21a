"""Pieces of the products with stored codes: elements as words of two bfloat16 in registers, and early starts."""

import triton
import triton.language as tl

from microfloat.kernels.casts.dequantize import SCALE_E8M0
from microfloat.kernels.device.convert import (
    WORDS_BF16,
    WORDS_F16,
    bf16_word,
    decode,
    fp8_text,
    high_half,
    low_half,
)
from microfloat.kernels.device.packed import scale_word


@triton.jit
def placed_fp4(word):
    """The pairs (i, i + 4) of eight E2M1 codes as bfloat16 words times 2^-126: a shifted code is a bfloat16 so small.

    One multiplication copies a nibble to where the sign goes and to where exponent and mantissa go.
    """
    high = word >> 8
    p0 = ((word & 0x000F000F) * 0x1040) & -2117828160  # 0x81C081C0
    p1 = ((word & 0x00F000F0) * 0x0104) & -2117828160
    p2 = ((high & 0x000F000F) * 0x1040) & -2117828160
    p3 = ((high & 0x00F000F0) * 0x0104) & -2117828160
    return p0, p1, p2, p3


@triton.jit
def fp8_pairs(word, MB: tl.constexpr, BIAS: tl.constexpr, CONVERSIONS: tl.constexpr):
    """The pairs (0, 1) and (2, 3) of four codes of a byte each as bfloat16 words."""
    if CONVERSIONS and BIAS >= 7:
        PTX: tl.constexpr = fp8_text(
            "{ .reg .b16 p, q, a, b, c, d; .reg .b32 u, v; .reg .f32 e, f; mov.b32 {p, q}, $2; "
            "cvt.rn.f16x2.FP8x2 u, p; mov.b32 {a, b}, u; cvt.f32.f16 e, a; cvt.f32.f16 f, b; "
            "cvt.rn.bf16x2.f32 $0, f, e; "
            "cvt.rn.f16x2.FP8x2 v, q; mov.b32 {c, d}, v; cvt.f32.f16 e, c; cvt.f32.f16 f, d; "
            "cvt.rn.bf16x2.f32 $1, f, e; }",
            MB,
        )
        return tl.inline_asm_elementwise(PTX, "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    else:
        first = bf16_word(decode(word & 0xFF, MB, BIAS), decode((word >> 8) & 0xFF, MB, BIAS), False)
        second = bf16_word(decode((word >> 16) & 0xFF, MB, BIAS), decode((word >> 24) & 0xFF, MB, BIAS), False)
        return first, second


@triton.jit
def part_of_x(word, KIND: tl.constexpr, PART: tl.constexpr, HW: tl.constexpr):
    """Two elements of x as bfloat16: themselves, or of float16 the rounded values (PART 0) and what is left (1)."""
    if KIND == WORDS_BF16:
        return word
    else:
        low, high = low_half(word, WORDS_F16), high_half(word, WORDS_F16)
        rounded = bf16_word(low, high, HW)
        if PART == 0:
            return rounded
        else:
            return bf16_word(low - low_half(rounded, WORDS_BF16), high - high_half(rounded, WORDS_BF16), HW)


@triton.jit
def scale_words(stored, CODES: tl.constexpr, CONVERSIONS: tl.constexpr, HW: tl.constexpr):
    """The factors of a lane's codes as words of two equal bfloat16: of their two halves."""
    if CODES.SCALE == SCALE_E8M0:  # an exponent; of 2^-127 and of NaN, 0 and 255, the first bit of the fraction as well
        fraction = tl.where(((stored + 1) & 0xFE) == 0, 0x00400040, 0)
        word = stored * 0x00800080 | fraction
        return word, word
    else:
        if CONVERSIONS:
            PTX: tl.constexpr = (
                "{ .reg .b16 a, b; .reg .b32 h; cvt.rn.f16x2.e4m3x2 h, $2; "
                "mov.b32 {a, b}, h; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
            )
            low, high = tl.inline_asm_elementwise(
                PTX, "=r,=r,h", [stored.to(tl.int16)], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
            )
        else:
            low, high = decode(stored & 0xFF, 3, 7), decode((stored >> 8) & 0xFF, 3, 7)
        low, high = low * 2.0**119, high * 2.0**119
        return bf16_word(low, low, HW), bf16_word(high, high, HW)


@triton.jit
def times(a, b, HW: tl.constexpr):
    if HW:
        return scale_word(a, b)
    else:
        low = low_half(a, WORDS_BF16) * low_half(b, WORDS_BF16)
        return bf16_word(low, high_half(a, WORDS_BF16) * high_half(b, WORDS_BF16), False)


@triton.jit
def ask_for(at, here):
    """Ask the L2 cache for the lines at these addresses where `here` is not 0."""
    PTX: tl.constexpr = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }"
    tl.inline_asm_elementwise(PTX, "=r,l,r", [at.to(tl.int64), here], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def begin_after():
    """Let the next launch begin, and wait until earlier ones have written all they write; returns 0.

    What is read after that has this 0 in its address: no compiler moves it forward then.
    """
    PTX: tl.constexpr = "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 $0, 0;"
    return tl.inline_asm_elementwise(PTX, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
