"""State of layers: their numbers, the six buffers of delayed scaling and their update, and amaxes of inputs.

Each slot (x, w, dy) of a layer has two float32 buffers, ``scaling_<slot>_scale`` (the encode scale) and
``scaling_<slot>_amax_history`` (entry 0 is live). `regions` decides when a history moves on by one entry and gives the
new encode scale. One launch updates many slots where kernels run, else torch does (docs/numerics.md 3.3).
"""

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.recipes import Delayed
from microfloat.torch import backends
from microfloat.torch.backends.base import capturing
from microfloat.torch.scaling.amax_reduction import Group

if TYPE_CHECKING:
    from types import ModuleType

    from microfloat.torch.launch.triton import Slots

# Slot -> names of its buffers: encode scale and amax history.
NAMES = {slot: (f"scaling_{slot}_scale", f"scaling_{slot}_amax_history") for slot in ("x", "w", "dy")}
_LARGEST_SCALE = 2.0**126
_MOST_PREPARED = 16
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


def as_tensor(value: Any) -> torch.Tensor:
    """`value` itself, typed as a tensor: nn.Module types its attributes as Tensor | Module | None."""
    return value


def layer_of(number: int) -> nn.Module | None:
    """The layer of this number, None if it was deleted."""
    state = _STATES.get(number)
    return None if state is None else state.layer()


def layers() -> list[nn.Module]:
    """Every layer that has a number and was not deleted."""
    found = [state.layer() for state in list(_STATES.values())]
    return [layer for layer in found if layer is not None]


def numbered(number: int) -> nn.Module:
    """The layer of this number, for an operator of compiled code."""
    layer = layer_of(number)
    if layer is None:
        raise NotSupportedError("compiled code: the layer that holds the delayed-scaling state was deleted.")
    return layer


