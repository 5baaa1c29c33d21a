"""The compiled loops: amax of rows, the cast of blocks, and decoding. One of each, for every format.

A format enters as numbers: the `Codec` of its element, the `Grid` of its blocks, the `Constants` of its rule. Every
loop over elements is flat and in 32 bits, so that LLVM makes vector code of it. Rows are read in segments of columns
that stay in the first-level cache: widened to float32, reduced to the amaxes of blocks, multiplied and encoded.

Arithmetic is that of docs/numerics.md: float32, one rounding per operation, no contraction (numba's default).
Legend: R = rows of the operand form, C = its contraction length, n = elements of a segment, rounded up to 16.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

GROUP = 16  # columns whose amax is found at once; the length of a block is a multiple of it
# Columns at a time: what a segment needs, about ten bytes for each, fits the first-level cache beside the rows that are
# on their way. Tiles read every row twice, in longer runs. Longer blocks have segments of their own length.
SEGMENT, TILE_SEGMENT = 1024, 4096

FLOAT32, BFLOAT16, FLOAT16 = range(3)
E8M0, RATIO, INVERSE_SIX, DIVIDING, FOUR_OVER_SIX = range(5)

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_FMAX = np.finfo(np.float32).max
_QUIET_NAN, _QUIET_NAN_16 = 0x7FC00000, 0x7FC0

I32, F32, U8 = np.int32, np.float32, np.uint8


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


@intrinsic
def _bits(_typing: Any, _value: Any) -> Any:
    """The 32 bits of a float32."""
    return types.int32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def _float(_typing: Any, _value: Any) -> Any:
    """The float32 of 32 bits."""
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _shifted(_typing: Any, _value: Any, _count: Any) -> Any:
    """A logical shift to the right in 32 bits; Python's >> would take 64."""
    return types.int32(types.int32, types.int32), lambda context, builder, sig, args: builder.lshr(*args)


@intrinsic
def _raised(_typing: Any, _value: Any, _count: Any) -> Any:
    """A shift to the left in 32 bits."""
    return types.int32(types.int32, types.int32), lambda context, builder, sig, args: builder.shl(*args)


_LANES = ir.VectorType(ir.IntType(32), GROUP)


def _lanes_at(context: Any, builder: Any, kind: Any, array: Any, start: Any, lanes: ir.VectorType) -> Any:
    """Pointer to the elements of a one-dimensional array from `start`, as one vector."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), lanes.as_pointer())


def _magnitudes(context: Any, builder: Any, kind: Any, array: Any, start: Any, count: int) -> list[Any]:
    """Bits of the magnitudes of `count` groups of float32 values, a vector each."""
    mask, made = ir.Constant(_LANES, [_MAGNITUDE] * GROUP), []
    for group in range(count):
        first = builder.add(start, ir.Constant(start.type, group * GROUP))
        loaded = builder.load(_lanes_at(context, builder, kind, array, first, _LANES), align=4)
        made.append(builder.and_(loaded, mask))
    return made


@intrinsic
def _group_max(_typing: Any, values: Any, _start: Any) -> Any:
    """The largest magnitude, as bits, of the GROUP float32 values from `start`; NaN lies above infinity."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        (magnitudes,) = _magnitudes(context, builder, sig.args[0], args[0], args[1], 1)
        kind = ir.FunctionType(ir.IntType(32), [_LANES])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.umax.v{GROUP}i32")
        return builder.call(reduce, [magnitudes])

    return types.int32(values, types.int64), generate


@intrinsic
def _every_group_max(_typing: Any, values: Any, _start: Any, maxima: Any, _at: Any) -> Any:
    """Put `_group_max` of GROUP groups, one after the other, into `maxima` from `at`.

    Two vectors become one, that of the larger of neighbouring lanes, until one vector is left: lane i is group i.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vectors = _magnitudes(context, builder, sig.args[0], args[0], args[1], GROUP)
        even, odd = (ir.Constant(_LANES, list(range(first, 2 * GROUP, 2))) for first in (0, 1))
        while len(vectors) > 1:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
            vectors = []
            for a, b in pairs:
                low, high = builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd)
                vectors.append(builder.select(builder.icmp_signed(">", low, high), low, high))
        builder.store(vectors[0], _lanes_at(context, builder, sig.args[2], args[2], args[3], _LANES), align=4)
        return context.get_dummy_value()

    return types.void(values, types.int64, maxima, types.int64), generate


@intrinsic
def _group_fill(_typing: Any, values: Any, _start: Any, _value: Any) -> Any:
    """Set the GROUP float32 values from `start` to `value`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = ir.VectorType(ir.FloatType(), GROUP)
        pointer = _lanes_at(context, builder, sig.args[0], args[0], args[1], lanes)
        one = builder.insert_element(ir.Constant(lanes, ir.Undefined), args[2], ir.Constant(ir.IntType(32), 0))
        every = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), GROUP), [0] * GROUP))
        builder.store(every, pointer, align=4)
        return context.get_dummy_value()

    return types.void(values, types.int64, types.float32), generate


