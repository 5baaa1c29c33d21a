"""RMSNorm and LayerNorm that write codes: the casts of `scaled` and `blocks` behind a norm, in one launch.

A norm needs the statistics of whole rows, more than one program can hold. So every program does two things: it casts a
tile of rows that others have measured a little earlier, and it measures a few rows of tiles that others will cast a
little later. Their loads are on their way while it casts; the second reading of a tile comes from the L2 cache. What
was measured travels through words of shared memory (`_meeting.announce` and `expect`).

No order of programs is relied on: one that waits in vain for statistics measures the rows itself.
"""

import triton
import triton.language as tl

from microfloat.kernels._convert import ELEMENTWISE, WORDS_BF16, high_half, low_half
from microfloat.kernels._meeting import (
    RECORD,
    STORE,
    announce,
    arrive,
    expect,
    offer_maximum,
    peek,
    publish_maximum,
    recall,
    retire,
)
from microfloat.kernels._produce import LAYER_NORM, LOAD, normalized, parameters, produce_pair
from microfloat.kernels._tiles import load_pair
from microfloat.kernels.blocks import cast_columns, cast_rows, codes_at, load_rows
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
def load_unit(
    x_rows, first, rows, C, stride_r, stride_c, LOADS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns from `first` on of ROWS rows: words, twice, or first and second elements."""
    r = tl.arange(0, ROWS)[None, :, None, None]
    w = unit_words(COLUMNS)
    at = x_rows + first * stride_c
    if EVEN and LOADS != ELEMENTWISE:
        at = at.to(tl.pointer_type(tl.int32)) + (r * (stride_r // 2) + w)
        raw = tl.load(at, mask=(r < rows) & (w >= 0), other=0)
        return raw, raw
    else:
        raw, low, high = load_pair(at, r, w, rows, C - first, stride_r, stride_c, LOADS, False, 0)
        if LOADS == ELEMENTWISE:
            return low, high
        else:
            return raw, raw


@triton.jit
def halves(unit, LOADS: tl.constexpr):
    """First and second elements of the words of a unit."""
    first, second = unit
    if LOADS == ELEMENTWISE:
        return first, second
    else:
        return low_half(first, LOADS), high_half(first, LOADS)


@triton.jit
def unit_words(COLUMNS: tl.constexpr):
    """[32, 1, COLUMNS / 256, 4]: the words of a row."""
    lane = tl.arange(0, 32)[:, None, None, None] * 4
    chunk = tl.arange(0, COLUMNS // 256)[None, None, :, None] * 128
    return lane + chunk + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def statistics(
    unit, x_rows, eps, rows, C, stride_r, stride_c,
    LAYER: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Mean (LAYER, else zeros) and ``1 / sqrt(variance or mean square + eps)`` of ROWS rows; `unit`: their first
    COLUMNS columns (`load_unit`).
    """
    w = unit_words(COLUMNS)
    low, high = halves(unit, LOADS)
    mean = tl.zeros([ROWS], tl.float32)
    if LAYER:
        total = tl.sum(tl.sum(low + high, 3), 2)
        first = COLUMNS
        while first < C:
            unit = load_unit(x_rows, first, rows, C, stride_r, stride_c, LOADS, EVEN, ROWS, COLUMNS)
            a, b = halves(unit, LOADS)
            total += tl.sum(tl.sum(a + b, 3), 2)
            first += COLUMNS
        mean = tl.sum(total, 0) / C
        low = tl.where(2 * w < C, low - mean[None, :, None, None], 0.0)
        high = tl.where(2 * w + 1 < C, high - mean[None, :, None, None], 0.0)
    total = tl.sum(tl.sum(tl.fma(low, low, high * high), 3), 2)
    first = COLUMNS
    while first < C:
        unit = load_unit(x_rows, first, rows, C, stride_r, stride_c, LOADS, EVEN, ROWS, COLUMNS)
        a, b = halves(unit, LOADS)
        if LAYER:
            a = tl.where(2 * w < C - first, a - mean[None, :, None, None], 0.0)
            b = tl.where(2 * w + 1 < C - first, b - mean[None, :, None, None], 0.0)
        total += tl.sum(tl.sum(tl.fma(a, a, b * b), 3), 2)
        first += COLUMNS
    return mean, 1.0 / tl.sqrt_rn(tl.sum(total, 0) / C + eps)


@triton.jit
def norm_role(pid, R, C, lead, ahead, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr):
    """What program `pid` of a norm does: (casts, group of BM rows and its number among the programs that cast it, group
    of which it measures units of ROWS rows, from that number on).

    The first `lead` programs measure the first `ahead` groups and cast nothing.
    """
    UNITS: tl.constexpr = BM // ROWS
    members = (C + BN - 1) // BN
    p = pid - lead
    casts = p >= 0
    group = tl.where(casts, p // members, 0)
    number = tl.where(casts, p % members, pid % UNITS)
    later = tl.where(casts, group + ahead, pid // UNITS)
    return casts, group, number, later


@triton.jit
def first_unit(
    x_ptr, R, C, stride_r, stride_c, later, number, LOADS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first unit that a program measures, on its way; zeros if there is none."""
    row0 = later * BM + number * ROWS
    rows = tl.where(number < BM // ROWS, R - row0, 0)
    return load_unit(
        x_ptr + row0.to(tl.int64) * stride_r, 0, rows, C, stride_r, stride_c, LOADS, EVEN, ROWS, COLUMNS
    )  # fmt: skip


@triton.jit
def tell(
    unit, x_ptr, mean_ptr, inverse_ptr, words_ptr, tag, eps, R, C, stride_r, stride_c, group, number,
    LAYER: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the statistics of one unit of a group, for good and for the programs that cast the group."""
    row0 = group * BM + number * ROWS
    x_rows = x_ptr + row0.to(tl.int64) * stride_r
    mean, inverse = statistics(unit, x_rows, eps, R - row0, C, stride_r, stride_c, LAYER, LOADS, EVEN, ROWS, COLUMNS)
    at = tl.arange(0, ROWS)
    there = (number < BM // ROWS) & (group * BM < R) & (at >= 0)
    words = group_words(words_ptr, group, LAYER, BM) + number * ROWS + at
    announce(words, inverse, tag, there)
    if LAYER:
        announce(words + BM, mean, tag, there)
        tl.store(mean_ptr + row0 + at, mean, mask=there & (at < R - row0))
    tl.store(inverse_ptr + row0 + at, inverse, mask=there & (at < R - row0))


@triton.jit(noinline=True)  # rarely runs, and its registers are not to count in those that do
def tell_units(
    x_ptr, mean_ptr, inverse_ptr, words_ptr, tag, eps, R, C, stride_r, stride_c, group, number, step,
    LAYER: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """`tell` of the units `number`, `number` + `step`, ... of a group."""
    if group * BM < R:
        while number < BM // ROWS:
            unit = first_unit(x_ptr, R, C, stride_r, stride_c, group, number, LOADS, EVEN, BM, ROWS, COLUMNS)
            tell(
                unit, x_ptr, mean_ptr, inverse_ptr, words_ptr, tag, eps, R, C, stride_r, stride_c, group, number, LAYER,
                LOADS, EVEN, BM, ROWS, COLUMNS,
            )  # fmt: skip
            number += step


@triton.jit
def tell_later(
    unit, x_ptr, mean_ptr, inverse_ptr, launch_ptr, words_ptr, tag, eps, R, C, stride_r, stride_c, casts, later, number,
    members, LAYER: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, HW: tl.constexpr, BM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The end of every program: it waits for nobody any more, and tells its own units of group `later`."""
    arrived = arrive(launch_ptr, HW)
    tell(
        unit, x_ptr, mean_ptr, inverse_ptr, words_ptr, tag, eps, R, C, stride_r, stride_c, later, number, LAYER, LOADS,
        EVEN, BM, ROWS, COLUMNS,
    )  # fmt: skip
    if casts:
        tell_units(
            x_ptr, mean_ptr, inverse_ptr, words_ptr, tag, eps, R, C, stride_r, stride_c, later, number + members,
            members, LAYER, LOADS, EVEN, BM, ROWS, COLUMNS,
        )  # fmt: skip
    retire(arrived, tl.num_programs(0), launch_ptr, tag, HW)


@triton.jit
def group_words(words_ptr, group, LAYER: tl.constexpr, BM: tl.constexpr):
    """The words of a group of rows: their scales, and then (LAYER) their means."""
    return words_ptr + group * (2 * BM if LAYER else BM)


@triton.jit
def ask(
    x_ptr, mean_ptr, inverse_ptr, words_ptr, tag, eps, R, C, stride_r, stride_c, group,
    LAYER: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, HW: tl.constexpr, BM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The words of a group, once others have told all statistics; measured here where they have not."""
    words = group_words(words_ptr, group, LAYER, BM)
    missing = expect(words + tl.arange(0, BM), tag, HW)
    if LAYER:
        missing += expect(words + BM + tl.arange(0, BM), tag, HW)
    if missing > 0:
        tell_units(
            x_ptr, mean_ptr, inverse_ptr, words_ptr, tag, eps, R, C, stride_r, stride_c, group, 0 * group, 1, LAYER,
            LOADS, EVEN, BM, ROWS, COLUMNS,
        )  # fmt: skip
    tl.debug_barrier()
    return words


@triton.jit
def statistics_of(words, r, rows, LAYER: tl.constexpr, BM: tl.constexpr):
    """(mean, scale) of rows `r` of a group that has been measured; zeros outside `rows`."""
    scale = tl.where(r < rows, recall(words + r), 0.0)
    mean = scale
    if LAYER:
        mean = tl.where(r < rows, recall(words + BM + r), 0.0)
    return mean, scale


@triton.jit(do_not_specialize=["lead", "ahead"])
def norm_scaled(
    x_ptr, mean, inverse, weight, bias, row_out, column_out, scale, source, record, scratch_ptr, launch_ptr, words_ptr,
    seed_ptr, row_stream, column_stream, eps, lead, ahead, R, C, stride_r, stride_c,
    ROW: tl.constexpr, COLUMN: tl.constexpr, SOURCE: tl.constexpr, RECORDS: tl.constexpr, PRODUCER: tl.constexpr,
    LOADS: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr, QUADS: tl.constexpr,
    INDEX64: tl.constexpr, HW: tl.constexpr, ROWS_EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A norm to FP8 codes per tensor. Writes the statistics too."""
    LAYER: tl.constexpr = PRODUCER == LAYER_NORM
    OUT: tl.constexpr = x_ptr.dtype.element_ty
    pid = tl.program_id(0)
    if INDEX64:
        pid = pid.to(tl.int64)
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c, R, C = stride_r * one, stride_c * one, R * one, C * one
    casts, group, number, later = norm_role(pid, R, C, lead, ahead, BM, BN, ROWS)
    tag = tl.load(launch_ptr + 1) + 1
    members = (C + BN - 1) // BN
    unit = first_unit(x_ptr, R, C, stride_r, stride_c, later, number, LOADS, ROWS_EVEN, BM, ROWS, COLUMNS)
    if casts:
        row0, col0 = group * BM, number * BN
        known = 0
        if RECORDS:
            known = peek(scratch_ptr, HW)
        given = given_scale(source, 0.0, ROW, COLUMN, SOURCE)
        at = source_at(x_ptr, None, None, stride_r, stride_c, row0, col0)
        tile = load_tile(at, R - row0, C - col0, LOAD, 0, LOADS, EVEN, HW, BM, BN)
        bias_at = bias if bias is None else bias + col0
        weights = parameters(
            weight + col0, bias_at, local_rows(BM), local_words(BN), R - row0, C - col0, OUT, LOADS, EVEN, 0
        )  # fmt: skip
        words = ask(
            x_ptr, mean, inverse, words_ptr, tag, eps, R, C, stride_r, stride_c, group, LAYER, LOADS, ROWS_EVEN, HW, BM,
            ROWS, COLUMNS,
        )  # fmt: skip
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
            publish_maximum(arrived, tl.cast(groups * members, tl.int32), record, scratch_ptr, RECORD, HW)
    tell_later(
        unit, x_ptr, mean, inverse, launch_ptr, words_ptr, tag, eps, R, C, stride_r, stride_c, casts, later, number,
        members, LAYER, LOADS, ROWS_EVEN, HW, BM, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def columns_of(words, Q: tl.constexpr):
    """[N / LANE, BM, LANE / 8, 4] words or halves of words of rows -> four phases of columns, [BM / 4Q, Q, N / 2]."""
    BM: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[0] * words.shape[2] * 4
    words = tl.reshape(tl.permute(words, [1, 0, 2, 3]), [BM // (4 * Q), Q, 2, 2, W])
    even, odd = tl.split(tl.permute(words, [0, 1, 4, 2, 3]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def columns_tile(values, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of `load_rows` as `cast_columns` takes it."""
    Q: tl.constexpr = 8 if BLOCK >= 32 else 4
    _r, _w, raw, low, high = values
    BM: tl.constexpr = low.shape[1]
    W: tl.constexpr = low.shape[0] * low.shape[2] * 4
    r = tl.arange(0, BM // (4 * Q))[:, None, None] * (4 * Q) + tl.arange(0, Q)[None, :, None] * 4
    w = tl.arange(0, W)[None, None, :]
    if KIND == WORDS_BF16:
        a, b, c, d = columns_of(raw, Q)
        return (
            r, w, (a, low_half(a, KIND), high_half(a, KIND)), (b, low_half(b, KIND), high_half(b, KIND)),
            (c, low_half(c, KIND), high_half(c, KIND)), (d, low_half(d, KIND), high_half(d, KIND)),
        )  # fmt: skip
    else:
        a0, b0, c0, d0 = columns_of(low, Q)
        a1, b1, c1, d1 = columns_of(high, Q)
        return r, w, (a0, a0, a1), (b0, b0, b1), (c0, c0, c1), (d0, d0, d1)


@triton.jit(do_not_specialize=["lead", "ahead"])
def norm_blocks(
    x_ptr, mean, inverse, weight, bias, row_out, row_scale, column_out, column_scale, launch_ptr, words_ptr, seed_ptr,
    row_stream, column_stream, eps, lead, ahead, R, C, stride_r, stride_c,
    ROW: tl.constexpr, COLUMN: tl.constexpr, PRODUCER: tl.constexpr, LOADS: tl.constexpr, KIND: tl.constexpr,
    EVEN: tl.constexpr, PAIRS: tl.constexpr, QUADS: tl.constexpr, INDEX64: tl.constexpr, HW: tl.constexpr,
    ROWS_EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """A norm to block codes. Writes the statistics too."""
    LAYER: tl.constexpr = PRODUCER == LAYER_NORM
    OUT: tl.constexpr = x_ptr.dtype.element_ty
    pid = tl.program_id(0)
    if INDEX64:
        pid = pid.to(tl.int64)
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c, R, C = stride_r * one, stride_c * one, R * one, C * one
    casts, group, number, later = norm_role(pid, R, C, lead, ahead, BM, BN, ROWS)
    tag = tl.load(launch_ptr + 1) + 1
    members = (C + BN - 1) // BN
    unit = first_unit(x_ptr, R, C, stride_r, stride_c, later, number, LOADS, ROWS_EVEN, BM, ROWS, COLUMNS)
    if casts:
        row0, col0 = group * BM, number * BN
        at = source_at(x_ptr, None, None, stride_r, stride_c, row0, col0)
        rows, cols = R - row0, C - col0
        LANE: tl.constexpr = 16 if ROW is not None and ROW[5] else 8
        r, w, raw, low, high = load_rows(at, rows, cols, LANE, LOAD, 0, LOADS, EVEN, HW, BM, BN)
        bias_at = bias if bias is None else bias + col0
        weights = parameters(weight + col0, bias_at, r, w, rows, cols, OUT, LOADS, EVEN, 0)
        words = ask(
            x_ptr, mean, inverse, words_ptr, tag, eps, R, C, stride_r, stride_c, group, LAYER, LOADS, ROWS_EVEN, HW, BM,
            ROWS, COLUMNS,
        )  # fmt: skip
        measured = statistics_of(words, r, rows, LAYER, BM)
        raw, low, high = normalized((raw, low, high), measured, weights, r < rows, OUT, PRODUCER, HW)
        if ROW is not None:
            cast_rows(
                (r, w, raw, low, high), codes_at(row_out, row0, col0, C, ROW), row_scale, seed_ptr, row_stream, 0, 0.0,
                R, C, row0, col0, ROW, KIND, EVEN, PAIRS, HW, BM, BN,
            )  # fmt: skip
        if COLUMN is not None:
            cast_columns(
                columns_tile((r, w, raw, low, high), KIND, COLUMN[4]), codes_at(column_out, col0, row0, R, COLUMN),
                column_scale, seed_ptr, column_stream, 0, 0.0, R, C, row0, col0, COLUMN, KIND, EVEN, PAIRS, QUADS, HW,
                BM, BN,
            )  # fmt: skip
    tell_later(
        unit, x_ptr, mean, inverse, launch_ptr, words_ptr, tag, eps, R, C, stride_r, stride_c, casts, later, number,
        members, LAYER, LOADS, ROWS_EVEN, HW, BM, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["lead", "ahead"])
def norm_values(
    x_ptr, mean, inverse, weight, bias, out_ptr, amax_ptr, scratch_ptr, launch_ptr, words_ptr, eps, lead, ahead, R, C,
    stride_r, stride_c,
    PRODUCER: tl.constexpr, LOADS: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr,
    INDEX64: tl.constexpr, HW: tl.constexpr, ROWS_EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A norm in its input's dtype, its statistics and its amax."""
    LAYER: tl.constexpr = PRODUCER == LAYER_NORM
    OUT: tl.constexpr = x_ptr.dtype.element_ty
    pid = tl.program_id(0)
    if INDEX64:
        pid = pid.to(tl.int64)
        one = tl.full([], 1, tl.int64)
        stride_r, stride_c, R, C = stride_r * one, stride_c * one, R * one, C * one
    casts, group, number, later = norm_role(pid, R, C, lead, ahead, BM, BN, ROWS)
    tag = tl.load(launch_ptr + 1) + 1
    members = (C + BN - 1) // BN
    unit = first_unit(x_ptr, R, C, stride_r, stride_c, later, number, LOADS, ROWS_EVEN, BM, ROWS, COLUMNS)
    if casts:
        row0, col0 = group * BM, number * BN
        known = peek(scratch_ptr, HW)
        at = source_at(x_ptr, None, None, stride_r, stride_c, row0, col0)
        w = local_words(BN)
        r = tl.arange(0, BM)[None, :, None]
        values = produce_pair(at, r, w, R - row0, C - col0, LOAD, 0, LOADS, EVEN, 0, HW)
        bias_at = bias if bias is None else bias + col0
        weights = parameters(weight + col0, bias_at, r, w, R - row0, C - col0, OUT, LOADS, EVEN, 0)
        words = ask(
            x_ptr, mean, inverse, words_ptr, tag, eps, R, C, stride_r, stride_c, group, LAYER, LOADS, ROWS_EVEN, HW, BM,
            ROWS, COLUMNS,
        )  # fmt: skip
        measured = statistics_of(words, r, R - row0, LAYER, BM)
        values = normalized(values, measured, weights, r < R - row0, OUT, PRODUCER, HW)
        offer_maximum(values_amax(values, KIND, HW), known, scratch_ptr, HW)
        arrived = arrive(scratch_ptr + 1, HW)
        out = out_ptr + row0.to(tl.int64) * C + col0
        store_values(values, out, r, w, R - row0, C - col0, C, KIND, EVEN, PAIRS)
        groups = (R + BM - 1) // BM
        publish_maximum(arrived, tl.cast(groups * members, tl.int32), amax_ptr, scratch_ptr, STORE, HW)
    tell_later(
        unit, x_ptr, mean, inverse, launch_ptr, words_ptr, tag, eps, R, C, stride_r, stride_c, casts, later, number,
        members, LAYER, LOADS, ROWS_EVEN, HW, BM, ROWS, COLUMNS,
    )  # fmt: skip


# The same for one column: Triton 3.6 takes such a C for the constant 1, and fails to lay out what follows from it.
norm_scaled_of_one, norm_blocks_of_one, norm_values_of_one = (
    triton.jit(kernel.fn, do_not_specialize=["lead", "ahead", "C"])
    for kernel in (norm_scaled, norm_blocks, norm_values)
)
