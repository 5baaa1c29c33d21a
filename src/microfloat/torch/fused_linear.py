"""Linears whose input is a norm or an activation, as autograd Functions: the value is cast without being kept.

    forward   value -> codes in both layouts; y_i = value @ w_i.T
    backward  dvalue = sum of dy_i @ w_i; dw_i = dy_i.T @ value; then the norm's or the activation's own backward.
    linked    where the activation's inputs come from Linears of its own (an MLP), their gradients become codes at once

The casts, GEMMs, seeds and scaling states are those of the Linears (`microfloat.torch.linear`): given the same values,
the same bytes as the unfused composition. Linears that read one value share its codes where their casts agree.

Legend: M = rows of x (all leading dimensions), K = features of x, F = features of an activation, N = out features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from microfloat.recipes import Cast
from microfloat.torch import scaling
from microfloat.torch.linear import (
    _UNUSED,
    STREAM,
    LinearCall,
    _cast_both,
    _cast_weight,
    _delayed_state,
    _gemm,
    _plain_dtypes,
    _Saver,
    _unsafe_view,
    bias_gradient,
    of_slot,
    refuse_double_backward,
)
from microfloat.torch.producers import (
    Activation,
    ActivationGradient,
    Norm,
    Statistics,
    fused_kernels,
    norm_gradients,
    waits_for_amax,
)

__all__ = ["ActivationLinear", "GradientLink", "NormLinear", "NormSpec"]


@dataclass(frozen=True)
class NormSpec:
    """What a norm is besides its tensors; `kind`: "rms" or "layer"."""

    eps: float
    kind: str


@dataclass(eq=False)
class _Part:
    """One Linear inside a fused function, between its forward and its backward."""

    call: LinearCall
    wants_dx: bool
    wants_dw: bool
    w_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    x_column: Any = None
    w_column: Any = None
    saved: tuple[Any, Any] = (None, None)

    def forward(self, x_row: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """fprop, given the input's row operand; keeps the weight's column operand."""
        recipe = self.call.recipe
        w_row, self.w_column = _cast_weight(self.call, weight, recipe.dgrad.rhs if self.wants_dx else _UNUSED)
        return _gemm(self.call.backend, recipe.fprop, x_row, w_row, bias, self.call.compute_dtype)

    def save(self, saver: _Saver) -> None:
        """Hand the operands that backward reads to autograd."""
        self.saved = saver.add(self.x_column if self.wants_dw else None), saver.add(self.w_column)
        self.x_column = self.w_column = None

    def backward(
        self, dy: tuple[Any, Any], tensors: tuple[torch.Tensor, ...], dx_dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(dx, dw), given both operands of dy."""
        recipe, backend, dx, dw = self.call.recipe, self.call.backend, None, None
        if self.wants_dx:
            dx = _gemm(backend, recipe.dgrad, dy[0], _Saver.restore(self.saved[1], tensors), None, dx_dtype)
        if self.wants_dw:
            dw = _gemm(backend, recipe.wgrad, dy[1], _Saver.restore(self.saved[0], tensors), None, self.w_dtype)
        return dx, dw

    def cast_dy(self, dy_MN: torch.Tensor) -> tuple[Any, Any]:
        """Both operands of a gradient at hand."""
        recipe = self.call.recipe
        row = recipe.dgrad.lhs if self.wants_dx else _UNUSED
        return _cast_both(self.call, "dy", dy_MN, row, recipe.wgrad.lhs if self.wants_dw else _UNUSED)


