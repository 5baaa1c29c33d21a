"""FP8 casts with scales per tensor, per row and column, or per 128 x 128 tile.

One program reads one tile of BM x BN once and writes its codes twice: in the order of the matrix, and transposed, since
FP8 tensor cores need the contraction axis contiguous. A thread holds four rows of eight columns, so it packs four
neighbours of a row and of a column in registers; transposed words pass through shared memory.

`SOURCE` says where the encode factor comes from:
* GIVEN: an encode factor in device memory (delayed scaling); RECORDS adds the amax of the matrix to a history;
* AMAX: the amax of the matrix in device memory (current scaling); AXES: the amaxes of its rows and columns;
* TILE: the amax of the tile itself, which is then a tile of the format.

Arguments come in bundles: outputs = (row_out, column_out, row_scale, column_scale), pointers to the first element of
each; sources = (source_ptr, source2_ptr), the second for the columns of AXES; generators = (seed_ptr, row_stream,
column_stream). For source, bounds, generator and HOW see `tiles`.
"""

import triton
import triton.language as tl

from microfloat.kernels.constants import ScaledCast
from microfloat.kernels.device import grid_reduction
from microfloat.kernels.device.convert import (
    ELEMENTWISE,
    bits_of,
    encode_pair,
    encode_quad,
    high_half,
    larger_half,
    largest_of_four,
    low_half,
    magnitude_bits,
    packed_reduce,
)
from microfloat.kernels.device.produce import LOAD, produce_rows
from microfloat.kernels.device.random import column_bytes, load_seed, pair_bytes
from microfloat.kernels.device.scales import fp32_scale
from microfloat.kernels.device.tiles import group_of, prefetch_later, store_pairs, store_quads, tile_of_program

GIVEN = tl.constexpr(0)
AMAX = tl.constexpr(1)
AXES = tl.constexpr(2)
TILE = tl.constexpr(3)

# Number of elements at the beginning of a matrix that the L2 cache holds once its amax was measured from the end.
STILL_CACHED = tl.constexpr(12 << 20)


@triton.jit
def words_amax_bits(m, KIND: tl.constexpr):
    """Bits of the largest element in a three-dimensional tensor of words of magnitudes."""
    m = packed_reduce(packed_reduce(packed_reduce(m, 2, KIND, True), 1, KIND, True), 0, KIND, True)
    return larger_half(m, KIND, True)


@triton.jit
def amax_of_tile(tile, KIND: tl.constexpr, HW: tl.constexpr):
    """Bits of the largest magnitude of a tile (`load_tile`), NaN ignored."""
    if HW and KIND != ELEMENTWISE:
        return words_amax_bits(largest_of_four(tile, KIND, True), KIND)
    else:
        m = tl.maximum(magnitude_bits(tile[0][1], True), magnitude_bits(tile[0][2], True))
        for p in tl.static_range(1, 4):
            m = tl.maximum(m, tl.maximum(magnitude_bits(tile[p][1], True), magnitude_bits(tile[p][2], True)))
        return tl.max(tl.max(tl.max(m, 2), 1), 0)


@triton.jit
def axis_scale(amax_ptr, inside, epsilon, CAST: tl.constexpr):
    """Scales and encode factors of rows or columns from their float32 amaxes."""
    return fp32_scale(bits_of(tl.load(amax_ptr, mask=inside, other=0.0)), epsilon, CAST)


@triton.jit
def cast_tile_rows(
    out_tile, low, high, factor, bounds, generator, PHASE: tl.constexpr, CAST: tl.constexpr, HOW: tl.constexpr
):
    """Store the codes of one of every four rows (PHASE) in the row operand."""
    R, C, row0, col0 = bounds
    r = local_rows(HOW.BM)
    w = local_words(HOW.BN)
    random = 0
    if CAST.STOCHASTIC:
        seed_ptr, stream, batch = generator
        word, row = col0 // 2 + w, row0 + r + PHASE
        random = pair_bytes(load_seed(seed_ptr), row, word, stream, batch)
    codes = encode_pair(low * factor, high * factor, random, CAST.MB, CAST.BIAS, CAST.STOCHASTIC, HOW.HW)
    store_pairs(out_tile, codes, r + PHASE, w, R - row0, C - col0, C, 8, HOW.PAIRS, HOW.EVEN)


