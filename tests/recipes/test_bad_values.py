"""Every field of every public constructor takes what it is for, or refuses by name; nothing fails in Python's words."""

import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest

from microfloat import formats
from microfloat.errors import InvalidTypeError, InvalidValueError, PlacementError
from microfloat.formats import E4M3, MXFP8, SCALE_E8M0, ElementFormat, ScaledFormat, ScaleFormat
from microfloat.recipes import (
    FAMILIES,
    Cast,
    Current,
    CustomRecipe,
    Delayed,
    DelayedScaling,
    Gemm,
    Hadamard,
    MXFP8BlockScaling,
    Placement,
    Recipe,
    ScaleRule,
)
from tests.formats.elements import every_element


class _Strange:
    """Neither compares nor converts."""

    def __eq__(self, other):
        raise RuntimeError("compared")

    __hash__ = None

    def __repr__(self):
        return "strange"


VALUES = [
    None, True, 0, -1, 1, 7, 16, 2.5, 16.0, -0.0, math.nan, math.inf, -math.inf, 10**400, 10**5000, -(10**400), 1e39,
    "", "x", "E4M3", "mxfp8", "mean", "max", b"x", [], [1, 128], (1, 128), (1.0, 128), [[1], [128]], {}, {"a": 1},
    object(), _Strange(), int, max, np.int64(3), np.float32(2.0), np.array([1.0, 2.0]), np.bool_(True), 1j,
    Cast("mxfp8"), MXFP8, E4M3, Gemm("mxfp8", "mxfp8"), MXFP8BlockScaling(), MXFP8BlockScaling,
]  # fmt: skip

BASES = {
    ElementFormat: {"name": "mine", "exponent_bits": 4, "mantissa_bits": 3, "bias": 7, "max": 448.0, "has_inf": False,
                    "has_nan": True},
    ScaleFormat: {"name": "UE5M3", "bits": 8, "exponent_bits": 5, "mantissa_bits": 3, "bias": 15},
    ScaledFormat: {"name": "mine", "element": E4M3, "scale": SCALE_E8M0, "block": (1, 32), "tensor_scale": None},
    Current: {"amax_epsilon": 0.0},
    Delayed: {"margin": 0, "amax_history_len": 4, "amax_compute_algo": "max", "reduce_amax": True},
    Hadamard: {"size": 16, "sign_mask": 3},
    Cast: {"format": MXFP8, "scale_rule": None, "rounding": "nearest", "hadamard": None, "scaling": Current()},
    Gemm: {"lhs": "mxfp8", "rhs": "mxfp8", "accumulate": "fast", "path": "auto"},
    Recipe: {name: Gemm(None, None) for name in ("fprop", "dgrad", "wgrad")},
    CustomRecipe: {name: Gemm(None, None) for name in ("fprop", "dgrad", "wgrad")},
    Placement: {"rules": [("*", None)]},
    **{family: family().arguments() for family in FAMILIES},
}  # fmt: skip


def _is_a_value(made):
    """It survives copies and pickles, hashes, prints and, a recipe, is written and read."""
    for again in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
        assert again == made
        assert hash(again) == hash(made)
    assert repr(made)
    assert str(made)
    if isinstance(made, Recipe) and not callable(getattr(made, "amax_compute_algo", None)):
        written = json.dumps(made.to_dict(), allow_nan=False)
        assert repr(Recipe.from_dict(json.loads(written))) == repr(made)


def _made(make, arguments):
    try:
        return make(**arguments), ""
    except (InvalidValueError, InvalidTypeError, PlacementError) as error:
        return None, str(error)


@pytest.mark.parametrize("make", BASES, ids=lambda make: make.__name__)
def test_every_field_takes_what_it_is_for_or_refuses_by_name(make):
    base = BASES[make]
    _is_a_value(make(**base))
    taken = refused = 0
    for field in base:
        for value in VALUES:
            made, message = _made(make, {**base, field: value})
            if made is None:
                # A pair, or numbers of a format, may not fit each other: then the error speaks of all of them.
                together = (Gemm, ElementFormat, ScaleFormat)
                assert field in message.partition(": got")[0] or make in together, (field, message)
                assert len(message) < 900
                refused += 1
            else:
                _is_a_value(made)
                taken += 1
    assert refused > taken


