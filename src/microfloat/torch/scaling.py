"""Delayed-scaling state of layers: buffers, recording, and the update once per region and direction.

State per slot (x, w, dy) of a layer is two float32 buffers, ``scaling_<slot>_scale`` (the encode scale) and
``scaling_<slot>_amax_history`` (slot 0 is live). A *region* is the span of an outermost autocast; a layer called
outside any is its own region. Forward slots update when a region closes; dy, whose last backward nobody can know,
updates at the next opening, at a read of the state, or by `update_scaling` (docs/numerics.md 3.3).
"""

import functools
import importlib
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from microfloat.errors import NotSupportedError
from microfloat.formats import ElementFormat
from microfloat.recipes import Cast, Delayed
from microfloat.torch import backends
from microfloat.torch.backends.base import record_amax_

__all__ = [
    "CLOSED_REGION", "SLOTS", "Region", "amax_history", "buffer_names", "encode_scale", "ensure_buffers",
    "flush_backward", "flush_layer", "has_buffers", "note_forward", "note_recorded", "number_layer", "previous_scale",
    "recomputation", "record_amax_", "record_compiled", "reset_scaling", "roll_alone", "scaled_layers", "update_delayed_",
    "update_scaling",
]  # fmt: skip

SLOTS = ("x", "w", "dy")
_NAMES = {slot: (f"scaling_{slot}_scale", f"scaling_{slot}_amax_history") for slot in SLOTS}
_LARGEST_SCALE = 2.0**126


class _Pending(NamedTuple):
    """Something was recorded in a slot and not yet rolled; with `region` None only `update_scaling` rolls it."""

    delayed: Delayed
    element: ElementFormat
    group: Any
    region: "Region | None"


# Kept beside the modules, not in them, so that pickling and deepcopy of a model never meet a process group.
_PENDING: "weakref.WeakKeyDictionary[nn.Module, dict[str, _Pending]]" = weakref.WeakKeyDictionary()
# Slot -> the scales that one update replaced, and which of them is this slot's.
_PREVIOUS: "weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[torch.Tensor, int]]]" = weakref.WeakKeyDictionary()
# The region and reduction group of each layer's latest compiled forward, for the amax that its backward records.
_COMPILED: "weakref.WeakKeyDictionary[nn.Module, tuple[Region, Any]]" = weakref.WeakKeyDictionary()
# Layers by number, so that an operator of compiled code, which takes no objects, finds the state of its layer.
_NUMBERED: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
# Layers whose dy may be pending, per thread: the next outermost autocast of the same thread rolls them together.
_LOCAL = threading.local()


class Region:
    """The span in which a slot's amaxes are collected into one live value."""

    def __init__(self) -> None:
        self.closed = False
        self._layers: list[weakref.ref[nn.Module]] = []

    def add(self, layer: nn.Module) -> None:
        """Remember a layer whose forward slots this region must roll."""
        if not self._layers or self._layers[-1]() is not layer:
            self._layers.append(weakref.ref(layer))

    def close(self, completed: bool = True) -> None:
        """Roll the forward slots recorded inside. After an exception nothing is rolled; amaxes stay live."""
        self.closed = True
        if completed:
            layers = [layer for reference in self._layers if (layer := reference()) is not None]
            _roll(layers, ("x", "w"), lambda entry: entry.region is self)
        self._layers.clear()


# The region of every layer that is called outside any autocast: closed as soon as its forward is done.
CLOSED_REGION = Region()
CLOSED_REGION.closed = True


def _tensor(value: Any) -> torch.Tensor:
    """What nn.Module types as Tensor | Module | None, where it can only be a tensor."""
    return value


def buffer_names(slot: str) -> tuple[str, str]:
    """(scale, amax history) buffer names of a slot."""
    return _NAMES[slot]


def has_buffers(layer: nn.Module) -> bool:
    """Whether the layer carries delayed-scaling state."""
    return buffer_names("x")[0] in layer._buffers


