"""Activation checkpointing: both forms of torch's own, `mf.checkpoint`, and what each of them refuses by name."""

import contextlib
import functools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.recipes import RECIPES, DelayedScaling, NVFP4BlockScaling  # noqa: E402
from microfloat.torch.linear import schedule  # noqa: E402
from microfloat.torch.nn import functional as fused  # noqa: E402

RECIPE = DelayedScaling(amax_history_len=4)
# Of Dynamo, about its own doings.
in_dynamo = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def block(recipe=RECIPE) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 32))
    mf.convert(model, recipe)
    return model


def plain(function, x):
    return function(x)


def reentrant(function, x):
    return checkpoint(function, x, use_reentrant=True)


def later(function, x):
    return checkpoint(function, x, use_reentrant=False)


def nested(outer, inner):
    return lambda function, x: outer(lambda value: inner(function, value), x)


def _last_outside_of_ours(function, x):
    """`function` with all but the last of its layers in a checkpoint of their own."""
    if not isinstance(function, torch.nn.Sequential):
        return mf.checkpoint(function, x)
    return function[-1](mf.checkpoint(function[:-1], x))


FORMS = {
    "reentrant": reentrant,
    "later": later,
    "reentrant in reentrant": nested(reentrant, reentrant),
    "later in reentrant": nested(reentrant, later),
    "reentrant in later": nested(later, reentrant),
    "ours": mf.checkpoint,
    "ours in ours": nested(mf.checkpoint, mf.checkpoint),
    "ours in part of ours": lambda function, x: mf.checkpoint(_last_outside_of_ours, function, x),
    "later in ours": nested(mf.checkpoint, later),
    "ours in later": nested(later, mf.checkpoint),
    "ours in reentrant": nested(reentrant, mf.checkpoint),
    "reentrant in ours": nested(mf.checkpoint, reentrant),
}


def train(run, *, region=contextlib.nullcontext, microbatches=1, backward_inside=False, validates=False, steps=4):
    """Gradients and the state after every step, and at the end with all updates in."""
    model, seen = block(), []
    torch.manual_seed(1)
    for step in range(steps):
        inputs = [(torch.randn(8, 32) * 2.0**step).requires_grad_() for _ in range(microbatches)]
        with region():
            outputs = [run(model, x) for x in inputs]
            if backward_inside:
                for y in outputs:
                    y.square().sum().backward()
        if validates:
            with torch.no_grad():
                model.eval()(inputs[0])
                model.train()
        if not backward_inside:
            for y in outputs:
                y.square().sum().backward()
        seen += [x.grad for x in inputs]
    mf.update_scaling(model)
    return seen, [parameter.grad for parameter in model.parameters()], list(model.buffers())


