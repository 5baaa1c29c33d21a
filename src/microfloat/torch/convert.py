"""`convert` and `revert`: turn the nn.Linear layers of a model into microfloat layers, in place, and back.

A layer keeps its identity: only its class changes, so parameters, hooks, optimizers and references to the module
stay what they were.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn

from microfloat.errors import invalid_type, invalid_value
from microfloat.recipes import Placement, Recipe
from microfloat.recipes.names import as_recipe
from microfloat.recipes.placement import DEFAULT_EXCLUDE
from microfloat.torch import scaling
from microfloat.torch.nn.linear import OWN_ATTRIBUTES, Linear
from microfloat.torch.small import predict

__all__ = ["DEFAULT_EXCLUDE", "ConversionReport", "ConversionRow", "convert", "plain_state_dict", "revert"]


@dataclass(frozen=True)
class ConversionRow:
    """What happened to one layer: `action` is "converted", "repinned", "high precision" or "skipped"."""

    name: str
    shape: tuple[int, int] | None
    action: str
    recipe: Recipe | None
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """One row per linear layer that was looked at; prints as a table."""

    rows: tuple[ConversionRow, ...]

    @property
    def converted(self) -> list[str]:
        """Names of the layers that now run a recipe."""
        return [row.name for row in self.rows if row.action in ("converted", "repinned")]

    @property
    def skipped(self) -> dict[str, str]:
        """Name -> reason of the layers left in high precision."""
        return {row.name: row.reason for row in self.rows if row.action in ("skipped", "high precision")}

    def __iter__(self) -> Iterator[ConversionRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        header = ("layer", "in -> out", "action", "recipe", "reason")
        cells: list[tuple[str, ...]] = [header]
        for row in self.rows:
            shape = f"{row.shape[1]} -> {row.shape[0]}" if row.shape else "-"
            recipe = type(row.recipe).__name__ if row.recipe is not None else "-"
            cells.append((row.name or "(root)", shape, row.action, recipe, row.reason))
        widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        total = f"{len(self.converted)} of {len(self.rows)} linear layers run in low precision."
        return "\n".join([*lines, total])


def convert(
    model: nn.Module,
    recipe: Recipe | Placement | str,
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,
    exclude: Sequence[str] = DEFAULT_EXCLUDE,
    skip_small: int | None = None,
) -> ConversionReport:
    """Turn every nn.Linear of `model` into a microfloat Linear pinned to its recipe; in place, parameters shared.

    `recipe`: a Recipe (or name) for all layers, or a Placement by name pattern. Exactly nn.Linear is converted, not
    subclasses; layers that are microfloat Linears already are pinned anew. `filter(name, module) -> bool` keeps layers
    out, `exclude` is a list of name patterns (default: heads, routers and LoRA adapters; () excludes nothing).
    `skip_small`: rows (tokens) that a layer gets in one call; layers that low precision would slow down at that size,
    in eager mode on a GPU, then stay in high precision, except those with ``backend="native"``. The rule reads sizes
    and the recipe alone (docs/performance.md), so it answers the same on every machine; None (default): sizes do not
    matter. Returns a report that prints as a table. Raises InvalidTypeError and InvalidValueError for other arguments,
    PlacementError for patterns that match no layer.
    """
    if not isinstance(model, nn.Module):
        raise invalid_type("model", type(model), "a torch.nn.Module")
    if not isinstance(recipe, Placement):
        recipe = as_recipe(recipe)
    if isinstance(exclude, str):
        raise invalid_type("exclude", "str", "a sequence of name patterns", f"Write exclude=({exclude!r},).")
    if filter is not None and not callable(filter):
        raise invalid_type("filter", type(filter), "a callable (name, module) -> bool")
    if skip_small is not None and (isinstance(skip_small, bool) or not isinstance(skip_small, int) or skip_small < 1):
        raise invalid_value("skip_small", repr(skip_small), "the rows of a layer's input, an int >= 1, or None")
    reserved = {
        id(module.out_proj): "nn.MultiheadAttention reads this layer's weight without calling it"
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
    }
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen = recipe.resolve([name for name, _ in layers]) if isinstance(recipe, Placement) else None
    rows = []
    for name, module in layers:
        shape = (module.out_features, module.in_features)
        reason = reserved.get(id(module)) or _refusal(name, module, exclude, filter)
        if reason is None and chosen is not None and name not in chosen:
            reason = "no pattern of the placement matches"
        if reason is not None:
            rows.append(ConversionRow(name, shape, "skipped", None, reason))
            continue
        wanted = chosen[name] if chosen is not None else cast(Recipe, recipe)
        reason = "the placement says None"
        if wanted is not None and skip_small is not None and getattr(module, "backend", "auto") != "native":
            prediction = predict(wanted, (skip_small, module.in_features, module.out_features))
            if prediction.is_small:
                wanted, reason = None, str(prediction)
        rows.append(_convert_layer(name, shape, module, wanted, reason))
    _keep_slow_paths(model)
    _shield_from_ddp(model)
    report = ConversionReport(tuple(rows))
    logging.getLogger("microfloat").info("%s", report)
    return report


def _refusal(name: str, module: nn.Module, exclude: Sequence[str], keep: Callable | None) -> str | None:
    if type(module) is not nn.Linear and type(module) is not Linear:
        return f"{type(module).__name__} is a subclass of nn.Linear with a behaviour of its own"
    for pattern in exclude:
        if fnmatchcase(name, pattern):
            return f"default rule: name matches {pattern!r} (exclude=() converts it)"
    if keep is not None and not keep(name, module):
        return "filter returned False"
    return None


def _convert_layer(
    name: str, shape: tuple[int, int], module: nn.Module, recipe: Recipe | None, why_none: str
) -> ConversionRow:
    already = type(module) is Linear
    if recipe is None and not already:
        return ConversionRow(name, shape, "high precision", None, why_none)
    if not already:
        module.__class__ = Linear  # type: ignore[assignment]
    module.pin(recipe)  # type: ignore[attr-defined]
    if recipe is None:
        return ConversionRow(name, shape, "high precision", None, why_none)
    return ConversionRow(name, shape, "repinned" if already else "converted", recipe, "")


def revert(model: nn.Module) -> nn.Module:
    """Put plain nn.Linear layers back, with the same parameters; delayed-scaling state is dropped. Returns `model`."""
    if not isinstance(model, nn.Module):
        raise invalid_type("model", type(model), "a torch.nn.Module")
    scaling.reset_scaling(model)  # also drops pending updates, which would look for the buffers at the next autocast
    for module in model.modules():
        if type(module) is Linear:
            for slot in scaling.SLOTS:
                for name in scaling.buffer_names(slot):
                    module._buffers.pop(name, None)
            for attribute in OWN_ATTRIBUTES:
                module.__dict__.pop(attribute, None)
            module.__class__ = nn.Linear  # type: ignore[assignment]
        if isinstance(module, nn.TransformerEncoderLayer):
            handle = module.__dict__.pop("_microfloat_slow_path", None)
            if handle is not None:
                handle.remove()
    _shield_from_ddp(model)
    return model


def _no_op_hook(module: nn.Module, arguments: Any) -> None:
    """Present only because torch's fused encoder path is not taken by a module that has hooks."""


