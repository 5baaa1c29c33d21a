"""One or two matrices measured and cast to NVFP4 values in one launch: what a small Linear casts in a step.

The casts are those of `nvfp4`, tile by tile, so the bytes are too. All programs of the launch first measure their
tiles, wait for each other, and then cast (`pair`), so they must all run at once: the launch is a cooperative one.

A program takes the tiles `first`, `first` + `programs`, ... of a matrix. matrix and HOW are those of `tiles`, operands
and streams those of `nvfp4`.
"""

import triton
import triton.language as tl

from microfloat.kernels.casts.nvfp4 import Operand, can_lower, is_modest, nvfp4_tile, shared_levels, shared_seed
from microfloat.kernels.casts.nvfp4_amax import amaxes
from microfloat.kernels.casts.pair import leave, measure_tiles, wait_for_all
from microfloat.kernels.device.random import split_words
from microfloat.kernels.device.tiles import tiles_of


@triton.jit
def measure_values(
    matrix, scratch_ptr, transformed_ptr, first, programs, COLUMN: tl.constexpr, HOW: tl.constexpr
):  # fmt: skip
    """Merge the amax of a program's tiles of a matrix, and that of their transform."""
    if COLUMN is not None and COLUMN.SIGNS >= 0:
        plain, transformed = amaxes(matrix, first, programs, COLUMN.SIGNS, False, HOW)
        tl.atomic_max(transformed_ptr, transformed.to(tl.int64), sem="relaxed")
    else:
        plain = measure_tiles(matrix, first, programs, HOW)
    tl.atomic_max(scratch_ptr, plain.to(tl.int64), sem="relaxed")


@triton.jit
def cast_values(
    matrix, row, column, seed_ptr, streams, first, programs, ROW: tl.constexpr, COLUMN: tl.constexpr,
    LOWERED: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Both operands of the same tiles."""
    _x, R, C, _r, _c = matrix
    levels = shared_levels(row, column, ROW, COLUMN)
    seed = shared_seed(seed_ptr, ROW, COLUMN)
    across, tiles = tiles_of(R, C, HOW.BM, HOW.BN)
    tile = first
    while tile < tiles:
        row0, col0 = (tile // across) * HOW.BM, (tile % across) * HOW.BN
        nvfp4_tile(matrix, row0, col0, row, column, levels, seed, streams, ROW, COLUMN, LOWERED, HOW)
        tile += programs


@triton.jit
def cast_values_by_size(
    matrix, row, column, seed_ptr, streams, first, programs, ROW: tl.constexpr, COLUMN: tl.constexpr, HOW: tl.constexpr
):  # fmt: skip
    """The same, by the form that the tensor amaxes allow."""
    lowered = False
    if HOW.HW and (can_lower(ROW) or can_lower(COLUMN)):
        lowered = is_modest(row.amax, ROW) & is_modest(column.amax, COLUMN)
    if lowered:
        cast_values(matrix, row, column, seed_ptr, streams, first, programs, ROW, COLUMN, True, HOW)
    else:
        cast_values(matrix, row, column, seed_ptr, streams, first, programs, ROW, COLUMN, False, HOW)


@triton.jit
def values_pair(
    x_ptr, x_row, x_row_scale, x_column, x_column_scale, w_ptr, w_row, w_row_scale, w_column, w_column_scale,
    seed_ptr, draw_ptr, scratch_ptr,
    x_row_stream, x_column_stream, XR, XC, x_stride_r, x_stride_c,
    w_row_stream, w_column_stream, WR, WC, w_stride_r, w_stride_c,
    DRAWS_SEED: tl.constexpr, X: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Any number of programs. X and W: `constants.Pass`, with one first level for a matrix; W is None where there is no
    second one, and that is not transformed. Scales: float32 tensor scales. DRAWS_SEED: a call
    seed is made here for later casts. No matrix needs 64-bit offsets inside a tile.
    """
    X_ROW: tl.constexpr = X.ROW
    X_COLUMN: tl.constexpr = X.COLUMN
    X_HOW: tl.constexpr = X.HOW
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    begin = 0
    if DRAWS_SEED and pid == 0:
        split_words(draw_ptr, seed_ptr)
    plain_word, transformed_word, second_word = scratch_ptr, scratch_ptr + 2, scratch_ptr + 3
    x = (x_ptr, XR, XC, x_stride_r, x_stride_c)
    measure_values(x, plain_word, transformed_word, pid, programs, X_COLUMN, X_HOW)
    if W is not None:  # programs that have one tile of x less begin with w
        W_HOW: tl.constexpr = W.HOW
        _across, tiles = tiles_of(XR, XC, X_HOW.BM, X_HOW.BN)
        begin = (pid + programs - tiles % programs) % programs
        w = (w_ptr, WR, WC, w_stride_r, w_stride_c)
        measure_values(w, second_word, second_word, begin, programs, None, W_HOW)
    wait_for_all(scratch_ptr, 1)
    # The low half of a word: bits of a float.
    row_amax = plain_word.to(tl.pointer_type(tl.float32))
    column_amax = row_amax
    if X_COLUMN is not None and X_COLUMN.SIGNS >= 0:
        column_amax = transformed_word.to(tl.pointer_type(tl.float32))
    row, column = Operand(x_row, None, x_row_scale, row_amax), Operand(x_column, None, x_column_scale, column_amax)
    streams = (x_row_stream, x_column_stream, 0)
    cast_values_by_size(x, row, column, seed_ptr, streams, pid, programs, X_ROW, X_COLUMN, X_HOW)
    if W is not None:
        W_ROW: tl.constexpr = W.ROW
        W_COLUMN: tl.constexpr = W.COLUMN
        amax = second_word.to(tl.pointer_type(tl.float32))
        row, column = Operand(w_row, None, w_row_scale, amax), Operand(w_column, None, w_column_scale, amax)
        streams = (w_row_stream, w_column_stream, 0)
        cast_values_by_size(w, row, column, seed_ptr, streams, begin, programs, W_ROW, W_COLUMN, W_HOW)
    leave(scratch_ptr)
