"""The ambient state that `autocast` sets: a context variable per thread and task, and what compiled code sees of it."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

from microfloat.errors import NotSupportedError
from microfloat.recipes import Recipe
from microfloat.torch import scaling
from microfloat.torch.tokens import PLAIN, token_of

__all__ = ["Ambient", "Tape", "ambient", "entered", "reset_ambient", "set_ambient"]


class Tape:
    """Encode scales in the order a checkpointed region used them, so that its recomputation uses the same ones."""

    def __init__(self, outer: "Tape | None" = None) -> None:
        self.scales: list[Any] = []
        self._outer = outer  # that of a checkpointed region around this one, which is recomputed too

    def record(self, scales: Any) -> None:
        """Add the scales of one call."""
        self.scales.append(scales)
        if self._outer is not None:
            self._outer.record(scales)

    def replay(self) -> Iterator[Any]:
        """The recorded entries again, from the first."""
        return iter(self.scales)


class Ambient(NamedTuple):
    """The settings of one autocast, the delayed-scaling region it belongs to, and the state outside it."""

    enabled: bool
    recipe: Recipe | None
    calibrating: bool = False
    group: Any = None
    backend: str = "auto"
    region: "scaling.Region | None" = None
    record_tape: Tape | None = None
    replay: Iterator[Any] | None = None
    owner: Any = None  # who leaves this state again
    outer: "Ambient | None" = None


_AMBIENT: ContextVar[Ambient | None] = ContextVar("microfloat_autocast", default=None)


def ambient() -> Ambient | None:
    """The innermost autocast of this thread and task, or None."""
    return _AMBIENT.get()


def set_ambient(state: Ambient) -> Token:
    """Make `state` the innermost autocast; returns the token that `reset_ambient` takes."""
    return _AMBIENT.set(state)


def reset_ambient(token: Token, owner: Any) -> tuple[Ambient | None, bool]:
    """Take the state of `owner` out; returns the innermost state that is left, and whether `owner`'s was the innermost.

    Where it was not, only its own state goes: those entered after it stay, and leave what was before all of them.
    Raises NotSupportedError, and changes nothing, in another thread or task than that of the entry.
    """
    state = _AMBIENT.get()
    try:
        _AMBIENT.reset(token)
    except ValueError:
        raise NotSupportedError(
            "autocast: got an exit in another thread or task than the one that entered it, needed both in one. "
            "An autocast is seen by its own thread and task alone; enter it where the layers are called."
        ) from None
    left = _without(state, owner)
    _AMBIENT.set(left)
    return left, state is not None and state.owner is owner


def _without(state: Ambient | None, owner: Any) -> Ambient | None:
    if state is None or state.owner is owner:
        return state and state.outer
    return state._replace(outer=_without(state.outer, owner))


@contextlib.contextmanager
def entered(state: Ambient | None, **changes: Any) -> Iterator[None]:
    """Make `state` with some changes the ambient one for the duration, without opening a delayed-scaling region."""
    state, owner = state or Ambient(enabled=True, recipe=None), object()
    token = _AMBIENT.set(state._replace(**changes, owner=owner, outer=_AMBIENT.get()))
    try:
        yield
    finally:
        reset_ambient(token, owner)


# What compiled code asks of the ambient state, as constants.
_VIEWS: dict[str, Callable[[Ambient | None], Any]] = {
    # The token of the recipe that a layer of no recipe of its own runs.
    "RECIPE": lambda state: PLAIN if state is None or not state.enabled else token_of(state.recipe),
    # True: layers with a recipe of their own run in high precision too.
    "ISLAND": lambda state: state is not None and not state.enabled,
    # The token of the recipe for which layers in high precision record their amaxes.
    "CALIBRATED": lambda state: token_of(state.recipe) if state is not None and state.calibrating else PLAIN,
    "BACKEND": lambda state: "auto" if state is None else state.backend,
}


def __getattr__(name: str) -> Any:
    """The views above as attributes of this module.

    Dynamo can neither trace a context variable nor guard it. An attribute of a module it reads when it traces, and it
    guards the value: before every call of compiled code the attribute is read again, by the thread and task that call.
    """
    view = _VIEWS.get(name)
    if view is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return view(_AMBIENT.get())
