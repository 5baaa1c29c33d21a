"""State that lasts from call to call: schedules, kept weights, fold counts, the state of delayed scaling."""

import contextlib
import contextvars

import torch

import microfloat.torch as mf
from microfloat.recipes import RECIPES, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from microfloat.torch.linear import schedule
from microfloat.torch.scaling import buffers as layer_state
from microfloat.torch.scaling import regions as scaling
from tests.torch.linear.scheduled.setting import (
    K,
    M,
    N,
    assert_same,
    block_gemms,
    by_torch,
    inputs,
    make,
    native_on,
    recipe_of,
    results,
)


def counts_change_the_schedule(device):
    """Launches count the elements that folding changed as the oracle does; too many of them lead to other routes."""
    outcomes, routes = [], []
    x, dy = inputs(device, (32, 128), out=128)
    with torch.no_grad():  # in some groups of 128 scales lie far apart, so that small values are lost
        x[:, ::64] *= 2.0**40
    with native_on(device), block_gemms(device, []):
        for guard in (contextlib.nullcontext, by_torch):
            with guard():
                layer = make(MXFP8BlockScaling(), device, features=(128, 128))
                outcome = []
                for _ in range(3):
                    outcome += results(layer, [(x, dy)])
                    outcome.append(torch.tensor(sorted(layer.folded_elements().values())))
                outcomes.append([*outcome, torch.tensor(sorted(layer.__dict__["_fold_counts"].shares().values()))])
                routes.append([one.routes for one in schedule.SCHEDULES.values()])
    assert_same(*outcomes)
    assert routes[0] == routes[1]
    assert len(set(routes[0])) == len(routes[0]) > 1


