"""quantize, dequantize and scaled_matmul of microfloat.torch: arguments, errors, settings that must not matter."""

import concurrent.futures
import contextlib
import inspect

import numpy as np
import pytest
import torch

import microfloat.torch as mf
from microfloat import formats, reference
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from microfloat.formats import FORMATS, ScaledFormat
from microfloat.recipes import Cast, Current, Delayed, Hadamard, MXFP8BlockScaling
from microfloat.torch import backends
from microfloat.torch import reference as plain
from microfloat.torch.reference import _grid, _values
from microfloat.torch.tensor import seeds
from tests.torch.tensor.format_cases import every_format

STOCHASTIC = Cast("mxfp8", rounding="stochastic")
X = torch.linspace(-3, 5, 6 * 40).reshape(6, 40)
PARTS = ("codes", "scale", "tensor_scale")


def same(a, b):
    return torch.equal(a, b)


# ---- inputs


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8],
    ids=str,
)  # fmt: skip
def test_other_dtypes_are_refused_by_name(dtype):
    """Features Q11."""
    with pytest.raises(
        InvalidTypeError, match=rf"x: got {dtype}, needed torch.float32, torch.bfloat16 or torch.float16"
    ):
        mf.quantize(torch.zeros(4, 32, dtype=dtype), "mxfp8")


@pytest.mark.parametrize("x", [np.zeros((2, 32), np.float32), [[1.0]], 1.0, None], ids=lambda x: type(x).__name__)
def test_what_is_no_tensor_is_refused(x):
    with pytest.raises(InvalidTypeError, match=r"x: got \w+, needed a torch.Tensor. Convert it with torch.as_tensor"):
        mf.quantize(x, "mxfp8")


def test_quantized_and_sparse_tensors_are_refused():
    with pytest.raises(InvalidTypeError, match=r"x: got a QuantizedTensor \(mxfp8\).*Call x.dequantize\(\) first"):
        mf.quantize(mf.quantize(X, "mxfp8"), "mxfp8")
    with pytest.raises(InvalidTypeError, match=r"layout torch.sparse_coo.*to_dense"):
        mf.quantize(X.to_sparse(), "mxfp8")


def test_casts_that_are_none():
    with pytest.raises(InvalidValueError, match=r"cast: got 'mxfp9'.*Did you mean 'mxfp8"):
        mf.quantize(X, "mxfp9")
    with pytest.raises(InvalidTypeError, match=r"take one, for example recipe\.fprop\.lhs"):
        mf.quantize(X, MXFP8BlockScaling())


@pytest.mark.parametrize("cast", ["mxfp8", formats.MXFP8, Cast("mxfp8"), Cast(formats.MXFP8, "rceil")], ids=repr)
def test_a_cast_a_format_or_a_name(cast):
    assert same(mf.quantize(X, cast), mf.quantize(X, "mxfp8"))


@every_format
def test_strides_do_not_matter_and_inputs_are_not_changed(fmt):
    base = torch.randn(140, 150, generator=torch.Generator().manual_seed(0))
    before = base.clone()
    views = {
        "transposed": base.t(), "sliced": base[3:90:2, 1::3], "expanded": base[:1].expand(5, 150),
        "column": base[:, 7:8], "overlapping": base.as_strided((20, 30), (1, 2)),
        "offset": base.flatten()[1:4001].view(80, 50), "negated": torch.complex(base, base).conj().imag,
    }  # fmt: skip
    for name, view in views.items():
        for axis in (-1, -2):
            for dtype in (torch.float32, torch.bfloat16):
                narrow = view.to(dtype) if dtype != torch.float32 else view
                expected = mf.quantize(narrow.resolve_neg().contiguous(), fmt, axis=axis)
                assert same(mf.quantize(narrow, fmt, axis=axis), expected), (name, axis, dtype)
    assert torch.equal(base, before)


def test_requires_grad_is_left_behind():
    x = X.clone().requires_grad_()
    q = mf.quantize(x, "nvfp4")
    assert not q.requires_grad
    assert not q.dequantize().requires_grad
    assert not mf.scaled_matmul(q, q).requires_grad


def test_large_rows_and_many_rows_are_cut_into_chunks_without_a_seam(monkeypatch):
    """More elements than one chunk, in every direction; random bytes, tiles and packing continue across the cut."""
    monkeypatch.setattr(_grid, "chunk_budget", lambda device: 1 << 16)
    generator = torch.Generator().manual_seed(1)
    casts = [Cast("nvfp4", rounding="stochastic"), *map(Cast, ("nvfp4_2d", "nvfp4_row", "mxfp8", "fp8_row"))]
    for shape in ((3, 90_001), (1201, 130), (400, 400)):
        x = torch.randn(shape, generator=generator).bfloat16()
        for cast in (*casts, Cast("fp8_128x128")):
            for axis in (-1, -2):
                q = mf.quantize(x, cast, axis=axis, seed=5)
                expected = reference.quantize(x.float().numpy(), cast, axis=axis, seed=5)
                assert np.array_equal(q.codes.view(torch.uint8).numpy(), expected.codes), (shape, cast, axis)
                assert np.array_equal(q.scale.numpy(), expected.scale), (shape, cast, axis)
                assert np.array_equal(q.dequantize(torch.float32).numpy(), reference.dequantize(expected))


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


