"""Pretrain one model under many recipes with paired seeds, and say which gaps to bf16 are more than chance.

    python examples/study.py run                             # 0.4 million parameters, bytes: minutes on a CPU
    make corpus && python examples/study.py run --size 30m --text .data/corpus --workers 0,1   # two GPUs
    python examples/study.py run ... --stop-after 540        # stops in time; the same command goes on, bit for bit
    python examples/study.py report --out runs/study --json benchmarks/results/evidence.json
    python examples/study.py report ... --onto benchmarks/results/evidence.json   # single runs anew: the others stay

Every row of a seed starts from the same weights and sees the same batches; a gap is the difference of held-out losses
within a seed, its interval Student's over the seeds. `bf16_again` starts from weights that differ from bf16's by one
rounding to bfloat16: its gap is what chance alone does. Rows: examples/pretraining/rows.py. Each run that ends leaves
ROW.SEED.json in --out; what is there is not run again. Those of --keep also leave ROW.SEED.safetensors, the trained
weights. The plan of the study in docs/evidence.md, and its verdicts, are of `--size 30m`.
"""

import argparse
import contextlib
import datetime
import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see train_gpt.py

import torch
from pretraining.model import SIZES, Size
from pretraining.rows import MAIN, ROWS
from pretraining.run import Run
from pretraining.text import Text, load_text
from pretraining.verdicts import chance, gaps_to, verdict
from safetensors.torch import save_file

from microfloat.errors import CheckpointError, MicrofloatError, unknown_name

LATEST_START = 20.0  # seconds before the end in which no run is begun


def queue(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Runs in their order: all rows of a seed before the next seed, then the rows of one seed."""
    runs = [(row, seed) for seed in options.seeds for row in options.rows]
    return runs + [(row, options.seeds[0]) for row in options.more if row not in options.rows]


def find_size(options: argparse.Namespace) -> Size:
    """The size, with the tokens of a run that were asked for."""
    size = SIZES[options.size]
    return size if options.tokens is None else replace(size, tokens=options.tokens)


def work(options: argparse.Namespace, show: Any = print) -> bool:
    """Train what nobody else has claimed, until nothing is left or the time is up; True if nothing is left."""
    until = time.time() + 1e9 if options.until is None else options.until
    device = torch.device("cuda" if options.workers[0] != "cpu" else "cpu")
    size, text = find_size(options), load_text(options.text)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch._dynamo.config.recompile_limit = 64  # each row compiles the same code once more
    for row, seed in queue(options):
        file = options.out / f"{row}.{seed}.json"
        if file.exists() or time.time() > until - LATEST_START or not claim(file.with_suffix(".claim")):
            continue
        train_one(options, row, seed, (size, text, device), until, show)
        gc.collect()  # a compiled model refers to itself
    return all((options.out / f"{row}.{seed}.json").exists() for row, seed in queue(options))


def claim(file: Path) -> bool:
    """True for the one worker that makes this file."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def train_one(
    options: argparse.Namespace, row: str, seed: int, of: tuple[Size, Text, torch.device], until: float, show: Any
) -> None:
    """One run from its checkpoint, if there is one: to its end, or to a checkpoint."""
    size, text, device = of
    file, checkpoint = options.out / f"{row}.{seed}.json", options.out / f"{row}.{seed}.pt"
    began = time.time()
    run = Run(row, seed, size, text, device, options.compile)
    if checkpoint.exists():
        run.load(torch.load(checkpoint, map_location="cpu", weights_only=True))
    else:
        run.prepare()
    prepared = time.time() - began
    if not run.train(lambda: time.time() > until):
        run.save(checkpoint)
        file.with_suffix(".claim").unlink(missing_ok=True)
        show(f"{row}.{seed}: stopped after step {run.step} of {size.steps}")
        return
    result = run.summary()
    if row in options.keep:
        save_weights(run, file.with_suffix(".safetensors"))
    write(file, result)
    checkpoint.unlink(missing_ok=True)
    rate = size.steps * size.batch * size.context / run.seconds
    losses = ", ".join(f"{kind} {loss:.4f}" for kind, loss in result["held_out"].items())
    times = f"prepared in {prepared:.0f} s, {time.time() - began:.0f} s in all"
    show(f"{row}.{seed}: {losses}; {rate:,.0f} tokens/s, {times}")


def save_weights(run: Run, file: Path) -> None:
    """Write the trained weights in bfloat16; examples/post_training.py reads them."""
    weights = {name: value.detach().bfloat16().contiguous() for name, value in run.model.named_parameters()}
    facts = {"row": run.name, "seed": run.seed, **run.settings()}
    save_file({name: value.cpu() for name, value in weights.items()}, file, {"run": json.dumps(facts)})


def write(file: Path, value: Any) -> None:
    """Write JSON; the file is whole or not there. What is no number becomes null."""
    text = json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=1)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text + "\n")
    temporary.replace(file)


