"""The roofline of a run of `microfloat bench`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from microfloat.pictures.style import GREY, clean, colors_of, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TOGETHER = 1.08  # largest ratio of the FLOP per byte of two marks that share a label


def roofline(rows: Sequence[Mapping[str, Any]], copy_gbs: float, device: str) -> "Figure":
    """TFLOP/s over FLOP per byte of the `rows` of `microfloat bench --json`, under the limits of a copy and of bf16."""
    rows = [row for row in rows if row.get("tflops")]
    figure = new_figure(9, 5.5)
    from matplotlib.ticker import LogLocator

    axes = figure.subplots()
    best = max((row["bf16_tflops"] for row in rows), default=1.0)
    everything = [row["intensity"] for row in rows] + [row["bf16_intensity"] for row in rows] or [1.0]
    top = max([best, *(row["tflops"] for row in rows)])
    low = min((row["tflops"] for row in rows), default=top)
    ridge = 1e3 * top / copy_gbs  # FLOP per byte of the best product at a copy's rate
    reach = np.array([min(*everything, ridge) / 3, max(*everything, ridge) * 2])
    slope = np.array([reach[0], min(ridge, reach[1])])  # beyond it products limit the rate, and not memory
    axes.plot(slope, copy_gbs / 1e3 * slope, color="black", linewidth=1, label=f"memory: {copy_gbs:.0f} GB/s")
    axes.axhline(best, color=GREY, linestyle="--", linewidth=1)
    axes.text(0.95 * reach[1], best * 1.03, f"best bf16: {best:.3g} TFLOP/s", size=8.5, color=GREY, ha="right")
    axes.scatter(
        [row["bf16_intensity"] for row in rows], [row["bf16_tflops"] for row in rows], s=26, marker="x", color=GREY,
        label="bf16",
    )  # fmt: skip
    for name, color in colors_of(row["format"] for row in rows).items():
        mine = [row for row in rows if row["format"] == name]
        places = [row["intensity"] for row in mine], [row["tflops"] for row in mine]
        axes.scatter(*places, s=40, color=color, label=name, zorder=3)
    for label, place in _labels(rows):
        axes.annotate(
            label, place, (0, -7), textcoords="offset points", ha="right", va="top", size=7.5, color=GREY, rotation=45,
            rotation_mode="anchor",
        )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP per byte of operands and result", ylabel="TFLOP/s",
        title=f"Roofline of products on {device}", ylim=(low / 2, 2 * top), xlim=tuple(reach),
    )  # fmt: skip
    axes.minorticks_off()
    for which in (axes.xaxis, axes.yaxis):
        which.set_major_locator(LogLocator(subs=(1, 2, 5)))
        which.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, framealpha=0.7, loc="center left", bbox_to_anchor=(1, 0.5))
    clean(axes)
    return figure


def _labels(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, tuple[float, float]]]:
    """Labels and their places, below the slowest bf16 products; shapes with nearly equal places share one label."""
    slowest: dict[str, tuple[float, float]] = {}
    for row in sorted(rows, key=lambda row: row["bf16_tflops"]):
        slowest.setdefault(row["shape"], (row["bf16_intensity"], row["bf16_tflops"]))
    groups: list[list[str]] = []
    for shape in sorted(slowest, key=lambda shape: slowest[shape][0]):
        if groups and slowest[shape][0] <= _TOGETHER * slowest[groups[-1][0]][0]:
            groups[-1].append(shape)
        else:
            groups.append([shape])
    return [("\n".join(group), min((slowest[one] for one in group), key=lambda place: place[1])) for group in groups]
