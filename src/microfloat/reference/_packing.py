"""Bytes as files hold them: FP4 two per byte, FP6 four in three bytes, scales in Blackwell's tiles, by groups of rows.

Source: docs/numerics.md 1.4 and 7.2.
"""

from collections.abc import Sequence

import numpy as np

from microfloat.arguments import check_packable, check_packed
from microfloat.errors import invalid_type, invalid_value
from microfloat.layout import blocked_sizes, blocked_windows, check_scale_bytes


def pack_fp4(codes: np.ndarray) -> np.ndarray:
    """Two 4-bit codes per byte along the last axis: ``byte[i] = c[2i] | c[2i + 1] << 4``.

    uint8 [..., C] -> uint8 [..., ceil(C / 2)]; an odd C leaves the last high nibble 0.
    Raises InvalidValueError for a code above 15, InvalidTypeError for anything but integers.
    """
    codes = _padded(_checked_codes(codes, 4), 2)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_fp4(data: np.ndarray, length: int) -> np.ndarray:
    """The first `length` codes of FP4 bytes: uint8 [..., ceil(length / 2)] -> uint8 [..., length], one per byte."""
    data = _checked_bytes(data, length, 2, 1)
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
    data = _checked_bytes(data, length, 4, 3)
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
    if codes.size:
        check_packable(int(codes.min()), int(codes.max()), bits)
    return codes.astype(np.uint8)


def _checked_bytes(data: np.ndarray, length: int, codes_in: int, bytes_in: int) -> np.ndarray:
    data = np.asarray(data)
    if data.dtype != np.uint8:
        raise invalid_type("data", data.dtype, "uint8 bytes")
    check_packed(length, data.shape, codes_in, bytes_in)
    return data


def _padded(codes: np.ndarray, multiple: int) -> np.ndarray:
    missing = -codes.shape[-1] % multiple
    return np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)]) if missing else codes


def to_blocked(scale: np.ndarray, group_sizes: Sequence[int] | None = None, *, dim: int = 0) -> np.ndarray:
    """Scale bytes [R, C] -> 1-D tile layout of 512 * ceil(R / 128) * ceil(C / 4) bytes, padding 0.

    ``out[((r // 128) * nc + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = scale[r, c]`` with
    ``nc = ceil(C / 4)``. E8M0 and E4M3 alike; 16x16 tile scales are repeated over their rows by the caller first.
    `group_sizes`: numbers of rows (`dim` 0: groups along M) or of columns (`dim` 1: groups along K) that are padded and
    put into tiles alone, one group after the other. Source: docs/numerics.md 7.2.
    """
    scale = np.asarray(scale)
    check_scale_bytes(scale.dtype)
    if scale.ndim != 2:
        raise invalid_value("scale", f"shape {scale.shape}", "[R, C], one byte per block of a row")
    windows = blocked_windows(scale.shape, group_sizes, dim)
    data = scale.view(np.uint8)  # whose 0 is the padding: E8M0 has no zero
    return np.concatenate([np.empty(0, np.uint8), *(_tiles(data[window]) for window in windows)]).view(scale.dtype)


def from_blocked(
    flat: np.ndarray, rows: int, cols: int, group_sizes: Sequence[int] | None = None, *, dim: int = 0
) -> np.ndarray:
    """The inverse of `to_blocked`: 1-D bytes -> [rows, cols], padding cropped; the sizes of groups as there."""
    flat = np.asarray(flat)
    check_scale_bytes(flat.dtype, "flat")
    windows = blocked_windows((rows, cols), group_sizes, dim)
    scale, start = np.empty((rows, cols), flat.dtype), 0
    for window, size in zip(windows, blocked_sizes(windows, flat.shape), strict=True):
        part = scale[window]
        row_tiles, col_tiles = -(-part.shape[0] // 128), -(-part.shape[1] // 4)
        tiles = flat[start : start + size].reshape(row_tiles, col_tiles, 32, 4, 4).transpose(0, 3, 2, 1, 4)
        part[...] = tiles.reshape(128 * row_tiles, 4 * col_tiles)[: part.shape[0], : part.shape[1]]
        start += size
    return scale


def _tiles(scale: np.ndarray) -> np.ndarray:
    """One group of scales in tiles."""
    rows, cols = scale.shape
    padded = np.pad(scale, ((0, -rows % 128), (0, -cols % 4)))
    tiles = padded.reshape(-(-rows // 128), 4, 32, -(-cols // 4), 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)


def swizzle_scales(scale: np.ndarray) -> np.ndarray:
    """`to_blocked` of a matrix that is one group: uint8 [R, C] -> uint8 [512 * ceil(R / 128) * ceil(C / 4)]."""
    return to_blocked(scale)


def unswizzle_scales(flat: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """The inverse of `swizzle_scales`: 1-D bytes -> [rows, cols], padding cropped."""
    return from_blocked(flat, rows, cols)
