"""A training loop around the layers: offload, gradient scaling, clipping, adapters, changes of recipe in mid-run."""

import contextlib
import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, parametrize  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import CheckpointError, MicrofloatError, NotSupportedError  # noqa: E402
from microfloat.recipes import RECIPES, DelayedScaling, Placement, from_name  # noqa: E402

every_recipe = pytest.mark.parametrize("name", RECIPES)


def make(recipe="mxfp8", **options) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, **options), nn.GELU(), nn.Linear(96, 32, **options))
    if recipe is not None:
        mf.convert(model, recipe, exclude=())
    return model


def batch(rows=16, dtype=torch.float32, seed=2) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(model, x=None, context=None):
    model.zero_grad()
    torch.manual_seed(3)
    with context or contextlib.nullcontext():
        y = model(batch() if x is None else x)
    y.float().square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


# ---- features S9: offload


@every_recipe
def test_the_codes_of_activations_travel_and_no_wide_copy(name) -> None:
    """Saved-tensor hooks see all that a layer keeps, codes and scales; through them the bits are the same."""
    recipe, x = from_name(name), batch(128, torch.bfloat16)
    layer = mf.Linear(64, 96, dtype=torch.bfloat16, recipe=recipe)
    twin, seen = copy.deepcopy(layer), []

    def pack(tensor):
        seen.append(tensor)
        return tensor.clone()

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.clone()):
        y = layer(x)
    y.square().sum().backward()
    torch.manual_seed(3)
    twin(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, twin.weight.grad)
    assert all(tensor.element_size() == 1 or tensor.dtype == torch.float32 for tensor in seen)
    assert sum(tensor.nbytes for tensor in seen) < 0.6 * x.nbytes
    torch.manual_seed(3)
    with torch.autograd.graph.save_on_cpu():
        y = twin(x)
    twin.zero_grad()
    y.square().sum().backward()
    assert torch.equal(twin.weight.grad, layer.weight.grad) or recipe.is_delayed


# ---- features S11: GradScaler, clipping, anomaly mode, double backward


@every_recipe
def test_a_grad_scaler_skips_the_step_that_overflows(name) -> None:
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, factors = torch.amp.GradScaler("cpu", init_scale=2.0**8), []
    for grows in (False, True, False):
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), mf.autocast(recipe=name):
            loss = model(batch()).float().square().mean()
        scaler.scale(loss * (1e38 if grows else 1.0)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        factors.append(scaler.get_scale())
        assert bool(torch.isfinite(norm)) is not grows
        assert torch.equal(model[0].weight, before) is grows
    assert factors == [2.0**8, 2.0**7, 2.0**7]


@every_recipe
def test_anomaly_mode_names_the_layer_and_changes_nothing(name) -> None:
    model = make(name)
    expected = gradients(copy.deepcopy(model))
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))


