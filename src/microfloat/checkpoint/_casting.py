"""Casts of one parameter in slabs of rows, so that memory holds a slab and never a tensor.

A slab ends at the end of a tile, and the amax of a tensor is measured before its first slab is cast: the bytes are
those of one cast of the whole parameter. Experts [E, N, K] are cast one by one.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from microfloat.checkpoint._arrays import in_bands, scale_in_place
from microfloat.checkpoint.families.patterns import parts_of_stacked, stacked_name
from microfloat.checkpoint.records import Record, experts_of, matrix_of
from microfloat.formats import FORMATS, ScaledFormat
from microfloat.layout import scale_grid
from microfloat.recipes import Cast
from microfloat.reference import casters, pack_fp6

_SLAB = 1 << 22  # elements
_AT_A_TIME = 1 << 21  # elements that all threads cast together
_UNIT = Cast(FORMATS["fp8_tensor"], "amax"), Cast(FORMATS["fp8_tensor_e5m2"], "amax")


def tile_rows(record: Record) -> int:
    """The number of rows of a tile; 1 for a plain record."""
    return record.format.block[0] or 1 if record.format else 1


def slabs(record: Record, multiple: int = 1, elements: int = _SLAB) -> Iterator[tuple[int, Record]]:
    """(expert, record of some of its rows [R, K]) in order; R is a multiple of `multiple` but for the last rows."""
    rows, length = (1, 1, *record.logical_shape)[-2:]
    step = math.lcm(multiple, tile_rows(record))
    step *= max(elements // max(length, 1) // step, 1)
    for expert in range(experts_of(record)):
        matrix = matrix_of(record, expert)
        for first in range(0, rows, step):
            yield expert, matrix.narrow(first, min(first + step, rows))


def experts_apart(record: Record, alternate: bool) -> list[Record]:
    """The matrices [N, K], or biases [N], of stacked experts under the names of numbered ones, without a copy.

    `alternate`: rows of gate and up stand in turn. One record of the whole where its tiles hold rows of two parts.
    """
    names, rows, made = parts_of_stacked(record.name), record.logical_shape[1], []
    height, share = tile_rows(record), rows // max(len(names), 1)
    if not names or (height > 1 and len(names) > 1 and (alternate or share % height)):
        return [record]
    for expert in range(record.logical_shape[0]):
        one = replace(record, codes=record.codes[expert], logical_shape=record.logical_shape[1:])
        one = matrix_of(record, expert) if len(record.logical_shape) == 3 else one
        for i, name in enumerate(names):
            part = one.narrow(i, rows, len(names)) if alternate else one.narrow(i * share, (i + 1) * share)
            made.append(replace(part, name=name.format(expert)))
    return made


@dataclass(frozen=True, eq=False)
class Stack(Record):
    """Numbered experts as one plain parameter of `logical_shape`: the matrices of each, and if their rows alternate."""

    experts: tuple[tuple[Record, ...], ...] = ()
    alternate: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.nbytes for row in self.experts for part in row)


def stacked(records: Iterable[Record], alternate: bool) -> list[Record]:
    """The records, with a `Stack` for each group of numbered experts that is complete, at the place of its first."""
    groups: dict[str, dict[tuple[int, int], Record]] = {}
    placed: dict[str, Record | None] = {}
    for record in records:
        name, *place = stacked_name(record.name) or (record.name,)
        if place:
            groups.setdefault(name, {})[place[0], place[1]] = record
        placed[name] = None if place else record
    made: list[Record] = []
    for name, record in placed.items():
        group, width = groups.get(name, {}), len(parts_of_stacked(name))
        count = len(group) // max(width, 1)
        if record is not None or group.keys() != {(e, i) for e in range(count) for i in range(width)}:
            made += group.values() if record is None else [record]
            continue
        parts = tuple(tuple(group[e, i] for i in range(width)) for e in range(count))
        shape = (*parts[0][0].logical_shape[1:], sum(part.logical_shape[0] for part in parts[0]))
        made.append(Stack(
            name, parts[0][0].codes, logical_shape=(count, *shape), source=parts[0][0].source, experts=parts,
            alternate=alternate,
        ))  # fmt: skip
    return made


def turned_matrices(record: Record, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The values [K, N] of each expert of a record [E, N, K] or of a `Stack`; the biases [N] of one of biases."""
    if isinstance(record, Stack):
        values = (joined_rows([part.dequantize(dtype) for part in row], record.alternate) for row in record.experts)
    else:
        values = (matrix_of(record, expert).dequantize(dtype) for expert in range(experts_of(record)))
    return (np.ascontiguousarray(one.T) for one in values)


def joined_rows(parts: Sequence[np.ndarray], alternate: bool) -> np.ndarray:
    """The rows of the parts of one expert as stacked experts have them: one part after the other, or in turn."""
    return np.stack(parts, 1).reshape(-1, *parts[0].shape[1:]) if alternate else np.concatenate(parts)


