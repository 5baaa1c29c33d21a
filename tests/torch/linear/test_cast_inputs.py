"""A Linear on an input that is quantized already: the bits of the layer that casts it, and named errors."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.recipes import from_name  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4", "fp8_current", "fp8_row", "fp8_block"])
def test_the_product_is_that_of_the_layer_that_casts(recipe, dtype):
    torch.manual_seed(0)
    layer, x = mf.Linear(70, 40, dtype=dtype, recipe=recipe), torch.randn(3, 5, 70, dtype=dtype)
    q = mf.quantize(x, from_name(recipe).fprop.lhs)
    with torch.no_grad():
        assert torch.equal(layer(q), layer(x))
        assert torch.equal(layer(q[0]), mf.linear(q[0], layer.weight, layer.bias, recipe=recipe))
    assert torch.equal(layer.requires_grad_(False)(q), layer(x))
    with mf.autocast(recipe=recipe):
        assert torch.equal(mf.linear(q, layer.weight, layer.bias), layer(x))


def test_a_stored_weight_takes_it_too():
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(mf.Linear(64, 48)).requires_grad_(False), torch.randn(7, 64)
    mf.quantize_(model, mf.WeightActivation("mxfp8"))
    assert torch.equal(model(mf.quantize(x, "mxfp8")), model(x))
    with pytest.raises(
        InvalidValueError, match=r"x: got a QuantizedTensor .nvfp4.* needed mxfp8 with blocks along the last"
    ):
        model(mf.quantize(x, "nvfp4"))


def test_what_does_not_fit_is_named():
    layer, x = mf.Linear(64, 32), torch.randn(32, 64)
    for q in (mf.quantize(x, "mxfp8", axis=0), mf.quantize(x, "mxfp6_e3m2"), mf.quantize(x[:, :32], "mxfp8")):
        with torch.no_grad(), mf.autocast(recipe="mxfp8"), pytest.raises(InvalidValueError, match="as fprop casts"):
            layer(q)
    q = mf.quantize(x, "mxfp8")
    with mf.autocast(recipe="mxfp8"), pytest.raises(NotSupportedError, match="a gradient is wanted"):
        layer(q)
    with mf.autocast(recipe="delayed"), torch.no_grad(), pytest.raises(NotSupportedError, match="delayed scaling"):
        layer(mf.quantize(x, "fp8_tensor"))
    layer.pin(mf.WeightOnly("mxfp8"))
    with torch.no_grad(), pytest.raises(InvalidTypeError, match=r"does not cast activations.*dequantize"):
        layer(q)
