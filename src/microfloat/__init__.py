"""microfloat: FP8, MXFP8/6/4 and NVFP4 with the same bits everywhere.

This package is the framework-free core: formats, recipes and the NumPy oracle. Import `microfloat.torch` or
`microfloat.jax` separately, so that neither framework is needed for the other.
"""

import importlib
from typing import TYPE_CHECKING, Any

from microfloat import formats, recipes
from microfloat._version import __version__
from microfloat.formats import *  # noqa: F403
from microfloat.recipes import Cast, Current, Delayed, Gemm, Hadamard, Placement, Recipe
from microfloat.support import Support

if TYPE_CHECKING:
    from microfloat import checkpoint, metrics, reference

__all__ = [
    "Cast", "Current", "Delayed", "Gemm", "Hadamard", "Placement", "Recipe", "Support",
    "__version__", "checkpoint", "formats", "metrics", "recipes", "reference",
]  # fmt: skip
__all__ += formats.__all__

_LOADED_WHEN_USED = ("checkpoint", "metrics", "reference")  # nothing else needs them, and importing should cost little

_FRONT_ENDS = ("torch", "jax")


def __getattr__(name: str) -> Any:
    if name in _LOADED_WHEN_USED:
        return importlib.import_module(f"{__name__}.{name}")
    hint = f"; it is imported on its own: import {__name__}.{name}" if name in _FRONT_ENDS else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LOADED_WHEN_USED})
