"""The triton backend: every cast as one fused kernel, both orientations of a matrix in one pass.

The same functions as `torch.reference`, bit for bit, plus the forms that GEMMs of GPUs without block-scaled tensor
cores read: `quantize_to_bf16` (dequantized values, no codes written) and `fold_both` (MX folded to FP8 1x128).
`refusal` says which casts have no kernel, and why.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from microfloat.errors import NotSupportedError
from microfloat.kernels.tables import share_a_launch
from microfloat.recipes import Cast
from microfloat.torch import reference
from microfloat.torch.backends.base import Operand, Values
from microfloat.torch.backends.triton._blocks import fold_blocks, quantize_blocks, values_blocks
from microfloat.torch.backends.triton._dequantize import dequantize_operand
from microfloat.torch.backends.triton._fp6 import dequantize_packed, quantize_packed
from microfloat.torch.backends.triton._fused import (
    activation_backward_quantize,
    activation_backward_values,
    activation_quantize,
    activation_values,
    fuses,
)
from microfloat.torch.backends.triton._launch import Matrix
from microfloat.torch.backends.triton._norms import norm_quantize, norm_values
from microfloat.torch.backends.triton._nvfp4 import hadamard_transform, quantize_nvfp4, values_nvfp4
from microfloat.torch.backends.triton._plans import CastPlan, plan_of
from microfloat.torch.backends.triton._scaled import measure_amax, quantize_scaled
from microfloat.torch.backends.triton._swizzle import swizzle_scales

__all__ = [
    "activation_backward_quantize", "activation_backward_values", "activation_quantize", "activation_values", "amax",
    "dequantize", "dequantize_packed", "fold_both", "fuses", "norm_quantize", "norm_values", "quantize",
    "quantize_both", "quantize_packed", "quantize_to_bf16", "refusal", "scaled_matmul", "swizzle_scales",
]  # fmt: skip

# The GEMMs of this backend are torch's, in float32; `backends.native` has the vendor's.
scaled_matmul = reference.scaled_matmul
COLUMN_MAJOR_BLOCK_SCALES = True


def refusal(cast: Cast) -> str:
    """Why `cast` has no kernel here, or "" where it has one."""
    return plan_of(cast).refusal


def amax(x: torch.Tensor) -> torch.Tensor:
    """float32 () largest magnitude of matrix `x`; NaN is ignored, infinity counts (docs/numerics.md 2.3)."""
    if x.numel() == 0:
        return reference.amax(x)
    return measure_amax(Matrix(x))


def quantize(
    x: torch.Tensor, cast: Cast, *, transposed: bool = False, seed: torch.Tensor | None = None, stream: int = 0,
    batch: int = 0, amax: torch.Tensor | None = None, scale_enc: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
) -> Operand:  # fmt: skip
    """Quantize matrix `x` in operand form x, or x.T if `transposed`; see `torch.reference.quantize`.

    `record` (float32, delayed casts): its first element takes the larger of itself and the amax of `x` in the same
    pass.
    """
    row, column = quantize_both(
        x, None if transposed else cast, cast if transposed else None, seed=seed, row_stream=stream,
        column_stream=stream, batch=batch, amax=amax, scale_enc=scale_enc, record=record,
    )  # fmt: skip
    operand = column if transposed else row
    assert operand is not None
    return operand


def quantize_both(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, *, seed: torch.Tensor | None = None,
    row_stream: int = 0, column_stream: int = 0, batch: int = 0, amax: torch.Tensor | None = None,
    scale_enc: torch.Tensor | None = None, record: torch.Tensor | None = None,
) -> tuple[Operand | None, Operand | None]:  # fmt: skip
    """The row operand (x) and the column operand (x.T, codes stored transposed) of matrix `x`, each if asked for."""
    if x.numel() == 0:
        return _empty(x, row_cast, column_cast, seed, row_stream, column_stream, amax, scale_enc)
    row, column = _plan(row_cast), _plan(column_cast)
    if row and column and not share_a_launch(row, column):
        first, _ = quantize_both(
            x, row_cast, None, seed=seed, row_stream=row_stream, batch=batch, amax=amax, scale_enc=scale_enc,
            record=record
        )  # fmt: skip
        _, second = quantize_both(
            x, None, column_cast, seed=seed, column_stream=column_stream, batch=batch, amax=amax, scale_enc=scale_enc
        )  # fmt: skip
        return first, second
    plan = row or column
    if plan is not None and plan.bare is not None:
        stream = row_stream if row else column_stream
        operand = _quantize_transformed(x if row else x.t(), plan, seed=seed, row_stream=stream, batch=batch, amax=amax)
        return (operand, None) if row else (None, operand)
    turned = x.stride(0) == 1 and x.stride(1) != 1 and x.shape[0] > 1
    if turned:  # the transpose lies in memory row by row: exchange the roles
        x, row, column, row_stream, column_stream = x.t(), column, row, column_stream, row_stream
    family = (row or column).family  # type: ignore[union-attr]
    if family == "scaled":
        results = quantize_scaled(
            Matrix(x), row, column, seed=seed, row_stream=row_stream, column_stream=column_stream, amax=amax,
            scale_enc=scale_enc, record=record,
        )  # fmt: skip
    elif family == "nvfp4":
        results = quantize_nvfp4(
            Matrix(x), row, column, seed=seed, row_stream=row_stream, column_stream=column_stream, batch=batch,
            amaxes=None if amax is None else (amax, amax),
        )  # fmt: skip
    else:
        results = quantize_blocks(
            Matrix(x), row, column, seed=seed, row_stream=row_stream, column_stream=column_stream, batch=batch
        )
    return (results[1], results[0]) if turned else results


def quantize_to_bf16(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, *, seed: torch.Tensor | None = None,
    row_stream: int = 0, column_stream: int = 0, batch: int = 0, amax: torch.Tensor | None = None,
) -> tuple[Values | None, Values | None]:  # fmt: skip
    """Quantize and dequantize at once: the values of the row operand [R, C] and of the column operand [C, R].

    MX: the full value, rounded once to bfloat16. NVFP4: code x block scale, exact, under `tensor_scale`; a transformed
    operand stays transformed and is as long as it is stored. Both lie in the memory layout of `x` (the second is a
    transposed view), which bfloat16 GEMMs read in any orientation.
    """
    if x.numel() == 0:
        raise NotSupportedError("quantize_to_bf16: got an empty matrix, needed elements. Quantize it and dequantize.")
    row, column = _plan(row_cast), _plan(column_cast)
    options = {"seed": seed, "batch": batch, "amax": amax}
    if row and column and not share_a_launch(row, column):
        first, _ = quantize_to_bf16(x, row_cast, None, row_stream=row_stream, **options)
        _, second = quantize_to_bf16(x, None, column_cast, column_stream=column_stream, **options)
        return first, second
    turned = x.stride(0) == 1 and x.stride(1) != 1 and x.shape[0] > 1
    if turned:
        x, row, column, row_stream, column_stream = x.t(), column, row, column_stream, row_stream
    plan = row or column
    assert plan is not None
    streams = {"seed": seed, "row_stream": row_stream, "column_stream": column_stream, "batch": batch}
    row_scale = column_scale = None
    if plan.bare is not None and plan.family == "blocks":
        # The transform is a pass of its own: the values of its rows are the operand, whichever it is.
        transformed = hadamard_transform(x if row else x.t(), plan.cast.hadamard.sign_mask)  # type: ignore[union-attr]
        stream = row_stream if row else column_stream
        first, second = values_blocks(Matrix(transformed), plan, None, seed=seed, row_stream=stream, batch=batch)
        first, second = (first, None) if row else (None, first.t())  # type: ignore[union-attr]
    elif plan.family == "nvfp4" and plan.bare is None:
        amaxes = None if amax is None else (amax, amax)
        first, second, row_scale, column_scale = values_nvfp4(Matrix(x), row, column, amaxes=amaxes, **streams)
    elif plan.family == "blocks":
        first, second = values_blocks(Matrix(x), row, column, **streams)
    else:
        raise NotSupportedError(f"quantize_to_bf16 has no kernel for {plan.cast.format.name}, {plan.cast.hadamard}.")

    row_values = _as_values(first, row_scale, row, x.shape)
    column_values = _as_values(None if second is None else second.t(), column_scale, column, x.shape[::-1])
    return (column_values, row_values) if turned else (row_values, column_values)


def _as_values(
    values: torch.Tensor | None, scale: torch.Tensor | None, plan: CastPlan | None, extents: Sequence[int]
) -> Values | None:
    if values is None or plan is None:
        return None
    two_level = plan.cast.rule.two_level
    level = scale if two_level is not None and two_level.tensor_scale else None
    return Values(values, level, plan.cast.format, extents[0], extents[1], plan.cast.hadamard)


def dequantize(operand: Operand, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of an operand, [R, C] in `dtype`, rounded once from float32; see `torch.reference.dequantize`."""
    return dequantize_operand(operand, dtype)


