"""Pictures of what `mf.watch` recorded: records in, a Figure out. A record has the fields of `mf.Record`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from microfloat.pictures.style import BLUE, CYCLE, GREEN, ORANGE, SUFFIXES, clean, new_figure, save

# Colours of each operand: in the recipe's format, then in formats that are not in use.
_OPERANDS = {
    "x": (BLUE, "#56B4E9", "#1B3A57"), "w": (GREEN, "#B8A900", "#004D38"), "dy": (ORANGE, "#CC79A7", "#8C510A"),
}  # fmt: skip
SHOWN_BINADES = 12  # below them stand too few elements for a median


def _of(records: Sequence[Any], metric: str) -> list[Any]:
    return [one for one in records if one.metric == metric]


def _legend(axes: Any, **options: Any) -> None:
    """Draw the legend below the axes, where it covers no line, unless nothing was recorded."""
    if entries := axes.get_legend_handles_labels()[0]:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22), "ncols": min(3, len(entries)), **options}
        axes.legend(frameon=False, fontsize=8, handlelength=1.2, columnspacing=1.0, **place)


def _colors(names: Sequence[tuple[str, str]]) -> list[str]:
    """The colour of each (operand, format)."""
    seen: dict[str, int] = {}
    found = []
    for number, (operand, _) in enumerate(names):
        own, at = _OPERANDS.get(operand, ()), seen.setdefault(operand, 0)
        found.append(own[at] if at < len(own) else CYCLE[number % len(CYCLE)])
        seen[operand] += 1
    return found


def error_heatmap(axes: Any, records: Sequence[Any]) -> None:
    """The error of the worst GEMM of every layer at every step, as a multiple of that of normal data in its formats."""
    expected = {one[:5]: one.value for one in _of(records, "expected_error")}
    found = [one for one in _of(records, "relative_error") if expected.get(one[:5])]
    steps, modules = sorted({one.step for one in found}), list(dict.fromkeys(one.module for one in found))
    grid = np.full((len(modules), len(steps)), np.nan)
    for one in found:
        at = modules.index(one.module), steps.index(one.step)
        grid[at] = np.fmax(grid[at], one.value / expected[one[:5]])
    axes.set(title="error of the worst GEMM of each layer", xlabel="step")
    if not grid.size:
        return
    top = max(2.0, float(np.nanmax(grid, where=np.isfinite(grid), initial=0.0)))
    image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="Reds", vmin=1, vmax=top)
    axes.figure.colorbar(image, ax=axes, label="times that of normal data")
    columns = range(0, len(steps), max(1, len(steps) // 6))
    axes.set_xticks(list(columns), [str(steps[column]) for column in columns])
    rows = range(0, len(modules), max(1, len(modules) // 16))
    axes.set_yticks(list(rows), [modules[row] or "(root)" for row in rows], fontsize=7)


def flushed(axes: Any, records: Sequence[Any]) -> None:
    """Underflow and clip over steps, the mean over layers: a line for each operand and format."""
    lines: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for metric in ("underflow", "clip"):
        for one in _of(records, metric):
            lines.setdefault((metric, one.operand, one.format), {}).setdefault(one.step, []).append(one.value)
    names = list(dict.fromkeys(key[1:] for key in lines))
    colors = dict(zip(names, _colors(names), strict=True))
    for (metric, operand, fmt), values in lines.items():
        steps = sorted(values)
        shares = [100 * float(np.mean(values[step])) for step in steps]
        color, is_underflow = colors[operand, fmt], metric == "underflow"
        label = f"{operand} {fmt}" if is_underflow else None
        axes.plot(steps, shares, marker=".", color=color, linestyle="-" if is_underflow else ":", label=label)
    axes.set(title="underflow (solid) and clip (dotted)", xlabel="step", ylabel="% of elements, mean over layers")
    _legend(axes)
    top = max(1.0, axes.get_ylim()[1])
    axes.set_ylim(-0.04 * top, top)  # a line at zero is seen above the axis


def amax_ribbon(axes: Any, records: Sequence[Any]) -> None:
    """amax over steps: the median over layers, and the ribbon from their 5th to their 95th percentile."""
    _ribbons(axes, _of(records, "amax"), {})
    axes.set(title="amax", xlabel="step", ylabel="median, p5 to p95 of layers", yscale="log")


def gemm_error(axes: Any, records: Sequence[Any]) -> None:
    """Relative error of y, dx and dw over steps: the median over layers, and the ribbon of their percentiles."""
    _ribbons(axes, _of(records, "relative_error"), {"y": "y (fprop)", "dx": "dx (dgrad)", "dw": "dw (wgrad)"})
    axes.set(title="relative error of the GEMMs", xlabel="step", ylabel="median, p5 to p95 of layers")
    axes.set_ylim(bottom=0)


def _ribbons(axes: Any, records: Sequence[Any], labels: dict[str, str]) -> None:
    values: dict[str, dict[int, list[float]]] = {}
    for one in records:
        values.setdefault(one.operand, {}).setdefault(one.step, []).append(one.value)
    for number, (operand, by_step) in enumerate(values.items()):
        color = _OPERANDS.get(operand, (CYCLE[number % len(CYCLE)],))[0]
        steps = sorted(by_step)
        low, middle, high = np.array([np.percentile(by_step[step], [5, 50, 95]) for step in steps]).T
        axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        axes.plot(steps, middle, color=color, marker=".", label=labels.get(operand, operand))
    _legend(axes)


def _of_last_step(records: Sequence[Any], metric: str) -> tuple[int, dict[tuple[str, str], list[Any]]]:
    """The last step that has a metric, and its values there: of all layers, by operand and format."""
    found = _of(records, metric)
    last = max((one.step for one in found), default=0)
    values: dict[tuple[str, str], list[Any]] = {}
    for one in found:
        if one.step == last:
            values.setdefault((one.operand, one.format), []).append(one.value)
    return last, values


def scale_histogram(axes: Any, records: Sequence[Any]) -> None:
    """Block scales at the last step by powers of two: a line for each operand and format, the mean over layers."""
    last, found = _of_last_step(records, "scale_histogram")
    for color, (name, histograms) in zip(_colors(list(found)), found.items(), strict=True):
        layers = [dict(zip(one.exponents, one.fractions, strict=True)) for one in histograms]
        seen = {exponent for shares in layers for exponent in shares}
        exponents = range(min(seen) - 1, max(seen) + 2) if seen else ()
        heights = [100 * sum(shares.get(exponent, 0.0) for shares in layers) / len(layers) for exponent in exponents]
        axes.step(exponents, heights, where="mid", color=color, label=" ".join(name))
    axes.set(title=f"scales at step {last}", xlabel="log2 of the scale", ylabel="% of blocks")
    _legend(axes)


def error_by_magnitude(axes: Any, records: Sequence[Any]) -> None:
    """Relative error of elements by binades below the largest one, at the last step: the median over layers."""
    last, found = _of_last_step(records, "error_by_magnitude")
    for color, (name, rows) in zip(_colors(list(found)), found.items(), strict=True):
        table = np.array(rows)[:, :SHOWN_BINADES]
        columns = np.flatnonzero(np.isfinite(table).any(0))
        axes.plot(-columns, 100 * np.nanmedian(table[:, columns], 0), color=color, marker=".", label=" ".join(name))
    # Logarithmic: the inverse of a Hadamard transform spreads the error of a group over its small elements.
    axes.set(title=f"error against magnitude at step {last}", xlabel="log2(|x| / amax)", yscale="log")
    axes.set_ylabel("relative error, %")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes)


PICTURES: dict[str, Callable[[Any, Sequence[Any]], None]] = {
    "layers": error_heatmap, "flushed": flushed, "amax": amax_ribbon, "scales": scale_histogram,
    "error": error_by_magnitude, "gemms": gemm_error,
}  # fmt: skip


def sheet(records: Sequence[Any]) -> Any:
    """A Figure of all pictures."""
    figure = new_figure(16, 9)
    for axes, picture in zip(figure.subplots(2, 3).flat, PICTURES.values(), strict=True):
        picture(axes, records)
        clean(axes)
    return figure


def draw(records: Sequence[Any], path: Path) -> list[Path]:
    """Every picture on one sheet (a path that ends in .png, .svg or .pdf), or each in a file of a folder."""
    if path.suffix.lower() in SUFFIXES:
        return [save(sheet(records), path)]
    path.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, picture in PICTURES.items():
        figure = new_figure(7, 4)
        picture(axes := figure.subplots(), records)
        clean(axes)
        paths.append(save(figure, path / f"{name}.png"))
    return paths
