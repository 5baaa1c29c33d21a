"""Casts by kernels of matrices over 4 host devices: each shard alone, to the bytes of one device (features D13).

Kernels need GPUs: their place take XLA's operations on one shard, so that what is tested is how matrices are cut, which
amaxes are shared and what is moved. The kernels' own bytes are those of tests/jax/test_kernel_casts.py; over two GPUs
they have not run yet.
"""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import microfloat.jax as mj
from microfloat import reference
from microfloat.jax.backends import casts, cuda, kernels
from microfloat.jax.transformations import max_over, varying_axes
from microfloat.operands import OPERANDS_OF, TENSORS
from microfloat.recipes import Cast, NVFP4BlockScaling, from_name
from microfloat.routes import OperandSpec
from tests.jax.compare import relative_error

CPUS = jax.devices("cpu")
pytestmark = pytest.mark.skipif(len(CPUS) < 4, reason=f"needs 4 host devices, the CPU client has {len(CPUS)}")

RNG = np.random.default_rng(13)
X, W, DY = (
    (RNG.standard_normal(shape) * np.linspace(1, 5, shape[0])[:, None]).astype(np.float32)
    for shape in ((256, 512), (128, 512), (256, 128))
)
PLAIN = (((1,), (1,)), ((), ()))
RECIPES = {
    "mxfp8": from_name("mxfp8"),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "fp8_current": from_name("fp8_current"),
}
# x [M, K], w [N, K], dy [M, N]
LAYOUTS = {
    "data": (P(("data", "model"), None), P(), P(("data", "model"), None)),
    "tensor K": (P(None, "model"), P(None, "model"), P()),
    "tensor N": (P(), P("model", None), P(None, "model")),
    "data x tensor": (P("data", None), P("model", None), P("data", "model")),
    "fully sharded": (P(("data", "model"), None), P(("data", "model"), None), P(("data", "model"), None)),
}
ARRAYS = dict(zip(TENSORS, (X, W, DY), strict=True))


def placed_by(*layouts):
    """Every tensor in every way in which these layouts cut it."""
    placed = [
        (tensor, P(*(*spec, None, None)[:2]))
        for name in layouts
        for tensor, spec in zip(TENSORS, LAYOUTS[name], strict=True)
    ]
    return list(dict.fromkeys(placed))


@pytest.fixture
def kernel_calls(monkeypatch):
    """The casts that a kernel is called for, on a machine that pretends to have several H200s."""
    calls = []

    def by_kernel(static, *arguments):
        calls.append(static)
        return casts._by_xla(static, *arguments)

    monkeypatch.setattr(cuda, "capability", lambda: (9, 0))
    monkeypatch.setattr(cuda, "converts", lambda element: False)
    monkeypatch.setattr(kernels, "why_unavailable", lambda capability: "")
    monkeypatch.setattr(kernels, "SMALLEST", 1)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    monkeypatch.setattr(casts, "_by_triton", by_kernel)
    caches = casts._on_either, casts._on_shards
    for cache in caches:
        cache.cache_clear()
    jax.clear_caches()
    yield calls
    for cache in caches:
        cache.cache_clear()
    jax.clear_caches()


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=CPUS[:4])


def casts_of(recipe, tensor):
    return [recipe.cast(*operand.key) for operand in OPERANDS_OF[tensor]]


