"""Flax-compatible operators: Flax's own outputs, and what must be better than Flax."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.linen import fp8_ops as flax_ops
from jax import lax

from microfloat.errors import MicrofloatError
from microfloat.jax import fp8_ops
from tests import golden_cases
from tests.golden_cases import case_id, cases, get

E4M3, E5M2, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
ELEMENTS = {"E4M3": E4M3, "E5M2": E5M2}
HISTORY = jnp.zeros((3,), F32)
ONE = jnp.ones((1,), F32)
PLAIN = (((1,), (0,)), ((), ()))
GOLDEN = golden_cases.ROOT / "jax" / "flax_jax_fp8_golden.npz"


def test_every_name_of_flax_is_there():  # features J6
    """The names of Flax's module, but the halves of its differentiation rules; and the five classes of flax.linen."""
    theirs = [
        name for name, value in vars(flax_ops).items()
        if getattr(value, "__module__", None) == flax_ops.__name__ and not name.startswith("_")
    ]  # fmt: skip
    names = {name for name in theirs if not name.endswith(("_fwd", "_bwd", "_jvp", "_wrapper"))}
    assert len(names) > 20
    assert not names - set(fp8_ops.__all__)
    assert {"quantize_dequantize", "fm32", "fp32_max_grad", "OVERWRITE_WITH_GRADIENT"} <= set(fp8_ops.__all__)
    for name in ("Fp8DirectDotGeneralOp", "Fp8DotGeneral", "Fp8DotGeneralOp", "Fp8Einsum", "NANOOFp8DotGeneralOp"):
        assert getattr(fp8_ops, name).__name__ == getattr(nn, name).__name__


def array(case, role, side="inputs"):
    return get(case, role, side)[0]


# Cases that differ in their values alone share a program.
@functools.cache
def quantizing(q_dtype, compute):
    return (
        jax.jit(lambda x, s: fp8_ops.quantize(x, q_dtype, s, compute)),
        jax.jit(lambda x, s: fp8_ops.qdq(x, q_dtype, s, compute)),
    )


@functools.cache
def pulling(op, q_dtype, compute):
    @jax.jit
    def run(x, g, state):
        y, back = jax.vjp(lambda x, *state: op(compute, q_dtype, x, *state), x, *state)
        return y, *back(g)

    return run


@functools.cache
def updating(q_dtype):
    return jax.jit(lambda x, s, h: fp8_ops.update_fp8_meta(x, q_dtype, s, h))


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("*.e4m3.f32.compute_f32.*",))
@pytest.mark.as_users_compile
@pytest.mark.parametrize("case", cases("flax_quantize", None), ids=case_id)
def test_quantize_equals_flax(case):
    x = jnp.asarray(array(case, "x"), DTYPES[case["input_dtype"]])
    q_dtype, compute = ELEMENTS[case["element"]], DTYPES[case["options"]["compute_dtype"]]
    scale = jnp.asarray(array(case, "scale"))
    quantize, qdq = quantizing(q_dtype, compute)
    codes = np.asarray(quantize(x, scale))
    assert golden_cases.mismatch(case, "data", codes.view(np.uint8)) is None
    assert golden_cases.mismatch(case, "qdq", np.asarray(qdq(x, scale)).astype(np.float32)) is None


@pytest.mark.parametrize("case", cases("flax_scale", None), ids=case_id)
def test_scales_equal_flax_where_flax_is_sound(case):
    """Flax returns 0 where the reciprocal of a tiny amax overflows; here the scale never falls below 2^-126."""
    options, amax, expected = case["options"], array(case, "amax"), array(case, "scale", "outputs")
    actual = np.asarray(
        fp8_ops.compute_scale(amax, np.float32(options["old_scale"]), np.float32(options["fp8_max"]), options["margin"])
    )
    sound = expected >= 2.0**-126
    np.testing.assert_allclose(actual[sound], expected[sound], rtol=1e-7)
    assert (actual >= 2.0**-126).all()
    assert (~sound).sum() <= 4


@pytest.mark.parametrize("case", cases("flax_state", None), ids=case_id)
def test_state_equals_flax(case):
    scale, history = ONE, jnp.zeros(case["options"]["amax_history_len"], F32)
    update = updating(ELEMENTS[case["element"]])
    scales, histories = [], []
    for x in array(case, "x"):
        scale, history = update(x, scale, history)
        scales.append(scale)
        histories.append(history)
    np.testing.assert_allclose(np.stack(scales), array(case, "scale", "outputs"), rtol=1e-7)
    np.testing.assert_array_equal(np.stack(histories), array(case, "history", "outputs"))


