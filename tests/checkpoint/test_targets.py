"""What a target of `convert` means whatever the source, what stays as it is, and what the result announces."""

import json

import ml_dtypes
import numpy as np
import pytest

from microfloat import metrics, reference
from microfloat.checkpoint import Record, convert, load, save
from microfloat.checkpoint.families import WRITTEN
from microfloat.errors import CheckpointError, InvalidValueError
from microfloat.formats import FP8_TENSOR, MXFP4, NVFP4

BF16 = np.dtype(ml_dtypes.bfloat16)
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
Q, ROUTER = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight"
EXPERTS = "model.layers.0.mlp.experts"
CACHE = "model.layers.0.self_attn.k_scale"


def matrix(name, shape=(128, 128), factor=1.0):
    """A record of random numbers in bfloat16."""
    values = np.random.default_rng(list(name.encode())).standard_normal(shape) * factor
    return Record(name, values.astype(BF16), logical_shape=tuple(shape))


def scalar(name, value, dtype=np.float32):
    return Record(name, np.asarray(value, dtype), logical_shape=())


def stored(folder, records, config=None):
    """A checkpoint of plain records in a folder, with its path."""
    save(records, folder, format="plain", config=config or {"model_type": "llama"})
    return folder


def config_of(folder):
    return json.loads((folder / "config.json").read_text()).get("quantization_config", {})


