"""The stock recipes: the table of docs/numerics.md, section 6, values, names, dictionaries, toggles."""

import dataclasses
import itertools
import json
import pickle
import re

import pytest

from microfloat import formats, recipes
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.recipes import (
    RECIPES,
    Cast,
    Current,
    CustomRecipe,
    Delayed,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Format,
    Gemm,
    Hadamard,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    WeightOnly,
    from_name,
    get_default_recipe,
)

every_recipe = pytest.mark.parametrize("make", RECIPES.values(), ids=RECIPES)
TOGGLES = {
    "disable_rht": "MICROFLOAT_NVFP4_DISABLE_RHT",
    "disable_stochastic_rounding": "MICROFLOAT_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
    "disable_2d_quantization": "MICROFLOAT_NVFP4_DISABLE_2D_QUANTIZATION",
}


@pytest.fixture(autouse=True)
def _no_toggles(monkeypatch):
    for variable in TOGGLES.values():
        monkeypatch.delenv(variable, raising=False)


def variants():
    """Recipes with arguments other than the defaults, beside the stock ones."""
    yield from (make() for make in RECIPES.values())
    yield DelayedScaling(
        margin=2, fp8_format=Format.E4M3, amax_history_len=16, amax_compute_algo="most_recent", reduce_amax=False
    )
    yield Float8CurrentScaling(Format.E4M3, use_power_2_scales=True, amax_epsilon=1e-6)
    yield Float8RowScaling(use_power_2_scales=False, wgrad="high_precision")
    yield Float8BlockScaling(use_f32_scales=True, x=(128, 128), w=(1, 128), dy=(128, 128))
    yield MXFP8BlockScaling(Format.HYBRID, "floor", "folded")
    yield MXFP6BlockScaling("E2M3", "ceil")
    yield MXFP4BlockScaling("rceil")
    for flags in itertools.product((False, True), repeat=3):
        yield NVFP4BlockScaling(*flags)
    yield MXFP8BlockScaling(Format.HYBRID, enable_2d_quantization=True)
    yield NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True, nvfp4_4over6="all")
    yield NVFP4BlockScaling(nvfp4_4over6="weights")
    for family in recipes.FAMILIES:
        yield from (family(backward=backward) for backward in ("high_precision", "dequantized"))
    tile = formats.ScaledFormat("mine", formats.E4M3, formats.SCALE_E8M0, (32, 32))
    yield CustomRecipe(Gemm("mxfp8", Cast(tile), "fast", "exact"), Gemm("nvfp4", None), Gemm(None, None))
    rotated = Cast("nvfp4", "two_level_17_16", "stochastic", Hadamard(16, 3))
    yield CustomRecipe(
        Gemm("nvfp4_row", Cast("nvfp4_2d", "four_over_six")), Gemm("fp8_row", "fp8_row"), Gemm(rotated, rotated)
    )
    delayed = Cast("fp8_tensor", scaling=Delayed(1, 3))
    yield CustomRecipe(
        Gemm(delayed, delayed), Gemm(Cast("fp8_row", "amax", scaling=Current(0.5)), "fp8_row"), Gemm(None, None)
    )


every_variant = pytest.mark.parametrize("recipe", list(variants()), ids=repr)


# --- the table of section 6

