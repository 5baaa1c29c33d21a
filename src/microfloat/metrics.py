"""Measures of what quantization did to an array: one definition each, NumPy arrays in, floats out.

In every formula x is the original, y what it became, both of one shape; sums run over all elements in float64.
"""

from dataclasses import dataclass

import numpy as np

from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import SCALE_E4M3, SCALE_E8M0, ElementFormat, ScaleFormat, decode, get_element

__all__ = [
    "Difference", "ScaleHistogram", "at_limit", "bias", "block_dynamic_range", "clip", "cosine", "crest_factor",
    "first_difference", "rel_mse", "relative_error", "scale_histogram", "sqnr_db", "underflow",
]  # fmt: skip


def sqnr_db(x: np.ndarray, y: np.ndarray) -> float:
    """Signal to quantization noise in decibels: ``10 log10(sum x^2 / sum (y - x)^2)``; inf where y equals x."""
    signal, noise = _energies(x, y)
    if noise == 0:
        return float("inf")
    with np.errstate(divide="ignore"):
        return float(10 * np.log10(signal / noise))


def rel_mse(x: np.ndarray, y: np.ndarray) -> float:
    """Relative mean squared error: ``sum (y - x)^2 / sum x^2``; 0 where y equals x, inf where only x is zero."""
    signal, noise = _energies(x, y)
    return _ratio(noise, signal)


def relative_error(x: np.ndarray, y: np.ndarray) -> float:
    """Frobenius norm of the error against that of the original: ``||y - x|| / ||x||``, the root of `rel_mse`."""
    return float(np.sqrt(rel_mse(x, y)))


def bias(x: np.ndarray, y: np.ndarray) -> float:
    """Shrinkage or growth along the original: ``<y, x> / <x, x> - 1``; 0 for unbiased rounding and for zero x."""
    a, b = _pair(x, y)
    energy = float((a * a).sum())
    return float((b * a).sum()) / energy - 1.0 if energy else 0.0


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    """Cosine of the angle between the two as vectors: ``<x, y> / (||x|| ||y||)``; 1 if both are zero, 0 if one is."""
    a, b = _pair(x, y)
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    if norms == 0:
        return 1.0 if not (a.any() or b.any()) else 0.0
    return float((a * b).sum()) / norms


def underflow(x: np.ndarray, y: np.ndarray) -> float:
    """Fraction of the non-zero elements of x that are zero in y: ``#(x != 0, y == 0) / #(x != 0)``; 0 if none is."""
    a, b = _pair(x, y)
    return _fraction((a != 0) & (b == 0), a != 0)


def clip(x: np.ndarray, limit: np.ndarray | float) -> float:
    """Fraction of the elements beyond the largest representable magnitude: ``#(|x| > limit) / #x``.

    `limit` broadcasts against x: ``element.max * scale`` (times the tensor scale), one per block or one per element.
    """
    a, limits = _array("x", x), _array("limit", limit)
    try:
        limits = np.broadcast_to(limits, a.shape)
    except ValueError:
        raise invalid_value("limit", f"shape {limits.shape}", f"a shape that broadcasts to {a.shape}") from None
    return _fraction(np.abs(a) > limits, np.ones(a.shape, bool))


def at_limit(codes: np.ndarray, element: ElementFormat | str) -> float:
    """Fraction of unpacked codes that are +-max: the saturated ones and those that hit the maximum exactly."""
    fmt = get_element(element)
    values = decode(codes, fmt)
    return _fraction(np.abs(values) == np.float32(fmt.max), np.ones(values.shape, bool))


def crest_factor(x: np.ndarray) -> float:
    """Peak over root mean square: ``max|x| / sqrt(sum x^2 / #x)``; 1 for equal magnitudes, 0 for zero or empty x."""
    a = np.abs(_array("x", x))
    peak = float(a.max(initial=0.0))
    if peak == 0 or not np.isfinite(peak):
        return 0.0 if peak == 0 else float("nan")
    return peak / (float(np.sqrt(np.mean((a / peak) ** 2))) * peak)


def block_dynamic_range(x: np.ndarray, block: int = 32, *, largest: bool = False) -> float:
    """Binades that one block has to span: ``mean over blocks of log2(max|x| / min non-zero |x|)``.

    Blocks are `block` consecutive elements of the last axis (the last one may be short); those without a non-zero
    finite element do not count. `largest`: the maximum over the blocks in place of their mean. 0 if no block counts.
    """
    if isinstance(block, bool) or not isinstance(block, int | np.integer):
        raise invalid_type("block", type(block), "an int")
    if block < 1:
        raise invalid_value("block", block, "an int >= 1")
    a = np.abs(np.atleast_1d(_array("x", x)))
    a = np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % block)]).reshape(-1, block)
    counts = (a > 0) & np.isfinite(a)
    a = a[counts.any(axis=1)]
    counts = counts[counts.any(axis=1)]
    if not len(a):
        return 0.0
    spans = np.log2(np.where(counts, a, 0).max(axis=1)) - np.log2(np.where(counts, a, np.inf).min(axis=1))
    return float(spans.max() if largest else spans.mean())


