"""Modules: nn layers whose GEMMs run under a recipe."""

from microfloat.torch.nn.grouped_linear import GroupedLinear
from microfloat.torch.nn.linear import Linear

__all__ = ["GroupedLinear", "Linear"]
