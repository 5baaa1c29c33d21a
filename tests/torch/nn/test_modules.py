"""Modules that are compositions: the values of their parts, the keys of their plain equivalents, every recipe."""

import copy
import io
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.recipes import RECIPES  # noqa: E402
from microfloat.torch.linear import schedule  # noqa: E402
from microfloat.torch.nn import merged as joined  # noqa: E402
from microfloat.torch.nn import sdpa as attention  # noqa: E402
from microfloat.torch.nn.fused import ACTIVATIONS, clamped_swiglu  # noqa: E402

BF16 = {"dtype": torch.bfloat16}
NAMES = list(RECIPES)
# What torch says of its own code: Dynamo instantiates every autograd Function that it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _relative(got, want):
    return float(((got - want).float().norm() / want.float().norm()).detach())


def _step(module, *inputs, seed=0, lowest=-1.0, **options):
    """y and the gradients of the first input and of all parameters, of a sum of y with weights from `lowest` to 1."""
    leaf = inputs[0].detach().clone().requires_grad_()
    torch.manual_seed(seed)
    y = module(leaf, *inputs[1:], **options)
    first = y[0] if isinstance(y, tuple) else y
    weights = torch.linspace(lowest, 1, first.numel()).reshape(first.shape)
    wanted = [leaf, *module.parameters()]
    return first.detach(), *torch.autograd.grad((first.float() * weights).sum(), wanted)


# ---------------------------------------------------------------------------------------------------------- functional


@pytest.mark.parametrize("name", [name for name in NAMES if name != "delayed"])
def test_linear_is_a_layers_call(name):
    torch.manual_seed(0)
    layer, x = mf.Linear(40, 24, recipe=name, **BF16), torch.randn(3, 5, 40, **BF16)
    want = _step(layer, x)
    got = _step(_Functional(layer, name), x)
    ambient = _Functional(layer, None)
    with mf.autocast(recipe=name):
        inside = _step(ambient, x)
    for one in (got, inside):
        assert all(torch.equal(a, b) for a, b in zip(one, want, strict=True))
    plain = F.linear(x, layer.weight, layer.bias)
    assert torch.equal(ambient(x), plain)
    with mf.autocast(enabled=False):
        assert torch.equal(_Functional(layer, name)(x), plain)


class _Functional(nn.Module):
    """A module of a user's own that joins an autocast."""

    def __init__(self, layer, recipe):
        super().__init__()
        self.weight, self.bias, self.recipe = layer.weight, layer.bias, recipe

    def forward(self, x):
        return mf.linear(x, self.weight, self.bias, recipe=self.recipe)


def test_linear_refuses_delayed_scaling_and_bad_operands():
    x, w = torch.ones(2, 4), torch.ones(3, 4)
    with pytest.raises(NotSupportedError, match="delayed scaling"):
        mf.linear(x, w, recipe="delayed")
    with pytest.raises(InvalidValueError, match="in_features = 4"):
        mf.linear(torch.ones(2, 5), w, recipe="mxfp8")
    with pytest.raises(InvalidTypeError, match="weight"):
        mf.linear(x, w.double(), recipe="mxfp8")


def test_queries_of_the_autocast():
    assert mf.get_autocast_recipe() is None
    assert not mf.is_autocast_enabled()
    with mf.autocast(recipe="nvfp4"):
        assert mf.get_autocast_recipe() == mf.recipes.from_name("nvfp4")
        assert mf.is_autocast_enabled()
        with mf.autocast(enabled=False):
            assert mf.get_autocast_recipe() is None
            assert not mf.is_autocast_enabled()


@pytest.mark.slow("further programs of a checked kind")
def test_linear_and_queries_in_compiled_code(fresh_compiler):
    w = torch.randn(8, 16)

    @torch.compile(fullgraph=True, backend="eager")
    def run(x):
        return mf.linear(x, w), mf.get_autocast_recipe() is None, mf.linear(x, w, recipe="fp8_row")

    x = torch.randn(4, 16)
    for name in ("mxfp8", "fp8_current"):
        with mf.autocast(recipe=name):
            y, is_plain, row = run(x)
        assert torch.equal(y, mf.linear(x, w, recipe=name))
        assert not is_plain
        assert torch.equal(row, mf.linear(x, w, recipe="fp8_row"))
    assert run(x)[1]


