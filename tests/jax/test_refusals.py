"""Arguments that have no meaning: an error of ours at trace time that names the argument, what came and what to do."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import microfloat.jax as mj
from microfloat.errors import MicrofloatError
from microfloat.recipes import Cast, Delayed, DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling

X, W = np.ones((4, 32), np.float32), np.ones((8, 32), np.float32)
PLAIN = (((1,), (1,)), ((), ()))
MX, NV, DELAYED = (mj.dot_general(recipe()) for recipe in (MXFP8BlockScaling, NVFP4BlockScaling, DelayedScaling))
STOCHASTIC = Cast("mxfp8", rounding="stochastic")
DELAYED_CAST = Cast("fp8_tensor", scaling=Delayed())


def state(change=lambda leaf: leaf):
    return jax.tree.map(change, mj.scaling.init(DelayedScaling()))


def shorter(leaf):
    return leaf[:5] if leaf.ndim else leaf


REFUSED = {
    # tracers where something static is needed
    "axis": (lambda: jax.jit(lambda a: mj.quantize(X, "mxfp8", axis=a))(-1), "axis: got .*Tracer, needed an int"),
    "cast": (lambda: jax.jit(lambda a: mj.quantize(X, a))(X), "cast: got .*Tracer"),
    "seed": (
        lambda: jax.jit(lambda a: mj.quantize(X, STOCHASTIC, seed=a))(3),
        r"seed: got int32\[\].*pass the two words",
    ),
    "dims": (lambda: jax.jit(lambda a: MX(X, W, (((a,), (1,)), ((), ()))))(1), "dimension_numbers: got .*Tracer"),
    "out dtype": (lambda: jax.jit(lambda a: MX(X, W, PLAIN, None, a))(1), "preferred_element_type: got .*Tracer"),
    # traced values of the wrong form
    "amax": (
        lambda: jax.jit(lambda a: mj.quantize(X, "nvfp4", amax=a))(np.ones(3, np.float32)),
        r"amax: got shape \(3,\)",
    ),
    "scale_enc": (
        lambda: jax.jit(lambda a: mj.quantize(X, DELAYED_CAST, scale_enc=a))(np.ones(3, np.float32)),
        r"scale_enc: got shape \(3,\)",
    ),
    "stream": (
        lambda: mj.quantize(X, STOCHASTIC, seed=1, stream=jnp.zeros(3, jnp.uint32)),
        r"stream: got uint32\[3\], needed an int",
    ),
    "float stream": (lambda: mj.quantize(X, STOCHASTIC, seed=1, stream=jnp.float32(3)), r"stream: got float32\[\]"),
    "words of a key": (lambda: NV(X, W, PLAIN, key=jnp.zeros(3, jnp.uint32)), r"key: got uint32\[3\].*jax.random.key"),
    "stacked keys": (lambda: NV(X, W, PLAIN, key=jnp.zeros((2, 2), jnp.uint32)), r"key: got uint32\[2, 2\]"),
    # keys, also of recipes and casts that draw nothing
    "int key": (lambda: MX(X, W, PLAIN, key=0), "key: got int, needed a key.*An int belongs into seed="),
    "two keys": (lambda: jax.jit(MX, static_argnums=2)(X, W, PLAIN, key=jax.random.split(jax.random.key(0))), "Split"),
    "key of experts": (lambda: mj.ragged_dot("mxfp8")(X, W.T[None], np.array([4]), key=1.5), "key: got float"),
    "key of a cast": (lambda: mj.quantize(X, "mxfp8", key=np.zeros(2, np.int32)), "key: got int32, needed a key"),
    # dtypes
    "fp8": (lambda: MX(X.astype("float8_e5m2"), W, PLAIN), "lhs: got float8_e5m2.*Dequantize it first"),
    "fp4": (lambda: MX(X, W.astype("float4_e2m1fn"), PLAIN), "rhs: got float4_e2m1fn.*Dequantize it first"),
    "quantized": (lambda: MX(mj.quantize(X, "mxfp8"), W, PLAIN), "lhs: got a QuantizedArray.*scaled_matmul"),
    "list": (lambda: MX([[1.0]], W, PLAIN), "lhs: got list"),
    "integers": (lambda: jax.jit(MX, static_argnums=2)(X, W.astype(np.int8), PLAIN), r"rhs: got int8.*\.astype"),
    "no dtype": (lambda: MX(X, W, PLAIN, None, "nonsense"), "preferred_element_type: got 'nonsense'"),
    "matmul dtype": (lambda: mj.scaled_matmul(X, W, out_dtype="nonsense"), "out_dtype: got 'nonsense'"),
    "dequantize dtype": (lambda: mj.quantize(X, "mxfp8").dequantize("nonsense"), "dtype: got 'nonsense'"),
    # shapes and pairings
    "lengths": (lambda: MX(X, W[:, :31], PLAIN), r"dimension_numbers: got contracting .*\(32,\).*\(31,\)"),
    "unpaired": (lambda: MX(X, W, (((1,), (1, 0)), ((), ()))), "equal sizes, pair by pair"),
    "half an axis": (lambda: MX(X, W, (((1.5,), (1,)), ((), ()))), "dimension_numbers: got"),
    "no dims": (lambda: MX(X, W, None), "dimension_numbers: got None"),
    "einsum axes": (lambda: mj.einsum(MXFP8BlockScaling())("abc,de->ad", X, W), "eqn: got .*3 axes in lhs"),
    # recipes and options
    "class": (lambda: mj.dot_general(MXFP8BlockScaling), "recipe: got the class MXFP8BlockScaling.*Call the class"),
    "unknown": (lambda: mj.explain("mxfp9"), "recipe: got 'mxfp9'"),
    "mesh axes": (lambda: mj.dot_general(MXFP8BlockScaling(), axis_names=3), "axis_names: got 3"),
    "no key": (
        lambda: jax.jit(jax.grad(lambda x: NV(x, W, PLAIN).sum()))(X),
        "key: got None.*disable_stochastic_rounding",
    ),
    "both": (lambda: NV(X, W, PLAIN, seed=1, key=jax.random.key(0)), "key: got a value beside seed"),
    # state
    "state of a dict": (lambda: DELAYED(X, W, PLAIN, state={}), "state: got dict.*scaling.init"),
    "stacked state": (
        lambda: DELAYED(X, W, PLAIN, state=state(lambda leaf: leaf[None])),
        "state.x: got .*vmap and scan",
    ),
    "rounded state": (lambda: DELAYED(X, W, PLAIN, state=state(lambda leaf: leaf.astype("bfloat16"))), "state.x: got"),
    "other state": (lambda: mj.scaling.apply(state(), state(shorter)), "new: got another form in slot 'x'"),
    "no gradient": (lambda: mj.scaling.apply(state(), None), "new: got NoneType"),
    "no gradients": (lambda: mj.scaling.merge(state(), [None]), "gradients: got NoneType"),
    "text": (lambda: mj.scaling.update(state(), {"x": "1"}), r"amaxes\['x'\]: got"),
    "vector": (lambda: mj.scaling.update(state(), {"x": np.ones(3, np.float32)}), r"amaxes\['x'\]: got shape \(3,\)"),
    "no names": (lambda: mj.scaling.update(state(), 3), "amaxes: got int"),
    "one gradient": (lambda: mj.scaling.merge(state(), state()), "gradients: got DelayedState, needed a list"),
    "old": (lambda: mj.scaling.apply({}, state()), "old: got dict, needed a DelayedState.*scaling.init"),
    "no state": (lambda: mj.scaling.update(3, {"x": 1.0}), "state: got int, needed a DelayedState"),
    "no amax": (lambda: mj.scaling.update(state(), {"x": None}), r"amaxes\['x'\]: got"),
    "accumulate": (lambda: mj.scaling.max_accumulate({}), "state: got dict, needed a DelayedState"),
    "stateless": (lambda: MX.with_amax(X, W, PLAIN, state=None, gradient_slot=0.0), "recipe: got MXFP8BlockScaling"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(MicrofloatError, match=message) as caught:
        call()
    assert isinstance(caught.value, (ValueError, TypeError))


@partial(jax.jit, static_argnums=0)
def pulled(recipe, x):
    """y, dx and dw of a product with W; one program for all values."""
    y, back = jax.vjp(lambda x, w: mj.dot_general(recipe)(x, w, PLAIN), x, W)
    return y, *back(jnp.ones_like(y))


@pytest.mark.slow_cases("further JAX programs of a checked kind", cases=("NVFP4*",))
@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, np.nan])
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling(disable_stochastic_rounding=True)], ids=repr)
def test_operands_of_one_value(recipe, value):
    """Zeros give zeros forward and backward; NaN and Inf reach what they must, and nothing else is refused."""
    x = np.full((32, 32), value, np.float32)
    y, dx, dw = pulled(recipe, x)
    assert np.isfinite(np.asarray(dx)).all()
    if value == 0:
        assert not np.asarray(y).any()
        assert not np.asarray(dw).any()
    elif np.isnan(value) or recipe == MXFP8BlockScaling():
        assert np.isnan(np.asarray(y)).all()
        assert np.isnan(np.asarray(dw)).all()
    else:
        assert (np.asarray(y) == 6 * 448 * 32).all()  # Inf saturates in NVFP4 (docs/numerics.md 2.4)


@pytest.mark.parametrize(("op", "function"), [(mj.DotGeneral, mj.dot_general), (mj.RaggedDot, mj.ragged_dot)])
def test_an_op_made_by_its_class_is_checked_as_by_its_function(op, function):
    assert op("mxfp8", axis_names="data") == function("mxfp8", axis_names=("data",))
    for options in ({"backend": "triton"}, {"residuals": "middle"}, {"axis_names": (1,)}, {"recipe": "mxfp9"}):
        with pytest.raises(MicrofloatError, match=next(iter(options))):
            op(**options)


def test_ragged_dot_refuses_a_keyword_that_it_does_not_know():
    with pytest.raises(TypeError, match="keys"):
        mj.ragged_dot("mxfp8")(X, W.reshape(1, 32, 8), [4], keys=1)
