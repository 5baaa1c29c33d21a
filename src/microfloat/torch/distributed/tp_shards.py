"""The cuts of a tensor-parallel Linear's tensors over ranks, and the check by recipe and route that no block is cut."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from microfloat.chips import Chip
from microfloat.errors import invalid_value
from microfloat.formats import ScaledFormat
from microfloat.layout import FOLDED, folded_format, scale_grid, stored_length
from microfloat.operands import OPERANDS
from microfloat.recipes import Cast, Recipe
from microfloat.routes import Entries, Entry, Routes, route_of

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

_NAMES = {"N": "out_features", "K": "in_features", "M": "the rows of x"}


class Axis(NamedTuple):
    """The ranks of a mesh, over which tensors of a Linear are sharded in the way of the `case`."""

    case: str
    group: str  # name of the process group
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
    """The cut of a call's tensors: all that its schedule depends on besides the local tensors."""

    axis: Axis | None  # None: every rank has whole tensors
    rows: Rows | None  # where the rows of x or dy are sharded
    seed_ranks: tuple[int, int, int]  # of x, w, dy: the first rank that holds the same shard

    @property
    def adds_bias(self) -> bool:
        """True on the rank that adds the bias, where the results of ranks are summed; else on all."""
        return self.axis is None or self.axis.case not in ("K", "S") or self.axis.rank == 0

    def axis_of(self, tensor: str, letter: str | None = None) -> Axis | None:
        """The axis over which a tensor is sharded before its cast; `letter`: None where it is not along this extent."""
        along = None if self.axis is None else CASES[self.axis.case].get(tensor)
        return self.axis if along is not None and letter in (None, along) else None

    def gathers(self, tensor: str) -> Axis | None:
        """The axis over which a tensor is gathered after its cast."""
        return self.axis if self.axis is not None and GATHERED.get(self.axis.case) == tensor else None

    def cut(self, tensor: str) -> tuple[Axis, str] | None:
        """The axis of a tensor whose shards have to be whole blocks, and the extent that it cuts."""
        axis = self.axis_of(tensor)  # `why_not_gathered` looks at shards that are gathered
        return None if axis is None or self.gathers(tensor) is not None else (axis, CASES[axis.case][tensor])


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
    return folded_format(fmt, entry.form) if entry.form in FOLDED else fmt


def scales_read(entry: Entry, sizes: Sequence[int]) -> int:
    """The number of scales of an operand of `sizes` rows and columns, without the padding of its layout."""
    assert entry.cast is not None
    return math.prod(scale_grid(_format_read(entry), sizes[0], stored_length(sizes[1], entry.cast.hadamard)))


def block_read(entry: Entry, axes: tuple[str, str]) -> int:
    """Rows of the matrix of which an operand's elements depend on each other, in the form that its GEMM reads."""
    assert entry.cast is not None
    return max(block_along(entry.cast, axes, "M"), _format_read(entry).block[axes.index("M")] or 1)


def _runs_of(shards: Shards, axis: Axis, letter: str, sizes: dict[str, int]) -> tuple[int, list[int]]:
    """The whole extent along an axis, and the lengths of its parts, which must be whole blocks."""
    if letter != "M":
        return sizes[letter], [-(-sizes[letter] // axis.size)]
    rows = shards.rows
    assert rows is not None
    return rows.whole, [rows.chunk, rows.whole] if rows.outer > 1 else [rows.chunk]


def routes_of_shards(
    recipe: Recipe, routes: Routes, chip: Chip | None, shards: Shards, sizes: dict[str, int]
) -> Routes:
    """The routes of one process, without folds of 128 elements of which no rank has all.

    A fold depends on all of its elements (docs/numerics.md, 9). Raises InvalidValueError where a recipe asks for it
    (``path="folded"``). `sizes`: as in `check_blocks`.
    """
    for operand in OPERANDS:
        route, gemm = getattr(routes, operand.gemm), getattr(recipe, operand.gemm)
        cast, form = recipe.cast(*operand.key), getattr(route, operand.side)
        if cast is None or form not in ("folded", "tiles") or gemm.from_fprop:
            continue
        cut = shards.cut(operand.tensor)
        if cut is None or cut[0].size == 1:
            continue
        axis, letter = cut
        block = folded_format(cast.format, form).block
        extent = block[AXES_OF[operand.tensor][operand.transposed].index(letter)] or 1
        size, runs = _runs_of(shards, axis, letter, sizes)
        if all(run % extent == 0 for run in runs):
            continue
        if gemm.path == "folded":
            raise invalid_value(
                f"{operand.tensor}, sharded along {letter} ({_NAMES[letter]})",
                f"{size} over {axis.size} ranks, in parts of {runs[0]}, and path='folded'",
                f"parts that are multiples of {extent}, which are folded together",
                f"Make {_NAMES[letter]} a multiple of {axis.size * extent}, or take path='auto'.",
            )  # fmt: skip
        made = route_of(gemm, chip, fold=False)
        reason = f"{made.reason}; parts of {runs[0]} of {_NAMES[letter]} are not folded, which takes {extent}"
        routes = routes._replace(**{operand.gemm: made._replace(reason=reason)})
    return routes.reading_fprop(recipe)


def check_blocks(entries: dict[str, Entries], shards: Shards, sizes: dict[str, int]) -> None:
    """Raise InvalidValueError where a shard ends inside a block; `sizes`: of the whole N, K; M is in the shards."""
    for tensor, both in entries.items():
        cut = shards.cut(tensor)
        if cut is None:
            continue
        axis, letter = cut
        size, runs = _runs_of(shards, axis, letter, sizes)
        for axes, entry in zip(AXES_OF[tensor], both, strict=True):
            if entry is None or entry.cast is None:
                continue
            cast, fmt = entry.cast, entry.cast.format
            how = "turned by a Hadamard transform" if cast.hadamard else "whose errors choose" * cast.chooses_by_error
            if how and fmt.block[axes.index(letter)] is None:
                raise invalid_value(
                    f"{tensor}, sharded along {letter}", f"blocks of {fmt.name} {how}, which it divides",
                    "blocks that are whole, or whose amax alone decides their scale",
                    "Take a format of smaller blocks, or leave the layer out of the plan.",
                )  # fmt: skip
            block = block_along(cast, axes, letter)
            if any(run % block for run in runs):
                raise invalid_value(
                    f"{tensor}, sharded along {letter} ({_NAMES[letter]})",
                    f"{size} over {axis.size} ranks, in parts of {runs[0]}",
                    f"parts that are multiples of {block}, so that no block of {fmt.name} is cut",
                    f"Make {_NAMES[letter]} a multiple of {axis.size * block}, take a recipe with a scale for each "
                    "tensor or row, or leave the layer out of the plan.",
                )  # fmt: skip
