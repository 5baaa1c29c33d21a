"""Products of a few rows of x with quantized weights: ``y [M, N] = x [M, K] @ (dec(W) * scale).T``, W as stored codes.

A decoding step of a language model reads every weight once for a handful of tokens, so all that counts is how few bytes
are read and how few instructions turn them into operands. Codes go from memory to the registers of the tensor cores
without a detour: the sum over K has no order, so each lane may take 16 neighbouring bytes of a row as *its* part of the
contraction, if it takes the same elements of x. Every tensor of the loop has one entry per lane, in one axis, which is
the only shape that Triton lays out in one way: lane 4 g + t of a warp has row (or token) g of eight, and quarter t of a
*chunk* of the contraction. `mma.m16n8k16` then reads

    A: (row g, row g + 8) of W, two pairs of elements each      B: two pairs of token g      C: tokens 2t, 2t + 1

Elements are multiplied by their block scale as bfloat16, which is exact; FP32 scales and tensor scales multiply float32
sums. x of float16 enters as two bfloat16 parts, whose sum is x. Sums have a fixed order: the same bytes every time.

Warps of a program share rows or parts of K (`constants.DecodeCut`); their sums meet in shared memory at the end.
"""

import triton
import triton.language as tl

from microfloat.kernels.casts.dequantize import SCALE_E4M3, SCALE_E8M0, SCALE_FLOAT, scale_value
from microfloat.kernels.device.convert import (
    WORDS_BF16,
    WORDS_F16,
    bf16_bits,
    bf16_word,
    decode,
    fp8_text,
    high_half,
    low_half,
)
from microfloat.kernels.device.packed import scale_word


