"""Dialects as their producers publish them: tiny files of the same names, dtypes and entries, decoded here by hand."""

import json

import ml_dtypes
import numpy as np
import pytest

from microfloat.checkpoint import convert, detect, load, save
from microfloat.errors import CheckpointError, InvalidValueError
from microfloat.reference import swizzle_scales
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
        (quark(of_mx("fp4"), algo_config=[{"name": "rotation", "r1": True, "r4": True}]), "r4, a rotation"),
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


# ---- MXFP8 of transformers, DeepSeek-V4, Mistral ---------------------------------------------------------------------

SAVED = {"quant_method": "fp8", "scale_fmt": "ue8m0"}  # by transformers, where its class was named and not the method
MXFP8 = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}


@pytest.mark.parametrize(
    "more", [{}, {"scale_fmt": "ue8m0", "fmt": "e4m3"}, {"weight_block_size": None}, SAVED], ids=str
)
@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_mxfp8_of_transformers(more, dtype, tmp_path):
    codes, scale = fp8(3, 64), np.arange(120, 126, dtype=np.uint8).reshape(3, 2)
    gate = np.ones((2, 64), ml_dtypes.bfloat16)
    tensors = {"a.up.weight": codes, "a.up.weight_scale_inv": (dtype, scale), "a.gate.weight": gate}
    write(tmp_path / "model.safetensors", tensors, config={**MXFP8, "ignored_layers": ["a.gate"], **more})
    loaded = load(tmp_path)
    assert (loaded.detection.family, loaded.detection.confidence, loaded.findings) == ("hf:mxfp8", 1.0, [])
    record = loaded["a.up.weight"]
    assert (record.format.name, record.activation["format"].name) == ("mxfp8", "mxfp8")
    wanted = codes.astype(np.float32) * np.exp2(scale - 127.0).repeat(32, 1).astype(np.float32)
    assert np.array_equal(record.dequantize(), wanted)


def test_mxfp8_is_written_as_transformers_and_sglang_read_it(tmp_path):
    (tmp_path / "source").mkdir()
    weight = np.random.default_rng(0).standard_normal((64, 128)).astype(ml_dtypes.bfloat16)
    write(tmp_path / "source" / "model.safetensors", {"m.up_proj.weight": weight, "lm_head.weight": weight})
    convert(tmp_path / "source", tmp_path / "made", to="hf:mxfp8")
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert config == {**MXFP8, "fmt": "e4m3", "scale_fmt": "ue8m0", "ignored_layers": ["lm_head"]}
    stored = load(tmp_path / "made").tensors.stored["m.up_proj.weight_scale_inv"]
    assert (stored.dtype, stored.shape) == ("U8", (64, 4))


V4 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3",
    "scale_fmt": "ue8m0",
}  # fmt: skip


def test_deepseek_v4_holds_fp8_tiles_and_packed_experts_of_fp4(tmp_path):
    tiles, experts, scale = fp8(144, 256), "layers.0.ffn.experts.0.w2", np.uint8([[125, 126], [127, 128]])
    codes, bytes_, values = fp4(4, 64)
    norm = {"layers.0.attn.q_norm.weight": np.ones(8, np.float32), "layers.0.attn.q_norm.scale": np.ones(8, np.float32)}
    tensors = {
        "layers.0.attn.wq_a.weight": tiles, "layers.0.attn.wq_a.scale": ("F8_E8M0", scale), **norm,
        f"{experts}.weight": codes.view(np.int8), f"{experts}.scale": ("F8_E8M0", bytes_),
    }  # fmt: skip
    write(tmp_path / "model.safetensors", tensors, config=V4)
    loaded = load(tmp_path)
    assert (loaded.detection.family, loaded.detection.confidence) == ("deepseek:v4", 1.0)
    assert [one.id for one in loaded.findings if one.severity != "info"] == []
    assert np.array_equal(loaded[f"{experts}.weight"].dequantize(), values)
    wanted = tiles.astype(np.float32) * np.exp2(scale - 127.0).repeat(128, 0).repeat(128, 1)[:144].astype(np.float32)
    assert np.array_equal(loaded["layers.0.attn.wq_a.weight"].dequantize(), wanted)
    assert loaded["layers.0.attn.q_norm.scale"].format is None
    report = convert(tmp_path, tmp_path.parent / "other", to="ct:mxfp4")
    assert {layer.name: layer.action for layer in report.layers}[f"{experts}.weight"] == "carried"


