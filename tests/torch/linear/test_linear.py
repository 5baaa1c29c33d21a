"""The three GEMMs of Linear, one by one against the oracle, for every recipe; dtypes, shapes, bias, caching, errors."""

import copy
import io
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat import reference  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.layout import stored_length  # noqa: E402
from microfloat.operands import OPERANDS_OF, TENSORS  # noqa: E402
from microfloat.recipes import (  # noqa: E402
    RECIPES,
    Cast,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Gemm,
    Hadamard,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from microfloat.torch.tensor.seeds import draw_seed  # noqa: E402
from tests.torch.arrays import to_float64, to_numpy  # noqa: E402

EDEN = Cast("nvfp4", rounding="eden", hadamard=Hadamard(64, 0x9E3779B97F4A7C15))
RECIPE_CASES = {
    **{name: maker() for name, maker in RECIPES.items()},
    "mxfp8_hybrid": MXFP8BlockScaling(fp8_format="HYBRID"),
    "mxfp8_floor": MXFP8BlockScaling(scale_rule="floor"),
    "fp8_block_f32": Float8BlockScaling(use_f32_scales=True),
    "fp8_current_pow2": Float8CurrentScaling(use_power_2_scales=True),
    "fp8_row_gw_hp": Float8RowScaling(wgrad="high_precision"),
    **{
        f"nvfp4_{rht:d}{sr:d}{flat:d}": NVFP4BlockScaling(rht, sr, flat)
        for rht in (False, True)
        for sr in (False, True)
        for flat in (False, True)
        if rht or sr or flat
    },
    "nvfp4_folded": NVFP4BlockScaling(path="folded"),
    "mixed": CustomRecipe(Gemm("mxfp8", "mxfp8"), Gemm(Cast("nvfp4"), Cast("nvfp4_2d")), Gemm("mxfp6_e2m3", "mxfp4")),
    "one_none": CustomRecipe(Gemm(None, "nvfp4_2d"), Gemm("mxfp8", None), Gemm(None, None)),
    "mxfp8_2d": MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4_peers": NVFP4BlockScaling(True, row_scaled_activation=True, nvfp4_4over6="all"),
    "ms_eden": CustomRecipe(Gemm("nvfp4", "nvfp4_2d"), Gemm(EDEN, EDEN), Gemm(EDEN, EDEN)),
}
OUT_STEP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
OUT_REL = {torch.float32: 1e-5, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}


def oracle_operand(tensor, cast: Cast | None, *, axis: int, seed: int, stream: int):
    """The operand as the oracle quantizes it, in operand form; high precision as float64."""
    array = to_numpy(tensor)
    if cast is None:
        return array.astype(np.float64) if axis == -1 else array.astype(np.float64).T
    scale_enc = np.float32(1.0) if isinstance(cast.scaling, mf.Delayed) else None
    return reference.quantize(array, cast, axis=axis, seed=seed, stream=stream, scale_enc=scale_enc)


def oracle_gemm(dtype, lhs, rhs) -> tuple[np.ndarray, np.ndarray]:
    """(product, bound weight |a| @ |b|.T) in float64; with one operand None the other is dequantized to `dtype`."""
    if isinstance(lhs, reference.Quantized) != isinstance(rhs, reference.Quantized):
        lhs, rhs = (to_float64(torch.from_numpy(dense(side)).to(dtype)) for side in (lhs, rhs))
    weight_lhs, weight_rhs = (
        np.abs(dense(side, transformed=True)) if isinstance(side, reference.Quantized) else np.abs(side)
        for side in (lhs, rhs)
    )
    return reference.scaled_matmul(lhs, rhs), weight_lhs @ weight_rhs.T


def dense(side, transformed: bool = False) -> np.ndarray:
    if not isinstance(side, reference.Quantized):
        return side
    if side.hadamard is not None and transformed:
        rows, length = side.codes.shape[0], side.shape[side.axis]
        padded = stored_length(length, side.hadamard)
        shape = (rows, padded)
        side = reference.Quantized(side.codes, side.scale, side.tensor_scale, side.format, 1, shape, None)
        return reference.dequantize(side).astype(np.float64)
    value = reference.dequantize(side).astype(np.float64)
    value = value.reshape(-1, value.shape[-1]) if side.axis == len(side.shape) - 1 else value.T
    return value


def assert_close(actual, expected: np.ndarray, weight: np.ndarray, length: int, dtype) -> None:
    """The elementwise and the norm tolerance of docs/numerics.md 8.3 for an emulated GEMM."""
    actual = to_float64(actual)
    bound = OUT_STEP[dtype] * np.abs(expected) + max(length, 2) * 2.0**-24 * weight + np.finfo(np.float32).tiny
    if dtype == torch.float16:
        bound = bound + 2.0**-25  # half a subnormal step of float16
    assert actual.shape == expected.shape
    worst = np.max(np.abs(actual - expected) - bound, initial=-1.0)
    assert worst <= 0, f"elementwise bound exceeded by {worst}"
    norm = np.linalg.norm(expected)
    assert np.linalg.norm(actual - expected) <= OUT_REL[dtype] * norm + 1e-30


def run_and_check(recipe: Recipe, dtype, shape: tuple[int, int, int], bias: bool) -> None:
    m, k, n = shape
    generator = torch.Generator().manual_seed(hash(shape) % 1000)
    x = torch.randn(m, k, generator=generator).to(dtype).requires_grad_()
    dy = torch.randn(m, n, generator=generator).to(dtype)
    layer = mf.Linear(k, n, bias=bias, dtype=dtype, recipe=recipe)
    torch.manual_seed(11)
    words = draw_seed(torch.device("cpu"))
    seed = int(words[0]) | int(words[1]) << 32
    torch.manual_seed(11)
    y = layer(x)
    y.backward(dy)

    def operand(tensor, slot: str, gemm: str, side: str):
        column = {"x": gemm == "wgrad", "w": gemm == "dgrad", "dy": gemm == "wgrad"}[slot]
        cast = recipe.cast(gemm, side)
        quantized = oracle_operand(
            tensor, cast, axis=-2 if column else -1, seed=seed, stream=OPERANDS_OF[slot][column].stream
        )
        if getattr(recipe, gemm).path == "folded":
            return reference.fold(quantized, (1, 128) if side == "lhs" else (128, 128))[0]
        return quantized

    w = layer.weight
    product, weight = oracle_gemm(dtype, operand(x, "x", "fprop", "lhs"), operand(w, "w", "fprop", "rhs"))
    if bias:
        product = product + to_float64(layer.bias)
        weight = weight + np.abs(to_float64(layer.bias))
    assert_close(y, product, weight, k, dtype)
    assert_close(
        x.grad, *oracle_gemm(dtype, operand(dy, "dy", "dgrad", "lhs"), operand(w, "w", "dgrad", "rhs")), n, dtype
    )
    assert_close(
        w.grad, *oracle_gemm(dtype, operand(dy, "dy", "wgrad", "lhs"), operand(x, "x", "wgrad", "rhs")),
        max(-(-m // 16) * 16, stored_length(m, getattr(recipe.wgrad.lhs, "hadamard", None))), dtype,
    )  # fmt: skip
    if bias:
        expected = to_float64(dy).sum(0)
        assert_close(layer.bias.grad, expected, np.abs(to_float64(dy)).sum(0), m, dtype)


@pytest.mark.slow_cases(
    "further dtypes and shapes of a checked kind",
    all_but=("*-torch.bfloat16", "delayed-*", "mxfp8-*", "nvfp4-*"),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECIPE_CASES)
def test_each_gemm_is_the_oracles(name: str, dtype) -> None:  # features M1, M2, R11, R19
    run_and_check(RECIPE_CASES[name], dtype, (48, 160, 96), bias=True)


@pytest.mark.parametrize("shape", [(7, 33, 5), (130, 17, 129)], ids=str)
def test_folds_of_ragged_sizes(shape: tuple[int, int, int]) -> None:
    run_and_check(RECIPE_CASES["nvfp4_folded"], torch.float32, shape, bias=False)


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 33, 5), (130, 17, 129), (16, 257, 31)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_ragged_sizes_are_padded_inside(name: str, shape: tuple[int, int, int]) -> None:  # features Q10
    run_and_check(RECIPE_CASES[name], torch.bfloat16, shape, bias=False)


@torch.no_grad()  # so that delayed state stays as it is between the calls
@pytest.mark.parametrize("name", RECIPES)
def test_leading_dimensions_are_rows(name: str) -> None:
    recipe = RECIPES[name]()
    layer = mf.Linear(40, 24, recipe=recipe)
    x = torch.randn(2, 3, 5, 40)
    torch.manual_seed(0)
    batched = layer(x)
    torch.manual_seed(0)
    flat = layer(x.reshape(-1, 40))
    assert batched.shape == (2, 3, 5, 24)
    assert torch.equal(batched.reshape(-1, 24), flat)
    assert layer(x[0, 0, 0]).shape == (24,)


def test_plain_without_recipe_is_nn_linear() -> None:
    layer = mf.Linear(16, 8)
    x = torch.randn(4, 16)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    with mf.autocast(enabled=False):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    with mf.autocast(recipe=NVFP4BlockScaling()):
        assert not torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(0, 16), (3, 0)], ids=str)
