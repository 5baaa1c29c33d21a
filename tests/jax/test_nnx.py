"""The nnx front end: conversion, training with delayed state, reuse, streams, nnx transforms."""

import logging
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import microfloat.jax as mj
from microfloat.errors import InvalidTypeError, InvalidValueError, MicrofloatError, NotSupportedError, PlacementError
from microfloat.jax import nnx as mnnx
from microfloat.recipes import (
    Cast,
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Gemm,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Placement,
)
from microfloat.recipes.placement import DEFAULT_EXCLUDE
from tests.jax.compare import relative_error
from tests.jax.gemms import oracle_gemms
from tests.logs import logged

RNG = np.random.default_rng(15)
X = RNG.standard_normal((6, 32)).astype(np.float32)
DELAYED = DelayedScaling(amax_history_len=3)
# Noise in one gradient: quick to compile, where NVFP4's recipe has six different casts.
NOISY = CustomRecipe(
    Gemm("mxfp8", "mxfp8"), Gemm(Cast("mxfp8", rounding="stochastic"), "mxfp8"), Gemm("mxfp8", "mxfp8")
)


class Model(nnx.Module):
    """Two layers, the first of them used twice."""

    def __init__(self, rngs):
        self.first = nnx.Linear(32, 32, rngs=rngs)
        self.second = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.second(self.first(self.first(x)))


def mean_square(model, x):
    return jnp.mean(model(x) ** 2)


def amaxes_of_first(model):
    hidden = model.first(X)
    return max(np.abs(X).max(), np.abs(np.asarray(hidden)).max())


def test_convert_leaves_parameters_alone():
    model = Model(nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    plain = np.asarray(model(X))
    report = mnnx.convert(model, MXFP8BlockScaling())
    assert list(report.converted) == ["first", "second"]
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), before, after)
    assert not jax.tree.leaves(nnx.state(model, mnnx.ScaleState))
    assert 0 < relative_error(model(X), plain) < 0.1
    mnnx.convert(model, Placement([("*", None)]))
    np.testing.assert_array_equal(np.asarray(model(X)), plain)


def test_a_model_that_is_one_layer_has_a_name_in_the_report():
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert "(root)  4 -> 4     high precision  -       the placement says None" in str(
        mnnx.convert(layer, Placement([("*", None)]))
    )


def test_linear_equals_the_oracle():
    layer = mnnx.Linear(32, 16, recipe=MXFP8BlockScaling(), use_bias=False, rngs=nnx.Rngs(0))
    w = np.asarray(layer.kernel[...]).T
    expected = oracle_gemms(MXFP8BlockScaling(), X, w, np.ones((6, 16), np.float32))
    y, gradients = nnx.jit(lambda m, x: (m(x), mj.nnx.grad(lambda m: jnp.sum(m(x)))(m)))(layer, X)
    assert relative_error(y, expected[0]) < 1e-5
    assert relative_error(gradients["kernel"][...].T, expected[2]) < 1e-5
    plain = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    assert nnx.to_pure_dict(nnx.state(plain, nnx.Param)).keys() == {"kernel", "bias"}
    np.testing.assert_array_equal(np.asarray(plain.kernel[...]), np.asarray(layer.kernel[...]))


@pytest.mark.slow("further JAX programs of a checked kind")
def test_general_layers_and_attention():
    general = mnnx.LinearGeneral(32, (4, 8), recipe=Float8CurrentScaling(), rngs=nnx.Rngs(0))
    assert general(X).shape == (6, 4, 8)
    einsum = mnnx.Einsum("mk,kn->nm", (32, 16), recipe=DELAYED, rngs=nnx.Rngs(0))
    gradients = mnnx.grad(lambda m: jnp.sum(m(X)))(einsum)
    assert gradients["einsum_op"]["input_amax_history"][...][0] == np.abs(X).max()
    attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=nnx.Rngs(0))
    plain = attention(X[None])
    report = mnnx.convert(attention, MXFP8BlockScaling())
    assert set(report.converted) == {"query", "key", "value", "out"}
    assert 0 < relative_error(attention(X[None]), plain) < 0.1


