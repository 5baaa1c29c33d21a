"""Figures about every parameter of a file, from sampled rows: magnitudes, exponents, and the error under other formats.

A sample is groups of 128 rows, or whole experts, evenly spaced.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from microfloat import metrics, reference
from microfloat.checkpoint import Checkpoint, Record
from microfloat.cli.machine import load_casts
from microfloat.errors import unknown_name
from microfloat.formats import FORMATS, ScaledFormat
from microfloat.recipes import Cast
from microfloat.reference import casters

_GROUP = 128  # rows that are sampled together: no smaller than any tile


@dataclass
class Survey:
    """Rows about the surveyed parameters, and by format the number of scales in each power of two."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    exponents: dict[str, Counter] = field(default_factory=dict)

    def shares(self) -> dict[str, dict[int, float]]:
        """The exponents as shares of all scales of a format."""
        return {
            name: {exponent: number / max(counts.total(), 1) for exponent, number in sorted(counts.items())}
            for name, counts in self.exponents.items()
        }


def chosen_formats(text: str) -> list[ScaledFormat]:
    """The formats of "nvfp4,mxfp8"; InvalidValueError for an unknown one."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in FORMATS:
            raise unknown_name("--format", name, FORMATS)
    return [FORMATS[name] for name in dict.fromkeys(names)]


def survey(checkpoint: Checkpoint, names: Iterable[str], formats: Sequence[ScaledFormat], rows: int) -> Survey:
    """Measure the named matrices, at most about `rows` rows of each (0: all), cast to each of `formats`."""
    load_casts()
    found = Survey()
    for name in names:
        record = checkpoint[name]
        x_RC = sampled(record, rows)
        row: dict[str, Any] = {
            "name": name, "shape": list(record.logical_shape), "rows": len(x_RC),
            "amax": float(np.max(np.abs(x_RC), initial=0.0, where=np.isfinite(x_RC))), "crest": metrics.crest(x_RC),
            "non_finite": sum(metrics.non_finite(x_RC)),
        }  # fmt: skip
        if record.format is not None and record.scale is not None:
            _count(found, record.format.name, record.scale, record.format)
        for fmt in formats:
            row[fmt.name], is_real = None, fmt.scale.name == "FP32"
            if is_real or x_RC.shape[-1] % (fmt.block[1] or 1) == 0:  # else no checkpoint holds it: blocks are whole
                q = casters.quantize(x_RC, Cast(fmt, "amax" if is_real else None))
                row[fmt.name] = metrics.sqnr_db(x_RC, reference.dequantize(q))
                _count(found, fmt.name, q.scale, fmt)
        found.rows.append(row)
    return found


def _count(found: Survey, name: str, scale: np.ndarray, fmt: ScaledFormat) -> None:
    histogram = metrics.scale_histogram(scale, fmt.scale)
    counts = found.exponents.setdefault(name, Counter())
    for exponent, share in zip(histogram.exponents, histogram.fractions, strict=True):
        counts[exponent] += round(share * scale.size)


def sampled(record: Record, rows: int) -> np.ndarray:
    """float32 [R, C]: all values of a record, or the values of about `rows` of its rows."""
    parts = [part.dequantize(np.float32) for part in _parts(record, rows)]
    return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])


def _parts(record: Record, rows: int) -> Iterator[Record]:
    *leading, height, _ = record.logical_shape
    if not rows or height * int(np.prod(leading)) <= rows:
        yield record
    elif leading:
        count = max(1, min(record.logical_shape[0], rows // max(height, 1)))
        for start in np.linspace(0, record.logical_shape[0] - 1, count).astype(int):
            yield record.narrow(int(start), int(start) + 1)
    else:
        groups = -(-height // _GROUP)
        for group in np.unique(np.linspace(0, groups - 1, max(1, rows // _GROUP)).astype(int)):
            yield record.narrow(int(group) * _GROUP, min((int(group) + 1) * _GROUP, height))
