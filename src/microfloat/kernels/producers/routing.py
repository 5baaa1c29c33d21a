"""Rows of tokens spread to the rows of their experts, and summed from there.

Token t has K experts. Its row for expert number k is ``place[t, k]`` of the rows that are sorted by expert, as many as
tokens times K. Rows from ``end = ends[G - 1]`` on belong to no expert here: they count as zeros, and are written as
zeros.
"""

import triton
import triton.language as tl

from microfloat.kernels.device.convert import stored


@triton.jit
def sum_rows(rows, place, ends, weights, out, H, G, K: tl.constexpr, BLOCK: tl.constexpr, HW: tl.constexpr):
    """``out[t] = sum of weights[t, k] * rows[place[t, k]]`` in float32, k = 0 first; one program for BLOCK columns."""
    across = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // across).to(tl.int64)
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(ends + G - 1)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        at = tl.load(place + token * K + k)
        row = tl.load(rows + at * H + column, mask=(column < H) & (at < end), other=0.0).to(tl.float32)
        if weights is not None:
            row *= tl.load(weights + token * K + k, mask=at < end, other=0.0).to(tl.float32)
        total += row
    tl.store(out + token * H + column, stored(total, out.dtype.element_ty, HW), mask=column < H)


@triton.jit
def spread_rows(
    x, place, ends, weights, rows, dots, out, H, G, K: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    HW: tl.constexpr,
):  # fmt: skip
    """``out[place[t, k]] = weights[t, k] * x[t]``, and ``dots[t, k] = x[t] . rows[place[t, k]]``; a program per token.

    `weights` None: ones. `rows` None: no dots. PADDED: K rounded up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, PADDED)
    at = tl.load(place + token * K + k, mask=k < K, other=0)
    is_live = (k < K) & (at < tl.load(ends + G - 1))
    if weights is not None:
        weight = tl.load(weights + token * K + k, mask=is_live, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros([PADDED, BLOCK], tl.float32)
    first = 0
    while first < H:
        column = (first + tl.arange(0, BLOCK))[None, :]
        inside, offset = column < H, at[:, None] * H + column
        value = tl.load(x + token * H + column, mask=inside, other=0.0).to(tl.float32)
        if rows is not None:
            total += value * tl.load(rows + offset, mask=is_live[:, None] & inside, other=0.0).to(tl.float32)
        if weights is not None:
            value *= weight
        value = tl.where(is_live[:, None], value, 0.0)
        tl.store(out + offset, stored(value, out.dtype.element_ty, HW), mask=(k < K)[:, None] & inside)
        first += BLOCK
    if rows is not None:
        dot = tl.where(is_live, tl.sum(total, 1), 0.0)
        tl.store(dots + token * K + k, dot, mask=k < K)
