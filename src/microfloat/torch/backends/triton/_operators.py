"""The fused functions as opaque operators, for tracing compilers; eager code calls the launchers directly.

Casts travel as strings, since operators take no objects. An operator returns plain tensors, which `unflatten` makes
operands of; what they look like is told to the compiler by `_like`. None of them mutates its arguments: with `records`
the live amaxes come back last, and are recorded outside.
"""

from typing import Any

import torch

from microfloat.recipes import Cast
from microfloat.recipes._serialize import cast_of
from microfloat.torch.backends.base import Operand, record_amax_
from microfloat.torch.backends.triton import _fused, _norms
from microfloat.torch.backends.triton._blocks import empty_scale
from microfloat.torch.backends.triton._fused import Both
from microfloat.torch.backends.triton._launch import ceil_div
from microfloat.torch.backends.triton._norms import Normed
from microfloat.torch.backends.triton._plans import paired, plan_of

__all__ = ["activation_backward_quantize", "activation_quantize", "norm_quantize"]

_library = torch.library.Library("microfloat_triton", "DEF")
_CASTS = "str row_cast, str column_cast, Tensor? seed, int row_stream, int column_stream"
_library.define(
    f"activation_quantize(Tensor x, Tensor? up, str activation, {_CASTS}, Tensor? amax, Tensor? scale_enc, "
    "bool records) -> Tensor[]"
)
_library.define(
    f"activation_backward_quantize(Tensor grad, Tensor x, Tensor? up, str activation, {_CASTS}, Tensor? seed2, "
    "Tensor? amax, Tensor? amax2, Tensor? scale_enc, Tensor? scale_enc2, bool records) -> Tensor[]"
)
_library.define(
    f"norm_quantize(Tensor x, Tensor weight, Tensor? bias, float eps, str kind, {_CASTS}, Tensor? amax, "
    "Tensor? scale_enc, bool records) -> Tensor[]"
)


def _token(cast: Cast | None) -> str:
    return "" if cast is None else cast.contents


def _cast(token: str) -> Cast | None:
    return cast_of(token) if token else None


def _flatten(both: Both) -> list[torch.Tensor]:
    return [tensor for operand in both if operand is not None for tensor in (operand.codes, operand.scale)]


def _unflatten(
    parts: list[torch.Tensor], row_cast: Cast | None, column_cast: Cast | None, rows: int, columns: int
) -> Both:
    """Both operands from the first tensors of `parts`."""
    row = column = None
    if row_cast is not None:
        row, parts = Operand(parts[0], parts[1], None, row_cast.format, rows, columns), parts[2:]
    if column_cast is not None:
        column = Operand(parts[0], parts[1], None, column_cast.format, columns, rows)
    return row, column


def _like(x: torch.Tensor, row_token: str, column_token: str) -> list[torch.Tensor]:
    """Tensors as `_flatten` gives them for a matrix like x, without values."""
    parts = []
    plans = paired(*(plan_of(cast) if cast else None for cast in (_cast(row_token), _cast(column_token))))
    for plan, (rows, length) in zip(plans, (x.shape, x.shape[::-1]), strict=True):
        if plan is not None:
            parts.append(x.new_empty((rows, ceil_div(length, plan.codes_per_byte)), dtype=plan.codes_dtype))
            per_tensor = plan.block == (None, None)
            parts.append(
                x.new_empty((), dtype=torch.float32) if per_tensor else empty_scale(plan, rows, length, x.device)
            )
    return parts


def _count(row_cast: Cast | None, column_cast: Cast | None) -> int:
    return 2 * ((row_cast is not None) + (column_cast is not None))


def _options(seed: Any, row_stream: int, column_stream: int, amax: Any, scale_enc: Any, record: Any) -> dict[str, Any]:
    streams = {"seed": seed, "row_stream": row_stream, "column_stream": column_stream}
    return {**streams, "amax": amax, "scale_enc": scale_enc, "record": record}


