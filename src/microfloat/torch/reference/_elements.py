"""Elements of at most 8 bits in plain torch ops: float32 -> codes -> float32, FP4 packing, random bytes for rounding.

Source: docs/numerics.md 1.1 to 1.4, 5.3 and 5.4; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
Everything runs on integer views and one exact float addition or multiplication by a power of two, so that it does not
matter whether a toolchain's own conversions can be trusted; the only ones used are torch's float32 -> float8, on values
that were clamped first, and float16 -> float32, which is exact.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from microfloat.formats import E4M3, E5M2, ElementFormat, decode
from microfloat.torch.reference._grid import Workspace, reads_values

_MAGNITUDE = 0x7FFFFFFF
_EXPONENT = 0x7F800000
_FLOAT8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
# Values of all codes, at most 1 KB for each format and device in use: making one takes longer than decoding a chunk.
_TABLES: dict[tuple[ElementFormat, torch.device], torch.Tensor] = {}


def codes_dtype(element: ElementFormat) -> torch.dtype:
    """The dtype of public `codes`: torch's float8 where there is one, else uint8."""
    return _FLOAT8.get(element, torch.uint8)


def encode_float8(
    values: torch.Tensor, element: ElementFormat, codes: torch.Tensor, *, saturate: bool = True, may_be_nan: bool = True
) -> None:
    """Write round-to-nearest-even codes of float32 `values` (overwritten) into `codes` of torch's float8 dtype.

    `saturate=False` is for values that cannot exceed `element.max`. NaN becomes 0x7F, without its sign.
    """
    if saturate:
        values.clamp_(-element.max, element.max)  # keeps NaN; float8_e5m2 would overflow to Inf, older e4m3fn to NaN
    codes.copy_(values)
    if may_be_nan:
        code_bytes = codes.view(torch.uint8)
        # Of all inputs only a negative NaN gives the code 0xFF.
        if not reads_values(codes) or (codes.numel() and int(code_bytes.amax()) == 0xFF):
            code_bytes.masked_fill_(code_bytes == 0xFF, element.nan_code)


def encode_integer(
    values: torch.Tensor, element: ElementFormat, random_bytes: torch.Tensor | None, workspace: Workspace
) -> torch.Tensor:
    """The codes of float32 `values` (overwritten), uint8, one per byte. NaN comes out as +-max: the caller handles it.

    With p the power of two at or below |y| (at least the smallest normal), the local step is ``p * 2^-mb``:
    nearest adds ``p * 2^(23-mb)``, whose own last bit is that step, so that the float addition rounds to even and
    leaves the number of steps in the low bits; stochastic counts 256ths of a step, adds the random byte and drops 8
    bits. What remains are numbers below 256, added modulo 256 in bytes.
    """
    mantissa_bits, shape = element.mantissa_bits, tuple(values.shape)
    largest, smallest_normal = np.array([element.max, element.min_normal], np.float32).view(np.int32).tolist()
    bits = values.view(torch.int32)
    words = workspace.take("words", shape, torch.int32)
    sign, exponent, codes = (workspace.take(name, shape, torch.uint8) for name in ("sign", "exponent", "codes"))
    sign.copy_(torch.bitwise_right_shift(bits, 32 - element.bits, out=words)).bitwise_and_(element.sign_code & 0xFF)
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


def pack_fp4(codes: torch.Tensor, packed: torch.Tensor, axis: int) -> None:
    """Pack uint8 4-bit codes in pairs along `axis`, the even one in the low nibble (docs/numerics.md 1.4)."""
    if axis == 0:
        odd = codes[1::2]
        packed[odd.shape[0] :].zero_()  # of an odd number, the last high nibble
        torch.bitwise_left_shift(odd, 4, out=packed[: odd.shape[0]])
        packed.bitwise_or_(codes[0::2])
        return
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    if codes.numel():  # the strides of an empty tensor fit no view
        pairs = codes.contiguous().view(torch.int16)  # low byte = even column
        packed.copy_(pairs | (pairs >> 4))


def unpack_fp4(packed: torch.Tensor, length: int, axis: int) -> torch.Tensor:
    """The inverse of `pack_fp4`: uint8, one code per byte, `length` of them along `axis`."""
    if axis == 0:
        codes = packed.new_empty((2 * packed.shape[0], packed.shape[1]))
        torch.bitwise_and(packed, 15, out=codes[0::2])
        torch.bitwise_right_shift(packed, 4, out=codes[1::2])
        return codes[:length]
    wide = packed.to(torch.int16)
    pairs = (wide | (wide << 4)).bitwise_and_(0x0F0F)
    return pairs.view(torch.uint8)[:, :length]


def code_values(element: ElementFormat, device: torch.device) -> torch.Tensor:
    """The exact values of all codes, float32 [2^bits]."""
    table = _TABLES.get((element, device))
    if table is None:
        with torch.inference_mode(False):
            table = torch.from_numpy(decode(np.arange(1 << element.bits, dtype=np.uint8), element)).to(device)
        if type(table) is torch.Tensor:  # a fake tensor must not outlive its mode
            _TABLES[element, device] = table
    return table


