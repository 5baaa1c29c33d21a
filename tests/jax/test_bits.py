"""Integer encoders, decoders and the arithmetic that XLA must not change."""

import functools
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from microfloat import formats, reference
from microfloat.jax.numerics import bits as _bits
from microfloat.jax.numerics import random as _random
from microfloat.jax.numerics.bits import hadamard_inverse, hadamard_transform
from microfloat.jax.numerics.random import random_bytes, seed_words
from microfloat.recipes import Hadamard
from microfloat.reference import _operand as oracle

pytestmark = pytest.mark.as_users_compile

ELEMENTS = list(formats.ELEMENTS.values())
SAMPLE = 1_000_000 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 200_000


@functools.cache
def hard_values():
    """Every bfloat16 and every float16 value, half-way points of all elements +- 1 ulp, random bits, extremes."""
    bf16 = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    f16 = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = []
    for element in ELEMENTS:
        values = np.unique(formats.decode(np.arange(1 << element.bits), element))
        values = values[np.isfinite(values)]
        middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
        middles += [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf)), values]
    random = np.random.default_rng(1).integers(0, 2**32, SAMPLE, dtype=np.uint64).astype(np.uint32).view(np.float32)
    extremes = np.array([0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001], np.uint32)
    return np.concatenate([bf16, f16, *middles, random, extremes.view(np.float32)])


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("E4M3", "E2M1"))
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_encode_equals_the_oracle(element):
    values = hard_values()
    encode = jax.jit(lambda y: _bits.encode(y, element))
    np.testing.assert_array_equal(np.asarray(encode(values)), formats.encode(values, element))


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("E4M3",))
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_stochastic_encode_equals_the_oracle(element):
    values = hard_values()
    noise = np.random.default_rng(2).integers(0, 256, values.size, dtype=np.uint8)
    encode = jax.jit(lambda y, r: _bits.encode(y, element, r))
    np.testing.assert_array_equal(np.asarray(encode(values, noise)), formats.encode_bits(values, element, noise))


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_decode_of_every_code(element):
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    decoded = np.asarray(jax.jit(lambda c: _bits.decode(c, element))(codes))
    np.testing.assert_array_equal(decoded, formats.decode(codes, element))
    assert np.array_equal(np.signbit(decoded[decoded == 0]), np.signbit(formats.decode(codes, element)[decoded == 0]))


def test_arithmetic_is_not_rewritten():
    """Division by what is broadcast, squares before sums, subnormal operands: each one correctly rounded operation."""
    rng = np.random.default_rng(3)
    positive = np.abs(rng.standard_normal(50_000)).astype(np.float32)
    tiny = rng.integers(1, 1 << 25, 50_000, dtype=np.uint32).view(np.float32)
    x, other = rng.standard_normal((2, 50_000)).astype(np.float32)
    with np.errstate(all="ignore"):
        expected = {
            "division": positive / np.float32(2688),
            "division by a scalar": positive / other[0],
            "division by rows": positive.reshape(500, 100) / positive[:500, None],
            "sixth": tiny / np.float32(6),
            "square": x * x + other,
            "product": tiny * np.float32(2.0**117),
        }
    actual = jax.jit(
        lambda positive, tiny, x, other: {
            "division": _bits.divide(positive, np.float32(2688)),
            "division by a scalar": _bits.divide(positive, other[0]),
            "division by rows": _bits.divide(positive.reshape(500, 100), positive[:500, None]),
            "sixth": _bits.divide_by_integers(tiny, jnp.full_like(tiny, 6)),
            "square": _bits.square(x) + other,
            "product": _bits.multiply(tiny, jnp.float32(2.0**117)),
        }
    )(positive, tiny, x, other)
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(actual[name]).view(np.uint32), values.view(np.uint32), err_msg=name)


def test_division_by_integers():
    """Operations where XLA is only nearly right: all bits, subnormal numbers, quotients near one, extremes."""
    rng = np.random.default_rng(5)
    extremes = np.array([0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000], np.uint32)
    extremes = np.concatenate([extremes, extremes | np.uint32(1 << 31)])
    tops = [rng.integers(0, 1 << 32, SAMPLE), rng.integers(0, 1 << 24, SAMPLE), np.repeat(extremes, 16)]
    bottoms = [
        rng.integers(0, 1 << 32, SAMPLE),
        rng.integers(0x3F000000, 0x41000000, SAMPLE),
        np.tile(extremes, 16),
    ]
    x, divisor = (np.concatenate(parts).astype(np.uint32).view(np.float32) for parts in (tops, bottoms))
    with np.errstate(all="ignore"):
        expected = x / divisor
    for divide in (_bits.divide_by_integers, *([_bits.divide] if jax.default_backend() != "cpu" else [])):
        actual = np.asarray(jax.jit(divide)(x, divisor))
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(actual[numbers].view(np.uint32), expected[numbers].view(np.uint32))
        assert np.isnan(actual[~numbers]).all()


def near_ties(divisors, rng):
    """Dividends whose quotients are next to a tie of FP8: odd multiples of 2^-4 in [1, 2), three units around."""
    ties = (2 * rng.integers(8, 16, divisors.size) + 1) / np.float32(16)
    bits = (ties.astype(np.float32) * divisors).view(np.uint32) + rng.integers(-3, 4, divisors.size)
    return bits.astype(np.uint32).view(np.float32)


