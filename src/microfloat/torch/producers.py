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

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from microfloat.errors import unknown_name
from microfloat.recipes import Cast

__all__ = [
    "ACTIVATIONS", "Activation", "ActivationGradient", "Norm", "Statistics", "norm_gradients",
    "waits_for_amax",
]  # fmt: skip

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
Both = tuple[Any, Any]


@dataclass(frozen=True, eq=False)
class Statistics:
    """Of the rows of a norm's input, float32 [M]: the mean (None for RMSNorm) and 1 / its spread."""

    mean: torch.Tensor | None
    inverse: torch.Tensor


def waits_for_amax(row: Cast | None, column: Cast | None) -> bool:
    """Whether the casts are per tensor with current scaling: their scale is known when all of the value is."""
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

    @property
    def dtype(self) -> torch.dtype:
        """Of the value."""
        return self.x_MK.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the value."""
        return self.x_MK.shape

    def values(self, kernels: ModuleType | None) -> tuple[torch.Tensor, torch.Tensor | None, Statistics]:
        """(value [M, K] in x's dtype, its amax or None where it was not measured, statistics)."""
        if kernels is not None:
            weight = _weight(self)
            value, amax, mean, inverse = kernels.norm_values(
                self.x_MK, weight, self.bias_K, eps=self.eps, kind=self.kind
            )
            return value, amax, Statistics(mean, inverse)
        statistics = self.statistics()
        return self.value_of(statistics), None, statistics

    def statistics(self) -> Statistics:
        """In float32, by torch."""
        x = self.x_MK.float()
        mean = x.mean(1) if self.kind == "layer" else None
        centred = x if mean is None else x - mean[:, None]
        return Statistics(mean, torch.rsqrt(centred.square().mean(1) + self.eps))

    def value_of(self, statistics: Statistics) -> torch.Tensor:
        """The value that given statistics make."""
        value = self.x_MK.float()
        if statistics.mean is not None:
            value = value - statistics.mean[:, None]
        value = value * statistics.inverse[:, None]
        if self.weight_K is not None:
            value = value * self.weight_K.float()
        if self.bias_K is not None:
            value = value + self.bias_K.float()
        return value.to(self.x_MK.dtype)

    def codes(
        self, kernels: ModuleType, row: Cast | None, column: Cast | None, options: Any
    ) -> tuple[Both, Statistics]:
        """Both operands of the value in one pass."""
        made = kernels.norm_quantize(
            self.x_MK, _weight(self), self.bias_K, row, column, eps=self.eps, kind=self.kind, **options
        )
        return (made.row, made.column), Statistics(made.mean, made.inverse)


def _weight(norm: Norm) -> torch.Tensor:
    return torch.ones_like(norm.x_MK[0]) if norm.weight_K is None else norm.weight_K


def norm_gradients(
    norm: Norm, statistics: Statistics, grad_MK: torch.Tensor, wants: tuple[bool, bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x, weight and bias, each in its own dtype where it is wanted.

    With g = grad * weight and n the normalized x:  dx = r * (g - n * mean(g * n)), less r * mean(g) for LayerNorm;
    dweight = sum over rows of grad * n;  dbias = sum over rows of grad.
    """
    x, weight, bias = norm.x_MK, norm.weight_K, norm.bias_K
    wants = wants[0], wants[1] and weight is not None, wants[2] and bias is not None
    same = all(t is None or t.dtype == x.dtype for t in (weight, bias, grad_MK))
    if x.is_cuda and same and grad_MK.dtype == x.dtype:  # torch's own kernels
        size, inverse = [x.shape[1]], statistics.inverse[:, None]
        if norm.kind == "layer":
            mean = statistics.mean[:, None]  # type: ignore[index]
            aten = torch.ops.aten.native_layer_norm_backward
            return aten(grad_MK.contiguous(), x.contiguous(), size, mean, inverse, weight, bias, list(wants))
        dx, dweight = torch.ops.aten._fused_rms_norm_backward(
            grad_MK.contiguous(), x.contiguous(), size, inverse, weight, [wants[0], wants[1]]
        )
        dbias = grad_MK.sum(0, dtype=torch.float32).to(bias.dtype) if wants[2] else None  # type: ignore[union-attr]
        return dx, dweight, dbias
    inverse, grad = statistics.inverse[:, None], grad_MK.float()
    normalized = (x.float() if statistics.mean is None else x.float() - statistics.mean[:, None]) * inverse
    dx = dweight = dbias = None
    if wants[0]:
        inner = grad if weight is None else grad * weight.float()
        dx = inner - normalized * (inner * normalized).mean(1, keepdim=True)
        if norm.kind == "layer":
            dx = dx - inner.mean(1, keepdim=True)
        dx = (dx * inverse).to(x.dtype)
    if wants[1]:
        dweight = (grad * normalized).sum(0).to(weight.dtype)  # type: ignore[union-attr]
    if wants[2]:
        dbias = grad.sum(0).to(bias.dtype)  # type: ignore[union-attr]
    return dx, dweight, dbias


def _activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """f(x), in x's dtype (float32 inside)."""
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "gelu":
        return F.gelu(x)
    if activation == "relu":
        return F.relu(x)
    raise unknown_name("activation", activation, ACTIVATIONS)


def _through_activation(grad: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    """``grad * f'(x)`` in x's dtype (float32 inside)."""
    aten = torch.ops.aten
    if activation == "silu":
        return aten.silu_backward(grad, x)
    if activation == "relu":
        return aten.threshold_backward(grad, x, 0)
    return aten.gelu_backward(grad, x, approximate="tanh" if activation == "gelu_tanh" else "none")


@dataclass(frozen=True, eq=False)
class Activation:
    """``f(x)``, or with `up` ``round(f(x)) * up`` (SwiGLU: activation="silu")."""

    x_MF: torch.Tensor
    up_MF: torch.Tensor | None
    activation: str

    @property
    def dtype(self) -> torch.dtype:
        """Of the value."""
        return self.x_MF.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the value."""
        return self.x_MF.shape

    def values(self, kernels: ModuleType | None) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """(value [M, F], its amax or None where it was not measured, None)."""
        if kernels is not None:
            return *kernels.activation_values(self.x_MF, self.up_MF, activation=self.activation), None
        value = _activate(self.x_MF, self.activation)
        return value if self.up_MF is None else value * self.up_MF, None, None

    def codes(self, kernels: ModuleType, row: Cast | None, column: Cast | None, options: Any) -> tuple[Both, None]:
        """Both operands of the value in one pass."""
        both = kernels.activation_quantize(self.x_MF, self.up_MF, row, column, activation=self.activation, **options)
        return both, None


@dataclass(frozen=True, eq=False)
class ActivationGradient:
    """What `Activation` passes back, given the gradient of its value: that of x, and with `up` that of up."""

    grad_MF: torch.Tensor
    x_MF: torch.Tensor
    up_MF: torch.Tensor | None
    activation: str

    def values(self, kernels: ModuleType | None) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """[(gradient, its amax or None)] of x, and of up."""
        if kernels is not None:
            first, second = kernels.activation_backward_values(
                self.grad_MF, self.x_MF, self.up_MF, activation=self.activation
            )
            return [first] if second is None else [first, second]
        x, grad = self.x_MF, self.grad_MF
        inner = grad if self.up_MF is None else grad * self.up_MF
        made: list[tuple[torch.Tensor, torch.Tensor | None]] = [(_through_activation(inner, x, self.activation), None)]
        if self.up_MF is not None:
            made.append((grad * _activate(x, self.activation), None))
        return made

    def codes(self, kernels: ModuleType, row: Cast | None, column: Cast | None, options: Any) -> list[Both]:
        """Both operands of each gradient, all in one pass; `amax`, `scale_enc` and `record` are pairs."""
        first, second = kernels.activation_backward_quantize(
            self.grad_MF, self.x_MF, self.up_MF, row, column, activation=self.activation, **options
        )
        return [first] if second is None else [first, second]
