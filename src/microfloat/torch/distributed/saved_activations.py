"""Tensors saved for backward, packed into a part for each rank of a group and gathered again by hooks."""

import zlib
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from microfloat.torch.distributed.collectives import all_gather
from microfloat.torch.scaling.amax_reduction import Group
from microfloat.torch.scaling.rank_errors import in_collective
from microfloat.torch.tensor.checks import is_abstract

_FEWEST_BYTES = 4096  # a collective of less costs more than the memory is worth
_ODD = 0x1E3779B97F4A7C15


class _Part(NamedTuple):
    """This rank's bytes of a tensor, and how the bytes of all ranks become it."""

    piece: torch.Tensor
    size: int  # bytes of the whole
    dtype: torch.dtype
    shape: tuple[int, ...]  # in the order of memory
    order: tuple[int, ...]  # the axes of the tensor in the order of memory


class distribute_saved_activations(torch.autograd.graph.saved_tensors_hooks):
    """Let each rank of `group` keep a part of what forward saves for backward; backward gathers it, bit for bit.

    A context around the forward, on every rank of `group` (None: all): of a tensor that all ranks hold alike, as the
    ranks of a tensor-parallel group hold x, its codes and what is computed from it, each keeps 1/N of the bytes.
    Tensors that differ between ranks, parameters, views with gaps, and tensors of less than 4096 bytes are kept whole.
    Each tensor costs a comparison of check sums (one all-reduce of 16 bytes, for which the host waits) in forward and
    an all-gather of its bytes in backward, so every rank has to run the same forward and the same backward.

    `whole_bytes` and `kept_bytes`: what was saved so far, without the context and with it. Source:
    docs/distributed.md, "Saved activations".
    """

    def __init__(self, group: Group = None) -> None:
        super().__init__(self._pack, self._unpack)
        self._group = group
        self._ranks, self._rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        self._is_nccl = torch.distributed.get_backend(group) == "nccl"
        self._packed = WeakIdKeyDictionary()  # of tensors that several nodes save, with their versions
        self.whole_bytes = self.kept_bytes = 0

    def __enter__(self) -> "distribute_saved_activations":  # pyright: ignore[reportIncompatibleMethodOverride]
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._packed.clear()
        super().__exit__(*exception)

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _Part":
        if self._stays(tensor):
            return tensor
        version, packed = self._packed.get(tensor) or (-1, tensor)
        if version != tensor._version:
            packed = self._part_of(tensor.detach())
            self._packed[tensor] = tensor._version, packed
            self.whole_bytes += tensor.nbytes
            self.kept_bytes += packed.piece.nbytes if isinstance(packed, _Part) else tensor.nbytes
        return tensor if packed is None else packed

    def _stays(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that is kept whole, as every rank can tell by itself."""
        owner = tensor if tensor._base is None else tensor._base
        return (
            self._ranks == 1 or type(tensor) is not torch.Tensor or is_abstract(tensor)
            or isinstance(owner, torch.nn.Parameter) or (owner.is_leaf and owner.requires_grad)
            or tensor.dim() == 0 or (self._is_nccl and not tensor.is_cuda)
        )  # fmt: skip

    def _part_of(self, tensor: torch.Tensor) -> _Part | None:
        """This rank's part; None where ranks hold different values, or where memory has gaps or overlaps."""
        order = tuple(sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), axis)))
        laid = tensor.permute(order)
        if not laid.is_contiguous():  # compared all the same: another rank may hold it without gaps
            laid, order = laid[:0].contiguous(), ()
        data = laid.view(-1).view(torch.uint8)
        is_shared = self._is_shared(data, f"{tensor.dtype} {tuple(tensor.shape)} {order}")
        if not is_shared or data.numel() < _FEWEST_BYTES:
            return None
        length = -(-data.numel() // self._ranks)
        piece = data.new_zeros(length)
        own = data[self._rank * length : (self._rank + 1) * length]
        piece[: own.numel()] = own
        return _Part(piece, data.numel(), tensor.dtype, tuple(laid.shape), order)

    def _is_shared(self, data: torch.Tensor, layout: str) -> bool:
        """True on every rank where all of them hold these bytes in this layout."""
        count = data.numel() // 8
        words = data[: 8 * count].view(torch.int64)
        odd = torch.arange(count, device=data.device) * 2 + 1
        mixed = (words ^ (words >> 32)) * (odd * _ODD)
        rest = zlib.crc32(layout.encode() + bytes(data[8 * count :].tolist()))
        total = (mixed ^ (mixed >> 29)).sum() + rest
        extremes = torch.stack([total, -total])
        with in_collective("the comparison of a saved activation", self._group):
            torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, self._group)
        largest, smallest = extremes.tolist()
        return largest == -smallest

    def _unpack(self, packed: "torch.Tensor | _Part") -> torch.Tensor:
        if not isinstance(packed, _Part):
            return packed
        whole = packed.piece.new_empty(self._ranks * packed.piece.numel())
        with in_collective("the all-gather of a saved activation", self._group):
            all_gather(whole, packed.piece, group=self._group)
        laid = whole[: packed.size].view(packed.dtype).view(packed.shape)
        return laid.permute([packed.order.index(axis) for axis in range(len(packed.order))])
