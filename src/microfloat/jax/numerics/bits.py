"""Float32 arithmetic and the Hadamard transform on integer bits, so that XLA computes NumPy's bytes on every device.

Why integers: XLA CPU flushes subnormal numbers, turns ``x / constant`` and ``x / broadcast(y)`` into products with a
reciprocal and contracts ``a * b + c`` into one operation; XLA GPU may drop a narrowing conversion (docs/numerics.md
1.2 and 1.5). None of them changes bit operations.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from microfloat.formats import ElementFormat
from microfloat.jax.transformations import in_common_variance
from microfloat.layout import stored_length
from microfloat.recipes import Hadamard

INFINITY_BITS = np.uint32(0x7F800000)
_SIGN = np.uint32(0x80000000)
_MANTISSA = np.uint32(0x7FFFFF)
_HIDDEN_BIT = np.uint32(1 << 23)
FLOAT8 = {"E4M3": jnp.float8_e4m3fn, "E5M2": jnp.float8_e5m2}


# Traced once for each shape, and copied into the programs that call it: tracing is half the time of a compilation.
_traced_once = partial(jax.jit, inline=True)


def bits_of(x: Array) -> Array:
    """The 32 bits of float32 `x`."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def as_float(bits: Array) -> Array:
    """The float32 with these 32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def magnitude_bits(x: Array) -> Array:
    """|x| as integers that order like the magnitudes; NaN is above infinity."""
    return bits_of(x) & np.uint32(0x7FFFFFFF)


def is_nan(magnitude: Array) -> Array:
    """True where the bits of a magnitude are a NaN."""
    return magnitude > INFINITY_BITS


def measured_bits(x: Array) -> Array:
    """`magnitude_bits` with NaN as 0, whose maximum is an amax that ignores NaN."""
    magnitude = magnitude_bits(x)
    return where(is_nan(magnitude), np.uint32(0), magnitude)


def widened(x: Array) -> Array:
    """x of a float dtype of 8, 16 or 32 bits as float32, rounded to that dtype even inside a larger program."""
    # GPUs may drop a conversion to a narrower float that is widened again, but no integer operation between both.
    if x.dtype == jnp.float32:
        return x
    if x.dtype == jnp.bfloat16:
        return as_float(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16)
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    bits, nan = lax.bitcast_convert_type(x, unsigned), np.asarray(np.nan, x.dtype).view(unsigned)
    return lax.bitcast_convert_type(where(x != x, bits | nan, bits), x.dtype).astype(jnp.float32)


def rounded(values: Array, dtype: DTypeLike) -> Array:
    """float32 values in another float dtype, rounded even if the result is widened again at once (see `widened`)."""
    dtype = jnp.dtype(dtype)
    return widened(values.astype(dtype)).astype(dtype) if dtype.itemsize < 4 else values.astype(dtype)


def where(condition: Array, x: ArrayLike, y: ArrayLike) -> Array:
    """``jnp.where`` for operands of one dtype, without a shared function, whose constants XLA was seen to mix up."""
    shape = jnp.broadcast_shapes(np.shape(condition), np.shape(x), np.shape(y))
    return lax.select(*(jnp.broadcast_to(operand, shape) for operand in (condition, x, y)))


@_traced_once
def multiply(x: Array, factor: Array) -> Array:
    """``f32(x * factor)`` for a positive normal factor, right also for a subnormal x that the platform would flush."""
    # A subnormal x is M * 2^-149 = (M * 2^-24) * 2^-125; the second power goes into the exponent of the factor.
    bits = bits_of(x)
    # A factor that XLA knew to be constant would be merged with constant factors inside x, in another rounding.
    factor = where(bits == np.uint32(0xFFFFFFFF), np.float32(1), factor)
    factor_bits = bits_of(factor)
    small_exponent = np.uint32(125 << 23)
    lowered = as_float(where(factor_bits > small_exponent, factor_bits - small_exponent, np.uint32(0)))
    magnitude = (bits & _MANTISSA).astype(jnp.float32) * np.float32(2.0**-24) * lowered
    from_subnormal = as_float(bits_of(magnitude) | (bits & _SIGN))
    return where((bits & INFINITY_BITS) == 0, from_subnormal, x * factor)


@_traced_once
def multiply_code(values: Array, significand: Array, exponent: Array, product: Array) -> Array:
    """`product` = values * scale, with subnormal results as gradual underflow has them.

    `values` are decoded codes of at most seven significant bits, the scale is ``significand * 2^(exponent - 150)``. The
    bits of a subnormal result are their exact product in 31 bits, shifted and rounded.
    """
    bits = bits_of(values)
    field = ((bits >> 23) & np.uint32(255)).astype(jnp.int32)
    few_bits = where(field == 0, np.uint32(0), ((bits & _MANTISSA) | _HIDDEN_BIT) >> 17)
    exact = few_bits * significand
    shift = 134 - field - exponent
    clipped = jnp.minimum(jnp.maximum(shift, 1), 31).astype(jnp.uint32)
    half = (np.uint32(1) << (clipped - 1)) - 1 + ((exact >> clipped) & 1)
    subnormal = where(shift > 31, jnp.zeros_like(exact), (exact + half) >> clipped)
    # Below 2^27 as an integer the result is no more than twice the smallest normal number, and its bits are exact.
    is_small = (shift >= 1) & (subnormal < np.uint32(1 << 24)) & (field < 255)
    return where(is_small, as_float(subnormal | (bits & _SIGN)), product)


def divide(x: ArrayLike, divisor: ArrayLike) -> Array:
    """``f32(x / divisor)``, correctly rounded, as XLA's own division is on a CPU alone; the operands broadcast."""
    shape = jnp.broadcast_shapes(np.shape(x), np.shape(divisor))
    x, divisor = (jnp.broadcast_to(jnp.asarray(operand, jnp.float32), shape) for operand in (x, divisor))
    return lax.platform_dependent(*in_common_variance(x, divisor), cpu=_divide_by_hardware, default=divide_by_integers)