@pytest.mark.slow_cases("the recipe that holds all others", cases=("CustomRecipe",))
@pytest.mark.parametrize("make", [*FAMILIES, CustomRecipe], ids=lambda make: make.__name__)
def test_dictionaries_are_read_or_refused_by_name(make):
    """Each entry of a written recipe, at every depth, replaced by every value, taken away and joined by another."""

    def ours(data):
        try:
            Recipe.from_dict(data)
        except (InvalidValueError, InvalidTypeError):
            return True
        return False

    cast = Cast("fp8_tensor", scaling=Delayed(amax_history_len=3))
    own = ScaledFormat("mine", E4M3, SCALE_E8M0, (1, 64))
    recipe = CustomRecipe(Gemm(cast, cast), Gemm(Cast(own), None), Gemm(None, None))
    data = (recipe if make is CustomRecipe else make()).to_dict()
    assert not ours(data)
    paths = list(_paths(data))
    assert len(paths) > (30 if make is CustomRecipe else 2)
    for path in paths:
        for value in VALUES:
            changed = copy.deepcopy(data)
            _parent(changed, path)[path[-1]] = value
            ours(changed)
        for extra in ("unknown", 1):
            changed = copy.deepcopy(data)
            parent = _parent(changed, path)
            if isinstance(parent, dict):
                parent[extra] = 1
                assert ours(changed), (path, extra)
    for value in VALUES:
        assert ours(value)


def _paths(data):
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        yield (key,)
        yield from ((key, *rest) for rest in _paths(value))


def _parent(data, path):
    for key in path[:-1]:
        data = data[key]
    return data


def test_a_missing_entry_of_a_custom_recipe_is_named():
    data = CustomRecipe(*[Gemm("mxfp8", "mxfp8")] * 3).to_dict()
    del data["fields"]["fprop"]["lhs"]["rounding"]
    with pytest.raises(InvalidValueError, match=r"cast: got a dictionary without \['rounding'\]"):
        Recipe.from_dict(data)
    data["fields"]["dgrad"]["acumulate"] = data["fields"]["dgrad"].pop("accumulate")
    with pytest.raises(InvalidValueError, match=r"dgrad: got .* without \['accumulate'\] and with \['acumulate'\]"):
        Recipe.from_dict({**data, "fields": {**data["fields"], "fprop": data["fields"]["wgrad"]}})


def test_replaced_fields_are_checked_again():
    assert dataclasses.replace(Cast("mxfp8"), rounding="stochastic").is_stochastic
    with pytest.raises(InvalidValueError, match="rounding"):
        dataclasses.replace(Cast("mxfp8"), rounding="up")
    with pytest.raises(InvalidValueError, match=r"ElementFormat\.max"):
        dataclasses.replace(E4M3, name="mine", max=449.0)


# --- element formats