def test_empty_input(name: str, shape: tuple[int, int]) -> None:
    layer = mf.Linear(shape[1], 8, recipe=RECIPES[name]())
    x = torch.zeros(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (shape[0], 8)
    assert x.grad.shape == x.shape
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))


@pytest.mark.parametrize(
    ("x_grad", "w_grad", "expected"),
    [
        (False, False, ["x", "w"]),
        (True, False, ["x", "w", "w.T", "dy"]),
        (False, True, ["x", "x.T", "w", "dy.T"]),
        (True, True, ["x", "x.T", "w", "w.T", "dy", "dy.T"]),
    ],
)
# features M3
def test_only_usages_whose_gemm_runs_are_cast(monkeypatch, x_grad: bool, w_grad: bool, expected: list[str]) -> None:
    from microfloat.torch import reference as backend

    seen: list[str] = []
    original = backend.quantize_both
    streams = {tuple(operand.stream for operand in OPERANDS_OF[slot]): slot for slot in TENSORS}

    def spy(tensor, row, column, **options):
        slot = streams[options["row_stream"], options["column_stream"]]
        seen.extend([slot] * (row is not None) + [slot + ".T"] * (column is not None))
        return original(tensor, row, column, **options)

    monkeypatch.setattr(backend, "quantize_both", spy)
    layer = mf.Linear(32, 32, bias=False, recipe=MXFP8BlockScaling())
    layer.weight.requires_grad_(w_grad)
    x = torch.randn(8, 32, requires_grad=x_grad)
    y = layer(x)
    if x_grad or w_grad:
        y.sum().backward()
    assert seen == expected
    seen.clear()
    with torch.no_grad():
        layer(x)
    assert seen == ["x", "w"]


