"""The native backend as far as a CPU can hold it: which form each operand takes on which chip, products of decoded
values, and what folding counts lead to. What Blackwell's GEMM is given: test_blackwell.py."""

import contextlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat import reference  # noqa: E402
from microfloat.chips import Chip  # noqa: E402
from microfloat.errors import InvalidValueError  # noqa: E402
from microfloat.recipes import (  # noqa: E402
    RECIPES,
    Cast,
    CustomRecipe,
    Float8BlockScaling,
    Float8RowScaling,
    Gemm,
    Hadamard,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from microfloat.routes import route_of, routes_of  # noqa: E402
from microfloat.torch import backends  # noqa: E402
from microfloat.torch import reference as torch_reference  # noqa: E402
from microfloat.torch.launch import (  # noqa: E402
    gemms,
    native,
)
from microfloat.torch.linear import fold_counts as folding  # noqa: E402

AMPERE, ADA, HOPPER, BLACKWELL = Chip((8, 0)), Chip((8, 9)), Chip((9, 0)), Chip((10, 0))


@pytest.fixture(autouse=True)
def _products_are_made_anew():
    gemms.stored_product.cache_clear()


def multiplied(a, b, chip=AMPERE, *, bias=None, out_dtype=torch.float32):
    """On Ampere, where everything is decoded to bfloat16."""
    return gemms.scaled_matmul(a, b, chip, bias=bias, out_dtype=out_dtype, accumulate="split")


@pytest.mark.parametrize(
    ("recipe", "chip", "forms", "accelerated"),
    [
        (RECIPES["fp8_current"](), HOPPER, {"codes"}, True),
        (RECIPES["fp8_current"](), ADA, {"codes"}, True),
        (RECIPES["fp8_current"](), AMPERE, {"codes"}, False),
        (RECIPES["fp8_block"](), HOPPER, {"codes"}, True),
        (RECIPES["fp8_block"](), ADA, {"codes"}, False),
        (RECIPES["fp8_block"](), BLACKWELL, {"codes"}, True),
        (Float8BlockScaling(use_f32_scales=True), BLACKWELL, {"codes"}, False),
        (Float8BlockScaling(x=(128, 128), w=(1, 128), dy=(128, 128)), BLACKWELL, {"codes"}, True),
        (MXFP8BlockScaling(), HOPPER, {"folded", "tiles"}, True),
        (MXFP8BlockScaling(path="exact"), HOPPER, {"values"}, False),
        (MXFP8BlockScaling(path="folded"), ADA, {"values"}, False),
        (MXFP8BlockScaling(), BLACKWELL, {"codes"}, True),
        (RECIPES["mxfp4"](), HOPPER, {"folded", "tiles"}, True),
        (RECIPES["nvfp4"](), HOPPER, {"values"}, False),
        (RECIPES["nvfp4"](), BLACKWELL, {"codes"}, True),
        (NVFP4BlockScaling(path="folded"), HOPPER, {"folded", "tiles"}, True),
    ],
)
def test_routes(recipe, chip: Chip, forms: set[str], accelerated: bool) -> None:
    routes = routes_of(recipe, chip)
    assert {form for route in routes for form in route.forms} == forms
    assert {route.accelerated for route in routes} == {accelerated}
    untried = ["not yet run" in route.reason for route in routes]
    assert all(untried) is (chip == BLACKWELL and accelerated)


def test_every_stock_recipe_has_a_route_on_every_chip() -> None:
    for name, maker in {**RECIPES, "gw_hp": lambda: Float8RowScaling(wgrad="high_precision")}.items():
        for chip in (AMPERE, ADA, HOPPER, BLACKWELL, Chip((12, 0))):
            recipe = maker()
            for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad):
                if not gemm.is_high_precision:
                    assert route_of(gemm, chip).kernel, (name, chip)


