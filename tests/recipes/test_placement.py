"""Placement: which recipe which layer runs."""

import json
import pickle

import pytest

from microfloat.errors import InvalidTypeError, InvalidValueError, MicrofloatError, PlacementError
from microfloat.formats import E4M3, SCALE_E8M0, ScaledFormat
from microfloat.recipes import (
    CustomRecipe,
    Gemm,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Placement,
    WeightActivation,
    WeightOnly,
)
from microfloat.recipes.inference import as_stored
from microfloat.recipes.placement import ConversionReport, ConversionRow

NAMES = ["embed", "blocks.0.attn.qkv", "blocks.0.mlp.up", "blocks.1.attn.qkv", "blocks.10.mlp.up", "lm_head"]
MX, NV = MXFP8BlockScaling(), NVFP4BlockScaling(False, False, False)


def test_the_first_pattern_that_matches_decides():
    """Features R20."""
    placement = Placement([("blocks.0.*", None), ("blocks.*", NV), ("*head", MX)])
    assert placement.resolve(NAMES) == {
        "blocks.0.attn.qkv": None, "blocks.0.mlp.up": None, "blocks.1.attn.qkv": NV, "blocks.10.mlp.up": NV,
        "lm_head": MX,
    }  # fmt: skip
    assert Placement([("blocks.*", NV), ("blocks.0.*", None), ("*head", MX)]).resolve(NAMES)["blocks.0.mlp.up"] == NV


def test_a_star_crosses_dots_and_a_name_matches_whole():
    assert list(Placement([("*.mlp.*", MX)]).resolve(NAMES)) == ["blocks.0.mlp.up", "blocks.10.mlp.up"]
    assert list(Placement([("blocks.?.mlp.up", MX)]).resolve(NAMES)) == ["blocks.0.mlp.up"]
    assert list(Placement([("blocks.[01].*", MX)]).resolve(NAMES)) == [
        "blocks.0.attn.qkv", "blocks.0.mlp.up", "blocks.1.attn.qkv",
    ]  # fmt: skip
    with pytest.raises(PlacementError):
        Placement([("blocks", MX)]).resolve(NAMES)
    with pytest.raises(PlacementError):
        Placement([("LM_HEAD", MX)]).resolve(NAMES)


def test_a_pattern_may_decide_about_one_gemm():
    """features S13: ":wgrad" after a pattern; the first match decides for each GEMM by itself."""
    placement = Placement([("blocks.0.*:wgrad", None), ("*.up:dgrad", MX), ("blocks.*", NV)])
    chosen = placement.resolve(NAMES)
    assert chosen["blocks.1.attn.qkv"] is NV
    high = Gemm(None, None)
    assert chosen["blocks.0.attn.qkv"] == CustomRecipe(NV.fprop, NV.dgrad, high)
    assert chosen["blocks.0.mlp.up"] == CustomRecipe(NV.fprop, MX.dgrad, high)
    assert chosen["blocks.10.mlp.up"] == CustomRecipe(NV.fprop, MX.dgrad, NV.wgrad)
    assert placement.of_gemms("blocks.0.mlp.up") == (
        "dgrad: MXFP8BlockScaling by '*.up:dgrad'; wgrad: high precision by 'blocks.0.*:wgrad'"
    )
    assert placement.of_gemms("blocks.1.attn.qkv") == ""
    # A whole-layer pattern that comes first decides about all three.
    first = Placement([("blocks.*", NV), ("*.up:dgrad", MX)])
    assert first.resolve(NAMES)["blocks.0.mlp.up"] is NV
    assert first.of_gemms("blocks.0.mlp.up") == ""


def test_gemms_that_no_pattern_matches_stay_as_they_are():
    only = Placement([("*.up:wgrad", None)])
    assert only.resolve(NAMES, {"blocks.0.mlp.up": MX}) == {
        "blocks.0.mlp.up": CustomRecipe(MX.fprop, MX.dgrad, Gemm(None, None)), "blocks.10.mlp.up": None,
    }  # fmt: skip
    assert Placement([("*.up:fprop", MX)]).resolve(NAMES)["blocks.0.mlp.up"] == CustomRecipe(
        MX.fprop, Gemm(None, None), Gemm(None, None)
    )
    # All three of one recipe are that recipe, and all three of none are high precision.
    each = Placement([(f"*.up:{gemm}", MX) for gemm in ("fprop", "dgrad", "wgrad")])
    assert each.resolve(NAMES)["blocks.0.mlp.up"] is MX
    assert Placement([("*.up:fprop", None)]).resolve(NAMES)["blocks.0.mlp.up"] is None