@pytest.mark.parametrize("case", cases("flax_vjp", None), ids=case_id)
def test_gradients_equal_flax(case):
    options, dtype = case["options"], DTYPES[case["input_dtype"]]
    op, q_dtype = getattr(fp8_ops, options["op"]), ELEMENTS[case["element"]]
    x, g = (jnp.asarray(array(case, role), dtype) for role in ("x", "g"))
    state = [jnp.asarray(array(case, role)) for role in ("scale", "history")]
    run = pulling(op, q_dtype, DTYPES[options["compute_dtype"]])
    for role, actual in zip(("y", "dx", "dscale", "dhistory"), run(x, g, state), strict=True):
        assert golden_cases.mismatch(case, role, np.asarray(actual).astype(np.float32)) is None, role


@pytest.mark.slow("JAX: fp8_ops on a long vector")
@pytest.mark.as_users_compile
@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_codes_of_the_long_vector(q_dtype):
    golden = np.load(GOLDEN)
    name = q_dtype.removeprefix("float8_")
    keys = [key for key in golden if key.startswith(f"quant/{name}/")]
    assert len(keys) == 3
    for key in keys:
        scale = np.float32(key.split("scale")[1])
        codes = np.asarray(fp8_ops.quantize(golden["quant/x"], jnp.dtype(q_dtype), scale, F32)).view(np.uint8)
        np.testing.assert_array_equal(codes, golden[key].view(np.uint8), err_msg=key)


def test_quantize_shapes_and_special_values():
    x = jnp.asarray([np.inf, -np.inf, 1e9, 1.0], F32)
    values = fp8_ops.quantize(x, E4M3, 1.0, F32).astype(F32)
    np.testing.assert_array_equal(np.asarray(values), [448, -448, 448, 1])
    assert np.isnan(np.asarray(fp8_ops.quantize(np.float32(np.nan), E4M3, ONE, F32).astype(F32)))
    assert fp8_ops.quantize(2.0, E4M3, ONE, F32).shape == ()
    assert fp8_ops.in_qdq(F32, E4M3, 2.0, ONE, HISTORY).shape == ()
    assert fp8_ops.quantize_dequantize is fp8_ops.qdq
    with pytest.raises(ValueError, match="fp8_dtype: got 'bfloat16'"):
        fp8_ops.get_fp8_max(jnp.bfloat16, F32)
    expected = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "float8_e4m3fnuz": 240, "float8_e5m2fnuz": 57344}
    assert {name: float(fp8_ops.get_fp8_max(jnp.dtype(name), F32)) for name in expected} == expected


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.as_users_compile
@pytest.mark.parametrize("q_dtype", [E4M3, E5M2, jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz])
def test_quantize_divides(q_dtype):
    """A true division, where a product with the reciprocal of the scale gives other codes; subnormal numbers count."""
    rng, largest = np.random.default_rng(22), float(jnp.finfo(q_dtype).max)
    different, quantized = 0, jax.jit(lambda x, s: fp8_ops.quantize(x, q_dtype, s, F32))
    for scale in rng.uniform(0.01, 3, 20).astype(np.float32):
        values = np.arange(256, dtype=np.uint8).view(q_dtype).astype(np.float32)
        values = np.unique(np.abs(values[np.isfinite(values)]))
        ties = ((values[1:] + values[:-1]) / 2 * scale).view(np.uint32)
        x = (ties[:, None] + np.arange(-2, 3)).astype(np.uint32).view(np.float32).ravel()
        expected = np.clip(x / scale, 0, largest).astype(q_dtype)
        different += int((np.clip(x * (1 / scale), 0, largest).astype(q_dtype) != expected).sum())
        for dividend, sign in ((x, 1), (-x, -1)):
            actual = quantized(dividend, scale)
            np.testing.assert_array_equal(np.asarray(actual, np.float32), sign * expected.astype(np.float32))
    assert different > 10
    tiny = fp8_ops.quantize(np.float32(3e-39), q_dtype, np.float32(1e-38), F32)
    assert float(tiny) == float(np.asarray(0.3, np.float32).astype(q_dtype))


