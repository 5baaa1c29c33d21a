"""Options of the modules: biases that are returned, weights that are drawn otherwise, packed contexts."""

import copy
import dataclasses
import functools
import inspect

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError  # noqa: E402
from microfloat.recipes import RECIPES  # noqa: E402
from microfloat.torch.nn.functional import norm_linear  # noqa: E402
from microfloat.torch.nn.sdpa import attend  # noqa: E402

BF16 = {"dtype": torch.bfloat16}
NAMES = list(RECIPES)
RETURNED = mf.LayerOptions(return_bias=True)
# What torch says of its own code: Dynamo instantiates every autograd Function that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
SIZES = [3, 0, 7]  # rows of experts


# Each with the place of its bias, the parameter that a call leaves to the caller.
def made(kind, *sizes, recipe=None, split=None, activation=None, bias=None, **settings):
    """A module with settings as options."""
    given = {"recipe": recipe, "split": split, "activation": activation, "bias": bias}
    given = {name: value for name, value in given.items() if value is not None}
    return kind(*sizes, **given, **BF16, options=mf.LayerOptions(**settings))


MODULES = {
    "linear": (lambda **o: mf.Linear(32, 48, **BF16, **o), ["bias"]),
    "norm_linear": (lambda **o: made(mf.LayerNormLinear, 32, 48, **o), ["linear.bias"]),
    "split": (lambda **o: made(mf.LayerNormLinear, 32, 48, split={"a": 32, "b": 16}, **o), ["a.bias", "b.bias"]),
    "mlp": (lambda **o: made(mf.LayerNormMLP, 32, 48, activation="swiglu", **o), ["down_proj.bias"]),
    "attention": (lambda **o: made(mf.MultiheadAttention, 32, 4, 2, bias=True, **o), ["o_proj.bias"]),
    "experts": (lambda **o: mf.GroupedLinear(3, 32, 48, bias=True, **BF16, **o), ["bias"]),
}  # fmt: skip


def _inputs(kind):
    x = torch.randn(1, 10, 32, **BF16)
    return (x[0], SIZES) if kind == "experts" else (x,)


def _added(kind, y, bias):
    """y and the bias that a module has returned beside it."""
    if kind == "experts":
        return y + bias.repeat_interleave(torch.tensor(SIZES), 0)
    return y + bias


def _step(module, kind, inputs, bias_of=None):
    """y without and with its bias, and the gradients of x and of all parameters by name."""
    leaf = inputs[0].clone().requires_grad_()
    torch.manual_seed(1)
    y = module(leaf, *inputs[1:])
    y, bias = y if bias_of is None else (y, bias_of())
    z = _added(kind, y, bias)
    (z.float() * torch.linspace(-1, 1, z.numel()).view(z.shape)).sum().backward()
    return y.detach(), z.detach(), leaf.grad, {name: one.grad for name, one in module.named_parameters()}


# ------------------------------------------------------------------------------------------------- returned biases


@pytest.mark.slow_cases("further modules and recipes", cases=("*-mxfp6", "*-mxfp4", "*-fp8_row", "*-fp8_block"))
@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("kind", list(MODULES))
def test_a_returned_bias_is_that_of_the_module(kind, name):
    """The bits of the same module without this bias, to which somebody adds it."""
    torch.manual_seed(0)
    make, places = MODULES[kind]
    module, without = make(return_bias=True, recipe=name), make(recipe=name)
    without.load_state_dict(module.state_dict())
    removed = []
    for place in places:
        owner = without.get_submodule(place.rpartition(".")[0])
        removed.append(owner.bias)
        owner.bias = None
    inputs = _inputs(kind)
    y, z, dx, gradients = _step(module, kind, inputs)
    want_y, want_z, want_dx, wanted = _step(without, kind, inputs, lambda: torch.cat(removed))
    assert torch.equal(y, want_y)
    assert torch.equal(z, want_z)
    assert torch.equal(dx, want_dx)
    found = {place: gradients.pop(place) for place in places}
    assert all(torch.equal(grad, one.grad) for grad, one in zip(found.values(), removed, strict=True))
    assert gradients.keys() == wanted.keys()
    assert all(torch.equal(grad, wanted[key]) for key, grad in gradients.items())


@pytest.mark.parametrize("kind", list(MODULES))
def test_a_returned_bias_adds_up_to_the_output(kind):
    torch.manual_seed(0)
    make, _ = MODULES[kind]
    module, adding = make(return_bias=True, recipe="mxfp8"), make(recipe="mxfp8")
    adding.load_state_dict(module.state_dict())
    inputs = _inputs(kind)
    y = _added(kind, *module(*inputs))
    # Rounded to bfloat16 before and after the sum, where the product rounds the sum alone.
    torch.testing.assert_close(y, adding(*inputs), rtol=2**-7, atol=2**-8 * float(y.detach().abs().max()))
    for layer in module.modules():
        if "return_bias=True" in repr(layer):
            return
    pytest.fail("no repr tells of it")


