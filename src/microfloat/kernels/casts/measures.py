"""Sums over whole tensors, over rows of an operand and what a cast made of them, and over a product, for `watch`.

Elements are summed in float64 and in a fixed order; counts are integers, exact in any order. `measure_tiles` reads the
elements of a cast, a tile to a program, and leaves the sums of each tile. `gather_sums` adds those of many casts up in
one launch, and sorts elements, scales and spans of blocks by magnitude, for which the largest one has to be known. The
sums are defined by `microfloat.torch.measuring`, which does the same with torch operations.
"""

import triton
import triton.language as tl

from microfloat.kernels.casts.dequantize import scale_value
from microfloat.kernels.device.convert import bits_of, decode, drop_nan, element_bits, round_bf16
from microfloat.kernels.device.tiles import program, tile_at, tiles_of

# The programs of `gather_sums` for each cast, without those of its spans and with them; the words by which it finds a
# cast; and the sums of a tile: x^2, (x - q)^2, x q; the counts of finite elements, of flushed ones, of zeros and of
# clipped ones; the peak.
GATHERERS = tl.constexpr(16)
PROGRAMS = tl.constexpr(18)
ROW = tl.constexpr(14)
SUMS = tl.constexpr(8)
# Behind the sums in the result: scales at the lowest and the highest limit (of float32), scales of each byte, x^2 and
# (x - q)^2 by binades below the peak; the number of blocks, and of the ratios of their largest to their smallest
# magnitude those beside the quantiles 0.5 and 0.99, and the largest.
AT_LIMITS = tl.constexpr(8)
COUNTS = tl.constexpr(10)
SCALES = tl.constexpr(256)
BINADES = tl.constexpr(32)
SPANS = tl.constexpr(10 + 256 + 2 * 32)
NUMBERS = tl.constexpr(10 + 256 + 2 * 32 + 6)


@triton.jit
def total(values):
    """The sum of a tile."""
    return tl.sum(tl.sum(values, 1), 0)