def announces_stored_scales(checkpoint):
    """True where the configurations promise a stored scale of inputs."""
    config = checkpoint.config.get("quantization_config", {})
    second = checkpoint.configs.get("hf_quant_config.json", {}).get("quantization", {})
    inputs = [group.get("input_activations") for group in config.get("config_groups", {}).values()]
    groups = any(one and one["dynamic"] is not True for one in inputs)
    quark = config.get("global_quant_config", {}).get("input_tensors")
    groups = groups or (quark is not None and not quark["is_dynamic"])
    return groups or config.get("activation_scheme") == "static" or second.get("quant_algo") in ("FP8", "NVFP4")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same two layers by kind of source; static scales of inputs stand in two of them."""
    folder = tmp_path_factory.mktemp("sources")
    plain = stored(folder / "plain", [matrix(UP), matrix(DOWN)])
    for to in ("ct:fp8_dynamic", "modelopt:mxfp8"):
        convert(plain, folder / to, to=to)
    for name, target, fmt in (("static_fp8", "microfloat:fp8_tensor", FP8_TENSOR), ("static_nvfp4", "ct:nvfp4", NVFP4)):
        convert(plain, folder / f"{name}_weights", to=target)
        static = {"scheme": "static", "scale": np.float32(0.5), "format": fmt}
        records = [
            Record(one.name, one.codes, one.scale, one.tensor_scale, one.format, one.logical_shape, activation=static)
            for one in load(folder / f"{name}_weights").values()
        ]
        save(records, folder / name, format="ct:fp8" if fmt is FP8_TENSOR else "ct:nvfp4")
    return folder


KINDS = ("plain", "ct:fp8_dynamic", "modelopt:mxfp8", "static_fp8", "static_nvfp4")
TARGETS = [name for name in WRITTEN if name != "gptoss:hf" and not name.startswith("microfloat:")]
TARGETS += ["microfloat:fp8_row", "microfloat:nvfp4", "microfloat:mxfp4"]


@pytest.mark.slow_cases(
    "further targets of a checked path",
    all_but=(
        "ct:nvfp4",
        "ct:fp8_block",
        "modelopt:nvfp4",
        "modelopt:fp8",
        "hf:finegrained_fp8",
        "quark:mxfp4",
        "microfloat:mxfp4",
        "fbgemm:fp8",
    ),
)
@pytest.mark.parametrize("to", TARGETS)
def test_a_target_means_one_thing_whatever_the_source_and_announces_only_scales_that_it_holds(sources, tmp_path, to):
    _, written = WRITTEN[to]
    takes = written.cast.format.tensor_scale is not None or written.cast.format.is_per_tensor
    usual = "none" if written.activation == "static" else written.activation
    for kind in KINDS:
        folder = tmp_path / kind
        convert(sources / kind, folder, to=to)
        made = load(folder)
        expected = "static" if takes and kind.startswith("static") else usual
        for record in made.values():
            assert record.activation["scheme"] == expected, kind
            assert (record.activation["scale"] is not None) == (expected == "static"), kind
        assert announces_stored_scales(made) == (expected == "static" and not to.startswith("microfloat:")), kind
        assert not [one for one in made.findings if one.severity != "info"], kind


def test_fp8_without_input_scales_is_written_as_weight_only_and_says_so(tmp_path):
    source = stored(tmp_path / "source", [matrix(UP), matrix(DOWN)])
    report = convert(source, tmp_path / "out", to="modelopt:fp8")
    (note,) = report.notes
    assert "these layers are weight-only" in note
    assert "2 in all" in note
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()  # which has no word for it
    assert "input_activations" not in config_of(tmp_path / "out")["config_groups"]["group_0"]


def test_beside_layers_with_input_scales_those_without_stay_in_high_precision(sources, tmp_path):
    """modelopt:fp8 has no word for weight-only layers beside others."""
    static = load(sources / "static_fp8")
    bare = load(sources / "static_fp8_weights")[DOWN]
    save([static[UP], bare], tmp_path / "source", format="microfloat:native")
    report = convert(tmp_path / "source", tmp_path / "out", to="modelopt:fp8")
    assert {layer.name: layer.action for layer in report.layers} == {UP: "carried", DOWN: "dequantized"}
    assert "no input scale, which modelopt:fp8 announces" in {layer.name: layer.reason for layer in report.layers}[DOWN]
    with pytest.raises(InvalidValueError, match=r"down_proj: got FP8 weights without a static input scale, beside"):
        save(load(tmp_path / "source"), tmp_path / "never", format="modelopt:fp8")


def test_inputs_that_only_the_target_quantizes_are_noted(sources, tmp_path):
    convert(sources / "plain", tmp_path / "weights", to="microfloat:mxfp8")
    report = convert(tmp_path / "weights", tmp_path / "out", to="ct:mxfp8")
    assert {layer.action for layer in report.layers} == {"carried"}
    assert [note for note in report.notes if "quantizes inputs on the way, as the source does not: 2 in all" in note]


def test_save_never_announces_scales_that_its_records_lack(sources, tmp_path):
    codes = load(sources / "static_nvfp4")[UP]
    dynamic = {"scheme": "dynamic", "scale": None, "format": NVFP4}
    record = Record(UP, codes.codes, codes.scale, codes.tensor_scale, NVFP4, codes.logical_shape, activation=dynamic)
    for to in ("ct:nvfp4", "modelopt:nvfp4"):
        with pytest.warns(UserWarning, match=r"save: 1 layers, such as model.layers.0.mlp.up_proj, .* weight-only"):
            save([record], tmp_path / to, format=to)
        assert load(tmp_path / to)[UP].activation["scheme"] == "none"
    save([record], tmp_path / "native", format="microfloat:native")
    assert load(tmp_path / "native")[UP].activation["scheme"] == "dynamic"
    convert(sources / "plain", tmp_path / "tokens", to="ct:fp8")
    with pytest.warns(UserWarning, match=r"save: 2 layers, .* a scale that modelopt:fp8 stores"):
        save(load(tmp_path / "tokens"), tmp_path / "fp8", format="modelopt:fp8")
    assert load(tmp_path / "fp8")[UP].activation["scheme"] == "none"


def test_one_scheme_for_all_layers_is_static_where_all_have_a_scale(sources, tmp_path):
    """The configuration of transformers has one word for all layers."""
    static = load(sources / "static_fp8")
    bare = load(sources / "static_fp8_weights")[DOWN]
    for name, records, scheme in (("all", static, "static"), ("some", [static[UP], bare], "dynamic")):
        save(records, tmp_path / f"{name}_native", format="microfloat:native")
        convert(tmp_path / f"{name}_native", tmp_path / name, to="hf:finegrained_fp8_tensor")
        assert config_of(tmp_path / name)["activation_scheme"] == scheme


@pytest.mark.parametrize("name", ["ct:fp8_dynamic", "ct:fp8_block", "microfloat:nvfp4", "hf:finegrained_fp8_tensor"])
def test_save_and_load_know_the_targets_of_convert(sources, tmp_path, name):
    family, written = WRITTEN[name]
    convert(sources / "plain", tmp_path / "made", to=name)
    save(load(tmp_path / "made"), tmp_path / "out", format=name)
    assert load(tmp_path / "out", format=name).detection.family == family.name
    convert(sources / "plain", tmp_path / "other", to="ct:mxfp4")
    with pytest.raises(InvalidValueError, match=f"the format mxfp4 for {name}, needed a format that {name} can hold"):
        save(load(tmp_path / "other"), tmp_path / "never", format=name)
    assert written.cast.format.name != "mxfp4"


def test_unknown_targets_are_listed_by_producer(sources, tmp_path):
    with pytest.raises(InvalidValueError) as caught:
        convert(sources / "plain", tmp_path / "out", to="ct:int4")
    assert "ct:{nvfp4, mxfp4, mxfp6, mxfp8, fp8, fp8_dynamic, fp8_block}" in str(caught.value)
    assert len(str(caught.value)) < 800


# ---- what stays --------------------------------------------------------------------------------------------------

IGNORING = {
    "ct": ("ct:fp8_dynamic", "ignore", ["lm_head", "re:.*self_attn.*"]),
    "modelopt": ("modelopt:mxfp8", "ignore", ["lm_head", "*self_attn*"]),
    "hf": ("hf:finegrained_fp8", "modules_to_not_convert", ["self_attn"]),
}


@pytest.mark.parametrize("kind", IGNORING)
@pytest.mark.parametrize("to", ["ct:nvfp4", "deepseek:fp8"])
def test_what_the_source_leaves_out_stays(tmp_path, kind, to):
    first, key, patterns = IGNORING[kind]
    source = stored(tmp_path / "source", [matrix(UP), matrix(Q), matrix("visual.merger.fc.weight")])
    convert(source, tmp_path / "first", to=first, ignore=["self_attn", "visual"])
    path = tmp_path / "first" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"][key] = patterns
    path.write_text(json.dumps(config))
    report = convert(tmp_path / "first", tmp_path / "out", to=to)
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert reasons == {
        Q: f"left out by the source ({patterns[-1]!r})",
        "visual.merger.fc.weight": "plain in the source, which is quantized",
    }
    convert(tmp_path / "first", tmp_path / "plain", to="bf16")
    again = convert(tmp_path / "plain", tmp_path / "all", to=to)  # after which all of it is cast
    assert {layer.action for layer in again.layers} == {"cast"}


@pytest.mark.parametrize(
    ("text", "vision", "theirs"),
    [
        ("model", "visual", {"model.language_model.layers.0.q_proj", "model.visual.blocks.3.fc1"}),
        ("language_model.model", "vision_tower", {"model.language_model.layers.0.q_proj",
                                                  "model.vision_tower.blocks.3.fc1"}),
        ("model", "head_of_its_own", set()),
    ],
)  # fmt: skip
def test_compressed_tensors_ignores_modules_of_multimodal_models_by_both_names(tmp_path, text, vision, theirs):
    """The package compares whole names, and transformers 5 calls such modules otherwise than their files."""
    names = [f"{text}.layers.0.up_proj", f"{text}.layers.0.q_proj", f"{vision}.blocks.3.fc1"]
    source = stored(tmp_path / "source", [matrix(f"{name}.weight") for name in names])
    convert(source, tmp_path / "out", to="ct:mxfp8", ignore=["q_proj", "fc1"])
    ignored = set(json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"])
    assert {*names[1:], *theirs} <= ignored
    assert not any("up_proj" in name for name in ignored)
    assert theirs or ignored == {"lm_head", *names[1:]}


def test_heads_and_embeddings_stay_and_gates_of_mlps_are_cast(tmp_path):
    kept = ["model.shared", "classifier", "tok_emb", "cls.predictions.decoder", "mlp.moe_router", "q_proj.lora_A"]
    cast = ["shared_experts.up_proj", "dense.gate", "dense.up", "output.dense", "time_emb_proj"]
    source = stored(tmp_path / "source", [matrix(f"{name}.weight") for name in kept + cast])
    report = convert(source, tmp_path / "out", to="ct:nvfp4")
    assert {layer.name.removesuffix(".weight"): layer.action for layer in report.layers} == {
        **dict.fromkeys(kept, "kept"), **dict.fromkeys(cast, "cast"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"), ("attn.wq_a", "attn.wkv"),
        ("attn.wq", "attn.wk", "attn.wv"),
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"), ("linear_attn.in_proj_a", "linear_attn.in_proj_b"),
        ("attention.self.query", "attention.self.key", "attention.self.value"), ("attn.to_q", "attn.to_k", "attn.to_v"),
        ("mlp.c_fc_0", "mlp.c_fc_1"), ("mlp.experts.0.w1", "mlp.experts.0.w3"),
    ],
)  # fmt: skip
def test_layers_that_engines_join_share_a_tensor_scale(tmp_path, names):
    records = [matrix(f"model.layers.0.{name}.weight", (32, 64), 10.0**i) for i, name in enumerate(names)]
    other = matrix("model.layers.0.mlp.w2.weight", (32, 64), 100.0)
    source = stored(tmp_path / "source", [*records, other])
    convert(source, tmp_path / "out", to="ct:nvfp4")
    made = load(tmp_path / "out")
    assert len({float(made[record.name].tensor_scale) for record in records}) == 1
    assert len({float(record.tensor_scale) for record in made.values()}) == 2


# ---- scales of a KV cache ----------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path):
    """An FP8 source with scales of a KV cache beside a plain module, a plain layer and a quantized one."""
    beside = [scalar(CACHE, 0.123456789), scalar("model.layers.0.attn.k_proj.k_scale", 0.7)]
    source = stored(tmp_path / "plain", [matrix(UP), matrix("model.layers.0.self_attn.v_proj.weight")])
    convert(source, tmp_path / "fp8", to="ct:fp8_dynamic")
    quantized = list(load(tmp_path / "fp8").values())
    extra = [Record(**{**vars(one), "extras": {"v_scale": np.float32(0.3)}}) if "v_proj" in one.name else one
             for one in quantized]  # fmt: skip
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    save([*extra, *beside, matrix("model.layers.0.attn.k_proj.weight")], tmp_path / "source", format="ct:fp8")
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    return tmp_path / "source"


@pytest.mark.parametrize("to", ["bf16", "f16"])
def test_a_plain_target_leaves_out_the_scales_of_a_cache_with_one_line(cached, tmp_path, to):
    report = convert(cached, tmp_path / "out", to=to)
    assert not [name for name in load(tmp_path / "out").tensors if name.endswith("_scale")]
    (note,) = report.notes
    assert "scales of a KV cache are left out" in note
    assert "3 in all" in note
    assert CACHE not in {layer.name for layer in report.converted}


@pytest.mark.parametrize("to", ["ct:nvfp4", "modelopt:mxfp8", "hf:finegrained_fp8"])
def test_a_quantized_target_keeps_them_to_the_bit(cached, tmp_path, to):
    report = convert(cached, tmp_path / "out", to=to, ignore=["v_proj"])
    tensors = load(tmp_path / "out").tensors
    assert tensors[CACHE].tobytes() == np.float32(0.123456789).tobytes()
    assert tensors["model.layers.0.self_attn.v_proj.v_scale"].tobytes() == np.float32(0.3).tobytes()
    assert not [note for note in report.notes if "KV cache" in note]
    if to == "ct:nvfp4":
        assert config_of(tmp_path / "out")["kv_cache_scheme"]


@pytest.mark.parametrize("last", ["q_zero_point", "k_zero_point"])
def test_zero_points_of_a_cache_go_with_its_scales(last, cached, tmp_path):
    name = f"model.layers.0.self_attn.{last}"
    config = (cached / "config.json").read_text()
    zero = Record(name, np.zeros((4, 1, 1), np.int8), logical_shape=(4, 1, 1))
    save([*load(cached).values(), zero], tmp_path / "more", format="ct:fp8")
    (tmp_path / "more" / "config.json").write_text(config)
    assert not [finding for finding in load(tmp_path / "more").findings if finding.id == "orphan"]
    for to, holds in (("bf16", False), ("ct:nvfp4", True)):
        convert(tmp_path / "more", tmp_path / to, to=to)
        assert (name in load(tmp_path / to).tensors) == holds


def test_scales_of_heads_are_scales_of_a_cache_where_the_source_announces_them(tmp_path):
    """compressed-tensors stores one for each head; a plain model may have a parameter of that name."""
    heads = Record("model.layers.0.self_attn.k_scale", np.ones((8, 1, 1), np.float32), logical_shape=(8, 1, 1))
    scheme = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}
    for config, names in (({"quantization_config": scheme}, {UP}), ({"model_type": "x"}, {UP, heads.name})):
        source = tmp_path / f"source{len(names)}"
        save([matrix(UP), heads], source, format="plain")
        (source / "config.json").write_text(json.dumps(config))
        convert(source, tmp_path / f"out{len(names)}", to="f32", format="ct:fp8")
        assert set(load(tmp_path / f"out{len(names)}")) == names


def test_a_parameter_of_such_a_name_in_a_plain_model_is_none(tmp_path):
    source = stored(tmp_path / "source", [scalar("attn.q_scale", 0.5), matrix(UP)])
    convert(source, tmp_path / "out", to="f32")
    assert "attn.q_scale" in load(tmp_path / "out")


# ---- experts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "model_type", "notes"),
    [
        ("ct:mxfp4", "aria", ["experts of a layer as one tensor; hf:finegrained_fp8, deepseek:fp8"]),
        ("deepseek:fp8", "llama4", ["experts of a layer as one tensor; gptoss:hf and microfloat's own families"]),
        ("hf:finegrained_fp8", "gpt_oss", ["experts of a layer as one tensor"]),
        ("ct:fp8", "qwen3_moe", ["layer as one tensor; hf:finegrained_fp8, deepseek:fp8"]),
        ("hf:finegrained_fp8", "qwen3_moe", []), ("gptoss:hf", "gpt_oss", []), ("microfloat:mxfp4", "gpt_oss", []),
    ],
)  # fmt: skip
def test_stacked_experts_are_noted_where_no_reader_expects_them(tmp_path, to, model_type, notes):
    experts = [matrix(f"model.layers.{i}.mlp.experts.down_proj", (2, 128, 128)) for i in range(3)]
    source = stored(tmp_path / "source", experts, {"model_type": model_type})
    found = convert(source, tmp_path / "out", to=to).notes
    assert len(found) == len(notes)
    for note, words in zip(found, notes, strict=True):
        assert "3 in all" in note
        assert set(words.split(", ")[0].split()) <= set(note.replace(",", " ").split()) or words in note


@pytest.mark.parametrize("model_type", ["qwen3_moe", "aria"])
@pytest.mark.parametrize("first", [None, "deepseek:fp8", "hf:mxfp8"])
def test_experts_of_other_models_are_not_written_in_the_order_of_gpt_oss_or_llama_4(tmp_path, model_type, first):
    """Both families store them with axes of their own, as which they would be read again."""
    shapes = {"gate_up_proj": (3, 128, 64), "down_proj": (3, 64, 64)}
    records = [matrix(Q, (64, 64)), *(matrix(f"{EXPERTS}.{leaf}", shape) for leaf, shape in shapes.items())]
    path = stored(tmp_path / "source", records, {"model_type": model_type})
    if first is not None:
        convert(path, tmp_path / "first", to=first)
        path = tmp_path / "first"
    before = load(path)
    with pytest.raises(InvalidValueError, match=f"as gpt-oss stores them, {model_type} stores its own otherwise"):
        convert(path, tmp_path / "out", to="gptoss:hf")
    report = convert(path, tmp_path / "out", to="fbgemm:fp8")
    assert {layer.name: layer.reason for layer in report.layers if layer.name != Q} == dict.fromkeys(
        (f"{EXPERTS}.{leaf}" for leaf in shapes), "fbgemm:fp8 quantizes matrices alone"
    )
    after = load(tmp_path / "out")
    assert metrics.sqnr_db(before[Q].dequantize(), after[Q].dequantize()) > 28
    for leaf, shape in shapes.items():
        values = before[f"{EXPERTS}.{leaf}"].dequantize().astype(np.float32)
        np.testing.assert_array_equal(after[f"{EXPERTS}.{leaf}"].codes, values.astype(BF16))
        assert values.shape == shape


@pytest.mark.parametrize("to", ["ct:nvfp4", "modelopt:mxfp8", "quark:mxfp4"])
@pytest.mark.parametrize(("model_type", "rows"), [("llama4_text", 192), ("gpt_oss", 256)])
def test_a_layer_of_which_a_tensor_cannot_be_taken_apart_stays_whole(tmp_path, model_type, rows, to):
    """A tile of 128 rows holds rows of gate and up: without it, down_proj would be numbered in a layer that is not."""
    shapes = {"gate_up_proj": (3, 64, rows), "down_proj": (3, rows // 2, 64)}
    records = [matrix(f"{EXPERTS}.{leaf}", shape) for leaf, shape in shapes.items()]
    records += [matrix(f"{EXPERTS}.gate_up_proj_bias", (3, rows))]
    path = stored(tmp_path / "source", records, {"model_type": model_type, "hidden_size": 64})
    convert(path, tmp_path / "tiles", to="deepseek:fp8")
    report = convert(tmp_path / "tiles", tmp_path / "out", to=to)
    assert any("expects the experts of a layer as one tensor" in note for note in report.notes)
    out, rule = load(tmp_path / "out"), WRITTEN[to][1].cast
    assert set(out) == {one.name for one in records}
    assert not [one for one in out.findings if one.severity == "error"]
    for leaf in shapes:
        before = load(tmp_path / "tiles")[f"{EXPERTS}.{leaf}"].dequantize()
        expected = np.stack([reference.quantize(one, rule).codes for one in before])
        np.testing.assert_array_equal(out[f"{EXPERTS}.{leaf}"].codes, expected)


def stacked_values(checkpoint, name, model_type):
    """Values [E, N, K] of a layer's experts, which may be stored one by one."""
    if name in checkpoint:
        return checkpoint[name].dequantize()
    folder, _, leaf = name.rpartition(".")
    leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    rows = [[checkpoint[f"{folder}.{e}.{one}.weight"].dequantize() for one in leaves] for e in range(2)]
    join = (lambda parts: np.stack(parts, 1).reshape(-1, parts[0].shape[1])) if model_type == "gpt_oss" else np.vstack
    return np.stack([join(parts) for parts in rows])


