"""Drop-in for `flax.linen.fp8_ops`: every name of it, old and new, with the same state layout and arithmetic.

``from microfloat.jax import fp8_ops`` replaces ``from flax.linen import fp8_ops``. What is different is listed in
docs/jax.md: gradients that Flax drops, sums that should be maxima, and states that destroy themselves. Beside
Flax's names there are `max_accumulate`, `merge_state`, `next_state` and `reset_state` for the state collection as a
whole.
"""

from importlib.util import find_spec

from microfloat.errors import missing_package

if find_spec("flax") is None:
    raise missing_package("flax", "microfloat.jax.fp8_ops", "jax")


from microfloat.jax._max_grad import CAN_USE_EARRAY, Fp8MetaTyRules, fm32, fp8_meta_dtype, fp32_max_grad
from microfloat.jax.flax.fp8_autodiff import in_q, in_qdq, out_dq, out_qdq
from microfloat.jax.flax.fp8_casts import dequantize, get_fp8_max, qdq, quantize
from microfloat.jax.flax.fp8_dot import (
    dot_general_transpose_lhs,
    dot_general_transpose_rhs,
    dot_general_with_precision,
    fp8_scaled_dot_general,
    quantized_dot,
)
from microfloat.jax.flax.fp8_meta import (
    compute_amax_history,
    compute_scale,
    quantize_dequantize_update,
    update_fp8_meta,
)
from microfloat.jax.flax.fp8_modules import (
    Fp8DirectDotGeneralOp,
    Fp8DotGeneral,
    Fp8DotGeneralBase,
    Fp8DotGeneralOp,
    Fp8Einsum,
    NANOOFp8DotGeneralOp,
)
from microfloat.jax.flax.fp8_state import OVERWRITE_WITH_GRADIENT, max_accumulate, merge_state, next_state, reset_state

__all__ = [
    "CAN_USE_EARRAY", "OVERWRITE_WITH_GRADIENT", "Fp8DirectDotGeneralOp", "Fp8DotGeneral", "Fp8DotGeneralBase",
    "Fp8DotGeneralOp", "Fp8Einsum", "Fp8MetaTyRules", "NANOOFp8DotGeneralOp", "compute_amax_history", "compute_scale",
    "dequantize", "dot_general_transpose_lhs", "dot_general_transpose_rhs", "dot_general_with_precision", "fm32",
    "fp8_meta_dtype", "fp8_scaled_dot_general", "fp32_max_grad", "get_fp8_max", "in_q", "in_qdq", "max_accumulate",
    "merge_state", "next_state", "out_dq", "out_qdq", "qdq", "quantize", "quantize_dequantize",
    "quantize_dequantize_update", "quantized_dot", "reset_state", "update_fp8_meta",
]  # fmt: skip

# The former name of `qdq`, which published guides still use.
quantize_dequantize = qdq
