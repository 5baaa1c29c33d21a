"""Arrays as the matrix [R, C] that a GEMM sees (C = contraction axis), its blocks, and its Hadamard transform.

Source: docs/numerics.md, "Operand form of an array" and 5.2; the order of the additions is part of the definition.
"""

import ml_dtypes
import numpy as np

from microfloat.errors import invalid_type, invalid_value
from microfloat.layout import stored_length
from microfloat.recipes import Hadamard

_INPUT_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float64))


def as_float_array(x: object) -> np.ndarray:
    """The input as an array of a dtype that can be quantized; others are an InvalidTypeError."""
    try:
        array = np.asarray(x)
    except Exception as error:  # whatever a foreign array type raises when it cannot become a NumPy array
        raise invalid_type("x", f"{type(x).__name__} ({error})", "an array of floating-point numbers") from error
    if array.dtype.newbyteorder("=") not in _INPUT_DTYPES:
        needed = "float32, bfloat16 (ml_dtypes), float16 or float64"
        raise invalid_type("x", array.dtype, needed, "Convert it with .astype first.")
    return array


def as_float32(x: object) -> np.ndarray:
    """The input as float32: bf16 and fp16 widen exactly, float64 rounds once; other dtypes are an InvalidTypeError."""
    array = as_float_array(x)
    with np.errstate(all="ignore"):
        return array.astype(np.float32)


def operand_form(x: np.ndarray, axis: int) -> np.ndarray:
    """[R, C] with the contraction axis last; leading axes are flattened; 1-D is [1, C], 0-d is [1, 1]."""
    if x.ndim == 2 and axis == 0:
        return x.T
    length = x.shape[-1] if x.ndim else 1
    rows = int(np.prod(x.shape[:-1], dtype=np.int64)) if x.ndim else 1
    return x.reshape(rows, length)


def block_max(values_RC: np.ndarray, block: tuple[int | None, int | None]) -> np.ndarray:
    """Maximum of non-negative `values` over every block: [R, C] -> [ceil(R / Br), ceil(C / Bc)].

    Blocks at the edges are short. A size of None covers the whole axis, and yields one entry (0) even if that is empty.
    """
    (rows, cols), (block_rows, block_cols) = values_RC.shape, _sizes(values_RC.shape, block)
    grid_rows = 1 if block[0] is None else -(-rows // block_rows)
    grid_cols = 1 if block[1] is None else -(-cols // block_cols)
    tiles = padded(values_RC, grid_rows * block_rows, grid_cols * block_cols)
    return tiles.reshape(grid_rows, block_rows, grid_cols, block_cols).max(axis=(1, 3))


def padded(values_RC: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """The matrix with zeros below and to the right, [rows, cols]; `np.pad` takes many times as long for small ones."""
    if values_RC.shape == (rows, cols):
        return values_RC
    whole = np.zeros((rows, cols), values_RC.dtype)
    whole[: values_RC.shape[0], : values_RC.shape[1]] = values_RC
    return whole


def spread(values: np.ndarray, block: tuple[int | None, int | None], shape_RC: tuple[int, int]) -> np.ndarray:
    """One value per block -> one per element: [ceil(R / Br), ceil(C / Bc)] -> [R, C]."""
    block_rows, block_cols = _sizes(shape_RC, block)
    elements = np.repeat(np.repeat(values, block_rows, axis=0), block_cols, axis=1)
    return elements[: shape_RC[0], : shape_RC[1]]


def _sizes(shape_RC: tuple[int, int], block: tuple[int | None, int | None]) -> tuple[int, int]:
    block_rows, block_cols = (
        max(extent, 1) if size is None else size for extent, size in zip(shape_RC, block, strict=True)
    )
    return block_rows, block_cols


def hadamard_transform(x_RC: np.ndarray, hadamard: Hadamard) -> np.ndarray:
    """``x' = bf16(bf16(x) diag(sgn) H * size^-1/2)`` per group of `size` columns, zero-padded to whole groups; float32.

    ``H[i, j] = (-1)^popcount(i & j)``; sums run in float32, butterflies of distance 1, 2, 4, 8 and so on.
    """
    x_RC = _matrix(x_RC, hadamard)
    rows, length = x_RC.shape
    x_RC = padded(x_RC, rows, stored_length(length, hadamard))
    groups = _groups(_bf16(x_RC), hadamard) * np.array(hadamard.signs, np.float32)
    return _bf16(_butterflies(groups) * np.float32(hadamard.size**-0.5)).reshape(x_RC.shape)


def hadamard_inverse(x_RC: np.ndarray, hadamard: Hadamard) -> np.ndarray:
    """``x = (x' H * size^-1/2) diag(sgn)`` in float32, which undoes the transform up to rounding."""
    x_RC = _matrix(x_RC, hadamard)
    if x_RC.shape[1] % hadamard.size:
        raise invalid_value("x_RC", f"{x_RC.shape[1]} columns", f"a multiple of {hadamard.size}")
    groups = _butterflies(_groups(x_RC, hadamard))
    return (groups * np.float32(hadamard.size**-0.5) * np.array(hadamard.signs, np.float32)).reshape(x_RC.shape)


def _matrix(x_RC: np.ndarray, hadamard: Hadamard) -> np.ndarray:
    """The float32 matrix that is transformed."""
    if not isinstance(hadamard, Hadamard):
        raise invalid_type("hadamard", type(hadamard), "a Hadamard, such as Hadamard()")
    matrix = as_float32(x_RC)
    if matrix.ndim != 2:
        raise invalid_value("x_RC", f"shape {matrix.shape}", "two axes, the contraction axis last")
    return matrix


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


def _bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)
