"""Attention between its projections: rotary embedding in one kernel, and torch's scaled_dot_product_attention.

    rotate_heads(q, k, v, cos, sin)    q and k turned by their positions; one launch forward, one backward on a GPU
    attend(q, k, v, ...)               softmax(q k^T / sqrt(D) + mask) v in the dtype of q, by torch

The products of attention run in the dtype of q, not under a recipe. torch picks the kernel; on Hopper that is cuDNN's
for bfloat16 and float16 (`attention_kernel` says which, docs/modules.md).

Legend: B = sequences, S = tokens of a sequence, T = tokens of all sequences, H = heads, G = heads of k and v, D = size
of a head, R = elements of a head that are rotated.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from microfloat.arguments import check_int
from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.torch import backends
from microfloat.torch._typing import Context, Maybe
from microfloat.torch.tensor.checks import check_beside

__all__ = [
    "Packed", "apply_rotary", "attend", "attention_kernel", "check_together", "is_for_flash", "joint_mask",
    "rotate_heads", "rotated_by_torch", "split_heads",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- rotary


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
    """q, k (rotated) and v (as it is), each [B, S, heads, D].

    `made`: q and k, or q, k and v, each [B, S, heads, D]; or, with `split` (H, G, G), all of them as one [B, S, H + 2
    G, D], which is what one product gives.
    """
    cos, sin = _table("cos", cos, made[0]), _table("sin", sin, made[0])
    first = made[0]
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
    """One launch forward, one backward; the gradient of a joint input is joint."""

    @staticmethod
    def forward(
        ctx: Context,
        cos: torch.Tensor,
        sin: torch.Tensor,
        split: Sequence[int] | None,
        interleaved: bool,
        *made: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.split, ctx.interleaved = split, interleaved
        parts = list(made[0].split(list(split), 2)) if split is not None else list(made)
        return _launch(parts, cos, sin, interleaved, False, copies=split is not None)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise NotSupportedError("apply_rotary: got a second derivative, needed the first only.")
        made = _launch(list(gradients), cos, sin, ctx.interleaved, True, copies=ctx.split is not None)
        if ctx.split is None:
            return None, None, None, None, *made
        whole = made[0]._base
        assert whole is not None
        return None, None, None, None, whole


def _launch(
    parts: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, inverse: bool, copies: bool
) -> tuple[torch.Tensor, ...]:
    """q, k and v rotated, the third copied. `copies`: all of them lie in one new buffer [B, S, H + 2 G, D]."""
    parts = [part if part.stride(3) == 1 else part.contiguous() for part in parts]
    batch, length, _, size = parts[0].shape
    if copies:
        heads = [part.shape[2] for part in parts]
        whole = parts[0].new_empty((batch, length, sum(heads), size))
        outputs = list(whole.split(heads, 2))
    else:
        outputs = [part.new_empty((batch, length, part.shape[2], size)) for part in parts[:2]] + parts[2:]
    backend = backends.choose("auto", parts[0].device)
    sin = sin.to(cos.dtype)
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    backend.producers.rotate(parts, outputs, cos, sin, inverse=inverse, interleaved=interleaved)
    return tuple(outputs)


# ---------------------------------------------------------------------------------------------------------- attention


def split_heads(x: torch.Tensor, size: int) -> torch.Tensor:
    """[B, S, heads * `size`] or [T, heads * `size`] seen as [B or 1, S or T, heads, `size`]."""
    x = x if x.dim() == 3 else x.unsqueeze(0)
    return x.unflatten(-1, (-1, size))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, mask: torch.Tensor | None = None,
    window: int | None = None, cu_seqlens: torch.Tensor | None = None, cu_seqlens_kv: torch.Tensor | None = None,
    dropout: float = 0.0, scale: float | None = None, max_seqlen: int | None = None, max_seqlen_kv: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """``softmax(q k^T * scale + mask) v``, [B, S, H, D] in q's dtype; H a multiple of the heads G of k and v.

    q [B, S, H, D], k and v [B, S', G, D]. `causal`: a token sees those before it, the last token of q being that of k.
    `window`: of these the nearest `window` only, itself included. `mask`: bool, True where a token is seen, or added;
    [B, S'], [S, S'] or [B, 1 or H, S, S']. `cu_seqlens` int32 [n + 1]: B = 1, and the tokens are those of n sequences
    one after another, which do not see each other (`cu_seqlens_kv` for k and v, where theirs differ). `max_seqlen`,
    `max_seqlen_kv`: the most tokens that one of them has, without which a GPU is asked, and waited for.
    """
    if q.shape[2] % k.shape[2]:
        raise invalid_value("num_kv_heads", str(k.shape[2]), f"a divisor of the {q.shape[2]} heads of q")
    of_q, of_kv = Packed(cu_seqlens, max_seqlen), Packed(cu_seqlens_kv, max_seqlen_kv)
    check_together(of_q, of_kv)
    if cu_seqlens is not None:
        of_kv = of_q if cu_seqlens_kv is None else of_kv
        return _packed(q, k, v, causal, window, of_q, of_kv, mask, dropout, scale)
    (batch, length), length_kv = q.shape[:2], k.shape[1]
    is_causal = causal and mask is None and window is None
    if length != length_kv:  # a branch, since in compiled code of any length a comparison is no bool
        is_causal = False
    combined = None if is_causal else joint_mask(length, length_kv, q.device, causal, window, mask, batch)
    return _attention(q, k, v, combined, is_causal, dropout, scale)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, dropout: float,
    scale: float | None,
) -> torch.Tensor:  # fmt: skip
    grouped = q.shape[2] != k.shape[2]
    if grouped and (q.dtype == torch.float32 and q.is_cuda):  # no kernel of torch's shares heads in float32
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
        grouped = False
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
    return y.transpose(1, 2)


def joint_mask(
    length: int, length_kv: int, device: torch.device, causal: bool, window: int | None, mask: torch.Tensor | None,
    batch: int,
) -> torch.Tensor | None:  # fmt: skip
    """One mask for all that says which tokens are seen; None where all are."""
    made = None
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
        raise invalid_value(
            "attention_mask",
            f"shape {tuple(mask.shape)} for {batch} sequences of {length} tokens, which is [B, S'] and [S, S'] alike",
            "four axes, which say what it is",
            "For padding pass mask[:, None, None, :], for pairs of tokens mask[None, None].",
        )
    elif mask.dim() == 3:
        mask = mask[:, None]
    if mask.shape[-1] != length_kv or mask.shape[-2] not in (1, length):
        needed = f"[B, {length_kv}], [{length}, {length_kv}] or [B, 1 or heads, {length}, {length_kv}]"
        raise invalid_value("attention_mask", f"shape {tuple(mask.shape)}", needed)
    if not mask.is_floating_point():
        mask = mask.bool()
        return mask if made is None else mask & made
    return mask if made is None else mask.masked_fill(~made, float("-inf"))


class Packed(NamedTuple):
    """Sequences one after another: cumulative lengths int32 [n + 1], and the most tokens of one (None: unknown)."""

    cu_seqlens: torch.Tensor | None
    max_seqlen: int | None

    def longest(self) -> int:
        """The length of the longest; without `max_seqlen` the host waits for a GPU to read it."""
        assert self.cu_seqlens is not None
        return _longest_of(self.cu_seqlens) if self.max_seqlen is None else self.max_seqlen

    def check(self, suffix: str, x: torch.Tensor) -> torch.Tensor:
        """`cu_seqlens`. Raises for what is no tensor of integers and, on a CPU, for values that do not fit x."""
        name, name_max = f"cu_seqlens{suffix}", f"max_seqlen{suffix}"
        cu, tokens = self.cu_seqlens, x.shape[1]
        if not isinstance(cu, torch.Tensor) or cu.dtype not in (torch.int32, torch.int64):
            got = f"dtype {cu.dtype}" if isinstance(cu, torch.Tensor) else type(cu)
            raise invalid_type(name, got, "an int32 tensor [n + 1]")
        if cu.dim() != 1 or not len(cu):
            raise invalid_value(name, f"shape {tuple(cu.shape)}", "[n + 1]")
        if x.shape[0] != 1:
            raise invalid_value("x", f"{x.shape[0]} rows of tokens", f"one row [T, ...] of sequences with {name}")
        if _is_known(cu) and (int(cu[0]) != 0 or bool((cu.diff() < 0).any()) or cu[-1] != tokens):
            needed = f"numbers that ascend from 0 to {tokens}, the number of tokens"
            remedy = "Padding between or after sequences is a sequence of its own, or an attention_mask."
            raise invalid_value(name, str(cu.tolist()), needed, remedy)
        if self.max_seqlen is not None:
            check_int(name_max, self.max_seqlen, 0, 1 << 31)
            if _is_known(cu) and self.max_seqlen < (most := _longest_of(cu)):
                raise invalid_value(name_max, self.max_seqlen, f"at least {most}, the tokens of the longest sequence")
        return cu


def _longest_of(cu_seqlens: torch.Tensor) -> int:
    return int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0


def check_together(of_q: Packed, of_kv: Packed) -> None:
    """Raise InvalidValueError for what describes packed sequences without the `cu_seqlens` that it belongs to."""
    for suffix, of in (("", of_q), ("_kv", of_kv)):
        if of.max_seqlen is not None and of.cu_seqlens is None:
            raise invalid_value(
                f"max_seqlen{suffix}",
                f"{of.max_seqlen!r} without cu_seqlens{suffix}",
                f"None, or both: cu_seqlens{suffix} says where sequences end",
            )
    if of_kv.cu_seqlens is not None and of_q.cu_seqlens is None:
        raise invalid_value("cu_seqlens_kv", "a tensor without cu_seqlens", "None, or both")


def _sequence_of(cu: torch.Tensor, tokens: int) -> torch.Tensor:
    """The number of the sequence of `cu` [n + 1] to which each token belongs, [tokens]."""
    return torch.searchsorted(cu[1:], torch.arange(tokens, dtype=cu.dtype, device=cu.device), right=True)


def _is_known(cu_seqlens: torch.Tensor) -> bool:
    """True where values can be read: the host does not wait for a GPU, and a compiler has none."""
    return cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()


def _packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, of_q: Packed, of_kv: Packed,
    mask: torch.Tensor | None, dropout: float, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """Sequences one after another in one row of tokens."""
    cu_q, cu_k = of_q.check("", q), of_kv.check("" if of_kv is of_q else "_kv", k)
    if len(cu_q) != len(cu_k):
        raise invalid_value(
            "cu_seqlens_kv", f"{len(cu_k) - 1} sequences", f"{len(cu_q) - 1}, one for each of cu_seqlens",
            "Where a sequence has no context, repeat the offset at which it would begin.",
        )  # fmt: skip
    if mask is not None:
        raise invalid_value("attention_mask", "a mask beside cu_seqlens", "one of the two")
    if is_for_flash(q, v, dropout):
        longest = of_q.longest(), of_kv.longest()
        y = _varlen(q[0], k[0], v[0], (cu_q.int(), cu_k.int()), longest, causal, window, scale)
        return y.unsqueeze(0)
    ids_q, ids_k = _sequence_of(cu_q, q.shape[1]), _sequence_of(cu_k, k.shape[1])
    seen = ids_q[:, None] == ids_k[None, :]
    if causal or window is not None:  # positions counted from the end of each sequence
        at, of = (cu[ids + 1] - torch.arange(len(ids), device=cu.device) for cu, ids in ((cu_q, ids_q), (cu_k, ids_k)))
        if causal:
            seen = seen & (of[None, :] >= at[:, None])
        if window is not None:
            seen = seen & ((of[None, :] - at[:, None]).abs() < window)
    return _attention(q, k, v, seen, False, dropout, scale)


# ------------------------------------------------------------------------------------------------ flash attention


def is_for_flash(q: torch.Tensor, v: torch.Tensor, dropout: float) -> bool:
    """True for what torch's flash attention of variable length takes; it has no rules for transforms of torch.func."""
    size = q.shape[-1]
    is_taken = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0
    is_taken = is_taken and size % 8 == 0 and size <= 256 and v.shape[-1] == size
    return is_taken and (torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active())


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: tuple[torch.Tensor, torch.Tensor], longest: tuple[int, int],
    causal: bool, window: int | None, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """y [T, H, D], by torch's attention of variable length."""
    reach = (-1, -1) if window is None else (window - 1, window - 1)
    reach = (reach[0], 0) if causal else reach
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    from torch.nn.attention.varlen import varlen_attn

    y: torch.Tensor = varlen_attn(q, k, v, *cu, *longest, scale=scale, window_size=reach)  # type: ignore[assignment]
    return y


def attention_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True) -> str:
    """The kernel that torch takes for such an attention without a mask, in words; nothing runs.

    q [B, S, H, D], k and v [B, S', G, D].
    """
    if not q.is_cuda:
        return "torch's attention on " + q.device.type
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    choose = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]
    choice = choose(q, k, v, None, 0.0, causal, enable_gqa=q.shape[1] != k.shape[1])
    names = {0: "plain operations (softmax in memory)", 1: "flash attention", 2: "memory-efficient attention",
             3: "cuDNN's attention"}  # fmt: skip
    return names.get(int(choice), "another kernel") + ", chosen by torch"
