"""`mj.watch_outputs`: the numbers of the NumPy metrics, the results of unwatched functions (features J23)."""

import csv
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import microfloat.jax as mj
from microfloat import metrics, reference
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from microfloat.recipes import from_name

PLAIN = (((1,), (0,)), ((), ()))
FEW = ("amax", "nan", "inf", "sqnr_db", "relative_error")
few = partial(mj.watch_outputs, metrics=FEW, what_if=())
RNG = np.random.default_rng(3)
X, W = (RNG.standard_normal(shape).astype(np.float32) for shape in ((80, 96), (96, 64)))


def assert_same_bits(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def seen(readings):
    """{(module, GEMM, operand)} of the errors of casts and products."""
    return {one[1:4] for one in readings.records() if one.metric in ("sqnr_db", "relative_error")}


GEMM_OPERANDS = {
    "fprop": ("x", "w", "y"), "dgrad": ("dy", "w", "dx"), "wgrad": ("dy", "x", "dw"),
}  # fmt: skip


def of_modules(*names, gemms=GEMM_OPERANDS):
    return {(name, gemm, operand) for name in names for gemm in gemms for operand in GEMM_OPERANDS[gemm]}


@pytest.mark.slow_cases("further recipes", all_but=("mxfp4",))
@pytest.mark.parametrize("name", ["fp8_current", "mxfp4", "nvfp4"])
def test_numbers_are_those_of_the_numpy_metrics(name):
    recipe, x = from_name(name), X.copy()
    x[3] = 0
    wanted = (
        "sqnr_db", "rel_mse", "bias", "underflow", "zeros", "clip", "crest", "amax", "relative_error", "cosine",
        "block_dynamic_range", "scale_histogram",
    )  # fmt: skip
    op = mj.dot_general(recipe)
    y, readings = mj.watch_outputs(op, metrics=wanted, what_if=("mxfp6_e2m3",))(x, W, PLAIN)
    assert_same_bits(y, op(x, W, PLAIN))
    records = readings.records()
    for cast in (recipe.fprop.lhs, "mxfp6_e2m3"):
        q = reference.quantize(x, cast)
        values = reference.dequantize(q)
        found = {one.metric: one.value for one in records if one[2:5] == ("fprop", "x", q.format.name)}
        for metric in ("sqnr_db", "rel_mse", "underflow", "zeros"):
            assert found[metric] == pytest.approx(getattr(metrics, metric)(x, values), rel=1e-5), metric
        assert found["bias"] == pytest.approx(metrics.bias(x, values), abs=1e-6)
        assert found["crest"] == pytest.approx(metrics.crest(x), rel=1e-5)
        spans = [found["block_dynamic_range"], found["block_dynamic_range_p99"], found["block_dynamic_range_max"]]
        assert spans == pytest.approx(metrics.block_dynamic_range(x, q.format.block[1] or 96), rel=1e-4)
        if q.scale.dtype == "uint8":
            assert found["scale_histogram"] == metrics.scale_histogram(q.scale, q.format.scale)
    found = {one.metric: one.value for one in records if one.operand == "y"}
    error = metrics.gemm_error(x.astype(np.float64) @ W, np.asarray(y))
    assert (found["relative_error"], found["cosine"]) == pytest.approx(error, rel=1e-5)


@pytest.mark.slow("a scan is compiled twice with all of XLA's passes")
@pytest.mark.as_users_compile  # with cheaper passes alone XLA rounds a product by what it is fused with
def test_a_training_step_with_scan_and_remat():
    """Every iteration is read, a recomputation once; results are those of the plain step."""
    op = mj.dot_general("mxfp8")
    w = jnp.stack([W[:, :32], -W[:, 32:]])[:, :32]

    def loss(w, x):
        @jax.checkpoint
        def layer(x, w):
            with jax.named_scope("layer"):
                return jnp.tanh(op(x, w, PLAIN)), None

        with jax.named_scope("stack"):
            return lax.scan(layer, x, w)[0].sum()

    step = jax.value_and_grad(loss, argnums=(0, 1))
    results, readings = jax.jit(few(step))(w, X[:, :32])
    assert_same_bits(results, jax.jit(step)(w, X[:, :32]))
    assert seen(readings) == of_modules("stack.layer[0]", "stack.layer[1]")


def test_an_unwatched_function_has_no_trace_of_it():
    """The same jitted function, before and after it was watched: watching is a part of what jit caches by."""
    step = jax.jit(jax.grad(lambda w, x: mj.dot_general("fp8_current")(x, w, PLAIN).sum()))
    errors = partial(mj.watch_outputs, metrics=("sqnr_db", "relative_error"), what_if=())
    before, watched = str(jax.make_jaxpr(step)(W, X)), jax.jit(errors(step))
    results, readings = watched(W, X)
    assert_same_bits(results, step(W, X))
    assert seen(readings) == of_modules("dot_general", gemms=("fprop", "wgrad", "dgrad"))
    assert "microfloat_shown" not in before == str(jax.make_jaxpr(step)(W, X))
    assert watched(W, X)[1].records() == readings.records()


@pytest.mark.slow("further programs that mj.watch_outputs watches")
def test_loops_batches_and_repeated_calls():
    """Calls inside a cond are not read; they and all others compute what they compute unwatched."""
    op = mj.dot_general("fp8_current")

    def function(x):
        def first(x):
            with jax.named_scope("first"):
                return op(x, x.T, PLAIN)

        def second(x):
            with jax.named_scope("second"):
                return op(op(x, x.T, PLAIN), x, PLAIN) @ x.T

        y = lax.cond(x[0, 0] > 100, first, second, x)
        y += lax.scan(lambda c, _: (op(c, x.T, PLAIN), None), x, None, length=2)[0]
        return jax.vmap(lambda x: op(x, x.T, PLAIN))(jnp.stack([x, 2 * x])).sum() + y.sum()

    y, readings = jax.jit(few(function))(X[:32, :32])
    assert_same_bits(y, jax.jit(function)(X[:32, :32]))
    assert seen(readings) == of_modules("dot_general[0]", "dot_general[1]", "dot_general#1", gemms=("fprop",))
    amax = {one.module: one.value for one in readings.records() if one[2:6] == ("fprop", "x", "fp8_tensor", "amax")}
    assert amax["dot_general#1"] == 2 * np.abs(X[:32, :32]).max()


@pytest.mark.slow("further programs that mj.watch_outputs watches")
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_of_a_mesh_are_one_tensor(check_vma):
    """Inside shard_map the sums of all devices: amax and errors of the whole, whose parts differ in magnitude, and each
    NaN once where JAX knows what varies."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    op = mj.dot_general("fp8_current", axis_names=() if check_vma else ("data", "model"))
    x = X[:64, :32].copy()
    x[50, 3] = np.nan
    w = W[:32] * np.where(np.arange(64) < 32, 2.0**-9, 1).astype(np.float32)
    mapped = jax.shard_map(
        lambda x, w: op(x, w, PLAIN), mesh=mesh, in_specs=(P("data"), P(None, "model")), out_specs=P("data", "model"),
        check_vma=check_vma,
    )  # fmt: skip
    results, readings = jax.jit(few(mapped))(x, w)
    assert_same_bits(results, jax.jit(mapped)(x, w))
    found = {one[3:6]: one.value for one in readings.records()}
    assert found["x", "fp8_tensor", "nan"] == (1 if check_vma else 2)
    assert found["w", "fp8_tensor", "amax"] == np.abs(w).max()
    q = reference.dequantize(reference.quantize(w, "fp8_tensor"))
    assert found["w", "fp8_tensor", "sqnr_db"] == pytest.approx(metrics.sqnr_db(w, q), rel=1e-4)
    error = metrics.gemm_error(np.delete(x, 50, 0).astype(np.float64) @ w, np.delete(np.asarray(results), 50, 0))
    assert found["y", "fp8_tensor x fp8_tensor", "relative_error"] == pytest.approx(error.relative_error, rel=1e-4)


@pytest.mark.slow("further programs that mj.watch_outputs watches")
def test_the_log_has_the_records_of_steps(tmp_path):
    """An infinity is located; the log's files are those of mf.watch."""
    op, log, x = mj.dot_general("mxfp8"), mj.RecordLog(), jnp.asarray(X[:32, :32])
    watched = jax.jit(mj.watch_outputs(lambda x: op(x, x.T, PLAIN), metrics=FEW, what_if=("nvfp4",)))
    for step in (0, 10):
        log.add(step, watched(x)[1])
        x = x.at[3, 4].set(np.inf)
    found = log.first_non_finite
    assert (found.step, found.module, found.operand, found.metric) == (10, "dot_general", "x", "inf")
    assert "First inf: step 10, dot_general, x of fprop (1)." in log.table()
    assert [(one.step, one.reason) for one in log.worst()] == [(10, "1 Inf in x, 1 Inf in w, 63 NaN in y")]
    assert [(one.reason, round(one.error / one.expected)) for one in log.worst(step=0)] == [("", 1)]
    assert {one.format for one in log.records} == {"mxfp8", "nvfp4", "mxfp8 x mxfp8"}
    log.to_csv(tmp_path / "records.csv")
    with open(tmp_path / "records.csv", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "module", "gemm", "operand", "format", "metric", "value"]
    assert len(rows) == len(log.records) + 1


def test_what_is_refused():
    op = mj.dot_general("mxfp8")
    with pytest.raises(InvalidValueError, match="metrics: got 'sqnr', needed one of"):
        mj.watch_outputs(op, metrics=("sqnr",))
    with pytest.raises(InvalidValueError, match="rows: got 192, needed a multiple of 128"):
        mj.watch_outputs(op, rows=192)
    with pytest.raises(InvalidTypeError, match="what_if: got NoneType, needed a name"):
        mj.watch_outputs(op, what_if=None)
    with pytest.raises(InvalidTypeError, match="fn: got NoneType, needed a function"):
        mj.watch_outputs(None)
    with pytest.raises(InvalidTypeError, match="readings: got NoneType, needed the second result"):
        mj.RecordLog().add(0, None)
    with pytest.raises(InvalidValueError, match="step: got 'x', needed the number of a step"):
        mj.RecordLog().add("x", mj.watch_outputs(lambda: 0)()[1])
    with pytest.raises(NotSupportedError, match="needed the gradient inside of it"):
        jax.grad(lambda w: few(op)(X, w, PLAIN)[0].sum())(W)


@pytest.mark.slow("further programs that mj.watch_outputs watches")
def test_layers_of_linen_have_their_names():
    linen = pytest.importorskip("flax.linen")
    import microfloat.jax.linen as mlinen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dense(32, name="up", dot_general_cls=mlinen.dot_general_cls("fp8_current"))(x)
            return linen.Dense(16, dot_general_cls=mlinen.dot_general_cls("fp8_current"))(jnp.tanh(x))

    variables = Net().init(jax.random.key(0), X[:, :32])
    y, readings = few(Net().apply)(variables, X[:, :32])
    assert_same_bits(y, Net().apply(variables, X[:, :32]))
    assert seen(readings) == of_modules("Net.up", "Net.Dense_0", gemms=("fprop",))


@pytest.mark.slow("a training step of nnx is compiled twice")
def test_layers_of_nnx_have_their_names_and_their_state():
    nnx = pytest.importorskip("flax.nnx")
    import microfloat.jax.nnx as mnnx

    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([mnnx.Linear(32, 32, rngs=nnx.Rngs(0), recipe="delayed") for _ in range(2)])
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def loss(self, x):
            self.calls[...] += 1
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    def train(model, x):
        return mnnx.value_and_grad(Model.loss)(model, x)

    plain, model = Model(), Model()
    expected = nnx.jit(train)(plain, X[:, :32])
    results, readings = nnx.jit(mnnx.watch_outputs(train, metrics=FEW, what_if=()))(model, X[:, :32])
    # With XLA's cheaper passes alone a product of three factors is rounded by what it is fused with.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), results, expected)
    assert_same_bits(nnx.state(model), nnx.state(plain))
    assert int(model.calls[...]) == 1
    assert seen(readings) == of_modules("layers.0", "layers.1")


@pytest.mark.slow("watches of grouped products")
@pytest.mark.parametrize("name", ["fp8_current", "mxfp4", "fp8_row", "nvfp4"])
def test_groups_of_rows_are_one_tensor(name):
    """Of a `ragged_dot`: errors over the rows of all groups, as the oracle casts each group; padding counts nowhere."""
    recipe, sizes = from_name(name), (9, 0, 40, 20)
    op, groups = mj.ragged_dot(recipe), [X[:9], X[9:49], X[49:69]]
    w = np.stack([W, 2 * W, 4 * W, 8 * W])
    seed = {"seed": 7} if recipe.is_stochastic else {}
    x = np.concatenate([groups[0], 100 * groups[1], groups[2], np.full((11, 96), 1e4, np.float32)])
    groups = [x[:9], x[9:49], x[49:69]]

    def step(x, w):
        return jax.value_and_grad(lambda x, w: (op(x, w, jnp.asarray(sizes), **seed) ** 2).sum(), argnums=(0, 1))(x, w)

    wanted = ("sqnr_db", "underflow", "zeros", "amax", "nan", "relative_error", "cosine", "scale_histogram")
    results, readings = jax.jit(mj.watch_outputs(step, metrics=wanted, what_if=("mxfp8",)))(x, w)
    assert_same_bits(results, jax.jit(step)(x, w))
    assert seen(readings) == of_modules("dot_general")
    records = readings.records()
    for cast in (recipe.fprop.lhs, "mxfp8"):
        made = [reference.quantize(rows, cast) for rows in groups]
        values, fmt = np.concatenate([reference.dequantize(q) for q in made]), made[0].format
        found = {one.metric: one.value for one in records if one[2:5] == ("fprop", "x", fmt.name)}
        for metric in ("sqnr_db", "underflow", "zeros"):
            assert found[metric] == pytest.approx(getattr(metrics, metric)(x[:69], values), rel=1e-4), metric
        if made[0].scale.dtype == "uint8":
            scales = np.concatenate([q.scale for q in made])
            assert found["scale_histogram"] == metrics.scale_histogram(scales, fmt.scale)
    of_w = {one.metric: one.value for one in records if one[2:4] == ("fprop", "w")}
    assert of_w["amax"] == 8 * np.abs(W).max()
    for gemm, operand in (("fprop", "y"), ("dgrad", "dx"), ("wgrad", "dw")):
        errors = {one.metric: one.value for one in records if one[2:4] == (gemm, operand)}
        assert 0 < errors["relative_error"] < 0.3
        assert errors["nan"] == 0
    errors = {one.metric: one.value for one in records if one.operand == "y"}
    y = np.asarray(op(x, w, jnp.asarray(sizes), **seed))[:69]
    exact = np.concatenate([rows.astype(np.float64) @ w[g] for g, rows in zip((0, 2, 3), groups, strict=True)])
    assert (errors["relative_error"], errors["cosine"]) == pytest.approx(metrics.gemm_error(exact, y), rel=1e-4)
