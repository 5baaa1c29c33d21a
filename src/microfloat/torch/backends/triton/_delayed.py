"""The delayed-scaling update of many slots in one launch."""

import torch
import triton

from microfloat.kernels.casts import scaled as kernels
from microfloat.recipes import Delayed
from microfloat.torch.program import Kernel, Prepared, fast_empty

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
        self.number = histories[0].get_device()
        self.empty = fast_empty(device)
        self.at = self.addresses.data_ptr(), self.maxima.data_ptr()
        self.updates: dict[tuple, Prepared] = {}

    def gather_live(self) -> torch.Tensor:
        """float32 [slots]: every slot's live amax, for one all-reduce."""
        live = torch.empty(self.count, dtype=torch.float32, device=self.device)
        key = (self.count, self.number)
        programs = -(-self.count // 128)
        stream = 0 if self.number < 0 else torch._C._cuda_getCurrentRawStream(self.number)
        with torch.cuda.device(self.number):
            _GATHER.prepared(key, programs, (self.count,), (128,))(stream, self.addresses, live)
        return live


def slots_of(histories: list[torch.Tensor], scales: list[torch.Tensor], maxima: list[float]) -> Slots | None:
    """The Slots of these buffers; None where their histories differ in length or are too long."""
    length = histories[0].shape[0]
    if length > _LONGEST_HISTORY or any(history.shape[0] != length for history in histories):
        return None
    return Slots(histories, scales, maxima)


def update_delayed(slots: Slots, delayed: Delayed, live: torch.Tensor | None) -> torch.Tensor:
    """Roll every slot once; returns the scales from before, float32 [slots]. `live`: reduced amaxes, or None."""
    device = slots.number
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return update_delayed(slots, delayed, live)
    previous = slots.empty((slots.count,), (1,), torch.float32)
    most_recent = delayed.amax_compute_algo == "most_recent"
    update = slots.updates.get((live is not None, most_recent, delayed.margin))
    if update is None:
        constants = (live is not None, most_recent, triton.next_power_of_2(slots.length))
        key = (constants, slots.length, delayed.margin, device)
        update = _UPDATE.prepared(key, slots.count, (2.0**-delayed.margin, slots.length), constants)
        slots.updates[live is not None, most_recent, delayed.margin] = update
    stream = 0 if device < 0 else torch._C._cuda_getCurrentRawStream(device)
    if update.at is None or live is not None:
        update(stream, slots.addresses, previous if live is None else live, previous, slots.maxima)
    else:
        addresses, maxima = slots.at
        update.at(stream, addresses, previous.data_ptr(), previous.data_ptr(), maxima)
    return previous
