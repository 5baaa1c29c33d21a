"""One Linear under FP8 with 1x128 and 128x128 scales, with everything decided but the addresses.

As `_tensorwise`, for `Float8BlockScaling`: x and dy in 1x128 blocks both ways, weights in 128x128 tiles, one launch
each. Legend: M = rows of x, K = in features, N = out features; a right operand is kept as its transpose, which is how
the GEMM takes it, and the scales of tiles likewise; those of 1x128 blocks lie column-major.
"""

from typing import Any

import torch
import torch.nn.functional as F

from microfloat.recipes import Cast, Recipe
from microfloat.torch.backends import shared
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.native._tensorwise import Delayed, aligned_for_plan
from microfloat.torch.backends.triton import refusal
from microfloat.torch.backends.triton._blocks import blocks_launch
from microfloat.torch.backends.triton._launch import Matrix
from microfloat.torch.backends.triton._plans import CastPlan, plan_of
from microfloat.torch.backends.triton._scaled import TILE, cast_launch

__all__ = ["BlockwisePlan", "blockwise_plan"]

_unsafe_view = torch.ops.aten._unsafe_view.default
_NO_STREAM = 0
_SIDE = 128
# What `_Side` makes: codes and scales of the row operand, of the column operand.
_Cast = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class _Side:
    """How one tensor is cast: the launch, and what its outputs look like. Either operand may be unwanted."""

    __slots__ = ("_is_tile", "_launch", "_templates")

    def __init__(
        self, x: torch.Tensor, row: Cast | None, column: Cast | None, *, row_right: bool, column_right: bool
    ) -> None:
        matrix = Matrix(x if x.dim() == 2 else x.view(-1, x.shape[-1]))
        plans = None if row is None else plan_of(row), None if column is None else plan_of(column)
        self._is_tile = any(plan is not None and plan.block == (_SIDE, _SIDE) for plan in plans)
        self._templates = (
            *_templates(x, plans[0], matrix.rows, matrix.columns, row_right),
            *_templates(x, plans[1], matrix.columns, matrix.rows, column_right),
        )
        launch = cast_launch(matrix, *plans, TILE, records=False) if self._is_tile else blocks_launch(matrix, *plans)
        self._launch = launch.prepared()

    def __call__(self, x: torch.Tensor, stream: int) -> _Cast:
        row, row_scale, column, column_scale = made = tuple(
            None if template is None else torch.empty_like(template) for template in self._templates
        )
        if self._is_tile:
            tensors = (x, row, column, row_scale, column_scale, None, None, None, None, None)
        else:
            tensors = (x, *made, None)
        at = self._launch.at
        if at is None:  # the first time, and always in the interpreter
            self._launch(stream, *tensors)
        else:
            at(stream, *[None if t is None else t.data_ptr() for t in tensors])
        return row, row_scale, column, column_scale


