"""`explain` and the availability queries: answers about devices, without running anything."""

import json

import pytest
import torch

import microfloat.torch as mf
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.recipes import RECIPES, CustomRecipe, Gemm, MXFP8BlockScaling


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
    ("device", "architecture", "accelerated", "tried"),
    [
        ("h200", "sm_90", True, True),
        ("Hopper", "sm_90", True, True),
        ("sm_90a", "sm_90", True, True),
        ("a100", "sm_80", False, False),
        ("RTX 4090", "sm_89", False, False),
        ("sm_100", "sm_100", True, False),
        ("b200", "sm_100", True, False),
        ("rtx5090", "sm_120", True, False),
    ],
)
def test_a_gpu_by_name_is_answered_without_it(monkeypatch, device, architecture, accelerated, tried):
    pytest.importorskip("triton", reason="triton is not installed: then explain rightly names the reference backend")
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)  # nothing asks for hardware
    explanation = mf.explain("mxfp8", device)
    assert architecture in explanation.device
    assert explanation.to_dict()["device"].startswith(device)
    assert explanation.accelerated is accelerated
    assert all(row.support.available for row in explanation.rows)
    assert all(("not yet run on the hardware" in row.support.reason) is not tried for row in explanation.rows)
    shape = (4096, 4096, 4096)
    assert (mf.explain("mxfp8", device, shape=shape).prediction is not None) is tried
    assert mf.is_mxfp8_available(device).accelerated is accelerated
    assert mf.explain("mxfp8", device, backend="reference").rows[0].backend == "reference"


@pytest.mark.parametrize("device", ["h9000", "sm_6", "sm_61", "sm", "cuda:x", ""])
def test_other_words_are_no_gpus(device):
    with pytest.raises(InvalidValueError, match="'h200' or 'sm_100'"):
        mf.explain("mxfp8", device)


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


@pytest.mark.parametrize(
    ("name", "shape", "small"),
    [
        ("fp8_current", (64, 1024, 1024), True),
        ("fp8_current", (16384, 4096, 14336), False),
        ("delayed", (4096, 2048, 2048), True),
        ("mxfp8", (2048, 4096, 4096), True),
        ("mxfp8", (16384, 8192, 8192), False),
        ("nvfp4", (64, 1024, 1024), False),  # bfloat16 is faster on a Hopper at every size: size is not the reason
    ],
)
def test_a_shape_on_a_gpu_is_told_whether_it_is_small(name, shape, small):
    explanation = mf.explain(name, device="cuda", shape=shape)
    assert explanation.prediction.is_small is small
    assert ("small: bfloat16 is faster" in str(explanation)) is small
    assert explanation.to_dict()["prediction"]["small"] is small
    assert (explanation.prediction.limit < 1) is (name == "nvfp4")
    assert mf.explain(name, device="cuda").prediction is None
    assert mf.explain(name, device="cpu", shape=shape).prediction is None


def test_predictions_agree_with_what_was_measured(repository):
    """Within a fifth of the ratios of docs/performance.md, so that the rule says what the tables say."""
    rows = json.loads((repository / "benchmarks/results/linear.json").read_text())["rows"]
    names = {"delayed": "delayed", "current": "fp8_current", "row": "fp8_row", "block": "fp8_block"}
    names |= {"mxfp8.folded": "mxfp8", "mxfp4.folded": "mxfp4", "nvfp4": "nvfp4"}
    compared = set()
    for row in rows:
        if row.get("recipe") not in names or "ratio" not in row or row["id"].startswith("l.fwd"):
            continue
        name, shape = names[row["recipe"]], tuple(row["shape"])
        prediction = mf.explain(name, device="cuda", shape=shape).prediction
        predicted = getattr(prediction, row["mode"])
        assert row["ratio"] / 1.2 < predicted < row["ratio"] * 1.2, (name, shape, row["mode"])
        compared.add((name, row["mode"]))
    assert compared == {*((name, "eager") for name in names.values()), ("fp8_current", "graph")}


def test_a_shape_says_whose_gemm_runs(monkeypatch):
    """What is said of GEMMs with 1x128 scales is what `is_faster` decides by, for each GEMM's own sizes."""
    pytest.importorskip("triton", reason="triton is not installed: then explain rightly names the reference backend")
    from microfloat.torch.backends.native import _block_gemm

    monkeypatch.setattr(_block_gemm, "is_there", lambda: True)

    def own(recipe, shape, device="h200"):
        return ["microfloat's" in row.kernel for row in mf.explain(recipe, device, shape=shape).rows]

    large = (16384, 4096, 14336)
    for recipe in ("fp8_block", "mxfp8", "mxfp4"):
        assert own(recipe, large) == [True, True, True]
        assert own(recipe, (4096, 2048, 2048)) == [False, False, False]
        assert own(recipe, (16384, 2048, 14336))[0] is False  # fprop contracts 2048
        assert own(recipe, (16384, 14336, 2048))[1] is False  # dgrad 2048
        assert all("large ones by" in row.kernel for row in mf.explain(recipe, "h200").rows)
        assert own(recipe, (16381, 4096, 14331)) == [True, True, True]  # padded
    hybrid = MXFP8BlockScaling("HYBRID")
    assert own(hybrid, large) == [True, False, False]  # the kernel multiplies E4M3 alone
    for recipe in ("fp8_current", "nvfp4", MXFP8BlockScaling(path="exact")):
        assert own(recipe, large) == [False, False, False]
    assert own("fp8_block", large, "b200") == [False, False, False]
    monkeypatch.setattr(_block_gemm, "is_there", lambda: False)
    assert own("fp8_block", large) == [False, False, False]
