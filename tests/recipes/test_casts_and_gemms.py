"""Cast, Gemm, Hadamard, Current, Delayed: what they resolve, and the refusals of docs/numerics.md, section 10."""

import copy
import dataclasses
import pickle

import pytest

from microfloat import formats
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from microfloat.formats import E2M1, FORMATS, MXFP8, NVFP4, SCALE_E4M3, ScaledFormat
from microfloat.recipes import Cast, Current, CustomRecipe, Delayed, Gemm, Hadamard, MXFP8BlockScaling, Recipe, as_cast
from microfloat.recipes.core import NamedRecipe
from microfloat.routes import family_of

ROTATED = Cast("nvfp4", hadamard=Hadamard())


def test_a_cast_stores_its_resolved_rule():
    assert Cast(MXFP8) == Cast("mxfp8", "rceil") == as_cast("mxfp8") == as_cast(MXFP8)
    assert Cast(NVFP4, "four_over_six") == Cast(NVFP4, "four_over_six_mae_256")
    assert hash(Cast(MXFP8)) == hash(Cast("mxfp8", "rceil"))
    assert Cast(MXFP8) != Cast(MXFP8, "floor")
    for fmt in FORMATS.values():
        assert Cast(fmt).scale_rule == fmt.default_scale_rule
        assert Cast(fmt).rule.name == fmt.default_scale_rule


def test_casts_are_frozen_values():
    cast = Cast(NVFP4, hadamard=Hadamard())
    with pytest.raises(dataclasses.FrozenInstanceError):
        cast.rounding = "stochastic"
    assert pickle.loads(pickle.dumps(cast)) == cast
    assert len({cast, Cast("nvfp4", "two_level", "nearest", Hadamard(16, 0xD7E8))}) == 1


def test_which_casts_serve_two_gemms():
    shared = [name for name in FORMATS if Cast(name).transposes]
    assert shared == ["fp8_tensor", "fp8_tensor_e5m2", "fp8_128x128", "fp8_128x128_e5m2", "nvfp4_2d"]
    assert not Cast("nvfp4_2d", rounding="stochastic").transposes
    assert not Cast("nvfp4_2d", hadamard=Hadamard()).transposes
    assert not Cast("nvfp4_2d", "four_over_six").transposes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("mxfp9",), InvalidValueError, "Did you mean 'mxfp8"),
        ((3,), InvalidTypeError, r"Cast\.format: got int"),
        ((MXFP8, "two_level"), InvalidValueError, "Choose one of floor, ceil, even, rceil, "),
        ((MXFP8, "rciel"), InvalidValueError, "Did you mean 'rceil'"),
        (("nvfp4", "floor"), InvalidValueError, "a rule that writes E4M3 scales"),
        (("fp8_row", "rceil"), InvalidValueError, "Choose one of amax, amax_pow2"),
        (("mxfp8_e5m2", "oas"), InvalidValueError, "'oas' with E5M2 elements, needed E4M3 or E2M1"),
        (("mxfp6_e2m3", "oas"), InvalidValueError, "Use 'rceil'"),
        ((MXFP8, None, "up"), InvalidValueError, "rounding: got 'up', needed one of 'nearest', 'stochastic'"),
        ((MXFP8, None, "nearest", 16), InvalidTypeError, r"hadamard: got int, needed None or Hadamard"),
        ((MXFP8, None, "nearest", None, "current"), InvalidTypeError, "scaling: got str"),
        (("fp8_tensor", None, "nearest", Hadamard()), InvalidValueError, "None on a per-tensor format"),
        (("nvfp4_row", None, "nearest", Hadamard()), InvalidValueError, "None on a format with a tensor scale per row"),
        (("nvfp4_row", "one_level_e4m3", "stochastic", Hadamard()), InvalidValueError, "tensor scale per row"),
        (("nvfp4", "four_over_six", "stochastic"), InvalidValueError, "use 'two_level' here"),
        (("nvfp4", "four_over_six_mse_448", "nearest", Hadamard()), InvalidValueError, "nearest rounding, no Hadamard"),
        ((MXFP8, None, "nearest", None, Delayed()), InvalidValueError, "needed FP8_TENSOR or FP8_TENSOR_E5M2"),
        (("fp8_tensor", "amax_pow2", "nearest", None, Delayed()), InvalidValueError, "with rule 'amax'"),
        (("fp8_row", "amax", "nearest", None, Delayed()), InvalidValueError, "Use Current"),
        ((MXFP8, None, "nearest", None, Current(1e-3)), InvalidValueError, "amax_epsilon: got 0.001, needed 0 for"),
        (("nvfp4", None, "nearest", None, Current(1e-3)), InvalidValueError, "amax_epsilon"),
    ],
)  # fmt: skip
def test_casts_that_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message):
        Cast(*arguments)


