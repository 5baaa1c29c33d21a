"""rounding="eden" (docs/numerics.md 5.5): block scales that make nearest elements right on average."""

import numpy as np
import pytest

from microfloat.formats import E2M1, E4M3, decode, encode_bits
from microfloat.recipes import Cast, Hadamard
from microfloat.reference import dequantize, hadamard_transform, quantize, random_bytes, scaled_matmul

MASKS = np.random.default_rng(5).integers(2**64, size=64, dtype=np.uint64).tolist()


def eden(mask=MASKS[0], size=64, rule=None):
    return Cast("nvfp4", rule, "eden", Hadamard(size, mask & (1 << size) - 1))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def blocks_of(q):
    """Values of codes [rows, blocks, 16] and the bytes and values of their scales [rows, blocks]."""
    return decode(q.unpacked_codes(), E2M1).reshape(*q.scale.shape, 16), q.scale, decode(q.scale, E4M3)


@pytest.mark.parametrize(("size", "rule"), [(64, None), (16, "two_level"), (64, "one_level_e4m3")])
def test_scales_are_those_of_nearest_times_the_correction_of_their_group(size, rule):
    """Group by group and sum by sum, as the section writes it."""
    x, cast = normal(3, 128) * np.float32([[1], [1e-3], [30]]), eden(size=size, rule=rule)
    rule = cast.scale_rule
    nearest, found = quantize(x, Cast("nvfp4", rule, hadamard=cast.hadamard)), quantize(x, cast, seed=9, stream=2)
    assert np.array_equal(found.codes, nearest.codes)
    assert found.tensor_scale == nearest.tensor_scale
    turned, noise = hadamard_transform(x, cast.hadamard), random_bytes(3, 128, 9, 2)
    codes, _, scales = blocks_of(nearest)
    level = (
        np.float32(1)
        if nearest.tensor_scale is None
        else np.float32(1) / np.float32(cast.rule.two_level.capacity / np.abs(turned).max())
    )
    for row in range(3):
        for start in range(0, 128, size):
            products = []
            for column in range(start, start + size):
                w = scales[row, column // 16]
                y = np.abs(turned[row, column] * (np.float32(1) / np.float32(w * level)) * w)
                d = np.abs(codes[row, column // 16, column % 16] * w)
                products.append((y * y, y * d))
            sums = [list(part) for part in zip(*products, strict=True)]
            while len(sums[0]) > 1:
                half = len(sums[0]) // 2
                sums = [[part[i] + part[i + half] for i in range(half)] for part in sums]
            for block in range(start // 16, (start + size) // 16):
                target = scales[row, block] * (sums[0][0] / sums[1][0] if sums[1][0] else np.float32(1))
                expected = encode_bits(np.float32([target]), E4M3, noise[row, block * 16 : block * 16 + 1])
                assert found.scale[row, block] == expected[0]


def test_the_mean_over_seeds_keeps_the_length_of_every_group():
    """``<dequantize, x> = <x, x>``, up to 5 standard errors, the truncation to 8 bits and bfloat16."""
    x, draws = normal(4, 64), 80
    found = np.array([dequantize(quantize(x, eden(), seed=seed)) for seed in range(draws)]).astype(np.float64)
    shares = (found * x).sum(axis=-1) / (x.astype(np.float64) ** 2).sum(axis=-1) - 1
    error = 5 * shares.std(axis=0) / np.sqrt(draws)
    assert (np.abs(shares.mean(axis=0)) < error + 2.0**-11 + 2.0**-9 / np.sqrt(64)).all()
    nearest = dequantize(quantize(x, Cast("nvfp4", hadamard=eden().hadamard)))
    assert (np.abs((nearest * x).sum(axis=-1) / (x * x).sum(axis=-1) - 1) > error.max() + 2.0**-11).any()


def test_the_mean_over_signs_and_seeds_is_the_value_and_the_product():
    """What is left of the squared error is the share of a mean; a product's factors are independent."""
    a, b = normal(24, 128), normal(24, 128, seed=1)
    exact, values, products = a.astype(np.float64) @ b.T.astype(np.float64), [], []
    for seed, mask in enumerate(MASKS):
        q, other = (quantize(x, eden(mask), seed=seed, stream=stream) for stream, x in ((2, a), (3, b)))
        values.append(dequantize(q).astype(np.float64))
        products.append(scaled_matmul(q, other))
    for found, wanted in ((values, a.astype(np.float64)), (products, exact)):
        draws, deviation = len(found), np.std(found, axis=0, ddof=1)
        off = (np.mean(found, axis=0) - wanted) / (deviation / np.sqrt(draws))
        # Student's t with 63 degrees: mean square 63/61. Elements of a group (a row of a product) move together.
        independent = off.size / (64 if found is values else 24)
        assert np.mean(off**2) < 63 / 61 * (1 + 5 * np.sqrt(2 / independent))
        assert abs(off.mean()) < 5 / np.sqrt(independent)


def test_the_error_is_half_of_stochastic_rounding():
    """arXiv 2601.22813: more than twice lower."""
    x = normal(128, 256)

    def error(cast):
        return float(((dequantize(quantize(x, cast, seed=3)) - x) ** 2).sum() / (x * x).sum())

    nearest, stochastic = Cast("nvfp4", hadamard=Hadamard()), Cast("nvfp4", "two_level_17_16", "stochastic", Hadamard())
    assert error(nearest) < error(eden()) < 1.2 * error(nearest)
    assert 2 * error(eden()) < error(stochastic)


def test_ragged_rows_zeros_nan_and_infinity():
    x = normal(6, 100)  # stored as 128: two groups
    x[0] = 0
    x[1, 64:] = 0
    x[2, 3], x[3, 70] = np.nan, np.inf
    x[4, :64] *= 1e-12  # below every scale
    q = quantize(x, eden(), seed=1)
    codes, scale, _ = blocks_of(q)
    assert q.codes.shape == (6, 64)
    assert scale.shape == (6, 8)
    assert q.tensor_scale == 1  # infinite amax
    assert not scale[0].any()
    assert not codes[0].any()
    assert not scale[1, 4:].any()
    assert scale[1, :4].all()
    nearest = quantize(x, Cast("nvfp4", "two_level_256", hadamard=eden().hadamard))
    assert (scale[2, :4] == 0x7F).all()
    assert np.array_equal(scale[2, :4], nearest.scale[2, :4])
    assert (nearest.scale[3, 4:] == scale[3, 4:]).all()
    assert (scale[2, 4:] != 0x7F).all()
    assert not scale[4, :4].any()
    assert not dequantize(q)[4, :64].any()
    assert quantize(np.zeros((0, 40), np.float32), eden(), seed=1).scale.shape == (0, 4)


def test_corrected_scales_stay_below_the_largest():
    """`two_level_256` ends at 256; so far the correction of Gaussian groups and of outliers finds its space."""
    for x in (normal(64, 256), normal(64, 256) ** 3, np.eye(64, dtype=np.float32)):
        scales = decode(quantize(x, eden(), seed=2).scale, E4M3)
        assert scales.max() < 300
