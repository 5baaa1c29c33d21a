"""The delayed-scaling update of many slots in one launch."""

import torch
import triton

from microfloat.kernels import delayed as kernels
from microfloat.recipes import Delayed
from microfloat.torch.backends.triton._launch import Kernel

__all__ = ["Slots", "slots_of", "update_delayed"]

_UPDATE, _GATHER = Kernel(kernels.update_delayed), Kernel(kernels.gather_live)
_LONGEST_HISTORY = 8192


class Slots:
    """The buffers of some slots as kernels find them: addresses and largest elements, on their device."""

    def __init__(self, histories: list[torch.Tensor], scales: list[torch.Tensor], maxima: list[float]) -> None:
        device = histories[0].device
        pairs = [[history.data_ptr(), scale.data_ptr()] for history, scale in zip(histories, scales, strict=True)]
        self.addresses = torch.tensor(pairs, dtype=torch.int64).to(device)
        self.maxima = torch.tensor(maxima, dtype=torch.float32).to(device)
        self.count, self.length, self.device = len(histories), histories[0].shape[0], device

    def gather_live(self) -> torch.Tensor:
        """float32 [slots]: every slot's live amax, for one all-reduce."""
        live = torch.empty(self.count, dtype=torch.float32, device=self.device)
        key = (self.count, self.device.index)
        programs = -(-self.count // 128)
        _GATHER(key, programs, self.device.index or 0, (self.addresses, live), (self.count,), (128,))
        return live


_KNOWN: dict[tuple, Slots] = {}


def slots_of(histories: list[torch.Tensor], scales: list[torch.Tensor], maxima: list[float]) -> Slots | None:
    """The Slots of these buffers, kept between steps; None where their histories differ in length or are too long."""
    lengths = {history.shape[0] for history in histories}
    if len(lengths) != 1 or lengths.pop() > _LONGEST_HISTORY:
        return None
    key = (*(history.data_ptr() for history in histories), *(scale.data_ptr() for scale in scales), *maxima)
    slots = _KNOWN.get(key)
    if slots is None:
        if len(_KNOWN) >= 512:
            _KNOWN.clear()
        slots = _KNOWN[key] = Slots(histories, scales, maxima)
    return slots


def update_delayed(slots: Slots, delayed: Delayed, live: torch.Tensor | None) -> torch.Tensor:
    """Roll every slot once; returns the scales from before, float32 [slots]. `live`: reduced amaxes, or None."""
    previous = torch.empty(slots.count, dtype=torch.float32, device=slots.device)
    constants = (live is not None, delayed.amax_compute_algo == "most_recent", triton.next_power_of_2(slots.length))
    key = (constants, slots.length, delayed.margin, slots.device.index)
    tensors = (slots.addresses, previous if live is None else live, previous, slots.maxima)
    _UPDATE(key, slots.count, slots.device.index or 0, tensors, (2.0**-delayed.margin, slots.length), constants)
    return previous