@triton.jit
def _unstack(words):
    """[L, 4] -> 4 tensors of one entry per lane."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _stack(parts):
    """A tuple of a power of two of tensors, each of one row per lane -> one tensor with their columns side by side."""
    LENGTH: tl.constexpr = len(parts)
    if LENGTH == 1:
        return tl.reshape(parts[0], [parts[0].shape[0], parts[0].numel // parts[0].shape[0]])
    else:
        half = ()
        for i in tl.static_range(LENGTH // 2):
            half = half + (tl.join(parts[i], parts[i + LENGTH // 2]),)
        return _stack(half)


@triton.jit
def _multiply(a0, a1, a2, a3, b0, b1, c, HW: tl.constexpr):
    """c + A @ B, all in registers of one warp; c is a tuple of (row g: tokens 2t, 2t + 1; row g + 8: the same)."""
    if HW:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
            "{$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first = _sums(a0, a2, b0, b1)
        second = _sums(a1, a3, b0, b1)
        return c[0] + first[0], c[1] + first[1], c[2] + second[0], c[3] + second[1]


@triton.jit
def _sums(a0, a1, b0, b1):
    """The sums that a product of the tensor cores adds to one row, by plain operations."""
    total = _dots(low_half(a0, WORDS_BF16), low_half(b0, WORDS_BF16))
    total += _dots(high_half(a0, WORDS_BF16), high_half(b0, WORDS_BF16))
    total += _dots(low_half(a1, WORDS_BF16), low_half(b1, WORDS_BF16))
    total += _dots(high_half(a1, WORDS_BF16), high_half(b1, WORDS_BF16))
    return tl.split(tl.reshape(total, [a0.shape[0], 2]))


@triton.jit
def _dots(a, b):
    W: tl.constexpr = a.shape[0] // 32
    return tl.sum(tl.reshape(a, [W, 8, 1, 4]) * tl.reshape(b, [W, 1, 8, 4]), 3)


@triton.jit
def _placed_fp4(word):
    """The pairs (i, i + 4) of eight E2M1 codes as bfloat16 words times 2^-126: a shifted code is a bfloat16 so small.

    One multiplication copies a nibble to where the sign goes and to where exponent and mantissa go.
    """
    high = word >> 8
    p0 = ((word & 0x000F000F) * 0x1040) & -2117828160  # 0x81C081C0
    p1 = ((word & 0x00F000F0) * 0x0104) & -2117828160
    p2 = ((high & 0x000F000F) * 0x1040) & -2117828160
    p3 = ((high & 0x00F000F0) * 0x0104) & -2117828160
    return p0, p1, p2, p3


@triton.jit
def _fp8_pairs(word, MB: tl.constexpr, BIAS: tl.constexpr, CONVERSIONS: tl.constexpr):
    """The pairs (0, 1) and (2, 3) of four codes of a byte each as bfloat16 words."""
    if CONVERSIONS and BIAS >= 7:
        PTX: tl.constexpr = fp8_text(
            "{ .reg .b16 p, q, a, b, c, d; .reg .b32 u, v; .reg .f32 e, f; mov.b32 {p, q}, $2; "
            "cvt.rn.f16x2.FP8x2 u, p; mov.b32 {a, b}, u; cvt.f32.f16 e, a; cvt.f32.f16 f, b; "
            "cvt.rn.bf16x2.f32 $0, f, e; "
            "cvt.rn.f16x2.FP8x2 v, q; mov.b32 {c, d}, v; cvt.f32.f16 e, c; cvt.f32.f16 f, d; "
            "cvt.rn.bf16x2.f32 $1, f, e; }",
            MB,
        )
        return tl.inline_asm_elementwise(PTX, "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    else:
        first = bf16_word(decode(word & 0xFF, MB, BIAS), decode((word >> 8) & 0xFF, MB, BIAS), False)
        second = bf16_word(decode((word >> 16) & 0xFF, MB, BIAS), decode((word >> 24) & 0xFF, MB, BIAS), False)
        return first, second


@triton.jit
def _choose(a, b, SELECTOR: tl.constexpr, HW: tl.constexpr):
    """Words of the low halves (SELECTOR 0) or of the high halves (1) of a and b."""
    if HW:
        PTX: tl.constexpr = "prmt.b32 $0, $1, $2, 0x5410;" if SELECTOR == 0 else "prmt.b32 $0, $1, $2, 0x7632;"
        return tl.inline_asm_elementwise(PTX, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    elif SELECTOR == 0:
        return (a & 0xFFFF) | (b << 16)
    else:
        return ((a >> 16) & 0xFFFF) | (b & -65536)


@triton.jit
def _parts_of_x(word, KIND: tl.constexpr, PART: tl.constexpr, HW: tl.constexpr):
    """Two elements of x as bfloat16: themselves, or of float16 the rounded values (PART 0) and what is left (1)."""
    if KIND == WORDS_BF16:
        return word
    else:
        low, high = low_half(word, WORDS_F16), high_half(word, WORDS_F16)
        rounded = bf16_word(low, high, HW)
        if PART == 0:
            return rounded
        else:
            return bf16_word(low - low_half(rounded, WORDS_BF16), high - high_half(rounded, WORDS_BF16), HW)


@triton.jit
def _x_words(
    at, inside, BITS: tl.constexpr, KIND: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, HW: tl.constexpr
):
    """B operands of the tensor cores from 8 neighbours of each lane's token, paired as the codes are: 4 words."""
    if EVEN:
        words = tl.load(at, eviction_policy="evict_last")
    else:
        words = tl.load(at, mask=inside, other=0, eviction_policy="evict_last")
    w0, w1, w2, w3 = _unstack(words)
    w0, w1 = _parts_of_x(w0, KIND, PART, HW), _parts_of_x(w1, KIND, PART, HW)
    w2, w3 = _parts_of_x(w2, KIND, PART, HW), _parts_of_x(w3, KIND, PART, HW)
    if BITS == 4:
        return _choose(w0, w2, 0, HW), _choose(w0, w2, 1, HW), _choose(w1, w3, 0, HW), _choose(w1, w3, 1, HW)
    else:
        return w0, w1, w2, w3


