"""`quantize`, `dequantize` and `scaled_matmul`: the names and laws of `microfloat.reference` and `microfloat.torch`."""

import numbers
import operator
import typing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from microfloat.arguments import as_float, check_choice
from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import ScaledFormat
from microfloat.jax import _explicit
from microfloat.jax._derivatives import no_derivative, straight_through
from microfloat.jax.array import QuantizedArray, check_quantized
from microfloat.jax.backends import casts, reference, select
from microfloat.jax.numerics.bits import rounded, widened
from microfloat.jax.numerics.random import call_seed
from microfloat.jax.numerics.tiles import leading_axes, scale_shape
from microfloat.recipes import Cast, Delayed, as_cast

__all__ = ["WIDE_DTYPES", "check_array", "dequantize", "fake_quantize", "quantize", "scaled_matmul"]

WIDE_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def quantize(
    x: ArrayLike,
    cast: Cast | ScaledFormat | str,
    *,
    axis: int = -1,
    seed: ArrayLike | None = None,
    key: Array | None = None,
    stream: int = 0,
    amax: ArrayLike | None = None,
    scale_enc: ArrayLike | None = None,
    backend: str = "auto",
) -> QuantizedArray:
    """Quantize an array: ``codes = round(x * encode factor)``, so that ``x ~ decode(codes) * scale * tensor_scale``.

    `x`: float32, bfloat16 or float16 of any shape. `cast`: a Cast, a ScaledFormat or a format's name. `axis`: the
    contraction axis, -1, or -2 of a matrix. A stochastic cast needs `seed` (an int in [0, 2^64), or its two words
    as uint32[2], low first) or `key` (a jax.random key); `stream` is one more word of its counter. `amax` replaces
    the measured amax of a per-tensor or NVFP4 cast (float32 scalar; [R, 1] for nvfp4_row); `scale_enc` is the
    encode scale of delayed scaling, required exactly then. Arrays may be traced. The bytes equal those of
    `microfloat.reference.quantize`.

    Raises InvalidTypeError for other dtypes, InvalidValueError for arguments that do not fit the cast,
    NotSupportedError where it is differentiated: `dot_general` trains, and `fake_quantize` has a gradient. Source:
    docs/numerics.md, sections 2 to 5 and 7.
    """
    cast = as_cast(cast)
    x = check_array("x", x)
    axis = normalize_axis(axis, x.ndim)
    check_backend(backend)
    rows = int(np.prod(leading_axes(x.shape, axis), dtype=np.int64))
    amax = _check_amax(amax, cast, rows)
    scale_enc = _check_scale_enc(scale_enc, cast)
    words = None
    if cast.is_stochastic:
        words = call_seed(seed, key, f"the stochastic Cast on {cast.format.name} (or rounding='nearest')")
    word = _check_word("stream", stream)
    # A stream that is a number is part of the program: kernels read it as one.
    known = None if isinstance(word, jax.Array) else int(word)
    arguments = (x, words, None if known is not None else word, amax, scale_enc)
    run = partial(_quantize, cast=cast, axis=axis, stream=known, backend=backend)
    if _explicit.is_explicit(x):
        return _explicit.run_automatically(run, partial(_quantized_specs, x, axis), *arguments)
    return run(*arguments)


_without_derivative = no_derivative(
    "x: got an array that a gradient is taken of, needed one without: codes have no derivative. Use "
    "fake_quantize(x, cast), whose gradient goes straight through, or dot_general to train; to measure, quantize "
    "lax.stop_gradient(x)."
)
_straight_through = jax.jit(straight_through)