def fold_both(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, *, tile: bool = False,
    seed: torch.Tensor | None = None, row_stream: int = 0, column_stream: int = 0,
) -> tuple[Operand | None, Operand | None, torch.Tensor]:  # fmt: skip
    """MX operands folded to FP8_1x128 (FP8_128x128 with `tile`) straight from `x`, and their lossy counts, int64[2].

    Equal to ``reference.fold(reference.quantize(x, cast))`` (docs/numerics.md, section 9).
    """
    row, column = _plan(row_cast), _plan(column_cast)
    for plan in (row, column):
        if plan is not None and not (plan.block == (1, 32) and plan.scale_dtype == torch.uint8 and plan.bare is None):
            raise NotSupportedError(
                f"fold_both: got {plan.cast.format.name} (hadamard {plan.cast.hadamard}), needed an MX format of 1x32 "
                "blocks without a Hadamard transform."
            )
    turned = x.stride(0) == 1 and x.stride(1) != 1 and x.shape[0] > 1
    if turned:
        x, row, column, row_stream, column_stream = x.t(), column, row, column_stream, row_stream
    first, second, lossy = fold_blocks(
        Matrix(x), row, column, tile=tile, seed=seed, row_stream=row_stream, column_stream=column_stream
    )
    return (second, first, lossy.flip(0)) if turned else (first, second, lossy)


