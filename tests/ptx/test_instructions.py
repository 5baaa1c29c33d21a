"""The model of PTX instructions against tables, NumPy, and values of the manual."""

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.ptx import instructions
from tests.ptx.instructions import COMPUTE, NARROW

ALL_16 = np.arange(1 << 16, dtype=np.uint16)
# Two halves each: zeros, subnormals, one, the largest finite, Inf, quiet and signalling NaN, of both signs.
F16 = [0x0000, 0x0001, 0x03FF, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00]
BF16 = [0x0000, 0x0001, 0x007F, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0]


@pytest.fixture(autouse=True)
def _no_remarks_of_numpy():
    """NumPy remarks on signalling NaN and on overflows, which are among the inputs on purpose."""
    with np.errstate(all="ignore"):
        yield


def compute(name, *operands):
    """An instruction on integers, or arrays, as a list of integers or as one."""
    _width, widths, function = COMPUTE[name]
    given = [
        np.atleast_1d(np.asarray(v, dtype=instructions.UNSIGNED[w])) for v, w in zip(operands, widths, strict=True)
    ]
    result = function(*given)
    return int(result[0]) if all(np.ndim(v) == 0 for v in operands) else result


def word(upper, lower):
    return (upper << 16) | lower


def float_bits(value):
    return int(np.float32(value).view(np.uint32))


def many_floats():
    """float32 around every boundary of narrower formats, and random ones."""
    rng = np.random.default_rng(0)
    steps = ALL_16.view(ml_dtypes.bfloat16).astype(np.float32).view(np.uint32)
    near = np.concatenate([steps, steps + 1, steps - 1, steps ^ 0x8000, (steps ^ 0x8000) + 1, (steps ^ 0x8000) - 1])
    fine = ALL_16.view(np.float16).astype(np.float32).view(np.uint32)
    between = np.concatenate([fine + 0x1000, fine + 0x0FFF, fine + 0x1001, fine])  # halfway to the next float16
    return np.concatenate([near, between, rng.integers(0, 1 << 32, 1 << 16)]).astype(np.uint32)


def nearest_codes(kind, values):
    """Codes by looking up the nearest value in the table of all; ties to the even code."""
    table = np.arange(256, dtype=np.uint8).view(NARROW[kind][0]).astype(np.float64)
    positive = table[:128]
    last = int(np.flatnonzero(np.isfinite(positive))[-1])
    middles = (positive[:last] + positive[1 : last + 1]) / 2
    magnitude = np.abs(values.astype(np.float64))
    code = np.searchsorted(middles, magnitude, side="left")  # at a middle: the lower one
    tie = np.isin(magnitude, middles) & (code % 2 == 1)
    code = np.where(tie, code + 1, code) | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, code)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_fp8_is_the_nearest_of_all_values(kind):
    bits = many_floats()
    wanted = nearest_codes(kind, bits.view(np.float32))
    other = np.roll(bits, 1)
    got = compute(f"cvt.rn.satfinite.{kind}x2.f32", bits, other)  # the first goes to the upper byte
    assert np.array_equal(got >> 8, wanted)
    assert np.array_equal(got & 0xFF, np.roll(wanted, 1))
    halves = ALL_16.astype(np.uint32) | (np.roll(ALL_16, 1).astype(np.uint32) << 16)
    wanted = nearest_codes(kind, ALL_16.view(np.float16))
    got = compute(f"cvt.rn.satfinite.{kind}x2.f16x2", halves)
    assert np.array_equal(got & 0xFF, wanted)
    assert np.array_equal(got >> 8, np.roll(wanted, 1))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_fp8_codes_have_exact_values_in_float16(kind):
    got = compute(f"cvt.rn.f16x2.{kind}x2", ALL_16).astype(np.uint32).view(np.uint16).reshape(-1, 2)
    table = np.arange(256, dtype=np.uint8).view(NARROW[kind][0]).astype(np.float64)
    for half, codes in ((0, ALL_16 & 0xFF), (1, ALL_16 >> 8)):
        values = table[codes]
        nan = np.isnan(values)
        assert np.all(got[nan, half] == 0x7FFF)
        assert np.array_equal(got[~nan, half].view(np.float16).astype(np.float64), values[~nan])
        assert np.array_equal(got[~nan, half] >> 15, codes[~nan] >> 7)


