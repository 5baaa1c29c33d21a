"""Records of a watched training: from the numbers that a device summed to metrics, and from metrics to their readers.

`microfloat.torch.watch` and `microfloat.jax.watch_outputs` sum on the device and call the functions here on the host,
so that a metric has one name and one definition. Sums are float64 of torch or float32 of JAX. Source: docs/watching.md.
"""

import csv
import functools
import math
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

import numpy as np

from microfloat import metrics, reference
from microfloat.arguments import as_path, check_int, check_new_file, check_number
from microfloat.errors import invalid_type, invalid_value, kind_of, unknown_name
from microfloat.formats import FORMATS, ElementFormat, ScaledFormat, ScaleFormat, encode
from microfloat.metrics import ScaleHistogram
from microfloat.operands import GEMMS, TENSORS
from microfloat.recipes import Cast, Current, Gemm, as_cast
from microfloat.recipes.cast import as_scaled_format
from microfloat.support import text_table

BINADES = 32  # below the largest magnitude, over which the error is shown
SCALES = 256  # bytes that a scale may be
NOISE_SEEDS = tuple((number, 0x5A17) for number in range(4))  # words of seeds for "sr_noise", which no generator draws

# Metrics by the sums that they need.
OF_TENSOR, OF_SAMPLE = ("amax", "amax_ema", "nan", "inf"), ("crest", "block_dynamic_range")
OF_CAST = ("sqnr_db", "rel_mse", "bias", "underflow", "clip", "zeros")
OF_SCALES, OF_PRODUCT = ("scale_histogram", "scale_at_limits"), ("relative_error", "cosine")
METRICS = (*OF_TENSOR, *OF_SAMPLE, *OF_CAST, *OF_SCALES, "error_by_magnitude", *OF_PRODUCT, "sr_noise")
DEFAULT_METRICS = tuple(name for name in METRICS if name not in ("rel_mse", "sr_noise"))
_OF_TABLE = ("amax", "crest", "sqnr_db", "bias", "underflow", "clip")  # and those of a product

Numbers = Sequence[float]
Metrics = Iterator[tuple[str, Any]]


class Record(NamedTuple):
    """One number: of an operand ("x", "w", "dy") in a GEMM and a format, or of a GEMM's result ("y", "dx", "dw").

    `value`: a float or an int; of "scale_histogram" a `microfloat.metrics.ScaleHistogram`, of "error_by_magnitude" the
    relative errors of elements by binades below the largest magnitude.
    """

    step: int
    module: str
    gemm: str
    operand: str
    format: str
    metric: str
    value: Any


class Entry(NamedTuple):
    """A record without metric and value: the subject of a reading."""

    step: int
    module: str
    gemm: str
    operand: str
    format: str


def _several(argument: str, values: Any, one: type | UnionType, remedy: str) -> tuple[Any, ...]:
    """The values as a tuple; a single value of the type `one` becomes a tuple of one."""
    if isinstance(values, one):
        return (values,)
    if not isinstance(values, Iterable):
        raise invalid_type(argument, kind_of(values), "a name, or a sequence of them", remedy)
    return tuple(values)


