"""`dot_general(recipe)`: three GEMMs against the oracle, any dimension numbers, keys, residuals, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import microfloat.jax as mj
from microfloat import reference
from microfloat.errors import InvalidValueError
from microfloat.jax.backends import casts
from microfloat.jax.backends import reference as by_xla
from microfloat.jax.numerics.dimensions import einsum_by
from microfloat.recipes import (
    RECIPES,
    Cast,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Gemm,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)  # fmt: skip
from tests.jax.compare import gemm_limit, relative_error
from tests.jax.gemms import oracle_gemms

SEED = 0x89ABCDEF01234567
RNG = np.random.default_rng(10)
X, W, DY = (RNG.standard_normal(shape).astype(np.float32) for shape in ((40, 72), (24, 72), (40, 24)))
PLAIN = (((1,), (1,)), ((), ()))
SPECIAL = {
    "row_high_precision_wgrad": Float8RowScaling(wgrad="high_precision"),
    "one_side_each": CustomRecipe(Gemm("mxfp8", None), Gemm("mxfp8", "mxfp4"), Gemm(None, "nvfp4")),
    "nvfp4_1d_plain": NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "nvfp4_folded": NVFP4BlockScaling(path="folded"),
}


def arguments_of(recipe):
    arguments = {"state": mj.scaling.init(recipe)} if recipe.is_delayed else {}
    return arguments | ({"seed": SEED} if recipe.is_stochastic else {})


def gradients(op, x, w, dy, dimension_numbers=PLAIN, **arguments):
    """(y, dx, dw) of one jitted call."""

    @jax.jit
    def run(x, w, dy):
        y, back = jax.vjp(lambda x, w: op(x, w, dimension_numbers, **arguments), x, w)
        return y, *back(dy.astype(y.dtype))

    return run(x, w, dy)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("nvfp4",))
@pytest.mark.parametrize("name", [*RECIPES, *SPECIAL])
def test_three_gemms_equal_the_oracle(name):
    """Features J2 and J3."""
    recipe = SPECIAL.get(name) or RECIPES[name]()
    results = gradients(mj.dot_general(recipe), X, W, DY, **arguments_of(recipe))
    gemms = (recipe.fprop, recipe.dgrad, recipe.wgrad)
    for gemm, actual, expected in zip(gemms, results, oracle_gemms(recipe, X, W, DY, seed=SEED), strict=True):
        assert actual.dtype == jnp.float32
        assert relative_error(actual, expected) < gemm_limit(gemm)


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("options", [{}, {"backward": "dequantized"}], ids=["quantized", "dequantized"])
def test_operands_folded_by_their_casts_give_the_same_three_gemms(options, monkeypatch):
    """The forms that kernels write for Hopper, kept for the backward too; a tensor scale is rounded into their own."""
    op, arguments = mj.dot_general(NVFP4BlockScaling(path="folded", **options)), {"seed": SEED}
    expected = gradients(op, X, W, DY, **arguments)
    forms = []

    def folded(gemm, side, *_, at_once):
        forms.append({"lhs": "folded", "rhs": "tiles"}[side])
        return forms[-1]

    monkeypatch.setattr(casts, "form_of", folded)
    jax.clear_caches()
    for actual, wanted in zip(gradients(op, X, W, DY, **arguments), expected, strict=True):
        assert relative_error(actual, wanted) < 1e-6
    assert len(forms) >= (2 if options else 6)
    jax.clear_caches()


FOLDS = [
    ("nvfp4_2d", "tiles"), ("nvfp4", "folded"), ("nvfp4_row", "folded"), ("nvfp4", "rows"), ("nvfp4_row", "rows"),
    ("mxfp8", "folded"), ("mxfp8", "tiles"), ("mxfp8_e5m2", "folded"), ("mxfp4", "tiles"), ("mxfp6_e3m2", "rows"),
]  # fmt: skip


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize(("name", "form"), FOLDS)
def test_folds_have_the_bytes_of_the_oracle(name, form):
    x = (RNG.standard_normal((140, 200)) * np.exp2(RNG.integers(-14, 4, (140, 200)))).astype(np.float32)
    x[3, 5], x[64:96, :40] = np.nan, 0
    q = reference.quantize(x, name)
    expected, _ = reference.fold(q, {"folded": (1, 128), "tiles": (128, 128), "rows": (1, None)}[form])
    codes = jnp.asarray(q.codes)
    level = None if q.tensor_scale is None else jnp.asarray(q.tensor_scale)
    matrix = by_xla.Matrix(codes, jnp.asarray(q.scale), level)
    made, kind = by_xla.folded(matrix, by_xla.kind_of(Cast(name), 200), form)
    assert kind.format == expected.format
    np.testing.assert_array_equal(np.asarray(made.codes).view(np.uint8), expected.codes)
    level = 1 if made.tensor_scale is None else made.tensor_scale
    np.testing.assert_array_equal(made.scale * level, expected.scale)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("low-mxfp6",))
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("residuals", ["low", "high"])
def test_backward_reads_the_operands_of_fprop(name, residuals):
    """features P14: dgrad and wgrad in high precision, of what fprop has read, dequantized."""
    recipe = RECIPES[name](backward="dequantized")
    arguments = arguments_of(recipe)
    _, dx, dw = gradients(mj.dot_general(recipe, residuals=residuals), X, W, DY, **arguments)
    encoded = {"scale_enc": np.float32(1)} if recipe.is_delayed else {}
    x, w = (
        reference.dequantize(reference.quantize(value, cast, **encoded))
        for value, cast in zip((X, W), recipe.fprop.casts, strict=True)
    )
    np.testing.assert_allclose(dx, DY @ w, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, DY.T @ x, rtol=1e-4, atol=1e-4)
    codes = jax.tree.leaves(jax.vjp(lambda x, w: mj.dot_general(recipe)(x, w, PLAIN, **arguments), X, W)[1])
    assert not any(leaf.shape in (X.shape, W.shape) and leaf.dtype == jnp.float32 for leaf in codes)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("bfloat16",))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes_of_results(dtype):
    """y in lhs's dtype, gradients in their operands'; everything accumulated in float32 and rounded once."""
    recipe = MXFP8BlockScaling()
    x, dy = (jnp.asarray(array, dtype) for array in (X, DY))
    y, dx, dw = gradients(mj.dot_general(recipe), x, W, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    wide = [np.asarray(array).astype(np.float32) for array in (x, dy)]
    for actual, expected in zip((y, dx, dw), oracle_gemms(recipe, wide[0], W, wide[1]), strict=True):
        assert relative_error(np.asarray(actual, np.float32), expected) < (
            1e-5 if actual.dtype == jnp.float32 else 2.5e-3
        )
    assert mj.dot_general(recipe)(x, W, PLAIN, None, jnp.float32).dtype == jnp.float32


@pytest.mark.slow("further JAX programs of a checked kind")
def test_residuals_high_gives_the_same_gradients():
    recipe = NVFP4BlockScaling()
    low, high = (gradients(mj.dot_general(recipe, residuals=kept), X, W, DY, seed=SEED) for kept in ("low", "high"))
    for one, other in zip(low, high, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@st.composite
def dot_problems(draw):
    """Shapes and dimension numbers of random pairing and order: 0 to 2 axes of each kind, ranks up to 4 and beyond."""
    sizes = {name: draw(st.lists(st.integers(1, 5), max_size=2)) for name in ("batch", "contract", "lhs", "rhs")}
    shapes, numbers = [], []
    for side in ("lhs", "rhs"):
        labels = [("batch", i) for i in range(len(sizes["batch"]))]
        labels += [("contract", i) for i in range(len(sizes["contract"]))]
        labels += [(side, i) for i in range(len(sizes[side]))]
        order = draw(st.permutations(labels))
        shapes.append(tuple(sizes[kind][i] for kind, i in order))
        numbers.append(
            [tuple(order.index((kind, i)) for i in range(len(sizes[kind]))) for kind in ("contract", "batch")]
        )
    (lhs_contract, lhs_batch), (rhs_contract, rhs_batch) = numbers
    return *shapes, ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))


# Integers up to 8 are exact in E4M3 under a power-of-two scale, so the op must equal lax.dot_general bit for bit:
# one scale per tensor, per row, and per block of 32, where every contraction is ragged and padded inside.
EXACT = Float8CurrentScaling(fp8_format="E4M3", use_power_2_scales=True)
EXACT_RECIPES = [EXACT, Float8RowScaling(), MXFP8BlockScaling(), Float8BlockScaling()]


PROBLEMS = {
    "crossed": (((5, 3, 40), (40, 2, 5), (((0, 2), (2, 0)), ((), ()))), MXFP8BlockScaling()),
    "one axis": (((2, 33), (3, 33, 4), (((1,), (1,)), ((), ()))), Float8BlockScaling()),
    "vectors": (((4,), (4,), (((0,), (0,)), ((), ()))), Float8RowScaling()),
    "outer": (((2, 3), (4,), (((), ()), ((), ()))), EXACT),
}


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("crossed",))
@pytest.mark.parametrize("name", PROBLEMS)
def test_dimension_numbers_equal_lax(name):
    """Features J1."""
    check_dimension_numbers(*PROBLEMS[name], seed=1)


@pytest.mark.slow("further JAX programs of a checked kind")
@settings(max_examples=3)
@given(problem=dot_problems(), seed=st.integers(0, 1000), recipe=st.sampled_from(EXACT_RECIPES))
def test_any_dimension_numbers_equal_lax(problem, seed, recipe):
    check_dimension_numbers(problem, recipe, seed)


def check_dimension_numbers(problem, recipe, seed):
    lhs_shape, rhs_shape, numbers = problem
    rng = np.random.default_rng(seed)
    lhs, rhs = (rng.integers(-8, 9, shape).astype(np.float32) for shape in (lhs_shape, rhs_shape))
    expected = lax.dot_general(lhs, rhs, numbers, precision="highest")
    dy = rng.integers(-8, 9, expected.shape).astype(np.float32)
    op = mj.dot_general(recipe)

    @jax.jit
    def both(lhs, rhs, dy):
        y, back = jax.vjp(lambda *operands: op(*operands, numbers), lhs, rhs)
        _, reference_back = jax.vjp(
            lambda *operands: lax.dot_general(*operands, numbers, precision="highest"), lhs, rhs
        )
        return y, back(dy), reference_back(dy)

    y, actual, wanted = both(lhs, rhs, dy)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(expected))
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("shapes", [((0, 5), (3, 5)), ((4, 0), (3, 0)), ((2, 0, 3), (2, 4, 3)), ((0, 2, 3), (0, 4, 3))])
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling()], ids=["mxfp8", "nvfp4"])
def test_empty_operands(shapes, recipe):
    lhs, rhs = (jnp.ones(shape) for shape in shapes)
    numbers = PLAIN if lhs.ndim == 2 else (((2,), (2,)), ((0,), (0,)))
    dy, seed = jnp.ones(lax.dot_general(lhs, rhs, numbers).shape), {"seed": 1} if recipe.is_stochastic else {}
    y, dx, dw = gradients(mj.dot_general(recipe), lhs, rhs, dy, numbers, **seed)
    assert (y.shape, dx.shape, dw.shape) == (lax.dot_general(lhs, rhs, numbers).shape, lhs.shape, rhs.shape)
    assert not np.asarray(y).any()


def test_paired_contraction_order():
    """Two contraction axes in crossed order are paired as given, not sorted."""
    lhs, rhs = RNG.standard_normal((8, 3, 32)).astype(np.float32), RNG.standard_normal((32, 3, 9)).astype(np.float32)
    y = mj.dot_general(MXFP8BlockScaling())(lhs, rhs, (((1, 2), (1, 0)), ((), ())))
    expected = np.einsum("mak,kan->mn", lhs.astype(np.float64), rhs.astype(np.float64))
    assert relative_error(y, expected) < 0.05  # the format's own error is 3.8e-2; wrong pairing gives 1.5


@pytest.mark.slow("further JAX programs of a checked kind")
def test_batched_matrices_are_quantized_alone():
    """Every entry of the batch has its own tensor amax, and its index as the `batch` word of the random stream."""
    scale = np.float32([1, 100])[:, None, None]
    x, w = (RNG.standard_normal((2, *shape)).astype(np.float32) * scale for shape in ((16, 40), (8, 40)))
    numbers = (((2,), (2,)), ((0,), (0,)))
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    y = mj.dot_general(recipe)(x, w, numbers)
    alone = [oracle_gemms(recipe, x[i], w[i], np.ones((16, 8), np.float32))[0] for i in range(2)]
    assert relative_error(y[0], alone[0]) < 1e-5
    assert relative_error(y[1], alone[1]) < 1e-5
    dy = np.tile(RNG.standard_normal((1, 16, 8)).astype(np.float32), (2, 1, 1))
    _, dx, _ = gradients(mj.dot_general(NVFP4BlockScaling()), np.tile(x[:1], (2, 1, 1)), np.tile(w[:1], (2, 1, 1)), dy,
                         numbers, seed=SEED)  # fmt: skip
    assert not np.array_equal(np.asarray(dx[0]), np.asarray(dx[1])), "the noise of the two matrices must differ"
    assert relative_error(dx[0], oracle_gemms(NVFP4BlockScaling(), x[0], w[0], dy[0], seed=SEED)[1]) < 1e-5


@pytest.mark.slow("further JAX programs of a checked kind")
def test_einsum_keeps_operands_by_position():
    recipe = DelayedScaling()
    state = mj.scaling.init(recipe)
    x, w = X[:, :32], W[:, :32].T
    for equation, expected in (("mk,kn->nm", (x @ w).T), ("mk,kn", None), ("mk,kn->mn", x @ w)):
        loss = lambda s, equation=equation: jnp.sum(mj.einsum(recipe)(equation, x, w, state=s))  # noqa: E731
        assert np.max(np.asarray(jax.jit(jax.grad(loss))(state).x.amax_history)) == np.abs(x).max()
        if expected is not None:
            assert relative_error(mj.einsum(recipe)(equation, x, w, state=state), expected) < 0.1
    bmm = mj.einsum(MXFP8BlockScaling())("...mk,...nk->...nm", X[None, :, :32], W[None, :, :32])
    assert bmm.shape == (1, 24, 40)
    summed = mj.einsum(EXACT)("mka,nk->m", np.ones((3, 4, 2), np.float32), np.ones((5, 4), np.float32))
    np.testing.assert_array_equal(np.asarray(summed), np.full(3, 40, np.float32))


@pytest.mark.parametrize(
    ("equation", "lhs", "rhs"),
    [
        ("bij,bjk->bik", (1, 4, 3), (5, 3, 2)),
        ("bij,bjk->kbi", (5, 4, 3), (1, 3, 2)),
        ("...ij,...jk->...ik", (2, 1, 4, 3), (5, 3, 2)),
        ("ij,jk->ik", (4, 3), (1, 2)),
        ("ij,jk->jk", (4, 1), (3, 2)),
        ("...j,...j", (2, 1, 3), (5, 1)),
    ],
)
def test_axes_of_size_one_broadcast_in_an_einsum(equation, lhs, rhs):
    """As in jnp.einsum, which runs outside of an autocast."""
    lhs, rhs = (RNG.integers(-3, 4, shape).astype(np.float32) for shape in (lhs, rhs))
    np.testing.assert_array_equal(
        einsum_by(jax.lax.dot_general, equation, lhs, rhs), np.asarray(jnp.einsum(equation, lhs, rhs))
    )


@pytest.mark.parametrize(
    ("equation", "rhs", "message"),
    [
        ("ij,jk->ik", (2, 5), "eqn: got 'ij,jk->ik', 'j' of size 3 in lhs"),
        ("i...,...k->ik", (2, 5), r"an axis of '\.\.\.' of size 3"),
        ("...i...,ik->k", (3, 5), "at most one ellipsis"),
        ("ij,j.k->ik", (3, 5), "at most one ellipsis"),
        ("ij,jk->i.k", (3, 5), "at most one ellipsis"),
    ],
)
def test_what_is_wrong_with_an_equation_is_named(equation, rhs, message):
    with pytest.raises(InvalidValueError, match=message):
        mj.einsum("mxfp8")(equation, np.ones((4, 3), np.float32), np.ones(rhs, np.float32))


@pytest.mark.slow("further JAX programs of a checked kind")
def test_keys():  # features J18
    """The key's bits are the call seed; the same key gives the same noise, in eager, jit, remat and scan alike."""
    recipe = NVFP4BlockScaling()
    op = mj.dot_general(recipe)
    key = jax.random.key(3)
    words = np.asarray(jax.random.bits(key, (2,), "uint32"))

    def dx(x, **arguments):
        return jax.grad(lambda x: jnp.sum(op(x, W, PLAIN, **arguments) * DY))(x)

    expected = oracle_gemms(recipe, X, W, DY, seed=[int(word) for word in words])[1]
    by_key = dx(X, key=key)
    assert relative_error(by_key, expected) < 1e-5
    np.testing.assert_array_equal(np.asarray(by_key), np.asarray(dx(X, seed=words)))
    recomputed = jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x, k: op(x, W, PLAIN, key=k))(x, key) * DY))(X)
    np.testing.assert_array_equal(np.asarray(by_key), np.asarray(recomputed))
    assert not np.array_equal(np.asarray(by_key), np.asarray(dx(X, key=jax.random.key(4))))


