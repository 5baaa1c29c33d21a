"""Configurations beside a checkpoint: which of several counts, what they mean for a module, what they cannot mean."""

import importlib.util
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from microfloat.checkpoint import convert, load
from microfloat.checkpoint.families.patterns import EXACT, PARTS, SHELL, SUBSTRING, Patterns, users_regex
from microfloat.checkpoint.folder import announced
from microfloat.errors import CheckpointError, InvalidValueError
from tests.checkpoint.files import nvfp4, write

BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
LOCAL = {**WEIGHTS, "dynamic": "local"}
W4A4 = {"g": {"weights": WEIGHTS, "input_activations": LOCAL}}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}  # fmt: skip


def ct(**more):
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"a": group},
    } | more


def modelopt(algorithm="NVFP4", **more):
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


def layer(name, style="modelopt", input_scale=False):
    parts = nvfp4()
    last = ("", "_scale", "_scale_2") if style == "modelopt" else ("_packed", "_scale", "_global_scale")
    made = {f"{name}.weight{end}": parts[role] for role, end in zip(("codes", "scale", "global"), last, strict=True)}
    scale = "input_scale" if style == "modelopt" else "input_global_scale"
    return made | ({f"{name}.{scale}": np.float32(2)} if input_scale else {})


def fp8(name, rows=4, length=32, **scales):
    codes = np.full((rows, length), 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)
    return {f"{name}.weight": codes, **{f"{name}.{last}": np.asarray(value) for last, value in scales.items()}}


def folder_of(tmp_path, tensors, config=None, second=None):
    write(tmp_path / "model.safetensors", tensors)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    if second is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, **second}))
    return tmp_path


def ids(loaded, *, but=("info",)):
    return [finding.id for finding in loaded.findings if finding.severity not in but]


# ---- which description counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "config", "second", "family", "words"),
    [
        # a stale text_config, as in Kimi-K2.5-NVFP4's first upload, and a stale block at the top
        (layer("a", input_scale=True), {"text_config": {"quantization_config": INT4}},
         {"quantization": {"quant_algo": "NVFP4"}}, "modelopt:nvfp4", "config.json (text_config)"),
        (layer("a", "ct"), {"quantization_config": INT4, "text_config": {"quantization_config": ct()}}, None,
         "ct:nvfp4", "format 'pack-quantized', which is not read; config.json (text_config) says"),
        (layer("a", "ct"), {"quantization_config": modelopt(), "llm_config": {"quantization_config": ct()}}, None,
         "ct:nvfp4", "config.json says modelopt:nvfp4"),
        (layer("a"), {"quantization_config": modelopt("FP8")}, {"quantization": {"quant_algo": "W4A16_NVFP4"}},
         "modelopt:nvfp4", "config.json says modelopt:fp8, activations static"),
        # both fit the weights; the one that announces no scale of inputs fits the file
        (layer("a"), {"quantization_config": modelopt()}, {"quantization": {"quant_algo": "W4A16_NVFP4"}},
         "modelopt:nvfp4", "activations none"),
    ],
)  # fmt: skip
def test_the_description_counts_with_which_the_tensors_agree(tensors, config, second, family, words, tmp_path):
    loaded = load(folder_of(tmp_path, tensors, config, second))
    assert (loaded.detection.family, loaded.detection.confidence) == (family, 1.0)
    (finding,) = loaded.findings
    assert (finding.id, finding.severity) == ("config-disagrees", "warn")
    assert words in str(finding)
    assert "is believed, with which the tensors agree" in finding.remedy


def test_a_second_description_of_another_file_changes_nothing(tmp_path):
    """INT4 codes beside a configuration of INT4 stay refused, whatever hf_quant_config.json says."""
    tensors = {"a.weight_packed": np.ones((4, 8), np.int32), "a.weight_scale": np.ones((4, 2), np.float16)}
    folder = folder_of(tmp_path, tensors, {"quantization_config": INT4}, {"quantization": {"quant_algo": "NVFP4"}})
    with pytest.raises(CheckpointError, match="pack-quantized"):
        load(folder)


def test_descriptions_that_say_the_same_of_every_module_are_not_compared_word_by_word(tmp_path):
    config = modelopt("W4A16_NVFP4", ignore=["b*"])
    second = {"quantization": {"quant_algo": "W4A16_NVFP4", "exclude_modules": ["b", "lm_head"]}}
    tensors = {**layer("a"), "b.weight": np.ones((4, 32), np.float32)}
    assert load(folder_of(tmp_path, tensors, {"quantization_config": config}, second)).findings == []


