"""The ambient state that `autocast` sets: a context variable per thread and task, and its mirror for compiled code."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from microfloat.recipes import Recipe
from microfloat.torch import scaling
from microfloat.torch.tokens import token_of

__all__ = ["ISLAND", "Ambient", "Tape", "ambient", "entered", "mirror_of", "reset_ambient", "set_ambient"]

ISLAND = "island"
# What the autocast entered or left last says, in any thread, as a string that compiled code guards: see
# microfloat.torch.compiled, which checks it against the context variable when it runs.
MIRROR = ""


class Tape:
    """Encode scales in the order a checkpointed region used them, so that its recomputation uses the same ones."""

    def __init__(self) -> None:
        self.scales: list[Any] = []

    def replay(self) -> Iterator[Any]:
        """The recorded entries again, from the first."""
        return iter(self.scales)


class Ambient(NamedTuple):
    """What one autocast says, plus the delayed-scaling region it belongs to."""

    enabled: bool
    recipe: Recipe | None
    calibrating: bool = False
    group: Any = None
    backend: str = "auto"
    region: "scaling.Region | None" = None
    record_tape: Tape | None = None
    replay: Iterator[Any] | None = None


_AMBIENT: ContextVar[Ambient | None] = ContextVar("microfloat_autocast", default=None)


def ambient() -> Ambient | None:
    """The innermost autocast of this thread and task, or None."""
    return _AMBIENT.get()


def mirror_of(state: Ambient | None) -> str:
    """The string under which compiled code knows a state."""
    if state is None:
        return token_of(None)
    return token_of(state.recipe) if state.enabled else ISLAND


def set_ambient(state: Ambient) -> Any:
    """Make `state` the innermost autocast; returns the token that `reset_ambient` takes."""
    global MIRROR
    token = _AMBIENT.set(state)
    MIRROR = mirror_of(state)
    return token


def reset_ambient(token: Any) -> None:
    """Restore what was ambient before `set_ambient`."""
    global MIRROR
    _AMBIENT.reset(token)
    MIRROR = mirror_of(_AMBIENT.get())


@contextlib.contextmanager
def entered(state: Ambient | None) -> Iterator[None]:
    """Make `state` the ambient one for the duration, without opening a delayed-scaling region."""
    token = _AMBIENT.set(state)
    try:
        yield
    finally:
        _AMBIENT.reset(token)
