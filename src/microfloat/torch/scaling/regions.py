"""Delayed scaling of layers: amaxes are recorded, and slots updated once per region and direction.

A *region* is the span of an outermost autocast; a layer called outside any autocast has a region of its own. Forward
slots update when a region closes. dy updates at the next opening, at a read of the state, or by `update_scaling`, since
nobody can know which backward is the last (docs/numerics.md 3.3).
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from microfloat.errors import NotSupportedError
from microfloat.recipes import Cast, Delayed, Recipe
from microfloat.torch import backends
from microfloat.torch.backends.base import capturing, record_amax_
from microfloat.torch.scaling import amax_reduction as reduction
from microfloat.torch.scaling import buffers as layer_state
from microfloat.torch.scaling.amax_reduction import Group, Key, reduces
from microfloat.torch.scaling.buffers import SLOTS, Batch, Job, LayerState, Pending, Slot, batches_of, state_of
from microfloat.torch.scaling.rank_errors import without_addresses
from microfloat.torch.tensor.checks import check_model

# `waiting`: the layers of a thread whose dy may be pending, until the thread's next outermost autocast rolls them.
# `shared`: the groups of its latest region, until then too.
_LOCAL = threading.local()
# Numbers of layers whose x and w were recorded inside a backward, until they are rolled.
LATE: set[int] = set()
# Slot -> cast and amax of a forward inside a backward, which count only once the backward of that very forward runs.
Late = dict[str, tuple[Cast, torch.Tensor]]
Shared = dict[Group, Delayed]
_MOST_STEPS = 16  # more than those of a network against which another one is trained
_DDP = nn.parallel.DistributedDataParallel


class Region:
    """The span in which a slot's amaxes are collected into one live value.

    `shared`: the groups over which its autocasts reduce amaxes; `evaluates`: a layer ran in it without gradients. A
    rank takes part in the reduction also if none of its layers has run, such as experts without tokens.
    """

    __slots__ = ("_states", "closed", "evaluates", "failed", "is_alone", "shared", "steps")

    def __init__(self) -> None:
        self.is_alone = False  # True where it was seen to begin without a process group
        self.shared: Shared = {}
        self.evaluates = False
        self.closed = False
        self.failed = False  # left by an exception
        self.steps = 0  # of optimizers, after forwards that it must roll
        self._states: dict[LayerState, None] = {}  # layers whose forward slots it must roll

    def note_step(self) -> None:
        """Warn, once, of a whole training inside: the loss of gradients that underflow by old scales shows nowhere."""
        self.steps += bool(self._states)
        if self.steps == _MOST_STEPS and self._states:
            warnings.warn(
                f"autocast: got {_MOST_STEPS} steps of optimizers inside one autocast under delayed scaling, "
                "whose exit alone updates the scales. Enter one in each step, or pin the recipe by convert.",
                UserWarning, stacklevel=4,
            )  # fmt: skip

    def close(self, completed: bool = True) -> None:
        """Roll the forward slots recorded inside.

        After an exception nothing is rolled, nor is dy; amaxes stay live, so that the step may be taken again.
        """
        self.closed = self.failed = True  # until all is rolled
        if completed:
            trains = torch.is_grad_enabled() and not (self.evaluates and not self._states)
            shared = self.shared if trains else {}
            _roll(self._states, ("x", "w"), lambda entry: entry.region is self, "forward", shared, self.is_alone)
            if shared and not capturing():
                leave_shared(shared)
        self.failed = not completed
        self._states.clear()


# The region of every layer that is called outside any autocast.
CLOSED_REGION = Region()
CLOSED_REGION.closed = True


def _pending(cast: Cast, group: Group, region: "Region | None", late: bool = False) -> Pending:
    return Pending(cast.scaling, cast.format.element.max, group, region, late)  # type: ignore[arg-type]


def forget(layer: nn.Module) -> None:
    """Drop the state of a layer besides its buffers, pending updates above all."""
    state = state_of(layer)
    state.reset()
    LATE.discard(state.number)


def drop_buffers(layer: nn.Module) -> None:
    """Forget the delayed-scaling state of a layer, pending updates too."""
    forget(layer)
    for name in layer_state.BUFFER_NAMES:
        layer._buffers.pop(name, None)


def previous_scale(layer: nn.Module, slot: str) -> torch.Tensor:
    """The encode scale of the latest forward that has recorded: the scale before the update, if that has happened."""
    state = state_of(layer).slots[slot]
    replaced = None if state.pending is not None else state.previous
    return layer_state.encode_scale(layer, slot) if replaced is None else replaced[0][replaced[1]]


def recomputation(
    layer: nn.Module, replay: Iterator[dict[str, torch.Tensor]] | None
) -> tuple[dict[str, torch.Tensor], Late | None] | None:
    """Encode scales of a forward that activation checkpointing runs again, and where it records (None: nowhere).

    None in an ordinary forward. `replay`: the scales that `microfloat.torch.checkpoint` has recorded, or None. torch's
    own checkpoint recomputes inside a backward. If it is not reentrant, the first pass has recorded, and the graph of
    the second is thrown away. If it is, the first pass ran without gradients and has recorded nothing; the second is
    the forward whose backward runs. Therefore a forward inside a backward notes its amaxes, and they count when its own
    backward runs.
    """
    if replay is not None:
        scales = next(replay, None)
        if scales is None:
            raise NotSupportedError(
                "checkpoint: got a recomputation that calls more layers under delayed scaling than the first pass did, "
                "needed the same calls. The checkpointed function must do the same both times."
            )
        return scales, None
    if torch._C._current_graph_task_id() == -1:
        return None
    return {slot: previous_scale(layer, slot) for slot in ("x", "w")}, {} if torch.is_grad_enabled() else None


def record_late(layer: nn.Module, late: Late) -> tuple["Region", Group]:
    """Record the amaxes of a forward inside a backward, now that its own backward runs; returns region and group.

    They belong to the region of the first pass. If it has closed, x and w wait as dy does.
    """
    state = state_of(layer)
    region, group, waiting = state.latest or (CLOSED_REGION, None, _waiting())
    while late:
        slot, (cast, amax) = late.popitem()
        record_amax_(layer_state.amax_history(layer, slot), amax[0])
        state.slots[slot].pending = _pending(cast, group, region, late=True)
        if region.closed:
            LATE.add(state.number)
        else:
            region._states[state] = None
    state.waits_in = waiting
    waiting[state] = None
    return region, group


def note_recorded(
    layer: nn.Module, casts: dict[str, Cast | None], *, group: Group = None, region: Region | None = None
) -> None:
    """Note that live amaxes of dy, or of x and w, await their update; a cast of None was not recorded.

    `region` None: `update_scaling` alone updates them.
    """
    state = state_of(layer)
    for name, cast in casts.items():
        if cast is not None:
            state.slots[name].pending = _pending(cast, group, region)
    if "dy" not in casts:
        if region is not None:
            region._states[state] = None
        _await_backward(state)
        return
    dy = state.slots["dy"]
    if dy.pending is not None and capturing():
        dy.pending = dy.pending._replace(captured=True)
    else:
        dy.latest = dy.pending


def _waiting() -> dict[LayerState, None]:
    """The layers of this thread whose dy may be pending."""
    return _LOCAL.__dict__.setdefault("waiting", {})


def _await_backward(state: LayerState) -> None:
    # Noted in forward and not in backward, which may run on another thread of the autograd engine.
    waiting = _waiting()
    if state.waits_in is not waiting:
        state.waits_in = waiting
        waiting[state] = None
    wrapper = _DDP._active_ddp_module
    if wrapper is not None and (state.wrapper is None or state.wrapper() is not wrapper):
        # Its forward runs, which would broadcast rank 0's amaxes over those of other ranks.
        reference = weakref.ref(wrapper)
        for prefix, module in wrapper.module.named_modules():
            if layer_state.has_buffers(module):
                start = f"{prefix}." if prefix else ""
                wrapper.parameters_to_ignore.update(start + name for name in layer_state.BUFFER_NAMES)
                state_of(module).wrapper = reference
        # DDP asks whether this list is empty before it makes it anew, and cannot broadcast nothing.
        wrapper._assign_modules_buffers()


def roll_alone(layer: nn.Module, x_cast: Cast | None, w_cast: Cast | None, *, records: bool) -> None:
    """After a forward outside any autocast, roll x and w (None: not recorded), and the dy of an earlier backward.

    Regions roll dy when they open, and x and w when they close. Here one update serves all three, since the next
    backward is the first reader of dy's scale.
    """
    state = state_of(layer)
    state.latest = (CLOSED_REGION, None, _waiting())
    if records:
        _await_backward(state)
        for name, cast in (("x", x_cast), ("w", w_cast)):
            if cast is not None:
                state.slots[name].pending = _pending(cast, None, CLOSED_REGION)
    _await_replays(state.slots["dy"])
    _roll([state], SLOTS, _is_due if records else _is_due_alone, None)


def calibrate(
    layer: nn.Module, recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, group: Group,
    histories: dict[str, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Record the amaxes of x and of the weight, into `histories` or the layer's own; `update_scaling` rolls them."""
    if x.numel() == 0:
        return
    backend = backends.choose("reference", x.device)
    for slot, tensor, cast in (("x", x, recipe.fprop.lhs), ("w", weight, recipe.fprop.rhs)):
        if cast is not None and isinstance(cast.scaling, Delayed):
            history = layer_state.amax_history(layer, slot) if histories is None else histories[slot]
            record_amax_(history, backend.amax(tensor.reshape(-1, tensor.shape[-1])))
            note_recorded(layer, {slot: cast}, group=group)


