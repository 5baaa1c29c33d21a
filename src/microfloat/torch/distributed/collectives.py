"""Gathers and reduce-scatters of a layer, waited for at once or started beside what follows.

A collective that is started runs in gloo's threads on a CPU, until `UnderWay.wait`. On a GPU it runs in its place on
the current stream: on a stream of their own, beside products on 24 multiprocessors less, collectives of backward made
no step of two H100s faster (benchmarks/results/tp_beside_attempt.json).
"""

import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch.distributed import distributed_c10d

from microfloat.torch.scaling.rank_errors import in_collective

__all__ = [
    "UnderWay", "all_gather", "all_gather_together", "gather_bytes", "gather_rows", "reduce_scatter", "scatter_sum",
    "sum_over",
]  # fmt: skip

# The names in newer versions of torch, and in older ones.
all_gather: Callable[..., object] = (
    getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
)
reduce_scatter: Callable[..., object] = (
    getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
)
Group = torch.distributed.ProcessGroup
Received = TypeVar("Received")


class UnderWay(Generic[Received]):
    """A collective that was started. It keeps the tensors that it reads and writes until it has been waited for."""

    __slots__ = ("_group", "_kept", "_received", "_wait", "_what")

    def __init__(
        self, received: Received, kept: Sequence[torch.Tensor] = (), wait: Callable[[], object] | None = None,
        what: str = "", group: Group | None = None,
    ) -> None:  # fmt: skip
        """`kept`: what it reads and writes; `wait`: None where nothing is left to wait for."""
        self._received, self._kept, self._wait, self._what, self._group = received, kept, wait, what, group

    def wait(self) -> Received:
        """The received tensors, for whatever the current stream launches from now on.

        Raises RankError where a rank failed, whenever it is asked.
        """
        if self._wait is not None:
            with in_collective(self._what, self._group):
                self._wait()
            self._wait, self._kept = None, ()
        return self._received


def all_gather_together(
    received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], group: Group, async_op: bool = False
) -> object:
    """All-gathers of several vectors as one; returns torch's promise where `async_op` is True."""
    if len(sent) == 1:
        return all_gather(received[0], sent[0], group=group, async_op=async_op)
    options = distributed_c10d.AllgatherOptions()  # pyright: ignore[reportPrivateImportUsage]
    options.asyncOp = async_op
    work = group.allgather_into_tensor_coalesced([*received], [*sent], options)
    if not async_op and work is not None:  # NCCL has none where the current stream runs it
        work.wait()
    return work


def gather_bytes(sent: Sequence[torch.Tensor], ranks: int, group: Group) -> UnderWay[list[torch.Tensor]]:
    """Start to gather the codes and scales of all ranks: for each uint8 [B] that a rank sends, [ranks * B]."""
    received = [one.new_empty(ranks * one.numel()) for one in sent]
    what = "the all-gather of codes and scales of a sharded layer"
    return _start(all_gather_together, received, (received, sent), (*received, *sent), what, group)


def gather_rows(part: torch.Tensor, dim: int, ranks: int, group: Group) -> torch.Tensor:
    """The parts of all ranks side by side along `dim`."""
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    with in_collective("the all-gather of a sharded layer", group):
        all_gather_together([whole.view(-1)], [part.contiguous().view(-1)], group)
    if math.prod(part.shape[:dim]) == 1:
        return whole.view(*part.shape[:dim], -1, *part.shape[dim + 1 :])
    return torch.cat(whole.chunk(ranks), dim)


def scatter_sum(partial: torch.Tensor, dim: int, ranks: int, group: Group) -> UnderWay[torch.Tensor]:
    """Start to add up the tensors of all ranks, for this rank's part along `dim` of the sum.

    torch's functional collectives do the same by an operator that Python dispatches, and a promise that is waited for.
    """
    shape = list(partial.shape)
    shape[dim] //= ranks
    is_in_order = math.prod(shape[:dim]) == 1  # the parts of the ranks lie one after the other
    sent = (partial.contiguous() if is_in_order else torch.cat(partial.chunk(ranks, dim))).view(-1)
    received = sent.new_empty(shape)
    tensors = received.view(-1), sent
    return _start(reduce_scatter, received, tensors, tensors, "the reduce-scatter of a sharded layer", group)


def _start(
    collective: Callable[..., object], received: Received, arguments: tuple, kept: Sequence[torch.Tensor], what: str,
    group: Group,
) -> UnderWay[Received]:  # fmt: skip
    beside = not kept[0].is_cuda
    with in_collective(what, group):
        work = collective(*arguments, group=group, async_op=beside)
    return UnderWay(received, kept, work.wait, what, group) if beside else UnderWay(received)  # type: ignore[attr-defined]


def sum_over(part: torch.Tensor, group: Group, is_fresh: bool) -> torch.Tensor:
    """The sum of all ranks' parts, by the collective itself; `is_fresh`: in the memory of `part`."""
    whole = part if is_fresh and part.is_contiguous() else part.clone(memory_format=torch.contiguous_format)
    with in_collective("the all-reduce of a sharded layer", group):
        torch.distributed.all_reduce(whole, group=group)
    return whole