def test_a_double_backward_is_refused_with_the_name_of_the_layer() -> None:
    model, x = make(), batch().requires_grad_()
    with pytest.raises(NotSupportedError, match=r"create_graph=True .*enabled=False\). \(In the layer '2'.\)"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with mf.autocast(enabled=False):
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad.any()


# ---- features M12: deferred initialisation


@every_recipe
def test_a_model_on_the_meta_device_is_filled_and_trained(name) -> None:
    model = make(name, device="meta")
    assert model(batch().to("meta")).shape == (16, 32)
    model.to_empty(device="cpu")
    for layer in (model[0], model[2]):
        torch.manual_seed(5)
        layer.reset_parameters()
        twin = nn.Linear(layer.in_features, layer.out_features, device="meta").to_empty(device="cpu")
        torch.manual_seed(5)
        twin.reset_parameters()
        assert torch.equal(layer.weight, twin.weight)
        assert all(bool((layer.get_buffer(key) == ("scale" in key[-5:])).all()) for key in dict(layer.named_buffers()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(model))


# ---- features M17: adapters, weight norm, parametrizations, tied weights


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "delayed"])
def test_adapters_train_beside_a_frozen_low_precision_layer(order, name) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 96), nn.Linear(96, 32)]
    if order == "before":
        layers = [mf.convert(nn.ModuleList([one]), name) and one for one in layers]
    model = nn.Sequential(*(LoRA(one) for one in layers))
    report = mf.convert(model, name)
    assert report.converted == ["0.base_layer", "1.base_layer"]
    assert "lora_" in report.skipped["0.lora_A"]
    with torch.no_grad():
        model[1].lora_B.weight.normal_()
    model(batch()).square().mean().backward()
    assert all((parameter.grad is not None) is ("lora" in key) for key, parameter in model.named_parameters())
    saved = model[0].base_layer.schedule(batch().requires_grad_()).products
    assert list(saved) == ["fprop", "dgrad"]  # no wgrad, so nothing of x is kept


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", ["weight_norm", "orthogonal", "own"])
def test_a_computed_weight_gets_its_gradient(kind, order) -> None:
    """The weight that a parametrization computes is quantized in every call; its gradient reaches the originals."""

    class Halved(nn.Module):
        def forward(self, weight):
            return weight / 2

    def parametrized(layer):
        if kind == "own":
            return parametrize.register_parametrization(layer, "weight", Halved())
        return getattr(parametrizations, kind)(layer)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32))
    if order == "before":
        parametrized(model[0])
    assert mf.convert(model, "mxfp8").converted == ["0"]
    if order == "after":
        parametrized(model[0])
    weight = model[0].weight.detach()
    expected = mf.linear(batch(), weight, model[0].bias, recipe="mxfp8")
    y = model(batch())
    assert torch.equal(y, expected)
    y.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    mf.revert(model)
    assert torch.equal(model(batch()), nn.functional.linear(batch(), weight, model[0].bias))
    assert parametrize.is_parametrized(model[0])


def test_tied_layers_stay_tied_and_sum_their_gradients() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(96, 64), "head": nn.Linear(64, 96, bias=False)})
    model["head"].weight = model["embedding"].weight
    mf.convert(model, "mxfp8", exclude=())
    assert model["head"].weight is model["embedding"].weight
    model["head"](model["embedding"](torch.arange(8))).square().mean().backward()
    total = model["head"].weight.grad.clone()
    model.zero_grad()
    model["head"](model["embedding"](torch.arange(8)).detach()).square().mean().backward()
    assert not torch.equal(total, model["head"].weight.grad)


# ---- features S10: another recipe in mid-run


