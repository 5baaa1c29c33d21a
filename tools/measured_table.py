"""The tables of figures in README.md and docs/, from the JSON files under benchmarks/results.

    python tools/measured_table.py                                 # print them
    python tools/measured_table.py --write                         # rewrite the blocks in the pages
    python tools/measured_table.py --record runs/tiny/results.json # keep the demo's result, then --write

Nothing is measured here. A block whose file does not exist says so; an unfinished run is refused.
"""

import datetime
import functools
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu_tables
import peers_table
from marked_block import ROOT, command, table

RESULTS = ROOT / "benchmarks" / "results"
DEMO = RESULTS / "demo.json"
CPU_QUANTIZE = RESULTS / "cpu_quantize.json"


def demo_table(path: Path = DEMO) -> str:
    """The demo's losses, a row per recipe."""
    if not path.exists():
        return _missing(path, "make demo")
    data = json.loads(path.read_text(encoding="utf-8"))
    if not data.get("complete", True):
        raise ValueError(f"{path.name} is the result of a run that was interrupted; finish it with --resume first")
    rows = []
    for name, result in data["recipes"].items():
        gap = "" if name == "bf16" else f"{result['gap_to_bf16']:+.4f}"
        flushed = [f"{result['underflow'][operand]:.2%}" for operand in ("x", "w", "dy")]
        rows.append([f"`{name}`", f"{result['final_train']:.4f}", f"{result['final_heldout']:.4f}", gap, *flushed])
    header = ["recipe", "training loss", "held-out loss", "gap to bf16", "x", "w", "dy"]
    config, corpus = data["config"], data["corpus"]
    text = (
        "Losses in nats per byte. x, w, dy: share of the operand's non-zero values that become zero. "
        f"{config['steps']} steps of {config['batch']} x {config['context']} bytes, {config['layers']} layers of width "
        f"{config['dim']}, seed {config['seed']}; text: {corpus['train_bytes'] / 1e6:.1f} MB of Python's standard "
        "library. One seed and a short run: a gap of this size says that the recipe trains, not which one is better."
    )
    return f"{table(header, rows, right=range(1, len(header)))}\n\n{text}\n\n{provenance(data)}"


def cpu_quantize_table(path: Path = CPU_QUANTIZE) -> str:
    """Speed of casts on a CPU, a row per operation of the file, beside torchao where it has the same one."""
    if not path.exists():
        return _missing(path, "the CPU benchmark")
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for entry in data["rows"]:
        peer = f"{entry['peer']} {entry['peer_melem_per_s']:.0f}" if entry["peer_melem_per_s"] else ""
        ratio = f"{entry['ratio']:.1f}" if entry["ratio"] else ""
        target = f"{entry['target']:.1f}" if entry["target"] else ""
        rows.append(
            [entry["id"], f"{entry['operation']}, {entry['cast']}", f"{entry['melem_per_s']:.0f}", peer, ratio, target]
        )
    header = ["id", "operation", "million elements / s", "beside", "ratio", "target"]
    shape = " x ".join(str(size) for size in data["shape"])
    text = f"{shape} {data['dtype']}, {data['machine']['threads']} threads; both libraries in one process, in turn."
    if "pause_s" in data:
        text += (
            f" Before every timed call, on both sides, is a pause of {data['pause_s'] * 1e3:.0f} ms, in which OpenMP's "
            "threads stop spinning."
        )
    return f"{table(header, rows, right=range(2, len(header)))}\n\n{text}\n\n{provenance(data)}"


def qat_table(path: Path = RESULTS / "qat.json") -> str:
    """Held-out losses of models as they are served: quantized afterwards, and trained under the config."""
    if not path.exists():
        return _missing(path, "`python -m benchmarks qat`")
    data = json.loads(path.read_text(encoding="utf-8"))
    seeds, config = data["seeds"], data["config"]

    def losses(name: str, row: str | None = None) -> str:
        found = [one[name] if row is None else one[name][row] for one in seeds]
        return f"{sum(found) / len(found):.4f} ({', '.join(f'{loss:.4f}' for loss in found)})"

    columns = "nearest", "longer", "qat", "distilled"
    labels = [label for label, row in seeds[0].items() if isinstance(row, dict)]
    rows = [["not quantized", losses("teacher"), losses("teacher_longer"), "", ""]]
    rows += [[f"`{label}`", *(losses(label, name) for name in columns)] for label in labels]
    header = ["served", "teacher", "trained further, then quantized", "trained under the config", "distilled under it"]
    text = (
        f"Held-out loss in nats per byte, mean and each seed. {config['steps']} steps of the teacher, then "
        f"{config['further']} further steps of {config['batch']} x {config['context']} bytes of Python's standard "
        f"library, {config['num_hidden_layers']} layers of width {config['hidden_size']}, learning rate "
        f"{config['rate']:g}."
    )
    return f"{table(header, rows, right=range(1, len(header)))}\n\n{text}\n\n{provenance(data)}"


