"""scaled_matmul, fold and the two functions of delayed scaling."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from microfloat import formats, reference
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.formats import E4M3, E5M2, FORMATS, decode, encode
from microfloat.recipes import Cast, Hadamard
from microfloat.reference import Quantized, dequantize, fold, quantize, record_amax, scaled_matmul, update_delayed

RNG = np.random.default_rng(0)
A, B = RNG.standard_normal((5, 40)).astype(np.float32), RNG.standard_normal((7, 40)).astype(np.float32)
ROTATED = Cast("nvfp4", hadamard=Hadamard())


def exact_value(q, row, column):
    """One element as a Fraction: code x block scale x tensor scale."""
    block = q.format.block
    grid = q.scale.reshape(1, 1) if q.format.is_per_tensor else q.scale
    entry = grid[0 if block[0] is None else row // block[0], 0 if block[1] is None else column // block[1]]
    scale = {
        "E8M0": lambda: Fraction(2) ** (int(entry) - 127),
        "E4M3": lambda: Fraction(float(decode(entry, E4M3))),
        "FP32": lambda: Fraction(float(entry)),
    }[q.format.scale.name]()
    if q.tensor_scale is not None:
        scale *= Fraction(float(q.tensor_scale.reshape(-1)[row if q.tensor_scale.ndim else 0]))
    return Fraction(float(decode(q.unpacked_codes()[row, column], q.format.element))) * scale


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_scaled_matmul_is_the_exact_sum(fmt):
    a, b = quantize(A, fmt), quantize(B, fmt)
    y = scaled_matmul(a, b)
    assert (y.shape, y.dtype) == ((5, 7), np.float64)
    for m, n in ((0, 0), (4, 6), (2, 3)):
        products = [exact_value(a, m, k) * exact_value(b, n, k) for k in range(40)]
        # float64 adds 40 terms with at most 39 roundings of 2^-53 each.
        bound = 40 * Fraction(2) ** -53 * sum(abs(product) for product in products)
        assert abs(Fraction(float(y[m, n])) - sum(products)) <= bound


def test_operands_may_be_arrays_and_of_any_formats():
    assert np.array_equal(scaled_matmul(A, B), A.astype(np.float64) @ B.astype(np.float64).T)
    mixed = scaled_matmul(quantize(A, "mxfp8"), B.astype(ml_dtypes.bfloat16))
    expected = dequantize(quantize(A, "mxfp8")).astype(np.float64) @ B.astype(ml_dtypes.bfloat16).astype(np.float64).T
    assert np.array_equal(mixed, expected)
    assert scaled_matmul(quantize(A, "mxfp8"), quantize(B, "mxfp4")).shape == (5, 7)
    assert scaled_matmul(quantize(A.T, "mxfp8", axis=-2), quantize(B, "mxfp8")).shape == (5, 7)
    assert scaled_matmul(quantize(np.zeros((0, 40), np.float32), "mxfp8"), quantize(B, "mxfp8")).shape == (0, 7)


def test_leading_axes_are_rows():
    deep = quantize(A.reshape(1, 5, 40), "nvfp4")
    assert np.array_equal(
        scaled_matmul(deep, quantize(B, "nvfp4")), scaled_matmul(quantize(A, "nvfp4"), quantize(B, "nvfp4"))
    )


def test_hadamard_operands_meet_in_the_transformed_domain():
    cast = Cast("fp8_row", "amax", hadamard=Hadamard())
    y = scaled_matmul(quantize(A, cast), quantize(B, cast))
    exact = A.astype(np.float64) @ B.astype(np.float64).T
    # FP8 errors of both operands: 2^-4 each, relative to the norms of the rows.
    norms = np.linalg.norm(A, axis=1)[:, None] * np.linalg.norm(B, axis=1)[None]
    assert (np.abs(y - exact) <= 2.0**-3 * norms).all()


def test_nan_blocks_give_nan():
    for fmt in ("mxfp8", "mxfp4", "nvfp4", "nvfp4_2d"):
        x = A.copy()
        x[1, 3] = np.nan
        y = scaled_matmul(quantize(x, fmt), quantize(B, fmt))
        rows = slice(0, 5) if fmt == "nvfp4_2d" else slice(1, 2)
        assert np.isnan(y[rows]).all()
        assert np.isfinite(np.delete(y, np.r_[rows], axis=0)).all()


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (A, B[:, :39], r"b: got contraction length 39, needed 40, as a has"),
        (quantize(A, "mxfp8"), quantize(B[:, :39], "mxfp8"), r"contraction length 39, needed 40"),
        (quantize(A, ROTATED), quantize(B, "nvfp4"), r"b: got hadamard None against Hadamard\(16"),
        (quantize(A, ROTATED), quantize(B, Cast("nvfp4", hadamard=Hadamard(16, 0))), "hadamard"),
        (quantize(A, ROTATED), np.zeros((7, 48), np.float32), "hadamard None"),
        (A[0], B, r"a: got shape \(40,\), needed a matrix"),
        (A, B[None], r"b: got shape \(1, 7, 40\)"),
    ],
)  # fmt: skip
def test_operands_that_cannot_be_multiplied(a, b, message):
    with pytest.raises(InvalidValueError, match=message):
        scaled_matmul(a, b)


def test_operands_of_a_wrong_type():
    with pytest.raises(InvalidTypeError, match="a: got int64"):
        scaled_matmul(np.ones((2, 2), np.int64), A)
    with pytest.raises(InvalidTypeError, match="b: got"):
        scaled_matmul(A, "mxfp8")


# --- folding


FOLDABLE = [fmt for fmt in FORMATS.values() if fmt.scale.name == "E8M0"]


def any_mx(fmt, seed, spread, shape=(6, 300)):
    """Random codes under scale bytes that spread over `spread` binades, NaN codes left out."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << fmt.element.bits, shape).astype(np.uint8)
    codes[~np.isfinite(decode(codes, fmt.element))] = 1
    scale = rng.integers(120, 121 + spread, (shape[0], -(-shape[1] // 32))).astype(np.uint8)
    packed = reference.pack_fp4(codes) if fmt.element.bits == 4 else codes
    return Quantized(packed, scale, None, fmt, 1, shape)


@pytest.mark.parametrize("fmt", FOLDABLE, ids=str)
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, None)])
@given(seed=st.integers(0, 2**32), spread=st.integers(0, 30))
def test_folding_counts_exactly_the_elements_it_changes(fmt, block, seed, spread):
    q = any_mx(fmt, seed, spread)
    folded, lossy = fold(q, block)
    name = "fp8_row" if block[1] is None else f"fp8_{block[0]}x128"
    assert folded.format == FORMATS[name + ("_e5m2" if fmt.element == E5M2 else "")]
    before, after = dequantize(q).astype(np.float64), dequantize(folded).astype(np.float64)
    assert lossy == int((before != after).sum())
    # Half the subnormal step of the target under the group's scale (docs/numerics.md 9.1).
    target = folded.format.element
    bound = target.step / 2 * np.repeat(folded.scale, block[1] or 300, axis=1)[:, :300]
    bound = np.repeat(bound, 128, axis=0)[:6] if block[0] == 128 else bound
    assert (np.abs(after - before) <= bound).all()