@pytest.mark.slow_cases("further targets of a checked path", all_but=("gpt_oss-True-*", "llama4_text-*"))
@pytest.mark.parametrize("to", ["ct:nvfp4", "ct:fp8_dynamic", "modelopt:mxfp8", "modelopt:fp8"])
@pytest.mark.parametrize(("model_type", "of_mxfp4"), [("gpt_oss", False), ("gpt_oss", True), ("llama4_text", False)])
def test_stacked_experts_are_written_one_by_one_where_readers_expect_that(tmp_path, model_type, of_mxfp4, to):
    """Every matrix and bias has the values of its rows, and a plain target puts them together again."""
    shapes = {"gate_up_proj": (2, 96, 128), "down_proj": (2, 64, 96)}
    plain = [matrix(f"{EXPERTS}.{leaf}", shape) for leaf, shape in shapes.items()]
    biases = [matrix(f"{one.name}_bias", (2, one.logical_shape[2])) for one in plain] if model_type == "gpt_oss" else []
    path = stored(tmp_path / "source", [*plain, *biases], {"model_type": model_type, "hidden_size": 96})
    if of_mxfp4:
        convert(path, tmp_path / "mxfp4", to="gptoss:hf")
        path = tmp_path / "mxfp4"
    source = load(path)
    convert(path, tmp_path / "out", to=to)
    out, leaves = load(tmp_path / "out"), [("gate_proj", 0), ("up_proj", 1), ("down_proj", None)]
    assert len(out) == 6 + 6 * bool(biases)
    for e in range(2):
        for leaf, part in leaves:
            at = f"{EXPERTS}.{'down_proj' if part is None else 'gate_up_proj'}"
            rows = slice(None) if part is None else slice(part, None, 2)
            if model_type != "gpt_oss":
                rows = slice(None) if part is None else slice(64 * part, 64 * (part + 1))
            values = source[at].dequantize()[e]
            values = (values if of_mxfp4 else values.T)[rows]
            made = out[f"{EXPERTS}.{e}.{leaf}.weight"]
            assert made.logical_shape == values.shape
            assert metrics.sqnr_db(values, made.dequantize()) > (18 if to.endswith("nvfp4") else 28)
            if biases:
                np.testing.assert_array_equal(
                    out[f"{EXPERTS}.{e}.{leaf}.bias"].codes, source[f"{at}_bias"].codes[e][rows]
                )
    report = convert(tmp_path / "out", tmp_path / "back", to="bf16")
    back = load(tmp_path / "back")
    assert set(back) == {one.name for one in (*plain, *biases)}
    assert all(back[one.name].logical_shape == one.logical_shape for one in (*plain, *biases))
    assert report.worst.sqnr_db > 45
    for one in biases:
        np.testing.assert_array_equal(back[one.name].codes, one.codes.astype(BF16))


