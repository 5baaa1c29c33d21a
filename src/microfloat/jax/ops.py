"""`quantize`, `dequantize` and `scaled_matmul`: the names and laws of `microfloat.reference` and `microfloat.torch`."""

import math
import typing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from microfloat.arguments import check_choice, check_word
from microfloat.errors import NotSupportedError, invalid_value
from microfloat.jax import array, transformations
from microfloat.jax.array import QuantizedArray, dequantize
from microfloat.jax.backends import casts, cuda, gemms, reference
from microfloat.jax.numerics.random import call_seed, check_key
from microfloat.layout import Part, Storage, array_layout, leading_axes
from microfloat.recipes import Cast, as_cast
from microfloat.recipes.usages import CastLike, Usage, given_amax, given_scale_enc, usages_of
from microfloat.reference import Quantized, casters
from microfloat.routes import OperandSpec

Real: TypeAlias = ArrayLike | None
Factor: TypeAlias = QuantizedArray | Array


@typing.overload
def quantize(
    x: ArrayLike, cast: CastLike, *, axis: int = -1, seed: ArrayLike | None = None, key: Array | None = None,
    stream: int = 0, amax: Real = None, scale_enc: Real = None, backend: str = "auto",
) -> QuantizedArray: ...  # fmt: skip


@typing.overload
def quantize(
    x: ArrayLike, cast: CastLike | tuple[CastLike, CastLike], *, axis: tuple[int, int], seed: ArrayLike | None = None,
    key: Array | None = None, stream: int | tuple[int, int] = 0, amax: Real | tuple[Real, Real] = None,
    scale_enc: Real | tuple[Real, Real] = None, backend: str = "auto",
) -> tuple[QuantizedArray, QuantizedArray]: ...  # fmt: skip


def quantize(
    x: ArrayLike, cast: Any, *, axis: int | tuple[int, int] = -1, seed: ArrayLike | None = None,
    key: Array | None = None, stream: Any = 0, amax: Any = None, scale_enc: Any = None, backend: str = "auto",
) -> QuantizedArray | tuple[QuantizedArray, QuantizedArray]:  # fmt: skip
    """Quantize an array: ``codes = round(x * encode factor)``, so that ``x ~ decode(codes) * scale * tensor_scale``.

    `x`: float32, bfloat16 or float16 of any shape. `cast`: a Cast, a ScaledFormat or a format's name. `axis`: the
    contraction axis, -1, or -2 of a matrix. A stochastic cast needs `seed` (an int in [0, 2^64), or its two words
    as uint32[2], low first) or `key` (a jax.random key); `stream` is one more word of its counter. `amax` replaces
    the measured amax of a per-tensor or NVFP4 cast (float32 scalar; [R, 1] for nvfp4_row); `scale_enc` is the
    encode scale of delayed scaling, required exactly then. Arrays may be traced. The bytes equal those of
    `microfloat.reference.quantize`.

    ``axis=(-1, -2)`` gives the pair of both usages of a matrix, made in one pass where a kernel serves both casts: the
    bytes of two calls with the same seed (or key) and stream. `cast`, `stream`, `amax` and `scale_enc` may then be
    pairs too, one for each axis.

    Raises InvalidTypeError for other dtypes, InvalidValueError for arguments that do not fit, NotSupportedError
    where it is differentiated and for ``backend="native"`` without a CUDA device. Source: docs/numerics.md 2 to 5, 7.
    """
    if not isinstance(axis, tuple | list):
        cast = as_cast(cast)
    x = array.check_array("x", x)
    usages = usages_of(cast, axis, x.ndim, stream, amax, scale_enc)
    if check_backend(backend) == "native" and cuda.capability() is None:
        raise NotSupportedError(
            "backend: got 'native', needed a CUDA device, whose kernels cast. Use backend='auto' or 'reference'."
        )
    if key is not None:
        check_key(key)
    words = None
    if stochastic := next((usage.cast for usage in usages if usage.cast.is_stochastic), None):
        words = call_seed(seed, key, f"the stochastic Cast on {stochastic.format.name} (or rounding='nearest')")
    one_pass = not any(isinstance(value, tuple | list) for value in (amax, scale_enc))
    same_amax = amax is None or all(one.cast.takes_amax and one.cast.tensor_scale != "row" for one in usages)
    if len(usages) == 1 or (one_pass and same_amax):
        made = _made(x, usages, words, backend)
    else:
        made = [q for usage in usages for q in _made(x, (usage,), words, backend)]
    return (made[0], made[1]) if len(usages) == 2 else made[0]


