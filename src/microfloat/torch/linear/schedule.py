"""The work of a Linear under a recipe, decided once as data: its casts, its products, and what backward keeps.

    forward    x, w -> operands      y_MN  = x_MK @ w_NK.T (+ bias)
    backward   dy   -> operands      dx_MK = dy_MN @ w_NK        dw_NK = dy_MN.T @ x_MK

Every call runs a `Schedule`: eager code through the autograd Function of `microfloat.torch.linear`, compiled code
through the operators of `compile.operators`, fused norms and activations with another first cast. A schedule is
found by everything that it depends on (recipe, backend, shapes, strides, dtypes, device, alignment, what needs a
gradient, torch.autocast); it holds no data and serves every layer that asks for the same. Casts are bound launches of
kernels, or plain torch operations where no kernel serves; products are closures over a GEMM, with padding where sizes
need it.

An operand is three tensors between its cast and its GEMM (`backends.base.Parts`); `microfloat.layout` says how each of
them lies.

Legend: M = rows of x (all leading dimensions), K = in features, N = out features. "row" is the operand of a tensor as
it lies, "column" that of its transpose.
"""

import contextlib
import functools
import typing
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from microfloat.layout import ALIGNMENT, Layout, stored_length
from microfloat.operands import OPERANDS_OF
from microfloat.passes import CastInputs
from microfloat.recipes import Recipe
from microfloat.recipes.core import delayed_of
from microfloat.routes import Entries, Routes, entries_of, first_delayed, routes_of
from microfloat.support import Notes, text_table
from microfloat.torch import reference
from microfloat.torch._typing import Options, Sink
from microfloat.torch.backends import layouts_of, why_by_torch
from microfloat.torch.backends.base import (
    NO_PARTS,
    Backend,
    Operands,
    Parts,
    Saved,
    current_device,
    laid,
    parts_of,
    raw_stream,
    record_amax_,
)
from microfloat.torch.launch.gemms import Product, product, sum_product
from microfloat.torch.linear.fold_counts import LOSSY_LIMIT
from microfloat.torch.linear.gathered_weight import Gathered, in_form
from microfloat.torch.linear.quantized_weight import GatheredCast, StoredCast
from microfloat.torch.linear.weight_cache import weights_of
from microfloat.torch.tensor.dispatch_modes import are_named, multiply
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor
from microfloat.torch.tensor.seeds import Rank, draw_seed, fold_rank_, has_ranks

if TYPE_CHECKING:
    from microfloat.torch.launch.program import Program

Inputs = tuple[CastInputs, CastInputs, CastInputs]  # of x, w and dy
Step: TypeAlias = Any  # a `CastStep`, or what takes its place for tensors that are stored, gathered or sharded

_unsafe_view = torch.ops.aten._unsafe_view.default
_MOST_SCHEDULES = 1024
_NO_SECOND = (None, None, None, None)
# `Operands.of` in the least host time: every call makes three.
_ROW, _COLUMN, _new = itemgetter(0, 1, 2), itemgetter(3, 4, 5), tuple.__new__
# Inputs of the casts of x, w and dy that read nothing besides their tensors.
NO_INPUTS = (CastInputs(), CastInputs(), CastInputs())


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of torch.autocast where it is enabled for such devices (there is none for meta), else None."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def as_matrix(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [..., C] as a matrix, in a dtype or in its own; kernels read memory, not the negation that a view may mean."""
    x = x.resolve_neg()
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if dtype is None or x.dtype == dtype else x.to(dtype)


def _as_they_are(entries: Entries) -> tuple[bool, bool]:
    """True for the row and the column operand that is the tensor itself, in high precision."""
    row, column = (entry is not None and entry.cast is None for entry in entries)
    return row, column


def _laid(parts: Parts, layout: Layout | None) -> Parts:
    """A saved operand, should a saved-tensor hook have returned it in another memory order."""
    if layout is None:
        return parts
    codes, scale, level = parts
    if codes.stride() == layout.codes.strides and (scale is None or scale.stride() == layout.scale.strides):  # type: ignore[union-attr]
        return parts
    if scale is None and codes.t().is_contiguous():  # values lie as x does, and GEMMs read them in either order
        return parts
    return Parts(laid(codes, layout.codes), laid(scale, layout.scale), level)


