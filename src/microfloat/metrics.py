"""Measures of what quantization did to an array: one definition each, arrays in, floats out.

An array is one of NumPy, a number or list of them, a tensor of torch (of any float dtype, on any device, with a
gradient or without), an array of JAX, or a QuantizedTensor or QuantizedArray, which counts as its dequantized values.
In every formula x is the reference and q what became of it (codes, decoded), both of one shape. Sums and shares are
those of the elements whose reference is finite, in float64; `non_finite` counts the others. Source: docs/watching.md.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import ElementFormat, ScaleFormat, decode, get_element

__all__ = [
    "BlockRange", "Difference", "GemmError", "NonFinite", "ScaleHistogram", "SRNoise", "at_limit", "bias",
    "block_dynamic_range", "clip", "cosine", "crest", "crest_factor", "first_difference", "gemm_error", "max_ulp",
    "non_finite", "rel_mse", "relative_error", "scale_histogram", "sqnr_db", "sr_noise", "underflow", "zeros",
]  # fmt: skip


def sqnr_db(x: np.ndarray, q: np.ndarray) -> float:
    """Signal to quantization noise in decibels: ``10 log10(sum x^2 / sum (x - q)^2)``.

    inf where q equals x; NaN where x is all zero and q is not, since there is no signal to compare with.
    """
    return decibels(*_energies(x, q))


def decibels(signal: float, noise: float) -> float:
    """A ratio of energies in decibels: inf without noise, NaN of noise alone and of NaN, -inf of infinite noise."""
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio else -math.inf if signal else math.nan


def rel_mse(x: np.ndarray, q: np.ndarray) -> float:
    """Relative mean squared error: ``sum (x - q)^2 / sum x^2``; 0 where q equals x, inf where only x is zero."""
    signal, noise = _energies(x, q)
    if noise == 0:
        return 0.0
    return noise / signal if signal else float("inf")


def relative_error(x: np.ndarray, q: np.ndarray) -> float:
    """Frobenius norm of the error over the norm of the reference: ``||x - q|| / ||x||``, the root of `rel_mse`."""
    return float(np.sqrt(rel_mse(x, q)))


def bias(x: np.ndarray, q: np.ndarray) -> float:
    """Shrinkage or growth along the reference: ``<q, x> / <x, x> - 1``; 0 for unbiased rounding and for zero x."""
    a, b = _pair(x, q)
    energy = float((a * a).sum())
    return float((b * a).sum()) / energy - 1.0 if energy else 0.0


def cosine(x: np.ndarray, q: np.ndarray) -> float:
    """Cosine of the angle between the two as vectors: ``<x, q> / (||x|| ||q||)``; 1 if both are zero, 0 if one is."""
    a, b = _pair(x, q)
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    if norms == 0:
        return 1.0 if not (a.any() or b.any()) else 0.0
    return float((a * b).sum()) / norms


class GemmError(NamedTuple):
    """The error of a product: the Frobenius norm of the difference over the norm of the reference, and the cosine."""

    relative_error: float
    cosine: float


def gemm_error(x: np.ndarray, q: np.ndarray) -> GemmError:
    """Relative Frobenius error and cosine of a product q (y, dx or dw) against x, the same GEMM in float32."""
    return GemmError(relative_error(x, q), cosine(x, q))


def underflow(x: np.ndarray, q: np.ndarray) -> float:
    """Share of elements that were flushed to zero: ``#(x != 0, q == 0) / #x``."""
    a, b = _pair(x, q)
    return _share((a != 0) & (b == 0))


def zeros(x: np.ndarray, q: np.ndarray) -> float:
    """Share of elements that are zero in q, whatever they were: ``#(q == 0) / #x``."""
    return _share(_pair(x, q)[1] == 0)


def clip(x: np.ndarray, limit: np.ndarray | float) -> float:
    """Share of elements beyond the largest magnitude that their block can hold: ``#(|x| > limit) / #x``.

    `limit` broadcasts against x: ``element.max * scale`` (times the tensor scale), one per block or one per element;
    dequantized values are a ValueError.
    """
    a, limits = as_array("x", x), as_array("limit", limit)
    try:
        limits = np.broadcast_to(limits, a.shape)
    except ValueError:
        raise invalid_value("limit", f"shape {limits.shape}", f"a shape that broadcasts to {a.shape}") from None
    if (limits < 0).any():
        raise invalid_value(
            "limit", "negative numbers", "magnitudes, element.max * scale of each block",
            "Dequantized values, which other metrics take, are no limits.",
        )  # fmt: skip
    counted = np.isfinite(a)
    return _share(np.abs(a[counted]) > limits[counted])


