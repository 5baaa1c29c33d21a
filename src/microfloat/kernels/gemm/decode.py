"""Products of a few rows of x with stored codes: ``y [M, N] = x [M, K] @ (dec(W) * scale).T``.

One program multiplies 16 * TILES * ROW_WARPS rows of the weight by 8 * TOKENS rows of x, over all of K. LENGTH_WARPS
warps share K and add their sums in shared memory at the end (`constants.DecodeCut`).

A decoding step of a language model reads every weight once for a handful of tokens, so its time depends on the bytes
read and on the instructions that turn them into operands. Codes go from memory straight to the registers of the tensor
cores: the order of the sum over K is free, so each lane takes 16 neighbouring bytes of a row as its part of the
contraction, and the same elements of x. All tensors of the loop are one-dimensional with one entry per lane, the only
shape that Triton lays out in one way: lane 4 g + t of a warp has row (or token) g of eight, and quarter t of a *chunk*
of the contraction. `mma.m16n8k16` then reads

    A: (row g, row g + 8) of W, two pairs of elements each      B: two pairs of token g      C: tokens 2t, 2t + 1

Elements are multiplied by their block scale as bfloat16, which is exact; FP32 scales and tensor scales multiply float32
sums. x of float16 enters as two bfloat16 parts, whose sum is x. Sums have a fixed order: the same bytes every time.

Both operands are loaded into registers ahead of their use: codes and scales by STAGES chunks, x by AHEAD steps. Half a
chunk is loaded as soon as the half in its registers has been multiplied, so no registers are moved. Loads are inline
assembly, which Triton does not move; the assembler still delays some until the end of the loop when registers run
short. With STAGES = 0 codes and scales come through shared memory, by copies without registers (`gemm.shared`). A
launch may begin while the one before it ends; it first prefetches its first chunks into the L2 cache, each line by one
lane only (with 32 lanes per line a product took 22.7 us instead of 16.5). With ORDERED, which pays for more than eight
tokens, `decode_order` first puts x into the order of the tensor cores.

Weights of experts are stacked, [E, N, K]. A plan on the device (`casts.groups`) gives for each tile of 8 * TOKENS rows
of x its first row, its number of rows and its expert; no tile has rows of two experts. Programs that read the same rows
of a weight for two tiles of one group are neighbours, so the second finds them in the L2 cache.
"""

import triton
import triton.language as tl

from microfloat.kernels.casts.dequantize import SCALE_E4M3, SCALE_E8M0, SCALE_FLOAT
from microfloat.kernels.constants import DecodeCodes, DecodeCut
from microfloat.kernels.device.convert import WORDS_BF16
from microfloat.kernels.device.squares import both_high, both_low
from microfloat.kernels.gemm import elements
from microfloat.kernels.gemm.shared import copy_half, places, take_half