@pytest.mark.parametrize(
    "name",
    [
        "fp8_tensor",
        "fp8_row",
        "fp8_1x128",
        "fp8_128x128",
        "mxfp8",
        "mxfp6_e2m3",
        "mxfp4",
        "nvfp4",
        "nvfp4_2d",
        "nvfp4_row",
    ],
)
def test_decoded_values_multiply_exactly(name: str) -> None:
    x, w = torch.randn(40, 96), torch.randn(24, 96)
    a, b = torch_reference.quantize(x, Cast(name)), torch_reference.quantize(w, Cast(name))
    y = multiplied(a, b)
    expected = reference.scaled_matmul(reference.quantize(x.numpy(), name), reference.quantize(w.numpy(), name))
    assert np.linalg.norm(y.double().numpy() - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "names",
    [("mxfp8_e5m2",) * 2, ("fp8_tensor_e5m2", "fp8_row_e5m2"), ("fp8_1x128_e5m2", "fp8_128x128_e5m2")],
    ids="-".join,
)
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_two_operands_of_e5m2_are_decoded_since_no_hardware_multiplies_them(names, capability, monkeypatch) -> None:
    monkeypatch.setattr(backends, "chip_of", lambda device: Chip(capability))
    # Of a size where the product of two tensor scales is no float32 any more, though the result is one.
    x, w = torch.randn(40, 160) * 1e-18, torch.randn(24, 160) * 1e-18
    a, b = (torch_reference.quantize(value, Cast(name)) for value, name in zip((x, w), names, strict=True))
    y = native.scaled_matmul(a, b, out_dtype=torch.float32)
    expected = reference.scaled_matmul(
        *(reference.quantize(value.numpy(), name) for value, name in zip((x, w), names, strict=True))
    )
    assert np.linalg.norm(y.double().numpy() - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4_row"])
def test_large_products_are_made_in_parts(name: str, dtype, monkeypatch) -> None:
    """The float32 sum of a whole product would be the largest tensor of a step."""
    a, b = (torch_reference.quantize(torch.randn(rows, 64), Cast(name)) for rows in (600, 24))
    bias, sums, multiply = torch.randn(24), [], gemms.float32_product_on_cpu
    whole = multiplied(a, b, bias=bias, out_dtype=dtype)
    gemms.stored_product.cache_clear()
    monkeypatch.setattr(gemms, "LARGEST_SUM", 24 * 300)
    monkeypatch.setattr(gemms, "float32_product_on_cpu", lambda *pair: sums.append(multiply(*pair)) or sums[-1])
    parts = multiplied(a, b, bias=bias, out_dtype=dtype)
    assert [tuple(part.shape) for part in sums] == [(512, 24), (88, 24)]
    limit = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4, torch.float32: 1e-5}[dtype]  # docs/numerics.md 8.3, twice
    assert (parts.double() - whole.double()).norm() <= 2 * limit * whole.double().norm()


def test_decoded_values_stay_in_the_transformed_domain() -> None:
    cast = Cast("nvfp4", hadamard=Hadamard())
    a, b = torch_reference.quantize(torch.randn(8, 40), cast), torch_reference.quantize(torch.randn(6, 40), cast)
    expected = torch_reference.scaled_matmul(a, b, out_dtype=torch.float32)
    torch.testing.assert_close(multiplied(a, b), expected, rtol=1e-5, atol=1e-5)


