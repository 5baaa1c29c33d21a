"""Serving a trained model in every format: what each costs is measured against the plain model, on the same windows.

Features N14.
"""

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import post_training
import study
import torch
from pretraining.model import SIZES
from pretraining.run import Run
from pretraining.text import Text

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text():
    """Random tokens of two kinds."""
    draw = np.random.default_rng(0)
    streams = {kind: draw.integers(0, 64, 3000).astype("<u2") for kind in ("code", "prose")}
    return Text(streams, {kind: stream[:900] for kind, stream in streams.items()}, 64, {"text": "random"})


@pytest.fixture(scope="module")
def weights(text, tmp_path_factory):
    """The file of a model with its first weights."""
    file = tmp_path_factory.mktemp("trained") / "bf16.0.safetensors"
    study.save_weights(Run("bf16", 0, SIZES["seconds"], text, CPU), file)
    return file


def options(weights, *more):
    """The command line of a small call."""
    return post_training.parse([str(weights), "--device", "cpu", "--tokens", "64", "--batch", "2", *more])


def test_what_each_way_costs_is_measured_on_the_same_windows(text, weights, monkeypatch, capsys):
    model, size, facts = post_training.load(weights, text)
    assert facts["row"] == "bf16"
    assert size == SIZES["seconds"]
    names = ('WeightOnly("mxfp8")', 'WeightOnly("mxfp4")', 'KVCache(format="mxfp4")', post_training.PLAIN)
    chosen = [way for way in post_training.ways() if way.name in names]
    monkeypatch.setattr(post_training, "ways", lambda: chosen)
    results = post_training.compare(model, size, text, options(weights))
    assert [one["name"] for one in results] == [way.name for way in chosen]
    assert [one["bits"] for one in results] == [16.0, 8.25, 4.25, 4.5]  # heads of half a block
    plain, eight, four, cache = (one["divergence"]["prose"][0] for one in results)
    assert plain == 0.0 < eight < four
    assert 0.0 < cache < four
    assert all(one["above"][kind][1] < 0.1 for one in results for kind in text.held_out)
    assert capsys.readouterr().out.count("bits") == len(chosen)
    assert all(block.cache is None for block in model.blocks)  # it stays as it was
    assert all(type(block.qkv) is torch.nn.Linear for block in model.blocks)


def test_static_scales_are_measured_on_training_text(text, weights):
    model, size, _ = post_training.load(weights, text)
    way = next(way for way in post_training.ways() if 'scales="static"' in way.name)
    tokens = torch.from_numpy(text.batch(0, 0, 4, size.context))[:, :-1]
    made, _ = post_training.serve(model, way, lambda one: post_training.log_probabilities(one, tokens))
    assert all(layer.input_amax > 0 for layer in made.blocks.modules() if isinstance(layer, torch.nn.Linear))


def test_gptq_sees_training_text_before_it_chooses_codes(text, weights):
    model, size, _ = post_training.load(weights, text)
    tokens = torch.from_numpy(text.batch(0, 0, 4, size.context))[:, :-1]
    made = {}
    for way in post_training.ways():
        if way.name.startswith('WeightOnly("nvfp4")'):
            one, bits = post_training.serve(model, way, lambda one: post_training.log_probabilities(one, tokens))
            made[way.method] = one.blocks[0].down.weight
            assert bits == pytest.approx(4.5, abs=0.02)
    assert {*made} == {"nearest", "gptq"}
    assert not torch.equal(made["gptq"].codes, made["nearest"].codes)


def test_errors_of_gradients_are_those_of_the_recipe(text, weights, monkeypatch):
    model, size, _ = post_training.load(weights, text)
    monkeypatch.setattr(post_training, "RECIPES", ("bf16", "mxfp8", "mxfp4"))
    bf16, mxfp8, mxfp4 = post_training.gradients(model, size, text, options(weights))
    layers = {f"blocks.0.{name}" for name in ("qkv", "out", "gate_up", "down")}
    assert {*bf16["cosine"]} == {*mxfp8["sqnr"]["wgrad"]} == {*mxfp4["sqnr"]["fprop"]} == layers
    assert bf16["sqnr"] == {}
    assert len({*mxfp8["sqnr"]["fprop"].values()}) == len(layers)  # measured, and not what is expected of the format
    for layer in layers:
        assert bf16["cosine"][layer] > mxfp8["cosine"][layer] > mxfp4["cosine"][layer] > 0.5
        assert all(mxfp8["sqnr"][gemm][layer] > mxfp4["sqnr"][gemm][layer] for gemm in ("fprop", "dgrad", "wgrad"))


def test_a_file_of_something_else_is_refused(tmp_path, capsys):
    assert post_training.main([str(tmp_path / "none")]) == 2
    other = tmp_path / "other.safetensors"
    study.save_file({"a": torch.ones(1)}, other)
    assert post_training.main([str(other)]) == 2
    assert "which `study.py run --keep` has not written" in capsys.readouterr().err


@pytest.mark.slow("every way to serve a model, and every recipe")
def test_all_results_go_to_one_file(tmp_path):
    command = ["run", "--size", "seconds", "--out", str(tmp_path), "--rows", "bf16", "--seeds", "0", "--keep", "bf16"]
    assert study.main(command) == 0
    file = tmp_path / "all.json"
    command = [str(tmp_path / "bf16.0.safetensors"), "--device", "cpu", "--tokens", "64", "--batch", "2"]
    assert post_training.main([*command, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert [one["name"] for one in found["served"]] == [way.name for way in post_training.ways()]
    assert [one["row"] for one in found["gradients"]] == [*post_training.RECIPES]
    assert all(np.isfinite(value) for one in found["served"] for value, _ in one["above"].values())