FOUR_OVER_SIX = (Cast("nvfp4", "four_over_six"), Cast("nvfp4_2d", "four_over_six"))
TRANSFORMED = Cast("nvfp4", None, "stochastic", Hadamard())


@pytest.mark.parametrize(
    "cast", [*map(Cast, FORMATS.values()), *FOUR_OVER_SIX, TRANSFORMED], ids=lambda cast: cast.format.name
)
@pytest.mark.parametrize("across", [False, True])
def test_both_operands_of_a_matrix_are_those_of_two_casts(cast, across):
    """Whichever way the matrix lies in memory, the operands lie as it does and hold the same bytes."""
    x = torch.randn(70, 131, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = x.t().contiguous().t() if across else x
    options = {"seed": torch.tensor([5, 6])} if cast.is_stochastic else {}
    tolerance = 0.0 if cast.hadamard is None else 1e-5
    for operand, transposed in zip(plain.quantize_both(x, cast, cast, **options), (0, 1), strict=True):
        alone = plain.quantize(x, cast, transposed=bool(transposed), **options)
        assert alone.codes.is_contiguous()
        for got, wanted in ((getattr(one, name) for one in (operand, alone)) for name in PARTS):
            assert (got is None) == (wanted is None)
            assert got is None or (got.shape == wanted.shape and torch.equal(raw(got), raw(wanted)))
        values = (plain.dequantize(either) for either in (operand, alone))
        assert torch.allclose(*values, rtol=0, atol=tolerance)


# ---- axes


@pytest.mark.parametrize(
    ("shape", "axis", "normal"),
    [
        ((6, 40), -1, 1),
        ((6, 40), 1, 1),
        ((6, 40), -2, 0),
        ((6, 40), 0, 0),
        ((40,), 0, 0),
        ((), -1, 0),
        ((2, 3, 40), 2, 2),
    ],
)
def test_axis(shape, axis, normal):
    x = torch.ones(shape)
    q = mf.quantize(x, "mxfp8", axis=axis)
    assert (q.axis, tuple(q.shape)) == (normal, shape)
    assert torch.equal(q.dequantize(), x)


@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 40), 2), ((6, 40), -3), ((2, 3, 40), -2), ((2, 3, 40), 0), ((40,), -2), ((), 1)]
)
def test_axes_that_are_refused(shape, axis):
    with pytest.raises(
        InvalidValueError, match=rf"axis: got {axis} for an array of {len(shape)} axes, needed -1, or -2"
    ):
        mf.quantize(torch.ones(shape), "mxfp8", axis=axis)


def test_the_remedy_for_an_axis_in_the_middle_quantizes_it():
    x = torch.randn(2, 32, 3)
    with pytest.raises(InvalidValueError, match=r"Make it the last axis first, x\.swapaxes\(-2, -1\)"):
        mf.quantize(x, "mxfp8", axis=-2)
    assert mf.quantize(x.swapaxes(-2, -1), "mxfp8").scale.shape == (2, 3, 1)


@pytest.mark.parametrize("axis", [True, 1.0, "last", None])
def test_axes_of_a_wrong_type(axis):
    with pytest.raises(InvalidTypeError, match="axis: got"):
        mf.quantize(X, "mxfp8", axis=axis)


# ---- seeds


def test_seeds_of_every_form():
    base = mf.quantize(X, STOCHASTIC, seed=3 | 5 << 32)
    for seed in (
        (3, 5), [3, 5], torch.tensor([3, 5]), seeds.seed_words(3 | 5 << 32, "cpu"), np.uint64(3 | 5 << 32),
        torch.tensor([3, 5], dtype=torch.uint32), np.array([3, 5], np.uint32), np.array([3, 5], np.int64),
    ):  # fmt: skip
        assert same(mf.quantize(X, STOCHASTIC, seed=seed), base)
    assert not same(mf.quantize(X, STOCHASTIC, seed=4), base)
    assert not same(mf.quantize(X, STOCHASTIC, seed=3 | 5 << 32, stream=1), base)


@pytest.mark.parametrize(
    "seed", [-1, 2**64, (1,), (1, 2, 3), (-1, 0), (0, 2**32), 1.5, True, "seed", (1.5, 2), torch.tensor([-1, 0]),
             torch.tensor([0, 1 << 32]), torch.tensor([1, 2, 3]), torch.tensor([[1, 2]]), np.array([[1, 2]]),
             np.array([1.0, 2.0]), np.array([1, 2, 3], np.uint32)], ids=repr
)  # fmt: skip
def test_seeds_that_are_refused(seed):
    with pytest.raises(InvalidValueError, match="seed: got"):
        mf.quantize(X, STOCHASTIC, seed=seed)


