"""One or two matrices measured and cast to NVFP4 values in one launch: what a small Linear casts in a step.

The casts are those of `nvfp4`, tile by tile, so the bytes are too. All programs of the launch first measure their
tiles, wait for each other, and then cast (`pair`), so they must all run at once: the launch is a cooperative one.
"""

import triton
import triton.language as tl

from microfloat.kernels._random import split_words
from microfloat.kernels.nvfp4 import can_lower, is_modest, nvfp4_tile, shared_level, shared_seed
from microfloat.kernels.nvfp4_amax import amaxes
from microfloat.kernels.pair import leave, measure_tiles, wait_for_all


@triton.jit
def measure_values(
    x_ptr, scratch_ptr, transformed_ptr, R, C, stride_r, stride_c, first, programs,
    COLUMN: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, HW: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Merge the amax of the tiles `first`, `first` + `programs`, ... of a matrix, and that of their transform."""
    if COLUMN is not None and COLUMN[4] >= 0:
        plain, transformed = amaxes(
            x_ptr, R, C, stride_r, stride_c, first, programs, COLUMN[4], False, KIND, EVEN, HW, BM, BN
        )  # fmt: skip
        tl.atomic_max(transformed_ptr, transformed.to(tl.int64), sem="relaxed")
    else:
        plain = measure_tiles(x_ptr, R, C, stride_r, stride_c, first, programs, KIND, EVEN, HW, BM, BN)
    tl.atomic_max(scratch_ptr, plain.to(tl.int64), sem="relaxed")


@triton.jit
def cast_values(
    x_ptr, row_out, row_scale, column_out, column_scale, row_amax, column_amax, seed_ptr, row_stream, column_stream,
    R, C, stride_r, stride_c, first, programs,
    ROW: tl.constexpr, COLUMN: tl.constexpr, LOWERED: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr,
    HW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Both operands of the same tiles."""
    row_level, column_level = shared_level(row_amax, ROW), shared_level(column_amax, COLUMN)
    seed = shared_seed(seed_ptr, ROW, COLUMN)
    across = (C + BN - 1) // BN
    tiles = ((R + BM - 1) // BM) * across
    tile = first
    while tile < tiles:
        nvfp4_tile(
            x_ptr, row_out, None, row_scale, column_out, None, column_scale, row_amax, column_amax, row_level,
            column_level, seed, row_stream, column_stream, 0, R, C, stride_r, stride_c, (tile // across) * BM,
            (tile % across) * BN, ROW, COLUMN, LOWERED, KIND, EVEN, HW, BM, BN,
        )  # fmt: skip
        tile += programs


@triton.jit
def cast_values_by_size(
    x_ptr, row_out, row_scale, column_out, column_scale, row_amax, column_amax, seed_ptr, row_stream, column_stream,
    R, C, stride_r, stride_c, first, programs,
    ROW: tl.constexpr, COLUMN: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, HW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The same, by the form that the tensor amaxes allow."""
    lowered = False
    if HW and (can_lower(ROW) or can_lower(COLUMN)):
        lowered = is_modest(row_amax, ROW) & is_modest(column_amax, COLUMN)
    if lowered:
        cast_values(
            x_ptr, row_out, row_scale, column_out, column_scale, row_amax, column_amax, seed_ptr, row_stream,
            column_stream, R, C, stride_r, stride_c, first, programs, ROW, COLUMN, True, KIND, EVEN, HW, BM, BN,
        )  # fmt: skip
    else:
        cast_values(
            x_ptr, row_out, row_scale, column_out, column_scale, row_amax, column_amax, seed_ptr, row_stream,
            column_stream, R, C, stride_r, stride_c, first, programs, ROW, COLUMN, False, KIND, EVEN, HW, BM, BN,
        )  # fmt: skip


@triton.jit
def values_pair(
    x_ptr, x_row, x_row_scale, x_column, x_column_scale, w_ptr, w_row, w_row_scale, w_column, w_column_scale,
    seed_ptr, draw_ptr, scratch_ptr,
    x_row_stream, x_column_stream, XR, XC, x_stride_r, x_stride_c,
    w_row_stream, w_column_stream, WR, WC, w_stride_r, w_stride_c,
    PAIR: tl.constexpr, DRAWS_SEED: tl.constexpr,
    X_ROW: tl.constexpr, X_COLUMN: tl.constexpr, X_READS: tl.constexpr,
    W_ROW: tl.constexpr, W_COLUMN: tl.constexpr, W_READS: tl.constexpr,
    HW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Any number of programs. ROW and COLUMN as in `quantize_nvfp4`, with one first level for a matrix; READS: (KIND,
    EVEN) of a matrix; PAIR: whether there is a second one, which is not transformed. Scales: float32 tensor scales.
    DRAWS_SEED: a call seed is made here for later casts. No matrix needs 64-bit offsets inside a tile.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    begin = 0
    if DRAWS_SEED and pid == 0:
        split_words(draw_ptr, seed_ptr)
    plain_word, transformed_word, second_word = scratch_ptr, scratch_ptr + 2, scratch_ptr + 3
    measure_values(
        x_ptr, plain_word, transformed_word, XR, XC, x_stride_r, x_stride_c, pid, programs,
        X_COLUMN, X_READS[0], X_READS[1], HW, BM, BN,
    )  # fmt: skip
    if PAIR:  # programs that have one tile of x less begin with w
        tiles = ((XR + BM - 1) // BM) * ((XC + BN - 1) // BN)
        begin = (pid + programs - tiles % programs) % programs
        measure_values(
            w_ptr, second_word, second_word, WR, WC, w_stride_r, w_stride_c, begin, programs,
            None, W_READS[0], W_READS[1], HW, BM, BN,
        )  # fmt: skip
    wait_for_all(scratch_ptr, 1)
    # The low half of a word: bits of a float.
    row_amax = plain_word.to(tl.pointer_type(tl.float32))
    column_amax = row_amax
    if X_COLUMN is not None and X_COLUMN[4] >= 0:
        column_amax = transformed_word.to(tl.pointer_type(tl.float32))
    cast_values_by_size(
        x_ptr, x_row, x_row_scale, x_column, x_column_scale, row_amax, column_amax, seed_ptr, x_row_stream,
        x_column_stream, XR, XC, x_stride_r, x_stride_c, pid, programs, X_ROW, X_COLUMN, X_READS[0], X_READS[1], HW,
        BM, BN,
    )  # fmt: skip
    if PAIR:
        amax = second_word.to(tl.pointer_type(tl.float32))
        cast_values_by_size(
            w_ptr, w_row, w_row_scale, w_column, w_column_scale, amax, amax, seed_ptr, w_row_stream,
            w_column_stream, WR, WC, w_stride_r, w_stride_c, begin, programs, W_ROW, W_COLUMN, W_READS[0], W_READS[1],
            HW, BM, BN,
        )  # fmt: skip
    leave(scratch_ptr)
