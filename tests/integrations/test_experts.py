"""Mixtures of experts of transformers through `convert` and back: its notes name the targets that are read wrongly."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from microfloat import metrics  # noqa: E402
from microfloat.checkpoint import convert  # noqa: E402

pytestmark = [
    pytest.mark.slow("needs a training package that make test does not install"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "Qwen3Moe": {"moe_intermediate_size": 128, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 64},
    "Mixtral": {"num_local_experts": 2},
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 64},
    "DeepseekV3": {
        "num_key_value_heads": 2, "moe_intermediate_size": 128, "n_routed_experts": 2, "num_experts_per_tok": 1,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 128, "kv_lora_rank": 128,
        "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64,
    },
}  # fmt: skip
CASES = [
    ("Qwen3Moe", "ct:nvfp4"), ("Qwen3Moe", "ct:mxfp8"), ("Qwen3Moe", "ct:fp8_dynamic"), ("Qwen3Moe", "ct:mxfp4"),
    ("Qwen3Moe", "hf:finegrained_fp8"), ("Mixtral", "ct:nvfp4"), ("DeepseekV3", "ct:mxfp8"), ("GptOss", "ct:mxfp4"),
    ("GptOss", "ct:nvfp4"), ("DeepseekV3", "deepseek:fp8"), ("GptOss", "gptoss:hf"),
]  # fmt: skip


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(48)[None]).logits.float().numpy()


@pytest.mark.parametrize(("name", "to"), CASES)
def test_a_note_stands_exactly_where_transformers_reads_the_experts_wrongly(transformers, tmp_path, name, to):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    notes = [note for note in convert(tmp_path / "source", tmp_path / "out", to=to).notes if "experts" in note]
    try:
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
        is_right = metrics.sqnr_db(logits(model), logits(again)) > 10
    except (RuntimeError, ValueError):
        is_right = False
    assert is_right == (not notes), notes
