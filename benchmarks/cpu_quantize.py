"""Quantize and dequantize on a CPU: microfloat's torch reference beside torchao, in one process.

    python -m benchmarks cpu [--json benchmarks/results/cpu_quantize.json] [--threads 2] [--clock wall]

One row per format and direction: Melem/s of a bfloat16 matrix, median of the repetitions. Where torchao is importable
its eager path for the same format is timed beside it, A B A B, and its codes are compared first: the share of equal
bytes is recorded (torchao 0.18 computes some scales with float log2). Rows c.* have a target
(docs/laboratory/recipes.md). Data are normal-distributed, never constants; allocating the result is part of every call
on both sides. Every timed call comes after a pause, on both sides: the OpenMP threads of torch's kernels, eager or
compiled, go on spinning for some milliseconds after their work, and would keep a core from whoever is timed next.
`--clock cpu` counts processor time instead of wall time: for one thread on a machine busy with other work.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks._report import printable_command
from benchmarks.cpu_imports import import_rows
from microfloat._version import __version__
from microfloat.formats import FORMATS
from microfloat.recipes import Cast, Hadamard
from microfloat.torch import reference
from microfloat.torch.backends.base import Operand

SEED = (0x01234567, 0x89ABCDEF)
PAUSE_S = 0.02  # before every timed call; libgomp's threads spin for about 5 ms (GOMP_SPINCOUNT)


@dataclass
class Row:
    """One measurement; `ratio` is our rate over the peer's, `target` the least that it should be.

    c.mm states its target the other way round: our time over that of a float32 matmul, at most 1.3.
    """

    id: str
    operation: str
    cast: str
    melem_per_s: float
    p10_ms: float
    median_ms: float
    p90_ms: float
    peer: str | None = None
    peer_melem_per_s: float | None = None
    equal_bytes: float | None = None
    ratio: float | None = None
    target: float | None = None
    passed: bool | None = None


@dataclass
class Case:
    """One cast to time, and the function of torchao that does the same."""

    id: str
    operation: str
    cast: str
    run: Callable[[], object]
    peer_name: str | None = None
    peer: Callable[[], object] | None = None
    equal_bytes: float | None = None
    target: float | None = None
    times: list[float] = field(default_factory=list)
    peer_times: list[float] = field(default_factory=list)


def import_torchao():
    """torchao's quantizers by microfloat's format name, or (None, why not)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchao
            from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
    except ImportError as error:
        return None, f"not importable: {error}"
    mode = mx_tensor.ScaleCalculationMode

    def mx(dtype, scale_mode):
        return lambda x: mx_tensor.to_mx(x, dtype, 32, scale_mode)

    quantizers = {
        ("mxfp8", "rceil"): mx(torch.float8_e4m3fn, mode.RCEIL),
        ("mxfp8", "floor"): mx(torch.float8_e4m3fn, mode.FLOOR),
        ("mxfp8_e5m2", "rceil"): mx(torch.float8_e5m2, mode.RCEIL),
        ("mxfp4", "even"): mx(torch.float4_e2m1fn_x2, mode.EVEN),
        ("mxfp4", "floor"): mx(torch.float4_e2m1fn_x2, mode.FLOOR),
        ("nvfp4", "two_level_torchao"): lambda x: nvfp4_tensor.nvfp4_quantize(
            x, 16, nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
        ),
        ("nvfp4", "one_level_e4m3"): lambda x: nvfp4_tensor.nvfp4_quantize(x, 16),
    }
    wrapped = {
        "mxfp8": lambda x: mx_tensor.MXTensor.to_mx(x, torch.float8_e4m3fn, 32, mode.RCEIL),
        "mxfp4": lambda x: mx_tensor.MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, mode.EVEN),
        "nvfp4": lambda x: nvfp4_tensor.NVFP4Tensor.to_nvfp4(
            x, 16, nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
        ),
    }
    return (quantizers, wrapped, torchao.__version__), None


def equal_share(operand: Operand, theirs) -> float:
    """Share of equal code bytes."""
    ours = operand.codes.view(torch.uint8).flatten()
    codes = next(part for part in theirs if part.numel() == ours.numel()).view(torch.uint8).flatten()
    return float((ours == codes).float().mean())


DEQUANTIZE_TARGETS = {"mxfp8": ("c.dq.mxfp8", 2.0), "nvfp4": ("c.dq.nvfp4", 5.0)}
TARGETS = {("mxfp8", "rceil"): ("c.q.mxfp8", 3.0), ("mxfp4", "even"): ("c.q.mxfp4", 3.0),
           ("nvfp4", "two_level_torchao"): ("c.q.nvfp4", 3.0)}  # fmt: skip


