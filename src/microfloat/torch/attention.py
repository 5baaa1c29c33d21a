"""Attention by torch, as the modules call it, and rotary embedding."""

from microfloat.torch.nn.sdpa import apply_rotary, attend, attention_kernel

__all__ = ["apply_rotary", "attend", "attention_kernel"]