PAIRS = [
    ("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128"), ("fp8_row", "fp8_row"), ("fp8_tensor", "fp8_tensor"),
    ("fp8_row", "fp8_tensor"), ("fp8_tensor", "fp8_row"),
]  # fmt: skip


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 75, 51), (20, 200, 30), (72, 96, 80), (130, 528, 16)], ids=str)
def test_ragged_products_reach_the_gemm_with_sizes_that_it_takes(names, shape, monkeypatch) -> None:
    """The vendor's GEMM, played by float32 products that check what they are given."""
    in_blocks, seen = names[0] == "fp8_1x128", []

    def blockwise(a, b, a_scales, a_kinds, a_orders, b_scales, b_kinds, b_orders, bias, dtype):
        seen.append(a.shape)
        (a_scale,), (b_scale,), kind = a_scales, b_scales, torch.nn.functional.ScalingType(b_kinds[0])
        assert (a.shape[0] % 8, a.shape[1] % 16, b.shape[1] % 16) == (0, 0, 0)
        assert a_scale.stride(0) == 1
        assert a_scale.shape[1] == 1 or a_scale.stride(1) == a.shape[0]
        left = a.float() * a_scale.repeat_interleave(128, 1)[:, : a.shape[1]]
        if kind == torch.nn.functional.ScalingType.BlockWise128x128:
            assert b_scale.shape[0] % 4 == 0
            spread = b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        else:
            assert b_scale.shape[1] == 1 or b_scale.stride() == (1, b.shape[1])
            spread = b_scale.t().repeat_interleave(128, 0)
        return (left @ (b.float() * spread[: b.shape[0], : b.shape[1]])).to(dtype)

    def wide(a, b, a_scale, b_scale, bias, result_scale, out_dtype, use_fast_accum):
        seen.append(a.shape)
        assert (a.shape[1] % 16, b.shape[1] % 16) == (0, 0)
        assert a_scale.dim() == b_scale.dim() == (0 if names == ("fp8_tensor", "fp8_tensor") else 2)
        y = (a.float() @ b.float()) * (a_scale * b_scale)
        return (y if bias is None else y + bias.float()).to(out_dtype)

    monkeypatch.setattr(gemms, "scaled_mm_v2", blockwise)
    monkeypatch.setattr(gemms, "scaled_mm", wide)
    rows, length, columns = shape
    operands = [torch_reference.quantize(torch.randn(size, length), Cast(name)) for size, name in zip(
        (rows, columns), names, strict=True)]  # fmt: skip
    for bias, dtype in ((None, torch.float32), (torch.randn(columns).bfloat16(), torch.bfloat16),
                        (torch.randn(columns), torch.bfloat16)):  # fmt: skip
        actual = multiplied(*operands, HOPPER, bias=bias, out_dtype=dtype)
        expected = torch_reference.scaled_matmul(*operands, bias=bias, out_dtype=dtype)
        assert actual.shape == expected.shape
        assert actual.is_contiguous()
        # docs/numerics.md 8.3, float32 products; both results are rounded
        limit = 1e-5 if dtype == torch.float32 else 5e-3
        assert (actual - expected).double().norm() <= limit * expected.double().norm()
    assert seen[0][0] == (-(-rows // 8) * 8 if in_blocks else rows)


@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16], ids=str)
def test_scales_of_rows_follow_the_sums_of_few_rows(bias, monkeypatch) -> None:
    """On a Hopper, whose vendor's GEMM with scales of rows is slow for few rows (37.4)."""
    seen = []

    def wide(a, b, a_scale, b_scale, bias, result_scale, out_dtype, use_fast_accum):
        seen.append((a_scale.dim(), out_dtype))
        return (a.float() @ b.float()) * a_scale * b_scale

    monkeypatch.setattr(gemms, "scaled_mm", wide)
    monkeypatch.setattr(gemms, "is_hopper", lambda device: True)
    gemms.stored_product.cache_clear()
    left, right = (torch_reference.quantize(torch.randn(size, 64), Cast("fp8_row")) for size in (6, 48))
    added = None if bias is None else torch.randn(48).to(bias)
    for _ in range(2):
        made = multiplied(left, right, HOPPER, bias=added, out_dtype=torch.bfloat16)
    expected = torch_reference.scaled_matmul(left, right, bias=added, out_dtype=torch.bfloat16)
    torch.testing.assert_close(made, expected, rtol=2**-7, atol=1e-3)
    assert seen == [(0, torch.float32)] * 2
    gemms.stored_product.cache_clear()


class Arrived:
    """Counts that have arrived: (GEMM, side, form) -> share."""

    def __init__(self, shares: dict) -> None:
        self.shares, self.narrow, self.is_quiet = shares, set(), False

    def exceeded(self, gemm: str, side: str, form: str) -> bool:
        return self.shares.get((gemm, side, form), 0.0) > folding.LOSSY_LIMIT


def test_lossy_counts_narrow_the_tile_then_give_up_folding() -> None:
    auto, folded = MXFP8BlockScaling(), MXFP8BlockScaling(path="folded")
    counts = Arrived({("fprop", "rhs", "tiles"): 2e-3})
    assert folding.routes_after(auto, HOPPER, counts).fprop.forms == ("folded", "folded")
    assert folding.routes_after(auto, HOPPER, counts).dgrad.forms == ("folded", "tiles")
    counts.shares = {("fprop", "rhs", "folded"): 2e-3}
    assert folding.routes_after(auto, HOPPER, counts).fprop.forms == ("values", "values")
    assert folding.routes_after(folded, HOPPER, counts).fprop.forms == ("folded", "folded")
    counts.shares = {("wgrad", "lhs", "folded"): 2e-3}
    assert folding.routes_after(auto, HOPPER, counts).wgrad.forms == ("values", "values")
    counts.shares = {("wgrad", "lhs", "folded"): 5e-4}
    assert folding.routes_after(auto, HOPPER, counts).wgrad.forms == ("folded", "tiles")


@pytest.mark.parametrize("name", ["reference", "triton", "native"])
def test_every_backend_has_the_whole_interface(name: str) -> None:
    with backends.pretend(chip="h200"):
        module = backends.choose(name, torch.device("cpu"))
    for function in ("amax", "dequantize", "quantize", "quantize_both", "scaled_matmul"):
        assert callable(getattr(module, function)), function


