"""The three verbs on tensors: `quantize`, `dequantize`, `scaled_matmul`. Arguments are checked here, once.

Legend: R = rows of an operand form, C = its contraction length (docs/numerics.md, "Operand form of an array").
"""

import operator
from collections.abc import Sequence
from typing import TypeAlias

import torch

from microfloat.arguments import normalize_axis
from microfloat.errors import invalid_type, invalid_value, unknown_name
from microfloat.formats import ScaledFormat
from microfloat.recipes import Cast, as_cast
from microfloat.recipes.core import check_takes_amax
from microfloat.torch import _operators, backends
from microfloat.torch._checks import INPUT_DTYPES, check_scale_enc, check_tensor, readable, real_tensor
from microfloat.torch.seeds import draw_seed, seed_words
from microfloat.torch.tensor import QuantizedTensor

__all__ = ["dequantize", "fake_quantize", "quantize", "scaled_matmul"]

Seed: TypeAlias = int | Sequence[int] | torch.Tensor | None
_OUTPUT_DTYPES = (*INPUT_DTYPES, torch.float64)
_ACCUMULATE = ("fast", "split", "exact")


def quantize(
    x: torch.Tensor, cast: Cast | ScaledFormat | str, *, axis: int = -1,
    seed: Seed = None, stream: int = 0, amax: float | torch.Tensor | None = None,
    scale_enc: float | torch.Tensor | None = None, backend: str = "auto",
) -> QuantizedTensor:  # fmt: skip
    """Quantize a tensor: ``codes = round(x * encode factor)``, such that ``x ~ decode(codes) * scale * tensor_scale``.

    `x`: float32, bfloat16 or float16 of any shape and strides. `cast`: a Cast, a ScaledFormat or a format's name.
    `axis`: the contraction axis, -1, or -2 of a matrix. `seed` (an int in [0, 2^64), or its two words, low first, as
    int64 [2]) and `stream` feed stochastic rounding and are ignored by nearest; without a seed one is drawn from the
    default generator of x's device. `amax` replaces the measured amax of a per-tensor or NVFP4 cast (float32 scalar;
    [R, 1] for nvfp4_row). `scale_enc`: the encode scale of delayed scaling, required exactly then. Not
    differentiable: what comes out requires no grad, in eager and compiled code alike.

    Raises InvalidTypeError for other dtypes, InvalidValueError for arguments that do not fit the cast, and
    NotSupportedError where `backend` cannot run. The bytes equal those of `microfloat.reference.quantize`.
    Source: docs/numerics.md 2 to 5 and 7.

    >>> quantize(torch.tensor([[1.0, -2.0, 3.0]]), "mxfp4").codes
    tensor([[162,   5]], dtype=torch.uint8)
    """
    run = _traced_quantize if _operators.is_tracing(x) else quantize_values
    return run(x, cast, axis, seed, stream, amax, scale_enc, backend)