@pytest.mark.parametrize(("name", "prefix"), [("weight", ""), ("a.weight", "a.")])
def test_the_scale_that_deepseeks_own_conversion_writes(name, prefix, tmp_path):
    """Its inference code renames `weight_scale_inv` of V3 to `scale`, float32 tiles of 128."""
    codes = fp8(8, 130)
    tensors = {name: codes, f"{prefix}scale": np.float32([[0.5, 4]])}
    wanted = codes.astype(np.float32) * np.float32([0.5] * 128 + [4] * 2)
    assert np.array_equal(load(write(tmp_path / "model.safetensors", tensors))[name].dequantize(), wanted)


def consolidated(tmp_path, quantization, **more):
    tensors = {
        "layers.0.attention.wq.weight": fp8(4, 32), "layers.0.attention.wq.qscale_weight": np.float32(0.5),
        "norm.weight": np.ones(32, ml_dtypes.bfloat16), **more,
    }  # fmt: skip
    write(tmp_path / "consolidated.safetensors", tensors)
    (tmp_path / "params.json").write_text(json.dumps({"dim": 32, "n_layers": 1, **quantization}))
    return tmp_path


@pytest.mark.parametrize(("scheme", "expected"), [("TENSOR", "static"), (None, "static"), ("NO_SCALES", "dynamic")])
def test_the_names_of_mistral(scheme, expected, tmp_path):
    quantization = {"qformat_weight": "fp8_e4m3"} | ({"qscheme_act": scheme} if scheme else {})
    act = {"layers.0.attention.wq.qscale_act": np.float32(2).astype(ml_dtypes.bfloat16)}
    consolidated(tmp_path, {"quantization": quantization}, **(act if expected == "static" else {}))
    loaded, name = load(tmp_path), "layers.0.attention.wq.weight"
    assert (loaded.detection.family, loaded.detection.confidence, loaded.findings) == ("mistral:fp8", 1.0, [])
    assert np.array_equal(loaded[name].dequantize(), fp8(4, 32).astype(np.float32) / 2)
    assert loaded[name].activation["scheme"] == expected
    convert(tmp_path, tmp_path / "out", to="bf16")
    assert json.loads((tmp_path / "out" / "params.json").read_text()) == {"dim": 32, "n_layers": 1}


def test_scales_of_tiles_under_the_names_of_mistral(tmp_path):
    """Mistral Large 4 stores a scale for each tile, under quant_method fp8 of config.json."""
    tensors = {"a.weight": fp8(4, 256), "a.qscale_weight": np.float32([[1, 2]])}
    write(tmp_path / "model.safetensors", tensors, config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    loaded = load(tmp_path)
    assert (loaded.detection.family, loaded.detection.confidence) == ("mistral:fp8", 1.0)
    assert loaded["a.weight"].format.block == (128, 128)


def test_params_json_describes_consolidated_files_alone(tmp_path):
    quantization = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    consolidated(tmp_path, quantization)
    tensors = {"model.a.weight": fp8(4, 32), "model.a.weight_scale_inv": np.float32(1)}
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}
    write(tmp_path / "model.safetensors", tensors, config=config)
    loaded = load(tmp_path)
    assert list(loaded) == ["model.a.weight"]
    assert [one.id for one in loaded.findings if one.severity != "info"] == []


