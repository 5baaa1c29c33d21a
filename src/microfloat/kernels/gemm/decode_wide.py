"""Products of 16 to 256 rows of x with stored codes by warpgroups: ``y.T [N, M] = (dec(W) * scale) [N, K] @ x.T``.

`kernels.gemm.decode` reads all of x for every 16 to 32 rows of the weight. With 64 rows of x that is more than the
weight itself (64 x 8192 for each of 128 programs: 134 MB from the L2 cache, beside 38 MB of NVFP4). Here a program has
16 * ROW_WARPS * TILES rows of the weight and a part of K (SPLITS), x is copied to shared memory once for all its warps,
and every element that is decoded meets all rows of x: `wgmma` on Hopper, with the weight as its left operand in
registers.

The sum over K has no order, so a lane takes 16 neighbouring bytes of a row as its part of a *step* (64 bytes of a row),
as there: lane 4 g + t has rows g and g + 8 of 16, and quarter t. The tensor cores number the elements of k16 otherwise
(lane t has k = 2t, 2t + 1, 2t + 8 and 2t + 9 of A), and a lane's words decode to pairs of elements in a fixed order; so
`order_wide` writes x in the order in which the elements of W come: [band, part of x and row, step, k]. A tensor of
words [8 * ROW_WARPS, 16] for rows g, and one for rows g + 8, then becomes A by joins and a change of axes that move
nothing from thread to thread (tests/kernels/test_decode.py looks at the machine code). Parts of K are summed by
`sum_parts`, in their order: the same bytes every time.

An iteration takes AHEAD steps, and all of its products have ended before it does: Triton would leave the last ones
under way and have the registers that they read written by the next iteration, which PTX leaves undefined. With OVERLAPS
an iteration begins with the products of words that the one before has decoded, decodes the words of the next while they
are under way, and waits for them only then (`_behind`): with more than 64 rows of x the tensor cores have more to do
than the memory, and a program of so many sums has its multiprocessor for itself, so that nobody else multiplies while
it decodes.

More rows of x than 8 * TOKENS are further *bands*, each with programs of its own, which decode the weight again; the
programs of one part of the weight follow each other, so that all but the first find its codes in the L2 cache.

x of float16 enters as two bfloat16 parts, which are further rows of x. Scales as in `kernels.gemm.decode`.
"""

import triton
import triton.language as tl

from microfloat.kernels.casts.dequantize import SCALE_E4M3, SCALE_E8M0, SCALE_FLOAT
from microfloat.kernels.device.convert import WORDS_BF16, low_half
from microfloat.kernels.gemm.elements import (
    ask_for,
    begin_after,
    finished,
    fp8_pairs,
    part_of_x,
    placed_fp4,
    put,
    scale_words,
    times,
)


def _behind_products(count: int) -> tuple[tl.constexpr, tl.constexpr]:
    """PTX that gives back `count` words once all products have ended, and its constraints.

    The assembler may move arithmetic behind a wait, and would decode only then: all words go into the mask of a barrier
    of the warp, which stays in front of it. The mask is that of all lanes: `wgmma` has them together.
    """
    words = range(count, 2 * count)
    mask = "activemask.b32 m; " + " ".join(f"or.b32 m, m, ${word};" for word in words) + " bar.warp.sync m;"
    moves = " ".join(f"mov.b32 ${word - count}, ${word};" for word in words)
    text = f"{{ .reg .b32 m; {mask} wgmma.wait_group.sync.aligned 0; {moves} }}"
    return tl.constexpr(text), tl.constexpr(",".join(["=r"] * count + ["r"] * count))


_BEHIND_16, _OF_16 = _behind_products(16)
_BEHIND_32, _OF_32 = _behind_products(32)