def fake_quantize(
    x: ArrayLike,
    cast: Cast | ScaledFormat | str,
    axis: int = -1,
    seed: ArrayLike | None = None,
    *,
    key: Array | None = None,
    backend: str = "auto",
) -> Array:
    """`x` as the format would hold it, ``dequantize(quantize(x, cast))``, in x's dtype; its gradient is dy unchanged.

    The straight-through estimate, in every order and mode of differentiation, also where a value saturates. Arguments
    and errors are those of `quantize`; a stochastic cast needs `seed` or `key`.
    """
    x = check_array("x", x)
    q = quantize(lax.stop_gradient(x), cast, axis=axis, seed=seed, key=key, backend=backend)
    return _straight_through(dequantize(q), x)


def _quantized_specs(x: Array, axis: int, shapes: QuantizedArray) -> QuantizedArray:
    """Codes as x is sharded; the scales of one-row blocks likewise, other scales on every device."""
    spec = _explicit.spec_of(x)
    spec = (spec[1], spec[0]) if axis == -2 else ((None,) * (2 - len(spec)) + spec)

    def like(shape: tuple[int, ...]) -> PartitionSpec:
        return PartitionSpec(
            *(_explicit.sharded_if_divisible(axis, size, x) for axis, size in zip(spec, shape, strict=True))
        )

    one_row = not (shapes.format.is_per_tensor or shapes.format.is_tile)
    scale = like(shapes.scale.shape) if one_row else PartitionSpec()
    tensor_scale = None if shapes.tensor_scale is None else PartitionSpec()
    return replace(shapes, codes=like(shapes.codes.shape), scale=scale, tensor_scale=tensor_scale)


@partial(jax.jit, static_argnames=("cast", "axis", "stream", "backend"))
def _quantize(
    x: Array, words: Array | None, word: Array | None, amax: Array | None, scale_enc: Array | None, *,
    cast: Cast, axis: int, stream: int | None, backend: str,
) -> QuantizedArray:  # fmt: skip
    x = _without_derivative(x)
    fmt, shape = cast.format, x.shape
    cols = shape[axis] if shape else 1
    rows = int(np.prod(leading_axes(shape, axis), dtype=np.int64))
    wanted = casts.CastOf(cast, word if stream is None else stream)  # type: ignore[arg-type]
    given = casts.Given(words, None, amax, scale_enc)
    if axis == -2:
        matrix = casts.cast_both(x, None, wanted, given, backend=backend).column
    else:
        matrix = casts.cast_both(x.reshape(rows, cols), wanted, None, given, backend=backend).row
    matrix = typing.cast(reference.Matrix, matrix)
    codes = matrix.codes.reshape(*leading_axes(shape, axis), matrix.codes.shape[1])
    scale = matrix.scale.reshape(scale_shape(fmt, shape, axis, matrix.scale.shape))
    return QuantizedArray(
        codes, scale, matrix.tensor_scale, fmt, axis, cols, cast.hadamard, x.dtype, max(2 - len(shape), 0)
    )


def dequantize(q: QuantizedArray, dtype: DTypeLike | None = None) -> Array:
    """The array that `q` stands for, in its original shape; `dtype=None` is the dtype of the input of `quantize`.

    FP32 and E8M0 scales: ``f32(dec(q) * scale)``; NVFP4: ``f32(dec(q) * f32(dec(sb) * tensor_scale))``; then one
    rounding to `dtype`. A Hadamard transform is undone in float32 (up to rounding). Source: docs/numerics.md 8.1.
    """
    check_quantized("q", q)
    target = check_dtype("dtype", q.dtype if dtype is None else dtype)
    if _explicit.is_explicit(q.codes):
        return _explicit.run_automatically(partial(_dequantize, dtype=target), partial(_dequantized_spec, q), q)
    return _dequantize(q, dtype=target)


def _dequantized_spec(q: QuantizedArray, shape: jax.ShapeDtypeStruct) -> PartitionSpec:
    spec = _explicit.spec_of(q.codes)
    spec = (spec[1], spec[0]) if q.axis == -2 else spec[q.added_axes :]
    return PartitionSpec(
        *(_explicit.sharded_if_divisible(axis, size, q.codes) for axis, size in zip(spec, shape.shape, strict=True))
    )