# ---------------------------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize(("ours", "plain"), [(mf.LayerNorm, nn.LayerNorm), (mf.RMSNorm, nn.RMSNorm)])
def test_norms_are_those_of_torch(ours, plain):  # features M6
    a, b = ours(24), plain(24)
    nn.init.normal_(b.weight)
    a.load_state_dict(b.state_dict())
    b.load_state_dict(a.state_dict())
    x = torch.randn(3, 24)
    assert torch.equal(a(x), b(x))
    centred = ours(24, zero_centered_gamma=True)
    assert not centred.weight.any()
    with torch.no_grad():
        centred.weight.copy_(b.weight - 1)
    assert torch.allclose(centred(x), b(x), atol=1e-6)
    assert centred(x.bfloat16()).dtype == torch.bfloat16
    assert "zero_centered_gamma" in repr(centred)


# ------------------------------------------------------------------------------------------------------- fused modules


@pytest.mark.parametrize("kind", [mf.LayerNorm, mf.RMSNorm])
@pytest.mark.parametrize(
    ("of_input", "of_weights"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_norms_take_parameters_of_another_dtype(kind, of_input, of_weights):
    norm, x = kind(48, eps=1e-5, dtype=of_weights), torch.randn(5, 48, dtype=of_input, requires_grad=True)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    y = norm(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, norm.weight.grad.dtype) == (of_input, of_input, of_weights)
    torch.testing.assert_close(y, copy.deepcopy(norm).float()(x.float()).to(of_input))
    layer = mf.LayerNormLinear(48, 32, normalization=kind.__name__, dtype=of_weights)
    with mf.autocast(enabled=False):
        assert layer(x).dtype == of_input


@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("split", [None, {"q_proj": 24, "k_proj": 8, "v_proj": 8}], ids=["whole", "split"])
def test_layer_norm_linear_is_its_parts(name, split):  # features M5
    torch.manual_seed(0)
    module = mf.LayerNormLinear(48, 40, normalization="RMSNorm", split=split, recipe=name, **BF16)
    x = torch.randn(2, 10, 48, **BF16)
    y, dx, *grads = _step(module, x)
    keys = [f"{part}.{kind}" for part in (split or {"linear": 0}) for kind in ("weight", "bias")]
    recipe = RECIPES[name]() if name else None
    assert list(module.state_dict())[: 1 + len(keys)] == ["norm.weight", *keys] or recipe.is_delayed
    parts = [F.linear(module.norm(x), layer.weight, layer.bias) for layer in module.layers]
    # A block of E2M1 is off by 0.1 of its values in the mean square; all others by less.
    bits = recipe.fprop.lhs.format.element.bits if name else 0
    assert _relative(y, torch.cat(parts, -1)) < (0.25 if bits == 4 else 0.12 if name else 1e-6)
    assert [tuple(g.shape) for g in grads] == [tuple(p.shape) for p in module.parameters()]
    assert dx.shape == x.shape


@pytest.mark.parametrize("name", ["fp8_row", "fp8_block", "mxfp8", "mxfp4"])
def test_a_joint_product_has_the_bits_of_its_parts(name):
    """Scales of these recipes do not span the rows of a weight, so that joining changes no code of x and w."""
    torch.manual_seed(0)
    sizes = {"q": 128, "k": 128, "v": 256}
    whole = mf.LayerNormLinear(64, 512, False, normalization="RMSNorm", split=sizes, recipe=name, **BF16)
    apart = copy.deepcopy(whole)
    apart.k.register_forward_hook(lambda *arguments: None)  # a layer that somebody listens to runs by itself
    x = torch.randn(33, 64, **BF16)
    a, b = _step(whole, x), _step(apart, x)
    assert torch.equal(a[0], b[0])
    for got, want in zip(a[2:], b[2:], strict=True):
        assert _relative(got, want) < 0.01
    assert _relative(a[1], b[1]) < 0.01  # the sum over N is one product instead of three


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("delayed",))
@pytest.mark.parametrize("name", ["fp8_current", "nvfp4", "delayed"])
def test_where_weights_lie_changes_no_bit(name):
    """Copies, weights that were moved apart, and compiled code run the one product too."""
    torch.manual_seed(0)
    module = mf.LayerNormLinear(32, 48, normalization="RMSNorm", split={"a": 32, "b": 16}, recipe=name)
    apart = copy.deepcopy(module)
    for layer in apart.layers:
        layer.weight.data = layer.weight.data.clone()
    assert joined.are_neighbours([layer.weight for layer in module.layers])
    assert not joined.are_neighbours([layer.weight for layer in apart.layers])
    third = copy.deepcopy(module)
    compiled = torch.compile(third, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 32)
    for _ in range(2):
        results = []
        for run in (module, apart, compiled):
            with mf.autocast(recipe=name):
                results.append(_step(run, x))
        for other in results[1:]:
            assert torch.equal(results[0][0], other[0])
            assert all(torch.equal(a, b) for a, b in zip(results[0][3:], other[3:], strict=True))
    torch._dynamo.reset()


def test_weights_of_one_storage_in_another_order_are_no_neighbours():
    module = mf.LayerNormLinear(8, 12, False, split={"a": 8, "b": 4}, recipe="fp8_row")
    x = torch.randn(2, 8)
    want = module(x)
    memory = torch.cat([module.b.weight.detach(), module.a.weight.detach()])
    module.b.weight.data, module.a.weight.data = memory[:4], memory[4:]
    assert torch.equal(module(x), want)
    wide = torch.zeros(13, 8)
    for layer, rows in ((module.a, wide[:8]), (module.b, wide[9:])):
        rows.copy_(layer.weight.detach())
        layer.weight.data = rows
    assert torch.equal(module(x), want)


def test_parameters_stay_neighbours_and_themselves():
    module = mf.LayerNormLinear(16, 24, split={"a": 16, "b": 8}, recipe="fp8_current")
    weights = [layer.weight for layer in module.layers]
    for change in (lambda m: m.to(torch.bfloat16), lambda m: m.float()):
        change(module)
        assert module.a.weight is weights[0]
        first, second = (layer.weight for layer in module.layers)
        assert first.data_ptr() + first.nbytes == second.data_ptr()
    module.share_memory()  # must stay shared: each then multiplies for itself
    assert all(weight.is_shared() for weight in weights)
    copied = copy.deepcopy(module.float())
    first, second = (layer.weight for layer in copied.layers)
    assert first.data_ptr() != module.a.weight.data_ptr()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = mf.LayerNormLinear(16, 24, split={"a": 16, "b": 8})
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), module.parameters(), strict=True))


