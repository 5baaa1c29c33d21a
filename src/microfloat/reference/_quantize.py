"""`quantize`, the definition of every cast, and the `Quantized` that it returns."""

import numbers
import typing
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from microfloat.arguments import as_float
from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import ScaledFormat, encode_bits
from microfloat.layout import Storage, array_layout, leading_axes, scale_shape, stored_length
from microfloat.recipes import Cast, Hadamard
from microfloat.recipes.usages import CastLike, Usage, given_amax, given_scale_enc, usages_of
from microfloat.reference._operand import as_float32, hadamard_transform, operand_form, spread
from microfloat.reference._packing import pack_fp4, unpack_fp4
from microfloat.reference._philox import random_bytes
from microfloat.reference._scales import BlockScales, block_scales, eden_scales

Seed: typing.TypeAlias = int | Sequence[int] | np.ndarray | None
Real: typing.TypeAlias = float | np.ndarray | None


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized array: ``value = decode(codes) * scale * tensor_scale``, blocks along the contraction axis.

    * `codes`: uint8 in operand form (contraction axis last, leading axes kept), 4-bit codes packed two per byte.
    * `scale`: uint8 bytes (E8M0, E4M3) or float32; () per tensor, 2-D for tiles, else one entry per block of a row.
    * `tensor_scale`: float32 of shape () or [R, 1], or None.
    * `format`, `hadamard`: those of the Cast. `axis`: the contraction axis of the original `shape`, >= 0.

    Raises InvalidValueError for arrays whose shape or dtype is not what `format`, `axis`, `shape` and `hadamard` ask
    for. Source: docs/numerics.md 7.1 and 7.3.
    """

    codes: np.ndarray
    scale: np.ndarray
    tensor_scale: np.ndarray | None
    format: ScaledFormat
    axis: int
    shape: tuple[int, ...]
    hadamard: Hadamard | None = None

    def __post_init__(self) -> None:
        fmt = self.format
        storage = Storage.of(fmt, self.hadamard, None if self.tensor_scale is None else fmt.tensor_scale)
        needed = array_layout(storage, self.shape, self.axis)
        for name, part in zip(needed._fields, needed, strict=True):
            array = getattr(self, name)
            if part is None:
                if array is not None:
                    raise invalid_value(name, "an array", f"None, as {fmt.name} has no tensor scale")
                continue
            dtype = np.dtype(np.uint8 if name == "codes" else part.dtype)
            if not isinstance(array, np.ndarray):
                raise invalid_type(name, type(array), f"a NumPy array of {dtype}")
            if array.dtype != dtype or array.shape != part.shape:
                raise invalid_value(name, f"{array.dtype}{list(array.shape)}", f"{dtype}{list(part.shape)}")

    @property
    def logical_length(self) -> int:
        """Contraction length of the original: ``shape[axis]``; 1 for a 0-d array."""
        return self.shape[self.axis] if self.shape else 1

    @property
    def length(self) -> int:
        """Stored contraction length: `logical_length`, with whole groups of a Hadamard transform."""
        return stored_length(self.logical_length, self.hadamard)

    @property
    def rows(self) -> int:
        """R of the operand form [R, C]: all other axes flattened."""
        return int(np.prod(leading_axes(self.shape, self.axis), dtype=np.int64))

    def unpacked_codes(self) -> np.ndarray:
        """Codes of the operand form, one per byte: uint8 [R, length]."""
        codes = self.codes.reshape(self.rows, self.codes.shape[-1])
        return unpack_fp4(codes, self.length) if self.format.element.codes_per_byte == 2 else codes

    def __repr__(self) -> str:
        transform = f", {self.hadamard}" if self.hadamard else ""
        return (
            f"Quantized({self.format.name}, shape={self.shape}, axis={self.axis}, codes={self.codes.shape}, "
            f"scale={self.scale.dtype}{self.scale.shape}{transform})"
        )


def check_quantized(argument: str, value: object) -> Quantized:
    """`value` itself if it is a Quantized, else InvalidTypeError."""
    if not isinstance(value, Quantized):
        raise invalid_type(argument, type(value), "a Quantized", "Call reference.quantize(x, cast) first.")
    return value


@typing.overload
def quantize(
    x: np.ndarray, cast: CastLike, *, axis: int = -1, seed: Seed = None, stream: int = 0, amax: Real = None,
    scale_enc: Real = None,
) -> Quantized: ...  # fmt: skip


@typing.overload
def quantize(
    x: np.ndarray, cast: CastLike | tuple[CastLike, CastLike], *, axis: tuple[int, int], seed: Seed = None,
    stream: int | tuple[int, int] = 0, amax: Real | tuple[Real, Real] = None,
    scale_enc: Real | tuple[Real, Real] = None,
) -> tuple[Quantized, Quantized]: ...  # fmt: skip


def quantize(
    x: np.ndarray, cast: typing.Any, *, axis: int | tuple[int, int] = -1, seed: Seed = None, stream: typing.Any = 0,
    amax: typing.Any = None, scale_enc: typing.Any = None,
) -> Quantized | tuple[Quantized, Quantized]:  # fmt: skip
    """Quantize an array: ``codes = round(x * encode factor)``, such that ``x ~ decode(codes) * scale * tensor_scale``.

    * `x`: float32, bfloat16 or float16 of any shape; float64 is rounded to float32 first.
    * `cast`: a Cast, a ScaledFormat or a format's name.
    * `axis`: the contraction axis, -1, or -2 of a matrix. A pair of both, ``axis=(-1, -2)``, gives the pair of both
      usages: what two calls give with the same seed and stream. `cast`, `stream`, `amax` and `scale_enc` may then be
      pairs too, one for each axis.
    * `seed` (an int in [0, 2^64), or its two words, low first) and `stream` feed stochastic rounding; nearest ignores
      them.
    * `amax` replaces the measured amax of a per-tensor or NVFP4 cast: a float32 scalar; [R, 1] for NVFP4_ROW.
    * `scale_enc`: the encode scale of delayed scaling, required exactly then.

    Raises InvalidTypeError for other dtypes, InvalidValueError for arguments that do not fit the cast.
    Source: docs/numerics.md, sections 2 to 5 and 7.

    >>> q = quantize(np.float32([[1.0, -2.0, 3.0]]), "mxfp4")
    >>> q.scale, q.codes.tobytes().hex(" ")  # scale 2^(126 - 127); codes 4 e 7, the first in the low nibble
    (array([[126]], dtype=uint8), 'e4 07')
    """
    values = as_float32(x)
    made = [_quantized(values, usage, seed) for usage in usages_of(cast, axis, values.ndim, stream, amax, scale_enc)]
    return made[0] if len(made) == 1 else (made[0], made[1])


def _quantized(values: np.ndarray, usage: Usage, seed: Seed) -> Quantized:
    """One usage of `values`."""
    cast, axis = usage.cast, usage.axis
    x_RC = np.ascontiguousarray(operand_form(values, axis))
    amax = given_amax(usage.amax, cast, x_RC.shape[0], _real_array, np.asarray)
    scale_enc = given_scale_enc(usage.scale_enc, cast.is_delayed, _real_array, np.asarray)
    if cast.is_stochastic and seed is None:
        raise invalid_value(
            "seed", "None with a stochastic cast", "an int in [0, 2^64), or its two 32-bit words, low first",
            "Give seed=, or use rounding='nearest'.",
        )  # fmt: skip
    with np.errstate(all="ignore"):
        if cast.hadamard is not None:
            x_RC = hadamard_transform(x_RC, cast.hadamard)
        scales = block_scales(x_RC, cast, amax, None if scale_enc is None else np.float32(scale_enc))
        (rows, length), noise = x_RC.shape, None
        if seed is not None and cast.is_stochastic:
            noise = random_bytes(rows, length, seed, usage.stream)
        codes = _encode(x_RC, cast, scales, noise)
        stored = scales.stored
        if noise is not None and cast.rounding == "eden":
            stored = eden_scales(x_RC, cast, scales, codes, noise)
    if cast.format.element.codes_per_byte == 2:
        codes = pack_fp4(codes)
    return in_shape(codes, stored, scales.tensor_scale, cast, axis, values.shape)


def in_shape(
    codes: np.ndarray, stored: np.ndarray, tensor_scale: np.ndarray | None, cast: Cast, axis: int,
    shape: tuple[int, ...],
) -> Quantized:  # fmt: skip
    """The Quantized of codes and a grid of stored scales of the operand form."""
    return Quantized(
        codes.reshape(*leading_axes(shape, axis), codes.shape[1]),
        stored.reshape(scale_shape(cast.format, shape, axis, stored.shape)),
        tensor_scale, cast.format, axis, shape, cast.hadamard,
    )  # fmt: skip


def _encode(x_RC: np.ndarray, cast: Cast, scales: BlockScales, noise: np.ndarray | None) -> np.ndarray:
    """Unpacked codes [R, C]; blocks that hold a NaN, where the format says so, are NaN codes throughout."""
    element, block = cast.format.element, cast.format.block
    scaled = x_RC * spread(scales.encode, block, x_RC.shape)
    codes = encode_bits(scaled, element, noise if cast.rounding == "stochastic" else None)
    return np.where(spread(scales.is_nan, block, x_RC.shape), np.uint8(element.nan_code), codes)


def _real_array(argument: str, value: float | np.ndarray) -> np.ndarray:
    """A real number, or a floating-point array, as float32."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_):
        value = as_float(argument, value)
    array = np.asarray(value)
    if array.dtype.kind != "f" and array.dtype != ml_dtypes.bfloat16:
        raise invalid_type(argument, getattr(value, "dtype", type(value)), "a float32 number or array")
    with np.errstate(all="ignore"):
        return array.astype(np.float32)
