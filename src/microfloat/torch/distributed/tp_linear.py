"""A Linear on DTensors: unwrapped, run as one rank's `ShardedSchedule`, and wrapped again.

The weight's placement decides the case (`distributed.tp_schedule`); x is redistributed to what the case
needs, as torch's own operators do. Nothing quantized is ever a DTensor, and no DTensor is quantized.

DTensors are unwrapped and wrapped inside of the layer's one node of autograd (`_ShardedRun`). A style of ours tells a
layer the layouts of plain inputs and results (`Border`); a call between such borders makes no DTensor but the weight's
gradient.

Legend: M = rows of x (all leading dimensions), K = in features, N = out features.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.recipes import Recipe
from microfloat.routes import entries_of, routes_of
from microfloat.torch import backends
from microfloat.torch._typing import Context, Maybe
from microfloat.torch.backends.base import current_device
from microfloat.torch.context import Ambient
from microfloat.torch.distributed.collectives import gather_rows, group_of, scatter_sum, sum_over
from microfloat.torch.distributed.tp_dtensor import Placed, from_the_front, of_gradient
from microfloat.torch.distributed.tp_gather import Beside, Gathering, Readers, gathered, with_shard, without_memory
from microfloat.torch.distributed.tp_schedule import ShardedSchedule, arrived, why_not_gathered
from microfloat.torch.distributed.tp_shards import CASES, Axis, Rows, Shards, check_blocks, routes_of_shards
from microfloat.torch.linear.function import Run, apply, backend_name, begin, end
from microfloat.torch.linear.observer import OBSERVERS, observed
from microfloat.torch.linear.schedule import SCHEDULES, autocast_dtype, remember
from microfloat.torch.linear.weight_cache import casts_late
from microfloat.torch.scaling import buffers as layer_state
from microfloat.torch.scaling.rank_errors import agree
from microfloat.torch.tensor.checks import check_linear
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from microfloat.torch.nn.linear import Linear

_NEEDED = "a DTensor on the mesh of the weight"
_REMEDY = (
    "Put the layer into the plan of parallelize_module, or wrap the call's input: DTensor.from_local(x, mesh, ...)."
)

_Placements = tuple[Placement, ...]


class Border(NamedTuple):
    """The layouts of a plain x and of y that a style sets for a layer (`_border`); `is_plain`: y is a plain tensor."""

    x: Placement
    y: Placement
    is_plain: bool


class _Case(NamedTuple):
    """The schedule of a call, and the placements of its tensors."""

    schedule: ShardedSchedule
    told: _Placements  # of x
    x: _Placements  # of x, as the schedule takes it
    bias: _Placements
    dx: Placed
    dw: Placed
    db: Placed | None
    y: Placed
    dy: Placed
    is_plain: bool = False  # y is a plain tensor
    gathers: Gathering | None = None  # of x
    scatters: Gathering | None = None  # of dy, whose y is added up and scattered
    sums_over: Axis | None = None  # over which y is added up, where every rank is to have all of it


def run_sharded(
    layer: "Linear", x: torch.Tensor, weight: torch.Tensor, bias: Maybe, recipe: Recipe, state: Ambient | None,
    first: bool | None,
) -> torch.Tensor | None:  # fmt: skip
    """``x @ weight.T + bias`` of DTensors under `recipe`; None where there are no elements to multiply.

    y is a DTensor: sharded by columns for a weight that is sharded by its rows (N), partial sums for one that is
    sharded by its columns (K), as from torch's own operators. Of a layer with a `Border` x and y may be plain.
    """
    case = _case_of(layer, x, weight, bias, recipe, state)
    if case is None:
        return None
    schedule, read = case.schedule, x
    if schedule.wants_dw and layer.fuse_wgrad_accumulation:
        raise NotSupportedError(
            "fuse_wgrad_accumulation: got True for a layer whose weight is a DTensor, needed a plain weight, to whose "
            "gradient one process adds. Leave it out of this layer."
        )
    how = case.gathers
    if how is not None and how.codes is None:
        read = gathered(x, how)
    else:
        if not isinstance(x, DTensor) and case.x != case.told:
            x = DTensor.from_local(x, case.dw.mesh, case.told, run_check=False)
        if isinstance(x, DTensor):
            read = x if x.placements == case.x else x.redistribute(placements=case.x)
            read = read if how is None else gathered(read, how)
    if bias is not None:
        assert isinstance(bias, DTensor)
        bias = bias if bias.placements == case.bias else bias.redistribute(placements=case.bias)
    if schedule.device >= 0 and schedule.device != current_device():
        with torch.cuda.device(schedule.device):
            return _run(layer, case, read, weight, bias, state, first)
    return _run(layer, case, read, weight, bias, state, first)


def _run(
    layer: "Linear", case: _Case, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, state: Ambient | None,
    first: bool | None,
) -> torch.Tensor:  # fmt: skip
    schedule = observed(case.schedule, (layer,)) if OBSERVERS else case.schedule
    run = begin(layer, schedule, _plain_of(weight), state, first, apart=True)
    y = apply(_ShardedRun(run, case), x, weight, bias)
    if run.delayed is not None:
        end(run, layer)
    return y


@dataclass(slots=True, eq=False)
class _ShardedRun:
    """A `Run` of this rank's parts, in one node of autograd with the unwrapping and wrapping of DTensors.

    As nodes of their own, ``x.to_local()`` and ``DTensor.from_local(y)`` cost more than the call itself.
    """

    run: Run
    case: _Case
    wraps_dx: bool = False
    readers: Readers | None = None  # of the gathered x
    held: Maybe = None  # the gathered x, until backward, where x refers to it weakly
    scatters_dx: bool = False  # itself, since x has no node that does
    result: torch.Tensor | None = None  # of the shape and dtype of this rank's part of y, without memory

    @property
    def path(self) -> str:
        """The name of the layer in its model."""
        return self.run.path

    def forward(self, ctx: Context, x: torch.Tensor, weight: torch.Tensor, bias: Maybe) -> torch.Tensor:
        """y, plain or a DTensor."""
        case, how = self.case, self.case.gathers
        if isinstance(x, DTensor):
            x, self.wraps_dx = x._local_tensor, True
        elif how is None or how.codes is None:
            x = arrived(x)
        elif not hasattr(x, "shard"):
            x = with_shard(arrived(x), how.codes, Readers(how.dim, how.axis))
            self.scatters_dx = True
        y = self.run.forward(ctx, x, _plain_of(weight), None if bias is None else _plain_of(bias))
        self.readers = getattr(x, "readers", None)
        self.held = x if getattr(x, "is_held_by_readers", False) else None
        if self.readers is not None:
            if ctx.needs_input_grad[1]:
                self.readers.expect()
            self.run.schedule = Beside(self.run.schedule, self.readers)  # type: ignore[assignment, arg-type]
        if case.scatters is not None:
            y = scatter_sum(y, case.scatters.dim, case.scatters.axis)
        elif case.sums_over is not None:
            y = sum_over(y, group_of(case.sums_over), is_fresh=True)
        ctx.set_materialize_grads(False)  # torch would make a plain one of the whole shape
        self.result = without_memory(y, y.shape)
        return y if case.is_plain else case.y.wrap(y)

    def backward(self, ctx: Context, dy: Maybe) -> tuple[Maybe, ...]:
        """The gradients of x, weight and bias: a DTensor for each of them that is one."""
        case, self.held = self.case, None
        if dy is None:  # of a result whose reader has no gradient
            assert self.result is not None
            dy = self.result.contiguous()
        elif isinstance(dy, DTensor):
            dy = case.dy.local_of(dy)
        how = case.scatters
        if how is not None and how.codes is not None:  # the schedule gets the shard of dy, and gathers its codes
            dy = with_shard(dy, how.codes)
        elif how is not None:
            dy = gather_rows(arrived(dy), how.dim, how.axis)
        dx, dw, db = self.run.backward(ctx, dy)
        if self.scatters_dx:
            assert self.readers is not None
            dx = self.readers.result()
        if dx is not None and self.wraps_dx:
            dx = case.dx.wrap(dx)
        assert db is None or case.db is not None
        return dx, None if dw is None else case.dw.wrap(dw), None if db is None else case.db.wrap(db)  # type: ignore


def _plain_of(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter as a plain tensor."""
    assert isinstance(parameter, DTensor)
    local = parameter._local_tensor
    if type(local) is torch.Tensor:
        return local
    with torch.no_grad():
        return local.view_as(local)


