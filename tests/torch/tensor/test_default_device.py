"""A default device of torch is the user's: nothing that this library makes beside a call's tensors is put there."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.torch.nn.sdpa import attend  # noqa: E402

RECIPES = ("fp8_current", "delayed", "mxfp8", "nvfp4", "fp8_row", "fp8_block")


class _Region(mf.Linear):
    def forward(self, x):
        with mf.autocast(recipe=self.asked):
            return super().forward(x)


def _layer(kind, recipe):
    if kind == "region":
        layer = _Region(64, 64)
        layer.asked = recipe
        return layer
    if kind == "grouped":
        return mf.GroupedLinear(2, 64, 64, recipe=recipe)
    return mf.Linear(64, 64, recipe=recipe) if kind == "linear" else mf.LayerNormMLP(64, 128, recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "region", "grouped", "mlp"])
def test_layers_run_where_their_tensors_are(kind, recipe) -> None:
    layer, x = _layer(kind, recipe), torch.randn(64, 64, requires_grad=True)
    with torch.device("meta"):
        for _ in range(2):
            y = layer(x, [32, 32]) if kind == "grouped" else layer(x)
            y.square().sum().backward()
        mf.quantize(x.detach(), "nvfp4").dequantize()
    assert x.grad.device.type == "cpu"
    assert x.grad.isfinite().all()


def test_documents_are_told_apart_where_they_are() -> None:
    heads, ends = torch.randn(1, 64, 2, 32), torch.tensor([0, 20, 64], dtype=torch.int32)
    with torch.device("meta"):
        y = attend(heads, heads, heads, cu_seqlens=ends, causal=True, window=8)
    assert torch.equal(y, attend(heads, heads, heads, cu_seqlens=ends, causal=True, window=8))