def quantize_values(
    x: torch.Tensor, cast: Cast | ScaledFormat | str, axis: int, seed: Seed, stream: int,
    amax: float | torch.Tensor | None, scale_enc: float | torch.Tensor | None, backend: str,
) -> QuantizedTensor:  # fmt: skip
    """`quantize` where values are at hand: checks every argument, then calls the backend."""
    cast = as_cast(cast)
    _operators.refuse_transforms("quantize", x)
    check_tensor("x", x)
    axis = normalize_axis(axis, x.dim())
    _check_stream(stream)
    module = backends.choose(backend, x.device)
    x = x.detach().resolve_neg()
    transposed = x.dim() == 2 and axis == 0
    matrix = x if x.dim() == 2 else x.reshape(_rows(x), x.shape[-1] if x.dim() else 1)
    amax_tensor = _check_amax(amax, cast, matrix.shape[1 if transposed else 0], x.device)
    encode_scale = check_scale_enc(scale_enc, cast.is_delayed, x.device)
    words = None
    if cast.is_stochastic:
        words = draw_seed(x.device) if seed is None else seed_words(seed, x.device)
    operand = module.quantize(
        matrix, cast, transposed=transposed, seed=words, stream=stream, amax=amax_tensor, scale_enc=encode_scale
    )
    return QuantizedTensor.from_operand(operand, cast, axis=axis, shape=x.shape, dtype=x.dtype)


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor that `q` stands for, in its original shape; `dtype` None is the original's.

    FP32 and E8M0 scales: ``f32(dec(code) * scale)``; NVFP4: ``f32(dec(code) * f32(dec(sb) * tensor_scale))``; then one
    rounding to `dtype`. A NaN scale gives NaN. Source: docs/numerics.md 8.1.
    """
    _check_quantized("q", q, "Call microfloat.torch.quantize(x, cast) first.")
    return q.dequantize(dtype)


def scaled_matmul(
    a: QuantizedTensor, b: QuantizedTensor, *, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    accumulate: str = "split", backend: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """``y = round(a @ b.T + bias)``, contracting the `axis` of each operand: [R_a, R_b] in `out_dtype`.

    `a`, `b`: quantized tensors of one family (FP32, E8M0 or E4M3 scales), equal stored contraction length and equal
    `hadamard`. `bias`: [R_b] or None, added in float32 before the only rounding. `out_dtype` None is a's dtype.
    `accumulate`: "split", "fast" or "exact" (float64; reference backend). A NaN scale gives NaN.

    Raises InvalidTypeError for operands that are not quantized, InvalidValueError for a pair that cannot be multiplied,
    NotSupportedError where `backend` cannot run. Source: docs/numerics.md 7.3 and 8.2.
    """
    for name, operand in (("a", a), ("b", b)):
        _check_quantized(name, operand, "Quantize it, or multiply a.dequantize() and b.dequantize().")
    dtype = a.dtype if out_dtype is None else out_dtype
    if not _operators.is_tracing(a):
        return multiply_values(a, b, bias, dtype, accumulate, backend)
    return torch.ops.microfloat.scaled_matmul(
        a.part_list(), a.token, a.axis, a.shape, b.part_list(), b.token, b.axis, b.shape, bias, dtype, accumulate,
        backend,
    )  # fmt: skip


def multiply_values(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, dtype: torch.dtype, accumulate: str, backend: str
) -> torch.Tensor:
    """`scaled_matmul` where values are at hand: checks every argument, then calls the backend."""
    _operators.refuse_transforms("scaled_matmul")
    _check_pair(a, b)
    if accumulate not in _ACCUMULATE:
        raise unknown_name("accumulate", accumulate, _ACCUMULATE)
    if dtype not in INPUT_DTYPES:
        raise invalid_type("out_dtype", dtype, "torch.float32, torch.bfloat16 or torch.float16")
    left, right = a.to_operand(), b.to_operand()
    _check_bias(bias, right.rows, a.device)
    module = backends.choose(backend, a.device)
    return module.scaled_matmul(left, right, bias=bias, out_dtype=dtype, accumulate=accumulate)


def _traced_quantize(
    x: torch.Tensor, cast: Cast | ScaledFormat | str, axis: int, seed: Seed, stream: int,
    amax: float | torch.Tensor | None, scale_enc: float | torch.Tensor | None, backend: str,
) -> QuantizedTensor:  # fmt: skip
    """`quantize` under a compiler: one opaque operator; values are checked when it runs."""
    resolved, token = _operators.constant_cast(cast), _operators.constant_token(cast)
    check_tensor("x", x)
    if resolved.rounding == "stochastic":
        seed = torch.ops.microfloat.draw_seed(device=x.device) if seed is None else seed_words(seed, x.device)
    else:
        seed = None
    amax, scale_enc = (None if value is None else real_tensor("amax", value, x.device) for value in (amax, scale_enc))
    parts = torch.ops.microfloat.quantize(x.detach(), token, axis, seed, stream, amax, scale_enc, backend)
    tensor_scale = parts[2] if _operators.storage_of(token).tensor_scale else None
    axis = axis % max(x.dim(), 1)
    return QuantizedTensor(parts[0], parts[1], tensor_scale, resolved, axis=axis, shape=x.shape, dtype=x.dtype)


def _rows(x: torch.Tensor) -> int:
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return rows


def _check_quantized(argument: str, value: object, remedy: str) -> None:
    if not isinstance(value, QuantizedTensor):
        got = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value)
        raise invalid_type(argument, got, "a QuantizedTensor", remedy)


def _check_stream(stream: int) -> None:
    error = invalid_value("stream", repr(stream), "an int in [0, 2^32)")
    try:
        number = -1 if isinstance(stream, bool) else operator.index(stream)
    except TypeError:
        raise error from None
    if not 0 <= number < 1 << 32:
        raise error


def _check_amax(amax: float | torch.Tensor | None, cast: Cast, rows: int, device: torch.device) -> torch.Tensor | None:
    """The amax that replaces the measured one: float32 () or [R, 1] on `device`."""
    if amax is None:
        return None
    check_takes_amax(cast)
    tensor = real_tensor("amax", amax, device)
    needed = (rows, 1) if cast.format.tensor_scale == "row" else ()
    if tuple(tensor.shape) != needed:
        raise invalid_value("amax", f"shape {tuple(tensor.shape)}", f"shape {needed} for {cast.format}")
    if readable(tensor) and not bool((tensor >= 0).all()):
        raise invalid_value("amax", tensor.tolist(), "values >= 0, not NaN", "An amax is a maximum of magnitudes.")
    return tensor


def _check_pair(a: QuantizedTensor, b: QuantizedTensor) -> None:
    if a.device != b.device:
        raise invalid_value(
            "b", f"a tensor on {b.device}", f"one on {a.device}, where a is", f"Move it: b.to({str(a.device)!r})."
        )
    if a.format.scale != b.format.scale:
        raise invalid_value(
            "b",
            f"{b.format} ({b.format.scale} scales) against {a.format} ({a.format.scale} scales) of a",
            "operands of one family (both FP32, both E8M0 or both E4M3 scales)",
            "Quantize both with formats of one family, or dequantize both.",
        )
    if a.hadamard != b.hadamard:
        raise invalid_value(
            "b",
            f"hadamard {b.hadamard} against {a.hadamard} of a",
            "the same Hadamard on both operands, or on neither",
            "Quantize both with one Cast.hadamard, or dequantize the transformed operand first.",
        )
    left, right = a.to_operand(), b.to_operand()
    if left.stored_length != right.stored_length:
        raise invalid_value(
            "b",
            f"contraction length {right.stored_length} (shape {tuple(b.shape)}, axis {b.axis})",
            f"{left.stored_length}, as a has (shape {tuple(a.shape)}, axis {a.axis})",
            "Both operands contract their quantization axis: y = a @ b.T.",
        )


def _check_bias(bias: torch.Tensor | None, columns: int, device: torch.device) -> None:
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor) or isinstance(bias, QuantizedTensor) or bias.dtype not in _OUTPUT_DTYPES:
        got = bias.dtype if isinstance(bias, torch.Tensor) else type(bias)
        raise invalid_type("bias", got, "None or a floating-point tensor")
    if tuple(bias.shape) != (columns,):
        raise invalid_value("bias", f"shape {tuple(bias.shape)}", f"shape ({columns},): one value per row of b")
    if bias.device != device:
        raise invalid_value("bias", f"a tensor on {bias.device}", f"one on {device}, where a is")


def fake_quantize(
    x: torch.Tensor, cast: Cast | ScaledFormat | str, axis: int = -1, seed: Seed = None, *, backend: str = "auto"
) -> torch.Tensor:
    """`x` as the format would hold it, ``dequantize(quantize(x, cast))``, in x's dtype; its gradient is dy unchanged.

    The straight-through estimate, in every order of differentiation, also where a value saturates. Arguments and errors
    are those of `quantize`.

    >>> x = torch.tensor([1.0, 2.3], requires_grad=True)
    >>> fake_quantize(x, "mxfp4").sum().backward()
    >>> fake_quantize(x, "mxfp4").tolist(), x.grad.tolist()
    ([1.0, 2.0], [1.0, 1.0])
    """
    check_tensor("x", x)
    return _straight_through(dequantize(quantize(x.detach(), cast, axis=axis, seed=seed, backend=backend)), x)


# An operator: torch.compile takes it as it is.
@torch.library.custom_op("microfloat::straight_through", mutates_args=())
def _straight_through(exact: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """`exact`, differentiated as `plain` is."""
    return exact.clone()


@_straight_through.register_fake
def _(exact: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(exact)


_straight_through.register_autograd(lambda ctx, dy: (None, dy))