def ensure_buffers(layer: nn.Module, delayed: Delayed) -> None:
    """Create the six buffers (scale 1, history 0), or fit the history length, keeping the newest amaxes."""
    length = delayed.amax_history_len
    device = _tensor(layer.weight).device
    for slot in SLOTS:
        scale_name, history_name = buffer_names(slot)
        history = layer._buffers.get(history_name)
        if history is None:
            layer.register_buffer(scale_name, torch.ones((), dtype=torch.float32, device=device))
            layer.register_buffer(history_name, torch.zeros(length, dtype=torch.float32, device=device))
        elif history.shape[0] != length:
            fitted = torch.zeros(length, dtype=torch.float32, device=history.device)
            fitted[0] = history[0]
            keep = min(length, history.shape[0]) - 1
            if keep:
                fitted[-keep:] = history[-keep:]
            layer._buffers[history_name] = fitted
    number_layer(layer)


def number_layer(layer: nn.Module) -> None:
    """Give `layer` a number of its own, under which `record_compiled` finds it."""
    if _NUMBERED.get(layer.__dict__.get("_number", -1)) is not layer:
        layer._number = next(_NUMBERS)  # type: ignore[assignment]
        _NUMBERED[layer._number] = layer  # type: ignore[index]


def encode_scale(layer: nn.Module, slot: str) -> torch.Tensor:
    """The live encode-scale buffer of a slot, float32 ()."""
    return _tensor(layer._buffers[buffer_names(slot)[0]])


def previous_scale(layer: nn.Module, slot: str) -> torch.Tensor:
    """The encode scale before the latest update: what the forward that is being recomputed has used."""
    known = _PREVIOUS.get(layer, {}).get(slot)
    return encode_scale(layer, slot) if known is None else known[0][known[1]]


def recomputation(layer: nn.Module, state: Any) -> dict[str, torch.Tensor] | None:
    """The encode scales of the forward that is being recomputed, by slot; None in an ordinary forward.

    `state`: the ambient autocast or None.
    """
    if state is not None and state.replay is not None:
        return next(state.replay)
    if torch._C._current_graph_task_id() != -1:  # torch's own checkpoint recomputes inside a backward
        return {slot: previous_scale(layer, slot) for slot in ("x", "w")}
    return None


def amax_history(layer: nn.Module, slot: str) -> torch.Tensor:
    """The amax-history buffer of a slot, float32 [L]; entry 0 is live."""
    return _tensor(layer._buffers[buffer_names(slot)[1]])


def note_recorded(layer: nn.Module, slot: str, cast: Cast, *, group: Any = None, region: Region | None = None) -> None:
    """Remember that a slot's live amax awaits its update; `region` None: until `update_scaling` asks for it."""
    _PENDING.setdefault(layer, {})[slot] = _Pending(cast.scaling, cast.format.element, group, region)  # type: ignore[arg-type]
    if slot != "dy" and region is not None:
        region.add(layer)
        _await_backward(layer)


def note_forward(layer: nn.Module, x_cast: Cast, w_cast: Cast | None, *, group: Any, region: Region) -> None:
    """`note_recorded` of x and of w (None: it was not) at once."""
    entries = _PENDING.setdefault(layer, {})
    for slot, cast in (("x", x_cast), ("w", w_cast)):
        if cast is not None:
            entries[slot] = _Pending(cast.scaling, cast.format.element, group, region)  # type: ignore[arg-type]
    region.add(layer)
    _await_backward(layer)


def _await_backward(layer: nn.Module) -> None:
    # Noted in forward and not in backward, which may run on another thread of the autograd engine.
    waiting = _LOCAL.__dict__.get("waiting")
    if waiting is None:
        waiting = _LOCAL.waiting = weakref.WeakKeyDictionary()
    waiting[layer] = True


