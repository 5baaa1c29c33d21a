"""The linen front end: Flax's training runs, reuse, transforms, recipes by injection, the training state."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core as flax_core
from flax import serialization
from flax.linen import fp8_ops as flax_ops
from flax.training import train_state
from jax import lax

import microfloat.jax as mj
from microfloat.errors import NotSupportedError
from microfloat.jax import fp8_ops
from microfloat.jax import linen as ml
from microfloat.jax.flax import linen as flax_linen
from microfloat.recipes import (
    RECIPES,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests import golden_cases
from tests.jax.compare import relative_error
from tests.jax.gemms import oracle_gemms

OWG = fp8_ops.OVERWRITE_WITH_GRADIENT
RNG = np.random.default_rng(14)
X = RNG.standard_normal((6, 32)).astype(np.float32)
LEAVES = [f"{name}_{kind}" for name in ("input", "kernel", "output_grad") for kind in ("amax_history", "scale")]
DELAYED = DelayedScaling(amax_history_len=3)


def state_of(tree):
    """The one dict of six leaves in a collection."""
    while "input_scale" not in tree:
        (tree,) = tree.values()
    return {name: np.asarray(leaf) for name, leaf in tree.items()}


def gpu_slack(op, x, w, g, leaves):
    """Error that units of a GPU may add to y, dx and dw, elementwise: relative to the products of magnitudes.

    FP8 tensor cores: 2^-12 for sums of 32 products (docs/numerics.md 8.3). TF32, JAX's default for a forward product in
    float32: 2^-10 for the lost bits of each operand.
    """
    if jax.default_backend() != "gpu":
        return 0, 0, 0
    dtypes = (jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz) if op == "nanoo_op" else (jnp.float8_e4m3fn, jnp.float8_e5m2)
    q_dtypes = (dtypes[0], dtypes[0], dtypes[1])
    sizes = []
    for array, q_dtype, name in zip((x, w, g), q_dtypes, ("input", "kernel", "output_grad"), strict=True):
        scale, largest = leaves[f"{name}_scale"], float(jnp.finfo(q_dtype).max)
        codes = np.clip(np.abs(np.asarray(array, np.float32)) / scale, 0, largest).astype(q_dtype)
        sizes.append(codes.astype(np.float32) * scale)
    x, w, g = sizes
    forward = 2.0**-12 if op == "direct_op" else 2.0**-9
    return forward * (x @ w), 2.0**-12 * (g @ w.T), 2.0**-12 * (x.T @ g)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("nanoo_op-bfloat16",))
@pytest.mark.as_users_compile
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["qdq_op", "direct_op", "nanoo_op"])
def test_six_training_steps_equal_flax(op, dtype):
    """Features J7."""
    golden = np.load(golden_cases.ROOT / "jax" / "flax_jax_fp8_golden.npz")
    classes = {"qdq_op": "Fp8DotGeneralOp", "direct_op": "Fp8DirectDotGeneralOp", "nanoo_op": "NANOOFp8DotGeneralOp"}
    module = getattr(fp8_ops, classes[op])(amax_history_length=4)
    w = jnp.asarray(golden["W"], dtype)

    @jax.jit
    def step(state, x, w, g):
        def loss(state, x, w):
            y = module.apply(state, x, w, (((1,), (0,)), ((), ())))
            return jnp.sum(y.astype(jnp.float32) * g), y

        (state, dx, dw), y = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(state, x, w)
        return state, y, dx, dw

    state = {OWG: {name: jnp.ones(1) if name.endswith("scale") else jnp.zeros(4) for name in LEAVES}}
    # bfloat16: rounding inside the dot differs in the last place; float32: the order of sums.
    tolerance = 2**-6 if dtype == "bfloat16" else 1e-5
    for index in range(6):
        x = jnp.asarray(golden["X"][index], dtype)
        state, *results = step(state, x, w, golden["G"][index])
        prefix = f"{op}/{dtype}/step{index}"
        leaves = {name: golden[f"{prefix}/{name}"] for name in LEAVES}
        slacks = gpu_slack(op, x, w, golden["G"][index], leaves)
        for name, actual, slack in zip(("y", "dx", "dw"), results, slacks, strict=True):
            expected = golden[f"{prefix}/{name}"].astype(np.float32)
            limit = tolerance * (np.abs(expected).max() + np.abs(expected)) + slack
            assert (np.abs(np.asarray(actual, np.float32) - expected) <= limit).all(), f"{prefix}/{name}"
        for name, leaf in state[OWG].items():
            rtol = tolerance if dtype == "bfloat16" and name.startswith("output_grad") else 1e-7
            np.testing.assert_allclose(leaf, golden[f"{prefix}/{name}"], rtol=rtol, err_msg=f"{prefix}/{name}")


class Twice(nn.Module):
    """One layer, two uses."""

    op: type

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(32, dot_general_cls=self.op)
        return dense(dense(x))


OPS = {
    "qdq": fp8_ops.Fp8DotGeneralOp,
    "direct": fp8_ops.Fp8DirectDotGeneralOp,
    "delayed": ml.dot_general_cls(DELAYED),
}


@pytest.mark.slow("JAX: state of layers that are used twice")
@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("direct",))
@pytest.mark.parametrize("op", OPS)
def test_a_layer_used_twice_leaves_the_maximum(op):
    """Flax 0.12 sums here: scale 2.0 for 1.0."""
    model = Twice(OPS[op])
    variables = model.init(jax.random.key(0), X)
    _, seen = model.apply(variables, X, capture_intermediates=True, mutable=["intermediates"])
    first = np.asarray(seen["intermediates"]["Dense_0"]["__call__"][0])

    def gradient(cast):
        return jax.grad(lambda v: jnp.sum(model.apply(cast(v), X)))(variables)[OWG]

    for cast in (lambda v: v, fp8_ops.max_accumulate):
        ways = (
            (gradient, jax.jit(gradient, static_argnums=0)) if op == "qdq" else (jax.jit(gradient, static_argnums=0),)
        )
        for leaves in (state_of(way(cast)) for way in ways):
            assert leaves["input_scale"] == 1
            assert leaves["kernel_scale"] == 1
            np.testing.assert_allclose(
                leaves["input_amax_history"][0], max(np.abs(X).max(), np.abs(first).max()), rtol=1e-6
            )


def one_layer(op, **options):
    return nn.Dense(32, dot_general_cls=op, **options)


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("op", OPS)
def test_scan_remat_and_vmap_of_layers(op):
    """Broadcast state gives the maximum over the steps; stacked state one entry per layer."""
    axes = {"broadcast": {"variable_broadcast": ("params", OWG)}, "stacked": {"variable_axes": {"params": 0, OWG: 0}}}
    for kind, options in axes.items():
        if kind == "stacked" and op != "direct":
            continue
        split = {"params": kind == "stacked"}

        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.remat(nn.Dense)(32, dot_general_cls=OPS[op])(x), None

        model = nn.scan(Body, length=3, split_rngs=split, **options)()
        variables = jax.jit(model.init)(jax.random.key(0), X, None)

        def loss(v, model=model):
            return jnp.sum(model.apply(fp8_ops.max_accumulate(v), X, None)[0])

        leaves = state_of(jax.jit(jax.grad(loss))(variables)[OWG])
        assert (leaves["input_scale"] == 1).all()
        expected_shape = (3,) if kind == "stacked" else ()
        assert leaves["input_amax_history"].shape[:-1] == expected_shape
        assert leaves["input_amax_history"][..., 0].max() >= np.abs(X).max()

    batched = nn.vmap(nn.Dense, variable_axes={"params": None, OWG: None}, split_rngs={"params": False})(
        32, dot_general_cls=OPS[op]
    )
    stacked = np.stack([X, 5 * X])
    variables = jax.jit(batched.init)(jax.random.key(0), stacked)
    leaves = state_of(jax.jit(jax.grad(lambda v: jnp.sum(batched.apply(v, stacked))))(variables)[OWG])
    assert leaves["input_scale"] == 1
    assert leaves["input_amax_history"][0] == np.abs(5 * X).max()


@pytest.mark.slow("further JAX programs of a checked kind")
def test_microbatches_equal_one_batch():
    model = one_layer(OPS["qdq"])
    variables = model.init(jax.random.key(0), X)
    old = jax.tree.map(lambda leaf: leaf + 2, variables[OWG])
    variables = {**variables, OWG: old}
    gradient = jax.jit(lambda v, x: jax.grad(lambda v: jnp.sum(model.apply(v, x)))(v)[OWG])
    whole = fp8_ops.next_state(old, gradient(variables, X))
    merged = fp8_ops.merge_state(
        old, [gradient(variables, X[:2]), gradient(variables, X[2:4]), gradient(variables, X[4:])]
    )
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), merged, whole)

    def scanned(v):
        v = fp8_ops.max_accumulate(v)
        return lax.scan(lambda total, x: (total + jnp.sum(model.apply(v, x)), None), 0.0, X.reshape(3, 2, 32))[0]

    inside = fp8_ops.next_state(old, jax.jit(jax.grad(scanned))(variables)[OWG])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), inside, whole)


def test_consumer_rule():
    """A summed gradient still gives the right scale and ring; an unused op keeps its state; stacked state too."""
    history = np.float32([[4, 1, 3, 2], [1, 8, 1, 1]])
    old = {"op": {"input_scale": jnp.asarray([[0.5], [0.25]]), "input_amax_history": jnp.asarray(history)}}
    scale = np.asarray(fp8_ops.compute_scale(history.max(1, keepdims=True), old["op"]["input_scale"], np.float32(448)))
    ring = np.concatenate([np.float32([[7], [9]]), history[:, 2:], history[:, :1]], axis=1)
    next_state = jax.jit(fp8_ops.next_state)
    for uses in (1, 2, 5):
        gradient = {"op": {"input_scale": jnp.asarray(scale * uses), "input_amax_history": jnp.asarray(ring * uses)}}
        new = next_state(old, gradient)["op"]
        np.testing.assert_array_equal(np.asarray(new["input_scale"]), scale)
        np.testing.assert_array_equal(np.asarray(new["input_amax_history"])[:, 1:], ring[:, 1:])
        np.testing.assert_array_equal(np.asarray(new["input_amax_history"])[:, 0], ring[:, 0] * uses)
    for unused in (0.0, -np.inf, np.nan, np.inf):
        gradient = jax.tree.map(lambda leaf, unused=unused: jnp.full_like(leaf, unused), old)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
                     next_state(old, gradient), old)  # fmt: skip


@pytest.mark.slow("further JAX programs of a checked kind")
def test_an_untaken_branch_keeps_the_state():
    model = one_layer(OPS["qdq"])
    variables = model.init(jax.random.key(0), X)
    state = ml.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1))

    @jax.jit
    def step(state, used):
        def loss(params):
            return lax.cond(used, lambda p: jnp.sum(state.apply_fn(p, X)), lambda p: 0.0, params)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    after = state_of(step(state, False).params[OWG])
    np.testing.assert_array_equal(after["input_amax_history"], 0)
    assert after["input_scale"] == 1
    assert state_of(step(state, True).params[OWG])["input_amax_history"][0] == np.abs(X).max()


class WithNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(32, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)(x)


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("frozen", [False, True])
def test_train_state_keeps_other_collections(frozen):
    """Features J10: In Flax 0.12 batch_stats vanish after one step."""
    model = WithNorm()
    variables = jax.jit(model.init)(jax.random.key(0), X)
    variables = flax_core.freeze(variables) if frozen else variables
    create = partial(ml.TrainState.create, apply_fn=model.apply, tx=optax.adam(1e-2))
    state = jax.jit(lambda variables: create(params=variables))(variables)

    @jax.jit
    def step(state, x):
        def loss(params):
            y, updated = state.apply_fn(params, x, mutable=["batch_stats"])
            return jnp.mean(y**2), updated

        grads, updated = jax.grad(loss, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        return state.replace(params=flax_linen._replaced(state.params, dict(updated)))

    donating = jax.jit(step, donate_argnums=0)
    for x in (X, 2 * X):
        state = donating(state, x)
    assert set(state.params) == {"params", "batch_stats", OWG}
    assert isinstance(state.params, flax_core.FrozenDict) == frozen
    assert int(state.step) == 2
    assert np.asarray(state.params["batch_stats"]["BatchNorm_0"]["mean"]).any()
    assert state_of(state.params[OWG])["input_amax_history"][[0, -1]].all()
    assert OWG not in str(jax.tree_util.tree_structure(state.opt_state))


def test_flax_train_state_works_unchanged():
    model = one_layer(OPS["direct"])
    variables = jax.jit(model.init)(jax.random.key(0), X)
    state = train_state.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1))
    grads = jax.jit(jax.grad(lambda p: jnp.sum(model.apply(p, X))))(variables)
    state = state.apply_gradients(grads=grads)
    assert state_of(state.params[OWG])["input_amax_history"][0] == np.abs(X).max()


@pytest.mark.slow("further JAX programs of a checked kind")
def test_flaxs_train_state_over_a_scan_with_shared_state():
    """A sum over the iterations, unless the loss accumulates by maximum, as docs/jax.md says."""

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return ml.Dense(8, recipe=DelayedScaling(amax_history_len=4))(x), None

    shared = ("params", fp8_ops.OVERWRITE_WITH_GRADIENT)
    scanned = nn.scan(Body, variable_broadcast=shared, split_rngs={"params": False}, length=3)()
    variables = scanned.init(jax.random.key(0), np.ones((4, 8), np.float32), None)
    state = train_state.TrainState.create(apply_fn=scanned.apply, params=variables, tx=optax.sgd(0.1))

    def loss(variables):
        y, _ = state.apply_fn(ml.max_accumulate(variables), np.ones((4, 8), np.float32), None)
        return jnp.sum(y**2)

    after = state.apply_gradients(grads=jax.jit(jax.grad(loss))(variables))
    (slots,) = after.params[fp8_ops.OVERWRITE_WITH_GRADIENT]["Dense_0"].values()
    kernel = variables["params"]["Dense_0"]["kernel"]
    assert slots["kernel_scale"] == 1
    assert slots["kernel_amax_history"][0] == jnp.max(jnp.abs(kernel))


def test_the_train_state_serves_flaxs_own_ops():
    """Its cast of the state is one to Flax's dtype, so that a layer used twice leaves the maximum there too."""
    model = Twice(flax_ops.Fp8DirectDotGeneralOp)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    state = ml.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.0))
    gradient = jax.jit(jax.grad(lambda variables: jnp.sum(state.apply_fn(variables, X))))(variables)
    leaves = state_of(gradient[OWG])
    assert leaves["input_scale"] == leaves["kernel_scale"] == 1
    assert leaves["kernel_amax_history"][0] == np.abs(variables["params"]["Dense_0"]["kernel"]).max()
    assert fp8_ops.fp32_max_grad == flax_ops.fp32_max_grad
    assert fp8_ops.fp32_max_grad != jnp.float32


