"""Attention between its projections: rotary embedding in one kernel, and torch's scaled_dot_product_attention.

The products of attention run in the dtype of q, not under a recipe. torch picks the kernel; on Hopper that is cuDNN's
for bfloat16 and float16.

Legend: B = sequences, S = tokens of a sequence, T = tokens of all sequences, H = heads, G = heads of k and v, D = size
of a head, R = elements of a head that are rotated.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from microfloat.arguments import check_int
from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.torch import backends
from microfloat.torch._typing import Context, Maybe, Options
from microfloat.torch.tensor.checks import check_beside


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated by their positions: ``y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin``, differentiable once.

    q [B, S, H, D], k [B, S, G, D]; cos, sin [S, R] or [B or 1, S, R] with R <= D even, as `RotaryEmbedding` gives them.
    Pairs are elements i and i + R / 2 of a head, with `interleaved` 2 i and 2 i + 1. Float32 inside, rounded once.
    Raises InvalidTypeError and InvalidValueError for tensors that do not fit. Source: arXiv 2104.09864, section 3.4.
    """
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            raise invalid_type(name, type(x), "a floating-point tensor [B, S, heads, D]")
        if x.dim() != 4:
            raise invalid_value(name, f"shape {tuple(x.shape)}", "[B, S, heads, D]")
    rotated = rotate_heads((q, k), None, cos, sin, interleaved)
    return rotated[0], rotated[1]


def rotate_heads(
    made: Sequence[torch.Tensor], split: Sequence[int] | None, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, ...]:
    """Rotated q and k, and v unchanged, each [B, S, heads, D].

    `made`: q and k, or q, k and v, each [B, S, heads, D]; or, with `split` (H, G, G), the one tensor [B, S, H + 2 G, D]
    that a joint product gives.
    """
    first = made[0]
    cos, sin = _table("cos", cos, first), _table("sin", sin, first)
    plain = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or first.numel() == 0
    if not plain and backends.choose("auto", first.device).producers is not None:
        return _Rotate.apply(cos, sin, split, interleaved, *made)  # type: ignore[no-any-return]
    parts = list(first.split(list(split), 2) if split is not None else made)
    return *(rotated_by_torch(part, cos, sin, interleaved) for part in parts[:2]), *parts[2:]