def same(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow_cases(
    "further nestings of checkpoints",
    all_but=("autocast-later in *", "autocast-ours in *", "alone-ours", "alone-later in reentrant"),
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("region", ["alone", "autocast"])
def test_delayed_scaling_moves_as_without_checkpoints(form, region) -> None:
    region = {"alone": contextlib.nullcontext, "autocast": lambda: mf.autocast(recipe=RECIPE)}[region]
    ours, theirs = train(FORMS[form], region=region), train(plain, region=region)
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(float(scale) > 1 for scale in ours[2][::2])


@pytest.mark.slow_cases(
    "further nestings of checkpoints",
    all_but=("microbatches-later in reentrant", "backward inside-reentrant", "validation between-later"),
)
@pytest.mark.parametrize("form", ["reentrant", "later", "later in reentrant"])
@pytest.mark.parametrize(
    "options",
    [{"microbatches": 3}, {"microbatches": 2, "backward_inside": True}, {"validates": True}],
    ids=["microbatches", "backward inside", "validation between"],
)
def test_regions_of_several_microbatches_and_calls_in_between(form, options) -> None:
    region = lambda: mf.autocast(recipe=RECIPE)  # noqa: E731
    ours, theirs = train(FORMS[form], region=region, **options), train(plain, region=region, **options)
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def two_losses(y, x, model):
    y[:, 0].sum().backward(retain_graph=True)
    y[:, 1].sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def parts(y, x, model):
    """Gradients of x, then of one weight alone, then of all, then the penalty of x by a second loss."""
    weights = list(model.parameters())
    first = torch.autograd.grad(y[:2].sum(), x, retain_graph=True)
    second = torch.autograd.grad(y[2:].square().sum(), weights[:1], retain_graph=True)
    third = torch.autograd.grad(y.sum(), [x, *weights], retain_graph=True)
    return [*first, *second, *third, *torch.autograd.grad(y.tanh().sum(), x)]


@pytest.mark.slow_cases(
    "further nestings of checkpoints",
    all_but=("ours-nvfp4-*", "fused-*-parts", "ours in ours-mxfp8-two_losses", "ours in later-*-parts"),
)
@pytest.mark.parametrize("backward", [two_losses, parts])
@pytest.mark.parametrize("recipe", [None, "mxfp8", "nvfp4", "delayed", RECIPE])
@pytest.mark.parametrize("form", ["ours", "ours in ours", "ours in later", "fused"])
def test_several_backwards_recompute_the_same_forward(form, recipe, backward) -> None:
    """Each but the first was an AttributeError. The amaxes of x and w are those of one forward."""
    found = []
    for run in (plain, FORMS.get(form, plain)):
        torch.manual_seed(0)
        if form == "fused":
            model = mf.LayerNormMLP(32, 64, recompute=run is not plain or bool(found), recipe=recipe)
        else:
            model = block(recipe) if recipe else torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 32))
        torch.manual_seed(1)
        x = torch.randn(8, 32, requires_grad=True)
        with mf.autocast(enabled=recipe is not None, recipe=recipe):
            y = run(model, x)
        gradients = backward(y, x, model)
        mf.update_scaling(model)
        found.append([y, *gradients, *model.buffers()])
    assert same(*found)


def test_a_recomputation_that_fails_leaves_the_autocast_as_it_was() -> None:
    fails = []

    def function(x):
        if fails:
            raise ValueError("on purpose")
        return model(x)

    model, x = block("mxfp8"), torch.randn(8, 32, requires_grad=True)
    with mf.autocast(recipe="nvfp4"):
        y = mf.checkpoint(function, x)
        fails.append(True)
        for _ in range(2):
            with pytest.raises(ValueError, match="on purpose"):
                y.sum().backward(retain_graph=True)
            assert mf.get_autocast_recipe() == NVFP4BlockScaling()
        fails.clear()
        y.sum().backward()
    assert mf.get_autocast_recipe() is None


def test_a_fused_function_in_a_reentrant_checkpoint_records_its_parts() -> None:
    states = []
    for run in (plain, reentrant):
        torch.manual_seed(0)
        norm, gate, up = torch.nn.RMSNorm(32), mf.Linear(32, 48), mf.Linear(32, 48)
        down = mf.Linear(48, 32)
        layers = torch.nn.ModuleList([gate, up, down])
        for layer in layers:
            layer.pin(RECIPE)
        for _ in range(3):
            with mf.autocast(recipe=RECIPE):
                y = run(lambda x: fused.norm_mlp(x, norm, gate, down, up=up), torch.randn(8, 32, requires_grad=True))  # noqa: B023
            y.sum().backward()
        mf.update_scaling(layers)
        states.append(list(layers.buffers()))
    assert same(*states)
    assert float(gate.scaling_dy_scale) > 1


def test_a_layer_whose_bias_alone_is_trained_records_too() -> None:
    states = []
    for run in (plain, reentrant):
        torch.manual_seed(0)
        layer = mf.Linear(32, 32, recipe=RECIPE)
        layer.weight.requires_grad_(False)
        for _ in range(3):
            x = torch.randn(8, 32)
            run(lambda anchor: layer(x) + anchor, torch.zeros(1, requires_grad=True)).sum().backward()  # noqa: B023
        mf.update_scaling(layer)
        states.append(list(layer.buffers()))
    assert same(*states)
    assert float(layer.scaling_x_scale) > 1


def test_a_weight_used_in_and_out_of_a_checkpoint_records_the_larger_amax() -> None:  # features S4
    layer = mf.Linear(8, 8, bias=False, recipe=RECIPE)
    for _ in range(2):
        x, larger = torch.full((2, 8), 1.0, requires_grad=True), torch.full((2, 8), 4.0, requires_grad=True)
        with mf.autocast(recipe=RECIPE):
            y = layer(x).sum() + reentrant(layer, larger).sum()
        y.backward()
    mf.update_scaling(layer)
    # The first pass has rolled the amax of its own call when the region closed; the other came with the backward.
    assert layer.scaling_x_amax_history.tolist() == [0.0, 4.0, 1.0, 4.0]


