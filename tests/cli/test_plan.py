"""`microfloat plan`: features O9."""

import json

import numpy as np
import pytest

from microfloat.cli.plan import Choice, allot
from tests.cli.checkpoints import llama, nvfp4_file, write

pytest.importorskip("typer", reason="typer is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A sharded bfloat16 checkpoint of two blocks."""
    return llama(tmp_path_factory.mktemp("model"))


def test_the_budget_goes_where_it_removes_most_noise():
    choices = {
        "quiet": [Choice("small", 4, 1.0), Choice("large", 8, 0.5)],
        "loud": [Choice("small", 4, 9.0), Choice("large", 8, 1.0), Choice("plain", 16, 0.0)],
    }
    assert {key: choice.format for key, choice in allot(choices, 8).items()} == {"quiet": "small", "loud": "small"}
    assert {key: choice.format for key, choice in allot(choices, 12).items()} == {"quiet": "small", "loud": "large"}
    assert {key: choice.format for key, choice in allot(choices, 16).items()} == {"quiet": "large", "loud": "large"}
    assert {key: choice.format for key, choice in allot(choices, 100).items()} == {"quiet": "large", "loud": "plain"}


def test_a_plan_stays_in_its_budget_and_is_a_placement(microfloat, model, tmp_path):
    from microfloat.recipes import Placement

    path = tmp_path / "rules.json"
    done = microfloat("plan", model, "--bits", 6, "--out", path, "--json")
    assert done.code == 0
    document = done.json
    assert 4.5 < document["bits"] <= 6
    formats = {row["name"]: row["format"] for row in document["layers"]}
    assert "lm_head.weight" not in formats
    for block in (0, 1):  # served as one matrix
        assert len({formats[f"model.layers.{block}.self_attn.{name}_proj.weight"] for name in "qkv"}) == 1
    assert json.loads(path.read_text()) == document["placement"]
    placement = Placement.from_json(path)
    chosen = placement.resolve([name.removesuffix(".weight") for name in formats])
    assert {name: recipe is None for name, recipe in chosen.items()} == {
        name.removesuffix(".weight"): fmt == "bf16" for name, fmt in formats.items()
    }


def test_a_plan_is_what_convert_reads(microfloat, model, tmp_path):
    """issue 39: the formats of a plan are those of the checkpoint, and the next commands are named."""
    path = tmp_path / "rules.json"
    done = microfloat("plan", model, "--bits", 6, "--out", path)
    assert f"microfloat convert {model} OUT --to ct:mixed --placement {path}" in " ".join(done.out.split())
    planned = {row["name"]: row["format"] for row in microfloat("plan", model, "--bits", 6, "--json").json["layers"]}
    assert {"nvfp4", "mxfp8"} <= set(planned.values())
    converted = microfloat("convert", model, tmp_path / "out", "--to", "ct:mixed", "--placement", path, "--json")
    assert converted.code == 0
    made = {row["name"]: row["format"] for row in converted.json["layers"]}
    assert {name: made[name] for name in planned} == {
        name: "bfloat16" if fmt == "bf16" else fmt for name, fmt in planned.items()
    }
    wrong = ("convert", model, tmp_path / "other", "--to", "ct:mixed", "--placement")
    microfloat(*wrong, tmp_path / "nowhere.json").refuses("--placement: got")
    microfloat(*wrong[:-1]).refuses("--placement FILE")
    path.write_text('{"rules": [["*.experts.*", "mxfp8"]]}')
    microfloat(*wrong, path).refuses("(rules[0])")


def test_the_experts_of_a_layer_get_one_format(microfloat, tmp_path):
    """The names of a file and the one module of a model both match; a tenth of one expert is large."""
    random = np.random.default_rng(0)
    matrices = {
        f"layers.{layer}.mlp.experts.{expert}.{name}": random.normal(size=(32, 32)).astype(np.float32)
        for layer in range(2) for expert in range(3) for name in ("gate_proj", "up_proj", "down_proj")
    }  # fmt: skip
    matrices["layers.1.mlp.experts.2.down_proj"][::10] *= 500
    write(tmp_path / "model.safetensors", {f"{name}.weight": array for name, array in matrices.items()})
    done = microfloat("plan", tmp_path, "--bits", 6.4, "--json")
    formats = {row["name"]: row["format"] for row in done.json["layers"]}
    assert [len({fmt for name, fmt in formats.items() if f"layers.{n}." in name}) for n in range(2)] == [1, 1]
    assert len(set(formats.values())) == 2
    patterns = [pattern for pattern, _ in done.json["placement"]["rules"]]
    assert patterns in (["layers.0.mlp.experts*", "*"], ["layers.1.mlp.experts*", "*"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["MODEL", "--bits", "4"], "4.5 or more"),
        (["MODEL", "--bits", "5", "--format", "nvfp4_row"], "formats that a recipe runs"),
        (["FILE", "--bits", "5"], "Convert it to bf16 first"),
        (["MODEL"], "--bits"),
        (["MODEL", "--bits", "nan"], "finite"),
        (["MODEL", "--bits", "5", "--out", "nowhere/plan.json"], "Create nowhere first"),
    ],
)
def test_a_wrong_question_exits_2(microfloat, model, tmp_path, words, named):
    places = {"MODEL": model, "FILE": nvfp4_file(tmp_path)}
    microfloat("plan", *[places.get(word, word) for word in words]).refuses(named)


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("formats", ["nvfp4,mxfp8,bf16", "nvfp4"])
def test_a_layer_that_is_not_finite_stays_in_high_precision(microfloat, tmp_path, value, formats):
    matrices = {name: np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) for name in "abcdefgh"}
    matrices["c"][3, 5] = float(value)
    write(tmp_path / "model.safetensors", {f"layers.{name}.weight": array for name, array in matrices.items()})
    done = microfloat("plan", tmp_path, "--bits", 7, "--format", formats, "--json")
    assert {row["name"]: row["format"] for row in done.json["layers"]}["layers.c.weight"] == "bf16"
    assert ["layers.c", None] in done.json["placement"]["rules"]
    assert "layers.c.weight" in microfloat("plan", tmp_path, "--bits", 7, "--format", formats).err