@triton.jit
def order_wide(
    x_ptr, out_ptr, M, K, x_length, CUT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """x as `decode_wide` takes it; 0 where there is no row or element. Grid: rows, and blocks of `x_length`."""
    ROWS: tl.constexpr = 8 * CUT.TOKENS
    PARTS: tl.constexpr = 1 if KIND == WORDS_BF16 else 2
    blocks = (x_length + BLOCK - 1) // BLOCK
    token = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    # k of a step: parity of a pair, t, the first or second pair of a lane, and the number of k16.
    parity, t, second, k16 = at & 1, (at >> 1) & 3, (at >> 3) & 1, at >> 4
    if BITS == 4:
        element = (k16 >> 3) * 128 + t * 32 + ((k16 >> 1) & 3) * 8 + (k16 & 1) * 2 + second + parity * 4
    else:
        element = (k16 >> 2) * 64 + t * 16 + (k16 & 3) * 4 + second * 2 + parity
    bits = x_ptr.to(tl.pointer_type(tl.int16))
    if CUT.DEPENDENT and HW:
        bits += begin_after()
    inside = (token < M) & (element < K) & (at < x_length)
    x = tl.load(bits + token * K + element, mask=inside, other=0)
    row = token // ROWS * (ROWS * PARTS) + token % ROWS
    out = out_ptr.to(tl.pointer_type(tl.int16)) + row * x_length + at
    if KIND == WORDS_BF16:
        tl.store(out, x, mask=at < x_length)
    else:
        word = x.to(tl.int32) & 0xFFFF
        for part in tl.static_range(2):
            of_x = part_of_x(word, KIND, part, HW)
            tl.store(out + part * ROWS * x_length, of_x.to(tl.int16), mask=at < x_length)


@triton.jit
def _halves(pair):
    """The two bfloat16 elements of a word each, side by side in a new last axis."""
    low = pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _inside(at, element, length, CUT: tl.constexpr):
    """The value there, or 0 behind the end of the row."""
    if CUT.EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=element < length, other=0)