def record_compiled(number: int, casts: dict[str, Cast], region: Region | None, group: Group) -> None:
    """`note_recorded` for compiled code, by the layer's number; dy belongs to the region of its latest forward."""
    layer = layer_state.numbered(number)
    if "dy" in casts:
        layer_state.check_kept(layer)
        region, group = state_of(layer).compiled or (region, group)
        note_recorded(layer, {"dy": casts["dy"]}, group=group, region=region)
        return
    if torch._C._current_graph_task_id() != -1:
        raise NotSupportedError(
            "torch.compile: got a compiled function with layers under delayed scaling that activation checkpointing "
            "runs again, needed the checkpointed part in eager mode. Leave it uncompiled, or call "
            "microfloat.torch.checkpoint inside the compiled function, which ends the graph there."
        )
    if region is None or region.closed:
        raise NotSupportedError(
            "torch.compile: got a layer under delayed scaling outside any microfloat.torch.autocast, needed an "
            "enclosing one, because its exit is what updates the scales. Call the compiled function inside "
            "`with autocast():`; for inference, microfloat.torch.export makes a program with the scales as they are."
        )
    state = state_of(layer)
    state.compiled = (region, group)
    if capturing():  # as `begin_forward` does in eager mode, before the backward that reads the scale
        _await_replays(state.slots["dy"])
        _roll([state], ("dy",), _is_due_alone, None)
    note_recorded(layer, {"x": casts.get("x"), "w": casts.get("w")}, group=group, region=region)


