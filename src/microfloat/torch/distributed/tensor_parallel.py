"""Tensor and sequence parallel styles for `torch.distributed.tensor.parallel.parallelize_module`.

torch's own styles serve converted layers too. These gather under sequence parallelism what they can as codes and
scales: x of a column-parallel layer in forward, dy of a row-parallel one in backward.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, parallel

from microfloat.errors import NotSupportedError
from microfloat.torch._typing import Arguments
from microfloat.torch.nn.linear import Linear
from microfloat.torch.tensor import QuantizedTensor

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel"]

Layouts = tuple[Placement, ...]


class ColwiseParallel(parallel.ColwiseParallel):
    """Shard a Linear's weight by its rows, as torch's style of the name, whose arguments it has.

    An input that is sharded by its sequence (``input_layouts=Shard(1)``) is cast first and gathered as codes and
    scales, to the same bytes, where these are fewer bytes and a layer's recipe casts it; ``print(layer.schedule(x))``
    says why not elsewhere. Layers that read one DTensor share what was gathered. Source: docs/distributed.md.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _refuse_stored(module, "ColwiseParallel")
        return super()._apply(module, device_mesh)

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Layouts, desired_input_layouts: Layouts, mod: nn.Module, inputs: Arguments,
        device_mesh: DeviceMesh,
    ) -> DTensor:  # fmt: skip
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, device_mesh, input_layouts, run_check=False)
        if isinstance(mod, Linear) and mod.effective_recipe() is not None and _is_sequence(x):
            return x
        prepare = parallel.ColwiseParallel._prepare_input_fn
        return prepare(x.placements, desired_input_layouts, mod, (x, *inputs[1:]), device_mesh)


class RowwiseParallel(parallel.RowwiseParallel):
    """Shard a Linear's weight by its columns, as torch's style of the name, whose arguments it has.

    With an output that is sharded by its sequence (``output_layouts=Shard(1)``) the gradient is cast first and gathered
    as codes and scales, to the same bytes, where these are fewer bytes. Source: docs/distributed.md.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _refuse_stored(module, "RowwiseParallel")
        made = super()._apply(module, device_mesh)
        layout = self.output_layouts[0]
        if isinstance(made, Linear) and isinstance(layout, Shard):
            made.__dict__["_scatters"] = layout.dim
        return made


class SequenceParallel(parallel.SequenceParallel):
    """Run a norm or a dropout on inputs that are sharded by their sequence, as torch's style of the name.

    Its result is a DTensor, which the `ColwiseParallel` layers behind it gather as codes and scales.
    """


def _refuse_stored(module: nn.Module, style: str) -> None:
    """Raise NotSupportedError on every rank, before torch scatters the weight of the first one to those that wait."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, QuantizedTensor):
        raise NotSupportedError(
            f"{style}: got a layer whose weight is stored as codes ({weight.format}), needed values, which every rank "
            "casts. Build the layer without quantized_model_init or quantize_ and let its recipe quantize it, or shard "
            "it by fully_shard alone."
        )


def _is_sequence(x: DTensor) -> bool:
    """True for a tensor of rows that are sharded, and nothing else."""
    placement = x.placements[0]
    return len(x.placements) == 1 and type(placement) is Shard and placement.dim < x.dim() - 1
