"""What a QuantizedTensor answers to torch's operators: a table from operator to function, and an error for the rest.

Shape operations act on the operand form [leading axes..., C]: they may regroup, permute and cut the leading axes as
long as no block is torn apart, and cut the contraction axis at block boundaries.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves

from microfloat.errors import InvalidValueError, invalid_type, invalid_value
from microfloat.torch.tensor import QuantizedTensor

__all__ = ["dispatch"]

aten = torch.ops.aten
_TABLE: dict[Any, Callable[..., Any]] = {}


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `func` if it is known, else raise InvalidTypeError."""
    implementation = _TABLE.get(func)
    if implementation is None:
        raise _refusal(func, args, kwargs)
    return implementation(func, args, kwargs)


def _refusal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Exception:
    flat = tree_leaves((args, kwargs))
    formats = sorted({str(value.format) for value in flat if isinstance(value, QuantizedTensor)})
    return invalid_type(
        str(func).removeprefix("aten."), f"a QuantizedTensor ({', '.join(formats)})", "a plain tensor",
        "Call .dequantize() first; nothing dequantizes in silence.",
    )  # fmt: skip


def _register(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(implementation: Callable[..., Any]) -> Callable[..., Any]:
        for func in operators:
            _TABLE[func] = implementation
        return implementation

    return add


def _view(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``implementation(q, *arguments)`` for operators whose results share storage with q."""

    def add(implementation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(implementation)
        def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            result = implementation(*args, **kwargs)
            if torch.compiler.is_compiling():
                return return_and_correct_aliasing(func, tuple(args), kwargs, result)
            return result

        return _register(*operators)(run)

    return add


# ---- copies ------------------------------------------------------------------------------------------------------


@_view(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _detach(q: QuantizedTensor) -> QuantizedTensor:
    return q.map_parts(lambda part: part.detach())


@_register(aten.clone.default)
def _clone(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> QuantizedTensor:
    return args[0].map_parts(torch.clone)


@_register(aten._to_copy.default)
def _to_copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> QuantizedTensor:
    """Moves the parts; a dtype only changes what is presented and what `dequantize` returns."""
    dtype = kwargs.get("dtype")
    if dtype is not None and dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise invalid_type(
            "dtype", dtype, "torch.float32, torch.bfloat16 or torch.float16: what a QuantizedTensor may present",
            "Call .dequantize() first.",
        )  # fmt: skip
    device = kwargs.get("device")
    options = {name: kwargs[name] for name in ("non_blocking",) if name in kwargs}
    moved = args[0].map_parts(lambda part: part.to(device=device or part.device, copy=True, **options), dtype)
    return moved.map_parts(torch.Tensor.pin_memory) if kwargs.get("pin_memory") else moved


@_register(aten._pin_memory.default)
def _pin_memory(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> QuantizedTensor:
    return args[0].map_parts(lambda part: part.pin_memory())


@_register(aten.is_pinned.default)
def _is_pinned(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return all(part.is_pinned() for part in args[0].parts().values())


@_register(
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default,
)  # fmt: skip
def _like(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """A plain tensor of the presented shape, dtype and device: nothing of the values is read."""
    q = args[0]
    stand_in = torch.empty((), dtype=q.dtype, device=q.device).expand(q.shape)
    kwargs = {**kwargs, "memory_format": torch.contiguous_format} if "like" in str(func) else kwargs
    return func(stand_in, *args[1:], **kwargs)


@_register(aten.equal.default)
def _equal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Same format, shape, axis and transform, and the same bytes."""
    a, b = args
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        raise _refusal(func, args, kwargs)
    if (a.format, a.hadamard, a.axis, a.shape) != (b.format, b.hadamard, b.axis, b.shape):
        return False
    left, right = a.parts(), b.parts()
    return left.keys() == right.keys() and all(torch.equal(_raw(left[name]), _raw(right[name])) for name in left)


def _raw(part: torch.Tensor) -> torch.Tensor:
    return part.view(torch.int32 if part.dtype == torch.float32 else torch.uint8)


@_register(aten.copy_.default)
def _copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """From a QuantizedTensor of the same kind: the bytes. From a plain tensor: quantized with this one's Cast."""
    destination, source = args[0], args[1]
    if not isinstance(destination, QuantizedTensor):
        raise _refusal(func, args, kwargs)
    if not isinstance(source, QuantizedTensor):
        return _store(destination, source.expand(destination.shape))
    kinds = [(str(q.format), q.hadamard, q.axis, tuple(q.shape), sorted(q.parts())) for q in (destination, source)]
    if kinds[0] != kinds[1]:
        raise invalid_value(
            "copy_", f"{kinds[1][0]} of shape {kinds[1][3]}, axis {kinds[1][2]}",
            f"{kinds[0][0]} of shape {kinds[0][3]}, axis {kinds[0][2]}, and the same Hadamard and scales",
            "Copy from source.dequantize() to quantize anew.",
        )  # fmt: skip
    for name, part in destination.parts().items():
        part.copy_(source.parts()[name])
    return destination


def _store(q: QuantizedTensor, values: torch.Tensor) -> QuantizedTensor:
    """Quantize plain `values` with q's Cast, into q's storage."""
    from microfloat.torch.ops import quantize

    axis = -2 if q.dim() == 2 and q.axis == 0 else -1
    fresh = quantize(values.to(device=q.device, dtype=torch.float32), q.cast, axis=axis)
    for name, part in q.parts().items():
        part.copy_(fresh.parts()[name])
    return q


@_register(
    aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.addcmul_.default,
    aten.addcdiv_.default, aten.lerp_.Scalar, aten.lerp_.Tensor, aten.zero_.default,
)  # fmt: skip
def _in_place_arithmetic(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> QuantizedTensor:
    """Dequantize to float32, apply, requantize with the same Cast: what an optimizer's step needs."""
    q = args[0]
    others = args[1:]
    if not isinstance(q, QuantizedTensor) or any(isinstance(other, QuantizedTensor) for other in others):
        raise _refusal(func, args, kwargs)
    widened = [other.to(torch.float32) if _is_floating(other) else other for other in others]
    return _store(q, func(q.dequantize(torch.float32), *widened, **kwargs))


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# ---- products ----------------------------------------------------------------------------------------------------


@_register(aten.mm.default, aten.addmm.default)
def _matmul(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """``a @ b`` (+ bias): a contracts its last axis, b its first. What `torch.matmul` and `F.linear` arrive at."""
    from microfloat.torch.ops import scaled_matmul

    *bias, a, b = args
    plain_bias = not bias or not isinstance(bias[0], QuantizedTensor)
    scaled = any(kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and plain_bias) or scaled:
        raise _refusal(func, args, kwargs)
    for name, q, axis in (("a", a, 1), ("b", b, 0)):
        if q.axis != axis:
            raise invalid_value(
                name, f"blocks along axis {q.axis} of shape {tuple(q.shape)}",
                f"blocks along axis {axis}, which a @ b contracts",
                "Quantize with axis=-1 for the left operand and axis=-2 for the right one, or multiply with b.t().",
            )  # fmt: skip
    return scaled_matmul(a, _permute.__wrapped__(b, (1, 0)), bias=bias[0] if bias else None)  # type: ignore[attr-defined]


# ---- shapes ------------------------------------------------------------------------------------------------------


@_view(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _regroup(q: QuantizedTensor, size: Sequence[int], stride: Sequence[int] | None = None) -> QuantizedTensor:
    """Another division of the leading axes; the contraction axis stays last and as long as it is."""
    shape = _infer(q, size)
    length = q.shape[q.axis] if q.shape else 1
    if tuple(shape) == tuple(q.shape):
        return q.map_parts(lambda part: part.view(part.shape))
    last_stays = (shape[-1] if shape else 1) == length
    if not last_stays or q.axis != max(q.dim() - 1, 0):
        raise invalid_value(
            "shape", f"{tuple(shape)} for a QuantizedTensor of shape {tuple(q.shape)} with blocks along axis {q.axis}",
            f"a shape whose last axis is the contraction axis, {length} long",
            "View and reshape regroup leading axes only; dequantize for anything else.",
        )  # fmt: skip
    return QuantizedTensor.from_operand(q.to_operand(), q.cast, axis=max(len(shape) - 1, 0), shape=shape, dtype=q.dtype)


def _infer(q: QuantizedTensor, size: Sequence[int]) -> tuple[int, ...]:
    shape = [int(entry) for entry in size]
    if shape.count(-1) == 1:
        rest = math.prod(entry for entry in shape if entry != -1)
        shape[shape.index(-1)] = q.numel() // rest if rest else 0
    if math.prod(shape) != q.numel() or any(entry < 0 for entry in shape):
        raise invalid_value("shape", tuple(size), f"a shape of {q.numel()} elements")
    return tuple(shape)


@_view(aten.unsqueeze.default)
def _unsqueeze(q: QuantizedTensor, dim: int) -> QuantizedTensor:
    shape = list(q.shape)
    shape.insert(dim % (q.dim() + 1), 1)
    return _regroup.__wrapped__(q, shape)  # type: ignore[attr-defined]


@_view(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(q: QuantizedTensor, dim: int | Sequence[int] | None = None) -> QuantizedTensor:
    named = range(q.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    dropped = {entry % max(q.dim(), 1) for entry in named}
    shape = [size for position, size in enumerate(q.shape) if not (position in dropped and size == 1)]
    return _regroup.__wrapped__(q, shape)  # type: ignore[attr-defined]


@_view(aten.t.default)
def _t(q: QuantizedTensor) -> QuantizedTensor:
    return _permute.__wrapped__(q, (1, 0)) if q.dim() == 2 else _detach.__wrapped__(q)  # type: ignore[attr-defined]


@_view(aten.transpose.int)
def _transpose(q: QuantizedTensor, dim0: int, dim1: int) -> QuantizedTensor:
    order = list(range(q.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute.__wrapped__(q, order)  # type: ignore[attr-defined]


@_view(aten.permute.default)
def _permute(q: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor:
    """A matrix swaps which axis the blocks are said to run along; its bytes, being in operand form, do not move."""
    order = [dim % max(q.dim(), 1) for dim in dims]
    if order == list(range(q.dim())):
        return _detach.__wrapped__(q)  # type: ignore[attr-defined]
    shape = tuple(q.shape[dim] for dim in order)
    if q.dim() == 2:
        return QuantizedTensor(
            q.codes, q.scale, q.tensor_scale, q.cast, axis=1 - q.axis, shape=shape, dtype=q.dtype
        )  # fmt: skip
    if order[-1] != q.dim() - 1 or q.format.is_tile:
        raise invalid_value(
            "dims", f"{tuple(order)} for a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}",
            "the contraction axis to stay last, and blocks of one row",
            "Beyond matrices only leading axes may be permuted; dequantize first.",
        )  # fmt: skip
    scale = q.scale if q.format.is_per_tensor else q.scale.permute(order)
    return QuantizedTensor(
        q.codes.permute(order), scale, _rows_permuted(q, order), q.cast, axis=q.axis, shape=shape, dtype=q.dtype
    )


def _rows_permuted(q: QuantizedTensor, order: Sequence[int]) -> torch.Tensor | None:
    """The tensor_scale after a permutation of leading axes."""
    if q.tensor_scale is None or q.tensor_scale.dim() == 0:
        return q.tensor_scale
    return q.tensor_scale.view(*q.shape[:-1], 1).permute(list(order)).reshape(-1, 1)


@_view(aten.slice.Tensor)
def _slice(
    q: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor:
    dim = dim % q.dim()
    window = slice(start, end, step)
    first, last, _ = window.indices(q.shape[dim])
    last = max(first, last)
    if (first, last, step) == (0, q.shape[dim], 1):
        return _detach.__wrapped__(q)  # type: ignore[attr-defined]
    return _slice_contraction(q, first, last, step) if dim == q.axis else _slice_rows(q, dim, first, last, step)


def _slice_contraction(q: QuantizedTensor, first: int, last: int, step: int) -> QuantizedTensor:
    """Cut C at block boundaries (and at whole bytes, and whole groups of the Hadamard transform)."""
    length = q.shape[q.axis]
    block = q.format.block[1] or 1
    unit = math.lcm(block, q.format.element.codes_per_byte, q.hadamard.size if q.hadamard else 1)
    if step != 1 or first % unit or (last % unit and last != length):
        raise _torn(q, q.axis, f"[{first}:{last}:{step}]", unit)
    per_byte = q.format.element.codes_per_byte
    stored_last = -(-last // unit) * unit
    codes = q.codes[..., first // per_byte : -(-stored_last // per_byte)]
    scale = q.scale if q.format.block[1] is None else q.scale[..., first // block : -(-last // block)]
    shape = [last - first if dim == q.axis else size for dim, size in enumerate(q.shape)]
    return QuantizedTensor(codes, scale, q.tensor_scale, q.cast, axis=q.axis, shape=shape, dtype=q.dtype)


def _slice_rows(q: QuantizedTensor, dim: int, first: int, last: int, step: int) -> QuantizedTensor:
    """Cut a leading axis; a tile format only along the first one, at whole tiles."""
    shape = list(q.shape)
    shape[dim] = len(range(first, last, step))
    lead = 0 if q.dim() == 2 else dim  # the axis of codes that `dim` is
    window = (slice(None),) * lead + (slice(first, last, step),)
    codes, scale, tensor_scale = q.codes[window], q.scale, q.tensor_scale
    if q.format.is_tile:
        inner = math.prod(q.codes.shape[1:-1])
        tile = q.format.block[0] or 1
        start, stop = first * inner, last * inner
        unit = tile // math.gcd(tile, inner) if inner else 1
        if lead or step != 1 or start % tile or (stop % tile and last != q.shape[dim]):
            raise _torn(q, dim, f"[{first}:{last}:{step}]", unit if not lead else None)
        scale = scale[start // tile : -(-stop // tile)]
    elif not q.format.is_per_tensor:
        scale = scale[window]
    if tensor_scale is not None and tensor_scale.dim():
        tensor_scale = tensor_scale.view(*q.codes.shape[:-1], 1)[window].reshape(-1, 1)
    return QuantizedTensor(codes, scale, tensor_scale, q.cast, axis=q.axis, shape=shape, dtype=q.dtype)


def _torn(q: QuantizedTensor, dim: int, window: str, unit: int | None) -> InvalidValueError:
    needed = (
        f"step 1 and bounds that are multiples of {unit} (or the end)" if unit else "a cut along the first axis only"
    )
    return invalid_value(
        f"slice of axis {dim}", f"{window} of a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}", needed,
        "Blocks cannot be torn apart; dequantize first to cut elsewhere.",
    )  # fmt: skip


@_view(aten.select.int)
def _select(q: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    dim = dim % q.dim()
    if dim == q.axis:
        raise invalid_value(
            "dim", f"{dim}, the contraction axis of a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}",
            "a leading axis", "What is left would have no contraction axis; dequantize first.",
        )  # fmt: skip
    index = index % q.shape[dim] if q.shape[dim] else index
    row = _slice.__wrapped__(q, dim, index, index + 1)  # type: ignore[attr-defined]
    shape = [size for position, size in enumerate(q.shape) if position != dim]
    return QuantizedTensor.from_operand(row.to_operand(), q.cast, axis=len(shape) - 1, shape=shape, dtype=q.dtype)


@_view(aten.split.Tensor)
def _split(q: QuantizedTensor, split_size: int, dim: int = 0) -> list[QuantizedTensor]:
    extent = q.shape[dim]
    starts = range(0, max(extent, 1), max(split_size, 1))
    return [_slice.__wrapped__(q, dim, start, min(start + split_size, extent)) for start in starts]  # type: ignore[attr-defined]


@_view(aten.split_with_sizes.default)
def _split_with_sizes(q: QuantizedTensor, split_sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    stops = [sum(split_sizes[: position + 1]) for position in range(len(split_sizes))]
    return [
        _slice.__wrapped__(q, dim, stop - size, stop)  # type: ignore[attr-defined]
        for stop, size in zip(stops, split_sizes, strict=True)
    ]


@_view(aten.unbind.int)
def _unbind(q: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor]:
    return [_select.__wrapped__(q, dim, index) for index in range(q.shape[dim])]  # type: ignore[attr-defined]
