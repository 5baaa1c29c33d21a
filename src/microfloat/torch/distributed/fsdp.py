"""FSDP2 with weights gathered as codes and scales: half of bfloat16's bytes under FP8 and MXFP8, 1/4 under NVFP4.

    before the gather   each rank casts the rows that it holds     w [N/ranks, K] -> codes, scales
    after it            codes and scales of all ranks              the bytes that a cast of the gathered weight has

Forward gathers the operand of fprop, backward that of dgrad, through the hooks that FSDP2 has for tensor subclasses.
A scale of the whole tensor needs the amax of all shards: one all-reduce per weight and step, or for all weights
together in `precompute_scales`. A weight whose shards cannot be cast alone is gathered in high precision, and `explain`
says why. Of a weight that a tensor-parallel plan has cut before, N and K are those of this rank's part, and the amax is
taken over the ranks of both.

Legend: N = out features, K = in features; n = N / ranks, the rows of a shard.
"""

import math
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from microfloat.errors import NotSupportedError, invalid_value
from microfloat.layout import layout_of
from microfloat.recipes import Cast, Delayed, Recipe
from microfloat.routes import routes_of
from microfloat.torch import backends
from microfloat.torch._typing import Arguments, Options, StateDict
from microfloat.torch.backends.base import Backend, Operand
from microfloat.torch.context import ambient
from microfloat.torch.convert.fuse import Fused
from microfloat.torch.distributed.collectives import all_gather, side_by_side
from microfloat.torch.linear.gathered_weight import Gather, Gathered, with_local
from microfloat.torch.linear.weight_cache import fsdp_parameters, latest_step
from microfloat.torch.nn.attention import MultiheadAttention
from microfloat.torch.nn.fused import LayerNormLinear
from microfloat.torch.nn.linear import Linear
from microfloat.torch.nn.merged import can_join
from microfloat.torch.scaling import buffers as layer_state
from microfloat.torch.scaling.amax_reduction import largest
from microfloat.torch.scaling.rank_errors import compare, in_collective
from microfloat.torch.tensor.checks import check_model
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

aten = torch.ops.aten


def low_precision_all_gather(model: nn.Module) -> nn.Module:
    """Let FSDP2 gather the weights of converted Linears as codes and scales; call it before `fully_shard`.

    The bytes of a step stay those of a gather in high precision. Layers whose weight cannot be gathered so keep that
    one: ``explain(model)`` names the reason. Weights that exist as codes only need no such call. Optimizers are made
    after `fully_shard`, as always, and see the values; state dicts hold plain tensors. Returns the model. Raises
    InvalidTypeError for anything but a module, InvalidValueError where the call comes too early or too late for all of
    its layers: before `convert`, or after `fully_shard`.

    >>> import microfloat.torch as mf
    >>> from microfloat.torch.distributed import low_precision_all_gather
    >>> model = nn.Sequential(nn.Linear(256, 256))
    >>> report = mf.convert(model, "fp8_current")
    >>> low_precision_all_gather(model)[0].weight.shape
    torch.Size([256, 256])
    """
    check_model(model)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    unready = {_unready(layer) for layer in layers} or {"it has no Linear of microfloat"}
    if "" not in unready:
        raise invalid_value(
            "model", f"a {type(model).__name__} without a weight to gather as codes ({'; '.join(sorted(unready))})",
            "layers that a recipe is pinned to", "Call convert, low_precision_all_gather, fully_shard, in this order.",
        )  # fmt: skip
    joint = set(_joint_layers(model))
    held = Counter(id(one) for module in model.modules() for one in module._parameters.values() if one is not None)
    for layer in layers:
        weight = layer._parameters.get("weight")
        if _is_ready(weight):
            continue
        state = layer.__dict__["_fsdp_state"] = WeightState()
        state.reason = (
            "it is one product with other weights" if layer in joint
            else "other modules share it" if held[id(weight)] > 1
            else _refusal(layer)
        )  # fmt: skip
        if not state.reason:
            state.casts = _casts_of(layer._pinned)
            _wrap(layer, None)
            layer.register_state_dict_post_hook(_unwrap)
            layer.register_load_state_dict_post_hook(_wrap)
    return model