def test_two_level_rules_take_their_numbers_from_the_formats_and_need_a_tensor_scale():
    eight_bit = ScaledFormat("mine", formats.E4M3, formats.SCALE_E4M3, (1, 16), "tensor")
    assert Cast(eight_bit).rule.two_level.capacity == 448.0 * 448.0
    for rule in ("two_level_17_16", "four_over_six", "two_level_torchao"):  # whose numbers are those of NVFP4
        with pytest.raises(InvalidValueError, match=r"with E4M3 elements and E4M3 scales, needed E2M1.*'one_level'"):
            Cast(eight_bit, rule)
    one_level = ScaledFormat("mine", formats.E2M1, formats.SCALE_E4M3, (1, 16))
    assert Cast(one_level).scale_rule == "one_level_e4m3"
    scale = formats.ScaleFormat("UE4M4", exponent_bits=4, mantissa_bits=4, bias=7)
    for fmt in (one_level, ScaledFormat("mine", formats.E3M2, scale, (1, 16))):  # the remedy serves every scale
        with pytest.raises(InvalidValueError, match=r"Give it one, or use the rule 'one_level'.*one_level=True"):
            Cast(fmt, "two_level")
        assert Cast(fmt, "one_level").rule.two_level.tensor_scale is False


@pytest.mark.parametrize("epsilon", [-1.0, float("nan"), float("inf"), 1e39, "0", None, True])
def test_epsilons_that_cannot_be(epsilon):
    with pytest.raises((InvalidValueError, InvalidTypeError), match="amax_epsilon: got"):
        Current(epsilon)
    assert Current(1) == Current(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"margin": 1.5}, "margin: got float"),
        ({"margin": True}, "margin: got bool"),
        ({"margin": 100}, r"margin: got 100, needed an int in \[-64, 64\]"),
        ({"amax_history_len": 0}, "amax_history_len: got 0"),
        ({"amax_history_len": 2.0}, "amax_history_len: got float"),
        ({"amax_history_len": True}, "amax_history_len: got bool"),
        ({"amax_compute_algo": "mean"}, "amax_compute_algo: got 'mean', needed one of 'max', 'most_recent'"),
        ({"reduce_amax": 1}, "reduce_amax: got int, needed True or False"),
    ],
)
def test_delayed_scalings_that_cannot_be(arguments, message):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
        Delayed(**arguments)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((32,), "size"),
        ((True,), "size"),
        ((16, -1), "sign_mask"),
        ((16, 0x10000), "sign_mask"),
        ((16, "0"), "sign_mask"),
        ((64, 1 << 64), "sign_mask"),
    ],
)
def test_hadamards_that_cannot_be(arguments, name):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=rf"Hadamard\.{name}: got"):
        Hadamard(*arguments)
    assert repr(Hadamard()) == "Hadamard(16, 0xd7e8)"
    assert repr(Hadamard(64, 3)) == "Hadamard(64, 0x0000000000000003)"


