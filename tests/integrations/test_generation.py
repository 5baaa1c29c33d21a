"""features I2, I8, I10, K5: quantized weights and caches in transformers' generation, and files that it loads."""

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