def test_delayed_state_of_a_joint_product_is_the_first_parts():
    module = mf.LayerNormLinear(16, 24, split={"a": 16, "b": 8}, recipe="delayed", **BF16)
    x = torch.randn(4, 16, **BF16)
    for _ in range(2):
        with mf.autocast(recipe="delayed"):
            y = module(x)
        y.sum().backward()
    state = module.state_dict()
    amax = max(float(layer.weight.detach().abs().max()) for layer in module.layers)
    assert float(state["a.scaling_w_amax_history"].max()) == amax
    assert float(state["a.scaling_w_scale"]) != 1.0
    fresh = mf.LayerNormLinear(16, 24, split={"a": 16, "b": 8}, recipe="delayed", **BF16)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.state_dict()["a.scaling_w_scale"], state["a.scaling_w_scale"])


@pytest.mark.slow_cases(
    "further recipes and modules of a checked kind",
    all_but=("mxfp8-*", "delayed-gelu", "delayed-swiglu", "None-relu"),
)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("name", [None, "mxfp8", "fp8_block", "delayed"])
def test_every_activation(activation, name):  # features M5
    torch.manual_seed(0)
    where = BF16 if name else {}
    module = mf.LayerNormMLP(48, 64, activation=activation, recipe=name, **where)
    x = torch.randn(9, 48, **where)
    # Weights of one sign: sums over tokens, such as the gradient of a bias, would cancel and leave the noise of casts.
    got = _step(module, x, lowest=0.0)
    wide = copy.deepcopy(module).float()
    for layer in wide.children():
        if isinstance(layer, mf.Linear):
            layer.pin(None)
    want = _step(_Reference(wide, activation), x.float(), lowest=0.0)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert _relative(a, b) < (0.2 if name else 1e-5), (index, _relative(a, b))


