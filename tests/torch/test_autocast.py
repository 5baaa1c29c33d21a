"""autocast: nesting, islands, exceptions, threads, async tasks, precedence, re-entry, backward afterwards."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import copy
import functools
import pickle
import threading
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.recipes import (  # noqa: E402
    DelayedScaling,
    Float8CurrentScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Placement,
)
from tests import processes  # noqa: E402

MX8, MX4 = MXFP8BlockScaling(), MXFP4BlockScaling()


@pytest.fixture
def layer() -> mf.Linear:
    return mf.Linear(32, 16)


# One row per pair of the order: island > pinned > ambient > plain.
@pytest.mark.parametrize(
    ("pinned", "contexts", "expected"),
    [
        ("unpinned", [], None),
        ("unpinned", [{"recipe": MX8}], MX8),
        ("unpinned", [{}], Float8CurrentScaling()),
        ("unpinned", [{"recipe": MX8}, {"recipe": MX4}], MX4),
        ("unpinned", [{"recipe": MX8}, {"enabled": False}], None),
        ("unpinned", [{"enabled": False}, {"recipe": MX4}], MX4),
        (MX4, [], MX4),
        (MX4, [{"recipe": MX8}], MX4),
        (MX4, [{"enabled": False}], None),
        (MX4, [{"enabled": False}, {"recipe": MX8}], MX4),
        (None, [{"recipe": MX8}], None),
        (None, [], None),
    ],
)
def test_precedence(layer, pinned, contexts, expected) -> None:  # features P1, P2, P3
    if pinned != "unpinned":
        layer.pin(pinned)
    stack = [mf.autocast(**options) for options in contexts]
    for context in stack:
        context.__enter__()
    try:
        assert layer.effective_recipe() == expected
    finally:
        for context in reversed(stack):
            context.__exit__(None, None, None)
    assert layer.effective_recipe() == (None if pinned == "unpinned" else pinned)


@pytest.mark.parametrize("pinned", [True, False])
def test_evaluation_keeps_the_recipe(layer, pinned) -> None:  # features P15
    x = torch.randn(8, 32)
    plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
    if pinned:
        layer.pin(MX4)
    with mf.autocast(recipe=MX4):
        trained = layer(x)
        with torch.no_grad():
            assert torch.equal(layer.eval()(x), trained)
    assert not torch.equal(trained, plain)
    with mf.autocast(enabled=False):
        assert torch.equal(layer(x), plain), "high precision is asked for"


def test_unpinned_layers_follow_the_autocast_again():
    layer = mf.Linear(32, 32, recipe=MX4)
    x = torch.ones(2, 32)
    with mf.autocast(recipe=MX8):
        assert layer.effective_recipe() == MX4
        by_pin = layer(x)
        assert layer.unpin() is layer
        assert layer.effective_recipe() == MX8
        assert not torch.equal(layer(x), by_pin), "the weight cast for the pinned recipe is gone"
    assert layer.effective_recipe() is None


def test_state_is_restored_on_exceptions(layer) -> None:
    with mf.autocast(recipe=MX8):
        with pytest.raises(KeyError), mf.autocast(recipe=MX4):
            raise KeyError
        assert layer.effective_recipe() == MX8
    assert layer.effective_recipe() is None


def test_backward_uses_the_recipe_of_its_forward(layer) -> None:
    x = torch.randn(8, 32, requires_grad=True)
    with mf.autocast(recipe=MX8):
        layer(x).sum().backward()
    inside = x.grad.clone(), layer.weight.grad.clone()
    x.grad = layer.weight.grad = None
    with mf.autocast(recipe=MX8):
        y = layer(x)
    with mf.autocast(recipe=MX4):
        y.sum().backward()
    assert torch.equal(x.grad, inside[0])
    assert torch.equal(layer.weight.grad, inside[1])


def test_threads_do_not_see_each_other(layer) -> None:  # features P4
    seen: dict[str, object] = {}
    inside, done = threading.Event(), threading.Event()

    def worker() -> None:
        seen["start"] = layer.effective_recipe()
        with mf.autocast(recipe=MX4):
            inside.set()
            done.wait(5)
            seen["own"] = layer.effective_recipe()

    with mf.autocast(recipe=MX8):
        thread = threading.Thread(target=worker, daemon=True)
        thread.start()
        assert inside.wait(5)
        assert layer.effective_recipe() == MX8
        done.set()
        processes.join(thread)
    assert seen == {"start": None, "own": MX4}


def test_async_tasks_do_not_see_each_other(layer) -> None:
    async def task(recipe, started, go) -> object:
        with mf.autocast(recipe=recipe):
            started.set()
            await go.wait()
            return layer.effective_recipe()

    async def main() -> list[object]:
        go, first, second = asyncio.Event(), asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(task(MX8, first, go)), asyncio.create_task(task(MX4, second, go))]
        await first.wait()
        await second.wait()
        assert layer.effective_recipe() is None
        go.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [MX8, MX4]


def test_the_state_is_readable_at_any_depth() -> None:
    """In its own thread, task and recomputation alike, also after an exception."""
    outside = mf.get_autocast_state()
    assert outside == mf.AutocastState() == mf.AutocastState(0, None, False, False, None, "auto")
    with contextlib.suppress(KeyError), mf.autocast(recipe="mxfp8", backend="reference"):
        with mf.autocast(enabled=False, recipe="fp8_row", calibrating=True):
            assert mf.get_autocast_state() == mf.AutocastState(2, None, is_island=True, calibrating=True)
            with mf.autocast(recipe=NVFP4BlockScaling()):
                assert mf.get_autocast_state() == mf.AutocastState(3, NVFP4BlockScaling())
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    assert pool.submit(mf.get_autocast_state).result(timeout=60) == outside
                raise KeyError
        raise AssertionError
    assert mf.get_autocast_state() == outside

    depths = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        with mf.autocast(recipe="fp8_row"):
            depths.append(mf.get_autocast_state().depth)
        depths.append(mf.get_autocast_state().depth)
        return x.sin()

    mf.checkpoint(noted, torch.ones(2, requires_grad=True)).sum().backward()
    with mf.autocast(recipe="mxfp8"):
        y = mf.checkpoint(noted, torch.ones(2, requires_grad=True))
    y.sum().backward()
    assert depths == [1, 0] * 2 + [2, 1] * 2


def test_the_state_of_tasks_is_their_own() -> None:
    async def nested(depth: int) -> int:
        if depth == 0:
            await asyncio.sleep(0)
            return mf.get_autocast_state().depth
        with mf.autocast(recipe="mxfp8"):
            await asyncio.sleep(0)
            return await nested(depth - 1)

    async def together() -> list[int]:
        return await asyncio.gather(*[nested(depth) for depth in (3, 0, 1)])

    assert asyncio.run(together()) == [3, 0, 1]


def test_one_instance_sequentially_but_not_nested(layer) -> None:  # features P5
    context = mf.autocast(recipe=MX8)
    for _ in range(2):
        with context:
            assert layer.effective_recipe() == MX8
            with pytest.raises(NotSupportedError, match="second time"):
                context.__enter__()
            assert layer.effective_recipe() == MX8
    assert layer.effective_recipe() is None


def test_decorator_may_recurse(layer) -> None:
    @mf.autocast(recipe=MX8)
    def count(depth: int) -> int:
        assert layer.effective_recipe() == MX8
        return depth if depth == 0 else count(depth - 1)

    assert count(3) == 0
    assert layer.effective_recipe() is None


def test_exits_out_of_order_are_errors_and_leave_the_state_from_before(layer) -> None:
    for order in ("abc", "acb", "bac", "bca", "cab", "cba"):
        contexts = {name: mf.autocast(recipe=recipe) for name, recipe in zip("abc", (MX8, MX4, MX8), strict=True)}
        entered = []
        for name, context in contexts.items():
            context.__enter__()
            entered.append(name)
        for name in order:
            if name == entered[-1]:
                contexts[name].__exit__(None, None, None)
            else:
                with pytest.raises(NotSupportedError, match="reverse order"):
                    contexts[name].__exit__(None, None, None)
            entered.remove(name)
            expected = contexts[entered[-1]]._state.recipe if entered else None
            assert layer.effective_recipe() == expected, order
        with contexts["a"]:  # an instance that was left may be entered again
            assert layer.effective_recipe() == MX8


def test_generators_that_interleave_get_an_error_and_leak_nothing(layer) -> None:
    def inside(recipe):
        with mf.autocast(recipe=recipe):
            yield layer.effective_recipe()
            yield layer.effective_recipe()

    first, second = inside(MX8), inside(MX4)
    assert [next(first), next(second)] == [MX8, MX4]
    next(first)
    with pytest.raises(NotSupportedError, match="one yield to the next"):
        next(first)
    assert list(second) == [MX4]
    assert layer.effective_recipe() is None


def test_an_exit_needs_an_entry(layer) -> None:
    context = mf.autocast(recipe=MX8)
    with pytest.raises(NotSupportedError, match="not entered"):
        context.__exit__(None, None, None)
    with context:
        pass
    with pytest.raises(NotSupportedError, match="not entered"):
        context.__exit__(None, None, None)


def test_an_exit_in_another_context_is_an_error_and_changes_nothing(layer) -> None:
    context, errors = mf.autocast(recipe=MX8), []

    def leave() -> None:
        try:
            context.__exit__(None, None, None)
        except NotSupportedError as error:
            errors.append(str(error))

    with context:
        thread = threading.Thread(target=leave, daemon=True)
        thread.start()
        processes.join(thread)
        contextvars.copy_context().run(leave)
        assert layer.effective_recipe() == MX8
    assert layer.effective_recipe() is None
    assert len(errors) == 2
    assert all("another thread or task" in error for error in errors)


def test_a_region_ends_with_the_last_autocast_in_it_and_has_failed_if_one_was_left_out_of_order() -> None:
    layer = mf.Linear(16, 8, recipe=DelayedScaling(amax_history_len=2))
    x = torch.ones(4, 16)
    outer, inner = mf.autocast(), mf.autocast()
    outer.__enter__()
    layer(x)
    inner.__enter__()
    with pytest.raises(NotSupportedError):
        outer.__exit__(None, None, None)
    layer(3 * x)
    inner.__exit__(None, None, None)
    assert layer.scaling_x_scale == 1
    assert layer.scaling_x_amax_history[0] == 3
    with mf.autocast():  # the step that is taken again
        layer(2 * x)
    assert layer.scaling_x_scale == 448 / 3


def test_a_context_that_outlives_its_autocast_has_regions_of_its_own() -> None:
    """A task or thread that was started inside an autocast keeps its recipe; its steps are not that autocast's."""

    def steps(layer, wrapped: bool) -> torch.Tensor:
        for size in (1.0, 2.0, 3.0):
            with mf.autocast(recipe=recipe) if wrapped else contextlib.nullcontext():
                layer(size * torch.ones(4, 16))
        return layer.scaling_x_scale

    recipe = DelayedScaling(amax_history_len=4)
    with mf.autocast(recipe=recipe):
        inherited = contextvars.copy_context()
    for wrapped in (False, True):
        layer = mf.Linear(16, 8, recipe=recipe)
        assert inherited.run(steps, layer, wrapped) == torch.tensor(448.0) / 3


