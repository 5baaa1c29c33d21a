"""`LayerNorm` and `RMSNorm`: torch's norms, whose weights may be stored minus one."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.types import Device

from microfloat.arguments import check_choice
from microfloat.torch._typing import StateDict
from microfloat.torch.nn.options import drop_extra_state


class _ZeroCentred(nn.Module):
    """The keyword `zero_centered_gamma` of both norms, under which weights start at 0 instead of 1."""

    weight: nn.Parameter
    zero_centered_gamma: bool

    def __init__(self, *arguments: object, zero_centered_gamma: bool) -> None:
        self.__dict__["zero_centered_gamma"] = zero_centered_gamma  # which `reset_parameters` reads
        super().__init__(*arguments)

    def reset_parameters(self) -> None:
        """Set weights to 1 (`zero_centered_gamma`: to 0, and the norm adds 1) and biases to 0."""
        super().reset_parameters()  # type: ignore[misc]
        if self.zero_centered_gamma and self.weight is not None:
            nn.init.zeros_(self.weight)

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *arguments: list[str]) -> None:  # type: ignore[override]
        drop_extra_state(self, state_dict, prefix, arguments[-1])
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", zero_centered_gamma=True" if self.zero_centered_gamma else "")


class LayerNorm(_ZeroCentred, nn.LayerNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    """``y = (x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimensions, as nn.LayerNorm.

    `zero_centered_gamma`: ``weight + 1`` takes the weight's place, in float32. Parameters `weight` and `bias`.
    """

    def __init__(
        self, normalized_shape: int | list[int], eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True,
        device: Device = None, dtype: torch.dtype | None = None, *, zero_centered_gamma: bool = False,
    ) -> None:  # fmt: skip
        arguments = normalized_shape, eps, elementwise_affine, bias, device, dtype
        super().__init__(*arguments, zero_centered_gamma=zero_centered_gamma)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm of `input`, in its dtype, which may differ from that of the parameters."""
        weight = self.weight
        # torch takes parameters of the input's dtype, or of float32 beside an input of less.
        is_taken = weight is None or weight.dtype in (input.dtype, torch.float32)
        if is_taken and not (self.zero_centered_gamma and weight is not None):
            return super().forward(input)
        weight = weight.float() + 1.0 if self.zero_centered_gamma else weight.float()
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).to(input.dtype)


class RMSNorm(_ZeroCentred, nn.RMSNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    """``y = x / sqrt(mean(x^2) + eps) * weight`` over the last dimensions, as nn.RMSNorm.

    `zero_centered_gamma`: ``weight + 1`` takes the weight's place, in float32. Parameter `weight`.
    """

    def __init__(
        self, normalized_shape: int | list[int], eps: float | None = None, elementwise_affine: bool = True,
        device: Device = None, dtype: torch.dtype | None = None, *, zero_centered_gamma: bool = False,
    ) -> None:  # fmt: skip
        arguments = normalized_shape, eps, elementwise_affine, device, dtype
        super().__init__(*arguments, zero_centered_gamma=zero_centered_gamma)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x, in its dtype."""
        if not self.zero_centered_gamma or self.weight is None:
            return super().forward(x)
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float() + 1.0, eps).to(x.dtype)


_NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def make_norm(normalization: str, size: int, eps: float, zero_centered_gamma: bool, **where: object) -> nn.Module:
    """The norm of this name over `size` features."""
    check_choice("normalization", normalization, _NORMS)
    return _NORMS[normalization](size, eps=eps, zero_centered_gamma=zero_centered_gamma, **where)
