"""Products of groups of rows: `mf.grouped_matmul` and `mj.ragged_dot` have the same bits on a CPU, recipe by recipe.

Weights are permutations and gradients of weights are taken of rows with one element, so that no result depends on the
order of a sum: each is one product of two decoded elements, or under a Hadamard transform a sum of few.
"""

import functools

import numpy as np
import pytest

from microfloat.errors import InvalidValueError
from microfloat.recipes import RECIPES, DelayedScaling

torch = pytest.importorskip("torch", reason="torch is not installed")
jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import microfloat.jax as mj  # noqa: E402
import microfloat.torch as mf  # noqa: E402
from microfloat.torch.tensor.seeds import draw_seed  # noqa: E402

ROWS, K = 59, 48
SIZES = ((37, 1, 18, 3), (0, 41, 0, 18), (0, 0, 0, 59), (1, 1, 56, 1))
RNG = np.random.default_rng(11)
X, DY = (np.float32(RNG.standard_normal((ROWS, K)) * 2.0 ** RNG.integers(-4, 5, (ROWS, 1))) for _ in range(2))
X[5], X[40, 3] = 0, -0.0  # a row of zeros
SIGNS = np.float32(np.where(RNG.random(ROWS) < 0.5, -1, 1) * 2.0 ** RNG.integers(-2, 3, ROWS))


def top(cast):
    """A magnitude whose scale is a power of two, so that the order in which two scales are applied changes nothing."""
    return np.float32(cast.format.element.max * (448 if cast.format.tensor_scale else 1))


def lone(cast):
    """A matrix whose rows have one element each."""
    return np.where(np.arange(ROWS)[:, None] % K == np.arange(K), top(cast) * SIGNS[:, None], np.float32(0))


def weights(cast):
    permutations = np.random.default_rng(12)
    return np.stack([np.eye(K, dtype=np.float32)[permutations.permutation(K)] * top(cast) * 2.0**g for g in range(4)])


def by_torch(recipe, x, w, dy, sizes):
    """(y, dx, dw) and the call seed."""
    torch.manual_seed(sizes[0])
    words = draw_seed("cpu")
    torch.manual_seed(sizes[0])
    x, w = (torch.tensor(one, dtype=torch.float32, requires_grad=True) for one in (x, w))
    if recipe.is_delayed:
        layer = mf.GroupedLinear(len(sizes), K, K, recipe=recipe)
        layer.weight = torch.nn.Parameter(w.detach())
        y, w = layer(x, list(sizes)), layer.weight
    else:
        y = mf.grouped_matmul(x, w, list(sizes), recipe=recipe)
    y.backward(torch.tensor(dy))
    return [one.detach().numpy() for one in (y, x.grad, w.grad)], words.numpy().astype(np.uint32)


@functools.partial(jax.jit, static_argnums=0)
def by_jax(op, x, w, dy, sizes, words, state):
    seed = {"seed": words} if op.recipe.is_stochastic else {}
    y, back = jax.vjp(lambda x, w: op(x, w.swapaxes(1, 2), sizes, state=state, **seed), x, w)
    return y, *back(dy)


@pytest.mark.slow("groups of JAX are dots of theirs in test_ragged_dot.py, whose bytes are torch's")
@pytest.mark.parametrize("name", RECIPES)
def test_bits_of_grouped_products(name):
    """Sizes that are no multiple of anything, experts without tokens, and all tokens to one expert."""
    recipe = DelayedScaling(amax_history_len=2) if name == "delayed" else RECIPES[name]()
    state = mj.scaling.init(recipe, num_groups=4) if recipe.is_delayed else None
    w = np.float32(weights(recipe.fprop.rhs))
    runs = (X, DY, (0, 1)), (lone(recipe.wgrad.rhs), DY, (2,)), (X, lone(recipe.wgrad.lhs), (2,))
    for sizes in SIZES:
        for x, dy, compared in runs:
            expected, words = by_torch(recipe, x, w, dy, sizes)
            found = by_jax(mj.ragged_dot(recipe), x, w, dy, jnp.asarray(sizes), words, state)
            for at in compared:
                # Zeros have a sign that sums of nothing do not share.
                mine, theirs = np.asarray(found[at]) + 0.0, expected[at] + 0.0
                np.testing.assert_array_equal(mine, theirs, err_msg=f"{('y', 'dx', 'dw')[at]} of {sizes}")
        assert not np.asarray(found[2])[np.equal(sizes, 0)].any()


@pytest.mark.parametrize("sizes", [(30, 30, 0, 0), (59, 0, 0, 1), (-1, 60, 0, 0)], ids=str)
def test_sizes_beyond_the_rows_are_refused_alike(sizes):
    """And negative ones. JAX takes fewer, as `lax.ragged_dot` does: rows behind the last group give zeros."""
    with pytest.raises(InvalidValueError, match="group_sizes: got"):
        mf.grouped_matmul(torch.tensor(X), torch.ones((4, 8, K)), list(sizes), recipe="mxfp8")
    for given in (sizes, np.asarray(sizes), jnp.asarray(sizes)):
        with pytest.raises(InvalidValueError, match="group_sizes: got"):
            mj.ragged_dot("mxfp8")(X, np.ones((4, K, 8), np.float32), given)
