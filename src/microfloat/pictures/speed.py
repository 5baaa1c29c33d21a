"""The roofline of a run of `microfloat bench`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from microfloat.pictures.style import GREY, clean, colors_of, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["roofline"]


def roofline(rows: Sequence[Mapping[str, Any]], copy_gbs: float, device: str) -> "Figure":
    """TFLOP/s of every product against its FLOP per byte, under what a copy and the best bf16 product allow.

    `rows`: with the keys of `microfloat bench --json`; rows without times are left out.
    """
    rows = [row for row in rows if row.get("tflops")]
    figure = new_figure(9, 5.5)
    from matplotlib.ticker import LogLocator

    axes = figure.subplots()
    best = max((row["bf16_tflops"] for row in rows), default=1.0)
    everything = [row["intensity"] for row in rows] + [row["bf16_intensity"] for row in rows] or [1.0]
    top = max([best, *(row["tflops"] for row in rows)])
    low = min((row["tflops"] for row in rows), default=top)
    ridge = 1e3 * top / copy_gbs  # FLOP per byte at which a copy's rate allows the best one
    reach = np.array([min(*everything, ridge) / 3, max(*everything, ridge) * 2])
    slope = np.array([reach[0], min(ridge, reach[1])])  # beyond it products, and no longer memory, limit the rate
    axes.plot(slope, copy_gbs / 1e3 * slope, color="black", linewidth=1, label=f"memory: {copy_gbs:.0f} GB/s")
    axes.axhline(best, color=GREY, linestyle="--", linewidth=1)
    axes.text(1.1 * reach[0], best * 1.03, f"best bf16: {best:.3g} TFLOP/s", size=8.5, color=GREY)
    axes.scatter(
        [row["bf16_intensity"] for row in rows], [row["bf16_tflops"] for row in rows], s=26, marker="x", color=GREY,
        label="bf16",
    )  # fmt: skip
    for name, color in colors_of(row["format"] for row in rows).items():
        mine = [row for row in rows if row["format"] == name]
        places = [row["intensity"] for row in mine], [row["tflops"] for row in mine]
        axes.scatter(*places, s=40, color=color, label=name, zorder=3)
    for shape in dict.fromkeys(row["shape"] for row in rows):  # by its bf16 product, below all of its others
        lowest = min((row for row in rows if row["shape"] == shape), key=lambda row: row["bf16_tflops"])
        place = lowest["bf16_intensity"], lowest["bf16_tflops"]
        axes.annotate(
            shape, place, (0, -7), textcoords="offset points", ha="right", va="top", size=7.5, color=GREY, rotation=30,
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
