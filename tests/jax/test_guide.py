"""The published FP8 guide, step by step as printed, with microfloat's fp8_ops: it runs everywhere."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random

import microfloat.jax as mj
from microfloat.jax import fp8_ops

pytestmark = pytest.mark.as_users_compile

E4M3, E5M2, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32
HAS_GPU = jax.default_backend() == "gpu"
# A dot of another XLA version may differ in the last place. All operands are positive, and 32 products are added: on
# FP8 tensor cores within 2^-13 of the sum (docs/numerics.md 8.3); JAX's default there for float32 operands is TF32,
# which leaves out all but their leading 11 bits.
TOLERANCE = {"rtol": 2e-6, "atol": 0}
FP8_TOLERANCE = {"rtol": 2.0**-13 if HAS_GPU else 2e-6, "atol": 0}
TF32_TOLERANCE = {"rtol": 2.0**-9 if HAS_GPU else 2e-6, "atol": 0}


def operands():
    key = random.key(0)
    return random.uniform(key, (16, 32)), random.uniform(key, (32, 64))


def calls_fp8(function, *arguments):
    """True if the compiled program holds a call with two FP8 operands."""
    return mj.explain(function, *arguments).calls_fp8


def fp8_dot(a, b):
    return jnp.dot(a.astype(E4M3), b.astype(E4M3), preferred_element_type=F32)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_step_2_raw_fp8_dot():
    a, b = operands()
    y = jax.jit(fp8_dot)(a, b)
    np.testing.assert_allclose(y[0, :4], [10.234802, 8.392029, 8.078857, 8.446411], **FP8_TOLERANCE)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    assert abs(np.linalg.norm(y - exact) / np.linalg.norm(exact) - 0.0080) < 1e-4
    if jax.default_backend() == "cpu":
        assert not calls_fp8(fp8_dot, a, b)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_step_3_current_scaling():
    a, b = operands()

    @jax.jit
    def current(a, b):
        scaled, scales = [], []
        for x in (a, b):
            scale = jnp.max(jnp.abs(x)) / fp8_ops.get_fp8_max(E4M3, F32)
            scaled.append(fp8_ops.quantize_dequantize(x, E4M3, scale, compute_dtype=F32))
            scales.append(scale)
        return jnp.dot(*scaled), scaled, scales

    y, scaled, scales = current(a, b)
    np.testing.assert_allclose(y[0, :4], [10.084958, 8.350604, 8.033584, 8.413869], **TF32_TOLERANCE)
    for x, faked, scale in zip((a, b), scaled, np.asarray(scales), strict=True):
        codes = np.clip(np.asarray(x) / scale, -448, 448).astype(E4M3)
        np.testing.assert_array_equal(faked, codes.astype(F32) * scale)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_step_4_delayed_scaling():
    a, b = operands()
    scales, histories = [1.0] * 3, [jnp.zeros((1024,))] * 3

    @jax.jit
    def delayed(a, b, scales, histories):
        a = fp8_ops.in_qdq(F32, E4M3, a, scales[0], histories[0])
        b = fp8_ops.in_qdq(F32, E4M3, b, scales[1], histories[1])
        return fp8_ops.out_qdq(F32, E5M2, jnp.dot(a, b), scales[2], histories[2])

    y = delayed(a, b, scales, histories)
    assert (y.dtype, y.shape) == (F32, (16, 64))
    np.testing.assert_allclose(y, jax.jit(fp8_dot)(a, b), **FP8_TOLERANCE)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_steps_5_to_7_a_dense_layer():
    a, _ = operands()
    model = nn.Dense(64, dot_general_cls=fp8_ops.Fp8DotGeneralOp)
    variables = model.init(random.key(0), a)
    op = {"Fp8DotGeneralOp_0": {
        f"{name}_{kind}": "*" for name in ("input", "kernel", "output_grad") for kind in ("amax_history", "scale")
    }}  # fmt: skip
    assert jax.tree.map(lambda leaf: "*", variables) == {
        fp8_ops.OVERWRITE_WITH_GRADIENT: op,
        "params": {"bias": "*", "kernel": "*"},
    }

    @jax.jit
    def step(variables, a):
        gradients, _ = jax.grad(lambda v, a: jnp.sum(model.apply(v, a)), argnums=(0, 1))(variables, a)
        params = jax.tree.map(lambda p, g: p + 0.01 * g, variables["params"], gradients["params"])
        return {**gradients, "params": params}

    state = step(variables, a)[fp8_ops.OVERWRITE_WITH_GRADIENT]["Fp8DotGeneralOp_0"]
    newest = {name: np.asarray(state[f"{name}_amax_history"]) for name in ("input", "kernel", "output_grad")}
    np.testing.assert_allclose(newest["input"][0], 0.99588335, rtol=1e-7)
    np.testing.assert_allclose(newest["kernel"][0], 0.40124354, rtol=1e-7)
    assert newest["output_grad"][0] == 1
    assert not any(history[1:].any() for history in newest.values())
    assert all(float(state[f"{name}_scale"][0]) == 1 for name in newest)


def test_step_8_one_state_used_twice(capsys):
    def reuse(x, y, scale, history):
        scale = lax.convert_element_type(scale, fp8_ops.fp32_max_grad)
        history = lax.convert_element_type(history, fp8_ops.fp32_max_grad)
        return fp8_ops.in_qdq(F32, E4M3, x, scale, history) + fp8_ops.in_qdq(F32, E4M3, y, scale, history)

    gradients = jax.jit(jax.grad(reuse, (0, 1, 2, 3)))(2.0, 3.0, 1.0, jnp.zeros((1024,)))
    print(*gradients[2:])
    assert re.fullmatch(r"1\.0 \[3\. 0\. 0\. \.\.\. 0\. 0\. 0\.\]\n", capsys.readouterr().out)
    assert [float(gradient) for gradient in gradients[:2]] == [1.0, 1.0]
