"""Norms whose input is read once: a cluster of programs holds whole rows (Hopper).

A cluster owns a *band* of BM rows; each of its programs holds some *pieces* of BM x BN elements of it, the first HELD
in registers, the others in shared memory, so that as much as possible is on its way at once. It adds up the squares of
its pieces row by row, gets the sums of the others, and casts what it still holds: two bytes in and two out. Piece j of
program `rank` is piece ``rank + j * CTAS`` of the band; the last may be missing. A lane holds units of 8 neighbours of
ROWS rows, as the casts take them: 4 (`scaled`) or 8 (`squares`). BAND: `constants.Band`.

The programs of a cluster write into each other's shared memory and wait for each other there, which takes a tenth of
the time that words in global memory take. Triton 3.6 compiles such a kernel like any other; what makes it one is how it
is started (`torch.program`). A cluster of one program needs none of that; it is what the interpreter
runs. An *area* of shared memory begins with what every program of the cluster has sent and what all threads of the
program shall read, in each of one or two rounds; behind it lie pieces and weights (PTX ISA: mapa, st.shared::cluster,
barrier.cluster, cp.async).

For bfloat16 in whole pieces; `fused` serves what is not.
"""

import triton
import triton.language as tl

from microfloat.kernels.casts.scaled import (
    amax_of_tile,
    given_scale,
    local_rows,
    local_words,
    words_amax_bits,
    write_tile,
)
from microfloat.kernels.device.convert import WORDS_BF16, float_of, high_half, low_half, packed_abs, packed_max
from microfloat.kernels.device.meeting import RECORD, arrive, offer_maximum, peek, publish_maximum
from microfloat.kernels.device.produce import LAYER_NORM, normalized
from microfloat.kernels.device.squares import cast_squares, square_places
from microfloat.kernels.device.tiles import Bounds


@triton.constexpr_function
def _area_text(size, ctas):
    arrive = "barrier.cluster.arrive.relaxed.aligned; " if ctas > 1 else ""
    return f"{{ .shared .align 16 .b8 area[{size}]; {arrive}mov.u32 $0, area; }}"


@triton.constexpr_function
def exchange_bytes(rounds, ctas, rows):
    """The bytes of an area that the sums of so many rows take."""
    return rounds * (ctas + 1) * rows * 4


