"""A few rows of x times a weight as it is stored, by `kernels.gemm.decode`: for one Linear, and for groups of experts.

    y [M, N] = x [M, K] @ dequantize(w [N, K]).T            y [T, N] by groups of rows, each with w[e] of [E, N, K]

Products take the exact values of the weight, with float32 sums and one rounding (docs/numerics.md 8.2). Groups of rows
are planned on the device, and the host never reads their sizes.

Legend: M, T = rows of x, K = contraction length, N = rows of a weight, E = experts.
"""

from typing import TYPE_CHECKING

import torch

from microfloat.formats import ELEMENTS
from microfloat.layout import ALIGNMENT
from microfloat.routes import MOST_DECODED_ROWS, Encoding, encoding_of
from microfloat.torch import backends
from microfloat.torch.backends.base import Parts, aligned, dtype_name, raw_stream
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from microfloat.kernels.constants import DecodeCodes
    from microfloat.passes.products import DecodedExperts
    from microfloat.torch.launch.program import Program

Shape = tuple[int, int, int]
DECODED_BESIDE = (torch.bfloat16, torch.float16)  # dtypes of x


class Decoding:
    """``(x, (codes, scale, tensor scale), bias) -> y`` of a few rows, with a program for each dtype and layout."""

    def __init__(
        self, codes: "DecodeCodes", shape: Shape, out_dtype: torch.dtype, bias: torch.dtype | None, level_stride: int,
        device: torch.device, experts: "DecodedExperts | None" = None,
    ) -> None:  # fmt: skip
        from microfloat.passes.matrix import At
        from microfloat.passes.products import PLAN

        self._codes, self._shape, self._level_stride, self._experts = codes, shape, level_stride, experts
        self._dtypes = dtype_name(out_dtype), bias and dtype_name(bias)
        self._device, self._index = device, backends.device_index(device)
        self._programs: dict[tuple, Program] = {}
        self._rest = (None,) * (At.MADE - PLAN - 1)

    def __call__(
        self, x: torch.Tensor, w: Parts, bias: torch.Tensor | None, plan: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The product [M, N]; `plan`: for experts, the table of groups."""
        codes, scale, level = (aligned(part) for part in w)
        x, is_odd = aligned(x.contiguous()), bias is not None and bias.data_ptr() % ALIGNMENT != 0
        key = x.dtype, scale.stride(), is_odd
        if key not in self._programs:
            from microfloat.passes import products
            from microfloat.torch.launch.program import Program, device_of

            dtypes, number = (dtype_name(x.dtype), *self._dtypes), device_of(self._index)
            about = self._codes, self._shape, dtypes, _strides(scale), self._level_stride, number, self._experts
            misaligned = {products.BIAS} if is_odd else set()
            misaligned |= set() if self._experts is None else {products.PLAN}
            self._programs[key] = Program(products.decode_passes(*about), self._device, frozenset(misaligned))
        table = (None, x, None, codes, scale, level, bias, plan, *self._rest)
        stream = 0 if self._index < 0 else raw_stream(self._index)
        return self._programs[key].run(stream, table)[0]

    def rows_of_tile(self, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> int:
        """Rows of x in the tiles of the plan that a call takes; of experts."""
        from microfloat.passes import products
        from microfloat.torch.launch.program import device_of

        assert self._experts is not None
        about = _strides(scale), bias is not None, device_of(self._index)
        cut = products.cut_of_experts(self._codes, self._shape, self._experts.number, *about)
        return products.rows_of_tile(cut)


def _strides(scale: torch.Tensor) -> tuple[int, int]:
    return (scale.stride(0), scale.stride(1)) if scale.dim() == 2 else (0, 0)


def decoding_of(
    rhs: Encoding, shape: Shape, out_dtype: torch.dtype, bias: torch.dtype | None, device: torch.device
) -> Decoding | str:
    """The product of a few rows with a weight [N, K] in the encoding `rhs`, or the reason why no kernel makes it."""
    codes = _stored_codes(rhs, shape, device)
    if isinstance(codes, str):
        return codes
    return Decoding(codes, shape, out_dtype, bias, int(rhs.level == "row"), device)


def _stored_codes(rhs: Encoding, shape: Shape, device: torch.device, experts: int = 0) -> "DecodeCodes | str":
    """The codes as the kernel reads them in a product of M, K, N, or why it cannot; `experts`: 0 for none."""
    if rhs.format.element.name not in ELEMENTS or not backends.support("triton", device):
        return f"no kernel decodes {rhs.format.element.name} here"
    from microfloat.passes import products
    from microfloat.torch.launch.program import INTERPRETED

    if device.type != "cuda" and not INTERPRETED:
        return "no kernel decodes on this device"
    codes = products.stored_codes(rhs.format, rhs.hadamard, rhs.level, shape[1])
    if codes is None:
        return f"no kernel decodes {rhs.format.name} of {shape[1]} in features"
    if not products.fits(codes, shape, experts):
        rows = f"{MOST_DECODED_ROWS} rows{' for each group' if experts else ''}"
        return f"more than {rows}, or matrices of 2^31 words and more"
    return codes


# Experts: the weights [E, N, K] of a grouped layer.


def decoding_of_experts(
    weight: QuantizedTensor, rows: int, out_dtype: torch.dtype, bias: torch.dtype | None
) -> Decoding | str:
    """The product of `rows` rows in groups with the weights of experts, or the reason why no kernel makes it."""
    rhs, (number, n, k), device = encoding_of(weight.cast), weight.shape, weight.device
    assert rhs is not None
    codes = _stored_codes(rhs, (rows, k, n), device, number)
    if isinstance(codes, str):
        return codes
    height = weight.format.block[0] or 1
    if n % height:
        return f"blocks of {height} rows hold those of two experts"
    if weight.axis != 2 or not all(part.is_contiguous() for part in weight.part_list()):
        return "codes or scales of the experts do not lie one behind the other"
    from microfloat.passes.products import DecodedExperts

    _, scale, level = parts_of_experts(weight)
    if weight.scale.dim() == 1:  # one for each expert
        scale_stride = 1
    else:
        scale_stride = n // height * scale.stride(0) if scale.dim() == 2 else 0
    rows_have_levels = rhs.level == "row"
    level_stride = 0 if level is None or not level.dim() else n if rows_have_levels else 1
    experts = DecodedExperts(number, scale_stride, level_stride)
    return Decoding(codes, (rows, k, n), out_dtype, bias, int(rows_have_levels), device, experts)


def parts_of_experts(weight: QuantizedTensor) -> Parts:
    """Codes, scale and tensor scale of the weights of experts, their matrices one below the other."""
    codes, scale = weight.codes, weight.scale
    scale = scale if scale.dim() < 3 else scale.view(-1, scale.shape[-1])
    return Parts(codes.view(-1, codes.shape[-1]), scale, weight.tensor_scale)
