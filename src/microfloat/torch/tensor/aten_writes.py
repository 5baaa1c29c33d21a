"""Operators that write into a QuantizedTensor: bytes of its kind, values to quantize, or updates of its values."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from microfloat.errors import NotSupportedError
from microfloat.formats import ScaledFormat
from microfloat.recipes import Cast, Current
from microfloat.torch import backends
from microfloat.torch._typing import Arguments, Options
from microfloat.torch.reference._grid import spread
from microfloat.torch.tensor import custom_ops as _operators
from microfloat.torch.tensor.aten_table import Operator, check_kinds, is_decay, raw, refusal, register, take
from microfloat.torch.tensor.ops import quantize
from microfloat.torch.tensor.quantized_tensor import INIT_VAL, UNKNOWN, QuantizedTensor
from microfloat.torch.tensor.seeds import draw_seed

# Plain values in operand order, a Cast, and an amax or None.
Quantize: TypeAlias = Callable[[torch.Tensor, Cast, torch.Tensor | None], QuantizedTensor]

aten = torch.ops.aten
_DRAWS = (aten.normal_.default, aten.uniform_.default)
_NEW_VALUES = (*_DRAWS, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor)
_PRODUCTS = (aten.mul_.Tensor, aten.div_.Tensor)
_ROUNDING = 1 + 2.0**-20  # an amax that went through a scale and back may come out a little smaller


@register(aten.copy_.default)
def _copy(func: Operator, args: Arguments, kwargs: Options) -> torch.Tensor:
    """From a QuantizedTensor of the same kind: the bytes. From a plain tensor: quantized with this one's Cast."""
    q, source = args[0], args[1]
    if not isinstance(q, QuantizedTensor):
        raise refusal(func, args, kwargs)
    if not isinstance(source, QuantizedTensor):
        return _store(q, source.expand(q.shape))
    check_kinds("copy_", q, source, source.shape, q.shape)
    if q.codes.is_meta:
        return q
    if not _shares_a_scale(q):
        _copy_parts(q, source)
        return q
    return q if _takes_bytes(q, source) else _store(q, source.dequantize(torch.float32))


def _takes_bytes(q: QuantizedTensor, source: QuantizedTensor) -> bool:
    """Copy the bytes of `source` into a slice whose scales serve the rest of its root too; False where that fails.

    The bytes fit where q and `source` have equal scales. Where nothing but zeros shares a scale of q, it becomes that
    of `source`, so that a tensor of zeros is filled slice by slice without rounding anything twice.
    """
    if _operators.is_tracing(q.codes):
        return False
    name, ours = _upper_name(q), q.upper
    theirs = source.upper.to(ours.device)
    is_equal = raw(ours) == raw(theirs)
    if not bool(is_equal.all()):
        root = q.root
        if root is not None and root is not UNKNOWN and root._is_filled and not ours.dim():
            raw(root.codes).zero_()
        is_free = _alone_under_scales(q)
        if is_free is None or not bool((is_equal | is_free).all()):
            return False
        ours.copy_(theirs)
    _copy_parts(q, source, kept=name)
    return True


def _copy_parts(q: QuantizedTensor, source: QuantizedTensor, kept: str | None = None) -> None:
    """Copy all parts of `source` into q but the `kept` one."""
    for name, part in q.parts().items():
        if name != kept:
            part.copy_(getattr(source, name))


def _upper_name(q: QuantizedTensor) -> str:
    """The name of `q.upper`, the part that the most elements share."""
    return "scale" if q.tensor_scale is None else "tensor_scale"


def _alone_under_scales(q: QuantizedTensor) -> torch.Tensor | None:
    """For each scale of the slice q, True if all other elements of its root under that scale are 0; None if unknown."""
    root = q.root
    if root is None or root is UNKNOWN:
        return None
    own, whole = q.upper, root.upper
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
    elif not _shares_a_scale(q):
        if is_update:
            quantize = functools.partial(quantize_stored, of_experts=q.is_per_expert)
            take(q, requantized(q, _along_axis(q, values), quantize))
        else:
            _overwrite(q, values)
    elif not (q.upper.dim() == 2 and not _operators.is_tracing(q.codes) and _takes_bytes(q, _quantized(q, values))):
        _check_shared(q)
        _overwrite(q, values, _shared_amax(q.root, q.codes, values), kept=_upper_name(q))  # type: ignore[arg-type]
    return q


