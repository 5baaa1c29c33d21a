"""The all-reduce of live amaxes over the ranks of a process group, also where ranks have recorded different layers.

A slot is known to all ranks by the number of its layer, which counts the layers that a process has made, and by the
shape of its weight. At each point of the program where ranks reduce they have one table of slots; one all-reduce (max)
carries all of them, with -1 for a slot that a rank has not recorded. Its first four elements say, with both signs,
where each rank is and if it has slots without a place in the table, so that every rank reads the same from them. Where
some has, all ranks compare their slots and recipes, extend the table and reduce again. A GPU is not waited for by ranks
without new slots: if these are on some ranks alone, they count one reduction later (docs/numerics.md 3.3).
"""

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from microfloat.errors import NotSupportedError
from microfloat.recipes import Delayed
from microfloat.torch.scaling.rank_errors import in_collective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Group", "Key", "Point", "Reduced", "exists", "group_name", "maxima", "reduce_together", "reduces", "world"]

Group: TypeAlias = "ProcessGroup | None"
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
    """`live`: float32, the maxima of the keys whose indices `known` holds; `others`: those of slots that this rank did
    not record, -1 where no rank did.
    """

    known: list[int]
    live: torch.Tensor
    others: dict[Key, torch.Tensor]


class _Table:
    """The slots that all ranks of a group reduce at one point, in one order."""

    def __init__(self) -> None:
        self.places: dict[Key, int] = {}  # in what is reduced
        self.new: dict[Key, str] = {}  # recorded here, and without a place; with the layer and recipe in words
        self.agreed = False
        # The header of the latest all-reduce, which the host has not waited for.
        self.header: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self.indices: dict[tuple[int, ...], torch.Tensor] = {}

    def settle(self) -> None:
        """Read the latest header, of one step ago, which may say that ranks have to agree anew."""
        if self.header is not None:
            (header, event), self.header = self.header, None
            if event is not None:
                event.synchronize()
            self.agreed = self.agreed and not _read(header)[0]

    def remember(self, payload: torch.Tensor) -> None:
        """Keep the header of an all-reduce, to be read at the next one without waiting for the GPU."""
        header, event = payload[:_HEADER], None
        if payload.is_cuda:
            header = torch.empty(_HEADER, dtype=torch.float32, device="cpu", pin_memory=True)
            header.copy_(payload[:_HEADER], non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.header = header, event

    def agree(self, group: Group) -> None:
        """Compare the new slots of all ranks, and give each of them a place."""
        told: list = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(told, sorted(self.new.items()), group=group)
        self.new.clear()  # also on an error, which every rank raises: a step without these layers agrees again
        met: dict[tuple[int, str], tuple[object, str]] = {}
        for key in self.places:
            met[key.number, "the weight's shape"] = key.shape, "at an earlier step"
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
        """The places, as a tensor that is made once."""
        found = self.indices.get(places)
        if found is None or found.device != device:
            if len(self.indices) >= 64:
                self.indices.clear()
            found = self.indices[places] = torch.tensor(places, dtype=torch.int64, device=device)
        return found


_TABLES: "weakref.WeakKeyDictionary[object, dict[Point, _Table]]" = weakref.WeakKeyDictionary()  # by process group


@functools.lru_cache(4096)  # a capture must find its header made
def _header(point: Point, is_new: bool, device: torch.device) -> torch.Tensor:
    # Of a layer's number as much as float32 holds exactly.
    code = len(_POINTS) + point % 16777213 if isinstance(point, int) else [*_POINTS].index(point)
    return torch.tensor([code, -code, is_new, -is_new], dtype=torch.float32, device=device)


def _read(header: torch.Tensor) -> tuple[bool, bool]:
    """If any rank has new slots, and if all have; raises, on every rank, where they reduce at different points."""
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
    """True if live amaxes are those of several processes."""
    if not (delayed.reduce_amax and _AVAILABLE and torch.distributed.is_initialized()):
        return False
    return torch.distributed.get_world_size(group) > 1 and (group is None or exists(group))


def exists(group: "ProcessGroup") -> bool:
    """False for a process group that was destroyed, whose ranks torch has forgotten."""
    try:
        return bool(torch.distributed.get_process_group_ranks(group))
    except (KeyError, ValueError):  # as of a world that has ended
        return False


def world() -> "ProcessGroup | None":
    """The group of all ranks; None where there is none."""
    is_there = _AVAILABLE and torch.distributed.is_initialized()
    return torch.distributed.group.WORLD if is_there else None


def group_name(group: Group) -> str:
    """A name that all ranks have for a group, to visit several of them in one order."""
    return "" if group is None else str(getattr(group, "group_name", ""))


def reduce_together(
    group: Group, point: Point, keys: list[Key], live: torch.Tensor, words: Callable[[int], str]
) -> Reduced:
    """The maxima over all ranks of the slots of one point, whichever of them each rank has recorded.

    live: float32 [keys]. `words`: the layer and the recipe of a key, by its index, read once. Raises
    NotSupportedError, on every rank, where they are at different points, or where one number means layers of different
    shapes, names or recipes; RankError where a rank fails.
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
    if not capturing:
        table.settle()
    late = _is_read_later(live)
    while True:
        known = [index for index, key in enumerate(keys) if key in table.places]
        at = table.index(tuple([table.places[keys[index]] for index in known]), live.device)
        # Of one length at all points, so that ranks at different ones get to know it.
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


def maxima(group: Group, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The elementwise maxima over the ranks of a group of several float32 tensors, by one all-reduce.

    Every rank passes tensors of the same shapes, whose elements are positive or 0; a single one takes the maxima
    itself. Their bits order as integers, with NaN above all. The first collective of a sharded layer under current
    scaling.
    """
    if len(parts) == 1 and parts[0].is_contiguous():
        payload, made = parts[0], parts
    else:
        begins = [0]
        for part in parts:
            begins.append(begins[-1] + -(-part.numel() // _ALIGNED) * _ALIGNED)
        payload = parts[0].new_zeros(begins[-1])
        made = [payload[at : at + part.numel()].view(part.shape) for at, part in zip(begins, parts, strict=False)]
        for target, part in zip(made, parts, strict=True):
            target.copy_(part)
    with in_collective("the all-reduce of the amaxes of a sharded layer", group):
        torch.distributed.all_reduce(payload.view(torch.int32), op=torch.distributed.ReduceOp.MAX, group=group)
    return made