def _divide_by_hardware(x: Array, divisor: Array) -> Array:
    # XLA must not see a constant or a broadcast: it would multiply by the reciprocal, in two roundings.
    return x / where(bits_of(x) == np.uint32(0xFFFFFFFF), np.float32(1), divisor)


@_traced_once
def divide_by_integers(x: Array, divisor: Array) -> Array:
    """`divide` by way of an estimate that the remainder corrects, which is exact modulo 2^32."""
    # Significands lie in [2^23, 2^24), that of x doubled if it is the smaller, so their quotient has 25 bits.
    top, top_exponent = _significand(x)
    bottom, bottom_exponent = _significand(divisor)
    smaller = (top < bottom).astype(jnp.int32)
    top = top << smaller
    estimate = (top.astype(jnp.float32) / bottom.astype(jnp.float32) * np.float32(1 << 24)).astype(jnp.int32)
    remainder = (top << 24) - estimate * bottom + 8 * bottom
    correction = lax.div(remainder, bottom)
    quotient, inexact = estimate + correction - 8, remainder != correction * bottom
    exponent = top_exponent - bottom_exponent - smaller
    # A result below 2^-126 loses as many bits as its exponent is lower.
    lost = 1 + jnp.clip(-126 - exponent, 0, 25)
    kept, rest, half = quotient >> lost, quotient & ((1 << lost) - 1), 1 << (lost - 1)
    round_up = (rest > half) | ((rest == half) & (inexact | ((kept & 1) == 1)))
    rounded = kept + round_up.astype(jnp.int32) + (jnp.maximum(exponent + 126, 0) << 23)
    result = where(exponent > 127, as_float(INFINITY_BITS + jnp.zeros_like(bits_of(x))), as_float(rounded))
    sign = (bits_of(x) ^ bits_of(divisor)) & _SIGN
    ordinary = _is_ordinary(x) & _is_ordinary(divisor)
    return where(ordinary, as_float(bits_of(result) | sign), _as_extreme(x) / _as_extreme(divisor))