def _table(name: str, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """cos or sin as [B or 1, S, R]."""
    if not isinstance(table, torch.Tensor):
        raise invalid_type(name, type(table), "a tensor [S, R] or [B, S, R]")
    shape, (batch, length, _, size) = tuple(table.shape), x.shape
    table = table.unsqueeze(0) if table.dim() == 2 else table
    if table.dim() != 3 or table.shape[0] not in (1, batch) or table.shape[1] != length:
        raise invalid_value(name, f"shape {shape}", f"[{length}, R] or [{batch} or 1, {length}, R]")
    if table.shape[2] > size or table.shape[2] % 2:
        needed = f"an even one, at most the {size} elements of a head"
        raise invalid_value(name, f"{table.shape[2]} elements", needed)
    check_beside(name, table, x, "")
    return table


def rotated_by_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x rotated by torch operations."""
    count = cos.shape[-1]
    cos, sin, wide = cos[:, :, None].float(), sin[:, :, None].float(), x[..., :count].float()
    if interleaved:
        x1, x2 = wide[..., 0::2], wide[..., 1::2]
    else:
        x1, x2 = wide.chunk(2, -1)
    (c1, c2), (s1, s2) = cos.chunk(2, -1), sin.chunk(2, -1)
    halves = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    y = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    y = y.to(x.dtype)
    return y if count == x.shape[-1] else torch.cat([y, x[..., count:]], -1)


class _Rotate(torch.autograd.Function):
    """Rotation by kernels: one launch forward, one backward. A joint input has a joint gradient."""

    @staticmethod
    def forward(
        ctx: Context, cos: torch.Tensor, sin: torch.Tensor, split: Sequence[int] | None, interleaved: bool,
        *made: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(cos, sin)
        ctx.split, ctx.interleaved = split, interleaved
        parts = list(made[0].split(list(split), 2)) if split is not None else list(made)
        return _launch(parts, cos, sin, interleaved, False, copies=split is not None)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        if torch.is_grad_enabled():
            raise NotSupportedError("apply_rotary: got a second derivative, needed the first only.")
        cos, sin = ctx.saved_tensors
        made = _launch(list(gradients), cos, sin, ctx.interleaved, True, copies=ctx.split is not None)
        return None, None, None, None, *(made if ctx.split is None else (made[0]._base,))  # the parts are views of it


def _launch(
    parts: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, inverse: bool, copies: bool
) -> tuple[torch.Tensor, ...]:
    """Rotated q and k, and v. `copies`: v is copied too, and all three lie in one new buffer [B, S, H + 2 G, D]."""
    parts = [part if part.stride(3) == 1 else part.contiguous() for part in parts]
    batch, length, _, size = parts[0].shape
    if copies:
        heads = [part.shape[2] for part in parts]
        outputs = list(parts[0].new_empty((batch, length, sum(heads), size)).split(heads, 2))
    else:
        outputs = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts[:2]] + parts[2:]
    sin = sin.to(cos.dtype)
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    rotate = backends.choose("auto", parts[0].device).producers.rotate
    rotate(parts, outputs, cos, sin, inverse=inverse, interleaved=interleaved)
    return tuple(outputs)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, mask: torch.Tensor | None = None,
    window: int | None = None, cu_seqlens: torch.Tensor | None = None, dropout: float = 0.0,
    scale: float | None = None, max_seqlen: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """``softmax(q k^T * scale + mask) v``, [B, S, H, D] in q's dtype; H a multiple of the heads G of k and v.

    q [B, S, H, D], k and v [B, S', G, D]. `causal`: a token sees the tokens before it and itself, the last token of q
    being the last of k. `window`: it sees the nearest `window` tokens only, itself included. `mask`: bool, True where a
    token is seen, or added; [B, S'], [S, S'] or [B, 1 or H, S, S']. `cu_seqlens` int32 [n + 1]: B = 1, and the tokens
    of q, and of k and v, are n sequences one after another, which do not see each other. `max_seqlen`: the length of
    the longest sequence, which the host else reads from the GPU.
    """
    if q.shape[2] % k.shape[2]:
        raise invalid_value("num_kv_heads", str(k.shape[2]), f"a divisor of the {q.shape[2]} heads of q")
    check_together(cu_seqlens, max_seqlen)
    if cu_seqlens is not None:
        return _packed(q, k, v, causal, window, cu_seqlens, max_seqlen, mask, dropout, scale)
    is_causal = causal and mask is None and window is None
    if q.shape[1] != k.shape[1]:  # a branch, since in compiled code of any length a comparison is no bool
        is_causal = False
    combined = None if is_causal else joint_mask(q.shape[:2], k.shape[1], q.device, causal, window, mask)
    return _attention(q, k, v, combined, is_causal, dropout, scale)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, dropout: float,
    scale: float | None,
) -> torch.Tensor:  # fmt: skip
    if q.shape[2] != k.shape[2] and q.dtype == torch.float32 and q.is_cuda:
        k, v = _shared_heads(q, k, v, 2)  # no kernel of torch's shares heads in float32
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    options: Options = {"is_causal": is_causal, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, **options).transpose(1, 2)


def _shared_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of k and v with a head for each head of q."""
    count = q.shape[axis] // k.shape[axis]
    return k.repeat_interleave(count, axis), v.repeat_interleave(count, axis)


def joint_mask(
    of_q: Sequence[int], length_kv: int, device: torch.device, causal: bool, window: int | None, mask: Maybe
) -> Maybe:
    """The one mask that `causal`, `window` and `mask` make; None where every token is seen. `of_q`: B and S."""
    (batch, length), made = of_q, None
    if (causal and length > 1) or window is not None:
        at = torch.arange(length_kv - length, length_kv, device=device)[:, None]
        of = torch.arange(length_kv, device=device)[None, :]
        made = (of <= at) if causal else torch.ones_like(of <= at)
        if window is not None:
            made = made & (of > at - window) & (of < at + window)
    if mask is None:
        return made
    if not isinstance(mask, torch.Tensor):
        raise invalid_type("attention_mask", type(mask), "a tensor of bool or of floating point, or None")
    if mask.dim() == 2 and tuple(mask.shape) != (length, length_kv):
        mask = mask[:, None, None, :]
    elif mask.dim() == 2 and 1 < batch == length:
        got = f"shape {tuple(mask.shape)} for {batch} sequences of {length} tokens, which is [B, S'] and [S, S'] alike"
        remedy = "For padding pass mask[:, None, None, :], for pairs of tokens mask[None, None]."
        raise invalid_value("attention_mask", got, "four axes, which say what it is", remedy)
    elif mask.dim() == 3:
        mask = mask[:, None]
    if mask.shape[-1] != length_kv or mask.shape[-2] not in (1, length):
        needed = f"[B, {length_kv}], [{length}, {length_kv}] or [B, 1 or heads, {length}, {length_kv}]"
        raise invalid_value("attention_mask", f"shape {tuple(mask.shape)}", needed)
    mask = mask if mask.is_floating_point() else mask.bool()
    if made is None:
        return mask
    return mask & made if mask.dtype == torch.bool else mask.masked_fill(~made, float("-inf"))


def check_together(cu_seqlens: torch.Tensor | None, max_seqlen: int | None) -> None:
    """Raise InvalidValueError for a `max_seqlen` without the `cu_seqlens` that it belongs to."""
    if max_seqlen is not None and cu_seqlens is None:
        got, needed = f"{max_seqlen!r} without cu_seqlens", "None, or both: cu_seqlens says where sequences end"
        raise invalid_value("max_seqlen", got, needed)


def _check_packed(cu: object, max_seqlen: int | None, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raise where `cu_seqlens` is no tensor of integers, for other lengths of k, and on a CPU for wrong values."""
    if not isinstance(cu, torch.Tensor) or cu.dtype not in (torch.int32, torch.int64):
        got = f"dtype {cu.dtype}" if isinstance(cu, torch.Tensor) else type(cu)
        raise invalid_type("cu_seqlens", got, "an int32 tensor [n + 1]")
    if cu.dim() != 1 or not len(cu):
        raise invalid_value("cu_seqlens", f"shape {tuple(cu.shape)}", "[n + 1]")
    if q.shape[0] != 1:
        raise invalid_value("x", f"{q.shape[0]} rows of tokens", "one row [T, ...] of sequences with cu_seqlens")
    tokens = q.shape[1]
    if k.shape[1] != q.shape[1]:
        got, needed = f"{k.shape[1]} keys beside cu_seqlens", f"{tokens}, in the sequences of the queries"
        remedy = "Pad sequences to rows [B, S, ...] and mask the keys, or call torch.nn.attention.varlen.varlen_attn."
        raise invalid_value("cu_seqlens", got, needed, remedy)
    is_known = cu.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_known and (int(cu[0]) != 0 or bool((cu.diff() < 0).any()) or cu[-1] != tokens):
        needed = f"numbers that ascend from 0 to {tokens}, the number of tokens"
        remedy = "Padding between or after sequences is a sequence of its own, or an attention_mask."
        raise invalid_value("cu_seqlens", str(cu.tolist()), needed, remedy)
    if max_seqlen is not None:
        check_int("max_seqlen", max_seqlen, 0, 1 << 31)
        if is_known and max_seqlen < (most := int(cu.diff().max()) if len(cu) > 1 else 0):
            raise invalid_value("max_seqlen", max_seqlen, f"at least {most}, the tokens of the longest sequence")


def _packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, cu: torch.Tensor,
    max_seqlen: int | None, mask: torch.Tensor | None, dropout: float, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """`attend` for sequences one after another in one row of tokens."""
    _check_packed(cu, max_seqlen, q, k)
    if mask is not None:
        raise invalid_value("attention_mask", "a mask beside cu_seqlens", "one of the two")
    if is_for_flash(q, v, dropout):
        if max_seqlen is None:  # the host waits for the GPU to read it
            max_seqlen = int(cu.diff().max()) if len(cu) > 1 else 0
        from torch.nn.attention.varlen import varlen_attn

        q, k, v, ends, reach = q[0], k[0], v[0], cu.int(), -1 if window is None else window - 1
        if q.shape[1] != k.shape[1]:
            k, v = _shared_heads(q, k, v, 1)
        options: Options = {"scale": scale, "window_size": (reach, 0 if causal else reach)}
        return varlen_attn(q, k, v, ends, ends, max_seqlen, max_seqlen, **options).unsqueeze(0)  # type: ignore[union-attr]
    tokens = q.shape[1]
    ids = torch.searchsorted(cu[1:], torch.arange(tokens, dtype=cu.dtype, device=cu.device), right=True)
    seen, near = ids[:, None] == ids[None, :], joint_mask(q.shape[:2], tokens, q.device, causal, window, None)
    return _attention(q, k, v, seen if near is None else seen & near, False, dropout, scale)


def is_for_flash(q: torch.Tensor, v: torch.Tensor, dropout: float) -> bool:
    """True where torch's variable-length attention runs; it has no rules for transforms of torch.func."""
    size = q.shape[-1]
    is_taken = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0
    is_taken = is_taken and size % 8 == 0 and size <= 256 and v.shape[-1] == size
    return is_taken and (torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active())
