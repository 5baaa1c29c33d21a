"""Inference: weights stored quantized, scales searched for them, and amaxes of activations measured beforehand.

    quantize_(model, WeightOnly("nvfp4"))      every Linear keeps codes and scales in place of its weight
    with calibrate(model): model(batch)        amaxes of activations, for scales="static"

A quantized layer is a `Linear` (or a `GroupedLinear`) like any other: its weight is a QuantizedTensor, its recipe one
of `microfloat.recipes.inference`, and its calls run the schedule of that recipe. Its state dict holds the quantized
weight under the name of the plain one.

Legend: N = out features, K = in features, E = experts.
"""

import contextlib
import dataclasses
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from microfloat.arguments import check_bool, check_choice
from microfloat.errors import MicrofloatError, invalid_type, invalid_value, kind_of
from microfloat.operands import GEMMS
from microfloat.recipes import Cast, Placement, Recipe, placement
from microfloat.recipes.inference import as_stored
from microfloat.recipes.placement import ConversionReport, ConversionRow
from microfloat.torch import backends
from microfloat.torch._typing import Options
from microfloat.torch.convert import swap
from microfloat.torch.convert.experts import as_experts, is_experts, products_to_measure, turned_in
from microfloat.torch.convert.swap import Config
from microfloat.torch.inference.gptq import Hessians, compensated, hessians_of, with_method
from microfloat.torch.linear.weight_cache import joint_amax
from microfloat.torch.nn.conv1d import as_linear, is_conv1d, tell_adapters
from microfloat.torch.nn.experts import ExpertsLayer, held_weight, place_of, products_of
from microfloat.torch.nn.grouped_linear import GroupedLinear
from microfloat.torch.nn.linear import RecipeLayer
from microfloat.torch.reference._grid import spread
from microfloat.torch.scaling.buffers import larger_amax
from microfloat.torch.tensor.checks import check_model, with_path
from microfloat.torch.tensor.ops import quantize
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

LAYERS = (nn.Linear, GroupedLinear)
_QUANTIZED = (
    "To quantize it anew, call microfloat.torch.revert(model) first, which gives the values of its codes; "
    "to run its codes under another config, call microfloat.torch.convert(model, config)."
)


def quantize_(
    model: nn.Module, config: Config | Placement | Mapping[str, Config | None] | str | os.PathLike,
    filter: Callable[[str, nn.Module], bool] | None = None, *, exclude: Sequence[str] = placement.DEFAULT_EXCLUDE,
    fuse: Sequence[str] = placement.DEFAULT_FUSE, embeddings: bool = False, method: str = "nearest",
) -> ConversionReport:  # fmt: skip
    """Store the weight of every nn.Linear and GroupedLinear of `model` quantized, in place; returns a report.

    `config`: a `WeightOnly` or a `WeightActivation` for all layers, or a Placement (or dictionary) of them by name
    pattern, None being high precision, or a file of one, as ``microfloat plan`` writes it. Under a Placement of recipes
    for training a layer multiplies as fprop of its recipe does: x and w in those formats, with scales of each input,
    16x16 and 32x32 tiles stored as blocks along K. `filter(name, module) -> bool` keeps layers out, `exclude` is a list
    of name patterns (default: heads, routers and LoRA adapters). `fuse`: layers whose weights share one tensor scale,
    because serving engines multiply them as one: q, k and v ("qkv"), gate and up ("gate_up"). The experts of a
    GroupedLinear have a scale each. Weights that several layers share stay shared; biases and norms stay as they are.
    `embeddings`: every nn.Embedding too is quantized, its weight alone; a lookup dequantizes the rows that it reads.
    One that is tied to a module which is left out, such as a head, stays as it is. Another layer whose weight is that
    of a module that is left out gets codes of its own, and a warning.
    `method` "gptq": the codes of a weight are chosen together, so that errors make up for each other on the inputs that
    ``with calibrate(model): model(batch)`` has seen before; a layer or an expert that got none takes the nearest codes,
    as the report says. The Hessians are let go.
    Codes of the format in question stay as they are too, in a layer that has no recipe yet: one whose state dict was
    loaded with ``assign=True``, or that trained under `quantized_model_init`.

    A layer keeps its identity and ``isinstance(layer, nn.Linear)``. Its weight requires grad as before, and a backward
    that asks for that gradient raises: freeze the model to train adapters. Raises InvalidTypeError and
    InvalidValueError for other arguments and where no layer is left to quantize, PlacementError for patterns that
    match no layer; then nothing changes. Weights are quantized one after the other, or a group of `fuse` together, and
    each plain one is let go: after an error in between (memory, Ctrl-C) a layer is quantized or as it was, and a second
    call goes on.
    """
    return plan_storage(model, config, filter, exclude, fuse, embeddings=embeddings, method=method).complete(model)


