"""Fused Linears against the same values cast and multiplied one by one: equal bits, on any backend.

The values, and the gradients of norm and activation, are those of `launch.prologues` on both sides (they are
in the tolerance class and have tests of their own); everything after them must not differ in a single bit.
"""

import contextlib
import copy
from unittest import mock

import torch
from torch import nn

import microfloat.torch as mf
from microfloat.recipes import Cast, CustomRecipe, Gemm, from_name
from microfloat.torch import backends
from microfloat.torch.launch.prologues import (
    Activation,
    ActivationGradient,
    Norm,
    Statistics,
    norm_gradients,
    values_of,
)
from microfloat.torch.linear.fold_counts import FoldCounts
from microfloat.torch.linear.fused_input import NormRun
from microfloat.torch.nn import functional as fused
from microfloat.torch.scaling import regions as scaling
from tests.torch.linear.scheduled.setting import block_gemms

TOKENS, WIDTH, HIDDEN, OUT = 40, 48, 80, 32


class _Normed(torch.autograd.Function):
    """The value of a norm whose statistics are given."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, kind, mean, inverse):
        ctx.norm, ctx.statistics = Norm(x, weight, bias, eps, kind), Statistics(mean, inverse)
        return ctx.norm.value_of(ctx.statistics)

    @staticmethod
    def backward(ctx, grad):
        wants = tuple(ctx.needs_input_grad[:3])
        return *norm_gradients(ctx.norm, ctx.statistics, grad, wants), None, None, None, None


class _Activated(torch.autograd.Function):
    """The value of an activation, by the same kernels as the fused form."""

    @staticmethod
    def forward(ctx, x, up, activation, kernels):
        ctx.save_for_backward(x, up)
        ctx.activation, ctx.kernels = activation, kernels
        ((value, _),), _ = values_of(Activation(x, up, activation), kernels)
        return value

    @staticmethod
    def backward(ctx, grad):
        x, up = ctx.saved_tensors
        values, _ = values_of(ActivationGradient(grad, x, up, ctx.activation), ctx.kernels)
        return values[0].value, values[1].value if up is not None else None, None, None


class Mlp(nn.Module):
    """norm, gate and up, down; also a Linear that reads the norm alone."""

    def __init__(self, kind, gated, bias, recipe, backend, device):
        super().__init__()
        place = {"device": device, "dtype": torch.bfloat16}
        self.kind = kind
        self.norm = (nn.RMSNorm if kind == "rms" else nn.LayerNorm)(WIDTH, eps=1e-5, **place)
        names = ("gate", "up") if gated else ("gate",)
        for name in names:
            self.add_module(name, mf.Linear(WIDTH, HIDDEN, bias=bias, **place, recipe=recipe, backend=backend))
        self.down = mf.Linear(HIDDEN, OUT, bias=bias, **place, recipe=recipe, backend=backend)
        with torch.no_grad():
            for parameter in self.norm.parameters():
                parameter.copy_(1 + 0.25 * torch.randn(WIDTH))

    @property
    def other(self):
        return getattr(self, "up", None)

    def fused(self, x, activation):
        return fused.norm_mlp(x, self.norm, self.gate, self.down, up=self.other, activation=activation)

    def in_parts(self, x, activation, statistics, kernels):
        norm = self.norm
        bias = getattr(norm, "bias", None)
        value = _Normed.apply(x, norm.weight, bias, norm.eps, self.kind, *statistics)
        gate = self.gate(value)  # before up: the seeds of stochastic rounding are drawn in this order
        up = None if self.other is None else self.other(value)
        return self.down(_Activated.apply(gate, up, activation, kernels))


RECIPES = {
    **{name: from_name(name) for name in ("delayed", "fp8_current", "fp8_row", "fp8_block", "mxfp8", "mxfp4", "nvfp4")},
    "noisy": CustomRecipe(*[Gemm(Cast("mxfp8", rounding="stochastic"), Cast("mxfp8"))] * 3),
    "no wgrad": CustomRecipe(*[Gemm(Cast("mxfp8"), Cast("mxfp8"))] * 2, Gemm(None, None)),
}


@contextlib.contextmanager
def on_cpu_too():
    """In Triton's interpreter kernels run on CPU tensors as on a Hopper, with a stand-in for its GEMM of blocks."""
    with backends.pretend(chip="h200"), block_gemms("cpu", []), mock.patch.object(FoldCounts, "note"):
        yield


def state_of(model):
    """Delayed-scaling buffers, by name."""
    mf.update_scaling(model)
    return {name: buffer for name, buffer in model.named_buffers() if "scaling_" in name}


def statistics_of(y):
    """(mean, inverse) as the fused forward saved them."""
    function = y.grad_fn
    while not isinstance(getattr(function, "run", None), NormRun):
        function = next(following for following, _ in function.next_functions if following is not None)
    return function.saved_tensors[3:5]


def check(device, backend, name, kind="rms", gated=True, bias=False, activation="silu"):
    """One step of `norm_mlp`, or two under delayed scaling: outputs, gradients and states are those of the parts."""
    recipe = RECIPES[name]
    torch.manual_seed(3)
    together = Mlp(kind, gated, bias, recipe, backend, device)
    apart = copy.deepcopy(together)
    kernels = backends.choose(backend, torch.device(device)).producers
    for step in range(2 if recipe.is_delayed else 1):
        x = (torch.randn(TOKENS, WIDTH) * (1 + step)).bfloat16().to(device)
        dy = torch.randn(TOKENS, OUT).bfloat16().to(device)
        results = []
        statistics = None
        for model in (together, apart):
            leaf = x.clone().requires_grad_()
            model.zero_grad()
            torch.manual_seed(step)
            with mf.autocast():
                y = model.fused(leaf, activation) if model is together else model.in_parts(
                    leaf, activation, statistics, kernels
                )  # fmt: skip
            statistics = statistics_of(y) if model is together else statistics
            y.backward(dy)
            gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
            results.append({"y": y.detach(), "dx": leaf.grad, **gradients})
        for key, want in results[1].items():
            got = results[0][key]
            assert got is not None, f"{name}: {key} has no gradient"
            assert got.dtype == want.dtype, key
            difference = float((got.float() - want.float()).norm())
            assert torch.equal(got, want), f"{name}, step {step}: {key} differs by {difference}"
    states = state_of(together), state_of(apart)
    assert states[0].keys() == states[1].keys()
    assert not recipe.is_delayed or len(states[0]) == 6 * len(list(scaling.scaled_layers(together)))
    for key, want in states[1].items():
        assert torch.equal(states[0][key], want), f"{name}: {key}"
