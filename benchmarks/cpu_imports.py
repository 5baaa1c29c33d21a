"""Cost of importing: time and peak memory that a package adds to what it stands on (c.import*), on Linux."""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from benchmarks import ROOT

# id -> the modules it stands on, what is imported then, target in ms and in MB over them.
CASES = {
    "c.import": (("numpy", "ml_dtypes"), "microfloat", 50, 10),
    "c.import.torch": (("torch", "numpy", "ml_dtypes"), "microfloat.torch", 150, None),
    "c.import.jax": (("jax", "numpy", "ml_dtypes"), "microfloat.jax", 100, None),
}
# VmHWM and not getrusage, whose maximum a process inherits from the one that started it.
PROGRAM = """
import json, sys, time, {below}
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
memory, begin = peak(), time.perf_counter()
import {module}
print(json.dumps([(time.perf_counter() - begin) * 1e3, peak() - memory]))
"""


@dataclass
class ImportRow:
    """Medians over fresh processes, after one that fills the caches."""

    id: str
    module: str
    over: str
    ms: float
    mb: float
    target_ms: float
    target_mb: float | None
    passed: bool


def import_rows(repetitions: int) -> list[ImportRow]:
    """A row per package whose foundation is installed."""
    rows = []
    for row_id, (below, module, target_ms, target_mb) in CASES.items():
        if any(importlib.util.find_spec(name) is None for name in below):
            print(f"{row_id}: {' or '.join(below)} is not installed")
            continue
        with tempfile.TemporaryDirectory() as bytecode:
            samples = [_once(below, module, bytecode) for _ in range(repetitions + 1)][1:]
        ms, mb = (statistics.median(column) for column in zip(*samples, strict=True))
        passed = ms <= target_ms and (target_mb is None or mb <= target_mb)
        rows.append(ImportRow(row_id, module, ", ".join(below), ms, mb, target_ms, target_mb, passed))
    return rows


def _once(below: tuple[str, ...], module: str, bytecode: str) -> tuple[float, float]:
    """Time and memory of one process, which keeps compiled modules in `bytecode`, as an installation keeps them."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    program = PROGRAM.format(below=", ".join(below), module=module)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{program}"],
        capture_output=True, text=True, check=True, env=environment | {"PYTHONPYCACHEPREFIX": bytecode},
    )  # fmt: skip
    ms, mb = json.loads(done.stdout)
    return ms, mb
