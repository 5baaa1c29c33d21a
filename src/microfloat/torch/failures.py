"""Messages between ranks: which of them failed, and if all of them do the same. None of it costs a step anything.

A collective that a rank never comes to fails on all others, with an error that names an address or nothing. Therefore
each rank writes what it met into the store of the process group when it fails, and waits a moment for the others: ranks
that write nothing died or hang.
"""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from microfloat.errors import MicrofloatError, NotSupportedError, RankError
from microfloat.torch._checks import check_model

if TYPE_CHECKING:
    from microfloat.torch.reduction import Group

__all__ = ["agree", "check_ranks", "in_collective", "named_failures"]

GRACE = 5.0  # seconds in which ranks that met the same failure have said so
_MOST_SAID = 500
_LONGEST = 200  # characters of a fact that is told before its rows
_WAITS = "waited in "
_ALIVE = "every rank is alive, but one came to it after the timeout, or a connection between them broke"
_SAID: list[Callable[[], object]] = []  # take back what this rank has written into the store
_AGREED: "weakref.WeakKeyDictionary[object, set[str]]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def named_failures(group: "Group" = None) -> Iterator[None]:
    """Turn an error inside into a `RankError` that names the ranks of `group` (None: all) that failed.

    Put it around the steps of a training loop, on every rank. A rank that dies or hangs is named once the backend gives
    up: at once where it sees a closed connection, otherwise after the timeout of the group. An error of a rank's own
    passes as it is, and is quoted by the others. NCCL's watchdog ends the process itself, before Python sees an error;
    there torchrun names the rank. Source: docs/distributed.md.
    """
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        if not _is_symptom(error) and dist.is_available() and dist.is_initialized():
            _tell(f"raised {type(error).__name__}: {error}"[:_MOST_SAID])
        _raise_named("a collective", group, error)
        raise
    _take_back()


@contextlib.contextmanager
def in_collective(what: str, group: "Group") -> Iterator[None]:
    """`named_failures` around one collective of this library, which `what` names."""
    try:
        yield
    except Exception as error:
        _raise_named(what, group, error)
        raise
    _take_back()


def _is_symptom(error: Exception) -> bool:
    """True for what a backend raises because of another rank."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error) or "NCCL" in str(error)


def _raise_named(what: str, group: "Group", error: Exception) -> None:
    if isinstance(error, MicrofloatError) or not _is_symptom(error):
        return
    found = _other_ranks(what, group)
    raise RankError(f"{what} failed: {found} (Seen from rank {dist.get_rank()}: {error})") from error


def _tell(text: str) -> Any:
    """Write what this rank met into the store, which is returned."""
    store = dist.distributed_c10d._get_default_store()
    key = f"microfloat/failed/{dist.get_rank()}"
    store.set(key, text)
    _SAID.append(functools.partial(store.delete_key, key))
    return store


def _take_back() -> None:
    """Remove what this rank has written of a failure that it survived: ranks have met since."""
    while _SAID:
        with contextlib.suppress(Exception):  # the store went with its world
            _SAID.pop()()


def _other_ranks(what: str, group: "Group") -> str:
    """Say that this rank met a failure in `what`, and what the others say."""
    ranks = dist.get_process_group_ranks(group)
    waits = f"{_WAITS}{what}"
    told = {dist.get_rank(): waits}
    try:
        store = _tell(waits)
        _abort(group)
        until = time.monotonic() + GRACE
        while len(told) < len(ranks) and time.monotonic() < until:
            for rank in ranks:
                if rank not in told and store.check([f"microfloat/failed/{rank}"]):
                    told[rank] = store.get(f"microfloat/failed/{rank}").decode()
            time.sleep(0.02)
    except Exception as error:
        return f"the store of the process group does not answer ({error}), so that the process which holds it died."
    causes = [f"rank {rank} {text}" for rank, text in sorted(told.items()) if not text.startswith(_WAITS)]
    missing = ", ".join(str(rank) for rank in ranks if rank not in told)
    if missing:
        causes.append(f"rank {missing} died, or did not come to it within the timeout; look at the log of that rank")
    elsewhere = [f"rank {rank} {text}" for rank, text in sorted(told.items()) if text != waits]
    if not causes and elsewhere:
        causes.append(f"ranks did not come to the same point: {'; '.join(elsewhere)}")
    return f"{'; '.join(causes) or _ALIVE}."


def _abort(group: "Group") -> None:
    """Close the connections of a group that has failed, so that ranks which wait for this one see it at once."""
    with contextlib.suppress(Exception):
        (dist.group.WORLD if group is None else group)._get_backend(torch.device("cpu")).abort()  # type: ignore


def agree(group: "Group", topic: str, facts: Mapping[str, object]) -> None:
    """Compare facts over the ranks of a group, the first time that it is asked for a topic; later calls do nothing.

    Raises NotSupportedError, on every rank, that names the first fact in which a rank differs from the first one.
    """
    topics = _AGREED.setdefault(dist.group.WORLD if group is None else group, set())
    if topic in topics:
        return
    topics.add(topic)
    own = dict(line for name, value in facts.items() for line in _lines(name, value))
    told: list = [None] * dist.get_world_size(group)
    with in_collective(f"the comparison of {topic} between ranks", group):
        dist.all_gather_object(told, (topic, own), group=group)
    first, *others = zip(dist.get_process_group_ranks(group), told, strict=True)
    for rank, (other_topic, other) in others:
        differing = [("what is called", first[1][0], other_topic)] if other_topic != first[1][0] else [
            (name, first[1][1].get(name, "nothing"), other.get(name, "nothing"))
            for name in {**first[1][1], **other} if first[1][1].get(name) != other.get(name)
        ]  # fmt: skip
        if differing:
            name, ours, theirs = (text[:_MOST_SAID] for text in differing[0])
            topics.discard(topic)
            more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise NotSupportedError(
                f"{topic}: {name} is {ours} on rank {first[0]} and {theirs} on rank {rank}{more}, needed the same on "
                "every rank of the group. Build the model from the same code and options on all ranks, or pass the "
                "group of the ranks that share it."
            )


def _lines(name: str, value: object) -> list[tuple[str, str]]:
    """A fact, and each further line of it as one of its own: a recipe without a short name by the row that differs."""
    first, *rest = [" ".join(line.split()) for line in str(value).splitlines()] or [""]
    rows = [(f"row {number} of {name}", line) for number, line in enumerate(rest)]
    return [(name, first), *rows] if len(first) <= _LONGEST else [*rows, (name, first)]


def check_ranks(model: nn.Module, group: "Group" = None) -> None:
    """Compare the layers of `model`, their order, shapes and recipes, over the ranks of `group` (None: all).

    Once after the model is built, on every rank; one small collective. Raises NotSupportedError, on every rank, that
    names the first layer in which two ranks differ; InvalidTypeError for anything but a module.
    """
    check_model(model)
    facts = {}
    for number, (name, module) in enumerate(model.named_modules()):
        shapes = {key: tuple(value.shape) for key, value in module.named_parameters(recurse=False)}
        if shapes:
            facts[f"layer {number}"] = f"{name!r} ({type(module).__name__} {shapes})"
            facts[f"the recipe of layer {number}, {name!r},"] = getattr(module, "pinned", None)
    _AGREED.setdefault(dist.group.WORLD if group is None else group, set()).discard("the model")
    agree(group, "the model", facts)
