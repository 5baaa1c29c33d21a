"""torch.func around the verbs: each example of vmap alone, the gradient of fake_quantize, refusals by name.

features G2 and G7.
"""

import functools

import pytest
import torch
from torch.autograd import forward_ad

import microfloat.torch as mf
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from microfloat.recipes import Cast, MXFP8BlockScaling
from microfloat.torch import QuantizedTensor
from tests.torch.tensor.format_cases import every_format

GENERATOR = torch.Generator().manual_seed(11)
X = torch.randn(3, 20, 70, generator=GENERATOR)
W = torch.randn(8, 70, generator=GENERATOR)
STOCHASTIC = Cast("nvfp4", rounding="stochastic")
vmap = torch.func.vmap


@every_format
def test_each_example_of_a_batch_is_quantized_alone(fmt):
    """A scale of the whole batch would be another one."""
    x = X * torch.tensor([1.0, 100.0, 0.01]).view(3, 1, 1)
    for axis in (-1, -2):
        expected = torch.stack([mf.quantize(one, fmt, axis=axis).dequantize() for one in x])
        assert torch.equal(vmap(lambda x, axis=axis: mf.quantize(x, fmt, axis=axis).dequantize())(x), expected)
        assert torch.equal(vmap(lambda x, axis=axis: mf.fake_quantize(x, fmt, axis))(x), expected)
    turned = vmap(lambda x: mf.quantize(x, fmt, axis=-2).dequantize(), in_dims=1, out_dims=2)(x.transpose(0, 1))
    assert torch.equal(turned.permute(2, 0, 1), expected)


def test_parts_and_pairs_of_a_batch():
    codes, scale = vmap(lambda x: (lambda q: (q.codes, q.scale))(mf.quantize(x, "mxfp8")))(X)
    for one, its_codes, its_scale in zip(X, codes, scale, strict=True):
        q = mf.quantize(one, "mxfp8")
        assert torch.equal(q.codes.view(torch.uint8), its_codes.view(torch.uint8))
        assert torch.equal(q.scale, its_scale)
    row, column = vmap(lambda x: tuple(q.dequantize() for q in mf.quantize(x, "nvfp4", axis=(-1, -2))))(X)
    assert torch.equal(row, vmap(lambda x: mf.fake_quantize(x, "nvfp4"))(X))
    assert torch.equal(column, vmap(lambda x: mf.fake_quantize(x, "nvfp4", -2))(X))
    assert vmap(lambda x: mf.quantize(x, "mxfp4").codes)(X[:0]).shape == (0, 20, 35)


def test_products_of_a_batch():
    weight, bias = mf.quantize(W, "mxfp8"), torch.arange(8.0)

    def product(x, bias):
        return mf.scaled_matmul(mf.quantize(x, "mxfp8"), weight, bias=bias)

    expected = torch.stack([product(x, bias) for x in X])
    assert torch.equal(vmap(product, in_dims=(0, None))(X, bias), expected)
    assert torch.equal(vmap(product)(X, bias.expand(3, 8)), expected)
    assert torch.equal(vmap(lambda x: x * weight.dequantize()[0])(X), X * weight.dequantize()[0])


@pytest.mark.parametrize(
    "operation", [lambda q: q + 1, lambda q: 2.0 - q, lambda q: q / q, lambda q: q**2, torch.exp, lambda q: q > 0]
)
def test_arithmetic_of_a_quantized_batch_names_what_to_do(operation):
    """Binary operators said "unsupported operand type(s) for +: 'Tensor' and 'int'"."""
    with pytest.raises(NotSupportedError, match=r"got a QuantizedTensor \(mxfp8\).* outside of vmap"):
        vmap(operation)(mf.quantize(X, "mxfp8"))


def test_seeds_of_a_batch():
    seeds = torch.arange(6).view(3, 2)
    made = vmap(lambda x, seed: mf.quantize(x, STOCHASTIC, seed=seed).dequantize())(X, seeds)
    for one, seed, values in zip(X, seeds, made, strict=True):
        assert torch.equal(values, mf.quantize(one, STOCHASTIC, seed=seed).dequantize())
    with pytest.raises(InvalidValueError, match="seed: got None with a stochastic cast inside a transform"):
        vmap(lambda x: mf.quantize(x, STOCHASTIC).dequantize())(X)


@every_format
def test_the_gradient_goes_straight_through(fmt):  # features S12
    x = X[0].clone()
    x[0, 0] = torch.inf

    def loss(x, dy):
        return (mf.fake_quantize(x, fmt) * dy).sum()

    dy = torch.ones_like(x)
    assert torch.equal(torch.func.grad(loss)(x, dy), dy)
    assert torch.equal(vmap(torch.func.grad(loss), in_dims=(0, None))(X, dy), dy.expand(3, -1, -1))
    batched = torch.func.grad(lambda xs: vmap(loss, in_dims=(0, None))(xs, dy).sum())(X)
    assert torch.equal(batched, dy.expand(3, -1, -1))


