"""docs/migration.md: the names of TransformerEngine, mapped to ours by the function that the page shows."""

import pytest

from tests.docs.code_blocks import code_blocks

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402

HIDDEN, FFN, HEADS, GROUPS = 64, 96, 4, 2
SIZES = {"query": HIDDEN, "key": HIDDEN // 2, "value": HIDDEN // 2}


@pytest.fixture
def rename(repository):
    """The page's `from_transformer_engine`."""
    (block,) = (
        one for one in code_blocks(repository / "docs" / "migration.md", "python") if "def from_trans" in one.source
    )
    namespace = {}
    exec(compile(block.source[: block.source.index("theirs =")], str(block.path), "exec"), namespace)
    return namespace["from_transformer_engine"]


def _theirs(bias):
    """Parameters of its TransformerLayer with swiglu, RMSNorm and parameters that are not fused."""
    attention, mlp = "self_attention.layernorm_qkv", "layernorm_mlp"
    made = {f"{part}.layer_norm_weight": torch.randn(HIDDEN) for part in (attention, mlp)}
    made |= {f"{attention}.{name}_weight": torch.randn(size, HIDDEN) for name, size in SIZES.items()}
    made |= {
        "self_attention.proj.weight": torch.randn(HIDDEN, HIDDEN), f"{mlp}.fc1_weight": torch.randn(2 * FFN, HIDDEN),
        f"{mlp}.fc2_weight": torch.randn(HIDDEN, FFN), f"{attention}._extra_state": None,
        "self_attention.core_attention._extra_state": None, f"{mlp}._extra_state": None,
    }  # fmt: skip
    if bias:
        made |= {
            key[: -len("weight")] + "bias": torch.randn(value.shape[0])
            for key, value in made.items()
            if value is not None and "layer_norm" not in key
        }
    return made


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_comes_over(rename, bias):  # features B5
    theirs = _theirs(bias)
    layer = mf.TransformerLayer(HIDDEN, FFN, HEADS, GROUPS, bias=bias, eps=1e-5)
    layer.load_state_dict(rename(theirs))
    gate, up = theirs["layernorm_mlp.fc1_weight"].chunk(2)
    assert torch.equal(layer.mlp.gate_proj.weight, gate)
    assert torch.equal(layer.mlp.up_proj.weight, up)
    assert torch.equal(layer.self_attn.v_proj.weight, theirs["self_attention.layernorm_qkv.value_weight"])
    assert torch.equal(layer.post_attention_layernorm.weight, theirs["layernorm_mlp.layer_norm_weight"])


def test_fused_parameters_of_q_k_and_v_come_over(rename):
    """Its rows: of each group of heads those of the queries, then one of keys and one of values."""
    theirs, prefix = _theirs(True), "self_attention.layernorm_qkv"
    apart = rename(theirs)
    for kind in ("weight", "bias"):
        parts = [theirs.pop(f"{prefix}.{name}_{kind}") for name in SIZES]
        parts = [part.view(GROUPS, -1, HIDDEN // HEADS, *part.shape[1:]) for part in parts]
        theirs[f"{prefix}.{kind}"] = torch.cat(parts, 1).flatten(0, 2)
    fused = rename(theirs, HEADS, GROUPS)
    assert fused.keys() == apart.keys()
    assert all(torch.equal(value, apart[key]) for key, value in fused.items())


def test_a_decoder_comes_over(rename):
    theirs = _theirs(True)
    cross = "inter_attention"
    theirs |= {f"{cross}.layernorm_query.layer_norm_weight": torch.randn(HIDDEN)}
    sizes = {f"{cross}.layernorm_query.query_": HIDDEN, f"{cross}.key_value.key_": HIDDEN // 2,
             f"{cross}.key_value.value_": HIDDEN // 2, f"{cross}.proj.": HIDDEN}  # fmt: skip
    for stem, size in sizes.items():
        theirs |= {f"{stem}weight": torch.randn(size, HIDDEN), f"{stem}bias": torch.randn(size)}
    layer = mf.TransformerLayer(
        HIDDEN, FFN, HEADS, GROUPS, bias=True, eps=1e-5, options=mf.LayerOptions(cross_attention=True)
    )
    layer.load_state_dict(rename(theirs))
    assert torch.equal(layer.cross_attn.v_proj.bias, theirs[f"{cross}.key_value.value_bias"])


def test_a_fused_linear_comes_over(rename):
    theirs = {"layer_norm_weight": torch.randn(8), "layer_norm_bias": torch.randn(8), "weight": torch.randn(4, 8),
              "bias": torch.randn(4), "_extra_state": None}  # fmt: skip
    module = mf.LayerNormLinear(8, 4)
    module.load_state_dict(rename(theirs))
    x = torch.randn(3, 8)
    norm = torch.nn.functional.layer_norm(x, (8,), theirs["layer_norm_weight"], theirs["layer_norm_bias"])
    assert torch.allclose(module(x), norm @ theirs["weight"].T + theirs["bias"], atol=1e-5)
