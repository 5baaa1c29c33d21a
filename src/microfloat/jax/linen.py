"""Recipes in Flax linen: dot_general and einsum classes to inject, layers that inject them, and the training state."""

from importlib.util import find_spec

from microfloat.errors import missing_package

if find_spec("flax") is None:
    raise missing_package("flax", "microfloat.jax.linen", "jax")

from microfloat.jax.flax.linen import *  # noqa: F403
from microfloat.jax.flax.linen import __all__ as __all__
