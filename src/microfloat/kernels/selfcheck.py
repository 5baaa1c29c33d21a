"""Counts where the two forms of `_convert` differ, over all float32 inputs: run on a GPU, where both exist."""

import triton
import triton.language as tl

from microfloat.kernels._convert import (
    WORDS_BF16,
    WORDS_F16,
    bf16_bits,
    decode,
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
from microfloat.kernels._packed import fold_pair, scale_word, shift_word
from microfloat.kernels.blocks import packed_pairs, packed_quads
from microfloat.kernels.fold import group_shift, is_lossy


@triton.jit
def _same(a, b):
    """Whether two float32 tensors hold the same bits, all NaN being one."""
    return (a.to(tl.int32, bitcast=True) == b.to(tl.int32, bitcast=True)) | ((a != a) & (b != b))


@triton.jit
def _count(count_ptr, bad):
    """Add the number of true entries."""
    count = tl.sum(bad.to(tl.int32), 0)
    if count > 0:
        tl.atomic_add(count_ptr, count)


@triton.jit
def count_differences(counts_ptr, MB: tl.constexpr, BIAS: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    """Add to int32 ``counts[0..3]``: differences in pairs, quads, values and (E4M3, nearest) block scales and bf16.

    Program p looks at the BLOCK bit patterns from ``p * BLOCK`` on, so 2^32 / BLOCK programs see every float32. Where
    the hardware form requires a NaN without sign, a negative NaN is replaced by a positive one.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if BIAS < 7:
        at = tl.where((at & 0x7FFFFFFF) > 0x7F800000, at & 0x7FFFFFFF, at)
    x = float_of(at)
    random = (at * 668265263) ^ (at >> 7)
    a = encode_integer(x, random & 0xFF, MB, BIAS, STOCHASTIC)
    b = encode_integer(x, (random >> 8) & 0xFF, MB, BIAS, STOCHASTIC)
    c = encode_integer(x, (random >> 16) & 0xFF, MB, BIAS, STOCHASTIC)
    d = encode_integer(x, (random >> 24) & 0xFF, MB, BIAS, STOCHASTIC)
    pair = encode_pair(x, x, random, MB, BIAS, STOCHASTIC, True)
    quad = encode_quad(x, x, x, x, random, MB, BIAS, STOCHASTIC, True)
    if MB + BIAS == 2:
        bad_pair = pair != (a | (b << 4)).to(tl.int8)
        bad_quad = quad != (a | (b << 4) | (c << 8) | (d << 12)).to(tl.int16)
    else:
        bad_pair = pair != (a | (b << 8)).to(tl.int16)
        bad_quad = quad != (a | (b << 8) | (c << 16) | (d << 24))
    p, q = quantized_pair(x, x, random, random >> 8, MB, BIAS, STOCHASTIC, True)
    bad_value = (_same(p, decode(a, MB, BIAS)) & _same(q, decode(b, MB, BIAS))) == 0
    _count(counts_ptr, bad_pair)
    _count(counts_ptr + 1, bad_quad)
    _count(counts_ptr + 2, bad_value)
    if BIAS == 7 and not STOCHASTIC:
        magnitude = tl.abs(x)
        bad = encode_e4m3_scale(magnitude, True) != encode(magnitude, 0, 3, 7, False, False)
        low, high = bf16_bits(x, True), bf16_bits(x, False)
        bad |= (low != high) & (x == x)
        _count(counts_ptr + 3, bad)


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
    low, high = packed_quads(y, y, y, y, MB, BIAS)
    if MB + BIAS == 2:
        bad_pair = pair != (a | (b << 4)).to(tl.int8)
        bad_quad = (low != (a * 0x1111).to(tl.int16)) | (high != (b * 0x1111).to(tl.int16))
    else:
        bad_pair = pair != (a | (b << 8)).to(tl.int16)
        bad_quad = (low != a * 0x1010101) | (high != b * 0x1010101)
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