@torch.no_grad()
def precompute_scales(model: nn.Module) -> None:
    """Measure the amaxes of all weights that are gathered in low precision, with one all-reduce for all of them.

    Call it after ``optimizer.step()``. Without it, the gather of each weight whose scale needs an amax waits for an
    all-reduce of its own. It changes no byte. Raises InvalidTypeError for anything but a module.
    """
    check_model(model)
    found: dict[tuple[dist.ProcessGroup, ...], list[tuple[WeightState, DTensor, torch.Tensor]]] = {}
    for layer in model.modules():
        state = layer.__dict__.get("_fsdp_state")
        weight = layer._parameters.get("weight")
        if state is None or not isinstance(weight, DTensor) or not isinstance(weight._local_tensor, FsdpWeight):
            continue
        if state.mesh is not None and any(cast.takes_amax or cast.is_delayed for cast in state.casts):
            values = state.cast_from(weight._local_tensor.plain)
            amax = backends.choose(layer.backend, values.device).amax(values)  # type: ignore[arg-type]
            found.setdefault(state.groups(), []).append((state, weight, amax))
    for groups, entries in found.items():
        amaxes = largest(torch.stack([amax for _, _, amax in entries]), groups)
        for (state, weight, _), amax in zip(entries, amaxes.unbind(), strict=True):
            state.amax, state.stamp = amax, _stamp(weight)


