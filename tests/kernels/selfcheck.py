"""Counts where the two forms of `_convert` differ, over all float32 inputs: run on a GPU, where both exist."""

import triton
import triton.language as tl

from microfloat.kernels.casts.blocks import packed_pairs, packed_quads
from microfloat.kernels.casts.fold import group_shift, is_lossy
from microfloat.kernels.device.convert import (
    WORDS_BF16,
    WORDS_F16,
    bf16_bits,
    decode,
    element_bits,
    encode,
    encode_e4m3_scale,
    encode_integer,
    encode_pair,
    encode_quad,
    float_of,
    high_half,
    low_half,
    quantized_pair,
)
from microfloat.kernels.device.packed import fold_pair, scale_word, shift_word
from microfloat.kernels.device.scales import reciprocal_of_normal


@triton.jit
def _same(a, b):
    """True if two float32 tensors hold the same bits, all NaN being one."""
    return (a.to(tl.int32, bitcast=True) == b.to(tl.int32, bitcast=True)) | ((a != a) & (b != b))


@triton.jit
def _count(count_ptr, bad):
    """Add the number of true entries."""
    count = tl.sum(bad.to(tl.int32), 0)
    if count > 0:
        tl.atomic_add(count_ptr, count)


@triton.jit
def _pattern(bits, BIAS: tl.constexpr):
    """The float32 of a bit pattern; for formats without NaN a NaN has no sign."""
    if BIAS < 7:
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits & 0x7FFFFFFF, bits)
    return float_of(bits)