def _templates(
    x: torch.Tensor, plan: CastPlan | None, rows: int, length: int, right: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What codes and scales look like, without memory."""
    if plan is None:
        return None, None
    across, along = -(-rows // (plan.block[0] or rows)), -(-length // _SIDE)
    codes = ((length, rows), (1, length)) if right else ((rows, length), (length, 1))
    if plan.block == (_SIDE, _SIDE):
        scale = ((along, across), (1, along)) if right else ((across, along), (along, 1))
    else:
        scale = ((across, along), (1, across))
    made = (
        torch.empty_strided(*codes, dtype=plan.codes_dtype, device=x.device),
        torch.empty_strided(*scale, dtype=torch.float32, device=x.device),
    )
    for template in made:
        template.untyped_storage().resize_(0)
    return made


class BlockwisePlan:
    """fprop, dgrad and wgrad of one Linear for one kind of input; holds no data and may serve many layers."""

    delayed = Delayed
    is_delayed = False

    def __init__(self, recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, wants_dx: bool, wants_dw: bool) -> None:
        self.recipe, self.wants_dx, self.wants_dw = recipe, wants_dx, wants_dw
        self.dtype, self.device = x.dtype, x.get_device()
        self.rows, self.in_features, self.out_features = x.numel() // x.shape[-1], x.shape[-1], weight.shape[0]
        self.x_shape = None if x.dim() == 2 else x.shape
        self.y_shape = None if x.dim() == 2 else (*x.shape[:-1], self.out_features)
        fprop, dgrad, wgrad = recipe.fprop, recipe.dgrad, recipe.wgrad
        self._x = _Side(x, fprop.lhs, wgrad.rhs if wants_dw else None, row_right=False, column_right=True)
        self._w = _Side(weight, fprop.rhs, dgrad.rhs if wants_dx else None, row_right=True, column_right=True)
        self._dy: _Side | None = None  # worked out when the first dy is seen
        self._x_key = ("blocks", fprop.lhs, wgrad.rhs)
        self.module: Any = None  # the backend, for what the general path must do

    def _stream(self) -> int:
        return _NO_STREAM if self.device < 0 else torch._C._cuda_getCurrentRawStream(self.device)

    def quantize_weight(self, weight: torch.Tensor, delayed: None) -> "_Weight":
        """Both operands of the weight, to be kept for several calls."""
        return _Weight(self._w(weight, self._stream()))

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: None, x_delayed: None = None, w_delayed: None = None,
        kept: "_Weight | None" = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
        """y, and what backward needs: codes of x.T and their scales, codes of w.T and theirs."""
        stream = self._stream()
        w_row, w_row_scale, w_column, w_column_scale = self._w(weight, stream) if kept is None else kept.cast
        shares = self.wants_dw and shared.may_share(x)
        made = shared.find(x, self._x_key) if shares else None
        if made is None:
            made = self._x(x, stream)
            if shares:
                shared.keep(x, self._x_key, made)
        x_row, x_row_scale, x_column, x_column_scale = made
        y = _matmul(x_row, w_row, x_row_scale, w_row_scale, self.dtype, tile=True)
        if self.y_shape is not None:
            y = _unsafe_view(y, self.y_shape)  # not a view for autograd: an activation may work in place
        return y, (x_column, x_column_scale, w_column, w_column_scale)

    def takes(self, dy: torch.Tensor) -> bool:
        """Whether `backward` serves this gradient; the general path serves every other."""
        return (
            dy.dtype is self.dtype and dy.is_contiguous() and dy.get_device() == self.device and dy.data_ptr() & 15 == 0
        )

    def backward(
        self, dy: torch.Tensor, saved: tuple[torch.Tensor | None, ...], delayed: None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dx and dw, each where `forward` was told that it is wanted."""
        side = self._dy
        if side is None:
            side = self._dy = _Side(
                dy, self.recipe.dgrad.lhs if self.wants_dx else None, self.recipe.wgrad.lhs if self.wants_dw else None,
                row_right=False, column_right=False,
            )  # fmt: skip
        row, row_scale, column, column_scale = side(dy, self._stream())
        x_column, x_scale, w_column, w_scale = (
            None if tensor is None else _laid(tensor, template)
            for tensor, template in zip(saved, (*self._x._templates[2:], *self._w._templates[2:]), strict=True)
        )
        dx = dw = None
        if self.wants_dx:
            dx = _matmul(row, w_column, row_scale, w_scale, self.dtype, tile=True)
            del row  # its memory serves dw
            if self.x_shape is not None:
                dx = dx.view(self.x_shape)
        if self.wants_dw:
            dw = _matmul(column, x_column, column_scale, x_scale, self.dtype, tile=False)
        return dx, dw

    def operands(self, saved: tuple[torch.Tensor | None, ...]) -> tuple[Operand | None, Operand | None]:
        """What `forward` returned, as the operands of the general path: x.T for wgrad and w.T for dgrad."""
        x_column, x_scale, w_column, w_scale = saved
        x_cast, w_cast = self.recipe.wgrad.rhs, self.recipe.dgrad.rhs
        x_operand = w_operand = None
        if x_column is not None and x_scale is not None and x_cast is not None:
            codes = x_column.t().contiguous()
            x_operand = Operand(codes, x_scale, None, x_cast.format, self.in_features, self.rows)
        if w_column is not None and w_scale is not None and w_cast is not None:
            codes, scale = w_column.t().contiguous(), w_scale.t().contiguous()
            w_operand = Operand(codes, scale, None, w_cast.format, self.in_features, self.out_features)
        return x_operand, w_operand


class _Weight:
    """The operands of a weight that is kept for several calls."""

    __slots__ = ("cast", "column")

    def __init__(self, cast: _Cast) -> None:
        self.cast, self.column = cast, cast[2]


def _laid(saved: torch.Tensor, template: Any) -> torch.Tensor:
    """A saved tensor in the layout that the GEMM needs, should a saved-tensor hook have returned another."""
    return saved if saved.stride() == template.stride() else torch.empty_like(template).copy_(saved)


def _matmul(a: Any, b: Any, a_scale: Any, b_scale: Any, dtype: torch.dtype, *, tile: bool) -> torch.Tensor:
    kinds = F.ScalingType
    b_kind = kinds.BlockWise128x128 if tile else kinds.BlockWise1x128
    return F.scaled_mm(a, b, a_scale, kinds.BlockWise1x128, b_scale, b_kind, output_dtype=dtype)


def blockwise_plan(
    recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wants_dx: bool, wants_dw: bool
) -> BlockwisePlan | None:
    """The plan of a call, or None where only the general path serves it: see `tensorwise_plan`."""
    if bias is not None or not aligned_for_plan(x, weight, bias, wants_dw) or not _is_blockwise(recipe):
        return None
    # The GEMM wants the tiles' scales in columns of a multiple of four.
    if -(-weight.shape[1] // _SIDE) % 4 or (wants_dx and -(-weight.shape[0] // _SIDE) % 4):
        return None
    return BlockwisePlan(recipe, x, weight, wants_dx, wants_dw)


def _is_blockwise(recipe: Recipe) -> bool:
    """Whether x and dy have 1x128 FP32 scales and weights 128x128 ones, rounded to nearest, all measured when cast."""
    gemms = (recipe.fprop, recipe.dgrad, recipe.wgrad)
    blocks = ((1, _SIDE), (_SIDE, _SIDE)), ((1, _SIDE), (_SIDE, _SIDE)), ((1, _SIDE), (1, _SIDE))
    for gemm, wanted in zip(gemms, blocks, strict=True):
        if gemm.accumulate == "exact":
            return False
        for cast, block in zip(gemm.casts, wanted, strict=True):
            if cast is None or cast.format.block != block or cast.format.scale.name != "FP32" or refusal(cast):
                return False
            if cast.format.element.bits != 8 or cast.is_stochastic or cast.is_delayed or cast.hadamard is not None:
                return False
    w_row, w_column = plan_of(recipe.fprop.rhs), plan_of(recipe.dgrad.rhs)  # type: ignore[arg-type]
    return (w_row.rule, w_row.epsilon, w_row.codes_dtype) == (w_column.rule, w_column.epsilon, w_column.codes_dtype)
