"""The contract of quantize and dequantize: types, shapes, arguments, and the error for each wrong one."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from microfloat import formats, reference
from microfloat.errors import InvalidTypeError, InvalidValueError, MicrofloatError
from microfloat.formats import E4M3, FORMATS, NVFP4, NVFP4_ROW, SCALE_E8M0, ScaledFormat
from microfloat.recipes import Cast, Current, Delayed, Hadamard, MXFP8BlockScaling
from microfloat.reference import Quantized, dequantize, quantize

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
X = np.linspace(-3, 5, 6 * 40, dtype=np.float32).reshape(6, 40)


def same(a: Quantized, b: Quantized) -> bool:
    pairs = [(a.codes, b.codes), (a.scale, b.scale)]
    if a.tensor_scale is not None or b.tensor_scale is not None:
        pairs.append((a.tensor_scale, b.tensor_scale))
    return all(left.dtype == right.dtype and np.array_equal(left, right) for left, right in pairs)


# --- inputs


@every_format
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64, ">f4"])
def test_input_dtypes_widen_to_float32(fmt, dtype):
    x = X.astype(dtype)
    assert same(quantize(x, fmt), quantize(x.astype(np.float32), fmt))


def test_lists_and_scalars_are_float64_rounded_to_float32():
    assert same(
        quantize([[0.1, 0.2], [0.3, 0.4]], "fp8_tensor"), quantize(np.float32([[0.1, 0.2], [0.3, 0.4]]), "fp8_tensor")
    )
    assert quantize(1.0, "mxfp8").shape == ()
    assert dequantize(quantize(1e300, "mxfp8")).shape == ()


@pytest.mark.parametrize(
    "x",
    [
        np.arange(4), np.array([True]), np.array([1j]), np.array(["a"]), np.array([None]), [[1.0], [1.0, 2.0]], [1, 2],
        np.zeros(4, ml_dtypes.float8_e4m3fn), np.zeros(4, ml_dtypes.float4_e2m1fn), np.zeros(4, np.uint8), None, "x",
        np.zeros(4, np.longdouble) if np.dtype(np.longdouble).itemsize > 8 else np.zeros(4, np.int8),
    ],
    ids=lambda x: str(getattr(x, "dtype", x)),
)  # fmt: skip
def test_other_dtypes_are_refused(x):
    with pytest.raises(InvalidTypeError, match=r"^x: got "):
        quantize(x, "mxfp8")


def test_arrays_that_refuse_to_become_numpy_are_refused_in_our_words():
    class Device:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("lives elsewhere")

    with pytest.raises(InvalidTypeError, match=r"x: got Device \(lives elsewhere\)"):
        quantize(Device(), "mxfp8")


@every_format
def test_strides_do_not_matter_and_inputs_are_not_changed(fmt):
    base = np.random.default_rng(0).standard_normal((40, 48)).astype(np.float32)
    before = base.copy()
    for view in (base[::-1, ::-1], base[::2, 1::3], base.T, np.broadcast_to(base[:1], (5, 48))):
        assert same(quantize(view, fmt), quantize(np.ascontiguousarray(view), fmt))
    base.setflags(write=False)
    quantize(base, fmt)
    assert np.array_equal(base, before)


@pytest.mark.parametrize("cast", ["mxfp8", formats.MXFP8, Cast("mxfp8"), Cast(formats.MXFP8, "rceil")], ids=repr)
def test_a_cast_a_format_or_a_name(cast):
    assert same(quantize(X, cast), quantize(X, "mxfp8"))


def test_casts_that_are_none():
    with pytest.raises(InvalidValueError, match=r"cast: got 'mxfp9'.*Did you mean 'mxfp8"):
        quantize(X, "mxfp9")
    with pytest.raises(InvalidTypeError, match=r"take one, for example recipe\.fprop\.lhs"):
        quantize(X, MXFP8BlockScaling())
    with pytest.raises(InvalidTypeError, match="cast: got NoneType"):
        quantize(X, None)


# --- axes and shapes


@pytest.mark.parametrize(
    ("shape", "axis", "normal"),
    [((6, 40), -1, 1), ((6, 40), 1, 1), ((6, 40), -2, 0), ((6, 40), 0, 0), ((40,), 0, 0), ((40,), -1, 0), ((), -1, 0),
     ((), 0, 0), ((2, 3, 40), -1, 2), ((2, 3, 40), 2, 2), ((6, 40), np.int64(-2), 0)],
)  # fmt: skip
def test_axis(shape, axis, normal):
    q = quantize(np.resize(X, shape), "mxfp8", axis=axis)
    assert (q.axis, q.shape) == (normal, shape)


@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 40), 2), ((6, 40), -3), ((2, 3, 40), -2), ((2, 3, 40), 0), ((40,), -2), ((), 1)]
)
def test_axes_that_are_refused(shape, axis):
    with pytest.raises(
        InvalidValueError, match=rf"axis: got {axis} for an array of {len(shape)} axes, needed -1, or -2"
    ):
        quantize(np.resize(X, shape), "mxfp8", axis=axis)


@pytest.mark.parametrize("axis", [True, 1.0, "last", None, (0,)])
def test_axes_of_a_wrong_type(axis):
    with pytest.raises(InvalidTypeError, match="axis: got"):
        quantize(X, "mxfp8", axis=axis)


@every_format
def test_axis_minus_two_is_the_transposed_operand(fmt):
    q, transposed = quantize(X, fmt, axis=-2), quantize(np.ascontiguousarray(X.T), fmt)
    assert same(q, transposed)
    assert np.array_equal(dequantize(q), dequantize(transposed).T)


@every_format
@pytest.mark.parametrize(
    "shape",
    [(), (1,), (33,), (1, 1), (3, 33), (17, 130), (130, 17), (2, 3, 40), (0,), (0, 7), (3, 0), (2, 0, 4), (2, 3, 0)],
    ids=str,
)
def test_shapes_of_every_format(fmt, shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    q = quantize(x, fmt)
    leading = shape[:-1] if len(shape) > 1 else (1,)
    rows, length = int(np.prod(leading)), (shape[-1] if shape else 1)
    packed = -(-length // fmt.element.codes_per_byte)
    grid = [1 if size is None else -(-extent // size) for size, extent in zip(fmt.block, (rows, length), strict=True)]
    scale_shape = () if fmt.is_per_tensor else tuple(grid) if fmt.is_tile else (*leading, grid[1])
    assert (q.codes.shape, q.codes.dtype) == ((*leading, packed), np.uint8)
    assert (q.scale.shape, q.scale.dtype) == (scale_shape, fmt.scale.dtype)
    assert isinstance(q.scale, np.ndarray)
    if fmt.tensor_scale is None:
        assert q.tensor_scale is None
    else:
        assert (q.tensor_scale.shape, q.tensor_scale.dtype) == (
            (rows, 1) if fmt.tensor_scale == "row" else (),
            np.float32,
        )
        assert isinstance(q.tensor_scale, np.ndarray)
    values = dequantize(q)
    assert (values.shape, values.dtype) == (shape, np.float32)
    if x.size == 0:
        assert q.codes.size == 0
        remaining = [part for part in (q.scale, q.tensor_scale) if part is not None and part.dtype == np.float32]
        assert all((part == 1).all() for part in remaining)


@every_format
def test_more_axes_are_flattened_rows(fmt):
    x = np.random.default_rng(2).standard_normal((3, 5, 70)).astype(np.float32)
    deep, flat = quantize(x, fmt), quantize(x.reshape(15, 70), fmt)
    assert np.array_equal(deep.codes.reshape(flat.codes.shape), flat.codes)
    assert np.array_equal(deep.scale.reshape(flat.scale.shape), flat.scale)
    assert np.array_equal(dequantize(deep), dequantize(flat).reshape(x.shape))


@every_format
@pytest.mark.parametrize("axis", [-1, -2])
def test_ragged_edges_are_cropped_zero_padding(fmt, axis):
    x = np.random.default_rng(3).standard_normal((37, 45)).astype(np.float32)
    padded = np.pad(x, ((0, 128 - 37), (0, 128 - 45)))
    small, large = quantize(x, fmt, axis=axis), quantize(padded, fmt, axis=axis)
    rows, length = (37, 45) if axis == -1 else (45, 37)
    assert np.array_equal(small.unpacked_codes(), large.unpacked_codes()[:rows, :length])
    assert np.array_equal(dequantize(small), dequantize(large)[:37, :45])


@pytest.mark.parametrize("block", [(1, 64), (32, 32), (8, 4), (2, None), (1, 1), (64, 16)])
@pytest.mark.parametrize("scale", [formats.SCALE_E8M0, formats.SCALE_FP32, formats.SCALE_E4M3], ids=str)
def test_blocks_of_a_users_own(block, scale):
    """Every block equals the same block quantized alone, per tensor amax given where there is one."""
    two_level = scale is formats.SCALE_E4M3
    element = formats.E2M1 if two_level else E4M3
    fmt = ScaledFormat("mine", element, scale, block, "tensor" if two_level else None)
    x = np.random.default_rng(4).standard_normal((70, 90)).astype(np.float32)
    amax = np.abs(x).max()
    q = quantize(x, fmt)
    codes, grid = q.unpacked_codes(), q.scale.reshape(-(-70 // block[0]), -1)
    block_rows, block_cols = block[0], block[1] or 90
    for row, column in ((0, 0), (grid.shape[0] - 1, grid.shape[1] - 1), (grid.shape[0] // 2, grid.shape[1] // 2)):
        rows = slice(row * block_rows, (row + 1) * block_rows)
        columns = slice(column * block_cols, (column + 1) * block_cols)
        alone = quantize(x[rows, columns], fmt, amax=amax if two_level else None)
        assert np.array_equal(alone.unpacked_codes(), codes[rows, columns])
        assert alone.scale.reshape(()) == grid[row, column]


# --- seed and stream


STOCHASTIC = Cast("mxfp8", rounding="stochastic")


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1, (3, 5), [3, 5], np.uint32([3, 5]), np.int64([3, 5]), np.uint64(9)])
def test_seeds(seed):
    words = seed if np.ndim(seed) else (int(seed) & 0xFFFFFFFF, int(seed) >> 32)
    value = int(words[0]) | int(words[1]) << 32
    assert same(quantize(X, STOCHASTIC, seed=seed), quantize(X, STOCHASTIC, seed=value))


@pytest.mark.parametrize(
    "seed",
    [-1, 2**64, (1,), (1, 2, 3), (-1, 0), (0, 2**32), 1.5, True, "seed", (1.5, 2), [[1, 2]], np.float32([1, 2])],
    ids=repr,
)
def test_seeds_that_are_refused(seed):
    with pytest.raises(InvalidValueError, match=r"seed: got .*needed an int in \[0, 2\^64\), or its two 32-bit words"):
        quantize(X, STOCHASTIC, seed=seed)


def test_a_stochastic_cast_needs_a_seed():
    with pytest.raises(InvalidValueError, match=r"seed: got None with a stochastic cast.*Give seed="):
        quantize(X, STOCHASTIC)


def test_nearest_ignores_seed_and_stream():
    assert same(quantize(X, "mxfp8", seed="nonsense", stream=-3), quantize(X, "mxfp8"))


@pytest.mark.parametrize("stream", [-1, 2**32, 1.0, None, True])
def test_streams_that_are_refused(stream):
    with pytest.raises(InvalidValueError, match=r"stream: got"):
        quantize(X, STOCHASTIC, seed=1, stream=stream)


def test_seed_and_stream_change_the_codes():
    base = quantize(X, STOCHASTIC, seed=1)
    assert same(base, quantize(X, STOCHASTIC, seed=1, stream=0))
    assert not same(base, quantize(X, STOCHASTIC, seed=2))
    assert not same(base, quantize(X, STOCHASTIC, seed=1, stream=1))
    assert not same(base, quantize(X, STOCHASTIC, seed=1 << 32))


# --- amax and scale_enc


@pytest.mark.parametrize("fmt", [formats.FP8_TENSOR, formats.FP8_TENSOR_E5M2, formats.NVFP4, formats.NVFP4_2D], ids=str)
@pytest.mark.parametrize(
    "kind", [float, np.float32, np.float64, np.asarray, int, lambda v: np.asarray(v, ml_dtypes.bfloat16)]
)
def test_a_given_amax_replaces_the_measured_one(fmt, kind):
    with_eight = np.pad(X, ((0, 11), (0, 0)))  # a row beyond the first tile holds the larger amax
    with_eight[16] = 8.0
    measured = quantize(with_eight, fmt)
    given = quantize(X, fmt, amax=kind(8.0))
    assert np.array_equal(given.unpacked_codes(), measured.unpacked_codes()[:6])
    own = given.scale if fmt.tensor_scale is None else given.tensor_scale
    assert own == (measured.scale if fmt.tensor_scale is None else measured.tensor_scale)


def test_an_amax_per_row():
    """Features R15."""
    amax = np.float32([[1], [2], [4], [0], [np.inf], [16]])
    q = quantize(X, NVFP4_ROW, amax=amax)
    for row in range(6):
        alone = quantize(X[row : row + 1], NVFP4, amax=amax[row, 0])
        assert np.array_equal(q.codes[row], alone.codes[0])
        assert np.array_equal(q.scale[row], alone.scale[0])
        assert q.tensor_scale[row, 0] == alone.tensor_scale
    assert q.tensor_scale[3:5, 0].tolist() == [1, 1]


def test_the_measured_amax_is_the_default():
    amax = np.abs(X).max()
    for fmt in (formats.FP8_TENSOR, formats.NVFP4, formats.NVFP4_2D):
        assert same(quantize(X, fmt), quantize(X, fmt, amax=amax))
    assert same(quantize(X, NVFP4_ROW), quantize(X, NVFP4_ROW, amax=np.abs(X).max(axis=1, keepdims=True)))


def test_epsilon_is_a_lower_bound_of_a_given_amax_too():
    cast = Cast("fp8_tensor", scaling=Current(amax_epsilon=100.0))
    assert quantize(X, cast, amax=5.0).scale == quantize(X, "fp8_tensor", amax=100.0).scale
    assert quantize(np.zeros((2, 2), np.float32), cast).scale == np.float32(1) / (np.float32(448) / np.float32(100))


@pytest.mark.parametrize(
    "cast",
    ["mxfp8", "mxfp4", "fp8_row", "fp8_1x128", "fp8_128x128", Cast("nvfp4", "one_level_e4m3"),
     Cast(ScaledFormat("mine", E4M3, SCALE_E8M0, (None, None)))],
    ids=str,
)  # fmt: skip
def test_amax_where_there_is_none_to_replace(cast):
    with pytest.raises(InvalidValueError, match=r"amax: got a value with .*needed None"):
        quantize(X, cast, amax=1.0)


def test_amax_with_delayed_scaling():
    with pytest.raises(InvalidValueError, match=r"amax: .*Delayed scaling takes scale_enc= instead"):
        quantize(X, Cast("fp8_tensor", scaling=Delayed()), amax=1.0, scale_enc=1.0)


@pytest.mark.parametrize("amax", [np.nan, -1.0, -np.inf])
def test_amaxes_that_are_no_maximum(amax):
    with pytest.raises(InvalidValueError, match=r"amax: got .*needed values >= 0, not NaN"):
        quantize(X, "nvfp4", amax=amax)
    with pytest.raises(InvalidValueError, match=r"amax: got"):
        quantize(X, NVFP4_ROW, amax=np.float32([[1], [1], [1], [1], [amax], [1]]))


def test_numbers_beyond_all_floats():
    with pytest.raises(InvalidValueError, match=r"amax: got an integer beyond"):
        quantize(X, "nvfp4", amax=10**400)
    with pytest.raises(InvalidValueError, match=r"scale_enc: got an integer beyond"):
        quantize(X, Cast("fp8_tensor", scaling=Delayed()), scale_enc=10**400)


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [
        ("nvfp4", (6, 1)),
        ("nvfp4", (2,)),
        ("fp8_tensor", (6, 1)),
        ("nvfp4_row", ()),
        ("nvfp4_row", (6,)),
        ("nvfp4_row", (5, 1)),
    ],
)
def test_amaxes_of_a_wrong_shape(fmt, shape):
    with pytest.raises(InvalidValueError, match=rf"amax: got shape \({', '.join(map(str, shape))}"):
        quantize(X, fmt, amax=np.ones(shape, np.float32))


@pytest.mark.parametrize("fmt", ["fp8_tensor", "nvfp4"])
def test_an_amax_of_one_entry_is_a_scalar(fmt):
    given, scalar = (quantize(X, fmt, amax=np.full(shape, 8, np.float32)) for shape in ((1,), ()))
    assert np.array_equal(given.codes, scalar.codes)
    assert given.scale.shape == scalar.scale.shape
    assert np.array_equal(given.scale, scalar.scale)


@pytest.mark.parametrize("amax", ["1", True, [1, 2], 1j, np.int32([1])])
def test_amaxes_of_a_wrong_type(amax):
    with pytest.raises(InvalidTypeError, match="amax: got"):
        quantize(X, "nvfp4", amax=amax)


@pytest.mark.parametrize("scale_enc", [0.25, np.float32(0.25), np.asarray(0.25), np.float32([0.25])])
def test_scale_enc_of_delayed_scaling(scale_enc):
    q = quantize(X, Cast("fp8_tensor", scaling=Delayed()), scale_enc=scale_enc)
    assert q.scale == 4
    assert np.array_equal(q.codes, formats.encode(X * np.float32(0.25), E4M3))


def test_scale_enc_is_given_exactly_with_delayed_scaling():
    with pytest.raises(InvalidValueError, match=r"scale_enc: got None.*The first step uses 1.0"):
        quantize(X, Cast("fp8_tensor", scaling=Delayed()))
    with pytest.raises(InvalidValueError, match=r"scale_enc: got a value.*Leave it out"):
        quantize(X, "fp8_tensor", scale_enc=1.0)


@pytest.mark.parametrize("scale_enc", [0.0, -1.0, np.nan, np.inf, np.ones(2, np.float32)])
def test_scale_encs_that_are_refused(scale_enc):
    with pytest.raises(InvalidValueError, match=r"scale_enc: got .*needed one positive finite float32"):
        quantize(X, Cast("fp8_tensor", scaling=Delayed()), scale_enc=scale_enc)


# --- Hadamard


def test_hadamard_pads_the_contraction_axis_and_dequantize_crops():
    x = np.random.default_rng(5).standard_normal((4, 50)).astype(np.float32)
    q = quantize(x, Cast("nvfp4", hadamard=Hadamard()))
    assert (q.shape, q.length, q.codes.shape, q.scale.shape) == ((4, 50), 64, (4, 32), (4, 4))
    assert q.hadamard == Hadamard()
    assert dequantize(q).shape == (4, 50)
    assert quantize(np.zeros((3, 0), np.float32), Cast("nvfp4", hadamard=Hadamard())).codes.shape == (3, 0)


@pytest.mark.parametrize("sign_mask", [0xD7E8, 0, 0xFFFF, 1])
def test_the_inverse_transform_undoes_the_transform(sign_mask):
    x = np.random.default_rng(6).standard_normal((5, 64)).astype(np.float32)
    q = quantize(x, Cast("fp8_row", "amax", hadamard=Hadamard(16, sign_mask)))
    # FP8 rounding: 2^-4 relative per element at most; the transform spreads it over its group of 16.
    assert np.abs(dequantize(q) - x).max() < 4 * np.abs(x).max() / 16


@pytest.mark.parametrize("shape", [(), (1,), (33,), (3, 5), (2, 3, 17), (0,), (0, 7), (3, 0), (2, 0, 4)], ids=str)
@pytest.mark.parametrize(
    "fmt", [fmt for fmt in FORMATS.values() if not fmt.is_per_tensor and fmt.tensor_scale != "row"], ids=str
)
def test_hadamard_of_every_shape(fmt, shape):
    x = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    for axis in (-1, -2) if len(shape) == 2 else (-1,):
        q = quantize(x, Cast(fmt, hadamard=Hadamard()), axis=axis)
        assert q.length % 16 == 0
        assert dequantize(q).shape == shape
        # Codes of 4 bits and up keep about a fifth of the norm of a group at worst.
        assert np.linalg.norm(dequantize(q) - x) <= 0.25 * np.linalg.norm(x)


def test_hadamard_keeps_the_amax_of_the_transformed_operand():
    x = np.zeros((1, 16), np.float32)
    x[0, 0] = 16
    q = quantize(x, Cast("nvfp4", hadamard=Hadamard()))
    assert q.tensor_scale == np.float32(4) / np.float32(2688)


# --- the object


def test_repr_names_the_format_and_shapes_only():
    text = repr(quantize(np.ones((300, 300), np.float32), Cast("nvfp4", hadamard=Hadamard())))
    assert text == (
        "Quantized(nvfp4, shape=(300, 300), axis=1, codes=(300, 152), scale=uint8(300, 19), Hadamard(16, 0xd7e8))"
    )


def test_dequantize_refuses_what_is_not_quantized():
    with pytest.raises(InvalidTypeError, match=r"q: got ndarray, needed a Quantized. Call reference.quantize"):
        dequantize(X)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": np.zeros((6, 40), np.uint8)}, r"codes: got uint8\[6, 40\], needed uint8\[6, 20\]"),
        ({"codes": np.zeros((6, 20), np.int8)}, r"codes: got int8"),
        ({"codes": [[0] * 20] * 6}, r"codes: got list, needed a NumPy array"),
        ({"scale": np.zeros((6, 2), np.uint8)}, r"scale: got uint8\[6, 2\], needed uint8\[6, 3\]"),
        ({"scale": np.zeros((6, 3), np.float32)}, r"scale: got float32"),
        ({"tensor_scale": np.ones((1,), np.float32)}, r"tensor_scale: got float32\[1\], needed float32\[\]"),
        ({"shape": (6, 41)}, r"codes: got"),
        ({"axis": 0}, r"codes: got"),
        ({"format": formats.MXFP4}, r"scale: got uint8\[6, 3\], needed uint8\[6, 2\]"),
    ],
)  # fmt: skip
def test_a_quantized_checks_its_own_shapes(changes, message):
    with pytest.raises(MicrofloatError, match=message):
        dataclasses.replace(quantize(X, "nvfp4"), **changes)


def test_a_tensor_scale_where_the_format_has_none():
    with pytest.raises(
        InvalidValueError, match="tensor_scale: got an array, needed None, as mxfp8 has no tensor scale"
    ):
        dataclasses.replace(quantize(X, "mxfp8"), tensor_scale=np.float32(1).reshape(()))


# features Q3
@every_format
def test_a_pair_of_axes_gives_what_two_calls_give(fmt):
    row, column = quantize(X, fmt, axis=(-1, -2))
    assert same(row, quantize(X, fmt))
    assert same(column, quantize(X, fmt, axis=-2))
    noisy = Cast(fmt, rounding="stochastic")
    second, first = quantize(X, (noisy, fmt), axis=(-2, -1), seed=4, stream=(5, 0))
    assert same(first, row)
    assert same(second, quantize(X, noisy, axis=-2, seed=4, stream=5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reference.philox((1, 2, 3), (0, 0)), r"counter: got \(1, 2, 3\), needed 4 words"),
        (lambda: reference.philox((1, 2, 3, 4), (0,)), r"key: got \(0,\), needed 2 words"),
        (lambda: reference.philox((1, 2, 3, 4.5), (0, 0)), "counter: got .*, each an integer or an array"),
        (lambda: reference.random_bytes(-1, 16, 0), "rows: got -1"),
        (lambda: reference.random_bytes(1, 16.0, 0), "cols: got float"),
        (lambda: reference.hadamard_transform(np.ones((2, 16), np.float32), 16), "hadamard: got int"),
        (lambda: reference.hadamard_transform(np.ones(16, np.float32), Hadamard()), r"x_RC: got shape \(16,\)"),
        (lambda: reference.hadamard_transform(np.ones((2, 16), np.int32), Hadamard()), "x: got int32"),
        (lambda: reference.hadamard_inverse(np.ones((2, 17), np.float32), Hadamard()), "x_RC: got 17 columns"),
    ],
)
def test_wrong_arguments_of_the_stream_and_the_transform_are_named(call, message):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
        call()
