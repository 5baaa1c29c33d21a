"""Amax -> stored scale and encode factor in torch operations, one function per family of rules (docs/numerics.md 2).

Amaxes arrive as integer bits, since integers order like magnitudes and say exactly what NaN does. Powers of two are
made on bits; every float32 operation is a single torch op, rounded once. Division is always tensor by tensor: torch
turns ``number / tensor`` (and on CUDA ``tensor / number``) into a multiplication by a reciprocal.
"""

from dataclasses import dataclass

import torch

from microfloat.formats import ElementFormat, ScaledFormat, ScaleFormat
from microfloat.recipes import Cast, Current
from microfloat.scale_rules import TwoLevel, e8m0_threshold
from microfloat.torch.reference._elements import code_values, encode_integer
from microfloat.torch.reference._grid import Chunk, Workspace, reads_values

FMAX = 3.4028234663852886e38
INFINITY_BITS = 0x7F800000


@dataclass(frozen=True)
class BlockScales:
    """Per block: the stored scale, the factor that elements are multiplied with, and which blocks are NaN throughout.

    `is_nan` None: no block is. `elements_may_be_nan`: single elements may be NaN, which an FP32 scale does not tell.
    """

    stored: torch.Tensor
    encode: torch.Tensor
    is_nan: torch.Tensor | None = None
    elements_may_be_nan: bool = False


def divide(numerator: torch.Tensor | float, denominator: torch.Tensor | float) -> torch.Tensor:
    """The float32 quotient with one rounding; numerator or denominator may be a number."""
    if isinstance(denominator, torch.Tensor):
        return torch.div(_like(numerator, denominator), denominator)
    assert isinstance(numerator, torch.Tensor)
    return torch.div(numerator, _like(denominator, numerator))


def _like(value: torch.Tensor | float, other: torch.Tensor) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.full_like(other, value)


def saturates(cast: Cast) -> bool:
    """True where an encoded finite value can exceed the element's max, so that it must be clamped."""
    if cast.format.scale.kind != "threshold" or cast.format.scale.nan_code != 255:
        return True
    largest_mantissa = int((cast.format.element.max / 2.0**cast.format.element.emax - 1.0) * 2**23)
    return e8m0_threshold(cast.rule, cast.format.element) > largest_mantissa + 1


def e8m0_scales(amax_bits: torch.Tensor, cast: Cast) -> BlockScales:
    """``b = clamp(E - emax + (M >= threshold), 0, 254)``, 255 for NaN or Inf; encode by 2^(127 - b)."""
    element, scale = cast.format.element, cast.format.scale
    carry = (1 << 23) - e8m0_threshold(cast.rule, element)  # the bump, as a carry out of the mantissa
    last = scale.lowest + scale.nan_code
    field = ((amax_bits + carry) >> 23).sub_(element.emax).clamp_(scale.lowest, last - 1)
    factor = (254 - field).clamp_(min=1).bitwise_left_shift_(23).view(torch.float32)
    is_nan = None
    if not reads_values(amax_bits) or (amax_bits.numel() and int(amax_bits.amax()) >= INFINITY_BITS):
        is_nan = amax_bits >= INFINITY_BITS
        field.masked_fill_(is_nan, last)
    return BlockScales(field.sub_(scale.lowest).to(torch.uint8), factor, is_nan)


