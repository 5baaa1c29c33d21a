"""Inputs of a Linear under a recipe: operands that do not fit, tensors without values, transforms of torch.func."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, MicrofloatError, NotSupportedError  # noqa: E402
from microfloat.recipes import RECIPES, DelayedScaling  # noqa: E402
from microfloat.torch.nn import functional as fused  # noqa: E402
from microfloat.torch.scaling import buffers as layer_state  # noqa: E402
from tests.torch.distributed.world import world_of_one  # noqa: E402

X = torch.randn(4, 64)


def parameter(*shape: int, **options) -> nn.Parameter:
    tensor = torch.ones(shape, **options)
    return nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(3, 64), torch.randn(2, 64)], layout=layout)


# What replaces which operand of a Linear(64, 16), and what the error says.
BAD = {
    "bias on meta": ({"bias": parameter(16, device="meta")}, InvalidValueError, "^bias: .*meta.*cpu"),
    "bias row": ({"bias": parameter(1, 16)}, InvalidValueError, r"^bias: .*\(1, 16\)"),
    "bias column": ({"bias": parameter(4, 1)}, InvalidValueError, r"^bias: .*\(4, 1\)"),
    "bias like y": ({"bias": parameter(4, 16)}, InvalidValueError, r"^bias: .*\(4, 16\)"),
    "bias of another length": ({"bias": parameter(3)}, InvalidValueError, r"^bias: .*\(3,\).*\(16,\)"),
    "bias number": ({"bias": parameter()}, InvalidValueError, r"^bias: .*\(\)"),
    "bias complex": ({"bias": parameter(16, dtype=torch.complex64)}, InvalidTypeError, "^bias: .*complex64"),
    "bias integer": ({"bias": parameter(16, dtype=torch.int32)}, InvalidTypeError, "^bias: .*int32"),
    "bias float64": ({"bias": parameter(16, dtype=torch.float64)}, InvalidTypeError, "^bias: .*float64"),
    "weight None": ({"weight": None}, InvalidTypeError, "^weight: .*NoneType"),
    "weight narrower": ({"weight": parameter(16, 32)}, InvalidValueError, "^x: .*in_features = 32"),
    "weight of fewer rows": ({"weight": parameter(5, 64)}, InvalidValueError, r"^bias: .*\(5,\)"),
    "weight vector": ({"weight": parameter(64)}, InvalidValueError, "^weight: .*matrix"),
    "weight of 3 dimensions": ({"weight": parameter(2, 16, 64)}, InvalidValueError, "^weight: .*matrix"),
    "weight integer": ({"weight": parameter(16, 64, dtype=torch.int8)}, InvalidTypeError, "^weight: .*int8"),
    "weight complex": ({"weight": parameter(16, 64, dtype=torch.complex64)}, InvalidTypeError, "^weight: .*complex"),
    "weight on meta": ({"weight": parameter(16, 64, device="meta")}, InvalidValueError, "^weight: .*meta.*cpu"),
    "x sparse": ({"x": X.to_sparse()}, InvalidTypeError, "^x: .*sparse_coo.*to_dense"),
    "x nested": ({"x": lambda: nested(torch.strided)}, InvalidTypeError, "^x: .*nested"),
    "x jagged": ({"x": lambda: nested(torch.jagged)}, InvalidTypeError, "^x: .*nested"),
    "x quantized": ({"x": mf.quantize(X, "mxfp8")}, InvalidTypeError, r"^x: .*Tensor \(mxfp8\).*dequantize"),
    "microbatch": ({"is_first_microbatch": "yes"}, InvalidTypeError, "^is_first_microbatch: .*str"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", BAD)
def test_an_operand_that_does_not_fit_is_named(case: str) -> None:
    replaced, kind, message = BAD[case]
    layer, call = mf.Linear(64, 16, recipe="mxfp8"), {"input": X}
    for name, value in replaced.items():
        value = value() if callable(value) and not isinstance(value, torch.Tensor) else value
        if name in ("weight", "bias"):
            setattr(layer, name, value)
        else:
            call["input" if name == "x" else name] = value
    with pytest.raises(kind, match=message):
        layer(**call)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_operands_of_fused_layers_are_checked_too() -> None:
    with pytest.raises(InvalidTypeError, match=r"^x: .*nested"):
        fused.activation_linear(nested(torch.strided), mf.Linear(64, 16, recipe="mxfp8"))
    gate, down = mf.Linear(64, 16, recipe="mxfp8"), mf.Linear(16, 64, recipe="mxfp8")
    down.bias = parameter(64, device="meta")
    with pytest.raises(InvalidValueError, match=r"^bias: .*meta"):
        fused.norm_mlp(X, nn.RMSNorm(64), gate, down)


def test_a_parametrized_weight_is_computed_once_a_call_and_never_taken_for_an_older_one() -> None:
    calls = []

    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return 2 * weight

    layer = mf.Linear(64, 16, recipe="mxfp8")
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    calls.clear()
    layer(X)
    assert len(calls) == 1
    with mf.autocast(enabled=False):
        layer(X)
    assert len(calls) == 2
    layer(X, is_first_microbatch=True)
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(3.0)
    assert torch.equal(layer(X, is_first_microbatch=False), layer(X))


# ------------------------------------------------------------------------------------------- tensors without values


@pytest.mark.parametrize("device", ["meta", "fake"])
@pytest.mark.parametrize("name", RECIPES)
def test_shapes_without_values(name: str, device: str) -> None:
    """On the meta device and under FakeTensorMode: shapes, dtypes, gradients; nothing is recorded."""
    with torch.device("meta") if device == "meta" else FakeTensorMode():
        layer = mf.Linear(64, 48, recipe=RECIPES[name](), dtype=torch.bfloat16)
        x = torch.randn(8, 3, 64, requires_grad=True, dtype=torch.bfloat16)
        y = layer(x)
        assert (y.shape, y.dtype, y.requires_grad) == ((8, 3, 48), torch.bfloat16, True)
        y.sum().backward()
        assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)
        assert (layer.weight.grad.shape, layer.bias.grad.shape) == ((48, 64), (48,))
        with torch.no_grad(), mf.autocast(recipe="nvfp4"):
            assert not layer(x).requires_grad
            assert layer(x[:0]).shape == (0, 3, 48)
            assert mf.Linear(64, 8)(x.float()).dtype == torch.float32
        with mf.autocast(enabled=False):
            assert layer(x.float()).dtype == torch.float32
        with mf.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
            assert layer(x).shape == (8, 3, 48)
        assert fused.norm_linear(x, nn.RMSNorm(64, dtype=torch.bfloat16), layer).shape == (8, 3, 48)
        assert all(slot.pending is None for slot in layer_state.state_of(layer).slots.values())
        with pytest.raises(InvalidValueError, match=r"^x: "):
            layer(x[..., :32])


def test_what_backward_keeps_is_known_without_values() -> None:
    """A memory estimate sees codes and scales, as many bytes as a step with values saves."""
    sizes = []
    for device in ("cpu", "meta"):
        saved = []
        layer, x = mf.Linear(64, 48, recipe="mxfp8", device=device), torch.ones(32, 64, device=device)
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
            layer(x.requires_grad_())
        own = [tensor for tensor in saved if tensor.dtype != torch.float32]
        sizes.append(sorted((tensor.numel(), tensor.dtype.itemsize) for tensor in own))
    assert sizes[0] == sizes[1] != []


def test_verbs_on_the_meta_device() -> None:
    q = mf.quantize(torch.randn(8, 64, device="meta"), "nvfp4")
    assert q.codes.is_meta
    assert q.dequantize().shape == (8, 64)
    assert mf.scaled_matmul(q, q).shape == (8, 8)


# -------------------------------------------------------------------------------- transforms, tracing, DTensors


def _grad(layer: nn.Module) -> None:
    values = {name: value.detach() for name, value in layer.named_parameters()}
    torch.func.grad(lambda values: torch.func.functional_call(layer, values, (X,)).sum())(values)


def _forward_ad(layer: nn.Module) -> None:
    with forward_ad.dual_level():
        layer(forward_ad.make_dual(X, X))


def _batched_gradients(layer: nn.Module) -> None:
    x = X[0].clone().requires_grad_()
    torch.autograd.grad(layer(x), x, torch.eye(16), is_grads_batched=True)


TRANSFORMS = {
    "grad": _grad,
    "vmap": lambda layer: torch.vmap(layer)(X[:, None]),
    "jvp": lambda layer: torch.func.jvp(layer, (X,), (X,)),
    "jacrev": lambda layer: torch.func.jacrev(layer)(X[0]),
    "forward_ad": _forward_ad,
    "batched_gradients": _batched_gradients,
    "jacobian": lambda layer: torch.autograd.functional.jacobian(layer, X[0], vectorize=True),
    "trace": lambda layer: torch.jit.trace(nn.Sequential(layer), X),
    "script": lambda layer: torch.jit.script(nn.Sequential(layer)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_by_name(name: str) -> None:
    words = f"torch.jit.{name}" if name in ("trace", "script") else "torch.func.*autocast.enabled=False"
    with pytest.raises(NotSupportedError, match=words):
        TRANSFORMS[name](mf.Linear(64, 16, recipe="mxfp8"))


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("grad",))
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["grad", "vjp", "vmap"])
def test_transforms_in_compiled_code_are_refused_too(name: str) -> None:
    """Dynamo traces through them, and gradients of zero came out."""
    layer = mf.Linear(64, 16, recipe="mxfp8")
    function = {
        "grad": lambda x: torch.func.grad(lambda x: layer(x).sum())(x),
        "vjp": lambda x: torch.func.vjp(layer, x)[1](torch.ones(4, 16))[0],
        "vmap": lambda x: torch.vmap(layer)(x),
    }[name]
    try:
        with pytest.raises(NotSupportedError, match=r"torch\.func"):
            torch.compile(function, backend="eager")(X)
    finally:
        torch._dynamo.reset()  # which leaves a frame that raised alone from then on


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_nothing_inside_a_layer_is_compiled_after_an_error() -> None:
    """Dynamo leaves a frame alone that has raised, but not the functions that it calls."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    layer = mf.Linear(64, 16, recipe="mxfp8")
    compiled = torch.compile(layer, backend=backend)
    try:
        with pytest.raises(InvalidTypeError, match=r"^x: "):
            compiled(X.double())
        graphs.clear()
        assert torch.equal(compiled(X), layer(X))
        assert [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"] == []
    finally:
        torch._dynamo.reset()


def test_transforms_of_fused_layers_are_refused_too() -> None:
    norm, layer = nn.RMSNorm(64), mf.Linear(64, 16, recipe="mxfp8")
    with pytest.raises(NotSupportedError, match=r"torch\.func"):
        torch.func.grad(lambda x: fused.norm_linear(x, norm, layer).sum())(X)


def test_symbolic_tracing_says_how() -> None:
    with pytest.raises(InvalidTypeError, match=r"^x: .*is_leaf_module"):
        torch.fx.symbolic_trace(nn.Sequential(mf.Linear(64, 16, recipe="mxfp8")))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_transforms_of_high_precision_run() -> None:
    layer = mf.Linear(64, 16)
    for name, transform in TRANSFORMS.items():
        if name != "script":
            transform(layer)
    with forward_ad.dual_level():
        assert mf.Linear(64, 16, recipe="mxfp8")(X).shape == (4, 16)  # no tangent, nothing to lose
    with mf.quantized_model_init(recipe="mxfp8"):
        stored = mf.Linear(64, 16)  # which multiplies decoded codes in high precision
    for name in ("vmap", "forward_ad"):
        with pytest.raises(NotSupportedError, match=r"torch\.func"):
            TRANSFORMS[name](stored)


def test_dtensors_are_refused_by_name_where_no_plan_is() -> None:
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with world_of_one():
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(64, 16))
        plain = parallelize_module(model, mesh, {"0": ColwiseParallel()})(X)
        mf.convert(model, "mxfp8")
        whole = mf.Linear(64, 16, recipe="mxfp8")
        whole.load_state_dict({key: value.full_tensor() for key, value in model[0].state_dict().items()})
        assert torch.equal(model(X), whole(X))
        with mf.autocast(enabled=False):
            assert torch.equal(model(X), plain)
        with pytest.raises(InvalidTypeError, match=r"^x: got a DTensor.*parallelize_module"):
            whole(distribute_tensor(X, mesh))
        assert torch.equal(mf.quantize(distribute_tensor(X, mesh), "mxfp8").to_local(), mf.quantize(X, "mxfp8"))
        with pytest.raises(NotSupportedError, match=r"^quantize: got a pair of axes for a DTensor"):
            mf.quantize(distribute_tensor(X, mesh), "mxfp8", axis=(-1, -2))


