"""microfloat for JAX: the same recipes and bits; it needs only jax (and Flax for `linen`, `nnx` and `fp8_ops`)."""

import importlib
from importlib.util import find_spec
from types import ModuleType

from microfloat.errors import missing_package

if find_spec("jax") is None:
    raise missing_package("jax", "microfloat.jax", "jax")

from microfloat.jax import scaling
from microfloat.jax.array import QuantizedArray, dequantize
from microfloat.jax.autocast import autocast, get_autocast_recipe, is_autocast_enabled
from microfloat.jax.calls import checkpoint_policies
from microfloat.jax.dot_general import DotGeneral, Einsum, dot_general, einsum
from microfloat.jax.explain import (
    Explanation,
    explain,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from microfloat.jax.numerics.packing import from_blocked, pack_fp4, pack_fp6, to_blocked, unpack_fp4, unpack_fp6
from microfloat.jax.ops import fake_quantize, quantize, scaled_matmul
from microfloat.jax.ragged_dot import RaggedDot, ragged_dot
from microfloat.jax.watch import Readings, RecordLog, watch_outputs
from microfloat.pictures import compare
from microfloat.watching import Record

__all__ = [
    "DotGeneral", "Einsum", "Explanation", "QuantizedArray", "RaggedDot", "Readings", "Record", "RecordLog",
    "autocast", "checkpoint_policies", "compare", "dequantize", "dot_general", "einsum", "explain", "fake_quantize",
    "from_blocked", "get_autocast_recipe", "is_autocast_enabled", "is_fp8_available",
    "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available", "pack_fp4", "pack_fp6",
    "quantize", "ragged_dot", "scaled_matmul", "scaling", "to_blocked", "unpack_fp4", "unpack_fp6", "watch_outputs",
]  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    """The Flax front ends are imported when they are asked for, so that the core needs jax alone."""
    if name in ("fp8_ops", "linen", "nnx"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
