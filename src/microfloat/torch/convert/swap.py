"""`convert` and `revert`: turn the nn.Linear layers of a model into microfloat layers, in place, and back.

A layer keeps its identity: only its class changes, so parameters, hooks, optimizers and references to the module
stay what they were.
"""

import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from microfloat.arguments import check_bool
from microfloat.recipes import Placement, Recipe, WeightActivation, WeightOnly, placement
from microfloat.recipes.names import as_recipe
from microfloat.recipes.placement import DEFAULT_EXCLUDE, ConversionReport, ConversionRow
from microfloat.torch.convert.experts import (
    as_experts,
    as_plain_experts,
    is_experts,
    remark_on,
    set_class,
    shape_of_experts,
    turned_in,
    why_not_experts,
    why_unseen,
)
from microfloat.torch.convert.fuse import fuse_blocks, unfuse
from microfloat.torch.linear.gathered_weight import with_local
from microfloat.torch.nn.conv1d import TransposedLinear, as_conv1d, as_linear, is_conv1d, tell_adapters, why_not_linear
from microfloat.torch.nn.experts import ExpertProduct, ExpertsLayer, held_weight, place_of, products_of
from microfloat.torch.nn.forward_rules import instructions_of
from microfloat.torch.nn.grouped_linear import GroupedLinear
from microfloat.torch.nn.linear import OWN_ATTRIBUTES, Linear, RecipeLayer
from microfloat.torch.scaling import buffers as layer_state
from microfloat.torch.tensor.checks import INPUT_DTYPES, check_model
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Config = WeightOnly | WeightActivation


def convert(
    model: nn.Module, recipe: Recipe | Placement | Mapping[str, Recipe | str | None] | str | os.PathLike, *,
    filter: Callable[[str, nn.Module], bool] | None = None, exclude: Sequence[str] = DEFAULT_EXCLUDE,
    fuse: bool = False, experts: bool = True,
) -> ConversionReport:  # fmt: skip
    """Turn every nn.Linear of `model` into a microfloat Linear pinned to its recipe; in place, parameters shared.

    `recipe`: a Recipe (or name) for all layers, or a Placement by name pattern (also for single GEMMs, ":wgrad"),
    a dictionary of its rules, or a file of one, as ``microfloat plan`` writes it.
    nn.Linear is converted, of its subclasses those that write the same product out (Falcon's), and transformers'
    Conv1D, whose state dict stays what it is; layers that are microfloat Linears already, also under a parametrization
    or FSDP2, and `GroupedLinear` are pinned anew.
    `filter(name, module) -> bool` keeps layers out, `exclude` is a list of name patterns (default: heads, routers and
    LoRA adapters; () excludes nothing), which give way to a Placement that names a layer in full. `fuse`: blocks that
    are known (`convert.fuse`: decoder layers and MLPs of transformers, norms before Linears) run as fused modules, of
    the same parameters and keys; weights of q, k and v are moved next to each other. `experts`: experts that a model
    keeps as 3-D parameters are a layer, named by their module, where their computation is known (those of transformers
    and of `register_experts`); parameters and keys stay. Returns a report that prints as a
    table. Under a `WeightOnly` or `WeightActivation` plain weights train with the codes and scales that `quantize_`
    then stores (docs/qat.md). Raises InvalidTypeError and InvalidValueError for other arguments and where no layer is
    left to convert, as `quantize_` does, PlacementError for patterns that match no layer; then nothing changes.
    """
    check_model(model)
    recipe = Placement(dict(recipe)) if isinstance(recipe, Mapping) else placement.as_placement(recipe)
    if not isinstance(recipe, Placement):
        recipe = as_recipe(recipe)  # type: ignore[arg-type]  # a path became a Placement
    check_bool("fuse", fuse)
    check_bool("experts", experts)
    kinds = (nn.Linear, GroupedLinear, ExpertsLayer) if experts else (nn.Linear, GroupedLinear)
    rows, wishes = planned_layers(model, recipe, kinds, filter, exclude)
    if all(row.action == "skipped" for row in rows):
        raise nothing_left(model, rows, "convert")
    wishes = [(name, layer, _in_training(layer, wanted)) for name, layer, wanted in wishes]
    for wish in wishes:
        pin_layer(*wish)
    tell_adapters(model)
    keep_slow_paths(model)
    _share_scales(model)
    fused = fuse_blocks(model, {name for name, _, _ in wishes}) if fuse else ()
    blocks = tuple(ConversionRow(name, None, action, None, what) for name, action, what in fused)
    return report_of(model, rows, blocks)


