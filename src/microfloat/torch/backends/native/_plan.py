"""One Linear with everything decided but the addresses: what eager steps of small layers run.

Casts and GEMMs are those of the general path (`prepare_both`, `scaled_matmul`), GEMMs with the same arguments, casts
in fewer launches where one serves several; hence the same bytes. Which they are follows from what
`microfloat.torch.planned` keys a plan by (recipe, shapes, strides, dtypes, device, alignment, what needs a gradient)
and from the forms in which operands enter their GEMMs, so it is worked out once: a `Program` for x, for w, for dy, one
for x and w together where a launch serves both, and three products.

Legend: M = rows of x, K = in features, N = out features.
"""

from operator import itemgetter
from typing import Any, NamedTuple

import torch

from microfloat.errors import NotSupportedError
from microfloat.layout import folded_format
from microfloat.operands import GEMMS, OPERANDS
from microfloat.passes import OperandSpec
from microfloat.recipes import Cast, Gemm, Recipe
from microfloat.routes import Route
from microfloat.torch.backends.base import Operand, Values
from microfloat.torch.folding import FoldCounts, Routes
from microfloat.torch.gemms import product
from microfloat.torch.program import CastInputs, Program, cast_program, fast_empty, pair_program, scratch, split_words
from microfloat.torch.seeds import fold_rank_

__all__ = ["LinearPlan", "linear_plan"]

_unsafe_view = torch.ops.aten._unsafe_view.default
_ALIGNMENT = 16
_NO_STREAM = 0
# The GEMM and side (0 = lhs, 1 = rhs) that read a tensor's row form, and those that read its column form; the words of
# their random counters (docs/numerics.md 5.3).
_USES = {
    "x": (("fprop", 0, 0), ("wgrad", 1, 5)),
    "w": (("fprop", 1, 1), ("dgrad", 1, 3)),
    "dy": (("dgrad", 0, 2), ("wgrad", 0, 4)),
}
_Given = tuple[CastInputs, CastInputs, CastInputs]
_Saved = tuple[torch.Tensor | None, ...]


def _counting(counts: FoldCounts, slot: str) -> CastInputs:
    folded, tiles = counts.places(slot)
    return CastInputs(folded=folded, tiles=tiles)


class _Weight(NamedTuple):
    """A weight's operands, kept for several calls."""

    made: tuple[torch.Tensor | None, ...]

    @property
    def column(self) -> torch.Tensor | None:
        """What dgrad reads, if it was made."""
        return self.made[2]