def quotient(x: Array, divisor: Array, *, few_bits: bool = False) -> Array:
    """``f32(x / divisor)`` of float32 arrays, to be rounded to FP8: `divide` in fewer operations.

    It may be off where no FP8 format rounds: next to a power of two, and far below the smallest of their numbers.
    `few_bits`: both operands are bfloat16 numbers, and the result is rounded to bfloat16 first. Its midpoints are
    2^-17 or more away, relatively, so that errors of some units are forgiven.
    """
    # The divisor is brought to [1, 4), or stays smaller if it is subnormal; x changes by the same power of two.
    exponent = (magnitude_bits(divisor) >> 23).astype(jnp.int32)
    power = as_float(jnp.clip(254 - exponent, 1, 253).astype(jnp.uint32) << 23)
    shape = jnp.broadcast_shapes(x.shape, divisor.shape)
    magnitudes = as_float(magnitude_bits(x)), as_float(magnitude_bits(divisor)), power
    by_cpu, by_others = partial(_quotient_by_hardware, shape), partial(quotient_by_residual, shape, few_bits)
    magnitude = lax.platform_dependent(*in_common_variance(*magnitudes), cpu=by_cpu, default=by_others)
    return as_float(bits_of(magnitude) | (bits_of(x) ^ bits_of(divisor)) & _SIGN)


def _quotient_by_hardware(shape: tuple[int, ...], x: Array, divisor: Array, power: Array) -> Array:
    # A CPU would flush subnormal operands.
    shifted = [multiply(y, jnp.broadcast_to(power, y.shape)) for y in (jnp.broadcast_to(x, shape), divisor)]
    return _divide_by_hardware(shifted[0], jnp.broadcast_to(shifted[1], shape))


def quotient_by_residual(shape: tuple[int, ...], few_bits: bool, x: Array, divisor: Array, power: Array) -> Array:
    """`quotient` of magnitudes: a product with the reciprocal, less than two units off, corrected by the remainder."""
    # x - q * divisor is exact in float32 if both factors are split in halves of 12 bits.
    x, divisor = x * power, divisor * power
    reciprocal = divide_by_integers(jnp.ones_like(divisor), divisor)
    q = x * reciprocal
    if few_bits:
        return q
    q_high, divisor_high = _upper_half(q), _upper_half(divisor)
    q_low, divisor_low = q - q_high, divisor - divisor_high
    rest = ((x - q_high * divisor_high) - q_high * divisor_low - q_low * divisor_high) - q_low * divisor_low
    half_unit = as_float(bits_of(q) & INFINITY_BITS) * np.float32(2.0**-24) * divisor
    up = where(rest > half_unit, np.uint32(1), np.uint32(0))
    return as_float(bits_of(q) + up - where(rest < -half_unit, np.uint32(1), np.uint32(0)))


def _upper_half(x: Array) -> Array:
    """x rounded to 12 significant bits."""
    return as_float((bits_of(x) + np.uint32(0x800)) & np.uint32(0xFFFFF000))


def _significand(x: Array) -> tuple[Array, Array]:
    """int32 significands in [2^23, 2^24) of the magnitudes of finite x and the exponents of their leading bits."""
    bits = magnitude_bits(x).astype(jnp.int32)
    field, fraction = bits >> 23, bits & 0x7FFFFF
    zeros = lax.clz(jnp.maximum(fraction, 1)) - 8
    significand = where(field == 0, fraction << zeros, fraction | (1 << 23))
    return significand, where(field == 0, -126 - zeros, field - 127)


def _as_extreme(x: Array) -> Array:
    """x where it is zero, infinite or NaN, elsewhere 1 with its sign: no subnormal number, which might be flushed."""
    return where(_is_ordinary(x), as_float((bits_of(x) & _SIGN) | np.float32(1).view(np.uint32)), x)


def _is_ordinary(x: Array) -> Array:
    """True for x that is neither zero nor infinite nor NaN."""
    bits = magnitude_bits(x)
    return (bits != 0) & (bits < INFINITY_BITS)


def square(x: Array) -> Array:
    """``f32(x * x)``, kept apart from a following sum: clearing the sign bit hides the product from contraction."""
    return as_float(magnitude_bits(x * x))


@_traced_once
def round_to_bf16(x: Array) -> Array:
    """x rounded to bfloat16, nearest even, as float32. A conversion there and back would be elided by XLA."""
    bits = bits_of(x)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    kept = where(is_nan(bits & np.uint32(0x7FFFFFFF)), bits | np.uint32(0x400000), rounded)
    return as_float(kept & np.uint32(0xFFFF0000))


