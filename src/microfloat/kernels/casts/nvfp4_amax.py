"""Amaxes of a matrix and of its Hadamard transform, which NVFP4's first levels need, from one reading.

matrix and HOW are those of `tiles`.
"""

import triton
import triton.language as tl

from microfloat.kernels.device.block16 import (
    column_block_amax,
    hadamard_amax,
    hadamard_column_blocks,
    hadamard_row_blocks,
    load_column_blocks,
    load_row_blocks,
    row_block_amax,
)
from microfloat.kernels.device.convert import WORDS_BF16, bf16_bits, bits_of, float_of
from microfloat.kernels.device.meeting import arrive, offer_maximum, peek, publish_two
from microfloat.kernels.device.random import zero_again
from microfloat.kernels.device.tiles import program, tile_at, tiles_of


@triton.jit
def tile_amaxes(
    x_tile, rows, cols, stride_r, stride_c, MASK: tl.constexpr, ALONG_ROWS: tl.constexpr, HOW: tl.constexpr
):  # fmt: skip
    """Bits of the largest magnitudes that each lane finds in a tile, and in its Hadamard transform along its columns
    (or rows); for HW the latter four times too large and not yet rounded.
    """
    KIND: tl.constexpr = HOW.KIND
    EVEN: tl.constexpr = HOW.EVEN
    HW: tl.constexpr = HOW.HW
    BM: tl.constexpr = HOW.BM
    BN: tl.constexpr = HOW.BN
    if ALONG_ROWS:
        words, block = load_row_blocks(x_tile, rows, cols, stride_r, stride_c, KIND, EVEN, BN // 16, BM)
        plain = row_block_amax(words, block, KIND, True, HW)
        if HW:
            transformed = bits_of(hadamard_amax(block, MASK, KIND))
        else:
            words, block = hadamard_row_blocks(block, MASK, KIND, HW)
            transformed = row_block_amax(words, block, WORDS_BF16, True, HW)
    else:
        words, low, high = load_column_blocks(x_tile, rows, cols, stride_r, stride_c, KIND, EVEN, BM // 16, BN // 2)
        a, b = column_block_amax(words, low, high, KIND, True, HW)
        plain = tl.maximum(a, b)
        if HW:
            transformed = bits_of(tl.maximum(hadamard_amax(low, MASK, KIND), hadamard_amax(high, MASK, KIND)))
        else:
            words, low, high = hadamard_column_blocks(low, high, MASK, KIND, False, HW)
            a, b = column_block_amax(words, low, high, WORDS_BF16, True, HW)
            transformed = tl.maximum(a, b)
    return plain, transformed


@triton.jit
def amaxes(matrix, first, programs, MASK: tl.constexpr, ALONG_ROWS: tl.constexpr, HOW: tl.constexpr):
    """Bits of the amax of the tiles `first`, `first` + `programs`, ... of a matrix, counted from its end (see
    `amax.amax_contiguous`), and of that of their transform.
    """
    HW: tl.constexpr = HOW.HW
    BM: tl.constexpr = HOW.BM
    BN: tl.constexpr = HOW.BN
    x_ptr, R, C, stride_r, stride_c = matrix
    if ALONG_ROWS:
        plain = tl.zeros([BN // 16, BM], tl.int32)
    else:
        plain = tl.zeros([BM // 16, BN // 2], tl.int32)
    transformed = plain
    across, tiles = tiles_of(R, C, BM, BN)
    tile = tiles - 1 - first
    while tile >= 0:
        stride = stride_r + 16 * zero_again(tile, HW)  # as in `nvfp4.nvfp4_tiles`
        row0, col0, x_tile = tile_at(x_ptr, tile, across, stride, stride_c, BM, BN)
        a, b = tile_amaxes(x_tile, R - row0, C - col0, stride, stride_c, MASK, ALONG_ROWS, HOW)
        plain, transformed = tl.maximum(plain, a), tl.maximum(transformed, b)
        tile -= programs
    largest = tl.max(tl.max(transformed, 1), 0)
    if HW:  # rounding keeps the order
        largest = bf16_bits(float_of(largest) * 0.25, HW) << 16
    return tl.max(tl.max(plain, 1), 0), largest


@triton.jit
def amax_transformed(
    x_ptr, out_ptr, scratch_ptr, R, C, stride_r, stride_c, MASK: tl.constexpr, ALONG_ROWS: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """float32[2]: amax of the matrix, and of its Hadamard transform along the columns (or rows), NaN ignored.

    Any number of programs.
    """
    HW: tl.constexpr = HOW.HW
    known, known_transformed = peek(scratch_ptr, HW), peek(scratch_ptr + 2, HW)
    pid, R, C, stride_r, stride_c = program(R, C, stride_r, stride_c, HOW.INDEX64)
    matrix = (x_ptr, R, C, stride_r, stride_c)
    plain, transformed = amaxes(matrix, pid, tl.num_programs(0), MASK, ALONG_ROWS, HOW)
    offer_maximum(plain, known, scratch_ptr, HW)
    offer_maximum(transformed, known_transformed, scratch_ptr + 2, HW)
    publish_two(arrive(scratch_ptr + 1, HW), tl.num_programs(0), out_ptr, scratch_ptr, HW)
