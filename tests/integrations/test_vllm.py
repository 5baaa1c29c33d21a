"""microfloat.integrations.vllm in the real layers of vLLM, on a CPU: `make test-vllm` installs it without an engine."""

import json
import os
import tomllib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402
from vllm.config import (  # noqa: E402
    CompilationConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers import linear  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.model_executor.layers.fused_moe import layer as fused_moe  # noqa: E402
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights  # noqa: E402
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading  # noqa: E402
from vllm.model_executor.models.utils import WeightsMapper  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import CheckpointError, InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.integrations.vllm import MicrofloatConfig, register  # noqa: E402

H, KV, HEAD, F, E = 128, 2, 32, 192, 4  # hidden size, KV heads, size of a head, width of the MLP, experts
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
FORMATS = [
    "ct:nvfp4",
    "ct:mxfp4",
    "ct:mxfp6",
    "ct:mxfp8",
    "modelopt:nvfp4",
    "modelopt:mxfp8",
    "quark:mxfp4",
    "quark:mxfp8",
]
WEIGHTS = {"ct:mxfp6": "mxfp6_e2m3", "ct:fp8_dynamic": "fp8_row"}
BLOCK = "model.layers.0"


class Tree(nn.Module):
    """The Linears of one layer of a Llama, or of a mixture of experts, under the names of their files."""

    def __init__(self, experts=0):
        super().__init__()
        sizes = {"self_attn.q_proj": (H, H), "self_attn.o_proj": (H, H)}
        sizes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (H, KV * HEAD))
        for mlp in [f"mlp.experts.{e}" for e in range(experts)] or ["mlp"]:
            sizes |= {f"{mlp}.gate_proj": (H, F), f"{mlp}.up_proj": (H, F), f"{mlp}.down_proj": (F, H)}
        for name, (k, n) in sizes.items():
            *parents, last = f"{BLOCK}.{name}".split(".")
            module = self
            for parent in parents:
                module.add_module(parent, getattr(module, parent, None) or nn.Module())
                module = getattr(module, parent)
            module.add_module(last, nn.Linear(k, n, bias=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a model in a format, written by the library, one for each (format, experts)."""
    made = {}

    def write(target, experts=0):
        if (target, experts) not in made:
            path = tmp_path_factory.mktemp("folder") / "model"
            torch.manual_seed(0)
            model = Tree(experts).bfloat16().requires_grad_(False)
            name = WEIGHTS.get(target, target.rpartition(":")[2])
            mf.quantize_(model, mf.WeightOnly(name))
            mf.save_quantized(model, path, format=target)
            made[target, experts] = path
        return made[target, experts]

    return write


def config_of(path, **options):
    """The method of a folder, as vLLM makes it: by its name, with the table of a Llama."""
    register()
    described = json.loads((path / "config.json").read_text())["quantization_config"]
    config = get_quantization_config("microfloat").from_config(described)
    config.maybe_update_config("", SimpleNamespace(microfloat=options))
    config.packed_modules_mapping = FUSED
    return config


@pytest.fixture
def ranks(monkeypatch):
    """A function that makes the layers of vLLM those of one rank of several, without processes."""

    def of(rank, size):
        monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=size, rank_in_group=rank))
        for name in ("_DP", "_PCP", "_EP"):
            monkeypatch.setattr(parallel_state, name, SimpleNamespace(world_size=1, rank_in_group=0))

    of(0, 1)
    return of


def build(name, config, bias=False):
    options = {"quant_config": config, "params_dtype": torch.bfloat16, "prefix": f"{BLOCK}.{name}", "bias": bias}
    if name == "self_attn.qkv_proj":
        return linear.QKVParallelLinear(H, HEAD, H // HEAD, KV, **options)
    if name == "mlp.gate_up_proj":
        return linear.MergedColumnParallelLinear(H, [F, F], **options)
    kind = linear.ColumnParallelLinear if name == "mlp.up_proj" else linear.RowParallelLinear
    return kind(*{"self_attn.o_proj": (H, H), "mlp.up_proj": (H, F), "mlp.down_proj": (F, H)}[name], **options)


SHARDS = {"q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "gate_proj": (0,), "up_proj": (1,)}


def load(layer, path):
    """Give a layer its tensors by vLLM's own loaders, as its models do."""
    parent, _, last = layer.prefix.rpartition(".")
    parameters, seen = dict(layer.named_parameters()), []
    for key, value in load_file(path / "model.safetensors").items():
        for part in FUSED.get(last, [last]):
            if key.startswith(f"{parent}.{part}."):
                one = parameters[key.rpartition(".")[2]]
                one.weight_loader(one, value, *(SHARDS[part] if last in FUSED else ()))
                seen.append(key)
    assert seen
    layer.quant_method.process_weights_after_loading(layer)
    layer.update_param_tp_status()
    return layer


def expected(path, name):
    """The values of the weights of a layer of vLLM, each as `load_quantized` gives it."""
    parent, _, last = name.rpartition(".")
    loaded = mf.load_quantized(path)
    return [loaded[f"{BLOCK}.{parent}.{part}.weight"] for part in FUSED.get(last, [last])]


LAYERS = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.up_proj", "mlp.down_proj"]


@pytest.mark.parametrize("target", FORMATS)
def test_weights_have_the_bits_of_load_quantized(target, folder, ranks):
    path = folder(target)
    for name in LAYERS:
        layer = load(build(name, config_of(path)), path)
        parts = expected(path, name)
        weight = layer.weight
        assert isinstance(weight, mf.QuantizedTensor)
        for role in ("codes", "scale"):
            joined = torch.cat([getattr(one, role).view(torch.uint8) for one in parts])
            assert torch.equal(getattr(weight, role).view(torch.uint8), joined)
        assert torch.equal(weight.dequantize(), torch.cat([one.dequantize() for one in parts]))
        assert torch.equal(get_and_maybe_dequant_weights(layer, torch.bfloat16), weight.dequantize())  # as MLA asks
        x = torch.randn(5, parts[0].shape[1]).bfloat16()
        with torch.inference_mode():
            y, _ = layer(x)
        recipe = mf.WeightOnly(weight.format.name)
        ours = torch.cat([mf.linear(x, one, recipe=mf.WeightOnly(one.format.name)) for one in parts], -1)
        assert torch.equal(y, mf.linear(x, weight, recipe=recipe))
        torch.testing.assert_close(y, ours, rtol=2**-7, atol=2**-7)


@pytest.mark.filterwarnings("ignore:load_quantized. warn fused-mismatch")
def test_merged_weights_keep_the_tensor_scale_of_each(folder, ranks, tmp_path):
    path = folder("modelopt:nvfp4")
    tensors = load_file(path / "model.safetensors")
    for part, factor in (("self_attn.k_proj", 3.0), ("self_attn.v_proj", 0.7), ("mlp.up_proj", 1.1)):
        tensors[f"{BLOCK}.{part}.weight_scale_2"] *= factor
    save_file(tensors, tmp_path / "model.safetensors")
    for file in ("config.json", "hf_quant_config.json"):
        (tmp_path / file).write_text((path / file).read_text())
    for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
        layer = load(build(name, config_of(tmp_path)), tmp_path)
        parts = expected(tmp_path, name)
        assert layer.weight.format.name == "nvfp4_row"
        assert len({one.tensor_scale.item() for one in parts}) > 1
        assert torch.equal(layer.weight.dequantize(), torch.cat([one.dequantize() for one in parts]))


@pytest.mark.parametrize("target", ["ct:nvfp4", "ct:mxfp4", "modelopt:mxfp8"])
def test_slices_of_two_ranks_are_those_of_the_whole(target, folder, ranks):
    path = folder(target)
    for name in LAYERS:
        ranks(0, 1)
        whole = load(build(name, config_of(path)), path)
        x = torch.randn(3, whole.input_size).bfloat16()
        values, outputs = [], []
        for rank in range(2):
            ranks(rank, 2)
            layer = load(build(name, config_of(path)), path)
            values.append(layer.weight.dequantize())
            is_row = isinstance(layer, linear.RowParallelLinear)
            layer.reduce_results = False
            outputs.append(layer(x.chunk(2, -1)[rank] if is_row else x)[0])
        if is_row:
            assert torch.equal(torch.cat(values, 1), whole.weight.dequantize())
            torch.testing.assert_close(sum(outputs), whole(x)[0], rtol=2**-6, atol=2**-6)
        else:
            sizes = whole.output_partition_sizes
            halves = [one.split([size // 2 for size in sizes]) for one in values]
            together = [half for part in zip(*halves, strict=True) for half in part]
            assert torch.equal(torch.cat(together), whole.weight.dequantize())
            split = [one.split([size // 2 for size in sizes], -1) for one in outputs]
            joined = torch.cat([half for part in zip(*split, strict=True) for half in part], -1)
            torch.testing.assert_close(joined, whole(x)[0], rtol=2**-7, atol=2**-7)


def test_heads_that_several_ranks_share(folder, ranks):
    path = folder("modelopt:nvfp4")
    q, k, v = (one.dequantize() for one in expected(path, "self_attn.qkv_proj"))
    for rank in range(4):  # of two heads of k and v
        ranks(rank, 4)
        weight = load(build("self_attn.qkv_proj", config_of(path)), path).weight.dequantize()
        own = [q.chunk(4)[rank], k.chunk(2)[rank // 2], v.chunk(2)[rank // 2]]
        assert torch.equal(weight, torch.cat(own))


def test_weights_that_are_joined_in_the_file_and_replicated_ones(folder, ranks, tmp_path):
    path = folder("ct:nvfp4")
    tensors = load_file(path / "model.safetensors")
    gate, up = (
        {key.rpartition(".")[2]: one for key, one in tensors.items() if part in key} for part in ("gate_", "up_")
    )
    one = {key: value if value.numel() == 1 else torch.cat([value, up[key]]) for key, value in gate.items()}
    config = config_of(path)
    config.packed_modules_mapping = {}
    whole = torch.cat([one.dequantize() for one in expected(path, "mlp.gate_up_proj")])
    layer = build("mlp.gate_up_proj", config)
    options = {"quant_config": config, "params_dtype": torch.bfloat16, "bias": False, "prefix": f"{BLOCK}.mlp.both"}
    replicated = linear.ReplicatedLinear(H, 2 * F, **options)
    for made in (layer, replicated):
        for key, value in one.items():
            parameter = getattr(made, key)
            parameter.weight_loader(parameter, value)
        made.quant_method.process_weights_after_loading(made)
        assert torch.equal(made.weight.dequantize(), whole)
        assert made.weight.format.name == "nvfp4"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("activation", [None, "fp8_row"])
def test_layers_compile_as_a_whole(activation, folder, ranks):
    path = folder("ct:nvfp4")
    layer = build("mlp.up_proj", config_of(path, activation=activation), bias=True)
    layer.bias.data.copy_(torch.randn(F))
    load(layer, path)
    x = torch.randn(20, H).bfloat16()
    with torch.inference_mode():
        compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), layer(x)[0])


def test_fp8_activations_and_a_bias(folder, ranks):
    path = folder("ct:nvfp4")
    layer = build("mlp.up_proj", config_of(path, activation="fp8_row"), bias=True)
    layer.bias.data.copy_(torch.randn(F))
    load(layer, path)
    recipe = mf.WeightActivation("nvfp4", activation="fp8_row")
    for rows in (2, 40):  # by the weight's own values, and by its fold
        x = torch.randn(rows, H).bfloat16()
        assert torch.equal(layer(x)[0], mf.linear(x, layer.weight, layer.bias, recipe=recipe))
        assert not torch.equal(layer(x)[0], mf.linear(x, layer.weight, layer.bias, recipe=mf.WeightOnly("nvfp4")))


def moe_of(path, config=None, **changes):
    """The experts of vLLM over a folder, loaded by their own loader."""
    options = {"num_experts": E, "top_k": 2, "hidden_size": H, "dp_size": 1, "pcp_size": 1}
    changes.setdefault("intermediate_size", F)
    options |= {"prefix": f"{BLOCK}.mlp.experts", "params_dtype": torch.bfloat16, "reduce_results": False}
    with set_current_vllm_config(VllmConfig()):
        experts = fused_moe.FusedMoEFactory(**options, quant_config=config or config_of(path), **changes).routed_experts
    tensors = load_file(path / "model.safetensors").items()
    start = f"{BLOCK}.mlp.experts."
    names = set(experts.load_weights((key.removeprefix(start), one) for key, one in tensors if start in key))
    assert {"w13_weight_scale", "w2_weight_scale"} <= {name.rpartition(".")[2] for name in names}
    experts.quant_method.process_weights_after_loading(experts)
    return experts


def ours_of(path, x, weights, ids, activation=None):
    """The sum over the experts of each token, of products with the weights that `load_quantized` gives."""
    loaded, y = mf.load_quantized(path), torch.zeros(len(x), H)

    def product(x, name):
        weight = loaded[name]
        recipe = (
            mf.WeightActivation(weight.format.name, activation) if activation else mf.WeightOnly(weight.format.name)
        )
        return mf.linear(x, weight, recipe=recipe)

    for e in range(E):
        token, k = torch.where(ids == e)
        gate, up = (product(x[token], f"{BLOCK}.mlp.experts.{e}.{part}_proj.weight") for part in ("gate", "up"))
        h = product(nn.functional.silu(gate) * up, f"{BLOCK}.mlp.experts.{e}.down_proj.weight")
        y.index_add_(0, token, h.float() * weights[token, k, None])
    return y


@pytest.mark.parametrize("activation", [None, "fp8_row"])
@pytest.mark.parametrize("target", FORMATS)
def test_experts_are_those_of_load_quantized(target, activation, folder, ranks):
    path = folder(target, experts=E)
    experts = moe_of(path, config_of(path, activation=activation))
    loaded = mf.load_quantized(path)
    for e in range(E):
        gate, up, down = (loaded[f"{BLOCK}.mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        w13, w2 = (one.dequantize()[e] for one in experts.products.parameters())
        assert torch.equal(w13, torch.cat([gate.dequantize(), up.dequantize()]))
        assert torch.equal(w2, down.dequantize())
    x, ids = torch.randn(7, H).bfloat16(), torch.stack([torch.randperm(E)[:2] for _ in range(7)])
    weights = torch.rand(7, 2)
    with torch.inference_mode():
        y = experts.forward_modular(x, weights, ids)
    torch.testing.assert_close(y.float(), ours_of(path, x, weights, ids, activation), rtol=2**-6, atol=2**-6)


def test_experts_of_two_ranks_add_up_to_the_whole(folder, ranks):
    path = folder("modelopt:nvfp4", experts=E)
    x, ids = torch.randn(5, H).bfloat16(), torch.stack([torch.randperm(E)[:2] for _ in range(5)])
    weights, parts = torch.rand(5, 2), []
    for rank in range(2):
        ranks(rank, 2)
        parts.append(moe_of(path).forward_modular(x, weights, ids).float())
    torch.testing.assert_close(sum(parts), ours_of(path, x, weights, ids), rtol=2**-5, atol=2**-6)


def test_experts_that_are_refused(folder, ranks):
    path = folder("ct:nvfp4", experts=E)
    with pytest.raises(NotSupportedError, match=r"experts with the gate gelu.*Leave out"):
        moe_of(path, activation="gelu")
    with pytest.raises(NotSupportedError, match="experts with biases"):
        moe_of(path, has_bias=True)
    ranks(0, 4)
    with pytest.raises(NotSupportedError, match="got 24 in features on each rank, needed a multiple of 16"):
        moe_of(folder("ct:nvfp4", experts=E), intermediate_size=96)


def test_a_folder_is_taken_only_where_the_user_asks(folder):
    described = json.loads((folder("ct:nvfp4") / "config.json").read_text())["quantization_config"]
    assert MicrofloatConfig.override_quantization_method(described, "microfloat") == "microfloat"
    for other in (None, "compressed-tensors", "modelopt_fp4"):
        assert MicrofloatConfig.override_quantization_method(described, other) is None


def test_layers_in_high_precision_and_other_names(folder, ranks):
    path = folder("ct:nvfp4")
    config = config_of(path)
    config.config["ignore"] = [f"{BLOCK}.mlp.down_proj"]
    assert isinstance(build("mlp.down_proj", config).quant_method, linear.UnquantizedLinearMethod)
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    assert config.config["ignore"] == [f"language_model.{BLOCK}.mlp.down_proj"]
    assert type(build("mlp.down_proj", config).quant_method).__name__ == "MicrofloatLinearMethod"
    config.config["ignore"] = [f"{BLOCK}.mlp.up_proj"]
    with pytest.raises(NotSupportedError, match="got ct:nvfp4 and high precision, needed one NVFP4 or MX format"):
        build("mlp.gate_up_proj", config)


def test_refusals_say_what_to_do(folder, ranks, tmp_path):
    path = folder("ct:nvfp4")
    with pytest.raises(NotSupportedError, match=r"got ct:fp8, needed one NVFP4 or MX format.*Leave out"):
        build("mlp.up_proj", config_of(folder("ct:fp8_dynamic")))
    with pytest.raises(NotSupportedError, match="quant_method 'gptq' is not read"):
        build("mlp.up_proj", MicrofloatConfig.from_config({"quant_method": "gptq", "bits": 4}))
    with pytest.raises(InvalidValueError, match=r"microfloat: got \{'activations'.*needed a dictionary"):
        config_of(path, activations="fp8_row")
    with pytest.raises(InvalidValueError, match="format: got 'int8'"):
        build("mlp.up_proj", config_of(path, activation="int8"))
    ranks(1, 8)
    with pytest.raises(NotSupportedError, match="got 24 in features on each rank, needed a multiple of 16"):
        build("mlp.down_proj", config_of(path))
    ranks(0, 1)
    for missing in ("weight_scale", "weight_global_scale"):
        tensors = load_file(path / "model.safetensors")
        del tensors[f"{BLOCK}.mlp.up_proj.{missing}"]
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="got a layer without all of its scales"):
            load(build("mlp.gate_up_proj", config_of(path)), tmp_path)
    tensors[f"{BLOCK}.mlp.up_proj.weight_scale"] = tensors[f"{BLOCK}.mlp.up_proj.weight_scale"].float()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"got scale of torch\.float32, needed those of ct:nvfp4"):
        load(build("mlp.up_proj", config_of(path)), tmp_path)


def test_the_entry_point_is_the_function_that_registers():
    with open("pyproject.toml", "rb") as file:
        points = tomllib.load(file)["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"microfloat": f"{register.__module__}:{register.__name__}"}


@pytest.fixture
def groups(tmp_path):
    """The process groups of vLLM, of this one process."""
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/groups", 0, backend="gloo")
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def attend(self, query, key, value, output_shape=None, **options):
    """Attention over one sequence, in place of kernels over a cache, which a wheel for CUDA has not on a CPU."""
    q, k, v = (one.view(len(one), -1, self.head_size).transpose(0, 1)[None] for one in (query, key, value))
    y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y[0].transpose(0, 1).flatten(1)


def model_of(family):
    """A tiny model of transformers, in plain bfloat16."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 64, "hidden_size": H, "intermediate_size": F, "head_dim": HEAD, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": KV, "max_position_embeddings": 64, "dtype": "bfloat16"}
    sizes |= {"moe_intermediate_size": 96, "num_experts": E, "num_experts_per_tok": 2, "norm_topk_prob": True}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(architectures=[f"{family}ForCausalLM"], **sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config).bfloat16().eval().requires_grad_(False)


def engine_of(path, **options):
    """The configuration of vLLM for a folder and options of its command line."""
    register()
    model = ModelConfig(str(path), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, **options)
    return VllmConfig(
        model_config=model, device_config=DeviceConfig("cpu"), load_config=LoadConfig(use_tqdm_on_load=False),
        compilation_config=CompilationConfig(custom_ops=["none"]),
    )  # fmt: skip


@pytest.mark.parametrize("target", ["ct:nvfp4", "modelopt:nvfp4", "ct:mxfp4"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_models_of_vllm_compute_what_transformers_does(family, target, groups, tmp_path, monkeypatch):
    ours, ids = model_of(family), torch.arange(12) * 5 % 64
    plain = ours(input_ids=ids[None]).logits[0].float()
    mf.quantize_(ours, mf.WeightOnly(target.rpartition(":")[2]))
    mf.save_quantized(ours, tmp_path / "model", format=target)
    engine = engine_of(tmp_path / "model", quantization="microfloat")
    monkeypatch.setattr(Attention, "forward", attend)
    with set_current_vllm_config(engine):
        parallel_state.initialize_model_parallel(1)
        with set_default_torch_dtype(torch.bfloat16):
            theirs = initialize_model(engine)
        DefaultModelLoader(engine.load_config).load_weights(theirs, engine.model_config)
        process_weights_after_loading(theirs, engine.model_config, torch.device("cpu"))
        with torch.inference_mode(), set_forward_context(None, engine):
            logits = theirs.compute_logits(theirs(ids, torch.arange(12)))
    assert sum(isinstance(one, mf.QuantizedTensor) for one in theirs.parameters()) == 8
    expected = ours(input_ids=ids[None]).logits[0].float()
    assert (logits - expected).norm() < (plain - expected).norm() / 16  # of what the format changes


def test_the_command_line_chooses_the_method_and_its_option(tmp_path):
    model = model_of("Llama")
    mf.quantize_(model, mf.WeightOnly("nvfp4"))
    for target, theirs in (("ct:nvfp4", "compressed-tensors"), ("modelopt:nvfp4", "modelopt_fp4")):
        path = tmp_path / theirs
        mf.save_quantized(model, path, format=target)
        assert ModelConfig(str(path), skip_tokenizer_init=True).quantization == theirs
        config = engine_of(path, quantization="microfloat").quant_config
        assert isinstance(config, MicrofloatConfig)
        assert config.activation is None
        options = {"quantization": "microfloat", "hf_overrides": {"microfloat": {"activation": "fp8_row"}}}
        assert engine_of(path, **options).quant_config.activation == "fp8_row"
