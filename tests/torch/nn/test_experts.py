"""Experts that a model keeps as 3-D parameters run through grouped products, under the name of their module."""

import copy
import functools
import gc
import io
import pickle
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, PlacementError  # noqa: E402
from microfloat.recipes import DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling  # noqa: E402
from microfloat.torch.nn import experts as experts_module  # noqa: E402
from tests.torch.distributed.world import world_of_one  # noqa: E402

pytestmark = [  # of compiled tests: noise of Dynamo's own
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
]
E, K, N, T = 4, 32, 48, 20
PATH = "layers.1.experts"


def chosen_by_name(kind):
    """The decorator of transformers: a forward that looks up an implementation by name, and fields on the instance."""
    original_init, original_forward, experts_interface = kind.__init__, kind.forward, {}

    @functools.wraps(original_init)
    def __init__(self, **fields):
        original_init(self, **fields)
        self.has_gate, self.has_bias = fields.get("has_gate", True), fields.get("has_bias", False)
        self.has_post_expert_norm, self.is_transposed = fields.get("normed", False), fields.get("turned", False)

    @functools.wraps(original_forward)
    def forward(self, *args, **kwargs):
        return experts_interface.get("eager", original_forward)(self, *args, **kwargs)

    kind.__init__, kind.forward = __init__, forward
    return kind


@chosen_by_name
class Routed(nn.Module):
    """A layer of experts as transformers 5 keeps them; its own forward is a loop over experts."""

    product = staticmethod(F.linear)

    def __init__(self, has_gate=True, has_bias=False, turned=False, normed=False):
        super().__init__()
        self.num_experts, self.act_fn = E, nn.SiLU()
        self.first, self.turned = "gate_up_proj" if has_gate else "up_proj", turned
        for name, rows, columns in ((self.first, N * (1 + has_gate), K), ("down_proj", K, N)):
            shape = (E, columns, rows) if turned else (E, rows, columns)
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.bfloat16) / 4))
            if has_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(E, rows, dtype=torch.bfloat16)))
        if normed:
            self.post_expert_norm = nn.LayerNorm(K, dtype=torch.bfloat16)

    def _apply_gate(self, h):
        gate, up = h[..., ::2], h[..., 1::2]  # interleaved, as gpt-oss has them
        return self.act_fn(gate.clamp(max=7)) * (up + 1)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        made = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for e in range(self.num_experts):
            token, place = torch.where(top_k_index == e)
            h = hidden_states[token]
            for name in (self.first, "down_proj"):
                weight = getattr(self, name)[e]
                bias = getattr(self, f"{name}_bias")[e] if self.has_bias else None
                h = self.product(h, weight.t() if self.turned else weight, bias) if len(token) else h[:, :0]
                if not len(token):
                    break
                if name != "down_proj":
                    h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
            else:
                h = self.post_expert_norm(h) if self.has_post_expert_norm else h
                made = made.index_add(0, token, (h * top_k_weights[token, place, None]).float())
        return made.to(hidden_states.dtype)


class Model(nn.Module):
    def __init__(self, **fields):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(K, K, dtype=torch.bfloat16),
                                                   "experts": Routed(**fields)}) for _ in range(2))  # fmt: skip

    def forward(self, x, index, weights):
        for layer in self.layers:
            x = layer["experts"](layer["up"](x), index, weights)
        return x


def inputs(seed=0, experts=E):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator).to(torch.bfloat16).requires_grad_()
    index = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(T)])
    return x, index, torch.rand(T, 2, generator=generator).requires_grad_()


def gradients(module, *arguments):
    """The output, and the gradients of all inputs and parameters."""
    y = module(*arguments)
    wanted = [one for one in arguments if one.requires_grad] + list(module.parameters())
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted)]


def converted(recipe, **fields):
    torch.manual_seed(0)
    model = Model(**fields)
    return model, mf.convert(model, recipe)


