"""The statistics of rows that a norm needs before its values can be cast: one pass over the matrix.

What casts the values behind it reads the matrix again (`fused`, with RMS_NORM or LAYER_NORM as its producer).
"""

import triton
import triton.language as tl

from microfloat.kernels.device.convert import ELEMENTWISE, high_half, low_half
from microfloat.kernels.device.tiles import load_pair, program


@triton.jit
def load_unit(
    x_rows, first, rows, C, stride_r, stride_c, LOADS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns from `first` on of ROWS rows: first and second elements of words."""
    r = tl.arange(0, ROWS)[None, :, None, None]
    w = unit_words(COLUMNS)
    at = x_rows + first * stride_c
    if EVEN and LOADS != ELEMENTWISE:
        at = at.to(tl.pointer_type(tl.int32)) + (r * (stride_r // 2) + w)
        raw = tl.load(at, mask=(r < rows) & (w >= 0), other=0)
        return low_half(raw, LOADS), high_half(raw, LOADS)
    else:
        _raw, low, high = load_pair(at, r, w, rows, C - first, stride_r, stride_c, LOADS, False, 0)
        return low, high


@triton.jit
def unit_words(COLUMNS: tl.constexpr):
    """[32, 1, COLUMNS / 256, 4]: the words of a row."""
    lane = tl.arange(0, 32)[:, None, None, None] * 4
    chunk = tl.arange(0, COLUMNS // 256)[None, None, :, None] * 128
    return lane + chunk + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def statistics(
    x_rows, eps, rows, C, stride_r, stride_c,
    LAYER: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Mean (LAYER, else zeros) and ``1 / sqrt(variance or mean square + eps)`` of ROWS rows."""
    w = unit_words(COLUMNS)
    mean = tl.zeros([ROWS], tl.float32)
    if LAYER:
        total = tl.zeros([32, ROWS], tl.float32)
        first = 0
        while first < C:
            low, high = load_unit(x_rows, first, rows, C, stride_r, stride_c, LOADS, EVEN, ROWS, COLUMNS)
            total += tl.sum(tl.sum(low + high, 3), 2)
            first += COLUMNS
        mean = tl.sum(total, 0) / C
    total = tl.zeros([32, ROWS], tl.float32)
    first = 0
    while first < C:
        low, high = load_unit(x_rows, first, rows, C, stride_r, stride_c, LOADS, EVEN, ROWS, COLUMNS)
        if LAYER:
            low = tl.where(2 * w < C - first, low - mean[None, :, None, None], 0.0)
            high = tl.where(2 * w + 1 < C - first, high - mean[None, :, None, None], 0.0)
        total += tl.sum(tl.sum(tl.fma(low, low, high * high), 3), 2)
        first += COLUMNS
    return mean, 1.0 / tl.sqrt_rn(tl.sum(total, 0) / C + eps)


@triton.jit
def measure_rows(
    x_ptr, mean_ptr, inverse_ptr, eps, R, C, stride_r, stride_c,
    LOADS: tl.constexpr, EVEN: tl.constexpr, INDEX64: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: one program for ROWS rows. `mean_ptr` is that of a LayerNorm, or None; EVEN: COLUMNS divides C."""
    LAYER: tl.constexpr = mean_ptr is not None
    pid, R, C, stride_r, stride_c = program(R, C, stride_r, stride_c, INDEX64)
    row0 = pid * ROWS
    x_rows = x_ptr + row0.to(tl.int64) * stride_r
    mean, inverse = statistics(x_rows, eps, R - row0, C, stride_r, stride_c, LAYER, LOADS, EVEN, ROWS, COLUMNS)
    at = row0 + tl.arange(0, ROWS)
    if LAYER:
        tl.store(mean_ptr + at, mean, mask=at < R)
    tl.store(inverse_ptr + at, inverse, mask=at < R)