def find_sharded(layer: "Linear", x: torch.Tensor, recipe: Recipe, state: Ambient | None) -> ShardedSchedule | None:
    """The schedule that a call of `layer` with the DTensor `x` would run; None where there are no elements."""
    case = _case_of(layer, x, layer.weight, layer.added_bias, recipe, state)
    return None if case is None else case.schedule


def _case_of(
    layer: "Linear", x: torch.Tensor, weight: torch.Tensor, bias: Maybe, recipe: Recipe, state: Ambient | None
) -> _Case | None:
    """The case of a call, which follows from shapes and placements of whole tensors, alike on all ranks."""
    if isinstance(layer, torch.nn.Module):  # not of a function
        layer_state.unwrap_buffers(layer)
    border: Border | None = getattr(layer, "_border", None)
    # A style of ours has said how a plain x lies. What other ranks have too needs its gradient reduced, by a DTensor.
    is_told = not isinstance(x, DTensor) and border is not None and type(border.x) is Shard
    if (
        not isinstance(weight, DTensor) or isinstance(weight._local_tensor, QuantizedTensor)
        or weight.device_mesh.ndim > 1 or weight.device_mesh.get_coordinate() is None
        or not (is_told or isinstance(x, DTensor)) or not (bias is None or isinstance(bias, DTensor))
    ):  # fmt: skip
        _checked(x, weight, bias, border if is_told else None)
    assert isinstance(weight, DTensor)
    assert bias is None or isinstance(bias, DTensor)
    if isinstance(x, DTensor):
        local = x._local_tensor = arrived(x._local_tensor)
        lies: object = x._spec
    else:
        local, lies = arrived(x), border
    grad, kind = torch.is_grad_enabled(), x.device.type
    compute = autocast_dtype(kind) or x.dtype
    name = backend_name(layer, state)
    needs = grad and x.requires_grad, grad and weight.requires_grad
    late = bool(getattr(layer, "_load_state_dict_post_hooks", None)) and casts_late(layer, weight)
    w_local, mesh = weight._local_tensor, weight.device_mesh
    key = (
        mesh.get_group().group_name,  # equal meshes may have groups of their own
        recipe, name, compute, *needs, lies, weight._spec, None if bias is None else bias._spec, border,
        local.shape, local.stride(), local.data_ptr() & 15, w_local.stride(), w_local.data_ptr() & 15, type(w_local),
        x.device, x.dtype, late,
    )  # fmt: skip
    found: Any = SCHEDULES.get(key)
    if found is None:
        whole, path = _checked(x, weight, bias, border if is_told else None), getattr(layer, "_path", "")
        if whole[0].numel() == 0 or weight.numel() == 0:
            return None
        found = remember(key, _decided(*whole, recipe, name, compute, needs, late, border, path))  # type: ignore
    return found


