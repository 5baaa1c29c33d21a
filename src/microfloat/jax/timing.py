"""Results of this front end, for `microfloat doctor --check`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from microfloat.jax.ops import quantize, scaled_matmul
from microfloat.recipes import Cast


def cast_and_multiply(
    pairs: Sequence[tuple[np.ndarray, Cast, float | None]], backend: str, device: str | None
) -> tuple[list[list[bytes | None]], np.ndarray]:
    """The bytes of codes, scale and tensor scale of two casts, each with an encode scale, and their product."""
    with jax.default_device(jax.devices(device.split(":")[0])[0] if device else None):
        made = [quantize(jnp.asarray(x), cast, scale_enc=scale) for x, cast, scale in pairs]
        product = scaled_matmul(*made, out_dtype=jnp.float32, backend=backend)
    parts = ((q.codes, q.scale, q.tensor_scale) for q in made)
    stored = [[None if part is None else np.asarray(part).tobytes() for part in one] for one in parts]
    return stored, np.asarray(product)
