"""The three verbs on tensors: `quantize`, `dequantize`, `scaled_matmul`. Arguments are checked here, once.

Legend: R = rows of an operand form, C = its contraction length (docs/numerics.md, "Operand form of an array").
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias, overload

import torch

from microfloat.arguments import axes_of, check_number, check_word, for_each
from microfloat.errors import invalid_type, invalid_value, unknown_name
from microfloat.layout import array_layout, leading_axes
from microfloat.recipes import as_cast
from microfloat.recipes.usages import CastLike, Usage, given_amax, given_scale_enc, usages_of
from microfloat.torch import backends
from microfloat.torch._typing import Seed
from microfloat.torch._upper import upper
from microfloat.torch.tensor import custom_ops as _operators
from microfloat.torch.tensor.checks import check_beside, check_tensor, readable, real_tensor
from microfloat.torch.tensor.quantized_tensor import INPUT_DTYPES, QuantizedTensor, tensors_of
from microfloat.torch.tensor.seeds import draw_seed, seed_words

Real: TypeAlias = float | torch.Tensor | None
# An argument, or a pair of it for a pair of axes.
Casts: TypeAlias = CastLike | tuple[CastLike, CastLike]
Axes: TypeAlias = int | tuple[int, int]
Reals: TypeAlias = Real | tuple[Real, Real]
Made: TypeAlias = QuantizedTensor | tuple[QuantizedTensor, QuantizedTensor]
_BIAS_DTYPES = (*INPUT_DTYPES, torch.float64)
_LARGEST = torch.finfo(torch.float32).max
_ACCUMULATE = ("fast", "split", "exact")


@overload
def quantize(
    x: torch.Tensor, cast: CastLike, *, axis: int = -1, seed: Seed = None, stream: int = 0, amax: Real = None,
    scale_enc: Real = None, backend: str = "auto",
) -> QuantizedTensor: ...  # fmt: skip


@overload
def quantize(
    x: torch.Tensor, cast: Casts, *, axis: tuple[int, int], seed: Seed = None, stream: Axes = 0, amax: Reals = None,
    scale_enc: Reals = None, backend: str = "auto",
) -> tuple[QuantizedTensor, QuantizedTensor]: ...  # fmt: skip


def quantize(
    x: torch.Tensor, cast: Casts, *, axis: Axes = -1, seed: Seed = None, stream: Axes = 0,
    amax: Reals = None, scale_enc: Reals = None, backend: str = "auto",
) -> Made:  # fmt: skip
    """Quantize a tensor: ``codes = round(x * encode factor)``, such that ``x ~ decode(codes) * scale * tensor_scale``.

    `x`: float32, bfloat16 or float16 of any shape and strides. `cast`: a Cast, a ScaledFormat or a format's name.
    `axis`: the contraction axis, -1, or -2 of a matrix. `seed` (an int in [0, 2^64), or its two words, low first, as
    two ints, int64 [2] or uint32 [2]) and `stream` feed stochastic rounding and are ignored by nearest; without a seed
    one is drawn from the default generator of x's device. `amax` replaces the measured amax of a per-tensor or NVFP4
    cast (float32 scalar; [R, 1] for nvfp4_row). `scale_enc`: the encode scale of delayed scaling, required exactly
    then. Not differentiable: the result requires no grad, in eager and compiled code alike.

    ``axis=(-1, -2)`` gives the pair of both usages of a matrix, made in one pass where a kernel serves both casts: the
    bytes of two calls with the same seed and stream. `cast`, `stream`, `amax` and `scale_enc` may then be pairs too,
    one for each axis. A DTensor gives one, placed alike: every rank casts its part, to the bytes of the whole.

    Raises InvalidTypeError for other dtypes, InvalidValueError for arguments that do not fit the cast, and
    NotSupportedError where `backend` cannot run. The bytes equal those of `microfloat.reference.quantize`.
    Source: docs/numerics.md 2 to 5 and 7.

    >>> quantize(torch.tensor([[1.0, -2.0, 3.0]]), "mxfp4").codes
    tensor([[162,   5]], dtype=torch.uint8)
    """
    if hasattr(type(x), "placements"):  # a DTensor
        return upper("quantize_sharded")(x, cast, axis, seed, stream, amax, scale_enc, backend)
    run = _traced_quantize if _operators.is_tracing(x) else quantize_values
    return run(x, cast, axis, seed, stream, amax, scale_enc, backend)


def quantize_values(
    x: torch.Tensor, cast: Casts, axis: Axes, seed: Seed, stream: Axes, amax: Reals, scale_enc: Reals, backend: str
) -> Made:
    """`quantize` where values are at hand: checks every argument, then calls the backend."""
    _operators.refuse_transforms("quantize", x, is_verb=True)
    if not isinstance(axis, tuple | list):
        cast = as_cast(cast)  # type: ignore[arg-type]  # raises for other objects
    check_tensor("x", x)
    usages = usages_of(cast, axis, x.dim(), stream, amax, scale_enc)
    module = backends.choose(backend, x.device)
    x = x.detach().resolve_neg()
    matrix = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)
    turned = [x.dim() == 2 and usage.axis == 0 for usage in usages]
    usages = [_checked(usage, matrix, is_turned) for usage, is_turned in zip(usages, turned, strict=True)]
    words = None
    if any(usage.cast.is_stochastic for usage in usages):
        words = draw_seed(x.device) if seed is None else seed_words(seed, x.device)
    one_pass = len(usages) == 2 and not any(isinstance(value, tuple | list) for value in (amax, scale_enc))
    if one_pass and (amax is None or not any(usage.cast.tensor_scale == "row" for usage in usages)):
        row, column = sorted(usages, key=lambda usage: -usage.axis)
        made = module.quantize_both(
            matrix, row.cast, column.cast, seed=words, row_stream=row.stream, column_stream=column.stream,
            amax=column.amax if row.amax is None else row.amax,
            scale_enc=column.scale_enc if row.scale_enc is None else row.scale_enc,
        )  # fmt: skip
        made = made if usages[0].axis else made[::-1]
    else:
        made = [
            module.quantize(
                matrix, usage.cast, transposed=is_turned, seed=words, stream=usage.stream, amax=usage.amax,
                scale_enc=usage.scale_enc,
            ) for usage, is_turned in zip(usages, turned, strict=True)
        ]  # fmt: skip
    first, *rest = (
        QuantizedTensor.from_operand(operand, usage.cast, axis=usage.axis, shape=x.shape, dtype=x.dtype)
        for operand, usage in zip(made, usages, strict=True)
    )
    if not rest:
        return first
    # Casts that commute with transposition are made once; the second tensor gets memory of its own all the same.
    taken = {part.untyped_storage().data_ptr() for part in first.part_list()}
    return first, rest[0].map_parts(lambda part: part.clone() if part.untyped_storage().data_ptr() in taken else part)


def _checked(usage: Usage, matrix: torch.Tensor, is_turned: bool) -> Usage:
    """A usage with its numbers as tensors beside the matrix, or beside its transpose."""
    check_word("stream", usage.stream)
    rows, as_real = matrix.shape[1 if is_turned else 0], functools.partial(real_tensor, device=matrix.device)
    amax = given_amax(usage.amax, usage.cast, rows, as_real, readable)
    return usage._replace(
        amax=amax, scale_enc=given_scale_enc(usage.scale_enc, usage.cast.is_delayed, as_real, readable)
    )


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values of `q` in its original shape; `dtype` None is the original's.

    FP32 and E8M0 scales: ``f32(dec(code) * scale)``; NVFP4: ``f32(dec(code) * f32(dec(sb) * tensor_scale))``; then one
    rounding to `dtype`. A NaN scale gives NaN. Source: docs/numerics.md 8.1.
    """
    _check_quantized("q", q, "Call microfloat.torch.quantize(x, cast) first.")
    return q.dequantize(dtype)


