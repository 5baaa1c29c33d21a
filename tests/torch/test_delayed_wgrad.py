"""`delay_wgrad_compute`, by which wgrad waits in the layer until `backward_dw`."""

import copy
import inspect

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, NotSupportedError  # noqa: E402

MAKES = {
    "linear": lambda **o: mf.Linear(32, 48, **o),
    "joint": lambda **o: mf.LayerNormLinear(32, 48, split={"q": 32, "k": 16}, **o),
    "mlp": lambda **o: mf.LayerNormMLP(32, 48, activation="swiglu", recompute=True, **o),
    "layer": lambda **o: mf.TransformerLayer(32, 48, 4, 2, **o),
    "experts": lambda **o: mf.GroupedLinear(3, 32, 48, bias=True, **o),
}


def call(module, x, **options):
    return module(x.flatten(0, 1), [4, 0, 6], **options) if isinstance(module, mf.GroupedLinear) else module(x)


def gradients(kind, recipe, delays, adds=False):
    """dx of two microbatches, then every parameter's gradient or main_grad."""
    torch.manual_seed(0)
    module = MAKES[kind](recipe=recipe, delay_wgrad_compute=delays, fuse_wgrad_accumulation=adds)
    layers = [one for one in module.modules() if hasattr(one, "delay_wgrad_compute")]
    for layer in layers if adds else ():
        layer.weight.main_grad = torch.ones_like(layer.weight, dtype=torch.float32)
    inputs = torch.randn(2, 2, 5, 32).requires_grad_()
    for x in inputs:
        call(module, x).square().sum().backward()
    if delays:
        assert all(layer.weight.grad is None for layer in layers)
        assert all((layer.weight.main_grad == 1).all() for layer in layers if adds)
        for _ in inputs:
            mf.backward_dw(module)
    return [inputs.grad, *(getattr(one, "main_grad", one.grad) for one in module.parameters())]


@pytest.mark.parametrize(
    ("kind", "recipe", "adds"),
    [
        ("linear", "nvfp4", False), ("linear", "delayed", True), ("linear", None, False), ("joint", "mxfp8", False),
        ("joint", "fp8_current", True), ("mlp", "mxfp8", False), ("layer", "delayed", False), ("layer", "nvfp4", False),
        ("experts", "mxfp8", False), ("experts", "nvfp4", True), ("experts", None, False),
    ],
)  # fmt: skip
def test_the_gradients_are_those_of_backward(kind, recipe, adds):
    for at_once, later in zip(gradients(kind, recipe, False, adds), gradients(kind, recipe, True, adds), strict=True):
        assert torch.equal(at_once, later)


def test_each_call_takes_the_oldest_of_every_layer():
    """As a pipeline asks for it; and the codes of the weight are kept over microbatches all the same."""
    layer = mf.Linear(32, 48, recipe="nvfp4", delay_wgrad_compute=True)
    for index in range(2):
        layer(torch.full((16, 32), 1.0 + index), is_first_microbatch=index == 0).sum().backward()
    kept = layer._weight_cache._entry
    assert kept is not None
    assert kept[0][0]() is layer.weight
    means = []
    for _ in range(3):  # the third finds nothing
        mf.backward_dw(layer)
        means.append(layer.weight.grad.mean().item())
    assert means == pytest.approx([16, 48, 48], rel=0.05)


@pytest.mark.parametrize("changed", ["x", "dy"])
def test_a_change_in_place_of_what_wgrad_reads_is_named(changed):
    """Autograd sees it until backward; in high precision x and dy are read later than that."""
    layer = mf.Linear(32, 48, delay_wgrad_compute=True)
    tensors = {"x": torch.ones(8, 32), "dy": torch.ones(8, 48)}
    layer(tensors["x"]).backward(tensors["dy"])
    with torch.no_grad():
        layer.weight.mul_(2)  # dw does not read it
    tensors[changed].zero_()
    with pytest.raises(NotSupportedError, match="backward_dw: got an x or dy that was written to in place"):
        mf.backward_dw(layer)
    quantized = mf.Linear(32, 48, recipe="mxfp8", delay_wgrad_compute=True)  # has codes of its own
    quantized(tensors["x"].fill_(1)).backward(tensors["dy"].fill_(1))
    tensors[changed].zero_()
    mf.backward_dw(quantized)
    assert (quantized.weight.grad == 8).all()


def test_experts_keep_only_what_wgrad_reads():
    experts = mf.GroupedLinear(2, 32, 48, delay_wgrad_compute=True)
    experts(torch.ones(8, 32, requires_grad=True), [3, 5]).sum().backward()
    _, add = experts._waiting[0]
    read = inspect.getclosurevars(inspect.getclosurevars(add).nonlocals["multiply"]).nonlocals
    for name, first in (("dy", 1), ("kept", 0)):  # six parts of each expert: row and column operand, or x and w
        parts = read[name][first:]
        assert sum(part is not None for part in parts) == experts.num_groups
    with torch.no_grad():
        experts.weight.mul_(2)  # an operand of dgrad alone
    mf.backward_dw(experts)
    assert [part.unique().item() for part in experts.weight.grad] == [3, 5]


def test_one_call_takes_all_calls_of_a_layer_in_a_backward():
    gradients = []
    for delays in (False, True):
        torch.manual_seed(0)
        layer, x = mf.Linear(32, 32, recipe="mxfp8", delay_wgrad_compute=delays), torch.randn(8, 32)
        layer(layer(x)).sum().backward()
        mf.backward_dw(layer)
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)


