"""Delayed scaling of layers: recording, and the update once per region and direction.

A *region* is the span of an outermost autocast; a layer called outside any is its own region. Forward slots update when
a region closes; dy, whose last backward nobody can know, updates at the next opening, at a read of the state, or by
`update_scaling` (docs/numerics.md 3.3). The state is in `microfloat.torch.scaling.buffers`.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from microfloat.errors import NotSupportedError
from microfloat.recipes import Cast, Delayed, Recipe
from microfloat.torch import backends
from microfloat.torch.backends.base import capturing, record_amax_
from microfloat.torch.scaling import amax_reduction as reduction
from microfloat.torch.scaling.amax_reduction import Group, Key, reduces
from microfloat.torch.scaling.buffers import (
    BUFFER_NAMES,
    SLOTS,
    LayerState,
    amax_history,
    as_tensor,
    check_kept,
    encode_scale,
    ensure_buffers,
    has_buffers,
    layer_of,
    layers,
    numbered,
    state_of,
)
from microfloat.torch.scaling.history import Batch, Job, Pending, Slot, batches_of
from microfloat.torch.scaling.rank_errors import without_addresses
from microfloat.torch.tensor.checks import check_model

if TYPE_CHECKING:
    from microfloat.torch.context import Ambient

__all__ = [
    "CLOSED_REGION", "LATE", "Late", "Recomputation", "Region", "begin_forward", "calibrate", "drop_buffers",
    "flush_backward", "flush_to_read", "forget", "leave_shared", "note_recorded", "previous_scale", "recomputation",
    "record_amax_", "record_compiled", "record_late", "reset_scaling", "roll_alone", "scaled_layers", "take_shared",
    "update_scaling",
]  # fmt: skip

# Layers whose dy may be pending, per thread: the next outermost autocast of the same thread rolls them together.
_LOCAL = threading.local()
# Numbers of layers whose x and w were recorded inside a backward and not rolled yet.
LATE: set[int] = set()
# Slot -> cast and amax of a forward inside a backward, which count only once the backward of that very forward runs.
Late = dict[str, tuple[Cast, torch.Tensor]]
Shared = dict[Group, Delayed]
_DDP = nn.parallel.DistributedDataParallel


class Region:
    """The span in which a slot's amaxes are collected into one live value; `alone`: of one layer's call only.

    `shared`: the groups over which an autocast inside of it would reduce amaxes; `evaluates`: a layer ran in it without
    gradients. A rank takes part in the reduction also if none of its layers has run, such as experts without tokens.
    """

    __slots__ = ("_states", "alone", "closed", "evaluates", "failed", "shared")

    def __init__(self, alone: bool = False) -> None:
        self.alone = alone
        self.shared: Shared = {}
        self.evaluates = False
        self.closed = False
        self.failed = False  # left by an exception
        self._states: dict[LayerState, None] = {}  # of layers whose forward slots it must roll

    def close(self, completed: bool = True) -> None:
        """Roll the forward slots recorded inside. After an exception nothing is rolled, nor is dy; amaxes stay live, so
        that the step may be taken again."""
        self.closed = self.failed = True  # until all is rolled
        if completed and self.alone and self._states:  # and with them dy, which would wait for an autocast in vain
            _roll(self._states, SLOTS, lambda entry: entry.region is self or _closed(entry), None)
        elif completed and not self.alone:
            trains = torch.is_grad_enabled() and not (self.evaluates and not self._states)
            shared = self.shared if trains else {}
            _roll(self._states, ("x", "w"), lambda entry: entry.region is self, "forward", shared)
            if shared and not capturing():
                leave_shared(shared)
        self.failed = not completed
        self._states.clear()


# The region of every layer that is called outside any autocast: closed as soon as its forward is done.
CLOSED_REGION = Region(alone=True)
CLOSED_REGION.closed = True


def _pending(cast: Cast, group: Group, region: "Region | None", late: bool = False) -> Pending:
    return Pending(cast.scaling, cast.format.element.max, group, region, late)  # type: ignore[arg-type]


def forget(layer: nn.Module) -> None:
    """Drop what is known of a layer besides its buffers, pending updates above all."""
    state = state_of(layer)
    state.reset()
    LATE.discard(state.number)


def drop_buffers(layer: nn.Module) -> None:
    """Forget the delayed-scaling state of a layer, pending updates too."""
    forget(layer)
    for name in BUFFER_NAMES:
        layer._buffers.pop(name, None)


def previous_scale(layer: nn.Module, slot: str) -> torch.Tensor:
    """The encode scale of the latest forward that has recorded: the one before the update, if that has happened."""
    state = state_of(layer).slots[slot]
    replaced = None if state.pending is not None else state.previous
    return encode_scale(layer, slot) if replaced is None else replaced[0][replaced[1]]


class Recomputation(NamedTuple):
    """A forward that activation checkpointing runs again: its encode scales, and where it records (None: nowhere)."""

    scales: dict[str, torch.Tensor]
    late: Late | None


def recomputation(layer: nn.Module, state: "Ambient | None") -> Recomputation | None:
    """The forward that is being recomputed; None in an ordinary forward. `state`: the ambient autocast or None.

    torch's own checkpoint recomputes inside a backward. If it is not reentrant, the first pass has recorded, and the
    graph of the second is thrown away. If it is, the first pass ran without gradients and has recorded nothing; the
    second is the forward whose backward runs. Therefore a forward inside a backward notes its amaxes, and they count
    when its own backward runs.
    """
    if state is not None and state.replay is not None:
        scales = next(state.replay, None)
        if scales is None:
            raise NotSupportedError(
                "checkpoint: got a recomputation that calls more layers under delayed scaling than the first pass did, "
                "needed the same calls. The checkpointed function must do the same both times."
            )
        return Recomputation(scales, None)
    if torch._C._current_graph_task_id() == -1:
        return None
    scales = {slot: previous_scale(layer, slot) for slot in ("x", "w")}
    return Recomputation(scales, {} if torch.is_grad_enabled() else None)


def record_late(layer: nn.Module, late: Late) -> tuple["Region", Group]:
    """Record what a forward inside a backward has noted, now that its own backward runs; returns region and group.

    It belongs to the region of its first pass. If that has closed, x and w wait as dy does.
    """
    state = state_of(layer)
    region, group, waiting = state.latest or (CLOSED_REGION, None, _waiting())
    while late:
        slot, (cast, amax) = late.popitem()
        record_amax_(amax_history(layer, slot), amax[0])
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
    """Remember that live amaxes await their update: those of dy, or of x and w (None: one that was not recorded).

    `region` None: until `update_scaling` asks for it.
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
    waiting = _LOCAL.__dict__.get("waiting")
    if waiting is None:
        waiting = _LOCAL.waiting = {}
    return waiting


