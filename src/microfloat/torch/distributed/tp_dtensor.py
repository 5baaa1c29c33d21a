"""DTensors made of local tensors, and local tensors taken from DTensors, without the cost of torch's public calls.

``DTensor.from_local`` and ``to_local`` work out the shape of the whole, check placements and add nodes to autograd's
graph: 0.2 ms of a host's time for each pair. A layer keeps the placements of its tensors, which are the same in every
call, as `Placed`, and wraps and unwraps DTensors inside of its own node.

This module alone uses parts of DTensors that torch does not document. In versions of torch without them, the public
calls take their place.
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


class Placed:
    """The placements, on the ranks of a mesh, of a tensor of `shape` that is contiguous as a whole."""

    __slots__ = ("_specs", "mesh", "placements", "shape", "strides")

    def __init__(self, mesh: "DeviceMesh", placements: tuple[Placement, ...], shape: torch.Size) -> None:
        self.mesh, self.placements, self.shape = mesh, placements, shape
        self.strides = torch.empty(shape, device="meta").stride()
        # One for each dtype.
        self._specs: dict[torch.dtype, DTensorSpec] = {}  # pyright: ignore[reportInvalidTypeForm]

    def __deepcopy__(self, memo: object) -> "Placed":
        return self  # a copied layer is on the same mesh

    def wrap(self, local: torch.Tensor) -> DTensor:
        """The DTensor whose part on this rank is `local`, a fresh tensor without a history."""
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
        """This rank's part of a DTensor in these placements, without a history; maybe a promise of torch's."""
        if tensor.placements == self.placements:
            return tensor._local_tensor
        if self.placements == (Replicate(),) and tensor.placements == (Partial(),):
            return sum_over(tensor._local_tensor, self.mesh.get_group(), is_fresh=False)
        with torch.no_grad():
            return tensor.redistribute(placements=self.placements)._local_tensor


def from_the_front(placements: tuple[Placement, ...], dims: int) -> tuple[Placement, ...]:
    """The same placements with dimensions counted from the front, as DTensors have them."""
    return tuple(Shard(one.dim % dims) if type(one) is Shard else one for one in placements)


def of_gradient(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The placements of the gradient of a tensor with these placements: each addend of a sum has the whole gradient."""
    return tuple(Replicate() if one.is_partial() else one for one in placements)


class AsPlaced(torch.autograd.Function):
    """The DTensor whose part on this rank is `local`; its gradient is redistributed as `gradient` says."""

    @staticmethod
    def forward(ctx: Context, local: torch.Tensor, placed: Placed, gradient: Placed) -> torch.Tensor:
        ctx.placed = gradient
        ctx.set_materialize_grads(False)
        return placed.wrap(local.detach())

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        return None if gradients[0] is None else ctx.placed.local_of(cast(DTensor, gradients[0])), None, None
