"""Metrics of `microfloat.metrics` on the device of the tensors: sums there, formulas on the host.

A `Reading` is a vector of sums on the device and the way from them to metrics, so that a watched step waits for no GPU.
`Readings` are those of a sample: its end reduces many at once and copies them to the host, and whoever asks for records
waits for the copy. Where a backend has kernels, `microfloat.torch.measured` sums by plans of launches, one for all
that is asked of a tensor, whose numbers lie one after another in a few allocations of the sample; the torch operations
here define what. Nothing here draws a random number or writes to its inputs, and no operation depends on torch's
deterministic mode.

Legend: R = rows of an operand form (of a part of it), C = its contraction length.
"""

import dataclasses
import functools
import importlib
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch

from microfloat.formats import ScaleFormat
from microfloat.passes import CastInputs
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
    "Place", "Quantized", "Reading", "Readings", "Rows", "Sample", "Slab", "Source", "casts_whole", "quantized",
    "read_noise", "read_operand", "read_product", "read_result", "read_rows", "serves",
]  # fmt: skip

_QUANTILES = 0.5, 0.99, 1.0
_MOST_KEPT = 1 << 26  # bytes that wait to be gathered
_PLACED_TOGETHER = 1 << 20  # bytes in one allocation
_WORDS = 4  # int64 in which a whole tensor is counted


class Place:
    """Elements of an allocation of a sample that a launch fills, divided among the readings that own them."""

    __slots__ = ("_chunk", "_offset", "address", "owners", "size")

    def __init__(self, chunk: torch.Tensor, address: int, offset: int, size: int) -> None:
        self._chunk, self._offset, self.size = chunk, offset, size
        self.address = address + offset * chunk.element_size()
        self.owners: list[int] = []

    @property
    def tensor(self) -> torch.Tensor:
        """These elements."""
        return self._chunk[self._offset : self._offset + self.size]


class _Chunk:
    """An allocation that places are taken from."""

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=dtype, device=device)
        self.places: list[Place] = []
        self._address, self._used = self.tensor.data_ptr(), 0

    def take(self, size: int) -> Place | None:
        """So many elements, an even number, or None where they do not fit."""
        if self._used + size > len(self.tensor):
            return None
        place = Place(self.tensor, self._address, self._used, size)
        self._used += size
        self.places.append(place)
        return place

    def copy(self) -> "_Copy":
        """A copy on its way to the host."""
        return _Copy.of(self.tensor[: self._used], [(place.owners, place.size) for place in self.places])


class Reading(NamedTuple):
    """Numbers on a device, or their place, and the function that makes (metric, value) pairs of them.

    `spans` [2, R, blocks, pieces]: the largest and the smallest magnitude of each piece of a block, 0 and inf where
    none counts. Three quantiles of the binades that blocks span follow the numbers.
    """

    numbers: torch.Tensor | Place
    derive: Callable[[Sequence[float]], Iterable[tuple[str, object]]]
    spans: Maybe = None


class _Left(NamedTuple):
    """What launches have left to be gathered on a device: the table of it, and the memory that it points to."""

    programs: ModuleType
    rows: list[int]
    memory: list[torch.Tensor]


