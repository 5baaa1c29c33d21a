"""Arrays as the matrix [R, C] that a GEMM sees (C = contraction axis), and its division into blocks.

Source: docs/numerics.md, "Operand form of an array".
"""

import ml_dtypes
import numpy as np

from microfloat.errors import invalid_type

__all__ = ["as_float32", "block_max", "operand_form", "spread"]

_INPUT_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float64))


def as_float32(x: object) -> np.ndarray:
    """The input as float32: bf16 and fp16 widen exactly, float64 rounds once; other dtypes are an InvalidTypeError."""
    try:
        array = np.asarray(x)
    except Exception as error:  # whatever a foreign array type raises when it cannot become a NumPy array
        raise invalid_type("x", f"{type(x).__name__} ({error})", "an array of floating-point numbers") from error
    if array.dtype.newbyteorder("=") not in _INPUT_DTYPES:
        raise invalid_type(
            "x", array.dtype, "float32, bfloat16 (ml_dtypes), float16 or float64", "Convert it with .astype first."
        )
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
    padding = ((0, grid_rows * block_rows - rows), (0, grid_cols * block_cols - cols))
    tiles = np.pad(values_RC, padding).reshape(grid_rows, block_rows, grid_cols, block_cols)
    return tiles.max(axis=(1, 3))


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