def test_patterns_of_gemms_that_match_nothing_are_listed():
    with pytest.raises(PlacementError, match=r"match no layer: 'decoder\.\*:wgrad'.* one of fprop, dgrad, wgrad"):
        Placement([("decoder.*:wgrad", MX), ("*", MX)]).resolve(NAMES)
    with pytest.raises(PlacementError, match=r"match no layer: '\*:bprop'.* one of fprop, dgrad, wgrad"):
        Placement([("*:bprop", MX)]).resolve(NAMES)
    assert Placement([(r"re:.*\.up:wgrad", MX)]).resolve(NAMES)["blocks.0.mlp.up"].wgrad == MX.wgrad
    assert list(Placement([("re:wgrad", MX)]).resolve(["wgrad"])) == ["wgrad"]
    with pytest.raises(PlacementError, match="needed a regular expression"):
        Placement([("re:(:wgrad", MX)])


def test_regular_expressions_match_the_whole_name():
    placement = Placement([(r"re:blocks\.(0|10)\..*", None), (r"re:.*qkv", MX)])
    assert placement.resolve(NAMES) == {
        "blocks.0.attn.qkv": None, "blocks.0.mlp.up": None, "blocks.1.attn.qkv": MX, "blocks.10.mlp.up": None,
    }  # fmt: skip
    with pytest.raises(PlacementError):
        Placement([("re:blocks", MX)]).resolve(NAMES)


def test_patterns_that_match_nothing_are_listed():
    with pytest.raises(PlacementError, match=r"'decoder\.\*', 'x'; needed patterns over these names: embed, blocks\.0"):
        Placement([("decoder.*", MX), ("blocks.*", MX), ("x", None)]).resolve(NAMES)
    with pytest.raises(PlacementError, match=r"\(20 in all\)"):
        Placement([("x", None)]).resolve([f"layer.{i}" for i in range(20)])
    with pytest.raises(PlacementError, match="needed patterns over these names: none"):
        Placement([("*", None)]).resolve([])


def test_a_pattern_that_is_always_beaten_is_not_an_error():
    """It matches names, another pattern merely comes first: order is the user's business."""
    assert Placement([("*", MX), ("lm_head", None)]).resolve(NAMES)["lm_head"] == MX


def test_a_dictionary_is_a_list_of_pairs():
    assert Placement({"blocks.*": NV, "lm_head": None}) == Placement([("blocks.*", NV), ("lm_head", None)])


def test_placements_are_values():
    placement = Placement([["blocks.*", NV], ("lm_head", None)])
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert len({placement, Placement([("blocks.*", NV), ("lm_head", None)])}) == 1


def test_printing():
    assert str(Placement([("blocks.*", MX), ("x", None)])).splitlines() == [
        f"blocks.*  {MX!r}", "x         high precision",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("a", MX, 1)], r"rules\[0\]: got .*needed a pair"),
        (["ab"], r"rules\[0\]"),
        ([("a", None), (3, MX)], r"rules\[1\]\[0\]: got int, needed a pattern string"),
        ([("a", 8)], r"rules\[0\]\[1\]: got int, needed a Recipe"),
        ([("a", MXFP8BlockScaling)], r"rules\[0\]\[1\]: got the class .*Call the class: MXFP8BlockScaling\(\)"),
        (MX, r"rules: got MXFP8BlockScaling"),
        (None, r"rules: got NoneType"),
    ],
)
def test_rules_of_a_wrong_type(rules, message):
    with pytest.raises(InvalidTypeError, match=message):
        Placement(rules)


@pytest.mark.parametrize("rules", [[], (), {}])
def test_a_placement_without_rules(rules):
    with pytest.raises(PlacementError, match="rules: got none, needed at least one pair"):
        Placement(rules)


def test_recipes_may_go_by_name():
    assert Placement({"a": "mxfp8", "b": None}) == Placement([("a", MX), ("b", None)])
    with pytest.raises(InvalidValueError, match=r"rules\[0\]\[1\]: got 'mxfp9'.*Did you mean 'mxfp8'"):
        Placement([("a", "mxfp9")])