@triton.jit
def _stored_scales(at, step, t, PART: tl.constexpr, CODES: tl.constexpr, CUT: tl.constexpr, stride_k, length):
    """The scale, or the two, of a lane's quarter of step PART of an iteration, for each row at scale 0 of `at`."""
    WORDS: tl.constexpr = CUT.WIDE
    t = t[None, :]
    at = at[:, None]
    if CODES.SCALE == SCALE_E4M3:
        if WORDS:  # a word has those of 64 elements
            word = step * 2 + (t >> 1)
            return _inside(at + word, word * 64, length, CUT) >> ((t & 1) * 16)
        else:
            unit = step * 4 + t
            return _inside(at.to(tl.pointer_type(tl.int16)) + unit, unit * 32, length, CUT).to(tl.int32)
    elif CODES.BITS == 4:
        if WORDS:  # of 128 elements, which every lane reads
            word = step + t * 0
            return (_inside(at + word, word * 128, length, CUT) >> (t * 8)) & 0xFF
        else:
            place = step * 4 + t
            return _inside(at + place * stride_k, place * 32, length, CUT).to(tl.int32)
    else:
        place = step * 2 + (t >> 1)
        if WORDS and CUT.AHEAD == 2:  # a word has those of an iteration, which begins at an even step
            even = step - PART
            word = _inside(at + (even // 2 + t * 0), even * 64, length, CUT)
            return (word >> ((2 * PART + (t >> 1)) * 8)) & 0xFF
        elif WORDS:
            word = _inside(at + (place >> 2), place * 32, length, CUT)
            return (word >> ((place & 3) * 8)) & 0xFF
        else:
            return _inside(at + place * stride_k, place * 32, length, CUT).to(tl.int32)


@triton.jit
def _factors(stored, CODES: tl.constexpr, CUT: tl.constexpr, HW: tl.constexpr, CONVERSIONS: tl.constexpr):
    """The factors of every word of codes, [rows, 16], as words of two equal bfloat16."""
    ROWS: tl.constexpr = 8 * CUT.ROW_WARPS
    low, high = scale_words(stored, CODES, CONVERSIONS, HW)
    both = tl.broadcast_to(tl.join(low, high)[:, :, :, None], [ROWS, 4, 2, 2])
    return tl.reshape(both, [ROWS, 16])


@triton.jit
def _pairs_of_step(words, stored, CODES: tl.constexpr, CUT: tl.constexpr, HW: tl.constexpr, CONVERSIONS: tl.constexpr):
    """Decoded and scaled elements as words of two bfloat16, [rows, 16] each."""
    if CODES.BITS == 4:
        pairs = placed_fp4(words)
    else:
        pairs = fp8_pairs(words, CODES.MB, CODES.BIAS, CONVERSIONS)
    if CODES.SCALE != SCALE_FLOAT:
        factors = _factors(stored, CODES, CUT, HW, CONVERSIONS)
        scaled = ()
        for i in tl.static_range(len(pairs)):
            value = pairs[i]
            if CODES.SCALE == SCALE_E8M0 and CODES.BITS == 4:
                value = times(value, 0x7E807E80 + tl.zeros_like(value), HW)
            scaled = scaled + (times(value, factors, HW),)
        pairs = scaled
    return pairs


@triton.jit
def _elements(pairs, FIRST: tl.constexpr, BITS: tl.constexpr):
    """[rows, word, parity, second, (k16 of a word)]."""
    first = tl.join(_halves(pairs[FIRST]), _halves(pairs[FIRST + 1]))
    if BITS == 4:
        return tl.join(first, tl.join(_halves(pairs[FIRST + 2]), _halves(pairs[FIRST + 3])))
    else:
        return first


@triton.jit
def _left(pairs, BITS: tl.constexpr, ROW_WARPS: tl.constexpr):
    """A [16 * ROW_WARPS, k] from the elements of rows g and of rows g + 8."""
    both = tl.join(_elements(pairs, 0, BITS), _elements(pairs, 16 // BITS, BITS))
    if BITS == 4:
        both = tl.reshape(both, [ROW_WARPS, 8, 4, 4, 2, 2, 2, 2])
        both = tl.permute(both, (0, 7, 1, 3, 6, 5, 2, 4))  # warp, row half, g, word, k16 of a word, second, t, parity
        return tl.reshape(both, [16 * ROW_WARPS, 128])
    else:
        both = tl.reshape(both, [ROW_WARPS, 8, 4, 4, 2, 2, 2])
        both = tl.permute(both, (0, 6, 1, 3, 5, 2, 4))
        return tl.reshape(both, [16 * ROW_WARPS, 64])


@triton.jit
def _product(a, x, sums, HW: tl.constexpr):
    """sums + a @ x.T; the interpreter's own product of bfloat16 takes the bits for integers."""
    if HW:
        return tl.dot(a, x.T, sums)
    else:
        return tl.dot(_wide(a), _wide(x).T, sums)


@triton.jit
def _wide(x):
    """bfloat16 as float32 by its bits: the interpreter's own conversion has other values below 2^-126."""
    return low_half(x.to(tl.int16, bitcast=True).to(tl.int32), WORDS_BF16)


@triton.jit
def _ended(sums, HW: tl.constexpr):
    """The sums, after the products that make them have ended, for arithmetic that reads them."""
    if HW:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return sums


@triton.jit
def _behind(a, BITS: tl.constexpr, HW: tl.constexpr):
    """The words, after all products under way have ended."""
    if not HW:
        return a
    elif BITS == 4:
        return tl.inline_asm_elementwise(
            _BEHIND_32, _OF_32, [a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False,
            pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _BEHIND_16, _OF_16, [a[0], a[1], a[2], a[3]], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=4,
        )  # fmt: skip


@triton.jit
def _decoded(
    step, code_at, scale_at, code_words, length, stride_k, PART: tl.constexpr, CODES: tl.constexpr, CUT: tl.constexpr,
    HW: tl.constexpr, CONVERSIONS: tl.constexpr,
):  # fmt: skip
    """The words of A of step PART of an iteration: those of rows g, then of rows g + 8, from their addresses."""
    word = step * 16 + tl.arange(0, 16)[None, :]
    pairs = ()
    for half in tl.static_range(2):
        if CUT.EVEN:
            words = tl.load(code_at[half] + step * 16, eviction_policy="evict_first")
        else:
            words = tl.load(code_at[half] + step * 16, mask=word < code_words, other=0, eviction_policy="evict_first")
        stored = words
        if CODES.SCALE != SCALE_FLOAT:
            stored = _stored_scales(scale_at[half], step, tl.arange(0, 4), PART, CODES, CUT, stride_k, length)
        pairs = pairs + _pairs_of_step(words, stored, CODES, CUT, HW, CONVERSIONS)
    return pairs


@triton.jit
def _sums_of_steps(step, at, sums, CODES: tl.constexpr, CUT: tl.constexpr, HW: tl.constexpr, CONVERSIONS: tl.constexpr):
    """The sums of every tile with the products of AHEAD steps from `step` on."""
    code_at, scale_at, row_scale_at, x_at, code_words, length, stride_k = at
    STEP: tl.constexpr = 512 // CODES.BITS
    BLOCKS: tl.constexpr = CODES.SCALE == SCALE_FLOAT and CODES.WIDTH != 0
    TILES: tl.constexpr = CUT.TILES
    AHEAD: tl.constexpr = CUT.AHEAD
    x = ()
    for i in tl.static_range(AHEAD):
        x = x + (tl.load(x_at + (step + i) * STEP),)
    made = ()
    for tile in tl.static_range(TILES):
        own = tl.zeros_like(sums[tile]) if BLOCKS else sums[tile]
        for i in tl.static_range(AHEAD):
            a = _decoded(
                step + i, (code_at[2 * tile], code_at[2 * tile + 1]), (scale_at[2 * tile], scale_at[2 * tile + 1]),
                code_words, length, stride_k, i, CODES, CUT, HW, CONVERSIONS,
            )  # fmt: skip
            own = _product(_left(a, CODES.BITS, CUT.ROW_WARPS), x[i], own, HW)
        if BLOCKS:  # of 128 elements: a step, or both of an iteration
            scale = tl.load(row_scale_at[tile] + step // 2 * stride_k, mask=step * STEP < length, other=0.0)
            made = made + (tl.fma(own, tl.broadcast_to(scale[:, None], own.shape), sums[tile]),)
        else:
            made = made + (_ended(own, HW),)
    return made


@triton.jit
def _sums_of_step(
    step, last, at, sums, pairs, CODES: tl.constexpr, CUT: tl.constexpr, HW: tl.constexpr, CONVERSIONS: tl.constexpr
):
    """The same of one step, the words of whose first tile are `pairs`; and those of the next step."""
    code_at, scale_at, _, x_at, code_words, length, stride_k = at
    TILES: tl.constexpr = CUT.TILES
    x = tl.load(x_at + step * (512 // CODES.BITS))
    made = ()
    for tile in tl.static_range(TILES):
        made = made + (_product(_left(pairs, CODES.BITS, CUT.ROW_WARPS), x, sums[tile], HW),)
        if tile + 1 == TILES:
            step = tl.minimum(step + 1, last - 1)
        pairs = _decoded(
            step, (code_at[(2 * tile + 2) % (2 * TILES)], code_at[(2 * tile + 3) % (2 * TILES)]),
            (scale_at[(2 * tile + 2) % (2 * TILES)], scale_at[(2 * tile + 3) % (2 * TILES)]), code_words, length,
            stride_k, 0, CODES, CUT, HW, CONVERSIONS,
        )  # fmt: skip
    return made, _behind(pairs, CODES.BITS, HW)


@triton.jit(do_not_specialize=["M", "splits"])
def decode_wide(
    x_ptr, codes_ptr, scale_ptr, level_ptr, bias_ptr, out_ptr, M, N, K, x_length, code_units, scale_stride_r,
    scale_stride_k, level_stride, splits, CODES: tl.constexpr, CUT: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr,
    CONVERSIONS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows of the weight, within those the `splits` parts of K (CUT.SPLITS: 1, or 2 for several), within
    those the bands of rows of x.

    `x_length`: elements of a row of ordered x; `code_units`: 16-byte units of a row of codes. `out`: y, or of several
    parts their float32 sums [splits, M, N].
    """
    WARPS: tl.constexpr = CUT.ROW_WARPS
    TILES: tl.constexpr = CUT.TILES
    PARTS: tl.constexpr = 1 if KIND == WORDS_BF16 else 2
    COLUMNS: tl.constexpr = 8 * CUT.TOKENS * PARTS
    STEP: tl.constexpr = 512 // CODES.BITS
    STAGES: tl.constexpr = CUT.STAGES
    bands = (M + 8 * CUT.TOKENS - 1) // (8 * CUT.TOKENS)
    band, place = tl.program_id(0) % bands, tl.program_id(0) // bands
    part = place % splits
    AHEAD: tl.constexpr = CUT.AHEAD
    steps = (code_units + 4 * AHEAD - 1) // (4 * AHEAD) * AHEAD
    each = (steps // AHEAD + splits - 1) // splits * AHEAD
    first, last = part * each, tl.minimum(part * each + each, steps)
    row0 = (place // splits) * (16 * WARPS * CUT.TILES)
    i = tl.arange(0, 8 * WARPS)
    in_tile = (i >> 3) * 16 + (i & 7)
    code_at, scale_at, row_scale_at = (), (), ()
    for half in tl.static_range(2 * TILES):
        row = tl.minimum(row0 + (half // 2) * (16 * WARPS) + (half % 2) * 8 + in_tile, N - 1)
        at = codes_ptr.to(tl.pointer_type(tl.int32)) + row * (code_units * 4)
        if CUT.DEPENDENT and HW:
            for step in tl.static_range(STAGES * AHEAD):  # the steps that the loop begins with
                unit = (first + step) * 4
                ask_for(at + unit * 4, (unit + row * 0 < code_units).to(tl.int32))
        code_at = code_at + (at[:, None] + tl.arange(0, 16)[None, :],)
        if CODES.SCALE == SCALE_FLOAT:
            scale_at = scale_at + (0,)
        elif CUT.WIDE:
            scale_at = scale_at + (
                scale_ptr.to(tl.pointer_type(tl.int32)) + row // CODES.HEIGHT * (scale_stride_r // 4),
            )
        else:
            scale_at = scale_at + (scale_ptr + row // CODES.HEIGHT * scale_stride_r,)
    rows = tl.arange(0, 16 * WARPS)
    for tile in tl.static_range(TILES):
        row = tl.minimum(row0 + tile * (16 * WARPS) + rows, N - 1)
        row_scale_at = row_scale_at + (scale_ptr + row // CODES.HEIGHT * scale_stride_r,)
    x_at = x_ptr.to(tl.pointer_type(tl.bfloat16)) + (band * COLUMNS + tl.arange(0, COLUMNS)[:, None]) * x_length
    x_at += tl.arange(0, STEP)[None, :]
    if CUT.DEPENDENT and HW:
        x_at += begin_after() * 16
    sums = ()
    for _tile in tl.static_range(TILES):
        sums = sums + (tl.zeros([16 * WARPS, COLUMNS], tl.float32),)
    at = (code_at, scale_at, row_scale_at, x_at, code_units * 4, K, scale_stride_k)
    if CUT.OVERLAPS:
        pairs = _decoded(
            tl.minimum(first, steps - 1), (code_at[0], code_at[1]), (scale_at[0], scale_at[1]), code_units * 4, K,
            scale_stride_k, 0, CODES, CUT, HW, CONVERSIONS,
        )  # fmt: skip
        if HW:
            for step in tl.range(first, last, num_stages=STAGES):
                sums, pairs = _sums_of_step(step, last, at, sums, pairs, CODES, CUT, HW, CONVERSIONS)
        else:  # the interpreter has no such loop
            step = first
            while step < last:
                sums, pairs = _sums_of_step(step, last, at, sums, pairs, CODES, CUT, HW, CONVERSIONS)
                step += 1
    elif HW:
        for step in tl.range(first, last, AHEAD, num_stages=STAGES):
            sums = _sums_of_steps(step, at, sums, CODES, CUT, HW, CONVERSIONS)
    else:
        step = first
        while step < last:
            sums = _sums_of_steps(step, at, sums, CODES, CUT, HW, CONVERSIONS)
            step += AHEAD
    token = band * (8 * CUT.TOKENS) + tl.arange(0, 8 * CUT.TOKENS)[None, :]
    for tile in tl.static_range(TILES):
        total = sums[tile]
        if PARTS == 2:
            total = tl.sum(tl.reshape(total, [16 * WARPS, 2, 8 * CUT.TOKENS]), 1)
        row = row0 + tile * (16 * WARPS) + rows[:, None]
        inside = (row < N) & (token < M)
        if CUT.SPLITS > 1:
            tl.store(out_ptr + (part * M + token).to(tl.int64) * N + row, total, mask=inside)
        else:
            total = finished(
                total, row, inside, scale_ptr, level_ptr, bias_ptr, scale_stride_r, level_stride, CODES, CUT
            )
            put(out_ptr + token.to(tl.int64) * N + row, total, inside, HW)


@triton.jit(do_not_specialize=["M", "splits"])
def sum_parts(
    parts_ptr, scale_ptr, level_ptr, bias_ptr, out_ptr, M, N, scale_stride_r, level_stride, splits,
    CODES: tl.constexpr, CUT: tl.constexpr, HW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y from the sums of all parts of K, in their order. Grid: rows of y, and blocks of N."""
    blocks = (N + BLOCK - 1) // BLOCK
    token, row = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = row < N
    if CUT.DEPENDENT and HW:
        parts_ptr += begin_after()
    total = tl.load(parts_ptr + token * N + row, mask=inside, other=0.0)
    part = 1
    while part < splits:
        total += tl.load(parts_ptr + (part * M + token) * N + row, mask=inside, other=0.0)
        part += 1
    total = finished(total, row, inside, scale_ptr, level_ptr, bias_ptr, scale_stride_r, level_stride, CODES, CUT)
    put(out_ptr + token.to(tl.int64) * N + row, total, inside, HW)
