"""Attention by torch, as the modules call it, and rotary embedding."""

from microfloat.torch.nn.sdpa import apply_rotary, attend

__all__ = ["apply_rotary", "attend"]
