"""`scaled_matmul`: two quantized operands multiplied through float32, with scales where they cost no exactness.

Legend: R_a, R_b = rows of the operands, C = their stored contraction length.

Block scales of MX and NVFP4 go into the float32 operands, where they are exact (docs/numerics.md 8.2). FP32 scales per
tensor or row and NVFP4 tensor scales multiply the accumulator. FP32 scales of 1x128 and 128x128 blocks change along the
contraction and are multiplied into the operands: one more rounding of 2^-24 per element, far inside the tolerance of
docs/numerics.md 8.3. bfloat16 is not used: its GEMM is 3 to 5 times slower on CPUs without bf16 units.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.reference._dequantize import block_scale_values, decode_scaled

__all__ = ["scaled_matmul"]


def scaled_matmul(
    a: Operand, b: Operand, *, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.float32,
    accumulate: str = "split",
) -> torch.Tensor:  # fmt: skip
    """``round(a @ b.T + bias)``: [R_a, R_b] in `out_dtype`, one rounding after scales and bias.

    `out_dtype=torch.float32` returns the accumulator itself. `accumulate`: "fast" and "split" both sum in float32 here;
    "exact" multiplies and sums in float64. Hadamard operands meet in the transformed domain. `bias`: [R_b].
    """
    if accumulate == "exact":
        result = _exact_values(a) @ _exact_values(b).t()
        return (result if bias is None else result + bias.double()).to(torch.float32).to(out_dtype)
    (a_MK, a_scale), (b_NK, b_scale) = _operand_and_epilogue(a), _operand_and_epilogue(b)
    with _full_float32(a_MK.device):
        accumulator = a_MK @ b_NK.t()
    _scale_accumulator(accumulator, a_scale, b_scale)
    if bias is not None:
        accumulator += bias.to(torch.float32)
    return accumulator.to(out_dtype)


def _exact_values(operand: Operand) -> torch.Tensor:
    """float64 [R, C]: every factor of an element is exact in float64."""
    scales = block_scale_values(operand).double()
    if operand.tensor_scale is not None:
        scales = scales * operand.tensor_scale.double()
    return decode_scaled(operand, None, torch.float64).mul_(_per_element(scales, operand))


def _per_element(scales: torch.Tensor, operand: Operand) -> torch.Tensor:
    """Block scales spread to what broadcasts against [R, C]."""
    if scales.dim() == 0 or operand.format.block == (1, None):
        return scales
    rows, columns = operand.rows, operand.stored_length
    block_rows, block_columns = operand.format.block[0] or 1, operand.format.block[1] or max(columns, 1)
    return scales.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_columns, 1)[:, :columns]


def _operand_and_epilogue(operand: Operand) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(float32 [R, C] for the GEMM, what its row of the accumulator is multiplied with: (), [R, 1] or None)."""
    if operand.format.scale.name == "FP32" and operand.format.block[1] is None:
        return decode_scaled(operand, None, torch.float32), operand.scale
    return decode_scaled(operand, block_scale_values(operand), torch.float32), operand.tensor_scale


def _scale_accumulator(accumulator: torch.Tensor, a_scale: torch.Tensor | None, b_scale: torch.Tensor | None) -> None:
    """Multiply by ``alpha = f32(a_scale * b_scale)`` in place; a_scale meets rows, b_scale columns.

    alpha may leave float32's range although the product with the accumulator does not: it is applied as a float32
    significand times 2^h, then 2^(e - h), which rounds like one multiplication wherever alpha is a normal number.
    """
    if a_scale is None and b_scale is None:
        return
    if accumulator.device.type == "cpu" and all(scale is None or scale.dim() == 0 for scale in (a_scale, b_scale)):
        alpha = math.prod(float(scale) for scale in (a_scale, b_scale) if scale is not None)  # exact in float64
        if 2.0**-126 <= alpha < 2.0**127:
            accumulator.mul_(alpha)
            return
    one = torch.ones((), dtype=torch.float64, device=accumulator.device)
    left = one if a_scale is None else a_scale.double()
    right = one if b_scale is None else b_scale.double().t()
    significand, exponent = torch.frexp(left * right)
    half = exponent // 2
    accumulator.mul_(significand.to(torch.float32) * _power_of_two(half))
    accumulator.mul_(_power_of_two(exponent - half))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


@contextmanager
def _full_float32(device: torch.device) -> Iterator[None]:
    """Keep TF32 (CUDA), bf16 shortcuts (CPU) and torch.autocast out of a float32 GEMM, whatever the process allows.

    The setting is one of the process: it is raised while any thread is inside, and put back by the last one to leave.
    """
    global _inside, _put_back
    with ExitStack() as stack:
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        with _lock:
            if not _inside:
                _put_back = _raise_precision()
            _inside += 1
        try:
            yield
        finally:
            with _lock:
                _inside -= 1
                if not _inside:
                    _put_back()


_lock = threading.Lock()
_inside = 0
_put_back: Callable[[], None] = lambda: None  # noqa: E731


def _raise_precision() -> Callable[[], None]:
    """Ask for IEEE float32 products; returns how to put the former setting back."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set through torch.backends.*.fp32_precision, which the older function refuses to summarize
        backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
        former = [backend.fp32_precision for backend in backends]
        for backend in backends:
            backend.fp32_precision = "ieee"

        def put_back() -> None:
            for backend, value in zip(backends, former, strict=True):
                backend.fp32_precision = value

        return put_back
    if before == "highest":
        return lambda: None
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(before)