@pytest.mark.parametrize("form", ["reentrant", "later"])
def test_a_layer_that_followed_an_autocast_is_not_recomputed_without_it(form) -> None:
    layer = mf.Linear(32, 32)
    x = torch.randn(8, 32, requires_grad=True)
    with mf.autocast(recipe="mxfp4"):
        y = FORMS[form](layer, x)
    with pytest.raises(NotSupportedError, match=r"microfloat\.torch\.checkpoint"):
        y.sum().backward()
    with mf.autocast(recipe="mxfp4"):  # the way out that the message names
        mf.checkpoint(layer, x).sum().backward()
    gradient, x.grad = x.grad, None
    with mf.autocast(recipe="mxfp4"):
        y = layer(x)
    y.sum().backward()
    assert torch.equal(gradient, x.grad)
    FORMS[form](layer, x).sum().backward()  # in high precision both times


def test_checkpoint_takes_the_argument_that_everybody_writes() -> None:
    layer, x = mf.Linear(64, 8, recipe="nvfp4"), torch.randn(4, 64, requires_grad=True)
    torch.manual_seed(0)
    mf.checkpoint(layer, x, use_reentrant=False).sum().backward()
    gradient, x.grad = x.grad, None
    torch.manual_seed(0)
    layer(x).sum().backward()
    assert torch.equal(gradient, x.grad)
    with pytest.raises(InvalidValueError, match=r"use_reentrant: got True, needed False"):
        mf.checkpoint(layer, x, use_reentrant=True)


@pytest.mark.slow("further programs of a checked kind")
@in_dynamo[0]
@in_dynamo[1]
def test_checkpoint_inside_compiled_code() -> None:
    model = block(NVFP4BlockScaling())
    x = torch.randn(8, 32, requires_grad=True)

    def step(run):
        x.grad = None
        torch.manual_seed(3)
        run(x).sum().backward()
        return x.grad

    def ours(value):
        return mf.checkpoint(model, value).square() + 1

    assert torch.equal(step(torch.compile(ours, backend="aot_eager", fullgraph=True)), step(ours))
    torch._dynamo.reset()

    def torchs(value):
        return later(model, value).square() + 1

    assert torch.equal(step(torch.compile(torchs, backend="aot_eager", fullgraph=True)), step(ours))


@in_dynamo[0]
@in_dynamo[1]
def test_checkpoint_inside_compiled_code_under_delayed_scaling() -> None:
    """It runs in eager mode between the graphs, and says so where there must be one."""
    model, twin = block(), block()
    x = torch.randn(8, 32, requires_grad=True)

    def step(run):
        x.grad = None
        with mf.autocast(recipe=RECIPE):
            y = run(x)
        y.sum().backward()
        return x.grad

    compiled = torch.compile(lambda value: mf.checkpoint(model, value).square() + 1, backend="aot_eager")
    for _ in range(3):
        assert torch.equal(step(compiled), step(lambda value: mf.checkpoint(twin, value).square() + 1))
    states = model.state_dict().values(), twin.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    torch._dynamo.reset()
    whole = torch.compile(lambda value: mf.checkpoint(model, value), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="which alone replays the scales"):
        step(whole)


@pytest.mark.slow_cases("further recipes and modules of a checked kind", all_but=("*-delayed", "*-nvfp4", "*-mxfp8"))
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("form", ["ours", "torch's"])
def test_a_policy_keeps_codes_by_name(name, form, monkeypatch) -> None:
    """features S2: codes are saved, and no cast is repeated; the bits are those without a checkpoint."""
    model = block(RECIPES[name]())
    x, casts = torch.randn(2, 8, 32, requires_grad=True), []
    cast = schedule.CastStep.__call__
    monkeypatch.setattr(schedule.CastStep, "__call__", lambda *args: (casts.append(1), cast(*args))[1])
    keep_codes = functools.partial(
        create_selective_checkpoint_contexts, [torch.ops.microfloat.quantize_operands.default]
    )

    def kept(value):
        run = mf.checkpoint if form == "ours" else functools.partial(checkpoint, use_reentrant=False)
        return run(model, value, context_fn=keep_codes)

    outcomes, counts = [], []
    for run in (model, kept, functools.partial(mf.checkpoint, model)):
        model.zero_grad()
        mf.reset_scaling(model)
        torch.manual_seed(3)
        x.grad, before = None, len(casts)
        y = run(x)
        y.square().sum().backward()
        outcomes.append([y.detach(), x.grad, *[parameter.grad.clone() for parameter in model.parameters()]])
        counts.append(len(casts) - before)
    for outcome in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], outcome, strict=True))
    assert counts[1] == counts[0] < counts[2]


