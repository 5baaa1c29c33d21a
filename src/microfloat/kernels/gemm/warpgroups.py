"""Products of 33 to 64 rows of x with stored codes of four bits by warpgroups (Hopper), with x in shared memory.

In `gemm.decode` every warp reads all of x from the caches to registers, for which its tensor cores wait where x has
many rows; `gemm.decode_wide` waits for codes and for products in turn. Here a warpgroup has 64 rows of the weight and
all rows of x; codes and scales come as in `gemm.shared`, and x by bulk copies of half a chunk, which one thread asks
for and which take no registers. Half a chunk is decoded to registers, the left operand of its products (`wgmma`).
Programs that share a multiprocessor decode while others multiply.

x lies in memory as `wgmma` takes it without a swizzle: core matrices of 8 tokens by 16 bytes, [k16, half of it, tokens
by eights] of them (`gemm.decode.decode_order`; PTX ISA, "matrix descriptor"). The order of elements within half a chunk
is that of `gemm.decode`. Two *stages* of shared memory take turns. Each has two barriers: one counts the bytes of a
copy, the other the warps that have multiplied by what it holds, for which the thread that copies waits.

For whole chunks with scales in words (`passes.products.fitted`). Sums have a fixed order.
"""

import triton
import triton.language as tl

from microfloat.kernels.constants import DecodeCut
from microfloat.kernels.device.convert import WORDS_BF16
from microfloat.kernels.gemm.elements import (
    ask_for,
    begin_after,
    finished,
    four_words,
    multiply,
    placed_fp4,
    put,
    scale_words,
    scaled,
)
from microfloat.kernels.gemm.shared import bytes_of_scales, copy_half, places, take_half

_STAGES = 2
_STEPS = tl.constexpr(4)  # of half a chunk: eight elements of each lane, twice k16


@triton.constexpr_function
def _bytes_of_stage(cut):
    """Bytes of half a chunk, 128 elements, of all tokens."""
    return 2048 * DecodeCut(*cut).TOKENS


# ---- x in shared memory


@triton.constexpr_function
def _text_of_memory(cut):
    """PTX that gives the address of the stages as $0 and of their barriers as $1, which thread 0 ($2) makes."""
    counts = [1] * _STAGES + [DecodeCut(*cut).ROW_WARPS] * _STAGES
    barriers = " ".join(f"@p mbarrier.init.shared::cta.b64 [b+{8 * i}], {count};" for i, count in enumerate(counts))
    return (
        f"{{ .shared .align 128 .b8 microfloat_x[{_STAGES * _bytes_of_stage(cut)}]; "
        f".shared .align 8 .b8 microfloat_bars[{16 * _STAGES}]; "
        ".reg .pred p; .reg .b32 b; mov.u32 b, microfloat_bars; setp.eq.s32 p, $2, 0; "
        f"{barriers} fence.mbarrier_init.release.cluster; bar.sync 0; mov.u32 $0, microfloat_x; mov.u32 $1, b; }}"
    )


@triton.jit
def _memory_of_x(thread, CUT: tl.constexpr):
    PTX: tl.constexpr = _text_of_memory(CUT)
    return tl.inline_asm_elementwise(PTX, "=&r,=&r,r", [thread], dtype=(tl.int32, tl.int32), is_pure=False, pack=1)


@triton.constexpr_function
def _text_of_copy(size, stage, waits):
    """PTX that copies a stage from $3 where $4 is 1; if it waits, until all warps have multiplied by it, at parity $5.

    Behind the branch all lanes of the warp are together again, as `wgmma` needs them.
    """
    wait = f"AGAIN: mbarrier.try_wait.parity.shared::cta.b64 q, [b+{8 * _STAGES}], $5; @!q bra AGAIN; " if waits else ""
    return (
        "{ .reg .pred p, q; .reg .b32 b, m; setp.ne.s32 p, $4, 1; @p bra DONE; "
        f"add.u32 b, $1, {8 * stage}; add.u32 m, $2, {size * stage}; {wait}"
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [b], {size}; "
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [m], [$3], {size}, [b]; "
        "DONE: bar.warp.sync 0xffffffff; mov.b32 $0, 0; }"
    )