def test_experts_of_which_one_is_missing_stay_as_they_are(tmp_path):
    names = [f"{EXPERTS}.{e}.{leaf}_proj.weight" for e in range(2) for leaf in ("gate", "up")]
    path = stored(tmp_path / "source", [matrix(name, (64, 64)) for name in names[:3]], {"model_type": "gpt_oss"})
    convert(path, tmp_path / "out", to="f16")
    assert set(load(tmp_path / "out", strict=False)) == set(names[:3])


@pytest.mark.parametrize(
    ("model_type", "to"),
    [
        ("gpt_oss", "ct:mxfp4"), ("gpt_oss", "ct:fp8"), ("gpt_oss", "microfloat:nvfp4"), ("gpt_oss", "gptoss:hf"),
        ("llama4", "ct:nvfp4"), ("llama4_text", "hf:finegrained_fp8"), ("openai_privacy_filter", "modelopt:mxfp8"),
    ],
)  # fmt: skip
def test_a_plain_target_gives_experts_the_layout_that_transformers_stores(tmp_path, model_type, to):
    down, up = f"{EXPERTS}.down_proj", f"{EXPERTS}.gate_up_proj"  # [E, K, N], of which down_proj is square in gpt-oss
    plain = [matrix(down, (2, 128, 128)), matrix(up, (2, 128, 256))]
    text = {"hidden_size": 128}
    config = {"model_type": model_type, **({"text_config": text} if model_type == "llama4" else text)}
    convert(stored(tmp_path / "source", plain, config), tmp_path / "low", to=to)
    convert(tmp_path / "low", tmp_path / "back", to="bf16")
    back, low = load(tmp_path / "back"), load(tmp_path / "low")
    for one in plain:
        assert back[one.name].logical_shape == one.logical_shape
        values = stacked_values(low, one.name, model_type)
        np.testing.assert_array_equal(back[one.name].codes, np.swapaxes(values, 1, 2).astype(BF16))
        assert np.corrcoef(*(x.astype(float).ravel() for x in (back[one.name].codes, one.codes)))[0, 1] > 0.98


