"""Parts of operands on their way from all ranks, and how their bytes are put in place."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from microfloat.layout import Part
from microfloat.torch._typing import Parts
from microfloat.torch.backends.base import laid
from microfloat.torch.distributed.collectives import UnderWay

__all__ = ["Bytes", "Coming", "land", "side_by_side"]


class Coming:
    """A part of an operand that is on its way, or is made of one: `land` waits for it the first time."""

    __slots__ = ("_finish", "_part")

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._part: torch.Tensor | None = None

    def land(self) -> torch.Tensor:
        """The part, as GEMMs take it."""
        if self._finish is not None:
            self._part, self._finish = self._finish(), None
        assert self._part is not None
        return self._part


def land(parts: Parts, which: int = 0) -> None:
    """Wait for those parts of an operand that are on their way: of the row's (0), the column's (1)."""
    for at in range(3 * which, 3 * which + 3):
        if type(parts[at]) is Coming:
            parts[at] = parts[at].land()


class Bytes(NamedTuple):
    """A part on the wire. Its bytes travel as they lie, and are put in place by one copy of whole runs, where they are
    not in place already."""

    sent: torch.Tensor
    dtype: torch.dtype
    shape: list[int]  # in memory
    dim: int  # of these, along which the parts of all ranks lie beside each other, in so many runs
    runs: int
    turned: bool  # a matrix, whose columns lie one after the other

    @staticmethod
    def of(part: torch.Tensor | None, dim: int, outer: int) -> "Bytes":
        """The bytes of a part that is gathered along `dim`, which is `outer` runs of each rank's share."""
        assert part is not None
        turned = part.stride(0) < part.stride(1)
        lies = (part.t() if turned else part).contiguous()
        at = 1 - dim if turned else dim
        sent, runs = lies.view(-1).view(torch.uint8), outer * math.prod(lies.shape[:at])
        return Bytes(sent, lies.dtype, [*lies.shape], at, runs, turned)

    def landed(self, under_way: UnderWay[list[torch.Tensor]], index: int, goal: Part, ranks: int) -> torch.Tensor:
        """The whole part, laid as `goal` says."""
        received, shape = under_way.wait()[index], self.shape.copy()
        if self.runs > 1:
            received = side_by_side(received.view(ranks, self.runs, -1))
        shape[self.dim] *= ranks
        whole = received.view(self.dtype).view(shape)
        made = laid(whole.t() if self.turned else whole, goal)
        assert made is not None
        return made


def side_by_side(shards: torch.Tensor) -> torch.Tensor:
    """uint8 [ranks, R, bytes of a row] -> [R * ranks * bytes], the rows of all ranks beside each other."""
    width, start = shards.shape[2], shards.storage_offset()
    for dtype in (torch.int64, torch.int32, torch.int16):  # a copy of whole words is as fast as memory
        if width % dtype.itemsize == 0 and start % dtype.itemsize == 0:
            shards = shards.view(dtype)
            break
    return shards.transpose(0, 1).reshape(-1).view(torch.uint8)
