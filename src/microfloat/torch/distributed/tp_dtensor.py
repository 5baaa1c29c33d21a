"""DTensors around local tensors, and the local tensors in DTensors, without what torch does for its public calls.

``DTensor.from_local`` and ``to_local`` work out the shape of the whole, check placements and add a node to autograd's
graph, once in forward and once more in backward: 0.2 ms of a host's time for each pair. A layer knows how its tensors
lie, call after call. It keeps that as a `Placed`, and the autograd Functions of this package take DTensors apart and
put them together inside of their own nodes.

This module alone touches what torch does not document of DTensors. Where a version of torch has none of it, the public
calls take its place.
"""

import copy
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from microfloat.torch._typing import Context, Maybe
from microfloat.torch.distributed.collectives import sum_over

try:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
except ImportError:  # a version of torch that has moved them
    DTensorSpec = TensorMeta = None  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AsPlaced", "Placed", "ToLocal", "from_the_front", "of_gradient"]


class Placed:
    """How a tensor of `shape`, contiguous as a whole, lies on the ranks of a mesh."""

    __slots__ = ("_specs", "mesh", "placements", "shape", "strides")

    def __init__(self, mesh: "DeviceMesh", placements: tuple[Placement, ...], shape: torch.Size) -> None:
        self.mesh, self.placements, self.shape = mesh, placements, shape
        self.strides = torch.empty(shape, device="meta").stride()
        self._specs: dict[torch.dtype, DTensorSpec] = {}  # pyright: ignore[reportInvalidTypeForm]

    def __deepcopy__(self, memo: object) -> "Placed":
        return self  # that of a copied layer too, whose mesh is the same

    def wrap(self, local: torch.Tensor) -> DTensor:
        """The DTensor of which `local`, a fresh tensor without a history, is this rank's part."""
        local = local.contiguous()  # as the spec says
        spec = self._specs.get(local.dtype)
        if spec is None:
            if DTensorSpec is None or TensorMeta is None:
                return DTensor.from_local(
                    local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.strides
                )
            meta = TensorMeta(self.shape, self.strides, local.dtype)
            spec = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
            self._specs[local.dtype] = spec
        # A copy, since operators may write into the one that a tensor has. The constructor ends in an empty
        # ``__init__`` that Dynamo wraps, which costs more than all the rest of it.
        return DTensor.__new__(DTensor, local, copy.copy(spec), requires_grad=False)

    def local_of(self, tensor: DTensor) -> torch.Tensor:
        """This rank's part of a DTensor that may lie otherwise, without a history; a promise where torch makes one."""
        if tensor.placements == self.placements:
            return tensor._local_tensor
        if self.placements == (Replicate(),) and tensor.placements == (Partial(),):
            return sum_over(tensor._local_tensor, self.mesh.get_group(), is_fresh=False)
        with torch.no_grad():
            return tensor.redistribute(placements=self.placements)._local_tensor


def from_the_front(placements: tuple[Placement, ...], dims: int) -> tuple[Placement, ...]:
    """The same placements, none of which counts dimensions from the end, as those of DTensors do not."""
    return tuple(Shard(one.dim % dims) if type(one) is Shard else one for one in placements)


def of_gradient(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The placements of the gradient of a tensor that lies so: that of a sum is needed as a whole by every addend."""
    return tuple(Replicate() if one.is_partial() else one for one in placements)


class ToLocal(torch.autograd.Function):
    """This rank's part of a DTensor; its gradient is a DTensor that lies as `gradient` says."""

    @staticmethod
    def forward(ctx: Context, x: DTensor, gradient: Placed) -> torch.Tensor:
        ctx.placed = gradient
        ctx.set_materialize_grads(False)
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        return None if gradients[0] is None else ctx.placed.wrap(gradients[0]), None


class AsPlaced(torch.autograd.Function):
    """The DTensor of which a tensor is this rank's part; its gradient is this rank's part of `gradient`."""

    @staticmethod
    def forward(ctx: Context, local: torch.Tensor, placed: Placed, gradient: Placed) -> torch.Tensor:
        ctx.placed = gradient
        ctx.set_materialize_grads(False)
        return placed.wrap(local.detach())

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        return None if gradients[0] is None else ctx.placed.local_of(cast(DTensor, gradients[0])), None, None
