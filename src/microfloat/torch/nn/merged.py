"""Several Linears on one input as one product with the joint matrix [N1 + N2 + ..., K] of their weights.

The joint matrix is cast as a whole, and under delayed scaling it has one state, which the first layer keeps. Which
layers are joined depends on their settings alone (`can_join`), so that copies, compiled code and weights in any memory
give the same bits. `join_` moves weights next to each other without replacing a Parameter; the joint matrix then costs
no copy.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import nn
from torch.autograd import forward_ad

from microfloat.recipes import Recipe
from microfloat.torch._typing import Context, Maybe, StateDict
from microfloat.torch.context import Ambient
from microfloat.torch.nn.linear import Linear
from microfloat.torch.nn.options import drop_extra_state


def is_bare(module: nn.Module) -> bool:
    """True while a call of `module` runs the forward of its class, without hooks; else it must be called itself."""
    return "forward" not in module.__dict__ and not (
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


def call_layer(
    layer: Linear, x: torch.Tensor, is_first_microbatch: bool | None = None, biases: list[Maybe] | None = None
) -> torch.Tensor:
    """The output of a layer for x; `biases` receives the bias that it returns (`return_bias`), else None.

    FSDP2 frees the bias of a layer that it wraps when the call ends, so nobody can ask for it later. A layer of another
    class, after `revert` or with adapters, takes x alone.
    """
    plain = is_first_microbatch is None or not isinstance(layer, Linear)
    made = layer(x) if plain else layer(x, is_first_microbatch)
    y, bias = made if isinstance(made, tuple) else (made, None)
    if biases is not None:
        biases.append(bias)
    return y


class Unit(NamedTuple):
    """Linears that are multiplied at once, with the settings and the state of the first, `layer`."""

    layer: Linear
    layers: tuple[Linear, ...]
    recipe: Recipe | None
    weight: torch.Tensor
    bias: torch.Tensor | None


def units_of(layers: Sequence[Linear], state: Ambient | None, join: bool) -> list[Unit]:
    """One unit of all layers with `join`, where they can be one; else a unit for each layer."""
    recipes = [layer._resolve(state) for layer in layers]
    if join and all(recipe == recipes[0] for recipe in recipes[1:]) and can_join(layers):
        return [Unit(layers[0], tuple(layers), recipes[0], *joined(layers))]
    both = zip(layers, recipes, strict=True)
    return [Unit(layer, (layer,), recipe, layer.weight, layer.added_bias) for layer, recipe in both]


def _types_to_join() -> tuple[type, ...]:
    """Classes of weights that can be parts of a matrix. FSDP1 passes a call plain tensors, views of its flat parameter;
    so do transforms of torch.func, which have no rule for the join."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return (nn.Parameter,)
    return nn.Parameter, torch.Tensor


def can_join(layers: Sequence[Linear]) -> bool:
    """True for two layers or more that differ in the values of their parameters and their out features alone."""
    head = layers[0]
    first, types = head._parameters.get("weight"), _types_to_join()
    return len(layers) > 1 and all(
        type(layer) is Linear and (weight := layer._parameters.get("weight")) is not None and first is not None
        and type(weight) in types and weight.dtype == first.dtype and weight.device == first.device
        and weight.shape[1] == first.shape[1] and weight.requires_grad == first.requires_grad
        and (layer.bias is None) == (head.bias is None) and layer.return_bias == head.return_bias
        and layer.backend == head.backend and layer._pin_token == head._pin_token
        and layer.fuse_wgrad_accumulation == head.fuse_wgrad_accumulation and is_bare(layer)
        for layer in layers
    )  # fmt: skip


def joined(layers: Sequence[Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The joint weight and bias of layers that `can_join`; a copy where the weights are not neighbours in memory."""
    weights = tuple(layer.weight for layer in layers)
    biases = [layer.added_bias for layer in layers if layer.added_bias is not None]
    bias = torch.cat(biases) if biases else None
    if torch.compiler.is_compiling():
        return torch.cat(weights), bias
    whole = _Join.apply(*weights)
    whole.joined_of = weights  # the key under which its kept operands are found again
    return whole, bias


def are_neighbours(weights: Sequence[torch.Tensor]) -> bool:
    """True if the weights lie in one storage, each beginning where the one before ends."""
    address = weights[0].data_ptr()
    for weight in weights:
        if weight.data_ptr() != address or address == 0 or not weight.is_contiguous():
            return False
        address += weight.numel() * weight.element_size()
    storage = weights[0].untyped_storage()
    return address - storage.data_ptr() <= storage.nbytes()


class _Join(torch.autograd.Function):
    """The joint matrix of weights, whose gradient is split without a copy."""

    @staticmethod
    def forward(ctx: Context, *weights: torch.Tensor) -> torch.Tensor:
        ctx.rows = [weight.shape[0] for weight in weights]
        ctx.set_materialize_grads(False)
        if not are_neighbours(weights):
            return torch.cat(weights)
        first, columns = weights[0], weights[0].shape[1]
        # No view of the first weight, for autograd: nobody writes to it.
        whole = torch.empty(0, dtype=first.dtype, device=first.device)
        return whole.set_(first.untyped_storage(), first.storage_offset(), (sum(ctx.rows), columns), (columns, 1))

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        return (None,) * len(ctx.rows) if gradients[0] is None else gradients[0].split(ctx.rows)


@torch.no_grad()
def join_(layers: Sequence[Linear]) -> bool:
    """Move the weights of these layers next to each other in memory; returns False where that is not possible.

    Values, Parameter objects and state-dict keys stay. Meanwhile memory is needed for one more copy of the weights.
    """
    weights = [layer.weight for layer in layers]
    is_shared = any(weight.device.type == "cpu" and weight.is_shared() for weight in weights)  # with other processes
    are_own = all(type(weight) is nn.Parameter for weight in weights) and len({*map(id, weights)}) == len(weights)
    if is_shared or not are_own or not can_join(layers) or weights[0].is_meta:
        return False
    if are_neighbours(weights):
        return True
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, whole.split([w.shape[0] for w in weights]), strict=True):
        weight.data = part
    return True


class Composite(nn.Module):
    """A module of layers, which draws their parameters and keeps the weights of a joint product next to each other."""

    def _join(self) -> None:
        """Join the weights of a joint product; by default there is none."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._join()
        return self

    def reset_parameters(self) -> None:
        """Draw fresh parameters."""
        for module in self.children():
            if next(module.parameters(), None) is not None:  # else it may have no such method: an `attention` module
                module.reset_parameters()  # type: ignore[operator]

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *arguments: list[str]) -> None:  # type: ignore[override]
        drop_extra_state(self, state_dict, prefix, arguments[-1])
        super()._load_from_state_dict(state_dict, prefix, *arguments)