@dataclass(eq=False)
class WeightState:
    """State of the whole weight that its shards keep between gathers.

    `casts`: of fprop and dgrad; `reason`: why it is gathered in high precision; `mesh`: of the ranks that have shards;
    `cut`: the groups over which a plan has cut it before; `dtype`: of the values that are cast; `amax`: of all shards,
    while the weight has this `stamp`; of delayed scaling `scale_enc`, the encode scale of the latest forward, with the
    stamp of the buffer that it was copied from (`made_of`) and the amax (`recorded`).
    """

    casts: tuple[Cast, ...] = ()
    reason: str = ""
    mesh: Any = None
    cut: tuple[dist.ProcessGroup, ...] = ()
    dtype: torch.dtype | None = None
    amax: torch.Tensor | None = None
    stamp: tuple | None = None
    scale_enc: torch.Tensor | None = None
    made_of: tuple[int, int] | None = None
    recorded: torch.Tensor | None = None

    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of all ranks that hold a part of the weight."""
        return self.mesh.get_group(), *self.cut

    def cast_from(self, values: torch.Tensor) -> torch.Tensor:
        """The values in the dtype in which FSDP2 would gather them."""
        return values if self.dtype is None or values.dtype == self.dtype else values.to(self.dtype)

    def amax_of_all(self, weight: DTensor, values: torch.Tensor, backend: Backend) -> torch.Tensor:
        """The amax of all shards, measured once for each value of the weight."""
        stamp = _stamp(weight)
        if self.amax is None or self.stamp != stamp:
            self.amax, self.stamp = largest(backend.amax(values), self.groups()), stamp
        return self.amax

    def __deepcopy__(self, memo: dict[int, object]) -> "WeightState":
        made = memo[id(self)] = WeightState(self.casts, self.reason, cut=self.cut)
        return made


class Metadata(NamedTuple):
    """Message of the hook before a gather to the hook after it. `scale`: one of the whole tensor, or None."""

    gather: Gather
    transposed: bool
    codes_dtype: torch.dtype
    scale_dtype: torch.dtype
    scale: torch.Tensor | None
    tensor_scale: torch.Tensor | None
    shape: torch.Size


class FsdpWeight(torch.Tensor):
    """The values of a weight or of a shard, which FSDP2 gathers as codes. Every operation runs on `plain`."""

    plain: torch.Tensor
    state: WeightState

    @staticmethod
    def __new__(cls: type, values: torch.Tensor, state: WeightState) -> "FsdpWeight":
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=values.device,
        )  # fmt: skip

    def __init__(self, values: torch.Tensor, state: WeightState) -> None:
        self.plain, self.state = values, state

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"FsdpWeight({self.plain!r})"

    def __tensor_flatten__(self) -> tuple[list[str], WeightState]:
        return ["plain"], self.state

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, torch.Tensor], state: WeightState, outer_size: object, outer_stride: object
    ) -> "FsdpWeight":
        return FsdpWeight(parts["plain"], state)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, func: torch._ops.OpOverload, types: object, args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        made = func(*tree_map(_values_of, args), **tree_map(_values_of, kwargs or {}))
        if func not in _KEEPING:
            is_in_place = func._schema.name.endswith("_") and args and isinstance(args[0], FsdpWeight)
            return args[0] if is_in_place else made
        state = args[0].state
        if func is aten.split.Tensor and args[0].dim() == 2 and not state.reason:  # `fully_shard` cuts it into shards
            state.reason = _refusal_of_shards(args[0], args[1], args[2] if len(args) > 2 else 0)
        if state.reason:
            return made
        return tree_map(lambda one: FsdpWeight(one, state) if isinstance(one, torch.Tensor) else one, made)

    def fsdp_pre_all_gather(
        self, mesh: "DeviceMesh", outer_size: torch.Size, outer_stride: tuple[int, ...], module: Linear,
        mp_policy: "MixedPrecisionPolicy",
    ) -> tuple[tuple[torch.Tensor, ...], Metadata]:  # fmt: skip
        """Codes and scales of this shard as bytes, for fprop or dgrad, and the message to the other hook."""
        state, recipe = self.state, module._pinned
        if not isinstance(recipe, Recipe) or _casts_of(recipe) != state.casts:
            raise NotSupportedError(
                f"low_precision_all_gather: got another recipe for {module._path or 'a layer'} "
                f"({type(recipe).__name__}) than it had then, needed the same one, for whose bytes the buffers were "
                "made. Pin recipes first, then call low_precision_all_gather and fully_shard."
            )
        refuse_fewer_ranks(module)
        if state.mesh is None:
            compare_weight(mesh, module, recipe, f"{mp_policy.param_dtype or self.dtype} {tuple(outer_size)}")
        state.mesh, state.dtype = mesh, mp_policy.param_dtype
        values, is_backward = state.cast_from(self.plain), torch._C._current_graph_task_id() != -1
        backend = backends.choose(module.backend, values.device)
        gather = Gather(state.casts, values.dtype, Source(self, mesh, backend, outer_size))
        weight = typing.cast(DTensor, module._parameters["weight"])
        if any(cast.is_delayed for cast in state.casts):
            if state.scale_enc is None or not is_backward:
                layer_state.unwrap_buffers(module)
                live = layer_state.encode_scale(module, "w")
                state.scale_enc, state.made_of = live.clone(), (live.data_ptr(), live._version)
                known = state.amax is not None and state.stamp == _stamp(weight)
                delayed = next(cast.scaling for cast in state.casts if isinstance(cast.scaling, Delayed))
                around = ambient()  # without a group, scales take the maximum over all ranks when they are updated
                apart = not known and delayed.reduce_amax and (around is None or around.group is None)
                state.recorded = backend.amax(values) if apart else state.amax_of_all(weight, values, backend)
            gather.scale_enc, gather.amax, gather.made_of = state.scale_enc, state.recorded, state.made_of
        elif any(cast.takes_amax for cast in state.casts):
            gather.amax = state.amax_of_all(weight, values, backend)
        transposed = is_backward and _reads_transposed(recipe, state.casts, backend, values.device)
        return _cast_shard(values, gather, transposed)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Metadata, param_dtype: torch.dtype, *,
        out: torch.Tensor | None = None,
    ) -> tuple[Gathered, tuple] | None:  # fmt: skip
        """The weight that layers see: a `Gathered` over the gathered bytes."""
        gather = metadata.gather
        gather.gathered[metadata.transposed] = outputs, metadata
        for tensor in (metadata.scale, metadata.tensor_scale, gather.scale_enc, gather.amax):
            if tensor is not None and tensor.is_cuda:  # made on the stream of the gather
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        if out is None:
            return Gathered(gather, metadata.shape, self.device), ()
        seen = out._local_tensor if isinstance(out, DTensor) else out
        assert isinstance(seen, Gathered)
        vars(seen.contents).update(vars(gather))
        return None


_PLAIN = (torch.Tensor, nn.Parameter)
_KEEPING = {
    aten.detach.default, aten.alias.default, aten.clone.default, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, aten.view.default, aten._unsafe_view.default, aten.as_strided.default,
    aten.new_zeros.default, aten.new_empty.default, aten.empty_like.default, aten._to_copy.default,
    aten._pin_memory.default, aten.lift_fresh.default,
}  # fmt: skip


def _values_of(value: object) -> object:
    return value.plain if isinstance(value, FsdpWeight) else value


def _unwrap(layer: nn.Module, state_dict: StateDict, prefix: str, metadata: object) -> None:
    """Put plain tensors of the same memory into a state dict that was made."""
    weight = state_dict.get(prefix + "weight")
    own: Any = layer._parameters["weight"]
    if isinstance(weight, DTensor) and isinstance(weight._local_tensor, FsdpWeight):
        with torch.no_grad():
            state_dict[prefix + "weight"] = with_local(weight, own._local_tensor.plain)
    elif isinstance(weight, FsdpWeight):
        state_dict[prefix + "weight"] = own.plain


def _wrap(layer: Any, keys: object) -> None:
    """Make the weight one that FSDP2 gathers as codes; again after ``load_state_dict(assign=True)`` replaced it."""
    weight, state = layer._parameters["weight"], layer.__dict__["_fsdp_state"]
    if state.reason or isinstance(getattr(weight, "_local_tensor", weight), FsdpWeight):
        return
    if isinstance(weight, DTensor):
        if keys is None:  # a plan has cut it, and FSDP2 will
            mesh = weight.device_mesh
            state.cut = tuple(mesh.get_group(i) for i, one in enumerate(weight.placements) if one.is_shard())
        weight._local_tensor = FsdpWeight(weight._local_tensor, state)
    else:
        layer.weight = nn.Parameter(FsdpWeight(weight.detach(), state), requires_grad=weight.requires_grad)


def _casts_of(recipe: Recipe) -> tuple[Cast, ...]:
    """The casts of the weight in fprop and in dgrad; empty if a GEMM reads the weight in high precision."""
    same = recipe.dgrad.from_fprop or recipe.dgrad.path == "refused"
    first, second = recipe.fprop.rhs, recipe.fprop.rhs if same else recipe.dgrad.rhs
    return () if first is None or second is None else (first, second)


def _is_ready(weight: object) -> bool:
    """True for a weight that needs no preparation: it is prepared, or exists as codes, which FSDP2 gathers anyway."""
    return isinstance(getattr(weight, "_local_tensor", weight), FsdpWeight | QuantizedTensor)


def _unready(layer: Linear) -> str:
    """Reason why it is too early or too late to prepare a layer, or ""."""
    weight = layer._parameters.get("weight")
    if _is_ready(weight):
        return ""
    if not isinstance(layer._pinned, Recipe):
        return "no recipe is pinned to it (convert pins one)"
    if isinstance(weight, DTensor) and fsdp_parameters(layer):
        return "fully_shard came before low_precision_all_gather"
    return ""


def _refusal(layer: Linear) -> str:
    """Reason for gathering a layer's weight in high precision, however it will be sharded, or ""."""
    weight, recipe = layer._parameters.get("weight"), layer._pinned
    if unready := _unready(layer):
        return unready
    if not isinstance(weight, nn.Parameter) or type(getattr(weight, "_local_tensor", weight)) not in _PLAIN:
        return f"its weight is a {type(weight).__name__}"
    casts = _casts_of(recipe)
    if not casts:
        return "a GEMM reads it in high precision"
    for cast in casts:
        if cast.is_stochastic or cast.hadamard is not None or cast.is_static:
            return f"the cast of a weight by {cast} depends on more than its shard"
        if cast.format.block == (1, None) or cast.tensor_scale == "row":
            return f"{cast.format.name} has a scale for each row, which shards cut when it is transposed"
    return ""