def _await_backward(state: LayerState) -> None:
    # Noted in forward and not in backward, which may run on another thread of the autograd engine.
    waiting = _waiting()
    if state.waits_in is not waiting:
        state.waits_in = waiting
        waiting[state] = None
    wrapper = _DDP._active_ddp_module
    if wrapper is not None and (state.wrapper is None or state.wrapper() is not wrapper):
        _shield_from(wrapper)


def _shield_from(wrapper: nn.parallel.DistributedDataParallel) -> None:
    """Keep DistributedDataParallel, whose forward this is, from broadcasting rank 0's amaxes over those of others."""
    reference = weakref.ref(wrapper)
    for prefix, module in wrapper.module.named_modules():
        if has_buffers(module):
            start = f"{prefix}." if prefix else ""
            wrapper.parameters_to_ignore.update(start + name for name in BUFFER_NAMES)
            state_of(module).wrapper = reference
    # DDP asks whether this list is empty before it makes it anew, and cannot broadcast nothing.
    wrapper._assign_modules_buffers()


def roll_alone(layer: nn.Module, x_cast: Cast | None, w_cast: Cast | None, *, records: bool) -> None:
    """After a forward outside any autocast: roll x and w (None: not recorded), and the dy of an earlier backward.

    As if the layer had opened a region, which rolls dy, and closed it, which rolls x and w; dy's scale is read by the
    next backward at the earliest, so that one update serves all three.
    """
    state = state_of(layer)
    state.latest = (CLOSED_REGION, None, _waiting())
    x, w, dy = state.slots.values()
    jobs: list[Job] = []
    if records:
        _await_backward(state)
        if x_cast is not None:
            jobs.append((layer, x, _pending(x_cast, None, CLOSED_REGION)))
        if w_cast is not None:
            jobs.append((layer, w, _pending(w_cast, None, CLOSED_REGION)))
    _await_replays(dy)
    entry = dy.pending
    if entry is not None and _is_due(entry) and (records or not reduces(entry.delayed, entry.group)):
        jobs.append((layer, dy, entry))
    rolled = {slot for _, slot, _ in _update(jobs, None)}
    for _, slot, entry in jobs:  # of x and w too, which may have been pending since a region that an exception has left
        slot.pending = None if slot in rolled else entry


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
            history = amax_history(layer, slot) if histories is None else histories[slot]
            record_amax_(history, backend.amax(tensor.reshape(-1, tensor.shape[-1])))
            note_recorded(layer, {slot: cast}, group=group)