def _made(x: Array, usages: tuple[Usage, ...], words: Array | np.ndarray | None, backend: str) -> list[QuantizedArray]:
    """The usages of `x`, in one pass; an amax or an encode scale serves every cast that takes one."""
    static, traced, common_amax, common_scale = [], [], None, None
    for cast, normal, stream, amax, scale_enc in usages:
        rows = math.prod(leading_axes(x.shape, normal))
        new_amax = given_amax(amax, cast, rows, array.real_array, _read)
        new_scale = given_scale_enc(scale_enc, cast.is_delayed, array.real_array, _read)
        common_amax = common_amax if new_amax is None else new_amax
        common_scale = common_scale if new_scale is None else new_scale
        word = _traced_word("stream", stream)
        # A stream that is a number is part of the program: kernels read it as one.
        number = None if isinstance(word, jax.Array) else int(word)
        traced.append(word if number is None else None)
        static.append((cast, normal - max(x.ndim, 1), number))
    arguments = (x, words, tuple(traced), common_amax, common_scale)
    options = {"usages": tuple(static), "backend": backend}
    return transformations.run_automatically(_quantize, _quantized_specs, *arguments, **options)


_without_derivative = transformations.no_derivative(
    "x: got an array that a gradient is taken of, needed one without: codes have no derivative. Use "
    "fake_quantize(x, cast), whose gradient goes straight through, or dot_general to train; to measure, quantize "
    "lax.stop_gradient(x)."
)
_straight_through = jax.jit(transformations.straight_through)


@typing.overload
def fake_quantize(
    x: ArrayLike, cast: CastLike, axis: int = -1, seed: ArrayLike | None = None, *, key: Array | None = None,
    backend: str = "auto",
) -> Array: ...  # fmt: skip


@typing.overload
def fake_quantize(
    x: ArrayLike, cast: CastLike | tuple[CastLike, CastLike], axis: tuple[int, int], seed: ArrayLike | None = None, *,
    key: Array | None = None, backend: str = "auto",
) -> tuple[Array, Array]: ...  # fmt: skip


def fake_quantize(
    x: ArrayLike, cast: Any, axis: Any = -1, seed: ArrayLike | None = None, *, key: Array | None = None,
    backend: str = "auto",
) -> Array | tuple[Array, Array]:  # fmt: skip
    """`x` as the format would hold it, ``dequantize(quantize(x, cast))``, in x's dtype; its gradient is dy unchanged.

    The straight-through estimate, in every order and mode of differentiation, also where a value saturates. Arguments
    and errors are those of `quantize`, a pair of axes included; a stochastic cast needs `seed` or `key`.
    """
    x = array.check_array("x", x)
    q: Any = quantize(lax.stop_gradient(x), cast, axis=axis, seed=seed, key=key, backend=backend)
    if isinstance(axis, tuple | list):
        return _straight_through(dequantize(q[0]), x), _straight_through(dequantize(q[1]), x)
    return _straight_through(dequantize(q), x)


def _quantized_specs(x: Array, *arguments: Any, **static: Any) -> list[QuantizedArray]:
    """The partitions of the results of `_quantize`: codes and scales of one-row blocks as x, others everywhere."""
    bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (x, *arguments))
    return [_quantized_spec(x, q) for q in jax.eval_shape(partial(_quantize, **static), *bare)]