def _overwrite(q: QuantizedTensor, values: torch.Tensor, amax: float | None = None, kept: str | None = None) -> None:
    """Quantize `values`, under a tensor amax if one is given, into the parts of q but the `kept` one."""
    _copy_parts(q, _quantized(q, values, amax), kept)


def _quantized(q: QuantizedTensor, values: torch.Tensor, amax: float | None = None) -> QuantizedTensor:
    """Plain `values` of q's shape, or of its rows, under q's Cast."""
    return quantize_stored(_along_axis(q, values), q.cast, amax, q.is_per_expert)


def _along_axis(q: QuantizedTensor, values: torch.Tensor) -> torch.Tensor:
    """Values of q's shape with the contraction axis last, as codes have it."""
    return values if q.axis == max(q.dim() - 1, 0) else values.movedim(q.axis, -1)


def quantize_stored(
    values: torch.Tensor, cast: Cast, amax: float | torch.Tensor | None = None, of_experts: bool = False
) -> QuantizedTensor:
    """Plain `values` as the codes of a parameter under `cast`; experts [E, N, K] are quantized separately."""
    # Replicas of a parameter on other ranks must round alike.
    seed = draw_seed(values.device, folds=False) if cast.is_stochastic and not values.is_meta else None
    if not of_experts:
        return quantize(values, cast, amax=amax, seed=seed)
    amaxes = [None] * len(values) if amax is None else amax
    made = [quantize(one, cast, amax=its, seed=seed) for one, its in zip(values, amaxes, strict=True)]  # type: ignore[arg-type]
    return torch.stack(made)  # type: ignore[return-value]


def _shares_a_scale(q: QuantizedTensor) -> bool:
    """True for a slice that shares its scale, tensor scale or row scales with elements outside of it."""
    root, upper = q.root, q.upper
    if root is None or upper.dim() < 2:
        return root is not None
    if q.format.block[1] is not None and q.tensor_scale is None:
        return False  # no slice cuts a block
    if root is UNKNOWN or q.shape[q.axis] != root.shape[root.axis]:
        return True
    return upper.untyped_storage().data_ptr() != root.upper.untyped_storage().data_ptr()  # row scales in another order


def _check_shared(q: QuantizedTensor) -> None:
    """Refuse writes into part of a tensor where its scale does not say how to quantize."""
    has_amax = q.format.scale.name == "FP32" or q.cast.rule.two_level is not None
    is_alone = q.root is None or (q.root is not UNKNOWN and not q.root._is_shard)
    if not (has_amax and is_alone and q.upper.dim() == 0) or q.hadamard or _operators.is_tracing(q.codes):
        raise NotSupportedError(
            f"write into a slice: got {tuple(q.shape)} of a QuantizedTensor ({q.format}) that shares scales with the "
            "rest of it, needed whole rows cut along the first axis, no Hadamard transform, and eager mode, or "
            "quantized values under the same scales. Write the whole tensor instead: q.copy_(values)."
        )


def _shared_amax(root: QuantizedTensor, codes: torch.Tensor, values: torch.Tensor) -> float:
    """The amax behind the scale of the whole `root`, which covers `values` when this returns.

    `codes`: the codes that the values will replace. A scale that is too small grows by a power of two, under which the
    codes of the root keep their values (down to subnormals). Where nothing but zeros stays, it becomes that of
    `values`.
    """
    held = float(root.upper) * _largest(root.cast)
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


def _largest(cast: Cast) -> float:
    """The largest magnitude that codes hold under a float32 scale of one."""
    return cast.format.element.max if cast.rule.two_level is None else cast.rule.two_level.capacity