def a_changed_setting_finds_another_schedule(device):
    """Each of these changes what a call does; none may run the schedule made before."""
    with native_on(device):
        x, _ = inputs(device)
        layer = make(Float8CurrentScaling(), device)

        def check(what, *, dtype=None):
            y = layer(x)
            with by_torch():
                expected = layer(x)
            assert y.dtype == (dtype or x.dtype), what
            assert y.requires_grad == expected.requires_grad, what
            assert torch.equal(y, expected), what

        check("first")
        layer.pin(Float8CurrentScaling(use_power_2_scales=True))
        check("recipe")
        layer.pin(None)
        check("high precision")
        layer.pin("fp8_current")
        layer.weight.data = torch.randn_like(layer.weight) * 3
        check("weight.data")
        with torch.no_grad():
            layer.weight.mul_(2)
        check("weight in place")
        layer.weight.requires_grad_(False)
        check("frozen weight")
        x = x.detach()
        check("x without gradient")
        x = x[: M // 2]
        check("rows")
        layer = layer.half()
        x = x.half()
        check("dtype", dtype=torch.float16)
        layer.eval()
        check("eval")
        with torch.autocast(device, torch.bfloat16):
            check("torch.autocast", dtype=torch.bfloat16)
        with mf.autocast(enabled=False):
            check("island")
        layer.weight = torch.nn.Parameter(torch.randn(N, K, dtype=torch.float16, device=device))
        check("another weight")


def equal_recipes_share_schedules(device):
    """A recipe made anew in every step, as `autocast()` without one may, finds what the step before has made."""
    with native_on(device):
        layer = make(None, device)
        x, _ = inputs(device)
        for _ in range(3):
            with mf.autocast(recipe=Float8CurrentScaling(fp8_format="HYBRID")):
                layer(x)
            with mf.autocast():
                layer(x)
        assert len(schedule.SCHEDULES) == 1


def every_call_casts_its_input(device):
    """Two layers that read one tensor cast it once each: nothing says whether it was written to in between."""
    with native_on(device):
        first, second = make(Float8CurrentScaling(), device), make(Float8CurrentScaling(), device)
        leaf, dy = inputs(device)
        x = leaf * 2
        y = first(x)
        x.data.mul_(-1)  # a write that no counter sees, as those of a kernel of one's own
        y = y + second(x)
        y.backward(dy)
        twins = leaf.detach() * 2, leaf.detach() * -2
        with by_torch():
            expected = first(twins[0]) + second(twins[1])
        assert_same([y.detach()], [expected.detach()])


def kept_weights_and_fused_optimizers(device):
    """A fused optimizer writes weights without counting it; its step is seen all the same."""
    with native_on(device):
        layer = make(Float8CurrentScaling(), device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, fused=True)
        x, dy = inputs(device)
        layer(x, is_first_microbatch=True).backward(dy)
        version = layer.weight._version
        optimizer.step()
        assert layer.weight._version == version
        assert torch.equal(layer(x, is_first_microbatch=False), layer(x))


def microbatches(device, name):
    """The kept weight saves its cast, and no bits change; a changed weight is cast again."""
    recipe = RECIPES[name]()
    # The interpreter takes seconds for each Linear, for one of NVFP4 most.
    steps, count = (2, 3) if device == "cuda" else (1 if name == "nvfp4" else 2, 2)
    with native_on(device):
        outcomes = []
        for guard in (contextlib.nullcontext, by_torch):
            layer, kept = make(recipe, device), []
            layer(inputs(device)[0]).sum()
            with guard():
                for step in range(steps):
                    with mf.autocast(recipe=recipe):
                        for index in range(count):
                            x, dy = inputs(device, seed=10 * step + index)
                            y = layer(x, is_first_microbatch=index == 0)
                            y.backward(dy)
                            kept += [y.detach(), x.grad]
                    with torch.no_grad():
                        layer.weight.add_(layer.weight.grad)
                    kept.append(layer.weight.grad.clone())
                    layer.zero_grad()
                    kept.append(layer(x, is_first_microbatch=False).detach())
            outcomes.append([*kept, *[buffer.clone() for buffer in layer.buffers()]])
        assert_same(*outcomes)


def kept_weights_serve_other_sizes(device):
    """A weight kept by one schedule serves that of another number of rows; one that folds otherwise casts anew."""
    with native_on(device), block_gemms(device, []):
        for name in ("fp8_current", "mxfp8"):
            layer = make(recipe_of(name), device)
            first, second = inputs(device)[0], inputs(device, (2 * M, K))[0]
            layer(first, is_first_microbatch=True)
            kept = layer.__dict__["_weight_cache"]._entry
            y = layer(second, is_first_microbatch=False)
            assert layer.__dict__["_weight_cache"]._entry is kept
            assert torch.equal(y, layer(second))
        layer.__dict__["_fold_counts"].narrow.add(("fprop", "rhs"))
        layer(second, is_first_microbatch=False)
        assert layer.__dict__["_weight_cache"]._entry is not kept


def regions(device):
    """Several layers in one autocast, called twice, as one region; exceptions; calls without gradients."""
    recipe = DelayedScaling(amax_history_len=4)
    steps = 3 if device == "cuda" else 2
    with native_on(device):
        outcomes = []
        for guard in (contextlib.nullcontext, by_torch):
            first, second, kept = make(recipe, device), make(recipe, device, features=(N, K)), []
            with guard():
                for step in range(steps):
                    x, dy = inputs(device, out=K, seed=step)
                    with mf.autocast(recipe=recipe):
                        y = second(first(x)) + second(first(2 * x))
                    y.backward(dy)
                    kept += [y.detach(), x.grad.clone()]
                    with torch.no_grad():
                        kept.append(first(x))
                    with contextlib.suppress(ZeroDivisionError), mf.autocast(recipe=recipe):
                        first(8 * x)
                        raise ZeroDivisionError
                    alone = first(3 * x)  # a region of its own, which also rolls dy
                    kept.append(alone.detach())
                    alone.sum().backward()
                with mf.autocast(recipe=recipe):
                    left = contextvars.copy_context()  # what a task sees that was started in it
                kept += [left.run(first, 5 * x).detach(), first.scaling_x_scale.clone()]
                for layer in (first, second):
                    mf.update_scaling(layer)
                    kept += [buffer.clone() for buffer in layer.buffers()]
                    kept += [scaling.previous_scale(layer, slot).clone() for slot in layer_state.SLOTS]
            outcomes.append(kept)
        assert_same(*outcomes)
