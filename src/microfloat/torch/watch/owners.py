"""The layers that a weight belongs to, as `mf.watch` sees it in a call of compiled code."""

from collections.abc import Sequence

import torch
from torch import nn

from microfloat.torch.nn.experts import ExpertProduct, ExpertsLayer
from microfloat.torch.nn.linear import RecipeLayer
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor


class Owners:
    """The layers of weights that observed calls read.

    A weight that a compiler has joined has memory of its own: its layers are found by values, for which the host waits.
    """

    def __init__(self, layers: Sequence[RecipeLayer]) -> None:
        self._layers = layers
        self._by_address: dict[int, RecipeLayer] = {}  # an entry for each layer

    def of(self, weight: torch.Tensor) -> list[RecipeLayer]:
        """The layer with this weight, as a list of one; an empty list for another tensor."""
        address = _address_of(weight)
        layer = self._by_address.get(address)
        if layer is None or _address_of(layer.weight) != address:  # memory of weights moves under FSDP
            self._by_address = {}
            for one in self._layers:
                self._by_address.setdefault(_address_of(one.weight), one)
            layer = self._by_address.get(address)
        return [] if layer is None else [layer]

    def joined_in(self, weight: torch.Tensor) -> list[RecipeLayer]:
        """The layers whose first rows are those of the parts of this weight, empty where a part has no layer."""
        found: list[RecipeLayer] = []
        row = 0
        while row < weight.shape[0]:
            part = weight[row : row + 1]
            layer = next((
                one for one in self._layers if one not in found and one.weight.dim() == weight.dim() == 2
                and one.weight.shape[1:] == weight.shape[1:] and torch.equal(one.weight[:1].to(part.dtype), part)
            ), None)  # fmt: skip
            if layer is None:
                return []
            found.append(layer)
            row += layer.weight.shape[0]
        return found


def names_in(root: nn.Module) -> dict[nn.Module, str]:
    """The names of a model's modules; a layer of experts is its products, each under the name of its parameter."""
    found = {module: name for name, module in root.named_modules() if not isinstance(module, ExpertsLayer)}
    return {
        module: ".".join([*name.split(".")[:-2], module.name]) if isinstance(module, ExpertProduct) else name
        for module, name in found.items()
    }  # fmt: skip


def joint_name(names: Sequence[str]) -> str:
    """``a.q+k+v`` of a.q, a.k and a.v."""
    prefix = names[0].rpartition(".")[0]
    cut = len(prefix) + 1 if prefix else 0
    return "+".join([names[0], *(name[cut:] for name in names[1:])])


def _address_of(weight: torch.Tensor) -> int:
    return (weight.part_list()[0] if isinstance(weight, QuantizedTensor) else weight).data_ptr()


def is_compiled(model: nn.Module) -> bool:
    """True for a model whose call, or that of a part of it, is compiled."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None and not isinstance(module, nn.Linear)
        for module in model.modules() if module is not model
    ) or hasattr(model, "_orig_mod") or hasattr(model.__dict__.get("_compiled_call_impl"), "compiled")  # fmt: skip