class CastStep:
    """Both operands of one tensor: by bound launches, or by torch operations for the reason `reason`."""

    __slots__ = (
        "_backend", "_batch", "_column_as_is", "_folds", "_layouts", "_recording", "_row_as_is", "delayed", "entries",
        "is_bound", "program", "reason",
    )  # fmt: skip

    def __init__(
        self, backend: Backend, x: torch.Tensor, entries: Entries, batch: int = 0, in_groups: int = 0,
        given_amax: bool = False, experts: int = 0,
    ) -> None:  # fmt: skip
        """`x`: an example; `batch`: a word of the random counters; `in_groups`: the number of groups that its rows are,
        `experts`: the number of weights one below the other;
        `given_amax`: amaxes of the whole tensor come with the inputs of every call."""
        self.entries, self._backend, self._batch = entries, backend, batch
        row, column = (None if entry is None else entry.spec for entry in entries)
        self._row_as_is, self._column_as_is = (entry is not None and entry.cast is None for entry in entries)
        self._folds = any(entry is not None and entry.form in ("folded", "tiles") for entry in entries)
        self.program: Program | None = None
        self._recording: Program | None = None
        self._layouts: tuple[Layout | None, Layout | None] = (None, None)
        self.reason = ""
        # The first delayed cast, by whose scaling the amax is recorded.
        self.delayed = first_delayed(entry and entry.cast for entry in entries)
        self.is_bound = False  # True where bound launches make every operand
        if row is None and column is None:
            return
        self.reason = why_by_torch(backend, row, column)
        if not self.reason and any(spec is not None and spec.form == "rows" for spec in (row, column)):
            self.reason = "no kernel casts and folds to scales of rows at once"
        if self.reason:
            self._layouts = layouts_of(backend, entries, *x.shape)
            return
        options = {"batch": batch, "in_groups": in_groups, "experts": experts}
        given_amax |= row is not None and row.cast.is_static
        self.program = backend.programs.cast_program(x, row, column, given_amax=given_amax, **options)
        self.is_bound = not (self._row_as_is or self._column_as_is)
        if self.delayed is not None:
            self._recording = backend.programs.cast_program(x, row, column, records=True, **options)

    @property
    def names(self) -> str:
        """The launches in words."""
        return self.program.names if self.program is not None else "torch operations" if self.reason else ""

    @staticmethod
    def described(backend: Backend, entries: Entries) -> tuple[str, str]:
        """In words, the casts of the operands of a later tensor, and the reason why not by launches."""
        row, column = (None if entry is None else entry.spec for entry in entries)
        if row is None and column is None:
            return "", ""
        reason = why_by_torch(backend, row, column)
        return "torch operations" if reason else "kernels", reason

    def __call__(self, x: torch.Tensor, stream: int, words: torch.Tensor | None, inputs: CastInputs) -> Operands:
        program = self.program if inputs.record is None else self._recording
        if program is not None:
            if self._folds and inputs.folded is None:  # kernels count in any case; nobody reads these
                counts = torch.empty(2, dtype=torch.int64, device=x.device)
                inputs = inputs._replace(folded=counts, tiles=counts)
            parts = program.run(stream, (None, x, words, *inputs, *_NO_SECOND))
            made = Operands(_new(Parts, _ROW(parts)), _new(Parts, _COLUMN(parts)))
        else:
            made = self._by_torch(x, inputs) if self.reason else Operands()
        if self._row_as_is:
            made.row = Parts(x)
        if self._column_as_is:
            made.column = Parts(x.t())
        return made

    def _by_torch(self, x: torch.Tensor, inputs: CastInputs) -> Operands:
        casts = [None if entry is None else entry.cast for entry in self.entries]
        options: Options = {"batch": self._batch, "amax": inputs.amax}
        if any(cast is not None and cast.is_delayed for cast in casts):
            options["scale_enc"] = inputs.scale_enc
            if inputs.record is not None:
                options["amax"] = reference.amax(x)
                record_amax_(inputs.record, options["amax"])
        row, column = OPERANDS_OF[next(entry.operand.tensor for entry in self.entries if entry is not None)]
        options |= {"row_stream": row.stream, "column_stream": column.stream}
        operands = reference.quantize_both(x, *casts, seed=inputs.seed, **options)
        made = []
        forms = [None if entry is None else entry.form for entry in self.entries]
        counts = inputs.folded if "folded" in forms else inputs.tiles  # of both operands, as kernels count
        for index, (operand, entry, layout) in enumerate(zip(operands, self.entries, self._layouts, strict=True)):
            if operand is not None and entry is not None:
                changed = None if counts is None else counts[index]
                operand = in_form(operand, entry.form, entry.turned, layout, self._backend, changed)
            made.append(parts_of(operand, entry, layout))
        return Operands(*made)