def scaled_matmul(
    a: QuantizedTensor, b: QuantizedTensor, *, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    accumulate: str = "split", backend: str = "auto", out: torch.Tensor | None = None, beta: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """``y = round(a @ b.T + bias)``, contracting the `axis` of each operand: [R_a, R_b] in `out_dtype`.

    `a`, `b`: quantized tensors of one family (FP32, E8M0 or E4M3 scales), equal stored contraction length and equal
    `hadamard`. `bias`: [R_b] or None, added in float32 before the only rounding. `out_dtype` None is a's dtype.
    `accumulate`: "split", "fast" or "exact" (float64; reference backend). A NaN scale gives NaN.

    `out`: a tensor [R_a, R_b] of float32, bfloat16 or float16 that takes the result and is returned:
    ``out = round(f32(beta * out) + f32(a @ b.T + bias))``. With `beta` 0 what `out` held is not read; 1 accumulates, as
    a gradient over microbatches does.

    Raises InvalidTypeError for operands that are not quantized, InvalidValueError for a pair that cannot be multiplied
    and for an `out` that does not fit, NotSupportedError where `backend` cannot run. Source: docs/numerics.md 6, 7.3
    and 8.2.
    """
    for name, operand in (("a", a), ("b", b)):
        _check_quantized(name, operand, "Quantize it, or multiply a.dequantize() and b.dequantize().")
    if out is None:
        if beta != 0:
            raise invalid_value("beta", beta, "0 without out", "Give out=, the tensor that beta multiplies.")
        return _multiply(a, b, bias, a.dtype if out_dtype is None else out_dtype, accumulate, backend)
    _check_out(out, a, b, out_dtype)
    beta = check_number("beta", beta, "a finite number", -_LARGEST, _LARGEST)
    with torch.no_grad():
        total = _multiply(a, b, bias, torch.float32, accumulate, backend)
        if beta:
            total.add_(out if beta == 1 else out.float() * beta)
        return out.copy_(total)


def _multiply(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, dtype: torch.dtype, accumulate: str, backend: str
) -> torch.Tensor:
    if not _operators.is_tracing(a):
        return multiply_values(a, b, bias, dtype, accumulate, backend)
    return torch.ops.microfloat.scaled_matmul(
        a.part_list(), b.part_list(), [a.token, b.token], [a.axis, b.axis], a.shape, b.shape, bias, dtype, accumulate,
        backend,
    )  # fmt: skip


def multiply_values(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, dtype: torch.dtype, accumulate: str, backend: str
) -> torch.Tensor:
    """`scaled_matmul` where values are at hand: checks every argument, then calls the backend."""
    _operators.refuse_transforms("scaled_matmul", is_verb=True)
    _check_pair(a, b)
    if accumulate not in _ACCUMULATE:
        raise unknown_name("accumulate", accumulate, _ACCUMULATE)
    if dtype not in INPUT_DTYPES:
        raise invalid_type("out_dtype", dtype, "torch.float32, torch.bfloat16 or torch.float16")
    left, right = a.to_operand(), b.to_operand()
    if bias is not None:
        _check_bias(bias, right.rows, a)
    module = backends.choose(backend, a.device)
    return module.scaled_matmul(left, right, bias=bias, out_dtype=dtype, accumulate=accumulate)


def _traced_quantize(
    x: torch.Tensor, cast: Casts, axis: Axes, seed: Seed, stream: Axes, amax: Reals, scale_enc: Reals, backend: str
) -> Made:
    """`quantize` under a compiler: one opaque operator; values are checked when it runs."""
    check_tensor("x", x)
    _operators.refuse_transforms("quantize", x, is_verb=True)
    count = 2 if isinstance(axis, tuple | list) else 1
    resolved, tokens = zip(*[_operators.constants_of(one) for one in for_each("cast", cast, count)], strict=True)
    if any([one.rounding != "nearest" for one in resolved]):
        seed = _operators.drawn_seed(x) if seed is None else seed_words(seed, x.device)
    else:
        seed = None
    numbers = []
    for name, value in (("amax", amax), ("scale_enc", scale_enc)):
        values = value if count == 2 and isinstance(value, tuple | list) else [value]
        numbers.append([None if one is None else real_tensor(name, one, x.device) for one in values])  # type: ignore[arg-type]
    axes = list(axis) if isinstance(axis, tuple | list) else [axis]
    streams = list(stream) if count == 2 and isinstance(stream, tuple | list) else [stream]
    parts = torch.ops.microfloat.quantize(x.detach(), tokens, axes, seed, streams, *numbers, backend)
    made = tensors_of(parts, resolved, tokens, [number % max(x.dim(), 1) for number in axes], x.shape, x.dtype)
    return (made[0], made[1]) if count == 2 else made[0]


def _check_quantized(argument: str, value: object, remedy: str) -> None:
    if not isinstance(value, QuantizedTensor):
        got = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value)
        if isinstance(value, torch.Tensor) and _operators.is_followed(value):
            remedy = "If vmap is over a quantized one, map over q.parts() and call QuantizedTensor.from_parts inside."
        raise invalid_type(argument, got, "a QuantizedTensor", remedy)


