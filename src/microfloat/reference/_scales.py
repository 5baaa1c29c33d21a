"""Amax -> stored scale and encode factor in NumPy, one function per family of scale rules (docs/numerics.md 2).

Every function reads its numbers from the ScaleRule and the formats; none asks for a rule by name. All arithmetic is
float32, one rounding per operation, in the order that section 2 writes.
"""

from dataclasses import dataclass

import numpy as np

from microfloat.formats import ElementFormat, decode, encode, encode_bits
from microfloat.recipes import Cast, Current
from microfloat.reference._operand import block_max, padded, spread
from microfloat.scale_rules import TwoLevel, check_kind, e8m0_threshold

_F32 = np.float32
_FMAX = np.finfo(np.float32).max
_INFINITY_BITS = 0x7F800000


@dataclass(frozen=True)
class BlockScales:
    """Stored scale and encode factor of every block, and the blocks that are NaN throughout.

    `stored`: uint8 or float32; `encode`: float32; `is_nan`: bool, every code of the block is the NaN code;
    `tensor_scale`: float32 of shape () or [R, 1], or None.
    """

    stored: np.ndarray
    encode: np.ndarray
    is_nan: np.ndarray
    tensor_scale: np.ndarray | None = None


def magnitude_bits(values: np.ndarray) -> np.ndarray:
    """|values| as integers that order like the magnitudes; NaN is above the bits of infinity."""
    return values.view(np.int32) & 0x7FFFFFFF


def block_scales(x_RC: np.ndarray, cast: Cast, amax: np.ndarray | None, scale_enc: np.float32 | None) -> BlockScales:
    """The scales of `x_RC` under `cast`; `amax` replaces the measured amax, `scale_enc` is a delayed encode scale."""
    check_kind(cast.rule, "the NumPy oracle")
    if cast.rule.two_level is not None:
        return _two_level(x_RC, cast, cast.rule.two_level, amax)
    if cast.rule.thresholds is not None:
        return _e8m0(x_RC, cast)
    if scale_enc is not None:
        factor = np.full((1, 1), scale_enc, np.float32)
    else:
        measured = _amax(x_RC, cast.format.block) if amax is None else np.full((1, 1), amax, np.float32)
        factor = encode_factor(measured, cast)
    return BlockScales(_F32(1) / factor, factor, np.zeros(factor.shape, bool))


def _amax(x_RC: np.ndarray, block: tuple[int | None, int | None]) -> np.ndarray:
    """Absolute maximum of every block as float32; NaN is ignored, infinity counts."""
    bits = magnitude_bits(x_RC)
    return block_max(np.where(bits > _INFINITY_BITS, 0, bits), block).view(np.float32)


def _e8m0(x_RC: np.ndarray, cast: Cast) -> BlockScales:
    """``b = clamp(E(a) - emax + (M(a) >= threshold), 0, 254)``, 255 for NaN and Inf; encode by 2^(127 - b).

    Other powers of two store ``b - lowest``, with b between the exponent fields of their smallest and largest value.
    """
    element, scale = cast.format.element, cast.format.scale
    bits = block_max(magnitude_bits(x_RC), cast.format.block)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    bump = mantissa >= e8m0_threshold(cast.rule, element)
    field = np.clip(exponent - element.emax + bump, scale.lowest, scale.lowest + scale.nan_code - 1)
    is_nan = exponent == 255
    byte = np.where(is_nan, scale.nan_code, field - scale.lowest)
    return BlockScales(byte.astype(np.uint8), np.ldexp(_F32(1), 127 - field).astype(np.float32), is_nan)


