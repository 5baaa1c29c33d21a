"""compressed-tensors and transformers read the files of `convert` and `save_quantized`; their models load ours."""

import json
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat import metrics  # noqa: E402
from microfloat.checkpoint import convert  # noqa: E402

pytestmark = [
    pytest.mark.slow("needs a training package that make test does not install"),
    # transformers says so whenever a configuration asks for dequantized weights.
    pytest.mark.filterwarnings("ignore:You passed .quantization_config.:UserWarning"),
]

TARGETS = [
    "ct:nvfp4", "ct:mxfp4", "ct:mxfp6", "ct:mxfp8", "ct:fp8", "ct:fp8_dynamic", "ct:fp8_block", "deepseek:fp8",
    "hf:finegrained_fp8", "hf:mxfp8",
]  # fmt: skip


def loaded(transformers, path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("to", TARGETS)
def test_transformers_reads_what_we_write(transformers, tmp_path, to):  # features K5, U14
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", to=to)
    convert(tmp_path / "out", tmp_path / "plain", to="bf16")
    options = {}
    if to.startswith("ct:"):
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    theirs, ours = loaded(transformers, tmp_path / "out", **options), loaded(transformers, tmp_path / "plain")
    for name, weight in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], weight), name
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours(ids).logits)
        source = loaded(transformers, tmp_path / "source")(ids).logits
        assert not torch.equal(ours(ids).logits, source)


def test_transformers_reads_a_model_of_several_formats(transformers, tmp_path):
    """issue 39: what a plan chose. (With dequantize=True transformers takes one of the formats for all layers.)"""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    sized(transformers).save_pretrained(tmp_path / "source")
    rules = [("*.layers.0.mlp.*", None), ("*.down_proj", mf.WeightOnly("mxfp8")), ("*", mf.WeightOnly("nvfp4"))]
    convert(tmp_path / "source", tmp_path / "out", to="ct:mixed", placement=mf.Placement(rules))
    convert(tmp_path / "out", tmp_path / "plain", to="bf16")
    with torch.no_grad():
        theirs, ours, source = (
            loaded(transformers, tmp_path / name)(torch.arange(16)[None]).logits.float().numpy()
            for name in ("out", "plain", "source")
        )
    assert metrics.sqnr_db(ours, theirs) > 40 > metrics.sqnr_db(source, theirs) > 10


WRITTEN = [
    ("ct:nvfp4", mf.WeightOnly("nvfp4"), ""), ("ct:nvfp4", mf.WeightActivation("nvfp4"), "weight-only"),
    ("ct:nvfp4", mf.WeightActivation("nvfp4_row"), "weight-only"),
    ("ct:nvfp4", mf.WeightActivation("nvfp4", scales="static"), ""), ("ct:mxfp4", mf.WeightActivation("mxfp4"), ""),
    ("ct:mxfp8", mf.WeightActivation("mxfp8"), ""), ("ct:fp8_dynamic", mf.WeightActivation("fp8_row"), ""),
    ("ct:fp8_block", mf.WeightActivation("fp8_1x128"), ""),
    ("ct:fp8", mf.WeightActivation("fp8_tensor", scales="static"), ""),
    ("deepseek:fp8", mf.WeightOnly("fp8_128x128"), ""), ("hf:finegrained_fp8", mf.WeightActivation("fp8_1x128"), ""),
]  # fmt: skip


