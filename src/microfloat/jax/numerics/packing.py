"""Packed FP4 and FP6 codes, and Blackwell's tiles of scales: functions of `microfloat.reference` on JAX's arrays."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from microfloat.arguments import check_packable, check_packed
from microfloat.errors import invalid_type, invalid_value
from microfloat.jax.numerics import bits
from microfloat.jax.transformations import rows_apart, run_automatically
from microfloat.layout import blocked_sizes, blocked_windows, check_scale_bytes

Sizes = Sequence[int] | np.ndarray | Array | None


def pack_fp4(codes: ArrayLike) -> Array:
    """Two 4-bit codes per byte along the last axis: ``byte[i] = c[2i] | c[2i + 1] << 4``.

    Integers [..., C] -> uint8 [..., ceil(C / 2)]; an odd C leaves the last high nibble 0. Raises InvalidTypeError for
    anything but integers, InvalidValueError for a code above 15; the upper bits of traced ones are dropped instead.
    """
    return run_automatically(bits.pack_fp4, rows_apart, _checked_codes(codes, 4))


def unpack_fp4(data: ArrayLike, length: int) -> Array:
    """The first `length` codes of FP4 bytes: uint8 [..., ceil(length / 2)] -> uint8 [..., length], one per byte."""
    return run_automatically(bits.unpack_fp4, rows_apart, _checked_bytes(data, length, 2, 1), length=length)


def pack_fp6(codes: ArrayLike) -> Array:
    """Four 6-bit codes in three little-endian bytes, C padded with code 0: [..., C] -> uint8 [..., 3 * ceil(C / 4)]."""
    return run_automatically(_pack_fp6, rows_apart, _checked_codes(codes, 6))


def _pack_fp6(array: Array) -> Array:
    array = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % 4)]).astype(jnp.uint32)
    words = array[..., 0::4] | array[..., 1::4] << 6 | array[..., 2::4] << 12 | array[..., 3::4] << 18
    data = jnp.stack([words & 255, words >> 8 & 255, words >> 16], axis=-1).astype(jnp.uint8)
    return data.reshape(*data.shape[:-2], 3 * data.shape[-2])


def unpack_fp6(data: ArrayLike, length: int) -> Array:
    """The first `length` codes of FP6 bytes: uint8 [..., 3 * ceil(length / 4)] -> uint8 [..., length]."""
    return run_automatically(_unpack_fp6, rows_apart, _checked_bytes(data, length, 4, 3), length=length)


def _unpack_fp6(data: Array, *, length: int) -> Array:
    wide = data.astype(jnp.uint32)
    words = wide[..., 0::3] | wide[..., 1::3] << 8 | wide[..., 2::3] << 16
    codes = jnp.stack([words >> shift & 63 for shift in (0, 6, 12, 18)], axis=-1).astype(jnp.uint8)
    return codes.reshape(*codes.shape[:-2], 4 * codes.shape[-2])[..., :length]


def to_blocked(scale: ArrayLike, group_sizes: Sizes = None, *, dim: int = 0) -> Array:
    """Scale bytes [R, C] as the tiles of 128 x 4 that Blackwell's GEMMs read: 1-D, 512 * ceil(R / 128) * ceil(C / 4).

    ``out[((r // 128) * nc + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = scale[r, c]`` with
    ``nc = ceil(C / 4)``; padding is 0. `scale`: uint8, or the float8 dtype of E8M0 or E4M3, which the result keeps;
    scales of 16x16 tiles are repeated over their rows by the caller first. `group_sizes`, which decide shapes and are
    never traced: numbers of rows (`dim` 0: groups along M) or of columns (`dim` 1: groups along K) that are padded and
    put into tiles alone, one group after the other. Source: docs/numerics.md 7.2.
    """
    scale_RC = _scale_bytes("scale", scale)
    if scale_RC.ndim != 2:
        raise invalid_value("scale", f"shape {scale_RC.shape}", "[R, C], one byte per block of a row")
    sizes = _static(group_sizes, scale_RC.shape, dim)
    flat = run_automatically(_blocked, _everywhere, scale_RC, sizes=sizes, dim=dim)
    return lax.bitcast_convert_type(flat, jnp.asarray(scale).dtype)


def from_blocked(flat: ArrayLike, rows: int, cols: int, group_sizes: Sizes = None, *, dim: int = 0) -> Array:
    """The inverse of `to_blocked`: 1-D bytes -> [rows, cols], padding cropped; the sizes of groups as there."""
    stored = _scale_bytes("flat", flat)
    sizes = _static(group_sizes, (rows, cols), dim)
    scale = run_automatically(_unblocked, _everywhere, stored, shape=(rows, cols), sizes=sizes, dim=dim)
    return lax.bitcast_convert_type(scale, jnp.asarray(flat).dtype)


def _everywhere(*_: object, **__: object) -> PartitionSpec:
    """The partition of tiles, which every device has whole: the GEMM of one device reads them."""
    return PartitionSpec()


def _blocked(scale_RC: Array, *, sizes: tuple[int, ...] | None, dim: int) -> Array:
    windows = blocked_windows(scale_RC.shape, sizes, dim)
    tiles = [jnp.zeros(0, jnp.uint8)]
    for window in windows:
        rows, columns = scale_RC[window].shape
        padded = jnp.pad(scale_RC[window], ((0, -rows % 128), (0, -columns % 4)))
        four = padded.reshape(-(-rows // 128), 4, 32, -(-columns // 4), 4)
        tiles.append(four.transpose(0, 3, 2, 1, 4).reshape(-1))
    return jnp.concatenate(tiles)


def _unblocked(stored: Array, *, shape: tuple[int, int], sizes: tuple[int, ...] | None, dim: int) -> Array:
    (rows, cols), windows = shape, blocked_windows(shape, sizes, dim)
    parts, start = [jnp.zeros((0, cols) if dim == 0 else (rows, 0), jnp.uint8)], 0
    for (of_rows, of_cols), size in zip(windows, blocked_sizes(windows, stored.shape), strict=True):
        height, width = of_rows.stop - of_rows.start, of_cols.stop - of_cols.start
        high, wide = -(-height // 128), -(-width // 4)
        tiles = stored[start : start + size].reshape(high, wide, 32, 4, 4).transpose(0, 3, 2, 1, 4)
        parts.append(tiles.reshape(128 * high, 4 * wide)[:height, :width])
        start += size
    return jnp.concatenate(parts, dim)


def _static(group_sizes: Sizes, shape: tuple[int, ...], dim: int) -> tuple[int, ...] | None:
    """The sizes of groups as ints, if they fit `shape`; None for one group."""
    if isinstance(group_sizes, Tracer):
        raise invalid_type("group_sizes", "a traced array", "known numbers: they decide shapes", "Pass ints.")
    windows = blocked_windows(shape, group_sizes, dim)
    return None if group_sizes is None else tuple(window[dim].stop - window[dim].start for window in windows)


def _scale_bytes(argument: str, scale: ArrayLike) -> Array:
    if not isinstance(scale, jax.Array | np.ndarray):
        raise invalid_type(argument, type(scale), "an array of scale bytes", "Give q.scale.")
    check_scale_bytes(scale.dtype, argument)
    return lax.bitcast_convert_type(jnp.asarray(scale), jnp.uint8)


def _checked_codes(codes: ArrayLike, width: int) -> Array:
    if not isinstance(codes, jax.Array | np.ndarray) or not jnp.issubdtype(codes.dtype, jnp.integer):
        raise invalid_type("codes", getattr(codes, "dtype", type(codes)), "an array of uint8 codes, one per byte")
    array = jnp.asarray(codes)
    if array.ndim == 0:
        raise invalid_value("codes", "a 0-d array", "at least one axis")
    if array.size and not isinstance(array, Tracer):
        check_packable(int(array.min()), int(array.max()), width)
    return array.astype(jnp.uint8) & np.uint8((1 << width) - 1)


def _checked_bytes(data: ArrayLike, length: int, codes_in: int, bytes_in: int) -> Array:
    if not isinstance(data, jax.Array | np.ndarray) or data.dtype != jnp.uint8:
        raise invalid_type("data", getattr(data, "dtype", type(data)), "an array of uint8 bytes")
    check_packed(length, data.shape, codes_in, bytes_in)
    return jnp.asarray(data)