def _checked(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe, border: Border | None
) -> tuple[DTensor, DTensor, DTensor | None]:
    """The tensors, a plain x as the DTensor that `border` tells of; raises unless all are DTensors on one mesh."""
    if border is not None and isinstance(weight, DTensor):
        x = DTensor.from_local(arrived(x).detach(), weight.device_mesh, (border.x,), run_check=False)
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
    if weight.device_mesh.ndim > 1:
        raise NotSupportedError(
            f"weight: got a DTensor on {weight.device_mesh}, needed a mesh of one dimension. Shard layers over one "
            'dimension by its name, mesh["tp"], and leave the other ones to fully_shard or DistributedDataParallel.'
        )
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
    needs: tuple[bool, bool], late: bool, border: Border | None, path: str,
) -> _Case:  # fmt: skip
    mesh, last = weight.device_mesh, x.dim() - 1
    facts = {"layer": path, "recipe": repr(recipe), "x": _placed(x), "weight": _placed(weight)}
    agree(mesh.get_group(), "the first sharded layer", facts)
    check_linear(x._local_tensor.new_empty(()).expand(x.shape), weight._local_tensor.new_empty(()).expand(weight.shape),
                 None if bias is None else bias._local_tensor.new_empty(()).expand(bias.shape))  # fmt: skip
    case, note, scatter = _letter(x.placements[0], weight.placements[0], last), "", None
    if border is not None and type(border.y) is Shard and case == "K":
        scatter = border.y.dim % x.dim()
        case = "S" if scatter < last else case
    call = x, weight, bias, recipe, name, compute, needs, late
    made = _make(*call, scatter, case)
    if isinstance(made, str):
        note, made = made, _make(*call, None, "N" if case == "G" else "K")
        assert not isinstance(made, str)
    made.schedule.note = note
    return _at_the_border(made, x, border)


