"""`linear_cross_entropy`: chunks of tokens as calls of a Linear, the loss, and the gradients that belong to it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat import reference  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.recipes import NVFP4BlockScaling, from_name  # noqa: E402
from microfloat.torch.linear.cross_entropy import default_chunk  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

T, K, N = 50, 64, 72  # the last of three chunks of 24 tokens has two
CHUNK = 24
STATELESS = ["fp8_current", "fp8_row", "fp8_block", "mxfp8", "mxfp4", "nvfp4"]


def tensors(dtype=torch.float32, tokens=T):
    """x, weight and labels, of which some do not count."""
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, K, dtype=dtype), torch.randn(N, K).div(4).to(dtype)
    labels = torch.randint(0, N, (tokens,))
    labels[::7] = -100
    return x.requires_grad_(), weight.requires_grad_(), labels


def gradients(loss, *leaves, of=None):
    torch.manual_seed(5)
    return torch.autograd.grad(loss, leaves, of)


def assert_all_equal(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STATELESS)
def test_one_chunk_is_the_unchunked_product(name, dtype):
    x, weight, labels = tensors(dtype)
    for reduction in ("mean", "sum"):
        torch.manual_seed(1)
        loss = mf.linear_cross_entropy(x, weight, labels, recipe=name, reduction=reduction)
        torch.manual_seed(1)
        logits = mf.linear(x, weight, recipe=name)
        want = F.cross_entropy(logits.float(), labels, reduction=reduction)
        assert torch.allclose(loss, want, rtol=1e-6)  # torch sums in another order
        assert_all_equal(gradients(loss, x, weight), gradients(want, x, weight))


@pytest.mark.parametrize("name", STATELESS)
def test_chunks_are_calls_of_a_linear(name):
    """Losses and dx are those of the chunks one by one, dw their sum in float32, rounded once."""
    x, weight, labels = tensors(torch.bfloat16)
    wide = weight.detach().float().requires_grad_()  # its dw is not rounded
    torch.manual_seed(1)
    loss = mf.linear_cross_entropy(x, weight, labels, recipe=name, chunk=CHUNK)
    dx, dw = gradients(loss, x, weight)
    torch.manual_seed(1)
    count, total, dws = (labels >= 0).sum(), 0.0, []
    for rows, at in zip(x.split(CHUNK), range(0, T, CHUNK), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            logits = mf.linear(rows, wide, recipe=name)
        part = F.cross_entropy(logits.float(), labels[at : at + CHUNK], reduction="sum") / count
        dx_of, dw_of = torch.autograd.grad(part, (rows, wide))
        assert torch.equal(dx_of, dx[at : at + CHUNK])
        total, dws = total + part.detach(), [*dws, dw_of]
    assert torch.equal(dw, (dws[0] + dws[1] + dws[2]).bfloat16())
    assert torch.allclose(loss, total, rtol=1e-6)


def by_numpy(x, weight, labels, recipe, chunk):
    """The rule of docs/numerics.md, section 6, in NumPy: loss, dx and dw of the mean."""
    x, weight, labels = x.detach().numpy(), weight.detach().numpy(), labels.numpy()
    seen = labels >= 0
    s, loss, dxs, dw = np.float32(1) / np.float32(seen.sum()), 0.0, [], 0.0

    def product(gemm, lhs, rhs):
        casts = getattr(recipe, gemm)
        return reference.scaled_matmul(reference.quantize(lhs, casts.lhs), reference.quantize(rhs, casts.rhs))

    for at in range(0, len(x), chunk):
        rows, index = x[at : at + chunk], np.where(seen, labels, 0)[at : at + chunk]
        logits = product("fprop", rows, weight).astype(np.float32).astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        counts = seen[at : at + chunk]
        loss -= (log_p[np.arange(len(rows)), index] * counts).sum() * s
        dy = (np.exp(log_p) - np.eye(N)[index]) * (s * counts)[:, None]
        dy = dy.astype(np.float32)
        dxs.append(product("dgrad", dy, weight.T.copy()))
        dw = dw + product("wgrad", dy.T.copy(), rows.T.copy())
    return loss, np.concatenate(dxs), dw


NEAREST_NVFP4 = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)


@pytest.mark.parametrize(
    ("recipe", "scales_have_mantissas"),
    [("fp8_current", True), (NEAREST_NVFP4, True), ("mxfp8", False), ("fp8_block", False)],
)  # fmt: skip
def test_the_rule_in_numpy(recipe, scales_have_mantissas):
    x, weight, labels = tensors()
    with torch.no_grad():  # chunks of different amaxes
        x[:CHUNK] *= 1.7
    recipe = from_name(recipe) if isinstance(recipe, str) else recipe
    loss = mf.linear_cross_entropy(x, weight, labels, recipe=recipe, chunk=CHUNK)
    got = [loss.item(), *(one.numpy() for one in gradients(loss, x, weight))]

    def distance(want):
        return [np.linalg.norm(one - other) / np.linalg.norm(other) for one, other in zip(got, want, strict=True)]

    assert max(distance(by_numpy(x, weight, labels, recipe, CHUNK))) < 1e-4
    if scales_have_mantissas:  # then the chunks are part of the rule
        assert max(distance(by_numpy(x, weight, labels, recipe, T))) > 1e-3


def test_a_gradient_of_each_token():
    x, weight, labels = tensors()
    factors = torch.linspace(-1, 2, T)
    torch.manual_seed(1)
    losses = mf.linear_cross_entropy(x, weight, labels, recipe="nvfp4", reduction="none")
    assert losses.shape == (T,)
    assert not losses[labels < 0].any()
    torch.manual_seed(1)
    want = F.cross_entropy(mf.linear(x, weight, recipe="nvfp4").float(), labels, reduction="none")
    assert torch.equal(losses, want)
    assert_all_equal(gradients(losses, x, weight, of=factors), gradients(want, x, weight, of=factors))


@pytest.mark.parametrize("name", ["nvfp4", "fp8_current"])
def test_logits_that_are_made_again_have_the_same_bits(name):
    """A gradient of one for each token, computed in backward, is that of the sum, computed in forward."""
    x, weight, labels = tensors(torch.bfloat16)
    results = []
    for reduction in ("none", "sum"):
        torch.manual_seed(1)
        loss = mf.linear_cross_entropy(x, weight, labels, recipe=name, reduction=reduction, chunk=CHUNK)
        torch.rand(3)  # other draws in between
        results.append((loss.sum().detach(), *gradients(loss.sum(), x, weight)))
    assert_all_equal(*results)


def test_the_factor_of_the_loss():
    """A factor that no bfloat16 has multiplies the gradients of forward with one rounding."""
    x, weight, labels = tensors(torch.bfloat16)
    loss = mf.linear_cross_entropy(x, weight, labels, recipe="mxfp8", chunk=CHUNK)
    plain = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    scaled = torch.autograd.grad(loss / 3, (x, weight))
    assert_all_equal(scaled, [(one.float() * (torch.ones(()) / 3)).bfloat16() for one in plain])


def test_float16_takes_the_factor_of_a_grad_scaler():
    """dy of a mean over many tokens is below float16's range: the factor comes before it is rounded."""
    x, weight, labels = tensors(torch.float16)
    labels[:] = 3
    losses = [mf.linear_cross_entropy(x, weight, labels, recipe="mxfp8"), None]
    losses[1] = F.cross_entropy(mf.linear(x, weight, recipe="mxfp8").float(), labels)
    for factor in (2.0**-14, 2.0**8):
        got, want = (torch.autograd.grad(loss * factor, (x, weight), retain_graph=True) for loss in losses)
        assert_all_equal(got, want)


