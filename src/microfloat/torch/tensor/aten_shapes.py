"""Operators that regroup, permute, cut and join.

They act on the operand form [leading axes..., C]. They may regroup, permute and cut the leading axes as long as no
block is cut, and cut the contraction axis at block boundaries.
"""

import math
from collections.abc import Callable, Sequence

import torch

from microfloat.errors import InvalidValueError, invalid_value
from microfloat.layout import leading_axes, scale_shape
from microfloat.torch._typing import Arguments, Options
from microfloat.torch.tensor import aten_table as table
from microfloat.torch.tensor import custom_ops as _operators
from microfloat.torch.tensor.aten_table import Operator, raw, refuse_experts, register, register_view, view_of
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

aten = torch.ops.aten


@register_view(aten.detach.default, aten.alias.default, aten.lift_fresh.default, takes_axes=False)
def detach(q: QuantizedTensor) -> QuantizedTensor:
    tensor_scale = None if q.tensor_scale is None else q.tensor_scale.detach()
    return view_of(q, q.codes.detach(), q.scale.detach(), tensor_scale, shape=q.shape)


def _lead(q: QuantizedTensor, dim: int) -> int:
    """The axis of the codes for a leading axis of q; the contraction axis is the last one of the codes."""
    return dim if dim < q.axis else dim - 1


def _refused(q: QuantizedTensor, argument: str, got: object, needed: str, remedy: str) -> InvalidValueError:
    return invalid_value(argument, f"{got} of a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}", needed, remedy)


