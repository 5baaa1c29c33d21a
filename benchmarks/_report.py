"""Rows: printed as they come, judged against their targets, written as JSON.

The JSON is ``{"command", "rows": [...], "summary": {...}, ...}`` with one object per row. A row carries its own
provenance (device, driver, clocks, versions, date, command), so rows of several runs can stand in one file.
"""

import argparse
import dataclasses
import datetime
import json
import platform
import statistics
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks._targets import Target, target_of
from microfloat.cli import machine
from microfloat.torch.timing import Times

__all__ = ["Report", "Row", "merge", "printable_command", "wanted"]


@dataclass
class Row:
    """One measurement. `label`: the key of its target, the id unless said; `value`, `unit`: what is no time.

    `ratio` is taken of `ratio_of`, whose own time is `base_ms`. `bytes_equal` or `sqnr_db` say how the result compared
    with the reference before anything was timed.
    """

    id: str
    shape: tuple[int, ...] = ()
    recipe: str | None = None
    variant: str | None = None
    mode: str = "eager"
    backend: str = "native"
    dtype: str = "bfloat16"
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    gbs: float | None = None
    tflops: float | None = None
    value: float | None = None
    unit: str | None = None
    base_ms: float | None = None
    ratio: float | None = None
    ratio_of: str | None = None
    label: str = ""
    target: float | None = None
    stretch: float | None = None
    limit: float | None = None
    passed: bool | None = None
    beyond_limit: bool | None = None
    bytes_equal: bool | None = None
    sqnr_db: float | None = None
    skipped: str | None = None
    clocks: dict[str, str] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def timed(self, times: Times, base: Times | None = None) -> "Row":
        """Fill in the times, and the ratio to a base of the same turns."""
        self.median_ms, self.p10_ms, self.p90_ms = times.median, times.p10, times.p90
        if base is not None:
            self.base_ms, self.ratio = base.median, base.median / times.median
        return self

    def judge(self, counts: bool = True) -> "Row":
        """Compare with the target: the ratio, or where there is none the value. Not where the figure counts nothing."""
        found = target_of(self.label or self.id)
        figure = self.ratio if self.ratio is not None else self.value
        if found is not None and found.in_ms:
            figure = self.median_ms
        if found is not None:
            self.target, self.stretch, self.limit = found.target, found.stretch, found.limit
            self.ratio_of = self.ratio_of or found.of or None
            if figure is not None and counts:
                self.passed, self.beyond_limit = _judge(figure, found)
        return self


def _judge(figure: float, target: Target) -> tuple[bool, bool]:
    if target.at_most:
        return figure <= target.target, target.limit is not None and figure < target.limit
    return figure >= target.target, target.limit is not None and figure > target.limit


def wanted(only: Iterable[str], *names: str) -> bool:
    """True if `--only` asks for a row by any of these names, or by the beginning of one before a dot."""
    chosen = list(only)
    return not chosen or any(name == one or name.startswith(one + ".") for name in names for one in chosen)


class Report:
    """The rows of one run of a command."""

    def __init__(self, options: argparse.Namespace, arguments: list[str]) -> None:
        self.options = options
        self.rows: list[Row] = []
        self.extra: dict[str, Any] = {}
        self.earlier: dict[str, Any] | None = None  # what the file held before this run
        self.provenance = {
            "device": device_name(options.device), "driver": next(iter(machine.smi("driver_version")), None),
            "versions": versions(), "date": datetime.date.today().isoformat(),
            "command": printable_command(arguments),
        }  # fmt: skip
        print(f"{self.provenance['command']}: {self.provenance['device']}, {self.provenance['versions']}", flush=True)
        if options.quick:
            print("--quick: sizes are tiny; times are no measurements and are not judged")

    def wants(self, *names: str) -> bool:
        """True if `--only` leaves in a row of one of these names."""
        return wanted(self.options.only, *names)

    def wants_some(self, beginning: str) -> bool:
        """True if `--only` leaves in rows whose names begin so, before a dot."""
        return self.wants(beginning) or any(one.startswith(f"{beginning}.") for one in self.options.only)

    def add(self, row: Row) -> Row:
        """Judge, print and keep a row."""
        row.judge(counts=not self.options.quick)
        row.clocks = None if row.skipped or self.options.quick else machine.clocks()
        self.rows.append(row)
        print(line(row), flush=True)
        self.save()
        return row

    def skip(self, row_id: str, why: str, **fields: Any) -> None:
        """A row that cannot run here, and why."""
        self.add(Row(row_id, skipped=why, **fields))

    def attempt(self, row_id: str, measure: Callable[[], Any], **fields: Any) -> Any:
        """``measure()``; a failure becomes a skipped row, so that it does not hide the others."""
        try:
            return measure()
        except Exception as error:
            traceback.print_exc(limit=-4)
            text = " ".join(str(error).split())[:300]
            self.skip(row_id, f"failed: {type(error).__name__}: {text}", **fields)
            return None

    def summarize(self, row_id: str) -> None:
        """The geometric mean of a row's shapes, which is what its target is on; no shape below 0.9 of the target."""
        ratios = [row.ratio for row in self.rows if row.id == row_id and row.ratio and not row.variant]
        if not ratios or self.options.quick:
            return
        mean, found = statistics.geometric_mean(ratios), target_of(row_id)
        passed = found is not None and mean >= found.target and min(ratios) >= 0.9 * found.target
        beyond = found is not None and found.limit is not None and mean > found.limit
        goal = "" if found is None else f", target {found.target:.2f} {'ok' if passed else 'MISSED'}"
        print(f"{row_id:24} geometric mean {mean:5.3f}, worst {min(ratios):5.3f}{goal}", flush=True)
        self.extra.setdefault("summary", {})[row_id] = {
            "ratio": mean, "worst": min(ratios), "target": found and found.target, "stretch": found and found.stretch,
            "limit": found and found.limit, "passed": passed, "beyond_limit": beyond,
        }  # fmt: skip

    def save(self) -> None:
        """Write the JSON if asked to: after every row, so that a run cut short keeps those it has."""
        if not self.options.json:
            return
        path = Path(self.options.json)
        rows = [{**as_data(row), **self.provenance} for row in self.rows]
        document = {"command": self.provenance["command"], **self.extra, "rows": rows}
        if self.earlier is None:
            self.earlier = json.loads(path.read_text()) if path.exists() else {}
        if self.earlier:
            document = merged(self.earlier, document)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        unfinished.replace(path)

    def finish(self) -> int:
        """Write the JSON if asked to; the exit status is 1 where a result differed from the reference."""
        missed = list(dict.fromkeys(row.label or row.id for row in self.rows if row.passed is False))
        skipped = [row for row in self.rows if row.skipped]
        print(f"{len(self.rows)} rows, {len(skipped)} did not run; targets missed: {', '.join(missed) or 'none'}")
        self.save()
        return int(any(row.skipped and "differs" in row.skipped for row in self.rows))


