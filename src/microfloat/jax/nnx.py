"""Recipes in Flax nnx: a dot_general module, layers, conversion of a whole model, and training.

    model = Model(nnx.Rngs(0))
    print(mnnx.convert(model, MXFP8BlockScaling()))
    optimizer = mnnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    loss, grads = mnnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)

Parameters are untouched. Delayed-scaling state lives in `ScaleState` variables, which no filter for nnx.Param sees;
its gradient is its new value.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from microfloat.errors import PlacementError, invalid_type
from microfloat.jax._nnx_modules import DotGeneral, Einsum, EinsumOp, Linear, LinearGeneral, ScaleState
from microfloat.jax._nnx_training import Optimizer, grad, value_and_grad
from microfloat.recipes import Placement, Recipe

__all__ = [
    "ConvertReport", "DotGeneral", "Einsum", "EinsumOp", "Linear", "LinearGeneral", "Optimizer", "ScaleState",
    "convert", "grad", "value_and_grad",
]  # fmt: skip

# Layer class -> (attribute to set, module to put there, what Flax runs itself)
_TARGETS: tuple[tuple[type, str, type, Callable], ...] = (
    (nnx.Linear, "dot_general", DotGeneral, lax.dot_general),
    (nnx.LinearGeneral, "dot_general", DotGeneral, lax.dot_general),
    (nnx.Einsum, "einsum_op", EinsumOp, jnp.einsum),
)


@dataclass
class ConvertReport:
    """What `convert` did: names with their recipes, names left alone with the reason, patterns that matched nothing."""

    converted: dict[str, Recipe | None] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{name or 'the model'}: {repr(recipe) if recipe else 'high precision'}"
            for name, recipe in self.converted.items()
        ]
        lines += [f"{name or 'the model'}: skipped, {reason}" for name, reason in self.skipped.items()]
        lines += [f"pattern {pattern!r} matched nothing" for pattern in self.unmatched]
        return "\n".join(lines) or "nothing to convert"


def convert(
    model: nnx.Module,
    recipe: Recipe | Placement,
    *,
    filter: Callable[[str, nnx.Module], bool] | None = None,
    rngs: nnx.Rngs | None = None,
) -> ConvertReport:
    """Give every Linear, LinearGeneral and Einsum of `model` (those inside attention too) the recipe's op, in place.

    A `Placement` says which layer runs which recipe by its dotted name; the first pattern that matches decides,
    None is high precision. ``filter(name, layer)`` leaves out layers for which it is false. `rngs` feeds stochastic
    recipes. Parameters are untouched. State of layers that nnx.vmap made, stacked along their first axis, is stacked
    like their kernels. Returns a `ConvertReport`.
    """
    if not isinstance(model, nnx.Module):
        raise invalid_type("model", type(model), "an nnx.Module", "For linen use linen.dot_general_cls.")
    if not isinstance(recipe, Recipe | Placement):
        hint = f"Call recipes.from_name({recipe!r})." if isinstance(recipe, str) else ""
        raise invalid_type("recipe", type(recipe), "a Recipe or a Placement", hint)
    report = ConvertReport()
    layers = {name: (layer, target) for name, layer, target in _layers(model)}
    chosen: dict[str, Recipe | None] = dict.fromkeys(layers, recipe) if isinstance(recipe, Recipe) else {}
    if isinstance(recipe, Placement):
        chosen, report.unmatched = _placed(recipe, list(layers))
    for name, (layer, (_, attribute, op, plain)) in layers.items():
        if name not in chosen:
            report.skipped[name] = "no pattern matches"
        elif filter is not None and not filter(name, layer):
            report.skipped[name] = "left out by filter"
        elif getattr(layer, "dot_general_cls", None) is not None:
            report.skipped[name] = "dot_general_cls is set, which Flax prefers"
        else:
            one = chosen[name]
            made = nnx.static(plain) if one is None else nnx.data(op(one, rngs=rngs, stacked=_stacked(layer)))
            setattr(layer, attribute, made)
            report.converted[name] = one
    return report


def _layers(model: nnx.Module) -> list[tuple[str, nnx.Module, tuple]]:
    found = []
    for path, module in nnx.iter_modules(model):
        for target in _TARGETS:
            if isinstance(module, target[0]):
                found.append((".".join(map(str, path)), module, target))
                break
    return sorted(found, key=lambda entry: entry[0])


def _stacked(layer: Any) -> tuple[int, ...]:
    """The leading axes of a kernel beyond those that the layer itself gives it."""
    if isinstance(layer, nnx.Einsum):
        own = tuple(layer.kernel_shape)
    elif isinstance(layer, nnx.LinearGeneral):
        batch = tuple(layer.batch_axis.values())
        own = (*batch, *layer.in_features, *layer.out_features)
    else:
        own = (layer.in_features, layer.out_features)
    shape = tuple(layer.kernel.shape)
    lead = len(shape) - len(own)
    return shape[:lead] if lead > 0 and shape[lead:] == own else ()


def _placed(placement: Placement, names: list[str]) -> tuple[dict[str, Recipe | None], list[str]]:
    """Name -> recipe by the first pattern that matches it, and the patterns that match no name."""
    chosen: dict[str, Recipe | None] = {}
    unmatched = []
    for pattern, recipe in placement.rules:
        try:
            matched = Placement([(pattern, recipe)]).resolve(names)
        except PlacementError:
            unmatched.append(pattern)
            continue
        chosen |= {name: recipe for name in matched if name not in chosen}
    return chosen, unmatched
