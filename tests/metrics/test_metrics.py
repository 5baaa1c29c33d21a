"""Every metric against its equation, worked by hand, and at its edges (features O1)."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from microfloat import formats, metrics, reference
from microfloat.errors import InvalidTypeError, InvalidValueError

PAIRED = [
    metrics.sqnr_db, metrics.rel_mse, metrics.relative_error, metrics.bias, metrics.cosine, metrics.underflow,
    metrics.zeros,
]  # fmt: skip
paired = pytest.mark.parametrize("metric", PAIRED, ids=lambda metric: metric.__name__)


def test_worked_by_hand():
    x, y = [3.0, 4.0], [3.0, 3.0]
    assert metrics.sqnr_db(x, y) == pytest.approx(10 * math.log10(25 / 1), rel=1e-15)
    assert metrics.rel_mse(x, y) == 1 / 25
    assert metrics.relative_error(x, y) == 1 / 5
    assert metrics.bias(x, y) == pytest.approx(21 / 25 - 1, rel=1e-15)
    assert metrics.cosine(x, y) == pytest.approx(21 / (5 * math.sqrt(18)), rel=1e-15)
    assert metrics.underflow([0, 1, 2, -3, 4], [0, 0, 2, -0.0, 4]) == 2 / 5
    assert metrics.zeros([0, 1, 2, -3, 4], [0, 0, 2, -0.0, 4]) == 3 / 5
    assert metrics.gemm_error(x, y) == (1 / 5, metrics.cosine(x, y))
    assert metrics.clip([1, -5, 6, 7], 6.0) == 1 / 4
    assert metrics.clip([[1, -5], [6, 7]], [[4], [6]]) == 2 / 4
    assert metrics.at_limit(np.uint8([0x7E, 0xFE, 0x7D, 0x7F]), "E4M3") == 2 / 4
    assert metrics.crest([3, -4, 0, 0]) == pytest.approx(4 / 2.5, rel=1e-15)
    spans = metrics.block_dynamic_range([1, 8, 0, 2, 4, 4, 0, 0, 1, 2], block=4)
    assert spans == (1, 1 + 0.98 * 2, 3)
    assert spans == (spans.median, spans.p99, spans.max)


@paired
def test_floats_of_any_input_dtype(metric):
    x = np.float32([[1, -2], [0.5, 4]])
    y = np.float32([[1, -2], [0, 3]])
    found = {
        metric(x.astype(dtype), y.astype(dtype)) for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
    }
    assert len(found) == 1
    assert isinstance(found.pop(), float)


def test_equal_arrays():
    x = np.float32([1, -2, 0, 4])
    assert metrics.sqnr_db(x, x) == math.inf
    assert (metrics.rel_mse(x, x), metrics.relative_error(x, x), metrics.bias(x, x), metrics.underflow(x, x)) == (
        0,
        0,
        0,
        0,
    )
    assert metrics.cosine(x, x) == pytest.approx(1, abs=1e-15)
    assert metrics.cosine(x, -x) == pytest.approx(-1, abs=1e-15)


def test_zero_and_empty_arrays():
    zero, one, empty = np.zeros(3), np.ones(3), np.zeros(0)
    assert math.isnan(metrics.sqnr_db(zero, one))
    assert metrics.sqnr_db(zero, zero) == math.inf
    assert (metrics.rel_mse(zero, one), metrics.rel_mse(zero, zero)) == (math.inf, 0)
    assert (metrics.cosine(zero, zero), metrics.cosine(zero, one)) == (1, 0)
    assert (metrics.bias(zero, one), metrics.underflow(zero, one)) == (0, 0)
    assert (metrics.zeros(one, zero), metrics.zeros(zero, one), metrics.underflow(one, zero)) == (1, 0, 1)
    assert [metric(empty, empty) for metric in PAIRED] == [math.inf, 0, 0, 0, 1, 0, 0]
    assert (metrics.clip(empty, 1.0), metrics.crest(empty), metrics.max_ulp(empty, empty)) == (0, 0, 0)
    assert metrics.block_dynamic_range(empty) == metrics.block_dynamic_range(zero) == (0, 0, 0)
    assert metrics.crest(zero) == 0
    assert metrics.at_limit(np.zeros(0, np.uint8), "E2M1") == 0


def test_nan_and_infinity_are_not_hidden():
    x = np.float32([1, 2, 3])
    for bad in (np.nan, np.inf):
        y = np.float32([1, bad, 3])
        assert not math.isfinite(metrics.rel_mse(x, y))
        assert not metrics.sqnr_db(x, y) > 0
        assert not math.isfinite(metrics.max_ulp(x, y, "float32"))
    assert metrics.block_dynamic_range(np.float32([np.inf, np.nan, 1, 2]), block=4) == (1, 1, 1)


def test_dequantized_values_are_no_limits_of_clip():
    with pytest.raises(InvalidValueError, match="limit: got negative numbers"):
        metrics.clip([1.0, -2.0], [1.0, -2.0])


def test_references_that_are_not_finite_are_counted_apart():
    x, q = np.float32([np.nan, 1, -np.inf, 4, 0.5]), np.float32([0, 1, -448, 3, 0])
    kept = [1, 3, 4]
    for metric in (*PAIRED, metrics.gemm_error, metrics.max_ulp):
        assert metric(x, q) == metric(x[kept], q[kept]), metric.__name__
    assert metrics.clip(x, 2.0) == 1 / 3
    assert metrics.crest(x) == metrics.crest(x[kept])
    assert metrics.non_finite(x) == (1, 1)
    assert metrics.non_finite(q) == (0, 0)
    assert metrics.sr_noise(x, [q, q + 1, q - 1]) == metrics.sr_noise(x[kept], [q[kept], q[kept] + 1, q[kept] - 1])


def test_units_of_the_last_place():
    assert metrics.max_ulp([1.0, 3.0], np.float32([1 + 2**-22, 3])) == 2
    assert metrics.max_ulp([1.0, 2.5], [1.0, 2.0], "bfloat16") == 0.5 / 2.0**-6
    assert metrics.max_ulp([2.0**-20], [0.0], "float16") == 2.0**-20 / 2.0**-24  # among subnormals
    assert metrics.max_ulp([0.0], [2.0**-20], "float16") == 2.0**-20 / 2.0**-24
    assert metrics.max_ulp([0.0, 1.0], np.float32([2.0**-149, 1.0])) == 1
    assert metrics.max_ulp(np.float32([8]), np.array([9], BF16)) == 1 / 2.0**-4
    with pytest.raises(InvalidTypeError, match="dtype: got int8, needed a floating-point dtype"):
        metrics.max_ulp([1], [1], np.dtype("int8"))


def test_noise_of_stochastic_rounding_and_its_bias():
    from microfloat.recipes import Cast

    x = np.random.default_rng(3).standard_normal((256, 256)).astype(np.float32)

    def noise(rule):
        cast = Cast("nvfp4", rule, "stochastic")
        return metrics.sr_noise(x * np.sign(x), [
            reference.dequantize(reference.quantize(x, cast, seed=seed)) * np.sign(x) for seed in range(8)
        ])  # fmt: skip

    plain, enlarged = noise("two_level"), noise("two_level_17_16")
    assert plain.z < -6  # block scales that were rounded down clip the maximum of their block
    assert abs(enlarged.z) < 4
    assert 0 < plain.std < enlarged.std
    assert metrics.sr_noise([1.0, 2.0], [[1, 2], [1, 2]]) == (0, 0, 0)
    assert metrics.sr_noise([1.0, 2.0], [[2, 3], [2, 3]]) == (1, 0, math.inf)
    with pytest.raises(InvalidValueError, match=r"draws: got shape \(1, 2\), needed shape \(K, \*\(2,\)\)"):
        metrics.sr_noise([1.0, 2.0], [[1.0, 2.0]])


finite = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e6, 1e6, width=32))


@given(x=finite, power=st.integers(-8, 8))
def test_metrics_of_a_quantized_array_do_not_depend_on_its_scale(x, power):
    y = formats.decode(formats.encode(x, "E2M3"), "E2M3")
    scaled = [np.ldexp(values.astype(np.float64), power) for values in (x, y)]
    for metric in PAIRED:
        assert metric(*scaled) == pytest.approx(metric(x, y), rel=1e-9, abs=1e-12)
    assert metrics.crest(scaled[0]) == pytest.approx(metrics.crest(x), rel=1e-9)


@given(x=finite)
def test_relations_between_metrics(x):
    y = formats.decode(formats.encode(x, "E4M3"), "E4M3")
    assert metrics.relative_error(x, y) ** 2 == pytest.approx(metrics.rel_mse(x, y), rel=1e-12, abs=0)
    if 0 < metrics.rel_mse(x, y) < math.inf:
        assert metrics.sqnr_db(x, y) == pytest.approx(-10 * math.log10(metrics.rel_mse(x, y)), abs=1e-9)
    assert -1 - 1e-12 <= metrics.cosine(x, y) <= 1 + 1e-12
    assert metrics.crest(x) == 0 or 1 - 1e-12 <= metrics.crest(x) <= math.sqrt(x.size) + 1e-9


def test_clip_and_limits_of_a_quantized_tensor():
    x = np.float32([[7.9, 1, -7.9, 4] + [0] * 28])
    q = reference.quantize(x, "mxfp4")  # even: 7.9 rounds up, nothing clips
    assert metrics.clip(x, 6 * 2.0 ** (q.scale.astype(int) - 127)) == 0
    floor = reference.quantize(x, reference_cast("floor"))
    assert metrics.clip(x, 6 * 2.0 ** (floor.scale.astype(int) - 127)) == 2 / 32
    assert metrics.at_limit(floor.unpacked_codes(), "E2M1") == 2 / 32


def reference_cast(rule):
    from microfloat.recipes import Cast

    return Cast("mxfp4", rule)


def test_histogram_of_e8m0_scales():
    histogram = metrics.scale_histogram(np.uint8([[127, 127], [128, 255], [0, 254]]), formats.SCALE_E8M0)
    assert histogram.exponents == (-127, 0, 1, 127)
    assert histogram.fractions == (1 / 6, 2 / 6, 1 / 6, 1 / 6)
    assert (histogram.zero, histogram.nan, histogram.at_lowest, histogram.at_highest) == (0, 1 / 6, 1 / 6, 1 / 6)


def test_histogram_of_e4m3_scales():
    histogram = metrics.scale_histogram(np.uint8([0, 1, 0x38, 0x3F, 0x7E, 0x7F, 0x08, 0x09]), formats.SCALE_E4M3)
    assert histogram.exponents == (-9, -6, 0, 8)
    assert histogram.fractions == (1 / 8, 2 / 8, 2 / 8, 1 / 8)
    assert (histogram.zero, histogram.nan, histogram.at_lowest, histogram.at_highest) == (1 / 8,) * 4


def test_histogram_of_float32_scales():
    scale = reference.quantize(np.float32([[1e-44], [1], [0]]), "fp8_row").scale
    histogram = metrics.scale_histogram(scale)
    assert histogram.exponents == (-126, -8, 0)
    assert histogram.fractions == (1 / 3, 1 / 3, 1 / 3)
    assert (histogram.at_lowest, histogram.at_highest) == (1 / 3, 0)
    assert metrics.scale_histogram(np.float32(2)).exponents == (1,)


def test_bytes_need_their_scale_format():
    for scale_format in (None, formats.SCALE_FP32):
        with pytest.raises(InvalidValueError, match=r"scale_format: got .*needed SCALE_E8M0 or SCALE_E4M3"):
            metrics.scale_histogram(np.uint8([1]), scale_format)
    with pytest.raises(InvalidTypeError, match="scale: got int32, needed uint8 bytes"):
        metrics.scale_histogram(np.int32([127]), formats.SCALE_E8M0)


# --- the first difference

BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def nan(word):
    return np.uint32([word]).view(np.float32)


def test_equal_bytes_have_no_difference():
    x = np.float32([[np.nan, -0.0], [1, 2]])
    assert metrics.first_difference(x, x.copy()) is None
    assert metrics.first_difference(np.zeros((0, 3)), np.zeros((0, 3))) is None


@pytest.mark.parametrize(
    ("a", "b", "index", "text"),
    [
        (np.uint8([[1, 2], [3, 4]]), np.uint8([[1, 2], [9, 5]]), (1, 0), "index (1, 0): 0x03 != 0x09 (2 differ)"),
        (np.float32([0.0]), np.float32([-0.0]), (0,), "index (0,): 0x00000000 != 0x80000000 (1 differ)"),
        (nan(0x7FC00000), nan(0x7FC00001), (0,), "index (0,): 0x7fc00000 != 0x7fc00001 (1 differ)"),
        (np.float32(1), np.float32(2), (), "index (): 0x3f800000 != 0x40000000 (1 differ)"),
        (np.array([1, 2], BF16), np.array([1, 3], BF16), (1,), "index (1,): 0x4000 != 0x4040 (1 differ)"),
        (np.array([1.0], FP8), np.array([2.0], FP8), (0,), "index (0,): 0x38 != 0x40 (1 differ)"),
    ],
)  # fmt: skip
def test_where_two_arrays_first_differ(a, b, index, text):
    difference = metrics.first_difference(a, b)
    assert difference.index == index
    assert str(difference) == text
    if a.dtype == np.uint8:
        assert difference.value_a is difference.value_b is None
        difference = metrics.first_difference(a, b, "E4M3")
        assert (difference.value_a, difference.value_b) == (3 * 2.0**-9, (1 + 1 / 8) * 2.0**-6)
    else:
        assert np.array_equal([difference.value_a, difference.value_b], [a[index], b[index]], equal_nan=True)


def test_strides_do_not_matter():
    x = np.arange(12, dtype=np.uint8).reshape(3, 4)
    y = x.copy()
    y[2, 1] = 99
    difference = metrics.first_difference(x.T, y.T)
    assert (difference.index, difference.a, difference.b, difference.count) == ((1, 2), 9, 99, 1)


def test_arrays_that_have_no_common_index():
    with pytest.raises(InvalidValueError, match=r"b: got float32\[3\], needed float32\[2\], as a is"):
        metrics.first_difference(np.zeros(2, np.float32), np.zeros(3, np.float32))
    with pytest.raises(InvalidValueError, match=r"b: got int8\[2\], needed uint8\[2\]"):
        metrics.first_difference(np.zeros(2, np.uint8), np.zeros(2, np.int8))
    with pytest.raises(InvalidTypeError, match="a: got object"):
        metrics.first_difference(np.array([None]), np.array([None]))


# --- refusals


@paired
def test_shapes_must_agree(metric):
    with pytest.raises(InvalidValueError, match=r"q: got shape \(3,\), needed shape \(2,\), as x has"):
        metric(np.zeros(2), np.zeros(3))


@pytest.mark.parametrize("bad", [["a"], [1j], [None], np.array(["2020"], "M8[Y]")])
def test_numbers_are_needed(bad):
    with pytest.raises(InvalidTypeError, match=r"x: got .*needed an array of real numbers"):
        metrics.rel_mse(bad, bad)
    with pytest.raises(InvalidTypeError, match="x: got"):
        metrics.crest(bad)


def test_blocks_and_limits_that_are_refused():
    with pytest.raises(InvalidValueError, match="block: got 0"):
        metrics.block_dynamic_range(np.ones(4), 0)
    with pytest.raises(InvalidTypeError, match="block: got float"):
        metrics.block_dynamic_range(np.ones(4), 4.0)
    with pytest.raises(InvalidValueError, match=r"limit: got shape \(3,\), needed a shape that broadcasts to \(4,\)"):
        metrics.clip(np.ones(4), np.ones(3))


def test_tensors_of_torch_are_taken_as_they_are():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    mf = pytest.importorskip("microfloat.torch")
    plain = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    x = torch.tensor(plain, requires_grad=True)
    q = mf.quantize(x, "mxfp8")
    for q_like, as_numpy in (
        (x.bfloat16(), plain.astype(ml_dtypes.bfloat16)), (x.half() * 2, plain.astype(np.float16) * 2),
        (x.double(), plain), (x.to(torch.float8_e4m3fn), plain.astype(ml_dtypes.float8_e4m3fn)),
        (torch.nn.Parameter(q), q.dequantize().numpy()), (x.t().contiguous().t(), plain),
    ):  # fmt: skip
        for metric in (*PAIRED, metrics.max_ulp):
            assert metric(x, q_like) == metric(plain, as_numpy)
        assert metrics.crest(q_like) == metrics.crest(as_numpy)
    assert metrics.crest(x.sum()) == 1.0
    assert metrics.clip(x, torch.tensor(1.0)) == metrics.clip(plain, 1.0)
    assert metrics.sr_noise(x, [x, x + 1]) == metrics.sr_noise(x, torch.stack([x, x + 1]))
    assert metrics.sr_noise(x, [x, x + 1]).mean == pytest.approx(0.5, rel=1e-6)
    codes = q.codes.view(torch.uint8).numpy()
    assert metrics.at_limit(q.codes, "E4M3") == metrics.at_limit(codes, "E4M3")
    assert metrics.first_difference(x.bfloat16(), x.bfloat16()) is None
    other = q.codes.clone()
    other.view(torch.uint8)[1, 3] ^= 1
    found = metrics.first_difference(q.codes, other, "E4M3")
    assert found.index == (1, 3)
    assert (found.value_a, found.value_b) == tuple(float(one[1, 3].float()) for one in (q.codes, other))
    for nothing in (x.to("meta"), x.to_sparse()):
        with pytest.raises(InvalidTypeError, match=r"x: got a tensor of float32 \((strided, meta|sparse_coo, cpu)\)"):
            metrics.crest(nothing)


def test_arrays_of_jax_are_taken_as_they_are():
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    mj = pytest.importorskip("microfloat.jax")
    plain = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    x, narrow = jnp.asarray(plain), jnp.asarray(plain, dtype=jnp.bfloat16)
    assert metrics.sqnr_db(x, narrow) == metrics.sqnr_db(plain, plain.astype(ml_dtypes.bfloat16))
    q = mj.quantize(x, "nvfp4")
    assert metrics.sqnr_db(plain, q) == metrics.sqnr_db(plain, np.asarray(q.dequantize()))


def test_histograms_know_scales_of_a_users_own():
    scale = formats.get_scale("ue5m3")
    found = metrics.scale_histogram(np.uint8([0, 1, 8 * 15, 254, 255]), scale)
    assert (found.zero, found.nan, found.at_lowest, found.at_highest) == (0.2, 0.2, 0.2, 0.2)
    assert found.exponents == (-17, 0, 16)
