"""Bytes as memory and files hold them: FP4 two per byte, FP6 four in three bytes, scales in the tiles of Blackwell.

Source: docs/numerics.md 1.4 and 7.2.
"""

import numpy as np

from microfloat.errors import invalid_type, invalid_value


def pack_fp4(codes: np.ndarray) -> np.ndarray:
    """Two 4-bit codes per byte along the last axis: ``byte[i] = c[2i] | c[2i + 1] << 4``.

    uint8 [..., C] -> uint8 [..., ceil(C / 2)]; an odd C leaves the last high nibble 0.
    Raises InvalidValueError for a code above 15, InvalidTypeError for anything but integers.
    """
    codes = _padded(_checked_codes(codes, 4), 2)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_fp4(data: np.ndarray, length: int) -> np.ndarray:
    """The first `length` codes of FP4 bytes: uint8 [..., ceil(length / 2)] -> uint8 [..., length], one per byte."""
    data = _checked_bytes(data, length, -(-length // 2))
    codes = np.stack([data & 15, data >> 4], axis=-1)
    return codes.reshape(*data.shape[:-1], 2 * data.shape[-1])[..., :length]


def pack_fp6(codes: np.ndarray) -> np.ndarray:
    """Four 6-bit codes in three bytes, little-endian: ``w = c0 | c1 << 6 | c2 << 12 | c3 << 18``.

    uint8 [..., C] -> uint8 [..., 3 * ceil(C / 4)]; C is padded with code 0 to a multiple of 4.
    Raises InvalidValueError for a code above 63, InvalidTypeError for anything but integers.
    """
    codes = _padded(_checked_codes(codes, 6), 4)
    quads = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 4, 4).astype(np.uint32)
    words = quads[..., 0] | quads[..., 1] << 6 | quads[..., 2] << 12 | quads[..., 3] << 18
    data = np.stack([words & 255, words >> 8 & 255, words >> 16 & 255], axis=-1).astype(np.uint8)
    return data.reshape(*codes.shape[:-1], 3 * (codes.shape[-1] // 4))


def unpack_fp6(data: np.ndarray, length: int) -> np.ndarray:
    """The first `length` codes of FP6 bytes: uint8 [..., 3 * ceil(length / 4)] -> uint8 [..., length]."""
    data = _checked_bytes(data, length, 3 * -(-length // 4))
    triples = data.reshape(*data.shape[:-1], data.shape[-1] // 3, 3).astype(np.uint32)
    words = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    codes = np.stack([words >> shift & 63 for shift in (0, 6, 12, 18)], axis=-1).astype(np.uint8)
    return codes.reshape(*data.shape[:-1], 4 * (data.shape[-1] // 3))[..., :length]


def _checked_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    codes = np.asarray(codes)
    if codes.dtype.kind not in "ui":
        raise invalid_type("codes", codes.dtype, "uint8 codes, one per byte")
    if codes.ndim == 0:
        raise invalid_value("codes", "a 0-d array", "at least one axis")
    if codes.size and (int(codes.min()) < 0 or int(codes.max()) >> bits):
        raise invalid_value(
            "codes", f"values from {int(codes.min())} to {int(codes.max())}", f"{bits}-bit codes, one per byte",
            "Bytes that are packed already must not be packed again.",
        )  # fmt: skip
    return codes.astype(np.uint8)


def _checked_bytes(data: np.ndarray, length: int, needed: int) -> np.ndarray:
    data = np.asarray(data)
    if data.dtype != np.uint8:
        raise invalid_type("data", data.dtype, "uint8 bytes")
    if isinstance(length, bool) or not isinstance(length, int | np.integer):
        raise invalid_type("length", type(length), "an int, the number of codes along the last axis")
    if length < 0 or data.ndim == 0 or data.shape[-1] != needed:
        raise invalid_value(
            "length", f"{length} for data of shape {data.shape}", f"a last axis of {max(needed, 0)} bytes for it"
        )
    return data


def _padded(codes: np.ndarray, multiple: int) -> np.ndarray:
    missing = -codes.shape[-1] % multiple
    return np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)]) if missing else codes


# ---- scales ------------------------------------------------------------------------------------------------------


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