@dataclass(eq=False)
class _Casts:
    """The casts of one value: both of them (None = high precision or not wanted), and whether kernels may fuse."""

    row: Any
    column: Any
    codes_only: bool
    slot: str
    options: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(call: LinearCall, slot: str, row: Any, column: Any) -> "_Casts":
        uses = {"x": (("fprop", 0), ("wgrad", 1)), "dy": (("dgrad", 0), ("wgrad", 0))}[slot]
        codes_only = row is not None and column is not None
        for wanted, (gemm, side) in zip((row, column), uses, strict=True):
            if isinstance(wanted, Cast) and call.forms is not None and call.forms[gemm][side] != "codes":
                codes_only = False
        streams = STREAM[slot]
        options = {"seed": call.seed, "row_stream": streams[0], "column_stream": streams[1]}
        return _Casts(row, column, codes_only, slot, options)

    @property
    def both(self) -> tuple[Cast | None, Cast | None]:
        casts = (self.row, self.column)
        return tuple(of_slot(self.slot, cast) if isinstance(cast, Cast) else None for cast in casts)  # type: ignore[return-value]

    @property
    def delayed(self) -> Cast | None:
        return next((cast for cast in self.both if cast is not None and cast.is_delayed), None)

    @property
    def is_stochastic(self) -> bool:
        return any(cast is not None and cast.is_stochastic for cast in self.both)


def _are_alike(parts: Sequence[_Part]) -> bool:
    """Whether all Linears cast in the same way."""
    first = parts[0].call

    def settings(call: LinearCall) -> tuple:
        return call.recipe, call.forms, call.backend, call.compute_dtype

    return all(settings(part.call) == settings(first) for part in parts[1:])


def _may_share(parts: Sequence[_Part], casts: _Casts) -> bool:
    """Whether all Linears read the same bytes: equal casts and forms, and no noise that each draws for itself."""
    return _are_alike(parts) and (len(parts) == 1 or not casts.is_stochastic)


def _cast_value(parts: Sequence[_Part], producer: Norm | Activation) -> tuple[list[tuple[Any, Any]], Statistics | None]:
    """Both operands of a producer's value for each Linear that reads it."""
    call = parts[0].call
    wants_dw = any(part.wants_dw for part in parts)
    casts = _Casts.of(call, "x", call.recipe.fprop.lhs, call.recipe.wgrad.rhs if wants_dw else _UNUSED)
    kernels = fused_kernels(call.backend)
    shares = _may_share(parts, casts)
    fuses = shares and casts.codes_only and producer.dtype == call.compute_dtype and kernels is not None
    if not (fuses and kernels is not None and kernels.fuses(*casts.both)):
        value, _, statistics = producer.values(kernels)
        value = value.to(call.compute_dtype)
        made = []
        for part in parts[:1] if shares else parts:
            recipe = part.call.recipe
            column = recipe.wgrad.rhs if (wants_dw if shares else part.wants_dw) else _UNUSED
            made.append(_cast_both(part.call, "x", value, recipe.fprop.lhs, column))
        if shares:
            _record_like_first(parts, casts)
        return made * len(parts) if shares else made, statistics
    if waits_for_amax(*casts.both):
        value, amax, statistics = producer.values(kernels)
        return [kernels.quantize_both(value, *casts.both, amax=amax, **casts.options)] * len(parts), statistics
    history = None
    if casts.delayed is not None:
        casts.options["scale_enc"], history = _delayed_state(call, "x", None, casts.delayed)  # type: ignore[arg-type]
        casts.options["record"] = history
    both, statistics = producer.codes(kernels, *casts.both, casts.options)
    _record_like_first(parts, casts)
    return [both] * len(parts), statistics


def _record_like_first(parts: Sequence[_Part], casts: _Casts) -> None:
    """The amax that the first Linear has recorded, into the histories of the others that share its codes."""
    first = parts[0].call
    if casts.delayed is None or len(parts) == 1 or not first.records or first.layer is None:
        return
    live = scaling.amax_history(first.layer(), "x")[:1] if first.late is None else first.late["x"][1]  # type: ignore[arg-type]
    for part in parts[1:]:
        _, history = _delayed_state(part.call, "x", None, casts.delayed)  # type: ignore[arg-type]
        if history is not None:
            torch.maximum(history[:1], live, out=history[:1])