@triton.jit
def magnitudes(
    x_ptr, piece, N, C, stride_r, stride_c, FLAT: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Bits of the magnitudes of one block as float32; of one that is not `WHOLE`, zeros beyond the last element."""
    lanes = tl.arange(0, BLOCK)
    first = piece.to(tl.int64) * BLOCK
    if FLAT:
        at = x_ptr + first + lanes
    else:
        index = first + lanes
        row = index // C
        at = x_ptr + row * stride_r + (index - row * C) * stride_c
    if WHOLE:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=lanes < N - first, other=0.0)
    return bits_of(x.to(tl.float32)) & 0x7FFFFFFF


@triton.jit
def count_block(bits, largest, nans, infinities):
    """The three counts of `count_whole`, lane by lane, with one block more."""
    nans += (bits > 0x7F800000).to(tl.int32)
    infinities += (bits == 0x7F800000).to(tl.int32)
    return tl.maximum(largest, drop_nan(bits)), nans, infinities


@triton.jit
def count_whole(x_ptr, out_ptr, N, C, stride_r, stride_c, FLAT: tl.constexpr, BLOCK: tl.constexpr):
    """int64 [3], cleared before: bits of the float32 amax, NaN ignored; the counts of NaN and of infinity.

    N elements without gaps (`FLAT`), or in rows of C of any strides. Any number of programs, which take blocks in turn.
    Each looks for its largest magnitude, and counts only if that is no finite number.
    """
    whole = N // BLOCK
    largest = tl.zeros([BLOCK], tl.int32)
    piece = tl.program_id(0)
    while piece < whole:
        bits = magnitudes(x_ptr, piece, N, C, stride_r, stride_c, FLAT, True, BLOCK)
        largest = tl.maximum(largest, bits)
        piece += tl.num_programs(0)
    if piece == whole:
        bits = magnitudes(x_ptr, piece, N, C, stride_r, stride_c, FLAT, False, BLOCK)
        largest = tl.maximum(largest, bits)
    top = tl.max(largest, 0)
    if top < 0x7F800000:
        tl.atomic_max(out_ptr, top.to(tl.int64))
    else:
        largest = tl.zeros([BLOCK], tl.int32)
        nans, infinities = largest, largest
        piece = tl.program_id(0)
        while piece < whole:
            bits = magnitudes(x_ptr, piece, N, C, stride_r, stride_c, FLAT, True, BLOCK)
            largest, nans, infinities = count_block(bits, largest, nans, infinities)
            piece += tl.num_programs(0)
        if piece == whole:
            bits = magnitudes(x_ptr, piece, N, C, stride_r, stride_c, FLAT, False, BLOCK)
            largest, nans, infinities = count_block(bits, largest, nans, infinities)
        tl.atomic_max(out_ptr, tl.max(largest, 0).to(tl.int64))
        tl.atomic_add(out_ptr + 1, tl.sum(nans, 0).to(tl.int64))
        tl.atomic_add(out_ptr + 2, tl.sum(infinities, 0).to(tl.int64))


@triton.jit
def butterfly(x, DISTANCE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Every pair of columns (i, i + DISTANCE) becomes (sum, difference)."""
    pairs = tl.permute(tl.reshape(x, [BM * BN // (2 * DISTANCE), 2, DISTANCE]), [0, 2, 1])
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 2, 1]), [BM, BN])


@triton.jit
def butterflies(x, BM: tl.constexpr, BN: tl.constexpr):
    """Distances 1, 2, 4, 8 in groups of 16 columns, float32."""
    for step in tl.static_range(4):
        x = butterfly(x, 1 << step, BM, BN)
    return x


@triton.jit(do_not_specialize=("scale_stride_r", "scale_stride_k", "tensor_scale_stride", "every"))
def measure_tiles(
    x_ptr, codes_ptr, scale_ptr, tensor_scale_ptr, partials_ptr, sample_ptr, spans_ptr, R, C, stride_r, stride_c,
    scale_stride_r, scale_stride_k, tensor_scale_stride, every, CODES: tl.constexpr, SIGNS: tl.constexpr,
    SPAN: tl.constexpr, INDEX64: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The sums of one tile of x [R, C] and of its codes; one program per tile.

    `partials_ptr`: float64 [SUMS, programs]. `sample_ptr`: float32 [2, elements], x and its value of each `every`-th
    element of the flat operand. `spans_ptr`: float32 [2, R, blocks], the largest and the smallest magnitude of blocks
    of SPAN elements, zeros and what is not finite left out: 0 and inf where nothing remains. CODES: `MeasuredCodes`, or
    None, without a cast. SIGNS: of the Hadamard transform that the codes are under, -1 without one.
    """
    pid, R, C, stride_r, stride_c = program(R, C, stride_r, stride_c, INDEX64)
    across, tiles = tiles_of(R, C, BM, BN)
    row0, col0, x_tile = tile_at(x_ptr, pid, across, stride_r, stride_c, BM, BN)
    r, c = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    inside = (r < R - row0) & (c < C - col0)
    x = tl.load(x_tile + r * stride_r + c * stride_c, mask=inside, other=0.0).to(tl.float32)
    finite = inside & ((bits_of(x) & 0x7F800000) != 0x7F800000)
    x_finite = tl.where(finite, x, 0.0)
    magnitude = tl.abs(x_finite)

    blocks = (C + SPAN - 1) // SPAN
    spanned = tl.reshape(magnitude, [BM, BN // SPAN, SPAN])
    largest = tl.max(spanned, 2)
    smallest = tl.min(tl.where(spanned == 0, float("inf"), spanned), 2)
    block = col0 // SPAN + tl.arange(0, BN // SPAN)[None, :]
    at = spans_ptr + (row0 + r) * blocks + block
    tl.store(at, largest, mask=(r < R - row0) & (block < blocks))
    tl.store(at + R * blocks, smallest, mask=(r < R - row0) & (block < blocks))

    a = x_finite.to(tl.float64)
    out = partials_ptr + pid
    tl.store(out, total(a * a))
    tl.store(out + 3 * tiles, total(finite.to(tl.int32)).to(tl.float64))
    tl.store(out + 7 * tiles, tl.max(tl.max(magnitude, 1), 0).to(tl.float64))
    if CODES is None:
        for index in tl.static_range(SUMS):
            if index != 0 and index != 3 and index != 7:
                tl.store(out + index * tiles, tl.full([], 0, tl.float64))
    else:
        stored = (C + 15) // 16 * 16 if SIGNS >= 0 else C
        coded = (r < R - row0) & (c < stored - col0)
        PER_BYTE: tl.constexpr = 2 if element_bits(CODES.MB, CODES.BIAS) == 4 else 1
        length = (stored + PER_BYTE - 1) // PER_BYTE
        at = codes_ptr + row0.to(tl.int64) * length + col0 // PER_BYTE + (r * length + c // PER_BYTE)
        code = tl.load(at, mask=coded, other=0).to(tl.int32) & 0xFF
        if PER_BYTE == 2:
            code = (code >> (4 * (c & 1))) & 15
        # Where all columns share one scale, its stride is 0.
        at = scale_ptr + ((row0 + r) // CODES.HEIGHT).to(tl.int64) * scale_stride_r
        at += ((col0 + c) // CODES.WIDTH).to(tl.int64) * scale_stride_k
        scale = scale_value(tl.load(at, mask=coded, other=0), CODES.SCALE)
        if CODES.LEVELS == 2:
            scale = scale * tl.load(tensor_scale_ptr + (row0 + r) * tensor_scale_stride, mask=coded, other=0.0)
        value = decode(code, CODES.MB, CODES.BIAS) * scale
        limited = x
        if SIGNS >= 0:
            signs = tl.where(((SIGNS >> (c & 15)) & 1) == 1, -1.0, 1.0)
            value = tl.where(coded, value, 0.0)
            value = butterflies(value, BM, BN) * 0.25 * signs
            limited = round_bf16(butterflies(round_bf16(x, False) * signs, BM, BN) * 0.25, False)
        counted = coded & ((bits_of(limited) & 0x7F800000) != 0x7F800000)
        clipped = counted & (tl.abs(limited) > CODES.MAX * scale)
        value = tl.where(finite, value, 0.0)
        b = value.to(tl.float64)
        error = a - b
        tl.store(out + tiles, total(error * error))
        tl.store(out + 2 * tiles, total(a * b))
        is_zero = finite & (value == 0)
        tl.store(out + 4 * tiles, total((is_zero & (x_finite != 0)).to(tl.int32)).to(tl.float64))
        tl.store(out + 5 * tiles, total(is_zero.to(tl.int32)).to(tl.float64))
        tl.store(out + 6 * tiles, total(clipped.to(tl.int32)).to(tl.float64))
        index = (row0 + r) * C + (col0 + c)
        taken = inside & (index % every == 0)
        at = sample_ptr + index // every
        tl.store(at, x_finite, mask=taken)
        tl.store(at + (R * C + every - 1) // every, value, mask=taken)


@triton.jit
def exponent_and_mantissa(magnitude):
    """The stored exponent and mantissa of a float64 >= 0, as int64."""
    bits = magnitude.to(tl.int64, bitcast=True)
    return bits >> 52, bits & 0xFFFFFFFFFFFFF


@triton.jit
def gather_binades(sample_ptr, out_ptr, sampled, peak, number, BLOCK: tl.constexpr):
    """Sums of x^2, and BINADES later of (x - q)^2, of the sample in two binades: those of this number.

    Binade k: magnitudes in (peak / 2^(k + 1), peak / 2^k].
    """
    lanes, mine = tl.arange(0, BLOCK), 2 * number
    exponent, mantissa = exponent_and_mantissa(peak)
    signal, noise = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    signal_after, noise_after = signal, noise
    first = 0
    while first < sampled:
        inside = lanes < sampled - first
        a = tl.load(sample_ptr + first + lanes, mask=inside, other=0.0).to(tl.float64)
        error = a - tl.load(sample_ptr + sampled + first + lanes, mask=inside, other=0.0).to(tl.float64)
        a_exponent, a_mantissa = exponent_and_mantissa(tl.abs(a))
        binade = tl.where(a == 0, -1, exponent - a_exponent - (a_mantissa > mantissa).to(tl.int64))
        signal += tl.where(binade == mine, a * a, 0.0)
        noise += tl.where(binade == mine, error * error, 0.0)
        signal_after += tl.where(binade == mine + 1, a * a, 0.0)
        noise_after += tl.where(binade == mine + 1, error * error, 0.0)
        first += BLOCK
    tl.store(out_ptr + mine, tl.sum(signal, 0))
    tl.store(out_ptr + mine + 1, tl.sum(signal_after, 0))
    tl.store(out_ptr + BINADES + mine, tl.sum(noise, 0))
    tl.store(out_ptr + BINADES + mine + 1, tl.sum(noise_after, 0))


@triton.jit
def count_scales(
    scale_ptr, out_ptr, scales, across, stride_r, stride_k, number, IS_FLOAT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add the scales of this number: two counts of those at the limits (of float32), then those of each byte (of
    float32 the byte of the exponent). All are whole numbers, whose sum is exact whichever program comes first.
    """
    lanes = tl.arange(0, BLOCK)
    first = number * BLOCK
    counts = tl.zeros([SCALES], tl.int32)
    lowest, highest = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    while first < scales:
        index = first + lanes
        inside = index < scales
        row = index // across
        at = scale_ptr + row.to(tl.int64) * stride_r + (index - row * across).to(tl.int64) * stride_k
        scale = tl.load(at, mask=inside, other=0)
        if IS_FLOAT:
            lowest += (inside & (scale <= 2.0**-126) & (scale != 0)).to(tl.int32)
            highest += (scale >= 2.0**126).to(tl.int32)
            code = bits_of(scale) >> 23
        else:
            code = scale.to(tl.int32) & 0xFF
        counted = inside & (code >= 0) & (code < SCALES)
        counts += tl.histogram(tl.where(counted, code, 0), SCALES)
        others = BLOCK - tl.sum(counted.to(tl.int32), 0)
        counts -= tl.where(tl.arange(0, SCALES) == 0, others, 0)
        first += GATHERERS * BLOCK
    tl.atomic_add(out_ptr + 2 + tl.arange(0, SCALES), counts.to(tl.float64), mask=counts != 0)
    if IS_FLOAT:
        tl.atomic_add(out_ptr, tl.sum(lowest, 0).to(tl.float64))
        tl.atomic_add(out_ptr + 1, tl.sum(highest, 0).to(tl.float64))


@triton.jit
def ratios(spans_ptr, first, blocks, pieces, BLOCK: tl.constexpr):
    """int64 [BLOCK]: bits of the float64 ratio of the largest to the smallest magnitude, which order them; -1 for a
    block without a number and beyond the last.

    `spans_ptr`: float32 [2, blocks, pieces], as `measure_tiles` leaves them.
    """
    index = first + tl.arange(0, BLOCK)
    inside = index < blocks
    largest = tl.zeros([BLOCK], tl.float32)
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    piece = 0
    while piece < pieces:
        at = spans_ptr + index * pieces + piece
        largest = tl.maximum(largest, tl.load(at, mask=inside, other=0.0))
        smallest = tl.minimum(smallest, tl.load(at + blocks * pieces, mask=inside, other=float("inf")))
        piece += 1
    ratio = largest.to(tl.float64) / smallest.to(tl.float64)
    return tl.where(largest > 0, ratio.to(tl.int64, bitcast=True), -1)


@triton.jit
def select_ratio(spans_ptr, blocks, pieces, rank, BLOCK: tl.constexpr):
    """The bits of the ratio of a rank, counted from 0, and of the one after it; the last has itself after it.

    Found byte by byte, from the highest: how many ratios have the bytes so far and each value of the next one.
    """
    digits = tl.arange(0, 256)
    found = rank * 0
    equal = found
    shift = 56
    while shift >= 0:
        counts = tl.zeros([256], tl.int32)
        first = 0
        while first < blocks:
            bits = ratios(spans_ptr, first, blocks, pieces, BLOCK)
            alike = (bits >= 0) & ((bits >> shift >> 8) == found)
            digit = ((bits >> shift) & 255).to(tl.int32)
            counts += tl.histogram(tl.where(alike, digit, 0), 256)
            counts -= tl.where(digits == 0, BLOCK - tl.sum(alike.to(tl.int32), 0), 0)
            first += BLOCK
        before = tl.cumsum(counts, 0) <= rank
        digit = tl.sum(before.to(tl.int32), 0)
        rank -= tl.sum(tl.where(before, counts, 0), 0)
        equal = tl.sum(tl.where(digits == digit, counts, 0), 0).to(tl.int64)
        found = (found << 8) | digit
        shift -= 8
    after = found
    if rank + 1 >= equal:
        smallest = tl.full([BLOCK], 0x7FFFFFFFFFFFFFFF, tl.int64)
        first = 0
        while first < blocks:
            bits = ratios(spans_ptr, first, blocks, pieces, BLOCK)
            smallest = tl.where(bits > found, tl.minimum(smallest, bits), smallest)
            first += BLOCK
        least = tl.min(smallest, 0)
        after = tl.where(least == 0x7FFFFFFFFFFFFFFF, found, least)
    return found, after


@triton.jit
def gather_spans(spans_ptr, out_ptr, blocks, pieces, IS_MEDIAN: tl.constexpr, BLOCK: tl.constexpr):
    """The ratios beside one quantile of those of all blocks that have numbers; with the median their count and the
    largest.
    """
    counted, largest = tl.zeros([BLOCK], tl.int64), tl.full([BLOCK], -1, tl.int64)
    first = 0
    while first < blocks:
        bits = ratios(spans_ptr, first, blocks, pieces, BLOCK)
        counted += (bits >= 0).to(tl.int64)
        largest = tl.maximum(largest, bits)
        first += BLOCK
    count, top = tl.sum(counted, 0), tl.max(largest, 0)
    if count > 0:
        quantile = tl.full([], 0.5 if IS_MEDIAN else 0.99, tl.float64)
        rank = (quantile * (count - 1).to(tl.float64)).to(tl.int64)
        low, high = select_ratio(spans_ptr, blocks, pieces, rank, BLOCK)
        at = out_ptr + (1 if IS_MEDIAN else 3)
        tl.store(at, low.to(tl.float64, bitcast=True))
        tl.store(at + 1, high.to(tl.float64, bitcast=True))
        if IS_MEDIAN:
            tl.store(out_ptr, count.to(tl.float64))
            tl.store(out_ptr + 5, top.to(tl.float64, bitcast=True))


@triton.jit
def gather_sums(table_ptr, BLOCK: tl.constexpr):
    """float64 [NUMBERS], zero before, of each cast from what `measure_tiles` left; PROGRAMS for each of them.

    GATHERERS of these add up one of the sums, sort the sample into two of the binades and count a part of the scales;
    the others look for quantiles of the spans.

    `table_ptr`: int64 [casts, ROW], the addresses of the numbers, of partial sums [SUMS, tiles], of the sample
    [2, sampled], of scales and of spans; tiles; sampled; scales, how many in a row, and their strides; blocks, and
    pieces of each; 0 without a cast, 1 for scales of one byte, 2 for float32.
    """
    number = tl.program_id(0) % PROGRAMS
    row = table_ptr + tl.program_id(0) // PROGRAMS * ROW
    out_ptr = tl.load(row).to(tl.pointer_type(tl.float64))
    if number < GATHERERS:
        partials_ptr = tl.load(row + 1).to(tl.pointer_type(tl.float64))
        tiles, kind = tl.load(row + 5), tl.load(row + 13)
        lanes = tl.arange(0, BLOCK)
        peaks = tl.zeros([BLOCK], tl.float64)
        sums = peaks
        column = partials_ptr + (number % SUMS) * tiles
        first = 0
        while first < tiles:
            inside = lanes < tiles - first
            sums += tl.load(column + first + lanes, mask=inside, other=0.0)
            of_tiles = tl.load(partials_ptr + (SUMS - 1) * tiles + first + lanes, mask=inside, other=0.0)
            peaks = tl.maximum(peaks, of_tiles)
            first += BLOCK
        peak = tl.max(peaks, 0)
        if number < SUMS:
            tl.store(out_ptr + number, tl.where(number == SUMS - 1, peak, tl.sum(sums, 0)))
        if kind > 0:
            sample_ptr = tl.load(row + 2).to(tl.pointer_type(tl.float32))
            gather_binades(sample_ptr, out_ptr + COUNTS + SCALES, tl.load(row + 6), peak, number, BLOCK)
            address, scales, across = tl.load(row + 3), tl.load(row + 7), tl.load(row + 8)
            stride_r, stride_k = tl.load(row + 9), tl.load(row + 10)
            if kind == 1:
                bytes_ptr = address.to(tl.pointer_type(tl.uint8))
                count_scales(bytes_ptr, out_ptr + AT_LIMITS, scales, across, stride_r, stride_k, number, False, BLOCK)
            else:
                floats_ptr = address.to(tl.pointer_type(tl.float32))
                count_scales(floats_ptr, out_ptr + AT_LIMITS, scales, across, stride_r, stride_k, number, True, BLOCK)
    else:
        spans_ptr = tl.load(row + 4).to(tl.pointer_type(tl.float32))
        blocks, pieces = tl.load(row + 11), tl.load(row + 12)
        if number == GATHERERS:
            gather_spans(spans_ptr, out_ptr + SPANS, blocks, pieces, True, BLOCK)
        else:
            gather_spans(spans_ptr, out_ptr + SPANS, blocks, pieces, False, BLOCK)


@triton.jit
def widen_block(x_ptr, out_ptr, number, R, C, stride_r, stride_c, BLOCK: tl.constexpr):
    """One block of a matrix [R, C] in float64, without gaps."""
    index = number * BLOCK + tl.arange(0, BLOCK)
    row = index // C
    column = index - row * C
    at = x_ptr + row.to(tl.int64) * stride_r + column.to(tl.int64) * stride_c
    inside = index < R * C
    tl.store(out_ptr + index, tl.load(at, mask=inside, other=0.0).to(tl.float64), mask=inside)


@triton.jit
def widen(
    a_ptr, b_ptr, a_out_ptr, b_out_ptr, A_R, A_C, a_stride_r, a_stride_c, B_R, B_C, b_stride_r, b_stride_c, OF_A,
    INDEX64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Two matrices in float64, one block to a program: the first OF_A programs write a, the others b."""
    pid, A_R, A_C, a_stride_r, a_stride_c = program(A_R, A_C, a_stride_r, a_stride_c, INDEX64)
    _, B_R, B_C, b_stride_r, b_stride_c = program(B_R, B_C, b_stride_r, b_stride_c, INDEX64)
    if pid < OF_A:
        widen_block(a_ptr, a_out_ptr, pid, A_R, A_C, a_stride_r, a_stride_c, BLOCK)
    else:
        widen_block(b_ptr, b_out_ptr, pid - OF_A, B_R, B_C, b_stride_r, b_stride_c, BLOCK)


@triton.jit
def measure_product(
    exact_ptr, result_ptr, bias_ptr, out_ptr, N, C, stride_r, stride_c, BIASED: tl.constexpr, INDEX64: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """float64 [programs, 4] of STEPS blocks each: sums of e^2, (e - y)^2, y^2 and e y, where e is finite.

    e = the exact product [.., C] (N elements without gaps) plus a bias; y = the computed one. Whoever reads the result
    adds the programs up.
    """
    pid, N, C, stride_r, stride_c = program(N, C, stride_r, stride_c, INDEX64)
    lanes = tl.arange(0, BLOCK)
    signal = tl.zeros([BLOCK], tl.float64)
    noise, other, along = signal, signal, signal
    for step in tl.static_range(STEPS):
        index = (pid * STEPS + step) * BLOCK + lanes
        inside = index < N
        row = index // C
        column = index - row * C
        exact = tl.load(exact_ptr + index, mask=inside, other=0.0)
        at = result_ptr + row.to(tl.int64) * stride_r + column.to(tl.int64) * stride_c
        y = tl.load(at, mask=inside, other=0.0).to(tl.float64)
        if BIASED:
            exact += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float64)
        counted = tl.abs(exact) < float("inf")
        e, y = tl.where(counted, exact, 0.0), tl.where(counted, y, 0.0)
        signal += e * e
        noise += (e - y) * (e - y)
        other += y * y
        along += e * y
    out = out_ptr + 4 * pid
    tl.store(out, tl.sum(signal, 0))
    tl.store(out + 1, tl.sum(noise, 0))
    tl.store(out + 2, tl.sum(other, 0))
    tl.store(out + 3, tl.sum(along, 0))