@partial(_traced_once, static_argnames="element")
def encode(y: Array, element: ElementFormat, random_bytes: Array | None = None) -> Array:
    """float32 -> unpacked uint8 codes, nearest even or with random bytes, saturating (docs/numerics.md 1.2 and 5.4)."""
    mantissa_bits, bias = element.mantissa_bits, element.bias
    bits = bits_of(y)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    field = (magnitude >> 23).astype(jnp.int32)
    significand = (magnitude & _MANTISSA) | where(field > 0, _HIDDEN_BIT, np.uint32(0))
    exponent = jnp.maximum(field, 1) - 127
    local = jnp.maximum(exponent, 1 - bias)
    shift = (23 - mantissa_bits + local - exponent).astype(jnp.uint32)
    if random_bytes is None:
        shift = jnp.minimum(shift, np.uint32(25))  # the significand has 24 bits: every larger shift rounds to 0
        half = (np.uint32(1) << (shift - 1)) - 1 + ((significand >> shift) & 1)
        count = (significand + half) >> shift
    else:
        vanishes = shift >= 32
        shift = jnp.minimum(shift, np.uint32(31))
        fraction = (significand & ((np.uint32(1) << shift) - 1)) >> (shift - 8)
        up = (fraction + random_bytes.astype(jnp.uint32)) >= 256
        count = where(vanishes, np.uint32(0), (significand >> shift) + up.astype(jnp.uint32))
    # `count` steps of the local binade; a carry out of it moves into the exponent by itself.
    offset = ((local + (bias - 1)) << mantissa_bits).astype(jnp.uint32)
    code = where(count < np.uint32(1 << mantissa_bits), count, offset + count)
    code = where(magnitude >= INFINITY_BITS, np.uint32(element.max_code), code)
    code = jnp.minimum(code, np.uint32(element.max_code))
    code = code | where(bits >= _SIGN, np.uint32(element.sign_code), np.uint32(0))
    return where(is_nan(magnitude), np.uint32(element.nan_code), code).astype(jnp.uint8)


@partial(_traced_once, static_argnames="element")
def decode(codes: Array, element: ElementFormat) -> Array:
    """The exact float32 value of each unpacked uint8 code."""
    if element.name in FLOAT8:
        return lax.bitcast_convert_type(codes, FLOAT8[element.name]).astype(jnp.float32)
    mantissa_bits = element.mantissa_bits
    wide = codes.astype(jnp.uint32)
    magnitude = wide & np.uint32(element.sign_code - 1)
    mantissa = magnitude & np.uint32((1 << mantissa_bits) - 1)
    normal = (magnitude << (23 - mantissa_bits)) + np.uint32((127 - element.bias) << 23)
    subnormal = bits_of(mantissa.astype(jnp.float32) * np.float32(element.step))
    bits = where((magnitude >> mantissa_bits) == 0, subnormal, normal)
    if element.has_nan:  # an element of a user's own: the stock ones that have NaN have a float8 dtype
        infinity = (mantissa == 0) & element.has_inf
        taken = where(infinity, np.uint32(INFINITY_BITS), np.uint32(INFINITY_BITS | (_HIDDEN_BIT >> 1)))
        bits = where(magnitude > np.uint32(element.max_code), taken, bits)
    sign = (wide & np.uint32(element.sign_code)) << (32 - element.bits)
    return as_float(bits | sign)


def as_code_dtype(codes: Array, element: ElementFormat) -> Array:
    """uint8 codes as the dtype of `QuantizedArray.codes`: a float8 dtype for 8-bit elements, packed bytes for FP4."""
    if element.codes_per_byte == 2:
        return pack_fp4(codes)
    return lax.bitcast_convert_type(codes, FLOAT8[element.name]) if element.name in FLOAT8 else codes


def code_bytes(codes: Array, element: ElementFormat, length: int) -> Array:
    """The inverse of `as_code_dtype`: unpacked uint8 codes [..., length]."""
    if element.codes_per_byte == 2:
        return unpack_fp4(codes, length)
    return codes if codes.dtype == jnp.uint8 else lax.bitcast_convert_type(codes, jnp.uint8)


def pack_fp4(codes: Array) -> Array:
    """``byte[i] = c[2i] | c[2i + 1] << 4`` along the last axis; an odd length leaves the last high nibble 0."""
    if codes.shape[-1] % 2:
        codes = lax.pad(codes, np.uint8(0), [(0, 0, 0)] * (codes.ndim - 1) + [(0, 1, 0)])
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_fp4(data: Array, length: int) -> Array:
    """The first `length` codes of packed bytes, one per byte."""
    pairs = jnp.stack([data & 15, data >> 4], axis=-1)
    return pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])[..., :length]


# The Hadamard transform along the contraction axis, by butterflies in fixed order (docs/numerics.md 5.2). Sums
# of float32 with gradual underflow round nowhere below the normal range, so a group of small numbers is transformed
# times 2^32 and lowered by integer shifts: the same bits on platforms that flush subnormal numbers.

# bfloat16 numbers are multiples of 2^-133, so no sum of lifted ones is subnormal; 2^89 leaves space for 64 terms.
_LIFT = 32
_SMALL = np.float32(2.0**89).view(np.uint32)


def _flipped(groups: Array, hadamard: Hadamard) -> Array:
    """``sgn * groups`` by sign bits."""
    signs = np.array(hadamard.signs, np.float32).view(np.uint32) & _SIGN
    return as_float(bits_of(groups) ^ signs[None, None, :])


def _butterfly(groups: Array) -> Array:
    """H v for every last axis, in the order 1, 2, 4, 8 and so on that is part of the definition."""
    shape, half = groups.shape, 1
    while half < shape[-1]:
        pairs = groups.reshape(*shape[:-1], shape[-1] // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        groups = jnp.stack([first + second, first - second], axis=-2).reshape(shape)
        half *= 2
    return groups


def _scaled_butterfly(groups: Array, hadamard: Hadamard) -> Array:
    """``f32(H v * size^-1/2)`` per group, as gradual underflow has it."""
    halvings = int(-np.log2(hadamard.size**-0.5))
    largest = jnp.max(magnitude_bits(groups), axis=-1, keepdims=True, initial=0)
    lifted = largest < _SMALL
    mixed = _butterfly(multiply(groups, where(lifted, np.float32(2.0**_LIFT), np.float32(1))))
    scale = where(lifted, np.float32(2.0 ** -(_LIFT + halvings)), np.float32(hadamard.size**-0.5))
    bits = bits_of(mixed)
    exponent = ((bits >> 23) & np.uint32(255)).astype(jnp.int32)
    significand = (bits & np.uint32(0x7FFFFF)) | np.uint32(1 << 23)
    # The sum is significand * 2^(exponent - 150); in units of 2^-149, lowered and halved, that is a shift.
    shift = (_LIFT + halvings + 1) - exponent
    clipped = jnp.minimum(jnp.maximum(shift, 1), 25).astype(jnp.uint32)
    steps = (significand + (np.uint32(1) << (clipped - 1)) - 1 + ((significand >> clipped) & 1)) >> clipped
    subnormal = as_float(steps | (bits & np.uint32(0x80000000)))
    return where(lifted & (shift >= 1) & (exponent > 0), subnormal, mixed * scale)


@partial(_traced_once, static_argnames="hadamard")
def hadamard_transform(x_RC: Array, hadamard: Hadamard) -> Array:
    """``bf16(H (sgn * bf16(x)) * size^-1/2)`` per group: float32 [R, C] -> [R, C in whole groups]."""
    rows, cols = x_RC.shape
    padded = stored_length(cols, hadamard)
    x_RC = lax.pad(x_RC, np.float32(0), ((0, 0, 0), (0, padded - cols, 0)))
    groups = round_to_bf16(x_RC).reshape(rows, padded // hadamard.size, hadamard.size)
    return round_to_bf16(_scaled_butterfly(_flipped(groups, hadamard), hadamard)).reshape(rows, padded)


def hadamard_inverse(x_RC: Array, hadamard: Hadamard) -> Array:
    """``sgn * (H x * size^-1/2)``: undoes the transform in float32, up to rounding."""
    rows, cols = x_RC.shape
    groups = x_RC.reshape(rows, cols // hadamard.size, hadamard.size)
    return _flipped(_scaled_butterfly(groups, hadamard), hadamard).reshape(rows, cols)
