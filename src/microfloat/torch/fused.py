"""Functions that cast the value of a norm or an activation as it is computed, for modules of your own."""

from microfloat.torch.nn.functional import activation_linear, norm_linear, norm_mlp

__all__ = ["activation_linear", "norm_linear", "norm_mlp"]