@pytest.mark.parametrize(
    ("tensors", "config", "family"),
    [
        (fp8("a", weight_scale=np.float32(2), input_scale=np.float32(1)),
         {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}, "quant_algo": "FP8", "kv_cache_scheme": "FP8"},
         "modelopt:fp8"),
        (layer("a", input_scale=True), {"producer": {"name": "modelopt", "version": "0.50.0"}, "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "group_size": 16}, "input_activations": {"num_bits": 4}}}},
         "modelopt:nvfp4"),
        (layer("a"), {"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "W4A16_NVFP4"}}, "modelopt:nvfp4"),
        (layer("a", "ct"), {"config_groups": {"g": {"targets": "Linear", "weights": WEIGHTS}}}, "ct:nvfp4"),
        (fp8("a", 128, 128, weight_scale_inv=np.ones((1, 1), np.float32)), {"weight_block_size": [128, 128]},
         "deepseek:fp8"),
    ],
)  # fmt: skip
def test_a_block_without_its_method_is_known_by_its_entries(tensors, config, family, tmp_path):
    loaded = load(folder_of(tmp_path, tensors, {"quantization_config": config}))
    assert (loaded.detection.family, ids(loaded)) == (family, [])


def test_a_block_that_nothing_is_known_of_is_named_by_its_entries(tmp_path):
    folder = folder_of(tmp_path, layer("a", "ct"), {"quantization_config": {"bits": 4, "sym": True}})
    with pytest.raises(CheckpointError, match=r"'bits', 'sym'.*format=.ct:nvfp4. reads them") as caught:
        load(folder)
    assert "damaged" not in str(caught.value)
    assert load(folder, format="ct:nvfp4").detection.family == "ct:nvfp4"


def test_what_torchao_wrote_is_read_under_its_method(tmp_path):
    about = {"_type": "Float8Tensor", "_data": {"block_size": [1, 32]}, "_tensor_data_names": ["qdata", "scale"]}
    metadata = {"tensor_names": json.dumps(["a.weight"]), "a.weight": json.dumps(about)}
    codes = fp8("a")["a.weight"]
    tensors = {
        "a._weight_qdata": codes,
        "a._weight_scale": np.ones((4, 1), np.float32),
        "b.weight": codes[:2].astype("f"),
    }
    write(tmp_path / "model.safetensors", tensors, metadata, {"quant_method": "torchao", "quant_type": {"default": {}}})
    loaded = load(tmp_path)
    assert (loaded.detection.family, loaded.detection.confidence, loaded.findings) == ("torchao", 1.0, [])


# ---- rules and patterns ------------------------------------------------------------------------------------------


def test_a_rule_for_a_module_covers_the_modules_inside_it(tmp_path):
    table = {
        "m.experts": {"quant_algo": "W4A16_NVFP4"}, "m.experts.0.down": {"quant_algo": "FP8"},
        "m.*.shared": {"quant_algo": "W4A16_NVFP4"},
    }  # fmt: skip
    tensors = {
        **layer("m.experts.0.up"), **fp8("m.experts.0.down", weight_scale=np.float32(1), input_scale=np.float32(1)),
        **layer("m.0.shared.gate"),
    }  # fmt: skip
    loaded = load(
        folder_of(tmp_path, tensors, {"quantization_config": modelopt("MIXED_PRECISION", quantized_layers=table)})
    )
    assert loaded.findings == []
    assert loaded["m.experts.0.up.weight"].activation["scheme"] == "none"
    assert loaded["m.experts.0.down.weight"].activation["scheme"] == "static"


def test_a_plain_layer_inside_an_ignored_module_is_no_contradiction(tmp_path):
    tensors = {**layer("m.fc", "ct"), "visual.0.fc.weight": np.ones((4, 32), np.float32)}
    config = {"quantization_config": ct(ignore=["visual"])}
    assert load(folder_of(tmp_path, tensors, config)).findings == []


@pytest.mark.parametrize(
    ("dialect", "pattern", "covered", "free"),
    [
        (PARTS, "gate", ["a.gate", "gate", "a.gate.b"], ["a.gate_proj", "a.gates.b", "gate_up"]),
        (PARTS, "mlp.gate", ["model.layers.0.mlp.gate"], ["model.layers.0.mlp.gate_proj"]),
        (PARTS, "model.layers.1", ["model.layers.1.q", "model.layers.1"], ["model.layers.11.q"]),
        (PARTS, "model.layers.*.self_attn", ["model.layers.12.self_attn.q"], ["model.layers.12.self_attn_norm"]),
        (PARTS, "model.layers.[0-3].mlp|lm_head", ["model.layers.2.mlp.up", "lm_head"], ["model.layers.4.mlp.up"]),
        (PARTS, "model.visual", ["visual.fc", "a.model.visual"], ["a.visual", "visuals"]),
        (PARTS, "*.visual.*", ["model.visual.fc"], ["model.visuals"]),
        (EXACT, "a.gate", ["a.gate"], ["a.gate.b", "b.a.gate"]),
        (EXACT, "re:.*gate$", ["x.gate"], ["x.gate_proj"]),
        (SHELL, "a.gate*", ["a.gate_proj"], ["b.a.gate"]),
        (SUBSTRING, "gate", ["a.gate_proj"], ["a.up"]),
    ],
)  # fmt: skip
def test_a_pattern_covers_what_the_engine_of_its_dialect_lets_it(dialect, pattern, covered, free):
    patterns = Patterns([pattern], dialect)
    assert [name for name in covered + free if patterns.first(name)] == covered


@pytest.mark.parametrize("text", ["(.*.*)*x$", "re:(a+)+$", r"re:x(?:\w*[a-z]+)*", "((.*)*)", "re:(.{0,9}|b*){2,}"])
def test_an_expression_of_a_caller_that_may_never_end_is_named(text):
    with pytest.raises(InvalidValueError, match=r"ignore: got .*might take for ever"):
        users_regex("ignore", text)


@pytest.mark.parametrize(
    "text", [r"re:model(\.\d+)*\.q", r"(\w+\.)*gate", "re:.*(a|b)+.*", "(layers.*)?", r"re:\(.*\)*", "re:[(a+)*]"]
)
def test_other_expressions_of_a_caller_are_taken(text):
    assert users_regex("ignore", text).pattern == text.removeprefix("re:")


def test_patterns_of_transformers_cover_what_transformers_says():
    package = importlib.util.find_spec("transformers")
    if package is None:
        pytest.skip("transformers is not installed")
    place = Path(package.submodule_search_locations[0]) / "quantizers" / "quantizers_utils.py"
    spec = importlib.util.spec_from_file_location("quantizers_utils", place)  # alone: the package takes seconds
    spec.loader.exec_module(utils := importlib.util.module_from_spec(spec))
    names = [f"model.layers.{i}.{name}" for i in (1, 11) for name in ("mlp.gate", "mlp.gate_proj", "self_attn.q_proj")]
    names += ["lm_head", "gate", "model.visual.merger.fc", "score"]
    for pattern in ("gate", "mlp.gate", "model.layers.1", "layers.1", "model.layers.*.mlp", "lm_head", "proj", "e"):
        ours = Patterns([pattern], PARTS)
        for name in names:
            if not utils.should_convert_module(name, [pattern]):
                assert ours.first(name), (pattern, name)
            elif ours.first(name):  # whole parts inside a name: files have other prefixes than models
                assert f".{pattern}." in f".{name}.", (pattern, name)


def test_a_gate_that_is_ignored_leaves_gate_proj_its_activations(tmp_path):
    scale = np.ones((1, 1), np.float32)
    tensors = {
        **fp8("mlp.gate_proj", 128, 128, weight_scale_inv=scale),
        "mlp.gate.weight": np.ones((4, 128), np.float32),
    }
    config = {"quantization_config": {**BLOCK, "modules_to_not_convert": ["gate"]}}
    loaded = load(folder_of(tmp_path, tensors, config))
    assert loaded["mlp.gate_proj.weight"].activation["scheme"] == "dynamic"
    assert ids(loaded) == []


# ---- what a configuration cannot mean ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "places"),
    [
        ({"config_groups": {"R4": {"apply": [{"location": "input", "targets": ["re:.*fc$"]}]}}}, "input of re:.*fc$"),
        ({"config_groups": {"R3": {"apply": [{"location": "k_cache"}, {"location": "q_attn"}]}}}, "k_cache, q_attn"),
        ({"config_groups": {"X": {"apply": [{"location": "weight_input"}, {"location": "output"}]}}}, "output"),
        ({"rotations": ["hadamard"]}, "an unknown place"),
        ("quarot", "an unknown place"),
    ],
)  # fmt: skip
def test_transforms_of_activations_are_refused_by_name(transform, places, tmp_path):
    folder = folder_of(tmp_path, layer("a", "ct"), {"quantization_config": ct(transform_config=transform)})
    with pytest.raises(CheckpointError, match="transform_config") as caught:
        load(folder)
    assert places in str(caught.value)
    assert ids(load(folder, strict=False)) == ["unsupported"]


FOLDED = [{"location": "weight_output", "targets": ["re:.*o_proj$"]}, {"location": "weight_input", "inverse": True}]


@pytest.mark.parametrize(
    "transform", [None, {}, {"config_groups": {}}, {"config_groups": {"R1": {"type": "hadamard", "apply": FOLDED}}}]
)
def test_transforms_that_the_weights_hold_already_change_nothing(transform, tmp_path):
    folder = folder_of(tmp_path, layer("a", "ct"), {"quantization_config": ct(transform_config=transform)})
    assert load(folder).findings == []


def test_sparse_weights_are_refused_by_name(tmp_path):
    tensors = {"a.compressed": np.ones((4, 16), np.uint8), "a.bitmask": np.ones((4, 4), np.uint8)}
    config = {"quantization_config": ct(sparsity_config={"format": "sparse-24-bitmask"})}
    with pytest.raises(CheckpointError, match=r"sparsity_config has the format 'sparse-24-bitmask', by which a\."):
        load(folder_of(tmp_path, tensors, config))


@pytest.mark.parametrize("more", [{}, {"ignore": ["lm_head"], "config_groups": None}])
def test_a_configuration_of_a_cache_alone_leaves_the_weights_plain(more, tmp_path):
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head"}
    config = ct(format="dense", config_groups={}, kv_cache_scheme=scheme) | more
    tensors = {"attn.k_proj.weight": np.ones((4, 32), np.float32), "attn.k_scale": np.ones((2, 1, 1), np.float32)}
    found = load(folder_of(tmp_path, tensors, {"quantization_config": config}))
    assert found.findings == []
    assert found["attn.k_proj.weight"].format is None


@pytest.mark.parametrize(
    ("sparsity", "found"),
    [({"format": "dense", "sparsity_structure": "2:4"}, []), ({"format": "sparse-bitmask"}, ["config-disagrees"])],
)
def test_dense_weights_are_read_whatever_sparsity_is_announced(sparsity, found, tmp_path):
    folder = folder_of(tmp_path, layer("a", "ct"), {"quantization_config": ct(sparsity_config=sparsity)})
    assert ids(load(folder)) == found


def test_a_group_of_a_format_that_is_not_read_is_refused_where_it_covers_something(tmp_path):
    groups = {
        **ct()["config_groups"],
        "b": {"targets": ["re:b"], "format": "pack-quantized", "weights": {"num_bits": 4}},
    }
    config = {"quantization_config": ct(config_groups=groups)}
    assert load(folder_of(tmp_path, layer("a", "ct"), config)).findings == []
    tensors = {**layer("a", "ct"), "b.weight_packed": np.ones((4, 8), np.int32), "b.weight_scale": np.ones((4, 1), "f")}
    with pytest.raises(CheckpointError, match=r"'pack-quantized' of a group is not read; it covers b\.weight_packed"):
        load(folder_of(tmp_path, tensors, config))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (ct(rotation="r1", version="0.1", observer=None), "'rotation': r1 is not read"),
        (ct(config_groups={"a": {**ct()["config_groups"]["a"], "shift": 3}}), "'shift': 3"),
        (modelopt("W4A16_NVFP4", rotate=True, has_zero_point=False), "'rotate': True"),
        ({**BLOCK, "rotate": [1], "static": False}, "'rotate': [1] is not read"),
    ],
)
def test_entries_that_are_not_known_and_say_something_are_named(more, words, tmp_path):
    style = "ct" if more["quant_method"] == "compressed-tensors" else "modelopt"
    tensors = fp8("a", 128, 128, weight_scale_inv=np.ones((1, 1), "f")) if "rotate" in more and style != "ct" and (
        more["quant_method"] == "fp8") else layer("a", style)  # fmt: skip
    found = [one for one in load(folder_of(tmp_path, tensors, {"quantization_config": more})).findings]
    assert [(one.id, one.severity) for one in found] == [("unknown-entry", "warn")]
    assert words in found[0].message