def _words(job: Job) -> str:
    """The layer and its scaling, as an error names them."""
    layer, slot, entry = job
    name = getattr(layer, "_path", "") or type(layer).__name__
    return f"{name!r} under {without_addresses(entry.delayed)}, {slot.name} up to {entry.maximum:g}"


def _shape(layer: nn.Module) -> tuple[int, ...]:
    """The shape of the layer's whole weight, of which FSDP1 leaves a flat part in the layer between calls."""
    names = [name for name in ("num_groups", "out_features", "in_features") if hasattr(layer, name)]
    return tuple(getattr(layer, name) for name in names) or tuple(layer_state.as_tensor(layer.weight).shape)


def _roll(
    states: Iterable[LayerState], names: tuple[str, ...], ready: Callable[[Pending], bool], direction: str | None,
    shared: Shared | None = None, is_alone: bool = False,
) -> None:  # fmt: skip
    """Update the named slots of layers whose pending entry satisfies `ready`.

    `direction`: the point of the program at which all ranks do so; None for one layer by itself. `shared`: groups whose
    ranks wait for this rank, even if nothing is pending here. `is_alone`: there are no other ranks.
    """
    jobs = [
        (layer, slot, entry)
        for state in states if (layer := state.layer()) is not None
        for slot in map(state.slots.__getitem__, names) if (entry := slot.pending) is not None and ready(entry)
    ]  # fmt: skip
    rolled = _update(jobs, direction, shared, is_alone)
    for layer, slot, _ in rolled:
        slot.pending = None
        if LATE:
            LATE.discard(layer.__dict__["_number"])
    if len(rolled) < len(jobs):  # slots that the ranks have yet to agree on come again with their next update
        for layer, slot, _ in jobs:
            if slot.pending is not None:
                _await_backward(state_of(layer))