def roll_alone(layer: nn.Module, x_cast: Cast, w_cast: Cast | None, *, records: bool) -> None:
    """After a forward outside any autocast: roll x and w (None: not recorded), and the dy of an earlier backward.

    As if the layer had opened a region, which rolls dy, and closed it, which rolls x and w; dy's scale is read by the
    next backward at the earliest, so that one update serves all three.
    """
    entries = _PENDING.get(layer)
    dy = None if entries is None else entries.get("dy")
    batch = []
    if records:
        _await_backward(layer)
        for slot, cast in (("x", x_cast), ("w", w_cast)):
            if cast is not None:
                entry = _Pending(cast.scaling, cast.format.element, None, CLOSED_REGION)  # type: ignore[arg-type]
                batch.append((layer, slot, entry))
    if dy is not None and _closed(dy):
        batch.append((layer, "dy", dy))
    if not batch:
        return
    first = batch[0][2]
    if all(entry.group is first.group and entry.delayed == first.delayed for _, _, entry in batch):
        _update(batch)
    else:
        for job in batch:
            _update([job])
    if entries:
        for _, slot, _ in batch:  # x and w may be pending since a region that an exception has left
            entries.pop(slot, None)


def record_compiled(
    number: int, history: torch.Tensor, slot: str, amax: torch.Tensor, cast: Cast, region: Region | None, group: Any
) -> None:
    """`record` for compiled code: the layer by number, dy under the region of the layer's latest forward."""
    layer = _NUMBERED.get(number)
    if layer is None:
        raise NotSupportedError("compiled code: the layer that holds the delayed-scaling state was deleted.")
    if slot == "dy":
        region, group = _COMPILED.get(layer, (region, group))
    elif region is None:
        raise NotSupportedError(
            "torch.compile: got a layer under delayed scaling outside any microfloat.torch.autocast, needed an "
            "enclosing one, because its exit is what updates the scales. Call the compiled function inside "
            "`with autocast():`."
        )
    else:
        _COMPILED[layer] = (region, group)
    record_amax_(history, amax)
    note_recorded(layer, slot, cast, group=group, region=region)


def update_delayed_(
    history: torch.Tensor, scale: torch.Tensor, delayed: Delayed, element: ElementFormat, live: torch.Tensor
) -> None:
    """Roll one slot in place: the update of docs/numerics.md 3.3 with the (reduced) live amax `live`."""
    history[0] = live
    algo = delayed.amax_compute_algo
    if callable(algo):
        amax = torch.as_tensor(algo(history.clone()), dtype=torch.float32, device=history.device).reshape(())
    else:
        amax = history.max() if algo == "max" else history[0].clone()
    rolled = torch.roll(history, -1)
    rolled[0] = 0.0
    history.copy_(rolled)
    largest = torch.full_like(amax, element.max)
    # Two tensors, because torch computes `number / tensor` through a reciprocal, which rounds twice.
    fresh = torch.div(largest, torch.clamp(amax, min=element.max * 2.0**-126)) * 2.0**-delayed.margin
    usable = (amax > 0) & torch.isfinite(amax)
    scale.copy_(torch.where(usable, torch.clamp(fresh, max=_LARGEST_SCALE), scale))


def _reduces(delayed: Delayed, group: Any) -> bool:
    distributed = torch.distributed
    if not delayed.reduce_amax or not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size(group) > 1


def _reduced(live: torch.Tensor, delayed: Delayed, group: Any) -> torch.Tensor:
    """All live amaxes of one (recipe, group, direction) in one MAX all-reduce."""
    if _reduces(delayed, group):
        torch.distributed.all_reduce(live, op=torch.distributed.ReduceOp.MAX, group=group)
    return live


@torch.no_grad()
def _roll(layers: Iterable[nn.Module], slots: tuple[str, ...], ready: Any) -> None:
    """Update the given slots of the given layers where something is pending and `ready(entry)` holds."""
    jobs: dict[tuple[Delayed, Any, torch.device], list[tuple[nn.Module, str, _Pending]]] = {}
    for layer in layers:
        entries = _PENDING.get(layer, {})
        for slot in slots:
            entry = entries.get(slot)
            if entry is not None and ready(entry):
                del entries[slot]
                key = (entry.delayed, entry.group, encode_scale(layer, slot).device)
                jobs.setdefault(key, []).append((layer, slot, entry))
    for batch in jobs.values():
        _update(batch)


