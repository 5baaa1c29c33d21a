"""features I1, I8: `from_pretrained(..., quantization_config=MicrofloatConfig(...))` of transformers."""

import json
import shutil
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError, PlacementError  # noqa: E402
from microfloat.recipes import MXFP8BlockScaling, Placement, WeightActivation, WeightOnly  # noqa: E402

PROMPT = torch.tensor([[5, 9, 2, 30, 7], [1, 2, 3, 4, 5]])
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64},
    "Qwen3MoeForCausalLM": {**SIZES, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
    "GptOssForCausalLM": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "T5ForConditionalGeneration": {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4,
    },
}  # fmt: skip
MORE = pytest.mark.slow("further configs and families of a checked kind")


@pytest.fixture
def hf(transformers):
    """The module of the integration."""
    from microfloat.integrations import transformers as integration

    return integration


@pytest.fixture
def folder(llama, tmp_path):
    """The folder of a tiny Llama in bfloat16."""
    llama(attention_bias=True).bfloat16().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def assert_same(made, wanted):
    """The same state dict, to the byte, and the same classes of layers."""
    ours, theirs = made.state_dict(), wanted.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert type(ours[name]) is type(value), name
        assert torch.equal(ours[name], value), name
    assert [type(one) for one in made.modules()] == [type(one) for one in wanted.modules()]


@pytest.mark.parametrize(
    "config",
    [
        WeightOnly("nvfp4"),
        pytest.param(WeightActivation("fp8_tensor"), marks=MORE),
        pytest.param(WeightOnly("nvfp4", scale_search="mse"), marks=MORE),
        pytest.param(Placement([("*.mlp.*", WeightOnly("mxfp4")), ("*", None)]), marks=MORE),
    ],
    ids=["nvfp4", "both", "searched", "placement"],
)
def test_weights_become_codes_while_they_are_read(hf, transformers, folder, monkeypatch, config):
    plain_at_once, take = [], hf.MicrofloatQuantizer.take

    def counted(quantizer, model, name, *arguments):
        taken = take(quantizer, model, name, *arguments)
        layers = [one.weight for path, one in model.named_modules() if path.endswith("_proj")]
        plain_at_once.append(sum(not one.is_meta and not isinstance(one, mf.QuantizedTensor) for one in layers))
        return taken

    monkeypatch.setattr(hf.MicrofloatQuantizer, "take", counted)
    options = hf.MicrofloatConfig("nvfp4" if config == WeightOnly("nvfp4") else config)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=options, device_map="cpu")
    wanted = transformers.LlamaForCausalLM.from_pretrained(folder)
    report = mf.quantize_(wanted, config)
    assert str(model.hf_quantizer.report) == str(report)
    assert_same(model, wanted)
    assert len(plain_at_once) == len(report.converted)
    # q and k wait for v, whose scale they share; where the placement says None, layers are plain
    assert max(plain_at_once) <= 2 + (8 if isinstance(config, Placement) else 0)
    assert torch.equal(model(PROMPT).logits, wanted(PROMPT).logits)
    assert not isinstance(model.lm_head.weight, mf.QuantizedTensor)
    # the configuration is plain data, from which transformers makes it again
    stated = json.loads(model.config.to_json_string())["quantization_config"]
    again = transformers.quantizers.AutoQuantizationConfig.from_dict(stated)
    assert type(again) is hf.MicrofloatConfig
    assert str(again.config) == str(config)


@MORE
@pytest.mark.parametrize("family", list(FAMILIES))
def test_other_families_get_the_bits_of_quantize_(hf, transformers, tmp_path, family):
    torch.manual_seed(0)
    kind = getattr(transformers, family)
    kind(kind.config_class(**FAMILIES[family])).bfloat16().save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path, quantization_config=hf.MicrofloatConfig("mxfp8"))
    wanted = kind.from_pretrained(tmp_path)
    report = mf.quantize_(wanted, WeightOnly("mxfp8"))
    assert_same(model, wanted)
    assert str(model.hf_quantizer.report) == str(report)


