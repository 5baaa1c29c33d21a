"""Operators that write into a QuantizedTensor: bytes of its own kind, or values that its Cast quantizes."""

import functools
import math
from collections.abc import Sequence

import torch
from torch.utils._pytree import tree_leaves

from microfloat.errors import NotSupportedError
from microfloat.recipes import Cast
from microfloat.torch import _operators
from microfloat.torch._tensor_ops.table import (
    Arguments,
    Operator,
    Options,
    check_kinds,
    check_rows,
    is_decay,
    raw,
    refusal,
    refuse_experts,
    register,
    register_family,
    upper_name,
    values_of_weights,
)
from microfloat.torch._tensor_ops.updates import code_mask, requantized
from microfloat.torch.tensor import INIT_VAL, UNKNOWN, QuantizedTensor

__all__ = ["keep_init_val", "quantize_stored", "store_all", "store_shard", "take"]

aten = torch.ops.aten
_AVERAGES = (aten.lerp_.Scalar, aten.lerp_.Tensor, aten._foreach_lerp_.Scalar, aten._foreach_lerp_.ScalarList,
             aten._foreach_lerp_.List)  # fmt: skip
_DRAWS = (aten.normal_.default, aten.uniform_.default)
_NEW_VALUES = (*_DRAWS, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten._foreach_zero_.default)
_PRODUCTS = ("aten::mul_", "aten::div_", "aten::_foreach_mul_", "aten::_foreach_div_")
_ROUNDING = 1 + 2.0**-20  # an amax that went through a scale and back may come out a little smaller


@register(aten.copy_.default)
def _copy(func: Operator, args: Arguments, kwargs: Options) -> torch.Tensor:
    """From a QuantizedTensor of the same kind: the bytes. From a plain tensor: quantized with this one's Cast."""
    destination, source = args[0], args[1]
    if not isinstance(destination, QuantizedTensor):
        raise refusal(func, args, kwargs)
    if not isinstance(source, QuantizedTensor):
        return _store(destination, source.expand(destination.shape))
    check_kinds("copy_", destination, source, tuple(source.shape), tuple(destination.shape))
    if destination.codes.is_meta:
        return destination
    if not _shares_a_scale(destination):
        for name, part in destination.parts().items():
            part.copy_(source.parts()[name])
        return destination
    if _takes_bytes(destination, source):
        return destination
    return _store(destination, source.dequantize(torch.float32))


def _takes_bytes(q: QuantizedTensor, source: QuantizedTensor) -> bool:
    """Copy the bytes of `source` into a slice whose scales serve the rest of its root too; False where they cannot.

    They can where the scales that q shares are those of `source`, and where nothing but zeros shares them: then they
    become those of `source`. So a tensor of zeros is filled slice by slice without rounding anything twice.
    """
    name = upper_name(q)
    ours, theirs = getattr(q, name), getattr(source, name)
    if _operators.is_tracing(q.codes):
        return False
    theirs = theirs.to(ours.device)
    is_equal = raw(ours) == raw(theirs)
    if not bool(is_equal.all()):
        root = q.root
        if root is not None and root is not UNKNOWN and root._is_filled and not ours.dim():
            raw(root.codes).zero_()
        is_free = _alone_under_scales(q)
        if is_free is None or not bool((is_equal | is_free).all()):
            return False
        ours.copy_(theirs)
    for part_name, part in q.parts().items():
        if part_name != name:
            part.copy_(source.parts()[part_name])
    return True


def _alone_under_scales(q: QuantizedTensor) -> torch.Tensor | None:
    """For each scale that the slice q shares, True where the rest of its root under it is zeros; None if unknown."""
    root, name = q.root, upper_name(q)
    if root is None or root is UNKNOWN:
        return None
    own, whole = getattr(q, name), getattr(root, name)
    if own.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return None
    counts = torch.empty_strided(whole.shape, whole.stride(), dtype=torch.int64, device=q.device)
    counts.copy_(_nonzero_bytes(root, root.codes, whole))
    in_root = counts.as_strided(own.shape, own.stride(), own.storage_offset() - whole.storage_offset())
    return in_root == _nonzero_bytes(q, q.codes, own)