def test_seeds_of_a_wrong_dtype():
    for dtype in (torch.int32, torch.float32):
        with pytest.raises(InvalidValueError, match=r"seed: got a tensor of torch\.\w+, needed .* as int64"):
            mf.quantize(X, STOCHASTIC, seed=torch.ones(2, dtype=dtype))


def test_without_a_seed_the_default_generator_decides():
    torch.manual_seed(11)
    first, second = mf.quantize(X, STOCHASTIC), mf.quantize(X, STOCHASTIC)
    assert not same(first, second)
    torch.manual_seed(11)
    assert same(mf.quantize(X, STOCHASTIC), first)
    torch.manual_seed(11)
    assert same(mf.quantize(X, STOCHASTIC, seed=seeds.draw_seed("cpu")), first)


def test_nearest_draws_nothing_and_ignores_seed():
    torch.manual_seed(12)
    state = torch.get_rng_state()
    assert same(mf.quantize(X, "mxfp8", seed="nonsense"), mf.quantize(X, "mxfp8"))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("stream", [-1, 2**32, 1.0, None, True])
def test_streams_that_are_refused(stream):
    with pytest.raises(InvalidValueError, match="stream: got"):
        mf.quantize(X, STOCHASTIC, seed=1, stream=stream)


# ---- amax and scale_enc


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_tensor_e5m2", "nvfp4", "nvfp4_2d"])
@pytest.mark.parametrize(
    "kind",
    [
        float,
        int,
        np.float32,
        torch.tensor,
        lambda v: torch.tensor(v, dtype=torch.bfloat16),
        lambda v: torch.tensor([v]),
    ],
)
def test_a_given_amax(name, kind):
    q, expected = mf.quantize(X, name, amax=kind(8.0)), reference.quantize(X.numpy(), name, amax=8.0)
    assert np.array_equal(q.codes.view(torch.uint8).numpy(), expected.codes)
    assert np.array_equal(q.scale.numpy(), expected.scale)


def test_an_amax_per_row():
    amax = torch.tensor([[1.0], [2], [4], [0], [float("inf")], [16]])
    q = mf.quantize(X, "nvfp4_row", amax=amax)
    for row in range(6):
        alone = mf.quantize(X[row : row + 1], "nvfp4", amax=amax[row, 0])
        assert torch.equal(q.codes[row], alone.codes[0])
        assert q.tensor_scale[row, 0] == alone.tensor_scale


@pytest.mark.parametrize(
    "cast",
    ["mxfp8", "fp8_row", "fp8_1x128", Cast("nvfp4", "one_level_e4m3"), Cast("fp8_tensor", scaling=Delayed())],
    ids=str,
)
def test_amax_where_there_is_none_to_replace(cast):
    with pytest.raises(InvalidValueError, match=r"amax: got a value with .*needed None"):
        mf.quantize(X, cast, amax=1.0, scale_enc=1.0 if isinstance(cast, Cast) and cast.format.is_per_tensor else None)


@pytest.mark.parametrize("amax", [float("nan"), -1.0, torch.tensor(float("nan"))])
def test_amaxes_that_are_no_maximum(amax):
    with pytest.raises(InvalidValueError, match=r"amax: got .*needed values >= 0, not NaN"):
        mf.quantize(X, "nvfp4", amax=amax)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("nvfp4", (6, 1)), ("fp8_tensor", (1, 1)), ("nvfp4_row", ()), ("nvfp4_row", (6,)), ("nvfp4_row", (5, 1))],
)
def test_amaxes_of_a_wrong_shape(name, shape):
    with pytest.raises(InvalidValueError, match=rf"amax: got shape \({', '.join(map(str, shape))}"):
        mf.quantize(X, name, amax=torch.ones(shape))


@pytest.mark.parametrize("amax", ["1", True, [1.0], 1j, torch.tensor(1)], ids=repr)
def test_amaxes_of_a_wrong_type(amax):
    with pytest.raises(InvalidTypeError, match="amax: got"):
        mf.quantize(X, "nvfp4", amax=amax)


def test_scale_enc_is_given_exactly_with_delayed_scaling():
    delayed = Cast("fp8_tensor", scaling=Delayed())
    for scale_enc in (0.25, torch.tensor(0.25), torch.tensor([0.25]), np.float32(0.25)):
        assert mf.quantize(X, delayed, scale_enc=scale_enc).scale == 4
    with pytest.raises(InvalidValueError, match=r"scale_enc: got None.*The first step uses 1.0"):
        mf.quantize(X, delayed)
    with pytest.raises(InvalidValueError, match=r"scale_enc: got a value.*Leave it out"):
        mf.quantize(X, "fp8_tensor", scale_enc=1.0)
    for bad in (0.0, -1.0, float("nan"), float("inf"), torch.ones(2)):
        with pytest.raises(InvalidValueError, match=r"scale_enc: got .*needed one positive finite float32"):
            mf.quantize(X, delayed, scale_enc=bad)