def _on_rows(
    q: QuantizedTensor, function: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The parts of q after a function of the leading axes; scales of tiles, tensors and experts stay as they are."""
    scale, tensor_scale = q.scale, q.tensor_scale
    if not (q.format.is_per_tensor or q.format.is_tile):
        scale = function(scale)
    if tensor_scale is not None and tensor_scale.dim() == 2:
        tensor_scale = function(tensor_scale.view(*q.codes.shape[:-1], 1)).reshape(-1, 1)
    return function(q.codes), scale, tensor_scale


@register_view(
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, by_shape=True,
)  # fmt: skip
def _regroup(q: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor:
    """Leading axes split or merged, before and behind the contraction axis, whose length stays."""
    shape = tuple(shape)
    if shape == tuple(q.shape) or (q._is_shard and shape == (q.numel(),)):  # FSDP2 keeps a flat view for its memory
        return detach(q)
    refuse_experts(q, "view")
    length = q.shape[q.axis] if q.shape else 1
    axis, behind = max(len(shape) - 1, 0), math.prod(q.shape[q.axis + 1 :])
    if q.format.is_per_tensor and behind == 1 and q.format.element.codes_per_byte == 1:
        # One scale serves every element, in any order.
        codes = q.codes.view(shape if len(shape) > 1 else (1, math.prod(shape)))
        return view_of(q, codes, q.scale, q.tensor_scale, shape=shape, axis=axis)
    if q.axis < q.dim() - 1:  # the contraction axis has as many entries behind it as before
        fits = [number for number in range(len(shape)) if math.prod(shape[number + 1 :]) == behind]
        axis = next((number for number in fits if shape[number] == length), axis)
    leading = leading_axes(shape, axis)
    is_kept = (shape[axis] if shape else 1) == length and math.prod(shape[axis + 1 :]) == behind
    if not is_kept or math.prod(leading) != math.prod(q.codes.shape[:-1]):  # rows without elements may have scales
        needed = f"the contraction axis, {length} long, and {behind} entries behind it"
        if q.axis == max(q.dim() - 1, 0):
            needed = f"a shape whose last axis is the contraction axis, {length} long"
        raise invalid_value(
            "shape", f"{shape} for a QuantizedTensor of shape {tuple(q.shape)} with blocks along axis {q.axis}", needed,
            "View and reshape regroup leading axes only; dequantize for anything else. DistributedDataParallel and "
            "FSDP1 flatten parameters: use fully_shard, or build their layers without quantized_model_init.",
        )  # fmt: skip
    scale = q.scale
    if not (q.format.is_per_tensor or q.format.is_tile):
        scale = scale.view(scale_shape(q.format, shape, axis, (0, scale.shape[-1])))
    codes = q.codes.view(*leading, q.codes.shape[-1])
    return view_of(q, codes, scale, q.tensor_scale, shape=shape, axis=axis)


@register(aten.as_strided.default)
def _as_strided(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    """The tensor with the shape and strides that it has, as FSDP2 asks of a gathered parameter; no others."""
    q, size, stride, *offset = args
    offset = offset[0] if offset else kwargs.get("storage_offset")
    if tuple(size) != tuple(q.shape) or tuple(stride) != q.stride() or offset:
        raise table.refusal(func, args, kwargs)
    return detach(q)


@register_view(aten.t.default)
def _t(q: QuantizedTensor) -> QuantizedTensor:
    return permute(q, range(q.dim())[::-1])


@register_view(aten.transpose.int)
def _transpose(q: QuantizedTensor, dim0: int, dim1: int) -> QuantizedTensor:
    order = list(range(q.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(q, order)


@register_view(aten.permute.default)
def permute(q: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor:
    """The axes in any order. Codes are in operand form, so moving the contraction axis moves no byte."""
    order = [dim % max(q.dim(), 1) for dim in dims]
    if order == list(range(q.dim())):
        return detach(q)
    shape, axis = tuple(q.shape[dim] for dim in order), order.index(q.axis)
    leads = [_lead(q, dim) for dim in order if dim != q.axis]
    if order[0]:
        refuse_experts(q, "permute")
    if leads == sorted(leads):
        return view_of(q, q.codes, q.scale, q.tensor_scale, shape=shape, axis=axis)
    if q.format.is_tile:
        needed = "blocks of one row, or the other axes than the contraction axis in their order"
        remedy = "Tiles run over the rows of all leading axes; dequantize first."
        raise _refused(q, "dims", tuple(order), needed, remedy)
    parts = _on_rows(q, lambda part: part.permute(*leads, q.dim() - 1))
    return view_of(q, *parts, shape=shape, axis=axis, is_slice=parts[2] is not q.tensor_scale)  # row scales are copied


@register_view(aten.expand.default, by_shape=True)
def _expand(q: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor:
    """Leading axes of one entry, and new ones in front, repeated without copying codes; scales of tiles are copied."""
    shape, axis = tuple(shape), q.axis + len(shape) - q.dim()
    if shape == tuple(q.shape):
        return detach(q)
    refuse_experts(q, "expand")
    if not q.shape or shape[axis] != q.shape[q.axis]:
        remedy = "Only the other axes expand; dequantize first."
        raise _refused(q, "size", shape, "the contraction axis as it is", remedy)
    leading, own = leading_axes(shape, axis), tuple(q.codes.shape[:-1])
    codes, scale, tensor_scale = _on_rows(q, lambda part: part.expand(*leading, -1))
    if q.format.is_tile:
        count = math.prod(leading[: len(leading) - len(own)])
        while own and own[0] == 1 and leading[-len(own)] != 1:
            count, own = count * leading[-len(own)], own[1:]
        rows, tile = math.prod(own), q.format.block[0] or 1
        if leading[len(leading) - len(own) :] != own or (count > 1 and rows % tile):
            needed = f"new axes in front of whole tiles of {tile} rows"
            raise _refused(q, "size", shape, needed, "Blocks cannot be torn apart; dequantize first.")
        scale = scale.repeat(count, 1)
    return view_of(q, codes, scale, tensor_scale, shape=shape, axis=axis, is_slice=True)


@register_view(aten.slice.Tensor)
def _slice(
    q: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor:
    dim = dim % q.dim()
    first, last, _ = slice(start, end, step).indices(q.shape[dim])
    last = max(first, last)
    if (first, last, step) == (0, q.shape[dim], 1):
        return detach(q)
    return _slice_contraction(q, first, last, step) if dim == q.axis else _slice_rows(q, dim, first, last, step)


def _contraction_unit(q: QuantizedTensor) -> int:
    """Elements along C that cannot be separated: a block, a byte, a group of the Hadamard transform."""
    block = q.format.block[1] or 1
    return math.lcm(block, q.format.element.codes_per_byte, q.hadamard.size if q.hadamard else 1)


def _slice_contraction(q: QuantizedTensor, first: int, last: int, step: int) -> QuantizedTensor:
    """Cut C at block boundaries (and at whole bytes, and whole groups of the Hadamard transform)."""
    block, unit, per_byte = q.format.block[1], _contraction_unit(q), q.format.element.codes_per_byte
    if step != 1 or first % unit or (last % unit and last != q.shape[q.axis]):
        raise _torn(q, q.axis, f"[{first}:{last}:{step}]", unit)
    stored_last = -(-last // unit) * unit
    codes = q.codes[..., first // per_byte : -(-stored_last // per_byte)]
    scale = q.scale if block is None else q.scale[..., first // block : -(-last // block)]
    shape = [last - first if dim == q.axis else size for dim, size in enumerate(q.shape)]
    return view_of(q, codes, scale, q.tensor_scale, shape=shape, is_slice=True)


def _of_experts(
    q: QuantizedTensor, scale: torch.Tensor, window: slice | int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and tensor scale of some of the experts, or of one; `scale`: the scale of the blocks, already cut."""
    upper = q.upper[window]
    return (upper, None) if q.tensor_scale is None else (scale, upper)


def _slice_rows(q: QuantizedTensor, dim: int, first: int, last: int, step: int) -> QuantizedTensor:
    """Cut a leading axis; a tile format only along the first one, at whole tiles."""
    shape = list(q.shape)
    shape[dim] = len(range(first, last, step))
    lead = _lead(q, dim)
    codes, scale, tensor_scale = _on_rows(q, lambda part: part[(*[slice(None)] * lead, slice(first, last, step))])
    cuts_experts = q.is_per_expert and not dim
    if cuts_experts:
        scale, tensor_scale = _of_experts(q, scale, slice(first, last, step))
    if q.format.is_tile:
        inner = math.prod(q.codes.shape[1:-1])
        tile = q.format.block[0] or 1
        start, stop = first * inner, last * inner
        unit = tile // math.gcd(tile, inner) if inner else 1
        is_end = last == q.shape[dim] or (q._is_shard and q.ends_at(last))  # type: ignore[attr-defined]
        if lead or step != 1 or start % tile or (stop % tile and not is_end):
            raise _torn(q, dim, f"[{first}:{last}:{step}]", unit if not lead else None)
        scale = scale[start // tile : -(-stop // tile)]
    made = view_of(q, codes, scale, tensor_scale, shape=shape, is_slice=True)
    # Experts share no scale with others: a write into them is a write into a whole tensor.
    return made.map_parts(lambda part: part) if cuts_experts else made


def _torn(q: QuantizedTensor, dim: int, window: str, unit: int | None) -> InvalidValueError:
    needed = "a cut along the first axis only"
    if unit:
        needed = f"step 1 and bounds that are multiples of {unit} (or the end)"
    remedy = "Blocks cannot be torn apart; dequantize first to cut elsewhere."
    return _refused(q, f"slice of axis {dim}", window, needed, remedy)


@register_view(aten.select.int)
def _select(q: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    dim = dim % q.dim()
    if dim == q.axis:
        remedy = "The rest would have no contraction axis; dequantize first."
        raise _refused(q, "dim", f"{dim}, the contraction axis", "a leading axis", remedy)
    if dim:  # one row of every expert has no axis of experts in front of matrices
        refuse_experts(q, "select")
    index, lead = index % q.shape[dim], _lead(q, dim)
    row = _slice(q, dim, index, index + 1)
    codes, scale, tensor_scale = row.codes, row.scale, row.tensor_scale
    if row.is_per_expert:
        scale, tensor_scale = _of_experts(row, scale, 0)
    if q.dim() > 2:  # the codes of one row have two axes
        codes = codes.squeeze(lead)
        scale = scale if q.format.is_per_tensor or q.format.is_tile else scale.squeeze(lead)
    shape = [size for position, size in enumerate(q.shape) if position != dim]
    return view_of(row, codes, scale, tensor_scale, shape=shape, axis=q.axis - (dim < q.axis))


@register_view(aten.split.Tensor)
def _split(q: QuantizedTensor, split_size: int, dim: int = 0) -> list[QuantizedTensor]:
    extent = q.shape[dim]
    if isinstance(q, torch.nn.Parameter) and split_size < extent:
        _check_shards(q, split_size, dim % q.dim())
    starts = range(0, max(extent, 1), max(split_size, 1))
    return [_slice(q, dim, start, min(start + split_size, extent)) for start in starts]


def _check_shards(q: QuantizedTensor, rows: int, dim: int) -> None:
    """Refuse to shard a parameter inside of tiles, or along its contraction axis."""
    of = f"of a quantized parameter ({q.format}) of shape {tuple(q.shape)}"
    remedy = (
        "Where fully_shard asked: shard this layer over another number of ranks, or build it under "
        "quantized_model_init(enabled=False) and call low_precision_all_gather."
    )
    if dim == q.axis:
        needed = "another axis than the contraction axis, along which its blocks run"
        remedy = f"To cut it by hand: weight.detach(), of which every part is whole blocks. {remedy}"
        raise invalid_value("split", f"axis {dim} {of}", needed, remedy)
    inner, tile = math.prod(q.codes.shape[1:-1]), (q.format.block[0] or 1) if q.format.is_tile else 1
    if not dim and rows * inner % tile:
        needed = f"multiples of {tile // math.gcd(tile, inner)} rows, so that no tile is cut"
        raise invalid_value("split", f"parts of {rows} rows {of}", needed, remedy)


@register_view(aten.split_with_sizes.default)
def _split_with_sizes(q: QuantizedTensor, split_sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    stops = [sum(split_sizes[: position + 1]) for position in range(len(split_sizes))]
    return [_slice(q, dim, stop - size, stop) for stop, size in zip(stops, split_sizes, strict=True)]


@register_view(aten.unbind.int)
def _unbind(q: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor]:
    return [_select(q, dim, index) for index in range(q.shape[dim])]


@register(aten.cat.default)
def _cat(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    """The parts side by side; tensors that keep one scale for several blocks must agree on it."""
    tensors, dim, made = table.joined(func, args, kwargs)
    first = tensors[0]
    for q in tensors[1:]:
        shapes = [(*one.shape[:dim], *one.shape[dim + 1 :]) for one in (q, first)]
        table.check_kinds("cat", first, q, *shapes)
    if len({q.is_per_expert for q in tensors}) == 2:
        raise invalid_value("tensors", "experts beside a tensor of one scale", "experts alone")
    along = -1 if dim == first.axis else _lead(first, dim)
    _check_joints(tensors, dim, along)

    def join(name: str) -> torch.Tensor:
        part, is_tensor_scale = getattr(first, name), name == "tensor_scale"
        is_of_rows = is_tensor_scale or first.format.block[1] is None
        if not part.dim() or (part.dim() == 1 and dim) or (is_of_rows and along == -1):
            scales, what = [getattr(q, name) for q in tensors], f"{first.format} tensors, whose {name}"
            # Compiled code compares them when it runs.
            common = torch.ops.microfloat.common_scale if _operators.is_tracing(part) else _common_scale
            return common(scales, what)
        if is_tensor_scale and part.dim() == 2:
            return torch.cat([q.upper.view(*q.codes.shape[:-1], 1) for q in tensors], along).view(-1, 1)
        return torch.cat([raw(getattr(q, name)) for q in tensors], along).view(part.dtype)

    codes = torch.cat([raw(q.codes) for q in tensors], along).view(first.codes.dtype)
    tensor_scale = None if first.tensor_scale is None else join("tensor_scale")
    return QuantizedTensor(
        codes, join("scale"), tensor_scale, first.cast, axis=first.axis, shape=made.shape, dtype=made.dtype
    )


def _common_scale(scales: Sequence[torch.Tensor], what: str) -> torch.Tensor:
    """A copy of the first scale, which all others must equal to the bit; `what` names their tensors in the error."""
    if not all(torch.equal(raw(scales[0]), raw(other)) for other in scales[1:]):
        raise invalid_value(
            "tensors", f"{what} is one for all blocks, and differs between them", "equal ones",
            "Join the values and quantize them: microfloat.torch.quantize(torch.cat([q.dequantize(), ...]), cast).",
        )  # fmt: skip
    return scales[0].clone()


_operators.define(
    "common_scale(Tensor[] scales, str what) -> Tensor", _common_scale, lambda scales, what: torch.empty_like(scales[0])
)


def _check_joints(tensors: Sequence[QuantizedTensor], dim: int, along: int) -> None:
    """Every tensor but the last must end with a whole block."""
    first = tensors[0]
    unit, inner = 1, 1
    if along == -1:
        unit = _contraction_unit(first)
    elif first.format.is_tile:
        unit, inner = first.format.block[0] or 1, math.prod(first.codes.shape[1:-1])
    if (along > 0 and first.format.is_tile) or any(q.shape[dim] * inner % unit for q in tensors[:-1]):
        raise invalid_value(
            "tensors", f"lengths {[q.shape[dim] for q in tensors]} along axis {dim} of {first.format}",
            f"whole blocks: multiples of {unit} along the first or the contraction axis, but for the last length",
            "Blocks cannot be torn apart; quantize the joined tensor.",
        )  # fmt: skip


@register(aten.stack.default)
def _stack(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    """Tensors beside each other; matrices along a first axis become experts, which keep their scales."""
    tensors, dim, made = table.joined(func, args, kwargs)
    first = tensors[0]
    is_of_matrices, fmt = not dim and first.dim() == 2, first.format
    rows, tile = first.codes.shape[0], fmt.block[0] or 1
    if is_of_matrices and fmt.is_tile and rows % tile and len(tensors) > 1:
        raise invalid_value(
            "stack", f"experts of {rows} rows under {fmt}",
            f"multiples of {tile} rows, so that no tile holds rows of two experts",
            "Take a format without tiles, or keep the values: leave the layer out of what is quantized.",
        )  # fmt: skip
    if not (is_of_matrices and first.upper.dim() == 0):
        return torch.cat([q.unsqueeze(dim) for q in tensors], dim)  # type: ignore[return-value]
    for q in tensors[1:]:
        table.check_kinds("stack", first, q, q.shape, first.shape)
    parts = {}
    for name, part in first.parts().items():
        join = torch.cat if name == "scale" and fmt.is_tile else torch.stack
        parts[name] = join([raw(getattr(q, name)) for q in tensors]).view(part.dtype)
    return QuantizedTensor(**parts, cast=first.cast, axis=first.axis + 1, shape=made.shape, dtype=first.dtype)
