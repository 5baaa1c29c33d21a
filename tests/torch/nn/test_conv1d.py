"""transformers' Conv1D as a layer under a recipe: the bits of a Linear of the transposed weight, and the way back."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import CheckpointError, InvalidValueError  # noqa: E402


class Conv1D(nn.Module):
    """A layer as transformers writes it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        size = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(Conv1D(80, 48), nn.Tanh(), Conv1D(32, 80))


def _linears(model):
    layers = [mf.Linear(one.nx, one.nf) for one in (model[0], model[2])]
    for layer, one in zip(layers, (model[0], model[2]), strict=True):
        layer.load_state_dict({"weight": one.weight.t(), "bias": one.bias})
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current", "delayed"])
def test_bits_gradients_state_dict_and_revert(recipe):
    model, x = _model(), torch.randn(3, 5, 48)
    before, held = copy.deepcopy(model), model[0].weight
    linears = _linears(model)
    report = mf.convert(model, recipe)
    mf.convert(linears, recipe)
    assert [(row.name, row.shape, row.action) for row in report] == [
        ("0", (80, 48), "converted"), ("2", (32, 80), "converted")
    ]  # fmt: skip
    assert report.unseen == ()
    assert report.share == 1.0
    for step in range(2):
        torch.manual_seed(step)
        model(x).square().sum().backward()
        torch.manual_seed(step)
        linears(x).square().sum().backward()
    assert torch.equal(model[0].weight.grad, linears[0].weight.grad)
    assert torch.equal(model[2].bias.grad, linears[2].bias.grad)
    assert model[0].weight is held
    state = model.state_dict()
    plain = mf.plain_state_dict(model)
    assert plain.keys() == before.state_dict().keys() <= state.keys()
    for name, value in before.state_dict().items():
        assert torch.equal(state[name], value)
        assert torch.equal(plain[name], value)
        assert state[name].is_contiguous()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), copy.deepcopy(model)(x))
    fresh = _model()
    mf.convert(fresh, recipe)
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    fresh.load_state_dict(state)
    assert torch.equal(fresh[2].weight, model[2].weight)
    mf.revert(model)
    assert type(model[0]) is Conv1D
    assert model[0].weight is held
    assert model[0].weight.grad.shape == held.shape == (48, 80)
    assert torch.equal(model(x), before(x))
    assert vars(model[0]).keys() == vars(before[0]).keys()


def test_quantized_weights():
    model, x = _model(), torch.randn(4, 48)
    linears = _linears(model)
    report = mf.quantize_(model, mf.WeightOnly("mxfp8"))
    mf.quantize_(linears, mf.WeightOnly("mxfp8"))
    assert [row.action for row in report] == ["quantized", "quantized"]
    assert torch.equal(model(x), linears(x))
    state = model.state_dict()
    assert (state["0.weight"].shape, state["0.weight"].axis) == ((48, 80), 0)
    other = _model()
    mf.quantize_(other, mf.WeightOnly("mxfp8"))
    for parameter in (other[0].bias, other[2].bias):
        nn.init.zeros_(parameter)
    other.load_state_dict(state)
    assert torch.equal(other(x), linears(x))
    mf.revert(model)
    assert type(model[2]) is Conv1D
    torch.testing.assert_close(model(x), linears(x))