def test_placement_and_report():
    model = Model(nnx.Rngs(0))
    rules = Placement([("first", NVFP4BlockScaling()), ("*", None), ("third", DELAYED)])
    with pytest.raises(PlacementError, match=r"match no layer: 'third'.*first, second"):
        mnnx.convert(model, rules)
    assert model.first.dot_general is jax.lax.dot_general, "a refused call changes nothing"
    rules = Placement([("first", NVFP4BlockScaling()), ("*", None)])
    report = mnnx.convert(model, rules, filter=lambda name, layer: name != "second")
    assert report.converted == ["first"]
    assert report.rows[0].recipe == NVFP4BlockScaling()
    assert report.skipped == {"second": "filter returned False"}
    assert report.share == pytest.approx((32 * 32 + 32) / (32 * 32 + 32 + 32 * 16 + 16))
    assert "1 of 2 linear layers run in low precision: 66.7% of the model's parameters." in str(report)
    again = mnnx.convert(model, Placement([("first:wgrad", None)]))  # features S13: the other GEMMs stay
    recipe = NVFP4BlockScaling()
    assert model.first.dot_general.recipe == CustomRecipe(recipe.fprop, recipe.dgrad, Gemm(None, None))
    assert again.rows[0].reason == "wgrad: high precision by 'first:wgrad'"
    only = mnnx.convert(Model(nnx.Rngs(0)), {"second": DELAYED})
    assert only.skipped == {"first": "no pattern of the placement matches"}
    with pytest.raises(TypeError, match="model: got int"):
        mnnx.convert(1, DELAYED)


class Named(nnx.Module):
    """Layers by the names of published models."""

    def __init__(self, rngs):
        for name in ("gate_proj", "gate", "router", "lm_head", "classifier", "score"):
            setattr(self, name, nnx.Linear(4, 4, rngs=rngs))


def test_conversion_is_that_of_torch():
    """Names of recipes, the default exclusion, exclude=, a second pass, revert, and the report's fields."""
    model = Named(nnx.Rngs(0))
    report = mnnx.convert(model, "mxfp8")
    assert report.converted == ["gate_proj"]
    assert set(report.skipped) == {"gate", "router", "lm_head", "classifier", "score"}
    assert "gate" in report.skipped["gate"]
    again = mnnx.convert(model, "mxfp4", exclude=("gate_proj", "score"))
    assert [(row.name, row.action) for row in again if row.name in ("gate_proj", "gate", "score")] == [
        ("gate", "converted"), ("gate_proj", "kept"), ("score", "skipped"),
    ]  # fmt: skip
    assert [row.action for row in mnnx.convert(model, "mxfp6", exclude=()) if row.name == "gate"] == ["repinned"]
    x = np.ones((2, 4), np.float32) * 1.1
    assert mnnx.revert(model) is model
    np.testing.assert_array_equal(np.asarray(model.gate(x)), x @ model.gate.kernel[...] + model.gate.bias[...])
    assert mnnx.DEFAULT_EXCLUDE is DEFAULT_EXCLUDE
    for arguments, message in (
        ({"exclude": "gate"}, r"exclude: got str.*exclude=\('gate',\)"),
        ({"exclude": [3]}, "exclude: got 3 in it"),
        ({"exclude": None}, "exclude: got NoneType"),
        ({"filter": "gate"}, "filter: got str"),
        ({"recipe": "fp8_tensor"}, "recipe: got 'fp8_tensor'.*is a format"),
        ({"recipe": DelayedScaling}, "recipe: got the class DelayedScaling"),
        ({"rngs": 3, "recipe": "nvfp4"}, "rngs: got int"),
        ({"rngs": nnx.Rngs(params=0), "recipe": "nvfp4"}, "rngs: got an nnx.Rngs with the streams params.*sr_rng"),
    ):
        with pytest.raises(MicrofloatError, match=message):
            mnnx.convert(model, **({"recipe": "mxfp8"} | arguments))
    assert not mnnx.convert(model, Placement([("*", None)])).converted, "a refused call changes nothing"
    assert mnnx.convert(model, "nvfp4", rngs=nnx.Rngs(0)).converted == ["gate_proj"], "the default stream serves"


