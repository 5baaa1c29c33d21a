"""Activation checkpointing that replays the autocast, the random seeds and the delayed scales of its forward."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from microfloat.errors import invalid_type
from microfloat.torch.context import Ambient, Tape, ambient, entered

__all__ = ["checkpoint"]


def checkpoint(function: Callable, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` whose activations are recomputed in backward, with the bits of the first pass.

    Like `torch.utils.checkpoint.checkpoint(use_reentrant=False)`, which knows nothing of this library's autocast: the
    recomputation runs under the recipe of its forward, with the same call seeds and the same delayed encode scales, and
    records nothing (docs/numerics.md 3.3, 5.3). Raises InvalidTypeError if `function` is not callable.
    """
    if not callable(function):
        raise invalid_type("function", type(function), "a callable")
    state = ambient()

    def contexts() -> tuple[Any, Any]:
        tape = Tape()
        return _recording(tape), _replaying(state, tape)

    return torch_checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=preserve_rng_state, **kwargs
    )


@contextlib.contextmanager
def _recording(tape: Tape) -> Iterator[None]:
    with entered(ambient(), record_tape=tape):
        yield


@contextlib.contextmanager
def _replaying(state: Ambient | None, tape: Tape) -> Iterator[None]:
    with entered(state, replay=tape.replay()):
        yield