# ---- backends


def test_backends_by_name():
    """Features P12."""
    assert backends.NAMES == ("auto", "reference", "triton", "native")
    cpu = torch.device("cpu")
    assert backends.choose("auto", cpu) is backends.choose("reference", cpu)
    available, reason = backends.support("triton", cpu)
    assert not available
    assert "triton" in reason
    with pytest.raises(NotSupportedError, match=rf"backend='triton': {reason}. Use backend='auto' or 'reference'"):
        mf.quantize(X, "mxfp8", backend="triton")
    with pytest.raises(NotSupportedError, match="backend='native'"):
        mf.scaled_matmul(mf.quantize(X, "mxfp8"), mf.quantize(X, "mxfp8"), backend="native")
    with pytest.raises(InvalidValueError, match=r"backend: got 'tritn'.*Did you mean 'triton'"):
        mf.quantize(X, "mxfp8", backend="tritn")
    with pytest.raises(InvalidTypeError, match="backend: got NoneType"):
        mf.quantize(X, "mxfp8", backend=None)


def test_signatures_are_the_contract():
    """Features Q1."""
    parameters = inspect.signature(mf.quantize).parameters
    assert list(parameters) == ["x", "cast", "axis", "seed", "stream", "amax", "scale_enc", "backend"]
    parameters = inspect.signature(mf.scaled_matmul).parameters
    assert list(parameters) == ["a", "b", "bias", "out_dtype", "accumulate", "backend", "out", "beta"]
    assert parameters["accumulate"].default == "split"


# ---- dequantize