def test_fp8_experts_that_lie_as_the_plain_ones_stay_so(tmp_path):
    """Other tools store the FP8 codes of Llama 4 as [E, K, N]; their one scale does not tell, the hidden size does."""
    plain = [matrix(f"{EXPERTS}.down_proj", (2, 192, 64)), matrix(f"{EXPERTS}.gate_up_proj", (2, 64, 384))]
    convert(stored(tmp_path / "source", plain, {"model_type": "mixtral"}), tmp_path / "low", to="modelopt:fp8")
    made = json.loads((tmp_path / "low" / "config.json").read_text())
    made |= {"model_type": "llama4", "text_config": {"hidden_size": 64}}
    (tmp_path / "low" / "config.json").write_text(json.dumps(made))
    convert(tmp_path / "low", tmp_path / "back", to="bf16")
    for one in plain:
        assert load(tmp_path / "back")[one.name].logical_shape == one.logical_shape


@pytest.mark.parametrize(
    ("to", "model_type", "shape", "count"),
    [
        ("ct:nvfp4", "mixtral", (128, 128), 1), ("ct:mxfp8", "qwen3_moe", (64, 128), 1),
        ("ct:fp8_dynamic", "mixtral", (256, 128), 0), ("ct:mxfp4", "mixtral", (128, 128), 0),
        ("ct:fp8_block", "mixtral", (128, 128), 0), ("ct:fp8_block", "deepseek_v3", (128, 192), 1),
        ("deepseek:fp8", "deepseek_v3", (192, 128), 1), ("deepseek:fp8", "deepseek_v3", (64, 256), 0),
    ],
)  # fmt: skip
def test_numbered_experts_are_noted_where_a_known_reader_fails(tmp_path, to, model_type, shape, count):
    names = [f"model.layers.0.mlp.experts.{i}.down_proj.weight" for i in range(4)]
    source = stored(tmp_path / "source", [matrix(name, shape) for name in names], {"model_type": model_type})
    notes = convert(source, tmp_path / "out", to=to).notes
    assert len(notes) == count
    assert all("transformers 5.24" in note and "4 in all" in note for note in notes)