def _inner(function: Callable) -> Callable:
    return numba.njit(error_model="numpy")(function)


# ---- elements ----------------------------------------------------------------------------------------------------


@_inner
def _rounded(y: float, codec: Codec) -> tuple:
    """``(step count + magic, bits of the magic number)`` of |y|: nearest, ties to even, saturated; y is no NaN.

    A float32 of the exponent of y plus `23 - mantissa_bits` has the step of y as its unit, so that adding it rounds.
    """
    magnitude = min(I32(_bits(y) & I32(_MAGNITUDE)), codec.max)
    exponent = max(I32(magnitude & I32(_INFINITY)), codec.min_normal)
    magic = I32(exponent + codec.magic)
    return _float(magnitude) + _float(magic), magic


@_inner
def _code(y: float, codec: Codec) -> int:
    """The code of y."""
    total, magic = _rounded(y, codec)
    count = I32(_bits(total) - magic)
    exponent = I32(I32(magic - codec.magic) - codec.min_normal)
    code = I32(count + _shifted(exponent, codec.shift))
    return I32(code | I32(_shifted(_bits(y), codec.sign_shift) & codec.sign))


@_inner
def _value(y: float, codec: Codec) -> float:
    """The value of the code of y."""
    total, magic = _rounded(y, codec)
    sign = I32(_bits(y) & I32(~_MAGNITUDE))
    return _float(I32(_bits(total - _float(magic)) | sign))


# ---- reading -----------------------------------------------------------------------------------------------------


@_inner
def _widen(x_32: np.ndarray, x_16: np.ndarray, source: int, row: int, start: int, stop: int, out: np.ndarray) -> None:
    """``out = x[row, start:stop]`` as float32, filled with zeros."""
    if source == FLOAT32:
        line_32 = x_32[row, start:stop]
        for j in range(line_32.size):
            out[j] = line_32[j]
    elif source == BFLOAT16:
        line = x_16[row, start:stop]
        for j in range(line.size):
            out[j] = _float(I32(I32(line[j]) << 16))
    else:
        line = x_16[row, start:stop]
        for j in range(line.size):
            half = I32(line[j])
            value = _float(I32(I32(half & 0x7FFF) << 13)) * F32(2.0**112)
            special = _INFINITY if I32(half & 0x7C00) == 0x7C00 else 0
            out[j] = _float(I32(I32(_bits(value) | I32(special)) | I32(I32(half & 0x8000) << 16)))
    for j in range(stop - start, out.size):
        out[j] = F32(0)


@_inner
def _amax_without_nan(values: np.ndarray) -> int:
    amax = I32(0)
    for j in range(values.size):
        bits = I32(_bits(values[j]) & I32(_MAGNITUDE))
        amax = max(amax, bits if bits <= _INFINITY else I32(0))
    return amax


def row_amax(x_32: np.ndarray, x_16: np.ndarray, source: int, columns: int, out: np.ndarray) -> None:
    """Bits of the amax of every row, NaN ignored."""
    scratch = np.empty(SEGMENT, np.float32)
    for row in range(out.size):
        amax = I32(0)
        for start in range(0, columns, SEGMENT):
            stop = min(start + SEGMENT, columns)
            values = scratch[: stop - start]
            _widen(x_32, x_16, source, row, start, stop, values)
            found = I32(0)
            for j in range(values.size):
                found = max(found, I32(_bits(values[j]) & I32(_MAGNITUDE)))
            amax = max(amax, _amax_without_nan(values) if found > _INFINITY else found)
        out[row] = amax


