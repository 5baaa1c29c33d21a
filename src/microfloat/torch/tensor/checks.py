"""Checks of arguments that several public functions take: errors that name the argument and what to do."""

import numbers
from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from microfloat.arguments import as_float
from microfloat.errors import MicrofloatError, NotSupportedError, invalid_type, invalid_value, kind_of
from microfloat.torch.reference._grid import transforms_active
from microfloat.torch.tensor.quantized_tensor import INPUT_DTYPES, QuantizedTensor


def with_path(error: MicrofloatError, path: str) -> MicrofloatError:
    """The same error, with the name of the layer in its text."""
    layer = f"(In the layer {path!r}.)"
    if path and layer not in str(error):
        error.args = (f"{error} {layer}",)
    return error


def check_tensor(argument: str, x: object) -> torch.Tensor:
    """The dense tensor of float32, bfloat16 or float16 itself; raises InvalidTypeError for anything else."""
    if isinstance(x, QuantizedTensor):
        raise _not_plain(argument, x, f"Call {argument}.dequantize() first.")
    return _dense(argument, x)


def _not_plain(argument: str, q: QuantizedTensor, remedy: str) -> MicrofloatError:
    return invalid_type(argument, f"a QuantizedTensor ({q.format})", "a plain tensor", remedy)


def _dense(
    argument: str, x: object, dimensions: int | None = None, shape: str = "", *, of_layer: bool = False
) -> torch.Tensor:
    """The tensor itself if it is dense, of a dtype that casts take, with this number of dimensions, if one is given.

    `of_layer`: the errors speak of quantized layers, whose operands they are.
    """
    if not isinstance(x, torch.Tensor):
        remedy = "" if of_layer else "Convert it with torch.as_tensor first."
        if type(x).__name__ == "Proxy":
            leaves = "let Tracer.is_leaf_module return True for microfloat's layers, as it does for nn.Linear."
            remedy = f"torch.fx: {leaves}"
        raise invalid_type(argument, type(x), "a torch.Tensor", remedy)
    if x.is_nested:
        remedy = "Pad it with torch.nested.to_padded_tensor, or give its values()."
        raise invalid_type(argument, "a nested tensor", "a dense (strided) tensor", remedy)
    if x.layout != torch.strided:
        remedy = f"Convert it with {argument}.to_dense()."
        raise invalid_type(argument, f"layout {x.layout}", "a dense (strided) tensor", remedy)
    if x.dtype not in INPUT_DTYPES:
        needed, remedy = (
            "torch.float32, torch.bfloat16 or torch.float16",
            f"Convert it with {argument}.to(torch.float32)",
        )
        if of_layer:
            needed, remedy = f"{needed} under a low-precision recipe", f"{remedy}, or run under autocast(enabled=False)"
        raise invalid_type(argument, x.dtype, needed, f"{remedy}.")
    if of_layer and hasattr(x, "fsdp_pre_all_gather"):
        raise NotSupportedError(
            f"{argument}: got one that low_precision_all_gather has prepared for fully_shard, and no fully_shard. "
            "Call torch.distributed.fsdp.fully_shard on the model, or leave low_precision_all_gather out."
        )
    if hasattr(x, "placements"):
        remedy = f"Give each rank its part: {argument}.to_local()."
        if of_layer:
            remedy = (
                "A weight that FSDP2 has not gathered runs when the module that fully_shard wrapped is called; a "
                "Linear on DTensors runs by itself, outside of norm_linear, activation_linear, norm_mlp and grouped "
                "products."
            )
        raise NotSupportedError(f"{argument}: got a DTensor, needed a plain tensor in this call. {remedy}")
    if dimensions is not None and x.dim() != dimensions:
        raise invalid_value(argument, f"shape {tuple(x.shape)}", shape)
    return x


def check_rows(x: object) -> None:
    """Raise for an `x` that is no tensor of one dimension or more."""
    if not isinstance(x, torch.Tensor):
        raise invalid_type("x", type(x), "a torch.Tensor")
    if x.is_nested:
        raise invalid_type("x", "a nested tensor", "a dense (strided) tensor", "Give its values() or pad it.")
    if x.dim() == 0:
        raise invalid_value("x", "shape ()", "a tensor with a last dimension: the features")


def check_beside(
    argument: str, tensor: torch.Tensor | None, x: torch.Tensor, remedy: str | None = None, of: str = "x"
) -> None:
    """Raise where a tensor is on another device than x."""
    if tensor is not None and tensor.device != x.device:
        remedy = f"Move it: .to({str(x.device)!r})." if remedy is None else remedy
        raise invalid_value(argument, f"a tensor on {tensor.device}", f"one on {x.device}, where {of} is", remedy)


