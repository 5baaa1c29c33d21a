"""The collectives of tensor-parallel and FSDP2 layers, each in its place in the program, and the order of their bytes.

On a stream of their own, beside products on 24 multiprocessors less, collectives of backward made no step of two H100s
faster (benchmarks/results/tp_beside_attempt.json).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch.distributed import distributed_c10d

from microfloat.layout import Part
from microfloat.torch.backends.base import laid
from microfloat.torch.distributed.tp_shards import Axis
from microfloat.torch.scaling.rank_errors import in_collective

# The names in newer versions of torch, and in older ones.
all_gather: Callable[..., object] = (
    getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
)
reduce_scatter: Callable[..., object] = (
    getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
)
Group = torch.distributed.ProcessGroup
_resolved: Callable[..., Group] = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]


def group_of(axis: Axis) -> Group:
    """The process group of this rank's line of the mesh."""
    return _resolved(axis.group)


def all_gather_together(received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], group: Group) -> None:
    """All-gathers of several vectors as one."""
    if len(sent) == 1:
        all_gather(received[0], sent[0], group=group)
        return
    options = distributed_c10d.AllgatherOptions()  # pyright: ignore[reportPrivateImportUsage]
    options.asyncOp = False
    work = group.allgather_into_tensor_coalesced([*received], [*sent], options)
    if work is not None:  # NCCL has none where the current stream runs it
        work.wait()


def gather_parts(parts: Sequence[tuple[torch.Tensor, Part]], outer: int, axis: Axis) -> list[torch.Tensor]:
    """The whole parts of an operand, laid as each `Part` says, of which every rank has a share; in one message.

    `outer`: the number of runs of rows that a rank's share is of the sharded dimension. Bytes travel as they lie, and
    one copy of whole runs puts them in place where they are not in place already.
    """
    turned = [part.stride(0) < part.stride(1) for part, _ in parts]
    lying = [(part.t() if is_turned else part).contiguous() for (part, _), is_turned in zip(parts, turned, strict=True)]
    sent = [one.view(-1).view(torch.uint8) for one in lying]
    received = [one.new_empty(axis.size * one.numel()) for one in sent]
    group = group_of(axis)
    with in_collective("the all-gather of codes and scales of a sharded layer", group):
        all_gather_together(received, sent, group)
    made = []
    for (part, goal), is_turned, share, whole in zip(parts, turned, lying, received, strict=True):
        dim, shape = differing(part.shape, goal.shape), [*share.shape]
        dim = 1 - dim if is_turned else dim
        runs = outer * math.prod(shape[:dim])
        whole = whole if runs == 1 else side_by_side(whole.view(axis.size, runs, -1))
        shape[dim] *= axis.size
        whole = whole.view(share.dtype).view(shape)
        made.append(laid(whole.t() if is_turned else whole, goal))
    return made


def differing(shape: Sequence[int], other: Sequence[int]) -> int:
    """The first dimension in which two shapes differ."""
    return next(dim for dim, pair in enumerate(zip(shape, other, strict=True)) if pair[0] != pair[1])


def side_by_side(shards: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks beside each other: uint8 [ranks, R, bytes of a row] -> [R * ranks * bytes]."""
    width, start = shards.shape[2], shards.storage_offset()
    for dtype in (torch.int64, torch.int32, torch.int16):  # a copy of whole words is as fast as memory
        if width % dtype.itemsize == 0 and start % dtype.itemsize == 0:
            shards = shards.view(dtype)
            break
    return shards.transpose(0, 1).reshape(-1).view(torch.uint8)


def gather_rows(part: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """The parts of all ranks side by side along `dim`."""
    whole, group = part.new_empty((axis.size * part.shape[0], *part.shape[1:])), group_of(axis)
    with in_collective("the all-gather of a sharded layer", group):
        all_gather_together([whole.view(-1)], [part.contiguous().view(-1)], group)
    if math.prod(part.shape[:dim]) == 1:
        return whole.view(*part.shape[:dim], -1, *part.shape[dim + 1 :])
    return torch.cat(whole.chunk(axis.size), dim)


def scatter_sum(partial: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """This rank's part along `dim` of the sum of all ranks' tensors.

    torch's functional collectives do the same by an operator that Python dispatches, and a promise that is waited for.
    """
    shape = list(partial.shape)
    shape[dim] //= axis.size
    is_in_order = math.prod(shape[:dim]) == 1  # the parts of the ranks lie one after the other
    sent = (partial.contiguous() if is_in_order else torch.cat(partial.chunk(axis.size, dim))).view(-1)
    received, group = sent.new_empty(shape), group_of(axis)
    with in_collective("the reduce-scatter of a sharded layer", group):
        reduce_scatter(received.view(-1), sent, group=group)
    return received


def sum_over(part: torch.Tensor, group: Group, is_fresh: bool) -> torch.Tensor:
    """The sum of all ranks' parts, by the collective itself; `is_fresh`: in the memory of `part`."""
    whole = part if is_fresh and part.is_contiguous() else part.clone(memory_format=torch.contiguous_format)
    with in_collective("the all-reduce of a sharded layer", group):
        torch.distributed.all_reduce(whole, group=group)
    return whole
