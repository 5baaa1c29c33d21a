"""Norms and activations that hand their value to a cast: fused with it where a kernel is, the same bytes where none is.

A producer knows its value, computed in float32 and rounded to the dtype of its input as the unfused graph would have
rounded it (docs/numerics.md, section 6), and how to write codes of that value in both layouts without writing the value
itself. Statistics, exponentials and gradients of norms are in the tolerance class: they may differ between devices in
their last bits. Given the value, codes and scales do not.

    rms norm    x * r * weight                        r = (mean(x^2) + eps)^-1/2 per row
    layer norm  (x - mean) * r * weight + bias        r = (mean((x - mean)^2) + eps)^-1/2 per row
    activation  f(x),  or gated: round(f(x)) * up
    gradients   of x: round(grad * up) * f'(x),  of up: grad * round(f(x))

Legend: M = rows of x (all leading dimensions), K = features of a norm, F = features of an activation.
"""

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from microfloat.errors import unknown_name
from microfloat.operands import OPERANDS_OF
from microfloat.passes import CastInputs, OperandSpec
from microfloat.recipes import Cast, as_cast
from microfloat.recipes.usages import CastLike
from microfloat.torch import backends
from microfloat.torch._typing import Maybe, Options, Seed
from microfloat.torch.backends.base import Operand
from microfloat.torch.tensor import checks
from microfloat.torch.tensor import custom_ops as _operators
from microfloat.torch.tensor.ops import quantize
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor
from microfloat.torch.tensor.seeds import draw_seed, seed_words

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "qgelu", "srelu", "sigmoid")
Both = tuple[Operand | None, Operand | None]


class Valued(NamedTuple):
    """A value, and its amax where that was measured with it."""

    value: torch.Tensor
    amax: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of the rows of a norm's input, float32 [M]: mean (None for RMSNorm) and inverse of the spread."""

    mean: torch.Tensor | None
    inverse: torch.Tensor


def waits_for_amax(row: Cast | None, column: Cast | None) -> bool:
    """True for casts per tensor with current scaling, whose scale depends on the whole value."""
    cast = row or column
    return cast is not None and cast.format.is_per_tensor and cast.format.scale.name == "FP32" and not cast.is_delayed


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm (`kind` "rms") or LayerNorm ("layer") of the rows of x; `weight` and `bias` may be None."""

    x_MK: torch.Tensor
    weight_K: torch.Tensor | None
    bias_K: torch.Tensor | None
    eps: float
    kind: str

    def by_torch(self) -> tuple[list[torch.Tensor], Statistics]:
        """The value [M, K] in x's dtype, and its statistics."""
        x = self.x_MK.float()
        mean = x.mean(1) if self.kind == "layer" else None
        centred = x if mean is None else x - mean[:, None]
        statistics = Statistics(mean, torch.rsqrt(centred.square().mean(1) + self.eps))
        return [self.value_of(statistics)], statistics

    def value_of(self, statistics: Statistics) -> torch.Tensor:
        """The value [M, K] of the norm, computed with these statistics."""
        value = self.x_MK.float()
        if statistics.mean is not None:
            value = value - statistics.mean[:, None]
        value = value * statistics.inverse[:, None]
        if self.weight_K is not None:
            value = value * self.weight_K.float()
        if self.bias_K is not None:
            value = value + self.bias_K.float()
        return value.to(self.x_MK.dtype)