@triton.jit
def cast_tile_columns(
    out_tile, tile, factor, bounds, generator, SECOND: tl.constexpr, CAST: tl.constexpr, HOW: tl.constexpr
):
    """Store the codes of the first (SECOND = 0) or second column of every word in the column operand."""
    BM: tl.constexpr = HOW.BM
    BN: tl.constexpr = HOW.BN
    R, C, row0, col0 = bounds
    local = tl.arange(0, BN // 2)[:, None] * 2
    column, quad = col0 + 2 * local_words(BN) + SECOND, row0 // 4 + tl.arange(0, BM // 4)[None, :, None]
    local = local + SECOND
    random = 0
    if CAST.STOCHASTIC:
        seed_ptr, stream, batch = generator
        random = column_bytes(load_seed(seed_ptr), column, quad, stream, batch)
    V: tl.constexpr = 1 + SECOND
    a, b, c, d = tile[0][V] * factor, tile[1][V] * factor, tile[2][V] * factor, tile[3][V] * factor
    codes = encode_quad(a, b, c, d, random, CAST.MB, CAST.BIAS, CAST.STOCHASTIC, HOW.HW)
    codes = tl.reshape(tl.permute(codes, [0, 2, 1]), [BN // 2, BM // 4])
    quads = tl.arange(0, BM // 4)[None, :]
    store_quads(out_tile, codes, local, quads, R - row0, C - col0, R, 8, HOW.QUADS, HOW.EVEN)


@triton.constexpr_function
def converts_once(row, column, source, even, rows):
    """True if each element is converted once for both operands: one nearest cast per tensor, whole tiles of 256 rows.

    Such tiles write long columns of codes at once; with two conversions, a thread could not hold the codes of both.
    """
    if row is None or column is None or row != column or ScaledCast(*row).STOCHASTIC or not even:
        return False
    return rows == 256 and source in (GIVEN, AMAX)


@triton.jit
def turned(a, b, c, d, HW: tl.constexpr):
    """Transpose of a 4 x 4 matrix of bytes, given and returned as four words."""
    if HW:
        PTX: tl.constexpr = (
            "{ .reg .b32 p, q, r, s; prmt.b32 p, $4, $5, 0x5140; prmt.b32 q, $6, $7, 0x5140; "
            "prmt.b32 r, $4, $5, 0x7362; prmt.b32 s, $6, $7, 0x7362; prmt.b32 $0, p, q, 0x5410; "
            "prmt.b32 $1, p, q, 0x7632; prmt.b32 $2, r, s, 0x5410; prmt.b32 $3, r, s, 0x7632; }"
        )
        return tl.inline_asm_elementwise(
            PTX,
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [a, b, c, d],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        first = (a & 0xFF) | ((b & 0xFF) << 8) | ((c & 0xFF) << 16) | (d << 24)
        second = ((a >> 8) & 0xFF) | (b & 0xFF00) | ((c << 8) & 0xFF0000) | ((d << 16) & -16777216)
        third = ((a >> 16) & 0xFF) | ((b >> 8) & 0xFF00) | (c & 0xFF0000) | ((d << 8) & -16777216)
        fourth = ((a >> 24) & 0xFF) | ((b >> 16) & 0xFF00) | ((c >> 8) & 0xFF0000) | (d & -16777216)
        return first, second, third, fourth


@triton.jit
def write_codes_once(
    row_tile, column_tile, tile, factor, R, C, MB: tl.constexpr, BIAS: tl.constexpr, SOURCE: tl.constexpr,
    HW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store the codes of a whole tile in both operands, converting each element once (`converts_once`).

    After an amax pass codes are stored as the first to be evicted, so the rest of the matrix stays in the L2 cache.
    """
    POLICY: tl.constexpr = "evict_first" if SOURCE == AMAX else ""
    SHAPE: tl.constexpr = (BN // 8, BM // 4, 2, 2)
    first = row_tile.to(tl.pointer_type(tl.int32))
    first = first + (local_rows(BM) * (C // 4) + tl.arange(0, BN // 8)[:, None, None] * 2)
    first = first + tl.arange(0, 2)[None, None, :]
    words = ()
    for p in tl.static_range(4):
        _raw, low, high = tile[p]
        low0, low1 = tl.split(tl.reshape(low * factor, SHAPE))
        high0, high1 = tl.split(tl.reshape(high * factor, SHAPE))
        codes = encode_quad(low0, high0, low1, high1, 0, MB, BIAS, False, HW)
        tl.store(first + p * (C // 4), codes, eviction_policy=POLICY)
        words = words + (codes,)
    a, b, c, d = turned(words[0], words[1], words[2], words[3], HW)
    quads = tl.join(tl.join(a, c), tl.join(b, d))  # columns 0 and 2, 1 and 3 of every four
    quads = tl.reshape(tl.permute(quads, [0, 2, 3, 4, 1]), [BN, BM // 4])
    at = column_tile.to(tl.pointer_type(tl.int32))
    at = at + (tl.arange(0, BN)[:, None] * (R // 4) + tl.arange(0, BM // 4)[None, :])
    tl.store(tl.multiple_of(at, [16, 16]), quads, eviction_policy=POLICY)


@triton.jit
def local_rows(BM: tl.constexpr):
    """Index [1, BM / 4, 1] of the first of every four rows of a tile."""
    return tl.arange(0, BM // 4)[None, :, None] * 4


@triton.jit
def local_words(BN: tl.constexpr):
    """Indices [BN / 8, 1, 4] of the words of a row of a tile, four to a thread."""
    return tl.arange(0, BN // 8)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]


@triton.jit
def load_tile(source, rows, cols, PRODUCER: tl.constexpr, F: tl.constexpr, HOW: tl.constexpr):
    """Values of a tile for `write_tile`: `produce_pair` of each of four neighbouring rows; two for GATE_GRADIENTS."""
    return produce_rows(source, local_rows(HOW.BM), local_words(HOW.BN), rows, cols, 4, PRODUCER, F, 0, HOW)


@triton.jit
def given_scale(source_ptr, epsilon, ROW: tl.constexpr, COLUMN: tl.constexpr, SOURCE: tl.constexpr):
    """Scale and encode factor from an encode scale or amax in memory; called before the tile is loaded."""
    ANY: tl.constexpr = ROW if ROW is not None else COLUMN
    if SOURCE == GIVEN:
        factor = tl.load(source_ptr)
        return factor, factor  # the scale is the reciprocal, which one program computes
    elif SOURCE == AMAX:
        return fp32_scale(bits_of(tl.load(source_ptr)), epsilon, ANY)
    else:
        return 1.0, 1.0


@triton.jit
def measure_tile(
    tile, scratch_ptr, known, RECORDS: tl.constexpr, SOURCE: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr
):
    """Amax bits of a tile, and number of arrivals at `scratch_ptr`; each is 0 where it is not needed."""
    amax = tl.zeros([], tl.int32)
    arrived = 0
    if RECORDS or SOURCE == TILE:
        amax = amax_of_tile(tile, KIND, HW)
    if RECORDS:
        grid_reduction.offer_maximum(amax, known, scratch_ptr, HW)
        arrived = grid_reduction.arrive(scratch_ptr + 1, HW)
    return amax, arrived


@triton.jit
def write_tile(
    tile, given, amax, outputs, sources, generators, epsilon, bounds, ROW: tl.constexpr, COLUMN: tl.constexpr,
    SOURCE: tl.constexpr, HOW: tl.constexpr, begins=None,
):  # fmt: skip
    """Write one tile of both operands from the results of `load_tile`, `given_scale` and `measure_tile`.

    `begins`: True in the first rows of a group, for rows in groups; amax and scale pointers then begin at that group.
    """
    BM: tl.constexpr = HOW.BM
    BN: tl.constexpr = HOW.BN
    row_out, column_out, row_scale, column_scale = outputs
    source_ptr, source2_ptr = sources
    seed_ptr, row_stream, column_stream = generators
    R, C, row0, col0 = bounds
    rows = R - row0
    cols = C - col0
    w = local_words(BN)
    r = local_rows(BM)
    if begins is None:
        begins = row0 == 0
    ANY: tl.constexpr = ROW if ROW is not None else COLUMN
    factors, column_factors = (1.0, 1.0, 1.0, 1.0), (1.0, 1.0)
    if SOURCE == AXES:
        if ROW is not None:
            scales, factors = (), ()
            for p in tl.static_range(4):
                scale, factor = axis_scale(source_ptr + row0 + r + p, r + p < rows, epsilon, ANY)
                scales, factors = scales + (scale,), factors + (factor,)
            if col0 == 0:
                for p in tl.static_range(4):
                    tl.store(row_scale + row0 + r + p, scales[p], mask=r + p < rows)
        if COLUMN is not None:
            c = 2 * w
            scale_low, f_low = axis_scale(source2_ptr + col0 + c, c < cols, epsilon, ANY)
            scale_high, f_high = axis_scale(source2_ptr + col0 + c + 1, c + 1 < cols, epsilon, ANY)
            if begins:
                tl.store(column_scale + col0 + c, scale_low, mask=c < cols)
                tl.store(column_scale + col0 + c + 1, scale_high, mask=c + 1 < cols)
            column_factors = (f_low, f_high)
    else:
        if SOURCE == TILE:
            scale, factor = fp32_scale(amax, epsilon, ANY)
        else:
            scale, factor = given
        factors, column_factors = (factor, factor, factor, factor), (factor, factor)
        at_row = (row0 // BM) * ((C + BN - 1) // BN) + col0 // BN if SOURCE == TILE else 0
        at_column = (col0 // BN) * ((R + BM - 1) // BM) + row0 // BM if SOURCE == TILE else 0
        # The last program writes the given scale of a gradient: only it knows whether all elements were finite.
        FIRST: tl.constexpr = SOURCE != GIVEN or not ANY.GRADIENT
        if FIRST and ((SOURCE == TILE) | (begins & (col0 == 0))):
            if SOURCE == GIVEN:
                scale = tl.div_rn(1.0, factor)
            if ROW is not None:
                tl.store(row_scale + at_row, scale)
            if COLUMN is not None:
                tl.store(column_scale + at_column, scale)
    if converts_once(ROW, COLUMN, SOURCE, HOW.EVEN, BM):
        row_tile, column_tile = row_out + row0.to(tl.int64) * C + col0, column_out + col0.to(tl.int64) * R + row0
        write_codes_once(row_tile, column_tile, tile, factors[0], R, C, ROW.MB, ROW.BIAS, SOURCE, HOW.HW, BM, BN)
    else:
        if ROW is not None:
            out, generator = row_out + row0.to(tl.int64) * C + col0, (seed_ptr, row_stream, 0)
            for p in tl.static_range(4):
                cast_tile_rows(out, tile[p][1], tile[p][2], factors[p], bounds, generator, p, ROW, HOW)
        if COLUMN is not None:
            out, generator = column_out + col0.to(tl.int64) * R + row0, (seed_ptr, column_stream, 0)
            for second in tl.static_range(2):
                cast_tile_columns(out, tile, column_factors[second], bounds, generator, second, COLUMN, HOW)


@triton.jit
def cast_tile(
    source, outputs, sources, generators, epsilon, bounds, ROW: tl.constexpr, COLUMN: tl.constexpr,
    SOURCE: tl.constexpr, RECORDS: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Load and cast one tile into both operands; returns the bits of its amax (0 unless it is needed)."""
    R, C, row0, col0 = bounds
    given = given_scale(sources[0], epsilon, ROW, COLUMN, SOURCE)
    tile = load_tile(source, R - row0, C - col0, LOAD, 0, HOW)
    amax = tl.zeros([], tl.int32)
    if RECORDS or SOURCE == TILE:
        amax = amax_of_tile(tile, HOW.KIND, HOW.HW)
    write_tile(tile, given, amax, outputs, sources, generators, epsilon, bounds, ROW, COLUMN, SOURCE, HOW)
    return amax


@triton.jit
def record_maximum(
    arrived, record_ptr, scratch_ptr, given, row_scale, column_scale, ROW: tl.constexpr, COLUMN: tl.constexpr,
    HW: tl.constexpr,
):  # fmt: skip
    """Let the last program record the amax; for a gradient it also writes the scale, which depends on the amax."""
    ANY: tl.constexpr = ROW if ROW is not None else COLUMN
    if ANY.GRADIENT:
        if ROW is None:
            row_scale = column_scale
        if COLUMN is None:
            column_scale = row_scale
        scale, programs = tl.div_rn(1.0, given[1]), tl.num_programs(0)
        grid_reduction.publish_scaled_maximum(
            arrived, programs, record_ptr, scratch_ptr, scale, row_scale, column_scale, HW
        )
    else:
        grid_reduction.publish_maximum(arrived, tl.num_programs(0), record_ptr, scratch_ptr, grid_reduction.RECORD, HW)


@triton.jit
def cast_scaled(
    x_ptr, row_out, column_out, row_scale, column_scale, source_ptr, source2_ptr, record_ptr, scratch_ptr,
    seed_ptr, plan_ptr, tails_ptr, row_stream, column_stream, epsilon, EACH, R, C, stride_r, stride_c,
    SOURCE: tl.constexpr, RECORDS: tl.constexpr, GROUPED: tl.constexpr, MATRIX: tl.constexpr,
):  # fmt: skip
    """Cast a matrix, `constants.Pass`, whose casts are `constants.ScaledCast`; one program per BM x BN tile.

    RECORDS is required for gradients with a GIVEN scale. GROUPED: the rows belong to groups, by the plan or in matrices
    of EACH rows, and each group has its own amax and scale (AMAX), or its own amaxes and scales of columns (AXES).
    """
    ROW: tl.constexpr = MATRIX.ROW
    COLUMN: tl.constexpr = MATRIX.COLUMN
    HOW: tl.constexpr = MATRIX.HOW
    HW: tl.constexpr = HOW.HW
    pid, across, source, bounds = tile_of_program(x_ptr, R, C, stride_r, stride_c, HOW, plan_ptr, tails_ptr)
    R, C, row0, col0 = bounds
    known = grid_reduction.peek(scratch_ptr, HW) if RECORDS else 0
    begins = row0 == 0
    if GROUPED:
        group = group_of(row0, R, plan_ptr, EACH)
        begins = begins | (group_of(row0 - 1, R, plan_ptr, EACH) != group)
        if SOURCE == AMAX:
            source_ptr += group
            if ROW is not None:
                row_scale += group
            if COLUMN is not None:
                column_scale += group
        elif COLUMN is not None:
            source2_ptr += group * C
            column_scale += group * C
    given = given_scale(source_ptr, epsilon, ROW, COLUMN, SOURCE)
    tile = load_tile(source, R - row0, C - col0, LOAD, 0, HOW)
    if SOURCE == AMAX:
        if row0.to(tl.int64) * C >= STILL_CACHED:
            prefetch_later(x_ptr, pid, across, R, source.stride_r, HOW, plan_ptr)
    else:
        prefetch_later(x_ptr, pid, across, R, source.stride_r, HOW, plan_ptr)
    amax, arrived = measure_tile(tile, scratch_ptr, known, RECORDS, SOURCE, HOW.KIND, HW)
    outputs, sources = (row_out, column_out, row_scale, column_scale), (source_ptr, source2_ptr)
    generators = (seed_ptr, row_stream, column_stream)
    write_tile(tile, given, amax, outputs, sources, generators, epsilon, bounds, ROW, COLUMN, SOURCE, HOW, begins)
    if RECORDS:
        record_maximum(arrived, record_ptr, scratch_ptr, given, row_scale, column_scale, ROW, COLUMN, HW)


@triton.jit
def cast_rows(
    x_ptr, row_out, row_scale, epsilon, C, stride_r, CAST: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The row operand alone, with a scale for each row: one program measures and casts a row of C <= BLOCK elements.

    Elements come in words of two (KIND); C is a multiple of 16.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK // 2)
    words = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + row * (stride_r // 2) + i, mask=2 * i < C, other=0)
    a, b = tl.split(tl.reshape(words, [BLOCK // 4, 2]))
    a, b, c, d = low_half(a, KIND), high_half(a, KIND), low_half(b, KIND), high_half(b, KIND)
    low, high = tl.maximum(magnitude_bits(a, True), magnitude_bits(b, True)), magnitude_bits(c, True)
    amax = tl.max(tl.maximum(low, tl.maximum(high, magnitude_bits(d, True))), 0)
    scale, factor = fp32_scale(amax, epsilon, CAST)
    tl.store(row_scale + row, scale)
    codes = encode_quad(a * factor, b * factor, c * factor, d * factor, 0, CAST.MB, CAST.BIAS, False, HW)
    i = tl.arange(0, BLOCK // 4)
    tl.store(row_out.to(tl.pointer_type(tl.int32)) + row * (C // 4) + i, codes, mask=4 * i < C)


# One launch updates the slots of all layers, one slot per program (docs/numerics.md 3.3): ``history[0] = live``, the
# amax over the history gives the new encode scale, and the history rolls by one. The addresses of its buffers stand for
# a slot, so layers keep their own tensors.


@triton.jit
def update_delayed(
    addresses_ptr, live_ptr, previous_ptr, element_max_ptr, margin_factor, L, GIVEN: tl.constexpr,
    MOST_RECENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the scale and the history of one slot per program.

    `addresses_ptr`: int64 [slots, 2] of histories and scales. `live_ptr`: float32 [slots] of reduced live amaxes, read
    if GIVEN. `previous_ptr`: float32 [slots], receives the old scales. `margin_factor`: 2^-margin. L: length of a
    history, at most BLOCK.
    """
    slot = tl.program_id(0)
    history_ptr = tl.load(addresses_ptr + 2 * slot).to(tl.pointer_type(tl.float32))
    scale_ptr = tl.load(addresses_ptr + 2 * slot + 1).to(tl.pointer_type(tl.float32))
    live = tl.load(live_ptr + slot) if GIVEN else tl.load(history_ptr)
    element_max = tl.load(element_max_ptr + slot)
    i = tl.arange(0, BLOCK)
    following = tl.load(history_ptr + i + 1, mask=i + 1 < L, other=0.0)
    amax = live if MOST_RECENT else tl.maximum(live, tl.max(following, 0))
    old = tl.load(scale_ptr)
    tl.store(previous_ptr + slot, old)
    # The amax is at least element_max * 2^-126, so that no quotient is subnormal.
    smallest = element_max * 1.1754943508222875e-38
    fresh = tl.div_rn(element_max, tl.maximum(amax, smallest)) * margin_factor
    usable = (amax > 0.0) & (amax < float("inf"))
    tl.store(scale_ptr, tl.where(usable, tl.minimum(fresh, 8.507059173023462e37), old))
    # Every load of the history above must be done before the first store below.
    tl.debug_barrier()
    rolled = tl.where(i == L - 1, live, following)
    tl.store(history_ptr + i, tl.where(i == 0, 0.0, rolled), mask=i < L)


@triton.jit
def gather_live(addresses_ptr, live_ptr, SLOTS, BLOCK: tl.constexpr):
    """``live[slot] = history[slot][0]``, for one all-reduce of all slots; one program for BLOCK slots."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < SLOTS
    history = tl.load(addresses_ptr + 2 * slot, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    tl.store(live_ptr + slot, tl.load(history, mask=inside, other=0.0), mask=inside)
