"""A scale rule that a backend does not compute is refused in words, by every backend, never cast as another one."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat import reference  # noqa: E402
from microfloat.errors import NotSupportedError  # noqa: E402
from microfloat.formats import FORMATS, SCALE_E4M3, SCALE_E8M0, SCALE_FP32  # noqa: E402
from microfloat.passes.matrix import kernel_cast  # noqa: E402
from microfloat.recipes import Cast, CustomRecipe, Gemm  # noqa: E402
from microfloat.scale_rules import SCALE_RULES, ScaleRule, TwoLevel  # noqa: E402

NEW_KINDS = {
    "percentile": (ScaleRule("percentile", SCALE_FP32, "of a kind that nobody computes"), "fp8_tensor"),
    "percentile_of_rows": (ScaleRule("percentile_of_rows", SCALE_FP32, "the same"), "fp8_1x128"),
    "rounded_up": (ScaleRule("rounded_up", SCALE_E8M0, "another", thresholds="somewhere"), "mxfp8"),
    "least_error": (ScaleRule("least_error", SCALE_E8M0, "another", kind="search"), "mxfp4"),
    "one_level_search": (ScaleRule("one_level_search", SCALE_E4M3, "another"), "nvfp4"),
}
# Kinds that are known, with constants that kernels have compiled in otherwise.
NEW_NUMBERS = {
    "smaller_scales": TwoLevel(2688.0, smallest_scale=2.0**-9),
    "lower_scales": TwoLevel(2688.0, inverse_max=1 / 6, largest_scale=256.0),
    "another_error": TwoLevel(1536.0, smallest_amax=1536.0 * 2.0**-117, four_over_six="max"),
    "another_clamp": TwoLevel(1536.0, four_over_six="mae"),
}


@pytest.mark.parametrize("name", NEW_KINDS)
def test_a_rule_of_a_new_kind_is_refused(name, monkeypatch):
    rule, fmt = NEW_KINDS[name]
    monkeypatch.setitem(SCALE_RULES, name, rule)
    cast = Cast(fmt, name)
    numbers = kernel_cast(cast)
    assert numbers.family == ""
    assert repr(name) in numbers.refusal
    x = torch.randn(4, 64)
    with pytest.raises(NotSupportedError, match=f"the NumPy oracle: got the scale rule '{name}'"):
        reference.quantize(x.numpy(), cast)
    with pytest.raises(NotSupportedError, match=f"the reference backend: got the scale rule '{name}'"):
        mf.quantize(x, cast)
    layer = mf.Linear(64, 8, recipe=CustomRecipe(Gemm(cast, cast), Gemm(None, None), Gemm(None, None)))
    with pytest.raises(NotSupportedError, match=repr(name)):
        layer(x)


@pytest.mark.parametrize("name", NEW_KINDS)
def test_jax_refuses_it_too(name, monkeypatch):
    mj = pytest.importorskip("microfloat.jax", reason="jax is not installed")
    rule, fmt = NEW_KINDS[name]
    monkeypatch.setitem(SCALE_RULES, name, rule)
    with pytest.raises(NotSupportedError, match=f"the JAX front end: got the scale rule '{name}'"):
        mj.quantize(torch.randn(4, 64).numpy(), Cast(fmt, name))


@pytest.mark.parametrize("name", NEW_NUMBERS)
def test_kernels_refuse_constants_that_are_not_theirs(name, monkeypatch):
    monkeypatch.setitem(SCALE_RULES, name, ScaleRule(name, SCALE_E4M3, "", two_level=NEW_NUMBERS[name]))
    numbers = kernel_cast(Cast("nvfp4", name))
    assert numbers.family == ""
    assert repr(name) in numbers.refusal


def test_a_new_row_of_a_known_kind_is_served(monkeypatch):
    rule = ScaleRule("mine", SCALE_E8M0, "another threshold", thresholds={"E4M3": 0x123456})
    monkeypatch.setitem(SCALE_RULES, "mine", rule)
    assert kernel_cast(Cast("mxfp8", "mine")).scaled_cast.RULE == 0x123456
    x = torch.randn(4, 64)
    assert (
        mf.quantize(x, Cast("mxfp8", "mine")).scale.numpy().tobytes()
        == reference.quantize(x.numpy(), Cast("mxfp8", "mine")).scale.tobytes()
    )


def test_every_stock_rule_and_format_has_a_kernel():
    for fmt in FORMATS.values():
        for rule in SCALE_RULES.values():
            by_element = rule.thresholds if isinstance(rule.thresholds, dict) else {fmt.element.name: 0}
            if rule.scale == fmt.scale and fmt.element.name in by_element:
                assert kernel_cast(Cast(fmt, rule.name)).family, (fmt.name, rule.name)
