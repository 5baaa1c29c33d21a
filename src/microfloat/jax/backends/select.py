"""Which backend runs a GEMM: decided from static facts and the platform it is lowered for, never by trying."""

from functools import partial
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from microfloat.errors import NotSupportedError
from microfloat.jax.backends import gemms, reference

__all__ = ["GemmPlan", "choice_of", "run_gemm"]


class GemmPlan(NamedTuple):
    """Everything static about one GEMM: kinds of both operands (None = high precision), accumulation, path, backend.

    `dtype` is the compute dtype: what a quantized operand beside one in high precision is dequantized to. `out` is that
    of the result, rounded once after scales and bias.
    """

    kind_a: reference.Kind | None
    kind_b: reference.Kind | None
    accumulate: str
    path: str
    backend: str
    dtype: np.dtype
    out: np.dtype = np.dtype(np.float32)


def choice_of(plan: GemmPlan, chip: tuple[int, int] | None) -> gemms.Choice:
    """How `plan` runs on a chip; NotSupportedError for ``backend="native"`` where no unit of the format does.

    Two operands in high precision are no matter of a backend.
    """
    choice = gemms.choose(plan.kind_a, plan.kind_b, chip, plan.path)
    if plan.backend == "reference":
        return choice._replace(way="reference", kernel="decode to float32, float32 dot, scales in the epilogue")
    in_high_precision = plan.kind_a is None and plan.kind_b is None
    if plan.backend == "native" and not choice.support.accelerated and not in_high_precision:
        raise NotSupportedError(
            f"backend: got 'native', needed a GEMM that runs on units of its format. {choice.support.reason}. "
            "Use backend='auto' to emulate it."
        )
    return choice


def run_gemm(a: reference.Operand, b: reference.Operand, plan: GemmPlan, bias: Array | None = None) -> Array:
    """``a @ b.T + bias`` [M, N], summed in float32, in the plan's `out`."""
    if plan.accumulate == "exact":
        return reference.exact_gemm(a, b, plan.kind_a, plan.kind_b, plan.dtype, bias).astype(plan.out)
    choice = choice_of(plan, gemms.capability())
    emulate = partial(reference.gemm, kind_a=plan.kind_a, kind_b=plan.kind_b, dtype=plan.dtype)
    if choice.way == "reference":
        product = emulate(a, b)
    else:
        # `choose` names another way than the reference only for two quantized operands.
        kind_a, kind_b = cast(reference.Kind, plan.kind_a), cast(reference.Kind, plan.kind_b)
        out = plan.out if bias is None else jnp.dtype(jnp.float32)
        on_gpu = partial(gemms.gemm, kind_a=kind_a, kind_b=kind_b, way=choice.way, accumulate=plan.accumulate, out=out)
        # A program may still be lowered for another platform than the default one.
        product = lax.platform_dependent(a, b, cuda=on_gpu, default=lambda a, b: emulate(a, b).astype(out))
    product = product if bias is None else product + bias.astype(jnp.float32)[None, :]
    return product.astype(plan.out)