@triton.jit
def _copy_x(memory, bars, at, here, parity, STAGE: tl.constexpr, WAITS: tl.constexpr, CUT: tl.constexpr):
    """Copy a stage from `at`, by the thread where `here` is 1; WAITS: once all warps have multiplied by it."""
    PTX: tl.constexpr = _text_of_copy(_bytes_of_stage(CUT), STAGE, WAITS)
    tl.inline_asm_elementwise(
        PTX, "=r,r,r,l,r,r", [bars, memory, at.to(tl.int64), here, parity + here * 0], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.constexpr_function
def _text_of_wait(stage):
    return (
        f"{{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1+{8 * stage}], $2; "
        "@!p bra AGAIN; mov.b32 $0, $1; }"
    )


@triton.jit
def _wait_for_x(bars, parity, STAGE: tl.constexpr):
    PTX: tl.constexpr = _text_of_wait(STAGE)
    return tl.inline_asm_elementwise(PTX, "=r,r,r", [bars, parity], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _text_of_arrival(stage):
    return (
        "{ .reg .pred p; setp.eq.s32 p, $2, 0; "
        f"@p mbarrier.arrive.shared::cta.b64 _, [$1+{8 * (_STAGES + stage)}]; mov.b32 $0, $1; }}"
    )


@triton.jit
def _has_multiplied(bars, thread, STAGE: tl.constexpr):
    """Say for this warp that it has multiplied by a stage."""
    PTX: tl.constexpr = _text_of_arrival(STAGE)
    return tl.inline_asm_elementwise(PTX, "=r,r,r", [bars, thread & 31], dtype=tl.int32, is_pure=False, pack=1)


# ---- products


@triton.constexpr_function
def text_of_products(tokens, count, offset):
    """PTX that adds to $0 and all sums behind it the products of `count` times k16 of A with x at `offset`."""
    sums, columns = 4 * tokens, 8 * tokens
    first, memory = 2 * sums, 2 * sums + 4 * count
    d = "{" + ", ".join(f"${i}" for i in range(sums)) + "}"
    along, across = 128 * tokens, 128  # bytes from a core matrix to the next along K, and along the tokens
    text = [
        "{ .reg .b32 lo, hi; .reg .b64 desc;",
        # An address in a cluster has the number of its program in its highest bits: not in a descriptor.
        f"add.u32 lo, ${memory}, {offset}; and.b32 lo, lo, 0x3FFFF; shr.u32 lo, lo, 4; "
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
    """Sums that come in where they go out, then words of A, and an address."""
    sums = 4 * tokens
    return ",".join(["=f"] * sums + [str(i) for i in range(sums)] + ["r"] * (4 * count + 1))


@triton.constexpr_function
def _floats(count):
    return (tl.float32,) * count


@triton.jit
def _products_of_half(a, sums, memory, STAGE: tl.constexpr, CUT: tl.constexpr):
    """sums + A @ x.T of a stage; `a`: the four words of each k16."""
    COUNT: tl.constexpr = len(a) // 4
    PTX: tl.constexpr = text_of_products(CUT.TOKENS, COUNT, STAGE * _bytes_of_stage(CUT))
    OPERANDS: tl.constexpr = _operands_of_products(CUT.TOKENS, COUNT)
    DTYPES: tl.constexpr = _floats(len(sums))
    return tl.inline_asm_elementwise(PTX, OPERANDS, sums + a + (memory,), dtype=DTYPES, is_pure=False, pack=1)


@triton.jit
def _interpreted_products(a, sums, x_at, CUT: tl.constexpr):
    """The same of x in memory, by products of each warp; for the interpreter."""
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
    """The words of A of half a chunk, from four words of codes of rows g and g + 8 each, and the scales of both."""
    scales = scale_words(stored[0], CODES, CONVERSIONS, HW) + scale_words(stored[1], CODES, CONVERSIONS, HW)
    made = ()
    for step in tl.static_range(_STEPS):
        a = scaled(placed_fp4(words[step]), scales[step // 2], CODES, HW)
        b = scaled(placed_fp4(words[_STEPS + step]), scales[2 + step // 2], CODES, HW)
        made = made + (a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3])
    return made


@triton.jit
def _loaded_half(at, chunk, lane, HALF: tl.constexpr, CODES: tl.constexpr, HW: tl.constexpr):
    """Codes and scales of half a chunk from memory; for the interpreter."""
    code_at, scale_at = at
    BYTES: tl.constexpr = bytes_of_scales(CODES) // 8  # of a lane's codes
    words, stored = (), ()
    for i in tl.static_range(2):
        words = words + four_words(code_at[i] + chunk * 32 + 16 * HALF, lane * 0 + 1, False, True, HW)
        first = scale_at[i] + (chunk * 8 + 4 * HALF + (lane & 3)) * BYTES
        scale = tl.load(first).to(tl.int32)
        if BYTES == 2:
            scale = scale | (tl.load(first + 1).to(tl.int32) << 8)
        stored = stored + (scale,)
    return words, stored


@triton.jit
def _sums_of_half(
    at, codes_at, shared, scales, step, steps, sums, HALF: tl.constexpr, CODES: tl.constexpr, CUT: tl.constexpr,
    PARTS: tl.constexpr, HW: tl.constexpr, CONVERSIONS: tl.constexpr,
):  # fmt: skip
    """The sums with the products of half a chunk, and the scales of both halves. `at`: x in memory, the stages and
    their barriers, and threads.
    """
    if HW:
        words, scales = take_half(shared, scales, step + 1, step + 1 < steps, HALF, CODES, CUT)
        stored = scales[HALF]
    else:
        words, stored = _loaded_half(codes_at, step, at[3] & 31, HALF, CODES, HW)
    a = _left(words, stored, CODES, HW, CONVERSIONS)
    for part in tl.static_range(PARTS):
        sums = _sums_of_use(at, a, step, steps, sums, HALF * PARTS + part, CUT, PARTS, HW)
    return sums, scales


@triton.jit
def _sums_of_use(at, a, step, steps, sums, USE: tl.constexpr, CUT: tl.constexpr, PARTS: tl.constexpr, HW: tl.constexpr):
    """The sums with the products by a part of x of half a chunk, the USE-th of the chunk."""
    x_ptr, memory, bars, thread = at
    OF_STAGE: tl.constexpr = _bytes_of_stage(CUT) // 4
    STAGE: tl.constexpr = USE % 2
    if HW:
        use = step * (2 * PARTS) + USE
        if USE + 1 < 2 * PARTS:
            here = (thread == 0) & (use > 0)
        else:
            here = (thread == 0) & (step + 1 < steps)
        following = x_ptr + (use + 1) * OF_STAGE
        _copy_x(memory, bars, following, here.to(tl.int32), ((use - 1) >> 1) & 1, 1 - STAGE, True, CUT)
        bars = _wait_for_x(bars, ((use >> 1) & 1) + thread * 0, STAGE)
        sums = _products_of_half(a, sums, memory + (bars & 0), STAGE, CUT)
        _has_multiplied(bars, thread, STAGE)
    else:
        sums = _interpreted_products(a, sums, x_ptr + (step * (2 * PARTS) + USE) * OF_STAGE + (thread & 31), CUT)
    return sums


@triton.jit(do_not_specialize=["M"])
def decode_warpgroups(
    x_ptr, codes_ptr, scale_ptr, level_ptr, bias_ptr, out_ptr, M, N, code_units, scale_stride_r, level_stride,
    CODES: tl.constexpr, CUT: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr, CONVERSIONS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows of the weight. `code_units`: 16-byte units of a row of codes."""
    TOKENS: tl.constexpr = CUT.TOKENS
    PARTS: tl.constexpr = 1 if KIND == WORDS_BF16 else 2
    OF_STAGE: tl.constexpr = _bytes_of_stage(CUT) // 4
    steps = code_units // 8
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    row0 = tl.program_id(0) * (16 * CUT.ROW_WARPS)
    thread = tl.arange(0, 32 * CUT.ROW_WARPS)
    lane, warp = thread & 31, thread >> 5
    g, t = lane >> 2, lane & 3
    code_at, scale_at = (), ()
    for i in tl.static_range(2):
        row = tl.minimum(row0 + warp * 16 + g + 8 * i, N - 1)
        code_at = code_at + (codes_ptr.to(tl.pointer_type(tl.int32)) + (row * code_units + t) * 4,)
        scale_at = scale_at + (scale_ptr + (row // CODES.HEIGHT) * scale_stride_r,)
    first = thread * 0
    if CUT.DEPENDENT and HW:
        here = ((t == 0) & (steps > 0)).to(tl.int32)
        for i in tl.static_range(2):
            ask_for(code_at[i], here)
            ask_for(scale_at[i], here)
        nothing = begin_after()
        x_ptr += nothing
        first += nothing
    zero = (first * 0).to(tl.float32)
    sums = ()
    for _i in tl.static_range(4 * TOKENS):
        sums = sums + (zero,)
    at, shared, scales = (x_ptr, 0, 0, thread), (), ()
    if HW:
        memory, bars = _memory_of_x(thread, CUT)
        one = ((thread == 0) & (steps > 0)).to(tl.int32)
        for stage in tl.static_range(2):
            _copy_x(memory, bars, x_ptr + stage * OF_STAGE + first, one, 0, stage, False, CUT)
        at = (x_ptr, memory, bars, thread)
        shared = places(thread, lane, code_at, scale_at, CODES, CUT)
        copy_half(shared, first, steps > 0, 0, CODES, CUT)
        copy_half(shared, first, steps > 0, 1, CODES, CUT)
        scales = ((first, first), (first, first))
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
        total = finished(sums[i], row, inside, scale_ptr, level_ptr, bias_ptr, scale_stride_r, level_stride, CODES, CUT)
        put(out_ptr + token.to(tl.int64) * N + row, total, inside, HW)
