"""Arguments of Blackwell's block-scaled GEMM, byte for byte; whole Linears with a stand-in that reads nothing else.

Nothing here has run on the hardware.
"""

import contextlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch.nn.functional as F  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat import formats, reference  # noqa: E402
from microfloat.chips import chip_named  # noqa: E402
from microfloat.recipes import Cast, CustomRecipe, Float8BlockScaling, Gemm, from_name  # noqa: E402
from microfloat.routes import routes_of  # noqa: E402
from microfloat.torch import backends  # noqa: E402
from microfloat.torch import reference as torch_reference  # noqa: E402
from microfloat.torch.launch import blackwell as block_scaled  # noqa: E402

AS_THEY_ARE = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "nvfp4_2d")
AS_MXFP8 = ("mxfp6_e2m3", "mxfp6_e3m2", "fp8_1x128", "fp8_128x128", "fp8_1x128_e5m2")


@pytest.mark.parametrize("shape", [(128, 128), (130, 96), (5, 48), (257, 320)], ids=str)
def test_swizzle_is_the_oracles(shape: tuple[int, int]) -> None:
    scale = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert np.array_equal(mf.to_blocked(scale).numpy(), reference.swizzle_scales(scale.numpy()))


def _codes(quantized, as_fp8: bool) -> np.ndarray:
    """The code bytes that the GEMM should get, from the oracle's codes."""
    element = quantized.format.element
    if not as_fp8 or element.bits == 8:
        return quantized.codes
    codes = quantized.codes if element.bits == 6 else reference.unpack_fp4(quantized.codes, quantized.shape[1])
    return formats.encode(formats.decode(codes, element), formats.E4M3)


