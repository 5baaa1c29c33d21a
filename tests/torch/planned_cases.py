"""Cases of tests/torch/test_planned.py: the plan of a Linear against the general path, on a GPU or interpreted."""

import contextlib
import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import microfloat.torch as mf
import microfloat.torch.nn.linear as linear_module
from microfloat.errors import NotSupportedError
from microfloat.recipes import RECIPES, CustomRecipe, DelayedScaling, Float8CurrentScaling, Gemm, MXFP8BlockScaling
from microfloat.torch import backends, planned, rolling, scaling
from microfloat.torch.backends import native
from microfloat.torch.backends.native import _plan, _products
from microfloat.torch.backends.native._forms import Chip
from microfloat.torch.backends.triton import _delayed, _direct, _launch, _programs, _scaled, _together

M, K, N = 32, 48, 64


@contextlib.contextmanager
def native_on(device: str):
    """The native backend of a Hopper: as it is on a GPU; on the CPU in Triton's interpreter, under its own name."""
    planned._PLANS.clear()
    if device == "cuda":
        yield
        return
    saved = backends.choose, planned._ON_CPU_TOO, native.chip_of, rolling._update_kernel
    rolling._update_kernel = lambda device: _delayed
    backends.choose = lambda name, device: native
    planned._ON_CPU_TOO = True
    native.chip_of = lambda device: Chip((9, 0))
    try:
        yield
    finally:
        backends.choose, planned._ON_CPU_TOO, native.chip_of, rolling._update_kernel = saved
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
        likes = [_launch.as_bytes(tensor) for tensor in tensors]
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

        self._compiled[key] = _direct.Start(start, bind)
        return self._compiled[key]

    saved = _launch.Kernel.compile, _launch.INTERPRETED
    _launch.Kernel.compile, _launch.INTERPRETED = compile_interpreted, False
    planned._PLANS.clear()
    try:
        yield
    finally:
        _launch.Kernel.compile, _launch.INTERPRETED = saved
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

    saved = F.scaled_mm, _products._scaled_mm_v2
    F.scaled_mm, _products._scaled_mm_v2 = scaled_mm, scaled_mm_v2
    try:
        yield
    finally:
        F.scaled_mm, _products._scaled_mm_v2 = saved


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


def _recipe(name):
    return MXFP8BlockScaling(path="exact") if name == "mxfp8_exact" else RECIPES[name]()


def same_bits(device, name, shape, out, bias, dtype):
    dtype = getattr(torch, dtype)
    steps = [inputs(device, shape, out, dtype=dtype, seed=seed) for seed in range(2)]
    spy = compare(device, _recipe(name), steps, bias=bias, dtype=dtype, features=(shape[-1], out))
    assert spy.backwards == spy.forwards


def same_bits_by_addresses(device, name):
    """As `same_bits`; on the CPU with launches by address, as they are on a GPU."""
    if device == "cuda":
        return
    steps = [inputs(device, (2, 16, K), seed=seed) for seed in range(3)]
    compare(device, _recipe(name), steps, guard=by_addresses)


def rows_together(device):
    """Rows measured and cast in one launch, which CUDA tensors are released to once this has passed on a GPU."""
    saved = _together._MODES_ON_CUDA
    _together._MODES_ON_CUDA = (*saved, _scaled.AXES)
    try:
        for shape, out in (((32, 48), 64), ((80, 144), 272), *([((208, 1040), 1552)] if device == "cuda" else [])):
            same_bits(device, "fp8_row", shape, out, False, "bfloat16")
    finally:
        _together._MODES_ON_CUDA = saved


def cuda_keeps_what_has_run(device):
    """Launches that have not been compared on a GPU are left out for CUDA tensors alone."""
    matrix = SimpleNamespace(tensor=SimpleNamespace(is_cuda=True), rows=16, columns=16, index64=False)
    for mode in (_scaled.GIVEN, _scaled.AMAX, _scaled.AXES):
        assert _together.fits_together(matrix, None, mode) is (mode in _together._MODES_ON_CUDA)
    matrix.tensor.is_cuda = False
    assert _together.fits_together(matrix, matrix, _scaled.AXES)