class _Shifts(NamedTuple):
    """Constants that decode a code by a float16: ``value = float16(code << left >> right & mask) * factor``."""

    left: int
    right: int
    mask: int
    factor: float
    nan_missing: bool  # the code with all magnitude bits set is NaN, and comes out as a number


@functools.lru_cache(64)  # tries all codes of a format, which takes as long as decoding a chunk
def _shifts(element: ElementFormat) -> _Shifts | None:
    """The constants of a format; None where a trial of all codes shows that they do not give every exact value."""
    right = 5 - element.exponent_bits
    if right < 0:
        return None
    codes = np.arange(1 << element.bits, dtype=np.int16)
    left, mask = 16 - element.bits, 0x7FFF >> right | -0x8000
    with np.errstate(over="ignore", invalid="ignore"):
        factor = np.ldexp(np.float32(1), 15 - element.bias)
        values = ((codes << left >> right) & np.int16(mask)).view(np.float16).astype(np.float32) * factor
    exact = decode(codes.astype(np.uint8), element)
    different = ~((values == exact) | (np.isnan(values) & np.isnan(exact)))
    is_last = codes & (element.sign_code - 1) == element.sign_code - 1
    if (different & ~(is_last & np.isnan(exact))).any():
        return None
    return _Shifts(left, right, mask, float(factor), bool(different.any()))


def decode_codes(codes: torch.Tensor, element: ElementFormat, workspace: Workspace, values: torch.Tensor) -> None:
    """Write the exact values of uint8 codes, one per byte, into float32 `values`."""
    shape, shifts = tuple(codes.shape), _shifts(element)
    if shifts is None:
        table = code_values(element, codes.device)
        values.copy_(table.index_select(0, codes.reshape(-1).to(torch.int32)).view(shape))
        return
    halves = workspace.take("halves", shape, torch.int16).copy_(codes).bitwise_left_shift_(shifts.left)
    if shifts.right:
        halves.bitwise_right_shift_(shifts.right).bitwise_and_(shifts.mask)
    values.copy_(halves.view(torch.float16))
    if shifts.factor != 1:
        values.mul_(shifts.factor)
    if shifts.nan_missing:
        last = element.sign_code - 1
        magnitudes = torch.bitwise_and(codes, last, out=workspace.take("magnitudes", shape, torch.uint8))
        if not reads_values(codes) or (codes.numel() and int(magnitudes.amax()) == last):
            values.masked_fill_(magnitudes == last, float("nan"))


_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_2 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox(counter: tuple[torch.Tensor, ...], seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Ten rounds of Philox4x32: four int64 counter words below 2^32, seed int64 [2] -> four words below 2^32.

    The words may be of any shapes that broadcast. A product of two 32-bit numbers wraps in int64, but both halves are
    right all the same; bits that an arithmetic shift leaves above them are masked off before the next product.
    """
    c0, c1, c2, c3 = counter
    key_0, key_1 = seed.tolist() if seed.device.type == "cpu" else seed.unbind()
    for _ in range(_ROUNDS):
        product_0, product_2 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_2
        c0 = _mixed(product_2, c1, key_0)
        c2 = _mixed(product_0, c3, key_1)
        c1, c3 = product_2, product_0
        key_0, key_1 = (key_0 + _WEYL_0) & _LOW, (key_1 + _WEYL_1) & _LOW
    return c0, c1 & _LOW, c2, c3 & _LOW


def _mixed(product: torch.Tensor, word: torch.Tensor, key: torch.Tensor | int) -> torch.Tensor:
    """``high(product) ^ low(word) ^ key``."""
    high = product >> 32
    high = high.bitwise_xor_(word) if high.shape == word.shape else high ^ word
    return high.bitwise_xor_(key).bitwise_and_(_LOW)


def random_bytes(
    seed: torch.Tensor, rows: range, columns: range, *, stream: int = 0, batch: int = 0, contraction: int = 1
) -> torch.Tensor:
    """Random bytes, uint8 [rows, columns], of a matrix in memory whose axis `contraction` is C of the operand form.

    Element (R, C) has byte ``C % 16`` of ``Philox((C // 16, R, stream, batch), seed)``. The range of C starts at a
    multiple of 16: a window of a larger matrix has that matrix's bytes.
    """
    if contraction == 0:
        return random_bytes(seed, columns, rows, stream=stream, batch=batch).t()
    groups = torch.arange(columns.start // 16, -(-columns.stop // 16), dtype=torch.int64, device=seed.device)
    others = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=seed.device).bitwise_and_(_LOW)
    constants = [torch.full((), value, dtype=torch.int64, device=seed.device) for value in (stream, batch)]
    words = torch.empty(len(rows), groups.numel(), 4, dtype=torch.int32, device=seed.device)
    for position, word in enumerate(philox((groups[None, :], others[:, None], *constants), seed)):
        words[..., position] = word  # keeps the low 32 bits
    return words.view(torch.uint8).flatten(1)[:, : len(columns)]
