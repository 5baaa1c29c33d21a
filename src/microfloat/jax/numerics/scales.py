"""Amax -> stored scale and encode factor in JAX, one function per family of scale rules (docs/numerics.md, section 2).

Reads its numbers from the ScaleRule and the formats, as the oracle does. Amaxes travel as integer bits, which order
like the magnitudes, so no subnormal amax is flushed.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from microfloat.formats import ElementFormat
from microfloat.jax.numerics import bits as f32
from microfloat.recipes import Cast, Current
from microfloat.scale_rules import TwoLevel, check_kind, e8m0_threshold

_FMAX = np.finfo(np.float32).max
_MANTISSA = np.uint32(0x7FFFFF)


def to_tiles(x_RC: Array, block: tuple[int | None, int | None]) -> Array:
    """[R, C] -> [ceil(R / Br), Br, ceil(C / Bc), Bc], filled with zeros; a size of None is the whole extent."""
    rows, cols = (extent if size is None else size for extent, size in zip(x_RC.shape, block, strict=True))
    # A block of the whole extent is one block, also where the extent is 0.
    grid_rows, grid_cols = (
        1 if size is None else -(-have // size) for have, size in zip(x_RC.shape, block, strict=True)
    )
    missing = (grid_rows * rows - x_RC.shape[0], grid_cols * cols - x_RC.shape[1])
    if any(missing):
        x_RC = lax.pad(x_RC, jnp.zeros((), x_RC.dtype), ((0, missing[0], 0), (0, missing[1], 0)))
    return x_RC.reshape(grid_rows, rows, grid_cols, cols)


def from_tiles(tiles: Array, shape_RC: tuple[int, int]) -> Array:
    """The inverse of `to_tiles`: crops the padding."""
    grid_rows, block_rows, grid_cols, block_cols = tiles.shape
    full = tiles.reshape(grid_rows * block_rows, grid_cols * block_cols)
    return full if full.shape == shape_RC else full[: shape_RC[0], : shape_RC[1]]


def spread(grid: Array) -> Array:
    """One value per block [grid rows, grid columns] -> [grid rows, 1, grid columns, 1], to broadcast over tiles."""
    return grid[:, None, :, None]


class BlockScales(NamedTuple):
    """Per block of the grid [grid rows, grid columns]; see the oracle's class of this name.

    `stored`: uint8 or float32; `encode`: the factor elements are multiplied with; `is_nan`: blocks that become NaN
    throughout (None: none can); `tensor_scale`: float32 of shape () or [R, 1], or None; `overflowed`: where the amax
    behind the tensor scale, or without one behind `stored`, is infinite (None: the scale says so itself). `nan_code`:
    the byte of a NaN scale.
    """

    stored: Array
    encode: Array
    is_nan: Array | None = None
    tensor_scale: Array | None = None
    overflowed: Array | None = None
    nan_code: int = 255

    def for_product(self) -> "BlockScales":
        """The scales that the product of a gradient reads: NaN over an infinite amax (docs/numerics.md 8.4)."""
        if self.overflowed is None:
            return self
        if self.tensor_scale is not None:
            return self._replace(tensor_scale=f32.where(self.overflowed, np.float32(np.nan), self.tensor_scale))
        nan = np.uint8(self.nan_code) if self.stored.dtype == jnp.uint8 else np.float32(np.nan)
        return self._replace(stored=f32.where(self.overflowed, nan, self.stored))


class _TensorLevel(NamedTuple):
    """Clamped tensor amax A, its encode factor S = capacity / A, and the stored tensor scale A / capacity."""

    constants: TwoLevel
    amax: Array
    encode: Array
    stored: Array
    overflowed: Array


def block_scales(tiles: Array, cast: Cast, amax: Array | None, scale_enc: Array | None) -> BlockScales:
    """Scales of a tiled operand form; `amax` replaces the measured one, `scale_enc` is the scale of delayed scaling."""
    check_kind(cast.rule, "the JAX front end")
    if scale_enc is not None:
        factor = jnp.full((1, 1), scale_enc, jnp.float32)
        overflowed = None if amax is None else (f32.bits_of(amax) == f32.INFINITY_BITS).reshape(1, 1)
    elif cast.rule.two_level is not None:
        return _two_level(tiles, cast, cast.rule.two_level, amax)
    elif cast.rule.thresholds is not None:
        return _e8m0(tiles, cast)
    else:
        factor, overflowed = _encode_factor(tiles, cast, amax)
    return BlockScales(f32.divide(np.float32(1), factor), factor, overflowed=overflowed)


def tensor_amax(x: Array, *, per_row: bool = False) -> Array:
    """Largest magnitude, NaN ignored, as float32: of everything (shape ()), or of each row of [R, C] (shape [R, 1])."""
    bits = f32.measured_bits(f32.widened(x))
    return f32.as_float(jnp.max(bits, axis=1, keepdims=True, initial=0) if per_row else jnp.max(bits, initial=0))


def block_amax_bits(tiles: Array) -> Array:
    """The bits of the amax of every block, NaN ignored."""
    return _block_max(f32.measured_bits(tiles))


def _block_max(bits: Array) -> Array:
    return jnp.max(bits, axis=(1, 3), initial=0)


def _f32_bits(value: float) -> np.uint32:
    return np.float32(value).view(np.uint32)


def _e8m0(tiles: Array, cast: Cast) -> BlockScales:
    """``b = clamp(E(a) - emax + (M(a) >= threshold), 0, 254)``, 255 for NaN and Inf; encode by 2^(127 - b)."""
    element, scale = cast.format.element, cast.format.scale
    bits = _block_max(f32.magnitude_bits(tiles))
    exponent, mantissa = (bits >> 23).astype(jnp.int32), bits & _MANTISSA
    bump = (mantissa >= np.uint32(e8m0_threshold(cast.rule, element))).astype(jnp.int32)
    lost = exponent == 255
    highest = min(scale.lowest + scale.nan_code - 1, 253)
    field = jnp.minimum(jnp.maximum(exponent - element.emax + bump, scale.lowest), highest)
    factor = f32.as_float((254 - field).astype(jnp.uint32) << 23)
    return BlockScales(f32.where(lost, np.int32(scale.nan_code), field - scale.lowest).astype(jnp.uint8), factor, lost)


def _encode_factor(tiles: Array, cast: Cast, amax: Array | None) -> tuple[Array, Array]:
    """(s, whether A is infinite) for the amax A of each block. ``s = f32(max / max(A, eps, max * 2^-126))``, 1 for A =
    0 or Inf; rounded down to 2^k where the rule says so."""
    largest = cast.format.element.max
    bits = block_amax_bits(tiles) if amax is None else f32.bits_of(amax.astype(jnp.float32)).reshape(-1, 1)
    if isinstance(cast.scaling, Current) and cast.scaling.amax_epsilon:
        bits = jnp.maximum(bits, _f32_bits(cast.scaling.amax_epsilon))
    clamped = f32.as_float(jnp.maximum(bits, _f32_bits(largest * 2.0**-126)))
    overflowed = bits == f32.INFINITY_BITS
    factor = f32.where((bits == 0) | overflowed, np.float32(1), f32.divide(np.float32(largest), clamped))
    if cast.rule.power_of_two:
        factor = f32.as_float(f32.bits_of(factor) & np.uint32(0xFF800000))
    return factor, overflowed


def _tensor_level(tiles: Array, cast: Cast, constants: TwoLevel, amax: Array | None) -> _TensorLevel:
    per_row = cast.format.tensor_scale == "row"
    if amax is None:
        rows = tiles.reshape(tiles.shape[0] * tiles.shape[1], tiles.shape[2] * tiles.shape[3])
        amax = tensor_amax(rows, per_row=per_row)
    bits = f32.bits_of(amax)
    overflowed = bits == f32.INFINITY_BITS
    unscaled = (bits == 0) | overflowed
    one, capacity = np.float32(1), np.float32(constants.capacity)
    clamped = f32.as_float(jnp.maximum(bits, _f32_bits(constants.smallest_amax)))
    amax = f32.where(unscaled, capacity, clamped)
    if not constants.tensor_scale:
        ones = jnp.ones_like(amax)
        return _TensorLevel(constants, amax, ones, ones, overflowed)
    encode_factor = f32.where(unscaled, one, f32.divide(capacity, clamped))
    stored = f32.where(unscaled, one, f32.divide(clamped, np.float32(constants.capacity)))
    # Scalars: the barrier keeps XLA from moving them into products over all blocks, in another order.
    level = lax.optimization_barrier((amax, encode_factor, stored))
    return _TensorLevel(constants, level[0], level[1], level[2], overflowed)


def _two_level(tiles: Array, cast: Cast, constants: TwoLevel, amax: Array | None) -> BlockScales:
    """Block scales with a mantissa, such as E4M3, under an FP32 tensor scale (docs/numerics.md 2.4 to 2.7)."""
    tensor, scale = _tensor_level(tiles, cast, constants, amax), cast.format.scale.element
    block_amax = f32.as_float(block_amax_bits(tiles))
    if constants.four_over_six is not None:
        byte, factor = _four_over_six(tiles, cast, tensor, block_amax)
    elif constants.inverse_max is not None:
        per_amax = lax.optimization_barrier(tensor.encode * np.float32(constants.inverse_max))
        byte, factor = _block_level(f32.multiply(block_amax, per_amax), scale, tensor)
    else:
        # A flushed quotient is below the clamp in any case.
        share = f32.divide_by_integers(block_amax, jnp.full_like(block_amax, cast.format.element.max))
        target = jnp.maximum(f32.divide(share, tensor.stored), np.float32(constants.smallest_scale))
        byte = f32.encode(jnp.minimum(target, np.float32(constants.largest_scale)), scale)
        # Without the barrier XLA may divide once, by the product of both divisors.
        factor = f32.divide(lax.optimization_barrier(f32.divide(np.float32(1), tensor.stored)), f32.decode(byte, scale))
    lost = f32.is_nan(_block_max(f32.magnitude_bits(tiles)))
    stored = f32.where(lost, np.uint8(scale.nan_code), byte)
    if constants.tensor_scale:
        return BlockScales(stored, factor, lost, tensor.stored, tensor.overflowed)
    overflowed = f32.bits_of(block_amax) == f32.INFINITY_BITS
    return BlockScales(stored, factor, lost, overflowed=overflowed, nan_code=scale.nan_code)


def _block_level(target: Array, scale: ElementFormat, tensor: _TensorLevel) -> tuple[Array, Array]:
    """``sb = enc(min(target, FMAX), scale)`` and ``e = min(f32(1 / f32(dec(sb) * f32(1 / S))), FMAX)``."""
    byte = f32.encode(jnp.minimum(target, _FMAX), scale)
    divisor = f32.decode(byte, scale) * f32.divide(np.float32(1), tensor.encode)
    return byte, jnp.minimum(f32.divide(np.float32(1), divisor), _FMAX)


def _four_over_six(tiles: Array, cast: Cast, tensor: _TensorLevel, block_amax: Array) -> tuple[Array, Array]:
    """Per block the scale that maps its maximum to 6 (k = 1) or to 4 (k = 1.5), whichever errs less; a tie takes 6."""
    sixth = f32.divide_by_integers(block_amax, jnp.full_like(block_amax, 6))
    base = f32.multiply(sixth, tensor.encode)
    targets = (jnp.minimum(base * np.float32(k), np.float32(tensor.constants.largest_scale)) for k in (1.0, 1.5))
    scale = cast.format.scale.element
    (byte_6, factor_6), (byte_4, factor_4) = (_block_level(target, scale, tensor) for target in targets)
    error = partial(_block_error, tiles, cast, tensor)
    to_four = error(byte_4, factor_4) < error(byte_6, factor_6)
    return f32.where(to_four, byte_4, byte_6), f32.where(to_four, factor_4, factor_6)


def _block_error(tiles: Array, cast: Cast, tensor: _TensorLevel, byte: Array, factor: Array) -> Array:
    """Sum of |d| or d^2 over every block in the fixed order of docs/numerics.md 2.6."""
    # Below A = 2^-40 the errors of "mae" are summed times 2^64, which keeps them from being flushed.
    element, constants = cast.format.element, tensor.constants
    is_mae = constants.four_over_six == "mae"
    lift = f32.where(tensor.amax < np.float32(2.0**-40), np.float32(2.0**64 if is_mae else 1), np.float32(1))
    # A tensor's value, shape () or [R, 1] for blocks of one row, beside the tiles.
    lift_tiles, amax_tiles = (value.reshape(-1 if value.ndim else 1, 1, 1, 1) for value in (lift, tensor.amax * lift))
    values = f32.decode(f32.encode(f32.multiply(tiles, spread(factor)), element), element)
    scaled = values * spread(f32.decode(byte, cast.format.scale.element)) * amax_tiles
    difference = f32.divide(scaled, np.float32(constants.capacity)) - f32.multiply(tiles, lift_tiles)
    errors = f32.as_float(f32.magnitude_bits(difference)) if is_mae else f32.square(difference)
    sums = jnp.zeros(errors.shape[:3], jnp.float32)
    for column in range(errors.shape[3]):
        sums = sums + errors[..., column]
    return _pairwise_rows(sums)


def _pairwise_rows(sums: Array) -> Array:
    """[grid rows, rows of a tile, grid columns] -> [grid rows, grid columns] by halving."""
    count = 1 << max(sums.shape[1] - 1, 0).bit_length()
    if count != sums.shape[1]:
        sums = lax.pad(sums, np.float32(0), ((0, 0, 0), (0, count - sums.shape[1], 0), (0, 0, 0)))
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def eden_scales(scaled: Array, codes: Array, stored: Array, cast: Cast, drawn: Array) -> Array:
    """`stored` times ``<y, y> / <y, d>`` of each Hadamard group, rounded by random bytes (docs/numerics.md 5.5)."""
    assert cast.hadamard is not None
    scale, size = cast.format.scale.element, cast.hadamard.size
    value = f32.decode(stored, scale)
    factor = spread(value)
    y, d = (
        f32.as_float(f32.magnitude_bits(f32.where(factor == 0, np.float32(0), part * factor)))
        for part in (scaled, f32.decode(codes, cast.format.element))
    )  # through integers, which no sum contracts
    products = (f32.as_float(f32.magnitude_bits(y * other)) for other in (y, d))
    y_sums, d_sums = (_pairwise_rows(product.reshape(-1, size, 1)) for product in products)
    is_right = (y_sums < np.float32(np.inf)) & (d_sums > 0)
    correction = f32.where(is_right, f32.divide(y_sums, d_sums), np.float32(1))
    target = value * jnp.repeat(correction, size // scaled.shape[3]).reshape(value.shape)
    return f32.encode(target, scale, drawn[:, 0, :, 0])