class LinearPlan:
    """fprop, dgrad and wgrad of one Linear for one kind of input; holds no data and may serve many layers."""

    given, nothing_given = CastInputs, (CastInputs(), CastInputs(), CastInputs())  # of x, w and dy

    def __init__(
        self, recipe: Recipe, routes: Routes, x: torch.Tensor, weight: torch.Tensor, wants_dx: bool, wants_dw: bool
    ) -> None:
        self.recipe, self.routes, self.wants_dx, self.wants_dw = recipe, routes, wants_dx, wants_dw
        self.forms = forms = {name: route.forms for name, route in zip(GEMMS, routes, strict=True)}
        self.dtype, self.device = x.dtype, x.get_device()
        self.is_delayed, self.is_stochastic = recipe.is_delayed, recipe.is_stochastic
        self.rows, self.in_features, self.out_features = x.numel() // x.shape[-1], x.shape[-1], weight.shape[0]
        self.x_shape = None if x.dim() == 2 else x.shape
        self.y_shape = None if x.dim() == 2 else (*x.shape[:-1], self.out_features)
        self.folds = any(form in ("folded", "tiles") for pair in forms.values() for form in pair)
        # The same layer with other forms, which folding may ask for.
        self.variants: dict[tuple, LinearPlan | None] = {}
        self.module: Any = None  # the backend, for what the general path must do
        self.noted = self._noted(weight.numel(), x.numel())
        # What the weight's operands depend on besides the weight: plans that agree in it may keep them for each other.
        self.weight_key = (id(recipe), forms["fprop"][1], forms["dgrad"][1])
        self._empty = fast_empty(x.device)
        self._fprop: Any = None
        self._dgrad: Any = None
        self._wgrad: Any = None
        self._x: _Side | None = None
        self._w: _Side | None = None
        self._both: tuple[Program | None, Program | None] = (None, None)
        self._dy: _Side | None = None  # worked out when the first dy is seen

    def prepare(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Work out programs and products; False where one of them does not exist."""
        recipe, routes, device = self.recipe, self.routes, x.device
        m, k, n = self.rows, self.in_features, self.out_features
        self._fprop = _product(recipe.fprop, routes.fprop, (m, k, n), bias, self.dtype, device)
        self._dgrad = _product(recipe.dgrad, routes.dgrad, (m, n, k), None, self.dtype, device)
        self._wgrad = _product(recipe.wgrad, routes.wgrad, (n, m, k), None, self.dtype, device)
        if not all((self._fprop, self._dgrad or not self.wants_dx, self._wgrad or not self.wants_dw)):
            return False
        x_wants, w_wants = self._wants("x", True, self.wants_dw), self._wants("w", True, self.wants_dx)
        self._x, self._w = _Side.make(x, x_wants, self.is_delayed), _Side.make(weight, w_wants, self.is_delayed)
        if self._x is None or self._w is None:
            return False
        first, second = (
            pair_program(x, x_wants, weight, w_wants, records=records, draws_seed=self.is_stochastic)
            for records in (False, True)
        )
        self._both = first, second if self.is_delayed else None
        return True

    def _wants(self, slot: str, row: bool, column: bool) -> tuple[OperandSpec | None, OperandSpec | None]:
        """The operands of a tensor that its GEMMs read."""
        wants = []
        for wanted, (gemm, side, stream) in zip((row, column), _USES[slot], strict=True):
            cast: Cast | None = getattr(self.recipe, gemm).casts[side]
            if cast is not None and slot == "dy":
                cast = cast.of_gradient
            form = self.forms[gemm][side]
            wants.append(None if not wanted or cast is None else OperandSpec(cast, form, side == 1, stream))
        return wants[0], wants[1]

    def _noted(self, weights: int, inputs: int) -> dict[tuple[str, str], tuple[str, str, str, int]]:
        """Which operands fold: GEMM and side -> slot, orientation, form, elements."""
        sizes = {"x": inputs, "w": weights, "dy": self.rows * self.out_features}
        wanted = {("x", "column"): self.wants_dw, ("w", "column"): self.wants_dx, ("dy", "row"): self.wants_dx}
        wanted["dy", "column"] = self.wants_dw
        found = {}
        for gemm, side, slot, transposed, _ in OPERANDS:
            form, orientation = self.forms[gemm][side == "rhs"], "column" if transposed else "row"
            if form in ("folded", "tiles") and wanted.get((slot, orientation), True):
                found[gemm, side] = (slot, orientation, form, sizes[slot])
        return found

    def given_by(self, counts: FoldCounts) -> _Given:
        """What the casts of a layer that folds are given: places for what folding changes."""
        if self.device >= 0 and torch._C._cuda_isCurrentStreamCapturing():
            own = [_counting(counts, slot) for slot in _USES]
            return own[0], own[1], own[2]
        if counts.given is None:
            counts.given = tuple(_counting(counts, slot) for slot in _USES)
        return counts.given

    def seeded(self, given: _Given, keeps_weight: bool) -> _Given:
        """What the casts of a stochastic recipe are given: a call seed too, drawn as `microfloat.torch.seeds` draws it.

        Where one launch casts x and w it makes the words of the seed from the drawn bits, which w is given.
        """
        draw = self._empty((1,), (1,), torch.int64)
        draw.random_(-(2**63), None)
        fold_rank_(draw)
        if keeps_weight or self._both[0] is None:
            words = draw = split_words(draw)
        else:
            words = self._empty((2,), (1,), torch.int64)
        x, w, dy = given
        return x._replace(seed=words), w._replace(seed=draw), dy._replace(seed=words)

    def _place(self) -> tuple[int, torch.Tensor]:
        """The current stream, and scratch words."""
        stream = _NO_STREAM if self.device < 0 else torch._C._cuda_getCurrentRawStream(self.device)
        return stream, scratch(self.device)

    def quantize_weight(self, weight: torch.Tensor, given: CastInputs) -> _Weight:
        """Both operands of the weight, to be kept for several calls."""
        stream, words = self._place()
        return _Weight(tuple(self._w(weight, stream, words, given)))  # type: ignore[misc]

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x_given: CastInputs,
        w_given: CastInputs, kept: _Weight | None = None,
    ) -> tuple[torch.Tensor, _Saved]:  # fmt: skip
        """y, and what backward needs: x.T's codes or values and their scale, those of w.T."""
        stream, words = self._place()
        both = self._both[x_given.record is not None] if kept is None else None
        x_made: Any
        w_made: Any
        if both is not None:
            made = both.run(stream, (None, x, words, *x_given, weight, w_given.scale_enc, w_given.seed, w_given.record))
            x_made, w_made = self._x.pick(made[:6]), self._w.pick(made[6:])  # type: ignore[union-attr]
        else:
            w_made = self._w(weight, stream, words, w_given) if kept is None else kept.made  # type: ignore[misc]
            x_made = self._x(x, stream, words, x_given)  # type: ignore[misc]
        y = self._fprop(x_made[0], x_made[1], w_made[0], w_made[1], bias)  # type: ignore[misc]
        if self.y_shape is not None:
            y = _unsafe_view(y, self.y_shape)  # not a view for autograd: an activation may work in place
        return y, (x_made[2], x_made[3], w_made[2], w_made[3])

    def takes(self, dy: torch.Tensor) -> bool:
        """Whether `backward` serves this gradient; the general path serves every other.

        A tensor without memory of its own, such as a batch of gradients, has the address 0 on some devices.
        """
        address = dy.data_ptr()
        return (
            address != 0 and address & (_ALIGNMENT - 1) == 0 and dy.dtype is self.dtype and dy.is_contiguous()
            and not dy.is_neg() and dy.get_device() == self.device
        )  # fmt: skip

    def backward(
        self, dy: torch.Tensor, saved: _Saved, given: CastInputs
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dx and dw, each where `forward` was told that it is wanted."""
        side = self._dy
        if side is None:
            wants = self._wants("dy", self.wants_dx, self.wants_dw)
            side = self._dy = _Side.make(dy, wants, self.is_delayed)
        stream, words = self._place()
        row, row_scale, column, column_scale = side(dy, stream, words, given)  # type: ignore[misc]
        dx = dw = None
        if self.wants_dx:
            w_column, w_scale = self._w.laid(saved[2:])  # type: ignore[union-attr]
            dx = self._dgrad(row, row_scale, w_column, w_scale, None)  # type: ignore[misc]
            del row  # its memory serves dw
            if self.x_shape is not None:
                dx = dx.view(self.x_shape)
        if self.wants_dw:
            x_column, x_scale = self._x.laid(saved[:2])  # type: ignore[union-attr]
            dw = self._wgrad(column, column_scale, x_column, x_scale, None)  # type: ignore[misc]
        return dx, dw

    def operands(self, saved: _Saved) -> tuple[Operand | Values | None, Operand | Values | None]:
        """What `forward` returned, as the operands of the general path: x.T for wgrad and w.T for dgrad."""
        recipe, forms = self.recipe, self.forms
        return (
            self._operand(saved[0], saved[1], recipe.wgrad.rhs, forms["wgrad"][1], self.rows),
            self._operand(saved[2], saved[3], recipe.dgrad.rhs, forms["dgrad"][1], self.out_features),
        )

    def _operand(
        self, codes: torch.Tensor | None, scale: torch.Tensor | None, cast: Cast | None, form: str, length: int
    ) -> Operand | Values | None:
        if codes is None or cast is None:
            return None
        if form == "values":
            return Values(codes.t(), scale, cast.format, self.in_features, length, cast.hadamard)
        assert scale is not None
        fmt = cast.format if form == "codes" else folded_format(cast.format, form)
        if scale.dim() and fmt.block != (1, 128):
            blocks = -(-length // (fmt.block[1] or length))  # fewer than the GEMM wants them filled up to
            scale = scale[:blocks].t().contiguous()
        return Operand(codes.t().contiguous(), scale, None, fmt, self.in_features, length)


class _Side:
    """How one tensor is cast: a program, and for delayed scaling another that records the amax as well."""

    __slots__ = ("_layouts", "_program", "_recording", "_strides", "pick")

    def __init__(self, program: Program, recording: Program | None) -> None:
        self._program, self._recording = program, recording
        # Beside values stands the tensor scale, beside codes the scale.
        places = [at + (at % 3 == 1 and program.layouts[at] is None) for at in (0, 1, 3, 4)]
        self.pick = itemgetter(*places)
        self._layouts = self.pick(program.layouts)[2:]  # of the column operand and its scale
        self._strides = tuple(() if part is None else part.strides for part in self._layouts)

    @staticmethod
    def make(x: torch.Tensor, wants: tuple[OperandSpec | None, OperandSpec | None], delayed: bool) -> "_Side | None":
        """None where no program exists."""
        try:
            program = cast_program(x, *wants)
        except NotSupportedError:
            return None
        return _Side(program, cast_program(x, *wants, records=True) if delayed else None)

    def __call__(self, x: torch.Tensor, stream: int, words: torch.Tensor, given: CastInputs) -> tuple[Any, ...]:
        """Codes or values and scale of the row operand, those of the column operand."""
        program: Any = self._program if given.record is None else self._recording
        return self.pick(program.run(stream, (None, x, words, *given, None, None, None, None)))

    def laid(self, saved: _Saved) -> _Saved:
        """What forward made for the column, should a saved-tensor hook have returned it in another layout."""
        column, scale = saved
        first, second = self._strides
        if (column is None or column.stride() == first) and (scale is None or scale.stride() == second):
            return saved
        return tuple(
            tensor if tensor is None or part is None
            else torch.empty_strided(part.shape, part.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
            for tensor, part in zip(saved, self._layouts, strict=True)
        )  # fmt: skip


def _product(
    gemm: Gemm, route: Route, shape: tuple[int, int, int], bias: torch.Tensor | None, dtype: torch.dtype,
    device: torch.device,
) -> Any:  # fmt: skip
    """A direct product of (a, its scale or tensor scale, b, its scale or tensor scale, bias); None where none is."""
    if None in gemm.casts or route.kind in ("float32", "refused", "block_scaled"):
        return None
    multiply = product(gemm, route, shape, bias, dtype, device)
    if not multiply.direct:
        return None
    if route.forms == ("values", "values"):
        return lambda a, a_level, b, b_level, bias: multiply(a, None, a_level, b, None, b_level, bias)
    return lambda a, a_scale, b, b_scale, bias: multiply(a, a_scale, None, b, b_scale, None, bias)


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows_too: bool) -> bool:
    """Whether dtypes, devices, sizes, strides and addresses are those that FP8 GEMMs and prepared launches take.

    `rows_too`: whether rows of x matter to a GEMM, because one contracts them or scales them in blocks.
    """
    columns = x.shape[-1] if x.dim() > 1 else 0
    if (
        columns == 0 or x.numel() == 0 or weight.numel() == 0 or weight.dim() != 2 or weight.shape[1] != columns
        or x.dtype != weight.dtype or x.device != weight.device
        or x.dtype not in (torch.bfloat16, torch.float16, torch.float32)
        or (bias is not None and bias.device != x.device)
    ):  # fmt: skip
        return False
    if (columns | weight.shape[0] | (x.numel() // columns if rows_too else 0)) % _ALIGNMENT:
        return False
    if not weight.is_contiguous() or not (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)):
        return False
    return (x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())) & (_ALIGNMENT - 1) == 0


def linear_plan(
    recipe: Recipe, routes: Routes, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wants_dx: bool,
    wants_dw: bool,
) -> LinearPlan | None:  # fmt: skip
    """The plan of a call, or None where only the general path serves it.

    x [..., K], weight [N, K] of one dtype and bias [N] on one device, all of them 16-byte aligned.
    """
    casts = [cast for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad) for cast in gemm.casts]
    in_blocks = any(cast is not None and cast.format.block[1] == 128 for cast in casts)
    in_blocks = in_blocks or any("folded" in route.forms for route in routes)
    if any(cast is None or cast.is_delayed != recipe.is_delayed for cast in casts) or not _fits(
        x, weight, bias, wants_dw or in_blocks
    ):
        return None
    if recipe.is_delayed and (recipe.is_stochastic or any(cast.format.block != (None, None) for cast in casts if cast)):
        return None
    plan = LinearPlan(recipe, routes, x, weight, wants_dx, wants_dw)
    return plan if plan.prepare(x, weight, bias) else None
