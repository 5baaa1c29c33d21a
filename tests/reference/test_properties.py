"""Laws that hold for every input: what a scale means, symmetry, idempotence, transposition, random streams."""

import contextlib
import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from microfloat import formats, reference
from microfloat.formats import E4M3, FORMATS, decode
from microfloat.recipes import Cast, Hadamard
from microfloat.reference import dequantize, quantize
from microfloat.scale_rules import SCALE_RULES

MX = [fmt for fmt in FORMATS.values() if fmt.scale == formats.SCALE_E8M0]
FP8 = [fmt for fmt in FORMATS.values() if fmt.scale == formats.SCALE_FP32]
E8M0_RULES = ["floor", "ceil", "even", "rceil"]
# Laws over every format and rule run fewer examples each: together they see as many as a single law does.
few = settings(max_examples=max(settings.default.max_examples // 6, 5))


def casts(rounding="nearest"):
    """Every stock format under every rule that takes it and the rounding."""
    found = []
    for fmt in FORMATS.values():
        for rule in SCALE_RULES:
            with contextlib.suppress(ValueError):
                found.append(Cast(fmt, rule, rounding))
    return found


def cast_id(cast):
    return f"{cast.format.name}-{cast.scale_rule}"


def of_every_kind():
    """Every format under its own rule, every rule with the first and last format that take it; others are slow."""
    further = pytest.mark.slow("laws under further pairs of a format and a scale rule")
    for cast in casts():
        same = [other for other in casts() if other.scale_rule == cast.scale_rule]
        yield pytest.param(cast, marks=[] if cast in (Cast(cast.format), same[0], same[-1]) else further)


every_cast = pytest.mark.parametrize("cast", list(of_every_kind()), ids=cast_id)
_FURTHER_RULES = pytest.mark.slow("noise under further scale rules, which it does not depend on")
every_stochastic_cast = pytest.mark.parametrize(
    "cast",
    [
        pytest.param(cast, marks=[] if cast == Cast(cast.format, rounding="stochastic") else _FURTHER_RULES)
        for cast in casts("stochastic")
    ],
    ids=cast_id,
)


def e8m0_values(q):
    """The scale of every element of an MX matrix of one-row blocks, in float64."""
    return np.repeat(np.ldexp(1.0, q.scale.astype(int) - 127), 32, axis=1)[:, : q.length]


def arrays(largest=1e30, smallest=0.0, max_side=40, **elements):
    """Matrices of float32 with magnitudes up to `largest`; those below `smallest` become zero."""
    bound = float(np.float32(largest))
    values = st.floats(-bound, bound, width=32, **elements)
    shapes = hnp.array_shapes(min_dims=2, max_dims=2, max_side=max_side)
    return hnp.arrays(np.float32, shapes, elements=values).map(
        lambda x: np.where(np.abs(x) < smallest, np.float32(0), x).astype(np.float32)
    )


LARGEST = float(np.float32(1e30))


# --- what a scale means


def exact_byte(amax, element, rule):
    """The E8M0 byte from the words of docs/numerics.md 2.1, in exact arithmetic: no bits, no thresholds."""
    if amax == 0:
        return 0
    exponent = math.floor(math.log2(amax))  # exact for the powers of two next to it is checked below
    if 2.0**exponent > amax:
        exponent -= 1
    if 2.0 ** (exponent + 1) <= amax:
        exponent += 1
    if rule == "floor":
        k = exponent - element.emax
    elif rule == "ceil":
        k = exponent - element.emax + (amax != 2.0**exponent)
    elif rule == "rceil":
        k = exponent - element.emax - 1
        while amax > element.max * 2.0**k:
            k += 1
    else:  # even: floor of the amax rounded, ties up, to the element's mantissa width
        step = 2.0 ** (exponent - element.mantissa_bits)
        k = math.frexp(math.floor(amax / step + 0.5) * step)[1] - 1 - element.emax
    return min(max(k + 127, 0), 254)


@pytest.mark.parametrize("fmt", MX, ids=str)
@pytest.mark.parametrize("rule", E8M0_RULES)
@few
@given(
    exponent=st.integers(-120, 120), mantissa=st.one_of(st.integers(0, 2**23 - 1), st.sampled_from([0, 1, 2**23 - 1]))
)
def test_e8m0_bytes_are_what_their_rule_says(fmt, rule, exponent, mantissa):
    amax = np.float32(math.ldexp(2**23 + mantissa, exponent - 23))
    byte = int(quantize(np.float32([[amax]]), Cast(fmt, rule)).scale[0, 0])
    assert byte == exact_byte(float(amax), fmt.element, rule)


@pytest.mark.parametrize("fmt", MX, ids=str)
@few
@given(x=arrays())
def test_rceil_never_saturates(fmt, x):
    q = quantize(x, Cast(fmt, "rceil"))
    scaled = (
        np.abs(x).astype(np.float64) / np.repeat(np.ldexp(1.0, q.scale.astype(int) - 127), 32, axis=1)[:, : x.shape[1]]
    )
    assert scaled.max(initial=0) <= fmt.element.max


@pytest.mark.parametrize("fmt", [fmt for fmt in FP8 if not fmt.is_per_tensor], ids=str)
@few
@given(x=arrays())
def test_amax_pow2_scales_are_powers_of_two_that_fit(fmt, x):
    q = quantize(x, Cast(fmt, "amax_pow2"))
    assert (q.scale.view(np.uint32) & 0x7FFFFF == 0).all()
    assert (q.scale > 0).all()
    plain = quantize(x, Cast(fmt, "amax"))
    # Rounding the encode factor down makes the stored scale larger, by less than two (1 / s is itself rounded once).
    ratio = q.scale.astype(np.float64) / plain.scale
    assert ((ratio > 1 - 2**-23) & (ratio < 2 * (1 + 2**-23))).all()


@pytest.mark.slow_cases(
    "formats that share the rules of checked ones",
    all_but=("nvfp4-*", "mxfp4-*", "mxfp8-*", "fp8_tensor-*", "fp8_128x128-*"),
)
@every_cast
@few
@given(x=arrays())
def test_scales_are_normal_finite_and_positive(cast, x):
    q = quantize(x, cast)
    for part in (q.scale, q.tensor_scale):
        if part is not None and part.dtype == np.float32:
            assert (np.isfinite(part) & (part >= np.finfo(np.float32).tiny)).all()
    if cast.format.scale.name == "E8M0":
        assert q.scale.max() <= 253
    if cast.format.scale.name == "E4M3":
        assert q.scale.max() <= 0x7E


# --- symmetry, monotonicity, error bounds


@pytest.mark.slow_cases(
    "formats that share the rules of checked ones",
    all_but=("nvfp4-*", "mxfp4-*", "mxfp8-*", "fp8_tensor-*", "fp8_128x128-*"),
)
@every_cast
@few
@given(x=arrays())
def test_sign_symmetry(cast, x):
    q, negated = quantize(x, cast), quantize(-x, cast)
    assert np.array_equal(negated.unpacked_codes(), q.unpacked_codes() ^ cast.format.element.sign_code)
    assert np.array_equal(negated.scale, q.scale)


@pytest.mark.slow_cases(
    "formats that share the rules of checked ones",
    all_but=("nvfp4-*", "mxfp4-*", "mxfp8-*", "fp8_tensor-*", "fp8_128x128-*"),
)
@pytest.mark.parametrize(
    "cast", [cast for cast in casts("nearest") if not cast.rule.name.startswith("four")], ids=cast_id
)
@few
@given(x=arrays(), seed=st.integers(0, 2**64 - 1))
def test_sign_symmetry_of_stochastic_rounding(cast, x, seed):
    q, negated = quantize(x, cast, seed=seed), quantize(-x, cast, seed=seed)
    assert np.array_equal(negated.unpacked_codes(), q.unpacked_codes() ^ cast.format.element.sign_code)


@every_cast
@few
@given(row=hnp.arrays(np.float32, st.integers(1, 16), elements=st.floats(-LARGEST, LARGEST, width=32)))
def test_monotone_inside_a_block(cast, row):
    values = dequantize(quantize(np.sort(row)[None], cast))[0]
    assert (np.diff(values) >= 0).all()


@pytest.mark.parametrize("fmt", MX + [fmt for fmt in FP8 if fmt.is_per_tensor], ids=str)
@few
@given(x=arrays(largest=1e6, max_side=8))
def test_error_is_at_most_half_a_step(fmt, x):
    """Rules that never saturate: |dq - x| <= scale * max(half a step of the value, half the subnormal step)."""
    q = quantize(x, Cast(fmt, "rceil" if fmt in MX else "amax"))
    if fmt.is_per_tensor:
        scale = np.full(x.shape, float(q.scale))
    else:
        scale = e8m0_values(q)
    magnitude = np.abs(x.astype(np.float64)) / scale
    half_step = np.ldexp(
        0.5, np.frexp(np.maximum(magnitude, fmt.element.min_normal))[1] - 1 - fmt.element.mantissa_bits
    )
    # FP32 scales: x * s and the reciprocal are rounded once each, and dequantize once more.
    slack = 0 if fmt in MX else magnitude * 2.0**-22
    error = np.abs(dequantize(q).astype(np.float64) - x) / scale
    assert (error <= half_step + slack).all()


# --- idempotence


@pytest.mark.parametrize("cast", [Cast(fmt, rule) for fmt in MX for rule in E8M0_RULES]
                         + [Cast(fmt, "amax_pow2") for fmt in FP8], ids=cast_id)  # fmt: skip
@few
@given(x=arrays())
def test_power_of_two_scales_are_idempotent_in_value(cast, x):
    """dq(q(dq(q(x)))) = dq(q(x)): the scale may become finer where a block maximum is rounded down, never coarser."""
    once = dequantize(quantize(x, cast))
    assert np.array_equal(dequantize(quantize(once, cast)), once)


@pytest.mark.parametrize("fmt", FP8, ids=str)
@few
@given(x=arrays(smallest=1e-30))
def test_fp32_scales_are_idempotent_in_codes(fmt, x):
    cast = Cast(fmt, "amax")
    once = quantize(x, cast)
    again = quantize(dequantize(once), cast)
    assert np.array_equal(again.codes, once.codes)


@pytest.mark.parametrize("fmt", [formats.NVFP4, formats.NVFP4_ROW, formats.NVFP4_2D], ids=str)
def test_two_level_is_idempotent_on_ordinary_data(fmt):
    """The block maximum is 6 and comes back if every block scale is normal; subnormal block scales need not."""
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    once = quantize(x, fmt)
    assert (once.scale >= 0x08).all()
    again = quantize(dequantize(once), fmt)
    assert np.array_equal(again.codes, once.codes)
    assert np.array_equal(again.scale, once.scale)


# --- transposition, blocks, power-of-two scaling


@pytest.mark.parametrize("cast", [cast for cast in casts() if cast.transposes], ids=cast_id)
@few
@given(x=arrays(max_side=150))
def test_square_blocks_commute_with_transposition(cast, x):
    q, transposed = quantize(x, cast), quantize(x, cast, axis=-2)
    assert np.array_equal(transposed.unpacked_codes(), q.unpacked_codes().T)
    assert np.array_equal(transposed.scale, q.scale.T)


NEAR_TIE = """
0 -2 0 -1 0 0 1 -4 -3 1 -1 2 -5 -4 -3 -4
-3 -4 1 6 -3 -3 4 -4 -5 8 0 -3 1 -3 -3 -8
-2 3 0 1 -4 0 5 5 1 3 3 3 -4 2 -2 -5
2 -6 -5 3 0 -3 -1 -4 -2 -5 -1 -1 4 -3 1 -2
-1 -3 -3 -5 -2 -5 1 3 -2 0 -2 2 4 0 8 2
-8 2 6 -2 -2 -5 4 0 -4 0 -5 0 -3 2 6 -2
-1 3 2 0 -1 -1 -3 -4 9 10 0 1 -8 7 0 0
-2 -2 5 -4 2 1 2 -3 0 9 0 -1 2 -1 -4 1
-4 -4 5 7 3 4 0 -8 0 1 -2 -1 2 -4 5 3
4 2 0 1 0 5 9 -6 -3 -3 2 7 -2 2 -3 -2
3 1 9 2 -1 -4 2 -2 -4 0 1 5 -7 -1 -3 3
-2 1 -3 4 2 -3 6 -1 -3 0 0 8 -2 -9 -3 -1
-2 3 3 2 2 -5 -3 -4 3 4 -2 -6 -2 1 4 5
1 1 -2 4 1 1 3 3 -3 -8 -1 -3 2 -1 0 -4
2 8 -7 -2 -9 0 0 0 6 4 0 -4 -4 1 -9 4
1 -4 -2 4 0 -1 -1 1 4 -1 3 0 1 -1 -4 -7
"""


def test_four_over_six_does_not_promise_to_commute_with_transposition():
    """Errors are added along rows first, in float32: a near tie may fall the other way for the transpose."""
    cast = Cast("nvfp4_2d", "four_over_six_mae_448")
    assert not cast.transposes
    x = np.array([line.split() for line in NEAR_TIE.strip().splitlines()], np.float32)
    q, transposed = quantize(x, cast, amax=18.0), quantize(x, cast, axis=-2, amax=18.0)
    assert q.scale[0, 0] != transposed.scale[0, 0]


@pytest.mark.parametrize("fmt", [*MX, *(fmt for fmt in FP8 if not fmt.is_per_tensor and not fmt.is_tile)], ids=str)
@few
@given(x=arrays(max_side=140), cut=st.integers(0, 139))
def test_rows_are_quantized_independently(fmt, x, cut):
    cut = cut % x.shape[0]
    q, part = quantize(x, fmt), quantize(x[cut:], fmt)
    assert np.array_equal(part.codes, q.codes[cut:])
    assert np.array_equal(part.scale, q.scale[cut:])


@pytest.mark.parametrize("fmt", [*MX, *FP8], ids=str)
@pytest.mark.parametrize("power", [-20, 7])
@few
@given(x=arrays(largest=1e20, smallest=1e-20))
def test_a_power_of_two_moves_into_the_scale(fmt, power, x):
    q, moved = quantize(x, fmt), quantize(np.ldexp(x, power), fmt)
    assert np.array_equal(moved.codes, q.codes)
    values = dequantize(moved)
    assert np.array_equal(values, np.ldexp(dequantize(q), power).astype(np.float32))


# --- random streams


@given(
    seed=st.integers(0, 2**64 - 1), stream=st.integers(0, 5), batch=st.integers(0, 9),
    rows=st.integers(1, 40), cols=st.integers(1, 70), data=st.data(),
)  # fmt: skip
def test_a_random_byte_depends_on_its_position_alone(seed, stream, batch, rows, cols, data):
    row, col = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    noise = reference.random_bytes(rows, cols, seed, stream, batch)
    assert noise[row, col] == reference.random_bytes(row + 1, col + 1, seed, stream, batch)[row, col]
    words = reference.philox((col // 16, row, stream, batch), (seed & 0xFFFFFFFF, seed >> 32))
    assert noise[row, col] == int(words[col % 16 // 4]) >> (8 * (col % 4)) & 255


def test_random_bytes_are_uniform_and_streams_differ():
    noise = reference.random_bytes(512, 512, 3)
    counts = np.bincount(noise.reshape(-1), minlength=256)
    # 262144 draws over 256 values: chi-square with 255 degrees of freedom, mean 255, deviation sqrt(510) = 22.6.
    chi_square = float(((counts - 1024) ** 2 / 1024).sum())
    assert 255 - 5 * 22.6 < chi_square < 255 + 5 * 22.6
    for other in (
        reference.random_bytes(512, 512, 3, 1),
        reference.random_bytes(512, 512, 3, 0, 1),
        reference.random_bytes(512, 512, 4),
    ):
        assert abs(float((other == noise).mean()) - 1 / 256) < 6 * math.sqrt(1 / 256 / noise.size)


@pytest.mark.parametrize("fmt", [*MX, formats.FP8_ROW, formats.FP8_1x128], ids=str)
def test_stochastic_codes_do_not_depend_on_the_shape_around_them(fmt):
    x = np.random.default_rng(1).standard_normal((30, 256)).astype(np.float32)
    cast = Cast(fmt, rounding="stochastic")
    whole = quantize(x, cast, seed=11, stream=2)
    upper = quantize(x[:7], cast, seed=11, stream=2)
    assert np.array_equal(upper.codes, whole.codes[:7])
    if fmt.block[1] is not None:
        left = quantize(x[:, :128], cast, seed=11, stream=2)
        assert np.array_equal(left.unpacked_codes(), whole.unpacked_codes()[:, :128])


@every_stochastic_cast
@few
@given(x=arrays(), seed=st.integers(0, 2**64 - 1))
def test_stochastic_rounding_shares_scales_and_moves_at_most_one_code(cast, x, seed):
    nearest, noisy = quantize(x, dataclasses.replace(cast, rounding="nearest")), quantize(x, cast, seed=seed)
    assert np.array_equal(noisy.scale, nearest.scale)
    difference = noisy.unpacked_codes().astype(int) - nearest.unpacked_codes()
    assert np.abs(difference).max(initial=0) <= 1
    again = quantize(x, cast, seed=seed)
    assert np.array_equal(again.codes, noisy.codes)


def test_stochastic_rounding_is_unbiased_over_seeds_and_rows():
    """The mean of 64 seeds and 64 rows approaches floor(256 f) / 256; 4 standard errors of a Bernoulli mean."""
    x = np.float32([[448.0, 17.0, 0.3, -5.7, 100.1, 1e-3, -0.011, 333.3]])
    cast, seeds, rows = Cast("fp8_tensor", rounding="stochastic"), 64, 64
    draws, total = seeds * rows, np.zeros(x.shape)
    for seed in range(seeds):
        total += dequantize(quantize(np.repeat(x, rows, 0), cast, seed=seed)).sum(0, dtype=np.float64)
    table = np.unique(np.abs(decode(np.arange(0x7F, dtype=np.uint8), E4M3))).astype(np.float64)
    for value, mean in zip(x[0].astype(np.float64), total[0] / draws, strict=True):
        low = table[table <= abs(value)].max()
        step = table[table > low].min() - low if low < 448 else 0.0
        up = math.floor(256 * (abs(value) - low) / step) / 256 if step else 0.0
        expected = math.copysign(low + step * up, value)
        assert abs(mean - expected) <= 4 * step * math.sqrt(max(up * (1 - up), 1 / draws) / draws)


def test_the_17_16_rule_leaves_no_bias_but_the_truncation():  # features R14
    """docs/numerics.md 5.4: -4.1e-3 with two_level, about -8e-4 with headroom, measured on N(0, 1), 512 x 1024."""
    x = np.random.default_rng(2).standard_normal((512, 1024)).astype(np.float32)

    def bias(rule, rounding):
        values = dequantize(quantize(x, Cast("nvfp4", rule, rounding), seed=5)).astype(np.float64)
        return float((values * x).sum() / (x.astype(np.float64) ** 2).sum()) - 1

    assert -5.5e-3 < bias("two_level", "nearest") < -3.5e-3
    assert -5.1e-3 < bias("two_level", "stochastic") < -3.1e-3
    assert -1.3e-3 < bias("two_level_17_16", "stochastic") < -2e-4


@given(x=arrays(max_side=64))
def test_no_element_clips_under_the_17_16_rule_unless_its_scale_is_subnormal(x):
    q = quantize(x, Cast("nvfp4", "two_level_17_16"))
    scale = decode(q.scale, E4M3).astype(np.float64) * float(q.tensor_scale)
    normal = q.scale >= 0x08
    blocks = np.pad(np.abs(x), ((0, 0), (0, -x.shape[1] % 16))).reshape(x.shape[0], -1, 16).max(axis=-1)
    assert (blocks[normal] <= 6 * scale[normal] * (1 + 2.0**-21)).all()


# --- Hadamard


@given(x=arrays(largest=1e6, smallest=1e-3, max_side=64))
def test_hadamard_is_orthogonal(x):
    from microfloat.reference import hadamard_inverse, hadamard_transform

    for hadamard in (Hadamard(), Hadamard(16, 0)):
        transformed = hadamard_transform(x, hadamard)
        assert transformed.shape == (x.shape[0], -(-x.shape[1] // 16) * 16)
        # bf16 rounds input and output once each: by at most 2^-8 of the norm of the group, twice.
        restored = hadamard_inverse(transformed, hadamard)[:, : x.shape[1]]
        padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 16))).astype(np.float64)
        norm = np.sqrt((padded.reshape(x.shape[0], -1, 16) ** 2).sum(-1)).repeat(16, axis=1)[:, : x.shape[1]]
        assert (np.abs(restored - x) <= 2.0**-6.9 * norm).all()


def test_hadamard_matrix_is_sylvester_with_signs():
    from microfloat.reference import hadamard_transform

    matrix = hadamard_transform(np.eye(16, dtype=np.float32), Hadamard()) * 4
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    expected = [[signs[i] * (-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)]
    assert matrix.tolist() == expected