def _update(jobs: list[Job], direction: str | None, waiting: Shared | None = None, is_alone: bool = False) -> list[Job]:
    """Roll slots; returns the rolled jobs. Others wait until the ranks have agreed on them. See `_roll`."""
    rolled: list[Job] = []
    waiting = waiting or {}
    shared: dict[Group, list[Batch]] = {group: [] for group, one in waiting.items() if reduces(one, group)}
    for batch in batches_of(jobs) if jobs else ():
        entry = batch.jobs[0][2]
        if not is_alone and reduces(entry.delayed, entry.group):
            shared.setdefault(entry.group, []).append(batch)
        else:
            rolled += batch.roll()
    for group in sorted(shared, key=reduction.group_name):
        batches = shared[group]
        example = batches[0].jobs[0][2] if batches else Pending(waiting[group], 0.0, group, None)
        rolled += _update_shared(group, batches, direction, example)
    return rolled


@torch.no_grad()
def _update_shared(group: Group, batches: list[Batch], direction: str | None, example: Pending) -> list[Job]:
    """Roll slots whose amaxes the ranks of `group` share, and slots that only another rank has recorded.

    `example`: the scaling of a layer that has never run here.
    """
    jobs = [job for batch in batches for job in batch.jobs]
    lives = [batch.live() for batch in batches]
    tensors = lives or [layer_state.as_tensor(layer.weight) for layer in layer_state.layers()]
    device = next((one.device for one in tensors if one.device.type not in ("cpu", "meta")), torch.device("cpu"))
    live = torch.cat([torch.empty(0, device=device), *(part.to(device) for part in lives)])
    keys = [Key(layer.__dict__["_number"], slot.name, _shape(layer), entry.maximum) for layer, slot, entry in jobs]
    point = keys[0].number if direction is None else direction
    reduced = reduction.reduce_together(group, point, keys, live, lambda index: _words(jobs[index]))
    amaxes = [(jobs[index], amax) for index, amax in zip(reduced.known, reduced.live.unbind(), strict=True)]
    for batch, live in _with_amaxes(amaxes):
        batch.roll(live)
    for (_, slot, entry), _ in amaxes:
        slot.rolled = entry
    for batch, live in _with_amaxes(_recorded_elsewhere(reduced.others, example)):
        layer_state.update_by_torch(batch, live, where_recorded=True)
    return [job for job, _ in amaxes]


