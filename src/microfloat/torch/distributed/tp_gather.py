"""The whole x that sharded layers read of one that lies by rows, and the sum of their gradients of it.

x is gathered inside of the cast as codes (`gathering`), or in high precision (`gathering_values`). Layers that read one
DTensor read one such tensor. They share its operands in forward (`gathered`), and in backward, by its `Readers`, the
gather of the operand of wgrad and one sum of dx. The reduce-scatter of that sum begins when the last of them has
multiplied dgrad. On a CPU it runs beside that layer's wgrad, as the gather does beside dgrad; on a GPU both run in
their place.

Legend: M = rows of x (all leading dimensions), K = in features.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from microfloat.torch._typing import Context, Maybe, Parts, Sink, Triple
from microfloat.torch.distributed.collectives import UnderWay, gather_rows, scatter_sum
from microfloat.torch.distributed.dtensor import Placed
from microfloat.torch.distributed.shards import Axis
from microfloat.torch.distributed.tp_schedule import ShardedSchedule, arrived, group_named

__all__ = [
    "Beside", "Readers", "Values", "gather_values", "gathering", "gathering_values", "scatter_values",
    "with_shard", "without_memory",
]  # fmt: skip


class Values(NamedTuple):
    """A gather in high precision along `dim`; `shard`: how the tensor lies before it."""

    dim: int
    axis: Axis
    shard: Placed


def gather_values(part: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """The parts of all ranks side by side along `dim`."""
    return gather_rows(part, dim, axis.size, group_named(axis.group))


def scatter_values(partial: torch.Tensor, dim: int, axis: Axis) -> UnderWay[torch.Tensor]:
    """Start to add up over all ranks, for this rank's part along `dim` of the sum."""
    return scatter_sum(partial, dim, axis.size, group_named(axis.group))


class _Backward:
    """The gradients of a gathered x in one backward. torch holds it, as a callback, until that ends or fails."""

    __slots__ = ("__weakref__", "came", "columns", "dx", "under_way")

    def __init__(self) -> None:
        self.came = 0  # layers whose dx is in the sum
        self.columns: dict[object, Triple] = {}
        self.dx: Maybe = None
        self.under_way: UnderWay[torch.Tensor] | None = None

    def __call__(self) -> None:
        """Nothing; torch calls it when the backward ends."""


class Readers:
    """The layers that read one gathered x.

    Every backward has a sum of its own, also one that runs inside of another, and one that ended by an error, or did
    not reach all of them, leaves nothing behind. Where it does not reach all, the sum is scattered when it is asked
    for.
    """

    __slots__ = ("_axis", "_backwards", "_dim", "_made_in", "_number")

    def __init__(self, dim: int, axis: Axis) -> None:
        self._dim, self._axis = dim, axis
        self._number = 0  # of those that will have a dx
        self._made_in = torch._C._current_graph_task_id()
        self._backwards: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()

    def expect(self) -> None:
        """Count a layer that will have a dx: not one whose forward a backward runs again, which was counted before."""
        self._number += torch._C._current_graph_task_id() == self._made_in

    def _entered(self) -> _Backward:
        """The gradients of the backward that runs now."""
        number = torch._C._current_graph_task_id()
        backward = self._backwards.get(number)
        if backward is None:
            backward = self._backwards[number] = _Backward()
            torch.autograd.Variable._execution_engine.queue_callback(backward)
        return backward

    def wgrad_operand(self, schedule: ShardedSchedule, saved: Triple) -> Triple:
        """The saved tensors with the operand of x of all ranks, whose gather has begun."""
        if not schedule.gathers_late:
            return saved
        columns = self._entered().columns
        parts = columns.get(schedule.x_key) if schedule.shares_x else None
        if parts is None:
            parts = schedule.gather_saved(saved[:3])
            if schedule.shares_x and self._number > 1:
                columns[schedule.x_key] = parts
        return *parts, *saved[3:]

    def add(self, dx: torch.Tensor) -> None:
        """Take a dx into the sum, whose reduce-scatter begins with the last one."""
        backward = self._entered()
        backward.dx = dx if backward.dx is None else backward.dx.add_(dx)
        backward.came += 1
        if backward.came == self._number:
            backward.under_way, backward.dx = scatter_values(backward.dx, self._dim, self._axis), None

    def result(self) -> Maybe:
        """This rank's part of the sum of dx; None where no layer had one."""
        backward = self._backwards.pop(torch._C._current_graph_task_id(), None)
        if backward is None:
            return None
        under_way = backward.under_way
        if backward.dx is not None:
            under_way = scatter_values(backward.dx, self._dim, self._axis)
        backward.dx = backward.under_way = None  # torch holds the object until the end
        backward.columns.clear()
        return None if under_way is None else under_way.wait()