@every_format
def test_dequantize_dtypes(fmt):
    q = mf.quantize(X.bfloat16(), fmt)
    assert q.dequantize().dtype == torch.bfloat16
    full = mf.dequantize(q, torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(mf.dequantize(q, dtype), full.to(dtype))


def test_dequantize_refuses_other_things():
    with pytest.raises(InvalidTypeError, match=r"q: got a tensor of torch.float32, needed a QuantizedTensor. Call"):
        mf.dequantize(X)
    with pytest.raises(InvalidTypeError, match=r"dtype: got torch.int32"):
        mf.dequantize(mf.quantize(X, "mxfp8"), torch.int32)


# ---- scaled_matmul


def test_operands_that_cannot_be_multiplied():
    q = mf.quantize(X, "mxfp8")
    with pytest.raises(InvalidTypeError, match=r"b: got a tensor of torch.float32, needed a QuantizedTensor"):
        mf.scaled_matmul(q, X)
    with pytest.raises(InvalidTypeError, match=r"a: got int, needed a QuantizedTensor"):
        mf.scaled_matmul(3, q)
    with pytest.raises(InvalidValueError, match=r"b: got contraction length 32 .*needed 40, as a has"):
        mf.scaled_matmul(q, mf.quantize(torch.ones(3, 32), "mxfp8"))
    with pytest.raises(InvalidValueError, match=r"b: got contraction length 6 \(shape \(6, 40\), axis 0\)"):
        mf.scaled_matmul(q, mf.quantize(X, "mxfp8", axis=-2))
    with pytest.raises(InvalidValueError, match=r"b: got nvfp4 \(E4M3 scales\) against mxfp8 \(E8M0 scales\) of a"):
        mf.scaled_matmul(q, mf.quantize(X, "nvfp4"))
    with pytest.raises(InvalidValueError, match=r"b: got hadamard Hadamard\(16, 0xd7e8\) against None of a"):
        mf.scaled_matmul(q, mf.quantize(X, Cast("mxfp8", hadamard=Hadamard())))
    with pytest.raises(InvalidValueError, match=r"hadamard Hadamard\(16, 0x0000\) against Hadamard\(16, 0xd7e8\)"):
        mf.scaled_matmul(
            mf.quantize(X, Cast("mxfp8", hadamard=Hadamard())), mf.quantize(X, Cast("mxfp8", hadamard=Hadamard(16, 0)))
        )


def test_arguments_of_scaled_matmul():
    a, b = mf.quantize(X.bfloat16(), "mxfp8"), mf.quantize(X, "mxfp8")
    assert mf.scaled_matmul(a, b).dtype == torch.bfloat16
    assert mf.scaled_matmul(b, a).dtype == torch.float32
    assert mf.scaled_matmul(a, b, out_dtype=torch.float16).dtype == torch.float16
    with pytest.raises(InvalidTypeError, match=r"out_dtype: got torch\.float64"):
        mf.scaled_matmul(a, b, out_dtype=torch.float64)
    with pytest.raises(InvalidValueError, match=r"accumulate: got 'splt'.*Did you mean 'split'"):
        mf.scaled_matmul(a, b, accumulate="splt")
    with pytest.raises(InvalidValueError, match=r"bias: got shape \(5,\), needed shape \(6,\)"):
        mf.scaled_matmul(a, b, bias=torch.ones(5))
    with pytest.raises(InvalidTypeError, match=r"bias: got torch\.int64"):
        mf.scaled_matmul(a, b, bias=torch.ones(6, dtype=torch.int64))
    with pytest.raises(InvalidTypeError, match="bias: got list"):
        mf.scaled_matmul(a, b, bias=[1.0] * 6)


@pytest.mark.parametrize("accumulate", ["fast", "split", "exact"])
def test_bias_is_added_before_the_only_rounding(accumulate):
    """An accumulator of exactly 256 + 1: 257 is no bfloat16, 257 + 1 is; rounding twice would give 256 or 260."""
    a = torch.zeros(1, 32)
    a[0, :2] = torch.tensor([16.0, 1.0])
    q = mf.quantize(a, "mxfp8")
    assert mf.scaled_matmul(q, q, out_dtype=torch.float32, accumulate=accumulate) == 257
    assert mf.scaled_matmul(q, q, out_dtype=torch.bfloat16, accumulate=accumulate) == 256
    bias = torch.tensor([1.0], dtype=torch.bfloat16)
    assert mf.scaled_matmul(q, q, bias=bias, out_dtype=torch.bfloat16, accumulate=accumulate) == 258


@every_format
@pytest.mark.parametrize("scale", [1.0, 2.0**-66, 2.0**-100])
def test_a_cpus_bfloat16_units_give_the_same_products(fmt, scale, monkeypatch):
    """Small integers, whose sums are exact in any order; scaled down, products or sums are subnormal numbers."""
    generator = torch.Generator().manual_seed(5)
    a, b = (mf.quantize(torch.randint(-4, 5, (33, 96), generator=generator) * scale, fmt) for _ in range(2))
    products = []
    for units in (False, True):
        monkeypatch.setattr(_values, "_has_bfloat16_units", lambda units=units: units)
        products.append(mf.scaled_matmul(a, b, out_dtype=torch.bfloat16))
    assert torch.equal(*products)


def test_bfloat16_units_that_spread_a_nan_are_not_believed(monkeypatch):
    """As oneDNN's product does on a CPU with AMX: to the row before, found on an Intel Xeon."""
    monkeypatch.setattr(_values, "_has_bfloat16_units", lambda: True)
    x, multiply = torch.randn(8, 32), torch.addmm
    x[3, 5] = float("nan")

    def spread(*arguments, **options):
        product = multiply(*arguments, **options)
        return torch.where(product.roll(-1, 0).isnan(), float("nan"), product)

    monkeypatch.setattr(torch, "addmm", spread)
    operands = [mf.quantize(values, Cast("fp8_tensor"), amax=4.0).to_operand() for values in (x, torch.randn(8, 32))]
    y = _values.scaled_matmul(*operands, out_dtype=torch.bfloat16)
    assert y.isnan().any(1).tolist() == [row == 3 for row in range(8)]


def test_bfloat16_units_are_used_where_they_give_the_same(monkeypatch):
    monkeypatch.setattr(_values, "_has_bfloat16_units", lambda: True)

    def used(*casts):
        return _values._bfloat16_product(*(mf.quantize(X, cast).to_operand() for cast in casts)) is not None

    assert used("fp8_tensor", "fp8_tensor_e5m2")
    assert used("mxfp8", "mxfp4")
    assert used("nvfp4", "nvfp4_2d")
    for cast in ("fp8_row", "fp8_1x128", "fp8_128x128", "nvfp4_row"):
        assert not used(cast, cast)


def test_operand_form_of_more_axes():
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(2))
    y = mf.scaled_matmul(mf.quantize(x, "mxfp8"), mf.quantize(X, "mxfp8"))
    assert y.shape == (6, 6)
    assert torch.equal(y, mf.scaled_matmul(mf.quantize(x.view(6, 40), "mxfp8"), mf.quantize(X, "mxfp8")))


