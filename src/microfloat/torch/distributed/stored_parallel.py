"""Tensor parallelism for layers whose weights `quantize_` has stored: each rank keeps codes and scales of its part.

A rank's part is a plain layer of smaller size, whose calls run as in one process; hooks around them lay x and y out as
the style says. Codes are never a DTensor: x and y become DTensors where they are redistributed, and nowhere else.

Legend: N = out features, K = in features, R = ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, parallel

from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.layout import folded_format
from microfloat.recipes import WeightActivation, WeightOnly
from microfloat.torch.distributed.shards import block_along
from microfloat.torch.nn.linear import Linear
from microfloat.torch.tensor import QuantizedTensor

__all__ = ["shard_stored"]

_Style = parallel.ColwiseParallel | parallel.RowwiseParallel
_MANY = 2**31 - 1  # rows of a call, for which a config may have other casts


def shard_stored(layer: nn.Module, mesh: DeviceMesh, style: _Style) -> bool:
    """Leave to `layer` this rank's part of its stored weight, and lay its calls out by `style`; False if it has none.

    By rows (N / R each) under a column-parallel style, by columns (K / R each) under a row-parallel one, whose results
    are added up. There the bias stays with the first rank alone, so that it is added once; and a scale of a whole
    input, or of its rows, is that of the columns of all ranks, whose amaxes take one all-reduce a call
    (`PartSchedule`). The style's `src_data_rank` sends its weight, None has every rank cut its own. Raises
    NotSupportedError for weights of `quantized_model_init`, which train, for layers that have been cut and for meshes
    of more axes, InvalidValueError where a block would be cut, on every rank and before anything changes. Source:
    docs/distributed.md.
    """
    weight = layer._parameters.get("weight")
    if not isinstance(weight, QuantizedTensor):
        return False
    name, by_rows = type(style).__name__, isinstance(style, parallel.ColwiseParallel)
    if not isinstance(layer, Linear):
        raise NotSupportedError(
            f"{name}: got a {type(layer).__name__} whose weight is stored as codes ({weight.format}), needed a Linear "
            "of microfloat. Of a plain nn.Linear microfloat.torch.quantize_ makes one; experts go to ranks one by one: "
            "microfloat.torch.distributed.dispatch."
        )
    if not isinstance(layer.pinned, WeightOnly | WeightActivation):
        raise NotSupportedError(
            f"{name}: got a layer whose weight is stored as codes ({weight.format}) and trains, needed values, which "
            "every rank casts, or a layer of microfloat.torch.quantize_. Build the layer without quantized_model_init "
            "and let its recipe quantize it, or shard it by fully_shard alone."
        )
    if layer.return_bias:
        raise NotSupportedError(
            f"{name}: got return_bias=True for a layer whose weight is stored as codes ({weight.format}), needed one "
            "that adds its bias. Leave return_bias out, or keep the layer whole on every rank."
        )
    if "_whole_shape" in vars(layer):
        raise NotSupportedError(
            f"{name}: got a layer of which this rank already has a part, of {tuple(weight.shape)}, needed a whole one, "
            f"of {layer._whole_shape}. Name each layer once in the plans of parallelize_module."
        )
    if mesh.ndim != 1:
        raise NotSupportedError(
            f"{name}: got a mesh of {mesh.ndim} dimensions for a weight stored as codes, needed one. Name the "
            'dimension of tensor parallelism: mesh["tp"].'
        )
    _check_parts(layer, weight, mesh.size(), by_rows)
    rank, dim = mesh.get_local_rank(), 0 if by_rows else 1
    count = weight.shape[dim] // mesh.size()
    whole = {"weight": weight.detach()}
    others = {"bias": layer.bias, "input_amax": layer._buffers.get("input_amax")}
    whole |= {key: one.detach() for key, one in others.items() if one is not None}
    source = getattr(style, "src_data_rank", 0)
    if source is not None and not weight.is_meta:
        whole = {key: _sent(one, mesh, source) for key, one in whole.items()}
    part = whole["weight"].narrow(dim, rank * count, count).clone()  # a view would keep all of it in memory
    layer.weight = nn.Parameter(part, requires_grad=weight.requires_grad)
    if layer.bias is not None:
        own = whole["bias"]
        bias = own.narrow(0, rank * count, count).clone() if by_rows else own if rank == 0 else None
        layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=layer.bias.requires_grad)
    vars(layer)["_whole_shape"] = tuple(weight.shape)
    vars(layer)["_cut"] = f"{'N' if by_rows else 'K'} {mesh.get_group().group_name}"
    layer.out_features, layer.in_features = part.shape
    if "input_amax" in whole:
        layer._buffers["input_amax"] = whole["input_amax"]
    inside: tuple[Placement, Placement] = (Replicate(), Shard(-1)) if by_rows else (Shard(-1), Partial())
    layer.register_forward_pre_hook(_Entering(mesh, style, inside[0]))
    layer.register_forward_hook(_Leaving(mesh, style, inside[1]))
    return True


def _check_parts(layer: Linear, weight: QuantizedTensor, ranks: int, by_rows: bool) -> None:
    """Raise InvalidValueError unless every rank gets whole blocks of all that is cast, and as many as the others."""
    size, letter, side = (weight.shape[0], "N", "out_features") if by_rows else (weight.shape[1], "K", "in_features")
    read = [layer.pinned.for_call(rows, weight.cast).fprop for rows in (1, _MANY)]
    casts = [(weight.cast, "NK"), *((one.rhs, "NK") for one in read), *((one.lhs, "MK") for one in read)]
    used = [(cast, (axes[0], axes[1])) for cast, axes in casts if cast is not None and letter in axes]
    block, name = max((block_along(cast, axes, letter), cast.format.name) for cast, axes in used)
    if ranks > 1 and any(one.path == "folded" for one in read):  # some chips do, and parts are the same for all
        block = max(size or 1 for size in folded_format(weight.format, "tiles").block)
        name = f"{weight.format.name}, folded"
    if size % ranks or size // ranks % block:
        path = layer.__dict__.get("_path")
        raise invalid_value(
            f"weight, sharded along {letter} ({side})" + (f" of {path}" if path else ""),
            f"{size} over {ranks} ranks",
            f"parts of one size that are multiples of {block}" + f", whole blocks of {name}" * (block > 1),
            f"Make {side} a multiple of {ranks * block}, or leave the layer out of the plan.",
        )  # fmt: skip


def _sent(tensor: torch.Tensor, mesh: DeviceMesh, source: int) -> Any:
    """The tensor of rank `source` of the mesh, on every rank."""

    def sent(part: torch.Tensor) -> torch.Tensor:
        copied = part.clone(memory_format=torch.contiguous_format)
        dist.broadcast(copied.reshape(-1).view(torch.uint8), group=mesh.get_group(), group_src=source)
        return copied

    return tensor.map_parts(sent) if isinstance(tensor, QuantizedTensor) else sent(tensor)


def _placed(x: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (placement,), run_check=False)


class _Hook:
    """What a hook knows: a class of the module, so that models can be saved whole, and copies are on the same mesh."""

    def __init__(self, mesh: DeviceMesh, style: _Style, inside: Placement) -> None:
        """`inside`: how the layer's x, or y, lies."""
        self.mesh, self.inside = mesh, inside
        (self.x,), (self.y,) = style.input_layouts, style.output_layouts
        self.is_local = style.use_local_output

    def __deepcopy__(self, memo: object) -> "_Hook":
        return self


class _Entering(_Hook):
    """The hook that gives a layer its part of x; of a replica every rank makes a part of the gradient."""

    def __call__(self, layer: nn.Module, arguments: tuple) -> tuple | None:
        """The arguments with that part, None where they have it."""
        if not arguments:
            raise invalid_type("x", "none by position", "x [..., K] as the first argument", "Call layer(x).")
        x, *others = arguments
        replicas = (Partial(),) if isinstance(self.inside, Replicate) else None
        has_gradient = torch.is_grad_enabled() and x.requires_grad
        if not isinstance(x, DTensor) and self.x == self.inside and not (replicas and has_gradient):
            return None
        placed = _placed(x, self.mesh, self.x).redistribute(placements=(self.inside,))
        return placed.to_local(grad_placements=replicas), *others


class _Leaving(_Hook):
    """The hook that lays out y, of which a rank has columns or one of the sums."""

    def __call__(self, layer: nn.Module, arguments: tuple, y: torch.Tensor) -> torch.Tensor:
        """y as the style wants it."""
        if self.inside == self.y and self.is_local:
            return y
        placed = _placed(y, self.mesh, self.inside).redistribute(placements=(self.y,))
        return placed.to_local() if self.is_local else placed
