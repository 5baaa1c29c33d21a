"""Elements of at most 8 bits: float32 -> codes, codes -> float32, and FP4 packing, in plain torch ops.

Source: docs/numerics.md 1.1 to 1.4 and 5.4. Everything runs on integer views and one exact float addition or
multiplication by a power of two, so that it does not matter whether a toolchain's own conversions can be trusted; the
only conversion used is torch's float32 -> float8, on values that were clamped first.
"""

import functools

import numpy as np
import torch

from microfloat.formats import E4M3, E5M2, ElementFormat, decode
from microfloat.torch.backends.reference._grid import Workspace

__all__ = [
    "code_values", "codes_dtype", "decode_codes", "encode_float8", "encode_integer", "has_float8_dtype", "pack_fp4",
    "unpack_fp4",
]  # fmt: skip

_MAGNITUDE = 0x7FFFFFFF
_EXPONENT = 0x7F800000
_FLOAT8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
_TABLES: dict[tuple[ElementFormat, torch.device, bool], torch.Tensor] = {}


def has_float8_dtype(element: ElementFormat) -> bool:
    """Whether torch has a dtype for these codes."""
    return element in _FLOAT8


def codes_dtype(element: ElementFormat) -> torch.dtype:
    """The dtype of public `codes`: torch's float8 where there is one, else uint8."""
    return _FLOAT8.get(element, torch.uint8)


@functools.cache
def _constants(element: ElementFormat) -> tuple[int, int]:
    """(float32 bits of the largest value, of the smallest normal value)."""
    largest, smallest_normal = np.array([element.max, element.min_normal], np.float32).view(np.int32).tolist()
    return largest, smallest_normal


def encode_float8(
    values: torch.Tensor, element: ElementFormat, codes: torch.Tensor, *, saturate: bool = True, may_be_nan: bool = True
) -> None:
    """Write round-to-nearest-even codes of float32 `values` (overwritten) into `codes` of torch's float8 dtype.

    `saturate=False` is for values that are known not to exceed `element.max`. NaN becomes 0x7F, without its sign.
    """
    if saturate:
        values.clamp_(-element.max, element.max)  # keeps NaN; float8_e5m2 would overflow to Inf, older e4m3fn to NaN
    codes.copy_(values)
    if may_be_nan:
        code_bytes = codes.view(torch.uint8)
        # Of all inputs only a negative NaN gives the code 0xFF.
        if codes.device.type != "cpu" or (codes.numel() and int(code_bytes.amax()) == 0xFF):
            code_bytes.masked_fill_(code_bytes == 0xFF, element.nan_code)


def encode_integer(
    values: torch.Tensor, element: ElementFormat, random_bytes: torch.Tensor | None, workspace: Workspace
) -> torch.Tensor:
    """uint8 codes, one per byte, of float32 `values` (overwritten). NaN comes out as +-max: the caller handles it.

    With p the power of two at or below |y| (at least the smallest normal), the local step is ``p * 2^-mb``:
    nearest adds ``p * 2^(23-mb)``, whose own last bit is that step, so that the float addition rounds to even and
    leaves the number of steps in the low bits; stochastic counts 256ths of a step, adds the random byte and drops 8
    bits. What remains are numbers below 256, added modulo 256 in bytes.
    """
    mantissa_bits, shape = element.mantissa_bits, tuple(values.shape)
    largest, smallest_normal = _constants(element)
    bits = values.view(torch.int32)
    words = workspace.take("words", shape, torch.int32)
    sign, exponent, codes = (workspace.take(name, shape, torch.uint8) for name in ("sign", "exponent", "codes"))
    sign.copy_(torch.bitwise_right_shift(bits, 32 - element.bits, out=words)).bitwise_and_(element.sign_code)
    bits.bitwise_and_(_MAGNITUDE).clamp_(max=largest)
    power = torch.bitwise_and(bits, _EXPONENT, out=words).clamp_(min=smallest_normal)
    if random_bytes is None:
        values.add_(power.view(torch.float32), alpha=2.0 ** (23 - mantissa_bits))  # alpha * p is exact
        codes.copy_(bits)
    else:
        to_256ths = workspace.take("powers", shape, torch.int32)
        torch.sub((254 + 8 + mantissa_bits) << 23, power, out=to_256ths)
        values.mul_(to_256ths.view(torch.float32))
        to_256ths.copy_(values).add_(random_bytes).bitwise_right_shift_(8)
        codes.copy_(to_256ths)
    exponent.copy_(power.bitwise_right_shift_(23 - mantissa_bits))
    return codes.add_(exponent).sub_(((128 - element.bias) << mantissa_bits) & 0xFF).bitwise_or_(sign)


def pack_fp4(codes: torch.Tensor, packed: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 [R, C] of 4-bit codes -> [R, ceil(C / 2)]: even columns in the low nibble (docs/numerics.md 1.4)."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    if not codes.numel() and packed is None:  # whose strides no view takes
        return codes.new_empty((*codes.shape[:-1], codes.shape[-1] // 2))
    pairs = codes.contiguous().view(torch.int16)  # low byte = even column
    pairs = pairs | (pairs >> 4)
    return pairs.to(torch.uint8) if packed is None else packed.copy_(pairs)


def unpack_fp4(packed: torch.Tensor, length: int) -> torch.Tensor:
    """The inverse of `pack_fp4`: uint8 [R, length], one code per byte."""
    wide = packed.to(torch.int16)
    pairs = (wide | (wide << 4)).bitwise_and_(0x0F0F)
    return pairs.view(torch.uint8)[..., :length]


def code_values(element: ElementFormat, device: torch.device) -> torch.Tensor:
    """float32 [2^bits]: the exact value of every code."""
    return _table(element, device, pairs=False)


def _table(element: ElementFormat, device: torch.device, pairs: bool) -> torch.Tensor:
    """`code_values`; or int64 [256], for every byte of packed FP4 the bits of its two float32 values."""
    key = (element, device, pairs)
    table = _TABLES.get(key)
    if table is None:
        values = decode(np.arange(1 << element.bits, dtype=np.uint8), element)
        if pairs:
            byte = np.arange(256)
            values = np.stack([values[byte & 15], values[byte >> 4]], axis=1).view(np.int64).reshape(-1)
        with torch.inference_mode(False):
            table = torch.from_numpy(np.array(values)).to(device)
        if type(table) is torch.Tensor:  # a fake tensor must not outlive its mode
            _TABLES[key] = table
    return table


def decode_codes(codes: torch.Tensor, element: ElementFormat, workspace: Workspace) -> torch.Tensor:
    """float32 [R, C]: the exact values of contiguous stored codes (float8, uint8, or packed FP4: C is even)."""
    rows, width = codes.shape
    index = workspace.take("index", (rows * width,), torch.int32)
    index.copy_(codes.view(torch.uint8).view(-1))
    if element.codes_per_byte == 2:
        pairs = workspace.take("pairs", (rows * width,), torch.int64)
        torch.index_select(_table(element, codes.device, pairs=True), 0, index, out=pairs)
        return pairs.view(torch.float32).view(rows, 2 * width)
    values = workspace.take("values", (rows * width,), torch.float32)
    return torch.index_select(code_values(element, codes.device), 0, index, out=values).view(rows, width)
