"""State of layers: their numbers, the six buffers of delayed scaling, and amaxes of inputs.

Each slot (x, w, dy) of a layer has two float32 buffers, ``scaling_<slot>_scale`` (the encode scale) and
``scaling_<slot>_amax_history`` (entry 0 is live). `regions` decides when a history moves on.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import nn

from microfloat.errors import NotSupportedError, invalid_value
from microfloat.recipes import Delayed
from microfloat.torch import backends
from microfloat.torch.scaling.history import NAMES, Slot

SLOTS = tuple(NAMES)
BUFFER_NAMES = tuple(name for names in NAMES.values() for name in names)


class LayerState:
    """State of a layer besides its buffers.

    Kept beside the modules, not in them, so that pickling and deepcopy of a model never meet a process group.
    """

    __slots__ = ("compiled", "latest", "layer", "number", "slots", "waits_in", "wrapper")

    def __init__(self, layer: nn.Module, number: int) -> None:
        self.layer = weakref.ref(layer, lambda _, remove=_STATES.pop: remove(number, None))
        self.number = number
        # Region and reduction group of the latest compiled forward, for the amax that its backward records.
        self.compiled: tuple | None = None
        self.reset()

    def reset(self) -> None:
        """Forget recorded and rolled amaxes."""
        self.slots = {name: Slot(name) for name in SLOTS}
        # The layers of a thread whose dy is to be rolled, if this layer is one of them.
        self.waits_in: dict[LayerState, None] | None = None
        # Region, reduction group and the thread's `waits_in` of the latest forward outside a backward, which a forward
        # that is recomputed inside a backward takes over.
        self.latest: tuple | None = None
        # The DistributedDataParallel that was told to leave the buffers alone.
        self.wrapper: weakref.ref | None = None


# Number of a layer that is alive -> its state: other ranks and operators of compiled code name layers by numbers.
_STATES: dict[int, LayerState] = {}
_NUMBERS = itertools.count()
_COPY = 1 << 32
_COPIES: dict[int, "itertools.count[int]"] = {}  # number of a layer that was copied -> numbers of its copies


def state_of(layer: nn.Module) -> LayerState:
    """The state of a layer besides its buffers; a layer without one gets it, and a number of its own.

    Compiled code and other ranks name the layer by the number, which counts the layers that the process has made. A
    copy has the number of its origin and, above it, a count of copies, so that a rank which copies or loads layers for
    itself counts its later layers as the other ranks do.
    """
    state = _STATES.get(layer.__dict__.get("_number", -1))
    if state is not None and state.layer() is layer:
        return state
    known = layer.__dict__.get("_number", -1)
    if known < 0:
        number = next(_NUMBERS)
    else:
        origin = known % _COPY
        number = origin + _COPY * next(_COPIES.setdefault(origin, itertools.count(1)))
    layer._number = number  # type: ignore[assignment]
    state = _STATES[number] = LayerState(layer, number)
    return state


def has_buffers(layer: nn.Module) -> bool:
    """True if the layer carries delayed-scaling state."""
    return NAMES["x"][0] in layer._buffers


def check_kept(layer: nn.Module) -> None:
    """Raise NotSupportedError in the backward of a layer that has lost its delayed-scaling state since its forward."""
    if not has_buffers(layer):
        raise NotSupportedError(
            "backward: got a layer whose delayed-scaling state was dropped since its forward (by "
            "microfloat.torch.revert, unpin, or a convert to another recipe), needed it until the backward is done. "
            "Change recipes between two steps."
        )


@torch.inference_mode(False)  # buffers of inference mode could not be updated outside of it
def ensure_buffers(layer: nn.Module, delayed: Delayed) -> None:
    """Create the six buffers (scale 1, history 0), or fit the history length, keeping the newest amaxes.

    Buffers on meta are made anew where the weight has got its values meanwhile (``load_state_dict(assign=True)``).
    """
    length = delayed.amax_history_len
    for slot in SLOTS:
        scale_name, history_name = NAMES[slot]
        history = layer._buffers.get(history_name)
        if history is None or history.is_meta:
            device = as_tensor(layer.weight).device
            layer.register_buffer(scale_name, torch.ones((), dtype=torch.float32, device=device))
            layer.register_buffer(history_name, torch.zeros(length, dtype=torch.float32, device=device))
        elif history.shape[0] != length:
            fitted = torch.zeros(length, dtype=torch.float32, device=history.device)
            fitted[0] = history[0]
            keep = min(length, history.shape[0]) - 1
            if keep:
                fitted[-keep:] = history[-keep:]
            layer._buffers[history_name] = fitted
    state_of(layer)


def encode_scale(layer: nn.Module, slot: str) -> torch.Tensor:
    """The live encode-scale buffer of a slot, float32 ()."""
    return as_tensor(layer._buffers[NAMES[slot][0]])


def amax_history(layer: nn.Module, slot: str) -> torch.Tensor:
    """The amax-history buffer of a slot, float32 [L]; entry 0 is live."""
    return as_tensor(layer._buffers[NAMES[slot][1]])


def static_amax(layer: nn.Module) -> torch.Tensor:
    """The amax of a layer's inputs, float32 (), that `microfloat.torch.calibrate` has measured; raises without one."""
    amax = getattr(layer, "input_amax", None)
    if amax is None:
        raise invalid_value(
            "input_amax", "none: the layer was never calibrated", "the amax of its inputs, for scales='static'",
            "Run data through the model: with microfloat.torch.calibrate(model): model(batch).",
        )  # fmt: skip
    return amax


def larger_amax(x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """The larger of the amax of x and `before`, float32 (); an amax of x that is not finite is left out."""
    amax = backends.amax_of(x.detach())
    before = torch.zeros_like(amax) if before is None else before.to(amax.device)
    return torch.where(torch.isfinite(amax), torch.maximum(before, amax), before)


def unwrap_buffers(layer: nn.Module) -> None:
    """Replace DTensors, which torch's styles make of buffers, by the local tensor of each, which casts read."""
    for name, buffer in layer._buffers.items():
        if hasattr(buffer, "placements"):
            layer._buffers[name] = buffer.to_local()  # type: ignore


def stamp_of(scale: torch.Tensor) -> tuple[int, int]:
    """A key of the values of a buffer: it changes when they do."""
    return scale.data_ptr(), scale._version


def as_tensor(value: Any) -> torch.Tensor:
    """`value` itself, typed as a tensor: nn.Module types its attributes as Tensor | Module | None."""
    return value


def layer_of(number: int) -> nn.Module | None:
    """The layer of this number, None if it was deleted."""
    state = _STATES.get(number)
    return None if state is None else state.layer()


def layers() -> list[nn.Module]:
    """Every layer that has a number and is alive."""
    found = [state.layer() for state in list(_STATES.values())]
    return [layer for layer in found if layer is not None]


def numbered(number: int) -> nn.Module:
    """The layer of this number, for an operator of compiled code."""
    layer = layer_of(number)
    if layer is None:
        raise NotSupportedError("compiled code: the layer that holds the delayed-scaling state was deleted.")
    return layer