def test_eden_has_a_transform_and_blocks_with_scales_to_correct():
    cast = Cast("nvfp4", rounding="eden", hadamard=Hadamard(64))
    assert (cast.scale_rule, cast.is_stochastic, cast.transposes) == ("two_level_256", True, False)
    assert Cast("nvfp4", "two_level", "eden", Hadamard()).scale_rule == "two_level"
    assert "rounding 'eden'" in family_of(cast)[1]
    assert "64 points" in family_of(Cast("nvfp4", hadamard=Hadamard(64)))[1]
    recipe = CustomRecipe(Gemm(None, None), Gemm(cast, cast), Gemm(cast, cast))
    assert recipe.is_stochastic
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    with pytest.raises(InvalidValueError, match="the same Hadamard on both"):
        Gemm(cast, Cast("nvfp4", hadamard=Hadamard()))
    own = ScaledFormat("mine", E2M1, SCALE_E4M3, (1, 32), "tensor")
    for fmt, hadamard in (("nvfp4", None), ("nvfp4_2d", Hadamard()), ("mxfp4", Hadamard()), (own, Hadamard(64))):
        with pytest.raises(InvalidValueError, match=r"rounding: got 'eden' on .* needed 1x16 blocks whose scales"):
            Cast(fmt, rounding="eden", hadamard=hadamard)
    with pytest.raises(InvalidValueError, match="four_over_six"):
        Cast("nvfp4", "four_over_six", "eden", Hadamard())


def test_gemms_take_names_and_formats():
    assert Gemm("mxfp8", MXFP8) == Gemm(Cast("mxfp8"), Cast("mxfp8"))
    assert Gemm(None, None).is_high_precision
    assert not Gemm("mxfp8", None).is_high_precision
    assert Gemm("mxfp8", None).casts == (Cast("mxfp8"), None)
    assert (Gemm("mxfp8", "mxfp8").accumulate, Gemm("mxfp8", "mxfp8").path) == ("split", "auto")


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [("mxfp8", "mxfp4"), ("mxfp8_e5m2", "mxfp8"), ("mxfp6_e3m2", "mxfp4"), ("fp8_1x128", "fp8_128x128"),
     ("nvfp4", "nvfp4_2d"), ("fp8_row", "fp8_tensor"), ("nvfp4_row", "nvfp4_2d"), ("mxfp8_e5m2", None),
     (None, "fp8_tensor_e5m2")],
)  # fmt: skip
def test_operands_that_can_be_multiplied(lhs, rhs):
    Gemm(lhs, rhs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mxfp8", "nvfp4"), r"mxfp8 x nvfp4 \(E8M0 x E4M3 scales\).*Dequantize one of them by giving None"),
        (("fp8_tensor", "mxfp8"), "operands of one family"),
        (("mxfp8_e5m2", "mxfp8_e5m2"), "E5M2 x E5M2, needed at least one E4M3 operand"),
        (("fp8_tensor_e5m2", "fp8_row_e5m2"), "E5M2 x E5M2"),
        ((ROTATED, "nvfp4"), "the same Hadamard on both, or on neither"),
        ((ROTATED, Cast("nvfp4", hadamard=Hadamard(16, 0))), "cancels only when both share it"),
        (("mxfp8", "mxfp8", "slow"), "accumulate: got 'slow', needed one of 'fast', 'split', 'exact'"),
        (("mxfp8", "mxfp8", "fast", "fold"), "path: got 'fold'.*Did you mean 'folded'"),
        ((3, "mxfp8"), r"Gemm\.lhs: got int, needed a Cast, a format name, or None"),
        (("mxfp8", "mxfp9"), "Did you mean 'mxfp8"),
    ],
)  # fmt: skip
def test_gemms_that_cannot_be(arguments, message):
    """Features R12."""
    with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
        Gemm(*arguments)


def test_one_rotated_operand_is_fine_where_the_other_is_high_precision():
    """The rotated operand is dequantized, hence rotated back (docs/numerics.md, section 10)."""
    assert Gemm(Cast("nvfp4", hadamard=Hadamard()), None).rhs is None


def test_recipes_need_three_gemms():
    with pytest.raises(InvalidTypeError, match=r"CustomRecipe\.dgrad: got Cast, needed a Gemm"):
        CustomRecipe(Gemm("mxfp8", "mxfp8"), Cast("mxfp8"), Gemm(None, None))