@pytest.fixture
def default_state():
    """torch's process-wide settings, put back whatever a test does to them."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.matmul.fp32_precision = before
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


@every_format
def test_torchs_ambient_settings_change_nothing(fmt, default_state):
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(40, 96, generator=generator), torch.randn(24, 96, generator=generator)

    def run():
        a, b = mf.quantize(x, fmt), mf.quantize(w, fmt)
        return a, b.dequantize(), mf.scaled_matmul(a, b)

    def check(results):
        assert all(torch.equal(left, right) for left, right in zip(results, plain, strict=True))
        assert results[2].dtype == torch.float32

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        check(run())
    with torch.inference_mode():
        check(run())
    torch.set_float32_matmul_precision("medium")
    check(run())
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # the newer way to say it, which the older one cannot read
    check(run())
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    check(run())


def test_epsilon_and_a_users_own_element():
    cast = Cast("fp8_tensor", scaling=Current(amax_epsilon=100.0))
    assert mf.quantize(X, cast).scale == mf.quantize(X, "fp8_tensor", amax=100.0).scale
    wide = formats.ElementFormat("E4M2", 4, 2, bias=7, max=448.0, has_inf=False, has_nan=False)
    for scale, block in ((formats.SCALE_E8M0, (1, 8)), (formats.SCALE_FP32, (1, None)), (formats.SCALE_FP32, (4, 4))):
        mine = ScaledFormat("mine", wide, scale, block)
        q, expected = mf.quantize(X, mine), reference.quantize(X.numpy(), mine)
        assert q.codes.dtype == torch.uint8
        assert np.array_equal(q.codes.numpy(), expected.codes)
        assert np.array_equal(q.dequantize().numpy(), reference.dequantize(expected))


def test_temporaries_belong_to_one_thread():
    """Buffers outlive a call, but are not shared: eight threads at once give what each gives alone."""
    inputs = [torch.randn(200, 300 + 16 * i, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    cast = Cast("nvfp4", rounding="stochastic", hadamard=Hadamard())

    def run(x):
        return [mf.quantize(x, cast, axis=axis, seed=3) for _ in range(5) for axis in (-1, -2)]

    alone = [run(x) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, inputs, timeout=240))
    for results, expected in zip(together, alone, strict=True):
        assert all(same(a, b) for a, b in zip(results, expected, strict=True))


def test_temporaries_of_other_modes_do_not_linger():
    """A thread whose first calls ran in inference mode, or with fake tensors, goes on in eager mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def first_in_inference_mode():
        with torch.inference_mode():
            mf.quantize(X, "nvfp4")
            mf.quantize(X, "mxfp8").dequantize()
        return mf.quantize(X, "nvfp4"), mf.quantize(X, "mxfp8").dequantize()

    def first_with_fake_tensors():
        with FakeTensorMode(), contextlib.suppress(Exception):
            mf.quantize(torch.ones(6, 40), "mxfp6_e2m3").dequantize()
        return mf.quantize(X, "nvfp4"), mf.quantize(X, "mxfp8").dequantize()

    for function in (first_in_inference_mode, first_with_fake_tensors):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            q, values = pool.submit(function).result(240)
        assert same(q, mf.quantize(X, "nvfp4"))
        assert type(values) is torch.Tensor
        assert torch.equal(values, mf.quantize(X, "mxfp8").dequantize())


@every_format
def test_flushing_of_subnormals_is_off_and_switching_it_on_spares_normal_numbers(fmt):
    """torch.set_flush_denormal is a hidden input (docs/numerics.md 1.5): exactness is claimed with the default, off."""
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(4))
    normal = mf.quantize(x, fmt)
    tiny = torch.full((1, 32), 2.0**-140)
    assert tiny.mul(2).ne(0).all()  # the default keeps subnormals
    expected = reference.quantize(tiny.numpy(), fmt)
    assert np.array_equal(mf.quantize(tiny, fmt).codes.view(torch.uint8).numpy(), expected.codes)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert same(mf.quantize(x, fmt), normal)
    finally:
        torch.set_flush_denormal(False)


# ---- both usages of a matrix (features Q3)


