"""Routes of GEMMs on chips: one table for both front ends, every refusal in words, nothing of a framework."""

import itertools
from dataclasses import replace

import pytest

from microfloat.chips import CHIPS, Chip
from microfloat.errors import InvalidValueError
from microfloat.formats import E2M1, E5M2, SCALE_E8M0, ElementFormat, ScaledFormat
from microfloat.recipes import RECIPES, Cast, Gemm, Hadamard, MXFP8BlockScaling, WeightOnly
from microfloat.routes import UNTRIED, Encoding, encoding_of, route_between, route_of

AMPERE, ADA, HOPPER, BLACKWELL = Chip((8, 0)), Chip((8, 9)), Chip((9, 0)), Chip((10, 0))
UNKNOWN = Chip((9, 4)), Chip((13, 0))  # an MI300, as a ROCm build names it, and what comes after Blackwell
E3M4 = ElementFormat("E3M4", 3, 4, bias=3, max=31.0, has_inf=False, has_nan=False)
EVERY = [None, *map(Chip, sorted(set(CHIPS.values()))), *UNKNOWN]


@pytest.mark.parametrize("library", ["torch", "xla"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_route_on_every_chip(name, library):
    recipe = RECIPES[name]()
    for chip, gemm in itertools.product(EVERY, (recipe.fprop, recipe.dgrad, recipe.wgrad)):
        route = route_of(gemm, chip, library=library)
        assert route.kind != "refused"
        assert route.reason
        assert "{" not in route.kernel
        if chip is None:
            assert (route.kind, route.forms, route.accelerated) == ("float32", ("codes", "codes"), False)


@pytest.mark.parametrize("library", ["torch", "xla"])
@pytest.mark.parametrize("chip", UNKNOWN)
def test_unknown_chips_get_no_tensor_cores_and_are_told_so(chip, library):
    for name in RECIPES:
        route = route_of(RECIPES[name]().fprop, chip, library=library)
        assert route.kind in ("values", "float32")
        assert not route.accelerated
        assert f"{chip.capability[0]}.{chip.capability[1]} is none that microfloat knows" in route.reason


@pytest.mark.parametrize(
    ("names", "chip", "kind", "turned"),
    [
        (("fp8_tensor", "fp8_tensor"), HOPPER, "fp8", True),
        (("fp8_tensor", "fp8_row"), ADA, "fp8", True),
        (("fp8_tensor", "fp8_tensor"), AMPERE, "values", False),
        (("fp8_1x128", "fp8_128x128"), HOPPER, "blocks", True),
        (("fp8_128x128", "fp8_1x128"), HOPPER, "values", False),
        ((Cast("fp8_128x128", "amax"), Cast("fp8_1x128", "amax")), HOPPER, "float32", False),
        (("mxfp8", "mxfp8"), HOPPER, "blocks", True),
        (("mxfp8", "mxfp8"), AMPERE, "values", True),
        (("nvfp4", "nvfp4_2d"), HOPPER, "values", True),
        (("nvfp4", "nvfp4_2d"), BLACKWELL, "block_scaled", False),
        (("mxfp8", None), HOPPER, "plain", False),
    ],
)
def test_kinds_and_turned_operands(names, chip, kind, turned):
    route = route_of(Gemm(*names), chip)
    assert (route.kind, route.turned) == (kind, turned)


def test_a_cast_without_a_kernel_makes_codes_that_are_decoded_later():
    odd = ScaledFormat("odd", E2M1, SCALE_E8M0, (3, 5))
    route = route_of(Gemm(Cast(odd), Cast("mxfp8")), HOPPER)
    assert (route.kind, route.forms, route.turned) == ("values", ("codes", "values"), True)
    assert route_of(Gemm(Cast("mxfp8"), Cast(odd)), HOPPER).turned is False


def test_folding_is_a_matter_of_path_counts_transform_and_library():
    """Features R26."""
    auto, rotated = Gemm("mxfp8", "mxfp8"), Cast("mxfp8", hadamard=Hadamard())
    assert route_of(auto, HOPPER).forms == ("folded", "tiles")
    assert route_of(auto, HOPPER, fold=False).forms == ("values", "values")
    folded = Gemm("mxfp8", "mxfp8", path="folded")
    assert route_of(folded, HOPPER, fold=False).forms == ("folded", "tiles")
    assert route_of(Gemm("mxfp8", "mxfp8", path="exact"), HOPPER).forms == ("values", "values")
    assert route_of(Gemm(rotated, rotated), HOPPER).forms == ("values", "values")
    assert "folding is not offered" in route_of(folded, HOPPER, library="xla").reason


def test_nvfp4_folds_where_it_is_asked_to():
    """Features R26: never under "auto", the same without a chip, exact where hardware has NVFP4 or no FP8 blocks."""
    rotated = Cast("nvfp4", hadamard=Hadamard())
    for casts in (("nvfp4", "nvfp4_2d"), (rotated, rotated)):
        gemm = Gemm(*casts, path="folded")
        for chip, library, kind in ((HOPPER, "torch", "blocks"), (None, "torch", "float32"), (None, "xla", "float32"),
                                    (HOPPER, "xla", "values")):  # fmt: skip
            route = route_of(gemm, chip, library=library)
            assert (route.kind, route.forms) == (kind, ("folded", "tiles"))
            assert "rounded by at most 1/21, or 2^-17.9 of the largest" in route.reason
            assert route_of(Gemm(*casts), chip, library=library).forms != route.forms
        assert route_of(gemm, BLACKWELL) == route_of(Gemm(*casts), BLACKWELL)
        ampere = route_of(gemm, AMPERE)
        assert ampere.forms == ("values", "values")
        assert "not folded" in ampere.reason
    assert route_of(Gemm("nvfp4", "nvfp4_row", path="folded"), HOPPER).forms == ("folded", "folded")
    assert encoding_of(Cast("nvfp4_row"), "folded").level is None
    assert route_of(Gemm("nvfp4", None, path="folded"), None).forms == ("codes", "codes")


def test_fp8_rows_by_a_weight_of_blocks():
    """9.5: folded to rows wherever it is asked for, decoded or read as stored under "exact"."""
    for weight in ("nvfp4", "nvfp4_row", "mxfp4", "mxfp6_e3m2", "mxfp8_e5m2"):
        gemm = Gemm("fp8_row", weight, path="folded")
        for chip, library, kind in ((ADA, "torch", "fp8"), (BLACKWELL, "torch", "fp8"), (AMPERE, "torch", "values"),
                                    (None, "torch", "float32"), (HOPPER, "xla", "fp8")):  # fmt: skip
            route = route_of(gemm, chip, library=library)
            assert (route.kind, route.forms) == (kind, ("codes", "rows"))
            assert route.accelerated is (kind == "fp8")
            assert "scales folded to one for each row" in route.reason
        exact = Gemm("fp8_row", weight)
        assert [route_of(exact, chip).kind for chip in (HOPPER, AMPERE, None)] == ["stored", "stored", "float32"]
        assert route_of(Gemm(Cast("fp8_row", "amax"), weight), HOPPER).kind == "values"  # bfloat16 rounds such scales
    for other in ("fp8_tensor", "fp8_1x128", "mxfp8"):
        with pytest.raises(InvalidValueError, match=r"operands of one family .*, or fp8_row x MX or NVFP4"):
            Gemm(other, "nvfp4")


def test_exact_sums_are_float64_or_refused():
    exact = Gemm("mxfp8", "mxfp8", accumulate="exact")
    assert route_of(exact, None).kind == "float64"
    assert route_of(exact, HOPPER, library="xla").kind == "float64"
    refused = route_of(exact, HOPPER)
    assert refused.kind == "refused"
    assert "reference backend" in refused.reason
    assert route_of(Gemm("mxfp8", None, accumulate="exact"), HOPPER).kind == "plain"


@pytest.mark.parametrize("chip", [ADA, HOPPER, BLACKWELL])
def test_two_operands_of_e5m2_are_decoded(chip):
    for name, kind in (("mxfp8_e5m2", "values"), ("fp8_tensor_e5m2", "float32"), ("fp8_1x128_e5m2", "float32")):
        one = encoding_of(Cast(name))
        for library in ("torch", "xla"):
            route = route_between(one, one, chip, library=library)
            assert (route.kind, route.accelerated) == (kind, False)
            assert E5M2.name in route.reason


def test_foreign_elements_are_multiplied_in_float32():
    mine = Encoding(ScaledFormat("mine", E3M4, SCALE_E8M0, (1, 32)))
    route = route_between(mine, mine, BLACKWELL)
    assert route.kind == "float32"
    assert "E3M4 is not one of the stock elements" in route.reason


@pytest.mark.parametrize("library", ["torch", "xla"])
def test_few_rows_read_a_stored_weight_and_backward_dequantizes_it(library):  # features I2
    recipe = WeightOnly("nvfp4")
    fprop, dgrad = (route_of(gemm, HOPPER, library=library) for gemm in (recipe.fprop, recipe.dgrad))
    assert (fprop.kind, dgrad.kind) == ("stored", "plain")
    assert fprop.kernel.startswith("decoding GEMM up to 64 rows")
    older = route_of(recipe.fprop, Chip((8, 0)), library=library)
    assert older.kernel.startswith("decoding GEMM up to 64 rows")
    assert dgrad.kernel.startswith("dequantize one operand")
    assert UNTRIED not in fprop.reason
    assert UNTRIED in older.reason
    assert route_of(recipe.fprop, Chip((7, 5)), library=library).kind == "plain"


def test_hopper_multiplies_blocks_of_e5m2_by_microfloats_gemm():
    """torch 2.11 refuses E5M2 with 1x128 scales ("Invalid scaling configuration"), seen on an H200."""
    hybrid, without = MXFP8BlockScaling("HYBRID"), Chip((9, 0), own_gemm=False)
    fprop, *gradients = (route_of(gemm, HOPPER) for gemm in (hybrid.fprop, hybrid.dgrad, hybrid.wgrad))
    for route in (fprop, *gradients):
        assert (route.kind, route.accelerated, *route.forms) == ("blocks", True, "folded", "tiles")
    assert fprop.kernel == "fold to FP8, vendor FP8 GEMM, 1x128 x 128x128 scales"
    assert {route.kernel for route in gradients} == {"fold to FP8, microfloat's FP8 GEMM, 1x128 x 128x128 scales"}
    for gemm in (hybrid.dgrad, hybrid.wgrad):
        route = route_of(gemm, without)
        assert (route.kind, route.accelerated) == ("values", False)
        assert "not folded, since torch's GEMM takes E4M3 alone" in route.reason
        assert route_of(replace(gemm, path="exact"), HOPPER).kind == "values"
    assert route_of(hybrid.fprop, without) == fprop
    for first, second in (("fp8_1x128_e5m2", "fp8_1x128"), ("fp8_1x128", "fp8_128x128_e5m2")):
        route = route_of(Gemm(first, second), HOPPER)
        assert (route.kind, route.accelerated) == ("blocks", True)
        assert route.kernel.startswith("microfloat's FP8 GEMM")
        assert not route_of(Gemm(first, second), without).accelerated
    assert route_of(Gemm("fp8_1x128", "fp8_128x128"), HOPPER).kernel.startswith("vendor FP8 GEMM")
