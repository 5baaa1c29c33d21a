"""The command line of both GPT examples."""

import argparse
import hashlib
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from microfloat import recipes
from microfloat.errors import InvalidValueError, invalid_value, unknown_name
from microfloat.recipes import NVFP4BlockScaling, Placement, Recipe

BASELINE = "bf16"
# The baseline once more, from parameters that differ by a bfloat16 rounding: how far chance alone moves a run.
BASELINE_AGAIN = "bf16_again"
DEFAULT_RECIPES = ["bf16", "fp8_current", "mxfp8", "nvfp4"]
ABLATIONS = {
    "rht": NVFP4BlockScaling(disable_rht=True),
    "sr": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "2d": NVFP4BlockScaling(disable_2d_quantization=True),
}
# A model with the training settings that suit it. tiny: half a million parameters, four runs in about 100 s on two free
# CPU cores. 124m: GPT-2 small's width and depth (its large vocabulary spent on a wider SwiGLU), for a GPU.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(dim=128, layers=2, heads=4, hidden=384, context=128, steps=300, batch=16, lr=1.2e-3),
    "124m": dict(dim=768, layers=12, heads=12, hidden=3456, context=1024, steps=2000, batch=16, lr=6e-4),
}
# Flags -> what their values must be.
NEEDED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "steps batch dim layers heads hidden context eval_windows checkpoint_every corpus_bytes jobs watch": (
        lambda count: count >= 1, "a positive number"),
    "lr weight_decay": (lambda value: 0 <= value < math.inf, "a finite number >= 0"),
    "last_fraction_bf16": (lambda share: 0 <= share < 1, "a fraction in [0, 1), such as 0.15"),
    "seed": (lambda seed: 0 <= seed < 2**63, "an int in [0, 2^63)"),
    "name": (lambda name: Path(name).name == name, "a plain folder name (--out chooses its parent)"),
    "initial_weights": (Path.is_file, "a file that --export-weights wrote"),
}  # fmt: skip
# What the losses do not depend on.
NO_SETTINGS = (
    "device", "gpu", "folder", "runs", "recipe", "ablate", "jobs", "name", "out", "resume", "checkpoint_every",
    "initial_weights", "export_weights", "export_model", "record", "watch", "dp", "tp", "low_precision_gather",
)  # fmt: skip


