"""Slots of delayed scaling and their update: a history moves on by one entry and gives the new encode scale.

One launch updates many slots where kernels run, else torch does (docs/numerics.md 3.3).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from microfloat.errors import invalid_type, invalid_value
from microfloat.recipes import Delayed
from microfloat.torch import backends
from microfloat.torch.backends.base import capturing
from microfloat.torch.scaling.amax_reduction import Group

if TYPE_CHECKING:
    from types import ModuleType

    from microfloat.torch.launch.triton import Slots

# Slot -> names of its buffers: encode scale and amax history.
NAMES = {slot: (f"scaling_{slot}_scale", f"scaling_{slot}_amax_history") for slot in ("x", "w", "dy")}
_LARGEST_SCALE = 2.0**126
_MOST_PREPARED = 16


def _rolled(
    histories: torch.Tensor, scales: torch.Tensor, delayed: Delayed, maximum: float, live: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Histories [slots, L] and scales [slots] after the update; the arguments stay unchanged, so that this may fail."""
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
    """The amax that a user's function computes from one history, float32 ()."""
    needed = "a function from a history, float32 [L], to one number"
    try:
        found = algo(history.clone())
    except Exception as error:
        got = f"a function that raised {type(error).__name__}: {error}"
        raise invalid_value("amax_compute_algo", got, needed) from error
    try:
        if isinstance(found, torch.Tensor) and found.is_complex():
            raise TypeError
        amax = torch.as_tensor(found, dtype=torch.float32, device=history.device)
    except Exception:
        raise invalid_type("amax_compute_algo", f"a function that returned {found!r}", needed) from None
    if amax.numel() != 1:
        raise invalid_value("amax_compute_algo", f"a function that returned shape {tuple(amax.shape)}", needed)
    return amax.reshape(())


class Pending(NamedTuple):
    """An amax that was recorded in a slot and not yet rolled; with `region` None only `update_scaling` rolls it."""

    delayed: Delayed
    maximum: float  # of the element
    group: Group
    region: Any  # a `regions.Region`, or None
    late: bool = False  # recorded by a forward inside a backward
    captured: bool = False  # into a CUDA graph, which rolls it itself when it is replayed


class Slot:
    """State of a slot of a layer besides its buffers."""

    __slots__ = ("history", "latest", "name", "pending", "prepared", "previous", "rolled", "scale")

    def __init__(self, name: str) -> None:
        self.name = name
        self.scale, self.history = NAMES[name]
        self.pending: Pending | None = None
        self.latest: Pending | None = None  # of dy: the latest of a backward outside any capture
        # The scales that one update replaced, and the index of this slot's.
        self.previous: tuple[torch.Tensor, int] | None = None
        # The latest roll where amaxes are reduced, by which an amax that only another rank has recorded is rolled.
        self.rolled: Pending | None = None
        # Updates that begin with this slot, at most 16, by all of their slots: their buffers and settings, their parts.
        self.prepared: dict[tuple[Slot, ...], tuple[list[tuple], list[_Part]]] = {}


# A layer, its slot to roll, and the pending amax.
Job = tuple[nn.Module, Slot, Pending]


class _Part(NamedTuple):
    """Jobs that agree in recipe, reduction group and device, and the launch that rolls their slots.

    `table`: the addresses of their buffers as the kernel takes them, None where no kernel runs.
    """

    kernel: Any
    table: "Slots | None"
    indices: list[int]


class Batch(NamedTuple):
    """Jobs that agree in recipe, reduction group and device, with the buffers of their slots."""

    part: _Part
    jobs: list[Job]
    histories: list[torch.Tensor]
    scales: list[torch.Tensor]

    def live(self) -> torch.Tensor:
        """The live amaxes, float32 [slots]."""
        table = self.part.table
        return torch.stack([history[0] for history in self.histories]) if table is None else table.gather_live()

    def roll(self, live: torch.Tensor | None = None) -> list[Job]:
        """Roll the slots with these amaxes (None: the live ones of the histories); returns the jobs."""
        kernel, table, _ = self.part
        if table is None:
            previous = _update_by_torch(self, live)
        else:
            previous = kernel.update_delayed(table, self.jobs[0][2].delayed, live)
            torch._C._increment_version(self.histories + self.scales)  # a kernel's writes are not counted by themselves
        for index, (_, slot, entry) in enumerate(self.jobs):
            # A forward whose amax was recorded late has not used the replaced scales.
            slot.previous = None if entry.late else (previous, index)
        return self.jobs

    def roll_recorded(self, live: torch.Tensor) -> None:
        """Roll the slots whose live amax is not negative: another rank has recorded them."""
        _update_by_torch(self, live, where_recorded=True)


def batches_of(jobs: list[Job]) -> list[Batch]:
    """The jobs, at least one, as batches; launches are prepared once for the same slots with the same buffers.

    Tables of a captured CUDA graph are empty before the graph's first replay, so they are not kept.
    """
    histories, scales, asked = [], [], []
    for layer, slot, entry in jobs:
        buffers: Any = layer._buffers
        history, scale = buffers[slot.history], buffers[slot.scale]
        histories.append(history)
        scales.append(scale)
        asked.append((entry.delayed, entry.maximum, entry.group, history.data_ptr(), scale.data_ptr()))
    slots = tuple([slot for _, slot, _ in jobs])
    prepared = slots[0].prepared
    known = prepared.get(slots)
    if known is None or known[0] != asked:
        if len(prepared) >= _MOST_PREPARED:  # a layer that is called together with ever other layers
            prepared.clear()
        known = asked, _prepare(asked, histories, scales)
        if not capturing():
            prepared[slots] = known
    if len(known[1]) == 1:
        return [Batch(known[1][0], jobs, histories, scales)]
    lists: list[list] = [jobs, histories, scales]
    return [Batch(part, *([one[index] for index in part.indices] for one in lists)) for part in known[1]]


def _prepare(asked: list[tuple], histories: list[torch.Tensor], scales: list[torch.Tensor]) -> list[_Part]:
    alike: dict[tuple, list[int]] = {}
    for index, (delayed, _, group, *_) in enumerate(asked):
        alike.setdefault((delayed, group, scales[index].device), []).append(index)
    parts = []
    for (delayed, _, device), indices in alike.items():
        part = _Part(None if callable(delayed.amax_compute_algo) else update_kernel(device), None, indices)
        if part.kernel is not None:
            of_part = zip(*[(histories[index], scales[index], asked[index][1]) for index in indices], strict=True)
            part = part._replace(table=part.kernel.slots_of(*map(list, of_part)))
        parts.append(part)
    return parts


def update_kernel(device: torch.device) -> "ModuleType | None":
    """The module with the kernel that updates many slots at once; None where kernels do not run."""
    return backends.choose("auto", device).producers


@torch.no_grad()
def _update_by_torch(batch: Batch, live: torch.Tensor | None, where_recorded: bool = False) -> torch.Tensor:
    _, jobs, histories, scales = batch
    amaxes = [history[0] for history in histories] if live is None else live.unbind()
    alike: dict[tuple[int, float], list[int]] = {}
    for index, (_, _, entry) in enumerate(jobs):
        alike.setdefault((histories[index].shape[0], entry.maximum), []).append(index)
    made = []
    for (_, maximum), members in alike.items():
        old, old_scales, recent = (
            torch.stack([tensors[index] for index in members]) for tensors in (histories, scales, amaxes)
        )
        rolled, fresh = _rolled(old, old_scales, jobs[0][2].delayed, maximum, recent.clamp(min=0.0))
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
