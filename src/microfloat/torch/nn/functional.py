"""Norms and activations fused with what reads them: casts of their value, and Linears with a backward of their own.

    norm_linear(x, norm, *layers)                 y_i = layer_i(norm(x))
    activation_linear(x, layer, up=up)            y = layer(f(x) * up);  without `up`, layer(f(x))
    norm_mlp(x, norm, gate, down, up=up)          y = down(f(gate(h)) * up(h)) of h = norm(x)
    rms_norm_quantize, layer_norm_quantize, swiglu_quantize, gelu_quantize      codes of the value, in both layouts
    dbias_quantize, dact_quantize, dact_dbias_quantize      codes of a gradient, with the gradient of a bias

They compute what the modules would one by one, with the same casts, seeds and scaling states: the value is rounded to
its dtype before it is cast (docs/numerics.md, section 6). What they save is memory and traffic: neither the normed
value nor the activation's is kept for backward, only its codes, and on a GPU delayed and block casts are written by the
kernel that computes the value. Where nothing can be fused (a layer in high precision, compiled code, which fuses by
itself) the modules run. Outputs and the gradients of the Linears have the bits of the modules one by one; the gradients
of a norm are torch's own on a GPU where all dtypes agree, else float32 arithmetic that is rounded once, which differs
from torch's by rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from microfloat.errors import invalid_type, invalid_value, unknown_name
from microfloat.formats import ScaledFormat
from microfloat.operands import OPERANDS_OF
from microfloat.recipes import Cast, as_cast
from microfloat.torch._typing import Maybe, Options, Seed
from microfloat.torch.context import ambient
from microfloat.torch.launch.prologues import (
    ACTIVATIONS,
    ActivationGradient,
    Produced,
    activate,
    codes_of,
    produce,
    rows_of,
    sum_of_rows,
)
from microfloat.torch.linear.function import Run, apply, begin_apart, end
from microfloat.torch.linear.fused_input import ActivationRun, GradientLink, NormRun
from microfloat.torch.linear.schedule import autocast_dtype
from microfloat.torch.nn.linear import UNPINNED, JointCall, Linear, check_first_microbatch
from microfloat.torch.nn.merged import Unit, call_layer, can_join, is_bare, joined, returned_bias, units_of
from microfloat.torch.tensor.checks import check_beside, check_features, check_like, check_rows, is_abstract
from microfloat.torch.tensor.custom_ops import is_tracing, refuse_transforms
from microfloat.torch.tensor.ops import quantize
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

__all__ = [
    "Produced", "activation_linear", "dact_dbias_quantize", "dact_quantize", "dbias_quantize", "gelu_quantize",
    "layer_norm_quantize", "norm_linear", "norm_mlp", "rms_norm_quantize", "swiglu_quantize",
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- Linears


def norm_linear(x: torch.Tensor, norm: nn.Module, *layers: Linear, is_first_microbatch: bool | None = None) -> Any:
    """``y_i = layer_i(norm(x))``, differentiable once: one tensor for one layer, a tuple for several.

    `norm`: nn.RMSNorm or nn.LayerNorm over the last dimension of x [..., K]; `layers`: `microfloat.torch.Linear`s of K
    in features. Layers whose recipes agree share the codes of the normed value. `is_first_microbatch`: as in `Linear`,
    of all layers. Raises InvalidTypeError or
    InvalidValueError for other modules and shapes. Source: docs/numerics.md, section 6.

    >>> layer, norm = Linear(32, 8, recipe="mxfp8"), nn.RMSNorm(32)
    >>> norm_linear(torch.ones(2, 32), norm, layer).shape
    torch.Size([2, 8])
    """
    check_rows("x", x)
    if not layers:
        raise invalid_value("layers", "none", "one Linear or more that read norm(x)")
    for layer in layers:
        _check_layer("layers", layer)
    check_features("layers", layers, x.shape[-1], "x")
    outputs = project(x, norm_of(norm, x), layers, False, is_first_microbatch)
    return outputs[0] if len(layers) == 1 else outputs


def project(
    x: torch.Tensor, norm: "NormOf", layers: Sequence[Linear], join: bool, is_first_microbatch: bool | None = None,
    biases: list[Maybe] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The output of each layer for norm(x); with `join` one tensor for all of them, where they are one product.

    `biases` takes what `return_bias` puts beside each, None where a layer adds its own.
    """
    units = _units(x, layers, join, norm)
    runs = None if units is None else _begin(x, units, [(x, norm)] * len(units), is_first_microbatch)
    if units is None or runs is None:
        value = norm.module(x)
        if join and torch.compiler.is_compiling() and _joins_in_graph(layers):
            call = JointCall(layers[0], *joined(layers))
            outputs = (call.forward(value),)
        else:
            return tuple(call_layer(layer, value, is_first_microbatch, biases) for layer in layers)
    else:
        outputs = apply(NormRun(runs, norm.kind, norm.eps, None), x, norm.weight, norm.bias, *_tensors(units))
        _end(runs, units)
    if biases is not None:
        biases += [returned_bias(layer, outputs[0]) for layer in layers]
    return outputs


