"""Products of up to 128 rows of x with stored codes by warpgroups (Hopper), with x in shared memory.

One program multiplies 16 * ROW_WARPS rows of the weight by all rows of x, over one of `splits` parts of K. A warpgroup
takes 64 rows of the weight: it decodes half a chunk of codes into registers, the left operand of its products
(`wgmma`), while other warpgroups on the multiprocessor multiply. Codes and scales come through shared memory
(`gemm.shared`). One thread copies x in bulk, half a chunk at a time, which takes no registers; in `gemm.decode` every
warp loads all of x into registers, and its tensor cores wait for that where x has many rows.

`decode_order` writes x in the layout that `wgmma` takes without a swizzle: core matrices of 8 tokens by 16 bytes,
[k16, half of k16, tokens / 8] of them (PTX ISA, "matrix descriptor"). Elements within half a chunk have the order of
`gemm.decode`. Four *stages* of shared memory take turns; the launch requests them in addition to the declared memory
(`bytes_of_x`). Each stage has two barriers: one counts the bytes of a copy, the other the warps that have finished with
it, for which the copying thread waits.

With programmatic dependent launch, some multiprocessors would start two programs while others still run the launch
before; requesting more shared memory than needed prevents that (`passes.matrix.Pass.spread`).

It takes whole chunks, and scales in words, or of whole rows or tensors (`passes.products.fitted`). Sums have a fixed
order.
"""

import triton
import triton.language as tl

from microfloat.kernels.casts.dequantize import SCALE_E4M3, SCALE_FLOAT
from microfloat.kernels.constants import DecodeCodes, DecodeCut
from microfloat.kernels.device.convert import WORDS_BF16
from microfloat.kernels.gemm.elements import (
    ask_for,
    begin_after,
    finished,
    four_words,
    fp8_pairs,
    multiply,
    placed_fp4,
    put,
    scale_words,
    scaled,
)
from microfloat.kernels.gemm.shared import bytes_of_chunk, bytes_of_scales, copy_half, places, take_half

_STAGES = tl.constexpr(4)
_AHEAD = tl.constexpr(2)  # products between the request for a copy and its use
_WORDS = tl.constexpr(4)  # words of half a chunk in a lane and row
_BARRIERS = 64  # bytes of the barriers of all stages: first of copies, then of warps


@triton.constexpr_function
def _bytes_of_stage(codes, cut):
    """Bytes of x for half a chunk of codes: 128 elements (4-bit codes) or 64 (8-bit codes) of all tokens."""
    return 8192 // DecodeCodes(*codes).BITS * DecodeCut(*cut).TOKENS


def bytes_of_x(codes: DecodeCodes, cut: DecodeCut) -> int:
    """Bytes of shared memory that a launch requests for x, with 128 for the alignment of the first stage."""
    return 128 + _STAGES.value * _bytes_of_stage(codes, cut)


def bytes_declared(codes: DecodeCodes, cut: DecodeCut) -> int:
    """Bytes of shared memory that the kernel declares: a chunk of codes and scales, and the barriers."""
    return bytes_of_chunk(codes, cut) + 128


# ---- x in shared memory


@triton.constexpr_function
def _text_of_memory(cut):
    """PTX for the address of the stages in $0 and of their barriers in $1, which thread 0 ($2) initializes.

    The stages follow all declared memory; $3 is the end of the codes.
    """
    counts = [1] * _STAGES.value + [DecodeCut(*cut).ROW_WARPS] * _STAGES.value
    barriers = " ".join(f"@p mbarrier.init.shared::cta.b64 [b+{8 * i}], {count};" for i, count in enumerate(counts))
    return (
        f"{{ .shared .align 128 .b8 microfloat_bars[{_BARRIERS}]; "
        ".reg .pred p; .reg .b32 b, e; mov.u32 b, microfloat_bars; setp.eq.s32 p, $2, 0; "
        f"{barriers} fence.mbarrier_init.release.cluster; bar.sync 0; "
        f"add.u32 e, b, {_BARRIERS}; max.u32 e, e, $3; add.u32 e, e, 127; and.b32 $0, e, -128; mov.u32 $1, b; }}"
    )


@triton.jit
def _memory_of_x(thread, end_of_codes, CUT: tl.constexpr):
    PTX: tl.constexpr = _text_of_memory(CUT)
    return tl.inline_asm_elementwise(
        PTX, "=&r,=&r,r,r", [thread, end_of_codes], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
    )