def _with_amaxes(amaxes: list[tuple[Job, torch.Tensor]]) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Batches of jobs, and their reduced amaxes."""
    reduced = {slot: amax for (_, slot, _), amax in amaxes}
    for batch in batches_of([job for job, _ in amaxes]) if amaxes else ():
        yield batch, torch.stack([reduced[slot] for _, slot, _ in batch.jobs]).to(batch.scales[0].device)


def _recorded_elsewhere(others: dict[Key, torch.Tensor], example: Pending) -> list[tuple[Job, torch.Tensor]]:
    """Slots that another rank has recorded in this step (on a GPU: may have) and this rank has not, with amaxes."""
    found = []
    for key, amax in others.items():
        layer = layer_state.layer_of(key.number)
        if layer is None or _shape(layer) != key.shape or (amax.device.type == "cpu" and amax < 0):
            continue
        slot = state_of(layer).slots[key.slot]
        # As it was rolled before; a layer that has never run here follows the recipe of the others.
        entry = slot.rolled or example._replace(maximum=key.maximum)
        layer_state.ensure_buffers(layer, entry.delayed)
        found.append(((layer, slot, entry), amax))
    return found


def _is_due(entry: Pending) -> bool:
    """True for an amax to roll now; a CUDA graph rolls the amaxes that it has recorded in its own replays."""
    region = entry.region
    return region is not None and region.closed and not region.failed and (not entry.captured or capturing())


def leave_shared(shared: Shared) -> None:
    """Note the groups that will wait for this thread after the next backward."""
    _LOCAL.shared = reduction.world(), shared


def take_shared() -> Shared:
    """The groups that wait for this thread in the backward direction, without groups of a world that has ended."""
    world, shared = _LOCAL.__dict__.pop("shared", (None, {}))
    return shared if shared and world is reduction.world() else {}


def flush_backward(region: Region) -> None:
    """Roll the slots that backward passes have recorded in layers of this thread whose region has closed.

    In the capture of a CUDA graph only shared slots are rolled; `begin_forward` rolls the layers that the graph runs.
    Shared slots of a layer that was called outside of any region stay for its next call or `update_scaling`: one rank
    might be alone with them, where the garbage collector of another rank has ended the layer already.
    """
    waiting, inside = _waiting(), capturing()
    shared = {} if inside else take_shared()
    if not waiting and not shared:
        return
    states = list(waiting)
    if not inside:
        waiting.clear()
        for state in states:
            state.waits_in = None

    region.is_alone = reduction.world() is None

    def is_ready(entry: Pending) -> bool:
        is_shared = reduces(entry.delayed, entry.group)
        return _is_due(entry) and (is_shared if inside else not (is_shared and entry.region is CLOSED_REGION))

    _roll(states, SLOTS, is_ready, "backward", shared, region.is_alone)


def begin_forward(layer: nn.Module, region: Region | None, group: Group) -> None:
    """Before a forward that is no recomputation, roll the slots that earlier backward passes have recorded."""
    state = state_of(layer)
    state.latest = (CLOSED_REGION if region is None else region, group, _waiting())
    if region is not None and not torch.is_grad_enabled():
        region.evaluates = True
    slots = state.slots
    dy = slots["dy"]
    _await_replays(dy)
    if dy.pending is not None or LATE:
        # Shared slots wait for a point that all ranks pass: for layers without a region, a forward that records, or the
        # first pass of a reentrant checkpoint.
        shared = region is None and any(slot.pending is not None and slot.pending.late for slot in slots.values())
        _roll([state], SLOTS, _is_due if shared else _is_due_alone, None)


def _is_due_alone(entry: Pending) -> bool:
    return _is_due(entry) and not reduces(entry.delayed, entry.group)


def _await_replays(dy: Slot) -> None:
    """In the capture of a CUDA graph, roll dy even if that was done already: replays follow a backward of their own."""
    if capturing():
        dy.pending, dy.latest = dy.pending or dy.latest, None


def flush_to_read(layer: nn.Module) -> None:
    """Roll the slots that backward passes have recorded, before the state is read.

    Shared slots stay pending, since one rank may be alone in reading; so do slots that a CUDA graph rolls itself.
    """
    _roll([state_of(layer)], SLOTS, _is_due_alone, None)


def scaled_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules below `model` that carry delayed-scaling buffers."""
    return (module for module in model.modules() if layer_state.has_buffers(module))


def update_scaling(model: nn.Module) -> None:
    """Roll every slot of `model` that has recorded an amax since its last update: after calibration, before a save.

    In a distributed run call it on every rank: it may all-reduce. Raises InvalidTypeError for anything but a module.
    Source: docs/numerics.md 3.3.
    """
    check_model(model)
    states = [state_of(layer) for layer in scaled_layers(model)]

    def is_closed(entry: Pending) -> bool:
        return entry.region is not None and entry.region.closed and not entry.captured

    # At the point of the next autocast, which another rank may have entered by now.
    _roll(states, SLOTS, is_closed, "backward", take_shared())
    _roll(states, SLOTS, lambda entry: entry.region is None, "calibration")


@torch.no_grad()
def reset_scaling(model: nn.Module) -> None:
    """Start delayed scaling afresh: scales 1, histories 0, in place; pending updates are dropped.

    Raises InvalidTypeError for anything but a module.
    """
    check_model(model)
    for layer in scaled_layers(model):
        forget(layer)
        for slot in SLOTS:
            layer_state.encode_scale(layer, slot).fill_(1.0)
            layer_state.amax_history(layer, slot).zero_()
