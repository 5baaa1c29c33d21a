"""The whole x that sharded layers read of one that lies by rows, and the sum of their gradients of it.

x is gathered inside of the cast as codes, or in high precision (`Gathering`). Layers that read one DTensor read one
such tensor. They share its operands in forward (`gathered`), and in backward, by its `Readers`, the gather of the
operand of wgrad and one sum of dx, which is scattered when the last of them has multiplied dgrad.

Legend: M = rows of x (all leading dimensions), K = in features.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from microfloat.torch._typing import Context, Maybe, Sink
from microfloat.torch.backends.base import Operands, Parts, Saved
from microfloat.torch.distributed.collectives import gather_rows, scatter_sum
from microfloat.torch.distributed.tp_dtensor import Placed
from microfloat.torch.distributed.tp_schedule import ShardedSchedule, arrived
from microfloat.torch.distributed.tp_shards import Axis


class Gathering(NamedTuple):
    """A gather along `dim` of a tensor that lies as `shard`; `codes`: the whole shape where codes are gathered."""

    dim: int
    axis: Axis
    shard: Placed
    codes: torch.Size | None = None


class _Backward:
    """The gradients of a gathered x in one backward, at whose end torch drops the object, a callback of it."""

    __slots__ = ("__weakref__", "came", "columns", "dx", "part")

    def __init__(self) -> None:
        self.came = 0  # layers whose dx is in the sum
        self.columns: dict[object, Parts] = {}
        self.dx: Maybe = None
        self.part: Maybe = None  # this rank's, of the sum of all ranks

    def __call__(self) -> None:
        """Nothing; torch calls it when the backward ends."""


class Readers:
    """The layers that read one gathered x.

    Every backward has a sum of its own, even one inside of another; a backward that fails leaves nothing behind. Where
    a backward does not reach all layers, the sum is scattered when it is asked for.
    """

    __slots__ = ("_axis", "_backwards", "_dim", "_made_in", "_number")

    def __init__(self, dim: int, axis: Axis) -> None:
        self._dim, self._axis = dim, axis
        self._number = 0  # of those that will have a dx
        self._made_in = torch._C._current_graph_task_id()
        self._backwards: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()

    def expect(self) -> None:
        """Count a layer that will have a dx, unless a backward runs its forward again: it was counted before."""
        self._number += torch._C._current_graph_task_id() == self._made_in

    def _entered(self) -> _Backward:
        """The gradients of the backward that runs now."""
        number = torch._C._current_graph_task_id()
        backward = self._backwards.get(number)
        if backward is None:
            backward = self._backwards[number] = _Backward()
            torch.autograd.Variable._execution_engine.queue_callback(backward)
        return backward

    def wgrad_operand(self, schedule: ShardedSchedule, saved: Saved) -> Saved:
        """The saved operands with the operand of x of all ranks."""
        if not schedule.gathers_late:
            return saved
        columns = self._entered().columns
        parts = columns.get(schedule.x_key) if schedule.shares_x else None
        if parts is None:
            parts = schedule.x_cast.gathered(saved.x, 1)
            if schedule.shares_x and self._number > 1:
                columns[schedule.x_key] = parts
        return saved._replace(x=parts)

    def add(self, dx: torch.Tensor) -> None:
        """Take a dx into the sum, which is scattered with the last one."""
        backward = self._entered()
        backward.dx = dx if backward.dx is None else backward.dx.add_(dx)
        backward.came += 1
        if backward.came == self._number:
            backward.part, backward.dx = scatter_sum(backward.dx, self._dim, self._axis), None

    def result(self) -> Maybe:
        """This rank's part of the sum of dx; None where no layer had one."""
        backward = self._backwards.pop(torch._C._current_graph_task_id(), None)
        if backward is None:
            return None
        part = backward.part if backward.dx is None else scatter_sum(backward.dx, self._dim, self._axis)
        backward.dx = backward.part = None  # torch holds the object until the end
        backward.columns.clear()
        return part


class Beside:
    """The schedule of one call that reads a gathered x: its dx goes to the `readers`, which gather the x of wgrad."""

    def __init__(self, schedule: ShardedSchedule, readers: Readers) -> None:
        self._schedule, self._readers = schedule, readers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def gradients(
        self, dy: Operands, saved: Saved, wants_dx: bool, wants_dw: bool, into: Sink | None = None
    ) -> tuple[None, Maybe]:
        """None in place of dx, which goes to the readers, and dw."""
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


def without_memory(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of a shape, in the memory of one."""
    return like.new_zeros(()).expand(shape)


def with_shard(shard: torch.Tensor, shape: Sequence[int], readers: Readers | None = None) -> torch.Tensor:
    """A tensor of the whole shape without memory, of which this rank has a part."""
    made = without_memory(shard, shape)
    vars(made).update(shard=shard, readers=readers)
    return made


def gathered(x: torch.Tensor, how: Gathering) -> torch.Tensor:
    """The whole x; where codes are gathered, as casts take it: without memory, with this rank's part as its `shard`.

    Made once for a DTensor, so that several layers that read it share the gather in forward and one reduction in
    backward.
    """
    name = "_gathered_values" if how.codes is None else "_gathered_codes"
    state, known = None, None
    if isinstance(x, DTensor) and not x.is_inference():  # whose writes are not counted
        state, shared = (x._version, x.requires_grad, torch.is_grad_enabled()), getattr(x, name, None)
        known = shared.made() if shared is not None and shared.state == state else None
    if known is None:
        readers = Readers(how.dim, how.axis)
        known = _Gathered.apply(x, how, readers, name)
        vars(known).update(readers=readers, gathered={})
        if isinstance(x, DTensor):
            if how.codes is not None:
                vars(known)["shard"] = x._local_tensor.detach()
            vars(x)[name] = _Shared(x, state, known)
    return known


class _Shared:
    """The gathered x that a layer has made of a DTensor, for the next layer that reads the DTensor in the same state.

    The graph of a gathered leaf holds the leaf, in C++, where no collector finds a cycle. So the leaf has a weak
    reference, and layers that will have a backward hold what they have read (`is_held_by_readers`). Copies of a DTensor
    share nothing.
    """

    def __init__(self, x: DTensor | None = None, state: tuple | None = None, made: Maybe = None) -> None:
        self.state = state
        self.made: Callable[[], Maybe] = lambda: made  # None where it exists no more
        if x is not None and made is not None and x.is_leaf and made.requires_grad:
            vars(made)["is_held_by_readers"] = True
            self.made = weakref.ref(made)

    def __reduce__(self) -> tuple:
        return _Shared, ()


class _Gathered(torch.autograd.Function):
    """The whole tensor of all ranks' parts; gradients come through the `Readers`, and autograd sees None."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, how: Gathering, readers: Readers, name: str) -> torch.Tensor:
        ctx.settings = readers, how, name, weakref.ref(x) if isinstance(x, DTensor) else None
        ctx.set_materialize_grads(False)
        local = x._local_tensor if isinstance(x, DTensor) else x
        return gather_rows(arrived(local), how.dim, how.axis) if how.codes is None else without_memory(local, how.codes)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        readers, how, name, x = ctx.settings
        if x is not None and x() is not None:  # all layers that read it have run: free the memory
            vars(x()).pop(name, None)
        dx = readers.result()
        return dx if x is None or dx is None else how.shard.wrap(dx), None, None, None
