"""Weight gradients that wait: backward casts dy and multiplies dgrad, and `backward_dw` multiplies wgrad later.

A schedule of a pipeline hands dx on before it spends time on dw ("zero bubble"). A `Postponed` stands in the place of a
layer's schedule: it leaves the operands of wgrad in the layer, the oldest first, until `backward_dw` asks for them. The
casts, and with them the random bits and the amaxes of delayed scaling, are those of backward, so dw has the same bits.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from microfloat.arguments import check_bool
from microfloat.errors import NotSupportedError
from microfloat.torch._checks import check_model
from microfloat.torch._typing import Maybe, Parts, Sink
from microfloat.torch.microbatches import MainGrad, NoRows, fsdp_parameters, weights_of
from microfloat.torch.tensor import QuantizedTensor

if TYPE_CHECKING:
    from microfloat.torch.nn.linear import RecipeLayer
    from microfloat.torch.schedule import Schedule

__all__ = ["Postponed", "backward_dw", "stand_in", "without_rows"]


def stand_in(weight: torch.Tensor) -> torch.Tensor:
    """A leaf with the memory of a weight whose gradient waits: autograd then tells nobody who listens to the weight
    itself, such as DistributedDataParallel or a hook, that its gradient is done."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    alias = weight.detach().requires_grad_() if isinstance(weight, QuantizedTensor) else nn.Parameter(weight.detach())
    alias.joined_of = weights_of(weight)  # type: ignore[union-attr]
    return alias


class Postponed:
    """A schedule whose wgrad waits in its layer; all else is the schedule's own.

    Raises NotSupportedError for a weight that takes no gradient after its backward: a computed one, or one that
    `fully_shard` gathers.
    """

    def __init__(self, schedule: "Schedule | None", layer: "RecipeLayer", weight: torch.Tensor) -> None:
        """`schedule`: None for a call without rows."""
        self._schedule, self._weights = schedule, weights_of(weight)
        if fsdp_parameters(layer) or not all(one.is_leaf for one in self._weights):
            kind = "that FSDP shards" if fsdp_parameters(layer) else "that is computed, by a parametrization or FSDP1"
            raise NotSupportedError(
                f"delay_wgrad_compute: got True for a layer with a weight {kind}, needed a plain parameter, whose "
                "gradient may come after backward. Leave it out of this layer."
            )
        self._waiting: deque[tuple[int, Callable[[], None]]] = vars(layer).setdefault("_waiting", deque())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def gradients(
        self, dy: Parts, saved: Sequence[torch.Tensor | None], wants_dx: bool, wants_dw: bool,
        into: "Sink | None" = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """dx; the operands of dw stay in the layer."""
        schedule = self._schedule
        assert schedule is not None
        dx, _ = schedule.gradients(dy, saved, wants_dx, False)
        if wants_dw:
            first = bool(schedule.number)  # a grouped dy begins with the groups
            # Six parts of each group, or of the one matrix: those of dgrad go.
            dy[first:] = [part if index % 6 > 2 else None for index, part in enumerate(dy[first:])]
            kept = [part if index % 6 < 3 else None for index, part in enumerate(saved)]
            # In high precision these are x and dy themselves, or views of them.
            read = [part for part in (*dy[first::3], *kept[::3]) if part is not None and not part.is_inference()]
            versions = [part._version for part in read]

            def multiply() -> Maybe:
                if [part._version for part in read] != versions:
                    raise NotSupportedError(
                        "backward_dw: got an x or dy that was written to in place since backward, needed the one of "
                        "backward, which a wgrad in high precision reads itself. Write to another tensor, or call "
                        "backward_dw before."
                    )
                with schedule.scope():
                    _, dw = schedule.gradients(dy, kept, False, True, into)
                return dw

            self.leave(multiply)
        return dx, None

    def leave(self, multiply: Callable[[], Maybe]) -> None:
        """Leave a function in the layer, which makes dw, or adds it to a `MainGrad` and returns None."""
        weights = self._weights

        def add() -> None:
            dw = multiply()
            if dw is not None:
                parts = dw.split([one.shape[0] for one in weights])
                torch.autograd.backward(weights, parts)  # as backward adds it, with the hooks of the weight

        self._waiting.append((torch._C._current_graph_task_id(), add))


class _Later:
    """Takes the gradient of a call without rows, as a `MainGrad` does, and leaves it in the layer."""

    def __init__(self, postponed: Postponed, into: MainGrad | None) -> None:
        self._postponed, self._into = postponed, into

    def add(self, dw: torch.Tensor) -> None:
        into = self._into
        self._postponed.leave(lambda: dw if into is None else into.add(dw))


def without_rows(layer: "RecipeLayer", weight: torch.Tensor, overwrites: bool) -> torch.Tensor:
    """A stand-in for a weight, for a call without rows: its gradient of zeros goes where that of others goes.

    `weight`: its values; `overwrites`: as of `MainGrad`.
    """
    into = MainGrad(layer, layer.weight, overwrites) if layer.fuse_wgrad_accumulation else None
    if layer.delay_wgrad_compute and torch.is_grad_enabled() and layer.weight.requires_grad:
        alias = stand_in(layer.weight)
        return NoRows.apply(alias, _Later(Postponed(None, layer, alias), into))
    return weight if into is None else NoRows.apply(weight, into)


def backward_dw(model: nn.Module, *, drop: bool = False) -> None:
    """Multiply the weight gradients that backward has left waiting in the layers of `model`, and add them up.

    For layers with `delay_wgrad_compute`, after each backward or some backwards later: one call takes what the oldest
    backward has left in each layer, however often that layer was called. dw goes to ``weight.grad``, or to
    ``weight.main_grad`` under `fuse_wgrad_accumulation`; its bits are those without the delay. Layers in which nothing
    waits are left alone. On a GPU call it on the stream of the backward. `drop` True: nothing is multiplied, and what
    all backwards have left is let go, for a step that is given up; gradients that are there stay. Raises
    InvalidTypeError for other arguments, NotSupportedError for an x or dy that wgrad reads in high precision and that
    was written to in place since.
    """
    check_model(model)
    check_bool("drop", drop)
    for layer in model.modules():
        waiting = vars(layer).get("_waiting")
        if waiting and drop:
            waiting.clear()
        elif waiting:
            backward = waiting[0][0]
            while waiting and waiting[0][0] == backward:
                waiting.popleft()[1]()
