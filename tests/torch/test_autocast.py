"""autocast: nesting, islands, exceptions, threads, async tasks, precedence, re-entry, backward afterwards."""

import asyncio
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
def test_precedence(layer, pinned, contexts, expected) -> None:
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


def test_threads_do_not_see_each_other(layer) -> None:
    seen: dict[str, object] = {}
    inside, done = threading.Event(), threading.Event()

    def worker() -> None:
        seen["start"] = layer.effective_recipe()
        with mf.autocast(recipe=MX4):
            inside.set()
            done.wait(5)
            seen["own"] = layer.effective_recipe()

    with mf.autocast(recipe=MX8):
        thread = threading.Thread(target=worker)
        thread.start()
        assert inside.wait(5)
        assert layer.effective_recipe() == MX8
        done.set()
        thread.join()
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


def test_one_instance_sequentially_but_not_nested(layer) -> None:
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


def test_deprecated_names_warn_and_work(layer) -> None:
    with pytest.warns(DeprecationWarning, match="autocast"), mf.fp8_autocast(fp8_recipe=MX8):
        assert layer.effective_recipe() == MX8
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mf.fp8_model_init(recipe=MX8):
            pass
    assert [entry.category for entry in caught] == [DeprecationWarning]


def test_any_recipe_enters_and_availability_unpacks() -> None:
    for query in (mf.is_fp8_available, mf.is_mxfp8_available, mf.is_nvfp4_available, mf.is_fp8_block_scaling_available):
        support = query()
        available, reason = support
        assert available is True
        assert bool(support) is True
        assert reason
    assert mf.get_default_recipe() == Float8CurrentScaling()


def test_checkpoint_recomputes_with_the_same_bits() -> None:
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