@triton.jit
def area_of(pid, SIZE: tl.constexpr, CTAS: tl.constexpr, HW: tl.constexpr):
    """The address of SIZE bytes, `exchange_bytes` and what else is wanted; once in a program, first of all."""
    if HW:
        TEXT: tl.constexpr = _area_text(SIZE, CTAS)
        return tl.inline_asm_elementwise(TEXT, "=r,r", [pid], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return 0


@triton.jit
def others_have_started(pid, CTAS: tl.constexpr):
    """Wait for the other programs of the cluster: before anything is sent to them."""
    if CTAS > 1:
        tl.inline_asm_elementwise(
            "barrier.cluster.wait.acquire.aligned; mov.b32 $0, 0;", "=r,r", [pid], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def cluster_sum(sums, area, rank, ROUND: tl.constexpr, CTAS: tl.constexpr):
    """[BM] sums of this program -> those of the cluster, added up in the order of its programs."""
    if CTAS == 1:
        return sums
    else:
        BM: tl.constexpr = sums.shape[0]
        row = tl.arange(0, BM)
        area = area + ROUND * (CTAS + 1) * BM * 4
        tl.inline_asm_elementwise(
            "{ .reg .b32 there; mapa.shared::cluster.u32 there, $2, $1; st.shared::cluster.f32 [there], $3; "
            "mov.b32 $0, 0; }",
            "=r,r,r,r", [tl.arange(0, CTAS)[:, None], area + (rank * BM + row[None, :]) * 4, sums[None, :]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        area += tl.inline_asm_elementwise(
            "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.b32 $0, 0;",
            "=r,r", [area], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        total = tl.zeros([BM], tl.float32)
        for cta in tl.static_range(CTAS):
            total += tl.inline_asm_elementwise(
                "ld.shared.f32 $0, [$1];", "=r,r", [area + (cta * BM + row) * 4], dtype=tl.float32, is_pure=False,
                pack=1,
            )  # fmt: skip
        return total


@triton.jit
def for_all_threads(
    values, memory, area, r, COUNT: tl.constexpr, ROUND: tl.constexpr, CTAS: tl.constexpr, HW: tl.constexpr
):
    """[BM] values of rows -> a tuple of those of rows r, r + 1, ..., COUNT of them, a multiple of 4, as is r.

    `memory`: where they lie in global memory too, for the interpreter.
    """
    BM: tl.constexpr = values.shape[0]
    row = tl.arange(0, BM)
    spread = ()
    if HW:
        area = area + (ROUND * (CTAS + 1) + CTAS) * BM * 4
        tl.inline_asm_elementwise(
            "st.shared.f32 [$1], $2; mov.b32 $0, 0;", "=r,r,r", [area + row * 4, values], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        area += tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, 0;", "=r,r", [area], dtype=tl.int32, is_pure=False, pack=1
        )
        for p in tl.static_range(0, COUNT, 4):  # pure: computed in the layout that it is wanted in
            a, b, c, d = tl.inline_asm_elementwise(
                "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [area + (r + p) * 4],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
            spread = spread + (a, b, c, d)
    else:
        tl.debug_barrier()
        for p in tl.static_range(COUNT):
            spread = spread + (tl.load(memory + r + p),)
    return spread


# ----------------------------------------------------------------------------------------------- the rest of an area


@triton.jit
def copy_units(at, source, there, MAY_MISS: tl.constexpr):
    """Units of 16 bytes on their way to shared memory; zeros where they are not `there`."""
    size = tl.where(there, 16, 0) if MAY_MISS else 16
    tl.inline_asm_elementwise(
        "cp.async.cg.shared.global [$1], [$2], 16, $3; mov.b32 $0, 0;", "=r,r,l,r", [at, source.to(tl.int64), size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_for_copies(pid):
    """Wait for the copies of all threads of the program."""
    tl.inline_asm_elementwise(
        "cp.async.wait_all; bar.sync 0; mov.b32 $0, 0;", "=r,r", [pid], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def take_words(at):
    """The four words of a unit. `at` [..., 4]: its address, four times, in a layout that gives all four to one thread.

    Nothing but `at` decides that layout: it must come from a load of words (`zeros_like`).
    """
    return tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,r,r,r", [at], dtype=tl.int32, is_pure=False, pack=4
    )


@triton.jit
def zeros_like(words, HW: tl.constexpr):
    """Zeros in the layout of loaded words, which the compiler takes for any number."""
    if HW:
        return tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return words & 0


# The use of a word: its values, their squares or their squared distances from the mean are added up, or cast.
VALUES = tl.constexpr(0)
SQUARES = tl.constexpr(1)
DEVIATIONS = tl.constexpr(2)
CAST = tl.constexpr(3)


@triton.constexpr_function
def _move_text(use):
    return f"mov.b32 $0, $1; // {use}"


@triton.jit
def afresh(word, USE: tl.constexpr, HW: tl.constexpr):
    """The same word. What was computed from it for another USE is computed again, and need not be kept."""
    if HW:
        TEXT: tl.constexpr = _move_text(USE)
        return tl.inline_asm_elementwise(TEXT, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return word


@triton.jit
def pair_of(word):
    """A word and its two elements."""
    return word, low_half(word, WORDS_BF16), high_half(word, WORDS_BF16)


@triton.jit
def load_words(at, there, MAY_MISS: tl.constexpr):
    """Words of a piece, zeros where it is not `there`."""
    if MAY_MISS:
        return tl.load(at, mask=tl.broadcast_to(there, at.shape), other=0)
    else:
        return tl.load(at)


# ----------------------------------------------------------------------------------------------------------- places


@triton.jit
def unit_places(ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """First row and column of every unit of a piece, in the order in which they lie in shared memory."""
    unit = tl.arange(0, BM * BN // (8 * ROWS))
    if ROWS == 4:
        return unit // (BN // 8) * 4, unit % (BN // 8) * 8
    else:
        square = unit // 32
        return square // (BN // 64) * 32 + unit // 8 % 4 * 8, square % (BN // 64) * 64 + unit % 8 * 8


@triton.jit
def lane_places(ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """First local row and words of every lane, the number of its unit, and of the unit of its columns' weights."""
    if ROWS == 4:
        r, w = local_rows(BM), local_words(BN)
        unit_of_row = w // 4
        return r, w, r // 4 * (BN // 8) + unit_of_row, unit_of_row
    else:
        r, w = square_places(BM, BN)
        square = tl.arange(0, BM * BN // 2048)[None, None, :, None]
        lane, below = tl.arange(0, 8)[:, None, None, None], tl.arange(0, 4)[None, :, None, None]
        words = w + tl.arange(0, 4)[None, None, None, :]
        return r, words, square * 32 + below * 8 + lane, square % (BN // 64) * 8 + lane


# ---------------------------------------------------------------------------------------------------- pieces of rows


@triton.jit
def load_band(
    x_band, weight, area, r, w, rank, there, stride_r, BAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Words of the pieces held in registers; the others and all weights but those of the first on their way.

    `area`: where they go. In order: ROWS rows from r on of the first piece, then those of the next. `w`: words of rows.
    """
    ROWS: tl.constexpr = BAND.ROWS
    PIECES: tl.constexpr = BAND.PIECES
    HELD: tl.constexpr = BAND.HELD
    MISSING: tl.constexpr = BAND.MISSING
    PIECE: tl.constexpr = BM * BN * 2
    words = ()
    row, column = unit_places(ROWS, BM, BN)
    unit, columns = tl.arange(0, BM * BN // (8 * ROWS)), tl.arange(0, BN // 8)
    for j in tl.static_range(PIECES):
        first = (rank + j * BAND.CTAS) * BN
        if j < HELD:
            at = x_band.to(tl.pointer_type(tl.int32)) + first // 2
            for p in tl.static_range(ROWS):
                word = load_words(at + ((r + p) * (stride_r // 2) + w), there, MISSING and j == PIECES - 1)
                words = words + (word,)
        else:
            for p in tl.static_range(ROWS):
                at = area + (j - HELD) * PIECE + p * (PIECE // ROWS) + unit * 16
                source = x_band + first + ((row + p) * stride_r + column)
                copy_units(at, source, there, MISSING and j == PIECES - 1)
        if HELD < PIECES and j > 0:
            at = area + (PIECES - HELD) * PIECE + j * (BN * 2) + columns * 16
            copy_units(at, weight + first + columns * 8, there, MISSING and j == PIECES - 1)
    return words


@triton.jit
def word_of(words, units, j: tl.constexpr, p: tl.constexpr, USE: tl.constexpr, BAND: tl.constexpr, HOW: tl.constexpr):
    """Words of rows r + p of piece j. `units`: the addresses of the first units of pieces in shared memory."""
    ROWS: tl.constexpr = BAND.ROWS
    if j < BAND.HELD:
        return afresh(words[ROWS * j + p], USE, HOW.HW)
    else:
        return take_words(units + ((j - BAND.HELD) * ROWS + p) * (HOW.BM * HOW.BN * 2 // ROWS))


@triton.jit
def term(word, shift, there, USE: tl.constexpr, MAY_MISS: tl.constexpr):
    """The terms that words add to the sums of their rows."""
    low, high = low_half(word, WORDS_BF16), high_half(word, WORDS_BF16)
    if USE == VALUES:
        return low + high
    else:
        if USE == DEVIATIONS:
            low, high = low - shift, high - shift
            if MAY_MISS:
                low, high = tl.where(there, low, 0.0), tl.where(there, high, 0.0)
        return tl.fma(low, low, high * high)


@triton.jit
def row_sums(words, units, zeros, shifts, there, USE: tl.constexpr, BAND: tl.constexpr, HOW: tl.constexpr):
    """[BM] sums over this program's pieces."""
    ROWS: tl.constexpr = BAND.ROWS
    PIECES: tl.constexpr = BAND.PIECES
    BM: tl.constexpr = HOW.BM
    LAST: tl.constexpr = len(zeros.shape) - 1
    sums = ()
    for p in tl.static_range(ROWS):
        shift = shifts[p] if USE == DEVIATIONS else 0.0
        total = float_of(zeros)
        for j in tl.static_range(PIECES):
            word = word_of(words, units, j, p, USE, BAND, HOW)
            total += term(word, shift, there, USE, BAND.MISSING and j == PIECES - 1)
        sums = sums + (tl.sum(total, LAST),)
    if ROWS == 4:
        both = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
        return tl.reshape(tl.sum(both, 0), [BM])  # [lanes, rows by four, 2, 2]
    else:
        even = tl.join(tl.join(sums[0], sums[4]), tl.join(sums[2], sums[6]))
        odd = tl.join(tl.join(sums[1], sums[5]), tl.join(sums[3], sums[7]))
        both = tl.sum(tl.join(even, odd), 0)  # [8 lanes, 4, squares, 2, 2, 2]
        both = tl.sum(tl.reshape(both, [4, BM // 32, HOW.BN // 64, 8]), 2)
        return tl.reshape(tl.permute(both, [1, 0, 2]), [BM])


@triton.jit
def band_statistics(
    words, units, zeros, outputs, area, rank, there, r, eps, C, LAYER: tl.constexpr, BAND: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """(shift, scale) of rows r, r + 1, ..., as tuples of ROWS tensors; written to `outputs`, means and inverses of the
    band, by the first program of the cluster.
    """
    CTAS: tl.constexpr = BAND.CTAS
    mean_band, inverse_band = outputs
    row = tl.arange(0, HOW.BM)
    shifts = ()
    if LAYER:
        sums = row_sums(words, units, zeros, shifts, there, VALUES, BAND, HOW)
        mean = cluster_sum(sums, area, rank, 0, CTAS) / C
        tl.store(mean_band + row, mean, mask=(row >= 0) & (rank == 0))
        shifts = for_all_threads(mean, mean_band, area, r, BAND.ROWS, 0, CTAS, HOW.HW)
    USE: tl.constexpr = DEVIATIONS if LAYER else SQUARES
    ROUND: tl.constexpr = 1 if LAYER else 0
    sums = row_sums(words, units, zeros, shifts, there, USE, BAND, HOW)
    inverse = 1.0 / tl.sqrt_rn(cluster_sum(sums, area, rank, ROUND, CTAS) / C + eps)
    tl.store(inverse_band + row, inverse, mask=(row >= 0) & (rank == 0))
    scales = for_all_threads(inverse, inverse_band, area, r, BAND.ROWS, ROUND, CTAS, HOW.HW)
    if LAYER:
        return shifts, scales
    else:
        return scales, scales


@triton.jit
def piece_parameters(
    first_weights, weight_units, weight_words, bias_words, j: tl.constexpr, there, LAYER: tl.constexpr,
    BAND: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Weights and biases of piece j as `normalized` takes them. `..._words`: pointers to those of the piece."""
    MAY_MISS: tl.constexpr = BAND.MISSING and j == BAND.PIECES - 1
    if j == 0:
        weights = afresh(first_weights, CAST, HOW.HW)
    elif BAND.HELD < BAND.PIECES:
        weights = take_words(weight_units + j * (HOW.BN * 2))
    else:
        weights = load_words(weight_words, there, MAY_MISS)
    w_low, w_high = low_half(weights, WORDS_BF16), high_half(weights, WORDS_BF16)
    if LAYER:
        biases = load_words(bias_words, there, MAY_MISS)
        return w_low, w_high, low_half(biases, WORDS_BF16), high_half(biases, WORDS_BF16)
    else:
        return w_low, w_high, w_low, w_high


@triton.jit
def largest_words(top, a, b, c, d):
    """Halfwise maximum of words of magnitudes and of the magnitudes of four more, NaN ignored."""
    m = packed_max(packed_abs(a, WORDS_BF16), packed_abs(b, WORDS_BF16), WORDS_BF16, True)
    n = packed_max(packed_abs(c, WORDS_BF16), packed_abs(d, WORDS_BF16), WORDS_BF16, True)
    return packed_max(top, packed_max(m, n, WORDS_BF16, True), WORDS_BF16, True)


# ------------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def norm_pieces(
    x_ptr, mean, inverse, weight, bias, row_out, row_scale, column_out, column_scale, source, record, scratch_ptr,
    seed_ptr, row_stream, column_stream, eps, R, C, stride_r, ROW: tl.constexpr, COLUMN: tl.constexpr,
    SOURCE: tl.constexpr, RECORDS: tl.constexpr, PRODUCER: tl.constexpr, BAND: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """A norm to FP8 codes per tensor (ROWS = 4), or to MX codes of both operands by squares (8: `squares.takes`)."""
    ROWS: tl.constexpr = BAND.ROWS
    CTAS: tl.constexpr = BAND.CTAS
    PIECES: tl.constexpr = BAND.PIECES
    HELD: tl.constexpr = BAND.HELD
    HW: tl.constexpr = HOW.HW
    BM: tl.constexpr = HOW.BM
    BN: tl.constexpr = HOW.BN
    LAYER: tl.constexpr = PRODUCER == LAYER_NORM
    DATA: tl.constexpr = (PIECES - HELD) * BM * BN * 2
    WEIGHTS: tl.constexpr = PIECES * BN * 2 if HELD < PIECES else 0
    EXCHANGE: tl.constexpr = exchange_bytes(2 if LAYER else 1, CTAS, BM)
    pid = tl.program_id(0)
    area = area_of(pid, EXCHANGE + DATA + WEIGHTS, CTAS, HW)
    rank, row0 = pid % CTAS, pid // CTAS * BM
    there = (rank + (PIECES - 1) * CTAS) * BN < C
    known = 0
    if RECORDS:
        known = peek(scratch_ptr, HW)
    if ROWS == 4:
        given = given_scale(source, 0.0, ROW, COLUMN, SOURCE)
    r, w, unit, weight_unit = lane_places(ROWS, BM, BN)
    x_band = x_ptr + row0.to(tl.int64) * stride_r
    words = load_band(x_band, weight, area + EXCHANGE, r, w, rank, there, stride_r, BAND, BM, BN)
    # In the shape of a piece's words, so that a lane has the weights of its own columns.
    places = rank * (BN // 2) + (r * 0 + w)
    weight_words = weight.to(tl.pointer_type(tl.int32)) + places
    bias_words = weight_words
    if LAYER:
        bias_words = bias.to(tl.pointer_type(tl.int32)) + places
    first_weights = tl.load(weight_words)
    zeros = zeros_like(first_weights, HW)
    units = zeros + unit * 16 + (area + EXCHANGE)
    weight_units = zeros + weight_unit * 16 + (area + EXCHANGE + DATA)
    others_have_started(pid, CTAS)
    if HELD < PIECES:
        wait_for_copies(pid)
    statistics = (mean + row0 if LAYER else inverse, inverse + row0)
    shifts, scales = band_statistics(words, units, zeros, statistics, area, rank, there, r, eps, C, LAYER, BAND, HOW)
    top, amax, arrived = zeros, tl.zeros([], tl.int32), 0
    for j in tl.static_range(PIECES):
        col0 = (rank + j * CTAS) * BN
        parameters = piece_parameters(
            first_weights, weight_units, weight_words + j * CTAS * (BN // 2), bias_words + j * CTAS * (BN // 2), j,
            there, LAYER, BAND, HOW,
        )  # fmt: skip
        made = ()
        for p in tl.static_range(ROWS):
            values = pair_of(word_of(words, units, j, p, CAST, BAND, HOW))
            word, _low, _high = normalized(
                values, (shifts[p], scales[p]), parameters, r >= 0, tl.bfloat16, PRODUCER, HW
            )
            made = made + (word,)
        if ROWS == 4:
            tile = (pair_of(made[0]), pair_of(made[1]), pair_of(made[2]), pair_of(made[3]))
            if RECORDS:
                if HW:
                    top = largest_words(top, made[0], made[1], made[2], made[3])
                else:
                    amax = tl.maximum(amax, amax_of_tile(tile, WORDS_BF16, HW))
                if j == PIECES - 1:
                    if HW:
                        amax = words_amax_bits(top, WORDS_BF16)
                    offer_maximum(amax, known, scratch_ptr, HW)
                    arrived = arrive(scratch_ptr + 1, HW)
        if not BAND.MISSING or j < PIECES - 1 or there:
            if ROWS == 4:
                outputs = (row_out, column_out, row_scale, column_scale)
                generators, bounds = (seed_ptr, row_stream, column_stream), Bounds(R, C, row0, col0)
                write_tile(
                    tile, given, amax, outputs, (source, source), generators, 0.0, bounds, ROW, COLUMN, SOURCE, HOW
                )
            else:
                square_rows, square_words = square_places(BM, BN)
                squares, outputs = (square_rows, square_words, made), (row_out, row_scale, column_out, column_scale)
                cast_squares(squares, outputs, Bounds(R, C, row0, col0), ROW, COLUMN, HOW)
    if RECORDS:
        publish_maximum(arrived, tl.num_programs(0), record, scratch_ptr, RECORD, HW)