def test_codes_of_fnuz_are_refused_by_name(tmp_path):
    tensors = fp8("a", 128, 128, weight_scale_inv=np.ones((1, 1), "f"))
    folder = folder_of(tmp_path, tensors, {"quantization_config": {**BLOCK, "fmt": "float8_e4m3fnuz"}})
    with pytest.raises(CheckpointError, match="float8_e4m3fnuz"):
        load(folder)


def test_the_dialect_of_autofp8_has_the_same_method(tmp_path):
    scales = {"weight_scale": np.ones(1, np.float32), "input_scale": np.ones(1, np.float32)}
    tensors = {**fp8("a", **scales), "lm_head.weight": np.ones((4, 32), np.float32)}
    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    loaded = load(folder_of(tmp_path, tensors, {"quantization_config": config}))
    assert (loaded.detection.confidence, loaded.findings) == (1.0, [])


# ---- activations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "config", "scheme"),
    [
        (layer("a", input_scale=True), modelopt("W4A16_NVFP4"), "none"),
        (layer("a", "ct", input_scale=True), ct(), "none"),
        (fp8("a", 128, 128, weight_scale_inv=np.ones((1, 1), "f"), activation_scale=np.float32(2)), BLOCK, "dynamic"),
        (fp8("a", weight_scale=np.ones(4, "f"), input_scale=np.float32(2)), modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
         "dynamic"),
    ],
)  # fmt: skip
def test_a_stored_input_scale_does_not_change_what_the_configuration_says(tensors, config, scheme, tmp_path):
    loaded = load(folder_of(tmp_path, tensors, {"quantization_config": config}))
    record = loaded["a.weight"]
    assert (record.activation["scheme"], record.activation["scale"]) == (scheme, None)
    (finding,) = loaded.findings
    assert (finding.id, finding.severity) == ("unused-input-scale", "info")
    assert list(loaded) == ["a.weight"]


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (layer("a", input_scale=True), None),
        (layer("a", input_scale=True), modelopt()),
        (layer("a", "ct", input_scale=True), ct(config_groups=W4A4)),
        (fp8("a", weight_scale=np.float32(2), input_scale=np.float32(2)), modelopt("FP8")),
    ],
)
def test_a_stored_input_scale_counts_where_it_is_announced_or_nothing_is_said(tensors, config, tmp_path):
    loaded = load(folder_of(tmp_path, tensors, config and {"quantization_config": config}))
    assert loaded["a.weight"].activation["scheme"] == "static"
    assert loaded.findings == []


