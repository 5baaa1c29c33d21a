"""MX casts to 6 bits with packed codes, four in three bytes, and the way back (docs/numerics.md 1.4).

``w = c0 | c1 << 6 | c2 << 12 | c3 << 18`` is stored as its three low bytes; a row of C codes takes 3 * ceil(C / 4)
bytes, and what is missing in its last group is code 0. A lane owns 16 neighbours of a row: 96 bits, three whole words.
"""

import triton
import triton.language as tl

from microfloat.kernels.casts.blocks import block_scale, load_rows, rows_amax, spread_rows
from microfloat.kernels.casts.dequantize import SCALE_E8M0, scale_value
from microfloat.kernels.device.convert import WORDS_BF16, bf16_bits, decode, encode
from microfloat.kernels.device.packed import factor_word, scale_word, small_codes
from microfloat.kernels.device.produce import LOAD
from microfloat.kernels.device.random import lane_pairs, load_seed
from microfloat.kernels.device.tiles import program, tile_of_program


@triton.jit
def code_pairs(
    raw, low, high, factor, factors, random, MB: tl.constexpr, BIAS: tl.constexpr, STOCHASTIC: tl.constexpr,
    KIND: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """The codes of two neighbours in 12 bits, the first in the low six."""
    if HW and KIND == WORDS_BF16 and not STOCHASTIC:
        codes = small_codes(scale_word(raw, factors), MB, BIAS)
        return (codes & 0x3F) | ((codes >> 10) & 0xFC0)
    else:
        a = encode(low * factor, random & 0xFF, MB, BIAS, STOCHASTIC, HW)
        b = encode(high * factor, (random >> 8) & 0xFF, MB, BIAS, STOCHASTIC, HW)
        return a | (b << 6)


@triton.jit
def quantize_packed(
    x_ptr, out_ptr, scale_ptr, seed_ptr, stream, batch, R, C, stride_r, stride_c, CAST: tl.constexpr,
    WORDS: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Packed codes and E8M0 scales of the rows of a matrix, one program per tile. CAST: `constants.BlockCast`.

    WORDS: rows are whole groups of 16 codes, so that their bytes are whole words.
    """
    MB: tl.constexpr = CAST.MB
    BIAS: tl.constexpr = CAST.BIAS
    BLOCK: tl.constexpr = CAST.BLOCK
    STOCHASTIC: tl.constexpr = CAST.STOCHASTIC
    KIND: tl.constexpr = HOW.KIND
    HW: tl.constexpr = HOW.HW
    BM: tl.constexpr = HOW.BM
    T: tl.constexpr = BLOCK // 16
    NB: tl.constexpr = HOW.BN // BLOCK
    _pid, _across, source, bounds = tile_of_program(x_ptr, R, C, stride_r, stride_c, HOW)
    R, C, row0, col0 = bounds
    rows = R - row0
    cols = C - col0
    _r, w, values = load_rows(source, rows, cols, 16, LOAD, 0, HOW)
    raw, low, high = values[0]
    amax = rows_amax(values[0], False, NB, T, HOW)
    stored, factor, _value = block_scale(amax, 0.0, CAST)
    random = 0
    if STOCHASTIC:
        lanes = col0 // 16 + tl.arange(0, NB * T)[:, None]
        random = lane_pairs(load_seed(seed_ptr), row0 + tl.arange(0, BM)[None, :], lanes, stream, batch, NB * T, BM)
    factors = spread_rows(factor_word(factor, factor), NB, T, BM)
    pairs = code_pairs(raw, low, high, spread_rows(factor, NB, T, BM), factors, random, MB, BIAS, STOCHASTIC, KIND, HW)
    if not WORDS:  # padding has codes where a NaN makes those of its whole block
        pairs = tl.where(2 * w + 1 < cols, pairs, tl.where(2 * w < cols, pairs & 0x3F, 0))
    first, second = tl.split(tl.reshape(pairs, [NB * T, BM, 2, 2, 2]))
    first, second = tl.split(first | (second << 12))  # groups 0 and 2, groups 1 and 3
    group0, group2 = tl.split(first)
    group1, group3 = tl.split(second)
    ld = 3 * ((C + 3) // 4)
    out_tile = out_ptr + row0.to(tl.int64) * ld + (col0 // 4).to(tl.int64) * 3
    if WORDS:
        # A fourth word is never stored: addresses along an axis of a power of two are what is written side by side.
        even = tl.join(group0 | (group1 << 24), ((group2 >> 16) & 0xFF) | (group3 << 8))
        odd = tl.join((group1 >> 8) | (group2 << 16), group3)
        words = tl.reshape(tl.join(even, odd), [NB * T, BM, 4])
        lane = tl.arange(0, NB * T)[:, None, None]
        row = tl.arange(0, BM)[None, :, None]
        place = tl.arange(0, 4)[None, None, :]
        at = out_tile.to(tl.pointer_type(tl.int32)) + (row * (ld // 4) + lane * 3 + place)
        if HOW.EVEN:
            tl.store(at, words, mask=place < 3)
        else:
            tl.store(at, words, mask=(row < rows) & (16 * lane < cols) & (place < 3))
    else:
        groups = tl.reshape(tl.join(tl.join(group0, group2), tl.join(group1, group3)), [NB * T, BM, 4])
        group = tl.arange(0, NB * T)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
        row = tl.arange(0, BM)[None, :, None]
        inside = (row < rows) & (4 * group < cols)
        for j in tl.static_range(3):
            tl.store(out_tile + (row * ld + 3 * group + j), ((groups >> (8 * j)) & 0xFF).to(tl.uint8), mask=inside)
    k = tl.arange(0, NB)[:, None]
    rs = tl.arange(0, BM)[None, :]
    blocks = (C + BLOCK - 1) // BLOCK
    at = scale_ptr + (row0 + rs).to(tl.int64) * blocks + col0 // BLOCK + k
    if HOW.EVEN:
        tl.store(at, stored)
    else:
        tl.store(at, stored, mask=(rs < rows) & (k * BLOCK < cols))


@triton.jit
def dequantize_packed(
    codes_ptr, scale_ptr, out_ptr, R, C, MB: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    BF16: tl.constexpr, INDEX64: tl.constexpr, HW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Values of packed codes: one program per BM x BN tile, four neighbours to a lane."""
    pid, R, C, _, _ = program(R, C, 0, 0, INDEX64)
    tiles = (C + BN - 1) // BN
    row0 = (pid // tiles) * BM
    col0 = (pid % tiles) * BN
    rows = R - row0
    cols = C - col0
    ld = 3 * ((C + 3) // 4)
    group = tl.arange(0, BN // 4)[None, :]
    r = tl.arange(0, BM)[:, None]
    inside = (r < rows) & (4 * group < cols)
    at = codes_ptr + row0.to(tl.int64) * ld + (col0 // 4).to(tl.int64) * 3 + (r * ld + 3 * group)
    word = tl.load(at, mask=inside, other=0).to(tl.int32)
    word |= tl.load(at + 1, mask=inside, other=0).to(tl.int32) << 8
    word |= tl.load(at + 2, mask=inside, other=0).to(tl.int32) << 16
    blocks = (C + BLOCK - 1) // BLOCK
    at = scale_ptr + (row0 + r).to(tl.int64) * blocks + (col0 + 4 * group) // BLOCK
    scale = scale_value(tl.load(at, mask=inside, other=0), SCALE_E8M0)
    j = tl.arange(0, 4)[None, None, :]
    values = decode((word[:, :, None] >> (6 * j)) & 0x3F, MB, BIAS) * scale[:, :, None]
    column = 4 * group[:, :, None] + j
    out = out_ptr + row0.to(tl.int64) * C + col0 + (r[:, :, None] * C + column)
    mask = (r[:, :, None] < rows) & (column < cols)
    if BF16:
        tl.store(out.to(tl.pointer_type(tl.int16)), bf16_bits(values, HW).to(tl.int16), mask=mask)
    else:
        tl.store(out, values.to(out_ptr.dtype.element_ty), mask=mask)
