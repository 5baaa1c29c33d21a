"""Names of older releases of TransformerEngine, kept so that ported code runs; each call warns."""

import warnings
from typing import Any

from microfloat.recipes import Recipe
from microfloat.torch.autocast import autocast
from microfloat.torch.model_init import quantized_model_init

__all__ = ["fp8_autocast", "fp8_model_init"]


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | None = None, fp8_group: Any = None
) -> autocast:
    """Deprecated: `autocast(enabled, recipe, calibrating, amax_reduction_group)`, the same state."""
    warnings.warn(
        "fp8_autocast is deprecated; use microfloat.torch.autocast(recipe=...).", DeprecationWarning, stacklevel=2
    )
    return autocast(enabled, fp8_recipe, calibrating, fp8_group)


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> quantized_model_init:
    """Deprecated: `quantized_model_init`, the same state."""
    warnings.warn(
        "fp8_model_init is deprecated; use microfloat.torch.quantized_model_init.", DeprecationWarning, stacklevel=2
    )
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)
