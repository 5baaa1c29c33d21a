"""Public functions, argument by argument, with all that may be handed to them: errors of ours, never of JAX or Flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import microfloat.jax as mj
from microfloat.errors import MicrofloatError
from microfloat.jax import fp8_ops, linen
from microfloat.jax import nnx as mnnx
from microfloat.recipes import Cast, Delayed, DelayedScaling, MXFP8BlockScaling

X, W = np.ones((4, 32), np.float32), np.ones((8, 32), np.float32)
PLAIN, TURNED = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))
SIX = mj.quantize(X, "mxfp6_e2m3")
Q, MX, NV = mj.quantize(X, "mxfp8"), mj.dot_general("mxfp8"), mj.dot_general("nvfp4")
DELAYED = DelayedScaling(amax_history_len=4)
STATE = mj.scaling.init(DELAYED)
NOISY, LATE = Cast("mxfp8", rounding="stochastic"), Cast("fp8_tensor", scaling=Delayed())
ONE, HISTORY, E4M3 = np.ones(1, np.float32), np.zeros(4, np.float32), jnp.float8_e4m3fn
PAIRS = {f"{name}_{kind}": leaf for name in ("lhs", "rhs", "grad") for kind, leaf in
         (("scale", ONE), ("amax_history", HISTORY))}  # fmt: skip
JUNK = {
    "None": None, "int": 3, "str": "x", "list": [1.0], "dict": {}, "object": object(), "class": MXFP8BlockScaling,
    "nan": float("nan"), "huge": 10**400, "bool": True, "bytes": b"x", "integers": np.ones((4, 32), np.int32),
    "float64": np.ones((4, 32)), "complex": np.ones((4, 32), np.complex64), "0-d": np.ones((), np.float32),
    "empty": np.ones(0, np.float32), "fp8": np.ones((4, 32), E4M3), "key": jax.random.key(0),
    "objects": np.array([object()]), "words": np.array(["a"]), "quantized": Q,
    "shape": jax.ShapeDtypeStruct((4, 32), jnp.float32), "function": lambda: 0,
}  # fmt: skip


def layer():
    return nnx.Linear(32, 4, rngs=nnx.Rngs(0))


# What is called, and the junk that has a meaning there.
NUMBERS = "int list nan bool integers float64 0-d empty"
CALLS = {
    "quantize x": (lambda v: mj.quantize(v, "mxfp8"), "nan 0-d empty"),
    "quantize cast": (lambda v: mj.quantize(X, v), ""),
    "quantize axis": (lambda v: mj.quantize(X, "mxfp8", axis=v), ""),
    "quantize seed": (lambda v: mj.quantize(X, NOISY, seed=v), "int"),
    "quantize key": (lambda v: mj.quantize(X, NOISY, key=v), "key"),
    "quantize stream": (lambda v: mj.quantize(X, NOISY, seed=1, stream=v), "int"),
    "quantize amax": (lambda v: mj.quantize(X, "nvfp4", amax=v), "None int 0-d"),
    "quantize scale_enc": (lambda v: mj.quantize(X, LATE, scale_enc=v), "int 0-d"),
    "quantize backend": (lambda v: mj.quantize(X, "mxfp8", backend=v), ""),
    "fake_quantize x": (lambda v: mj.fake_quantize(v, "mxfp8"), "nan 0-d empty"),
    "fake_quantize axis": (lambda v: mj.fake_quantize(X, "mxfp8", v), ""),
    "dequantize q": (mj.dequantize, "quantized"),
    "dequantize dtype": (lambda v: mj.dequantize(Q, v), "None"),
    "scaled_matmul a": (lambda v: mj.scaled_matmul(v, Q), "quantized"),
    "scaled_matmul b": (lambda v: mj.scaled_matmul(Q, v), "quantized"),
    "scaled_matmul bias": (lambda v: mj.scaled_matmul(Q, Q, bias=v), "None"),
    "scaled_matmul out_dtype": (lambda v: mj.scaled_matmul(Q, Q, out_dtype=v), "None"),
    "scaled_matmul accumulate": (lambda v: mj.scaled_matmul(Q, Q, accumulate=v), ""),
    "recipe": (mj.dot_general, "None"),
    "ragged recipe": (mj.ragged_dot, "None"),
    "ragged lhs": (lambda v: mj.ragged_dot("mxfp8")(v, W.T[None], (16,)), ""),
    "ragged rhs": (lambda v: mj.ragged_dot("mxfp8")(X, v, (16,)), ""),
    "ragged sizes": (lambda v: mj.ragged_dot("mxfp8")(X, W.T[None], v), ""),
    "ragged offset": (lambda v: mj.ragged_dot("mxfp8")(X, W.T[None], (16,), group_offset=v), "None"),
    "ragged state": (lambda v: mj.ragged_dot("mxfp8")(X, W.T[None], (16,), state=v), "None"),
    "autocast recipe": (mj.autocast, "None"),
    "autocast enabled": (lambda v: mj.autocast(enabled=v), "bool"),
    "init groups": (lambda v: mj.scaling.init("delayed", v), "None int"),
    "microbatches": (lambda v: mj.scaling.microbatched(jax.grad(jnp.sum), v), "int"),
    "residuals": (lambda v: mj.dot_general("mxfp8", residuals=v), ""),
    "axis_names": (lambda v: mj.dot_general("mxfp8", axis_names=v), "str"),
    "op lhs": (lambda v: MX(v, W, PLAIN), ""),
    "op rhs": (lambda v: MX(X, v, PLAIN), "quantized"),
    "op dimension_numbers": (lambda v: MX(X, W, v), ""),
    "op dtype": (lambda v: MX(X, W, PLAIN, None, v), "None"),
    "op state": (lambda v: mj.dot_general(DELAYED)(X, W, PLAIN, state=v), ""),
    "op key": (lambda v: jax.grad(lambda x: NV(x, W, PLAIN, key=v).sum())(X), "key"),
    "op out_sharding": (lambda v: MX(X, W, PLAIN, out_sharding=v), "None"),
    "einsum equation": (lambda v: mj.einsum("mxfp8")(v, X, W), ""),
    "with_amax slot": (
        lambda v: mj.dot_general(DELAYED).with_amax(X, W, PLAIN, state=STATE, gradient_slot=v), "int nan 0-d",
    ),
    "init": (mj.scaling.init, ""),
    "apply old": (lambda v: mj.scaling.apply(v, STATE), ""),
    "apply new": (lambda v: mj.scaling.apply(STATE, v), ""),
    "update amaxes": (lambda v: mj.scaling.update(STATE, v), "dict"),
    "update amax": (lambda v: mj.scaling.update(STATE, {"x": v}), "int nan 0-d"),
    "merge": (lambda v: mj.scaling.merge(STATE, v), ""),
    "explain": (mj.explain, "function"),
    "explain device": (lambda v: mj.explain("mxfp8", v), "None"),
    "explain shape": (lambda v: mj.explain("mxfp8", "cpu", v), "None"),
    "parts codes": (lambda v: mj.QuantizedArray.from_parts(v, Q.scale, None, "mxfp8"), "fp8"),
    "parts scale": (lambda v: mj.QuantizedArray.from_parts(Q.codes, v, None, "mxfp8"), ""),
    "parts tensor_scale": (lambda v: mj.QuantizedArray.from_parts(Q.codes, Q.scale, v, "mxfp8"), "None"),
    "parts format": (lambda v: mj.QuantizedArray.from_parts(Q.codes, Q.scale, None, v), ""),
    "parts packed shape": (lambda v: mj.QuantizedArray.from_parts(
        SIX.packed_codes(), SIX.scale, None, "mxfp6_e2m3", shape=v, packed=True), "None"),
    "parts packed axis": (lambda v: mj.QuantizedArray.from_parts(
        SIX.packed_codes(), SIX.scale, None, "mxfp6_e2m3", shape=(4, 32), axis=v, packed=True), ""),
    "stored numbers": (lambda v: MX(X, Q, v), ""),
    "microbatched gradient": (lambda v: mj.scaling.microbatched(v, 2), "class function"),
    "parts axis": (lambda v: mj.QuantizedArray.from_parts(Q.codes, Q.scale, None, "mxfp8", axis=v), ""),
    "parts shape": (lambda v: mj.QuantizedArray.from_parts(Q.codes, Q.scale, None, "mxfp8", shape=v), "None"),
    "parts hadamard": (lambda v: mj.QuantizedArray.from_parts(Q.codes, Q.scale, None, "mxfp8", hadamard=v), "None"),
    "convert model": (lambda v: mnnx.convert(v, "mxfp8"), ""),
    "convert recipe": (lambda v: mnnx.convert(layer(), v), ""),
    "convert exclude": (lambda v: mnnx.convert(layer(), "mxfp8", exclude=v), "dict empty words"),
    "convert rngs": (lambda v: mnnx.convert(layer(), "nvfp4", rngs=v), "None"),
    "revert": (mnnx.revert, ""),
    "DotGeneral stacked": (lambda v: mnnx.DotGeneral(DELAYED, stacked=v), ""),
    "grad f": (mnnx.grad, "class function"),
    "grad argnums": (lambda v: mnnx.grad(lambda m: m(X).sum(), argnums=v), "int huge"),
    "Optimizer model": (lambda v: mnnx.Optimizer(v, optax.sgd(0.1)), ""),
    "Optimizer tx": (lambda v: mnnx.Optimizer(layer(), v), ""),
    "Optimizer grads": (lambda v: (m := layer(), mnnx.Optimizer(m, optax.sgd(0.1)).update(m, v)), ""),
    "linen recipe": (linen.dot_general_cls, "None"),
    "linen grouped recipe": (linen.ragged_dot_cls, "None"),
    "nnx groups": (lambda v: mnnx.RaggedDot("mxfp8", num_groups=v), "int"),
    "overwrite_with_gradient": (linen.overwrite_with_gradient, ""),
    "max_accumulate": (linen.max_accumulate, "dict"),
    "TrainState tx": (lambda v: linen.TrainState.create(apply_fn=None, params={"params": {}}, tx=v), ""),
    "fp8 x": (lambda v: fp8_ops.quantize(v, E4M3, 1.0, jnp.float32), NUMBERS),
    "fp8 dtype": (lambda v: fp8_ops.quantize(X, v, 1.0, jnp.float32), ""),
    "fp8 scale": (lambda v: fp8_ops.quantize(X, E4M3, v, jnp.float32), NUMBERS.replace("empty", "")),
    "fp8 compute dtype": (lambda v: fp8_ops.quantize(X, E4M3, 1.0, v), ""),
    "compute_scale": (lambda v: fp8_ops.compute_scale(v, 1.0, 448.0), NUMBERS),
    "in_qdq x": (lambda v: fp8_ops.in_qdq(jnp.float32, E4M3, v, ONE, HISTORY), NUMBERS),
    "in_qdq history": (lambda v: fp8_ops.in_qdq(jnp.float32, E4M3, X, ONE, v), "list"),
    "in_qdq mode": (lambda v: fp8_ops.in_qdq(jnp.float32, E4M3, X, ONE, HISTORY, v), ""),
    "fp8 dot lhs": (lambda v: fp8_ops.fp8_scaled_dot_general(v, W.T, TURNED, **PAIRS), "integers float64"),
    "fp8 dot scale": (
        lambda v: fp8_ops.fp8_scaled_dot_general(X, W.T, TURNED, **{**PAIRS, "lhs_scale": v}), "int list nan bool 0-d",
    ),
    "fp8 dot dimensions": (lambda v: fp8_ops.fp8_scaled_dot_general(X, W.T, v, **PAIRS), ""),
    "fp8 op lhs": (
        lambda v: fp8_ops.Fp8DirectDotGeneralOp(4).init(jax.random.key(0), v, W.T, TURNED), "integers float64",
    ),
    "merge_state old": (lambda v: fp8_ops.merge_state(v, [{}]), "dict"),
    "merge_state gradients": (lambda v: fp8_ops.merge_state({}, v), ""),
    "next_state": (lambda v: fp8_ops.next_state({"a_scale": ONE, "a_amax_history": HISTORY}, v), ""),
    "reset_state": (fp8_ops.reset_state, "dict"),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_junk(call):
    function, meant = CALLS[call]
    for name, value in JUNK.items():
        if name in meant.split():
            continue
        try:
            function(value)
        except MicrofloatError:
            continue
        except Exception as error:
            pytest.fail(f"{name}: {type(error).__name__}: {error}")
        else:
            pytest.fail(f"{name} was accepted")


def test_tracers_where_constants_belong():
    def traced(function, value):
        with pytest.raises(MicrofloatError):
            jax.jit(function)(value)

    traced(lambda v: mj.quantize(X, "mxfp8", axis=v).codes, -1)
    traced(lambda v: mj.quantize(X, "mxfp8", backend=v).codes, 1)
    traced(lambda v: mj.dequantize(Q, v), 1)
    traced(lambda v: mj.scaled_matmul(Q, Q, accumulate=v), 1)
    traced(lambda v: mj.dot_general(v)(X, W, PLAIN), 1)
    traced(lambda v: mj.autocast(v), 1)
    traced(lambda v: mj.dot_general("mxfp8", residuals=v)(X, W, PLAIN), 1)
    traced(lambda v: mj.einsum("mxfp8")(v, X, W), 1)
    traced(lambda v: mj.QuantizedArray.from_parts(Q.codes, Q.scale, None, "mxfp8", shape=(v, 32)).codes, 4)
    traced(lambda v: mj.explain("mxfp8", "cpu", (v, 4, 4)), 4)
    traced(lambda v: nn.Dense(4, dot_general_cls=linen.dot_general_cls(v)).init(jax.random.key(0), X), 1)
