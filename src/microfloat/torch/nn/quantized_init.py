"""`quantized_model_init`: layers created inside hold their weights quantized only."""

import contextlib
import dataclasses
import warnings
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import nn

from microfloat.arguments import check_bool
from microfloat.errors import invalid_type, invalid_value
from microfloat.recipes import Current, Recipe, get_default_recipe
from microfloat.recipes.names import as_recipe
from microfloat.torch._typing import InitMethod
from microfloat.torch.tensor.aten_table import take
from microfloat.torch.tensor.aten_writes import keep_init_val, quantize_stored
from microfloat.torch.tensor.quantized_tensor import INIT_VAL, QuantizedTensor

# The innermost `quantized_model_init` of this thread and task.
_MODEL_INIT: "ContextVar[quantized_model_init | None]" = ContextVar("microfloat_model_init", default=None)


class quantized_model_init(contextlib.ContextDecorator):
    """Layers built inside create their weights quantized, in the recipe's fprop weight format, and nothing else.

    `recipe` None: the default recipe. `preserve_high_precision_init_val`: keep a CPU copy of each initial weight, read
    by ``layer.weight.get_high_precision_init_val()`` (to seed an optimizer's master weights) until
    ``clear_high_precision_init_val()``; `reset_parameters` replaces it, in float32. The other orientation is made on
    demand, never stored. Optimizer steps dequantize, apply and requantize. On the meta device codes and scales have no
    memory; ``to_empty`` gives them some. Experts of a `GroupedLinear` are quantized each alone. Raises InvalidTypeError
    for a wrong recipe; layers raise InvalidValueError where a tile would hold rows of two experts.
    """

    def __init__(
        self, enabled: bool = True, recipe: Recipe | str | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        check_bool("enabled", enabled)
        check_bool("preserve_high_precision_init_val", preserve_high_precision_init_val)
        self._enabled, self._preserves = enabled, preserve_high_precision_init_val
        self._recipe = get_default_recipe() if recipe is None else as_recipe(recipe)
        self._tokens: list[Token] = []

    def __enter__(self) -> "quantized_model_init":
        self._tokens.append(_MODEL_INIT.set(self))
        return self

    def __exit__(self, *exception: object) -> None:
        _MODEL_INIT.reset(self._tokens.pop())


def quantize_parameter(layer: Any) -> None:
    """Under `quantized_model_init`, replace ``layer.weight`` by a parameter that holds codes and scales only."""
    active = _MODEL_INIT.get()
    if active is None or not active._enabled or active._recipe.fprop.rhs is None:
        return
    weight = layer.weight
    cast = dataclasses.replace(active._recipe.fprop.rhs, scaling=Current())  # delayed scaling has no history yet
    original, height = weight.detach(), cast.format.block[0] or 1
    are_experts = original.dim() == 3
    if are_experts and cast.format.is_tile and original.shape[1] % height:
        raise invalid_value(
            "quantized_model_init", f"experts of {original.shape[1]} rows under {cast.format}",
            f"multiples of {height} rows, so that no tile holds rows of two experts",
            "Build this layer under quantized_model_init(enabled=False).",
        )  # fmt: skip
    q = quantize_stored(original, cast, of_experts=are_experts)
    parameter = nn.Parameter(q, requires_grad=weight.requires_grad)
    if active._preserves:
        keep_init_val(parameter, original)  # type: ignore[arg-type]
    layer.weight = parameter


@torch.no_grad()
def draw_parameters(layer: Any, draw: InitMethod) -> None:
    """Let `draw` write the weight, experts one by one, and set the bias to 0; a stored weight is quantized after."""
    weight = layer.weight
    if weight.is_meta:
        return
    values = weight
    if isinstance(weight, QuantizedTensor):
        values = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for matrix in values if values.dim() == 3 else (values,):
        draw(matrix)
    if isinstance(weight, QuantizedTensor):
        if INIT_VAL in weight._about_parameter():
            keep_init_val(weight, values)
        weight.copy_(values)
    if layer.bias is not None:
        layer.bias.zero_()


@torch.no_grad()
def update_quantized(param: torch.Tensor, src: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> None:
    """Quantize high-precision values of the shape of a QuantizedTensor into it, in place, under its Cast.

    Into some of its rows, or one expert: ``param.detach()[rows].copy_(src)``. `noop_flag`: one number on the device;
    where it is not zero nothing changes, without a wait for the device, so that a step in a CUDA graph can be skipped.
    Raises InvalidTypeError and InvalidValueError for arguments that do not fit.
    """
    if not isinstance(param, QuantizedTensor):
        raise invalid_type("param", type(param), "a QuantizedTensor", "Plain parameters take copy_().")
    if not isinstance(src, torch.Tensor) or isinstance(src, QuantizedTensor) or not src.is_floating_point():
        got = src.dtype if isinstance(src, torch.Tensor) else type(src)
        raise invalid_type("src", got, "a plain floating-point tensor, such as float32 master weights")
    if src.shape != param.shape:
        needed = f"shape {tuple(param.shape)}, as the parameter has"
        remedy = "Gather the shards of a master first; rows take copy_: param.detach()[rows].copy_(src)."
        raise invalid_value("src", f"shape {tuple(src.shape)}", needed, remedy)
    q: Any = param.detach()
    if noop_flag is None:
        q.copy_(src)
    else:  # which the device alone reads
        take(q, q.map_parts(torch.clone).copy_(src), noop_flag)


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> quantized_model_init:
    """Deprecated name of an older TransformerEngine: `quantized_model_init`, the same state."""
    warnings.warn(
        "fp8_model_init is deprecated; use microfloat.torch.quantized_model_init.", DeprecationWarning, stacklevel=2
    )
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)
