"""Sharded operands on eight host devices: jit on automatic and explicit meshes, fp8_ops and refusals in shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import microfloat.jax as mj
from microfloat import reference
from microfloat.jax import fp8_ops
from microfloat.recipes import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.jax.compare import assert_same_bytes, relative_error

CPUS = jax.devices("cpu")
pytestmark = pytest.mark.skipif(len(CPUS) < 8, reason=f"needs 8 host devices, the CPU client has {len(CPUS)}")

RNG = np.random.default_rng(16)
X = (RNG.standard_normal((64, 128)) * np.linspace(1, 5, 64)[:, None]).astype(np.float32)
W, DY = (RNG.standard_normal((64, size)).astype(np.float32) for size in (128, 64))
PLAIN = (((1,), (1,)), ((), ()))
DELAYED = DelayedScaling(amax_history_len=3)
RECIPES = {
    "current": Float8CurrentScaling(),
    "delayed": DELAYED,
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}


def mesh_of(kind, shape=(2, 4)):
    count = int(np.prod(shape))
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(kind,) * len(shape), devices=CPUS[:count])


def arguments_of(recipe):
    if recipe.is_delayed:
        return {"state": mj.scaling.init(recipe)}
    return {"seed": np.array([1, 2], np.uint32)} if recipe.is_stochastic else {}


def three_gemms(recipe, out_sharding=None):
    op, arguments = mj.dot_general(recipe), arguments_of(recipe)

    def run(x, w, dy):
        y, back = jax.vjp(lambda x, w: op(x, w, PLAIN, out_sharding=out_sharding, **arguments), x, w)
        return y, *back(dy)

    return run


# x, w, dy: data parallel over all devices, tensor parallel along K and along N, FSDP (both sharded along rows).
LAYOUTS = {
    "data": (P(("data", "model"), None), P(None, None), P(("data", "model"), None)),
    "tensor_K": (P(None, "model"), P(None, "model"), P(None, None)),
    "tensor_N_data": (P("data", None), P("model", None), P("data", "model")),
    "fsdp": (P("data", None), P("data", None), P("data", None)),
}


def placed(mesh, layout):
    """x, w and dy as the layout shards them."""
    return [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip((X, W, DY), LAYOUTS[layout], strict=True)
    ]


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("name", RECIPES)
def test_jit_with_sharded_operands(name):
    """On 4 and 8 devices the result does not depend on the sharding: whole tensors' amaxes, noise of global indices."""
    recipe = RECIPES[name]
    expected = jax.jit(three_gemms(recipe))(X, W, DY)
    mesh = mesh_of(AxisType.Auto, (2, 2) if name in ("current", "delayed") else (2, 4))
    layouts = {"nvfp4": ("tensor_K", "tensor_N_data"), "mxfp8": ("fsdp",), "delayed": ("tensor_K",)}
    for layout in layouts.get(name, ("data",)):
        with jax.set_mesh(mesh):
            results = jax.jit(three_gemms(recipe))(*placed(mesh, layout))
        for actual, wanted in zip(results, expected, strict=True):
            assert relative_error(actual, wanted) < 1e-6, (layout, name)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("tensor_K",))
@pytest.mark.parametrize("layout", ["data", "tensor_K", "tensor_N_data"])
def test_explicit_meshes(layout):
    mesh = mesh_of(AxisType.Explicit)
    out = P(None, None) if layout == "tensor_K" else None
    expected = jax.jit(three_gemms(MXFP8BlockScaling()))(X, W, DY)
    with jax.set_mesh(mesh):
        results = jax.jit(three_gemms(MXFP8BlockScaling(), out))(*placed(mesh, layout))
        assert results[0].sharding.spec == LAYOUTS[layout][2]
    for actual, wanted in zip(results, expected, strict=True):
        assert relative_error(actual, wanted) < 1e-6


def on_mesh(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
# Kinds of the mesh axes, then x, w and dy: axes of which JAX infers one, all, or none from the types of arrays.
UNENTERED = {
    "data_tensor": ((EXPLICIT, EXPLICIT), *LAYOUTS["tensor_N_data"]),
    "tensor_K": ((EXPLICIT, EXPLICIT), P("data", "model"), P(None, "model"), P("data", None)),
    "x_alone_in_K": ((EXPLICIT, EXPLICIT), P(None, "model"), P(None, None), P(None, None)),
    "two_axes_in_M": ((EXPLICIT, EXPLICIT), P(("data", "model"), None), P(None, None), P(("data", "model"), None)),
    "automatic_data": ((AUTO, EXPLICIT), P("data", None), P("model", None), P("data", "model")),
    "automatic_model": ((EXPLICIT, AUTO), P("data", "model"), P(None, "model"), P("data", None)),
}
UNENTERED_CASES = [("current", name) for name in UNENTERED]
UNENTERED_CASES += [("nvfp4", "data_tensor"), ("nvfp4", "tensor_K"), ("mxfp8", "data_tensor"), ("delayed", "tensor_K")]


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("current-automatic_data",))
@pytest.mark.parametrize(("name", "layout"), UNENTERED_CASES)
def test_explicit_mesh_that_is_not_entered(name, layout):
    """The mesh of `jax.make_mesh`, without `jax.set_mesh`: values of one device, shardings of lax.dot_general."""
    kinds, *specs = UNENTERED[layout]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds, devices=CPUS[:4])
    operands = [on_mesh(mesh, array, *spec) for array, spec in zip((X, W, DY), specs, strict=True)]
    out = NamedSharding(mesh, specs[2]) if layout == "tensor_K" else None
    results = jax.jit(three_gemms(RECIPES[name], out))(*operands)

    def plain(x, w, dy):
        y, back = jax.vjp(lambda x, w: lax.dot_general(x, w, PLAIN, out_sharding=out), x, w)
        return y, *back(dy)

    for actual, alike in zip(results, jax.jit(plain)(*operands), strict=True):
        assert jax.typeof(actual) == jax.typeof(alike)
    for actual, wanted in zip(results, jax.jit(three_gemms(RECIPES[name]))(X, W, DY), strict=True):
        assert relative_error(actual, wanted) < 1e-6