@pytest.mark.parametrize(("config", "device"), [("mxfp8", "cpu"), ("nvfp4", "cpu"), ("mxfp6_e3m2", "meta")])
def test_quantized_weights_load_into_a_plain_model(tmp_path, config, device):
    model = nn.Sequential(Conv1D(96, 64), Conv1D(96, 96), Conv1D(32, 96))  # the one in the middle is square
    x = torch.randn(4, 64)
    mf.quantize_(model, mf.WeightOnly(config))
    mf.save_quantized(model, tmp_path / "low")
    with torch.device(device):
        fresh = nn.Sequential(Conv1D(96, 64), Conv1D(96, 96), Conv1D(32, 96))
    report = mf.load_quantized(tmp_path / "low", fresh)
    assert [row.action for row in report] == ["loaded"] * 3
    assert torch.equal(fresh(x), model(x))
    hooked = nn.Sequential(Conv1D(96, 64), Conv1D(96, 96), Conv1D(32, 96))
    hooked[1].forward = hooked[1].forward  # which can be no Linear: its values are loaded
    report = mf.load_quantized(tmp_path / "low", hooked)
    assert [row.action for row in report] == ["loaded", "dequantized", "loaded"]
    torch.testing.assert_close(hooked(x), model(x))
    with pytest.raises(CheckpointError, match=r"0.weight has shape"):
        mf.load_quantized(tmp_path / "low", nn.Sequential(Conv1D(96, 32), Conv1D(96, 96), Conv1D(32, 96)))


def test_square_quantized_weights_alone_load_as_they_are_saved(tmp_path):
    model, fresh, x = nn.Sequential(Conv1D(64, 64)), nn.Sequential(Conv1D(64, 64)), torch.randn(3, 64)
    mf.quantize_(model, mf.WeightActivation("fp8_row"))
    mf.save_quantized(model, tmp_path / "low", format="ct:fp8_dynamic")
    mf.load_quantized(tmp_path / "low", fresh)
    assert torch.equal(fresh(x), model(x))


def test_layers_that_stay_as_they_are():
    class Scaled(Conv1D):
        def forward(self, x):
            return super().forward(x) * 2

    Scaled.__name__ = "Conv1D"
    tied, replaced, beside = Conv1D(8, 16), Conv1D(8, 16), nn.Embedding(16, 8)
    beside.weight = tied.weight
    replaced.forward = lambda x: x
    model = nn.ModuleDict({"scaled": Scaled(8, 16), "tied": tied, "beside": beside, "replaced": replaced})
    with pytest.raises(InvalidValueError, match="that of another module too"):
        mf.convert(model, "mxfp8")
    model["router"], model["up"] = Conv1D(8, 16), Conv1D(8, 16)
    report = mf.convert(model, "mxfp8")
    assert report.converted == ["up"]
    assert "router" in report.skipped["router"]
    assert "replaced on the instance" in report.skipped["replaced"]
    assert [row.name for row in report.unseen] == ["scaled.weight"]
    pair = nn.Sequential(Conv1D(16, 16), Conv1D(16, 16), nn.Linear(16, 16))
    pair[1].weight = pair[0].weight  # which would be transposed twice
    assert mf.convert(pair, "fp8_row").converted == ["2"]


class _Adapted(nn.Module):
    """An adapter as PEFT writes it: its own product is transposed before it is merged where the base says so."""

    def __init__(self, base, transposed=True):
        super().__init__()
        self.base_layer, self.fan_in_fan_out = base, transposed


@pytest.mark.parametrize(
    "change", [lambda model: mf.convert(model, "mxfp8"), lambda model: mf.quantize_(model, mf.WeightOnly("fp8_row"))]
)
def test_adapters_around_a_layer_are_told_which_way_its_weight_lies(change):
    model = nn.ModuleDict({
        "one": _Adapted(Conv1D(32, 32)), "two": _Adapted(_Adapted(Conv1D(48, 32))),
        "kept": _Adapted(Conv1D(32, 32)), "linear": _Adapted(nn.Linear(32, 32), False),
    })  # fmt: skip
    model["kept"].base_layer.forward = lambda x: x
    change(model)
    told = {name: part.fan_in_fan_out for name, part in model.items()}
    assert told == {"one": False, "two": False, "kept": True, "linear": False}
    assert not model["two"].base_layer.fan_in_fan_out
    mf.revert(model)
    told = {name: part.fan_in_fan_out for name, part in model.items()}
    assert told == {"one": True, "two": True, "kept": True, "linear": False}
    assert model["two"].base_layer.fan_in_fan_out
