"""Results of the kernels' PTX instructions, on NumPy arrays of register contents (PTX ISA 9.7).

A register of 16, 32 or 64 bits is an array of uint16, uint32 or uint64, one entry per thread; a predicate is an array
of bool. `COMPUTE` maps the name of an instruction to (width of its result, widths of its operands, function). Names are
whole, modifiers included: what is not here is not known, and never guessed.

NaN that an instruction makes, or hands on in arithmetic, is the canonical one: all bits but the sign.
"""

import functools

import ml_dtypes
import numpy as np

UNSIGNED = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {32: np.int32, 64: np.int64}
NAN_16, NAN_32 = np.uint16(0x7FFF), np.uint32(0x7FFFFFFF)
INFINITY = {"f16": 0x7C00, "bf16": 0x7F80}

# Units in the last place between `rcp.approx` and the correctly rounded reciprocal, where the manual allows it: results
# may be off by one unit, so that either neighbour of the exact reciprocal may be the result.
RECIPROCAL_ERROR = 0


# ------------------------------------------------------------------------------------------------------ floats, bits


def floats(bits):
    """uint32 as float32."""
    return bits.view(np.float32)


def bits_of(values):
    """float32 as uint32, every NaN the canonical one."""
    nan = np.isnan(values)
    bits = values.view(np.uint32)
    return np.where(nan, NAN_32, bits) if nan.any() else bits


def toward_zero(nearest, exact):
    """A value that was rounded to the nearest, rounded toward zero instead."""
    away = np.abs(nearest) > np.abs(exact)
    return np.where(away, np.nextafter(nearest, nearest.dtype.type(0)), nearest) if away.any() else nearest


