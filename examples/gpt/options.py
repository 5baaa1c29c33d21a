"""Command line -> Options (what a run is) and a list of Runs (one per recipe)."""

import argparse
import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.shape import Shape
from microfloat import recipes
from microfloat.errors import InvalidValueError, invalid_value, unknown_name
from microfloat.recipes import NVFP4BlockScaling, Recipe

__all__ = ["Options", "Run", "device_error", "parse_options", "plan_runs"]

BASELINE = "bf16"
# The baseline once more, from parameters that differ by a bfloat16 rounding: how far chance alone moves a run.
BASELINE_AGAIN = "bf16_again"
DEFAULT_RECIPES = ("bf16", "fp8_current", "mxfp8", "nvfp4")

# --ablate name -> the aid of the NVFP4 recipe that it switches off
ABLATIONS = {
    "rht": {"disable_rht": True},
    "sr": {"disable_stochastic_rounding": True},
    "2d": {"disable_2d_quantization": True},
}


@dataclass(frozen=True)
class Preset:
    """A model with the training settings that suit it."""

    shape: Shape
    steps: int
    batch: int
    lr: float
    eval_windows: int
    checkpoint_every: int


PRESETS = {
    # Half a million parameters: four runs in about 100 s on two free CPU cores.
    "tiny": Preset(Shape(dim=128, layers=2, heads=4, hidden=384, context=128), 300, 16, 1.2e-3, 128, 100),
    # 124 million parameters, GPT-2 small's width and depth (its large vocabulary spent on a wider SwiGLU): for a GPU.
    "124m": Preset(Shape(dim=768, layers=12, heads=12, hidden=3456, context=1024), 2000, 16, 6e-4, 128, 100),
}


@dataclass(frozen=True)
class Run:
    """One training run: its name, its recipe (None: bf16), and whether it starts from disturbed parameters."""

    name: str
    recipe: Recipe | None
    disturbed: bool = False


