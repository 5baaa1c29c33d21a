"""Grouped products against a loop of Linears and against the oracle: features M7 and Q15."""

import copy
import dataclasses
import functools
import io
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import create_selective_checkpoint_contexts  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat import reference  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.operands import OPERANDS_OF  # noqa: E402
from microfloat.recipes import DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling, from_name  # noqa: E402
from microfloat.torch import reference as torch_reference  # noqa: E402
from microfloat.torch.linear import schedule  # noqa: E402
from microfloat.torch.tensor.seeds import draw_seed  # noqa: E402
from tests.torch.linear.test_linear import RECIPE_CASES  # noqa: E402

pytestmark = [  # of compiled tests: noise of Dynamo's own
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
]
SIZES = [33, 0, 17, 20]  # ragged: no multiples of 32, and an empty group
K, N = 48, 40
BFLOAT16 = torch.bfloat16


def operands(sizes=SIZES, k=K, n=N, dtype=BFLOAT16, seed=0):
    """x, weight, bias, and a dy that is no contiguous matrix (the trap of an emulated path elsewhere)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), k, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(sizes), n, k, generator=generator).to(dtype)
    bias = torch.randn(len(sizes), n, generator=generator).to(dtype)
    dy = torch.randn(n, sum(sizes), generator=generator).to(dtype).t()
    return x, weight, bias, dy


def layer_of(weight, bias=None, **options):
    layer = mf.GroupedLinear(*weight.shape[:1], *weight.shape[:0:-1], bias is not None, dtype=weight.dtype, **options)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def with_batch(group):
    """Casts whose random counters have `group` as their batch word (docs/numerics.md 5.3)."""
    by_batch = functools.partial(torch_reference.quantize_both)

    def quantize_both(*arguments, **options):
        return by_batch(*arguments, **{**options, "batch": group})

    return mock.patch.object(schedule.reference, "quantize_both", quantize_both)


def loop(recipe, sizes, x, weight, bias, dy):
    """The same by one Linear after the other: y, dx, dw, db."""
    parts, begin = [], 0
    for group, size in enumerate(sizes):
        layer = mf.Linear(K, N, bias=bias is not None, dtype=weight.dtype, recipe=recipe, backend="reference")
        with torch.no_grad():
            layer.weight.copy_(weight[group])
            if bias is not None:
                layer.bias.copy_(bias[group])
        rows, begin = slice(begin, begin + size), begin + size
        own = x.detach()[rows].clone().requires_grad_()
        torch.manual_seed(7)
        with with_batch(group):
            y = layer(own)
            y.backward(dy[rows])
        parts.append((y, own.grad, layer.weight.grad, None if bias is None else layer.bias.grad))
    ys, dxs, dws, dbs = zip(*parts, strict=True)
    return torch.cat(ys), torch.cat(dxs), torch.stack(dws), None if bias is None else torch.stack(dbs)


@pytest.mark.slow_cases("further switches of a recipe", cases=("nvfp4_0[01]1", "nvfp4_1[01]0", "fp8_current_pow2"))
@pytest.mark.parametrize("name", RECIPE_CASES)
def test_a_loop_of_linears(name):
    """features M7: forward, dgrad and wgrad of every expert, empty and ragged groups, a dy that lies across."""
    recipe = RECIPE_CASES[name]
    x, weight, bias, dy = operands(dtype=torch.float32 if "mxfp" in name else BFLOAT16)
    layer = layer_of(weight, bias, recipe=recipe, backend="reference")
    torch.manual_seed(7)
    y = layer(x, torch.tensor(SIZES, dtype=torch.int32))
    y.backward(dy)
    expected = loop(recipe, SIZES, x, weight, bias, dy)
    for got, wanted in zip((y, x.grad, layer.weight.grad, layer.bias.grad), expected, strict=True):
        assert torch.equal(got, wanted)
    assert not layer.weight.grad[1].any()


def test_codes_of_the_oracle():
    """features Q15: every group's matrices are quantized alone, with their index as the batch word of the counter."""
    recipe = NVFP4BlockScaling()
    x, weight, _, dy = operands()
    made = {}
    original = schedule.CastStep.__call__

    def spied(step, matrix, *rest):
        parts = original(step, matrix, *rest)
        tensor = next(entry.operand.tensor for entry in step.entries if entry is not None)
        made.setdefault(tensor, []).append(dataclasses.replace(parts))  # backward uses it up
        return parts

    layer = layer_of(weight, recipe=recipe, backend="reference")
    torch.manual_seed(7)
    words = draw_seed("cpu")
    torch.manual_seed(7)
    with mock.patch.object(schedule.CastStep, "__call__", spied):
        layer(x, SIZES).backward(dy)
    seed, begin, count = int(words[0]) | int(words[1]) << 32, 0, 0
    oracle = reference._quantize
    for group, size in enumerate(SIZES):
        rows, begin = slice(begin, begin + size), begin + size
        if not size:
            continue
        of_group = functools.partial(oracle.random_bytes, batch=group)
        for tensor, matrix in (("x", x[rows]), ("w", weight[group]), ("dy", dy[rows])):
            for index, operand in enumerate(OPERANDS_OF[tensor]):
                cast = recipe.cast(*operand.key)
                with mock.patch.object(oracle, "random_bytes", of_group):
                    values, axis = matrix.detach().float().numpy(), -2 if index else -1
                    wanted = reference.quantize(values, cast, axis=axis, seed=seed, stream=operand.stream)
                codes, scale, level = made[tensor][count].one(not index)
                assert (codes.numpy() == wanted.codes).all(), (group, tensor, index)
                assert (scale.numpy() == wanted.scale).all()
                assert level.item() == wanted.tensor_scale
        count += 1


