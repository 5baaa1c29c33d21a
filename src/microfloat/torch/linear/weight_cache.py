"""A weight between calls: the gradient that microbatches add up, the operands that they share, and its FSDP2."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from microfloat.errors import NotSupportedError, invalid_value
from microfloat.torch import backends
from microfloat.torch._typing import Layer
from microfloat.torch.backends.base import Operands, Parts, capturing
from microfloat.torch.linear.gathered_weight import Through, no_values
from microfloat.torch.scaling.amax_reduction import maxima
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def weights_of(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The weights that make up a joint weight; of any other weight itself."""
    return getattr(weight, "joined_of", (weight,))


def casts_late(layer: Layer, weight: torch.Tensor) -> bool:
    """True for a weight whose memory FSDP2 frees after each forward and fills again before its backward."""
    (weight, *_) = weights_of(weight)
    found = weight.__dict__.get("_casts_late")
    if found is None:
        found = any(
            getattr(owner, "_unsharded_param", None) is weight and owner.post_forward_mesh_info is not None
            for owner in fsdp_parameters(layer)
        )
        vars(weight)["_casts_late"] = found
    return found


def fsdp_parameters(layer: torch.nn.Module | Layer) -> list["FSDPParam"]:
    """FSDP2's objects for the parameters of a layer, which only the closure of its hook on loading gives away."""
    cells = [cell for hook in layer._load_state_dict_post_hooks.values() for cell in hook.__closure__ or ()]
    return [cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "post_forward_mesh_info")]


class MainGrad:
    """The `main_grad` of a weight, which a wgrad adds to: ``main_grad = round(f32(main_grad) + dw)``.

    dw is the float32 result of the product, not rounded before. Attributes of the weight, as Megatron-LM sets them:
    `grad_added_to_main_grad` (if it exists) becomes True, and autograd gets zeros in place of no gradient, so that its
    hooks run; `overwrite_main_grad` True asks to overwrite. Source: docs/numerics.md, section 6.
    """

    __slots__ = ("overwrites", "weight")

    def __init__(self, layer: Layer, weight: torch.Tensor, overwrites: bool) -> None:
        """Raises NotSupportedError for a weight that FSDP2 gathers, unless the gathered one has a `main_grad`."""
        self.weight = weight
        self.overwrites = overwrites
        if fsdp_parameters(layer) and not all(hasattr(one, "main_grad") for one in weights_of(weight)):
            raise NotSupportedError(
                "fuse_wgrad_accumulation: got True for a layer with a weight that FSDP shards, needed one whose "
                "gradient no reduce-scatter waits for. Leave it out of this layer: FSDP adds up gradients in float32 "
                "itself, of float32 parameters under MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
                "reduce_dtype=torch.float32)."
            )

    def add(self, dw: torch.Tensor) -> torch.Tensor | None:
        """Add a float32 gradient; returns the gradient that autograd passes on."""
        weights = weights_of(self.weight)
        if len(weights) == 1:
            return self._add(weights[0], dw)
        parts = dw.split([weight.shape[0] for weight in weights])
        passed = [self._add(weight, part) for weight, part in zip(weights, parts, strict=True)]
        zeros = next((part for part in passed if part is not None), None)
        return None if zeros is None else zeros[:1, :1].expand(dw.shape)

    def _add(self, weight: torch.Tensor, dw: torch.Tensor) -> torch.Tensor | None:
        main_grad = getattr(weight, "main_grad", None)
        needed = f"a tensor of shape {tuple(weight.shape)}, float32 or {weight.dtype}, on {weight.device}"
        if not isinstance(main_grad, torch.Tensor):
            remedy = "Set layer.weight.main_grad before the backward, or leave fuse_wgrad_accumulation out."
            raise invalid_value("weight.main_grad", "none" if main_grad is None else type(main_grad), needed, remedy)
        fits = main_grad.shape == weight.shape and main_grad.device == weight.device
        if not fits or main_grad.dtype not in (torch.float32, weight.dtype):
            got = f"{main_grad.dtype} {tuple(main_grad.shape)} on {main_grad.device}"
            raise invalid_value("weight.main_grad", got, needed)
        with torch.no_grad():
            if self.overwrites or getattr(weight, "overwrite_main_grad", False):
                main_grad.copy_(dw)
            else:
                main_grad.add_(dw)  # in float32, rounded once
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        vars(weight)["grad_added_to_main_grad"] = True
        return no_values(weight)


def without_rows(layer: Layer, weight: torch.Tensor, overwrites: bool) -> torch.Tensor:
    """Zeros in place of the values of a weight, for a call without rows; their gradient goes to its `main_grad`."""
    into = MainGrad(layer, layer.weight, overwrites)
    return Through.apply(weight, no_values, lambda dw: into.add(no_values(dw, torch.float32)))  # type: ignore


def plain_beside(layer: object, weight: torch.Tensor) -> list[torch.Tensor]:
    """The weights that share the scale of a layer's `weight`, itself among them; stored ones keep their own."""
    weights = [one.weight.detach() for one in getattr(layer, "_joint", ())] or [weight.detach()]
    return [one for one in weights if not isinstance(one, QuantizedTensor)]


