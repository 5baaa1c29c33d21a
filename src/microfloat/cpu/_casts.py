"""`quantize` and `dequantize` of NumPy arrays, by compiled kernels or by the oracle."""

from typing import Any

import numpy as np

from microfloat import reference
from microfloat.recipes import as_cast
from microfloat.recipes.core import CastLike
from microfloat.reference import Quantized
from microfloat.support import Support


def support(cast: CastLike) -> Support:
    """Available for every cast; `accelerated` where compiled kernels compute it, and the reason where they do not."""
    as_cast(cast)
    return Support(True, False, "the NumPy oracle computes it")


def quantize(
    x: np.ndarray, cast: Any, *, axis: int | tuple[int, int] = -1, seed: Any = None, stream: Any = 0, amax: Any = None,
    scale_enc: Any = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """A Quantized with the bytes of `microfloat.reference.quantize`, whose arguments these are.

    `threads`: how many cores to use at most; None is all that the process may run on.
    """
    return reference.quantize(x, cast, axis=axis, seed=seed, stream=stream, amax=amax, scale_enc=scale_enc)


def dequantize(q: Quantized, dtype: Any = np.float32, *, threads: int | None = None) -> np.ndarray:
    """The array that `q` stands for: the values of `microfloat.reference.dequantize`, rounded once to `dtype`."""
    values = reference.dequantize(q)
    return values if values.dtype == dtype else values.astype(dtype)
