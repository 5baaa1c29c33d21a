"""Look at the operands of every quantized layer in one step: how much a recipe flushes to zero, and a record of them.

The step is computed once more, outside of jit and on a copy of the model, so the training does not notice.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import microfloat.jax as mj
import microfloat.jax.nnx as mnnx
from gpt_jax.model import GPT
from microfloat.recipes import Recipe

__all__ = ["operands_of", "underflow"]

Arrays = dict[str, np.ndarray]


class Found(dict):
    """Arrays by name; hashable by identity, as what a module holds beside its state must be."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def look(found: Found, y: jax.Array) -> jax.Array:
    """y itself; notes it, and its cotangent."""
    return y


def _look_forward(found: Found, y: jax.Array) -> tuple[jax.Array, None]:
    found["y"] = matrix(y)
    return y, None


def _look_backward(found: Found, _: None, dy: jax.Array) -> tuple[jax.Array]:
    found["dy"] = matrix(dy)
    return (dy,)


look.defvjp(_look_forward, _look_backward)


class Spy(nnx.Module):
    """Stands where a layer's dot_general stood, calls it, and notes what goes in and out."""

    def __init__(self, op: Callable[..., jax.Array], found: Found) -> None:
        self.op = nnx.data(op) if isinstance(op, nnx.Module) else nnx.static(op)
        self.found = nnx.static(found)

    def __call__(self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, **options: Any) -> jax.Array:
        if isinstance(self.op, mnnx.DotGeneral) and self.op.sr_rng is not None:
            options["key"] = self.op.sr_rng()  # what the op would draw itself
            self.found["seed"] = np.asarray(jax.random.bits(options["key"], (2,), "uint32"))
        lhs, rhs = note(self.found, lhs, rhs)
        return look(self.found, self.op(lhs, rhs, dimension_numbers, **options))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def note(found: Found, x: jax.Array, w_KN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both operands themselves; notes them."""
    return x, w_KN


def _note_forward(found: Found, x: jax.Array, w_KN: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
    found["x"], found["w"] = matrix(x), matrix(w_KN).T
    return (x, w_KN), None


note.defvjp(_note_forward, lambda found, _, cotangents: cotangents)


def matrix(array: jax.Array) -> np.ndarray:
    """float32 [rows, last axis] on the host."""
    return np.asarray(array.astype(jnp.float32)).reshape(-1, array.shape[-1])


def operands_of(model: GPT, tokens_BT: jax.Array, layers: list[str]) -> dict[str, Arrays]:
    """Layer -> x [M, K], w [N, K], y and dy [M, N], dw [N, K], and `seed` where something is stochastic."""
    watched = nnx.clone(model)
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(watched)}
    found = {name: Found() for name in layers}
    for name in layers:
        modules[name].dot_general = nnx.data(Spy(modules[name].dot_general, found[name]))
    gradients = mnnx.grad(lambda model: model.loss(tokens_BT))(watched)
    for name in layers:
        node = gradients
        for part in name.split("."):
            node = node[int(part) if part.isdigit() else part]
        found[name]["dw"] = matrix(node["kernel"].get_value()).T
    return {name: dict(arrays) for name, arrays in found.items()}


def underflow(model: GPT, operands: dict[str, Arrays], recipe: Recipe | None) -> dict[str, float]:
    """Share of the non-zero x, w and dy that quantization flushes to zero, over all layers (see gpt/underflow.py)."""
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    non_zero, flushed = dict.fromkeys(("x", "w", "dy"), 0), dict.fromkeys(("x", "w", "dy"), 0)
    for name, arrays in operands.items():
        scales: dict[str, jax.Array] = {}
        if recipe is not None and recipe.is_delayed:
            scales = mj.scaling.encode_scales(modules[name].dot_general.state())
        for tensor, cast in (("x", "fprop.lhs"), ("w", "fprop.rhs"), ("dy", "dgrad.lhs")):
            value = jnp.asarray(arrays[tensor], jnp.bfloat16)
            rounded = value
            chosen = None if recipe is None else recipe.cast(*cast.split("."))
            if chosen is not None:
                seed = 0 if chosen.is_stochastic else None
                rounded = mj.quantize(value, chosen, seed=seed, scale_enc=scales.get(tensor)).dequantize()
            non_zero[tensor] += int(jnp.count_nonzero(value))
            flushed[tensor] += int(((value != 0) & (rounded == 0)).sum())
    return {tensor: flushed[tensor] / max(1, non_zero[tensor]) for tensor in non_zero}
