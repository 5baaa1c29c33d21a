"""Which backend runs a GEMM: decided from static facts and the platform it is lowered for, never by trying."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from microfloat.jax.backends import reference

__all__ = ["GemmPlan", "run_gemm"]


class GemmPlan(NamedTuple):
    """Everything static about one GEMM: kinds of both operands (None = high precision), accumulation, path, backend.

    `dtype` is the compute dtype: what a quantized operand beside one in high precision is dequantized to.
    """

    kind_a: reference.Kind | None
    kind_b: reference.Kind | None
    accumulate: str
    path: str
    backend: str
    dtype: np.dtype


def run_gemm(a: reference.Operand, b: reference.Operand, plan: GemmPlan, bias: Array | None = None) -> Array:
    """``a @ b.T + bias`` in float32 [M, N]."""
    if plan.accumulate == "exact":
        return reference.exact_gemm(a, b, plan.kind_a, plan.kind_b, plan.dtype, bias)
    product = reference.gemm(a, b, plan.kind_a, plan.kind_b, plan.dtype)
    return product if bias is None else product + bias.astype(jnp.float32)[None, :]
