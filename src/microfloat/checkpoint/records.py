"""The record of one tensor of a checkpoint, and the findings about it.

``value = decode(codes) * scale * tensor_scale``. Legend: E = experts (leading axes), R = rows, C = contraction.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypedDict

import numpy as np

from microfloat.checkpoint._arrays import decode_into
from microfloat.errors import checkpoint_error, invalid_type, invalid_value
from microfloat.formats import FORMATS, NVFP4_ROW, ScaledFormat
from microfloat.layout import leading_axes
from microfloat.reference import Quantized, unpack_fp6


class Finding(NamedTuple):
    """An error, a warning or a remark about one tensor: the observation, and the remedy."""

    id: str
    severity: str
    tensor: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.severity} {self.id}: {self.tensor}: {self.message}" if self.tensor else self.message
        return f"{text} {self.remedy}" if self.remedy else text


def some(names: Sequence[str], most: int = 4) -> str:
    """The first of many names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass(frozen=True)
class Detection:
    """The family of a checkpoint, its format (None where tensors differ), and the evidence.

    `confidence` is 1.0 where a configuration and the tensors agree; `candidates` are all families that the evidence
    allows, the best one first.
    """

    family: str
    format: ScaledFormat | None
    evidence: list[str]
    confidence: float
    candidates: tuple[str, ...] = ()


class Stored(NamedTuple):
    """A tensor as the header of a file describes it; `shape` counts elements, `start` is absolute, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int


class Activation(TypedDict, total=False):
    """The input of a layer: its `scheme` ("none", "static" or "dynamic"), the `scale` that multiplies, its `format`."""

    scheme: str
    scale: np.ndarray | None
    format: ScaledFormat | None


class Source(NamedTuple):
    """The origin of a record: the family that it was read as, and its stored tensors by role.

    Roles are "codes", "scale", "tensor_scale" and "input_scale". `divisors` holds the stored scale of each role where
    the family divides by it: a second reciprocal would not give the same bits.
    """

    family: str
    tensors: Mapping[str, Stored]
    divisors: Mapping[str, np.ndarray]


NO_ACTIVATION: Activation = {"scheme": "none", "scale": None, "format": None}


class Parts(NamedTuple):
    """The arrays of `QuantizedTensor.from_parts`: operand form, 4- and 6-bit codes packed, FP8 codes as bytes."""

    codes: np.ndarray
    scale: np.ndarray
    tensor_scale: np.ndarray | None
    format: ScaledFormat


@dataclass(frozen=True, eq=False)
class Record:
    """One parameter: ``value = decode(codes) * scale * tensor_scale``.

    * `name`: of the parameter, as a model without quantization calls it.
    * `codes`: the stored bytes, uint8, 4- and 6-bit codes packed along the last axis; the plain array without `format`.
    * `scale`: uint8 bytes (E8M0, E4M3) or float32, [.., one for each block]; () per tensor, [R, 1] per row, with the
      leading axes of 3-D codes before it. None in a damaged checkpoint that was loaded with ``strict=False``.
    * `tensor_scale`: float32 multiplier, () or [E, 1, 1], [.., R, 1] in a format with one per row, or None.
    * `format`: None for a plain tensor.
    * `logical_shape`: of the parameter; `axis`, the contraction axis, is the last one in every family.
    * `activation`: see `Activation`. `extras`: other tensors of the module, by the last part of their names.
    * `problem`: the finding for which `dequantize` raises, else None.
    """

    name: str
    codes: np.ndarray
    scale: np.ndarray | None = None
    tensor_scale: np.ndarray | None = None
    format: ScaledFormat | None = None
    logical_shape: tuple[int, ...] = ()
    axis: int = -1
    activation: Activation = field(default_factory=lambda: NO_ACTIVATION.copy())
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    source: Source | None = None
    problem: Finding | None = None

    def dequantize(self, dtype: Any = np.float32) -> np.ndarray:
        """The values in `dtype`: the formula of the file, rounded once to float32 (and from there to `dtype`).

        ``code * scale`` is exact, so that the product with the tensor scale, or the quotient by a stored divisor, is
        the only rounding, as the producers of NVFP4 files mean it. A Quantized, a QuantizedTensor and a QuantizedArray
        multiply the two scales first (docs/numerics.md 8.1), which may differ in the last bits.

        Raises CheckpointError for a record whose scales are missing or of the wrong shape.
        """
        dtype = np.dtype(dtype)
        if self.problem is not None:
            raise checkpoint_error(self.name, [self.problem])
        if self.format is None:
            with np.errstate(all="ignore"):
                return self.codes.astype(dtype)
        flat = (*leading_axes(self.logical_shape, self._axis), self._length)
        values, record = np.empty(flat, dtype), replace(self, logical_shape=flat, axis=-1)
        for expert, out in enumerate(values.reshape(experts_of(record), *(1, *flat)[-2:])):
            matrix = matrix_of(record, expert)
            divisor = matrix.source.divisors.get("tensor_scale") if matrix.source else None
            outer = matrix.tensor_scale if divisor is None else divisor
            decode_into(out, matrix.codes, self.format, np.atleast_2d(matrix.scale), outer, divisor is not None)  # type: ignore
        return np.moveaxis(values, -1, self._axis).reshape(self.logical_shape)

    def narrow(self, start: int, stop: int, step: int = 1) -> "Record":
        """The record of every row, or every `step`-th, of [start, stop) of the first axis, without a copy.

        `start` must stand at the first row of a tile; with a `step` every row is a tile. Raises InvalidValueError
        otherwise.
        """
        rows = slice(start, stop, step)
        if self.format is None:
            return replace(self, codes=self.codes[rows], logical_shape=self.codes[rows].shape)
        tile = (self.format.block[0] or 1) if len(self.logical_shape) == 2 else 1
        is_cut = start % tile or (step > 1 and tile > 1)
        if is_cut or self._axis != len(self.logical_shape) - 1 or len(self.logical_shape) < 2:
            raise invalid_value("start", start, f"a multiple of {tile}, the rows of a tile, of a matrix or of experts")
        scale, level = self.scale, self.tensor_scale
        if scale is not None and scale.ndim == len(self.logical_shape):
            scale = scale[start // tile : -(-stop // tile) : step]
        if level is not None and level.ndim:
            level = level[rows]
        source, codes = self.source, self.codes[rows]
        if source is not None:
            divisors = {role: array[rows] if array.ndim else array for role, array in source.divisors.items()}
            source = source._replace(divisors=divisors)
        shape = (codes.shape[0], *self.logical_shape[1:])
        return replace(self, codes=codes, scale=scale, tensor_scale=level, logical_shape=shape, source=source)

    def parts(self, *, per_expert: bool = False) -> Parts:
        """The arrays that `from_parts` of a front end takes with ``packed=True``; views where the layout allows it.

        Of experts that have a scale each in place of the one of a tensor, every row gets that of its expert; with
        `per_expert` they stay as they are, [E]. Experts that end inside of a tile get the scales of their rows.
        """
        if (fmt := self.format) is None:
            raise invalid_type(self.name, f"a plain tensor of {self.codes.dtype}", "a quantized record", "Use .codes.")
        if self.problem is not None or self.scale is None:
            raise checkpoint_error(self.name, [self.problem])
        leading = leading_axes(self.logical_shape, self._axis)
        scale, level = self.scale, self.tensor_scale
        per_expert = per_expert and len(leading) == 2
        has_levels = level is not None and level.ndim > 0
        if fmt.is_tile and len(leading) > 1:
            rows = fmt.block[0] or 1
            if leading[-1] % rows or (has_levels and not per_expert):
                scale = np.repeat(scale, rows, -2)[..., : leading[-1], :]
                fmt = _by_rows(fmt)
            else:
                scale = scale.reshape(-1, scale.shape[-1])
        if fmt.is_per_tensor and scale.ndim:
            if per_expert:
                scale = scale.reshape(-1)
            else:  # rows with equal scales
                fmt = _by_rows(fmt)
                scale = np.broadcast_to(scale, (*leading, 1))
        if level is not None and has_levels:
            if per_expert and fmt.tensor_scale != "row":
                level = level.reshape(-1)
            else:
                fmt = NVFP4_ROW if fmt.block == NVFP4_ROW.block else fmt
                level = np.ascontiguousarray(np.broadcast_to(level, (*leading, 1))).reshape(-1, 1)
        scale = np.require(scale, requirements="C")  # which leaves a scale without axes one
        return Parts(self.codes.reshape(*leading, self.codes.shape[-1]), scale, level, fmt)

    def to_quantized(self) -> Quantized:
        """The oracle's Quantized of the same bytes; FP6 codes are unpacked."""
        codes, scale, level, fmt = self.parts()
        if fmt.element.bits == 6:
            codes = unpack_fp6(codes, self._length)
        return Quantized(codes, scale, level, fmt, self._axis, self.logical_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.nbytes for part in (self.codes, self.scale, self.tensor_scale) if part is not None)

    @property
    def _axis(self) -> int:
        return self.axis % max(len(self.logical_shape), 1)

    @property
    def _length(self) -> int:
        return self.logical_shape[self._axis] if self.logical_shape else 1