class _Reference(nn.Module):
    """The MLP by torch's operations in float32."""

    FUNCTIONS: ClassVar = {
        "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu,
        "qgelu": lambda x: x * torch.sigmoid(1.702 * x), "srelu": lambda x: F.relu(x) ** 2,
        "sigmoid": torch.sigmoid,
    }  # fmt: skip

    def __init__(self, module, activation):
        super().__init__()
        self.norm = module.norm
        for name in ("gate_proj", "up_proj", "down_proj"):
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))
        self.kind = ACTIVATIONS[activation]

    def forward(self, x):
        h = self.norm(x)
        if self.kind.function == "clamped":
            g, u = self.gate_proj(h).clamp(max=7), self.up_proj(h).clamp(-7, 7)
            return self.down_proj(g * torch.sigmoid(1.702 * g) * (u + 1))
        f = self.FUNCTIONS[self.kind.function]
        return self.down_proj(f(self.gate_proj(h)) * self.up_proj(h) if self.kind.gated else f(self.up_proj(h)))


def test_clamped_swiglu_clamps():
    gate, up = torch.tensor([100.0, -100.0, 1.0]), torch.tensor([100.0, -100.0, 0.0])
    assert clamped_swiglu(gate, up)[0] == pytest.approx(7 * 8, rel=1e-4)
    assert clamped_swiglu(gate, up)[1] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("name", ["nvfp4", "delayed", "fp8_current"])
def test_recompute_has_the_bits_of_one_pass(name):
    torch.manual_seed(0)
    module = mf.LayerNormMLP(32, 48, activation="swiglu", recipe=name, **BF16)
    again = copy.deepcopy(module)
    again.recompute = True
    x = torch.randn(6, 32, **BF16)
    for _ in range(2):
        with mf.autocast(recipe=name):
            a = _step(module, x)
        with mf.autocast(recipe=name):
            b = _step(again, x)
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.slow_cases("further recipes and modules of a checked kind", all_but=("mlp-nvfp4", "linear-delayed"))
@pytest.mark.parametrize("name", ["fp8_current", "delayed", "nvfp4"])
@pytest.mark.parametrize("kind", ["linear", "mlp", "layer"])
def test_weights_are_cast_once_for_several_microbatches(name, kind, monkeypatch):  # features M13
    torch.manual_seed(0)
    module = {
        "linear": lambda: mf.LayerNormLinear(32, 48, split={"q": 32, "k": 16}, recipe=name, **BF16),
        "mlp": lambda: mf.LayerNormMLP(32, 48, activation="swiglu", recipe=name, **BF16),
        "layer": lambda: mf.TransformerLayer(32, 48, 4, recipe=name, **BF16),
    }[kind]()
    again = copy.deepcopy(module)
    casts = []
    plain = schedule.Schedule.quantize_weight
    monkeypatch.setattr(
        schedule.Schedule, "quantize_weight", lambda self, *inputs: casts.append(1) or plain(self, *inputs)
    )
    counts = []
    for _ in range(2):
        x = torch.randn(2, 5, 32, **BF16)
        with mf.autocast(recipe=name):
            results = []
            for first in (True, False, False):
                casts.clear()
                got = _step(module, x, is_first_microbatch=first)
                counts.append(len(casts))
                results.append((got, _step(again, x)))
        if name != "nvfp4":  # whose weights keep the rounding bits of their cast
            for got, want in results:
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        with torch.no_grad():
            for p, q in zip(module.parameters(), again.parameters(), strict=True):
                p.mul_(0.5)
                q.mul_(0.5)
    linears = sum(isinstance(part, mf.Linear) for part in module.modules())
    products = linears if kind == "mlp" else linears - (1 if kind == "linear" else 2)
    if name != "delayed":  # which casts them with another scale in every region
        assert counts == [products, 0, 0] * 2
    with pytest.raises(InvalidTypeError, match="is_first_microbatch"):
        module(torch.randn(2, 5, 32, **BF16), is_first_microbatch=1)


def test_norm_output_is_returned():
    module = mf.LayerNormLinear(16, 8, return_norm_output=True, recipe="mxfp8")
    x = torch.randn(3, 16)
    y, value = module(x)
    assert torch.equal(value, module.norm(x))
    assert torch.equal(y, module.linear(value))
    y, value = mf.LayerNormMLP(16, 32, return_norm_output=True)(x)
    assert (y.shape, value.shape) == ((3, 16), (3, 16))


