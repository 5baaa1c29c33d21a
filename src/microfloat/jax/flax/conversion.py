"""Conversion of a model of Flax nnx: every product that its layers keep in an attribute gets the op of a recipe."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from microfloat.jax.flax.nnx import DotGeneral, EinsumOp, RaggedDot, check_model, grouped_products, name_of_product
from microfloat.jax.ragged_dot import RaggedDot as RaggedOp
from microfloat.recipes import Placement, Recipe, placement
from microfloat.recipes.names import as_recipe
from microfloat.recipes.placement import DEFAULT_EXCLUDE, ConversionReport, ConversionRow

__all__ = ["DEFAULT_EXCLUDE", "ConversionReport", "ConversionRow", "convert", "revert"]

_LOG = logging.getLogger("microfloat")


class _Target(NamedTuple):
    """A layer of Flax: the attribute that holds its product, our module for it, and Flax's own function."""

    layer: type
    attribute: str
    op: type[DotGeneral]
    plain: Callable


_TARGETS = (
    _Target(nnx.Linear, "dot_general", DotGeneral, lax.dot_general),
    _Target(nnx.LinearGeneral, "dot_general", DotGeneral, lax.dot_general),
    _Target(nnx.Einsum, "einsum_op", EinsumOp, jnp.einsum),
)
_OURS = DotGeneral | RaggedOp


def convert(
    model: nnx.Module, recipe: Recipe | Placement | Mapping[str, Recipe | str | None] | str | os.PathLike, *,
    filter: Callable[[str, nnx.Module], bool] | None = None,
    exclude: Sequence[str] = DEFAULT_EXCLUDE, rngs: nnx.Rngs | None = None,
) -> ConversionReport:  # fmt: skip
    """Give every Linear, LinearGeneral and Einsum of `model` (those inside attention too) the recipe's op, in place,
    and every module of experts: one that keeps `jax.lax.ragged_dot`, or this library's, in an attribute and calls that.

    `recipe`: a Recipe (or name) for all layers, or a `Placement` by dotted name: the first pattern that matches
    decides, None is high precision; a dictionary or a file of one. ``filter(name, layer)`` leaves out layers for which
    it is false, `exclude` is a list of name patterns (default: heads, routers and LoRA adapters; () excludes nothing).
    A layer whose product is neither Flax's nor this library's is left out too. `rngs` feeds stochastic recipes.
    Parameters are untouched. State of layers that nnx.vmap made, stacked along their first axis, is stacked like their
    kernels. Returns a report that prints as a table. Raises InvalidTypeError and InvalidValueError for other arguments,
    PlacementError for patterns that match no layer, and InvalidValueError where no layer is left to convert; then
    nothing changes.
    """
    check_model(model)
    recipe = Placement(dict(recipe)) if isinstance(recipe, Mapping) else placement.as_placement(recipe)
    if not isinstance(recipe, Placement):
        recipe = as_recipe(recipe)  # type: ignore[arg-type]  # a path became a Placement
    exclude = placement.check_exclude(exclude)
    placement.check_filter(filter)
    layers = _layers(model)
    chosen: Mapping[str, Recipe | None] = dict.fromkeys((name for name, _, _ in layers), recipe)  # type: ignore[arg-type]
    if isinstance(recipe, Placement):
        ops = {name: getattr(layer, target.attribute) for name, layer, target in layers}
        chosen = recipe.resolve(ops, {name: op.recipe for name, op in ops.items() if isinstance(op, _OURS)})
    gates = placement.gates_of_mlps(exclude, {name: _features(layer) for name, layer, _ in layers})
    made = {}
    for name, layer, target in layers:
        reason = _refusal(name, layer, target, exclude, filter, gates)
        if reason is None and name not in chosen:
            reason = "no pattern of the placement matches"
        pinned = chosen[name] if reason is None else None
        made[name] = reason, pinned and target.op(pinned, rngs=rngs, **_sizes(layer, target))
    rows = [_install(name, layer, target, *made[name]) for name, layer, target in layers]
    if isinstance(recipe, Placement):
        rows = [replace(row, reason=row.reason or recipe.of_gemms(row.name, list(made))) for row in rows]
    unseen = tuple(_unseen(model, layers))
    if all(row.action == "skipped" for row in rows):
        layers_of_flax = "nnx.Linear, LinearGeneral or Einsum", "an nnx.Linear, LinearGeneral, Einsum or experts"
        raise placement.nothing_left(model, "convert", [row.reason for row in (*rows, *unseen)], layers_of_flax)
    report = ConversionReport(tuple(rows), _share(model, layers, rows), unseen)
    _LOG.info("%s", report)
    return report


def revert(model: nnx.Module) -> nnx.Module:
    """Put Flax's own products back into every layer of `model`, in place, and return it; state is dropped."""
    check_model(model)
    for _, layer, target in _layers(model):
        if isinstance(getattr(layer, target.attribute), _OURS):
            setattr(layer, target.attribute, nnx.static(target.plain))
    return model


def _refusal(
    name: str, layer: nnx.Module, target: _Target, exclude: Sequence[str], keep: Callable | None, gates: frozenset[str]
) -> str | None:
    if getattr(layer, "dot_general_cls", None) is not None:
        return "dot_general_cls is set, which Flax prefers"
    own = getattr(layer, target.attribute)
    if own is not None and own is not target.plain and not isinstance(own, _OURS):
        return f"it has a product of its own, in its attribute {target.attribute}"
    if target.op is RaggedDot and not _sizes(layer, target):
        return "no kernels [.., experts, in, out] in it tell how many experts it has; write RaggedDot(num_groups=...)"
    return placement.why_left_out(name, layer, exclude, keep, gates)


