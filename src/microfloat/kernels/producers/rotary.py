"""Rotary position embedding of all heads of q and k, forward and backward; one program for each token.

    first half   y1 = x1 * c1 - x2 * s1        backward  dx1 = dy1 * c1 + dy2 * s2
    second half  y2 = x2 * c2 + x1 * s2                  dx2 = dy2 * c2 - dy1 * s1

c1, c2 and s1, s2 are the halves of the R cosines and sines of the token's position. A pair (x1, x2) is elements i and
i + R / 2 of a head, or with INTERLEAVED 2 i and 2 i + 1. Elements from R on are copied. Products are summed in float32
and rounded once.
Source: arXiv 2104.09864, section 3.4.
"""

import triton
import triton.language as tl


@triton.jit
def rotate_heads(
    x, out, x_stride, out_stride, cos, sin, HEADS: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads [D] of one token; `x_stride`, `out_stride`: distance from head to head."""
    head = tl.arange(0, PADDED)[:, None]
    i = tl.arange(0, HALF)[None, :]
    inside = (head < HEADS) & (i < R // 2)
    if INTERLEAVED:
        at, beside = 2 * i, 2 * i + 1
    else:
        at, beside = i, i + R // 2
    x1 = tl.load(x + head * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + head * x_stride + beside, mask=inside, other=0.0).to(tl.float32)
    c1 = tl.load(cos + i, mask=i < R // 2, other=0.0).to(tl.float32)
    c2 = tl.load(cos + i + R // 2, mask=i < R // 2, other=0.0).to(tl.float32)
    s1 = tl.load(sin + i, mask=i < R // 2, other=0.0).to(tl.float32)
    s2 = tl.load(sin + i + R // 2, mask=i < R // 2, other=0.0).to(tl.float32)
    if INVERSE:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    tl.store(out + head * out_stride + at, y1.to(out.dtype.element_ty), mask=inside)
    tl.store(out + head * out_stride + beside, y2.to(out.dtype.element_ty), mask=inside)
    if R < D:
        copy_heads(x + R, out + R, x_stride, out_stride, HEADS, PADDED, D - R, HALF)


@triton.jit
def copy_heads(
    x, out, x_stride, out_stride, HEADS: tl.constexpr, PADDED: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr
):
    """Copy LENGTH elements of every head."""
    head = tl.arange(0, PADDED)[:, None]
    for first in tl.static_range(0, LENGTH, CHUNK):
        i = first + tl.arange(0, CHUNK)[None, :]
        inside = (head < HEADS) & (i < LENGTH)
        tl.store(out + head * out_stride + i, tl.load(x + head * x_stride + i, mask=inside), mask=inside)


@triton.jit
def rotate_tokens(
    q, k, v, q_out, k_out, v_out, cos, sin, S, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, q_out_s, k_out_s, v_out_s,
    table_b, table_s, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PADDED: tl.constexpr, KV_PADDED: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate q and k [B, S, heads, D] and copy v, which may be None; one program per token.

    Strides of inputs: from sequence to sequence (b), token to token (s), head to head (h). Outputs are contiguous heads
    of D elements, token after token. `table_b`, `table_s`: strides of cos and sin [B or 1, S, R].
    """
    token = tl.program_id(0).to(tl.int64)
    b, s = token // S, token % S
    cos += b * table_b + s * table_s
    sin += b * table_b + s * table_s
    rotate_heads(
        q + b * q_b + s * q_s, q_out + token * q_out_s, q_h, D, cos, sin, HEADS, PADDED, D, R, HALF, INVERSE,
        INTERLEAVED,
    )  # fmt: skip
    rotate_heads(
        k + b * k_b + s * k_s, k_out + token * k_out_s, k_h, D, cos, sin, KV_HEADS, KV_PADDED, D, R, HALF, INVERSE,
        INTERLEAVED,
    )  # fmt: skip
    if v is not None:
        copy_heads(v + b * v_b + s * v_s, v_out + token * v_out_s, v_h, D, KV_HEADS, KV_PADDED, D, HALF)
