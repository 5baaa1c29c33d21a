"""One or two matrices cast in one launch, whose programs wait for each other: what a small Linear casts in a step.

The casts are those of `scaled` and `nvfp4`, tile by tile, so the bytes are too; what differs is who runs them. A launch
has fewer programs than there are tiles, and each takes the tiles `first`, `first` + `programs`, ... of a matrix. Where
scales span more than a tile all programs first measure their tiles, wait for each other, and then cast: they must all
run at once, so the launch is a cooperative one. Host time is what it saves, and the second reading of the tiles, which
finds them in the L2 cache. Bundles of arguments are those of `tiles`, `scaled` and `nvfp4`.
"""

import triton
import triton.language as tl

from microfloat.kernels.casts.amax import amaxes, tile_axes
from microfloat.kernels.casts.nvfp4 import Operand, can_lower, is_modest, nvfp4_tile, shared_levels, shared_seed
from microfloat.kernels.casts.scaled import AMAX, AXES, GIVEN, cast_tile, words_amax_bits
from microfloat.kernels.device.convert import ELEMENTWISE, float_of, magnitude_bits, packed_abs, packed_max
from microfloat.kernels.device.random import split_words
from microfloat.kernels.device.scales import unless_infinite
from microfloat.kernels.device.tiles import Bounds, Source, load_pair, tile_at, tiles_of