def test_equal_recipes_do_not_retrace():
    traces = []

    @jax.jit
    def run(x, w):
        traces.append(1)
        return mj.dot_general(MXFP8BlockScaling())(x, w, PLAIN)

    run(X, W)
    run(X, W)
    assert len(traces) == 1
    assert mj.dot_general(MXFP8BlockScaling()) == mj.dot_general(MXFP8BlockScaling())
    assert hash(mj.dot_general(MXFP8BlockScaling())) == hash(mj.dot_general(MXFP8BlockScaling()))
    static = jax.jit(lambda op, x, w: (traces.append(1), op(x, w, PLAIN))[1], static_argnums=0)
    static(mj.dot_general(MXFP8BlockScaling()), X, W)
    static(mj.dot_general(MXFP8BlockScaling()), X, W)
    assert len(traces) == 2


@pytest.mark.slow("further JAX programs of a checked kind")
def test_remat_keeps_codes_only(capsys):
    """Under `save_codes` what survives to the backward are codes and scales, no wide operand but the arguments."""
    op = mj.dot_general(MXFP8BlockScaling())

    def loss(x, w):
        return jnp.sum(jnp.sin(op(jnp.cos(x), w, PLAIN)))

    kept = jax.checkpoint(loss, policy=mj.checkpoint_policies.save_codes)
    jax.ad_checkpoint.print_saved_residuals(kept, jnp.asarray(X), jnp.asarray(W))
    lines = [line for line in capsys.readouterr().out.splitlines() if "argument" not in line]
    assert lines
    assert all(
        line.startswith(("f8_e4m3fn", "float8_e4m3fn", "u8", "uint8", "f32[0,", "float32[0,")) for line in lines
    ), lines
    plain, saved = (jax.jit(jax.grad(function, argnums=(0, 1)))(X, W) for function in (loss, kept))
    for one, other in zip(plain, saved, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lhs": np.ones((4, 8), np.int32)}, TypeError, "lhs: got int32"),
        ({"rhs": jnp.ones((8, 4), jnp.float8_e4m3fn)}, TypeError, "rhs: got float8_e4m3fn"),
        ({"dimension_numbers": (((1,), (1,)), ((), ()))}, ValueError, r"got contracting .*sizes \(8,\)"),
        ({"dimension_numbers": (((7,), (0,)), ((), ()))}, ValueError, "dimension_numbers: got axes"),
        ({"dimension_numbers": (((1, 1), (0, 0)), ((), ()))}, ValueError, "every axis at most once"),
        ({"dimension_numbers": ((1,), (0,))}, TypeError, "dimension_numbers: got"),
        ({"preferred_element_type": jnp.float8_e5m2}, TypeError, "preferred_element_type: got"),
        ({"recipe": DelayedScaling()}, ValueError, r"state: got None.*scaling.init\(recipe\)"),
        ({"state": mj.scaling.init(DelayedScaling())}, ValueError, "state: got DelayedState"),
        (
            {"recipe": DelayedScaling(amax_history_len=4), "state": mj.scaling.init(DelayedScaling())},
            ValueError, "state: got a state made for another recipe",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refusals(arguments, error, message):
    given_arguments = {
        "lhs": np.ones((4, 8), np.float32), "rhs": np.ones((8, 4), np.float32),
        "dimension_numbers": (((1,), (0,)), ((), ())), "recipe": MXFP8BlockScaling(),
    } | arguments  # fmt: skip
    op = mj.dot_general(given_arguments.pop("recipe"))
    with pytest.raises(error, match=message):
        op(**given_arguments)


def test_refusals_of_makers():
    assert mj.dot_general("mxfp8") == mj.dot_general(MXFP8BlockScaling())
    assert mj.einsum("nvfp4") == mj.einsum(NVFP4BlockScaling())
    assert mj.scaling.init("delayed").rules == mj.scaling.init(DelayedScaling()).rules
    with pytest.raises(ValueError, match=r"recipe: got 'fp8_tensor'.*is a format; the recipes that use it: 'delayed'"):
        mj.dot_general("fp8_tensor")
    with pytest.raises(ValueError, match="backend: got 'triton'"):
        mj.dot_general(MXFP8BlockScaling(), backend="triton")
    with pytest.raises(ValueError, match="residuals: got 'all'"):
        mj.dot_general(MXFP8BlockScaling(), residuals="all")
    for equation, message in (
        ("mk->m", "exactly two operands"),
        ("mm,mk->k", "a label twice"),
        ("mk,kn->mz", "output labels"),
    ):
        with pytest.raises(ValueError, match=message):
            mj.einsum(MXFP8BlockScaling())(equation, np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