def assert_bytes_of_one_device(made, array, pair):
    for operand, cast, axis in zip(made, pair, (-1, -2), strict=True):
        expected = reference.quantize(array, cast, axis=axis)
        assert np.asarray(operand.codes).tobytes() == expected.codes.tobytes()
        assert np.asarray(operand.scale).tobytes() == expected.scale.tobytes()
        if expected.tensor_scale is not None:
            assert np.asarray(operand.tensor_scale).tobytes() == expected.tensor_scale.tobytes()


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("one-*",))
@pytest.mark.parametrize(
    ("layouts", "name"),
    [pytest.param(("data x tensor",), "fp8_current", id="one-fp8_current")]
    + [pytest.param(LAYOUTS, name, id=f"all-{name}") for name in RECIPES],
)
def test_jit_casts_shards_where_they_lie(kernel_calls, layouts, name):
    """All operands in every layout: bytes of one device, nothing gathered, codes and scales cut as the matrix is."""
    recipe, mesh, tensors = RECIPES[name], mesh_of(), placed_by(*layouts)

    def cast_all(placed):
        found = []
        for (tensor, _), array in zip(tensors, placed, strict=True):
            row, column = casts_of(recipe, tensor)
            found.append((mj.quantize(array, row), mj.quantize(array, column, axis=-2)))
        return found

    placed = [jax.device_put(ARRAYS[tensor], NamedSharding(mesh, spec)) for tensor, spec in tensors]
    compiled = jax.jit(cast_all).lower(placed).compile()
    assert kernel_calls
    assert "all-gather" not in compiled.as_text()
    for (tensor, spec), made in zip(tensors, compiled(placed), strict=True):
        assert_bytes_of_one_device(made, ARRAYS[tensor], casts_of(recipe, tensor))
        for operand, cut in zip(made, (spec, P(spec[1], spec[0])), strict=True):
            assert operand.codes.sharding.is_equivalent_to(NamedSharding(mesh, cut), 2)


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize(
    ("layouts", "name", "check_vma"),
    [pytest.param(("tensor K",), "fp8_current", True, id="one-fp8_current-True")]
    + [pytest.param(LAYOUTS, name, check, id=f"all-{name}-{check}") for name in RECIPES for check in (True, False)],
)
def test_shard_map_casts_shards(kernel_calls, layouts, name, check_vma):
    recipe, mesh = RECIPES[name], mesh_of()
    tensors, specs = zip(*placed_by(*layouts), strict=True)
    arrays = [ARRAYS[tensor] for tensor in tensors]

    def local(*shards):
        found = []
        for tensor, spec, shard in zip(tensors, specs, shards, strict=True):
            axes = {name for part in spec for name in (part if isinstance(part, tuple) else (part,)) if name}
            row, column = map(OperandSpec, casts_of(recipe, tensor))
            made = casts.cast_both(shard, row, None, casts.CastInputs(), axes=frozenset(axes))
            found.append(
                (made.row, casts.cast_both(shard, None, column, casts.CastInputs(), axes=frozenset(axes)).column)
            )
        return whole(found)

    def whole(made):
        """A value that is the same on all devices, known to be so."""
        return jax.tree.map(lambda leaf: max_over(leaf, varying_axes(leaf)) if leaf.size == 1 else leaf, made)

    def placed(spec, cast):
        cut = P() if cast.format.is_per_tensor else spec
        return casts.reference.Matrix(spec, cut, None if cast.tensor_scale is None else P())

    out_specs = [
        (placed(spec, row), placed(P(spec[1], spec[0]), column))
        for tensor, spec in zip(tensors, specs, strict=True) for row, column in [casts_of(recipe, tensor)]
    ]  # fmt: skip
    mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=check_vma)
    results = jax.jit(mapped)(*arrays)
    assert kernel_calls
    for tensor, array, made in zip(tensors, arrays, results, strict=True):
        assert_bytes_of_one_device(made, array, casts_of(recipe, tensor))


@pytest.mark.slow("further JAX programs of checked casts")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_training_steps_are_those_of_one_device(kernel_calls, layout, kind):
    if layout in ("tensor K", "fully sharded") and kind == AxisType.Explicit:
        pytest.skip("lax.dot_general wants an out_sharding there")
    pytest.importorskip("triton", reason="triton is not installed")
    recipe, mesh = RECIPES["mxfp8"], mesh_of(kind)

    def step(x, w, dy):
        y, back = jax.vjp(lambda x, w: mj.dot_general(recipe)(x, w, PLAIN), x, w)
        return y, *back(dy)

    expected = jax.jit(partial(step))(X, W, DY)
    kernel_calls.clear()
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip((X, W, DY), LAYOUTS[layout], strict=True)
    ]
    with jax.set_mesh(mesh):
        results = jax.jit(step)(*placed)
    assert {static.row is not None for static in kernel_calls} == {True}
    for actual, wanted in zip(results, expected, strict=True):
        assert relative_error(actual, wanted) < 1e-6


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("cast1-*", "cast2-*"))
@pytest.mark.parametrize(
    ("cast", "shape", "reason"),
    [
        (Cast("nvfp4", rounding="stochastic"), (256, 512), "stochastic rounding counts elements of the whole matrix"),
        (Cast("fp8_row"), (256, 512), "a scale of fp8_row spans a row"),
        (Cast("mxfp8"), (256, 480), "need sizes divisible by 128, 4 blocks"),
        (Cast("fp8_128x128"), (256, 512), "need sizes divisible by 512, 4 blocks"),
    ],
)
def test_what_xla_casts_says_why(kernel_calls, cast, shape, reason):
    assert reason in kernels.why_no_kernel(cast, shape)
    x, options = RNG.standard_normal(shape).astype(np.float32), {"seed": 3} if cast.is_stochastic else {}
    placed = jax.device_put(x, NamedSharding(mesh_of(), P("data", "model")))
    q = jax.jit(partial(mj.quantize, cast=cast, **options))(placed)
    assert np.asarray(q.codes).tobytes() == reference.quantize(x, cast, **options).codes.tobytes()
    assert not kernel_calls


def test_explicit_axes_are_left_to_xla(kernel_calls):
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=explicit, devices=jax.devices("cpu")[:2])
    assert kernels.why_no_kernel(Cast("mxfp8"), (256, 512)) == ""
    with jax.set_mesh(mesh):
        assert kernels.why_no_kernel(Cast("mxfp8"), (256, 512)).startswith("a mesh with explicit axes")