def experts_of(record: Record) -> int:
    """The number of matrices that a parameter consists of."""
    return math.prod(record.logical_shape[:-2])


def matrix_of(record: Record, expert: int) -> Record:
    """One expert of a parameter, as a matrix [N, K]."""
    shape = record.logical_shape
    if len(shape) == 2:
        return record
    count, matrix = experts_of(record), (1, 1, *shape)[-2:]

    def part(array: np.ndarray | None, last: tuple[int, ...]) -> np.ndarray | None:
        if array is None or not array.ndim:
            return array
        return array.reshape(count, *last)[expert]

    scale, fmt = record.scale, record.format
    level = (matrix[0], 1) if fmt is not None and fmt.tensor_scale == "row" else ()
    if scale is not None:
        scale = part(scale, () if fmt is not None and fmt.is_per_tensor else scale.shape[-2:])
    source = record.source
    if source is not None:
        divisors = {role: np.asarray(part(array, ())) for role, array in source.divisors.items()}
        source = source._replace(divisors=divisors)
    codes = record.codes.reshape(count, *(1, 1, *record.codes.shape)[-2:])[expert]
    return replace(
        record, codes=codes, scale=scale, tensor_scale=part(record.tensor_scale, level), logical_shape=matrix,
        axis=-1, source=source,
    )  # fmt: skip


def _by_rows(fmt: ScaledFormat) -> ScaledFormat:
    """The format with blocks of one row: the stock one, or one of its own name."""
    made = replace(fmt, name=f"{fmt.name}_rows", block=(1, fmt.block[1]))
    return next((one for one in FORMATS.values() if replace(one, name=made.name) == made), made)
