"""torch.compile(fullgraph=True): the bits of eager, no stale recipe, no recompilation, state and seeds at run time."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import NotSupportedError  # noqa: E402
from microfloat.layout import layout_of  # noqa: E402
from microfloat.recipes import (  # noqa: E402
    RECIPES,
    Cast,
    CustomRecipe,
    DelayedScaling,
    Float8RowScaling,
    Gemm,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from microfloat.torch import backends, context  # noqa: E402
from microfloat.torch.backends.base import laid  # noqa: E402
from microfloat.torch.linear import schedule  # noqa: E402
from tests import processes  # noqa: E402

# What torch says of its own code: Dynamo instantiates every autograd Function that it traces, Inductor uses torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, **options):
    # aot_eager traces, functionalizes and partitions like inductor, without a C++ compiler run per test.
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def traced(function):
    """For what Dynamo alone decides: when it traces a function anew, and which recipe it traces."""
    return torch.compile(function, fullgraph=True, backend="eager")


def step(function, layer, x):
    x = x.detach().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(7)
    y = function(x)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    return [y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]


CASES = {
    **{name: maker() for name, maker in RECIPES.items() if name != "delayed"},
    "gw_hp": Float8RowScaling(wgrad="high_precision"),
    **{f"{name} dequantized": RECIPES[name](backward="dequantized") for name in ("fp8_block", "mxfp8", "nvfp4")},
    "one_none": CustomRecipe(Gemm(None, "nvfp4_2d"), Gemm("mxfp8", None), Gemm(None, None)),
}


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("nvfp4",))
@pytest.mark.parametrize("name", CASES)
def test_pinned_recipe_gives_the_bits_of_eager(name: str) -> None:  # features G1
    layer = mf.Linear(40, 24, dtype=torch.bfloat16, recipe=CASES[name])
    x = torch.randn(2, 9, 40, dtype=torch.bfloat16)
    expected = step(layer, layer, x)
    actual = step(compiled(layer), layer, x)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("delayed-*", "gw_hp-*"))
@pytest.mark.parametrize(("name", "kept"), [("mxfp8", False), ("delayed", False), ("gw_hp", True)])
def test_backward_keeps_the_codes_of_an_input_and_not_the_input(name: str, kept: bool) -> None:
    layer = mf.Linear(40, 24, bias=False, recipe=DelayedScaling() if name == "delayed" else CASES[name])
    # Something that no partitioner recomputes: a matrix product.
    before = torch.nn.Linear(16, 40, bias=False)
    saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    function = compiled(lambda x: layer(before(x)))
    x = torch.randn(8, 16)
    with mf.autocast(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x).sum().backward()
    assert (((8, 40), torch.float32) in saved) == kept


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("nvfp4",))
@pytest.mark.parametrize("name", ["mxfp8.exact", "nvfp4", "mixed"])
def test_backward_decodes_again_where_a_gemm_reads_values(name: str) -> None:
    """Decoded operands take two bytes an element, as x and w do, which are there: only these are kept."""
    pytest.importorskip("triton", reason="triton is not installed")
    from tests.torch.linear.scheduled.setting import by_torch

    recipes = {
        "mxfp8.exact": MXFP8BlockScaling(path="exact"), "nvfp4": NVFP4BlockScaling(),
        "mixed": CustomRecipe(Gemm("mxfp8", "mxfp8", path="exact"), Gemm("nvfp4", "nvfp4"), Gemm("fp8_row", "fp8_row")),
    }  # fmt: skip
    layer = mf.Linear(40, 24, dtype=torch.bfloat16, recipe=recipes[name])
    x = torch.randn(2, 9, 40, dtype=torch.bfloat16)
    with backends.pretend(chip="a100" if name == "mixed" else "h200", interpreted=False), by_torch():
        expected, saved = step(layer, layer, x), []
        function = compiled(layer)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            actual = step(function, layer, x)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    matrices = sorted((t.numel(), t.dtype) for t in saved if t.numel() > 64)
    codes = [(18 * 40, torch.float8_e4m3fn)] if name == "mixed" else [(18 * 40, torch.bfloat16)]
    assert matrices == [*codes, (40 * 24, torch.bfloat16)]


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow("C++ that Inductor compiles"))]
)
def test_a_model_gives_the_bits_of_eager(backend: str) -> None:
    # ReLU and no bias: Inductor's own GELU and sums differ from eager's in the last bit, which casts would magnify.
    shapes = ((32, 48), (48, 32))
    layers = [torch.nn.Linear(*shape, bias=False) for shape in shapes]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1])
    mf.convert(model, NVFP4BlockScaling())
    x = torch.randn(16, 32)

    def run(function) -> list[torch.Tensor]:
        torch.manual_seed(7)
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
        gradients = [layer.weight.grad for layer in layers]
        model.zero_grad()
        return [y, leaf.grad, *gradients]

    expected = run(model)
    # Precompiled headers pay for many kernels, not for those of one small model.
    with inductor_config.patch(cpp_cache_precompile_headers=False):
        actual = run(torch.compile(model, fullgraph=True, backend=backend))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


MADE_INSIDE = {
    "a recipe": lambda x, w: mf.linear(x, w, recipe=MXFP8BlockScaling(scale_rule="floor")),
    "a table of casts": lambda x, w: mf.linear(
        x, w, recipe=CustomRecipe(*[Gemm(Cast("mxfp6_e2m3", "ceil"), Cast("mxfp8"))] * 3)
    ),
    "a table of names": lambda x, w: mf.linear(x, w, recipe=CustomRecipe(*[Gemm("mxfp8", "mxfp4")] * 3)),
    "a name": lambda x, w: mf.linear(x, w, recipe="nvfp4"),
}


def test_layers_of_one_input_draw_seeds_of_their_own() -> None:
    """AOTAutograd merges calls of equal arguments in graphs with gradients, as of q, k and v, or of gate and up."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(32, 32, bias=False) for name in "ab"})
    mf.convert(model, NVFP4BlockScaling())
    cast, x = Cast("nvfp4", rounding="stochastic"), torch.randn(16, 32)

    def function(value):
        noisy = mf.fake_quantize(value, cast) - mf.fake_quantize(value, cast)
        return model["a"](value) * model["b"](value) + model["a"](value) + noisy

    outcomes = []
    for run in (function, compiled(function)):
        model.zero_grad()
        value = x.clone().requires_grad_()
        torch.manual_seed(1)
        y = run(value)
        y.square().sum().backward()
        outcomes.append([y.detach(), value.grad, *[parameter.grad for parameter in model.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_writes_of_one_value_draw_seeds_of_their_own() -> None:
    """The same of writes into stored weights, whose seeds are drawn where the graph is made."""
    cast, x, outcomes = Cast("nvfp4", rounding="stochastic"), torch.randn(16, 32), []

    def function(value, *stored):
        for q in stored:
            q.copy_(value.detach())
        return value.square().sum()

    for run in (function, compiled(function)):
        stored = [mf.quantize(torch.zeros(16, 32), cast, seed=0) for _ in range(2)]
        torch.manual_seed(1)
        run(x.clone().requires_grad_(), *stored).backward()
        outcomes.append(stored)
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert not torch.equal(*outcomes[1])


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("a name",))
@pytest.mark.parametrize("name", MADE_INSIDE)
def test_a_recipe_that_the_compiled_function_makes_is_that_of_eager(name: str) -> None:
    x, w = torch.randn(6, 64), torch.randn(48, 64)
    torch.manual_seed(1)
    expected = MADE_INSIDE[name](x, w)
    torch.manual_seed(1)
    assert torch.equal(traced(MADE_INSIDE[name])(x, w), expected)


def test_autocast_recipe_changes_between_two_calls_of_one_compiled_function() -> None:  # features G3
    layer = mf.Linear(32, 16)
    function = traced(layer)
    x = torch.randn(8, 32)
    for recipe in (MXFP8BlockScaling(), MXFP4BlockScaling(), None, NVFP4BlockScaling(), MXFP8BlockScaling()):
        if recipe is None:
            expected, actual = step(layer, layer, x), step(function, layer, x)
        else:
            with mf.autocast(recipe=recipe):
                expected, actual = step(layer, layer, x), step(function, layer, x)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_threads_and_tasks_run_what_their_own_autocast_asks_for() -> None:
    """While one thread is inside an autocast, another calls the same compiled functions; tasks take turns."""
    pinned, free = mf.Linear(32, 16, recipe=MXFP8BlockScaling()), mf.Linear(32, 16)
    counter = CompileCounterWithBackend("eager")
    functions = [(layer, torch.compile(layer, fullgraph=True, backend=counter)) for layer in (pinned, free)]
    x = torch.randn(8, 32)
    autocasts = ({"enabled": False}, {"recipe": NVFP4BlockScaling(), "enabled": False}, {"recipe": MXFP4BlockScaling()})
    results: list[object] = []

    def check() -> None:
        try:
            results.extend(torch.equal(function(x), layer(x)) for layer, function in functions)
        except Exception as error:
            results.append(error)

    def worker(options: dict) -> None:
        with mf.autocast(**options):
            for _ in range(3):
                turn.wait(60)
                turn.wait(60)
                check()
                turn.wait(60)

    for options in autocasts:
        turn = threading.Barrier(2, timeout=processes.SECONDS)
        thread = threading.Thread(target=worker, args=(options,), daemon=True)
        thread.start()
        for _ in range(3):
            turn.wait(60)
            check()  # in no autocast, while the other thread is in one
            turn.wait(60)
            turn.wait(60)
        processes.join(thread)
    assert results == [True] * 36

    async def task(options: dict) -> None:
        with mf.autocast(**options):
            for _ in range(3):
                await asyncio.sleep(0)
                check()

    async def main() -> None:
        await asyncio.gather(*(task(options) for options in (*autocasts, {"recipe": MXFP4BlockScaling()})))

    asyncio.run(main())
    assert results == [True] * 60
    # pinned: quantized and plain; free: plain and MXFP4. Nothing else that an autocast says compiles again.
    assert counter.frame_count == 4


def test_code_without_its_guards_raises_where_another_recipe_is_due() -> None:
    layers = [mf.Linear(32, 16), mf.Linear(32, 16, recipe=MXFP8BlockScaling())]
    x = torch.randn(8, 32)
    states = ({}, {"enabled": False}, {"recipe": MXFP8BlockScaling()})
    for layer in layers:
        ran = []
        for compiled_under in states:
            torch._dynamo.reset()
            with contextlib.ExitStack() as stack:
                if compiled_under:
                    stack.enter_context(mf.autocast(**compiled_under))
                program = torch.export.export(layer, (x,)).module()
            for called_under in states:
                with contextlib.ExitStack() as stack:
                    if called_under:
                        stack.enter_context(mf.autocast(**called_under))
                    try:
                        ran.append(torch.equal(program(x), layer(x)))
                    except NotSupportedError as error:
                        ran.append("guards were not evaluated" not in str(error))
        same_as_island = layer is layers[0]
        plain = [True, same_as_island, not same_as_island]
        assert ran == [*plain, same_as_island, True, False, not same_as_island, False, True]


@pytest.mark.slow("further programs of a checked kind")
def test_the_backend_of_the_autocast_is_that_of_compiled_code(monkeypatch) -> None:
    chosen = []
    choose = backends.choose
    monkeypatch.setattr(backends, "choose", lambda name, device: chosen.append(name) or choose("reference", device))
    own, free = mf.Linear(32, 16, recipe="mxfp8", backend="reference"), mf.Linear(32, 16)
    x = torch.randn(8, 32)
    for layer in (own, free):
        function = traced(layer)
        for name in ("auto", "triton", "native", "auto"):
            seen = []
            for run in (layer, function):
                chosen.clear()
                schedule.forget()
                with mf.autocast(recipe="mxfp8", backend=name):
                    run(x)
                seen.append(set(chosen))
            assert seen[0] == seen[1] == {"reference" if layer is own else name}


@pytest.mark.slow("further programs of a checked kind")
def test_calibration_records_in_compiled_code_what_it_records_in_eager_code() -> None:
    recipe = DelayedScaling(amax_history_len=3)
    states = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        layers = [mf.Linear(16, 8, recipe=recipe), mf.Linear(16, 8)]
        with mf.autocast(recipe=recipe):
            layers[1](torch.ones(1, 16))  # makes its buffers
        outputs = []
        for layer in layers:
            function = compiled(layer) if compile_it else layer
            for calibrating in (True, False, True):
                x = torch.randn(4, 16) * (1 + calibrating)
                with mf.autocast(enabled=False, recipe=recipe, calibrating=calibrating):
                    outputs.append(function(x))
            mf.update_scaling(layer)
        states.append([*outputs, *(value for layer in layers for value in layer.state_dict().values())])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    layer = mf.Linear(16, 8)
    with (
        mf.autocast(enabled=False, recipe=recipe, calibrating=True),
        pytest.raises(Exception, match="one step in eager"),
    ):
        compiled(layer)(torch.ones(1, 16))


@pytest.mark.slow("further programs of a checked kind")
def test_a_backward_outside_the_autocast_recomputes_what_ran_inside() -> None:
    layer = mf.Linear(32, 32)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda y: layer(y).relu(), x, use_reentrant=False)

    gradients = []
    for run in (lambda x: layer(x).relu(), compiled(function)):
        x = torch.linspace(-2, 3, 256).reshape(8, 32).requires_grad_()
        layer.zero_grad()
        with mf.autocast(recipe=MXFP8BlockScaling()):
            y = run(x)
        y.square().sum().backward()
        gradients.append([x.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_island_around_a_compiled_pinned_layer() -> None:
    layer = mf.Linear(32, 16, recipe=MXFP8BlockScaling())
    function = traced(layer)
    x = torch.randn(8, 32)
    quantized = function(x)
    with mf.autocast(enabled=False):
        plain = function(x)
    assert torch.equal(plain, torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert torch.equal(function(x), quantized)
    assert not torch.equal(plain, quantized)


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("delayed",))
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "delayed"])
def test_no_recompilation_per_step_or_for_equal_recipes(name: str) -> None:
    counter = CompileCounterWithBackend("eager")
    layer = mf.Linear(32, 16, recipe=DelayedScaling(amax_history_len=4) if name == "delayed" else None)
    function = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for index in range(6):
        recipe = DelayedScaling(amax_history_len=4) if name == "delayed" else RECIPES[name]()
        with mf.autocast(recipe=recipe):
            y = function(torch.randn((8, 12, 20)[index % 3], 32))
        y.sum().backward()
        with torch.no_grad():
            layer.weight.sub_(layer.weight.grad, alpha=0.01)
        if index == 2:
            after_first_round = counter.frame_count
    assert counter.frame_count == after_first_round


@pytest.mark.slow("one forward for each backward, of which the next test has several")
def test_delayed_scaling_state_is_that_of_eager() -> None:
    states = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        layer = mf.Linear(16, 8, recipe=DelayedScaling(amax_history_len=3))
        function = compiled(layer) if compile_it else layer
        outputs = []
        for index in range(4):
            x = torch.randn(4, 16) * 2.0**index
            with mf.autocast(recipe=DelayedScaling(amax_history_len=3)):
                y = function(x)
            y.square().sum().backward()
            outputs.append(y.detach())
        states.append([*outputs, layer.weight.grad, *layer.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_delayed_scaling_state_is_that_of_eager_with_several_forwards_before_a_backward() -> None:
    states = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        layer = mf.Linear(16, 8, recipe=DelayedScaling(amax_history_len=3))
        function = compiled(layer) if compile_it else layer
        waiting = []
        for index in range(5):  # as stages of a pipeline do: a backward after the next forward
            with mf.autocast(recipe=DelayedScaling(amax_history_len=3)):
                y = function(torch.randn(4, 16) * 2.0**index) + function(torch.randn(4, 16))
            waiting.append(y.square().sum())
            if index:
                waiting.pop(0).backward()
        mf.update_scaling(layer)
        states.append([y.detach(), layer.weight.grad, *layer.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_state_that_is_dropped_before_the_backward_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 8))
    mf.convert(model, DelayedScaling(amax_history_len=3))
    with mf.autocast():
        y = compiled(model)(torch.ones(4, 16))
    mf.revert(model)
    with pytest.raises(NotSupportedError, match="dropped since its forward"):
        y.sum().backward()
    with mf.autocast():  # which rolls what backward passes have recorded
        model(torch.ones(4, 16))


def test_delayed_scaling_without_autocast_says_what_to_do() -> None:
    layer = mf.Linear(16, 8, recipe=DelayedScaling())
    with mf.autocast():
        left = contextvars.copy_context()  # what a task sees that was started in it
    for caller in (contextvars.Context(), left):
        with pytest.raises(Exception, match="Call the compiled function"):
            caller.run(compiled(layer), torch.randn(4, 16))


def test_saved_operands_lie_as_their_fake_promises() -> None:
    """MX scales of both operands lie column-major, and what is made in another order is copied."""
    recipes = ((MXFP8BlockScaling(), True, (1, 64)), (NVFP4BlockScaling(), True, (16, 1)))
    for recipe, paired, strides in recipes:
        promised = layout_of(recipe.wgrad.rhs, 64, 256, paired=paired)
        assert promised.scale.strides == strides
        for part in (promised.codes, promised.scale):
            for tensor in (torch.ones(part.shape), torch.ones(part.shape[::-1]).t()):
                assert laid(tensor, part).stride() == part.strides


def test_an_input_without_rows_gives_an_empty_result_and_no_gradient() -> None:
    layer = mf.Linear(32, 16, recipe=MXFP8BlockScaling())
    x = torch.randn(0, 32, requires_grad=True)
    y = compiled(layer)(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == ((0, 16), (0, 32))
    assert not layer.weight.grad.any()


@pytest.mark.slow("joint products, which tests of modules compile too")
def test_joint_products_under_delayed_scaling_are_compiled_as_they_run_in_eager_mode() -> None:
    """Outputs, gradients and state: the first part keeps the state of the product, the entries of others stay fresh."""

    def steps(run: Callable[[torch.nn.Module], Callable]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        sizes = {"q_proj": 16, "k_proj": 8}
        layer = mf.LayerNormLinear(32, 24, bias=False, normalization="RMSNorm", split=sizes, dtype=torch.bfloat16)
        mf.convert(layer, DelayedScaling(amax_history_len=2))
        made, function = [], run(layer)
        for size in (1, 5):
            x = (torch.randn(16, 32) * size).bfloat16().requires_grad_()
            with mf.autocast():
                y = function(x)
            y.float().square().sum().backward()
            made += [y, x.grad]
        return [*made, *(p.grad for p in layer.parameters()), *layer.buffers()]

    eager = steps(lambda layer: layer)
    assert all(torch.equal(a, b) for a, b in zip(steps(compiled), eager, strict=True))


@pytest.mark.slow("further programs of a checked kind")
def test_errors_of_compiled_code_name_the_layer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
    mf.convert(model, DelayedScaling(amax_history_len=3))
    with mf.autocast():
        y = compiled(model)(torch.ones(4, 16))
    model[1].unpin()
    with pytest.raises(NotSupportedError, match=r"dropped since its forward.*\(In the layer '1'\.\)"):
        y.sum().backward()
    experts = mf.GroupedLinear(2, 16, 8, recipe="mxfp8")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
    mf.convert(model, MXFP8BlockScaling())
    for path, call in (("1", compiled(model)), ("GroupedLinear", compiled(lambda x: experts(x, [1, 3])))):
        y = call(torch.ones(4, 16))
        schedule.forget()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backends, "choose", refused)
            with pytest.raises(NotSupportedError, match=rf"no such chip \(In the layer ['\"]{path}"):
                y.sum().backward()


def refused(*_: object) -> None:
    raise NotSupportedError("no such chip")


def test_torchs_own_checks_of_the_layers_operators() -> None:  # features G2
    """Fakes, as torch.library.opcheck sees them: shapes, dtypes and strides are those of the outputs."""
    operators, checks = torch.ops.microfloat, "test_faketensor"  # that of schemas knows no float8
    x, weight, dy, scale = torch.randn(40, 64), torch.randn(32, 64), torch.randn(40, 32), torch.ones(())
    for recipe, records in ((MXFP8BlockScaling(), False), (NVFP4BlockScaling(), False), (DelayedScaling(), True)):
        token = context.token_of(recipe)
        seed = torch.tensor([1, 2]) if context.is_stochastic(token) else None
        scales = (scale, scale) if records else (None, None)
        settings = "", token, "layer", "reference", torch.float32, torch.float32, True, True, records
        call = x, [weight], None, None, seed, *scales, *settings
        torch.library.opcheck(operators.linear_forward.default, call, test_utils=checks)
        _, *saved = operators.linear_forward(*call)
        saved = saved[1:] if records else saved
        call = dy, x, [weight], saved, None, seed, None, None, scales[0], None, *settings
        torch.library.opcheck(operators.linear_backward.default, call, test_utils=checks)
        ends, experts = torch.tensor([10, 40], dtype=torch.int32), [weight.expand(2, 32, 64).clone()]
        call = x, experts, None, ends, seed, *scales, *settings
        torch.library.opcheck(operators.linear_forward.default, call, test_utils=checks)
        call = dy, x, experts, [], ends, seed, *scales, scales[0], torch.float32, *settings
        torch.library.opcheck(operators.linear_backward.default, call, test_utils=checks)
