"""A mixture of experts in Flax: modules of a user's own that call `lax.ragged_dot`, converted and trained."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import microfloat.jax as mj
import microfloat.jax.linen as ml
import microfloat.jax.nnx as mnnx
from microfloat import Placement
from microfloat.errors import NotSupportedError, PlacementError
from microfloat.recipes import RECIPES, DelayedScaling

G, D, F, TOP = 4, 32, 48, 2
X = jax.random.normal(jax.random.key(2), (24, D))
TARGET = jnp.sin(3 * X)
TRAINED = ["delayed", "fp8_current", "mxfp8", "nvfp4"]
train_each = pytest.mark.parametrize("name", TRAINED)
slow_but_one = pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("fp8_current",))


def mixed(router, experts, x):
    """Each token through its best two experts, weighted by the router."""
    weights, chosen = lax.top_k(jax.nn.softmax(router(x)), TOP)
    order = jnp.argsort(chosen.reshape(-1))
    y = experts(x[order // TOP], jnp.bincount(chosen.reshape(-1), length=G))
    return jnp.einsum("tkd,tk->td", jnp.zeros_like(y).at[order].set(y).reshape(*chosen.shape, -1), weights)


class Experts(nnx.Module):
    """As a user writes them: the product is an attribute, as that of `nnx.Linear` is."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.gate_up = nnx.Param(init(rngs.params(), (G, D, 2 * F)))
        self.down = nnx.Param(init(rngs.params(), (G, F, D)))
        self.up_dot = self.down_dot = lax.ragged_dot

    def __call__(self, x, sizes):
        gate, up = jnp.split(self.up_dot(x, self.gate_up[...], sizes), 2, axis=-1)
        return self.down_dot(nnx.silu(gate) * up, self.down[...], group_sizes=sizes)


class Mixture(nnx.Module):
    def __init__(self, rngs):
        self.router = nnx.Linear(D, G, rngs=rngs)
        self.experts = Experts(rngs)

    def __call__(self, x):
        return mixed(self.router, self.experts, x)


@pytest.mark.slow("training of converted experts")
@train_each
def test_converted_experts_train_in_nnx(name):
    model = Mixture(nnx.Rngs(0))
    report = mnnx.convert(model, name, rngs=nnx.Rngs(sr_rng=1))
    assert report.converted == ["experts.down_dot", "experts.up_dot"]
    assert "name matches 'router'" in report.skipped["router"]
    assert report.share == 3 * G * D * F / (3 * G * D * F + D * G + G)
    optimizer = mnnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, gradients = mnnx.value_and_grad(lambda model: jnp.mean((model(X) - TARGET) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(3)]
    assert losses[2] < 0.8 * losses[0]
    states = nnx.state(model, mnnx.ScaleState)
    if name != "delayed":
        assert not jax.tree.leaves(states)
    else:
        assert set(states["experts"]) == {"up_dot", "down_dot"}
        used = model.experts.up_dot.input_amax_history[...][:, 0] > 0
        assert (model.experts.up_dot.input_scale[...][used] != 1).all()
        assert model.experts.down_dot.kernel_amax_history.shape == (G, 1024)
    assert mnnx.revert(model).experts.up_dot is lax.ragged_dot


class LinenExperts(nn.Module):
    """As a user writes them: a class of products is a field, as that of `nn.Dense` is."""

    ragged_dot_cls: Any = ml.ragged_dot_cls()

    @nn.compact
    def __call__(self, x, sizes):
        init = nn.initializers.lecun_normal(batch_axis=0)
        gate_up, down = self.param("gate_up", init, (G, D, 2 * F)), self.param("down", init, (G, F, D))
        gate, up = jnp.split(self.ragged_dot_cls(name="up_dot")(x, gate_up, group_sizes=sizes), 2, axis=-1)
        return self.ragged_dot_cls(name="down_dot")(nn.silu(gate) * up, down, sizes)


class LinenMixture(nn.Module):
    ragged_dot_cls: Any = ml.ragged_dot_cls()

    @nn.compact
    def __call__(self, x):
        return mixed(nn.Dense(G, name="router"), LinenExperts(self.ragged_dot_cls, name="experts"), x)


@slow_but_one
@train_each
def test_experts_train_in_linen(name):
    model, rngs = LinenMixture(ml.ragged_dot_cls(name)), {"sr_rng": jax.random.key(1)}
    variables = jax.jit(model.init)(jax.random.key(0), X)
    if name != "delayed":
        assert set(variables) == {"params"}
    else:
        assert set(variables["_overwrite_with_gradient"]["experts"]) == {"up_dot", "down_dot"}
    state = ml.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-2))

    @jax.jit
    def step(state):
        def loss(variables):
            return jnp.mean((state.apply_fn(variables, X, rngs=rngs) - TARGET) ** 2)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    losses = []
    for _ in range(3):
        state, value = step(state)
        losses.append(float(value))
    assert losses[2] < 0.8 * losses[0]
    if name == "delayed":
        slots = state.params["_overwrite_with_gradient"]["experts"]["up_dot"]
        used = slots["input_amax_history"][:, 0] > 0
        assert slots["input_scale"].shape == (G, 1)
        assert (slots["input_scale"][used] != 1).all()


