"""The native backend as far as a CPU can hold it: which form each operand takes on which chip, what is passed to the
block-scaled GEMM byte for byte, exact products of decoded values, and what folding counts lead to."""

import importlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch.nn.functional as F  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat import formats, reference  # noqa: E402
from microfloat.errors import InvalidValueError  # noqa: E402
from microfloat.recipes import (  # noqa: E402
    RECIPES,
    Cast,
    CustomRecipe,
    Float8RowScaling,
    Gemm,
    Hadamard,
    MXFP8BlockScaling,
)
from microfloat.torch.backends import native  # noqa: E402
from microfloat.torch.backends import reference as torch_reference  # noqa: E402
from microfloat.torch.backends.native import _blackwell, _gemm, _lossy  # noqa: E402
from microfloat.torch.backends.native._forms import Chip, route_of  # noqa: E402

AMPERE, ADA, HOPPER, BLACKWELL = Chip((8, 0)), Chip((8, 9)), Chip((9, 0)), Chip((10, 0))


@pytest.mark.parametrize(
    ("recipe", "chip", "forms", "accelerated"),
    [
        (RECIPES["fp8_current"](), HOPPER, {"codes"}, True),
        (RECIPES["fp8_current"](), ADA, {"codes"}, True),
        (RECIPES["fp8_current"](), AMPERE, {"codes"}, False),
        (RECIPES["fp8_block"](), HOPPER, {"codes"}, True),
        (RECIPES["fp8_block"](), ADA, {"codes"}, False),
        (MXFP8BlockScaling(), HOPPER, {"folded", "tiles"}, True),
        (MXFP8BlockScaling(path="exact"), HOPPER, {"values"}, False),
        (MXFP8BlockScaling(path="folded"), ADA, {"values"}, False),
        (MXFP8BlockScaling(), BLACKWELL, {"codes"}, True),
        (RECIPES["mxfp4"](), HOPPER, {"folded", "tiles"}, True),
        (RECIPES["nvfp4"](), HOPPER, {"values"}, False),
        (RECIPES["nvfp4"](), BLACKWELL, {"codes"}, True),
    ],
)
def test_routes(recipe, chip: Chip, forms: set[str], accelerated: bool) -> None:
    chosen = _lossy.gemm_forms(recipe, chip, None)
    assert {form for pair in chosen.values() for form in pair} == forms
    routes = [route_of(getattr(recipe, name), chip) for name in ("fprop", "dgrad", "wgrad")]
    assert {route.accelerated for route in routes} == {accelerated}
    untried = ["not yet run" in route.reason for route in routes]
    assert all(untried) is (chip == BLACKWELL)


def test_every_stock_recipe_has_a_route_on_every_chip() -> None:
    for name, maker in {**RECIPES, "gw_hp": lambda: Float8RowScaling(wgrad="high_precision")}.items():
        for chip in (AMPERE, ADA, HOPPER, BLACKWELL, Chip((12, 0))):
            recipe = maker()
            for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad):
                if not gemm.is_high_precision:
                    assert route_of(gemm, chip).kernel, (name, chip)


