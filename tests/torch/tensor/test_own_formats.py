"""Elements and blocks of a user's own: the oracle's bytes and values on the torch reference backend."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat import reference  # noqa: E402
from microfloat.formats import (  # noqa: E402
    E2M1,
    E4M3,
    SCALE_E4M3,
    SCALE_E8M0,
    SCALE_FP32,
    ElementFormat,
    ScaledFormat,
)  # fmt: skip
from microfloat.recipes import Cast, CustomRecipe, Gemm  # noqa: E402
from tests.formats.elements import every_element, wild_matrix  # noqa: E402

ELEMENTS = list(every_element())


@pytest.mark.parametrize(
    ("scale", "block", "rule"),
    [
        (SCALE_E8M0, (1, 16), "rceil"), (SCALE_E8M0, (3, 5), "even"), (SCALE_E8M0, (2, None), "floor"),
        (SCALE_FP32, (1, None), "amax"), (SCALE_FP32, (None, None), "amax"), (SCALE_FP32, (7, 3), "amax_pow2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_bytes_and_values_are_the_oracles(scale, block, rule, rounding):
    """Features Q18."""
    x = wild_matrix()
    for element in ELEMENTS[::5]:
        cast = Cast(ScaledFormat("mine", element, scale, block), rule, rounding)
        ours, oracle = mf.quantize(torch.from_numpy(x), cast, seed=7), reference.quantize(x, cast, seed=7)
        assert ours.codes.view(torch.uint8).numpy().tobytes() == oracle.codes.tobytes(), element
        assert ours.scale.numpy().tobytes() == oracle.scale.tobytes(), element
        np.testing.assert_array_equal(ours.dequantize().numpy(), reference.dequantize(oracle))


@pytest.mark.slow_cases("further blocks of each rule", cases=("*mae_448-block[13]", "*mse_256-block[02]"))
@pytest.mark.parametrize("block", [(None, None), (3, None), (1, None), (5, 48)])
@pytest.mark.parametrize("rule", ["four_over_six_mae_448", "four_over_six_mse_256"])
def test_the_better_of_two_scales_is_chosen_in_blocks_of_any_size(block, rule):
    """A block that is the whole tensor is searched too. Values of few bits: many blocks in which 4 beats 6."""
    cast = Cast(ScaledFormat("mine", E2M1, SCALE_E4M3, block, "tensor"), rule)
    for seed in range(8):
        x = np.random.default_rng(seed).integers(-24, 25, (11, 40)).astype(np.float32) * np.float32(0.25)
        for matrix in (x, x[:, ::2], x.T, x[:, :0]):
            ours, oracle = mf.quantize(torch.from_numpy(matrix), cast), reference.quantize(matrix, cast)
            assert (*ours.scale.shape,) == oracle.scale.shape
            assert ours.codes.numpy().tobytes() == oracle.codes.tobytes()
            assert ours.scale.numpy().tobytes() == oracle.scale.tobytes()
            np.testing.assert_array_equal(ours.dequantize().numpy(), reference.dequantize(oracle))


@pytest.mark.parametrize("element", [ELEMENTS[3], ELEMENTS[-1], E2M1, E4M3], ids=str)
def test_a_layer_trains_and_saves_its_operands(element):
    fmt = ScaledFormat("mine", element, SCALE_E8M0, (1, 24))
    recipe = CustomRecipe(*[Gemm(Cast(fmt, rounding="stochastic"), fmt)] * 3)
    layer = mf.Linear(40, 16, recipe=recipe)
    x = torch.randn(9, 40, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    for tensor in (y, x.grad, layer.weight.grad):
        assert torch.isfinite(tensor).all()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of its own doing
def test_a_layer_compiles():
    fmt = ScaledFormat("mine", ELEMENTS[0], SCALE_E8M0, (1, 24))
    layer = mf.Linear(40, 16, recipe=CustomRecipe(*[Gemm(fmt, fmt)] * 3))
    x = torch.randn(9, 40)
    assert torch.equal(torch.compile(layer, backend="aot_eager")(x), layer(x))


def test_a_stock_element_under_another_name_is_an_element_of_its_own():
    twin = ElementFormat("E4M3_TWIN", 4, 3, 7, 448.0, False, True)
    x = torch.from_numpy(wild_matrix())
    ours, stock = (mf.quantize(x, ScaledFormat("mine", element, SCALE_E8M0, (1, 32))) for element in (twin, E4M3))
    assert ours.codes.dtype == torch.uint8
    assert torch.equal(ours.codes, stock.codes.view(torch.uint8))
    np.testing.assert_array_equal(ours.dequantize().numpy(), stock.dequantize().numpy())


@pytest.mark.parametrize("rows", [6, 7])
def test_blocks_of_several_whole_rows_multiply(rows):
    """Their scales meet rows of the accumulator, each as many as a block has."""
    cast = Cast(ScaledFormat("two_rows", E4M3, SCALE_FP32, (2, None)), "amax_pow2")
    a, b = mf.quantize(torch.randn(rows, 32), cast), mf.quantize(torch.randn(5, 32), cast)
    values = [q.dequantize(torch.float64) for q in (a, b)]
    error = (mf.scaled_matmul(a, b, out_dtype=torch.float32) - values[0] @ values[1].t()).abs()
    assert (error <= 34 * 2.0**-24 * (values[0].abs() @ values[1].abs().t())).all()  # 32 sums, two roundings of scales
    layer, x = mf.Linear(32, 5, recipe=CustomRecipe(*[Gemm(cast, cast)] * 3)), torch.randn(rows, 32, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    assert layer.weight.grad.isfinite().all()
