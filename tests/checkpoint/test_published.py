"""Dialects as their producers publish them: tiny files of the same names, dtypes and entries, decoded here by hand."""

import json

import ml_dtypes
import numpy as np
import pytest

from microfloat.checkpoint import convert, detect, load
from microfloat.errors import CheckpointError
from tests.checkpoint.files import write

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E8M0 = ml_dtypes.float8_e8m0fnu


def fp4(rows, length, seed=0, group=32):
    """Packed codes, E8M0 bytes and the values that they stand for."""
    rng = np.random.default_rng(seed)
    codes, scale = rng.integers(0, 256, (rows, length // 2), np.uint8), rng.integers(120, 132, (rows, length // group))
    values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(rows, length)
    return codes, scale.astype(np.uint8), values * np.exp2(scale - 127.0).repeat(group, 1).astype(np.float32)


def fp8(rows, length, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, length)).astype(ml_dtypes.float8_e4m3fn)


# ---- AMD Quark -------------------------------------------------------------------------------------------------------


def of_mx(dtype, dynamic=False):
    return {
        "dtype": dtype, "is_dynamic": dynamic, "qscheme": "per_group", "ch_axis": -1, "group_size": 32,
        "symmetric": None, "round_method": "half_even", "scale_type": "float", "scale_format": "e8m0",
        "scale_calculation_mode": "even", "mx_element_dtype": None, "observer_cls": "PerBlockMXObserver",
        "is_scale_quant": False,
    }  # fmt: skip


def of_fp8(qscheme="per_tensor", dynamic=False, **more):
    return {
        "dtype": "fp8_e4m3",
        "is_dynamic": dynamic,
        "qscheme": qscheme,
        "scale_format": None,
        "group_size": None,
    } | more


def of_layer(weight, inputs=None):
    return {"bias": None, "input_tensors": inputs, "output_tensors": None, "target_device": None, "weight": weight}


def quark(weight, inputs=None, **more):
    export = {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder", "weight_format": "real_quantized"}
    return {
        "algo_config": None, "exclude": ["lm_head", "re:.*mlp.gate$"], "export": export, "quant_method": "quark",
        "global_quant_config": of_layer(weight, inputs), "kv_cache_post_rope": False, "kv_cache_quant_config": {},
        "layer_quant_config": {}, "layer_type_quant_config": {}, "quant_mode": "eager_mode", "version": "0.11",
        "softmax_quant_spec": None, **more,
    }  # fmt: skip


def test_mxfp4_of_quark(tmp_path):
    codes, scale, values = fp4(4, 64)
    plain = np.ones((2, 64), ml_dtypes.bfloat16)
    tensors = {"m.up.weight": codes, "m.up.weight_scale": scale, "m.mlp.gate.weight": plain, "lm_head.weight": plain}
    path = write(tmp_path / "model.safetensors", tensors, config=quark(of_mx("fp4"), of_mx("fp4", True)))
    loaded, found = load(tmp_path), detect(tmp_path)
    assert (found.family, found.confidence, loaded.findings) == ("quark:mxfp4", 1.0, [])
    assert np.array_equal(loaded["m.up.weight"].dequantize(), values)
    activation = loaded["m.up.weight"].activation
    assert (activation["scheme"], activation["format"].name) == ("dynamic", "mxfp4")
    report = convert(path.parent, tmp_path / "out", to="ct:mxfp4")
    assert {layer.name: layer.action for layer in report.layers}["m.up.weight"] == "carried"


def test_mxfp6_of_quark_holds_four_codes_in_three_bytes(tmp_path):
    bits = np.random.default_rng(1).integers(0, 64, (3, 32))
    word = (bits.reshape(3, 8, 4) << np.array([0, 6, 12, 18])).sum(-1)
    codes = np.stack([word & 255, word >> 8 & 255, word >> 16], -1).reshape(3, 24).astype(np.uint8)
    tensors = {"a.weight": codes, "a.weight_scale": np.full((3, 1), 128, np.uint8)}
    for dtype, fmt in (("fp6_e3m2", ml_dtypes.float6_e3m2fn), ("fp6_e2m3", ml_dtypes.float6_e2m3fn)):
        write(tmp_path / "model.safetensors", tensors, config=quark(of_mx(dtype)))
        record = load(tmp_path)["a.weight"]
        assert record.source.family == f"quark:mx{dtype}"
        assert np.array_equal(record.dequantize(), 2 * bits.astype(np.uint8).view(fmt).astype(np.float32))
        assert record.activation["scheme"] == "none"


@pytest.mark.parametrize(
    ("weight", "scale", "inputs", "scheme"),
    [
        (of_fp8(), np.float32(0.5), of_fp8(), "static"),
        (of_fp8(), np.float32(0.25), of_fp8(dynamic=True), "dynamic"),
        (of_fp8("per_channel", ch_axis=0), np.float32([0.5, 1, 2]), of_fp8("per_channel", True, ch_axis=1), "dynamic"),
        (of_fp8("per_block", block_size=[2, 16]), np.float32([[1, 2], [4, 8]]), None, "none"),
    ],
    ids=["static", "dynamic", "row", "tiles"],
)
def test_fp8_of_quark(weight, scale, inputs, scheme, tmp_path):
    codes = fp8(3, 32)
    tensors = {"a.weight": codes, "a.weight_scale": scale}
    if scheme == "static":
        tensors["a.input_scale"] = np.float32(0.125)
    write(tmp_path / "model.safetensors", tensors, config=quark(weight, inputs))
    loaded = load(tmp_path)
    grid = scale[:, None] if scale.ndim == 1 else scale
    grid = grid.repeat(2, 0).repeat(16, 1)[:3] if scale.ndim == 2 else grid
    assert [one.id for one in loaded.findings if one.severity != "info"] == []
    assert np.array_equal(loaded["a.weight"].dequantize(), codes.astype(np.float32) * grid)
    assert loaded["a.weight"].activation["scheme"] == scheme


def test_nvfp4_of_quark_has_two_descriptions_of_each_tensor(tmp_path):
    codes, _, values = fp4(4, 32, group=16)
    values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(4, 32) * np.float32(0.25)
    tensors = {
        "a.weight": codes, "a.weight_scale": np.ones((4, 2), ml_dtypes.float8_e4m3fn),
        "a.weight_scale_2": np.float32(0.25), "a.input_scale_2": np.float32(0.5),
    }  # fmt: skip
    block = {"dtype": "fp4", "qscheme": "per_group", "group_size": 16}
    weight, inputs = [block, of_fp8()], [{**block, "is_dynamic": True}, of_fp8()]
    write(tmp_path / "model.safetensors", tensors, config=quark(weight, inputs))
    loaded = load(tmp_path)
    assert (loaded.detection.family, loaded.findings) == ("quark:nvfp4", [])
    assert np.array_equal(loaded["a.weight"].dequantize(), values)
    assert loaded["a.weight"].activation["scale"] == 0.5


def test_a_description_of_single_layers_wins(tmp_path):
    codes, scale, values = fp4(4, 32)
    tensors = {
        "m.0.up.weight": codes, "m.0.up.weight_scale": scale, "m.1.up.weight": fp8(4, 32),
        "m.1.up.weight_scale": np.float32(2),
    }  # fmt: skip
    layers = {"*m.1.*": of_layer(of_fp8(), of_fp8(dynamic=True))}
    write(tmp_path / "model.safetensors", tensors, config=quark(of_mx("fp4"), layer_quant_config=layers))
    loaded = load(tmp_path)
    assert (loaded.detection.family, loaded.findings) == ("quark:mixed", [])
    assert loaded["m.1.up.weight"].activation["scheme"] == "dynamic"
    assert np.array_equal(loaded["m.0.up.weight"].dequantize(), values)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (quark({"dtype": "int4", "qscheme": "per_group"}), "int4 per_group are not read"),
        (quark([of_fp8(), {"dtype": "int4"}]), "fp8_e4m3 per_tensor of int4 None"),
        (quark(of_mx("fp4"), algo_config=[{"name": "rotation", "r1": True, "r4": True}]), "algo_config: r4 rotates"),
        (quark(None), "of no layer"),
    ],
    ids=["int4", "fp8 of int4", "rotation", "nothing"],
)
def test_other_weights_of_quark_and_rotations_of_activations_are_named(config, words, tmp_path):
    codes, scale, _ = fp4(4, 32)
    write(tmp_path / "model.safetensors", {"a.weight": codes, "a.weight_scale": scale}, config=config)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


