"""`quantize` and `dequantize` against the oracle: shapes, axes, dtypes, seeds and edges, eager and jitted.

test_every_cast.py has every format with every rule, on one shape.
"""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import microfloat.jax as mj
from microfloat import formats, reference
from microfloat.recipes import Cast, Delayed, Hadamard
from tests import digests
from tests.jax.compare import assert_oracle, assert_same_bytes
from tests.jax.effort import cheaper_passes

SEED = digests.SEED


@pytest.mark.slow("JAX: special values once more, which the contract casts too")
@pytest.mark.as_users_compile
@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_matrix_with_special_values(name):
    """Zero and tiny blocks, -0, Inf, NaN, powers of two and neighbours, FMAX; both axes; ragged."""
    x = np.random.default_rng(6).standard_normal((19, 149)).astype(np.float32)
    x[0], x[1, :40], x[2, :16], x[3, ::2] = 0, 1e-41, 1e-38, -0.0
    x[4, 3], x[5, 100], x[6, 7] = np.nan, np.inf, -np.inf
    x[7, :5] = [448, np.nextafter(np.float32(448), np.float32(449)), 3.4e38, 6, 2.0**-126]
    cast = Cast(name)
    for axis in (-1, -2) if name in ("mxfp8", "nvfp4_2d", "fp8_row") else (-1,):
        assert_oracle(mj.quantize(x, cast, axis=axis), x, cast, axis=axis)


@pytest.mark.slow_cases(
    "further JAX programs of a checked kind",
    all_but=("()-fp8_128x128", "(0, 5)-fp8_128x128", "(5, 0)-mxfp6_e3m2", "(37,)-mxfp6_e3m2", "(2, 3, 33)-nvfp4_2d"),
)
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row", "fp8_128x128", "mxfp6_e3m2", "nvfp4_row", "nvfp4_2d"])
@pytest.mark.parametrize("shape", [(), (37,), (0, 5), (5, 0), (2, 3, 33)], ids=str)
def test_shapes(name, shape):
    x = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    q = mj.quantize(x, name)
    assert_oracle(q, x, name)
    assert q.dequantize().shape == shape


@pytest.mark.slow("JAX programs of what tests/contract checks too")
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_every_narrow_input_value(dtype):
    """All 65536 values of a 16-bit dtype, in blocks of neighbours."""
    x = np.arange(65536, dtype=np.uint16).view(dtype).reshape(-1, 256)
    for name in ("mxfp8", "nvfp4"):
        q = mj.quantize(x, name)
        assert_oracle(q, x, name, context=name)
        assert q.dtype == x.dtype
        assert q.dequantize().dtype == x.dtype


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_hadamard_axes_and_stochastic(name):
    x = digests.input_set("A")[:40, :100]
    for axis, rounding in itertools.product((-1, -2), ("nearest", "stochastic")):
        cast = Cast(name, rounding=rounding, hadamard=Hadamard(sign_mask=0x1234))
        arguments = {"axis": axis, "seed": SEED, "stream": 3} if rounding == "stochastic" else {"axis": axis}
        assert_oracle(mj.quantize(x, cast, **arguments), x, cast, **arguments)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("nvfp4_row",))
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_row"])
def test_ties_of_block_scales(name):
    """Exact quotients half-way between two E4M3 scales: one rounding too many decides otherwise."""
    grid = formats.decode(np.arange(0x28, 0x7F, dtype=np.uint8), formats.E4M3)
    ties = (grid[1:] + grid[:-1]) / 2
    odd = np.arange(1, 60, 2, dtype=np.float32)[:, None]
    amaxes = np.concatenate([np.full_like(odd, 448) * odd, odd * ties], axis=1) * 6
    x = np.zeros((*amaxes.shape, 16), np.float32)
    x[..., 0] = amaxes
    x = x.reshape(len(odd), -1)
    cast = Cast(name, "two_level_torchao")
    for tensor in (x,) if name == "nvfp4_row" else x:
        assert_oracle(mj.quantize(tensor, cast), tensor, cast)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_eager_operation_by_operation():
    """Without jit every primitive is a program of its own, of which no pass can make another: the same bytes."""
    x = digests.input_set("C")[:3, :32]
    cast = Cast("mxfp4", rounding="stochastic")
    with jax.disable_jit(), cheaper_passes():
        assert_oracle(mj.quantize(x, cast, seed=5), x, cast, seed=5)


