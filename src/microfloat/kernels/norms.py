"""RMSNorm and LayerNorm that write codes: the casts of `scaled` and `blocks` behind a norm, in one launch.

A norm needs the statistics of whole rows, more than one program can hold. So the programs are of two kinds: those that
measure a few rows, and those that cast a tile of rows that others have measured a little earlier. The second reading of
a tile then comes from the L2 cache, if measuring is not too far ahead; what was measured travels through words of
shared memory (`_meeting.announce` and `expect`).
"""

import triton
import triton.language as tl

from microfloat.kernels._meeting import (
    RECORD,
    STORE,
    announce,
    arrive,
    expect,
    forget,
    offer_maximum,
    peek,
    publish_maximum,
    recall,
)
from microfloat.kernels._produce import LAYER_NORM, LOAD, normalized, parameters, produce_pair
from microfloat.kernels._tiles import load_pair
from microfloat.kernels.blocks import (
    COLUMN_ALIGN,
    cast_columns,
    cast_rows,
    codes_at,
    load_columns,
    load_rows,
    normalize_columns,
    normalize_rows,
)
from microfloat.kernels.fused import source_at, store_values, values_amax
from microfloat.kernels.scaled import (
    given_scale,
    load_tile,
    local_rows,
    local_words,
    measure_tile,
    normalize_tile,
    write_tile,
)


