"""Findings about whole checkpoints: ignore lists of three dialects, fused groups, NaN, others (features K7, I7)."""

import json

import ml_dtypes
import numpy as np
import pytest

from microfloat import reference
from microfloat.checkpoint import Record, convert, detect, load, save
from microfloat.checkpoint.families import WRITTEN
from microfloat.checkpoint.folder import announced
from microfloat.checkpoint.integrity import code_findings, without_nan
from microfloat.errors import CheckpointError, InvalidTypeError
from microfloat.formats import FORMATS, decode
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
    (finding,) = found.remarks
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


CT_FP8 = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"group_0": {
        "targets": ["model.layers.0.mlp.up_proj", "re:model[.]layers[.][1-3][.]mlp[.](up|gate)_proj"],
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip


@pytest.mark.parametrize(
    ("prefix", "layers"),
    [
        ("model.", (0, 2)), ("layers.", (0,)), ("model.language_model.", (0, 2)), ("language_model.model.", (0, 2)),
        ("_orig_mod.model.", (0, 2)), ("module.model.", (0, 3)), ("model._orig_mod.", (0, 1)),
        ("module._orig_mod.model.language_model.", (0, 1)),
    ],
)  # fmt: skip
def test_a_layer_is_known_under_the_names_of_wrapped_and_multimodal_models(prefix, layers, tmp_path):
    """Its activations were lost otherwise. A model without any prefix is told by whole names alone."""
    names = [f"{prefix.removesuffix('layers.')}layers.{i}.mlp.up_proj" for i in layers]
    tensors = {f"{name}.weight": fp8(4, 32) for name in names} | {f"{name}.weight_scale": ONES for name in names}
    tensors |= {f"{prefix}visual.layers.0.mlp.gate_up.weight": np.ones((4, 32), np.float32)}
    found = load(write(tmp_path / "model.safetensors", tensors, config=CT_FP8).parent)
    assert [found[f"{name}.weight"].activation["scheme"] for name in names] == ["dynamic"] * len(names)
    assert found.findings == []


@pytest.mark.parametrize(
    ("method", "pattern"),
    [
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "model.layers.1.mlp.up_proj"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "model.layers.1*"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "re:model.layers.1.*"),
    ],
)
def test_a_plain_layer_is_ignored_under_its_other_names(method, pattern, tmp_path):
    for prefix in ("model.language_model", "_orig_mod.model", "module.language_model.model"):
        tensors = layer(f"{prefix}.layers.0.mlp.up_proj") if "quant_algo" in method else {}
        tensors[f"{prefix}.layers.1.mlp.up_proj.weight"] = np.ones((4, 32), np.float32)
        (found,) = announced({"config.json": {"quantization_config": {**method, "ignore": [pattern]}}})
        assert found.ignored(f"{prefix}.layers.1.mlp.up_proj") == pattern
        assert found.ignored(f"{prefix}.layers.0.mlp.up_proj") is None
        config = {**method, "ignore": [pattern, "lm_head"]}
        if "quant_algo" in method:
            assert load(write(tmp_path / "model.safetensors", tensors, config=config)).findings == []
    everything = {**method, "ignore": ["re:.*language_model.*"]}
    assert announced({"config.json": {"quantization_config": everything}})[0].ignored("model.visual.layers.0") is None


def test_a_second_configuration_is_read_where_its_entries_stand_in_it_themselves(tmp_path):
    path = write(tmp_path / "model.safetensors", layer("a") | {"a.input_scale": np.float32(0.5)})
    for text, confidence in (({"quantization": {"quant_algo": "FP8"}}, 0.5), ({"quant_algo": "NVFP4"}, 1.0)):
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(text))
        assert detect(path).confidence == confidence
    convert(tmp_path, tmp_path / "out", to="bf16")
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": "NVFP4"}')
    (finding,) = load(path).findings
    assert finding.message == "quantization: str, needed an object; it is not read."


