"""One array under several formats, a user's own among them: a table of errors, and a picture with distributions."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from microfloat import metrics, reference
from microfloat.errors import invalid_value
from microfloat.formats import ScaledFormat
from microfloat.pictures.style import GREY, clean, colors_of, new_figure, save
from microfloat.recipes import Cast, as_cast
from microfloat.support import Printed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINADES = 24  # of magnitudes below the largest one that the picture shows


class Fit(NamedTuple):
    """What one format makes of an array: its `values`, and metrics about them (`microfloat.metrics`)."""

    format: str
    scale_rule: str
    bits_per_element: float
    sqnr_db: float
    bias: float
    underflow: float
    clip: float
    values: np.ndarray


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """An array `x` under several formats, a `Fit` for each; ``print`` shows the table, `draw` makes the picture."""

    x: np.ndarray
    fits: tuple[Fit, ...]

    def __str__(self) -> str:
        width = max(6, *(len(one.format) for one in self.fits))
        rows = [f"{'format':{width}} {'scale rule':18}  bits  SQNR dB      bias  underflow    clip"]
        rows += [
            f"{one.format:{width}} {one.scale_rule:18} {one.bits_per_element:5.4g} {one.sqnr_db:8.2f} {one.bias:+9.1e} "
            f"{one.underflow:10.2%} {one.clip:7.2%}"
            for one in self.fits
        ]
        return "\n".join(rows)

    def draw(self, path: str | Path | None = None) -> "Figure":
        """A matplotlib Figure: error against bits, distributions, error against magnitude; saved at `path` too."""
        names = [one.format for one in self.fits]
        labels = [f"{one.format} {one.scale_rule}" if names.count(one.format) > 1 else one.format for one in self.fits]
        figure, colors = new_figure(15, 4.6), colors_of(labels)
        bits, spread, error = figure.subplots(1, 3, width_ratios=(1, 1.2, 1.2))
        counted, edges = np.isfinite(self.x) & (self.x != 0), np.arange(-_BINADES, 2)
        unit = float(np.abs(self.x[counted]).max(initial=0.0)) or 1.0
        x, percent = np.abs(self.x[counted]) / unit, 100 / (self.x.size or 1)
        binade = np.clip(np.floor(np.log2(x)), -_BINADES, 0).astype(int) + _BINADES
        number = np.bincount(binade, minlength=_BINADES + 1)
        spread.stairs(number * percent, edges, fill=True, color=GREY, alpha=0.4)
        for one, label in zip(self.fits, labels, strict=True):
            color, kept = colors[label], np.abs(one.values[counted]) / unit
            bits.plot(one.bits_per_element, one.sqnr_db, "o", color=color)
            cast = np.histogram(np.log2(kept[(kept > 0) & np.isfinite(kept)]), edges)[0]
            spread.stairs(cast * percent, edges, color=color)
            wrong = np.bincount(binade, np.minimum(np.abs(kept - x) / x, 1.0), _BINADES + 1) / np.maximum(number, 1)
            error.plot(edges[:-1][number > 0], 100 * wrong[number > 0], ".-", color=color, label=label)
        bits.set(xlabel="bits per element", ylabel="SQNR, dB", title="error against size")
        spread.set(xlabel="log2(|value| / amax)", ylabel="% of elements", title="distribution: x is grey")
        error.set(xlabel="log2(|x| / amax)", ylabel="mean relative error, %", title="error against magnitude")
        figure.legend(*error.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
        for axes in (bits, spread, error):
            clean(axes)
        if path is not None:
            save(figure, path)
        return figure


def compare(
    x: np.ndarray, formats: Iterable[Cast | ScaledFormat | str], *, axis: int = -1, seed: int = 0
) -> Comparison:
    """The Comparison of x under formats: names such as "nvfp4" or "int4:fp32:1x32", ScaledFormats or Casts.

    x is an array or a tensor (`microfloat.metrics`), whose blocks run along `axis`; `seed` is for stochastic rounding.
    `clip` is NaN under a Hadamard transform, which mixes elements. NumPy computes all of it, in every front end alike.
    """
    array, fits = metrics.as_array("x", x).astype(np.float32), []
    for cast in [as_cast(one) for one in ([formats] if isinstance(formats, Cast | ScaledFormat | str) else formats)]:
        q, fmt = reference.quantize(array, cast, axis=axis, seed=seed), cast.format
        values = reference.dequantize(q)
        largest = np.full_like(q.codes, fmt.element.max_code * (17 if fmt.element.codes_per_byte == 2 else 1))
        clip = np.nan if cast.hadamard else metrics.clip(array, reference.dequantize(replace(q, codes=largest)))
        sqnr, bias, underflow = (of(array, values) for of in (metrics.sqnr_db, metrics.bias, metrics.underflow))
        rule, bits = str(cast.scale_rule), fmt.bits_per_element
        fits.append(Fit(fmt.name, rule, bits, sqnr, bias, underflow, clip, values))
    if not fits:
        raise invalid_value("formats", "no format", "one or more, such as ['nvfp4', 'mxfp4']")
    return Comparison(array, tuple(fits))