@pytest.mark.slow("further JAX programs of a checked kind")
def test_optax_transformation():
    model = one_layer(OPS["delayed"])
    variables = model.init(jax.random.key(0), X)
    tx = ml.overwrite_with_gradient(optax.adam(0.1))
    opt_state = tx.init(variables)

    @jax.jit
    def step(variables, opt_state):
        grads = jax.grad(lambda v: jnp.sum(model.apply(v, X) ** 2))(variables)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return optax.apply_updates(variables, updates), opt_state

    for _ in range(2):
        variables, opt_state = step(variables, opt_state)
    leaves = state_of(variables[OWG])
    np.testing.assert_allclose(leaves["input_scale"], 448 / np.abs(X).max(), rtol=1e-6)
    np.testing.assert_allclose(leaves["input_amax_history"], [np.abs(X).max(), 0, np.abs(X).max()], rtol=1e-6)
    with pytest.raises(TypeError, match="params: got None"):
        tx.update(variables, opt_state)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    "multi_steps": optax.MultiSteps(optax.lion(1e-3), 2),
    "whole": ml.overwrite_with_gradient(optax.adamw(1e-2)),
}


@pytest.mark.parametrize(
    ("op", "name", "is_jitted"),
    [
        pytest.param(ml.dot_general_cls("delayed"), "adamw", False, marks=pytest.mark.slow("further optimizers")),
        pytest.param(fp8_ops.Fp8DotGeneralOp, "clipped", False, marks=pytest.mark.slow("further optimizers")),
        pytest.param(ml.dot_general_cls("delayed"), "multi_steps", True, marks=pytest.mark.slow("further optimizers")),
        (fp8_ops.Fp8DotGeneralOp, "adamw", True),
        pytest.param(ml.dot_general_cls("delayed"), "whole", True, marks=pytest.mark.slow("further optimizers")),
    ],
)
def test_an_optimizer_that_stepped_on_the_state_is_named(op, name, is_jitted):
    """Its gradient is its new value: histories became negative in silence."""
    if is_jitted and jax.default_backend() != "cpu":
        pytest.skip("a callback would hold up every step on a GPU")
    dense, x = nn.Dense(4, dot_general_cls=op), np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    variables, tx = dense.init(jax.random.key(0), x), OPTIMIZERS[name]
    gradients, optimizer = jax.tree.map(jnp.ones_like, variables), tx.init(variables)
    for _ in range(2):
        updates, optimizer = jax.jit(tx.update)(gradients, optimizer, variables)
        variables = optax.apply_updates(variables, updates)
    run = jax.jit if is_jitted else lambda function: function
    gradient = run(jax.grad(lambda variables: jnp.sum(dense.apply(variables, x) ** 2)))
    message = "_overwrite_with_gradient: got a negative amax.*linen.TrainState"
    if name == "whole":
        jax.block_until_ready(gradient(variables))
        return jax.effects_barrier()
    with pytest.warns(UserWarning, match=message) if is_jitted else pytest.raises(ValueError, match=message):
        jax.block_until_ready(gradient(variables))
        jax.effects_barrier()
    dense.apply(variables, x)  # no gradient, no word


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("delayed",))
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_by_injection(name):
    """Dense with the recipe's op: parameters unchanged, results those of the oracle."""
    recipe = RECIPES[name]()
    cls = ml.dot_general_cls(recipe)
    assert cls is ml.dot_general_cls(RECIPES[name]())
    assert cls.__name__ == f"{type(recipe).__name__}Op"
    model = ml.Dense(24, recipe=recipe, use_bias=False)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    expected = {"params"} | ({OWG} if recipe.is_delayed else set())
    assert set(variables) == expected
    w = np.asarray(variables["params"]["kernel"]).T
    rngs = {"sr_rng": jax.random.key(7)} if recipe.is_stochastic else None

    def loss(x):
        y = model.apply(variables, x, rngs=rngs)
        return jnp.sum(y), y

    dx, y = jax.jit(jax.grad(loss, has_aux=True))(X)
    reference = oracle_gemms(recipe, X, w, np.ones((6, 24), np.float32), seed=1)
    assert relative_error(y, reference[0]) < 1e-5
    # dy is constant: the noise of stochastic rounding cannot show.
    assert relative_error(dx, reference[1]) < 1e-5