T4, T5 = Cast("fp8_tensor"), Cast("fp8_tensor_e5m2")
D4, D5 = Cast("fp8_tensor", scaling=Delayed()), Cast("fp8_tensor_e5m2", scaling=Delayed())
R4, B1, B2 = Cast("fp8_row", "amax_pow2"), Cast("fp8_1x128", "amax_pow2"), Cast("fp8_128x128", "amax_pow2")
M8, M85, M6, M4 = Cast("mxfp8"), Cast("mxfp8_e5m2"), Cast("mxfp6_e3m2"), Cast("mxfp4", "even")
N1, N2, N1SR = Cast("nvfp4"), Cast("nvfp4_2d"), Cast("nvfp4", rounding="stochastic")
N1RHT, N1RHTSR = Cast("nvfp4", hadamard=Hadamard()), Cast("nvfp4", None, "stochastic", Hadamard())
NROW, N1_46, N2_46 = Cast("nvfp4_row"), Cast("nvfp4", "four_over_six"), Cast("nvfp4_2d", "four_over_six")
T32 = formats.ScaledFormat("mxfp8_2d", formats.E4M3, formats.SCALE_E8M0, (32, 32))
M8_2D, F8, F85 = Cast(T32), Cast("mxfp8", "floor"), Cast("mxfp8_e5m2", "floor")
FAST, SPLIT = ("fast", "split", "split"), ("split", "split", "split")
# recipe, (fprop x, w, dgrad dy, w, wgrad dy, x), accumulate
TABLE = [
    (DelayedScaling(), (D4, D4, D5, D4, D5, D4), FAST),
    (DelayedScaling(fp8_format=Format.E4M3), (D4,) * 6, FAST),
    (Float8CurrentScaling(), (T4, T4, T5, T4, T5, T4), FAST),
    (Float8CurrentScaling(Format.E4M3), (T4,) * 6, FAST),
    (Float8RowScaling(), (R4,) * 6, SPLIT),
    (Float8RowScaling(wgrad="high_precision"), (R4, R4, R4, Cast("fp8_tensor", "amax_pow2"), None, None), SPLIT),
    (Float8BlockScaling(), (B1, B2, B1, B2, B1, B1), SPLIT),
    (MXFP8BlockScaling(), (M8,) * 6, FAST),
    (MXFP8BlockScaling(Format.HYBRID), (M8, M8, M85, M8, M85, M8), FAST),
    (MXFP6BlockScaling(), (M6,) * 6, FAST),
    (MXFP6BlockScaling("E2M3"), (Cast("mxfp6_e2m3"),) * 6, FAST),
    (MXFP4BlockScaling(), (M4,) * 6, FAST),
    (NVFP4BlockScaling(), (N1, N2, N1SR, N2, N1RHTSR, N1RHT), FAST),
    (NVFP4BlockScaling(disable_rht=True), (N1, N2, N1SR, N2, N1SR, N1), FAST),
    (NVFP4BlockScaling(disable_stochastic_rounding=True), (N1, N2, N1, N2, N1RHT, N1RHT), FAST),
    (NVFP4BlockScaling(disable_2d_quantization=True), (N1, N1, N1SR, N1, N1RHTSR, N1RHT), FAST),
    (NVFP4BlockScaling(True, row_scaled_activation=True), (NROW, N2, N1SR, N2, N1SR, NROW), FAST),
    (NVFP4BlockScaling(True, nvfp4_4over6="activations"), (N1_46, N2, N1SR, N2, N1SR, N1_46), FAST),
    (NVFP4BlockScaling(nvfp4_4over6="weights"), (N1, N2_46, N1SR, N2_46, N1RHTSR, N1RHT), FAST),
    (NVFP4BlockScaling(row_scaled_activation=True, backward="dequantized"), (NROW, N2, None, N2, None, NROW), FAST),
    (MXFP8BlockScaling(enable_2d_quantization=True), (M8, M8_2D, M8, M8_2D, M8, M8), FAST),
    (MXFP8BlockScaling("HYBRID", "floor", enable_2d_quantization=True),
     (F8, Cast(T32, "floor"), F85, Cast(T32, "floor"), F85, F8), FAST),
]  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "casts", "accumulate"), TABLE, ids=lambda value: repr(value) if isinstance(value, Recipe) else ""
)
def test_six_operands_of_every_recipe(recipe, casts, accumulate):
    """Features R1 to R6, R8, R9 and R10."""
    assert tuple(recipe.casts.values()) == casts
    assert tuple(getattr(recipe, gemm).accumulate for gemm in recipes.core.GEMMS) == accumulate