def record_compiled(number: int, casts: dict[str, Cast], region: Region | None, group: Group) -> None:
    """`note_recorded` for compiled code, which knows the layer by its number; dy belongs to the region of the layer's
    latest forward.
    """
    layer = numbered(number)
    if "dy" in casts:
        check_kept(layer)
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
    state_of(layer).compiled = (region, group)
    note_recorded(layer, {"x": casts.get("x"), "w": casts.get("w")}, group=group, region=region)


def _key(job: Job) -> Key:
    """The slot, as other ranks know it."""
    layer, slot, entry = job
    return Key(layer.__dict__["_number"], slot.name, _shape(layer), entry.maximum)


def _words(job: Job) -> str:
    """The layer and its scaling, as an error names them."""
    layer, slot, entry = job
    name = getattr(layer, "_path", "") or type(layer).__name__
    return f"{name!r} under {without_addresses(entry.delayed)}, {slot.name} up to {entry.maximum:g}"


def _shape(layer: nn.Module) -> tuple[int, ...]:
    """The shape of the layer's whole weight: between calls FSDP1 leaves a flat part of it in its place."""
    names = ("num_groups", "out_features", "in_features")
    return tuple(getattr(layer, name) for name in names if hasattr(layer, name)) or tuple(as_tensor(layer.weight).shape)


def _roll(
    states: Iterable[LayerState], names: tuple[str, ...], ready: Callable[[Pending], bool], direction: str | None,
    shared: "Shared | None" = None,
) -> None:  # fmt: skip
    """Update the named slots of layers where something is pending and `ready(entry)` holds.

    `direction`: the point of the program at which all ranks do so; None for one layer by itself. `shared`: groups whose
    ranks wait for this one whether or not something is pending here.
    """
    jobs: list[Job] = []
    for state in states:
        layer, slots = state.layer(), state.slots
        for name in names:
            slot = slots[name]
            entry = slot.pending
            if entry is not None and ready(entry) and layer is not None:
                jobs.append((layer, slot, entry))
    rolled = _update(jobs, direction, shared)
    for layer, slot, _ in rolled:
        slot.pending = None
        if LATE:
            LATE.discard(layer.__dict__["_number"])
    if len(rolled) < len(jobs):  # what the ranks have yet to agree on comes again with the next update of all ranks
        for layer, slot, _ in jobs:
            if slot.pending is not None:
                _await_backward(state_of(layer))


def _update(jobs: list[Job], direction: str | None, also: "Shared | None" = None) -> list[Job]:
    """Roll slots; returns those that were. Others wait until the ranks have agreed on them. `also`: see `_roll`."""
    rolled: list[Job] = []
    shared: dict[Group, list[Batch]] = {group: [] for group, one in (also or {}).items() if reduces(one, group)}
    for batch in batches_of(jobs) if jobs else ():
        entry = batch.jobs[0][2]
        if reduces(entry.delayed, entry.group):
            shared.setdefault(entry.group, []).append(batch)
        else:
            rolled += batch.roll()
    if shared:
        for group in sorted(shared, key=reduction.group_name):
            example = (
                Pending((also or {})[group], 0.0, group, None) if not shared[group] else shared[group][0].jobs[0][2]
            )
            rolled += _update_shared(group, shared[group], direction, example)
    return rolled


@torch.no_grad()
def _update_shared(group: Group, batches: list[Batch], direction: str | None, example: Pending) -> list[Job]:
    """Roll slots whose amaxes the ranks of `group` share, and those that only another rank has recorded.

    `example`: how a layer that has never run here is taken to scale.
    """
    jobs = [job for batch in batches for job in batch.jobs]
    lives = [batch.live() for batch in batches]
    devices = [live.device for live in lives] or [as_tensor(layer.weight).device for layer in layers()]
    device = next((one for one in devices if one.type not in ("cpu", "meta")), torch.device("cpu"))
    live = torch.cat([torch.empty(0, device=device), *(part.to(device) for part in lives)])
    keys = [_key(job) for job in jobs]
    point = keys[0].number if direction is None else direction
    reduced = reduction.reduce_together(group, point, keys, live, lambda index: _words(jobs[index]))
    amaxes = [(jobs[index], amax) for index, amax in zip(reduced.known, reduced.live.unbind(), strict=True)]
    for batch, live in _with_amaxes(amaxes):
        batch.roll(live)
    for (_, slot, entry), _ in amaxes:
        slot.rolled = entry
    for batch, live in _with_amaxes(_recorded_elsewhere(reduced.others, example)):
        batch.roll_recorded(live)
    return [job for job, _ in amaxes]


