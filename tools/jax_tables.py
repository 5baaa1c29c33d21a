"""The table of JAX figures in docs/laboratory/jax.md, from benchmarks/results/jax_linear.json.

    python tools/jax_tables.py           # print it
    python tools/jax_tables.py --write   # rewrite the block in the page

Nothing is measured here: `python benchmarks/jax_linear.py --json benchmarks/results/jax_linear.json` is what measures.
"""

import json
import sys
from pathlib import Path
from typing import Any

from marked_block import ROOT, command, table

JAX_LINEAR = ROOT / "benchmarks" / "results" / "jax_linear.json"
_WAYS = {
    "__cublas$lt$matmul$f8": "cuBLASLt FP8", "__cublas$lt$matmul": "cuBLASLt", "__cublas$gemm": "cuBLAS",
    "block_gemm_of_pointers": "microfloat FP8",
}  # fmt: skip


def jax_linear_table(path: Path = JAX_LINEAR) -> str:
    """A row per id: times, ratio, target, the GEMMs that XLA chose, planned temporary memory against bf16's."""
    if not path.exists():
        return f"No result of benchmarks/jax_linear.py is committed yet (`{path.relative_to(ROOT).as_posix()}`)."
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = [_row(entry) for entry in data["rows"]]
    header = ["id", "shape", "rival, ms", "ms", "ratio", "target", "GEMMs", "temporaries / bf16's"]
    text = "Ratio: the rival's time over ours; the rival is `lax.dot_general` in bfloat16"
    if any(entry["id"].endswith(".flax") for entry in data["rows"]):
        text += ", and for `j.l.delayed.flax` Flax's own `Fp8DirectDotGeneralOp`"
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    where = f"`{data['command']}` on {data['machine']}, {data['date']}; {versions}, Python {data['python']}."
    return f"{table(header, rows, right=(2, 3, 4, 5, 7))}\n\n{text}.\n\n{where}"


def _row(entry: dict[str, Any]) -> list[str]:
    shape = " x ".join(map(str, entry["shape"]))
    if "ratio" not in entry:
        return [f"`{entry['id']}`", shape, "", "", "", "", entry.get("reason", "not timed"), ""]
    rival = entry.get("flax_ms", entry.get("bf16_ms"))
    target = f"{entry['target']:.2f}" if entry["target"] else ""
    memory = f"{entry['temporary_ratio']:.2f}" if "temporary_ratio" in entry else ""
    times = [f"{rival:.2f}", f"{entry['median_ms']:.2f}", f"{entry['ratio']:.2f}"]
    return [f"`{entry['id']}`", shape, *times, target, gemms(entry.get("hlo")), memory]


def gemms(hlo: dict[str, Any] | None) -> str:
    """The GEMM that serves each role; one name where all are alike."""
    if hlo is None:
        return ""
    names = {}
    for role, found in hlo["gemms"].items():
        kinds = {_WAYS.get(one["kind"], one["kind"].strip("_")) for one in found["seen"]}
        names[role] = " + ".join(sorted(kinds)) or "none seen"
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{role} {name}" for role, name in names.items())


BLOCKS = [(ROOT / "docs" / "laboratory" / "jax.md", "measured: jax_linear", jax_linear_table)]

if __name__ == "__main__":
    sys.exit(command("The table of JAX figures.", BLOCKS))