def test_order_of_what_is_returned():
    x = torch.randn(3, 16)
    for module, bias in (
        (mf.LayerNormLinear(16, 8, return_norm_output=True, options=RETURNED), "linear.bias"),
        (mf.LayerNormMLP(16, 8, return_norm_output=True, options=RETURNED), "down_proj.bias"),
    ):
        _, returned, value = module(x)
        assert returned is module.get_parameter(bias)
        assert torch.equal(value, module.norm(x))
    y, bias = mf.Linear(16, 8, bias=False, return_bias=True)(x)
    assert y.shape == (3, 8)
    assert bias is None
    assert mf.LayerNormLinear(16, 8, False, split={"a": 4, "b": 4}, options=RETURNED)(x)[1] is None


@pytest.mark.parametrize("name", [None, "fp8_current"])
def test_a_returned_bias_has_the_dtype_of_the_output(name):
    layer, x = mf.Linear(16, 8, return_bias=True, recipe=name), torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y, bias = layer(x)
    assert y.dtype == bias.dtype == torch.bfloat16
    (y + bias).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((8,), 4.0))


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_a_returned_bias_and_recomputation(name):
    torch.manual_seed(0)
    module = mf.LayerNormMLP(32, 48, options=RETURNED, **BF16)
    again = copy.deepcopy(module)
    x = torch.randn(6, 32, **BF16)
    results = []
    for run in (module, functools.partial(mf.checkpoint, again)):
        torch.manual_seed(1)
        with mf.autocast(recipe=name):
            y, bias = run(x)
            (y + bias).float().square().sum().backward()
        results.append(y)
    assert torch.equal(*results)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), again.parameters(), strict=True))


@pytest.mark.slow_cases("further programs of torch.compile", all_but=("fp8_row",))
@pytest.mark.parametrize("name", [None, "fp8_row"])
def test_a_returned_bias_in_compiled_code(name):
    torch._dynamo.reset()
    module, x = mf.LayerNormLinear(32, 48, split={"a": 32, "b": 16}, options=RETURNED), torch.randn(3, 32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with mf.autocast(enabled=name is not None, recipe=name):
        (y, bias), (want, want_bias) = compiled(x), module(x)
    torch.testing.assert_close(y, want)
    assert torch.equal(bias, want_bias)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # read by Dynamo
def test_a_returned_bias_of_a_layer_between_compiled_graphs():
    torch._dynamo.reset()
    layer, x = mf.Linear(32, 16, return_bias=True, recipe="mxfp8", fuse_wgrad_accumulation=True), torch.randn(3, 32)
    layer.weight.main_grad = torch.zeros(16, 32)
    for run in (layer, torch.compile(layer, backend="aot_eager")):
        y, bias = run(x)
        (y + bias).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((16,), 6.0))
    assert layer.weight.main_grad.any()
    torch._dynamo.reset()


def test_a_layer_that_returns_its_bias_is_not_reverted():
    module = mf.LayerNormLinear(16, 8, options=RETURNED, recipe="mxfp8")
    x = torch.randn(3, 16)
    with pytest.warns(UserWarning, match="they return their bias: linear"):
        mf.revert(module)
    y, bias = module(x)
    torch.testing.assert_close(y + bias, F.linear(module.norm(x), module.linear.weight, module.linear.bias))


def test_a_part_in_the_place_of_one_that_returns_its_bias_adds_its_own():
    x = torch.randn(3, 16)
    module = mf.LayerNormLinear(16, 8, split={"a": 4, "b": 4}, options=RETURNED)
    module.a = nn.Linear(16, 4)
    y, bias = module(x)
    assert torch.equal(bias, torch.cat([torch.zeros(4), module.b.bias]))
    torch.testing.assert_close((y + bias)[:, :4], module.a(module.norm(x)))
    module.b = nn.Linear(16, 4)
    assert module(x)[1] is None


def test_functions_refuse_layers_that_return_their_bias():
    layer = mf.Linear(16, 8, return_bias=True, recipe="mxfp8")
    with pytest.raises(InvalidValueError, match="layers: got a Linear with return_bias=True"):
        norm_linear(torch.ones(2, 16), nn.RMSNorm(16), layer)
    model = nn.Sequential(nn.GELU(), layer)
    mf.convert(model, "mxfp8", fuse=True)
    y, bias = model(torch.randn(2, 16))
    assert y.shape == (2, 8)
    assert bias is layer.bias


