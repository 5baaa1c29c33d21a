"""quantized_model_init: parameters that exist as codes only, trained, saved, and run outside an autocast."""

import copy
import io

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError  # noqa: E402
from microfloat.recipes import RECIPES, DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling  # noqa: E402

NEAREST = NVFP4BlockScaling(disable_stochastic_rounding=True)


def quantized_layer(recipe, **options) -> mf.Linear:
    torch.manual_seed(0)
    with mf.quantized_model_init(recipe=recipe, **options):
        return mf.Linear(64, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", RECIPES)
def test_parameter_is_quantized_and_the_layer_computes_the_same(name: str) -> None:
    recipe = RECIPES[name]()
    layer = quantized_layer(recipe, preserve_high_precision_init_val=True)
    assert isinstance(layer.weight, mf.QuantizedTensor)
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.dtype == torch.bfloat16
    original = layer.weight.get_high_precision_init_val()
    assert original.dtype == torch.bfloat16
    assert original.device.type == "cpu"
    dense = mf.Linear(64, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        dense.weight.copy_(original)
        dense.bias.copy_(layer.bias)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    if name != "delayed":  # its dense twin would start at scale 1
        results = []
        for module in (layer, dense):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(1)
            with mf.autocast(recipe=recipe):
                y = module(leaf)
            y.float().square().sum().backward()
            results.append((y, module.weight.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None


def test_memory_is_that_of_the_codes() -> None:
    layer = quantized_layer(MXFP8BlockScaling())
    parts = layer.weight.parts().values()
    assert sum(part.numel() * part.element_size() for part in parts) == 64 * 32 + 64 * 32 // 32
    assert layer.weight.get_high_precision_init_val() is None


# Steps must be larger than the distance of neighbouring codes, or they round away.
@pytest.mark.slow_cases("further optimizers", all_but=("AdamW-*",))
@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.SGD, 5.0), (torch.optim.AdamW, 0.05)])
def test_training_lowers_the_loss(optimizer, lr: float) -> None:
    layer = quantized_layer(MXFP8BlockScaling())
    layer.float()
    stepper = optimizer(layer.parameters(), lr=lr)
    x = torch.randn(64, 64)
    target = x @ torch.randn(64, 32) / 8
    losses = []
    for _ in range(40):
        with mf.autocast(recipe=MXFP8BlockScaling()):
            loss = (layer(x) - target).square().mean()
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert isinstance(layer.weight, mf.QuantizedTensor)


def test_outside_an_autocast_it_runs_in_high_precision() -> None:
    layer = quantized_layer(NEAREST)
    x = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    values = layer.weight.dequantize(torch.bfloat16)
    expected = torch.nn.functional.linear(x.float(), values.float(), layer.bias.float()).to(torch.bfloat16)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert layer.weight.grad.shape == (32, 64)


def test_state_dict_deepcopy_and_plain_state_dict() -> None:
    layer = quantized_layer(MXFP8BlockScaling())
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = quantized_layer(MXFP8BlockScaling())
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other.weight, layer.weight)
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)
    plain = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    plain.load_state_dict(mf.plain_state_dict(layer))
    assert torch.equal(plain.weight, layer.weight.dequantize())
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer.weight.dequantize(), plain.weight)


def test_nesting_disabling_and_bad_arguments() -> None:
    with mf.quantized_model_init(recipe=DelayedScaling()), mf.quantized_model_init(enabled=False):
        assert not isinstance(mf.Linear(8, 8).weight, mf.QuantizedTensor)
    with pytest.raises(InvalidTypeError, match="recipe"):
        mf.quantized_model_init(recipe=3)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("rows", "features", "outputs"), [(0, 32, 16), (4, 0, 16), (4, 32, 0)])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_a_stored_weight_has_a_gradient_without_elements_to_multiply(rows, features, outputs, recipe) -> None:
    with mf.quantized_model_init(recipe="mxfp8"):
        layer = mf.Linear(features, outputs).pin(recipe)
    layer.bias = torch.nn.Parameter(layer.bias.detach().bfloat16())
    x = torch.randn(rows, features, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert layer.weight.grad.shape == layer.weight.shape
    assert not layer.weight.grad.any()
    assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, rows))


MOVES = {
    "device": lambda layer: layer.to("cpu"),
    "half": lambda layer: layer.half(),
    "shared memory": lambda layer: layer.share_memory(),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
def test_attributes_of_a_parameter_stay_when_the_layer_moves(recipe, move) -> None:
    layer = quantized_layer(recipe, preserve_high_precision_init_val=True)
    layer.weight.main_grad = torch.zeros(32, 64)
    original, main_grad = layer.weight.get_high_precision_init_val(), layer.weight.main_grad
    MOVES[move](layer)
    assert isinstance(layer.weight, mf.QuantizedTensor)
    assert layer.weight.get_high_precision_init_val() is original
    assert layer.weight.main_grad is main_grad
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None


def test_the_copy_of_initial_values_is_that_of_the_latest_draw() -> None:
    """Also of a layer from the meta device, whose first values are drawn by `reset_parameters`."""
    with mf.quantized_model_init(recipe="nvfp4", preserve_high_precision_init_val=True):
        layer = mf.Linear(32, 48)
        with torch.device("meta"):
            empty = mf.Linear(32, 48)
    assert empty.weight.get_high_precision_init_val() is None
    empty.to_empty(device="cpu")
    for one in (layer, empty):
        one.reset_parameters()
        drawn = one.weight.get_high_precision_init_val()
        assert torch.equal(mf.quantize(drawn, one.weight.cast), one.weight.detach())
        one.weight.clear_high_precision_init_val()
        one.reset_parameters()
        assert one.weight.get_high_precision_init_val() is None
