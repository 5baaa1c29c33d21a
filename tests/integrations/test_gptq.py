"""`microfloat convert --method gptq` on a model of transformers, and the folder that it writes."""

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from tests.cli.conftest import microfloat  # noqa: E402, F401 -- a fixture

TEXT = "the quick brown fox jumps over the lazy dog and the dog sleeps while the fox runs away " * 60


@pytest.fixture
def folder(llama, transformers, tmp_path):
    """A tiny language model in bfloat16, with a tokenizer of words, and a text."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = {word: number for number, word in enumerate(["?", *sorted(set(TEXT.split()))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?").save_pretrained(tmp_path / "model")
    llama().bfloat16().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


@pytest.mark.slow_cases("further targets of a checked path", all_but=("modelopt:fp8",))
@pytest.mark.parametrize("to", ["ct:nvfp4", "modelopt:fp8", "microfloat:mxfp4"])
def test_a_model_is_calibrated_quantized_and_saved(microfloat, transformers, folder, to):  # noqa: F811
    words = ("convert", folder / "model", folder / "out", "--to", to, "--method", "gptq", "--calibrate")
    done = microfloat(*words, folder / "text.txt", "--ignore", "layers.1.mlp", "--json")
    assert done.code == 0, done.err
    rows = {row["name"]: row for row in done.json["layers"]}
    assert rows["model.layers.0.self_attn.q_proj"]["reason"] == "gptq"
    assert rows["model.layers.1.mlp.up_proj"]["reason"] == "filter returned False"
    # the codes are those of the same calls in Python
    kind = transformers.AutoModelForCausalLM
    expected = kind.from_pretrained(folder / "model", dtype="auto")
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder / "model")(TEXT)["input_ids"]])
    with mf.calibrate(expected), torch.no_grad():
        for batch in ids.split(64, 1):
            expected(batch, use_cache=False)
    config = {
        "ct:nvfp4": mf.WeightOnly("nvfp4"), "modelopt:fp8": mf.WeightActivation("fp8_tensor", scales="static"),
        "microfloat:mxfp4": mf.WeightOnly("mxfp4"),
    }[to]  # fmt: skip
    mf.quantize_(expected, config, lambda name, _: "layers.1.mlp" not in name, method="gptq")
    loaded = kind.from_config(expected.config, dtype=torch.bfloat16)
    mf.load_quantized(folder / "out", loaded)
    assert torch.equal(loaded(ids[:, :64]).logits, expected(ids[:, :64]).logits)
    assert isinstance(loaded.model.layers[0].mlp.up_proj.weight, mf.QuantizedTensor)
    assert transformers.AutoTokenizer.from_pretrained(folder / "out")("the fox")["input_ids"]
    assert json.loads((folder / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_model_without_a_tokenizer_is_named(microfloat, folder):  # noqa: F811
    for file in (folder / "model").glob("tokenizer*"):
        file.unlink()
    words = ("convert", folder / "model", folder / "out", "--to", "ct:nvfp4", "--method", "gptq", "--calibrate")
    microfloat(*words, folder / "text.txt").refuses("needed a language model of transformers, with tokenizer")
