"""features I2, I1: `mj.dot_general` with a right side that is stored quantized."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import microfloat.jax as mj  # noqa: E402
from microfloat import reference  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError  # noqa: E402
from microfloat.passes import products  # noqa: E402
from microfloat.recipes import Cast, WeightActivation, WeightOnly, as_cast  # noqa: E402
from tests.jax.test_kernel_casts import one_process, program  # noqa: E402

LAST = (((2,), (1,)), ((), ()))


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("mxfp8",))
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_a_stored_weight_is_multiplied(fmt) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 3, 64), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (32, 64), jnp.bfloat16)
    stored, values = mj.quantize(w, fmt), mj.quantize(w, fmt).dequantize(jnp.bfloat16)
    only = jax.jit(lambda x, w: mj.dot_general(WeightOnly(fmt))(x, w, LAST))
    y, pull = jax.vjp(lambda x: only(x, stored), x)
    assert y.dtype == jnp.bfloat16
    assert jnp.allclose(y.astype(jnp.float32), x.astype(jnp.float32) @ values.T.astype(jnp.float32), atol=0.1)
    (dx,) = pull(y)
    assert jnp.allclose(dx.astype(jnp.float32), (y @ values).astype(jnp.float32), rtol=0.02, atol=0.1)
    both = mj.dot_general(WeightActivation(fmt))(x, stored, LAST)
    exact = mj.scaled_matmul(mj.quantize(x.reshape(6, 64), fmt), stored)
    assert (both == exact.reshape(both.shape)).all()
    turned = mj.quantize(w.T, fmt, axis=-2)  # a kernel of Flax, [K, N]
    assert (mj.dot_general(WeightOnly(fmt))(x, turned, (((2,), (0,)), ((), ()))) == only(x, stored)).all()


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("nvfp4",))
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_rows_by_a_stored_weight_are_multiplied_by_its_fold(fmt) -> None:
    """docs/numerics.md 9.5, as in torch."""
    rng = np.random.default_rng(5)
    x, w = (rng.standard_normal((rows, 200)).astype(np.float32) for rows in (3, 40))
    y = mj.dot_general(WeightActivation(fmt, activation="fp8_row"))(x, mj.quantize(w, fmt), (((1,), (1,)), ((), ())))
    a, b = reference.quantize(x, Cast("fp8_row", "amax_pow2")), reference.fold(reference.quantize(w, fmt), (1, None))[0]
    exact = reference.scaled_matmul(a, b)
    assert np.abs(np.asarray(y) - exact).max() <= 200 * 2.0**-24 * np.abs(exact).max()


def test_blocks_along_another_axis_are_refused() -> None:
    stored = mj.quantize(jnp.ones((32, 64)), "mxfp8")
    with pytest.raises(InvalidValueError, match="that of the blocks"):
        mj.dot_general(WeightOnly("mxfp8"))(jnp.ones((2, 32)), stored, (((1,), (0,)), ((), ())))
    static = WeightActivation("fp8_tensor", scales="static")
    with pytest.raises(InvalidValueError, match="casts x by x alone"):
        mj.dot_general(static)(jnp.ones((2, 64)), stored, (((1,), (1,)), ((), ())))


@pytest.mark.parametrize(
    ("recipe", "numbers", "message"),
    [
        (WeightOnly("mxfp8"), None, "dimension_numbers: got None"),
        (WeightOnly("mxfp8"), (((5,), (3,)), ((), ())), r"dimension_numbers: got axes \(5,\) of lhs"),
        (WeightOnly("mxfp8"), (((0,), (1,)), ((), ())), "dimension_numbers: got contracting"),
        (WeightOnly("mxfp8"), (((1,), (1,)), ((0,), (0,))), "no batch axes"),
        ("nvfp4", (((1,), (1,)), ((), ())), "rhs: got mxfp8 .* WeightOnly"),
    ],
)
def test_what_does_not_fit_a_stored_weight_is_named(recipe, numbers, message) -> None:
    stored = mj.quantize(jnp.ones((32, 64)), "mxfp8")
    lhs = jnp.ones((32 if message == "no batch axes" else 2, 64))
    with pytest.raises((InvalidValueError, InvalidTypeError), match=message):
        mj.dot_general(recipe)(lhs, stored, numbers)


def test_a_stored_weight_of_no_columns_gives_zeros() -> None:
    stored = mj.quantize(jnp.ones((3, 0)), "mxfp8")
    y, pull = jax.vjp(lambda x: mj.dot_general(WeightOnly("mxfp8"))(x, stored, LAST), jnp.ones((2, 1, 0)))
    assert y.shape == (2, 1, 3)
    assert not y.any()
    assert pull(y)[0].shape == (2, 1, 0)


FORMATS = (
    "nvfp4", "nvfp4_row", "nvfp4_2d", "mxfp4", "mxfp6_e3m2", "mxfp8", "fp8_tensor", "fp8_row", "fp8_128x128",
)  # fmt: skip


@pytest.mark.slow("Triton kernels of a JAX program, compiled")
@one_process
@pytest.mark.parametrize("name", FORMATS)
def test_few_rows_read_the_stored_codes(repository, name) -> None:  # features I2
    """Lowered for an H200, the kernels compiled to machine code: those of torch, told the same of the same weight."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import microfloat.torch as mf

    found = program(repository, f"stored {name}")
    assert found["few"] == found["bias"] == ["decode_gemm"]
    assert found["more"] == found["most"] == ["decode_order", "decode_gemm"]
    assert not any(found[kind] for kind in ("many", "wide", "batch", "cpu", "small", "empty"))
    operand = mf.quantize(torch.ones(256, 512), name).to_operand()
    scale, level = operand.scale, operand.tensor_scale
    row = level is not None and level.numel() > 1
    codes = products.stored_codes(as_cast(name).format, None, level is not None and ("row" if row else "tensor"), 512)
    strides = scale.stride() if scale.dim() == 2 else (0, 0)
    for (got, *others), dtypes in zip(
        found["told"], (["bfloat16", "bfloat16", None], ["bfloat16", "float32", "float32"]), strict=True
    ):
        assert got == list(codes._replace(LEVEL=level is not None))
        assert others == [[3, 512, 256], dtypes, list(strides), int(row)]
    kinds = [kind for kind, *_ in found["parameters"][0]]
    assert kinds == ["array"] * (5 if level is not None else 4) + ["i32"] * (
        len(kinds) - (5 if level is not None else 4)
    )
    assert all(found["gradients agree"])
    told = " ".join(found["explained"].split())
    assert "decoding GEMM up to 64 rows; above, dequantize, dot" in told
    assert "read the weight's codes as stored" in told
    assert "not yet run" not in told
    assert "2. dequantize one operand, dot" in told
    assert set(found["casts"]) == {"cast_scaled"}
    assert "2. dequantize one operand, dot" in found["native"]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name",
    ["nvfp4", "nvfp4_row", "nvfp4_2d", "mxfp4", "mxfp6_e3m2", "mxfp8", "fp8_tensor", "fp8_row", "fp8_128x128"],
)
def test_few_rows_read_the_stored_codes_on_a_gpu(name) -> None:  # features I2
    stored = mj.quantize(jax.random.normal(jax.random.key(1), (640, 1024), jnp.bfloat16), name)
    exact_w = np.asarray(stored.dequantize(jnp.float32)).astype(np.float64)
    multiply = jax.jit(lambda x: mj.dot_general(WeightOnly(name))(x, stored, (((1,), (1,)), ((), ()))))
    for rows in (1, 3, 8, 9, 20, 64):
        x = jax.random.normal(jax.random.key(rows), (rows, 1024), jnp.bfloat16)
        assert "triton_kernel_call" in multiply.lower(x).as_text()
        values = np.asarray(x).astype(np.float64)
        exact, terms = values @ exact_w.T, np.abs(values) @ np.abs(exact_w).T
        # One rounding of y, and float32 sums of K exact products (docs/numerics.md 8.2).
        bound = 2.0**-8 * np.abs(exact) + 1024 * 2.0**-23 * terms
        assert (np.abs(np.asarray(multiply(x)).astype(np.float64) - exact) <= bound).all(), rows