def test_decorated_coroutines_run_under_it_in_their_task_and_generators_are_refused(layer) -> None:
    async def plain(recipe) -> list:
        seen = [layer.effective_recipe()]
        await asyncio.sleep(0)
        return [*seen, layer.effective_recipe()]

    class Callable:
        async def __call__(self, recipe) -> list:
            return await plain(recipe)

    class Generator:
        async def __call__(self):
            yield 1

    def steps():
        yield 1

    async def main() -> list:
        runs = [mf.autocast(recipe=recipe)(function)(recipe) for recipe in (MX8, MX4)
                for function in (plain, Callable(), functools.partial(plain))]  # fmt: skip
        return await asyncio.gather(*runs)

    assert asyncio.run(main()) == [[MX8] * 2] * 3 + [[MX4] * 2] * 3
    for generator in (Generator(), Generator().__call__, steps, functools.partial(steps)):
        with pytest.raises(InvalidTypeError, match=r"got a generator, needed a function or a coroutine.*each step"):
            mf.autocast(recipe=MX8)(generator)


def test_what_cannot_be_decorated_is_refused() -> None:
    model = type("Model", (), {})
    refused = ((model, "class Model"), (3, "int"), (staticmethod(print), "below"), (classmethod(print), "below"))
    for target, words in refused:
        with pytest.raises(InvalidTypeError, match=words):
            mf.autocast()(target)
    with pytest.raises(InvalidTypeError, match="parentheses"):
        mf.autocast(print)


