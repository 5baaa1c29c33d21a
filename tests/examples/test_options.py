"""The command line: which runs it asks for, and what it refuses."""

import os

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")
from gpt import options as gpt_options
from gpt.options import DEFAULT_RECIPES, PRESETS, plan_runs
from train_gpt import parse_options

from microfloat import recipes
from microfloat.errors import InvalidValueError
from microfloat.recipes import MXFP8BlockScaling, NVFP4BlockScaling


def test_bf16_is_always_the_first_run():
    assert [*plan_runs(["nvfp4", "bf16", "mxfp8", "nvfp4"])] == ["bf16", "nvfp4", "mxfp8"]
    assert plan_runs([]) == {"bf16": None}


def test_the_baseline_again_is_bf16():
    assert plan_runs(["bf16_again"]) == {"bf16": None, "bf16_again": None}


def test_the_default_is_four_runs():
    assert [*parse_options([]).runs] == DEFAULT_RECIPES == ["bf16", "fp8_current", "mxfp8", "nvfp4"]


def test_recipe_is_repeatable_and_takes_lists():
    options = parse_options(["--recipe", "mxfp8,mxfp4", "--recipe", "delayed"])
    assert [*options.runs] == ["bf16", "mxfp8", "mxfp4", "delayed"]
    assert options.runs["mxfp8"] == MXFP8BlockScaling()


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_stock_recipe_has_a_run(name):
    assert plan_runs([name]) == {"bf16": None, name: recipes.from_name(name)}


def test_ablations_switch_one_aid_off_each():
    runs = plan_runs(["bf16"], ["rht", "sr", "2d"])
    assert runs == {
        "bf16": None,
        "nvfp4-no-rht": NVFP4BlockScaling(disable_rht=True),
        "nvfp4-no-sr": NVFP4BlockScaling(disable_stochastic_rounding=True),
        "nvfp4-no-2d": NVFP4BlockScaling(disable_2d_quantization=True),
    }


@pytest.mark.parametrize(
    ("fraction", "last_in", "from_step", "blocks"),
    [("0", "steps", 100, []), ("0.15", "steps", 85, []), ("0.151", "steps", 84, []), ("0.15", "blocks", 100, [3]),
     ("0.5", "blocks", 100, [2, 3]), ("0.51", "blocks", 100, [1, 2, 3])],
)  # fmt: skip
def test_the_last_part_in_bf16(fraction, last_in, from_step, blocks):
    options = parse_options(["--steps", "100", "--layers", "4", "--last-fraction-bf16", fraction, "--last-in", last_in])
    assert options.bf16_from_step == from_step
    assert list(options.bf16_blocks) == blocks


def test_flags_override_the_preset():
    options = parse_options(["--preset", "tiny", "--layers", "3", "--lr", "0.01", "--name", "mine"])
    assert (options.layers, options.dim) == (3, PRESETS["tiny"]["dim"])
    assert options.lr == 0.01
    assert options.folder.as_posix() == "runs/mine"


def test_runs_share_the_cores_of_a_cpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(3)), raising=False)
    assert parse_options(["--device", "cpu"]).jobs == 3
    assert parse_options(["--device", "cpu", "--recipe", "mxfp8"]).jobs == 2
    assert parse_options(["--device", "cpu", "--jobs", "1"]).jobs == 1
    where = lambda name: (name, "cuda", "H200")  # noqa: E731
    options = gpt_options.parse_options([], "train_gpt.py", where, divides_cores=True)
    assert options.jobs == 1
    for kind, divides in (("cuda", True), ("cpu", False)):
        with pytest.raises(InvalidValueError, match="--jobs: got 2, needed 1"):
            gpt_options.parse_options(["--jobs", "2"], "x", lambda name: (name, kind, None), divides_cores=divides)  # noqa: B023


def test_124m_has_124_million_parameters():
    import torch
    from gpt.model import GPT

    options = parse_options(["--preset", "124m", "--device", "cpu"])
    with torch.device("meta"):
        model = GPT(options)
    assert sum(parameter.numel() for parameter in model.parameters()) == options.parameters
    assert round(options.parameters / 1e6) == 124


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recipe nvfp3", "--recipe: got 'nvfp3', .*'bf16'.*Did you mean 'nvfp4'"),
        ("--recipe bf61", "Did you mean 'bf16'"),
        ("--ablate rth", "--ablate: got 'rth', .*Did you mean 'rht'"),
        ("--steps 0", "--steps: got 0, needed a positive number"),
        ("--lr nan", "--lr: got nan"),
        ("--last-fraction-bf16 1.5", r"--last-fraction-bf16: got 1.5, needed a fraction in \[0, 1\)"),
        ("--dim 0", "--dim: got 0, needed a positive number"),
        ("--heads 3", "--dim, --heads: got 128 and 3"),
        ("--dim 33 --heads 2", "--dim, --heads: got 33 and 2, needed a --dim that splits into --heads parts"),
        ("--heads 0", "--heads: got 0, needed a positive number"),
        ("--layers 0", "--layers: got 0"),
        ("--hidden 0", "--hidden: got 0"),
        ("--context 0", "--context: got 0"),
        ("--device meta", "--device: got 'meta'"),
        ("--jobs 0", "--jobs: got 0, needed a positive number"),
        ("--device quantum", "--device: got 'quantum'"),
        ("--device cuda:99", "--device: got 'cuda:99'"),
        ("--name ../up", "--name: got ../up, needed a plain folder name"),
        ("--seed -1", "--seed: got -1"),
        ("--initial-weights no.safetensors", "--initial-weights: got no.safetensors, needed a file"),
        ("--device cpu --cuda-graph", "--cuda-graph: got a step on cpu, needed a CUDA device"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(InvalidValueError, match=message):  # which the command line shows as one line
        parse_options(arguments.split())