@_inner
def _raise(values: np.ndarray, maxima: np.ndarray) -> None:
    """Raise `maxima` to the magnitudes of `values`, column by column; NaN lies above infinity."""
    for j in range(values.size):
        bits, largest = I32(_bits(values[j]) & I32(_MAGNITUDE)), _bits(maxima[j])
        maxima[j] = _float(max(bits, largest))


@_inner
def _block_amaxes(values: np.ndarray, width: int, maxima: np.ndarray, amaxes: np.ndarray) -> bool:
    """Bits of the amax of every block; the result tells whether there is a NaN, which lies above infinity.

    `maxima` is scratch for the groups. The inner loops run over blocks: their groups are few, often one.
    """
    groups, last, most = width // GROUP, values.size // GROUP, I32(0)
    in_sixteens, whole = last // GROUP * GROUP, last // groups
    for group in range(0, in_sixteens, GROUP):
        _every_group_max(values, group * GROUP, maxima, group)
    for group in range(in_sixteens, last):
        maxima[group] = _group_max(values, group * GROUP)
    amaxes[:] = 0
    for group in range(groups):
        for block in range(whole):
            amaxes[block] = max(amaxes[block], maxima[block * groups + group])
    for group in range(whole * groups, last):
        amaxes[whole] = max(amaxes[whole], maxima[group])
    for block in range(amaxes.size):
        most = max(most, amaxes[block])
    return most > _INFINITY


@_inner
def _spread(factors: np.ndarray, width: int, out: np.ndarray) -> None:
    """One factor per block -> one per element."""
    groups, last = width // GROUP, out.size // GROUP
    whole = last // groups
    for group in range(groups):
        for block in range(whole):
            _group_fill(out, (block * groups + group) * GROUP, factors[block])
    for group in range(whole * groups, last):
        _group_fill(out, group * GROUP, factors[whole])


# ---- scales ------------------------------------------------------------------------------------------------------


@_inner
def _power_scales(amaxes: np.ndarray, grid: Grid, factors: np.ndarray, lost: np.ndarray, stored: np.ndarray) -> bool:
    """E8M0: ``b = clamp(E - emax + (M >= threshold), 0, 254)``, 255 for NaN and Inf; encode by 2^(127 - b).

    The blocks of byte 255 are marked in `lost`; the result tells whether there is one.
    """
    emax, threshold, most = I32(grid.emax), I32(grid.threshold), I32(0)
    for block in range(amaxes.size):
        exponent = _shifted(amaxes[block], I32(23))
        bump = I32(1) if I32(amaxes[block] & I32(0x7FFFFF)) >= threshold else I32(0)
        byte = max(I32(I32(exponent - emax) + bump), I32(0))
        most = max(most, exponent)
        lost[block] = exponent == 255
        stored[block] = U8(255) if exponent == 255 else U8(byte)
        factors[block] = _float(I32(max(I32(254 - byte), I32(1)) << 23))
    return most == 255


@_inner
def _ratio_scales(amaxes: np.ndarray, grid: Grid, rule: Constants, factors: np.ndarray, stored: np.ndarray) -> None:
    """FP32: ``s = max / max(A, max * 2^-126)``, 1 for A = 0 and Inf; stored is 1 / s."""
    mask = I32(~0x7FFFFF) if grid.power_of_two else I32(-1)
    for block in range(amaxes.size):
        amax = max(_float(amaxes[block]), rule.epsilon)
        factor = rule.largest / max(amax, rule.least_amax)
        factor = F32(1) if amax == F32(0) or _bits(amax) == I32(_INFINITY) else factor
        factor = _float(I32(_bits(factor) & mask))
        factors[block] = factor
        stored[block] = F32(1) / factor


@_inner
def _block_level(target: float, encode: float, codec: Codec) -> tuple:
    """The E4M3 scale value of `target`, and ``e = min(1 / (scale * f32(1 / S)), FMAX)``."""
    scale = _value(min(target, F32(_FMAX)), codec)
    return scale, min(F32(1) / (scale * (F32(1) / encode)), F32(_FMAX))