def test_logits_are_never_whole():
    x, weight, labels = tensors(tokens=256)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            sizes.extend(one.numel() for one in (made if isinstance(made, tuple | list) else [made])
                         if isinstance(one, torch.Tensor))  # fmt: skip
            return made

    want = torch.autograd.grad(mf.linear_cross_entropy(x, weight, labels, recipe="mxfp8", chunk=32), (x, weight))
    for options in ({}, {"reduction": "none"}):
        with Sizes():
            loss = mf.linear_cross_entropy(x, weight, labels, recipe="mxfp8", chunk=32, **options).sum()
            got = torch.autograd.grad(loss, (x, weight))
        assert max(sizes) == x.numel() < 256 * N
    assert got[0].shape == want[0].shape


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "dtype", "chunk"),
    [(8192, 128256, torch.bfloat16, 2048), (8192, 128256, torch.float32, 1024), (16800, 32000, torch.bfloat16, 5632),
     (100, 32000, torch.bfloat16, 128), (0, 10, torch.float32, 128), (999, 2**31, torch.float32, 128)],
)  # fmt: skip
def test_the_default_chunk(tokens, vocabulary, dtype, chunk):
    assert default_chunk(tokens, vocabulary, dtype) == chunk


def test_the_recipe_of_the_autocast():
    x, weight, labels = tensors()
    want = mf.linear_cross_entropy(x, weight, labels, recipe="mxfp4")
    plain = mf.linear_cross_entropy(x, weight, labels)
    assert torch.allclose(plain, F.cross_entropy(F.linear(x, weight), labels), rtol=1e-6)
    with mf.autocast(recipe="mxfp4"):
        assert torch.equal(mf.linear_cross_entropy(x, weight, labels), want)
        with mf.autocast(enabled=False):
            assert torch.equal(mf.linear_cross_entropy(x, weight, labels, recipe="mxfp8"), plain)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mf.linear_cross_entropy(x, weight, labels, recipe="mxfp4")
        logits = mf.linear(x, weight, recipe="mxfp4")
    assert loss.dtype == torch.float32
    assert_all_equal(gradients(loss, x, weight), gradients(F.cross_entropy(logits.float(), labels), x, weight))