def _joins_in_graph(layers: Sequence[Linear]) -> bool:
    """Layers whose dw is not for autograd run apart, in eager mode."""
    return can_join(layers) and not layers[0].fuse_wgrad_accumulation


def activation_linear(
    x: torch.Tensor, layer: Linear, *, up: torch.Tensor | None = None, activation: str = "silu",
    is_first_microbatch: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """``y = layer(f(x))``, or with `up` ``layer(f(x) * up)`` (SwiGLU: f = silu), differentiable once.

    x and up [..., F] of one shape and dtype; `activation`: silu, gelu, gelu_tanh, relu, qgelu (``x sigmoid(1.702 x)``)
    srelu (``relu(x)^2``) or sigmoid (GLU). Source: docs/numerics.md, section 6.
    """
    _check_layer("layer", layer)
    _check_activation(activation)
    check_rows("x", x)
    check_features("layer", [layer], x.shape[-1], "x")
    if up is not None:
        check_like("up", up, x)
    units = _units(x, [layer], False)
    runs = None if units is None else _begin(x, units, [(x, up)], is_first_microbatch)
    if units is None or runs is None:
        return call_layer(layer, activated(x, up, activation), is_first_microbatch)
    y = apply(ActivationRun(runs[0], activation, None), x, up, *_tensors(units))
    _end(runs, units)
    return y


def norm_mlp(
    x: torch.Tensor, norm: nn.Module, gate: Linear, down: Linear, *, up: Linear | None = None, activation: str = "silu",
    is_first_microbatch: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """``y = down(f(gate(h)) * up(h))`` with h = norm(x); without `up`, ``down(f(gate(h)))``. Differentiable once.

    Backward writes the gradients of gate and up as codes where their casts allow it. Arguments as in `norm_linear` and
    `activation_linear`; a joint matrix for gate and up takes `norm_linear` and `activation_linear` one after the other.
    """
    spec = norm_of(norm, x)
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
    return mlp(x, spec, outer, down, activation, is_first_microbatch)


def mlp(
    x: torch.Tensor, norm: "NormOf", outer: Sequence[Linear], down: Linear, activation: str,
    is_first_microbatch: bool | None = None, biases: list[Maybe] | None = None,
) -> torch.Tensor:  # fmt: skip
    """`norm_mlp` of arguments that were checked; `outer`: gate, and up if there is one.

    `biases`: as in `call_layer`, of `down`.
    """
    units = _units(x, (*outer, down), False, norm)
    runs = None if units is None else _begin(
        x, units, [*[(x, norm)] * len(outer), (x, norm, *outer)], is_first_microbatch
    )  # fmt: skip
    if units is None or runs is None:
        value = norm.module(x)
        made = [call_layer(layer, value, is_first_microbatch) for layer in outer]
        value = activated(made[0], made[1] if len(made) > 1 else None, activation)
        return call_layer(down, value, is_first_microbatch, biases)
    link = GradientLink()
    first, *second = apply(
        NormRun(runs[:-1], norm.kind, norm.eps, link), x, norm.weight, norm.bias, *_tensors(units[:-1])
    )  # fmt: skip
    inner = second[0] if second else None
    y = apply(ActivationRun(runs[-1], activation, link), first, inner, *_tensors(units[-1:]))
    _end(runs, units)
    if biases is not None:
        biases.append(returned_bias(down, y))
    return y


def _tensors(units: Sequence[Unit]) -> list[torch.Tensor | None]:
    """Weight and bias of each in turn."""
    return [tensor for unit in units for tensor in (unit.weight, unit.bias)]


def _units(
    x: torch.Tensor, layers: Sequence[Linear], join: bool, norm: "NormOf | None" = None
) -> list[Unit] | None:  # fmt: skip
    """The units that are multiplied; None where the modules must run by themselves."""
    if torch.compiler.is_compiling() or x.numel() == 0 or is_abstract(x) or hasattr(x, "placements"):
        return None
    # Somebody may have put another module in a layer's place, as PEFT does, or listens to calls, as tensor parallelism.
    if any(not isinstance(layer, Linear) or not is_bare(layer) for layer in layers) or not (
        norm is None or is_bare(norm.module)
    ):
        return None
    return units_of(layers, ambient(), join)


def _begin(
    x: torch.Tensor, units: Sequence[Unit], feeds: Sequence[Sequence["torch.Tensor | nn.Module | NormOf | None"]],
    is_first_microbatch: bool | None,
) -> list[Run] | None:  # fmt: skip
    """A run for every unit, or None where the modules must run by themselves.

    `feeds`: for each unit what its input is made from.
    """
    state = ambient()
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
    for unit, feed in zip(units, feeds, strict=True):
        for layer in unit.layers:
            layer._check_input(x) if unit is units[0] else layer._check_parameters(x)
            if layer._pinned is UNPINNED:
                layer.__dict__["_followed"] = True
        width = unit.weight.shape[1]
        dtype = compute if any(isinstance(source, Linear) for source in feed) else x.dtype  # of what it would read
        x_key = (torch.Size((rows, width)), (width, 1), dtype, x.get_device(), 0, False)
        wants_dx = grad and any(tensor.requires_grad for source in feed for tensor in _parameters(source))
        wants_dw = grad and unit.weight.requires_grad
        run = begin_apart(unit, x_key, state, compute, wants_dx, wants_dw, is_first_microbatch)
        if run is None:
            return None
        runs.append(run)
    return runs


def _parameters(source: "torch.Tensor | nn.Module | NormOf | None") -> list[torch.Tensor]:
    """The tensors by which a value depends on a source of it."""
    if isinstance(source, nn.Module):
        return list(source.parameters(recurse=False))
    tensors = (source.weight, source.bias) if isinstance(source, NormOf) else (source,)
    return [tensor for tensor in tensors if tensor is not None]


def _end(runs: Sequence[Run], units: Sequence[Unit]) -> None:
    for run, unit in zip(runs, units, strict=True):
        end(run, unit.layer)


class NormOf(NamedTuple):
    """A norm as kernels take it: "rms" or "layer", and what its value is multiplied with and shifted by."""

    module: nn.Module
    kind: str
    eps: float
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def norm_of(norm: nn.Module, x: torch.Tensor) -> NormOf:
    """The norm over the last dimension of x that a module computes."""
    check_rows("x", x)
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
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
    for name, parameter in (("weight", weight), ("bias", bias)):
        check_beside(f"norm.{name}", parameter, x, "Move the module to x.")
    if getattr(norm, "zero_centered_gamma", False) and weight is not None:
        weight = weight.float() + 1.0
    return NormOf(norm, kind, float(eps), weight, bias)


def _check_layer(argument: str, layer: object) -> None:
    if not isinstance(layer, Linear):
        raise invalid_type(
            argument, type(layer), "a microfloat.torch.Linear", "Convert the model first: microfloat.torch.convert."
        )
    if layer.return_bias:
        raise invalid_value(
            argument, "a Linear with return_bias=True", "one that adds its bias",
            "LayerNormLinear and LayerNormMLP return theirs: return_bias=True.",
        )  # fmt: skip


def _check_activation(activation: str) -> None:
    if not isinstance(activation, str):
        raise invalid_type("activation", type(activation), "one of " + ", ".join(map(repr, ACTIVATIONS)))
    if activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS)


def activated(x: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    """``f(x)``, or with `up` ``f(x) * up``."""
    value = activate(x, activation)
    return value if up is None else value * up


# ------------------------------------------------------------------------------------------------------------- codes


def rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor | None, cast: Cast | ScaledFormat | str, *, eps: float = 1e-6,
    column_cast: Cast | ScaledFormat | str | None = None, seed: Seed = None,
    scale_enc: float | torch.Tensor | None = None, backend: str = "auto",
) -> Produced:  # fmt: skip
    """Codes of ``round(x * r * weight)``, r = (mean(x^2) + eps)^-1/2 per row, in both layouts. Not differentiable.

    x [..., K], whose leading dimensions become the rows M of both operands; `column_cast` None is `cast`. The other
    arguments are those of `microfloat.torch.quantize`, whose bytes the value would have. Source: docs/numerics.md, 6.
    """
    return produce("rms", x, weight, None, eps, (cast, column_cast), seed, scale_enc, backend)


def layer_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, cast: Cast | ScaledFormat | str, *,
    eps: float = 1e-5, column_cast: Cast | ScaledFormat | str | None = None, seed: Seed = None,
    scale_enc: float | torch.Tensor | None = None, backend: str = "auto",
) -> Produced:  # fmt: skip
    """Codes of ``round((x - mean) * r * weight + bias)`` in both layouts; see `rms_norm_quantize`."""
    return produce("layer", x, weight, bias, eps, (cast, column_cast), seed, scale_enc, backend)