def _rolled(
    histories: torch.Tensor, scales: torch.Tensor, delayed: Delayed, maximum: float, live: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Histories [slots, L] and scales [slots] after the update; the arguments stay unchanged, so that this may fail."""
    histories = histories.clone()
    histories[:, 0] = live
    algo = delayed.amax_compute_algo
    if callable(algo):
        amax = torch.stack([_amax_by(algo, history) for history in histories])
    else:
        amax = histories.amax(1) if algo == "max" else histories[:, 0].clone()
    rolled = torch.roll(histories, -1, 1)
    rolled[:, 0] = 0.0
    largest = torch.full_like(amax, maximum)
    # Two tensors, because torch computes `number / tensor` through a reciprocal, which rounds twice.
    fresh = torch.div(largest, torch.clamp(amax, min=maximum * 2.0**-126)) * 2.0**-delayed.margin
    usable = (amax > 0) & torch.isfinite(amax)
    return rolled, torch.where(usable, torch.clamp(fresh, max=_LARGEST_SCALE), scales)


def _amax_by(algo: Callable, history: torch.Tensor) -> torch.Tensor:
    """The amax that a user's function computes from one history, float32 ()."""
    needed = "a function from a history, float32 [L], to one number"
    try:
        found = algo(history.clone())
    except Exception as error:
        got = f"a function that raised {type(error).__name__}: {error}"
        raise invalid_value("amax_compute_algo", got, needed) from error
    try:
        if isinstance(found, torch.Tensor) and found.is_complex():
            raise TypeError
        amax = torch.as_tensor(found, dtype=torch.float32, device=history.device)
    except Exception:
        raise invalid_type("amax_compute_algo", f"a function that returned {found!r}", needed) from None
    if amax.numel() != 1:
        raise invalid_value("amax_compute_algo", f"a function that returned shape {tuple(amax.shape)}", needed)
    return amax.reshape(())


class Pending(NamedTuple):
    """An amax that was recorded in a slot and not yet rolled; with `region` None only `update_scaling` rolls it."""

    delayed: Delayed
    maximum: float  # of the element
    group: Group
    region: Any  # a `regions.Region`, or None
    late: bool = False  # recorded by a forward inside a backward
    captured: bool = False  # into a CUDA graph, which rolls it itself when it is replayed


class Slot:
    """State of a slot of a layer besides its buffers."""

    __slots__ = ("history", "latest", "name", "pending", "prepared", "previous", "rolled", "scale")

    def __init__(self, name: str) -> None:
        self.name = name
        self.scale, self.history = NAMES[name]
        self.pending: Pending | None = None
        self.latest: Pending | None = None  # of dy: the latest of a backward outside any capture
        # The scales that one update replaced, and the index of this slot's.
        self.previous: tuple[torch.Tensor, int] | None = None
        # The latest roll where amaxes are reduced, by which an amax that only another rank has recorded is rolled.
        self.rolled: Pending | None = None
        # Updates that begin with this slot, at most 16, by all of their slots: their buffers and settings, their parts.
        self.prepared: dict[tuple[Slot, ...], tuple[list[tuple], list[_Part]]] = {}


# A layer, its slot to roll, and the pending amax.
Job = tuple[nn.Module, Slot, Pending]


class _Part(NamedTuple):
    """Jobs that agree in recipe, reduction group and device, and the launch that rolls their slots.

    `table`: the addresses of their buffers as the kernel takes them, None where no kernel runs.
    """

    kernel: Any
    table: "Slots | None"
    indices: list[int]


class Batch(NamedTuple):
    """Jobs that agree in recipe, reduction group and device, with the buffers of their slots."""

    part: _Part
    jobs: list[Job]
    histories: list[torch.Tensor]
    scales: list[torch.Tensor]

    def live(self) -> torch.Tensor:
        """The live amaxes, float32 [slots]."""
        table = self.part.table
        return torch.stack([history[0] for history in self.histories]) if table is None else table.gather_live()

    def roll(self, live: torch.Tensor | None = None) -> list[Job]:
        """Roll the slots with these amaxes (None: the live ones of the histories); returns the jobs."""
        kernel, table, _ = self.part
        if table is None:
            previous = update_by_torch(self, live)
        else:
            previous = kernel.update_delayed(table, self.jobs[0][2].delayed, live)
            torch._C._increment_version(self.histories + self.scales)  # a kernel's writes are not counted by themselves
        for index, (_, slot, entry) in enumerate(self.jobs):
            # A forward whose amax was recorded late has not used the replaced scales.
            slot.previous = None if entry.late else (previous, index)
        return self.jobs


def batches_of(jobs: list[Job]) -> list[Batch]:
    """The jobs, at least one, as batches; launches are prepared once for the same slots with the same buffers.

    Tables of a captured CUDA graph are empty before the graph's first replay, so they are not kept.
    """
    histories, scales, asked = [], [], []
    for layer, slot, entry in jobs:
        buffers: Any = layer._buffers
        history, scale = buffers[slot.history], buffers[slot.scale]
        histories.append(history)
        scales.append(scale)
        asked.append((entry.delayed, entry.maximum, entry.group, history.data_ptr(), scale.data_ptr()))
    slots = tuple([slot for _, slot, _ in jobs])
    prepared = slots[0].prepared
    known = prepared.get(slots)
    if known is None or known[0] != asked:
        if len(prepared) >= _MOST_PREPARED:  # a layer that is called together with ever other layers
            prepared.clear()
        known = asked, _prepare(asked, histories, scales)
        if not capturing():
            prepared[slots] = known
    if len(known[1]) == 1:
        return [Batch(known[1][0], jobs, histories, scales)]
    lists: list[list] = [jobs, histories, scales]
    return [Batch(part, *([one[index] for index in part.indices] for one in lists)) for part in known[1]]


def _prepare(asked: list[tuple], histories: list[torch.Tensor], scales: list[torch.Tensor]) -> list[_Part]:
    alike: dict[tuple, list[int]] = {}
    for index, (delayed, _, group, *_) in enumerate(asked):
        alike.setdefault((delayed, group, scales[index].device), []).append(index)
    parts = []
    for (delayed, _, device), indices in alike.items():
        part = _Part(None if callable(delayed.amax_compute_algo) else update_kernel(device), None, indices)
        if part.kernel is not None:
            of_part = zip(*[(histories[index], scales[index], asked[index][1]) for index in indices], strict=True)
            part = part._replace(table=part.kernel.slots_of(*map(list, of_part)))
        parts.append(part)
    return parts


def update_kernel(device: torch.device) -> "ModuleType | None":
    """The module with the kernel that updates many slots at once; None where kernels do not run."""
    return backends.choose("auto", device).producers


@torch.no_grad()
def update_by_torch(batch: Batch, live: torch.Tensor | None, where_recorded: bool = False) -> torch.Tensor:
    _, jobs, histories, scales = batch
    amaxes = [history[0] for history in histories] if live is None else live.unbind()
    alike: dict[tuple[int, float], list[int]] = {}
    for index, (_, _, entry) in enumerate(jobs):
        alike.setdefault((histories[index].shape[0], entry.maximum), []).append(index)
    made = []
    for (_, maximum), members in alike.items():
        old, old_scales, recent = (
            torch.stack([tensors[index] for index in members]) for tensors in (histories, scales, amaxes)
        )
        rolled, fresh = _rolled(old, old_scales, jobs[0][2].delayed, maximum, recent.clamp(min=0.0))
        if where_recorded:
            recorded = recent >= 0
            rolled, fresh = torch.where(recorded[:, None], rolled, old), torch.where(recorded, fresh, old_scales)
        made.append((members, rolled, fresh))
    previous = torch.stack(scales)
    for members, rolled, fresh in made:  # all of them or none
        copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        copy_all([histories[index] for index in members], list(rolled.unbind()))
        copy_all([scales[index] for index in members], list(fresh.unbind()))
    return previous
