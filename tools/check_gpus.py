"""Every check across GPUs through NCCL, then the benchmark: the most valuable first, each within a time of its own.

    python tools/check_gpus.py --out DIR                     # in this order, until the time is used up
    python tools/check_gpus.py --out DIR --minutes 9         # steps that do not fit any more are left for the next call
    python tools/check_gpus.py --out DIR --only benchmark    # some of them; --list names all
    python tools/check_gpus.py --out DIR --together 4        # four tests at a time, since they compile; then benchmarks

Two GPUs of one host serve. Each step is a process group of its own that is ended when its time is over. Its output
goes to DIR/NAME.log as it comes, and DIR/check_gpus.json says after every step what has passed, how long it took, and
how the output of what failed ends. A step that has passed in that file is not run again, so that several calls of some
minutes each go on where the one before has ended. Nothing is installed: the sources beside this file are used as they
are. Exits with 1 if a step has failed or is left.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "gpu", "-x")
_TESTS = "tests/torch/distributed"
_MACHINE = """
import torch, torch.distributed as dist
print("torch", torch.__version__, "cuda", torch.version.cuda, "nccl", ".".join(map(str, torch.cuda.nccl.version())))
print([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])
print("peer access", torch.cuda.can_device_access_peer(0, 1))
"""
# What this library asks of NCCL, by itself: a failure here explains those that follow.
_COLLECTIVES = """
import os, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
world = dist.get_world_size()
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
for dtype in (torch.uint8, torch.bfloat16):
    part = torch.full((64,), rank + 1, device="cuda").to(dtype)
    whole = part.new_empty(64 * world)
    gather(whole, part)
    assert whole.view(world, 64)[:, 0].tolist() == [*range(1, world + 1)], dtype
for dtype in (torch.int32, torch.float32):
    largest = torch.full((3,), rank, device="cuda", dtype=dtype)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert largest.tolist() == [world - 1] * 3, dtype
sent, received = torch.full((world,), rank, device="cuda", dtype=torch.uint8), torch.empty(world, device="cuda").byte()
dist.all_to_all_single(received, sent)
assert received.tolist() == [*range(world)]
told = [None] * world
dist.all_gather_object(told, ("a", rank))
assert told == [("a", other) for other in range(world)]
dist.barrier()
print("rank", rank, "well")
dist.destroy_process_group()
"""


class Step(NamedTuple):
    """A command and the seconds that it may take; `times`: it measures, and nothing else may run meanwhile."""

    seconds: int
    command: tuple[str, ...]
    times: bool = False


def steps(out: Path) -> dict[str, Step]:
    """Every step by its name, in the order in which they run."""

    def tests(name: str, seconds: int, group: str = "") -> Step:
        chosen = f"::test_ranks_on_gpus[{group}]" if group else ""
        return Step(seconds, (*_PYTEST, f"{_TESTS}/{name}.py{chosen}"))

    def benchmark(name: str, seconds: int, *rows: str) -> Step:
        command = (*ranks, "-m", "benchmarks", "fsdp", "--json", str(out / f"{name}.json"), "--only", *rows)
        return Step(seconds, command, times=True)

    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    example = (*ranks, "examples/train_fsdp.py", "--preset", "tiny", "--steps", "20", "--out", str(out / "example"))
    return {
        "machine": Step(60, ("-c", _MACHINE)),
        "collectives": Step(90, (*ranks, str(out / "collectives.py"))),
        "gathers": tests("test_fsdp", 240, "gathers"),
        "benchmark": benchmark("fsdp", 420, "fsdp.current", "fsdp.delayed", "fsdp.mxfp8.folded"),
        "stored": tests("test_fsdp", 240, "stored"),
        "stored unevenly": tests("test_fsdp", 300, "stored_unevenly"),
        "tensor parallel": tests("test_tensor_parallel", 240),
        "benchmark of a plan": benchmark("tp", 180, "tp"),
        "experts": tests("test_expert_data_pipeline", 180),
        "ranks": Step(240, (*_PYTEST, "tests/torch/scaling/test_ranks.py")),
        "ways": tests("test_fsdp", 240, "ways"),
        "edges": tests("test_fsdp", 180, "edges"),
        "stored elsewhere": tests("test_fsdp", 240, "stored_elsewhere"),
        "example": Step(150, (*example, "--recipe", "fp8_current", "--low-precision-gather")),
        "two devices": Step(180, (*_PYTEST, "tests/torch/launch/test_gpu_faults.py", "-k", "second_gpu or two_gpus")),
        "benchmark of the rest": benchmark("fsdp_rest", 240, "fsdp.nvfp4", "fsdp.mxfp8"),
    }  # fmt: skip


def run(step: Step, log: Path, seconds: float) -> tuple[str, float]:
    """Outcome and time of a step whose output goes to `log`; the processes of one that takes too long are ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *step.command], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(seconds)
            outcome = "passed" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            outcome = f"ended after {seconds:.0f} seconds"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return outcome, time.monotonic() - start


def main(arguments: list[str] | None = None) -> int:
    """Run the steps that have not passed yet; 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpus"), help="folder for logs and JSON")
    parser.add_argument("--minutes", type=float, default=28.0, help="time for all steps of this call")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="names of steps")
    parser.add_argument("--together", type=int, default=1, help="steps at a time that measure nothing")
    parser.add_argument("--list", action="store_true", help="name the steps and their times, and end")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    every, file = steps(out), out / "check_gpus.json"
    unknown = [name for name in options.only if name not in every]
    if unknown:
        parser.error(f"--only: got {', '.join(unknown)}, needed some of: {', '.join(every)}")
    if options.list:
        print(
            "\n".join(f"{step.seconds:4} s  {name}: {' '.join(step.command)[:150]!r}" for name, step in every.items())
        )
        return 0
    out.mkdir(parents=True, exist_ok=True)
    (out / "collectives.py").write_text(_COLLECTIVES)
    found = json.loads(file.read_text()).get("steps", {}) if file.exists() else {}
    until, writing = time.monotonic() + 60 * options.minutes, threading.Lock()

    def check(name: str) -> None:
        step, left = every[name], until - time.monotonic()
        if left < min(30, step.seconds):
            made = {"outcome": "left out: no time"}
        else:
            log = out / f"{name.replace(' ', '_')}.log"
            outcome, seconds = run(step, log, min(step.seconds, left))
            made = {"outcome": outcome, "seconds": round(seconds, 1), "log": log.name}
            made["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
            if outcome != "passed":
                made["end"] = log.read_text(errors="replace")[-3000:]
            print(f"{name}: {outcome}, {seconds:.0f} s", flush=True)
        with writing:
            found[name] = made
            machine = (out / "machine.log").read_text().split("\n") if (out / "machine.log").exists() else []
            file.write_text(json.dumps({"machine": machine, "steps": found}, indent=2) + "\n")

    chosen = [name for name in every if name in (options.only or every)]
    left = [name for name in chosen if found.get(name, {}).get("outcome") != "passed"]
    if options.together > 1:
        with concurrent.futures.ThreadPoolExecutor(options.together) as pool:
            list(pool.map(check, [name for name in left if not every[name].times]))
        left = [name for name in left if every[name].times]
    for name in left:
        check(name)
    return int(any(found[name]["outcome"] != "passed" for name in chosen))


if __name__ == "__main__":
    sys.exit(main())
