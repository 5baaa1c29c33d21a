"""Random bytes of stochastic rounding: a function of (seed, stream, batch, row, column), independent of threads.

One Philox4x32-10 call gives the bytes of the 16 elements of a row that share ``column // 16``: its four words, byte by
byte, little-endian. Rows and columns are those of the operand (docs/numerics.md 5.3).
"""

import triton
import triton.language as tl


@triton.jit
def load_seed(seed_ptr):
    """The 64-bit call seed from its two 32-bit words (int64[2] in device memory, low first)."""
    low = tl.load(seed_ptr).to(tl.uint64)
    high = tl.load(seed_ptr + 1).to(tl.uint64)
    return low | (high << 32)


@triton.jit
def zero_like(data, HW: tl.constexpr):
    """Zeros (int32) that depend on `data` in Triton's eyes, and so have its layout.

    Random counters that are made from them are computed in the lanes that use the bytes. Made from plain index ranges,
    they have a layout of Triton's choice, and every byte passes through shared memory.
    """
    if HW:
        return tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [data], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.zeros_like(data)


@triton.jit
def zero_again(data, HW: tl.constexpr):
    """A zero (int32) that the compiler does not move out of a loop, nor expressions that use it."""
    if HW:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, 0;", "=r,r", [data.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return 0


@triton.jit
def philox_round(c0, c1, c2, c3, k0, k1):
    """One round of Philox4x32 by two 64-bit products; Triton's own takes four multiplications."""
    PTX: tl.constexpr = (
        "{ .reg .b64 p, q; .reg .b32 a, b; mul.wide.u32 p, $4, 0xD2511F53; mul.wide.u32 q, $6, 0xCD9E8D57; "
        "mov.b64 {$3, a}, p; mov.b64 {$1, b}, q; xor.b32 b, b, $5; xor.b32 $0, b, $8; xor.b32 a, a, $7; "
        "xor.b32 $2, a, $9; }"
    )
    return tl.inline_asm_elementwise(
        PTX,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
        [c0, c1, c2, c3, k0, k1],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def block_words(seed, row, block, stream, batch, HW: tl.constexpr = False):
    """The four random words (uint32) of a block ``column // 16`` of a row; `row` and `block` broadcast."""
    row, block = row.to(tl.int32), block.to(tl.int32)  # counters are words, also where offsets are wider
    zero = tl.zeros_like(row + block)
    if HW:
        c0, c1, c2, c3 = zero + block, zero + row, zero + stream, zero + batch
        k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
        for _round in tl.static_range(10):
            c0, c1, c2, c3 = philox_round(
                c0.to(tl.int32), c1.to(tl.int32), c2.to(tl.int32), c3.to(tl.int32),
                k0.to(tl.int32, bitcast=True), k1.to(tl.int32, bitcast=True),
            )  # fmt: skip
            k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
        return (
            c0.to(tl.uint32, bitcast=True),
            c1.to(tl.uint32, bitcast=True),
            c2.to(tl.uint32, bitcast=True),
            c3.to(tl.uint32, bitcast=True),
        )
    else:
        # A stream of 2^31 and more is a 64-bit argument of the kernel, and counters must be of one width.
        return tl.philox(seed, zero + block, zero + row, (zero + stream).to(tl.int32), (zero + batch).to(tl.int32))


@triton.jit
def pair_bytes(seed, row, word_column, stream, batch):
    """Random bytes of elements 2 * word_column and 2 * word_column + 1 of a row, in bits 0..7 and 8..15 (int32)."""
    w0, w1, w2, w3 = block_words(seed, row, word_column >> 3, stream, batch)
    place = word_column & 7
    word = tl.where(place < 4, tl.where(place < 2, w0, w1), tl.where(place < 6, w2, w3))
    return (word >> ((place & 1) * 16).to(tl.uint32)).to(tl.int32, bitcast=True) & 0xFFFF


@triton.jit
def lane_pairs(seed, row, block, stream, batch, T: tl.constexpr, BM: tl.constexpr):
    """`pair_bytes` of lanes that hold whole blocks of 16: [T, BM, 2, 4] for `block` [T, 1] and `row` [1, BM]."""
    w0, w1, w2, w3 = block_words(seed, row, block, stream, batch)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).to(tl.int32, bitcast=True)
    return tl.reshape(tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF), [T, BM, 2, 4])


@triton.jit
def column_quads(seed, row, first_block, stream, batch, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, W: tl.constexpr):
    """Random bytes (int32) of quads [GROUPS, 4 * BLOCKS, W]; quad q is elements 4q .. 4q + 3 from `first_block` on.

    `row` [1, 1, W] and `first_block` [GROUPS, 1, 1] (int32) are indices of the operand.
    """
    block = first_block + tl.arange(0, BLOCKS)[None, :, None]
    w0, w1, w2, w3 = block_words(seed, row, block, stream, batch)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [GROUPS, BLOCKS, W, 4])
    return tl.reshape(tl.permute(words, [0, 1, 3, 2]), [GROUPS, 4 * BLOCKS, W]).to(tl.int32, bitcast=True)


@triton.jit
def column_bytes(seed, row, quad, stream, batch):
    """Random bytes (int32) of elements 4 * quad .. 4 * quad + 3 of a row of the operand, the first in bits 0..7."""
    w0, w1, w2, w3 = block_words(seed, row, quad >> 2, stream, batch)
    place = (quad & 3) + tl.zeros_like(row)
    word = tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
    return word.to(tl.int32, bitcast=True)


@triton.jit
def split_words(draw_ptr, words_ptr):
    """Store 64 random bits (int64) as a call seed: int64[2] of two 32-bit words, low first."""
    draw = tl.load(draw_ptr)
    tl.store(words_ptr, draw & 0xFFFFFFFF)
    tl.store(words_ptr + 1, (draw >> 32) & 0xFFFFFFFF)