class Beside:
    """The schedule of one call that reads a gathered x, whose gather and whose sum of dx in backward are of `readers`.

    It stands in the place of the schedule; all else is the schedule's own.
    """

    def __init__(self, schedule: ShardedSchedule, readers: Readers) -> None:
        self._schedule, self._readers = schedule, readers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def gradients(
        self, dy: Parts, saved: Triple, wants_dx: bool, wants_dw: bool, into: Sink | None = None
    ) -> tuple[None, Maybe]:
        """None, and dw."""
        schedule, readers, dw = self._schedule, self._readers, None
        if wants_dw:
            saved = readers.wgrad_operand(schedule, saved)
        if wants_dx:
            dx, _ = schedule.gradients(dy, saved, True, False)
            assert dx is not None
            readers.add(dx)
            del dx
        if wants_dw:
            _, dw = schedule.gradients(dy, saved, False, True, into)
        return None, dw


# ------------------------------------------------------------------------------------------------ tensors and nodes


def without_memory(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of a shape, in the memory of one."""
    return like.new_zeros(()).expand(shape)


def with_shard(shard: torch.Tensor, shape: Sequence[int], readers: Readers | None = None) -> torch.Tensor:
    """A tensor of the whole shape without memory, of which this rank has a part."""
    made = without_memory(shard, shape)
    vars(made).update(shard=shard, readers=readers)
    return made


def gathering(x: DTensor, shape: torch.Size, dim: int, axis: Axis, gradient: Placed) -> torch.Tensor:
    """x as casts take it that gather codes: the shape of the whole, without memory, whose `shard` is this rank's part.

    Made once for a DTensor, so that several layers that read it share codes in forward and one reduction in backward.
    """
    state, known = _shared_of(x, "_gathering")
    if known is None:
        readers = Readers(dim, axis)
        known = _Gathered.apply(x, shape, readers, gradient)
        vars(known).update(shard=x._local_tensor.detach(), readers=readers, gathered={})
        vars(x)["_gathering"] = _Shared(x, state, known)
    return known


def gathering_values(x: torch.Tensor, values: Values) -> torch.Tensor:
    """The whole x, gathered in high precision; of a DTensor, once for all layers that read it."""
    state, known = _shared_of(x, "_gathered_values") if isinstance(x, DTensor) else (None, None)
    if known is None:
        readers = Readers(values.dim, values.axis)
        known = _GatheredValues.apply(x, values, readers)
        vars(known).update(readers=readers, gathered={})
        if isinstance(x, DTensor):
            vars(x)["_gathered_values"] = _Shared(x, state, known)
    return known


class _Shared:
    """What a layer has made of a DTensor, for the next layer that reads it in the same state; copies have none of it.

    The graph of what is made of a leaf holds the leaf, in C++, where no collector finds a cycle. So a leaf has a weak
    reference, and layers that will have a backward hold what they have read (`is_held_by_readers`).
    """

    def __init__(self, x: DTensor | None = None, state: tuple | None = None, made: Maybe = None) -> None:
        self.state = state
        self._made: Callable[[], Maybe] = lambda: made
        if x is not None and made is not None and x.is_leaf and made.requires_grad:
            vars(made)["is_held_by_readers"] = True
            self._made = weakref.ref(made)

    def __reduce__(self) -> tuple:
        return _Shared, ()

    def made_in(self, state: tuple) -> Maybe:
        """The object that was made, if it still exists and was made in this state."""
        return self._made() if self.state == state else None


def _shared_of(x: DTensor, name: str) -> tuple[tuple | None, Maybe]:
    """The state of a DTensor that counts for what is made of it, and what another layer has made in this state."""
    if x.is_inference():  # whose writes are not counted
        return None, None
    state, shared = (x._version, x.requires_grad, torch.is_grad_enabled()), getattr(x, name, None)
    return state, None if shared is None else shared.made_in(state)


def _forget(x: DTensor | None, name: str) -> None:
    if x is not None:
        vars(x).pop(name, None)


class _Gathered(torch.autograd.Function):
    """A DTensor as the whole tensor that casts gather: backward has this rank's part of the sum of all gradients.

    They come through the `Readers`, as None for autograd.
    """

    @staticmethod
    def forward(ctx: Context, x: DTensor, shape: torch.Size, readers: Readers, gradient: Placed) -> torch.Tensor:
        ctx.settings = readers, gradient, weakref.ref(x)
        ctx.set_materialize_grads(False)
        return without_memory(x._local_tensor, shape)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        readers, gradient, x = ctx.settings
        _forget(x(), "_gathering")  # all layers that read it have run: free the memory
        dx = readers.result()
        return None if dx is None else gradient.wrap(dx), None, None, None


class _GatheredValues(torch.autograd.Function):
    """The parts of all ranks; backward as that of `_Gathered`."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, values: Values, readers: Readers) -> torch.Tensor:
        ctx.settings = readers, values.shard, weakref.ref(x) if isinstance(x, DTensor) else None
        ctx.set_materialize_grads(False)
        return gather_values(arrived(x._local_tensor if isinstance(x, DTensor) else x), values.dim, values.axis)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        readers, shard, x = ctx.settings
        dx = readers.result()
        if x is None:
            return dx, None, None
        _forget(x(), "_gathered_values")  # as in `_Gathered`
        return None if dx is None else shard.wrap(dx), None, None