@pytest.mark.parametrize("wants", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_only_what_is_wanted(wants):
    x, weight, bias, dy = operands()
    expected = loop("mxfp8", SIZES, x, weight, bias, dy)[1:]
    layer = layer_of(weight, bias, recipe="mxfp8", backend="reference")
    tensors = (x.detach().clone(), layer.weight, layer.bias)
    for tensor, wanted in zip(tensors, wants, strict=True):
        tensor.requires_grad_(wanted)
    y = layer(tensors[0], SIZES)
    assert y.requires_grad is any(wants)
    if any(wants):
        y.backward(dy)
    for tensor, wanted, gradient in zip(tensors, wants, expected, strict=True):
        assert torch.equal(tensor.grad, gradient) if wanted else tensor.grad is None


def test_delayed_scaling_has_one_state_for_all_experts():
    """The amax of a slot is the largest of all groups' or experts', also of experts without rows; one scale serves."""
    x, weight, bias, dy = operands()
    layer = layer_of(weight, bias, recipe=DelayedScaling(amax_history_len=2))
    names = {f"scaling_{slot}_{kind}" for slot in ("x", "w", "dy") for kind in ("scale", "amax_history")}
    assert names <= set(layer.state_dict())
    for _ in range(2):
        with mf.autocast(recipe=DelayedScaling(amax_history_len=2)):
            y = layer(x, SIZES)
        y.backward(dy)
    mf.update_scaling(layer)
    one = mf.Linear(K, N, dtype=weight.dtype, recipe=DelayedScaling(amax_history_len=2))
    for slot, tensor, element_max in (("x", x, 448.0), ("w", weight, 448.0), ("dy", dy, 57344.0)):
        amax = tensor.detach().abs().max().float()
        assert getattr(layer, f"scaling_{slot}_amax_history")[1] == amax
        assert float(getattr(layer, f"scaling_{slot}_scale")) == pytest.approx(element_max / float(amax), rel=1e-6)
        getattr(one, f"scaling_{slot}_scale").copy_(getattr(layer, f"scaling_{slot}_scale"))
    y = layer(x, SIZES)  # quantized by the scales of before
    with torch.no_grad():
        one.weight.copy_(weight[2])
        one.bias.copy_(bias[2])
    assert torch.equal(y[33:50], one(x[33:50]))


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ([33, 0, 17, 21], InvalidValueError, ["group_sizes", "71", "70", "dimension 0", "GroupedLinear"]),
        ([33, 0, 17, 10], InvalidValueError, ["60", "70", "last group"]),
        (torch.tensor([33, 0, 17, 10]), InvalidValueError, ["60", "70"]),
        ([80, -10, 0, 0], InvalidValueError, ["0 or more"]),
        ([35, 35], InvalidValueError, ["2 sizes", "4"]),
        (torch.tensor([[70, 0, 0, 0]]), InvalidValueError, ["(4,)"]),
        (torch.tensor([70.0, 0, 0, 0]), InvalidTypeError, ["torch.int32"]),
        ([70, 0, 0.0, 0], InvalidTypeError, ["list of ints"]),
        (70, InvalidTypeError, ["list of ints"]),
    ],
)
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_group_sizes_that_do_not_fit(sizes, error, words, recipe):
    """Rows behind the last group are an error where the sizes can be read."""
    x, weight, _, _ = operands()
    with pytest.raises(error) as raised:
        layer_of(weight, recipe=recipe)(x, sizes)
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (torch.zeros(4, 8), torch.zeros(2, 8, 16), "last dimension of 16"),
        (torch.zeros(4), torch.zeros(2, 8, 4), "a matrix"),
        (torch.zeros(4, 8), torch.zeros(8, 8), "one matrix for each group"),
        (torch.zeros(4, 8, dtype=torch.float64), torch.zeros(2, 8, 8), "float32"),
        (torch.zeros(4, 8), torch.zeros(0, 8, 8), "one group or more"),
    ],
)
def test_operands_that_do_not_fit(x, weight, words):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=words):
        mf.grouped_matmul(x, weight, [2, 2], recipe="mxfp8")