@dataclass(frozen=True)
class Options:
    """Everything that the command line decides, presets resolved."""

    preset: str
    shape: Shape
    steps: int
    batch: int
    lr: float
    weight_decay: float
    seed: int
    last_fraction_bf16: float
    last_in: str
    eval_windows: int
    corpus_bytes: int
    checkpoint_every: int
    device: Any  # the framework's own
    device_type: str  # "cpu" or "cuda"
    folder: Path
    resume: bool
    runs: tuple[Run, ...]
    jobs: int = 1
    initial_weights: Path | None = None
    export_weights: Path | None = None
    record: Path | None = None

    @property
    def warmup_steps(self) -> int:
        """The learning rate rises over the first tenth of the steps, 1,000 at most."""
        return min(max(1, self.steps // 10), 1000)

    @property
    def bf16_from_step(self) -> int:
        """The first step that runs in bf16 whatever the recipe, rounded down; `steps` when there is none."""
        return self.steps - (math.ceil(self.last_fraction_bf16 * self.steps) if self.last_in == "steps" else 0)

    @property
    def bf16_blocks(self) -> range:
        """The last blocks, which run in bf16 whatever the recipe; rounded up."""
        layers = self.shape.layers
        count = math.ceil(self.last_fraction_bf16 * layers) if self.last_in == "blocks" else 0
        return range(layers - count, layers)

    def settings(self) -> dict:
        """What the losses depend on, for results.json and to compare a checkpoint with."""
        left_out = (
            "shape", "device", "device_type", "folder", "resume", "checkpoint_every", "runs", "jobs",
            "initial_weights", "export_weights", "record",
        )  # fmt: skip
        plain = {name: value for name, value in vars(self).items() if name not in left_out}
        weights = {}
        if self.initial_weights is not None:
            weights["initial_weights"] = hashlib.sha256(self.initial_weights.read_bytes()).hexdigest()
        return {**plain, **vars(self.shape), "device": self.device_type, **weights}


def parse_options(
    arguments: list[str] | None, program: str, find_device: Callable[[str], tuple[Any, str]], *, divides_cores: bool
) -> Options:
    """Parse and check the command line. Raises InvalidValueError whose message names the flag.

    ``find_device(name)`` is the framework's: its device and "cpu" or "cuda"; for one that is not there it raises
    `device_error`. `divides_cores`: whether several processes of the framework can have a core of a CPU each.
    """
    given = _parser(program).parse_args(arguments)
    preset = PRESETS[given.preset]
    _check_ranges(given)
    device, device_type = find_device(given.device)

    def choose(name: str, default: object):
        value = getattr(given, name)
        return getattr(default, name) if value is None else value

    runs = tuple(plan_runs(_split(given.recipe) or DEFAULT_RECIPES, _split(given.ablate)))
    jobs = given.jobs
    if not divides_cores or device_type != "cpu":
        if jobs not in (None, 1):
            raise invalid_value("--jobs", jobs, "1: here a run has the whole machine")
        jobs = 1
    elif jobs is None:
        jobs = min(len(runs), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    shape = Shape(**{name: choose(name, preset.shape) for name in vars(preset.shape)})
    return Options(
        preset=given.preset,
        shape=shape,
        steps=choose("steps", preset),
        batch=choose("batch", preset),
        lr=choose("lr", preset),
        weight_decay=given.weight_decay,
        seed=given.seed,
        last_fraction_bf16=given.last_fraction_bf16,
        last_in=given.last_in,
        eval_windows=choose("eval_windows", preset),
        corpus_bytes=given.corpus_bytes,
        checkpoint_every=choose("checkpoint_every", preset),
        device=device,
        device_type=device_type,
        folder=Path(given.out) / (given.name or given.preset),
        resume=given.resume,
        runs=runs,
        jobs=jobs,
        initial_weights=_existing("--initial-weights", given.initial_weights),
        export_weights=given.export_weights and Path(given.export_weights),
        record=given.record and Path(given.record),
    )


def plan_runs(names: list[str] | tuple[str, ...], ablations: list[str] | tuple[str, ...] = ()) -> list[Run]:
    """The runs in order: the baseline always and first, then the recipes, then NVFP4 with one aid off each."""
    runs = {BASELINE: Run(BASELINE, None)}
    for name in names:
        if name == BASELINE_AGAIN:
            runs[name] = Run(name, None, disturbed=True)
        elif name != BASELINE:
            runs[name] = Run(name, _recipe(name))
    for ablation in ablations:
        if ablation not in ABLATIONS:
            raise unknown_name("--ablate", ablation, ABLATIONS)
        name = f"nvfp4-no-{ablation}"
        runs[name] = Run(name, NVFP4BlockScaling(**ABLATIONS[ablation]))
    return list(runs.values())


def _recipe(name: str) -> Recipe:
    try:
        return recipes.from_name(name)
    except InvalidValueError:
        raise unknown_name("--recipe", name, [BASELINE, BASELINE_AGAIN, *recipes.RECIPES]) from None


def _split(values: list[str] | None) -> list[str]:
    """``["a,b", "c"] -> ["a", "b", "c"]``: a flag may be repeated, or hold a list, or both."""
    return [name.strip() for value in values or [] for name in value.split(",") if name.strip()]


def device_error(name: str, reason: str) -> InvalidValueError:
    """The error for a device that is not there."""
    return invalid_value("--device", f"{name!r} ({reason})", "'auto', 'cpu', or a device of this machine")


def _existing(flag: str, name: str | None) -> Path | None:
    if name is None:
        return None
    if not Path(name).is_file():
        raise invalid_value(flag, repr(name), "a file that --export-weights wrote")
    return Path(name)


def _check_ranges(given: argparse.Namespace) -> None:
    for name in ("steps", "batch", "eval_windows", "checkpoint_every", "corpus_bytes", "jobs"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise invalid_value(_flag(name), value, "a positive number")
    for name in ("lr", "weight_decay"):
        value = getattr(given, name)
        if value is not None and not 0 <= value < float("inf"):
            raise invalid_value(_flag(name), value, "a finite number >= 0")
    if not 0 <= given.last_fraction_bf16 < 1:
        raise invalid_value("--last-fraction-bf16", given.last_fraction_bf16, "a fraction in [0, 1), such as 0.15")
    if not 0 <= given.seed < 2**63:
        raise invalid_value("--seed", given.seed, "an int in [0, 2^63)")
    if given.name is not None and Path(given.name).name != given.name:
        raise invalid_value("--name", repr(given.name), "a plain folder name", "Choose the parent folder with --out.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Train one small transformer in bf16 and under low-precision recipes, and compare the losses.",
        epilog="Sizes and settings not given come from the preset.",
    )
    add = parser.add_argument
    names = ", ".join(recipes.RECIPES)
    add("--recipe", action="append", metavar="NAME[,NAME]",
        help=f"what to train besides {BASELINE}: {names}, or {BASELINE_AGAIN}, the baseline from slightly other "
        f"parameters, which shows how far chance moves a run (default: {','.join(DEFAULT_RECIPES)})")  # fmt: skip
    add("--ablate", action="append", metavar="AID[,AID]",
        help=f"also train NVFP4 with one aid off each: {', '.join(ABLATIONS)}")  # fmt: skip
    add("--last-fraction-bf16", type=float, default=0.0, metavar="F",
        help="run the last part in bf16 under every recipe, for instance 0.15")  # fmt: skip
    add("--last-in", choices=("steps", "blocks"), default="steps",
        help="the last part of the training steps, or of the model's blocks (default: steps)")  # fmt: skip
    add("--preset", choices=tuple(PRESETS), default="tiny", help="model and training settings (default: tiny)")
    add("--steps", type=int, help="optimizer steps")
    add("--batch", type=int, help="windows per step")
    add("--lr", type=float, help="peak learning rate")
    add("--weight-decay", type=float, default=0.1, help="on matrices (default: 0.1)")
    add("--seed", type=int, default=0, help="of parameters, batches and stochastic rounding (default: 0)")
    add("--dim", type=int, help="width of the model")
    add("--layers", type=int, help="number of blocks")
    add("--heads", type=int, help="attention heads")
    add("--hidden", type=int, help="inner width of the feed-forward")
    add("--context", type=int, help="bytes per window")
    add("--eval-windows", type=int, help="held-out windows that are evaluated")
    add("--corpus-bytes", type=int, default=16 * 2**20, help="read at most this much text (default: 16 MiB)")
    add("--device", default="auto", help="auto (cuda where there is one), cpu, cuda, cuda:1, ...")
    add("--jobs", type=int, metavar="N",
        help="train N runs at a time, each on one core of the CPU (default: as many as there are cores; on a GPU, and "
        "in JAX, one run after the other)")  # fmt: skip
    add("--name", help="results go to runs/NAME (default: the preset's name)")
    add("--out", default="runs", help="the folder that holds NAME (default: runs)")
    add("--resume", action="store_true", help="continue what was interrupted, with the same losses bit for bit")
    add("--checkpoint-every", type=int, metavar="STEPS", help="save this often, besides at the end and on Ctrl-C")
    add("--initial-weights", metavar="FILE", help="start every run from these weights, of either framework's example")
    add("--export-weights", metavar="FILE", help="write the weights that the runs start from (safetensors)")
    add("--record", metavar="FILE",
        help="write x, w, dy and y of every quantized layer at the last run's first step (safetensors)")  # fmt: skip
    return parser