def _at_the_border(case: _Case, x: DTensor, border: Border | None) -> _Case:
    """The case with gathers and scatters of values around a schedule that gathers no codes."""
    axis, (of_x,), mesh = case.schedule.shards.axis, x.placements, case.y.mesh
    if axis is not None and type(of_x) is Shard and case.x == (Replicate(),) and x.shape[of_x.dim] % axis.size == 0:
        case = case._replace(gathers=Gathering(of_x.dim, axis, Placed(mesh, x.placements, x.shape)))
    if border is None:
        return case
    asked = from_the_front((border.y,), x.dim())
    if axis is not None and axis.case == "K" and type(asked[0]) is Shard and asked[0].dim < x.dim() - 1:
        shard, dim = Placed(mesh, asked, case.y.shape), asked[0].dim
        if case.y.shape[dim] % axis.size == 0:
            case = case._replace(y=shard, dy=shard, scatters=Gathering(dim, axis, shard))
    if axis is not None and axis.case == "K" and asked == (Replicate(),):
        case = case._replace(y=case.dy, sums_over=axis)
    return case._replace(is_plain=border.is_plain and asked == case.y.placements)


def _placed(tensor: DTensor) -> str:
    return f"{tuple(tensor.shape)} as {tensor.placements}"


def _letter(of_x: Placement, of_w: Placement, last: int) -> str:
    """The case of a call, by the placements of x and of the weight."""
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
    needs: tuple[bool, bool], late: bool, scatter: int | None, case: str,
) -> "_Case | str":  # fmt: skip
    """The case of a call, or the reason for which codes cannot be gathered."""
    mesh, by_rows = weight.device_mesh, x.placements[0]
    whole, sums, columns = Replicate(), Partial(), Shard(x.dim() - 1)
    of_x, of_dx, of_dw, of_bias, of_db, of_y = {
        "": (whole, whole, whole, whole, whole, whole),
        "N": (whole, sums, Shard(0), Shard(0), Shard(0), columns),
        "K": (columns, columns, Shard(1), whole, whole, sums),
        "M": (by_rows, by_rows, sums, whole, sums, by_rows),
        "G": (by_rows, by_rows, Shard(0), Shard(0), Shard(0), columns),
        "S": (columns, columns, Shard(1), whole, sums, Shard(scatter or 0)),
    }[case]
    y_shape, rank, inner = torch.Size((*x.shape[:-1], weight.shape[0])), mesh.get_local_rank(), x.shape[-1]
    for tensor, shape, one in (("x", x.shape, of_x), ("weight", weight.shape, weight.placements[0]),
                               ("y", y_shape, of_y)):  # fmt: skip
        if isinstance(one, Shard) and _part(shape[one.dim], mesh.size(), mesh.size() - 1) == 0:
            # On every rank, since one without elements could take part in no collective.
            got = f"dimension {one.dim} of size {shape[one.dim]} over {mesh.size()} ranks"
            remedy = "Shard it over fewer ranks, or leave the layer out of the plan."
            raise invalid_value(tensor, got, "elements for every rank", remedy)
    local, rows = [*x.shape], None
    if isinstance(of_x, Shard):
        local[of_x.dim] = _part(x.shape[of_x.dim], mesh.size(), rank)
    sharded_dim = of_y.dim if isinstance(of_y, Shard) and case in ("M", "S") else None
    sharded_dim = by_rows.dim if isinstance(by_rows, Shard) and case == "G" else sharded_dim
    if sharded_dim is not None:
        size, behind = x.shape[sharded_dim], math.prod(x.shape[sharded_dim + 1 : -1])
        part, chunk = _part(size, mesh.size(), rank), -(-size // mesh.size())
        rows = Rows(math.prod(x.shape[:sharded_dim]), size * behind, part * behind, chunk * behind)
    axis = Axis(case, mesh.get_group().group_name, mesh.size(), rank) if case else None
    first = [int(mesh.mesh[rank if tensor in CASES[case] else 0]) for tensor in ("x", "w", "dy")]
    shards = Shards(axis, rows, (first[0], first[1], first[2]))
    backend = backends.choose(name, x.device)
    sizes, chip = {"N": weight.shape[0], "K": inner}, backend.chip_of(x.device)
    routes = routes_of_shards(recipe, routes_of(recipe, chip), chip, shards, sizes)
    entries = {
        "x": entries_of(recipe, routes, "x", True, needs[1]), "w": entries_of(recipe, routes, "w", True, needs[0]),
        "dy": entries_of(recipe, routes, "dy", *needs),
    }  # fmt: skip
    shard = x._local_tensor if x.placements == (of_x,) else x._local_tensor.new_empty(local)
    example, x_shape = shard, torch.Size(local)
    gathers = next((tensor for tensor in ("x", "dy") if shards.gathers(tensor)), None)
    if gathers is not None:
        x_shape = torch.Size((*x.shape[:-1], local[-1]))
        assert rows is not None
        width = inner if gathers == "x" else weight.shape[0]
        of_shard = rows.outer * rows.part, width
        why = why_not_gathered(backend, entries[gathers], shards, gathers, of_shard, shard.element_size())
        if why:
            return why
    if gathers == "x":
        example = shard.new_empty(()).expand(x_shape)
    check_blocks(entries, shards, sizes)
    # A decoded operand is as large as the weight itself, which is there anyhow.
    late = late or (needs[0] and routes.dgrad.rhs == "values")
    schedule = ShardedSchedule(
        shards, shard.detach(), "", recipe, backend, routes, example.detach(), weight._local_tensor.detach(),
        None if bias is None else bias._local_tensor.detach(), compute, *needs, late,
    )  # fmt: skip
    db = None if bias is None else Placed(mesh, (of_db,), bias.shape)
    dx, dw = Placed(mesh, (of_dx,), x.shape), Placed(mesh, (of_dw,), weight.shape)
    y, dy = Placed(mesh, (of_y,), y_shape), Placed(mesh, of_gradient((of_y,)), y_shape)
    made = _Case(schedule, x.placements, (of_x,), (of_bias,), dx, dw, db, y, dy)
    if gathers is None:
        return made
    assert sharded_dim is not None
    assert axis is not None
    if gathers == "x":
        return made._replace(gathers=Gathering(sharded_dim, axis, dx, x_shape))
    return made._replace(scatters=Gathering(sharded_dim, axis, y, y_shape))


def _part(size: int, ranks: int, rank: int) -> int:
    """The entries of a dimension that a rank has, as torch cuts it."""
    chunk = -(-size // ranks)
    return max(0, min(chunk, size - chunk * rank))
