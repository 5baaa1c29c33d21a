"""Allocation with little host time."""

from collections.abc import Callable

import torch

__all__ = ["fast_empty"]


def fast_empty(device: torch.device) -> Callable[[tuple, tuple, torch.dtype], torch.Tensor]:
    """``empty(size, stride, dtype)`` on the current device of a type, with the least host time there is."""
    # What Inductor's generated code calls: a third of the host time of torch.empty_strided.
    found = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    fast = getattr(found, f"_empty_strided_{device.type}", None)
    if fast is not None:
        return fast
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)
