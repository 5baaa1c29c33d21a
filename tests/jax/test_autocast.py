"""`autocast` for JAX, features J14: the recipe is part of the trace, so no cached function ignores a new one."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import microfloat.jax as mj
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from microfloat.recipes import DelayedScaling, Float8CurrentScaling, MXFP4BlockScaling, get_default_recipe
from tests import processes

PLAIN = (((1,), (1,)), ((), ()))
RNG = np.random.default_rng(5)
X, W = (RNG.standard_normal(shape).astype(np.float32) for shape in ((16, 32), (8, 32)))
dot = mj.dot_general()
MXFP4, FP8 = MXFP4BlockScaling(), Float8CurrentScaling()


def pinned(recipe):
    return np.asarray(lax.dot_general(X, W, PLAIN) if recipe is None else mj.dot_general(recipe)(X, W, PLAIN))


def test_a_cached_function_runs_the_recipe_of_its_caller():
    traces = []

    @jax.jit
    def step(x, w):
        traces.append(mj.get_autocast_recipe())
        return dot(x, w, PLAIN)

    for recipe in (None, MXFP4, FP8, MXFP4, None, FP8):
        if recipe is None:
            found = step(X, W)
        else:
            with mj.autocast(recipe):
                found = step(X, W)
        np.testing.assert_array_equal(found, pinned(recipe))
    assert traces == [None, MXFP4, FP8], "each recipe is traced once, and equal recipes share their trace"
    with mj.autocast("mxfp4"):
        step(X, W)
    assert len(traces) == 3


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("recipe", [FP8, MXFP4], ids=["fp8", "mxfp4"])
def test_nested_functions_gradients_and_transformations(recipe):
    """An inner jit, scan and grad of a cached function see the recipe; a backward runs the one of its forward."""
    inner = jax.jit(lambda x, w: jnp.sum(dot(x, w, PLAIN) ** 2))
    gradient = jax.jit(jax.grad(lambda w: lax.scan(lambda c, x: (c + inner(x, w), None), 0.0, X[None])[0]))
    plain = gradient(W)
    with mj.autocast(recipe):
        found = gradient(W)
        y, back = jax.vjp(jax.jit(lambda w: dot(X, w, PLAIN)), W)
    alone = jax.jit(jax.grad(lambda w: jnp.sum(mj.dot_general(recipe)(X, w, PLAIN) ** 2)))(W)
    np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-5)
    with mj.autocast(enabled=False):
        np.testing.assert_allclose(back(2 * y)[0], alone, rtol=1e-5, atol=1e-5)
    assert not np.array_equal(found, plain)
    np.testing.assert_array_equal(gradient(W), plain)


def test_nesting_precedence_and_restoration():
    fixed = mj.dot_general(MXFP4)
    assert mj.get_autocast_recipe() is None
    assert not mj.is_autocast_enabled()
    with mj.autocast(FP8):
        assert mj.is_autocast_enabled()
        np.testing.assert_array_equal(fixed(X, W, PLAIN), pinned(MXFP4))
        with mj.autocast():
            assert mj.get_autocast_recipe() == get_default_recipe()
        with pytest.raises(InvalidTypeError), mj.autocast(MXFP4):
            mj.quantize(3, "mxfp4")
        assert mj.get_autocast_recipe() == FP8
        with mj.autocast(enabled=False):
            assert mj.get_autocast_recipe() is None
            assert not mj.is_autocast_enabled()
            np.testing.assert_array_equal(fixed(X, W, PLAIN), pinned(None))
            with mj.autocast(enabled=True, recipe="mxfp4"):
                np.testing.assert_array_equal(dot(X, W, PLAIN), pinned(MXFP4))
        assert mj.get_autocast_recipe() == FP8
    assert mj.get_autocast_recipe() is None


def test_einsum_in_high_precision_is_that_of_jax():
    """Equations that no recipe can run included."""
    square = X[:8, :8]
    np.testing.assert_allclose(
        mj.einsum()("ii,ij->j", square, W[:, :4]), jnp.einsum("ii,ij->j", square, W[:, :4]), rtol=1e-6
    )
    with mj.autocast(enabled=False):
        np.testing.assert_array_equal(mj.einsum(FP8)("mk,nk->nm", X, W), jnp.einsum("mk,nk->nm", X, W))
    with mj.autocast(FP8), pytest.raises(InvalidValueError, match="a label twice"):
        mj.einsum()("ii,ij->j", square, W[:, :4])


def test_every_op_joins():
    state = mj.scaling.init(DelayedScaling(amax_history_len=2))

    def traced(op, *arguments):
        return str(jax.make_jaxpr(op)(*arguments))

    einsums, groups = ([make(recipe) for recipe in (None, MXFP4)] for make in (mj.einsum, mj.ragged_dot))
    with mj.autocast(MXFP4):
        free, fixed = (traced(lambda x, w, op=op: op("mk,nk->mn", x, w), X, W) for op in einsums)
        assert free == fixed != traced(lambda x, w: mj.einsum(FP8)("mk,nk->mn", x, w), X, W)
        free, fixed = (traced(op, X, W.T[None], jnp.array([16])) for op in groups)
        assert free == fixed != traced(mj.ragged_dot(FP8), X, W.T[None], jnp.array([16]))
    delayed = mj.dot_general(DelayedScaling(amax_history_len=2))
    with mj.autocast(enabled=False):
        gradient = jax.jit(jax.grad(lambda state: jnp.sum(delayed(X, W, PLAIN, state=state))))(state)
    kept = mj.scaling.apply(state, gradient)
    jax.tree.map(np.testing.assert_array_equal, kept, state)
    with mj.autocast(DelayedScaling(amax_history_len=2)):
        gradient = jax.jit(jax.grad(lambda state: jnp.sum(dot(X, W, PLAIN, state=state))))(state)
    assert mj.scaling.apply(state, gradient).x.amax_history[0] == np.abs(X).max()


def test_threads_do_not_see_each_others():
    """Two threads call one jitted function under recipes of their own, at the same time."""
    step, barrier, found = jax.jit(lambda x, w: dot(x, w, PLAIN)), threading.Barrier(2, timeout=processes.SECONDS), {}
    shared = mj.autocast(FP8)

    def run(recipe):
        barrier.wait()
        results = []
        for _ in range(4):
            with shared if recipe is FP8 else mj.autocast(recipe):
                results.append(np.asarray(step(X, W)))
        found[recipe] = results, mj.get_autocast_recipe()

    threads = [threading.Thread(target=run, args=(recipe,), daemon=True) for recipe in (MXFP4, FP8)]
    with mj.autocast(enabled=False):
        for thread in threads:
            thread.start()
        for thread in threads:
            processes.join(thread)
    for recipe in (MXFP4, FP8):
        results, after = found[recipe]
        assert after is None, "a new thread begins without the autocast of the one that started it"
        for result in results:
            np.testing.assert_array_equal(result, pinned(recipe))


def test_decorator():
    @mj.autocast(MXFP4)
    def countdown(n):
        return countdown(n - 1) if n else dot(X, W, PLAIN)

    np.testing.assert_array_equal(countdown(2), pinned(MXFP4))
    assert mj.get_autocast_recipe() is None


def test_bad_input():
    for arguments, keywords in (((True,), {}), ((3,), {}), ((), {"enabled": "no"}), ((lambda: 0,), {})):
        with pytest.raises(InvalidTypeError, match=r"(recipe|enabled): got"):
            mj.autocast(*arguments, **keywords)
    outer, inner = mj.autocast(MXFP4), mj.autocast(FP8)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(NotSupportedError, match="reverse order of the entries"):
        outer.__exit__(None, None, None)
    with pytest.raises(NotSupportedError, match="reverse order of the entries"):
        inner.__exit__(None, None, None)
    assert mj.get_autocast_recipe() is None
    with pytest.raises(NotSupportedError, match="reverse order"):
        outer.__exit__(None, None, None)