def test_a_broken_regular_expression():
    with pytest.raises(PlacementError, match=r"rules\[0\]\[0\]: got 're:\(' .*needed a regular expression after 're:'"):
        Placement([("re:(", MX)])


def test_the_cells_of_a_report_are_named_and_layers_that_are_alike_share_a_line():
    rows = [ConversionRow(f"blocks.{index}.up", (8, 4), "converted", MX, "") for index in range(3)]
    cells = rows[1].cells
    assert (cells.layer, cells.layers, cells.shape, cells.action) == ("blocks.1.up", "1", "4 -> 8", "converted")
    header, _, line, total = str(ConversionReport(tuple(rows), 0.5)).splitlines()
    assert header.split()[:2] == ["layer", "layers"]
    assert "reason" not in header
    assert line.split()[:5] == ["blocks.*.up", "3", "4", "->", "8"]
    assert total.startswith("3 of 3 linear layers")
    assert str(ConversionReport((ConversionRow("", None, "skipped", None, "a filter"),))).splitlines()[2].split() == [
        "(root)", "-", "skipped", "-", "a", "filter",
    ]  # fmt: skip


def test_first_and_last_blocks():
    """features R20: numbers count blocks, each list for itself, and layers outside of lists are inner."""
    names = [*(f"layers.{n}.{part}" for n in range(12) for part in ("q", "experts.0.up")), "vision.0.up", "vision.3.up",
             "vision.1.up", "head"]  # fmt: skip
    chosen = Placement.first_last(2, NV, MX).resolve(names)
    outer = {name for name, recipe in chosen.items() if recipe == MX}
    assert outer == {f"layers.{n}.{part}" for n in (0, 1, 10, 11) for part in ("q", "experts.0.up")} | {
        "vision.0.up", "vision.1.up", "vision.3.up",
    }  # fmt: skip
    assert chosen["head"] == chosen["layers.2.q"] == NV
    assert Placement.first_last(1, "nvfp4").resolve(names)["layers.11.q"] is None
    parted = Placement([("last:1:wgrad", None), ("*", MX)])
    assert parted.resolve(names)["layers.11.q"].wgrad.is_high_precision
    assert parted.resolve(names)["layers.10.q"] == MX
    assert parted.of_gemms("layers.11.q", names) == "wgrad: high precision by 'last:1:wgrad'"
    assert parted.of_gemms("layers.10.q", names) == ""
    with pytest.raises(PlacementError, match="match no layer"):
        Placement.first_last(1, NV).resolve(["head"])
    for n in (0, -1, True, 1.5, "2"):
        with pytest.raises(InvalidValueError, match="number of blocks"):
            Placement.first_last(n, NV)


def test_files_of_placements(tmp_path):
    placement = Placement([("first:1", None), ("*.up:wgrad", CustomRecipe(MX.fprop, NV.dgrad, MX.wgrad)), ("*", NV)])
    file = tmp_path / "plan.json"
    text = placement.to_json(file)
    assert Placement.from_json(file) == placement == Placement.from_dict(placement.to_dict())
    assert file.read_text() == text == placement.to_json()
    for bad, word in (
        ("[]", "data"), ("{", "a JSON file of Placement.to_json"), ('{"rule": []}', "rules"),
        (json.dumps(MXFP8BlockScaling().to_dict()), r"the dictionary of a Recipe.*Placement\(\[\('\*', recipe"),
    ):  # fmt: skip
        file.write_text(bad)
        with pytest.raises((InvalidValueError, InvalidTypeError), match=word):
            Placement.from_json(file)


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ([["a"]], r"rules\[0\]: got \['a'\], needed a pair"), (5, "rules: got int"), ("ab", "rules: got str"),
        ([["a", None], ["b", 7]], r"rules\[1\]\[1\]: got"),
        ([["a", {"recipe": "MXFP8BlockScaling"}]], r"rules\[0\]\[1\]: "),
        ([["a", ""]], r"rules\[0\]\[1\]: got"), ([[3, None]], r"rules\[0\]\[0\]: got int"),
    ],
)  # fmt: skip
def test_rules_of_a_file_that_are_none_are_named(rules, named, tmp_path):
    (tmp_path / "rules.json").write_text(json.dumps({"rules": rules}))
    with pytest.raises(MicrofloatError, match=named):
        Placement.from_json(tmp_path / "rules.json")


