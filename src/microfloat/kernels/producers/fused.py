"""Kernels of norms, activations and their gradients: statistics of rows, and values (`device.produce`) cast at once.

| kernel | result | programs |
|---|---|---|
| `measure_rows` | mean and inverse of each row, for a norm | one for ROWS rows |
| `produce_scaled` | FP8 codes with a scale per tensor (`casts.scaled`) | one for each BM x BN tile |
| `produce_blocks` | MX and FP8 1x128 codes (`casts.blocks`) | one for each BM x BN tile |
| `gate_halves` | a gate of rows that hold its two inputs, or their gradient | one for BLOCK columns of a row |
| `produce_values` | values in the dtype of the input, and their amax | one for each BM x BN tile |

Values are rounded as an unfused operation would round them (`produce`). GATE_GRADIENTS writes two matrices. For bundles
of arguments see `tiles` and `scaled`.
"""

import triton
import triton.language as tl

from microfloat.kernels.casts import scaled
from microfloat.kernels.casts.blocks import cast_columns, cast_rows, codes_at, load_columns, load_rows
from microfloat.kernels.device import produce
from microfloat.kernels.device.convert import ELEMENTWISE, high_half, low_half, magnitude_bits, packed_abs, stored
from microfloat.kernels.device.grid_reduction import STORE, arrive, offer_maximum, peek, publish_maximum
from microfloat.kernels.device.squares import cast_squares, load_squares, takes
from microfloat.kernels.device.tiles import Bounds, Source, load_pair, program, store_pairs, tiles_of


