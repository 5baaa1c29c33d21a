"""Counts where the two forms of `_convert` differ, over all float32 inputs: run on a GPU, where both exist."""

import triton
import triton.language as tl

from microfloat.kernels._convert import (
    bf16_bits,
    decode,
    encode,
    encode_e4m3_scale,
    encode_integer,
    encode_pair,
    encode_quad,
    float_of,
    quantized_pair,
)


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
