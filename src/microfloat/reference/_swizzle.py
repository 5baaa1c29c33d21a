"""The 128x4 tile layout in which Blackwell's block-scaled GEMMs read scales (docs/numerics.md 7.2)."""

import numpy as np

from microfloat.errors import invalid_type, invalid_value

__all__ = ["swizzle_scales", "unswizzle_scales"]


def swizzle_scales(scale: np.ndarray) -> np.ndarray:
    """Scale bytes [R, C] -> 1-D tile layout of 512 * ceil(R / 128) * ceil(C / 4) bytes, padding 0.

    ``out[((r // 128) * nc + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = scale[r, c]`` with
    ``nc = ceil(C / 4)``. E8M0 and E4M3 alike; 16x16 tile scales are repeated over their rows by the caller first.
    """
    scale = np.asarray(scale)
    if scale.dtype != np.uint8:
        raise invalid_type("scale", scale.dtype, "uint8 scale bytes", "FP32 scales have no swizzled layout.")
    if scale.ndim != 2:
        raise invalid_value("scale", f"shape {scale.shape}", "[R, C], one byte per block of a row")
    rows, cols = scale.shape
    padded = np.pad(scale, ((0, -rows % 128), (0, -cols % 4)))
    tiles = padded.reshape(-(-rows // 128), 4, 32, -(-cols // 4), 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)


def unswizzle_scales(flat: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """The inverse of `swizzle_scales`: 1-D bytes -> [rows, cols], padding cropped."""
    flat = np.asarray(flat)
    if flat.dtype != np.uint8:
        raise invalid_type("flat", flat.dtype, "uint8 scale bytes")
    for argument, value in (("rows", rows), ("cols", cols)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise invalid_type(argument, type(value), "an int")
        if value < 0:
            raise invalid_value(argument, value, "an int >= 0")
    row_tiles, col_tiles = -(-rows // 128), -(-cols // 4)
    if flat.shape != (512 * row_tiles * col_tiles,):
        raise invalid_value(
            "flat", f"shape {flat.shape}", f"({512 * row_tiles * col_tiles},) bytes for {rows} x {cols} scales"
        )
    tiles = flat.reshape(row_tiles, col_tiles, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles.reshape(128 * row_tiles, 4 * col_tiles)[:rows, :cols])
