"""Functions that cast the value of a norm or an activation as it is computed, for modules of your own."""

from microfloat.torch.nn.functional import (
    Produced,
    activation_linear,
    gelu_quantize,
    layer_norm_quantize,
    norm_linear,
    norm_mlp,
    rms_norm_quantize,
    swiglu_quantize,
)

__all__ = [
    "Produced", "activation_linear", "gelu_quantize", "layer_norm_quantize", "norm_linear", "norm_mlp",
    "rms_norm_quantize", "swiglu_quantize",
]  # fmt: skip