@pytest.mark.parametrize(
    ("to", "model_type", "length", "reader"),
    [
        ("ct:fp8_block", "llama", 192, "compressed-tensors 0.20"), ("ct:fp8_block", "llama", 256, ""),
        ("ct:nvfp4", "mamba", 128, "transformers 5.24"), ("ct:mxfp6", "t5", 128, "transformers 5.24"),
        ("ct:mxfp8", "mamba", 128, ""), ("ct:nvfp4", "llama", 128, ""),
    ],
)  # fmt: skip
def test_layers_are_noted_where_a_known_reader_fails(tmp_path, to, model_type, length, reader):
    names = ["model.layers.0.mixer.out_proj.weight", "model.layers.0.mixer.x_proj.weight"]
    source = stored(tmp_path / "source", [matrix(name, (128, length)) for name in names], {"model_type": model_type})
    notes = convert(source, tmp_path / "out", to=to).notes
    assert [reader in note and "2 in all" in note for note in notes] == [True] * bool(reader)


# ---- nothing to convert, ambiguous sources, odd configurations ---------------------------------------------------


@pytest.mark.parametrize(
    ("to", "names", "reason"),
    [
        ("gptoss:hf", [UP, Q], "gptoss:hf quantizes stacked experts alone"),
        ("ct:nvfp4", ["lm_head.weight", "model.embed_tokens.weight"], "kept by default"),
        ("ct:mxfp8", ["model.norm.bias"], "it has no weight of a linear layer"),
        ("ct:fp8", ["h.0.attn.c_attn.weight", "h.0.mlp.c_proj.weight"], "a Conv1D stores it .in, out."),
    ],
)
def test_a_conversion_that_converts_nothing_is_refused_before_it_writes(tmp_path, to, names, reason):
    name = "long-" * 40  # of a path that takes all the room for what was got
    source = stored(tmp_path / name, map(matrix, names), {"model_type": "gpt2"})
    with pytest.raises(InvalidValueError, match=f"src: got .*, needed one that it has a place for .*{reason}"):
        convert(source, tmp_path / "out", to=to)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("to", ["ct:nvfp4", "microfloat:mxfp8"])
