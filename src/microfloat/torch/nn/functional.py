"""Norms and activations fused with casts of their value, and with the Linears that read it.

    norm_linear(x, norm, *layers)                 y_i = layer_i(norm(x))
    activation_linear(x, layer, up=up)            y = layer(f(x) * up);  without `up`, layer(f(x))
    norm_mlp(x, norm, gate, down, up=up)          y = down(f(gate(h)) * up(h)) of h = norm(x)
    linear_cross_entropy(x, weight, labels)       cross_entropy(linear(x, weight), labels), the logits in chunks

The results are those of the modules one by one, with the same casts, seeds and scaling states: the value is rounded to
its dtype before it is cast (docs/numerics.md, section 6). Memory and traffic are saved: on a GPU the kernel that
computes a value writes its delayed and block casts, and backward casts a value once more of what is kept anyway, where
one launch does. Where nothing can be fused (a layer in high precision, compiled code, which fuses by itself) the
modules run.
Outputs and gradients of the Linears have the same bits as without fusion; gradients of a norm are torch's own on a GPU
where all dtypes agree, else computed in float32 and rounded once, so that they differ from torch's by rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from microfloat.arguments import check_choice, check_int
from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.recipes import Recipe
from microfloat.torch._typing import Maybe
from microfloat.torch.compile.cross_entropy import loss_of
from microfloat.torch.context import ambient
from microfloat.torch.launch.prologues import ACTIVATIONS, activate
from microfloat.torch.linear.cross_entropy import LossCall
from microfloat.torch.linear.function import Run, after_counts, apply, backend_name, begin, counts_of, end, find
from microfloat.torch.linear.fused_input import ActivationRun, GradientLink, NormRun
from microfloat.torch.linear.gathered_weight import Gathered
from microfloat.torch.linear.observer import OBSERVERS, observed
from microfloat.torch.linear.schedule import autocast_dtype
from microfloat.torch.linear.weight_cache import casts_late
from microfloat.torch.nn.linear import UNPINNED, JointCall, Linear, check_first_microbatch, recipe_of_call
from microfloat.torch.nn.merged import Unit, call_layer, can_join, is_bare, joined, units_of
from microfloat.torch.tensor import checks
from microfloat.torch.tensor.custom_ops import refuse_transforms
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor


def norm_linear(x: torch.Tensor, norm: nn.Module, *layers: Linear, is_first_microbatch: bool | None = None) -> Any:
    """``y_i = layer_i(norm(x))``, differentiable once: one tensor for one layer, a tuple for several.

    `norm`: nn.RMSNorm or nn.LayerNorm over the last dimension of x [..., K]; `layers`: `microfloat.torch.Linear`s of K
    in features. Layers whose recipes agree share the codes of the normed value. `is_first_microbatch`: as in `Linear`,
    for all layers. Raises InvalidTypeError or InvalidValueError for other modules and shapes. Source: docs/numerics.md,
    section 6.

    >>> layer, norm = Linear(32, 8, recipe="mxfp8"), nn.RMSNorm(32)
    >>> norm_linear(torch.ones(2, 32), norm, layer).shape
    torch.Size([2, 8])
    """
    checks.check_rows(x)
    if not layers:
        raise invalid_value("layers", "none", "one Linear or more that read norm(x)")
    for layer in layers:
        _check_layer("layers", layer)
    checks.check_features("layers", layers, x.shape[-1], "x")
    outputs = project(x, norm, layers, False, is_first_microbatch)
    return outputs[0] if len(layers) == 1 else outputs


def project(
    x: torch.Tensor, norm: "NormLike", layers: Sequence[Linear], join: bool, is_first_microbatch: bool | None = None,
    biases: list[Maybe] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The output of each layer for norm(x), or for x; with `join` one tensor where norm(x) has one product.

    `biases` receives the bias that each layer returns (`return_bias`), None where a layer adds its own.
    """
    if norm is None:
        return tuple(call_layer(layer, x, is_first_microbatch, biases) for layer in layers)
    norm = norm_of(norm, x)
    begun = _begin(x, layers, [(x, norm)] * len(layers), is_first_microbatch, norm, join)
    if begun is not None:
        units, runs = begun
        outputs = apply(NormRun(runs, norm.kind, norm.eps, None), x, norm.weight, norm.bias, *_tensors(units))
        _end(units, runs)
    else:
        value = norm.module(x)
        # Layers whose dw is not for autograd run apart, in eager mode.
        joins = join and torch.compiler.is_compiling() and can_join(layers) and not layers[0].fuse_wgrad_accumulation
        if not joins:
            return project(value, None, layers, False, is_first_microbatch, biases)
        outputs = (JointCall(layers[0], *joined(layers)).forward(value),)
    if biases is not None:
        biases += [layer._returned_bias(outputs[0]) for layer in layers]
    return outputs