def _refusal_of_shards(weight: FsdpWeight, rows: int, dim: int) -> str:
    """Reason for gathering a weight in high precision that is cut into shards of `rows` rows, or ""."""
    if dim:
        return f"it is sharded along dimension {dim}"
    (all_rows, length), sizes = weight.shape, []
    if rows == all_rows:  # FSDP2 has no gather then, and copies the first input alone
        return "one rank has all of it"
    if all_rows % rows:
        return f"shards of its {all_rows} rows are uneven"
    for cast, transposed in zip(weight.state.casts, (False, True), strict=True):
        block, per_byte = cast.format.block, cast.format.element.codes_per_byte
        unit = max(block[transposed] or 1, per_byte if transposed else 1)
        if rows % unit:
            return f"shards of {rows} rows are no whole blocks of {unit} ({cast.format.name})"
        layout = layout_of(cast, *((length, rows) if transposed else (rows, length)))
        sizes.append([0 if part is None else math.prod(part.shape) for part in layout[:2]])
    if sizes[0] != sizes[1]:
        return f"its {length} columns are no whole blocks, so that both gathers would differ in size"
    return ""


def refuse_fewer_ranks(layer: nn.Module) -> None:
    """Raise where FSDP2 would keep the weight on fewer ranks after forward, which it can do with values alone."""
    for owner in fsdp_parameters(layer):
        kept = owner.post_forward_mesh_info
        if kept is not None and kept.shard_mesh_size != getattr(owner.mesh_info, "shard_mesh_size", None):
            name = getattr(layer, "_path", "") or "a layer"
            raise NotSupportedError(
                f"reshard_after_forward: got {kept.shard_mesh_size} ranks for {name}, "
                "needed True or False for weights that are gathered as codes, since FSDP2 keeps shards on fewer ranks "
                "of values alone. Choose one of them, or leave out low_precision_all_gather and quantized_model_init."
            )