@partial(jax.jit, static_argnames=("dtype",))
def _dequantize(q: QuantizedArray, *, dtype: np.dtype) -> Array:
    values = rounded(reference.dequantize_matrix(as_matrix(q), q.format, q.hadamard, q.axis_size), dtype)
    return jnp.swapaxes(values, -1, -2) if q.axis == -2 else values.reshape(q.shape)


def scaled_matmul(
    a_MK: QuantizedArray | Array,
    b_NK: QuantizedArray | Array,
    *,
    bias: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    accumulate: str = "split",
    backend: str = "auto",
) -> Array:
    """``y = a @ b.T + bias`` of two quantized operands, each contracted over its own `axis`; shape [M, N].

    An operand may also be a float array, used as it is, its last axis contracted; a quantized partner is then
    dequantized to its dtype. `a` with more than two axes gives ``[*leading, N]``. `bias`: [N]. `out_dtype=None` is
    a's dtype. Sums run in float32, with one rounding to `out_dtype` after scales and bias; `accumulate="exact"`
    (any platform, slow, for tests) sums in float64. Raises InvalidValueError for different contraction lengths or
    Hadamard transforms, NotSupportedError for ``backend="native"`` where it cannot run. Source: docs/numerics.md
    8.2.
    """
    check_choice("accumulate", accumulate, ("fast", "split", "exact"))
    operands = [_operand(name, value) for name, value in (("a_MK", a_MK), ("b_NK", b_NK))]
    (a, kind_a, dtype_a, leading), (b, kind_b, dtype_b, _) = operands
    _check_pair(a, b, kind_a, kind_b)
    dtype = check_dtype("out_dtype", dtype_a if out_dtype is None else out_dtype)
    rows_b = reference.rows_of(b)
    if bias is not None:
        bias = check_array("bias", bias)
        if bias.shape != (rows_b,):
            raise invalid_value("bias", f"shape {bias.shape}", f"[N] = [{rows_b}], one value per row of b_NK")
    compute = dtype_b if kind_a is not None and kind_b is None else dtype_a
    plan = select.GemmPlan(kind_a, kind_b, accumulate, "auto", check_backend(backend), compute, dtype)
    multiply = partial(_scaled_matmul, plan=plan)
    if _explicit.is_explicit(*jax.tree.leaves((a, b, bias))):
        rows = [_explicit.spec_of(jax.tree.leaves(operand)[0])[0] for operand in (a, b)]
        y = _explicit.run_automatically(multiply, lambda _: PartitionSpec(*rows), a, b, bias)
    else:
        y = multiply(a, b, bias)
    return y.reshape(*leading, rows_b) if len(leading) > 1 else y


@partial(jax.jit, static_argnames=("plan",))
def _scaled_matmul(a: reference.Operand, b: reference.Operand, bias: Array | None, *, plan: "select.GemmPlan") -> Array:
    return select.run_gemm(a, b, plan, bias)


def _operand(
    argument: str, value: object
) -> tuple[reference.Operand, reference.Kind | None, np.dtype, tuple[int, ...]]:
    """(operand form, its kind, its wide dtype, the axes that stand for its rows)."""
    if isinstance(value, QuantizedArray):
        kind = reference.Kind(value.format, value.hadamard, value.axis_size)
        return as_matrix(value), kind, jnp.dtype(value.dtype), value.codes.shape[:-1]
    array = check_array(argument, value)
    if array.ndim == 0:
        raise invalid_value(argument, "a 0-d array", "a matrix [R, C] in operand form", "Reshape it first.")
    rows = int(np.prod(array.shape[:-1], dtype=np.int64))
    return array.reshape(rows, array.shape[-1]), None, array.dtype, array.shape[:-1] or (1,)