@dataclasses.dataclass
class Storage:
    """The layers of a model, some of which are to store their weights quantized: `configs` says under which config.

    `rows`: that of a report for each layer. `wishes`: name, layer and config of those to change, None being high
    precision. `fuse`: the kinds of layers whose weights share a scale. `stored`: the names of layers that are done.
    `hessians`: by the id of a weight that is quantized by GPTQ.
    """

    layers: Options
    rows: list[ConversionRow]
    wishes: list[tuple[str, nn.Module, Recipe | None]]
    configs: dict[str, Config]
    fuse: tuple[str, ...]
    has_embeddings: bool
    hessians: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    stored: set[str] = dataclasses.field(default_factory=set)
    spoiled: list[str] = dataclasses.field(default_factory=list)

    def groups(self) -> list[list[str]]:
        """The names of layers that are stored together, since their weights share a scale."""
        return swap.scale_groups(self.configs, self.fuse)

    def complete(self, model: nn.Module) -> ConversionReport:
        """Store the weights of all layers that are left, and report on the model."""
        left = [name for name in self.configs if name not in self.stored]
        untied = _untied(model, self.layers, {name: self.configs[name] for name in left})
        try:
            for name, layer, wanted in self.wishes:
                if wanted is None:
                    swap.pin_layer(name, layer, wanted)
            self.store(left, untied)
        finally:
            tell_adapters(model)
            swap.keep_slow_paths(model)
        _name_spoiled(self.spoiled)
        _name_untied(untied)
        rows = [dataclasses.replace(one, action="quantized") if one.name in self.configs else one for one in self.rows]
        plain = "an embedding; embeddings=True quantizes it"
        unseen = [
            ConversionRow(name, swap.layer_shape(module), "not seen", None, plain)
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and not isinstance(module.weight, QuantizedTensor)
        ]
        return swap.report_of(model, rows, unseen=() if self.has_embeddings else unseen)

    @torch.no_grad()
    def store(self, names: Iterable[str], untied: Mapping[str, str] = MappingProxyType({})) -> None:
        """Store the weights of some of the layers, all of each group; `untied`: those of `_untied`."""
        configs = {name: self.configs[name] for name in names}
        layers = {name: self.layers[name] for name in configs}
        for layer in layers.values():
            if is_conv1d(layer):
                as_linear(layer)
        experts = {name: (layers[name], configs.pop(name)) for name in list(configs) if is_experts(layers[name])}
        for name, (layer, chosen) in experts.items():  # whose products stand in their place
            as_experts(name, layer)
            found = {product._path: product for product in products_of(layer)}
            layers |= found
            configs |= dict.fromkeys(found, chosen)
        several = Counter(id(held_weight(layers[name])) for name in configs)
        shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the Parameter that was, of several layers
        for members in swap.scale_groups(configs, self.fuse):
            weights = {name: held_weight(layers[name]) for name in members}
            plain = {name: one for name, one in weights.items() if one is not None and not one.is_meta}
            self.spoiled += [
                name for name, one in plain.items() if not isinstance(one, QuantizedTensor) and not one.isfinite().all()
            ]
            stored = _stored_weights({name: (layers[name], configs[name]) for name in members}, shared, self.hessians)
            shared |= {  # type: ignore
                id(plain): (plain, stored[name]) for name, plain in weights.items() if several[id(plain)] > 1
            }  # fmt: skip
            del weights
            for name, weight in stored.items():
                layer = layers[name]
                swap.pin_layer(name, layer, configs[name])
                module, key = place_of(layer)
                vars(module).get("_hessians", {}).pop(key, None)
                setattr(module, key, weight)
                if configs[name].is_static and not isinstance(layer, nn.Embedding):
                    swap.take_amax(layer)
                if name in untied:
                    layer.__dict__["_untied_from"] = untied[name]
        for name, (layer, chosen) in experts.items():
            swap.pin_layer(name, layer, chosen)
        self.stored |= {*configs, *experts}