class TestBlackwellArguments:
    @pytest.mark.parametrize("shape", [(128, 128), (130, 96), (5, 48), (257, 320)], ids=str)
    def test_swizzle_is_the_oracles(self, shape: tuple[int, int]) -> None:
        scale = torch.randint(0, 256, shape, dtype=torch.uint8)
        assert np.array_equal(_blackwell.swizzle_scales(scale).numpy(), reference.swizzle_scales(scale.numpy()))

    @pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "nvfp4_2d"])
    @pytest.mark.parametrize("shape", [(48, 128), (33, 80)], ids=str)
    def test_bytes_and_kinds(self, name: str, shape: tuple[int, int]) -> None:
        x, w = torch.randn(shape), torch.randn(20, shape[1])
        right = "mxfp8" if name == "mxfp8_e5m2" else name
        arguments = _blackwell.block_scaled_arguments(
            torch_reference.quantize(x, Cast(name)), torch_reference.quantize(w, Cast(right)), torch.bfloat16
        )
        width = -(-shape[1] // 32) * 32
        for tensor, cast, codes, scales, kinds, orders in (
            (x, Cast(name), arguments["mat_a"], arguments["scale_a"], arguments["scale_recipe_a"],
             arguments["swizzle_a"]),
            (w, Cast(right), arguments["mat_b"].t(), arguments["scale_b"], arguments["scale_recipe_b"],
             arguments["swizzle_b"]),
        ):  # fmt: skip
            expected = reference.quantize(tensor.numpy(), cast)
            raw = codes.contiguous().view(torch.uint8).numpy()
            per_byte = cast.format.element.codes_per_byte
            assert raw.shape == (tensor.shape[0], width // per_byte)
            assert np.array_equal(raw[:, : expected.codes.shape[1]], expected.codes)
            assert not raw[:, expected.codes.shape[1] :].any()
            scale = expected.scale
            if cast.format.is_tile:
                scale = np.repeat(scale, cast.format.block[0], 0)[: tensor.shape[0]]
            scale = np.pad(scale, ((0, 0), (0, width // cast.format.block[1] - scale.shape[1])))
            assert np.array_equal(scales[0].view(torch.uint8).numpy(), reference.swizzle_scales(scale))
            assert orders[0] == F.SwizzleType.SWIZZLE_32_4_4
            if cast.format.scale == formats.SCALE_E8M0:
                assert kinds == [F.ScalingType.BlockWise1x32]
                assert scales[0].dtype == torch.float8_e8m0fnu
            else:
                assert kinds == [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
                assert scales[0].dtype == torch.float8_e4m3fn
                assert np.array_equal(scales[1].numpy(), expected.tensor_scale)
                assert codes.dtype == torch.float4_e2m1fn_x2
        assert arguments["output_dtype"] == torch.bfloat16


@pytest.mark.parametrize(
    "name", ["fp8_tensor", "fp8_row", "mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4", "nvfp4_2d", "nvfp4_row"]
)
def test_decoded_values_multiply_exactly(name: str) -> None:
    x, w = torch.randn(40, 96), torch.randn(24, 96)
    a, b = torch_reference.quantize(x, Cast(name)), torch_reference.quantize(w, Cast(name))
    y = _gemm.values_matmul(native._decoded(a), native._decoded(b))
    expected = reference.scaled_matmul(reference.quantize(x.numpy(), name), reference.quantize(w.numpy(), name))
    assert np.linalg.norm(y.double().numpy() - expected) <= 1e-5 * np.linalg.norm(expected)


def test_decoded_values_stay_in_the_transformed_domain() -> None:
    cast = Cast("nvfp4", hadamard=Hadamard())
    a, b = torch_reference.quantize(torch.randn(8, 40), cast), torch_reference.quantize(torch.randn(6, 40), cast)
    values = native._decoded(a)
    assert values.values.shape == (8, 48)
    assert values.hadamard == Hadamard()
    expected = torch_reference.scaled_matmul(a, b, out_dtype=torch.float32)
    torch.testing.assert_close(_gemm.values_matmul(values, native._decoded(b)), expected, rtol=1e-5, atol=1e-5)


def test_padding_changes_no_value() -> None:
    for name in ("fp8_tensor", "fp8_row", "fp8_1x128", "fp8_128x128"):
        a = torch_reference.quantize(torch.randn(20, 200), Cast(name if name != "fp8_128x128" else "fp8_1x128"))
        b = torch_reference.quantize(torch.randn(30, 200), Cast(name))
        padded_a, padded_b = _gemm._aligned(a, b)
        assert padded_a.codes.shape[1] % 16 == 0
        assert padded_b.codes.shape[0] % 16 == 0
        expected = torch_reference.scaled_matmul(a, b, out_dtype=torch.float32)
        actual = torch_reference.scaled_matmul(padded_a, padded_b, out_dtype=torch.float32)
        torch.testing.assert_close(actual[:20, :30], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("names", [("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128"), ("fp8_row", "fp8_row")])
@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 75, 51), (20, 200, 30), (72, 96, 80), (130, 528, 16)], ids=str)
def test_ragged_products_reach_the_gemm_with_sizes_that_it_takes(names, shape, monkeypatch) -> None:
    """The vendor's GEMM, played by float32 products that check what they are given."""
    in_blocks, seen = names[0] == "fp8_1x128", []

    def blockwise(a, b, a_scale, a_kind, b_scale, b_kind, *, output_dtype):
        seen.append(a.shape)
        assert (a.shape[0] % 8, a.shape[1] % 16, b.shape[1] % 16) == (0, 0, 0)
        assert a_scale.stride(0) == 1
        assert a_scale.shape[1] == 1 or a_scale.stride(1) == a.shape[0]
        left = a.float() * a_scale.repeat_interleave(128, 1)[:, : a.shape[1]]
        if b_kind == torch.nn.functional.ScalingType.BlockWise128x128:
            assert b_scale.shape[0] % 4 == 0
            spread = b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        else:
            assert b_scale.shape[1] == 1 or b_scale.stride() == (1, b.shape[1])
            spread = b_scale.t().repeat_interleave(128, 0)
        return (left @ (b.float() * spread[: b.shape[0], : b.shape[1]])).to(output_dtype)

    def wide(a, b, a_scale, b_scale, *, bias, out_dtype, use_fast_accum):
        seen.append(a.shape)
        assert (a.shape[1] % 16, b.shape[1] % 16) == (0, 0)
        return ((a.float() @ b.float()) * (a_scale * b_scale)).to(out_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", blockwise)
    monkeypatch.setattr(torch, "_scaled_mm", wide)
    rows, length, columns = shape
    operands = [torch_reference.quantize(torch.randn(size, length), Cast(name)) for size, name in zip(
        (rows, columns), names, strict=True)]  # fmt: skip
    product = _gemm.fp8_matmul(*operands, bias=None, out_dtype=torch.float32, fast=False)
    expected = torch_reference.scaled_matmul(*operands, out_dtype=torch.float32)
    assert (product - expected).norm() <= 1e-5 * expected.norm()  # docs/numerics.md 8.3, float32 products
    assert seen[0][0] == (-(-rows // 8) * 8 if in_blocks else rows)


class Arrived:
    """Counts that have arrived: (GEMM, side, form) -> share."""

    def __init__(self, shares: dict) -> None:
        self.shares, self.narrow, self.is_quiet = shares, set(), False

    def exceeded(self, gemm: str, side: str, form: str) -> bool:
        return self.shares.get((gemm, side, form), 0.0) > _lossy.LOSSY_LIMIT


def test_lossy_counts_narrow_the_tile_then_give_up_folding() -> None:
    auto, folded = MXFP8BlockScaling(), MXFP8BlockScaling(path="folded")
    counts = Arrived({("fprop", "rhs", "tiles"): 2e-3})
    assert _lossy.gemm_forms(auto, HOPPER, counts)["fprop"] == ("folded", "folded")
    assert _lossy.gemm_forms(auto, HOPPER, counts)["dgrad"] == ("folded", "tiles")
    counts.shares = {("fprop", "rhs", "folded"): 2e-3}
    assert _lossy.gemm_forms(auto, HOPPER, counts)["fprop"] == ("values", "values")
    assert _lossy.gemm_forms(folded, HOPPER, counts)["fprop"] == ("folded", "folded")
    counts.shares = {("wgrad", "lhs", "folded"): 2e-3}
    assert _lossy.gemm_forms(auto, HOPPER, counts)["wgrad"] == ("values", "values")
    counts.shares = {("wgrad", "lhs", "folded"): 5e-4}
    assert _lossy.gemm_forms(auto, HOPPER, counts)["wgrad"] == ("folded", "tiles")


@pytest.mark.parametrize("name", ["reference", "triton", "native"])
def test_every_backend_has_the_whole_interface(name: str) -> None:
    module = importlib.import_module(f"microfloat.torch.backends.{name}")
    for function in ("amax", "dequantize", "quantize", "quantize_both", "scaled_matmul"):
        assert callable(getattr(module, function)), function


def test_exact_accumulation_is_refused_by_name() -> None:
    operand = torch_reference.quantize(torch.randn(16, 32), Cast("mxfp8"))
    with pytest.raises(InvalidValueError, match="backend='reference'"):
        native.scaled_matmul(operand, operand, accumulate="exact")


def test_plain_layers_report_no_folded_elements() -> None:
    layer = mf.Linear(32, 16, recipe=CustomRecipe(*[Gemm("mxfp8", "mxfp8")] * 3))
    layer(torch.randn(4, 32))
    assert layer.folded_elements() == {}
