"""`convert(fuse=True)` on plain torch models; transformers' are in tests/integrations."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError  # noqa: E402
from microfloat.torch.fusing import Fused  # noqa: E402


def _model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.Dropout(0.0), nn.RMSNorm(32),
        nn.Linear(32, 16), nn.SiLU(),
    )  # fmt: skip


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", "fp8_current", "nvfp4"])
def test_norms_and_activations_before_linears(recipe):
    apart, fused = _model(), _model()
    mf.convert(apart, recipe)
    report = mf.convert(fused, recipe, fuse=True)
    assert [(row.name, row.action) for row in report.blocks] == [("", "fused")]
    assert type(fused).__name__ == "Sequential"
    x = torch.randn(5, 32)
    results = []
    for model in (apart, fused):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(1)
        y = model(leaf)
        y.sum().backward()
        results.append((y.detach(), leaf.grad, [layer.weight.grad for layer in (model[1], model[3], model[6])]))
    # A norm may differ in its last bit, and few codes with it.
    for got, want in zip((*results[1][:2], *results[1][2]), (*results[0][:2], *results[0][2]), strict=True):
        assert float((got - want).norm() / want.norm()) < 0.02


def test_a_changed_block_runs_its_own_forward():
    model = _model()
    mf.convert(model, "mxfp8", fuse=True)
    x = torch.randn(5, 32)
    want, seen = model(x), []
    handle = model[0].register_forward_hook(lambda *arguments: seen.append(1))
    assert torch.equal(model(x), want)
    assert seen == [1]
    handle.remove()
    assert torch.equal(model(x), want)
    assert seen == [1]
    model[2] = nn.Tanh()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model(x), want)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other, Fused)
        assert torch.equal(other(x), model(x))
    mf.revert(model)
    assert type(model) is nn.Sequential
    assert type(model[1]) is nn.Linear


def test_a_sequential_without_such_pairs_stays():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8))
    report = mf.convert(model, "mxfp8", fuse=True)
    assert [row.action for row in report.blocks] == ["not fused"]
    assert type(model) is nn.Sequential
    with pytest.raises(InvalidTypeError, match="fuse"):
        mf.convert(model, "mxfp8", fuse="yes")


def _gated(product):
    """A class as transformers' models have it, whose forward is the given one."""

    def init(self):
        nn.Module.__init__(self)
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.act_fn = nn.SiLU()

    names = {"__module__": "transformers.models.own.modeling_own", "__init__": init, "forward": product}
    return type("OwnMLP", (nn.Module,), names)()


@pytest.mark.parametrize(
    ("product", "fused"),
    [
        (lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)), True),
        (lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)), False),
        (lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x)), False),
    ],
)
def test_an_mlp_is_known_by_what_it_computes(product, fused):
    torch.manual_seed(0)
    model, x = nn.ModuleList([_gated(product)]), torch.randn(4, 32)
    plain = model[0](x).detach()
    report = mf.convert(model, "mxfp8", fuse=True)
    assert [row.action for row in report.blocks] == ["fused"] * fused
    assert float((model[0](x).detach() - plain).norm() / plain.norm()) < 0.1