def test_copies_are_instances_of_their_own(layer) -> None:
    context = mf.autocast(recipe=MX8, backend="reference")
    with context:
        for twin in (copy.copy(context), copy.deepcopy(context), pickle.loads(pickle.dumps(context))):
            assert repr(twin) == repr(context)
            with mf.autocast(recipe=MX4), twin:
                assert layer.effective_recipe() == MX8


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"recipe": MXFP8BlockScaling}, InvalidTypeError, "Call the class"),
        ({"recipe": 8}, InvalidTypeError, "int"),
        ({"recipe": "mxpf8"}, InvalidValueError, "Did you mean 'mxfp8'"),
        ({"recipe": Placement([("*", MX8)])}, InvalidTypeError, "convert"),
        ({"enabled": MX8}, InvalidTypeError, "recipe="),
        ({"calibrating": 1}, InvalidTypeError, "calibrating"),
        ({"backend": "trition"}, InvalidValueError, "triton"),
    ],
)
def test_bad_arguments(options, error, words) -> None:
    with pytest.raises(error, match=words):
        mf.autocast(**options)


def test_a_name_is_a_recipe(layer) -> None:
    with mf.autocast(recipe="nvfp4"):
        assert layer.effective_recipe() == NVFP4BlockScaling()


def test_deprecated_names_warn_and_work(layer) -> None:  # features P6
    with pytest.warns(DeprecationWarning, match="autocast"), mf.fp8_autocast(fp8_recipe=MX8):
        assert layer.effective_recipe() == MX8
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mf.fp8_model_init(recipe=MX8):
            pass
    assert [entry.category for entry in caught] == [DeprecationWarning]