@pytest.mark.parametrize(("algorithm", "is_announced"), [("FP8", True), ("NVFP4", False), ("INT8", False)])
@pytest.mark.parametrize("to", ["ct:nvfp4", "modelopt:nvfp4"])
def test_a_cache_of_another_format_is_not_announced_as_fp8(algorithm, is_announced, to, tmp_path):
    path = write(tmp_path / "model.safetensors", layer("a"))
    second = {"quantization": {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": algorithm}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(second))
    report = convert(path.parent, tmp_path / "out", to=to)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert bool(config.get("kv_cache_scheme")) == is_announced
    assert any(f"'kv_cache_quant_algo': {algorithm} is not read" in note for note in report.notes) != is_announced


@pytest.mark.parametrize("last", ["weight_scale_inv", "weight_scale_2", "weight_outer_scale"])
def test_a_second_scale_that_is_not_read_is_a_warning(last, tmp_path):
    tensors = {
        "a.weight": fp8(4, 32),
        "a.weight_scale": np.float32(2),
        f"a.{last}": np.float32(0.5),
        "a.weight_sum": ONES,
    }
    found = load(write(tmp_path / "model.safetensors", tensors)).findings
    assert {one.message.split()[3].rstrip(";"): one.severity for one in found if one.id == "orphan"} == {
        f"a.{last}": "warn", "a.weight_sum": "info",
    }  # fmt: skip


def test_foreign_states_orphans_and_refused_methods(tmp_path):
    tensors = {**layer("a"), "a._extra_state": np.zeros(3, np.uint8), "b.weight_scale": np.zeros(2, np.float32)}
    with pytest.warns(UserWarning, match="_extra_state"):
        checkpoint = load(write(tmp_path / "model.safetensors", tensors))
    assert list(checkpoint) == ["a.weight", "b.weight_scale"]
    assert {finding.id for finding in checkpoint.findings} == {"extra-state", "orphan"}
    write(tmp_path / "model.safetensors", tensors, config={"quant_method": "spqr"})
    with pytest.raises(CheckpointError, match="'spqr' is not read"):
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


# ---- layouts that are not known ----------------------------------------------------------------------------------


def fp8(*shape):
    return np.full(shape, 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)


UE8M0 = ("F8_E8M0", np.full((1, 1), 127, np.uint8))


ONES = np.ones((4, 1), np.float32)
PACKED = {"a.weight_packed": np.ones((4, 16), np.uint8), "a.weight_scale": np.ones((4, 2), np.float32)}


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"a.q.weight": fp8(4, 32), "a.q.my_scale": np.float32(1)}, "a.q.my_scale F32[]"),
        ({"a.q.weight": fp8(4, 32), "a.q.weight_quantizer.scale": ONES}, "a.q.weight_quantizer.scale F32[4, 1]"),
        ({"a.q.weight": fp8(4, 32), "a.q.weight_quantizer._amax": ONES}, "a.q.weight_quantizer._amax F32[4, 1]"),
        ({"a.q.weight": fp8(4, 32), "a.q.factor": UE8M0, "a.q.bias": ONES}, "a.q.factor F8_E8M0[1, 1]"),
        ({"wq.weight": fp8(4, 32), "wq.dequant_scale": np.float32(1)}, "wq.dequant_scale F32[]"),
        ({"a.fc.weight": fp8(4, 32), "a.fc_scale": ONES, "a.fc_norm.weight": ONES}, "a.fc_scale F32[4, 1]"),
        ({"weight": fp8(4, 32), "scale_weight": np.float32(1)}, "scale_weight F32[]"),
        ({"a.q.weight": fp8(4, 32), "a.q.weight_scale": ONES.astype(np.int32)}, "a.q.weight_scale I32[4, 1]"),
        (PACKED, "a.weight_scale F32[4, 2]"),
        ({"a.q.weight": fp8(4, 32), "a.q.alpha": np.float32(1), "a.q.lora_A.weight": ONES}, "a.q.alpha F32[]"),
    ],
)
def test_a_scale_of_another_name_or_dtype_is_named_and_the_file_not_called_damaged(tensors, named, tmp_path):
    path = write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="holds codes, but none of the names of scales that are read") as caught:
        load(path)
    (finding,) = caught.value.findings
    assert (finding.id, finding.severity) == ("unknown-layout", "error")
    assert named in finding.message
    assert all(word not in str(caught.value) for word in ("damaged", "lora_A", "fc_norm", "bias"))
    found = detect(path)
    assert (found.family, found.confidence) == ("unknown", 0.0)
    assert "codes without a scale of a known name" in found.evidence[-1]


