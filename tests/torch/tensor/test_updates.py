"""Small steps on stored weights: what they move, which scales are kept, and which are those of a fresh cast."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.formats import E2M1, E3M2, FORMATS, SCALE_FP32, ScaledFormat  # noqa: E402
from microfloat.recipes import Cast, Current  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

OWN = ScaledFormat("rows_of_seven", E2M1, SCALE_FP32, (1, 7))  # packed codes, and blocks that end inside of a byte
OWN_TILE = ScaledFormat("tile_of_eight", E3M2, SCALE_FP32, (8, 8))
# Float32 scales that follow the amax: of elements, and of block scales.
CONTINUOUS = [
    Cast("fp8_tensor"), Cast("fp8_tensor_e5m2"), Cast("fp8_row", "amax"), Cast("fp8_1x128", "amax"),
    Cast("fp8_128x128", "amax"), Cast(OWN, "amax"), Cast(OWN_TILE, "amax"), Cast("nvfp4"), Cast("nvfp4_2d"),
    Cast("nvfp4_row"), Cast("nvfp4", "two_level_torchao"), Cast("nvfp4_2d", "four_over_six_mse_448"),
]  # fmt: skip
DOUBLING = ("rceil", "amax_pow2")  # for anything above the top code
SCALARS = CONTINUOUS[:2] + CONTINUOUS[7:9]


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def identified(cast) -> str:
    return f"{cast.format.name} {cast.scale_rule}"


def element_scales(q) -> torch.Tensor:
    """The float32 scale of every element of a matrix: what a code of one stands for."""
    ones = q.clone()
    fmt = q.format.element
    one = fmt.bias << fmt.mantissa_bits
    ones.codes.view(torch.uint8).fill_(one | one << 4 if fmt.codes_per_byte == 2 else one)
    return ones.dequantize(torch.float32)


def steps_of(q) -> torch.Tensor:
    """The distance of every element of q from its neighbour above."""
    element, scale = q.format.element, element_scales(q)
    exponent = (q.dequantize(torch.float32).abs() / scale).clamp_min(element.min_normal).log2().floor()
    return 2.0 ** (exponent - element.mantissa_bits) * scale


@pytest.mark.slow_cases(
    "further casts of a checked kind", all_but=("fp8_tensor amax", "nvfp4 two_level", "nvfp4_2d four_over_six_mse_448")
)
@pytest.mark.parametrize(
    "cast", [*map(Cast, FORMATS.values()), *CONTINUOUS[2:7], *CONTINUOUS[-2:]], ids=identified
)  # fmt: skip
def test_a_hundred_steps_about_zero_move_a_weight_by_no_more_than_its_small_elements(cast) -> None:
    """The norm of fp8_tensor and of nvfp4 grew by a third.

    A step of at most d moves an element whose own step is 2 d at most, that is one below r = 2^(mb + 2) d. It stays
    below r + 2 d, so that it moves by less than 2 r + 2 d. Where a scale is a power of two and doubles, elements that
    become subnormal are rounded once, by half of their new step. A change of norm is no more than the norm of
    the change.
    """
    q = mf.quantize(uniform(64, 128), cast)
    before, element = q.clone(), q.format.element
    values, d = before.dequantize(), 1e-3
    steps, scale = steps_of(before), element_scales(before)
    r = 2.0 ** (element.mantissa_bits + 2) * d
    moved = (2 * r + 2 * d) * (steps <= 2 * d)
    rounded = element.step * scale * (values.abs() < 4 * element.min_normal * scale) * (cast.scale_rule in DOUBLING)
    bound = (moved + rounded).norm()
    assert bound < 0.06 * values.norm()
    for step in range(100):
        q.add_(d * uniform(64, 128, seed=step + 1))
    assert (q.dequantize() - values).norm() <= bound


@pytest.mark.parametrize("cast", CONTINUOUS, ids=identified)
@pytest.mark.parametrize("axis", [-1, -2])
def test_steps_below_half_of_every_step_change_no_value_and_no_scale(cast, axis) -> None:
    """Half of an element's step, and half of a block scale's, which is at least 1/30 of the amax of its block."""
    q = mf.quantize(uniform(48, 80) + 2 * uniform(48, 80, seed=1), cast, axis=axis)
    before = q.clone()
    element = q.format.element
    half = float(element_scales(q).min()) * min(0.49 * element.step, 0.03 * element.max)
    for step, update in enumerate((
        lambda noise: q.add_(noise), lambda noise: q.sub_(noise), lambda noise: q.addcmul_(noise, torch.ones(48, 80)),
        lambda noise: q.lerp_(q.dequantize() + noise, 0.9), lambda noise: q.mul_(torch.ones(48, 80)),
    )):  # fmt: skip
        update(half * uniform(48, 80, seed=step + 2))
    assert torch.equal(q.dequantize(), before.dequantize())
    for name in ("scale", "tensor_scale"):
        one = getattr(q, name)
        assert one is None or torch.equal(one, getattr(before, name))


@pytest.mark.parametrize("cast", CONTINUOUS, ids=identified)
@pytest.mark.parametrize("factor", [0.4, 1.3])
def test_scales_that_serve_no_more_are_those_of_a_fresh_cast(cast, factor) -> None:
    """A part of the rows keeps its scales where rows or tiles have their own."""
    w = uniform(48, 80)
    w[:, ::2] = w[:, ::2].sign()
    q = mf.quantize(w, cast)
    change, before = (factor - 1) * q.dequantize(torch.float32), q.clone()
    first = 24 if q.upper.dim() == 2 and q.upper.shape[0] > 1 else 0
    change[:first] = 0
    expected = mf.quantize(q.dequantize(torch.float32) + change, cast)
    q.add_(change)
    assert torch.equal(q.dequantize()[first:], expected.dequantize()[first:])
    assert torch.equal(q.dequantize()[:first], before.dequantize()[:first])


@pytest.mark.parametrize("cast", SCALARS, ids=identified)
def test_where_the_top_code_ends(cast) -> None:
    """E4M3: kept from 224 scales to just below 464; block scales likewise, under the tensor scale."""
    top = cast.format.element if cast.rule.two_level is None else mf.quantize(torch.ones(1), "fp8_row").format.element
    limit = 1 + 2.0 ** (top.emax - top.mantissa_bits - 1) / top.max
    for factor, kept in ((0.499, False), (0.501, True), (0.999 * limit, True), (1.001 * limit, False)):
        q = mf.quantize(torch.ones(16, 16), cast)
        before = q.upper.clone()
        q.add_((factor - 1) * torch.ones(16, 16))
        assert torch.equal(q.upper, before) is kept
        assert kept or torch.equal(q, mf.quantize(torch.ones(16, 16) + (factor - 1) * torch.ones(16, 16), cast))


@pytest.mark.parametrize("cast", CONTINUOUS, ids=identified)
def test_a_product_with_one_number_changes_scales_alone(cast) -> None:
    """Weight decay, which is far below half a step."""
    q = mf.quantize(uniform(48, 80), cast)
    before = q.clone()
    for _ in range(15):
        q.mul_(0.999)
        q.div_(1 / 0.999)
    assert torch.equal(q.codes.view(torch.uint8), before.codes.view(torch.uint8))
    torch.testing.assert_close(q.upper, before.upper * 0.999**30, rtol=1e-5, atol=0)


def test_new_values_are_quantized_afresh() -> None:
    w = 0.8 * uniform(32, 64)
    drawn = torch.empty(32, 64).uniform_(-0.8, 0.8, generator=torch.Generator().manual_seed(3))
    for write, values in (
        (lambda q: q.copy_(w), w), (lambda q: q.zero_(), torch.zeros(32, 64)),
        (lambda q: mf.update_quantized(q, w), w), (lambda q: q.fill_(0.7), torch.full((32, 64), 0.7)),
        (lambda q: q.uniform_(-0.8, 0.8, generator=torch.Generator().manual_seed(3)), drawn),
    ):  # fmt: skip
        q = mf.quantize(uniform(32, 64), "nvfp4")
        write(q)
        assert torch.equal(q, mf.quantize(values, "nvfp4"))


def test_diverged_and_empty_weights_and_a_smallest_amax() -> None:
    q = mf.quantize(uniform(8, 32), "fp8_tensor")
    q.add_(torch.full((8, 32), float("inf")))
    assert float(q.scale) == 1.0
    q = mf.quantize(uniform(8, 32), "fp8_tensor")
    scale = q.scale.clone()
    q.add_(torch.full((8, 1), float("nan")) * (torch.arange(32) == 3))
    assert torch.equal(q.scale, scale) or bool(q.dequantize().isnan().any())
    assert mf.quantize(torch.zeros(0, 32), "nvfp4").add_(1.0).shape == (0, 32)
    q = mf.quantize(torch.zeros(8, 32), Cast("fp8_tensor", scaling=Current(amax_epsilon=0.5)))
    scale = q.scale.clone()
    assert torch.equal(q.add_(0.01).scale, scale)
    assert not torch.equal(q.add_(1.0).scale, scale)


def test_each_expert_keeps_its_own_scale() -> None:
    with mf.quantized_model_init(recipe="nvfp4"):
        layer = mf.GroupedLinear(3, 32, 32, bias=False)
    weight = layer.weight.detach()
    before = weight.clone()
    change = torch.zeros(3, 32, 32)
    change[1] = weight[1].dequantize(torch.float32)  # twice as large
    weight.add_(change + 1e-5 * uniform(3, 32, 32))
    assert torch.equal(weight.tensor_scale[[0, 2]], before.tensor_scale[[0, 2]])
    torch.testing.assert_close(weight.tensor_scale[1], 2 * before.tensor_scale[1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("recipe", ["fp8_current", "delayed", "nvfp4"])
def test_adamw_towards_zero_does_not_grow_a_weight(recipe) -> None:
    """Forty steps of 1e-4 on a layer that learns zero: the norm grew by 6 percent, and the loss with it."""
    torch.manual_seed(0)
    with mf.quantized_model_init(recipe=recipe):
        layer = mf.Linear(64, 64, bias=False, recipe=recipe)
    x, first = torch.randn(64, 64), layer.weight.detach().dequantize().norm()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4)
    for _ in range(40):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
    assert layer.weight.detach().dequantize().norm() <= first * (1 + 1e-4)


def test_compiled_steps_keep_what_eager_ones_keep() -> None:
    def step(q, change):
        q.add_(change)
        return q.dequantize()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    eager = mf.quantize(uniform(16, 64), "nvfp4")
    traced, change = eager.clone(), 0.01 * uniform(16, 64, seed=5)
    assert torch.equal(compiled(traced, change), step(eager, change))
    assert torch.equal(traced, eager)