@pytest.mark.parametrize("to", ["quark:mxfp4", "quark:mxfp6_e3m2", "quark:mxfp8", "quark:fp8", "quark:fp8_ptpc"])
def test_what_convert_writes_for_quark_is_what_vllm_asks_for(to, tmp_path):
    """vLLM reads `export`, the two empty tables and a list of excluded layers, and scales of rows on one axis."""
    source = tmp_path / "source"
    source.mkdir()
    weight = np.random.default_rng(0).standard_normal((64, 128)).astype(ml_dtypes.bfloat16)
    write(source / "model.safetensors", {"m.up_proj.weight": weight, "lm_head.weight": weight})
    convert(source, tmp_path / "made", to=to)
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    loaded = load(tmp_path / "made")
    assert (loaded.detection.confidence, loaded.findings, config["exclude"]) == (1.0, [], ["lm_head"])
    assert config["export"]["pack_method"] == "reorder"
    assert config["layer_quant_config"] == config["layer_type_quant_config"] == {}
    described = config["global_quant_config"]
    assert described["input_tensors"]["is_dynamic"]
    shapes = {"quark:fp8": (), "quark:fp8_ptpc": (64,)}
    assert loaded.tensors.stored["m.up_proj.weight_scale"].shape == shapes.get(to, (64, 4))
    values = loaded["m.up_proj.weight"].dequantize()
    assert np.abs(values - weight.astype(np.float32)).max() < 0.6
    assert loaded["m.up_proj.weight"].activation["scheme"] == "dynamic"