def _check_pair(a: QuantizedTensor, b: QuantizedTensor) -> None:
    check_beside("b", b, a, f"Move it: b.to({str(a.device)!r}).", "a")
    if a.format.scale != b.format.scale:
        got = f"{b.format} ({b.format.scale} scales) against {a.format} ({a.format.scale} scales) of a"
        needed = "operands of one family (both FP32, both E8M0 or both E4M3 scales)"
        remedy = "Quantize both with formats of one family, or dequantize both."
        raise invalid_value("b", got, needed, remedy)
    if a.hadamard != b.hadamard:
        needed = "the same Hadamard on both operands, or on neither"
        remedy = "Quantize both with one Cast.hadamard, or dequantize the transformed operand first."
        raise invalid_value("b", f"hadamard {b.hadamard} against {a.hadamard} of a", needed, remedy)
    left, right = a.to_operand().stored_length, b.to_operand().stored_length
    if left != right:
        got = f"contraction length {right} (shape {tuple(b.shape)}, axis {b.axis})"
        needed = f"{left}, as a has (shape {tuple(a.shape)}, axis {a.axis})"
        raise invalid_value("b", got, needed, "Both operands contract their quantization axis: y = a @ b.T.")


def _check_out(out: object, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype | None) -> None:
    """Refuse a tensor that cannot take the product of a and b in place."""
    if not isinstance(out, torch.Tensor) or isinstance(out, QuantizedTensor) or out.dtype not in INPUT_DTYPES:
        got = out.dtype if isinstance(out, torch.Tensor) and not isinstance(out, QuantizedTensor) else type(out)
        raise invalid_type("out", got, "a plain tensor of float32, bfloat16 or float16")
    if out_dtype not in (None, out.dtype):
        raise invalid_value("out_dtype", out_dtype, f"None or {out.dtype}, the dtype of out", "Leave it out.")
    shape = tuple(math.prod(leading_axes(tuple(q.shape), q.axis)) for q in (a, b))
    if tuple(out.shape) != shape:
        raise invalid_value("out", f"shape {tuple(out.shape)}", f"shape {shape}: the rows of a and of b")
    check_beside("out", out, a, "", "a")
    if any(size > 1 and not stride for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise invalid_value("out", f"an expanded tensor of strides {out.stride()}", "memory of its own for every entry")
    if out.requires_grad and torch.is_grad_enabled():
        remedy = "A product of codes has no derivative: give out.detach(), or call it under torch.no_grad()."
        raise invalid_value("out", "a tensor that requires grad", "one that does not", remedy)


def _check_bias(bias: torch.Tensor, columns: int, a: QuantizedTensor) -> None:
    if not isinstance(bias, torch.Tensor) or isinstance(bias, QuantizedTensor) or bias.dtype not in _BIAS_DTYPES:
        got = bias.dtype if isinstance(bias, torch.Tensor) else type(bias)
        raise invalid_type("bias", got, "None or a floating-point tensor")
    if tuple(bias.shape) != (columns,):
        raise invalid_value("bias", f"shape {tuple(bias.shape)}", f"shape ({columns},): one value per row of b")
    check_beside("bias", bias, a, "", "a")


@overload
def fake_quantize(
    x: torch.Tensor, cast: CastLike, axis: int = -1, seed: Seed = None, *, backend: str = "auto"
) -> torch.Tensor: ...


@overload
def fake_quantize(
    x: torch.Tensor, cast: Casts, axis: tuple[int, int], seed: Seed = None, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]: ...


def fake_quantize(
    x: torch.Tensor, cast: Casts, axis: Axes = -1, seed: Seed = None, *, backend: str = "auto"
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`x` as the format would hold it, ``dequantize(quantize(x, cast))``, in x's dtype; its gradient is dy unchanged.

    The straight-through estimate, in every order of differentiation, also where a value saturates. Arguments and errors
    are those of `quantize`, a pair of axes included.

    >>> x = torch.tensor([1.0, 2.3], requires_grad=True)
    >>> fake_quantize(x, "mxfp4").sum().backward()
    >>> fake_quantize(x, "mxfp4").tolist(), x.grad.tolist()
    ([1.0, 2.0], [1.0, 1.0])
    """
    check_tensor("x", x)
    if _operators.has_tangent(x):
        raise _operators.refusal_of_transforms("fake_quantize", is_verb=True)
    made = quantize(x.detach(), cast, axis=axis, seed=seed, backend=backend)  # type: ignore[call-overload]
    if isinstance(made, tuple):
        return _straight_through(made[0].dequantize(), x), _straight_through(made[1].dequantize(), x)
    return _straight_through(made.dequantize(), x)


def _straight_through(exact: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """`exact`, differentiated as `plain` is: by an operator, which compilers take, but transforms of torch.func not."""
    active = _operators.transforms_active() and not torch.compiler.is_compiling()
    return (_StraightThrough.apply if active else torch.ops.microfloat.straight_through)(exact, plain)


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(exact: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        return exact.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: object, dy: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, dy


def _quantize(
    x: torch.Tensor, tokens: list[str], axes: list[int], seed: torch.Tensor | None, streams: list[int],
    amax: list[torch.Tensor | None], scale_enc: list[torch.Tensor | None], backend: str,
) -> list[torch.Tensor]:  # fmt: skip
    casts = [_operators.cast_of(token) for token in tokens]
    lists = casts, axes, streams, amax, scale_enc
    cast, axis, stream, of_amax, of_scale = (_one_or_pair(values) for values in lists)
    made: Any = quantize_values(x, cast, axis, seed, stream, of_amax, of_scale, backend)
    # Kernels write 1x128 scales column-major; a compiler relies on the strides that the fake promises.
    return [part.contiguous() for q in (made if len(axes) == 2 else [made]) for part in q.part_list()]


def _one_or_pair(values: Sequence[Any]) -> Any:
    """A pair as a tuple, else the only value: the arguments of `quantize` from the lists that operators carry."""
    return tuple(values) if len(values) == 2 else values[0]


def _fake_quantize(x: torch.Tensor, tokens: list[str], axes: list[int], *_: object) -> list[torch.Tensor]:
    pairs = zip(tokens, axes_of(_one_or_pair(axes), x.dim()), strict=True)
    layouts = [array_layout(_operators.storage_of(token), tuple(x.shape), axis) for token, axis in pairs]
    parts = [part for layout in layouts for part in layout if part is not None]
    return [x.new_empty(part.shape, dtype=getattr(torch, part.dtype)) for part in parts]


def _dequantize(
    codes: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor | None, token: str, axis: int,
    shape: Sequence[int], dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    cast, options = _operators.cast_of(token), {"axis": axis, "shape": shape, "dtype": torch.float32}
    return QuantizedTensor(codes, scale, tensor_scale, cast, **options).decoded(dtype).contiguous()


def _scaled_matmul(
    a: list[torch.Tensor], b: list[torch.Tensor], tokens: list[str], axes: list[int], a_shape: Sequence[int],
    b_shape: Sequence[int], bias: torch.Tensor | None, dtype: torch.dtype, accumulate: str, backend: str,
) -> torch.Tensor:  # fmt: skip
    left, right = (
        tensors_of(parts, [_operators.cast_of(token)], [token], [axis], shape, dtype)[0]
        for parts, token, axis, shape in zip((a, b), tokens, axes, (a_shape, b_shape), strict=True)
    )
    return multiply_values(left, right, bias, dtype, accumulate, backend)


def _fake_scaled_matmul(
    a: list[torch.Tensor], b: object, tokens: object, axes: list[int], a_shape: Sequence[int], b_shape: Sequence[int],
    bias: object, dtype: torch.dtype, *_: object,
) -> torch.Tensor:  # fmt: skip
    rows = [math.prod(leading_axes(tuple(shape), axis)) for shape, axis in zip((a_shape, b_shape), axes, strict=True)]
    return a[0].new_empty(rows, dtype=dtype)


_operators.define(
    "quantize(Tensor x, str[] casts, int[] axes, Tensor? seed, int[] streams, Tensor?[] amax, Tensor?[] scale_enc, "
    "str backend) -> Tensor[]",
    _quantize, _fake_quantize,
)  # fmt: skip
_operators.define(
    "dequantize(Tensor codes, Tensor scale, Tensor? tensor_scale, str cast, int axis, SymInt[] shape, ScalarType dtype)"
    " -> Tensor",
    _dequantize, lambda codes, *rest: codes.new_empty(rest[-2], dtype=rest[-1]),
)  # fmt: skip
_operators.define(
    "scaled_matmul(Tensor[] a, Tensor[] b, str[] casts, int[] axes, SymInt[] a_shape, SymInt[] b_shape, Tensor? bias, "
    "ScalarType dtype, str accumulate, str backend) -> Tensor",
    _scaled_matmul, _fake_scaled_matmul,
)  # fmt: skip
_operators.define(
    "straight_through(Tensor exact, Tensor plain) -> Tensor",
    _StraightThrough.forward, lambda exact, plain: torch.empty_like(exact),
)  # fmt: skip
torch.library.register_autograd("microfloat::straight_through", _StraightThrough.backward)
