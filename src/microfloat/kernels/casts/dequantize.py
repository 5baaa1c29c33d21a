"""Stored codes: decoded to values in any format, from MX to FP8 codes with coarser scales, and transposed.

``value = decode(code) * scale * tensor_scale``, multiplied in float32 and rounded once (docs/numerics.md 8.1). One
program handles one BM x BN tile; a lane decodes eight neighbouring elements and reads their scale once. The block's
height and width and two strides address the scale, so one kernel serves blocks, tiles, rows and whole tensors.
"""

import triton
import triton.language as tl

from microfloat.kernels.casts.scaled import turned
from microfloat.kernels.device.convert import bf16_word, decode, element_bits, encode_pair, float_of, fp8_text
from microfloat.kernels.device.tiles import program, store_pairs

# Kinds of stored scales.
SCALE_FLOAT = tl.constexpr(0)
SCALE_E8M0 = tl.constexpr(1)
SCALE_E4M3 = tl.constexpr(2)


@triton.jit
def scale_value(stored, KIND: tl.constexpr):
    """Float32 value of a stored scale."""
    if KIND == SCALE_E8M0:
        byte = stored.to(tl.int32)
        bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
        return float_of(bits)
    elif KIND == SCALE_E4M3:
        return decode(stored.to(tl.int32), 3, 7)
    else:
        return stored


@triton.jit
def decode_pair(codes, MB: tl.constexpr, BIAS: tl.constexpr, HW: tl.constexpr):
    """Values of the two codes in an int16 (two bytes) or an int8 (two nibbles)."""
    if HW and BIAS >= 7:
        PTX: tl.constexpr = fp8_text(
            "{ .reg .b16 p, q, a, b; .reg .b32 h; mov.b32 {p, q}, $2; cvt.rn.f16x2.FP8x2 h, p; mov.b32 {a, b}, h; "
            "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            MB,
        )
        word = codes.to(tl.int32)
        return tl.inline_asm_elementwise(PTX, "=r,=r,r", [word], dtype=(tl.float32, tl.float32), is_pure=True, pack=1)
    else:
        WIDTH: tl.constexpr = 4 if element_bits(MB, BIAS) == 4 else 8
        MASK: tl.constexpr = (1 << WIDTH) - 1
        pair = codes.to(tl.int32)
        return decode(pair & MASK, MB, BIAS), decode((pair >> WIDTH) & MASK, MB, BIAS)