def as_data(row: Row) -> dict[str, Any]:
    """A row as JSON: fields without a value are left out, times and ratios rounded to what they mean."""
    data = {}
    for name, value in dataclasses.asdict(row).items():
        if value is None or value in ("", (), {}):
            continue
        data[name] = round(value, 5) if isinstance(value, float) else value
    return data


def line(row: Row) -> str:
    """A row as text."""
    recipe = row.recipe if row.recipe and not row.id.endswith(f".{row.recipe}") else None
    name = ".".join(part for part in (row.id, recipe, row.variant) if part)
    shape = "x".join(map(str, row.shape))
    start = f"{name:30} {row.mode:8} {shape:18}"
    if row.skipped:
        return f"{start} not run: {row.skipped}"
    parts = []
    if row.median_ms is not None:
        parts.append(f"{row.median_ms:9.4f} ms (p10 {row.p10_ms:.4f}, p90 {row.p90_ms:.4f})")
    if row.gbs is not None:
        parts.append(f"{row.gbs:.0f} GB/s")
    if row.tflops is not None:
        parts.append(f"{row.tflops:.0f} TFLOP/s")
    if row.value is not None:
        parts.append(f"{row.value:.6g} {row.unit or ''}".strip())
    if row.ratio is not None:
        parts.append(f"{row.ratio:.3f} of {row.ratio_of}" if row.ratio_of else f"{row.ratio:.3f}")
    if row.target is not None:
        verdict = "" if row.passed is None else " ok" if row.passed else " MISSED"
        parts.append(f"target {row.target:g}{verdict}")
    if row.beyond_limit:
        parts.append(f"BEYOND THE LIMIT {row.limit:g}: distrust this figure")
    return f"{start} {'  '.join(parts)}"


# ------------------------------------------------------------------------------------------------------------ files


def key_of(row: dict[str, Any]) -> tuple:
    """Key that two measurements of one thing share."""
    return (*(row.get(name) for name in ("id", "recipe", "variant", "mode", "backend")), tuple(row.get("shape", ())))


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Rows of `new` in the place of those of `old` that measure the same; the others stay. A skip replaces nothing."""
    fresh = {key_of(row): row for row in new["rows"]}
    known = {key_of(row) for row in old["rows"] if not row.get("skipped")}
    fresh = {key: row for key, row in fresh.items() if not (row.get("skipped") and key in known)}
    rows = [fresh.pop(key_of(row), row) for row in old["rows"]]
    summary = {**old.get("summary", {}), **new.get("summary", {})}
    both = {**old, **new, "command": old["command"], "rows": [*rows, *fresh.values()]}
    return {**both, "summary": summary} if summary else both


def merge(source: Path, target: Path) -> None:
    """Rows of the file `source` into the file `target`."""
    new = json.loads(source.read_text())
    document = merged(json.loads(target.read_text()), new) if target.exists() else new
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1) + "\n")


def printable_command(arguments: list[str]) -> str:
    """The command line without paths of a machine: a JSON path is replaced by its name under benchmarks/results."""
    shown, after_json = [], False
    for argument in arguments:
        shown.append(f"benchmarks/results/{Path(argument).name}" if after_json else argument)
        after_json = argument == "--json"
    return " ".join(["python -m benchmarks", *shown])


# ---------------------------------------------------------------------------------------------------------- machine


def device_name(device: str) -> str:
    """The GPU's name, or the CPU's architecture."""
    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()


def versions() -> dict[str, str]:
    """Of what takes part."""
    found = {**machine.versions("triton", "torchao"), "torch": torch.__version__, "cuda": torch.version.cuda}
    return {name: version for name, version in found.items() if version is not None}