@pytest.mark.slow("further JAX programs of a checked kind")
def test_eager_calls_on_an_explicit_mesh():
    """An eager call has no context that says on which devices an abstract mesh lies; state is on one device."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=CPUS[:4])
    x, w = on_mesh(mesh, X, "data", None), on_mesh(mesh, W, "model", None)
    op, state = mj.dot_general(DELAYED), mj.scaling.init(DELAYED)

    def pulled(x, w, dy):
        y, back = jax.vjp(lambda x, w, state: op(x, w, PLAIN, state=state), x, w, state)
        return y, *back(dy)

    results = pulled(x, w, on_mesh(mesh, DY, "data", "model"))
    assert [value.sharding.spec for value in results[:3]] == [P("data", "model"), P("data", None), P("model", None)]
    for actual, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(pulled(X, W, DY)), strict=True):
        assert relative_error(actual, wanted) < 1e-6
    moved = mj.scaling.apply(state, results[3])  # a state of one device and one of four
    np.testing.assert_array_equal(moved.x.amax_history, [np.abs(X).max(), 0, 0])


@pytest.mark.slow("further JAX programs of a checked kind")
def test_stored_weights_on_an_explicit_mesh():
    """quantize, the product with a stored weight and its dx, scaled_matmul with leading axes, packed bytes."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=CPUS[:4])
    x = on_mesh(mesh, X.reshape(4, 16, 128), "data", "model", None)
    q, plain = mj.quantize(on_mesh(mesh, W, None, "model"), "mxfp8"), mj.quantize(W, "mxfp8")
    assert_same_bytes(q, reference.quantize(W, "mxfp8"))
    op = mj.dot_general("mxfp8")

    def run(x, w):
        y, back = jax.vjp(lambda x: op(x, w, (((2,), (1,)), ((), ()))), x)
        return y, *back(y), mj.scaled_matmul(mj.quantize(x, "mxfp8"), w), w.dequantize()

    results = jax.jit(run)(x, q)
    assert [value.sharding.spec for value in results[:2]] == [P("data", "model", None)] * 2
    for actual, wanted in zip(results, jax.jit(run)(np.asarray(x), plain), strict=True):
        assert relative_error(actual, wanted) < 1e-6
    tiles = mj.to_blocked(q.scale, [24, 40])
    np.testing.assert_array_equal(tiles, mj.to_blocked(plain.scale, [24, 40]))
    np.testing.assert_array_equal(mj.from_blocked(tiles, 64, 4, [24, 40]), q.scale)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_other_ops_on_an_explicit_mesh():
    """ragged_dot, einsum with batch axes, vmap, and the direct op of Flax, which fails there in Flax."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=CPUS[:4])
    x, w = X.reshape(4, 16, 128), np.stack([W, W + 1, 2 - W, W * W])
    sizes = np.array([20, 0, 30, 10], np.int32)
    ragged, contract = mj.ragged_dot("nvfp4"), mj.einsum("mxfp8")
    direct = fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=3)
    variables = direct.init(jax.random.key(0), X, W, PLAIN)
    cases = (
        (lambda x, w: ragged(x, w, sizes, seed=5), (X, w.swapaxes(1, 2)), (("data",), (None, None, "model"))),
        (lambda x, w: contract("bmk,bnk->nbm", x, w), (x, w), (("data", "model"), ("data",))),
        (jax.vmap(lambda x, w: contract("mk,nk->mn", x, w)), (x, w), (("data", "model"), ("data",))),
        (lambda x, w: direct.apply(variables, x, w, PLAIN), (X, W), (("data",), ("model",))),
    )
    for function, plain, specs in cases:
        run = jax.jit(jax.value_and_grad(lambda x, w, function=function: jnp.sum(function(x, w) ** 2), (0, 1)))
        operands = [on_mesh(mesh, array, *spec) for array, spec in zip(plain, specs, strict=True)]
        value, gradients = run(*operands)
        for gradient, operand in zip(gradients, operands, strict=True):
            assert gradient.sharding.is_equivalent_to(operand.sharding, operand.ndim)
        for actual, wanted in zip((value, *gradients), jax.tree.leaves(run(*plain)), strict=True):
            assert relative_error(actual, wanted) < 1e-5


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_quantize_sharded(kind):
    mesh = mesh_of(kind)
    for name, spec in (("mxfp8", P("data", "model")), ("nvfp4", P("model", None)), ("nvfp4_2d", P("data", "model"))):
        with jax.set_mesh(mesh):
            q = jax.jit(lambda x, name=name: mj.quantize(x, name))(jax.device_put(X, NamedSharding(mesh, spec)))
            assert_same_bytes(q, reference.quantize(X, name))
            assert q.codes.sharding.spec == spec
            values = q.dequantize()
        np.testing.assert_array_equal(np.asarray(values), reference.dequantize(reference.quantize(X, name)))


@pytest.mark.slow("further JAX programs of a checked kind")
def test_shard_map_tensor_parallel():
    """K sharded: float32 partial products, one psum, one rounding."""
    mesh = mesh_of(AxisType.Auto, (4,))
    op = mj.dot_general(MXFP8BlockScaling())
    xs = jnp.asarray(X, jnp.bfloat16)

    def local(x, w):
        return lax.psum(op(x, w, PLAIN, None, jnp.float32), "data").astype(x.dtype)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "data"), P(None, "data")), out_specs=P())
    y, back = jax.jit(lambda x, w: jax.vjp(mapped, x, w))(xs, W)
    plain, plain_back = jax.jit(lambda x, w: jax.vjp(lambda x, w: op(x, w, PLAIN), x, w))(xs, W)
    assert relative_error(np.asarray(y, np.float32), np.asarray(plain, np.float32)) < 2.5e-3
    dy = jnp.asarray(DY, jnp.bfloat16)
    for one, other in zip(back(dy), plain_back(dy), strict=True):
        assert relative_error(np.asarray(one, np.float32), np.asarray(other, np.float32)) < 1e-6


def test_blocks_that_shards_would_cut_are_refused():
    mesh = mesh_of(AxisType.Auto, (4,))
    op = mj.dot_general(MXFP8BlockScaling())
    mapped = jax.shard_map(
        lambda x, w: lax.psum(op(x, w, PLAIN), "data"), mesh=mesh,
        in_specs=(P(None, "data"), P(None, "data")), out_specs=P(),
    )  # fmt: skip
    x = np.ones((8, 64), np.float32)
    with pytest.raises(ValueError, match=r"the contraction K of fprop: got shards of 16 over mesh axes \['data'\].*32"):
        mapped(x, x)
    rows = jax.shard_map(
        lambda x, w: jax.grad(lambda w: jnp.sum(op(x, w, PLAIN)))(w),
        mesh=mesh, in_specs=(P("data"), P()), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="the contraction M of wgrad: got shards of 2"):
        rows(x, x)


@pytest.mark.parametrize("inside", [True, False], ids=["grad_inside", "grad_outside"])
def test_fp8_ops_in_shard_map(inside):
    """Flax sums the state over devices, or refuses; here it is the maximum."""
    mesh = mesh_of(AxisType.Auto, (4,))
    x, scale, history = jnp.asarray([1.0, 5.0, 3.0, 2.0]), jnp.ones(()), jnp.zeros((3,))

    def loss(scale, history, x):
        y = fp8_ops.in_qdq(jnp.float32, jnp.float8_e4m3fn, x, scale, history)
        return jnp.sum(y) if inside else lax.psum(jnp.sum(y), "data")

    specs = {"mesh": mesh, "in_specs": (P(), P(), P("data"))}
    if inside:
        run = jax.shard_map(jax.grad(loss, (0, 1)), out_specs=P(), **specs)
    else:
        run = jax.grad(jax.shard_map(loss, out_specs=P(), **specs), (0, 1))
    new_scale, new_history = jax.jit(run)(scale, history, x)
    assert float(new_scale) == 1.0
    np.testing.assert_array_equal(np.asarray(new_history), [5, 0, 0])


@pytest.mark.slow("further JAX programs of a checked kind")
def test_fp8_module_in_shard_map_without_vma():
    mesh = mesh_of(AxisType.Auto, (4,))
    module = fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=3, axis_names=("data",))
    numbers = (((1,), (0,)), ((), ()))
    variables = module.init(jax.random.key(0), X[:8], W.T, numbers)

    def loss(variables, x):
        return lax.psum(jnp.sum(module.apply(variables, x, W.T, numbers)), "data")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    state = jax.jit(jax.grad(mapped))(variables, X)[fp8_ops.OVERWRITE_WITH_GRADIENT]
    assert state["input_scale"] == 1
    np.testing.assert_array_equal(np.asarray(state["input_amax_history"]), [np.abs(X).max(), 0, 0])