def _store(q: QuantizedTensor, values: torch.Tensor, is_update: bool = False) -> QuantizedTensor:
    """Quantize plain `values` with q's Cast, into q's storage; a scale that q shares with its root is the root's.

    An update of q's own values keeps float32 scales that still serve (`requantized`).
    """
    values = values.to(device=q.device, dtype=torch.float32)
    if q._is_shard:
        return store_all([q], [values], is_update=is_update)[0]
    if not _shares_a_scale(q):
        if is_update:
            take(q, requantized(q, _along_axis(q, values), functools.partial(_quantized_as, q)))
            return q
        return _overwrite(q, values)
    is_of_rows = q.upper.dim() == 2
    if is_of_rows and not _operators.is_tracing(q.codes) and _takes_bytes(q, _quantized_like(q, values, None)):
        return q
    _check_shared(q)
    amax = _shared_amax(q.root, q.codes, values)  # type: ignore[arg-type]
    return _overwrite(q, values, amax, kept=upper_name(q))


def _overwrite(
    q: QuantizedTensor, values: torch.Tensor, amax: float | None = None, kept: str | None = None
) -> QuantizedTensor:
    """Quantize `values`, under a tensor amax if one is given, into the parts of q but the `kept` one."""
    fresh = _quantized_like(q, values, amax).parts()
    for name, part in q.parts().items():
        if name != kept:
            part.copy_(fresh[name])
    return q


def _quantized_like(q: QuantizedTensor, values: torch.Tensor, amax: float | None) -> QuantizedTensor:
    """Plain `values` of q's shape, or of its rows, under q's Cast: the parts are those of q."""
    return quantize_stored(_along_axis(q, values), q.cast, amax, q.is_per_expert)


def _quantized_as(q: QuantizedTensor, values: torch.Tensor, cast: Cast, amax: torch.Tensor | None) -> QuantizedTensor:
    return quantize_stored(values, cast, amax, q.is_per_expert)


def _along_axis(q: QuantizedTensor, values: torch.Tensor) -> torch.Tensor:
    """Values of q's shape with the contraction axis last, as codes have it."""
    return values if q.axis == max(q.dim() - 1, 0) else values.movedim(q.axis, -1)


def quantize_stored(
    values: torch.Tensor, cast: Cast, amax: float | torch.Tensor | None = None, of_experts: bool = False
) -> QuantizedTensor:
    """Plain `values` under `cast`, or those of experts [E, N, K], each alone, as the codes of a parameter."""
    from microfloat.torch.ops import quantize
    from microfloat.torch.seeds import draw_seed

    # Replicas of a parameter on other ranks must round alike.
    seed = draw_seed(values.device, folds=False) if cast.is_stochastic and not values.is_meta else None
    if of_experts:
        each = [None] * len(values) if amax is None else amax  # type: ignore[assignment]
        made = [quantize(one, cast, amax=own, seed=seed) for one, own in zip(values, each, strict=True)]
        return torch.stack(made)  # type: ignore[return-value]
    return quantize(values, cast, amax=amax, seed=seed)


def _shares_a_scale(q: QuantizedTensor) -> bool:
    """A slice of a tensor whose scale, tensor scale or row scales serve elements outside of the slice too."""
    root, upper = q.root, q.upper
    if root is None or upper.dim() < 2:
        return root is not None
    if q.format.block[1] is not None and q.tensor_scale is None:
        return False  # blocks are never torn
    if root is UNKNOWN or q.shape[q.axis] != root.shape[root.axis]:
        return True
    own = root.upper
    return upper.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()  # row scales in another order