def gptq_table(path: Path = RESULTS / "gptq.json") -> str:
    """Errors of layers, held-out perplexity and time of every format and method."""
    if not path.exists():
        return _missing(path, "`python -m benchmarks gptq`")
    data = json.loads(path.read_text(encoding="utf-8"))
    config, plain = data["config"], data["plain"]
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in data["rows"][0]["errors"]))

    def percent(errors: Mapping[str, float], kind: str) -> str:
        found = [error for name, error in errors.items() if name.endswith(kind)]
        return f"{100 * sum(found) / len(found):.2g}"

    rows = [["not quantized", "", *[""] * len(kinds), "", f"{math.exp(plain):.4f}", "", ""]]
    for row in data["rows"]:
        rows.append([
            f"`{row['format']}`", row["method"], percent(row["errors"], ""),
            *(percent(row["errors"], kind) for kind in kinds), f"{math.exp(row['loss']):.4f}",
            f"{row['loss'] - plain:+.5f}", f"{row['seconds']:.2f}",
        ])  # fmt: skip
    where = "" if "gpu" in data["machine"] else " on one core"
    header = ["format", "method", "all", *(f"`{kind}`" for kind in kinds), "perplexity", "loss", "seconds"]
    text = (
        f"Columns of layers: error of their outputs, ``|(W - Q) x|^2 / |W x|^2`` in percent, a mean over layers, on "
        f"held-out text. Perplexity a byte, the loss above that of the plain model in nats per byte, and the time of "
        f"calibration and `quantize_`{where}. A Llama of {config['layers']} layers of width {config['width']} "
        f"({config['parameters'] / 1e6:.1f} million parameters), trained for {config['steps']} steps of "
        f"{config['batch']} x {config['context']} bytes of Python's standard library; calibrated on "
        f"{config['calibration_tokens']:,} bytes, measured on {config['held_out_tokens']:,}."
    )
    return f"{table(header, rows, right=range(2, len(header)))}\n\n{text}\n\n{provenance(data)}"


def provenance(data: dict[str, Any]) -> str:
    """Command, machine, date and versions of a result."""
    machine, versions = data["machine"], data["versions"]
    where = ", ".join(
        str(part) for part in (machine.get("gpu"), machine["processor"], f"{machine['cores']} cores") if part
    )
    software = ", ".join(f"{name} {versions[name]}" for name in ("microfloat", "torch", "python") if name in versions)
    return f"`{data['command']}` on {where}, {data['date']}; {software}."


def record(source: Path, target: Path = DEMO) -> None:
    """Copy a finished result of the demo, with the command and the date of the run."""
    data = json.loads(source.read_text(encoding="utf-8"))
    if not data["complete"]:
        raise ValueError(f"{source} is the result of a run that was interrupted; finish it with --resume first")
    date = datetime.date.fromtimestamp(source.stat().st_mtime).isoformat()
    names = ",".join(name for name in data["recipes"] if name != "bf16")
    preset, steps = data["config"]["preset"], data["config"]["steps"]
    given = f"python examples/train_gpt.py --preset {preset} --steps {steps} --recipe {names}"
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": given, "date": date, **data}, indent=1, allow_nan=False)
    target.write_text(text + "\n", encoding="utf-8")


def _missing(path: Path, what: str) -> str:
    return f"No result of {what} is committed yet (`{path.relative_to(ROOT).as_posix()}`)."


BLOCKS = [
    (ROOT / "docs" / "performance.md", "measured: peers", peers_table.peers_table),
    (ROOT / "README.md", "measured: demo", demo_table),
    (ROOT / "docs" / "qat.md", "measured: qat", qat_table),
    (ROOT / "docs" / "inference.md", "measured: gptq", gptq_table),
    (ROOT / "docs" / "laboratory" / "recipes.md", "measured: cpu_quantize", cpu_quantize_table),
    *(
        (
            ROOT / "docs" / gpu_tables.PAGES.get(name, "laboratory/performance.md"),
            f"measured: {name}",
            functools.partial(gpu_tables.generated, name),
        )
        for name in gpu_tables.TABLES
    ),
]

if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"] and len(sys.argv) == 3:
        record(Path(sys.argv[2]))
    else:
        sys.exit(command("Tables of measured figures.", BLOCKS))
