"""Operators that write into a QuantizedTensor: bytes of its own kind, or values that its Cast quantizes."""

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from microfloat.errors import NotSupportedError
from microfloat.recipes import Cast
from microfloat.torch.tensor import custom_ops as _operators
from microfloat.torch.tensor.aten_refusals import refusal
from microfloat.torch.tensor.aten_table import (
    Arguments,
    Operator,
    Options,
    check_kinds,
    is_decay,
    raw,
    register,
    upper_name,
)
from microfloat.torch.tensor.aten_updates import requantized
from microfloat.torch.tensor.quantized_tensor import INIT_VAL, UNKNOWN, QuantizedTensor

__all__ = ["keep_init_val", "quantize_stored", "store", "take"]

aten = torch.ops.aten
_DRAWS = (aten.normal_.default, aten.uniform_.default)
_NEW_VALUES = (*_DRAWS, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor)
_PRODUCTS = (aten.mul_.Tensor, aten.div_.Tensor)
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
        take(q, q.quantized(values, is_update))  # type: ignore[attr-defined]
        return q
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
    from microfloat.torch.tensor.ops import quantize
    from microfloat.torch.tensor.seeds import draw_seed

    # Replicas of a parameter on other ranks must round alike.
    seed = draw_seed(values.device, folds=False) if cast.is_stochastic and not values.is_meta else None
    if of_experts:
        of_each = itertools.repeat(None) if amax is None else iter(amax)  # type: ignore[arg-type]
        made = [quantize(one, cast, amax=next(of_each), seed=seed) for one in values]
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


@register(
    aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.addcmul_.default,
    aten.addcdiv_.default, aten.lerp_.Scalar, aten.lerp_.Tensor, aten.zero_.default, aten.fill_.Scalar,
    aten.fill_.Tensor, aten.normal_.default, aten.uniform_.default,
)  # fmt: skip
def _in_place_arithmetic(func: Operator, args: Arguments, kwargs: Options) -> torch.Tensor:
    """Dequantize to float32, apply, requantize with the same Cast: the step of an optimizer, or an initializer.

    The weight decay that an optimizer adds to a plain gradient takes a quantized weight too.
    """
    q, *others = args
    if func is aten.add_.Tensor and is_decay(q, kwargs):
        return func(q, others[0].dequantize(), **kwargs)
    if not isinstance(q, QuantizedTensor) or any(isinstance(other, QuantizedTensor) for other in others):
        raise refusal(func, args, kwargs)
    if func not in _NEW_VALUES and q._is_shard:
        q.check_steps()  # type: ignore[attr-defined]
    widened = [other.to(torch.float32) if _is_floating(other) else other for other in others]
    values = func(q.dequantize(torch.float32), *widened, **kwargs)
    if func in _DRAWS and INIT_VAL in q._about_parameter():
        keep_init_val(q, values)
    return _store(q, values, _is_update(func, others))


def _is_update(func: Operator, others: Sequence[object]) -> bool:
    """False for new values, and for a product with one number, which is exact in float32 scales: no code changes."""
    if func in _NEW_VALUES:
        return False
    return func not in _PRODUCTS or any(isinstance(one, torch.Tensor) and one.dim() for one in others)


def keep_init_val(q: QuantizedTensor, values: torch.Tensor) -> None:
    """Keep a CPU copy of initial values, or on the meta device the wish for one, until values are drawn."""
    q._about_parameter()[INIT_VAL] = None if values.is_meta else values.to("cpu", copy=True)


def store(q: QuantizedTensor, values: torch.Tensor, flag: torch.Tensor | None = None) -> None:
    """Quantize plain values into q.

    `flag`: one number that the device alone reads; where it is not zero, nothing changes.
    """
    written = q if flag is None else q.map_parts(torch.clone)
    _store(written, values)
    if flag is not None:
        take(q, written, flag)


def take(q: QuantizedTensor, fresh: QuantizedTensor, flag: torch.Tensor | None = None) -> None:
    """Copy the bytes of `fresh`, of q's kind, unless `flag` says otherwise."""
    for part, new in zip(q.part_list(), fresh.part_list(), strict=True):
        kept = raw(part)
        kept.copy_(raw(new) if flag is None else torch.where(flag.reshape(()).to(kept.device) != 0, kept, raw(new)))


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
