"""Metrics on the device by launches of `kernels.casts.measures`, with the numbers of `microfloat.torch.measuring`.

`programs`: the executor of a backend, which binds passes to launches.

Legend: R = rows of an operand form (of a part of it), C = its contraction length.
"""

from types import ModuleType

import torch

from microfloat.passes.measures import Scales, cast_measures, product_measures, rows_measures, whole_measures
from microfloat.passes.tables import kernel_cast
from microfloat.recipes import Cast
from microfloat.torch._typing import Maybe
from microfloat.torch.backends.base import Operand

__all__ = ["count_whole", "measure_product", "measure_rows", "serves"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serves(dtype: torch.dtype, cast: Cast | None = None) -> bool:
    """True if kernels read tensors of this dtype, and codes of this cast."""
    return dtype in _DTYPES and (cast is None or not kernel_cast(cast).refusal)


def _like(x: torch.Tensor) -> tuple:
    return x.shape, x.stride(), x.dtype, x.data_ptr() & 15


def count_whole(programs: ModuleType, matrix: torch.Tensor, words: torch.Tensor) -> None:
    """Fill int64 words that are zero: bits of the float32 amax, NaN ignored; the counts of NaN and of infinity."""
    programs.run_passes(
        ("count whole", *_like(matrix)), lambda: whole_measures(programs.matrix_of(matrix)), matrix.device,
        (None, matrix, None, words),
    )  # fmt: skip


def measure_rows(
    programs: ModuleType, x_RC: torch.Tensor, operand: Operand | None, cast: Cast | None, block: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float64 numbers, float32 spans [2, R, blocks, pieces of a block]) of rows and of what a cast made of them.

    `block`: the number of elements whose magnitudes are compared, None for a row; that of the format, with a cast.
    """
    if operand is None or cast is None:
        assert block is not None
        numbers, spans = programs.run_passes(
            ("rows", block, *_like(x_RC)), lambda: rows_measures(programs.matrix_of(x_RC), block), x_RC.device,
            (None, x_RC, None),
        )  # fmt: skip
        return numbers, spans[..., None]
    codes, scale, level = operand.codes, operand.scale, operand.tensor_scale
    shape, strides = (1, 1), (0, 0)
    if scale.dim() == 2:
        shape = scale.shape[0], scale.shape[1]
        strides = scale.stride(0), scale.stride(1) if block is not None else 0
    scales = Scales(shape, strides, None if level is None else level.stride(0) if level.dim() else 0)
    numbers, spans = programs.run_passes(
        ("measured cast", cast.format, cast.hadamard, scales, *_like(x_RC)),
        lambda: cast_measures(programs.matrix_of(x_RC), cast, scales), x_RC.device,
        (None, x_RC, None, codes, scale, level),
    )  # fmt: skip
    return numbers, spans[:, :, None] if block is None else spans[..., None]


def measure_product(
    programs: ModuleType, exact: torch.Tensor, result: torch.Tensor, bias: Maybe
) -> torch.Tensor:  # fmt: skip
    """float64 [programs, 4]: the sums of a product against the exact one, which is float64 without gaps."""
    name = None if bias is None else str(bias.dtype)
    return programs.run_passes(
        ("measured product", name, *_like(result)), lambda: product_measures(programs.matrix_of(result), name),
        exact.device, (None, exact, None, result, bias),
    )[0]  # fmt: skip
