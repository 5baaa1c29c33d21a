"""Transpose of a matrix of one-byte codes, as FP8 tensor cores need it; one program for each BM x BN tile."""

import triton
import triton.language as tl

from microfloat.kernels.casts.scaled import turned
from microfloat.kernels.device.tiles import program


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
    if EVEN:
        tl.store(at, quads)
    else:
        tl.store(at, quads, mask=(column < cols) & (4 * quad < rows))
