"""An operand form [R, C] cut into blocks: [grid rows, block rows, grid columns, block columns], zero padded."""

import jax.numpy as jnp
from jax import Array, lax

from microfloat.formats import ScaledFormat

__all__ = ["Block", "block_sizes", "from_tiles", "leading_axes", "scale_shape", "spread", "to_tiles"]

Block = tuple[int | None, int | None]


def block_sizes(shape_RC: tuple[int, int], block: Block) -> tuple[int, int]:
    """The block with None replaced by the extent it stands for."""
    rows, cols = (extent if size is None else size for extent, size in zip(shape_RC, block, strict=True))
    return rows, cols


def _grid(extent: int, size: int | None) -> int:
    return 1 if size is None else -(-extent // size)


def to_tiles(x_RC: Array, block: Block) -> Array:
    """[R, C] -> [ceil(R / Br), Br, ceil(C / Bc), Bc]; zeros fill the last blocks, so they change no amax."""
    rows, cols = x_RC.shape
    block_rows, block_cols = block_sizes((rows, cols), block)
    grid_rows, grid_cols = _grid(rows, block[0]), _grid(cols, block[1])
    missing = (grid_rows * block_rows - rows, grid_cols * block_cols - cols)
    if any(missing):
        x_RC = lax.pad(x_RC, jnp.zeros((), x_RC.dtype), ((0, missing[0], 0), (0, missing[1], 0)))
    return x_RC.reshape(grid_rows, block_rows, grid_cols, block_cols)


def from_tiles(tiles: Array, shape_RC: tuple[int, int]) -> Array:
    """The inverse of `to_tiles`: crops the padding."""
    grid_rows, block_rows, grid_cols, block_cols = tiles.shape
    full = tiles.reshape(grid_rows * block_rows, grid_cols * block_cols)
    return full if full.shape == shape_RC else full[: shape_RC[0], : shape_RC[1]]


def spread(grid: Array) -> Array:
    """One value per block [grid rows, grid columns] -> [grid rows, 1, grid columns, 1], to broadcast over tiles."""
    return grid[:, None, :, None]


def leading_axes(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """What stands in place of R in the shapes of codes and of one-row scales (docs/numerics.md, "Operand form")."""
    if axis == -2:
        return (shape[1],)
    return shape[:-1] if len(shape) > 1 else (1,)


def scale_shape(fmt: ScaledFormat, shape: tuple[int, ...], axis: int, grid: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of stored scales whose operand form has `grid` blocks."""
    if fmt.is_per_tensor:
        return ()
    return grid if fmt.is_tile else (*leading_axes(shape, axis), grid[1])
