"""Drop-in for `flax.linen.fp8_ops`: every name of it, old and new, with the same state layout and arithmetic.

docs/jax.md lists the differences. `max_accumulate`, `merge_state`, `next_state` and `reset_state`, for the state
collection as a whole, are further names.
"""

from importlib.util import find_spec

from microfloat.errors import missing_package

if find_spec("flax") is None:
    raise missing_package("flax", "microfloat.jax.fp8_ops", "jax")

from microfloat.jax.flax.fp8_ops import *  # noqa: F403
from microfloat.jax.flax.fp8_ops import __all__ as __all__