@pytest.mark.parametrize(
    "name",
    [
        "delayed",
        "fp8_current",
        "fp8_row",
        "fp8_block",
        "mxfp8",
        "mxfp8_exact",
        "mxfp6",
        "mxfp4",
        "nvfp4",
        "nvfp4_folded",
    ],
)
def test_a_pretended_chip_without_an_interpreter_casts_into_every_form(name: str) -> None:
    from tests.torch.linear.scheduled import setting

    (x, dy), spread, made = setting.inputs("cpu", (32, 208), 144), torch.arange(208) % 40, []
    x = (x.detach() * torch.exp2(spread)).bfloat16().requires_grad_()
    with backends.pretend(chip="h200", interpreted=False), setting.block_gemms("cpu", []):
        for around in (contextlib.nullcontext, setting.by_torch):
            layer = setting.make(setting.recipe_of(name), "cpu", features=(208, 144))
            torch.manual_seed(5)
            with around():
                made.append((setting.results(layer, [(x, dy)]), layer.folded_elements()))
    setting.assert_same(made[0][0], made[1][0])
    assert made[0][1] == made[1][1]
    assert bool(made[0][1]) is (name in ("mxfp8", "mxfp6", "mxfp4", "nvfp4_folded"))
    assert name != "mxfp8" or made[0][1]["fprop.lhs"] > 0


def test_exact_accumulation_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr(backends, "chip_of", lambda device: HOPPER)
    operand = torch_reference.quantize(torch.randn(16, 32), Cast("mxfp8"))
    with pytest.raises(InvalidValueError, match="backend='reference'"):
        native.scaled_matmul(operand, operand, accumulate="exact")


def test_plain_layers_report_no_folded_elements() -> None:
    layer = mf.Linear(32, 16, recipe=CustomRecipe(*[Gemm("mxfp8", "mxfp8")] * 3))
    layer(torch.randn(4, 32))
    assert layer.folded_elements() == {}


@pytest.mark.parametrize(("rows", "features", "outputs"), [(17, 130, 48), (1, 16, 32), (33, 48, 16)])
def test_shares_count_the_padding_of_a_transform(rows: int, features: int, outputs: int) -> None:
    """Features R26: at most 1, and of wgrad the oracle's count over rows that are padded to whole groups of 16."""
    layer = mf.Linear(features, outputs, recipe=NVFP4BlockScaling(path="folded", disable_stochastic_rounding=True))
    dy, layer_input = torch.ones(rows, outputs), torch.randn(rows, features)
    layer(layer_input.requires_grad_()).backward(dy)
    shares = layer.folded_elements()
    assert len(shares) == 6
    assert max(shares.values()) <= 1, shares
    cast = Cast("nvfp4", hadamard=Hadamard())
    for name, operand, block in (("lhs", dy, (1, 128)), ("rhs", layer_input.detach(), (128, 128))):
        lossy = reference.fold(reference.quantize(operand.numpy(), cast, axis=0), block)[1]
        assert shares[f"wgrad.{name}"] == lossy / (-(-rows // 16) * 16 * operand.shape[1])


def test_operands_that_backward_reads_from_fprop_count_once() -> None:
    for recipe in (NVFP4BlockScaling(path="folded", backward="dequantized"), NVFP4BlockScaling(path="folded")):
        layer = mf.Linear(48, 32, recipe=recipe)
        layer(torch.randn(20, 48, requires_grad=True)).sum().backward()
        shares = layer.folded_elements()
        assert set(shares) >= {"fprop.lhs", "fprop.rhs"}
        assert ("wgrad.rhs" in shares) is ("dgrad.rhs" in shares) is (recipe.backward is None)
        assert all(shares.values()), shares


def test_grouped_layers_do_not_count_folded_elements() -> None:
    layer = mf.GroupedLinear(2, 32, 16, recipe=NVFP4BlockScaling(path="folded"))
    layer(torch.randn(5, 32), [2, 3]).sum().backward()
    assert layer.folded_elements() == {}
    assert "GroupedLinear" in str(layer.folded_elements.__doc__)


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_128x128"])
def test_gemms_read_the_transpose_of_stored_codes_row_by_row(monkeypatch, name) -> None:
    seen = []
    monkeypatch.setattr(backends, "chip_of", lambda device: HOPPER)
    monkeypatch.setattr(gemms, "scaled_mm", lambda a, b, a_scale, b_scale, *rest: seen.append((b, b_scale)))
    monkeypatch.setattr(gemms, "scaled_mm_v2", lambda a, b, *rest: seen.append((b, rest[3][0])))
    lhs = "fp8_1x128" if name == "fp8_128x128" else name
    weight = torch_reference.quantize(torch.randn(512, 384), Cast(name))
    turned = torch_reference.transpose_operand(weight)
    native.scaled_matmul(torch_reference.quantize(torch.randn(16, 512), Cast(lhs)), turned)
    ((codes, scale),) = seen
    assert codes.t().is_contiguous()
    assert scale.t().is_contiguous()
    assert torch.equal(codes.view(torch.uint8), weight.codes.view(torch.uint8))
    assert torch.equal(scale, weight.scale)
