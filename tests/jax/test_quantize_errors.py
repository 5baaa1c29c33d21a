"""Refusals of `quantize`, `dequantize` and `scaled_matmul`, and their words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import microfloat.jax as mj
from microfloat.errors import MicrofloatError, NotSupportedError
from microfloat.recipes import Cast, Delayed, Hadamard, MXFP8BlockScaling

X = np.ones((4, 32), np.float32)
NUMBERS = (((1,), (1,)), ((), ()))
STOCHASTIC = Cast("mxfp8", rounding="stochastic")
DELAYED = Cast("fp8_tensor", scaling=Delayed())


@pytest.mark.parametrize(
    "x",
    [
        np.ones((4, 32), np.float64),
        np.ones((4, 32), np.int32),
        np.ones((4, 32), bool),
        np.ones((4, 32), np.complex64),
        [[1.0, 2.0]],
        "text",
        None,
    ],
    ids=lambda x: str(getattr(x, "dtype", type(x).__name__)),
)
def test_types_that_are_refused(x):
    with pytest.raises(TypeError, match="x: got") as caught:
        mj.quantize(x, "mxfp8")
    assert isinstance(caught.value, MicrofloatError)


def test_quantized_dtypes_and_arrays_are_refused():
    for x in (jnp.ones((4, 32), jnp.float8_e4m3fn), mj.quantize(X, "mxfp8")):
        with pytest.raises(TypeError, match="x: got"):
            mj.quantize(x, "mxfp8")


@pytest.mark.usefixtures("x64")
def test_float64_is_refused_with_x64():
    with pytest.raises(TypeError, match=r"x: got float64.*astype"):
        mj.quantize(jnp.ones((4, 32)), "mxfp8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cast": "mxfp9"}, "cast: got 'mxfp9'.*Did you mean"),
        ({"axis": 0, "x": np.ones((2, 3, 4), np.float32)}, "axis: got 0 for an array of 3 axes"),
        ({"axis": 5}, "axis: got 5"),
        ({"cast": STOCHASTIC}, "key: got None, and no seed.*rounding='nearest'"),
        ({"cast": STOCHASTIC, "seed": -1}, "seed: got -1"),
        ({"cast": STOCHASTIC, "seed": 1 << 64}, "seed: got"),
        ({"cast": STOCHASTIC, "seed": [1, 2, 3]}, "seed: got"),
        ({"cast": STOCHASTIC, "seed": True}, "seed: got True"),
        ({"cast": STOCHASTIC, "seed": 1, "stream": -1}, "stream: got -1"),
        ({"cast": DELAYED}, "scale_enc: got None"),
        ({"cast": DELAYED, "scale_enc": 0.0}, "scale_enc: got 0.0"),
        ({"scale_enc": 1.0}, "scale_enc: got a value"),
        ({"amax": 1.0}, "amax: got a value with mxfp8"),
        ({"cast": "nvfp4", "amax": -1.0}, "amax: got -1.0"),
        ({"cast": "nvfp4", "amax": 10**400}, "amax: got an integer beyond"),
        ({"cast": "nvfp4", "amax": float("nan")}, "amax: got nan"),
        ({"cast": "nvfp4_row", "amax": 1.0}, r"amax: got shape \(\)"),
        ({"backend": "triton"}, "backend: got 'triton'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_are_refused(arguments, message):
    arguments = {"x": X, "cast": "mxfp8"} | arguments
    with pytest.raises(ValueError, match=message):
        mj.quantize(arguments.pop("x"), arguments.pop("cast"), **arguments)


def test_seed_and_key_together_are_refused():
    with pytest.raises(ValueError, match="key: got a value beside seed"):
        mj.quantize(X, STOCHASTIC, seed=1, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"key: got int.*seed="):
        mj.quantize(X, STOCHASTIC, key=1)
    with pytest.raises(ValueError, match="key: got shape"):
        mj.quantize(X, STOCHASTIC, key=jax.random.split(jax.random.key(0)))
    with pytest.raises(TypeError, match=r"seed: got a jax.random key.*key="):
        mj.quantize(X, STOCHASTIC, seed=jax.random.key(0))


def test_a_recipe_is_not_a_cast():
    with pytest.raises(TypeError, match=r"cast: got MXFP8BlockScaling.*recipe.fprop.lhs"):
        mj.quantize(X, MXFP8BlockScaling())


def test_errors_come_at_trace_time():
    with pytest.raises(ValueError, match="key: got None"):
        jax.jit(lambda x: mj.quantize(x, STOCHASTIC))(X)


@pytest.mark.parametrize("convert", [float, str, lambda leaf: None, lambda leaf: np.zeros(np.shape(leaf), np.float32)])
@pytest.mark.parametrize("cast", ["fp8_tensor", "nvfp4"])
def test_arrays_that_a_map_over_a_tree_has_changed(cast, convert):
    q = mj.quantize(np.ones((1, 32), np.float32), cast)
    leaves = [convert(leaf) if convert is not float else 1.0 for leaf in jax.tree.leaves(q)]
    changed = jax.tree.unflatten(jax.tree.structure(q), leaves)
    with pytest.raises(TypeError, match=r"q: got codes of (float|str|None).* and uint8|float32 for .*dequantize first"):
        changed.dequantize()
    with pytest.raises(TypeError, match=r"b_NK: got codes of (float|str|None)"):
        mj.scaled_matmul(q, changed)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_native_backend_needs_a_gpu(run):
    for function in (mj.quantize, mj.fake_quantize):
        with pytest.raises(NotSupportedError, match=r"backend: got 'native', needed a CUDA device"):
            run(lambda x, function=function: function(x, "mxfp8", backend="native"))(X)
    with pytest.raises(NotSupportedError, match="backend: got 'native'"):
        run(lambda x: mj.dot_general("mxfp8", backend="native")(x, mj.quantize(X, "mxfp8"), NUMBERS))(X)
    with pytest.raises(NotSupportedError, match="backend: got 'native'"):
        run(lambda x: mj.quantize(x, ("mxfp8", "nvfp4"), axis=(-1, -2), backend="native"))(X)


def test_dequantize_and_matmul_refuse():
    q, other = mj.quantize(X, "mxfp8"), mj.quantize(np.ones((4, 33), np.float32), "mxfp8")
    with pytest.raises(TypeError, match="q: got"):
        mj.dequantize(X)
    with pytest.raises(TypeError, match="dtype: got"):
        q.dequantize(jnp.int8)
    with pytest.raises(ValueError, match="b_NK: got contraction length 33"):
        mj.scaled_matmul(q, other)
    transformed = mj.quantize(X, Cast("mxfp8", hadamard=Hadamard()))
    with pytest.raises(ValueError, match="b_NK: got hadamard"):
        mj.scaled_matmul(q, transformed)
    with pytest.raises(ValueError, match=r"b_NK: got fp8_row \(FP32 scales\) against .* one family"):
        mj.scaled_matmul(q, mj.quantize(X, "fp8_row"))
    with pytest.raises(ValueError, match="bias: got shape"):
        mj.scaled_matmul(q, q, bias=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="accumulate: got 'slow'"):
        mj.scaled_matmul(q, q, accumulate="slow")
    with pytest.raises(TypeError, match="out_dtype: got"):
        mj.scaled_matmul(q, q, out_dtype=jnp.float8_e4m3fn)
    with pytest.raises(TypeError, match="b_NK: got int32"):
        mj.scaled_matmul(q, np.ones((4, 32), np.int32))
