"""Values of operands: `dequantize`, in the order of docs/numerics.md 8.1, `fold_codes`, which gives MX operands FP8
codes under another scale, and `scaled_matmul`, through float32.

Legend: R_a, R_b = rows of the operands, C = their stored contraction length.

Block scales of MX and NVFP4 go into the float32 operands, where they are exact (docs/numerics.md 8.2). FP32 scales per
tensor or row and NVFP4 tensor scales multiply the accumulator. FP32 scales of 1x128 and 128x128 blocks change along the
contraction and are multiplied into the operands: one more rounding of 2^-24 per element, far inside the tolerance of
docs/numerics.md 8.3.

On a CPU with bfloat16 units, they compute a product that ends in bfloat16, of operands whose values are exact in it:
they multiply exactly, sum in float32 and round once, in half of the time. Without them a bfloat16 GEMM takes 3 to 5
times as long as one in float32.
"""

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F

from microfloat.layout import Part, folded_format
from microfloat.torch.backends.base import Operand
from microfloat.torch.reference._elements import codes_dtype, decode_codes, unpack_fp4
from microfloat.torch.reference._grid import Grid, Workspace, is_stored_across, reads_values, spread
from microfloat.torch.reference._hadamard import inverse
from microfloat.torch.reference._scales import decode_bytes