def test_a_recipe_is_not_a_cast():
    with pytest.raises(InvalidTypeError, match=r"A Recipe has six Casts; take one, for example recipe\.fprop\.lhs"):
        as_cast(MXFP8BlockScaling())


# --- recipes of a user's own


def _own(decorate, **namespace):
    namespace = {"_table": lambda self: (Gemm("mxfp8", "mxfp8"),) * 3, **namespace}
    return decorate(type("Mine", (NamedRecipe,), namespace))


frozen = dataclasses.dataclass(frozen=True)


def test_a_recipe_of_a_users_own():
    mine = _own(frozen, __annotations__={"a": int}, a=1)
    assert mine() == mine(1) != mine(2)
    assert hash(mine()) == hash(mine(1))
    assert type("Bare", (MXFP8BlockScaling,), {})("HYBRID").fp8_format.name == "HYBRID"  # adds nothing that compares


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: _own(frozen, _table=lambda self: (Gemm(None, None),) * 2)(),
            InvalidTypeError,
            r"Mine\._table\(\): got",
        ),
        (lambda: _own(frozen, _table=lambda self: ("mxfp8",) * 3)(), InvalidTypeError, "needed three Gemms"),
        (lambda: _own(frozen, _table=lambda self: None)(), InvalidTypeError, "got None, needed three Gemms"),
        (lambda: frozen(type("Mine", (NamedRecipe,), {}))(), NotSupportedError, "Mine: got no method _table"),
        (lambda: _own(lambda cls: cls, __annotations__={"a": int}, a=1)(), InvalidTypeError, "@dataclass"),
        (lambda: _own(lambda cls: cls, __init__=NamedRecipe.__post_init__)(), InvalidTypeError, "@dataclass"),
        (
            lambda: _own(frozen, __annotations__={"a": list})([1]),
            InvalidTypeError,
            r"Mine\.a: got list, needed .* tuple",
        ),
    ],
)
def test_a_recipe_of_a_users_own_that_cannot_be(make, error, message):
    """Two that differ must never be equal: compiled code and plans are kept by recipe."""
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "what", [Cast("nvfp4"), Cast("nvfp4").of_gradient, Gemm("mxfp8", "mxfp8"), MXFP8BlockScaling()]
)
def test_a_hash_is_worked_out_once_and_stays_in_its_process(what):
    again = pickle.loads(pickle.dumps(what))
    value = hash(what)
    assert vars(what)["_hash"] == value == hash(again)
    assert "_hash" not in vars(pickle.loads(pickle.dumps(what)))


def test_equal_recipes_have_one_key_which_stays_in_its_process():
    def key_of(recipe):
        return getattr(recipe, "_key")  # noqa: B009

    recipe = MXFP8BlockScaling()
    found = key_of(recipe)
    again = pickle.loads(pickle.dumps(recipe)), copy.copy(recipe), copy.deepcopy(recipe)
    assert not any("_key" in vars(one) for one in again)
    assert all(key_of(one) is found for one in (*again, MXFP8BlockScaling()))
    for other in (MXFP8BlockScaling(path="exact"), CustomRecipe(recipe.fprop, recipe.dgrad, recipe.wgrad)):
        assert other != recipe
        assert key_of(other) is not found


def test_what_follows_from_a_cast_is_not_pickled_with_it():
    cast = Cast("nvfp4", rounding="stochastic")
    assert cast.is_stochastic
    assert cast.rule.two_level
    assert {"rule", "is_stochastic"} <= set(vars(cast))  # worked out once
    assert cast.of_gradient.is_stochastic
    for one in (cast, cast.of_gradient):
        state = one.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2]
        assert set(state) == {"format", "scale_rule", "rounding", "hadamard", "scaling"}
        again = pickle.loads(pickle.dumps(one))
        assert (type(again), again) == (type(one), one)
        assert (again.is_stochastic, again.tensor_scale, again.contents) == (True, "tensor", one.contents)
    assert cast.of_gradient.is_gradient
    assert not cast.is_gradient