def test_the_function():
    """`grouped_matmul` runs its own recipe, else the autocast's; an island wins; no recipe is high precision."""
    x, weight, _, dy = operands()
    weight.requires_grad_()
    expected = loop("mxfp8", SIZES, x, weight, None, dy)
    y = mf.grouped_matmul(x, weight, torch.tensor(SIZES), recipe="mxfp8", backend="reference")
    y.backward(dy)
    assert all(map(torch.equal, (y, x.grad, weight.grad), expected))
    with mf.autocast(recipe=MXFP8BlockScaling()):
        assert torch.equal(mf.grouped_matmul(x, weight, SIZES), y)
        with mf.autocast(enabled=False):
            plain = mf.grouped_matmul(x, weight, SIZES, recipe="mxfp8")
    parts = x.split(SIZES)
    assert torch.equal(plain, torch.cat([part @ one.t() for part, one in zip(parts, weight, strict=True)]))
    assert torch.equal(mf.grouped_matmul(x, weight, SIZES), plain)
    with pytest.raises(NotSupportedError, match="GroupedLinear"):
        mf.grouped_matmul(x, weight, SIZES, recipe=DelayedScaling())
    with pytest.raises(InvalidValueError, match="backend"):
        mf.grouped_matmul(x, weight, SIZES, recipe="mxfp8", backend="nativ")


