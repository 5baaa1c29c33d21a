"""The rows of numbers: names, shapes of blocks, defaults, and what cannot be built."""

import dataclasses

import numpy as np
import pytest

from microfloat import formats
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.formats import (
    E2M1,
    E4M3,
    ELEMENTS,
    FORMATS,
    SCALE_E4M3,
    SCALE_E8M0,
    SCALE_FP32,
    ElementFormat,
    ScaledFormat,
    get_element,
    get_format,
)
from microfloat.scale_rules import SCALE_RULES, e8m0_threshold, resolve_scale_rule

ROWS = {
    "fp8_tensor": ("E4M3", "FP32", (None, None), None, "amax"),
    "fp8_row": ("E4M3", "FP32", (1, None), None, "amax_pow2"),
    "fp8_1x128": ("E4M3", "FP32", (1, 128), None, "amax_pow2"),
    "fp8_128x128": ("E4M3", "FP32", (128, 128), None, "amax_pow2"),
    "mxfp8": ("E4M3", "E8M0", (1, 32), None, "rceil"),
    "mxfp6_e2m3": ("E2M3", "E8M0", (1, 32), None, "rceil"),
    "mxfp6_e3m2": ("E3M2", "E8M0", (1, 32), None, "rceil"),
    "mxfp4": ("E2M1", "E8M0", (1, 32), None, "even"),
    "nvfp4": ("E2M1", "E4M3", (1, 16), "tensor", "two_level"),
    "nvfp4_row": ("E2M1", "E4M3", (1, 16), "row", "two_level"),
    "nvfp4_2d": ("E2M1", "E4M3", (16, 16), "tensor", "two_level"),
}
ROWS |= {
    f"{name}_e5m2": ("E5M2", *ROWS[name][1:]) for name in ("fp8_tensor", "fp8_row", "fp8_1x128", "fp8_128x128", "mxfp8")
}


def test_stock_formats_are_the_table_of_the_numerics():
    found = {
        fmt.name: (fmt.element.name, fmt.scale.name, fmt.block, fmt.tensor_scale, fmt.default_scale_rule)
        for fmt in FORMATS.values()
    }
    assert found == ROWS


def test_constants_carry_their_lower_case_name():
    for name in formats.__all__:
        value = getattr(formats, name)
        if isinstance(value, ScaledFormat):
            assert value is FORMATS[name.lower()]
        if isinstance(value, ElementFormat):
            assert value is ELEMENTS[name]


def test_properties():
    assert [name for name, fmt in FORMATS.items() if fmt.transposes] == [
        "fp8_tensor", "fp8_tensor_e5m2", "fp8_128x128", "fp8_128x128_e5m2", "nvfp4_2d",
    ]  # fmt: skip
    assert [name for name, fmt in FORMATS.items() if fmt.is_tile] == ["fp8_128x128", "fp8_128x128_e5m2", "nvfp4_2d"]
    texts = {fmt.block_text for fmt in FORMATS.values()}
    assert texts == {"tensor", "row", "1x128", "128x128", "1x32", "1x16", "16x16"}
    assert (SCALE_FP32.dtype, SCALE_E8M0.dtype, SCALE_E4M3.dtype) == (np.float32, np.uint8, np.uint8)


def test_formats_are_values():
    twin = ScaledFormat("mxfp8", E4M3, SCALE_E8M0, (1, 32))
    assert twin == formats.MXFP8
    assert hash(twin) == hash(formats.MXFP8)
    assert ScaledFormat("mxfp8", E4M3, SCALE_E8M0, [1, 32]) == twin
    with pytest.raises(dataclasses.FrozenInstanceError):
        twin.block = (1, 64)


@pytest.mark.parametrize("block", [(1, 64), (32, 32), (8, 4), (2, None), (1, 1)])
def test_blocks_of_a_users_own(block):
    fmt = ScaledFormat("mine", E4M3, SCALE_E8M0, block)
    assert fmt.default_scale_rule == "rceil"
    assert fmt.is_tile == (block[0] > 1)


@pytest.mark.parametrize(
    "block", [(0, 16), (1,), (1, 2, 3), (None, 32), (1, -4), (1.0, 32), (True, 32), 32, "1x32", None]
)
def test_blocks_that_cannot_be(block):
    with pytest.raises(InvalidValueError, match=r"ScaledFormat\.block"):
        ScaledFormat("mine", E4M3, SCALE_E8M0, block)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("m", "E4M3", SCALE_E8M0, (1, 32)), r"element: got str, needed an ElementFormat"),
        (("m", E4M3, "E8M0", (1, 32)), r"scale: got str, needed a ScaleFormat"),
        (("m", E2M1, SCALE_E4M3, (1, 16), "rows"), "tensor_scale: got 'rows', needed one of 'tensor', 'row'"),
        (("m", E4M3, SCALE_E8M0, (1, 32), "tensor"), "Only E4M3 block scales"),
        (("m", E2M1, SCALE_E4M3, (16, 16), "row"), "'row' with a tile of several rows"),
    ],
)
def test_scaled_formats_that_cannot_be(arguments, message):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=message):
        ScaledFormat(*arguments)


