"""Metrics of `microfloat.metrics` on the device of the tensors: sums there, formulas on the host.

A `Reading` is a vector of sums on the device and the way from them to metrics, so that a watched step waits for no GPU.
`Readings` are those of a sample: its end reduces many at once and copies them to the host, and whoever asks for records
waits for the copy. Nothing here draws a random number or writes to its inputs, and no operation depends on torch's
deterministic mode.

Legend: R = rows of an operand form (of a part of it), C = its contraction length.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from microfloat.recipes import Cast
from microfloat.torch._typing import Maybe, Options
from microfloat.torch.backends.base import Backend, Operand
from microfloat.torch.reference._hadamard import transform
from microfloat.watching import (
    BINADES,
    DRAWS,
    OF_CAST,
    OF_SAMPLE,
    OF_SCALES,
    SCALES,
    Entry,
    largest_byte,
    of_noise,
    of_product,
    of_rows,
    of_tensor,
)

__all__ = [
    "Quantized", "Reading", "Readings", "Sample", "Source", "quantized", "read_noise", "read_product", "read_rows",
]  # fmt: skip

_QUANTILES = 0.5, 0.99, 1.0
_MOST_KEPT = 1 << 26  # bytes that wait to be reduced


class Reading(NamedTuple):
    """Numbers on a device, and the function that makes (metric, value) pairs of them.

    `spans` [2, R, blocks]: the largest and the smallest magnitude of each block, 0 and inf where none counts. Three
    quantiles of the binades that blocks span follow the numbers.
    """

    numbers: torch.Tensor
    derive: Callable[[Sequence[float]], Iterable[tuple[str, object]]]
    spans: Maybe = None


class Readings:
    """Readings of a sample, until it ends."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._readings: list[Reading] = []
        self._waiting: dict[tuple, list[int]] = {}  # readings with spans, by the shape of these
        self._bytes = 0
        self._quantiles: list[tuple[list[int], torch.Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, entry: Entry, reading: Reading) -> None:
        """Keep a reading of this subject; spans of many are reduced together, and the largest of them do not wait."""
        spans = reading.spans
        if spans is not None:
            self._waiting.setdefault((spans.shape, spans.dtype, spans.device), []).append(len(self._readings))
            self._bytes += spans.numel() * spans.element_size()
        self._entries.append(entry)
        self._readings.append(reading)
        if self._bytes > _MOST_KEPT:
            self._reduce()

    def _reduce(self) -> None:
        for indices in self._waiting.values():
            spans = torch.stack([self._readings[index].spans for index in indices])  # type: ignore[misc]
            for index in indices:
                self._readings[index] = self._readings[index]._replace(spans=None)
            self._quantiles.append((indices, _quantiles_of(spans)))
        self._waiting.clear()
        self._bytes = 0

    def close(self) -> "Sample":
        """The sample of these readings, on its way to the host."""
        self._reduce()
        vectors: dict[tuple, tuple[list[list[int]], list[torch.Tensor]]] = {}
        numbers = [([index], reading.numbers) for index, reading in enumerate(self._readings)]
        for indices, vector in (*numbers, *self._quantiles):
            owners, parts = vectors.setdefault((vector.device, vector.dtype), ([], []))
            owners.append(indices)
            parts.append(vector.reshape(-1))
        copies = [
            _Copy.of(torch.cat(parts), list(zip(owners, map(len, parts), strict=True)))
            for owners, parts in vectors.values()
        ]  # fmt: skip
        return Sample(self._entries, [reading.derive for reading in self._readings], copies)


class _Copy(NamedTuple):
    """Vectors one after another on the host, once `ready` is done: each with the readings among which it is divided."""

    host: torch.Tensor
    ready: torch.cuda.Event | None
    vectors: list[tuple[list[int], int]]

    @staticmethod
    def of(flat: torch.Tensor, vectors: list[tuple[list[int], int]]) -> "_Copy":
        if not flat.is_cuda:
            return _Copy(flat, None, vectors)
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        host.copy_(flat, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(flat.device))
        return _Copy(host, ready, vectors)

    def unpinned(self) -> "_Copy":
        """The same in ordinary memory, if the copy is done."""
        if self.ready is None or not self.ready.query():
            return self
        return _Copy(self.host.clone(), None, self.vectors)


class Sample(NamedTuple):
    """The numbers of a sample on the host, or soon there."""

    entries: list[Entry]
    derives: list[Callable[[Sequence[float]], Iterable[tuple[str, object]]]]
    copies: list[_Copy]

    def unpinned(self) -> "Sample":
        """The same in ordinary memory, which many samples may wait in until somebody asks for their records."""
        return self._replace(copies=[copy.unpinned() for copy in self.copies])

    def read(self) -> list[tuple[Entry, dict[str, object]]]:
        """The metrics of each reading, in the order in which they came; waits for the copies."""
        numbers: list[list[float]] = [[] for _ in self.entries]
        for host, ready, vectors in self.copies:
            if ready is not None:
                ready.synchronize()
            values, start = host.tolist(), 0
            for owners, size in vectors:
                share = size // len(owners) if owners else 0
                for owner in owners:
                    numbers[owner] += values[start : start + share]
                    start += share
                start += size - share * len(owners)
        derived = zip(self.entries, self.derives, numbers, strict=True)
        return [(entry, dict(derive(found))) for entry, derive, found in derived]


def _quantiles_of(spans: torch.Tensor) -> torch.Tensor:
    """float64 [readings, 3]: quantiles of the binades that blocks span, NaN where no block has a number."""
    largest, smallest = spans[:, 0].double(), spans[:, 1].double()
    binades = largest.log2_().sub_(smallest.log2_()).flatten(1)  # of a block without a number: -inf
    binades.masked_fill_(binades < 0, math.nan)
    quantiles = torch.full((3,), _QUANTILES[2], dtype=torch.float64, device=spans.device)  # no copy from the host
    for index in range(2):
        quantiles[index].fill_(_QUANTILES[index])
    return torch.nanquantile(binades, quantiles, dim=1).t()


def _stacked(*numbers: torch.Tensor) -> torch.Tensor:
    return torch.stack([number.double() for number in numbers])


# ------------------------------------------------------------------------------------------------------------ tensors


class Source:
    """A tensor [.., C] that is measured as a whole, and whose operands are: its amax is measured once."""

    def __init__(self, backend: Backend, matrix: torch.Tensor) -> None:
        self.backend, self.matrix = backend, matrix
        self._amax: Maybe = None

    def read(self, with_amax: bool = True) -> Reading:
        """amax (NaN of a tensor with NaN) and the counts of NaN and infinity, of all elements."""
        matrix = self.matrix
        counts = matrix.isfinite().sum(), matrix.isnan().sum()
        if with_amax:
            low, high = torch.aminmax(matrix)
            counts = (*counts, torch.maximum(low.neg(), high))
        return Reading(_stacked(*counts), partial(of_tensor, matrix.numel()))

    @property
    def amax(self) -> torch.Tensor:
        """float32 (): the largest magnitude, NaN ignored."""
        if self._amax is None:
            self._amax = self.backend.amax(self.matrix)
        return self._amax


# -------------------------------------------------------------------------------------------------------------- casts


class Quantized(NamedTuple):
    """Rows of an operand form [R, C], and what a cast made of them."""

    x: torch.Tensor
    operand: Operand
    cast: Cast


def _casts_whole(cast: Cast) -> bool:
    """True where rows of an operand cannot be cast alone: their bytes depend on more of the others than an amax."""
    takes_amax = cast.takes_amax and cast.tensor_scale != "row"
    return (
        cast.is_stochastic or (cast.format.is_per_tensor and not (takes_amax or cast.is_delayed))
        or (takes_amax and cast.hadamard is not None)
    )  # fmt: skip


def quantized(
    source: Source, cast: Cast, transposed: bool, part: slice, *, seed: Maybe, stream: int = 0, batch: int = 0,
    scale_enc: Maybe = None,
) -> Quantized:  # fmt: skip
    """The rows `part` of the operand that `cast` makes of a matrix, or of its transpose: the bytes of the whole cast.

    Only these rows are cast where nothing in their bytes depends on the others but an amax.
    """
    backend, matrix = source.backend, source.matrix
    takes_amax, is_whole = cast.takes_amax and cast.tensor_scale != "row", _casts_whole(cast)
    own = matrix[:, part] if transposed else matrix[part]
    operand = backend.quantize(
        matrix if is_whole else own, cast, transposed=transposed, seed=seed if cast.is_stochastic else None,
        stream=stream, batch=batch, amax=source.amax if takes_amax and not is_whole else None,
        scale_enc=scale_enc if cast.is_delayed else None,
    )  # fmt: skip
    return Quantized(own.t() if transposed else own, _rows_of(operand, part) if is_whole else operand, cast)


def _rows_of(operand: Operand, part: slice) -> Operand:
    """Rows of an operand, of whole tiles of its format."""
    scale, level, height = operand.scale, operand.tensor_scale, operand.format.block[0]
    if scale.dim() and height is not None:
        scale = scale[part.start // height : -(-part.stop // height)]
    if level is not None and level.dim():
        level = level[part]
    return dataclasses.replace(
        operand, codes=operand.codes[part], scale=scale, tensor_scale=level, rows=part.stop - part.start
    )  # fmt: skip


def read_rows(backend: Backend, x_RC: torch.Tensor, made: Quantized | None, wanted: frozenset[str]) -> Reading:
    """The metrics of rows of an operand and of their cast: of values, of scales, of the error in every binade.

    Without a cast those of the rows alone, in blocks of 32.
    """
    cast = None if made is None else made.cast
    block = 32 if cast is None else cast.format.block[1]
    derive = partial(of_rows, wanted, None if cast is None else cast.format.scale)
    finite = x_RC.isfinite()
    x = torch.where(finite, x_RC, 0).double()
    magnitudes = x.abs()
    spans = _spans(magnitudes, block) if wanted.intersection(OF_SAMPLE) else None
    flat, nothing = x.reshape(-1), x.new_zeros(())
    signal, count, peak = flat.dot(flat), finite.sum(), magnitudes.amax()
    noise = product = flushed = zero = clipped = nothing
    scales, binades = x.new_zeros(SCALES + 2), x.new_zeros(2 * BINADES)
    if made is not None:
        values = backend.dequantize(made.operand, torch.float32)
        q = torch.where(finite, values, 0).double()
        error = x - q
        if wanted.intersection(OF_CAST):
            d, is_zero = error.reshape(-1), q == 0
            noise, product = d.dot(d), flat.dot(q.reshape(-1))
            flushed, zero = (is_zero & (x != 0)).sum(), (is_zero & finite).sum()
            clipped = _clipped(backend, made) if "clip" in wanted else nothing
        if wanted.intersection(OF_SCALES):
            scales = _count_scales(made.operand.scale)
        if "error_by_magnitude" in wanted:
            binades = _sum_binades(x, error)
    sums = _stacked(signal, noise, product, count, flushed, zero, clipped, peak)
    return Reading(torch.cat([sums, scales, binades]), derive, spans)


def _spans(magnitudes: torch.Tensor, block: int | None) -> torch.Tensor:
    """[2, R, blocks]: the largest magnitude of each block of `block` elements (None: a row), and the smallest one
    above zero.
    """
    rows, length = magnitudes.shape
    block = block or length
    blocks = torch.nn.functional.pad(magnitudes, (0, -length % block)).view(rows, -1, block)
    return torch.stack([blocks.amax(2), blocks.masked_fill(blocks == 0, math.inf).amin(2)])


def _clipped(backend: Backend, made: Quantized) -> torch.Tensor:
    """The number of elements beyond the largest magnitude of their block; under a Hadamard transform those of it."""
    x, q = made.x, made.operand
    if q.hadamard is not None:
        x = transform(x, q.hadamard)
    largest = torch.full_like(q.codes.view(torch.uint8), largest_byte(q.format.element)).view(q.codes.dtype)
    limit = dataclasses.replace(q, codes=largest, hadamard=None, length=q.stored_length)
    return (x.isfinite() & (x.abs() > backend.dequantize(limit, torch.float32))).sum()


def _count_scales(scale: torch.Tensor) -> torch.Tensor:
    """Counts of those at the limits (of float32; those of bytes are counted anyway), and of every byte that a scale may
    be, of float32 of the byte of its exponent.
    """
    flat = scale.reshape(-1)
    if flat.dtype == torch.float32:
        at_limits = _stacked((flat <= 2.0**-126).sum() - (flat == 0).sum(), (flat >= 2.0**126).sum())
        codes = flat.view(torch.int32) >> 23
    else:
        at_limits, codes = torch.zeros(2, dtype=torch.float64, device=flat.device), flat.to(torch.int32)
    edges = torch.arange(SCALES + 1, dtype=torch.int32, device=flat.device)
    counts = torch.searchsorted(codes.sort().values, edges).diff()  # deterministic, as counting by additions is not
    return torch.cat([at_limits, counts.double()])


def _sum_binades(x: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Sums of x^2, then of the squared error, by binades below the largest magnitude; of every k-th element of many.

    Binade k: magnitudes in (peak / 2^(k + 1), peak / 2^k].
    """
    stride = max(1, x.numel() >> 14)
    a, d = x.reshape(-1)[::stride], error.reshape(-1)[::stride]
    (mantissa, exponent), (a_mantissa, a_exponent) = torch.frexp(x.abs().amax()), torch.frexp(a.abs())
    which = (exponent - a_exponent - (a_mantissa > mantissa).int()).masked_fill(a == 0, -1)
    binades = torch.arange(BINADES, dtype=which.dtype, device=x.device)
    squares = torch.stack([a * a, d * d])[:, :, None]
    return torch.where(which[:, None] == binades, squares, 0).sum(1).view(-1)


def read_noise(source: Source, cast: Cast, transposed: bool, part: slice, options: Options) -> Reading:
    """Noise of stochastic rounding over a few seeds, which no generator gives."""
    draws, device = [], source.matrix.device
    for number in range(DRAWS):
        seed = torch.full((2,), 0x5A17, dtype=torch.int64, device=device)
        seed[0].fill_(number)
        made = quantized(source, cast, transposed, part, **{**options, "seed": seed})
        values = source.backend.dequantize(made.operand, torch.float32)
        draws.append(torch.where(made.x.isfinite(), values - made.x.float(), 0).double())
    errors = torch.stack(draws)
    numbers = _stacked(errors.mean(), errors.var(0).mean())
    return Reading(numbers, partial(of_noise, errors.numel()))


# ----------------------------------------------------------------------------------------------------------- products


def read_product(result: torch.Tensor, a_RC: torch.Tensor, b_SC: torch.Tensor, bias: Maybe = None) -> Reading:
    """Relative error and cosine of a part of a product, ``result ~ a @ b.T + bias``, against float64."""
    exact = a_RC.double() @ b_SC.double().t()
    if bias is not None:
        exact = exact + bias.double()
    counted = exact.isfinite()
    a, b = (torch.where(counted, values.double(), 0).reshape(-1) for values in (exact, result))
    error = a - b
    return Reading(_stacked(a.dot(a), error.dot(error), b.dot(b), a.dot(b)), of_product)