def _check_shared(q: QuantizedTensor) -> None:
    """Refuse writes into part of a tensor where nothing says how to quantize under its scale."""
    is_known = q.format.scale.name == "FP32" or q.cast.rule.two_level is not None
    is_alone = q.root is None or (q.root is not UNKNOWN and not q.root._is_shard)
    is_whole = q.upper.dim() == 0 and is_alone
    if not (is_known and is_whole) or q.hadamard or _operators.is_tracing(q.codes):
        raise NotSupportedError(
            f"write into a slice: got {tuple(q.shape)} of a QuantizedTensor ({q.format}) that shares scales with the "
            "rest of it, needed whole rows cut along the first axis, no Hadamard transform, and eager mode, or "
            "quantized values under the same scales. Write the whole tensor instead: q.copy_(values)."
        )


def _shared_amax(root: QuantizedTensor, codes: torch.Tensor, values: torch.Tensor) -> float:
    """The amax behind the scale of the whole `root`, which covers `values` when this returns.

    `codes`: those that the values will replace. A scale that is too small grows by a power of two, under which the
    codes of the root keep their values (down to subnormals). Where nothing but zeros stays, it becomes that of
    `values`.
    """
    two_level = root.cast.rule.two_level
    upper = float(root.upper)
    held = upper * (root.format.element.max if two_level is None else two_level.capacity)
    finite = values.masked_fill(~values.isfinite(), 0.0)
    needed = float(finite.abs().amax()) if values.numel() else 0.0
    if not 0.0 < held < math.inf or int(_nonzero_bytes(root, root.codes)) == int(_nonzero_bytes(root, codes)):
        amax = needed
    elif needed <= held * _ROUNDING:
        return held
    else:
        amax = min(held * 2.0 ** math.ceil(math.log2(needed / held)), torch.finfo(torch.float32).max)
    _overwrite(root, root.dequantize(torch.float32), amax)
    return amax