def _bytes_of_scales(quantized) -> np.ndarray:
    """One scale byte for each 32 (16) elements of every row."""
    scale, (block_rows, block_columns) = quantized.scale, quantized.format.block
    scale = np.repeat(scale, block_rows, 0)[: quantized.shape[0]]
    if quantized.format.scale == formats.SCALE_FP32:
        exponents = np.log2(scale)
        assert np.array_equal(exponents, np.round(exponents))
        scale, block_columns = (exponents + 127).astype(np.uint8), 32
        scale = np.repeat(scale, 4, 1)
    return scale[:, : -(-quantized.shape[1] // block_columns)]


@pytest.mark.parametrize("name", [*AS_THEY_ARE, *AS_MXFP8])
@pytest.mark.parametrize("shape", [(48, 128), (33, 80), (130, 300)], ids=str)
def test_bytes_and_kinds(name: str, shape: tuple[int, int]) -> None:
    x, w = torch.randn(shape) * 2.0 ** torch.randint(-9, 9, (shape[0], 1)), torch.randn(20, shape[1])
    right = name.removesuffix("_e5m2")
    arguments = block_scaled.block_scaled_arguments(
        torch_reference.quantize(x, Cast(name)), torch_reference.quantize(w, Cast(right)), torch.bfloat16
    )
    width = -(-shape[1] // 32) * 32
    for tensor, rows, cast, codes, scales, kinds, orders in (
        (x, shape[0], Cast(name), arguments["mat_a"], arguments["scale_a"], arguments["scale_recipe_a"],
         arguments["swizzle_a"]),
        (w, 32, Cast(right), arguments["mat_b"].t(), arguments["scale_b"], arguments["scale_recipe_b"],
         arguments["swizzle_b"]),
    ):  # fmt: skip
        expected = reference.quantize(tensor.numpy(), cast)
        as_fp8 = name in AS_MXFP8
        wanted = _codes(expected, as_fp8)
        raw = codes.contiguous().view(torch.uint8).numpy()
        per_byte = 1 if as_fp8 else cast.format.element.codes_per_byte
        assert raw.shape == (rows, width // per_byte)
        assert np.array_equal(raw[: wanted.shape[0], : wanted.shape[1]], wanted)
        assert not raw[:, wanted.shape[1] :].any()
        assert not raw[wanted.shape[0] :].any()
        scale = _bytes_of_scales(expected)
        block = 16 if cast.format.scale == formats.SCALE_E4M3 else 32
        scale = np.pad(scale, ((0, rows - scale.shape[0]), (0, width // block - scale.shape[1])))
        assert np.array_equal(scales[0].view(torch.uint8).numpy(), reference.swizzle_scales(scale))
        assert orders[0] == F.SwizzleType.SWIZZLE_32_4_4
        if block == 32:
            assert kinds == [F.ScalingType.BlockWise1x32]
            assert scales[0].dtype == torch.float8_e8m0fnu
            assert codes.dtype == {"E5M2": torch.float8_e5m2, "E2M1": torch.float4_e2m1fn_x2}.get(
                cast.format.element.name, torch.float8_e4m3fn
            )
        else:
            assert kinds == [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
            assert scales[0].dtype == torch.float8_e4m3fn
            assert np.array_equal(scales[1].numpy(), expected.tensor_scale)
            assert codes.dtype == torch.float4_e2m1fn_x2
    assert arguments["output_dtype"] == torch.bfloat16


class BlockScaledGemm:
    """A stand-in for the GEMM: refuses what torch's would, decodes codes and scales out of the bytes it is given."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def scaled_mm(
        self, mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b, output_dtype
    ):
        assert mat_a.is_contiguous()
        assert mat_b.t().is_contiguous()
        assert mat_b.shape[1] % 16 == 0
        assert len(scale_a) == len(scale_recipe_a) == len(swizzle_a) == len(scale_b)
        assert scale_recipe_a == scale_recipe_b
        assert {swizzle_a[0], swizzle_b[0]} == {F.SwizzleType.SWIZZLE_32_4_4}
        fp4 = [mat.dtype == torch.float4_e2m1fn_x2 for mat in (mat_a, mat_b)]
        assert fp4[0] == fp4[1]
        if scale_recipe_a[0] == F.ScalingType.BlockWise1x32 and fp4[0]:
            assert output_dtype == torch.bfloat16
        self.kinds.append(f"{mat_a.dtype} {scale_recipe_a[0].name}".removeprefix("torch."))
        left = self._decode(mat_a, scale_a, scale_recipe_a[0])
        right = self._decode(mat_b.t(), scale_b, scale_recipe_b[0])
        return (left @ right.T).to(output_dtype)

    @staticmethod
    def _decode(codes, scales, kind) -> torch.Tensor:
        raw = codes.contiguous().view(torch.uint8)
        if codes.dtype == torch.float4_e2m1fn_x2:
            raw = torch.stack((raw & 15, raw >> 4), -1).flatten(1)
            values = formats.decode(raw.numpy(), formats.E2M1)
        else:
            element = formats.E4M3 if codes.dtype == torch.float8_e4m3fn else formats.E5M2
            values = formats.decode(raw.numpy(), element)
        rows, width = values.shape
        block = 32 if kind == F.ScalingType.BlockWise1x32 else 16
        assert width % 32 == 0
        assert scales[0].numel() == -(-rows // 128) * 128 * -(-width // block // 4) * 4
        bytes_ = reference.unswizzle_scales(scales[0].view(torch.uint8).numpy(), rows, width // block)
        factor = np.exp2(bytes_.astype(np.float64) - 127) if block == 32 else formats.decode(bytes_, formats.E4M3)
        values = values.astype(np.float64) * np.repeat(factor, block, 1)
        if len(scales) == 2:
            values = values * float(scales[1])
        return torch.from_numpy(values)


@contextlib.contextmanager
def on_blackwell(chip="b200"):
    """The native backend of a Blackwell on the CPU, with casts by the reference (their bytes are the kernels')."""
    gemm = BlockScaledGemm()
    with pytest.MonkeyPatch.context() as patch, backends.pretend(chip=chip, interpreted=False):
        patch.setattr(torch.nn.functional, "scaled_mm", gemm.scaled_mm)
        yield gemm


MIXED = CustomRecipe(Gemm("mxfp8", "mxfp4"), Gemm("mxfp8_e5m2", "mxfp6_e2m3"), Gemm("mxfp4", "mxfp4"))
SQUARES = Float8BlockScaling(x=(128, 128), w=(1, 128), dy=(128, 128))


@pytest.mark.slow_cases(
    "further dtypes and shapes of a checked kind",
    all_but=("plain-*-torch.bfloat16-*", "bias-*-torch.float16-(37*", "bias-*-torch.float32-(48*"),
)
@pytest.mark.parametrize("shape", [(48, 160, 64), (1, 1, 1), (37, 150, 21)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("recipe", "kinds"),
    [
        ("fp8_block", {"float8_e4m3fn BlockWise1x32"}),
        (SQUARES, {"float8_e4m3fn BlockWise1x32"}),
        ("mxfp8", {"float8_e4m3fn BlockWise1x32"}),
        ("mxfp6", {"float8_e4m3fn BlockWise1x32"}),
        ("mxfp4", {"float4_e2m1fn_x2 BlockWise1x32", "float8_e4m3fn BlockWise1x32"}),
        ("nvfp4", {"float4_e2m1fn_x2 BlockWise1x16"}),
        (MIXED, {"float8_e4m3fn BlockWise1x32", "float8_e5m2 BlockWise1x32", "float4_e2m1fn_x2 BlockWise1x32"}),
    ],
    ids=["fp8_block", "squares", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "mixed"],
)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_linears_reach_the_block_scaled_gemm(recipe, kinds, dtype, shape, bias) -> None:
    rows, features, out = shape
    torch.manual_seed(0)
    layer = mf.Linear(features, out, bias=bias, dtype=dtype, recipe=recipe)
    x, dy = torch.randn(rows, features, dtype=dtype), torch.randn(rows, out, dtype=dtype)
    expected = _step(layer, x, dy)
    with on_blackwell() as gemm:
        actual = _step(layer, x, dy)
    limit = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4, torch.float32: 1e-5}[dtype]  # docs/numerics.md 8.3
    for mine, wanted in zip(actual, expected, strict=True):
        assert mine.dtype == wanted.dtype
        # Both sides are rounded results of the same operands, each within the limit of the exact product.
        assert (mine.double() - wanted.double()).norm() <= 2 * limit * wanted.double().norm()
    assert len(gemm.kinds) == 3
    assert set(gemm.kinds) <= kinds


@pytest.mark.parametrize("chip", ["rtx5090", "gb10", "sm_110"])
@pytest.mark.parametrize(
    ("name", "kind"), [("mxfp4", "float8_e4m3fn BlockWise1x32"), ("nvfp4", "float4_e2m1fn_x2 BlockWise1x16")]
)
def test_mxfp4_enters_as_fp8_where_torch_has_no_gemm_for_it(chip, name, kind) -> None:
    """torch's GEMM of MXFP4 is for the Blackwell of data centers alone (compute capability 10)."""
    layer = mf.Linear(96, 48, dtype=torch.bfloat16, recipe=name)
    x = torch.randn(24, 96, dtype=torch.bfloat16)
    expected = layer(x)
    with on_blackwell(chip) as gemm:
        actual, route = layer(x), routes_of(from_name(name), chip_named(chip)).fprop
    assert gemm.kinds == [kind]
    assert ("as MXFP8, exactly" in route.reason) is (name == "mxfp4")
    assert (actual.double() - expected.double()).norm() <= 5e-3 * expected.double().norm()


def _step(layer, x, dy) -> list[torch.Tensor]:
    torch.manual_seed(1)  # equal seeds for stochastic rounding
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


def test_scales_that_are_no_powers_of_two_are_decoded() -> None:
    recipe = Float8BlockScaling(use_f32_scales=True)
    layer = mf.Linear(160, 64, dtype=torch.bfloat16, recipe=recipe)
    with on_blackwell() as gemm:
        layer(torch.randn(32, 160, dtype=torch.bfloat16)).sum().backward()
    assert not gemm.kinds


@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_of_unknown_origin_are_looked_at(power_of_two: bool) -> None:
    """A checkpoint's scales: `from_parts` does not say by which rule they were made."""
    rule = "amax_pow2" if power_of_two else "amax"
    x, w = torch.randn(48, 256), torch.randn(64, 256)
    made = [(name, mf.quantize(matrix, Cast(name, rule))) for name, matrix in (("fp8_1x128", x), ("fp8_128x128", w))]
    pairs = [mf.QuantizedTensor.from_parts(q.codes, q.scale, None, name) for name, q in made]
    expected = mf.scaled_matmul(*pairs)
    with on_blackwell() as gemm:
        actual = mf.scaled_matmul(*pairs)
    assert (actual - expected).norm() <= 2e-5 * expected.norm()  # docs/numerics.md 8.3, both sides
    assert len(gemm.kinds) == power_of_two


@pytest.mark.parametrize("empty", [(0, 64, 32), (8, 64, 0)], ids=["no rows", "no features out"])
def test_empty_products_have_their_shape(empty) -> None:
    rows, length, out = empty
    a, b = mf.quantize(torch.randn(rows, length), "mxfp8"), mf.quantize(torch.randn(out, length), "mxfp8")
    with on_blackwell():
        assert mf.scaled_matmul(a, b).shape == (rows, out)


def test_explain_says_that_it_has_not_run() -> None:
    for device in ("b200", "rtx5090"):
        explanation = mf.explain("fp8_block", device)
        assert explanation.accelerated
        assert all("block-scaled GEMM" in row.kernel for row in explanation.rows)
        assert all("not yet run on the hardware" in row.support.reason for row in explanation.rows)
    assert not mf.explain(Float8BlockScaling(use_f32_scales=True), "b200").accelerated
