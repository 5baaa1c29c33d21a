"""Epilogue ``round(accumulator * alpha + bias)`` of a GEMM that takes no scales; one program per BM x BN tile.

`alpha` is the product of both scales. Each is absent, one number, or a vector: of rows (left) or of columns (right).
"""

import triton
import triton.language as tl

from microfloat.kernels.device.convert import float_of

NONE = tl.constexpr(0)
ONE = tl.constexpr(1)
VECTOR = tl.constexpr(2)


@triton.jit
def round_bf16(y):
    """y rounded to bfloat16, nearest even, in integer arithmetic: the same bits interpreted and compiled."""
    bits = y.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return float_of(tl.where(y == y, rounded, bits | 0x400000))


@triton.jit
def scale_and_round(
    accumulator_ptr, left_ptr, right_ptr, bias_ptr, out_ptr, M, N, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, BF16: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scale `accumulator`, float32 [M, N], add `bias` [N] and round into `out` [M, N]; scales [M] and [N] if VECTOR."""
    column_tiles = tl.cdiv(N, BN)
    tile = tl.program_id(0)
    rows = (tile // column_tiles) * BM + tl.arange(0, BM)
    columns = (tile % column_tiles) * BN + tl.arange(0, BN)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    y = tl.load(accumulator_ptr + offsets, mask=inside, other=0.0)
    if LEFT == ONE:
        left = tl.load(left_ptr) + tl.zeros((BM, 1), tl.float32)
    elif LEFT == VECTOR:
        left = tl.load(left_ptr + rows, mask=rows < M, other=1.0)[:, None]
    else:
        left = tl.full((BM, 1), 1.0, tl.float32)
    if RIGHT == ONE:
        alpha = left * tl.load(right_ptr)
    elif RIGHT == VECTOR:
        alpha = left * tl.load(right_ptr + columns, mask=columns < N, other=1.0)[None, :]
    else:
        alpha = left
    y = y * alpha
    if BIAS:
        y = y + tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if BF16:
        # Rounded already, so that the narrowing store is exact in the interpreter too.
        y = round_bf16(y)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=inside)