# Binades within which a fold is always exact: docs/numerics.md 9.2 (E2M1 15, so scales may span 14; E2M3 and E3M2 from
# -6 to 5 and -5 to 4); FP8 keeps subnormals exact only without a shift.
@pytest.mark.parametrize(
    ("name", "span"), [("mxfp4", 14), ("mxfp6_e2m3", 11), ("mxfp6_e3m2", 9), ("mxfp8", 0), ("mxfp8_e5m2", 0)]
)
def test_windows_inside_which_nothing_is_lost(name, span):
    fmt = FORMATS[name]
    codes = np.tile(np.arange(1 << fmt.element.bits, dtype=np.uint8), 256)[: 4 * 32 * 8].reshape(1, -1)
    codes = np.where(np.isfinite(decode(codes, fmt.element)), codes, 1).astype(np.uint8)
    packed = reference.pack_fp4(codes) if fmt.element.bits == 4 else codes

    def lossy(spread):
        scale = np.full((1, codes.shape[1] // 32), 127, np.uint8)
        scale[0, 3::4] += spread  # the last of four blocks
        return fold(Quantized(packed, scale, None, fmt, 1, codes.shape))[1]

    assert lossy(span) == 0
    assert lossy(span + 1) > 0 or name in ("mxfp8", "mxfp8_e5m2")
    assert lossy(span + 2) > 0


def test_folded_scales_stay_normal():
    q = quantize(np.full((1, 128), 1e-45, np.float32), "mxfp8")
    folded, _ = fold(q)
    assert folded.scale[0, 0] == 2.0**-126


def test_a_nan_group_is_nan_and_not_lossy():
    x = RNG.standard_normal((2, 256)).astype(np.float32)
    x[0, 40] = np.nan
    folded, lossy = fold(quantize(x, "mxfp4"))
    assert set(folded.codes[0, :128].tolist()) == {0x7F}
    assert int(folded.scale.view(np.uint32)[0, 0]) == 0x7FC00000
    assert np.isnan(dequantize(folded)[0, :128]).all()
    assert np.isfinite(dequantize(folded)[0, 128:]).all()
    assert lossy == 0


def test_folding_keeps_axis_shape_and_hadamard():
    q = quantize(RNG.standard_normal((50, 30)).astype(np.float32), Cast("mxfp8", hadamard=Hadamard()), axis=-2)
    folded, _ = fold(q)
    assert (folded.axis, folded.shape, folded.hadamard) == (0, (50, 30), Hadamard())
    assert (folded.codes.shape, folded.scale.shape) == ((30, 64), (30, 1))
    deep = quantize(RNG.standard_normal((2, 3, 160)).astype(np.float32), "mxfp4")
    assert fold(deep)[0].scale.shape == (2, 3, 2)
    assert fold(deep, (128, 128))[0].scale.shape == (1, 2)


def test_tiles_of_a_users_own_fold_too():
    fmt = formats.ScaledFormat("mxfp8_32x32", E4M3, formats.SCALE_E8M0, (32, 32))
    x = RNG.standard_normal((64, 128)).astype(np.float32)
    for block in ((1, 128), (128, 128)):
        folded, lossy = fold(quantize(x, fmt), block)
        assert int((dequantize(folded) != dequantize(quantize(x, fmt))).sum()) == lossy


def test_what_cannot_be_folded():
    with pytest.raises(InvalidValueError, match=r"q: got format fp8_row, needed E8M0 scales \(an MX format\) or E4M3"):
        fold(quantize(A, "fp8_row"))
    with pytest.raises(InvalidValueError, match=r"block: got \(128, 128\) with one tensor scale for each row, needed"):
        fold(quantize(A, "nvfp4_row"), (128, 128))
    with pytest.raises(
        InvalidValueError, match=r"block: got \(1, 64\), needed \(1, 128\), \(1, None\) or \(128, 128\)"
    ):
        fold(quantize(A, "mxfp8"), (1, 64))
    with pytest.raises(InvalidValueError, match="block: got 128"):
        fold(quantize(A, "mxfp8"), 128)
    with pytest.raises(InvalidTypeError, match="q: got ndarray"):
        fold(A)


def folded_exponent(largest):
    """E of docs/numerics.md 9.4, by the bits of the largest E4M3 byte of a group."""
    return np.maximum((largest.astype(int) + 6) // 8, 4) - 13


def test_every_pair_of_nvfp4_codes_and_scales():
    """Row (b, B): 16 codes under the scale byte b, then blocks under the largest byte B, against ml_dtypes' E4M3."""
    low, high = (byte.ravel()[np.tril_indices(127)[0] * 127 + np.tril_indices(127)[1]].astype(np.uint8)
                 for byte in np.meshgrid(np.arange(127), np.arange(127)))  # fmt: skip
    scale = np.stack([low, *[high] * 7], axis=1)
    packed = reference.pack_fp4(np.tile(np.arange(16, dtype=np.uint8), (len(low), 8)))
    q = Quantized(packed, scale, np.asarray(np.float32(1.7)), FORMATS["nvfp4"], 1, (len(low), 128))
    folded, lossy = fold(q)
    assert folded.format == FORMATS["fp8_1x128"]
    assert folded.tensor_scale is None
    exponent = folded_exponent(high)[:, None]
    assert np.array_equal(folded.scale, np.ldexp(np.float32(1), exponent).astype(np.float32) * np.float32(1.7))
    values = decode(q.unpacked_codes(), formats.E2M1) * np.repeat(decode(scale, E4M3), 16, axis=1)
    shifted = np.ldexp(values, -exponent)
    assert abs(shifted).max() == 432  # nothing saturates
    expected = shifted.astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(folded.codes, expected.view(np.uint8))
    error = abs(np.ldexp(expected.astype(np.float64), exponent) - values)
    assert (error <= np.maximum(abs(values) / 21, np.ldexp(1.0, exponent - 10))).all()
    assert (error == abs(values) / 21).any()
    assert (error / np.ldexp(1.0, exponent - 10) == 1).any()
    assert lossy == (error != 0).sum()


def test_tiles_of_nvfp4_fold_like_their_transpose():
    rng = np.random.default_rng(3)
    codes, scale = rng.integers(0, 16, (200, 304), np.uint8), rng.integers(0, 127, (13, 19), np.uint8)
    scale[:8, :8] //= 4  # a tile of small scales, E = -9
    scale[9, 9] = 0x7F
    one, other = (
        fold(
            Quantized(reference.pack_fp4(c), np.ascontiguousarray(s), None, FORMATS["nvfp4_2d"], 1, c.shape), (128, 128)
        )
        for c, s in ((codes, scale), (codes.T, scale.T))
    )
    assert np.array_equal(one[0].codes, other[0].codes.T)
    assert np.array_equal(one[0].scale, other[0].scale.T)
    assert one[1] == other[1] > 0
    finite = np.where(scale == 0x7F, 0, scale)
    largest = [[finite[r : r + 8, c : c + 8].max() for c in (0, 8, 16)] for r in (0, 8)]
    assert np.array_equal(np.log2(one[0].scale), folded_exponent(np.array(largest)))
    is_nan = np.zeros(codes.shape, bool)
    is_nan[144:160, 144:160] = True  # the block alone: NaN codes, which are not lossy
    assert np.array_equal(np.isnan(dequantize(one[0])), is_nan)
    assert (one[0].codes[is_nan] == 0x7F).all()


def test_a_tensor_scale_per_row_goes_into_the_scales():
    x = (RNG.standard_normal((3, 200)) * [[1e-30], [1], [1e30]]).astype(np.float32)
    q = quantize(x, "nvfp4_row")
    folded, _ = fold(q)
    assert np.array_equal(folded.scale, np.ldexp(np.float32(1), folded_exponent(largest_of(q))) * q.tensor_scale)
    tiny = fold(quantize(np.full((1, 128), 1e-45, np.float32), "nvfp4"))[0]
    assert tiny.scale[0, 0] == 2.0**-126  # the smallest tensor scale times the smallest 2^E is normal
    no_level = fold(quantize(x[1:2], Cast("nvfp4", "one_level_e4m3")))[0]
    assert np.isin(no_level.scale, 2.0 ** np.arange(-9, 4)).all()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_row", "nvfp4_2d", "mxfp4", "mxfp8_e5m2"])
def test_rows_fold_as_one_group(name):
    """9.5: a row of at most 128 elements is the group of 9.1 and 9.4, a longer one follows its largest scale."""
    binades = np.repeat(RNG.integers(-24, 0, (20, 10)), 32, axis=1)[:, :300]
    x = (RNG.standard_normal((20, 300)) * np.exp2(binades)).astype(np.float32)
    short = quantize(x[:, :128], name)
    (rows, lost), (groups, lossy) = fold(short, (1, None)), fold(short)
    assert np.array_equal(rows.codes, groups.codes)
    assert np.array_equal(rows.scale, groups.scale)
    assert lost == lossy
    q = quantize(x, name)
    (long, lost), (by_groups, lossy) = fold(q, (1, None)), fold(q)
    assert long.format.block == (1, None)
    assert long.scale.shape == (20, 1)
    assert np.array_equal(long.scale[:, 0], by_groups.scale.max(axis=1))
    assert lost >= lossy
    exact = dequantize(q)
    half_a_step, rounding = long.scale * np.float32(long.format.element.step / 2), 20.99 if "nv" in name else np.inf
    assert (abs(dequantize(long) - exact) <= np.maximum(half_a_step * 1.000001, abs(exact) / rounding)).all()


def largest_of(q):
    """Largest scale byte of every group of eight blocks."""
    padded = np.pad(q.scale, ((0, 0), (0, -q.scale.shape[1] % 8)))
    return padded.reshape(len(q.scale), -1, 8).max(2)


# --- delayed scaling


amaxes = hnp.arrays(np.float32, st.integers(1, 12), elements=st.floats(0, 2.0**100, width=32))


@given(seen=amaxes, length=st.integers(1, 6), element=st.sampled_from([E4M3, E5M2]), margin=st.integers(-3, 3))
def test_the_scale_follows_the_maximum_of_the_last_steps(seen, length, element, margin):
    history, scale_enc = np.zeros(length, np.float32), np.float32(1)
    for step, amax in enumerate(seen):
        history, previous = record_amax(history, amax), scale_enc
        history, scale_enc = update_delayed(history, scale_enc, element, margin=margin)
        largest = seen[max(0, step + 1 - length) : step + 1].max()
        if largest == 0:
            assert scale_enc == previous
        else:
            factor = np.float32(element.max) / np.maximum(largest, np.float32(element.max * 2.0**-126))
            assert scale_enc == min(np.ldexp(factor, -margin), np.float32(2.0**126))
        assert history[0] == 0
        if length > 1:
            assert history[-1] == amax


def test_two_calls_in_a_step_record_the_maximum():
    history = record_amax(record_amax(np.zeros(3, np.float32), 2.0), 1.0)
    assert history.tolist() == [2, 0, 0]
    assert record_amax(history, np.inf).tolist() == record_amax(history, np.nan).tolist() == [2, 0, 0]


def test_functions_are_pure():
    history = np.float32([3, 1, 2])
    history.setflags(write=False)
    record_amax(history, 9.0)
    update_delayed(history, 1.0, "E4M3")
    assert history.tolist() == [3, 1, 2]


def test_algorithms():
    history = np.float32([2, 7, 5])
    assert update_delayed(history, 1.0, "E4M3")[1] == 64
    assert update_delayed(history, 1.0, "E4M3", amax_compute_algo="most_recent")[1] == 224
    assert update_delayed(history, 1.0, "E4M3", amax_compute_algo=lambda seen: seen[1:].min())[1] == np.float32(
        448
    ) / np.float32(5)
    rolled, scale_enc = update_delayed(history, 1.0, "E5M2", margin=1)
    assert (rolled.tolist(), scale_enc) == ([0, 5, 2], np.float32(57344) / np.float32(7) / 2)
    assert isinstance(scale_enc, np.float32)


@pytest.mark.parametrize("amax", [np.inf, np.nan, 0.0, -1.0])
def test_a_callable_that_gives_no_amax_keeps_the_scale(amax):
    assert update_delayed(np.float32([1, 2]), 0.125, "E4M3", amax_compute_algo=lambda seen: amax)[1] == 0.125


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: record_amax(np.zeros((2, 2), np.float32), 1.0), InvalidValueError, r"history: got shape \(2, 2\)"),
        (lambda: record_amax(np.zeros(0, np.float32), 1.0), InvalidValueError, r"history: got shape \(0,\)"),
        (lambda: record_amax(np.zeros(2, np.int32), 1.0), InvalidTypeError, "history: got int32"),
        (lambda: record_amax(np.zeros(2, np.float32), -1.0), InvalidValueError, "amax: got -1"),
        (lambda: record_amax(np.zeros(2, np.float32), [1, 2]), InvalidTypeError, "amax: got list"),
        (lambda: record_amax(np.zeros(2, np.float32), "1"), InvalidTypeError, "amax: got str"),
        (lambda: update_delayed(np.zeros(2, np.float32), 1.0, "E9M9"), InvalidValueError, "element: got 'E9M9'"),
        (lambda: update_delayed(np.zeros(2, np.float32), 1.0, E4M3, margin=1.5), InvalidTypeError, "margin: got float"),
        (lambda: update_delayed(np.zeros(2, np.float32), 1.0, E4M3, margin=True), InvalidTypeError, "margin: got bool"),
        (lambda: update_delayed(np.ones(2, np.float32), 1.0, E4M3, margin=200), InvalidValueError, "margin: got 200"),
        (lambda: update_delayed(np.zeros(2, np.float32), 1.0, E4M3, amax_compute_algo="mean"), InvalidValueError,
         "amax_compute_algo: got 'mean', needed one of 'max', 'most_recent'"),
        (lambda: update_delayed(np.zeros(2, np.float32), "1", E4M3), InvalidTypeError, "scale_enc: got str"),
    ],
)  # fmt: skip
def test_what_delayed_scaling_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_encode_of_folded_codes_never_saturates():
    """The headroom is the largest shift under which max still fits: docs/numerics.md 9.2 (6, 5, 4)."""
    found = {}
    for cast in ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8"):
        q = quantize(np.ones((1, 128), np.float32), cast)
        found[q.format.element.name] = int(q.scale[0, 0]) - 127 - int(np.log2(fold(q)[0].scale[0, 0]))
    assert found == {"E2M1": 6, "E2M3": 5, "E3M2": 4, "E4M3": 0}
    for name, shift in found.items():
        top = np.float32(formats.ELEMENTS[name].max * 2.0**shift)
        assert decode(encode(top, E4M3), E4M3) == top


def test_the_clamps_of_the_encode_scale():
    """docs/numerics.md 3.3: A is clamped at max * 2^-126 before the margin, the result at 2^126 after it."""
    tiny = np.float32([1e-40])
    assert update_delayed(tiny, 1.0, "E4M3")[1] == 2.0**126
    assert update_delayed(tiny, 1.0, "E4M3", margin=3)[1] == 2.0**123
    assert update_delayed(tiny, 1.0, "E4M3", margin=-3)[1] == 2.0**126
    assert update_delayed(np.float32([448 * 2.0**-124]), 1.0, "E4M3", margin=-3)[1] == 2.0**126


def test_nan_codes_under_a_finite_scale_stay_nan_and_are_not_lossy():
    """Only foreign data has them: quantize gives the whole block a NaN scale."""
    q = quantize(np.ones((1, 128), np.float32), "mxfp8")
    codes = q.codes.copy()
    codes[0, 5], codes[0, 6] = 0x7F, 0xFF
    folded, lossy = fold(Quantized(codes, q.scale, None, q.format, q.axis, q.shape))
    assert lossy == 0
    assert np.isnan(dequantize(folded))[0].tolist() == [column in (5, 6) for column in range(128)]
