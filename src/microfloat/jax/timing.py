"""Results of this front end against the oracle, for `microfloat doctor --check`."""

import jax
import jax.numpy as jnp
import numpy as np

from microfloat import reference as oracle
from microfloat.jax.ops import quantize, scaled_matmul
from microfloat.recipes import Cast, Gemm


def against_oracle(gemm: Gemm, backend: str, device: str | None = None, size: int = 64) -> tuple[bool, float]:
    """For square matrices: if the bytes of our casts equal the oracle's, and the relative difference of the product."""
    # Rounding is to nearest, without a Hadamard transform; the scale of delayed scaling is 64.
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=(size, size)).astype(np.float32) for _ in range(2)]
    casts = [Cast(cast.format, cast.scale_rule, scaling=cast.scaling) for cast in gemm.casts if cast is not None]
    pairs = [(x, cast, 64.0 if cast.is_delayed else None) for x, cast in zip(arrays, casts, strict=True)]
    want = [oracle.quantize(x, cast, scale_enc=scale) for x, cast, scale in pairs]
    with jax.default_device(jax.devices(device.split(":")[0])[0] if device else None):
        made = [quantize(jnp.asarray(x), cast, scale_enc=scale) for x, cast, scale in pairs]
        product = scaled_matmul(*made, out_dtype=jnp.float32, backend=backend)
    equal = all(
        ours is theirs is None or np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
        for q, exact in zip(made, want, strict=True)
        for ours, theirs in ((q.codes, exact.codes), (q.scale, exact.scale), (q.tensor_scale, exact.tensor_scale))
    )
    exact = oracle.scaled_matmul(*want)
    return equal, float(np.linalg.norm(np.asarray(product) - exact) / np.linalg.norm(exact))
