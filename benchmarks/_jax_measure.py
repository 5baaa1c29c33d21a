"""Shared by the JAX benchmarks: timing in turns, XLA's compiled form of a function, the machine and the versions."""

import datetime
import gzip
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Program(NamedTuple):
    """A compiled function: what to call, and what is known about it before it runs."""

    run: Callable[..., Any]
    text: str
    compile_s: float
    temporary_bytes: int
    argument_bytes: int
    output_bytes: int


def compiled(function: Callable[..., Any], *arguments: Any) -> Program:
    """`function` compiled for these arguments; autotuning of its GEMMs is part of `compile_s`."""
    begin = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - begin
    memory = program.memory_analysis()
    sizes = [
        int(getattr(memory, f"{name}_size_in_bytes", 0) or 0) if memory is not None else 0
        for name in ("temp", "argument", "output")
    ]
    return Program(program, program.as_text() or "", seconds, *sizes)


class Instruction(NamedTuple):
    """One line of HLO text; `operands` are names, `shapes` those of its results."""

    computation: str
    name: str
    shapes: tuple[str, ...]
    opcode: str
    operands: tuple[str, ...]
    line: str

    def attribute(self, pattern: str) -> str:
        """The first group of `pattern` in the line, or nothing."""
        match = re.search(pattern, self.line)
        return match.group(1) if match else ""


_SHAPE = re.compile(r"\b((?:f|bf|s|u|pred|c)[0-9a-z]*)\[([0-9,]*)\]")


def instructions(text: str) -> Iterator[Instruction]:
    """Every instruction of an HLO module's text. Newer versions print operands without their shapes."""
    computation = ""
    for raw in text.splitlines():
        line = raw.strip()
        if line.endswith("{") and not raw.startswith(" "):
            computation = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0].split("(")[0]
            continue
        head, equals, body = line.partition(" = ")
        match = re.match(r"(\(.*?\)|\S+)\s+([a-z][\w\-]*)\((.*)", body) if equals else None
        if match is None:
            continue
        result, opcode, rest = match.groups()
        shapes = tuple(f"{dtype}[{sizes}]" for dtype, sizes in _SHAPE.findall(result))
        operands = tuple(re.findall(r"%([\w.\-]+)", rest.split(")", 1)[0]))
        yield Instruction(computation, head.removeprefix("ROOT ").lstrip("%"), shapes, opcode, operands, body)


def dots(text: str) -> list[dict[str, Any]]:
    """Every GEMM of a program: what runs it, the dtypes and shapes of its operands, its result.

    `kind` is a custom call's target; the kind of a fusion that XLA generates the GEMM of; or "dot" where none took
    it, which is how XLA CPU leaves it.
    """
    everything = list(instructions(text))
    shapes = {one.name: one.shapes[0] if one.shapes else "" for one in everything}
    inside = {one.computation: one for one in everything if one.opcode in ("dot", "scaled-dot")}
    fused, found = set(), []
    for one in everything:
        target = one.attribute(r'custom_call_target="([^"]+)"')
        body = inside.get(one.attribute(r"calls=%?([\w.\-]+)"))
        if target == "triton_kernel_call_ffi":  # microfloat's, by its name
            target = one.attribute(r'[{ ]name ?= ?"(\w+)"')
        if one.opcode == "custom-call" and re.search("matmul|gemm|dot", target):
            found.append((one, one, target))
        elif one.opcode == "fusion" and body is not None:
            fused.add(body.name)
            kind = one.attribute(r'"kind":"(__[^"]+)"') or one.attribute(r"kind=(\w+)")
            found.append((one, body, kind))
    found += [(one, one, one.opcode) for one in inside.values() if one.name not in fused]
    rows = []
    for outer, dot, kind in found:
        operands = [shapes.get(name, "") for name in dot.operands[:2]]
        fp8 = kind not in ("dot", "scaled-dot") and all(shape.startswith("f8e") for shape in operands)
        rows.append({
            "kind": kind, "operands": operands, "result": outer.shapes[0] if outer.shapes else "", "fp8": fp8,
        })  # fmt: skip
    return rows