def fused(x, y, z):
    """x * y + z of float32 or narrower in float64, rounded to odd, so that rounding it once more is rounding once."""
    x, y, z = (v.astype(np.float64) for v in (x, y, z))
    product = x * y  # exact
    total = product + z
    back = total - product
    error = (product - (total - back)) + (z - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & ((bits & 1) == 0)
    grows = (error > 0) == (total > 0)
    return np.where(inexact, bits + np.where(grows, 1, -1), bits).view(np.float64)


def widened(halves):
    """bfloat16 bits as float32."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values):
    """float32 to bfloat16 bits, to nearest even."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), NAN_16, rounded.astype(np.uint16))


def odd_to_bf16(values):
    """float64 that was rounded to odd, to bfloat16 bits, to nearest even."""
    short = toward_zero(values.astype(np.float32), values)  # by the rest once more to odd
    bits = short.view(np.uint32) | (short != values)
    return to_bf16(np.where(np.isfinite(values), bits, short.view(np.uint32)).view(np.float32))


def of_halves(halves):
    """float16 as bits, every NaN the canonical one."""
    nan = np.isnan(halves)
    bits = halves.view(np.uint16)
    return np.where(nan, NAN_16, bits) if nan.any() else bits


def halfwise(function):
    """A function of 16-bit arrays as one of words."""

    @functools.wraps(function)
    def on_words(*words):
        return np.ascontiguousarray(function(*(np.ascontiguousarray(w).view(np.uint16) for w in words))).view(np.uint32)

    return on_words


def words_of(upper, lower):
    """Two 16-bit arrays as words."""
    return (upper.astype(np.uint32) << np.uint32(16)) | lower


# ------------------------------------------------------------------------------------------------- bits and integers


def permute(a, b, selector):
    """`prmt`: four of the eight bytes of (a, b); bit 3 of a nibble asks for the sign of its byte, eight times."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(both)
    selector = selector.astype(np.uint64)
    for i in range(4):
        nibble = (selector >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> ((nibble & np.uint64(7)) << np.uint64(3))) & np.uint64(0xFF)
        signs = np.where(byte >> np.uint64(7), np.uint64(0xFF), np.uint64(0))
        result |= np.where(nibble & np.uint64(8), signs, byte) << np.uint64(8 * i)
    return result.astype(np.uint32)


def permute_by_constant(selector):
    """The same where the selector is known."""
    nibbles = [(selector >> (4 * i)) & 15 for i in range(4)]

    def permute_bytes(a, b):
        sources = [np.ascontiguousarray(word).view(np.uint8).reshape(-1, 4) for word in (a, b)]
        out = np.empty((len(a), 4), dtype=np.uint8)
        for i, nibble in enumerate(nibbles):
            byte = sources[(nibble >> 2) & 1][:, nibble & 3]
            out[:, i] = np.where(byte & 0x80, 0xFF, 0) if nibble & 8 else byte
        return out.reshape(-1).view(np.uint32)

    return permute_bytes


def choose_logic(a, b, c, table):
    """`lop3`: bit ``4 a + 2 b + c`` of the table, for every bit."""
    table, result = int(table.flat[0]), np.zeros_like(a)
    for index in range(8):
        if (table >> index) & 1:
            result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return result


def shift_left(a, count):
    """`shl.b32`: counts above 32 are 32."""
    wide = a.astype(np.uint64) << np.minimum(count, np.uint32(32)).astype(np.uint64)
    return wide.astype(np.uint32)


def shift_right(a, count):
    """`shr.u32`: counts above 32 are 32."""
    wide = a.astype(np.uint64) >> np.minimum(count, np.uint32(32)).astype(np.uint64)
    return wide.astype(np.uint32)


# ------------------------------------------------------------------------------------------------ magnitudes of halves


def absolute(kind):
    """`abs`; a NaN may be any, here the canonical one."""

    def absolute_halves(a):
        magnitude = a & np.uint16(0x7FFF)
        return np.where(magnitude > INFINITY[kind], NAN_16, magnitude)

    return halfwise(absolute_halves)


def extremum(kind, larger, nan_wins, of_magnitudes):
    """`max` and `min`: -0 is below +0. `.NaN`: a NaN wins, otherwise it loses. `.xorsign.abs`: of magnitudes, with the
    product's sign, unless the result is NaN.
    """
    infinity = np.uint16(INFINITY[kind])

    def extremum_of_halves(a, b):
        sign = (a ^ b) & np.uint16(0x8000)
        nan_a, nan_b = (a & NAN_16) > infinity, (b & NAN_16) > infinity
        if of_magnitudes:
            a, b = a & NAN_16, b & NAN_16
        order_a, order_b = (np.where(v & np.uint16(0x8000), v ^ NAN_16, v).view(np.int16) for v in (a, b))
        result = np.where((order_a > order_b) == larger, a, b)
        if of_magnitudes:
            result, a, b = result | sign, a | sign, b | sign
        if nan_a.any() or nan_b.any():
            result = np.where(nan_a, b, np.where(nan_b, a, result))
            result = np.where((nan_a | nan_b) if nan_wins else (nan_a & nan_b), NAN_16, result)
        return result

    return halfwise(extremum_of_halves)


# ------------------------------------------------------------------------------------------------ arithmetic of halves


def of_f16(function, saturated=False):
    """Arithmetic on halves of float16, rounded to nearest even. `saturated`: to [0, 1], NaN to 0."""

    def on_halves(*halves):
        result = function(*(half.view(np.float16) for half in halves))
        if saturated:
            result = np.where(result > 0, np.minimum(result, np.float16(1)), np.float16(0))
        return of_halves(result)

    return halfwise(on_halves)


def differ_f16(true):
    """`set.ne`: ordered, so that NaN does not differ."""

    def compare(a, b):
        a, b = a.view(np.float16), b.view(np.float16)
        return np.where((a != b) & ~np.isnan(a) & ~np.isnan(b), np.uint16(true), np.uint16(0))

    return halfwise(compare)


@halfwise
def fma_bf16(a, b, c):
    """`fma.rn.bf16x2`."""
    return odd_to_bf16(fused(widened(a), widened(b), widened(c)))


# ------------------------------------------------------------------------------------------------------- conversions

NARROW = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def to_fp8(kind, values):
    """float32 to FP8 codes, to nearest even and at most the largest finite one; NaN is 0x7F."""
    dtype, largest = NARROW[kind]
    codes = np.clip(values, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes).astype(np.uint16)


def pair_to_fp8(kind):
    """`cvt.rn.satfinite.<kind>x2.f32`: the first operand in the upper byte."""
    return lambda a, b: (to_fp8(kind, floats(a)) << np.uint16(8)) | to_fp8(kind, floats(b))


def halves_to_fp8(kind):
    """`cvt.rn.satfinite.<kind>x2.f16x2`."""

    def convert(word):
        codes = to_fp8(kind, np.ascontiguousarray(word).view(np.float16).astype(np.float32)).reshape(-1, 2)
        return codes[:, 0] | (codes[:, 1] << np.uint16(8))

    return convert


def fp8_to_halves(kind):
    """`cvt.rn.f16x2.<kind>x2`: exact."""

    def convert(pair):
        values = np.ascontiguousarray(pair).view(np.uint8).view(NARROW[kind][0]).astype(np.float32)
        return of_halves(values.astype(np.float16)).view(np.uint32)

    return convert


def to_f16_toward_zero(bits):
    """float32 to float16, toward zero: what is finite stays so."""
    values = floats(bits)
    return of_halves(toward_zero(values.astype(np.float16), values))


# -------------------------------------------------------------------------------------------------------- float32


def flushed(bits):
    """`.ftz`: subnormals are zeros of their sign."""
    return np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000))


def multiply_toward_zero(a, b):
    """`mul.rz.f32`."""
    exact = floats(a).astype(np.float64) * floats(b).astype(np.float64)
    return bits_of(toward_zero(exact.astype(np.float32), exact))


def reciprocal_nearly(a):
    """`rcp.approx.ftz.f32`, `RECIPROCAL_ERROR` units off where it may; 0, Inf and NaN are exact."""
    x = floats(flushed(a))
    nearest = np.float32(1) / x
    bits = bits_of(nearest)
    if RECIPROCAL_ERROR:
        moved = (bits.view(np.int32) + np.int32(RECIPROCAL_ERROR)).view(np.float32)
        error = np.abs(moved.astype(np.float64) - 1.0 / x.astype(np.float64))
        bits = np.where(error <= np.spacing(np.abs(nearest)), moved.view(np.uint32), bits)  # not where that is NaN
    return flushed(bits)


def power_of_two_nearly(a):
    """`ex2.approx.ftz.f32`."""
    return flushed(bits_of(np.exp2(floats(flushed(a)).astype(np.float64)).astype(np.float32)))


# ------------------------------------------------------------------------------------------------------------ table


def _halves():
    """Instructions on two halves."""
    table = {}
    for kind in ("f16", "bf16"):
        table[f"abs.{kind}x2"] = (32, (32,), absolute(kind))
        for name in ("max", "min"):
            for nan in ("", ".NaN"):
                for of in ("", ".xorsign.abs"):
                    function = extremum(kind, name == "max", bool(nan), bool(of))
                    table[f"{name}{nan}{of}.{kind}x2"] = (32, (32, 32), function)
    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        table[f"{name}.rn.f16x2"] = (32, (32, 32), of_f16(function))
        table[f"{name}.rn.sat.f16x2"] = (32, (32, 32), of_f16(function, saturated=True))
    table["set.ne.f16x2.f16x2"] = (32, (32, 32), differ_f16(0x3C00))
    table["set.ne.u32.f16x2"] = (32, (32, 32), differ_f16(0xFFFF))
    table["fma.rn.bf16x2"] = (32, (32, 32, 32), fma_bf16)
    return table


def _conversions():
    """Conversions: with two sources the first goes to the upper half."""
    table = {"cvt.f32.f16": (32, (16,), lambda a: bits_of(a.view(np.float16).astype(np.float32)))}
    for kind in NARROW:
        table[f"cvt.rn.satfinite.{kind}x2.f32"] = (16, (32, 32), pair_to_fp8(kind))
        table[f"cvt.rn.satfinite.{kind}x2.f16x2"] = (16, (32,), halves_to_fp8(kind))
        table[f"cvt.rn.f16x2.{kind}x2"] = (32, (16,), fp8_to_halves(kind))
    table["cvt.rn.bf16x2.f32"] = (32, (32, 32), lambda a, b: words_of(to_bf16(floats(a)), to_bf16(floats(b))))
    table["cvt.rz.bf16x2.f32"] = (
        32, (32, 32), lambda a, b: words_of(*((bits_of(floats(v)) >> np.uint32(16)).astype(np.uint16) for v in (a, b))),
    )  # fmt: skip
    table["cvt.rz.f16x2.f32"] = (32, (32, 32), lambda a, b: words_of(to_f16_toward_zero(a), to_f16_toward_zero(b)))
    table["cvt.rn.f16x2.f32"] = (
        32, (32, 32), lambda a, b: words_of(*(of_halves(floats(v).astype(np.float16)) for v in (a, b))),
    )  # fmt: skip
    return table


def _floats():
    """float32; without a modifier results are rounded to nearest even and subnormals are kept."""
    table = {}
    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        for rounding in ("", ".rn"):
            table[f"{name}{rounding}.f32"] = (
                32, (32, 32), lambda a, b, function=function: bits_of(function(floats(a), floats(b))),
            )  # fmt: skip
    table["mul.rz.f32"] = (32, (32, 32), multiply_toward_zero)
    table["fma.rn.f32"] = (
        32, (32, 32, 32), lambda a, b, c: bits_of(fused(floats(a), floats(b), floats(c)).astype(np.float32)),
    )  # fmt: skip
    table["neg.f32"] = (32, (32,), lambda a: a ^ np.uint32(0x80000000))
    table["rcp.rn.f32"] = (32, (32,), lambda a: bits_of(np.float32(1) / floats(a)))
    table["rcp.approx.ftz.f32"] = (32, (32,), reciprocal_nearly)
    table["ex2.approx.ftz.f32"] = (32, (32,), power_of_two_nearly)
    return table


def _integers():
    """Bits and integers; predicates from comparisons, the last operand joined by `and`."""
    table = {}
    for width in (16, 32, 64):
        table[f"mov.b{width}"] = (width, (width,), lambda a: a)
    table["mov.u32"] = (32, (32,), lambda a: a)
    for name, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        table[f"{name}.b32"] = (32, (32, 32), function)
    table["prmt.b32"] = (32, (32, 32, 32), permute)
    table["lop3.b32"] = (32, (32, 32, 32, 32), choose_logic)
    table["shl.b32"] = (32, (32, 32), shift_left)
    table["shr.u32"] = (32, (32, 32), shift_right)
    table["add.u32"] = (32, (32, 32), np.add)
    table["mad.lo.u32"] = (32, (32, 32, 32), lambda a, b, c: a * b + c)
    table["mul.wide.u32"] = (64, (32, 32), lambda a, b: a.astype(np.uint64) * b.astype(np.uint64))
    comparisons = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
        "ge": np.greater_equal}  # fmt: skip
    for name, compare in comparisons.items():
        for kind, width, view in (("s32", 32, np.int32), ("u32", 32, np.uint32), ("s64", 64, np.int64)):
            function = lambda a, b, compare=compare, view=view: compare(a.view(view), b.view(view))  # noqa: E731
            joined = lambda a, b, c, function=function: function(a, b) & c  # noqa: E731
            table[f"setp.{name}.{kind}"] = (1, (width, width), function)
            table[f"setp.{name}.and.{kind}"] = (1, (width, width, 1), joined)
    return table


COMPUTE = {**_halves(), **_conversions(), **_floats(), **_integers()}
