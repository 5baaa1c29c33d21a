"""features I5, S12: plain weights that train under a config of inference, with the bits that are served afterwards."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.recipes import Placement, WeightActivation, WeightOnly  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
]
CONFIGS = (
    WeightOnly("nvfp4"), WeightOnly("nvfp4", scale_search="four_over_six"), WeightOnly("fp8_tensor"),
    WeightOnly("mxfp4"), WeightActivation("nvfp4"), WeightActivation("fp8_tensor"), WeightActivation("fp8_1x128"),
    WeightActivation("mxfp8", weight="mxfp4"), WeightOnly("nvfp4", backward="dequantized"),
    WeightActivation("fp8_tensor", backward="dequantized"),
)  # fmt: skip


class Block(nn.Module):
    """Layers of a group, named by the test, over 40 columns, and one alone; scales differ from layer to layer."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = names or ("q_proj", "k_proj", "v_proj")
        for number, name in enumerate(self.names):
            setattr(self, name, nn.Linear(40, 24 + 8 * number))
            getattr(self, name).weight.data.mul_(3.7**-number)
        self.o_proj = nn.Linear(24 * len(self.names) + 4 * len(self.names) * (len(self.names) - 1), 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(torch.cat([getattr(self, name)(x) for name in self.names], -1))


def trained(config, *names: str, dtype=torch.float32, run=lambda model: model) -> tuple[Block, torch.Tensor]:
    """A block after a step of training, and an input."""
    model = Block(*names).to(dtype)
    x = torch.randn(3, 5, 40, dtype=dtype)
    mf.convert(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    run(model)(x).square().mean().backward()
    optimizer.step()
    return model, x


def served(model: Block, config) -> Block:
    stored = copy.deepcopy(model)
    mf.quantize_(stored, config)
    return stored


@pytest.mark.slow_cases("further dtypes of a checked config", cases=("torch.float32-WeightActivation*",))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_forward_that_trains_is_the_one_that_is_served(config, dtype) -> None:
    model, x = trained(config, dtype=dtype)
    assert torch.equal(model(x), served(model, config)(x))
    with torch.autocast("cpu", torch.bfloat16):  # masters of float32 are cast as they are stored
        assert torch.equal(model(x), served(model, config)(x))


@pytest.mark.parametrize("names", [("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3")], ids=str)
def test_other_groups_share_their_scale_in_training_too(names) -> None:
    config = WeightOnly("nvfp4")
    model, x = trained(config, *names)
    assert torch.equal(model(x), served(model, config)(x))
    scales = {float(getattr(served(model, config), name).weight.tensor_scale) for name in names}
    assert len(scales) == 1
    alone = copy.deepcopy(model)
    mf.quantize_(alone, config, fuse=())
    assert not torch.equal(model(x), alone(x))


def test_gradients_pass_straight_through_casts() -> None:
    model, x = trained(WeightActivation("nvfp4"))
    layer, x = model.k_proj, x.requires_grad_()
    layer.zero_grad()
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    torch.testing.assert_close(x.grad, dy @ layer.weight)
    torch.testing.assert_close(layer.weight.grad, dy.flatten(0, 1).T @ x.detach().flatten(0, 1))


def test_a_change_of_one_weight_changes_the_codes_of_its_group() -> None:
    config = WeightOnly("nvfp4")
    model, x = trained(config)
    model.eval()
    for change in (lambda w: w.data.mul_(40), lambda w: w.detach().mul_(3)):  # torch counts the second write alone
        model(x)
        change(model.v_proj.weight)
        assert torch.equal(model(x), served(model, config)(x))
    q = model.q_proj
    before = q(x, is_first_microbatch=True)
    assert torch.equal(q(x, is_first_microbatch=False), before)
    model.k_proj.weight.detach().mul_(50)
    assert torch.equal(q(x, is_first_microbatch=False), served(model, config).q_proj(x))


def _by_filters(model: Block, config) -> None:
    for one in (*model.names, "o_proj"):
        mf.convert(model, config, filter=lambda name, module, one=one: name == one)


def _replaced(model: Block, config) -> None:
    mf.convert(model, config)
    model.k_proj = nn.Linear(40, 32)
    mf.convert(model, config, filter=lambda name, module: name == "k_proj")


def _kept_high(model: Block, config) -> None:
    mf.convert(model, config)
    mf.convert(model, Placement([("k_proj", None)]))


def _reverted(model: Block, config) -> None:
    mf.convert(copy.deepcopy(model), config)
    mf.convert(model, config)
    mf.revert(model.q_proj)


def _pinned(model: Block, config) -> None:
    mf.convert(nn.ModuleDict({"whole": model}), config)
    model.v_proj.pin("mxfp8")


@pytest.mark.parametrize("change", [_by_filters, _replaced, _kept_high, _reverted, _pinned], ids=lambda f: f.__name__)
@pytest.mark.parametrize("config", [WeightOnly("nvfp4"), WeightActivation("fp8_tensor")], ids=str)
def test_groups_are_those_of_the_layers_that_hold_the_config_now(change, config) -> None:
    model, x = Block().eval(), torch.randn(3, 40)
    with torch.no_grad():
        model.k_proj.weight.mul_(50)
        model(x)
        change(model, config)
        named = {name: getattr(model, name) for name in model.names}
        trains = {name for name, layer in named.items() if isinstance(getattr(layer, "pinned", None), type(config))}
        stored = copy.deepcopy(model)
        mf.quantize_(stored, config, filter=lambda name, module: name in trains)
        assert len(trains) == (3 if change in (_by_filters, _replaced) else 2)
        for name in trains:
            assert torch.equal(named[name](x), getattr(stored, name)(x)), name
            assert set(named[name]._joint) == {named[one] for one in trains}


def test_compiled_code_shares_scales() -> None:
    torch._dynamo.reset()
    config = WeightActivation("nvfp4", backward="dequantized")
    compiled = trained(config, run=lambda model: torch.compile(model, backend="eager", fullgraph=True))[0]
    eager, x = trained(config)
    for one, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.compile(eager, backend="eager", fullgraph=True)(x), served(eager, config)(x))


@pytest.mark.slow("further programs of a checked kind")
def test_programs_of_torch_operations_share_scales() -> None:
    config = WeightOnly("fp8_tensor")
    model, x = trained(config, "gate_proj", "up_proj")
    assert torch.equal(mf.export(model.eval(), (x,)).module()(x), served(model, config)(x))


@pytest.mark.parametrize("config", [WeightOnly("nvfp4"), WeightActivation("nvfp4", scales="static")], ids=str)
def test_experts_share_the_scales_of_gate_and_up(config) -> None:
    model = nn.ModuleDict({name: mf.GroupedLinear(3, 32, 48) for name in ("gate_proj", "up_proj")})
    model["up_proj"].weight.data.mul_(torch.tensor([2.0, 0.5, 1.0])[:, None, None])
    mf.convert(model, config)
    x, sizes = torch.randn(10, 32), [3, 0, 7]
    if config.is_static:
        with mf.calibrate(model):
            _ = [layer(x, sizes) for layer in model.values()]
    made = {name: layer(x, sizes) for name, layer in model.items()}
    made["gate_proj"].sum().backward()
    stored = copy.deepcopy(model)
    mf.quantize_(stored, config)
    for name, layer in stored.items():
        assert torch.equal(layer(x, sizes), made[name])
    assert model["gate_proj"].weight.grad[0].abs().sum() > 0


def test_static_scales_come_from_calibration() -> None:
    config = WeightActivation("fp8_tensor", scales="static")
    model, x = Block(), torch.randn(7, 40)
    with mf.calibrate(model):  # before or after convert
        model(x)
    mf.convert(model, config)
    y = model(2 * x)
    assert torch.equal(y, served(model, config)(2 * x))
    with mf.calibrate(model):
        model(3 * x)
    assert float(model.q_proj.input_amax) == float(3 * x.abs().max())
    assert torch.equal(model(x), served(model, config)(x))
    bare = Block()
    mf.convert(bare, config)
    with pytest.raises(InvalidValueError, match=r"never calibrated.*q_proj"):
        bare(x)


@pytest.mark.parametrize("options", [{"scale_search": "mse"}, {"prefill": "folded"}], ids=str)
def test_bits_that_no_call_makes_are_refused(options) -> None:
    model = Block()
    with pytest.raises(InvalidValueError, match=next(iter(options))):
        mf.convert(model, WeightOnly("nvfp4", **options))
    assert type(model.q_proj) is nn.Linear
    mf.quantize_(model, WeightOnly("nvfp4"))
    mf.convert(model, WeightOnly("nvfp4", **options))  # stored codes run under it


def test_a_group_is_in_memory_as_a_whole() -> None:
    model, x = trained(WeightOnly("nvfp4"))
    model.k_proj.to("meta")
    with pytest.raises(NotSupportedError, match="meta device"):
        model.q_proj(x)


def test_copies_and_reverted_models() -> None:
    model, x = trained(WeightOnly("nvfp4"))
    assert set(model.state_dict()) == set(Block().state_dict())
    other = copy.deepcopy(model)
    other.k_proj.weight.data.mul_(100)
    assert torch.equal(model.q_proj(x), served(model, WeightOnly("nvfp4")).q_proj(x))
    assert not torch.equal(other.q_proj(x), model.q_proj(x))
    mf.revert(model)
    assert not [name for name in vars(model.q_proj) if "joint" in name]
    mf.convert(other, "mxfp8")
    mf.quantize_(other, model_config := WeightOnly("nvfp4", joint_scale=True))
    assert other.k_proj.pinned == mf.WeightOnly("nvfp4") != model_config