def swiglu_quantize(
    gate: torch.Tensor, up: torch.Tensor, cast: Cast | ScaledFormat | str, *,
    column_cast: Cast | ScaledFormat | str | None = None, seed: Seed = None,
    scale_enc: float | torch.Tensor | None = None, backend: str = "auto",
) -> Produced:  # fmt: skip
    """Codes of ``round(round(silu(gate)) * up)`` in both layouts; see `rms_norm_quantize`."""
    return produce("silu", gate, up, None, 0.0, (cast, column_cast), seed, scale_enc, backend)


def gelu_quantize(
    x: torch.Tensor, cast: Cast | ScaledFormat | str, *, approximate: str = "none",
    column_cast: Cast | ScaledFormat | str | None = None, seed: Seed = None,
    scale_enc: float | torch.Tensor | None = None, backend: str = "auto",
) -> Produced:  # fmt: skip
    """Codes of ``round(gelu(x))`` in both layouts, `approximate` "none" or "tanh"; see `rms_norm_quantize`."""
    if approximate not in ("none", "tanh"):
        raise unknown_name("approximate", approximate, ("none", "tanh"))
    kind = "gelu" if approximate == "none" else "gelu_tanh"
    return produce(kind, x, None, None, 0.0, (cast, column_cast), seed, scale_enc, backend)