def test_a_layer_with_stored_codes_refuses_an_input_of_codes_and_names_the_product_of_both() -> None:
    model = nn.Sequential(nn.Linear(64, 16))
    mf.quantize_(model, mf.WeightActivation("mxfp8"))
    q, words = mf.quantize(X, "mxfp8"), r"^x: got a QuantizedTensor.*functional\.linear\(x"
    with torch.no_grad(), pytest.raises(InvalidTypeError, match=words):
        model(q)
    assert nn.functional.linear(q, model[0].weight).shape == (*X.shape[:-1], 16)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_recipe_assigned_as_an_attribute_is_pinned() -> None:
    layer = mf.Linear(64, 16)
    layer.pinned = "mxfp8"
    assert layer.effective_recipe() == RECIPES["mxfp8"]()
    assert torch.compile(layer, backend="eager", fullgraph=True)(X).equal(layer(X))
    layer.pinned = None
    with mf.autocast(recipe="mxfp8"):
        assert layer.effective_recipe() is None
    for wrong in (3, "mxfp9"):
        with pytest.raises(MicrofloatError):
            layer.pinned = wrong


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own forward-mode AD uses it
def test_quantize_drops_no_tangent() -> None:
    """Forward-mode AD over `quantize` is refused by name; beside a dual tensor, a plain one is quantized."""
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(4, 64), torch.randn(4, 64))
        with pytest.raises(NotSupportedError, match=r"quantize: got .*forward-mode AD"):
            mf.quantize(x, "mxfp8")
        assert mf.quantize(torch.randn(4, 64), "mxfp8").shape == (4, 64)