def test_quotient_by_residual():
    """The form that runs on a GPU: float32's quotient, up to units beside a power of two."""
    rng = np.random.default_rng(6)
    divide = jax.jit(lambda x, divisor: _bits.quotient_by_residual(x.shape, False, x, divisor, jnp.float32(1)))
    divisors = rng.integers(0x3F800000, 0x40800000, 400_000).astype(np.uint32).view(np.float32)
    x = np.concatenate([near_ties(divisors[::2], rng), np.abs(rng.standard_normal(200_000)).astype(np.float32)])
    divisors = np.concatenate([divisors[::2], divisors[1::2]])
    actual, expected = np.asarray(divide(x, divisors)), x / divisors
    fraction = (expected.view(np.uint32) + np.uint32(3)) & np.uint32(0x7FFFFF)
    assert (x * (1 / divisors) != expected).mean() > 0.2, "a product with the reciprocal is not enough"
    np.testing.assert_array_equal(actual[fraction > 6], expected[fraction > 6])
    np.testing.assert_array_max_ulp(actual, expected, 1)


@pytest.mark.parametrize("divisor", [1e-40, 2.0**-126, 1e-38, 0.0123, -37.0, 2.0**127, 3e38, 0, np.inf, np.nan])
def test_quotient(divisor):
    """Subnormal operands count, and extremes are those of a division; results below 2^-100 may vanish."""
    x = np.array([1e-41, 1e-3, -1, 3e38, np.inf, 0, -0.0, -5, np.nan, 1.7e-38], np.float32)
    with np.errstate(all="ignore"):
        expected = x / np.float32(divisor)
    actual = np.asarray(jax.jit(_bits.quotient)(x, np.float32(divisor)))
    relevant = ~(np.abs(expected) < 2.0**-100) | (expected == 0)
    np.testing.assert_array_equal(actual[relevant], expected[relevant])
    np.testing.assert_array_equal(np.signbit(actual)[~np.isnan(expected)], np.signbit(expected)[~np.isnan(expected)])
    assert (np.abs(actual[~relevant]) < 2.0**-100).all()


def test_a_constant_factor_is_not_merged_into_its_operand():
    x = np.random.default_rng(4).standard_normal(50_000).astype(np.float32)
    product = jax.jit(lambda x: _bits.multiply(x * np.float32(1.1), jnp.float32(3.7)))(x)
    np.testing.assert_array_equal(np.asarray(product), x * np.float32(1.1) * np.float32(3.7))


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("sign_mask", [0xD7E8, 0])
def test_hadamard_equals_the_oracle(sign_mask):
    """Forward and back, with groups of subnormal numbers, of wide spread, and with sums that leave float32."""
    rng = np.random.default_rng(6)
    bits = rng.integers(0, 0x7F800000, (300, 64), dtype=np.uint32)
    narrow = rng.integers(0, 250, (300, 1), dtype=np.uint32) << 23
    x = np.concatenate([bits, narrow + rng.integers(0, 1 << 25, (300, 64), dtype=np.uint32), bits >> 6]).view(
        np.float32
    )
    x = x * rng.choice(np.float32([-1, 1]), x.shape)
    x[0, :3], x[1, 5] = [2.0**100, -(2.0**100), 1e-39], np.inf
    hadamard = Hadamard(sign_mask=sign_mask)
    forward, back = jax.jit(lambda x: (hadamard_transform(x, hadamard), hadamard_inverse(x, hadamard)))(x)
    with np.errstate(all="ignore"):
        expected = oracle.hadamard_transform(x, hadamard), oracle.hadamard_inverse(x, hadamard)
    for actual, wanted in zip((forward, back), expected, strict=True):
        nan = np.isnan(wanted)
        np.testing.assert_array_equal(np.isnan(actual), nan)
        np.testing.assert_array_equal(np.asarray(actual).view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


def test_round_to_bf16_is_not_elided():
    values = hard_values()
    rounded = np.asarray(jax.jit(_bits.round_to_bf16)(values))
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    nan = np.isnan(values)
    assert np.isnan(rounded[nan]).all()
    np.testing.assert_array_equal(rounded[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize("form", [_random.philox, _random._straight], ids=["in a loop", "straight"])
def test_philox_known_answers(form):
    words = [np.uint32(w) for w in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    key = (np.uint32(0xA4093822), np.uint32(0x299F31D0))
    drawn = jax.jit(form)(tuple(jnp.asarray(w) for w in words), key)
    assert [int(w) for w in drawn] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_random_bytes_equal_the_oracle():
    seed = 0x89ABCDEF01234567
    drawn = jax.jit(lambda words, stream, batch: random_bytes(5, 35, words, stream, batch))
    for stream, batch in ((0, 0), (4, 3)):
        expected = reference.random_bytes(5, 35, seed, stream, batch)
        actual = drawn(seed_words(seed), np.uint32(stream), np.uint32(batch))
        np.testing.assert_array_equal(np.asarray(actual), expected)


def test_packing():
    codes = np.random.default_rng(5).integers(0, 16, (3, 7), dtype=np.uint8)
    packed = np.asarray(_bits.pack_fp4(jnp.asarray(codes)))
    np.testing.assert_array_equal(packed, reference.pack_fp4(codes))
    np.testing.assert_array_equal(np.asarray(_bits.unpack_fp4(jnp.asarray(packed), 7)), codes)
