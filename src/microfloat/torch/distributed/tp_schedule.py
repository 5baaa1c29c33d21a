"""The schedule of a Linear whose tensors are sharded: the casts and products of one rank, and collectives between them.

    case  x [M, K]             w [N, K]      y [M, N]             sharded besides    collectives of the schedule
    N     whole                by its rows   by columns           dy by columns      amaxes of w; of dy
    K     by columns           by columns    partial sums         -                  amaxes of x and w together
    M     by its rows          whole         by its rows          dy by rows         amaxes of x; of dy
    G     by its rows          by its rows   by columns           dy by columns      amaxes of x and w; parts of x
    S     by columns           by columns    partial, scattered   dy by rows         amaxes of x, w; of dy; parts of dy

A column operand of x that is not the transpose of the other one is gathered in backward.

Every rank makes the bytes that one process makes of the whole tensor. An amax is measured of the shard and reduced
over the ranks that hold the others, all amaxes of one direction in one collective. Block scales need nothing where
shards are whole blocks, and are refused elsewhere. Under G and S an operand is cast before it is gathered: codes and
scales travel as bytes. docs/numerics.md 3.5.

Legend: M = rows of x (all leading dimensions), K = in features, N = out features.
"""

import functools
import math
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from microfloat.operands import OPERANDS, TENSORS
from microfloat.passes import CastInputs
from microfloat.recipes import Cast, Recipe
from microfloat.routes import Entries, Routes, entries_of
from microfloat.torch import reference
from microfloat.torch._typing import Sink
from microfloat.torch.backends import layouts_of
from microfloat.torch.backends.base import Backend, Operands, Parts, Saved, laid
from microfloat.torch.distributed.collectives import differing, gather_parts, group_of
from microfloat.torch.distributed.tp_shards import AXES_OF, CASES, Shards, block_read, scales_read
from microfloat.torch.linear.schedule import CastStep, Inputs, Schedule, as_matrix
from microfloat.torch.reference._hadamard import transform
from microfloat.torch.scaling import amax_reduction as reduction

_ALIGNED = 16  # elements, by which a matrix is widened


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, in memory: casts read addresses, and torch's collectives return promises."""
    tensor = getattr(tensor, "shard", tensor)
    return tensor.wait() if type(tensor) is AsyncCollectiveTensor else tensor


class _Measure(NamedTuple):
    """An amax of the whole tensor that a cast needs.

    `kind`: "tensor", "transformed" (of the Hadamard transform) or "rows" (one for each row of the operand); `column`:
    it is of the column operand alone; `sees_nan`: NaN counts as larger than infinity, for scales that store it.
    """

    kind: str
    column: bool
    sees_nan: bool = False


def _measures_of(
    tensor: str, column: bool, cast: Cast | None, shards: Shards
) -> tuple[_Measure | None, _Measure | None]:
    """The amax behind a scale that a cast takes, and the amax behind block scales whose blocks are cut by ranks."""
    if cast is None or cast.is_delayed or cast.is_static:
        return None, None
    anywhere, along = shards.axis_of(tensor), shards.axis_of(tensor, AXES_OF[tensor][column][1])
    given, crossed, fmt = None, None, cast.format
    if cast.tensor_scale == "row":
        given = None if along is None else _Measure("rows", column)
    elif cast.takes_amax and anywhere is not None:
        given = _Measure("tensor", False) if cast.hadamard is None else _Measure("transformed", column)
    sees_nan = fmt.scale.name != "FP32"
    if fmt.is_per_tensor and not cast.takes_amax and anywhere is not None:
        crossed = _Measure("tensor", False, sees_nan)
    elif fmt.block[0] is not None and fmt.block[1] is None and along is not None:
        crossed = _Measure("rows", column, sees_nan)
    return given, crossed


def _measured(backend: Backend, x: torch.Tensor, measure: _Measure, cast: Cast) -> torch.Tensor:
    if measure.kind == "tensor" and not measure.sees_nan:
        return backend.amax(x)
    if measure.kind == "transformed":
        assert cast.hadamard is not None
        return reference.amax(transform(x.t() if measure.column else x, cast.hadamard))
    magnitudes = x.detach().abs()
    if not measure.sees_nan:
        magnitudes = magnitudes.nan_to_num(nan=0.0, posinf=float("inf"))
    amax = magnitudes.amax() if measure.kind == "tensor" else magnitudes.amax(0 if measure.column else 1)
    return torch.where(amax.isnan(), torch.nan, amax).float()  # of one sign, so that its bits are the largest


