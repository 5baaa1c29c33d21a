"""Cross-entropy of rows of logits, and its gradient in their place; one program for each row.

    loss = log(sum over j of exp(x_j - max)) - (x_label - max)
    dy_j = (exp(x_j - max) / sum - [j = label]) * s

The first reading of a row finds its maximum and its sum, the second, in reverse, writes dy. Float32 inside.
"""

import triton
import triton.language as tl

from microfloat.kernels.gemm.epilogue import round_bf16


@triton.jit
def cross_entropy_rows(
    logits_ptr, of_label_ptr, labels_ptr, s_ptr, loss_ptr, N, BLOCK: tl.constexpr, BF16: tl.constexpr,
    GRADIENT: tl.constexpr,
):  # fmt: skip
    """`logits` [rows, N], those `of_label` [rows], `s` float32 -> `loss` float32 and, with GRADIENT, dy over them."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr, at = logits_ptr + row * N, tl.arange(0, BLOCK)
    top, sums, first = tl.full((), float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32), 0
    while first < N:
        x = tl.load(x_ptr + first + at, mask=first + at < N, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(top - finite) + tl.exp(x - finite)
        top = higher
        first += BLOCK
    total = tl.sum(sums, 0)
    tl.store(loss_ptr + row, tl.log(total) - (tl.load(of_label_ptr + row).to(tl.float32) - top))
    if GRADIENT:
        s, label = tl.load(s_ptr + row), tl.load(labels_ptr + row)
        while first > 0:
            first -= BLOCK
            column = first + at
            x = tl.load(x_ptr + column, mask=column < N, other=0.0).to(tl.float32)
            dy = tl.exp(x - top) / total * s
            dy = tl.where(column == label, dy - s, dy)
            if BF16:  # rounded already, so that the narrowing store is exact in the interpreter too
                dy = round_bf16(dy)
            tl.store(x_ptr + column, dy.to(x_ptr.dtype.element_ty), mask=column < N)
