"""QuantizedArray as a pytree, and `scaled_matmul`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import microfloat.jax as mj
from microfloat import reference
from microfloat.recipes import Cast, Hadamard
from tests.jax.compare import relative_error

RNG = np.random.default_rng(9)
A_MK = RNG.standard_normal((24, 70)).astype(np.float32)
B_NK = RNG.standard_normal((17, 70)).astype(np.float32)


def fields(q):
    return (q.format, q.axis, q.axis_size, q.hadamard, q.dtype, q.added_axes, q.shape)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("nvfp4", "0d", "3d"))
@pytest.mark.parametrize(
    ("x", "cast", "axis"),
    [
        (A_MK, Cast("nvfp4"), -1),
        (A_MK, Cast("nvfp4_2d"), -2),
        (A_MK, Cast("mxfp8", hadamard=Hadamard()), -2),
        (A_MK[0], Cast("mxfp4"), -1),
        (np.float32(3), Cast("fp8_tensor"), -1),
        (A_MK.reshape(2, 12, 70).astype(jnp.bfloat16), Cast("fp8_row"), -1),
    ],
    ids=["nvfp4", "tiles", "hadamard", "1d", "0d", "3d"],
)
def test_round_trip_keeps_every_field(x, cast, axis):
    q = mj.quantize(x, cast, axis=axis)
    leaves, structure = jax.tree.flatten(q)
    assert len(leaves) == (3 if q.tensor_scale is not None else 2)
    back = jax.tree.unflatten(structure, leaves)
    through_jit = jax.jit(lambda q: q)(q)
    for other in (back, through_jit, jax.tree.map(lambda leaf: leaf, q)):
        assert fields(other) == fields(q)
        assert all(np.array_equal(one, two) for one, two in zip(leaves, jax.tree.leaves(other), strict=True))
    assert q.shape == np.shape(x)
    assert hash(structure) == hash(jax.tree.structure(through_jit))


def test_slices_by_vmap_and_scan_are_valid():
    stacked = A_MK.reshape(4, 6, 70)
    q = jax.vmap(lambda x: mj.quantize(x, "mxfp8"))(stacked)
    assert q.shape == (4, 6, 70)
    _, through_scan = jax.lax.scan(lambda carry, q: (carry, q.dequantize()), 0, q)
    expected = np.stack([reference.dequantize(reference.quantize(x, "mxfp8")) for x in stacked])
    np.testing.assert_array_equal(np.asarray(through_scan), expected)


def test_nbytes_and_repr():
    q = mj.quantize(A_MK, "nvfp4")
    assert q.nbytes == 24 * 35 + 24 * 5 + 4
    assert repr(q).startswith("QuantizedArray(nvfp4, shape=(24, 70), axis=-1, codes=uint8, scale=uint8")
    assert "QuantizedArray" in repr(jax.tree.map(lambda leaf: None, q))


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("name", ["fp8_row", "fp8_128x128", "mxfp4", "nvfp4_row"])
def test_scaled_matmul(name):
    """A sample of what tests/contract has; here also the exact sum, bit for bit."""
    a, b = mj.quantize(A_MK, name), mj.quantize(B_NK, name)
    expected = reference.scaled_matmul(reference.quantize(A_MK, name), reference.quantize(B_NK, name))
    y = mj.scaled_matmul(a, b)
    assert y.dtype == jnp.float32
    assert relative_error(y, expected) < 1e-5  # docs/numerics.md 8.3, CPU
    exact = mj.scaled_matmul(a, b, accumulate="exact")
    np.testing.assert_array_equal(np.asarray(exact), expected.astype(np.float32))


def test_scaled_matmul_bias_dtype_axes_and_high_precision():
    cast = Cast("nvfp4", hadamard=Hadamard())
    a, b = mj.quantize(A_MK.T, cast, axis=-2), mj.quantize(B_NK, cast)
    bias = RNG.standard_normal(17).astype(np.float32)
    expected = reference.scaled_matmul(reference.quantize(A_MK, cast), reference.quantize(B_NK, cast)) + bias
    for accumulate in ("fast", "exact"):
        y = mj.scaled_matmul(a, b, bias=bias, out_dtype=jnp.bfloat16, accumulate=accumulate)
        assert y.dtype == jnp.bfloat16
        assert relative_error(y, expected) < 2.5e-3
    plain = mj.scaled_matmul(A_MK, b)
    assert (
        relative_error(plain, A_MK.astype(np.float64) @ reference.dequantize(reference.quantize(B_NK, cast)).T) < 1e-5
    )
    stacked = mj.scaled_matmul(mj.quantize(A_MK.reshape(2, 12, 70), "mxfp8"), mj.quantize(B_NK, "mxfp8"))
    assert stacked.shape == (2, 12, 17)


def test_nan_scales_reach_the_product():
    x = A_MK.copy()
    x[3, 5] = np.nan
    y = np.asarray(mj.scaled_matmul(mj.quantize(x, "mxfp8"), mj.quantize(B_NK, "mxfp8")))
    assert np.isnan(y[3]).all()
    assert np.isfinite(np.delete(y, 3, 0)).all()


def as_bytes(leaf):
    leaf = np.asarray(leaf)
    return leaf.view(np.uint8) if "float8" in str(leaf.dtype) else leaf


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("nvfp4--1", "fp8_128x128--2"))
@pytest.mark.parametrize(("name", "axis"), [("nvfp4", -1), ("fp8_128x128", -2), ("mxfp6_e3m2", -1), ("nvfp4_row", -1)])
def test_files(name, axis, tmp_path):
    """The leaves in a safetensors file, and the array back from them."""
    numpy_files = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    q = mj.quantize(A_MK.astype(jnp.bfloat16), name, axis=axis)
    parts = {field: as_bytes(getattr(q, field)) for field in ("codes", "scale", "tensor_scale")
             if getattr(q, field) is not None}  # fmt: skip
    numpy_files.save_file(parts, tmp_path / "q.safetensors")
    loaded = numpy_files.load_file(tmp_path / "q.safetensors")
    back = mj.QuantizedArray.from_parts(
        loaded["codes"], loaded["scale"], loaded.get("tensor_scale"), name, axis=axis, shape=q.shape, dtype="bfloat16"
    )
    assert jax.tree.structure(back) == jax.tree.structure(q)
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(q), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(as_bytes(one), as_bytes(other))


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("(2, 12, 70)",))
@pytest.mark.parametrize("shape", [(), (70,), (2, 12, 70)], ids=str)
def test_parts_of_every_rank(shape):
    x = A_MK.reshape(2, 12, 70)[(0,) * (3 - len(shape))] if shape else A_MK[0, 0]
    q = mj.quantize(x, "nvfp4_2d")
    back = mj.QuantizedArray.from_parts(q.codes, q.scale, q.tensor_scale, q.format, shape=shape)
    assert fields(back) == fields(q)
    np.testing.assert_array_equal(np.asarray(back.dequantize()), np.asarray(q.dequantize()))


@pytest.mark.slow("checkpoints by orbax")
def test_orbax(tmp_path):
    """Features J5: A tree with quantized leaves, saved and restored into the structure it had."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
        tree = {"w": mj.quantize(A_MK, "nvfp4"), "b": jnp.ones(3), "x": [mj.quantize(B_NK, "mxfp8")]}
        with checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "tree", tree)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "tree", jax.tree.map(jnp.zeros_like, tree))
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(as_bytes(one), as_bytes(other))
    np.testing.assert_array_equal(restored["w"].dequantize(), tree["w"].dequantize())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"codes": np.zeros((24, 36), np.uint8)},
            ValueError,
            r"codes: got shape \(24, 36\), needed \(24, 35\) for nvfp4",
        ),
        ({"codes": np.zeros((24, 35), np.int32)}, TypeError, "codes: got int32"),
        ({"codes": np.zeros(35, np.uint8)}, ValueError, "codes: got shape .*at least two axes"),
        ({"scale": np.zeros((24, 4), np.uint8)}, ValueError, r"scale: got shape \(24, 4\), needed \(24, 5\)"),
        ({"scale": np.zeros((24, 5), np.float32)}, TypeError, "scale: got float32"),
        ({"tensor_scale": np.ones((24, 1), np.float32)}, ValueError, r"tensor_scale: got shape \(24, 1\)"),
        ({"format": "mxfp4", "scale": np.zeros((24, 3), np.uint8)}, ValueError, "tensor_scale: got an array"),
        ({"format": 4}, TypeError, "format: got int"),
        (
            {
                "format": "mxfp6_e3m2",
                "codes": np.full((24, 70), 64, np.uint8),
                "scale": np.zeros((24, 3), np.uint8),
                "tensor_scale": None,
            },
            ValueError,
            "codes: got a byte of 0x40, needed unpacked 6-bit codes",
        ),
        ({"dtype": np.float64}, TypeError, "dtype: got float64"),
        ({"axis": 1, "shape": (2, 3, 70)}, ValueError, "axis: got 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parts_that_do_not_fit(change, error, message):
    q = mj.quantize(A_MK, "nvfp4")
    parts = {"codes": q.codes, "scale": q.scale, "tensor_scale": q.tensor_scale, "format": "nvfp4", "shape": (24, 70)}
    parts |= change
    arguments = [parts.pop(name) for name in ("codes", "scale", "tensor_scale", "format")]
    with pytest.raises(error, match=message):
        mj.QuantizedArray.from_parts(*arguments, **parts)