def test_a_recipe_changes_in_mid_run_and_the_optimizer_goes_on() -> None:
    """By convert, Placement, None, an autocast and revert; parameters and the optimizer's state stay."""
    model = make("nvfp4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parameters = list(model.parameters())
    changes = [
        lambda: None,
        lambda: mf.convert(model, "mxfp8", exclude=()),
        lambda: mf.convert(model, Placement([("2", None), ("0:wgrad", None)]), exclude=()),
        lambda: mf.convert(model, DelayedScaling(amax_history_len=2), exclude=()),
        lambda: mf.revert(model),
    ]
    losses = []
    for steps, change in enumerate(changes, start=1):
        change()
        gradients(model)
        losses.append(float(model(batch()).detach().square().mean()))
        optimizer.step()
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert all(float(optimizer.state[parameter]["step"]) == steps for parameter in parameters)
    assert losses[-1] < losses[0]
    assert type(model[0]) is nn.Linear
    assert not dict(model.named_buffers())


# ---- bad input of a training loop


@every_recipe
def test_one_module_under_two_recipes_in_one_step(name) -> None:
    """Each call runs its own recipe, forward and backward, and each recipe's state moves by itself."""
    torch.manual_seed(0)
    layer = mf.Linear(64, 96)
    x, y = batch(seed=4), batch(seed=5)
    sums = []
    for single, value in ((name, x), ("mxfp8", y)):
        twin = copy.deepcopy(layer)
        with mf.autocast(recipe=single):
            torch.manual_seed(3)
            out = twin(value)
        out.square().mean().backward()
        sums.append(twin.weight.grad)
    with mf.autocast(recipe=name):
        torch.manual_seed(3)
        first = layer(x)
    with mf.autocast(recipe="mxfp8"):
        torch.manual_seed(3)
        second = layer(y)
    (first.square().mean() + second.square().mean()).backward()
    torch.testing.assert_close(layer.weight.grad, sums[0] + sums[1])


@every_recipe
def test_an_autocast_that_ends_before_backward_serves_it(name) -> None:
    inside, outside = make(None), make(None)
    for model in (inside, outside):
        mf.convert(model, name, exclude=())
        for layer in (model[0], model[2]):
            layer.unpin()
    torch.manual_seed(3)
    with mf.autocast(recipe=name):
        y = inside(batch())
        y.square().mean().backward()
    torch.manual_seed(3)
    with mf.autocast(recipe=name):
        y = outside(batch())
    with mf.autocast(recipe="mxfp4"), mf.autocast(enabled=False):
        y.square().mean().backward()
    pairs = zip(inside.parameters(), outside.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@every_recipe
def test_shapes_that_change_between_microbatches(name) -> None:
    """Kept weights serve any rows; the gradients are the sum of the microbatches."""
    model, total = make(name), None
    for index, rows in enumerate((16, 7, 1, 33)):
        model.zero_grad()
        torch.manual_seed(3)
        for layer in (model[0], model[2]):
            layer.forward = (lambda one, first: lambda x: type(one).forward(one, x, is_first_microbatch=first))(
                layer, index == 0
            )
        model(batch(rows)).square().mean().backward()
        found = [parameter.grad for parameter in model.parameters()]
        total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
        for layer in (model[0], model[2]):
            del layer.forward
    assert all(bool(one.isfinite().all()) for one in total)


@pytest.mark.parametrize("x", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight", [torch.float16, torch.bfloat16, torch.float32])
def test_mixed_dtypes(x, weight) -> None:
    """y in x's dtype, dx in x's, dw in the weight's, db in the bias's; float64 and integers are named."""
    layer = mf.Linear(64, 32, dtype=weight, recipe="mxfp8")
    value = batch(dtype=x).requires_grad_()
    y = layer(value)
    y.backward(torch.ones_like(y))
    assert (y.dtype, value.grad.dtype, layer.weight.grad.dtype) == (x, x, weight)
    for wrong in (torch.float64, torch.int64):
        with pytest.raises(MicrofloatError, match=f"x: got {wrong}"):
            layer(batch().to(wrong))


@pytest.mark.parametrize("what", ["missing", "extra", "older", "none", "another layer"])
def test_scaling_state_of_a_checkpoint_that_does_not_fit(what) -> None:
    """Missing and strange entries are named; state for a recipe without any, and none at all, are fine."""
    model = make(DelayedScaling(amax_history_len=4))
    gradients(model)
    state, target = model.state_dict(), make(DelayedScaling(amax_history_len=4))
    if what == "missing":
        del state["0.scaling_w_scale"]
        with pytest.raises(CheckpointError, match=r"'0\.' without \['scaling_w_scale'\]"):
            target.load_state_dict(state)
    elif what == "extra":
        target = make("mxfp8")
        target.load_state_dict(state)
        assert not dict(target.named_buffers())
    elif what == "older":  # of a run with another history
        target = make(DelayedScaling(amax_history_len=8))
        target.load_state_dict(state)
        assert torch.equal(target[0].scaling_x_scale, model[0].scaling_x_scale)
        gradients(target)
        assert target[0].scaling_x_amax_history.shape == (8,)
    elif what == "none":
        with pytest.warns(UserWarning, match="no delayed-scaling state; it starts fresh"):
            target.load_state_dict(make(None).state_dict())
    else:
        state["1.scaling_x_scale"] = torch.ones(())
        with pytest.raises(RuntimeError, match=r"Unexpected key.*1\.scaling_x_scale"):
            target.load_state_dict(state)