def test_a_model_of_conv1d_alone_is_shown_the_way_in_python(tmp_path, to):
    source = stored(tmp_path / "source", [matrix("h.0.attn.c_attn.weight")], {"model_type": "imagegpt"})
    with pytest.raises(InvalidValueError, match=r"quantize_.*save_quantized.*load_quantized") as caught:
        convert(source, tmp_path / "out", to=to)
    assert "another target" not in str(caught.value)


def test_a_plain_target_says_that_it_changed_nothing(tmp_path):
    source = stored(tmp_path / "source", [matrix(UP)])
    report = convert(source, tmp_path / "out", to="bf16")
    assert (report.converted, report.notes) == ([], ["nothing was converted: every parameter is as bf16 has it"])
    convert(source, tmp_path / "low", to="ct:mxfp4")
    back = convert(tmp_path / "low", tmp_path / "back", to="bf16")
    assert [layer.action for layer in back.converted] == ["dequantized"]
    assert not back.notes


@pytest.mark.parametrize("method", ["auto-round", "quark"])
def test_a_source_of_another_method_is_converted_as_the_family_that_is_named(tmp_path, method):
    convert(stored(tmp_path / "source", [matrix(UP)]), tmp_path / "made", to="ct:nvfp4")
    path = tmp_path / "made" / "config.json"
    path.write_text(json.dumps({"quantization_config": {"quant_method": method, "bits": 4}}))
    report = convert(tmp_path / "made", tmp_path / "out", to="bf16", format="ct:nvfp4")
    assert [layer.action for layer in report.layers] == ["dequantized"]
    with pytest.raises(InvalidValueError, match="format: got 'nvfp5', needed one of"):
        convert(tmp_path / "made", tmp_path / "other", to="bf16", format="nvfp5")


