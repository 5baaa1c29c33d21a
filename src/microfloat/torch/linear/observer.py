"""Calls of layers as a watch sees them: a schedule whose tensors and results are shown to a listener as it runs.

While nobody watches, `OBSERVERS` is empty, and calls pay for one look at it. In a watched step an `Observed` stands
in the place of a schedule: it runs the same casts and products, then shows x, w, dy and the results y, dx, dw to the
`Listener` of the call. Nothing that it returns differs.

Legend: M = rows of x, K = in features, N = out features.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from microfloat.passes import CastInputs
from microfloat.torch._typing import Sink
from microfloat.torch.backends.base import Operands, Parts, Saved
from microfloat.torch.linear.schedule import Schedule


class Listener(Protocol):
    """The receiver of one call's tensors, in the order of the call: x and w, y; then dy, dx and dw."""

    def see_x(self, x: torch.Tensor, inputs: CastInputs) -> None:
        """x [.., K] before its cast."""
        ...

    def see_w(self, w: torch.Tensor, inputs: CastInputs) -> None:
        """The weight [N, K], or [G, N, K] of a grouped call."""
        ...

    def see_y(self, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The result of fprop."""
        ...

    def see_dy(self, dy: torch.Tensor, inputs: CastInputs, wants_dx: bool, wants_dw: bool) -> None:
        """The gradient [.., N] before its cast."""
        ...

    def see_gradients(self, dx: torch.Tensor | None, dw: torch.Tensor | None) -> None:
        """The results of dgrad and of wgrad, each if it ran."""
        ...


class Observer(Protocol):
    """A watch in one of its steps."""

    def listener(
        self, schedule: Schedule, layers: Sequence, weight: torch.Tensor | None, is_backward: bool
    ) -> Listener | None:
        """The listener of a call of `layers`; without any, of the layer that `weight` belongs to. None: not watched.

        `is_backward`: the backward of a compiled call, whose forward was observed before.
        """
        ...

    def see_plain(self, layer: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        """A call in high precision."""
        ...


OBSERVERS: list[Observer] = []
Kind = TypeVar("Kind", bound=Schedule)


def observed(schedule: Kind, layers: Sequence, weight: torch.Tensor | None = None, is_backward: bool = False) -> Kind:
    """The schedule of a call of `layers`, or one that also shows the tensors of the call to a listener.

    An operator of compiled code, which has no layer at hand, gives the weight, and says if it is the backward.
    """
    made: Any = schedule
    for observer in OBSERVERS:
        listener = observer.listener(made, layers, weight, is_backward)
        made = made if listener is None else Observed(made, listener)
    return made


class Observed:
    """A schedule that shows the tensors of one call to `observer`; all else is the schedule's own."""

    def __init__(self, schedule: Schedule, listener: Listener) -> None:
        self._schedule, self.observer = schedule, listener

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x_inputs: CastInputs,
        w_inputs: CastInputs, kept: Operands | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
        made = self._schedule.forward(x, weight, bias, x_inputs, w_inputs, kept)
        self.observer.see_x(x, x_inputs)
        # Its seed is that of x: a launch that casts both together draws the words.
        self.observer.see_w(weight, w_inputs._replace(seed=x_inputs.seed))
        self.observer.see_y(made[0], bias)
        return made

    def quantize_weight(self, weight: torch.Tensor, inputs: CastInputs) -> Operands:
        made = self._schedule.quantize_weight(weight, inputs)
        self.observer.see_w(weight, inputs)
        return made

    def cast_operands(
        self, x: torch.Tensor, weight: torch.Tensor, x_inputs: CastInputs, w_inputs: CastInputs, kept: Operands | None
    ) -> tuple[Operands, Operands]:
        made = self._schedule.cast_operands(x, weight, x_inputs, w_inputs, kept)
        self.observer.see_x(x, x_inputs)
        self.observer.see_w(weight, w_inputs)
        return made

    def fprop(self, x: Parts, w: Parts, bias: torch.Tensor | None) -> torch.Tensor:
        y = self._schedule.fprop(x, w, bias)
        self.observer.see_y(y, bias)
        return y

    def cast_dy(self, dy: torch.Tensor, inputs: CastInputs, wants_dx: bool, wants_dw: bool) -> Operands:
        made = self._schedule.cast_dy(dy, inputs, wants_dx, wants_dw)
        self.observer.see_dy(dy, inputs, wants_dx, wants_dw)
        return made

    def gradients(
        self, dy: Operands, saved: Saved, wants_dx: bool, wants_dw: bool, into: Sink | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        sums = None if into is None else _Sums(into)
        dx, dw = self._schedule.gradients(dy, saved, wants_dx, wants_dw, sums)
        self.observer.see_gradients(dx, dw if sums is None else sums.dw)
        return dx, dw


class _Sums:
    """A `MainGrad` that also keeps the gradient which it adds."""

    def __init__(self, into: "Sink") -> None:
        self._into = into
        self.dw: torch.Tensor | None = None

    def add(self, dw: torch.Tensor) -> torch.Tensor | None:
        self.dw = dw
        return self._into.add(dw)
