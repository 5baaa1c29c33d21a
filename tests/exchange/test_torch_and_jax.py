"""Quantized tensors of torch and JAX are the same bytes: made alike, handed over either way, read from one file."""

import ml_dtypes
import numpy as np
import pytest

from microfloat.formats import FORMATS
from microfloat.recipes import Cast, Hadamard

torch = pytest.importorskip("torch", reason="torch is not installed")
jax = pytest.importorskip("jax", reason="jax is not installed")

import microfloat.jax as mj  # noqa: E402
import microfloat.torch as mf  # noqa: E402
from tests.jax.effort import effort_of  # noqa: E402

X = np.random.default_rng(31).standard_normal((20, 90)).astype(np.float32)
SEED = 0x89ABCDEF01234567
FIELDS = ("codes", "scale", "tensor_scale")
CASES = {
    **{name: (Cast(name), -1) for name in FORMATS},
    "transposed": (Cast("nvfp4_2d"), -2),
    "hadamard, stochastic": (Cast("nvfp4", rounding="stochastic", hadamard=Hadamard()), -1),
}


@pytest.fixture(autouse=True)
def compile_effort(request):
    with effort_of(request.node):
        yield


def bytes_of(array):
    """NumPy of either framework's part; float8 codes as their bytes."""
    if isinstance(array, torch.Tensor):
        return (array.view(torch.uint8) if "float8" in str(array.dtype) else array).numpy()
    array = np.asarray(array)
    return array.view(np.uint8) if "float8" in str(array.dtype) else array


def quantized(case):
    cast, axis = CASES[case]
    given = {"axis": axis} | ({"seed": SEED, "stream": 4} if cast.is_stochastic else {})
    return mf.quantize(torch.from_numpy(X), cast, **given), mj.quantize(X, cast, **given)


@pytest.mark.slow_cases(
    "further formats of a checked exchange", all_but=("hadamard, stochastic", "transposed", "mxfp6_e2m3")
)
@pytest.mark.parametrize("case", CASES)
def test_exchange(case):
    """Parts of one make the other; both stand for the same numbers."""
    theirs, ours = quantized(case)
    for field in FIELDS:
        one, other = getattr(theirs, field), getattr(ours, field)
        assert (one is None) == (other is None)
        if one is not None:
            assert bytes_of(one).tobytes() == bytes_of(other).tobytes(), field
            assert tuple(one.shape) == tuple(other.shape)
    parts = [None if getattr(theirs, field) is None else bytes_of(getattr(theirs, field)) for field in FIELDS]
    cast, axis = CASES[case]
    described = {"axis": axis, "shape": X.shape, "hadamard": cast.hadamard}
    into_jax = mj.QuantizedArray.from_parts(*parts, cast.format, **described)
    assert jax.tree.structure(into_jax) == jax.tree.structure(ours)
    np.testing.assert_array_equal(np.asarray(into_jax.dequantize()), np.asarray(ours.dequantize()))
    codes, *scales = (None if part is None else torch.from_numpy(bytes_of(part).copy()) for part in
                      (getattr(ours, field) for field in FIELDS))  # fmt: skip
    into_torch = mf.QuantizedTensor.from_parts(codes.view(theirs.codes.dtype), *scales, cast.format, **described)
    assert torch.equal(into_torch.dequantize(), theirs.dequantize())
    if cast.hadamard is None:
        np.testing.assert_array_equal(into_torch.dequantize().numpy(), np.asarray(ours.dequantize()))


def test_bfloat16_and_matmul():
    """The dtype travels in the description; products agree to the rounding of the output."""
    x = X.astype(ml_dtypes.bfloat16)
    ours = mj.quantize(x, "mxfp8")
    theirs = mf.QuantizedTensor.from_parts(
        torch.from_numpy(bytes_of(ours.codes).copy()).view(torch.float8_e4m3fn),
        torch.from_numpy(bytes_of(ours.scale).copy()), None,
        "mxfp8", shape=x.shape, dtype=torch.bfloat16,
    )  # fmt: skip
    y, expected = mj.scaled_matmul(ours, ours), mf.scaled_matmul(theirs, theirs)
    assert str(y.dtype) == "bfloat16"
    difference = np.abs(np.asarray(y, np.float32) - expected.float().numpy())
    assert (difference <= 2.0**-7 * np.abs(expected.float().numpy()) + 1e-3).all()


def test_files_of_one_read_by_the_other(tmp_path):
    save = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed").save_file
    from safetensors.torch import load_file

    ours = mj.quantize(X, "nvfp4")
    save({field: bytes_of(getattr(ours, field)) for field in FIELDS}, tmp_path / "x.safetensors")
    parts = load_file(tmp_path / "x.safetensors")
    theirs = mf.QuantizedTensor.from_parts(*(parts[field] for field in FIELDS), "nvfp4", shape=X.shape)
    assert torch.equal(theirs.dequantize(), mf.quantize(torch.from_numpy(X), "nvfp4").dequantize())