def check_names(argument: str, names: str | Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    """The names as a tuple, each one of `known`."""
    names = _several(argument, names, str, f"Write {argument}=() for none.")
    for name in names:
        if name not in known:
            raise unknown_name(argument, name, known)
    return names


class Measured(NamedTuple):
    """The choice of operands, metrics, formats that are not in use, and rows of an operand that a watch measures."""

    tensors: tuple[str, ...]
    metrics: frozenset[str]
    what_if: tuple[Cast, ...]
    rows: int

    @staticmethod
    def checked(tensors: Any, metrics: Any, what_if: Any, rows: object) -> "Measured":
        """The choice that these arguments of a watch make."""
        number = check_int("rows", rows, 128, 2**31 - 128)
        if number % 128:
            raise invalid_value("rows", rows, "a multiple of 128", "Formats with tiles are cut at whole ones.")
        several = _several("what_if", what_if, str | Cast | ScaledFormat, "Write what_if=() for none.")
        casts = [one if isinstance(one, Cast) else as_cast(as_scaled_format(one, "what_if")) for one in several]
        metrics = frozenset(check_names("metrics", metrics, METRICS))
        return Measured(check_names("tensors", tensors, TENSORS), metrics, tuple(casts), number)

    def part(self, size: int, sample: int | None = None) -> slice:
        """The part of an axis that is measured: in sample after sample the next rows, without a number the middle."""
        number = size // 2 // self.rows if sample is None else sample % max(1, -(-size // self.rows))
        return slice(number * self.rows, min((number + 1) * self.rows, size))

    def not_in_use(self, casts: Sequence[Cast | None]) -> list[Cast]:
        """The Casts of `what_if` whose format none of these casts has."""
        return [one for one in self.what_if if all(cast is None or cast.format != one.format for cast in casts)]


def of_tensor(size: int, n: Numbers) -> Metrics:
    """Metrics of a whole tensor from the counts of its finite and NaN elements, and its amax if that was measured."""
    if len(n) > 2:
        yield "amax", n[2]
    yield from (("nan", int(n[1])), ("inf", int(size - n[0] - n[1])))


def of_rows(wanted: frozenset[str], fmt: ScaleFormat | None, n: Numbers) -> Metrics:
    """Metrics of measured rows and of their cast, whose scales are of `fmt` (None: they are in high precision).

    The numbers: sums of x^2, (x - q)^2 and x q; counts of elements, of flushed ones, of zeros of q, of clipped ones;
    the peak and three quantiles of the binades that blocks span; counts of float32 scales at their limits and of all
    scales by byte (of float32 that of the exponent); sums of x^2, then of (x - q)^2, by binades below the peak.
    """
    signal, count, peak = n[0], n[3], n[7]
    if wanted.intersection(OF_SAMPLE):
        yield "crest", peak / math.sqrt(signal / count) if signal else 0.0
        for name, value in zip(("", "_p99", "_max"), n[8:11], strict=True):
            yield f"block_dynamic_range{name}", 0.0 if math.isnan(value) else value
    if fmt is None:
        return
    if wanted.intersection(OF_CAST):
        yield from _of_cast(n[:7])
    if wanted.intersection(OF_SCALES):
        found = _histogram(fmt, n[11:13], [int(one) for one in n[13 : 13 + SCALES]])
        yield from (("scale_at_limits", found.at_lowest + found.at_highest), ("scale_histogram", found))
    if "error_by_magnitude" in wanted:
        pairs = zip(n[-2 * BINADES : -BINADES], n[-BINADES:], strict=True)
        yield "error_by_magnitude", tuple(math.sqrt(noise / x) if x else math.nan for x, noise in pairs)


def _of_cast(n: Numbers) -> Metrics:
    signal, noise, product, count, flushed, zero, clipped = n
    worst = math.inf if noise > 0 else noise  # NaN, or nothing
    yield from (("rel_mse", noise / signal if signal else worst), ("sqnr_db", metrics.decibels(signal, noise)))
    yield "bias", product / signal - 1.0 if signal else 0.0
    for name, number in (("underflow", flushed), ("zeros", zero), ("clip", clipped)):
        yield name, number / count if count else 0.0


def _histogram(fmt: ScaleFormat, at_limits: Numbers, counts: list[int]) -> ScaleHistogram:
    """The histogram of so many scales of each byte; of float32 of each byte of the exponent, and at each limit."""
    if fmt.name != "FP32":
        return metrics.histogram_of_bytes(np.array(counts), fmt)
    total = sum(counts) or 1
    exponents = [exponent for exponent in range(1, 255) if counts[exponent]]
    zero, nan, lowest, highest = (number / total for number in (counts[0], counts[255], *at_limits))
    fractions = tuple(counts[exponent] / total for exponent in exponents)
    return ScaleHistogram(tuple(exponent - 127 for exponent in exponents), fractions, zero, nan, lowest, highest)


def of_noise(size: int, n: Numbers) -> Metrics:
    """Metrics of the mean error of `size` stochastic roundings and of the mean of their variances."""
    mean, std = n[0], math.sqrt(n[1])
    z = mean / (std / math.sqrt(size)) if std else math.copysign(math.inf, mean) if mean else 0.0
    yield from (("sr_noise_mean", mean), ("sr_noise_std", std), ("sr_noise_z", z))


def of_product(gemm: Gemm, n: Numbers) -> Metrics:
    """Metrics of sum a^2, sum (a - b)^2, sum b^2 and sum a b of an exact product a and the computed one, b."""
    signal, noise, other, product = n
    worst = math.inf if noise else 0.0
    yield "relative_error", math.sqrt(noise / signal) if signal else worst
    yield "expected_error", expected_error(gemm)
    norms = math.sqrt(signal) * math.sqrt(other)
    yield "cosine", product / norms if norms else float(not (signal or other))


def largest_byte(element: ElementFormat) -> int:
    """A byte of codes of the largest value."""
    code = int(encode(np.array([element.max], np.float32), element)[0])
    return code | code << 4 if element.codes_per_byte == 2 else code


SUSPICIOUS = 2.0  # times the noise of normal data, 3 dB, or times the binades of its blocks


class _Normal(NamedTuple):
    """Normal data under a cast: noise over signal, shares of flushed and clipped elements, binades of a block."""

    noise: float
    underflow: float
    clip: float
    span: float


@functools.lru_cache(maxsize=256)
def _normal(cast: Cast) -> _Normal:
    x = np.random.default_rng(0).standard_normal((128, 512)).astype(np.float32)
    q = reference.quantize(x, replace(cast, hadamard=None, scaling=Current()), seed=0 if cast.is_stochastic else None)
    largest = replace(q, codes=np.full_like(q.codes, largest_byte(cast.format.element)))
    made, limit = reference.dequantize(q), reference.dequantize(largest)
    spans = metrics.block_dynamic_range(x, cast.format.block[1] or x.shape[1])
    return _Normal(metrics.rel_mse(x, made), metrics.underflow(x, made), metrics.clip(x, limit), spans.median)


def expected_error(gemm: Gemm) -> float:
    """Relative error of a GEMM of normal data, whose rounding errors are independent: the root of the sum of noises."""
    return math.sqrt(sum(_normal(cast).noise for cast in gemm.casts if cast is not None))


class Suspect(NamedTuple):
    """A layer, by the worst of its GEMMs in one sample; `reason`: the likely cause, "" for a layer as good as any.

    `error`: the relative error of the result (y, dx or dw); `expected`: that of normal data in the same formats.
    """

    step: int
    module: str
    gemm: str
    format: str
    error: float
    expected: float
    reason: str

    def __str__(self) -> str:
        times = f", {self.error / self.expected:.2f} times that of normal data" if self.expected else ""
        said = f"step {self.step}, {self.module or '(root)'}, {self.gemm} in {self.format}: error {self.error:.3g}"
        return f"{said}{times}{f': {self.reason}' if self.reason else ''}"


Values = Mapping[str, Any]  # the metrics of an operand or of a result, by name


def _suspects(step: int, module: str, rows: Mapping[tuple[str, str, str], Values]) -> Iterator[tuple[Any, Suspect]]:
    """Each GEMM of a layer in one sample, after its rank: that of its reason, and its error beside the expected one."""
    for gemm in GEMMS:
        found: dict[str, tuple[str, Values]] = {}
        for (name, operand, fmt), m in rows.items():
            if name == gemm:
                found.setdefault(operand, (fmt, m))  # the first format of an operand is the one in use
        operands = {name: one for name, one in found.items() if name in TENSORS}
        fmt, result = next((one for name, one in found.items() if name not in TENSORS), ("high precision", {}))
        error, expected = result.get("relative_error", 0.0), result.get("expected_error", 0.0)
        counts = ((name, word, m.get(word.lower())) for name, (_, m) in found.items() for word in ("NaN", "Inf"))
        reason = ", ".join(f"{count} {word} in {name}" for name, word, count in counts if count)
        rank = 3 if reason else 0
        if not rank and expected and error**2 >= SUSPICIOUS * expected**2:
            reason = _cause(operands)
            rank = 2 if reason else 0
        elif not rank and gemm == "fprop" and (reason := _outlier(operands)):
            rank = 1
        yield (rank, error / expected if expected else 0.0), Suspect(step, module, gemm, fmt, error, expected, reason)


def _cause(operands: Mapping[str, tuple[str, Values]]) -> str:
    """The likely reason why a GEMM of these operands has a larger error than normal data; "" where that is no fault:
    the terms of a gradient cancel near a minimum, and dy of a classifier that has learnt nothing has few values.
    """
    for name, (fmt, m) in operands.items():
        if fmt not in FORMATS:
            continue
        normal, noise = _normal(as_cast(FORMATS[fmt])), 10 ** (-m.get("sqnr_db", math.inf) / 10)
        flushed, clipped, span = (m.get(one, 0.0) for one in ("underflow", "clip", "block_dynamic_range"))
        if noise >= SUSPICIOUS * normal.noise and clipped - normal.clip > max(0.0, flushed - normal.underflow):
            return f"clipping: {clipped:.1%} of {name} are beyond the largest value of the format"
        if noise >= SUSPICIOUS * normal.noise and flushed > normal.underflow:
            return f"underflow: {flushed:.1%} of {name} become zero"
        if 0 < noise <= 2 * m.get("bias", 0.0) ** 2 and name != "dy":
            return f"few distinct values: rounding moves those of {name} one way, by {m['bias']:+.1%}"
        if span >= SUSPICIOUS * normal.span:
            return f"channel outliers: blocks of {name} span {span:.0f} binades, of normal data {normal.span:.0f}"
    return "" if "dy" in operands else "cancellation: y is small beside the products that it sums"


def _outlier(operands: Mapping[str, tuple[str, Values]]) -> str:
    """The operand of fprop whose largest element has the format flush those of typical size beside it; "" if none."""
    for name, (fmt, m) in operands.items():
        element, crest = FORMATS[fmt].element if fmt in FORMATS else None, m.get("crest", 0.0)
        if element is not None and crest > element.max / (element.step / 2):
            return f"outliers: the largest element of {name} is {crest:.0f} times its root mean square"
    return ""


class RecordLog:
    """Records in the order in which they came, with a table, files and pictures of them.

    `metrics`: names of those that are kept. `ema`: the decay of amax_ema, the moving average of amax over samples.
    """

    def __init__(self, metrics: Sequence[str] = METRICS, ema: float = 0.9) -> None:
        self.metrics = check_names("metrics", metrics, METRICS)
        self.ema: Any = check_number("ema", ema, "a number in [0, 1)", 0, 1)
        self._records: list[Record] = []
        self._emas: dict[tuple[str, str, str], float] = {}

    def _read(self) -> None:
        """Take what has been measured and not read yet."""

    def take(self, entry: Entry, found: dict[str, Any], wanted: Collection[str] = METRICS) -> None:
        """Keep the metrics of one reading that are among `wanted`."""
        if "amax" in found:
            key = entry.module, entry.gemm, entry.operand
            last = self._emas.get(key, found["amax"])
            found["amax_ema"] = self._emas[key] = self.ema * last + (1 - self.ema) * found["amax"]
        for metric, value in found.items():
            name = re.sub("^(block_dynamic_range|sr_noise)_.*", r"\1", metric).replace("expected", "relative")
            if name in self.metrics and name in wanted:
                self._records.append(Record(*entry, metric, value))

    @property
    def records(self) -> list[Record]:
        """All records so far, in the order in which the tensors came. Waits for the device."""
        self._read()
        return self._records

    @property
    def first_non_finite(self) -> Record | None:
        """The first record of a NaN or an infinity: step, layer and GEMM where they began; None without any."""
        return next((one for one in self.records if one.metric in ("nan", "inf") and one.value), None)

    def worst(self, count: int = 5, step: int | None = None) -> list[Suspect]:
        """The worst layers of a step, None: of the last sample of each layer. Those with a reason come first: a NaN or
        an infinity, then noise of a GEMM of at least twice that of normal data in its formats, then outliers of x or w.
        """
        check_int("count", count, 1, 2**31 - 1)
        samples: dict[str, tuple[int, dict[Any, dict[str, Any]]]] = {}
        for one in self.records:
            if step in (None, one.step):
                if samples.get(one.module, (None,))[0] != one.step:
                    samples[one.module] = one.step, {}
                samples[one.module][1].setdefault(one[2:5], {})[one.metric] = one.value
        found = [
            max(_suspects(number, module, rows), key=lambda pair: pair[0])
            for module, (number, rows) in samples.items()
        ]  # fmt: skip
        return [suspect for _, suspect in sorted(found, key=lambda pair: pair[0], reverse=True)[:count]]

    def __str__(self) -> str:
        return self.table()

    def table(self, step: int | None = None, layers: int | None = None) -> str:
        """The metrics of one step (None: the last one), a row for each operand in each format and each result.

        The worst layers come first; `layers`: the number of those that are shown, None for all.
        """
        columns = (*_OF_TABLE, "relative_error", "expected_error", "cosine")
        records = [one for one in self.records if not isinstance(one.value, tuple | ScaleHistogram)]
        step = max((one.step for one in records), default=0) if step is None else step
        worst = self.worst(2**31 - 1, step)
        places = {one.module: place for place, one in enumerate(worst) if layers is None or place < layers}
        rows: dict[tuple[str, ...], dict[str, Any]] = {}
        for one in records:
            if one.step == step and one.module in places:
                rows.setdefault(one[1:5], {})[one.metric] = one.value
        shown = [name for name in columns if any(name in row for row in rows.values())]
        cells: list[tuple[str, ...]] = [("module", "GEMM", "operand", "format", *shown)]
        for key, row in sorted(rows.items(), key=lambda item: (places[item[0][0]], GEMMS.index(item[0][1]))):
            cells.append((*key, *(_shown(name, row.get(name)) for name in shown)))
        found = self.first_non_finite
        end = [str(one) for one in worst[:5] if one.reason]
        if found is not None:
            where = f"step {found.step}, {found.module}, {found.operand} of {found.gemm} ({found.value})"
            end.append(f"First {found.metric}: {where}.")
        return "\n".join([f"step {step}", *text_table(cells), *end])

    def to_csv(self, path: str | Path) -> None:
        """Write all records; a histogram as ``exponent:share`` pairs, errors by magnitude as numbers, with blanks."""
        # A file gets its name when it is whole: what is interrupted leaves an earlier one as it was.
        checked = as_path("path", path)
        check_new_file("path", checked)
        target = checked.resolve()  # of a link, which stays one
        if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):  # a pipe, or no new files
            self._write_csv(checked)
            return
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.partial")  # ranks may write one file at once
        try:
            self._write_csv(partial)
            if target.exists():
                shutil.copymode(target, partial)
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _write_csv(self, path: Path) -> None:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(Record._fields)
            writer.writerows((*one[:6], _text(one.value)) for one in self.records)

    def to_tensorboard(self, writer: Any) -> None:
        """Add all records to a SummaryWriter, or to anything with its add_scalar and add_histogram."""
        _check_methods("writer", writer, "add_scalar", "add_histogram")
        for one in self.records:
            if isinstance(one.value, ScaleHistogram):
                counts = np.round(np.array(one.value.fractions) * 1000).astype(int)
                values = np.repeat(one.value.exponents, counts)
                if len(values):
                    writer.add_histogram(_tag(one), values, one.step)
            elif not isinstance(one.value, tuple):
                writer.add_scalar(_tag(one), one.value, one.step)

    def to_wandb(self, run: Any) -> None:
        """Log all records to a run of Weights & Biases, or to anything with its log: one dictionary for each step."""
        _check_methods("run", run, "log")
        steps: dict[int, dict[str, Any]] = {}
        for one in self.records:
            if not isinstance(one.value, tuple | ScaleHistogram):
                steps.setdefault(one.step, {})[_tag(one)] = one.value
        for step, values in steps.items():
            run.log(values, step=step)

    def plot(self, path: str | Path) -> list[Path]:
        """Draw `microfloat.pictures.watch` on one sheet (.png, .svg, .pdf), or each picture in a file of a folder."""
        from microfloat.pictures import watch as pictures

        return pictures.draw(self.records, as_path("path", path, "a str or a pathlib.Path, of a file or a folder"))


def _check_methods(argument: str, value: object, *names: str) -> None:
    """InvalidTypeError for a sink without the methods that records are given to."""
    if not all(callable(getattr(value, name, None)) for name in names):
        raise invalid_type(argument, kind_of(value), f"an object with the methods {' and '.join(names)}")


def _shown(name: str, value: Any) -> str:
    return "" if value is None else f"{value:.2%}" if name in ("underflow", "clip") else f"{value:.4g}"


def _text(value: Any) -> str:
    if isinstance(value, ScaleHistogram):
        return " ".join(f"{e}:{share:.6g}" for e, share in zip(value.exponents, value.fractions, strict=True))
    return " ".join(f"{number:.6g}" for number in value) if isinstance(value, tuple) else repr(value)


def _tag(record: Record) -> str:
    return f"{record.module}/{record.gemm}.{record.operand}/{record.metric}/{record.format}"
