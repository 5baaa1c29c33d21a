"""Functions of torch over a quantized weight: the bits and gradients of `mf.Linear`, and errors for the rest."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat import Cast, Hadamard  # noqa: E402
from microfloat.errors import InvalidTypeError, NotSupportedError  # noqa: E402
from microfloat.formats import NVFP4  # noqa: E402

FORMATS = ["mxfp8", "nvfp4", "fp8_row", "fp8_128x128"]
OURS = r"QuantizedTensor \(mxfp8\)"


def _layer(fmt="mxfp8", shape=(40, 70), requires_grad=False):
    torch.manual_seed(0)
    layer = mf.Linear(shape[1], shape[0])
    layer.weight = nn.Parameter(mf.quantize(torch.randn(shape), fmt), requires_grad=requires_grad)
    return layer


def _with_gradients(call, x, *more):
    x = x.clone().requires_grad_()
    y = call(x)
    return (y.detach(), *torch.autograd.grad(y.square().sum(), (x, *more)))


CALLS = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "x @ w.T": lambda x, w, b: x @ w.T + b,
    "matmul": lambda x, w, b: torch.matmul(x, w.t()) + b,
    "w @ z": lambda x, w, b: (w @ x.mT).mT + b,
    "w.matmul": lambda x, w, b: w.matmul(x.mT).mT + b,
    "addmm": lambda x, w, b: torch.addmm(b, x.reshape(-1, x.shape[-1]), w.t()).view(*x.shape[:-1], -1),
    "addmm of a tensor": lambda x, w, b: b.addmm(x.reshape(-1, x.shape[-1]), w.t()).view(*x.shape[:-1], -1),
    "mm": lambda x, w, b: torch.stack([w.mm(one.t()).t() for one in x]) + b,
    "mv": lambda x, w, b: torch.stack([torch.stack([w.mv(row) for row in one]) for one in x]) + b,
}


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("fmt", FORMATS)
def test_products_are_those_of_a_layer(name, fmt):
    layer, x = _layer(fmt), torch.randn(2, 3, 70)
    want = _with_gradients(layer, x, layer.bias)
    got = _with_gradients(lambda one: CALLS[name](one, layer.weight, layer.bias), x, layer.bias)
    if name in ("linear", "addmm", "addmm of a tensor"):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for a, b in zip(got, want, strict=True):  # sums of fewer rows, or with the bias added afterwards
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", None])
def test_a_plain_layer_follows_the_autocast_as_ours_does(recipe):
    layer, x = _layer(requires_grad=True), torch.randn(6, 70)
    plain = nn.Linear(70, 40)
    plain.weight, plain.bias = layer.weight, layer.bias
    results = []
    for one in (layer, plain):
        torch.manual_seed(1)
        with mf.autocast(recipe=recipe) if recipe else mf.autocast(enabled=False):
            results.append(_with_gradients(one, x, layer.weight, layer.bias))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with mf.autocast(recipe="delayed"), pytest.raises(NotSupportedError, match="delayed scaling"):
        plain(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain(x), layer(x))
        assert plain(x).dtype == torch.bfloat16
    # A copy and a state dict of the plain layer hold codes, as ours do.
    assert torch.equal(copy.deepcopy(plain)(x), layer(x))


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_products_are_those_of_eager_mode(backend):
    layer, x = _layer(), torch.randn(4, 70)
    plain = nn.Linear(70, 40)
    plain.weight, plain.bias = layer.weight, layer.bias
    compiled = torch.compile(lambda one: (plain(one), layer.weight @ one.mT), backend=backend, fullgraph=True)
    got, turned = compiled(x)
    assert torch.equal(got, layer(x))
    torch.testing.assert_close(turned.mT + layer.bias, got)
    dx = _with_gradients(lambda one: compiled(one)[0], x)[1]
    assert torch.equal(dx, _with_gradients(layer, x)[1])
    with mf.autocast(recipe="mxfp8"), pytest.raises(NotSupportedError, match="compiled code"):
        compiled(x)
    torch._dynamo.reset()
    with (
        mf.autocast(recipe="mxfp8"),
        pytest.raises(Exception, match="product with a quantized weight under an autocast"),
    ):
        compiled(x)


def test_products_along_another_axis_are_refused():
    layer, x = _layer(), torch.randn(4, 40)
    w = layer.weight
    for call in (
        lambda: x @ w, lambda: torch.mm(x, w), lambda: w.t() @ x.mT, lambda: torch.bmm(x[None], w[None]),
        lambda: torch.addmm(torch.zeros(40), torch.randn(4, 70), w.t(), alpha=2.0),
        lambda: torch.mm(torch.randn(4, 70), w.t(), out=torch.empty(4, 40)),
    ):  # fmt: skip
        with pytest.raises(InvalidTypeError, match=OURS):
            call()
    for call in (lambda: w + 1, lambda: torch.exp(w), lambda: F.relu(w), lambda: F.linear(w, torch.randn(3, 70))):
        with pytest.raises(InvalidTypeError, match=OURS):
            call()
    turned = mf.quantize(torch.randn(40, 64), Cast(NVFP4, hadamard=Hadamard(16, 0)))
    with pytest.raises(InvalidTypeError, match="nvfp4"):
        F.linear(torch.randn(2, 64), turned)


@pytest.mark.slow_cases("further recipes of a checked kind", all_but=("nvfp4", "fp8_row"))
@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "fp8_row", "fp8_tensor", "mxfp6_e3m2"])
def test_rows_of_a_quantized_embedding(fmt):
    torch.manual_seed(0)
    plain = nn.Embedding(20, 48, padding_idx=3)
    stored = copy.deepcopy(plain)
    stored.weight = nn.Parameter(mf.quantize(plain.weight.detach(), fmt))
    values = stored.weight.detach().dequantize()
    ids = torch.tensor([[1, 3, 19], [7, 1, 0]])
    assert torch.equal(stored(ids), values[ids])
    (got,) = torch.autograd.grad(stored(ids).square().sum(), stored.weight)
    plain.weight.data.copy_(values)
    (want,) = torch.autograd.grad(plain(ids).square().sum(), plain.weight)
    torch.testing.assert_close(got, want)
    assert torch.equal(torch.compile(stored, backend="aot_eager", fullgraph=True)(ids), values[ids])
    with pytest.raises(InvalidTypeError, match="embedding"):
        F.embedding(ids, stored.weight, max_norm=1.0)
