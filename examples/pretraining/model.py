"""A Llama-style model over the tokens of a text: the blocks of gpt/model.py, and a head that shares the embedding.

Embedding, norms, attention scores and head stay in high precision; a recipe is given to the blocks' Linears.
"""

from dataclasses import dataclass

import torch
from gpt.model import Block
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """A model with the training settings that suit it: `tokens` of a run, windows of a `batch`, peak `lr`.

    `evaluated`: held-out batches of each kind at the end; None: all.
    """

    dim: int
    layers: int
    heads: int
    hidden: int
    context: int
    batch: int
    tokens: int
    lr: float
    warmup: float = 0.1  # share of the steps
    weight_decay: float = 0.1
    evaluated: int | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of a run."""
        return max(1, self.tokens // (self.batch * self.context))

    @property
    def parameters(self) -> int:
        """Trained values of the blocks; embedding and head come on top."""
        return self.layers * (4 * self.dim**2 + 3 * self.dim * self.hidden + 2 * self.dim)


SIZES = {
    "seconds": Size(32, 1, 2, 64, context=16, batch=4, tokens=16 * 4 * 6, lr=3e-3, evaluated=2),
    "cpu": Size(128, 2, 4, 256, context=128, batch=16, tokens=600_000, lr=2e-3, evaluated=32),
    "30m": Size(640, 6, 10, 1792, context=512, batch=64, tokens=50_000_000, lr=1.2e-3),
    "124m": Size(768, 12, 12, 2048, context=512, batch=64, tokens=50_000_000, lr=8e-4),
}


class Model(nn.Module):
    """Tokens in, the mean loss of the next token out."""

    def __init__(self, size: Size, entries: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(entries, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, entries, bias=False)
        self.head.weight = self.embedding.weight
        # Rotary positions (arXiv 2104.09864), as in gpt/model.py.
        head_dim = size.dim // size.heads
        frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(size.context, dtype=torch.float32), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # less for the two matrices that write to the residual stream
                writes_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * size.layers) ** 0.5 if writes_residual else 0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]``."""
        x_BTD = self.embedding(tokens_BT[:, :-1])
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos, self.sin)
        return self.loss(x_BTD, tokens_BT[:, 1:])

    def loss(self, x_BTD: Tensor, labels_BT: Tensor) -> Tensor:
        """Head and cross-entropy, the latter in float32."""
        logits = self.head(self.norm(x_BTD))
        return functional.cross_entropy(logits.float().flatten(0, 1), labels_BT.flatten())