def test_a_watched_layer_that_returns_its_bias_is_measured_without_it():
    layer = mf.Linear(32, 32, return_bias=True, recipe="mxfp8", **BF16)
    with torch.no_grad():
        layer.bias.fill_(100.0)
    with mf.watch(layer, every=1) as w:
        y, bias = layer(torch.randn(8, 32, **BF16))
        (y + bias).sum().backward()
    (error,) = (one.value for one in w.records if one.operand == "y" and one.metric == "relative_error")
    assert error < 0.1  # that of MXFP8, where the bias would make it 100 / |y|


# --------------------------------------------------------------------------------------------------- drawn weights


def _twos(weight):
    weight.fill_(2.0)


def _threes(weight):
    nn.init.constant_(weight, 3.0)


@pytest.mark.parametrize("kind", [*MODULES, "layer"])
def test_weights_are_drawn_by_init_method(kind):
    options = {"init_method": _twos, "recipe": "mxfp8"}
    has_output = kind in ("mlp", "attention", "layer")
    if has_output:
        options["output_layer_init_method"] = _threes
    if kind == "layer":
        module = made(mf.TransformerLayer, 32, 48, 4, cross_attention=True, bias=True, **options)
    else:
        module = MODULES[kind][0](**options)
    for _ in range(2):
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                last = has_output and ("o_proj" in name or "down_proj" in name)
                want = 0.0 if name.endswith("bias") else 3.0 if last else 2.0
                assert bool((parameter == want).all()), name
            parameter.data.fill_(0.5)
        module.reset_parameters()
    assert copy.deepcopy(module).state_dict().keys() == module.state_dict().keys()


def test_each_expert_is_drawn_by_itself():
    shapes = []
    mf.GroupedLinear(3, 8, 4, init_method=lambda weight: shapes.append(tuple(weight.shape)))
    assert shapes == [(4, 8)] * 3


def test_draws_of_weights_without_values_and_of_codes():
    layer = mf.Linear(32, 16, init_method=nn.init.orthogonal_, device="meta")
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(layer.weight, nn.init.orthogonal_(torch.empty(16, 32)))
    assert not layer.bias.any()
    with mf.quantized_model_init(recipe="mxfp8", preserve_high_precision_init_val=True):
        stored = mf.Linear(32, 16, init_method=nn.init.orthogonal_)
    for _ in range(2):  # no function of torch draws an orthogonal matrix into codes
        first = stored.weight.get_high_precision_init_val()
        torch.testing.assert_close(first @ first.T, torch.eye(16), rtol=0, atol=1e-5)
        assert torch.equal(stored.weight.dequantize(), mf.quantize(first, stored.weight.cast).dequantize())
        stored.reset_parameters()


def test_parameters_of_an_activation():
    torch.manual_seed(0)
    parameters = {"limit": 0.5, "alpha": 1.0, "glu_linear_offset": 0.25}
    options = mf.LayerOptions(activation_params=parameters)
    module = mf.LayerNormMLP(16, 24, activation="clamped_swiglu", options=options)
    x = torch.randn(5, 16)
    h = module.norm(x)
    g, u = module.gate_proj(h).clamp(max=0.5), module.up_proj(h).clamp(-0.5, 0.5)
    torch.testing.assert_close(module(x), module.down_proj(F.silu(g) * (u + 0.25)))
    layer = mf.TransformerLayer(16, 24, 2, activation="clamped_swiglu", options=options)
    assert layer.mlp.activation_params == parameters


# ------------------------------------------------------------------------------------------------ packed sequences


@pytest.mark.parametrize("name", [None, "fp8_row"])
def test_packed_sequences_see_their_own_context(name):
    torch.manual_seed(0)
    layer = mf.TransformerLayer(32, 48, 4, 2, recipe=name, options=mf.LayerOptions(cross_attention=True))
    x, context, ends = torch.randn(11, 32), torch.randn(11, 32), torch.tensor([0, 4, 11])
    leaf = context.clone().requires_grad_()
    y = layer(x, context=leaf, cu_seqlens=ends)
    assert torch.equal(y, layer(x, context=leaf, max_seqlen=7, cu_seqlens=ends))
    pairs = [(x[:4], context[:4]), (x[4:], context[4:])]
    apart = torch.cat([layer(part[None], context=of[None])[0] for part, of in pairs])
    torch.testing.assert_close(y, apart, rtol=1e-4, atol=1e-5)
    y[:4].sum().backward()
    assert not leaf.grad[4:].any()
    with pytest.raises(InvalidValueError, match=r"context: got shape \(9, 32\) beside cu_seqlens"):
        layer(x, context=context[:9], cu_seqlens=ends)
    with pytest.raises(InvalidValueError, match="max_seqlen: got 6, needed at least 7"):
        layer(x, context=context, max_seqlen=6, cu_seqlens=ends)


