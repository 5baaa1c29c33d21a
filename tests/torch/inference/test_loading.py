"""features I5, K3, K4, Q4, Q6: quantized models from checkpoints of every family, and what a serving engine does."""

import copy
import io
import json
import re
import warnings
from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat import checkpoint  # noqa: E402
from microfloat.checkpoint.families import WRITTEN  # noqa: E402
from microfloat.errors import CheckpointError, InvalidTypeError, InvalidValueError, MicrofloatError  # noqa: E402
from microfloat.formats import FORMATS  # noqa: E402
from microfloat.recipes import MXFP8BlockScaling, WeightActivation, WeightOnly  # noqa: E402
from tests.checkpoint.files import QUANTIZED, as_checkpoint, write  # noqa: E402

pytestmark = [
    # load says so of golden files of static activations, which hold a weight alone; their rows say it too
    pytest.mark.filterwarnings("ignore:.*announces activations:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


class Model(nn.Module):
    """A tied embedding, two layers that engines join, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.lm_head = nn.Linear(64, 16, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.lm_head(x + self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x)))


TOKENS = torch.arange(12).view(2, 6)


def made(config=None) -> Model:
    torch.manual_seed(0)
    model = Model().bfloat16()
    if config is not None:
        mf.quantize_(model, config)
        if model.up_proj.pinned.is_static:
            with mf.calibrate(model):
                model(TOKENS)
    return model


FAMILIES = (
    (WeightOnly("nvfp4"), "microfloat:native"), (WeightOnly("nvfp4"), "ct:nvfp4"),
    (WeightOnly("nvfp4"), "modelopt:nvfp4"), (WeightActivation("nvfp4", scales="static"), "modelopt:nvfp4"),
    (WeightOnly("mxfp6_e3m2"), "microfloat:native"), (WeightActivation("mxfp8"), "ct:mxfp8"),
    (WeightOnly("mxfp4"), "ct:mxfp4"), (WeightActivation("fp8_tensor", scales="static"), "ct:fp8"),
    (WeightActivation("fp8_1x128"), "deepseek:fp8"), (WeightActivation("mxfp8"), "microfloat:native"),
    (WeightActivation("fp8_tensor", scales="static"), "microfloat:native"),
)  # fmt: skip


@pytest.mark.parametrize(("config", "family"), FAMILIES, ids=lambda one: one if isinstance(one, str) else one.format)
def test_a_saved_model_is_loaded_to_the_same_bits(config, family, tmp_path) -> None:
    model = made(config)
    y = model(TOKENS)
    mf.save_quantized(model, tmp_path / "model", format=family)
    fresh = made()
    report = mf.load_quantized(tmp_path / "model", fresh)
    assert [row.action for row in report] == ["loaded"] * 3
    assert torch.equal(fresh(TOKENS), y)
    assert fresh.up_proj.pinned.fprop.lhs == model.up_proj.pinned.fprop.lhs
    with torch.device("meta"):
        empty = Model().bfloat16()
    mf.load_quantized(tmp_path / "model", empty)
    assert empty.lm_head.weight is empty.embed.weight
    assert torch.equal(empty(TOKENS), y)
    tensors = mf.load_quantized(tmp_path / "model")
    assert isinstance(tensors["up_proj.weight"], mf.QuantizedTensor)
    assert torch.equal(tensors["up_proj.weight"].codes.view(torch.uint8),
                       model.up_proj.weight.codes.view(torch.uint8))  # fmt: skip


def test_a_config_may_replace_that_of_the_checkpoint(tmp_path) -> None:
    mf.save_quantized(made(WeightActivation("mxfp8")), tmp_path / "model", format="ct:mxfp8")
    model = made()
    mf.load_quantized(tmp_path / "model", model, config=WeightOnly("mxfp8"))
    assert model.up_proj.pinned == WeightOnly("mxfp8")
    unchanged = made()
    with pytest.raises(InvalidValueError, match="stored"):
        mf.load_quantized(tmp_path / "model", unchanged, config=WeightOnly("nvfp4"))
    for config, text in (
        ("mxfp8", r"config: got 'mxfp8', .*Write WeightOnly\('mxfp8'\)"),
        (WeightOnly, "config: got the class WeightOnly, .*Call the class"),
        (MXFP8BlockScaling(), "config: got MXFP8BlockScaling, .*WeightOnly"),
    ):
        with pytest.raises(InvalidTypeError, match=text):
            mf.load_quantized(tmp_path / "model", unchanged, config=config)
    assert all(torch.equal(a, b) for a, b in zip(unchanged.parameters(), made().parameters(), strict=True))


def test_a_config_is_that_of_the_layers_in_its_format(tmp_path) -> None:
    mf.save_quantized(made({"up_proj": WeightOnly("nvfp4"), "*_proj": WeightActivation("mxfp8")}), tmp_path / "model")
    model, config = made(), WeightOnly("nvfp4", prefill="folded")
    mf.load_quantized(tmp_path / "model", model, config=config)
    assert model.up_proj.pinned == config
    assert model.down_proj.pinned.fprop == WeightActivation("mxfp8").fprop


class Shared(nn.Module):
    """Two layers of one weight, a head tied to an embedding, and a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.head.weight, self.second.weight = self.embed.weight, self.first.weight
        self.register_buffer("angles", torch.ones(64), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embed(tokens) * self.angles)))


