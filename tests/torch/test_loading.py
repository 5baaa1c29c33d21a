"""features I5, K3, K4, Q4, Q6: quantized models from checkpoints of every family, and what a serving engine does."""

import copy
import io
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat import checkpoint  # noqa: E402
from microfloat.errors import CheckpointError, InvalidTypeError, InvalidValueError, MicrofloatError  # noqa: E402
from microfloat.recipes import MXFP8BlockScaling, WeightActivation, WeightOnly  # noqa: E402

pytestmark = [
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


@pytest.mark.filterwarnings("ignore:load_quantized. the checkpoint does not have angles:UserWarning")
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
    mf.load_quantized(tmp_path / "part", other)
    assert other.first.weight is other.second.weight
    assert other.embed.weight is other.head.weight
    other.angles = torch.ones(64)
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


@pytest.mark.filterwarnings("ignore:load_quantized. the checkpoint does not have angles:UserWarning")
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


def test_what_stays_on_the_meta_device_is_named(tmp_path) -> None:
    """Tables of angles are buffers that no checkpoint holds; the model would fail, or give no numbers, when called."""
    mf.save_quantized(Shared(), tmp_path / "model")
    with torch.device("meta"):
        model = Shared()
    with pytest.warns(UserWarning, match="the checkpoint does not have angles, which are on the meta device still"):
        mf.load_quantized(tmp_path / "model", model)
    with warnings.catch_warnings(action="error"):
        mf.load_quantized(tmp_path / "model", model, device="meta")  # as was asked for
    checkpoint.save([], tmp_path / "nothing", format="microfloat:native")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    with pytest.warns(UserWarning, match=r"does not have 0.weight, .* 4.bias and 6 more, which"):
        mf.load_quantized(tmp_path / "nothing", model, strict=False)


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