def _nonzero_bytes(q: QuantizedTensor, codes: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """The number of bytes of `codes` that hold anything but zeros, of either sign; under each of `scales`, if given."""
    sign = q.format.element.sign_code
    signs = sign | sign << 4 if q.format.element.codes_per_byte == 2 else sign
    is_nonzero = codes.view(torch.uint8).bitwise_and(~signs & 0xFF) != 0
    if scales is None or not scales.dim():
        return is_nonzero.sum()
    if scales.dim() == 1:  # one for each expert
        return is_nonzero.flatten(1).sum(1)
    return is_nonzero.sum(-1).view(scales.shape)


@register(aten.index_put_.default)
def _index_put(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    """Replace whole rows, chosen by indices or masks of the leading axes, by plain or quantized ones."""
    q, indices, values, *accumulate = args
    if isinstance(q, QuantizedTensor):
        refuse_experts(q, "index_put_")
    if not isinstance(q, QuantizedTensor) or any(accumulate) or kwargs.get("accumulate"):
        raise refusal(func, args, kwargs)
    leading, rows = q.shape[:-1], check_rows(q, indices)
    is_shared = _shares_a_scale(q) or q.upper.dim() == 0
    if isinstance(values, QuantizedTensor):
        replaced_shape = (*rows.shape, q.shape[-1])
        if values.numel() == math.prod(replaced_shape):  # torch leaves leading axes of one entry away
            replaced_shape = replaced_shape[-values.dim() :]
        elif values.dim() <= len(replaced_shape):
            values = values.expand(replaced_shape)
        check_kinds("index_put_", q, values, tuple(values.shape), replaced_shape)  # type: ignore[arg-type]
    if is_shared or not isinstance(values, QuantizedTensor):
        plain = values.dequantize(torch.float32) if isinstance(values, QuantizedTensor) else values
        values = plain.to(device=q.device, dtype=torch.float32).expand(*rows.shape, q.shape[-1])
    places, amax, kept = torch.unravel_index(rows.reshape(-1), leading), None, None
    if is_shared:
        _check_shared(q)
        replaced = raw(q.codes)[torch.unravel_index(rows.unique(), leading)]
        amax, kept = _shared_amax(q if q.root is None else q.root, replaced, values), upper_name(q)
    if not isinstance(values, QuantizedTensor):
        values = _quantized_like(q, values.reshape(rows.numel(), q.shape[-1]), amax)
    for name, part in q.parts().items():
        if name != kept:
            fresh = raw(values.parts()[name])
            at = (rows.reshape(-1),) if name == "tensor_scale" else places
            raw(part)[at] = fresh.reshape(rows.numel(), fresh.shape[-1])
    return q


@register(
    aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.addcmul_.default,
    aten.addcdiv_.default, aten.lerp_.Scalar, aten.lerp_.Tensor, aten.zero_.default, aten.fill_.Scalar,
    aten.fill_.Tensor, aten.normal_.default, aten.uniform_.default,
)  # fmt: skip
def _in_place_arithmetic(func: Operator, args: Arguments, kwargs: Options) -> torch.Tensor:
    """Dequantize to float32, apply, requantize with the same Cast, as the step of an optimizer does.

    Averages, which `lerp_` makes of weights of one kind, take quantized sources too, and so does the weight decay that
    is added to a plain gradient.
    """
    q = args[0]
    others = args[1:]
    if func is aten.add_.Tensor and is_decay(q, kwargs):
        return func(q, values_of_weights(others[0]), **kwargs)
    if func in _AVERAGES:
        others = [one.dequantize(torch.float32) if isinstance(one, QuantizedTensor) else one for one in others]
        if not isinstance(q, QuantizedTensor):
            return func(q, *(one.to(q.dtype) if _is_floating(one) else one for one in others), **kwargs)
    if not isinstance(q, QuantizedTensor) or any(isinstance(other, QuantizedTensor) for other in others):
        raise refusal(func, args, kwargs)
    widened = [other.to(torch.float32) if _is_floating(other) else other for other in others]
    values = func(q.dequantize(torch.float32), *widened, **kwargs)
    if func in _DRAWS and INIT_VAL in q._about_parameter():
        keep_init_val(q, values)
    return _store(q, values, _is_update(func, others))


def _is_update(func: Operator, others: object) -> bool:
    """False for new values, and for a product with one number, which is exact in float32 scales: no code changes."""
    if func in _NEW_VALUES:
        return False
    factors = [one for one in tree_leaves(others) if isinstance(one, torch.Tensor)]
    return func._schema.name not in _PRODUCTS or any(one.dim() for one in factors)


def keep_init_val(q: QuantizedTensor, values: torch.Tensor) -> None:
    """Keep a CPU copy of initial values, or on the meta device the wish for one, until values are drawn."""
    q._about_parameter()[INIT_VAL] = None if values.is_meta else values.to("cpu", copy=True)


@register_family(r"aten::_foreach_\w+_")  # in place
def _in_place_lists(func: Operator, args: Arguments, kwargs: Options) -> None:
    """`_in_place_arithmetic` of every tensor of a list: the ``torch._foreach_*_`` functions."""
    targets, *others = args
    if func in _AVERAGES:
        plain = [one.dequantize(one.dtype) if isinstance(one, QuantizedTensor) else one for one in others[0]]
        others = [plain, *others[1:]]
    elif func is aten._foreach_add_.List and is_decay(targets, kwargs):
        others = [values_of_weights(others[0])]
    if any(isinstance(value, QuantizedTensor) for value in tree_leaves((others, kwargs))):
        raise refusal(func, args, kwargs)
    quantized = [isinstance(target, QuantizedTensor) for target in targets]

    def widened(value: object) -> object:
        if not isinstance(value, list | tuple):
            return value
        pairs = zip(value, quantized, strict=True)
        return [one.to(torch.float32) if its and _is_floating(one) else one for one, its in pairs]

    wide = [q.dequantize(torch.float32) if its else q for q, its in zip(targets, quantized, strict=True)]
    func(wide, *(widened(value) for value in others), **{name: widened(value) for name, value in kwargs.items()})
    made = [(q, values) for q, values, its in zip(targets, wide, quantized, strict=True) if its]
    store_all([q for q, _ in made], [values for _, values in made], is_update=_is_update(func, others))


@register_family(r"aten::_fused_(adam|adamw|sgd|adagrad)_")
def _fused_step(func: Operator, args: Arguments, kwargs: Options) -> None:
    """The step of a fused optimizer, on values in the presented dtype, which the kernel asks all tensors to share.

    Where `found_inf` says so the step changes nothing, no byte of the codes either.
    """
    targets, *others = args
    if any(isinstance(value, QuantizedTensor) for value in tree_leaves(others)):
        raise refusal(func, args, kwargs)
    plain = [q.dequantize() if isinstance(q, QuantizedTensor) else q for q in targets]
    func(plain, *others, **kwargs)
    made = [(q, values) for q, values in zip(targets, plain, strict=True) if isinstance(q, QuantizedTensor)]
    store_all([q for q, _ in made], [values for _, values in made], kwargs.get("found_inf"), is_update=True)


def store_all(
    targets: Sequence[QuantizedTensor], values: Sequence[torch.Tensor], flag: torch.Tensor | None = None, *,
    is_update: bool = False,
) -> Sequence[QuantizedTensor]:  # fmt: skip
    """Quantize plain values into tensors, which are returned; the amaxes of shards go through one all-reduce.

    `flag`: one number that the device alone reads; where it is not zero, nothing changes. `is_update`: the values are
    those of the tensors after a step, which keeps float32 scales that still serve.
    """
    written = targets if flag is None else [q.map_parts(torch.clone) for q in targets]
    shards = [(q, own) for q, own in zip(written, values, strict=True) if q._is_shard]
    for q, own in zip(written, values, strict=True):
        if not q._is_shard:
            _store(q, own, is_update)
    if shards:
        store = type(shards[0][0]).store_all  # type: ignore[attr-defined]
        store([q for q, _ in shards], [own for _, own in shards], is_update)
    if flag is not None:
        for q, fresh in zip(targets, written, strict=True):
            take(q, fresh, flag)
    return targets


def take(q: QuantizedTensor, fresh: QuantizedTensor, flag: torch.Tensor | None = None) -> None:
    """Copy the bytes of `fresh`, of q's kind, unless `flag` says otherwise."""
    for part, new in zip(q.part_list(), fresh.part_list(), strict=True):
        kept = raw(part)
        kept.copy_(raw(new) if flag is None else torch.where(flag.reshape(()).to(kept.device) != 0, kept, raw(new)))


def store_shard(
    q: QuantizedTensor, shard: torch.Tensor, offset: int, group: torch.distributed.ProcessGroup,
    flag: torch.Tensor | None,
) -> None:  # fmt: skip
    """Quantize this rank's part of the flattened values, under scales that all ranks agree on, and share the codes.

    Where other ranks have the elements of a block, its amax stands in their place: the scales, and the codes of the
    shard, are then those of the whole.
    """
    rows, columns = math.prod(q.shape[:-1]), q.shape[-1]
    height = q.format.block[0] or (q.shape[-2] if q.is_per_expert else rows)
    width = q.format.block[1] or columns
    values = torch.zeros(rows * columns, dtype=torch.float32, device=q.device)
    inside = torch.zeros(rows * columns, dtype=torch.bool, device=q.device)
    values[offset : offset + shard.numel()] = shard.reshape(-1).to(values)
    inside[offset : offset + shard.numel()] = True
    values, inside = values.view(rows, columns), inside.view(rows, columns)
    padded = torch.nn.functional.pad(values.abs(), (0, -columns % width, 0, -rows % height))
    amaxes = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width).amax((1, 3))
    torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group)
    spread = amaxes.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    fresh = _quantized_like(q, torch.where(inside, values, spread).view(q.shape), None)
    codes = fresh.codes.view(torch.uint8)
    own = codes & code_mask(inside, q.format).view(codes.shape)
    torch.distributed.all_reduce(own, torch.distributed.ReduceOp.SUM, group)
    codes.copy_(own)
    take(q, fresh, flag)


@register(aten._foreach_copy_.default)
def _copy_lists(func: Operator, args: Arguments, kwargs: Options) -> None:
    for destination, source in zip(args[0], args[1], strict=True):
        destination.copy_(source)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
