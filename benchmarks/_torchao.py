"""torchao's versions of what is measured, where it is importable: the peer that runs beside us in one process."""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["float8_training", "missing", "missing_training", "quantizers"]


def missing() -> str:
    """Reason why torchao cannot take part, "" if it can."""
    return "" if importlib.util.find_spec("torchao") else "torchao is not installed"


def missing_training(device: str) -> str:
    """Reason why torchao's float8 training cannot take part."""
    return missing() or ("" if device == "cuda" else "torchao's float8 training needs a CUDA device")


def float8_training(module: nn.Module, recipe: str) -> nn.Module:
    """`module` with its nn.Linear converted to torchao's float8 training; a bare Linear is wrapped first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    wrapped = nn.Sequential(module) if isinstance(module, nn.Linear) else module
    return convert_to_float8_training(wrapped, config=Float8LinearConfig.from_recipe_name(recipe))


def quantizers() -> dict[str, Callable[[torch.Tensor], Any]]:
    """torchao's quantization of the rows of a matrix by the id of the row it is a peer of, compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
    mode = mx_tensor.ScaleCalculationMode

    def compiled(function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        return torch.compile(function, dynamic=False)  # else the second shape is compiled for any size

    return {
        "q.mxfp8.row": compiled(lambda x: mx_tensor.to_mx(x, torch.float8_e4m3fn, 32, mode.RCEIL)),
        "q.mxfp4.row": compiled(lambda x: mx_tensor.to_mx(x, torch.float4_e2m1fn_x2, 32, mode.RCEIL)),
        "q.nvfp4.row": compiled(lambda x: nvfp4_tensor.nvfp4_quantize(x, 16)),
    }
