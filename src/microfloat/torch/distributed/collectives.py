"""Gathers and reduce-scatters of a layer, waited for at once or started beside the kernels that follow.

A collective that is started runs in gloo's threads on a CPU. On a GPU it runs on a stream of its own, behind what the
current one has launched so far, and `UnderWay.wait` makes the current one wait for it. Two things decide if products
really run beside it there. It has to take its multiprocessors first: a GEMM whose programs stay on all of them to its
end would keep it out. So the current stream goes on behind the point at which the collective may begin. And the GEMM
has to do without them: a program of it that waits for the collective's end would do its whole share of the work behind
it (`leaving_room`).
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch.distributed import distributed_c10d

from microfloat.torch.failures import in_collective

__all__ = [
    "UnderWay", "all_gather", "all_gather_together", "gather_bytes", "gather_rows", "leaving_room", "reduce_scatter",
    "scatter_sum", "sum_over",
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

ROOM = 24  # multiprocessors that NCCL takes between the GPUs of a host
_set_room: Callable[[int | None], None] | None = getattr(torch._C, "_set_sm_carveout_experimental", None)
_room: Callable[[], int | None] = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)


class UnderWay(Generic[Received]):
    """A collective that was started. It keeps the tensors that it reads and writes until it has been waited for."""

    __slots__ = ("_group", "_kept", "_received", "_stream", "_wait", "_what")

    def __init__(
        self, received: Received, kept: Sequence[torch.Tensor] = (), wait: Callable[[], object] | None = None,
        what: str = "", group: Group | None = None, stream: "torch.cuda.Stream | None" = None,
    ) -> None:  # fmt: skip
        """`kept`: what it reads and writes; `wait`: None where nothing is left to wait for; `stream`: its own."""
        self._received, self._kept, self._wait, self._stream = received, kept, wait, stream
        self._what, self._group = what, group

    @property
    def is_awaited(self) -> bool:
        """True until somebody has waited for it."""
        return self._wait is not None

    def wait(self) -> Received:
        """What it has received, for whatever the current stream launches from now on.

        Raises RankError where a rank failed.
        """
        wait, self._wait = self._wait, None
        if wait is not None:
            with in_collective(self._what, self._group):
                wait()
            self._kept, self._stream = (), None
        return self._received

    def __del__(self) -> None:
        if self._stream is not None:  # after an error in between: its memory is in use
            for tensor in self._kept:
                tensor.record_stream(self._stream)


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


def scatter_sum(partial: torch.Tensor, dim: int, ranks: int, group: Group, apart: bool) -> UnderWay[torch.Tensor]:
    """This rank's part along `dim` of the sum over all ranks; `apart`: it is started, not waited for.

    torch's functional collectives do the same by an operator that Python dispatches, and a promise that is waited for.
    """
    shape = list(partial.shape)
    shape[dim] //= ranks
    is_in_order = math.prod(shape[:dim]) == 1  # the parts of the ranks lie one after the other
    sent = (partial.contiguous() if is_in_order else torch.cat(partial.chunk(ranks, dim))).view(-1)
    received, what = sent.new_empty(shape), "the reduce-scatter of a sharded layer"
    tensors = received.view(-1), sent
    if apart:
        return _start(reduce_scatter, received, tensors, tensors, what, group)
    with in_collective(what, group):
        reduce_scatter(*tensors, group=group)
    return UnderWay(received)


def _start(
    collective: Callable[..., object], received: Received, arguments: tuple, kept: Sequence[torch.Tensor], what: str,
    group: Group,
) -> UnderWay[Received]:  # fmt: skip
    if not kept[0].is_cuda:
        with in_collective(what, group):
            work: torch.distributed.Work = collective(*arguments, group=group, async_op=True)  # type: ignore[assignment]
        return UnderWay(received, kept, work.wait, what, group)
    device = kept[0].get_device()
    current, beside = torch.cuda.current_stream(device), stream_beside(device)
    beside.wait_stream(current)
    begins = beside.record_event()
    with in_collective(what, group), torch.cuda.stream(beside):
        collective(*arguments, group=group)
    ends = beside.record_event()
    current.wait_event(begins)

    def wait() -> None:
        torch.cuda.current_stream(device).wait_event(ends)

    return UnderWay(received, kept, wait, what, group, beside)


@functools.cache
def stream_beside(device: int) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device, priority=-1)


@contextlib.contextmanager
def leaving_room(under_way: bool, device: int) -> Iterator[None]:
    """Launch GEMMs inside on fewer multiprocessors, if something is under way on a GPU; `device`: -1 is the CPU.

    cuBLAS, and the kernel of `microfloat.torch.own_gemm`, read the number from torch.
    """
    if not under_way or device < 0 or _set_room is None:
        yield
        return
    before = _room()
    _set_room(ROOM)
    try:
        yield
    finally:
        _set_room(before)


def sum_over(part: torch.Tensor, group: Group, is_fresh: bool) -> torch.Tensor:
    """The sum of all ranks' parts, by the collective itself; `is_fresh`: in the memory of `part`."""
    whole = part if is_fresh and part.is_contiguous() else part.clone(memory_format=torch.contiguous_format)
    with in_collective("the all-reduce of a sharded layer", group):
        torch.distributed.all_reduce(whole, group=group)
    return whole
