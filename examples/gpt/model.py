"""A small decoder-only transformer, written so that `mf.convert` finds what it should.

Pre-norm RMSNorm, rotary positions, causal attention, SwiGLU, no biases, an untied head. Every matrix product of a block
is an nn.Linear, which `microfloat.torch.convert` swaps for its quantized form; embedding, norms, attention scores and
`lm_head` stay in high precision.

Legend: B = batch, T = positions, D = width, H = heads, E = width of one head, V = 256 byte values.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpt.shape import VOCABULARY, Shape

__all__ = ["GPT"]


class Attention(nn.Module):
    """Causal self-attention with rotary positions; query, key and value come from one matrix product."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x_BTD: Tensor, rotation_TE: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, dim = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, length, 3, self.heads, dim // self.heads)
        q_BHTE, k_BHTE, v_BHTE = qkv.permute(2, 0, 3, 1, 4)
        q_BHTE, k_BHTE = rotate(q_BHTE, rotation_TE), rotate(k_BHTE, rotation_TE)
        y_BHTE = attend(q_BHTE, k_BHTE, v_BHTE)
        return self.out(y_BHTE.transpose(1, 2).reshape(batch, length, dim))


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate) * up)``; gate and up come from one matrix product."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.dim, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTD).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim)
        self.feed_forward = FeedForward(shape)

    def forward(self, x_BTD: Tensor, rotation_TE: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation_TE)
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))


class GPT(nn.Module):
    """Bytes in, logits over the next byte out: ``tokens [B, T] int64 -> logits [B, T, 256]``, T <= shape.context."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.lm_head = nn.Linear(shape.dim, VOCABULARY, bias=False)
        cos, sin = rotation_tables(shape.context, shape.dim // shape.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        """Normal(0, 0.02); the two matrices of a block that write to the residual stream are scaled by 1/sqrt(2 L)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes_residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
                deviation = 0.02 / (2 * self.shape.layers) ** 0.5 if writes_residual else 0.02
                nn.init.normal_(parameter, std=deviation)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        rotation_TE = self.cos[:length], self.sin[:length]
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation_TE)
        return self.lm_head(self.norm(x_BTD))

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]``, in float32."""
        logits = self(tokens_BT[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens_BT[:, 1:].flatten())

    def parameter_count(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.parameters())


def attend(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
    """Causal attention; the result has q's dtype."""
    if q_BHTE.device.type != "cpu":
        return functional.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
    # In float32, which torch's CPU kernel computes in little more than half of the time that it takes in bfloat16.
    with torch.autocast("cpu", enabled=False):
        wide = q_BHTE.float(), k_BHTE.float(), v_BHTE.float()
        return functional.scaled_dot_product_attention(*wide, is_causal=True).type_as(q_BHTE)


def rotation_tables(context: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of ``position * 10000^(-2i/E)``, both [context, E/2] (rotary positions, arXiv 2104.09864)."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x_BHTE: Tensor, rotation_TE: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + E/2) of each head by their position's angle, in float32; the result has x's dtype."""
    cos, sin = rotation_TE
    first, second = x_BHTE.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.type_as(x_BHTE)
