"""How the tensors of a Linear are cut over ranks, and whether a cut leaves their blocks whole."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from microfloat.errors import invalid_value
from microfloat.formats import ScaledFormat
from microfloat.layout import folded_format, scale_grid, stored_length
from microfloat.recipes import Cast
from microfloat.routes import Entries, Entry

__all__ = [
    "AXES_OF", "CASES", "GATHERED", "Axis", "Rows", "Shards", "block_along", "block_read", "check_blocks",
    "scales_read",
]  # fmt: skip

# The axis along which each tensor is sharded before its cast, by the case.
CASES: dict[str, dict[str, str]] = {
    "": {},
    "N": {"w": "N", "dy": "N"},
    "K": {"x": "K", "w": "K"},
    "M": {"x": "M", "dy": "M"},
    "G": {"x": "M", "w": "N", "dy": "N"},
    "S": {"x": "K", "w": "K", "dy": "M"},
}
GATHERED = {"G": "x", "S": "dy"}  # what a case gathers after its cast
# Rows and contraction length of both operands of a tensor.
AXES_OF = {"x": (("M", "K"), ("K", "M")), "w": (("N", "K"), ("K", "N")), "dy": (("M", "N"), ("N", "M"))}


class Axis(NamedTuple):
    """One dimension of a mesh along which tensors of a Linear are sharded."""

    case: str
    group: str  # name of the process group of this rank's line of the mesh
    size: int
    rank: int  # in the group


class Rows(NamedTuple):
    """The sharded dimension of x's or dy's leading ones, as rows of a matrix: `outer` runs of `whole` rows each, of
    which this rank has `part`, and every rank but the last `chunk`."""

    outer: int
    whole: int
    part: int
    chunk: int


class Shards(NamedTuple):
    """All that the schedule of a sharded call depends on besides the local tensors."""

    axes: tuple[Axis, ...]
    rows: Rows | None  # where the rows of x or dy are sharded
    adds_bias: bool  # of ranks whose results are summed one adds it
    seed_ranks: tuple[int, int, int]  # of x, w, dy: the first rank that holds the same shard

    def axes_of(self, tensor: str, letter: str | None = None) -> tuple[Axis, ...]:
        """The axes along which a tensor is sharded before its cast; `letter`: those that shard this extent."""
        found = ((axis, CASES[axis.case].get(tensor)) for axis in self.axes)
        return tuple(axis for axis, one in found if one is not None and letter in (None, one))

    def gathers(self, tensor: str) -> Axis | None:
        """The axis over which a tensor is gathered after its cast."""
        return next((axis for axis in self.axes if GATHERED.get(axis.case) == tensor), None)


def block_along(cast: Cast, axes: tuple[str, str], letter: str) -> int:
    """Elements along an axis that one scale, or one Hadamard transform, is made of; 1 where amaxes are reduced."""
    block = cast.format.block[axes.index(letter)] or 1
    if cast.hadamard is not None and axes[1] == letter:
        block = max(block, cast.hadamard.size)
    # Packed codes share a byte.
    return max(block, cast.format.element.codes_per_byte) if axes[1] == letter else block


def _format_read(entry: Entry) -> ScaledFormat:
    """The format of an operand in the form that its GEMM reads."""
    assert entry.cast is not None
    fmt = entry.cast.format
    return folded_format(fmt, entry.form) if entry.form in ("folded", "tiles") else fmt


def scales_read(entry: Entry, sizes: Sequence[int]) -> int:
    """The number of scales of an operand of so many rows and columns, without those that fill up its layout."""
    assert entry.cast is not None
    return math.prod(scale_grid(_format_read(entry), sizes[0], stored_length(sizes[1], entry.cast.hadamard)))


def block_read(entry: Entry, axes: tuple[str, str]) -> int:
    """Rows of the matrix of which an operand's elements depend on each other, in the form that its GEMM reads."""
    assert entry.cast is not None
    return max(block_along(entry.cast, axes, "M"), _format_read(entry).block[axes.index("M")] or 1)


def check_blocks(entries: dict[str, Entries], shards: Shards, sizes: dict[str, int]) -> None:
    """Raise InvalidValueError where a shard ends inside a block; `sizes`: of the whole N, K; M is in the shards."""
    for tensor, both in entries.items():
        for axis in shards.axes_of(tensor):
            letter = CASES[axis.case][tensor]
            if GATHERED.get(axis.case) == tensor:
                continue  # `why_not_gathered` has looked
            if letter == "M":
                assert shards.rows is not None
                runs = [shards.rows.chunk]
                if shards.rows.outer > 1:
                    runs.append(shards.rows.whole)
                size = shards.rows.whole
            else:
                size = sizes[letter]
                runs = [-(-size // axis.size)]
            for column, entry in enumerate(both):
                if entry is None or entry.cast is None:
                    continue
                cast = entry.cast
                how = (
                    "turned by a Hadamard transform" if cast.hadamard else "whose errors choose" * cast.chooses_by_error
                )
                if how and cast.format.block[AXES_OF[tensor][column].index(letter)] is None:
                    raise invalid_value(
                        f"{tensor}, sharded along {letter}", f"blocks of {cast.format.name} {how}, which it divides",
                        "blocks that are whole, or whose amax alone decides their scale",
                        "Take a format of smaller blocks, or leave the layer out of the plan.",
                    )  # fmt: skip
                block = block_along(cast, AXES_OF[tensor][column], letter)
                if any(run % block for run in runs):
                    name = {"N": "out_features", "K": "in_features", "M": "the rows of x"}[letter]
                    raise invalid_value(
                        f"{tensor}, sharded along {letter} ({name})",
                        f"{size} over {axis.size} ranks, in parts of {runs[0]}",
                        f"parts that are multiples of {block}, so that no block of {cast.format.name} is cut",
                        f"Make {name} a multiple of {axis.size * block}, take a recipe with a scale for each tensor or "
                        "row, or leave the layer out of the plan.",
                    )  # fmt: skip