def _nonzero_bytes(q: QuantizedTensor, codes: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """The number of bytes of `codes` with a nonzero element; under each of `scales`, if there are any."""
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
    aten.addcdiv_.default, aten.lerp_.Scalar, aten.lerp_.Tensor, *_NEW_VALUES,
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
    tensors = [other for other in others if isinstance(other, torch.Tensor)]
    widened = [one.float() if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in others]
    values = func(q.dequantize(torch.float32), *widened, **kwargs)
    if func in _DRAWS and INIT_VAL in q._about_parameter():
        keep_init_val(q, values)
    # A product with one number is exact in float32 scales: no code changes.
    is_update = func not in _NEW_VALUES and (func not in _PRODUCTS or any(one.dim() for one in tensors))
    return _store(q, values, is_update)


def keep_init_val(q: QuantizedTensor, values: torch.Tensor) -> None:
    """Keep a CPU copy of initial values; on the meta device only a mark to keep one when values are drawn."""
    q._about_parameter()[INIT_VAL] = None if values.is_meta else values.to("cpu", copy=True)


# Updates by small steps, which keep float32 scales that still serve (docs/numerics.md 7.4).
#
# A fresh scale is that of the largest element after its step. Where steps are too small to change codes it would grow
# with every one of them, and all values with it.


def requantized(q: QuantizedTensor, values: torch.Tensor, quantize: Quantize) -> QuantizedTensor:
    """The values of q after an update, float32 in operand order, under q's Cast and its scales that still serve."""
    cast, rule, levels = q.cast, q.cast.rule, q.cast.rule.two_level
    # Of float32 scales that follow the amax continuously; powers of two do not change the values of codes.
    inflates = rule.kind == "ratio" and not rule.power_of_two if levels is None else levels.tensor_scale
    if not inflates or cast.hadamard is not None or cast.is_static or not values.numel():
        return quantize(values, cast, None)
    largest = _largest(cast)
    if cast.takes_amax:
        measured = _amax(q, values)
        is_kept = _serves(q, measured, largest)
        made = quantize(values, cast, torch.where(is_kept, q.upper * largest, measured))
    else:
        made = quantize(values, cast, None)
        is_kept = _serves(q, made.scale * largest, largest)
        # Codes under kept scales are equal to the codes of scaled values under a scale of one.
        unit = dataclasses.replace(cast, format=dataclasses.replace(cast.format, block=(None, None)), scaling=Current())
        operand = q.to_operand()
        size = operand.rows, operand.length
        scaled = values * spread(1 / operand.scale, cast.format.block, size).view(values.shape)
        kept = raw(quantize(scaled, unit, torch.full((), largest, device=values.device)).codes)
        mask = _code_mask(spread(is_kept.reshape(operand.scale.shape), cast.format.block, size), cast.format).view(
            kept.shape
        )
        raw(made.codes).copy_(kept & mask | raw(made.codes) & ~mask)
    setattr(made, _upper_name(q), torch.where(is_kept, q.upper, made.upper))
    return made


def _serves(q: QuantizedTensor, amax: torch.Tensor, largest: float) -> torch.Tensor:
    """For each float32 scale True while `amax` encodes to the top code under it, or is smaller, down to a half.

    The top code is the largest code of an element, or of a block scale where there are two levels.
    """
    top = q.format.element if q.cast.rule.two_level is None else q.format.scale.element
    half_step = 2.0 ** (top.emax - top.mantissa_bits - 1)
    if isinstance(q.cast.scaling, Current) and q.cast.scaling.amax_epsilon:
        amax = amax.clamp_min(q.cast.scaling.amax_epsilon)
    held = q.upper * largest
    return (amax >= held * 0.5) & (amax < held * (1 + half_step / top.max))


def _amax(q: QuantizedTensor, values: torch.Tensor) -> torch.Tensor:
    """The amax of each scope of the float32 scales of q; NaN is ignored."""
    if q.upper.dim() == 0 and not _operators.is_tracing(values):
        return backends.amax_of(values)
    magnitudes = values.abs().masked_fill(values.isnan(), 0.0)
    if q.upper.dim() == 1:  # one for each expert
        return magnitudes.flatten(1).amax(1)
    return magnitudes.amax() if q.upper.dim() == 0 else magnitudes.reshape(-1, values.shape[-1]).amax(-1, keepdim=True)


def _code_mask(chosen: torch.Tensor, fmt: ScaledFormat) -> torch.Tensor:
    """Bytes of codes whose bits are set for the chosen elements of [R, C]."""
    mask = chosen.to(torch.uint8) * 0xFF
    if fmt.element.codes_per_byte == 1:
        return mask
    mask = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 2))
    return (mask[:, 0::2] & 0x0F) | (mask[:, 1::2] & 0xF0)
