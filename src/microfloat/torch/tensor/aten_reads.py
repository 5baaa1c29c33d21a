"""Operators that read a QuantizedTensor: copies, rows by index, tensors like it, comparison, products, collectives."""

import dis
import functools
import math
import sys
from collections.abc import Sequence

import torch

from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.torch._typing import Arguments, Options
from microfloat.torch._upper import upper
from microfloat.torch.tensor.aten_shapes import permute
from microfloat.torch.tensor.aten_table import Operator, is_decay, raw, refusal, refuse_experts, register
from microfloat.torch.tensor.ops import scaled_matmul
from microfloat.torch.tensor.quantized_tensor import INPUT_DTYPES, QuantizedTensor

aten = torch.ops.aten


@register(aten._to_copy.default)
def _to_copy(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    """A copy with moved parts; a dtype changes the dtype of the tensor and of `dequantize`, and no byte."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if dtype is not None and dtype not in INPUT_DTYPES:
        needed = "torch.float32, torch.bfloat16 or torch.float16: what a QuantizedTensor may present"
        raise invalid_type("dtype", dtype, needed, "Call .dequantize() first.")
    options = {name: kwargs[name] for name in ("non_blocking",) if name in kwargs}
    moved = args[0].map_parts(lambda part: part.to(device=device or part.device, copy=True, **options), dtype)
    return moved.map_parts(torch.Tensor.pin_memory) if kwargs.get("pin_memory") else moved


def _takes_data(own: torch.Tensor, other: torch.Tensor) -> bool:
    """False for a plain tensor that takes a quantized one as its ``.data``, which would leave it without memory.

    The operator reaches no table. It is registered for tensors that Python dispatches, so that plain ones pay nothing.
    """
    quantized = [one for one in (own, other) if isinstance(one, QuantizedTensor)]
    if len(quantized) != 1:
        with torch._C._ExcludeDispatchKeyGuard(_SNAPSHOT):  # pyright: ignore[reportAttributeAccessIssue]
            return aten._has_compatible_shallow_copy_type.default(own, other)
    caller = sys._getframe(1)
    if caller.f_code.co_code[caller.f_lasti] == dis.opmap["STORE_ATTR"]:  # ``p.data = q``: torch's error names neither
        raise invalid_type(
            "data", f"a QuantizedTensor ({quantized[0].format}) for a plain tensor", "a plain tensor",
            "Write its values, p.copy_(q.dequantize()), or replace the parameter: module.weight = nn.Parameter(q).",
        )  # fmt: skip
    return False


_SNAPSHOT = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
_library = torch.library.Library("aten", "IMPL")
_library.impl("_has_compatible_shallow_copy_type", _takes_data, "PythonTLSSnapshot")


register(aten.clone.default)(lambda func, args, kwargs: args[0].map_parts(functools.partial(func, **kwargs)))
register(aten._pin_memory.default)(lambda func, args, kwargs: args[0].map_parts(func))
register(aten.is_pinned.default)(lambda func, args, kwargs: all(part.is_pinned() for part in args[0].part_list()))


@register(aten.record_stream.default)
def _record_stream(func: Operator, args: Arguments, kwargs: Options) -> None:
    for part in args[0].part_list():
        part.record_stream(args[1])


@register(aten.add.Tensor)
def _decay(func: Operator, args: Arguments, kwargs: Options) -> torch.Tensor:
    """A plain gradient plus `alpha` times a quantized weight: an optimizer's weight decay. Other sums are refused."""
    if not is_decay(args[0], kwargs):
        raise refusal(func, args, kwargs)
    return func(args[0], args[1].dequantize(), **kwargs)


@register(aten.linalg_vector_norm.default)
def _norm(func: Operator, args: Arguments, kwargs: Options) -> torch.Tensor:
    """The norm of all values, one number, by which optimizers (Adafactor) scale steps. Norms of rows are refused."""
    q, *rest = args
    dim = rest[1] if len(rest) > 1 else kwargs.get("dim")
    if dim is not None or (q.requires_grad and torch.is_grad_enabled()):  # its gradient is one of q.dequantize().norm()
        raise refusal(func, args, kwargs)
    return func(q.dequantize(), *rest, **kwargs)


@register(aten.index.Tensor, aten.index_select.default)
def _index(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    """Whole rows, chosen by indices or masks of the leading axes, as a tensor of its own."""
    q, *where = args
    if not isinstance(q, QuantizedTensor):
        raise refusal(func, args, kwargs)
    refuse_experts(q, "index")
    indices: Sequence[torch.Tensor | None] = where[0]
    if func is aten.index_select.default:
        indices = [None] * (where[0] % max(q.dim(), 1)) + [where[1]]
    leading = q.shape[:-1]
    indexed = sum(1 if i is None or i.dtype not in (torch.bool, torch.uint8) else i.dim() for i in indices)
    if not leading or indexed > len(leading) or q.axis != q.dim() - 1 or q.format.is_tile:
        raise invalid_value(
            "indices", f"those of {indexed} axes of a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}",
            "indices of leading axes, the contraction axis being the last, and blocks of one row",
            "Take whole slices; dequantize first for anything else.",
        )  # fmt: skip
    numbers = torch.arange(math.prod(leading), device=q.device).view(leading)
    rows = numbers[tuple(slice(None) if index is None else index for index in indices)]

    def chosen(part: torch.Tensor) -> torch.Tensor:
        return raw(part).reshape(math.prod(part.shape[:-1]), part.shape[-1])[rows].view(part.dtype)

    scale = q.scale.clone() if q.format.is_per_tensor else chosen(q.scale)
    tensor_scale = q.tensor_scale
    if tensor_scale is not None:
        tensor_scale = chosen(tensor_scale).reshape(-1, 1) if tensor_scale.dim() else tensor_scale.clone()
    return QuantizedTensor(
        chosen(q.codes), scale, tensor_scale, q.cast, axis=rows.dim(), shape=(*rows.shape, q.shape[-1]), dtype=q.dtype
    )


@register(
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default,
)  # fmt: skip
def _like(func: Operator, args: Arguments, kwargs: Options) -> torch.Tensor:
    """A plain tensor of the presented shape, dtype and device; no value is read.

    A parameter without memory gets codes and scales (``module.to_empty``), and so do whole rows of a parameter (FSDP2).
    """
    q = args[0]
    if func is aten.new_zeros.default and not kwargs.keys() - {"pin_memory"} and q.axis != 0:
        is_shared = q._is_shard or isinstance(args[0], torch.nn.Parameter)
        has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if is_shared and has_group and len(args[1]) == q.dim() and tuple(args[1][1:]) == tuple(q.shape[1:]):
            return upper("shard_of_zeros")(q, args[1][0])  # rows of it
    device = kwargs.get("device")
    if func is aten.empty_like.default and q.codes.is_meta and device is not None and device.type != "meta":
        return q.map_parts(lambda part: torch.empty_like(part, device=device))
    stand_in = torch.empty((), dtype=q.dtype, device=q.device).expand(q.shape)
    kwargs = {**kwargs, "memory_format": torch.contiguous_format} if "like" in str(func) else kwargs
    return func(stand_in, *args[1:], **kwargs)


@register(aten.equal.default)
def _equal(func: Operator, args: Arguments, kwargs: Options) -> bool:
    """Same format, shape, axis and transform, and the same bytes."""
    a, b = args
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        raise refusal(func, args, kwargs)
    if (a.format, a.hadamard, a.axis, a.shape) != (b.format, b.hadamard, b.axis, b.shape):
        return False
    left, right = a.part_list(), b.part_list()
    return len(left) == len(right) and all(
        torch.equal(raw(one), raw(other)) for one, other in zip(left, right, strict=True)
    )


@register(aten.mm.default, aten.addmm.default)
def _matmul(func: Operator, args: Arguments, kwargs: Options) -> torch.Tensor:
    """``a @ b`` (+ bias), contracting the last axis of a and the first of b, also for `torch.matmul` and `F.linear`."""
    *bias, a, b = args
    are_quantized = [isinstance(one, QuantizedTensor) for one in args]
    scaled = any(kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
    if are_quantized != [*[False] * len(bias), True, True] or scaled:
        raise refusal(func, args, kwargs)
    for name, q, axis in (("a", a, 1), ("b", b, 0)):
        if q.axis != axis:
            raise invalid_value(
                name, f"blocks along axis {q.axis} of shape {tuple(q.shape)}",
                f"blocks along axis {axis}, which a @ b contracts",
                "Quantize with axis=-1 for the left operand and axis=-2 for the right one, or multiply with b.t().",
            )  # fmt: skip
    return scaled_matmul(a, permute(b, (1, 0)), bias=bias[0] if bias else None)


def _gather(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    """The rows of all ranks, one rank below the other, with their scales: the bytes of a cast of all values."""
    q, *rest = args
    if not isinstance(q, QuantizedTensor) or q._is_shard:  # full_tensor asks for shards of a parameter
        raise refusal(func, args, kwargs)
    size = kwargs.get("group_size", rest[0] if rest else 1)
    height = q.format.block[0] or 1
    if q.axis == 0 or q.upper.dim() < 2 or math.prod(q.shape[:-1]) % height:
        raise NotSupportedError(
            f"all_gather_into_tensor: got a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}, axis {q.axis}, "
            f"needed rows along the first axis, whole tiles of {height} rows, and a scale for each block or row. "
            "Ranks have scales of their own for whole tensors: gather values, or cast under one amax and gather parts."
        )
    parts = {name: func(raw(part.contiguous()), *rest, **kwargs).view(part.dtype) for name, part in q.parts().items()}
    return type(q)(**parts, cast=q.cast, axis=q.axis, shape=(q.shape[0] * size, *q.shape[1:]), dtype=q.dtype)


if torch.distributed.is_available():
    register(torch.ops._c10d_functional.all_gather_into_tensor.default)(_gather)
    register(torch.ops._c10d_functional.wait_tensor.default)(
        lambda func, args, kwargs: args[0].map_parts(lambda part: func(raw(part)).view(part.dtype))
    )
