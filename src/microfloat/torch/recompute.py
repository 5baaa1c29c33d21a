"""Activation checkpointing that replays the autocast, the random seeds and the delayed scales of its forward."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from microfloat.errors import invalid_type, invalid_value
from microfloat.torch.context import Ambient, Tape, ambient, entered

__all__ = ["checkpoint"]


def _in_eager_mode(function: Callable) -> Callable:
    """Let Dynamo break the graph at `function`, and give the reason under fullgraph."""
    # Imports Dynamo no sooner than it is called.
    wrapped = torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage]
    wrapped._torchdynamo_disable = True  # type: ignore[attr-defined]
    wrapped._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "microfloat.torch.checkpoint cannot be compiled; use torch.utils.checkpoint, which can, with layers whose "
        "recipe microfloat.torch.convert has pinned"
    )
    return wrapped


@_in_eager_mode
def checkpoint(
    function: Callable, *args: Any, use_reentrant: bool = False, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """``function(*args, **kwargs)`` whose activations are recomputed in backward, with the bits of the first pass.

    Like `torch.utils.checkpoint.checkpoint(use_reentrant=False)`, which knows nothing of this library's autocast: the
    recomputation runs under the recipe of its forward, with the same call seeds and the same delayed encode scales, and
    records nothing (docs/numerics.md 3.3, 5.3). Compiled code runs it, and `function`, in eager mode. Raises
    InvalidTypeError if `function` is not callable, InvalidValueError for use_reentrant=True.
    """
    if not callable(function):
        raise invalid_type("function", type(function), "a callable")
    if use_reentrant is not False:
        raise invalid_value(
            "use_reentrant", repr(use_reentrant), "False, the form that can replay what its forward drew and measured",
            "Leave it out. torch.utils.checkpoint has the reentrant form, for layers pinned by convert.",
        )  # fmt: skip
    state = ambient()

    def contexts() -> tuple[Any, Any]:
        tape = Tape(None if state is None else state.record_tape)
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
    with entered(state, record_tape=None, replay=tape.replay()):
        yield