@pytest.mark.slow("further programs of a checked kind")
def test_compiled_transforms():
    batched = vmap(lambda x: mf.fake_quantize(x, "mxfp8"))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(batched, fullgraph=True, backend="aot_eager")(X), batched(X))


LAYER = mf.Linear(70, 8, recipe=MXFP8BlockScaling())
REFUSED = {
    "jvp": lambda f: torch.func.jvp(f, (X[0],), (X[0],)),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X[0]),
    "hessian": lambda f: torch.func.hessian(f)(X[0]),
    "dual": lambda f: dual(f),
}


def dual(function):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(X[0], X[0]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own forward-mode AD uses it
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("function", [mf.fake_quantize, mf.quantize], ids=lambda function: function.__name__)
def test_forward_mode_is_refused_by_name(name, function):
    def loss(x):
        made = function(x, "mxfp8")
        return (made if type(made) is torch.Tensor else made.dequantize()).sum()

    with pytest.raises(NotSupportedError, match=rf"{function.__name__}: got a transform.*forward-mode"):
        REFUSED[name](loss)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_layers_are_refused_by_name_and_called_functionally():
    for transformed in (vmap(LAYER), torch.func.grad(lambda x: LAYER(x).sum())):
        with pytest.raises(NotSupportedError, match=r"forward: got a transform.*around a quantized layer"):
            transformed(X)
    doubled = {name: value.detach() * 2 for name, value in LAYER.named_parameters()}
    expected = mf.Linear(70, 8, recipe=MXFP8BlockScaling())
    expected.load_state_dict(doubled)
    call = functools.partial(torch.func.functional_call, LAYER, doubled)
    torch._dynamo.reset()
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        assert torch.equal(run((X,)), expected(X))
    leaf = doubled["weight"].requires_grad_()
    call((X,)).sum().backward()
    expected(X).sum().backward()
    assert torch.equal(leaf.grad, expected.weight.grad)


def test_quantized_tensors_and_batches():
    """Parts may enter and leave vmap; the tensor itself knows its verbs alone inside."""
    q = mf.quantize(X, "mxfp8")
    made = vmap(
        lambda codes, scale: QuantizedTensor.from_parts(codes, scale, None, "mxfp8", shape=(20, 70)).dequantize()
    )
    assert torch.equal(made(q.codes, q.scale), q.dequantize())
    for function in (
        lambda x: mf.quantize(x, "mxfp8"), lambda x: mf.quantize(x, "mxfp8")[2:4].dequantize(),
        lambda x: mf.quantize(x, "mxfp8").fill_(1.0).dequantize(),
    ):  # fmt: skip
        with pytest.raises(NotSupportedError, match=r"got a QuantizedTensor inside vmap, or .*q\.parts\(\)"):
            vmap(function)(X)
    with pytest.raises(InvalidTypeError, match=r"a: got a tensor of torch\.float32.*map over q\.parts\(\)"):
        vmap(lambda one: mf.scaled_matmul(one, one))(q)


# Those of one running call, which is behind a number, under a dispatch mode; custom_op keeps its fake elsewhere.
NAMED = {f"microfloat::{name}" for name in (
    "quantize_operands", "multiply_operands", "multiply_groups", "straight_through"
)}  # fmt: skip


def test_every_operator_has_a_fake_and_a_rule_for_batches():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("microfloat::")}
    assert len(names) > 10
    for name in sorted(names - {"microfloat::draw_seed"}):  # which reads no tensor
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "FuncTorchBatched"), name
        if name not in NAMED:
            assert torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None, name


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own forward-mode AD uses it
def test_layers_that_could_be_one_product_are_apart_in_transforms():
    """The weights are tensors there, as FSDP1 has them, and the join of their memory has no rule for a transform."""
    module = mf.LayerNormLinear(32, 48, split={"q": 32, "k": 16})
    x, values = torch.randn(4, 32), {name: one.detach() for name, one in module.named_parameters()}

    def loss(values):
        with mf.autocast(enabled=False):
            return torch.func.functional_call(module, values, (x,)).square().sum()

    loss(dict(module.named_parameters())).backward()
    for name, gradient in torch.func.grad(loss)(values).items():
        torch.testing.assert_close(gradient, module.get_parameter(name).grad)
    torch.testing.assert_close(vmap(loss)({name: one[None] for name, one in values.items()}), loss(values)[None])
    with forward_ad.dual_level():
        made = loss({name: forward_ad.make_dual(one, one) for name, one in values.items()})
        slope = sum((one * module.get_parameter(name).grad).sum() for name, one in values.items())
        torch.testing.assert_close(forward_ad.unpack_dual(made).tangent, slope)