@_inner
def _two_level_scales(
    amaxes: np.ndarray, grid: Grid, rule: Constants, codec: Codec, encode: float, outer: float, k: float,
    scales: np.ndarray, factors: np.ndarray,
) -> None:  # fmt: skip
    """E4M3 under an FP32 tensor scale: the value of every block scale, and the factor of its elements."""
    if grid.rule == DIVIDING:
        for block in range(amaxes.size):
            target = _float(amaxes[block]) / F32(6) / outer
            scale = _value(min(max(target, rule.smallest_scale), rule.largest_scale), codec)
            scales[block] = scale
            factors[block] = F32(1) / outer / scale
    elif grid.rule == INVERSE_SIX:
        multiplier = encode * rule.inverse_six
        for block in range(amaxes.size):
            scales[block], factors[block] = _block_level(_float(amaxes[block]) * multiplier, encode, codec)
    else:
        for block in range(amaxes.size):
            target = min(_float(amaxes[block]) / F32(6) * encode * k, rule.largest_scale)
            scales[block], factors[block] = _block_level(target, encode, codec)


@_inner
def _line_errors(
    values: np.ndarray, width: int, squares: int, capacity: float, element: Codec, amax: float, factors: np.ndarray,
    scales: np.ndarray, scratch: np.ndarray, sums: np.ndarray,
) -> None:  # fmt: skip
    """Sum of |d| or d * d over one row of every block, left to right; factors and scales are those of elements."""
    for j in range(values.size):
        difference = _value(values[j] * factors[j], element) * scales[j] * amax / capacity - values[j]
        magnitude = _float(I32(_bits(difference) & I32(_MAGNITUDE)))
        scratch[j] = difference * difference if squares else magnitude
    for block in range(sums.size):
        total = F32(0)
        for j in range(block * width, min((block + 1) * width, values.size)):
            total = total + scratch[j]
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
def _has_nan(values: np.ndarray) -> bool:
    amax = I32(0)
    for j in range(values.size):
        amax = max(amax, I32(_bits(values[j]) & I32(_MAGNITUDE)))
    return amax > _INFINITY


@_inner
def _write_nan(values: np.ndarray, code: int, out: np.ndarray) -> None:
    """The code of NaN where a value is NaN."""
    for j in range(values.size):
        out[j] = U8(code) if I32(_bits(values[j]) & I32(_MAGNITUDE)) > _INFINITY else out[j]


