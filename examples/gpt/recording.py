"""Look at the operands of every quantized layer during one torch step; the step computes the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from microfloat.recipes import Recipe
from microfloat.torch.seeds import draw_seed

__all__ = ["record_operands"]

Arrays = dict[str, np.ndarray]


@contextmanager
def record_operands(layers: dict[str, nn.Module], recipe: Recipe | None) -> Iterator[dict[str, Arrays]]:
    """Fill a dictionary (layer -> x, w, y, dy, dw and the call seed) while a block runs forward and backward."""
    found: dict[str, Arrays] = {name: {} for name in layers}
    hooks = []
    for name, layer in layers.items():
        hooks += _watch(layer, found[name], recipe)
    try:
        yield found
        for name, layer in layers.items():
            found[name]["dw"] = _array(layer.weight.grad)
    finally:
        for hook in hooks:
            hook.remove()


def _watch(layer: nn.Module, found: Arrays, recipe: Recipe | None) -> list:
    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if recipe is not None and recipe.is_stochastic:
            # The seed that the layer is about to draw: drawn here too, and put back.
            with torch.random.fork_rng(devices=[inputs[0].device] if inputs[0].is_cuda else []):
                found["seed"] = draw_seed(inputs[0].device).cpu().numpy().astype(np.uint32)

    def after(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found["x"], found["w"] = _array(inputs[0].bfloat16()), _array(layer.weight.bfloat16())
        found["y"] = _array(output)
        output.register_hook(lambda dy: found.update(dy=_array(dy)))

    return [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]


def _array(tensor: Tensor) -> np.ndarray:
    """A float32 copy on the host: clipping changes gradients in place."""
    return tensor.detach().to(torch.float32, copy=True).reshape(-1, tensor.shape[-1]).cpu().numpy()
