"""The delayed-scaling update itself: a slot's history moves on by one place and gives the new encode scale.

Many slots in one launch where a kernel can, else in torch (docs/numerics.md 3.3).
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import ElementFormat
from microfloat.recipes import Delayed
from microfloat.torch import backends

__all__ = ["Slots", "live_amaxes", "update_delayed_", "update_recorded_slots", "update_slots"]

_LARGEST_SCALE = 2.0**126
_MOST_TABLES = 16


def update_delayed_(
    history: torch.Tensor, scale: torch.Tensor, delayed: Delayed, element: ElementFormat, live: torch.Tensor
) -> None:
    """Roll one slot in place: the update of docs/numerics.md 3.3 with the (reduced) live amax `live`."""
    slots = Slots(delayed, history.device, {})
    slots.add(history, scale, element.max)
    _update_by_torch(slots, live.reshape(1))


def _rolled(
    histories: torch.Tensor, scales: torch.Tensor, delayed: Delayed, maximum: float, live: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(histories [slots, L], scales [slots]) after the update; what is there stays, so that this may fail."""
    histories = histories.clone()
    histories[:, 0] = live
    algo = delayed.amax_compute_algo
    if callable(algo):
        amax = torch.stack([_amax_by(algo, history) for history in histories])
    else:
        amax = histories.amax(1) if algo == "max" else histories[:, 0].clone()
    rolled = torch.roll(histories, -1, 1)
    rolled[:, 0] = 0.0
    largest = torch.full_like(amax, maximum)
    # Two tensors, because torch computes `number / tensor` through a reciprocal, which rounds twice.
    fresh = torch.div(largest, torch.clamp(amax, min=maximum * 2.0**-126)) * 2.0**-delayed.margin
    usable = (amax > 0) & torch.isfinite(amax)
    return rolled, torch.where(usable, torch.clamp(fresh, max=_LARGEST_SCALE), scales)


def _amax_by(algo: Callable, history: torch.Tensor) -> torch.Tensor:
    """The amax that a user's function takes from one history, float32 ()."""
    needed = "a function from a history, float32 [L], to one number"
    try:
        found = algo(history.clone())
    except Exception as error:
        raise invalid_value(
            "amax_compute_algo", f"a function that raised {type(error).__name__}: {error}", needed
        ) from error
    try:
        if isinstance(found, torch.Tensor) and found.is_complex():
            raise TypeError
        amax = torch.as_tensor(found, dtype=torch.float32, device=history.device)
    except Exception:
        raise invalid_type("amax_compute_algo", f"a function that returned {found!r}", needed) from None
    if amax.numel() != 1:
        raise invalid_value("amax_compute_algo", f"a function that returned shape {tuple(amax.shape)}", needed)
    return amax.reshape(())


def live_amaxes(slots: "Slots") -> torch.Tensor:
    """The live amaxes of slots, float32 [slots]."""
    _, table = slots.table()
    return torch.stack([history[0] for history in slots.histories]) if table is None else table.gather_live()


def update_slots(slots: "Slots", live: torch.Tensor | None) -> torch.Tensor:
    """Roll slots; returns the scales from before, float32 [slots].

    `live`: the amaxes to roll in, None for those that stand in the histories.
    """
    kernel, table = slots.table()
    if table is None:
        return _update_by_torch(slots, live)
    previous = kernel.update_delayed(table, slots.delayed, live)
    torch._C._increment_version([*slots.histories, *slots.scales])  # a kernel's writes are not counted by themselves
    return previous


class Slots:
    """The buffers of slots that agree in recipe and device, and the largest element of each.

    `tables`: where the addresses of these buffers are kept on the device, between updates of the same slots.
    """

    __slots__ = ("delayed", "device", "histories", "maxima", "scales", "tables")

    def __init__(self, delayed: Delayed, device: torch.device, tables: dict[tuple, Any]) -> None:
        self.delayed, self.device, self.tables = delayed, device, tables
        self.histories: list[torch.Tensor] = []
        self.scales: list[torch.Tensor] = []
        self.maxima: list[float] = []

    def add(self, history: torch.Tensor, scale: torch.Tensor, maximum: float) -> None:
        """One slot more."""
        self.histories.append(history)
        self.scales.append(scale)
        self.maxima.append(maximum)

    def table(self) -> tuple[Any, Any]:
        """The kernel that updates many slots at once, and the slots as it takes them; None where it cannot."""
        kernel = None if callable(self.delayed.amax_compute_algo) else _update_kernel(self.device)
        if kernel is None:
            return None, None
        key = (
            self.histories[0].shape[0], *self.maxima,
            *[history.data_ptr() for history in self.histories], *[scale.data_ptr() for scale in self.scales],
        )  # fmt: skip
        if key not in self.tables:
            if len(self.tables) >= _MOST_TABLES:  # of slots that were updated together with ever other ones
                self.tables.clear()
            self.tables[key] = kernel.slots_of(self.histories, self.scales, self.maxima)
        return kernel, self.tables[key]


@functools.cache
def _update_kernel(device: torch.device) -> Any:
    """The module with the kernel that updates many slots at once; None where it cannot run."""
    if not backends.support("triton", device):
        return None
    return importlib.import_module("microfloat.torch.backends.triton._delayed")


@torch.no_grad()
def _update_by_torch(slots: Slots, live: torch.Tensor | None, where_recorded: bool = False) -> torch.Tensor:
    """`update_slots` in torch. `where_recorded`: leave slots alone whose live amax is negative."""
    histories, scales = slots.histories, slots.scales
    amaxes = [history[0] for history in histories] if live is None else live.unbind()
    alike: dict[tuple[int, float], list[int]] = {}
    for index, (history, maximum) in enumerate(zip(histories, slots.maxima, strict=True)):
        alike.setdefault((history.shape[0], maximum), []).append(index)
    made = []
    for (_, maximum), members in alike.items():
        old, old_scales, recent = (
            torch.stack([tensors[index] for index in members]) for tensors in (histories, scales, amaxes)
        )
        rolled, fresh = _rolled(old, old_scales, slots.delayed, maximum, recent.clamp(min=0.0))
        if where_recorded:
            recorded = recent >= 0
            rolled, fresh = torch.where(recorded[:, None], rolled, old), torch.where(recorded, fresh, old_scales)
        made.append((members, rolled, fresh))
    previous = torch.stack(scales)
    for members, rolled, fresh in made:  # all of them or none
        copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        copy_all([histories[index] for index in members], list(rolled.unbind()))
        copy_all([scales[index] for index in members], list(fresh.unbind()))
    return previous


def update_recorded_slots(slots: Slots, live: torch.Tensor) -> None:
    """Roll the slots whose live amax is not negative: those that some other rank has recorded."""
    _update_by_torch(slots, live, where_recorded=True)
