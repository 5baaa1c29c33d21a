"""torch's split of a backward into gradients of inputs and gradients of weights, for zero-bubble pipelines."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.distributed.pipelining import _backward as pipelines  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.torch.linear.schedule import Schedule  # noqa: E402

MAKES = {
    "linear": lambda **o: mf.Linear(32, 48, **o),
    "joint": lambda **o: mf.LayerNormLinear(32, 48, split={"q": 32, "k": 16}, **o),
    "mlp": lambda **o: mf.LayerNormMLP(32, 48, activation="swiglu", recompute=True, **o),
    "layer": lambda **o: mf.TransformerLayer(32, 48, 4, 2, **o),
    "experts": lambda **o: mf.GroupedLinear(3, 32, 48, bias=True, **o),
}


def loss_of(module, x):
    y = module(x.flatten(0, 1), [4, 0, 6]) if isinstance(module, mf.GroupedLinear) else module(x)
    return y.square().sum()


def by_stages(module, x):
    """As `torch.distributed.pipelining` runs the two halves."""
    (dx,), groups = pipelines.stage_backward_input([loss_of(module, x)], None, [x], module.parameters())
    pipelines.stage_backward_weight(module.parameters(), groups)
    return dx


def by_autograd(module, x):
    loss = loss_of(module, x)
    (dx,) = torch.autograd.grad(loss, [x], retain_graph=True)
    loss.backward(inputs=list(module.parameters()))
    return dx


def at_once(module, x):
    loss_of(module, x).backward()
    return x.grad


def gradients(kind, recipe, way):
    """dx of two microbatches, every parameter's gradient, and the histories of delayed scaling."""
    torch.manual_seed(0)
    module = MAKES[kind](recipe=recipe)
    dxs = [way(module, x.clone().requires_grad_()) for x in torch.randn(2, 2, 5, 32)]
    return [*dxs, *(one.grad for one in module.parameters()), *module.buffers()]


@pytest.mark.slow_cases("further recipes of a checked kind", all_but=("layer-nvfp4-*", "mlp-delayed-*", "linear-*"))
@pytest.mark.parametrize("way", [by_stages, by_autograd])
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("linear", "delayed"), ("linear", "nvfp4"), ("linear", None), ("joint", "mxfp8"), ("mlp", "mxfp8"),
        ("mlp", "delayed"), ("layer", "fp8_current"), ("layer", "nvfp4"), ("experts", "mxfp8"), ("experts", "delayed"),
    ],
)  # fmt: skip
def test_both_halves_give_the_bits_of_one_backward(kind, recipe, way):
    wanted = gradients(kind, recipe, at_once)
    assert any(one.any() for one in wanted)
    for whole, split in zip(wanted, gradients(kind, recipe, way), strict=True):
        assert torch.equal(whole, split)


@pytest.mark.parametrize("kind", ["linear", "joint", "mlp"])
def test_the_first_half_multiplies_no_weight_gradient(kind, monkeypatch):
    made, gradients = [], Schedule.gradients

    def counted(self, dy, saved, wants_dx, wants_dw, into=None):
        made.append((wants_dx, wants_dw))
        return gradients(self, dy, saved, wants_dx, wants_dw, into)

    monkeypatch.setattr(Schedule, "gradients", counted)
    module, x = MAKES[kind](recipe="mxfp8"), torch.randn(2, 5, 32, requires_grad=True)
    loss = loss_of(module, x)
    torch.autograd.grad(loss, [x], retain_graph=True)
    assert set(made) == {(True, False)}
    made.clear()
    last = module.down_proj if kind == "mlp" else module.q if kind == "joint" else module
    torch.autograd.grad(loss, [last.weight])
    assert made == [(False, True)]


def test_main_grad_is_added_to_once():
    layer, x = mf.Linear(32, 48, recipe="mxfp8", fuse_wgrad_accumulation=True), torch.ones(8, 32, requires_grad=True)
    layer.weight.main_grad = torch.ones_like(layer.weight)
    loss = layer(x).sum()
    torch.autograd.grad(loss, [x], retain_graph=True)
    assert (layer.weight.main_grad == 1).all()
    loss.backward(inputs=[layer.weight])
    assert (layer.weight.main_grad == 9).all()


def test_a_stored_weight_gets_its_gradient_in_the_second_half():
    with mf.quantized_model_init(recipe="mxfp8"):
        layer = mf.Linear(32, 48, recipe="mxfp8")
    by_stages(layer, torch.ones(8, 32, requires_grad=True))
    assert layer.weight.grad.any()
