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
from typing import Any, NamedTuple

import torch
from torch import nn

from microfloat.errors import NotSupportedError
from microfloat.recipes import Cast, Delayed, Recipe
from microfloat.torch import backends
from microfloat.torch.backends.base import record_amax_
from microfloat.torch.rolling import Roller, reduces, update_delayed_, update_slots

__all__ = [
    "CLOSED_REGION", "SLOTS", "Region", "amax_history", "buffer_names", "calibrate", "encode_scale", "ensure_buffers",
    "flush_backward", "flush_layer", "has_buffers", "note_forward", "note_recorded", "number_layer", "numbered",
    "previous_scale", "recomputation", "record_amax_", "record_compiled", "reset_scaling", "roll_alone",
    "scaled_layers", "update_delayed_", "update_scaling",
]  # fmt: skip

SLOTS = ("x", "w", "dy")
_NAMES = {slot: (f"scaling_{slot}_scale", f"scaling_{slot}_amax_history") for slot in SLOTS}


class _Pending(NamedTuple):
    """Something was recorded in a slot and not yet rolled; with `region` None only `update_scaling` rolls it."""

    delayed: Delayed
    maximum: float  # of the element
    group: Any
    region: "Region | None"


class _LayerState:
    """What is known of a layer besides its buffers, by slot."""

    __slots__ = ("pending", "previous", "rollers", "waits_in")

    def __init__(self) -> None:
        self.pending: dict[str, _Pending] = {}
        # The scales that one update replaced, and which of them is this slot's.
        self.previous: dict[str, tuple[torch.Tensor, int]] = {}
        # Prepared updates of x and w (False), and of dy with them (True).
        self.rollers: dict[bool, Roller] = {}
        # The thread's collection of layers with a dy to roll in which this one stands.
        self.waits_in: Any = None


# Kept beside the modules, not in them, so that pickling and deepcopy of a model never meet a process group.
_STATES: "weakref.WeakKeyDictionary[nn.Module, _LayerState]" = weakref.WeakKeyDictionary()
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
        self.failed = False  # left by an exception
        self._layers: list[weakref.ref[nn.Module]] = []

    def add(self, layer: nn.Module) -> None:
        """Remember a layer whose forward slots this region must roll."""
        if not self._layers or self._layers[-1]() is not layer:
            self._layers.append(weakref.ref(layer))

    def close(self, completed: bool = True) -> None:
        """Roll the forward slots recorded inside. After an exception nothing is rolled, nor is dy; amaxes stay live, so
        that the step may be taken again."""
        self.closed = self.failed = True  # until all is rolled
        if completed and self._layers:
            layers = [layer for reference in self._layers if (layer := reference()) is not None]
            _roll(layers, ("x", "w"), lambda entry: entry.region is self)
        self.failed = not completed
        self._layers.clear()


# The region of every layer that is called outside any autocast: closed as soon as its forward is done.
CLOSED_REGION = Region()
CLOSED_REGION.closed = True


def _state(layer: nn.Module) -> _LayerState:
    state = _STATES.get(layer)
    if state is None:
        state = _STATES[layer] = _LayerState()
    return state


def _pending(cast: Cast, group: Any, region: "Region | None") -> _Pending:
    return _Pending(cast.scaling, cast.format.element.max, group, region)  # type: ignore[arg-type]


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
    """Create the six buffers (scale 1, history 0), or fit the history length, keeping the newest amaxes.

    Buffers on meta are made anew where the weight has got its values meanwhile (``load_state_dict(assign=True)``).
    """
    length = delayed.amax_history_len
    for slot in SLOTS:
        scale_name, history_name = buffer_names(slot)
        history = layer._buffers.get(history_name)
        if history is None or history.is_meta:
            device = _tensor(layer.weight).device
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
    known = _state(layer).previous.get(slot)
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
    state = _state(layer)
    state.pending[slot] = _pending(cast, group, region)
    if slot != "dy" and region is not None:
        region.add(layer)
        _await_backward(layer, state)


def note_forward(layer: nn.Module, x_cast: Cast, w_cast: Cast | None, *, group: Any, region: Region) -> None:
    """`note_recorded` of x and of w (None: it was not) at once."""
    state = _state(layer)
    state.pending["x"] = _pending(x_cast, group, region)
    if w_cast is not None:
        state.pending["w"] = _pending(w_cast, group, region)
    region.add(layer)
    _await_backward(layer, state)


def _await_backward(layer: nn.Module, state: _LayerState) -> None:
    # Noted in forward and not in backward, which may run on another thread of the autograd engine.
    waiting = _LOCAL.__dict__.get("waiting")
    if waiting is None:
        waiting = _LOCAL.waiting = weakref.WeakKeyDictionary()
    if state.waits_in is not waiting:
        state.waits_in = waiting
        waiting[layer] = True