@pytest.mark.parametrize("left_out", [(), ("head.weight", "second.weight"), ("embed.weight", "first.weight")])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shared_weights_stay_shared_whatever_names_the_file_has(device, left_out, tmp_path) -> None:
    """Files of transformers hold one name of a weight; the layers of the others would keep what they had."""
    model = Shared()
    mf.quantize_(model, WeightOnly("mxfp8"), exclude=("head",))
    mf.save_quantized(model, tmp_path / "model")
    records = [record for record in checkpoint.load(tmp_path / "model").values() if record.name not in left_out]
    checkpoint.save(records, tmp_path / "part", format="microfloat:native")
    with torch.device(device):
        other = Shared()
    other.angles = torch.ones(64)
    mf.load_quantized(tmp_path / "part", other)
    assert other.first.weight is other.second.weight
    assert other.embed.weight is other.head.weight
    assert torch.equal(other(TOKENS), model(TOKENS))


@pytest.mark.parametrize("kept", ["first", "second"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_of_two_names_is_loaded_by_either(device, kept, tmp_path) -> None:
    """With what is stored beside its weight, here the amax of a static scale."""

    def shared() -> nn.Module:
        model = nn.Sequential()
        model.first = model.second = nn.Linear(64, 64)
        return model

    x = torch.linspace(-3, 3, 256).reshape(4, 64)
    mf.quantize_(model := shared(), WeightActivation("fp8_tensor", scales="static"))
    with mf.calibrate(model):
        model(x)
    mf.save_quantized(model, tmp_path / "model")
    records = [record for record in checkpoint.load(tmp_path / "model").values() if record.name.startswith(kept)]
    checkpoint.save(records, tmp_path / "part", format="microfloat:native")
    with torch.device(device):
        other = shared()
    report = mf.load_quantized(tmp_path / "part", other)
    assert [row.name for row in report.rows] == ["first"]
    assert other.first is other.second
    assert torch.equal(other(x), model(x))


def test_a_static_scale_comes_with_the_weight_that_is_shared(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    other = copy.deepcopy(model)
    mf.quantize_(model, WeightActivation("fp8_tensor", scales="static"))
    with mf.calibrate(model):
        model(torch.ones(4, 64))
    mf.save_quantized(model, tmp_path / "model")
    records = [record for record in checkpoint.load(tmp_path / "model").values() if record.name.startswith("0")]
    checkpoint.save(records, tmp_path / "part", format="microfloat:native")
    mf.load_quantized(tmp_path / "part", other)
    assert other[1].weight is other[0].weight
    assert other[1].input_amax == other[0].input_amax == model[0].input_amax == 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("factor", [1, 2])
def test_plain_weights_are_shared_where_the_file_has_the_same_ones(factor, device, tmp_path) -> None:
    """Copied one after the other into one memory, both would have the values of the last; NaN is no difference."""
    model = Shared().requires_grad_(False)
    model.embed.weight[0, 0] = torch.nan
    model.head.weight = nn.Parameter(factor * model.embed.weight)
    mf.save_quantized(model, tmp_path / "model")
    with torch.device(device):
        other = Shared()
    other.angles = torch.ones(64)
    before = other.embed.weight
    mf.load_quantized(tmp_path / "model", other)
    for name in ("embed", "head"):
        torch.testing.assert_close(
            getattr(other, name).weight, getattr(model, name).weight, rtol=0, atol=0, equal_nan=True, check_stride=True
        )
    assert (other.head.weight is other.embed.weight) == (factor == 1)
    assert device == "meta" or other.embed.weight is before  # an optimizer may have it


def test_weights_that_were_stored_apart_are_not_shared(tmp_path) -> None:
    model = Shared()
    model.second.weight = nn.Parameter(2 * model.first.weight.detach())
    mf.quantize_(model, WeightOnly("mxfp8"), exclude=("head",))
    mf.save_quantized(model, tmp_path / "model")
    mf.load_quantized(tmp_path / "model", other := Shared())
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_buffers_of_the_meta_device_that_no_checkpoint_holds_are_refused(tmp_path) -> None:
    """Tables of angles, for instance; the model would fail, or give no numbers, when it is called."""
    mf.save_quantized(Shared(), tmp_path / "model")
    with torch.device("meta"):
        model = nn.ModuleDict({"inner": Shared()})
        model.register_buffer("offsets", torch.arange(4), persistent=False)
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    records = [replace(record, name=f"inner.{record.name}") for record in checkpoint.load(tmp_path / "model").values()]
    checkpoint.save(records, tmp_path / "inner", format="microfloat:native")
    with pytest.raises(CheckpointError, match=r"no checkpoint holds: offsets, inner\.angles\..*init_empty_weights"):
        mf.load_quantized(tmp_path / "inner", model)
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(after[name] is value for name, value in before.items())
    with warnings.catch_warnings(action="error"):
        mf.load_quantized(tmp_path / "inner", model, device="meta")  # as was asked for
    checkpoint.save([], tmp_path / "nothing", format="microfloat:native")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    with (
        pytest.warns(UserWarning, match="strict=False has loaded nothing of the 0 names"),
        pytest.warns(UserWarning, match=r"does not have 0.weight, .* 4.bias and 6 more, which"),
    ):
        mf.load_quantized(tmp_path / "nothing", model, strict=False)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_without_memory_is_loaded_where_it_is_asked_for(device, tmp_path) -> None:
    """Also buffers that were made with their values, as `init_empty_weights` of accelerate leaves them."""
    model = Rotated()
    mf.quantize_(model, WeightOnly("mxfp8"))
    mf.save_quantized(model, tmp_path / "model")
    with torch.device(device):
        empty = Rotated()
    for module in empty.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.to("meta")))
    mf.load_quantized(tmp_path / "model", empty, device="cuda")
    tensors = dict(empty.named_parameters()) | dict(empty.named_buffers())
    assert {name: tensor.device.type for name, tensor in tensors.items()} == dict.fromkeys(tensors, "cuda")
    for name, buffer in model.named_buffers():
        assert torch.equal(empty.get_buffer(name).cpu(), buffer)


class Angles(nn.Module):
    """A table that its owner writes, as models of transformers do, and one of positions."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.register_buffer("table", self.made(size), persistent=False)
        self.register_buffer("is_even", torch.arange(size) % 2 == 0, persistent=False)

    @staticmethod
    def made(size: int) -> torch.Tensor:
        return 100.0 ** -torch.arange(size)


class Rotated(nn.Module):
    """A model with `_init_weights`; `forgets`: a buffer that it does not write."""

    def __init__(self, forgets: str = "") -> None:
        super().__init__()
        self.forgets, self.angles, self.layer = forgets, Angles(), nn.Linear(8, 8)
        self.rotary = mf.RotaryEmbedding(8)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Angles):
            if self.forgets != "table":
                module.table.copy_(Angles.made(8))
            if self.forgets != "is_even":
                module.is_even.copy_(torch.arange(8) % 2 == 0)


@pytest.mark.parametrize("forgets", ["", "table", "is_even"])
def test_buffers_of_the_meta_device_are_initialized_by_the_model(forgets, tmp_path) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"part": Rotated(forgets)})
    whole = nn.ModuleDict({"part": Rotated()})
    mf.save_quantized(whole, tmp_path / "model")
    state = torch.get_rng_state()
    if forgets:
        with pytest.raises(CheckpointError, match=r"no checkpoint holds: part\.angles\.table, part\.angles\.is_even\."):
            mf.load_quantized(tmp_path / "model", model)
        assert all(value.is_meta for value in (*model.parameters(), *model.buffers()))
    else:
        mf.load_quantized(tmp_path / "model", model)
        for name, buffer in whole.named_buffers():
            assert torch.equal(model.get_buffer(name), buffer)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"device": "qpu"}, "device: got 'qpu', needed a torch.device"), ({"device": 3.5}, "device: got float, needed"),
     ({"device": True}, "device: got True, needed"),
     ({"strict": "no"}, "strict: got str, needed True or False")],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments, words, tmp_path) -> None:
    with pytest.raises(MicrofloatError, match=words):
        mf.load_quantized(tmp_path / "nowhere", made(), **arguments)


def test_a_linear_weight_the_other_way_round_does_not_fit(tmp_path) -> None:
    mf.save_quantized(made(WeightOnly("nvfp4")), tmp_path / "model")
    model = made()
    model.down_proj = nn.Linear(*model.down_proj.weight.shape, bias=False, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has shape"):
        mf.load_quantized(tmp_path / "model", model)


def test_names_and_shapes_that_do_not_fit_are_all_listed(tmp_path) -> None:
    mf.save_quantized(made(WeightOnly("nvfp4")), tmp_path / "model")

    class Other(Model):
        def __init__(self) -> None:
            super().__init__()
            self.extra, self.down_proj = nn.Linear(4, 4), nn.Linear(96, 32)
            del self.up_proj

    other = Other()
    with pytest.raises(CheckpointError, match=r"extra.weight is missing.*up_proj.*unknown.*down_proj.weight has shape"):
        mf.load_quantized(tmp_path / "model", other)
    assert type(other.gate_proj) is nn.Linear


def test_different_scales_of_joined_layers_are_flagged(tmp_path) -> None:
    model = made()
    with torch.no_grad():
        model.up_proj.weight.mul_(8)
    mf.quantize_(model, WeightOnly("nvfp4"), fuse=())
    with pytest.warns(UserWarning, match=r"save_quantized: warn fused-mismatch.* gate_up"):
        mf.save_quantized(model, tmp_path / "model", format="modelopt:nvfp4")
    with pytest.warns(UserWarning, match="fused-mismatch"):
        mf.load_quantized(tmp_path / "model", made())


@pytest.mark.parametrize("family", ["ct:nvfp4", "ct:mxfp8", "modelopt:nvfp4", "microfloat:native"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_format_that_transformers_does_not_read_in_the_dtype_of_a_model_is_named(family, dtype, tmp_path) -> None:
    """`convert` has said so all along."""
    model = made(WeightOnly("mxfp8" if family == "ct:mxfp8" else "nvfp4")).to(getattr(torch, dtype))
    model.dtype = getattr(torch, dtype)
    model.config = SimpleNamespace(to_json_string=lambda: '{"model_type": "llama"}')
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mf.save_quantized(model, tmp_path / "model", format=family)
    words = f"save_quantized: transformers 5.24 refuses {family}: models in another dtype than bfloat16.*: 3 layers"
    expected = [words] * (family.startswith("ct:") and dtype != "bfloat16")
    assert len(seen) == len(expected)
    assert all(re.match(one, str(found.message)) for one, found in zip(expected, seen, strict=True))
    with pytest.raises(InvalidValueError, match="format: got 'nonsense'"):
        mf.save_quantized(model, tmp_path / "other", format="nonsense")


def test_experts_keep_a_scale_each(tmp_path) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({"experts": mf.GroupedLinear(3, 64, 32, dtype=torch.bfloat16)})
    with torch.no_grad():
        model["experts"].weight[1].mul_(7)
    fresh = copy.deepcopy(model)
    mf.quantize_(model, WeightOnly("nvfp4"))
    mf.save_quantized(model, tmp_path / "model")
    mf.load_quantized(tmp_path / "model", fresh)
    assert fresh["experts"].weight.tensor_scale.shape == (3,)
    assert torch.equal(fresh["experts"].weight, model["experts"].weight)


def built(tensors: dict) -> nn.Module:
    """A model with tensors of these names and shapes, linear layers where a weight is a matrix."""
    root = nn.Module()
    for name, shape in tensors.items():
        *parents, key = name.split(".")
        module = root
        for depth, part in enumerate(parents):
            if part not in module._modules:
                is_linear = depth == len(parents) - 1 and key == "weight" and len(shape) == 2
                child = nn.Linear(*shape[::-1], bias=False, dtype=torch.bfloat16) if is_linear else nn.Module()
                module.add_module(part, child)
            module = module._modules[part]
        if key not in module._parameters:
            module.register_parameter(key, nn.Parameter(torch.zeros(shape), requires_grad=False))
    return root


def loads_as_it_is_read(path, **options) -> mf.ConversionReport:
    """Load a checkpoint into a model of its names, and without one; the values are those of `checkpoint.load`."""
    records = dict(checkpoint.load(path).items())
    model = built({name: tuple(record.logical_shape) for name, record in records.items()})
    report = mf.load_quantized(path, model, **options)
    tensors = mf.load_quantized(path)
    for name, record in records.items():
        if record.format is None:
            continue
        values, module = torch.from_numpy(record.dequantize()), model.get_submodule(name.rpartition(".")[0])
        weight = getattr(module, name.rpartition(".")[2])
        alone = tensors[name].dequantize(torch.float32)
        torch.testing.assert_close(alone, values, rtol=2e-7, atol=0, equal_nan=True)
        if isinstance(weight, mf.QuantizedTensor):
            assert torch.equal(weight.codes.view(torch.uint8), tensors[name].codes.view(torch.uint8))
            torch.testing.assert_close(weight.dequantize(torch.float32), values, rtol=2e-7, atol=0, equal_nan=True)
            y = module(torch.ones(3, values.shape[-1]).bfloat16())
            assert y.shape == (3, values.shape[0])
        else:
            torch.testing.assert_close(
                weight.float(), values.to(weight.dtype).float(), rtol=2e-7, atol=0, equal_nan=True
            )
    return report


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_family_that_is_read_is_loaded(name, tmp_path) -> None:
    report = loads_as_it_is_read(as_checkpoint(name, tmp_path))
    assert len(report) > 0
    assert all(row.action == "loaded" or row.reason for row in report)


@pytest.mark.parametrize("to", [name for name in WRITTEN if not name.startswith("microfloat:")])
def test_every_target_of_convert_is_loaded(to, tmp_path) -> None:
    torch.manual_seed(3)
    experts = ("gate_up_proj", (2, 192, 128)), ("down_proj", (2, 128, 96))
    tensors = {f"model.layers.0.mlp.experts.{name}": torch.randn(shape).numpy() for name, shape in experts}
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.randn(160, 128).numpy()
    write(tmp_path / "model.safetensors", tensors)
    checkpoint.convert(tmp_path, tmp_path / "out", to=to)
    loads_as_it_is_read(tmp_path / "out")


@pytest.mark.parametrize(
    ("inner", "leaves"), [(64, ["gate_up_proj", "down_proj"]), (32, ["gate_up_proj", "down_proj"]), (64, ["down_proj"])]
)
def test_square_experts_are_turned_as_the_others_of_their_module(inner, leaves, tmp_path) -> None:
    """gpt-oss is as wide inside as outside: the shape of down_proj does not tell how the file stores it."""
    torch.manual_seed(6)
    shapes = {"gate_up_proj": (2, 2 * inner, 64), "down_proj": (2, 64, inner)}
    (tmp_path / "plain").mkdir()
    experts = {f"experts.{leaf}": torch.randn(shapes[leaf]).numpy() for leaf in leaves}
    write(tmp_path / "plain" / "model.safetensors", experts)
    checkpoint.convert(tmp_path / "plain", tmp_path / "out", to="gptoss:hf")
    model = built({f"experts.{leaf}": (2, shapes[leaf][2], shapes[leaf][1]) for leaf in leaves})
    mf.load_quantized(tmp_path / "out", model)
    for name, record in checkpoint.load(tmp_path / "out").items():
        values = torch.from_numpy(record.dequantize()).transpose(1, 2)
        assert torch.equal(model.get_parameter(name).float(), values.bfloat16().float())


@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_of_every_format_are_saved_and_loaded(fmt, tmp_path) -> None:
    torch.manual_seed(4)
    model = nn.ModuleDict({"experts": mf.GroupedLinear(3, 64, 128, dtype=torch.bfloat16)})
    with torch.no_grad():
        model["experts"].weight.mul_(torch.rand(3, 128, 1) * 9)
    fresh = copy.deepcopy(model)
    mf.quantize_(model, WeightOnly(fmt))
    mf.save_quantized(model, tmp_path / "model")
    mf.load_quantized(tmp_path / "model", fresh)
    assert torch.equal(fresh["experts"].weight, model["experts"].weight)


def fp8(rows: int, columns: int, *, tile: tuple[int, int], dtype=np.float32, leading: tuple[int, ...] = ()) -> dict:
    """Codes and scales of FP8 tiles, by the ends of their names."""
    rng = np.random.default_rng(rows)
    grid = (*leading, -(-rows // tile[0]), -(-columns // tile[1]))
    scale = rng.integers(118, 124, grid, np.uint8)
    scale = scale.view(dtype) if dtype != np.float32 else np.exp2(scale.astype(np.float32) - 127) * np.float32(1.25)
    return {
        "": rng.uniform(-400, 400, (*leading, rows, columns)).astype(ml_dtypes.float8_e4m3fn), "_scale_inv": scale,
    }  # fmt: skip


E8M0 = ml_dtypes.float8_e8m0fnu


@pytest.mark.parametrize(
    ("weight", "name", "tile", "action", "words"),
    [
        (fp8(256, 384, tile=(128, 128), dtype=E8M0), "up.weight", 128, "loaded", ""),
        (fp8(200, 144, tile=(128, 128), dtype=E8M0), "up.weight", 128, "loaded", ""),
        (fp8(96, 128, tile=(64, 64)), "up.weight", 64, "dequantized", "fp8_64x64 is no format that a layer stores"),
        (fp8(96, 128, tile=(64, 64), dtype=E8M0), "up.weight", 64, "dequantized", "fp8_64x64_e8m0 is no format"),
        (fp8(160, 256, tile=(128, 128), leading=(3,)), "experts.gate", 128, "dequantized", "no linear layer"),
        (fp8(160, 256, tile=(128, 128), leading=(3,), dtype=E8M0), "experts.gate", 128, "dequantized", "no linear"),
        (fp8(96, 64, tile=(64, 64), leading=(2,)), "experts.gate", 64, "dequantized", "no linear layer"),
    ],
)
def test_tiles_of_any_scale_and_size_are_loaded(weight, name, tile, action, words, tmp_path) -> None:
    announced = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [tile, tile]}
    write(tmp_path / "model.safetensors", {name + end: array for end, array in weight.items()}, config=announced)
    (row,) = loads_as_it_is_read(tmp_path)
    assert (row.action, words in row.reason) == (action, True)
    if action == "loaded":
        assert row.recipe == WeightActivation("fp8_1x128", weight="fp8_128x128")


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv2d(4, 8, 3, bias=False), (8, 4, 3, 3)), (nn.RMSNorm(64), (64,)), (nn.Embedding(16, 64), (16, 64))],
)
def test_weights_of_other_layers_are_dequantized(layer, shape, tmp_path) -> None:
    codes = np.random.default_rng(5).uniform(-400, 400, shape).astype(ml_dtypes.float8_e4m3fn)
    write(tmp_path / "model.safetensors", {"one.weight": codes, "one.weight_scale": np.float32(0.25)})
    (row,) = report = mf.load_quantized(tmp_path, nn.ModuleDict({"one": layer}))
    assert (row.action, row.reason) == ("dequantized", "it belongs to no linear layer")
    assert "one" in str(report)
    assert torch.equal(layer.weight, torch.from_numpy(codes.astype(np.float32) / 4))


def test_experts_of_part_tiles_are_a_grouped_layer(tmp_path) -> None:
    """Their rows take the scales of their tiles, since one tile would reach over two experts."""
    weight = fp8(160, 256, tile=(128, 128), leading=(3,))
    announced = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    write(
        tmp_path / "model.safetensors", {f"experts.weight{end}": one for end, one in weight.items()}, config=announced
    )
    model = nn.ModuleDict({"experts": mf.GroupedLinear(3, 256, 160, bias=False, dtype=torch.bfloat16)})
    (row,) = mf.load_quantized(tmp_path, model)
    assert row.recipe == WeightActivation("fp8_1x128", weight="fp8_1x128")
    record = checkpoint.load(tmp_path)["experts.weight"]
    values, x = torch.from_numpy(record.dequantize()), torch.randn(7, 256).bfloat16()
    y = model["experts"](x, [4, 0, 3])
    exact = torch.cat([x[:4].float() @ values[0].T, x[4:].float() @ values[2].T])
    assert (y.float() - exact).square().mean() < 2e-3 * exact.square().mean()


class Scaled(nn.Linear):
    """A layer with a behaviour of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_layers_that_store_no_codes_are_dequantized_with_the_reason(tmp_path) -> None:
    def model() -> nn.Module:
        attention = nn.MultiheadAttention(32, 2, bias=False)
        return nn.ModuleDict({"own": Scaled(32, 32), "attention": attention, "plain": nn.Linear(32, 32)})

    layers = ("own", "attention.out_proj", "plain")
    tensors = {name: value.detach().numpy() for name, value in model().state_dict().items()}
    for name in layers:
        tensors = {key: value for key, value in tensors.items() if key != f"{name}.weight"} | static_fp8(name)
    path = saved(tensors, tmp_path / "model")
    loaded = model()
    rows = {row.name: row for row in mf.load_quantized(path, loaded)}
    assert [rows[name].action for name in layers] == ["dequantized", "dequantized", "loaded"]
    assert "Scaled is a subclass of nn.Linear with a behaviour of its own" in rows["own"].reason
    assert "reads this layer's weight without calling it" in rows["attention.out_proj"].reason
    for name in layers[:2]:
        assert torch.equal(loaded.get_parameter(f"{name}.weight"), torch.full((32, 32), 0.5))


def test_a_model_that_cannot_hold_the_values_is_refused(tmp_path) -> None:
    write(tmp_path / "model.safetensors", {f"up.weight{end}": one for end, one in fp8(8, 8, tile=(8, 8)).items()},
          config={"quant_method": "fp8", "weight_block_size": [8, 8]})  # fmt: skip
    for dtype in (torch.float8_e4m3fn, torch.uint8):
        model = nn.ModuleDict({"up": nn.Module()})
        model["up"].weight = nn.Parameter(torch.zeros(8, 8, dtype=dtype), requires_grad=False)
        with pytest.raises(CheckpointError, match=f"up.weight is quantized, the model's has {dtype}"):
            mf.load_quantized(tmp_path, model)
    (row,) = mf.load_quantized(tmp_path, model := nn.ModuleDict({"up": nn.Linear(8, 8, bias=False).double()}))
    assert (row.action, row.reason) == ("dequantized", "its weight has torch.float64")
    assert model["up"].weight.dtype == torch.float64


def saved(tensors: dict, folder, config=None):
    """A folder with these tensors."""
    folder.mkdir()
    write(folder / "model.safetensors", tensors, config=config)
    return folder


def static_fp8(name: str, *, input_scale: float | None = None) -> dict:
    """A weight in FP8 with one scale, as ModelOpt stores it."""
    made = {f"{name}.weight": np.ones((32, 32), ml_dtypes.float8_e4m3fn), f"{name}.weight_scale": np.float32(0.5)}
    return made if input_scale is None else {**made, f"{name}.input_scale": np.float32(input_scale)}


MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
PLAIN = np.ones((32, 32), np.float32)


@pytest.mark.parametrize(
    ("tensors", "name", "value"),
    [
        ({**static_fp8("attn.k_proj"), "attn.k_proj.k_scale": np.float32(0.5)}, "attn.k_proj.k_scale", 0.5),
        ({"attn.k_proj.weight": PLAIN, "attn.v_proj.v_scale": np.float32([0.25])}, "attn.v_proj.v_scale", 0.25),
        ({"attn.k_proj.weight": PLAIN, "attn.q_scale": np.float32([[2]])}, "attn.q_scale", 2.0),
        ({"attn.k_proj.weight": PLAIN, "k_scale": np.float32(4).astype(ml_dtypes.bfloat16)}, "k_scale", 4.0),
        ({"attn.k_proj.weight": PLAIN, "attn.kv_scale": np.float32([0.5])}, "attn.kv_scale", 0.5),
        ({"attn.k_proj.weight": PLAIN, "attn.k_scale": np.float32([[1], [2]])}, "attn.k_scale", [[1.0], [2.0]]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strict", [True, False])
def test_scales_of_a_cache_belong_to_the_module_of_their_name(tensors, name, value, strict, tmp_path) -> None:
    path = saved(tensors, tmp_path / "model", MODELOPT_FP8 if "attn.k_proj.weight_scale" in tensors else None)

    def model(*layers: str) -> nn.Module:
        return nn.ModuleDict({"attn": nn.ModuleDict({one: nn.Linear(32, 32, bias=False) for one in layers})})

    other = model("k_proj", *(["v_proj"] if "v_proj" in name else []))
    if "v_proj" in name:
        other["attn"]["v_proj"].weight = None
    mf.load_quantized(path, other, strict=strict)
    module, _, key = name.rpartition(".")
    found = getattr(other.get_submodule(module), key)
    assert (found.tolist() if isinstance(found, torch.Tensor) else found) == value
    alone = mf.load_quantized(path)[name].float()
    assert alone.tolist() == value if isinstance(value, list) else alone.item() == value
    for target, at in (("microfloat:native", ""), ("ct:fp8", "kv_cache_scheme"), ("modelopt:fp8", "kv_cache_scheme")):
        mf.save_quantized(copy.deepcopy(other), again := tmp_path / target, format=target)  # and they are not lost
        assert torch.equal(mf.load_quantized(again)[name].reshape(-1), alone.reshape(-1))
        config = json_of(again / "config.json") if (again / "config.json").exists() else {}
        is_quantized = any("weight_scale" in one for one in tensors)
        assert bool(config.get("quantization_config", {}).get(at)) == (bool(at) and is_quantized)


@pytest.mark.parametrize("name", ["l.attn.attn.k_scale", "l.attn.mla_attn.v_zero_point", "l.attn.impl.kv_scale"])
def test_scales_of_a_cache_under_an_engines_module_belong_to_the_module_around_it(name, tmp_path) -> None:
    path = saved({"l.attn.k_proj.weight": PLAIN, name: np.float32(0.5)}, tmp_path / "model")
    model = nn.ModuleDict({"l": nn.ModuleDict({"attn": nn.ModuleDict({"k_proj": nn.Linear(32, 32, bias=False)})})})
    mf.load_quantized(path, model)
    assert getattr(model["l"]["attn"], name.rpartition(".")[2]) == 0.5


def test_a_scale_of_a_cache_whose_module_is_not_there_is_named(tmp_path) -> None:
    path = saved({"k_proj.weight": PLAIN, "attn.k_scale": np.float32(1)}, tmp_path / "model")
    model = nn.ModuleDict({"k_proj": nn.Linear(32, 32, bias=False)})
    with pytest.raises(CheckpointError, match=r"attn\.k_scale is unknown to the model"):
        mf.load_quantized(path, model)
    with pytest.warns(UserWarning, match=r"has loaded 1 of the 2 names .*; unknown to the model: attn\.k_scale\.$"):
        mf.load_quantized(path, model, strict=False)
    model["attn"] = nn.Module()
    model["attn"].register_buffer("k_scale", torch.zeros(()))  # a model that has a place for it
    mf.load_quantized(path, model)
    assert model["attn"].k_scale.item() == 1
    assert dict(model["attn"].named_buffers())


def test_static_activations_without_a_scale_stay_in_high_precision(tmp_path) -> None:
    tensors = {**static_fp8("one", input_scale=0.25), **static_fp8("two")}
    path, x = saved(tensors, tmp_path / "model", MODELOPT_FP8), torch.ones(4, 32)

    def model() -> nn.Module:
        return nn.Sequential(OrderedDict((name, nn.Linear(32, 32, bias=False)) for name in ("one", "two")))

    first, second = model(), model()
    rows = {row.name: row for row in mf.load_quantized(path, first)}
    assert rows["one"].recipe == WeightActivation("fp8_tensor", weight="fp8_tensor", scales="static")
    assert first.one.input_amax == 0.25 * 448
    assert rows["two"].recipe == WeightOnly("fp8_tensor")
    assert "announces a static scale and has none; config=WeightActivation" in rows["two"].reason
    assert torch.equal(first(x), torch.full((4, 32), 256.0))
    static = WeightActivation("fp8_tensor", scales="static")
    assert [row.reason for row in mf.load_quantized(path, second, config=static)] == ["", ""]
    assert second.two.input_amax is None
    with mf.calibrate(second):
        second(x)
    assert second.two.input_amax == 16
    assert torch.equal(second(x), torch.full((4, 32), 256.0))


def test_the_family_may_be_named(tmp_path) -> None:
    """A method that is not read, over tensors of a family that is."""
    mf.save_quantized(made(WeightOnly("mxfp4")), tmp_path / "model", format="ct:mxfp4")
    (tmp_path / "model" / "config.json").write_text('{"quantization_config": {"quant_method": "auto-round"}}')
    with pytest.raises(CheckpointError, match=r"auto-round.*format="):
        mf.load_quantized(tmp_path / "model", made())
    report = mf.load_quantized(tmp_path / "model", model := made(), format="ct:mxfp4")
    assert [row.action for row in report] == ["loaded"] * 3
    assert torch.equal(model(TOKENS), made(WeightOnly("mxfp4"))(TOKENS))
    with pytest.raises(MicrofloatError, match="format: got 'ct:mxfp5'"):
        mf.load_quantized(tmp_path / "model", made(), format="ct:mxfp5")


@pytest.mark.parametrize(
    ("names", "own", "words"),
    [
        (["model.language_model.layers.0.up.weight", "model.language_model.layers.1.up.weight"],
         ["model.layers.0.up.weight", "model.layers.1.up.weight", "head.weight"],
         r"loaded nothing of the 2 names .*unknown to the model: model\.language_model\.layers\.0\.up\.weight, .*"
         r"not in the checkpoint: .*head\.weight\. 2 would fit with the prefix 'model' in place of "
         "'model.language_model': load into a module whose 'model.language_model' is the model's 'model'"),
        (["layers.0.up.weight", "head.weight"], ["model.layers.0.up.weight", "head.weight"],
         r"loaded 1 of the 2 names .* 1 would fit with the prefix 'model' in place of '': load into "
         r"model\.get_submodule\('model'\)"),
        (["module.up.weight", "module.down.weight"], ["up.weight"],
         r"1 would fit with the prefix '' in place of 'module': load into a module whose 'module' is the model"),
        (["a.weight"], ["b.weight"], r"unknown to the model: a\.weight; not in the checkpoint: b\.weight\.$"),
        (["up.weight"], ["up.weight", "score.weight"], r"loaded 1 of the 1 names .*; not in the checkpoint: score"),
    ],
)  # fmt: skip
def test_names_that_are_left_out_are_named_with_the_prefix_that_fits(names, own, words, tmp_path) -> None:
    path = saved(dict.fromkeys(names, PLAIN), tmp_path / "model")
    with pytest.warns(UserWarning, match=words):
        mf.load_quantized(path, built(dict.fromkeys(own, (32, 32))), strict=False)
    with pytest.raises(CheckpointError, match=words.partition("would fit")[2] or "Needed the names"):
        mf.load_quantized(path, built(dict.fromkeys(own, (32, 32))))


class Document:
    """A configuration that writes itself, as those of transformers do."""

    def __init__(self, **values) -> None:
        self.values = values

    def to_json_string(self) -> str:
        return json.dumps(self.values)


def described(config=None, **values) -> Model:
    """A model with the configurations that models of transformers have."""
    model = made(config)
    model.config = Document(model_type="tiny", hidden_size=64, **values)
    model.generation_config, model.dtype = Document(do_sample=True), torch.bfloat16
    return model


def json_of(path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.parametrize("family", ["microfloat:native", "ct:mxfp8", "modelopt:mxfp8"])
def test_a_saved_folder_has_the_configurations_of_its_model(family, tmp_path) -> None:
    model = described(WeightActivation("mxfp8"), torch_dtype="float32", quantization_config={"quant_method": "other"})
    assert mf.save_quantized(model, tmp_path / "model", format=family) == ["model.safetensors"]
    config = json_of(tmp_path / "model" / "config.json")
    quantization = config.pop("quantization_config", {"quant_method": None})
    assert (
        quantization["quant_method"] == {"c": "compressed-tensors", "m": "modelopt"}.get(family[0])
        or "native" in family
    )
    assert config == {"model_type": "tiny", "hidden_size": 64, "architectures": ["Model"], "torch_dtype": "bfloat16"}
    assert json_of(tmp_path / "model" / "generation_config.json") == {"do_sample": True}
    mf.load_quantized(tmp_path / "model", other := made())
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_a_given_configuration_is_taken_in_place_of_the_models(tmp_path) -> None:
    model = described(WeightOnly("mxfp8"))
    mf.save_quantized(model, tmp_path / "given", format="ct:mxfp8", config={"model_type": "mine"})
    assert json_of(tmp_path / "given" / "config.json").keys() == {"model_type", "quantization_config"}
    mf.save_quantized(model, tmp_path / "none", config=False)
    assert [one.name for one in (tmp_path / "none").iterdir()] == ["model.safetensors"]
    mf.save_quantized(model, tmp_path / "file" / "x.safetensors", format="ct:mxfp8")
    assert {one.name for one in (tmp_path / "file").iterdir()} == {"x.safetensors", "config.json"}
    assert json_of(tmp_path / "file" / "config.json").keys() == {"quantization_config"}
    model = made(WeightOnly("mxfp8"))
    model.config = {"of": "somebody else"}
    mf.save_quantized(model, tmp_path / "own", format="ct:mxfp8")
    assert json_of(tmp_path / "own" / "config.json").keys() == {"quantization_config"}


@pytest.mark.parametrize(
    ("config", "target"),
    [
        (WeightOnly("nvfp4"), "modelopt:nvfp4"), (WeightActivation("mxfp8"), "microfloat:native"), (None, "ct:fp8"),
        (None, "modelopt:mxfp8"),
    ],
)  # fmt: skip
def test_a_model_whose_weights_are_plain_is_not_saved_as_quantized(config, target, tmp_path) -> None:
    model = made()
    if config is not None:
        mf.convert(model, config)
    with pytest.raises(InvalidValueError, match=r"model: got a \w+ without quantized weights.*Call .*quantize_"):
        mf.save_quantized(model, tmp_path / "model", format=target)
    assert not (tmp_path / "model").exists()


def test_an_untied_head_is_saved_as_one(tmp_path) -> None:
    model = described(tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="tied no longer"):
        mf.quantize_(model, WeightOnly("mxfp8"), exclude=())
    with warnings.catch_warnings(action="error"):
        mf.save_quantized(model, tmp_path / "model", format="ct:mxfp8")
    assert json_of(tmp_path / "model" / "config.json")["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("config", "target", "scheme"),
    [
        (WeightActivation("nvfp4"), "ct:nvfp4", None), (WeightActivation("nvfp4_row"), "ct:nvfp4", None),
        (WeightActivation("nvfp4"), "modelopt:nvfp4", None),
        (WeightActivation("nvfp4", scales="static"), "ct:nvfp4", None),
        (WeightActivation("fp8_tensor", scales="static"), "modelopt:fp8", None),
        (WeightActivation("fp8_tensor", scales="static"), "ct:fp8", None),
        (WeightActivation("nvfp4"), "microfloat:native", WeightActivation("nvfp4")),
        (WeightActivation("nvfp4", scales="static"), "microfloat:native", None),
        (WeightActivation("fp8_row"), "ct:fp8_dynamic", WeightActivation("fp8_row")),
        (WeightActivation("fp8_1x128"), "ct:fp8_block", WeightActivation("fp8_1x128")),
    ],
)  # fmt: skip
def test_a_file_announces_only_the_input_scales_that_it_holds(config, target, scheme, tmp_path) -> None:
    model = made()
    mf.quantize_(model, config)  # and no `calibrate`
    warns = scheme is None and "native" not in target
    words = r"written as weight-only\. WeightActivation\(\.\.\., scales='static'\) and mf.calibrate"
    with pytest.warns(UserWarning, match=words) if warns else warnings.catch_warnings(action="error"):
        mf.save_quantized(model, tmp_path / "model", format=target)
    assert not [one for one in checkpoint.load(tmp_path / "model").findings if one.severity != "info"]
    mf.load_quantized(tmp_path / "model", other := made())
    expected = WeightOnly(model.up_proj.weight.format.name) if scheme is None else scheme
    assert other.up_proj.pinned.fprop == expected.fprop
    assert other(TOKENS).isfinite().all()


@pytest.mark.slow_cases(
    "further recipes and modules of a checked kind",
    all_but=("nvfp4", "mxfp6_e2m3", "fp8_tensor", "fp8_128x128"),
)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8", "fp8_tensor", "fp8_row", "fp8_128x128"])
def test_state_dicts_torch_files_and_dcp_are_exact(fmt, tmp_path) -> None:
    model = made(WeightOnly(fmt))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = made(WeightOnly(fmt))
    with torch.no_grad():
        again.up_proj.weight.fill_(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again.up_proj.weight, model.up_proj.weight)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    other = made(WeightOnly(fmt))
    with torch.no_grad():
        other.up_proj.weight.fill_(0)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    other.load_state_dict(state["model"])
    assert torch.equal(other.up_proj.weight, model.up_proj.weight)
    assert torch.equal(copy.deepcopy(model)(TOKENS), model(TOKENS))
    assert model.half().up_proj.weight.dtype == torch.float16


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8", "fp8_tensor", "fp8_row", "fp8_128x128"])
def test_shards_are_cut_and_loaded_as_a_serving_engine_does(fmt) -> None:
    torch.manual_seed(2)
    values = torch.randn(256, 384).bfloat16()
    q = mf.quantize(values, fmt)
    x = torch.randn(4, 384).bfloat16()
    whole = x.float() @ q.dequantize(torch.float32).T
    rows = [q.narrow(0, start, 128) for start in (0, 128)]  # column-parallel ranks hold rows of the weight
    assert torch.equal(torch.cat([x.float() @ one.dequantize(torch.float32).T for one in rows], 1), whole)
    columns = q.chunk(3, 1)  # row-parallel ranks hold columns
    parts = [x.float()[:, 128 * i : 128 * i + 128] @ one.dequantize(torch.float32).T for i, one in enumerate(columns)]
    assert torch.allclose(sum(parts), whole, atol=1e-3)
    if fmt not in ("fp8_tensor", "fp8_row"):  # which have no blocks to tear
        with pytest.raises(InvalidValueError, match="multiples of"):
            q.narrow(1, 3, 50)
    layer = nn.Linear(384, 256, bias=False).bfloat16()
    mf.quantize_(layer, WeightOnly(fmt))
    with torch.no_grad():
        layer.weight.fill_(0)
        for start, shard in zip((0, 128), rows, strict=True):  # of a checkpoint that is quantized already
            layer.weight.data.narrow(0, start, 128).copy_(shard)
    # A tensor scale that grew with the second shard leaves the values of the first one as they were.
    assert torch.equal(layer.weight.dequantize(), q.dequantize())


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_parts_of_scales_in_tiles_are_those_of_the_parts(fmt) -> None:
    q = mf.quantize(torch.randn(256, 256), fmt)
    blocked = mf.to_blocked(q.scale)
    for rows in (slice(0, 128), slice(128, 256)):  # tiles hold 128 rows, so that rows of whole tiles are a slice
        step = blocked.numel() // 2
        start = rows.start // 128 * step
        assert torch.equal(mf.to_blocked(q[rows].scale), blocked[start : start + step])


@pytest.mark.slow("further programs of a checked kind")
def test_exported_programs_are_plain_operations() -> None:
    static = WeightActivation("fp8_tensor", scales="static")
    model = made({"up_proj": static, "down_proj": WeightOnly("nvfp4")}).requires_grad_(False)
    program = mf.export(model, (TOKENS,))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("microfloat" in name for name in called)
    assert torch.equal(program.module()(TOKENS), model(TOKENS))
