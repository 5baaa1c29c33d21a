"""Checks of arguments that several public functions take: errors that name the argument and what to do."""

import functools
import numbers
import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from microfloat.arguments import as_float, check_number
from microfloat.errors import MicrofloatError, NotSupportedError, invalid_type, invalid_value, kind_of
from microfloat.recipes import Cast
from microfloat.recipes.usages import given_amax, given_scale_enc
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

__all__ = [
    "INPUT_DTYPES", "check_amax", "check_beside", "check_eps", "check_features", "check_grouped", "check_like",
    "check_linear", "check_linear_parameters", "check_model", "check_parameter", "check_rows", "check_scale_enc",
    "check_tensor", "is_abstract", "readable", "real_tensor", "row_count", "with_path",
]  # fmt: skip

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def with_path(error: MicrofloatError, path: str) -> MicrofloatError:
    """The same error, whose text names the layer of a model that met it."""
    layer = f"(In the layer {path!r}.)"
    if path and layer not in str(error):
        error.args = (f"{error} {layer}",)
    return error


def check_tensor(argument: str, x: object) -> None:
    """Raise InvalidTypeError for what is no dense tensor of float32, bfloat16 or float16."""
    if isinstance(x, QuantizedTensor):
        raise invalid_type(
            argument, f"a QuantizedTensor ({x.format})", "a plain tensor", f"Call {argument}.dequantize() first."
        )
    if not isinstance(x, torch.Tensor):
        raise invalid_type(argument, type(x), "a torch.Tensor", "Convert it with torch.as_tensor first.")
    if x.dtype not in INPUT_DTYPES:
        raise invalid_type(
            argument,
            x.dtype,
            "torch.float32, torch.bfloat16 or torch.float16",
            f"Convert it with {argument}.to(torch.float32) first.",
        )
    if x.is_nested or x.layout != torch.strided:
        raise _not_dense(argument, x)
    if hasattr(x, "placements"):
        raise NotSupportedError(
            f"{argument}: got a DTensor, needed a plain tensor. Give each rank its part: {argument}.to_local()."
        )


def check_rows(argument: str, x: object) -> None:
    """Raise for what is no tensor of one dimension or more."""
    if not isinstance(x, torch.Tensor):
        raise invalid_type(argument, type(x), "a torch.Tensor")
    if x.is_nested:
        raise invalid_type(argument, "a nested tensor", "a dense (strided) tensor", "Give its values() or pad it.")
    if x.dim() == 0:
        raise invalid_value(argument, "shape ()", "a tensor with a last dimension: the features")


def check_like(argument: str, tensor: object, x: torch.Tensor, of: str = "x") -> None:
    """Raise where `tensor` is none of the shape, dtype and device of `x`."""
    if not isinstance(tensor, torch.Tensor):
        raise invalid_type(argument, type(tensor), f"a tensor like {of}")
    if tensor.shape != x.shape or tensor.dtype != x.dtype or tensor.device != x.device:
        got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        raise invalid_value(argument, got, f"a tensor like {of}: {x.dtype} {tuple(x.shape)} on {x.device}")


def row_count(shape: Sequence[int]) -> int:
    """The product of all sizes but the last, which may be symbols of a compiler."""
    rows = 1
    for size in shape[:-1]:
        rows = rows * size
    return rows


def check_beside(argument: str, tensor: torch.Tensor | None, x: torch.Tensor, remedy: str | None = None) -> None:
    """Raise where a tensor is on another device than x."""
    if tensor is not None and tensor.device != x.device:
        remedy = f"Move it: .to({str(x.device)!r})." if remedy is None else remedy
        raise invalid_value(argument, f"a tensor on {tensor.device}", f"one on {x.device}, where x is", remedy)


def check_parameter(argument: str, parameter: object, x: torch.Tensor) -> None:
    """Raise where a norm's weight or bias is neither None nor one value for each feature of `x`, beside it."""
    if parameter is None:
        return
    check_tensor(argument, parameter)
    assert isinstance(parameter, torch.Tensor)
    if tuple(parameter.shape) != tuple(x.shape[-1:]):
        needed = f"shape {tuple(x.shape[-1:])}: one value for each feature of x"
        raise invalid_value(argument, f"shape {tuple(parameter.shape)}", needed)
    check_beside(argument, parameter, x)


def check_linear(x: object, weight: object, bias: object) -> None:
    """Raise where ``x @ weight.T + bias`` cannot run under a recipe: x [..., K], weight [N, K], bias [N] or None."""
    if isinstance(x, QuantizedTensor):
        remedy = "Call x.dequantize() first."
        if isinstance(weight, QuantizedTensor):
            remedy += " To multiply both as they are: torch.nn.functional.linear(x, weight, bias)."
        raise invalid_type("x", f"a QuantizedTensor ({x.format})", "a plain tensor", remedy)
    _check_linear_tensor("x", x)
    assert isinstance(x, torch.Tensor)
    check_linear_parameters(weight, bias, x)
    assert isinstance(weight, torch.Tensor)
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        needed = f"a last dimension of in_features = {weight.shape[1]}"
        raise invalid_value("x", f"shape {tuple(x.shape)}", needed)