def test_leading_dimensions_and_tokens_that_do_not_count():
    x, weight, labels = tensors()
    flat = mf.linear_cross_entropy(x, weight, labels, recipe="mxfp8", reduction="none")
    shaped = mf.linear_cross_entropy(x.view(2, 25, K), weight, labels.view(2, 25), recipe="mxfp8", reduction="none")
    assert torch.equal(flat.view(2, 25), shaped)
    zero_is_padding = labels.clamp(min=0)
    got = mf.linear_cross_entropy(x, weight, zero_is_padding, recipe="mxfp8", ignore_index=0)
    want = F.cross_entropy(mf.linear(x, weight, recipe="mxfp8"), zero_is_padding, ignore_index=0)
    assert torch.allclose(got, want, rtol=1e-6)
    for rows in (T, 0):  # none counts
        none = torch.full_like(labels, -100)[:rows]
        loss = mf.linear_cross_entropy(x[:rows], weight, none, recipe="mxfp8")
        assert loss.isnan()
        assert not any(one.any() for one in gradients(loss, x, weight))
        assert mf.linear_cross_entropy(x[:rows], weight, none, recipe="mxfp8", reduction="sum") == 0


def test_gradients_that_nobody_wants_cost_nothing():
    x, weight, labels = tensors()
    products = []
    with torch.no_grad():
        want = mf.linear_cross_entropy(x, weight, labels, recipe="mxfp8")
    assert not want.requires_grad
    for wants in ((True, False), (False, True)):
        leaves = x.detach().requires_grad_(wants[0]), weight.detach().requires_grad_(wants[1])
        loss = mf.linear_cross_entropy(*leaves, labels, recipe="mxfp8")
        loss.backward()
        products.append([leaf.grad is not None for leaf in leaves])
        assert torch.equal(loss, want)
    assert products == [[True, False], [False, True]]


def test_a_frozen_weight_in_low_precision():
    x, weight, labels = tensors()
    stored = mf.quantize(weight.detach(), "mxfp8")
    loss = mf.linear_cross_entropy(x, stored, labels, recipe="mxfp8", chunk=CHUNK)
    want = mf.linear_cross_entropy(x, weight, labels, recipe="mxfp8", chunk=CHUNK)
    assert torch.equal(loss, want)
    (dx,) = gradients(loss, x)
    assert dx.isfinite().all()