# ------------------------------------------------------------------------------------------------------------- rotary


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [16, 8])
def test_rotary_turns_pairs(interleaved, rotated):
    """Written out in float64 as complex numbers."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    cos, sin = mf.RotaryEmbedding(rotated, theta=100.0)(5)
    angle = torch.arange(5).double()[:, None] * 100.0 ** (-torch.arange(0, rotated, 2).double() / rotated)
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    for x, y in zip((q, k), mf.apply_rotary(q, k, cos, sin, interleaved=interleaved), strict=True):
        part = x[..., :rotated].double()
        first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        z = torch.complex(first, second) * turn
        want = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
        assert torch.allclose(y[..., :rotated].double(), want, atol=1e-5)
        assert torch.equal(y[..., rotated:], x[..., rotated:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(4, 2, 64, 64), (3, 3, 24, 8), (32, 8, 128, 128), (5, 1, 80, 20)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_on_a_gpu_is_that_of_torch(dtype, shape, interleaved):
    heads, kv, size, rotated = shape
    torch.manual_seed(0)
    joint = torch.randn(2, 37, heads + 2 * kv, size).to("cuda", dtype)
    cos, sin = mf.RotaryEmbedding(rotated, device="cuda")(torch.randint(0, 99, (2, 37), device="cuda"))
    weights = torch.randn(joint.shape, device="cuda")
    results = []
    for split in (False, True, None):
        leaf = joint.clone().requires_grad_()
        parts = leaf.split([heads, kv, kv], 2)
        if split is None:
            made = [
                *(attention.rotated_by_torch(part, cos[:, :], sin[:, :], interleaved) for part in parts[:2]),
                parts[2],
            ]
        else:
            inputs = [leaf] if split else list(parts)
            made = attention.rotate_heads(inputs, [heads, kv, kv] if split else None, cos, sin, interleaved)
        y = torch.cat(list(made), 2)
        (y * weights.to(dtype)).sum().backward()
        results.append((y.detach(), leaf.grad))
    for y, dx in results[:2]:
        assert torch.equal(y, results[2][0])
        assert _relative(dx, results[2][1]) < (1e-6 if dtype == torch.float32 else 2**-8)


def test_rotary_errors():
    q = torch.randn(2, 5, 4, 16)
    with pytest.raises(InvalidValueError, match=r"cos: got shape \(4, 16\)"):
        mf.apply_rotary(q, q, torch.ones(4, 16), torch.ones(4, 16))
    with pytest.raises(InvalidValueError, match="at most the 16 elements"):
        mf.apply_rotary(q, q, torch.ones(5, 18), torch.ones(5, 18))
    with pytest.raises(InvalidValueError, match="even number"):
        mf.RotaryEmbedding(7)
    with pytest.raises(InvalidValueError, match="heads, D"):
        mf.apply_rotary(q[0], q, torch.ones(5, 16), torch.ones(5, 16))


# ---------------------------------------------------------------------------------------------------------- attention


def _attention_reference(q, k, v, seen):
    """softmax in float64 over what `seen` [.., S, S'] allows."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("bshd,bthd->bhst", q.double(), k.double()) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhst,bthd->bshd", weights, v.double())


@pytest.mark.parametrize("case", ["causal", "window", "padding", "cross", "packed", "later"])
def test_masks_of_attention(case):  # features M8
    torch.manual_seed(0)
    length, other = 12, 12
    options, seen = {"causal": True}, torch.ones(12, 12, dtype=torch.bool).tril()
    if case == "window":
        options["window"] = 3
        seen = seen.triu(-2)
    if case == "padding":
        kept = torch.arange(12)[None] < torch.tensor([[12], [7]])
        options["mask"] = kept
        seen = seen & kept[:, None, None]
        seen[1, :, 7:] = True  # rows of padding: whatever
    if case in ("cross", "later"):
        length = 5
        options = {"causal": case == "later"}
        seen = torch.ones(5, 12, dtype=torch.bool).tril(7) if case == "later" else torch.ones(5, 12, dtype=torch.bool)
    batch = 1 if case == "packed" else 2
    q, k = torch.randn(batch, length, 4, 8), torch.randn(batch, other, 2, 8)
    v = torch.randn(batch, other, 2, 8)
    if case == "packed":
        options["cu_seqlens"] = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
        ids = torch.tensor([0] * 5 + [2] * 7)
        seen = seen & (ids[:, None] == ids[None])
    y, want = attention.attend(q, k, v, **options), _attention_reference(q, k, v, seen)
    if case == "padding":
        y, want = y[:, :7], want[:, :7]
    assert torch.allclose(y.double(), want, atol=1e-5)


def test_a_mask_of_two_axes_for_as_many_sequences_as_tokens_is_refused():  # features M8
    """It was read as [S, S'], so that a batch of 8 sequences of 8 tokens gave other values than one of 7 or 9."""
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 5, 4, 8), torch.randn(5, 5, 2, 8), torch.randn(5, 5, 2, 8)
    kept = torch.arange(5)[None] < torch.tensor([[5], [4], [3], [2], [1]])
    with pytest.raises(InvalidValueError, match=r"attention_mask: got .*\(5, 5\) for 5 sequences of 5 tokens"):
        attention.attend(q, k, v, mask=kept)
    for mask, seen in ((kept[:, None, None], kept[:, None, None]), (kept[None, None], kept)):
        y = attention.attend(q, k, v, mask=mask)
        assert torch.allclose(y.double(), _attention_reference(q, k, v, seen), atol=1e-5)
    for count in (1, 4):  # one reading is left
        y, seen = attention.attend(q[:count], k[:count], v[:count], mask=kept[:count]), kept[:count, None, None]
        assert torch.allclose(y.double(), _attention_reference(q[:count], k[:count], v[:count], seen), atol=1e-5)