@triton.jit
def _stack(parts):
    """Tensors with one row per lane, a power of two of them -> one tensor with their columns side by side."""
    made = _joined(parts)
    return tl.reshape(made, [parts[0].shape[0], made.numel // parts[0].shape[0]])


@triton.jit
def _joined(parts):
    """Tensors, a power of two of them -> one tensor with their elements side by side in new last axes."""
    LENGTH: tl.constexpr = len(parts)
    if LENGTH == 1:
        return parts[0]
    else:
        half = ()
        for i in tl.static_range(LENGTH // 2):
            half = half + (tl.join(parts[i], parts[i + LENGTH // 2]),)
        return _joined(half)


@triton.jit
def _paired(words, BITS: tl.constexpr, KIND: tl.constexpr, PART: tl.constexpr, HW: tl.constexpr):
    """B operands of the tensor cores, 4 words, from 8 neighbours of each lane's token, paired like the codes."""
    w0, w1 = elements.part_of_x(words[0], KIND, PART, HW), elements.part_of_x(words[1], KIND, PART, HW)
    w2, w3 = elements.part_of_x(words[2], KIND, PART, HW), elements.part_of_x(words[3], KIND, PART, HW)
    if BITS == 4:
        return both_low(w0, w2, HW), both_high(w0, w2, HW), both_low(w1, w3, HW), both_high(w1, w3, HW)
    else:
        return w0, w1, w2, w3


@triton.jit
def _x_ahead(
    x_at, chunk, here, x_units, P: tl.constexpr, CODES: tl.constexpr, CUT: tl.constexpr, KIND: tl.constexpr,
    HW: tl.constexpr,
):  # fmt: skip
    """Words of x for step P of a chunk, for every token; `x_at`: addresses in chunk 0."""
    TOKENS: tl.constexpr = CUT.TOKENS
    PARTS: tl.constexpr = 1 if KIND == WORDS_BF16 else 2
    EACH: tl.constexpr = 16 // CODES.BITS  # 16-byte units of x that go with 16 bytes of codes
    made = ()
    for n in tl.static_range(TOKENS):
        if CUT.ORDERED:
            at = x_at[n] + (chunk * 2 + P // EACH) * (TOKENS * EACH * PARTS * 128) + (P % EACH) * (PARTS * 128)
            for part in tl.static_range(PARTS):
                made = made + elements.four_words(at + part * 128, here[n], False, False, HW)
        else:
            at = x_at[n] + chunk * (32 * EACH) + (P // EACH) * (16 * EACH) + 4 * (P % EACH)
            if CUT.EVEN:
                made = made + elements.four_words(at, here[n], False, False, HW)
            else:
                t = tl.arange(0, here[n].shape[0]) & 3
                unit = (chunk * 8 + 4 * (P // EACH) + t) * EACH + P % EACH
                made = made + elements.four_words(at, tl.where(unit < x_units, here[n], 0), True, False, HW)
    return made


@triton.jit
def _operands_of_x(words, CODES: tl.constexpr, CUT: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr):
    """B operands of one step: 4 words for every token and part of x."""
    if CUT.ORDERED:
        return words
    else:
        TOKENS: tl.constexpr = CUT.TOKENS
        PARTS: tl.constexpr = 1 if KIND == WORDS_BF16 else 2
        made = ()
        for n in tl.static_range(TOKENS):
            for part in tl.static_range(PARTS):
                made = made + _paired(_four(words, 4 * n), CODES.BITS, KIND, part, HW)
        return made


@triton.jit
def _tile_of_x(plan_ptr, entry, M, GROUPED: tl.constexpr):
    """First row, number of rows and expert of a tile of x; -1 and perhaps no rows behind the last group."""
    if GROUPED:
        at = plan_ptr + 1 + 4 * entry  # the table follows its length
        return tl.load(at + 2), tl.load(at + 1), tl.load(at + 3)
    else:
        return 0, M, 0


@triton.jit
def decode_order(
    x_ptr, plan_ptr, out_ptr, M, x_units, programs, CUT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    HW: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Reorder x for `decode_gemm`: [tile, chunk and half, 8 tokens, step, part of x, lane, 4 words]; one warp for 256
    elements, `programs` programs for each tile of x. Missing tokens and elements are 0.
    """
    EACH: tl.constexpr = 16 // BITS
    PARTS: tl.constexpr = 1 if KIND == WORDS_BF16 else 2
    lane = tl.arange(0, 32 * WARPS)
    item = tl.program_id(0) * WARPS + (lane >> 5)
    first, rows, _ = _tile_of_x(plan_ptr, tl.program_id(0) // programs, M, CUT.GROUPED)
    place = item % (programs * WARPS) if CUT.GROUPED else item
    step, token = place % EACH, ((place // EACH) % CUT.TOKENS) * 8 + ((lane >> 2) & 7)
    half = place // (EACH * CUT.TOKENS)
    unit = (half * 4 + (lane & 3)) * EACH + step
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    if CUT.DEPENDENT and HW:
        x_ptr += elements.begin_after()
    x_at = x_ptr + ((first + token) * x_units + unit) * 4
    words = elements.four_words(x_at, ((token < rows) & (unit < x_units)).to(tl.int32), True, False, HW)
    at = out_ptr.to(tl.pointer_type(tl.int32)) + item * (PARTS * 128) + (lane & 31) * 4
    for part in tl.static_range(PARTS):
        made = _stack(_paired(words, BITS, KIND, part, HW))
        tl.store((at + part * 128)[:, None] + tl.arange(0, 4)[None, :], made)


@triton.constexpr_function
def _in_words(codes, cut):
    """True if the scales of a chunk of a row are one word: four bytes, one for 32 elements each."""
    codes, cut = DecodeCodes(*codes), DecodeCut(*cut)
    return cut.WIDE and codes.SCALE == SCALE_E8M0 and codes.BITS == 8


@triton.jit
def _scale_addresses(scale_ptr, rows, stride_r, CODES: tl.constexpr, CUT: tl.constexpr):
    """Addresses of the scales of chunk 0, for both rows of every tile."""
    IN_WORDS: tl.constexpr = _in_words(CODES, CUT)
    made = ()
    for i in tl.static_range(2 * CUT.TILES):
        if IN_WORDS:
            at = scale_ptr.to(tl.pointer_type(tl.int32)) + (rows[i] // CODES.HEIGHT) * (stride_r // 4)
        else:
            at = scale_ptr + (rows[i] // CODES.HEIGHT) * stride_r
        made = made + (at,)
    return made


@triton.jit
def _load(at, chunk, has, t, HALF: tl.constexpr, CODES: tl.constexpr, CUT: tl.constexpr, HW: tl.constexpr):
    """Half a chunk from memory, if there is one (`has`): 4 words for both rows of every tile, and one scale or a pair.

    Scales that cover a whole chunk, a float32 or a word of four, are loaded with the second half.
    """
    IN_WORDS: tl.constexpr = _in_words(CODES, CUT)
    code_at, scale_at, _, _, units, _, stride_k = at
    unit = chunk * 8 + 4 * HALF + t
    inside = has if CUT.EVEN else has & (unit < units)
    here = inside.to(tl.int32) + t * 0
    words, stored = (), ()
    for i in tl.static_range(2 * CUT.TILES):
        words = words + elements.four_words(code_at[i] + chunk * 32 + 16 * HALF, here, not CUT.EVEN, True, HW)
        if CODES.SCALE == SCALE_E4M3:
            of_unit = scale_at[i].to(tl.pointer_type(tl.uint16)) + unit
            stored = stored + (tl.load(of_unit, mask=inside, other=0).to(tl.int32),)
        elif CODES.SCALE == SCALE_E8M0 and not IN_WORDS:
            of_unit = scale_at[i] + unit * (128 // CODES.BITS) // CODES.WIDTH * stride_k
            stored = stored + (tl.load(of_unit, mask=inside, other=0).to(tl.int32),)
        elif HALF == 1 and CODES.WIDTH != 0:
            of_chunk = scale_at[i] + chunk * (1 if IN_WORDS else stride_k)
            stored = stored + (tl.load(of_chunk, mask=has & (chunk * 8 < units), other=0),)
    return words, stored


@triton.jit
def _stored_scale(loaded, lane, ROW: tl.constexpr, HALF: tl.constexpr, CODES: tl.constexpr, CUT: tl.constexpr):
    """The scale or pair of scales of a lane's 16 bytes of half a chunk, from the results of `_load` for both halves."""
    IN_WORDS: tl.constexpr = _in_words(CODES, CUT)
    if IN_WORDS:
        return (loaded[1][1][ROW] >> (((lane & 3) >> 1) * 8 + 16 * HALF)) & 0xFF
    else:
        return loaded[HALF][1][ROW]


@triton.jit
def _from(parts, START: tl.constexpr):
    made = ()
    for i in tl.static_range(len(parts) - START):
        made = made + (parts[START + i],)
    return made


@triton.jit
def _chunk_sums(
    at, lane, chunk, x_chunk, has, loaded, sums, queue, shared, CODES: tl.constexpr, CUT: tl.constexpr,
    KIND: tl.constexpr, HW: tl.constexpr, CONVERSIONS: tl.constexpr,
):  # fmt: skip
    """Multiply one chunk, whose halves are `loaded`, and load ahead.

    Returns the halves of the chunk STAGES later (if it exists: `has`), the sums, and the queue of words of x, which
    reaches into the chunk `x_chunk`. `at`: addresses of codes, scales and x in chunk 0, masks of tokens, 16-byte units
    of a row of codes and of x, and the stride of scales along a row. `shared`: addresses of a chunk in shared memory.
    """
    _, _, x_at, here, _, x_units, _ = at
    TILES: tl.constexpr = CUT.TILES
    TOKENS: tl.constexpr = CUT.TOKENS
    EACH: tl.constexpr = 16 // CODES.BITS
    PARTS: tl.constexpr = 1 if KIND == WORDS_BF16 else 2
    STEPS: tl.constexpr = 2 * EACH
    AHEAD: tl.constexpr = min(CUT.AHEAD, STEPS)
    EACH_STEP: tl.constexpr = 4 * TOKENS * (PARTS if CUT.ORDERED else 1)  # words of x
    BLOCKS: tl.constexpr = CODES.SCALE == SCALE_FLOAT and CODES.WIDTH != 0
    later = chunk + max(CUT.STAGES, 1) * CUT.LENGTH_WARPS
    following, total = (), sums
    all_scales = ()
    if BLOCKS:
        total = ()
        for i in tl.static_range(4 * TILES * TOKENS):
            total = total + (tl.zeros_like(sums[i]),)
    for half in tl.static_range(2):
        if CUT.STAGES == 0 and HW:
            words, all_scales = take_half(shared, all_scales, later, has, half, CODES, CUT)
        else:
            words = loaded[half][0]
        scales = ()
        if CODES.SCALE != SCALE_FLOAT:
            for i in tl.static_range(2 * TILES):
                if CUT.STAGES == 0 and HW:
                    of_row = all_scales[half][i]
                else:
                    of_row = _stored_scale(loaded, lane, i, half, CODES, CUT)
                scales = scales + elements.scale_words(of_row, CODES, CONVERSIONS, HW)
        for u in tl.static_range(EACH):
            x = _operands_of_x(queue, CODES, CUT, KIND, HW)
            queue = _from(queue, EACH_STEP)
            if half * EACH + u + AHEAD < STEPS:
                queue = queue + _x_ahead(x_at, chunk, here, x_units, half * EACH + u + AHEAD, CODES, CUT, KIND, HW)
            else:
                queue = queue + _x_ahead(
                    x_at, x_chunk, here, x_units, half * EACH + u + AHEAD - STEPS, CODES, CUT, KIND, HW
                )
            total = _step_sums(words, scales, x, total, u, CODES, CUT, PARTS, HW, CONVERSIONS)
        if not (CUT.STAGES == 0 and HW):
            following = following + (_load(at, later, has, lane & 3, half, CODES, CUT, HW),)
    if BLOCKS:
        total = _scaled_sums(total, loaded[1][1], sums, TILES, TOKENS)
    return following, total, queue


@triton.constexpr_function
def _scales_of_chunk(codes):
    """Distance between the scales of consecutive chunks of a row, in bytes, or in words of four (8-bit codes)."""
    codes = DecodeCodes(*codes)
    return 1024 // codes.BITS // codes.WIDTH // (4 if codes.BITS == 8 else 1) if codes.WIDTH else 0


@triton.jit
def _ask_early(code_at, scale_at, first, t, code_units, CODES: tl.constexpr, CUT: tl.constexpr):
    """Prefetch the first STAGES chunks, at most four, into the L2 cache: each lane of a row one of them."""
    SCALES: tl.constexpr = _scales_of_chunk(CODES)
    chunk = first + t * CUT.LENGTH_WARPS
    here = ((t < max(CUT.STAGES, 1)) & (chunk * 8 < code_units)).to(tl.int32)
    for i in tl.static_range(2 * CUT.TILES):
        elements.ask_for(code_at[i] + chunk * 32, here)
        if CUT.WIDE and CODES.SCALE != SCALE_FLOAT:  # scales without gaps
            elements.ask_for(scale_at[i] + chunk * SCALES, here)


@triton.jit(do_not_specialize=["M"])
def decode_gemm(
    x_ptr, codes_ptr, scale_ptr, level_ptr, bias_ptr, plan_ptr, out_ptr, M, N, x_units, code_units, scale_stride_r,
    scale_stride_k, level_stride, scale_stride_e, level_stride_e, entries, CODES: tl.constexpr, CUT: tl.constexpr,
    KIND: tl.constexpr, HW: tl.constexpr, CONVERSIONS: tl.constexpr,
):  # fmt: skip
    """Multiply; one program for each tile of rows of the weight and each of the `entries` tiles of x.

    `x_units`, `code_units`: 16-byte units in a row of x and of codes. `scale_stride_e`, `level_stride_e`: distance from
    the scales of one expert to those of the next.
    """
    TILES: tl.constexpr = CUT.TILES
    TOKENS: tl.constexpr = CUT.TOKENS
    WARPS: tl.constexpr = CUT.ROW_WARPS * CUT.LENGTH_WARPS
    STRIDE: tl.constexpr = CUT.LENGTH_WARPS
    EACH: tl.constexpr = 16 // CODES.BITS
    PARTS: tl.constexpr = 1 if KIND == WORDS_BF16 else 2
    AHEAD: tl.constexpr = min(CUT.AHEAD, 2 * EACH)
    entry, tile = 0, tl.program_id(0)
    if CUT.GROUPED:
        entry, tile = tile % entries, tile // entries
    token0, tokens, expert = _tile_of_x(plan_ptr, entry, M, CUT.GROUPED)
    STAGES: tl.constexpr = max(CUT.STAGES, 1)
    SHARED: tl.constexpr = CUT.STAGES == 0 and HW
    steps = ((code_units + 7) // 8 + STRIDE - 1) // STRIDE
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    row_of_expert = 0
    if CUT.GROUPED:
        if CUT.ORDERED:
            x_ptr += entry * (steps * STRIDE) * (2 * TOKENS * EACH * PARTS * 128)
        else:
            x_ptr += token0 * (x_units * 4)
        steps = tl.where(expert < 0, 0, steps)  # behind the last group: zeros, without loads
        expert = tl.maximum(expert, 0)
        row_of_expert = expert * N
        scale_ptr += expert * scale_stride_e
    row0 = tile * (16 * TILES * CUT.ROW_WARPS)
    thread = tl.arange(0, 32 * WARPS)
    lane = thread & 31
    warp, g, t = thread >> 5, lane >> 2, lane & 3
    rows, code_at = (), ()
    for i in tl.static_range(2 * TILES):
        row = tl.minimum(row0 + (warp // STRIDE) * (16 * TILES) + g + 8 * i, N - 1)
        rows = rows + (row,)
        row += row_of_expert
        code_at = code_at + (codes_ptr.to(tl.pointer_type(tl.int32)) + (row * code_units + t) * 4,)
    scale_at = _scale_addresses(scale_ptr, rows, scale_stride_r, CODES, CUT)
    first = warp % STRIDE
    if CUT.DEPENDENT and HW:
        _ask_early(code_at, scale_at, first, t, code_units, CODES, CUT)
        nothing = elements.begin_after()
        x_ptr += nothing
        first += nothing
    if CUT.GROUPED:
        if CODES.LEVEL:
            level_ptr += expert * level_stride_e
        if CUT.BIAS:
            bias_ptr += row_of_expert
        out_ptr += token0.to(tl.int64) * N
    x_at, here = (), ()
    for n in tl.static_range(TOKENS):  # missing tokens read any words; their results are not stored
        if CUT.ORDERED:
            x_at = x_at + (x_ptr + n * (EACH * PARTS * 128) + lane * 4,)
            here = here + (lane * 0 + 1,)
        else:
            x_at = x_at + (x_ptr + ((8 * n + g) * x_units + t * EACH) * 4,)
            here = here + ((8 * n + g < tokens).to(tl.int32),)
    zero = (first * 0).to(tl.float32)
    sums = ()
    for _i in tl.static_range(4 * TILES * TOKENS):
        sums = sums + (zero,)
    queue = ()
    for p in tl.static_range(AHEAD):
        queue = queue + _x_ahead(x_at, first, here, x_units, p, CODES, CUT, KIND, HW)
    at = (code_at, scale_at, x_at, here, code_units, x_units, scale_stride_k)
    step, loaded, shared = 0, (), ()
    if SHARED:
        shared = places(thread, lane, code_at, scale_at, CODES, CUT)
        copy_half(shared, first, steps > 0, 0, CODES, CUT)
        copy_half(shared, first, steps > 0, 1, CODES, CUT)
        loaded = (0, 0)
    else:
        for stage in tl.static_range(2 * STAGES):
            has = stage // 2 < steps
            loaded = loaded + (_load(at, first + stage // 2 * STRIDE, has, t, stage % 2, CODES, CUT, HW),)
    while step < steps:
        x_chunk = first + tl.minimum(step + 1, steps - 1) * STRIDE
        made, sums, queue = _chunk_sums(
            at, lane, first + step * STRIDE, x_chunk, step + STAGES < steps, (loaded[0], loaded[1]), sums, queue,
            shared, CODES, CUT, KIND, HW, CONVERSIONS,
        )  # fmt: skip
        if not SHARED:
            loaded = _from(loaded, 2) + made
        step += 1
    # Rows of x behind the last group took no steps and give zeros.
    _store(
        sums, scale_ptr, level_ptr, bias_ptr, out_ptr, row0, tokens, N, scale_stride_r, level_stride, steps > 0, CODES,
        CUT, HW,
    )  # fmt: skip


@triton.jit
def _step_sums(
    words, scales, x, sums, U: tl.constexpr, CODES: tl.constexpr, CUT: tl.constexpr,
    PARTS: tl.constexpr, HW: tl.constexpr, CONVERSIONS: tl.constexpr,
):  # fmt: skip
    """Sums plus the products of 8 elements of every lane and token."""
    TILES: tl.constexpr = CUT.TILES
    TOKENS: tl.constexpr = CUT.TOKENS
    EACH: tl.constexpr = 16 // CODES.BITS
    made = ()
    for tile in tl.static_range(TILES):
        a = _elements(words, 8 * tile, U, CODES, CONVERSIONS)
        b = _elements(words, 8 * tile + 4, U, CODES, CONVERSIONS)
        if CODES.SCALE != SCALE_FLOAT:
            a = elements.scaled(a, scales[4 * tile + U // (EACH // 2)], CODES, HW)
            b = elements.scaled(b, scales[4 * tile + 2 + U // (EACH // 2)], CODES, HW)
        for n in tl.static_range(TOKENS):
            c = _four(sums, 4 * (tile * TOKENS + n))
            for part in tl.static_range(PARTS):
                of_x = _four(x, 4 * (n * PARTS + part))
                c = elements.multiply(a[0], b[0], a[1], b[1], of_x[0], of_x[1], c, HW)
                c = elements.multiply(a[2], b[2], a[3], b[3], of_x[2], of_x[3], c, HW)
            made = made + c
    return made


@triton.jit
def _elements(words, AT: tl.constexpr, U: tl.constexpr, CODES: tl.constexpr, CONVERSIONS: tl.constexpr):
    """Four pairs of elements, step U of the words of a row."""
    if CODES.BITS == 4:
        return elements.placed_fp4(words[AT + U])
    else:
        return elements.fp8_pairs(words[AT + 2 * U], CODES.MB, CODES.BIAS, CONVERSIONS) + elements.fp8_pairs(
            words[AT + 2 * U + 1], CODES.MB, CODES.BIAS, CONVERSIONS
        )


@triton.jit
def _scaled_sums(total, stored, sums, TILES: tl.constexpr, TOKENS: tl.constexpr):
    """sums + total * the float32 scales of the chunk (`stored`)."""
    made = ()
    for tile in tl.static_range(TILES):
        for n in tl.static_range(TOKENS):
            for i in tl.static_range(4):
                made = made + (
                    tl.fma(
                        total[4 * (tile * TOKENS + n) + i], stored[2 * tile + i // 2],
                        sums[4 * (tile * TOKENS + n) + i],
                    ),
                )  # fmt: skip
    return made


@triton.jit
def _four(parts, AT: tl.constexpr):
    return parts[AT], parts[AT + 1], parts[AT + 2], parts[AT + 3]


@triton.jit
def _add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _over_length(sums, CUT: tl.constexpr):
    """Four sums of every lane [warps of rows, lanes], added over the warps along K."""
    SHAPE: tl.constexpr = [CUT.ROW_WARPS, CUT.LENGTH_WARPS, 32]
    s0, s1 = tl.reshape(sums[0], SHAPE), tl.reshape(sums[1], SHAPE)
    s2, s3 = tl.reshape(sums[2], SHAPE), tl.reshape(sums[3], SHAPE)
    return tl.reduce((s0, s1, s2, s3), 1, _add_four)


@triton.jit
def _store(
    sums, scale_ptr, level_ptr, bias_ptr, out_ptr, row0, M, N, scale_stride_r, level_stride, is_of_expert,
    CODES: tl.constexpr, CUT: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = CUT.TILES
    TOKENS: tl.constexpr = CUT.TOKENS
    parts = ()
    for part in tl.static_range(TILES * TOKENS):
        parts = parts + _over_length(_four(sums, 4 * part), CUT)
    total = tl.reshape(_joined(parts), [CUT.ROW_WARPS, 32, 4 * TILES * TOKENS])
    warp = tl.arange(0, CUT.ROW_WARPS)[:, None, None]
    lane = tl.arange(0, 32)[None, :, None]
    i = tl.arange(0, 4 * TILES * TOKENS)[None, None, :]
    row = row0 + warp * (16 * TILES) + (i // (4 * TOKENS)) * 16 + ((i >> 1) & 1) * 8 + (lane >> 2)
    token = ((i // 4) % TOKENS) * 8 + 2 * (lane & 3) + (i & 1)
    inside = (row < N) & (token < M)
    total = elements.finished(
        total, row, inside, scale_ptr, level_ptr, bias_ptr, scale_stride_r, level_stride, CODES, CUT
    )
    if CUT.GROUPED:
        total = tl.where(is_of_expert, total, 0.0)
    elements.put(out_ptr + token.to(tl.int64) * N + row, total, inside, HW)
