"""`ragged_dot(recipe)` against a dot_general per group and against the oracle: features J4, jax.md 7 row 24."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import microfloat.jax as mj
from microfloat import reference
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from microfloat.jax.backends.reference import Noise, cast_matrix
from microfloat.jax.calls import Seed
from microfloat.jax.dot_general import _linear
from microfloat.jax.numerics.bits import code_bytes
from microfloat.jax.numerics.random import seed_words
from microfloat.jax.ragged_dot import _Groups
from microfloat.layout import stored_length
from microfloat.operands import OPERANDS_OF
from microfloat.recipes import RECIPES, Cast, CustomRecipe, DelayedScaling, Gemm, MXFP8BlockScaling, NVFP4BlockScaling
from tests.jax.compare import gemm_limit, to_numpy
from tests.jax.test_dot_general import SPECIAL

SEED = 0x0123456789ABCDEF
T, K, N = 211, 40, 24
SIZES = (35, 0, 130, 35)  # one empty, one of two blocks of rows, none a multiple of 32; 11 rows belong to no group
RNG = np.random.default_rng(31)
X, DY = (RNG.standard_normal((T, cols)).astype(np.float32) for cols in (K, N))
W = RNG.standard_normal((len(SIZES), K, N)).astype(np.float32)
# Amaxes that differ by group: nothing may be measured over all of them.
X *= np.repeat([1, 8, 0.1, 3, 1000], [*SIZES, T - sum(SIZES)])[:, None].astype(np.float32)
ROW = CustomRecipe(Gemm("nvfp4_row", "nvfp4_row"), Gemm("fp8_row", "fp8_row"), Gemm("nvfp4_row", "nvfp4_row"))
# Noise along both axes of dy, quick to compile.
NOISY = CustomRecipe(
    Gemm("mxfp8", "mxfp8"), Gemm(Cast("mxfp8", rounding="stochastic"), "mxfp8"),
    Gemm(Cast("mxfp8", rounding="stochastic"), "mxfp8"),
)  # fmt: skip
OWN = {**SPECIAL, "row_scales": ROW, "noisy": NOISY} | {
    f"mxfp8_{backward}": MXFP8BlockScaling(backward=backward) for backward in ("high_precision", "dequantized")
}
CASES = [*RECIPES, *OWN]


def recipe_of(name):
    return OWN.get(name) or RECIPES[name]()


def arguments_of(recipe):
    arguments = {"state": mj.scaling.init(recipe, num_groups=len(SIZES))} if recipe.is_delayed else {}
    return arguments | ({"seed": SEED} if recipe.is_stochastic else {})


@functools.partial(jax.jit, static_argnums=0, static_argnames="seed")  # tests of one op share its program
def both(op, x, w, sizes, dy, **arguments):
    y, back = jax.vjp(lambda x, w: op(x, w, sizes, **arguments), x, w)
    return y, *back(dy.astype(y.dtype))


def run(op, x, w, sizes, dy, **arguments):
    return both(op, x, w, jnp.asarray(sizes), dy, **arguments)


def one_byte_each(codes, element, length):
    """Codes of a matrix, unpacked."""
    codes = to_numpy(codes)
    return reference.unpack_fp4(codes, length) if element.bits == 4 else codes[:, :length]


def groups_of(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def loop(recipe, state=None):
    """(y, dx, dw) of a dot per group: the same matrices, whose `batch` word is the index of the group."""
    config = mj.dot_general(recipe).config(recipe, np.dtype(np.float32), w_is_transposed=True)
    words = seed_words(SEED) if recipe.is_stochastic else None

    @jax.jit
    def alone(x, w, dy, group, state):
        y, back = jax.vjp(lambda x, w: _linear(config, x, w, Seed(words, group), state), x, w)
        return y, *back(dy)

    y, dx, dw = np.zeros((T, N)), np.zeros((T, K)), []
    for group, rows in enumerate(groups_of(SIZES)):
        if rows.start == rows.stop:
            dw.append(np.zeros((K, N)))
            continue
        own = None if state is None else jax.tree.map(lambda leaf, group=group: leaf[group], state)
        y[rows], dx[rows], gradient = alone(X[rows], W[group].T, DY[rows], np.uint32(group), own)
        dw.append(gradient.T)
    return y, dx, np.stack(dw)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("mxfp8",))
@pytest.mark.parametrize("name", CASES)
def test_every_group_is_a_matrix_of_its_own(name):
    """Features J4, jax.md 7 row 24: what a dot per group gives, in every recipe, and zeros for rows of no group."""
    recipe = recipe_of(name)
    y, dx, dw = run(mj.ragged_dot(recipe), X, W, SIZES, DY, **arguments_of(recipe))
    expected = loop(recipe, arguments_of(recipe).get("state"))
    for one, wanted, gemm in zip((y, dx, dw), expected, (recipe.fprop, recipe.dgrad, recipe.wgrad), strict=True):
        for rows in range(len(SIZES)) if one is dw else groups_of(SIZES):
            largest = np.abs(wanted[rows]).max(initial=0)
            np.testing.assert_allclose(one[rows], wanted[rows], rtol=0, atol=gemm_limit(gemm) * largest)
    assert not np.asarray(y)[sum(SIZES) :].any()
    assert not np.asarray(dx)[sum(SIZES) :].any()
    assert not np.asarray(dw)[1].any()


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "fp8_row", "mxfp8", "noisy", "nvfp4", "row_scales"])
def test_codes_of_a_group_are_those_of_its_matrix(name):
    """Byte for byte, over blocks of rows, for x and dy along both axes: the oracle's, or the group's noise."""
    recipe, words = recipe_of(name), seed_words(SEED)
    config = mj.ragged_dot(recipe).config(recipe, np.dtype(np.float32), w_is_transposed=True)
    groups = _Groups(config, X, W.swapaxes(1, 2), jnp.asarray(SIZES), words, None)
    group, rows_of_block = np.asarray(groups._blocks.group), groups._blocks.rows.shape[1]
    for tensor, value in (("x", X), ("dy", DY)):
        for operand in OPERANDS_OF[tensor]:
            cast = recipe.cast(*operand.key)
            element, cols = cast.format.element, rows_of_block if operand.transposed else value.shape[1]

            @jax.jit
            def operand_of(x, operand=operand, element=element, cols=cols):
                codes = groups._operand(operand, groups._blocks.gather(x)).codes
                return jax.vmap(lambda codes: code_bytes(codes, element, cols))(codes)

            @jax.jit
            def alone(x, index, operand=operand, cast=cast):
                return cast_matrix(x, cast, Noise(words, operand.stream, index)).codes

            codes = np.asarray(operand_of(value))
            for index, rows in enumerate(groups_of(SIZES)):
                if rows.start == rows.stop:
                    continue
                matrix = np.ascontiguousarray(value[rows].T if operand.transposed else value[rows])
                if cast.is_stochastic:
                    stored = alone(matrix, np.uint32(index))
                else:
                    stored = reference.quantize(matrix, cast).codes
                expected = one_byte_each(stored, element, stored_length(matrix.shape[1], cast.hadamard))
                together = np.concatenate(codes[group == index], 1 if operand.transposed else 0)
                np.testing.assert_array_equal(together[: expected.shape[0], : expected.shape[1]], expected)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_sizes_are_traced():
    """One trace serves all sizes: empty and single groups, all rows in one, none in any, and more than there are."""
    op, traces = mj.ragged_dot("fp8_current"), []

    @jax.jit
    def run(sizes):
        traces.append(1)
        return op(X, W, sizes)

    for sizes in ((0, 0, 0, 0), (T, 0, 0, 0), (0, 0, 0, T), (1, 1, 1, 1), (200, 200, 200, 200)):
        y, ends = np.asarray(run(jnp.asarray(sizes))), np.minimum(np.cumsum(sizes), T)
        for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start == end:
                continue
            wanted = np.asarray(mj.dot_general("fp8_current")(X[start:end], W[group], (((1,), (0,)), ((), ()))))
            np.testing.assert_allclose(y[start:end], wanted, rtol=1e-5, atol=1e-5)
        assert not y[ends[-1] :].any()
    assert len(traces) == 1


@pytest.mark.slow("further JAX programs of a checked kind")
def test_delayed_state_per_group():
    """The gradient of a stacked state is the new state of every group, as a dot per group gives it."""
    recipe, groups = DelayedScaling(amax_history_len=3), len(SIZES)
    op, state = mj.ragged_dot(recipe), mj.scaling.init(recipe, num_groups=groups)

    @jax.jit
    def gradient(state, x):
        return jax.grad(lambda state: jnp.sum(op(x, W, SIZES, state=state) * DY))(state)

    alone, update = [mj.scaling.init(recipe) for _ in SIZES], jax.jit(mj.scaling.update)
    for factor in (1.0, 3.0):
        state = mj.scaling.apply(state, gradient(state, factor * X))
        for group, (old, rows) in enumerate(zip(alone, groups_of(SIZES), strict=True)):
            amaxes = {"x": factor * X[rows], "w": W[group], "dy": DY[rows]}
            alone[group] = update(old, {name: np.abs(v).max(initial=0) for name, v in amaxes.items()})
    for group, expected in enumerate(alone):
        mine = jax.tree.map(lambda leaf, group=group: np.asarray(leaf[group]), state)
        jax.tree.map(np.testing.assert_array_equal, mine, jax.tree.map(np.asarray, expected))
    merged = mj.scaling.merge(state, [gradient(state, factor * X) for factor in (1.0, 5.0, 2.0)])
    np.testing.assert_array_equal(
        merged.x.amax_history[:, 0], [5 * np.abs(X[rows]).max(initial=0) for rows in groups_of(SIZES)]
    )
    with pytest.raises(InvalidValueError, match=r"scaling.init\(recipe, num_groups=G\)"):
        op(X, W, SIZES, state=mj.scaling.init(recipe))
    with pytest.raises(InvalidValueError, match="state: got None"):
        op(X, W, SIZES)


def test_what_infinity_and_nan_of_one_group_leave_alone():
    """lax.ragged_dot multiplies the other groups' rows by zero, and NaN spreads; here a group stays a group."""
    x = X.copy()
    x[40, 3], x[36, 0] = np.nan, np.inf
    dy = DY.copy()
    dy[180, 1] = np.inf
    y, dx, dw = run(mj.ragged_dot("mxfp8"), x, W, SIZES, dy)
    for one, rows in ((y, groups_of(SIZES)[0]), (y, groups_of(SIZES)[3]), (dx, groups_of(SIZES)[2]), (dw, 0)):
        assert np.isfinite(one[rows]).all()
    assert np.isnan(y[40]).all()
    assert not np.isfinite(dw[3][:, 1]).any()
    assert not np.isfinite(dx[180]).any()


