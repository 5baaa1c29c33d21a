"""Mixtures of experts of transformers: their files through `convert` and back, and their layers under recipes."""

import copy
import importlib
import pathlib
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat import checkpoint  # noqa: E402
from microfloat.checkpoint import convert  # noqa: E402
from microfloat.errors import CheckpointError, InvalidTypeError  # noqa: E402
from microfloat.recipes import CustomRecipe, DelayedScaling, Gemm  # noqa: E402
from microfloat.torch.nn.experts import ExpertsLayer  # noqa: E402
from tests.torch.distributed.world import world_of_one  # noqa: E402

pytestmark = [
    pytest.mark.slow("needs a training package that make test does not install"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# ---- `mf.convert` of the experts themselves, in tiny configurations of each family

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED = {**FEW, "shared_expert_intermediate_size": 48}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1}
DEEPSEEK = {
    **ROUTED, "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "n_shared_experts": 1,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": SHARED,
    "Qwen3Moe": {**FEW, "head_dim": 8},
    "Qwen3Next": {
        **SHARED, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    },
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": DEEPSEEK,
    "DeepseekV3": DEEPSEEK,
    "Glm4Moe": {**ROUTED, "first_k_dense_replace": 0, "head_dim": 8},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Llama4": {
        "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 8, "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 1,
    },
    "Phimoe": {"num_local_experts": 4},
    "GraniteMoe": {"num_local_experts": 4},
    "NemotronH": {
        **ROUTED, "num_hidden_layers": 3, "layers_block_type": ["mamba", "moe", "attention"], "head_dim": 8,
        "moe_shared_expert_intermediate_size": 48, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8,
        "n_groups": 1, "mamba_chunk_size": 8,
    },
}  # fmt: skip
IDS = torch.arange(24).reshape(2, 12) * 7 % 64


def family(transformers, name, **options):
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}TextConfig" if name == "Llama4" else f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(kind(**{**TINY, **FAMILIES[name], **options}))
    for key, parameter in model.named_parameters():
        if "experts" in key:  # some start at zero, or without values
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def experts_of(model):
    return [(name, module) for name, module in model.named_modules() if name.endswith(".experts")]


