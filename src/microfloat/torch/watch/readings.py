"""Metrics of `microfloat.metrics` on the device of the tensors: sums there, formulas on the host.

A `Reading` is a vector of sums on the device and the way from them to metrics, so that a watched step waits for no GPU:
the end of a `Sample` copies all of them to the host, and whoever asks for records waits for the copy. Nothing here
draws a random number or writes to its inputs, and no operation depends on torch's deterministic mode.

Legend: R = rows of an operand form (of a part of it), C = its contraction length.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch

from microfloat import watching
from microfloat.recipes import Cast, Gemm
from microfloat.torch._typing import Maybe, Options
from microfloat.torch.backends.base import Backend, Operand
from microfloat.torch.reference._hadamard import transform
from microfloat.watching import BINADES, SCALES, Entry


class Reading(NamedTuple):
    """float64 sums on a device, and the function that makes (metric, value) pairs of them."""

    numbers: torch.Tensor
    derive: Callable[[Sequence[float]], Iterable[tuple[str, object]]]


class Sample:
    """The readings of a sampled step: collected on their devices, then copied to the host, and read there."""

    def __init__(self) -> None:
        self._subjects: list[tuple[Entry, Reading]] = []
        # Of each device: the indices of its readings, their numbers one after another, and the end of the copy.
        self._copies: list[tuple[list[int], torch.Tensor, torch.cuda.Event | None]] = []

    def __bool__(self) -> bool:
        return bool(self._subjects)

    def add(self, entry: Entry, reading: Reading) -> None:
        """Keep a reading of this subject."""
        self._subjects.append((entry, reading))

    def close(self) -> None:
        """Begin the copies to the host, without waiting for them."""
        by_device: dict[torch.device, list[int]] = {}
        for index, (_, reading) in enumerate(self._subjects):
            by_device.setdefault(reading.numbers.device, []).append(index)
        for device, indices in by_device.items():
            numbers = torch.cat([self._subjects[index][1].numbers for index in indices])
            host = numbers.to("cpu", non_blocking=True)  # into pinned memory
            ready = torch.cuda.current_stream(device).record_event() if numbers.is_cuda else None
            self._copies.append((indices, host, ready))  # type: ignore[arg-type]

    def unpin(self) -> None:
        """Move the numbers of copies that are done to ordinary memory, where many samples may wait."""
        self._copies = [
            (indices, host.clone(), None) if ready is not None and ready.query() else (indices, host, ready)
            for indices, host, ready in self._copies
        ]

    def read(self) -> list[tuple[Entry, dict[str, object]]]:
        """The metrics of each reading, in the order in which they came; waits for the copies."""
        numbers: list[list[float]] = [[] for _ in self._subjects]
        for indices, host, ready in self._copies:
            if ready is not None:
                ready.synchronize()
            sizes = [self._subjects[index][1].numbers.numel() for index in indices]
            for index, part in zip(indices, host.split(sizes), strict=True):
                numbers[index] = part.tolist()
        return [
            (entry, dict(reading.derive(found)))
            for (entry, reading), found in zip(self._subjects, numbers, strict=True)
        ]


def _stacked(*numbers: torch.Tensor) -> torch.Tensor:
    return torch.stack([number.double() for number in numbers])


class Source:
    """A tensor [.., C] whose operands are measured too, with the amax that they share."""

    def __init__(self, backend: Backend, matrix: torch.Tensor) -> None:
        self.backend, self.matrix = backend, matrix

    def read(self, with_amax: bool = True) -> Reading:
        """amax (NaN of a tensor with NaN) and the counts of NaN and infinity, of all elements."""
        matrix = self.matrix
        counts = matrix.isfinite().sum(), matrix.isnan().sum()
        if with_amax:
            low, high = torch.aminmax(matrix)
            counts = (*counts, torch.maximum(low.neg(), high))
        return Reading(_stacked(*counts), partial(watching.of_tensor, matrix.numel()))

    @cached_property
    def amax(self) -> torch.Tensor:
        """The largest magnitude, float32 (); NaN is ignored."""
        return self.backend.amax(self.matrix)


class Quantized(NamedTuple):
    """Rows of an operand form [R, C], and the operand that a cast made of them."""

    x: torch.Tensor
    operand: Operand
    cast: Cast


def quantized(
    source: Source, cast: Cast, transposed: bool, part: slice, *, seed: Maybe, stream: int = 0, batch: int = 0,
    scale_enc: Maybe = None,
) -> Quantized:  # fmt: skip
    """The rows `part` of the operand that `cast` makes of a matrix, or of its transpose: the bytes of the whole cast.

    Only these rows are cast where their bytes depend on other rows by an amax alone.
    """
    backend, matrix, takes_amax = source.backend, source.matrix, cast.takes_amax and cast.tensor_scale != "row"
    depends = cast.hadamard is not None if takes_amax else cast.format.is_per_tensor and not cast.is_delayed
    is_whole = cast.is_stochastic or depends
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
    """The metrics of rows of an operand and of their cast; without one those of the rows alone, in blocks of 32."""
    finite = x_RC.isfinite()
    x = torch.where(finite, x_RC, 0).double()
    magnitudes, flat, nothing = x.abs(), x.reshape(-1), x.new_zeros(())
    signal, count, peak = flat.dot(flat), finite.sum(), magnitudes.amax()
    noise = product = flushed = zero = clipped = nothing
    spans, scales, binades = x.new_zeros(3), x.new_zeros(SCALES + 2), x.new_zeros(2 * BINADES)
    scale_format, block = None, 32
    if made is not None:
        fmt = made.cast.format
        scale_format, block = fmt.scale, fmt.block[1] or x.shape[1]
        q = torch.where(finite, backend.dequantize(made.operand, torch.float32), 0).double()
        error = x - q
        if wanted.intersection(watching.OF_CAST):
            d, is_zero = error.reshape(-1), q == 0
            noise, product = d.dot(d), flat.dot(q.reshape(-1))
            flushed, zero = (is_zero & (x != 0)).sum(), (is_zero & finite).sum()
            clipped = _clipped(backend, made) if "clip" in wanted else nothing
        if wanted.intersection(watching.OF_SCALES):
            scales = _count_scales(made.operand.scale)
        if "error_by_magnitude" in wanted:
            binades = _sum_binades(x, error)
    if wanted.intersection(watching.OF_SAMPLE):
        spans = _spanned(magnitudes, block)
    sums = _stacked(signal, noise, product, count, flushed, zero, clipped, peak)
    return Reading(torch.cat([sums, spans, scales, binades]), partial(watching.of_rows, wanted, scale_format))


def _spanned(magnitudes: torch.Tensor, block: int) -> torch.Tensor:
    """Three quantiles of the binades that blocks of `block` elements span; NaN where no block has a number."""
    blocks = torch.nn.functional.pad(magnitudes, (0, -magnitudes.shape[1] % block)).reshape(-1, block)
    smallest = blocks.masked_fill(blocks == 0, math.inf).amin(1)
    binades = blocks.amax(1).log2_() - smallest.log2_()  # of a block without a number: -inf
    quantiles = binades.new_ones(3)  # filled on the device: nothing is copied from the host
    for index, quantile in enumerate((0.5, 0.99)):
        quantiles[index].fill_(quantile)
    return torch.nanquantile(binades.masked_fill_(binades < 0, math.nan), quantiles)


def _clipped(backend: Backend, made: Quantized) -> torch.Tensor:
    """The number of elements, after a Hadamard transform if any, beyond the largest magnitude of their block."""
    x, q = made.x, made.operand
    if q.hadamard is not None:
        x = transform(x, q.hadamard)
    largest = torch.full_like(q.codes.view(torch.uint8), watching.largest_byte(q.format.element)).view(q.codes.dtype)
    limit = dataclasses.replace(q, codes=largest, hadamard=None, length=q.stored_length)
    return (x.isfinite() & (x.abs() > backend.dequantize(limit, torch.float32))).sum()


def _count_scales(scale: torch.Tensor) -> torch.Tensor:
    """Counts of float32 scales at their limits, and of all scales by byte; of float32 by the byte of the exponent."""
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
    """Noise of stochastic rounding over the seeds that watches have for it."""
    draws, device = [], source.matrix.device
    for number, key in watching.NOISE_SEEDS:
        seed = torch.full((2,), key, dtype=torch.int64, device=device)
        seed[0].fill_(number)
        made = quantized(source, cast, transposed, part, **{**options, "seed": seed})
        values = source.backend.dequantize(made.operand, torch.float32)
        draws.append(torch.where(made.x.isfinite(), values - made.x.float(), 0).double())
    errors = torch.stack(draws)
    numbers = _stacked(errors.mean(), errors.var(0).mean())
    return Reading(numbers, partial(watching.of_noise, errors.numel()))


def read_product(
    gemm: Gemm, result: torch.Tensor, a_RC: torch.Tensor, b_SC: torch.Tensor, bias: Maybe = None
) -> Reading:  # fmt: skip
    """Relative error and cosine of a part of a product, ``result ~ a @ b.T + bias``, against float64."""
    exact = a_RC.double() @ b_SC.double().t()
    if bias is not None:
        exact = exact + bias.double()
    counted = exact.isfinite()
    a, b = (torch.where(counted, values.double(), 0).reshape(-1) for values in (exact, result))
    error = a - b
    return Reading(_stacked(a.dot(a), error.dot(error), b.dot(b), a.dot(b)), partial(watching.of_product, gemm))
