"""One row per transformation, eager and jitted: results and states of dot_general and fp8_ops under each of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import microfloat.jax as mj
from microfloat.jax import fp8_ops, scaling
from microfloat.recipes import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.jax.compare import gemm_limit, relative_error, way_of

RNG = np.random.default_rng(18)
X, W = RNG.standard_normal((16, 64)).astype(np.float32), RNG.standard_normal((32, 64)).astype(np.float32)
PLAIN = (((1,), (1,)), ((), ()))
E4M3, F32 = jnp.float8_e4m3fn, jnp.float32
DELAYED = DelayedScaling(amax_history_len=3)
STACKED = np.stack([X, 5 * X, 3 * X])


eager_and_jit = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


def state_gradient(loss, transform=jax.jit):
    return transform(jax.grad(lambda state: loss(scaling.max_accumulate(state))))(scaling.init(DELAYED))


def assert_state(state, amax):
    """One use of the largest input: scale 1, its amax newest, nothing else."""
    assert float(state.x.scale_enc) == 1.0
    np.testing.assert_array_equal(np.asarray(state.x.amax_history), np.float32([amax, 0, 0]))


def call(x, state):
    return jnp.sum(mj.dot_general(DELAYED)(x, W, PLAIN, state=state))


def in_scan(state):
    return lax.scan(lambda total, x: (total + call(x, state), None), 0.0, STACKED)[0]


def in_scan_of_remat(state):
    body = jax.checkpoint(lambda total, x: (total + call(x, state), None))
    return lax.scan(body, 0.0, STACKED)[0]


def in_while_of_microbatches(state):
    return sum(call(x, state) for x in STACKED)


def in_vmap(state):
    return jnp.sum(jax.vmap(lambda x: call(x, state))(STACKED))


def in_nested_vmap(state):
    return jnp.sum(jax.vmap(jax.vmap(lambda x: call(x, state)))(STACKED.reshape(3, 2, 8, 64)))


def in_batch_dimensions(state):
    w = np.broadcast_to(W, (3, 32, 64))
    return jnp.sum(mj.dot_general(DELAYED)(STACKED, w, (((2,), (2,)), ((0,), (0,))), state=state))


def in_cond(state):
    return lax.cond(True, lambda s: call(STACKED[1], s), lambda s: 0.0, state)


def in_other_branch(state):
    return lax.cond(False, lambda s: 0.0, lambda s: call(STACKED[1], s), state)


def in_remat(state):
    return sum(jax.checkpoint(call)(x, state) for x in STACKED)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("in_scan-jit", "in_vmap-jit"))
@eager_and_jit
@pytest.mark.parametrize(
    "loss",
    [
        in_scan, in_scan_of_remat, in_remat, in_while_of_microbatches, in_vmap, in_nested_vmap, in_batch_dimensions,
        in_cond, in_other_branch,
    ],
)  # fmt: skip
def test_state_is_the_maximum(loss, transform):
    """Features J8: of all uses, whatever they happen in."""
    assert_state(state_gradient(loss, transform), np.abs(5 * X).max())


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("jit",))
@eager_and_jit
def test_stacked_state_in_scan(transform):
    """One state per layer, scanned over: every layer keeps its own."""
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), scaling.init(DELAYED))

    def loss(states):
        return lax.scan(lambda total, each: (total + call(*each), None), 0.0, (STACKED, states))[0]

    gradient = transform(jax.grad(loss))(states)
    np.testing.assert_array_equal(np.asarray(gradient.x.amax_history)[:, 0], np.abs(STACKED).max((1, 2)))
    np.testing.assert_array_equal(np.asarray(gradient.x.scale_enc), 1)


@pytest.mark.slow("further JAX programs of a checked kind")
@eager_and_jit
def test_vmap_without_the_accumulating_dtype(transform):
    state = transform(jax.grad(in_vmap))(scaling.init(DELAYED))
    assert_state(state, np.abs(5 * X).max())
    each = transform(jax.vmap(jax.grad(lambda s, x: call(x, s)), in_axes=(None, 0)))(scaling.init(DELAYED), STACKED)
    assert float(each.x.amax_history.max()) == np.abs(5 * X).max()


def test_batched_state_stays_per_entry():
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), scaling.init(DELAYED))
    gradient = jax.jit(jax.grad(lambda s: jnp.sum(jax.vmap(call)(STACKED, s))))(states)
    np.testing.assert_array_equal(np.asarray(gradient.x.amax_history)[:, 0], np.abs(STACKED).max((1, 2)))


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("jit",))
@eager_and_jit
def test_untaken_branch(transform):
    """Features J8: an unused branch keeps the old state."""

    def loss(state, used):
        return lax.cond(used, lambda s: call(X, s), lambda s: 0.0, scaling.max_accumulate(state))

    state = scaling.update(scaling.init(DELAYED), {"x": 2.0})
    gradient = transform(jax.grad(loss))(state, False)
    kept = scaling.apply(state, gradient)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), kept, state)
    assert float(scaling.apply(state, transform(jax.grad(loss))(state, True)).x.amax_history[0]) == np.abs(X).max()


def in_qdq(x, scale, history):
    return fp8_ops.in_qdq(F32, E4M3, x, scale, history)


@pytest.mark.slow("JAX: state of fp8_ops under transformations")
@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("*scan*", "*vmap*-jit", "*cond*"))
@eager_and_jit
@pytest.mark.parametrize("kind", ["scan", "remat", "vmap", "nested_vmap", "cond", "straight"])
def test_fp8_ops_state_is_the_maximum(kind, transform):
    """The rows of the table on the extended dtype, cast once outside; vmap raises a TypeError in Flax."""
    values = jnp.asarray([1.0, 5.0, 3.0, 2.0])

    def loss(scale, history):
        scale, history = (lax.convert_element_type(leaf, fp8_ops.fp32_max_grad) for leaf in (scale, history))
        if kind == "scan":
            return lax.scan(lambda total, x: (total + in_qdq(x, scale, history), None), 0.0, values)[0]
        if kind == "vmap":
            return jnp.sum(jax.vmap(lambda x: in_qdq(x, scale, history))(values))
        if kind == "nested_vmap":
            return jnp.sum(jax.vmap(jax.vmap(lambda x: in_qdq(x, scale, history)))(values.reshape(2, 2)))
        if kind == "cond":
            return lax.cond(values[1] > 0, lambda: jnp.sum(in_qdq(values, scale, history)), lambda: 0.0)
        one = jax.checkpoint(in_qdq) if kind == "remat" else in_qdq
        return sum(one(x, scale, history) for x in values)

    new_scale, new_history = transform(jax.grad(loss, (0, 1)))(jnp.float32(1), jnp.zeros(3))
    assert float(new_scale) == 1.0
    np.testing.assert_array_equal(np.asarray(new_history), [5, 0, 0])


@pytest.mark.slow("further JAX programs of a checked kind")
def test_guided_scan_over_steps():
    """Histories [2,0,0] -> [3,0,2] -> [4,2,3] and scales 1, 2/448, 3/448 over three steps of two uses each."""

    def step(scale, history, values):
        def loss(scale, history):
            scale, history = (lax.convert_element_type(leaf, fp8_ops.fp32_max_grad) for leaf in (scale, history))
            return lax.scan(lambda total, x: (total + in_qdq(x, scale, history), None), 0.0, values)[0]

        return jax.grad(loss, (0, 1))(scale, history)

    scale, history = jnp.float32(1), jnp.zeros(3)
    seen = []
    for values in ([1.0, 2.0], [3.0, 2.0], [1.0, 4.0]):
        scale, history = jax.jit(step)(scale, history, jnp.asarray(values))
        seen.append((float(scale), history.tolist()))
    assert [entry[1] for entry in seen] == [[2, 0, 0], [3, 0, 2], [4, 2, 3]]
    np.testing.assert_allclose([entry[0] for entry in seen], [1, 2 / 448, 3 / 448], rtol=1e-6)


RECIPES = [MXFP8BlockScaling(), NVFP4BlockScaling(), Float8CurrentScaling()]


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_data_gradients_under_transformations(recipe):
    """vmap, scan and remat of a matrix product give what a loop gives, noise included."""
    op = mj.dot_general(recipe)
    w, stacked = W, STACKED
    if way_of(recipe.fprop) == "fp8":
        # GEMMs of two programs differ in their last bits, and gradients that follow from y would be cast to other
        # codes. The codes of these operands are integers times 64 whose products FP8 tensor cores add exactly.
        w, stacked = (np.clip(np.round(3 * array), -7, 7) for array in (w, stacked))
        assert np.abs(w).max() == 7
        assert (np.abs(stacked).max(axis=(1, 2)) == 7).all()
    limit = 1e-6 if way_of(recipe.wgrad) != "fp8" else gemm_limit(recipe.wgrad)
    arguments = {"seed": np.array([5, 6], np.uint32)} if recipe.is_stochastic else {}

    def loss(w, x):
        return jnp.sum(jnp.sin(op(x, w, PLAIN, **arguments)))

    def by_loop(w, xs):
        return sum(loss(w, x) for x in xs)

    def by_scan(w, xs):
        return lax.scan(lambda total, x: (total + jax.checkpoint(loss)(w, x), None), 0.0, xs)[0]

    def by_vmap(w, xs):
        return jnp.sum(jax.vmap(loss, in_axes=(None, 0))(w, xs))

    expected = jax.jit(jax.grad(by_loop))(w, stacked)
    for other in (by_scan, by_vmap):
        assert relative_error(jax.jit(jax.grad(other))(w, stacked), expected) < limit


@pytest.mark.slow("further JAX programs of a checked kind")
def test_constants_are_not_confused():
    """A program whose operands are constants gives what the same program gives with arguments."""
    op = mj.dot_general(NVFP4BlockScaling(disable_stochastic_rounding=True))
    dy = RNG.standard_normal((16, 32)).astype(np.float32)
    other = 7 * RNG.standard_normal((16, 64)).astype(np.float32)

    def gradients(w, x, other, dy):
        def loss(w):
            return jnp.sum(op(x, w, PLAIN) * dy) + jnp.sum(op(other, w, PLAIN) * dy)

        return jax.grad(loss)(w)

    by_arguments = jax.jit(gradients)(W, X, other, dy)
    by_constants = jax.jit(lambda w: gradients(w, X, other, dy))(W)
    np.testing.assert_array_equal(np.asarray(by_arguments), np.asarray(by_constants))
    q = jax.jit(lambda: (mj.quantize(jnp.asarray(X), "nvfp4"), mj.quantize(jnp.asarray(other), "nvfp4")))()
    for one, x in zip(q, (X, other), strict=True):
        np.testing.assert_array_equal(np.asarray(one.codes), np.asarray(mj.quantize(x, "nvfp4").codes))


@pytest.mark.slow("further JAX programs of a checked kind")
def test_donation():
    op = mj.dot_general(DELAYED)

    def step(state, w):
        gradient, dw = jax.grad(lambda s, w: jnp.sum(op(X, w, PLAIN, state=s) ** 2), (0, 1))(state, w)
        return scaling.apply(state, gradient), w - np.float32(1e-3) * dw

    donating = jax.jit(step, donate_argnums=(0, 1))
    state, w = scaling.init(DELAYED), jnp.asarray(W)
    for _ in range(2):
        state, w = donating(state, w)
    assert float(state.x.scale_enc) == np.float32(448) / np.abs(X).max()


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.usefixtures("x64")
def test_x64_changes_nothing():
    op = mj.dot_general(NVFP4BlockScaling())
    y, back = jax.vjp(lambda x, w: op(x, w, PLAIN, key=jax.random.key(0)), jnp.asarray(X), jnp.asarray(W))
    assert {leaf.dtype for leaf in (y, *back(jnp.ones_like(y)))} == {jnp.dtype("float32")}
    with jax.enable_x64(False):
        y_32, back_32 = jax.vjp(lambda x, w: op(x, w, PLAIN, key=jax.random.key(0)), jnp.asarray(X), jnp.asarray(W))
        pairs = zip((y, *back(jnp.ones_like(y))), (y_32, *back_32(jnp.ones_like(y_32))), strict=True)
        for wide, narrow in pairs:
            np.testing.assert_array_equal(np.asarray(wide), np.asarray(narrow))


@pytest.mark.slow("further JAX programs of a checked kind")
def test_tracer_leaks_and_strict_promotion():
    op = mj.dot_general(NVFP4BlockScaling())
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), jax.checking_leaks():
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(op(x, W, PLAIN, seed=3))))(X)
    assert gradient.shape == X.shape