@triton.jit
def load_unit(
    x_rows, first, rows, C, stride_r, stride_c, LOADS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """First and second elements of the words in ROWS rows and COLUMNS columns from `first` on."""
    r = tl.arange(0, ROWS)[None, :, None, None]
    w = unit_words(COLUMNS)
    at = x_rows + first * stride_c
    if EVEN and LOADS != ELEMENTWISE:
        at = at.to(tl.pointer_type(tl.int32)) + (r * (stride_r // 2) + w)
        raw = tl.load(at, mask=(r < rows) & (w >= 0), other=0)
        return low_half(raw, LOADS), high_half(raw, LOADS)
    else:
        _raw, low, high = load_pair(at, r, w, rows, C - first, stride_r, stride_c, LOADS, False, 0)
        return low, high


@triton.jit
def unit_words(COLUMNS: tl.constexpr):
    """Local words [32, 1, COLUMNS / 256, 4] of a row."""
    lane = tl.arange(0, 32)[:, None, None, None] * 4
    chunk = tl.arange(0, COLUMNS // 256)[None, None, :, None] * 128
    return lane + chunk + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def statistics(
    x_rows, eps, rows, C, stride_r, stride_c,
    LAYER: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Mean (LAYER, else zeros) and ``1 / sqrt(variance or mean square + eps)`` of ROWS rows."""
    w = unit_words(COLUMNS)
    mean = tl.zeros([ROWS], tl.float32)
    if LAYER:
        total = tl.zeros([32, ROWS], tl.float32)
        first = 0
        while first < C:
            low, high = load_unit(x_rows, first, rows, C, stride_r, stride_c, LOADS, EVEN, ROWS, COLUMNS)
            total += tl.sum(tl.sum(low + high, 3), 2)
            first += COLUMNS
        mean = tl.sum(total, 0) / C
    total = tl.zeros([32, ROWS], tl.float32)
    first = 0
    while first < C:
        low, high = load_unit(x_rows, first, rows, C, stride_r, stride_c, LOADS, EVEN, ROWS, COLUMNS)
        if LAYER:
            low = tl.where(2 * w < C - first, low - mean[None, :, None, None], 0.0)
            high = tl.where(2 * w + 1 < C - first, high - mean[None, :, None, None], 0.0)
        total += tl.sum(tl.sum(tl.fma(low, low, high * high), 3), 2)
        first += COLUMNS
    return mean, 1.0 / tl.sqrt_rn(tl.sum(total, 0) / C + eps)


@triton.jit
def measure_rows(
    x_ptr, mean_ptr, inverse_ptr, eps, R, C, stride_r, stride_c,
    LOADS: tl.constexpr, EVEN: tl.constexpr, INDEX64: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store mean (LayerNorm; otherwise `mean_ptr` is None) and inverse of ROWS rows. EVEN: COLUMNS divides C."""
    LAYER: tl.constexpr = mean_ptr is not None
    pid, R, C, stride_r, stride_c = program(R, C, stride_r, stride_c, INDEX64)
    row0 = pid * ROWS
    x_rows = x_ptr + row0.to(tl.int64) * stride_r
    mean, inverse = statistics(x_rows, eps, R - row0, C, stride_r, stride_c, LAYER, LOADS, EVEN, ROWS, COLUMNS)
    at = row0 + tl.arange(0, ROWS)
    if LAYER:
        tl.store(mean_ptr + at, mean, mask=at < R)
    tl.store(inverse_ptr + at, inverse, mask=at < R)


@triton.jit
def produced_tile(
    x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, R, C, stride_r, stride_c, PRODUCER: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """`Source` and `Bounds` of this program's tile; pointers that PRODUCER does not read may be None."""
    pid, R, C, stride_r, stride_c = program(R, C, stride_r, stride_c, HOW.INDEX64)
    across, _tiles = tiles_of(R, C, HOW.BM, HOW.BN)
    row0, col0 = (pid // across) * HOW.BM, (pid % across) * HOW.BN
    offset = row0.to(tl.int64) * stride_r + col0.to(tl.int64) * stride_c
    x_tile = x_ptr + offset
    y_tile, z_tile = x_tile, x_tile
    if PRODUCER >= produce.RMS_NORM:
        if PRODUCER == produce.RMS_NORM:  # reads no other
            mean, bias = inverse, weight
        y_tile, z_tile = (mean + row0, inverse + row0), (weight + col0, bias + col0)
    else:
        if y_ptr is not None:
            y_tile = y_ptr + offset
        if z_ptr is not None:
            z_tile = z_ptr + offset
    return Source(x_tile, y_tile, z_tile, stride_r, stride_c), Bounds(R, C, row0, col0)


@triton.jit
def produce_scaled(
    x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, row_out, column_out, scale, source, record, row_out2, column_out2,
    scale2, source2, record2, scratch_ptr, seed_ptr, seed2_ptr, row_stream, column_stream, epsilon, R, C, stride_r,
    stride_c, ROW: tl.constexpr, COLUMN: tl.constexpr, SOURCE: tl.constexpr, RECORDS: tl.constexpr,
    PRODUCER: tl.constexpr, F: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Cast produced values to FP8 with a scale per tensor; each of two GATE_GRADIENTS has its own scale and seed."""
    at, bounds = produced_tile(
        x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, R, C, stride_r, stride_c, PRODUCER, HOW
    )
    R, C, row0, col0 = bounds
    known, known2 = 0, 0
    if RECORDS:
        known = peek(scratch_ptr, HOW.HW)
        if PRODUCER == produce.GATE_GRADIENTS:
            known2 = peek(scratch_ptr + 3, HOW.HW)
    given = scaled.given_scale(source, epsilon, ROW, COLUMN, SOURCE)
    if PRODUCER == produce.GATE_GRADIENTS:
        given2 = scaled.given_scale(source2, epsilon, ROW, COLUMN, SOURCE)
        tile, tile2 = scaled.load_tile(at, R - row0, C - col0, PRODUCER, F, HOW)
        _amax, arrived2 = scaled.measure_tile(
            tile2, scratch_ptr + 3 if RECORDS else scratch_ptr, known2, RECORDS, SOURCE, HOW.KIND, HOW.HW
        )
    else:
        tile = scaled.load_tile(at, R - row0, C - col0, PRODUCER, F, HOW)
    amax, arrived = scaled.measure_tile(tile, scratch_ptr, known, RECORDS, SOURCE, HOW.KIND, HOW.HW)
    outputs, sources = (row_out, column_out, scale, scale), (source, source)
    generators = (seed_ptr, row_stream, column_stream)
    scaled.write_tile(tile, given, amax, outputs, sources, generators, epsilon, bounds, ROW, COLUMN, SOURCE, HOW)
    if PRODUCER == produce.GATE_GRADIENTS:
        outputs, sources = (row_out2, column_out2, scale2, scale2), (source2, source2)
        generators = (seed2_ptr, row_stream, column_stream)
        scaled.write_tile(tile2, given2, amax, outputs, sources, generators, epsilon, bounds, ROW, COLUMN, SOURCE, HOW)
    if RECORDS:
        scaled.record_maximum(arrived, record, scratch_ptr, given, scale, scale, ROW, COLUMN, HOW.HW)
        if PRODUCER == produce.GATE_GRADIENTS:
            scaled.record_maximum(arrived2, record2, scratch_ptr + 3, given2, scale2, scale2, ROW, COLUMN, HOW.HW)


@triton.jit
def produce_blocks(
    x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, row_out, row_scale, column_out, column_scale, row_out2,
    row_scale2, column_out2, column_scale2, seed_ptr, seed2_ptr, row_stream, column_stream, epsilon, R, C, stride_r,
    stride_c, ROW: tl.constexpr, COLUMN: tl.constexpr, PRODUCER: tl.constexpr, F: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Cast produced values to MX or FP8 1x128; each of two GATE_GRADIENTS has its own seed."""
    at, bounds = produced_tile(
        x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, R, C, stride_r, stride_c, PRODUCER, HOW
    )
    R, C, row0, col0 = bounds
    TWO: tl.constexpr = PRODUCER == produce.GATE_GRADIENTS
    rows = R - row0
    cols = C - col0
    if not TWO and HOW.LOADS == HOW.KIND and takes(ROW, COLUMN, HOW.KIND, HOW.EVEN):
        squares = load_squares(at, rows, cols, PRODUCER, F, HOW)
        outputs = (row_out, row_scale, column_out, column_scale)
        cast_squares(squares, outputs, bounds, ROW, COLUMN, HOW)
        return
    if ROW is not None:
        r, w, values = load_rows(at, rows, cols, 16 if ROW.STOCHASTIC else 8, PRODUCER, F, HOW)
        if TWO:
            values, values2 = values
            tile, generator = codes_at(row_out2, row0, col0, C, ROW), (seed2_ptr, row_stream, 0)
            cast_rows((r, w, values2), tile, row_scale2, generator, epsilon, bounds, ROW, HOW)
        tile, generator = codes_at(row_out, row0, col0, C, ROW), (seed_ptr, row_stream, 0)
        cast_rows((r, w, values), tile, row_scale, generator, epsilon, bounds, ROW, HOW)
    if COLUMN is not None:
        r, w, values = load_columns(at, rows, cols, COLUMN.BLOCK, PRODUCER, F, HOW)
        if TWO:
            values, values2 = values
            tile, generator = codes_at(column_out2, col0, row0, R, COLUMN), (seed2_ptr, column_stream, 0)
            cast_columns((r, w, values2), tile, column_scale2, generator, epsilon, bounds, COLUMN, HOW)
        tile, generator = codes_at(column_out, col0, row0, R, COLUMN), (seed_ptr, column_stream, 0)
        cast_columns((r, w, values), tile, column_scale, generator, epsilon, bounds, COLUMN, HOW)


@triton.jit
def produce_values(
    x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, out_ptr, amax_ptr, out2_ptr, amax2_ptr, scratch_ptr, R, C,
    stride_r, stride_c, PRODUCER: tl.constexpr, F: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Store produced values in the dtype of the inputs, and their amax, from which current scaling casts."""
    at, bounds = produced_tile(
        x_ptr, y_ptr, z_ptr, mean, inverse, weight, bias, R, C, stride_r, stride_c, PRODUCER, HOW
    )
    R, C, row0, col0 = bounds
    w = scaled.local_words(HOW.BN)
    r = tl.arange(0, HOW.BM)[None, :, None]
    known = peek(scratch_ptr, HOW.HW)
    out = out_ptr + row0.to(tl.int64) * C + col0
    if PRODUCER == produce.GATE_GRADIENTS:
        known2 = peek(scratch_ptr + 3, HOW.HW)
        values, values2 = produce.produce_gradients(at, r, w, R - row0, C - col0, F, HOW.LOADS, HOW.EVEN, 0, HOW.HW)
        offer_maximum(values_amax(values2, HOW.KIND, HOW.HW), known2, scratch_ptr + 3, HOW.HW)
        arrived2 = arrive(scratch_ptr + 4, HOW.HW)
    else:
        values = produce.produce_pair(at, r, w, R - row0, C - col0, PRODUCER, F, HOW.LOADS, HOW.EVEN, 0, HOW.HW)
    offer_maximum(values_amax(values, HOW.KIND, HOW.HW), known, scratch_ptr, HOW.HW)
    arrived = arrive(scratch_ptr + 1, HOW.HW)
    store_values(values, out, r, w, R - row0, C - col0, C, HOW.KIND, HOW.EVEN, HOW.PAIRS)
    if PRODUCER == produce.GATE_GRADIENTS:
        out = out2_ptr + row0.to(tl.int64) * C + col0
        store_values(values2, out, r, w, R - row0, C - col0, C, HOW.KIND, HOW.EVEN, HOW.PAIRS)
        publish_maximum(arrived2, tl.num_programs(0), amax2_ptr, scratch_ptr + 3, STORE, HOW.HW)
    publish_maximum(arrived, tl.num_programs(0), amax_ptr, scratch_ptr, STORE, HOW.HW)


@triton.jit
def store_values(values, out_tile, r, w, rows, cols, C, KIND: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr):
    """Store one tile of produced values."""
    raw, low, high = values
    if KIND != ELEMENTWISE:
        store_pairs(out_tile, raw, r, w, rows, cols, C, 16, PAIRS, EVEN)
    else:
        dtype: tl.constexpr = out_tile.dtype.element_ty
        tl.store(out_tile + (r * C + 2 * w), low.to(dtype), mask=(r < rows) & (2 * w < cols))
        tl.store(out_tile + (r * C + 2 * w + 1), high.to(dtype), mask=(r < rows) & (2 * w + 1 < cols))


@triton.jit
def values_amax(values, KIND: tl.constexpr, HW: tl.constexpr):
    """Amax bits of a tile of produced values."""
    raw, low, high = values
    if HW and KIND != ELEMENTWISE:
        return scaled.words_amax_bits(packed_abs(raw, KIND), KIND)
    else:
        m = tl.maximum(magnitude_bits(low, True), magnitude_bits(high, True))
        return tl.max(tl.max(tl.max(m, 2), 1), 0)


@triton.jit
def gate_halves(x, grad, out, C, F: tl.constexpr, BLOCK: tl.constexpr, HW: tl.constexpr):
    """``round(f(gate)) * up`` of rows (gate, up) of 2 C columns; with `grad`, the gradient of these rows."""
    OUT: tl.constexpr = out.dtype.element_ty
    across = (C + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // across).to(tl.int64)
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    at, inside = row * C * 2 + column, column < C
    gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + at + C, mask=inside, other=0.0).to(tl.float32)
    value = stored(produce.activate(gate, F, HW), OUT, HW).to(tl.float32)
    if grad is None:
        tl.store(out + row * C + column, stored(value * up, OUT, HW), mask=inside)
    else:
        z = tl.load(grad + row * C + column, mask=inside, other=0.0).to(tl.float32)
        inner = stored(z * up, OUT, HW).to(tl.float32) * produce.activate_gradient(gate, F, HW)
        tl.store(out + at, stored(inner, OUT, HW), mask=inside)
        tl.store(out + at + C, stored(z * value, OUT, HW), mask=inside)
