"""Every code, every bfloat16 input and every rounding decision of the five element formats."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microfloat import formats, reference
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.formats import E2M1, E2M3, E3M2, E4M3, E5M2, ELEMENTS, decode, encode, encode_bits
from microfloat.reference import Quantized
from tests.golden_cases import case_id, cases, get, input_array, mismatch

ML_DTYPES = {
    E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E3M2: ml_dtypes.float6_e3m2fn,
    E2M3: ml_dtypes.float6_e2m3fn, E2M1: ml_dtypes.float4_e2m1fn,
}  # fmt: skip
elements = pytest.mark.parametrize("element", ELEMENTS.values(), ids=str)
float32 = st.floats(width=32, allow_nan=False)


def every_bf16():
    return np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)


@elements
def test_every_bf16_input_against_ml_dtypes(element):
    """Features Q16."""
    x = every_bf16().astype(np.float32)
    is_nan = np.isnan(x)
    # ml_dtypes does not saturate everywhere: its nearest-even is the same after a clip (docs/numerics.md 1.5).
    clipped = np.clip(np.where(is_nan, 0, x), -element.max, element.max).astype(np.float32)
    with np.errstate(all="ignore"):
        expected = clipped.astype(ML_DTYPES[element]).view(np.uint8)
    expected = np.where(is_nan, np.uint8(element.nan_code), expected)
    assert np.array_equal(encode(every_bf16(), element), expected)


@elements
def test_every_code_against_ml_dtypes(element):
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    expected = codes.view(ML_DTYPES[element]).astype(np.float32)
    assert np.array_equal(decode(codes, element).view(np.uint32)[~np.isnan(expected)],
                          expected.view(np.uint32)[~np.isnan(expected)])  # fmt: skip
    assert np.array_equal(np.isnan(decode(codes, element)), np.isnan(expected))


@elements
def test_every_finite_code_survives_decode_and_encode(element):
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    codes = codes[np.isfinite(decode(codes, element))]
    assert np.array_equal(encode(decode(codes, element), element), codes)


@elements
def test_every_midpoint_and_its_neighbours(element):
    codes = np.arange(element.max_code + 1)
    values = decode(codes, element).astype(np.float64)
    midpoints = ((values[:-1] + values[1:]) / 2).astype(np.float32)  # exact: one bit more than a code has
    even = np.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    assert np.array_equal(encode(midpoints, element), even)
    assert np.array_equal(encode(np.nextafter(midpoints, np.float32(0)), element), codes[:-1])
    assert np.array_equal(encode(np.nextafter(midpoints, np.float32(np.inf)), element), codes[1:])


@pytest.mark.parametrize("case", cases("cast"), ids=case_id)
def test_golden_casts(case):
    assert mismatch(case, "data", encode(input_array(case), case["element"])) is None


@pytest.mark.parametrize("case", cases("decode"), ids=case_id)
def test_golden_values(case):
    codes = get(case, "data", "inputs")[0]
    if case["element"] == "E8M0":
        ones = np.full((codes.size, 1), 0x38, np.uint8)  # E4M3 code of 1.0
        q = Quantized(ones, codes.reshape(-1, 1), None, formats.MXFP8, 1, (codes.size, 1))
        values = reference.dequantize(q)
    else:
        values = decode(codes, case["element"])
    assert mismatch(case, "value", values) is None


def test_every_e8m0_byte():
    scale = np.arange(256, dtype=np.uint8).reshape(256, 1)
    codes = np.full((256, 1), 0x38, np.uint8)
    values = reference.dequantize(Quantized(codes, scale, None, formats.MXFP8, 1, (256, 1)))[:, 0]
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(values[1:255].view(np.uint32), expected[1:255].view(np.uint32))
    assert int(values[0].view(np.uint32)) == 0x00400000
    assert np.isnan(values[255])


@elements
def test_limits_of_the_table(element):
    table = {
        "E4M3": (8, 8, 0x7E, 0x7F, 2.0**-6, 2.0**-9), "E5M2": (8, 15, 0x7B, 0x7F, 2.0**-14, 2.0**-16),
        "E3M2": (6, 4, 0x1F, 0x1F, 0.25, 2.0**-4), "E2M3": (6, 2, 0x1F, 0x1F, 1.0, 2.0**-3),
        "E2M1": (4, 2, 0x7, 0x7, 1.0, 0.5),
    }  # fmt: skip
    found = (element.bits, element.emax, element.max_code, element.nan_code, element.min_normal, element.step)
    assert found == table[element.name]
    assert decode(np.uint8(element.max_code), element) == element.max


@elements
def test_saturation_zero_and_nan(element):
    top, sign = element.max_code, element.sign_code
    x = np.array([np.inf, -np.inf, 3.4e38, -3.4e38, 0.0, -0.0, np.nan, -np.nan, 1e-45, -1e-45], np.float32)
    expected = [top, top | sign, top, top | sign, 0, sign, element.nan_code, element.nan_code, 0, sign]
    assert encode(x, element).tolist() == expected


def test_float64_beyond_float32_saturates_without_a_warning():
    assert encode([1e300, -1e300], E4M3).tolist() == [0x7E, 0xFE]


@elements
@given(a=float32, b=float32)
def test_encode_is_monotone_and_odd(element, a, b):
    low, high = sorted((a, b))
    values = decode(encode(np.float32([low, high]), element), element)
    assert values[0] <= values[1]
    assert decode(encode(np.float32(-a), element), element) == -decode(encode(np.float32(a), element), element)


@elements
@given(value=float32)
def test_encode_finds_the_nearest_code(element, value):
    table = decode(np.arange(element.max_code + 1), element).astype(np.float64)
    table = np.concatenate([table, -table])
    clipped = float(np.clip(value, -element.max, element.max))
    found = float(decode(encode(np.float32(value), element), element))
    assert abs(found - clipped) == np.abs(table - clipped).min()


@elements
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_stochastic_rounding_has_exactly_the_stated_mean(element, value):
    """Mean over all 256 random bytes = low + step * floor(256 f) / 256, f the fraction of the step above the grid."""
    draws = decode(encode_bits(np.full(256, value, np.float32), element, np.arange(256)), element).astype(np.float64)
    magnitude = min(abs(value), element.max)
    table = decode(np.arange(element.max_code + 1), element).astype(np.float64)
    low = table[table <= magnitude].max()
    step = (table[table > low].min() - low) if low < element.max else 0.0
    ups = int(np.floor(256 * (magnitude - low) / step)) if step else 0
    assert np.abs(draws).mean() == low + step * ups / 256
    assert set(np.abs(draws)) <= {low, low + step}
    assert int((np.abs(draws) > low).sum()) == ups
    # The largest bytes are the ones that round up.
    assert (np.diff(np.abs(draws)) >= 0).all()


@elements
def test_stochastic_rounding_far_below_the_step_gives_zero(element):
    """Shifts of 32 and more must not bring bits back (docs/numerics.md 5.4)."""
    tiny = np.ldexp(np.float32(1.75), np.arange(-149, -40)).astype(np.float32)
    up = encode_bits(np.repeat(tiny, 2), element, np.full(2 * tiny.size, 255))
    assert set(up.tolist()) == {0}


@pytest.mark.parametrize("bad", [["a"], [1 + 2j], [None]])
def test_encode_refuses_what_is_no_number(bad):
    with pytest.raises(InvalidTypeError, match=r"values_f32.*needed float32"):
        encode(bad, E4M3)


def test_decode_refuses_packed_bytes_and_floats():
    with pytest.raises(InvalidValueError, match=r"codes: got a byte up to 0xff, needed unpacked 4-bit codes"):
        decode(np.uint8([0xFF]), E2M1)
    with pytest.raises(InvalidValueError, match="unpack_fp4"):
        decode(np.uint8([0x40]), E2M3)
    with pytest.raises(InvalidTypeError, match=r"codes: got float32"):
        decode(np.float32([1]), E4M3)


def test_shapes_are_kept():
    for shape in ((), (0,), (3,), (2, 0, 4), (2, 3, 5)):
        codes = encode(np.ones(shape, np.float32), E4M3)
        assert codes.shape == shape
        assert decode(codes, "e4m3").shape == shape