def test_gradients_of_fake_quantization():
    """Straight through where x is not clipped, by every name; the scale's as the definition is differentiated."""
    x, scale = jnp.asarray([0.3, -1.7, 600.0, 90.0], F32), jnp.float32(0.37)
    gradients = jax.jit(jax.grad(lambda x, s: jnp.sum(fp8_ops.qdq(x, E4M3, s, F32)), (0, 1)))(x, scale)
    np.testing.assert_allclose(gradients[0], [1, 1, 0, 1], rtol=1e-6)
    codes = np.asarray(fp8_ops.quantize(x, E4M3, scale, F32), np.float32)
    np.testing.assert_allclose(gradients[1], (codes - np.asarray(x) / 0.37 * [1, 1, 0, 1]).sum(), rtol=1e-4)
    dx, ds = jax.grad(lambda q, s: jnp.sum(fp8_ops.dequantize(q, F32, s)), (0, 1))(x, scale)
    np.testing.assert_allclose(dx, np.full(4, 0.37), rtol=1e-6)
    np.testing.assert_allclose(ds, x.sum(), rtol=1e-6)
    tangent = jax.jvp(lambda x: fp8_ops.quantize(x, E4M3, scale, F32), (x,), (scale * jnp.ones(4),))[1]
    np.testing.assert_array_equal(np.asarray(tangent, np.float32), [1, 1, 0, 1])


@pytest.mark.usefixtures("x64")
def test_float64_stays_float64():
    assert fp8_ops.qdq(jnp.ones((2,), jnp.float64), E4M3, jnp.ones((1,), F32), F32).dtype == jnp.float64


def test_destroyed_states_recover():
    x = jnp.asarray([1.0, -3.0], F32)
    for bad in (0.0, -1.0, np.inf, np.nan):
        scale, _ = fp8_ops.update_fp8_meta(x, E4M3, jnp.full((1,), bad, F32), HISTORY)
        assert float(scale[0]) == 1.0
    for bad in (np.inf, np.nan, 1e-40):
        _, history = fp8_ops.update_fp8_meta(jnp.asarray([bad], F32), E4M3, ONE, jnp.asarray([2.0, 5.0, 1.0], F32))
        np.testing.assert_array_equal(np.asarray(history), [0, 1, 2])
    tiny = fp8_ops.compute_scale(jnp.float32(2e-38), ONE, np.float32(448))
    assert float(tiny[0]) == 2.0**-126
    old = {"op": {"input_scale": ONE * 3, "input_amax_history": HISTORY + 2}}
    fresh = fp8_ops.reset_state(old)
    assert float(fresh["op"]["input_scale"][0]) == 1.0
    assert not np.asarray(fresh["op"]["input_amax_history"]).any()