def test_a_file_may_name_its_recipes():
    made = Placement.from_dict({"rules": [["a", "mxfp8"], ["b", None]]})
    assert made == Placement([("a", "mxfp8"), ("b", None)])
    assert Placement.from_dict({"rules": {"a": made.to_dict()["rules"][0][1], "b": None}}) == made


@pytest.mark.parametrize(
    ("pattern", "names", "hint"),
    [
        ("first:x", ["0.up"], "Needed a number >= 1 after first:"), ("last:0", ["0.up"], "number >= 1 after last:"),
        ("first:0:wgrad", ["0.up"], "number >= 1 after first:"),
        ("last:2", ["up", "down"], "no names with numbered blocks"),
        ("up:wgrd", ["up"], "one of fprop, dgrad, wgrad"),
    ],
)  # fmt: skip
def test_a_pattern_that_matches_nothing_gets_a_hint_of_its_own(pattern, names, hint):
    with pytest.raises(PlacementError, match=hint) as raised:
        Placement([(pattern, None)]).resolve(names)
    assert ("fprop" in hint) == ("stands one of fprop" in str(raised.value))


def test_a_number_of_blocks_that_is_no_int_is_told_by_its_type():
    with pytest.raises(InvalidValueError, match=r"n: got '1' \(str\), needed a number of blocks >= 1, an int"):
        Placement.first_last("1", "mxfp8")


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        ("nvfp4", WeightActivation("nvfp4")), ("mxfp8", WeightActivation("mxfp8")),
        ("mxfp4", WeightActivation("mxfp4")),
        ("mxfp6", WeightActivation("mxfp6_e3m2")), ("delayed", WeightActivation("fp8_tensor")),
        ("fp8_current", WeightActivation("fp8_tensor")), ("fp8_row", WeightActivation("fp8_row")),
        ("fp8_block", WeightActivation("fp8_1x128")),
        (MXFP8BlockScaling(path="folded"), WeightActivation(path="folded")),
        (MXFP8BlockScaling(enable_2d_quantization=True), WeightActivation("mxfp8")),
        (NVFP4BlockScaling(True, row_scaled_activation=True, nvfp4_4over6="all"),
         WeightActivation("nvfp4_row", scale_search="four_over_six")),
        (CustomRecipe(Gemm(None, "mxfp4"), Gemm(None, None), Gemm(None, None)), WeightOnly("mxfp4")),
        (CustomRecipe(Gemm("mxfp8", "mxfp4"), Gemm(None, None), Gemm(None, None)), WeightActivation("mxfp8", "mxfp4")),
        (CustomRecipe(Gemm("mxfp8", None), Gemm(None, None), Gemm(None, None)), None),
        (WeightOnly("mxfp4", prefill="folded"), WeightOnly("mxfp4", prefill="folded")), (None, None),
    ],
)  # fmt: skip
def test_the_config_that_stores_a_weight_multiplies_as_fprop_of_its_recipe(recipe, config):
    stored = as_stored(Placement([("a", "mxfp8"), ("b", recipe)]))
    assert dict(stored.rules)["b"] == config


def test_patterns_of_gradients_play_no_part_where_weights_are_stored(tmp_path):
    plan = Placement([("a:wgrad", None), ("a:fprop", "nvfp4"), ("*:dgrad", MX), ("*", MX)])
    assert as_stored(plan).rules == (("a", WeightActivation("nvfp4")), ("*", WeightActivation("mxfp8")))
    configs = Placement([("a", None), ("*", WeightOnly("mxfp8"))])
    assert as_stored(configs) is configs
    own = ScaledFormat("mine", E4M3, SCALE_E8M0, (1, 64))
    Placement([("a", None), ("b", CustomRecipe(*[Gemm(own, own)] * 3))]).to_json(tmp_path / "plan.json")
    with pytest.raises(InvalidValueError, match=r"plan\.json: rules\[1\] 'b': w of fprop: got a ScaledFormat"):
        as_stored(Placement.from_json(tmp_path / "plan.json"))