def run_all(options: argparse.Namespace) -> int:
    """Run the queue in this process, or in one process for each worker; the exit status."""
    options.out.mkdir(parents=True, exist_ok=True)
    for stale in options.out.glob("*.claim"):
        stale.unlink()
    if options.stop_after is not None:
        options.until = time.time() + options.stop_after
    if len(options.workers) == 1 and options.workers[0] == "cpu":
        return 0 if work(options) else 3
    children = {index: start_worker(options, index) for index in range(len(options.workers))}
    tries = dict.fromkeys(children, 3)
    while children:
        for index, child in list(children.items()):
            status = child.poll()
            if status is None:
                continue
            del children[index]
            tries[index] -= 1
            if status not in (0, 3) and tries[index]:  # another run may do better than the one that ended it
                print(f"worker {index} ended with status {status}; it is started again", flush=True)
                children[index] = start_worker(options, index)
        time.sleep(0.5)
    done = [(options.out / f"{row}.{seed}.json").exists() for row, seed in queue(options)]
    print(f"{sum(done)} of {len(done)} runs are done")
    return 0 if all(done) else 3


def start_worker(options: argparse.Namespace, index: int) -> subprocess.Popen:
    """A process that works on one GPU; workers that begin together would compile the same code at once."""
    command = [sys.executable, *sys.argv, "--worker", options.workers[index]]
    if options.until is not None:
        command += ["--until", str(options.until)]
    return subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": options.workers[index]})


SHARED = ("size", "steps", "steps_of_a_mean", "text", "environment")


def report(options: argparse.Namespace) -> int:
    """Print gaps and verdicts; write all runs into one JSON."""
    results = [json.loads(file.read_text()) for file in sorted(options.out.glob("*.json"))]
    if not results:
        raise MicrofloatError(f"--out: got {options.out} without a run that ended. Run the study first.")
    facts = {key: results[0][key] for key in SHARED}
    date = datetime.datetime.fromtimestamp(time.time(), datetime.UTC).date().isoformat()
    told = {"command": f"python examples/study.py {options.command_line}".strip(), "date": date}
    runs = [{key: value for key, value in result.items() if key not in SHARED} for result in results]
    whole = {**told, **facts, "runs": runs} if options.onto is None else joined(options.onto, runs, facts, told)
    gaps = gaps_to(whole["runs"])
    yardstick = chance(gaps)
    for row, gap in sorted(gaps.items(), key=lambda item: item[1].mean):
        width = "" if gap.half is None else f" +- {gap.half:.4f}"
        print(f"{row:20} {gap.mean:+.4f}{width}  {verdict(gap, yardstick)}")
    if options.json is not None:
        write(options.json, whole)
    return 0


def joined(file: Path, runs: list[dict], facts: dict[str, Any], told: dict[str, str]) -> dict[str, Any]:
    """An earlier report with these runs in the places of its own, which it keeps under "replaced".

    Raises CheckpointError where a gap between the two would not be one of recipes alone.
    """
    whole = json.loads(file.read_text())
    before, after = ({key: value for key, value in one.items() if key != "environment"} for one in (whole, facts))
    machines = [[one["environment"][key] for key in ("device", "torch")] for one in (whole, facts)]
    for key, ours, theirs in [*((key, after[key], before[key]) for key in after), ("environment", *machines[::-1])]:
        if ours != theirs:
            raise CheckpointError(f"--onto: got {key} {theirs}, needed {ours} of --out. Repeat all of its rows.")
    new = {(run["row"], run["seed"]): {**run, **told} for run in runs}
    old = [run for run in whole["runs"] if (run["row"], run["seed"]) in new]
    kept = [run for run in whole["runs"] if (run["row"], run["seed"]) not in new]
    return {**whole, "runs": [*kept, *new.values()], "replaced": [*whole.get("replaced", []), *old]}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("--size", default="cpu", choices=[*SIZES])
    parser.add_argument("--tokens", type=int, help="of a run, in place of the size's")
    parser.add_argument("--text", type=Path, help="a folder of tools/corpus.py; without it, Python's standard library")
    parser.add_argument("--rows", default=",".join(MAIN), help="run with every seed")
    parser.add_argument("--more", default="", help="rows that run with the first seed alone")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument(
        "--workers", default="cpu", help="cpu, or the GPU of each process: 0,0,1,1 is two on each of two"
    )
    parser.add_argument("--compile", action="store_true", help="compile blocks and loss")
    parser.add_argument("--stop-after", type=float, help="seconds after which checkpoints are written")
    parser.add_argument("--keep", default="", help="rows whose trained weights are written, in bfloat16")
    parser.add_argument("--json", type=Path, help="of report: where all runs go")
    parser.add_argument("--onto", type=Path, help="of report: an earlier one, whose other runs stay")
    parser.add_argument("--command-line", default="run", help="of report: the arguments that made the runs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for option in ("rows", "more", "keep"):
        names = [row for row in getattr(options, option).split(",") if row]
        setattr(options, option, names)
        for name in names:
            if name not in ROWS:
                raise unknown_name(f"--{option}", name, [*ROWS])
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    options.workers = [options.worker] if options.worker is not None else options.workers.split(",")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 3 where runs are left."""
    try:
        options = parse(arguments)
        if options.worker is not None:
            return 0 if work(options, lambda line: print(f"[{options.worker}] {line}", flush=True)) else 3
        return report(options) if options.action == "report" else run_all(options)
    except MicrofloatError as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
