"""The delayed-scaling update itself: a slot's history moves on by one place and gives the new encode scale.

Many slots in one launch where a kernel can, else in torch (docs/numerics.md 3.3).
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from microfloat.errors import invalid_type, invalid_value
from microfloat.recipes import Delayed
from microfloat.torch import backends

__all__ = ["Update"]

_LARGEST_SCALE = 2.0**126


def _rolled(
    histories: torch.Tensor, scales: torch.Tensor, delayed: Delayed, maximum: float, live: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(histories [slots, L], scales [slots]) after the update; what is there stays, so that this may fail."""
    histories = histories.clone()
    histories[:, 0] = live
    algo = delayed.amax_compute_algo
    if callable(algo):
        amax = torch.stack([_amax_by(algo, history) for history in histories])
    else:
        amax = histories.amax(1) if algo == "max" else histories[:, 0].clone()
    rolled = torch.roll(histories, -1, 1)
    rolled[:, 0] = 0.0
    largest = torch.full_like(amax, maximum)
    # Two tensors, because torch computes `number / tensor` through a reciprocal, which rounds twice.
    fresh = torch.div(largest, torch.clamp(amax, min=maximum * 2.0**-126)) * 2.0**-delayed.margin
    usable = (amax > 0) & torch.isfinite(amax)
    return rolled, torch.where(usable, torch.clamp(fresh, max=_LARGEST_SCALE), scales)


def _amax_by(algo: Callable, history: torch.Tensor) -> torch.Tensor:
    """The amax that a user's function takes from one history, float32 ()."""
    needed = "a function from a history, float32 [L], to one number"
    try:
        found = algo(history.clone())
    except Exception as error:
        raise invalid_value(
            "amax_compute_algo", f"a function that raised {type(error).__name__}: {error}", needed
        ) from error
    try:
        if isinstance(found, torch.Tensor) and found.is_complex():
            raise TypeError
        amax = torch.as_tensor(found, dtype=torch.float32, device=history.device)
    except Exception:
        raise invalid_type("amax_compute_algo", f"a function that returned {found!r}", needed) from None
    if amax.numel() != 1:
        raise invalid_value("amax_compute_algo", f"a function that returned shape {tuple(amax.shape)}", needed)
    return amax.reshape(())


class Update:
    """The update of slots that agree in recipe and device: one launch where a kernel serves them, else in torch.

    It holds the addresses of the buffers, not the buffers, and serves as long as they stay where they are.
    """

    __slots__ = ("_delayed", "_kernel", "_maxima", "_table")

    def __init__(
        self, histories: list[torch.Tensor], scales: list[torch.Tensor], delayed: Delayed, maxima: list[float]
    ) -> None:
        self._delayed, self._maxima, self._table = delayed, maxima, None
        self._kernel: Any = None if callable(delayed.amax_compute_algo) else _update_kernel(scales[0].device)
        if self._kernel is not None:
            self._table = self._kernel.slots_of(histories, scales, maxima)

    def live(self, histories: list[torch.Tensor]) -> torch.Tensor:
        """The live amaxes, float32 [slots]."""
        if self._table is None:
            return torch.stack([history[0] for history in histories])
        return self._table.gather_live()

    def __call__(
        self, histories: list[torch.Tensor], scales: list[torch.Tensor], live: torch.Tensor | None
    ) -> torch.Tensor:
        """Roll; returns the scales from before, float32 [slots].

        `live`: the amaxes to roll in, None for those that stand in the histories.
        """
        if self._table is None:
            return _update_by_torch(histories, scales, self._delayed, self._maxima, live)
        previous = self._kernel.update_delayed(self._table, self._delayed, live)
        torch._C._increment_version(histories + scales)  # a kernel's writes are not counted by themselves
        return previous

    def where_recorded(
        self, histories: list[torch.Tensor], scales: list[torch.Tensor], live: torch.Tensor
    ) -> torch.Tensor:
        """The same for the slots whose live amax is not negative: those that some other rank has recorded."""
        return _update_by_torch(histories, scales, self._delayed, self._maxima, live, where_recorded=True)


@functools.cache
def _update_kernel(device: torch.device) -> Any:
    """The module with the kernel that updates many slots at once; None where it cannot run."""
    if not backends.support("triton", device):
        return None
    return importlib.import_module("microfloat.torch.backends.triton._delayed")


@torch.no_grad()
def _update_by_torch(
    histories: list[torch.Tensor], scales: list[torch.Tensor], delayed: Delayed, maxima: list[float],
    live: torch.Tensor | None, where_recorded: bool = False,
) -> torch.Tensor:  # fmt: skip
    amaxes = [history[0] for history in histories] if live is None else live.unbind()
    alike: dict[tuple[int, float], list[int]] = {}
    for index, (history, maximum) in enumerate(zip(histories, maxima, strict=True)):
        alike.setdefault((history.shape[0], maximum), []).append(index)
    made = []
    for (_, maximum), members in alike.items():
        old, old_scales, recent = (
            torch.stack([tensors[index] for index in members]) for tensors in (histories, scales, amaxes)
        )
        rolled, fresh = _rolled(old, old_scales, delayed, maximum, recent.clamp(min=0.0))
        if where_recorded:
            recorded = recent >= 0
            rolled, fresh = torch.where(recorded[:, None], rolled, old), torch.where(recorded, fresh, old_scales)
        made.append((members, rolled, fresh))
    previous = torch.stack(scales)
    for members, rolled, fresh in made:  # all of them or none
        copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        copy_all([histories[index] for index in members], list(rolled.unbind()))
        copy_all([scales[index] for index in members], list(fresh.unbind()))
    return previous
