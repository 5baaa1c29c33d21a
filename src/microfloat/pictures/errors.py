"""Error against magnitude: how large the error of a value is, by how large the value is."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from microfloat.pictures.style import BLUE, GREY, ORANGE, clean, new_figure, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST, _MOST, _PER_BINADE = -40, 24, 4  # magnitudes, in powers of two
_LEAST_ERROR, _MOST_ERROR = -14, 2  # relative errors, in powers of two
_WORST = 12
_LEAST_SHARE = 1e-3  # of the elements of the most frequent magnitude: others with fewer elements have no median


class ErrorCounts:
    """Counts of elements by the magnitude of the value and of its relative error; filled a window at a time."""

    def __init__(self) -> None:
        self.counts = np.zeros(((_MOST - _LEAST) * _PER_BINADE, (_MOST_ERROR - _LEAST_ERROR) * _PER_BINADE), np.int64)
        self.exact = np.zeros(len(self.counts), np.int64)

    def add(self, x: np.ndarray, error: np.ndarray) -> None:
        """Count the elements of finite x that are not zero; elements beyond the picture count at its border."""
        size, wrong = np.abs(x, dtype=np.float64), np.abs(error)
        seen = (size > 0) & np.isfinite(wrong)
        size, wrong = size[seen], wrong[seen]
        column = np.clip(((np.log2(size) - _LEAST) * _PER_BINADE).astype(int), 0, len(self.counts) - 1)
        exact = wrong == 0
        self.exact += np.bincount(column[exact], minlength=len(self.exact))
        relative = np.log2(wrong[~exact]) - np.log2(size[~exact])
        # Bins have powers of two in their middle: values that become zero have an error of exactly 1.
        row = np.clip(np.rint((relative - _LEAST_ERROR) * _PER_BINADE).astype(int), 0, self.counts.shape[1] - 1)
        place = column[~exact] * self.counts.shape[1] + row
        self.counts += np.bincount(place, minlength=self.counts.size).reshape(self.counts.shape)


def error_against_magnitude(
    counts: ErrorCounts, sqnr_db: Mapping[str, float], threshold: float | None = None
) -> "Figure":
    """Left: density of relative errors by magnitude, their median, and the share of exact values. Right: the worst
    tensors by SQNR, with the threshold, on an axis that does not begin at zero."""
    figure = new_figure(13, 5.2)
    from matplotlib.colors import LogNorm

    density, bars = figure.subplots(1, 2, width_ratios=(1.5, 1))
    total = counts.counts.sum(1)
    used = np.flatnonzero(total + counts.exact)
    first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    edges = _LEAST + np.arange(first, last + 1) / _PER_BINADE
    heights = _LEAST_ERROR + (np.arange(counts.counts.shape[1] + 1) - 0.5) / _PER_BINADE
    shown = counts.counts[first:last].T
    if shown.any():
        mesh = density.pcolormesh(edges, heights, np.where(shown, shown, np.nan), norm=LogNorm(), cmap="Blues")
        figure.colorbar(mesh, ax=density, label="elements", pad=0.01)
        least = _LEAST_SHARE * total.max()
        middle = np.array([_median(line, heights, least) for line in counts.counts[first:last]])
        centres = (edges[:-1] + edges[1:]) / 2
        density.plot(centres, middle, color=ORANGE, linewidth=1.8, label="median of what is not exact")
        density.set_ylim(heights[np.flatnonzero(shown.any(1))[0]] - 1, _MOST_ERROR - 0.5)
        density.legend(loc="lower left", fontsize=9)
    share = float(counts.exact.sum() / max((counts.exact + total).sum(), 1))
    density.set_title(f"error against magnitude; {share:.1%} are exact")
    density.set(xlabel="magnitude in A", ylabel="relative error in B")
    for which in (density.xaxis, density.yaxis):
        which.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    density.axhline(0, color=GREY, linewidth=0.8, linestyle="--")
    worst = sorted(sqnr_db.items(), key=lambda item: (item[1] == item[1], item[1]))[:_WORST]
    names = [short(name.removesuffix(".weight")) for name, _ in worst]
    values = [value if np.isfinite(value) else 0.0 for _, value in worst]
    # Dots on an axis that is cut: bars from zero look all alike.
    colors = [ORANGE if threshold and value < threshold else BLUE for value in values]
    bars.scatter(values, range(len(worst)), s=36, color=colors, zorder=3)
    for row, value in enumerate(values):
        bars.text(value, row, f"   {value:.2f}", va="center", size=8)
    bars.grid(axis="y", alpha=0.3)
    if threshold is not None:
        bars.axvline(threshold, color=ORANGE, linestyle="--", linewidth=1)
    bars.set_yticks(range(len(names)), names, size=8)
    bars.invert_yaxis()
    bars.set(xlabel="SQNR, dB", title="the worst tensors" if len(sqnr_db) > _WORST else "tensors that differ")
    bars.margins(x=0.25)
    clean(density)
    clean(bars)
    return figure


def _median(counts: np.ndarray, edges: np.ndarray, least: float) -> float:
    """The middle of the bin that holds the median; NaN for no counts, or fewer than `least`."""
    total = counts.sum()
    if not total or total < least:
        return float("nan")
    place = int(np.searchsorted(np.cumsum(counts), total / 2))
    return float(edges[place] + edges[place + 1]) / 2