def test_a_layer_with_a_product_of_its_own_keeps_it():
    def doubled(*arguments, **options):
        return 2 * jax.lax.dot_general(*arguments, **options)

    model = nnx.Dict(
        own=nnx.Linear(4, 4, rngs=nnx.Rngs(0), dot_general=doubled), plain=nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    )
    assert "product of its own, in its attribute dot_general" in mnnx.convert(model, "mxfp8").skipped["own"]
    assert mnnx.revert(model)["own"].dot_general is doubled


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        (None, {}, "it has no nnx.Linear"),
        ("lm_head", {}, r"default rule.*exclude=\(\) excludes nothing"),
        ("up", {"filter": lambda name, layer: False}, "filter returned False.*the name first"),
        ("up", {"exclude": ["u*"]}, "name matches 'u\\*'"),
    ],
)
def test_a_conversion_of_nothing_is_an_error_as_in_torch(name, options, reason):
    model = nnx.Dict({} if name is None else {name: nnx.Linear(4, 4, rngs=nnx.Rngs(0))})
    with pytest.raises(InvalidValueError, match=f"model: got a Dict without a layer to convert.*{reason}"):
        mnnx.convert(model, "mxfp8", **options)
    assert name != "up" or not mnnx.convert(model, Placement([("up", None)])).converted  # which is no mistake


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_gradients_without_the_state_are_noticed(jitted):
    """Flax's own grad and optimizer leave the scales where they are: a warning says so, and what to use."""
    model = Model(nnx.Rngs(0))
    mnnx.convert(model, DELAYED)
    with pytest.warns(UserWarning, match=r"scales never move.*microfloat\.jax\.nnx\.grad"):
        (nnx.jit if jitted else lambda f: f)(nnx.grad(mean_square))(model, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)
        nnx.grad(mean_square, argnums=1)(model, jnp.asarray(X))
        nnx.grad(mean_square, argnums=nnx.DiffState(0, (nnx.Param, mnnx.ScaleState)))(model, X)
        mnnx.grad(mean_square)(model, X)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("jit",))
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_training_moves_the_state(jitted):
    """Features J11."""
    model = Model(nnx.Rngs(0))
    mnnx.convert(model, DELAYED)
    optimizer = mnnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, x):
        loss, gradients = mnnx.value_and_grad(mean_square)(model, x)
        optimizer.update(model, gradients)
        return loss

    run = nnx.jit(step) if jitted else step
    amaxes, losses = [], []
    for _ in range(3 if jitted else 2):
        amaxes.append(amaxes_of_first(model))
        losses.append(float(run(model, optimizer, X)))
    assert losses[-1] < losses[0]
    op = model.first.dot_general
    np.testing.assert_allclose(op.input_amax_history[...][0], amaxes[-1], rtol=1e-6)
    np.testing.assert_allclose(op.input_scale[...][0], np.float32(448) / max(amaxes[:-1]), rtol=1e-6)
    np.testing.assert_allclose(mj.scaling.encode_scales(op.state())["x"], 448 / max(amaxes), rtol=1e-5)
    assert "ScaleState" not in str(jax.tree_util.tree_structure(optimizer.opt_state))


@pytest.mark.slow("further JAX programs of a checked kind")
def test_state_gradients_by_nnx_itself():
    """nnx.grad with a DiffState works too; a layer used twice still leaves the maximum."""
    model = Model(nnx.Rngs(0))
    mnnx.convert(model, DELAYED)
    both = nnx.DiffState(0, (nnx.Param, mnnx.ScaleState))
    gradients = nnx.jit(lambda m, x: nnx.grad(mean_square, argnums=both)(m, x))(model, X)
    np.testing.assert_allclose(
        gradients["first"]["dot_general"]["input_amax_history"][...][0], amaxes_of_first(model), rtol=1e-6
    )
    assert gradients["first"]["dot_general"]["input_scale"][...] == 1