def test_inside_a_larger_program():
    """Arithmetic before the cast must not be merged into it."""
    x = digests.input_set("A")
    cast = Cast("fp8_tensor", scaling=Delayed())
    program = jax.jit(lambda x: mj.quantize(x * np.float32(1.1), cast, scale_enc=3.7))
    assert_same_bytes(program(x), reference.quantize(x * np.float32(1.1), cast, scale_enc=3.7))


@pytest.mark.slow("further JAX programs of a checked kind")
def test_x64(x64):
    x = digests.input_set("A")[:20, :50]
    for name in ("mxfp4", "nvfp4_2d", "fp8_row"):
        assert_oracle(mj.quantize(x, name), x, name)
    cast = Cast("nvfp4", rounding="stochastic", hadamard=Hadamard())
    assert_oracle(mj.quantize(x, cast, seed=SEED), x, cast, seed=SEED)
    assert mj.quantize(x, "fp8_row").dequantize().dtype == jnp.float32


@pytest.mark.slow("further JAX programs of a checked kind")
@settings(max_examples=3)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 150)),
    exponents=st.tuples(st.integers(0, 200), st.integers(0, 54)),
    name=st.sampled_from(list(formats.FORMATS)),
    words=st.integers(0, 2**64 - 1),
)
def test_random_bits(shape, exponents, name, words):
    rng = np.random.default_rng(words)
    low, width = exponents
    bits = (
        rng.integers(0, 2**23, shape, dtype=np.uint32)
        | rng.integers(low, low + width + 1, shape, dtype=np.uint32) << 23
    )
    x = (bits | rng.integers(0, 2, shape, dtype=np.uint32) << 31).view(np.float32)
    cast = Cast(name, rounding="stochastic")
    assert_oracle(mj.quantize(x, cast, seed=words), x, cast, seed=words)


def test_seed_forms_and_key():
    """Features J18: a key is the call seed, its two words; the bytes are those of the oracle at equal seeds."""
    x = digests.input_set("A")[:8, :64]
    cast = Cast("mxfp8", rounding="stochastic")
    expected = reference.quantize(x, cast, seed=SEED)
    words = np.array([SEED & 0xFFFFFFFF, SEED >> 32], np.uint32)
    for seed in (SEED, words, jnp.asarray(words), list(map(int, words))):
        assert_same_bytes(mj.quantize(x, cast, seed=seed), expected)
    assert_same_bytes(jax.jit(lambda x, seed: mj.quantize(x, cast, seed=seed))(x, words), expected)
    key = jax.random.key(0)
    drawn = np.asarray(jax.random.bits(key, (2,), "uint32"))
    assert_oracle(mj.quantize(x, cast, key=key), x, cast, seed=[int(word) for word in drawn])
    assert_oracle(mj.quantize(x, cast, key=jax.random.PRNGKey(0)), x, cast, seed=[int(word) for word in drawn])


@pytest.mark.slow("JAX programs of what tests/contract checks too")
def test_amax_and_scale_enc():
    x = digests.input_set("A")[:32, :64]
    row_amax = np.abs(x).max(1, keepdims=True) * 2
    for name, amax in (
        ("fp8_tensor", np.float32(3e6)),
        ("fp8_tensor", np.full(1, 3e6, np.float32)),
        ("nvfp4_row", row_amax),
    ):
        assert_oracle(mj.quantize(x, name, amax=amax), x, name, amax=amax)
    traced = jax.jit(lambda x, amax: mj.quantize(x, "nvfp4", amax=amax))(x, np.float32(0))
    assert_same_bytes(traced, reference.quantize(x, "nvfp4", amax=np.float32(0)))
    cast = Cast("fp8_tensor_e5m2", scaling=Delayed())
    assert_oracle(mj.quantize(x, cast, scale_enc=2.5), x, cast, scale_enc=2.5)


@pytest.mark.slow("JAX programs of what tests/contract checks too")
@pytest.mark.parametrize(
    ("cast", "expected"), digests.DEQUANTIZED, ids=lambda value: getattr(value, "scale_rule", None)
)
def test_dequantized_bytes(cast, expected):
    assert digests.digest(np.asarray(mj.quantize(digests.input_set("A"), cast).dequantize())) == expected


