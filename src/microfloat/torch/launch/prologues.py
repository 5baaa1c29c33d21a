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
from microfloat.recipes import Cast
from microfloat.torch.backends.base import Operand

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