@pytest.mark.parametrize("doubled", ["x", "weight"])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_float64_is_refused_with_a_remedy_that_helps(doubled, recipe):
    given = dict(zip(("x", "weight", "labels"), tensors(), strict=True))
    given[doubled] = given[doubled].double()
    with pytest.raises(InvalidTypeError, match=rf"{doubled}: got torch\.float64.*{doubled}\.to") as raised:
        mf.linear_cross_entropy(**given, recipe=recipe)
    assert "enabled=False" not in str(raised.value)
    assert mf.linear_cross_entropy(**{**given, doubled: given[doubled].to(torch.float32)}, recipe=recipe).isfinite()


def test_calls_that_have_no_answer():
    x, weight, labels = tensors()
    for wrong, message in ((labels.clamp(min=0) + N - 2, f"needed classes in \\[0, {N}\\)"), (labels - 7, "got -107")):
        with pytest.raises(InvalidValueError, match=message):
            mf.linear_cross_entropy(x, weight, wrong, recipe="mxfp8")
    labels[11] = N
    with pytest.raises(InvalidValueError, match=rf"labels: got {N} for token 11 .*after the shift"):
        mf.linear_cross_entropy(x, weight, labels)
    labels[11] = 0
    with pytest.raises(InvalidTypeError, match=r"labels: got torch\.float32"):
        mf.linear_cross_entropy(x, weight, labels.float())
    with pytest.raises(InvalidValueError, match="one class for each row"):
        mf.linear_cross_entropy(x, weight, labels[1:])
    with pytest.raises(InvalidValueError, match="reduction"):
        mf.linear_cross_entropy(x, weight, labels, reduction="median")
    with pytest.raises(InvalidValueError, match="chunk"):
        mf.linear_cross_entropy(x, weight, labels, chunk=0)
    with pytest.raises(NotSupportedError, match="delayed or static scaling"):
        mf.linear_cross_entropy(x, weight, labels, recipe="delayed")
    for reduction in ("mean", "none"):
        loss = mf.linear_cross_entropy(x, weight, labels, reduction=reduction).sum()
        with pytest.raises(NotSupportedError, match="double backward"):
            torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(NotSupportedError, match="vmap"):
        torch.func.grad(lambda one: mf.linear_cross_entropy(one, weight, labels))(x.detach())


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("nvfp4-none",))
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["nvfp4", None])
def test_compiled_code_gives_the_same_bits(name, reduction):
    x, weight, labels = tensors()

    def loss_of(labels):
        return mf.linear_cross_entropy(x, weight, labels, chunk=CHUNK, reduction=reduction)

    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    results = []
    for function in (loss_of, compiled):
        torch.manual_seed(1)
        with mf.autocast(enabled=name is not None, recipe=name or "mxfp8"):
            loss = function(labels)
        results.append((loss.detach(), *gradients(loss.sum() / 3, x, weight)))
    assert_all_equal(*results)
    with pytest.raises(InvalidValueError, match="labels: got"), torch.no_grad():
        compiled(labels + N)


def test_shapes_alone():
    x, weight, labels = (one.detach().to("meta") for one in tensors())
    loss = mf.linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), labels, recipe="nvfp4")
    assert loss.shape == ()
    assert [one.shape for one in gradients(loss, x, weight)] == [x.shape, weight.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [None, "fp8_current", "fp8_row", "fp8_block", "mxfp8", "nvfp4"])
def test_losses_on_a_gpu(name):
    """Within the roundings of dy those of the reference backend, with a factor behind the loss, and without tokens."""
    torch.manual_seed(0)
    x, weight = torch.randn(500, 256).bfloat16().cuda(), torch.randn(1040, 256).div(16).bfloat16().cuda()
    labels = torch.randint(0, 1040, (500,)).cuda()
    labels[::7] = -100
    for rows in (500, 0):
        found = []
        for backend in ("auto", "reference"):
            leaves = x[:rows].clone().requires_grad_(), weight.clone().requires_grad_()
            torch.manual_seed(1)
            with mf.autocast(enabled=name is not None, recipe=name, backend=backend):
                loss = mf.linear_cross_entropy(*leaves, labels[:rows], chunk=192, reduction="sum")
            found.append((loss.detach(), *torch.autograd.grad(loss / 3, leaves)))
        for one, other in zip(*found, strict=True):
            assert (one.float() - other.float()).norm() <= 0.02 * other.float().norm()
