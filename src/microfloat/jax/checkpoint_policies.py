"""Rematerialisation policies for `jax.checkpoint`: what of a low-precision GEMM is kept for the backward."""

import jax

from microfloat.jax.dot_general import CODES_NAME, OUTPUT_NAME, SCALES_NAME

__all__ = ["save_codes", "save_gemm_outputs"]

# Keep the quantized operands (1 + 1/32 bytes per element and axis for MXFP8); everything else is computed again.
save_codes = jax.checkpoint_policies.save_only_these_names(CODES_NAME, SCALES_NAME)

# Keep what every GEMM returned; casts and everything between GEMMs are computed again.
save_gemm_outputs = jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME)
