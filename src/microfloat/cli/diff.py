"""`microfloat diff`: two checkpoints of one model, tensor by tensor: their values, or their stored bytes."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from microfloat.cli.hub import Hub, Source, read
from microfloat.cli.inspect import layers_pattern
from microfloat.cli.output import Column, Output, count, decibel, number, three
from microfloat.errors import invalid_value
from microfloat.metrics import decibels

if TYPE_CHECKING:
    from microfloat.checkpoint import Checkpoint, Record
    from microfloat.pictures.errors import ErrorCounts

_MOST_LINES = 24
ELEMENTS = 1 << 22  # that are compared at a time


_COLUMNS = (
    Column("name", "tensor", prose=True), Column("formats", text=lambda both: " / ".join(dict.fromkeys(both))),
    Column("sqnr_db", "SQNR\ndB", decibel, right=True), Column("relative", "relative\nerror", three, right=True),
    Column("max_abs", "largest\nerror", three, right=True),
    Column("problem", prose=True, style=lambda problem: "bold red" if problem else ""),
)  # fmt: skip
_BYTE_COLUMNS = (
    Column("name", "tensor", prose=True), Column("part"), Column("index", text=lambda index: str(index or "-")),
    Column("code_a", "A"), Column("code_b", "B"), Column("value_a", "value\nof A", number, right=True),
    Column("value_b", "value\nof B", number, right=True),
    Column("differing", "differ", count, right=True), Column("problem", prose=True),
)  # fmt: skip


def diff(
    output: Output,
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint: the reference.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="A checkpoint of the same model, in any format.")],
    layers: Annotated[
        str, typer.Option("--layers", metavar="REGEX", help="Only tensors with this in their name.")
    ] = "",
    threshold_db: Annotated[
        float | None, typer.Option("--threshold-db", metavar="X", help="Exit 1 if the SQNR of a tensor is below this.")
    ] = None,
    compare_bytes: Annotated[
        bool, typer.Option("--bytes", help="Compare stored bytes; name the first that differs in each tensor.")
    ] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw error against magnitude.")] = None,
    source: Source = "auto",
    hub: Hub = False,
) -> int:
    """Compare two checkpoints of one model: how far B's values are from A's, or which byte differs first.

    \b
    microfloat diff model/ model-nvfp4/ --threshold-db 18
    microfloat diff a.safetensors b.safetensors --bytes
    """
    if compare_bytes and (plot is not None or threshold_db is not None):
        option = "--plot" if plot is not None else "--threshold-db"
        raise invalid_value(option, "it together with --bytes", "one of them", "Compare values without --bytes.")
    if threshold_db is not None and not math.isfinite(threshold_db):
        raise invalid_value("--threshold-db", threshold_db, "a finite number")
    pattern = layers_pattern(layers)
    first = read(a, hub, source, "A", pattern)
    second = read(b, hub, "auto", "B", pattern)
    common = [name for name in first if name in second]
    if not common:
        fix = "Remove --layers, or name a part of a tensor's name." if layers else "Both must be of one model."
        raise invalid_value("B", b, "a checkpoint with tensors of the same names as A's", fix)
    only = {
        "only_a": [name for name in first if name not in second],
        "only_b": [name for name in second if name not in first],
    }
    output.put(a=str(a), b=str(b), family_a=first.detection.family, family_b=second.detection.family, **only)
    output.say(f"A {a}: {first.detection.family}")
    output.say(f"B {b}: {second.detection.family}")
    output.say()
    if compare_bytes:
        found = _bytes(output, first, second, common)
    else:
        found = _values(output, first, second, common, threshold_db, plot)
    for key, where in (("only_a", a), ("only_b", b)):
        if only[key]:
            names = ", ".join(only[key][:8]) + (", ..." if len(only[key]) > 8 else "")
            output.say(f"{len(only[key])} tensors stand in {where} alone: {names}", "yellow")
    return int(found or any(only.values()))


def _values(
    output: Output, first: "Checkpoint", second: "Checkpoint", names: list[str], threshold: float | None,
    plot: Path | None,
) -> bool:  # fmt: skip
    """The table of errors; True if a tensor is below the threshold or cannot be compared."""
    from microfloat.pictures.errors import ErrorCounts, error_against_magnitude

    counts = ErrorCounts()
    rows = [
        _compared(name, first[name], second[name], counts if plot is not None else None, threshold)
        for name in output.each("comparing", names)
    ]

    def badness(row: dict[str, Any]) -> float:
        value = row["sqnr_db"]
        return -math.inf if value is None or not math.isfinite(value) else value

    equal = [row for row in rows if row["sqnr_db"] == math.inf and not row["problem"]]
    others = sorted((row for row in rows if row["sqnr_db"] != math.inf or row["problem"]), key=badness)
    output.put(tensors=rows, threshold_db=threshold)
    if others:
        output.table(None, others[:_MOST_LINES], _COLUMNS, "Tensors of B against A, the worst first")
    if len(others) > _MOST_LINES:
        output.say(f"{len(others) - _MOST_LINES} more are better than these; --json lists all.")
    output.say(f"{len(equal)} of {len(rows)} tensors have equal values.")
    bad = [row for row in rows if row["problem"]]
    below = [row for row in bad if row["problem"].startswith("below")]
    if threshold is not None:
        output.say(f"{len(below) or 'None'} below {threshold:g} dB.", "bold red" if below else "")
    if len(bad) > len(below):
        output.say(f"{len(bad) - len(below)} cannot be compared.", "bold red")
    if plot is not None:
        from microfloat.pictures import save

        ranking = {row["name"]: row["sqnr_db"] for row in others if row["sqnr_db"] is not None}
        output.drew(save(error_against_magnitude(counts, ranking, threshold), plot))
    return bool(bad)


def _compared(
    name: str, a: "Record", b: "Record", counts: "ErrorCounts | None", threshold: float | None
) -> dict[str, Any]:  # fmt: skip
    """One row: sums over slabs of both tensors, over the elements that are finite in A."""
    from microfloat.checkpoint._casting import slabs, tile_rows

    row: dict[str, Any] = {"name": name, "formats": [_format(a), _format(b)]}
    row |= {"sqnr_db": None, "relative": None, "max_abs": None, "non_finite": 0, "problem": None}
    problem = next((record.problem for record in (a, b) if record.problem is not None), None)
    if a.logical_shape != b.logical_shape:
        problem = f"shape {list(b.logical_shape)} against {list(a.logical_shape)}"
    if problem is not None:
        return row | {"problem": str(problem)}
    signal = noise = largest = 0.0
    others = 0
    windows = slabs(a, tile_rows(b), ELEMENTS), slabs(b, tile_rows(a), ELEMENTS)
    for (_, part_a), (_, part_b) in zip(*windows, strict=True):
        x, y = part_a.dequantize(), part_b.dequantize()
        finite = np.isfinite(x)
        row["non_finite"] += int(x.size - finite.sum())
        others += int(np.count_nonzero(~finite & (x != y) & ~(np.isnan(x) & np.isnan(y))))
        error = np.subtract(y, x, dtype=np.float64, where=finite, out=np.zeros(x.shape))
        signal += float(np.square(x, dtype=np.float64, where=finite, out=np.zeros(x.shape)).sum())
        noise += float(np.square(error).sum())
        largest = float(np.maximum(largest, np.abs(error).max(initial=0.0)))  # NaN where there is one
        if counts is not None:
            counts.add(x[finite], error[finite])
    row |= {"max_abs": largest, "relative": math.sqrt(noise / signal) if signal else (math.inf if noise else 0.0)}
    row["sqnr_db"] = decibels(signal, noise if noise < math.inf else math.nan)
    if not math.isfinite(noise):
        row["problem"] = "B has NaN or infinity where A is finite"
    elif others:
        row["problem"] = f"B differs where A has NaN or infinity, in {others} of its elements"
    elif threshold is not None and not row["sqnr_db"] >= threshold:
        row["problem"] = f"below {threshold:g} dB"
    return row


def _format(record: "Record") -> str:
    return record.format.name if record.format else record.codes.dtype.name


def _bytes(output: Output, first: "Checkpoint", second: "Checkpoint", names: list[str]) -> bool:
    """The table of first differences; True if there is one."""
    each = output.each("comparing", names)
    rows = [row for name in each for row in _byte_rows(name, first[name], second[name])]
    output.put(tensors=rows)
    if rows:
        output.table(None, rows[:_MOST_LINES], _BYTE_COLUMNS, "The first byte that differs")
    if len(rows) > _MOST_LINES:
        output.say(f"{len(rows) - _MOST_LINES} more lines; --json lists all.")
    differing = len({row["name"] for row in rows})
    output.say(f"{len(names) - differing} of {len(names)} tensors are equal byte for byte.")
    return bool(rows)


def _byte_rows(name: str, a: "Record", b: "Record") -> Iterator[dict[str, Any]]:
    """A row for each part of a tensor (codes, scale, tensor scale) that has other bytes."""
    row: dict[str, Any] = {"name": name, "part": "codes", "problem": None}
    if _format(a) != _format(b) or a.logical_shape != b.logical_shape:
        stored = [f"{_format(record)} {list(record.logical_shape)}" for record in (a, b)]
        yield row | {"problem": f"stored as {stored[0]} and as {stored[1]}: no bytes in common"}
        return
    for part in ("codes", "scale", "tensor_scale"):
        ours, theirs = getattr(a, part), getattr(b, part)
        if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            if ours is not theirs:
                yield row | {"part": part, "problem": "it is stored in one of them alone, or in another shape"}
            continue
        difference = _first(a, part, ours, theirs)
        if difference:
            yield row | {"part": part, **difference}


def _first(record: "Record", part: str, ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """The first difference of two arrays of one dtype; packed codes are unpacked at that place."""
    from microfloat.checkpoint._arrays import pieces_of
    from microfloat.metrics import first_difference
    from microfloat.reference import unpack_fp4, unpack_fp6

    bits, differing, start, first = np.dtype(f"u{ours.dtype.itemsize}"), 0, 0, 0
    for x, y in zip(*(pieces_of(np.ascontiguousarray(array).view(bits)) for array in (ours, theirs)), strict=True):
        unequal = x != y
        first = first if differing else start + int(np.argmax(unequal))
        differing += int(np.count_nonzero(unequal))
        start += len(x)
    if not differing:
        return {}
    where = tuple(int(i) for i in np.unravel_index(first, ours.shape)[:-1])
    element = record.format.element if record.format is not None and part == "codes" else None
    lines = [np.atleast_1d(array[where]) for array in (ours, theirs)]
    if element is not None and element.bits < 8:
        unpack = unpack_fp4 if element.bits == 4 else unpack_fp6
        lines = [unpack(np.ascontiguousarray(line), record.logical_shape[-1]) for line in lines]
    found = first_difference(lines[0], lines[1], element)
    assert found is not None
    values = [found.value_a, found.value_b]
    if record.format is not None and part == "scale" and ours.dtype == np.uint8:
        values = record.format.scale.values(np.array([found.a, found.b], np.uint8)).tolist()
    digits = 3 if element is not None and element.bits == 4 else 2 * found.width + 2
    return {
        "index": [*where, *found.index], "code_a": f"{found.a:#0{digits}x}",
        "code_b": f"{found.b:#0{digits}x}", "value_a": values[0], "value_b": values[1], "differing": differing,
    }  # fmt: skip