@dataclass(frozen=True)
class ScaleHistogram:
    """The spread of stored block scales: ``fractions[i]`` of them lie in ``[2^exponents[i], 2^(exponents[i] + 1))``.

    `zero`, `nan`: fractions of scales that are zero or NaN; `at_lowest`, `at_highest`: at the format's limits (E8M0:
    2^-127 and 2^127; E4M3: 2^-9 and 448; FP32: the clamps 2^-126 and below, 2^126 and above).
    """

    exponents: tuple[int, ...]
    fractions: tuple[float, ...]
    zero: float
    nan: float
    at_lowest: float
    at_highest: float


def scale_histogram(scale: np.ndarray, scale_format: ScaleFormat | None = None) -> ScaleHistogram:
    """Distribution of stored scales over powers of two; uint8 bytes need their `scale_format`, float32 does not."""
    stored = np.asarray(scale)
    if stored.dtype == np.uint8:
        if scale_format not in (SCALE_E8M0, SCALE_E4M3):
            raise invalid_value("scale_format", scale_format, "SCALE_E8M0 or SCALE_E4M3 for scale bytes")
        values, lowest, highest = _scale_values(stored, scale_format)
    else:
        values, lowest, highest = _array("scale", stored), 2.0**-126, 2.0**126
    values = values.reshape(-1)
    every = np.ones(values.shape, bool)
    counted = np.isfinite(values) & (values > 0)
    exponents, counts = np.unique(np.frexp(values[counted])[1] - 1, return_counts=True)
    return ScaleHistogram(
        tuple(int(exponent) for exponent in exponents),
        tuple(float(count) / values.size for count in counts),
        _fraction(values == 0, every),
        _fraction(np.isnan(values), every),
        _fraction(counted & (values <= lowest), every),
        _fraction(counted & (values >= highest), every),
    )


def _scale_values(stored: np.ndarray, scale_format: ScaleFormat) -> tuple[np.ndarray, float, float]:
    if scale_format == SCALE_E4M3:
        return decode(stored, "E4M3").astype(np.float64), 2.0**-9, 448.0
    return np.where(stored == 255, np.nan, np.ldexp(1.0, stored.astype(np.int64) - 127)), 2.0**-127, 2.0**127


@dataclass(frozen=True)
class Difference:
    """The first place where two arrays differ (C order), the raw bits of both there, and the count of differences."""

    index: tuple[int, ...]
    a: int
    b: int
    count: int
    width: int

    def __str__(self) -> str:
        digits = 2 * self.width
        return f"index {self.index}: {self.a:#0{digits + 2}x} != {self.b:#0{digits + 2}x} ({self.count} differ)"


def first_difference(a: np.ndarray, b: np.ndarray) -> Difference | None:
    """The first element whose bytes differ, None if the arrays are equal byte for byte (NaN payloads and -0 count).

    Raises InvalidValueError for arrays of different shape or dtype: those have no common index.
    """
    first, second = np.asarray(a), np.asarray(b)
    if first.shape != second.shape or first.dtype != second.dtype:
        raise invalid_value(
            "b",
            f"{second.dtype}{list(second.shape)}",
            f"{first.dtype}{list(first.shape)}, as a is",
            "View it alike first.",
        )
    if first.dtype.hasobject or first.dtype.itemsize not in (1, 2, 4, 8):
        raise invalid_type("a", first.dtype, "elements of 1, 2, 4 or 8 bytes")
    bits = np.dtype(f"u{first.dtype.itemsize}")
    first, second = (np.ascontiguousarray(array).view(bits).reshape(array.shape) for array in (first, second))
    places = np.argwhere(first != second)
    if not len(places):
        return None
    index = tuple(int(position) for position in places[0])
    return Difference(index, int(first[index]), int(second[index]), len(places), bits.itemsize)


def _array(argument: str, value: np.ndarray | float) -> np.ndarray:
    array = np.asarray(value)
    try:
        if array.dtype.kind in "cOSUMm":
            raise TypeError
        return array.astype(np.float64)
    except (TypeError, ValueError):
        raise invalid_type(argument, array.dtype, "an array of real numbers") from None


def _pair(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b = _array("x", x), _array("y", y)
    if a.shape != b.shape:
        raise invalid_value("y", f"shape {b.shape}", f"shape {a.shape}, as x has", "Dequantize it first.")
    return a, b


def _energies(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(sum x^2, sum (y - x)^2)."""
    a, b = _pair(x, y)
    with np.errstate(all="ignore"):
        return float((a * a).sum()), float(((b - a) ** 2).sum())


def _ratio(numerator: float, denominator: float) -> float:
    if numerator == 0:
        return 0.0
    return numerator / denominator if denominator else float("inf")


def _fraction(part: np.ndarray, whole: np.ndarray) -> float:
    total = int(whole.sum())
    return int(part.sum()) / total if total else 0.0
