"""The order of float32 operations in the NVFP4 rules, on inputs where another order gives another byte.

Random data rarely sees it: a result one ulp off matters only next to a rounding boundary. So the inputs here are built
next to the boundaries of E4M3 (block scales) and E2M1 (codes), and every test also shows that the other order fails.
"""

import numpy as np
import pytest

from microfloat import reference
from microfloat.formats import E2M1, E4M3, NVFP4, decode, encode
from microfloat.recipes import Cast, Hadamard
from microfloat.reference import hadamard_transform, quantize
from microfloat.scale_rules import SCALE_RULES

f32 = np.float32
SIX, ONE = f32(6), f32(1)
RNG = np.random.default_rng(0)
AMAXES = (RNG.uniform(1, 2, 24) * 2.0 ** RNG.integers(-20, 20, 24)).astype(f32)


def midpoints(element, low, high):
    values = decode(np.arange(low, high + 1, dtype=np.uint8), element).astype(np.float64)
    return (values[1:] + values[:-1]) / 2


def neighbours(values):
    """Every value and the four float32 numbers on each side."""
    bits = values.astype(f32).view(np.int32)[..., None] + np.arange(-4, 5)
    return bits.astype(np.int32).view(f32)


def blocks_with_maximum(block_amax):
    x = np.zeros((block_amax.size, 16), f32)
    x[:, 0] = block_amax.reshape(-1)
    return x


def sb_two_level(a, amax, capacity, c6):
    return encode(a * (capacity / amax * c6), E4M3)


def sb_torchao(a, p):
    return encode(np.clip(a / SIX / p, f32(2.0**-6), f32(448)), E4M3)


def block_scales(rule, amax, a):
    """Scales that quantize stores for blocks of maximum `a` in a tensor of maximum `amax`."""
    return quantize(blocks_with_maximum(a), Cast(NVFP4, rule), amax=amax).scale[:, 0]


@pytest.mark.parametrize("rule", ["two_level", "two_level_17_16"])
def test_block_scale_of_two_level(rule):
    constants = SCALE_RULES[rule].two_level
    capacity, c6 = f32(constants.capacity), f32(constants.inverse_max)
    other_orders = {"a * S * c6": 0, "a / 6 * S": 0}
    for amax in AMAXES:
        a = neighbours(midpoints(E4M3, 0x08, 0x7E) / (float(capacity) / amax * c6)).reshape(-1)
        expected = sb_two_level(a, amax, capacity, c6)
        assert np.array_equal(block_scales(rule, amax, a), expected)
        scale = capacity / amax
        other_orders["a * S * c6"] += int((encode(a * scale * c6, E4M3) != expected).sum())
        other_orders["a / 6 * S"] += int((encode(a / SIX * scale, E4M3) != expected).sum())
    assert min(other_orders.values()) > 0


def test_block_scale_of_the_torchao_rules():
    """Features R17."""
    other_orders = {"a / p / 6": 0, "a * c6 / p": 0}
    for amax in AMAXES:
        p = amax / f32(2688)
        a = neighbours(midpoints(E4M3, 0x08, 0x7E) * 6 * float(p)).reshape(-1)
        expected = sb_torchao(a, p)
        assert np.array_equal(block_scales("two_level_torchao", amax, a), expected)
        other_orders["a / p / 6"] += int((encode(a / p / SIX, E4M3) != expected).sum())
        other_orders["a * c6 / p"] += int((encode(a * f32(1 / 6) / p, E4M3) != expected).sum())
    assert min(other_orders.values()) > 0
    a = neighbours(midpoints(E4M3, 0x08, 0x7E) * 6).reshape(-1)
    q = quantize(blocks_with_maximum(a), Cast(NVFP4, "one_level_e4m3"))
    assert np.array_equal(q.scale[:, 0], sb_torchao(a, ONE))
    assert (encode(a * f32(1 / 6), E4M3) != q.scale[:, 0]).any()


@pytest.mark.parametrize("rule", ["four_over_six_mae_256", "four_over_six_mse_448"])
def test_block_scale_of_four_over_six(rule):
    """The stored byte is one of the two candidates: enc(f32(base * k)), base = f32(f32(a / 6) * S), k = 1 or 1.5."""
    capacity, misses = f32(SCALE_RULES[rule].two_level.capacity), {"a * f32(S * c6)": 0, "a * S / 6": 0}

    def candidates(base):
        return [encode(np.minimum(base * k, f32(448)), E4M3) for k in (ONE, f32(1.5))]

    for amax in AMAXES:
        scale = capacity / amax
        a = neighbours(midpoints(E4M3, 0x08, 0x70) * 6 / float(scale)).reshape(-1)
        stored = block_scales(rule, amax, a)
        six, four = candidates(a / SIX * scale)
        assert ((stored == six) | (stored == four)).all()
        for name, base in (("a * f32(S * c6)", a * (scale * f32(1 / 6))), ("a * S / 6", a * scale / SIX)):
            six, four = candidates(base)
            misses[name] += int(((stored != six) & (stored != four)).sum())
    assert min(misses.values()) > 0, misses


