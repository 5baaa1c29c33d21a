"""Convert a checkpoint of random bfloat16 weights, and see what bounds it: the disk, the kernels or Python.

    python -m benchmarks convert [--json benchmarks/results/convert.json] [--gigabytes 2] [--folder /tmp]

The checkpoint has the shapes of Llama 3 8B, as many layers as fit. One row per target and way: without and with
`verify`, and with the source taken out of the file cache first, so that it is read from the disk. Times are medians of
the repetitions; each row also has the profile of one further run, its time by what it was spent in: kernels (waiting
for the threads that cast, decode and compare), disk (write, allocate, fsync), the search for amaxes, and everything
else, which is Python. A file that is not in the cache is read where it is first looked at, by the search for amaxes.
The rows `floor` are what none can be faster than: the same casts of matrices in memory, and the same bytes written and
synced.
"""

import argparse
import cProfile
import datetime
import json
import os
import platform
import pstats
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import microfloat.torch  # noqa: F401 -- its casts are used, as by the command
from benchmarks._report import printable_command
from benchmarks.cpu_quantize import processor
from microfloat._version import __version__
from microfloat.checkpoint import Record, convert, load, save
from microfloat.checkpoint.families import WRITTEN
from microfloat.reference import casters

TARGETS = ("ct:nvfp4", "modelopt:mxfp8")
# Llama 3 8B: rows and columns of the matrices of a layer.
LAYER = {
    "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}  # fmt: skip
# Functions of a profile by what their own time is; the rest is Python.
KINDS = {
    "kernels": ("quantize_operand", "decode_into", "energies", "acquire", "sleep"),
    "disk": ("pwrite", "fsync", "posix_fallocate", "ftruncate", "read", "replace"),
    "amaxes": ("amax_of", "reduce"),
}  # fmt: skip


def records(gigabytes: float) -> Iterator[Record]:
    """Weights of about that many bytes; each is another part of one random array, so that memory stays small."""
    pool = np.random.default_rng(0).standard_normal(1 << 27, dtype=np.float32).astype(ml_dtypes.bfloat16)
    left, layer = gigabytes * 1e9, 0
    while left > 0:
        for number, (name, (rows, columns)) in enumerate(LAYER.items()):
            start = 4099 * (len(LAYER) * layer + number)
            weight = pool[start : start + rows * columns].reshape(rows, columns)
            yield Record(f"model.layers.{layer}.{name}.weight", weight, logical_shape=weight.shape)
            left -= weight.nbytes
            if left <= 0:
                return
        layer += 1


def forget(folder: Path) -> None:
    """Take files out of the cache of the system."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def profiled(run: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of one run by kind, and its longest functions."""
    profile = cProfile.Profile()
    profile.runcall(run)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = sorted(((entry[2], function) for function, entry in stats.items()), reverse=True)
    seconds = dict.fromkeys((*KINDS, "python"), 0.0)
    for spent, (_, _, name) in own:
        word = name.strip("{}<>' ").replace("built-in method posix.", "").replace("method '", "").split("'")[0].split()
        kind = next((kind for kind, names in KINDS.items() if word and word[-1].rpartition(".")[2] in names), "python")
        seconds[kind] += spent
    longest = [{"function": f"{Path(file).name}:{name}" if line else name, "seconds": round(spent, 3)}
               for spent, (file, line, name) in own[:6]]  # fmt: skip
    return {**{kind: round(spent, 3) for kind, spent in seconds.items()}, "longest": longest}


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def floors(source: Path, target: str, written: int, folder: Path) -> dict[str, float]:
    """Seconds of the casts alone, and of writing and syncing as many bytes."""
    cast = WRITTEN[target][1].cast
    weights = [record.codes for record in load(source).values()]
    kernel = sum(timed(lambda weight=weight: casters.quantize(weight, cast))[0] for weight in weights)
    piece = np.random.default_rng(1).integers(0, 256, 1 << 26, np.uint8).data

    def write() -> None:
        with open(folder / "floor", "wb", buffering=0) as file:
            for start in range(0, written, len(piece)):
                file.write(piece[: min(len(piece), written - start)])
            os.fsync(file.fileno())

    disk = timed(write)[0]
    (folder / "floor").unlink()
    return {"kernel_s": round(kernel, 3), "write_s": round(disk, 3)}


def measure(source: Path, folder: Path, target: str, repetitions: int) -> Iterator[dict[str, Any]]:
    """The rows of one target."""
    out = folder / "out"

    def run(how: Callable[[Callable[[], Any]], Any], verify: bool, cold: bool) -> Any:
        shutil.rmtree(out, ignore_errors=True)
        if cold:
            forget(source)
        return how(lambda: convert(source, out, to=target, verify=verify))

    report: Any = None
    for way, verify, cold in (
        ("no verify", False, False),
        ("verify", True, False),
        ("verify, cold source", True, True),
    ):
        pairs = [run(timed, verify, cold) for _ in range(repetitions)]
        seconds, report = statistics.median(pair[0] for pair in pairs), pairs[-1][1]
        profile = run(profiled, verify, cold)
        yield {
            "target": target, "way": way, "seconds": [round(pair[0], 3) for pair in pairs],
            "read_mb_per_s": round(report.bytes_read / seconds / 1e6), "bytes_read": report.bytes_read,
            "bytes_written": report.bytes_written, "peak_bytes": report.peak_bytes, "profile_s": profile,
            "bound_by": max((*KINDS, "python"), key=profile.__getitem__),
        }  # fmt: skip
    yield {"target": target, "way": "floor", **floors(source, target, report.bytes_written, folder)}


def main(given: list[str] | None = None) -> int:
    given = sys.argv[1:] if given is None else given
    parser = argparse.ArgumentParser(prog="python -m benchmarks convert", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", help="where the files are written and removed again; default: that of tempfile")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one small matrix, once: tries the plumbing")
    parser.add_argument("--note", default="", help="a sentence about the machine, for the JSON")
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.gigabytes, arguments.repetitions = 0.001, 1
    needed, free = 3.2e9 * arguments.gigabytes / 2, shutil.disk_usage(arguments.folder or tempfile.gettempdir()).free
    if free < needed:
        print(f"{needed / 1e9:.1f} GB of disk are needed, {free / 1e9:.1f} GB are free; name another --folder")
        return 2
    load_before, rows = os.getloadavg(), []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        source = Path(name) / "source"
        save(records(arguments.gigabytes), source, format="plain", max_shard_size="500MB")
        for target in TARGETS:
            for row in measure(source, Path(name), target, arguments.repetitions):
                rows.append(row)
                print(*(f"{key} {value}" for key, value in row.items()), sep="\n    ")
    if arguments.json:
        document = {
            "command": printable_command(["convert", *map(shlex.quote, given)]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.system(),
                        "load_before": load_before, "load_after": os.getloadavg()},
            "versions": {"python": platform.python_version(), "numpy": np.__version__, "microfloat": __version__},
            "note": arguments.note, "gigabytes": arguments.gigabytes, "rows": rows,
        }  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0