def test_rules_of_fields():
    assert Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=0.5).fprop.lhs == Cast(
        "fp8_tensor", "amax_pow2", scaling=Current(0.5)
    )
    assert Float8BlockScaling(use_f32_scales=True).fprop.rhs == Cast("fp8_128x128", "amax")
    blocks = Float8BlockScaling(x=(128, 128), w=(1, 128), dy=(128, 128))
    assert [cast.format.name for cast in blocks.casts.values()] == [
        "fp8_128x128", "fp8_1x128", "fp8_128x128", "fp8_1x128", "fp8_128x128", "fp8_128x128",
    ]  # fmt: skip
    assert MXFP8BlockScaling(path="exact").wgrad.path == "exact"
    folded = NVFP4BlockScaling(path="folded")
    assert [folded.fprop.path, folded.dgrad.path, folded.wgrad.path] == ["folded"] * 3
    with pytest.raises(InvalidValueError, match="path: got 'auto', needed one of 'exact', 'folded'"):
        NVFP4BlockScaling(path="auto")
    for options in ({"row_scaled_activation": True}, {"nvfp4_4over6": "activations"}, {"nvfp4_4over6": "all"}):
        with pytest.raises(InvalidValueError, match=f"{next(iter(options))}: got .* needed disable_rht=True"):
            NVFP4BlockScaling(**options)
    with pytest.raises(InvalidValueError, match=r"nvfp4_4over6: got 'weight', .*Did you mean 'weights'"):
        NVFP4BlockScaling(nvfp4_4over6="weight")
    with pytest.raises(InvalidTypeError, match="enable_2d_quantization"):
        MXFP8BlockScaling(enable_2d_quantization=1)
    assert MXFP8BlockScaling(scale_rule="oas").fprop.lhs == Cast("mxfp8", "oas")
    delayed = DelayedScaling(margin=1, amax_history_len=4, amax_compute_algo=max, reduce_amax=False)
    assert delayed.dgrad.lhs.scaling == Delayed(1, 4, max, False)


@pytest.mark.parametrize("name", RECIPES)
def test_backward_in_high_precision_of_every_recipe(name):
    """features P14: a shortcut for dgrad and wgrad of None casts, on originals or on what fprop has read."""
    make = RECIPES[name]
    plain = make()
    assert plain.backward is None
    assert "backward" not in repr(plain)
    high, read = make(backward="high_precision"), make(backward="dequantized")
    assert repr(read).endswith("backward='dequantized')")
    assert high.fprop == read.fprop == plain.fprop
    assert high.dgrad == high.wgrad == Gemm(None, None)
    assert read.dgrad == Gemm(None, plain.fprop.rhs, from_fprop=True)
    assert read.wgrad == Gemm(None, plain.fprop.lhs, from_fprop=True)
    assert read == make(backward="dequantized")
    assert len({plain, high, read}) == 3
    assert not high.is_stochastic
    assert not read.is_stochastic
    assert "of fprop" in str(read)
    with pytest.raises(InvalidValueError, match="backward: got 'bf16', needed one of 'high_precision', 'dequantized'"):
        make(backward="bf16")


def test_only_operands_of_fprop_are_read_again():
    read = Gemm(None, "mxfp8", from_fprop=True)
    assert CustomRecipe(Gemm("mxfp8", "mxfp8"), read, Gemm(None, None)).dgrad.from_fprop
    for gemms in ((read, read, read), (Gemm("mxfp8", "mxfp4"), read, read), (Gemm(None, None), read, read)):
        with pytest.raises(InvalidValueError, match=r"CustomRecipe.[fd](prop|grad): got from_fprop=True with"):
            CustomRecipe(*gemms)
    rotated = Cast("nvfp4", hadamard=Hadamard())
    for lhs, rhs in ((Cast("mxfp8"), "mxfp8"), (None, None), (None, rotated)):
        with pytest.raises(InvalidValueError, match=r"Gemm.from_fprop: got True with"):
            Gemm(lhs, rhs, from_fprop=True)


@every_variant
def test_a_recipe_is_stochastic_or_delayed_where_one_of_its_casts_is(recipe):
    casts = [cast for cast in recipe.casts.values() if cast is not None]
    assert recipe.is_stochastic == any(cast.rounding == "stochastic" for cast in casts)
    assert recipe.is_delayed == any(isinstance(cast.scaling, Delayed) for cast in casts)


def test_the_stock_recipes_that_draw_random_bytes_or_keep_state():
    assert from_name("nvfp4").is_stochastic
    assert from_name("delayed").is_delayed
    assert not NVFP4BlockScaling(disable_stochastic_rounding=True).is_stochastic
    assert not any(from_name(name).is_stochastic for name in ("delayed", "fp8_block", "mxfp8", "mxfp4"))
    assert not any(from_name(name).is_delayed for name in ("fp8_current", "fp8_row", "mxfp8", "nvfp4"))


# --- values


@every_variant
def test_recipes_are_values(recipe):
    """Features R22."""
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert hash(pickle.loads(pickle.dumps(recipe))) == hash(recipe)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.fprop = Gemm(None, None)


@every_variant
def test_a_changed_recipe_is_made_by_replace(recipe):
    """Recipes are frozen; docs/migration.md names this way to change one."""
    assert dataclasses.replace(recipe) == recipe
    if isinstance(recipe, CustomRecipe):
        assert dataclasses.replace(recipe, wgrad=Gemm(None, None)).wgrad == Gemm(None, None)
    else:
        changed = dataclasses.replace(recipe, backward="high_precision")
        assert changed.arguments() == recipe.arguments() | {"backward": "high_precision"}
        assert changed.wgrad == Gemm(None, None)