@pytest.mark.parametrize("name", ["fp8_row", "mxfp8", "mxfp6_e2m3", "nvfp4_2d"])
def test_dequantize_of_extremes(name):
    """Set B spans all exponents, C is subnormal, N holds NaN and Inf: the oracle's bytes, subnormal ones too."""
    for which in ("B", "C", "N"):
        q, expected = mj.quantize(digests.input_set(which), name), reference.quantize(digests.input_set(which), name)
        actual, wanted = np.asarray(q.dequantize()), reference.dequantize(expected)
        nan = np.isnan(wanted)
        np.testing.assert_array_equal(np.isnan(actual), nan)
        np.testing.assert_array_equal(actual.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan], err_msg=which)


@pytest.mark.slow("JAX programs of what tests/contract checks too")
def test_dequantize_undoes_hadamard():
    x = np.random.default_rng(8).standard_normal((10, 50)).astype(np.float32)
    for axis in (-1, -2):
        q = mj.quantize(x, Cast("fp8_row", hadamard=Hadamard()), axis=axis)
        expected = reference.dequantize(reference.quantize(x, Cast("fp8_row", hadamard=Hadamard()), axis=axis))
        np.testing.assert_allclose(np.asarray(q.dequantize()), expected, rtol=0, atol=1e-5)
    assert mj.dequantize(q, jnp.bfloat16).dtype == jnp.bfloat16


# features Q3
@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_pair_of_axes_gives_what_two_calls_give(name):
    x = np.random.default_rng(8).standard_normal((70, 45)).astype(np.float32)
    casts = (Cast(name, rounding="stochastic"), Cast(name))
    for pair, arguments in ((casts, {"seed": SEED, "stream": (2, 3)}), (name, {})):
        expected = reference.quantize(x, pair, axis=(-2, -1), **arguments)
        made = mj.quantize(x, pair, axis=(-2, -1), **arguments)
        assert isinstance(made, tuple)
        for q, want in zip(made, expected, strict=True):
            assert_same_bytes(q, want)
    jitted = jax.jit(lambda x: mj.quantize(x, name, axis=(-1, -2)))(x)
    for q, want in zip(jitted, reference.quantize(x, name, axis=(-1, -2)), strict=True):
        assert_same_bytes(q, want)


def test_the_inputs_of_a_pair():
    x = np.random.default_rng(8).standard_normal((34, 45)).astype(np.float32)
    delayed = Cast("fp8_tensor", scaling=Delayed())
    amaxes = np.full((34, 1), 3, np.float32), np.full((45, 1), 4, np.float32)
    for casts, arguments in (
        (("nvfp4", "nvfp4_2d"), {"amax": 9.0}), (("nvfp4", "mxfp8"), {"amax": 9.0}), ("nvfp4_row", {"amax": amaxes}),
        ((delayed, "mxfp8"), {"scale_enc": 2.0}), (delayed, {"scale_enc": (2.0, 4.0)}),
    ):  # fmt: skip
        expected = reference.quantize(x, casts, axis=(-1, -2), **arguments)
        for q, want in zip(mj.quantize(x, casts, axis=(-1, -2), **arguments), expected, strict=True):
            assert_same_bytes(q, want)
    with pytest.raises(ValueError, match=r"axis: got the pair \(-1, -2\) for an array of 3 axes"):
        mj.quantize(x[None], "mxfp8", axis=(-1, -2))
    with pytest.raises(TypeError, match=r"cast: got tuple.*a pair of axes"):
        mj.quantize(x, ("mxfp8", "mxfp8"))


# features S12
@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("mxfp8",))
@pytest.mark.parametrize("name", formats.FORMATS)
def test_the_gradient_of_fake_quantize_goes_straight_through(name):
    x = np.random.default_rng(9).standard_normal((6, 40)).astype(np.float32)
    x[0, 0] = np.inf
    dy = np.random.default_rng(10).standard_normal((2, 6, 40)).astype(np.float32)

    @jax.jit
    def loss(x):
        row, column = mj.fake_quantize(x, name, (-1, -2))
        return (row * dy[0]).sum() + (column * dy[1]).sum()

    np.testing.assert_array_equal(jax.grad(loss)(x), dy[0] + dy[1])
    for y, axis in zip(mj.fake_quantize(x, name, (-1, -2)), (-1, -2), strict=True):
        np.testing.assert_array_equal(y, mj.quantize(x, name, axis=axis).dequantize())