@dataclass(eq=False)
class GradientLink:
    """Between an activation and the Linears that feed it alone: what its backward knows beyond plain gradients.

    Where one launch can write the gradients as codes, they travel here in place of the tensors that autograd passes on
    (which then hold nothing); else, for casts that wait for an amax, the amaxes do.
    """

    parts: list[_Part] = field(default_factory=list)
    wants_bias: bool = False
    operands: list[tuple[Any, Any]] | None = None
    amaxes: list[torch.Tensor | None] | None = None

    def take(self) -> tuple[list[tuple[Any, Any]] | None, list[torch.Tensor | None] | None]:
        """(operands, amaxes), once."""
        found = self.operands, self.amaxes
        self.operands = self.amaxes = None
        return found

    def casts(self) -> "_Casts | None":
        """The casts of all gradients, where one launch can make them."""
        first = self.parts[0]
        recipe = first.call.recipe
        row = recipe.dgrad.lhs if any(part.wants_dx for part in self.parts) else _UNUSED
        column = recipe.wgrad.lhs if any(part.wants_dw for part in self.parts) else _UNUSED
        casts = _Casts.of(first.call, "dy", row, column)
        kernels = fused_kernels(first.call.backend)
        fuses = kernels is not None and casts.codes_only and _are_alike(self.parts)
        return casts if fuses and kernels.fuses(*casts.both) else None  # type: ignore[union-attr]

    def pass_back(self, producer: ActivationGradient) -> list[torch.Tensor]:
        """The gradients of the producer's inputs for autograd; what is known beyond them stays here."""
        kernels, casts = fused_kernels(self.parts[0].call.backend), self.casts()
        if casts is None or self.wants_bias or waits_for_amax(*casts.both):
            made = producer.values(kernels)
            self.amaxes = [amax for _, amax in made] if casts is not None and waits_for_amax(*casts.both) else None
            return [value for value, _ in made]
        assert kernels is not None
        first, *second = [part.call.seed for part in self.parts]
        casts.options["seed"] = (first, second[0] if second else None)
        if casts.delayed is not None:
            states = [_delayed_state(part.call, "dy", None, casts.delayed) for part in self.parts]  # type: ignore[arg-type]
            states += [(None, None)] * (2 - len(states))  # type: ignore[list-item]
            scales, histories = zip(*states, strict=True)
            casts.options.update(scale_enc=scales, record=histories)
        self.operands = producer.codes(kernels, *casts.both, casts.options)
        nothing = producer.grad_MF.new_zeros(()).expand(producer.grad_MF.shape)
        return [nothing] * len(self.operands)

    def cast_with_amax(self, part: _Part, dy_MN: torch.Tensor, amax: torch.Tensor) -> tuple[Any, Any]:
        """Both operands of a gradient whose amax came with it."""
        casts = self.casts()
        assert casts is not None
        kernels, options = fused_kernels(part.call.backend), {**casts.options, "seed": part.call.seed}
        return kernels.quantize_both(dy_MN, *casts.both, amax=amax, **options)  # type: ignore[union-attr]


def _parts(calls: Sequence[LinearCall], tensors: Sequence[Any], wants_dx: bool, needs: Sequence[bool]) -> list[_Part]:
    """A part per Linear; `tensors`: weight and bias of each in turn, `needs`: whether they want a gradient."""
    parts = []
    for index, call in enumerate(calls):
        weight, bias = tensors[2 * index : 2 * index + 2]
        bias_dtype = None if bias is None else bias.dtype
        parts.append(
            _Part(call, wants_dx and call.wants_grad, needs[2 * index] and call.wants_grad, weight.dtype, bias_dtype)
        )
    return parts