def test_a_step_that_is_given_up_leaves_nothing():
    """Of all its backwards; the gradients of the steps before stay, and those of the next one are its own."""
    module = mf.LayerNormMLP(32, 48, recipe="mxfp8", delay_wgrad_compute=True)
    weights = [one.weight for one in module.modules() if hasattr(one, "delay_wgrad_compute")]
    x = torch.randn(3, 8, 32)
    module(x[0]).sum().backward()
    mf.backward_dw(module)
    wanted = [one.grad.clone() for one in weights]
    for other in x[1:]:
        module(other).sum().backward()
    mf.backward_dw(module, drop=True)
    mf.backward_dw(module)
    assert all(map(torch.equal, wanted, (one.grad for one in weights)))
    module.zero_grad()
    module(x[0]).sum().backward()
    mf.backward_dw(module)
    assert all(map(torch.equal, wanted, (one.grad for one in weights)))
    with pytest.raises(InvalidTypeError, match="drop"):
        mf.backward_dw(module, drop=1)


def test_parts_of_a_joint_layer_may_differ():
    module = mf.LayerNormLinear(32, 48, split={"q": 32, "k": 16}, recipe="mxfp8")
    module.q.delay_wgrad_compute = True
    module(torch.randn(2, 32)).sum().backward()
    assert module.q.weight.grad is None
    assert module.k.weight.grad is not None
    mf.backward_dw(module)
    assert module.q.weight.grad is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # read by Dynamo
@pytest.mark.parametrize("joint", [False, True])
def test_compiled_code_leaves_it_to_eager_mode(joint):
    options = {"recipe": "mxfp8", "delay_wgrad_compute": True}
    layer = mf.LayerNormLinear(32, 48, split={"q": 32, "k": 16}, **options) if joint else mf.Linear(32, 48, **options)
    weight, x = (layer.q if joint else layer).weight, torch.randn(8, 32)
    torch._dynamo.reset()
    torch.compile(layer, backend="aot_eager")(x).sum().backward()
    assert weight.grad is None
    mf.backward_dw(layer)
    assert weight.grad.any()


def test_hooks_see_the_gradient_when_it_is_there():
    with mf.quantized_model_init(recipe="mxfp8"):
        stored = mf.Linear(32, 48, recipe="mxfp8", delay_wgrad_compute=True)
    for layer in (mf.Linear(32, 48, recipe="mxfp8", delay_wgrad_compute=True), stored):
        seen = []
        layer.weight.register_post_accumulate_grad_hook(lambda weight, seen=seen: seen.append(weight.grad.shape))
        layer(torch.randn(8, 32)).sum().backward()
        assert seen == []
        assert layer.bias.grad is not None
        mf.backward_dw(layer)
        assert seen == [(48, 32)]


def test_what_waits_stays_out_of_copies_and_of_what_revert_leaves():
    model = torch.nn.Sequential(mf.Linear(32, 48, recipe="mxfp8", delay_wgrad_compute=True))
    model(torch.randn(8, 32)).sum().backward()
    other = copy.deepcopy(model)
    mf.backward_dw(other)
    assert other[0].delay_wgrad_compute
    assert other[0].weight.grad is None
    assert model[0].weight.grad is None
    assert "delay_wgrad_compute=True" in repr(model)
    mf.revert(model)
    assert not {"_waiting", "delay_wgrad_compute"} & set(vars(model[0]))


def test_what_cannot_wait_is_named():
    layer = mf.Linear(32, 48, recipe="mxfp8", delay_wgrad_compute=True)
    torch.nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(NotSupportedError, match=r"delay_wgrad_compute: .*parametrization"):
        layer(torch.randn(8, 32))
    with pytest.raises(InvalidTypeError, match="delay_wgrad_compute: got int"):
        mf.GroupedLinear(2, 32, 48, delay_wgrad_compute=1)
    with pytest.raises(InvalidTypeError, match="model: got"):
        mf.backward_dw(layer.weight)


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("adds", [False, True])
def test_a_call_without_rows_waits_too(kind, adds):
    """Hooks of the weight were told in backward, and each later call of `backward_dw` took one backward too early."""
    module, told = MAKES[kind](recipe="mxfp8", delay_wgrad_compute=True, fuse_wgrad_accumulation=adds), []
    weights = [one.weight for one in module.modules() if hasattr(one, "delay_wgrad_compute")]
    for weight in weights:
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
        weight.register_post_accumulate_grad_hook(lambda weight: told.append(weight))
    x = torch.randn(0, 32) if kind != "layer" else torch.randn(0, 4, 32)
    y = module(x, [0, 0, 0]) if kind == "experts" else module(x)
    y.sum().backward()
    assert not told
    assert all(weight.grad is None for weight in weights)
    mf.backward_dw(module)
    assert len(told) == (0 if adds else len(weights))
    assert all(weight.grad is None if adds else not weight.grad.any() for weight in weights)
    assert all((weight.main_grad == 1).all() for weight in weights)


def test_a_first_microbatch_without_rows_overwrites_later():
    layer = mf.Linear(32, 48, recipe="mxfp8", delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.ones_like(layer.weight)
    layer(torch.randn(0, 32), is_first_microbatch=True).sum().backward()
    assert layer.weight.main_grad.all()
    mf.backward_dw(layer)
    assert not layer.weight.main_grad.any()


def test_a_watch_sees_the_result_of_a_delayed_wgrad():
    model = torch.nn.Sequential(mf.Linear(32, 48, recipe="mxfp8", delay_wgrad_compute=True))
    with mf.watch(model, every=1) as watched:
        model(torch.randn(8, 32, requires_grad=True)).sum().backward()
        mf.backward_dw(model)
    assert {record.gemm for record in watched.records if record.operand == "dw"} == {"wgrad"}
