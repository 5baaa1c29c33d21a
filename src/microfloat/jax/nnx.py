"""Recipes in Flax nnx: a dot_general module, layers, conversion of a whole model, and training."""

from importlib.util import find_spec

from microfloat.errors import missing_package

if find_spec("flax") is None:
    raise missing_package("flax", "microfloat.jax.nnx", "jax")

from microfloat.jax.flax import conversion as _conversion
from microfloat.jax.flax import nnx as _nnx
from microfloat.jax.flax.conversion import *  # noqa: F403
from microfloat.jax.flax.nnx import *  # noqa: F403

__all__ = []
__all__ += _conversion.__all__
__all__ += _nnx.__all__