@pytest.mark.slow_cases("further cases of a checked kind", all_but=("mxfp8-gpt-oss", "fp8_row-no gate"))
@pytest.mark.parametrize(
    "fields",
    [{}, {"has_gate": False}, {"has_bias": True, "turned": True}, {"turned": True}, {"normed": True}],
    ids=["gated", "no gate", "gpt-oss", "turned", "normed"],
)
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), "fp8_row"], ids=["mxfp8", "fp8_row"])
def test_outputs_and_gradients_are_those_of_a_loop_of_linears(fields, recipe):
    torch.manual_seed(0)
    experts = Routed(**fields)
    loop = copy.deepcopy(experts)
    loop.product = functools.partial(mf.linear, recipe=recipe)
    mf.convert(experts, recipe)
    x, index, weights = inputs()
    index[index == 2] = 1  # an expert without tokens, and one that a token has twice
    for ours, theirs in zip(gradients(experts, x, index, weights), gradients(loop, x, index, weights), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-6, atol=2**-7 * theirs.float().abs().max())


def test_products_are_the_bits_of_a_loop_of_linears():
    torch.manual_seed(0)
    experts = Routed(turned=True, has_bias=True)
    mf.convert(experts, "mxfp8")
    product, x = experts.products[0], torch.randn(T, K, dtype=torch.bfloat16)
    y = product(x, [5, 0, 12, 3])
    parts = [
        mf.linear(rows, experts.gate_up_proj[e].t(), experts.gate_up_proj_bias[e], recipe="mxfp8")
        for e, rows in enumerate(x.split([5, 0, 12, 3]))
    ]
    assert torch.equal(y, torch.cat(parts))


def test_a_layer_of_experts_stands_under_the_name_of_its_module():
    model, report = converted("mxfp8")
    row = next(row for row in report if row.name == PATH)
    assert (row.action, row.shape) == ("converted", (2 * N, K))
    assert row.reason.startswith("4 experts, 4")
    assert row.reason.endswith("% of the model's parameters a layer")  # one line of the table may stand for several
    assert report.share == 1 or report.share > 0.99
    assert not report.unseen
    assert "Routed(\n  recipe=MXFP8" in repr(model.layers[1]["experts"])
    explained = next(row for row in mf.explain(model) if row.name == PATH)
    assert explained.recipe == MXFP8BlockScaling()
    assert explained.shape == (K, 2 * N)
    assert [row.name for row in mf.explain(model, inputs())] == [row.name for row in report]
    with pytest.raises(InvalidValueError, match=rf"shape \({2 * T}, 7\).*{PATH}.gate_up_proj"):
        model.layers[1]["experts"](torch.randn(T, 7, dtype=torch.bfloat16), *inputs()[1:])


def test_parameters_and_keys_stay_and_revert_puts_the_class_back():
    torch.manual_seed(0)
    model = Model()
    keys, parameters, kinds = list(model.state_dict()), list(model.parameters()), [type(m) for m in model.modules()]
    before = model(*inputs())
    mf.convert(model, "nvfp4")
    assert list(model.state_dict()) == keys
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
    assert isinstance(model.layers[1]["experts"], Routed)
    assert not torch.equal(model(*inputs()), before)
    mf.revert(model)
    assert [type(m) for m in model.modules()] == kinds
    assert "products" not in dir(model.layers[1]["experts"])
    assert torch.equal(model(*inputs()), before)


def test_a_placement_pins_single_layers_and_gemms():
    torch.manual_seed(0)
    model = Model()
    report = mf.convert(
        model, mf.Placement([("layers.0.experts", None), ("*.experts:wgrad", None), ("*", MXFP8BlockScaling())])
    )
    actions = {row.name: row.action for row in report}
    assert actions["layers.0.experts"] == "high precision"
    assert actions[PATH] == "converted"
    assert type(model.layers[0]["experts"]) is Routed
    assert model.layers[1]["experts"].pinned.wgrad.is_high_precision
    with pytest.raises(PlacementError, match=r"layers\.1\.experts"):
        mf.convert(model, mf.Placement([("*.experts.gate_up_proj", "mxfp8")]))