def fp32_scales(amax: torch.Tensor, cast: Cast) -> BlockScales:
    """``s = f32(max / max(A, eps, max * 2^-126))``, 1 for A = 0 or Inf; rounded down to 2^k where the rule says so."""
    largest = cast.format.element.max
    if isinstance(cast.scaling, Current) and cast.scaling.amax_epsilon:
        amax = amax.clamp(min=cast.scaling.amax_epsilon)
    factor = divide(largest, amax.clamp(min=largest * 2.0**-126))
    factor = factor.masked_fill((amax == 0) | (amax == float("inf")), 1.0)
    if cast.rule.power_of_two:
        factor = (factor.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return scales_of_encode_factor(factor, amax if cast.is_gradient else None)


def scales_of_encode_factor(factor: torch.Tensor, gradient_amax: torch.Tensor | None = None) -> BlockScales:
    """The stored scale of an encode factor, ``f32(1 / s)``; NaN for a gradient with an infinite amax."""
    stored = divide(1.0, factor)
    if gradient_amax is not None:
        stored = unless_infinite(stored, gradient_amax)
    return BlockScales(stored, factor, elements_may_be_nan=True)


def unless_infinite(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The scale of a gradient for its product: NaN where the amax is infinite (docs/numerics.md 8.4)."""
    return scale.masked_fill(amax == float("inf"), float("nan"))


@dataclass(frozen=True)
class TensorLevel:
    """The upper of two levels: A clamped, S = capacity / A, the scale A / capacity.

    float32 (), or one per row of the operand form: [R, 1], or [1, R] for a transposed view. `handed`: the scale of the
    operand, equal to `stored` except for gradients (`unless_infinite`).
    """

    amax: torch.Tensor
    encode: torch.Tensor
    stored: torch.Tensor
    handed: torch.Tensor | None = None

    def window(self, chunk: Chunk, contraction: int) -> "TensorLevel":
        """The level of the rows of a chunk, shaped to meet its blocks [blocks, rows, blocks, columns]."""
        if self.amax.dim() == 0:
            return self
        rows = (chunk.rows, slice(None)) if contraction else (slice(None), chunk.columns)
        return TensorLevel(*(part[rows][:, None, :, None] for part in (self.amax, self.encode, self.stored)))


def tensor_level(amax: torch.Tensor, constants: TwoLevel, gradient: bool = False) -> TensorLevel:
    """From the tensor's (or each row's) amax; 0 and Inf mean a tensor scale of one."""
    measured = amax
    unscaled = (amax == 0) | (amax == float("inf"))
    amax = amax.clamp(min=constants.smallest_amax).masked_fill(unscaled, constants.capacity)
    one = torch.ones_like(amax)
    if not constants.tensor_scale:
        return TensorLevel(amax, one, one)
    encode = torch.where(unscaled, one, divide(constants.capacity, amax))
    stored = torch.where(unscaled, one, divide(amax, constants.capacity))
    return TensorLevel(amax, encode, stored, unless_infinite(stored, measured) if gradient else stored)


def encode_scale(
    target: torch.Tensor, scale: ScaleFormat, smallest: float, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored bytes and their values of non-negative float32 block scales, clamped to [smallest, largest] first."""
    target = target.clamp(smallest, largest)
    if scale.name == "E4M3":
        codes = target.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = encode_integer(target, scale.element, None, Workspace(target.device)).clone()
    return codes, decode_bytes(codes, scale.element)


def decode_bytes(codes: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """The values of a few uint8 codes, such as block scales, float32."""
    table = code_values(element, codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def block_level(
    target: torch.Tensor, scale: ScaleFormat, largest: float, tensor: TensorLevel
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Byte, value and encode factor e of a scale: ``e = min(f32(1 / f32(value * f32(1 / S))), FMAX)``."""
    byte, value = encode_scale(target, scale, 0.0, largest)
    return byte, value, encode_factor(value, tensor)


def encode_factor(value: torch.Tensor, tensor: TensorLevel | None) -> torch.Tensor:
    """The factor of elements before they are encoded, from the value of their stored scale, and the upper level."""
    if tensor is None:
        return divide(1.0, value).clamp_(min=2.0**-126)
    return divide(1.0, value * divide(1.0, tensor.encode)).clamp_(max=FMAX)


def two_level_scales(
    block_amax: torch.Tensor, fmt: ScaledFormat, constants: TwoLevel, tensor: TensorLevel
) -> BlockScales:
    """Block scales of the rules without a search: two_level, its 17/16 variant, torchao's order, one level."""
    if constants.inverse_max is not None:
        target = block_amax * (tensor.encode * constants.inverse_max)
        byte, _, factor = block_level(target, fmt.scale, constants.largest_scale, tensor)
    else:
        target = divide(divide(block_amax, fmt.element.max), tensor.stored.expand_as(block_amax))
        byte, value = encode_scale(target, fmt.scale, constants.smallest_scale, constants.largest_scale)
        factor = divide(divide(1.0, tensor.stored), value)
    return BlockScales(byte, factor)


def four_over_six_scales(
    blocks: torch.Tensor, block_amax: torch.Tensor, fmt: ScaledFormat, constants: TwoLevel, tensor: TensorLevel,
    workspace: Workspace, contraction: int,
) -> BlockScales:  # fmt: skip
    """Scales of float32 `blocks` [blocks, rows, blocks, columns], which are left as they are. A tie maps to 6.

    `contraction`: the axis, 0 or 1, along which the columns of a block lie.
    """
    base, element = divide(block_amax, 6.0) * tensor.encode, fmt.element
    byte_6, value_6, factor_6 = block_level(base, fmt.scale, constants.largest_scale, tensor)
    byte_4, value_4, factor_4 = block_level(base * 1.5, fmt.scale, constants.largest_scale, tensor)
    error_6 = _block_error(blocks, value_6, factor_6, element, constants, tensor, workspace, contraction)
    error_4 = _block_error(blocks, value_4, factor_4, element, constants, tensor, workspace, contraction)
    to_four = error_4 < error_6
    return BlockScales(torch.where(to_four, byte_4, byte_6), torch.where(to_four, factor_4, factor_6))


def eden_scales(
    scaled: torch.Tensor, stored: torch.Tensor, cast: Cast, drawn: torch.Tensor, workspace: Workspace, contraction: int
) -> torch.Tensor:
    """`stored` times ``<y, y> / <y, d>`` of each Hadamard group along axis `contraction` (docs/numerics.md 5.5)."""
    assert cast.hadamard is not None
    fmt, size = cast.format, cast.hadamard.size
    scale, block = fmt.scale.element, fmt.block[1] or size
    decoded = decode_bytes(encode_integer(scaled.clone(), fmt.element, None, workspace), fmt.element)
    if contraction:
        scaled, decoded, stored, drawn = scaled.t(), decoded.t(), stored.t(), drawn.t()
    value = decode_bytes(stored.contiguous(), scale)
    value_CR = value.repeat_interleave(block, 0)
    y, d = (
        part.mul(value_CR).abs_().masked_fill_(value_CR == 0, 0.0).unflatten(0, (-1, size))
        for part in (scaled, decoded)
    )
    y_sums, d_sums = (_pairwise_rows(y * other).squeeze(1) for other in (y, d))
    is_right = (y_sums < float("inf")) & (d_sums > 0)
    correction = torch.where(is_right, divide(y_sums, d_sums), torch.ones_like(y_sums))
    target = value * correction.repeat_interleave(size // block, 0)
    made = encode_integer(target, scale, drawn[::block], workspace).masked_fill_(value.isnan(), scale.nan_code)
    return made.t() if contraction else made


def _block_error(
    blocks: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, element: ElementFormat, constants: TwoLevel,
    tensor: TensorLevel, workspace: Workspace, contraction: int,
) -> torch.Tensor:  # fmt: skip
    """The error of each block, a sum of |d| or d^2 with ``d = f32(f32(f32(f32(dec(c) * scale) * A) / F) - x)``."""
    codes = encode_integer(blocks * factor, element, None, workspace)
    values = code_values(element, blocks.device).index_select(0, codes.view(-1).to(torch.int32)).view(blocks.shape)
    difference = divide(values.mul_(scale).mul_(tensor.amax), constants.capacity).sub_(blocks)
    errors = difference.abs_() if constants.four_over_six == "mae" else difference.square_()
    if contraction == 0:
        errors = errors.permute(2, 3, 0, 1)
    sums = torch.zeros_like(errors[..., 0])
    for column in range(errors.shape[-1]):
        sums += errors[..., column]
    sums = _pairwise_rows(sums).unsqueeze(-1)
    return sums if contraction else sums.permute(2, 3, 0, 1)


def _pairwise_rows(sums: torch.Tensor) -> torch.Tensor:
    """Sums over the rows of tiles by halving, [blocks, rows, blocks] -> [blocks, 1, blocks]; rows padded to 2^k."""
    count = 1 << (sums.shape[1] - 1).bit_length()
    sums = torch.nn.functional.pad(sums, (0, 0, 0, count - sums.shape[1]))
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums
