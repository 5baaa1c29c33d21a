"""The 16-point Hadamard transform along the contraction axis, by butterflies in fixed order (numerics 5.2).

Sums of float32 with gradual underflow round nowhere below the normal range, so a group of small numbers is
transformed times 2^32 and lowered by integer shifts: the same bits on platforms that flush subnormal numbers.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from microfloat.jax.numerics.bits import as_float, bits_of, magnitude_bits, multiply, round_to_bf16, where
from microfloat.recipes import Hadamard

__all__ = ["hadamard_inverse", "hadamard_transform", "stored_length"]

# bfloat16 numbers are multiples of 2^-133, so no sum of lifted ones is subnormal; 2^91 leaves room for 16 terms.
_LIFT = 32
_SMALL = np.float32(2.0**91).view(np.uint32)


def stored_length(length: int, hadamard: Hadamard | None) -> int:
    """Contraction length as stored: rounded up to the transform's size, because padding mixes into real outputs."""
    return length if hadamard is None else -(-length // hadamard.size) * hadamard.size


def _flipped(groups: Array, hadamard: Hadamard) -> Array:
    """``sgn * groups`` by sign bits."""
    signs = [0x80000000 if hadamard.sign_mask >> index & 1 else 0 for index in range(hadamard.size)]
    return as_float(bits_of(groups) ^ np.array(signs, np.uint32)[None, None, :])


def _butterfly(groups: Array) -> Array:
    """H v for every last axis of 16, in the order 1, 2, 4, 8 that is part of the definition."""
    shape = groups.shape
    for half in (1, 2, 4, 8):
        pairs = groups.reshape(*shape[:-1], 16 // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        groups = jnp.stack([first + second, first - second], axis=-2).reshape(shape)
    return groups


def _quarter(groups: Array) -> Array:
    """``f32(H v * 0.25)`` per group, as gradual underflow has it."""
    largest = jnp.max(magnitude_bits(groups), axis=-1, keepdims=True, initial=0)
    lifted = largest < _SMALL
    mixed = _butterfly(multiply(groups, where(lifted, np.float32(2.0**_LIFT), np.float32(1))))
    scale = where(lifted, np.float32(2.0 ** -(_LIFT + 2)), np.float32(0.25))
    bits = bits_of(mixed)
    exponent = ((bits >> 23) & np.uint32(255)).astype(jnp.int32)
    significand = (bits & np.uint32(0x7FFFFF)) | np.uint32(1 << 23)
    # The sum is significand * 2^(exponent - 150); in units of 2^-149, times 2^-34, that is a shift by 35 - exponent.
    shift = (_LIFT + 3) - exponent
    clipped = jnp.minimum(jnp.maximum(shift, 1), 25).astype(jnp.uint32)
    steps = (significand + (np.uint32(1) << (clipped - 1)) - 1 + ((significand >> clipped) & 1)) >> clipped
    subnormal = as_float(steps | (bits & np.uint32(0x80000000)))
    return where(lifted & (shift >= 1) & (exponent > 0), subnormal, mixed * scale)


def hadamard_transform(x_RC: Array, hadamard: Hadamard) -> Array:
    """``bf16(H (sgn * bf16(x)) / 4)`` per group of 16: float32 [R, C] -> [R, C rounded up to 16]."""
    rows, cols = x_RC.shape
    padded = stored_length(cols, hadamard)
    x_RC = lax.pad(x_RC, np.float32(0), ((0, 0, 0), (0, padded - cols, 0)))
    groups = round_to_bf16(x_RC).reshape(rows, padded // hadamard.size, hadamard.size)
    return round_to_bf16(_quarter(_flipped(groups, hadamard))).reshape(rows, padded)


def hadamard_inverse(x_RC: Array, hadamard: Hadamard) -> Array:
    """``sgn * (H x / 4)``: undoes the transform in float32, up to rounding."""
    rows, cols = x_RC.shape
    groups = x_RC.reshape(rows, cols // hadamard.size, hadamard.size)
    return _flipped(_quarter(groups), hadamard).reshape(rows, cols)
