"""Number lines: every value of an element format, and the gaps between neighbours."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from microfloat.formats import ELEMENTS, ElementFormat, decode
from microfloat.pictures.style import BLUE, CYCLE, ORANGE, clean, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HALF = 0.32  # half of the height of ticks, in rows
_LABEL = 0.027  # width of the label of a value, as a share of the axis
# Blue and orange are the values on a number line. Curves that hide each other differ in width and in dashes.
_CURVES = tuple(color for color in CYCLE if color not in (BLUE, ORANGE))
_WIDTHS, _DASHES = (3.0, 2.4, 1.9, 1.5, 1.1), ("-", "-", "--", ":")
_PERCENT = (1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def magnitudes(element: ElementFormat) -> np.ndarray:
    """All finite values >= 0 of an element format, ascending."""
    values = decode(np.arange(element.sign_code, dtype=np.uint8), element)
    return values[np.isfinite(values)].astype(np.float64)


def number_lines(elements: Sequence[ElementFormat] = tuple(ELEMENTS.values())) -> "Figure":
    """Every value of each element format: on a line up to its maximum, and over powers of two."""
    figure = new_figure(12, 1.3 + 0.7 * len(elements))
    linear, binary = figure.subplots(1, 2)
    _ticks(linear, elements, lambda values, element: values / element.max)
    _ticks(binary, elements, lambda values, element: np.log2(np.maximum(values, element.step / 2)))
    for row, element in enumerate(reversed(elements)):
        linear.vlines(0, row - _HALF, row + _HALF, color="black", linewidth=1.2)
        text = f"{len(magnitudes(element))} magnitudes\nmax {element.max:g}"
        binary.text(np.log2(element.max) + 0.7, row, text, va="center", size=8)
    title = "how dense: evenly spaced inside a power of two, twice as far in the next"
    linear.set(xlabel="value / maximum", title=title)
    low = min(np.log2(element.step) for element in elements)
    high = max(np.log2(element.max) for element in elements)
    binary.set(xlim=(low - 1.5, high + 0.5 + 0.15 * (high - low) + 2))
    binary.set(xlabel="log2 of the value", title="how wide: exponent bits buy range")
    binary.plot([], [], color=BLUE, label="normal")
    binary.plot([], [], color=ORANGE, label="subnormal")
    figure.legend(*binary.get_legend_handles_labels(), frameon=False, loc="outside lower right", ncols=2)
    return figure


def _ticks(axes: "Axes", elements: Sequence[ElementFormat], position) -> None:
    """Draw a row of ticks for each element format, the first on top."""
    for row, element in enumerate(reversed(elements)):
        values = magnitudes(element)
        normal = values >= element.min_normal
        for mask, color in ((normal, BLUE), (~normal & (values > 0), ORANGE)):
            places = position(values, element)[mask]
            axes.vlines(places, row - _HALF, row + _HALF, color=color, linewidth=0.9)
    axes.set_yticks(range(len(elements)), [element.name for element in reversed(elements)])
    axes.tick_params(left=False)
    axes.set_ylim(-0.6, len(elements) - 0.4)
    clean(axes, "left")


def relative_gaps(elements: Sequence[ElementFormat] = tuple(ELEMENTS.values())) -> "Figure":
    """A number line per element format on a log axis, and below it the gap around each value, relative to the value."""
    figure = new_figure(10, 3.6 + 0.55 * len(elements))
    lines, gaps = figure.subplots(2, 1, sharex=True, height_ratios=(max(1.2, 0.55 * len(elements)), 2.6))
    _ticks(lines, elements, lambda values, element: np.log2(np.maximum(values, element.step / 2)))
    lines.tick_params(labelbottom=False)
    shown: list[float] = []
    for number, element in enumerate(elements):
        values = magnitudes(element)[1:]
        upper = np.diff(values)
        gaps.step(
            np.log2(values), 100 * np.append(upper / values[:-1], np.nan), where="post",
            color=_CURVES[number % len(_CURVES)],
            linewidth=_WIDTHS[min(number, len(_WIDTHS) - 1)] if len(elements) > 1 else 1.5,
            linestyle=_DASHES[number % len(_DASHES)],
            label=f"{element.name}: $2^{{{np.log2(element.step):g}}}$ to {element.max:g}",
        )  # fmt: skip
        shown += (100 * upper / values[:-1]).tolist()
    low, high = (min(shown), max(shown)) if shown else (5, 100)
    gaps.set(yscale="log", ylim=(low / 1.25, high * 1.25), xlabel="value", ylabel="gap to the next value, % of it")
    gaps.set_yticks([tick for tick in _PERCENT if low / 1.25 <= tick <= high * 1.25])
    gaps.minorticks_off()
    gaps.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    gaps.xaxis.get_major_locator().set_params(integer=True)
    gaps.xaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    gaps.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
    gaps.grid(axis="y", alpha=0.3)
    clean(gaps)
    for row, element in enumerate(reversed(elements)):
        values, above = magnitudes(element)[1:], np.inf
        for value in values[::-1] if len(values) < 12 else ():
            if above - np.log2(value) >= _LABEL * np.ptp(lines.get_xlim()):
                above = np.log2(value)
                lines.text(above, row + _HALF + 0.05, f"{value:g}", ha="center", size=8)
    lines.set_title("Every magnitude of the format (orange: subnormal)", size=11)
    return figure
