"""Report of a run: progress, the table, loss_curves.png and results.json."""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from gpt.data import Corpus
from gpt.files import Arrays, write_atomically
from gpt.options import BASELINE, Options
from microfloat import metrics, reference
from microfloat.cli.machine import processor
from microfloat.pictures.style import DPI, clean, colors_of, new_figure
from microfloat.recipes import Recipe


@dataclass
class Result:
    """One run so far. Losses are nats per byte; `final_*` stay None until the run has ended."""

    train_loss: list[float] = field(default_factory=list)
    final_train: float | None = None
    final_heldout: float | None = None
    underflow: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Trained to the last step, and evaluated."""
        return self.final_heldout is not None


Results = dict[str, Result]  # by the run's name


def underflow(layers: dict[str, Arrays], recipe: Recipe | None) -> dict[str, float]:
    """Share of the elements of x, w and dy, over all layers, that the recipe flushes to zero: what a GEMM loses."""
    shares = {}
    for operand, gemm, side in (("x", "fprop", "lhs"), ("w", "fprop", "rhs"), ("dy", "dgrad", "lhs")):
        cast = None if recipe is None else recipe.cast(gemm, side)
        before, after = [np.empty(0)], [np.empty(0)]
        for arrays in layers.values():
            rounded = arrays[operand]
            if cast is not None:  # by the oracle, which writes the bytes that the layer wrote
                seed, scale = 0 if cast.is_stochastic else None, arrays.get(f"{operand}_scale")
                rounded = reference.dequantize(reference.quantize(rounded, cast, seed=seed, scale_enc=scale))
            before.append(arrays[operand].ravel())
            after.append(rounded.ravel())
        shares[operand] = metrics.underflow(np.concatenate(before), np.concatenate(after))
    return shares


class Display(Progress):
    """A bar per run with loss, speed and time left."""

    def __init__(self, names: list[str], steps: int, tokens_per_step: int, console: Any) -> None:
        text = TextColumn("loss {task.fields[loss]:>6}  {task.fields[speed]:>7} tokens/s")
        clock = TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(compact=True)
        name = TextColumn("{task.description:<14}")
        super().__init__(name, BarColumn(bar_width=30), MofNCompleteColumn(), text, *clock, console=console)
        self.tokens = tokens_per_step
        self.bars = {name: self.add_task(name, start=False, total=steps, loss="", speed="") for name in names}

    def show(self, step: tuple[str, int, float | None]) -> None:
        """Show that a run has done so many steps, the last one with this loss."""
        name, count, loss = step
        self.start_task(self.bars[name])
        speed = f"{(self.tasks[self.bars[name]].speed or 0) * self.tokens:,.0f}"
        self.update(self.bars[name], completed=count, loss="" if loss is None else f"{loss:.3f}", speed=speed)


def gap_to_baseline(results: Results, name: str) -> float | None:
    """Held-out loss minus the baseline's; None while either is missing."""
    ours, baseline = (results[run].final_heldout if run in results else None for run in (name, BASELINE))
    return None if ours is None or baseline is None else ours - baseline