def _matrix(x: torch.Tensor) -> torch.Tensor:
    x = x.resolve_neg()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _like(y_MN: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    # Not a view for autograd: what follows may work in place.
    return y_MN if x.dim() == 2 else _unsafe_view(y_MN, (*x.shape[:-1], y_MN.shape[-1]))


def _sum(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    total = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


class NormLinear(torch.autograd.Function):
    """``y_i = norm(x) @ w_i.T + b_i``.

    Arguments: x, the norm's weight and bias, NormSpec, calls, link or None, w_1, b_1, w_2, ...
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, spec: NormSpec, calls: Any, link: GradientLink | None, *tensors: Any
    ) -> Any:
        needs = ctx.needs_input_grad
        wants = tuple(need and calls[0].wants_grad for need in needs[:3])
        parts = _parts(calls, tensors, any(wants), needs[6:])
        norm = Norm(_matrix(x), weight, bias, spec.eps, spec.kind)
        with _plain_dtypes(x.device.type):
            operands, statistics = _cast_value(parts, norm)
            outputs = []
            for part, (row, column), w, b in zip(parts, operands, tensors[::2], tensors[1::2], strict=True):
                part.x_column = column
                outputs.append(_like(part.forward(row, w, b), x))
        if link is not None:
            link.parts, link.wants_bias = parts, any(needs[7::2])
        saver = _Saver()
        for part in parts:
            part.save(saver)
        assert statistics is not None
        ctx.save_for_backward(x, weight, bias, statistics.mean, statistics.inverse, *saver.tensors)
        ctx.parts, ctx.spec, ctx.wants, ctx.link = parts, spec, wants, link
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        refuse_double_backward()
        x, weight, bias, mean, inverse, *saved = ctx.saved_tensors
        link = ctx.link
        operands, amaxes = (None, None) if link is None else link.take()
        inner, outer = [], []
        with _plain_dtypes(x.device.type):
            for index, (part, dy) in enumerate(zip(ctx.parts, gradients, strict=True)):
                if operands is not None:
                    both, operands[index] = operands[index], (None, None)
                elif link is not None and amaxes is not None and amaxes[index] is not None:
                    both = link.cast_with_amax(part, _matrix(dy), amaxes[index])
                else:
                    both = part.cast_dy(_matrix(dy))
                dx, dw = part.backward(both, tuple(saved), x.dtype)
                del both
                inner.append(dx)
                outer += [dw, bias_gradient(dy, part.bias_dtype) if ctx.needs_input_grad[7 + 2 * index] else None]
            grads: tuple[Any, ...] = (None, None, None)
            grad = _sum(inner)
            if grad is not None:
                norm = Norm(_matrix(x), weight, bias, ctx.spec.eps, ctx.spec.kind)
                dx, dweight, dbias = norm_gradients(norm, Statistics(mean, inverse), grad, ctx.wants)
                grads = None if dx is None else dx.reshape(x.shape), dweight, dbias
        return (*grads, None, None, None, *outer)


class ActivationLinear(torch.autograd.Function):
    """``y = value @ w.T + b`` of an Activation. Arguments: x, up or None, activation, call, link or None, w, b."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, up: Any, activation: str, call: LinearCall, link: GradientLink | None, weight: Any, bias: Any
    ) -> Any:
        needs = ctx.needs_input_grad
        (part,) = _parts([call], (weight, bias), needs[0] or needs[1], needs[5:])
        with _plain_dtypes(x.device.type):
            made, _ = _cast_value([part], Activation(_matrix(x), None if up is None else _matrix(up), activation))
            part.x_column = made[0][1]
            y = _like(part.forward(made[0][0], weight, bias), x)
        saver = _Saver()
        part.save(saver)
        kept = (x, up) if part.wants_dx else (None, None)
        ctx.save_for_backward(*kept, *saver.tensors)
        ctx.part, ctx.activation, ctx.link, ctx.x_dtype = part, activation, link, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        refuse_double_backward()
        x, up, *saved = ctx.saved_tensors
        part, link, dy = ctx.part, ctx.link, gradients[0]
        grads: list[Any] = [None, None]
        with _plain_dtypes(dy.device.type):
            dvalue, dw = part.backward(part.cast_dy(_matrix(dy)), tuple(saved), ctx.x_dtype)
            if dvalue is not None:
                producer = ActivationGradient(dvalue, _matrix(x), None if up is None else _matrix(up), ctx.activation)
                del dvalue
                if link is None:
                    values = [value for value, _ in producer.values(fused_kernels(part.call.backend))]
                else:
                    values = link.pass_back(producer)
                for index, value in enumerate(values):
                    grads[index] = value.reshape(x.shape) if ctx.needs_input_grad[index] else None
        db = bias_gradient(dy, part.bias_dtype) if ctx.needs_input_grad[6] else None
        return *grads, None, None, None, dw, db
