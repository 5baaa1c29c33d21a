"""How much of each operand a recipe flushes to zero, measured inside a training step.

``underflow = #(t != 0 and dequantize(quantize(t)) == 0) / #(t != 0)``, summed over the quantized layers, for the
operands of fprop (x, w) and dgrad (dy). What is flushed is lost to the GEMM, so this is the first thing to look at when
a recipe's loss lags behind.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import microfloat.torch as mf
from microfloat.recipes import Cast, Delayed, Recipe

__all__ = ["Underflow", "measure_underflow"]


class Underflow:
    """Counts per operand; `fractions` is what the report shows."""

    def __init__(self) -> None:
        self.non_zero = {"x": 0, "w": 0, "dy": 0}
        self.flushed = {"x": 0, "w": 0, "dy": 0}

    def fractions(self) -> dict[str, float]:
        """``{"x": ..., "w": ..., "dy": ...}``, each in [0, 1]."""
        return {operand: self.flushed[operand] / max(1, self.non_zero[operand]) for operand in self.non_zero}

    def add(self, operand: str, tensor: Tensor, cast: Cast | None, layer: nn.Module) -> None:
        """Quantize a copy of `tensor` the way the layer does and count. `cast` None: the rounding to bf16."""
        tensor = tensor.detach().reshape(-1, tensor.shape[-1]).to(torch.bfloat16)
        if cast is None:
            rounded = tensor
        else:
            delayed = isinstance(cast.scaling, Delayed)
            rounded = mf.quantize(
                tensor,
                cast,
                # A seed of our own: a draw from the default generator would change the rest of the training.
                seed=0 if cast.is_stochastic else None,
                scale_enc=getattr(layer, f"scaling_{operand}_scale") if delayed else None,
            ).dequantize()
        self.non_zero[operand] += int(tensor.count_nonzero())
        self.flushed[operand] += int(((tensor != 0) & (rounded == 0)).sum())


@contextmanager
def measure_underflow(layers: dict[nn.Module, Recipe | None]) -> Iterator[Underflow]:
    """Count while the block runs forward and backward through `layers` (layer -> its recipe).

    Hooks only look: the step computes the same bits with and without them.
    """
    counts = Underflow()

    def after_forward(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        recipe = layers[layer]
        counts.add("x", inputs[0], recipe and recipe.fprop.lhs, layer)
        counts.add("w", layer.weight, recipe and recipe.fprop.rhs, layer)
        output.register_hook(lambda dy: counts.add("dy", dy, recipe and recipe.dgrad.lhs, layer))

    hooks = [layer.register_forward_hook(after_forward) for layer in layers]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()
