"""The 16-point Hadamard transform along the contraction axis, in the defined order (docs/numerics.md 5.2)."""

import torch

from microfloat.recipes import Hadamard

__all__ = ["inverse", "transform"]


def transform(x_RC: torch.Tensor, hadamard: Hadamard) -> torch.Tensor:
    """bfloat16 [R, C rounded up to 16]: ``bf16(bf16(x) diag(sgn) H / 4)`` per 16 columns, zero-padded."""
    rows, length = x_RC.shape
    padded = -(-length // hadamard.size) * hadamard.size
    values = torch.zeros(rows, padded, dtype=torch.float32, device=x_RC.device)
    values[:, :length] = x_RC.to(torch.bfloat16)
    values = values.view(-1, hadamard.size).mul_(_signs(hadamard, x_RC.device))
    return _butterflies(values).mul_(0.25).to(torch.bfloat16).view(rows, padded)


def inverse(x_RC: torch.Tensor, hadamard: Hadamard, length: int) -> torch.Tensor:
    """float32 [R, length]: ``(x' H / 4) diag(sgn)``, cropped. Undoes `transform` up to rounding."""
    values = _butterflies(x_RC.reshape(-1, hadamard.size)).mul_(0.25).mul_(_signs(hadamard, x_RC.device))
    return values.view(x_RC.shape)[:, :length]


def _butterflies(groups: torch.Tensor) -> torch.Tensor:
    """Distances 1, 2, 4, 8: every pair (i, i + h) becomes (sum, difference), float32."""
    size, distance = groups.shape[-1], 1
    while distance < size:
        low, high = groups.view(-1, size // (2 * distance), 2, distance).unbind(2)
        groups = torch.stack([low + high, low - high], dim=2).view(-1, size)
        distance *= 2
    return groups


def _signs(hadamard: Hadamard, device: torch.device) -> torch.Tensor:
    signs = [-1.0 if hadamard.sign_mask >> i & 1 else 1.0 for i in range(hadamard.size)]
    return torch.tensor(signs, dtype=torch.float32, device=device)