def test_16_bit_floats_from_float32():
    bits = many_floats()
    values = bits.view(np.float32)
    nan = np.isnan(values)
    wanted = np.where(nan, 0x7FFF, values.astype(ml_dtypes.bfloat16).view(np.uint16))
    got = compute("cvt.rn.bf16x2.f32", bits, np.roll(bits, 1))
    assert np.array_equal(got >> 16, wanted)
    assert np.array_equal(got & 0xFFFF, np.roll(wanted, 1))
    got = compute("cvt.rz.f16x2.f32", bits, np.roll(bits, 1))
    assert np.array_equal(got & 0xFFFF, np.roll(got >> 16, 1))
    truncated = (got >> 16).astype(np.uint16)
    assert np.all(truncated[nan] == 0x7FFF)
    truncated, exact = truncated[~nan], values[~nan]
    # The magnitude with the sign dropped is the largest float16 not above the exact one.
    magnitudes = ALL_16[:0x7C01].view(np.float16).astype(np.float64)
    wanted = np.searchsorted(magnitudes, np.abs(exact.astype(np.float64)), side="right") - 1
    wanted = np.where(np.isinf(exact), 0x7C00, np.minimum(wanted, 0x7BFF))
    assert np.array_equal(truncated & 0x7FFF, wanted)
    assert np.array_equal(truncated >> 15, np.signbit(exact))


def test_float16_to_float32():
    got = compute("cvt.f32.f16", ALL_16)
    values = ALL_16.view(np.float16).astype(np.float32)
    nan = np.isnan(values)
    assert np.array_equal(got[~nan], values[~nan].view(np.uint32))
    assert np.all(got[nan] == 0x7FFFFFFF)


@pytest.mark.parametrize(("kind", "patterns"), [("f16", F16), ("bf16", BF16)])
@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("nan", ["", ".NaN"])
@pytest.mark.parametrize("of", ["", ".xorsign.abs"])
def test_maxima_and_minima(kind, patterns, name, nan, of):
    """By the manual's definition, one half at a time."""
    every = [*patterns, *(p | 0x8000 for p in patterns)]
    infinity = instructions.INFINITY[kind]

    def order(p):
        return -(p & 0x7FFF) - 1 if p & 0x8000 else p

    def wanted(a, b):
        nans = [(p & 0x7FFF) > infinity for p in (a, b)]
        sign = (a ^ b) & 0x8000
        if of:
            a, b = a & 0x7FFF, b & 0x7FFF
        if all(nans) or (nan and any(nans)):
            return 0x7FFF
        left = [p for p, is_nan in zip((a, b), nans, strict=True) if not is_nan]
        return (max if name == "max" else min)(left, key=order) | (sign if of else 0)

    for a, b in itertools.product(every, every):
        for x, y in ((0x3C00, 0x4000), (a, b), (b, a)):
            got = compute(f"{name}{nan}{of}.{kind}x2", word(x, a), word(y, b))
            assert got == word(wanted(x, y), wanted(a, b)), (hex(x), hex(y), hex(a), hex(b), hex(got))


@pytest.mark.parametrize(("kind", "patterns"), [("f16", F16), ("bf16", BF16)])
def test_absolute_values(kind, patterns):
    for a, b in itertools.product(patterns, patterns):
        wanted = [0x7FFF if p > instructions.INFINITY[kind] else p for p in (a, b)]
        assert compute(f"abs.{kind}x2", word(a | 0x8000, b)) == word(*wanted)


def rounded(exact, bits, smallest):
    """The nearest even float of a fraction, of so many significant bits, above the smallest subnormal; no overflow."""
    unit = Fraction(smallest)
    while abs(exact) >= unit * (1 << bits):
        unit *= 2
    return (-1 if exact < 0 else 1) * round(abs(exact) / unit) * unit  # `round`: ties to even


