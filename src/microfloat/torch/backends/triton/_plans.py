"""What a Cast means to the kernels in torch's words, worked out once per Cast."""

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch

from microfloat.formats import ElementFormat
from microfloat.kernels.constants import BlockCast
from microfloat.kernels.device.tiles import SCALE_COLUMN_MAJOR
from microfloat.kernels.tables import MOST_CASTS, KernelCast, kernel_cast
from microfloat.recipes import Cast
from microfloat.torch.backends.base import Operand

__all__ = ["CastPlan", "codes_dtype", "operand", "paired", "plan_of"]

_FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def codes_dtype(element: ElementFormat) -> torch.dtype:
    """The dtype of stored codes: float8 for E4M3 and E5M2, bytes otherwise."""
    return _FLOAT8.get(element.name, torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class CastPlan(KernelCast):
    """A `KernelCast` and the dtypes of what is written.

    `scale_layout`: of one-row blocks. `block_casts`: the constants that `kernels.casts.blocks` takes for codes and for
    values. `beside`: the plan where one pass writes both operands, if that differs (`paired`).
    """

    codes_dtype: torch.dtype
    scale_dtype: torch.dtype
    scale_layout: int
    block_casts: tuple[BlockCast, BlockCast]
    beside: "CastPlan | None" = None

    def constant(self, output: int) -> BlockCast:
        """The constant that `kernels.casts.blocks` takes; `output`: codes or values."""
        return self.block_casts[output]


def operand(plan: CastPlan | None, codes: Any, scale: Any, rows: int, length: int) -> Operand | None:
    """The operand of a plan's format, or None without a plan."""
    if plan is None:
        return None
    cast = plan.cast
    return Operand(codes, scale, None, cast.format, rows, length, power_of_two=cast.rule.power_of_two)


def paired(row: CastPlan | None, column: CastPlan | None) -> tuple[CastPlan | None, CastPlan | None]:
    """The plans of a pass that writes both operands.

    MX scales then lie column-major in memory. Four bytes at a time, all that a tile has of a row of them, they would be
    written as parts of sectors, which takes a tenth of the time of a copy (docs/performance.md). The values are the
    same in any memory order.
    """
    if row is None or column is None:
        return row, column
    return row.beside or row, column.beside or column


@functools.lru_cache(MOST_CASTS)
def plan_of(cast: Cast) -> CastPlan:
    """The plan of a Cast."""
    numbers = kernel_cast(cast)
    layout = numbers.usual_scale_layout
    beside = None
    if numbers.block == (1, 32) and layout != SCALE_COLUMN_MAJOR.value:
        beside = _with_layout(numbers, SCALE_COLUMN_MAJOR.value, None)
    return _with_layout(numbers, layout, beside)


def _with_layout(numbers: KernelCast, layout: int, beside: CastPlan | None) -> CastPlan:
    same: dict[str, Any] = {field.name: getattr(numbers, field.name) for field in fields(KernelCast)}
    return CastPlan(
        **same, codes_dtype=codes_dtype(numbers.cast.format.element),
        scale_dtype=torch.float32 if numbers.float_scale else torch.uint8, scale_layout=layout,
        block_casts=(numbers.block_cast(0, layout), numbers.block_cast(1, layout)), beside=beside,
    )  # fmt: skip
