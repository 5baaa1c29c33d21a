"""Scale formats and scale rules of a user's own in torch: the oracle's bytes, no kernel, and refusals in words."""

import json
import pickle

import numpy as np
import pytest
import torch

import microfloat.torch as mf
from microfloat import reference
from microfloat.chips import Chip
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.formats import E2M1, E2M3, SCALE_E4M3, SCALE_E8M0, SCALE_FP32, ScaledFormat
from microfloat.passes.matrix import kernel_cast
from microfloat.recipes import Cast, CustomRecipe, Gemm, Recipe
from microfloat.routes import route_of
from microfloat.scale_rules import SCALE_RULES, ScaleRule, TwoLevel
from microfloat.torch.backends import pretend
from tests.formats.elements import UE5M3, own_casts, wild_matrix

CASTS = own_casts()


def ordinary():
    return np.random.default_rng(1).standard_t(4, (33, 50)).astype(np.float32)


@pytest.mark.parametrize("name", CASTS)
def test_bytes_and_values_are_the_oracles(name):
    cast = CASTS[name]
    for x in (wild_matrix(), ordinary(), ordinary() * np.float32(1e-4)):
        ours, oracle = mf.quantize(torch.from_numpy(x), cast, seed=3), reference.quantize(x, cast, seed=3)
        assert ours.codes.view(torch.uint8).numpy().tobytes() == oracle.codes.tobytes()
        assert ours.scale.numpy().tobytes() == oracle.scale.tobytes()
        assert (ours.tensor_scale is None) == (oracle.tensor_scale is None)
        assert ours.tensor_scale is None or ours.tensor_scale.numpy().tobytes() == oracle.tensor_scale.tobytes()
        np.testing.assert_array_equal(ours.dequantize().numpy(), reference.dequantize(oracle))
    a, b = (mf.quantize(torch.from_numpy(ordinary()), cast, seed=seed) for seed in (1, 2))
    exact = reference.scaled_matmul(*(reference.quantize(ordinary(), cast, seed=seed) for seed in (1, 2)))
    np.testing.assert_allclose(mf.scaled_matmul(a, b).numpy(), exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("name", CASTS)
def test_they_are_written_and_read(name):
    cast = CASTS[name]
    recipe = CustomRecipe(*[Gemm(cast, cast)] * 3) if not cast.is_stochastic else CustomRecipe(*[Gemm(cast, None)] * 3)
    again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert again == recipe
    assert (again.fprop.lhs.rule, again.fprop.lhs.contents) == (cast.rule, cast.contents)
    assert pickle.loads(pickle.dumps(cast)) == cast
    assert str(cast.scale_rule) in str(recipe)


@pytest.mark.parametrize(
    ("cast", "word"),
    [
        (Cast(ScaledFormat("mine", E2M1, UE5M3, (1, 16))), "scale UE5M3, which is not one of the stock scales"),
        (Cast(ScaledFormat("mine", E2M3, SCALE_E4M3, (1, 16), "tensor")), "element E2M3 under E4M3 scales"),
        (CASTS["threshold"], "element INT4, which is not one of the stock elements"),
    ],
)
def test_kernels_refuse_what_they_do_not_know(cast, word):
    assert word in kernel_cast(cast).refusal
    for chip in ((8, 0), (9, 0), (10, 0)):
        for path in ("auto", "folded"):
            route = route_of(Gemm(cast, cast, path=path), Chip(chip))
            assert not route.accelerated
            assert route.forms == ("codes", "codes") or "values" in route.forms
    x = torch.randn(4, 32)
    with pretend(chip="h200", interpreted=False):
        assert mf.quantize(x, cast).codes.view(torch.uint8).numpy().tobytes() == (
            reference.quantize(x.numpy(), cast).codes.tobytes()
        )
        assert f"no kernel for {word}" in str(mf.explain(CustomRecipe(*[Gemm(cast, cast)] * 3)))


def test_a_rule_by_value_is_checked_and_a_stock_one_keeps_its_name():
    assert Cast("mxfp4", SCALE_RULES["floor"]) == Cast("mxfp4", "floor")
    with pytest.raises(InvalidValueError, match=r"ScaleRule\.name: got 'floor' for other numbers"):
        Cast("mxfp4", ScaleRule("floor", SCALE_RULES["floor"].scale, thresholds=7))
    with pytest.raises(InvalidValueError, match=r"a rule that writes E4M3 scales.*Choose one of two_level"):
        Cast("nvfp4", ScaleRule("mine", SCALE_RULES["floor"].scale, thresholds=7))
    assert Cast("fp8_1x128", ScaleRule("mine", SCALE_FP32, power_of_two=True)).rule.kind == "ratio"
    with pytest.raises(InvalidValueError, match="scale: got E8M0, needed a scale format with a mantissa"):
        TwoLevel.of(E2M1, SCALE_E8M0)
    with pytest.raises(InvalidValueError, match=r"headroom: got 0, needed a number from 0\.25 to 4"):
        TwoLevel.of(E2M1, UE5M3, headroom=0)
    fmt = ScaledFormat("mine", E2M1, UE5M3, (1, 16), "tensor")
    with pytest.raises(InvalidTypeError, match=r"TwoLevel\.capacity: got str"):
        Cast(fmt, ScaleRule("mine", UE5M3, two_level=TwoLevel("a")))
    with pytest.raises(InvalidValueError, match=r"TwoLevel\.smallest_amax: got .*, needed a float32 number in \["):
        Cast(fmt, ScaleRule("mine", UE5M3, two_level=TwoLevel(688128.0, 0.125, largest_scale=448.0)))
    with pytest.raises(InvalidValueError, match=r"TwoLevel\.inverse_max: got 0\.1, .*Use 0\.10000000149011612"):
        Cast(fmt, ScaleRule("mine", UE5M3, two_level=TwoLevel(688128.0, 0.1, 0.0, 448.0, 1e-20)))


def test_a_recipe_of_own_scales_trains_and_shows_overflow():
    cast = CASTS["one level"]
    recipe = CustomRecipe(Gemm(cast, cast), Gemm(cast, cast), Gemm(cast, cast))
    layer = mf.Linear(32, 16, recipe=recipe)
    layer(torch.randn(20, 32)).square().sum().backward()
    assert layer.weight.grad.isfinite().all()
    x, dy = torch.randn(4, 32), torch.randn(4, 16)
    dy[1, 2] = torch.inf  # an overflow shows in dw
    assert not torch.autograd.grad(layer(x), layer.weight, dy)[0].isfinite().all()