def sized(transformers, **options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.mark.parametrize(("to", "config", "warned"), WRITTEN)
def test_transformers_opens_what_save_quantized_writes(transformers, tmp_path, to, config, warned):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    model, ids = sized(transformers), torch.arange(16)[None]
    with torch.no_grad():
        plain = model(ids).logits
    model.generation_config.temperature = 0.25
    mf.quantize_(model, config)
    if config.is_static:
        with mf.calibrate(model), torch.no_grad():
            model(ids)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mf.save_quantized(model, tmp_path / "out", format=to)
    assert [warned in str(one.message) for one in caught] == ([True] if warned else [])
    theirs = loaded(transformers, tmp_path / "out").eval()
    assert type(theirs) is transformers.LlamaForCausalLM
    assert theirs.generation_config.temperature == 0.25
    mf.load_quantized(tmp_path / "out", ours := sized(transformers))
    with torch.no_grad():
        logits, own = theirs(ids).logits, ours(ids).logits
    assert logits.isfinite().all()
    error = metrics.rel_mse(plain.float().numpy(), own.float().numpy())
    assert metrics.rel_mse(own.float().numpy(), logits.float().numpy()) < error  # as far apart as roundings of inputs
    assert 0.3 * error < metrics.rel_mse(plain.float().numpy(), logits.float().numpy()) < 3 * error


ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("family", ["Llama", "Llama3", "Gemma3", "Bert", "CLIPText"])
@pytest.mark.parametrize("how", ["meta", "init_empty_weights", "from_config"])
def test_models_are_built_without_memory_and_loaded(transformers, accelerate, llama, tmp_path, family, how):
    """Tables of angles and of positions are in no checkpoint."""
    if family in ("Bert", "CLIPText"):
        kind = transformers.BertModel if family == "Bert" else transformers.CLIPTextModel
        config = kind.config_class(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=32,
        )  # fmt: skip
    elif family == "Gemma3":  # two tables of angles, and one of a single number
        kind, sizes = transformers.Gemma3ForCausalLM, llama().config
        config = kind.config_class(**{key: getattr(sizes, key) for key in SIZES})
    else:
        options = {"rope_parameters": ROPE} if family == "Llama3" else {}
        config, kind = llama(**options).config, transformers.LlamaForCausalLM

    def built(config):  # whose tables of angles are in bfloat16, or in float32
        made = kind._from_config(config, dtype=torch.bfloat16) if how == "from_config" else kind(config).bfloat16()
        return made.eval()

    torch.manual_seed(0)
    mf.quantize_(model := built(config), mf.WeightOnly("mxfp8"))
    mf.save_quantized(model, tmp_path / "out")
    with accelerate.init_empty_weights() if how == "init_empty_weights" else torch.device("meta"):
        empty = built(transformers.AutoConfig.from_pretrained(tmp_path / "out"))
    assert empty.config.architectures == [kind.__name__]
    assert all(parameter.is_meta for parameter in empty.parameters())
    mf.load_quantized(tmp_path / "out", empty)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(empty(ids)[0], model(ids)[0])


@pytest.mark.slow("a further dialect, whose files transformers reads as load does")
def test_transformers_has_our_values_of_deepseek_v4(transformers, tmp_path):
    """FP8 tiles and FP4 experts beside `.scale` of E8M0, under the names of the published files."""
    from safetensors.torch import load_file, save_file

    from microfloat.integrations.transformers import load_pretrained

    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 64, "q_lora_rank": 64, "o_lora_rank": 32}
    heads = {"num_attention_heads": 2, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 8}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 2, "hc_mult": 2, "vocab_size": 64, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(**sizes, **heads, **experts, max_position_embeddings=128, sliding_window=16)
    model = transformers.DeepseekV4ForCausalLM(config).bfloat16()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stored = [name for name in tensors if name.split(".")[-2] in ("wq_a", "wq_b", "wo_b", "w1", "w2", "w3")]
    assert len(stored) == 3 + 3 + 6
    for name in stored:
        module, q = name.removesuffix(".weight"), mf.quantize(tensors[name].float(), "mxfp4")
        if ".experts." in name:
            tensors[name], scale = q.codes.view(torch.int8), q.scale.view(torch.float8_e8m0fnu)
        else:
            tensors[name] = (256 * tensors[name].float()).to(torch.float8_e4m3fn)
            scale = torch.full((1, 1), 2.0**-8).to(torch.float8_e8m0fnu)
        tensors[f"{module}.scale"] = scale
    save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    tile = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    settings |= {"expert_dtype": "fp4", "quantization_config": {**tile, "scale_fmt": "ue8m0", "expert_dtype": "fp4"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ours, theirs = mf.revert(load_pretrained(tmp_path)), loaded(transformers, tmp_path)
    values = theirs.state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(value.to(values[name].dtype), values[name]), name


@pytest.mark.parametrize("family", ["Llama", "Llama4"])
def test_the_layers_of_fbgemm_that_transformers_makes_are_read(transformers, llama, tmp_path, family):
    """Its own modules, whose codes are made here and not by the package fbgemm-gpu: names, dtypes and shapes."""
    from safetensors.torch import save_file
    from transformers.integrations import fbgemm_fp8

    from microfloat.integrations.transformers import load_pretrained

    model = llama() if family == "Llama" else of_llama4(transformers)
    wanted, kept = {}, ["lm_head", "self_attn", "router"]
    for name, module in [*model.named_modules()]:
        is_stack = type(module).__name__ == "Llama4TextExperts"
        if not (is_stack or isinstance(module, torch.nn.Linear)) or any(one in name for one in kept):
            continue
        new = fbgemm_fp8.FbgemmFp8Llama4TextExperts(model.config) if is_stack else None
        new = new or fbgemm_fp8.FbgemmFp8Linear(module.in_features, module.out_features, module.bias is not None)
        for key, weight in module.named_parameters():
            theirs = weight.transpose(1, 2) if is_stack else weight
            scale = theirs.abs().amax(-1, keepdim=True) / 448
            codes = (theirs / scale).to(torch.float8_e4m3fn)
            values = codes.float() * scale
            wanted[f"{name}.{key}"] = values.transpose(1, 2) if is_stack else values
            getattr(new, key).data.copy_(codes.transpose(1, 2) if is_stack else codes)
            stored = getattr(new, f"{key}_scale").data
            stored.copy_(scale.reshape(stored.shape))
        model.set_submodule(name, new)
    model.config.quantization_config = transformers.FbgemmFp8Config(modules_to_not_convert=kept)
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    read = load_pretrained(tmp_path, type(model), dtype=torch.float32)
    assert set(read.hf_quantizer.report.converted) >= {name.removesuffix(".weight") for name in wanted if "mlp" in name}
    plain = mf.revert(read).state_dict()
    assert wanted
    for name, values in wanted.items():
        assert torch.equal(plain[name].float(), values), name


def of_llama4(transformers):
    """A tiny Llama 4 with a layer of experts."""
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, interleave_moe_layer_step=1,
        pad_token_id=0, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.parametrize(
    ("name", "options", "family"),
    [
        ("FbgemmFp8Config", {"modules_to_not_convert": ["lm_head"]}, "fbgemm:fp8"),
        ("FPQuantConfig", {"transform_init": "identity"}, "fp_quant:nvfp4"),
        ("FPQuantConfig", {"forward_dtype": "mxfp4", "forward_method": "quest"}, "fp_quant:mxfp4"),
        ("FourOverSixConfig", {}, "fouroversix:nvfp4"),
        ("FourOverSixConfig", {"scale_rule": "static_6"}, "fouroversix:static_6"),
        ("FourOverSixConfig", {"dtype": "mxfp4", "scale_rule": "static_6"}, "fouroversix:mxfp4"),
    ],
)
def test_entries_of_transformers_own_configurations_are_known(transformers, tmp_path, name, options, family):
    from safetensors.torch import save_file

    from microfloat.checkpoint import detect, load

    stated = getattr(transformers, name)(**options).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": stated}))
    save_file({"lm_head.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    assert detect(tmp_path).family == family
    (only,) = load(tmp_path).findings
    assert "no tensor is quantized" in only.message


TEXT = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
CLIP = {"model_type": "clip_vision_model"}
# Models that transformers 5 calls otherwise than their files: by a prefix, in the middle, or where it joins matrices.
RENAMED = {
    "GPTNeoXForCausalLM": lambda t: t.GPTNeoXConfig(**{k: v for k, v in TEXT.items() if k[:3] not in ("num_k", "hea")}),
    "ViTForImageClassification": lambda t: t.ViTConfig(**VISION),
    "LlavaForConditionalGeneration": lambda t: t.LlavaConfig(
        text_config=t.LlamaConfig(**TEXT), vision_config=VISION | CLIP
    ),
    "Gemma3ForConditionalGeneration": lambda t: t.Gemma3Config(text_config=TEXT, vision_config=VISION),
    "NomicBertModel": lambda t: t.NomicBertConfig(**{k: v for k, v in TEXT.items() if k[:3] not in ("num_k", "hea")}),
    "Dinov2Model": lambda t: t.Dinov2Config(**VISION, use_swiglu_ffn=True),
}


def made_of(transformers, name):
    torch.manual_seed(0)
    return getattr(transformers, name)(RENAMED[name](transformers)).bfloat16().eval().requires_grad_(False)


@pytest.mark.parametrize("name", RENAMED)
def test_a_model_under_other_names_than_its_files_is_saved_and_loaded(transformers, tmp_path, name):
    model = made_of(transformers, name)
    mf.quantize_(model, mf.WeightOnly("mxfp8"))
    projections = [part for part, _ in model.named_modules() if part.endswith(("k_proj", "key"))]
    for part in projections:
        model.get_submodule(part).k_scale, vars(model.get_submodule(part))["_scales_of_cache"] = 0.5, ("k_scale",)
    mf.save_quantized(model, tmp_path / "out", format="ct:mxfp8")
    ours = made_of(transformers, name)
    for parameter in ours.parameters():
        parameter.zero_()
    mf.load_quantized(tmp_path / "out", ours)
    stored = model.state_dict()
    assert all(torch.equal(value, stored[key]) for key, value in ours.state_dict().items())
    assert all(ours.get_submodule(part).k_scale == 0.5 for part in projections)


@pytest.mark.parametrize("by", ["save_quantized", "convert"])
@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_transformers_keeps_the_vision_towers_that_we_keep(transformers, tmp_path, name, by):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    model = made_of(transformers, name)
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    if by == "convert":
        model.save_pretrained(tmp_path / "source")
        convert(tmp_path / "source", tmp_path / "out", to="ct:mxfp8", ignore=["vision_tower", "layers.0.mlp"])
    else:
        kept = ("vision_tower", "layers.0.mlp")
        mf.quantize_(model, mf.WeightOnly("mxfp8"), filter=lambda name, _: not any(part in name for part in kept))
        mf.save_quantized(model, tmp_path / "out", format="ct:mxfp8")
    theirs = type(model).from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(theirs[key], plain[key]) for key in plain if "vision" in key or ".mlp." in key)