@triton.jit
def pairs_of_tile(rows, cols, BM: tl.constexpr, BN: tl.constexpr):
    """Lane, row and column pair of all pairs of a tile, and masks of their first and second elements."""
    lane = tl.arange(0, BN // 8)[:, None, None]
    r = tl.arange(0, BM)[None, :, None]
    w = lane * 4 + tl.arange(0, 4)[None, None, :]
    return lane, r, w, (r < rows) & (2 * w < cols), (r < rows) & (2 * w + 1 < cols)


@triton.jit
def load_codes(
    codes_ptr, row0, col0, C, r, w, inside, also, MB: tl.constexpr, BIAS: tl.constexpr, PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Pairs `w` of codes in rows `r` of the tile at (row0, col0), for `decode_pair`.

    `inside`, `also`: masks of their first and second codes.
    """
    FP4: tl.constexpr = element_bits(MB, BIAS) == 4
    if FP4:
        ld = C // 2 if PAIRS else (C + 1) // 2
        at = codes_ptr + row0.to(tl.int64) * ld + col0 // 2 + (r * ld + w)
        codes = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)
    elif PAIRS:
        at = (codes_ptr + row0.to(tl.int64) * C + col0).to(tl.pointer_type(tl.int16)) + (r * (C // 2) + w)
        codes = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)
    else:
        at = codes_ptr + row0.to(tl.int64) * C + col0 + (r * C + 2 * w)
        codes = tl.load(at, mask=inside, other=0).to(tl.int32) & 0xFF
        codes = codes | ((tl.load(at + 1, mask=also, other=0).to(tl.int32) & 0xFF) << 8)
    return codes


@triton.jit
def dequantize(
    codes_ptr, scale_ptr, tensor_scale_ptr, out_ptr, R, C, scale_stride_r, scale_stride_k, tensor_scale_stride,
    MB: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    LEVELS: tl.constexpr, BF16: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr, INDEX64: tl.constexpr,
    HW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Decode an operand [R, C]. PAIRS: C is even. LEVELS: 2 with a tensor scale, else 1."""
    pid, R, C, _, _ = program(R, C, 0, 0, INDEX64)
    tiles = (C + BN - 1) // BN
    row0 = (pid // tiles) * BM
    col0 = (pid % tiles) * BN
    rows = R - row0
    cols = C - col0
    lane, r, w, inside, also = pairs_of_tile(rows, cols, BM, BN)
    codes = load_codes(codes_ptr, row0, col0, C, r, w, inside, also, MB, BIAS, PAIRS, EVEN)
    rs = tl.arange(0, BM)[None, :]
    first = tl.arange(0, BN // 8)[:, None] * 8
    block = (col0 + first) // WIDTH
    at = scale_ptr + ((row0 + rs) // HEIGHT).to(tl.int64) * scale_stride_r + block.to(tl.int64) * scale_stride_k
    stored = tl.load(at) if EVEN else tl.load(at, mask=(rs < rows) & (first < cols), other=0)
    scale = scale_value(stored, SCALE)
    if LEVELS == 2:
        level = tl.load(tensor_scale_ptr + (row0 + rs) * tensor_scale_stride, mask=rs < rows, other=0.0)
        scale = scale * level
    scale = scale[:, :, None]
    low, high = decode_pair(codes, MB, BIAS, HW)
    low, high = low * scale, high * scale
    out_tile = out_ptr + row0.to(tl.int64) * C + col0
    if BF16 and PAIRS:
        at = out_tile.to(tl.pointer_type(tl.int32)) + (r * (C // 2) + w)
        tl.store(at, bf16_word(low, high, HW), mask=None if EVEN else inside)
    elif BF16:
        at = out_tile.to(tl.pointer_type(tl.int16)) + (r * C + 2 * w)
        word = bf16_word(low, high, HW)
        tl.store(at, word.to(tl.int16), mask=inside)
        tl.store(at + 1, (word >> 16).to(tl.int16), mask=also)
    else:
        values = tl.reshape(tl.join(low, high), [BN // 8, BM, 8])
        c = lane * 8 + tl.arange(0, 8)[None, None, :]
        tl.store(out_tile + (r * C + c), values.to(out_ptr.dtype.element_ty), mask=(r < rows) & (c < cols))


@triton.jit
def fold_codes(
    codes_ptr, scale_ptr, out_ptr, out_scale_ptr, R, C, scale_stride_r, scale_stride_k, out_stride_r, out_stride_k,
    FILLED, MB: tl.constexpr, BIAS: tl.constexpr, OUT_MB: tl.constexpr, OUT_BIAS: tl.constexpr,
    HEADROOM: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr, INDEX64: tl.constexpr,
    HW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """MX codes [R, C] -> FP8 codes with one scale for BN elements of a row, or (TILE) for BM x BN elements.

    ``q' = enc(dec(q) * 2^(b - Eg))``, the result of `casts.fold` for the original values (docs/numerics.md, section 9).
    Eg is the largest scale byte of a group minus HEADROOM, the number of binades by which the new element's largest
    value exceeds the old one's. Columns of new scales are filled with 0 up to `FILLED`.
    """
    pid, R, C, out_stride_r, out_stride_k = program(R, C, out_stride_r, out_stride_k, INDEX64)
    tiles = (C + BN - 1) // BN
    row0 = (pid // tiles) * BM
    col0 = (pid % tiles) * BN
    rows = R - row0
    cols = C - col0
    rs = tl.arange(0, BM)[None, :]
    first = tl.arange(0, BN // 8)[:, None] * 8
    at = scale_ptr + (row0 + rs).to(tl.int64) * scale_stride_r + ((col0 + first) // 32).to(tl.int64) * scale_stride_k
    stored = tl.load(at) if EVEN else tl.load(at, mask=(rs < rows) & (first < cols), other=0)
    stored = stored.to(tl.int32)
    group = tl.max(stored, 0)
    if TILE:
        group = tl.max(group, 0) + tl.zeros_like(group)
    exponent = tl.maximum(group - HEADROOM, 1)
    new = float_of(tl.where(group == 255, 0x7FC00000, exponent << 23))
    factor = scale_value(
        tl.where(group[None, :] == 255, 255, tl.maximum(stored - exponent[None, :] + 127, 0)), SCALE_E8M0
    )[:, :, None]
    r = tl.arange(0, BM)
    if TILE:
        at = out_scale_ptr + (row0 // BM).to(tl.int64) * out_stride_r + (col0 // BN).to(tl.int64) * out_stride_k
        tl.store(at + 0 * r, new, mask=r == 0)
        columns = col0 // BN + 1 + r
        tl.store(at + (1 + r) * out_stride_k, 0.0, mask=(cols <= BN) & (columns < FILLED))
    else:
        at = out_scale_ptr + (row0 + r).to(tl.int64) * out_stride_r + (col0 // BN).to(tl.int64) * out_stride_k
        tl.store(at, new, mask=r < rows)
    _lane, r, w, inside, also = pairs_of_tile(rows, cols, BM, BN)
    codes = load_codes(codes_ptr, row0, col0, C, r, w, inside, also, MB, BIAS, PAIRS, EVEN)
    low, high = decode_pair(codes, MB, BIAS, HW)
    pair = encode_pair(low * factor, high * factor, 0, OUT_MB, OUT_BIAS, False, HW)
    store_pairs(out_ptr + row0.to(tl.int64) * C + col0, pair, r, w, rows, cols, C, 8, PAIRS, EVEN)


@triton.jit
def turn_codes(
    codes_ptr, out_ptr, R, C, EVEN: tl.constexpr, INDEX64: tl.constexpr, HW: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """codes [R, C] -> out [C, R]; R and C are multiples of 4. Words of four codes are transposed in registers."""
    pid, R, C, _, _ = program(R, C, 0, 0, INDEX64)
    across = (C + BN - 1) // BN
    row0 = (pid // across) * BM
    col0 = (pid % across) * BN
    rows, cols = R - row0, C - col0
    r, w = tl.arange(0, BM // 4)[:, None] * 4, tl.arange(0, BN // 4)[None, :]
    tile = (codes_ptr + row0.to(tl.int64) * C + col0).to(tl.pointer_type(tl.int32))
    words = ()
    for p in tl.static_range(4):
        at = tile + ((r + p) * (C // 4) + w)
        words = words + (tl.load(at) if EVEN else tl.load(at, mask=(r < rows) & (4 * w < cols), other=0),)
    a, b, c, d = turned(words[0], words[1], words[2], words[3], HW)
    quads = tl.join(tl.join(a, c), tl.join(b, d))  # columns 0 and 2, 1 and 3 of every four
    quads = tl.reshape(tl.permute(quads, [1, 2, 3, 0]), [BN, BM // 4])
    column, quad = tl.arange(0, BN)[:, None], tl.arange(0, BM // 4)[None, :]
    at = (out_ptr + col0.to(tl.int64) * R + row0).to(tl.pointer_type(tl.int32)) + (column * (R // 4) + quad)
    tl.store(at, quads, mask=None if EVEN else (column < cols) & (4 * quad < rows))
