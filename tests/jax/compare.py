"""JAX results as NumPy arrays, and comparisons with the oracle."""

import numpy as np

from microfloat import reference
from microfloat.chips import Chip
from microfloat.jax.backends import cuda
from microfloat.routes import route_of

# docs/numerics.md 8.3, float32 results.
EMULATED, FP8 = 1e-5, {"fast": 5e-3, "split": 5e-4}


def to_numpy(array):
    """A JAX array as NumPy; float8 codes as their bytes."""
    array = np.asarray(array)
    return array.view(np.uint8) if "float8" in str(array.dtype) else array


def relative_error(actual, expected):
    """Frobenius norm of the difference, relative to the expected."""
    expected = np.asarray(expected, np.float64)
    return np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)


def way_of(gemm):
    """The units that multiply the operands of a Gemm where the tests run."""
    chip = cuda.capability()
    return route_of(gemm, None if chip is None else Chip(chip), library="xla").kind


def gemm_limit(gemm):
    """`relative_error` that a float32 GEMM may have: FP8 tensor cores do not add in float32."""
    return FP8[gemm.accumulate] if way_of(gemm) == "fp8" else EMULATED


def assert_same_bytes(q, expected, context=""):
    """A QuantizedArray against the oracle's Quantized: codes, scale, tensor_scale, in bytes, dtype and shape."""
    for field in ("codes", "scale", "tensor_scale"):
        actual, wanted = getattr(q, field), getattr(expected, field)
        if wanted is None:
            assert actual is None, (context, field)
            continue
        actual = to_numpy(actual)
        assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape), (context, field)
        differing = (
            int((actual.view(np.uint8) != np.ascontiguousarray(wanted).view(np.uint8)).sum()) if actual.ndim else 0
        )
        assert actual.tobytes() == wanted.tobytes(), f"{context} {field}: {differing} bytes differ"
    assert tuple(q.shape) == tuple(expected.shape), context


def assert_oracle(q, x, cast, context="", **arguments):
    """`q` has the bytes that the oracle gives for the same call."""
    assert_same_bytes(q, reference.quantize(x, cast, **arguments), context)