def _keep_slow_paths(model: nn.Module) -> None:
    """nn.TransformerEncoderLayer's fused inference path reads weights past our forward; a hook switches it off."""
    for module in model.modules():
        if not isinstance(module, nn.TransformerEncoderLayer) or "_microfloat_slow_path" in module.__dict__:
            continue
        if any(isinstance(child, Linear) for child in (module.linear1, module.linear2)):
            module.__dict__["_microfloat_slow_path"] = module.register_forward_pre_hook(_no_op_hook)


def _shield_from_ddp(model: nn.Module) -> None:
    """Put the scaling buffers on DDP's ignore list: broadcast_buffers must not overwrite live amaxes (features D9)."""
    scaling_names = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for slot in scaling.SLOTS
        for name in scaling.buffer_names(slot)
        if isinstance(module, Linear) and name in module._buffers
    }
    kept = [name for name in getattr(model, "_ddp_params_and_buffers_to_ignore", []) if ".scaling_" not in f".{name}"]
    if kept or scaling_names:
        model._ddp_params_and_buffers_to_ignore = kept + sorted(scaling_names)  # type: ignore[assignment]
    elif hasattr(model, "_ddp_params_and_buffers_to_ignore"):
        del model._ddp_params_and_buffers_to_ignore


def plain_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict that the same model of plain nn.Linear layers loads strictly.

    Delayed-scaling entries are left out and quantized parameters dequantized.
    """
    from microfloat.torch.tensor import QuantizedTensor

    dropped = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for slot in scaling.SLOTS
        for name in scaling.buffer_names(slot)
        if isinstance(module, Linear)
    }
    return {
        name: value.dequantize() if isinstance(value, QuantizedTensor) else value
        for name, value in model.state_dict().items()
        if name not in dropped
    }
