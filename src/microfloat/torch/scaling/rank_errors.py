"""Messages between ranks: which ranks have failed, and whether all ranks do the same. They cost a step no time.

A collective that one rank never calls fails on all other ranks, with an error that names an address or nothing.
Therefore each rank writes its error into the store of the process group when it fails, and waits a moment for the
others: ranks that write nothing have died or hang.
"""

import contextlib
import functools
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from microfloat.errors import MicrofloatError, NotSupportedError, RankError
from microfloat.torch._typing import Group
from microfloat.torch.tensor.checks import check_model

GRACE = 5.0  # seconds in which ranks with the same failure have written it
_MOST_SAID = 500
_LONGEST = 200  # characters of a fact that is told before its rows
_WAITS = "waited in "
_ALIVE = "every rank is alive, but one came to it after the timeout, or a connection between them broke"
# Functions that remove the messages of this rank from the store; empty again after the next collective.
_SAID: list[Callable[[], object]] = []
# Process group, with which the entry goes -> topics that its ranks have compared.
_AGREED: "weakref.WeakKeyDictionary[object, set[str]]" = weakref.WeakKeyDictionary()


def named_failures(group: Group = None) -> AbstractContextManager[None]:
    """Turn an error inside into a `RankError` that names the ranks of `group` (None: all) that failed.

    Put it around the steps of a training loop, on every rank. A rank that dies or hangs is named once the backend gives
    up: at once where it sees a closed connection, otherwise after the timeout of the group. An error of a rank's own
    passes unchanged, and the other ranks quote it. NCCL's watchdog ends the process itself, before Python sees an
    error; there torchrun names the rank. Source: docs/distributed.md.
    """
    return in_collective("a collective", group, tells_errors=True)


@contextlib.contextmanager
def in_collective(what: str, group: Group, tells_errors: bool = False) -> Iterator[None]:
    """Name failed ranks around the collective `what`, as `named_failures`; `tells_errors`: tell others own errors."""
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        # The text is that of a backend which fails because of another rank.
        if isinstance(error, dist.DistError) or "gloo/" in str(error) or "NCCL" in str(error):
            if not isinstance(error, MicrofloatError):
                found = _other_ranks(what, group)
                raise RankError(f"{what} failed: {found} (Seen from rank {dist.get_rank()}: {error})") from error
        elif tells_errors and dist.is_available() and dist.is_initialized():
            _tell(f"raised {type(error).__name__}: {error}"[:_MOST_SAID])
        raise
    while _SAID:  # this rank has survived its failures, and ranks have met since
        with contextlib.suppress(Exception):  # the store went with its world
            _SAID.pop()()


def _tell(text: str) -> Any:
    """Write a message of this rank into the store, which is returned."""
    store = dist.distributed_c10d._get_default_store()
    key = f"microfloat/failed/{dist.get_rank()}"
    store.set(key, text)
    _SAID.append(functools.partial(store.delete_key, key))
    return store


def _other_ranks(what: str, group: Group) -> str:
    """Write that this rank met a failure in `what`; returns the messages of the others as a sentence."""
    ranks = dist.get_process_group_ranks(group)
    waits = f"{_WAITS}{what}"
    told = {dist.get_rank(): waits}
    try:
        store = _tell(waits)
        with contextlib.suppress(Exception):  # ranks that wait for this one then see closed connections at once
            (dist.group.WORLD if group is None else group)._get_backend(torch.device("cpu")).abort()  # type: ignore
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


def agree(group: Group, topic: str, facts: Mapping[str, object]) -> None:
    """`compare`, in the first call for a topic and a group; later calls do nothing."""
    topics = _AGREED.setdefault(dist.group.WORLD if group is None else group, set())
    if topic not in topics:
        compare(group, topic, facts)
        topics.add(topic)


def compare(group: Group, topic: str, facts: Mapping[str, object]) -> None:
    """Compare facts over the ranks of a group, by one small gather.

    Raises NotSupportedError, on every rank, that names the first fact in which a rank differs from the first rank.
    """
    own = {"what is called": topic, **dict(line for name, value in facts.items() for line in _lines(name, value))}
    told: list = [None] * dist.get_world_size(group)
    with in_collective(f"the comparison of {topic} between ranks", group):
        dist.all_gather_object(told, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, other in zip(ranks[1:], told[1:], strict=True):
        differing = [name for name in {**told[0], **other} if told[0].get(name) != other.get(name)]
        if differing:
            name, more = differing[0], f", and {len(differing) - 1} more" if len(differing) > 1 else ""
            ours, theirs = (facts.get(name, "nothing")[:_MOST_SAID] for facts in (told[0], other))
            raise NotSupportedError(
                f"{topic}: {name[:_MOST_SAID]} is {ours} on rank {ranks[0]} and {theirs} on rank {rank}{more}, needed "
                "the same on every rank of the group. Build the model from the same code and options on all ranks, or "
                "pass the group of the ranks that share it."
            )


def _lines(name: str, value: object) -> list[tuple[str, str]]:
    """A fact, and each further line of its text as another fact, so that an error can name the row of a recipe."""
    first, *rest = [" ".join(line.split()) for line in without_addresses(value).splitlines()] or [""]
    rows = [(f"row {number} of {name}", line) for number, line in enumerate(rest)]
    return [(name, first), *rows] if len(first) <= _LONGEST else [*rows, (name, first)]


def without_addresses(value: object) -> str:
    """The text of a value without the addresses of functions, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def check_ranks(model: nn.Module, group: Group = None) -> None:
    """Compare the layers of `model`, their order, weights, buffers and recipes, over the ranks of `group` (None: all).

    Call it on every rank after the model is built and before it is wrapped: `DistributedDataParallel` ends the process
    where ranks send it buffers of different sizes. One small collective. Raises NotSupportedError, on every rank, that
    names the first layer in which two ranks differ; InvalidTypeError for anything but a module.
    """
    check_model(model)
    facts = {}
    for number, (name, module) in enumerate(model.named_modules()):
        weights, buffers = (
            {key: f"{getattr(value, 'format', value.dtype)} {tuple(value.shape)}" for key, value in tensors}
            for tensors in (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        )
        if weights:
            facts[f"layer {number}"] = f"{name!r} ({type(module).__name__} {weights})"
            facts[f"the recipe of layer {number}, {name!r},"] = getattr(module, "pinned", None)
        for key, text in buffers.items():
            facts[f"the buffer {key!r} of layer {number}, {name!r},"] = text
    compare(group, "the model", facts)