@triton.jit
def statistics(
    x_rows, eps, rows, C, stride_r, stride_c,
    LAYER: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Mean (LAYER, else zeros) and ``1 / sqrt(variance or mean square + eps)`` of BM rows."""
    w = local_words(BN)
    r = tl.arange(0, BM)[None, :, None]
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
    return mean, 1.0 / tl.sqrt_rn(tl.sum(total, 0) / C + eps)


@triton.jit
def norm_role(pid, R, C, ahead, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr):
    """What program `pid` of a norm does: (casts, group of BM rows, its number among those of the group).

    A group is measured by BM / ROWS programs and cast by one for every BN columns. Measuring is `ahead` <= all groups
    before casting: first the measuring of so many groups alone, then by turns, last the casting of so many.
    """
    PARTS: tl.constexpr = BM // ROWS
    members = (C + BN - 1) // BN
    turns = (R + BM - 1) // BM - ahead  # groups that are measured and groups that are cast by turns
    p = pid - ahead * PARTS
    if p < 0:
        casts = False
        group = pid // PARTS
        number = pid % PARTS
    else:
        group = p // (PARTS + members)
        if group < turns:
            number = p - group * (PARTS + members)
            casts = number >= PARTS
            if casts:
                number -= PARTS
            else:
                group += ahead
        else:
            casts = True
            p -= turns * (PARTS + members)
            group = p // members
            number = p - group * members
            group += turns
    return casts, group, number


@triton.jit
def measure_rows(
    x_ptr, mean_ptr, inverse_ptr, words_ptr, eps, R, C, stride_r, stride_c, group, number,
    LAYER: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the statistics of one part of a group of rows, for good and for the programs that cast the group."""
    row0 = group * BM + number * ROWS
    x_rows = x_ptr + row0.to(tl.int64) * stride_r
    mean, inverse = statistics(x_rows, eps, R - row0, C, stride_r, stride_c, LAYER, LOADS, EVEN, ROWS, COLUMNS)
    at = tl.arange(0, ROWS)
    words = group_words(words_ptr, group, LAYER, BM) + number * ROWS + at
    announce(words, inverse)
    if LAYER:
        announce(words + BM, mean)
        tl.store(mean_ptr + row0 + at, mean, mask=at < R - row0)
    tl.store(inverse_ptr + row0 + at, inverse, mask=at < R - row0)


@triton.jit
def group_words(words_ptr, group, LAYER: tl.constexpr, BM: tl.constexpr):
    """The words of a group of rows: their scales, and then (LAYER) their means."""
    return words_ptr + group * (2 * BM if LAYER else BM)


@triton.jit
def expect_rows(words, LAYER: tl.constexpr, HW: tl.constexpr, BM: tl.constexpr):
    """Wait until a group of rows is measured."""
    r = tl.arange(0, BM)
    expect(words + r, HW)
    if LAYER:
        expect(words + BM + r, HW)
    tl.debug_barrier()


@triton.jit
def statistics_of(words, r, rows, LAYER: tl.constexpr, BM: tl.constexpr):
    """(mean, scale) of rows `r` of a group that has been measured; zeros outside `rows`."""
    scale = tl.where(r < rows, recall(words + r), 0.0)
    mean = scale
    if LAYER:
        mean = tl.where(r < rows, recall(words + BM + r), 0.0)
    return mean, scale


@triton.jit
def leave_rows(words, count, C, LAYER: tl.constexpr, HW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The words of the group are not read here any more; whoever says so last clears them."""
    tl.debug_barrier()
    forget(arrive(count, HW), tl.cast((C + BN - 1) // BN, tl.int32), count, words, 2 * BM if LAYER else BM, HW)


@triton.jit(do_not_specialize=["ahead"])
def norm_scaled(
    x_ptr, mean, inverse, weight, bias, row_out, column_out, scale, source, record, scratch_ptr, counts_ptr, words_ptr,
    seed_ptr, row_stream, column_stream, eps, ahead, R, C, stride_r, stride_c,
    ROW: tl.constexpr, COLUMN: tl.constexpr, SOURCE: tl.constexpr, RECORDS: tl.constexpr, PRODUCER: tl.constexpr,
    LOADS: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr, QUADS: tl.constexpr,
    INDEX64: tl.constexpr, HW: tl.constexpr, ROWS_EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A norm to FP8 codes per tensor. Writes the statistics too."""
    LAYER: tl.constexpr = PRODUCER == LAYER_NORM
    pid = tl.program_id(0)
    if INDEX64:
        pid = pid.to(tl.int64)
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c, R, C = stride_r * one, stride_c * one, R * one, C * one
    casts, group, number = norm_role(pid, R, C, ahead, BM, BN, ROWS)
    if casts:
        row0, col0 = group * BM, number * BN
        known = 0
        if RECORDS:
            known = peek(scratch_ptr, HW)
        given = given_scale(source, 0.0, ROW, COLUMN, SOURCE)
        members = (C + BN - 1) // BN
        at = source_at(x_ptr, None, None, stride_r, stride_c, row0, col0)
        tile = load_tile(at, R - row0, C - col0, LOAD, 0, LOADS, EVEN, HW, BM, BN)
        OUT: tl.constexpr = x_ptr.dtype.element_ty
        bias_at = bias if bias is None else bias + col0
        weights = parameters(
            weight + col0, bias_at, local_rows(BM), local_words(BN), R - row0, C - col0, OUT, LOADS, EVEN, 0
        )  # fmt: skip
        words = group_words(words_ptr, group, LAYER, BM)
        expect_rows(words, LAYER, HW, BM)
        r = local_rows(BM)
        measured = (
            statistics_of(words, r, R - row0, LAYER, BM), statistics_of(words, r + 1, R - row0, LAYER, BM),
            statistics_of(words, r + 2, R - row0, LAYER, BM), statistics_of(words, r + 3, R - row0, LAYER, BM),
        )  # fmt: skip
        tile = normalize_tile(tile, measured, weights, R - row0, OUT, PRODUCER, HW, BM)
        amax, arrived = measure_tile(tile, scratch_ptr, known, RECORDS, SOURCE, KIND, HW)
        write_tile(
            tile, given, amax, row_out, column_out, scale, scale, source, source, seed_ptr, row_stream, column_stream,
            0.0, R, C, row0, col0, ROW, COLUMN, SOURCE, EVEN, PAIRS, QUADS, HW, BM, BN,
        )  # fmt: skip
        if RECORDS:
            groups = (R + BM - 1) // BM
            publish_maximum(arrived, (groups * members).to(tl.int32), record, scratch_ptr, RECORD, HW)
        leave_rows(words, counts_ptr + group, C, LAYER, HW, BM, BN)
    else:
        measure_rows(
            x_ptr, mean, inverse, words_ptr, eps, R, C, stride_r, stride_c, group, number, LAYER, LOADS, ROWS_EVEN,
            BM, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["ahead"])
def norm_blocks(
    x_ptr, mean, inverse, weight, bias, row_out, row_scale, column_out, column_scale, counts_ptr, words_ptr, seed_ptr,
    row_stream, column_stream, eps, ahead, R, C, stride_r, stride_c,
    ROW: tl.constexpr, COLUMN: tl.constexpr, PRODUCER: tl.constexpr, LOADS: tl.constexpr, KIND: tl.constexpr,
    EVEN: tl.constexpr, PAIRS: tl.constexpr, QUADS: tl.constexpr, INDEX64: tl.constexpr, HW: tl.constexpr,
    ROWS_EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """A norm to block codes. Writes the statistics too."""
    LAYER: tl.constexpr = PRODUCER == LAYER_NORM
    pid = tl.program_id(0)
    if INDEX64:
        pid = pid.to(tl.int64)
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c, R, C = stride_r * one, stride_c * one, R * one, C * one
    casts, group, number = norm_role(pid, R, C, ahead, BM, BN, ROWS)
    if casts:
        row0, col0 = group * BM, number * BN
        at = source_at(x_ptr, None, None, stride_r, stride_c, row0, col0)
        rows, cols = R - row0, C - col0
        OUT: tl.constexpr = x_ptr.dtype.element_ty
        bias_at = bias if bias is None else bias + col0
        words = group_words(words_ptr, group, LAYER, BM)
        if ROW is not None:
            row_words = load_rows(at, rows, cols, 16 if ROW[5] else 8, LOAD, 0, LOADS, EVEN, HW, BM, BN)
            row_weights = parameters(
                weight + col0, bias_at, row_words[0], row_words[1], rows, cols, OUT, LOADS, EVEN, 0
            )  # fmt: skip
        if COLUMN is not None:
            column_words = load_columns(at, rows, cols, COLUMN[4], LOAD, 0, LOADS, EVEN, HW, BM, BN)
            column_weights = parameters(
                weight + col0, bias_at, column_words[0], column_words[1], rows, cols, OUT, LOADS, EVEN, COLUMN_ALIGN
            )  # fmt: skip
        expect_rows(words, LAYER, HW, BM)
        if ROW is not None:
            measured = statistics_of(words, row_words[0], rows, LAYER, BM)
            cast_rows(
                normalize_rows(row_words, measured, row_weights, rows, OUT, PRODUCER, HW),
                codes_at(row_out, row0, col0, C, ROW), row_scale, seed_ptr, row_stream, 0, 0.0, R, C, row0, col0,
                ROW, KIND, EVEN, PAIRS, HW, BM, BN,
            )  # fmt: skip
        if COLUMN is not None:
            r = column_words[0]
            column_measured = (
                statistics_of(words, r, rows, LAYER, BM), statistics_of(words, r + 1, rows, LAYER, BM),
                statistics_of(words, r + 2, rows, LAYER, BM), statistics_of(words, r + 3, rows, LAYER, BM),
            )  # fmt: skip
            cast_columns(
                normalize_columns(column_words, column_measured, column_weights, rows, OUT, PRODUCER, HW),
                codes_at(column_out, col0, row0, R, COLUMN), column_scale, seed_ptr, column_stream, 0, 0.0, R, C, row0,
                col0, COLUMN, KIND, EVEN, PAIRS, QUADS, HW, BM, BN,
            )  # fmt: skip
        leave_rows(words, counts_ptr + group, C, LAYER, HW, BM, BN)
    else:
        measure_rows(
            x_ptr, mean, inverse, words_ptr, eps, R, C, stride_r, stride_c, group, number, LAYER, LOADS, ROWS_EVEN,
            BM, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["ahead"])
def norm_values(
    x_ptr, mean, inverse, weight, bias, out_ptr, amax_ptr, scratch_ptr, counts_ptr, words_ptr, eps, ahead, R, C,
    stride_r, stride_c,
    PRODUCER: tl.constexpr, LOADS: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr,
    INDEX64: tl.constexpr, HW: tl.constexpr, ROWS_EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A norm in its input's dtype, its statistics and its amax."""
    LAYER: tl.constexpr = PRODUCER == LAYER_NORM
    pid = tl.program_id(0)
    if INDEX64:
        pid = pid.to(tl.int64)
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c, R, C = stride_r * one, stride_c * one, R * one, C * one
    casts, group, number = norm_role(pid, R, C, ahead, BM, BN, ROWS)
    if casts:
        row0, col0 = group * BM, number * BN
        known = peek(scratch_ptr, HW)
        members = (C + BN - 1) // BN
        at = source_at(x_ptr, None, None, stride_r, stride_c, row0, col0)
        w = local_words(BN)
        r = tl.arange(0, BM)[None, :, None]
        values = produce_pair(at, r, w, R - row0, C - col0, LOAD, 0, LOADS, EVEN, 0, HW)
        OUT: tl.constexpr = x_ptr.dtype.element_ty
        bias_at = bias if bias is None else bias + col0
        weights = parameters(weight + col0, bias_at, r, w, R - row0, C - col0, OUT, LOADS, EVEN, 0)
        words = group_words(words_ptr, group, LAYER, BM)
        expect_rows(words, LAYER, HW, BM)
        measured = statistics_of(words, r, R - row0, LAYER, BM)
        values = normalized(values, measured, weights, r < R - row0, OUT, PRODUCER, HW)
        offer_maximum(values_amax(values, KIND, HW), known, scratch_ptr, HW)
        arrived = arrive(scratch_ptr + 1, HW)
        out = out_ptr + row0.to(tl.int64) * C + col0
        store_values(values, out, r, w, R - row0, C - col0, C, KIND, EVEN, PAIRS)
        groups = (R + BM - 1) // BM
        publish_maximum(arrived, (groups * members).to(tl.int32), amax_ptr, scratch_ptr, STORE, HW)
        leave_rows(words, counts_ptr + group, C, LAYER, HW, BM, BN)
    else:
        measure_rows(
            x_ptr, mean, inverse, words_ptr, eps, R, C, stride_r, stride_c, group, number, LAYER, LOADS, ROWS_EVEN,
            BM, ROWS, COLUMNS,
        )  # fmt: skip