DELAYED = Cast("fp8_tensor", scaling=Delayed())
PAIR_CASTS = [
    *(Cast(fmt, rounding=rounding) for fmt in FORMATS.values() for rounding in ("nearest", "stochastic")),
    Cast("nvfp4", hadamard=Hadamard()), Cast("nvfp4", "four_over_six_mae_256"),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cast", PAIR_CASTS, ids=lambda cast: f"{cast.format.name}-{cast.rounding}-{cast.scale_rule}")
def test_a_pair_of_axes_gives_what_two_calls_give(cast, device):
    """One seed and one stream serve both, or one stream each; their memory is apart."""
    x = torch.randn(70, 90, generator=torch.Generator().manual_seed(1)).to(device)
    for axes in ((-1, -2), (-2, -1), [0, 1]):
        for stream in (3, (0, 5)):
            made = mf.quantize(x, cast, axis=axes, seed=9, stream=stream)
            assert type(made) is tuple
            streams = stream if isinstance(stream, tuple) else (stream, stream)
            for q, axis, its_stream in zip(made, axes, streams, strict=True):
                assert same(q, mf.quantize(x, cast, axis=axis, seed=9, stream=its_stream))
    row, column = made
    addresses = {part.untyped_storage().data_ptr() for part in row.parts().values()}
    assert not any(part.untyped_storage().data_ptr() in addresses for part in column.parts().values())
    column.zero_()
    assert same(row, mf.quantize(x, cast, axis=0, seed=9, stream=0))


def test_a_pair_of_casts_and_of_their_inputs():
    pair = mf.quantize(X, ("nvfp4", "mxfp8"), axis=(-1, -2), amax=9.0)
    assert same(pair[0], mf.quantize(X, "nvfp4", amax=9.0))
    assert same(pair[1], mf.quantize(X, "mxfp8", axis=-2))
    amaxes = torch.full((6, 1), 7.0), torch.full((40, 1), 8.0)
    pair = mf.quantize(X, "nvfp4_row", axis=(-1, -2), amax=amaxes)
    assert same(pair[0], mf.quantize(X, "nvfp4_row", amax=amaxes[0]))
    assert same(pair[1], mf.quantize(X, "nvfp4_row", axis=-2, amax=amaxes[1]))
    pair = mf.quantize(X, ("fp8_tensor", DELAYED), axis=(-2, -1), amax=3.0, scale_enc=2.0)
    assert same(pair[0], mf.quantize(X, "fp8_tensor", axis=-2, amax=3.0))
    assert same(pair[1], mf.quantize(X, DELAYED, scale_enc=2.0))
    pair = mf.quantize(X, DELAYED, axis=(-1, -2), scale_enc=(2.0, 4.0))
    assert [q.scale.item() for q in pair] == [0.5, 0.25]
    torch.manual_seed(0)
    pair = mf.quantize(X, STOCHASTIC, axis=(-1, -2))
    torch.manual_seed(0)
    assert same(pair[0], mf.quantize(X, STOCHASTIC))
    torch.manual_seed(0)
    assert same(pair[1], mf.quantize(X, STOCHASTIC, axis=-2))


def test_a_pair_is_one_pass_of_the_backend(monkeypatch):
    calls = []
    for name in ("quantize", "quantize_both"):
        original = getattr(plain, name)
        monkeypatch.setattr(
            plain, name, lambda *a, name=name, original=original, **k: calls.append(name) or original(*a, **k)
        )
    mf.quantize(X, ("nvfp4", "nvfp4_2d"), axis=(-1, -2), amax=2.0)
    assert calls == ["quantize_both"]
    mf.quantize(X, DELAYED, axis=(-1, -2), scale_enc=(1.0, 2.0))  # a pass reads one encode scale
    assert calls == ["quantize_both", "quantize", "quantize"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"axis": (-1, -1)}, InvalidValueError, r"axis: got \(-1, -1\), needed two different axes"),
        ({"axis": (-1, 1)}, InvalidValueError, "two different axes"),
        ({"axis": (-1, 2)}, InvalidValueError, "axis: got 2 for an array of 2 axes"),
        ({"axis": (-1,)}, InvalidTypeError, "axis: got a tuple of 1, needed an int, or a pair"),
        ({"axis": (-1, None)}, InvalidTypeError, "axis: got NoneType"),
        ({"cast": ("mxfp8", "mxfp4")}, InvalidTypeError, r"cast: got tuple.*a pair of axes: axis=\(-1, -2\)"),
        ({"axis": (-1, -2), "cast": ("mxfp8",) * 3}, InvalidValueError, "cast: got 3 values"),
        ({"axis": (-1, -2), "stream": (1, -1)}, InvalidValueError, "stream: got -1"),
        ({"axis": (-1, -2), "amax": 1.0}, InvalidValueError, "amax: got a value with mxfp8"),
        ({"axis": (-1, -2), "scale_enc": 1.0}, InvalidValueError, "scale_enc: got a value"),
        ({"axis": (-1, -2), "cast": ("mxfp8", DELAYED)}, InvalidValueError, "scale_enc: got None"),
        ({"axis": (-1, -2), "cast": ("nvfp4", "mxfp8"), "amax": (None, 1.0)}, InvalidValueError, "amax: got a value"),
        ({"axis": (-1, -2), "x": X[None]}, InvalidValueError, r"axis: got the pair \(-1, -2\) for an array of 3 axes"),
    ],
    ids=str,
)  # fmt: skip
def test_pairs_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        mf.quantize(**{"x": X, "cast": "mxfp8"} | arguments)
    numpy = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    if "stream" not in arguments:  # which the oracle takes modulo 2^32
        with pytest.raises(error, match=message):
            reference.quantize(**{"x": X.numpy(), "cast": "mxfp8"} | numpy)


@pytest.mark.slow_cases(
    "further programs of a checked kind",
    all_but=("*fp8_tensor", "*-nvfp4_2d"),
)
@every_format
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_pairs(fmt, backend):
    torch._dynamo.reset()
    function = torch.compile(lambda x: mf.quantize(x * 1, fmt, axis=(-1, -2)), fullgraph=True, backend=backend)
    for q, expected in zip(function(X), mf.quantize(X, fmt, axis=(-1, -2)), strict=True):
        assert same(q, expected)