def plan_storage(
    model: nn.Module, config: Config | Placement | Mapping[str, Config | None] | str | os.PathLike,
    filter: Callable[[str, nn.Module], bool] | None = None, exclude: Sequence[str] = placement.DEFAULT_EXCLUDE,
    fuse: Sequence[str] = placement.DEFAULT_FUSE, *, embeddings: bool = False, method: str = "nearest",
) -> Storage:  # fmt: skip
    """The `Storage` of a model, which may be on the meta device, by the arguments of `quantize_`; raises as it does."""
    check_model(model)
    config = placement.as_placement(config)
    config = as_stored(config) if isinstance(config, Placement) else config
    if isinstance(config, Mapping):
        for pattern, one in config.items():
            if isinstance(one, str):  # which a Placement would take for the name of a recipe for training
                check_config(pattern, one, True)
        config = Placement(list(config.items()))
    for pattern, one in config.rules if isinstance(config, Placement) else [("", config)]:
        check_config(pattern, one, isinstance(config, Placement))
    check_bool("embeddings", embeddings)
    check_choice("method", method, ("nearest", "gptq"))
    kinds = (*LAYERS, ExpertsLayer, nn.Embedding) if embeddings else (*LAYERS, ExpertsLayer)
    fused, layers = placement.check_fuse(fuse), swap.named_layers(model, kinds)
    rows, wishes = swap.planned_layers(model, config, kinds, filter, exclude, refuse=_why_not_stored)  # type: ignore[arg-type]
    rows = _with_tied_kept(model, layers, rows)
    configs = _configs_of(rows)
    if not configs:
        are_stored = any(_is_stored(layer) for layer in layers.values())
        raise swap.nothing_left(model, rows, "quantize", _QUANTIZED if are_stored else "")
    for name, chosen in configs.items():
        _check_tiles(name, layers[name], chosen)
    hessians = hessians_of({name: layers[name] for name in configs}) if method == "gptq" else {}
    if hessians:
        rows = [with_method(row, layers[row.name], hessians) if row.name in configs else row for row in rows]
    return Storage(layers, rows, wishes, configs, fused, embeddings, hessians)


def _is_stored(layer: nn.Module) -> bool:
    """True if a weight of a layer is quantized already."""
    return any(isinstance(held_weight(one), QuantizedTensor) for one in products_of(layer))


def _name_untied(untied: Mapping[str, str]) -> None:
    """Warn of layers whose weight another module keeps plain: layer and that module, by name."""
    if untied:
        pairs = ", ".join(f"{name} (that of {other})" for name, other in untied.items())
        warnings.warn(
            f"quantize_: these layers had a weight that another module reads, and keeps with its values: {pairs}. "
            "They have codes of their own now, and are tied no longer; in a model of transformers set "
            "config.tie_word_embeddings = False, or tie_weights() and readers of a checkpoint put the values back. To "
            f"leave them as they were: filter=lambda name, layer: name not in {list(untied)}.", UserWarning,
            stacklevel=4,
        )  # fmt: skip