@pytest.mark.parametrize("name", [None, *NAMES])
def test_every_recipe_runs_a_layer(name):  # features M8
    torch.manual_seed(0)
    layer = mf.TransformerLayer(64, 96, 4, 2, qk_norm=True, recipe=name, **BF16)
    plain = copy.deepcopy(layer)
    for module in plain.modules():
        if isinstance(module, mf.Linear):
            module.pin(None)
    x = torch.randn(2, 9, 64, **BF16)
    embeddings = mf.RotaryEmbedding(16)(9)
    y, dx, *_ = _step(layer, x, position_embeddings=embeddings)
    want, dwant, *_ = _step(plain, x, position_embeddings=embeddings)
    bound = 0.02 if name is None else 0.3
    assert _relative(y, want) < bound
    assert _relative(dx, dwant) < bound


def test_a_cache_is_an_object_that_takes_keys_and_values():
    layer = mf.MultiheadAttention(64, num_heads=4)
    for cache, got in (("fp8", "str"), ((torch.zeros(1), torch.zeros(1)), "tuple"), (mf.KVCache, "the class KVCache")):
        with pytest.raises(InvalidTypeError, match=f"cache: got {got}, needed a KVCache"):
            layer(torch.randn(1, 2, 64), cache=cache)


def test_a_cache_gives_the_outputs_of_the_whole():
    torch.manual_seed(0)
    layer = mf.TransformerLayer(32, 48, 4, 2, recipe="fp8_row")
    rotary, x = mf.RotaryEmbedding(8), torch.randn(2, 6, 32)
    cos, sin = rotary(6)
    with torch.no_grad():
        want = layer(x, position_embeddings=(cos, sin))
        cache = mf.KVCache(2, 8, 2, 8)
        pieces = []
        for a, b in ((0, 3), (3, 4), (4, 6)):
            pieces.append(layer(x[:, a:b], position_embeddings=(cos[a:b], sin[a:b]), cache=cache))
    assert torch.allclose(torch.cat(pieces, 1), want, atol=1e-5)
    with pytest.raises(InvalidValueError, match="space for 8 tokens"):
        layer(x, position_embeddings=(cos, sin), cache=cache)
    with pytest.raises(InvalidTypeError, match=r"torch\.bfloat16"):
        layer(x, cache=mf.KVCache(2, 8, 2, 8, dtype=torch.bfloat16))
    # A call that fails after the cache has taken its tokens leaves the cache as it was.
    cache = mf.KVCache(2, 8, 2, 8)
    expected, x = layer(x[:, :3], cache=cache), x[:, :3]
    with pytest.raises(InvalidValueError, match="attention_mask"):
        layer(x, cache=cache, attention_mask=torch.ones(2, 3, dtype=torch.bool))
    assert cache.count == x.shape[1]
    cache.reset()
    assert torch.equal(layer(x, cache=cache), expected)
    with pytest.raises(InvalidValueError, match=r"needed \[2, 3, 2, 8\]"):
        cache.update(torch.ones(2, 3, 2, 8), torch.ones(2, 2, 2, 8))