@pytest.mark.slow("a second dtype of an instruction")
def test_fused_multiply_add_of_bfloat16_rounds_once():
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(0, 1 << 16, 1600).astype(np.uint16) for _ in range(3))
    c[:800] = (a[:800].view(ml_dtypes.bfloat16) * -b[:800].view(ml_dtypes.bfloat16)).view(np.uint16)  # cancellation
    wide = [v.view(ml_dtypes.bfloat16).astype(np.float64) for v in (a, b, c)]
    got = compute("fma.rn.bf16x2", *(v.astype(np.uint32) for v in (a, b, c))).astype(np.uint16)
    checked = 0
    for i, (x, y, z) in enumerate(zip(*wide, strict=True)):
        if not (np.isfinite([x, y, z]).all() and abs(x * y) < 1e37 and abs(z) < 1e37):
            continue
        wanted = rounded(Fraction(x) * Fraction(y) + Fraction(z), 8, 2.0**-133)
        assert float(got[i : i + 1].view(ml_dtypes.bfloat16)[0]) == wanted, i
        checked += 1
    assert checked > 600
    assert compute("fma.rn.bf16x2", 0x80003F80, 0x3F803F80, 0x80008000) == 0x80003F80  # -0 * 1 + -0; 1 + -0
    assert compute("fma.rn.bf16x2", 0x7F80FFC1, 0x00003F80, 0) == 0x7FFF7FFF  # Inf * 0, a NaN
    assert compute("fma.rn.bf16x2", 0x00010001, 0x3F803F00, 0x80008000) == 0x00010000  # subnormals stay; a tie to even
    assert compute("fma.rn.bf16x2", 0x7F7F7F7F, 0x40003F80, 0) == 0x7F807F7F


def test_fused_multiply_add_of_float32_rounds_once():
    rng = np.random.default_rng(2)
    bits = [rng.integers(0, 1 << 32, 1600).astype(np.uint32) for _ in range(3)]
    bits[0][:800], bits[1][:800] = (0x3F800000 | (v[:800] >> 9) for v in bits[:2])
    product = bits[0][:800].view(np.float32) * bits[1][:800].view(np.float32)
    bits[2][:800] = (-product).view(np.uint32)  # what is left is the error of the product
    got, checked = compute("fma.rn.f32", *bits).view(np.float32), 0
    for i, (x, y, z) in enumerate(zip(*(v.view(np.float32).astype(np.float64) for v in bits), strict=True)):
        if np.isfinite([x, y, z]).all() and abs(x * y) < 1e38 and abs(z) < 1e38:
            assert Fraction(float(got[i])) == rounded(Fraction(x) * Fraction(y) + Fraction(z), 24, 2.0**-149), i
            checked += 1
    assert checked > 800
    assert compute("fma.rn.f32", 0x7F800000, 0, 0) == 0x7FFFFFFF


def test_products_toward_zero():
    assert compute("mul.rz.f32", float_bits(1 + 2**-23), float_bits(1 + 2**-23)) == float_bits(1 + 2**-22)
    assert compute("mul.rz.f32", float_bits(1 - 2**-24), float_bits(1 - 2**-24)) == float_bits(1 - 2**-23)
    assert compute("mul.rz.f32", 0x7F7FFFFF, 0x40000000) == 0x7F7FFFFF  # finite stays finite
    assert compute("mul.rz.f32", 0xFF800000, 0x40000000) == 0xFF800000
    assert compute("mul.rz.f32", 0x00000003, 0x3F000000) == 1  # subnormals too
    assert compute("mul.rz.f32", 0x80000001, 0x3F000000) == 0x80000000
    assert compute("mul.rz.f32", 0x7F800000, 0) == 0x7FFFFFFF


