"""Bits do not depend on conversions that XLA leaves out on a GPU (see `excess`)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import microfloat.jax as mj
from microfloat.jax import fp8_ops
from tests.jax import excess
from tests.jax.effort import cheaper_passes

pytestmark = pytest.mark.as_users_compile

FURTHER = pytest.mark.slow("excess precision in casts to further formats")
RNG = np.random.default_rng(21)
# Several binades, and values next to a tie of FP8 that bfloat16 rounds onto it.
X = (RNG.standard_normal((16, 48)) * np.exp2(RNG.integers(-6, 7, (16, 48)))).astype(np.float32)
X[::2] = ((X[::2].view(np.uint32) >> 19 << 19) | np.uint32(0x4FFF)).view(np.float32)
FP8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
SCALE = np.float32(0.0123)
HALF, FACTOR = X.astype(jnp.bfloat16), np.asarray(1.0078125, jnp.bfloat16)


def unchanged(function, *arguments):
    """The results of `function` operation by operation, which jit and excess precision must not change."""
    with cheaper_passes():  # programs of one operation, of which no pass can make another
        expected, widened = function(*arguments), excess.evaluate(function, *arguments)
    for way, results in (("jit", jax.jit(function)(*arguments)), ("excess", widened)):
        for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            one, other = np.asarray(one), np.asarray(other)
            assert one.dtype == other.dtype
            bits = f"u{one.dtype.itemsize}"
            different = int((np.atleast_1d(one).view(bits) != np.atleast_1d(other).view(bits)).sum())
            assert not different, f"{way}: {different} of {one.size} differ"
    return expected


def test_the_evaluation_leaves_conversions_out():
    """GPUs were seen to do this: fake quantization written down as it reads does nothing."""

    def there_and_back(x):
        return x.astype(jnp.float8_e4m3fn).astype(jnp.float32), x.astype(jnp.bfloat16).T.astype(jnp.float32)

    for value, wanted in zip(excess.evaluate(there_and_back, X), (X, X.T), strict=True):
        np.testing.assert_array_equal(value, wanted)
    with pytest.raises(AssertionError, match="differ"):
        unchanged(there_and_back, X)
    with pytest.raises(AssertionError, match="differ"):
        unchanged(lambda x: (x * x).astype(jnp.float32), HALF)


@pytest.mark.slow("JAX: excess precision around fake_quantize")
@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("float32-*", "*-float8_e4m3fn"))
@pytest.mark.parametrize("q_dtype", FP8)
@pytest.mark.parametrize(
    ("dtype", "compute"), [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float32")]
)
def test_fake_quantization(q_dtype, dtype, compute):
    def faked(x, scale):
        y = fp8_ops.qdq(x.astype(dtype), q_dtype, scale, jnp.dtype(compute))
        return y, y.astype(jnp.float32)

    value, _ = unchanged(faked, X, SCALE)
    assert np.abs(np.asarray(value, np.float32) - X)[np.abs(X) < 1].max() > 0.001


def test_codes_that_were_just_made():
    unchanged(lambda x: fp8_ops.dequantize(x.astype(jnp.float8_e4m3fn), jnp.float32, SCALE), X)


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_delayed_state(dtype):
    def state(x):
        return fp8_ops.update_fp8_meta(x.astype(dtype), jnp.float8_e4m3fn, jnp.ones(1), jnp.asarray([3.0, 7, 1]))

    unchanged(state, X)


@pytest.mark.slow("JAX: excess precision around fake_quantize")
@pytest.mark.parametrize("op", ["in_qdq", "out_qdq"])
def test_differentiated_fake_quantization(op):
    """x and its gradient are products in bfloat16, which XLA does not round by itself."""

    def run(x, g, scale, history):
        rule = partial(getattr(fp8_ops, op), jnp.bfloat16, jnp.float8_e4m3fn)
        y, back = jax.vjp(rule, x * FACTOR, scale, history)
        return y, *back(g * FACTOR)

    unchanged(run, HALF, HALF[::-1], SCALE[None], np.float32([2, 0]))


@pytest.mark.slow("further JAX programs of a checked kind")
def test_differentiated_fp8_dot():
    """One product of powers of two per sum: what differs are codes."""
    state = [jnp.full(1, 0.37), jnp.full(1, 0.021), jnp.full(1, 1.3), *[jnp.asarray([0.0, 3])] * 3]
    names = [f"{name}_{kind}" for kind in ("scale", "amax_history") for name in ("lhs", "rhs", "grad")]

    def run(x, g):
        one = jnp.eye(x.shape[1], dtype=x.dtype)

        def dot(x, *state):
            options = dict(zip(names, state, strict=True), quantize_compute_type=jnp.bfloat16)
            return fp8_ops.fp8_scaled_dot_general(x, one, (((1,), (0,)), ((), ())), **options)

        y, back = jax.vjp(dot, x * FACTOR, *state)
        return y, *back(g * FACTOR)

    unchanged(run, HALF, HALF[::-1])


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("float16-fp8_tensor",))
@pytest.mark.parametrize(
    "name", ["fp8_tensor", pytest.param("fp8_row", marks=FURTHER), "mxfp8", pytest.param("nvfp4", marks=FURTHER)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantize(name, dtype):
    """A cast reads its operand in the operand's dtype, wherever that was made; so does what reads the values."""

    def codes(x):
        q = mj.quantize(x * FACTOR.astype(dtype), name)
        return q.codes, q.scale, q.tensor_scale, q.dequantize(jnp.bfloat16).astype(jnp.float32)

    unchanged(codes, X.astype(dtype))
