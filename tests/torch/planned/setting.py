"""Where plans run, and how their results are compared with those of the general path."""

import contextlib
import ctypes

import torch
import torch.nn.functional as F

import microfloat.torch as mf
import microfloat.torch.nn.linear as linear_module
from microfloat.chips import Chip
from microfloat.recipes import RECIPES, MXFP8BlockScaling
from microfloat.torch import backends, gemms, planned, program, rolling
from microfloat.torch.backends import native
from microfloat.torch.backends.native import _plan
from microfloat.torch.backends.triton import _delayed

M, K, N = 32, 48, 64


@contextlib.contextmanager
def native_on(device: str):
    """The native backend of a Hopper: as it is on a GPU; on the CPU in Triton's interpreter, under its own name."""
    planned._PLANS.clear()
    if device == "cuda":
        yield
        return
    saved = backends.choose, planned._ON_CPU_TOO, backends.chip_of, rolling._update_kernel
    rolling._update_kernel = lambda device: _delayed
    backends.choose = lambda name, device: native
    planned._ON_CPU_TOO = True
    backends.chip_of = lambda device: Chip((9, 0))
    try:
        yield
    finally:
        backends.choose, planned._ON_CPU_TOO, backends.chip_of, rolling._update_kernel = saved
        planned._PLANS.clear()


@contextlib.contextmanager
def without_plans():
    """The general path alone."""
    saved = linear_module.planned_linear
    linear_module.planned_linear = lambda *arguments: None
    try:
        yield
    finally:
        linear_module.planned_linear = saved


def _at(address, like):
    """The tensor at an address, laid out as another."""
    span = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)) + 1
    memory = (ctypes.c_uint8 * (span * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).as_strided(like.shape, like.stride())


@contextlib.contextmanager
def by_addresses():
    """In the interpreter, launches after the first are given addresses alone, as compiled kernels are."""

    def compile_interpreted(self, key, programs, tensors, scalars, constants, warps):
        likes = [program.as_bytes(tensor) for tensor in tensors]
        self.function[(programs,)](*likes, *scalars, *constants)
        aligned = [like is None or like.data_ptr() % 16 == 0 for like in likes]
        likes = [None if like is None else torch.empty_like(like) for like in likes]

        def start(programs, stream, addresses, rest):
            assert [address is None for address in addresses] == [like is None for like in likes]
            assert [(address or 0) % 16 == 0 for address in addresses] == aligned
            pairs = zip(addresses, likes, strict=True)
            self.function[(programs,)](*[None if like is None else _at(at, like) for at, like in pairs], *rest)

        def bind(programs, rest):
            return lambda stream, *addresses: start(programs, stream, addresses, rest)

        self._compiled[key] = program.Start(start, bind)
        return self._compiled[key]

    saved = program.Kernel.compile, program.INTERPRETED
    program.Kernel.compile, program.INTERPRETED = compile_interpreted, False
    planned._PLANS.clear()
    try:
        yield
    finally:
        program.Kernel.compile, program.INTERPRETED = saved
        planned._PLANS.clear()


class Spy:
    """Counts the calls that ran by plan."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    @contextlib.contextmanager
    def watching(self):
        plan = _plan.LinearPlan
        forward, backward = plan.forward, plan.backward

        def counted_forward(*arguments):
            self.forwards += 1
            return forward(*arguments)

        def counted_backward(*arguments):
            self.backwards += 1
            return backward(*arguments)

        plan.forward, plan.backward = counted_forward, counted_backward
        try:
            yield self
        finally:
            plan.forward, plan.backward = forward, backward


def make(recipe, device, *, bias=False, dtype=torch.bfloat16, features=(K, N)):
    """A layer with weights from a fixed seed."""
    torch.manual_seed(0)
    return mf.Linear(*features, bias=bias, dtype=dtype, recipe=recipe).to(device)


def inputs(device, shape=(M, K), out=N, dtype=torch.bfloat16, seed=1):
    """x, which requires a gradient, and dy."""
    torch.manual_seed(seed)
    x = torch.randn(shape, dtype=dtype).to(device).requires_grad_()
    return x, torch.randn((*shape[:-1], out), dtype=dtype).to(device)


def results(layer, steps, *, run=None):
    """Everything that a number of steps leaves behind."""
    kept = []
    for x, dy in steps:
        x.grad = None
        layer.zero_grad()
        y = (run or layer)(x)
        y.backward(dy)
        kept += [y.detach(), x.grad, *[parameter.grad for parameter in layer.parameters()]]
        kept += [buffer.clone() for buffer in layer.buffers()]
    mf.update_scaling(layer)
    return [None if t is None else t.clone() for t in [*kept, *layer.buffers()]]


def assert_same(first, second, what=""):
    """Bit for bit."""
    assert len(first) == len(second)
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        assert (a is None) == (b is None), (what, index)
        if a is not None and b is not None:
            assert a.dtype == b.dtype, (what, index)
            assert a.shape == b.shape, (what, index)
            assert torch.equal(a, b), (what, index)


@contextlib.contextmanager
def block_gemms(device, seen):
    """On the CPU, which has no block-scaled GEMM: one in float32, which keeps what it was given."""
    if device == "cuda":
        yield
        return

    def scaled_mm(a, b, a_scale, a_kind, b_scale, b_kind, *, output_dtype):
        kinds = F.ScalingType
        assert a_kind == kinds.BlockWise1x128
        seen.append([(t.shape, t.stride(), t.dtype) for t in (a, b, a_scale, b_scale)] + [b_kind, output_dtype])
        left = a.float() * a_scale.repeat_interleave(128, 1)[:, : a.shape[1]]
        if b_kind == kinds.BlockWise128x128:
            spread = b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            right = b.float() * spread[: b.shape[0], : b.shape[1]]
        else:
            right = b.float() * b_scale.t().repeat_interleave(128, 0)[: b.shape[0]]
        return (left @ right).to(output_dtype)

    def scaled_mm_v2(a, b, a_scales, a_kinds, a_swizzles, b_scales, b_kinds, b_swizzles, bias, dtype):
        assert bias is None
        assert a_swizzles == b_swizzles == []
        kinds = [F.ScalingType(kind) for kind in (*a_kinds, *b_kinds)]
        return scaled_mm(a, b, *a_scales, kinds[0], *b_scales, kinds[1], output_dtype=dtype)

    saved = F.scaled_mm, gemms._scaled_mm_v2
    F.scaled_mm, gemms._scaled_mm_v2 = scaled_mm, scaled_mm_v2
    try:
        yield
    finally:
        F.scaled_mm, gemms._scaled_mm_v2 = saved


def compare(device, recipe, steps, *, planned_steps=None, run=None, guard=contextlib.nullcontext, **options):
    """The same steps by plan and without, bit for bit, block GEMMs with the same arguments; by plan they did run."""
    spy, outcomes, arguments = Spy(), [], []
    with native_on(device):
        for around in (guard, without_plans):
            seen: list = []
            layer = make(recipe, device, **options)
            torch.manual_seed(5)  # the call seeds of stochastic rounding
            with block_gemms(device, seen), around(), spy.watching():
                outcomes.append(results(layer, steps, run=run and run(layer)))
            arguments.append(seen)
    expected = len(steps) if planned_steps is None else planned_steps
    assert spy.forwards == expected, f"{spy.forwards} forwards by plan, {expected} expected"
    assert_same(*outcomes)
    assert arguments[0] == arguments[1]
    return spy


def recipe_of(name):
    return MXFP8BlockScaling(path="exact") if name == "mxfp8_exact" else RECIPES[name]()