def test_different_recipes_differ():
    everything = list(variants())
    names = {repr(recipe) for recipe in everything}
    assert len(set(everything)) == len(names)
    for a, b in itertools.combinations(everything, 2):
        assert (a == b) == (repr(a) == repr(b))


@every_variant
def test_round_trip_through_json(recipe):
    data = json.loads(json.dumps(recipe.to_dict()))
    again = Recipe.from_dict(data)
    assert again == recipe
    assert type(again) is type(recipe)
    assert again.casts == recipe.casts
    assert [getattr(again, gemm) for gemm in recipes.core.GEMMS] == [
        getattr(recipe, gemm) for gemm in recipes.core.GEMMS
    ]


def test_an_element_of_a_users_own_survives_the_round_trip():
    element = formats.ElementFormat("E4M3B8", 4, 3, bias=8, max=240.0, has_inf=False, has_nan=False)
    fmt = formats.ScaledFormat("mine", element, formats.SCALE_E8M0, (1, 64))
    recipe = CustomRecipe(Gemm(fmt, fmt), Gemm(None, None), Gemm(None, None))
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))).fprop.lhs.format.element == element


def test_a_callable_is_not_written_in_silence():
    for recipe in (
        DelayedScaling(amax_compute_algo=max),
        CustomRecipe(*[Gemm(Cast("fp8_tensor", scaling=Delayed(amax_compute_algo=max)), None)] * 3),
    ):
        with pytest.raises(InvalidValueError, match=r"amax_compute_algo: got the callable .*set it again after"):
            recipe.to_dict()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data: got list"),
        ({}, r"data: got a dictionary without \['recipe', 'fields'\]"),
        ({"recipe": "MXFP9BlockScaling", "fields": {}}, "Did you mean 'MXFP8BlockScaling'"),
        (
            {"recipe": "MXFP8BlockScaling", "fields": {"scale_rul": "floor"}},
            r"fields: got a dictionary with \['scale_rul'\], needed",
        ),
        ({"recipe": "CustomRecipe", "fields": {"fprop": {}}}, r"fields: got a dictionary without \['dgrad', 'wgrad'\]"),
        ({"recipe": "MXFP8BlockScaling", "fields": {"scale_rule": "flor"}}, "Did you mean 'floor'"),
    ],
)
def test_dictionaries_that_cannot_be_read(data, message):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=message):
        Recipe.from_dict(data)


# --- names


def test_canonical_names():
    """Recipes may come, and none of these may go."""
    assert {"delayed", "fp8_current", "fp8_row", "fp8_block", "mxfp8", "mxfp6", "mxfp4", "nvfp4"} <= RECIPES.keys()
    for name, make in RECIPES.items():
        assert from_name(name) == make()
        assert re.fullmatch(r"[a-z0-9_]+", name)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("tensorwise", "fp8_current"), ("rowwise", "fp8_row"), ("blockwise", "fp8_block"), ("mxfp8_rceil", "mxfp8")],
)
def test_names_of_the_peers(alias, name):
    """Features R21."""
    assert from_name(alias) == from_name(name)
    assert from_name("rowwise_with_gw_hp") == Float8RowScaling(wgrad="high_precision")


def test_unknown_names_tell_the_nearest():
    with pytest.raises(InvalidValueError, match=r"name: got 'nvpf4', needed one of 'delayed', .*Did you mean 'nvfp4'"):
        from_name("nvpf4")
    with pytest.raises(InvalidTypeError, match=r"name: got int"):
        from_name(4)


def test_the_default_recipe_is_one_constant():
    """Features P8."""
    assert get_default_recipe() == Float8CurrentScaling()


# --- printing


@every_variant
def test_the_table_has_six_rows(recipe):
    lines = str(recipe).splitlines()
    assert lines[0] == repr(recipe)
    assert len(lines) == 1 + 2 + 6
    header = lines[1].split()
    assert header == [
        "GEMM",
        "operand",
        "format",
        "block",
        "scale_rule",
        "rounding",
        "hadamard",
        "scaling",
        "accumulate",
        "path",
    ]
    for line, ((gemm, side), cast) in zip(lines[3:], recipe.casts.items(), strict=True):
        assert line.startswith(gemm)
        assert (cast.format.name if cast else "high precision") in line, side