def report_of(
    model: nn.Module, rows: Sequence[ConversionRow], blocks: tuple[ConversionRow, ...] = (),
    unseen: Sequence[ConversionRow] = (),
) -> ConversionReport:  # fmt: skip
    """The report of these rows, which is logged too."""
    running = {id(model.get_submodule(row.name)) for row in rows if row.recipe is not None}
    seen = {row.name for row in rows}
    unseen = [row for row in (*unseen, *_unseen(model)) if row.name not in seen]
    report = ConversionReport(tuple(rows), _share(model, running), tuple(unseen), blocks)
    logging.getLogger("microfloat").info("%s", report)
    return report


def nothing_left(model: nn.Module, rows: Sequence[ConversionRow], verb: str, remedy: str = "") -> Exception:
    """The error of a function that finds no layer to work on, with the reasons of the rows; `verb`: what it does."""
    reasons = [row.reason for row in (*rows, *_unseen(model))]
    layers = "nn.Linear or GroupedLinear", "an nn.Linear, a GroupedLinear or experts"
    return placement.nothing_left(model, verb, reasons, layers, remedy)


def scale_groups(configs: Mapping[str, Config], fuse: Sequence[str] = placement.DEFAULT_FUSE) -> list[list[str]]:
    """The names of layers whose weights share a scale, and each other one for itself."""
    groups: dict[object, list[str]] = {}
    for name, recipe in configs.items():
        key = placement.fused_group(name, fuse)
        groups.setdefault(name if key is None else (key, recipe.fprop.rhs, recipe.scale_search), []).append(name)
    return list(groups.values())


def _in_training(layer: nn.Module, recipe: Recipe | None) -> Recipe | None:
    """The recipe to pin: of a config that under which plain weights train; stored ones have codes already."""
    held = (layer._parameters.get(key) for key in turned_in(layer) or ("weight",))
    is_stored = any(isinstance(getattr(one, "_local_tensor", one), QuantizedTensor) for one in held)
    return recipe._in_training(False) if isinstance(recipe, Config) and not is_stored else recipe


def _share_scales(model: nn.Module) -> None:
    """Let weights that train and are multiplied as one when they are served share their scale."""
    plain: dict[str, Config] = {}
    products: dict[str, RecipeLayer] = {}
    for path, layer in model.named_modules():
        is_whole = isinstance(layer, RecipeLayer) and not isinstance(layer, ExpertProduct)
        for one in products_of(layer) if is_whole else ():
            name = ".".join(filter(None, (path, one.name))) if isinstance(one, ExpertProduct) else path
            if not isinstance(one.pinned, Config):
                continue
            if one.pinned.is_static:
                take_amax(one)
            held = held_weight(one)
            if one.pinned.backward and not isinstance(getattr(held, "_local_tensor", held), QuantizedTensor):
                products[name], plain[name] = one, one.pinned._in_training(False)
    for members in scale_groups(plain):
        group = tuple(products[name] for name in members)
        shares = len(group) > 1 and plain[members[0]]._in_training(True).joint_scale
        shares = shares and len({one.weight.shape[:-2] for one in group}) == 1
        for one in group:
            one.pin(one.pinned._in_training(shares))
            one._joint = group if shares else ()


def take_amax(layer: nn.Module) -> None:
    """Give a layer of static scales the amax that `calibrate` has measured before, as its buffer, if there is one."""
    measured = layer.__dict__.pop("_measured_amax", None)
    layer.register_buffer("input_amax", layer._buffers.get("input_amax") if measured is None else measured)


def pin_layer(name: str, module: nn.Module, wanted: Recipe | None) -> None:
    """Turn one layer into a microfloat layer that is pinned to a recipe; of None one that is none stays as it is."""
    if wanted is not None and is_experts(module):
        as_experts(name, module)
    elif wanted is not None and not isinstance(module, RecipeLayer):
        as_linear(module) if is_conv1d(module) else _change_class(module, _plain_class(type(module)), Linear)
    if isinstance(module, RecipeLayer):
        module.pin(wanted)
        module._path = name