@pytest.mark.parametrize("bits", [(1, 1), (5, 3), (0, 3), (3, 0)])
def test_elements_that_cannot_be(bits):
    with pytest.raises(InvalidValueError, match="ElementFormat"):
        ElementFormat("mine", *bits, bias=1, max=1.0, has_inf=False, has_nan=False)


def test_look_up_by_name():
    assert get_element("e4m3") is E4M3
    assert get_element(E4M3) is E4M3
    assert get_format("mxfp4") is formats.MXFP4
    with pytest.raises(InvalidValueError, match=r"got 'mxfp9'.*Did you mean 'mxfp8"):
        get_format("mxfp9")
    with pytest.raises(InvalidValueError, match="Did you mean 'E4M3'"):
        get_element("e4m4")
    with pytest.raises(InvalidTypeError, match="element: got int"):
        get_element(4)


def test_thresholds_of_the_table():
    rows = {
        "E4M3": (0x600000, 0x780000), "E5M2": (0x600000, 0x700000), "E2M3": (0x700000, 0x780000),
        "E3M2": (0x600000, 0x700000), "E2M1": (0x400000, 0x600000),
    }  # fmt: skip
    for name, (rceil, even) in rows.items():
        assert e8m0_threshold(SCALE_RULES["rceil"], ELEMENTS[name]) == rceil + 1
        assert e8m0_threshold(SCALE_RULES["even"], ELEMENTS[name]) == even
        assert e8m0_threshold(SCALE_RULES["ceil"], ELEMENTS[name]) == 1
        assert e8m0_threshold(SCALE_RULES["floor"], ELEMENTS[name]) == 1 << 23
    assert e8m0_threshold(SCALE_RULES["oas"], E4M3) == 0x6703BD
    assert e8m0_threshold(SCALE_RULES["oas"], E2M1) == 0x5F9000


def test_constants_of_the_two_level_rules_are_float32():
    for rule in SCALE_RULES.values():
        constants = rule.two_level
        for name in ("capacity", "inverse_max", "smallest_amax", "smallest_scale", "largest_scale"):
            value = getattr(constants, name, None)
            assert value is None or float(np.float32(value)) == value, (rule.name, name)
    bits = {name: int(np.float32(value).view(np.uint32)) for name, value in {
        "c6": SCALE_RULES["two_level"].two_level.inverse_max,
        "F17": SCALE_RULES["two_level_17_16"].two_level.capacity,
        "c6_17": SCALE_RULES["two_level_17_16"].two_level.inverse_max,
    }.items()}  # fmt: skip
    assert bits == {"c6": 0x3E2AAAAB, "F17": 0x451E1E1E, "c6_17": 0x3E355555}
    for name, bound in (("two_level", 448), ("four_over_six_mae_256", 256), ("four_over_six_mse_448", 448)):
        assert SCALE_RULES[name].two_level.smallest_amax == 6 * bound * 2.0**-117
    assert SCALE_RULES["two_level_17_16"].two_level.smallest_amax == 2688 * 2.0**-117


def test_rules_are_of_a_family():
    assert resolve_scale_rule("four_over_six", formats.NVFP4) == "four_over_six_mae_256"
    for fmt in FORMATS.values():
        for rule in SCALE_RULES.values():
            fits = rule.scale == fmt.scale and (
                isinstance(rule.thresholds, str | None) or fmt.element.name in rule.thresholds
            )
            if fits:
                assert resolve_scale_rule(rule.name, fmt) == rule.name
            else:
                with pytest.raises(InvalidValueError, match="scale_rule"):
                    resolve_scale_rule(rule.name, fmt)


@pytest.mark.parametrize("name", ["rciel", 3, ["floor"], ""])
def test_unknown_rules(name):
    """Features R18."""
    with pytest.raises((InvalidValueError, InvalidTypeError), match="scale_rule: got"):
        resolve_scale_rule(name, formats.MXFP8)
    if name == "rciel":
        with pytest.raises(InvalidValueError, match="Did you mean 'rceil'"):
            resolve_scale_rule(name, formats.MXFP8)
