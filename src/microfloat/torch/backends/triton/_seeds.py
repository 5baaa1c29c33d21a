"""The two words of a call seed from the 64 bits that torch has drawn."""

import torch

from microfloat.kernels.device import random as kernels
from microfloat.torch.backends.triton._launch import Kernel, Prepared
from microfloat.torch.backends.triton._programs import fast_empty

__all__ = ["split_words"]

_SPLIT = Kernel(kernels.split_words)
_PREPARED: dict[int, Prepared] = {}


def split_words(draw: torch.Tensor) -> torch.Tensor:
    """int64 [1] on the current device -> int64 [2]: both words, below 2^32, low first."""
    device = draw.get_device()
    words = fast_empty(draw.device)((2,), (1,), torch.int64)
    prepared = _PREPARED.get(device)
    if prepared is None:
        prepared = _PREPARED[device] = _SPLIT.prepared((device,), 1, (), ())
    prepared(0 if device < 0 else torch._C._cuda_getCurrentRawStream(device), draw, words)
    return words
