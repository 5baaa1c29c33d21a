"""Elements of at most 8 bits: float32 -> codes, codes -> float32, and FP4 packing, in plain torch ops.

Source: docs/numerics.md 1.1 to 1.4 and 5.4. Everything runs on integer views and one exact float addition or
multiplication by a power of two, so that it does not matter whether a toolchain's own conversions can be trusted; the
only conversion used is torch's float32 -> float8, on values that were clamped first.
"""

import functools

import torch

from microfloat.formats import E4M3, E5M2, ElementFormat, decode

__all__ = [
    "code_values", "codes_dtype", "decode_codes", "encode_float8", "encode_integer", "has_float8_dtype", "pack_fp4",
    "unpack_fp4",
]  # fmt: skip

_MAGNITUDE = 0x7FFFFFFF
_EXPONENT = 0x7F800000
_FLOAT8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def has_float8_dtype(element: ElementFormat) -> bool:
    """Whether torch has a dtype for these codes."""
    return element in _FLOAT8


def codes_dtype(element: ElementFormat) -> torch.dtype:
    """The dtype of public `codes`: torch's float8 where there is one, else uint8."""
    return _FLOAT8.get(element, torch.uint8)


def _float_bits(value: float) -> int:
    """The float32 bits of a positive float32 value."""
    return int(torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32).item())


@functools.cache
def _constants(element: ElementFormat) -> tuple[int, int]:
    """(bits of the largest value, bits of the smallest normal value)."""
    return _float_bits(element.max), _float_bits(element.min_normal)


def encode_float8(values: torch.Tensor, element: ElementFormat, codes: torch.Tensor, *, saturate: bool = True) -> None:
    """Write round-to-nearest-even codes of float32 `values` (overwritten) into `codes` of torch's float8 dtype.

    `saturate=False` is for values that are known not to exceed `element.max`. NaN becomes 0x7F, without its sign.
    """
    if saturate:
        values.clamp_(-element.max, element.max)  # keeps NaN; float8_e5m2 would overflow to Inf, older e4m3fn to NaN
    codes.copy_(values)
    code_bytes = codes.view(torch.uint8)
    negative_nan = code_bytes == 0xFF  # of all inputs only a negative NaN gives this code
    if codes.device.type != "cpu" or bool(negative_nan.any()):
        code_bytes.masked_fill_(negative_nan, element.nan_code)


def encode_integer(values: torch.Tensor, element: ElementFormat, random_bytes: torch.Tensor | None) -> torch.Tensor:
    """uint8 codes, one per byte, of float32 `values` (overwritten). NaN comes out as +-max: the caller handles it.

    With p the power of two at or below |y| (at least the smallest normal), the local step is ``p * 2^-mb``:
    nearest adds ``p * 2^(23-mb)``, whose own last bit is that step, so that the float addition rounds to even;
    stochastic counts 256ths of a step, adds the random byte and drops 8 bits.
    """
    mantissa_bits = element.mantissa_bits
    largest, smallest_normal = _constants(element)
    bits = values.view(torch.int32)
    sign = (bits >> (32 - element.bits)).bitwise_and_(element.sign_code)
    bits.bitwise_and_(_MAGNITUDE).clamp_(max=largest)
    power = (bits & _EXPONENT).clamp_(min=smallest_normal)
    if random_bytes is None:
        magic = power + ((23 - mantissa_bits) << 23)
        values.add_(magic.view(torch.float32))
        count = bits.sub_(magic)
    else:
        to_256ths = ((254 + 8 + mantissa_bits) << 23) - power
        values.mul_(to_256ths.view(torch.float32))
        count = values.to(torch.int32).add_(random_bytes).bitwise_right_shift_(8)
    exponent = power.bitwise_right_shift_(23 - mantissa_bits).sub_((128 - element.bias) << mantissa_bits)
    return count.add_(exponent).bitwise_or_(sign).to(torch.uint8)


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [R, C] of 4-bit codes -> [R, ceil(C / 2)]: even columns in the low nibble (docs/numerics.md 1.4)."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.contiguous().view(torch.int16)  # low byte = even column
    return pairs.bitwise_or(pairs >> 4).to(torch.uint8)


def unpack_fp4(packed: torch.Tensor, length: int) -> torch.Tensor:
    """The inverse of `pack_fp4`: uint8 [R, length], one code per byte."""
    wide = packed.to(torch.int16)
    pairs = (wide | (wide << 4)).bitwise_and_(0x0F0F)
    return pairs.view(torch.uint8)[..., :length]


def code_values(element: ElementFormat, device: torch.device) -> torch.Tensor:
    """float32 [2^bits]: the exact value of every code."""
    return _code_values(element, device)


@functools.lru_cache(maxsize=64)
def _code_values(element: ElementFormat, device: torch.device) -> torch.Tensor:
    import numpy as np

    return torch.from_numpy(decode(np.arange(1 << element.bits, dtype=np.uint8), element)).to(device)


@functools.lru_cache(maxsize=64)
def _pair_values(element: ElementFormat, device: torch.device) -> torch.Tensor:
    """int64 [256]: for every byte of packed FP4 the bits of its two float32 values."""
    values = _code_values(element, torch.device("cpu"))
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=1)
    return pairs.view(torch.int64).flatten().to(device)


def decode_codes(codes: torch.Tensor, element: ElementFormat, length: int) -> torch.Tensor:
    """float32 [R, length]: the exact values of stored codes (float8, uint8, or packed FP4)."""
    rows = codes.shape[0]
    index = codes.contiguous().view(torch.uint8).reshape(-1).to(torch.int32)
    if element.codes_per_byte == 2:
        pairs = _pair_values(element, codes.device).index_select(0, index)
        return pairs.view(torch.float32).view(rows, 2 * codes.shape[1])[:, :length]
    return _code_values(element, codes.device).index_select(0, index).view(rows, length)