@pytest.mark.slow("further JAX programs of a checked kind")
def test_stochastic_recipes_need_the_stream_only_for_gradients():
    model = ml.Dense(16, recipe=NVFP4BlockScaling())
    variables = model.init(jax.random.key(0), X)
    model.apply(variables, X)
    with pytest.raises(ValueError, match=r"key: got None.*split_rngs=\{'sr_rng': True\}.*disable_stochastic_rounding"):
        jax.grad(lambda v: jnp.sum(model.apply(v, X)))(variables)
    assert ml.dot_general_cls("mxfp8") is ml.dot_general_cls(MXFP8BlockScaling())
    assert ml.einsum_cls("mxfp8") is ml.einsum_cls(MXFP8BlockScaling())
    assert ml.Dense(16, recipe="mxfp8").init(jax.random.key(0), X).keys() == {"params"}
    with pytest.raises(TypeError, match=r"recipe: got the class DelayedScaling.*Call the class"):
        ml.dot_general_cls(DelayedScaling)


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.usefixtures("x64")
def test_state_is_float32_with_x64():
    model = one_layer(OPS["direct"], dtype=jnp.float32, param_dtype=jnp.float32)
    variables = model.init(jax.random.key(0), X)
    state = ml.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(np.float32(0.1)))
    grads = jax.jit(jax.grad(lambda p: jnp.sum(state.apply_fn(p, X))))(state.params)
    after = state.apply_gradients(grads=grads).params
    assert {leaf.dtype for leaf in jax.tree.leaves((grads, after))} == {jnp.dtype("float32")}