@triton.constexpr_function
def _text_of_copy(size, waits):
    """PTX to copy a stage from $3 to $2 under the barrier $1 if $4 is 1; `waits`: once all warps are done with it.

    $5 is the parity of that wait. The lanes of the warp reconverge at the end, as `wgmma` requires.
    """
    wait = "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 q, [$1+32], $5; @!q bra AGAIN; " if waits else ""
    return (
        f"{{ .reg .pred p, q; setp.ne.s32 p, $4, 1; @p bra DONE; {wait}"
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {size}; "
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$2], [$3], {size}, [$1]; "
        "DONE: bar.warp.sync 0xffffffff; mov.b32 $0, 0; }"
    )


@triton.jit
def _copy_x(at, memory, bar, here, parity, WAITS: tl.constexpr, OF_STAGE: tl.constexpr):
    """Copy a stage from `at`, by the thread where `here` is 1; WAITS: after all warps are done with it."""
    PTX: tl.constexpr = _text_of_copy(OF_STAGE, WAITS)
    tl.inline_asm_elementwise(
        PTX, "=r,r,r,l,r,r", [bar, memory, at.to(tl.int64), here, parity + here * 0], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def _wait_for_x(bar, parity):
    PTX: tl.constexpr = (
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra AGAIN; mov.b32 $0, $1; }"
    )
    return tl.inline_asm_elementwise(PTX, "=r,r,r", [bar, parity], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _has_multiplied(bar, lane):
    """Signal that this warp is done with a stage."""
    PTX: tl.constexpr = (
        "{ .reg .pred p; setp.eq.s32 p, $2, 0; @p mbarrier.arrive.shared::cta.b64 _, [$1+32]; mov.b32 $0, $1; }"
    )
    return tl.inline_asm_elementwise(PTX, "=r,r,r", [bar, lane], dtype=tl.int32, is_pure=False, pack=1)


# ---- products


@triton.constexpr_function
def text_of_products(tokens, count):
    """PTX that adds the products of `count` k16 steps of A with x to the sums, $0 and those behind it."""
    sums, columns = 4 * tokens, 8 * tokens
    first, memory = 2 * sums, 2 * sums + 4 * count
    d = "{" + ", ".join(f"${i}" for i in range(sums)) + "}"
    along, across = 128 * tokens, 128  # bytes from a core matrix to the next along K, and along the tokens
    text = [
        "{ .reg .b32 lo, hi; .reg .b64 desc;",
        # An address in a cluster has the number of its program in its highest bits: not in a descriptor.
        f"and.b32 lo, ${memory}, 0x3FFFF; shr.u32 lo, lo, 4; "
        f"or.b32 lo, lo, {along >> 4 << 16}; mov.b32 hi, {across >> 4};",
        "wgmma.fence.sync.aligned;",
    ]
    for k16 in range(count):
        a = "{" + ", ".join(f"${first + 4 * k16 + i}" for i in range(4)) + "}"
        text += [
            "mov.b64 desc, {lo, hi};",
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {d}, {a}, desc, 1, 1, 1, 0;",
            f"add.u32 lo, lo, {2 * along >> 4};",
        ]
    return " ".join([*text, "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"])


@triton.constexpr_function
def _operands_of_products(tokens, count):
    """Constraints of the products: sums, read and written in place, then words of A, and an address."""
    sums = 4 * tokens
    return ",".join(["=f"] * sums + [str(i) for i in range(sums)] + ["r"] * (4 * count + 1))


@triton.constexpr_function
def _floats(count):
    return (tl.float32,) * count


@triton.jit
def _products_of_half(a, sums, memory, CUT: tl.constexpr):
    """sums + A @ x.T for a stage of x; `a`: four words for each k16."""
    COUNT: tl.constexpr = len(a) // 4
    PTX: tl.constexpr = text_of_products(CUT.TOKENS, COUNT)
    OPERANDS: tl.constexpr = _operands_of_products(CUT.TOKENS, COUNT)
    DTYPES: tl.constexpr = _floats(len(sums))
    return tl.inline_asm_elementwise(PTX, OPERANDS, sums + a + (memory,), dtype=DTYPES, is_pure=False, pack=1)


@triton.jit
def _interpreted_products(a, sums, x_at, CUT: tl.constexpr):
    """`_products_of_half` with x in global memory, by products of each warp; for the interpreter."""
    TOKENS: tl.constexpr = CUT.TOKENS
    made = ()
    for n in tl.static_range(TOKENS):
        c = (sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3])
        for k16 in tl.static_range(len(a) // 4):
            b0 = tl.load(x_at + (2 * k16 * TOKENS + n) * 32)
            b1 = tl.load(x_at + ((2 * k16 + 1) * TOKENS + n) * 32)
            c = multiply(a[4 * k16], a[4 * k16 + 1], a[4 * k16 + 2], a[4 * k16 + 3], b0, b1, c, False)
        made = made + c
    return made


@triton.jit
def _left(words, stored, CODES: tl.constexpr, HW: tl.constexpr, CONVERSIONS: tl.constexpr):
    """Words of A for half a chunk, four for each k16; `words`: four words of codes for row g, then for row g + 8."""
    IN_HALVES: tl.constexpr = CODES.SCALE != SCALE_FLOAT
    scales = ()
    if IN_HALVES:
        scales = scale_words(stored[0], CODES, CONVERSIONS, HW) + scale_words(stored[1], CODES, CONVERSIONS, HW)
    made = ()
    for word in tl.static_range(_WORDS):
        if CODES.BITS == 4:
            a, b = placed_fp4(words[word]), placed_fp4(words[_WORDS + word])
        else:
            a = fp8_pairs(words[word], CODES.MB, CODES.BIAS, CONVERSIONS)
            b = fp8_pairs(words[_WORDS + word], CODES.MB, CODES.BIAS, CONVERSIONS)
        if IN_HALVES:
            a = scaled(a, scales[word // 2], CODES, HW)
            b = scaled(b, scales[2 + word // 2], CODES, HW)
        for k16 in tl.static_range(len(a) // 2):
            made = made + (a[2 * k16], b[2 * k16], a[2 * k16 + 1], b[2 * k16 + 1])
    return made


@triton.jit
def _loaded_half(at, chunk, lane, HALF: tl.constexpr, CODES: tl.constexpr, HW: tl.constexpr):
    """Codes and scales of half a chunk from global memory; for the interpreter."""
    code_at, scale_at = at
    words, stored = (), ()
    for i in tl.static_range(2):
        words = words + four_words(code_at[i] + chunk * 32 + 16 * HALF, lane * 0 + 1, False, True, HW)
        if CODES.SCALE != SCALE_FLOAT:
            unit = chunk * 8 + 4 * HALF + (lane & 3)  # of 16 bytes, as many elements as have one scale, two, or half
            first = scale_at[i] + unit * (128 // CODES.BITS) // CODES.WIDTH
            scale = tl.load(first).to(tl.int32)
            if CODES.SCALE == SCALE_E4M3:
                scale = scale | (tl.load(first + 1).to(tl.int32) << 8)
            stored = stored + (scale,)
    return words, stored


@triton.jit
def _multiplied(at, a, use, uses, sums, CODES: tl.constexpr, CUT: tl.constexpr):
    """Sums plus the products with piece number `use` of x; a copy of a later piece is requested first.

    `at`: address of x, address of the stages, of their barriers, and threads.
    """
    x_ptr, memory, bars, thread = at
    OF_STAGE: tl.constexpr = _bytes_of_stage(CODES, CUT)
    later = use + _AHEAD
    slot = later % _STAGES
    here = (thread == 0) & (later >= _STAGES) & (later < uses)
    _copy_x(
        x_ptr + later * (OF_STAGE // 4), memory + slot * OF_STAGE, bars + slot * 8, here.to(tl.int32),
        (later // _STAGES + 1) & 1, True, OF_STAGE,
    )  # fmt: skip
    slot = use % _STAGES
    bar = _wait_for_x(bars + slot * 8, ((use // _STAGES) & 1) + thread * 0)
    sums = _products_of_half(a, sums, memory + slot * OF_STAGE + (bar & 0), CUT)
    _has_multiplied(bar, thread & 31)
    return sums


@triton.jit
def _sums_of_half(
    at, codes_at, shared, scales, step, steps, sums, HALF: tl.constexpr, CODES: tl.constexpr, CUT: tl.constexpr,
    PARTS: tl.constexpr, HW: tl.constexpr, CONVERSIONS: tl.constexpr,
):  # fmt: skip
    """Sums plus the products of half a chunk with all PARTS of x, and the scales of both halves."""
    x_ptr, _, _, thread = at
    OF_STAGE: tl.constexpr = _bytes_of_stage(CODES, CUT)
    stored = scales
    if HW:
        words, scales = take_half(shared, scales, step + 1, step + 1 < steps, HALF, CODES, CUT)
        if CODES.SCALE != SCALE_FLOAT:
            stored = scales[HALF]
    else:
        words, stored = _loaded_half(codes_at, step, thread & 31, HALF, CODES, HW)
    a = _left(words, stored, CODES, HW, CONVERSIONS)
    for part in tl.static_range(PARTS):
        use = step * (2 * PARTS) + HALF * PARTS + part
        if HW:
            sums = _multiplied(at, a, use, steps * (2 * PARTS), sums, CODES, CUT)
        else:
            sums = _interpreted_products(a, sums, x_ptr + use * (OF_STAGE // 4) + (thread & 31), CUT)
    return sums, scales


@triton.jit(do_not_specialize=["M", "splits"])
def decode_warpgroups(
    x_ptr, codes_ptr, scale_ptr, level_ptr, bias_ptr, out_ptr, M, N, code_units, scale_stride_r, level_stride, splits,
    CODES: tl.constexpr, CUT: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr, CONVERSIONS: tl.constexpr,
):  # fmt: skip
    """Multiply; one program for each of `splits` parts of K and each tile of rows of the weight.

    CUT.SPLITS is 2 for any number of parts above 1. `code_units`: 16-byte units in a row of codes. `out`: y, or with
    several parts their float32 sums [splits, M, N].
    """
    TOKENS: tl.constexpr = CUT.TOKENS
    PARTS: tl.constexpr = 1 if KIND == WORDS_BF16 else 2
    OF_STAGE: tl.constexpr = _bytes_of_stage(CODES, CUT) // 4
    ROWS: tl.constexpr = 16 * CUT.ROW_WARPS
    steps, tiles = code_units // 8, (N + ROWS - 1) // ROWS
    row0, part, begin = tl.program_id(0) * ROWS, 0, 0
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    if CUT.SPLITS > 1:
        part = tl.program_id(0) // tiles
        row0 = (tl.program_id(0) - part * tiles) * ROWS
        each = (steps + splits - 1) // splits
        begin = part * each
        steps = tl.maximum(tl.minimum(each, steps - begin), 0)
    thread = tl.arange(0, 32 * CUT.ROW_WARPS)
    lane, warp = thread & 31, thread >> 5
    g, t = lane >> 2, lane & 3
    code_at, scale_at = (), ()
    for i in tl.static_range(2):
        row = tl.minimum(row0 + warp * 16 + g + 8 * i, N - 1)
        code_at = code_at + (codes_ptr.to(tl.pointer_type(tl.int32)) + (row * code_units + begin * 8 + t) * 4,)
        scale_at = scale_at + (scale_ptr + (row // CODES.HEIGHT) * scale_stride_r + begin * bytes_of_scales(CODES),)
    x_ptr += begin * (2 * PARTS) * OF_STAGE
    first = thread * 0
    if CUT.DEPENDENT and HW:
        here = ((t == 0) & (steps > 0)).to(tl.int32)
        for i in tl.static_range(2):
            ask_for(code_at[i], here)
            ask_for(scale_at[i], here)
    zero = (first * 0).to(tl.float32)
    sums = ()
    for _i in tl.static_range(4 * TOKENS):
        sums = sums + (zero,)
    memory, bars = 0, 0
    shared, scales = (), ()
    if HW:
        shared = places(thread, lane, code_at, scale_at, CODES, CUT)
        memory, bars = _memory_of_x(thread, shared[1] - thread * 16 + bytes_of_chunk(CODES, CUT), CUT)
        scales = ((first, first), (first, first))
    if CUT.DEPENDENT and HW:
        nothing = begin_after()
        x_ptr += nothing
        first += nothing
    at = (x_ptr, memory, bars, thread)
    if HW:
        for stage in tl.static_range(_STAGES):
            one = ((thread == 0) & (stage < steps * (2 * PARTS))).to(tl.int32)
            _copy_x(
                x_ptr + stage * OF_STAGE + first, memory + stage * (4 * OF_STAGE), bars + stage * 8, one, 0, False,
                4 * OF_STAGE,
            )  # fmt: skip
        # Only after earlier launches have ended, since one of them may have written the codes.
        copy_half(shared, first, steps > 0, 0, CODES, CUT)
        copy_half(shared, first, steps > 0, 1, CODES, CUT)
    step = 0
    while step < steps:
        sums, scales = _sums_of_half(
            at, (code_at, scale_at), shared, scales, step, steps, sums, 0, CODES, CUT, PARTS, HW, CONVERSIONS
        )
        sums, scales = _sums_of_half(
            at, (code_at, scale_at), shared, scales, step, steps, sums, 1, CODES, CUT, PARTS, HW, CONVERSIONS
        )
        step += 1
    for i in tl.static_range(4 * TOKENS):
        row = row0 + warp * 16 + ((i >> 1) & 1) * 8 + g
        token = (i // 4) * 8 + 2 * t + (i & 1)
        inside = (row < N) & (token < M)
        if CUT.SPLITS > 1:
            tl.store(out_ptr + (part * M + token).to(tl.int64) * N + row, sums[i], mask=inside)
        else:
            total = finished(
                sums[i], row, inside, scale_ptr, level_ptr, bias_ptr, scale_stride_r, level_stride, CODES, CUT
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