def dots(lhs, rhs, route, dtype=F32):
    """The FP8 dot by one of three routes; states of the output gradient are fresh."""
    states = [(ONE, HISTORY)] * 3
    if route == "one call":
        return fp8_ops.fp8_scaled_dot_general(
            lhs, rhs, PLAIN, preferred_element_type=dtype,
            lhs_scale=ONE, rhs_scale=ONE, grad_scale=ONE,
            lhs_amax_history=HISTORY, rhs_amax_history=HISTORY, grad_amax_history=HISTORY,
        )  # fmt: skip
    q_lhs, lhs_scale = fp8_ops.in_q(F32, E4M3, lhs, *states[0])
    q_rhs, rhs_scale = fp8_ops.in_q(F32, E4M3, rhs, *states[1])
    if route == "quantized_dot":
        acc = fp8_ops.quantized_dot(lhs, q_lhs, lhs_scale, rhs, q_rhs, rhs_scale, *states[2], PLAIN, F32)
    else:
        acc = lax.dot_general(q_lhs, q_rhs, PLAIN, preferred_element_type=F32)
    return fp8_ops.out_dq(dtype, lhs_scale, rhs_scale, acc)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_gradients_by_every_route():
    """Features J9: In Flax the hand-written route returns exactly zero; here it is equal, or it is refused."""
    rng = np.random.default_rng(12)
    lhs, rhs = rng.standard_normal((6, 16)).astype(np.float32), rng.standard_normal((16, 5)).astype(np.float32)

    def gradients(route):
        return jax.jit(jax.grad(lambda a, b: jnp.sum(dots(a, b, route) ** 2), argnums=(0, 1)))(lhs, rhs)

    one, two = gradients("one call"), gradients("quantized_dot")
    for first, second in zip(one, two, strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))
        assert np.abs(np.asarray(first)).max() > 1
    with pytest.raises(ValueError, match=r"in_q: got a cotangent of type float8_e4m3fn.*fp8_scaled_dot_general"):
        gradients("foreign")
    assert np.array_equal(jax.jit(lambda a, b: dots(a, b, "foreign"))(lhs, rhs), dots(lhs, rhs, "one call"))


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("name", ["Fp8DirectDotGeneralOp", "Fp8DotGeneralOp"])
def test_second_derivatives(name):
    """Straight through the rounding, with respect to both operands, and also where Flax's tangents overflow FP8."""
    x, w = (jnp.asarray(np.random.default_rng(3).standard_normal(shape), F32) for shape in ((4, 32), (32, 8)))
    model = nn.Dense(8, dot_general_cls=getattr(fp8_ops, name), use_bias=False)
    state = model.init(jax.random.key(0), x)[fp8_ops.OVERWRITE_WITH_GRADIENT]

    def second(product):
        inner = jax.grad(lambda x, w: jnp.sum(product(x, w) ** 2))
        return jax.grad(lambda x, w: jnp.sum(inner(x, w)), argnums=(0, 1))(x, w)

    @jax.jit
    def of_op(state):
        return second(lambda x, w: model.apply({"params": {"kernel": w}, fp8_ops.OVERWRITE_WITH_GRADIENT: state}, x))

    exact = second(lambda x, w: x @ w)
    amaxes = {"input_amax_history": 4.0, "kernel_amax_history": 4.0, "output_grad_amax_history": 200.0}
    small = {name: {leaf: v.at[0].set(amaxes.get(leaf, 1.0)) for leaf, v in op.items()} for name, op in state.items()}
    for used in (state, small):  # scales of 1, and of 4 / 448, by which a tangent of 2 leaves e4m3
        for actual, expected in zip(of_op(used), exact, strict=True):
            assert np.linalg.norm(actual - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("name", ["Fp8DirectDotGeneralOp", "Fp8DotGeneralOp"])
def test_a_gradient_penalty_leaves_the_state_of_the_other_terms(name):
    """The state is a constant to a derivative of a gradient; in Flax it becomes NaN there."""
    x = jnp.asarray(np.random.default_rng(5).standard_normal((4, 32)), F32)
    model = nn.Dense(8, dot_general_cls=getattr(fp8_ops, name))
    variables = jax.jit(model.init)(jax.random.key(0), x)

    def gradient(variables, weight):
        def loss(variables):
            variables = fp8_ops.max_accumulate(variables)
            penalty = jax.grad(lambda x: jnp.sum(model.apply(variables, x) ** 2)) if weight else jnp.zeros_like
            return jnp.sum(model.apply(variables, x)) + weight * jnp.sum(penalty(x) ** 2)

        return jax.grad(loss)(variables)

    with_penalty, without = jax.jit(lambda variables: (gradient(variables, 0.1), gradient(variables, 0.0)))(variables)
    jax.tree.map(
        np.testing.assert_array_equal,
        with_penalty[fp8_ops.OVERWRITE_WITH_GRADIENT],
        without[fp8_ops.OVERWRITE_WITH_GRADIENT],
    )
    kernels = with_penalty["params"]["kernel"], without["params"]["kernel"]
    assert jnp.isfinite(kernels[0]).all()
    assert jnp.abs(kernels[0] - kernels[1]).max() > 1


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("3e-25-*",))
@pytest.mark.parametrize(("size", "gradient"), [(1e-17, 1.0), (3e-25, 1e12)])
def test_small_operands_keep_their_products_and_gradients(size, gradient):
    """The product of both scales lies below float32's normal range; y, its gradients and the amax of dy do not."""
    lhs, rhs = jnp.full((2, 64), size, F32), jnp.full((64, 3), size, F32)
    seen, seen_dy, dy = HISTORY.at[0].set(size), HISTORY.at[0].set(gradient), jnp.full((2, 3), gradient, F32)

    def in_one_call(lhs, rhs, history):
        return fp8_ops.fp8_scaled_dot_general(
            lhs, rhs, PLAIN, preferred_element_type=F32, lhs_scale=ONE, rhs_scale=ONE, grad_scale=ONE,
            lhs_amax_history=seen, rhs_amax_history=seen, grad_amax_history=history,
        )  # fmt: skip

    state = {f"{name}_scale": ONE for name in ("input", "kernel", "output_grad")}
    state |= {"input_amax_history": seen, "kernel_amax_history": seen}

    def by_einsum(lhs, rhs, history):
        variables = {fp8_ops.OVERWRITE_WITH_GRADIENT: {**state, "output_grad_amax_history": history}}
        return fp8_ops.Fp8Einsum(amax_history_length=3).apply(variables, "mk,kn->mn", lhs, rhs)

    def pulled(dot, lhs, rhs, history):
        y, back = jax.vjp(dot, lhs, rhs, history)
        return y, *back(dy)

    for dot in (in_one_call, by_einsum):
        y, d_lhs, d_rhs, history = jax.jit(pulled, static_argnums=0)(dot, lhs, rhs, seen_dy)
        if size * size > 2.0**-126:
            np.testing.assert_allclose(np.asarray(y), 64 * size * size, rtol=1e-5)
        np.testing.assert_allclose(np.asarray(d_lhs), 3 * size * gradient, rtol=1e-5)
        np.testing.assert_allclose(np.asarray(d_rhs), 2 * size * gradient, rtol=1e-5)
        assert history[0] == dy[0, 0]