def _check_pair(
    a: reference.Operand, b: reference.Operand, kind_a: reference.Kind | None, kind_b: reference.Kind | None
) -> None:
    """Equal contraction lengths, and equal Hadamard transforms where both operands are quantized."""
    both = kind_a is not None and kind_b is not None
    if kind_a is not None and kind_b is not None and kind_a.hadamard != kind_b.hadamard:
        raise invalid_value(
            "b_NK", f"hadamard {kind_b.hadamard} against {kind_a.hadamard} of a_MK",
            "the same Hadamard on both operands, or on neither", "Quantize both with one Cast.hadamard.",
        )  # fmt: skip
    lengths = [
        typing.cast(Array, operand).shape[1] if kind is None else (kind.length if both else kind.cols)
        for operand, kind in ((a, kind_a), (b, kind_b))
    ]
    if lengths[0] != lengths[1]:
        raise invalid_value(
            "b_NK", f"contraction length {lengths[1]}", f"{lengths[0]}, as a_MK has",
            "Both operands contract their quantization axis: y = a @ b.T.",
        )  # fmt: skip


def as_matrix(q: QuantizedArray) -> reference.Matrix:
    """The operand form of `q` as a backend reads it: two axes, one scale grid."""
    rows = int(np.prod(q.codes.shape[:-1], dtype=np.int64))
    scale = q.scale
    if not (q.format.is_per_tensor or q.format.is_tile):
        scale = scale.reshape(rows, scale.shape[-1])
    return reference.Matrix(q.codes.reshape(rows, q.codes.shape[-1]), scale, q.tensor_scale)


def check_array(argument: str, x: object) -> Array:
    """A float32, bfloat16 or float16 array (Python numbers become float32); InvalidTypeError for anything else."""
    if isinstance(x, float) and not isinstance(x, np.generic):
        return jnp.asarray(x, jnp.float32)
    if isinstance(x, QuantizedArray):
        raise invalid_type(
            argument, "a QuantizedArray", "a plain array", "Dequantize it first, or multiply with scaled_matmul."
        )
    if not isinstance(x, jax.Array | np.ndarray) and callable(getattr(x, "__jax_array__", None)):
        x = typing.cast(typing.Any, x).__jax_array__()
    dtype = getattr(x, "dtype", None)
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise invalid_type(
            argument, type(x), "an array of float32, bfloat16 or float16", "Use jax.numpy.asarray first."
        )
    if dtype not in WIDE_DTYPES:
        raise invalid_type(
            argument, dtype, "float32, bfloat16 or float16",
            "Dequantize it first." if str(dtype).startswith(("float8", "float6_", "float4"))
            else f"Convert {argument} with .astype first.",
        )  # fmt: skip
    return jnp.asarray(x)


def check_dtype(argument: str, dtype: object) -> np.dtype:
    """float32, bfloat16 or float16 as a dtype; InvalidTypeError for anything else."""
    is_dtype = isinstance(dtype, str | type | np.dtype) or (callable(dtype) and hasattr(dtype, "dtype"))
    try:
        found = jnp.dtype(dtype if is_dtype else "none")  # type: ignore[arg-type]
    except TypeError:
        got = repr(dtype) if isinstance(dtype, str) else type(dtype)
        raise invalid_type(argument, got, "float32, bfloat16 or float16") from None
    if found not in WIDE_DTYPES:
        raise invalid_type(argument, found, "float32, bfloat16 or float16")
    return found


def normalize_axis(axis: object, ndim: int) -> int:
    """The contraction axis as -1, or -2 for the first of exactly two; else InvalidValueError."""
    try:
        number = operator.index(axis)  # type: ignore[arg-type]
    except TypeError:
        raise invalid_type("axis", type(axis), "an int: -1, or -2 for a matrix") from None
    if isinstance(axis, bool):
        raise invalid_type("axis", "bool", "an int: -1, or -2 for a matrix")
    if ndim == 0 and number in (-1, 0):
        return -1
    if -ndim <= number < ndim:
        negative = number - ndim if number >= 0 else number
        if negative == -1 or (negative == -2 and ndim == 2):
            return negative
    raise invalid_value(
        "axis", f"{number} for an array of {ndim} axes", "-1, or -2 for an array of exactly two axes",
        "Flatten the other axes first, for example x.reshape(-1, x.shape[-1]).",
    )  # fmt: skip


