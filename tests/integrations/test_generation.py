"""features I2, I8, I10, K5: quantized weights and caches in transformers' generation, and files that it loads."""

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.recipes import WeightActivation, WeightOnly  # noqa: E402

pytestmark = [
    pytest.mark.slow("needs a training package that make test does not install"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:.past_key_values. is deprecated:FutureWarning"
    ),  # which the oldest version takes
]
CONFIGS = [
    *(WeightOnly(fmt) for fmt in ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "fp8_tensor", "fp8_row",
                                  "fp8_128x128")),
    *(WeightActivation(fmt) for fmt in ("mxfp8", "nvfp4", "mxfp4", "fp8_tensor", "fp8_row", "fp8_1x128")),
    WeightActivation("fp8_tensor", scales="static"), WeightActivation("nvfp4", scales="static"),
    WeightOnly("nvfp4", prefill="folded", prefill_rows=4),
]  # fmt: skip
PROMPT = torch.tensor([[5, 9, 2, 30, 7], [1, 2, 3, 4, 5]])


def generate(model, **options):
    return model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=8, do_sample=False, pad_token_id=0, **options
    )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: f"{type(one).__name__}-{one.format}")
def test_generation_with_a_cache_gives_the_tokens_without_one(llama, config):
    model = llama().bfloat16().eval()
    report = mf.quantize_(model, config)
    assert len(report.converted) == 14
    if config.is_static:
        with mf.calibrate(model):
            model(PROMPT)
    tokens = generate(model)
    assert tokens.shape == (2, 13)
    if config.fprop.lhs is None and config.prefill is None:  # tokens do not see each other's scales
        assert torch.equal(generate(model, use_cache=False), tokens)


def test_a_cache_of_transformers_in_fp8(llama, transformers):
    from transformers.cache_utils import Cache, DynamicLayer

    class QuantizedLayer(DynamicLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            new = [mf.quantize(states, "fp8_row") for states in (key_states, value_states)]
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self.keys, self.values = new
            else:
                self.keys, self.values = (
                    torch.cat(pair, -2) for pair in zip((self.keys, self.values), new, strict=True)
                )
            return self.keys.dequantize(), self.values.dequantize()

    model = llama().bfloat16().eval()
    mf.quantize_(model, WeightOnly("nvfp4"))
    cache = Cache(layer_class_to_replicate=QuantizedLayer)
    tokens = generate(model, past_key_values=cache)
    assert tokens.shape == (2, 13)
    assert cache.layers[0].keys.shape[-2] == 12
    assert isinstance(cache.layers[0].keys, mf.QuantizedTensor)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_saved_model_is_loaded_into_a_model_of_transformers(llama, tmp_path, family):
    model = llama(family).bfloat16().eval()
    mf.quantize_(model, WeightOnly("mxfp8"))
    mf.save_quantized(model, tmp_path / "model", format="ct:mxfp8", config=model.config.to_dict())
    fresh = llama(family).bfloat16().eval()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    mf.load_quantized(tmp_path / "model", fresh)
    assert torch.equal(fresh(PROMPT).logits, model(PROMPT).logits)


STATE_SPACE = {
    "Mamba": {"state_size": 8}, "FalconMamba": {"state_size": 8},
    "Mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 32},
    "Jamba": {
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 2,
        "mamba_d_state": 8, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", list(STATE_SPACE))
@pytest.mark.parametrize("config", [WeightOnly("mxfp8"), WeightActivation("fp8_row")], ids=["weights", "both"])
def test_models_that_multiply_with_a_weight_themselves(transformers, family, config):
    """The slow path of Mamba computes ``dt_proj.weight @ x``."""
    torch.manual_seed(0)
    options = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64, **STATE_SPACE[family]}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**options)).eval()
    with torch.no_grad():
        want = model(PROMPT).logits
        assert mf.quantize_(model, config).converted
        got = model(PROMPT).logits
    assert float((got - want).norm() / want.norm()) < 0.15
    assert generate(model).shape == (2, 13)


def test_gpt2_converts_saves_and_reverts(transformers, tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval()
    want = model(PROMPT).logits.detach()
    report = mf.convert(model, "mxfp8")
    assert len(report.converted) == 8
    assert report.share > 0.8
    assert 0.0 < float((model(PROMPT).logits.detach() - want).norm() / want.norm()) < 0.1
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(PROMPT).logits, want)
    assert torch.equal(mf.revert(model)(PROMPT).logits, want)


@pytest.mark.parametrize("format", ["microfloat:native", "ct:mxfp8"])
@pytest.mark.filterwarnings("ignore:save_quantized. transformers .* refuses:UserWarning")  # the model is float32
def test_gpt2_quantized_loads_into_a_plain_model(transformers, tmp_path, format):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=64, n_positions=64)
    model, fresh = (transformers.GPT2LMHeadModel(config).eval() for _ in range(2))
    mf.quantize_(model, mf.WeightOnly("mxfp8"))
    warned = pytest.warns(UserWarning, match="refuses ct:mxfp8: .* than bfloat16")
    with warned if format == "ct:mxfp8" else contextlib.nullcontext():
        mf.save_quantized(model, tmp_path / "low", format=format)
    mf.load_quantized(tmp_path / "low", fresh, config=mf.WeightOnly("mxfp8"))
    assert torch.equal(fresh(PROMPT).logits, model(PROMPT).logits)
