"""The 16-point Hadamard transform along the contraction axis, with a fixed butterfly order.

Source: docs/numerics.md 5.2; the order of the additions is part of the definition.
"""

import ml_dtypes
import numpy as np

from microfloat.recipes import Hadamard

__all__ = ["hadamard_inverse", "hadamard_transform", "stored_length"]


def stored_length(length: int, hadamard: Hadamard | None) -> int:
    """Contraction length as stored: rounded up to the transform's size, since padding mixes into real outputs."""
    return length if hadamard is None else -(-length // hadamard.size) * hadamard.size


def hadamard_transform(x_RC: np.ndarray, hadamard: Hadamard) -> np.ndarray:
    """``x' = bf16(bf16(x) diag(sgn) H / 4)`` per group of 16 columns; [R, C] -> [R, C rounded up to 16], float32.

    ``H[i, j] = (-1)^popcount(i & j)``; sums run in float32, butterflies of distance 1, 2, 4, 8.
    """
    length = x_RC.shape[1]
    x_RC = np.pad(x_RC, ((0, 0), (0, stored_length(length, hadamard) - length)))
    groups = _groups(_bf16(x_RC), hadamard) * _signs(hadamard)
    return _bf16(_butterflies(groups) * np.float32(0.25)).reshape(x_RC.shape)


def hadamard_inverse(x_RC: np.ndarray, hadamard: Hadamard) -> np.ndarray:
    """``x = (x' H / 4) diag(sgn)`` in float32; the transform is orthogonal, so this undoes it up to rounding."""
    groups = _butterflies(_groups(x_RC, hadamard))
    return (groups * np.float32(0.25) * _signs(hadamard)).reshape(x_RC.shape)


def _groups(x_RC: np.ndarray, hadamard: Hadamard) -> np.ndarray:
    rows, length = x_RC.shape
    return x_RC.reshape(rows, length // hadamard.size, hadamard.size)


def _butterflies(groups: np.ndarray) -> np.ndarray:
    size = groups.shape[-1]
    distance = 1
    while distance < size:
        pairs = groups.reshape(*groups.shape[:-1], size // (2 * distance), 2, distance)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        groups = np.stack([low + high, low - high], axis=-2).reshape(groups.shape)
        distance *= 2
    return groups


def _signs(hadamard: Hadamard) -> np.ndarray:
    bits = hadamard.sign_mask >> np.arange(hadamard.size) & 1
    return np.where(bits, -1, 1).astype(np.float32)


def _bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)