def _quantized_spec(x: Array, shapes: QuantizedArray) -> QuantizedArray:
    spec = transformations.spec_of(x)
    spec = (spec[1], spec[0]) if shapes.axis == -2 else ((None,) * (2 - len(spec)) + spec)
    one_row = not (shapes.format.is_per_tensor or shapes.format.is_tile)
    scale = transformations.divided(spec, shapes.scale.shape, x) if one_row else PartitionSpec()
    tensor_scale = None if shapes.tensor_scale is None else PartitionSpec()
    codes = transformations.divided(spec, shapes.codes.shape, x)
    return replace(shapes, codes=codes, scale=scale, tensor_scale=tensor_scale)


@partial(jax.jit, static_argnames=("usages", "backend"))
def _quantize(
    x: Array, words: Array | None, traced: tuple[Array | None, ...], amax: Array | None, scale_enc: Array | None, *,
    usages: tuple[tuple[Cast, int, int | None], ...], backend: str,
) -> list[QuantizedArray]:  # fmt: skip
    x = _without_derivative(x)
    operands: dict[int, OperandSpec] = {}
    for (cast, axis, stream), word in zip(usages, traced, strict=True):
        operands[axis] = OperandSpec(cast, stream=word if stream is None else stream)  # type: ignore[arg-type]
    matrix = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.shape else 1)
    inputs = casts.CastInputs(words, None, amax, scale_enc)
    made = casts.cast_both(matrix, operands.get(-1), operands.get(-2), inputs, backend=backend)
    by_axis = {-1: made.row, -2: made.column}
    return [_array_of(x, cast, axis, typing.cast(reference.Matrix, by_axis[axis])) for cast, axis, _ in usages]


def _array_of(x: Array, cast: Cast, axis: int, made: reference.Matrix) -> QuantizedArray:
    storage = Storage.of(cast.format, cast.hadamard, cast.tensor_scale)
    layout = array_layout(storage, x.shape, axis % max(x.ndim, 1))
    parts = made.codes.reshape(layout.codes.shape), made.scale.reshape(typing.cast(Part, layout.scale).shape)
    static = cast.format, axis, x.shape[axis] if x.shape else 1, cast.hadamard, x.dtype, max(2 - x.ndim, 0)
    return QuantizedArray(*parts, made.tensor_scale, *static)


def scaled_matmul(
    a_MK: Factor, b_NK: Factor, *, bias: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None, accumulate: str = "split", backend: str = "auto",
) -> Array:  # fmt: skip
    """``y = a @ b.T + bias`` of two quantized operands, each contracted over its own `axis`; shape [M, N].

    An operand may also be a float array, used as it is, its last axis contracted; a quantized partner is then
    dequantized to its dtype. `a` with more than two axes gives ``[*leading, N]``. `bias`: [N]. `out_dtype=None` is
    a's dtype. Sums run in float32, with one rounding to `out_dtype` after scales and bias; `accumulate="exact"`
    (any platform, slow, for tests) sums in float64. Raises InvalidValueError for different contraction lengths,
    Hadamard transforms or families of formats (FP32, E8M0, E4M3 scales), NotSupportedError for ``backend="native"``
    where it cannot run. Source: docs/numerics.md 8.2.
    """
    check_choice("accumulate", accumulate, ("fast", "split", "exact"))
    a, b = _factor("a_MK", a_MK), _factor("b_NK", b_NK)
    _check_pair(a, b)
    dtype = array.check_dtype("out_dtype", a.dtype if out_dtype is None else out_dtype)
    rows_b = math.prod(b.leading)
    if bias is not None:
        bias = array.check_array("bias", bias)
        if bias.shape != (rows_b,):
            raise invalid_value("bias", f"shape {bias.shape}", f"[N] = [{rows_b}], one value per row of b_NK")
    compute = b.dtype if a.kind is not None and b.kind is None else a.dtype
    plan = gemms.GemmPlan(a.kind, b.kind, accumulate, "auto", check_backend(backend), compute, dtype)
    return transformations.run_automatically(_scaled_matmul, _product_spec, a.value, b.value, bias, plan=plan)


def _product_spec(a: Factor, b: Factor, *_: Any, **__: Any) -> PartitionSpec:
    """The partition of the result of `_scaled_matmul`: the rows of both operands stay where they are."""
    of_a, of_b = (transformations.spec_of(jax.tree.leaves(value)[0])[:-1] for value in (a, b))
    return transformations.distinct((*of_a, of_b[0] if len(of_b) == 1 else None) if of_a else (None, *of_b))