def planned_layers(
    model: nn.Module, recipe: Recipe | Placement, kinds: tuple[type, ...],
    filter: Callable[[str, nn.Module], bool] | None, exclude: Sequence[str],
    refuse: Callable[[nn.Module, Recipe | None], str | None] = lambda module, recipe: None,
) -> tuple[list[ConversionRow], list[tuple[str, nn.Module, Recipe | None]]]:  # fmt: skip
    """A row for each layer of these kinds, and those that `pin_layer` is to change; `refuse`: why one is left."""
    exclude = placement.check_exclude(exclude)
    placement.check_filter(filter)
    reserved = {
        id(module.out_proj): "nn.MultiheadAttention reads this layer's weight without calling it"
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
    }
    held = Counter(id(one) for module in model.modules() for one in module._parameters.values())
    shared = {key for key, times in held.items() if times > 1}
    layers = list(named_layers(model, kinds).items())
    shapes = {name: layer_shape(module) for name, module in layers}
    chosen = None
    if isinstance(recipe, Placement):
        pinned = {name: getattr(module, "pinned", None) for name, module in layers}
        current = {name: one for name, one in pinned.items() if isinstance(one, Recipe)}
        chosen = recipe.resolve([name for name, _ in layers], current)
    gates = placement.gates_of_mlps(exclude, shapes)
    by_name = {pattern for pattern, _ in recipe.rules} if isinstance(recipe, Placement) else set()
    rows, wishes = [], []
    for name, module in layers:
        shape = shapes[name]
        reason = reserved.get(id(module)) or (why_not_linear(module, shared) if is_conv1d(module) else "")
        reason = reason or _refusal(name, module, () if name in by_name else exclude, filter, gates)
        if reason is None and chosen is not None and name not in chosen:
            reason = "no pattern of the placement matches"
        wanted = None if reason else chosen[name] if chosen is not None else cast(Recipe, recipe)
        reason = reason or refuse(module, wanted)
        remark = remark_on(module, model) if is_experts(module) else ""
        if reason is not None:
            reason = "; ".join(one for one in (reason, remark) if one)
            pinned = module.pinned if isinstance(module, RecipeLayer) and id(module) not in reserved else None
            if isinstance(pinned, Recipe):
                rows.append(ConversionRow(name, shape, "kept", pinned, f"pinned before; {reason}"))
            else:
                rows.append(ConversionRow(name, shape, "skipped", None, reason))
            continue
        reason = "the placement says None"
        action = "high precision" if wanted is None else "repinned" if isinstance(module, RecipeLayer) else "converted"
        if wanted is not None:
            reason = recipe.of_gemms(name, [one for one, _ in layers]) if isinstance(recipe, Placement) else ""
        reason = "; ".join(one for one in (reason, remark) if one)
        rows.append(ConversionRow(name, shape, action, wanted, reason))
        wishes.append((name, module, wanted))
    return rows, wishes


def named_layers(model: nn.Module, kinds: tuple[type, ...] = (nn.Linear, GroupedLinear)) -> dict[str, Any]:
    """The layers that have a weight to quantize, by name."""
    return {
        one: module for one, module in model.named_modules()
        if (isinstance(module, kinds) and not isinstance(module, ExpertProduct)) or is_conv1d(module)
        or (ExpertsLayer in kinds and is_experts(module))
    }  # fmt: skip


def layer_shape(layer: nn.Module) -> tuple[int, int]:
    """Out features and in features; of experts those of their first product."""
    if is_experts(layer):
        return shape_of_experts(layer)
    if is_conv1d(layer):
        rows, columns = cast(torch.Tensor, layer.weight).shape
        return columns, rows
    if isinstance(layer, nn.Embedding):
        return layer.embedding_dim, layer.num_embeddings
    return cast(int, layer.out_features), cast(int, layer.in_features)


def _refusal(
    name: str, module: nn.Module, exclude: Sequence[str], keep: Callable | None, gates: frozenset[str]
) -> str | None:
    """The reason for which a layer is left out, or None."""
    kind = type(module)
    if is_experts(module):
        return why_not_experts(module) or placement.why_left_out(name, module, exclude, keep, gates)
    if isinstance(module, nn.LazyLinear):
        return "LazyLinear has no weight yet; call the model once, then convert it"
    if not isinstance(module, RecipeLayer | nn.Embedding) and not is_conv1d(module):
        plain = _plain_class(kind)
        if _replaced(kind, plain, Linear) is None or _computes(kind, plain, parametrize.is_parametrized(module)):
            remedy = "derive it from microfloat.torch.Linear and call super().forward, or make it an nn.Linear"
            return f"{kind.__name__} is a subclass of nn.Linear with a behaviour of its own; {remedy}"
        if not _calls_forward_of(module, plain):
            return "its forward was replaced on the instance (by a hook?); convert the model before that"
    return why_not_dtype(module) or placement.why_left_out(name, module, exclude, keep, gates)