def check_backend(backend: object) -> str:
    """ "auto", "reference" or "native"."""
    check_choice("backend", backend, ("auto", "reference", "native"))
    return str(backend)


def _check_word(argument: str, value: object) -> Array | np.uint32:
    if isinstance(value, jax.Array):
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
            raise invalid_value(
                argument, f"{value.dtype}{list(value.shape)}", "an int in [0, 2^32), or a 0-d integer array"
            )
        return value.astype(jnp.uint32)
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 32:
        raise invalid_value(argument, repr(value), "an int in [0, 2^32)")
    return np.uint32(number)


def _check_amax(amax: ArrayLike | None, cast: Cast, rows: int) -> Array | None:
    """The amax that replaces the measured one, float32 of shape () or [R, 1]; see `quantize`."""
    if amax is None:
        return None
    fmt = cast.format
    measured = fmt.is_per_tensor and fmt.scale.name == "FP32" and not isinstance(cast.scaling, Delayed)
    two_level = cast.rule.two_level is not None and cast.rule.two_level.tensor_scale
    if not (measured or two_level):
        raise invalid_value(
            "amax", f"a value with {fmt.name}, rule {cast.scale_rule!r}, {type(cast.scaling).__name__} scaling",
            "None: only a tensor amax can be replaced (fp8_tensor with Current scaling, nvfp4, nvfp4_row, nvfp4_2d)",
            "Delayed scaling takes scale_enc= instead." if isinstance(cast.scaling, Delayed) else "",
        )  # fmt: skip
    array = real_array("amax", amax)
    needed = (rows, 1) if fmt.tensor_scale == "row" else ()
    if array.shape != needed:
        raise invalid_value("amax", f"shape {array.shape}", f"shape {needed} for {fmt.name}")
    if not isinstance(array, Tracer) and not bool((np.asarray(array) >= 0).all()):
        raise invalid_value(
            "amax", np.asarray(array).tolist(), "values >= 0, not NaN", "An amax is a maximum of magnitudes."
        )
    return array


def _check_scale_enc(scale_enc: ArrayLike | None, cast: Cast) -> Array | None:
    """The encode scale of delayed scaling: given if and only if the cast is delayed, positive and finite."""
    if (scale_enc is not None) != isinstance(cast.scaling, Delayed):
        raise invalid_value(
            "scale_enc", "None" if scale_enc is None else "a value", "a float32 for a Delayed cast, None otherwise",
            "The first step uses 1.0; dot_general takes it from state=." if scale_enc is None else "Leave it out here.",
        )  # fmt: skip
    if scale_enc is None:
        return None
    array = real_array("scale_enc", scale_enc)
    if array.size != 1:
        raise invalid_value("scale_enc", f"shape {array.shape}", "one float32")
    if not isinstance(array, Tracer):
        value = float(array.reshape(()))
        if not (np.isfinite(value) and value > 0):
            raise invalid_value("scale_enc", value, "one positive finite float32")
    return array.reshape(())


def real_array(argument: str, value: ArrayLike) -> Array:
    """A real number, or a floating-point array, as float32."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_):
        return jnp.asarray(as_float(argument, value), jnp.float32)
    if not isinstance(value, jax.Array | np.ndarray | np.generic) or not jnp.issubdtype(value.dtype, jnp.floating):
        got = getattr(value, "dtype", None) or type(value)
        raise invalid_type(argument, got, "a float32 number or array")
    array = jnp.asarray(value)
    return widened(array) if array.dtype.itemsize <= 4 else array.astype(jnp.float32)