def _name_spoiled(names: Sequence[str]) -> None:
    if names:
        warnings.warn(
            f"quantize_: these weights hold a NaN or an infinity: {', '.join(names)}. Their codes hold NaN, of a whole "
            "block where its scale tells of it, or values that saturate. Mend the checkpoint, or leave them out: "
            f"filter=lambda name, layer: name not in {list(names)}.", UserWarning, stacklevel=4,
        )  # fmt: skip


def _configs_of(rows: Sequence[ConversionRow]) -> dict[str, Config]:
    """The config of each layer to quantize, by name."""
    return {row.name: cast(Config, row.recipe)._served() for row in rows if row.action in ("converted", "repinned")}


def _with_tied_kept(
    model: nn.Module, layers: Mapping[str, nn.Module], rows: list[ConversionRow]
) -> list[ConversionRow]:
    """The rows; an embedding is skipped where a module left out keeps its weight: codes beside it cost memory."""
    kept = {
        name: f"its weight is {keeper} too, which keeps its values; quantize both (exclude=()), or neither"
        for name, keeper in _untied(model, layers, _configs_of(rows)).items()
        if isinstance(layers.get(name), nn.Embedding)
    }  # fmt: skip
    return [
        ConversionRow(row.name, row.shape, "skipped", None, kept[row.name]) if row.name in kept else row for row in rows
    ]


def _untied(model: nn.Module, layers: Mapping[str, Any], configs: Mapping[str, Config]) -> dict[str, str]:
    """The layers to quantize whose plain weight another module keeps: its name by theirs."""
    held: dict[str, tuple[nn.Module, str]] = {}
    for name in configs:
        layer = layers[name]
        keys = turned_in(layer) if is_experts(layer) else ()
        held |= {f"{name}.{key}": (layer, key) for key in keys} or {name: place_of(layer)}
    weights = {name: module._parameters[key] for name, (module, key) in held.items()}
    plain = {id(weight) for weight in weights.values() if type(weight) is nn.Parameter}
    taken = {id(module) for module, _ in held.values()}
    keepers = {
        id(parameter): f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules() if id(module) not in taken
        for key, parameter in module._parameters.items() if id(parameter) in plain
    }  # fmt: skip
    found = {name: keepers.get(id(weight)) for name, weight in weights.items()}
    return {name: keeper for name, keeper in found.items() if keeper is not None}


