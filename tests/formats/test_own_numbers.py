"""Elements and scales of a user's own: any numbers make a format that is exact, or an error with a call that does."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from microfloat import formats, reference
from microfloat.errors import InvalidValueError
from microfloat.formats import SCALE_E8M0, ElementFormat, ScaledFormat, ScaleFormat, decode, encode
from microfloat.recipes import Cast
from microfloat.scale_rules import SCALE_RULES, TwoLevel
from tests.formats.elements import E3M0, E5M0, INT4, INT8, UE3M2, UE5M3

WORDS = ("name", "exponent_bits", "mantissa_bits", "bias", "max", "has_inf", "has_nan")


def by_search(values, element):
    """The nearest code among all, ties to the even one; without mantissa bits, whose significands are all odd, up."""
    grid = decode(np.arange(element.max_code + 1), element).astype(np.float64)
    size = np.abs(values.astype(np.float64))
    above = np.minimum(np.searchsorted(grid, size), element.max_code)
    below = np.maximum(above - 1, 0)
    low, high = size - grid[below], grid[above] - size
    to_even = (above % 2 == 0) if element.mantissa_bits else below > 0
    code = np.where((high < low) | ((high == low) & to_even) | (size > grid[-1]), above, below)
    return code | np.where(np.signbit(values), element.sign_code, 0)


def near_and_between(element):
    """Every value and every middle of two, with the float32 numbers beside them, of both signs; and random ones."""
    grid = decode(np.arange(element.max_code + 1), element).astype(np.float64)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, grid[-1:] * 1.5]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    random = np.exp2(np.random.default_rng(0).uniform(np.log2(element.step) - 2, np.log2(element.max) + 1, 64))
    points = np.concatenate([points, random.astype(np.float32), np.float32([np.inf])])
    return np.concatenate([points, -points])


def assert_exact(element):
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    finite = codes[np.isfinite(decode(codes, element))]
    np.testing.assert_array_equal(encode(decode(finite, element), element), finite)
    values = near_and_between(element)
    np.testing.assert_array_equal(encode(values, element), by_search(values, element))


numbers = st.tuples(
    st.integers(-1, 8), st.integers(-1, 8), st.integers(-70, 70), st.booleans(), st.booleans(),
    st.one_of(
        st.tuples(st.integers(0, 127), st.integers(-3, 3)),  # a whole number of quarters of a power of two
        st.floats(allow_nan=False, width=32),
    ),
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@example((1, 6, 0, False, False, 7.9375))
@example((3, 0, 3, True, True, 8.0))
@example((4, 3, 7, True, False, 1e30))
@given(numbers)
def test_any_numbers_make_an_exact_element_or_an_error_with_a_call_that_does(arguments):
    exponent, mantissa, bias, has_inf, has_nan, largest = arguments
    if isinstance(largest, tuple):
        largest = (1 + largest[0] / 128) * 2.0 ** (min((1 << min(max(exponent, 1), 6)) - 1 - bias + largest[1], 100))
    try:
        element = ElementFormat("mine", exponent, mantissa, bias, largest, has_inf, has_nan)
    except InvalidValueError as error:
        call = str(error).partition("Accepted: ")[2].rstrip(".")
        element = eval(call, {"ElementFormat": ElementFormat})
        assert element.name == "mine"
        assert element.mantissa_bits == mantissa or not 0 <= mantissa <= 6 or not 4 <= 1 + exponent + mantissa <= 8
    assert_exact(element)


@pytest.mark.parametrize("element", [INT4, INT8, E3M0], ids=str)
def test_integers_and_powers_of_two_are_elements(element):
    assert_exact(element)
    grid = decode(np.arange(element.sign_code), element)
    expected = np.arange(element.sign_code) if element is not E3M0 else [0, 0.25, 0.5, 1, 2, 4, 8, 16]
    np.testing.assert_array_equal(grid, expected)
    assert formats.get_element(element.name.lower()) == element


def test_int8_is_mxint8_but_for_the_code_of_minus_two():
    """OCP's element is n / 64, n in two's complement: the same products, under a scale that is 64 times as large."""
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    q = reference.quantize(x, Cast(ScaledFormat("mine", INT8, SCALE_E8M0, (1, 32)), "floor"))
    blocks = x.reshape(8, 2, 32)
    scale = np.exp2(np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))))
    ocp = np.clip(np.rint(blocks / scale * 64), -127, 127) / 64 * scale
    np.testing.assert_array_equal(reference.dequantize(q), ocp.reshape(8, 64).astype(np.float32))
    np.testing.assert_array_equal(np.exp2(q.scale.astype(np.float64) - 127) * 64, scale[..., 0])


@pytest.mark.parametrize(
    "scale", [UE5M3, UE3M2, ScaleFormat("UE6M2", exponent_bits=6, mantissa_bits=2, bias=40)], ids=str
)
def test_scales_with_a_mantissa_are_exact(scale):
    values = scale.values(np.arange(scale.nan_code + 1)).astype(np.float64)
    step = 2.0 ** (1 - scale.bias - scale.mantissa_bits)
    assert values[:2].tolist() == [0, step]
    assert np.isnan(values[-1])
    assert (np.diff(values[:-1]) > 0).all()
    assert scale.element.max == values[-2]
    grid = values[:-1].astype(np.float32)
    np.testing.assert_array_equal(encode(grid, scale.element), np.arange(scale.nan_code))
    middles = ((values[1:-1] + values[:-2]) / 2).astype(np.float32)
    even = np.arange(scale.nan_code - 1)
    np.testing.assert_array_equal(encode(middles, scale.element), even + even % 2)


def test_scales_without_a_mantissa_are_powers_of_two():
    np.testing.assert_array_equal(E5M0.values(np.arange(31)), np.exp2(np.arange(31.0) - 15))
    assert np.isnan(E5M0.values(np.arange(31, 256))).all()
    np.testing.assert_array_equal(SCALE_E8M0.values(np.arange(255)), np.exp2(np.arange(255.0) - 127))
    x = np.float32([[1e-30, 1e30, 3.0, np.nan]])
    q = reference.quantize(x, ScaledFormat("mine", INT4, E5M0, (1, 1)))
    assert q.scale.tolist() == [[0, 30, 14, 31]]  # the smallest, the largest, 2^-1 and NaN


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("UE5M3",), "needed the numbers of a format of your own.* Accepted: ScaleFormat"),
        (("E8M0", 8, 8, 0, 120), "got 'E8M0' for other numbers.*needed a name of its own"),
        (("mine", 8, 8, 1, 127), "3 to 8 in all"),
        (("mine", 8, 7, 1, 63), "exponent_bits: got 7, needed 6 or less with mantissa bits"),
        (("mine", 4, 5, 3, 15), r"bits: got 4, needed an int in \[8, 8\]"),
        (("mine", 8, 5, 3, 60), r"bias: got 60, needed an int in \[-28, 31\]"),
    ],
)
def test_scales_that_cannot_be(arguments, message):
    with pytest.raises(InvalidValueError, match=message):
        ScaleFormat(*arguments)


def test_names_say_formats():
    fmt = formats.get_format("e2m1:ue5m3:1x16:tensor")
    assert (fmt.element, fmt.scale, fmt.block, fmt.tensor_scale) == (formats.E2M1, UE5M3, (1, 16), "tensor")
    assert Cast("e3m0:e5m0:row").format.block == (1, None)
    assert Cast("int8:fp32:tensor").scale_rule == "amax"
    assert formats.get_scale("ue4m3") == formats.SCALE_E4M3
    for name, message in {
        "int4": "The parts of a format are ELEMENT:SCALE:BLOCK",
        "int4:ue5m3": "The parts of a format are ELEMENT:SCALE:BLOCK", "int4:fp32:7": "block: got '7'",
        "int9:fp32:row": "or INT4 to INT8. Did you mean 'INT8'", "e1m2:fp32:row": "EXMY with X from 2 to 6",
        "int4:ue5m9:row": "scale: got 'ue5m9'.*UEXMY with X from 2 to 7", "int4:bf16:row": "scale: got 'bf16'",
        "int4:fp32:0x4": "block: got",
        "int4:fp32:row:tensor": "needed None for this scale format",
    }.items():  # fmt: skip
        with pytest.raises(InvalidValueError, match=message):
            Cast(name)


def test_numbers_of_the_stock_rules_are_those_of_their_formats():
    for name, headroom in (("two_level", 1.0), ("two_level_17_16", 16 / 17)):
        assert SCALE_RULES[name].two_level == TwoLevel.of(formats.E2M1, formats.SCALE_E4M3, headroom=headroom)
    assert SCALE_RULES["one_level_e4m3"].two_level == SCALE_RULES["one_level"].two_level
