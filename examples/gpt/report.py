"""What a run leaves behind: the progress bar, the table, loss_curves.png and results.json."""

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import microfloat
from gpt.files import write_atomically

__all__ = ["Result", "draw_curves", "machine", "make_progress", "make_table", "versions", "write_results"]

BASELINE = "bf16"
# Okabe and Ito's palette, which stays apart for colour-blind readers; the baseline is black.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C510A", "#542788")


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

    def finish(self, heldout: float) -> None:
        """Set the final losses; a batch is noisy, so the training loss is the mean over the last tenth of the steps."""
        self.final_train = float(np.mean(self.train_loss[-max(1, len(self.train_loss) // 10) :]))
        self.final_heldout = heldout


def gap_to_baseline(results: Mapping[str, Result], name: str) -> float | None:
    """Held-out loss minus the baseline's; None while either is missing."""
    ours, baseline = results[name].final_heldout, results[BASELINE].final_heldout if BASELINE in results else None
    return None if ours is None or baseline is None else ours - baseline


def make_progress(console) -> Progress:
    """A bar per run with loss, speed and time left; fields `loss` and `speed` are set by the training loop."""
    return Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:>6}"),
        TextColumn("{task.fields[speed]:>7} tokens/s"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(compact=True),
        console=console,
    )


def make_table(results: Mapping[str, Result], title: str) -> Table:
    """The summary, one row per run."""
    table = Table(
        title=title,
        caption="Losses in nats per byte. train: mean over the last tenth of the steps; gap: held-out minus bf16's "
        "(the recipe bf16_again shows how much of a gap is chance). x, w, dy: share of each operand's non-zero values "
        "that the recipe flushes to zero.",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("recipe", "train", "held-out", "gap to bf16", "x", "w", "dy", "time"):
        table.add_column(heading, justify="left" if heading == "recipe" else "right", no_wrap=True)
    for name, result in results.items():
        gap = gap_to_baseline(results, name)
        if gap is None:
            gap_text = "-"
        elif name == BASELINE:
            gap_text = "0"
        else:
            gap_text = f"{gap:+.3f} ({gap / results[BASELINE].final_heldout:+.1%})"
        flushed = [f"{result.underflow[operand]:.1%}" if result.underflow else "-" for operand in ("x", "w", "dy")]
        table.add_row(
            name, _loss_text(result.final_train), _loss_text(result.final_heldout), gap_text, *flushed,
            f"{result.seconds:.0f} s",
        )  # fmt: skip
    return table


def _loss_text(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def write_results(path: Path, results: Mapping[str, Result], **facts: Any) -> None:
    """results.json: ``{"recipes": {name: {...}}, **facts}``; a loss that is no number becomes null."""
    entries = {name: asdict(result) for name, result in results.items()}
    for name, entry in entries.items():
        entry["gap_to_bf16"] = gap_to_baseline(results, name)
    text = json.dumps(_finite({"recipes": entries, **facts}), indent=1, allow_nan=False)
    write_atomically(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw_curves(path: Path, results: Mapping[str, Result], title: str) -> None:
    """Left: training loss over steps. Right: how far each recipe lies above bf16, step by step, on the same batches."""
    from matplotlib.figure import Figure

    longest = max((len(result.train_loss) for result in results.values()), default=0)
    window = max(1, longest // 20)
    baseline = results[BASELINE].train_loss if BASELINE in results else []
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = iter(_COLORS * (1 + len(results) // len(_COLORS)))
    for name, result in results.items():
        is_baseline = name == BASELINE
        color = "black" if is_baseline else next(colors)
        losses = np.array(result.train_loss)
        left.plot(*_smooth(losses, 1), color=color, alpha=0.15, linewidth=0.8)
        # Dashed and on top, since the curves lie close together.
        style = {"linestyle": "--", "linewidth": 1, "zorder": 3} if is_baseline else {"linewidth": 1.6}
        left.plot(*_smooth(losses, window), color=color, label=name, **style)
        common = min(len(baseline), len(losses))
        if not is_baseline and common:
            right.plot(*_smooth(losses[:common] - np.array(baseline[:common]), window), color=color, label=name)
    right.axhline(0, color="black", linestyle="--", linewidth=1, label=BASELINE)
    left.set(xlabel="step", ylabel="training loss (nats per byte)", title="loss")
    right.set(xlabel="step", ylabel="training loss - bf16's", title="gap to bf16, same batches")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(title=f"mean over {window} steps" if window > 1 else None, frameon=False)
    figure.suptitle(title)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=130))


def _smooth(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(steps from 1, mean over the `window` values around each); the ends, which have no whole window, are left out."""
    if len(values) < window:
        return np.empty(0), np.empty(0)
    means = np.convolve(values, np.full(window, 1 / window), mode="valid")
    return np.arange(len(means)) + (window + 1) / 2, means


def machine(**facts: Any) -> dict[str, Any]:
    """What the run ran on, as far as it bears on speed and bits; `facts` are the framework's own."""
    return {
        "processor": _processor_name(), "cores": os.cpu_count(), **facts,
        "system": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip


def _processor_name() -> str:
    """The processor's own name on Linux, where `platform.processor` is often empty."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def versions(*packages: str) -> dict[str, str]:
    """Versions of what computes: Python, microfloat, and those of `packages` that are installed."""
    found = {"python": platform.python_version(), "microfloat": microfloat.__version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