def check_linear_parameters(weight: object, bias: object, x: torch.Tensor) -> None:
    """Raise where these are no weight [N, K] and bias [N] (or None) beside x."""
    _check_linear_tensor("weight", weight)
    assert isinstance(weight, torch.Tensor)
    if weight.dim() != 2:
        raise invalid_value("weight", f"shape {tuple(weight.shape)}", "a matrix [out_features, in_features]")
    if bias is not None:
        _check_linear_tensor("bias", bias)
        assert isinstance(bias, torch.Tensor)
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
            needed = f"shape ({weight.shape[0]},): one value for each row of the weight"
            raise invalid_value("bias", f"shape {tuple(bias.shape)}", needed)
    if x.device != weight.device and not weight.is_meta:
        raise invalid_value(
            "x", f"a tensor on {x.device}", f"one on {weight.device}, where the weight is",
            f"Move it: x.to({str(weight.device)!r}).",
        )  # fmt: skip
    for name, parameter in (("weight", weight), ("bias", bias)):
        is_meta = parameter is not None and parameter.is_meta
        check_beside(name, parameter, x, "Give the layer its values first." if is_meta else None)


def check_grouped(x: object, weight: object, bias: object) -> None:
    """Raise where these are no x [T, K], weight [G, N, K] and bias [G, N] (or None)."""
    for name, tensor, dimensions, shape in (
        ("x", x, 2, "a matrix [rows, in_features]"),
        ("weight", weight, 3, "one matrix for each group, [num_groups, out_features, in_features]"),
        ("bias", bias, 2, "[num_groups, out_features]"),
    ):
        if tensor is None and name == "bias":
            continue
        if isinstance(tensor, QuantizedTensor) and name != "weight":
            raise invalid_type(
                name, f"a QuantizedTensor ({tensor.format})", "a plain tensor", "Call dequantize() first."
            )
        _check_linear_tensor(name, tensor)
        assert isinstance(tensor, torch.Tensor)
        if tensor.dim() != dimensions:
            raise invalid_value(name, f"shape {tuple(tensor.shape)}", shape)
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight, torch.Tensor)
    if not weight.shape[0]:
        raise invalid_value("weight", f"shape {tuple(weight.shape)}", "one group or more")
    if x.shape[1] != weight.shape[2]:
        needed = f"a last dimension of {weight.shape[2]}, the in_features of the weight"
        raise invalid_value("x", f"shape {tuple(x.shape)}", needed)
    if isinstance(bias, torch.Tensor) and bias.shape != weight.shape[:2]:
        raise invalid_value("bias", f"shape {tuple(bias.shape)}", f"shape {tuple(weight.shape[:2])}")
    check_beside("weight", weight, x)
    check_beside("bias", bias if isinstance(bias, torch.Tensor) else None, x)


def _check_linear_tensor(argument: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        leaf = "torch.fx: let Tracer.is_leaf_module return True for microfloat's layers, as it does for nn.Linear."
        raise invalid_type(argument, type(tensor), "a torch.Tensor", leaf if type(tensor).__name__ == "Proxy" else "")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise _not_dense(argument, tensor)
    if tensor.dtype not in INPUT_DTYPES:
        raise invalid_type(
            argument, tensor.dtype, "float32, bfloat16 or float16 under a low-precision recipe",
            "Convert it with .to(torch.float32), or run under autocast(enabled=False).",
        )  # fmt: skip
    if hasattr(tensor, "fsdp_pre_all_gather"):
        raise NotSupportedError(
            f"{argument}: got one that low_precision_all_gather has prepared for fully_shard, and no fully_shard. "
            "Call torch.distributed.fsdp.fully_shard on the model, or leave low_precision_all_gather out."
        )
    if hasattr(tensor, "placements"):
        raise NotSupportedError(
            f"{argument}: got a DTensor, needed a plain tensor in this call. A weight that FSDP2 has not gathered runs "
            "when the module that fully_shard wrapped is called; a Linear on DTensors runs by itself, outside of "
            "norm_linear, activation_linear, norm_mlp and grouped products."
        )


def _not_dense(argument: str, tensor: torch.Tensor) -> MicrofloatError:
    got, remedy = f"layout {tensor.layout}", f"Convert it with {argument}.to_dense()."
    if tensor.is_nested:
        got, remedy = "a nested tensor", "Pad it with torch.nested.to_padded_tensor, or give its values()."
    return invalid_type(argument, got, "a dense (strided) tensor", remedy)


def is_abstract(tensor: torch.Tensor) -> bool:
    """True for a tensor that has a shape and a dtype only: on the meta device, or of FakeTensorMode."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def check_eps(eps: object) -> float:
    """A norm's epsilon: a finite number, not negative."""
    return check_number("eps", eps, "a finite number, not negative", 0.0, sys.float_info.max)


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
    """Raise where one of the layers does not read `features` features, those of `source`."""
    for layer in layers:
        if layer.in_features != features:
            raise invalid_value(argument, f"in_features {layer.in_features}", f"{features}, the features of {source}")


def check_amax(amax: float | torch.Tensor | None, cast: Cast, rows: int, device: torch.device) -> torch.Tensor | None:
    """The amax that replaces the measured one: float32 () or [R, 1] on `device`."""
    return given_amax(amax, cast, rows, functools.partial(real_tensor, device=device), _read)


def check_scale_enc(scale_enc: float | torch.Tensor | None, delayed: bool, device: torch.device) -> torch.Tensor | None:
    """The encode scale of delayed scaling, float32 () on `device`: given if and only if the cast is `delayed`."""
    return given_scale_enc(scale_enc, delayed, functools.partial(real_tensor, device=device), _read)


def _read(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if readable(tensor) else None


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


def readable(tensor: torch.Tensor) -> bool:
    """True where values may be looked at without waiting for a device or breaking a trace."""
    return tensor.device.type == "cpu" and not (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    )
