"""Shards of parameters that exist as codes only: FSDP2 cuts them, and gathers codes and scales.

    sharded     each rank holds codes and scales of its rows           `QuantizedShard`, inside of FSDP2's DTensor
    gathered    the bytes of the whole parameter, for a layer's call   `QuantizedTensor`, as in one process
    loaded      each rank quantizes its rows                           under the amax of all ranks, if a scale needs it
    stepped     as in one process, where scales are those of rows      refused where one scale covers all ranks

Rows are cut as `torch.chunk` cuts them, so that the gathered rows of all ranks, one after another, are the parameter
and behind it what fills up the last shards. Tiles that a cut would tear are refused when `fully_shard` cuts them.

Legend: N = rows of the parameter, n = rows of a shard that is full, K = in features.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from microfloat.errors import NotSupportedError, invalid_type
from microfloat.layout import array_layout
from microfloat.recipes import Cast
from microfloat.torch import backends
from microfloat.torch.distributed.fsdp import compare_weight, refuse_fewer_ranks
from microfloat.torch.linear.weight_cache import fsdp_parameters
from microfloat.torch.scaling.amax_reduction import largest
from microfloat.torch.tensor import custom_ops as _operators
from microfloat.torch.tensor.aten_table import take
from microfloat.torch.tensor.aten_writes import quantize_stored, requantized
from microfloat.torch.tensor.quantized_tensor import INIT_VAL, QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


class Whole:
    """The parameter that a shard is cut from, which all views of the shard share.

    `shape`: of the parameter; `rows`: n; `group`: the ranks that have its shards, None before FSDP2 names them;
    `is_compared`: True once these ranks have found that they hold the same parameter.
    """

    def __init__(self, shape: torch.Size, rows: int) -> None:
        self.shape, self.rows, self.is_compared = shape, rows, False
        self.group: dist.ProcessGroup | None = None

    @property
    def first_row(self) -> int:
        """The row of the parameter with which this rank's shard begins."""
        return 0 if self.group is None else min(self.rows * dist.get_rank(self.group), self.shape[0])

    @property
    def own_rows(self) -> int:
        """The number of rows of this rank's shard."""
        return min(self.rows, self.shape[0] - self.first_row)

    @property
    def is_cut(self) -> bool:
        """True where other ranks have rows too."""
        return self.rows < self.shape[0]


class Metadata(NamedTuple):
    """Message of the hook before a gather to the one after it; `sizes`: bytes of each part that one buffer holds."""

    shape: torch.Size
    ranks: int
    sizes: tuple[int, ...] | None


class QuantizedShard(QuantizedTensor):
    """Rows of a quantized parameter that one rank holds, or memory for them.

    Reads and copies as a QuantizedTensor. New values, such as those of a plain checkpoint, are quantized as a part of
    the whole: where one scale covers all of it, every rank takes part in an all-reduce of the amax, and noise of
    stochastic rounding is that of the element in the whole parameter. An optimizer's step needs scales within rows.
    """

    whole: Whole
    _is_shard = True

    def _remade(
        self, codes: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor | None, *, axis: int,
        shape: Sequence[int], dtype: torch.dtype, root: QuantizedTensor | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        """A tensor of these parts: a shard as long as they are rows of the parameter."""
        are_rows = tuple(shape[1:]) == tuple(self.shape[1:]) and axis == self.axis
        kind, options = QuantizedShard if are_rows else QuantizedTensor, {"axis": axis, "shape": shape, "dtype": dtype}
        made = kind(codes, scale, tensor_scale, self.cast, root=root, **options)
        if isinstance(made, QuantizedShard):
            made.whole = self.whole
        return made

    def _about_parameter(self) -> dict:
        return vars(self.whole)

    def ends_at(self, row: int) -> bool:
        """True if only padding lies behind this row, or before FSDP2 has named the ranks."""
        return self.whole.group is None or row == self.whole.own_rows

    @property
    def shares_a_scale(self) -> bool:
        """True where one scale covers rows of several ranks."""
        return self.cast.takes_amax and not self.is_per_expert and self.upper.dim() == 0 and self.whole.is_cut

    def check_steps(self) -> None:
        """Refuse an optimizer's arithmetic where every write would need the amax of all ranks."""
        if self.shares_a_scale:
            raise NotSupportedError(
                f"step on a QuantizedTensor: got rows of a weight of shape {tuple(self.whole.shape)} that fully_shard "
                f"has cut and that has one scale for all ranks ({self.format}), needed a frozen weight, or scales "
                "within rows or blocks (mxfp8). Train master weights: build the layer without quantized_model_init, "
                "pin a recipe by convert, and call low_precision_all_gather before fully_shard, so that codes are "
                "gathered. A weight that stays as it is: weight.requires_grad_(False)."
            )

    def quantized(self, values: torch.Tensor, is_update: bool) -> QuantizedTensor:
        """Codes of plain float32 `values` of these rows, as a part of the whole parameter."""
        if is_update:
            return requantized(self, values, self._quantized)
        amax = largest(backends.amax_of(values), (self.writing_group(),)) if self.shares_a_scale else None
        return self._quantized(values, self.cast, amax)

    def writing_group(self) -> dist.ProcessGroup:
        """The ranks that write together; raises for a part of the rows, and before FSDP2 has named the ranks."""
        whole, got, needed, remedy = self.whole, "", "", ""
        if whole.group is None:
            got, needed = "a shard whose ranks are not known yet", "one that was gathered before"
            remedy = "Load values through the module (load_state_dict), or run a forward first."
        elif self.shape[0] != whole.own_rows:
            got, needed = f"{self.shape[0]} of the {whole.own_rows} rows of a shard", "all of them"
            remedy = "Write the sharded parameter as a whole, on all ranks."
        if got:
            raise NotSupportedError(
                f"write into a QuantizedTensor: got {got} under one scale for all ranks ({self.format} of shape "
                f"{tuple(whole.shape)}), needed {needed}. {remedy}"
            )
        assert whole.group is not None
        return whole.group

    def _quantized(self, values: torch.Tensor, cast: Cast, amax: torch.Tensor | None) -> QuantizedTensor:
        """Codes of float32 `values` of these rows under a Cast, equal to the rows of a cast of the whole."""
        first = self.whole.first_row if self.cast.is_stochastic and not self.is_per_expert else 0
        if first:  # rows in front of them, for the counters of the noise alone
            values = torch.cat([values.new_zeros((first, *values.shape[1:])), values])
        made = quantize_stored(values, cast, amax, self.is_per_expert)
        return made[first:] if first else made  # type: ignore[return-value]

    def fsdp_pre_all_gather(
        self, mesh: "DeviceMesh", outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module,
        mp_policy: "MixedPrecisionPolicy",
    ) -> tuple[tuple[torch.Tensor, ...], Metadata]:  # fmt: skip
        """Codes and scales of this shard as bytes: two vectors, or one buffer where shards are uneven."""
        refuse_fewer_ranks(module)
        self.whole.group = mesh.get_group()
        if not self.whole.is_compared:
            weight = f"{self.format} {tuple(outer_size)}, presented in {mp_policy.param_dtype or self.dtype}"
            compare_weight(mesh, module, getattr(module, "pinned", None), weight)
            self.whole.is_compared = True
        parts = [part.contiguous().view(-1).view(torch.uint8) for part in self.part_list()]
        rows, ranks = self.whole.rows, mesh.size()
        if ranks == 1:  # FSDP2 has no gather then, and copies the first input alone
            return (torch.cat(parts),), Metadata(outer_size, 1, tuple(part.numel() for part in parts))
        if rows * ranks == outer_size[0]:
            return tuple(parts), Metadata(outer_size, ranks, None)
        # FSDP2 asks uneven shards for inputs of the shape of a full shard, of any dtype that backends send.
        full = shard_of_zeros(self, rows)
        sizes = tuple(part.numel() * part.element_size() for part in full.part_list())
        shape = torch.Size((rows, *outer_size[1:]))
        dtype = torch.uint8 if sum(sizes) <= shape.numel() else torch.bfloat16
        if sum(sizes) > shape.numel() * dtype.itemsize:
            raise NotSupportedError(
                f"fully_shard: got uneven shards of a QuantizedTensor ({self.format}) of shape {tuple(outer_size)}, "
                "needed rows of more elements, whose codes and scales fit into two bytes for each. Shard it over a "
                "number of ranks that divides its rows."
            )
        buffer = torch.zeros(shape.numel() * dtype.itemsize, dtype=torch.uint8, device=self.device)
        for part, whole in zip(parts, buffer.split([*sizes, buffer.numel() - sum(sizes)]), strict=False):
            whole[: part.numel()].copy_(part)
        return (buffer.view(dtype).view(shape),), Metadata(outer_size, ranks, sizes)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Metadata, param_dtype: torch.dtype, *,
        out: torch.Tensor | None = None,
    ) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]] | None:  # fmt: skip
        """The parameter that a layer sees, over the gathered bytes or, where shards are uneven, over a copy."""
        if metadata.sizes is None:
            return None if out is not None else (self._over(outputs, metadata, param_dtype), ())
        (buffer,) = outputs
        by_rank = buffer.reshape(-1).view(torch.uint8).view(metadata.ranks, -1)
        shards = by_rank[:, : sum(metadata.sizes)].split(list(metadata.sizes), 1)
        gathered = [part.clone(memory_format=torch.contiguous_format).view(-1) for part in shards]
        made = self._over(gathered, metadata, param_dtype)
        if out is None:
            return made, tuple(made.part_list())
        seen = getattr(out, "_local_tensor", out)
        assert isinstance(seen, QuantizedTensor)
        # What is filled again is what autograd has saved.
        with torch.autograd._unsafe_preserve_version_counter(tuple(seen.part_list())):  # pyright: ignore[reportPrivateImportUsage]
            take(seen, made)
        return None

    def _over(self, gathered: Sequence[torch.Tensor], metadata: Metadata, dtype: torch.dtype) -> QuantizedTensor:
        """The parameter over the bytes of all ranks; where one scale serves all, the first rank's."""
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            needed = "torch.float32, torch.bfloat16 or torch.float16: what a QuantizedTensor may present"
            raise invalid_type("mp_policy.param_dtype", dtype, needed)
        layout = _shapes(self, metadata.shape)
        parts = {
            name: whole.view(part.dtype)[: torch.Size(layout[name]).numel()].view(layout[name])
            for whole, (name, part) in zip(gathered, self.parts().items(), strict=True)
        }
        return QuantizedTensor(
            parts["codes"], parts["scale"], parts.get("tensor_scale"), self.cast, axis=self.axis,
            shape=metadata.shape, dtype=dtype,
        )  # fmt: skip


