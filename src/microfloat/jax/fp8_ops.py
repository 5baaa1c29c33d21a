"""All names of `flax.linen.fp8_ops`, old and new, with its state layout; docs/jax.md lists the differences."""

from importlib.util import find_spec

from microfloat.errors import missing_package

if find_spec("flax") is None:
    raise missing_package("flax", "microfloat.jax.fp8_ops", "jax")

from microfloat.jax.flax import fp8_casts as _casts
from microfloat.jax.flax import fp8_ops as _ops
from microfloat.jax.flax import state as _state
from microfloat.jax.flax.fp8_casts import *  # noqa: F403
from microfloat.jax.flax.fp8_ops import *  # noqa: F403
from microfloat.jax.flax.state import *  # noqa: F403

__all__ = []
__all__ += _casts.__all__
__all__ += _ops.__all__
__all__ += _state.__all__