def _joint_layers(model: nn.Module) -> Iterator[Linear]:
    """Layers whose weights are joined to one matrix, which is cast and multiplied as a whole."""
    for module in model.modules():
        attention = getattr(module, "self_attn", None) if isinstance(module, Fused) else module
        if isinstance(module, LayerNormLinear):
            layers = module.layers
        elif isinstance(attention, MultiheadAttention) or attention is not module:
            layers = tuple(getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj"))
        else:
            continue
        linears = [layer for layer in layers if isinstance(layer, Linear)]
        if len(linears) == len(layers) and can_join(linears):
            yield from linears


class Source(NamedTuple):
    """A shard and its ranks, from which a `Gather` gathers what FSDP2 has not gathered."""

    shard: FsdpWeight
    mesh: "DeviceMesh"
    backend: Backend
    shape: torch.Size

    def operand(self, gather: Gather, transposed: bool) -> Operand:
        """The operand of the other pass: under activation checkpointing, and without a reshard after forward."""
        parts, metadata = _cast_shard(self.shard.state.cast_from(self.shard.plain), gather, transposed)
        return self.operand_of(([self._gather(part) for part in parts], metadata))

    def values(self) -> torch.Tensor:
        """The values of the weight: for another recipe or dtype than was gathered."""
        values = self.shard.state.cast_from(self.shard.plain)
        return self._gather(values.reshape(-1)).view(self.shape)

    def operand_of(self, gathered: tuple[Sequence[torch.Tensor], Metadata]) -> Operand:
        """The operand in gathered bytes, as a view; as a copy where it is transposed, with shards of [K, n]."""
        outputs, metadata = gathered
        cast, transposed = metadata.gather.casts[metadata.transposed], metadata.transposed
        rows, length = self.shape[::-1] if transposed else self.shape
        layout, made = layout_of(cast, rows, length), []
        for output, part, dtype in zip(outputs, layout, (metadata.codes_dtype, metadata.scale_dtype), strict=False):
            assert part is not None
            if transposed and self.mesh.size() > 1:
                output = side_by_side(output.view(self.mesh.size(), part.shape[0], -1))
            made.append(output.view(dtype).view(part.shape))
        scale = made[1] if metadata.scale is None else metadata.scale
        return Operand(made[0], scale, metadata.tensor_scale, cast.format, rows, length)

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        whole, group = part.new_empty(part.numel() * self.mesh.size()), self.mesh.get_group()
        with in_collective("the all-gather of a sharded weight", group):
            all_gather(whole, part.contiguous(), group=group)
        return whole


def _reads_transposed(recipe: Recipe, casts: Sequence[Cast], backend: Backend, device: torch.device) -> bool:
    """True where backward gathers the transposed operand: it differs, or saves transposing codes of one byte."""
    if recipe.dgrad.from_fprop or recipe.dgrad.path == "refused":
        return False
    is_one = casts[0] == casts[1] and casts[0].transposes
    return not is_one or routes_of(recipe, backend.chip_of(device)).dgrad.rhs == "codes"


def _cast_shard(values: torch.Tensor, gather: Gather, transposed: bool) -> tuple[tuple[torch.Tensor, ...], Metadata]:
    casts: list[Cast | None] = [None, None]
    cast = casts[transposed] = gather.casts[transposed]
    options = {"scale_enc": gather.scale_enc} if cast.is_delayed else {"amax": gather.amax} if cast.takes_amax else {}
    operand: Operand = gather.source.backend.quantize_both(values, *casts, **options)[transposed]
    is_one = operand.scale.dim() == 0
    metadata = Metadata(
        gather, transposed, operand.codes.dtype, operand.scale.dtype, operand.scale if is_one else None,
        operand.tensor_scale, gather.source.shape,
    )  # fmt: skip
    parts = (operand.codes,) if is_one else (operand.codes, operand.scale)
    return tuple(part.contiguous().view(-1).view(torch.uint8) for part in parts), metadata


def compare_weight(mesh: "DeviceMesh", layer: nn.Module, recipe: object, weight: str) -> None:
    """Compare a layer's weight between ranks before its first gather, which parts of other sizes would end badly."""
    name = getattr(layer, "_path", "") or type(layer).__name__
    facts = {"the layer": repr(name), f"the recipe of {name!r}": recipe, f"the weight of {name!r}": weight}
    compare(mesh.get_group(), "fully_shard", facts)


def _stamp(weight: Any) -> tuple:
    """A value that changes with the weight, like the stamps of `linear.weight_cache`."""
    local = weight._local_tensor
    return weight._version, local._version, local.plain._version, local.plain.data_ptr(), latest_step()