@MORE
@pytest.mark.parametrize("cache", [None, "static"])
def test_a_loaded_model_generates(hf, transformers, folder, cache):
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=hf.MicrofloatConfig("nvfp4"))
    tokens = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), cache_implementation=cache, **options)
    again = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), use_cache=False, **options)
    assert torch.equal(tokens, again)


@MORE
def test_modules_that_are_named_stay_in_high_precision(hf, transformers, folder):
    options = hf.MicrofloatConfig("mxfp4", modules_to_not_convert=["layers.1", "v_proj", "*.down_*"])
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=options)
    ends = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
    assert model.hf_quantizer.report.converted == [f"model.layers.0.{end}" for end in ends]
    options = hf.MicrofloatConfig("mxfp4", modules_to_not_convert=["encoder"])
    with pytest.raises(InvalidValueError, match=r"modules_to_not_convert: got 'encoder', needed names .* Llama"):
        transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=options)


@MORE
def test_a_weight_that_the_file_lacks_is_quantized_in_the_end(hf, transformers, folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.v_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model, facts = transformers.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=hf.MicrofloatConfig("nvfp4"), output_loading_info=True
    )
    assert facts["missing_keys"] == {"model.layers.0.self_attn.v_proj.weight"}
    attention = model.model.layers[0].self_attn
    assert torch.equal(attention.q_proj.weight.tensor_scale, attention.v_proj.weight.tensor_scale)


@pytest.mark.parametrize("fuse", [False, pytest.param(True, marks=MORE)])
def test_a_recipe_converts_the_loaded_model_and_leaves_no_trace(hf, transformers, folder, tmp_path, fuse):
    options = hf.MicrofloatConfig(recipe="mxfp8", fuse=fuse)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=options)
    wanted = transformers.LlamaForCausalLM.from_pretrained(folder)
    mf.convert(wanted, "mxfp8", fuse=fuse)
    assert_same(model, wanted)
    assert model.config.to_dict() == wanted.config.to_dict()
    assert not getattr(model, "is_quantized", False)
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "config.json").read_text() == (folder / "config.json").read_text()
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@MORE
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), WeightOnly("nvfp4")], ids=["mxfp8", "to be served"])
def test_trainer_takes_a_model_with_a_recipe(hf, transformers, folder, tmp_path, sequences, accelerate, recipe):
    options = hf.MicrofloatConfig(recipe=recipe, fuse=True)
    assert hf.MicrofloatQuantizer(options).is_qat_trainable
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=options, dtype=torch.float32)
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path / "run", max_steps=6, per_device_train_batch_size=8, learning_rate=1e-2, report_to=[],
        logging_steps=1, disable_tqdm=True, use_cpu=True, save_steps=6,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=sequences)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-6")
    assert torch.equal(saved.lm_head.weight, model.lm_head.weight)
    if recipe == WeightOnly("nvfp4"):
        logits = model.eval()(PROMPT).logits
        assert hf.MicrofloatConfig.from_dict(options.to_dict()).recipe == recipe
        mf.quantize_(saved, recipe)
        assert torch.equal(saved(PROMPT).logits, logits)


@MORE
@pytest.mark.filterwarnings("ignore")
def test_adapters_train_around_codes(hf, transformers, peft, folder, tmp_path, sequences, accelerate):
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=hf.MicrofloatConfig("nvfp4"))
    assert not model.hf_quantizer.is_qat_trainable
    codes = model.model.layers[0].self_attn.q_proj.weight.codes.clone()
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path / "run", max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no"
    )
    with pytest.raises(ValueError, match="purely quantized"):  # the words of transformers
        transformers.Trainer(model=model, args=arguments, train_dataset=sequences)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    transformers.Trainer(model=tuned, args=arguments, train_dataset=sequences).train()
    q_proj = tuned.base_model.model.model.layers[0].self_attn.q_proj
    assert torch.equal(q_proj.base_layer.weight.codes, codes)
    assert q_proj.lora_B["default"].weight.abs().sum() > 0