def test_high_precision_runs_the_users_own_implementation():
    model, _ = converted("mxfp8")
    plain = Model()
    plain.load_state_dict(model.state_dict())
    with mf.autocast(enabled=False):
        assert torch.equal(model(*inputs()), plain(*inputs()))


@pytest.mark.parametrize("tokens", [0, 1])
def test_calls_with_hardly_a_token(tokens):
    torch.manual_seed(0)
    experts = Routed(has_bias=True)
    mf.convert(experts, DelayedScaling())
    x, index, weights = (one[:tokens].detach() for one in inputs())
    y, dx, dweights, *others = gradients(experts, x.requires_grad_(), index, weights.requires_grad_())
    assert (y.shape, dx.shape, dweights.shape) == ((tokens, K), (tokens, K), (tokens, 2))
    assert all(one.any() == bool(tokens) for one in others)
    with pytest.raises(InvalidValueError, match=r"top_k_index: got shape \(5, 2\).*hidden_states \(20, 32\)"):
        experts(inputs()[0], inputs()[1][:5], inputs()[2][:5])
    with pytest.raises(InvalidValueError, match=r"top_k_index: got shape \(20, 2\), top_k_weights \(20, 1\)"):
        experts(*inputs()[:2], inputs()[2][:, :1])


class Halves(Routed):
    def _apply_gate(self, h):
        """The gate of most classes of transformers, in other words."""
        first, second = h.chunk(2, dim=-1)
        return self.act_fn(first) * second


class Swapped(Routed):
    def _apply_gate(self, h):
        first, second = h.chunk(2, dim=-1)
        return self.act_fn(second) * first


def test_gates_are_known_by_their_code(monkeypatch):
    kernels = SimpleNamespace(gated_halves=lambda h, grad, kind: f"{kind} of {h.shape}")
    monkeypatch.setattr(experts_module.backends, "choose", lambda *_: SimpleNamespace(producers=kernels))
    monkeypatch.setattr(experts_module, "Gate", SimpleNamespace(apply=lambda h, kind, run: run(h, None, kind)))

    def made(kind, act, hooked=False):
        experts = kind()
        experts.act_fn = act
        if hooked:
            act.register_forward_hook(lambda *_: None)
        return experts_module.gate_of(experts, torch.zeros(1, K))(torch.zeros(1, 2))

    assert made(Halves, nn.SiLU()) == "silu of torch.Size([1, 2])"
    assert made(Halves, nn.ReLU()).startswith("relu")
    for others in [(Swapped, nn.SiLU()), (Routed, nn.SiLU()), (Halves, nn.Tanh()), (Halves, nn.SiLU(), True)]:
        assert torch.equal(made(*others), torch.zeros(1, 1))
    experts = Halves()
    del experts.act_fn
    assert experts_module.gate_of(experts, torch.zeros(1, K)) == experts._apply_gate


def test_experts_false_and_filters_leave_experts_named():
    model = Model()
    report = mf.convert(model, "mxfp8", experts=False)
    assert type(model.layers[1]["experts"]) is Routed
    assert [row.name for row in report.unseen] == ["layers.0.experts", PATH]
    report = mf.convert(model, "mxfp8", exclude=("*.experts",))
    assert report.skipped[PATH].startswith("name matches '*.experts'")
    with pytest.raises(InvalidTypeError, match="experts"):
        mf.convert(model, "mxfp8", experts="all")


def test_rows_of_other_ranks_reach_neither_outputs_nor_gradients():
    torch.manual_seed(0)
    experts = Routed(has_bias=True, normed=True)
    nn.init.ones_(experts.post_expert_norm.bias)
    mf.convert(experts, "mxfp8")
    x, index, weights = inputs()
    away = index == 3
    marked = torch.where(away, E, index)
    y, dx, dweights, *_ = gradients(experts, x, marked, weights)
    y_zero, dx_zero, *_ = gradients(experts, x, index, weights.masked_fill(away, 0).detach().requires_grad_())
    assert torch.equal(y, y_zero)
    assert torch.equal(dx, dx_zero)
    assert not dweights[away].any()
    assert dweights[~away].all()
    with torch.no_grad():
        x[away.all(1)] = torch.nan
        assert experts(x, marked, weights).isfinite().all()
        assert torch.equal(experts(x, torch.where(away, -1, index), weights), experts(x, marked, weights))
    everywhere = torch.full_like(index, E)
    assert all(
        not one.any() for one in gradients(experts, x.detach().nan_to_num().requires_grad_(), everywhere, weights)
    )


