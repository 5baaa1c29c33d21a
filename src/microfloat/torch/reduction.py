"""The all-reduce of live amaxes over the ranks of a process group, also where ranks have recorded different layers.

A slot is known to all ranks by the number of its layer, which counts the layers that a process has made, and the
layer's shape. The ranks of a group agree once, for every direction, on a list of slots; from then on one all-reduce of
fixed size carries all of them, with -1 for what a rank has not recorded. Slots that are not in the list yet have places
of their own there, which count if all ranks have the same new slots; if not, the ranks exchange their lists, and these
slots join at once, or on a GPU, which is not waited for, one all-reduce later (docs/numerics.md 3.3).
"""

import contextlib
import functools
import hashlib
import os
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from microfloat.errors import NotSupportedError
from microfloat.recipes import Delayed
from microfloat.torch.failures import in_collective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "Group", "Key", "Reduced", "exists", "group_name", "maxima", "not_counted", "reduce_alone", "reduce_together",
    "reduces", "world",
]  # fmt: skip

Group: TypeAlias = "ProcessGroup | None"
# The first elements of what slots of a list are reduced in: if a rank has slots to announce, and with both signs what
# all ranks are to have alike, since their maxima agree only then: the number of the direction, that of the line of
# code, and two of the slots to announce. Behind them are the places of such slots.
_HEADER, _PLACES = 9, 1024
# Code that calls a reduction for its user.
_BETWEEN = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(torch.__file__), contextlib.__file__,
)  # fmt: skip
# The directions: points of the program at which all ranks reduce.
_POINTS = {
    "forward": "the exit of an autocast", "backward": "the entry of an autocast or in update_scaling",
    "calibration": "update_scaling after a calibration",
}  # fmt: skip
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
    """`live`: float32, the maxima of the keys that `known` counts; `others`: those that this rank did not record, -1
    where no rank did. `are_sure`: False where some of `live` may be -1, because the ranks have other new slots each.
    """

    known: list[int]
    live: torch.Tensor
    others: dict[Key, torch.Tensor]
    are_sure: bool = True


