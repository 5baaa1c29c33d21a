"""Fragments of products with stored codes: decoding to words of two bfloat16, loads and products of one warp,
programmatic dependent launch, and the scaling and storing of sums."""

import triton
import triton.language as tl

from microfloat.kernels.casts.dequantize import SCALE_E4M3, SCALE_E8M0, SCALE_FLOAT
from microfloat.kernels.device.convert import (
    WORDS_BF16,
    WORDS_F16,
    bf16_bits,
    bf16_word,
    decode,
    fp8_text,
    high_half,
    low_half,
)
from microfloat.kernels.device.packed import scale_word


@triton.jit
def placed_fp4(word):
    """Pairs (i, i + 4) of eight E2M1 codes as bfloat16 words, times 2^-126: the shifted code is that bfloat16.

    One multiplication copies a nibble to the position of the sign and to that of exponent and mantissa.
    """
    high = word >> 8
    p0 = ((word & 0x000F000F) * 0x1040) & -2117828160  # 0x81C081C0
    p1 = ((word & 0x00F000F0) * 0x0104) & -2117828160
    p2 = ((high & 0x000F000F) * 0x1040) & -2117828160
    p3 = ((high & 0x00F000F0) * 0x0104) & -2117828160
    return p0, p1, p2, p3


@triton.jit
def fp8_pairs(word, MB: tl.constexpr, BIAS: tl.constexpr, CONVERSIONS: tl.constexpr):
    """Pairs (0, 1) and (2, 3) of four one-byte codes as bfloat16 words."""
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
    """Two elements of x as bfloat16; of float16 the rounded values (PART 0) or the remainders (PART 1)."""
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
    """Scales of both halves of a lane's codes, each as a word of two equal bfloat16."""
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
    """Prefetch the cache lines at these addresses into the L2 cache where `here` is not 0."""
    PTX: tl.constexpr = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }"
    tl.inline_asm_elementwise(PTX, "=r,l,r", [at.to(tl.int64), here], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def begin_after():
    """Let the next launch begin, and wait for all writes of earlier launches; returns 0.

    Later loads add this 0 to their addresses, so that no compiler moves them before the wait.
    """
    PTX: tl.constexpr = "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 $0, 0;"
    return tl.inline_asm_elementwise(PTX, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def scaled(pairs, scale, CODES: tl.constexpr, HW: tl.constexpr):
    """Words of pairs times the word of their scales."""
    made = ()
    for i in tl.static_range(len(pairs)):
        value = pairs[i]
        if CODES.SCALE == SCALE_E8M0 and CODES.BITS == 4:
            value = times(value, 0x7E807E80 + tl.zeros_like(value), HW)
        made = made + (times(value, scale, HW),)
    return made


@triton.jit
def multiply(a0, a1, a2, a3, b0, b1, c, HW: tl.constexpr):
    """c + A @ B in registers of one warp; c: sums of row g for tokens 2t and 2t + 1, then of row g + 8."""
    if HW:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
            "{$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first = _sums(a0, a2, b0, b1)
        second = _sums(a1, a3, b0, b1)
        return c[0] + first[0], c[1] + first[1], c[2] + second[0], c[3] + second[1]


@triton.jit
def _sums(a0, a1, b0, b1):
    """Sums that one tensor-core product adds to a row, by plain operations."""
    total = _dots(low_half(a0, WORDS_BF16), low_half(b0, WORDS_BF16))
    total += _dots(high_half(a0, WORDS_BF16), high_half(b0, WORDS_BF16))
    total += _dots(low_half(a1, WORDS_BF16), low_half(b1, WORDS_BF16))
    total += _dots(high_half(a1, WORDS_BF16), high_half(b1, WORDS_BF16))
    return tl.split(tl.reshape(total, [a0.shape[0], 2]))


@triton.jit
def _dots(a, b):
    W: tl.constexpr = a.shape[0] // 32
    return tl.sum(tl.reshape(a, [W, 8, 1, 4]) * tl.reshape(b, [W, 1, 8, 4]), 3)


@triton.jit
def _unstack(words):
    """The four columns of [L, 4], each with one entry per lane."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


def _text_of_load(kept: str, zero: bool) -> tl.constexpr:
    """PTX that loads 16 bytes into $0 to $3 from $4 where $5 is not 0, and else leaves anything there, or 0."""
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(4)) if zero else ""
    load = f"@p ld.global.L1::{kept}.v4.b32 {{$0, $1, $2, $3}}, [$4];"
    return tl.constexpr(f"{{ .reg .pred p; setp.ne.s32 p, $5, 0; {zeros} {load} }}")


_KEPT, _KEPT_OR_ZERO = _text_of_load("evict_last", False), _text_of_load("evict_last", True)
_ONCE, _ONCE_OR_ZERO = _text_of_load("no_allocate", False), _text_of_load("no_allocate", True)


@triton.jit
def four_words(at, here, ZERO: tl.constexpr, ONCE: tl.constexpr, HW: tl.constexpr):
    """16 bytes for each lane where `here` is not 0, elsewhere unspecified or (ZERO) 0. ONCE: no other lane reads them.

    The load is inline assembly, which Triton does not pipeline.
    """
    if HW:
        if ONCE:
            PTX: tl.constexpr = _ONCE_OR_ZERO if ZERO else _ONCE
        else:
            PTX: tl.constexpr = _KEPT_OR_ZERO if ZERO else _KEPT
        return tl.inline_asm_elementwise(
            PTX, "=&r,=&r,=&r,=&r,l,r", [at.to(tl.int64), here],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return _unstack(tl.load(at[:, None] + tl.arange(0, 4)[None, :], mask=(here != 0)[:, None], other=0))


@triton.jit
def finished(
    total, row, inside, scale_ptr, level_ptr, bias_ptr, scale_stride_r, level_stride, CODES: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """Sums times their row scale and tensor scale, plus the bias."""
    if CODES.SCALE == SCALE_E4M3:
        total = total * 128.0
    if CODES.SCALE == SCALE_FLOAT and CODES.WIDTH == 0:
        total = total * tl.load(scale_ptr + row * scale_stride_r, mask=inside, other=0.0)
    if CODES.LEVEL:
        total = total * tl.load(level_ptr + row * level_stride, mask=inside, other=0.0)
    if CUT.BIAS:
        total = total + tl.load(bias_ptr + row, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def put(at, total, inside, HW: tl.constexpr):
    """Store y in its dtype."""
    if at.dtype.element_ty == tl.bfloat16:
        tl.store(at.to(tl.pointer_type(tl.int16)), bf16_bits(total, HW).to(tl.int16), mask=inside)
    else:
        tl.store(at, total.to(at.dtype.element_ty), mask=inside)