@pytest.mark.slow("further JAX programs of a checked kind")
def test_attention_einsum_and_dense_general():
    recipe = MXFP8BlockScaling()
    x = X[None]
    attention = ml.MultiHeadDotProductAttention(num_heads=2, recipe=recipe)
    plain = nn.MultiHeadDotProductAttention(num_heads=2)
    variables = attention.init(jax.random.key(0), x, x)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, plain.init(jax.random.key(0), x, x))
    y, exact = attention.apply(variables, x, x), plain.apply(variables, x, x)
    assert 0 < relative_error(y, exact) < 0.1
    general = ml.DenseGeneral((4, 8), axis=-1, recipe=Float8CurrentScaling())
    assert general.apply(general.init(jax.random.key(0), X), X).shape == (6, 4, 8)
    einsum = ml.einsum_cls(DELAYED)()
    kernel = RNG.standard_normal((32, 16)).astype(np.float32)
    variables = einsum.init(jax.random.key(0), "mk,kn->nm", X, kernel)
    gradient = jax.grad(lambda v: jnp.sum(einsum.apply(v, "mk,kn->nm", X, kernel)))(variables)
    assert state_of(gradient[OWG])["input_amax_history"][0] == np.abs(X).max()
    assert state_of(gradient[OWG])["kernel_amax_history"][0] == np.abs(kernel).max()
    reference = jnp.einsum("mk,kn->nm", X, kernel)
    assert relative_error(mj.einsum(recipe)("mk,kn->nm", X, kernel), reference) < 0.1