@MORE
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["a recipe", "to be served", "adapters around codes"])
def test_the_trainer_of_trl_loads_the_model_by_this_door(hf, transformers, peft, folder, tmp_path, accelerate, kind):
    """Its loss reads the weight of the head: a recipe of the head has no part in it, and codes are refused."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(folder)
    texts = [" ".join(str((i * step + first) % 60 + 2) for i in range(14)) for step in (1, 2, 3) for first in range(16)]
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if kind == "adapters around codes" else None

    def trained(folder, config, **options):
        arguments = trl.SFTConfig(
            str(tmp_path / "run"), max_steps=6, report_to=[], use_cpu=True, bf16=False, learning_rate=1e-2,
            logging_steps=1, disable_tqdm=True, save_steps=6, per_device_train_batch_size=8,
            model_init_kwargs={"dtype": "float32"}, **options,
        )  # fmt: skip
        data = Dataset.from_dict({"text": texts})
        trainer = trl.SFTTrainer(
            str(folder), args=arguments, train_dataset=data, quantization_config=config, peft_config=adapters
        )
        trainer.train()
        return trainer.model, [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]

    recipe = {"a recipe": "mxfp8", "to be served": WeightOnly("nvfp4")}.get(kind)
    options = {"recipe": recipe, "fuse": True} if recipe else {"config": "nvfp4"}
    model, losses = trained(folder, hf.MicrofloatConfig(**options))
    assert losses[-1] < losses[0]
    if adapters is None:
        saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-6")
        assert torch.equal(saved.lm_head.weight, model.lm_head.weight)
        assert not hasattr(saved.config, "quantization_config")
        head = Placement([("lm_head", "mxfp4"), ("*", recipe)])
        assert recipe != "mxfp8" or trained(folder, hf.MicrofloatConfig(recipe=head, fuse=True))[1] == losses
    else:
        weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
        assert isinstance(weight, mf.QuantizedTensor)
        head = {"lm_head": WeightOnly("nvfp4"), "*": WeightOnly("nvfp4")}
        with pytest.raises(InvalidTypeError, match=r"got a QuantizedTensor \(nvfp4\), needed a plain tensor"):
            trained(folder, hf.MicrofloatConfig(head))


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "words"),
    [
        ((), {}, InvalidValueError, "config: got neither of them, needed either config or recipe"),
        (("nvfp4",), {"recipe": "mxfp8"}, InvalidValueError, "got 'nvfp4', and recipe='mxfp8'"),
        (("nvfp4",), {"fuse": True}, InvalidValueError, "fuse: got True, needed a recipe beside it"),
        (("fp3",), {}, InvalidValueError, "'fp3'"),
        ((MXFP8BlockScaling(),), {}, InvalidTypeError, "A recipe for training goes to"),
        (({"class": "WeightsOnly"},), {}, InvalidValueError, "Did you mean 'WeightOnly'"),
        (({"*": "nvfp9"},), {}, InvalidValueError, "'nvfp9'"),
        ((), {"recipe": "nvfp44"}, InvalidValueError, "'nvfp44'"),
        (("nvfp4",), {"modules_to_not_convert": "lm_head"}, InvalidTypeError, "needed a list of names"),
        (("nvfp4",), {"modules_to_not_convert": ["lm_head", 3]}, InvalidTypeError, "needed a list of names"),
        (("nvfp4",), {"modules_to_not_convert": 3}, InvalidTypeError, "got 3, needed a list of names"),
        ((WeightOnly,), {}, InvalidTypeError, r"Call the class: WeightOnly\('nvfp4'\)"),
        ((), {"recipe": 5}, InvalidTypeError, "recipe: got int, needed a Recipe"),
    ],
)
def test_arguments_that_are_refused(hf, arguments, options, kind, words):
    with pytest.raises(kind, match=words):
        hf.MicrofloatConfig(*arguments, **options)


def test_configurations_that_are_refused(hf, transformers, folder):
    read = transformers.LlamaForCausalLM.from_pretrained
    with pytest.raises(InvalidValueError, match=r"quantization_config: got 'formats'"):
        read(folder, quantization_config={"quant_method": "microfloat", "formats": "nvfp4"})
    with pytest.raises(InvalidTypeError, match=r"quantization_config: got .*dict.*, needed a MicrofloatConfig"):
        hf.MicrofloatQuantizer({"quant_method": "microfloat", "config": "nvfp4"})
    with pytest.raises(PlacementError, match=r"'\*\.h\.\*'"):
        read(folder, quantization_config=hf.MicrofloatConfig({"*.h.*": WeightOnly("nvfp4")}))


@MORE
def test_a_folder_that_is_quantized_already_is_refused(hf, transformers, folder, tmp_path):
    """An older ModelOpt says it in hf_quant_config.json alone, of which transformers knows nothing; where it sees that
    a folder has another method it refuses the config itself.
    """
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    mf.quantize_(model, WeightOnly("nvfp4"))
    read = transformers.LlamaForCausalLM.from_pretrained
    for format in ("modelopt:nvfp4", "ct:nvfp4"):
        mf.save_quantized(model, tmp_path / format, format=format)
        with pytest.raises(ValueError, match="but you are passing a MicrofloatConfig"):
            read(tmp_path / format, quantization_config=hf.MicrofloatConfig("nvfp4"))
    path = tmp_path / "modelopt:nvfp4" / "config.json"
    settings = json.loads(path.read_text())
    del settings["quantization_config"]
    path.write_text(json.dumps(settings))
    with pytest.raises(InvalidValueError, match=r"quantized already \(modelopt:nvfp4\), needed .*load_pretrained"):
        read(path.parent, quantization_config=hf.MicrofloatConfig("nvfp4"))
    assert mf.QuantizedTensor in {type(one) for one in hf.load_pretrained(path.parent).parameters()}


# ---- ModelOpt, places, heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "tied"),
    [
        ("modelopt:nvfp4", True), pytest.param("modelopt:fp8", False, marks=MORE),
        pytest.param("modelopt:mxfp8", True, marks=MORE),
    ],
)  # fmt: skip
def test_from_pretrained_keeps_the_codes_of_modelopt(hf, transformers, llama, tmp_path, to, tied):
    from microfloat.checkpoint import convert

    llama(tie_word_embeddings=tied).bfloat16().save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "low", to=to)
    read = transformers.AutoModelForCausalLM.from_pretrained
    model, info = read(tmp_path / "low", output_loading_info=True)
    assert not any(info.values())
    assert_same(model, hf.load_pretrained(tmp_path / "low"))
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, mf.QuantizedTensor)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert (model.dtype, model.training) == (torch.bfloat16, False)
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]["quant_method"] == (
        "compressed-tensors"
    )


@MORE
def test_numbered_experts_of_modelopt_are_joined(hf, transformers, tmp_path):
    from microfloat.checkpoint import convert

    kind = transformers.Qwen3MoeForCausalLM
    torch.manual_seed(0)
    model = kind(
        kind.config_class(**FAMILIES["Qwen3MoeForCausalLM"] | {"hidden_size": 64, "moe_intermediate_size": 64})
    )
    model.bfloat16().save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "low", to="modelopt:nvfp4")
    assert_same(kind.from_pretrained(tmp_path / "low"), hf.load_pretrained(tmp_path / "low"))


@MORE
@pytest.mark.parametrize(
    ("places", "taken"),
    [
        ("auto", True), ({"": "cpu"}, True), ("cpu", True), ({"model": "cpu", "lm_head": "cpu"}, True),
        ({"model": "cpu", "lm_head": "disk"}, False), ({"model": 0, "lm_head": "cpu"}, False), ("balanced", False),
    ],
    ids=str,
)  # fmt: skip
def test_all_codes_of_modelopt_go_to_one_device(hf, transformers, folder, accelerate, tmp_path, places, taken):
    from microfloat.checkpoint import convert

    convert(folder, tmp_path / "low", to="modelopt:fp8")
    read = transformers.LlamaForCausalLM.from_pretrained
    if taken:
        model = read(tmp_path / "low", device_map=places)
        assert {str(one.device) for one in model.parameters()} == {"cuda:0" if torch.cuda.is_available() else "cpu"}
    else:
        with pytest.raises(NotSupportedError, match=r"device_map: got .*, needed (one device|devices or)"):
            read(tmp_path / "low", device_map=places)


@MORE
def test_weights_that_are_offloaded_to_the_cpu(hf, transformers, folder, accelerate, tmp_path):
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=hf.MicrofloatConfig("nvfp4"))
    wanted = model(PROMPT).logits
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(model(PROMPT).logits, wanted)
    with pytest.raises(InvalidValueError, match="save_pretrained: got weights that are offloaded or on meta"):
        model.save_pretrained(tmp_path / "low")


DISK = {
    "all": {"device_map": {"": "disk"}},
    "chosen by size": {"device_map": "auto", "max_memory": {"cpu": "12KB"}},
    "some": {
        "device_map": {
            "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1.self_attn": "disk",
            "model.layers.1.mlp": "cpu", "model.layers.1.input_layernorm": "cpu", "lm_head": "disk",
            "model.layers.1.post_attention_layernorm": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu",
        },
    },
}  # fmt: skip


@MORE
@pytest.mark.parametrize(
    ("family", "places"),
    [
        *(("LlamaForCausalLM", one) for one in DISK), ("Qwen3MoeForCausalLM", "all"), ("GPT2LMHeadModel", "all"),
        ("GPT2LMHeadModel", "chosen by size"),
    ],
)  # fmt: skip
def test_codes_on_a_disk_are_read_in_each_call(hf, transformers, accelerate, tmp_path, places, family):
    """The folder may be written again, or be gone: memory is mapped to what was in the files."""
    kind, sizes = getattr(transformers, family), FAMILIES.get(family, SIZES | {"attention_bias": True})
    torch.manual_seed(0)
    kind(kind.config_class(**sizes)).bfloat16().save_pretrained(tmp_path / "plain")
    wanted = kind.from_pretrained(tmp_path / "plain")
    mf.quantize_(wanted, WeightOnly("mxfp8"))
    disk, options = tmp_path / "disk", {"quantization_config": hf.MicrofloatConfig("mxfp8")}
    model, other = (
        kind.from_pretrained(tmp_path / "plain", offload_folder=str(disk), **DISK[places], **options) for _ in range(2)
    )
    assert str(model.hf_quantizer.report) == str(
        kind.from_pretrained(tmp_path / "plain", **options).hf_quantizer.report
    )
    stored = {path.stem for path in disk.glob("*.pt")}
    assert stored == {
        name for name, one in model.named_modules()
        if any(isinstance(part, mf.QuantizedTensor) and part.is_meta for part in one.parameters(recurse=False))
    }  # fmt: skip
    if maps := [path for path in (Path("/proc/self/maps"),) if path.exists()]:
        assert all(f"{disk / name}.pt" in maps[0].read_text() for name in stored)
    shutil.rmtree(disk)
    for one in (model, other, model):
        assert torch.equal(one(PROMPT).logits, wanted(PROMPT).logits)


@MORE
def test_what_cannot_be_offloaded_is_named(hf, transformers, llama, folder, accelerate, tmp_path):
    read, disk = transformers.LlamaForCausalLM.from_pretrained, {"offload_folder": str(tmp_path / "disk")}
    places = {"device_map": {"": "disk"}}
    with pytest.raises(
        InvalidValueError, match=r"offload_folder: got none, needed a folder to which the codes of model\.layers"
    ):
        read(folder, quantization_config=hf.MicrofloatConfig("nvfp4"), **places)
    with pytest.raises(InvalidValueError, match=r"device_map: got .* offloaded under a recipe"):
        read(folder, quantization_config=hf.MicrofloatConfig(recipe="mxfp8"), **places, **disk)
    llama(tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path / "tied")
    head = hf.MicrofloatConfig({"lm_head": WeightOnly("mxfp8"), "*": WeightOnly("nvfp4")})
    with pytest.raises(InvalidValueError, match="device_map: got lm_head, whose weight the file lacks or shares"):
        read(tmp_path / "tied", quantization_config=head, **places, **disk)
    model = read(folder, quantization_config=hf.MicrofloatConfig("nvfp4"))
    for offload in (accelerate.disk_offload, lambda model, folder, **_: accelerate.dispatch_model(
        model, {"model": "cpu", "lm_head": "disk"}, offload_dir=folder
    )):  # fmt: skip
        with pytest.raises(InvalidTypeError, match="from_pretrained with a MicrofloatConfig"):
            offload(model, str(tmp_path / "disk"), execution_device=torch.device("cpu"))


@pytest.mark.gpu
def test_codes_on_a_gpu_in_memory_and_on_a_disk(hf, transformers, folder, accelerate, tmp_path):
    options = {"quantization_config": hf.MicrofloatConfig("nvfp4"), "offload_folder": str(tmp_path / "disk")}
    read = transformers.LlamaForCausalLM.from_pretrained
    wanted = read(folder, device_map=0, **options)(PROMPT.cuda()).logits
    places = dict.fromkeys(DISK["some"]["device_map"], 0) | {
        "model.layers.0": "cpu",
        "model.layers.1.self_attn": "disk",
    }
    for one in (places, {**places, "lm_head": "cpu"}, {"": "disk"}, {"model": "cpu", "lm_head": 0}):
        model = read(folder, device_map=one, **options)
        prompt = PROMPT if one == {"": "disk"} else PROMPT.cuda()
        for _ in range(2):
            torch.testing.assert_close(model(prompt).logits.cuda(), wanted, atol=0.02, rtol=0.02)


@MORE
def test_a_model_on_meta_and_a_tied_head(hf, transformers, llama, tmp_path):
    llama(tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path / "tied")
    read = transformers.LlamaForCausalLM.from_pretrained
    model = read(tmp_path / "tied", quantization_config=hf.MicrofloatConfig("nvfp4"), device_map="meta")
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, mf.QuantizedTensor)
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    both = Placement([("lm_head", WeightOnly("mxfp8")), ("*", WeightOnly("nvfp4"))])
    with pytest.warns(UserWarning, match="lm_head .*are tied no longer"):
        model = read(tmp_path / "tied", quantization_config=hf.MicrofloatConfig(both))
    wanted = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "tied")
    with pytest.warns(UserWarning, match="lm_head .*are tied no longer"):
        mf.quantize_(wanted, both)
    assert_same(model, wanted)
    assert isinstance(model.lm_head.weight, mf.QuantizedTensor)


@MORE
@pytest.mark.parametrize("stored", ["modelopt:nvfp4", "ct:nvfp4"])
def test_a_folder_of_two_methods_is_read_as_its_tensors_are(hf, folder, tmp_path, stored):
    """config.json says compressed-tensors and hf_quant_config.json ModelOpt; the tensors decide."""
    from microfloat.checkpoint import convert

    for to in ("modelopt:nvfp4", "ct:nvfp4"):
        convert(folder, tmp_path / to, to=to)
    wanted = hf.load_pretrained(tmp_path / stored)
    for file, of in (("config.json", "ct:nvfp4"), ("hf_quant_config.json", "modelopt:nvfp4")):
        (tmp_path / stored / file).write_bytes((tmp_path / of / file).read_bytes())
    assert_same(hf.load_pretrained(tmp_path / stored), wanted)


SAVED = {
    "ct:nvfp4": "nvfp4", "ct:mxfp8": "mxfp8", "ct:mxfp4": "mxfp4", "ct:fp8": WeightActivation("fp8_row"),
    "ct:mixed": Placement([("*.self_attn.*", WeightOnly("mxfp8")), ("*", WeightOnly("mxfp4"))]),
}  # fmt: skip


@pytest.mark.parametrize("format", [pytest.param(one, marks=() if one == "ct:mxfp4" else MORE) for one in SAVED])
def test_save_pretrained_writes_the_folder_of_save_quantized(hf, transformers, folder, tmp_path, format):
    options = hf.MicrofloatConfig(SAVED[format])
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=options)
    model.save_pretrained(tmp_path / "ours")
    mf.save_quantized(model, tmp_path / "theirs", format=format)
    assert (tmp_path / "ours" / "generation_config.json").exists()
    stated, wanted = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("ours", "theirs"))
    assert stated == wanted
    ours, theirs = (mf.load_quantized(tmp_path / one) for one in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    read = hf.load_pretrained(tmp_path / "ours", transformers.LlamaForCausalLM)
    assert torch.equal(read(PROMPT).logits, model(PROMPT).logits)
    assert set(read.hf_quantizer.report.converted) == set(model.hf_quantizer.report.converted)
    assert read.dtype == torch.bfloat16
    assert not read.training
    read.save_pretrained(tmp_path / "again")
    again = mf.load_quantized(tmp_path / "again")
    assert all(torch.equal(ours[name], again[name]) for name in again)


@MORE
@pytest.mark.parametrize("config", ["nvfp4", WeightOnly("mxfp4")], ids=["nvfp4", "mxfp4"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_opens_the_folder(hf, transformers, llama, tmp_path, config):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).bfloat16().save_pretrained(tmp_path / "a")
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "a", quantization_config=hf.MicrofloatConfig(config)
    )
    model.save_pretrained(tmp_path / "b")
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "b")
    assert type(opened.config.quantization_config).__name__ == "CompressedTensorsConfig"
    wanted = model(PROMPT).logits
    assert float((opened(PROMPT).logits - wanted).abs().max()) <= 0.02 * float(wanted.abs().max())


@MORE
def test_experts_of_a_saved_folder_come_back(hf, transformers, tmp_path):
    kind = transformers.Qwen3MoeForCausalLM
    torch.manual_seed(0)
    kind(kind.config_class(**FAMILIES["Qwen3MoeForCausalLM"])).bfloat16().save_pretrained(tmp_path / "plain")
    model = kind.from_pretrained(tmp_path / "plain", quantization_config=hf.MicrofloatConfig("nvfp4"))
    with pytest.warns(UserWarning, match=r"misreads ct:nvfp4: numbered experts, without global scales"):
        model.save_pretrained(tmp_path / "low")
    read = hf.load_pretrained(tmp_path / "low")
    for name, value in model.state_dict().items():
        other = read.state_dict()[name]
        assert type(other) is type(value), name
        if isinstance(value, mf.QuantizedTensor):
            assert torch.equal(other.codes, value.codes), name
            assert torch.equal(other.scale.view(torch.uint8), value.scale.view(torch.uint8)), name


@MORE
@pytest.mark.parametrize("format", ["modelopt:nvfp4", "microfloat:native"])
def test_any_dialect_is_read_with_its_codes(hf, transformers, folder, tmp_path, format):
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    mf.quantize_(model, WeightOnly("nvfp4"))
    mf.save_quantized(model, tmp_path / "low", format=format)
    read = hf.load_pretrained(tmp_path / "low")
    for name, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name
    assert read.generate(PROMPT, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 7)


@MORE
def test_what_cannot_be_saved_or_read_is_named(hf, transformers, folder, tmp_path):
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=hf.MicrofloatConfig("nvfp4_row"))
    with pytest.raises(NotSupportedError, match=r"save_pretrained: got weights in nvfp4_row, needed formats"):
        model.save_pretrained(tmp_path / "low")


@MORE
@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        ("read(low, quantization_config=served)", ValueError, "but you are passing a MicrofloatConfig"),
        ("read(low, quantization_config=recipe)", ValueError, "but you are passing a MicrofloatConfig"),
        (
            "read(plain, quantization_config={**served.to_dict(), 'fuze': True})",
            InvalidValueError,
            "Did you mean 'fuse'",
        ),
        (
            "read(plain, quantization_config=served, device_map='meta').save_pretrained(low)",
            InvalidValueError,
            "on meta",
        ),
        ("read(plain, quantization_config=served)(PROMPT, labels=PROMPT).loss.backward()", NotSupportedError, "frozen"),
        ("Trainer(hf.load_pretrained(low))", ValueError, "purely quantized"),
        ("hf.load_pretrained(plain.parent)", InvalidValueError, "needed a folder with config.json"),
        (
            "hf.load_pretrained(plain.parent / 'nowhere')",
            InvalidValueError,
            r"folder: got '.*nowhere', needed a folder",
        ),
        ("hf.load_pretrained(low, GPT2LMHeadModel)", InvalidTypeError, "model_class: .*, or one for a LlamaConfig"),
        ("hf.load_pretrained(low, 'LlamaForCausalLM')", InvalidTypeError, "model_class: got 'LlamaForCausalLM'"),
        ("hf.load_pretrained(low, config=served)", InvalidTypeError, "config: got MicrofloatConfig, needed WeightOnly"),
        ("hf.load_pretrained(low, config=WeightOnly('mxfp8'))", InvalidValueError, "weights as they are stored"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_the_doors_refuse(hf, transformers, accelerate, folder, tmp_path, call, kind, words):
    """Errors of ours, and those of transformers where it looks first."""
    read, served = transformers.AutoModelForCausalLM.from_pretrained, hf.MicrofloatConfig("nvfp4")
    read(folder, quantization_config=served).save_pretrained(tmp_path / "low")
    recipe = hf.MicrofloatConfig(recipe="mxfp8")
    names = {name: getattr(transformers, name) for name in ("Trainer", "GPT2LMHeadModel")}
    names |= {"read": read, "served": served, "recipe": recipe, "hf": hf, "plain": folder, "low": tmp_path / "low"}
    with pytest.raises(kind, match=words):
        eval(call, {**globals(), **names})


@MORE
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "fp8_row"])
def test_blocks_beside_float32_are_noted_where_transformers_stops_at_them(hf, transformers, llama, tmp_path, format):
    """compressed-tensors makes bfloat16 of blocks."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    llama(intermediate_size=64).save_pretrained(tmp_path / "plain")
    read = transformers.AutoModelForCausalLM.from_pretrained
    model = read(tmp_path / "plain", quantization_config=hf.MicrofloatConfig(format))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.save_pretrained(tmp_path / "low")
    said = [one for one in caught if "read with dtype=torch.bfloat16" in str(one.message)]
    try:
        read(tmp_path / "low")(PROMPT)
        is_right = True
    except RuntimeError as error:
        is_right = "same dtype" not in str(error)
    assert is_right == (not said)
    logits = [read(tmp_path / "low", dtype=torch.bfloat16)(PROMPT).logits]
    codes = model.model.layers[0].mlp.up_proj.weight.codes
    model.to(torch.bfloat16)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight.codes.view(torch.uint8), codes.view(torch.uint8))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="save_pretrained")
        model.save_pretrained(tmp_path / "again")
    wanted = model(PROMPT).logits
    for one in (*logits, read(tmp_path / "again")(PROMPT).logits):
        assert float((one - wanted).detach().abs().max()) <= 0.05 * float(wanted.detach().abs().max())


@pytest.mark.slow("continuous batching of transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", [WeightOnly("nvfp4"), WeightActivation("fp8_row")], ids=["nvfp4", "fp8_row"])
def test_continuous_batching_serves_what_generate_does(config, transformers, llama):
    model = llama().eval().requires_grad_(False)
    mf.quantize_(model, config)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    asked = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    served = model.generate_batch(inputs=prompts, generation_config=asked)
    for prompt, answer in zip(prompts, served.values(), strict=True):
        alone = model.generate(torch.tensor([prompt]), generation_config=asked)[0, len(prompt) :]
        assert list(answer.generated_tokens) == alone.tolist()