@triton.jit
def measure_tiles(matrix, first, programs, HOW: tl.constexpr):
    """Bits of the largest magnitude in a program's tiles of a matrix."""
    KIND: tl.constexpr = HOW.KIND
    BM: tl.constexpr = HOW.BM
    BN: tl.constexpr = HOW.BN
    x_ptr, R, C, stride_r, stride_c = matrix
    across, tiles = tiles_of(R, C, BM, BN)
    r = tl.arange(0, BM)[None, :, None]
    w = tl.arange(0, BN // 8)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    total = tl.zeros([BN // 8, BM, 4], tl.int32)
    tile = first
    while tile < tiles:
        row0, col0, x_tile = tile_at(x_ptr, tile, across, stride_r, stride_c, BM, BN)
        raw, low, high = load_pair(x_tile, r, w, R - row0, C - col0, stride_r, stride_c, KIND, HOW.EVEN, 0)
        if HOW.HW and KIND != ELEMENTWISE:
            total = packed_max(total, packed_abs(raw, KIND), KIND, True)
        else:
            total = tl.maximum(total, tl.maximum(magnitude_bits(low, True), magnitude_bits(high, True)))
        tile += programs
    if HOW.HW and KIND != ELEMENTWISE:
        return words_amax_bits(total, KIND)
    else:
        return tl.max(tl.max(tl.max(total, 2), 1), 0)


@triton.jit
def measure_axes(
    matrix, row_amax, column_amax, first, programs, ROW: tl.constexpr, COLUMN: tl.constexpr, HOW: tl.constexpr
):
    """Bits of the amaxes of rows and columns, int32 and cleared before, from the same tiles."""
    x_ptr, R, C, stride_r, stride_c = matrix
    across, tiles = tiles_of(R, C, HOW.BM, HOW.BN)
    tile = first
    while tile < tiles:
        row0, col0, x_tile = tile_at(x_ptr, tile, across, stride_r, stride_c, HOW.BM, HOW.BN)
        tile_axes(x_tile, row_amax, column_amax, Bounds(R, C, row0, col0), stride_r, stride_c, ROW, COLUMN, HOW)
        tile += programs


@triton.jit
def clear(amax_ptr, count, first, programs, BLOCK: tl.constexpr):
    """Zero in the blocks `first`, `first` + `programs`, ... of `count` words."""
    start = first * BLOCK
    at = tl.arange(0, BLOCK)
    while start < count:
        tl.store(amax_ptr + start + at, tl.zeros([BLOCK], tl.int32), mask=at < count - start)
        start += programs * BLOCK


@triton.jit
def cast_tiles(
    matrix, outputs, sources, epsilon, first, programs, ROW: tl.constexpr, COLUMN: tl.constexpr, SOURCE: tl.constexpr,
    RECORDS: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Both operands of the same tiles; returns the bits of their amax (0 unless recorded)."""
    x_ptr, R, C, stride_r, stride_c = matrix
    across, tiles = tiles_of(R, C, HOW.BM, HOW.BN)
    amax = tl.zeros([], tl.int32)
    tile = first
    while tile < tiles:
        row0, col0, x_tile = tile_at(x_ptr, tile, across, stride_r, stride_c, HOW.BM, HOW.BN)
        source = Source(x_tile, x_tile, x_tile, stride_r, stride_c)
        bounds = Bounds(R, C, row0, col0)
        no_generators = (None, 0, 0)  # casts together round to the nearest
        found = cast_tile(source, outputs, sources, no_generators, epsilon, bounds, ROW, COLUMN, SOURCE, RECORDS, HOW)
        amax = tl.maximum(amax, found)
        tile += programs
    return amax


@triton.jit
def wait_for_all(scratch_ptr, times):
    """Go on when every program of the launch has come here; `times`: how often it has waited, this time included.

    `scratch_ptr`: int64[5], zero before and after the launch: first maximum, arrivals, second and third maximum,
    departures.
    """
    tl.debug_barrier()  # what all threads have written comes before the arrival
    tl.atomic_add(scratch_ptr + 1, 1, sem="acq_rel")
    wanted = tl.num_programs(0) * times
    arrived = tl.atomic_add(scratch_ptr + 1, 0, sem="acq_rel")
    while arrived < wanted:
        arrived = tl.atomic_add(scratch_ptr + 1, 0, sem="acq_rel")


@triton.jit
def leave(scratch_ptr):
    """Let the last program to leave clear the scratch words; none of them is read afterwards."""
    tl.debug_barrier()
    if tl.atomic_add(scratch_ptr + 4, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.atomic_xchg(scratch_ptr, 0)
        tl.atomic_xchg(scratch_ptr + 1, 0)
        tl.atomic_xchg(scratch_ptr + 2, 0)
        tl.atomic_xchg(scratch_ptr + 3, 0)
        tl.atomic_xchg(scratch_ptr + 4, 0)


@triton.jit
def record_two(
    first_bits, second_bits, first_out, second_out, scratch_ptr, source_ptr, row_scale, column_scale,
    X: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """`publish_maximum` with RECORD for two maxima, each into a history of its own; the scratch of `wait_for_all`. The
    scale of a gradient, which is a first matrix, is written here (`scaled.record_maximum`).
    """
    tl.atomic_max(scratch_ptr, first_bits.to(tl.int64), sem="relaxed")
    if PAIR:
        tl.atomic_max(scratch_ptr + 2, second_bits.to(tl.int64), sem="relaxed")
    if tl.atomic_add(scratch_ptr + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        total = tl.atomic_xchg(scratch_ptr, 0).to(tl.int32)
        tl.atomic_max(first_out.to(tl.pointer_type(tl.int32)), tl.where(total < 0x7F800000, total, 0))
        ANY: tl.constexpr = X.ROW if X.ROW is not None else X.COLUMN
        if ANY.GRADIENT:
            scale = unless_infinite(tl.div_rn(1.0, tl.load(source_ptr)), float_of(total), True)
            if X.ROW is not None:
                tl.store(row_scale, scale)
            if X.COLUMN is not None:
                tl.store(column_scale, scale)
        if PAIR:
            total = tl.atomic_xchg(scratch_ptr + 2, 0).to(tl.int32)
            tl.atomic_max(second_out.to(tl.pointer_type(tl.int32)), tl.where(total < 0x7F800000, total, 0))
        tl.atomic_xchg(scratch_ptr + 1, 0)


@triton.jit
def cast_pair(
    x_ptr, x_row, x_column, x_row_scale, x_column_scale, x_source, x_record,
    w_ptr, w_row, w_column, w_row_scale, w_column_scale, w_source, w_record, scratch_ptr,
    x_epsilon, XR, XC, x_stride_r, x_stride_c, w_epsilon, WR, WC, w_stride_r, w_stride_c,
    SOURCE: tl.constexpr, RECORDS: tl.constexpr, X: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Cast one or two matrices. X and W: `constants.Pass`, with casts as in `cast_scaled`; W may be None.
    SOURCE: GIVEN (`source` holds the encode factor), AMAX (measured here) or AXES (the same; `source` is room
    for the amaxes of rows and of columns, int32 [R + C]). No matrix needs 64-bit offsets inside a tile.
    """
    X_ROW: tl.constexpr = X.ROW
    X_COLUMN: tl.constexpr = X.COLUMN
    X_HOW: tl.constexpr = X.HOW
    PAIR: tl.constexpr = W is not None
    x = (x_ptr, XR, XC, x_stride_r, x_stride_c)
    if PAIR:
        W_ROW: tl.constexpr = W.ROW
        W_COLUMN: tl.constexpr = W.COLUMN
        W_HOW: tl.constexpr = W.HOW
        w = (w_ptr, WR, WC, w_stride_r, w_stride_c)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    begin = 0
    if PAIR:  # programs that have one tile of x less begin with w
        tiles = ((XR + X_HOW.BM - 1) // X_HOW.BM) * ((XC + X_HOW.BN - 1) // X_HOW.BN)
        begin = (pid + programs - tiles % programs) % programs
    x_columns, w_columns = None, None  # amaxes of columns
    if SOURCE == AMAX:
        x_amax = measure_tiles(x, pid, programs, X_HOW)
        tl.atomic_max(scratch_ptr, x_amax.to(tl.int64), sem="relaxed")
        if PAIR:
            w_amax = measure_tiles(w, begin, programs, W_HOW)
            tl.atomic_max(scratch_ptr + 2, w_amax.to(tl.int64), sem="relaxed")
        wait_for_all(scratch_ptr, 1)
        # The low half of a word: bits of a float.
        x_source = scratch_ptr.to(tl.pointer_type(tl.float32))
        w_source = (scratch_ptr + 2).to(tl.pointer_type(tl.float32))
    if SOURCE == AXES:
        clear(x_source, XR + XC, pid, programs, 1024)
        if PAIR:
            clear(w_source, WR + WC, begin, programs, 1024)
        wait_for_all(scratch_ptr, 1)
        measure_axes(x, x_source, x_source + XR, pid, programs, X_ROW is not None, X_COLUMN is not None, X_HOW)
        if PAIR:
            measure_axes(w, w_source, w_source + WR, begin, programs, W_ROW is not None, W_COLUMN is not None, W_HOW)
        wait_for_all(scratch_ptr, 2)
        x_source = x_source.to(tl.pointer_type(tl.float32))
        x_columns = x_source + XR
        if PAIR:
            w_source = w_source.to(tl.pointer_type(tl.float32))
            w_columns = w_source + WR
    outputs, sources = (x_row, x_column, x_row_scale, x_column_scale), (x_source, x_columns)
    x_amax = cast_tiles(x, outputs, sources, x_epsilon, pid, programs, X_ROW, X_COLUMN, SOURCE, RECORDS, X_HOW)
    w_amax = tl.zeros([], tl.int32)
    if PAIR:
        outputs, sources = (w_row, w_column, w_row_scale, w_column_scale), (w_source, w_columns)
        w_amax = cast_tiles(w, outputs, sources, w_epsilon, begin, programs, W_ROW, W_COLUMN, SOURCE, RECORDS, W_HOW)
    if SOURCE != GIVEN:
        leave(scratch_ptr)
    elif RECORDS:
        record_two(x_amax, w_amax, x_record, w_record, scratch_ptr, x_source, x_row_scale, x_column_scale, X, PAIR)


@triton.jit
def measure_values(matrix, scratch_ptr, transformed_ptr, first, programs, COLUMN: tl.constexpr, HOW: tl.constexpr):
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
):
    """`cast_values`, in the form that the tensor amaxes allow."""
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
    streams = (x_row_stream, x_column_stream, 0, 0)
    cast_values_by_size(x, row, column, seed_ptr, streams, pid, programs, X_ROW, X_COLUMN, X_HOW)
    if W is not None:
        W_ROW: tl.constexpr = W.ROW
        W_COLUMN: tl.constexpr = W.COLUMN
        amax = second_word.to(tl.pointer_type(tl.float32))
        row, column = Operand(w_row, None, w_row_scale, amax), Operand(w_column, None, w_column_scale, amax)
        streams = (w_row_stream, w_column_stream, 0, 0)
        cast_values_by_size(w, row, column, seed_ptr, streams, begin, programs, W_ROW, W_COLUMN, W_HOW)
    leave(scratch_ptr)
