"""What transformers and compressed-tensors make of files of mixtures of experts that `convert` writes.

A note stands exactly where one of them fails, or gives other logits than our own reading of the file.
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from microfloat import metrics  # noqa: E402
from microfloat.checkpoint import convert, load  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SLOW = pytest.mark.slow("needs a training package that make test does not install")

SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ROUTED = {"n_routed_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1}
MODELS = {  # every expert sees every token: a rounding never changes the route
    "Qwen3Moe": {"moe_intermediate_size": 128, "num_experts": 2, "num_experts_per_tok": 2, "head_dim": 64},
    "Mixtral": {"num_local_experts": 2, "num_experts_per_tok": 2},
    "DeepseekV3": {
        **ROUTED, "first_k_dense_replace": 0, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32, "v_head_dim": 64,
    },
    "NemotronH": {
        **ROUTED, "num_hidden_layers": 3, "layers_block_type": ["mamba", "moe", "attention"], "head_dim": 64,
        "moe_shared_expert_intermediate_size": 128, "mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 16,
        "n_groups": 1, "mamba_chunk_size": 8,
    },
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 64},
    "Llama4": {
        "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 64, "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 1,
    },
    "Mamba": {"state_size": 16}, "Mamba2": {"num_heads": 4, "head_dim": 64, "n_groups": 1, "state_size": 16},
    "FalconMamba": {"state_size": 16}, "NanoChat": {"head_dim": 64},
    "RecurrentGemma": {"num_hidden_layers": 3, "lru_width": 128, "head_dim": 64},
}  # fmt: skip
TARGETS = (
    "ct:nvfp4", "ct:mxfp4", "ct:mxfp6", "ct:mxfp8", "ct:fp8", "ct:fp8_dynamic", "ct:fp8_block", "deepseek:fp8",
    "hf:finegrained_fp8", "hf:finegrained_fp8_tensor",
)  # fmt: skip
WIDE = {"Qwen3Moe": {"moe_intermediate_size": 256}, "Mixtral": {"intermediate_size": 256}}
CASES = [
    *((name, to, {}) for name in ("Qwen3Moe", "Mixtral", "DeepseekV3", "NemotronH") for to in TARGETS),
    *((name, to, {}) for name in ("GptOss", "Llama4") for to in ("ct:nvfp4", "ct:mxfp4", "ct:fp8_dynamic")),
    ("GptOss", "gptoss:hf", {}),
    *((name, to, WIDE[name]) for name in WIDE for to in ("ct:fp8_block", "ct:fp8_dynamic", "deepseek:fp8")),
    *(("DeepseekV3", to, {"kv_lora_rank": 64}) for to in ("ct:fp8_block", "ct:fp8_dynamic")),
    *(("DeepseekV3", to, {"q_lora_rank": 192}) for to in ("ct:fp8_block", "hf:finegrained_fp8")),
    *((name, to, {}) for name in ("Mamba", "Mamba2", "FalconMamba") for to in ("ct:nvfp4", "ct:mxfp8")),
    *((name, "ct:mxfp4", {}) for name in ("NanoChat", "RecurrentGemma")),
]  # fmt: skip
FAST = [("Qwen3Moe", "ct:nvfp4", {}), ("Mixtral", "ct:mxfp4", {})]


def tiny(transformers, name, options):
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}TextConfig" if name == "Llama4" else f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(kind(**{**SIZES, **MODELS[name], **options}))
    for key, parameter in model.named_parameters():
        if "experts" in key:  # some start without values
            torch.nn.init.normal_(parameter, std=0.05)
        if parameter.dim() == 2 and "embed" not in key:
            parameter.data[128:] *= 0.1  # the scales of two tiles differ: one that is misplaced is seen
    return model.to(torch.bfloat16)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(48)[None], use_cache=False).logits.float().numpy()


@pytest.mark.parametrize(
    ("name", "to", "options"),
    [*FAST, *(pytest.param(*case, marks=SLOW) for case in CASES if case not in FAST)],
)  # fmt: skip
def test_a_note_stands_exactly_where_a_known_reader_fails(transformers, tmp_path, name, to, options):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    tiny(transformers, name, options).save_pretrained(tmp_path / "source")
    notes = convert(tmp_path / "source", tmp_path / "out", to=to).notes
    convert(tmp_path / "out", tmp_path / "plain", to="bf16")
    ours = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16))
    assert metrics.sqnr_db(logits(tiny(transformers, name, options)), ours) > 4  # the whole file was read
    try:
        theirs = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16))
        is_right = metrics.sqnr_db(ours, theirs) > 20  # inputs are rounded on the way
    except (RuntimeError, ValueError, AttributeError):
        is_right = False
    assert is_right == (not notes), notes


@SLOW
@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV3"])
@pytest.mark.parametrize("to", [to for to in TARGETS if to.startswith("ct:")])
def test_compressed_tensors_has_our_values_of_every_expert(transformers, tmp_path, name, to):
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    tiny(transformers, name, {}).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", to=to)
    made = load(tmp_path / "out")
    config = quantization.QuantizationConfig.model_validate(made.config["quantization_config"])
    [scheme] = config.config_groups.values()
    decompress = compressors.BaseCompressor.get_value_from_registry(scheme.format or config.format).decompress
    experts = [one for one in made.values() if ".experts." in one.name]
    assert len(experts) == 6
    import safetensors.torch

    tensors = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    for record in experts:
        folder = record.name.removesuffix("weight")
        state = {key.removeprefix(folder): value for key, value in tensors.items() if key.startswith(folder)}
        values = decompress(state, scheme)["weight"].float().numpy()
        assert metrics.sqnr_db(record.dequantize(), values) > 45  # bfloat16


@SLOW
@pytest.mark.parametrize("to", ["modelopt:mxfp8", "modelopt:nvfp4"])
def test_transformers_has_no_reader_of_modelopt(transformers, tmp_path, to):
    """The page says so; a note would stand beside every file that is meant for other engines."""
    tiny(transformers, "Qwen3Moe", {}).save_pretrained(tmp_path / "source")
    assert not convert(tmp_path / "source", tmp_path / "out", to=to).notes
    readers = transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING
    theirs = [name for name, reader in readers.items() if not reader.__module__.startswith("microfloat.")]
    assert "fp8" in theirs
    assert not any("modelopt" in name for name in theirs)