@pytest.mark.slow("further JAX programs of a checked kind")
def test_types_of_results():
    lhs, rhs = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 2), jnp.bfloat16)
    assert dots(lhs, rhs, "one call", None).dtype == F32, "None means the compute dtype, never FP8"
    assert dots(lhs, rhs, "one call", jnp.bfloat16).dtype == jnp.bfloat16
    q = fp8_ops.quantize(lhs, E4M3, ONE, F32)
    acc = fp8_ops.quantized_dot(lhs, q, ONE, rhs, fp8_ops.quantize(rhs, E4M3, ONE, F32), ONE, ONE, HISTORY, PLAIN)
    assert acc.dtype == jnp.bfloat16


def test_arguments_without_an_effect_warn_as_in_flax():
    x, w = jax.ShapeDtypeStruct((4, 8), F32), jax.ShapeDtypeStruct((8, 2), F32)
    states = dict.fromkeys(("lhs_amax_history", "rhs_amax_history", "grad_amax_history"), HISTORY)
    states |= dict.fromkeys(("lhs_scale", "rhs_scale", "grad_scale"), ONE)

    def programs(ops, precision, dtype):
        yield lambda x, w: ops.fp8_scaled_dot_general(x, w, PLAIN, precision, **states)
        yield lambda x, w: ops.dot_general_with_precision(x, w, PLAIN, precision)
        yield lambda x, w: ops.Fp8Einsum().init(jax.random.key(0), "mk,kn->mn", x, w, precision)
        yield lambda x, w: ops.dot_general_with_precision(x, w, PLAIN, None, dtype)

    for ops in (flax_ops, fp8_ops):
        for silent in programs(ops, None, None):
            jax.eval_shape(silent, x, w)
        for warns in programs(ops, lax.Precision.HIGHEST, jnp.bfloat16):
            with pytest.warns(UserWarning, match="precision|preferred_element_type"):
                jax.eval_shape(warns, x, w)