@pytest.mark.slow("further JAX programs of a checked kind")
def test_forgotten_state_is_reported():
    model = Model(nnx.Rngs(0))
    mnnx.convert(model, DELAYED)
    optimizer = mnnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with logged(logging.WARNING) as messages, pytest.warns(UserWarning, match="never move"):
        optimizer.update(model, nnx.jit(nnx.grad(mean_square))(model, X))
    assert "no delayed-scaling state for first.dot_general, second.dot_general" in "\n".join(messages)
    with pytest.raises(ValueError, match="argnums: got"):
        mnnx.value_and_grad(mean_square, argnums=both_states())


def both_states():
    return (nnx.DiffState(0, nnx.Param),)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_streams_of_stochastic_recipes():
    """The stream sr_rng, or a key; forward alone needs neither; gradients without one are refused."""
    recipe = NVFP4BlockScaling()
    layer = mnnx.Linear(32, 16, recipe=recipe, rngs=nnx.Rngs(0, sr_rng=1))

    @nnx.jit
    def gradient(layer, x):
        return mnnx.grad(lambda m: jnp.sum(m(x) ** 2))(layer)["kernel"][...]

    first, second = gradient(layer, X), gradient(layer, X)
    assert not np.array_equal(np.asarray(first), np.asarray(second)), "every call draws a new key"
    silent = Model(nnx.Rngs(0))
    mnnx.convert(silent, recipe)
    silent(X)
    with pytest.raises(ValueError, match="key: got None"):
        nnx.grad(mean_square)(silent, X)
    op = mnnx.DotGeneral(recipe)
    assert op(X, X, (((1,), (1,)), ((), ())), key=jax.random.key(0)).shape == (6, 6)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_scanned_layers_have_stacked_state():
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(key):
        return mnnx.Linear(32, 32, recipe=DELAYED, rngs=nnx.Rngs(key))

    layers = stacked(jax.random.split(jax.random.key(0), 3))
    assert layers.dot_general.input_amax_history[...].shape == (3, 3)

    def loss(layers, x):
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jnp.mean(run(x, layers) ** 2)

    optimizer = mnnx.Optimizer(layers, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(layers, optimizer, x):
        value, gradients = mnnx.value_and_grad(loss)(layers, x)
        optimizer.update(layers, gradients)
        return value

    step(layers, optimizer, X)
    state = layers.dot_general
    assert state.input_amax_history[...][0, 0] == np.abs(X).max()
    assert (np.asarray(state.input_scale[...]) == 1).all()
    assert (np.asarray(state.input_amax_history[...])[:, 0] > 0).all()
    step(layers, optimizer, X)
    np.testing.assert_allclose(state.input_scale[...][0, 0], np.float32(448) / np.abs(X).max(), rtol=1e-6)


def test_split_and_merge_through_plain_jax():
    model = Model(nnx.Rngs(0))
    mnnx.convert(model, DELAYED)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    with pytest.warns(UserWarning, match="scales never move"):
        gradient = jax.jit(jax.grad(lambda p: mean_square(nnx.merge(graph, p, rest), X)))(params)
    assert jax.tree.leaves(gradient)[0].shape == (32,)


@nnx.vmap(in_axes=0, out_axes=0)
def stacked_layers(key):
    return nnx.Linear(32, 32, rngs=nnx.Rngs(key))


class Scanned(nnx.Module):
    """Three layers, stacked, one after the other."""

    def __init__(self):
        self.layers = stacked_layers(jax.random.split(jax.random.key(0), 3))

    def __call__(self, x):
        return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("recipe", [DELAYED, NVFP4BlockScaling()], ids=lambda recipe: type(recipe).__name__)
def test_convert_layers_that_are_stacked(recipe):
    """Layers made by nnx.vmap get a state, and a random stream, each."""
    model, plain = Scanned(), np.asarray(Scanned()(X))
    mnnx.convert(model, recipe, rngs=nnx.Rngs(sr_rng=0))
    assert 0 < relative_error(model(X), plain) < 0.4
    optimizer = mnnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)
    optimizer.update(model, nnx.jit(mnnx.grad(mean_square))(model, X))
    if recipe.is_delayed:
        newest = model.layers.dot_general.input_amax_history[:, 0]
        assert newest[0] == np.abs(X).max()
        assert len(set(np.asarray(newest).tolist())) == 3