def test_the_table_of_nvfp4():
    assert (
        str(NVFP4BlockScaling())
        == """\
NVFP4BlockScaling(disable_rht=False, disable_stochastic_rounding=False, disable_2d_quantization=False, path='exact')
GEMM   operand     format    block  scale_rule  rounding    hadamard    scaling  accumulate  path
-----  ----------  --------  -----  ----------  ----------  ----------  -------  ----------  -----
fprop  x [M,K]     nvfp4     1x16   two_level   nearest     -           current  fast        exact
fprop  w [N,K]     nvfp4_2d  16x16  two_level   nearest     -           current  fast        exact
dgrad  dy [M,N]    nvfp4     1x16   two_level   stochastic  -           current  split       exact
dgrad  w.T [K,N]   nvfp4_2d  16x16  two_level   nearest     -           current  split       exact
wgrad  dy.T [N,M]  nvfp4     1x16   two_level   stochastic  16, 0xd7e8  current  split       exact
wgrad  x.T [K,M]   nvfp4     1x16   two_level   nearest     16, 0xd7e8  current  split       exact"""
    )


def test_the_table_shows_scaling_and_high_precision():
    assert "delayed(max of 1024, margin 0)" in str(DelayedScaling())
    assert repr(DelayedScaling(margin=3.0)) == repr(DelayedScaling(margin=3))  # TransformerEngine writes both
    assert "delayed(callable of 7, margin 1)" in str(DelayedScaling(1, amax_history_len=7, amax_compute_algo=_Least()))
    assert "current(>= 1e-06)" in str(Float8CurrentScaling(amax_epsilon=1e-6))
    last = str(Float8RowScaling(wgrad="high_precision")).splitlines()[-1].split()
    assert last == ["wgrad", "x.T", "[K,M]", "high", "precision", "-", "-", "-", "-", "-", "-", "-"]


class _Least:
    def __call__(self, history):
        return min(history)


def test_reprs_evaluate_to_equal_recipes():
    for recipe in variants():
        if type(recipe) is not CustomRecipe:
            assert eval(repr(recipe), vars(recipes).copy()) == recipe


# --- toggles


@pytest.mark.parametrize("field", TOGGLES)
def test_a_toggle_is_the_default_of_an_argument_that_was_not_given(monkeypatch, field):
    monkeypatch.setenv(TOGGLES[field], "1")
    toggled = NVFP4BlockScaling()
    assert toggled == NVFP4BlockScaling(**{field: True})
    assert f"{field}=True" in repr(toggled)
    assert NVFP4BlockScaling(**{field: False}) == NVFP4BlockScaling(False, False, False)
    assert from_name("nvfp4") == toggled


def test_toggles_are_read_at_construction_only(monkeypatch):
    """Features P16."""
    before = NVFP4BlockScaling()
    monkeypatch.setenv(TOGGLES["disable_rht"], "1")
    assert not before.disable_rht
    assert before.wgrad.lhs.hadamard == Hadamard()
    after = NVFP4BlockScaling()
    monkeypatch.delenv(TOGGLES["disable_rht"])
    assert after.disable_rht
    assert Recipe.from_dict(after.to_dict()) == after
    assert pickle.loads(pickle.dumps(after)) == after


@pytest.mark.parametrize(("text", "value"), [("", False), ("0", False), ("1", True)])
def test_values_of_a_toggle(monkeypatch, text, value):
    monkeypatch.setenv(TOGGLES["disable_2d_quantization"], text)
    assert NVFP4BlockScaling().disable_2d_quantization is value


@pytest.mark.parametrize("text", ["true", "yes", "2", " 1"])
def test_a_toggle_that_is_neither_on_nor_off(monkeypatch, text):
    monkeypatch.setenv(TOGGLES["disable_rht"], text)
    with pytest.raises(
        InvalidValueError, match=f"environment variable MICROFLOAT_NVFP4_DISABLE_RHT: got '{text}', needed '0' or '1'"
    ):
        NVFP4BlockScaling()
    assert NVFP4BlockScaling(disable_rht=True).disable_rht