def test_main_grad():
    """features M4: dw of every expert is added to `main_grad` in float32."""
    x, weight, _, dy = operands()
    layer = layer_of(weight, recipe="mxfp8", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.ones(weight.shape)
    layer(x, SIZES).backward(dy)
    assert layer.weight.grad is None
    plain = layer_of(weight, recipe="mxfp8")
    plain(x, SIZES).backward(dy)
    torch.testing.assert_close((layer.weight.main_grad - 1).bfloat16(), plain.weight.grad, rtol=2**-7, atol=2**-12)


def test_main_grad_in_high_precision():
    """features M4: outside of a recipe too; the first microbatch overwrites."""
    x, weight, bias, dy = operands()
    layer, plain = layer_of(weight, bias, fuse_wgrad_accumulation=True), layer_of(weight.float(), bias.float())
    layer.weight.main_grad = torch.ones(weight.shape)
    for first in (True, False):
        layer(x, SIZES, is_first_microbatch=first).backward(dy)
        plain(x.float(), SIZES).backward(dy.float())
        torch.testing.assert_close(layer.weight.main_grad, plain.weight.grad)
    assert layer.weight.grad is None


@pytest.mark.slow_cases("further recipes and modules of a checked kind", all_but=("delayed", "nvfp4"))
@pytest.mark.parametrize("name", ["delayed", "fp8_block", "mxfp8", "nvfp4"])
def test_the_first_microbatch_keeps_the_weights(name, monkeypatch):
    """features M13: the codes of all experts serve later microbatches of other sizes, until a weight changes."""
    recipe, states = from_name(name), []
    x, weight, _, dy = operands()
    sizes = SIZES, SIZES[::-1], [sum(SIZES)] + [0] * (len(SIZES) - 1)
    cast, made = schedule.Schedule.quantize_weight, []
    monkeypatch.setattr(schedule.Schedule, "quantize_weight", lambda *call: made.append(call) or cast(*call))
    for keeps in (False, True):
        layer, results = layer_of(weight, recipe=recipe), []
        for step in range(2):
            made.clear()
            with mf.autocast(recipe=recipe):
                for index, own in enumerate(sizes):
                    torch.manual_seed(index)
                    y = layer(x, own, is_first_microbatch=index == 0 if keeps else None)
                    y.backward(dy)
                    results += [y.detach(), x.grad]
                    x.grad = None
            assert not keeps or len(made) == len(SIZES)
            with torch.no_grad():
                layer.weight.mul_(1 + step)
        mf.update_scaling(layer)
        states.append([*results, layer.weight.grad, *layer.state_dict().values()])
    assert all(map(torch.equal, *states))
    with pytest.raises(InvalidTypeError, match="is_first_microbatch"):
        layer(x, SIZES, is_first_microbatch=1)


def test_convert_pins_experts_and_revert_lets_them_go():
    model = nn.ModuleDict({"up": nn.Linear(64, 64), "experts": mf.GroupedLinear(2, 64, 64)})
    report = mf.convert(model, "mxfp8")
    assert [(row.name, row.action) for row in report.rows] == [("up", "converted"), ("experts", "repinned")]
    assert model["experts"].pinned == from_name("mxfp8")
    mf.quantize_(model, mf.WeightOnly("mxfp8"))
    assert type(mf.revert(model)["experts"].weight) is nn.Parameter
    assert model["experts"].effective_recipe() is None
    with pytest.raises(InvalidValueError, match="the name first"):
        mf.convert(model, "mxfp8", filter=lambda m, n: isinstance(m, nn.Linear))


def test_precedence_of_recipes():
    x, weight, _, _ = operands()
    layer = layer_of(weight)
    plain = layer(x, SIZES)
    with mf.autocast(recipe="nvfp4"):
        torch.manual_seed(1)
        nvfp4 = layer(x, SIZES)
        layer.pin("mxfp8")
        mxfp8 = layer(x, SIZES)
        with mf.autocast(enabled=False):
            assert torch.equal(layer(x, SIZES), plain)
    assert torch.equal(mxfp8, layer(x, SIZES))
    assert not torch.equal(nvfp4, mxfp8)
    assert layer.unpin().effective_recipe() is None


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_row"])
@pytest.mark.parametrize("sizes", [[0, 0, 0, 0], [0, 0, 5, 0]])
def test_few_or_no_rows(recipe, sizes):
    x, weight, bias, dy = operands(sizes)
    layer = layer_of(weight, bias, recipe=recipe)
    y = layer(x, sizes)
    y.backward(dy)
    assert y.shape == (sum(sizes), N)
    assert x.grad.shape == x.shape
    assert not layer.weight.grad[[0, 1, 3]].any()
    assert not layer.bias.grad[[0, 1, 3]].any()


def test_mixed_dtypes():
    """Under torch.autocast x and w are cast to its dtype; otherwise the compute dtype is x's and dw is in w's."""
    x, weight, _, dy = operands(dtype=torch.float32)
    layer = layer_of(weight, recipe="mxfp8", backend="reference")
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, SIZES)
    assert y.dtype == BFLOAT16
    y.backward(dy.bfloat16())
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    expected = mf.grouped_matmul(x.bfloat16(), weight.bfloat16(), SIZES, recipe="mxfp8", backend="reference")
    assert torch.equal(y, expected)
    y = layer(x.detach().bfloat16(), SIZES)
    assert y.dtype == BFLOAT16
    layer.weight.grad = None
    y.backward(dy.bfloat16())
    assert layer.weight.grad.dtype == torch.float32


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("delayed",))
@pytest.mark.parametrize("name", [None, "delayed", "fp8_block", "mxfp8", "nvfp4"])
def test_compiled_fullgraph(compiler, name):
    """One graph, the bits of eager mode, and other sizes without another compilation."""
    x, weight, bias, dy = operands()
    outcomes = []
    for compiled in (False, True):
        layer = layer_of(weight, bias, recipe=name)
        layer_call, results = compiler(layer) if compiled else layer, []
        for sizes in (SIZES, [0, 30, 30, 10]):
            x.grad = layer.weight.grad = layer.bias.grad = None
            torch.manual_seed(3)
            with mf.autocast(recipe="mxfp8"):  # the layer's own recipe wins; delayed scaling needs a region
                y = layer_call(x, torch.tensor(sizes))
            y.backward(dy)
            results += [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]
        if name == "delayed":
            mf.update_scaling(layer)
            results += [value for key, value in layer.state_dict().items() if key.startswith("scaling")]
        outcomes.append(results)
    for eager, got in zip(*outcomes, strict=True):
        assert torch.equal(eager, got)