def make_table(results: Results, title: str) -> Table:
    """The summary, one row per run."""
    caption = (
        "Losses in nats per byte. train: mean over the last tenth of the steps; gap: held-out minus bf16's (the recipe "
        "bf16_again shows how much of a gap is chance). x, w, dy: share of each operand's values that the "
        "recipe flushes to zero."
    )
    table = Table(title=title, caption=caption, caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("recipe", "train", "held-out", "gap to bf16", "x", "w", "dy", "time"):
        table.add_column(heading, justify="left" if heading == "recipe" else "right", no_wrap=True)
    for name, result in results.items():
        losses = ["-" if loss is None else f"{loss:.3f}" for loss in (result.final_train, result.final_heldout)]
        gap = gap_to_baseline(results, name)
        shown = "-" if gap is None else f"{gap:+.3f} ({gap / results[BASELINE].final_heldout:+.1%})" if gap else "0"
        flushed = [f"{result.underflow[operand]:.1%}" if result.underflow else "-" for operand in ("x", "w", "dy")]
        table.add_row(name, *losses, shown, *flushed, f"{result.seconds:.0f} s")
    return table


def write(options: Options, corpus: Corpus, results: Results, complete: bool, console: Console) -> None:
    """The table, the picture and results.json, of whatever there is so far; a loss that is no number becomes null."""
    title = f"{options.preset}, {options.steps} steps" + ("" if complete else " (not finished)")
    picture, numbers = options.folder / "loss_curves.png", options.folder / "results.json"
    recipes = {name: {**asdict(run), "gap_to_bf16": gap_to_baseline(results, name)} for name, run in results.items()}
    config = {**options.settings(), "runs": {name: repr(recipe) for name, recipe in options.runs.items()}}
    sizes = {"train_bytes": len(corpus.train), "held_out_bytes": len(corpus.held_out)}
    text = {"files": corpus.files, **sizes, "sha256": corpus.digest}
    facts = {"recipes": recipes, "complete": complete, "config": config, "corpus": text, **environment(options)}
    finite = json.loads(json.dumps(facts), parse_constant=lambda name: None)
    write_atomically(numbers, lambda temporary: temporary.write_text(json.dumps(finite, indent=1) + "\n", "utf-8"))
    draw_curves(picture, results, title)
    console.print(make_table(results, title), f"Written: {picture}, {numbers}")


def draw_curves(path: Path, results: Results, title: str) -> None:
    """Left: training loss over steps. Right: how far each recipe lies above bf16, step by step, on the same batches."""
    losses = {name: result.train_loss for name, result in results.items()}
    window = max([1, *(len(values) // 20 for values in losses.values())])
    figure = new_figure(12, 4.6)
    left, right = figure.subplots(1, 2)
    colors = colors_of(losses)
    for name, values in losses.items():
        style = {"color": colors[name], "label": name}
        left.plot(np.arange(len(values)) + 1, values, color=style["color"], alpha=0.15, linewidth=0.8)
        if name == BASELINE:  # dashed and on top, since the curves lie close together
            style |= {"linestyle": "--", "linewidth": 1, "zorder": 3}
        smoothed(left, values, window, **style)
    left.set(xlabel="step", ylabel="training loss (nats per byte)", title="loss")
    started = [max(values[len(values) // 20 :], default=0.0) for values in losses.values()]
    if len(losses[BASELINE]) >= 40 and np.isfinite(started).all():  # the first drop would be all that is seen
        left.set_ylim(top=max(started))
    left.legend(title=f"mean over {window} steps" if window > 1 else None, frameon=False)
    loss_gap(right, losses, BASELINE, window)
    right.set_title("gap to bf16, same batches")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        clean(axes)
    figure.suptitle(title)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=DPI))


def environment(options: Options) -> dict[str, dict[str, Any]]:
    """Machine and versions of a run, as far as they bear on speed and bits."""
    machine = {
        "processor": processor(), "cores": os.cpu_count(), "device": str(options.device),
        "gpu": options.gpu, "runs_at_a_time": options.jobs, "system": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip
    if hasattr(options, "tp"):
        machine["ranks"] = f"{options.dp} x {options.tp}"
    packages = {
        name: sys.modules.get(name) for name in ("microfloat", "numpy", "torch", "triton", "jax", "flax", "optax")
    }
    versions = {name: str(package.__version__) for name, package in packages.items() if package is not None}
    return {"machine": machine, "versions": {"python": platform.python_version(), **versions}}


def describe_changes(then: dict[str, Any], now: dict[str, Any]) -> str:
    """The facts that two environments give differently, in words; "" if there are none.

    A package that only one of them names was not imported yet.
    """
    before, after = ({**facts["machine"], **facts["versions"]} for facts in (then, now))
    return ", ".join(f"{name} {before[name]} (now {after[name]})" for name in before
                     if name in after and before[name] != after[name])  # fmt: skip


def smoothed(axes: Any, values: Sequence[float] | np.ndarray, window: int, **style: Any) -> None:
    """The mean over `window` values around each; the ends, which have no whole window, are left out."""
    if len(values) >= window:
        means = np.convolve(values, np.full(window, 1 / window), mode="valid")
        axes.plot(np.arange(len(means)) + (window + 1) / 2, means, **style)


def loss_gap(axes: Any, losses: Mapping[str, Sequence[float]], baseline: str, window: int = 1) -> None:
    """Each run's loss minus the baseline's, step by step; the legend names the smoothing."""
    reference = np.asarray(losses.get(baseline, ()), float)
    colors = colors_of(losses)
    for name, own in losses.items():
        if name == baseline:
            continue
        color = colors[name]
        common = min(len(own), len(reference))
        smoothed(axes, np.asarray(own[:common], float) - reference[:common], window, color=color, label=name)
    axes.axhline(0, color="black", linestyle="--", linewidth=1, label=baseline)
    axes.set(xlabel="step", ylabel=f"loss - {baseline}'s")
    axes.legend(title=f"mean over {window} steps" if window > 1 else None, frameon=False)
