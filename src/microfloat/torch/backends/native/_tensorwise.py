"""One Linear under per-tensor FP8 with everything decided but the addresses: what eager steps of small layers run.

The same launches with the same arguments as the general path (`prepare_both`, `scaled_matmul`), hence the same bytes.
Kernels, grids, constants and the layout of every output depend on what `microfloat.torch.planned` keys a plan by
(recipe, shapes, strides, dtypes, device, alignment, what needs a gradient), so they are worked out once.

Legend: M = rows of x, K = in features, N = out features. A right operand is kept as its transpose, [K, N] or [M, K]
with unit stride along the first axis, which is how the GEMM takes it.
"""

from typing import Any, NamedTuple

import torch

from microfloat.recipes import Cast, Recipe
from microfloat.torch.backends import shared
from microfloat.torch.backends import triton as casts
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.triton._launch import Matrix, Prepared, scratch
from microfloat.torch.backends.triton._plans import CastPlan, plan_of
from microfloat.torch.backends.triton._scaled import AMAX, GIVEN, amax_launch, cast_launch

__all__ = ["Delayed", "TensorwisePlan", "aligned_for_plan", "tensorwise_plan"]

_unsafe_view = torch.ops.aten._unsafe_view.default
_ALIGNMENT = 16
_NO_STREAM = 0


class Delayed(NamedTuple):
    """The delayed-scaling state that one cast reads and writes: its encode scale, and the history to record into."""

    scale_enc: torch.Tensor
    history: torch.Tensor | None


class _Weight(NamedTuple):
    """The operands of a weight: row codes for fprop, column codes for dgrad (each transposed), their scale."""

    row: torch.Tensor | None
    column: torch.Tensor | None
    scale: torch.Tensor


