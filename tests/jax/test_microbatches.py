"""optax.MultiSteps in every place: the state moves once per step, by the largest amax of them all: features J19."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import microfloat.jax as mj
import microfloat.jax.nnx as mnnx
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from microfloat.jax import fp8_ops, linen
from microfloat.recipes import DelayedScaling
from tests.jax.compare import relative_error

OWG = fp8_ops.OVERWRITE_WITH_GRADIENT
SIZES = (1.0, 5.0, 2.0)
MODELS = {
    "recipe": linen.Dense(4, recipe=DelayedScaling(amax_history_len=4), use_bias=False),
    "flax op": linen.Dense(4, dot_general_cls=lambda: fp8_ops.Fp8DirectDotGeneralOp(4), use_bias=False),
}


def batch(size):
    return jnp.full((2, 32), size, jnp.float32)


def input_state(collection):
    (op,) = collection.values()
    return np.asarray(op["input_amax_history"]), float(op["input_scale"][0])


def custom_loop(tx):
    """A loop of one's own: (variables after every microbatch)."""

    def start(model, variables):
        state = tx.init(variables)

        @jax.jit
        def step(variables, state, x):
            gradient = jax.grad(lambda v: jnp.sum(model.apply(v, x) ** 2))(variables)
            updates, state = tx.update(gradient, state, variables)
            return optax.apply_updates(variables, updates), state

        def run(size):
            nonlocal variables, state
            variables, state = step(variables, state, batch(size))
            return variables

        return run

    return start


def train_state(tx):
    """The same with linen.TrainState."""

    def start(model, variables):
        state = linen.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
        step = jax.jit(
            lambda state, x: state.apply_gradients(
                grads=jax.grad(lambda v: jnp.sum(state.apply_fn(v, x) ** 2))(state.params)
            )
        )

        def run(size):
            nonlocal state
            state = step(state, batch(size))
            return state.params

        return run

    return start


SGD = optax.sgd(1e-3)
ORDERS = {
    "outside": custom_loop(linen.overwrite_with_gradient(optax.MultiSteps(SGD, 3))),
    "in a chain": custom_loop(
        linen.overwrite_with_gradient(optax.chain(optax.clip(1.0), optax.MultiSteps(SGD, 3).gradient_transformation()))
    ),
    "own, whatever it wraps": custom_loop(
        linen.MultiSteps(optax.chain(optax.clip(1.0), linen.overwrite_with_gradient(SGD)), 3)
    ),
    "TrainState, own": train_state(linen.MultiSteps(SGD, 3)),
    "TrainState, inside": train_state(optax.MultiSteps(linen.overwrite_with_gradient(SGD), 3)),
    "TrainState": train_state(optax.MultiSteps(SGD, 3)),
    "TrainState, both": train_state(linen.overwrite_with_gradient(optax.MultiSteps(SGD, 3))),
}


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("outside-recipe",))
@pytest.mark.parametrize(("order", "kind"), [*((order, "recipe") for order in ORDERS), ("outside", "flax op")])
def test_a_step_of_three_microbatches(order, kind):
    model = MODELS[kind]
    variables = jax.jit(model.init)(jax.random.key(0), batch(1.0))
    run = ORDERS[order](model, variables)
    for size in SIZES[:2]:
        after = run(size)
        jax.tree.map(lambda new, old: np.testing.assert_array_equal(np.asarray(new), np.asarray(old)), after, variables)
    after = run(SIZES[2])
    assert not np.array_equal(np.asarray(after["params"]["kernel"]), np.asarray(variables["params"]["kernel"]))
    np.testing.assert_array_equal(input_state(after[OWG])[0], [5, 0, 0, 0])
    for size in (0.5, 0.25):
        assert input_state(run(size)[OWG])[1] == 1, "the scale moves with the step after"
    history, scale = input_state(run(0.125)[OWG])
    np.testing.assert_array_equal(history, [0.5, 0, 0, 5])
    assert scale in (pytest.approx(448 / 5, rel=1e-5), pytest.approx(5 / 448, rel=1e-5))


@pytest.mark.slow("further JAX programs of a checked kind")
def test_multi_steps_is_that_of_optax():
    """The same constructor and fields; variables without state, `has_updated`, another schedule, sums, bad input."""
    model = MODELS["recipe"]
    variables = jax.jit(model.init)(jax.random.key(0), batch(1.0))
    tx = linen.MultiSteps(SGD, lambda step: 1 + step, use_grad_mean=False)
    assert isinstance(tx, optax.MultiSteps)
    state, stepped, gradient = tx.init(variables), [], jax.tree.map(jnp.ones_like, variables)
    for _ in range(3):
        updates, state = tx.update(gradient, state, variables)
        variables = optax.apply_updates(variables, updates)
        stepped.append(bool(tx.has_updated(state)))
    assert stepped == [True, False, True], "a step of one microbatch, then one of two"
    np.testing.assert_allclose(updates["params"]["kernel"], -2e-3, rtol=1e-6)
    np.testing.assert_array_equal(input_state(variables[OWG])[0], [1, 0, 0, 1])
    plain = {"params": variables["params"]}
    state = linen.MultiSteps(SGD, 2).init(plain)
    assert jax.tree.structure(state) == jax.tree.structure(optax.MultiSteps(SGD, 2).init(plain))
    with pytest.raises(InvalidTypeError, match="tx: got int"):
        linen.overwrite_with_gradient(3)


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_nnx_optimizer(jitted):
    model = nnx.Linear(32, 4, use_bias=False, rngs=nnx.Rngs(0))
    mnnx.convert(model, DelayedScaling(amax_history_len=4))
    optimizer = mnnx.Optimizer(model, optax.MultiSteps(SGD, 3), wrt=nnx.Param)

    def step(model, optimizer, x):
        optimizer.update(model, mnnx.grad(lambda m: jnp.sum(m(x) ** 2))(model))

    run, kernel = nnx.jit(step) if jitted else step, np.asarray(model.kernel[...])
    for size in SIZES[:2]:
        run(model, optimizer, batch(size))
        assert not np.asarray(model.dot_general.input_amax_history[...]).any()
    run(model, optimizer, batch(SIZES[2]))
    assert not np.array_equal(np.asarray(model.kernel[...]), kernel)
    np.testing.assert_array_equal(np.asarray(model.dot_general.input_amax_history[...]), [5, 0, 0, 0])
    for size in (0.5, 0.25, 0.125) if jitted else ():
        run(model, optimizer, batch(size))
    if jitted:
        np.testing.assert_array_equal(np.asarray(model.dot_general.input_amax_history[...]), [0.5, 0, 0, 5])


