"""The machine: versions of packages, GPUs and their clocks. Frameworks are not imported."""

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from microfloat._version import __version__
from microfloat.chips import Chip
from microfloat.reference import casters

# Of a GEMM whose operands are the same bytes: two roundings to bfloat16 (1.7e-3 rms each) and the FP8 accumulator of
# Hopper without promotion (1.3e-3); docs/numerics.md 8.3.
LARGEST_DIFFERENCE = 6e-3
# Package -> the extra of microfloat that brings it; "" for packages that are always there.
PACKAGES = {
    "numpy": "", "ml_dtypes": "", "torch": "torch", "triton": "triton", "jax": "jax", "flax": "jax",
    "typer": "cli", "rich": "cli", "matplotlib": "plot",
}  # fmt: skip


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of Python, microfloat and the named packages; None for packages that are not installed."""
    import importlib.metadata  # takes a while, which `microfloat --help` need not

    found: dict[str, str | None] = {"python": platform.python_version(), "microfloat": __version__}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def gpus() -> list[dict[str, Any]]:
    """NVIDIA GPUs as the driver lists them: index, name, architecture, generation, memory, driver."""
    rows = []
    for index, line in enumerate(smi("name,compute_cap,memory.total,driver_version")):
        name, capability, memory, driver = (word.strip() for word in line.split(","))
        major, _, minor = capability.partition(".")
        chip = Chip((int(major), int(minor or 0))) if major.isdigit() else None
        rows.append({
            "gpu": index, "name": name, "architecture": chip and chip.architecture, "generation": chip and chip.name,
            "memory": memory, "driver": driver,
        })  # fmt: skip
    return rows


def processor() -> str:
    """The CPU's name, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")  # on Linux, where platform.processor() is often empty
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]


def load_casts() -> str:
    """Import the front end with the fastest casts of arrays; its name, "numpy" where there is none."""
    for name in ("torch", "jax"):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(f"microfloat.{name}")
            break
    return casters.loaded()


def threads() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def smi(query: str) -> list[str]:
    """Lines of nvidia-smi, one for each GPU; none where it is not there or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def clocks() -> dict[str, str] | None:
    """SM and memory clock, power draw and temperature of the first GPU now."""
    for line in smi("clocks.sm,clocks.mem,power.draw,temperature.gpu"):
        return dict(zip(("sm", "memory", "power", "celsius"), line.split(", "), strict=False))
    return None