def _unshared(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of an operator may not be the same tensor: the two operands of a per-tensor cast share their scale."""
    seen: set[int] = set()
    return [part.clone() if id(part) in seen else (seen.add(id(part)) or part) for part in parts]


def _live(x: torch.Tensor, records: bool) -> torch.Tensor | None:
    return x.new_zeros(1, dtype=torch.float32) if records else None


def _run_activation(
    x: Any, up: Any, activation: str, row: str, column: str, seed: Any, row_stream: int, column_stream: int, amax: Any,
    scale_enc: Any, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    live = _live(x, records)
    options = _options(seed, row_stream, column_stream, amax, scale_enc, live)
    made = _fused.activation_quantize(x, up, _cast(row), _cast(column), activation=activation, **options)
    return _unshared(_flatten(made)) + ([] if live is None else [live])


def _run_backward(
    grad: Any, x: Any, up: Any, activation: str, row: str, column: str, seed: Any, row_stream: int, column_stream: int,
    seed2: Any, amax: Any, amax2: Any, scale_enc: Any, scale_enc2: Any, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    live = [_live(x, records) for _ in range(2)]
    options = _options((seed, seed2), row_stream, column_stream, (amax, amax2), (scale_enc, scale_enc2), tuple(live))
    first, second = _fused.activation_backward_quantize(
        grad, x, up, _cast(row), _cast(column), activation=activation, **options
    )
    parts = _unshared(_flatten(first) + ([] if second is None else _flatten(second)))
    return parts + [tensor for tensor in live[: 1 if second is None else 2] if tensor is not None]


def _run_norm(
    x: Any, weight: Any, bias: Any, eps: float, kind: str, row: str, column: str, seed: Any, row_stream: int,
    column_stream: int, amax: Any, scale_enc: Any, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    live = _live(x, records)
    options = _options(seed, row_stream, column_stream, amax, scale_enc, live)
    made = _norms.norm_quantize(x, weight, bias, _cast(row), _cast(column), eps=eps, kind=kind, **options)
    statistics = [made.inverse] if made.mean is None else [made.inverse, made.mean]
    return _unshared(_flatten((made.row, made.column))) + statistics + ([] if live is None else [live])


def _fake_live(x: torch.Tensor, records: bool, count: int = 1) -> list[torch.Tensor]:
    return [x.new_empty(1, dtype=torch.float32) for _ in range(count if records else 0)]


def _fake_activation(x: Any, up: Any, activation: str, row: str, column: str, *rest: Any) -> list[torch.Tensor]:
    return _like(x, row, column) + _fake_live(x, rest[-1])


def _fake_norm(x: Any, weight: Any, bias: Any, eps: float, kind: str, row: str, column: str, *rest: Any) -> list:
    statistics = [x.new_empty(x.shape[:1], dtype=torch.float32) for _ in range(2 if kind == "layer" else 1)]
    return _like(x, row, column) + statistics + _fake_live(x, rest[-1])


def _fake_backward(grad: Any, x: Any, up: Any, activation: str, row: str, column: str, *rest: Any) -> list:
    count = 1 if up is None else 2
    return [part for _ in range(count) for part in _like(x, row, column)] + _fake_live(x, rest[-1], count)


for _name, _run, _fake in (
    ("activation_quantize", _run_activation, _fake_activation),
    ("activation_backward_quantize", _run_backward, _fake_backward),
    ("norm_quantize", _run_norm, _fake_norm),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"microfloat_triton::{_name}", _fake, lib=_library)
_operators = torch.ops.microfloat_triton


def _record(parts: list[torch.Tensor], *records: torch.Tensor | None) -> None:
    """Merge the live amaxes, last in `parts`, into the histories that asked for them."""
    for position, record in enumerate(records):
        if record is not None:
            record_amax_(record, parts[len(parts) - len(records) + position][0])


def activation_quantize(
    x_MF: torch.Tensor, up_MF: torch.Tensor | None, row_cast: Cast | None, column_cast: Cast | None, *,
    activation: str = "silu", seed: torch.Tensor | None = None, row_stream: int = 0, column_stream: int = 0,
    amax: torch.Tensor | None = None, scale_enc: torch.Tensor | None = None, record: torch.Tensor | None = None,
) -> Both:  # fmt: skip
    """See `_fused.activation_quantize`; one operator under a tracing compiler."""
    if not torch.compiler.is_compiling():
        options = _options(seed, row_stream, column_stream, amax, scale_enc, record)
        return _fused.activation_quantize(x_MF, up_MF, row_cast, column_cast, activation=activation, **options)
    tokens = _token(row_cast), _token(column_cast)
    parts = _operators.activation_quantize(
        x_MF, up_MF, activation, *tokens, seed, row_stream, column_stream, amax, scale_enc, record is not None
    )
    _record(parts, record)
    return _unflatten(parts, row_cast, column_cast, *x_MF.shape)


def activation_backward_quantize(
    grad_MF: torch.Tensor, x_MF: torch.Tensor, up_MF: torch.Tensor | None, row_cast: Cast | None,
    column_cast: Cast | None, *, activation: str = "silu", seed: tuple = (None, None), row_stream: int = 0,
    column_stream: int = 0, amax: tuple = (None, None), scale_enc: tuple = (None, None), record: tuple = (None, None),
) -> tuple[Both, Both | None]:  # fmt: skip
    """See `_fused.activation_backward_quantize`; one operator under a tracing compiler."""
    if not torch.compiler.is_compiling():
        options = _options(seed, row_stream, column_stream, amax, scale_enc, record)
        return _fused.activation_backward_quantize(
            grad_MF, x_MF, up_MF, row_cast, column_cast, activation=activation, **options
        )
    tokens = _token(row_cast), _token(column_cast)
    parts = _operators.activation_backward_quantize(
        grad_MF, x_MF, up_MF, activation, *tokens, seed[0], row_stream, column_stream, seed[1], *amax, *scale_enc,
        record[0] is not None,
    )  # fmt: skip
    _record(parts, *(record if up_MF is not None else record[:1]))
    first = _unflatten(parts, row_cast, column_cast, *x_MF.shape)
    if up_MF is None:
        return first, None
    return first, _unflatten(parts[_count(row_cast, column_cast) :], row_cast, column_cast, *x_MF.shape)


def norm_quantize(
    x_MK: torch.Tensor, weight_K: torch.Tensor, bias_K: torch.Tensor | None, row_cast: Cast | None,
    column_cast: Cast | None, *, eps: float, kind: str = "rms", seed: torch.Tensor | None = None, row_stream: int = 0,
    column_stream: int = 0, amax: torch.Tensor | None = None, scale_enc: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
) -> Normed:  # fmt: skip
    """See `_norms.norm_quantize`; one operator under a tracing compiler."""
    options = _options(seed, row_stream, column_stream, amax, scale_enc, record)
    if not torch.compiler.is_compiling():
        return _norms.norm_quantize(x_MK, weight_K, bias_K, row_cast, column_cast, eps=eps, kind=kind, **options)
    tokens = _token(row_cast), _token(column_cast)
    parts = _operators.norm_quantize(
        x_MK, weight_K, bias_K, eps, kind, *tokens, *list(options.values())[:-1], record is not None
    )
    _record(parts, record)
    row, column = _unflatten(parts, row_cast, column_cast, *x_MK.shape)
    statistics = parts[_count(row_cast, column_cast) :]
    return Normed(row, column, statistics[1] if kind == "layer" else None, statistics[0])