def test_signature_dtypes_and_errors():
    op = mj.ragged_dot("fp8_row")
    half = jnp.asarray(X, jnp.bfloat16)
    y, dx, dw = jax.eval_shape(lambda: run(op, half, W.astype(np.float32), SIZES, DY))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    wide = jax.eval_shape(lambda: op(half, W, SIZES, lax.Precision.HIGHEST, jnp.float32))
    assert wide.dtype == jnp.float32
    assert mj.ragged_dot("fp8_row") == op
    assert hash(mj.ragged_dot("fp8_row")) == hash(op)
    for x, w, sizes in ((X[:0], W, (0, 0, 0, 0)), (X, W[:0], ())):
        found = op(x, w, np.asarray(sizes, np.int32))
        assert found.shape == (x.shape[0], N)
        assert not np.asarray(found).any()
    plain = mj.ragged_dot()(X, W, jnp.asarray(SIZES))
    np.testing.assert_array_equal(plain, lax.ragged_dot(jnp.asarray(X), jnp.asarray(W), jnp.asarray(SIZES)))
    for sizes, error, text in (
        ((300, 0, 0, 0), InvalidValueError, "group_sizes: got .*no more than the 211 rows"),
        ((1, -1, 0, 0), InvalidValueError, "group_sizes"),
        ((1, 2), InvalidValueError, r"group_sizes: got shape \(2,\)"),
        ((1.0, 2.0, 0.0, 0.0), InvalidTypeError, "group_sizes: got float"),
    ):
        for given in (sizes, jnp.asarray(sizes)):
            with pytest.raises(error, match=text):
                op(X, W, given)
    with pytest.raises(InvalidValueError, match="rhs: got shape"):
        op(X, W[0], SIZES)
    with pytest.raises(NotSupportedError, match="group_offset"):
        op(X, W, SIZES, group_offset=jnp.array([1]))
    with pytest.raises(InvalidValueError, match="key: got None"):
        run(mj.ragged_dot("nvfp4"), X, W, SIZES, DY)
    with pytest.raises(NotSupportedError, match="derivative of a gradient"):
        jax.eval_shape(jax.hessian(lambda x: jnp.sum(op(x, W, SIZES) ** 2)), X)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_transformations():
    """vmap over everything, scan over layers, remat that keeps the codes: results of the plain call."""
    op, sizes = mj.ragged_dot(NVFP4BlockScaling()), jnp.asarray([SIZES, SIZES[::-1]])

    def loss(x, w, sizes, key):
        return jnp.sum(op(x, w, sizes, key=key) ** 2)

    keys = jax.random.split(jax.random.key(0), 2)
    each = jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(None, None, 0, 0))(X, W, sizes, keys)
    alone = [jax.jit(jax.grad(loss, argnums=(0, 1)))(X, W, one, key) for one, key in zip(sizes, keys, strict=True)]
    saved = jax.checkpoint(loss, policy=mj.checkpoint_policies.save_codes)
    alone.append(jax.jit(jax.grad(saved, argnums=(0, 1)))(X, W, sizes[0], keys[0]))
    for index, wanted in enumerate(alone):
        for one, other in zip(each, wanted, strict=True):
            found = one[index % 2]
            np.testing.assert_allclose(found, other, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(other))))


