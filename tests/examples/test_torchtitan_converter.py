"""examples/torchtitan_converter.py: a converter by torchtitan's protocol, in a trainer in miniature."""

import runpy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.recipes import RECIPES  # noqa: E402


@pytest.fixture
def example(repository):
    return runpy.run_path(str(repository / "examples" / "torchtitan_converter.py"))


@pytest.mark.slow_cases("examples: runs with further settings", all_but=("delayed",))
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_recipe_trains(example, recipe):  # features B8
    job = example["JobConfig"](example["Settings"](recipe, high_precision=("layers.1.*", "layers.7.*")))
    model, (converter,), losses = example["train"](job)
    assert losses[-1] < 0.8 * losses[0]
    (report,) = converter.reports
    assert set(report.skipped) == {"output", *(f"layers.1.w{index}" for index in (1, 2, 3))}
    state = model.state_dict()
    plain = example["Model"]()
    plain.load_state_dict(mf.plain_state_dict(model))
    if recipe == "delayed":  # the hook has brought the gradient of the last step in
        assert state["layers.0.w1.scaling_dy_amax_history"].count_nonzero() > 1
        assert float(state["layers.0.w1.scaling_dy_scale"]) != 1.0


def test_parts_of_a_pipeline_convert_one_by_one(example):
    (converter,) = example["build"](["microfloat"], example["JobConfig"]())
    parts = [torch.nn.Sequential(torch.nn.Linear(16, 16)), torch.nn.Sequential(torch.nn.Linear(16, 8))]
    for part in parts:
        converter.convert(part)
    converter.post_optimizer_hook(parts)
    assert all(part[0].effective_recipe() == mf.recipes.from_name("fp8_current") for part in parts)


def test_settings_build_their_converter(example):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    example["Settings"]("mxfp8").build(parallel_dims=None, model_compile_enabled=True).convert(model)
    assert model[0].effective_recipe() == mf.recipes.from_name("mxfp8")


def test_names_are_known_once(example):
    with pytest.raises(ValueError, match="'float9'"):
        example["build"](["float9"], example["JobConfig"]())
    with pytest.raises(ValueError, match="registered already"):
        example["register"]("microfloat")(object)
