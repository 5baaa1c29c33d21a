"""Norms and activations fused with what reads them: casts of their value, and Linears with a backward of their own.

    norm_linear(x, norm, *layers)                 y_i = layer_i(norm(x))
    activation_linear(x, layer, up=up)            y = layer(f(x) * up);  without `up`, layer(f(x))
    norm_mlp(x, norm, gate, down, up=up)          y = down(f(gate(h)) * up(h)) of h = norm(x)
    rms_norm_quantize, layer_norm_quantize, swiglu_quantize, gelu_quantize      codes of the value, in both layouts

They compute what the modules would one by one, with the same casts, seeds and scaling states: the value is rounded to
its dtype before it is cast (docs/numerics.md, section 6). What they save is memory and traffic: neither the normed
value nor the activation's is kept for backward, only its codes, and on a GPU delayed and block casts are written by the
kernel that computes the value. Where nothing can be fused (a layer in high precision, compiled code, which fuses by
itself) the modules run. Outputs and the gradients of the Linears have the bits of the modules one by one; the gradients
of a norm are torch's own on a GPU where all dtypes agree, else float32 arithmetic that is rounded once, which differs
from torch's by rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from microfloat.errors import invalid_type, invalid_value, unknown_name
from microfloat.formats import ScaledFormat
from microfloat.recipes import Cast
from microfloat.torch._checks import check_features, check_like, check_rows, is_abstract
from microfloat.torch._operators import refuse_transforms
from microfloat.torch.context import ambient
from microfloat.torch.linear import Run, apply, begin_apart, end
from microfloat.torch.nn.linear import UNPINNED, Linear
from microfloat.torch.produced_linear import ActivationRun, GradientLink, NormRun
from microfloat.torch.producers import ACTIVATIONS, Produced, produce
from microfloat.torch.schedule import autocast_dtype
from microfloat.torch.tensor import QuantizedTensor

__all__ = [
    "Produced", "activation_linear", "gelu_quantize", "layer_norm_quantize", "norm_linear", "norm_mlp",
    "rms_norm_quantize", "swiglu_quantize",
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- Linears


def norm_linear(x: torch.Tensor, norm: nn.Module, *layers: Linear) -> Any:
    """``y_i = layer_i(norm(x))``, differentiable once: one tensor for one layer, a tuple for several.

    `norm`: nn.RMSNorm or nn.LayerNorm over the last dimension of x [..., K]; `layers`: `microfloat.torch.Linear`s of K
    in features. Layers whose recipes agree share the codes of the normed value. Raises InvalidTypeError or
    InvalidValueError for other modules and shapes. Source: docs/numerics.md, section 6.

    >>> layer, norm = Linear(32, 8, recipe="mxfp8"), nn.RMSNorm(32)
    >>> norm_linear(torch.ones(2, 32), norm, layer).shape
    torch.Size([2, 8])
    """
    kind, eps = _kind_of(norm, x)
    if not layers:
        raise invalid_value("layers", "none", "one Linear or more that read norm(x)")
    for layer in layers:
        _check_layer("layers", layer)
    check_features("layers", layers, x.shape[-1], "x")
    runs = _begin(x, layers, [(x, norm)] * len(layers))
    if runs is None:
        value = norm(x)
        outputs = tuple(layer(value) for layer in layers)
    else:
        outputs = apply(NormRun(runs, kind, eps, None), x, *_tensors(norm), *_tensors(*layers))
        _end(runs, layers)
    return outputs[0] if len(layers) == 1 else outputs


def activation_linear(
    x: torch.Tensor, layer: Linear, *, up: torch.Tensor | None = None, activation: str = "silu"
) -> torch.Tensor:
    """``y = layer(f(x))``, or with `up` ``layer(f(x) * up)`` (SwiGLU: f = silu), differentiable once.

    x and up [..., F] of one shape and dtype; `activation`: silu, gelu, gelu_tanh or relu. Source: docs/numerics.md,
    section 6.
    """
    _check_layer("layer", layer)
    _check_activation(activation)
    check_rows("x", x)
    check_features("layer", [layer], x.shape[-1], "x")
    if up is not None:
        check_like("up", up, x)
    runs = _begin(x, [layer], [(x, up)])
    if runs is None:
        return layer(_plain_activation(x, up, activation))
    y = apply(ActivationRun(runs[0], activation, None), x, up, layer.weight, layer.bias)
    _end(runs, [layer])
    return y


def norm_mlp(
    x: torch.Tensor, norm: nn.Module, gate: Linear, down: Linear, *, up: Linear | None = None, activation: str = "silu"
) -> torch.Tensor:
    """``y = down(f(gate(h)) * up(h))`` with h = norm(x); without `up`, ``down(f(gate(h)))``. Differentiable once.

    Backward writes the gradients of gate and up as codes where their casts allow it. Arguments as in `norm_linear` and
    `activation_linear`; a joint matrix for gate and up takes `norm_linear` and `activation_linear` one after the other.
    """
    kind, eps = _kind_of(norm, x)
    _check_activation(activation)
    outer = (gate,) if up is None else (gate, up)
    for name, layer in (("gate", gate), ("up", outer[-1]), ("down", down)):
        _check_layer(name, layer)
    for name, layer in (("gate", gate), ("up", outer[-1])):
        check_features(name, [layer], x.shape[-1], "x")
    if outer[-1].out_features != gate.out_features:
        got = f"out_features {outer[-1].out_features}"
        raise invalid_value("up", got, f"{gate.out_features}, as gate has: their outputs are multiplied")
    check_features("down", [down], gate.out_features, "gate's output")
    layers = (*outer, down)
    runs = _begin(x, layers, [*[(x, norm)] * len(outer), (x, norm, *outer)])
    if runs is None:
        value = norm(x)
        return down(_plain_activation(gate(value), None if up is None else up(value), activation))
    link = GradientLink()
    first, *second = apply(NormRun(runs[:-1], kind, eps, link), x, *_tensors(norm), *_tensors(*outer))
    inner = second[0] if second else None
    y = apply(ActivationRun(runs[-1], activation, link), first, inner, down.weight, down.bias)
    _end(runs, layers)
    return y


def _tensors(*modules: nn.Module) -> list[torch.Tensor | None]:
    """Weight and bias of each module in turn."""
    return [getattr(module, name, None) for module in modules for name in ("weight", "bias")]


def _begin(
    x: torch.Tensor, layers: Sequence[Linear], feeds: Sequence[Sequence[torch.Tensor | nn.Module | None]]
) -> list[Run] | None:
    """A run for every Linear, or None where the modules must run by themselves.

    `feeds`: for each layer the tensors and modules that its input is made from.
    """
    if torch.compiler.is_compiling() or x.numel() == 0 or is_abstract(x):
        return None
    state = ambient()
    recipes = [layer._resolve(state) for layer in layers]
    modules = [*layers, *(source for feed in feeds for source in feed if isinstance(source, nn.Module))]
    parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
    plain = (
        any(recipe is None for recipe in recipes) or (state is not None and state.calibrating)
        or any(isinstance(parameter, QuantizedTensor) or parameter.numel() == 0 for parameter in parameters)
    )  # fmt: skip
    if plain:
        return None
    refuse_transforms("forward", x)
    compute = autocast_dtype(x.device.type) or x.dtype
    if compute != x.dtype and not (x.is_floating_point() and compute.itemsize < x.dtype.itemsize):
        return None
    grad, rows = torch.is_grad_enabled(), x.numel() // x.shape[-1]
    runs = []
    for layer, recipe, feed in zip(layers, recipes, feeds, strict=True):
        layer._check_input(x) if layer is layers[0] else layer._check_parameters(x)
        if layer._pinned is UNPINNED:
            layer.__dict__["_followed"] = True
        width = layer.in_features
        dtype = compute if any(isinstance(source, Linear) for source in feed) else x.dtype  # of what it would read
        x_key = (torch.Size((rows, width)), (width, 1), dtype, x.get_device(), 0, False)
        wants_dx = grad and any(_requires_grad(source) for source in feed)
        wants_dw = grad and layer.weight.requires_grad
        run = begin_apart(layer, x_key, recipe, state, compute, wants_dx, wants_dw)  # type: ignore[arg-type]
        if run is None:
            return None
        runs.append(run)
    return runs


def _requires_grad(source: torch.Tensor | nn.Module | None) -> bool:
    if isinstance(source, nn.Module):
        return any(parameter.requires_grad for parameter in source.parameters(recurse=False))
    return source is not None and source.requires_grad


def _end(runs: Sequence[Run], layers: Sequence[Linear]) -> None:
    for run, layer in zip(runs, layers, strict=True):
        end(run, layer)


def _kind_of(norm: nn.Module, x: torch.Tensor) -> tuple[str, float]:
    """("rms" or "layer", eps) of a norm over the last dimension of x."""
    check_rows("x", x)
    if isinstance(norm, nn.RMSNorm):
        kind, eps = "rms", norm.eps if norm.eps is not None else torch.finfo(torch.float32).eps
    elif isinstance(norm, nn.LayerNorm):
        kind, eps = "layer", norm.eps
    else:
        raise invalid_type("norm", type(norm), "an nn.RMSNorm or an nn.LayerNorm")
    if tuple(norm.normalized_shape) != tuple(x.shape[-1:]):
        raise invalid_value(
            "norm",
            f"normalized_shape {tuple(norm.normalized_shape)}",
            f"the last dimension of x, {tuple(x.shape[-1:])}",
        )
    for name, parameter in norm.named_parameters(recurse=False):
        if parameter.device != x.device:
            needed = f"one on {x.device}, where x is"
            raise invalid_value(f"norm.{name}", f"a tensor on {parameter.device}", needed, "Move the module to x.")
    return kind, float(eps)


def _check_layer(argument: str, layer: object) -> None:
    if not isinstance(layer, Linear):
        raise invalid_type(
            argument, type(layer), "a microfloat.torch.Linear", "Convert the model first: microfloat.torch.convert."
        )


def _check_activation(activation: str) -> None:
    if not isinstance(activation, str):
        raise invalid_type("activation", type(activation), "one of " + ", ".join(map(repr, ACTIVATIONS)))
    if activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS)


def _plain_activation(x: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    if activation == "gelu_tanh":
        value = F.gelu(x, approximate="tanh")
    else:
        value = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}[activation](x)
    return value if up is None else value * up


# ------------------------------------------------------------------------------------------------------------- codes


def rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor | None, cast: Cast | ScaledFormat | str, *, eps: float = 1e-6,
    column_cast: Cast | ScaledFormat | str | None = None, seed: Any = None,
    scale_enc: float | torch.Tensor | None = None, backend: str = "auto",
) -> Produced:  # fmt: skip
    """Codes of ``round(x * r * weight)``, r = (mean(x^2) + eps)^-1/2 per row, in both layouts. Not differentiable.

    x [..., K], whose leading dimensions become the rows M of both operands; `column_cast` None is `cast`. The other
    arguments are those of `microfloat.torch.quantize`, whose bytes the value would have. Source: docs/numerics.md, 6.
    """
    return produce("rms", x, weight, None, eps, (cast, column_cast), seed, scale_enc, backend)


def layer_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, cast: Cast | ScaledFormat | str, *,
    eps: float = 1e-5, column_cast: Cast | ScaledFormat | str | None = None, seed: Any = None,
    scale_enc: float | torch.Tensor | None = None, backend: str = "auto",
) -> Produced:  # fmt: skip
    """Codes of ``round((x - mean) * r * weight + bias)`` in both layouts; see `rms_norm_quantize`."""
    return produce("layer", x, weight, bias, eps, (cast, column_cast), seed, scale_enc, backend)


def swiglu_quantize(
    gate: torch.Tensor, up: torch.Tensor, cast: Cast | ScaledFormat | str, *,
    column_cast: Cast | ScaledFormat | str | None = None, seed: Any = None,
    scale_enc: float | torch.Tensor | None = None, backend: str = "auto",
) -> Produced:  # fmt: skip
    """Codes of ``round(round(silu(gate)) * up)`` in both layouts; see `rms_norm_quantize`."""
    return produce("silu", gate, up, None, 0.0, (cast, column_cast), seed, scale_enc, backend)


def gelu_quantize(
    x: torch.Tensor, cast: Cast | ScaledFormat | str, *, approximate: str = "none",
    column_cast: Cast | ScaledFormat | str | None = None, seed: Any = None,
    scale_enc: float | torch.Tensor | None = None, backend: str = "auto",
) -> Produced:  # fmt: skip
    """Codes of ``round(gelu(x))`` in both layouts, `approximate` "none" or "tanh"; see `rms_norm_quantize`."""
    if approximate not in ("none", "tanh"):
        raise unknown_name("approximate", approximate, ("none", "tanh"))
    kind = "gelu" if approximate == "none" else "gelu_tanh"
    return produce(kind, x, None, None, 0.0, (cast, column_cast), seed, scale_enc, backend)