@triton.jit
def _scale_words(stored, CODES: tl.constexpr, CONVERSIONS: tl.constexpr, HW: tl.constexpr):
    """The factors of a lane's codes as words of two equal bfloat16: of their two halves."""
    if CODES.SCALE == SCALE_E8M0:
        s = scale_value(stored, SCALE_E8M0)
        word = bf16_word(s, s, HW)
        return word, word
    else:
        if CONVERSIONS:
            PTX: tl.constexpr = (
                "{ .reg .b16 p, q, a, b; .reg .b32 h; mov.b32 {p, q}, $2; cvt.rn.f16x2.e4m3x2 h, p; "
                "mov.b32 {a, b}, h; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
            )
            low, high = tl.inline_asm_elementwise(
                PTX, "=r,=r,r", [stored], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
            )
        else:
            low, high = decode(stored & 0xFF, 3, 7), decode((stored >> 8) & 0xFF, 3, 7)
        low, high = low * 2.0**119, high * 2.0**119
        return bf16_word(low, low, HW), bf16_word(high, high, HW)


@triton.jit
def _load(at, unit, units, stride_k, CODES: tl.constexpr, CUT: tl.constexpr):
    """Words of a chunk of both rows of every tile of 16, and their scales: 5 tensors for each row; 0 beyond the end."""
    made = ()
    inside = unit < units
    j = tl.arange(0, 4)[None, :]
    for i in tl.static_range(2 * CUT.TILES):
        words = at[2 * i][:, None] + j
        if CUT.EVEN:
            words = tl.load(words, eviction_policy="evict_first")
        else:
            words = tl.load(words, mask=inside[:, None], other=0, eviction_policy="evict_first")
        made = made + _unstack(words)
        if CODES.SCALE == SCALE_FLOAT and CODES.WIDTH == 0:
            stored = 0
        else:
            scale_at, here = at[2 * i + 1], inside
            if CODES.SCALE == SCALE_FLOAT:  # of a whole chunk, whose lanes share their sums
                scale_at += (unit >> 2) * (512 // CODES.BITS) // CODES.WIDTH * stride_k
                here = (unit & -4) < units
            if CUT.EVEN:
                stored = tl.load(scale_at)
            else:
                stored = tl.load(scale_at, mask=here, other=0)
        if CODES.SCALE == SCALE_E4M3:
            stored = stored.to(tl.int32)
        made = made + (stored,)
    return made


@triton.jit
def _addresses(codes_ptr, scale_ptr, rows, chunk, t, units, stride_r, stride_k, CODES: tl.constexpr, CUT: tl.constexpr):
    """Of a chunk's words and of its scale, for both rows of every tile."""
    made = ()
    unit = chunk * 4 + t  # of 16 bytes
    for i in tl.static_range(2 * CUT.TILES):
        row = rows[i]
        scale_at = scale_ptr + (row // CODES.HEIGHT) * stride_r
        if CODES.SCALE == SCALE_E4M3:  # two of them in a word
            scale_at += unit
        elif CODES.SCALE == SCALE_E8M0:
            scale_at += unit * (128 // CODES.BITS) // CODES.WIDTH * stride_k
        made = made + (codes_ptr + (row * units + unit) * 4, scale_at)
    return made


@triton.jit
def _moved(at, CHUNKS: tl.constexpr, stride_k, CODES: tl.constexpr, CUT: tl.constexpr):
    """The addresses of as many chunks later."""
    if CODES.SCALE == SCALE_E4M3:
        scales = 4 * CHUNKS
    elif CODES.SCALE == SCALE_E8M0:
        scales = CHUNKS * (512 // CODES.BITS) // CODES.WIDTH * stride_k
    else:
        scales = 0
    made = ()
    for i in tl.static_range(2 * CUT.TILES):
        made = made + (at[2 * i] + 16 * CHUNKS, at[2 * i + 1] + scales)
    return made


@triton.jit
def _slice(parts, START: tl.constexpr, COUNT: tl.constexpr):
    made = ()
    for i in tl.static_range(COUNT):
        made = made + (parts[START + i],)
    return made


@triton.jit(do_not_specialize=["M"])
def decode_gemm(
    x_ptr, codes_ptr, scale_ptr, level_ptr, bias_ptr, out_ptr, M, N, x_units, code_units, scale_stride_r,
    scale_stride_k, level_stride, CODES: tl.constexpr, CUT: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr,
    CONVERSIONS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of rows) x SPLIT. `x_units`, `code_units`: 16-byte units of a row of x and of codes.

    A warp has STAGES chunks in registers: while one is multiplied, the others are on their way. Each is loaded into the
    registers that it has just left, after its use: copies of registers would wait for the memory that they copy.
    """
    TILES: tl.constexpr = CUT.TILES
    TOKENS: tl.constexpr = CUT.TOKENS
    STAGES: tl.constexpr = CUT.STAGES
    WARPS: tl.constexpr = CUT.ROW_WARPS * CUT.LENGTH_WARPS
    ROWS: tl.constexpr = 16 * TILES * CUT.ROW_WARPS
    EACH: tl.constexpr = 16 // CODES.BITS  # 16-byte units of x that go with 16 bytes of codes
    HELD: tl.constexpr = 10 * TILES
    pid = tl.program_id(0)
    part = pid % CUT.SPLIT
    row0 = (pid // CUT.SPLIT) * ROWS
    lane = tl.arange(0, 32 * WARPS)
    warp, g, t = lane >> 5, (lane >> 2) & 7, lane & 3
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    if CODES.SCALE == SCALE_E4M3:
        scale_ptr = scale_ptr.to(tl.pointer_type(tl.int16))
        scale_stride_r = scale_stride_r // 2
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    rows = ()
    first = row0 + (warp // CUT.LENGTH_WARPS) * (16 * TILES) + g
    for i in tl.static_range(2 * TILES):
        rows = rows + (tl.minimum(first + 8 * i, N - 1),)
    chunks = (code_units + 3) // 4
    STRIDE: tl.constexpr = CUT.LENGTH_WARPS * CUT.SPLIT
    chunk = part * CUT.LENGTH_WARPS + warp % CUT.LENGTH_WARPS
    zero = (chunk * 0).to(tl.float32)
    sums = ()
    for _i in tl.static_range(4 * TILES * TOKENS):
        sums = sums + (zero,)
    at = _addresses(codes_ptr, scale_ptr, rows, chunk, t, code_units, scale_stride_r, scale_stride_k, CODES, CUT)
    x_at = ()
    for n in tl.static_range(TOKENS):  # of tokens that are not there the last one's, and what comes of it is not stored
        token = tl.minimum(8 * n + g, M - 1)
        x_at = x_at + (x_ptr + (token * x_units + (chunk * 4 + t) * EACH) * 4,)
    unit = chunk * 4 + t
    x_unit = unit * EACH
    held = ()
    for _i in tl.static_range(STAGES):
        held = held + _load(at, unit, code_units, scale_stride_k, CODES, CUT)
        at = _moved(at, STRIDE, scale_stride_k, CODES, CUT)
        unit += 4 * STRIDE
    groups = (chunks + STRIDE * STAGES - 1) // (STRIDE * STAGES)
    group = 1
    while group < groups:
        group += 1
        following = ()
        for i in tl.static_range(STAGES):
            sums = _step_sums(
                x_at, x_unit, _slice(held, i * HELD, HELD), sums, x_units, CODES, CUT, KIND, HW, CONVERSIONS
            )
            following = following + _load(at, unit, code_units, scale_stride_k, CODES, CUT)
            if HW:
                _loads_end_here(unit)
            at = _moved(at, STRIDE, scale_stride_k, CODES, CUT)
            x_at = _x_moved(x_at, 4 * STRIDE * EACH, TOKENS)
            unit += 4 * STRIDE
            x_unit += 4 * STRIDE * EACH
        held = following
    for i in tl.static_range(STAGES):
        sums = _step_sums(x_at, x_unit, _slice(held, i * HELD, HELD), sums, x_units, CODES, CUT, KIND, HW, CONVERSIONS)
        x_at = _x_moved(x_at, 4 * STRIDE * EACH, TOKENS)
        x_unit += 4 * STRIDE * EACH
    _store(
        sums, scale_ptr, level_ptr, bias_ptr, out_ptr, row0, part, M, N, scale_stride_r, level_stride, CODES, CUT, HW
    )


@triton.jit
def _loads_end_here(lane):
    """Keep the assembler from moving loads down to their use, where they would be waited for."""
    tl.inline_asm_elementwise(
        "{ bar.warp.sync 0xffffffff; mov.b32 $0, $1; }", "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _x_moved(at, UNITS: tl.constexpr, TOKENS: tl.constexpr):
    made = ()
    for n in tl.static_range(TOKENS):
        made = made + (at[n] + 4 * UNITS,)
    return made


@triton.jit
def _step_sums(
    x_at, x_unit, words, sums, x_units, CODES: tl.constexpr, CUT: tl.constexpr, KIND: tl.constexpr, HW: tl.constexpr,
    CONVERSIONS: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = CUT.TILES
    TOKENS: tl.constexpr = CUT.TOKENS
    PARTS: tl.constexpr = 1 if KIND == WORDS_BF16 else 2
    FP4: tl.constexpr = CODES.BITS == 4
    EACH: tl.constexpr = 16 // CODES.BITS
    BLOCKS: tl.constexpr = CODES.SCALE == SCALE_FLOAT and CODES.WIDTH != 0
    scales = ()
    if CODES.SCALE != SCALE_FLOAT:
        for r in tl.static_range(2 * TILES):
            scales = scales + _scale_words(words[5 * r + 4], CODES, CONVERSIONS, HW)
    total = sums
    if BLOCKS:
        total = ()
        for i in tl.static_range(4 * TILES * TOKENS):
            total = total + (tl.zeros_like(sums[i]),)
    for u in tl.static_range(EACH):
        operands = ()
        for n in tl.static_range(TOKENS):
            inside = (x_unit + u < x_units)[:, None]
            for part in tl.static_range(PARTS):
                operands = operands + _x_words(
                    x_at[n][:, None] + (4 * u + tl.arange(0, 4)[None, :]), inside, CODES.BITS, KIND, part, CUT.EVEN, HW
                )
        made = ()
        for tile in tl.static_range(TILES):
            if FP4:
                a = _placed_fp4(words[10 * tile + u])
                b = _placed_fp4(words[10 * tile + 5 + u])
            else:
                a = _fp8_pairs(words[10 * tile + 2 * u], CODES.MB, CODES.BIAS, CONVERSIONS) + _fp8_pairs(
                    words[10 * tile + 2 * u + 1], CODES.MB, CODES.BIAS, CONVERSIONS
                )
                b = _fp8_pairs(words[10 * tile + 5 + 2 * u], CODES.MB, CODES.BIAS, CONVERSIONS) + _fp8_pairs(
                    words[10 * tile + 5 + 2 * u + 1], CODES.MB, CODES.BIAS, CONVERSIONS
                )
            if CODES.SCALE != SCALE_FLOAT:
                a = _scaled(a, scales[4 * tile + u // (EACH // 2)], CODES, HW)
                b = _scaled(b, scales[4 * tile + 2 + u // (EACH // 2)], CODES, HW)
            for n in tl.static_range(TOKENS):
                c = _four(total, 4 * (tile * TOKENS + n))
                for part in tl.static_range(PARTS):
                    x = _four(operands, 4 * (n * PARTS + part))
                    c = _multiply(a[0], b[0], a[1], b[1], x[0], x[1], c, HW)
                    c = _multiply(a[2], b[2], a[3], b[3], x[2], x[3], c, HW)
                made = made + c
        total = made
    if BLOCKS:
        made = ()
        for tile in tl.static_range(TILES):
            for n in tl.static_range(TOKENS):
                for i in tl.static_range(4):
                    made = made + (
                        tl.fma(
                            total[4 * (tile * TOKENS + n) + i], words[10 * tile + 4 + 5 * (i // 2)],
                            sums[4 * (tile * TOKENS + n) + i],
                        ),
                    )  # fmt: skip
        total = made
    return total


@triton.jit
def _four(parts, AT: tl.constexpr):
    return parts[AT], parts[AT + 1], parts[AT + 2], parts[AT + 3]


@triton.jit
def _scaled(pairs, scale, CODES: tl.constexpr, HW: tl.constexpr):
    made = ()
    for i in tl.static_range(4):
        value = pairs[i]
        if CODES.SCALE == SCALE_E8M0 and CODES.BITS == 4:
            value = _times(value, 0x7E807E80 + tl.zeros_like(value), HW)
        made = made + (_times(value, scale, HW),)
    return made


@triton.jit
def _times(a, b, HW: tl.constexpr):
    if HW:
        return scale_word(a, b)
    else:
        low = low_half(a, WORDS_BF16) * low_half(b, WORDS_BF16)
        return bf16_word(low, high_half(a, WORDS_BF16) * high_half(b, WORDS_BF16), False)


@triton.jit
def _store(
    sums, scale_ptr, level_ptr, bias_ptr, out_ptr, row0, part, M, N, scale_stride_r, level_stride,
    CODES: tl.constexpr, CUT: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = CUT.TILES
    TOKENS: tl.constexpr = CUT.TOKENS
    COUNT: tl.constexpr = 4 * TILES * TOKENS
    total = tl.sum(tl.reshape(_stack(sums), [CUT.ROW_WARPS, CUT.LENGTH_WARPS, 32, COUNT]), 1)
    warp = tl.arange(0, CUT.ROW_WARPS)[:, None, None]
    lane = tl.arange(0, 32)[None, :, None]
    g, t = lane >> 2, lane & 3
    i = tl.arange(0, COUNT)[None, None, :]
    row = row0 + warp * (16 * TILES) + (i // (4 * TOKENS)) * 16 + ((i >> 1) & 1) * 8 + g
    token = ((i // 4) % TOKENS) * 8 + 2 * t + (i & 1)
    inside = (row < N) & (token < M)
    if CUT.SPLIT > 1:
        tl.store(out_ptr + (part * M + token).to(tl.int64) * N + row, total, mask=inside)
    else:
        _finish(
            total, scale_ptr, level_ptr, bias_ptr, out_ptr, row, token, inside, N, scale_stride_r, level_stride, CODES,
            CUT, HW,
        )  # fmt: skip


@triton.jit
def _finish(
    total, scale_ptr, level_ptr, bias_ptr, out_ptr, row, token, inside, N, scale_stride_r, level_stride,
    CODES: tl.constexpr, CUT: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    if CODES.SCALE == SCALE_E4M3:
        total = total * 128.0
    if CODES.SCALE == SCALE_FLOAT and CODES.WIDTH == 0:
        total = total * tl.load(scale_ptr + row * scale_stride_r, mask=inside, other=0.0)
    if CODES.LEVEL:
        total = total * tl.load(level_ptr + row * level_stride, mask=inside, other=0.0)
    if CUT.BIAS:
        total = total + tl.load(bias_ptr + row, mask=inside, other=0.0).to(tl.float32)
    at = out_ptr + token.to(tl.int64) * N + row
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(at.to(tl.pointer_type(tl.int16)), bf16_bits(total, HW).to(tl.int16), mask=inside)
    else:
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def decode_finish(
    parts_ptr, scale_ptr, level_ptr, bias_ptr, out_ptr, M, N, scale_stride_r, level_stride, CODES: tl.constexpr,
    CUT: tl.constexpr, HW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum of the parts of a split contraction, in their order, scaled and rounded once."""
    blocks = (N + COLUMNS - 1) // COLUMNS
    token = tl.program_id(0) // blocks
    row = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    at = parts_ptr + token * N + row
    total = tl.load(at, mask=row < N, other=0.0)
    SPLIT: tl.constexpr = CUT.SPLIT
    for part in tl.static_range(1, SPLIT):
        total += tl.load(at + part * M * N, mask=row < N, other=0.0)
    _finish(
        total, scale_ptr, level_ptr, bias_ptr, out_ptr, row, token, row < N, N, scale_stride_r, level_stride, CODES,
        CUT, HW,
    )  # fmt: skip