def dbias_quantize(
    dy: torch.Tensor, cast: Cast | ScaledFormat | str, *, column_cast: Cast | ScaledFormat | str | None = None,
    seed: Seed = None, scale_enc: float | torch.Tensor | None = None, backend: str = "auto",
) -> Produced:  # fmt: skip
    """Codes of an output gradient dy [..., N] in both layouts, and `bias_grad` [N], the sum of its rows.

    Cast as the operands of dy in a layer are, with their random streams; the sum is float32 inside and has dy's dtype.
    The other arguments as in `rms_norm_quantize`. Source: docs/numerics.md 5.3 and 6.

    >>> made = dbias_quantize(torch.ones(3, 32), "mxfp8")
    >>> made.row.shape, made.column.axis, made.bias_grad[0].item()
    (torch.Size([3, 32]), 0, 3.0)
    """
    return _of_gradient(rows_of("dy", dy), (cast, column_cast), seed, scale_enc, backend, True)


def dact_quantize(
    dy: torch.Tensor, x: torch.Tensor, cast: Cast | ScaledFormat | str, *, activation: str = "silu",
    up: torch.Tensor | None = None, column_cast: Cast | ScaledFormat | str | None = None, seed: Seed = None,
    scale_enc: float | torch.Tensor | None = None, backend: str = "auto",
) -> Produced | tuple[Produced, Produced]:  # fmt: skip
    """Codes of ``round(dy * f'(x))``, the gradient that an activation passes back, in both layouts.

    dy, x, up [..., F] of one shape and dtype. With `up`, of ``f(x) * up``: a pair, the codes of ``round(round(dy * up)
    * f'(x))``, the gradient of x, and of ``round(dy * round(f(x)))``, that of up. `activation` as in
    `activation_linear`; the other arguments as in `dbias_quantize`, whose casts these are.
    """
    return _of_activation(dy, x, up, activation, (cast, column_cast), seed, scale_enc, backend, False)


