"""One call: the same bits by launches and by torch operations, whatever it is given or wanted of it."""

import contextlib
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import microfloat.torch as mf
from microfloat.errors import MicrofloatError, NotSupportedError
from microfloat.formats import E2M1, SCALE_E4M3, ScaledFormat
from microfloat.recipes import (
    RECIPES,
    Cast,
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Gemm,
    MXFP8BlockScaling,
)
from microfloat.torch.linear import schedule
from tests.torch.linear.scheduled.setting import (
    K,
    M,
    N,
    assert_same,
    block_gemms,
    by_addresses,
    by_torch,
    compare,
    inputs,
    make,
    native_on,
    recipe_of,
    results,
)


def same_bits(device, name, shape, out, bias, dtype):
    dtype = getattr(torch, dtype)
    steps = [inputs(device, shape, out, dtype=dtype, seed=seed) for seed in range(2)]
    compare(device, recipe_of(name), steps, bias=bias, dtype=dtype, features=(shape[-1], out))


def one_cast_without_a_kernel(device, name):
    """One operand of a tensor has no kernel, the other is read as values or folded: torch operations make both."""
    foreign = Cast(ScaledFormat("nv32", E2M1, SCALE_E4M3, (1, 32), "tensor"))
    gradient = Gemm(foreign, foreign)
    wide, dy = inputs(device, (M, 208), 144)
    wide = (wide.detach() * torch.exp2(torch.arange(208, device=device) % 40)).bfloat16().requires_grad_()
    recipe = CustomRecipe(Gemm(name, name), gradient, gradient)
    compare(device, recipe, [(wide, dy)], features=(208, 144))


def same_bits_by_addresses(device, name):
    """As `same_bits`; on the CPU with launches by address, as they are on a GPU."""
    if device == "cuda":
        return
    # The first step starts launches with tensors, the second by addresses.
    steps = [inputs(device, (2, 16, K), seed=seed) for seed in range(2)]
    compare(device, recipe_of(name), steps, guard=by_addresses)


def operators(device, name):
    """The operators of compiled code, as launches by address: no launch lacks an address that eager calls give it."""
    recipe = recipe_of(name)
    layer, (x, dy) = make(recipe, device), inputs(device, (2, 16, K))
    with native_on(device), block_gemms(device, []), contextlib.nullcontext() if device == "cuda" else by_addresses():
        torch._dynamo.reset()
        run = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for _ in range(2):  # the first call starts launches with tensors, the second by addresses
            made = []
            for call in (layer, run):
                x.grad = layer.weight.grad = None
                torch.manual_seed(0)
                y = call(x)
                y.backward(dy.view_as(y))
                made.append((y.detach(), x.grad.clone(), layer.weight.grad.clone()))
            assert_same(*made)
        torch._dynamo.reset()


def reads_what_fprop_read(device, name):
    """backward="dequantized": both gradients are products of dy and of fprop's operands, which alone are saved."""
    recipe = recipe_of(f"{name} dequantized")
    with native_on(device), block_gemms(device, []):
        layer, (x, dy) = make(recipe, device), inputs(device)
        saved = layer.schedule(x).saved_layouts
        layer(x).backward(dy)
    encoded = {"scale_enc": torch.ones((), device=device)} if recipe.is_delayed else {}
    x_values, w_values = (
        mf.quantize(tensor.detach(), cast, **encoded).dequantize(torch.bfloat16).float()
        for tensor, cast in zip((x, layer.weight), recipe.fprop.casts, strict=True)
    )
    for got, expected in ((x.grad, dy.float() @ w_values), (layer.weight.grad, dy.float().t() @ x_values)):
        # One rounding to bfloat16, and what folding changes.
        torch.testing.assert_close(got.float(), expected, rtol=2**-7, atol=float(expected.abs().max()) * 2**-9)
    with native_on(device):
        row = make(recipe_of(name), device).schedule(x).routes.fprop
    forms = ["bfloat16" if form == "values" else "" for form in row.forms]
    assert all(not form or layout.codes.dtype == form for form, layout in zip(forms, saved, strict=True))