@pytest.mark.filterwarnings("ignore:environment variable NVTE_")
def test_no_other_variable_changes_a_recipe(monkeypatch):
    for variable in (
        "NVTE_NVFP4_DISABLE_RHT",
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    ):
        monkeypatch.setenv(variable, "1")
    assert NVFP4BlockScaling() == NVFP4BlockScaling(False, False, False)
    assert Float8CurrentScaling() == Float8CurrentScaling(use_power_2_scales=False)
    assert Float8BlockScaling() == Float8BlockScaling(use_f32_scales=False)


# Variables of TransformerEngine, a recipe that they are about, and the end of the one warning.
PEERS = {
    "NVTE_NVFP4_DISABLE_RHT=1": ("NVFP4BlockScaling()", "Set MICROFLOAT_NVFP4_DISABLE_RHT=1."),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION=1": (
        "from_name('nvfp4')", "Set MICROFLOAT_NVFP4_DISABLE_2D_QUANTIZATION=1."
    ),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1": (
        "NVFP4BlockScaling(disable_rht=True)", "Set MICROFLOAT_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1."
    ),
    "NVTE_NVFP4_4OVER6=weights": ("NVFP4BlockScaling()", "Give the recipe nvfp4_4over6=."),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION=1": ("NVFP4BlockScaling()", "Give the recipe row_scaled_activation=."),
    "NVTE_BACKWARD_OVERRIDE=dequantized": ("MXFP8BlockScaling()", "Give the recipe backward=."),
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1": ("Float8CurrentScaling()", "Give the recipe use_power_2_scales=."),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1": ("Float8BlockScaling()", "Give the recipe use_f32_scales=."),
}  # fmt: skip
_ASK = """
import json, os, sys, warnings
from microfloat.recipes import *
told = {}
for setting, code in json.loads(sys.argv[1]).items():
    name, _, value = setting.partition("=")
    counts = []
    for text in ("", "0", "none", value, value):
        os.environ[name] = text
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            eval(code)
        counts.append([str(one.message) for one in caught])
    del os.environ[name]
    told[setting] = counts
print(json.dumps(told))
"""


def test_variables_of_transformer_engine_are_told_of_once(fresh_python):
    """They change numerics there and nothing here: a ported script would train otherwise, and be told nothing."""
    asked = {setting: code for setting, (code, _) in PEERS.items()}
    told = json.loads(fresh_python(_ASK, json.dumps(asked)).stdout)
    for setting, (_, end) in PEERS.items():
        name, _, value = setting.partition("=")
        *off, first, second = told[setting]
        assert [*off, second] == [[], [], [], []], setting
        assert len(first) == 1, setting
        assert first[0].startswith(f"environment variable {name}: got {value!r}"), first
        assert first[0].endswith(end), first


def test_who_has_asked_for_it_here_is_told_nothing(monkeypatch):
    for setting in PEERS:
        monkeypatch.setenv(*setting.split("="))
    Float8CurrentScaling(use_power_2_scales=True, backward="dequantized")  # warnings are errors
    Float8BlockScaling(use_f32_scales=True, backward="high_precision")
    WeightOnly("mxfp8")
    peers = {"row_scaled_activation": True, "nvfp4_4over6": "weights", "backward": "dequantized"}
    NVFP4BlockScaling(True, False, False, **peers)
    for variable in TOGGLES.values():
        monkeypatch.setenv(variable, "0")
    NVFP4BlockScaling(**peers)


def test_a_recipe_by_name_is_made_once_for_each_state_of_the_toggles(monkeypatch):
    """Making and checking one takes longer than entering the autocast that asks for it."""
    first = from_name("nvfp4")
    assert from_name("nvfp4") is first
    monkeypatch.setenv(TOGGLES["disable_rht"], "1")
    second = from_name("nvfp4")
    assert second.disable_rht
    assert from_name("nvfp4") is second
    monkeypatch.delenv(TOGGLES["disable_rht"])
    assert from_name("nvfp4") is first
    monkeypatch.setenv(TOGGLES["disable_rht"], "yes")
    for _ in range(2):
        with pytest.raises(InvalidValueError, match="needed '0' or '1'"):
            from_name("nvfp4")


# --- questions of ported code

