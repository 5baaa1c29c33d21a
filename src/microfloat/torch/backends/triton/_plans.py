"""What a Cast means to the kernels: a few numbers, worked out once per Cast object."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from microfloat.formats import ElementFormat
from microfloat.kernels._scales import (
    FOUR_OVER_SIX_MAE,
    FOUR_OVER_SIX_MSE,
    ONE_LEVEL,
    TWO_LEVEL,
    TWO_LEVEL_DIVIDED,
)
from microfloat.kernels._tiles import SCALE_COLUMN_MAJOR, SCALE_ROW_MAJOR
from microfloat.recipes import Cast, Current
from microfloat.scale_rules import e8m0_threshold
from microfloat.torch.backends.base import Operand

__all__ = ["CastPlan", "codes_dtype", "operand", "plan_of"]

_FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def codes_dtype(element: ElementFormat) -> torch.dtype:
    """The dtype of stored codes: float8 for E4M3 and E5M2, bytes otherwise."""
    return _FLOAT8.get(element.name, torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class CastPlan:
    """A Cast as kernels take it.

    `family`: which kernel (`scaled`, `blocks`, `tiles`, `nvfp4`, or "" = none, with the reason in `refusal`). `rule`:
    the mantissa threshold of E8M0, or 1 for powers of two. `scale_dtype`, `codes_dtype`, `codes_per_byte`, `block`: the
    shapes of what is written. `scale_layout`: of one-row blocks. `scaled_cast`: the constant that `kernels.scaled` and
    `kernels.fold` take. `block_casts`: those of `kernels.blocks` for codes and for values. `nvfp4_cast`: the constant
    that `kernels.nvfp4` takes, without its last two entries (OUTPUT, ALIGNED). `bare`: the cast without its Hadamard
    transform, where that is a pass of its own.
    """

    cast: Cast
    family: str
    refusal: str
    mantissa_bits: int
    bias: int
    rule: int
    block: tuple[int | None, int | None]
    stochastic: bool
    epsilon: float
    codes_dtype: torch.dtype
    codes_per_byte: int
    scale_dtype: torch.dtype
    scale_layout: int
    scaled_cast: tuple
    block_casts: tuple[tuple, tuple]
    nvfp4_cast: tuple
    bare: Cast | None

    def constant(self, output: int) -> tuple:
        """The constant that `kernels.blocks` takes; `output`: codes or values."""
        return self.block_casts[output]


def operand(plan: CastPlan | None, codes: Any, scale: Any, rows: int, length: int) -> Operand | None:
    """The operand of a plan's format, or None without a plan."""
    return None if plan is None else Operand(codes, scale, None, plan.cast.format, rows, length)


_PLANS: dict[int, tuple[Cast, CastPlan]] = {}
_MOST_PLANS = 512


def plan_of(cast: Cast) -> CastPlan:
    """The plan of a Cast, found by identity where it can be (hashing a Cast costs more than a launch)."""
    known = _PLANS.get(id(cast))
    if known is not None and known[0] is cast:
        return known[1]
    if len(_PLANS) >= _MOST_PLANS:  # casts made anew for every call must not pile up
        _PLANS.clear()
    plan = _plan_of_value(cast)
    _PLANS[id(cast)] = (cast, plan)
    return plan


@functools.lru_cache(_MOST_PLANS)
def _plan_of_value(cast: Cast) -> CastPlan:
    return _make(cast)


def _make(cast: Cast) -> CastPlan:
    fmt, element = cast.format, cast.format.element
    family, refusal = _family(cast)
    is_e8m0 = fmt.scale.name == "E8M0"
    rule = e8m0_threshold(cast.rule, element) if is_e8m0 else int(cast.rule.power_of_two)
    stored = torch.float32 if fmt.scale.name == "FP32" else torch.uint8
    # FP8 block GEMMs read 1x128 scales column-major; the values are the same in any memory order.
    layout = SCALE_COLUMN_MAJOR if fmt.block == (1, 128) and not is_e8m0 else SCALE_ROW_MAJOR
    short = (element.mantissa_bits, element.bias, rule, cast.is_stochastic)
    start = (*short[:2], int(stored == torch.float32), rule, fmt.block[1], cast.is_stochastic)
    end = (layout.value, fmt.block[0] != 1)
    return CastPlan(
        cast, family, refusal, element.mantissa_bits, element.bias, rule, fmt.block, cast.is_stochastic,
        cast.scaling.amax_epsilon if isinstance(cast.scaling, Current) else 0.0,
        codes_dtype(element), element.codes_per_byte,
        stored, layout.value, short, ((*start, 0, *end), (*start, 1, *end)),
        _nvfp4_cast(cast) if family == "nvfp4" else (), _bare(cast),
    )  # fmt: skip


_ELEMENTS = {("E4M3", 3, 7), ("E5M2", 2, 15), ("E3M2", 2, 3), ("E2M3", 3, 1), ("E2M1", 1, 1)}
_BLOCKS = (16, 32, 64, 128)


def _family(cast: Cast) -> tuple[str, str]:
    """Which kernels serve a Cast; "" and the reason where none does."""
    fmt, element = cast.format, cast.format.element
    if (element.name, element.mantissa_bits, element.bias) not in _ELEMENTS:
        return "", f"element {element.name} is not one of the stock elements"
    if fmt.scale.name == "E4M3" and fmt.block in ((1, 16), (16, 16)) and element.name == "E2M1":
        return "nvfp4", ""
    if fmt.block in ((None, None), (1, None), (128, 128)) and fmt.scale.name == "FP32" and element.bits == 8:
        return "scaled", ""
    if (
        fmt.block[0] in (1, fmt.block[1])
        and fmt.block[1] in _BLOCKS
        and (element.bits == 8 or fmt.scale.name == "E8M0")
    ):
        return "blocks", ""
    return "", f"block {fmt.block_text} of {fmt.name}"


def _bare(cast: Cast) -> Cast | None:
    """The cast to run on the transformed matrix, for formats whose kernels do not transform."""
    if cast.hadamard is None or (cast.format.scale.name == "E4M3" and cast.format.tensor_scale != "row"):
        return None
    return replace(cast, hadamard=None)


def _nvfp4_cast(cast: Cast) -> tuple:
    level = cast.rule.two_level
    assert level is not None
    if level.four_over_six is not None:
        rule = FOUR_OVER_SIX_MSE if level.four_over_six == "mse" else FOUR_OVER_SIX_MAE
    elif level.inverse_six is not None:
        rule = TWO_LEVEL
    else:
        rule = TWO_LEVEL_DIVIDED if level.tensor_scale else ONE_LEVEL
    signs = -1 if cast.hadamard is None else cast.hadamard.sign_mask
    per_row = cast.format.tensor_scale == "row" and level.tensor_scale
    return (
        rule.value, level.capacity, level.inverse_six or 0.0, cast.is_stochastic, signs, cast.format.is_tile, per_row
    )  # fmt: skip
