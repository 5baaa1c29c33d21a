"""The delayed-scaling update itself: a slot's history moves on by one place and gives the new encode scale.

Many slots in one launch where a kernel can, else one by one in torch; live amaxes are all-reduced first where a process
group asks for it (docs/numerics.md 3.3).
"""

import functools
import importlib
from typing import Any

import torch

from microfloat.formats import ElementFormat
from microfloat.recipes import Delayed
from microfloat.torch import backends

__all__ = ["Roller", "reduces", "update_delayed_", "update_slots"]

_LARGEST_SCALE = 2.0**126


def update_delayed_(
    history: torch.Tensor, scale: torch.Tensor, delayed: Delayed, element: ElementFormat, live: torch.Tensor
) -> None:
    """Roll one slot in place: the update of docs/numerics.md 3.3 with the (reduced) live amax `live`."""
    rolled, fresh = _rolled(history, scale, delayed, element.max, live)
    history.copy_(rolled)
    scale.copy_(fresh)


def _rolled(
    history: torch.Tensor, scale: torch.Tensor, delayed: Delayed, maximum: float, live: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(history, scale) after the update; of what is there only the live entry changes, so that this may fail."""
    history[0] = live
    algo = delayed.amax_compute_algo
    if callable(algo):
        amax = torch.as_tensor(algo(history.clone()), dtype=torch.float32, device=history.device).reshape(())
    else:
        amax = history.max() if algo == "max" else history[0].clone()
    rolled = torch.roll(history, -1)
    rolled[0] = 0.0
    largest = torch.full_like(amax, maximum)
    # Two tensors, because torch computes `number / tensor` through a reciprocal, which rounds twice.
    fresh = torch.div(largest, torch.clamp(amax, min=maximum * 2.0**-126)) * 2.0**-delayed.margin
    usable = (amax > 0) & torch.isfinite(amax)
    return rolled, torch.where(usable, torch.clamp(fresh, max=_LARGEST_SCALE), scale)


def reduces(delayed: Delayed, group: Any) -> bool:
    """Whether live amaxes are those of several processes."""
    distributed = torch.distributed
    if not delayed.reduce_amax or not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size(group) > 1


def _reduced(live: torch.Tensor, delayed: Delayed, group: Any) -> torch.Tensor:
    """All live amaxes of one (recipe, group, direction) in one MAX all-reduce."""
    if reduces(delayed, group):
        torch.distributed.all_reduce(live, op=torch.distributed.ReduceOp.MAX, group=group)
    return live


def update_slots(
    histories: list[torch.Tensor], scales: list[torch.Tensor], delayed: Delayed, maxima: list[float], group: Any
) -> torch.Tensor:
    """Roll slots that agree in recipe, group and device; returns the scales from before, float32 [slots]."""
    kernel = None if callable(delayed.amax_compute_algo) else _update_kernel(scales[0].device)
    slots = None if kernel is None else kernel.slots_of(histories, scales, maxima)
    if kernel is None or slots is None:
        return _update_one_by_one(histories, scales, delayed, maxima, group)
    live = _reduced(slots.gather_live(), delayed, group) if reduces(delayed, group) else None
    previous = kernel.update_delayed(slots, delayed, live)
    torch.autograd.graph.increment_version((*histories, *scales))  # a kernel's writes are not counted by themselves
    return previous


@functools.cache
def _update_kernel(device: torch.device) -> Any:
    """The module with the kernel that updates many slots at once; None where it cannot run."""
    if not backends.support("triton", device):
        return None
    return importlib.import_module("microfloat.torch.backends.triton._delayed")


@torch.no_grad()
def _update_one_by_one(
    histories: list[torch.Tensor], scales: list[torch.Tensor], delayed: Delayed, maxima: list[float], group: Any
) -> torch.Tensor:
    live = _reduced(torch.stack([history[0] for history in histories]), delayed, group)
    previous = torch.stack(scales)
    made = [
        _rolled(history, scale, delayed, maximum, live[index])
        for index, (history, scale, maximum) in enumerate(zip(histories, scales, maxima, strict=True))
    ]
    for history, scale, (rolled, fresh) in zip(histories, scales, made, strict=True):  # all of them or none
        history.copy_(rolled)
        scale.copy_(fresh)
    return previous


class Roller:
    """The update of x, w and, with `dy`, of dy in one launch, prepared: for a layer that rolls its own slots."""

    __slots__ = ("_addresses", "_delayed", "_kernel", "_maxima", "_names", "_slots", "_tensors")

    def __init__(self, tensors: list[torch.Tensor], names: list[str], delayed: Delayed, maxima: list[float]) -> None:
        self._tensors, self._names, self._delayed, self._maxima = tensors, names, delayed, maxima
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._kernel = None if callable(delayed.amax_compute_algo) else _update_kernel(tensors[0].device)
        self._slots = None if self._kernel is None else self._kernel.slots_of(tensors[1::2], tensors[::2], maxima)

    @property
    def is_possible(self) -> bool:
        """Whether a kernel serves these slots."""
        return self._slots is not None

    def fits(self, buffers: Any, delayed: Any, maxima: list[float]) -> bool:
        """Whether the buffers are those that it was made for, and the recipe asks for the same."""
        return (
            delayed is self._delayed and maxima == self._maxima
            and [buffers[name].data_ptr() for name in self._names] == self._addresses
        )  # fmt: skip

    def __call__(self) -> torch.Tensor:
        """Roll; returns the scales from before, float32 [slots]."""
        previous = self._kernel.update_delayed(self._slots, self._delayed, None)  # type: ignore[union-attr]
        torch._C._increment_version(self._tensors)
        return previous
