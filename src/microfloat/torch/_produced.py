"""Codes of a norm's or an activation's value, in both layouts: on values at hand, or as one operator in traces.

Kinds: "rms" and "layer" (norms), or the name of an activation, gated where there is an `up`.

Legend: M = rows of x (all leading dimensions), K = its last dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from microfloat.operands import operands_of
from microfloat.recipes import Cast, as_cast
from microfloat.torch import _operators, backends
from microfloat.torch._checks import (
    check_eps,
    check_like,
    check_parameter,
    check_rows,
    check_scale_enc,
    check_tensor,
    real_tensor,
)
from microfloat.torch.producers import Activation, Norm, waits_for_amax
from microfloat.torch.seeds import draw_seed, seed_words
from microfloat.torch.tensor import QuantizedTensor

__all__ = ["Produced", "produce"]

_library = torch.library.Library("microfloat", "FRAGMENT")
_library.define(
    "produce(Tensor x, Tensor? second, Tensor? bias, str kind, float eps, str row, str column, Tensor? seed, "
    "Tensor? scale_enc, str backend) -> Tensor[]"
)
_NORMS = ("rms", "layer")


@dataclass(eq=False)
class Produced:
    """The codes of a value: `row` contracts its last axis, `column` its rows; statistics of a norm, float32 [M]."""

    row: QuantizedTensor
    column: QuantizedTensor
    mean: torch.Tensor | None = None
    inverse: torch.Tensor | None = None


def produce(
    kind: str, x: torch.Tensor, second: Any, bias: Any, eps: Any, casts: tuple[Any, Any], seed: Any, scale_enc: Any,
    backend: str,
) -> Produced:  # fmt: skip
    """The codes of a value; `second`: the weight of a norm, or the `up` that an activation is multiplied with."""
    if not _operators.is_tracing(x):
        row, column = as_cast(casts[0]), as_cast(casts[0] if casts[1] is None else casts[1])
        return _produce_values(kind, x, second, bias, eps, row, column, seed, scale_enc, backend)
    wanted = casts[0], casts[0] if casts[1] is None else casts[1]
    row, column = (_operators.constant_cast(cast) for cast in wanted)
    tokens = [_operators.constant_token(cast) for cast in wanted]
    if row.rounding != "stochastic" and column.rounding != "stochastic":
        seed = None
    else:
        seed = torch.ops.microfloat.draw_seed(device=x.device) if seed is None else seed_words(seed, x.device)
    scale_enc = None if scale_enc is None else real_tensor("scale_enc", scale_enc, x.device)
    second, bias = (None if tensor is None else tensor.detach() for tensor in (second, bias))
    parts = torch.ops.microfloat.produce(x.detach(), second, bias, kind, eps, *tokens, seed, scale_enc, backend)
    shape = (parts[0].shape[0], x.shape[-1])
    made = []
    for cast, token, axis in zip((row, column), tokens, (1, 0), strict=True):
        count = 3 if _operators.storage_of(token).tensor_scale else 2
        tensor_scale = parts[2] if count == 3 else None
        made.append(QuantizedTensor(parts[0], parts[1], tensor_scale, cast, axis=axis, shape=shape, dtype=x.dtype))
        parts = parts[count:]
    inverse = parts[0] if kind in _NORMS else None
    return Produced(made[0], made[1], parts[1] if kind == "layer" else None, inverse)


def _produce_values(
    kind: str, x: Any, second: Any, bias: Any, eps: Any, row: Cast, column: Cast, seed: Any, scale_enc: Any,
    backend: str,
) -> Produced:  # fmt: skip
    """`produce` where values are at hand: checks every argument."""
    producer = _producer(kind, x, second, bias, eps)
    x = producer.x_MK if isinstance(producer, Norm) else producer.x_MF
    module = backends.choose(backend, x.device)
    first, second = operands_of("x")
    options: dict[str, Any] = {"seed": None, "row_stream": first.stream, "column_stream": second.stream}
    if row.is_stochastic or column.is_stochastic:
        options["seed"] = draw_seed(x.device) if seed is None else seed_words(seed, x.device)
    encode_scale = check_scale_enc(scale_enc, row.is_delayed or column.is_delayed, x.device)
    if encode_scale is not None:
        options["scale_enc"] = encode_scale
    kernels = module.producers
    if kernels is not None and kernels.fuses(row, column) and not waits_for_amax(row, column):
        both, statistics = producer.codes(kernels, row, column, options)
    else:
        value, amax, statistics = producer.values(kernels)
        if kernels is not None and kernels.fuses(row, column):
            options["amax"] = amax
        both = module.quantize_both(value, row, column, **options)
    first, last = (
        QuantizedTensor.from_operand(operand, made, axis=axis, shape=x.shape, dtype=x.dtype)
        for operand, made, axis in zip(both, (row, column), (1, 0), strict=True)
    )
    mean, inverse = (None, None) if statistics is None else (statistics.mean, statistics.inverse)
    return Produced(first, last, mean, inverse)


def _producer(kind: str, x: Any, second: Any, bias: Any, eps: Any) -> Norm | Activation:
    first = "gate" if kind == "silu" else "x"
    rows = _rows(first, x)
    if kind not in _NORMS:
        if kind == "silu":  # SwiGLU
            check_tensor("up", second)
            check_like("up", second, x, first)
        return Activation(rows, None if second is None else _rows("up", second), kind)
    for name, parameter in (("weight", second), ("bias", bias)):
        check_parameter(name, parameter, rows)
    weight, bias = (None if parameter is None else parameter.detach() for parameter in (second, bias))
    return Norm(rows, weight, bias, check_eps(eps), kind)


def _rows(argument: str, x: Any) -> torch.Tensor:
    """The matrix that the last dimension of x makes, without its history."""
    check_tensor(argument, x)
    check_rows(argument, x)
    x = x.detach().resolve_neg()
    return x if x.dim() == 2 else x.reshape(_row_count(x.shape), x.shape[-1])


def _row_count(shape: Sequence[Any]) -> Any:
    rows = 1
    for size in shape[:-1]:
        rows = rows * size
    return rows


def _run(
    x: Any, second: Any, bias: Any, kind: str, eps: float, row: str, column: str, seed: Any, scale_enc: Any,
    backend: str,
) -> list[torch.Tensor]:  # fmt: skip
    casts = _operators.cast_of(row), _operators.cast_of(column)
    made = _produce_values(kind, x, second, bias, eps, *casts, seed, scale_enc, backend)
    parts = [*made.row.part_list(), *made.column.part_list(), *(t for t in (made.inverse, made.mean) if t is not None)]
    # Outputs of an operator may not be the same memory (both operands of a cast per tensor share their scale), and have
    # the strides that the fake promises.
    seen: set[int] = set()
    unshared = []
    for part in parts:
        part = part.contiguous()
        unshared.append(part.clone() if part.data_ptr() in seen else part)
        seen.add(part.data_ptr())
    return unshared


def _fake(
    x: Any, second: Any, bias: Any, kind: str, eps: float, row: str, column: str, seed: Any, scale_enc: Any,
    backend: str,
) -> list[torch.Tensor]:  # fmt: skip
    matrix = x.new_empty((_row_count(x.shape), x.shape[-1]))
    parts = []
    for token, axis in ((row, 1), (column, 0)):
        parts += _operators.fake_quantize(matrix, token, axis, None, 0, None, None, backend)
    count = {"rms": 1, "layer": 2}.get(kind, 0)
    return parts + [x.new_empty(matrix.shape[:1], dtype=torch.float32) for _ in range(count)]


_library.impl("produce", _run, "CompositeExplicitAutograd")
torch.library.register_fake("microfloat::produce", _fake, lib=_library)