def test_packed_sequences_are_those_apart():
    torch.manual_seed(0)
    layer, x = mf.TransformerLayer(32, 48, 4, window=4, recipe="fp8_row"), torch.randn(11, 32)
    packed = layer(x, cu_seqlens=torch.tensor([0, 4, 11]))
    apart = torch.cat([layer(part[None])[0] for part in (x[:4], x[4:])])
    assert torch.allclose(packed, apart, atol=1e-5)
    with pytest.raises(InvalidValueError, match="ascend from 0 to 11"):
        layer(x, cu_seqlens=torch.tensor([0, 4, 12]))


def test_cross_attention_and_parallel_layers():
    torch.manual_seed(0)
    layer = mf.TransformerLayer(
        32,
        48,
        4,
        normalization="LayerNorm",
        activation="gelu",
        bias=True,
        options=mf.LayerOptions(cross_attention=True),
    )
    x, context = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    y = layer(x, context=context, context_mask=torch.arange(7)[None] < torch.tensor([[7], [3]]))
    changed = context.clone()
    changed[1, 3:] = 0
    mask = torch.arange(7)[None] < torch.tensor([[7], [3]])
    assert torch.equal(y, layer(x, context=changed, context_mask=mask))
    beside = mf.TransformerLayer(32, 48, 4, options=mf.LayerOptions(parallel=True))
    want = x + beside.self_attn(beside.input_layernorm(x)) + beside.mlp(beside.post_attention_layernorm(x))
    assert torch.allclose(beside(x), want, atol=1e-5)


def test_hidden_dropout_is_of_what_is_added_to_the_residual_stream():
    torch.manual_seed(0)
    layer = mf.TransformerLayer(
        32, 48, 4, recipe="mxfp8", options=mf.LayerOptions(cross_attention=True, hidden_dropout=0.5)
    )
    x, context = torch.randn(2, 5, 32), torch.randn(2, 3, 32)
    torch.manual_seed(1)
    y = layer(x, context=context)
    torch.manual_seed(1)
    want = x + F.dropout(layer.self_attn(x, norm=layer.input_layernorm), 0.5)
    want = want + F.dropout(layer.cross_attn(want, context=context, norm=layer.cross_attention_layernorm), 0.5)
    want = want + F.dropout(layer.mlp(want, layer.post_attention_layernorm), 0.5)
    assert torch.equal(y, want)
    plain = mf.TransformerLayer(32, 48, 4, recipe="mxfp8", options=mf.LayerOptions(cross_attention=True))
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x, context=context), plain(x, context=context))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: mf.MultiheadAttention(32, 4, 3), "num_kv_heads: got 3"),
        (
            lambda: mf.TransformerLayer(32, 48, 4, options=mf.LayerOptions(hidden_dropout=-0.1)),
            "hidden_dropout: got -0.1",
        ),
        (lambda: mf.MultiheadAttention(30, 4), "num_heads: got 4"),
        (lambda: mf.MultiheadAttention(32, 4, window=0), "window"),
        (lambda: mf.LayerNormMLP(8, 8, activation="swigelu"), "activation.*swiglu"),
        (lambda: mf.LayerNormLinear(8, 8, normalization="BatchNorm"), "normalization"),
        (lambda: mf.LayerNormLinear(8, 8, split={"a": 3, "b": 3}), "add up to out_features = 8"),
        (lambda: mf.LayerNormLinear(8, 8, split={"norm": 8}), "split"),
        (lambda: mf.TransformerLayer(32, 48, 4)(torch.randn(1, 3, 32), torch.ones(2, 9)), "attention_mask"),
        (lambda: mf.TransformerLayer(32, 48, 4)(torch.randn(1, 2, 3, 32)), r"hidden_states: got shape \(1, 2, 3, 32\)"),
        (lambda: mf.MultiheadAttention(32, 4)(torch.randn(32)), r"hidden_states: got shape \(32,\)"),
        (lambda: mf.MultiheadAttention(32, 4, options=mf.LayerOptions(dropout=1.5)), "dropout: got 1.5"),
        (lambda: mf.MultiheadAttention(32, 4, window="3"), "window: got str"),  # type: ignore[arg-type]
        (lambda: mf.RotaryEmbedding(8, theta=-1.0), "theta: got -1"),
        (lambda: mf.RotaryEmbedding(8)(2.5), "positions: got float"),  # type: ignore[arg-type]
        (lambda: mf.RotaryEmbedding(8)(-2), "positions: got -2"),
        (lambda: mf.TransformerLayer(32, 48, 4)(torch.ones(1, 3, 32), context=torch.ones(1, 3, 32)), "cross_attention"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(make, match):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=match):
        make()