class Schedule:
    """fprop, dgrad and wgrad of one Linear for one kind of input. ``print(schedule)`` shows every cast and product."""

    late = False
    number = 0  # of the groups of a grouped one
    observer: Any = None  # the `Listener` of a watched call (`microfloat.torch.linear.observer`)
    cast_step: Callable[..., Step] = CastStep  # makes the step that casts values of x, w or dy

    def __init__(
        self, recipe: Recipe, backend: Backend, routes: Routes, x: torch.Tensor, weight: torch.Tensor,
        bias: torch.Tensor | None, compute: torch.dtype, wants_dx: bool, wants_dw: bool, batch: int = 0,
        late: bool = False,
    ) -> None:  # fmt: skip
        """`batch`: a word of the random counters. `late`: backward is given the weight, and casts its operand.

        FSDP2 frees a weight between forward and backward, but not what was cast from it.
        """
        self.asked = routes  # for the recipe that was asked for; it may name another one for this call
        self.in_features, self.out_features = x.shape[-1], weight.shape[0]
        self.rows = x.numel() // self.in_features
        stored = weight.cast if isinstance(weight, QuantizedTensor) else None
        # Of recipes for plain weights, those of inference alone follow the number of rows.
        chosen = recipe.for_call(self.rows, stored) if stored is not None or recipe._casts_masters else recipe
        is_other, recipe = chosen is not recipe, chosen
        routes = routes_of(recipe, backend.chip_of(x.device)) if is_other else routes
        routes = routes.of_stored(recipe) if stored is not None and stored == recipe.fprop.rhs else routes
        self.recipe, self.backend, self.routes, self._batch = recipe, backend, routes, batch
        self.wants_dx, self.wants_dw, self.late = wants_dx, wants_dw, late and wants_dx
        self.dtype, self.x_dtype, self.w_dtype = compute, x.dtype, weight.dtype
        self.device = x.get_device()
        self.is_delayed, self.is_stochastic = recipe.is_delayed, recipe.is_stochastic
        self.delayed_scaling: Any = delayed_of(recipe) if recipe.is_delayed else None
        self.is_static, self.is_joint = recipe.is_static, recipe.is_joint
        self.x_shape = None if x.dim() == 2 else x.shape
        self.y_shape = None if x.dim() == 2 else (*x.shape[:-1], self.out_features)
        # Nobody reads fold counts of a recipe that follows from the number of rows.
        folded = ("folded", "tiles")
        self.folds = not is_other and any(form in folded for route in routes for form in (route.lhs, route.rhs))
        m, k, n = self.rows, self.in_features, self.out_features
        self.products = {"fprop": product(recipe.fprop, routes.fprop, (m, k, n), bias, compute, x.device)}
        if wants_dx:
            self.products["dgrad"] = product(recipe.dgrad, routes.dgrad, (m, n, k), None, x.dtype, x.device)
        if wants_dw:
            self.products["wgrad"] = product(recipe.wgrad, routes.wgrad, (n, m, k), None, weight.dtype, x.device)
        # All that the weight's operands depend on besides the weight: schedules with equal keys share kept operands.
        self.weight_key = (recipe, backend.name, compute, routes.fprop.rhs, routes.dgrad.rhs)
        self._programs = backend.programs
        self._empty = None if backend.programs is None else backend.programs.fast_empty(x.device)
        x_entries = entries_of(recipe, routes, "x", True, wants_dw)
        w_entries = entries_of(recipe, routes, "w", True, wants_dx and not late)
        # True where backward reads the row operand, as fprop does; else it reads the column operand, or none.
        self.reads_x_row, self.reads_w_row = wants_dw and recipe.wgrad.from_fprop, wants_dx and recipe.dgrad.from_fprop
        w_read = entries_of(recipe, routes, "w", self.reads_w_row, wants_dx) if self.late else w_entries
        x_layouts, w_layouts = layouts_of(backend, x_entries, m, k), layouts_of(backend, w_read, n, k)
        # Layouts of the operands of x and w that `forward` returns for backward.
        self.saved_layouts = x_layouts[not self.reads_x_row], w_layouts[not self.reads_w_row]
        is_stored, is_gathered = isinstance(weight, QuantizedTensor), isinstance(weight, Gathered)
        is_other_dtype = weight.dtype != compute and not (is_stored or is_gathered)
        self._casts_master = is_other_dtype and recipe._casts_masters
        self._w_dtype = None if self._casts_master else compute  # in which w is cast; None: its own
        self.x_cast = self._step_of(x, x_entries, compute)
        self.w_cast = self._step_of(weight, w_entries, self._w_dtype)
        # An operand that the codes of a frozen weight do not serve, such as a folded one, is made once.
        self.keeps_weight = is_stored and recipe.wgrad.path == "refused" and self.w_cast.makes
        self.delayed = self.x_cast.delayed, self.w_cast.delayed
        lies_well = x.dim() == 2 or (x.is_contiguous() and self.x_cast.is_bound)
        self._converts_x = x.dtype != compute or x.is_neg() or not lies_well
        self._converts_w = is_other_dtype and not self._casts_master
        self._pair: tuple[Program | None, Program | None] = (None, None)
        converts = self._converts_x or is_other_dtype or self.is_joint
        if self.x_cast.is_bound and self.w_cast.is_bound and not converts:
            self._pair = self.pair_programs(backend, x, weight, x_entries, w_entries)
        self._dy: Step | None = None  # of the gradient that backward usually brings
        self._dy_steps: dict[tuple, Step] = {}
        self._later_steps: dict[tuple, Step] = {}
        direct = all(product.direct for product in self.products.values())
        # torch.autocast may not touch products that torch itself takes part in: their dtypes are decided here.
        self.shields = not (direct and self.x_cast.is_bound and self.w_cast.is_bound)
        self.noted = self._noted() if self.folds else {}

    def _step_of(self, tensor: torch.Tensor, entries: Entries, dtype: torch.dtype | None) -> Step:
        """The step that makes operands of x, w or dy: from values, or from the codes that a weight is stored as."""
        if isinstance(tensor, QuantizedTensor):
            return StoredCast(self.backend, tensor, entries, self.dtype, self.cast_step)
        if isinstance(tensor, Gathered):
            return GatheredCast(self.backend, tensor.shape, entries, self.dtype, self.cast_step)
        return self.cast_step(self.backend, as_matrix(tensor, dtype), entries, self._batch)

    def pair_programs(
        self, backend: Backend, x: torch.Tensor, weight: torch.Tensor, x_entries: Entries, w_entries: Entries
    ) -> tuple["Program | None", "Program | None"]:
        """One launch that casts x and w, without and with records of their amaxes; None where none serves both."""
        specs = tuple(tuple(None if e is None else e.spec for e in entries) for entries in (x_entries, w_entries))
        pair = functools.partial(
            backend.programs.pair_program, x, specs[0], weight, specs[1], draws_seed=self.is_stochastic
        )
        return pair(), pair(records=True) if self.is_delayed else None

    def _noted(self) -> dict[tuple[str, str], tuple[str, str, str, int, float]]:
        """The operands that fold: GEMM and side -> tensor, orientation, form, stored elements, most changed ones."""
        m, k, n = self.rows, self.in_features, self.out_features
        sizes = {"x": (m, k), "w": (n, k), "dy": (m, n)}
        needed = {("x", True): self.wants_dw, ("w", True): self.wants_dx}
        needed |= {("dy", False): self.wants_dx, ("dy", True): self.wants_dw}
        found = {}
        for tensor, shape in sizes.items():
            for operand in OPERANDS_OF[tensor]:
                route = getattr(self.routes, operand.gemm)
                form = route.rhs if operand.side == "rhs" else route.lhs
                if operand.transposed and getattr(self.recipe, operand.gemm).from_fprop:  # fprop's, counted there
                    continue
                if form in ("folded", "tiles") and needed.get((tensor, operand.transposed), True):
                    orientation = "column" if operand.transposed else "row"
                    slot = "w later" if self.late and operand.key == ("dgrad", "rhs") else tensor
                    cast: Any = self.recipe.cast(*operand.key)
                    outer, length = reversed(shape) if operand.transposed else shape
                    size = outer * stored_length(length, cast.hadamard)
                    # NVFP4 is rounded wherever it is asked to fold.
                    most = size * (LOSSY_LIMIT if cast.format.scale.name == "E8M0" else 1.0)
                    found[operand.key] = (slot, orientation, form, size, most)
        return found

    def _with_seed(self, inputs: Inputs, rank: int | None = None) -> Inputs:
        """The same with a call seed that no launch draws; `rank`: the one that is folded in, None for this one."""
        words = draw_seed(torch.device("cpu") if self.device < 0 else torch.device("cuda", self.device), rank=rank)
        x, w, dy = (one._replace(seed=words) for one in inputs)
        return x, w, dy

    def seeded(self, inputs: Inputs, apart: bool) -> Inputs:
        """The same with a call seed, drawn as `microfloat.torch.tensor.seeds` draws it.

        Where one launch casts x and w it makes the two words from the drawn bits, which w is given; `apart`: it does
        not, because the weight is kept or a producer makes x.
        """
        x, w, dy = inputs
        if self._empty is None:
            words = draw = draw_seed(torch.device("cpu") if self.device < 0 else torch.device("cuda", self.device))
        else:
            draw = self._empty((1,), (1,), torch.int64)
            draw.random_(-(2**63), None)
            if Rank.chosen is not None or has_ranks():
                fold_rank_(draw)
            if apart or self._pair[0] is None:
                words = draw = self._programs.split_words(draw)
            else:
                words = self._empty((2,), (1,), torch.int64)
        if inputs is NO_INPUTS:
            made = CastInputs(None, words)
            return made, made if draw is words else CastInputs(None, draw), made
        return (
            CastInputs(x.scale_enc, words, *x[2:]),
            CastInputs(w.scale_enc, draw, *w[2:]),
            CastInputs(dy.scale_enc, words, *dy[2:]),
        )

    def resources(self) -> tuple[int, torch.Tensor | None]:
        """The current stream and its scratch words."""
        if self._programs is None:
            return 0, None
        stream = 0 if self.device < 0 else raw_stream(self.device)
        return stream, self._programs.scratch(self.device)

    def quantize_weight(self, weight: torch.Tensor, inputs: CastInputs) -> Operands:
        """Both operands of the weight."""
        if self._converts_w:
            weight = weight.to(self.dtype)
        return self.w_cast(weight, *self.resources(), inputs)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x_inputs: CastInputs,
        w_inputs: CastInputs, kept: Operands | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
        """y, and the tensors from which `saved_operands` makes the operands of backward.

        `kept`: the weight's operands from an earlier call.
        """
        if self._converts_x:
            x = as_matrix(x, self.dtype)
        pair = self._pair[x_inputs.record is not None] if kept is None else None
        if pair is not None:
            stream, words = self.resources()
            second = (weight, w_inputs.scale_enc, w_inputs.seed, w_inputs.record)
            made = pair.run(stream, (None, x, words, *x_inputs, *second))
            x_made = Operands(_new(Parts, made[:3]), _new(Parts, made[3:6]))
            w_made = Operands(_new(Parts, made[6:9]), _new(Parts, made[9:]))
        else:
            x_made = self.x_cast(x, *self.resources(), x_inputs)
            w_made = self.quantize_weight(weight, w_inputs) if kept is None else kept
        y = self.products["fprop"](x_made.row, w_made.row, bias)
        x_read = x_made.row if self.reads_x_row else x_made.column
        if self.late:
            saved = *x_read, *weights_of(weight)
        else:
            saved = *x_read, *(w_made.row if self.reads_w_row else w_made.column)
        # Not a view for autograd, as nn.Linear's result is none: an activation may work in place.
        return y if self.y_shape is None else _unsafe_view(y, self.y_shape), saved

    def cast_operands(
        self, x: torch.Tensor, weight: torch.Tensor, x_inputs: CastInputs, w_inputs: CastInputs, kept: Operands | None
    ) -> tuple[Operands, Operands]:
        """The operands of x and w but for tensors as they are, which `fill_in` puts there; no w where one is kept."""
        x_made = self.x_cast(as_matrix(x, self.dtype), *self.resources(), x_inputs)
        w_made = self.quantize_weight(weight, w_inputs) if kept is None else Operands()
        for made, step in ((x_made, self.x_cast), (w_made, self.w_cast)):
            row, column = _as_they_are(step.entries)
            made.row = NO_PARTS if row else made.row
            made.column = NO_PARTS if column else made.column
        return x_made, w_made

    def fill_in(self, made: Operands, entries: Entries, tensor: torch.Tensor) -> None:
        """Put x or the weight where its GEMMs read it in high precision."""
        row, column = _as_they_are(entries)
        if row or column:
            is_stored = isinstance(tensor, QuantizedTensor)
            matrix = tensor.dequantize(self.dtype) if is_stored else as_matrix(tensor, self.dtype)
            made.row = Parts(matrix) if row else made.row
            made.column = Parts(matrix.t()) if column else made.column

    def cast_dy(self, dy: torch.Tensor, inputs: CastInputs, wants_dx: bool, wants_dw: bool) -> Operands:
        """Both operands of a gradient, each where it is asked for, by a cast for the gradient's memory order."""
        step = self._dy
        address = dy.data_ptr()
        if not (
            step is not None and wants_dx is self.wants_dx and wants_dw is self.wants_dw and address != 0
            and address & (ALIGNMENT - 1) == 0 and dy.dtype is self.dtype and dy.is_contiguous() and not dy.is_neg()
        ):  # fmt: skip
            aligned = dy.is_contiguous() and address & (ALIGNMENT - 1) == 0
            usual = aligned and not dy.is_neg() and dy.dtype is self.dtype
            dy = as_matrix(dy, self.dtype)
            key = (wants_dx, wants_dw, dy.stride(), dy.data_ptr() & (ALIGNMENT - 1))
            step = self._dy_steps.get(key)
            if step is None:
                entries = entries_of(self.recipe, self.routes, "dy", wants_dx, wants_dw)
                step = self._dy_steps[key] = self._step_of(dy, entries, self.dtype)
                if usual and step.is_bound and wants_dx is self.wants_dx and wants_dw is self.wants_dw:
                    self._dy = step
        return step(dy, *self.resources(), inputs)

    def gradients(
        self, dy: Operands, saved: Saved, wants_dx: bool, wants_dw: bool, into: "Sink | None" = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dx in x's shape and dw, each if it is asked for.

        Uses up `dy`: the memory of its row operand serves dw. `into` takes dw in float32, before it is rounded.
        """
        dx = dw = None
        if wants_dx:
            product, w = self.products["dgrad"], _laid(saved.w, self.saved_layouts[1])
            if self._casts_master and w.scale is None and w.codes is not None:  # the master itself
                w = Parts(w.codes.to(self.dtype))
            dx = multiply(product, dy.row, w, None, self.flops) if are_named() else product(dy.row, w, None)
            del w
            dy.row = NO_PARTS
            if self.x_shape is not None:
                dx = dx.view(self.x_shape)
        if wants_dw:
            product, x = self.products["wgrad"] if into is None else self.wgrad_sum, saved.x
            x, total = _laid(x, self.saved_layouts[0]), getattr(into, "total", None)  # of a loss in chunks
            dw = multiply(product, dy.column, x, None, self.flops) if are_named() else product(dy.column, x, total)
            dw = dw if into is None else into.add(dw)
        return dx, dw

    @functools.cached_property
    def wgrad_sum(self) -> Product:
        """wgrad with the float32 result of its sums, added to a total (`launch.gemms.sum_product`)."""
        device = torch.device("cpu") if self.device < 0 else torch.device("cuda", self.device)
        shape = self.out_features, self.rows, self.in_features
        return sum_product(self.recipe.wgrad, self.routes.wgrad, shape, device)

    def fprop(self, x: Parts, w: Parts, bias: torch.Tensor | None) -> torch.Tensor:
        """y [M, N], from the row operands of x and w."""
        multiplied = self.products["fprop"]
        return multiply(multiplied, x, w, bias, self.flops) if are_named() else multiplied(x, w, bias)

    @property
    def flops(self) -> int:
        """Floating-point operations of one of its products, a multiplication and an addition for each element pair."""
        return 2 * self.rows * self.in_features * self.out_features

    def saved_again(self, tensor: str, x: torch.Tensor, inputs: CastInputs) -> Parts:
        """The operand of x or w that backward reads alone, to the bits of the one that forward would have saved."""
        reads_row = self.reads_x_row if tensor == "x" else self.reads_w_row
        is_stored, is_gathered = isinstance(x, QuantizedTensor), isinstance(x, Gathered)
        x = x if is_gathered or is_stored else as_matrix(x.detach(), self._w_dtype if tensor == "w" else self.dtype)
        key = tensor, x.stride(), None if is_stored else x.data_ptr() & (ALIGNMENT - 1)
        step = self._later_steps.get(key)
        if step is None:
            entries = entries_of(self.recipe, self.routes, tensor, reads_row, True)
            step = self._later_steps[key] = self._step_of(x, entries, None)
        return step(x, *self.resources(), inputs).one(reads_row)

    def saved_operands(self, saved: Sequence[torch.Tensor | None], inputs: CastInputs) -> Saved:
        """The operands that backward reads, of the tensors that `forward` saved; a weight among them is cast now."""
        x = _new(Parts, saved[:3])
        if not self.late:
            return _new(Saved, (x, _new(Parts, saved[3:])))
        weights = typing.cast(list[torch.Tensor], saved[3:])
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return Saved(x, self.saved_again("w", weight, inputs))

    def scope(self) -> contextlib.ExitStack:
        """A context in which its device is the current one; torch.autocast is off in it where `shields` is True."""
        stack, kind = contextlib.ExitStack(), "cpu" if self.device < 0 else "cuda"
        if self.shields and torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if self.device >= 0 and self.device != current_device():
            stack.enter_context(torch.cuda.device(self.device))
        return stack

    def __str__(self) -> str:
        """Every cast and product in the order of a step, with the saved operands, and notes."""
        notes = Notes()
        m, k, n = self.rows, self.in_features, self.out_features
        where = "cpu" if self.device < 0 else f"cuda:{self.device}"
        of = f"{self.number}, " if self.number else ""
        title = f"{type(self.recipe).__name__}: x [{m}, {k}], w [{of}{n}, {k}], y [{m}, {n}] in {str(self.dtype)[6:]}"
        cells: list[tuple[str, ...]] = [("step", "operand", "cast", "form", "launches", "saved", "why")]
        together = f"{self._pair[0].names}, with w" if self._pair[0] is not None else ""
        dy_entries = entries_of(self.recipe, self.routes, "dy", self.wants_dx, self.wants_dw)
        dy = CastStep.described(self.backend, dy_entries)
        for tensor, (launches, reason), entries in (
            ("x", (together or self.x_cast.names, self.x_cast.reason), self.x_cast.entries),
            ("w", ("with x" if together else self.w_cast.names, self.w_cast.reason), self.w_cast.entries),
            ("dy", dy, dy_entries),
        ):
            for entry in entries:
                if entry is not None:
                    name = tensor + (".T" if entry.operand.transposed else "")
                    reads_row = {"x": self.reads_x_row, "w": self.reads_w_row}.get(tensor)
                    saved = "yes" if reads_row is not entry.operand.transposed and reads_row is not None else ""
                    cast = "high precision" if entry.cast is None else entry.cast.format.name
                    form = "as it is" if entry.cast is None else entry.form
                    how = "" if entry.cast is None else launches
                    cells.append((f"cast {tensor}", name, cast, form, how, saved, notes.number(reason)))
            for name in ("fprop",) if tensor == "w" else ("dgrad", "wgrad") if tensor == "dy" else ():
                if name in self.products:
                    route, multiply = getattr(self.routes, name), self.products[name]
                    cells.append(
                        (name, _FORMULAS[name], "", route.kind, route.kernel, "", notes.number(multiply.reason))
                    )
        lines = [f"{title}; backend {self.backend.name} on {where}", *text_table(cells), *notes.lines()]
        if self.keeps_weight and not self.late:
            lines += [f"The operand of w takes {self.w_cast.made_bytes} bytes, and is kept between calls; compiled code"
                      " and FSDP2 make it at every call."]  # fmt: skip
        return "\n".join(lines)


_FORMULAS = {"fprop": "y = x @ w.T", "dgrad": "dx = dy @ w", "wgrad": "dw = dy.T @ x"}

# What a schedule depends on -> the schedule. Cleared when it is full: shapes made anew for every call must not pile up.
SCHEDULES: dict[tuple, Schedule] = {}


def remember(key: tuple, schedule: Schedule) -> Schedule:
    """Keep a schedule for later calls; returns it."""
    if len(SCHEDULES) >= _MOST_SCHEDULES:
        SCHEDULES.clear()
    SCHEDULES[key] = schedule
    return schedule


def forget() -> None:
    """Drop every schedule, as after a change that no key tells of."""
    SCHEDULES.clear()