def at_limit(codes: np.ndarray, element: ElementFormat | str) -> float:
    """Share of unpacked codes that are +-max: the saturated ones and those that hit the maximum exactly."""
    fmt = get_element(element)
    return _share(np.abs(decode(_codes("codes", codes), fmt)) == np.float32(fmt.max))


class NonFinite(NamedTuple):
    """Counts of the elements that no other metric counts."""

    nan: int
    inf: int


def non_finite(x: np.ndarray) -> NonFinite:
    """The number of NaNs and of infinities of either sign."""
    a = as_array("x", x)
    return NonFinite(int(np.isnan(a).sum()), int(np.isinf(a).sum()))


def crest(x: np.ndarray) -> float:
    """Peak over root mean square: ``max|x| / sqrt(sum x^2 / #x)``; 1 for equal magnitudes, 0 for zero or empty x."""
    a = np.abs(as_array("x", x))
    a = a[np.isfinite(a)]
    peak = float(a.max(initial=0.0))
    return peak / (float(np.sqrt(np.mean((a / peak) ** 2))) * peak) if peak else 0.0


crest_factor = crest


class BlockRange(NamedTuple):
    """Binades that blocks span: the median block, the 99th percentile, and the widest one."""

    median: float
    p99: float
    max: float


def block_dynamic_range(x: np.ndarray, block: int = 32) -> BlockRange:
    """Binades from the smallest to the largest magnitude of a block: ``log2(max|x| / min non-zero |x|)``.

    Blocks are `block` consecutive elements of the last axis (the last one may be short); those without a non-zero
    finite element do not count. Percentiles are interpolated linearly. Zeros if no block counts.
    """
    if isinstance(block, bool) or not isinstance(block, int | np.integer):
        raise invalid_type("block", type(block), "an int")
    if block < 1:
        raise invalid_value("block", block, "an int >= 1")
    a = np.abs(np.atleast_1d(as_array("x", x)))
    a = np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % block)]).reshape(-1, block)
    counts = (a > 0) & np.isfinite(a)
    a, counts = a[counts.any(axis=1)], counts[counts.any(axis=1)]
    if not len(a):
        return BlockRange(0.0, 0.0, 0.0)
    spans = np.log2(np.where(counts, a, 0).max(axis=1)) - np.log2(np.where(counts, a, np.inf).min(axis=1))
    return BlockRange(*(float(number) for number in np.percentile(spans, [50, 99, 100])))


@dataclass(frozen=True)
class ScaleHistogram:
    """The spread of stored block scales: ``fractions[i]`` of them lie in ``[2^exponents[i], 2^(exponents[i] + 1))``.

    `zero`, `nan`: shares of scales that are zero or NaN; `at_lowest`, `at_highest`: at the format's limits (E8M0:
    2^-127 and 2^127; E4M3: 2^-9 and 448; FP32: the clamps 2^-126 and below, 2^126 and above). `counts`: the number of
    scales that each byte encodes, 256 of them; empty for float32.
    """

    exponents: tuple[int, ...]
    fractions: tuple[float, ...]
    zero: float
    nan: float
    at_lowest: float
    at_highest: float
    counts: tuple[int, ...] = ()


def scale_histogram(scale: np.ndarray, scale_format: ScaleFormat | None = None) -> ScaleHistogram:
    """Distribution of stored scales over powers of two; uint8 bytes need their `scale_format`, float32 does not."""
    stored = _numpy("scale", scale)
    if stored.dtype == np.uint8:
        if not isinstance(scale_format, ScaleFormat) or scale_format.bits == 32:
            raise invalid_value("scale_format", scale_format, "SCALE_E8M0 or SCALE_E4M3 for scale bytes")
        return histogram_of_bytes(np.bincount(stored.reshape(-1), minlength=256), scale_format)
    if stored.dtype.kind in "iub":
        raise invalid_type("scale", stored.dtype, "uint8 bytes, or scales of a floating-point dtype")
    values = as_array("scale", stored).reshape(-1)
    return _histogram(values, np.ones(values.size, np.int64), 2.0**-126, 2.0**126)


