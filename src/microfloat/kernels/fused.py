"""Norms, activations and activation gradients that write codes: the casts of `scaled` and `blocks` with a producer.

`produce_*` compute every value where it is cast. A norm needs the statistics of its rows first: `norm_scaled` and
`norm_blocks` take 32 rows per program, read them once from memory for the statistics and a second time, from the L2
cache, for the values; `row_statistics` is that first step alone, for casts whose blocks are taller than 32 rows.
"""

import triton
import triton.language as tl

from microfloat.kernels._convert import ELEMENTWISE, magnitude_bits, packed_abs
from microfloat.kernels._produce import LAYER_NORM, UP_GRADIENT, produce_pair
from microfloat.kernels._tiles import load_pair, store_pairs
from microfloat.kernels.amax import RECORD, STORE, publish_amax
from microfloat.kernels.blocks import cast_columns, cast_rows, codes_at, load_columns, load_rows
from microfloat.kernels.scaled import cast_tile, words_amax_bits


@triton.jit
def tile_of(pid, C, BM: tl.constexpr, BN: tl.constexpr):
    """First row and column of program `pid`'s tile."""
    tiles = (C + BN - 1) // BN
    return (pid // tiles) * BM, (pid % tiles) * BN


@triton.jit
def source_at(x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, stride_r, stride_c, row0, col0):
    """The source of `_produce` for a tile; pointers that the producer does not read may be None."""
    offset = row0.to(tl.int64) * stride_r + col0.to(tl.int64) * stride_c
    x_tile = x_ptr + offset
    y_tile, z_tile = x_tile, x_tile
    mean_tile, inverse_tile, weight_tile, bias_tile = x_tile, x_tile, x_tile, x_tile
    if y_ptr is not None:
        y_tile = y_ptr + offset
    if z_ptr is not None:
        z_tile = z_ptr + offset
    if mean is not None:
        mean_tile = mean + row0
    if inverse is not None:
        inverse_tile = inverse + row0
    if weight is not None:
        weight_tile = weight + col0
    if bias is not None:
        bias_tile = bias + col0
    return x_tile, y_tile, z_tile, mean_tile, inverse_tile, weight_tile, bias_tile, stride_r, stride_c


@triton.jit
def produce_scaled(
    x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, row_out, column_out, scale, source, record, row_out2, column_out2,
    scale2, source2, record2, scratch_ptr, seed_ptr, seed2_ptr, row_stream, column_stream, epsilon, R, C, stride_r,
    stride_c,
    ROW: tl.constexpr, COLUMN: tl.constexpr, SOURCE: tl.constexpr, RECORDS: tl.constexpr, PRODUCER: tl.constexpr,
    TWO: tl.constexpr, F: tl.constexpr, LOADS: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr,
    PAIRS: tl.constexpr, QUADS: tl.constexpr, INDEX64: tl.constexpr, HW: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """FP8 codes per tensor of produced values; with TWO, also those of UP_GRADIENT, under its own scale and seed."""
    pid = tl.program_id(0)
    if INDEX64:
        pid = pid.to(tl.int64)
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c, R, C = stride_r * one, stride_c * one, R * one, C * one
    row0, col0 = tile_of(pid, C, BM, BN)
    at = source_at(x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, stride_r, stride_c, row0, col0)
    amax = cast_tile(
        at, row_out, column_out, scale, scale, source, source, seed_ptr, row_stream, column_stream, epsilon, R, C,
        row0, col0, ROW, COLUMN, SOURCE, RECORDS, PRODUCER, F, LOADS, KIND, EVEN, PAIRS, QUADS, HW, BM, BN,
    )  # fmt: skip
    if TWO:
        amax2 = cast_tile(
            at, row_out2, column_out2, scale2, scale2, source2, source2, seed2_ptr, row_stream, column_stream, epsilon,
            R, C, row0, col0, ROW, COLUMN, SOURCE, RECORDS, UP_GRADIENT, F, LOADS, KIND, EVEN, PAIRS, QUADS, HW, BM, BN,
        )  # fmt: skip
    if RECORDS:
        publish_amax(amax, record, scratch_ptr, RECORD)
        if TWO:
            publish_amax(amax2, record2, scratch_ptr + 3, RECORD)


@triton.jit
def blocks_tile(
    source, row_out, row_scale, column_out, column_scale, seed_ptr, row_stream, column_stream, epsilon, R, C, row0,
    col0,
    ROW: tl.constexpr, COLUMN: tl.constexpr, PRODUCER: tl.constexpr, F: tl.constexpr, LOADS: tl.constexpr,
    KIND: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr, QUADS: tl.constexpr, HW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Both block operands of one tile of produced values."""
    if ROW is not None:
        row_tile = codes_at(row_out, row0, col0, C, ROW)
        row_words = load_rows(source, R - row0, C - col0, PRODUCER, F, LOADS, EVEN, HW, BM, BN)
        cast_rows(
            row_words, row_tile, row_scale, seed_ptr, row_stream, 0, epsilon, R, C, row0, col0,
            ROW, KIND, EVEN, PAIRS, HW, BM, BN,
        )  # fmt: skip
    if COLUMN is not None:
        column_tile = codes_at(column_out, col0, row0, R, COLUMN)
        column_words = load_columns(source, R - row0, C - col0, COLUMN[4], PRODUCER, F, LOADS, EVEN, HW, BM, BN)
        cast_columns(
            column_words, column_tile, column_scale, seed_ptr, column_stream, 0, epsilon, R, C, row0, col0,
            COLUMN, KIND, EVEN, PAIRS, QUADS, HW, BM, BN,
        )  # fmt: skip


@triton.jit
def produce_blocks(
    x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, row_out, row_scale, column_out, column_scale, row_out2,
    row_scale2, column_out2, column_scale2, seed_ptr, seed2_ptr, row_stream, column_stream, epsilon, R, C, stride_r,
    stride_c,
    ROW: tl.constexpr, COLUMN: tl.constexpr, PRODUCER: tl.constexpr, TWO: tl.constexpr, F: tl.constexpr,
    LOADS: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr, QUADS: tl.constexpr,
    INDEX64: tl.constexpr, HW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """MX and FP8 1x128 codes of produced values; with TWO, also those of UP_GRADIENT, under a seed of their own."""
    pid = tl.program_id(0)
    if INDEX64:
        pid = pid.to(tl.int64)
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c, R, C = stride_r * one, stride_c * one, R * one, C * one
    row0, col0 = tile_of(pid, C, BM, BN)
    at = source_at(x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, stride_r, stride_c, row0, col0)
    blocks_tile(
        at, row_out, row_scale, column_out, column_scale, seed_ptr, row_stream, column_stream, epsilon, R, C, row0,
        col0,
        ROW, COLUMN, PRODUCER, F, LOADS, KIND, EVEN, PAIRS, QUADS, HW, BM, BN,
    )  # fmt: skip
    if TWO:
        blocks_tile(
            at, row_out2, row_scale2, column_out2, column_scale2, seed2_ptr, row_stream, column_stream, epsilon, R, C,
            row0, col0, ROW, COLUMN, UP_GRADIENT, F, LOADS, KIND, EVEN, PAIRS, QUADS, HW, BM, BN,
        )  # fmt: skip


@triton.jit
def produce_values(
    x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, out_ptr, amax_ptr, out2_ptr, amax2_ptr, scratch_ptr,
    R, C, stride_r, stride_c,
    PRODUCER: tl.constexpr, TWO: tl.constexpr, F: tl.constexpr, LOADS: tl.constexpr, KIND: tl.constexpr,
    EVEN: tl.constexpr, PAIRS: tl.constexpr, INDEX64: tl.constexpr, HW: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """The produced values in the inputs' dtype, and their amax: what current scaling needs before its cast."""
    pid = tl.program_id(0)
    if INDEX64:
        pid = pid.to(tl.int64)
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c, R, C = stride_r * one, stride_c * one, R * one, C * one
    row0, col0 = tile_of(pid, C, BM, BN)
    at = source_at(x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, stride_r, stride_c, row0, col0)
    out = out_ptr + row0.to(tl.int64) * C + col0
    amax = values_tile(at, out, R - row0, C - col0, C, PRODUCER, F, LOADS, KIND, EVEN, PAIRS, HW, BM, BN)
    publish_amax(amax, amax_ptr, scratch_ptr, STORE)
    if TWO:
        out = out2_ptr + row0.to(tl.int64) * C + col0
        amax = values_tile(at, out, R - row0, C - col0, C, UP_GRADIENT, F, LOADS, KIND, EVEN, PAIRS, HW, BM, BN)
        publish_amax(amax, amax2_ptr, scratch_ptr + 3, STORE)


@triton.jit
def values_tile(
    source, out_tile, rows, cols, C, PRODUCER: tl.constexpr, F: tl.constexpr, LOADS: tl.constexpr, KIND: tl.constexpr,
    EVEN: tl.constexpr, PAIRS: tl.constexpr, HW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store one tile of produced values; the bits of its amax."""
    w = tl.arange(0, BN // 8)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    r = tl.arange(0, BM)[None, :, None]
    raw, low, high = produce_pair(source, r, w, rows, cols, PRODUCER, F, LOADS, EVEN, 0, HW)
    if KIND != ELEMENTWISE:
        store_pairs(out_tile, raw, r, w, rows, cols, C, 16, PAIRS, EVEN)
    else:
        dtype: tl.constexpr = out_tile.dtype.element_ty
        tl.store(out_tile + (r * C + 2 * w), low.to(dtype), mask=(r < rows) & (2 * w < cols))
        tl.store(out_tile + (r * C + 2 * w + 1), high.to(dtype), mask=(r < rows) & (2 * w + 1 < cols))
    if HW and KIND != ELEMENTWISE:
        return words_amax_bits(packed_abs(raw, KIND), KIND)
    else:
        m = tl.maximum(magnitude_bits(low, True), magnitude_bits(high, True))
        return tl.max(tl.max(tl.max(m, 2), 1), 0)


@triton.jit
def statistics(
    x_rows, mean_ptr, inverse_ptr, eps, rows, C, stride_r, stride_c,
    LAYER: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Mean (LAYER) and ``1 / sqrt(variance or mean square + eps)`` of BM rows, stored at the rows' pointers."""
    w = tl.arange(0, BN // 8)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    r = tl.arange(0, BM)[None, :, None]
    at = tl.arange(0, BM)
    mean = tl.zeros([BM], tl.float32)
    if LAYER:
        total = tl.zeros([BN // 8, BM], tl.float32)
        first = 0
        while first < C:
            tile = x_rows + first * stride_c
            _raw, low, high = load_pair(tile, r, w, rows, C - first, stride_r, stride_c, LOADS, EVEN, 0)
            total += tl.sum(low + high, 2)
            first += BN
        mean = tl.sum(total, 0) / C
        tl.store(mean_ptr + at, mean, mask=at < rows)
    total = tl.zeros([BN // 8, BM], tl.float32)
    first = 0
    while first < C:
        tile = x_rows + first * stride_c
        _raw, low, high = load_pair(tile, r, w, rows, C - first, stride_r, stride_c, LOADS, EVEN, 0)
        if LAYER:
            low = tl.where(2 * w < C - first, low - mean[None, :, None], 0.0)
            high = tl.where(2 * w + 1 < C - first, high - mean[None, :, None], 0.0)
        total += tl.sum(low * low + high * high, 2)
        first += BN
    inverse = 1.0 / tl.sqrt_rn(tl.sum(total, 0) / C + eps)
    tl.store(inverse_ptr + at, inverse, mask=at < rows)


@triton.jit
def row_statistics(
    x_ptr, mean, inverse, eps, R, C, stride_r, stride_c, LAYER: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr,
    INDEX64: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Statistics of all rows: one program per BM rows."""
    row0 = tl.program_id(0) * BM
    if INDEX64:
        row0 = tl.program_id(0).to(tl.int64) * BM
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c = stride_r * one, stride_c * one
    mean_rows = inverse
    if LAYER:
        mean_rows = mean + row0
    x_rows = x_ptr + row0.to(tl.int64) * stride_r
    statistics(
        x_rows, mean_rows, inverse + row0, eps, R - row0, C, stride_r, stride_c, LAYER, LOADS, EVEN, BM, BN
    )  # fmt: skip


@triton.jit
def norm_scaled(
    x_ptr, mean, inverse, weight, bias, row_out, column_out, scale, source, record, scratch_ptr, seed_ptr,
    row_stream, column_stream, eps, R, C, stride_r, stride_c,
    ROW: tl.constexpr, COLUMN: tl.constexpr, SOURCE: tl.constexpr, RECORDS: tl.constexpr, PRODUCER: tl.constexpr,
    LOADS: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr, QUADS: tl.constexpr,
    INDEX64: tl.constexpr, HW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A norm to FP8 codes per tensor: statistics, then the tiles of BM rows. Writes the statistics too."""
    row0 = tl.program_id(0) * BM
    LAYER: tl.constexpr = PRODUCER == LAYER_NORM
    if INDEX64:
        row0 = tl.program_id(0).to(tl.int64) * BM
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c, R, C = stride_r * one, stride_c * one, R * one, C * one
    mean_rows = inverse
    if LAYER:
        mean_rows = mean + row0
    x_rows = x_ptr + row0.to(tl.int64) * stride_r
    statistics(
        x_rows, mean_rows, inverse + row0, eps, R - row0, C, stride_r, stride_c, LAYER, LOADS, EVEN, BM, BN
    )  # fmt: skip
    tl.debug_barrier()  # the statistics come back through memory, in the layout of the tiles
    amax = tl.zeros([], tl.int32)
    col0 = row0 * 0
    while col0 < C:
        at = source_at(x_ptr, None, None, mean, inverse, weight, bias, stride_r, stride_c, row0, col0)
        tile = cast_tile(
            at, row_out, column_out, scale, scale, source, source, seed_ptr, row_stream, column_stream, 0.0, R, C,
            row0, col0, ROW, COLUMN, SOURCE, RECORDS, PRODUCER, 0, LOADS, KIND, EVEN, PAIRS, QUADS, HW, BM, BN,
        )  # fmt: skip
        amax = tl.maximum(amax, tile)
        col0 += BN
    if RECORDS:
        publish_amax(amax, record, scratch_ptr, RECORD)


@triton.jit
def norm_blocks(
    x_ptr, mean, inverse, weight, bias, row_out, row_scale, column_out, column_scale, seed_ptr,
    row_stream, column_stream, eps, R, C, stride_r, stride_c,
    ROW: tl.constexpr, COLUMN: tl.constexpr, PRODUCER: tl.constexpr, LOADS: tl.constexpr, KIND: tl.constexpr,
    EVEN: tl.constexpr, PAIRS: tl.constexpr, QUADS: tl.constexpr, INDEX64: tl.constexpr, HW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A norm to block codes: statistics, then the tiles of BM rows (blocks no taller than BM)."""
    row0 = tl.program_id(0) * BM
    LAYER: tl.constexpr = PRODUCER == LAYER_NORM
    if INDEX64:
        row0 = tl.program_id(0).to(tl.int64) * BM
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c, R, C = stride_r * one, stride_c * one, R * one, C * one
    mean_rows = inverse
    if LAYER:
        mean_rows = mean + row0
    x_rows = x_ptr + row0.to(tl.int64) * stride_r
    statistics(
        x_rows, mean_rows, inverse + row0, eps, R - row0, C, stride_r, stride_c, LAYER, LOADS, EVEN, BM, BN
    )  # fmt: skip
    tl.debug_barrier()
    col0 = row0 * 0
    while col0 < C:
        at = source_at(x_ptr, None, None, mean, inverse, weight, bias, stride_r, stride_c, row0, col0)
        blocks_tile(
            at, row_out, row_scale, column_out, column_scale, seed_ptr, row_stream, column_stream, 0.0, R, C, row0,
            col0,
            ROW, COLUMN, PRODUCER, 0, LOADS, KIND, EVEN, PAIRS, QUADS, HW, BM, BN,
        )  # fmt: skip
        col0 += BN