ODD = [["llama"], 3, True, {"a": 1}, None, "x"]


@pytest.mark.parametrize("value", ODD, ids=str)
def test_values_of_another_type_in_configurations_are_no_python_errors(tmp_path, value):
    source = stored(tmp_path / "source", [matrix(UP)])
    config = dict.fromkeys(("model_type", "dtype", "torch_dtype", "text_config", "quantization_config"), value)
    (source / "config.json").write_text(json.dumps(config))
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": value, "producer": value}))
    for to in ("modelopt:nvfp4", "ct:fp8", "f32"):
        if isinstance(value, dict):  # it is a configuration then, which names no method that is read
            convert(source, tmp_path / to, to=to, format=WRITTEN[to][0].name if to in WRITTEN else "ct:fp8")
        else:
            assert convert(source, tmp_path / to, to=to).verified


def test_characters_that_utf8_cannot_hold_are_named_before_anything_is_written(tmp_path):
    made = reference.quantize(np.ones((4, 32), np.float32), "mxfp4")
    record = Record("mlp.up_\ud800proj.weight", made.codes, made.scale, None, MXFP4, (4, 32))
    with pytest.raises(
        CheckpointError, match=r"the name 'mlp.up_\\ud800proj.weight_packed' has a character that UTF-8"
    ):
        save([record], tmp_path / "a", format="ct:mxfp4")
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"config.json: 'x\\ud801' has a character that UTF-8 cannot hold"):
        save([matrix(UP)], tmp_path / "b", format="plain", config={"name": "x\ud801"})
    assert not (tmp_path / "b").exists()


def test_the_output_of_convert_is_no_finding_of_its_own(tmp_path):
    """A router beside ordinary layers is named in modules_to_not_convert, a key of transformers."""
    names = [UP, ROUTER, *(f"model.layers.0.mlp.experts.{i}.gate_proj.weight" for i in range(4))]
    report = convert(stored(tmp_path / "source", map(matrix, names)), tmp_path / "out", to="deepseek:fp8")
    assert report.notes == []
    assert [one for one in load(tmp_path / "out").findings if one.severity != "info"] == []


def test_an_exact_conversion_has_no_worst_layer_of_infinite_decibels(tmp_path):
    source = stored(tmp_path / "source", [Record(UP, np.ones((64, 64), BF16), logical_shape=(64, 64))])
    report = convert(source, tmp_path / "out", to="ct:mxfp8")
    assert report.summary()["worst layer"] == "all are exact"


def test_the_verification_reports_its_progress(tmp_path):
    source, seen = stored(tmp_path / "source", [matrix(UP), matrix(DOWN)]), []
    convert(source, tmp_path / "out", to="ct:mxfp8", progress=seen.append)
    assert [one.shard for one in seen if one.done == one.total] == [0, 1, 2]
    verifying = [one for one in seen if one.shard > one.shards > 0]
    assert [one.name for one in verifying] == [UP, DOWN] or [one.name for one in verifying] == [DOWN, UP]
    convert(source, tmp_path / "fast", to="ct:mxfp8", verify=False, progress=seen.append)
    assert seen[-1].shard == 1
