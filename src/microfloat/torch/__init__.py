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
from microfloat.pictures import compare
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
from microfloat.torch._upper import tell
from microfloat.torch.autocast import (
    AutocastState,
    autocast,
    checkpoint,
    fp8_autocast,
    get_autocast_recipe,
    get_autocast_state,
    is_autocast_enabled,
)
from microfloat.torch.compile.export import export
from microfloat.torch.compile.flops import FLOP_FORMULAS
from microfloat.torch.convert.explain import (
    explain,
    get_align_size_for_quantization,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from microfloat.torch.convert.swap import ConversionReport, convert, plain_state_dict, revert
from microfloat.torch.inference.load import load_quantized
from microfloat.torch.inference.quantize import calibrate, quantize_
from microfloat.torch.inference.save import save_quantized
from microfloat.torch.nn import quantized_products as products  # noqa: F401  (fills its table)
from microfloat.torch.nn.attention import KVCache, MultiheadAttention, RotaryEmbedding
from microfloat.torch.nn.experts import register_experts
from microfloat.torch.nn.functional import linear_cross_entropy
from microfloat.torch.nn.fused import LayerNormLinear, LayerNormMLP
from microfloat.torch.nn.grouped_linear import GroupedLinear, grouped_matmul
from microfloat.torch.nn.linear import Linear, linear
from microfloat.torch.nn.norms import LayerNorm, RMSNorm
from microfloat.torch.nn.options import LayerOptions
from microfloat.torch.nn.quantized_init import fp8_model_init, quantized_model_init, update_quantized
from microfloat.torch.nn.sdpa import apply_rotary
from microfloat.torch.nn.transformer import TransformerLayer
from microfloat.torch.reference import array_casts  # noqa: F401  (registers them)
from microfloat.torch.scaling.regions import reset_scaling, update_scaling
from microfloat.torch.tensor import aten_reads, aten_writes  # noqa: F401  (fill the table of operators)
from microfloat.torch.tensor.ops import dequantize, fake_quantize, quantize, scaled_matmul
from microfloat.torch.tensor.packing import from_blocked, pack_fp4, pack_fp6, to_blocked, unpack_fp4, unpack_fp6
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor
from microfloat.torch.tensor.seeds import set_seed_rank
from microfloat.torch.watch.session import watch
from microfloat.watching import Record

tell({
    "run_sharded": "microfloat.torch.distributed.tp_linear:run_sharded",
    "find_sharded": "microfloat.torch.distributed.tp_linear:find_sharded",
    "beside": "microfloat.torch.distributed.tp_styles:beside",
    "tell_ranks": "microfloat.torch.distributed.fsdp_quantized:tell_ranks",
    "shard_of_zeros": "microfloat.torch.distributed.fsdp_quantized:shard_of_zeros",
    "quantize_sharded": "microfloat.torch.distributed.quantize_dtensor:quantize_sharded",
    "abstract_linear": "microfloat.torch.compile.linear:abstract_linear",
    "forget_schedules": "microfloat.torch.linear.schedule:forget",
    "own_gemm_is_there": "microfloat.torch.launch.block_gemm:own_gemm_is_there",
})  # fmt: skip

__all__ = [
    "FLOP_FORMULAS", "AutocastState", "Cast", "ConversionReport", "Current", "Delayed", "Gemm", "GroupedLinear",
    "Hadamard", "KVCache", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "LayerOptions", "Linear",
    "MultiheadAttention", "Placement", "QuantizedTensor", "RMSNorm", "Recipe", "Record", "RotaryEmbedding",
    "Support", "TransformerLayer", "WeightActivation", "WeightOnly", "apply_rotary", "autocast", "calibrate",
    "checkpoint", "compare", "convert", "dequantize", "explain", "export", "fake_quantize", "formats", "fp8_autocast",
    "fp8_model_init", "from_blocked", "get_align_size_for_quantization", "get_autocast_recipe",
    "get_autocast_state", "get_default_recipe", "grouped_matmul", "is_autocast_enabled", "is_fp8_available",
    "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available", "linear", "linear_cross_entropy",
    "load_quantized", "pack_fp4", "pack_fp6", "plain_state_dict", "quantize", "quantize_", "quantized_model_init",
    "recipes", "register_experts", "reset_scaling", "revert", "save_quantized", "scaled_matmul", "set_seed_rank",
    "to_blocked", "unpack_fp4", "unpack_fp6", "update_quantized", "update_scaling", "watch",
]  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    """`distributed` is imported when it is asked for: most programs run in one process."""
    if name == "distributed":
        return import_module(f"{__name__}.distributed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
