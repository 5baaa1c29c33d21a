"""The compiled loops: amax of rows, the cast of blocks, and decoding. One of each, for every format.

A format enters as numbers: the `Codec` of its element, the `Grid` of its blocks, the `Constants` of its rule. All
arithmetic is on lanes, which are vectors of 16 numbers of 32 bits: one register with AVX-512, two with AVX2, four with
NEON. The loops are written with them because what LLVM makes of a loop over elements depends on the loop; rows are
read in segments of columns, so that the second look at a segment finds it in the first- or second-level cache.

Arithmetic is that of docs/numerics.md: float32, one rounding per operation, no contraction (numba's default).
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import overload

from microfloat.cpu import _lanes
from microfloat.cpu._lanes import (
    GROUP,
    INFINITY,
    across,
    added,
    bits_of,
    floats_of,
    integers_at,
    lane_numbers,
    larger,
    largest,
    nibbles_at,
    sixes_at,
    smaller,
    store,
    store_pairs,
    stored_magnitudes_at,
    values_at,
    where,
    widened,
)  # fmt: skip

# Columns at a time: those of one row stay in the first-level cache. The rows of a tile are read twice in long runs,
# which the processor sees coming; in short ones they are waited for, even from a cache. Longer blocks are segments.
SEGMENT, TILE_SEGMENT = 4096, 16384
NARROW = 4 * GROUP  # blocks up to here have so few groups that the inner loop is over blocks

E8M0, RATIO, INVERSE_SIX, DIVIDING, FOUR_OVER_SIX = range(5)

_MAGNITUDE = 0x7FFFFFFF
_FMAX = np.finfo(np.float32).max
_QUIET_NAN, _QUIET_NAN_16 = 0x7FC00000, 0x7FC0

F32 = np.float32


class Target(NamedTuple):
    """The operand that is written: codes [R, bytes], two in a byte where `packed` is 1; scales as bytes or floats."""

    codes: np.ndarray
    packed: int
    scale_bytes: np.ndarray
    scale_floats: np.ndarray


class Codec(NamedTuple):
    """An element format as int32 numbers; `max` and `min_normal` are the bits of float32 values.

    `magic` is what turns the exponent of a number into that of the power of two whose unit is the number's step. Codes
    above `finite`, read as if they were numbers, are infinite where they are `infinity`, else NaN.
    """

    max: np.int32
    min_normal: np.int32
    magic: np.int32
    shift: np.int32
    sign_shift: np.int32
    sign: np.int32
    nan_code: np.int32
    finite: np.int32
    infinity: np.int32


class Grid(NamedTuple):
    """The blocks of a matrix and the kind of rule that gives their scales, int64; flags are 0 or 1."""

    rows: int
    columns: int
    rule: int
    emax: int
    threshold: int
    power_of_two: int
    squared: int


class Tile(NamedTuple):
    """The block of one scale when codes are decoded, int64; with `divides` the outer scale is a divisor."""

    rows: int
    columns: int
    divides: int


class Constants(NamedTuple):
    """The float32 numbers of a scale rule (docs/numerics.md 2.3 to 2.7)."""

    largest: np.float32
    least_amax: np.float32
    epsilon: np.float32
    inverse_six: np.float32
    smallest_scale: np.float32
    largest_scale: np.float32
    capacity: np.float32


# Without numba's runtime: counting references to the lines takes longer than the arithmetic. The kernels keep them.
_INNER = {"forceinline": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def _inner(function: Callable) -> Callable:
    return numba.njit(error_model="numpy", **_INNER)(function)


# ---- elements ----------------------------------------------------------------------------------------------------


@_inner
def _rounded(y: Any, codec: Codec) -> tuple:
    """``(step count + magic, bits of the magic number)`` of |y|: nearest, ties to even, saturated; y is no NaN.

    A float32 of the exponent of y plus `23 - mantissa_bits` has the step of y as its unit, so that adding it rounds.
    """
    magnitude = smaller(bits_of(y) & _MAGNITUDE, codec.max)
    magic = larger(magnitude & INFINITY, codec.min_normal) + codec.magic
    return floats_of(magnitude) + floats_of(magic), magic


@_inner
def _code(y: Any, codec: Codec) -> Any:
    """The code of y."""
    total, magic = _rounded(y, codec)
    exponent = (magic - codec.magic - codec.min_normal) >> codec.shift
    return bits_of(total) - magic + exponent | (bits_of(y) >> codec.sign_shift) & codec.sign


@_inner
def _value(y: Any, codec: Codec) -> Any:
    """The value of the code of y."""
    total, magic = _rounded(y, codec)
    return floats_of(bits_of(total - floats_of(magic)) | bits_of(y) & ~_MAGNITUDE)


@_inner
def _decoded(code: Any, codec: Codec) -> Any:
    """The value of a code; a subnormal one is the number with its mantissa and the least exponent, less that power."""
    magnitude = code & (codec.sign - 1)
    raised = (magnitude << codec.shift) + codec.min_normal
    normal = raised - (1 << 23)
    subnormal = bits_of(floats_of(raised) - floats_of(normal & 0 | codec.min_normal))
    bits = where(raised < codec.min_normal + (1 << 23), subnormal, normal)
    special = where(normal == codec.infinity, INFINITY, normal & 0 | _QUIET_NAN)
    return floats_of(where(normal > codec.finite, special, bits) | (code & codec.sign) << codec.sign_shift)


# ---- amaxes ------------------------------------------------------------------------------------------------------


@_inner
def _magnitudes(line: np.ndarray, at: int, skip_nan: bool) -> Any:
    """Bits of the magnitudes of GROUP values; NaN lies above infinity, or is zero."""
    found = bits_of(values_at(line, at)) & _MAGNITUDE
    return where(found > INFINITY, 0, found) if skip_nan else found


@_inner
def _maxima(line: np.ndarray, start: int, stop: int, skip_nan: bool) -> Any:
    """Bits of the largest magnitudes of a part of a line, lane by lane; with NaN they are compared as stored."""
    if skip_nan:
        most = _magnitudes(line, start, True)
        for at in range(start + GROUP, stop, GROUP):
            most = larger(most, _magnitudes(line, at, True))
        return most
    stored = stored_magnitudes_at(line, start)
    for at in range(start + GROUP, stop, GROUP):
        stored = larger(stored, stored_magnitudes_at(line, at))
    return widened(stored, line)


def row_amax(x: np.ndarray, out: np.ndarray) -> None:
    """Bits of the amax of every row, NaN ignored."""
    for row in range(out.size):
        line = x[row]
        amax = largest(_maxima(line, 0, line.size, False))
        out[row] = amax if amax <= INFINITY else largest(_maxima(line, 0, line.size, True))


@_inner
def _collect(x: np.ndarray, rows: range, start: int, stop: int, width: int, skip_nan: bool, maxima: np.ndarray) -> None:
    """The largest magnitudes of every block, lane by lane."""
    for row in rows:
        line, is_first = x[row, :stop], row == rows.start
        if width > NARROW:
            for block in range((stop - start + width - 1) // width):
                first = start + block * width
                _raise(maxima, block, _maxima(line, first, min(first + width, stop), skip_nan), is_first)
        else:
            for first in range(start, min(start + width, stop), GROUP):
                for block in range((stop - first + width - 1) // width):
                    most = _magnitudes(line, first + block * width, skip_nan)
                    _raise(maxima, block, most, is_first and first == start)


@_inner
def _raise(maxima: np.ndarray, block: int, most: Any, is_first: bool) -> None:
    """Raise the maxima of a block, whose first ones replace what is there."""
    if not is_first:
        most = larger(most, integers_at(maxima, block * GROUP))
    store(most, maxima, block * GROUP)


@_inner
def _reduce(maxima: np.ndarray, amaxes: np.ndarray) -> None:
    """One amax for each block, from its lanes."""
    for block in range(0, amaxes.size, GROUP):
        store(across(maxima, block * GROUP), amaxes, block)


@_inner
def _mark(amaxes: np.ndarray, least: int, limit: int, limits: np.ndarray) -> bool:
    """Give a limit to the blocks whose amax is at least `least`, and tell if there is one.

    Magnitudes from the limit of their block on get the code of NaN.
    """
    most = 0
    for block in range(amaxes.size):
        most = max(most, amaxes[block])
        limits[block] = limit if amaxes[block] >= least else _MAGNITUDE
    return most >= least


# ---- scales ------------------------------------------------------------------------------------------------------


@_inner
def _power_scales(amaxes: np.ndarray, grid: Grid, factors: np.ndarray, stored: np.ndarray) -> None:
    """E8M0: ``b = clamp(E - emax + (M >= threshold), 0, 254)``, 255 for NaN and Inf; encode by 2^(127 - b)."""
    for block in range(0, amaxes.size, GROUP):
        amax = integers_at(amaxes, block)
        exponent = amax >> 23
        bump = where((amax & 0x7FFFFF) >= grid.threshold, 1, amax & 0)
        byte = larger(exponent - grid.emax + bump, 0)
        store(where(exponent == 255, 255, byte), stored, block)
        store(floats_of(larger(254 - byte, 1) << 23), factors, block)


@_inner
def _ratio_scales(amaxes: np.ndarray, grid: Grid, rule: Constants, factors: np.ndarray, stored: np.ndarray) -> None:
    """FP32: ``s = max / max(A, max * 2^-126)``, 1 for A = 0 and Inf; stored is 1 / s."""
    mask = ~0x7FFFFF if grid.power_of_two else -1
    for block in range(0, amaxes.size, GROUP):
        amax = larger(floats_of(integers_at(amaxes, block)), rule.epsilon)
        factor = rule.largest / larger(amax, rule.least_amax)
        factor = where(amax == F32(0), F32(1), factor)
        factor = floats_of(bits_of(where(bits_of(amax) == INFINITY, F32(1), factor)) & mask)
        store(factor, factors, block)
        store(F32(1) / factor, stored, block)


@_inner
def _two_level_scales(
    amaxes: np.ndarray, grid: Grid, rule: Constants, codec: Codec, level: np.ndarray, k: float, scales: np.ndarray,
    factors: np.ndarray,
) -> None:  # fmt: skip
    """E4M3 under an FP32 tensor scale: the value of every block scale, and the factor of its elements.

    The factor is ``1 / outer / scale`` where the rule divides, else ``e = min(1 / (scale * f32(1 / S)), FMAX)``.
    """
    encode, outer = level[1], level[2]
    multiplier = encode * rule.inverse_six
    for block in range(0, amaxes.size, GROUP):
        amax = floats_of(integers_at(amaxes, block))
        if grid.rule == DIVIDING:
            scale = _value(smaller(larger(amax / F32(6) / outer, rule.smallest_scale), rule.largest_scale), codec)
            factor = F32(1) / outer / scale
        else:
            if grid.rule == INVERSE_SIX:
                target = amax * multiplier
            else:
                target = smaller(amax / F32(6) * encode * k, rule.largest_scale)
            scale = _value(smaller(target, F32(_FMAX)), codec)
            factor = smaller(F32(1) / (scale * (F32(1) / encode)), F32(_FMAX))
        store(scale, scales, block)
        store(factor, factors, block)


@_inner
def _store_scales(scales: np.ndarray, codec: Codec, limits: np.ndarray, has_nan: bool, out: np.ndarray) -> None:
    """Bytes of E4M3 scales, NaN for the marked blocks."""
    for block in range(0, out.size, GROUP):
        code = _code(values_at(scales, block), codec)
        if has_nan:
            code = where(integers_at(limits, block) == 0, codec.nan_code, code)
        store(code, out, block)


@_inner
def _block_errors(
    line: np.ndarray, start: int, grid: Grid, capacity: float, element: Codec, amax: float,
    factors: np.ndarray, scales: np.ndarray, sums: np.ndarray,
) -> None:  # fmt: skip
    """Sum of |d| or d * d over one row of every block, left to right."""
    for block in range(sums.size):
        first, total = start + block * grid.columns, F32(0)
        for at in range(first, min(first + grid.columns, line.size), GROUP):
            values = values_at(line, at)
            decoded = _value(values * factors[block], element) * scales[block]
            difference = decoded * amax / capacity - values
            magnitude = floats_of(bits_of(difference) & _MAGNITUDE)
            total = added(total, difference * difference if grid.squared else magnitude)
        sums[block] = total


@_inner
def _added_rows(sums: np.ndarray) -> None:
    """Add up rows, of which there is a power of two, by halving; the result is in row 0."""
    half = sums.shape[0] // 2
    while half:
        for upper in range(half):
            for block in range(sums.shape[1]):
                sums[upper, block] += sums[upper + half, block]
        half //= 2


# ---- the casts ---------------------------------------------------------------------------------------------------


@_inner
def _encode(
    line: np.ndarray, at: int, factor: float, limit: int, element: Codec, codes: np.ndarray, packed: int
) -> None:  # fmt: skip
    """The codes of a group, that of NaN from the magnitude `limit` on; the padding of a last byte is zero."""
    values = values_at(line, at)
    code = _code(values * factor, element)
    if limit < _MAGNITUDE:
        is_nan = (bits_of(values) & _MAGNITUDE) >= limit
        code = where(lane_numbers() < line.size - at, where(is_nan, element.nan_code, code), 0)
    if packed:
        store_pairs(code, codes, at // 2)
    else:
        store(code, codes, at)


@_inner
def _encode_run(
    line: np.ndarray, start: int, stop: int, factor: float, limit: int, element: Codec, codes: np.ndarray, packed: int
) -> None:  # fmt: skip
    """The codes of a part of a row that has one factor and one limit."""
    for at in range(start, stop, GROUP):
        _encode(line, at, factor, limit, element, codes, packed)


def cast_rows(x: np.ndarray, element: Codec, factors: np.ndarray, codes: np.ndarray, packed: int) -> None:
    """Codes of rows with a given encode factor, one for each row or one for all; a NaN is a NaN code alone."""
    for row in range(codes.shape[0]):
        factor = factors[row if factors.size > 1 else 0]
        _encode_run(x[row], 0, x.shape[1], factor, INFINITY + 1, element, codes[row], packed)


@_inner
def _encode_row(
    line: np.ndarray, start: int, stop: int, width: int, factors: np.ndarray, limits: np.ndarray, has_nan: bool,
    element: Codec, codes: np.ndarray, packed: int,
) -> None:  # fmt: skip
    """The codes of a part of a row, whose blocks have factors and, with `has_nan`, limits of their own."""
    if width > NARROW:
        for block in range((stop - start + width - 1) // width):
            first, limit = start + block * width, limits[block] if has_nan else _MAGNITUDE
            _encode_run(line, first, min(first + width, stop), factors[block], limit, element, codes, packed)
    else:
        for first in range(start, min(start + width, stop), GROUP):
            for block in range((stop - first + width - 1) // width):
                limit = limits[block] if has_nan else _MAGNITUDE
                _encode(line, first + block * width, factors[block], limit, element, codes, packed)


@_inner
def _amaxes(
    x: np.ndarray, rows: range, start: int, stop: int, grid: Grid, maxima: np.ndarray, amaxes: np.ndarray,
    limits: np.ndarray,
) -> bool:  # fmt: skip
    """Bits of the amax of every block, without NaN where the rule goes on without it, and the limits of blocks.

    E8M0 gives up the whole block that has a NaN or an infinity, two levels that with a NaN, and a ratio the NaN alone.
    """
    least = INFINITY if grid.rule == E8M0 else INFINITY + 1
    _collect(x, rows, start, stop, grid.columns, False, maxima)
    _reduce(maxima, amaxes)
    has_nan = _mark(amaxes, least, INFINITY + 1 if grid.rule == RATIO else 0, limits)
    if has_nan and grid.rule != E8M0:
        _collect(x, rows, start, stop, grid.columns, True, maxima)
        _reduce(maxima, amaxes)
    return has_nan


@_inner
def _take_four(
    x: np.ndarray, rows: range, start: int, stop: int, grid: Grid, capacity: float, element: Codec, amax: float,
    factors: np.ndarray, scales: np.ndarray, sums: np.ndarray,
) -> None:  # fmt: skip
    """Take the second factor and scale of a block, which put its amax at four, where the error is smaller with them."""
    for k in range(2):
        for row in rows:
            _block_errors(
                x[row, :stop], start, grid, capacity, element, amax, factors[k], scales[k], sums[k, row - rows.start],
            )  # fmt: skip
        _added_rows(sums[k])
    for block in range(sums.shape[2]):
        if sums[1, 0, block] < sums[0, 0, block]:
            scales[0, block], factors[0, block] = scales[1, block], factors[1, block]


def cast_blocks(
    x: np.ndarray, grid: Grid, rule: Constants, element: Codec, scale_codec: Codec, levels: np.ndarray, target: Target
) -> None:
    """Codes and stored scales of the blocks of R rows.

    `levels`: (A, S, tensor scale) of the tensor, or of every row.
    """
    width, columns, codes = grid.columns, x.shape[1], target.codes
    segment = max((SEGMENT if grid.rows == 1 else TILE_SEGMENT) // width, 1) * width
    most = -(-(segment // width) // GROUP) * GROUP
    maxima, every_amax, limits = np.zeros(most * GROUP, np.int32), np.empty(most, np.int32), np.empty(most, np.int32)
    factors, scales = np.empty((2, most), np.float32), np.empty((2, most), np.float32)
    tree = 1
    while tree < grid.rows and grid.rule == FOUR_OVER_SIX:
        tree *= 2
    sums = np.zeros((2, tree, most), np.float32)
    for band in range(target.scale_bytes.shape[0] + target.scale_floats.shape[0]):
        rows = range(band * grid.rows, min((band + 1) * grid.rows, codes.shape[0]))
        level = levels[rows.start if levels.shape[0] > 1 else 0]
        for start in range(0, columns, segment):
            stop, first = min(start + segment, columns), start // width
            blocks = -(-(stop - start) // width)
            amaxes = every_amax[: -(-blocks // GROUP) * GROUP]
            has_nan = _amaxes(x, rows, start, stop, grid, maxima, amaxes, limits)
            if grid.rule == E8M0:
                _power_scales(amaxes, grid, factors[0], target.scale_bytes[band, first : first + blocks])
            elif grid.rule == RATIO:
                _ratio_scales(amaxes, grid, rule, factors[0], target.scale_floats[band, first : first + blocks])
            else:
                _two_level_scales(amaxes, grid, rule, scale_codec, level, F32(1), scales[0], factors[0])
                if grid.rule == FOUR_OVER_SIX:
                    _two_level_scales(amaxes, grid, rule, scale_codec, level, F32(1.5), scales[1], factors[1])
                    sums[:] = 0
                    _take_four(
                        x, rows, start, stop, grid, rule.capacity, element, level[0], factors, scales,
                        sums[:, :, :blocks],
                    )  # fmt: skip
                _store_scales(scales[0], scale_codec, limits, has_nan, target.scale_bytes[band, first : first + blocks])
            for row in rows:
                _encode_row(
                    x[row], start, stop, width, factors[0], limits, has_nan, element, codes[row], target.packed
                )  # fmt: skip


# ---- decoding ----------------------------------------------------------------------------------------------------


@_inner
def _codes(line: np.ndarray, at: int, bits: int) -> Any:
    """GROUP codes of a stored row, of which two are in a byte, or four in three bytes, or each is a byte."""
    if bits == 4:
        return nibbles_at(line, at // 2)
    if bits == 6:
        return sixes_at(line, at // 4 * 3)
    return integers_at(line, at)


@_inner
def _half(values: Any) -> Any:
    """Bits of bfloat16: nearest, ties to even; a NaN keeps its sign alone."""
    bits = bits_of(values)
    upper = bits >> 16
    nearest = (bits + 0x7FFF + (upper & 1)) >> 16
    return where((bits & _MAGNITUDE) > INFINITY, upper & 0x8000 | _QUIET_NAN_16, nearest)


# numba compares the parameters of the two functions with those of the lambdas, so that they have no annotations.
def _put(values, line, at):
    """Store float32, or bfloat16 into a line of words."""


@overload(_put, jit_options=_INNER)
def _put_of(values, line, at):
    if line.dtype == types.float32:
        return lambda values, line, at: store(values, line, at)
    return lambda values, line, at: store(_half(values), line, at)


def decode(
    codes: np.ndarray, bits: int, element: Codec, scales: np.ndarray, tile: Tile, outers: np.ndarray, out: np.ndarray
) -> None:
    """``dec(code) * scale * outer`` of every element, or ``/ outer``, each product rounded, and stored in `out`:
    float32, or bfloat16 as words. There is one `outer` for all rows, or one for each.
    """
    columns = out.shape[1]
    for row in range(out.shape[0]):
        line, target, factors = codes[row], out[row], scales[row // tile.rows]
        outer = outers[row if outers.size > 1 else 0]
        for block in range(factors.size):
            for at in range(block * tile.columns, min((block + 1) * tile.columns, columns), GROUP):
                values = _decoded(_codes(line, at, bits), element) * factors[block]
                if tile.divides:
                    values = values / outer
                elif outer != F32(1):
                    values = values * outer
                _put(values, target, at)


# ---- comparing ---------------------------------------------------------------------------------------------------


def energies(x: np.ndarray, y: np.ndarray, sums: np.ndarray) -> None:
    """Sums of x * x and (y - x) * (y - x) over the finite x of every row; float32 in a segment, then float64."""
    for row in range(y.shape[0]):
        line, other = x[row], y[row]
        for start in range(0, line.size, SEGMENT):
            signal = noise = floats_of(lane_numbers() & 0)
            for at in range(start, min(start + SEGMENT, line.size), GROUP):
                values = values_at(line, at)
                is_finite = (bits_of(values) & _MAGNITUDE) < INFINITY
                value = where(is_finite, values, F32(0))
                error = where(is_finite, values_at(other, at) - values, F32(0))
                signal, noise = signal + value * value, noise + error * error
            sums[row, 0] += added(F32(0), signal)
            sums[row, 1] += added(F32(0), noise)


# ---- compilation -------------------------------------------------------------------------------------------------


def _array(dtype: Any, dimensions: int, **properties: Any) -> Any:
    return types.Array(dtype, dimensions, "C", **properties)


_BYTES, _FLOATS = _array(types.uint8, 2), _array(types.float32, 2)
_CODEC = types.NamedUniTuple(types.int32, len(Codec._fields), Codec)
_GRID = types.NamedUniTuple(types.int64, len(Grid._fields), Grid)
_CONSTANTS = types.NamedUniTuple(types.float32, len(Constants._fields), Constants)
_TARGET = types.NamedTuple([_BYTES, types.int64, _BYTES, _FLOATS], Target)
_TILE = types.NamedUniTuple(types.int64, len(Tile._fields), Tile)
# Memory of a mapped file is read-only, and starts where the file says; arrays without these two traits fit as well.
_MAPPED = {"readonly": True, "aligned": False}
_SIGNATURES = {
    row_amax: lambda words: [_array(words, 2, **_MAPPED), _array(types.int32, 1)],
    cast_rows: lambda words: [
        _array(words, 2, **_MAPPED), _CODEC, _array(types.float32, 1), _BYTES, types.int64,
    ],
    cast_blocks: lambda words: [
        _array(words, 2, **_MAPPED), _GRID, _CONSTANTS, _CODEC, _CODEC, _FLOATS, _TARGET,
    ],
    decode: lambda words: [
        _array(types.uint8, 2, **_MAPPED), types.int64, _CODEC, _FLOATS, _TILE, _array(types.float32, 1),
        _array(words, 2),
    ],
    energies: lambda words: [_array(words, 2, **_MAPPED), _FLOATS, _array(types.float64, 2)],
}  # fmt: skip


def sources() -> str:
    """A digest of the code of the kernels. numba's cache itself looks at the date and the size of one file alone, and
    a package's files all have one date."""
    files = (Path(__file__), Path(_lanes.__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


@functools.cache
def compiled(kernel: Callable, dtype: np.dtype) -> Callable:
    """The machine code of a kernel for values of a dtype, from numba's cache where there is one that can be written."""
    signature = types.void(*_SIGNATURES[kernel](numba.from_dtype(dtype)))
    settings = {"nogil": True, "error_model": "numpy"}
    try:
        named = FunctionType(kernel.__code__, kernel.__globals__, kernel.__name__)
        named.__qualname__ = f"{kernel.__name__}-{sources()}"  # the name of the file in the cache
        return numba.njit(signature, cache=True, **settings)(named)
    except (RuntimeError, OSError):  # no folder for the cache, or none with free space
        return numba.njit(signature, **settings)(kernel)
