"""The codes of a `QuantizedTensor` by themselves: their bytes and width, and the shape and strides they present."""

from collections.abc import Sequence

import torch

from microfloat.arguments import check_unpacked
from microfloat.errors import invalid_type
from microfloat.formats import ScaledFormat
from microfloat.layout import Storage
from microfloat.recipes import Cast
from microfloat.torch.tensor import custom_ops as _operators
from microfloat.torch.tensor.packing import unpack_fp6

__all__ = ["as_bytes", "check_width", "strides_of", "told_shape", "unpacked", "width_of"]

# What is stored as bytes and has a dtype of its own in torch, by the names of formats.
_DTYPES_OF_BYTES = {"E8M0": torch.float8_e8m0fnu, "E4M3": torch.float8_e4m3fn, "E2M1": torch.float4_e2m1fn_x2}


def as_bytes(part: torch.Tensor, name: str) -> torch.Tensor:
    """Scales, or codes of FP4, as the bytes that they are; everything else as it is."""
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


def told_shape(codes: torch.Tensor, cast: Cast, axis: int) -> tuple[int, ...]:
    """The shape of a tensor of two dimensions or more with such codes, whose contraction length is not filled up."""
    *leading, width = codes.shape
    return (*leading[:axis], width * cast.format.element.codes_per_byte, *leading[axis:])


def strides_of(codes: torch.Tensor, axis: int, shape: Sequence[int], fmt: ScaledFormat) -> tuple[int, ...]:
    """Strides in elements: those of the codes, whose rows may be padded; the contraction axis is innermost.

    The leading axes of the codes are those of `shape` without `axis`.
    """
    *leading, last = codes.stride()
    if codes.is_contiguous():  # padding of a row shows where rows are strided only
        leading, last = [max(shape[axis], 1)] if shape else [], 1
        for size in reversed(codes.shape[1:-1]):
            leading.insert(0, leading[0] * max(size, 1))
    else:
        per_byte = 2 if width_of(fmt) == 4 else 1
        leading = [stride * per_byte for stride in leading]
    if len(shape) < 2:
        return (last,) * len(shape)
    return (*leading[:axis], last, *leading[axis:])