@pytest.mark.slow("further JAX programs of a checked kind")
def test_einsum_op_keeps_operands_by_position():
    """Flax swaps the operands of this equation: the input's amax lands in the kernel's slot."""
    kernel = 9 * RNG.standard_normal((32, 16)).astype(np.float32)
    op = fp8_ops.Fp8Einsum(amax_history_length=3)
    variables = op.init(jax.random.key(0), "mk,kn->nm", X, kernel)
    leaves = state_of(jax.grad(lambda v: jnp.sum(op.apply(v, "mk,kn->nm", X, kernel)))(variables)[OWG])
    assert leaves["input_amax_history"][0] == np.abs(X).max()
    assert leaves["kernel_amax_history"][0] == np.abs(kernel).max()
    with pytest.raises(ValueError, match="a label twice in lhs"):
        op.apply(variables, "mm,mk->k", X, kernel)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_options_and_names():
    """Dtypes are honoured, integers are cast, attributes may be assigned later, checkpoints have Flax's names."""
    op = fp8_ops.Fp8DirectDotGeneralOp(e4m3_dtype=jnp.float8_e5m2, amax_history_length=2)
    variables = op.init(jax.random.key(0), X, X.T, (((1,), (0,)), ((), ())))
    plain = fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=2)
    numbers = (((1,), (0,)), ((), ()))
    assert not np.array_equal(op.apply(variables, X, X.T, numbers), plain.apply(variables, X, X.T, numbers))
    assert op.apply(variables, X, X.T, numbers, None, jnp.bfloat16).dtype == jnp.bfloat16
    integers = np.arange(12).reshape(3, 4)
    small = plain.init(jax.random.key(0), integers, X[:4], numbers)
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(plain.apply(v, integers, X[:4], numbers))))(small)
    assert state_of(gradient)["input_amax_history"][0] == 11
    dense = nn.DenseGeneral(8)
    dense.dot_general_cls = fp8_ops.Fp8DotGeneral
    assert list(dense.init(jax.random.key(0), X)[OWG]) == ["Fp8DirectDotGeneralOp_0"]
    restored = serialization.from_bytes(variables, serialization.to_bytes(variables))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), restored, variables)