def test_compiled_attention_is_told_the_longest_sequence():
    torch.manual_seed(0)
    q, offsets = torch.randn(1, 11, 2, 8), torch.tensor([0, 4, 11])

    def packed(q: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return attend(q, q, q, cu_seqlens=offsets, max_seqlen=7)

    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, offsets), packed(q, offsets))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: mf.Linear(4, 4, return_bias="yes"), "return_bias: got str"),
        (lambda: mf.Linear(4, 4, init_method=0.02), "init_method: got float"),
        (lambda: made(mf.TransformerLayer, 8, 8, 2, output_layer_init_method="xavier"), "init_method: got str"),
        (lambda: made(mf.LayerNormMLP, 8, 8, activation_params={"limit": 7.0}), "activation_params.*'gelu'"),
        (
            lambda: made(mf.LayerNormMLP, 8, 8, activation="clamped_swiglu", activation_params={"beta": 1}),
            "activation_params: got 'beta'",
        ),
        (
            lambda: made(mf.LayerNormMLP, 8, 8, activation="clamped_swiglu", activation_params={"limit": -1}),
            r"activation_params\['limit'\]: got -1",
        ),
        (
            lambda: attend(*(torch.ones(1, n, 2, 8) for n in (3, 4, 4)), cu_seqlens=torch.tensor([0, 3])),
            "cu_seqlens: got 4 keys beside cu_seqlens, needed 3, .*varlen_attn",
        ),
    ],
)  # fmt: skip
def test_errors_name_the_argument(make, match):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=match):
        make()


# ---------------------------------------------------------------------------------------------------- LayerOptions


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"])
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(mf.LayerOptions)])
def test_a_keyword_that_moved_is_told_where(kind, name):
    if name in inspect.signature(getattr(mf, kind)).parameters:
        return
    needed = rf"{name}: got a keyword that {kind} does not .* needed options=LayerOptions\({name}=\.\.\.\)"
    with pytest.raises(TypeError, match=needed):
        getattr(mf, kind)(16, 2, 2, **{name: None})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: mf.Linear(8, 8, delay_wgrad_compute=True), "delay_wgrad_compute.*two halves.*training.md"),
        (lambda: mf.GroupedLinear(2, 8, 8, delay_wgrad_compute=True), "a keyword that GroupedLinear does not have"),
        (lambda: mf.MultiheadAttention(8, 2, softmax_type="learnable"), "softmax_type: .* as attention="),
        (lambda: mf.TransformerLayer(8, 8, 2, drop_path_rate=0.1), "drop_path_rate: .*a layer of your own"),
        (lambda: mf.TransformerLayer(8, 8, 2, output_layernorm=True), "output_layernorm: .*migration.md"),
        (lambda: mf.TransformerLayer(8, 8, 2, hidden_dropuot=0.1), "unexpected keyword argument 'hidden_dropuot'"),
        (lambda: mf.TransformerLayer(8, 8, 2, options={"dropout": 0.1}), "options: got dict, needed a .*LayerOptions"),
    ],
)
def test_a_keyword_that_went_is_told_what_to_write(make, match):
    with pytest.raises(TypeError, match=match):
        make()


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("LayerNormLinear", {"hidden_dropout": 0.5}), ("LayerNormMLP", {"interleaved": True}),
        ("MultiheadAttention", {"cross_attention": True}), ("TransformerLayer", {"return_bias": True}),
    ],
)  # fmt: skip
def test_a_setting_of_another_module_is_refused(kind, setting):
    ((name, value),) = setting.items()
    with pytest.raises(InvalidValueError, match=f"options: got {name}={value} for a {kind}, needed settings of it"):
        getattr(mf, kind)(16, 2, 2, options=mf.LayerOptions(**setting))


def test_a_layer_gives_its_settings_to_its_parts():
    options = mf.LayerOptions(
        backend="reference", fuse_wgrad_accumulation=True, zero_centered_gamma=True, head_dim=16, out_bias=True,
        mlp_bias=False, dropout=0.25, interleaved=True, cross_attention=True, parallel=True,
    )  # fmt: skip
    layer = mf.TransformerLayer(32, 48, 4, 2, options=options)
    for attention in (layer.self_attn, layer.cross_attn):
        assert (attention.head_dim, attention.dropout, attention.interleaved) == (16, 0.25, True)
        assert attention.o_proj.bias is not None
        assert attention.q_proj.bias is None
    assert layer.mlp.up_proj.bias is None
    assert layer.parallel
    assert layer.input_layernorm.zero_centered_gamma
    linears = [one for one in layer.modules() if isinstance(one, mf.Linear)]
    assert len(linears) == 11
    assert all(one.backend == "reference" and one.fuse_wgrad_accumulation for one in linears)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.dropout = 0.5