def _quantize_transformed(x: torch.Tensor, plan: CastPlan, **options: Any) -> Operand:
    """A cast whose kernel does not transform: the transform as a pass of its own, then the bare cast of its rows."""
    assert plan.cast.hadamard is not None
    transformed = hadamard_transform(x, plan.cast.hadamard.sign_mask)
    operand, _ = quantize_both(transformed, plan.bare, None, **options)
    assert operand is not None
    return replace(operand, length=x.shape[1], hadamard=plan.cast.hadamard)


def _plan(cast: Cast | None) -> CastPlan | None:
    if cast is None:
        return None
    plan = plan_of(cast)
    if plan.refusal:
        raise NotSupportedError(f"the triton backend has no kernel for {plan.refusal}. Use backend='reference'.")
    return plan


def _empty(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, seed: torch.Tensor | None, row_stream: int,
    column_stream: int, amax: torch.Tensor | None, scale_enc: torch.Tensor | None,
) -> tuple[Operand | None, Operand | None]:  # fmt: skip
    """Operands of a matrix without elements: shapes and unit scales, no launch."""
    made = []
    for cast, transposed, stream in ((row_cast, False, row_stream), (column_cast, True, column_stream)):
        made.append(
            None
            if cast is None
            else reference.quantize(
                x, cast, transposed=transposed, seed=seed, stream=stream, amax=amax, scale_enc=scale_enc
            )
        )
    return made[0], made[1]