def roll_alone(layer: nn.Module, x_cast: Cast, w_cast: Cast | None, *, records: bool) -> None:
    """After a forward outside any autocast: roll x and w (None: not recorded), and the dy of an earlier backward.

    As if the layer had opened a region, which rolls dy, and closed it, which rolls x and w; dy's scale is read by the
    next backward at the earliest, so that one update serves all three.
    """
    state = _state(layer)
    pending = state.pending
    dy = pending.get("dy")
    if dy is not None and not _closed(dy):
        dy = None
    if records:
        _await_backward(layer, state)
        if w_cast is not None and _roll_prepared(layer, state, x_cast, w_cast, dy):
            pending.clear()  # x and w may have been pending since a region that an exception has left
            return
    if dy is not None:
        _update([(layer, "dy", dy)])
        del pending["dy"]
    if records:
        casts = (("x", x_cast), ("w", w_cast))
        batch = [(layer, slot, _pending(cast, None, CLOSED_REGION)) for slot, cast in casts if cast is not None]
        together = all(_agree(entry.delayed, batch[0][2].delayed) for _, _, entry in batch)
        for job in [batch] if together else [[entry] for entry in batch]:
            _update(job)
        for _, slot, _ in batch:
            pending.pop(slot, None)


def _agree(first: Delayed, second: Delayed) -> bool:
    return first is second or first == second


def _roll_prepared(layer: nn.Module, state: _LayerState, x_cast: Cast, w_cast: Cast, dy: _Pending | None) -> bool:
    """Roll x, w and (not None) dy in one prepared launch; False where none serves them."""
    delayed: Any = x_cast.scaling
    if w_cast.scaling is not delayed or reduces(delayed, None):
        return False
    maxima, slots = [x_cast.format.element.max, w_cast.format.element.max], SLOTS[:2]
    if dy is not None:
        if dy.group is not None or not _agree(dy.delayed, delayed):
            return False
        maxima.append(dy.maximum)
        slots = SLOTS
    roller = state.rollers.get(dy is not None)
    if roller is None or not roller.fits(layer._buffers, delayed, maxima):
        names = [name for slot in slots for name in _NAMES[slot]]
        roller = Roller([_tensor(layer._buffers[name]) for name in names], names, delayed, maxima)
        state.rollers[dy is not None] = roller
    if not roller.is_possible:
        return False
    previous = roller()
    for index, slot in enumerate(slots):
        state.previous[slot] = (previous, index)
    return True


def calibrate(
    layer: nn.Module, recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, group: Any,
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
            note_recorded(layer, slot, cast, group=group)


def numbered(number: int) -> nn.Module:
    """The layer of this number, for an operator of compiled code."""
    layer = _NUMBERED.get(number)
    if layer is None:
        raise NotSupportedError("compiled code: the layer that holds the delayed-scaling state was deleted.")
    return layer


def record_compiled(
    number: int, history: torch.Tensor, slot: str, amax: torch.Tensor, cast: Cast, region: Region | None, group: Any
) -> None:
    """`record` for compiled code: the layer by number, dy under the region of the layer's latest forward.

    `amax`: float32 [1], finite.
    """
    layer = numbered(number)
    if slot == "dy":
        region, group = _COMPILED.get(layer, (region, group))
    elif region is None or region.closed:
        raise NotSupportedError(
            "torch.compile: got a layer under delayed scaling outside any microfloat.torch.autocast, needed an "
            "enclosing one, because its exit is what updates the scales. Call the compiled function inside "
            "`with autocast():`."
        )
    else:
        _COMPILED[layer] = (region, group)
    torch.maximum(history[:1], amax, out=history[:1])
    note_recorded(layer, slot, cast, group=group, region=region)


@torch.no_grad()
def _roll(layers: Iterable[nn.Module], slots: tuple[str, ...], ready: Any) -> None:
    """Update the given slots of the given layers where something is pending and `ready(entry)` holds."""
    jobs: dict[tuple[Delayed, Any, torch.device], list[tuple[nn.Module, str, _Pending]]] = {}
    for layer in layers:
        entries = _state(layer).pending
        for slot in slots:
            entry = entries.get(slot)
            if entry is not None and ready(entry):
                key = (entry.delayed, entry.group, encode_scale(layer, slot).device)
                jobs.setdefault(key, []).append((layer, slot, entry))
    for batch in jobs.values():
        _update(batch)
        for layer, slot, _ in batch:
            _state(layer).pending.pop(slot, None)


def _update(batch: list[tuple[nn.Module, str, _Pending]]) -> None:
    """Roll slots that agree in recipe, group and device."""
    delayed, group = batch[0][2].delayed, batch[0][2].group
    histories, scales, maxima = [], [], []
    for layer, slot, entry in batch:
        scale_name, history_name = _NAMES[slot]
        scales.append(_tensor(layer._buffers[scale_name]))
        histories.append(_tensor(layer._buffers[history_name]))
        maxima.append(entry.maximum)
    previous = update_slots(histories, scales, delayed, maxima, group)
    for index, (layer, slot, _) in enumerate(batch):
        _state(layer).previous[slot] = (previous, index)


def _closed(entry: _Pending) -> bool:
    return entry.region is not None and entry.region.closed and not entry.region.failed


def flush_backward() -> None:
    """Roll dy of every layer of this thread whose region has closed and whose backward has run."""
    waiting = _LOCAL.__dict__.get("waiting")
    if waiting:
        layers = list(waiting)
        waiting.clear()
        for layer in layers:
            _state(layer).waits_in = None
        _roll(layers, ("dy",), _closed)


def flush_layer(layer: nn.Module) -> None:
    """Roll dy of one layer if its region has closed: before its state is read, and before it is used again."""
    if "dy" in _state(layer).pending:
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
        _STATES.pop(layer, None)
        for slot in SLOTS:
            scale_name, history_name = buffer_names(slot)
            _tensor(layer._buffers[scale_name]).fill_(1.0)
            _tensor(layer._buffers[history_name]).zero_()