@pytest.mark.parametrize(
    "quantization", [{"qformat_weight": "int4"}, {"qformat_weight": "fp8_e4m3", "qscheme_act": "X"}]
)
def test_another_quantization_of_mistral_is_named(quantization, tmp_path):
    with pytest.raises(CheckpointError, match=r"params.json: qformat_weight '\w+', qscheme_act '\w+' is not read"):
        load(consolidated(tmp_path, {"quantization": quantization}))


def test_compressed_tensors_in_params_json(tmp_path):
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    tensors = {"layers.0.w1.weight": fp8(4, 32), "layers.0.w1.weight_scale": np.float32([2])}
    write(tmp_path / "consolidated.safetensors", tensors)
    (tmp_path / "params.json").write_text(json.dumps({"dim": 32, "quantization_config": config}))
    found = detect(tmp_path)
    assert (found.family, found.confidence) == ("ct:fp8", 1.0)


# ---- torchao, as transformers saves it -------------------------------------------------------------------------------


def of_torchao(name, kind, data, parts):
    """The metadata of one tensor: names of its parts, and its constants, of which some have types."""
    about = {"_type": kind, "_data": data, "_tensor_data_names": list(parts)}
    folder, _, leaf = name.rpartition(".")
    return {name: json.dumps(about)}, {f"{folder}._{leaf}_{part}": array for part, array in parts.items()}


def dtype(name):
    return {"_type": "torch.dtype", "_data": name}


def granularity(name):
    return {"_type": "QuantizeTensorToFloat8Kwargs", "_data": {"granularity": {"_type": name, "_data": {"dim": -1}}}}


TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "AnyConfig", "_data": {}, "_version": 2}}}
MX_INPUTS = {"_type": "QuantizeTensorToMXKwargs", "_data": {"elem_dtype": dtype("float8_e4m3fn"), "block_size": 32}}


@pytest.mark.parametrize(
    ("kind", "inputs", "scheme", "fmt"),
    [
        ("MXTensor", MX_INPUTS, "dynamic", "mxfp8"),
        ("MXTensor", None, "none", None),
        ("Float8Tensor", granularity("PerRow"), "dynamic", "fp8_row"),
        ("Float8Tensor", granularity("PerTensor"), "dynamic", "fp8_tensor"),
        ("NVFP4Tensor", {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": {"block_size": 16}}, "dynamic", "nvfp4"),
    ],
)
def test_torchao_says_in_each_tensor_how_its_inputs_are_quantized(kind, inputs, scheme, fmt, tmp_path):
    """Two files with a list of tensors each: the second one holds what the first one lacks."""
    parts, data, values = {
        "MXTensor": (
            {"qdata": fp8(4, 32), "scale": ("F8_E8M0", np.full((4, 1), 126, np.uint8))},
            {"elem_dtype": dtype("float8_e4m3fn"), "block_size": 32}, fp8(4, 32).astype(np.float32) / 2,
        ),
        "Float8Tensor": (
            {"qdata": fp8(4, 32), "scale": np.full((4, 1), 0.25, np.float32)},
            {"block_size": [1, 32], "dtype": dtype("bfloat16")}, fp8(4, 32).astype(np.float32) / 4,
        ),
        "NVFP4Tensor": (
            {"qdata": np.full((4, 16), 0x22, np.uint8), "scale": np.ones((4, 2), ml_dtypes.float8_e4m3fn)},
            {"block_size": 16}, np.ones((4, 32), np.float32),
        ),
    }[kind]  # fmt: skip
    data = {**data, "act_quant_kwargs": inputs, "is_swizzled_scales": False}
    for number, name in enumerate(("a.weight", "b.weight"), 1):
        about, tensors = of_torchao(name, kind, data, parts)
        shard = tmp_path / f"model-0000{number}-of-00002.safetensors"
        write(shard, tensors, {"tensor_names": json.dumps([name]), **about}, TORCHAO)
    loaded = load(tmp_path)
    assert (loaded.detection.family, loaded.findings, sorted(loaded)) == ("torchao", [], ["a.weight", "b.weight"])
    activation = loaded["b.weight"].activation
    assert np.array_equal(loaded["b.weight"].dequantize(), values)
    assert (activation["scheme"], activation["format"] and activation["format"].name) == (scheme, fmt)


@pytest.mark.parametrize(("kind", "parts"), [("Int8Tensor", ("qdata", "scale")), ("Float8Tensor", ("qdata", "zero"))])
def test_another_tensor_of_torchao_is_not_called_damaged(kind, parts, tmp_path):
    about, tensors = of_torchao(
        "a.weight", kind, {"block_size": [1, 32]}, dict.fromkeys(parts, np.ones((4, 32), np.int8))
    )
    path = write(tmp_path / "model.safetensors", tensors, {"tensor_names": '["a.weight"]', **about})
    with pytest.raises(CheckpointError, match=f"a '{kind}' of {', '.join(parts)} is not read") as caught:
        load(path)
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "about"),
    [("MXTensor", {"elem_dtype": dtype("float8_e4m3fn"), "block_size": 64}), ("Float8Tensor", {"block_size": "row"})],
)
def test_metadata_of_another_version_is_not_called_damaged_alone(kind, about, tmp_path):
    metadata, tensors = of_torchao("a.weight", kind, about, {"qdata": fp8(4, 64), "scale": np.ones((4, 1), "f")})
    ours = {"microfloat": json.dumps({"version": 99, "tensors": {}})}
    for each in ({"tensor_names": '["a.weight"]', **metadata}, ours):
        with pytest.raises(CheckpointError, match="is of another version, or damaged: write the file again"):
            load(write(tmp_path / "model.safetensors", tensors, each))