def values(record: Record) -> np.ndarray:
    """The values of a slab as a cast takes them: stored floats as they are, others dequantized to float32."""
    factor = record.extras.get("pre_quant_scale")
    if record.format is None and record.codes.dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        return record.codes
    made = record.dequantize()
    return made if factor is None else made * factor.astype(np.float32)


def amax_of(array: np.ndarray) -> tuple[np.float32, int]:
    """Largest finite magnitude, as float32, and the number of elements that are NaN or infinite."""
    if not array.size:
        return np.float32(0), 0
    signed, unsigned, infinity = np.int32, np.uint32, 0x7F800000
    if array.dtype.itemsize == 2:
        signed, unsigned, infinity = np.int16, np.uint16, 0x7F80 if array.dtype == ml_dtypes.bfloat16 else 0x7C00
    # Larger magnitudes have larger bits: read as signed integers for positive numbers, as unsigned for negative.
    magnitude = np.iinfo(signed).max
    largest, lost = max(int(array.view(signed).max()), int(array.view(unsigned).max()) & magnitude), 0
    if largest >= infinity:
        bits = array.view(unsigned) & unsigned(magnitude)
        lost = np.count_nonzero(bits >= infinity)
        largest = bits.max(initial=0, where=bits < infinity)
    return np.float32(np.asarray(largest, unsigned).view(array.dtype)[()]), int(lost)


def measure(record: Record) -> tuple[np.ndarray, int]:
    """float32 [E], the amax of every matrix of a parameter, and the number of elements that are NaN or infinite."""
    largest, lost = np.zeros(experts_of(record), np.float32), 0
    for expert, slab in slabs(record):
        x = values(slab)
        found = in_bands(lambda band, x=x: amax_of(x[band]), *x.shape)
        largest[expert] = max([largest[expert], *(amax for amax, _ in found)])
        lost += sum(more for _, more in found)
    return largest, lost


def cast_slab(slab: Record, cast: Cast, amax: np.float32 | None, scale_dtype: np.dtype) -> Record:
    """The record of a slab under `cast`. FP32 scales are rounded to `scale_dtype` first: codes fit the stored scale."""
    x, fmt = values(slab), cast.format
    codes, scale, level = _quantized(x, cast, amax)
    if fmt.scale.bits == 32 and scale_dtype != np.float32:
        with np.errstate(all="ignore"):
            scale = np.maximum(scale, ml_dtypes.finfo(scale_dtype).smallest_normal)
            scale = scale.astype(scale_dtype).astype(np.float32)
            x = x.astype(np.float32)
            scale_in_place(x, np.float32(1) / np.atleast_2d(scale), fmt.block)
            codes, _, _ = _quantized(x, _UNIT[fmt.element.has_inf], np.float32(fmt.element.max))
    return Record(slab.name, codes, scale, level, fmt, slab.logical_shape)


def _quantized(x: np.ndarray, cast: Cast, amax: np.float32 | None) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Stored codes, scales and tensor scale of a matrix; several threads cast a band of its rows each."""
    fmt, level = cast.format, None if amax is None else np.asarray(amax)
    with casters.side_by_side():
        made = in_bands(
            lambda band: casters.quantize(x[band], cast, level), x.shape[0], x.shape[1], fmt.block[0] or 1, _AT_A_TIME
        )
    codes = np.concatenate([one.codes for one in made])
    codes = pack_fp6(codes) if fmt.element.bits == 6 else codes.view(np.uint8)
    scale, level = made[0].scale, made[0].tensor_scale
    if not fmt.is_per_tensor:
        scale = np.concatenate([one.scale for one in made])
    if fmt.tensor_scale == "row":
        level = np.concatenate([one.tensor_scale for one in made])
    return codes, scale, level


def outline(record: Record, fmt: ScaledFormat) -> Record:
    """A record of `fmt` without data: arrays of the right shapes that take no memory."""

    def empty(dtype: object, *shape: int) -> np.ndarray:
        return np.broadcast_to(np.zeros((), np.dtype(dtype)), shape)  # type: ignore[arg-type]

    leading, (rows, length) = record.logical_shape[:-2], (1, *record.logical_shape)[-2:]
    grid = scale_grid(fmt, rows, length) or ((1, 1) if leading else ())
    levels = {"tensor": (1, 1) if leading else (), "row": (rows, 1)}
    level = None if fmt.tensor_scale is None else empty(np.float32, *leading, *levels[fmt.tensor_scale])
    return Record(
        record.name, empty(np.uint8, *record.logical_shape[:-1], length * fmt.element.bits // 8),
        empty(np.uint8 if fmt.scale.bits == 8 else np.float32, *leading, *grid), level, fmt, record.logical_shape,
    )  # fmt: skip