def test_position_embeddings_are_a_pair():
    rotary = mf.RotaryEmbedding(8)
    with pytest.raises(InvalidTypeError, match=r"position_embeddings: got RotaryEmbedding, .*\(cos, sin\)"):
        mf.TransformerLayer(32, 48, 4)(torch.randn(1, 3, 32), position_embeddings=rotary)


class _Listening(nn.Linear):
    """Another module in a Linear's place, as adapters are: it takes x alone."""

    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("first", [None, True])
def test_replaced_hooked_and_reverted_parts_are_called(first):  # features M17
    torch.manual_seed(0)
    x = torch.randn(2, 5, 32)
    for make in (
        lambda: mf.TransformerLayer(32, 48, 4, 2, bias=True, recipe="fp8_row"),
        lambda: mf.LayerNormMLP(32, 48, activation="clamped_swiglu", recipe="fp8_row"),
        lambda: mf.LayerNormMLP(32, 48, recipe="fp8_row"),
        lambda: mf.LayerNormLinear(32, 48, split={"a": 32, "b": 16}, recipe="fp8_row"),
    ):
        module = make()
        want, heard = module(x, is_first_microbatch=first), []
        for name, layer in list(module.named_modules()):
            layer.register_forward_hook(lambda part, *_, name=name, heard=heard: heard.append(name))
        assert torch.allclose(module(x, is_first_microbatch=first), want, atol=1e-5)
        parts = {name for name, layer in module.named_modules() if isinstance(layer, (mf.Linear, mf.RMSNorm))}
        assert parts <= set(heard)
        plain = copy.deepcopy(module)
        mf.revert(plain)
        assert _relative(plain(x, is_first_microbatch=first), want) < 0.1
        for name, layer in list(module.named_modules()):
            if isinstance(layer, mf.Linear):
                module.set_submodule(name, _Listening(layer.in_features, layer.out_features))
        assert module(x, is_first_microbatch=first).shape == want.shape


# ----------------------------------------------------------------------------------------------------- meta, compile


def test_meta_device_and_reset():  # features M12
    layer = mf.TransformerLayer(32, 48, 4, 2, device="meta", recipe="delayed", **BF16)
    assert layer.self_attn.q_proj.weight.is_meta
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    rotary = mf.RotaryEmbedding(8, device="meta").to_empty(device="cpu")
    assert torch.equal(rotary(3)[0], mf.RotaryEmbedding(8)(3)[0])
    q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
    assert q.data_ptr() + q.nbytes == k.data_ptr()
    assert torch.isfinite(layer(torch.randn(1, 4, 32, **BF16))).all()


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("fp8_current",))
@pytest.mark.parametrize("name", ["fp8_current", "mxfp8", "nvfp4"])
def test_compiled_fullgraph(name, fresh_compiler):  # features G1
    torch.manual_seed(0)
    layer = mf.TransformerLayer(32, 48, 4, 2, recipe=name, **BF16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, embeddings = torch.randn(2, 5, 32, **BF16), mf.RotaryEmbedding(8)(5)
    y, dx, *_ = _step(compiled, x, position_embeddings=embeddings)
    want, dwant, *_ = _step(layer, x, position_embeddings=embeddings)
    bound = 0.25 if name == "nvfp4" else 0.05  # q, k and v are three products there, with other scales and seeds
    assert _relative(y, want) < bound
    assert _relative(dx, dwant) < bound


@pytest.mark.slow("compiles attention twice")
def test_attention_compiles_for_any_length(fresh_compiler):  # features G1
    """Causal attention, positions counted by the shape, and packed sequences: each ended the graph."""
    torch.manual_seed(0)
    layer, rotary = mf.MultiheadAttention(32, 4, 2, recipe="fp8_row"), mf.RotaryEmbedding(8)

    def function(x, packed, starts):
        y = layer(x, position_embeddings=rotary(x.shape[1]))
        return y.sum() + layer(packed, cu_seqlens=starts).sum()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 9):
        inputs = torch.randn(2, length, 32), torch.randn(length, 32), torch.tensor([0, 2, length], dtype=torch.int32)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize("module", [mf.LayerNormLinear, mf.LayerNormMLP])
def test_an_eps_by_position_is_no_bias(module):
    with pytest.raises(InvalidTypeError, match="eps by keyword"):
        module(32, 64, 1e-5)
