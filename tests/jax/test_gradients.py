"""Gradients through low-precision products report overflow, second derivatives and a missing key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import microfloat.jax as mj
from microfloat import reference
from microfloat.errors import InvalidValueError, NotSupportedError
from microfloat.recipes import RECIPES, Cast, CustomRecipe, DelayedScaling, Gemm, MXFP8BlockScaling, NVFP4BlockScaling
from tests.jax.compare import assert_oracle
from tests.jax.test_dot_general import DY, PLAIN, W, X, arguments_of

_ONE = Cast("nvfp4", scale_rule="one_level_e4m3")
_ROW = Cast("nvfp4_row")
# Noise in one gradient: quick to compile, where NVFP4's recipe has six different casts.
_NOISY = CustomRecipe(
    Gemm("mxfp8", "mxfp8"), Gemm(Cast("mxfp8", rounding="stochastic"), "mxfp8"), Gemm("mxfp8", "mxfp8")
)
CUSTOM = {
    "one_level": CustomRecipe(Gemm(_ONE, _ONE), Gemm(_ONE, _ONE), Gemm(_ONE, _ONE)),
    "nvfp4_row": CustomRecipe(Gemm(_ROW, _ROW), Gemm(_ROW, _ROW), Gemm(_ROW, _ROW)),
    "beside_high_precision": CustomRecipe(Gemm("fp8_row", None), Gemm("fp8_row", None), Gemm("fp8_row", None)),
}


def with_one(value):
    """dy with `value` at [3, 5]."""
    dy = DY.copy()
    dy[3, 5] = value
    return dy


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("fp8_block",))
@pytest.mark.parametrize("name", [*RECIPES, *CUSTOM])
def test_overflow_of_dy_shows_in_both_gradients(name):
    """Inf or NaN in dy leaves its row of dx and its row of dw non-finite, eager and under jit; finite dy does not."""
    recipe = CUSTOM.get(name) or RECIPES[name]()
    op, arguments = mj.dot_general(recipe), arguments_of(recipe)

    def run(dy):
        return jax.vjp(lambda x, w: op(x, w, PLAIN, **arguments), X, W)[1](dy)

    jitted = jax.jit(run)
    for value, call in ((np.inf, run), (np.inf, jitted), (-np.inf, jitted), (np.nan, jitted)):
        dx, dw = (np.asarray(gradient) for gradient in call(with_one(value)))
        assert not np.isfinite(dx[3]).any(), value
        assert not np.isfinite(dw[5]).any(), value
    assert all(np.isfinite(np.asarray(gradient)).all() for gradient in jitted(DY))


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("fp8_tensor", "nvfp4"))
@pytest.mark.parametrize("fmt", ["fp8_tensor", "fp8_row", "fp8_1x128", "nvfp4", "nvfp4_row", _ONE])
def test_an_infinite_amax_changes_no_stored_scale(fmt):
    """Overflow is for products of gradients alone: what quantize returns stays as the oracle defines it."""
    assert_oracle(mj.quantize(with_one(np.inf), fmt), with_one(np.inf), fmt)
    assert np.isfinite(reference.dequantize(reference.quantize(with_one(np.inf), fmt))).all()


def test_an_infinite_activation_saturates_as_before():
    y = mj.dot_general(RECIPES["fp8_current"]())(np.where(X[0, 0] == X, np.float32(np.inf), X), W, PLAIN)
    assert np.isfinite(np.asarray(y)).all()


def test_overflow_leaves_delayed_scaling_as_defined():
    """An infinite dy is not recorded, and the next step's scales follow from the history alone."""
    recipe = DelayedScaling(amax_history_len=4)
    state = mj.scaling.init(recipe)
    loss = jax.jit(jax.grad(lambda state, dy: jnp.sum(mj.dot_general(recipe)(X, W, PLAIN, state=state) * dy)))
    after = mj.scaling.apply(state, loss(state, with_one(np.inf)))
    assert float(after.dy.amax_history[0]) == 0
    assert float(after.dy.scale_enc) == 1
    assert float(after.x.amax_history[0]) == np.abs(X).max()