class ShardedCast:
    """Both operands of a tensor of which this rank has a shard, by the steps of `CastStep`.

    ``step(x, stream, words, inputs)`` as there; `inputs.amax` may be the list that `measure` and a reduction made, so
    that tensors of one direction share a collective.
    """

    program, is_bound = None, False

    def __init__(
        self, shards: Shards, shard: torch.Tensor | None, backend: Backend, x: torch.Tensor, entries: Entries,
        batch: int = 0,
    ) -> None:  # fmt: skip
        """Make the step for tensors like `x`; `shard`: this rank's part of an x that is gathered as codes."""
        self.entries, self._backend, self._shards = entries, backend, shards
        tensor = next((entry.operand.tensor for entry in entries if entry is not None), "")
        if tensor == "x" and shards.gathers(tensor) is not None and shard is not None:
            x = shard
        self._axis, self._rows = shards.gathers(tensor), shards.rows
        casts = tuple(None if entry is None else entry.cast for entry in entries)
        # The codes of the transpose are transposed after they are gathered.
        self._shares = self._axis is not None and casts[0] is not None and casts[0] == casts[1] and casts[0].transposes
        # Wgrad alone reads the column operand, so that its gather has time until then.
        self.gathers_late = tensor == "x" and self._axis is not None and None not in casts and not self._shares
        made = (entries[0], None) if self._shares else entries
        both = [
            (None, None) if entry is None else _measures_of(tensor, column, entry.cast, shards)
            for column, entry in zip((False, True), made, strict=True)
        ]
        of_cast = {measure: casts[column] for column in (1, 0) for measure in both[column] if measure is not None}
        self.measures = [*dict.fromkeys(measure for pair in both for measure in pair if measure is not None)]
        self._casts = [of_cast[measure] for measure in self.measures]
        # A decoded operand takes as many bytes as values: that of wgrad is made when dgrad has let go of its own. One
        # of float32, which takes half of them, is gathered, and its gather begins before dgrad.
        decodes = all(entry is not None and entry.form == "values" for entry in entries)
        self._waits = tensor == "dy" and self._axis is None and decodes
        takers = {given for (given, _), cast in zip(both, casts, strict=True) if cast is not None and cast.takes_amax}
        apart = len(takers) > 1 or any(crossed is not None for _, crossed in both) or self._waits
        halves = ((made[0], None), (None, made[1])) if apart else (made,)
        self._steps: list[tuple[CastStep, int | None, int | None]] = []
        for half in halves:
            if not any(half):
                continue
            pairs = [pair for entry, pair in zip(half, both, strict=True) if entry is not None]
            numbers = [[None if one is None else self.measures.index(one) for one in pair] for pair in pairs]
            given, crossed = (next((one[at] for one in numbers if one[at] is not None), None) for at in (0, 1))
            example = x
            if crossed is not None:
                shape = (x.shape[0], x.shape[1] + _ALIGNED) if half[0] else (x.shape[0] + _ALIGNED, x.shape[1])
                example = x.new_empty(shape)
            step = CastStep(backend, example, half, batch, given_amax=given is not None)
            self._steps.append((step, given, crossed))
        self._local = layouts_of(backend, entries, *x.shape)
        self._whole = self._local
        if self._axis is not None:
            self._whole = layouts_of(backend, entries, x.shape[0] * self._axis.size, x.shape[1])

    @property
    def reason(self) -> str:
        """Reason for casts by torch operations, or ""."""
        return next((step.reason for step, _, _ in self._steps if step.reason), "")

    @property
    def names(self) -> str:
        """The steps in words."""
        axis = self._shards.axis
        words = [] if axis is None or not self.measures else [f"amax over {axis.size} ranks"]
        words += [" + ".join(dict.fromkeys(step.names for step, _, _ in self._steps))]
        return ", ".join(words + (["gather codes and scales"] if self._axis is not None else []))

    @property
    def delayed(self) -> Cast | None:
        """The first delayed cast, by whose scaling the amax is recorded."""
        return next((step.delayed for step, _, _ in self._steps if step.delayed is not None), None)

    def measure(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The amaxes of this rank's shard, one for each of `measures`."""
        pairs = zip(self.measures, self._casts, strict=True)
        return [_measured(self._backend, x, measure, cast) for measure, cast in pairs]  # type: ignore[arg-type]

    def __call__(self, x: torch.Tensor, stream: int, words: torch.Tensor | None, inputs: CastInputs) -> Operands:
        """Both operands; in place of a column operand that waits for dgrad a function that makes the operands."""
        amaxes = inputs.amax
        if self.measures and not isinstance(amaxes, list):
            amaxes = reduction.maxima(group_of(self._shards.axis), self.measure(x))  # type: ignore[arg-type]
        made = Operands()
        for index, (step, _, _) in enumerate(self._steps):
            row, column = step.entries
            cast = functools.partial(self._by_step, index, x, amaxes, stream, words, inputs)
            if self._waits and row is None:
                made.column = cast  # type: ignore[assignment]
                continue
            operands = cast()
            made.row = operands.row if row is not None else made.row
            made.column = operands.column if column is not None else made.column
            inputs = inputs._replace(record=None)  # the first step has recorded
        if self._axis is not None:
            made.row = self.gathered(made.row, 0)
            if self._shares:
                made.column = made.row._replace(codes=self._turned(made.row.codes))
            elif not self.gathers_late:
                made.column = self.gathered(made.column, 1)
        return made

    def _by_step(
        self, index: int, x: torch.Tensor, amaxes: list[torch.Tensor], stream: int, words: torch.Tensor | None,
        inputs: CastInputs,
    ) -> Operands:  # fmt: skip
        """The operands that one of the steps makes.

        Of an operand whose blocks are cut by ranks, added columns, which no product will read, hold their amaxes.
        """
        step, given, crossed = self._steps[index]
        if self.measures:
            amax = None if given is None else amaxes[given]
            inputs = inputs._replace(amax=amax if amax is None or amax.dim() == 0 else amax[:, None])
        if crossed is None:
            return step(x, stream, words, inputs)
        column = step.entries[0] is None
        rows, length = x.shape
        amax = amaxes[crossed].to(x.dtype)  # that of an element, so that it is exact
        of_rows = amax if amax.dim() == 0 or column else amax[:, None]
        added = of_rows.expand(_ALIGNED, length) if column else of_rows.expand(rows, _ALIGNED)
        made = step(torch.cat([x, added], 0 if column else 1), stream, words, inputs)
        parts, entry, layout = made.one(not column), step.entries[column], self._local[column]
        assert entry is not None
        assert layout is not None
        along = 0 if entry.turned else 1
        codes = parts.codes.narrow(along, 0, layout.codes.shape[along])
        codes = laid(codes.contiguous() if layout.codes.strides[-1] == 1 else codes, layout.codes)
        parts = parts._replace(codes=codes)
        return Operands(column=parts) if column else Operands(parts)

    def gathered(self, operand: Parts, which: int) -> Parts:
        """The row operand (0) or the column operand (1) of all ranks, given this rank's."""
        local, whole, parts = self._local[which], self._whole[which], [*operand]
        assert self._axis is not None
        assert self._rows is not None
        shared = {
            at: (typing.cast(torch.Tensor, laid(parts[at], part)), goal)
            for at, (part, goal) in enumerate(zip(local or (), whole or (), strict=True))
            if part is not None and goal is not None and part.shape != goal.shape
        }
        if shared:  # none of one rank
            made = gather_parts([*shared.values()], self._rows.outer, self._axis)
            for at, part in zip(shared, made, strict=True):
                parts[at] = part
        return Parts(*parts)

    def _turned(self, codes: torch.Tensor) -> torch.Tensor:
        """The codes of the column operand, made from the codes of the row operand."""
        (row, column), layout = self.entries, self._whole[1]
        assert row is not None
        assert column is not None
        assert layout is not None
        codes = codes if row.turned == (not column.turned) else codes.t()
        return typing.cast(torch.Tensor, laid(codes, layout.codes, self._backend))


def why_not_gathered(
    backend: Backend, entries: Entries, shards: Shards, tensor: str, sizes: tuple[int, int], itemsize: int
) -> str:
    """Reason for gathering a tensor in high precision before its cast, or "" if codes and scales are gathered.

    `sizes`: rows and columns of a rank's shard of `itemsize` bytes an element.
    """
    axis, rows = shards.gathers(tensor), shards.rows
    assert axis is not None
    assert rows is not None
    if rows.chunk * axis.size != rows.whole:
        return f"{rows.whole} rows are no multiple of {axis.size} ranks"
    if any(entry is not None and entry.cast is None for entry in entries):
        return "a GEMM reads it in high precision"
    for column, entry in enumerate(entries):
        extent = 1 if entry is None else block_read(entry, AXES_OF[tensor][column])
        if rows.chunk % extent:
            return f"shards of {rows.chunk} rows are no multiple of the block of {extent}"
    local = layouts_of(backend, entries, *sizes)
    whole = layouts_of(backend, entries, sizes[0] * axis.size, sizes[1])
    casts = [None if entry is None else entry.cast for entry in entries]
    shares = casts[0] is not None and casts[0] == casts[1] and casts[0].transposes
    for which, (one, other) in enumerate(zip(local, whole, strict=True)):
        if one is None or other is None or (which and shares):
            continue
        entry, count = entries[which], 0
        assert entry is not None
        if one.scale is not None and math.prod(one.scale.shape) != scales_read(entry, sizes[:: -1 if which else 1]):
            return "its scales are padded"
        for part, goal in zip(one, other, strict=True):
            if part is None or goal is None or part.shape == goal.shape:
                continue
            dim = differing(part.shape, goal.shape)
            if part.shape[dim] * axis.size != goal.shape[dim] or part.shape[dim] % rows.outer:
                return "its scales are padded"
            count += math.prod(part.shape) * getattr(torch, part.dtype).itemsize
        if count >= sizes[0] * sizes[1] * itemsize:
            return f"an operand takes {count} bytes, no fewer than the {sizes[0] * sizes[1] * itemsize} of its values"
    return ""


class ShardedSchedule(Schedule):
    """fprop, dgrad and wgrad of one rank's part of a Linear. ``print(schedule)`` shows casts, products, collectives.

    x of a call under G is a tensor of the whole shape without memory, whose `shard` is this rank's part; so is dy under
    S (`microfloat.torch.distributed.tp_linear`).
    """

    def __init__(
        self, shards: Shards, x_shard: torch.Tensor, note: str, recipe: Recipe, backend: Backend, routes: Routes,
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, compute: torch.dtype, wants_dx: bool,
        wants_dw: bool, late: bool,
    ) -> None:  # fmt: skip
        """Make the schedule of tensors like `x`, which is multiplied, and `x_shard`, the part of it that is cast.

        `note`: the reason for gathering x in high precision; `late`: FSDP2 frees the weight before backward.
        """
        self.shards, self.note, self.dtype = shards, note, compute
        self.cast_step = functools.partial(ShardedCast, shards, as_matrix(x_shard, self.dtype))
        super().__init__(
            recipe, backend, routes, x, weight, bias if shards.adds_bias else None, compute, wants_dx, wants_dw,
            late=late,
        )  # fmt: skip
        self.cast_step = functools.partial(ShardedCast, shards, None)
        both = enumerate(entries_of(recipe, routes, "w", True, wants_dx))
        measures = {_measures_of("w", bool(column), entry.cast, shards) for column, entry in both if entry is not None}
        self._keeps_w_amax = self.late and len(measures) == 1  # for a cast in backward, which would reduce it again
        # Layers that read one gathered x and cast it alike share its operands.
        casts = [entry.cast for entry in self.x_cast.entries if entry is not None and entry.cast is not None]
        self.shares_x = not any(cast.is_stochastic or cast.is_delayed or cast.is_static for cast in casts)
        self.x_key = self.x_cast.entries, backend.name, compute
        self.gathers_late = self.x_cast.gathers_late and not self.reads_x_row

    def seeded(self, inputs: Inputs, apart: bool) -> Inputs:
        """The inputs with a call seed, the same on all ranks that round replicas and another for each shard."""
        casts = self.recipe.casts
        rounded = [one.tensor for one in OPERANDS if (cast := casts[one.key]) is not None and cast.is_stochastic]
        rank = min(self.shards.seed_ranks[TENSORS.index(tensor)] for tensor in rounded)
        return self._with_seed(inputs, rank)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x_inputs: CastInputs,
        w_inputs: CastInputs, kept: Operands | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
        """y, and the operands of x and w that backward reads; the amaxes of both in one collective."""
        shared: dict | None = getattr(x, "gathered", None) if self.shares_x else None
        x_made: Any = None if shared is None else shared.get(self.x_key)
        x, given = as_matrix(arrived(x), self.dtype), weight
        weight = weight.to(self.dtype) if self._converts_w else weight
        steps: list[tuple[Any, torch.Tensor]] = [(self.x_cast, x)] if x_made is None else []
        steps += [(self.w_cast, weight)] if kept is None else []
        measures = [measure for step, _ in steps for measure in step.measures]
        if measures:
            own = [part for step, tensor in steps if step.measures for part in step.measure(tensor)]
            parts = reduction.maxima(group_of(self.shards.axis), own)  # type: ignore[arg-type]
            first = 0 if x_made is not None else len(self.x_cast.measures)
            x_inputs = x_inputs if first == 0 else x_inputs._replace(amax=parts[:first])
            w_inputs = w_inputs if first == len(measures) else w_inputs._replace(amax=parts[first:])
        if x_made is None:
            x_made = self.x_cast(x, *self.resources(), x_inputs)
            if shared is not None:
                shared[self.x_key] = x_made
        w_made = self.w_cast(weight, *self.resources(), w_inputs) if kept is None else kept
        y = self.products["fprop"](x_made.row, w_made.row, bias if self.shards.adds_bias else None)
        y = y if self.y_shape is None else torch.ops.aten._unsafe_view(y, self.y_shape)
        x_read = x_made.one(self.reads_x_row)
        if not self.late:
            return y, (*x_read, *w_made.one(self.reads_w_row))
        keeps = self._keeps_w_amax and self.w_cast.measures
        amaxes = typing.cast(Sequence[torch.Tensor], w_inputs.amax) if keeps else ()
        return y, (*x_read, given, *amaxes)

    def saved_operands(self, saved: Sequence[torch.Tensor | None], inputs: CastInputs) -> Saved:
        """See `Schedule.saved_operands`; after the weight come its amaxes over the ranks, if they serve."""
        if len(saved) > 4 and self.late:
            inputs = inputs._replace(amax=[*saved[4:]])  # pyright: ignore[reportArgumentType]
        return super().saved_operands(saved[:4] if self.late else saved, inputs)

    def cast_operands(
        self, x: torch.Tensor, weight: torch.Tensor, x_inputs: CastInputs, w_inputs: CastInputs, kept: Operands | None
    ) -> tuple[Operands, Operands]:
        """See `Schedule.cast_operands`."""
        return super().cast_operands(arrived(x), weight, x_inputs, w_inputs, kept)

    def fprop(self, x: Parts, w: Parts, bias: torch.Tensor | None) -> torch.Tensor:
        """See `Schedule.fprop`; y is this rank's."""
        return super().fprop(x, w, bias if self.shards.adds_bias else None)

    def cast_dy(self, dy: torch.Tensor, inputs: CastInputs, wants_dx: bool, wants_dw: bool) -> Operands:
        """Both operands of a gradient, of this rank's shard or gathered."""
        return super().cast_dy(arrived(dy), inputs, wants_dx, wants_dw)

    def gradients(
        self, dy: Operands, saved: Saved, wants_dx: bool, wants_dw: bool, into: Sink | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See `Schedule.gradients`; an operand that was left for later is made when dgrad has let go of its own."""
        dx = dw = None
        if wants_dx:
            dx, _ = super().gradients(dy, saved, True, False)
        if wants_dw:
            dy.column = dy.column().column if callable(dy.column) else dy.column
            _, dw = super().gradients(dy, saved, False, True, into)
        return dx, dw

    def __str__(self) -> str:
        """`Schedule.__str__`, and how the tensors are sharded."""
        lines = [super().__str__()]
        if (axis := self.shards.axis) is not None:
            held = [f"{tensor} along {letter}" for tensor, letter in CASES[axis.case].items()]
            lines.append(f"rank {axis.rank} of {axis.size}: " + (", ".join(held) or "whole tensors"))
        if self.note:
            lines.append(f"gathered in high precision: {self.note}")
        return "\n".join(lines)
