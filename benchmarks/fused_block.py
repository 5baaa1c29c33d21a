"""The block of `benchmarks.block` on the functions of `microfloat.torch.fused`: the same parameters and casts."""

import torch

from benchmarks.block import Block
from microfloat.torch import fused


class FusedBlock(Block):
    """Norms and SwiGLU are cast as they are computed; their values are not kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = fused.norm_linear(x, self.norm1, self.qkv)  # type: ignore[arg-type]
        x1 = x + self.out(qkv[:, : self.width])
        return x1 + fused.norm_mlp(x1, self.norm2, self.gate, self.down, up=self.up)  # type: ignore[arg-type]