def activation_linear(
    x: torch.Tensor, layer: Linear, *, up: torch.Tensor | None = None, activation: str = "silu",
    is_first_microbatch: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """``y = layer(f(x))``, or with `up` ``layer(f(x) * up)`` (SwiGLU: f = silu), differentiable once.

    x and up [..., F] of one shape and dtype; `activation`: silu, gelu, gelu_tanh, relu, qgelu (``x sigmoid(1.702 x)``)
    srelu (``relu(x)^2``) or sigmoid (GLU). Source: docs/numerics.md, section 6.
    """
    _check_layer("layer", layer)
    check_choice("activation", activation, ACTIVATIONS)
    checks.check_rows(x)
    checks.check_features("layer", [layer], x.shape[-1], "x")
    if up is not None:
        if not isinstance(up, torch.Tensor):
            raise invalid_type("up", type(up), "a tensor like x")
        if up.shape != x.shape or up.dtype != x.dtype or up.device != x.device:
            got = f"{up.dtype} {tuple(up.shape)} on {up.device}"
            raise invalid_value("up", got, f"a tensor like x: {x.dtype} {tuple(x.shape)} on {x.device}")
    begun = _begin(x, [layer], [(x, up)], is_first_microbatch)
    if begun is None:
        return call_layer(layer, activated(x, up, activation), is_first_microbatch)
    units, runs = begun
    y = apply(ActivationRun(runs[0], activation, None), x, up, *_tensors(units))
    _end(units, runs)
    return y


def norm_mlp(
    x: torch.Tensor, norm: nn.Module, gate: Linear, down: Linear, *, up: Linear | None = None, activation: str = "silu",
    is_first_microbatch: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """``y = down(f(gate(h)) * up(h))`` with h = norm(x); without `up`, ``down(f(gate(h)))``. Differentiable once.

    Backward writes the gradients of gate and up as codes where their casts allow it. Arguments as in `norm_linear` and
    `activation_linear`; a joint matrix for gate and up takes `norm_linear` and `activation_linear` one after the other.
    """
    described = norm_of(norm, x)
    check_choice("activation", activation, ACTIVATIONS)
    outer = (gate,) if up is None else (gate, up)
    for name, layer in (("gate", gate), ("up", outer[-1]), ("down", down)):
        _check_layer(name, layer)
    for name, layer in (("gate", gate), ("up", outer[-1])):
        checks.check_features(name, [layer], x.shape[-1], "x")
    if outer[-1].out_features != gate.out_features:
        got = f"out_features {outer[-1].out_features}"
        raise invalid_value("up", got, f"{gate.out_features}, as gate has: their outputs are multiplied")
    checks.check_features("down", [down], gate.out_features, "gate's output")
    return mlp(x, described, outer, down, activation, is_first_microbatch)


def mlp(
    x: torch.Tensor, norm: "NormLike", outer: Sequence[Linear], down: Linear, activation: str,
    is_first_microbatch: bool | None = None, biases: list[Maybe] | None = None,
) -> torch.Tensor:  # fmt: skip
    """`norm_mlp`, or the same without a norm, of checked arguments. `outer`: gate, and up if there is one.

    `biases` receives the bias that `down` returns, None where it adds its own.
    """
    spec = None if norm is None else norm_of(norm, x)
    feeds = [*[(x, spec)] * len(outer), (x, spec, *outer)]
    begun = None if spec is None else _begin(x, (*outer, down), feeds, is_first_microbatch, spec)
    if spec is None or begun is None:
        made = project(x if spec is None else spec.module(x), None, outer, False, is_first_microbatch)
        value = activated(made[0], made[1] if len(made) > 1 else None, activation)
        return call_layer(down, value, is_first_microbatch, biases)
    link, (units, runs) = GradientLink(), begun
    norm_run = NormRun(runs[:-1], spec.kind, spec.eps, link)
    made = apply(norm_run, x, spec.weight, spec.bias, *_tensors(units[:-1]))
    inner = made[1] if len(made) > 1 else None
    y = apply(ActivationRun(runs[-1], activation, link), made[0], inner, *_tensors(units[-1:]))
    _end(units, runs)
    if biases is not None:
        biases.append(down._returned_bias(y))
    return y


def _tensors(units: Sequence[Unit]) -> list[Maybe]:
    """Weight and bias of each unit in turn."""
    return [tensor for unit in units for tensor in (unit.weight, unit.bias)]


def _begin(
    x: torch.Tensor, layers: Sequence[Linear],
    feeds: Sequence[Sequence["torch.Tensor | nn.Module | NormOf | None"]], is_first_microbatch: bool | None,
    norm: "NormOf | None" = None, join: bool = False,
) -> tuple[list[Unit], list[Run]] | None:  # fmt: skip
    """Units of the layers and their runs, which have begun; None where the modules must run by themselves.

    `feeds`: the sources of each layer's input. `join`: layers that can be one product are one.
    """
    if torch.compiler.is_compiling() or x.numel() == 0 or checks.is_abstract(x) or hasattr(x, "placements"):
        return None
    # Somebody may have put another module in a layer's place, as PEFT does, or listens to calls, as tensor parallelism.
    if any(not isinstance(layer, Linear) or not is_bare(layer) for layer in layers):
        return None
    if norm is not None and not is_bare(norm.module):
        return None
    state = ambient()
    units = units_of(layers, state, join)
    for unit in units:
        if unit.recipe is None:  # before the modules run, of which a recomputation would miss the first operator
            for layer in unit.layers:
                layer._note_plain(state)
    sources = [tensor for feed in feeds for source in feed for tensor in _parameters(source)]
    parameters = [*sources, *(tensor for tensor in _tensors(units) if tensor is not None)]
    plain = (
        any(unit.recipe is None or unit.recipe._is_high_precision for unit in units)
        or (state is not None and state.calibrating)
        or any(isinstance(parameter, QuantizedTensor) or parameter.numel() == 0 for parameter in parameters)
    )  # fmt: skip
    if plain:
        return None
    check_first_microbatch(is_first_microbatch)
    refuse_transforms("forward", x)
    compute = autocast_dtype(x.device.type) or x.dtype
    if compute != x.dtype and not (x.is_floating_point() and compute.itemsize < x.dtype.itemsize):
        return None
    grad, rows = torch.is_grad_enabled(), x.numel() // x.shape[-1]
    runs = []
    for unit, feed in zip(units, feeds, strict=False):  # one unit of all layers has their common feed
        for layer in unit.layers:
            if unit is units[0]:
                layer._check_input(x)
            else:
                layer._check(checks.check_linear_parameters, layer.weight, layer.bias, x)
            if layer._pinned is UNPINNED:
                layer.__dict__["_followed"] = True
        width = unit.weight.shape[1]
        dtype = compute if any(isinstance(source, Linear) for source in feed) else x.dtype  # of its input
        x_key = (torch.Size((rows, width)), (width, 1), dtype, x.get_device(), 0, False)
        wants_dx = grad and any(tensor.requires_grad for source in feed for tensor in _parameters(source))
        wants_dw = grad and unit.weight.requires_grad
        layer, weight = unit.layer, unit.weight
        needs = wants_dx, wants_dw, bool(layer._load_state_dict_post_hooks) and casts_late(layer, weight)
        call = x_key, None, weight, unit.bias, unit.recipe, backend_name(layer, state), compute, needs
        schedule = find(*call)  # type: ignore[arg-type]
        if schedule is not None and schedule.folds:
            schedule = after_counts(schedule, counts_of(layer), call)
        if schedule is None:
            return None
        if OBSERVERS:
            schedule = observed(schedule, unit.layers)
        runs.append(begin(layer, schedule, weight, state, is_first_microbatch, apart=True))
    return units, runs


def _parameters(source: "torch.Tensor | nn.Module | NormOf | None") -> list[torch.Tensor]:
    """The tensors of one source of an input."""
    if isinstance(source, nn.Module):
        return list(source.parameters(recurse=False))
    tensors = (source.weight, source.bias) if isinstance(source, NormOf) else (source,)
    return [tensor for tensor in tensors if tensor is not None]


def _end(units: Sequence[Unit], runs: Sequence[Run]) -> None:
    for run, unit in zip(runs, units, strict=True):
        end(run, unit.layer)


class NormOf(NamedTuple):
    """A norm as kernels take it: its kind, "rms" or "layer", its eps, and its parameters."""

    module: nn.Module
    kind: str
    eps: float
    weight: torch.Tensor | None
    bias: torch.Tensor | None


NormLike = nn.Module | NormOf | None


def norm_of(norm: nn.Module | NormOf, x: torch.Tensor) -> NormOf:
    """The norm over the last dimension of x that a module computes."""
    if isinstance(norm, NormOf):
        return norm
    checks.check_rows(x)
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if isinstance(norm, nn.RMSNorm):
        kind, eps = "rms", norm.eps if norm.eps is not None else torch.finfo(torch.float32).eps
    elif isinstance(norm, nn.LayerNorm):
        kind, eps = "layer", norm.eps
    else:
        raise invalid_type("norm", type(norm), "an nn.RMSNorm or an nn.LayerNorm")
    if tuple(norm.normalized_shape) != tuple(x.shape[-1:]):
        got = f"normalized_shape {tuple(norm.normalized_shape)}"
        raise invalid_value("norm", got, f"the last dimension of x, {tuple(x.shape[-1:])}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        checks.check_beside(f"norm.{name}", parameter, x, "Move the module to x.")
    if getattr(norm, "zero_centered_gamma", False) and weight is not None:
        weight = weight.float() + 1.0
    return NormOf(norm, kind, float(eps), weight, bias)


def _check_layer(argument: str, layer: object) -> None:
    if not isinstance(layer, Linear):
        remedy = "Convert the model first: microfloat.torch.convert."
        raise invalid_type(argument, type(layer), "a microfloat.torch.Linear", remedy)
    if layer.return_bias:
        remedy = "LayerNormLinear and LayerNormMLP return theirs: return_bias=True."
        raise invalid_value(argument, "a Linear with return_bias=True", "one that adds its bias", remedy)


def activated(x: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    """``f(x)``, or with `up` ``f(x) * up``."""
    value = activate(x, activation)
    return value if up is None else value * up


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, recipe: Recipe | str | None = None,
    ignore_index: int = -100, reduction: str = "mean", chunk: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """``cross_entropy(linear(x, weight), labels)`` in float32, with logits of `chunk` tokens at a time.

    x [..., K], weight [N, K], labels [...] of integers in [0, N) or `ignore_index`. `reduction` "mean" (over the labels
    that count), "sum" or "none" (in the shape of labels). `recipe` None: that of the ambient autocast, and high
    precision outside of one. Each chunk of tokens is quantized as a Linear quantizes its input; `chunk` None: the
    fewest equal chunks, in multiples of 128 tokens, whose logits take 512 MiB at most. Differentiable once, by x and
    weight. Raises as `linear` does, and InvalidValueError for labels that are no class (on a GPU by torch's own
    assertion). Source: docs/numerics.md, section 6.

    >>> x, weight, labels = torch.ones(2, 32), torch.ones(4, 32), torch.tensor([1, -100])
    >>> round(float(linear_cross_entropy(x, weight, labels, recipe="mxfp8").exp()), 3)
    4.0
    """
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    check_int("ignore_index", ignore_index, -(2**63), 2**63 - 1)
    rows = 0 if chunk is None else check_int("chunk", chunk, 1, 2**63 - 1)
    refuse_transforms("linear_cross_entropy", x, weight)
    for name, one in (("x", x), ("weight", weight)):  # also in high precision, unlike the operands of a Linear
        if getattr(one, "dtype", None) == torch.float64:
            needed = "torch.float32, torch.bfloat16 or torch.float16: the loss is computed in float32"
            remedy = f"Convert it with {name}.to(torch.float32), or use torch.nn.functional.cross_entropy."
            raise invalid_type(name, one.dtype, needed, remedy)
    checks.check_linear(x, weight, None)
    _check_labels(labels, x, weight)
    token, origin, backend = recipe_of_call(recipe, "linear_cross_entropy")
    compute, grad = autocast_dtype(x.device.type) or x.dtype, torch.is_grad_enabled()
    x, labels, shape = x.reshape(-1, x.shape[-1]), labels.reshape(-1).long(), labels.shape
    is_seen = labels != ignore_index
    wants = grad and x.requires_grad, grad and weight.requires_grad
    call = LossCall(reduction, *wants, token, origin, backend, compute, rows)
    loss = loss_of(x, weight, torch.where(is_seen, labels, 0), is_seen.float(), call)
    return loss.view(shape) if reduction == "none" else loss


def _check_labels(labels: object, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise where labels are not one integer for each row of x, or where there are no classes to choose from."""
    if not isinstance(labels, torch.Tensor):
        raise invalid_type("labels", type(labels), "a torch.Tensor of integers")
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise invalid_type("labels", labels.dtype, "integers, one class for each token", "Use torch.int64.")
    checks.check_beside("labels", labels, x)
    if labels.shape != x.shape[:-1]:
        got, needed = f"shape {tuple(labels.shape)}", f"shape {tuple(x.shape[:-1])}: one class for each row of x"
        raise invalid_value("labels", got, needed)
    if not weight.numel():
        raise invalid_value("weight", f"shape {tuple(weight.shape)}", "one class and one feature or more")
    if isinstance(weight, Gathered):
        raise NotSupportedError(
            "linear_cross_entropy: got a weight that low_precision_all_gather gathers as codes, needed values. Leave "
            "the head out of it: it is the module that multiplies with this weight."
        )
