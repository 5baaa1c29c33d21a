"""features I5, K10: a model of transformers that trains under a config of inference, and everything that serves it."""

import contextlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat import checkpoint  # noqa: E402
from microfloat.errors import CheckpointError, InvalidValueError  # noqa: E402
from microfloat.recipes import WeightActivation, WeightOnly  # noqa: E402
from microfloat.torch.distributed import refit  # noqa: E402

load_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").load_file

PROMPT = torch.tensor([[5, 9, 2, 30, 7], [1, 2, 3, 4, 5]])
MORE = pytest.mark.slow("further configs and families of a checked kind")


def trained(model, config):
    """The model after two steps under a config."""
    mf.convert(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(2):
        model(PROMPT, labels=PROMPT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize(
    ("config", "target"),
    [
        (WeightOnly("nvfp4"), "modelopt:nvfp4"),
        pytest.param(WeightOnly("nvfp4"), "ct:nvfp4", marks=MORE),  # which stores the reciprocal of a tensor scale
        pytest.param(WeightActivation("fp8_tensor"), "microfloat:native", marks=MORE),
        pytest.param(WeightActivation("mxfp8", weight="mxfp4"), "microfloat:native", marks=MORE),
        pytest.param(WeightOnly("fp8_128x128"), "deepseek:fp8", marks=MORE),
    ],
    ids=lambda one: getattr(one, "label", one),
)
@pytest.mark.filterwarnings("ignore:save_quantized. transformers .* refuses:UserWarning")  # the model is float32
def test_the_bits_that_train_are_those_of_the_file_of_the_server_and_of_jax(transformers, tmp_path, config, target):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    import microfloat.jax as mj

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    settings = transformers.LlamaConfig(num_hidden_layers=2, attention_bias=True, **sizes)  # all weights of one shape
    model = trained(transformers.LlamaForCausalLM(settings), config)
    logits = model(PROMPT).logits
    masters = {name: one.detach().clone() for name, one in model.named_parameters() if name.endswith("_proj.weight")}
    mf.quantize_(model, config)
    assert torch.equal(model(PROMPT).logits, logits)
    warned = pytest.warns(UserWarning, match="refuses ct:nvfp4: .* than bfloat16")
    with warned if target == "ct:nvfp4" else contextlib.nullcontext():
        mf.save_quantized(model, tmp_path / "served", format=target)
    loaded = transformers.LlamaForCausalLM(settings).eval()
    mf.load_quantized(tmp_path / "served", loaded, config=config)
    ulps = 1 if target == "ct:nvfp4" else 0
    torch.testing.assert_close(loaded(PROMPT).logits, logits, rtol=0, atol=1e-6 * ulps)
    assert len(masters) == 14
    cast = config.fprop.rhs
    quantized = jax.jit(lambda w, amax: mj.quantize(w, cast, amax=amax if cast.takes_amax else None))
    for name, record in checkpoint.load(tmp_path / "served").items():
        if name not in masters:
            continue
        layer, _, kind = name.removesuffix("_proj.weight").rpartition(".")
        group = next((one for one in ("qkv", ("gate", "up")) if kind in one), (kind,))
        amax = max(masters[f"{layer}.{one}_proj.weight"].abs().max() for one in group)
        made = quantized(masters[name].numpy(), amax.numpy())
        stored = mj.QuantizedArray.from_record(record)
        for ours, theirs in ((made.codes, stored.codes), (made.scale, stored.scale)):
            assert ours.dtype == theirs.dtype
            assert ours.tobytes() == theirs.tobytes(), name
        assert (made.tensor_scale is None) == (stored.tensor_scale is None)
        if made.tensor_scale is not None:
            ours, theirs = (np.float32(one.tensor_scale) for one in (made, stored))
            assert abs(ours - theirs) <= ulps * np.spacing(ours)


@pytest.mark.parametrize(
    ("family", "options", "target"),
    [
        ("Mixtral", {"num_local_experts": 4}, "ct:mxfp8"),
        pytest.param("Llama", {"tie_word_embeddings": True}, "modelopt:nvfp4", marks=MORE),
        pytest.param("GptOss", {"num_local_experts": 4}, "gptoss:hf", marks=MORE),
        pytest.param("GptOss", {"num_local_experts": 4}, "deepseek:fp8", marks=MORE),
        pytest.param("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 32}, "modelopt:nvfp4", marks=MORE),
        pytest.param("Mixtral", {"num_local_experts": 2}, "bf16", marks=MORE),
    ],
)
def test_a_server_gets_the_tensors_of_a_converted_folder(llama, tmp_path, family, options, target):
    model = llama(family, **options).bfloat16()
    model.save_pretrained(tmp_path / "plain")
    checkpoint.convert(tmp_path / "plain", tmp_path / "served", to=target)
    mf.convert(model, WeightOnly("nvfp4"))
    (path,) = (tmp_path / "served").glob("*.safetensors")
    wanted, found = load_file(path), dict(refit(model, target))
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert one.dtype == found[name].dtype, name
        assert torch.equal(one.flatten().view(torch.uint8), found[name].flatten().view(torch.uint8)), name


def test_what_cannot_be_served_is_named(llama):
    model = llama()
    with pytest.raises(InvalidValueError, match=r"to: got 'ct:nvfp5'"):
        refit(model, "ct:nvfp5")
    with pytest.raises(InvalidValueError, match=r"LlamaForCausalLM without a parameter to store as gptoss:hf"):
        refit(model, "gptoss:hf")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        dict(refit(model, "ct:nvfp4"))
    with torch.device("meta"):
        empty = llama()
    with pytest.raises(InvalidValueError, match="on the meta device"):
        refit(empty, "ct:nvfp4")


@pytest.mark.slow("needs a training package that make test does not install")
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_trl_takes_a_model_that_trains_under_a_config(llama, tmp_path, accelerate):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    import pyarrow
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model, config = llama(), WeightOnly("nvfp4")
    mf.convert(model, config)
    ids = [[(i * step + first) % 64 for i in range(16)] for step in (1, 2, 3) for first in range(8)]
    table = InMemoryTable(pyarrow.table({"input_ids": ids, "labels": ids}))
    words = models.WordLevel({str(number): number for number in range(64)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="1")
    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=6, report_to=[], use_cpu=True, bf16=False, learning_rate=1e-2, logging_steps=1,
        disable_tqdm=True, save_strategy="no", dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    dataset = datasets.Dataset(table, fingerprint="numbers")
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert float(losses[-1]) < float(losses[0])
    logits = model.eval()(PROMPT).logits
    mf.quantize_(model, config)
    assert torch.equal(model(PROMPT).logits, logits)
