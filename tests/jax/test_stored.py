"""features I2, I1: `mj.dot_general` with a right side that is stored quantized."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import microfloat.jax as mj  # noqa: E402
from microfloat.errors import InvalidValueError  # noqa: E402
from microfloat.recipes import WeightActivation, WeightOnly  # noqa: E402

LAST = (((2,), (1,)), ((), ()))


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


def test_blocks_along_another_axis_are_refused() -> None:
    stored = mj.quantize(jnp.ones((32, 64)), "mxfp8")
    with pytest.raises(InvalidValueError, match="that of the blocks"):
        mj.dot_general(WeightOnly("mxfp8"))(jnp.ones((2, 32)), stored, (((1,), (0,)), ((), ())))
    static = WeightActivation("fp8_tensor", scales="static")
    with pytest.raises(InvalidValueError, match="casts x by x alone"):
        mj.dot_general(static)(jnp.ones((2, 64)), stored, (((1,), (1,)), ((), ())))