def histogram_of_bytes(counts: np.ndarray, scale_format: ScaleFormat) -> ScaleHistogram:
    """`scale_histogram` of scales that are counted by their byte, int64 [256]."""
    values = scale_format.values(np.arange(256)).astype(np.float64)
    positive = values[values > 0]
    return _histogram(values, counts, positive.min(), positive.max(), tuple(counts.tolist()))


def _histogram(
    values: np.ndarray, counts: np.ndarray, lowest: float, highest: float, numbers: tuple[int, ...] = ()
) -> ScaleHistogram:
    """The histogram of `counts[i]` scales of `values[i]`."""
    total = int(counts.sum()) or 1
    counted = np.isfinite(values) & (values > 0) & (counts > 0)
    exponents, which = np.unique(np.frexp(values[counted])[1] - 1, return_inverse=True)
    each = np.bincount(which, counts[counted], len(exponents))
    shares = (np.isnan(values), counted & (values <= lowest), counted & (values >= highest))
    nan, low, high = (int(counts[share].sum()) / total for share in shares)
    return ScaleHistogram(
        tuple(exponents.tolist()), tuple((each / total).tolist()), int(counts[values == 0].sum()) / total,
        nan, low, high, numbers,
    )  # fmt: skip


def max_ulp(x: np.ndarray, q: np.ndarray, dtype: np.dtype | str | None = None) -> float:
    """Largest distance in units of the last place: ``max |q - x| / ulp(x)``, the spacing that `dtype` has at x.

    `dtype`: float32, float16, bfloat16 or another float of NumPy or ml_dtypes; None is q's. The spacing at zero is the
    smallest subnormal. NaN where a q of a finite x is NaN; 0 for equal and for empty arrays.
    """
    dtype = _numpy("q", q).dtype if dtype is None else dtype
    try:
        info: Any = ml_dtypes.finfo(np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype))
    except (TypeError, ValueError):
        raise invalid_type("dtype", dtype, "a floating-point dtype, such as 'bfloat16'") from None
    a, b = _pair(x, q)
    lowest = int(info.minexp)  # subnormals have the spacing of the first binade, and so has zero, where frexp gives 0
    exponents = np.where(a == 0, lowest, np.maximum(np.frexp(a)[1] - 1, lowest))
    with np.errstate(invalid="ignore"):
        return float((np.abs(b - a) / np.ldexp(1.0, exponents - int(info.nmant))).max(initial=0.0))


class SRNoise(NamedTuple):
    """Noise of stochastic rounding: mean and standard deviation of q - x, and the mean in standard errors."""

    mean: float
    std: float
    z: float


def sr_noise(x: np.ndarray, draws: Sequence[np.ndarray] | np.ndarray) -> SRNoise:
    """Mean and deviation of ``q_k - x`` over K >= 2 draws with independent keys, and the z-score of the mean.

    `draws` [K, ...x]: q under each key. The deviation is the root of the mean, over elements, of their variance over
    the keys; ``z = mean / (std / sqrt(K n))``, since the draws of n elements are independent: |z| above 4 is a bias.
    """
    if isinstance(draws, list | tuple):
        draws = np.stack([as_array("draws", draw) for draw in draws])
    a, many = as_array("x", x), as_array("draws", draws)  # type: ignore[arg-type]
    if many.ndim != a.ndim + 1 or many.shape[1:] != a.shape or len(many) < 2:
        raise invalid_value("draws", f"shape {many.shape}", f"shape (K, *{a.shape}) with K >= 2, a draw for each key")
    errors = (many - a)[:, np.isfinite(a)]
    if not errors.size:
        return SRNoise(0.0, 0.0, 0.0)
    mean, std = float(errors.mean()), float(np.sqrt(errors.var(axis=0, ddof=1).mean()))
    if std == 0:
        return SRNoise(mean, 0.0, 0.0 if mean == 0 else float(np.copysign(np.inf, mean)))
    return SRNoise(mean, std, mean / (std / float(np.sqrt(errors.size))))