# ---- scaled_matmul(out=, beta=)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_tensor", "fp8_1x128"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_that_accumulate(name, dtype, device):
    """``out = round(f32(beta * out) + acc)``: one rounding, of the sum (docs/numerics.md 6)."""
    generator = torch.Generator().manual_seed(2)
    a, b = (mf.quantize(torch.randn(n, 160, generator=generator).to(device), name) for n in (48, 32))
    bias = torch.randn(32, generator=generator).to(device)
    for given in (None, bias):
        total = mf.scaled_matmul(a, b, bias=given, out_dtype=torch.float32)
        for beta in (0, 1, 0.5, -1.25):
            before = torch.randn(48, 32, generator=generator).to(device, dtype)
            expected = (before.float() * beta + total).to(dtype)
            for out in (before.clone(), before.t().contiguous().t(), torch.zeros(50, 40).to(before)[1:49, 3:35]):
                out.copy_(before)
                assert mf.scaled_matmul(a, b, bias=given, out=out, beta=beta) is out
                assert torch.equal(out, expected)
    out = torch.full((48, 32), torch.nan, dtype=dtype, device=device)
    assert torch.equal(mf.scaled_matmul(a, b, out=out, bias=bias), total.to(dtype)), "beta 0 reads nothing"


def test_compiled_products_that_accumulate():
    a, b = mf.quantize(torch.randn(8, 64), "mxfp8"), mf.quantize(torch.randn(16, 64), "mxfp8")

    def function(a, b, out):
        before = out * 1
        first = mf.scaled_matmul(a, b, out=out, beta=1)
        return before, first + 0, mf.scaled_matmul(a, b, out=out, beta=0.5) * 1

    start = torch.randn(8, 16).bfloat16()
    eager, compiled = start.clone(), start.clone()
    torch._dynamo.reset()
    expected, got = function(a, b, eager), torch.compile(function, fullgraph=True, backend="aot_eager")(a, b, compiled)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert torch.equal(compiled, eager)
    assert not torch.equal(compiled, start)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"beta": 1.0}, InvalidValueError, "beta: got 1.0, needed 0 without out"),
        ({"out": torch.zeros(6, 5)}, InvalidValueError, r"out: got shape \(6, 5\), needed shape \(6, 6\)"),
        ({"out": torch.zeros(6, 6, dtype=torch.int32)}, InvalidTypeError, r"out: got torch\.int32"),
        ({"out": torch.zeros(6, 6, dtype=torch.float64)}, InvalidTypeError, r"out: got torch\.float64"),
        ({"out": mf.quantize(torch.zeros(6, 6), "mxfp8")}, InvalidTypeError, "out: got QuantizedTensor"),
        ({"out": [[0.0]]}, InvalidTypeError, "out: got list"),
        ({"out": torch.zeros(6, 6, device="meta")}, InvalidValueError, "out: got a tensor on meta"),
        ({"out": torch.zeros(6, 1).expand(6, 6)}, InvalidValueError, "out: got an expanded tensor"),
        ({"out": torch.zeros(6, 6, requires_grad=True)}, InvalidValueError, r"out: got a tensor that requires grad"),
        ({"out": torch.zeros(6, 6), "out_dtype": torch.bfloat16}, InvalidValueError, "out_dtype: got torch.bfloat16"),
        ({"out": torch.zeros(6, 6), "beta": float("nan")}, InvalidValueError, "beta: got nan"),
        ({"out": torch.zeros(6, 6), "beta": "1"}, InvalidTypeError, "beta: got str"),
    ],
    ids=str,
)  # fmt: skip
def test_outs_that_are_refused(arguments, error, message):
    q = mf.quantize(X, "mxfp8")
    with pytest.raises(error, match=message):
        mf.scaled_matmul(q, q, **arguments)


# --- codes into memory that is there


def same_parts(one, two):
    assert (one.cast, one.axis, one.shape, one.dtype) == (two.cast, two.axis, two.shape, two.dtype)
    parts = zip(one.part_list(), two.part_list(), strict=True)
    return all(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in parts)


@pytest.mark.parametrize("name", ["fp8_tensor", "mxfp8", "nvfp4", "mxfp6_e2m3", "fp8_1x128"])
def test_both_operands_are_written_into_an_existing_pair(name):
    first, second = torch.randn(33, 64), 3 * torch.randn(33, 64)
    pair = mf.quantize(first, name, axis=(-1, -2))
    addresses = [part.data_ptr() for one in pair for part in one.part_list()]
    row = pair[0].codes  # as a kernel or a graph holds them
    wanted = mf.quantize(second, name, axis=(-1, -2))
    for old, new in zip(pair, wanted, strict=True):
        old.copy_(new)
    assert addresses == [part.data_ptr() for one in pair for part in one.part_list()]
    assert all(map(same_parts, pair, wanted))
    assert torch.equal(row.view(torch.uint8), wanted[0].codes.view(torch.uint8))
    for old, axis in zip(pair, (-1, -2), strict=True):
        old.copy_(first)
        assert same_parts(old, mf.quantize(first, name, axis=axis))