def named_operators(device, name):
    """features S2: under a dispatch mode the casts and the product are operators with names, and make the same bits."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def named(layer):
        def run(x):
            with Mode():
                return layer(x)

        return run

    outcomes = []
    for run in (None, named):
        with native_on(device), block_gemms(device, []):
            layer, step = make(recipe_of(name), device, bias=True), inputs(device, (2, 16, K))
            torch.manual_seed(5)
            outcomes.append(results(layer, [step, step], run=run and run(layer)))
    assert_same(*outcomes)
    assert seen.count("microfloat.quantize_operands.default") == 2
    assert seen.count("microfloat.multiply_operands.default") == 2


def overflow(device, name):
    """An infinity in dy: non-finite dx and dw by launches, in the elements where torch operations have them."""
    outcomes = []
    for around in (contextlib.nullcontext, by_torch):
        with native_on(device), block_gemms(device, []), around():
            torch.manual_seed(5)
            layer, (x, dy) = make(recipe_of(name), device), inputs(device)
            steps = [dy, dy.clone(), dy]
            steps[1][3, 5] = float("inf")
            for step in steps:  # and nothing of it is left in the step that follows
                x.grad = layer.weight.grad = None
                layer(x).backward(step)
                outcomes.append([torch.isfinite(t) for t in (x.grad, layer.weight.grad)])
    for before, during, after in (outcomes[:3], outcomes[3:]):
        assert all(bool(finite.all()) for finite in (*before, *after))
        assert not during[0][3].any()
        assert not during[1][5].any()
    assert all(torch.equal(a, b) for a, b in zip(outcomes[1], outcomes[4], strict=True))


def any_input_is_served(device, what):
    """Ragged sizes, addresses, strides and recipes are schedules like any other."""
    recipe = Float8CurrentScaling()
    x, dy = inputs(device)
    options, run = {}, None
    if what == "odd rows":
        x, dy = inputs(device, (M - 1, K))
    elif what == "odd rows in blocks":  # whose 1x128 scales the vendor's GEMM takes for multiples of 8 rows only
        recipe, (x, dy), run = RECIPES["fp8_block"](), inputs(device, (M - 1, K)), _without_dw
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
        run = _expanded
    elif what == "strided x":
        x = torch.randn(M, 2 * K, dtype=torch.bfloat16).to(device)[:, :K].detach().requires_grad_()
    compare(device, recipe, [(x, dy)], run=run, **options)


def values_in_the_order_of_x(device, name):
    """Values of a column-major x are saved as they lie, and backward copies none of them."""
    recipe = recipe_of(name)
    layer, (_, dy) = make(recipe, device), inputs(device)
    x = torch.randn(K, M, dtype=torch.bfloat16).to(device).t().detach().requires_grad_()
    with native_on(device), mock.patch.object(schedule, "laid", side_effect=AssertionError("it is copied")):
        layer(x).backward(dy)
    assert x.grad is not None


def _expanded(layer):
    return lambda x: _Expanded.apply(layer(x))


def _without_dw(layer):
    layer.weight.requires_grad_(False)
    return layer


def negated_views(device):
    """Views whose memory holds the other sign: as x and as dy, beside plain tensors of the same values."""
    with native_on(device):
        outcomes = []
        torch.manual_seed(3)
        x, dy = (torch.randn(shape, device=device) for shape in ((M, K), (M, N)))
        imaginary = lambda t: torch.complex(torch.zeros_like(t), t).conj().imag  # noqa: E731
        for negate in (torch.neg, imaginary, torch._neg_view):
            for first, second in ((negate, torch.neg), (torch.neg, negate)):
                layer = make(Float8CurrentScaling(), device, dtype=torch.float32)
                outcomes.append(results(layer, [(first(x).detach().requires_grad_(), second(dy))]))
        for outcome in outcomes[1:]:
            assert_same(outcomes[0], outcome)


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


def fewer_gradients_than_planned(device, name):
    """One gradient of two, from what the forward for both has saved; kept weights."""
    layer = make(recipe_of(name), device)
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
        assert len(schedule.SCHEDULES) == 1


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
            for reentrant in (None, False, True):
                layer = make(recipe, device)
                for _ in range(3):
                    x.grad = None
                    layer.zero_grad()
                    if reentrant is None:
                        y = layer(x)
                    else:
                        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
                    y.backward(dy)
                mf.update_scaling(layer)
                grads.append((x.grad, layer.weight.grad, *[buffer.clone() for buffer in layer.buffers()]))
            assert_same(grads[0], grads[1], recipe)
            assert_same(grads[0], grads[2], recipe)


def operands_are_checked_once_for_all(device):
    """A bias that does not fit is refused before a schedule is made, also beside one for a bias that fits."""
    with native_on(device):
        layer, (x, _) = make(Float8CurrentScaling(), device, bias=True), inputs(device)
        bias = layer.bias
        layer(x)
        for shape, dtype in (((1, N), bias.dtype), ((N - 1,), bias.dtype), ((N,), torch.float64)):
            layer.bias = torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
            with pytest.raises(MicrofloatError, match=r"^bias: "):
                layer(x)
        for elsewhere in ("meta", "cpu") if device == "cuda" else ():
            layer.bias = torch.nn.Parameter(torch.ones(N, dtype=bias.dtype, device=elsewhere))
            with pytest.raises(MicrofloatError, match=rf"^bias: .*{elsewhere}"):
                layer(x)
        with pytest.raises(MicrofloatError, match=r"^x: .*sparse"):
            layer(x.detach().to_sparse())
        with pytest.raises(MicrofloatError, match="is_first_microbatch"):
            layer(x, is_first_microbatch="yes")


def a_computed_bias_is_not_dropped(device):
    """A parametrized bias is no parameter of the layer itself."""
    with native_on(device):
        layer, (x, _) = make(Float8CurrentScaling(), device, bias=True), inputs(device)
        y = layer(x)
        torch.nn.utils.parametrize.register_parametrization(layer, "bias", torch.nn.Identity())
        assert torch.equal(layer(x), y)


def transforms_are_refused(device):
    """A tangent or a batch of gradients never reaches a schedule."""
    with native_on(device):
        layer, (x, _) = make(Float8CurrentScaling(), device), inputs(device)
        layer.weight.requires_grad_(False)
        with forward_ad.dual_level(), pytest.raises(NotSupportedError, match="forward-mode"):
            layer(forward_ad.make_dual(x.detach(), x.detach()))
        y = layer(x)
        with pytest.raises(NotSupportedError, match="one gradient at a time"):
            torch.autograd.grad(y, x, torch.stack([torch.ones_like(y)] * 2), is_grads_batched=True)