class _Side:
    """How one tensor is cast: the launches, and what their outputs look like. Either operand may be unwanted."""

    __slots__ = ("amax", "cast", "column", "recording_cast", "row")

    def __init__(
        self, x: torch.Tensor, row: Cast | None, column: Cast | None, *, row_transposed: bool, column_transposed: bool
    ) -> None:
        matrix = Matrix(x if x.dim() == 2 else x.view(-1, x.shape[-1]))
        plans = None if row is None else plan_of(row), None if column is None else plan_of(column)
        shapes = [(matrix.rows, matrix.columns), (matrix.columns, matrix.rows)]
        self.row = _template(x, plans[0], shapes[0], row_transposed)
        self.column = _template(x, plans[1], shapes[1], column_transposed)
        delayed = (row or column).is_delayed  # type: ignore[union-attr]
        self.amax: Prepared | None = None if delayed else amax_launch(matrix).prepared()
        mode = GIVEN if delayed else AMAX
        self.cast = cast_launch(matrix, *plans, mode, records=False).prepared()
        self.recording_cast = cast_launch(matrix, *plans, mode, records=True).prepared() if delayed else None

    def empty(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Room for the codes of both operands."""
        return (
            None if self.row is None else torch.empty_like(self.row),
            None if self.column is None else torch.empty_like(self.column),
        )

    def __call__(
        self, x: torch.Tensor, stream: int, row: torch.Tensor | None, column: torch.Tensor | None, scale: torch.Tensor,
        amax: torch.Tensor | None, delayed: Delayed | None, words: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Codes of x into `row` and `column`, their scale into `scale`. Current scaling measures into `amax`."""
        measure = self.amax
        cast: Any = self.cast if delayed is None or delayed.history is None else self.recording_cast
        if cast.at is None or (measure is not None and measure.at is None):
            # The first time, and always in the interpreter.
            source, history = (amax, None) if delayed is None else delayed
            if measure is not None:
                measure(stream, x, amax, words)
            cast(stream, x, row, column, scale, scale, source, None, history, None if history is None else words, None)
            return
        x_at, scale_at = x.data_ptr(), scale.data_ptr()
        row_at = None if row is None else row.data_ptr()
        column_at = None if column is None else column.data_ptr()
        if delayed is None:
            amax_at = amax.data_ptr()  # type: ignore[union-attr]
            measure.at(stream, x_at, amax_at, words.data_ptr())  # type: ignore[union-attr, misc]
            cast.at(stream, x_at, row_at, column_at, scale_at, scale_at, amax_at, None, None, None, None)
        else:
            source_at, history = delayed.scale_enc.data_ptr(), delayed.history
            history_at, words_at = None, None
            if history is not None:
                history_at, words_at = history.data_ptr(), words.data_ptr()  # type: ignore[union-attr]
            cast.at(stream, x_at, row_at, column_at, scale_at, scale_at, source_at, None, history_at, words_at, None)


# Codes and scales of small gradients, which no one needs after their GEMMs, for the next backward of the same plan on
# the same stream: launches of a stream follow each other, so the next cast waits for those GEMMs. An entry is taken out
# while it is in use, so that two threads never have the same. Key: id of the plan (kept in the entry), stream.
_TRANSIENTS: dict[tuple[int, int], tuple] = {}
_MOST_TRANSIENTS, _LARGEST_TRANSIENT = 16, 1 << 21  # entries; elements of dy, two bytes each


def _template(x: torch.Tensor, plan: CastPlan | None, shape: tuple[int, int], transposed: bool) -> torch.Tensor | None:
    """A tensor of the right shape, strides, dtype and device, without memory: `empty_like` of it costs least."""
    if plan is None:
        return None
    rows, length = shape
    layout = ((length, rows), (1, length)) if transposed else ((rows, length), (length, 1))
    template = torch.empty_strided(*layout, dtype=plan.codes_dtype, device=x.device)
    template.untyped_storage().resize_(0)
    return template


class TensorwisePlan:
    """fprop, dgrad and wgrad of one Linear for one kind of input; holds no data and may serve many layers."""

    delayed = Delayed

    def __init__(self, recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, wants_dx: bool, wants_dw: bool) -> None:
        self.recipe, self.wants_dx, self.wants_dw = recipe, wants_dx, wants_dw
        self.dtype, self.device, self.is_delayed = x.dtype, x.get_device(), recipe.is_delayed
        self.rows, self.in_features, self.out_features = x.numel() // x.shape[-1], x.shape[-1], weight.shape[0]
        self.x_shape = None if x.dim() == 2 else x.shape
        self.y_shape = None if x.dim() == 2 else (*x.shape[:-1], self.out_features)
        gemms = (recipe.fprop, recipe.dgrad, recipe.wgrad)
        self._fast = tuple(gemm.accumulate == "fast" for gemm in gemms)
        self._x = _Side(
            x, recipe.fprop.lhs, recipe.wgrad.rhs if wants_dw else None, row_transposed=False, column_transposed=True
        )
        self._w = _Side(
            weight, recipe.fprop.rhs, recipe.dgrad.rhs if wants_dx else None, row_transposed=True,
            column_transposed=True,
        )  # fmt: skip
        self._dy: _Side | None = None  # worked out when the first dy is seen
        # Activations that several Linears read are cast once.
        self._shares, self._x_key = wants_dw and not self.is_delayed, ("codes", recipe.fprop.lhs, recipe.wgrad.rhs)
        self._pools = self.rows * self.out_features <= _LARGEST_TRANSIENT
        self._torch_device = x.device
        self.module: Any = None  # the backend, for what the general path must do

    def _scalars(self, count: int) -> tuple[torch.Tensor, ...]:
        """float32 () tensors of one allocation, 16 bytes apart: `count` scales, then as many amaxes unless delayed."""
        if not self.is_delayed:
            count *= 2
        memory = torch.empty_strided((count,), (4,), dtype=torch.float32, device=self._torch_device)
        scalars = torch.unbind(memory)
        return scalars if not self.is_delayed else (*scalars, *scalars)  # nothing is measured into the second half

    def _place(self) -> tuple[int, torch.Tensor | None]:
        """The current stream, and scratch words where the launches need them."""
        stream = _NO_STREAM if self.device < 0 else torch._C._cuda_getCurrentRawStream(self.device)
        return stream, scratch(self.device)

    def quantize_weight(self, weight: torch.Tensor, delayed: Delayed | None) -> _Weight:
        """Both operands of the weight, to be kept for several calls."""
        stream, words = self._place()
        scale, amax = self._scalars(1)
        row, column = self._w.empty()
        self._w(weight, stream, row, column, scale, amax, delayed, words)
        return _Weight(row, column, scale)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x_delayed: Delayed | None = None,
        w_delayed: Delayed | None = None, kept: _Weight | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
        """y, and what backward needs: codes of x.T and their scale, codes of w.T and theirs."""
        stream, words = self._place()
        shares = self._shares and shared.may_share(x)
        known = shared.find(x, self._x_key) if shares else None
        if kept is not None:
            x_scale, x_amax = (None, None) if known is not None else self._scalars(1)
            w_row, w_column, w_scale = kept
        else:
            x_scale, w_scale, x_amax, w_amax = self._scalars(2)
            w_row, w_column = self._w.empty()
            self._w(weight, stream, w_row, w_column, w_scale, w_amax, w_delayed, words)
        if known is not None:
            x_row, x_column, x_scale = known
        else:
            x_row, x_column = self._x.empty()
            self._x(x, stream, x_row, x_column, x_scale, x_amax, x_delayed, words)  # type: ignore[arg-type]
            if shares:
                shared.keep(x, self._x_key, (x_row, x_column, x_scale))
        y = _scaled_mm(x_row, w_row, x_scale, w_scale, bias, None, self.dtype, self._fast[0])
        if self.y_shape is not None:
            y = _unsafe_view(y, self.y_shape)  # not a view for autograd: an activation may work in place
        return y, (x_column, x_scale, w_column, w_scale)

    def takes(self, dy: torch.Tensor) -> bool:
        """Whether `backward` serves this gradient; the general path serves every other."""
        return (
            dy.dtype is self.dtype and dy.is_contiguous() and dy.get_device() == self.device
            and dy.data_ptr() & (_ALIGNMENT - 1) == 0
        )  # fmt: skip

    def backward(
        self, dy: torch.Tensor, saved: tuple[torch.Tensor | None, ...], delayed: Delayed | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dx and dw, each where `forward` was told that it is wanted."""
        side = self._dy
        if side is None:
            side = self._dy = _Side(
                dy, self.recipe.dgrad.lhs if self.wants_dx else None, self.recipe.wgrad.lhs if self.wants_dw else None,
                row_transposed=False, column_transposed=False,
            )  # fmt: skip
        stream, words = self._place()
        pool_key = (id(self), stream)
        pools = self._pools and not _is_capturing(self.device)
        transients = _TRANSIENTS.pop(pool_key, None) if pools else None
        if transients is None:
            transients = (*side.empty(), *self._scalars(1), self)
        row, column, dy_scale, amax, _ = transients
        side(dy, stream, row, column, dy_scale, amax, delayed, words)
        if not pools:
            transients = None
        x_column, x_scale, w_column, w_scale = saved
        dx = dw = None
        if self.wants_dx:
            if w_column.stride() != self._w.column.stride():  # type: ignore[union-attr]
                w_column = _laid(w_column, self._w.column)
            dx = _scaled_mm(row, w_column, dy_scale, w_scale, None, None, self.dtype, self._fast[1])
            del row  # its memory serves dw
            if self.x_shape is not None:
                dx = dx.view(self.x_shape)
        if self.wants_dw:
            if x_column.stride() != self._x.column.stride():  # type: ignore[union-attr]
                x_column = _laid(x_column, self._x.column)
            dw = _scaled_mm(column, x_column, dy_scale, x_scale, None, None, self.dtype, self._fast[2])
        if transients is not None:
            if len(_TRANSIENTS) >= _MOST_TRANSIENTS:
                _TRANSIENTS.clear()
            _TRANSIENTS[pool_key] = transients
        return dx, dw

    def operands(self, saved: tuple[torch.Tensor | None, ...]) -> tuple[Operand | None, Operand | None]:
        """What `forward` returned, as the operands of the general path: x.T for wgrad and w.T for dgrad."""
        x_column, x_scale, w_column, w_scale = saved
        recipe, extents = self.recipe, (self.rows, self.out_features)
        return tuple(
            None if codes is None or cast is None or scale is None
            else Operand(codes.t().contiguous(), scale, None, cast.format, self.in_features, length)
            for codes, scale, cast, length in (
                (x_column, x_scale, recipe.wgrad.rhs, extents[0]), (w_column, w_scale, recipe.dgrad.rhs, extents[1]),
            )
        )  # type: ignore[return-value]  # fmt: skip


_scaled_mm: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]


def _is_capturing(device: int) -> bool:
    return device >= 0 and torch._C._cuda_isCurrentStreamCapturing()


def _laid(saved: Any, template: Any) -> torch.Tensor:
    """A saved tensor in the layout that the GEMM needs, where a saved-tensor hook has returned another."""
    return torch.empty_like(template).copy_(saved)


def aligned_for_plan(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wants_dw: bool) -> bool:
    """Whether dtypes, devices, sizes, strides and addresses are those that FP8 GEMMs and prepared launches take."""
    columns = x.shape[-1] if x.dim() > 1 else 0
    if (
        columns == 0 or x.numel() == 0 or weight.numel() == 0 or weight.dim() != 2 or weight.shape[1] != columns
        or x.dtype != weight.dtype or x.device != weight.device
        or x.dtype not in (torch.bfloat16, torch.float16, torch.float32)
        or (bias is not None and (bias.dtype != x.dtype or x.dtype == torch.float32 or bias.device != x.device))
    ):  # fmt: skip
        return False
    rows = x.numel() // columns
    if (columns | weight.shape[0] | (rows if wants_dw else 0)) % _ALIGNMENT:
        return False
    if not weight.is_contiguous() or not (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)):
        return False
    return (x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())) & (_ALIGNMENT - 1) == 0


def tensorwise_plan(
    recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wants_dx: bool, wants_dw: bool
) -> TensorwisePlan | None:
    """The plan of a call, or None where only the general path serves it.

    x [..., K], weight [N, K] and bias [N] of one dtype on one device, x and weight 16-byte aligned.
    """
    if not aligned_for_plan(x, weight, bias, wants_dw):
        return None
    if not _is_tensorwise(recipe):
        return None
    return TensorwisePlan(recipe, x, weight, wants_dx, wants_dw)


def _is_tensorwise(recipe: Recipe) -> bool:
    """Whether all six operands have one FP32 scale each, rounded to nearest, and both casts of a tensor share one."""
    wanted = [cast for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad) for cast in gemm.casts]
    if any(cast is None or casts.refusal(cast) for cast in wanted):
        return False
    plans = [plan_of(cast) for cast in wanted if cast is not None]
    if any(plan.family != "scaled" or plan.block != (None, None) or plan.stochastic or plan.bare for plan in plans):
        return False
    if any(cast.hadamard is not None or cast.is_delayed != recipe.is_delayed for cast in wanted if cast is not None):
        return False
    if any(gemm.accumulate == "exact" for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad)):
        return False
    x_row, w_row, dy_row, w_column, dy_column, x_column = plans
    return all(
        (row.rule, row.epsilon, row.codes_dtype) == (column.rule, column.epsilon, column.codes_dtype)
        for row, column in ((x_row, x_column), (w_row, w_column), (dy_row, dy_column))
    )
