"""Delayed-scaling state of layers: buffers, recording, and the update once per region and direction.

State per slot (x, w, dy) of a layer is two float32 buffers, ``scaling_<slot>_scale`` (the encode scale) and
``scaling_<slot>_amax_history`` (slot 0 is live). A *region* is the span of an outermost autocast; a layer called
outside any is its own region. Forward slots update when a region closes; dy, whose last backward nobody can know,
updates at the next opening, at a read of the state, or by `update_scaling` (docs/numerics.md 3.3).
"""

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microfloat.errors import NotSupportedError
from microfloat.formats import ElementFormat
from microfloat.recipes import Cast, Delayed
from microfloat.torch import backends
from microfloat.torch.backends.base import record_amax_

__all__ = [
    "SLOTS", "Region", "amax_history", "buffer_names", "encode_scale", "ensure_buffers", "flush_backward",
    "flush_layer", "has_buffers", "note_recorded", "number_layer", "previous_scale", "record_amax_",
    "record_compiled", "reset_scaling", "scaled_layers", "update_delayed_", "update_scaling",
]  # fmt: skip

SLOTS = ("x", "w", "dy")
_LARGEST_SCALE = 2.0**126


@dataclass(frozen=True, eq=False)
class _Pending:
    """Something was recorded in a slot and not yet rolled; with `region` None only `update_scaling` rolls it."""

    delayed: Delayed
    element: ElementFormat
    group: Any
    region: "Region | None"


# Kept beside the modules, not in them, so that pickling and deepcopy of a model never meet a process group.
_PENDING: "weakref.WeakKeyDictionary[nn.Module, dict[str, _Pending]]" = weakref.WeakKeyDictionary()
_PREVIOUS: "weakref.WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]]" = weakref.WeakKeyDictionary()
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
        self._layers.append(weakref.ref(layer))

    def close(self, completed: bool = True) -> None:
        """Roll the forward slots recorded inside. After an exception nothing is rolled; amaxes stay live."""
        self.closed = True
        if completed:
            layers = [layer for reference in self._layers if (layer := reference()) is not None]
            _roll(layers, ("x", "w"), lambda entry: entry.region is self)
        self._layers.clear()


def _tensor(value: Any) -> torch.Tensor:
    """What nn.Module types as Tensor | Module | None, where it can only be a tensor."""
    return value


def buffer_names(slot: str) -> tuple[str, str]:
    """(scale, amax history) buffer names of a slot."""
    return f"scaling_{slot}_scale", f"scaling_{slot}_amax_history"


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
    return _PREVIOUS.get(layer, {}).get(slot, encode_scale(layer, slot))


def amax_history(layer: nn.Module, slot: str) -> torch.Tensor:
    """The amax-history buffer of a slot, float32 [L]; entry 0 is live."""
    return _tensor(layer._buffers[buffer_names(slot)[1]])


def note_recorded(layer: nn.Module, slot: str, cast: Cast, *, group: Any = None, region: Region | None = None) -> None:
    """Remember that a slot's live amax awaits its update; `region` None: until `update_scaling` asks for it."""
    _PENDING.setdefault(layer, {})[slot] = _Pending(cast.scaling, cast.format.element, group, region)  # type: ignore[arg-type]
    if slot != "dy" and region is not None:
        region.add(layer)
        # Noted here and not in backward, which may run on another thread of the autograd engine.
        _LOCAL.__dict__.setdefault("waiting", weakref.WeakKeyDictionary())[layer] = True


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
    for (delayed, group, _), batch in jobs.items():
        histories = [amax_history(layer, slot) for layer, slot, _ in batch]
        scales = [encode_scale(layer, slot) for layer, slot, _ in batch]
        elements = [entry.element for _, _, entry in batch]
        previous = _update_fused(histories, scales, delayed, elements, group)
        if previous is None:
            previous = _update_one_by_one(histories, scales, delayed, elements, group)
        for index, (layer, slot, _) in enumerate(batch):
            _PREVIOUS.setdefault(layer, {})[slot] = previous[index]


def _update_fused(
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    delayed: Delayed,
    elements: list[ElementFormat],
    group: Any,
) -> torch.Tensor | None:
    """All slots in one launch where a kernel can; returns the scales from before, or None where none can."""
    if callable(delayed.amax_compute_algo) or not backends.support("triton", scales[0].device):
        return None
    from microfloat.torch.backends.triton._delayed import slots_of, update_delayed

    slots = slots_of(histories, scales, [element.max for element in elements])
    if slots is None:
        return None
    live = _reduced(slots.gather_live(), delayed, group) if _reduces(delayed, group) else None
    return update_delayed(slots, delayed, live)


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
