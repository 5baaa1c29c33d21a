"""Findings about whole checkpoints: ignore lists of three dialects, fused groups, NaN, others (features K7, I7)."""

import ml_dtypes
import numpy as np
import pytest

from microfloat import reference
from microfloat.checkpoint import Record, convert, load, save
from microfloat.checkpoint.config import announced
from microfloat.errors import CheckpointError, InvalidTypeError
from tests.checkpoint.files import nvfp4, write


def layer(name, **changes):
    parts = {**nvfp4(), **changes}
    keys = {"codes": "weight", "scale": "weight_scale", "global": "weight_scale_2"}
    return {f"{name}.{keys[role]}": array for role, array in parts.items()}


@pytest.mark.parametrize(
    ("config", "ignored", "kept"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.mtp*"]}, "model.mtp.0", "a.model.mtp"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["a.gate"],
          "producer": {"name": "modelopt", "version": "0.33.0"}}, "a.gate_proj", "a.up"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["a.gate"],
          "producer": {"name": "microfloat", "version": "0.1.0"}}, "a.gate", "a.gate_proj"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["re:.*gate$", "b"]},
         "x.gate", "x.gate_proj"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["gate"]}, "a.gate.b", "a.up"),
    ],
)  # fmt: skip
def test_ignore_lists_in_the_dialect_of_each_producer(config, ignored, kept):
    (found,) = announced({"config.json": {"quantization_config": config}})
    assert found.ignored(ignored)
    assert not found.ignored(kept)


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*a*" * 5]}, "*a*" * 5),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["re:(a+)+$", "re:b"]},
         "re:(a+)+$"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
          "config_groups": {"group_0": {"targets": ["re:(", "Linear"]}}}, "re:("),
    ],
)  # fmt: skip
def test_patterns_that_are_not_followed_are_named(config, pattern):
    """They would be silently taken for ones that cover nothing."""
    (found,) = announced({"config.json": {"quantization_config": config}})
    (finding,) = found.findings
    assert f"the pattern {pattern!r} is no regular expression, or might" in finding.message


@pytest.mark.parametrize("config", [{}, {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}])
def test_a_configuration_of_no_weights_is_that_of_a_plain_checkpoint(config, tmp_path):
    """ModelOpt writes the second where the KV cache alone is quantized."""
    tensors = {"a.k_proj.weight": np.ones((4, 32), np.float32), "a.k_proj.k_scale": np.float32(2)}
    found = load(write(tmp_path / "model.safetensors", tensors, config=config))
    assert (found.detection.family, sorted(found), found.findings) == ("plain", sorted(tensors), [])


def test_an_empty_configuration_hides_none_of_the_text_model():
    config = {"quantization_config": {}, "text_config": {"quantization_config": {"quant_method": "fp8"}}}
    (found,) = announced({"config.json": config})
    assert "quant_method 'fp8'" in found.text


@pytest.mark.parametrize("text", ["[1]", '"x"', "3", "null"])
def test_a_configuration_that_is_no_object_says_nothing(text, tmp_path):
    path = write(tmp_path / "model.safetensors", layer("a"))
    (tmp_path / "config.json").write_text(text)
    assert load(path).config == {}
    assert convert(path, tmp_path / "out", to="ct:nvfp4").verified


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"pattern": 3}, "pattern: got int, needed a shell pattern"), ({"strict": "no"}, "strict: got str, needed True")],
)
def test_wrong_arguments_are_named(arguments, words, tmp_path):
    with pytest.raises(InvalidTypeError, match=words):
        load(write(tmp_path / "model.safetensors", layer("a")), **arguments)


def test_fused_groups_that_differ_and_configurations_that_disagree(tmp_path):
    tensors = {**layer("mlp.gate_proj"), **layer("mlp.up_proj", **{"global": np.float32(1)})}
    config = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["mlp.up_proj"]}
    findings = load(write(tmp_path / "model.safetensors", tensors, config=config)).findings
    by_id = {finding.id: finding for finding in findings}
    assert "factor of 4" in by_id["fused-mismatch"].message
    assert "the fused group gate_up_proj differs" in by_id["fused-mismatch"].message
    assert (by_id["fused-mismatch"].severity, by_id["fused-mismatch"].tensor) == ("warn", "mlp")
    assert sum(finding.id == "config-disagrees" for finding in findings) == 2


def test_a_weight_without_a_module_is_named_in_a_configuration_of_several_formats(tmp_path):
    values = np.ones((32, 64), np.float32)
    formats = {"a.weight": "mxfp8", "weight": "nvfp4"}
    records = [
        Record(name, q.codes, q.scale, q.tensor_scale, q.format, q.shape)
        for name, fmt in formats.items()
        for q in (reference.quantize(values, fmt),)
    ]
    save(records, tmp_path / "mixed", format="ct:mixed")
    found = load(tmp_path / "mixed")
    assert {name: str(found[name].format) for name in found} == formats
    assert not found.findings


def test_foreign_states_orphans_and_refused_methods(tmp_path):
    tensors = {**layer("a"), "a._extra_state": np.zeros(3, np.uint8), "b.weight_scale": np.zeros(2, np.float32)}
    with pytest.warns(UserWarning, match="_extra_state"):
        checkpoint = load(write(tmp_path / "model.safetensors", tensors))
    assert list(checkpoint) == ["a.weight", "b.weight_scale"]
    assert {finding.id for finding in checkpoint.findings} == {"extra-state", "orphan"}
    write(tmp_path / "model.safetensors", tensors, config={"quant_method": "fouroversix"})
    with pytest.raises(CheckpointError, match="fouroversix"):
        load(tmp_path)


def test_nan_becomes_zero_where_it_is_asked_for(tmp_path):
    scale = np.full((4, 2), 1, np.float32).astype(ml_dtypes.float8_e4m3fn)
    scale[1] = np.nan
    path = write(tmp_path / "model.safetensors", layer("a", scale=scale))
    assert np.isnan(load(path, strict=False)["a.weight"].dequantize()[1]).all()
    values = load(path, nan="zero")["a.weight"].dequantize()
    assert not values[1].any()
    assert values[0].any()
    assert np.isfinite(values).all()
