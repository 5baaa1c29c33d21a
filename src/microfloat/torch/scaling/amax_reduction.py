"""The all-reduce of live amaxes over the ranks of a process group, also where ranks have recorded different layers.

Ranks name a slot by the number of its layer, which counts the layers that a process has made, and by the shape of its
weight. For each point of the program where ranks reduce, they have one table of slots. One all-reduce (max) carries all
slots, with -1 for a slot that a rank has not recorded. Its first four elements hold, with both signs, the point of each
rank and a flag for new slots that are not in the table, so that every rank reads the same from them. If a rank has new
slots, all ranks compare their slots and recipes, extend the table and reduce again. Ranks without new slots do not wait
for a GPU: new slots of some ranks count one reduction later (docs/numerics.md 3.3).
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from microfloat.errors import NotSupportedError
from microfloat.recipes import Delayed
from microfloat.torch._typing import Group
from microfloat.torch.scaling.rank_errors import in_collective

# A point of the program at which all ranks reduce; an int: the number of a layer that is called outside any autocast.
Point: TypeAlias = str | int
_POINTS = {
    "forward": "the exit of an autocast", "backward": "the entry of an autocast or in update_scaling",
    "calibration": "update_scaling after a calibration",
}  # fmt: skip
_HEADER = 4  # elements of what is reduced, in front of the slots
_NOT_RECORDED = -1.0
_ALIGNED = 4  # float32 elements of 16 bytes, at multiples of which launches read an amax
_AVAILABLE = torch.distributed.is_available()


class Key(NamedTuple):
    """A slot, named alike on every rank."""

    number: int  # of the layer
    slot: str
    shape: tuple[int, ...]  # of its weight
    maximum: float  # of the element


class Reduced(NamedTuple):
    """The maxima over all ranks.

    `live`: float32, of this rank's keys with the indices `known`, on which the ranks have agreed; `others`: of slots
    that this rank did not record, -1 where no rank did.
    """

    known: list[int]
    live: torch.Tensor
    others: dict[Key, torch.Tensor]


class _Table:
    """The slots that all ranks of a group reduce at one point, in one order."""

    def __init__(self) -> None:
        self.places: dict[Key, int] = {}  # of the slots in the reduced tensor
        self.new: dict[Key, str] = {}  # slots recorded here that have no place yet; with the layer and recipe in words
        self.agreed = False
        # The header of the latest all-reduce, for which the host has not waited.
        self.header: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self.indices: dict[tuple[int, ...], torch.Tensor] = {}  # at most 64

    def remember(self, payload: torch.Tensor) -> None:
        """Keep the header of an all-reduce for the next one, which reads it without waiting for the GPU."""
        header = payload[:_HEADER].to("cpu", non_blocking=True)  # into pinned memory
        self.header = header, torch.cuda.current_stream().record_event() if payload.is_cuda else None  # type: ignore

    def agree(self, group: Group) -> None:
        """Compare the new slots of all ranks, and give each of them a place."""
        told: list = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(told, sorted(self.new.items()), group=group)
        self.new.clear()  # also on an error, which every rank raises: a step without these layers agrees again
        met: dict[tuple[int, str], tuple[object, str]] = {
            (key.number, "the weight's shape"): (key.shape, "at an earlier step") for key in self.places
        }
        for rank, rows in enumerate(told):
            for key, text in rows:
                for what, value in (("the weight's shape", key.shape), (f"the recipe for {key.slot}", text)):
                    first, where = met.setdefault((key.number, what), (value, f"on rank {rank}"))
                    if first != value:
                        raise NotSupportedError(
                            f"amax_reduction_group: {what} of layer {key.number} is {first} {where} and {value} on "
                            f"rank {rank}, needed the same layers and recipes, made in the same order, on every rank. "
                            "Pass the group of the ranks that share layers, or use DelayedScaling(reduce_amax=False)."
                        )
        for key in sorted({key for rows in told for key, _ in rows} - self.places.keys()):
            self.places[key] = _HEADER + len(self.places)
        self.agreed = True

    def index(self, places: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """A tensor of the places, which is made once."""
        found = self.indices.get(places)
        if found is None or found.device != device:
            if len(self.indices) >= 64:
                self.indices.clear()
            found = self.indices[places] = torch.tensor(places, dtype=torch.int64, device=device)
        return found


# By process group, with which they go; of a group a table for each point and each layer outside any autocast.
_TABLES: "weakref.WeakKeyDictionary[object, dict[Point, _Table]]" = weakref.WeakKeyDictionary()


@functools.lru_cache(4096)  # before a capture, which could not copy it to the GPU
def _header(point: Point, is_new: bool, device: torch.device) -> torch.Tensor:
    # A layer's number modulo a number that float32 holds exactly.
    code = len(_POINTS) + point % 16777213 if isinstance(point, int) else [*_POINTS].index(point)
    return torch.tensor([code, -code, is_new, -is_new], dtype=torch.float32, device=device)


def _read(header: torch.Tensor) -> tuple[bool, bool]:
    """True if any rank has new slots, and True if all have. Raises on every rank where their points differ."""
    largest, smallest, some, not_all = header.tolist()
    if largest == -smallest:
        return some > 0, not_all < 0
    points = [*_POINTS.values()]
    words = [
        points[code] if code < len(points) else f"a call of layer {code - len(points)} outside any autocast"
        for code in (int(-smallest), int(largest))
    ]
    remedy = (
        "Enter the same `microfloat.torch.autocast(...)` blocks, and call update_scaling at the same points, on every "
        "rank. Enter what one rank does alone under torch.no_grad()."
        if largest < len(points)
        else "Put the step inside `with microfloat.torch.autocast():`, where ranks may call different layers, or use "
        "DelayedScaling(reduce_amax=False)."
    )
    raise NotSupportedError(
        f"amax_reduction_group: got one rank at {words[0]} and another one at {words[1]}, needed all ranks at the same "
        f"point, because there they reduce their amaxes. {remedy}"
    )


def reduces(delayed: Delayed, group: Group) -> bool:
    """True if the amaxes of several processes are reduced."""
    if not (delayed.reduce_amax and _AVAILABLE and torch.distributed.is_initialized()):
        return False
    return torch.distributed.get_world_size(group) > 1 and (group is None or exists(group))


def exists(group: Group) -> bool:
    """False for a process group that was destroyed."""
    try:
        return bool(torch.distributed.get_process_group_ranks(group))
    except (KeyError, ValueError):  # torch has forgotten its ranks
        return False


def world() -> Group:
    """The group of all ranks; None where there is none."""
    return torch.distributed.group.WORLD if _AVAILABLE and torch.distributed.is_initialized() else None


def group_name(group: Group) -> str:
    """The name of a group on all ranks, by which they visit groups in one order."""
    return "" if group is None else str(getattr(group, "group_name", ""))


def reduce_together(
    group: Group, point: Point, keys: list[Key], live: torch.Tensor, words: Callable[[int], str]
) -> Reduced:
    """The maxima over all ranks of the slots of one point; ranks may have recorded different slots.

    live: float32 [keys]. `words`: the layer and the recipe of the key of an index, read once. Raises NotSupportedError,
    on every rank, where they are at different points, or where layers of one number differ in shape, name or recipe;
    RankError where a rank fails.
    """
    name = f" of group {group_name(group)!r}" if group is not None else ""
    place = _POINTS.get(str(point), "a call of a layer outside any autocast")
    with in_collective(f"the maximum of amaxes under delayed scaling, at {place}{name},", group):
        return _reduce(group, point, keys, live, words)


def _reduce(group: Group, point: Point, keys: list[Key], live: torch.Tensor, words: Callable[[int], str]) -> Reduced:
    tables = _TABLES.setdefault(torch.distributed.group.WORLD if group is None else group, {})
    table = tables.setdefault(point, _Table())
    table.new.update({key: words(index) for index, key in enumerate(keys) if key not in table.places})
    capturing = live.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing and (table.new or not table.agreed):
        raise NotSupportedError(
            "CUDA graph capture: got layers under delayed scaling whose amaxes were never reduced before, needed a "
            "step before the capture, in which the ranks agree on their layers. Run two steps first."
        )
    if not capturing and table.header is not None:  # of the step before, which may say that ranks have to agree anew
        (header, event), table.header = table.header, None
        if event is not None:
            event.synchronize()
        table.agreed = table.agreed and not _read(header)[0]
    late = _is_read_later(live)
    while True:
        known = [index for index, key in enumerate(keys) if key in table.places]
        at = table.index(tuple([table.places[keys[index]] for index in known]), live.device)
        # Of one length at all points, so that ranks at different points learn of it.
        payload = live.new_full((_HEADER + max(len(one.places) for one in tables.values()),), _NOT_RECORDED)
        is_new = bool(table.new) or not table.agreed
        payload[:_HEADER].copy_(_header(point, is_new, live.device))
        payload.index_copy_(0, at, live if len(known) == len(keys) else live[known])
        torch.distributed.all_reduce(payload, op=torch.distributed.ReduceOp.MAX, group=group)
        some, every = _read(payload[:_HEADER]) if is_new or not late else (False, False)
        if some and (every or not late):
            table.agree(group)
            continue
        if late and not capturing:
            table.remember(payload)
        own = set(keys)
        others = {key: payload[place] for key, place in table.places.items() if key not in own}
        return Reduced(known, payload.index_select(0, at), others)


def _is_read_later(live: torch.Tensor) -> bool:
    """True for a header on a GPU: reading it at once would have the host wait."""
    return live.is_cuda


def largest(amax: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
    """The elementwise maximum of all ranks' amaxes, as in `maxima`, over one group after the other."""
    amax = amax.clone(memory_format=torch.contiguous_format)
    for group in groups:
        maxima(group, [amax])
    return amax


def maxima(group: Group, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Elementwise maxima over the ranks of a group of the float32 tensors `parts`, by one all-reduce.

    Every rank passes tensors of the same shapes, whose elements are positive or 0; a single tensor is overwritten. The
    bits of such numbers order as integers, with NaN above all. Sharded layers under current scaling begin with it.
    """
    if len(parts) == 1 and parts[0].is_contiguous():
        payload, made = parts[0], parts
    else:
        sizes = [-(-part.numel() // _ALIGNED) * _ALIGNED for part in parts]
        payload = parts[0].new_zeros(sum(sizes))
        pieces = zip(payload.split(sizes), parts, strict=True)
        made = [piece[: part.numel()].view(part.shape).copy_(part) for piece, part in pieces]
    with in_collective("the maximum of the amaxes of sharded tensors", group):
        torch.distributed.all_reduce(payload.view(torch.int32), op=torch.distributed.ReduceOp.MAX, group=group)
    return made
