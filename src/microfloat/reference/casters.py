"""Casts of NumPy arrays by the fastest front end that is loaded, or by the oracle; the bytes are the same.

`microfloat.torch` and `microfloat.jax` register their casts here when they are imported. Conversions of checkpoints,
which know no framework, call `quantize`.
"""

import contextlib
from collections.abc import Callable

import numpy as np

from microfloat import reference
from microfloat.recipes import Cast
from microfloat.reference import Quantized

Quantize = Callable[[np.ndarray, Cast, np.ndarray | None], Quantized]
Context = Callable[[], contextlib.AbstractContextManager]
_ORACLE = "numpy"
_PREFERRED = ("torch", "jax", _ORACLE)  # torch's casts need no compilation for each shape
_REGISTERED: dict[str, tuple[Quantize, Context]] = {
    _ORACLE: (lambda x, cast, amax: reference.quantize(x, cast, amax=amax), contextlib.nullcontext)
}


def register(name: str, quantize: Quantize, on_one_core: Context = contextlib.nullcontext) -> None:
    """Let the front end `name` ("torch" or "jax") cast arrays: its function of a matrix, a Cast and an amax or None.

    `on_one_core`: the context in which a call takes one core, for callers with threads of their own.
    """
    assert name in _PREFERRED
    _REGISTERED[name] = quantize, on_one_core


def loaded() -> str:
    """The name of what casts arrays: "torch", "jax", or "numpy" for the oracle, which is several times as slow."""
    return next(name for name in _PREFERRED if name in _REGISTERED)


def quantize(x: np.ndarray, cast: Cast, amax: np.ndarray | None = None) -> Quantized:
    """The Quantized of a matrix [R, C] along C: the bytes of ``reference.quantize(x, cast, amax=amax)``."""
    return _REGISTERED[loaded()][0](x, cast, amax)


def side_by_side() -> contextlib.AbstractContextManager:
    """The context in which several threads may call `quantize` at a time, each on one core."""
    return _REGISTERED[loaded()][1]()