@pytest.mark.slow("watches and autocasts of JAX experts")
def test_linen_experts_without_a_recipe_follow_the_autocast():
    """High precision outside of one; parameters have the same names."""
    free, pinned = LinenExperts(), LinenExperts(ml.ragged_dot_cls("fp8_current"))
    sizes = jnp.array([5, 0, 19, 0])
    variables = free.init(jax.random.key(0), X, sizes)
    gate, up = jnp.split(lax.ragged_dot(X, variables["params"]["gate_up"], sizes), 2, axis=-1)
    plain = lax.ragged_dot(nn.silu(gate) * up, variables["params"]["down"], sizes)
    np.testing.assert_array_equal(free.apply(variables, X, sizes), plain)
    with mj.autocast("fp8_current"):
        np.testing.assert_array_equal(free.apply(variables, X, sizes), pinned.apply(variables, X, sizes))


class OneProduct(nnx.Module):
    """One product, which this library's op or module may be from the start."""

    def __init__(self, product, lead=()):
        self.kernel = nnx.Param(jnp.ones((*lead, 3, 16, 8)))
        self.product = product

    def __call__(self, x, sizes):
        return self.product(x, self.kernel[...], sizes)


@pytest.mark.parametrize(
    "product", [lax.ragged_dot, mj.ragged_dot(), mj.ragged_dot("mxfp8"), mnnx.RaggedDot("mxfp8", num_groups=3)],
    ids=["lax", "op", "op of a recipe", "module"],
)  # fmt: skip
def test_every_kind_of_product_is_converted_and_reverted(product):
    """With one product the experts have the name of their module and the shape of their kernel."""
    model = nnx.Dict(experts=OneProduct(product))
    (row,) = mnnx.convert(model, Placement([("*experts", "fp8_row")]))
    had_one = getattr(product, "recipe", None) is not None
    assert (row.name, row.shape, row.action) == ("experts", (8, 16), "repinned" if had_one else "converted")
    assert isinstance(model["experts"].product, mnnx.RaggedDot)
    assert model["experts"].product.recipe == RECIPES["fp8_row"]()
    (row,) = mnnx.convert(model, Placement([("experts", None)]))
    assert row.action == "high precision"
    assert model["experts"].product is lax.ragged_dot


def test_state_of_stacked_experts_is_stacked():
    model = OneProduct(lax.ragged_dot, lead=(5,))
    mnnx.convert(model, DelayedScaling(amax_history_len=4))
    assert model.product.kernel_amax_history.shape == (5, 3, 4)
    assert model.product.input_scale.shape == (5, 3, 1)


def test_experts_that_convert_cannot_see_or_count_are_named():
    class Inline(nnx.Module):
        def __init__(self):
            self.up = nnx.Param(jnp.ones((3, 16, 8)))

        def __call__(self, x, sizes):
            return lax.ragged_dot(x, self.up[...], sizes)

    class Borrowed(nnx.Module):
        """Its kernels are those of other modules."""

        def __init__(self):
            self.product = lax.ragged_dot

    rngs = nnx.Rngs(0)
    others = {"conv": nnx.Conv(4, 4, (3,), rngs=rngs), "plain": nnx.Linear(4, 4, rngs=rngs)}
    model = nnx.Dict(inline=Inline(), borrowed=Borrowed(), **others)
    report = mnnx.convert(model, "mxfp8")
    assert "RaggedDot(num_groups=...)" in report.skipped["borrowed"]
    (unseen,) = report.unseen
    assert (unseen.name, unseen.action) == ("inline", "not seen")
    assert "up" in unseen.reason
    assert "jax.lax.ragged_dot in an attribute" in unseen.reason
    assert model["borrowed"].product is lax.ragged_dot
    model["borrowed"].product = nnx.data(mnnx.RaggedDot(num_groups=7))
    assert set(mnnx.convert(model, DelayedScaling(amax_history_len=2)).converted) == {"borrowed", "plain"}
    assert model["borrowed"].product.input_scale.shape == (7, 1)
    with pytest.raises(PlacementError, match=r"no layer: '\*\.expert'"):
        mnnx.convert(model, Placement([("*.expert", "mxfp8")]))