@pytest.mark.parametrize("cast", ["nvfp4", "mxfp8"])
def test_serialization_of_quantized_arrays(cast):
    """`flax.serialization` saves codes and scales, and restores them into an array of the same format alone."""
    tree = {"w": mj.quantize(X, cast), "bias": X[0]}
    blob = serialization.to_bytes(tree)
    assert len(blob) < X.nbytes
    empty = jax.tree.map(jnp.zeros_like, tree)
    restored = serialization.from_bytes(empty, blob)
    assert isinstance(restored["w"], mj.QuantizedArray)
    np.testing.assert_array_equal(restored["w"].dequantize(), tree["w"].dequantize())
    other = {**tree, "w": mj.quantize(X, "fp8_tensor")}
    with pytest.raises(ValueError, match=r"(codes|scale): got .*, needed .*, as the target has it"):
        serialization.from_bytes(other, blob)
    with pytest.raises(TypeError, match=r"state: got .*, needed the state dict of a QuantizedArray: codes, scale"):
        serialization.from_state_dict(tree, {"w": {"codes": X}, "bias": X[0]})


def test_serialization_of_delayed_state():
    state = mj.scaling.update(mj.scaling.init(DELAYED), {"x": 3.0, "dy": 0.5})
    restored = serialization.from_bytes(mj.scaling.init(DELAYED), serialization.to_bytes(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


EXPERTS = RNG.standard_normal((3, 32, 8)).astype(np.float32)
SIZES = jnp.array([2, 0, 4])


def grouped_apply(module, variables, **options):
    """(y, gradients of all variables and of the kernels) of a module that is called like lax.ragged_dot."""

    def run(variables, kernels):
        y = module.apply(variables, X, kernels, SIZES, **options)
        return jnp.sum(y * y), y

    (_, y), gradients = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(variables, EXPERTS)
    return y, *gradients


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("name", ["fp8_current", "mxfp8", "nvfp4", "delayed"])
def test_grouped_class_for_experts(name):
    """Features J13: a class per recipe, called as lax.ragged_dot; state per expert, noise from the stream."""
    recipe = RECIPES[name]()
    cls = ml.ragged_dot_cls(recipe)
    assert cls is ml.ragged_dot_cls(name if name != "delayed" else recipe)
    assert cls.__name__ == f"{type(recipe).__name__}RaggedDot"
    module, rngs = cls(), {"sr_rng": jax.random.key(1)} if recipe.is_stochastic else None
    variables = jax.jit(module.init)(jax.random.key(0), X, EXPERTS, SIZES)
    y, state, gradient = grouped_apply(module, variables, rngs=rngs)
    assert gradient.shape == EXPERTS.shape
    assert not gradient[1].any()
    if not recipe.is_delayed:
        assert not variables
        np.testing.assert_allclose(y, mj.ragged_dot(recipe)(X, EXPERTS, SIZES), rtol=1e-5, atol=1e-5)
        return
    leaves = state[OWG]
    assert leaves["input_scale"].shape == (3, 1)
    expected = [np.abs(X[:2]).max(), 0, np.abs(X[2:]).max()]
    np.testing.assert_array_equal(leaves["input_amax_history"][:, 0], np.float32(expected))
    after = fp8_ops.next_state(variables[OWG], leaves)
    np.testing.assert_array_equal(after["kernel_amax_history"][:, 0], np.abs(EXPERTS).max((1, 2)) * [1, 1, 1])


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("recipe", ["mxfp8", Float8CurrentScaling()], ids=["mxfp8", "fp8_current"])
def test_layers_without_a_recipe_join_the_autocast(recipe):
    """Features J14: Dense and an op class take the recipe of the caller, also when a jitted apply is cached."""
    model = ml.Dense(16, use_bias=False)
    variables = model.init(jax.random.key(0), X)
    assert set(variables) == {"params"}
    apply = jax.jit(model.apply)
    plain = apply(variables, X)
    np.testing.assert_array_equal(plain, nn.Dense(16, use_bias=False).apply(variables, X))
    pinned = ml.Dense(16, use_bias=False, recipe=recipe).apply(variables, X)
    with mj.autocast(recipe):
        np.testing.assert_array_equal(apply(variables, X), pinned)
    with mj.autocast(enabled=False):
        kept = ml.Dense(16, use_bias=False, recipe=recipe).apply(variables, X)
    np.testing.assert_array_equal(kept, plain)
    np.testing.assert_array_equal(apply(variables, X), plain)
    assert not np.array_equal(pinned, plain)
    with mj.autocast(DelayedScaling(amax_history_len=2)):
        with pytest.raises(NotSupportedError, match=r"recipe: got an apply under.*initialise under the autocast"):
            model.apply(variables, X)
        stateful = model.init(jax.random.key(0), X)
        gradient = jax.jit(jax.grad(lambda variables: jnp.sum(model.apply(variables, X))))(stateful)
    assert gradient[OWG]["DelayedScalingOp_0"]["input_amax_history"][0] == np.abs(X).max()
    own = ml.Dense(16, use_bias=False, dot_general=lambda *args, **kwargs: 2 * jax.lax.dot_general(*args, **kwargs))
    with mj.autocast("mxfp8"):
        np.testing.assert_allclose(own.apply(variables, X), 2 * plain, rtol=1e-6)


def test_state_has_one_name_under_an_autocast_and_of_a_pinned_recipe():
    recipe = DelayedScaling(amax_history_len=2)
    pinned, free = ml.Dense(16, use_bias=False, recipe=recipe), ml.Dense(16, use_bias=False)
    with mj.autocast(recipe):
        variables = free.init(jax.random.key(0), X)
    made = pinned.init(jax.random.key(0), X)
    assert jax.tree.structure(made) == jax.tree.structure(variables)
    state = {key: value + 1 for key, value in variables[OWG]["DelayedScalingOp_0"].items()}
    current = {**variables, OWG: {"DelayedScalingOp_0": state}}

    def step(model):
        return str(jax.make_jaxpr(jax.grad(lambda variables: jnp.sum(model.apply(variables, X))))(current))

    y, program = pinned.apply(current, X), step(pinned)
    with mj.autocast(recipe):
        assert step(free) == program
        np.testing.assert_array_equal(free.apply(current, X), y)
    # A scale of 2 where 1 is the first one: it is read.
    assert all(float(value[0]) != 1 for key, value in state.items() if key.endswith("_scale"))


def test_flax_finds_the_method_of_an_op_class():
    """By its name: interceptors see `__call__`, and tabulate calls it again to count operations."""
    seen = []

    def noting(function, args, kwargs, context):
        seen.append((type(context.module).__name__, context.method_name))
        return function(*args, **kwargs)

    calls = {
        ml.dot_general_cls("mxfp8"): (X, X, (((1,), (1,)), ((), ()))),
        ml.einsum_cls("mxfp8"): ("mk,nk->mn", X, X),
        ml.ragged_dot_cls("mxfp8"): (X, EXPERTS, SIZES),
    }
    with nn.intercept_methods(noting):
        for cls, arguments in calls.items():
            jax.eval_shape(lambda cls=cls, arguments=arguments: cls().init(jax.random.key(0), *arguments))
    assert seen == [(cls.__name__, "__call__") for cls in calls]
    options = {"compute_flops": True, "console_kwargs": {"width": 200}}
    table = nn.tabulate(one_layer(ml.dot_general_cls("mxfp8")), jax.random.key(0), **options)(X)
    assert "MXFP8BlockScalingOp_0" in table