def dequantize(operand: Operand, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of an operand, [R, C] in `dtype`, rounded once from float32.

    FP32 and E8M0 scales: ``f32(dec(code) * scale)``; NVFP4: ``f32(dec(code) * f32(dec(sb) * tensor_scale))``. A NaN
    scale gives NaN. A Hadamard transform is undone in float32 and its padding cropped.
    """
    scales = block_scale_values(operand)
    if operand.tensor_scale is not None:
        scales = scales * operand.tensor_scale
    if operand.hadamard is None:
        return decode_scaled(operand, scales, dtype)
    values = inverse(decode_scaled(operand, scales, torch.float32), operand.hadamard)
    return values[:, : operand.length].to(dtype).contiguous()


def block_scale_values(operand: Operand) -> torch.Tensor:
    """Stored block scales as float32, in the same shape and memory order; NaN bytes are NaN."""
    scale, kind = operand.scale, operand.format.scale
    if kind.kind == "ratio":
        return scale
    if kind.kind == "two_level":
        across = scale.dim() == 2 and is_stored_across(scale)
        values = decode_bytes(scale.t() if across else scale, kind.element)
        return values.t() if across else values
    byte = scale.to(torch.int32)
    field = byte + kind.lowest if kind.lowest else byte
    bits = (field << 23).masked_fill_(field == 0, 0x00400000).masked_fill_(byte >= kind.nan_code, 0x7FC00000)
    return bits.view(torch.float32)


def decode_scaled(operand: Operand, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Code values times float32 `scales` of the format's blocks (None: without scales), [R, stored C] in `dtype`.

    The result has the memory order of the codes: for a transposed view it is a transposed view.
    """
    element, across = operand.format.element, is_stored_across(operand.codes)
    codes = (operand.codes.t() if across else operand.codes).view(torch.uint8)
    if scales is not None and across and scales.dim() == 2:
        scales = scales.t()
    per_byte, contraction, device = element.codes_per_byte, 0 if across else 1, codes.device
    shape = (operand.rows, operand.stored_length)
    result = torch.empty(shape[::-1] if across else shape, dtype=dtype, device=device)
    grid = Grid.of(operand.format, result, contraction)
    workspace = Workspace(device)
    for chunk in grid.chunks(device):
        (r, c), padded = chunk.shape, grid.padded(chunk)
        stored = grid.packed_window(codes, chunk, per_byte)
        if per_byte == 2:
            stored = unpack_fp4(stored, chunk.shape[contraction], contraction)
        window = result[chunk.rows, chunk.columns]
        in_place = dtype == torch.float32 and (r, c) == padded
        values = window if in_place else workspace.take("values", padded, torch.float32)
        decode_codes(stored, element, workspace, values[:r, :c])
        if scales is not None and scales.dim() == 0:
            values.mul_(scales)
        elif scales is not None:
            block_scales = scales[chunk.block_rows, chunk.block_columns]
            grid.as_blocks(values).mul_(block_scales[:, None, :, None])
        if not in_place:
            window.copy_(values[:r, :c])
    return result.t() if across else result


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
    if out_dtype == torch.bfloat16 and bias is None and reads_values(a.codes) and _has_bfloat16_units():
        product = _bfloat16_product(a, b)
        if product is not None:
            return product
    (a_MK, a_scale), (b_NK, b_scale) = _operand_and_epilogue(a), _operand_and_epilogue(b)
    with full_float32(a_MK.device):
        accumulator = a_MK @ b_NK.t()
    _scale_accumulator(accumulator, a_scale, b_scale)
    if bias is not None:
        accumulator += bias.to(torch.float32)
    return accumulator.to(out_dtype)


def _exact_values(operand: Operand) -> torch.Tensor:
    """The values of an operand in float64 [R, C], in which every factor of an element is exact."""
    scales = block_scale_values(operand).double()
    if operand.tensor_scale is not None:
        scales = scales * operand.tensor_scale.double()
    if scales.dim():
        scales = spread(scales, operand.format.block, (operand.rows, operand.stored_length))
    return decode_scaled(operand, None, torch.float64).mul_(scales)


def _operand_and_epilogue(
    operand: Operand, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values [R, C] for the GEMM, and the factor of the accumulator's rows: (), [R, 1] or None."""
    block_rows, block_columns = operand.format.block
    if operand.format.scale.name == "FP32" and block_columns is None:
        scale = operand.scale
        if scale.dim() == 2 and block_rows is not None and block_rows > 1:
            scale = scale.repeat_interleave(block_rows, 0)[: operand.rows]
        return decode_scaled(operand, None, dtype), scale
    return decode_scaled(operand, block_scale_values(operand), dtype), operand.tensor_scale


@functools.cache  # one answer; building the table of capabilities takes as long as a small product
def _has_bfloat16_units() -> bool:
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _bfloat16_product(a: Operand, b: Operand) -> torch.Tensor | None:
    """``round(a @ b.T)`` on the bfloat16 units of a CPU; None where it could differ from the sum in float32.

    They flush subnormal numbers, so every product, scaled as it will be, must be a multiple of a normal power of two.
    On units named AMX, oneDNN (3.10) spreads a NaN to the row before its own; what is not finite is multiplied again.
    """
    a_unit, b_unit = _unit(a), _unit(b)
    if a_unit is None or b_unit is None:
        return None
    (a_MK, a_scale), (b_NK, b_scale) = (_operand_and_epilogue(operand, torch.bfloat16) for operand in (a, b))
    alpha = math.prod(float(scale) for scale in (a_scale, b_scale) if scale is not None)
    if not (min(alpha, a_unit * b_unit, alpha * a_unit * b_unit) >= 2.0**-126 and alpha < 2.0**127):
        return None
    with full_float32(a_MK.device):
        if alpha == 1:
            product = a_MK @ b_NK.t()
        else:
            product = torch.addmm(a_MK.new_zeros(1), a_MK, b_NK.t(), beta=0, alpha=alpha)
    return product if bool(product.isfinite().all()) else None


def _unit(operand: Operand) -> float | None:
    """A power of two of which all values for the GEMM are multiples; None where bfloat16 cannot hold the values."""
    element, scale, kind = operand.format.element, operand.scale, operand.format.scale
    if (operand.tensor_scale is not None and operand.tensor_scale.dim()) or not scale.numel():
        return None
    if kind.kind == "ratio":
        return element.step if scale.dim() == 0 else None
    if kind.kind == "threshold":
        return element.step * 2.0 ** (int(scale.amin()) + kind.lowest - 127)
    scale_step, significant = kind.element.step, element.mantissa_bits + kind.element.mantissa_bits + 2
    return element.step * scale_step if significant <= 8 else None


def _scale_accumulator(accumulator: torch.Tensor, a_scale: torch.Tensor | None, b_scale: torch.Tensor | None) -> None:
    """Multiply by ``alpha = f32(a_scale * b_scale)`` in place; a_scale meets rows, b_scale columns.

    alpha may leave float32's range although the product with the accumulator does not: it is applied as a float32
    significand times 2^h, then 2^(e - h), which rounds like one multiplication wherever alpha is a normal number.
    """
    if a_scale is None and b_scale is None:
        return
    if reads_values(accumulator) and all(scale is None or scale.dim() == 0 for scale in (a_scale, b_scale)):
        alpha = math.prod(float(scale) for scale in (a_scale, b_scale) if scale is not None)  # exact in float64
        if 2.0**-126 <= alpha < 2.0**127:
            accumulator.mul_(alpha)
            return
    one = torch.ones((), dtype=torch.float64, device=accumulator.device)
    left = one if a_scale is None else a_scale.double()
    right = one if b_scale is None else b_scale.double().t()
    significand, exponent = torch.frexp(left * right)
    half = exponent // 2
    accumulator.mul_(significand.to(torch.float32) * power_of_two(half))
    accumulator.mul_(power_of_two(exponent - half))


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float32, for int exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Keep TF32 (CUDA), bf16 shortcuts (CPU) and torch.autocast out of a float32 GEMM, whatever the process allows.

    The setting is that of the process: it is raised while any thread is inside, and put back by the last one to leave.
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


# Number of threads inside, and the way back to the former setting: a setting of torch for the whole process.
_lock = threading.Lock()
_inside = 0
_put_back: Callable[[], None] = lambda: None  # noqa: E731


def _raise_precision() -> Callable[[], None]:
    """Ask for IEEE float32 products; returns the function that puts the former setting back."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    former = [backend.fp32_precision for backend in backends]

    def put(values: Sequence[object]) -> None:
        for backend, value in zip(backends, values, strict=True):
            if backend.fp32_precision != value:
                backend.fp32_precision = value

    put(["ieee", "ieee"])
    return functools.partial(put, former)


def fold_codes(operand: Operand, form: str, part: Part, changed: torch.Tensor | None = None) -> Operand:
    """An MX or NVFP4 operand in the form "folded", "tiles" or "rows" (docs/numerics.md, section 9).

    `part`: what the new scales fill, with 0 where no element is. `changed`: int64 (), filled with the number of
    elements whose value changes. A NaN may have another sign than a cast's.
    """
    fmt = folded_format(operand.format, form)
    tile_rows, tile_columns = fmt.block
    assert tile_rows is not None
    if operand.format.is_tile:  # its scales, repeated for every row
        one_row = dataclasses.replace(operand.format, block=(1, operand.format.block[1]))
        each = operand.scale.repeat_interleave(operand.format.block[0] or 1, 0)[: operand.rows]
        operand = dataclasses.replace(operand, scale=each, format=one_row)
    is_mx = operand.format.scale.name == "E8M0"
    rows, blocks = operand.scale.shape
    per_group = blocks if tile_columns is None else tile_columns // (operand.format.block[1] or 1)
    grid = -(-rows // tile_rows), -(-blocks // per_group)
    stored = operand.scale.to(torch.int32)
    if not is_mx:
        stored = stored.masked_fill(stored & 0x7F == 0x7F, 0) & 0x7F
    if (rows, blocks) != (grid[0] * tile_rows, grid[1] * per_group):
        stored = F.pad(stored, (0, grid[1] * per_group - blocks, 0, grid[0] * tile_rows - rows))
    groups = stored.view(grid[0], tile_rows, grid[1], per_group)
    largest = groups.amax((1, 3))
    # Shifted values have few enough bits for bfloat16.
    if is_mx:
        is_nan = largest == 255
        headroom = math.floor(math.log2(fmt.element.max / operand.format.element.max))
        exponent = (largest - headroom).clamp_min(1)
        # They are the values under the scale bytes of their shift.
        shift = (groups - exponent[:, None, :, None] + 127).clamp_min(0).masked_fill(is_nan[:, None, :, None], 255)
        shift = block_scale_values(dataclasses.replace(operand, scale=shift.view(stored.shape)[:rows, :blocks]))
        scale = power_of_two(exponent - 127).masked_fill_(is_nan, float("nan"))
    else:
        exponent = ((largest + 6) >> 3).clamp_min(4) - 13
        shift = block_scale_values(operand) * spread(power_of_two(-exponent), (tile_rows, per_group), (rows, blocks))
        scale = power_of_two(exponent)
        scale = scale if operand.tensor_scale is None else scale * operand.tensor_scale
    values = decode_scaled(operand, shift, torch.bfloat16)
    scale = F.pad(scale, (0, part.shape[1] - grid[1]))
    codes = values.to(codes_dtype(fmt.element))
    if not is_mx:
        codes.view(torch.uint8).masked_fill_(values.isnan(), fmt.element.nan_code)
    if changed is not None:
        changed.copy_(((codes.to(values.dtype) != values) & ~values.isnan()).sum(), non_blocking=True)
    return dataclasses.replace(operand, codes=codes, scale=scale, tensor_scale=None, format=fmt)


def turned(codes: torch.Tensor) -> torch.Tensor:
    """The transpose of codes [R, C], row by row in memory."""
    return codes.t().contiguous()