def dact_dbias_quantize(
    dy: torch.Tensor, x: torch.Tensor, cast: Cast | ScaledFormat | str, *, activation: str = "silu",
    up: torch.Tensor | None = None, column_cast: Cast | ScaledFormat | str | None = None, seed: Seed = None,
    scale_enc: float | torch.Tensor | None = None, backend: str = "auto",
) -> Produced | tuple[Produced, Produced]:  # fmt: skip
    """The codes of `dact_quantize` and, as `bias_grad` [F], the sum of the rows of each rounded gradient."""
    return _of_activation(dy, x, up, activation, (cast, column_cast), seed, scale_enc, backend, True)


_Casts = tuple[Cast | ScaledFormat | str, Cast | ScaledFormat | str | None]


def _of_activation(
    dy: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, activation: str, casts: _Casts, seed: Seed,
    scale_enc: float | torch.Tensor | None, backend: str, sums: bool,
) -> Produced | tuple[Produced, Produced]:  # fmt: skip
    _check_activation(activation)
    rows = rows_of("dy", dy)
    for name, other in (("x", x), ("up", dy if up is None else up)):
        check_like(name, other, dy, "dy")
    producer = ActivationGradient(rows, rows_of("x", x), None if up is None else rows_of("up", up), activation)
    if is_tracing(dy):
        made = [_of_gradient(one, casts, seed, scale_enc, backend, sums) for one in producer.by_torch()[0]]
    else:
        row, column = as_cast(casts[0]), as_cast(casts[0] if casts[1] is None else casts[1])
        made = codes_of(producer, "dy", row, column, seed, scale_enc, backend, sums)
    return made[0] if up is None else (made[0], made[1])


def _of_gradient(
    value: torch.Tensor, casts: _Casts, seed: Seed, scale_enc: float | torch.Tensor | None, backend: str, sums: bool
) -> Produced:
    """The codes of a gradient [M, N] at hand."""
    pair = casts[0], casts[0] if casts[1] is None else casts[1]
    streams = OPERANDS_OF["dy"][0].stream, OPERANDS_OF["dy"][1].stream
    options: Options = {"seed": seed, "stream": streams, "scale_enc": scale_enc, "backend": backend}
    row, column = quantize(value, pair, axis=(-1, -2), **options)
    return Produced(row, column, bias_grad=sum_of_rows(value) if sums else None)
