"""A Linear on DTensors: unwrapped, run as one rank's `ShardedSchedule`, and wrapped again.

The weight's placement decides the case (`microfloat.torch.distributed.schedule`); x is redistributed to what the case
needs, as torch's own operators do. Nothing quantized is ever a DTensor, and no DTensor is quantized.

Legend: M = rows of x (all leading dimensions), K = in features, N = out features.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.recipes import Recipe
from microfloat.torch import backends, layer_state
from microfloat.torch._checks import check_linear
from microfloat.torch._typing import Context, Maybe
from microfloat.torch.context import Ambient
from microfloat.torch.distributed.schedule import (
    CASES,
    Axis,
    Rows,
    ShardedSchedule,
    Shards,
    arrived,
    check_blocks,
    group_named,
    why_not_gathered,
)
from microfloat.torch.entries import entries_of
from microfloat.torch.failures import agree, in_collective
from microfloat.torch.linear import apply, backend_name, begin, casts_late, end
from microfloat.torch.observing import OBSERVERS, observed
from microfloat.torch.schedule import SCHEDULES, autocast_dtype, remember
from microfloat.torch.tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from microfloat.torch.nn.linear import Linear

__all__ = ["find_sharded", "run_sharded"]

_NEEDED = "a DTensor on the mesh of the weight"
_REMEDY = (
    "Put the layer into the plan of parallelize_module, or wrap the call's input: DTensor.from_local(x, mesh, ...)."
)

_Placements = tuple[Placement, ...]


class _Case(NamedTuple):
    """A call that is decided: its schedule, and the placements of what goes in and comes out."""

    schedule: ShardedSchedule
    x: _Placements
    dx: _Placements
    dw: _Placements
    bias: _Placements
    db: _Placements
    y: _Placements
    x_shape: torch.Size  # of this rank's part of x, gathered where the schedule gathers
    y_shape: torch.Size  # of the whole y
    y_strides: tuple[int, ...]


def run_sharded(
    layer: "Linear",
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Maybe,
    recipe: Recipe,
    state: Ambient | None,
    first: bool | None,
) -> torch.Tensor | None:
    """``x @ weight.T + bias`` of DTensors under `recipe`; None where there are no elements to multiply.

    y is a DTensor: sharded by columns for a weight that is sharded by its rows (N), partial sums for one that is
    sharded by its columns (K), as from torch's own operators.
    """
    x, weight, bias = _checked(x, weight, bias)
    case = _case_of(layer, x, weight, bias, recipe, state)
    if case is None:
        return None
    if getattr(layer, "fuse_wgrad_accumulation", False) and case.schedule.wants_dw:
        raise NotSupportedError(
            "fuse_wgrad_accumulation: got True for a layer whose weight is a DTensor, needed a plain weight, since "
            "main_grad is none of its shards. Leave it out of this layer."
        )
    if tuple(x.placements) != case.x:
        x = x.redistribute(placements=case.x)
    schedule = case.schedule
    if schedule.shards.gathers("x") is not None:
        x_local = _gathering(x, case)
    else:
        x_local = x.to_local(grad_placements=case.dx)
    w_local = weight.to_local(grad_placements=case.dw)
    b_local = None
    if bias is not None:
        bias = bias if tuple(bias.placements) == case.bias else bias.redistribute(placements=case.bias)
        b_local = bias.to_local(grad_placements=case.db)
    if schedule.device >= 0 and schedule.device != torch._C._cuda_getDevice():
        with torch.cuda.device(schedule.device):
            y_local = _run(layer, schedule, x_local, w_local, b_local, state, first)
    else:
        y_local = _run(layer, schedule, x_local, w_local, b_local, state, first)
    axis = schedule.shards.gathers("dy")
    if axis is not None:
        y_local = _Scattered.apply(y_local, _dim_of(case.y), axis.group)
    whole = {"shape": case.y_shape, "stride": case.y_strides}
    return DTensor.from_local(y_local, x.device_mesh, case.y, run_check=False, **whole)


def _run(
    layer: "Linear", schedule: ShardedSchedule, x: torch.Tensor, weight: torch.Tensor, bias: Maybe,
    state: Ambient | None, first: bool | None,
) -> torch.Tensor:  # fmt: skip
    if OBSERVERS:
        schedule = observed(schedule, (layer,))
    run = begin(layer, schedule, weight, state, first, apart=True)
    y = apply(run, x, weight, bias)
    if run.delayed is not None:
        end(run, layer)
    return y


def find_sharded(layer: "Linear", x: torch.Tensor, recipe: Recipe, state: Ambient | None) -> ShardedSchedule | None:
    """The schedule that a call of `layer` with the DTensor `x` would run; None where there are no elements."""
    case = _case_of(layer, *_checked(x, layer.weight, layer.bias), recipe, state)
    return None if case is None else case.schedule


# ------------------------------------------------------------------------------------------------------- one case


def _case_of(
    layer: "Linear", x: DTensor, weight: DTensor, bias: DTensor | None, recipe: Recipe, state: Ambient | None
) -> _Case | None:
    """The plan of a call, decided alike on all ranks: by the shapes and placements of the whole tensors."""
    if isinstance(layer, torch.nn.Module):  # not of a function
        layer_state.unwrap_buffers(layer)
    x._local_tensor = arrived(x._local_tensor)
    grad, kind = torch.is_grad_enabled(), x.device.type
    compute = autocast_dtype(kind) or x.dtype
    name, scatter = backend_name(layer, state), getattr(layer, "_scatters", None)
    needs = grad and x.requires_grad, grad and weight.requires_grad
    late = bool(getattr(layer, "_load_state_dict_post_hooks", None)) and casts_late(layer, weight)
    local, w_local = x._local_tensor, weight._local_tensor
    mesh = weight.device_mesh  # equal ones may have groups of their own
    groups = tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))
    key = (
        groups, recipe, name, compute, *needs, x._spec, weight._spec, None if bias is None else bias._spec, scatter,
        local.shape, local.stride(), local.data_ptr() & 15, w_local.stride(), w_local.data_ptr() & 15, x.device, late,
    )  # fmt: skip
    found: Any = SCHEDULES.get(key)
    if found is None:
        if x.numel() == 0 or weight.numel() == 0:
            return None
        path = getattr(layer, "_path", "")
        found = remember(key, _decided(x, weight, bias, recipe, name, compute, needs, late, scatter, path))  # type: ignore
    return found


def _checked(x: torch.Tensor, weight: torch.Tensor, bias: Maybe) -> tuple[DTensor, DTensor, DTensor | None]:
    """The tensors; raises where some are DTensors and some are not, or on different meshes."""
    if not isinstance(weight, DTensor):
        assert isinstance(x, DTensor)
        placed = f"a DTensor on {x.device_mesh}, while the weight is a plain tensor"
        raise invalid_type("x", placed, "a plain tensor, or a weight on the same mesh", _REMEDY)
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is None or (isinstance(tensor, DTensor) and tensor.device_mesh == weight.device_mesh):
            continue
        got = f"one on {tensor.device_mesh}" if isinstance(tensor, DTensor) else "a plain tensor"
        raise invalid_type(name, f"{got}, while the weight is on {weight.device_mesh}", _NEEDED, _REMEDY)
    if weight.device_mesh.get_coordinate() is None:
        raise invalid_value("weight", f"a DTensor on {weight.device_mesh}", "a mesh that this rank is part of")
    local = weight._local_tensor
    if isinstance(local, QuantizedTensor):
        raise invalid_type(
            "weight", f"a DTensor of stored codes ({local.format})", "a DTensor of values, which the recipe quantizes",
            "Build the layer without quantized_model_init or quantize_, or shard it by fully_shard alone.",
        )  # fmt: skip
    assert isinstance(x, DTensor)
    assert bias is None or isinstance(bias, DTensor)
    return x, weight, bias


def _decided(
    x: DTensor, weight: DTensor, bias: DTensor | None, recipe: Recipe, name: str, compute: torch.dtype,
    needs: tuple[bool, bool], late: bool, scatter: int | None, path: str,
) -> _Case:  # fmt: skip
    mesh, last = weight.device_mesh, x.dim() - 1
    facts = {"layer": path, "recipe": repr(recipe), "x": _placed(x), "weight": _placed(weight)}
    for axis in range(mesh.ndim):
        agree(mesh.get_group(axis), "the first sharded layer", facts)
    check_linear(x._local_tensor.new_empty(()).expand(x.shape), weight._local_tensor.new_empty(()).expand(weight.shape),
                 None if bias is None else bias._local_tensor.new_empty(()).expand(bias.shape))  # fmt: skip
    cases = [_letter(x.placements[i], weight.placements[i], last) for i in range(mesh.ndim)]
    note = ""
    if scatter is not None and cases == ["K"]:
        scatter %= x.dim()
        cases = ["S"] if scatter < last else cases
    for axis in range(mesh.ndim):  # gathers and scatters are those of one group
        if cases[axis] == "G" and mesh.ndim > 1:
            cases[axis], note = "N", "a mesh of more than one dimension"
    call = x, weight, bias, recipe, name, compute, needs, late
    made = _make(*call, scatter, cases)
    if isinstance(made, str):
        note = made
        made = _make(*call, None, ["N" if c == "G" else "K" for c in cases])
        assert not isinstance(made, str)
    made.schedule.note = note
    return made


def _placed(tensor: DTensor) -> str:
    return f"{tuple(tensor.shape)} as {tensor.placements}"


def _letter(of_x: Placement, of_w: Placement, last: int) -> str:
    """The case of one dimension of the mesh."""
    by_rows = type(of_x) is Shard and of_x.dim < last
    if type(of_w) is Shard:
        return ("G" if by_rows else "N") if of_w.dim == 0 else "K"
    if of_w.is_replicate():
        return "M" if by_rows else ""
    raise NotSupportedError(
        f"weight: got the placement {of_w}, needed Shard(0), Shard(1) or Replicate(). Redistribute the weight."
    )


def _make(
    x: DTensor, weight: DTensor, bias: DTensor | None, recipe: Recipe, name: str, compute: torch.dtype,
    needs: tuple[bool, bool], late: bool, scatter: int | None, cases: list[str],
) -> "_Case | str":  # fmt: skip
    """A decided call; a text that says why codes cannot be gathered."""
    mesh, last = weight.device_mesh, x.dim() - 1
    whole = Replicate(), Partial()
    placed: dict[str, list[Placement]] = {name: [] for name in ("x", "dx", "dw", "bias", "db", "y")}
    for i, case in enumerate(cases):
        by_rows, columns = x.placements[i], Shard(last)
        row = {
            "": (whole[0],) * 6,
            "N": (whole[0], whole[1], Shard(0), Shard(0), Shard(0), columns),
            "K": (columns, columns, Shard(1), whole[0], whole[0], whole[1]),
            "M": (by_rows, by_rows, whole[1], whole[0], whole[1], by_rows),
            "G": (by_rows, by_rows, Shard(0), Shard(0), Shard(0), columns),
            "S": (columns, columns, Shard(1), whole[0], whole[1], Shard(scatter or 0)),
        }[case]
        for key, placement in zip(placed, row, strict=True):
            placed[key].append(placement)
    local, inner = _local_shape(x.shape, placed["x"], mesh), x.shape[-1]
    along = zip(placed["x"], cases, strict=True)
    sharded_dim = next((one.dim for one, case in along if isinstance(one, Shard) and case in ("M", "G")), None)
    sharded_dim = scatter if "S" in cases else sharded_dim
    y_shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    rows = None
    if sharded_dim is not None:
        over = math.prod(mesh.size(i) for i, c in enumerate(cases) if c in ("M", "G", "S"))
        behind = math.prod(x.shape[sharded_dim + 1 : -1])
        chunk = -(-x.shape[sharded_dim] // over)
        part = _local_shape(y_shape, placed["y"], mesh)[sharded_dim] if "S" in cases else local[sharded_dim]
        outer = math.prod(x.shape[:sharded_dim])
        rows = Rows(outer, x.shape[sharded_dim] * behind, part * behind, chunk * behind)
    for tensor, shape, placements in (("x", x.shape, placed["x"]), ("weight", weight.shape, weight.placements),
                                      ("y", y_shape, placed["y"])):  # fmt: skip
        _refuse_empty(tensor, shape, placements, mesh)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    axes = tuple(
        Axis(case, mesh.get_group(i).group_name, mesh.size(i), coordinate[i]) for i, case in enumerate(cases) if case
    )
    sums = [i for i, case in enumerate(cases) if case in ("K", "S")]
    shards = Shards(axes, rows, all(coordinate[i] == 0 for i in sums), _seed_ranks(mesh, coordinate, cases))
    backend = backends.choose(name, x.device)
    routes = backend.routes(recipe, x.device, None)
    entries = {
        "x": entries_of(recipe, routes, "x", True, needs[1]), "w": entries_of(recipe, routes, "w", True, needs[0]),
        "dy": entries_of(recipe, routes, "dy", *needs),
    }  # fmt: skip
    shard = x._local_tensor if list(x.placements) == placed["x"] else x._local_tensor.new_empty(local)
    example, x_shape = shard, torch.Size(local)
    gathers = next((tensor for tensor in ("x", "dy") if shards.gathers(tensor)), None)
    if gathers is not None:
        x_shape = torch.Size((*x.shape[:-1], local[-1]))
        assert rows is not None
        width = inner if gathers == "x" else weight.shape[0]
        sizes = rows.outer * rows.part, width
        why = why_not_gathered(backend, entries[gathers], shards, gathers, sizes, shard.element_size())
        if why:
            return why
    if gathers == "x":
        example = shard.new_empty(()).expand(x_shape)
    check_blocks(entries, shards, {"N": weight.shape[0], "K": inner})
    schedule = ShardedSchedule(
        shards, shard.detach(), "", recipe, backend, routes, example.detach(), weight._local_tensor.detach(),
        None if bias is None else bias._local_tensor.detach(), compute, *needs, late,
    )  # fmt: skip
    strides = torch.empty(y_shape, device="meta").stride()
    return _Case(
        schedule,
        **{key: tuple(made) for key, made in placed.items()},
        x_shape=x_shape,
        y_shape=y_shape,
        y_strides=strides,
    )


def _local_shape(shape: Sequence[int], placements: Sequence[Placement], mesh: "DeviceMesh") -> list[int]:
    """The shape of this rank's part."""
    local, coordinate = list(shape), mesh.get_coordinate()
    assert coordinate is not None
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard):
            size = local[placement.dim]
            chunk = -(-size // mesh.size(i))
            local[placement.dim] = max(0, min(chunk, size - chunk * coordinate[i]))
    return local


def _refuse_empty(tensor: str, shape: Sequence[int], placements: Sequence[Placement], mesh: "DeviceMesh") -> None:
    """Raise, on every rank, where a rank has no elements of a tensor: it could not take part in what the others do."""
    for i, placement in enumerate(placements):
        if (
            isinstance(placement, Shard)
            and -(-shape[placement.dim] // mesh.size(i)) * (mesh.size(i) - 1) >= shape[placement.dim]
        ):
            raise invalid_value(
                tensor, f"dimension {placement.dim} of size {shape[placement.dim]} over {mesh.size(i)} ranks",
                "elements for every rank", "Shard it over fewer ranks, or leave the layer out of the plan.",
            )  # fmt: skip


def _seed_ranks(mesh: "DeviceMesh", coordinate: Sequence[int], cases: list[str]) -> tuple[int, int, int]:
    """The first ranks of the mesh that hold the same shard of x, w and dy."""
    found = []
    for tensor in ("x", "w", "dy"):
        at = [c if tensor in CASES[case] else 0 for c, case in zip(coordinate, cases, strict=True)]
        found.append(int(mesh.mesh[tuple(at)]))
    return found[0], found[1], found[2]


# --------------------------------------------------------------------------------- tensors that travel as codes


def _dim_of(placements: _Placements) -> int:
    return next(placement.dim for placement in placements if isinstance(placement, Shard))


def _gathering(x: DTensor, case: _Case) -> torch.Tensor:
    """x as the layer takes it under G: the shape of the whole, without memory, and this rank's part as its `shard`.

    Made once for a DTensor, so that several layers that read it share codes in forward and one reduction in backward.
    """
    # Writes to tensors of inference mode are not counted.
    state = None if x.is_inference() else (x._version, x.requires_grad, torch.is_grad_enabled())
    known = getattr(x, "_gathering", None)
    if known is not None and known[0] == state and state is not None:
        return known[1]
    axis = case.schedule.shards.gathers("x")
    assert axis is not None
    local = x.to_local(grad_placements=case.dx)
    made = _Gathered.apply(local, case.x_shape, _dim_of(case.x), axis.group)
    vars(made).update(shard=x._local_tensor.detach(), gathered={})
    vars(x)["_gathering"] = state, made
    return made


def _without_memory(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return like.new_zeros(()).expand(shape)


class _Gathered(torch.autograd.Function):
    """A shard as the whole tensor that casts gather: backward sums the gradients of all ranks and keeps its part."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, shape: torch.Size, dim: int, group: str) -> torch.Tensor:
        ctx.settings = dim, group
        return _without_memory(x, shape)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        dim, group = ctx.settings
        return _scatter(gradients[0], dim, group), None, None, None


class _Scattered(torch.autograd.Function):
    """Partial sums, added up and scattered; in backward the schedule gets the shard of dy, and gathers its codes."""

    @staticmethod
    def forward(ctx: Context, y: torch.Tensor, dim: int, group: str) -> torch.Tensor:
        ctx.shape = y.shape
        return _scatter(y, dim, group)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        dy = _without_memory(gradients[0], ctx.shape)
        vars(dy)["shard"] = gradients[0]
        return dy, None, None


# The name in newer versions of torch, and in older ones.
_reduce_scatter: Callable[..., torch.Tensor] = (
    getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
)


def _scatter(partial: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    with in_collective("the reduce-scatter of a sharded layer", group_named(group)):
        return collectives.wait_tensor(_reduce_scatter(partial.contiguous(), "sum", dim, group))
