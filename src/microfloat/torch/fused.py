"""Functions that cast what a norm or an activation makes as it is made, for modules of one's own."""

from microfloat.torch.nn.functional import (
    Produced,
    activation_linear,
    dact_dbias_quantize,
    dact_quantize,
    dbias_quantize,
    gelu_quantize,
    layer_norm_quantize,
    norm_linear,
    norm_mlp,
    rms_norm_quantize,
    swiglu_quantize,
)

__all__ = [
    "Produced",
    "activation_linear",
    "dact_dbias_quantize",
    "dact_quantize",
    "dbias_quantize",
    "gelu_quantize",
    "layer_norm_quantize",
    "norm_linear",
    "norm_mlp",
    "rms_norm_quantize",
    "swiglu_quantize",
]
