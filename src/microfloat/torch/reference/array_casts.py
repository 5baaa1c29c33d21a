"""Casts of NumPy arrays by torch's reference, for conversions of checkpoints (`microfloat.reference.casters`)."""

import contextlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import torch

from microfloat.recipes import Cast
from microfloat.reference import Quantized, casters
from microfloat.reference._quantize import in_shape
from microfloat.torch import reference


def quantize(x: np.ndarray, cast: Cast, amax: np.ndarray | None) -> Quantized:
    """The Quantized of a matrix [R, C]; `amax` as in `microfloat.quantize`, or None to measure it."""
    given = None if amax is None else torch.from_numpy(np.array(amax, np.float32))
    operand = reference.quantize(_tensor(x), cast, amax=given)
    level = None if operand.tensor_scale is None else operand.tensor_scale.numpy()
    return in_shape(_bytes(operand.codes), _bytes(operand.scale), level, cast, 1, x.shape)


def _tensor(x: np.ndarray) -> torch.Tensor:
    """A tensor that shares the memory of an array of floats; torch knows no bfloat16 of NumPy."""
    array = np.require(x, requirements=["C", "A", "W"])
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _bytes(part: torch.Tensor) -> np.ndarray:
    """Codes or scales as the oracle has them: bytes, or float32."""
    return (part if part.dtype == torch.float32 else part.view(torch.uint8)).numpy()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let operators run on one thread: in this thread, and in threads whose first operator runs meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


casters.register("torch", quantize, _one_thread)
