"""A small decoder-only transformer in torch, written so that `mf.convert` finds what it should.

Pre-norm RMSNorm, rotary positions, causal attention, SwiGLU, no biases, an untied head. Every matrix product of a block
is an nn.Linear, which `microfloat.torch.convert` swaps for its quantized form; embedding, norms, attention scores and
`lm_head` stay in high precision. `sizes` has the ints dim, layers, heads, hidden (of the SwiGLU) and context.

Legend: B = batch, T = positions, D = width, H = heads, E = width of one head.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["GPT", "products"]


class Block(nn.Module):
    """Attention and a SwiGLU feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.cache: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None  # what it gives back of k and v
        self.attention_norm = nn.RMSNorm(sizes.dim)
        self.qkv = nn.Linear(sizes.dim, 3 * sizes.dim, bias=False)
        self.out = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.feed_forward_norm = nn.RMSNorm(sizes.dim)
        self.gate_up = nn.Linear(sizes.dim, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_BTD)).unflatten(-1, (3, self.heads, -1))
        q_BHTE, k_BHTE, v_BHTE = qkv.permute(2, 0, 3, 1, 4)
        q_BHTE, k_BHTE = rotate(q_BHTE, cos_TE, sin_TE), rotate(k_BHTE, cos_TE, sin_TE)
        if self.cache is not None:
            k_BHTE, v_BHTE = self.cache(k_BHTE, v_BHTE)
        y_BHTE = attend(q_BHTE, k_BHTE, v_BHTE)
        x_BTD = x_BTD + self.out(y_BHTE.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.feed_forward_norm(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.down(functional.silu(gate) * up)


class GPT(nn.Module):
    """Bytes in, logits over the next byte out: ``tokens [B, T] int64 -> logits [B, T, 256]``, T <= sizes.context."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.dim)
        self.lm_head = nn.Linear(sizes.dim, 256, bias=False)
        # Rotary positions (arXiv 2104.09864): cos and sin of ``position * 10000^(-2i/E)``, both [context, E/2].
        head_dim = sizes.dim // sizes.heads
        frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(sizes.context, dtype=torch.float32), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # Normal(0, 0.02), and less for the two matrices that write to the residual stream
                writes_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * sizes.layers) ** 0.5 if writes_residual else 0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos[:length], self.sin[:length])
        return self.lm_head(self.norm(x_BTD))

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]``, in float32."""
        logits = self(tokens_BT[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens_BT[:, 1:].flatten())


class WideProducts(TorchFunctionMode):
    """`functional.linear` of bfloat16 on a CPU as a product of the same values in float32, rounded once.

    Where a CPU has no bfloat16 instructions torch's own product is many times slower.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not functional.linear or not torch.is_autocast_enabled("cpu"):
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            x, weight, *bias = (value if value is None else value.bfloat16().float() for value in args)
            return functional.linear(x, weight, *bias).bfloat16()


def products(device_type: str) -> contextlib.AbstractContextManager:
    """How Linears multiply under torch.autocast: as torch does, but on a CPU without bfloat16 instructions."""
    slow = device_type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    return WideProducts() if slow else contextlib.nullcontext()


def attend(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
    """Causal attention; the result has q's dtype."""
    if q_BHTE.device.type != "cpu":
        return functional.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
    # In float32, which torch's CPU kernel computes in little more than half of the time that it takes in bfloat16.
    with torch.autocast("cpu", enabled=False):
        wide = q_BHTE.float(), k_BHTE.float(), v_BHTE.float()
        return functional.scaled_dot_product_attention(*wide, is_causal=True).type_as(q_BHTE)


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Turn the pairs (i, i + E/2) of each head by their position's angle, in float32; the result has x's dtype."""
    first, second = x_BHTE.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos_TE - second * sin_TE, first * sin_TE + second * cos_TE), dim=-1)
    return turned.type_as(x_BHTE)