@triton.jit
def count_differences(
    count_ptr, CHECK: tl.constexpr, MB: tl.constexpr, BIAS: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr
):
    """Add to the int32 ``count`` the differences in pairs (CHECK 0), quads (1), values (2), E4M3 scales and bf16 (3).

    Program p looks at the BLOCK bit patterns from ``p * BLOCK`` on, so 2^32 / BLOCK programs see every float32. Where
    the hardware form requires a NaN without sign, a negative NaN is replaced by a positive one. One check a program,
    and no two operands that are one value: where one conversion serves two of these uses, the assembler of Triton 3.6
    (CUDA 12.8) reads the stack pointer for the second (`unwritten_reads` in tests/kernels/compiling.py finds that).
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = _pattern(at, BIAS)
    y = _pattern(at ^ (1 << 24), BIAS)
    random = (at * 668265263) ^ (at >> 7)
    a = encode_integer(x, random & 0xFF, MB, BIAS, STOCHASTIC)
    b = encode_integer(y, (random >> 8) & 0xFF, MB, BIAS, STOCHASTIC)
    if CHECK == 0:
        pair = encode_pair(x, y, random, MB, BIAS, STOCHASTIC, True)
        if element_bits(MB, BIAS) == 4:
            bad = pair != (a | (b << 4)).to(tl.int8)
        else:
            bad = pair != (a | (b << 8)).to(tl.int16)
    if CHECK == 1:
        z, w = _pattern(at ^ (1 << 25), BIAS), _pattern(at ^ (3 << 24), BIAS)
        c = encode_integer(z, (random >> 16) & 0xFF, MB, BIAS, STOCHASTIC)
        d = encode_integer(w, (random >> 24) & 0xFF, MB, BIAS, STOCHASTIC)
        quad = encode_quad(x, y, z, w, random, MB, BIAS, STOCHASTIC, True)
        if element_bits(MB, BIAS) == 4:
            bad = quad != (a | (b << 4) | (c << 8) | (d << 12)).to(tl.int16)
        else:
            bad = quad != (a | (b << 8) | (c << 16) | (d << 24))
    if CHECK == 2:
        p, q = quantized_pair(x, y, random, random >> 8, MB, BIAS, STOCHASTIC, True)
        bad = (_same(p, decode(a, MB, BIAS)) & _same(q, decode(b, MB, BIAS))) == 0
    if CHECK == 3:
        magnitude = tl.abs(x)
        bad = encode_e4m3_scale(magnitude, True) != encode(magnitude, 0, 3, 7, False, False)
        bad |= (bf16_bits(x, True) != bf16_bits(x, False)) & (x == x)
    _count(count_ptr, bad)


@triton.jit
def count_reciprocal_differences(count_ptr, BLOCK: tl.constexpr):
    """Add to the int32 ``count`` where `reciprocal_of_normal` differs from a division, for 2^-126 <= x < 2^126.

    Program p looks at the BLOCK bit patterns from ``p * BLOCK`` on: 2^31 / BLOCK programs see all positive ones.
    """
    bits = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = float_of(bits)
    inside = (bits >= 0x00800000) & (bits < 0x7E800000)
    _count(count_ptr, inside & (_same(reciprocal_of_normal(x), tl.div_rn(1.0, x)) == 0))


@triton.jit
def _quad_of(a, b, c, d, MB: tl.constexpr, BIAS: tl.constexpr):
    """Four codes by the integer form, packed as `encode_quad` packs them."""
    p = encode_integer(a, 0, MB, BIAS, False)
    q = encode_integer(b, 0, MB, BIAS, False)
    r = encode_integer(c, 0, MB, BIAS, False)
    s = encode_integer(d, 0, MB, BIAS, False)
    if element_bits(MB, BIAS) == 4:
        return (p | (q << 4) | (r << 8) | (s << 12)).to(tl.int16)
    else:
        return p | (q << 8) | (r << 16) | (s << 24)


@triton.jit
def count_packed_differences(counts_ptr, MB: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Add to int32 ``counts[0..3]``: differences of packed pairs and quads, and (E4M3) of folded codes and their marks.

    Program p puts the bfloat16 patterns from ``p * BLOCK`` on into the first halves of words and others into the
    second: 2^16 / BLOCK programs see all. Folding looks at every code and shift there is.
    """
    lane = tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    pattern = tl.program_id(0) * BLOCK + lane
    word = (pattern & 0xFFFF) | (((pattern * 40503 + 12345) & 0xFFFF) << 16)
    y = scale_word(word, 0x3F803F80)
    a = encode_integer(low_half(y, WORDS_BF16), 0, MB, BIAS, False)
    b = encode_integer(high_half(y, WORDS_BF16), 0, MB, BIAS, False)
    pair = packed_pairs(y, MB, BIAS)
    # Three more words whose patterns are not in this program: see `count_differences`.
    y1 = scale_word(word ^ 0x20002000, 0x3F803F80)
    y2 = scale_word(word ^ 0x40004000, 0x3F803F80)
    y3 = scale_word(word ^ 0x60006000, 0x3F803F80)
    low, high = packed_quads(y, y1, y2, y3, MB, BIAS)
    want_low = _quad_of(
        low_half(y, WORDS_BF16), low_half(y1, WORDS_BF16), low_half(y2, WORDS_BF16), low_half(y3, WORDS_BF16), MB, BIAS
    )
    want_high = _quad_of(
        high_half(y, WORDS_BF16), high_half(y1, WORDS_BF16), high_half(y2, WORDS_BF16), high_half(y3, WORDS_BF16),
        MB, BIAS,
    )  # fmt: skip
    bad_quad = (low != want_low) | (high != want_high)
    if element_bits(MB, BIAS) == 4:
        bad_pair = pair != (a | (b << 4)).to(tl.int8)
    else:
        bad_pair = pair != (a | (b << 8)).to(tl.int16)
    _count(counts_ptr, tl.reshape(bad_pair, [BLOCK]))
    _count(counts_ptr + 1, tl.reshape(bad_quad, [BLOCK]))
    if BIAS == 7:
        value = decode(pattern & 0xFF, 3, 7)
        byte, exponent, largest = 1 + (pattern >> 8), 255, 254  # shifts from -254 to 1; larger than 0 never happens
        byte = tl.minimum(byte, 255)
        codes, lossy = fold_pair(value, value, shift_word(byte, exponent, largest))
        shifted = value * group_shift(byte, exponent, largest)
        want = encode_integer(shifted, 0, 3, 7, False)
        mark = low_half(lossy, WORDS_F16).to(tl.int32)
        _count(counts_ptr + 2, tl.reshape((codes & 0xFFFF) != (want | (want << 8)), [BLOCK]))
        _count(
            counts_ptr + 3, tl.reshape((mark != is_lossy(shifted, 7)) | (lossy != ((lossy & 0xFFFF) * 65537)), [BLOCK])
        )
