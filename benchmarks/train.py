"""The training example on this machine: tokens per second of each recipe against bfloat16 (t.*).

A step is what examples/train_gpt.py does: a batch to the device, forward, backward, clipping, AdamW, reading the loss.
Everything but the blocks' Linears is the same in both, so the ratio says what a recipe is worth to a whole training.
"""

import argparse
import functools
import sys
import time
import warnings
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks._report import Report, Row
from microfloat.torch.timing import Times

NAMES = ("delayed", "fp8_current", "fp8_row", "fp8_block", "mxfp8", "nvfp4")
STEPS, WARM, ROUNDS = 10, 6, 5


def make_trainer(options: argparse.Namespace, recipe: str, compiled: bool) -> Any:
    """A Trainer of the example's own GPU preset (a tiny model with --quick), its model compiled or not."""
    sys.path.insert(0, str(ROOT / "examples"))
    import train_gpt  # type: ignore[import-not-found]
    from gpt import data  # type: ignore[import-not-found]

    sizes = ["--preset", "124m"] if not options.quick else [
        "--preset", "tiny", "--dim", "32", "--layers", "1", "--heads", "2", "--hidden", "64", "--context", "16",
        "--batch", "2",
    ]  # fmt: skip
    run = ["--device", options.device, "--steps", "1000000", "--recipe", recipe, *["--compile"] * compiled]
    return train_gpt.Trainer(recipe, train_gpt.parse_options([*sizes, *run]), data.load_corpus(1 << 22))


def steps(trainer: Any, count: int, device: str) -> float:
    """Seconds of wall clock of `count` steps."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        trainer.train_step()
        trainer.step += 1
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(report: Report, recipe: str, mode: str) -> None:
    """One recipe and bfloat16, which take turns."""
    options = report.options
    torch._dynamo.reset()
    count, warm, rounds = (1, 1, 1) if options.quick else (STEPS, WARM, ROUNDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile remarks on what a training loop does between graphs
        trainers = {name: make_trainer(options, name, mode == "compiled") for name in ("bf16", recipe)}
        for trainer in trainers.values():
            steps(trainer, warm, options.device)
        samples: dict[str, list[float]] = {name: [] for name in trainers}
        for _ in range(rounds):
            for name, trainer in trainers.items():
                samples[name].append(steps(trainer, count, options.device) / count * 1e3)
    times = {name: Times.of(values) for name, values in samples.items()}
    shape = trainers["bf16"].options
    tokens = shape.batch * shape.context
    row = Row("t.gpt", (shape.batch, shape.context), recipe, mode=mode, backend="auto", ratio_of="bf16")
    row.timed(times[recipe], times["bf16"])
    row.value, row.unit = tokens / times[recipe].median * 1e3, "tokens/s"
    row.extra = {
        "parameters": shape.parameters,
        "bf16_tokens_per_s": round(tokens / times["bf16"].median * 1e3),
    }
    report.add(row)


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    report = Report(options, arguments)
    for mode in ("eager", "compiled"):
        for recipe in NAMES:
            if not report.wants(f"t.{mode}.{recipe}", f"t.gpt.{recipe}"):
                continue
            if options.quick and mode == "compiled" and recipe != "fp8_current":
                continue
            report.attempt("t.gpt", functools.partial(measure, report, recipe, mode), recipe=recipe, mode=mode)
    return report.finish()