@partial(jax.jit, static_argnames=("plan",))
def _scaled_matmul(a: Factor, b: Factor, bias: Array | None, *, plan: gemms.GemmPlan) -> Array:
    y = gemms.run_gemm(array.as_matrix(a), array.as_matrix(b), plan, bias)
    leading = (a.codes if isinstance(a, QuantizedArray) else a).shape[:-1]
    return y.reshape(*leading, y.shape[-1]) if len(leading) > 1 else y


class _Factor(NamedTuple):
    """One operand of a product: its kind, its wide dtype, the axes of its rows."""

    value: Factor
    kind: reference.Kind | None
    dtype: np.dtype
    leading: tuple[int, ...]


def _factor(argument: str, value: object) -> _Factor:
    if isinstance(value, QuantizedArray):
        array.check_quantized(argument, value)
        kind = reference.Kind(value.format, value.hadamard, value.axis_size)
        return _Factor(value, kind, jnp.dtype(value.dtype), value.codes.shape[:-1])
    x = array.check_array(argument, value)
    if x.ndim == 0:
        raise invalid_value(argument, "a 0-d array", "a matrix [R, C] in operand form", "Reshape it first.")
    return _Factor(x, None, x.dtype, x.shape[:-1])


def _check_pair(a: _Factor, b: _Factor) -> None:
    """Equal contraction lengths, and of quantized operands one family of formats and equal Hadamard transforms."""
    both = a.kind is not None and b.kind is not None
    if a.kind is not None and b.kind is not None:
        left, right = a.kind.format, b.kind.format
        if left.scale != right.scale:
            got = f"{right} ({right.scale} scales) against {left} ({left.scale} scales) of a_MK"
            needed = "operands of one family (both FP32, both E8M0 or both E4M3 scales)"
            raise invalid_value("b_NK", got, needed, "Quantize both with formats of one family, or dequantize one.")
        if a.kind.hadamard != b.kind.hadamard:
            got = f"hadamard {b.kind.hadamard} against {a.kind.hadamard} of a_MK"
            remedy = "Quantize both with one Cast.hadamard."
            raise invalid_value("b_NK", got, "the same Hadamard on both operands, or on neither", remedy)
    lengths = [one.value.shape[-1] if (k := one.kind) is None else (k.length if both else k.cols) for one in (a, b)]
    if lengths[0] != lengths[1]:
        remedy = "Both operands contract their quantization axis: y = a @ b.T."
        raise invalid_value("b_NK", f"contraction length {lengths[1]}", f"{lengths[0]}, as a_MK has", remedy)


def check_backend(backend: object) -> str:
    """ "auto", "reference" or "native"."""
    check_choice("backend", backend, ("auto", "reference", "native"))
    return str(backend)


def _traced_word(argument: str, value: object) -> Array | np.uint32:
    if isinstance(value, jax.Array):
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
            got = f"{value.dtype}{list(value.shape)}"
            raise invalid_value(argument, got, "an int in [0, 2^32), or a 0-d integer array")
        return value.astype(jnp.uint32)
    return np.uint32(check_word(argument, value))


def _read(x: Array) -> np.ndarray | None:
    """The values of an array, or None while it is traced."""
    return None if isinstance(x, Tracer) else np.asarray(x)


def quantize_numpy(x: np.ndarray, cast: Cast, amax: np.ndarray | None) -> Quantized:
    """The oracle's Quantized of a matrix [R, C], for conversions of checkpoints (`microfloat.reference.casters`)."""
    made = quantize(jnp.asarray(x), cast, amax=None if amax is None else jnp.asarray(amax, jnp.float32))
    parts = np.asarray(made.codes), np.asarray(made.scale)
    codes, scale = (part if part.dtype == np.float32 else part.view(np.uint8) for part in parts)
    level = None if made.tensor_scale is None else np.asarray(made.tensor_scale)
    return Quantized(codes, scale, level, cast.format, 1, x.shape, None)


casters.register("jax", quantize_numpy)
