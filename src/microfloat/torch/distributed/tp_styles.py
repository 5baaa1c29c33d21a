"""Tensor and sequence parallel styles for `torch.distributed.tensor.parallel.parallelize_module`.

torch's own styles serve converted layers too. These gather under sequence parallelism what they can as codes and
scales: x of a column-parallel layer in forward, dy of a row-parallel one in backward. Between layers they leave tensors
plain where torch's make DTensors, each of which costs the host about as much as a product.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, parallel

from microfloat.errors import NotSupportedError
from microfloat.torch._typing import Arguments, WithBias
from microfloat.torch.distributed.tp_dtensor import AsPlaced, Placed, from_the_front
from microfloat.torch.distributed.tp_linear import Border
from microfloat.torch.nn.linear import Linear
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

Layouts = tuple[Placement, ...]
# Norms and dropouts run as torch has them; the DTensor that they return is gathered as codes by the layers behind them.
SequenceParallel = parallel.SequenceParallel


class _OfLinear:
    """The part of both styles of a Linear: it tells the layer its layouts, and lays the result out."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = module._parameters.get("weight")
        if isinstance(weight, QuantizedTensor):
            raise NotSupportedError(
                f"{type(self).__name__}: got a {type(module).__name__} whose weight is stored as codes "
                f"({weight.format}), needed values, which every rank casts. To train, shard the layer before it is "
                "quantized, or shard it by fully_shard. To serve on several GPUs, write the model by "
                "microfloat.torch.save_quantized, in a format that a serving engine reads (ct:nvfp4, say), and let "
                "vLLM or SGLang shard it."
            )
        style: Any = self
        made = super()._apply(module, device_mesh)  # type: ignore[misc]
        if isinstance(made, Linear):
            (x,), (y,) = style.input_layouts, style.output_layouts
            made.__dict__["_border"] = Border(x, y, style.use_local_output)
        return made

    def _prepare_output_fn(
        self, layouts: Layouts, use_local_output: bool, mod: nn.Module, outputs: WithBias, mesh: DeviceMesh
    ) -> WithBias:
        """y as the style lays it out; the bias that `return_bias` puts beside it was laid out by the layer."""
        if isinstance(outputs, tuple):
            return self._prepare_output_fn(layouts, use_local_output, mod, outputs[0], mesh), outputs[1]
        if not isinstance(outputs, DTensor):  # the layer knew that it is to be plain
            return outputs
        layouts = from_the_front(layouts, outputs.dim())
        return super()._prepare_output_fn(layouts, use_local_output, mod, outputs, mesh)  # type: ignore[misc]


class ColwiseParallel(_OfLinear, parallel.ColwiseParallel):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Shard a Linear's weight by its rows, as torch's style of the name, whose arguments it has.

    An input that is sharded by its sequence (``input_layouts=Shard(1)``) is cast first and gathered as codes and
    scales, to the same bytes, where these are fewer bytes and a layer's recipe casts it; ``print(layer.schedule(x))``
    says why not elsewhere. Layers that read one DTensor share what was gathered. Source: docs/distributed.md.
    """

    @staticmethod
    def _prepare_input_fn(  # pyright: ignore[reportIncompatibleMethodOverride]
        input_layouts: Layouts, desired_input_layouts: Layouts, mod: nn.Module, inputs: Arguments,
        device_mesh: DeviceMesh,
    ) -> torch.Tensor | None:  # fmt: skip
        x = inputs[0]
        if _is_taken(mod, x):
            return None
        if not isinstance(x, DTensor):
            x = _whole_of(x, input_layouts, device_mesh)
        placement = x.placements[0]  # of rows that are sharded, and nothing else
        is_sequence = len(x.placements) == 1 and type(placement) is Shard and placement.dim < x.dim() - 1
        if is_sequence and isinstance(mod, Linear) and mod.effective_recipe() is not None:
            return x
        prepare = parallel.ColwiseParallel._prepare_input_fn
        return prepare(x.placements, desired_input_layouts, mod, (x, *inputs[1:]), device_mesh)


class RowwiseParallel(_OfLinear, parallel.RowwiseParallel):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Shard a Linear's weight by its columns, as torch's style of the name, whose arguments it has.

    With an output that is sharded by its sequence (``output_layouts=Shard(1)``) the gradient is cast first and gathered
    as codes and scales, to the same bytes, where these are fewer bytes. Source: docs/distributed.md.
    """

    @staticmethod
    def _prepare_input_fn(  # pyright: ignore[reportIncompatibleMethodOverride]
        input_layouts: Layouts, desired_input_layouts: Layouts, mod: nn.Module, inputs: Arguments,
        device_mesh: DeviceMesh,
    ) -> torch.Tensor | None:  # fmt: skip
        if _is_taken(mod, inputs[0]):
            return None
        prepare = parallel.RowwiseParallel._prepare_input_fn
        return prepare(input_layouts, desired_input_layouts, mod, inputs, device_mesh)


def beside(layer: nn.Module, bias: torch.Tensor, dims: int) -> torch.Tensor:
    """The bias that a layer with `return_bias` returns with y of `dims` dimensions: plain where y will be plain.

    Where ranks hold rows of y, the gradients of a plain bias are parts of a sum.
    """
    assert isinstance(bias, DTensor)
    border: Border | None = layer.__dict__.get("_border")
    if border is None and any(
        getattr(hook, "__module__", "") == "torch.distributed.tensor._api" for hook in layer._forward_hooks.values()
    ):
        raise NotSupportedError(
            "return_bias: got True for a layer that a parallel style of torch lays out, which takes one result, needed "
            "one of microfloat.torch.distributed: ColwiseParallel or RowwiseParallel."
        )
    if border is None or not border.is_plain:
        return bias
    if border.y.is_partial():
        raise NotSupportedError(
            "return_bias: got output_layouts=Partial(), of which every rank would add the bias once, needed "
            "Replicate() or Shard(...)."
        )
    by_columns = type(border.y) is Shard and border.y.dim % dims == dims - 1
    lies = Shard(0) if by_columns else Replicate()
    gradient = Partial() if type(border.y) is Shard and not by_columns else lies
    return bias.redistribute(placements=(lies,)).to_local(grad_placements=(gradient,))


def _is_taken(layer: nn.Module, x: object) -> bool:
    """True where a layer with a border takes a plain shard as x, in eager mode and under a recipe."""
    border: Border | None = layer.__dict__.get("_border")
    return (
        border is not None and type(border.x) is Shard and isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
        and isinstance(layer, Linear) and not torch.compiler.is_compiling() and layer.effective_recipe() is not None
    )  # fmt: skip


def _whole_of(x: torch.Tensor, layouts: Layouts, mesh: DeviceMesh) -> DTensor:
    """The DTensor of a plain input."""
    is_replica = layouts[0].is_replicate() and mesh.ndim == 1 and not torch.compiler.is_compiling()
    if not is_replica or not isinstance(x, torch.Tensor) or not x.is_contiguous() or x.device.type != mesh.device_type:
        return DTensor.from_local(x, mesh, layouts, run_check=False)
    placed = Placed(mesh, layouts, x.shape)
    return AsPlaced.apply(x, placed, placed)
