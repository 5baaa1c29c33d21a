"""Values and errors of stored matrices in NumPy, computed in bands of rows on all cores."""

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from microfloat.formats import ElementFormat, ScaledFormat, decode
from microfloat.reference import unpack_fp4, unpack_fp6

_BAND = 1 << 18  # elements that a thread takes at a time: their float32 values stay in its cache
_PIECE = 1 << 22
_F32 = np.float32


def decode_into(
    out: np.ndarray, codes: np.ndarray, fmt: ScaledFormat, scale: np.ndarray, outer: np.ndarray | None = None,
    divides: bool = False,
) -> None:  # fmt: skip
    """Put the values of a stored matrix into `out` [R, C], each rounded to float32 and from there to its dtype.

    ``value = dec(codes) * scale * outer``, every product rounded. `codes`: [R, bytes], FP4 packed, FP6 packed or a byte
    each. `scale`: [G, H] of the blocks, bytes or float32. `outer`: float32, () or [R, 1], or None; it `divides`, or
    multiplies.
    """
    rows, columns = out.shape
    outer = None if outer is None else np.array(outer, _F32).reshape(-1, 1)

    def work(band: slice) -> None:
        height = fmt.block[0]
        tiles = slice(None) if height is None else slice(band.start // height, -(-band.stop // height))
        with np.errstate(all="ignore"):
            values = _values_of(codes[band], fmt.element, columns)
            scale_in_place(values, fmt.scale.values(scale[tiles]), fmt.block)
            if outer is not None:
                level = outer[band] if len(outer) > 1 else outer
                (np.divide if divides else np.multiply)(values, level, values)
            out[band] = values

    in_bands(work, rows, columns, fmt.block[0] or 1)


def _values_of(codes: np.ndarray, element: ElementFormat, columns: int) -> np.ndarray:
    """float32 [R, C] of codes [R, bytes]."""
    if element.bits == 4 and columns % 2 == 0:
        return _pairs(element)[codes].view(_F32)
    if element.bits == 6 and codes.shape[1] != columns:
        return decode(unpack_fp6(codes, columns), element)
    return decode(unpack_fp4(codes, columns) if element.bits == 4 else codes, element)


@functools.cache
def _pairs(element: ElementFormat) -> np.ndarray:
    """Both float32 values of every byte of packed 4-bit codes, as one word of 64 bits: one lookup instead of two."""
    return decode(unpack_fp4(np.arange(256, dtype=np.uint8)[:, None], 2), element).view(np.uint64)[:, 0]


def scale_in_place(values_RC: np.ndarray, scale_GH: np.ndarray, block: tuple[int | None, int | None]) -> None:
    """Multiply every block of `values_RC` by its scale; blocks at the edges are short."""
    (rows, length), (block_rows, block_cols) = values_RC.shape, block
    if block_cols is None:
        values_RC *= scale_GH
    elif block_rows == 1:
        whole = length // block_cols
        blocks = values_RC[:, : whole * block_cols].reshape(rows, whole, block_cols)
        blocks *= scale_GH[:, :whole, None]
        if length % block_cols:
            values_RC[:, whole * block_cols :] *= scale_GH[:, whole:]
    else:
        assert block_rows is not None
        for index, scale_H in enumerate(scale_GH):
            values_RC[index * block_rows : (index + 1) * block_rows] *= np.repeat(scale_H, block_cols)[:length]


def energies(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Sums of x * x and of (y - x) * (y - x) over the finite elements of x [R, C]; y is float32."""

    def work(band: slice) -> np.ndarray:
        with np.errstate(all="ignore"):
            values = x[band].astype(_F32)
            signal = np.einsum("rc,rc->r", values, values)
            error = np.subtract(y[band], values, out=values)
            return np.array([signal, np.einsum("rc,rc->r", error, error)], np.float64)

    signal, noise = (float(total) for total in np.concatenate([np.zeros((2, 1)), *in_bands(work, *x.shape)], 1).sum(1))
    # Squares in float32: of large numbers they are infinite, of errors below 2^-63 (2^-24 of 2^-39) subnormal or zero.
    if x.size * 2.0**-78 < signal < np.inf and noise < np.inf:
        return signal, noise
    with np.errstate(all="ignore"):
        x_32 = x.astype(_F32)
        finite = np.isfinite(x_32)
        x_32, error = x_32[finite], y[finite] - x_32[finite]
        return float(np.square(x_32, dtype=np.float64).sum()), float(np.square(error, dtype=np.float64).sum())


def pieces_of(array: np.ndarray) -> Iterator[np.ndarray]:
    """The elements of an array in their order, so many at a time that what is made of them stays small."""
    flat = array.reshape(-1)
    return (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))


def in_bands(work: Callable[[slice], Any], rows: int, columns: int, multiple: int = 1, shared: int = 0) -> list[Any]:
    """The results of `work` for bands of rows of a matrix, several at a time, in this thread and others.

    A band has about `_BAND` elements, or `shared` elements divided by the number of threads, and a multiple of so many
    rows, but for the last one. NumPy lets go of the interpreter.
    """
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    height = max(max(_BAND, shared // workers) // max(columns, 1) // multiple, 1) * multiple
    starts = range(0, rows, height)
    left, results = deque(enumerate(starts)), [None] * len(starts)

    def drain() -> None:
        while left:
            try:
                index, start = left.popleft()
            except IndexError:  # another thread took it
                return
            results[index] = work(slice(start, min(start + height, rows)))

    helpers = [_pool(os.getpid()).submit(drain) for _ in range(min(workers, len(starts)) - 1)]
    try:
        drain()
    finally:
        for helper in helpers:  # one that has not begun, as other calls keep the threads busy, has nothing left to do
            if not helper.cancel():
                helper.result()
    return results


@functools.cache
def _pool(_process: int) -> ThreadPoolExecutor:
    """Threads that stay, as starting one for every call is a twentieth of a cast; a forked process has its own."""
    return ThreadPoolExecutor(os.cpu_count() or 1, "microfloat")