@pytest.mark.parametrize(
    ("tensors", "config", "name"),
    [
        (layer("a"), modelopt(), "input_scale"),
        (layer("a", "ct"), ct(config_groups=W4A4), "input_global_scale"),
        (fp8("a", weight_scale=np.float32(2)), modelopt("FP8"), "input_scale"),
        (fp8("a", weight_scale_inv=np.float32(2)), {"quant_method": "fp8", "activation_scheme": "static"},
         "activation_scale"),
    ],
)  # fmt: skip
def test_scales_of_inputs_that_are_announced_and_missing_are_an_error_but_weights_are_read(
    tensors, config, name, tmp_path
):
    folder = folder_of(tmp_path, tensors, {"quantization_config": config})
    with pytest.warns(UserWarning, match=f"no {name} stands beside a layer: a.weight"):
        loaded = load(folder)
    assert ids(loaded) == ["missing-input-scale"]
    assert loaded["a.weight"].dequantize().any()


# ---- JSON of any type --------------------------------------------------------------------------------------------

VALUES = (None, True, 3, 1.5, "x", [], ["x", 1], [["x"]], {}, {"x": [1]})


def changed(document, path):
    """Copies of a document with every value of VALUES at one place."""
    for value in VALUES:
        made = json.loads(json.dumps(document))
        inner = made
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        yield made