def test_arithmetic_of_float16():
    two, half, big = 0x4000, 0x3800, 0x7BFF
    assert compute("mul.rn.f16x2", word(two, 0x0001), word(half, half)) == word(0x3C00, 0)  # a tie to even
    assert compute("mul.rn.f16x2", word(0x0003, big), word(half, two)) == word(0x0002, 0x7C00)
    assert compute("add.rn.f16x2", word(0x6800, 0x7C00), word(0x3C00, 0xFC00)) == word(0x6800, 0x7FFF)  # 2048 + 1
    assert compute("add.rn.f16x2", word(0x6801, 0x8000), word(0x3C00, 0x8000)) == word(0x6802, 0x8000)  # 2050 + 1
    assert compute("sub.rn.f16x2", word(0x3C00, 0), word(0x3C00, 0)) == 0
    assert compute("mul.rn.sat.f16x2", word(two, 0xFE00), word(two, two)) == word(0x3C00, 0)  # at most 1; NaN is 0
    assert compute("mul.rn.sat.f16x2", word(0xC000, half), word(two, half)) == word(0, 0x3400)
    assert compute("set.ne.f16x2.f16x2", word(0, 0x7E00), word(0x8000, 0x7E00)) == 0  # ordered: NaN does not differ
    assert compute("set.ne.f16x2.f16x2", word(0x3C00, 0x7E00), word(0, 0)) == word(0x3C00, 0)
    assert compute("set.ne.u32.f16x2", word(0x3C00, 0), word(0, 0)) == 0xFFFF0000


def test_bytes_and_bits():
    a, b = 0x33221100, 0x77665544
    assert compute("prmt.b32", a, b, 0x3210) == a
    assert compute("prmt.b32", a, b, 0x7654) == b
    assert compute("prmt.b32", a, b, 0x0426) == 0x00442266
    assert compute("prmt.b32", 0x80000000, 0x7F, 0xBC3B) == 0xFF0080FF  # bit 3: the sign of the byte
    for selector in (0x3210, 0x7531, 0x0426, 0xBC3B, 0x5140):
        given = np.array([a, 0x80FF017F], dtype=np.uint32), np.array([b, 0x7F8000FE], dtype=np.uint32)
        by_constant = instructions.permute_by_constant(selector)(*given)
        assert np.array_equal(by_constant, compute("prmt.b32", *given, np.full(2, selector)))
    x, y, z = 0b11110000, 0b11001100, 0b10101010
    for table in range(256):  # the table is the function's value for these three
        assert compute("lop3.b32", x, y, z, table) & 0xFF == table
    assert compute("shl.b32", 0xFFFFFFFF, 31) == 0x80000000
    assert (compute("shl.b32", 1, 32), compute("shl.b32", 1, 40), compute("shr.u32", 1 << 31, 32)) == (0, 0, 0)
    assert compute("shr.u32", 0x80000000, 31) == 1
    assert compute("mad.lo.u32", 0xFFFFFFFF, 2, 3) == 1
    assert compute("add.u32", 0xFFFFFFFF, 2) == 1
    assert compute("mul.wide.u32", 0xFFFFFFFF, 0xFFFFFFFF) == 0xFFFFFFFE00000001
    assert compute("setp.gt.and.s32", 1, 0xFFFFFFFF, True) == 1
    assert compute("setp.lt.u32", 1, 0xFFFFFFFF) == 1
    assert compute("setp.gt.and.s64", 1, 0, False) == 0


def test_reciprocals():
    assert compute("rcp.rn.f32", 0) == 0x7F800000
    assert compute("rcp.rn.f32", 0x80000000) == 0xFF800000
    assert compute("rcp.rn.f32", 0x7F000000) == 0x00400000  # subnormal
    assert compute("rcp.approx.ftz.f32", 0x7F000000) == 0
    assert compute("rcp.approx.ftz.f32", 1) == 0x7F800000
    assert compute("rcp.approx.ftz.f32", 0x7F800000) == 0
    assert compute("rcp.approx.ftz.f32", 0xFF800001) == 0x7FFFFFFF
    assert compute("ex2.approx.ftz.f32", float_bits(-149)) == 0
    assert compute("ex2.approx.ftz.f32", float_bits(3)) == float_bits(8)
