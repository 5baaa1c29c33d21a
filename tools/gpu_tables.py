"""Tables of the files that `python -m benchmarks` writes: the figures of docs/laboratory.

A row of such a file says what was measured, beside which target, by which command. A figure beyond its physical limit
is marked, and a target that was missed stays in its table. The shorter tables of other pages: `user_tables`.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from marked_block import ROOT, table

RESULTS = ROOT / "benchmarks" / "results"
Rows = list[dict[str, Any]]
LEGEND = {
    "missed": "**bold**: the target is missed.",
    "beyond": "†: above what the limit allows, so either the measurement or the limit's own rates are off.",
}


def rows_of(path: Path) -> Rows:
    """The rows of a result file."""
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def provenance(rows: Iterable[dict[str, Any]]) -> str:
    """Command, machine, date and versions of rows, one line per run."""
    lines = []
    for row in rows:
        software = ", ".join(
            f"{name} {row['versions'][name]}"
            for name in ("torch", "triton", "cuda", "torchao")
            if name in row["versions"]
        )
        text = f"`{row['command']}` on {row['device']}, {row['date']}; {software}."
        if text not in lines:
            lines.append(text)
    return "\n\n".join(lines)


def shape_text(row: dict[str, Any]) -> str:
    """M x K -> N, or the sizes with crosses between them."""
    shape = row.get("shape", ())
    return f"{shape[0]} x {shape[1]} -> {shape[2]}" if len(shape) == 3 else " x ".join(map(str, shape))


def figure(row: dict[str, Any], value: float | None, digits: int = 2) -> str:
    """A figure that is judged: bold where it misses its target, marked where it is beyond its limit."""
    if value is None:
        return ""
    text = f"{value:.{digits}f}" + ("†" if row.get("beyond_limit") else "")
    return f"**{text}**" if row.get("passed") is False else text


def number(value: float | None, digits: int = 2) -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value:.{digits}f}"


def finished(
    header: list[str], cells: list[list[str]], rows: Rows, text_columns: int = 1, judged: Rows | None = None
) -> str:
    """A table, what its marks mean, why rows are missing from it, and where it comes from."""
    parts = [table(header, cells, right=range(text_columns, len(header)))]
    judged = rows if judged is None else judged
    marks = [LEGEND["missed"]] if any(row.get("passed") is False for row in judged) else []
    marks += [LEGEND["beyond"]] if any(row.get("beyond_limit") for row in judged) else []
    parts += [" ".join(marks)] if marks else []
    skipped = dict.fromkeys(f"`{row['id']}` did not run: {row['skipped']}." for row in rows if row.get("skipped"))
    return "\n\n".join([*parts, *skipped, provenance(rows)])


def _remarks(row: dict[str, Any]) -> list[str]:
    mode = [] if row["mode"] == "eager" else [row["mode"]]
    return mode + ([row["variant"]] if row.get("variant") else [])


def linear_table(path: Path) -> str:
    """One Linear, forward and backward: a row per id, shape and mode."""
    rows = rows_of(path)
    cells = [
        [
            f"`{_full_id(row)}`", ", ".join([shape_text(row), *_remarks(row)]),
            number(row["base_ms"]), number(row["median_ms"]), figure(row, row["ratio"]),
            number(row.get("target")), number(row.get("stretch")), number(row.get("limit")),
            number(row.get("extra", {}).get("limit_of_run")), number(row.get("extra", {}).get("gemms_ms")),
        ]
        for row in rows if "median_ms" in row
    ]  # fmt: skip
    header = [
        "id", "shape", "bf16, ms", "ms", "ratio", "target", "stretch", "limit", "limit of this run", "GEMMs alone, ms",
    ]  # fmt: skip
    return finished(header, cells, rows, 2)


def _full_id(row: dict[str, Any]) -> str:
    """The id, and of a peer which of its recipes."""
    recipe = row.get("recipe")
    return f"{row['id']}.{recipe}" if recipe and row["id"].endswith("torchao") else row["id"]


def matmul_table(path: Path) -> str:
    """GEMMs: TFLOP/s and the ratio to bf16 by shape."""
    rows = [row for row in rows_of(path) if "median_ms" in row]
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    by_id: dict[str, dict[tuple, dict[str, Any]]] = {}
    for row in rows:
        by_id.setdefault(row["id"], {})[tuple(row["shape"])] = row
    first = next(iter(by_id.values()))
    cells = [["bf16", *(number(first[shape]["extra"]["bf16_tflops"], 0) for shape in shapes if shape in first)]]
    for name, found in by_id.items():
        entries = [found.get(shape) for shape in shapes]
        cells.append([f"`{name}`", *("" if e is None else f"{e['tflops']:.0f} ({e['ratio']:.2f})" for e in entries)])
    header = ["TFLOP/s (ratio to bf16), M x K x N", *(" x ".join(map(str, shape)) for shape in shapes)]
    return finished(header, cells, rows)


def quantize_table(path: Path) -> str:
    """Casts and fused producers: share of a device copy, the geometric mean of the shapes."""
    rows = rows_of(path)
    summary = json.loads(path.read_text(encoding="utf-8")).get("summary", {})
    cells = []
    for name, mean in summary.items():
        own = [row for row in rows if row["id"] == name and "median_ms" in row and not row.get("variant")]
        equal = [row["extra"]["equal_copy_ratio"] for row in own if "equal_copy_ratio" in row.get("extra", {})]
        apart = [row["ratio"] for row in rows if row["id"] == name and row.get("variant") == "unfused"]
        peer = [row["extra"]["torchao_ms"] / row["median_ms"] for row in own if "torchao_ms" in row.get("extra", {})]
        cells.append([
            f"`{name}`", figure(mean, mean["ratio"]), number(mean["worst"]), number(_mean(equal)),
            number(mean.get("target")), number(mean.get("stretch")), number(_mean(apart)), number(_mean(peer)),
        ])  # fmt: skip
    header = [
        "id", "share of a 2 GiB copy", "worst shape", "of a copy of equal bytes", "target", "stretch",
        "x unfused", "x torchao compiled",
    ]  # fmt: skip
    return finished(header, cells, rows, judged=list(summary.values()))


def _mean(values: list[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None


def block_table(path: Path) -> str:
    """The block: time and peak memory by recipe, variant and mode."""
    rows = rows_of(path)
    memory = {
        (row.get("recipe"), row.get("variant"), row["mode"]): row for row in rows if row["id"].startswith("b.mem.")
    }
    cells = []
    for row in rows:
        if "median_ms" not in row:
            continue
        used = memory.get((row.get("recipe"), row.get("variant"), row["mode"]))
        who = f"{row['recipe']} (torchao)" if row["backend"] == "torchao" else row["recipe"]
        gib = row.get("extra", {}).get("peak_gib")
        share = "" if gib is None else figure(used or {}, row["extra"]["peak_ratio"])
        who += f", {row['variant']}" if row.get("variant") else ""
        cells.append([
            f"`{row.get('label', row['id'])}`", who, row["mode"],
            number(row["base_ms"]), number(row["median_ms"]), figure(row, row["ratio"]), number(row.get("target")),
            number(row.get("limit")), number(row["tflops"], 0), number(gib), share,
        ])  # fmt: skip
    header = [
        "id", "recipe", "mode", "bf16, ms", "ms", "ratio", "target", "limit", "TFLOP/s", "peak GiB", "of bf16's",
    ]  # fmt: skip
    return finished(header, cells, rows, 3)


def decoder_table(path: Path) -> str:
    """A decoder layer and a model: milliseconds by recipe and mode, and memory above the weights."""
    rows = rows_of(path)
    cells = []
    for row in rows:
        extra = row.get("extra", {})
        who = f"{row['recipe'].removeprefix('torchao.')} (torchao)" if row["backend"] == "torchao" else row["recipe"]
        who += ", not fused" if row["id"].endswith(".apart") else ""
        cells.append([
            f"`{row['id']}`", who, row["mode"], number(row["base_ms"], 1), figure(row, row["median_ms"], 1),
            number(row.get("target"), 1), number(row["ratio"]), number(extra.get("peak_gib_above_weights")),
            number(extra.get("bf16_peak_gib_above_weights")),
        ])  # fmt: skip
    header = ["id", "recipe", "mode", "bf16, ms", "ms", "target, at most", "ratio", "GiB above weights", "of bf16"]
    return finished(header, cells, rows, 3)


def host_table(path: Path) -> str:
    """Host time, launches, recompilations of small layers."""
    rows = rows_of(path)
    cells = []
    for row in rows:
        if "value" not in row:
            continue
        what = ".".join(part for part in (row["id"], row.get("recipe"), row.get("variant")) if part)
        value = f"{row['value']:.0f} {row['unit']}" if row["unit"] != "us" else f"{row['value']:.1f} us"
        ratio = figure(row, row["ratio"], 1) if "ratio" in row else ""
        value = value if "ratio" in row or row.get("passed") is not False else f"**{value}**"
        target = "" if "target" not in row else f"{row['target']:g}"
        cells.append([f"`{what}`", shape_text(row), value, ratio, target])
    return finished(["id", "shape", "median", "x nn.Linear", "target, at most"], cells, rows, 2)


def train_table(path: Path) -> str:
    """The training example: tokens per second by recipe and mode."""
    rows = rows_of(path)
    cells = [
        [
            f"`{row['recipe']}`", row["mode"], number(row["extra"]["bf16_tokens_per_s"], 0), number(row["value"], 0),
            number(row["ratio"]),
        ]
        for row in rows if "median_ms" in row
    ]  # fmt: skip
    return finished(["recipe", "mode", "bf16, tokens/s", "tokens/s", "ratio"], cells, rows, 2)


def _sizes(rows: Rows) -> str:
    """N x K of the weights."""
    return "; ".join(dict.fromkeys(f"{row['shape'][2]} x {row['shape'][1]}" for row in rows))


def decode_table(path: Path) -> str:
    """Few rows of x by weights stored as codes: the ratio to bf16 by rows of x, format and shape, experts below."""
    every = [row for row in rows_of(path) if "median_ms" in row]
    prompts, kept = ([row for row in every if row["id"].startswith(f"d.{kind}.")] for kind in ("prompt", "kept"))
    rows = [row for row in every if row not in prompts and row not in kept]
    formats = list(dict.fromkeys(row["recipe"] for row in rows))
    parts = []
    for kind in ("", "experts8", "experts64"):
        found: dict[int, dict[str, list[str]]] = {}
        own = [row for row in rows if (row["id"].split(".")[1] == kind if kind else "experts" not in row["id"])]
        for row in own:
            words = row["id"].split(".")[-1]
            m = int(row["shape"][0]) if words == "prefill" else int(words[1:])
            found.setdefault(m, {}).setdefault(row["recipe"], []).append(figure(row, row["ratio"]))
        if not own:
            continue
        title = "rows of x" if not kind else f"tokens, {own[0]['extra']['experts']} experts"
        cells = [[str(m), *(", ".join(cell.get(fmt, [])) for fmt in formats)] for m, cell in sorted(found.items())]
        each = f", {own[0]['extra']['experts_of_a_token']} for each token" if kind else ""
        parts.append(f"{table([title, *formats], cells, right=())}\n\nWeights of {_sizes(own)}{each}.")
    if kept:
        by_rows: dict[int, dict[str, list[str]]] = {}
        for row in kept:
            told = f"{figure(row, row['ratio'])} ({number(row['extra']['ratio_by_codes'])})"
            by_rows.setdefault(row["shape"][0], {}).setdefault(row["recipe"], []).append(told)
        names, sizes = list(dict.fromkeys(row["recipe"] for row in kept)), _sizes(kept)
        cells = [[str(m), *(", ".join(cell.get(name, [])) for name in names)] for m, cell in sorted(by_rows.items())]
        title = ["rows of x, weight dequantized once (by codes)", *names]
        parts.append(f"{table(title, cells, right=())}\n\nWeights of {sizes}.")
    if prompts:
        found_of: dict[str, list[str]] = {}
        for row in prompts:
            read = row["extra"]["read_as"]
            found_of.setdefault(f"{row['extra']['weight']}, read as {read}", []).append(figure(row, row["ratio"]))
        sizes = _sizes(prompts)
        title = [f"prompt of {prompts[0]['shape'][0]} rows, quantized too", "times as fast"]
        cells = [[name, ", ".join(figures)] for name, figures in found_of.items()]
        parts.append(f"{table(title, cells, right=())}\n\nWeights of {sizes}.")
    return "\n\n".join([*parts, LEGEND["missed"], provenance(every)])


def distributed_table(path: Path) -> str:
    """A step of a stack of layers on two GPUs: milliseconds, bytes gathered and memory, beside bf16's."""
    rows = [row for row in rows_of(path) if "median_ms" in row]
    plain = next(row for row in rows if row["id"].endswith(".bf16"))
    cells = []
    for row in rows:
        gathered, peak = (row["extra"][name] / plain["extra"][name] for name in ("gathered_bytes", "peak_bytes"))
        low, high = number(row["p10_ms"], 1), number(row["p90_ms"], 1)
        cells.append([
            f"`{row['id']}`", number(row["median_ms"], 1), f"{low} to {high}", figure(row, row.get("ratio")),
            number(gathered), number(peak),
        ])  # fmt: skip
    header = ["id", "ms", "10 to 90 % of steps", "ratio to bf16", "bytes gathered, of bf16", "peak memory, of bf16"]
    return finished(header, cells, rows)