def joint_amax(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest amax of weights that share a scale, float32 (), or [E] of experts; of shards that of all ranks."""
    measured = [_amaxes(weight).to(weights[0].device) for weight in weights]
    return measured[0] if len(measured) == 1 else torch.stack(measured).amax(0)


def _amaxes(weight: torch.Tensor) -> torch.Tensor:
    own = getattr(weight, "_local_tensor", weight)
    mesh = getattr(weight, "device_mesh", None)
    if own.is_meta or (mesh is not None and own.dim() == 3):
        got = "on the meta device" if own.is_meta else "of experts that ranks share"
        raise NotSupportedError(
            f"joint_scale: got a weight {got} beside one that is multiplied, needed all weights of a group, such as q, "
            "k and v, in memory at once. Put them under one fully_shard, and do not offload them one by one."
        )
    made = torch.stack([backends.amax_of(one) for one in own]) if own.dim() == 3 else backends.amax_of(own).clone()
    for axis in range(0 if mesh is None else mesh.ndim):
        (made,) = maxima(mesh.get_group(axis), [made])  # type: ignore[union-attr]
    return made


def amax_beside(layer: object, weight: torch.Tensor) -> torch.Tensor:
    """The amax behind the scale that the weight of a layer shares with those beside it; `weight`: where it has none.

    The first layer of a group that is called measures all weights, the others find its result while no weight has
    changed. The next call of that layer measures again, so that writes which torch does not count are seen too.
    """
    layers = getattr(layer, "_joint", ())
    if not layers:
        return joint_amax(plain_beside(layer, weight))
    weights, holder = [one.weight for one in layers], vars(layers[0])
    maker, kept = holder.get("_joint_amax", (layer, KeptWeight()))
    found = None if maker is layer else kept.find(weights, ())
    if found is None:
        found = Operands(Parts(joint_amax(plain_beside(layer, weight))))
        kept = KeptWeight()
        kept.keep(weights, (), found)
        holder["_joint_amax"] = layer, kept
    return found.row.codes


# A flag that the caller forgot must cost time and never correctness, so kept operands carry a stamp of their weight.
# torch counts the writes to a tensor (`_version`), but not the writes of its fused optimizers; these are seen by a hook
# that every optimizer runs after its step. Other writes (through ``.data``, by a collective, by a user's kernel, in the
# replay of a CUDA graph) cannot be seen.

# Stands for the latest step of any optimizer. An object and not a number, so that no two steps can make the same one.
_latest_step = object()


def latest_step() -> object:
    """An object that stands for the latest step of any optimizer."""
    return _latest_step


def _note_step(*_: object) -> None:
    global _latest_step
    _latest_step = object()


register_optimizer_step_post_hook(_note_step)


class KeptWeight:
    """The operands of one weight, and the state of the tensors from which they were made."""

    __slots__ = ("_entry", "may_copy")

    def __init__(self) -> None:
        self.clear()
        self.may_copy: bool | None = None  # the answer of `has_memory`, None before it was asked

    @property
    def answer(self) -> str:
        """The answer in words, "" before it was asked."""
        words = {True: "a dequantized copy serves calls of many rows", False: "no copy: too little free memory"}
        return "" if self.may_copy is None else words[self.may_copy]

    def clear(self) -> None:
        """Keep nothing."""
        # Replaced as a whole, so that threads see one or the other.
        self._entry: tuple[tuple[weakref.ref, ...], tuple, Operands] | None = None

    def find(self, weights: Sequence[torch.Tensor], key: tuple) -> Operands | None:
        """The operands if these are the tensors that they were made from, unchanged, and `key` is equal; else None."""
        entry = self._entry
        if entry is None:
            return None
        made_from, stamp, operands = entry
        tensors = _tensors_in(weights)
        same = len(made_from) == len(tensors) and all(one() is its for one, its in zip(made_from, tensors, strict=True))
        return operands if same and stamp == _stamp(weights, tensors, key) else None

    def keep(self, weights: Sequence[torch.Tensor], key: tuple, operands: Operands) -> None:
        """Keep `operands`, made from `weights`; `key` holds everything else that they depend on."""
        if not any(weight.is_inference() for weight in weights):  # their writes are not counted
            tensors = _tensors_in(weights)
            self._entry = tuple(weakref.ref(one) for one in tensors), _stamp(weights, tensors, key), operands


_LEFT_FREE = 1 / 8  # the part of a GPU's memory that copies leave free


def has_memory(device: torch.device, size: int) -> bool | None:
    """True if a GPU has `size` bytes for a copy, and an eighth of its memory besides; None on other devices."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + held - size >= total * _LEFT_FREE


def may_copy(layer: object, weight: torch.Tensor, itemsize: int) -> bool:
    """True if a layer may keep its stored weight dequantized: it asks once for memory.

    Functions keep nothing, and neither do layers of FSDP2 or with weights whose writes are not counted.
    """
    if not (isinstance(layer, torch.nn.Module) and isinstance(weight, QuantizedTensor)):
        return False
    if weight.is_inference() or not isinstance(weight, torch.nn.Parameter) or fsdp_parameters(layer):
        return False
    kept = layer.__dict__.setdefault("_weight_cache", KeptWeight())
    if kept.may_copy is None and not capturing():
        kept.may_copy = has_memory(weight.device, weight.numel() * itemsize)
    return bool(kept.may_copy)


def _tensors_in(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Plain weights, and the parts of quantized ones: `torch.utils.swap_tensors` gives a weight the parts of another.

    It refuses tensors that have weak references, so a plain weight of which something is kept cannot be swapped.
    """
    parts = [weight.part_list() if isinstance(weight, QuantizedTensor) else [weight] for weight in weights]
    return [part for its in parts for part in its]


def _stamp(weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], key: tuple) -> tuple:
    # torch counts the writes to a QuantizedTensor, and those of a user to its parts.
    state = [weight._version for weight in weights]
    state += [number for one in tensors for number in (one.data_ptr(), one._version)]
    # Operands that were made in inference mode cannot be saved for a backward.
    return *state, _latest_step, torch.is_inference_mode_enabled(), *key