class _List:
    """The slots that all ranks of a group send in one direction, in one order."""

    def __init__(self) -> None:
        self.positions: dict[Key, int] = {}  # in what is reduced
        self.new: dict[Key, str] = {}  # recorded here, and not in the list yet; with the layer and recipe in words
        self.agreed = False
        # The header of the latest all-reduce that was not waited for, and the slots that were announced in it.
        self.announced: tuple[torch.Tensor, torch.cuda.Event | None, str, list[Key]] | None = None
        self.indices: dict[tuple[int, ...], torch.Tensor] = {}

    def settle(self) -> list[Key]:
        """Read the latest header: the slots that were announced there and did not count, which ranks must exchange."""
        if self.announced is None:
            return []
        announced, event, line, keys = self.announced
        if event is not None:
            event.synchronize()  # recorded one step ago
        self.announced = None
        self.agreed = self.agreed and self.read(announced, line, keys)
        return [] if self.agreed else keys

    def read(self, header: torch.Tensor, line: str, keys: list[Key]) -> bool:
        """True if all ranks have announced the same keys, by which the list grows; every rank reads the same."""
        announces, is_same = _read_header(header, line)
        if announces and is_same:
            self._add(keys)
        return is_same

    def _add(self, keys: Iterable[Key]) -> None:
        for key in sorted(set(keys) - self.positions.keys()):
            self.positions[key] = _HEADER + _PLACES + len(self.positions)
            self.new.pop(key, None)

    def grow(self, group: Group) -> None:
        """Agree with all ranks on a list that holds what each of them has recorded."""
        told: list = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(told, sorted(self.new.items()), group=group)
        shapes = {key.number: (key.shape, "an earlier step") for key in self.positions}
        words: dict[Key, tuple[str, int]] = {}
        for rank, keys in enumerate(told):
            for key, text in keys:
                shape, other = shapes.setdefault(key.number, (key.shape, f"rank {rank}"))
                if shape != key.shape:
                    self.new.clear()  # on every rank: a step that leaves these layers out agrees again
                    raise NotSupportedError(
                        f"amax_reduction_group: layer {key.number} has a weight of shape {shape} on {other} and "
                        f"{tuple(key.shape)} on rank {rank}, needed the same layers, made in the same order, on every "
                        "rank. Pass the group of the ranks that share layers, or use DelayedScaling(reduce_amax=False)."
                    )
                first, other_rank = words.setdefault(key, (text, rank))
                if text != first:
                    self.new.clear()
                    raise NotSupportedError(
                        f"amax_reduction_group: layer {key.number} is {first} on rank {other_rank} and {text} on rank "
                        f"{rank}, needed the same layers under the same recipe, made in the same order, on every rank."
                    )
        self._add(key for keys in told for key, _ in keys)
        self.new.clear()
        self.agreed = True

    def announce(self) -> tuple[list[Key], tuple[int, int]]:
        """The slots to announce, as many as there are places for, and two numbers that say which they are."""
        if not self.new:
            return [], (0, 0)
        new = sorted(self.new.items())
        digest = hashlib.sha256(repr(new).encode()).digest()
        two = int.from_bytes(digest[:3]), int.from_bytes(digest[3:6])  # 24 bits are exact
        return [key for key, _ in new[:_PLACES]], two

    def index(self, places: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """The places of what is reduced, as a tensor that is made once."""
        found = self.indices.get(places)
        if found is None or found.device != device:
            if len(self.indices) >= 64:
                self.indices.clear()
            found = self.indices[places] = torch.tensor(places, dtype=torch.int64, device=device)
        return found

    def remember(self, payload: torch.Tensor, line: str, keys: list[Key]) -> None:
        """Keep the header of an all-reduce, to be read at the next one without waiting for the GPU."""
        announced, event = payload[:_HEADER], None
        if payload.is_cuda:
            announced = torch.empty(_HEADER, dtype=torch.float32, device="cpu", pin_memory=True)
            announced.copy_(payload[:_HEADER], non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.announced = announced, event, line, keys


@functools.lru_cache(256)
def _header(direction: str, announced: tuple[int, int], line: str, device: torch.device) -> torch.Tensor:
    numbers = [*_POINTS].index(direction), zlib.crc32(line.encode()) >> 8, *announced  # 24 bits are exact
    signed = [sign * number for number in numbers for sign in (1.0, -1.0)]
    return torch.tensor([float(any(announced)), *signed], dtype=torch.float32, device=device)


def _line_of_user() -> str:
    """The line of code outside of this library and torch that the reduction comes from, without its folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if not frame.f_code.co_filename.startswith(_BETWEEN):
            break
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _read_header(header: torch.Tensor, line: str) -> tuple[bool, bool]:
    """If ranks have slots to announce, and if all have the same; raises, on every rank, where they have reduced in
    different directions.

    Warns where they come from different lines of code than this one, which is `line`.
    """
    announces, largest, smallest, code, negative_code, *of_slots = header.tolist()
    if largest != -smallest:
        points = [*_POINTS.values()]
        raise NotSupportedError(
            f"amax_reduction_group: got one rank at {points[int(-smallest)]} and another one at "
            f"{points[int(largest)]}, needed the same regions on every rank: each enters the same "
            "`microfloat.torch.autocast(...)` blocks, and calls update_scaling at the same points. Enter what one rank "
            "does alone under torch.no_grad()."
        )
    if code != -negative_code:
        warnings.warn(
            f"amax_reduction_group: this rank reduces amaxes in {line}, and another one elsewhere. If one of them "
            "enters an autocast that the others do not, its amaxes go into theirs, and it waits for them in the end: "
            "enter what one rank does alone under torch.no_grad().", UserWarning, stacklevel=2,
        )  # fmt: skip
    return announces > 0, of_slots[0] == -of_slots[1] and of_slots[2] == -of_slots[3]


# By process group and direction.
_LISTS: "weakref.WeakKeyDictionary[object, dict[str, _List]]" = weakref.WeakKeyDictionary()


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


def not_counted(group: Group, direction: str) -> list[Key]:
    """The slots of this rank whose latest amaxes have not counted, because ranks had different new ones; each once."""
    slots = _LISTS.get(_default(group), {}).get(direction)
    return [] if slots is None else slots.settle()


def _default(group: Group) -> object:
    return torch.distributed.group.WORLD if group is None else group


def reduce_together(
    group: Group, direction: str, keys: list[Key], live: torch.Tensor, words: Callable[[int], str]
) -> Reduced:
    """The maxima over all ranks of the slots of one direction, whichever of them each rank has recorded.

    live: float32 [keys]. `words`: the layer and the recipe of a key, by its index, read once. Raises
    NotSupportedError, on every rank, where one number means layers of different shapes, names or recipes; RankError
    where a rank fails.
    """
    name, line = f" of group {group_name(group)!r}" if group is not None else "", _line_of_user()
    with in_collective(f"the maximum of amaxes under delayed scaling, at {_POINTS[direction]}{name} ({line}),", group):
        return _reduce_together(group, direction, keys, live, words, line)


def _reduce_together(
    group: Group, direction: str, keys: list[Key], live: torch.Tensor, words: Callable[[int], str], line: str
) -> Reduced:
    lists = _LISTS.setdefault(_default(group), {})
    slots = lists.setdefault(direction, _List())
    slots.new.update({key: words(index) for index, key in enumerate(keys) if key not in slots.positions})
    capturing = live.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing and (slots.new or not slots.agreed):
        raise NotSupportedError(
            "CUDA graph capture: got layers under delayed scaling whose amaxes were never reduced before, needed a "
            "step before the capture, in which the ranks agree on their layers. Run two steps first."
        )
    if not capturing:
        slots.settle()
        if not slots.agreed:
            slots.grow(group)
    own, late = set(keys), _is_read_later(live)
    while True:
        announced, digest = slots.announce()
        places = slots.positions
        if announced:
            places = {**places, **{key: _HEADER + place for place, key in enumerate(announced)}}
        others = [(key, place) for key, place in slots.positions.items() if key not in own]
        known = [index for index, key in enumerate(keys) if key in places]
        at = slots.index(tuple([places[keys[index]] for index in known]), live.device)
        # Of one length in all directions, so that ranks which reduce in different ones get to know it.
        length = _HEADER + _PLACES + max(len(one.positions) for one in lists.values())
        payload = live.new_full((length,), _NOT_RECORDED)
        payload[:_HEADER].copy_(_header(direction, digest, line, live.device))
        payload.index_copy_(0, at, live if len(known) == len(keys) else live[known])
        torch.distributed.all_reduce(payload, op=torch.distributed.ReduceOp.MAX, group=group)
        if late:
            if announced:
                is_same = (payload[5] == -payload[6]) & (payload[7] == -payload[8])
                payload[_HEADER : _HEADER + _PLACES].masked_fill_(~is_same, _NOT_RECORDED)
            if not capturing:
                slots.remember(payload, line, announced)
            break
        if slots.read(payload[:_HEADER], line, announced) and not slots.new:
            break
        slots.grow(group)
    amaxes = {key: payload[place] for key, place in others}
    return Reduced(known, payload.index_select(0, at), amaxes, not (late and announced))


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


def reduce_alone(group: Group, keys: list[Key], live: torch.Tensor, all_keys: list[Key]) -> Reduced:
    """The maxima over all ranks of one layer's slots, for a layer that rolls by itself; `all_keys`: all that it has.

    Raises NotSupportedError where ranks reduce for different layers at the same time. On a GPU, which is not waited
    for, every rank then keeps the amaxes of its own tensors.
    """
    number = keys[0].number
    own = dict(zip(keys, live.unbind(), strict=True))
    absent = live.new_full((), _NOT_RECORDED)
    # The layer's number, as far as float32 holds it, with both signs: the maxima agree only if that of all ranks is the
    # same.
    numbers = live.new_full((), float(number % 16777213))
    payload = torch.stack([numbers, -numbers, *(own.get(key, absent) for key in all_keys)])
    sent = payload.clone()
    with in_collective("the maximum of one layer's amaxes under delayed scaling", group):
        torch.distributed.all_reduce(payload, op=torch.distributed.ReduceOp.MAX, group=group)
    is_same = payload[0] == -payload[1]
    if not payload.is_cuda and not is_same:
        raise NotSupportedError(
            f"amax_reduction_group: got layer {number} on this rank and another layer on another rank, needed the same "
            "calls on every rank, because a layer under delayed scaling that is called outside any autocast reduces "
            "its amaxes by itself. Put the step inside `with microfloat.torch.autocast():`, where ranks may call "
            "different layers, or use DelayedScaling(reduce_amax=False)."
        )
    reduced = dict(zip(all_keys, torch.where(is_same, payload, sent)[2:].unbind(), strict=True))
    others = {key: amax for key, amax in reduced.items() if key not in own}
    return Reduced(list(range(len(keys))), torch.stack([reduced[key] for key in keys]), others)
