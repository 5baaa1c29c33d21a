"""Norms and activations fused with Linears: the same bits as in parts, the memory they save, errors that name a fix."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import microfloat.torch as mf
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from microfloat.recipes import CustomRecipe, Gemm, from_name
from microfloat.torch.launch.prologues import ActivationGradient
from microfloat.torch.nn import functional as fused
from tests.torch.nn import fused_cases
from tests.torch.nn.fused_cases import RECIPES, Mlp, check

BF16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize("name", list(RECIPES))
def test_an_mlp_has_the_bits_of_its_parts(name):
    check("cpu", "reference", name)


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("gated", "activation"), [(True, "gelu_tanh"), (False, "gelu"), (False, "relu")])
def test_every_kind_of_mlp(name, kind, gated, activation):
    check("cpu", "reference", name, kind, gated, bias=True, activation=activation)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("backend", ["triton", "native"])
def test_on_a_gpu(name, backend):
    check("cuda", backend, name)


@pytest.mark.parametrize("name", ["fp8_current", "nvfp4"])
def test_modules_one_by_one_give_the_same_but_for_the_gradients_of_a_norm(name):
    torch.manual_seed(0)
    model = Mlp("rms", True, False, from_name(name), "reference", "cpu")
    x = torch.randn(2, 20, fused_cases.WIDTH).bfloat16()
    results, linears = [], []
    for run in (
        lambda x: model.fused(x, "silu"),
        lambda x: model.down(F.silu(model.gate(model.norm(x))) * model.up(model.norm(x))),
    ):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        torch.manual_seed(1)
        y = run(leaf)
        y.sum().backward()
        results.append([y.detach(), leaf.grad, *(parameter.grad for parameter in model.parameters())])
        linears.append([layer.weight.grad for layer in (model.gate, model.up, model.down)])
    assert results[0][0].shape == (2, 20, fused_cases.OUT)
    assert torch.equal(results[0][0], results[1][0])
    for got, want in zip(*linears, strict=True):
        assert torch.equal(got, want)
    for got, want in zip(*results, strict=True):
        # Gradients of a norm are rounded to bfloat16 at other places: three roundings of 2^-9 at most.
        assert float((got.float() - want.float()).norm() / want.float().norm()) < 3 * 2.0**-8


def test_several_linears_after_one_norm():
    torch.manual_seed(0)
    norm = nn.RMSNorm(32, **BF16)
    layers = [mf.Linear(32, n, **BF16, recipe="mxfp8", backend="reference") for n in (16, 24, 8)]
    x = torch.randn(10, 32).bfloat16().requires_grad_()
    outputs = fused.norm_linear(x, norm, *layers)
    assert [tuple(y.shape) for y in outputs] == [(10, 16), (10, 24), (10, 8)]
    for y, layer in zip(outputs, layers, strict=True):
        assert torch.equal(y, layer(norm(x)))
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert not fused.norm_linear(x.detach().requires_grad_(), norm, layers[0]).isnan().any()


def test_layers_of_different_recipes_read_codes_of_their_own():
    torch.manual_seed(0)
    norm = nn.LayerNorm(32, **BF16)
    layers = [mf.Linear(32, 16, **BF16, recipe=name, backend="reference") for name in ("mxfp8", "fp8_current", "nvfp4")]
    x = torch.randn(10, 32).bfloat16()
    torch.manual_seed(1)
    outputs = fused.norm_linear(x, norm, *layers)
    torch.manual_seed(1)
    for y, layer in zip(outputs, layers, strict=True):
        assert torch.equal(y, layer(norm(x)))


def test_in_high_precision_the_modules_run():
    norm, layer = nn.RMSNorm(16), mf.Linear(16, 8)
    x = torch.randn(4, 16)
    assert torch.equal(fused.norm_linear(x, norm, layer), layer(norm(x)))
    assert torch.equal(fused.activation_linear(x, layer, activation="gelu"), layer(F.gelu(x)))
    with mf.autocast(enabled=False):
        pinned = mf.Linear(16, 8, recipe="mxfp8")
        assert torch.equal(fused.norm_linear(x, norm, pinned), F.linear(norm(x), pinned.weight, pinned.bias))


def test_a_recipe_that_quantizes_nothing_gives_the_bits_of_high_precision():
    """The gradients of norms too, which the fused modules round otherwise than torch does."""
    recipe = CustomRecipe(Gemm(None, None), Gemm(None, None), Gemm(None, None))
    torch.manual_seed(0)
    layer, x, found = mf.TransformerLayer(32, 64, 2, normalization="LayerNorm", bias=True), torch.randn(2, 16, 32), []
    for enabled in (False, True):
        layer.zero_grad()
        with mf.autocast(enabled=enabled, recipe=recipe):
            y = layer(x)
        y.square().sum().backward()
        found.append([y, *[parameter.grad for parameter in layer.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_under_torch_autocast_the_value_is_cast_once():
    torch.manual_seed(0)
    norm, layer = nn.RMSNorm(32), mf.Linear(32, 16, recipe="mxfp8", backend="reference")
    x = torch.randn(8, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = fused.norm_linear(x, norm, layer), layer(norm(x))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
    got.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_under_torch_autocast_the_gradient_of_an_activation_has_its_dtype():
    torch.manual_seed(0)
    recipe = {"recipe": "fp8_row", "backend": "reference"}
    norm, gate, down = nn.RMSNorm(32), mf.Linear(32, 48, **recipe), mf.Linear(48, 16, **recipe)
    x = torch.randn(8, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = fused.norm_mlp(x, norm, gate, down, activation="relu"), down(gate(norm(x)).relu())
    assert torch.equal(got, want)
    tensors = [gate.weight, gate.bias, down.weight, down.bias]
    for one, other in zip(*(torch.autograd.grad(y.sum(), tensors) for y in (got, want)), strict=True):
        assert torch.equal(one, other)


def test_no_value_is_kept_for_backward():
    """Of the normed x and of the activation nothing is saved: their codes are made again of x, gate and up."""
    model = Mlp("rms", True, False, from_name("fp8_current"), "reference", "cpu")
    x = torch.randn(64, fused_cases.WIDTH).bfloat16().requires_grad_()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: sizes.append((tuple(tensor.shape), tensor.element_size())) or tensor, lambda tensor: tensor
    ):
        model.fused(x, "silu")
    width, hidden = fused_cases.WIDTH, fused_cases.HIDDEN
    of_tokens = [(shape, size) for shape, size in sizes if 64 in shape and len(shape) == 2]
    assert sorted(of_tokens) == sorted([((64, width), 2), *[((64, hidden), 2)] * 2]), "x, gate and up"


def test_frozen_parts_get_no_gradient():
    model = Mlp("rms", True, False, from_name("mxfp8"), "reference", "cpu")
    model.gate.weight.requires_grad_(False)
    model.norm.weight.requires_grad_(False)
    x = torch.randn(16, fused_cases.WIDTH).bfloat16()
    model.fused(x, "silu").sum().backward()
    assert model.gate.weight.grad is None
    assert model.norm.weight.grad is None
    assert model.up.weight.grad is not None
    with torch.no_grad():
        assert not model.fused(x, "silu").requires_grad


def test_recomputed_and_repeated_backwards():
    torch.manual_seed(0)
    model = Mlp("rms", True, False, from_name("delayed"), "reference", "cpu")
    twin = copy.deepcopy(model)
    x = torch.randn(16, fused_cases.WIDTH).bfloat16()
    with mf.autocast():
        mf.checkpoint(model.fused, x.requires_grad_(), "silu").sum().backward()
        y = twin.fused(x, "silu")
    first = [parameter.grad for parameter in model.parameters()]
    y.sum().backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in twin.parameters()]
    for got, want in zip(first, once, strict=True):
        assert torch.equal(got, want)
    y.sum().backward()
    for parameter, want in zip(twin.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, want + want)


def test_what_follows_may_work_in_place():
    model = Mlp("rms", True, False, from_name("mxfp8"), "reference", "cpu")
    x = torch.randn(2, 8, fused_cases.WIDTH).bfloat16().requires_grad_()
    y = model.fused(x, "silu")
    want = y.detach() * 2
    y.mul_(2)
    y.sum().backward()
    assert torch.equal(y.detach(), want)
    hidden = fused.norm_linear(x, model.norm, model.gate)
    hidden.relu_().sum().backward()


def test_a_double_backward_is_refused():
    layer, norm = mf.Linear(16, 8, recipe="mxfp8", backend="reference"), nn.RMSNorm(16)
    x = torch.randn(4, 16, requires_grad=True)
    (dx,) = torch.autograd.grad(fused.norm_linear(x, norm, layer).sum(), x, create_graph=False)
    assert dx.shape == x.shape
    with pytest.raises(NotSupportedError, match="double backward"):
        torch.autograd.grad(fused.activation_linear(x, layer).sum(), x, create_graph=True)


# What Dynamo itself does under torch 2.13.
@pytest.mark.slow("further programs of a checked kind")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["mxfp8", "delayed"])
def test_compiled_code_runs_the_modules(name):
    torch.manual_seed(0)
    model = Mlp("rms", True, False, from_name(name), "reference", "cpu")
    x = torch.randn(16, fused_cases.WIDTH).bfloat16()
    with mf.autocast():
        want = model.down(F.silu(model.gate(model.norm(x))) * model.up(model.norm(x)))
    compiled = torch.compile(lambda x: model.fused(x, "silu"), fullgraph=True, backend="aot_eager")
    with mf.autocast():
        got = compiled(x)
    got, want = got.detach().float(), want.detach().float()
    assert float((got - want).norm() / want.norm()) < 0.1  # delayed scales have moved on


# --------------------------------------------------------------------------------------------------------- gradients


GRADIENTS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(), "sigmoid": torch.sigmoid, "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
}  # fmt: skip


@pytest.mark.parametrize("activation", GRADIENTS)
def test_the_gradient_is_that_of_the_activation(activation):
    draws = torch.Generator().manual_seed(2)
    dy, x, up = (torch.randn(16, 32, generator=draws, dtype=torch.float32) for _ in range(3))
    leaves = x.clone().requires_grad_(), up.clone().requires_grad_()
    wanted = torch.autograd.grad(GRADIENTS[activation](leaves[0]) * leaves[1], leaves, dy)
    made, _ = ActivationGradient(dy, x, up, activation).by_torch()
    for got, want in zip(made, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    (alone,), _ = ActivationGradient(dy, x, None, activation).by_torch()
    (want,) = torch.autograd.grad(GRADIENTS[activation](leaves[0]), leaves[:1], dy)
    torch.testing.assert_close(alone, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x, n, m: fused.norm_linear(x, n), InvalidValueError, "layers"),
        (lambda x, n, m: fused.norm_linear(x, n, nn.Linear(16, 8)), InvalidTypeError, "convert"),
        (lambda x, n, m: fused.norm_linear(x, nn.BatchNorm1d(16), m), InvalidTypeError, "RMSNorm"),
        (lambda x, n, m: fused.norm_linear(x, nn.RMSNorm(8), m), InvalidValueError, "last dimension"),
        (lambda x, n, m: fused.norm_linear(x[:, :8], nn.RMSNorm(8), m), InvalidValueError, "in_features"),
        (lambda x, n, m: fused.activation_linear(x, m, activation="swish"), InvalidValueError, "silu"),
        (lambda x, n, m: fused.activation_linear(x, m, up=x[:2]), InvalidValueError, "up"),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call(torch.randn(4, 16), nn.RMSNorm(16), mf.Linear(16, 8, recipe="mxfp8", backend="reference"))
