"""Blocks of 16 elements as 16 tensors: how they are read, their Hadamard transform and their largest magnitudes.

A *block* is a tuple of 16 float32 tensors of one shape, one entry per block; it lies in the registers of one lane.
Where blocks run along rows, a lane holds 16 neighbouring columns; where they run along columns, 16 rows of two columns
(docs/numerics.md 5.2). Their codes: `fp4`.
"""

import triton
import triton.language as tl

from microfloat.kernels.device.convert import (
    ELEMENTWISE,
    WORDS_BF16,
    bf16_word,
    bits_of,
    drop_nan,
    high_half,
    larger_half,
    low_half,
    magnitude_bits,
    packed_abs,
    packed_max_abs,
    round_bf16,
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
def stack8(words):
    """8 tensors [X, Y] -> [X, Y, 2, 4] in registers, so that a lane stores its words four at a time."""
    even = tl.join(tl.join(words[0], words[4]), tl.join(words[2], words[6]))
    odd = tl.join(tl.join(words[1], words[5]), tl.join(words[3], words[7]))
    X: tl.constexpr = words[0].shape[0]
    Y: tl.constexpr = words[0].shape[1]
    return tl.reshape(tl.join(tl.reshape(even, [X, Y, 4]), tl.reshape(odd, [X, Y, 4])), [X, Y, 2, 4])


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
        j = tl.arange(0, 2)[None, None, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
        w = b * 8 + j
        at = tile_ptr.to(tl.pointer_type(tl.int32)) + (r * (stride_r // 2) + b * 8) + j
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
def _butterfly(v, STAGES: tl.constexpr):
    """The first stages of the 16-point transform, of four: distances 1, 2, 4, 8 in this order."""
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
    """``4 H diag(sgn) bf16(x)`` over 4, not yet rounded: multiply by 0.25 and round to bfloat16 to finish."""
    return _butterfly(hadamard_inputs(block, MASK, KIND, HW), 4)


@triton.jit
def quarter_sums(block, MASK: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr):
    """0.25 of `hadamard_sums`, finite where that quarter is, also where the sum itself is not."""
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
    """The largest magnitude of `hadamard_sums` (float32), NaN ignored: that of the transform is 0.25 of it, rounded.

    ``max(|a + b|, |a - b|)`` is ``|a| + |b|``, so the last stage takes one addition for two elements.
    """
    v = _butterfly(hadamard_inputs(block, MASK, KIND, True), 3)
    m = tl.zeros_like(v[0])
    for i in tl.static_range(8):
        m = tl.maximum(m, tl.abs(v[i]) + tl.abs(v[i + 8]))
    return m


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
def hadamard_column_blocks(low, high, MASK: tl.constexpr, KIND: tl.constexpr, MODEST: tl.constexpr, HW: tl.constexpr):
    """Transformed blocks along two columns: (16 words of bfloat16, 16 elements each)."""
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


# ------------------------------------------------------------------------------------------------------------- amax


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
    """Bits of the amaxes of the blocks of both columns."""
    if HW and KIND != ELEMENTWISE:
        m = words_amax(words, KIND, IGNORE_NAN)
        a, b = bits_of(low_half(m, KIND)), bits_of(high_half(m, KIND))
        if IGNORE_NAN:
            a, b = drop_nan(a), drop_nan(b)
        return a, b
    else:
        return block_amax(low, IGNORE_NAN), block_amax(high, IGNORE_NAN)
