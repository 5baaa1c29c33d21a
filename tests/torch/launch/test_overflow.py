"""A gradient with an infinity gives non-finite dx and dw, so that a GradScaler sees it (docs/numerics.md 8.4)."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat import reference  # noqa: E402
from microfloat.recipes import RECIPES, Cast, CustomRecipe, Gemm  # noqa: E402
from microfloat.torch.nn import functional as fused  # noqa: E402

M, K, N = 40, 64, 48
ROW, COLUMN = 5, 7
# One scale for the whole gradient: all of dx and of dw tells of one infinity.
WHOLE = ("delayed", "fp8_current", "nvfp4")


def _step(layer, x, dy):
    x.grad = None
    layer.zero_grad()
    layer(x).backward(dy)
    return x.grad, layer.weight.grad


def _inputs(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(M, K, dtype=dtype, requires_grad=True), torch.randn(M, N, dtype=dtype)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_not_finite_in_dy_shows_in_dx_and_dw(name, value):
    layer = mf.Linear(K, N, recipe=RECIPES[name]())
    x, dy = _inputs()
    assert all(bool(torch.isfinite(gradient).all()) for gradient in _step(layer, x, dy))
    dy[ROW, COLUMN] = value
    dx, dw = _step(layer, x, dy)
    assert not torch.isfinite(dx[ROW]).any()
    assert not torch.isfinite(dw[COLUMN]).any()
    if name not in WHOLE or value != value:  # a NaN stays where it is
        others = torch.arange(M) != ROW, torch.arange(N) != COLUMN
        assert torch.isfinite(dx[others[0]]).all()
        assert torch.isfinite(dw[others[1]]).all()
    layer.weight.requires_grad_(False)  # dx alone, and dw alone
    x.grad = None
    layer(x).backward(dy)
    assert not torch.isfinite(x.grad[ROW]).any()
    layer.weight.requires_grad_(True)
    layer(x.detach()).backward(dy)
    assert not torch.isfinite(layer.weight.grad[COLUMN]).any()


@pytest.mark.parametrize("name", RECIPES)
def test_gradscaler_lowers_its_scale(name):
    class Overflows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return (grad.float() * 1e9).half()

    layer = mf.Linear(K, N, bias=False, recipe=RECIPES[name]())
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with torch.autocast("cpu", torch.float16):
        loss = Overflows.apply(layer(torch.randn(M, K))).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(layer.weight, before)


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("delayed",))
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does that
@pytest.mark.parametrize("name", [*WHOLE, "fp8_block"])
def test_compiled(name):
    layer = mf.Linear(K, N, recipe=RECIPES[name]())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, dy = _inputs()
    dy[ROW, COLUMN] = float("inf")
    with mf.autocast(recipe=RECIPES[name]()):
        compiled(x).backward(dy)
    assert not torch.isfinite(x.grad[ROW]).any()
    assert not torch.isfinite(layer.weight.grad[COLUMN]).any()


def test_products_with_one_operand_in_high_precision():
    recipe = CustomRecipe(Gemm("fp8_row", "fp8_row"), Gemm("fp8_row", None), Gemm("fp8_row", None))
    x, dy = _inputs()
    dy[ROW, COLUMN] = float("inf")
    dx, dw = _step(mf.Linear(K, N, recipe=recipe), x, dy)
    assert not torch.isfinite(dx[ROW]).any()
    assert not torch.isfinite(dw[COLUMN]).any()


@pytest.mark.parametrize("name", ["fp8_current", "delayed", "fp8_block", "nvfp4"])
def test_fused_linears(name):
    torch.manual_seed(0)
    norm = torch.nn.RMSNorm(K)
    gate, up = (mf.Linear(K, 2 * K, bias=False, recipe=name) for _ in range(2))
    down = mf.Linear(2 * K, K, bias=False, recipe=name)
    x, dy = torch.randn(M, K, requires_grad=True), torch.randn(M, K)
    dy[ROW, COLUMN] = float("inf")
    fused.norm_mlp(x, norm, gate, down, up=up).backward(dy)
    assert not torch.isfinite(x.grad[ROW]).any()
    assert not torch.isfinite(down.weight.grad[COLUMN]).any()
    for layer in (gate, up):
        assert not torch.isfinite(layer.weight.grad).all()


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row", "fp8_1x128", "fp8_128x128", "nvfp4", "nvfp4_row"])
def test_stored_scales_are_those_of_any_other_tensor(name):
    x = torch.randn(32, 256)
    x[3, 4] = float("inf")
    got, want = mf.quantize(x, name), reference.quantize(x.numpy(), name)
    for field in ("scale", "tensor_scale"):
        stored, expected = getattr(got, field), getattr(want, field)
        assert (stored is None) == (expected is None)
        if stored is not None:
            assert stored.numpy().tobytes() == expected.tobytes()
            assert name == "nvfp4" or field == "scale" or torch.isfinite(stored).all()


def test_casts_of_gradients_are_no_other_casts_to_users():
    cast = Cast("fp8_tensor")
    assert cast.of_gradient is cast.of_gradient
    assert cast.of_gradient.of_gradient == cast.of_gradient != cast
    assert Cast("mxfp8").of_gradient == Cast("mxfp8")
    assert all(not cast.is_gradient for make in RECIPES.values() for cast in make().casts.values())