def places(document, path=()):
    """The paths of all values of a document."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@pytest.mark.parametrize(
    "config",
    [
        ct(ignore=["lm_head", "re:.*x"], sparsity_config={"format": "dense"}, kv_cache_scheme={"num_bits": 8},
           transform_config={"config_groups": {"R": {"apply": [{"location": "weight_input", "targets": ["a"]}]}}},
           config_groups={"g": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": LOCAL}}),
        modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "NVFP4", "group_size": 16}}, ignore=["b"],
                 producer={"name": "modelopt", "version": "0.30.0"}, quantization={"quant_algo": "NVFP4"}),
        {**BLOCK, "modules_to_not_convert": ["b"], "scale_fmt": "float", "fmt": "e4m3"},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    ],
    ids=lambda config: config["quant_method"],
)  # fmt: skip
def test_a_value_of_another_type_anywhere_is_no_crash(config):
    document = {"quantization_config": config, "text_config": {"quantization_config": BLOCK}}
    for path in places(document):
        for made in changed(document, path):
            for one in announced({"config.json": made, "hf_quant_config.json": {"quantization": made}}):
                assert one.text
                one.scheme_of("a.b")
                one.leaves_plain("lm_head")


@pytest.mark.parametrize("value", [True, 3, "fp8", ["x"]])
def test_a_description_that_is_no_object_is_named(value, tmp_path):
    loaded = load(folder_of(tmp_path, layer("a"), {"quantization_config": value}, {"quantization": value}))
    assert loaded.detection.family == "modelopt:nvfp4"
    assert ids(loaded) == ["config-disagrees"] * 2
    assert "needed an object; it is not read" in loaded.findings[0].message


# ---- a configuration of another family ---------------------------------------------------------------------------


def test_activations_of_another_family_are_not_those_of_the_tensors(tmp_path):
    """An FP8 layer under a rule for NVFP4 keeps its own static scale; NVFP4 under a rule for FP8 is weight-only."""
    tensors = {**layer("a", input_scale=True), **fp8("k", weight_scale=np.float32(1), input_scale=np.float32(2))}
    loaded = load(folder_of(tmp_path, tensors, {"quantization_config": modelopt()}))
    assert ids(loaded) == ["config-disagrees"]
    assert loaded["k.weight"].activation == {"scheme": "static", "scale": 2, "format": None}
    loaded = load(folder_of(tmp_path, layer("a", "ct"), {"quantization_config": BLOCK}))
    assert loaded["a.weight"].activation["scheme"] == "none"


def test_a_family_that_the_caller_names_is_no_contradiction(tmp_path):
    folder = folder_of(tmp_path, layer("a", "ct"), {"quantization_config": {"quant_method": "quark"}})
    assert load(folder, format="ct:nvfp4").findings == []


def test_codes_that_are_announced_and_not_read_are_an_error(tmp_path):
    tensors = {"a.weight": np.ones((4, 32), np.int8), "a.weight_scale_inv": np.ones((4, 1), np.float32)}
    folder = folder_of(tmp_path, tensors, {"quantization_config": BLOCK})
    with pytest.raises(CheckpointError, match=r"a.weight I8\[4, 32\], beside a.weight_scale_inv"):
        load(folder)
    assert ids(load(folder, strict=False)) == ["unread-codes"]


def test_scales_of_inputs_under_other_names_are_named(tmp_path):
    tensors = fp8("a", weight_scale=np.float32(1), qscale_act=np.float32(1))
    with pytest.warns(UserWarning, match=r"a.weight \(there are a.qscale_act, which are not read\)"):
        load(folder_of(tmp_path, tensors, {"quantization_config": modelopt("FP8")}))


@pytest.mark.parametrize(
    ("place", "to"), [(("thinker_config", "text_config"), "bf16"), (("language_config",), "ct:mxfp4")]
)
def test_what_is_said_inside_a_model_is_read_and_not_written_again(place, to, tmp_path):
    config = {"quantization_config": modelopt("W4A16_NVFP4", kv_cache_scheme={"num_bits": 8}), "hidden_size": 32}
    for key in reversed(place):
        config = {key: config}
    (tmp_path / "source").mkdir()
    source = folder_of(tmp_path / "source", layer("a"), config)
    assert load(source).detection.confidence == 1.0
    convert(source, tmp_path / "out", to=to)
    made = inner = load(tmp_path / "out").config
    for key in place:
        inner = inner[key]
    assert inner == {"hidden_size": 32}
    assert to == "bf16" or made["quantization_config"]["kv_cache_scheme"]
