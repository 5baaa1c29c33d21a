"""`quantize_both`: the two operand forms of one matrix, x and x.T, sharing work where the bytes allow it."""

import torch

from microfloat.formats import ScaledFormat
from microfloat.recipes import Cast, Delayed
from microfloat.torch.backends.base import Operand
from microfloat.torch.reference._elements import pack_fp4, unpack_fp4
from microfloat.torch.reference._grid import is_stored_across
from microfloat.torch.reference._quantize import quantize_operand, tensor_amax

__all__ = ["quantize_both", "transpose_operand"]


def quantize_both(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, *, seed: torch.Tensor | None = None,
    row_stream: int = 0, column_stream: int = 0, amax: torch.Tensor | None = None,
    scale_enc: torch.Tensor | None = None,
) -> tuple[Operand | None, Operand | None]:  # fmt: skip
    """(x under `row_cast`, x.T under `column_cast`); None for a cast that is None.

    Equal casts that commute with transposition are made once (docs/numerics.md 3.1, "Sharing"). `amax` and `scale_enc`
    go to those casts that take them. Codes and scales of x.T may be transposed views: they lie in memory as x does.
    """
    if row_cast is not None and row_cast == column_cast and row_cast.transposes:
        shared = quantize_operand(x, row_cast, amax=amax, scale_enc=scale_enc)
        return shared, transpose_operand(shared)
    if amax is None and row_cast is not None and column_cast is not None:
        amax = _common_amax(x, row_cast, column_cast)
    operands = []
    for cast, x_RC, stream in ((row_cast, x, row_stream), (column_cast, x.t(), column_stream)):
        if cast is None:
            operands.append(None)
            continue
        given = amax if _takes_amax(cast) else None
        encode_scale = scale_enc if isinstance(cast.scaling, Delayed) else None
        operands.append(quantize_operand(x_RC, cast, seed=seed, stream=stream, amax=given, scale_enc=encode_scale))
    return operands[0], operands[1]


def transpose_operand(operand: Operand) -> Operand:
    """The operand of x.T, for formats whose blocks commute with transposition and without a Hadamard transform.

    A view of the same codes where they are one per byte.
    """
    codes = operand.codes.t()
    if operand.format.element.codes_per_byte == 2:  # packed along the other axis now
        axis = 0 if is_stored_across(operand.codes) else 1
        stored = codes if axis == 0 else operand.codes
        unpacked = unpack_fp4(stored, operand.length, axis)
        packed = [*unpacked.shape]
        packed[1 - axis] = -(-packed[1 - axis] // 2)
        stored = codes.new_empty(packed)
        pack_fp4(unpacked, stored, 1 - axis)
        codes = stored if axis == 0 else stored.t()
    scale = operand.scale.t() if operand.scale.dim() == 2 else operand.scale
    return Operand(
        codes, scale, operand.tensor_scale, operand.format, operand.length, operand.rows,
        power_of_two=operand.power_of_two,
    )  # fmt: skip


def _common_amax(x: torch.Tensor, row_cast: Cast, column_cast: Cast) -> torch.Tensor | None:
    """The tensor amax that both casts would measure, measured once; None where they do not want the same one."""
    wanting = [_takes_amax(cast) and not _is_row_scaled(cast.format) for cast in (row_cast, column_cast)]
    transformed = any(cast.hadamard is not None for cast in (row_cast, column_cast))
    return tensor_amax(x) if all(wanting) and not transformed else None


def _takes_amax(cast: Cast) -> bool:
    constants = cast.rule.two_level
    if constants is not None:
        return constants.tensor_scale
    per_tensor_fp32 = cast.format.is_per_tensor and cast.format.scale.name == "FP32"
    return per_tensor_fp32 and not isinstance(cast.scaling, Delayed)


def _is_row_scaled(fmt: ScaledFormat) -> bool:
    return fmt.tensor_scale == "row"