@_inner
def _store_line(unpacked: np.ndarray, length: int, packed: int, codes: np.ndarray, start: int) -> None:
    """The first codes of a line into the row `codes` from column `start`, two in a byte where they are packed."""
    if packed:
        out, pairs = codes[start // 2 : (start + length + 1) // 2], unpacked.view(np.uint16)
        if length % 2:
            unpacked[length] = 0
        for j in range(out.size):
            out[j] = U8(pairs[j] | pairs[j] >> 4)
    else:
        out = codes[start : start + length]
        for j in range(out.size):
            out[j] = unpacked[j]


def cast_rows(
    x_32: np.ndarray, x_16: np.ndarray, source: int, columns: int, element: Codec, factors: np.ndarray,
    codes: np.ndarray, packed: int,
) -> None:  # fmt: skip
    """Codes of rows with a given encode factor, one for each row or one for all; a NaN is a NaN code alone."""
    line, spread, scratch = np.empty(SEGMENT, np.float32), np.empty(SEGMENT, np.float32), np.zeros(SEGMENT, np.uint8)
    used = min(columns, SEGMENT)
    for row in range(codes.shape[0]):
        if row == 0 or factors.size > 1:
            spread[:used] = factors[row if factors.size > 1 else 0]
        for start in range(0, columns, SEGMENT):
            stop = min(start + SEGMENT, columns)
            values = line[: stop - start]
            _widen(x_32, x_16, source, row, start, stop, values)
            for j in range(values.size):
                scratch[j] = U8(_code(values[j] * spread[j], element))
            if _has_nan(values):
                _write_nan(values, element.nan_code, scratch)
            _store_line(scratch, stop - start, packed, codes[row], start)


@_inner
def _amaxes_without_nan(
    x_32: np.ndarray, x_16: np.ndarray, source: int, rows: range, start: int, stop: int, width: int,
    values: np.ndarray, amaxes: np.ndarray, lost: np.ndarray,
) -> None:  # fmt: skip
    """Mark the blocks that hold a NaN, and take their amaxes again without it."""
    for block in range(amaxes.size):
        lost[block] = amaxes[block] > _INFINITY
        if lost[block]:
            amaxes[block] = 0
    for row in rows:
        _widen(x_32, x_16, source, row, start, stop, values)
        for block in range(amaxes.size):
            if lost[block]:
                part = values[block * width : min((block + 1) * width, values.size)]
                amaxes[block] = max(amaxes[block], _amax_without_nan(part))


@_inner
def _write_lost(values: np.ndarray, width: int, single: bool, code: int, lost: np.ndarray, out: np.ndarray) -> None:
    """NaN codes in the marked blocks: of every element, or with `single` of those that are NaN."""
    for block in range(lost.size):
        if lost[block]:
            first, last = block * width, min((block + 1) * width, values.size)
            if single:
                _write_nan(values[first:last], code, out[first:last])
            else:
                out[first:last] = U8(code)


@_inner
def _store_scales(scales: np.ndarray, codec: Codec, has_lost: bool, lost: np.ndarray, out: np.ndarray) -> None:
    """Bytes of E4M3 scales, NaN for the marked blocks."""
    for block in range(scales.size):
        out[block] = U8(_code(scales[block], codec))
    if has_lost:
        for block in range(scales.size):
            out[block] = U8(codec.nan_code) if lost[block] else out[block]


def cast_blocks(
    x_32: np.ndarray, x_16: np.ndarray, source: int, columns: int, grid: Grid, rule: Constants, element: Codec,
    scale_codec: Codec, levels: np.ndarray, target: Target,
) -> None:  # fmt: skip
    """Codes and stored scales of the blocks of R rows.

    `levels`: (A, S, tensor scale) of the tensor, or of every row.
    """
    width, codes = grid.columns, target.codes
    segment = max((SEGMENT if grid.rows == 1 else TILE_SEGMENT) // width, 1) * width
    most = segment // width
    line, spread, spread_scales = (
        np.empty(segment, np.float32), np.empty(segment, np.float32), np.empty(segment, np.float32),
    )  # fmt: skip
    maxima, unpacked = np.empty(segment, np.float32), np.empty(segment, np.uint8)
    amaxes_of, lost_of = np.empty(most, np.int32), np.empty(most, np.bool_)
    groups = np.empty(segment // GROUP, np.int32)
    factors_of, scales_of = np.empty((2, most), np.float32), np.empty((2, most), np.float32)
    tree = 1
    while tree < grid.rows and grid.rule == FOUR_OVER_SIX:
        tree *= 2
    sums_of = np.empty((2, tree, most), np.float32)
    for band in range(target.scale_bytes.shape[0] + target.scale_floats.shape[0]):
        rows = range(band * grid.rows, min((band + 1) * grid.rows, codes.shape[0]))
        amax, encode, outer = levels[rows.start if levels.shape[0] > 1 else 0]
        for start in range(0, columns, segment):
            stop = min(start + segment, columns)
            padded = -(-(stop - start) // GROUP) * GROUP
            blocks, at = -(-padded // width), start // width
            values, amaxes, lost = line[:padded], amaxes_of[:blocks], lost_of[:blocks]
            factors, scales = factors_of[0, :blocks], scales_of[0, :blocks]
            _widen(x_32, x_16, source, rows.start, start, stop, values)
            if grid.rows == 1:
                has_lost = _block_amaxes(values, width, groups, amaxes)
            else:
                maxima[:padded] = F32(0)
                for row in rows:
                    _widen(x_32, x_16, source, row, start, stop, values)
                    _raise(values, maxima)
                has_lost = _block_amaxes(maxima[:padded], width, groups, amaxes)
            if has_lost and grid.rule != E8M0:
                _amaxes_without_nan(x_32, x_16, source, rows, start, stop, width, values, amaxes, lost)
            if grid.rule == E8M0:
                has_lost = _power_scales(amaxes, grid, factors, lost, target.scale_bytes[band, at : at + blocks])
            elif grid.rule == RATIO:
                _ratio_scales(amaxes, grid, rule, factors, target.scale_floats[band, at : at + blocks])
            else:
                _two_level_scales(amaxes, grid, rule, scale_codec, encode, outer, F32(1), scales, factors)
                if grid.rule == FOUR_OVER_SIX:
                    to_four, of_four = scales_of[1, :blocks], factors_of[1, :blocks]
                    _two_level_scales(amaxes, grid, rule, scale_codec, encode, outer, F32(1.5), to_four, of_four)
                    sums_of[:] = 0
                    for k in range(2):
                        _spread(factors_of[k, :blocks], width, spread[:padded])
                        _spread(scales_of[k, :blocks], width, spread_scales[:padded])
                        for row in rows:
                            _widen(x_32, x_16, source, row, start, stop, values)
                            _line_errors(
                                values, width, grid.squared, rule.capacity, element, amax, spread, spread_scales,
                                maxima, sums_of[k, row - rows.start, :blocks],
                            )  # fmt: skip
                        _added_rows(sums_of[k, :, :blocks])
                    for block in range(blocks):
                        if sums_of[1, 0, block] < sums_of[0, 0, block]:
                            scales[block], factors[block] = to_four[block], of_four[block]
                _store_scales(scales, scale_codec, has_lost, lost, target.scale_bytes[band, at : at + blocks])
            _spread(factors, width, spread[:padded])
            for row in rows:
                if grid.rows > 1:
                    _widen(x_32, x_16, source, row, start, stop, values)
                for j in range(padded):
                    unpacked[j] = U8(_code(values[j] * spread[j], element))
                if has_lost:
                    _write_lost(values[: stop - start], width, grid.rule == RATIO, element.nan_code, lost, unpacked)
                _store_line(unpacked, stop - start, target.packed, codes[row], start)


# ---- decoding ----------------------------------------------------------------------------------------------------


@_inner
def _unpack(line: np.ndarray, start: int, stop: int, bits: int, out: np.ndarray) -> None:
    """Codes [start, stop) of a stored row, one in each byte; `start` is the first code of a byte, and of three."""
    if bits == 4:
        part = line[start // 2 : (stop + 1) // 2]
        pairs = out[: 2 * part.size].view(np.uint16)
        for j in range(part.size):
            pairs[j] = np.uint16((I32(part[j]) & 15) | (I32(part[j]) >> 4 << 8))
    elif bits == 6:
        part = line[start // 4 * 3 : (stop + 3) // 4 * 3]
        for j in range(part.size // 3):
            word = I32(part[3 * j]) | I32(part[3 * j + 1]) << 8 | I32(part[3 * j + 2]) << 16
            for k in range(4):
                out[4 * j + k] = U8(word >> 6 * k & 63)
    else:
        part = line[start:stop]
        for j in range(part.size):
            out[j] = part[j]


@_inner
def _decoded(code: int, codec: Codec) -> float:
    """The value of a code; a subnormal one is the number with its mantissa and the least exponent, less that power."""
    magnitude = I32(code & I32(codec.sign - 1))
    bits = I32(_raised(magnitude, codec.shift) + codec.min_normal)
    normal = I32(bits - I32(1 << 23))
    bits = _bits(_float(bits) - _float(codec.min_normal)) if bits < I32(codec.min_normal + I32(1 << 23)) else normal
    special = I32(_INFINITY) if normal == codec.infinity else I32(_QUIET_NAN)
    bits = special if normal > codec.finite else bits
    return _float(I32(bits | _raised(I32(code & codec.sign), codec.sign_shift)))


@_inner
def _store_bfloat16(values: np.ndarray, out: np.ndarray) -> None:
    """Round float32 to nearest, ties to even; a NaN keeps its sign alone."""
    for j in range(out.size):
        bits = _bits(values[j])
        upper = _shifted(bits, I32(16))
        nearest = _shifted(I32(I32(bits + I32(0x7FFF)) + I32(upper & I32(1))), I32(16))
        is_nan = I32(bits & I32(_MAGNITUDE)) > _INFINITY
        out[j] = np.uint16(I32(I32(upper & I32(0x8000)) | I32(_QUIET_NAN_16)) if is_nan else nearest)


def decode(
    codes: np.ndarray, bits: int, columns: int, element: Codec, scales: np.ndarray, tile: Tile, outers: np.ndarray,
    out_32: np.ndarray, out_16: np.ndarray,
) -> None:  # fmt: skip
    """``dec(code) * scale * outer`` of every element, or ``/ outer``, each product rounded: float32 in `out_32`, or
    rounded once more to bfloat16 in `out_16`. There is one `outer` for all rows, or one for each.
    """
    single, width = scales.shape[1] == 1, tile.columns
    segment = SEGMENT if single else columns if width % GROUP else max(SEGMENT // width, 1) * width
    most = -(-min(segment, columns) // GROUP) * GROUP
    factors, line, unpacked = np.empty(most, np.float32), np.empty(most, np.float32), np.empty(most + 4, np.uint8)
    for row in range(codes.shape[0]):
        grid, outer = scales[row // tile.rows], outers[row if outers.size > 1 else 0]
        for start in range(0, columns, segment):
            stop = min(start + segment, columns)
            if segment < columns or row % tile.rows == 0:
                if single:
                    factors[:] = grid[0]
                elif width % GROUP == 0:
                    _spread(grid[start // width :], width, factors[: -(-(stop - start) // GROUP) * GROUP])
                else:
                    for block in range(grid.size):
                        factors[block * width : min((block + 1) * width, columns)] = grid[block]
            _unpack(codes[row], start, stop, bits, unpacked)
            values = out_32[row, start:stop] if out_32.shape[0] else line[: stop - start]
            for j in range(values.size):
                values[j] = _decoded(I32(unpacked[j]), element) * factors[j]
            if tile.divides:
                for j in range(values.size):
                    values[j] = values[j] / outer
            elif outer != F32(1):
                for j in range(values.size):
                    values[j] = values[j] * outer
            if out_16.shape[0]:
                _store_bfloat16(values, out_16[row, start:stop])


# ---- comparing ---------------------------------------------------------------------------------------------------


@numba.njit(error_model="numpy", fastmath={"reassoc"})  # sums in any order, by vectors
def _energies_of(x: np.ndarray, y: np.ndarray) -> tuple:
    signal, noise = F32(0), F32(0)
    for j in range(x.size):
        is_finite = I32(_bits(x[j]) & I32(_MAGNITUDE)) < _INFINITY
        value, error = x[j] if is_finite else F32(0), y[j] - x[j] if is_finite else F32(0)
        signal += value * value
        noise += error * error
    return signal, noise


def energies(
    x_32: np.ndarray, x_16: np.ndarray, source: int, columns: int, y: np.ndarray, sums: np.ndarray
) -> None:  # fmt: skip
    """Sums of x * x and (y - x) * (y - x) over the finite x of every row; float32 in a segment, then float64."""
    line = np.empty(SEGMENT, np.float32)
    for row in range(y.shape[0]):
        for start in range(0, columns, SEGMENT):
            stop = min(start + SEGMENT, columns)
            values = line[: stop - start]
            _widen(x_32, x_16, source, row, start, stop, values)
            signal, noise = _energies_of(values, y[row, start:stop])
            sums[row, 0] += signal
            sums[row, 1] += noise


# ---- compilation -------------------------------------------------------------------------------------------------


def _array(dtype: Any, dimensions: int, **properties: Any) -> Any:
    return types.Array(dtype, dimensions, "C", **properties)


# Memory of a mapped file is read-only, and starts where the file says; arrays without these two traits fit as well.
_SOURCE = [
    *(_array(dtype, 2, readonly=True, aligned=False) for dtype in (types.float32, types.uint16)), types.int64,
    types.int64,
]  # fmt: skip
_BYTES = _array(types.uint8, 2)
_FLOATS = _array(types.float32, 2)
_CODEC = types.NamedUniTuple(types.int32, len(Codec._fields), Codec)
_GRID = types.NamedUniTuple(types.int64, len(Grid._fields), Grid)
_CONSTANTS = types.NamedUniTuple(types.float32, len(Constants._fields), Constants)
_TARGET = types.NamedTuple([_BYTES, types.int64, _BYTES, _FLOATS], Target)
_SIGNATURES = {
    row_amax: [*_SOURCE, _array(types.int32, 1)],
    cast_rows: [*_SOURCE, _CODEC, _array(types.float32, 1), _BYTES, types.int64],
    cast_blocks: [*_SOURCE, _GRID, _CONSTANTS, _CODEC, _CODEC, _FLOATS, _TARGET],
    decode: [
        _array(types.uint8, 2, readonly=True, aligned=False), types.int64, types.int64, _CODEC, _FLOATS,
        types.NamedUniTuple(types.int64, len(Tile._fields), Tile), _array(types.float32, 1), _FLOATS,
        _array(types.uint16, 2),
    ],
    energies: [*_SOURCE, _FLOATS, _array(types.float64, 2)],
}  # fmt: skip


@functools.cache
def compiled(kernel: Callable) -> Callable:
    """The machine code of a kernel, from numba's cache where there is one that can be written."""
    signature = types.void(*_SIGNATURES[kernel])
    settings = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(signature, cache=True, **settings)(kernel)
    except (RuntimeError, OSError):  # no folder for the cache, or none with free space
        return numba.njit(signature, **settings)(kernel)
