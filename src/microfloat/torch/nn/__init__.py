"""Modules: nn layers whose GEMMs run under a recipe."""

from microfloat.torch.nn.attention import KVCache, MultiheadAttention, RotaryEmbedding
from microfloat.torch.nn.fused import LayerNormLinear, LayerNormMLP
from microfloat.torch.nn.grouped_linear import GroupedLinear
from microfloat.torch.nn.linear import Linear
from microfloat.torch.nn.norms import LayerNorm, RMSNorm
from microfloat.torch.nn.transformer import TransformerLayer

__all__ = [
    "GroupedLinear", "KVCache", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "MultiheadAttention",
    "RMSNorm", "RotaryEmbedding", "TransformerLayer",
]  # fmt: skip
