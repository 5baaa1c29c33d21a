"""Casts of NumPy arrays by the fastest front end that is loaded, or by the oracle; the bytes are the same.

`microfloat.torch` and `microfloat.jax` register their casts here when they are imported. Conversions of checkpoints,
which know no framework, call `quantize`.
"""

from collections.abc import Callable

import numpy as np

from microfloat import reference
from microfloat.recipes import Cast
from microfloat.reference import Quantized

__all__ = ["loaded", "quantize", "register"]

Quantize = Callable[[np.ndarray, Cast, np.ndarray | None], Quantized]
_ORACLE = "numpy"
_PREFERRED = ("torch", "jax", _ORACLE)  # torch's casts need no compilation for each shape
_REGISTERED: dict[str, Quantize] = {_ORACLE: lambda x, cast, amax: reference.quantize(x, cast, amax=amax)}


def register(name: str, quantize: Quantize) -> None:
    """Let the front end `name` ("torch" or "jax") cast arrays: its function of a matrix, a Cast and an amax or None."""
    assert name in _PREFERRED
    _REGISTERED[name] = quantize


def loaded() -> str:
    """The name of what casts arrays: "torch", "jax", or "numpy" for the oracle, which is several times as slow."""
    return next(name for name in _PREFERRED if name in _REGISTERED)


def quantize(x: np.ndarray, cast: Cast, amax: np.ndarray | None = None) -> Quantized:
    """The Quantized of a matrix [R, C] along C: the bytes of ``reference.quantize(x, cast, amax=amax)``."""
    return _REGISTERED[loaded()](x, cast, amax)