class Loop:
    """Stands where a layer's products do: each expert's rows through `mf.linear`, one after another."""

    def __init__(self, product, recipe):
        self.product, self.recipe, self.num_groups = product, recipe, product.num_groups

    def __call__(self, x, groups):
        weight, bias = self.product.weight, self.product.bias
        slices = groups.slices if hasattr(groups, "slices") else [
            slice(sum(groups[:e]), sum(groups[: e + 1])) for e in range(len(groups))
        ]  # fmt: skip
        return torch.cat([
            mf.linear(x[rows], weight[e], None if bias is None else bias[e], recipe=self.recipe)
            for e, rows in enumerate(slices) if rows.stop > rows.start
        ])  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_nine_tenths_of_each_family_convert_and_are_a_loop_of_linears(transformers, name, monkeypatch):
    model = family(transformers, name).eval()  # in training the router of Phi-MoE is random
    keys, plain = list(model.state_dict()), model(input_ids=IDS).logits
    report = mf.convert(model, "mxfp8")
    assert list(model.state_dict()) == keys
    assert {key for key, _ in experts_of(model)} <= set(report.converted)
    assert not report.unseen
    kept = ("embed", "lm_head", "router", "norm", ".gate.", "conv1d", "dt_bias", "A_log", ".D")
    inside = {key: one.numel() for key, one in model.named_parameters() if not any(part in key for part in kept)}
    running = tuple(f"{key}." for key in report.converted)
    assert sum(size for key, size in inside.items() if key.startswith(running)) > 0.9 * sum(inside.values())
    loss = model(input_ids=IDS, labels=IDS).loss
    ours = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    call = type(experts_of(model)[0][1]).forward
    assert call.__qualname__ == "ExpertsLayer.forward"

    def looped(layer, *arguments, **options):
        products = {one.name: Loop(one, "mxfp8") for one in layer.products}
        return layer._form.forward(layer, products, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ExpertsLayer, "forward", looped)
        same = model(input_ids=IDS, labels=IDS).loss
        theirs = torch.autograd.grad(same, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(loss, same, rtol=1e-5, atol=1e-6)
    for one, other in zip(ours, theirs, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * other.abs().max().item())
    mf.revert(model)
    assert torch.equal(model(input_ids=IDS).logits, plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_our_forward_in_high_precision_is_that_of_transformers(transformers, name):
    """The form of each family, its gate and its layout: float32 products give what the model's own loop gives."""
    model = family(transformers, name, **{} if name == "Llama4" else {"experts_implementation": "eager"}).eval()
    plain = model(input_ids=IDS, labels=IDS)
    plain.loss.backward()
    gradients = {key: one.grad for key, one in model.named_parameters() if "experts" in key}
    model.zero_grad()
    mf.convert(model, mf.Placement([("*.experts", CustomRecipe(*[Gemm(None, None)] * 3))]), exclude=())
    ours = model(input_ids=IDS, labels=IDS)
    ours.loss.backward()
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-5)
    for key, gradient in gradients.items():
        torch.testing.assert_close(model.get_parameter(key).grad, gradient, rtol=1e-3, atol=1e-6)


class Lenient:
    """A configuration that has every size that a class of experts asks for."""

    _experts_implementation = "eager"

    def __getattr__(self, name):
        if "act" in name:
            return "silu"
        if "eps" in name or "scale" in name:
            return 1e-6
        return 1.5 if "limit" in name or "alpha" in name else 4 if "experts" in name else 16


def decorated(transformers):
    """Every class of this transformers whose experts are chosen by name, in files that carry the decorator."""
    folder = pathlib.Path(transformers.__file__).parent / "models"
    pattern = re.compile(r"@use_experts_implementation(?:\([^)]*\))?\s+class (\w+)")
    for path in sorted(folder.glob("*/modeling_*.py")):
        for name in pattern.findall(path.read_text(encoding="utf-8")):
            yield getattr(importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"), name)


def test_every_class_of_transformers_computes_here_what_it_computes_there(transformers):
    high, seen, failed = CustomRecipe(*[Gemm(None, None)] * 3), 0, []
    for kind in decorated(transformers):
        torch.manual_seed(0)
        experts = kind(Lenient())
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        numbers = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
        x, weights = torch.randn(9, experts.down_proj.shape[2 - experts.is_transposed]), torch.rand(9, 2)
        y = experts(x, numbers, weights)
        mf.convert(experts, high)
        made = experts.forward(x, numbers, weights)
        seen += type(experts).forward.__qualname__ == "ExpertsLayer.forward"
        if not torch.allclose(made, y, rtol=1e-4, atol=1e-5):
            failed.append(kind.__name__)
    assert not failed
    assert seen > 60


@pytest.mark.parametrize(
    ("path", "sizes"),
    [
        ("step3p7.modeling_step3p7.Step3p7Experts", {"num_local_experts": 6, "moe_intermediate_size": 48}),
        ("longcat_flash.modeling_longcat_flash.LongcatFlashExperts",
         {"n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 48}),
        ("longcat_flash.modeling_longcat_flash.LongcatFlashExperts",
         {"n_routed_experts": 6, "zero_expert_num": 0, "expert_ffn_hidden_size": 48}),
    ],
    ids=["Step-3.7", "LongCat", "LongCat without identities"],
)  # fmt: skip
def test_experts_with_a_shipped_adapter_compute_what_they_compute_there(transformers, path, sizes):
    module, _, kind = path.rpartition(".")
    torch.manual_seed(0)
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    experts = kind(SimpleNamespace(hidden_size=32, hidden_act="silu", **sizes))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    numbers = torch.stack([torch.randperm(6)[:3] for _ in range(20)])
    numbers[numbers == 1] = 0  # one without tokens
    x, weights = torch.randn(20, 32, requires_grad=True), torch.rand(20, 3, requires_grad=True)

    def computed():
        y = experts(x, numbers, weights)
        return [y, *torch.autograd.grad(y.square().sum(), [x, weights, *experts.parameters()])]

    plain = computed()
    mf.convert(experts, CustomRecipe(*[Gemm(None, None)] * 3))
    for ours, theirs in zip(computed(), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    mf.convert(experts, "mxfp8")
    y = computed()[0]
    assert 0 < (y - plain[0]).norm() < 0.1 * plain[0].norm()
    mf.revert(experts)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(computed(), plain, strict=True))
    mf.quantize_(experts.requires_grad_(False), mf.WeightOnly("mxfp8"))
    assert (experts(x, numbers, weights) - plain[0]).norm() < 0.1 * plain[0].norm()


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_train_around_packed_experts_and_on_converted_ones(transformers, tmp_path, name):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    on_experts = {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": ["q_proj"]}
    for config in (mf.WeightOnly("nvfp4"), mf.WeightOnly("mxfp8")):
        model = family(transformers, name).requires_grad_(False)
        mf.quantize_(model, config)
        tuned = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        optimizer = torch.optim.AdamW([one for one in tuned.parameters() if one.requires_grad], lr=1e-2)
        losses = []
        for _ in range(3):
            losses.append(tuned(input_ids=IDS, labels=IDS).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[2] < losses[0]
        tuned.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(model, tmp_path)
        assert torch.equal(again(input_ids=IDS).logits, tuned.eval()(input_ids=IDS).logits)
        packed = family(transformers, name).requires_grad_(False)
        mf.quantize_(packed, config)
        refused = peft.get_peft_model(packed, peft.LoraConfig(r=2, **on_experts))
        with pytest.raises(InvalidTypeError, match=r"target are quantized experts.*target_modules"):
            refused(input_ids=IDS)
    model = family(transformers, name)
    mf.convert(model, "mxfp8")
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, **on_experts))
    tuned(input_ids=IDS, labels=IDS).loss.backward()
    made = [one.grad for key, one in tuned.named_parameters() if "experts" in key and "lora_B" in key]
    assert made
    assert all(one.any() for one in made)


def test_generate_decodes_on_our_path_and_saving_writes_the_files_of_the_plain_model(transformers, tmp_path):
    model = family(transformers, "Qwen3Moe").eval()
    model.save_pretrained(tmp_path / "plain")
    mf.convert(model, "mxfp8")
    calls = []
    for _, layer in experts_of(model):
        layer.products[0].register_forward_pre_hook(lambda *_: calls.append(1))
    made = model.generate(input_ids=IDS[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape == (2, 8)
    assert len(calls) == 4 * model.config.num_hidden_layers
    model.save_pretrained(tmp_path / "converted")
    files = [dict(load_file(tmp_path / kind / "model.safetensors")) for kind in ("plain", "converted")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(one, files[1][key]) for key, one in files[0].items())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    mf.convert(again, "mxfp8")
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("recipe", ["mxfp8", DelayedScaling()], ids=["mxfp8", "delayed"])
def test_the_trainer_trains_experts(transformers, accelerate, sequences, tmp_path, recipe):
    model = family(transformers, "Qwen3Moe")
    mf.convert(model, recipe)
    before = {name: layer.down_proj.detach().clone() for name, layer in experts_of(model)}
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=8, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
        report_to=[], use_cpu=True, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    model.activation_checkpointing_enable()
    trainer = transformers.Trainer(model, arguments, train_dataset=sequences)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert all(not torch.equal(layer.down_proj, before[name]) for name, layer in experts_of(model))


@pytest.mark.parametrize("name", ["Dbrx", "JetMoe", "SwitchTransformers"])
def test_experts_that_are_not_known_stay_and_are_named(transformers, name):
    sizes = {
        "Dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 64, "max_seq_len": 64,
                 "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
                 "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
        "JetMoe": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                   "num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4},
        "SwitchTransformers": {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
                               "num_decoder_layers": 2, "num_experts": 4, "num_sparse_encoder_layers": 1},
    }[name]  # fmt: skip
    kind = "SwitchTransformersForConditionalGeneration" if name.startswith("Switch") else f"{name}ForCausalLM"
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes))
    report = mf.convert(model, "mxfp8")
    named = " ".join(f"{row.name}: {row.reason}" for row in report.unseen)
    if name == "SwitchTransformers":  # numbered experts of two Linears each
        assert any(".experts." in key for key in report.converted)
        assert not named
    else:
        assert "is not known" in named
    assert ("register_experts" in named) == (name == "JetMoe")


# ---- files

BIG = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
TARGETS = ["ct:nvfp4", "ct:fp8_dynamic", "ct:mxfp8", "modelopt:nvfp4", "hf:finegrained_fp8"]


def big(transformers, name):
    options = dict(BIG) if name in ("Qwen3Moe", "DeepseekV3") else {k: v for k, v in BIG.items() if k[:3] != "moe"}
    return family(transformers, name, **options).to(torch.bfloat16).requires_grad_(False).eval()


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
def test_numbered_experts_are_joined_byte_by_byte(transformers, tmp_path, name, to):
    model = big(transformers, name)
    model.save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "out", to=to)
    report = mf.load_quantized(tmp_path / "out", model)
    row = next(row for row in report if row.name.endswith(".experts"))
    assert row.action == "loaded"
    assert report.share > 0.8
    file = checkpoint.load(tmp_path / "out")
    first, second, last = ("w1", "w3", "w2") if name == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
    layer = experts_of(model)[0][1]
    for e in range(4):
        own = {key.rsplit(".", 2)[1]: one for key, one in file.items() if f".experts.{e}." in key}
        up = np.concatenate([own[first].dequantize(), own[second].dequantize()])
        # The oracle rounds code * scale * tensor_scale once less than a tensor does.
        np.testing.assert_allclose(layer.gate_up_proj[e].dequantize(torch.float32).numpy(), up, rtol=1e-6)
        assert np.array_equal(
            layer.products[1].weight[e].codes.view(torch.uint8).numpy(), own[last].codes.view(np.uint8)
        )


@pytest.mark.parametrize("to", ["microfloat:native", "ct:nvfp4", "modelopt:nvfp4"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss", "Llama4"])
def test_saved_experts_load_again_with_the_same_codes(transformers, tmp_path, name, to):
    model = big(transformers, name)
    mf.quantize_(model, mf.WeightOnly("nvfp4"))
    mf.save_quantized(model, tmp_path / "out", format=to)
    names = {key for key in checkpoint.load(tmp_path / "out") if ".experts." in key}
    assert any(".experts.3." in key for key in names) == (to != "microfloat:native")
    again = big(transformers, name)
    report = mf.load_quantized(tmp_path / "out", again)
    assert all(row.action == "loaded" for row in report if row.name.endswith(".experts"))
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_static_scales_of_experts_are_saved_and_loaded(transformers, tmp_path):
    model = big(transformers, "Qwen3Moe")
    mf.quantize_(model, mf.WeightActivation("fp8_tensor", scales="static"))
    with mf.calibrate(model):
        model(input_ids=IDS)
    for to in ("microfloat:native", "ct:fp8"):
        mf.save_quantized(model, tmp_path / to[:2], format=to)
        again = big(transformers, "Qwen3Moe")
        mf.load_quantized(tmp_path / to[:2], again)
        for one, other in zip(experts_of(again)[0][1].products, experts_of(model)[0][1].products, strict=True):
            torch.testing.assert_close(one.input_amax, other.input_amax, rtol=1e-6, atol=0)


def numbered(transformers, tmp_path, change):
    """A file of numbered experts in NVFP4 whose records `change` has changed."""
    model = big(transformers, "Qwen3Moe")
    mf.quantize_(model, mf.WeightOnly("nvfp4"))
    mf.save_quantized(model, tmp_path / "out", format="ct:nvfp4")
    records = dict(checkpoint.load(tmp_path / "out"))
    change(records)
    checkpoint.save(list(records.values()), tmp_path / "changed", format="ct:nvfp4")
    return tmp_path / "changed"


def test_all_missing_and_extra_experts_are_named_at_once(transformers, tmp_path):
    at = "model.layers.0.mlp.experts"

    def change(records):
        records[f"{at}.4.up_proj.weight"] = replace(records[f"{at}.0.up_proj.weight"], name=f"{at}.4.up_proj.weight")
        del records[f"{at}.1.gate_proj.weight"], records[f"{at}.2.down_proj.weight"]

    path = numbered(transformers, tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        mf.load_quantized(path, big(transformers, "Qwen3Moe"))
    for said in ("1.gate_proj.weight is missing", "2.down_proj.weight is missing", "4.up_proj.weight is one more"):
        assert f"{at}.{said}" in str(caught.value)
    model = big(transformers, "Qwen3Moe")
    before = experts_of(model)[0][1].gate_up_proj.clone()
    with pytest.warns(UserWarning, match=r"strict=False.*unknown to the model: .*experts\.0\.gate_proj"):
        report = mf.load_quantized(path, model, strict=False)
    assert all("experts" not in row.name for row in report)
    assert torch.equal(experts_of(model)[0][1].gate_up_proj, before)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gate_and_up_of_other_scales_keep_both(transformers, tmp_path):
    at = "model.layers.0.mlp.experts.2.up_proj.weight"

    def change(records):
        records[at] = replace(records[at], tensor_scale=records[at].tensor_scale * 2, source=None)

    path = numbered(transformers, tmp_path, change)
    file = checkpoint.load(path)
    model = big(transformers, "Qwen3Moe")
    mf.load_quantized(path, model)
    stored = experts_of(model)[0][1].gate_up_proj
    assert stored.format.name == "nvfp4_row"
    np.testing.assert_allclose(stored[2].dequantize(torch.float32)[128:].numpy(), file[at].dequantize(), rtol=1e-6)
    assert model(input_ids=IDS).logits.isfinite().all()


@pytest.mark.parametrize("first", ["convert", "parallel"])
def test_expert_parallelism_of_transformers_runs_converted_experts(transformers, first):
    parallel = pytest.importorskip("transformers.distributed.expert_parallel")
    model, alone = family(transformers, "Qwen3Moe"), family(transformers, "Qwen3Moe")
    mf.convert(alone, "mxfp8")
    plan = {}
    for name, _ in experts_of(model):
        plan |= {
            f"{name}.gate_up_proj": "grouped_gemm",
            f"{name}.down_proj": "grouped_gemm",
            name: "ep_dispatch_experts",
        }
    with world_of_one():
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        if first == "convert":
            mf.convert(model, "mxfp8")
        parallel.apply_expert_parallelism(model, mesh, mesh, plan, "all_reduce")
        if first == "parallel":
            report = mf.convert(model, "mxfp8")
            assert all(name in report.converted for name, _ in experts_of(model))
        calls = []
        for _, layer in experts_of(model):
            layer.products[0].register_forward_pre_hook(lambda *_: calls.append(1))
        for one in (model, alone):
            one(input_ids=IDS, labels=IDS).loss.backward()
        assert len(calls) == 2
        for (key, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            gradient = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
            assert torch.equal(gradient, theirs.grad), key
        mf.revert(model)
        assert model(input_ids=IDS).logits.isfinite().all()