def test_experts_and_tiles_with_scales_of_another_name_are_not_called_damaged(tmp_path):
    expert = {"weight": np.ones((4, 16), np.int8), "block_scale": ("F8_E8M0", np.ones((4, 1), np.uint8))}
    trunk = {"attn.wo.weight": fp8(128, 128), "attn.wo.block_scale": UE8M0, "attn.wo_norm.weight": ONES}
    tensors = {**{f"ffn.experts.0.w1.{name}": array for name, array in expert.items()}, **trunk}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    for one in (None, config):
        found = load(write(tmp_path / "model.safetensors", tensors, config=one), strict=False)
        text = "\n".join(map(str, found.findings))
        assert found.detection.family == "unknown"
        assert "ffn.experts.0.w1.block_scale F8_E8M0[4, 1]" in text
        assert "attn.wo.block_scale F8_E8M0[1, 1]" in text
        assert "damaged" not in text


def test_codes_without_any_scale_may_be_the_values(tmp_path):
    with pytest.raises(CheckpointError, match="or the codes are the values themselves") as caught:
        load(write(tmp_path / "model.safetensors", {"a.weight": fp8(4, 32), "a.norm.weight": np.ones(4, np.float32)}))
    assert [one.id for one in caught.value.findings] == ["missing-scale"]


INT8, INT32 = np.ones((4, 32), np.int8), np.ones((4, 4), np.int32)


@pytest.mark.parametrize("names", [("attn.relative_position_index", "attn.logit_scale"), ("a.ids", "a.scales")])
def test_indices_beside_a_scale_are_no_codes(names, tmp_path):
    index, scale = names
    tensors = {index: np.zeros((4, 4), np.int64), scale: ONES}
    found = load(write(tmp_path / "model.safetensors", tensors)).findings
    assert not [one for one in found if one.severity != "info"]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.weight": INT8, "a.weight_scale": ONES}, "a.weight I8[4, 32], beside a.weight_scale F32[4, 1]"),
        ({"a.qweight": INT32, "a.qzeros": INT32, "a.scales": ONES}, "beside a.qzeros I32[4, 4], a.scales F32[4, 1]"),
        ({"a.weight": np.ones((64, 1), np.uint8), "a.weight.absmax": ONES}, "U8[64, 1], beside a.weight.absmax"),
        ({f"{i}.w": INT8 for i in range(3)} | {f"{i}.w_s": ONES for i in range(3)}, "3 tensors such as 0.w I8[4, 32]"),
        ({"a.w_fp8": fp8(4, 32)}, "a.w_fp8 F8_E4M3[4, 32]: these seem to be codes"),
        ({"a.weight": ("F8_E4M3FNUZ", INT8.view(np.uint8))}, "a.weight F8_E4M3FNUZ[4, 32]"),
    ],
)
def test_codes_that_no_family_has_are_named_where_they_are_read_as_plain_tensors(tensors, words, tmp_path):
    found = load(write(tmp_path / "model.safetensors", tensors))
    assert [(one.id, one.severity) for one in found.findings] == [("unread-codes", "warn")]
    assert words in found.findings[0].message