_MX8, _TILE = Cast("mxfp8", "floor"), Cast("nvfp4_2d")
KINDS = {
    "delayed": [DelayedScaling(), DelayedScaling(fp8_format=Format.E4M3, backward="high_precision")],
    "float8_current_scaling": [Float8CurrentScaling(), Float8CurrentScaling(use_power_2_scales=True)],
    "float8_block_scaling": [Float8BlockScaling(), Float8BlockScaling(x=(128, 128), w=(1, 128))],
    "mxfp8": [
        MXFP8BlockScaling(Format.HYBRID), MXFP8BlockScaling(backward="dequantized"),
        CustomRecipe(Gemm(_MX8, None), Gemm(None, None), Gemm("mxfp8", "mxfp8")),
    ],
    "nvfp4": [
        NVFP4BlockScaling(True, True, True), CustomRecipe(Gemm(_TILE, _TILE), Gemm(None, None), Gemm(None, None))
    ],
    "custom": [
        Float8RowScaling(), Float8RowScaling(wgrad="high_precision"), MXFP6BlockScaling(), MXFP4BlockScaling(),
        CustomRecipe(Gemm(None, None), Gemm(None, None), Gemm(None, None)),
        CustomRecipe(Gemm("mxfp8", "mxfp8"), Gemm("nvfp4", "nvfp4"), Gemm(None, None)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_questions_of_ported_code(kind):
    """Features R23: answered from the casts, whatever the class."""
    for recipe in KINDS[kind]:
        assert [name for name in KINDS if getattr(recipe, name)()] == [kind], recipe
        assert recipe.float8_per_tensor_scaling() == (kind in ("delayed", "float8_current_scaling"))


# --- refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DelayedScaling(fp8_format=Format.E5M2), "fp8_format: got 'E5M2', needed one of 'E4M3', 'HYBRID'"),
        (lambda: Float8CurrentScaling("E5M2"), "fp8_format: got 'E5M2'"),
        (lambda: MXFP8BlockScaling(Format.E5M2), "fp8_format: got 'E5M2'"),
        (lambda: Float8RowScaling(Format.HYBRID), "fp8_format: got 'HYBRID', needed one of 'E4M3'"),
        (lambda: Float8BlockScaling(Format.HYBRID), "fp8_format: got 'HYBRID'"),
        (lambda: MXFP8BlockScaling("hybird"), "Did you mean 'HYBRID'"),
        (lambda: MXFP8BlockScaling(4), "fp8_format: got int"),
        (lambda: MXFP8BlockScaling(path="fast"), "path: got 'fast'"),
        (lambda: MXFP8BlockScaling(Format.HYBRID, "oas"), "'oas' with E5M2 elements"),
        (lambda: MXFP6BlockScaling("E4M3"), "element: got 'E4M3', needed one of 'E3M2', 'E2M3'"),
        (lambda: MXFP4BlockScaling("two_level"), "Choose one of floor"),
        (lambda: Float8RowScaling(wgrad="bf16"), "wgrad: got 'bf16', needed one of 'fp8', 'high_precision'"),
        (lambda: Float8RowScaling(use_power_2_scales="no"), "use_power_2_scales: got str, needed True or False"),
        (lambda: Float8CurrentScaling(use_power_2_scales=1), "use_power_2_scales: got int"),
        (lambda: Float8BlockScaling(use_f32_scales=None), "use_f32_scales: got NoneType"),
        (lambda: Float8BlockScaling(x=(1, 64)), r"x: got \(1, 64\), needed a block of \(1, 128\) or \(128, 128\)"),
        (lambda: Float8BlockScaling(w=128), "w: got 128"),
        (lambda: NVFP4BlockScaling(disable_rht="1"), "disable_rht: got str"),
        (lambda: Float8CurrentScaling(amax_epsilon=-1), "amax_epsilon: got -1"),
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len: got 0"),
        (lambda: DelayedScaling(amax_compute_algo="least"), "amax_compute_algo: got 'least'"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(make, message):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=message):
        make()


def test_formats_by_name_and_blocks_as_lists():
    assert MXFP8BlockScaling("hybrid") == MXFP8BlockScaling(Format.HYBRID)
    assert MXFP6BlockScaling(formats.E2M3) == MXFP6BlockScaling("E2M3")
    assert Float8BlockScaling(x=[128, 128]) == Float8BlockScaling(x=(128, 128))
    assert hash(Float8BlockScaling(x=[128, 128])) == hash(Float8BlockScaling(x=(128, 128)))
    assert (Format.HYBRID.forward, Format.HYBRID.backward) == (formats.E4M3, formats.E5M2)
    assert (Format.E5M2.forward, Format.E4M3.backward) == (formats.E5M2, formats.E4M3)


@every_recipe
def test_docstrings_say_what_a_recipe_is(make):
    assert make.__doc__.strip()
