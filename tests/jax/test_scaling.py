"""Delayed scaling as an explicit pytree: the oracle's updates, gradients that are the new state, microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import microfloat.jax as mj
from microfloat import formats, reference
from microfloat.jax import scaling
from microfloat.recipes import CustomRecipe, DelayedScaling, Gemm, MXFP8BlockScaling

RNG = np.random.default_rng(11)
X, W = RNG.standard_normal((8, 32)).astype(np.float32), RNG.standard_normal((16, 32)).astype(np.float32)
PLAIN = (((1,), (1,)), ((), ()))
AMAXES = [2.0, 8.0, 1.0, 0.0, 4.0, 1.0, float("inf"), float("nan"), 1e-40, 1.0, 1.0, 3e38, 7.0]


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=4),
        DelayedScaling(amax_history_len=1, margin=2),
        DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=-1),
        DelayedScaling(amax_history_len=5, amax_compute_algo=lambda history: history.mean(), fp8_format="E4M3"),
    ],
    ids=["max", "one", "most_recent", "callable"],
)
def test_updates_equal_the_oracle(recipe):
    """The same amaxes give the same scales and, up to the deferred update, the same history."""
    delayed = recipe.fprop.lhs.scaling
    state = scaling.init(recipe)
    expected = {tensor: (np.zeros(delayed.amax_history_len, np.float32), np.float32(1)) for tensor in ("x", "dy")}
    update = jax.jit(lambda state, amax: scaling.update(state, {"x": amax, "dy": amax}))
    pending = jax.jit(scaling.encode_scales)
    for amax in AMAXES:
        state = update(state, np.float32(amax))
        for tensor, (history, scale) in expected.items():
            element = recipe.fprop.lhs.format.element if tensor == "x" else recipe.dgrad.lhs.format.element
            live = reference.record_amax(history, amax) if not np.isnan(amax) else history
            np.testing.assert_array_equal(np.asarray(state.slot(tensor).amax_history), live)
            assert np.asarray(state.slot(tensor).scale_enc).tobytes() == scale.tobytes()
            expected[tensor] = reference.update_delayed(
                live, scale, element, margin=delayed.margin, amax_compute_algo=delayed.amax_compute_algo
            )
            assert np.asarray(pending(state)[tensor]).tobytes() == expected[tensor][1].tobytes()
    np.testing.assert_array_equal(np.asarray(state.w.amax_history), 0)


def test_known_scales():
    """docs/numerics.md 3.3: encode scales of E4M3 after these amaxes, four steps remembered."""
    state = scaling.init(DelayedScaling(amax_history_len=4))
    seen = []
    for amax in (2, 8, 1, 0, 4, 1, 1, 1, 1):
        state = scaling.update(state, {"x": amax})
        seen.append(float(scaling.encode_scales(state)["x"]))
    assert seen == [224, 56, 56, 56, 56, 112, 112, 112, 448]


def test_the_gradient_is_the_new_state():
    recipe = DelayedScaling(amax_history_len=3)
    op = mj.dot_general(recipe)

    @jax.jit
    def step(state, x, w):
        loss = lambda state: jnp.sum(op(x, w, PLAIN, state=state) ** 2)  # noqa: E731
        return scaling.apply(state, jax.grad(loss)(state))

    state, replay = scaling.init(recipe), scaling.init(recipe)
    for factor in (1.0, 3.0, 0.5):
        x = X * np.float32(factor)
        scales = {name: float(scale) for name, scale in scaling.encode_scales(state).items()}
        y = reference.scaled_matmul(
            reference.quantize(x, recipe.fprop.lhs, scale_enc=scales["x"]),
            reference.quantize(W, recipe.fprop.rhs, scale_enc=scales["w"]),
        )
        state = step(state, x, W)
        replay = scaling.update(replay, {"x": np.abs(x).max(), "w": np.abs(W).max(), "dy": np.abs(2 * y).max()})
    for tensor in ("x", "w"):
        np.testing.assert_array_equal(np.asarray(state.slot(tensor).amax_history), replay.slot(tensor).amax_history)
        np.testing.assert_array_equal(np.asarray(state.slot(tensor).scale_enc), replay.slot(tensor).scale_enc)
    np.testing.assert_allclose(np.asarray(state.dy.amax_history), replay.dy.amax_history, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_a_subnormal_amax_travels_as_the_least_normal_number(wrap):
    """Gradients are added and compared without subnormals on a CPU: 0 would have kept the scale."""
    recipe = DelayedScaling(amax_history_len=3)
    op, state = mj.dot_general(recipe), scaling.init(DelayedScaling(amax_history_len=3))
    x = np.full_like(X, np.float32(5e-40))
    new = wrap(jax.grad(lambda state: jnp.sum(op(x, W, PLAIN, state=state))))(state)
    new = scaling.apply(state, new)
    assert float(new.x.amax_history[0]) == 2.0**-126
    assert float(new.w.amax_history[0]) == np.abs(W).max()
    expected = reference.update_delayed(np.float32([5e-40, 0, 0]), np.float32(1), formats.E4M3)[1]
    assert float(scaling.encode_scales(new)["x"]) == expected == 2.0**126


def test_two_uses_in_one_step():
    """`max_accumulate` gives the maximum; without it `apply` still gets scale and ring right."""
    recipe = DelayedScaling(amax_history_len=3)
    op = mj.dot_general(recipe)
    state = scaling.update(scaling.init(recipe), {"x": 5.0, "w": 2.0, "dy": 1.0})

    def loss(state):
        return jnp.sum(op(X, W, PLAIN, state=state)) + jnp.sum(op(3 * X, W, PLAIN, state=state))

    exact = jax.jit(jax.grad(lambda state: loss(scaling.max_accumulate(state))))(state)
    np.testing.assert_array_equal(np.asarray(exact.x.amax_history)[0], np.abs(3 * X).max())
    assert float(exact.x.scale_enc) == float(scaling.encode_scales(state)["x"])
    summed = scaling.apply(state, jax.jit(jax.grad(loss))(state))
    assert float(summed.x.scale_enc) == float(exact.x.scale_enc)
    np.testing.assert_array_equal(np.asarray(summed.x.amax_history)[1:], np.asarray(exact.x.amax_history)[1:])
    np.testing.assert_allclose(float(summed.x.amax_history[0]), np.abs(X).max() + np.abs(3 * X).max(), rtol=1e-6)


def test_microbatches_and_unused_states():
    recipe = DelayedScaling(amax_history_len=3)
    op = mj.dot_general(recipe)
    state = scaling.update(scaling.init(recipe), {"x": 5.0, "w": 2.0, "dy": 1.0})
    gradient = jax.jit(lambda state, x: jax.grad(lambda s: jnp.sum(op(x, W, PLAIN, state=s)))(state))
    merged = scaling.merge(state, [gradient(state, X[i : i + 2]) for i in range(0, 8, 2)])
    whole = scaling.apply(state, gradient(state, X))
    for one, other in zip(jax.tree.leaves(merged), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert scaling.merge(state, []) is state
    unused = scaling.apply(state, jax.tree.map(jnp.zeros_like, state))
    for one, other in zip(jax.tree.leaves(unused), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_without_state_in_gradients():
    recipe = DelayedScaling(amax_history_len=3)
    op, state = mj.dot_general(recipe), scaling.init(recipe)

    def loss(w, slot):
        y, amaxes = op.with_amax(X, w, PLAIN, state=state, gradient_slot=slot)
        return jnp.sum(y * 3), amaxes

    (dw, dy_amax), amaxes = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(W, jnp.float32(0))
    assert dw.shape == W.shape
    assert float(dy_amax) == 3.0
    by_update = scaling.update(state, {**amaxes, "dy": dy_amax})
    by_gradient = scaling.apply(state, jax.grad(lambda s: jnp.sum(op(X, W, PLAIN, state=s) * 3))(state))
    for one, other in zip(jax.tree.leaves(by_update), jax.tree.leaves(by_gradient), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_partly_delayed_recipes():
    delayed = DelayedScaling()
    recipe = CustomRecipe(Gemm(delayed.fprop.lhs, "fp8_tensor"), delayed.dgrad, Gemm(None, None))
    state = scaling.init(recipe)
    assert (state.x is not None, state.w is not None, state.dy is not None) == (True, True, True)
    only_x = scaling.init(CustomRecipe(Gemm(delayed.fprop.lhs, "fp8_tensor"), Gemm(None, None), Gemm(None, None)))
    assert only_x.w is None
    assert only_x.dy is None
    assert formats.get_element(only_x.rules[0].element) is formats.E4M3
    gradient = jax.jit(lambda s: jax.grad(lambda s: jnp.sum(mj.dot_general(recipe)(X, W, PLAIN, state=s)))(s))(state)
    assert float(gradient.x.amax_history[0]) == np.abs(X).max()


def test_refusals():
    with pytest.raises(ValueError, match=r"recipe: got MXFP8BlockScaling.*needs no state"):
        scaling.init(MXFP8BlockScaling())
    with pytest.raises(TypeError, match="recipe: got int"):
        scaling.init(3)
    with pytest.raises(ValueError, match=r"amaxes: got names \['y'\]"):
        scaling.update(scaling.init(DelayedScaling()), {"y": 1.0})


@pytest.mark.usefixtures("x64")
def test_state_stays_float32_with_x64():
    state = scaling.update(scaling.init(DelayedScaling()), {"x": 2.0})
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}
