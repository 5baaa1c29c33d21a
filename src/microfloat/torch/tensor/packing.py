"""Bytes as kernels hold them: FP4 two per byte, FP6 four in three bytes, scales in Blackwell's tiles, by row groups.

The same functions as those of `microfloat.reference`, on tensors of any device, also in compiled code. Source:
docs/numerics.md 1.4 and 7.2.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from microfloat.arguments import check_packable, check_packed, check_unpacked
from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import ScaledFormat
from microfloat.layout import Storage, blocked_sizes, blocked_windows, check_scale_bytes
from microfloat.torch import backends
from microfloat.torch.tensor import custom_ops as _operators

# Dtypes of torch for bytes, by the names of formats.
_DTYPES_OF_BYTES = {"E8M0": torch.float8_e8m0fnu, "E4M3": torch.float8_e4m3fn, "E2M1": torch.float4_e2m1fn_x2}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Sizes = Sequence[int] | torch.Tensor | None


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes per byte along the last axis: ``byte[i] = c[2i] | c[2i + 1] << 4``.

    Integers [..., C] -> uint8 [..., ceil(C / 2)]; an odd C leaves the last high nibble 0. Raises InvalidTypeError for
    anything but integers, InvalidValueError for a code above 15; on a GPU its upper bits are dropped instead.
    """
    codes = _checked_codes(codes, 4)
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_fp4(data: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` codes of FP4 bytes: uint8 [..., ceil(length / 2)] -> uint8 [..., length], one per byte."""
    data = _checked_bytes(data, length, 2, 1)
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)[..., :length]


def pack_fp6(codes: torch.Tensor) -> torch.Tensor:
    """Four 6-bit codes in three bytes, little-endian: ``w = c0 | c1 << 6 | c2 << 12 | c3 << 18``.

    Integers [..., C] -> uint8 [..., 3 * ceil(C / 4)]; C is padded with code 0 to a multiple of 4. Raises
    InvalidTypeError for anything but integers, InvalidValueError for a code above 63; on a GPU its upper bits are
    dropped instead.
    """
    codes = F.pad(_checked_codes(codes, 6), (0, -codes.shape[-1] % 4)).to(torch.int32)
    c0, c1, c2, c3 = (codes[..., start::4] for start in range(4))
    words = c0 | c1 << 6 | c2 << 12 | c3 << 18
    return torch.stack((words & 255, words >> 8 & 255, words >> 16), -1).to(torch.uint8).flatten(-2)


def unpack_fp6(data: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` codes of FP6 bytes: uint8 [..., 3 * ceil(length / 4)] -> uint8 [..., length]."""
    wide = _checked_bytes(data, length, 4, 3).to(torch.int32)
    words = wide[..., 0::3] | wide[..., 1::3] << 8 | wide[..., 2::3] << 16
    codes = torch.stack([words >> shift & 63 for shift in (0, 6, 12, 18)], -1)
    return codes.to(torch.uint8).flatten(-2)[..., :length]


def to_blocked(scale: torch.Tensor, group_sizes: Sizes = None, *, dim: int = 0) -> torch.Tensor:
    """Scale bytes [R, C] as the tiles of 128 x 4 that Blackwell's GEMMs read: 1-D, 512 * ceil(R / 128) * ceil(C / 4).

    ``out[((r // 128) * nc + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = scale[r, c]`` with
    ``nc = ceil(C / 4)``; padding is 0. `scale`: uint8, or the float8 dtype of E8M0 or E4M3, which the result keeps;
    scales of 16x16 tiles are repeated over their rows by the caller first. `group_sizes`: numbers of rows (`dim` 0:
    groups along M) or of columns (`dim` 1: groups along K) that are padded and put into tiles alone, one group after
    the other; a tensor of sizes is read back. Source: docs/numerics.md 7.2.
    """
    _check_scale("scale", scale)
    if scale.dim() != 2:
        raise invalid_value("scale", f"shape {tuple(scale.shape)}", "[R, C], one byte per block of a row")
    windows = blocked_windows(scale.shape, group_sizes, dim)
    made = [_tiles(scale.view(torch.uint8)[window]) for window in windows]
    flat = made[0] if len(made) == 1 else torch.cat([scale.new_empty(0, dtype=torch.uint8), *made])
    return flat.view(scale.dtype)


def from_blocked(flat: torch.Tensor, rows: int, cols: int, group_sizes: Sizes = None, *, dim: int = 0) -> torch.Tensor:
    """The inverse of `to_blocked`, with the same sizes of groups: 1-D bytes -> [rows, cols], padding cropped."""
    _check_scale("flat", flat)
    windows = blocked_windows((rows, cols), group_sizes, dim)
    sizes = blocked_sizes(windows, flat.shape)
    parts = [flat.new_empty((0, cols) if dim == 0 else (rows, 0), dtype=torch.uint8)]
    for (of_rows, of_cols), tiles in zip(windows, flat.view(torch.uint8).split(sizes), strict=True):
        height, width = of_rows.stop - of_rows.start, of_cols.stop - of_cols.start
        high, wide = -(-height // 128), -(-width // 4)
        tiles = tiles.view(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(128 * high, 4 * wide)
        parts.append(tiles[:height, :width])
    return torch.cat(parts, dim).view(flat.dtype)


def _tiles(scale: torch.Tensor) -> torch.Tensor:
    """One group of scale bytes in tiles; by a kernel where there is one."""
    if scale.is_cuda and not _operators.is_tracing(scale):
        kernels = backends.choose("auto", scale.device).producers
        if kernels is not None:
            return kernels.swizzle_scales(scale)
    rows, columns = scale.shape
    padded = F.pad(scale, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _check_scale(argument: str, scale: torch.Tensor) -> None:
    if type(scale) not in (torch.Tensor, torch.nn.Parameter) and not _operators.is_tracing(scale):
        raise invalid_type(argument, type(scale), "a tensor of scale bytes", "Give q.scale.")
    check_scale_bytes(scale.dtype, argument)


def _checked_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if not isinstance(codes, torch.Tensor) or codes.dtype not in _INTEGERS:
        got = codes.dtype if isinstance(codes, torch.Tensor) else type(codes)
        raise invalid_type("codes", got, "a tensor of uint8 codes, one per byte")
    if codes.dim() == 0:
        raise invalid_value("codes", "a 0-d tensor", "at least one axis")
    if codes.numel() and codes.device.type == "cpu" and not _operators.is_tracing(codes):
        check_packable(int(codes.min()), int(codes.max()), bits)
        return codes.to(torch.uint8)
    return codes.to(torch.uint8) & (1 << bits) - 1


def _checked_bytes(data: torch.Tensor, length: int, codes_in: int, bytes_in: int) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise invalid_type("data", type(data), "a tensor of uint8 bytes")
    if data.dtype == torch.float4_e2m1fn_x2:
        data = data.view(torch.uint8)
    if data.dtype != torch.uint8:
        raise invalid_type("data", data.dtype, "uint8 bytes")
    check_packed(length, tuple(data.shape), codes_in, bytes_in)
    return data


def as_bytes(part: torch.Tensor, name: str) -> torch.Tensor:
    """Scales, or codes of FP4, as bytes; anything else unchanged."""
    is_bytes = isinstance(part, torch.Tensor) and part.dtype == _DTYPES_OF_BYTES.get(name)
    return part.view(torch.uint8) if is_bytes else part


def width_of(fmt: ScaledFormat) -> int:
    """Bits of an element, from the fields, which Dynamo reads."""
    return 1 + fmt.element.exponent_bits + fmt.element.mantissa_bits


def unpacked(codes: torch.Tensor, storage: Storage, shape: Sequence[int] | None, axis: int) -> torch.Tensor:
    """Packed bytes as the codes that a tensor of this shape stores; its contraction length may be left open."""
    if codes.dtype != torch.uint8 or not codes.dim():
        raise invalid_type("codes", f"{codes.dtype} of {codes.dim()} axes", "uint8 bytes, the contraction axis last")
    if width_of(storage.format) != 6:
        return codes.view(getattr(torch, storage.codes_dtype))
    length = codes.shape[-1] // 3 * 4
    if shape is not None and len(shape):
        length = -(-shape[axis] // storage.group) * storage.group
    return unpack_fp6(codes, length)


def check_width(codes: torch.Tensor, fmt: ScaledFormat) -> None:
    """Refuse codes with bits above the element's width: packed FP6, or bytes of another format."""
    is_hidden = _operators.is_tracing(codes) or (codes.is_cuda and torch.cuda.is_current_stream_capturing())
    if is_hidden or codes.dtype != torch.uint8 or fmt.element.bits in (4, 8) or not codes.numel():
        return
    check_unpacked(int(codes.max()), fmt.element.bits, fmt.name, "microfloat.torch.unpack_fp6")