def element(exponent_bits, mantissa_bits, bias, largest, has_inf=False, has_nan=False, name="mine"):
    return ElementFormat(name, exponent_bits, mantissa_bits, bias, largest, has_inf, has_nan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # A hint is a call that is accepted: with the bias that keeps the value, else with the nearest value.
        (
            (4, 3, 7, 449.0, False, True),
            r"max: got 449, .* Accepted: ElementFormat\('mine', 4, 3, bias=7, max=448\.0, ",
        ),
        ((4, 3, 7, 1e9, False, True), r"max: got 1e\+09.* bias=7, max=448\.0, has_inf=False, has_nan=True\)\.$"),
        (
            (1, 6, 0, 7.9375, False, False),
            r"got 7\.9375.* Accepted: ElementFormat\('mine', 1, 6, bias=-1, max=7\.9375, ",
        ),
        ((2, 1, 4, 6.0, False, False), r"got 6, .* Accepted: ElementFormat\('mine', 2, 1, bias=1, max=6\.0, "),
        ((1, 2, 3, 30.0, False, False), r"got 30, .* Accepted: ElementFormat\('mine', 1, 2, bias=-1, max=7\.0, "),
        ((4, 3, 7, 0.0, False, True), r"ElementFormat\.max: got 0\.0, needed the largest finite value"),
        ((4, 3, 7, -448.0, False, True), r"ElementFormat\.max: got -448"),
        ((4, 3, 7, math.nan, False, True), r"ElementFormat\.max: got nan"),
        ((4, 3, 7, math.inf, False, True), r"ElementFormat\.max: got inf"),
        ((4, 3, 10**6, 448.0, False, True), r"ElementFormat\.bias: got 1000000"),
        ((4, 3, 40, 448.0, False, True), r"ElementFormat\.max: got 448"),
        ((4, 3, 59, 4.0, False, True), r"ElementFormat\.bias: got 59.*smallest value is at least 2\^-60"),
        ((4, 3, -80, 2.0**80, False, True), r"ElementFormat\.bias: got -80, needed an int in \[-60, 60\]"),
        ((4, 3, -50, 2.0**62, False, True), r"ElementFormat\.max: got 4\.6\d*e\+18, needed .* in \[4, 2\^60\]"),
        ((4, 3, 7, 480.0, False, True), "with 0 codes above it, has_inf=False, has_nan=True"),
        ((4, 3, 7, 448.0), "with 1 codes above it, has_inf=False, has_nan=False.* bias=7, max=480"),
        ((5, 2, 15, 57344.0, True), "has_inf=True, has_nan=False"),
        ((5, 2, 15, 49152.0, True, True), "with 5 codes above it"),
        ((2, 1, 3, 1.5), r"ElementFormat\.max: got 1\.5, needed .* in \[4, 2\^60\]"),
        ((1, 3, -2, 7.0), r"ElementFormat\.max: got 7, needed a normal value of E1M3 with bias -2"),
    ],
)
def test_numbers_of_an_element_that_do_not_fit_each_other(arguments, message):
    with pytest.raises(InvalidValueError, match=message):
        element(*arguments)


def test_a_stock_name_stands_for_the_stock_numbers():
    assert element(4, 3, 7, 448, False, True, "E4M3") == E4M3
    with pytest.raises(InvalidValueError, match=r"ElementFormat\.name: got 'E4M3' for other numbers"):
        element(4, 3, 8, 240.0, False, False, "E4M3")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"thresholds": 1.5}, "thresholds"), ({"thresholds": [3]}, "thresholds"), ({"thresholds": True}, "thresholds"),
        ({"power_of_two": "yes"}, "power_of_two"), ({"power_of_two": 1}, "power_of_two"),
    ],
)  # fmt: skip
def test_numbers_of_a_scale_rule_of_a_wrong_type(options, field):
    with pytest.raises(InvalidTypeError, match=rf"ScaleRule\.{field}: got"):
        ScaleRule("mine", SCALE_E8M0, **options)


def test_every_element_that_can_be_built_encodes_and_decodes():
    count = 0
    for fmt in every_element():
        codes = np.arange(1 << fmt.bits, dtype=np.uint8)
        values = formats.decode(codes, fmt)
        finite = np.isfinite(values)
        magnitudes = codes & (fmt.sign_code - 1)
        assert (finite == (magnitudes <= fmt.max_code)).all(), fmt
        assert values[fmt.max_code] == fmt.max == values[finite].max()
        assert np.isinf(values).sum() == 2 * fmt.has_inf
        assert (formats.encode(values[finite], fmt) == codes[finite]).all(), fmt
        assert (np.diff(values[: fmt.max_code + 1]) > 0).all()
        wild = np.float32([3e38, -3e38, np.inf, 0.0, 1e-45])
        assert (formats.encode(wild, fmt) == [fmt.max_code, fmt.max_code | fmt.sign_code, fmt.max_code, 0, 0]).all()
        decoded = formats.decode(formats.encode(np.float32([np.nan]), fmt), fmt)[0]
        assert np.isnan(decoded) if fmt.has_nan else decoded == fmt.max
        count += 1
    assert count > 100


def test_histories_have_an_end():
    with pytest.raises(InvalidValueError, match="amax_history_len: got 2000000, needed an int in"):
        DelayedScaling(amax_history_len=2_000_000)