def general_backward_takes_over(device, name):
    """Fewer gradients than the plan was made for, by the general path, from what the plan has saved; kept weights."""
    layer = make(_recipe(name), device)
    x, dy = inputs(device)
    with native_on(device), block_gemms(device, []):
        torch.manual_seed(5)
        first = layer(x)
        dx, dw = torch.autograd.grad(first, (x, layer.weight), dy)
        torch.manual_seed(5)
        got = layer(x)
        assert torch.equal(got, first)
        assert torch.equal(torch.autograd.grad(got, x, dy, retain_graph=True)[0], dx)
        assert torch.equal(torch.autograd.grad(got, layer.weight, dy)[0], dw)
        kept = []
        for is_first in (True, False):
            torch.manual_seed(5)
            kept.append(layer(x, is_first_microbatch=is_first))
        assert torch.equal(kept[0], got)
        assert torch.equal(kept[1], got)
        assert len({id(plan) for _, plan in planned._PLANS.values()}) == 1


def counts_change_the_plan(device):
    """What folding changed is counted by the plan as without one; too much of it leads to other forms, by plan too."""
    outcomes, forms = [], []
    x, dy = inputs(device, (32, 128), out=128)
    with torch.no_grad():  # in some groups of 128 scales lie far apart, so that small values are lost
        x[:, ::64] *= 2.0**40
    with native_on(device), block_gemms(device, []):
        for guard in (contextlib.nullcontext, without_plans):
            with guard():
                layer = make(MXFP8BlockScaling(), device, features=(128, 128))
                outcome = []
                for _ in range(3):
                    outcome += results(layer, [(x, dy)])
                    outcome.append(torch.tensor(sorted(layer.folded_elements().values())))
                outcomes.append([*outcome, torch.tensor(sorted(layer.__dict__["_fold_counts"].shares().values()))])
                forms.append(native.call_forms(layer.pinned, x.device, layer.__dict__["_fold_counts"]))
        plans = [plan for _, plan in planned._PLANS.values()]
    assert_same(*outcomes)
    assert forms[0] == forms[1] != plans[0].forms
    assert plans[0].variants


def general_path_serves_the_rest(device, what):
    """Inputs that a plan does not fit run without one, to the same bits."""
    recipe = Float8CurrentScaling()
    x, dy = inputs(device)
    options, planned_steps, run = {}, 0, None
    if what == "odd rows":
        x, dy = inputs(device, (M - 1, K))
    elif what == "odd features":
        options["features"], (x, dy) = (K - 3, N), inputs(device, (M, K - 3))
    elif what == "misaligned":
        flat = torch.randn(M * K + 1, dtype=torch.bfloat16).to(device)
        x = flat[1:].view(M, K).detach().requires_grad_()
    elif what == "transposed":
        x = torch.randn(K, M, dtype=torch.bfloat16).to(device).t().detach().requires_grad_()
    elif what == "another recipe":
        recipe = CustomRecipe(Gemm("fp8_tensor", "fp8_tensor"), Gemm(None, None), Gemm(None, None))
    elif what == "expanded dy":
        planned_steps, run = 1, lambda layer: lambda x: _Expanded.apply(layer(x))
    elif what == "strided x":
        planned_steps = 1
        x = torch.randn(M, 2 * K, dtype=torch.bfloat16).to(device)[:, :K].detach().requires_grad_()
    compare(device, recipe, [(x, dy)], planned_steps=planned_steps, run=run, **options)