@pytest.mark.parametrize("number", [-1, -(1 << 31), -(1 << 20)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_number_below_zero_is_that_of_no_expert(number, dtype):
    """It was expert 0's; an index of a router may be of 32 bits."""
    experts = Routed(has_bias=True)
    mf.convert(experts, "fp8_row")
    x, index, weights = inputs()
    none, below = index.to(dtype, copy=True), index.to(dtype, copy=True)
    none[3, 1] = none[7] = E
    below[3, 1] = below[7] = number
    for ours, theirs in zip(gradients(experts, x, below, weights), gradients(experts, x, none, weights), strict=True):
        assert torch.equal(ours, theirs)


def test_delayed_scaling_has_one_state_for_each_product():
    model, _ = converted(DelayedScaling(amax_history_len=4))
    plain = Model()
    for seed in range(2):
        gradients(model, *inputs(seed))
    state = model.state_dict()
    names = {name for name in state if name.startswith(PATH) and name.endswith("x_scale")}
    assert names == {f"{PATH}.products.{number}.scaling_x_scale" for number in (0, 1)}
    assert all(state[name] != 1 for name in names)
    plain.load_state_dict(mf.plain_state_dict(model))
    again = Model()
    mf.convert(again, DelayedScaling(amax_history_len=4))
    again.load_state_dict(state)
    assert torch.equal(again(*inputs()), model(*inputs()))
    with pytest.warns(UserWarning, match="no delayed-scaling state"):
        again.load_state_dict(plain.state_dict())
    mf.convert(model, "mxfp8")
    assert list(model.state_dict()) == list(plain.state_dict())


def test_copies_and_pickles_stand_on_their_own():
    model, _ = converted("mxfp8")
    y = model(*inputs())
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stored, weights_only=False)):
        assert torch.equal(again(*inputs()), y)
        assert again.layers[1]["experts"].products[0].weight is again.layers[1]["experts"].gate_up_proj
        mf.revert(again)
        assert type(again.layers[1]["experts"]) is Routed


