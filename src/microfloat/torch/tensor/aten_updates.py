"""Requantization of a tensor that small steps change: float32 scales that still serve are kept (docs/numerics.md 7.4).

A fresh scale is that of the largest element after its step. Where steps are too small to change codes it would grow
with every one of them, and all values with it.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import torch

from microfloat.formats import E4M3, ScaledFormat
from microfloat.recipes import Cast, Current
from microfloat.torch import backends
from microfloat.torch.tensor import custom_ops as _operators
from microfloat.torch.tensor.aten_table import raw, upper_name
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

__all__ = ["requantized"]

# Plain values in operand order, a Cast, and an amax or None.
Quantize: TypeAlias = Callable[[torch.Tensor, Cast, torch.Tensor | None], QuantizedTensor]


def requantized(q: QuantizedTensor, values: torch.Tensor, quantize: Quantize) -> QuantizedTensor:
    """The values of q after an update, float32 in operand order, under q's Cast and its scales that still serve."""
    cast = q.cast
    if not _inflates(cast) or not values.numel():
        return quantize(values, cast, None)
    largest = cast.format.element.max if cast.rule.two_level is None else cast.rule.two_level.capacity
    if cast.takes_amax:
        measured = _amax(q, values)
        is_kept = _serves(q, measured, largest)
        made = quantize(values, cast, torch.where(is_kept, q.upper * largest, measured))
    else:
        made = quantize(values, cast, None)
        is_kept = _serves(q, made.scale * largest, largest)
        # Codes under given scales are those of the scaled values under a scale of one.
        unit = dataclasses.replace(cast, format=dataclasses.replace(cast.format, block=(None, None)), scaling=Current())
        scaled = values * _spread(q, 1 / q.scale).view(values.shape)
        kept = raw(quantize(scaled, unit, torch.full((), largest, device=values.device)).codes)
        mask = _code_mask(_spread(q, is_kept), cast.format).view(kept.shape)
        raw(made.codes).copy_(kept & mask | raw(made.codes) & ~mask)
    name = upper_name(q)
    setattr(made, name, torch.where(is_kept, getattr(q, name), getattr(made, name)))
    return made


def _inflates(cast: Cast) -> bool:
    """True for float32 scales that follow the amax continuously; powers of two do not change the values of codes."""
    rule, levels = cast.rule, cast.rule.two_level
    if cast.hadamard is not None or cast.is_static:
        return False
    return rule.kind == "ratio" and not rule.power_of_two if levels is None else levels.tensor_scale


def _serves(q: QuantizedTensor, amax: torch.Tensor, largest: float) -> torch.Tensor:
    """For each float32 scale True while `amax` encodes to the top code under it, or is smaller, down to a half.

    The top code is that of elements, or of the block scales between.
    """
    top = q.format.element if q.cast.rule.two_level is None else E4M3
    half_step = 2.0 ** (top.emax - top.mantissa_bits - 1)
    if isinstance(q.cast.scaling, Current) and q.cast.scaling.amax_epsilon:
        amax = amax.clamp_min(q.cast.scaling.amax_epsilon)
    held = q.upper * largest
    return (amax >= held * 0.5) & (amax < held * (1 + half_step / top.max))


def _amax(q: QuantizedTensor, values: torch.Tensor) -> torch.Tensor:
    """The amax of each scope of the float32 scales of q; NaN is ignored."""
    if q.upper.dim() == 0 and not _operators.is_tracing(values):
        matrix = values.reshape(-1, values.shape[-1] if values.dim() else 1)
        return backends.choose("auto", values.device).amax(matrix).reshape(())
    magnitudes = values.abs().masked_fill(values.isnan(), 0.0)
    if q.upper.dim() == 1:  # one for each expert
        return magnitudes.flatten(1).amax(1)
    return magnitudes.amax() if q.upper.dim() == 0 else magnitudes.reshape(-1, values.shape[-1]).amax(-1, keepdim=True)


def _spread(q: QuantizedTensor, scale: torch.Tensor) -> torch.Tensor:
    """An entry for each block as one for each element, [R, C]."""
    operand, (height, width) = q.to_operand(), q.format.block
    scale = scale.reshape(operand.scale.shape).repeat_interleave(height or operand.rows, 0)[: operand.rows]
    return scale.repeat_interleave(width or operand.length, 1)[:, : operand.length]


def _code_mask(chosen: torch.Tensor, fmt: ScaledFormat) -> torch.Tensor:
    """Bytes of codes whose bits are set for the chosen elements of [R, C]."""
    mask = chosen.to(torch.uint8) * 0xFF
    if fmt.element.codes_per_byte == 1:
        return mask
    mask = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 2))
    return (mask[:, 0::2] & 0x0F) | (mask[:, 1::2] & 0xF0)