def encode_factor(measured: np.ndarray, cast: Cast) -> np.ndarray:
    """``s = f32(max / max(A, eps, max * 2^-126))``, 1 for A = 0 or Inf; rounded down to 2^k where the rule says so."""
    largest = _F32(cast.format.element.max)
    epsilon = cast.scaling.amax_epsilon if isinstance(cast.scaling, Current) else 0.0
    amaxes = np.maximum(measured, _F32(epsilon))
    factor = largest / np.maximum(amaxes, np.ldexp(largest, -126))
    factor = np.where((amaxes == 0) | np.isinf(amaxes), _F32(1), factor)
    if cast.rule.power_of_two:
        factor = (factor.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return factor


@dataclass(frozen=True)
class TensorLevel:
    """The upper level of two: A clamped, its encode factor S = capacity / A, the stored tensor scale A / capacity."""

    constants: TwoLevel
    amax: np.ndarray
    encode: np.ndarray
    stored: np.ndarray


def tensor_level(amax: np.ndarray, constants: TwoLevel) -> TensorLevel:
    """The upper level from the amaxes of the tensor, or of its rows."""
    capacity = _F32(constants.capacity)
    unscaled = (amax == 0) | np.isinf(amax)
    amax = np.where(unscaled, capacity, np.maximum(amax, _F32(constants.smallest_amax)))
    one = np.ones((), np.float32)
    if not constants.tensor_scale:
        return TensorLevel(constants, amax, one, one)
    encode_by, stored = (np.where(unscaled, one, ratio) for ratio in (capacity / amax, amax / capacity))
    return TensorLevel(constants, amax, encode_by, stored)


def _two_level(x_RC: np.ndarray, cast: Cast, constants: TwoLevel, amax: np.ndarray | None) -> BlockScales:
    """Block scales with a mantissa, such as E4M3, under an FP32 tensor scale (docs/numerics.md 2.4 to 2.7)."""
    if amax is None:
        per_row = cast.format.tensor_scale == "row"
        amax = _amax(x_RC, (1, None) if per_row else (None, None))
        amax = amax if per_row else amax.reshape(())
    tensor = tensor_level(amax, constants)
    block_amax, scale = _amax(x_RC, cast.format.block), cast.format.scale.element
    if constants.four_over_six is not None:
        byte, factor = _four_over_six(x_RC, cast, tensor, block_amax)
    elif constants.inverse_max is not None:
        byte, factor = _block_level(block_amax * (tensor.encode * _F32(constants.inverse_max)), scale, tensor)
    else:
        target = block_amax / _F32(cast.format.element.max) / tensor.stored
        byte = encode(np.clip(target, _F32(constants.smallest_scale), _F32(constants.largest_scale)), scale)
        factor = _F32(1) / tensor.stored / decode(byte, scale)
    is_nan = block_max(magnitude_bits(x_RC), cast.format.block) > _INFINITY_BITS
    stored = np.where(is_nan, np.uint8(scale.nan_code), byte)
    return BlockScales(stored, factor, is_nan, tensor.stored if constants.tensor_scale else None)


_Lower = tuple[np.ndarray, np.ndarray]  # the stored byte of each block, and its encode factor


def _block_level(target: np.ndarray, scale: ElementFormat, tensor: TensorLevel) -> _Lower:
    """``sb = enc(min(target, FMAX), scale)`` and ``e = min(f32(1 / f32(dec(sb) * f32(1 / S))), FMAX)``."""
    byte = encode(np.minimum(target, _FMAX), scale)
    return byte, np.minimum(_F32(1) / (decode(byte, scale) * (_F32(1) / tensor.encode)), _FMAX)


def _four_over_six(x_RC: np.ndarray, cast: Cast, tensor: TensorLevel, block_amax: np.ndarray) -> _Lower:
    """Per block the smaller error of mapping its maximum to 6 (k = 1) or to 4 (k = 1.5); a tie keeps 6."""
    base = block_amax / _F32(6) * tensor.encode
    candidates = []
    for k in (1.0, 1.5):
        target = np.minimum(base * _F32(k), _F32(tensor.constants.largest_scale))
        byte, factor = _block_level(target, cast.format.scale.element, tensor)
        candidates.append((byte, factor, _block_error(x_RC, cast, tensor, (byte, factor))))
    (byte_6, factor_6, error_6), (byte_4, factor_4, error_4) = candidates
    to_four = error_4 < error_6
    return np.where(to_four, byte_4, byte_6), np.where(to_four, factor_4, factor_6)


def _block_error(x_RC: np.ndarray, cast: Cast, tensor: TensorLevel, lower: _Lower) -> np.ndarray:
    """Sum of |d| or d^2 over every block, float32, in the fixed order of docs/numerics.md 2.6. Within a row of a block
    left to right; the rows of a tile pairwise: t[i] + t[i + 8], then + 4, + 2, + 1."""
    block, element, constants, (byte, factor) = cast.format.block, cast.format.element, tensor.constants, lower
    values = decode(encode(x_RC * spread(factor, block, x_RC.shape), element), element)
    scaled = values * spread(decode(byte, cast.format.scale.element), block, x_RC.shape)
    difference = scaled * tensor.amax / _F32(constants.capacity) - x_RC
    errors = np.abs(difference) if constants.four_over_six == "mae" else difference * difference
    block_rows, block_cols = (extent if size is None else size for size, extent in zip(block, x_RC.shape, strict=True))
    grid_rows, grid_cols = byte.shape
    tiles = padded(errors, grid_rows * block_rows, grid_cols * block_cols)  # zeros change no sum
    tiles = tiles.reshape(grid_rows, block_rows, grid_cols, block_cols)
    sums = np.zeros((grid_rows, block_rows, grid_cols), np.float32)
    for column in range(block_cols):
        sums = sums + tiles[..., column]
    return _pairwise_rows(sums)


def _pairwise_rows(sums: np.ndarray) -> np.ndarray:
    """[grid rows, rows of a tile, grid columns] -> [grid rows, grid columns] by halving; padded to a power of two."""
    count = 1 << max(sums.shape[1] - 1, 0).bit_length()
    sums = np.pad(sums, ((0, 0), (0, count - sums.shape[1]), (0, 0)))
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def eden_scales(x_RC: np.ndarray, cast: Cast, scales: BlockScales, codes: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Stored scales times ``<y, y> / <y, d>`` of their Hadamard group, rounded by random bytes (docs/numerics.md 5.5).

    Elements y and their codes' values d are in units of the tensor scale. Source: arXiv 2601.22813.
    """
    assert cast.hadamard is not None
    block, scale, size = cast.format.block, cast.format.scale.element, cast.hadamard.size
    value = decode(scales.stored, scale)
    scale_RC = spread(value, block, x_RC.shape)
    scaled = x_RC * spread(scales.encode, block, x_RC.shape)
    y, d = (
        np.where(scale_RC == 0, _F32(0), np.abs(part * scale_RC))
        for part in (scaled, decode(codes, cast.format.element))
    )
    y_sums, d_sums = (_pairwise_rows((y * other).reshape(-1, size, 1)) for other in (y, d))
    correction = np.where((y_sums < np.inf) & (d_sums > 0), y_sums / d_sums, _F32(1))
    width = block[1] or size
    target = value * np.repeat(correction, size // width).reshape(value.shape)
    return encode_bits(target, scale, noise[:, ::width])