def _install(name: str, layer: Any, target: _Target, reason: str | None, op: DotGeneral | None) -> ConversionRow:
    """Put `op` into a layer, or Flax's own product where the placement says None; the row of the report."""
    before = getattr(layer, target.attribute)
    has_recipe = isinstance(before, _OURS) and before.recipe is not None
    shape = _features(layer)
    if reason is not None:
        kept = before.recipe if has_recipe else None
        return ConversionRow(name, shape, "kept" if has_recipe else "skipped", kept, reason)
    if op is None:
        if isinstance(before, _OURS):
            setattr(layer, target.attribute, nnx.static(target.plain))
        return ConversionRow(name, shape, "high precision", None, "the placement says None")
    setattr(layer, target.attribute, nnx.data(op))
    return ConversionRow(name, shape, "repinned" if has_recipe else "converted", op.recipe, "")


def _features(layer: Any) -> tuple[int, int] | None:
    """(out features, in features) of a layer, several axes multiplied; None for an Einsum and for several kernels."""
    if not isinstance(layer, nnx.Linear | nnx.LinearGeneral):
        shapes = {tuple(kernel.shape[-2:]) for kernel in _kernels(layer)}
        return None if isinstance(layer, nnx.Einsum) or len(shapes) != 1 else shapes.pop()[::-1]
    out_features, in_features = (np.prod(sizes, dtype=int) for sizes in (layer.out_features, layer.in_features))
    return int(out_features), int(in_features)


def _share(model: nnx.Module, layers: "list[_Entry]", rows: list[ConversionRow]) -> float:
    """The part of the model's parameters that layers hold all of whose products run a recipe."""

    def count(tree: Any) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    plain = {id(entry.layer) for entry, row in zip(layers, rows, strict=True) if row.recipe is None}
    running = {id(entry.layer): entry for entry in layers if id(entry.layer) not in plain}
    quantized = sum(
        count(_kernels(layer) if target.op is RaggedDot else nnx.state(layer, nnx.Param))
        for _, layer, target in running.values()
    )
    return quantized / max(count(nnx.state(model, nnx.Param)), 1)


class _Entry(NamedTuple):
    """A product of a model: its name in patterns and reports, the module that holds it, and its target."""

    name: str
    layer: nnx.Module
    target: _Target


def _layers(model: nnx.Module) -> list[_Entry]:
    found = []
    for path, module in nnx.iter_modules(model):
        name = ".".join(map(str, path))
        found += [_Entry(name, module, target) for target in _TARGETS if isinstance(module, target.layer)]
        grouped = grouped_products(module)
        for attribute in grouped:
            target = _Target(type(module), attribute, RaggedDot, lax.ragged_dot)
            found.append(_Entry(name_of_product(path, attribute, len(grouped)), module, target))
    return sorted(found, key=lambda entry: entry.name)


def _is_kernel(value: object) -> bool:
    return isinstance(value, nnx.Param) and value.ndim > 2


def _kernels(layer: nnx.Module) -> list[Any]:
    """The parameters [.., G, K, N] that a module of experts holds itself."""
    return [value for value in vars(layer).values() if _is_kernel(value)]


def _sizes(layer: Any, target: _Target) -> dict[str, Any]:
    """The options of a layer's op that its kernels decide; none for experts whose number is not known."""
    if target.op is not RaggedDot:
        return {"stacked": _stacked(layer)}
    sizes = {tuple(kernel.shape[:-2]) for kernel in _kernels(layer)}
    if len(sizes) == 1:
        *stacked, number = sizes.pop()
        return {"stacked": tuple(stacked), "num_groups": number}
    own = getattr(layer, target.attribute)
    return {"num_groups": own.num_groups} if isinstance(own, RaggedDot) else {}


def _unseen(model: nnx.Module, layers: list[_Entry]) -> Iterable[ConversionRow]:
    """Modules of the user's own that hold parameters of three axes and keep no product which could be replaced."""
    seen = {id(entry.layer) for entry in layers}
    for path, module in nnx.iter_modules(model):
        is_own = not type(module).__module__.startswith("flax.") and id(module) not in seen
        named = vars(module).items() if is_own else ()
        if names := [name for name, value in named if _is_kernel(value) and value.shape[0] > 1]:
            reason = f"3-D parameters {', '.join(names)}: keep jax.lax.ragged_dot in an attribute, and call that"
            yield ConversionRow(".".join(map(str, path)), None, "not seen", None, reason)


def _stacked(layer: Any) -> tuple[int, ...]:
    """The leading axes that nnx.vmap or nnx.scan gave to a layer's kernel."""
    if isinstance(layer, nnx.Einsum):
        own = tuple(layer.kernel_shape)
    elif isinstance(layer, nnx.LinearGeneral):
        own = (*layer.batch_axis.values(), *layer.in_features, *layer.out_features)
    else:
        own = (layer.in_features, layer.out_features)
    shape = tuple(layer.kernel.shape)
    lead = max(len(shape) - len(own), 0)
    return shape[:lead] if shape[lead:] == own else ()