@pytest.mark.slow_cases("further recipes of a checked kind", all_but=("*-nvfp4",))
@pytest.mark.parametrize("name", ["delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("keeps", [torch.ops.aten.mm.default, torch.ops.microfloat.multiply_operands.default], ids=str)
def test_fused_modules_under_a_policy(name, keeps) -> None:
    """Policies by the names of operators see the products of a fused module, whose casts run as they do elsewhere."""
    torch.manual_seed(0)
    layer = mf.TransformerLayer(32, 64, 2, recipe=RECIPES[name]())
    options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, [keeps])}
    x, outcomes = torch.randn(2, 8, 32, requires_grad=True), []
    ours = functools.partial(mf.checkpoint, layer, **options)
    for run in (layer, ours, functools.partial(checkpoint, layer, use_reentrant=False, **options)):
        layer.zero_grad()
        mf.reset_scaling(layer)
        torch.manual_seed(3)
        x.grad = None
        y = run(x)
        y.square().sum().backward()
        outcomes.append([y.detach(), x.grad, *[parameter.grad.clone() for parameter in layer.parameters()]])
    for outcome in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], outcome, strict=True))


@pytest.mark.parametrize("kind", [mf.Linear, mf.LayerNormLinear, mf.LayerNormMLP, mf.GroupedLinear])
def test_a_policy_outside_of_the_autocast_names_what_serves(kind) -> None:
    """Before torch misses an operator of the recomputation: a norm comes before the first Linear."""
    layer, sizes = (mf.GroupedLinear(1, 32, 32), ([8],)) if kind is mf.GroupedLinear else (kind(32, 32), ())
    context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.microfloat.quantize_operands.default])
    x = torch.randn(8, 32, requires_grad=True)
    with mf.autocast(recipe="mxfp8"):
        y = checkpoint(layer, x, *sizes, use_reentrant=False, context_fn=context)
    with pytest.raises(NotSupportedError, match=r"outside the microfloat.*Use microfloat.torch.checkpoint"):
        y.sum().backward()
    with mf.autocast(recipe="mxfp8"):
        y = mf.checkpoint(layer, x, *sizes, context_fn=context)
    y.sum().backward()


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_experts_under_a_policy(name, monkeypatch) -> None:
    """Their forward is one operator: a policy that keeps it keeps y and the codes, and no group is cast again."""
    layer = mf.GroupedLinear(3, 32, 16, recipe=RECIPES[name]())
    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.microfloat.multiply_groups.default])
    x, casts, outcomes = torch.randn(20, 32, requires_grad=True), [], []
    cast = schedule.CastStep.__call__
    monkeypatch.setattr(schedule.CastStep, "__call__", lambda *args: (casts.append(1), cast(*args))[1])
    for options in ({}, {"context_fn": keep}):
        layer.zero_grad()
        mf.reset_scaling(layer)
        torch.manual_seed(3)
        x.grad, before = None, len(casts)
        mf.checkpoint(layer, x, [9, 0, 11], **options).square().sum().backward()
        outcomes.append((len(casts) - before, x.grad, layer.weight.grad.clone()))
    (again, *expected), (kept, *got) = outcomes
    assert kept < again
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@in_dynamo[0]
def test_checkpoint_around_compiled_code_under_delayed_scaling_is_refused() -> None:
    model = block()
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(8, 32, requires_grad=True)
    with mf.autocast(recipe=RECIPE):
        y = later(compiled, x)
    with pytest.raises(NotSupportedError, match="needed the checkpointed part in eager mode"):
        y.sum().backward()
