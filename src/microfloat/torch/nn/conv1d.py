"""Conversion of transformers' `Conv1D`, which stores its weight as [in, out], to a `Linear` and back.

The Parameter stays the same object, with the memory of the transpose, [out, in], so that every call, cast and kernel is
that of a `Linear`. State dicts hold it as [in, out], both ways.
"""

import torch
from torch import nn

from microfloat.torch._typing import StateDict
from microfloat.torch.nn.forward_rules import Forward, names_of
from microfloat.torch.nn.linear import OWN_ATTRIBUTES, Linear

_FORWARD = Forward(names_of("self x nf size view weight bias torch addmm"))


class TransposedLinear(Linear):
    """A Linear that was a `Conv1D`: its state dict holds the transpose of its weight."""

    _conv1d: type[nn.Module]

    def _save_to_state_dict(self, destination: StateDict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].t().contiguous()

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *arguments: list[str]) -> None:  # type: ignore[override]
        if prefix + "weight" in state_dict:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t().contiguous()
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def is_conv1d(module: nn.Module) -> bool:
    """True for a `Conv1D` as transformers writes it: ``y = x @ weight + bias``."""
    kind = type(module)
    weight = module._parameters.get("weight")
    if kind.__name__ != "Conv1D" or weight is None or weight.dim() != 2 or not hasattr(module, "nf"):
        return False
    return weight.shape[1] == module.nf and not _FORWARD.why_not(kind.forward)


def why_not_linear(module: nn.Module, shared: set[int]) -> str:
    """The reason why a `Conv1D` cannot become a Linear, or ""; `shared`: ids of parameters of more than one module."""
    weight = module._parameters["weight"]
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (by a hook?); convert the model before that"
    if type(weight) is not nn.Parameter:
        return "its weight is no plain Parameter (a parametrization, or a distributed tensor)"
    return "its weight is that of another module too, which reads the transpose" if id(weight) in shared else ""


def as_linear(module: nn.Module) -> None:
    """Turn a `Conv1D` into a Linear, in place."""
    module.__dict__["_conv1d"] = type(module)
    _transpose(module)
    module.__class__ = TransposedLinear
    module.out_features, module.in_features = module.weight.shape  # type: ignore[assignment]


def as_conv1d(module: TransposedLinear) -> None:
    """Undo `as_linear`."""
    _transpose(module)
    kind = module.__dict__.pop("_conv1d")
    for name in ("out_features", "in_features", *OWN_ATTRIBUTES):
        module.__dict__.pop(name, None)
    module.__class__ = kind


def tell_adapters(model: nn.Module) -> None:
    """Tell PEFT's layers the order of the weight below each of them, in which they compute and merge their own."""
    for module in model.modules():
        if not isinstance(module.__dict__.get("fan_in_fan_out"), bool):
            continue
        base: nn.Module | None = module
        while base is not None and "base_layer" in base._modules:  # adapters of one kind around those of another
            base = base._modules["base_layer"]
        if isinstance(base, TransposedLinear) or (base is not None and is_conv1d(base)):
            module.__dict__["fan_in_fan_out"] = not isinstance(base, TransposedLinear)


def _transpose(module: nn.Module) -> None:
    weight = module._parameters["weight"]
    assert weight is not None
    gradient, weight.grad = weight.grad, None
    with torch.no_grad():
        weight.data = weight.data.t().contiguous()
        weight.grad = None if gradient is None else gradient.t().contiguous()