class _Expanded(torch.autograd.Function):
    """Gives the layer a gradient without strides of its own."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy[:1].expand_as(dy)


def only_what_is_wanted(device):
    """Frozen inputs or weights: the gradient that remains, and one of two by torch.autograd.grad."""
    with native_on(device):
        for name in ("fp8_current", "delayed"):
            x, dy = inputs(device)
            layer = make(RECIPES[name](), device)
            y = layer(x)
            y.backward(dy)
            y = layer(x)
            want_dx, want_dw = torch.autograd.grad(y, (x, layer.weight), dy, retain_graph=True)
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            (dw,) = torch.autograd.grad(y, layer.weight, dy)
            assert torch.equal(dx, want_dx)
            assert torch.equal(dw, want_dw)
            if name == "delayed":
                continue  # its scales have moved on
            (dw,) = torch.autograd.grad(layer(x.detach()), layer.weight, dy)
            assert torch.equal(dw, want_dw)
            layer.weight.requires_grad_(False)
            (dx,) = torch.autograd.grad(layer(x), x, dy)
            assert torch.equal(dx, want_dx)
            with torch.no_grad():
                assert torch.equal(layer(x), y)


def a_changed_setting_finds_another_plan(device):
    """Each of these changes what a call does; none may run the plan made before."""
    with native_on(device):
        x, _ = inputs(device)
        layer = make(Float8CurrentScaling(), device)

        def check(what, *, dtype=None):
            y = layer(x)
            with without_plans():
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


def equal_recipes_share_plans(device):
    """A recipe made anew in every step, as `autocast()` without one may, finds what the step before has made."""
    with native_on(device):
        layer = make(None, device)
        x, _ = inputs(device)
        for _ in range(3):
            with mf.autocast(recipe=Float8CurrentScaling(fp8_format="HYBRID")):
                layer(x)
            with mf.autocast():
                layer(x)
        assert len(planned._PLANS) == 1


def activations_are_cast_once(device):
    """Two layers that read one activation share its codes, to the bits of casts of their own; changes are seen."""
    casts, run = [], _programs.Program.run

    def counted(self, stream, given):
        casts.extend((given[_programs.SOURCE], given[_programs.SECOND]))
        return run(self, stream, given)

    with native_on(device):
        first, second = make(Float8CurrentScaling(), device), make(Float8CurrentScaling(), device)
        leaf, dy = inputs(device)
        _programs.Program.run = counted
        try:
            x = leaf * 2
            y = first(x) + second(x)
            assert [t is x for t in casts].count(True) == 1
            y.backward(dy)
            got = y.detach(), leaf.grad, first.weight.grad, second.weight.grad
            x = leaf * 2
            first(x)
            with torch.no_grad():
                x.mul_(-1)
            casts.clear()
            changed = second(x)
            assert any(t is x for t in casts)
        finally:
            _programs.Program.run = run
        assert torch.equal(changed, second((leaf * -2).detach()))
        first.zero_grad()
        second.zero_grad()
        twin = leaf.detach().clone().requires_grad_()
        with without_plans():
            first_x, second_x = twin * 2, twin * 2
            y = first(first_x) + second(second_x)
            y.backward(dy)
        assert_same(got, (y.detach(), twin.grad, first.weight.grad, second.weight.grad))


def microbatches(device, name):
    """The kept weight saves its cast, and no bits change; a changed weight is cast again."""
    recipe = RECIPES[name]()
    with native_on(device):
        outcomes = []
        for guard in (contextlib.nullcontext, without_plans):
            layer, kept = make(recipe, device), []
            layer(inputs(device)[0]).sum()
            with guard():
                for step in range(2):
                    with mf.autocast(recipe=recipe):
                        for index in range(3):
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
    """A weight kept by one plan serves that of another number of rows; one that folds otherwise casts anew."""
    with native_on(device), block_gemms(device, []):
        for name in ("fp8_current", "mxfp8"):
            layer = make(_recipe(name), device)
            first, second = inputs(device)[0], inputs(device, (2 * M, K))[0]
            layer(first, is_first_microbatch=True)
            kept = layer.__dict__["_weight_cache"]["operands"]
            y = layer(second, is_first_microbatch=False)
            assert layer.__dict__["_weight_cache"]["operands"] is kept
            assert torch.equal(y, layer(second))
        layer.__dict__["_fold_counts"].narrow.add(("fprop", "rhs"))
        layer(second, is_first_microbatch=False)
        assert layer.__dict__["_weight_cache"]["operands"] is not kept


def regions(device):
    """Several layers in one autocast, called twice, as one region; exceptions; calls without gradients."""
    recipe = DelayedScaling(amax_history_len=4)
    with native_on(device):
        outcomes = []
        for guard in (contextlib.nullcontext, without_plans):
            first, second, kept = make(recipe, device), make(recipe, device, features=(N, K)), []
            with guard():
                for step in range(3):
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
                for layer in (first, second):
                    mf.update_scaling(layer)
                    kept += [buffer.clone() for buffer in layer.buffers()]
                    kept += [scaling.previous_scale(layer, slot).clone() for slot in scaling.SLOTS]
            outcomes.append(kept)
        assert_same(*outcomes)


def saved_tensors_may_travel(device):
    """Saved-tensor hooks get codes, and may return them in another layout; checkpointing recomputes them."""
    with native_on(device):
        x, dy = inputs(device)
        layer = make(Float8CurrentScaling(), device)
        layer(x).backward(dy)
        expected, x.grad = (x.grad, layer.weight.grad.clone()), None
        layer.zero_grad()
        dtypes = []

        def pack(tensor):
            dtypes.append(tensor.dtype)
            return tensor.clone(memory_format=torch.contiguous_format)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = layer(x)
        y.backward(dy)
        assert torch.float8_e4m3fn in dtypes
        assert torch.bfloat16 not in dtypes
        assert_same(expected, (x.grad, layer.weight.grad))
        for recipe in (Float8CurrentScaling(), DelayedScaling()):
            grads = []
            for checkpointed in (False, True):
                layer = make(recipe, device)
                for _ in range(3):
                    x.grad = None
                    layer.zero_grad()
                    if checkpointed:
                        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                    else:
                        y = layer(x)
                    y.backward(dy)
                grads.append((x.grad, layer.weight.grad, *[buffer.clone() for buffer in layer.buffers()]))
            assert_same(*grads, recipe)


def in_place_after_three_dimensions(device):
    with native_on(device):
        for recipe in (Float8CurrentScaling(), MXFP8BlockScaling(path="exact")):
            x, dy = inputs(device, (2, M, K))
            layer = make(recipe, device)
            y = torch.relu_(layer(x))
            y.backward(dy)
            expected, x.grad = x.grad, None
            torch.relu(layer(x)).backward(dy)
            assert torch.equal(x.grad, expected)


def double_backward_is_refused(device):
    with native_on(device):
        x, _ = inputs(device)
        (dx,) = torch.autograd.grad(make(Float8CurrentScaling(), device)(x).sum(), x, retain_graph=True)
        assert dx is not None
        with pytest.raises(NotSupportedError, match="double backward"):
            torch.autograd.grad(make(Float8CurrentScaling(), device)(x).sum(), x, create_graph=True)


def graphs_and_streams(device):
    """GPU only: a captured forward + backward replays to the same bits; a side stream gives the same."""
    for name in ("fp8_current", "delayed", "fp8_row", "fp8_block", "mxfp8", "mxfp8_exact"):
        recipe = _recipe(name)
        x, dy = inputs(device)
        layer, twin = make(recipe, device), make(recipe, device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                x.grad = layer.weight.grad = None
                y = layer(x)
                y.backward(dy)
        torch.cuda.current_stream().wait_stream(side)
        del y  # its graph of another stream must not live on
        graph = torch.cuda.CUDAGraph()
        x.grad = layer.weight.grad = None
        with torch.cuda.graph(graph):
            y = layer(x)
            y.backward(dy)
        twin_x = x.detach().clone().requires_grad_()
        for _ in range(3):
            twin_x.grad = twin.weight.grad = None
            want = twin(twin_x)
            want.backward(dy)
        for step in range(3):
            fresh = torch.randn_like(x)
            with torch.no_grad():
                x.copy_(fresh)
                twin_x.copy_(fresh)
            graph.replay()
            twin_x.grad = twin.weight.grad = None
            want = twin(twin_x)
            want.backward(dy)
            torch.cuda.synchronize()
            what = (type(recipe).__name__, step)
            assert_same((want, twin_x.grad, twin.weight.grad), (y, x.grad, layer.weight.grad), what)


def threads(device):
    """GPU only: two threads with layers of one shape, hence one plan, on one stream and on two."""
    recipe = Float8CurrentScaling()
    pairs = [(make(recipe, device), *inputs(device, seed=seed)) for seed in range(2)]
    expected = []
    for layer, x, dy in pairs:
        y = layer(x)
        y.backward(dy)
        expected.append((y.detach(), x.grad, layer.weight.grad))
        del y  # its graph belongs to this stream
    torch.cuda.synchronize()
    faults = []

    def work(layer, x, dy, want, stream):
        with torch.cuda.stream(stream):
            for _ in range(50):
                twin = x.detach().clone().requires_grad_()
                y = layer(twin)
                dx, dw = torch.autograd.grad(y, (twin, layer.weight), dy)
                stream.synchronize()
                if not all(map(torch.equal, (y, dx, dw), want)):
                    faults.append(layer)

    for streams in ([torch.cuda.current_stream()] * 2, [torch.cuda.Stream() for _ in range(2)]):
        runs = [threading.Thread(target=work, args=(*pairs[i], expected[i], streams[i])) for i in range(2)]
        # Each thread's step may run on another stream than the latest before it: torch would remark on that.
        warns = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", lambda enabled: None)
        warns(False)
        for thread in runs:
            thread.start()
        for thread in runs:
            thread.join()
        warns(True)
    assert not faults


def run(case, device):
    """Run ``(function name, arguments)`` on a device."""
    name, arguments = case
    globals()[name](device, *arguments)