def test_explain_says_what_runs():
    """A loop of products over blocks of rows, casts by XLA's operations: on a GPU too."""
    told = str(mj.explain(mj.ragged_dot("fp8_current"), "h200", (4096, 4096, 4096)))
    assert "for every block of rows" in told
    assert "ragged_dot casts blocks of rows" in told
    assert "kernels." not in told
    assert "kernels." in str(mj.explain("fp8_current", "h200", (4096, 4096, 4096)))


CPUS = jax.devices("cpu")
MESH = pytest.mark.skipif(len(CPUS) < 2, reason="needs 2 host devices")
ROWS, HALVES = 64, ((20, 5, 30), (3, 40, 20))  # rows and group sizes of each of two devices


def on_two_devices(in_specs, out_specs):
    mesh = jax.make_mesh((2,), ("data",), devices=CPUS[:2], axis_types=(AxisType.Auto,))

    def local(x, w, sizes, dy):
        y, back = jax.vjp(lambda x, w: mj.ragged_dot("fp8_current")(x, w, sizes), x, w)
        return y, *back(dy)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


@pytest.mark.slow("JAX: grouped products over several devices")
@MESH
def test_tokens_sharded_over_devices_share_the_amaxes_of_a_group():
    x, dy, sizes = X[: 2 * ROWS], DY[: 2 * ROWS], np.concatenate(HALVES)
    row, whole = P("data"), P()
    y, dx, dw = on_two_devices((row, whole, row, row), (row, row, whole))(x, W[:3], sizes, dy)
    # The same rows, sorted by group over both devices.
    starts = [np.concatenate([[0], np.cumsum(half)[:-1]]) + ROWS * device for device, half in enumerate(HALVES)]
    order = np.concatenate(
        [np.arange(start[group], start[group] + half[group]) for group in range(3)
         for start, half in zip(starts, HALVES, strict=True)]
    )  # fmt: skip
    expected = run(mj.ragged_dot("fp8_current"), x[order], W[:3], np.sum(HALVES, 0), dy[order])
    for found, wanted in zip((np.asarray(y)[order], np.asarray(dx)[order], dw), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.slow("JAX: grouped products over several devices")
@MESH
def test_experts_of_other_devices_are_other_matrices():
    """Expert parallelism: devices vary in sizes and in matrices, so no amax is shared between them."""
    x, dy, row = X[: 2 * ROWS] * np.repeat([1, 1000], ROWS)[:, None].astype(np.float32), DY[: 2 * ROWS], P("data")
    w = np.concatenate([W[:3], 50 * W[1:4]])
    y, dx, dw = on_two_devices((row,) * 4, (row,) * 3)(x, w, np.concatenate(HALVES), dy)
    for device, sizes in enumerate(HALVES):
        rows, experts = slice(ROWS * device, ROWS * device + ROWS), slice(3 * device, 3 * device + 3)
        expected = run(mj.ragged_dot("fp8_current"), x[rows], w[experts], sizes, dy[rows])
        for found, wanted in zip((y[rows], dx[rows], dw[experts]), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.slow("further JAX programs of a checked kind")
@MESH
def test_sharding_by_jit_changes_nothing():
    """Automatic and explicit meshes."""
    expected = run(mj.ragged_dot("mxfp8"), X[:128], W, SIZES[:2] + (0, 60), DY[:128])
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("data",), devices=CPUS[:2], axis_types=(kind,))
        with jax.set_mesh(mesh):
            x, dy = (jax.device_put(one[:128], NamedSharding(mesh, P("data"))) for one in (X, DY))
            w = jax.device_put(W, NamedSharding(mesh, P()))
            found = run(mj.ragged_dot("mxfp8"), x, w, SIZES[:2] + (0, 60), dy)
        for one, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.slow("further JAX programs of a checked kind")
def test_exact_sums():
    """Sums of float64 are those of float32, nearly."""
    recipe = MXFP8BlockScaling()
    gemms = (replace(gemm, accumulate="exact") for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    usual = run(mj.ragged_dot(recipe), X, W, SIZES, DY)
    for one, wanted in zip(run(mj.ragged_dot(CustomRecipe(*gemms)), X, W, SIZES, DY), usual, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(wanted))))


@pytest.mark.slow("further JAX programs of a checked kind")
def test_options_of_the_op():
    """Residuals in high precision give the same bits; native units are asked for."""
    recipe = MXFP8BlockScaling()
    low, high = (run(mj.ragged_dot(recipe, residuals=kind), X, W, SIZES, DY) for kind in ("low", "high"))
    jax.tree.map(np.testing.assert_array_equal, low, high)
    if jax.default_backend() == "cpu":
        with pytest.raises(NotSupportedError, match="backend: got 'native'"):
            mj.ragged_dot(recipe, backend="native")(X, W, SIZES)
    empty = jax.eval_shape(lambda: run(mj.ragged_dot(recipe), X[:, :0], W[:, :0], SIZES, DY))
    assert [one.shape for one in empty] == [(T, N), (T, 0), (len(SIZES), 0, N)]