def summary(program: Program, results: dict[str, tuple[tuple[int, int], ...]]) -> dict[str, Any]:
    """GEMMs, and FP8 GEMMs, per role of `results` (name -> shapes that its product may have); kernels; memory."""
    found = dots(program.text)
    roles: dict[str, Any] = {}
    for role, shapes in results.items():
        wanted = {",".join(map(str, shape)) for shape in shapes}
        mine = [entry for entry in found if re.sub(r".*\[|\]", "", entry["result"]) in wanted]
        roles[role] = {"gemms": len(mine), "fp8": sum(entry["fp8"] for entry in mine), "seen": mine}
    opcodes = [instruction.opcode for instruction in instructions(_entry(program.text))]
    return {
        "gemms": roles, "fp8_gemms": sum(entry["fp8"] for entry in found),
        "fusions": opcodes.count("fusion"), "transposes": opcodes.count("transpose"), "copies": opcodes.count("copy"),
        "custom_calls": opcodes.count("custom-call"), "compile_s": round(program.compile_s, 2),
        "temporary_bytes": program.temporary_bytes, "argument_bytes": program.argument_bytes,
        "output_bytes": program.output_bytes,
    }  # fmt: skip


def _entry(text: str) -> str:
    """The text of the entry computation: one instruction there is about one kernel."""
    start = text.find("ENTRY ")
    return text[start:] if start >= 0 else text


def dump(folder: str | None, name: str, text: str) -> None:
    """Keep the text of a program, compressed, as FOLDER/NAME.hlo.txt.gz."""
    if folder:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with gzip.open(path / f"{name}.hlo.txt.gz", "wt", encoding="utf-8") as file:
            file.write(text)


def in_turns(calls: dict[str, Callable[[], Any]], repetitions: int, inner: int) -> dict[str, list[float]]:
    """Milliseconds per call of functions that take turns (A B A B); a sample is `inner` calls, then one wait."""
    for call in list(calls.values()) * 2:
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            begin = time.perf_counter()
            value = None
            for _ in range(inner):
                value = call()
            jax.block_until_ready(value)
            times[name].append((time.perf_counter() - begin) / inner * 1e3)
            del value
    return times


def kernels(call: Callable[[], Any], repetitions: int = 40) -> list[list[Any]]:
    """The kernels of a call as a GPU runs them one after another: [name, median microseconds]; none without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        jax.block_until_ready([call() for _ in range(repetitions)])
        with jax.profiler.trace(folder):
            jax.block_until_ready([call() for _ in range(repetitions)])
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        planes = [plane for file in files for plane in jax.profiler.ProfileData.from_file(str(file)).planes]
    lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    events = [event for line in lines if line.name.startswith("Stream") for event in line.events]
    events.sort(key=lambda event: event.start_ns)
    number = len(events) // repetitions
    same = [events[at : number * repetitions : number] for at in range(number)]
    return [[one[0].name, round(statistics.median(event.duration_ns / 1e3 for event in one), 1)] for one in same]


def percentiles(samples: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile of milliseconds."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {
        "median_ms": statistics.median(ordered),
        "p10_ms": ordered[round(0.1 * last)],
        "p90_ms": ordered[round(0.9 * last)],
    }


def normal(seed: int, shape: tuple[int, ...], scale: float = 1.0, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Normally distributed numbers: zeros or constants would let a GPU clock higher."""
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale).astype(dtype)


def relative(value: Any, exact: Any) -> float:
    """Relative Frobenius distance, in float64 on the host."""
    a, b = (np.asarray(array).astype(np.float64) for array in (value, exact))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def sqnr_db(value: Any, exact: Any) -> float:
    """Signal to quantization noise, 20 log10 of the inverse of `relative`."""
    return float(-20 * np.log10(max(relative(value, exact), 1e-30)))


def provenance(left_out: tuple[str, ...] = ("--json", "--dump")) -> dict[str, Any]:
    """Versions, device, date and the command, without options that name a place on this machine."""
    words, skip = [], False
    for word in sys.argv[1:]:
        if skip:
            skip = False
        elif word in left_out:
            skip = True
        elif not word.startswith(tuple(f"{option}=" for option in left_out)):
            words.append(word)
    device = jax.devices()[0]
    versions = {"jax": jax.__version__, "jaxlib": _version("jaxlib"), "flax": _version("flax"), "numpy": np.__version__}
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "date": datetime.date.today().isoformat(), "machine": device.device_kind, "device_count": jax.device_count(),
        "driver": str(getattr(device.client, "platform_version", "")).splitlines(), "python": platform.python_version(),
        "versions": versions, "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }  # fmt: skip


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def save(path: str | None, result: dict[str, Any]) -> None:
    """Write the JSON; called after every row, so that an interrupted run keeps what it measured."""
    if path:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