def test_any_recipe_enters_and_availability_unpacks() -> None:  # features P9, P10
    for query in (mf.is_fp8_available, mf.is_mxfp8_available, mf.is_nvfp4_available, mf.is_fp8_block_scaling_available):
        support = query()
        available, reason = support
        assert available is True
        assert bool(support) is True
        assert reason
    assert mf.get_default_recipe() == Float8CurrentScaling()


def test_checkpoint_recomputes_with_the_same_bits() -> None:  # features S1
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mf.Linear(32, 64), mf.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x)))

    for recipe in (NVFP4BlockScaling(), DelayedScaling(amax_history_len=4), MX8):
        results = []
        for recompute in (False, True):
            torch.manual_seed(0)
            block = Block()
            gradients = []
            for _step in range(3):
                x = torch.randn(16, 32, requires_grad=True)
                with mf.autocast(recipe=recipe):
                    y = mf.checkpoint(block, x) if recompute else block(x)
                y.square().sum().backward()
                gradients += [y.detach(), x.grad]
            gradients += [parameter.grad for parameter in block.parameters()]
            mf.update_scaling(block)
            results.append([*gradients, *block.state_dict().values()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), recipe


def test_an_autocast_inside_a_checkpoint_replays_the_scales_of_its_forward() -> None:
    def run(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with mf.autocast(recipe=DelayedScaling(amax_history_len=2)):
            return layer(x)

    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        layer = mf.Linear(32, 32)
        x = torch.randn(8, 32, requires_grad=True)
        losses = []
        for size in (1.0, 4.0, 16.0):  # several regions before the first backward
            with mf.autocast(recipe=DelayedScaling(amax_history_len=2)):
                y = mf.checkpoint(run, layer, x * size) if recompute else run(layer, x * size)
            losses.append(y.square().sum())
        sum(losses).backward()
        gradients.append([x.grad, layer.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_torchs_own_checkpoint_of_pinned_layers() -> None:
    from torch.utils.checkpoint import checkpoint

    for recipe in (NVFP4BlockScaling(), DelayedScaling(amax_history_len=4)):
        results = []
        for recompute in (False, True):
            torch.manual_seed(0)
            layer = mf.Linear(32, 32, recipe=recipe)
            values = []
            for _step in range(3):
                x = torch.randn(16, 32, requires_grad=True)
                y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
                y.square().sum().backward()
                values += [x.grad]
            results.append([*values, layer.weight.grad, *layer.state_dict().values()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), recipe
