"""A checkpoint at a glance: SQNR by layer and format, bits, magnitudes, exponents of scales."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from microfloat.pictures.style import BLUE, CYCLE, GREY, ORANGE, clean, colors_of, new_figure, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
_MOST_TEXTS = 250  # cells of a heat map with their figures in them
_MOST_ROWS = 60
_MOST_PANELS = 5  # of the usual width


@dataclass(frozen=True)
class Layer:
    """Figures of one parameter in the pictures: amax, crest factor, and decibels by format."""

    name: str
    amax: float
    crest: float
    sqnr_db: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """The number of its block: the first number in the name, 0 without one."""
        found = _NUMBER.search(self.name)
        return int(found[0]) if found else 0

    @property
    def kind(self) -> str:
        """The name of the layer after the number of its block."""
        found = _NUMBER.search(self.name)
        return self.name[found.end() + 1 if found else 0 :].removesuffix(".weight")


def overview(
    layers: Sequence[Layer], bits: Mapping[str, float], exponents: Mapping[str, Mapping[int, float]], title: str
) -> "Figure":
    """Heat map of SQNR where `layers` have some; below it bits, amax against crest factor, and exponents of scales."""
    formats = list(dict.fromkeys(name for layer in layers for name in layer.sqnr_db))
    kinds = list(dict.fromkeys(layer.kind for layer in layers))
    rows = min(len(kinds), _MOST_ROWS)
    height = 0.32 * rows + 1.5 if formats else 0.0
    figure = new_figure(13 + 2.4 * max(len(formats) - _MOST_PANELS, 0), 4.1 + height)
    figure.suptitle(title, size=12)
    if formats:
        parts = figure.subfigures(2, 1, height_ratios=(height, 4.2), squeeze=False)[:, 0]
        _heat_map(parts[0], layers, kinds, formats)
        below = parts[1]
    else:
        below = figure
    bars, scatter, histogram = below.subplots(1, 3, width_ratios=(1, 1.15, 1))
    _bars(bars, bits)
    _scatter(scatter, layers, kinds)
    _histogram(histogram, exponents)
    return figure


def _heat_map(figure: "Figure", layers: Sequence[Layer], kinds: Sequence[str], formats: Sequence[str]) -> None:
    """Draw a panel for each format: kinds of layers down, blocks across; a frame around its worst cell."""
    numbers = sorted({layer.index for layer in layers})
    place = {number: column for column, number in enumerate(numbers)}
    cubes = np.full((len(formats), len(kinds), len(numbers)), np.nan)
    for layer in layers:
        for i, name in enumerate(formats):
            value = layer.sqnr_db.get(name)
            if value is not None:
                cubes[i, kinds.index(layer.kind), place[layer.index]] = -np.inf if np.isnan(value) else value
    finite = cubes[np.isfinite(cubes)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    panels = figure.subplots(1, len(formats), sharey=True, squeeze=False)[0]
    small = cubes.size <= _MOST_TEXTS
    for panel, name, cells in zip(panels, formats, cubes, strict=True):
        panel.imshow(cells, aspect="auto", vmin=low, vmax=max(high, low + 1), interpolation="nearest")
        shown = cells[np.isfinite(cells)]
        panel.set_title(f"{name}\nmedian {np.median(shown):.1f} dB" if shown.size else name, size=10)
        panel.set_xlabel("block")
        step = max(1, -(-len(numbers) // 6))
        panel.set_xticks(range(0, len(numbers), step), [str(number) for number in numbers[::step]], size=8)
        panel.tick_params(length=0)
        for (row, column), value in np.ndenumerate(cells):
            if small and not np.isnan(value):
                color = "white" if np.isfinite(value) and value <= low + 0.6 * (high - low) else "black"
                text = "=" if value == np.inf else f"{value:.1f}" if np.isfinite(value) else "nan"
                panel.text(column, row, text, ha="center", va="center", size=7.5, color=color)
        if shown.size and np.count_nonzero(~np.isnan(cells)) > 1:
            row, column = np.unravel_index(np.nanargmin(cells), cells.shape)
            across, down = np.array([[-1, 1, 1, -1, -1], [-1, -1, 1, 1, -1]]) / 2
            panel.plot(column + across, row + down, color=ORANGE, linewidth=2, clip_on=False)
        clean(panel, "left", "bottom")
    step = -(-len(kinds) // _MOST_ROWS)
    panels[0].set_yticks(range(0, len(kinds), step), [short(kind) for kind in kinds][::step], size=9)
    figure.colorbar(panels[0].images[0], ax=panels, pad=0.01, label="SQNR, dB (worst: orange frame)")


def _bars(axes: "Axes", bits: Mapping[str, float]) -> None:
    names = list(bits)
    axes.barh(range(len(names)), [bits[name] for name in names], 0.7, color=[GREY, *[BLUE] * len(names)][: len(names)])
    for row, name in enumerate(names):
        axes.text(bits[name], row, f" {bits[name]:.3g}", va="center", size=9)
    axes.set_yticks(range(len(names)), names, size=9)
    axes.invert_yaxis()
    axes.set(xlabel="bits per parameter, scales included", title="size", xlim=(0, 1.15 * max(bits.values(), default=1)))
    clean(axes)


def _scatter(axes: "Axes", layers: Sequence[Layer], kinds: Sequence[str]) -> None:
    """Draw every layer by its amax and crest factor, outliers with their names."""
    from matplotlib.ticker import LogLocator

    shown = [layer for layer in layers if layer.amax > 0]
    for number, kind in enumerate(kinds):
        points = [(layer.amax, layer.crest) for layer in shown if layer.kind == kind]
        if points:
            label = short(kind) if len(kinds) <= len(CYCLE) else None
            axes.scatter(*zip(*points, strict=True), s=22, alpha=0.8, color=CYCLE[number % len(CYCLE)], label=label)
    top = 1.3 * max((layer.crest for layer in shown), default=1.0)
    axes.set(xscale="log", xlabel="amax", ylabel="crest factor: amax / rms", title="outliers", ylim=(0, top))
    axes.minorticks_off()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    usual = float(np.median([layer.crest for layer in shown])) if shown else 0.0
    for layer in sorted(shown, key=lambda layer: -layer.crest)[:3]:
        if layer.crest > 1.5 * usual:
            label, place = short(layer.name.removesuffix(".weight")), (layer.amax, layer.crest)
            axes.annotate(label, place, xytext=(0, 6), textcoords="offset points", size=7, ha="center")
    if len(kinds) <= len(CYCLE) and shown:
        axes.legend(fontsize=7, framealpha=0.6, loc="lower right")  # few crest factors are as small as 2
    axes.margins(x=0.15)
    axes.grid(alpha=0.3)
    clean(axes)


def _histogram(axes: "Axes", exponents: Mapping[str, Mapping[int, float]]) -> None:
    """Draw the share of block scales in each power of two."""
    from matplotlib.ticker import MaxNLocator

    colors = colors_of(exponents)
    for name, shares in exponents.items():
        if shares:
            places = np.arange(min(shares) - 1, max(shares) + 2)
            heights = [100 * shares.get(int(place), 0.0) for place in places]
            axes.step(places, heights, where="mid", color=colors[name], label=name)
    axes.set(xlabel="block scale", ylabel="% of the scales", title="exponents of block scales")
    axes.set_ylim(0, 1.3 * max([axes.get_ylim()[1], 1.0]))
    axes.set_yticks([share for share in axes.get_yticks() if share <= 100])
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    if exponents:
        axes.legend(fontsize=8, framealpha=0.6, loc="upper center")
    axes.grid(alpha=0.3)
    clean(axes)