def norm_gradients(
    norm: Norm, statistics: Statistics, grad_MK: torch.Tensor, needs: tuple[bool, bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x, weight and bias, each in its own dtype where it is needed.

    With g = grad * weight and n the normalized x:  dx = r * (g - n * mean(g * n)), less r * mean(g) for LayerNorm;
    dweight = sum over rows of grad * n;  dbias = sum over rows of grad.
    """
    x, weight, bias = norm.x_MK, norm.weight_K, norm.bias_K
    needs = needs[0], needs[1] and weight is not None, needs[2] and bias is not None
    same = all(t is None or t.dtype == x.dtype for t in (weight, bias, grad_MK))
    if x.is_cuda and same and grad_MK.dtype == x.dtype:  # torch's own kernels
        size, inverse = [x.shape[1]], statistics.inverse[:, None]
        if norm.kind == "layer":
            mean = statistics.mean[:, None]  # type: ignore[index]
            aten = torch.ops.aten.native_layer_norm_backward
            return aten(grad_MK.contiguous(), x.contiguous(), size, mean, inverse, weight, bias, list(needs))
        dx, dweight = torch.ops.aten._fused_rms_norm_backward(
            grad_MK.contiguous(), x.contiguous(), size, inverse, weight, [needs[0], needs[1]]
        )
        dbias = grad_MK.sum(0, dtype=torch.float32).to(bias.dtype) if needs[2] else None  # type: ignore[union-attr]
        return dx, dweight, dbias
    inverse, grad = statistics.inverse[:, None], grad_MK.float()
    normalized = (x.float() if statistics.mean is None else x.float() - statistics.mean[:, None]) * inverse
    dx = dweight = dbias = None
    if needs[0]:
        inner = grad if weight is None else grad * weight.float()
        dx = inner - normalized * (inner * normalized).mean(1, keepdim=True)
        if norm.kind == "layer":
            dx = dx - inner.mean(1, keepdim=True)
        dx = (dx * inverse).to(x.dtype)
    if needs[1]:
        dweight = (grad * normalized).sum(0).to(weight.dtype)  # type: ignore[union-attr]
    if needs[2]:
        dbias = grad.sum(0).to(bias.dtype)  # type: ignore[union-attr]
    return dx, dweight, dbias


_PLAIN = {
    "silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "gelu": F.gelu, "relu": F.relu,
    "sigmoid": torch.sigmoid,
}  # fmt: skip


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """f(x), in x's dtype (float32 inside)."""
    if activation in _PLAIN:
        return _PLAIN[activation](x)
    if activation == "qgelu":
        return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)
    if activation == "srelu":
        return F.relu(x).float().square().to(x.dtype)
    raise unknown_name("activation", activation, ACTIVATIONS)


def _through_activation(grad: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    """``grad * f'(x)`` in x's dtype (float32 inside)."""
    aten = torch.ops.aten
    if activation == "silu":
        return aten.silu_backward(grad, x)
    if activation == "relu":
        return aten.threshold_backward(grad, x, 0)
    if activation == "qgelu":
        wide = x.float()
        s = torch.sigmoid(1.702 * wide)
        return (grad.float() * (s * (1.0 + 1.702 * wide * (1.0 - s)))).to(x.dtype)
    if activation == "srelu":
        return (grad.float() * 2.0 * F.relu(x).float()).to(x.dtype)
    if activation == "sigmoid":
        s = torch.sigmoid(x.float())
        return (grad.float() * (s * (1.0 - s))).to(x.dtype)
    return aten.gelu_backward(grad, x, approximate="tanh" if activation == "gelu_tanh" else "none")


@dataclass(frozen=True, eq=False)
class Activation:
    """``f(x)``, or with `up` ``round(f(x)) * up`` (SwiGLU: activation="silu")."""

    x_MF: torch.Tensor
    up_MF: torch.Tensor | None
    activation: str

    def by_torch(self) -> tuple[list[torch.Tensor], None]:
        """The value [M, F]."""
        value = activate(self.x_MF, self.activation)
        return [value if self.up_MF is None else value * self.up_MF], None


@dataclass(frozen=True, eq=False)
class ActivationGradient:
    """The gradients of x and, where there is one, of `up`, from the gradient of an activation's value."""

    grad_MF: torch.Tensor
    x_MF: torch.Tensor
    up_MF: torch.Tensor | None
    activation: str

    def by_torch(self) -> tuple[list[torch.Tensor], None]:
        """The gradient of x, and the gradient of up where there is one."""
        inner = self.grad_MF if self.up_MF is None else self.grad_MF * self.up_MF
        made = [_through_activation(inner, self.x_MF, self.activation)]
        return made if self.up_MF is None else [*made, self.grad_MF * activate(self.x_MF, self.activation)], None


Producer: TypeAlias = Norm | Activation | ActivationGradient


def input_of(producer: Producer) -> torch.Tensor:
    """x, which has the shape and dtype of the value."""
    return producer.x_MK if isinstance(producer, Norm) else producer.x_MF


def values_of(producer: Producer, kernels: ModuleType | None) -> tuple[list[Valued], Statistics | None]:
    """Each value that a producer makes, and the statistics of a norm: by kernels where there are any, else by torch."""
    if kernels is not None:
        return kernels.values(producer)
    values, statistics = producer.by_torch()
    return [Valued(value) for value in values], statistics


# ----------------------------------------------------------------------------------------------------- codes of a value

_NORMS = ("rms", "layer")


@dataclass(eq=False)
class Produced:
    """The codes of a value: `row` contracts its last axis, `column` its rows; statistics of a norm, float32 [M]."""

    row: QuantizedTensor
    column: QuantizedTensor
    mean: torch.Tensor | None = None
    inverse: torch.Tensor | None = None


def produce(
    kind: str, x: torch.Tensor, second: Maybe, bias: Maybe, eps: float, casts: tuple[CastLike, CastLike | None],
    seed: Seed, scale_enc: float | Maybe, backend: str,
) -> Produced:  # fmt: skip
    """The codes of a value, cast apart from it where no kernel does both, as in traces, which compilers fuse.

    `kind`: "rms" or "layer" (norms), or the name of an activation. `second`: the weight of a norm, or the `up` that an
    activation is multiplied with.
    """
    producer, kernels = _producer(kind, x, second, bias, eps), None
    pair = casts[0], casts[0] if casts[1] is None else casts[1]
    streams = tuple(of.stream for of in OPERANDS_OF["x"])
    is_fused = False
    if not _operators.is_tracing(x):
        row, column = pair = as_cast(pair[0]), as_cast(pair[1])
        kernels = backends.choose(backend, x.device).producers
        is_fused = kernels is not None and kernels.fuses(row, column)
        if is_fused and not waits_for_amax(row, column):
            words = None
            if row.is_stochastic or column.is_stochastic:
                words = draw_seed(x.device) if seed is None else seed_words(seed, x.device)
            encode_scale = checks.check_scale_enc(scale_enc, row.is_delayed or column.is_delayed, x.device)
            specs = (OperandSpec(cast, stream=stream) for cast, stream in zip(pair, streams, strict=True))
            ((first, last),), statistics = kernels.codes(producer, *specs, CastInputs(encode_scale, words))
            of_value = input_of(producer)
            options: Options = {"shape": of_value.shape, "dtype": of_value.dtype}
            made = (
                QuantizedTensor.from_operand(first, row, axis=1, **options),
                QuantizedTensor.from_operand(last, column, axis=0, **options),
            )
            return _with_statistics(made, statistics)
    ((value, amax),), statistics = values_of(producer, kernels)
    options = {"seed": seed, "stream": streams, "scale_enc": scale_enc, "amax": amax if is_fused else None}
    return _with_statistics(quantize(value, pair, axis=(-1, -2), backend=backend, **options), statistics)


def _with_statistics(made: tuple[QuantizedTensor, QuantizedTensor], statistics: Statistics | None) -> Produced:
    return Produced(*made) if statistics is None else Produced(*made, statistics.mean, statistics.inverse)


def _producer(kind: str, x: torch.Tensor, second: Maybe, bias: Maybe, eps: float) -> Norm | Activation:
    first = "gate" if kind == "silu" else "x"
    rows = _rows_of(first, x)
    if kind not in _NORMS:
        if kind == "silu":  # SwiGLU
            checks.check_tensor("up", second)
            checks.check_like("up", second, x, first)
        return Activation(rows, None if second is None else _rows_of("up", second), kind)
    for name, parameter in (("weight", second), ("bias", bias)):
        checks.check_parameter(name, parameter, rows)
    weight, bias = (None if parameter is None else parameter.detach() for parameter in (second, bias))
    return Norm(rows, weight, bias, checks.check_eps(eps), kind)


def _rows_of(argument: str, x: torch.Tensor) -> torch.Tensor:
    """The matrix that the last dimension of x makes, without its history."""
    checks.check_tensor(argument, x)
    checks.check_rows(argument, x)
    x = x.detach().resolve_neg()
    return x if x.dim() == 2 else x.reshape(checks.row_count(x.shape), x.shape[-1])
