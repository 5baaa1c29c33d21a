"""Arguments that cannot work raise errors of ours that name the argument; unusual ones that can, give right answers."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError  # noqa: E402
from microfloat.recipes import Cast, Delayed, DelayedScaling, Hadamard  # noqa: E402
from microfloat.torch.nn import functional as fused  # noqa: E402

X, W = torch.randn(4, 32), torch.ones(32)
DELAYED = Cast("fp8_tensor", scaling=Delayed())


def layer(features=32, out=16):
    return mf.Linear(features, out, recipe="mxfp8")


BAD = {
    "scalar": (lambda: fused.norm_linear(torch.tensor(1.0), nn.RMSNorm(32), layer()), InvalidValueError, "^x: "),
    "float64": (lambda: mf.quantize(X.double(), "mxfp8"), InvalidTypeError, "^x: .*x.to"),
    "sparse": (lambda: fused.norm_linear(X.to_sparse(), nn.RMSNorm(32), layer()), InvalidTypeError, "^x: .*x.to_dense"),
    "quantized": (lambda: mf.quantize(mf.quantize(X, "mxfp8"), "mxfp8"), InvalidTypeError, "^x: .*x.dequantize"),
    "scale_enc vector": (lambda: mf.quantize(X, DELAYED, scale_enc=torch.ones(2)), InvalidValueError, "^scale_enc: "),
    "scale_enc word": (lambda: mf.quantize(X, DELAYED, scale_enc="1"), InvalidTypeError, "^scale_enc: "),
    "scale_enc zero": (lambda: mf.quantize(X, DELAYED, scale_enc=0.0), InvalidValueError, "^scale_enc: "),
    "scale_enc missing": (lambda: mf.quantize(X, DELAYED), InvalidValueError, "^scale_enc: "),
    "scale_enc in excess": (lambda: mf.quantize(X, "mxfp8", scale_enc=1.0), InvalidValueError, "^scale_enc: "),
    "scale_enc elsewhere": (
        lambda: mf.quantize(X, DELAYED, scale_enc=torch.ones((), device="meta")),
        InvalidValueError, "^scale_enc: .*meta",
    ),
    "amax beyond floats": (lambda: mf.quantize(X, "nvfp4", amax=10**400), InvalidValueError, "^amax: .*integer beyond"),
    "scale_enc beyond floats": (
        lambda: mf.quantize(X, DELAYED, scale_enc=10**400), InvalidValueError, "^scale_enc: .*integer beyond",
    ),
    "quantize nested": (
        lambda: mf.quantize(torch.nested.as_nested_tensor([X, X[:2]]), "mxfp8"), InvalidTypeError, "^x: got a nested",
    ),
    "quantize jagged": (
        lambda: mf.quantize(torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged), "mxfp8"), InvalidTypeError,
        "^x: got a nested tensor",
    ),
    "quantize sparse": (lambda: mf.quantize(X.to_sparse(), "mxfp8"), InvalidTypeError, "^x: .*x.to_dense"),
    "amax elsewhere": (
        lambda: mf.quantize(X, "nvfp4", amax=torch.ones((), device="meta")), InvalidValueError, "^amax: .*meta",
    ),
    "norm_linear of a word": (lambda: fused.norm_linear("x", nn.RMSNorm(32), layer()), InvalidTypeError, "^x: "),
    "norm_linear, second layer": (
        lambda: fused.norm_linear(X, nn.RMSNorm(32), layer(), layer(31)), InvalidValueError, "^layers: .*31.*32",
    ),
    "norm elsewhere": (
        lambda: fused.norm_linear(X, nn.RMSNorm(32, device="meta"), layer()), InvalidValueError, "^norm.weight: .*meta",
    ),
    "activation_linear of None": (lambda: fused.activation_linear(None, layer()), InvalidTypeError, "^x: "),
    "activation_linear, features": (lambda: fused.activation_linear(X, layer(31)), InvalidValueError, "^layer: "),
    "activation_linear, up": (lambda: fused.activation_linear(X, layer(), up=[1]), InvalidTypeError, "^up: "),
    "activation number": (
        lambda: fused.activation_linear(X, layer(), activation=1), InvalidTypeError, "^activation: .*silu",
    ),
    "mlp, down": (
        lambda: fused.norm_mlp(X, nn.RMSNorm(32), layer(), layer(17)), InvalidValueError, "^down: .*17.*16",
    ),
    "mlp, up": (
        lambda: fused.norm_mlp(X, nn.RMSNorm(32), layer(), layer(16), up=layer(32, 17)), InvalidValueError, "^up: .*17",
    ),
    "mlp of a word": (lambda: fused.norm_mlp("x", nn.RMSNorm(32), layer(), layer(16)), InvalidTypeError, "^x: "),
    "Linear of None": (lambda: mf.Linear(32, 8)(None), InvalidTypeError, "^x: "),
    "explain of a number": (lambda: mf.explain("mxfp8", "h200", shape=3), InvalidValueError, "^shape: "),
    "seed rank of truth": (lambda: mf.set_seed_rank(True), InvalidTypeError, "^rank: "),
    "seed rank below 0": (lambda: mf.set_seed_rank(-1), InvalidValueError, "^rank: got -1"),
    "seed rank too large": (lambda: mf.set_seed_rank(1 << 32), InvalidValueError, "^rank: "),
    "update_scaling of a class": (lambda: mf.update_scaling(mf.Linear), InvalidTypeError, "^model: .*an instance"),
    "explain of truth": (lambda: mf.explain("mxfp8", "h200", shape=(True, 4, 4)), InvalidValueError, "^shape: "),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("case", BAD)
def test_the_argument_is_named(case: str) -> None:
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()


CASTS = {
    name: Cast(name) for name in ("fp8_tensor", "fp8_row", "fp8_1x128", "fp8_128x128", "mxfp8", "mxfp4", "nvfp4")
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASTS, "transformed"])
def test_a_view_that_stands_for_a_negation(name: str) -> None:
    """The imaginary part of a conjugate is memory to be read with the other sign."""
    cast = CASTS.get(name, Cast("nvfp4", hadamard=Hadamard()))
    plain = torch.randn(8, 48)
    view = torch.complex(torch.zeros(8, 48), plain).conj().imag
    assert view.is_neg()
    for made, expected in ((mf.quantize(view, cast), mf.quantize(-plain, cast)),):
        assert torch.equal(made.codes.view(torch.uint8), expected.codes.view(torch.uint8))


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
def test_negated_views_through_a_linear(recipe: str) -> None:
    linear = mf.Linear(48, 16, bias=False, recipe=recipe)
    x, dy = torch.randn(8, 48), torch.randn(8, 16)
    results = []
    for negate in (lambda t: -t, lambda t: torch.complex(torch.zeros_like(t), t).conj().imag):
        leaf = negate(x).detach().requires_grad_()
        linear.zero_grad()
        torch.manual_seed(0)
        y = linear(leaf)
        y.backward(negate(dy))
        results.append((y.detach(), leaf.grad, linear.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_states_stay_those_of_a_layer_that_refused() -> None:
    """Calls that raise leave the state of delayed scaling as it was."""
    linear = mf.Linear(32, 8, recipe=DelayedScaling(amax_history_len=4))
    linear(X).sum().backward()
    before = {key: value.clone() for key, value in linear.state_dict().items()}
    for bad in (X[:, :31], X.double(), X.to("meta"), None, X[0, 0]):
        with pytest.raises((InvalidTypeError, InvalidValueError)):
            linear(bad)
    assert all(torch.equal(value, before[key]) for key, value in linear.state_dict().items())