def why_not_dtype(layer: nn.Module, key: str = "weight") -> str | None:
    """Reason why no recipe takes the dtype of a parameter, or None; codes are taken."""
    weight = layer._parameters.get(key)
    if weight is None or isinstance(weight, QuantizedTensor) or weight.dtype in INPUT_DTYPES:
        return None
    remedy = "; call model.float() first" if weight.dtype == torch.float64 else ""
    return f"its {key} has {weight.dtype}, which no recipe takes{remedy}"


def _share(model: nn.Module, running: set[int]) -> float:
    """The share of the model's parameters that lies in the modules of these ids."""
    everything: dict[int, int] = {}
    inside: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=id(module) in running):
            if not is_lazy(parameter):
                everything[id(parameter)] = parameter.numel()
                if id(module) in running:
                    inside.add(id(parameter))
    return sum(everything[key] for key in inside) / max(sum(everything.values()), 1)


def _unseen(model: nn.Module) -> Iterator[ConversionRow]:
    """Weights that models multiply with outside any nn.Linear."""
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or is_lazy(parameter) or isinstance(module, nn.Linear | RecipeLayer):
                continue
            reason = None
            if type(module).__name__ == "Conv1D" and parameter.dim() == 2 and not is_conv1d(module):
                reason = "Conv1D holds the transpose of a Linear's weight; replace it by an nn.Linear"
            elif isinstance(module, nn.MultiheadAttention) and parameter.dim() == 2:
                reason = "nn.MultiheadAttention multiplies with it without calling a Linear"
            if reason is not None:
                yield ConversionRow(f"{name}.{key}" if name else key, None, "not seen", None, reason)
        if reason := why_unseen(module):
            yield ConversionRow(name, None, "not seen", None, reason)


def _replaced(kind: type, old: type, new: type) -> type | None:
    """`kind` with `old` among its bases replaced by `new`; None where a class between them was written by somebody.

    Parametrizations and FSDP2 put a class between a layer and its own, made by a call of ``type``: it can be made anew.
    """
    if kind is old:
        return new
    written = "<locals>" in kind.__qualname__ or getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    if written or not issubclass(kind, old) or any("__class__" in f.__code__.co_freevars for f in functions):
        return None
    bases = [_replaced(base, old, new) if issubclass(base, old) else base for base in kind.__bases__]
    if any(base is None for base in bases):
        return None
    namespace = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, tuple(bases), namespace)  # type: ignore[arg-type]


