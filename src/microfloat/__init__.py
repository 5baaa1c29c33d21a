"""microfloat: FP8, MXFP8/6/4 and NVFP4 with the same bits everywhere.

The framework-free core: formats, recipes and the NumPy oracle. `microfloat.torch` and `microfloat.jax` are imported
on their own, so that neither framework is needed for the other.
"""

from microfloat import formats, metrics, recipes, reference
from microfloat._version import __version__
from microfloat.formats import *  # noqa: F403
from microfloat.recipes import Cast, Current, Delayed, Gemm, Hadamard, Placement, Recipe
from microfloat.support import Support

__all__ = [
    *formats.__all__,
    "Cast", "Current", "Delayed", "Gemm", "Hadamard", "Placement", "Recipe", "Support",
    "__version__", "formats", "metrics", "recipes", "reference",
]  # fmt: skip
