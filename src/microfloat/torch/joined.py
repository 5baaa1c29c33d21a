"""Several Linears on one input as one product: their weights, neighbours in memory, are one matrix [N1 + N2 + ..., K].

`join_` moves parameters next to each other, keeping each Parameter the object that it was; `units_of` finds those that
lie so and run alike. One product then takes the place of several: its cast, its scales and, under delayed scaling, its
state are those of the joint matrix (the state is kept by the first of the layers). Where parameters were moved apart,
by FSDP for example, each layer multiplies for itself.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from microfloat.recipes import Recipe
from microfloat.torch.context import Ambient
from microfloat.torch.nn.linear import Linear

__all__ = ["Unit", "is_bare", "join_", "units_of"]


def is_bare(module: nn.Module) -> bool:
    """True while a call of `module` runs the forward of its class, without hooks; else it must be called itself."""
    return "forward" not in module.__dict__ and not (
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


class Unit(NamedTuple):
    """Linears that are multiplied at once; `layer` is the first of them, whose settings and state are used."""

    layer: Linear
    layers: tuple[Linear, ...]
    recipe: Recipe | None
    weight: torch.Tensor
    bias: torch.Tensor | None


def units_of(layers: Sequence[Linear], state: Ambient | None, join: bool) -> list[Unit]:
    """One unit for all layers if they can be one (and `join`), else one for each."""
    recipes = [layer._resolve(state) for layer in layers]
    if join and len(layers) > 1 and all(recipe == recipes[0] for recipe in recipes[1:]) and _lie_joined(layers):
        weight = _Join.apply(*(layer.weight for layer in layers))
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])  # type: ignore[misc]
        return [Unit(layers[0], tuple(layers), recipes[0], weight, bias)]
    return [
        Unit(layer, (layer,), recipe, layer.weight, layer.bias)
        for layer, recipe in zip(layers, recipes, strict=True)
    ]  # fmt: skip


def _lie_joined(layers: Sequence[Linear]) -> bool:
    first = layers[0].weight
    address, width = first.data_ptr(), first.shape[-1]
    for layer in layers:
        weight = layer._parameters.get("weight")
        if (
            type(weight) is not nn.Parameter or type(layer) is not Linear or weight.data_ptr() != address
            or address == 0 or weight.dtype != first.dtype or weight.shape[1] != width or not weight.is_contiguous()
            or weight.requires_grad != first.requires_grad or (layer.bias is None) != (layers[0].bias is None)
            or layer.backend != layers[0].backend or layer.fuse_wgrad_accumulation
            or not is_bare(layer)
        ):  # fmt: skip
            return False
        address += weight.numel() * weight.element_size()
    storage = first.untyped_storage()
    return address - storage.data_ptr() <= storage.nbytes()


class _Join(torch.autograd.Function):
    """The matrix that neighbouring weights make; its gradient is theirs, without a copy."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> torch.Tensor:
        ctx.rows = [weight.shape[0] for weight in weights]
        first = weights[0]
        shape = (sum(ctx.rows), first.shape[1])
        # Not a view, for autograd: nobody writes to it.
        whole = torch.empty(0, dtype=first.dtype, device=first.device)
        return whole.set_(first.untyped_storage(), first.storage_offset(), shape, (shape[1], 1))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients[0].split(ctx.rows)


@torch.no_grad()
def join_(layers: Sequence[Linear]) -> bool:
    """Move the weights of these layers next to each other in memory; False where they cannot be (nothing is changed).

    Values, Parameter objects and state-dict keys stay. Memory is needed for one more copy of the weights meanwhile.
    """
    weights = [layer._parameters.get("weight") for layer in layers]
    first = weights[0]
    for weight in weights:
        if (
            type(weight) is not nn.Parameter or first is None or weight.is_meta or weight.dim() != 2
            or (weight.device.type == "cpu" and weight.is_shared())  # with other processes, and must stay so
            or weight.dtype != first.dtype or weight.device != first.device or weight.shape[1] != first.shape[1]
        ):  # fmt: skip
            return False
    if len({id(weight) for weight in weights}) != len(weights) or _lie_joined(layers):
        return _lie_joined(layers)
    whole = torch.cat([weight.detach() for weight in weights])  # type: ignore[union-attr]
    for weight, part in zip(weights, whole.split([w.shape[0] for w in weights]), strict=True):  # type: ignore[union-attr]
        weight.data = part  # type: ignore[union-attr]
    return True
