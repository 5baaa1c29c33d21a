"""Memory that runs out anywhere in a step leaves every state as it was: the step, taken again, has its usual bits."""

import contextlib
import copy
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import microfloat.torch as mf
from microfloat.recipes import RECIPES, DelayedScaling
from microfloat.torch.context import ambient
from microfloat.torch.scaling import buffers as layer_state


class RunsOut(TorchDispatchMode):
    """Every operation that needs memory of its own counts; the one with number `at` finds none."""

    def __init__(self, at=-1):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (func._schema.is_mutable or func.is_view):
            self.count += 1
            if self.count == self.at:
                raise torch.OutOfMemoryError("planted")
        return func(*args, **(kwargs or {}))


def step(layer, recipe, x, dy, first, inside=True):
    """`inside`: backward belongs to the region of the autocast, so that a fault in it undoes the region."""
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(3)
    with mf.autocast(recipe=recipe):
        y = layer(leaf, first)
        if inside:
            y.backward(dy)
    if not inside:
        y.backward(dy)
    return [y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad]


RECIPES_WITH_STATE = {
    **{name: make() for name, make in RECIPES.items()},
    "most recent": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"),
}


@pytest.mark.slow_cases("further recipes whose step fails once", all_but=("nvfp4-", "delayed-weight cache"))
@pytest.mark.parametrize("first", [None, True], ids=["", "weight cache"])
@pytest.mark.parametrize("name", RECIPES_WITH_STATE)
def test_a_step_that_failed_may_be_taken_again(name, first):
    recipe = RECIPES_WITH_STATE[name]
    torch.manual_seed(0)
    layer = mf.Linear(24, 20)
    twin = copy.deepcopy(layer)
    x, dy = torch.randn(18, 24), torch.randn(18, 20)
    step(layer, recipe, x, dy, first)
    step(twin, recipe, x, dy, first)
    generator = torch.get_rng_state()
    for turn in range(2):
        x = x * 1.5
        with RunsOut() as whole:
            want = step(twin, recipe, x, dy, first)
        assert whole.count > 20
        failures, got = 0, None
        for at in itertools.count(1 + turn, 7):  # the last of them needs less
            try:
                with RunsOut(at):
                    got = step(layer, recipe, x, dy, first)
                break
            except torch.OutOfMemoryError:
                failures += 1
            assert ambient() is None
        assert failures > 2
        for part, other in zip(got, want, strict=True):
            assert torch.equal(part, other)
    torch.set_rng_state(generator)
    mf.update_scaling(layer)
    mf.update_scaling(twin)
    assert bool(list(layer.buffers())) is recipe.is_delayed
    for (key, mine), (_, theirs) in zip(layer.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), key


def test_scales_are_those_of_their_history_whatever_failed():
    """Backward outside the region: what forward recorded is rolled, and stays so when backward fails."""
    recipe = DelayedScaling()
    torch.manual_seed(0)
    layer = mf.Linear(24, 20)
    x, dy = torch.randn(18, 24), torch.randn(18, 20)
    with RunsOut() as whole:
        step(layer, recipe, x, dy, None, inside=False)
    for at in range(1, whole.count, 3):
        x, dy = x * 1.01, dy * 0.99
        with contextlib.suppress(torch.OutOfMemoryError), RunsOut(at):
            step(layer, recipe, x, dy, None, inside=False)
        for slot, largest in (("x", 448.0), ("w", 448.0), ("dy", 57344.0)):
            history, scale = layer_state.amax_history(layer, slot), layer_state.encode_scale(layer, slot)
            amax = history[1:].max()
            wanted = torch.tensor(largest) / amax if float(amax) > 0 else torch.ones(())
            assert float(scale) == float(wanted), f"{slot} after a fault at {at}"
