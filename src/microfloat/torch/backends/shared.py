"""One cast for several Linears that read the same activation (q, k, v; gate, up): the latest one is remembered.

Only activations that autograd has recorded take part (``x.grad_fn``): autograd itself sees changes of theirs only
through the version counter, and so may this. An entry goes with its tensor, with the next activation on its device, and
with the first backward, so that no code outlives what it was made from. Delayed scaling does not take part, for its
scales belong to the layers, nor does stochastic rounding, whose bytes are drawn per call, nor a CUDA graph under
capture, since what it records must not depend on what ran outside.
"""

import weakref
from typing import Any, NamedTuple

import torch

__all__ = ["find", "forget", "keep", "may_share"]


class _Entry(NamedTuple):
    x: "weakref.ref[torch.Tensor]"
    version: int
    address: int
    stream: int
    key: tuple
    value: Any


# By device number; the CPU is -1. Entries are replaced whole, so that threads see one or the other.
_LATEST: dict[int, _Entry] = {}


def may_share(x: torch.Tensor) -> bool:
    """Whether casts of `x` may be remembered."""
    return x.grad_fn is not None and not (x.is_cuda and torch._C._cuda_isCurrentStreamCapturing())


def _stream(device: int) -> int:
    return 0 if device < 0 else torch._C._cuda_getCurrentRawStream(device)


def find(x: torch.Tensor, key: tuple) -> Any:
    """What `keep` was given for this very tensor, unchanged, under an equal key and on this stream; else None."""
    device = x.get_device()
    entry = _LATEST.get(device)
    if (
        entry is None or entry.x() is not x or entry.version != x._version or entry.address != x.data_ptr()
        or entry.stream != _stream(device) or entry.key != key
    ):  # fmt: skip
        return None
    return entry.value


def keep(x: torch.Tensor, key: tuple, value: Any) -> None:
    """Remember a cast of `x`, which `value` must not refer to. The key holds all that the cast depends on."""
    device = x.get_device()

    def gone(reference: "weakref.ref[torch.Tensor]") -> None:
        entry = _LATEST.get(device)
        if entry is not None and entry.x is reference:
            _LATEST.pop(device, None)

    _LATEST[device] = _Entry(weakref.ref(x, gone), x._version, x.data_ptr(), _stream(device), key, value)


def forget() -> None:
    """Forget every cast: a backward has begun, or memory is wanted."""
    if _LATEST:
        _LATEST.clear()