@pytest.mark.parametrize(
    "tensors",
    [
        {"position_ids": np.arange(8)[None], "a.weight": np.ones((4, 32), "f"), "a.num_batches_tracked": np.int64(3)},
        {"norm.scale": np.ones(4, "f"), "a.mask": np.ones((4, 4), np.bool_), "logit_scale": np.float32(1)},
    ],
)
def test_integers_that_are_no_codes_are_left_alone(tensors, tmp_path):
    found = load(write(tmp_path / "model.safetensors", tensors)).findings
    assert not [one for one in found if one.severity != "info"]


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ({"weight_zero_point": np.zeros((4, 1), np.int8)}, []),
        ({"weight_zero_point": np.full((4, 1), 2, np.int8)}, ["unsupported"]),
        ({"weight_g_idx": np.arange(32, dtype=np.int32) // 16}, []),
        ({"weight_g_idx": np.arange(32, dtype=np.int32)[::-1].copy()}, ["unsupported"]),
    ],
)
def test_tensors_that_change_what_codes_mean_are_refused_by_name(extra, found, tmp_path):
    path = write(tmp_path / "model.safetensors", layer("a") | {f"a.{name}": array for name, array in extra.items()})
    assert [one.id for one in load(path, strict=False).findings if one.severity == "error"] == found
    if found:
        with pytest.raises(CheckpointError, match=next(iter(extra))):
            load(path)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (np.ones((2, 4), "f").astype(ml_dtypes.float8_e4m3fn), "with their last two axes swapped"),
        (np.ones((128, 4), "f").astype(ml_dtypes.float8_e4m3fn), "padded to 128 rows and 4 columns for a kernel"),
        (np.ones((3, 3), "f").astype(ml_dtypes.float8_e4m3fn), "This order of scales is not read"),
    ],
)
def test_scales_in_another_order_say_which(scale, words, tmp_path):
    with pytest.raises(CheckpointError, match=words) as caught:
        load(write(tmp_path / "model.safetensors", layer("a", scale=scale)))
    assert "damaged" not in str(caught.value)


# ---- our own files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [name for name in WRITTEN if not name.startswith("microfloat:") and name != "gptoss:hf"])
def test_no_false_alarm_about_our_own_files(to, tmp_path):
    shapes = {
        "model.layers.0.mlp.gate_proj": (128, 256), "model.layers.0.mlp.up_proj": (128, 256), "lm_head": (64, 256),
        "model.layers.0.mlp.gate": (8, 256), "model.layers.0.self_attn.o_proj": (256, 128), "score": (2, 256),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    records = [
        Record(f"{name}.weight", rng.standard_normal(shape, np.float32), logical_shape=shape)
        for name, shape in shapes.items()
    ]
    save(records, tmp_path / "plain", format="plain")
    convert(tmp_path / "plain", tmp_path / "out", to=to)
    found = load(tmp_path / "out")
    assert found.findings == []
    assert found.detection.confidence == 1.0


@pytest.mark.parametrize("codes", [[0x7F], [0xFF], [0x7D, 0xFE], [0x80, 0x7C, 0xFC], [0, 1, 0x90], []])
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_tensor_e5m2"])
def test_nan_codes_of_either_sign_are_counted(name, codes):
    """A look at the largest code of each sign tells whether there is one."""
    fmt = FORMATS[name]
    array = np.array([*codes, 3], np.uint8).reshape(1, -1)
    record = Record("a.weight", array, np.ones((), np.float32), None, fmt, array.shape)
    count = np.count_nonzero(np.isnan(decode(array, fmt.element)))
    messages = [finding.message for finding in code_findings(record)]
    assert messages == ([f"{count} of {array.size} codes are NaN."] if count else [])


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "mxfp6_e2m3", "nvfp4", "fp8_128x128"])
@pytest.mark.parametrize("shape", [(64, 160), (3, 40, 96)])
def test_blocks_with_a_nan_scale_are_read_as_zeros_and_others_as_they_are(fmt, shape):
    fmt = FORMATS[fmt]
    x = np.random.default_rng(3).standard_normal(shape, dtype=np.float32)
    made = [reference.quantize(one, fmt) for one in x.reshape(-1, *shape[-2:])]
    codes = [reference.pack_fp6(q.codes) if fmt.element.bits == 6 else q.codes for q in made]
    grid = np.stack([q.scale for q in made]).reshape(*shape[:-2], *made[0].scale.shape)
    levels = None
    if fmt.tensor_scale:
        levels = np.float32([q.tensor_scale for q in made]).reshape((-1, 1, 1) if len(shape) > 2 else ())
    broken = grid.copy()
    broken[..., -1, ::2] = {"E8M0": 255, "E4M3": 0x7F, "FP32": np.nan}[fmt.scale.name]
    record = Record("a.weight", np.stack(codes).reshape(*shape[:-1], -1), broken, levels, fmt, shape)
    values = record.dequantize()
    assert np.isnan(values).any()
    np.testing.assert_array_equal(without_nan(record).dequantize(), np.nan_to_num(values, nan=0.0))
