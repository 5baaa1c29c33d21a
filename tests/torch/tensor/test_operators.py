"""The three verbs under torch.compile: opaque to the compiler, the same bits as in eager mode, nothing left out."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import microfloat.torch as mf
from microfloat.errors import InvalidValueError
from microfloat.formats import E4M3, FORMATS, MXFP8, MXFP8_E5M2, NVFP4, SCALE_E8M0, ScaledFormat
from microfloat.recipes import Cast, Current, Delayed, Hadamard
from microfloat.torch import QuantizedTensor
from microfloat.torch.tensor import custom_ops as _operators

X = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
W = torch.randn(32, 96, generator=torch.Generator().manual_seed(2))
DEEP = X.view(4, 16, 96)
STOCHASTIC = Cast("nvfp4", rounding="stochastic")
FLOOR, TRANSFORMED = Cast("mxfp8", "floor"), Cast("nvfp4", hadamard=Hadamard())
DELAYED = Cast("fp8_tensor", scaling=Delayed())
RHT = Hadamard()


def q(x, cast="mxfp8", **arguments):
    return mf.quantize(x, cast, **arguments)


CASES = {
    "round trip": (lambda x: q(x * 1).dequantize() + 0, (X,)),
    "round trip to bfloat16": (lambda x: q(x * 1, "nvfp4").dequantize(torch.bfloat16) + 0, (X,)),
    "a Cast": (lambda x: q(x * 1, FLOOR), (X,)),
    "a format": (lambda x: q(x * 2, MXFP8), (X,)),
    "a Cast made inside": (lambda x, rule: q(x * 1, Cast("mxfp8", rule)), (X, "ceil")),
    "a Cast with options made inside": (
        lambda x: q(x, Cast("nvfp4", rounding="stochastic", hadamard=Hadamard(16, 3)), seed=7),
        (X,),
    ),
    "a Cast with a scaling made inside": (lambda x: q(x, Cast("fp8_tensor", scaling=Current(8.0))), (X,)),
    "a delayed Cast made inside": (lambda x: q(x, Cast("fp8_tensor", scaling=Delayed()), scale_enc=3.0), (X,)),
    "a format made inside": (
        lambda x: q(x, Cast(ScaledFormat("mx16", E4M3, SCALE_E8M0, (1, 16)), "floor")),
        (X,),
    ),
    "columns": (lambda x: q(x * 2, "nvfp4_row", axis=-2), (X,)),
    "three axes": (lambda x: q(x * 2, "nvfp4_2d"), (DEEP,)),
    "Hadamard": (lambda x: q(x * 2, TRANSFORMED).dequantize(), (X,)),
    "given seed": (lambda x: q(x * 2, STOCHASTIC, seed=5 | 7 << 32), (X,)),
    "drawn seed": (lambda x: q(x * 2, STOCHASTIC), (X,)),
    "given amax": (lambda x: q(x * 2, "nvfp4", amax=x.abs().amax() * 3), (X,)),
    "delayed": (lambda x: q(x * 2, DELAYED, scale_enc=3.0), (X,)),
    "dequantize an input": (lambda t: t.dequantize() * 2, (q(X),)),
    "views of an input": (lambda t: t.view(8, 8, 96)[2:4].flatten(0, 1).t().dequantize() * 2, (q(X),)),
    "product": (lambda a, b: mf.scaled_matmul(a, b) + 1, (q(X), q(W))),
    "product with bias": (
        lambda a, b: mf.scaled_matmul(a, b, bias=torch.ones(32), out_dtype=torch.bfloat16) + 1,
        (q(X, "nvfp4"), q(W, "nvfp4_2d")),
    ),
    "F.linear": (lambda a, b: F.linear(a, b) + 1, (q(X), q(W))),
    "F.linear with bias and more axes": (lambda a, b: F.linear(a, b, torch.ones(32)) + 1, (q(DEEP), q(W))),
    "everything": (lambda x, w: mf.scaled_matmul(q(x * 1), q(w)) + 1, (X, W)),
    "from_parts": (
        lambda t: QuantizedTensor.from_parts(t.codes, t.scale, t.tensor_scale, NVFP4, hadamard=RHT).dequantize() + 0,
        (q(X, Cast("nvfp4", hadamard=Hadamard())),),
    ),
    "from_parts by name": (
        lambda t: QuantizedTensor.from_parts(t.codes, t.scale, None, "mxfp6_e3m2", shape=(4, 16, 96)),
        (q(DEEP, "mxfp6_e3m2"),),
    ),
    "joined and cut": (lambda t: torch.cat([t[8:], t[:8]]).dequantize() + 0, (q(X),)),
    "one of a pair": (lambda x: q(x * 2, "nvfp4", axis=(-1, -2))[1], (X,)),
    "a pair of casts": (lambda x: q(x * 2, (FLOOR, STOCHASTIC), axis=(-2, -1), seed=7, stream=(0, 3))[1], (X,)),
    "last two axes turned": (lambda t: t.mT[:, :64].dequantize() + 0, (q(DEEP),)),
    "expanded": (lambda t: t[None].expand(2, -1, -1).dequantize() + 0, (q(X, "nvfp4_row"),)),
    "packed": (
        lambda t: (
            QuantizedTensor.from_parts(
                t.packed_codes(), t.scale, None, "mxfp6_e2m3", shape=(64, 96), packed=True
            ).dequantize()
            + 0
        ),
        (q(X, "mxfp6_e2m3"),),
    ),
    "weight only": (lambda x, w: F.linear(x, w.dequantize()) + 1, (X, q(W, "mxfp4"))),
}


# Cases that are compiled as one graph: what a graph costs besides its operators is most of what one of them costs.
TOGETHER = 8


def groups_of(cases):
    """Parameters of a test that takes several cases at once."""
    names = list(cases)
    groups = [names[start : start + TOGETHER] for start in range(0, len(names), TOGETHER)]
    return pytest.mark.parametrize("names", groups, ids=lambda names: " to ".join(dict.fromkeys((names[0], names[-1]))))


def check_compiled(function, *arguments):
    """Assert that the parts of a dict that the function returns are in compiled code those of eager mode."""
    torch.manual_seed(0)
    expected = function(*arguments)
    torch.manual_seed(0)
    actual = torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments)
    for name, parts in expected.items():
        assert len(actual[name]) == len(parts), name
        assert all(equal(a, b) for a, b in zip(actual[name], parts, strict=True)), name


def equal(a, b):
    assert type(a) is type(b)
    return torch.equal(a, b) and a.dtype == b.dtype


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@groups_of(CASES)
def test_compiled_is_eager(names):
    functions = {name: CASES[name][0] for name in names}

    def function(arguments):
        return {name: [function(*arguments[name])] for name, function in functions.items()}

    check_compiled(function, {name: CASES[name][1] for name in names})


PAIR = Cast(NVFP4), Cast(NVFP4, rounding="stochastic")


def test_casts_and_formats_of_the_module_are_constants_of_each_call():
    """Dynamo keeps each constant under a name of its own in the module's globals, and guards what is read of it."""

    def function(x):
        rows, columns = mf.quantize(x, PAIR, axis=(-1, -2), seed=3)
        mixed = mf.quantize(x, (MXFP8, PAIR[0]), axis=(-1, -2))
        return [q.dequantize() for q in (rows, columns, *mixed, mf.quantize(x, NVFP4))]

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for rows in (32, 48):  # the second compiles once more, in globals that hold the constants of the first
        x = torch.randn(rows, 64)
        assert all(torch.equal(a, b) for a, b in zip(compiled(x), function(x), strict=True))