def test_excluded_and_filtered_experts_stay():
    plain = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    model = nnx.Dict(experts=OneProduct(lax.ragged_dot), router=OneProduct(lax.ragged_dot), plain=plain)
    report = mnnx.convert(model, "mxfp8", filter=lambda name, module: "experts" not in name)
    assert set(report.skipped) == {"experts", "router"}
    assert mnnx.convert(model, "mxfp8", exclude=("*experts",)).converted == ["plain", "router"]


def test_grouped_products_take_what_lax_takes():
    """By position and by keyword; an offset, which nothing implements, is refused by all three fronts."""
    x, kernels, sizes = X[:5, :16], jnp.ones((3, 16, 8)), jnp.array([2, 0, 3])
    module, cls = mnnx.RaggedDot("fp8_row", num_groups=3), ml.ragged_dot_cls("fp8_row")
    fronts = (mj.ragged_dot("fp8_row"), module, lambda *args, **options: cls().apply({}, *args, **options))
    for front in fronts:
        options = {"group_sizes": sizes, "preferred_element_type": jnp.bfloat16, "out_sharding": None}
        shape = jax.eval_shape(lambda front=front, options=options: front(x, kernels, **options))
        assert (shape.shape, shape.dtype) == ((5, 8), jnp.bfloat16)
        with pytest.raises(NotSupportedError, match="group_offset: got an offset"):
            front(x, kernels, sizes, group_offset=jnp.array([1]))


def modules_of(function, *arguments):
    """Names of the modules that a watched function reads."""
    _, readings = jax.eval_shape(function, *arguments)
    return {label.module for label in readings.labels}


FEW = {"metrics": ("amax",), "what_if": ()}


@pytest.mark.slow("watches and autocasts of JAX experts")
def test_watches_name_the_products_of_experts():
    """In linen the name of the op; one that has none is its module's, under a pinned recipe and under an autocast."""
    model, x = LinenExperts(ml.ragged_dot_cls("fp8_row")), (X, jnp.array([5, 0, 19, 0]))
    variables = jax.eval_shape(model.init, jax.random.key(0), *x)

    def watched(model):
        gradient = jax.grad(lambda variables: model.apply(variables, *x).sum())
        return mj.watch_outputs(gradient, **FEW)

    assert modules_of(watched(model), variables) == {"LinenExperts.up_dot", "LinenExperts.down_dot"}

    class Unnamed(nn.Module):
        ragged_dot_cls: Any
        dot_general_cls: Any

        @nn.compact
        def __call__(self, x, sizes):
            x = nn.Dense(D, dot_general_cls=self.dot_general_cls)(x)
            return self.ragged_dot_cls()(x, self.param("kernel", nn.initializers.ones, (G, D, F)), sizes)

    class Model(nn.Module):
        recipe: Any = None

        @nn.compact
        def __call__(self, x, sizes):
            return Unnamed(ml.ragged_dot_cls(self.recipe), ml.dot_general_cls(self.recipe), name="experts")(x, sizes)

    named = {"Model.experts", "Model.experts.Dense_0"}
    variables = jax.eval_shape(Model().init, jax.random.key(0), *x)
    assert modules_of(watched(Model("fp8_row")), variables) == named
    with mj.autocast("fp8_row"):
        assert modules_of(watched(Model()), variables) == named


@pytest.mark.slow("watches and autocasts of JAX experts")
def test_nnx_watches_name_the_products_of_experts():
    model = nnx.Dict(mixture=Mixture(nnx.Rngs(0)), one=OneProduct(lax.ragged_dot))
    mnnx.convert(model, "fp8_row")

    def loss(model):
        y = model["one"](X[:, :16], jnp.array([4, 0, 20]))
        return model["mixture"](X).sum() + y.sum()

    watched = nnx.jit(mnnx.watch_outputs(lambda model: mnnx.grad(loss)(model), **FEW))
    _, readings = nnx.eval_shape(watched, model)
    names = {"mixture.experts.up_dot", "mixture.experts.down_dot", "one"}
    assert {label.module for label in readings.labels} == names