def near_ties(factor):
    """Values x whose x * factor lies next to a boundary of E2M1, below 6."""
    return neighbours(midpoints(E2M1, 0, 7) / float(factor)).reshape(-1)


def codes_of(rule, amax, x, maximum):
    """Codes of `x` in blocks [maximum, x, 0, ...]: the maximum fixes the block scale."""
    blocks = np.zeros((x.size, 16), f32)
    blocks[:, 0], blocks[:, 1] = maximum, x
    return quantize(blocks, Cast(NVFP4, rule), amax=amax).unpacked_codes()[:, 1]


@pytest.mark.parametrize("rule", ["two_level", "two_level_17_16", "two_level_torchao", "one_level_e4m3"])
def test_encode_factor(rule):
    constants = SCALE_RULES[rule].two_level
    capacity, seen = f32(constants.capacity), {}
    for amax in AMAXES:
        maximum = f32(amax * f32(0.25))  # a block scale near 112, no power of two
        p = amax / capacity if constants.tensor_scale else ONE
        if constants.inverse_max is not None:
            sb = decode(sb_two_level(maximum, amax, capacity, f32(constants.inverse_max)), E4M3)
            factor = ONE / (sb * (ONE / (capacity / amax)))
            others = {
                "1 / sb * S": ONE / sb * (capacity / amax),
                "S / sb": capacity / amax / sb,
                "1 / (sb p)": ONE / (sb * p),
            }
        else:
            sb = decode(sb_torchao(maximum, p), E4M3)
            factor = ONE / p / sb
            others = {"1 / (sb p)": ONE / (sb * p)} if constants.tensor_scale else {}
        x = near_ties(factor)
        x = x[x < maximum]
        given = amax if constants.tensor_scale else None
        expected = encode(x * factor, E2M1)
        assert np.array_equal(codes_of(rule, given, x, maximum), expected)
        for name, other in others.items():
            seen[name] = seen.get(name, 0) + int((encode(x * other, E2M1) != expected).sum())
        seen["x / (sb p)"] = seen.get("x / (sb p)", 0) + int((encode(x / (sb * p), E2M1) != expected).sum())
    assert min(seen.values()) > 0, seen


@pytest.mark.parametrize(
    "rule", [rule.name for rule in SCALE_RULES.values() if rule.two_level and rule.two_level.tensor_scale]
)
def test_a_zero_or_infinite_amax_means_the_capacity(rule):
    """S = 1, tensor_scale = 1, and A := capacity where four_over_six measures errors (docs/numerics.md 2.4, 2.6)."""
    x = np.random.default_rng(1).standard_normal((32, 64)).astype(f32)
    cast = Cast(NVFP4, rule)
    expected = quantize(x, cast, amax=f32(cast.rule.two_level.capacity))
    for amax in (0.0, np.inf):
        q = quantize(x, cast, amax=amax)
        assert np.array_equal(q.codes, expected.codes)
        assert np.array_equal(q.scale, expected.scale)
        assert q.tensor_scale == 1


HUGE = np.stack([np.full(16, 1e38), np.linspace(-8.6e37, 8.6e37, 16), np.full(16, 8e37)]).astype(np.float32)


def test_the_hadamard_transform_of_finite_values_near_the_largest_is_nan():
    """Butterflies come first and the factor 1/4 last; the matrix that holds the factor stays finite."""
    with np.errstate(all="ignore"):
        transformed = hadamard_transform(HUGE[:1], Hadamard(16, 0))
    assert not np.isfinite(transformed).all()
    matrix = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)], np.float32) / 4
    assert np.isfinite(HUGE[:1].astype(np.float64) @ matrix).all()
    for cast in (Cast("nvfp4", hadamard=Hadamard(16, 0)), Cast("mxfp8", hadamard=Hadamard())):
        oracle = reference.quantize(HUGE, cast)
        assert np.isnan(reference.dequantize(oracle)[0]).any()
        torch = pytest.importorskip("torch", reason="torch is not installed")
        import microfloat.torch as mf

        ours = mf.quantize(torch.from_numpy(HUGE), cast)
        assert ours.codes.view(torch.uint8).numpy().tobytes() == oracle.codes.tobytes()
        assert ours.scale.numpy().tobytes() == oracle.scale.tobytes()
        np.testing.assert_array_equal(ours.dequantize().numpy(), reference.dequantize(oracle))