def _with_amaxes(amaxes: list[tuple[Job, torch.Tensor]]) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Batches of jobs, and their reduced amaxes."""
    reduced = {slot: amax for (_, slot, _), amax in amaxes}
    for batch in batches_of([job for job, _ in amaxes]) if amaxes else ():
        yield batch, torch.stack([reduced[slot] for _, slot, _ in batch.jobs]).to(batch.scales[0].device)


def _recorded_elsewhere(others: dict[Key, torch.Tensor], example: Pending) -> list[tuple[Job, torch.Tensor]]:
    """Slots that this rank has not recorded in this step, where another rank has (on a GPU: may have), and amaxes."""
    found = []
    for key, amax in others.items():
        layer = layer_of(key.number)
        if layer is None or _shape(layer) != key.shape or (amax.device.type == "cpu" and amax < 0):
            continue
        slot = state_of(layer).slots[key.slot]
        # As it was rolled before; a layer that has never run here is taken to follow the recipe of the others.
        entry = slot.rolled or example._replace(maximum=key.maximum)
        ensure_buffers(layer, entry.delayed)
        found.append(((layer, slot, entry), amax))
    return found


def _closed(entry: Pending) -> bool:
    return entry.region is not None and entry.region.closed and not entry.region.failed


def _is_due(entry: Pending) -> bool:
    """True if it is to be rolled now: what a CUDA graph has recorded is rolled by its own replays."""
    return _closed(entry) and (not entry.captured or capturing())


def leave_shared(shared: Shared) -> None:
    """Remember the groups that will wait for this thread after the backward that comes."""
    _LOCAL.shared = reduction.world(), shared


def take_shared() -> Shared:
    """The groups that wait for this thread in the backward direction; none of a world that has ended since."""
    world, shared = _LOCAL.__dict__.pop("shared", (None, {}))
    return shared if world is reduction.world() else {}


def flush_backward() -> None:
    """Roll what backward passes have recorded in layers of this thread whose region has closed.

    Not into a CUDA graph, where `begin_forward` rolls the layers that the graph runs, and no others. Nor what ranks
    share of a layer that was called outside of any region: its next call rolls that, or `update_scaling`. Here one rank
    might be alone with it, as where the garbage collector of another one has ended the layer already.
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

    def is_ready(entry: Pending) -> bool:
        is_shared = reduces(entry.delayed, entry.group)
        return _is_due(entry) and (is_shared if inside else not (is_shared and entry.region is CLOSED_REGION))

    _roll(states, SLOTS, is_ready, "backward", shared)


def begin_forward(layer: nn.Module, region: Region | None, group: Group) -> None:
    """Before a forward that is no recomputation: roll what earlier backward passes have recorded, if not done yet."""
    state = state_of(layer)
    state.latest = (CLOSED_REGION if region is None else region, group, _waiting())
    if region is not None and not torch.is_grad_enabled():
        region.evaluates = True
    slots = state.slots
    _await_replays(slots["dy"])
    if slots["dy"].pending is not None or LATE:
        # What ranks share waits for a point that all of them pass: of layers without a region, a forward that records,
        # or the first pass of a reentrant checkpoint.
        shared = region is None and any(slot.pending is not None and slot.pending.late for slot in slots.values())
        _roll(
            [state], SLOTS, lambda entry: _is_due(entry) and (shared or not reduces(entry.delayed, entry.group)), None
        )


def _await_replays(dy: Slot) -> None:
    """In a CUDA graph dy is rolled once more where that was done already: replays follow a backward of their own."""
    if capturing():
        dy.pending, dy.latest = dy.pending or dy.latest, None


def flush_to_read(layer: nn.Module) -> None:
    """Roll what backward passes have recorded before the state is read. What other ranks have a part in stays pending,
    since one rank may be alone in reading; so does what a CUDA graph rolls in its next replay."""
    _roll([state_of(layer)], SLOTS, lambda entry: _is_due(entry) and not reduces(entry.delayed, entry.group), None)


def scaled_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules below `model` that carry delayed-scaling buffers."""
    return (module for module in model.modules() if has_buffers(module))


def update_scaling(model: nn.Module) -> None:
    """Roll every slot of `model` that has recorded an amax since its last update (after calibration, or before a save).

    In a distributed run call it on every rank: it may all-reduce. Raises InvalidTypeError for anything but a module.
    Source: docs/numerics.md 3.3.
    """
    check_model(model)
    states = [state_of(layer) for layer in scaled_layers(model)]
    # As the next autocast would, which another rank may have entered by now.
    _roll(
        states, SLOTS, lambda entry: entry.region is not None and entry.region.closed and not entry.captured,
        "backward", take_shared(),
    )  # fmt: skip
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
            encode_scale(layer, slot).fill_(1.0)
            amax_history(layer, slot).zero_()