def checks_table(path: Path) -> str:
    """The steps of tools/check_gpus.py: how each ended."""
    found = json.loads(path.read_text(encoding="utf-8"))
    cells = [
        [name, one["outcome"], "" if "seconds" not in one else f"{one['seconds']:.0f}", one.get("date", "")]
        for name, one in found["steps"].items()
    ]
    where = " ".join(line.strip() for line in found["machine"] if line.strip())
    return f"{table(['step', 'outcome', 'seconds', 'date'], cells, right=(2,))}\n\n`tools/check_gpus.py`: {where}."


# The first word of a kernel's name -> its kind.
KINDS = {"amax": "amaxes", **dict.fromkeys(("cast", "quantize", "fold", "values", "transform"), "casts")}


def profile_table(path: Path) -> str:
    """GPU time of one step by kind of kernel: GEMMs, casts, amaxes, the rest."""
    rows = [row for row in rows_of(path) if "value" in row]
    cells = []
    for row in rows:
        groups: dict[str, list[float]] = {"gemms": [], "casts": [], "amaxes": [], "rest": []}
        for kernel in row["extra"]["kernels"]:
            name = kernel["kernel"]
            kind = KINDS.get(name.split("_")[0], "gemms" if name.startswith("nvjet") or "gemm" in name else "rest")
            groups[kind].append(kernel["us"] / 1e3)
        shown = [" + ".join(f"{ms:.2f}" for ms in groups[kind]) for kind in ("gemms", "casts", "amaxes")]
        cells.append([f"`{row['recipe']}`", *shown, number(sum(groups["rest"])), number(row["value"] / 1e3)])
    header = ["recipe", "fprop + dgrad + wgrad, ms", "casts", "amaxes", "rest", "sum"]
    return finished(header, cells, rows)


# Result file (without .json) -> its table.
TABLES: dict[str, Callable[[Path], str]] = {
    "quantize": quantize_table, "matmul": matmul_table, "linear": linear_table, "grouped": linear_table,
    "profile": profile_table, "decoder": decoder_table, "block": block_table, "host": host_table,
    "train": train_table, "decode": decode_table, "decode_h200": decode_table, "fsdp": distributed_table,
    "fsdp_h100": distributed_table, "tp": distributed_table, "tp_h100": distributed_table, "nccl": checks_table,
}  # fmt: skip
PAGES = {
    **dict.fromkeys(("decode", "decode_h200"), "laboratory/inference.md"),
    **dict.fromkeys(("fsdp", "fsdp_h100", "tp", "tp_h100", "nccl"), "laboratory/distributed.md"),
}  # others: laboratory/performance.md


def generated(name: str) -> str:
    """The table of a result file, or how to make the file."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return f"Not measured yet: `python -m benchmarks {name} --json {path.relative_to(ROOT).as_posix()}`."
    return TABLES[name](path)