class Readings:
    """Readings of a sample, until it ends."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._readings: list[Reading] = []
        self._waiting: dict[tuple, list[int]] = {}  # readings with spans, by the shape of these
        self._bytes = 0
        self._quantiles: list[tuple[list[int], torch.Tensor]] = []
        self._left: dict[torch.device, _Left] = {}
        self._chunks: dict[tuple[torch.device, torch.dtype], list[_Chunk]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, entry: Entry, reading: Reading) -> None:
        """Keep a reading of this subject; spans of many are reduced together, and the largest of them do not wait."""
        spans = reading.spans
        if spans is not None:
            self._waiting.setdefault((spans.shape, spans.dtype, spans.device), []).append(len(self._readings))
            self._bytes += spans.numel() * spans.element_size()
        if isinstance(reading.numbers, Place):
            reading.numbers.owners.append(len(self._entries))
        self._entries.append(entry)
        self._readings.append(reading)
        if self._bytes > _MOST_KEPT:
            self._reduce()

    def place(self, device: torch.device, dtype: torch.dtype, size: int) -> Place:
        """So many elements, an even number: zeros, until a launch fills them."""
        chunks = self._chunks.setdefault((device, dtype), [])
        place = chunks[-1].take(size) if chunks else None
        if place is None:
            chunks.append(_Chunk(device, dtype, max(size, _PLACED_TOGETHER // dtype.itemsize)))
            place = chunks[-1].take(size)
        assert place is not None
        return place

    def leave(self, programs: ModuleType, rows: list[int], memory: torch.Tensor) -> None:
        """Keep what `measured.gather` reads until there is much of it."""
        left = self._left.setdefault(memory.device, _Left(programs, [], []))
        left.rows.extend(rows)
        left.memory.append(memory)
        self._bytes += memory.nbytes
        if self._bytes > _MOST_KEPT:
            self._reduce()

    def _reduce(self) -> None:
        for device, left in self._left.items():
            _module().gather(left.programs, device, left.rows)
        self._left.clear()
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
        numbers = [
            ([index], reading.numbers) for index, reading in enumerate(self._readings)
            if not isinstance(reading.numbers, Place)
        ]  # fmt: skip
        for indices, vector in (*numbers, *self._quantiles):
            owners, parts = vectors.setdefault((vector.device, vector.dtype), ([], []))
            owners.append(indices)
            parts.append(vector.reshape(-1))
        copies = [chunk.copy() for chunks in self._chunks.values() for chunk in chunks]
        copies += [
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
    largest, smallest = spans[:, 0].amax(-1).double(), spans[:, 1].amin(-1).double()
    binades = largest.log2_().sub_(smallest.log2_()).flatten(1)  # of a block without a number: -inf
    binades.masked_fill_(binades < 0, math.nan)
    quantiles = torch.full((3,), _QUANTILES[2], dtype=torch.float64, device=spans.device)  # no copy from the host
    for index in range(2):
        quantiles[index].fill_(_QUANTILES[index])
    return torch.nanquantile(binades, quantiles, dim=1).t()


def _stacked(*numbers: torch.Tensor) -> torch.Tensor:
    return torch.stack([number.double() for number in numbers])


@functools.cache
def _module() -> ModuleType:
    return importlib.import_module("microfloat.torch.measured")


def serves(backend: Backend, dtype: torch.dtype, cast: Cast | None = None) -> bool:
    """True where launches measure tensors of this dtype, and what this cast makes of them."""
    return backend.programs is not None and _module().serves(dtype, cast)


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


def _of_words(size: int, with_amax: bool, n: Sequence[float]) -> Iterable[tuple[str, object]]:
    bits, nans, infinities = (int(number) for number in n[:3])
    counts = size - nans - infinities, nans
    amax = math.nan if nans else struct.unpack("<f", struct.pack("<i", bits))[0]
    return of_tensor(size, (*counts, amax) if with_amax else counts)


# -------------------------------------------------------------------------------------------------------------- casts


class Rows(NamedTuple):
    """Rows of an operand that are measured, and their cast; None: the tensor's rows alone, in blocks of 32.

    `turned`: the operand is the transpose. `stream`: the word of its random counters. `in_use`: the layer casts so, by
    a seed that is known.
    """

    cast: Cast | None
    turned: bool = False
    stream: int = 0
    in_use: bool = True


class Slab(NamedTuple):
    """A factor of a product: rows of a matrix, all of them for a part that is None; `turned`: of its transpose."""

    matrix: torch.Tensor
    part: slice | None = None
    turned: bool = False

    @property
    def length(self) -> int:
        """R."""
        return self.matrix.shape[int(self.turned)] if self.part is None else self.part.stop - self.part.start

    @property
    def rows(self) -> torch.Tensor:
        """[R, C]."""
        matrix = self.matrix.t() if self.turned else self.matrix
        return matrix if self.part is None else matrix[self.part]


class Quantized(NamedTuple):
    """Rows of an operand form [R, C], and what a cast made of them."""

    x: torch.Tensor
    operand: Operand
    cast: Cast


def casts_whole(cast: Cast) -> bool:
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
    takes_amax, is_whole = cast.takes_amax and cast.tensor_scale != "row", casts_whole(cast)
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
    """[2, R, blocks, 1]: the largest magnitude of each block of `block` elements (None: a row), and the smallest one
    above zero.
    """
    rows, length = magnitudes.shape
    block = block or length
    blocks = torch.nn.functional.pad(magnitudes, (0, -length % block)).view(rows, -1, block)
    return torch.stack([blocks.amax(2), blocks.masked_fill(blocks == 0, math.inf).amin(2)])[..., None]


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
    return Reading(_stacked(a.dot(a), error.dot(error), b.dot(b), a.dot(b)), _of_parts)


def _of_parts(n: Sequence[float]) -> Iterable[tuple[str, object]]:
    return of_product([sum(n[number::4]) for number in range(4)])


# ----------------------------------------------------------------------------------------------------------- launches


def read_operand(
    readings: Readings, backend: Backend, matrix: torch.Tensor, measured: tuple[Rows, ...],
    parts: tuple[slice, slice], batch: int, inputs: CastInputs, wanted: frozenset[str],
) -> list[Reading]:  # fmt: skip
    """The readings of a whole matrix and of parts of it, by launches."""
    module = _module()
    words = readings.place(matrix.device, torch.int64, _WORDS)
    numbers = readings.place(matrix.device, torch.float64, module.NUMBERS * len(measured)) if measured else None
    rows, memory = module.measure_operand(backend.programs, matrix, measured, parts, batch, inputs, words, numbers)
    if rows:
        readings.leave(backend.programs, rows, memory)
    found = [Reading(words, partial(_of_words, matrix.numel(), True))]
    for one in measured:
        derive = partial(_of_gathered, wanted, None if one.cast is None else one.cast.format.scale)
        assert numbers is not None
        found.append(Reading(numbers, derive))
    return found


def _of_gathered(
    wanted: frozenset[str], fmt: ScaleFormat | None, n: Sequence[float]
) -> Iterable[tuple[str, object]]:  # fmt: skip
    """`of_rows` of sums, and of the ratios of the largest to the smallest magnitude of blocks: their number, those
    beside two quantiles, and the largest.
    """
    count, *ratios = n[-6:]
    quantiles = [math.nan] * 3
    if count:
        low, high, *others, largest = map(math.log2, ratios)
        for index, (below, above) in enumerate(((low, high), others)):
            weight = math.modf(_QUANTILES[index] * (count - 1))[0]
            quantiles[index] = below + weight * (above - below)
        quantiles[2] = largest
    return of_rows(wanted, fmt, [*n[:-6], *quantiles])


def read_result(
    readings: Readings, backend: Backend, result: torch.Tensor, factors: tuple[Slab, Slab] | None = None,
    starts: tuple[int, int] = (0, 0), bias: Maybe = None,
) -> list[Reading]:  # fmt: skip
    """The readings of a whole result, and of the part of it that is the product of these factors, by launches."""
    module = _module()
    words, numbers = readings.place(result.device, torch.int64, _WORDS), None
    found = [Reading(words, partial(_of_words, result.numel(), False))]
    if factors is not None:
        a, b = factors
        size = module.numbers_of_product(a.length, b.length)
        numbers = readings.place(result.device, torch.float64, size)
        found.append(Reading(numbers, _of_parts))
    module.measure_result(backend.programs, result, words, numbers, factors, starts, bias)
    return found