def _stored_weights(
    members: Mapping[str, tuple[nn.Module, Config]], shared: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    hessians: Mapping[int, torch.Tensor],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The stored weights of layers that share a scale, by name, each of a layer and its config."""
    held = {name: held_weight(layer) for name, (layer, _) in members.items()}
    matrices = {name: cast(torch.Tensor, layer.weight).detach() for name, (layer, _) in members.items()}
    plain = [matrix for matrix in matrices.values() if not isinstance(matrix, QuantizedTensor)]
    _, recipe = next(iter(members.values()))
    rhs, search = recipe.fprop.rhs, recipe.scale_search
    assert rhs is not None, "a config quantizes weights"
    amax = _shared_amax(plain, rhs, search)
    search = None if amax is not None and rhs.format.is_per_tensor else search
    made: dict[int, torch.Tensor] = {}
    for name, (layer, _) in members.items():
        weight = cast(torch.Tensor, held[name])
        if isinstance(weight, QuantizedTensor):
            made[id(weight)] = weight
        elif id(weight) in shared:
            made[id(weight)] = shared[id(weight)][1]
        elif id(weight) not in made:
            try:
                q = searched(matrices[name], rhs, amax, search, hessians.get(id(weight)))
            except MicrofloatError as error:
                raise with_path(error, name) from None
            turned = q.transpose(1, 2) if getattr(layer, "is_turned", False) else q
            made[id(weight)] = nn.Parameter(turned, requires_grad=weight.requires_grad)
    return {name: made[id(weight)] for name, weight in held.items()}


def check_config(pattern: str, config: object, in_placement: bool) -> None:
    """Refuse what is no config of inference; `in_placement`: None, high precision, is one there."""
    if pattern.endswith(tuple(f":{gemm}" for gemm in GEMMS)):
        raise invalid_value("config", f"the pattern {pattern!r}", "patterns of whole layers: a weight is stored once")
    if isinstance(config, Config) or (in_placement and config is None):
        return
    got, remedy = kind_of(config), ""
    if isinstance(config, str):
        got, remedy = repr(config), f"Write WeightOnly({config!r})."
    elif isinstance(config, type) and issubclass(config, Config):
        remedy = f"Call the class: {config.__name__}('nvfp4')."
    elif isinstance(config, Recipe):
        remedy = "A recipe for training goes to microfloat.torch.convert."
    raise invalid_type("config", got, "WeightOnly(...), WeightActivation(...), or a Placement of them", remedy)


def _why_not_stored(layer: nn.Module, config: Recipe | None) -> str | None:
    """Reason why the weight of a layer cannot become codes of `config`, or None."""
    for key, axis in turned_in(layer).items() if is_experts(layer) else [("weight", 0)]:
        weight = layer._parameters.get(key)
        if isinstance(weight, QuantizedTensor):
            is_free = not isinstance(getattr(layer, "pinned", None), Recipe)
            wanted = None if config is None or config.fprop.rhs is None else config.fprop.rhs.format
            if is_free and (weight.format, weight.hadamard, weight.axis) == (wanted, None, weight.dim() - 1 - axis):
                continue
            return f"its {key} is quantized already ({weight.format})"
        if type(weight) is not nn.Parameter:
            return f"its {key} is no plain Parameter (a parametrization, or a distributed tensor)"
        if reason := swap.why_not_dtype(layer, key):
            return reason
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse):
        return "it renormalises its rows, or has sparse gradients (max_norm, sparse)"
    if isinstance(layer, nn.Embedding) and config is not None and config.fprop.rhs.format.is_tile:  # type: ignore[union-attr]
        return f"a lookup reads rows, and a tile of {config.fprop.rhs.format} has several"  # type: ignore[union-attr]
    return None


def _check_tiles(name: str, layer: nn.Module, config: Config) -> None:
    """Refuse experts of which two would have rows in one tile, before anything changes."""
    fmt = cast(Cast, config.fprop.rhs).format
    height = fmt.block[0] or 1
    for key, is_turned in turned_in(layer).items() if is_experts(layer) else [("weight", False)]:
        number, *sizes = cast(torch.Tensor, layer._parameters[key]).shape
        if fmt.is_tile and len(sizes) > 1 and number > 1 and sizes[is_turned] % height:
            raise with_path(invalid_value(
                "config", f"experts of {sizes[is_turned]} rows under {fmt}",
                f"multiples of {height} rows, so that no tile holds rows of two experts",
                f"Take a format without tiles, or leave the layer out: filter=lambda name, layer: name != {name!r}.",
            ), name if key == "weight" else f"{name}.{key}")  # fmt: skip


def _shared_amax(weights: Sequence[torch.Tensor], cast: Cast, search: str | None) -> torch.Tensor | None:
    """The amax behind the scale that weights share, float32 (), or [E] of experts; None where they share none.

    The largest of theirs; where the one scale of a tensor is searched, that of the smallest error of all together.
    """
    if len(weights) < 2 or not cast.takes_amax or cast.tensor_scale == "row" or weights[0].is_meta:
        return None
    if len({weight.shape[:-2] for weight in weights}) > 1:
        return None
    largest = joint_amax(weights)
    if search != "mse" or not cast.format.is_per_tensor:
        return largest
    if weights[0].dim() == 2:
        return _best_amax(weights, cast, largest)
    experts = zip(zip(*weights, strict=True), largest, strict=True)
    return torch.stack([_best_amax(those, cast, amax) for those, amax in experts])


_RATIOS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of a block's amax, for scales that are not powers of two


def searched(
    weight: torch.Tensor, cast: Cast, amax: torch.Tensor | None = None, scale_search: str | None = None,
    hessian: torch.Tensor | None = None,
) -> QuantizedTensor:  # fmt: skip
    """A weight [N, K], or experts [E, N, K] one by one, under `cast`; `amax`: in place of the measured one, or None.

    `scale_search` "mse": each block takes the scale of the smallest squared error among that of the cast, those of
    smaller amaxes, at which the largest elements saturate, and those of other rules for the same scales. Ties keep the
    scale of the cast. Codes and scales are those that a reader of the format expects. `hessian` [K, K] or [E, K, K]:
    GPTQ chooses the codes, and such a search the scale of each block when its first column is reached.
    """
    if weight.dim() == 3:
        amaxes, sums = ([None] * len(weight) if one is None else one.unbind() for one in (amax, hessian))
        experts = zip(weight, amaxes, sums, strict=True)
        made = [searched(one, cast, own, scale_search, total) for one, own, total in experts]
        return torch.stack(made)  # type: ignore[arg-type,return-value]
    is_searched = scale_search == "mse" and not weight.is_meta and weight.numel() > 0
    is_compensated = hessian is not None and weight.numel() > 0 and bool(hessian.any() and weight.isfinite().all())
    if (is_searched or is_compensated) and amax is None and cast.takes_amax:
        is_of_rows = cast.tensor_scale == "row"
        amax = weight.detach().abs().amax(1, keepdim=True).float() if is_of_rows else backends.amax_of(weight)
    if is_searched and cast.format.is_per_tensor and amax is not None:
        amax, scale_search, is_searched = _best_amax([weight], cast, amax), None, False
    if hessian is not None and is_compensated:
        return compensated(weight, hessian, cast, amax, lambda part: searched(part, cast, amax, scale_search))
    best = quantize(weight, cast, amax=amax)
    if not is_searched:
        return best
    lowest = _error(best, weight)
    for one in _candidates(weight, cast, amax):
        error = _error(one, weight)
        is_better = error < lowest
        lowest = torch.where(is_better, error, lowest)
        codes = spread(is_better, cast.format.block, best.shape)
        if cast.format.element.codes_per_byte == 2:  # blocks are whole bytes
            codes = codes[:, ::2]
        held, other = best.codes.view(torch.uint8), one.codes.view(torch.uint8)
        held.copy_(torch.where(codes, other, held))
        best.scale.copy_(torch.where(is_better.view(best.scale.shape), one.scale, best.scale))
    return best


def _best_amax(weights: Sequence[torch.Tensor], cast: Cast, amax: torch.Tensor) -> torch.Tensor:
    """The amax, or a part of it, under whose one scale the squared error of all weights is smallest."""
    candidates = [amax, *(amax * ratio for ratio in _RATIOS)]
    errors = [
        torch.stack([_error(quantize(one, cast, amax=part), one).sum().to(amax.device) for one in weights]).sum()
        for part in candidates
    ]
    return candidates[int(torch.stack(errors).argmin())]


def _candidates(weight: torch.Tensor, cast: Cast, amax: torch.Tensor | None) -> Iterator[QuantizedTensor]:
    """The weight under other scales: of other rules that write the same kind of scale, and of clamped blocks."""
    fmt = cast.format
    rules = {"E8M0": ("floor", "rceil"), "E4M3": ("four_over_six_mse_448",)}.get(fmt.scale.name, ())
    for rule in rules:
        if rule != cast.scale_rule:
            yield quantize(weight, dataclasses.replace(cast, scale_rule=rule), amax=amax)
    limit = spread(_blocks(weight.detach().abs().float(), fmt.block).amax((1, 3)), fmt.block, weight.shape)
    whole = fmt.scale.name == "E8M0" or cast.rule.power_of_two
    for ratio in (0.5,) if whole else _RATIOS:
        bound = limit * ratio
        yield quantize(weight.float().clamp(-bound, bound), cast, amax=amax)


def _blocks(values: torch.Tensor, block: tuple[int | None, int | None]) -> torch.Tensor:
    """[rows of blocks, R, columns of blocks, C], filled up with zeros."""
    rows, columns = block[0] or values.shape[0], block[1] or values.shape[1]
    values = nn.functional.pad(values, (0, -values.shape[1] % columns, 0, -values.shape[0] % rows))
    return values.view(values.shape[0] // rows, rows, values.shape[1] // columns, columns)


def _error(q: QuantizedTensor, weight: torch.Tensor) -> torch.Tensor:
    """Squared error of each block."""
    return _blocks((q.dequantize(torch.float32) - weight.float()).square(), q.format.block).sum((1, 3))


@contextlib.contextmanager
def calibrate(model: nn.Module, *, hessians: bool = True) -> Iterator[nn.Module]:
    """Measure the inputs that layers get inside: ``with calibrate(model): model(x)``.

    Layers of static scales run with dynamic ones meanwhile. At the end each keeps the largest finite amax that it has
    met, as its buffer `input_amax` (float32, saved with the model), from which its static scale follows; a warning
    names layers that were not called. Of a model without such layers all are measured, for a `quantize_` to come.
    `hessians`: layers, and experts, whose weight is not stored quantized keep the sum of ``x.T @ x`` besides, which
    ``quantize_(..., method="gptq")`` needs: 4 K^2 bytes on the device of x, once for layers that read one tensor one
    after the other (not in inference mode); False: none. Raises InvalidTypeError for anything but a module,
    InvalidValueError for one without linear layers. After an exception inside nothing has changed. Compiled models run
    in eager mode inside.
    """
    check_model(model)
    check_bool("hessians", hessians)
    # Compiled code looks for no new hooks, and may not keep those of here. Where nothing was compiled, Dynamo is not
    # imported, which takes seconds.
    is_compiling = "torch._dynamo" in sys.modules
    eagerly = torch.compiler.set_stance("force_eager") if is_compiling else contextlib.nullcontext()
    with products_to_measure(model) as products, eagerly:
        layers = swap.named_layers(model) | products
        pins = {name: layer.pinned for name, layer in layers.items() if isinstance(layer, RecipeLayer)}
        static = {name: layers[name] for name, pin in pins.items() if isinstance(pin, Recipe) and pin.is_static}
        if not layers:
            got = f"a {type(model).__name__} without linear layers"
            raise invalid_value("model", got, "one with layers to calibrate")
        plain = {one for one in layers.values() if hessians and type(held_weight(one)) is nn.Parameter}
        of_amax = set((static or layers).values())
        measured: dict[nn.Module, torch.Tensor] = {}
        sums = Hessians()

        def measure(layer: nn.Module, arguments: tuple, options: Options) -> None:
            x, sizes, *_ = *arguments, *(options.get(name) for name in ("input", "group_sizes")[len(arguments) :]), None
            if isinstance(x, torch.Tensor) and x.numel() and layer in of_amax:
                measured[layer] = larger_amax(x, measured.get(layer))
            if isinstance(x, torch.Tensor) and x.numel() and layer in plain:
                try:
                    sums.see(layer, x, sizes)
                except torch.OutOfMemoryError as error:
                    error.add_note("calibrate keeps x.T @ x of each layer, for GPTQ; with hessians=False it does not.")
                    raise

        hooks = [layer.register_forward_pre_hook(measure, with_kwargs=True) for layer in of_amax | plain]
        try:
            for name, layer in static.items():
                layer.pin(dataclasses.replace(pins[name], scales="dynamic"))  # type: ignore
            yield model
        finally:
            for hook in hooks:
                hook.remove()
            for name, layer in static.items():
                layer.pin(pins[name])  # type: ignore
        for layer, amax in measured.items():
            if static:
                layer.register_buffer("input_amax", amax)
            else:
                layer.__dict__["_measured_amax"] = amax
        for layer, total in sums.by_layer().items():
            module, key = place_of(layer)
            module.__dict__.setdefault("_hessians", {})[key] = total
    missed = [name for name, layer in static.items() if layer not in measured]
    if missed:
        warnings.warn(
            f"calibrate: these layers were not called, and keep no or an earlier amax: {', '.join(missed)}.",
            UserWarning, stacklevel=3,
        )  # fmt: skip