def _update(batch: list[tuple[nn.Module, str, _Pending]]) -> None:
    """Roll slots that agree in recipe, group and device."""
    delayed, group = batch[0][2].delayed, batch[0][2].group
    histories, scales, maxima = [], [], []
    for layer, slot, entry in batch:
        scale_name, history_name = _NAMES[slot]
        scales.append(_tensor(layer._buffers[scale_name]))
        histories.append(_tensor(layer._buffers[history_name]))
        maxima.append(entry.element.max)
    previous = _update_fused(histories, scales, delayed, maxima, group)
    if previous is None:
        elements = [entry.element for _, _, entry in batch]
        previous = _update_one_by_one(histories, scales, delayed, elements, group)
    layer, known = None, {}
    for index, (owner, slot, _) in enumerate(batch):
        if owner is not layer:
            layer, known = owner, _PREVIOUS.setdefault(owner, {})
        known[slot] = (previous, index)


@functools.cache
def _update_kernel(device: torch.device) -> Any:
    """The module with the kernel that updates many slots at once; None where it cannot run."""
    if not backends.support("triton", device):
        return None
    return importlib.import_module("microfloat.torch.backends.triton._delayed")


def _update_fused(
    histories: list[torch.Tensor], scales: list[torch.Tensor], delayed: Delayed, maxima: list[float], group: Any
) -> torch.Tensor | None:
    """All slots in one launch where a kernel can; returns the scales from before, or None where none can."""
    kernel = None if callable(delayed.amax_compute_algo) else _update_kernel(scales[0].device)
    slots = None if kernel is None else kernel.slots_of(histories, scales, maxima)
    if kernel is None or slots is None:
        return None
    live = _reduced(slots.gather_live(), delayed, group) if _reduces(delayed, group) else None
    previous = kernel.update_delayed(slots, delayed, live)
    torch.autograd.graph.increment_version((*histories, *scales))  # a kernel's writes are not counted by themselves
    return previous


@torch.no_grad()
def _update_one_by_one(
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    delayed: Delayed,
    elements: list[ElementFormat],
    group: Any,
) -> torch.Tensor:
    live = _reduced(torch.stack([history[0] for history in histories]), delayed, group)
    previous = torch.stack(scales)
    for index, element in enumerate(elements):
        update_delayed_(histories[index], scales[index], delayed, element, live[index])
    return previous


def _closed(entry: _Pending) -> bool:
    return entry.region is not None and entry.region.closed


def flush_backward() -> None:
    """Roll dy of every layer of this thread whose region has closed and whose backward has run."""
    waiting = _LOCAL.__dict__.get("waiting")
    if waiting:
        layers = list(waiting)
        waiting.clear()
        _roll(layers, ("dy",), _closed)


def flush_layer(layer: nn.Module) -> None:
    """Roll dy of one layer if its region has closed: before its state is read, and before it is used again."""
    if layer in _PENDING:
        _roll([layer], ("dy",), _closed)


def scaled_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules below `model` that carry delayed-scaling buffers."""
    return (module for module in model.modules() if has_buffers(module))


def update_scaling(model: nn.Module) -> None:
    """Roll every slot of `model` that has recorded an amax since its last update (after calibration, or before a save).

    In a distributed run call it on every rank: it may all-reduce. Source: docs/numerics.md 3.3.
    """
    _roll(list(scaled_layers(model)), SLOTS, lambda entry: entry.region is None or entry.region.closed)


@torch.no_grad()
def reset_scaling(model: nn.Module) -> None:
    """Start delayed scaling afresh: scales 1, histories 0, in place; pending updates are dropped."""
    for layer in scaled_layers(model):
        _PENDING.pop(layer, None)
        _PREVIOUS.pop(layer, None)
        for slot in SLOTS:
            scale_name, history_name = buffer_names(slot)
            _tensor(layer._buffers[scale_name]).fill_(1.0)
            _tensor(layer._buffers[history_name]).zero_()
