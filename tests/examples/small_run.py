"""The smallest main job: one block, a few bytes per window, a few steps."""

import importlib
import json
from pathlib import Path

SMALL = """
    --device cpu --layers 1 --dim 32 --heads 2 --hidden 32 --context 16 --batch 2
    --eval-windows 4 --corpus-bytes 4000000 --checkpoint-every 100 --jobs 1
"""


def arguments(out: Path, more: str = "") -> list[str]:
    """The command line of a small run whose results go below `out`."""
    return [*SMALL.split(), "--out", str(out), "--name", "small", *more.split()]


def train(out: Path, more: str = "", script: str = "train_gpt") -> int:
    """Run the main job in this process, in torch or ("train_gpt_jax") in JAX; returns its exit status."""
    return importlib.import_module(script).main(arguments(out, more))


def trainer_of(out: Path, more: str, name: str | None = None, script: str = "train_gpt"):
    """The Trainer of one run (by default the last) that these flags ask for."""
    module, data = importlib.import_module(script), importlib.import_module("gpt.data")
    options = module.parse_options(arguments(out, more))
    return module.Trainer(name or [*options.runs][-1], options, data.load_corpus(options.corpus_bytes))


def results(out: Path) -> dict:
    """Results that the run below `out` wrote."""
    return json.loads((out / "small" / "results.json").read_text())


def losses(out: Path, name: str) -> dict:
    """The part that must not depend on interruptions: one recipe's entry without its time."""
    entry = results(out)["recipes"][name]
    return {key: value for key, value in entry.items() if key != "seconds"}