def _product(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x @ self.weight.T
    if self.bias is None:
        return y
    return y + self.bias


def _plain_class(kind: type) -> type:
    """nn.Linear, or `kind` itself if it adds only a forward with the bytecode of `_product`, as Falcon's does."""
    own = {name: one for name, one in vars(kind).items() if callable(one) or not name.startswith("__")}
    forward = own.get("forward")
    adds_forward = kind.__bases__ == (nn.Linear,) and len(own) == 1 and isinstance(forward, FunctionType)
    return kind if adds_forward and instructions_of(forward) == instructions_of(_product) else nn.Linear


def _computes(kind: type, plain: type, is_parametrized: bool) -> bool:
    """True if a class between a layer and a plain one makes the output, or a parameter that torch does not compute."""
    between = kind.__mro__[: kind.__mro__.index(plain)]
    own = ("forward",) if is_parametrized else ("forward", "weight", "bias")
    return any(name in vars(base) for base in between for name in own)


def _calls_forward_of(module: nn.Module, kind: type) -> bool:
    """True if a call of `module` ends in the forward of its class `kind`, also through a hook of accelerate's."""
    own = module.__dict__
    if "forward" not in own:
        return True
    kept = own.get("_old_forward") if "_hf_hook" in own else own["forward"]
    return isinstance(kept, MethodType) and kept.__self__ is module and kept.__func__ is kind.forward


def _change_class(module: nn.Module, old: type, new: type) -> bool:
    """Replace `old` in the class of `module` by `new`; False, and nothing done, where that is not possible."""
    kind = _replaced(type(module), old, new)
    if kind is None or not _calls_forward_of(module, old):
        return False
    if new is Linear and old is not nn.Linear:
        module.__dict__["_original"] = old
    set_class(module, kind)
    return True


def revert(model: nn.Module) -> nn.Module:
    """Put plain nn.Linear layers back, with the same parameters; delayed-scaling state is dropped. Returns `model`.

    A `GroupedLinear`, which torch has not, stays what it is and follows the autocast again.
    Weights that exist as codes only are dequantized, and stay the parameters that an optimizer holds (a warning names
    those that could not). A layer whose class cannot be changed back (a subclass of Linear, its forward was replaced on
    the instance, or it returns its bias) stays what it is, pinned to high precision, and a warning names it.
    Raises InvalidTypeError for anything but a module.
    """
    check_model(model)
    unfuse(model)
    left, replaced = [], []
    for module in model.modules():  # what is kept of a weight refers to it
        module.__dict__.pop("_weight_cache", None)
    for name, module in list(model.named_modules()):
        for layer in products_of(module) if isinstance(module, RecipeLayer | nn.Embedding) else ():
            if isinstance(held_weight(layer), QuantizedTensor) and not _dequantize_weight(layer):
                replaced.append(name or "(root)")
        if isinstance(module, Linear):
            module.unpin()
            module._buffers.pop("input_amax", None)
            if isinstance(module, TransposedLinear):
                as_conv1d(module)
            elif not module.return_bias and _change_class(module, Linear, module.__dict__.get("_original", nn.Linear)):
                for attribute in ("_original", *OWN_ATTRIBUTES):
                    module.__dict__.pop(attribute, None)
            else:
                module.pin(None)
                left.append(f"{name or '(root)'} ({type(module).__name__})")
        elif isinstance(module, ExpertsLayer):
            left += [] if as_plain_experts(module) else [f"{name or '(root)'} ({type(module).__name__})"]
        elif isinstance(module, GroupedLinear):
            module.unpin()
        if isinstance(module, nn.TransformerEncoderLayer):
            handle = module.__dict__.pop("_microfloat_slow_path", None)
            if handle is not None:
                handle.remove()
        if module.__dict__.pop("_microfloat_nested", False):
            module.use_nested_tensor = True  # type: ignore[assignment]
    tell_adapters(model)
    for layers, message in (
        (left, "these layers are pinned to high precision, but stay microfloat Linears, because their class was "
               "subclassed, their forward replaced on the instance, or they return their bias: {}."),
        (replaced, "the weights of these layers are new parameters, because views or weak references to the quantized "
                   "ones are alive. Make optimizers and tie weights anew: {}."),
    ):  # fmt: skip
        if layers:
            warnings.warn("revert: " + message.format(", ".join(layers)), UserWarning, stacklevel=2)
    return model


def _dequantize_weight(layer: nn.Module) -> bool:
    """Turn a weight of codes into its values, if possible in the same object; False if that took a new one."""
    weight = cast(torch.Tensor, held_weight(layer))
    values = nn.Parameter(weight.detach().dequantize().contiguous(), requires_grad=weight.requires_grad)
    values.grad = weight.grad
    try:
        torch.utils.swap_tensors(weight, values)
    except RuntimeError:
        setattr(*place_of(layer), values)
        return False
    return True


def _no_op_hook(module: nn.Module, arguments: object) -> None:
    """Present only because torch's fused encoder path is not taken by a module that has hooks."""


def keep_slow_paths(model: nn.Module) -> None:
    """Switch off torch's inference paths of encoders, which read weights past our forward or pass nested tensors on."""
    for module in model.modules():
        nests = isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False)
        if nests and any(isinstance(child, Linear) for child in module.modules()):
            module.use_nested_tensor = False  # type: ignore[assignment]
            module.__dict__["_microfloat_nested"] = True
        if not isinstance(module, nn.TransformerEncoderLayer) or "_microfloat_slow_path" in module.__dict__:
            continue
        if any(isinstance(child, Linear) for child in (module.linear1, module.linear2)):
            module.__dict__["_microfloat_slow_path"] = module.register_forward_pre_hook(_no_op_hook)


def plain_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict that the same model of plain nn.Linear layers loads strictly.

    Delayed-scaling entries are left out and quantized parameters dequantized, those that FSDP2 has sharded shard by
    shard. Raises InvalidTypeError for anything but a module.
    """
    check_model(model)
    dropped = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in ("input_amax", *layer_state.BUFFER_NAMES)
        if isinstance(module, Linear | ExpertProduct)
    }
    return {name: _plain(value) for name, value in model.state_dict().items() if name not in dropped}


def _plain(value: torch.Tensor) -> torch.Tensor:
    local = getattr(value, "_local_tensor", None)
    if isinstance(local, QuantizedTensor):
        return with_local(cast("DTensor", value), local.dequantize())
    return value.dequantize() if isinstance(value, QuantizedTensor) else value
