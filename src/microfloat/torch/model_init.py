"""`quantized_model_init`: layers created inside hold their weights quantized only."""

import contextlib
import dataclasses
import warnings
from contextvars import ContextVar
from typing import Any

from torch import nn

from microfloat.errors import NotSupportedError, invalid_type
from microfloat.recipes import Cast, Current, Recipe, get_default_recipe
from microfloat.recipes.names import as_recipe

__all__ = ["ModelInit", "active_model_init", "fp8_model_init", "quantize_parameter", "quantized_model_init"]


@dataclasses.dataclass(frozen=True)
class ModelInit:
    """The settings of the innermost `quantized_model_init`."""

    enabled: bool
    recipe: Recipe
    preserve_high_precision_init_val: bool


_MODEL_INIT: ContextVar[ModelInit | None] = ContextVar("microfloat_model_init", default=None)


def active_model_init() -> ModelInit | None:
    """The enabled `quantized_model_init` of this thread and task, or None."""
    state = _MODEL_INIT.get()
    return state if state is not None and state.enabled else None


class quantized_model_init(contextlib.ContextDecorator):
    """Layers built inside create their weights quantized, in the recipe's fprop weight format, and nothing else.

    `recipe` None: the default recipe. `preserve_high_precision_init_val`: keep a CPU copy of each initial weight, read
    by ``layer.weight.get_high_precision_init_val()`` (to seed an optimizer's master weights) until
    ``clear_high_precision_init_val()``. The other orientation is made on demand, never stored. Optimizer steps
    dequantize, apply and requantize. Raises InvalidTypeError for a wrong recipe.
    """

    def __init__(
        self, enabled: bool = True, recipe: Recipe | str | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        for name, value in (
            ("enabled", enabled), ("preserve_high_precision_init_val", preserve_high_precision_init_val)
        ):  # fmt: skip
            if not isinstance(value, bool):
                raise invalid_type(name, type(value), "True or False")
        chosen = get_default_recipe() if recipe is None else as_recipe(recipe)
        self._state = ModelInit(enabled, chosen, preserve_high_precision_init_val)
        self._tokens: list[Any] = []

    def __enter__(self) -> "quantized_model_init":
        self._tokens.append(_MODEL_INIT.set(self._state))
        return self

    def __exit__(self, *exception: Any) -> None:
        _MODEL_INIT.reset(self._tokens.pop())


def weight_cast(recipe: Recipe) -> Cast | None:
    """The Cast of a stored weight: fprop's rhs; delayed scaling, which has no history yet, becomes current."""
    cast = recipe.fprop.rhs
    return None if cast is None else dataclasses.replace(cast, scaling=Current())


def quantize_parameter(layer: nn.Linear, request: ModelInit) -> None:
    """Replace ``layer.weight`` by a parameter that holds codes and scales only."""
    from microfloat.torch.ops import quantize
    from microfloat.torch.seeds import draw_seed

    cast = weight_cast(request.recipe)
    if cast is None:
        return
    if layer.weight.is_meta:
        raise NotSupportedError(
            "quantized_model_init: got a weight on the meta device, needed real storage to quantize. "
            "Build the layer on its final device, or load a checkpoint into plain weights first."
        )
    original = layer.weight.detach()
    seed = draw_seed(original.device, folds=False) if cast.is_stochastic else None  # replicas must round alike
    parameter = nn.Parameter(quantize(original, cast, seed=seed), requires_grad=layer.weight.requires_grad)
    if request.preserve_high_precision_init_val:
        parameter._high_precision_init_val = original.to("cpu", copy=True)  # type: ignore[attr-defined]
    layer.weight = parameter


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> quantized_model_init:
    """Deprecated name of an older TransformerEngine: `quantized_model_init`, the same state."""
    warnings.warn(
        "fp8_model_init is deprecated; use microfloat.torch.quantized_model_init.", DeprecationWarning, stacklevel=2
    )
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)
