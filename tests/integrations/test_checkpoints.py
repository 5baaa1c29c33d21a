"""compressed-tensors and transformers read the files of `convert`: weights and logits of our own dequantization."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from microfloat.checkpoint import convert  # noqa: E402

pytestmark = [
    pytest.mark.slow("needs a training package that make test does not install"),
    # transformers says so whenever a configuration asks for dequantized weights.
    pytest.mark.filterwarnings("ignore:You passed .quantization_config.:UserWarning"),
]

TARGETS = [
    "ct:nvfp4", "ct:mxfp4", "ct:mxfp6", "ct:mxfp8", "ct:fp8", "ct:fp8_dynamic", "ct:fp8_block", "deepseek:fp8",
    "hf:finegrained_fp8",
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
