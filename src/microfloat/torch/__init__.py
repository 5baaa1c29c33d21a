"""The PyTorch front end: low-precision layers, autocast, conversion, and functions on tensors.

It needs torch >= 2.11 and never imports JAX. Every recipe runs on every device; `explain` says what is accelerated.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from microfloat.errors import missing_package

if find_spec("torch") is None:
    raise missing_package("torch", "microfloat.torch", "torch")

from microfloat import formats, recipes
from microfloat.recipes import (
    Cast,
    Current,
    Delayed,
    Gemm,
    Hadamard,
    Placement,
    Recipe,
    WeightActivation,
    WeightOnly,
    get_default_recipe,
)
from microfloat.support import Support
from microfloat.torch import array_casts  # noqa: F401  (registers them)
from microfloat.torch._tensor_ops import products  # noqa: F401  (fills its table)
from microfloat.torch._upper import tell
from microfloat.torch.attention import apply_rotary
from microfloat.torch.autocast import (
    AutocastState,
    autocast,
    checkpoint,
    fp8_autocast,
    get_autocast_recipe,
    get_autocast_state,
    is_autocast_enabled,
)
from microfloat.torch.convert import ConversionReport, convert, plain_state_dict, revert
from microfloat.torch.explain import (
    explain,
    get_align_size_for_quantization,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from microfloat.torch.exported import export
from microfloat.torch.flops import FLOP_FORMULAS
from microfloat.torch.inference import calibrate, quantize_
from microfloat.torch.loading import load_quantized, save_quantized
from microfloat.torch.model_init import fp8_model_init, quantized_model_init, update_quantized
from microfloat.torch.nn.attention import KVCache, MultiheadAttention, RotaryEmbedding
from microfloat.torch.nn.fused import LayerNormLinear, LayerNormMLP
from microfloat.torch.nn.grouped_linear import GroupedLinear, grouped_matmul
from microfloat.torch.nn.linear import Linear, linear
from microfloat.torch.nn.norms import LayerNorm, RMSNorm
from microfloat.torch.nn.options import LayerOptions
from microfloat.torch.nn.transformer import TransformerLayer
from microfloat.torch.ops import dequantize, fake_quantize, quantize, scaled_matmul
from microfloat.torch.packing import from_blocked, pack_fp4, pack_fp6, to_blocked, unpack_fp4, unpack_fp6
from microfloat.torch.scaling import reset_scaling, update_scaling
from microfloat.torch.seeds import set_seed_rank
from microfloat.torch.tensor import QuantizedTensor
from microfloat.torch.watch import Record, watch

tell({
    "run_sharded": "microfloat.torch.distributed.linear:run_sharded",
    "find_sharded": "microfloat.torch.distributed.linear:find_sharded",
    "beside": "microfloat.torch.distributed.tensor_parallel:beside",
    "tell_ranks": "microfloat.torch.distributed.quantized:tell_ranks",
    "shard_of_zeros": "microfloat.torch.distributed.quantized:shard_of_zeros",
    "quantize_sharded": "microfloat.torch.distributed.quantizing:quantize_sharded",
    "abstract_linear": "microfloat.torch.compiled:abstract_linear",
    "forget_schedules": "microfloat.torch.schedule:forget",
})  # fmt: skip

__all__ = [
    "FLOP_FORMULAS", "AutocastState", "Cast", "ConversionReport", "Current", "Delayed", "Gemm", "GroupedLinear",
    "Hadamard", "KVCache", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "LayerOptions", "Linear",
    "MultiheadAttention", "Placement", "QuantizedTensor", "RMSNorm", "Recipe", "Record", "RotaryEmbedding", "Support",
    "TransformerLayer", "WeightActivation", "WeightOnly", "apply_rotary", "autocast", "calibrate", "checkpoint",
    "convert", "dequantize", "explain", "export", "fake_quantize", "formats", "fp8_autocast", "fp8_model_init",
    "from_blocked", "get_align_size_for_quantization", "get_autocast_recipe", "get_autocast_state",
    "get_default_recipe", "grouped_matmul", "is_autocast_enabled", "is_fp8_available", "is_fp8_block_scaling_available",
    "is_mxfp8_available", "is_nvfp4_available", "linear", "load_quantized", "pack_fp4", "pack_fp6", "plain_state_dict",
    "quantize", "quantize_", "quantized_model_init", "recipes", "reset_scaling", "revert", "save_quantized",
    "scaled_matmul", "set_seed_rank", "to_blocked", "unpack_fp4", "unpack_fp6", "update_quantized", "update_scaling",
    "watch",
]  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    """`distributed` is imported when it is asked for: most programs run in one process."""
    if name == "distributed":
        return import_module(f"{__name__}.distributed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