def test_transposed_dots():
    """The public gradient dots, with batch axes and crossed contraction."""
    rng = np.random.default_rng(13)
    numbers = (((3, 1), (1, 2)), ((0,), (0,)))
    x, y = rng.standard_normal((2, 3, 4, 5)), rng.standard_normal((2, 5, 3, 6))
    x, y = x.astype(np.float32), y.astype(np.float32)
    out, back = jax.vjp(lambda x, y: lax.dot_general(x, y, numbers, precision="highest"), x, y)
    g = rng.standard_normal(out.shape).astype(np.float32)
    options = {"dimension_numbers": numbers, "precision": lax.Precision.HIGHEST, "preferred_element_type": F32}
    for actual, expected in zip(
        (fp8_ops.dot_general_transpose_lhs(g, x, y, **options), fp8_ops.dot_general_transpose_rhs(g, x, y, **options)),
        back(g),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_forward_mode_and_second_order():
    with pytest.raises(TypeError):
        jax.jvp(lambda x: fp8_ops.in_qdq(F32, E4M3, x, ONE, HISTORY), (jnp.float32(2),), (jnp.float32(1),))
    primal, tangent = jax.jvp(
        lambda x: fp8_ops.in_qdq(F32, E4M3, x, ONE, HISTORY, mode="jvp"), (jnp.float32(2.3),), (jnp.float32(1),)
    )
    assert (float(primal), float(tangent)) == (2.25, 1.0)
    with pytest.raises(ValueError, match="mode: got 'both'"):
        fp8_ops.in_qdq(F32, E4M3, 1.0, ONE, HISTORY, mode="both")
    second = jax.grad(lambda x: jax.grad(lambda x: fp8_ops.in_qdq(F32, E4M3, x**3, ONE, HISTORY))(x))
    assert float(second(2.0)) == 12.0
    big = jax.grad(lambda x: fp8_ops.in_qdq(F32, E4M3, x, jnp.float32(1), HISTORY))(jnp.float32(1e6))
    assert float(big) == 1.0, "straight through, also where x was clipped"


def test_the_extended_dtype():
    assert fp8_ops.CAN_USE_EARRAY
    assert fp8_ops.fp32_max_grad == fp8_ops.fm32
    assert str(fp8_ops.fm32) == "fp8_meta32"
    assert jax.dtypes.issubdtype(fp8_ops.fm32, fp8_ops.fp8_meta_dtype)
    with pytest.raises(ValueError):
        lax.convert_element_type(jnp.ones((2,), jnp.bfloat16), fp8_ops.fm32)
    assert (
        fp8_ops.update_fp8_meta(
            jnp.ones(2), E4M3, *(lax.convert_element_type(leaf, fp8_ops.fm32) for leaf in (ONE, HISTORY))
        )[0].dtype
        == fp8_ops.fm32
    )


def test_bfloat16_input_is_measured_in_its_dtype():
    x = np.asarray([1.01, -3.03], ml_dtypes.bfloat16)
    history = fp8_ops.compute_amax_history(x, jnp.asarray([5.0, 1.0, 2.0, 3.0], F32))
    np.testing.assert_array_equal(np.asarray(history), [np.float32(x[1]) * -1, 2, 3, 5])


X_MK, W_KN = np.ones((4, 8), np.float32), np.ones((8, 6), np.float32)
REFUSED = {
    "sizes": ((X_MK, W_KN.T, PLAIN), r"dimension_numbers: got contracting .*\(8,\).*\(6,\)"),
    "int kernel": ((X_MK, W_KN.astype(np.int32), PLAIN), "rhs: got int32, needed float32"),
    "fp8 kernel": ((X_MK, W_KN.astype(E4M3), PLAIN), "rhs: got float8_e4m3fn"),
    "fp8 input": ((X_MK.astype(E5M2), W_KN, PLAIN), "lhs: got float8_e5m2"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("op", [fp8_ops.Fp8DotGeneralOp, fp8_ops.Fp8DirectDotGeneralOp], ids=lambda op: op.__name__)
def test_operands_that_make_no_sense(op, case):
    arguments, message = REFUSED[case]
    with pytest.raises(MicrofloatError, match=message):
        op().init(jax.random.key(0), *arguments)


def test_missing_state_is_named():
    with pytest.raises(MicrofloatError, match="lhs_scale: got None"):
        fp8_ops.fp8_scaled_dot_general(X_MK, W_KN, PLAIN)
    with pytest.raises(MicrofloatError, match="variables: got int"):
        fp8_ops.max_accumulate(3)


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("module", [flax_ops, fp8_ops], ids=["flax", "microfloat"])
def test_classes_derived_from_the_base(module):
    """A subclass finds the six variables under the names that Flax gives them."""

    class Derived(module.Fp8DotGeneralBase):
        def __call__(self, lhs, rhs, dimension_numbers, **_):
            lhs = module.in_qdq(F32, E4M3, lhs, self.input_scale.value, self.input_amax_history.value)
            rhs = module.in_qdq(F32, E4M3, rhs, self.kernel_scale.value, self.kernel_amax_history.value)
            y = lax.dot_general(lhs, rhs, dimension_numbers)
            return module.out_qdq(F32, E5M2, y, self.output_grad_scale.value, self.output_grad_amax_history.value)

    dense = nn.Dense(6, dot_general_cls=Derived)
    variables = dense.init(jax.random.key(0), X_MK)
    gradient = jax.grad(lambda variables: dense.apply(variables, 3 * X_MK).sum())(variables)
    slots = gradient[fp8_ops.OVERWRITE_WITH_GRADIENT]["Derived_0"]
    assert len(slots) == 6
    assert slots["input_amax_history"][0] == 3
    assert slots["output_grad_amax_history"][0] == 1