@pytest.mark.slow("further JAX programs of a checked kind")
def test_gradients_over_microbatches_are_those_of_one_batch():
    """Features J19: the mean of gradients and values, the maximum of amaxes; plain JAX and Flax, with a key."""
    recipe = DelayedScaling(amax_history_len=4)
    op, state = mj.dot_general(recipe), mj.scaling.init(recipe)
    x = jax.random.normal(jax.random.key(0), (12, 32)) * jnp.arange(1, 13)[:, None]
    w = jax.random.normal(jax.random.key(1), (32, 8), jnp.bfloat16)

    def loss(params, x):
        w, state = params
        return jnp.mean(op(x, w, (((1,), (0,)), ((), ())), state=state) ** 2)

    gradient = jax.value_and_grad(loss)
    whole = jax.jit(gradient)((w, state), x)
    parts = jax.jit(mj.scaling.microbatched(gradient, 3))((w, state), x)
    assert parts[1][0].dtype == jnp.bfloat16
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    assert relative_error(parts[1][0], whole[1][0]) < 0.2, "one more rounding of dy, to E5M2"
    after = [mj.scaling.apply(state, one[1][1]) for one in (parts, whole)]
    for tensor in ("x", "w"):
        mine, wanted = (one.slot(tensor) for one in after)
        jax.tree.map(np.testing.assert_array_equal, mine, wanted)
    model = MODELS["flax op"]
    variables = model.init(jax.random.key(0), x)

    def flax_loss(variables, x, key):
        assert key.shape == ()
        return jnp.mean(model.apply(linen.max_accumulate(variables), x) ** 2)

    whole, parts = (
        one(variables, x, jax.random.key(2))
        for one in (jax.grad(flax_loss), mj.scaling.microbatched(jax.grad(flax_loss), 4))
    )
    history = parts[OWG]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    np.testing.assert_array_equal(history, whole[OWG]["Fp8DirectDotGeneralOp_0"]["input_amax_history"])
    assert relative_error(parts["params"]["kernel"], whole["params"]["kernel"]) < 0.2
    for count, error in ((5, "batch: got an array of shape"), (0, "count: got 0")):
        with pytest.raises(InvalidValueError, match=error):
            mj.scaling.microbatched(gradient, count)((w, state), x)
    with pytest.raises(InvalidValueError, match="batch: got no arrays"):
        mj.scaling.microbatched(gradient, 4)((w, state))


def test_variables_of_nnx_are_state_in_microbatches():
    """Their gradient is the largest, not the mean: the amaxes of a batch must not shrink when it is cut."""
    variables = nnx.State({"kernel": nnx.Param(jnp.zeros(2)), "input_amax_history": mnnx.ScaleState(jnp.zeros(2))})

    def gradient(variables, x):
        return jax.tree.map(lambda leaf: leaf + jnp.max(x), variables)

    found = mj.scaling.microbatched(gradient, 2)(variables, jnp.array([1.0, 5.0]))
    np.testing.assert_array_equal(found["input_amax_history"].get_value(), [5, 5])
    np.testing.assert_array_equal(found["kernel"].get_value(), [3, 3])


def test_state_behind_the_first_argument_is_not_cut():
    state = mj.scaling.init(DelayedScaling(amax_history_len=4), num_groups=2)
    with pytest.raises(InvalidValueError, match="batch: got a DelayedState, needed the state in the first argument"):
        mj.scaling.microbatched(jax.grad(lambda w, state, x: jnp.sum(x @ w)), 2)(jnp.ones((4, 4)), state, batch(1))


def test_averages_of_amaxes_are_refused():
    """optax's own MultiSteps around the state would average it; it is told at init, before a step is lost."""
    variables = {"params": {"w": jnp.ones(2)}, fp8_ops.OVERWRITE_WITH_GRADIENT: {"scale": jnp.ones(1)}}
    with pytest.raises(NotSupportedError, match=r"linen\.MultiSteps"):
        optax.MultiSteps(linen.overwrite_with_gradient(SGD), 3).init(variables)


@pytest.mark.parametrize(
    "chain", [optax.chain, lambda *all: optax.named_chain(*enumerate(all))], ids=["plain", "named"]
)
def test_a_chain_around_the_state_is_refused(chain):
    """It would clip amaxes and scales as if they were gradients, and the weights would flush to zero."""
    variables = {"params": {"w": jnp.ones(2)}, OWG: {"scale": jnp.ones(1)}}
    inside = chain(optax.clip_by_global_norm(1.0), linen.overwrite_with_gradient(SGD))
    with pytest.raises(NotSupportedError, match=r"overwrite_with_gradient\(optax\.chain"):
        inside.init(variables)
    inside.init({"params": variables["params"]})
    linen.overwrite_with_gradient(inside).init(variables)