# ---- FBGEMM's FP8 ----------------------------------------------------------------------------------------------------

FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head", "router"]}
EXPERTS = "model.layers.1.feed_forward.experts."


@pytest.mark.parametrize("config", [FBGEMM, {key: FBGEMM[key] for key in FBGEMM if key != "quant_method"}])
def test_fp8_of_fbgemm_has_a_scale_for_each_row_and_its_inputs_as_they_come(config, tmp_path):
    codes, scale = fp8(16, 48), np.random.default_rng(1).uniform(0.5, 2, (16, 1)).astype(np.float32)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = {name: codes, f"{name}_scale": scale, "lm_head.weight": np.ones((4, 4), np.float32)}
    loaded = load(write(tmp_path / "model.safetensors", tensors, config=config).parent)
    record = loaded[name]
    assert (loaded.detection.family, loaded.detection.confidence, loaded.findings) == ("fbgemm:fp8", 1.0, [])
    assert (record.activation["scheme"], record.activation["format"].name) == ("dynamic", "fp8_row")
    np.testing.assert_array_equal(record.dequantize(), codes.astype(np.float32) * scale)


@pytest.mark.parametrize("size", [(32, 24), (32, 32)], ids=["oblong", "square"])
def test_experts_of_fbgemm_are_stored_with_the_inputs_first(size, tmp_path):
    """Llama 4 in transformers: codes [E, K, N], scales [E, 1, N], but those of down_proj [E, N, 1]."""
    hidden, inner = size
    rng, values, tensors = np.random.default_rng(0), {}, {}
    for leaf, length, rows in (("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)):
        codes = rng.standard_normal((2, length, rows)).astype(ml_dtypes.float8_e4m3fn)
        scale = rng.uniform(0.5, 2, (2, 1, rows)).astype(np.float32)
        values[EXPERTS + leaf] = codes.astype(np.float32) * scale
        tensors[EXPERTS + leaf] = codes
        tensors[f"{EXPERTS}{leaf}_scale"] = scale if leaf == "gate_up_proj" else scale.swapaxes(1, 2)
    write(tmp_path / "model.safetensors", tensors)
    config = {"model_type": "llama4_text", "hidden_size": hidden, "quantization_config": FBGEMM}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path)
    convert(tmp_path, tmp_path / "plain", to="f32")
    save(loaded, tmp_path / "saved", format="fbgemm:fp8")
    convert(tmp_path, tmp_path / "apart", to="ct:fp8_dynamic")
    again, plain, apart = (load(tmp_path / name) for name in ("saved", "plain", "apart"))
    for name, stored in values.items():
        np.testing.assert_array_equal(loaded[name].dequantize(), stored.swapaxes(1, 2))
        np.testing.assert_array_equal(plain[name].codes, stored)
        np.testing.assert_array_equal(again.tensors.array(again.tensors.stored[name]), tensors[name])
        np.testing.assert_array_equal(
            again.tensors.array(again.tensors.stored[f"{name}_scale"]), tensors[f"{name}_scale"]
        )
    one = apart[f"{EXPERTS}1.up_proj.weight"].dequantize()
    np.testing.assert_array_equal(one, values[f"{EXPERTS}gate_up_proj"][1].T[inner:])


@pytest.mark.parametrize(
    ("scale", "words"), [(np.ones((4, 3), np.float32), "fits no blocks"), (np.ones((2, 7, 1), np.float32), "fits no")]
)
def test_scales_of_fbgemm_in_another_order_are_named(scale, words, tmp_path):
    tensors = {"a.weight": fp8(4, 32), "b.weight": np.zeros((2, 8, 4), ml_dtypes.float8_e4m3fn)}
    tensors = {f"{name}_scale": np.ones((4, 1), np.float32) for name in ("a.weight",)} | tensors
    tensors["a.weight_scale" if scale.ndim == 2 else "b.weight_scale"] = scale
    tensors = {name: one for name, one in tensors.items() if scale.ndim == 3 or not name.startswith("b")}
    with pytest.raises(CheckpointError, match=words) as raised:
        load(write(tmp_path / "model.safetensors", tensors, config=FBGEMM).parent)
    assert "says nothing against the file" in str(raised.value)


def test_other_methods_of_fbgemm_are_refused_by_name(tmp_path):
    tensors = {"a.weight": np.ones((4, 4), np.uint8), "a.weight_scale": np.ones((4, 1), np.float32)}
    write(tmp_path / "model.safetensors", tensors, config={"quant_method": "fbgemm_int4", "group_size": 128})
    with pytest.raises(CheckpointError, match=r"'fbgemm_int4' is not read; read are .*'fbgemm_fp8'"):
        load(tmp_path)


def test_what_convert_writes_for_fbgemm(tmp_path):
    weight = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    source = {"a.up_proj.weight": weight, "lm_head.weight": weight}
    convert(write(tmp_path / "model.safetensors", source), tmp_path / "out", to="fbgemm:fp8")
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stated == {**FBGEMM, "modules_to_not_convert": ["lm_head"]}
    stored = load(tmp_path / "out").tensors.stored["a.up_proj.weight_scale"]
    assert (stored.dtype, stored.shape) == ("F32", (32, 1))


# ---- FP-Quant --------------------------------------------------------------------------------------------------------


def fp_quant(fmt, divisor, matrix, padded=False, **more):
    """The tensors of a layer of FP-Quant, its configuration, and the values of its codes."""
    group = 16 if fmt == "nvfp4" else 32
    codes, scale, values = fp4(8, 64, group=group)
    if fmt == "nvfp4":
        scale = np.random.default_rng(1).uniform(0.5, 4, (8, 4)).astype(ml_dtypes.float8_e4m3fn)
        values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(8, 64) * scale.astype(np.float32).repeat(
            16, 1
        )
        scale = scale.view(np.uint8)
    if padded:
        scale = np.pad(scale, ((0, 120), (0, -scale.shape[1] % 4)))
    layer = {
        "qweight": codes, "scales": scale, "weight_global_scale": np.full(1, divisor, ml_dtypes.bfloat16),
        "act_global_scale": np.full(1, divisor, ml_dtypes.bfloat16), "weight": np.empty(0, ml_dtypes.bfloat16),
        "forward_hadamard_matrix": matrix, "backward_hadamard_matrix": matrix,
        "dqweight": np.empty(0, ml_dtypes.bfloat16),
    }  # fmt: skip
    config = {
        "quant_method": "fp_quant", "forward_dtype": fmt, "forward_method": "abs_max", "backward_dtype": "bf16",
        "store_master_weights": False, "hadamard_group_size": len(matrix), "pseudoquantization": False,
        "transform_init": "identity", "modules_to_not_convert": ["lm_head"], **more,
    }  # fmt: skip
    tensors = {f"model.up_proj.{name}": one for name, one in layer.items()} | {"lm_head.weight": np.ones((4, 4))}
    return tensors, config, values


IDENTITY, TURNED = np.eye(32, dtype=ml_dtypes.bfloat16), np.full((32, 32), 0.17, ml_dtypes.bfloat16)


@pytest.mark.parametrize(("fmt", "divisor"), [("nvfp4", 10), ("nvfp4", 8), ("mxfp4", 1)])
@pytest.mark.parametrize("padded", [False, True])
def test_fp_quant_divides_by_its_global_scale(fmt, divisor, padded, tmp_path):
    tensors, config, values = fp_quant(fmt, divisor, IDENTITY, padded)
    loaded = load(write(tmp_path / "model.safetensors", tensors, config=config).parent)
    record = loaded["model.up_proj.weight"]
    assert (loaded.detection.family, loaded.findings, sorted(loaded)) == (
        f"fp_quant:{fmt}", [], ["lm_head.weight", "model.up_proj.weight"],
    )  # fmt: skip
    assert (record.format.name, record.activation["format"].name, record.activation["scheme"]) == (
        fmt, fmt, "static" if fmt == "nvfp4" else "dynamic",
    )  # fmt: skip
    np.testing.assert_array_equal(record.dequantize(), values / np.float32(divisor))
    convert(tmp_path, tmp_path / "out", to=f"ct:{fmt}")
    carried = load(tmp_path / "out")
    assert sorted(carried) == sorted(loaded)
    np.testing.assert_array_equal(carried["model.up_proj.weight"].codes, record.codes)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(
    ("fmt", "divisor", "matrix", "words"),
    [("nvfp4", 10, TURNED, r"forward_hadamard_matrix \[32, 32\]: the weight is stored multiplied by it"),
     ("mxfp4", 1, TURNED, "stored multiplied by it"), ("mxfp4", 3, IDENTITY, "divides by 3, and MXFP4 has no global")],
)  # fmt: skip
def test_weights_of_fp_quant_that_no_format_holds_are_named(fmt, divisor, matrix, words, announced, tmp_path):
    tensors, config, _ = fp_quant(fmt, divisor, matrix)
    path = write(tmp_path / "model.safetensors", tensors, config=config if announced else None)
    with pytest.raises(CheckpointError, match=words) as raised:
        load(path.parent)
    assert "damaged" not in str(raised.value)
    assert "package fp_quant" in str(raised.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [({"pseudoquantization": True}, "`dqweight` holds no codes"), ({"forward_dtype": "mxfp8"}, "'mxfp8' is not read")],
)
def test_other_files_of_fp_quant_are_refused_by_name(more, words, tmp_path):
    tensors = {"model.up_proj.dqweight": np.ones((8, 64), ml_dtypes.bfloat16)}
    _, config, _ = fp_quant("nvfp4", 10, IDENTITY, **more)
    with pytest.raises(CheckpointError, match=words):
        load(write(tmp_path / "model.safetensors", tensors, config=config).parent)


# ---- four over six ---------------------------------------------------------------------------------------------------

FOUR_OVER_SIX = {
    "quant_method": "fouroversix", "dtype": "nvfp4", "scale_rule": "mse", "activation_dtype": None,
    "keep_master_weights": False, "weight_dtype": None, "weight_scale_2d": False, "weight_scale_rule": None,
    "module_config_overrides": None, "modules_to_not_convert": ["lm_head"], "output_dtype": "bfloat16",
}  # fmt: skip


def four_over_six(rows, length, fmt="nvfp4", tiles=True):
    """The tensors of a layer of fouroversix, padded to 128 rows and 4 blocks, and the values of its codes."""
    group = 16 if fmt == "nvfp4" else 32
    all_rows, width = -(-rows // 128) * 128, -(-length // (4 * group)) * 4 * group
    codes, scale, values = fp4(all_rows, width, group=group)
    if fmt == "nvfp4":
        scale = np.random.default_rng(1).uniform(0.5, 4, scale.shape).astype(ml_dtypes.float8_e4m3fn)
        values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(codes.shape[0], -1)
        values = values * scale.astype(np.float32).repeat(16, 1)
    flat = swizzle_scales(scale.view(np.uint8)) if tiles else scale.view(np.uint8).reshape(-1)
    layer = {
        "values": codes, "scale_factors": flat.view(scale.dtype if fmt == "nvfp4" else E8M0),
        "amax": np.full(1, 3, np.float32),
        "metadata": np.array([rows, length, all_rows, width, 1, int(tiles)], np.int64),
    }  # fmt: skip
    return {f"a.up_proj.quantized_weight_{name}": one for name, one in layer.items()}, values[:rows, :length]


@pytest.mark.parametrize(
    ("changed", "largest"),
    [({}, 6 * 256), ({"scale_rule": "abs_max"}, 6 * 256), ({"weight_scale_rule": "static_6"}, 6 * 448),
     ({"scale_rule": "static_4"}, 4 * 448),
     ({"module_config_overrides": {"a.up_proj": {"scale_rule": "static_6"}}}, 6 * 448),
     ({"weight_dtype": "mxfp4"}, None)],
)  # fmt: skip
@pytest.mark.parametrize(("shape", "tiles"), [((128, 128), True), ((24, 96), True), ((24, 160), False)])
def test_the_scale_rule_of_fouroversix_tells_its_global_scale(changed, largest, shape, tiles, tmp_path):
    tensors, values = four_over_six(*shape, "nvfp4" if largest else "mxfp4", tiles)
    loaded = load(write(tmp_path / "model.safetensors", tensors, config=FOUR_OVER_SIX | changed).parent)
    record = loaded["a.up_proj.weight"]
    assert (record.logical_shape, loaded.findings, list(loaded)) == (shape, [], ["a.up_proj.weight"])
    assert (record.activation["scheme"], record.activation["format"].name) == ("dynamic", "nvfp4")
    expected = values * (np.float32(3) / np.float32(largest)) if largest else values
    np.testing.assert_allclose(record.dequantize(), expected, rtol=2**-22)
    convert(tmp_path, tmp_path / "out", to="ct:nvfp4" if largest else "ct:mxfp4")
    np.testing.assert_array_equal(load(tmp_path / "out")["a.up_proj.weight"].codes, record.codes)


@pytest.mark.parametrize(
    ("config", "metadata", "words"),
    [({"dtype": "if4"}, None, "config.json: dtype 'if4' is not read"),
     ({"weight_dtype": "nvfp6_e2m3"}, None, "config.json: dtype 'nvfp6_e2m3' is not read"),
     ({"scale_rule": "l1_norm"}, None, "rule 'l1_norm' of nvfp4 is not .* mxfp4, and nvfp4 under mse, .*, static_4"),
     ({"module_config_overrides": {"a.up_proj": {"weight_scale_rule": "static_5"}}}, None, "rule 'static_5' of nvfp4"),
     ({}, [24, 80, 128, 100, 1, 1], "does not fit"),
     ({}, [24, 80], "does not fit"), ({}, [500, 80, 128, 128, 1, 1], "does not fit")],
)  # fmt: skip
def test_other_files_of_fouroversix_are_refused_by_name(config, metadata, words, tmp_path):
    tensors, _ = four_over_six(24, 80)
    if metadata:
        tensors["a.up_proj.quantized_weight_metadata"] = np.array(metadata, np.int32)
    with pytest.raises(CheckpointError, match=words) as raised:
        load(write(tmp_path / "model.safetensors", tensors, config=FOUR_OVER_SIX | config).parent)
    assert "damaged" not in str(raised.value)


@pytest.mark.parametrize("lost", ["scale_factors", "amax", "metadata"])
def test_a_part_of_fouroversix_that_is_missing_is_named(lost, tmp_path):
    tensors, _ = four_over_six(24, 80)
    del tensors[f"a.up_proj.quantized_weight_{lost}"]
    with pytest.raises(CheckpointError, match=f"quantized_weight_{lost}") as caught:
        load(write(tmp_path / "model.safetensors", tensors, config=FOUR_OVER_SIX).parent)
    assert "[24, 40]" not in str(caught.value)  # the shape out of its padding, which stands in no file
    assert "[128, 64]" in str(caught.value)


@pytest.mark.parametrize("config", [None, FOUR_OVER_SIX | {"weight_dtype": "mxfp4"}])
def test_without_the_scale_rule_of_a_layer_its_family_is_asked_for(config, tmp_path):
    """What an amax is divided by differs by 1.75, and stands in no tensor."""
    tensors, values = four_over_six(24, 80)
    path = write(tmp_path / "model.safetensors", tensors, config=config)
    with pytest.raises(CheckpointError, match=r"divided by 1536 \(mse, mae, abs_max\) or 2688 .* name the family"):
        load(path)
    for family, largest in (("fouroversix:nvfp4", 1536), ("fouroversix:static_4", 1792)):
        found = load(path, format=family)["a.up_proj.weight"].dequantize()
        np.testing.assert_allclose(found, values * (np.float32(3) / np.float32(largest)), rtol=2**-22)


@pytest.mark.parametrize("to", ["ct:nvfp4", "modelopt:nvfp4", "bf16"])
def test_a_weight_of_zeros_has_an_amax_of_zero(to, tmp_path):
    tensors, _ = four_over_six(24, 96)
    path = write(tmp_path / "model.safetensors", tensors, config=FOUR_OVER_SIX)
    names = {name: f"a.up_proj.quantized_weight_{name}" for name in ("amax", "values")}
    tensors[names["amax"]] = np.zeros(1, np.float32)
    with pytest.raises(CheckpointError, match="quantized_weight_amax is 0, so every value is"):
        load(write(path, tensors))
    tensors[names["values"]] = np.full_like(tensors[names["values"]], 0x80)
    assert load(write(path, tensors)).findings == []
    assert convert(path, tmp_path / "out", to=to).verified
    again = load(tmp_path / "out")
    assert again.findings == []
    assert np.array_equal(again["a.up_proj.weight"].dequantize(), np.zeros((24, 96), np.float32))
    if to == "ct:nvfp4":
        with pytest.raises(InvalidValueError, match="a tensor scale of 0, needed its reciprocal"):
            save(load(path), tmp_path / "saved", format=to)


def test_nvfp4_of_transformers_which_it_does_not_save_is_refused_by_name(tmp_path):
    write(tmp_path / "model.safetensors", {"a.weight": np.ones((4, 4))}, config={"quant_method": "nvfp4"})
    with pytest.raises(CheckpointError, match=r"'nvfp4' is not read; read are .*'fp_quant', 'fouroversix'"):
        load(tmp_path)
