"""Metrics of `microfloat.metrics` on the device of the tensors: sums there, formulas on the host.

A `Reading` is a float64 vector on the device and the way from its numbers to metrics, so that a watched step waits for
no GPU: vectors are read when somebody asks for records. Nothing here draws a random number or writes to its inputs,
and no operation depends on torch's deterministic mode.

Legend: R = rows of an operand form (of a part of it), C = its contraction length.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from microfloat.formats import ScaleFormat
from microfloat.recipes import Cast
from microfloat.torch._typing import Options
from microfloat.torch.backends.base import Backend
from microfloat.torch.reference._hadamard import transform
from microfloat.torch.tensor import QuantizedTensor
from microfloat.watching import (
    BINADES,
    DRAWS,
    OF_CAST,
    OF_SCALES,
    SCALES,
    largest_byte,
    limits_of,
    of_binades,
    of_cast,
    of_noise,
    of_product,
    of_sample,
    of_scales,
    of_tensor,
)

__all__ = [
    "Quantized", "Reading", "quantized", "read", "read_cast", "read_noise", "read_product", "read_sample",
    "read_tensor",
]  # fmt: skip


class Reading(NamedTuple):
    """Numbers on a device, float64 [n], and the function that makes (metric, value) pairs of them."""

    numbers: torch.Tensor
    derive: Callable[[Sequence[float]], Iterable[tuple[str, object]]]


def read(readings: Sequence[Reading]) -> list[dict[str, object]]:
    """The metrics of each reading: one copy from each device."""
    devices: dict[torch.device, list[int]] = {}
    for index, reading in enumerate(readings):
        devices.setdefault(reading.numbers.device, []).append(index)
    found: list[dict[str, object]] = [{}] * len(readings)
    for indices in devices.values():
        sizes = [readings[index].numbers.numel() for index in indices]
        numbers = torch.cat([readings[index].numbers for index in indices]).tolist()
        for index, size in zip(indices, sizes, strict=True):
            found[index] = dict(readings[index].derive(numbers[:size]))
            del numbers[:size]
    return found


def _stacked(*numbers: torch.Tensor) -> torch.Tensor:
    return torch.stack([number.double() for number in numbers])


# ------------------------------------------------------------------------------------------------------------ tensors


def read_tensor(matrix: torch.Tensor, with_amax: bool = True) -> Reading:
    """amax (NaN of a tensor with NaN) and the counts of NaN and infinity, of all elements."""
    counts, size = (matrix.isfinite().sum(), matrix.isnan().sum()), matrix.numel()
    if with_amax:
        low, high = torch.aminmax(matrix)
        counts = (*counts, torch.maximum(low.neg(), high))
    return Reading(_stacked(*counts), partial(of_tensor, size))


def read_sample(x_RC: torch.Tensor, block: int) -> Reading:
    """crest, and the dynamic range of blocks of `block` elements, of rows of an operand form."""
    x = torch.where(x_RC.isfinite(), x_RC, 0).double().abs()
    spans = torch.nn.functional.pad(x, (0, -x.shape[1] % block)).reshape(-1, block)
    smallest = spans.masked_fill(spans == 0, math.inf).amin(1)
    spans = torch.log2(spans.amax(1)) - torch.log2(smallest)  # of a block without a number: -inf
    spans = spans.masked_fill(spans < 0, math.nan)
    quantiles = torch.nanquantile(spans, torch.tensor([0.5, 0.99, 1.0], dtype=torch.float64, device=x.device))

    flat = x.reshape(-1)
    sums = _stacked(x.amax(), flat.dot(flat), x_RC.isfinite().sum())
    return Reading(torch.cat([sums, quantiles]), of_sample)


# -------------------------------------------------------------------------------------------------------------- casts


class Quantized(NamedTuple):
    """Rows of an operand form, and what a cast made of them: codes with their scales, and float32 values [R, C]."""

    x: torch.Tensor
    q: QuantizedTensor
    values: torch.Tensor
    cast: Cast


def quantized(
    backend: Backend, matrix: torch.Tensor, cast: Cast, transposed: bool, part: slice, *, seed: torch.Tensor | None,
    stream: int = 0, batch: int = 0, scale_enc: torch.Tensor | None = None,
) -> Quantized:  # fmt: skip
    """The rows `part` of the operand that `cast` makes of a matrix, or of its transpose: the bytes of the whole cast.

    Only these rows are cast where nothing in their bytes depends on the others but an amax.
    """
    takes_amax = cast.takes_amax and cast.tensor_scale != "row"
    is_whole = (
        cast.is_stochastic or (cast.format.is_per_tensor and not (takes_amax or cast.is_delayed))
        or (takes_amax and cast.hadamard is not None)
    )  # fmt: skip
    own = matrix[:, part] if transposed else matrix[part]
    source = matrix if is_whole else own
    operand = backend.quantize(
        source, cast, transposed=transposed, seed=seed if cast.is_stochastic else None, stream=stream, batch=batch,
        amax=backend.amax(matrix) if takes_amax and not is_whole else None,
        scale_enc=scale_enc if cast.is_delayed else None,
    )  # fmt: skip
    shape = source.shape[::-1] if transposed else source.shape
    q: Any = QuantizedTensor.from_operand(operand, cast, axis=1, shape=shape, dtype=torch.float32)
    q = q[part] if is_whole else q
    return Quantized(own.t() if transposed else own, q, backend.dequantize(q.to_operand(), torch.float32), cast)


def read_cast(backend: Backend, made: Quantized, wanted: frozenset[str]) -> list[Reading]:
    """The metrics of a cast: of its values, of its scales, and of the error in every binade."""
    finite = made.x.isfinite()
    x = torch.where(finite, made.x, 0).double()
    q = torch.where(finite, made.values, 0).double()
    error = x - q
    readings = []
    if wanted.intersection(OF_CAST):
        a, b, d = (values.reshape(-1) for values in (x, q, error))
        is_zero = q == 0
        clipped = _clipped(backend, made) if "clip" in wanted else finite.new_zeros(())
        sums = a.dot(a), d.dot(d), a.dot(b), finite.sum(), (is_zero & (x != 0)).sum(), (is_zero & finite).sum()
        readings.append(Reading(_stacked(*sums, clipped), of_cast))
    if wanted.intersection(OF_SCALES):
        readings.append(_read_scales(made.q.scale, made.q.format.scale))
    if "error_by_magnitude" in wanted:
        readings.append(_read_binades(x, error))
    return readings


def _clipped(backend: Backend, made: Quantized) -> torch.Tensor:
    """The number of elements beyond the largest magnitude of their block; under a Hadamard transform those of it."""
    x, q = made.x, made.q
    if made.cast.hadamard is not None:
        x = transform(x, made.cast.hadamard)
    largest = torch.full_like(q.codes.view(torch.uint8), largest_byte(q.format.element)).view(q.codes.dtype)
    cast = Cast(q.format, made.cast.scale_rule)
    limit = QuantizedTensor(largest, q.scale, q.tensor_scale, cast, axis=1, shape=x.shape, dtype=torch.float32)
    return (x.isfinite() & (x.abs() > backend.dequantize(limit.to_operand(), torch.float32))).sum()


def _read_scales(scale: torch.Tensor, fmt: ScaleFormat) -> Reading:
    """Counts of every byte that a scale may be, of float32 of the byte of its exponent, and of those at the limits."""
    flat = scale.reshape(-1)
    if flat.dtype == torch.float32:
        at_limits = _stacked((flat <= 2.0**-126).sum() - (flat == 0).sum(), (flat >= 2.0**126).sum())
        codes = flat.view(torch.int32) >> 23
    else:
        lowest, highest = limits_of(fmt)
        codes = flat.to(torch.int32)
        at_limits = _stacked((codes == lowest).sum(), (codes == highest).sum())
    edges = torch.arange(SCALES + 1, dtype=torch.int32, device=flat.device)
    counts = torch.searchsorted(codes.sort().values, edges).diff()  # deterministic, as counting by additions is not

    return Reading(torch.cat([at_limits, counts.double()]), partial(of_scales, fmt))


def _read_binades(x: torch.Tensor, error: torch.Tensor) -> Reading:
    """The relative error of elements, by binades below the largest magnitude; of every k-th element of many."""
    stride = max(1, x.numel() >> 14)
    a, d = x.reshape(-1)[::stride], error.reshape(-1)[::stride]
    which = (torch.log2(x.abs().amax()) - torch.log2(a.abs())).floor()
    binades = torch.arange(BINADES, dtype=torch.float64, device=x.device)
    in_binade = (which[:, None] == binades).double()
    sums = torch.stack([a * a, d * d]) @ in_binade

    return Reading(sums.view(-1), of_binades)


def read_noise(
    backend: Backend, matrix: torch.Tensor, cast: Cast, transposed: bool, part: slice, options: Options
) -> Reading:
    """Noise of stochastic rounding over a few seeds, which no generator gives."""
    draws = []
    for number in range(DRAWS):
        seed = torch.tensor([number, 0x5A17], dtype=torch.int64, device=matrix.device)
        made = quantized(backend, matrix, cast, transposed, part, **{**options, "seed": seed})
        draws.append(torch.where(made.x.isfinite(), made.values - made.x.float(), 0).double())
    errors = torch.stack(draws)
    numbers = _stacked(errors.mean(), errors.var(0).mean())
    return Reading(numbers, partial(of_noise, errors.numel()))


# ----------------------------------------------------------------------------------------------------------- products


def read_product(
    result: torch.Tensor, a_RC: torch.Tensor, b_SC: torch.Tensor, bias: torch.Tensor | None = None
) -> Reading:
    """Relative error and cosine of a part of a product, ``result ~ a @ b.T + bias``, against float64."""
    exact = a_RC.double() @ b_SC.double().t()
    if bias is not None:
        exact = exact + bias.double()
    counted = exact.isfinite()
    a, b = (torch.where(counted, values.double(), 0).reshape(-1) for values in (exact, result))
    error = a - b
    return Reading(_stacked(a.dot(a), error.dot(error), b.dot(b), a.dot(b)), of_product)
