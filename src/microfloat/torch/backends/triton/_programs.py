"""Casts as data: which tensors to allocate and which launches fill them, worked out once and run many times.

A `Program` holds what the functions of `_scaled`, `_blocks` and `_nvfp4` decide on every call, for one kind of matrix.
Its launches are theirs, with the same arguments, or one of `_together` in place of several; so its bytes are theirs. It
holds no data.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from microfloat.torch.backends.triton._scaled import Launch

__all__ = [
    "FOLDED", "GIVEN", "MADE", "NOTHING", "RECORD", "SECOND", "SECOND_GIVEN", "SECOND_RECORD", "SOURCE", "TILES",
    "WORDS", "Builder", "Program", "Room", "fast_empty",
]  # fmt: skip

# Where launches find their tensors, by position in a table: nothing; the matrix; scratch words; what its cast is given
# (encode scale or call seed); the history it records into; places for the counts of folding, to 1x128 and to 128x128;
# a second matrix with its own; and from MADE on what the program itself allocates.
NOTHING, SOURCE, WORDS, GIVEN, RECORD, FOLDED, TILES, SECOND, SECOND_GIVEN, SECOND_RECORD, MADE = range(11)
_MULTIPLE = 16  # bytes: what the addresses of whole tensors are multiples of


class Room(NamedTuple):
    """What to allocate; cleared where a launch adds to what it finds."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    cleared: bool = False


def fast_empty(device: torch.device) -> Callable[[tuple, tuple, torch.dtype], torch.Tensor]:
    """``empty(size, stride, dtype)`` on the current device of a type, with the least host time there is."""
    # What Inductor's generated code calls: a third of the host time of torch.empty_strided.
    found = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    fast = getattr(found, f"_empty_strided_{device.type}", None)
    if fast is not None:
        return fast
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


class Program:
    """``run(stream, given)`` allocates and launches; returns all it has allocated, beginning with the operands:
    codes or values of the row operand, its scale, those of the column operand (None what is not there); with a second
    matrix four more.
    """

    __slots__ = ("_cleared", "_empty", "_parts", "_prepared", "_rooms", "_same", "_starts", "layouts")

    layouts: tuple[tuple | None, ...]  # size, stride and dtype of what `run` makes

    def __init__(self, builder: "Builder") -> None:
        self._rooms = tuple(None if room is None else room[:3] for room in builder.rooms)
        self._cleared = tuple(index for index, room in enumerate(builder.rooms) if room is not None and room.cleared)
        same = {index: room for index, _, room in builder.same}
        self.layouts = tuple(self._rooms[index] or same.get(index) for index in range(len(self._rooms)))
        self._same = tuple(
            (index, original, self._rooms[original] != room) for index, original, room in builder.same
        )  # fmt: skip
        self._parts = tuple(builder.parts)
        self._empty = fast_empty(builder.device)
        first_part = MADE + len(self._rooms)
        self._prepared = []
        for launch, positions in builder.steps:
            aligned = tuple(at >= 0 or builder.parts[~at][1] % _MULTIPLE == 0 for at in positions)
            table = tuple(at if at >= 0 else first_part + ~at for at in positions)
            self._prepared.append((launch.prepared(aligned), itemgetter(*table)))
        self._starts: tuple[tuple[Callable[..., None], itemgetter], ...] | None = None

    def run(self, stream: int, given: tuple[torch.Tensor | None, ...]) -> list[Any]:
        """`given`: the table up to MADE. On a stream of the current device, which is the matrix's."""
        empty = self._empty
        made: list[Any] = [None if room is None else empty(*room) for room in self._rooms]
        for index in self._cleared:
            made[index].zero_()
        starts = self._starts
        if starts is None:
            self._first(stream, given, made)
        else:
            table = [tensor if tensor is None else tensor.data_ptr() for tensor in given]
            table += [tensor if tensor is None else tensor.data_ptr() for tensor in made]
            for index, offset in self._parts:
                table.append(table[MADE + index] + offset)  # type: ignore[operator]
            for start, pick in starts:
                start(stream, *pick(table))
        for index, original, turned in self._same:
            made[index] = made[original].t() if turned else made[original]
        return made

    def _first(self, stream: int, given: tuple[torch.Tensor | None, ...], made: list[Any]) -> None:
        """With tensors: what compiles the kernels, and the only way in the interpreter."""
        table = [*given, *made]
        for index, offset in self._parts:
            table.append(made[index].view(-1)[offset // made[index].element_size() :])
        for prepared, pick in self._prepared:
            prepared(stream, *pick(table))
        if all(prepared.at is not None for prepared, _ in self._prepared):
            self._starts = tuple((prepared.at, pick) for prepared, pick in self._prepared)


class Builder:
    """Collects the rooms and launches of a program; positions are those of the table, parts of rooms negative ones."""

    def __init__(self, device: torch.device, operands: int = 4) -> None:
        self.device = device
        self.rooms: list[Room | None] = [None] * operands
        self.parts: list[tuple[int, int]] = []  # room, offset in bytes
        self.steps: list[tuple[Launch, Sequence[int]]] = []
        self.same: list[tuple[int, int, tuple]] = []  # a result that is another one, or its transpose; its layout

    def put(self, index: int, room: Room) -> int:
        """Make `room` the result number `index`."""
        self.rooms[index] = room
        return MADE + index

    def share(self, index: int, original: int, room: Room) -> None:
        """Let the result number `index` be the number `original`, seen as `room`: the same, or transposed."""
        self.same.append((index, original, room[:3]))

    def add(self, room: Room) -> int:
        """Make `room` besides the results."""
        self.rooms.append(room)
        return MADE + len(self.rooms) - 1

    def part(self, position: int, offset: int) -> int:
        """What begins `offset` bytes into a room."""
        self.parts.append((position - MADE, offset))
        return ~(len(self.parts) - 1)

    def launch(self, launch: Launch, *positions: int) -> None:
        """Start `launch` on the tensors at `positions`."""
        self.steps.append((launch, positions))
