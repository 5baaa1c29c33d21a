"""Layers of experts, 3-D parameters of a model, found, converted and put back in place."""

import contextlib
from collections.abc import Iterator, Mapping
from types import MethodType

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from microfloat.torch.nn.experts import ExpertsLayer, experts_class, form_of, products_of
from microfloat.torch.nn.linear import RecipeLayer
from microfloat.torch.tensor.checks import INPUT_DTYPES
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

_ADAPTER = "microfloat.torch.register_experts says how"
_QUANTIZED = "another library has quantized it; microfloat.torch.load_quantized reads such files into a plain model"


def is_experts(module: nn.Module) -> bool:
    """True for a layer of experts whose computation is known, converted or not."""
    return isinstance(module, ExpertsLayer) or form_of(module) is not None


def turned_in(module: nn.Module) -> Mapping[str, bool]:
    """By the names of the parameters that hold the matrices of a layer of experts, whether these are [E, K, N]."""
    form = form_of(module)
    return {} if form is None else form.turned


def matrices_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """By name, the parameters of a layer of experts that hold its matrices, or what stands in their place."""
    return {name: getattr(module, name, None) for name in turned_in(module)}  # type: ignore[misc]


def shape_of_experts(module: nn.Module) -> tuple[int, int]:
    """Out features and in features of the first product of each expert; (0, 0) where its matrices are none."""
    found = matrices_of(module)
    if any(getattr(one, "ndim", 0) != 3 for one in found.values()):
        return 0, 0
    name, matrix = next(iter(found.items()))
    rows, columns = matrix.shape[1:]
    return (columns, rows) if turned_in(module)[name] else (rows, columns)


def why_not_experts(module: nn.Module) -> str:
    """Reason for which a layer of experts whose class is known is not converted, "" if it is."""
    if isinstance(module, ExpertsLayer):
        return ""
    kind = type(module)
    for name, matrix in matrices_of(module).items():
        if getattr(matrix, "ndim", 0) != 3:
            return f"its {name} is no parameter of three dimensions"
        if matrix.dtype not in INPUT_DTYPES and not isinstance(matrix, QuantizedTensor):
            return f"its {name} has {matrix.dtype}: {_QUANTIZED}"
    if parametrize.is_parametrized(module):
        return "its parameters are computed by a parametrization; convert the model before that"
    if hasattr(module, "products"):
        return f"{kind.__name__} has an attribute named products, under which its products would stand"
    # A call may end in the forward of the class through a hook of accelerate's, or through expert parallelism.
    if "forward" in module.__dict__ and not _bound_forwards(module):
        return "its forward was replaced on the instance (by a hook?); convert the model before that"
    return ""


def _bound_forwards(module: nn.Module) -> list[tuple[object, str]]:
    """The objects, and their attributes, that hold a module's own forward: itself, and transformers' dispatcher."""
    own = module.__dict__
    found: list[tuple[object, str]] = [(module, name) for name in ("forward", "_old_forward")]
    inner = [cell for cell in getattr(own.get("forward"), "__closure__", None) or ()]
    found += [(cell, "cell_contents") for cell in inner]
    for cell in inner:
        dispatcher = cell.cell_contents
        if hasattr(dispatcher, "experts_forward"):  # or one of several
            found += [(one, "experts_forward") for one in (dispatcher, *vars(dispatcher).values())]
    held = [(holder, name, vars(holder).get(name) if holder is module else getattr(holder, name, None))
            for holder, name in found]  # fmt: skip
    return [
        (holder, name) for holder, name, kept in held
        if isinstance(kept, MethodType) and kept.__self__ is module and kept.__func__ is type(module).forward
    ]  # fmt: skip


def as_experts(name: str, module: nn.Module) -> None:
    """Turn a layer of experts into one that runs under recipes; `name` is its name in the model."""
    if not isinstance(module, ExpertsLayer):
        form = form_of(module)
        assert form is not None, "the caller has asked is_experts"
        set_class(module, experts_class(type(module)))
        module.begin(form)  # type: ignore[operator]
    module.name_products(name)  # type: ignore[operator]


def as_plain_experts(module: ExpertsLayer) -> bool:
    """Put the class of converted experts back; False, and high precision, where FSDP2 has put its own class before."""
    if type(module) is not experts_class(module._original):
        module.pin(None)
        return False
    module.end()
    set_class(module, module._original)
    return True


@contextlib.contextmanager
def products_to_measure(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """The products of all layers of experts of a model, by name, which every call runs meanwhile, converted or not."""
    layers = {name: one for name, one in model.named_modules() if is_experts(one) and not why_not_experts(one)}
    borrowed = [one for one in layers.values() if not isinstance(one, ExpertsLayer)]
    for name, layer in layers.items():
        as_experts(name, layer)
        layer._measures = True  # type: ignore[assignment]
    try:
        yield {one._path: one for layer in layers.values() for one in products_of(layer)}
    finally:
        for layer in layers.values():
            del layer._measures
        for layer in borrowed:
            found = {one.name: one.__dict__.get("_measured_amax") for one in products_of(layer)}
            as_plain_experts(layer)  # type: ignore[arg-type]
            layer.__dict__["_measured_amaxes"] = found


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Change the class of a module, and of its bound forward wherever that is kept."""
    bound = _bound_forwards(module)
    module.__class__ = kind
    for holder, name in bound:
        setattr(holder, name, MethodType(kind.forward, module))


def why_unseen(module: nn.Module) -> str:
    """Reason for which a module with matrices of several experts in one parameter stays, "" for any other module."""
    kind = type(module)
    if isinstance(module, nn.Linear | RecipeLayer) or kind.__module__.startswith("torch."):
        return ""
    if is_experts(module):
        return "a layer of experts that was not asked for"
    held = [(key, one) for key, one in module._parameters.items() if one is not None and not is_lazy(one)]
    is_named = "expert" in kind.__name__.lower()
    solid = [key for key, one in held if one.shape[:1].numel() > 1 and (one.dim() == 3 or (one.dim() > 3 and is_named))]
    flat = [key for key, one in held if one.dim() == 2 and is_named]
    if solid and is_named and (dtype := module._parameters[solid[0]].dtype) not in INPUT_DTYPES:  # type: ignore[union-attr]
        return f"{', '.join(solid)} of {kind.__name__}: {dtype}, {_QUANTIZED}"
    if solid:
        return f"{', '.join(solid)}: matrices of experts? {kind.__name__} is not known; {_ADAPTER}"
    return f"{', '.join(flat)}: experts in two dimensions? {kind.__name__} is not known" if flat else ""


def remark_on(module: nn.Module, model: nn.Module) -> str:
    """The number of experts of a layer, and its share of the model's parameters, in words; "" where it has none."""
    if shape_of_experts(module) == (0, 0):
        return ""
    number = len(next(iter(matrices_of(module).values())))
    total = sum(one.numel() for one in model.parameters() if not is_lazy(one))
    share = sum(one.numel() for one in module.parameters()) / total
    return f"{number} experts, {share:.1%} of the model's parameters a layer"
