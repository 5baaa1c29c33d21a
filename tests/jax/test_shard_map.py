"""dot_general inside shard_map: data, tensor, fully sharded parallelism; 4 and 8 host devices; check_vma on and off.

x [M, K], w [N, K], dy [M, N]; mesh axes "data" and "model". Results and gradients are those of one device.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import microfloat.jax as mj
from microfloat.errors import InvalidValueError
from microfloat.recipes import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.jax.compare import relative_error

CPUS = jax.devices("cpu")
pytestmark = pytest.mark.skipif(len(CPUS) < 8, reason=f"needs 8 host devices, the CPU client has {len(CPUS)}")

RNG = np.random.default_rng(23)
X = (RNG.standard_normal((256, 128)) * np.linspace(1, 5, 256)[:, None]).astype(np.float32)
W, DY = (RNG.standard_normal(shape).astype(np.float32) for shape in ((128, 128), (256, 128)))
PLAIN = (((1,), (1,)), ((), ()))
RECIPES = {
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=3),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
MESHES = {4: {"data": 2, "model": 2}, 8: {"data": 2, "model": 4}}


def data_parallel(op, x, w):
    return op(x, w, PLAIN)


def tensor_parallel_k(op, x, w):
    """Partial sums in float32, one sum over devices, then whatever rounding there is."""
    return lax.psum(op(x, w, PLAIN, preferred_element_type=jnp.float32), "model")


def fully_sharded(op, x, w):
    return op(x, lax.all_gather(w, "data", axis=0, tiled=True), PLAIN)


# name -> function of the shards, specs of x, w and y, mesh axes over which every device has the same part of y.
LAYOUTS = {
    "data": (data_parallel, P(("data", "model"), None), P(), P(("data", "model"), None), ()),
    "tensor K": (tensor_parallel_k, P(None, "model"), P(None, "model"), P(), ("data",)),
    "tensor N": (data_parallel, P(), P("model", None), P(None, "model"), ("data",)),
    "data x tensor": (data_parallel, P("data", None), P("model", None), P("data", "model"), ()),
    "fully sharded": (fully_sharded, P("data", None), P("data", None), P("data", None), ("model",)),
}


def mesh_of(devices):
    shape = MESHES[devices]
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds, devices=CPUS[:devices])


def on_one_device(recipe):
    return jax.jit(lambda x, w, dy, state: _pulled(partial(_one_device, recipe), x, w, dy, state))


def _one_device(recipe, x, w, state):
    return mj.dot_general(recipe)(x, w, PLAIN, **({} if state is None else {"state": state}))


def _pulled(function, x, w, dy, state):
    y, back = jax.vjp(function, x, w, state)
    return y, *back(dy)


EXPECTED = {}


def expected_of(name):
    """(y, dx, dw, new state) on one device; made once per process."""
    if name not in EXPECTED:
        recipe = RECIPES[name]
        state = mj.scaling.init(recipe) if recipe.is_delayed else None
        EXPECTED[name] = on_one_device(recipe)(X, W, DY, state)
    return EXPECTED[name]


def assert_equal_results(results, expected):
    for actual, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert actual.shape == wanted.shape
        # Bytes of codes and scales are equal, so that only the order of sums differs.
        assert relative_error(actual, wanted) < 1e-6


# Every layout with state and check_vma, and once without either; stateless recipes in turn.
STATELESS = [("current", 4), ("mxfp8", 8), ("nvfp4", 4)]
CASES = [("delayed", 8, layout, True) for layout in LAYOUTS]
CASES += [("delayed", 8, "tensor K", False), ("delayed", 8, "data x tensor", False)]
CASES += [
    (*STATELESS[(turn + first) % 3], layout, check_vma)
    for first, check_vma in enumerate((True, False))
    for turn, layout in enumerate(LAYOUTS)
]


@pytest.mark.slow_cases(
    "further JAX programs of a checked kind",
    all_but=("delayed-*-tensor K-True",),
)
@pytest.mark.parametrize(("name", "devices", "layout", "check_vma"), CASES)
def test_parallelism(name, devices, layout, check_vma):
    local, x_spec, w_spec, y_spec, repeated = LAYOUTS[layout]
    recipe, mesh = RECIPES[name], mesh_of(devices)
    op = mj.dot_general(recipe, axis_names=() if check_vma else ("data", "model"))
    state = mj.scaling.init(recipe) if recipe.is_delayed else None

    def sharded(x, w, state):
        called = op if state is None else partial(op, state=state)
        return local(called, x, w)

    mapped = jax.shard_map(
        sharded, mesh=mesh, in_specs=(x_spec, w_spec, P()), out_specs=y_spec, check_vma=check_vma
    )  # fmt: skip
    results = jax.jit(lambda x, w, dy, state: _pulled(mapped, x, w, dy, state))(X, W, DY, state)
    expected = expected_of(name)
    if state is not None and not check_vma:
        # There JAX hands each of several devices that have the same part of y an equal share of dy.
        *others, new = expected
        shares = np.prod([mesh.shape[axis] for axis in repeated])
        expected = (*others, replace(new, dy=new.dy._replace(amax_history=new.dy.amax_history / shares)))
    assert_equal_results(results, expected)


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("check_vma", [True, False])
def test_amaxes_of_each_device(check_vma):
    """reduce_amax=False: every device has a state of its own, and records its own amaxes."""
    recipe, mesh = DelayedScaling(amax_history_len=4, reduce_amax=False), mesh_of(4)
    op = mj.dot_general(recipe, axis_names=() if check_vma else ("data", "model"))
    count, spec = 4, P(("data", "model"))
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * count), mj.scaling.init(recipe))

    def local(x, w, states):
        return op(x, w, PLAIN, state=jax.tree.map(lambda leaf: leaf[0], states))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec, P(), spec), out_specs=spec, check_vma=check_vma)
    scaled = X * jnp.repeat(jnp.arange(1.0, count + 1), X.shape[0] // count)[:, None].astype(X.dtype)
    *_, new = jax.jit(lambda x, w, dy, states: _pulled(mapped, x, w, dy, states))(scaled, W, DY, states)
    parts = np.abs(np.asarray(scaled, np.float32)).reshape(count, -1)
    np.testing.assert_array_equal(new.x.amax_history[:, 0], parts.max(axis=1))
    np.testing.assert_array_equal(new.w.amax_history[:, 0], [np.abs(np.asarray(W, np.float32)).max()] * count)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("pmap-named",))
@pytest.mark.parametrize("names", [(), ("data",)], ids=["unnamed", "named"])
@pytest.mark.parametrize("how", ["vma", "no_vma", "pmap"])
def test_a_gradient_that_is_taken_inside_is_combined_by_its_maximum(how, names):
    """docs/jax.md: pmax gives every device the state of the whole batch, whether or not JAX has combined it before."""
    recipe = RECIPES["delayed"]
    op, state = mj.dot_general(recipe, axis_names=names), mj.scaling.init(recipe)
    x = np.stack([X[:2, :4], X[-2:, :4]])

    def local(state, x, w):
        new = jax.grad(lambda state: jnp.sum(op(x, w, PLAIN, state=state)))(state)
        return lax.pmax(new, "data")

    if how == "pmap":
        found = jax.pmap(local, "data", in_axes=(None, 0, None), devices=CPUS[:2])(state, x, W[:2, :4])
    else:
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=CPUS[:2])
        found = jax.jit(jax.shard_map(
            lambda state, x, w: jax.tree.map(lambda leaf: leaf[None], local(state, x[0], w)), mesh=mesh,
            in_specs=(P(), P("data"), P()), out_specs=P("data"), check_vma=how == "vma",
        ))(state, x, W[:2, :4])  # fmt: skip
    for device in range(2):
        assert found.x.amax_history[device, 0] == np.abs(x).max()
        assert found.w.amax_history[device, 0] == np.abs(W[:2, :4]).max()
        assert (found.x.scale_enc[device], found.dy.scale_enc[device]) == (1, 1)


def test_one_state_cannot_hold_the_amaxes_of_each_device():
    recipe = DelayedScaling(amax_history_len=4, reduce_amax=False)
    op, state = mj.dot_general(recipe), mj.scaling.init(recipe)
    mapped = jax.shard_map(
        lambda x, w, state: op(x, w, PLAIN, state=state), mesh=mesh_of(4), in_specs=(P("data"), P(), P()),
        out_specs=P("data"),
    )  # fmt: skip
    with pytest.raises(InvalidValueError, match=r"state: got one for all devices of mesh axes \['data'\]"):
        jax.grad(lambda x: mapped(x, W, state).astype(jnp.float32).sum())(X)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_gathered_operands():
    """A gathered weight is whole: gathered as invariant, any size fits; else it looks as if K were sharded."""
    op, x, w = mj.dot_general(MXFP8BlockScaling()), X[:, :72], W[:64, :72]
    expected = _pulled(lambda x, w, _: op(x, w, PLAIN), x, w, DY[:, :64], None)

    def gathering(to):
        def local(x, w):
            return op(x, lax.all_gather(w, "data", axis=0, tiled=True, to=to), PLAIN)

        specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
        mapped = jax.shard_map(local, mesh=mesh_of(4), axis_names={"data", "model"}, **specs)
        return jax.jit(lambda x, w, dy: _pulled(lambda x, w, _: mapped(x, w), x, w, dy, None))

    assert_equal_results(gathering("invarying")(x, w, DY[:, :64]), expected)
    with pytest.raises(ValueError, match=r"contraction K of fprop: got shards of 72.*to='invarying'"):
        gathering("varying")(x, w, DY[:, :64])


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("fp8_tensor", "mxfp8"))
@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4_2d", "mxfp8"])
def test_quantize_of_shards(name):
    """`quantize` measures what it is given; with the reduced amax the shards are those of the whole tensor's codes."""

    def local(x):
        if name == "mxfp8":
            return mj.quantize(x, name).codes
        return mj.quantize(x, name, amax=lax.pmax(jnp.max(jnp.abs(x)), "data")).codes

    mapped = jax.shard_map(local, mesh=mesh_of(4), in_specs=P("data"), out_specs=P("data"))
    whole = mj.quantize(X, name).codes
    assert np.asarray(jax.jit(mapped)(X)).tobytes() == np.asarray(whole).tobytes()


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_eager_shard_map(check_vma):
    """Outside of jit too."""
    op = mj.dot_general(RECIPES["current"], axis_names=() if check_vma else ("data",))
    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    mapped = jax.shard_map(lambda x, w: op(x, w, PLAIN), mesh=mesh_of(4), check_vma=check_vma, **specs)
    assert relative_error(mapped(X, W), expected_of("current")[0]) < 1e-6


@pytest.mark.slow("further JAX programs of a checked kind")
def test_noise_of_shards():
    """One key repeats its noise on every shard; with the axis index folded in, shards differ."""
    op, key = mj.dot_general(NVFP4BlockScaling()), jax.random.key(0)
    row, dy = np.tile(X[:1], (256, 1)), np.tile(DY[:1], (256, 1))

    def dx_of(fold):
        def local(x, dy):
            folded = jax.random.fold_in(key, lax.axis_index("data")) if fold else key
            return jax.vjp(lambda x: op(x, W, PLAIN, key=folded), x)[1](dy)[0]

        return jax.jit(jax.shard_map(local, mesh=mesh_of(4), in_specs=(P("data"), P("data")), out_specs=P("data")))

    for fold in (False, True):
        first, second = np.split(np.asarray(dx_of(fold)(row, dy)), 2)
        assert np.array_equal(first, second) != fold