def test_products_keep_no_layer_alive():
    model, _ = converted("mxfp8")
    gone = weakref.ref(model.layers[0]["experts"])
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.slow_cases("further cases of a checked kind", all_but=("delayed",))
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), DelayedScaling()], ids=["mxfp8", "delayed"])
def test_checkpointing_gives_the_same_gradients(recipe):
    model, _ = converted(recipe)
    other = copy.deepcopy(model)
    recomputed = functools.partial(torch.utils.checkpoint.checkpoint, other, use_reentrant=False)
    recomputed.parameters = other.parameters
    for ours, theirs in zip(gradients(recomputed, *inputs()), gradients(model, *inputs()), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow("sums that autograd makes")
def test_gradients_accumulate():
    model, _ = converted("mxfp8")
    sums = [torch.zeros_like(one) for one in model.parameters()]
    for seed in range(2):
        model(*inputs(seed)).float().sum().backward()
        made = torch.autograd.grad(model(*inputs(seed)).float().sum(), list(model.parameters()))
        sums = [one + more for one, more in zip(sums, made, strict=True)]
    assert all(torch.equal(one.grad, total) for one, total in zip(model.parameters(), sums, strict=True))


def test_watch_names_each_product_after_its_parameter():
    model, _ = converted("mxfp8")
    with mf.watch(model, every=1) as w:
        gradients(model, *inputs())
    names = {record.module.removesuffix("[0]") for record in w.records}  # the expert that this sample measures
    assert {f"{PATH}.gate_up_proj", f"{PATH}.down_proj", "layers.1.up"} <= names


@pytest.mark.slow("compiles")
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling(True, True)], ids=["mxfp8", "nvfp4"])
def test_compiled_code_gives_the_same_values_in_one_graph(recipe):
    model, _ = converted(recipe)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled.parameters = model.parameters
    for seed in range(2):
        for ours, theirs in zip(gradients(compiled, *inputs(seed)), gradients(model, *inputs(seed)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


class Parallel(nn.Module):
    """Experts of somebody's own, whose forward takes rows and their numbers (JetMoE's are like that)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, N, K, dtype=torch.bfloat16))

    def forward(self, x, sizes):
        return torch.cat([F.linear(rows, self.weight[e]) for e, rows in enumerate(x.split(sizes))])


def test_own_experts_are_registered_in_one_call():
    experts, x = Parallel(), torch.randn(T, K, dtype=torch.bfloat16)
    holder = nn.ModuleDict({"moe": experts, "up": nn.Linear(K, K)})
    report = mf.convert(holder, "mxfp8")
    assert [row.name for row in report.unseen] == ["moe"]
    assert "Parallel is not known; microfloat.torch.register_experts" in report.unseen[0].reason
    mf.register_experts(Parallel, {"weight": "ENK"}, lambda experts, products, x, sizes: products["weight"](x, sizes))
    assert mf.convert(holder, "mxfp8").converted == ["moe", "up"]
    parts = [mf.linear(rows, experts.weight[e], recipe="mxfp8") for e, rows in enumerate(x.split([5, 0, 12, 3]))]
    assert torch.equal(experts(x, [5, 0, 12, 3]), torch.cat(parts))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((3, {"w": "ENK"}, print), "kind"), (("Experts", {"w": "ENK"}, print), "module:Class"),
        ((Parallel, {}, print), "weights"), ((Parallel, {"w": "NK"}, print), "'w': 'NK'"),
        ((Parallel, {"w": "ENK"}, None), "forward"),
    ],
)  # fmt: skip
def test_what_is_no_registration_is_refused(arguments, says):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=says):
        mf.register_experts(*arguments)


def test_experts_that_cannot_be_converted_are_named_with_the_reason():
    torch.manual_seed(0)
    model = Model()
    replaced, quantized = model.layers[0]["experts"], model.layers[1]["experts"]
    replaced.forward = lambda *arguments: replaced.down_proj.sum()
    quantized.down_proj = nn.Parameter(quantized.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    report = mf.convert(model, "mxfp8")
    assert report.skipped["layers.0.experts"].startswith("its forward was replaced on the instance")
    assert report.skipped[PATH].startswith("its down_proj has torch.float8_e4m3fn: another library has quantized it")
    packed = type("Mxfp4Experts", (nn.Module,), {"__module__": __name__})()
    packed.blocks = nn.Parameter(torch.zeros(E, N, 1, 16, dtype=torch.uint8), requires_grad=False)
    report = mf.convert(nn.ModuleDict({"up": nn.Linear(8, 8), "experts": packed}), "mxfp8")
    (row,) = report.unseen
    assert row.name == "experts"
    assert "blocks of Mxfp4Experts: torch.uint8, another library has quantized it" in row.reason


@pytest.mark.slow_cases("further cases of a checked kind", all_but=("EKN-nvfp4",))
@pytest.mark.parametrize("config", [mf.WeightOnly("nvfp4"), mf.WeightOnly("fp8_tensor"), mf.WeightActivation("mxfp8")],
                         ids=["nvfp4", "fp8_tensor", "mxfp8"])  # fmt: skip
@pytest.mark.parametrize("turned", [False, True], ids=["ENK", "EKN"])
def test_quantized_experts_are_quantized_one_by_one(config, turned):
    torch.manual_seed(0)
    model = Model(turned=turned, has_bias=True).requires_grad_(False)
    plain = copy.deepcopy(model.layers[1]["experts"])
    report = mf.quantize_(model, config)
    row = next(row for row in report if row.name == PATH)
    assert (row.action, row.recipe) == ("quantized", config)
    assert report.share == 1
    experts = model.layers[1]["experts"]
    for name in ("gate_up_proj", "down_proj"):
        stored, values = getattr(experts, name), getattr(plain, name)
        assert isinstance(stored, mf.QuantizedTensor)
        assert stored.shape == values.shape
        for e in range(E):
            own, alone = stored[e], values[e].t() if turned else values[e]
            alone = mf.quantize(alone, config.fprop.rhs).dequantize()
            assert torch.equal(own.dequantize(), alone.t() if turned else alone)
    loop = copy.deepcopy(plain)
    loop.product = lambda x, w, bias: mf.linear(x, mf.quantize(w, config.fprop.rhs), bias, recipe=config)
    torch.testing.assert_close(experts(*inputs()), loop(*inputs()), rtol=2**-6, atol=2**-3)
    with pytest.raises(InvalidValueError, match="gate_up_proj is quantized already"):
        mf.quantize_(model, config)
    del stored, own  # views of codes, which would keep a parameter from being swapped
    kept = dict(model.named_parameters())
    mf.revert(model)
    assert type(experts) is Routed
    assert experts.down_proj is kept[f"{PATH}.down_proj"]
    assert not isinstance(experts.down_proj, mf.QuantizedTensor)
    assert experts.down_proj.shape == plain.down_proj.shape


@pytest.mark.parametrize("turned", [False, True], ids=["ENK", "EKN"])
def test_tiles_that_two_experts_would_share_are_refused_before_anything_changes(turned):
    model = Model(turned=turned)
    says = rf"got experts of {2 * N} rows under fp8_128x128.*In the layer 'layers.0.experts.gate_up_proj'"
    with pytest.raises(InvalidValueError, match=says):
        mf.quantize_(model, mf.WeightOnly("fp8_128x128"))
    assert type(model.layers[0]["experts"]) is Routed
    assert type(model.layers[0]["up"]) is nn.Linear
    mf.quantize_(model, {"*.experts": mf.WeightOnly("fp8_row"), "*": mf.WeightOnly("fp8_128x128")})
    assert model.layers[1]["experts"].is_stored


def test_states_of_quantized_experts_load_into_quantized_experts():
    torch.manual_seed(0)
    model, other = Model(turned=True).requires_grad_(False), Model(turned=True).requires_grad_(False)
    for one in (model, other):
        mf.quantize_(one, mf.WeightOnly("nvfp4"))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(*inputs()), model(*inputs()))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(*inputs()), model(*inputs()))


@pytest.mark.slow_cases("further cases of a checked kind", all_but=("before",))
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_static_scales_of_experts_are_calibrated(before):
    torch.manual_seed(0)
    model, config = Model().requires_grad_(False), mf.WeightActivation("fp8_tensor", scales="static")
    plain = copy.deepcopy(model)
    if not before:
        mf.quantize_(model, config)
    with mf.calibrate(model):
        model(*inputs())
    if before:
        assert type(model.layers[1]["experts"]) is Routed
        mf.quantize_(model, config)
    first, second = model.layers[0]["experts"].products
    assert first.input_amax == plain.layers[0]["up"](inputs()[0]).abs().max() or not before
    assert second.input_amax > 0
    assert torch.isfinite(model(*inputs())).all()


@pytest.mark.slow_cases("further cases of a checked kind", all_but=("EKN-delayed",))
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), DelayedScaling(reduce_amax=False)], ids=["mxfp8", "delayed"])
@pytest.mark.parametrize("fields", [{}, {"turned": True, "has_bias": True}], ids=["ENK", "EKN"])
def test_fsdp2_shards_converted_experts(recipe, fields):
    fsdp = pytest.importorskip("torch.distributed.fsdp", reason="this torch has no distributed package")
    model, _ = converted(recipe, **fields)
    alone = copy.deepcopy(model)
    with world_of_one():
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for module in (*(layer["experts"] for layer in model.layers), model):
            fsdp.fully_shard(module, mesh=mesh)
        for one in (model, alone):
            one(*inputs()).float().square().sum().backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(ours.grad.full_tensor(), theirs.grad)
        with pytest.warns(UserWarning, match=r"pinned to high precision.*layers\.1\.experts"):
            mf.revert(model)
