"""Recipes in Flax nnx: a dot_general module, layers, conversion of a whole model, and training.

    model = Model(nnx.Rngs(0))
    print(mnnx.convert(model, MXFP8BlockScaling()))
    optimizer = mnnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    loss, grads = mnnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)

Parameters are untouched. Delayed-scaling state lives in `ScaleState` variables, which no filter for nnx.Param sees;
its gradient is its new value.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from microfloat.errors import invalid_type
from microfloat.jax.flax.nnx_modules import DotGeneral, Einsum, EinsumOp, Linear, LinearGeneral, ScaleState
from microfloat.jax.flax.nnx_training import Optimizer, grad, value_and_grad
from microfloat.recipes import Placement, Recipe
from microfloat.recipes.names import as_recipe
from microfloat.recipes.placement import (
    DEFAULT_EXCLUDE,
    ConversionReport,
    ConversionRow,
    check_exclude,
    check_filter,
    gates_of_mlps,
    why_left_out,
)

__all__ = [
    "DEFAULT_EXCLUDE", "ConversionReport", "ConversionRow", "DotGeneral", "Einsum", "EinsumOp", "Linear",
    "LinearGeneral", "Optimizer", "ScaleState", "convert", "grad", "revert", "value_and_grad",
]  # fmt: skip

# Layer class -> (attribute to set, module to put there, what Flax runs itself)
_TARGETS: tuple[tuple[type, str, type, Callable], ...] = (
    (nnx.Linear, "dot_general", DotGeneral, lax.dot_general),
    (nnx.LinearGeneral, "dot_general", DotGeneral, lax.dot_general),
    (nnx.Einsum, "einsum_op", EinsumOp, jnp.einsum),
)


def convert(
    model: nnx.Module,
    recipe: Recipe | Placement | str,
    *,
    filter: Callable[[str, nnx.Module], bool] | None = None,
    exclude: Sequence[str] = DEFAULT_EXCLUDE,
    rngs: nnx.Rngs | None = None,
) -> ConversionReport:
    """Give every Linear, LinearGeneral and Einsum of `model` (those inside attention too) the recipe's op, in place.

    `recipe`: a Recipe (or name) for all layers, or a `Placement` by dotted name: the first pattern that matches
    decides, None is high precision. ``filter(name, layer)`` leaves out layers for which it is false, `exclude` is a
    list of name patterns (default: heads, routers and LoRA adapters; () excludes nothing). A layer whose product is
    neither Flax's nor this library's is left out too. `rngs` feeds stochastic recipes. Parameters are untouched. State
    of layers that nnx.vmap made, stacked along their first axis, is stacked like their kernels. Returns a report that
    prints as a table. Raises InvalidTypeError and InvalidValueError for other arguments, PlacementError for patterns
    that match no layer; then nothing changes.
    """
    _check_model(model)
    if not isinstance(recipe, Placement):
        recipe = as_recipe(recipe)
    exclude = check_exclude(exclude)
    check_filter(filter)
    layers = _layers(model)
    chosen: Mapping[str, Recipe | None] = dict.fromkeys((name for name, _, _ in layers), recipe)  # type: ignore[arg-type]
    if isinstance(recipe, Placement):
        chosen = recipe.resolve([name for name, _, _ in layers])
    gates = gates_of_mlps(exclude, {name: _features(layer) for name, layer, _ in layers})
    made = {}
    for name, layer, target in layers:
        _, _, op, _ = target
        reason = _refusal(name, layer, target, exclude, filter, gates)
        if reason is None and name not in chosen:
            reason = "no pattern of the placement matches"
        wanted = chosen[name] if reason is None else None
        made[name] = reason, wanted and op(wanted, rngs=rngs, stacked=_stacked(layer))
    rows = [_install(name, layer, target, *made[name]) for name, layer, target in layers]
    report = ConversionReport(tuple(rows), _share(model, [layer for _, layer, _ in layers], rows))
    logging.getLogger("microfloat").info("%s", report)
    return report


def revert(model: nnx.Module) -> nnx.Module:
    """Put Flax's own products back into every layer of `model`, in place; delayed-scaling state is dropped.

    Returns `model`. Raises InvalidTypeError for anything but an nnx.Module.
    """
    _check_model(model)
    for _, layer, (_, attribute, _, plain) in _layers(model):
        if isinstance(getattr(layer, attribute), DotGeneral):
            setattr(layer, attribute, nnx.static(plain))
    return model


def _check_model(model: object) -> None:
    if not isinstance(model, nnx.Module):
        raise invalid_type("model", type(model), "an nnx.Module", "For linen use linen.dot_general_cls.")


def _refusal(
    name: str, layer: nnx.Module, target: tuple, exclude: Sequence[str], keep: Callable | None, gates: frozenset[str]
) -> str | None:
    if getattr(layer, "dot_general_cls", None) is not None:
        return "dot_general_cls is set, which Flax prefers"
    _, attribute, _, plain = target
    own = getattr(layer, attribute)
    if own is not None and own is not plain and not isinstance(own, DotGeneral):
        return f"it has a product of its own, in its attribute {attribute}"
    return why_left_out(name, layer, exclude, keep, gates)


def _install(name: str, layer: Any, target: tuple, reason: str | None, op: DotGeneral | None) -> ConversionRow:
    """Put `op` into a layer, or Flax's own product where the placement says None; the row of the report."""
    _, attribute, _, plain = target
    before = getattr(layer, attribute)
    has_recipe = isinstance(before, DotGeneral)
    shape = _features(layer)
    if reason is not None:
        kept = before.recipe if has_recipe else None
        return ConversionRow(name, shape, "kept" if has_recipe else "skipped", kept, reason)
    if op is None:
        if has_recipe:
            setattr(layer, attribute, nnx.static(plain))
        return ConversionRow(name, shape, "high precision", None, "the placement says None")
    setattr(layer, attribute, nnx.data(op))
    return ConversionRow(name, shape, "repinned" if has_recipe else "converted", op.recipe, "")


def _features(layer: Any) -> tuple[int, int] | None:
    """(out features, in features) of a layer, those of several axes multiplied; None for an Einsum."""
    if isinstance(layer, nnx.Einsum):
        return None
    out_features, in_features = (np.prod(sizes, dtype=int) for sizes in (layer.out_features, layer.in_features))
    return int(out_features), int(in_features)


def _share(model: nnx.Module, layers: list[nnx.Module], rows: list[ConversionRow]) -> float:
    """The part of the model's parameters that layers with a recipe hold."""

    def count(module: nnx.Module) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))

    quantized = sum(count(layer) for layer, row in zip(layers, rows, strict=True) if row.recipe is not None)
    return quantized / max(count(model), 1)


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