def check_linear(x: object, weight: object, bias: object) -> None:
    """Raise where ``x @ weight.T + bias`` cannot run under a recipe: x [..., K], weight [N, K], bias [N] or None."""
    if isinstance(x, QuantizedTensor):
        remedy = "Call x.dequantize() first."
        if isinstance(weight, QuantizedTensor):
            remedy += " To multiply both as they are: torch.nn.functional.linear(x, weight, bias)."
        raise _not_plain("x", x, remedy)
    x = _dense("x", x, of_layer=True)
    features = check_linear_parameters(weight, bias, x)
    if x.dim() == 0 or x.shape[-1] != features:
        raise invalid_value("x", f"shape {tuple(x.shape)}", f"a last dimension of in_features = {features}")


def check_linear_parameters(weight: object, bias: object, x: torch.Tensor) -> int:
    """The in_features of a weight; raises where weight and bias are not [N, K] and [N] (or None) on x's device."""
    weight = _dense("weight", weight, 2, "a matrix [out_features, in_features]", of_layer=True)
    bias = None if bias is None else _dense("bias", bias, of_layer=True)
    if bias is not None and bias.shape != weight.shape[:1]:
        needed = f"shape ({weight.shape[0]},): one value for each row of the weight"
        raise invalid_value("bias", f"shape {tuple(bias.shape)}", needed)
    if x.device != weight.device and not weight.is_meta:
        needed, remedy = f"one on {weight.device}, where the weight is", f"Move it: x.to({str(weight.device)!r})."
        raise invalid_value("x", f"a tensor on {x.device}", needed, remedy)
    for name, parameter in (("weight", weight), ("bias", bias)):
        is_meta = parameter is not None and parameter.is_meta
        check_beside(name, parameter, x, "Give the layer its values first." if is_meta else None)
    return weight.shape[1]


def check_grouped(x: object, weight: object, bias: object) -> None:
    """Raise for anything but x [T, K], weight [G, N, K] and bias [G, N] (or None)."""
    for name, tensor in (("x", x), ("bias", bias)):
        if isinstance(tensor, QuantizedTensor):
            raise _not_plain(name, tensor, "Call dequantize() first.")
    x = _dense("x", x, 2, "a matrix [rows, in_features]", of_layer=True)
    needed = "one matrix for each group, [num_groups, out_features, in_features]"
    weight = _dense("weight", weight, 3, needed, of_layer=True)
    bias = None if bias is None else _dense("bias", bias, 2, "[num_groups, out_features]", of_layer=True)
    if not weight.shape[0]:
        raise invalid_value("weight", f"shape {tuple(weight.shape)}", "one group or more")
    if x.shape[1] != weight.shape[2]:
        needed = f"a last dimension of {weight.shape[2]}, the in_features of the weight"
        raise invalid_value("x", f"shape {tuple(x.shape)}", needed)
    if bias is not None and bias.shape != weight.shape[:2]:
        raise invalid_value("bias", f"shape {tuple(bias.shape)}", f"shape {tuple(weight.shape[:2])}")
    check_beside("weight", weight, x)
    check_beside("bias", bias, x)


def is_abstract(tensor: torch.Tensor) -> bool:
    """True for a tensor that has a shape and a dtype only: on the meta device, or of FakeTensorMode."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def check_model(model: object) -> None:
    """Raise InvalidTypeError for anything but a module of layers that can be looked at and changed."""
    if isinstance(model, type):
        remedy = f"Make an instance first: {model.__name__}(...)."
        raise invalid_type("model", kind_of(model), "a torch.nn.Module", remedy)
    if not isinstance(model, nn.Module):
        raise invalid_type("model", type(model), "a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        remedy = "TorchScript holds compiled code; use the module that it was made from."
        raise invalid_type("model", type(model), "an ordinary torch.nn.Module", remedy)


def check_features(argument: str, layers: Sequence[nn.Linear], features: int, source: str) -> None:
    """Raise where the in_features of a layer are not `features`, the number that `source` has."""
    for layer in layers:
        if layer.in_features != features:
            raise invalid_value(argument, f"in_features {layer.in_features}", f"{features}, the features of {source}")


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor, None where reading its values would wait for a device or break a trace."""
    is_hidden = torch.compiler.is_compiling() or transforms_active()
    return tensor if tensor.device.type == "cpu" and not is_hidden else None


def real_tensor(argument: str, value: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A number or a floating-point tensor as float32 on `device`."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() or isinstance(value, QuantizedTensor):
            raise invalid_type(argument, value.dtype, "a float32 number or tensor")
        if value.is_meta and device.type != "meta":
            raise invalid_value(argument, "a tensor on meta, without a value", f"one on {device}")
        return value.detach().to(device=device, dtype=torch.float32)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise invalid_type(argument, type(value), "a float32 number or tensor")
    return torch.tensor(as_float(argument, value), dtype=torch.float32, device=device)