def test_rngs_of_another_kind():
    with pytest.raises(InvalidTypeError, match=r"rngs: got int, needed an nnx.Rngs"):
        mnnx.convert(Model(nnx.Rngs(0)), NVFP4BlockScaling(), rngs=3)


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("recipe", [DELAYED, NOISY], ids=["delayed", "noisy"])
def test_experts(recipe):
    """Features J13: RaggedDot holds a state per expert, which the optimizer advances with the rest."""

    class Experts(nnx.Module):
        def __init__(self, recipe, rngs):
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (3, 32, 8)))
            self.dot = mnnx.RaggedDot(recipe, num_groups=3, rngs=rngs)

        def __call__(self, x, sizes):
            return self.dot(x, self.kernel[...], sizes)

    x, sizes = jnp.asarray(np.random.default_rng(2).standard_normal((10, 32)), jnp.float32), jnp.array([4, 0, 6])

    def loss(model):
        return jnp.sum(model(x, sizes) ** 2)

    model = Experts(recipe, nnx.Rngs(0, sr_rng=1))
    optimizer = mnnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
    kernel = np.asarray(model.kernel[...])

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, mnnx.grad(loss)(model))

    step(model, optimizer)
    changed = (np.asarray(model.kernel[...]) != kernel).any((1, 2))
    np.testing.assert_array_equal(changed, [True, False, True])
    if recipe is DELAYED:
        history = model.dot.input_amax_history[...]
        np.testing.assert_array_equal(history[:, 0], [jnp.abs(x[:4]).max(), 0, jnp.abs(x[4:]).max()])
    with pytest.raises(InvalidValueError, match="num_groups: got 0"):
        mnnx.RaggedDot(DELAYED, num_groups=0)


@pytest.mark.slow("watches and autocasts of JAX modules")
def test_layers_without_a_recipe_join_the_autocast():
    """Features J14; parameters are Flax's, noise needs a stream of its own, delayed scaling a pinned layer."""
    layer = mnnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(0, sr_rng=1))
    plain = nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer.kernel[...], plain.kernel[...])
    x = jax.random.normal(jax.random.key(1), (4, 32))
    call = nnx.jit(lambda layer, x: layer(x))
    np.testing.assert_array_equal(call(layer, x), plain(x))
    pinned = mnnx.Linear(32, 16, use_bias=False, recipe=NOISY, rngs=nnx.Rngs(0, sr_rng=1))
    with mj.autocast(NOISY):
        np.testing.assert_array_equal(call(layer, x), pinned(x))
        assert nnx.eval_shape(nnx.grad(lambda layer: jnp.sum(layer(x) ** 2)), layer).kernel.shape == (32, 16)
    with mj.autocast(enabled=False):
        np.testing.assert_array_equal(pinned(x), plain(x))
    with mj.autocast(DELAYED), pytest.raises(NotSupportedError, match=r"autocast: got DelayedScaling.*convert\(model"):
        layer(x)
    assert mnnx.convert(layer, "mxfp8").rows[0].action == "converted"
    mnnx.revert(layer)
    np.testing.assert_array_equal(layer(x), plain(x))


def test_an_einsum_without_a_recipe_is_that_of_flax():
    layer, plain = (kind.Einsum("mk,kn->nm", (32, 16), rngs=nnx.Rngs(0)) for kind in (mnnx, nnx))
    np.testing.assert_array_equal(layer(X), plain(X))
    with mj.autocast("mxfp8"):
        assert 0 < relative_error(layer(X), plain(X)) < 0.1


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_a_model_prints_as_flax_prints_it(recipe):
    """A row for each layer and each op, with its state; none for what the op asks itself."""
    model = nnx.Sequential(nnx.Linear(32, 16, rngs=nnx.Rngs(0)))
    mnnx.convert(model, recipe)
    table = nnx.tabulate(model, jnp.ones((4, 32)), console_kwargs={"width": 200, "force_terminal": False})
    assert re.findall(r"layers\S*", table) == ["layers/0", "layers/0/dot_general"]
    assert ("input_amax_history" in table) is (recipe == "delayed")