def test_compiled_function_and_errors(compiler):
    x, weight, _, _ = operands()

    def run(x, weight, sizes):
        return mf.grouped_matmul(x, weight, sizes, recipe="mxfp8")

    assert torch.equal(compiler(run)(x, weight, torch.tensor(SIZES)), run(x, weight, SIZES))
    with pytest.raises(InvalidValueError, match="add up to 60"):
        compiler(run)(x, weight, torch.tensor([33, 0, 17, 10]))


@pytest.mark.parametrize("name", ["delayed", "mxfp8", "nvfp4"])
def test_checkpointed(name):
    """A checkpoint recomputes the same bits, also under a policy of operators."""
    x, weight, bias, dy = operands()
    outcomes = []
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    selective = functools.partial(mf.checkpoint, context_fn=policy)
    for call in (lambda function, *arguments: function(*arguments), mf.checkpoint, selective):
        layer = layer_of(weight, bias)
        x.grad = None
        torch.manual_seed(5)
        with mf.autocast(recipe=RECIPE_CASES[name]):
            y = call(layer, x, torch.tensor(SIZES))
        y.backward(dy)
        outcomes.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    assert all(all(map(torch.equal, outcomes[0], other)) for other in outcomes[1:])


def test_state_copies_and_text():
    """The keys are `weight` [G, N, K] and `bias` [G, N]; copies and files keep the recipe's state."""
    layer = mf.GroupedLinear(4, K, N, True, recipe=DelayedScaling())
    assert tuple(layer.weight.shape) == (4, N, K)
    assert tuple(layer.bias.shape) == (4, N)
    assert layer.weight.abs().max() <= K**-0.5
    x = torch.randn(70, K)
    layer(x, SIZES).sum().backward()
    mf.update_scaling(layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    fresh = mf.GroupedLinear(4, K, N, True, recipe=DelayedScaling())
    fresh.load_state_dict(layer.state_dict())
    plain = mf.GroupedLinear(4, K, N, True)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False), fresh):
        assert torch.equal(other(x, SIZES), layer(x, SIZES))
    assert "num_groups=4, in_features=48, out_features=40, bias=True" in repr(layer)
    model = torch.nn.Sequential(mf.GroupedLinear(2, 8, 8), torch.nn.Linear(8, 8))
    assert [row.name for row in mf.convert(model, "mxfp8", exclude=()).rows] == ["0", "1"]
    assert mf.convert(model, "mxfp8", exclude=()).unseen == ()


def test_explained():
    """`explain` of a model has a row for a grouped layer, and says how its groups run."""
    model = torch.nn.Sequential(mf.GroupedLinear(2, 128, 128, recipe="mxfp8"), mf.GroupedLinear(2, 8, 8))
    first, second = mf.explain(model)
    assert first.shape == (128, 128)
    assert "one group after the other" in first.reason
    assert second.recipe is None


def test_meta_and_reset():
    layer = mf.GroupedLinear(2, 8, 4, True, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.ones(3, 8), [1, 2]).isfinite().all()