def shard_of_zeros(q: QuantizedTensor, rows: int) -> QuantizedShard:
    """A shard of `rows` rows of a quantized parameter, or of another shard, filled with zeros."""
    shape, parts = torch.Size((rows, *q.shape[1:])), {}
    layout = _shapes(q, shape)
    for name, part in q.parts().items():
        size = torch.Size(layout[name]).numel() * part.element_size()
        parts[name] = torch.zeros(size, dtype=torch.uint8, device=part.device).view(part.dtype).view(layout[name])
    made = QuantizedShard(
        parts["codes"], parts["scale"], parts.get("tensor_scale"), q.cast, axis=q.axis, shape=shape, dtype=q.dtype
    )
    assert isinstance(made, QuantizedShard)
    made.whole = q.whole if isinstance(q, QuantizedShard) else Whole(q.shape, rows)
    if INIT_VAL in q._about_parameter():
        made.whole.__dict__.setdefault(INIT_VAL, None)  # of the rows, which are to be drawn
    return made


def tell_ranks(layer: nn.Module) -> None:
    """Tell the shards of a layer's parameters which ranks have the others, before the first gather does."""
    for owner in fsdp_parameters(layer):
        local = getattr(owner.sharded_param, "_local_tensor", None)
        if isinstance(local, QuantizedShard):
            local.whole.group = getattr(owner.mesh_info, "shard_process_group", None)


def _shapes(q: QuantizedTensor, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The shapes of the parts of a tensor like q of another number of rows."""
    layout = array_layout(_operators.storage_of(q.token), tuple(shape), q.axis)
    made = {name: tuple(part.shape) for name, part in zip(layout._fields, layout, strict=True) if part is not None}
    if q.is_per_expert:
        made["scale" if q.tensor_scale is None else "tensor_scale"] = (shape[0],)
    return made