def test_saved_for_backward_are_codes_not_a_second_high_precision_copy() -> None:  # features S6
    saved: list = []
    layer = mf.Linear(256, 128, bias=False, dtype=torch.bfloat16, recipe=MXFP8BlockScaling())
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    assert {tensor.dtype for tensor in saved} <= {torch.float8_e4m3fn, torch.uint8, torch.float32}
    assert sum(tensor.numel() * tensor.element_size() for tensor in saved) < 1.05 * (x.numel() + layer.weight.numel())


def test_torch_autocast_decides_the_compute_dtype() -> None:  # features M18
    # No bias: it is added unrounded here, and would be rounded to bfloat16 in the converted copy.
    layer = mf.Linear(64, 32, bias=False, recipe=MXFP8BlockScaling())
    x = torch.randn(16, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    same = copy.deepcopy(layer).to(torch.bfloat16)
    assert torch.equal(y, same(x.detach().to(torch.bfloat16)))


def test_mixed_dtypes_compute_in_that_of_x() -> None:
    for recipe in (None, MXFP8BlockScaling(), NVFP4BlockScaling()):
        layer = mf.Linear(64, 32, recipe=recipe)
        x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_weight_cache_saves_casts_and_never_bits(monkeypatch) -> None:  # features M13
    from microfloat.torch import reference as backend

    casts: list[tuple] = []
    original = backend.quantize_both
    monkeypatch.setattr(
        backend, "quantize_both", lambda *args, **options: casts.append(options) or original(*args, **options)
    )
    layer = mf.Linear(64, 32, bias=False, recipe=MXFP8BlockScaling())
    x = torch.randn(16, 64, requires_grad=True)

    def weight_casts() -> int:
        return sum(options["row_stream"] == OPERANDS_OF["w"][0].stream for options in casts)

    expected = layer(x)
    casts.clear()
    for microbatch in range(4):
        assert torch.equal(layer(x, is_first_microbatch=microbatch == 0), expected)
    assert weight_casts() == 1
    with torch.no_grad():
        layer.weight.mul_(2.0)
    changed = layer(x, is_first_microbatch=False)
    assert weight_casts() == 2
    assert torch.equal(changed, layer(x))
    layer(x, is_first_microbatch=False).sum().backward()
    assert layer.weight.grad is not None


def test_a_kept_weight_is_as_new_after_every_change(monkeypatch) -> None:
    """Writes that torch counts, steps of optimizers that it does not count, and other tensors in the same place."""
    for name, optimizer in (("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)):
        for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
            layer = mf.Linear(64, 32, recipe=MXFP8BlockScaling())
            x, step = torch.randn(16, 64), optimizer(layer.parameters(), lr=0.1, **options)
            layer(x, is_first_microbatch=True).sum().backward()
            step.step()
            assert torch.equal(layer(x, is_first_microbatch=False), layer(x)), (name, options)
    calls = []
    for _ in range(16):  # parameters that die and leave their address to the next
        for first in (True, False):
            swapped = {"weight": torch.nn.Parameter(torch.randn(32, 64))}
            with torch.no_grad():
                calls.append([torch.func.functional_call(layer, swapped, (x, flag)) for flag in (first, None)])
            del swapped
    assert all(torch.equal(*pair) for pair in calls)
    with torch.inference_mode():
        mf.Linear(64, 32, recipe=MXFP8BlockScaling())(x, is_first_microbatch=True)
        layer(x, is_first_microbatch=True)
    layer(x, is_first_microbatch=False).sum().backward()
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    layer.load_state_dict(mf.Linear(64, 32).state_dict())
    assert torch.equal(layer(x, is_first_microbatch=False), layer(x))


def test_layers_that_read_one_tensor_see_every_write_to_it() -> None:
    for recipe in (MXFP8BlockScaling(), NVFP4BlockScaling(), "fp8_current"):
        torch.manual_seed(0)
        first, second = mf.Linear(64, 32, recipe=recipe), mf.Linear(64, 32, recipe=recipe)
        x = torch.randn(16, 64, requires_grad=True) * 1
        first(x)
        x.data.mul_(100.0)
        assert torch.equal(second(x), second(x.detach().clone())), recipe


def test_stochastic_forward_and_backward_follow_the_default_generator() -> None:
    def gradients(seed: int):
        torch.manual_seed(seed)
        layer = mf.Linear(64, 64, recipe=NVFP4BlockScaling())
        x = torch.randn(32, 64, requires_grad=True)
        layer(x).square().sum().backward()
        return x.grad, layer.weight.grad

    first, again, other = gradients(0), gradients(0), gradients(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_double_backward_is_refused_by_name() -> None:
    layer = mf.Linear(16, 16, recipe=MXFP8BlockScaling())
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(NotSupportedError, match="double backward"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.ones(4, 16, dtype=torch.int64), InvalidTypeError, "int64"),
        (torch.ones(4, 16, dtype=torch.float64), InvalidTypeError, "float64"),
        (torch.ones(4, 15), InvalidValueError, "in_features = 16"),
        (torch.ones(()), InvalidValueError, "in_features = 16"),
        ([1.0] * 16, InvalidTypeError, "torch.Tensor"),
        (torch.ones(4, 16, device="meta"), InvalidValueError, "meta"),
    ],
    ids=["int", "float64", "width", "0-d", "list", "device"],
)
def test_bad_input_is_named(x, error: type, words: str) -> None:
    layer = mf.Linear(16, 8, recipe=MXFP8BlockScaling())
    with pytest.raises(error, match=words):
        layer(x)


@torch.no_grad()
@pytest.mark.parametrize("name", RECIPES)
def test_strided_views_give_the_same_bits(name: str) -> None:
    layer = mf.Linear(32, 16, bias=False, recipe=RECIPES[name]())
    base = torch.randn(64, 40)
    view = base[::2, 4:36]
    torch.manual_seed(3)
    expected = layer(view.contiguous())
    torch.manual_seed(3)
    assert torch.equal(layer(view), expected)
    transposed = torch.randn(32, 24).t()
    assert torch.equal(layer(transposed), layer(transposed.contiguous()))


def test_nan_and_inf_stay_visible() -> None:
    layer = mf.Linear(32, 8, bias=False, recipe=MXFP8BlockScaling())
    x = torch.randn(4, 32)
    x[1, 3] = float("nan")
    y = layer(x)
    assert torch.isnan(y[1]).all()
    assert torch.isfinite(y[[0, 2, 3]]).all()


@pytest.mark.parametrize("name", RECIPES)
def test_pickle_deepcopy_and_state_dict(name: str) -> None:
    layer = mf.Linear(32, 16, recipe=RECIPES[name]())
    x = torch.randn(8, 32)
    torch.manual_seed(5)
    with torch.no_grad():
        expected = layer(x)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        torch.manual_seed(5)
        with torch.no_grad():
            assert torch.equal(other(x), expected)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    fresh = mf.Linear(32, 16, recipe=RECIPES[name]())
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(fresh.weight, layer.weight)


def test_accumulate_exact_runs_on_the_reference_backend() -> None:
    """Features R24."""
    recipe = CustomRecipe(*[Gemm("mxfp8", "mxfp8", accumulate="exact")] * 3)
    layer = mf.Linear(64, 32, bias=False, recipe=recipe)
    x = torch.randn(16, 64)
    expected = reference.scaled_matmul(
        reference.quantize(to_numpy(x), "mxfp8"), reference.quantize(to_numpy(layer.weight), "mxfp8")
    )
    assert np.array_equal(layer(x).detach().numpy(), expected.astype(np.float32))


def test_delayed_recipe_has_state_only_when_used() -> None:
    plain = mf.Linear(16, 8)
    assert set(plain.state_dict()) == {"weight", "bias"}
    with mf.autocast(recipe=DelayedScaling()):
        plain(torch.randn(4, 16))
    assert len(plain.state_dict()) == 8


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_meta_tensors_without_elements() -> None:
    layer = mf.Linear(0, 16, device="meta", recipe="mxfp8")
    y = layer(torch.empty(4, 0, device="meta", requires_grad=True))
    assert y.is_meta
    assert y.shape == (4, 16)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("features", "outputs"), [(0, 16), (32, 0)])
def test_compiled_weights_without_elements(features, outputs) -> None:
    layer = mf.Linear(features, outputs, recipe="mxfp8")
    compiled = torch.compile(lambda x: layer(x), backend="aot_eager", fullgraph=True)
    x = torch.randn(4, features)
    assert torch.equal(compiled(x), layer(x))