def cases(x: torch.Tensor, quantizers: dict, wrapped: dict) -> list[Case]:
    """Every stock format along both axes, rules with a peer, stochastic and transformed casts, dequantize."""
    seed = torch.tensor(SEED, dtype=torch.int64)
    listed = [Cast(fmt) for fmt in FORMATS.values()]
    listed += [Cast(name, rule) for name, rule in quantizers if Cast(name, rule) not in listed]
    listed += [Cast("nvfp4", rounding="stochastic"), Cast("nvfp4", None, "stochastic", Hadamard()),
               Cast("nvfp4", hadamard=Hadamard()), Cast("nvfp4", "four_over_six"),
               Cast("mxfp8", rounding="stochastic")]  # fmt: skip
    found = []
    for cast in listed:
        traits = ("stochastic" if cast.is_stochastic else "", "hadamard" if cast.hadamard else "")
        name = " ".join(filter(None, (cast.format.name, str(cast.scale_rule), *traits)))
        key = (cast.format.name, str(cast.scale_rule))
        plain = cast.rounding == "nearest" and cast.hadamard is None
        peer = quantizers.get(key) if plain else None
        row_id, target = TARGETS.get(key, ("", None)) if plain else ("", None)
        operand = reference.quantize(x, cast, seed=seed)
        case = Case(
            row_id, "quantize rows", name, lambda cast=cast: reference.quantize(x, cast, seed=seed), target=target
        )
        if peer is not None:
            case.peer_name, case.peer = "torchao eager", lambda peer=peer: peer(x)
            case.equal_bytes = equal_share(operand, peer(x))
        found.append(case)
        if plain and cast == Cast(cast.format):
            columns = lambda cast=cast: reference.quantize(x, cast, transposed=True)  # noqa: E731
            values = lambda operand=operand: reference.dequantize(operand, torch.bfloat16)  # noqa: E731
            found.append(Case("", "quantize columns", name, columns))
            row_id, target = DEQUANTIZE_TARGETS.get(cast.format.name, ("", None))
            decode = Case(row_id, "dequantize to bfloat16", name, values, target=target)
            if cast.format.name in wrapped:
                theirs = wrapped[cast.format.name](x)
                decode.peer_name = "torchao eager"
                decode.peer = lambda theirs=theirs: theirs.dequantize(torch.bfloat16)
            found.append(decode)
    return found


def matmul_row(repetitions: int) -> Row:
    """c.mm: both casts and the emulated product of 2048^3, in units of one float32 product of that size."""
    a, b = (torch.randn(2048, 2048, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    a_16, b_16, cast = a.bfloat16(), b.bfloat16(), Cast("mxfp8")

    def emulated() -> torch.Tensor:
        left, right = reference.quantize(a_16, cast), reference.quantize(b_16, cast)
        return reference.scaled_matmul(left, right, out_dtype=torch.bfloat16)

    case = Case("c.mm", "casts and matmul 2048^3", "mxfp8 rceil", emulated, "float32 matmul", lambda: a @ b.t())
    row = measure(case, 2 * 2048**2, repetitions)
    row.target, row.passed = 1.3, row.ratio is not None and 1 / row.ratio <= 1.3
    return row


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = CLOCKS["wall"]


def timed(run: Callable[[], object]) -> float:
    """Seconds of a call, after a pause."""
    time.sleep(PAUSE_S)
    start = clock()
    run()
    return clock() - start


def measure(case: Case, elements: int, repetitions: int) -> Row:
    """Interleaved repetitions after one warm-up each."""
    case.run()
    if case.peer is not None:
        case.peer()
    for _ in range(repetitions):
        case.times.append(timed(case.run))
        if case.peer is not None:
            case.peer_times.append(timed(case.peer))
    times = sorted(case.times)
    median = statistics.median(times)
    row = Row(
        case.id, case.operation, case.cast, elements / median / 1e6, times[len(times) // 10] * 1e3, median * 1e3,
        times[-1 - len(times) // 10] * 1e3, case.peer_name, equal_bytes=case.equal_bytes, target=case.target,
    )  # fmt: skip
    if case.peer_times:
        peer_median = statistics.median(case.peer_times)
        row.peer_melem_per_s, row.ratio = elements / peer_median / 1e6, peer_median / median
        if case.target is not None:
            row.passed = row.ratio >= case.target
    return row


def processor() -> str:
    """The CPU's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main(given: list[str] | None = None) -> int:
    given = sys.argv[1:] if given is None else given
    parser = argparse.ArgumentParser(prog="python -m benchmarks cpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a tiny matrix, once: tries the plumbing")
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.size, arguments.repetitions = 64, 1
    global clock
    clock = CLOCKS[arguments.clock]
    torch.set_num_threads(arguments.threads)
    x = torch.randn(arguments.size, arguments.size, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, why_not = import_torchao()
    quantizers, wrapped, torchao_version = found if found else ({}, {}, None)
    before = os.getloadavg()
    copy = torch.empty_like(x)
    copy_case = Case("", "copy", "bfloat16", lambda: copy.copy_(x))
    listed = (copy_case, *cases(x, quantizers, wrapped))
    rows = [measure(case, x.numel(), arguments.repetitions) for case in listed]
    rows.append(matmul_row(arguments.repetitions))
    for row in rows:
        beside = f"  {row.peer} {row.peer_melem_per_s:6.0f}  {row.ratio:5.2f}x" if row.ratio else ""
        print(f"{row.operation:22s} {row.cast:34s} {row.melem_per_s:7.0f} Melem/s{beside}")
    imports = import_rows(1 if arguments.quick else 5)
    for entry in imports:
        verdict = "ok" if entry.passed else "MISSED"
        print(
            f"{entry.id:22s} {entry.ms:6.0f} ms, {entry.mb:5.1f} MB over {entry.over}; {entry.target_ms:.0f} {verdict}"
        )
    if why_not:
        print(f"torchao: {why_not}")
    if arguments.json:
        document = {
            "command": printable_command(["cpu", *given]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": {"processor": processor(), "cores": os.cpu_count(), "threads": arguments.threads,
                        "clock": arguments.clock, "vectors": torch.backends.cpu.get_cpu_capability(),
                        "system": platform.system(), "load_before": before,
                        "load_after": os.getloadavg()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "torchao": torchao_version,
                         "microfloat": __version__},
            "shape": list(x.shape), "dtype": "bfloat16", "repetitions": arguments.repetitions,
            "torchao": why_not or "eager and compiled, same process, interleaved",
            "pause_s": PAUSE_S, "pause": "before every timed call of both sides, for OpenMP's threads to stop spinning",
            "rows": [asdict(row) for row in rows], "imports": [asdict(entry) for entry in imports],
        }  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0
