"""`fake_quantize`: the values of dequantize(quantize(x)) and the gradient dy."""

import pytest
import torch

import microfloat.torch as mf
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.formats import FORMATS
from microfloat.recipes import Cast

GENERATOR = torch.Generator().manual_seed(3)
X, DY = (torch.randn(6, 48, generator=GENERATOR) for _ in range(2))
NOISY = Cast("mxfp8", rounding="stochastic")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cast", [*FORMATS, NOISY])  # features S12
def test_values_and_gradient(cast, dtype):
    x = X.to(dtype, copy=True)
    x[0, 0] = float("inf")
    x.requires_grad_()
    seed = 5 if cast is NOISY else None
    for axis in (-1, -2):
        y = mf.fake_quantize(x, cast, axis, seed)
        assert y.dtype == dtype
        assert torch.equal(y, mf.quantize(x, cast, axis=axis, seed=seed).dequantize()) or y.isnan().any()
        (dx,) = torch.autograd.grad(y, x, DY.to(dtype))
        assert torch.equal(dx, DY.to(dtype)), "also where the value saturated"


def test_orders_of_differentiation_and_compiled_code():
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad((mf.fake_quantize(x, "mxfp4") ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), x)
    assert torch.equal(second, torch.full_like(x, 2))
    compiled = torch.compile(lambda x: mf.fake_quantize(x, "mxfp4").square().sum(), fullgraph=True, backend="aot_eager")
    (of_compiled,) = torch.autograd.grad(compiled(x), x)
    assert torch.equal(of_compiled, dx)


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("fp8_tensor", "nvfp4_2d"))
@pytest.mark.parametrize("cast", FORMATS)
def test_a_pair_of_axes_eager_and_compiled(cast):
    def loss(x):
        row, column = mf.fake_quantize(x, (cast, "mxfp4"), (-1, -2))
        return (row * DY).sum() + (column * 3).sum(), row, column

    torch._dynamo.reset()
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        x = X.clone().requires_grad_()
        total, row, column = run(x)
        assert torch.equal(row, mf.quantize(X, cast).dequantize())
        assert torch.equal(column, mf.quantize(X, "mxfp4", axis=-2).dequantize())
        (dx,) = torch.autograd.grad(total, x)
        assert torch.equal(dx, DY + 3)


def test_bad_arguments():
    with pytest.raises(InvalidTypeError, match="x: got list"):
        mf.fake_quantize([1.0], "mxfp8")
    with pytest.raises(InvalidTypeError, match=r"x: got torch\.int64"):
        mf.fake_quantize(torch.ones(3, dtype=torch.int64), "mxfp8")
    with pytest.raises(InvalidValueError, match="cast: got 'mxfp9'"):
        mf.fake_quantize(X, "mxfp9")
    with pytest.raises(InvalidValueError, match="scale_enc: got None"):
        mf.fake_quantize(X, Cast("fp8_tensor", scaling=mf.Delayed()))
