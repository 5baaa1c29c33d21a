"""The 16-point Hadamard transform along the contraction axis, by butterflies in fixed order (numerics 5.2)."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from microfloat.jax._bits import round_to_bf16
from microfloat.recipes import Hadamard

__all__ = ["hadamard_inverse", "hadamard_transform", "stored_length"]


def stored_length(length: int, hadamard: Hadamard | None) -> int:
    """Contraction length as stored: rounded up to the transform's size, because padding mixes into real outputs."""
    return length if hadamard is None else -(-length // hadamard.size) * hadamard.size


def _signs(hadamard: Hadamard) -> np.ndarray:
    return np.array([-1.0 if hadamard.sign_mask >> i & 1 else 1.0 for i in range(hadamard.size)], np.float32)


def _butterfly(groups: Array) -> Array:
    """H v for every last axis of 16, in the order 1, 2, 4, 8 that is part of the definition."""
    shape = groups.shape
    for half in (1, 2, 4, 8):
        pairs = groups.reshape(*shape[:-1], 16 // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        groups = jnp.stack([first + second, first - second], axis=-2).reshape(shape)
    return groups


def hadamard_transform(x_RC: Array, hadamard: Hadamard) -> Array:
    """``bf16(H (sgn * bf16(x)) / 4)`` per group of 16: float32 [R, C] -> [R, C rounded up to 16]."""
    rows, cols = x_RC.shape
    padded = stored_length(cols, hadamard)
    x_RC = lax.pad(x_RC, np.float32(0), ((0, 0, 0), (0, padded - cols, 0)))
    groups = round_to_bf16(x_RC).reshape(rows, padded // hadamard.size, hadamard.size)
    mixed = _butterfly(groups * _signs(hadamard)[None, None, :])
    return round_to_bf16(mixed * np.float32(0.25)).reshape(rows, padded)


def hadamard_inverse(x_RC: Array, hadamard: Hadamard) -> Array:
    """``sgn * (H x / 4)``: undoes the transform in float32, up to rounding."""
    rows, cols = x_RC.shape
    groups = _butterfly(x_RC.reshape(rows, cols // hadamard.size, hadamard.size))
    return (groups * np.float32(0.25) * _signs(hadamard)[None, None, :]).reshape(rows, cols)
