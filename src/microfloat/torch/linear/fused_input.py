"""Linears whose input is a norm or an activation: the value becomes operands without being kept.

    forward   value -> operands;  y_i = value @ w_i.T
    backward  dvalue = sum of dy_i @ w_i;  dw_i = dy_i.T @ value;  then the backward of the norm or of the activation
    linked    where the activation's inputs come from Linears of its own (an MLP), their gradients become codes at once

Each Linear runs its own schedule (`linear.schedule`) with its own seeds and scaling state; only the cast of x
is another one, and it is shared where the schedules agree. Given the same values, the bytes are those of the modules
one by one.

Legend: M = rows of x (all leading dimensions), K = features of x, F = features of an activation, N = out features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch

from microfloat.passes import OperandSpec
from microfloat.recipes import Cast
from microfloat.routes import Entries, entries_of
from microfloat.torch._typing import Context, Maybe
from microfloat.torch.backends import layouts_of
from microfloat.torch.backends.base import NO_PARTS, Operands, Parts, parts_of
from microfloat.torch.launch.prologues import (
    Activation,
    ActivationGradient,
    Both,
    Norm,
    Statistics,
    input_of,
    norm_gradients,
    values_of,
    waits_for_amax,
)
from microfloat.torch.linear.function import Run, bias_gradient
from microfloat.torch.linear.schedule import Schedule, as_matrix
from microfloat.torch.linear.weight_cache import weights_of
from microfloat.torch.tensor.dispatch_modes import outside_of_modes

_unsafe_view = torch.ops.aten._unsafe_view.default
_Saved = tuple[Maybe, ...]
_STREAMS = "row_stream", "column_stream"


class Reader:
    """One Linear that reads a produced value, between its forward and its backward."""

    __slots__ = ("again", "again_by", "bias_dtype", "caster", "run", "saved", "schedule")

    def __init__(self, run: Run, bias: torch.Tensor | None) -> None:
        self.run, self.schedule = run, run.schedule
        self.bias_dtype = None if bias is None else bias.dtype
        self.saved = slice(0, 0)
        # The Linear by whose cast backward makes the value's operand again; its inputs then, and kernels that do both.
        self.caster: Reader | None = None
        self.again_by: ModuleType | None = None
        self.again = run.x

    def forward(self, x: Operands, weight: torch.Tensor, bias: torch.Tensor | None, saved: list) -> torch.Tensor:
        """fprop of the value's operands; adds the operands of backward to `saved`."""
        schedule = self.schedule
        kept = self.run.kept
        with outside_of_modes():
            w = schedule.quantize_weight(weight, self.run.w) if kept is None else kept
        start, w_saved = len(saved), weights_of(weight) if schedule.late else w.one(schedule.reads_w_row)
        x_saved = x.one(schedule.reads_x_row) if schedule.wants_dw and self.caster is None else NO_PARTS
        saved += [*x_saved, *w_saved]
        self.saved = slice(start, len(saved))
        return schedule.fprop(x.row, w.row, bias)

    def backward(
        self, dy: Operands, tensors: _Saved, wants_dx: bool, wants_dw: bool, x: Parts
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(dx, dw), each None where it is not asked for, from both operands of dy; `x`: the one that is made again."""
        schedule = self.schedule
        saved = schedule.saved_operands(tensors[self.saved], self.run.later)
        saved = saved if self.caster is None else saved._replace(x=x)
        wants = schedule.wants_dx and wants_dx, schedule.wants_dw and wants_dw
        return schedule.gradients(dy, saved, *wants, self.run.into)

    def operand_again(self, producer: Norm | Activation) -> Parts:
        """The operand of backward, to the bits that forward would have kept, of what is kept anyway."""
        schedule, row = self.schedule, self.schedule.reads_x_row
        if self.again_by is None:
            return schedule.saved_again("x", producer.by_torch()[0][0].to(schedule.dtype), self.again)
        casts = _Casts.of(self, "x", row, not row)
        (both,), _ = self.again_by.codes(producer, *casts.specs, self.again)
        return casts.operands(both, input_of(producer).shape).one(row)

    def cast_dy(self, dy_MN: torch.Tensor) -> Operands:
        """Both operands of a gradient; empty where neither dx nor dw is asked for."""
        schedule = self.schedule
        if not (schedule.wants_dx or schedule.wants_dw):
            return Operands()
        inputs = self.run.dy_inputs(schedule.wants_dx, schedule.wants_dw)
        return schedule.cast_dy(dy_MN, inputs, schedule.wants_dx, schedule.wants_dw)

    @property
    def settings(self) -> tuple:
        """Equal for Linears that cast alike."""
        schedule = self.schedule
        return schedule.recipe, schedule.routes, schedule.backend, schedule.dtype


class _Casts(NamedTuple):
    """The casts of one value, for kernels that produce and cast it at once."""

    reader: Reader
    entries: Entries

    @staticmethod
    def of(reader: Reader, tensor: str, row: bool, column: bool) -> "_Casts":
        schedule = reader.schedule
        return _Casts(reader, entries_of(schedule.recipe, schedule.routes, tensor, row, column))

    @property
    def specs(self) -> tuple[OperandSpec | None, OperandSpec | None]:
        """Row and column operand as kernels write them, which `operands` turns."""
        row, column = (entry and entry.spec and entry.spec._replace(turned=False) for entry in self.entries)
        return row, column

    @property
    def both(self) -> tuple[Cast | None, Cast | None]:
        """Row and column cast; None where there is none."""
        row, column = (None if entry is None else entry.cast for entry in self.entries)
        return row, column

    @property
    def is_stochastic(self) -> bool:
        return any(cast is not None and cast.is_stochastic for cast in self.both)

    def kernels(self) -> ModuleType | None:
        """The backend's fused kernels, if they write these operands; else None."""
        producers = self.reader.schedule.backend.producers
        if any(cast is not None and cast.is_static for cast in self.both):
            return None
        codes_only = all(entry is None or (entry.cast is not None and entry.form == "codes") for entry in self.entries)
        return producers if producers is not None and codes_only and producers.fuses(*self.both) else None

    def quantized(self, kernels: ModuleType, value: torch.Tensor, amax: Maybe, seed: Maybe) -> Operands:
        """Both operands of a value whose amax is known, as GEMMs take them."""
        streams = {name: 0 if spec is None else spec.stream for name, spec in zip(_STREAMS, self.specs, strict=True)}
        return self.operands(kernels.quantize_both(value, *self.both, amax=amax, seed=seed, **streams), value.shape)

    def operands(self, made: Both, shape: Sequence[int]) -> Operands:
        """Both operands that a kernel has made of a matrix of this shape, as GEMMs take them."""
        layouts = layouts_of(self.reader.schedule.backend, self.entries, *shape)
        return Operands(*map(parts_of, made, self.entries, layouts))


def _cast_value(readers: Sequence[Reader], producer: Norm | Activation) -> tuple[list[Operands], Statistics | None]:
    """Both operands of a producer's value for each Linear that reads it; casts that are alike are made once.

    The operand of backward alone is left out where one launch makes it then (`Reader.operand_again`).
    """
    caster = next((reader for reader in readers if reader.schedule.wants_dw), readers[0])
    schedule, run = caster.schedule, caster.run
    casts = _Casts.of(caster, "x", True, schedule.wants_dw)
    are_alike = all(reader.settings == readers[0].settings for reader in readers)
    shares = are_alike and (len(readers) == 1 or not (casts.is_stochastic or schedule.is_static))
    kernels = casts.kernels() if shares and input_of(producer).dtype == schedule.dtype else None
    if shares and schedule.wants_dw and type(schedule) is Schedule and (kernels or not schedule.backend.producers):
        # The buffer of an encode scale changes when its region closes.
        scale_enc = None if run.x.scale_enc is None else run.x.scale_enc.clone()
        caster.again, caster.again_by = run.x._replace(scale_enc=scale_enc, record=None), kernels
        for reader in readers:
            reader.caster = caster
        casts = _Casts.of(caster, "x", True, False)
    written: Maybe = None
    if kernels is None:
        ((value, _),), statistics = values_of(producer, schedule.backend.producers)
        written = value = value.to(schedule.dtype)
        made = [
            reader.schedule.x_cast(value, *schedule.resources(), reader.run.x)
            for reader in ((caster,) if shares else readers)
        ]
    elif waits_for_amax(*casts.both):
        ((value, amax),), statistics = kernels.values(producer)
        made, written = [casts.quantized(kernels, value, amax, run.x.seed)], value
        caster.again = caster.again._replace(amax=amax)
    else:
        (both,), statistics = kernels.codes(producer, *casts.specs, run.x)
        made = [casts.operands(both, input_of(producer).shape)]
    observers = [(reader.schedule.observer, reader.run.x) for reader in readers]
    if any(observer is not None for observer, _ in observers):
        if written is None:  # a launch has written codes alone, so that the value is computed once more
            written = values_of(producer, schedule.backend.producers)[0][0].value.to(schedule.dtype)
        for observer, inputs in observers:
            if observer is not None:
                observer.see_x(written, inputs)
    if shares:
        made *= len(readers)
        for reader in readers:
            history = reader.run.x.record
            if reader is not caster and history is not None and run.x.record is not None:
                torch.maximum(history[:1], run.x.record[:1], out=history[:1])
    return made, statistics


@dataclass(eq=False)
class GradientLink:
    """Carries codes or amaxes of gradients from an activation's backward to the Linears that feed it alone.

    Where one launch can write the gradients as codes, the codes travel here, and autograd passes on empty tensors;
    else, for casts that wait for an amax, the amaxes travel here.
    """

    readers: list[Reader] = field(default_factory=list)
    wants_bias: bool = False
    operands: list[Operands] | None = None
    amaxes: list[torch.Tensor | None] | None = None

    def take(self) -> tuple[list[Operands] | None, list[torch.Tensor | None] | None]:
        """(operands, amaxes), once."""
        found = self.operands, self.amaxes
        self.operands = self.amaxes = None
        return found

    def casts(self) -> tuple[_Casts | None, Any]:
        """The casts of all gradients and the kernels that make them at once; (None, None) where none do."""
        row = any(reader.schedule.wants_dx for reader in self.readers)
        column = any(reader.schedule.wants_dw for reader in self.readers)
        casts = _Casts.of(self.readers[0], "dy", row, column)
        are_alike = all(reader.settings == self.readers[0].settings for reader in self.readers)
        kernels = casts.kernels() if (row or column) and are_alike else None
        return (None, None) if kernels is None else (casts, kernels)

    def pass_back(self, producer: ActivationGradient) -> list[torch.Tensor]:
        """The gradients of the producer's inputs for autograd; their codes or amaxes stay here."""
        casts, kernels = self.casts()
        if casts is None or self.wants_bias or waits_for_amax(*casts.both):
            made, _ = values_of(producer, self.readers[0].schedule.backend.producers)
            self.amaxes = None if casts is None or not waits_for_amax(*casts.both) else [amax for _, amax in made]
            return [value for value, _ in made]
        inputs = [reader.run.dy_inputs(reader.schedule.wants_dx, reader.schedule.wants_dw) for reader in self.readers]
        operands, _ = kernels.codes(producer, *casts.specs, *inputs)
        self.operands = [casts.operands(both, producer.grad_MF.shape) for both in operands]
        if any(reader.schedule.observer is not None for reader in self.readers):  # of values that nobody has written
            made, _ = values_of(producer, self.readers[0].schedule.backend.producers)
            for reader, valued, of_dy in zip(self.readers, made, inputs, strict=False):
                if reader.schedule.observer is not None:
                    wants = reader.schedule.wants_dx, reader.schedule.wants_dw
                    reader.schedule.observer.see_dy(valued.value, of_dy, *wants)
        nothing = producer.grad_MF.new_zeros(()).expand(producer.grad_MF.shape)
        return [nothing] * len(self.operands)

    def cast_with_amax(self, reader: Reader, dy_MN: torch.Tensor, amax: torch.Tensor) -> Operands:
        """Both operands of a gradient whose amax came with it."""
        casts, kernels = self.casts()
        assert casts is not None
        if reader.schedule.observer is not None:
            reader.schedule.observer.see_dy(dy_MN, reader.run.dy, reader.schedule.wants_dx, reader.schedule.wants_dw)
        return casts.quantized(kernels, dy_MN, amax, reader.run.dy.seed)


def _like(y_MN: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    # Not a view for autograd: what follows may work in place.
    return y_MN if x.dim() == 2 else _unsafe_view(y_MN, (*x.shape[:-1], y_MN.shape[-1]))


class NormRun:
    """``y_i = norm(x) @ w_i.T + b_i``: one forward and its backward.

    Tensors: x, the norm's weight and bias, w_1, b_1, w_2, ...; `kind`: "rms" or "layer".
    """

    def __init__(self, runs: Sequence[Run], kind: str, eps: float, link: GradientLink | None) -> None:
        self.runs, self.kind, self.eps, self.link = runs, kind, eps, link
        self.path = ", ".join(run.path for run in runs if run.path)
        self.readers: list[Reader] = []
        self.needs: tuple[bool, bool, bool] = (False, False, False)

    def forward(
        self, ctx: Context, x: torch.Tensor, weight: Maybe, bias: Maybe, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """All y_i; x, the statistics and the operands of backward go to autograd."""
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[1:4]
        self.needs = wants_x, wants_weight, wants_bias
        weights, biases = parameters[::2], parameters[1::2]
        self.readers = [Reader(run, b) for run, b in zip(self.runs, biases, strict=True)]
        saved: list[Maybe] = []
        with self.runs[0].schedule.scope():
            with outside_of_modes():
                operands, statistics = _cast_value(self.readers, Norm(as_matrix(x), weight, bias, self.eps, self.kind))
            outputs = [
                _like(reader.forward(made, w, b, saved), x)
                for reader, made, w, b in zip(self.readers, operands, weights, biases, strict=True)
            ]
        if self.link is not None:
            self.link.readers, self.link.wants_bias = self.readers, any(ctx.needs_input_grad[5::2])
        assert statistics is not None
        ctx.save_for_backward(x, weight, bias, statistics.mean, statistics.inverse, *saved)
        return tuple(outputs)

    def backward(self, ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        """The gradients of all tensors."""
        x, weight, bias, mean, inverse, *saved = ctx.saved_tensors
        link, tensors = self.link, tuple(saved)
        operands, amaxes = (None, None) if link is None else link.take()
        (_, *wanted), total, outer = ctx.wanted, None, []
        norm, caster = Norm(as_matrix(x), weight, bias, self.eps, self.kind), self.readers[0].caster
        with self.runs[0].schedule.scope():
            value = caster.operand_again(norm) if caster is not None and any(wanted[3::2]) else NO_PARTS
            for index, (reader, dy) in enumerate(zip(self.readers, gradients, strict=True)):
                if operands is not None:
                    made, operands[index] = operands[index], Operands()
                elif link is not None and amaxes is not None and amaxes[index] is not None:
                    made = link.cast_with_amax(reader, as_matrix(dy), amaxes[index])  # type: ignore[arg-type]
                else:
                    made = reader.cast_dy(as_matrix(dy))
                dx, dw = reader.backward(made, tensors, any(wanted[:3]), wanted[3 + 2 * index], value)
                del made
                total = dx if total is None else total if dx is None else total + dx
                outer += [dw, bias_gradient(dy, reader.bias_dtype) if wanted[4 + 2 * index] else None]
            grads: tuple[Maybe, ...] = (None, None, None)
            if total is not None:
                dx, dweight, dbias = norm_gradients(norm, Statistics(mean, inverse), total, self.needs)
                grads = None if dx is None else dx.reshape(x.shape), dweight, dbias
        return *grads, *outer


class ActivationRun:
    """``y = f(x) @ w.T + b``, or of ``f(x) * up``: one forward and its backward. Tensors: x, up or None, w, b."""

    def __init__(self, run: Run, activation: str, link: GradientLink | None) -> None:
        self.run, self.activation, self.link = run, activation, link
        self.path = run.path
        self.reader: Any = None

    def forward(self, ctx: Context, x: torch.Tensor, up: Maybe, weight: torch.Tensor, bias: Maybe) -> torch.Tensor:
        """y; x, up and the operands of backward go to autograd."""
        self.reader = Reader(self.run, bias)
        saved: list[Maybe] = []
        with self.run.schedule.scope():
            with outside_of_modes():
                producer = Activation(as_matrix(x), None if up is None else as_matrix(up), self.activation)
                (made,), _ = _cast_value([self.reader], producer)
            y = _like(self.reader.forward(made, weight, bias, saved), x)
        kept = (x, up) if self.run.schedule.wants_dx or self.reader.caster else (None, None)
        ctx.save_for_backward(*kept, *saved)
        return y

    def backward(self, ctx: Context, dy: torch.Tensor) -> tuple[Maybe, ...]:
        """The gradients of x, up, weight and bias."""
        x, up, *saved = ctx.saved_tensors
        reader, (_, *wanted) = self.reader, ctx.wanted
        grads: list[torch.Tensor | None] = [None, None]
        with self.run.schedule.scope():
            second, value = None if up is None else as_matrix(up), NO_PARTS
            if reader.caster is not None and wanted[2]:
                value = reader.operand_again(Activation(as_matrix(x), second, self.activation))
            made = reader.cast_dy(as_matrix(dy))
            dvalue, dw = reader.backward(made, tuple(saved), any(wanted[:2]), wanted[2], value)
            if dvalue is not None:
                producer = ActivationGradient(dvalue, as_matrix(x), second, self.activation)
                del dvalue
                if self.link is None:
                    values = [one.value for one in values_of(producer, self.run.schedule.backend.producers)[0]]
                else:
                    values = self.link.pass_back(producer)
                for index, value in enumerate(values):
                    grads[index] = value.reshape(x.shape) if wanted[index] else None
        db = bias_gradient(dy, reader.bias_dtype) if wanted[3] else None
        return *grads, dw, db