ONES = torch.full((64, 3), 127, dtype=torch.uint8)  # scales of X as MXFP8


def test_formats_are_met_by_name_before_their_objects():
    """Dynamo knows objects by their identity and guards none that it has met in a constant first."""
    returned = torch.compile(lambda x: q(x, FLOOR), fullgraph=True, backend="eager")(X).cast

    def function(x, rule):
        named = q(x, "mxfp8"), QuantizedTensor.from_parts(x.to(torch.float8_e5m2), ONES, None, "mxfp8_e5m2")
        objects = q(x, MXFP8), q(x, MXFP8_E5M2), q(x, Cast("mxfp8", rule)), q(x, FLOOR), q(x, returned.format)
        return [one.dequantize() for one in (*named, *objects)]

    actual = torch.compile(function, fullgraph=True, backend="eager")(X, "ceil")
    assert all(torch.equal(a, b) for a, b in zip(actual, function(X, "ceil"), strict=True))


@pytest.mark.slow_cases("further shapes that a compiler is told", cases=("(33,)-*", "(5, 33)-*"))
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (33,), (5, 33), (2, 3, 40), (130, 17)], ids=str)
def test_the_shapes_that_a_compiler_is_told(fmt, shape):
    """The fake operator against the real one, for every format: a wrong promise would corrupt a compiled program."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for hadamard in (None, Hadamard()) if not fmt.is_per_tensor and fmt.tensor_scale != "row" else (None,):
        cast = Cast(fmt, hadamard=hadamard)
        for axis in (-1, -2) if len(shape) == 2 else (-1,):
            real = q(torch.ones(shape), cast, axis=axis)
            with FakeTensorMode():
                promised = q(torch.ones(shape), cast, axis=axis)
                values = promised.dequantize()
            assert (promised.shape, promised.axis, promised.dtype) == (real.shape, real.axis, real.dtype)
            assert (values.shape, values.dtype) == (real.shape, torch.float32)
            for name, part in real.parts().items():
                other = promised.parts()[name]
                assert (other.shape, other.dtype, other.stride()) == (part.shape, part.dtype, part.stride()), name


@pytest.mark.parametrize("fmt", ["fp8_tensor", "fp8_128x128", "mxfp8", "nvfp4"])
def test_the_shapes_of_a_pair_that_a_compiler_is_told(fmt):
    from torch._subclasses.fake_tensor import FakeTensorMode

    pair = q(torch.ones(40, 70), fmt, axis=(-1, -2))
    with FakeTensorMode():
        promised = q(torch.ones(40, 70), fmt, axis=(-1, -2))
    for real, told in zip(pair, promised, strict=True):
        assert (told.shape, told.axis) == (real.shape, real.axis)
        parts = [(part.shape, part.dtype) for part in real.parts().values()]
        assert parts == [(part.shape, part.dtype) for part in told.parts().values()]


def test_the_compiler_sees_operators_only():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compile(lambda x, w: mf.scaled_matmul(q(x), q(w)), fullgraph=True, backend=keep)(X, W)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    operators = [name for name in called if name.startswith("microfloat.")]
    assert operators == ["microfloat.quantize"] * 2 + ["microfloat.scaled_matmul"]
    assert not any("div" in name or "amax" in name for name in called)


def test_shapes_may_be_dynamic():
    function = torch.compile(lambda x: q(x, "nvfp4").dequantize(), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, columns in ((5, 40), (17, 96), (64, 33)):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
        assert torch.equal(function(x), q(x, "nvfp4").dequantize())


def test_errors_come_through():
    with pytest.raises(Exception, match=r"x: got torch.int64, needed torch.float32"):
        torch.compile(q, backend="aot_eager")(torch.ones(3, 32, dtype=torch.int64))
    with pytest.raises(Exception, match=r"b: got contraction length 32"):
        torch.compile(mf.scaled_matmul, backend="aot_eager")(q(X), q(torch.ones(2, 32)))


def test_no_gradient_passes_through_in_either_mode():
    """Quantization and products of codes have no derivative: results require no grad, compiled or not.

    The values of a parameter have one (test_a_loss_of_the_values_reaches_the_parameter).
    """
    leaf, weight = X.clone().requires_grad_(), torch.nn.Parameter(q(W))
    for function, arguments in (
        (lambda x: q(x).dequantize() + 0, (leaf,)), (lambda x, w: mf.scaled_matmul(q(x), w) + 0, (leaf, weight)),
    ):  # fmt: skip
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            y = run(*arguments)
            assert not y.requires_grad
            with pytest.raises(RuntimeError, match="does not require grad"):
                y.sum().backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_quantized_weight_is_compiled_exported_and_reverted():
    with mf.quantized_model_init(recipe="mxfp8"):
        layer = mf.Linear(96, 32)
    expected = layer(X)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(X), expected)
    torch._dynamo.reset()
    assert torch.equal(torch.export.export(layer, (X,)).module()(X), expected)
    with pytest.warns(UserWarning, match="new parameters"):  # Dynamo holds weak references to what it has compiled
        mf.revert(layer)
    torch.testing.assert_close(layer(X), expected)
    assert torch.export.export(layer, (X,)).module()(X).shape == (64, 32)


def test_a_dispatch_mode_sees_the_operators_and_changes_nothing():
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Recorder():
        y = mf.scaled_matmul(q(X), q(W))
    assert "microfloat.scaled_matmul.default" in seen
    assert torch.equal(y, mf.scaled_matmul(q(X), q(W)))


# features G2
@pytest.mark.filterwarnings("ignore:.*attribute of a Tensor that is not a leaf:UserWarning")  # of torch's checks
def test_torchs_own_checks_of_the_operators():
    """Schemas, fakes, dynamic shapes and autograd registration, as torch.library.opcheck sees them."""
    product, tensor = q(X, "nvfp4"), torch.ops.microfloat
    stored = product.part_list()
    for operator, arguments in (
        (tensor.quantize, (X, [product.token], [-1], None, [0], [None], [None], "auto")),
        (tensor.quantize, (X, [product.token, q(X).token], [-1, -2], None, [0, 3], [None], [None], "auto")),
        (tensor.dequantize, (*product.part_list(), product.token, 1, [64, 96], torch.float32)),
        (
            tensor.scaled_matmul,
            (stored, stored, [product.token] * 2, [1, 1], [64, 96], [64, 96], None, torch.float32, "split", "auto"),
        ),
        (tensor.straight_through, (X, X.clone().requires_grad_())),
    ):
        torch.library.opcheck(operator.default, arguments)


def test_tokens_are_casts():
    for cast in (Cast("mxfp8"), STOCHASTIC, Cast("fp8_row", hadamard=Hadamard(16, 3))):
        token = _operators.constants_of(cast)[1]
        assert _operators.cast_of(token) == cast
        assert _operators.constants_of(_operators.cast_of(token))[1] == token
    callable_algo = Cast("fp8_tensor", scaling=Delayed(amax_compute_algo=lambda history: history[0]))
    assert isinstance(_operators.cast_of(_operators.constants_of(callable_algo)[1]).scaling, Delayed)
    assert isinstance(q(X), QuantizedTensor)


def test_tensors_under_one_scale_are_joined():
    """As in eager mode: their scales are compared when the code runs."""
    q, other = mf.quantize(torch.randn(32, 32), "nvfp4"), mf.quantize(torch.randn(16, 32), "nvfp4")

    def join(a, b):
        return torch.cat([a, b]), torch.stack([a, b], 1)

    joined = torch.compile(join, fullgraph=True, backend="aot_eager")
    for got, expected in zip(joined(q[:16], q[16:]), join(q[:16], q[16:]), strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(InvalidValueError, match=r"tensor_scale is one for all blocks, and differs.*quantize\("):
        joined(q[:16], other)
