"""`explain` and the availability queries: answers about devices, without running anything."""

import pytest
import torch

import microfloat.torch as mf
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.recipes import RECIPES, CustomRecipe, Gemm


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_on_a_cpu_unaccelerated(name):
    explanation = mf.explain(name, device="cpu")
    assert [row.gemm for row in explanation.rows] == ["fprop", "dgrad", "wgrad"]
    assert {(row.backend, row.support.available, row.support.accelerated) for row in explanation.rows} == {
        ("reference", True, False)
    }
    assert not explanation.accelerated
    assert all(row.support.reason in str(explanation) for row in explanation.rows)


def test_a_high_precision_gemm_is_told_apart():
    recipe = CustomRecipe(Gemm("mxfp8", "mxfp8"), Gemm("mxfp8", None), Gemm(None, None))
    backends = [row.backend for row in mf.explain(recipe, device="cpu").rows]
    assert backends == ["reference", "reference", "torch"]


def test_a_gpu_that_is_not_there_is_answered_and_not_raised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    explanation = mf.explain("nvfp4", device="cuda")
    assert not any(row.support.available for row in explanation.rows)
    assert "no CUDA device" in str(explanation)
    available, reason = mf.is_nvfp4_available("cuda")
    assert not available
    assert "no CUDA device" in reason
    assert mf.is_nvfp4_available()
    with pytest.raises(InvalidValueError, match="backend"):
        mf.explain("nvfp4", device="cuda", backend="tritn")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"device": 3}, InvalidTypeError),
        ({"device": "no such device"}, InvalidValueError),
        ({"shape": (1, 2)}, InvalidValueError),
        ({"shape": (1, 2, -3)}, InvalidValueError),
        ({"backend": "tritn"}, InvalidValueError),
    ],
)
def test_wrong_arguments_are_named(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        mf.explain("mxfp8", **arguments)


def test_the_data_says_what_the_table_says():
    data = mf.explain("mxfp8", device="cpu").to_dict()
    assert [gemm["gemm"] for gemm in data["gemms"]] == ["fprop", "dgrad", "wgrad"]
    assert data["gemms"][0]["operands"] == "mxfp8 x mxfp8"
