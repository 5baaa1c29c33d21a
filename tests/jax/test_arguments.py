"""Arguments of transformed functions: keys, seeds, integers, subnormal numbers, donated arrays."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax._src.interpreters.partial_eval import dce_jaxpr

import microfloat.jax as mj
from microfloat import reference
from microfloat.jax import fp8_ops
from microfloat.recipes import Cast, CustomRecipe, Float8CurrentScaling, Gemm, MXFP8BlockScaling, NVFP4BlockScaling
from tests.jax.compare import assert_oracle, assert_same_bytes, relative_error, way_of
from tests.jax.gemms import oracle_gemms

RNG = np.random.default_rng(21)
X, W = RNG.standard_normal((16, 64)).astype(np.float32), RNG.standard_normal((32, 64)).astype(np.float32)
PLAIN = (((1,), (1,)), ((), ()))
# Noise in one gradient: quick to compile, where NVFP4's recipe has six different casts.
NOISY = CustomRecipe(
    Gemm("mxfp8", "mxfp8"), Gemm(Cast("mxfp8", rounding="stochastic"), "mxfp8"), Gemm("mxfp8", "mxfp8")
)
STOCHASTIC = mj.dot_general(NOISY)
eager_and_jit = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


def equal(one, other):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.slow("further JAX programs of a checked kind")
@eager_and_jit
def test_a_key_has_no_gradient(transform):
    """The cotangent of a key is float0; users see it only if they differentiate with respect to the key."""
    key = jax.random.key(1)
    _, back = jax.vjp(transform(lambda x, key: STOCHASTIC(x, W, PLAIN, key=key)), X, key)
    dx, dkey = back(jnp.ones((16, 32)))
    assert (dx.dtype, dkey.dtype) == (jnp.float32, jax.dtypes.float0)
    words = jax.random.bits(key, (2,), "uint32")
    _, back = jax.vjp(transform(lambda x, seed: STOCHASTIC(x, W, PLAIN, seed=seed)), X, words)
    same, dseed = back(jnp.ones((16, 32)))
    equal(dx, same)
    assert dseed.dtype == jax.dtypes.float0


@pytest.mark.slow("further JAX programs of a checked kind")
@eager_and_jit
def test_integers_into_a_flax_op_have_no_gradient(transform):
    """Integer lhs is cast to the compute dtype, as Flax does; its cotangent is float0."""
    integers = np.arange(16 * 32, dtype=np.int32).reshape(16, 32) % 7
    op = fp8_ops.Fp8DotGeneralOp(amax_history_length=3)
    numbers = (((1,), (0,)), ((), ()))
    variables = op.init(jax.random.key(0), integers, X[:, :32].T, numbers)
    gradients = transform(jax.grad(lambda v, a: jnp.sum(op.apply(v, a, X[:, :32].T, numbers)), (0, 1), allow_int=True))
    state, dx = gradients(variables, integers)
    assert dx.dtype == jax.dtypes.float0
    assert float(state[fp8_ops.OVERWRITE_WITH_GRADIENT]["input_amax_history"][0]) == 6


@pytest.mark.slow("further JAX programs of a checked kind")
def test_seed_as_int_and_as_words():
    """An int is static, the two words may be traced; gradients carry the same noise."""
    seed = 0x89ABCDEF01234567
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    dx = [
        jax.jit(jax.grad(lambda x, s: jnp.sum(STOCHASTIC(x, W, PLAIN, seed=seed if s is None else s) ** 2)))(X, given)
        for given in (None, words)
    ]
    equal(*dx)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("float32",))
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_subnormal_operands(dtype):
    """Kept in every dtype, by quantize and by the op: y is that of the oracle, not zero."""
    small = np.finfo(np.float16).tiny if dtype == np.float16 else np.finfo(np.float32).tiny
    x = (np.abs(X) * np.float32(0.3) * small).astype(dtype)
    assert np.count_nonzero(np.asarray(x, np.float32)) > 0.9 * x.size
    for name in ("mxfp8", "fp8_row"):
        assert_oracle(mj.quantize(x, name), x, name)
    w = (W * np.float32(2.0**60)) if dtype != np.float16 else W
    y = mj.dot_general(MXFP8BlockScaling())(x, w, PLAIN, preferred_element_type=jnp.float32)
    wide = np.asarray(x, np.float32)
    expected = oracle_gemms(MXFP8BlockScaling(), wide, w, np.ones((16, 32), np.float32))[0]
    assert np.abs(expected).max() > 0
    if way_of(MXFP8BlockScaling().fprop) == "values":
        # Values below 2^-126 are multiples of 2^-133 as bfloat16 (docs/numerics.md 8.2): half a step for each of x.
        a, b = (np.abs(reference.dequantize(reference.quantize(array, "mxfp8"))) for array in (wide, w))
        limit = 2.0**-23 * np.abs(expected) + x.shape[1] * 2.0**-24 * (a @ b.T) + 2.0**-134 * b.sum(axis=1)
        assert (np.abs(np.asarray(y, np.float64) - expected) <= limit).all()
    else:
        assert relative_error(y, expected) < 1e-5


@pytest.mark.slow("further JAX programs of a checked kind")
def test_checkpoint_replays_the_noise():
    """Recomputed forwards see the same key, so all gradients are those without rematerialisation, bit for bit."""

    def loss(x, w, key):
        return jnp.sum(jnp.sin(STOCHASTIC(jnp.cos(x), w, PLAIN, key=key)))

    key = jax.random.key(5)
    plain = jax.jit(jax.grad(loss, (0, 1)))(X, W, key)
    for policy in (None, mj.checkpoint_policies.save_codes, mj.checkpoint_policies.save_gemm_outputs):
        again = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1)))(X, W, key)
        for one, other in zip(plain, again, strict=True):
            equal(one, other)


def saved_residuals(function, *arguments, capsys):
    """Lines of `print_saved_residuals` that are not arguments of the function."""
    jax.ad_checkpoint.print_saved_residuals(function, *arguments)
    return [line for line in capsys.readouterr().out.splitlines() if "argument" not in line]


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("CustomRecipe", "Float8CurrentScaling"))
@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), NOISY, Float8CurrentScaling()], ids=lambda r: type(r).__name__)
def test_what_save_codes_keeps(recipe, capsys):
    """Codes in their bytes, scales, the seed; nothing wide of the size of an operand or a result."""
    op = mj.dot_general(recipe)
    given = {"seed": jnp.array([1, 2], jnp.uint32)} if recipe.is_stochastic else {}

    def loss(x, w):
        return jnp.sum(jnp.sin(op(jnp.cos(x), jnp.cos(w), PLAIN, **given)))

    lines = saved_residuals(jax.checkpoint(loss, policy=mj.checkpoint_policies.save_codes), X, W, capsys=capsys)
    named = [line for line in lines if "microfloat" in line or "named" in line]
    assert len(named) >= 2
    wide = [line for line in lines if line.startswith(("f32[", "float32[")) and not _is_small(line)]
    assert not wide, wide


def _amaxes(jaxpr, sizes, inside=False):
    """Maxima over operands of these sizes in a rematerialised region: one per cast that it repeats."""
    found = 0
    for eqn in jaxpr.eqns:
        in_region = inside or eqn.primitive.name in ("remat2", "checkpoint")
        if in_region and eqn.primitive.name == "reduce_max" and eqn.invars[0].aval.size in sizes:
            found += 1
        for value in eqn.params.values():
            for part in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(part, "jaxpr", part)
                found += _amaxes(inner, sizes, in_region) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("mxfp8",))
@pytest.mark.parametrize("name", ["fp8_current", "mxfp8"])
def test_saved_codes_are_not_cast_again(name):
    """Features J17: a region that recomputes a product does so from the codes that it saved."""
    op, policies = mj.dot_general(name), mj.checkpoint_policies

    def loss(x, w):
        return jnp.sum(jnp.sin(op(jnp.cos(x), jnp.cos(w), PLAIN)))

    # Sizes that dy does not have, in whole blocks.
    counts, x, w = [], jnp.ones((160, 64)), jnp.ones((96, 64))
    for policy in (policies.save_codes, policies.save_gemm_outputs, None):
        function = jax.value_and_grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1))
        jaxpr = jax.make_jaxpr(function)(x, w).jaxpr
        counts.append(_amaxes(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0], (x.size, w.size)))
    assert counts[0] == 0
    assert counts[1] > 0
    assert counts[2] >= counts[1]


def _is_small(line):
    """Scales and empty slices: at most a few numbers."""
    sizes = line.split("[", 1)[1].split("]", 1)[0]
    return not sizes or np.prod([int(size) for size in sizes.split(",")]) < 16


def test_saved_gemm_outputs(capsys):
    op = mj.dot_general(MXFP8BlockScaling())
    two = jax.checkpoint(
        lambda x, w: jnp.sum(jnp.sin(op(jnp.sin(op(x, w, PLAIN)), w[:, :32], PLAIN))),
        policy=mj.checkpoint_policies.save_gemm_outputs,
    )
    lines = saved_residuals(two, X, W, capsys=capsys)
    assert [line.split(" ", 1)[0] for line in lines] == ["f32[16,32]"] * 2 or all("16,32" in line for line in lines)
    assert len(lines) == 2, lines


@pytest.mark.slow("further JAX programs of a checked kind")
@eager_and_jit
def test_quantized_arrays_as_arguments(transform):
    """In and out of a function, through vmap over equal leading axes, as a scan's carry, donated."""
    q, w = mj.quantize(X, "nvfp4"), mj.quantize(W, "nvfp4")
    y = transform(mj.scaled_matmul)(q, w)
    w_oracle = reference.quantize(W, "nvfp4")
    assert relative_error(y, reference.scaled_matmul(reference.quantize(X, "nvfp4"), w_oracle)) < 1e-5
    stacked = X.reshape(4, 4, 64)
    each = transform(jax.vmap(lambda x: mj.quantize(x, "nvfp4")))(stacked)
    products = transform(jax.vmap(mj.scaled_matmul, in_axes=(0, None)))(each, w)
    for index in range(4):
        expected = reference.scaled_matmul(reference.quantize(stacked[index], "nvfp4"), w_oracle)
        assert relative_error(products[index], expected) < 1e-5

    def body(carry, x):
        return mj.quantize(x, "nvfp4"), carry.dequantize()

    last, values = transform(lambda q, xs: lax.scan(body, q, xs))(mj.quantize(stacked[3], "nvfp4"), stacked)
    assert_same_bytes(last, reference.quantize(stacked[3], "nvfp4"))
    equal(values[1], reference.dequantize(reference.quantize(stacked[0], "nvfp4")))


def test_donated_codes():
    """A quantized argument may be donated; what comes back holds the new codes."""
    requantize = jax.jit(lambda q, x: mj.quantize(x + q.dequantize(), q.format.name), donate_argnums=0)
    q = mj.quantize(X, "mxfp8")
    given = np.asarray(q.dequantize())
    after = requantize(q, X)
    assert_oracle(after, X + given, Cast("mxfp8"))