@pytest.mark.slow("further JAX programs of a checked kind")
def test_second_derivatives_are_refused_by_name():
    """Every order of differentiation of a gradient is an error at trace time; zeros would be returned otherwise."""
    for recipe in (MXFP8BlockScaling(), DelayedScaling(), NVFP4BlockScaling()):
        op, arguments = mj.dot_general(recipe), arguments_of(recipe)

        def square(x, w=W, op=op, arguments=arguments):
            return jnp.sum(op(x, w, PLAIN, **arguments) ** 2)

        def linear(x, w, op=op, arguments=arguments):
            return jnp.sum(op(x, w, PLAIN, **arguments))

        for outer in (
            jax.hessian(square),
            jax.grad(lambda x: jnp.vdot(jax.grad(square)(x), x)),
            jax.jit(jax.jacfwd(jax.jacrev(square))),
            # dx does not depend on x here, but it does depend on w.
            lambda x: jax.grad(lambda w: jnp.sum(jax.grad(linear)(x, w)))(jnp.asarray(W)),
        ):
            with pytest.raises(NotSupportedError, match=r"derivative of a gradient.*stop_gradient"):
                outer(jnp.asarray(X))
    inner = jax.grad(lambda x: jnp.vdot(jax.grad(square)(jax.lax.stop_gradient(x)), x))(jnp.asarray(X))
    assert np.asarray(inner).any()


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("recipe", [_NOISY, NVFP4BlockScaling()], ids=["noisy", "nvfp4"])
def test_a_key_is_needed_by_gradients_only(recipe):
    """Recipes that round only dy stochastically: forward runs without a key, in every form of the call."""
    op = mj.dot_general(recipe)
    y = op(X, W, PLAIN)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(op(X, W, PLAIN, seed=7)))
    assert jax.jit(lambda x: op(x[None], W[None], (((2,), (2,)), ((0,), (0,)))))(X).shape == (1, 40, 24)
    assert mj.einsum(recipe)("mk,nk->mn", X, W).shape == (40, 24)
    with pytest.raises(InvalidValueError, match="key: got None"):
        jax.grad(lambda x: jnp.sum(op(x, W, PLAIN)))(X)
    with pytest.raises(InvalidValueError, match=r"key: got None.*disable_stochastic_rounding=True"):
        jax.grad(lambda x: jnp.sum(mj.dot_general("nvfp4")(x, W, PLAIN)))(X)
    noisy = Cast("mxfp8", rounding="stochastic")
    with pytest.raises(InvalidValueError, match="key: got None"):
        mj.dot_general(CustomRecipe(Gemm(noisy, "mxfp8"), Gemm(None, None), Gemm(None, None)))(X, W, PLAIN)


CASTS = ["mxfp8", "mxfp4", "nvfp4", "fp8_tensor", Cast("mxfp8", rounding="stochastic")]


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("fp8_tensor",))
@pytest.mark.parametrize("cast", CASTS)
def test_a_gradient_through_quantize_is_refused_by_name(cast):
    seed = {"seed": 3} if cast is CASTS[-1] else {}
    for through in (
        lambda x: mj.quantize(x, cast, **seed).dequantize(),
        lambda x: mj.scaled_matmul(mj.quantize(x, cast, **seed), mj.quantize(W, cast, **seed)),
    ):
        for transform in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
            with pytest.raises(NotSupportedError, match=r"x: got an array that a gradient is taken of.*fake_quantize"):
                transform(lambda x, through=through: jnp.sum(through(x)))(X)
    gradient = jax.grad(lambda x: jnp.sum(x * mj.quantize(jax.lax.stop_gradient(x), cast, **seed).dequantize()))(X)
    np.testing.assert_array_equal(np.asarray(gradient), np.asarray(mj.quantize(X, cast, **seed).dequantize()))


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("cast", CASTS)
def test_fake_quantize_goes_straight_through(cast):
    """The values of dequantize(quantize(x)), the gradient dy, in every mode and order; also for saturated values."""
    seed = 3 if cast is CASTS[-1] else None
    x = with_one(np.inf)
    fake = jax.jit(lambda x: mj.fake_quantize(x, cast, seed=seed))
    np.testing.assert_array_equal(np.asarray(fake(x)), np.asarray(mj.quantize(x, cast, seed=seed).dequantize()))
    back = jax.vjp(fake, x)[1]
    np.testing.assert_array_equal(np.asarray(back(jnp.asarray(DY))[0]), DY)
    np.testing.assert_array_equal(np.asarray(jax.jvp(fake, (x,), (DY,))[1]), DY)
    half = jnp.asarray(X, jnp.bfloat16)
    assert mj.fake_quantize(half, cast, axis=-2, seed=seed).dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(jax.vmap(fake)(X[None])), np.asarray(mj.fake_quantize(X, cast, seed=seed))[None]
    )
    second = jax.hessian(lambda x: jnp.sum(mj.fake_quantize(x, cast, seed=seed) ** 2))(X[0, :3])
    np.testing.assert_array_equal(np.asarray(second), 2 * np.eye(3))