class Options(argparse.Namespace):
    """The flags by their names, with the preset's values, and what follows from them.

    device, device_type ("cpu" or "cuda") and gpu (its name) are the framework's; `runs` maps names to recipes, and to
    None for bf16; results go to `folder`.
    """

    cuda_graph = False  # of an example without the flag

    @property
    def bf16_from_step(self) -> int:
        """The first step that runs in bf16 whatever the recipe, rounded down; `steps` when there is none."""
        return self.steps - (math.ceil(self.last_fraction_bf16 * self.steps) if self.last_in == "steps" else 0)

    @property
    def bf16_blocks(self) -> range:
        """The last blocks, which run in bf16 whatever the recipe; rounded up."""
        count = math.ceil(self.last_fraction_bf16 * self.layers) if self.last_in == "blocks" else 0
        return range(self.layers - count, self.layers)

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        block = 4 * self.dim**2 + 3 * self.dim * self.hidden + 2 * self.dim
        return 2 * 256 * self.dim + self.layers * block + self.dim

    def checkpoint(self, name: str) -> Path:
        """The file of a run."""
        return self.folder / "checkpoints" / f"{name}.zip"

    def placement(self, recipe: Recipe | None) -> Placement:
        """The recipe on every block but the last ones that run in bf16."""
        return Placement([*((f"blocks.{index}.*", None) for index in self.bf16_blocks), ("blocks.*", recipe)])

    def has_recipe(self, layer: str) -> bool:
        """True for a layer that `placement` gives the recipe."""
        return layer.startswith("blocks.") and int(layer.split(".")[1]) not in self.bf16_blocks

    def learning_rate(self, step: int) -> float:
        """Linear warm-up over a tenth of the steps (1,000 at most), then a cosine down to a tenth of the peak."""
        warmup = min(max(1, self.steps // 10), 1000)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return self.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))

    def settings(self, run: str | None = None, corpus: str | None = None) -> dict[str, Any]:
        """Options that the losses depend on, for results.json; those of one run on a text, to compare checkpoints."""
        settings = {name: value for name, value in vars(self).items() if name not in NO_SETTINGS}
        if self.initial_weights is not None:
            settings["initial_weights"] = hashlib.sha256(self.initial_weights.read_bytes()).hexdigest()
        recipe = self.runs.get(run)
        return settings if run is None else {**settings, "recipe": recipe and recipe.to_dict(), "corpus": corpus}


def parse_options(
    arguments: list[str] | None, program: str, find_device: Callable[[str], tuple[Any, str, Any]], divides_cores: bool,
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Options:  # fmt: skip
    """Parse and check the command line. Raises InvalidValueError whose message names the flag.

    ``find_device(name)`` is the framework's: device, "cpu" or "cuda", and the GPU's name. `divides_cores`: several
    processes of the framework can have a core of a CPU each. `add_flags`: adds those of one example alone.
    """
    parser = make_parser(program)
    if add_flags is not None:
        add_flags(parser)
    parser.set_defaults(**PRESETS[parser.parse_args(arguments).preset])
    options = parser.parse_args(arguments, Options())
    for names, (holds, needed) in NEEDED.items():
        for name in names.split():
            value = getattr(options, name)
            if value is not None and not holds(value):
                raise invalid_value(f"--{name.replace('_', '-')}", value, needed)
    if options.dim % (2 * options.heads):
        needed = "a --dim that splits into --heads parts of even size (rotary positions turn pairs)"
        raise invalid_value("--dim, --heads", f"{options.dim} and {options.heads}", needed)
    try:
        options.device, options.device_type, options.gpu = find_device(options.device)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        got = f"{options.device!r} ({str(error).splitlines()[0]})"
        raise invalid_value("--device", got, "'auto', 'cpu', or a device of this machine") from None
    options.folder = options.out / (options.name or options.preset)
    options.runs = plan_runs(options.recipe or DEFAULT_RECIPES, options.ablate)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    alone = not divides_cores or options.device_type != "cpu"
    if alone and (options.jobs or 1) > 1:
        raise invalid_value("--jobs", options.jobs, "1: here a run has the whole machine")
    options.jobs = options.jobs or (1 if alone else min(len(options.runs), cores))
    return options


def plan_runs(names: Iterable[str], ablations: Iterable[str] = ()) -> dict[str, Recipe | None]:
    """The runs in order: the baseline always and first, then the recipes, then NVFP4 with one aid off each."""
    runs: dict[str, Recipe | None] = {BASELINE: None}
    for name in names:
        try:
            runs[name] = None if name in (BASELINE, BASELINE_AGAIN) else recipes.from_name(name)
        except InvalidValueError:
            raise unknown_name("--recipe", name, [BASELINE, BASELINE_AGAIN, *recipes.RECIPES]) from None
    for aid in ablations:
        if aid not in ABLATIONS:
            raise unknown_name("--ablate", aid, ABLATIONS)
        runs[f"nvfp4-no-{aid}"] = ABLATIONS[aid]
    return runs


def make_parser(program: str) -> argparse.ArgumentParser:
    """Every flag."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Train one small transformer in bf16 and under low-precision recipes, and compare the losses.",
        epilog="Sizes and settings not given come from the preset.",
    )

    def split(text: str) -> list[str]:
        return [name.strip() for name in text.split(",") if name.strip()]

    add = parser.add_argument
    # fmt: off
    add("--recipe", action="extend", type=split, metavar="NAME[,NAME]",
        help=f"what to train besides {BASELINE}: {', '.join(recipes.RECIPES)}, or {BASELINE_AGAIN}, the baseline from "
        f"slightly other parameters, which shows how far chance moves a run (default: {','.join(DEFAULT_RECIPES)})")
    add("--ablate", action="extend", type=split, default=[], metavar="AID[,AID]",
        help=f"also train NVFP4 with one aid off each: {', '.join(ABLATIONS)}")
    add("--last-fraction-bf16", type=float, default=0.0, metavar="F",
        help="run the last part in bf16 under every recipe, for instance 0.15")
    add("--last-in", choices=("steps", "blocks"), default="steps",
        help="the last part of the training steps, or of the model's blocks (default: steps)")
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
    add("--eval-windows", type=int, default=128, help="held-out windows that are evaluated (default: 128)")
    add("--corpus-bytes", type=int, default=16 * 2**20, help="read at most this much text (default: 16 MiB)")
    add("--device", default="auto", help="auto (cuda where there is one), cpu, cuda, cuda:1, ...")
    add("--compile", action="store_true", help="in torch: compile the model, which is faster on a GPU from the second "
        "minute on (JAX compiles every step anyway)")
    add("--jobs", type=int, metavar="N", help="train N runs at a time, each on one core of the CPU (default: as many "
        "as there are cores; on a GPU, and in JAX, one run after the other)")
    add("--name", help="results go to runs/NAME (default: the preset's name)")
    add("--out", type=Path, default=Path("runs"), help="the folder that holds NAME (default: runs)")
    add("--resume", action="store_true", help="continue what was interrupted, with the same losses bit for bit")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS",
        help="save this often, besides at the end and on Ctrl-C (default: 100)")
    add("--initial-weights", type=Path, metavar="FILE", help="start every run from these, of either example")
    add("--export-weights", type=Path, metavar="FILE", help="write the weights that the runs start from (safetensors)")
    add("--export-model", type=Path, metavar="FOLDER",
        help="write the weights that the last run has trained: a sharded bfloat16 checkpoint for `microfloat inspect`")
    add("--watch", type=int, metavar="STEPS", help="record every layer's metrics at every so many steps, as "
        "RECIPE_watch.csv and RECIPE_watch.png (docs/watching.md)")
    add("--record", type=Path, metavar="FILE",
        help="write x, w, dy and y of every quantized layer at the last run's first step (safetensors)")
    # fmt: on
    return parser