@dataclass(frozen=True)
class Difference:
    """The first index where two arrays differ (C order), codes and values there (None: unknown), and the count."""

    index: tuple[int, ...]
    a: int
    b: int
    count: int
    width: int
    value_a: float | None = None
    value_b: float | None = None

    def __str__(self) -> str:
        digits = 2 * self.width
        return f"index {self.index}: {self.a:#0{digits + 2}x} != {self.b:#0{digits + 2}x} ({self.count} differ)"


def first_difference(a: np.ndarray, b: np.ndarray, element: ElementFormat | str | None = None) -> Difference | None:
    """The first element whose bytes differ, None if the arrays are equal byte for byte (NaN payloads and -0 count).

    `element`: the format of unpacked codes, for the values; arrays of floats need none. Raises InvalidValueError for
    arrays of different shape or dtype: those have no common index.
    """
    as_arrays = _numpy if element is None else _codes
    arrays = as_arrays("a", a), as_arrays("b", b)
    first, second = arrays
    if first.shape != second.shape or first.dtype != second.dtype:
        got, needed = f"{second.dtype}{list(second.shape)}", f"{first.dtype}{list(first.shape)}, as a is"
        raise invalid_value("b", got, needed, "View it alike first.")
    if first.dtype.hasobject or first.dtype.itemsize not in (1, 2, 4, 8):
        raise invalid_type("a", first.dtype, "elements of 1, 2, 4 or 8 bytes")
    bits = np.dtype(f"u{first.dtype.itemsize}")
    first, second = (np.ascontiguousarray(array).view(bits).reshape(array.shape) for array in arrays)
    places = np.argwhere(first != second)
    if not len(places):
        return None
    index = tuple(int(position) for position in places[0])
    values: tuple[float | None, ...] = (None, None)
    if element is not None:
        values = tuple(float(decode(codes[index].reshape(1), get_element(element))[0]) for codes in (first, second))
    elif arrays[0].dtype.kind not in "iub":
        values = tuple(float(array[index]) for array in arrays)
    return Difference(index, int(first[index]), int(second[index]), len(places), bits.itemsize, *values)


def _numpy(argument: str, value: Any) -> np.ndarray:
    """A tensor or array as a NumPy array of the same dtype. No framework is imported: a tensor's is loaded already."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "codes") and hasattr(value, "dequantize"):
        value = value.dequantize()
    if not hasattr(value, "detach"):
        return np.asarray(value)
    name = str(value.dtype).removeprefix("torch.")
    try:
        value = value.detach().cpu().contiguous()
        if not hasattr(ml_dtypes, name):
            return value.numpy()
        raw = value.reshape(-1).view(sys.modules["torch"].uint8).numpy()
        return raw.view(getattr(ml_dtypes, name)).reshape(value.shape)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        got = f"a tensor of {name} ({str(value.layout).removeprefix('torch.')}, {value.device})"
        raise invalid_type(argument, got, "a tensor with values in memory, such as x.to_dense()") from error


def _codes(argument: str, value: Any) -> np.ndarray:
    """Unpacked codes as uint8, also if they have an FP8 dtype."""
    codes = _numpy(argument, value)
    return codes.view(np.uint8) if codes.dtype.itemsize == 1 else codes


def as_array(argument: str, value: np.ndarray | float) -> np.ndarray:
    """An array, a tensor or numbers as float64; InvalidTypeError for other values, which names the argument."""
    array = _numpy(argument, value)
    try:
        if array.dtype.kind in "cOSUMm":
            raise TypeError
        return array.astype(np.float64)
    except (TypeError, ValueError):
        raise invalid_type(argument, array.dtype, "an array of real numbers") from None


def _pair(x: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 vectors of the elements whose reference is finite."""
    a, b = as_array("x", x), as_array("q", q)
    if a.shape != b.shape:
        raise invalid_value("q", f"shape {b.shape}", f"shape {a.shape}, as x has", "Dequantize it first.")
    counted = np.isfinite(a)
    return a[counted], b[counted]


def _energies(x: np.ndarray, q: np.ndarray) -> tuple[float, float]:
    """(sum x^2, sum (x - q)^2)."""
    a, b = _pair(x, q)
    with np.errstate(all="ignore"):
        return float((a * a).sum()), float(((b - a) ** 2).sum())


def _share(part: np.ndarray) -> float:
    return int(part.sum()) / part.size if part.size else 0.0
