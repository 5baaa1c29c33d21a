"""Byte comparisons of an adapter with the oracle, and the GEMM tolerance of docs/numerics.md 8.3."""

from typing import Any

import numpy as np

from microfloat import reference
from microfloat.recipes import Cast
from microfloat.reference import Quantized
from tests.contract.adapters import Adapter, Bytes
from tests.contract.cases import SEED

UNIT_OUT = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# Half a step between subnormal results: what one rounding costs below the smallest normal number.
SUBNORMAL_OUT = {"float32": 2.0**-150, "bfloat16": 2.0**-134, "float16": 2.0**-25}


def first_difference(name: str, actual: np.ndarray | None, expected: np.ndarray | None) -> str | None:
    """None where both are the same bytes in the same shape, else a sentence."""
    if actual is None or expected is None:
        return None if actual is expected else f"{name}: {actual!r}, expected {expected!r}"
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"{name}: {actual.dtype}{actual.shape}, expected {expected.dtype}{expected.shape}"
    kind = np.dtype(f"u{expected.dtype.itemsize}")
    left, right = (np.ascontiguousarray(array).reshape(-1).view(kind) for array in (actual, expected))
    if np.array_equal(left, right):
        return None
    different = np.flatnonzero(left != right)
    where = np.unravel_index(different[0], expected.shape)
    return (
        f"{name}: {different.size} of {right.size} differ, first at {tuple(map(int, where))}: "
        f"{left[different[0]]:#x}, expected {right[different[0]]:#x}"
    )


def arguments_of(cast: Cast, axis: int, stream: int = 4) -> dict[str, Any]:
    """axis, and seed and stream for a stochastic cast."""
    return {"axis": axis, "seed": SEED, "stream": stream} if cast.is_stochastic else {"axis": axis}


def check_quantize(
    adapter: Adapter, x: np.ndarray, cast: Cast, context: str, **arguments: Any
) -> tuple[Bytes, Quantized]:
    """Quantize with the adapter and with the oracle; every byte must agree."""
    actual, expected = adapter.quantize(x, cast, **arguments), reference.quantize(x, cast, **arguments)
    for name in ("codes", "scale", "tensor_scale"):
        problem = first_difference(name, getattr(actual, name), getattr(expected, name))
        assert problem is None, f"{adapter.name} {cast} {context} {arguments}: {problem}"
    return actual, expected


def check_dequantize(adapter: Adapter, actual: Bytes, expected: Quantized, context: str) -> None:
    """The same float32 bytes; values of a Hadamard operand within the rounding of 16 additions."""
    values, wanted = adapter.dequantize(actual.handle), reference.dequantize(expected)
    assert (values.shape, values.dtype) == (wanted.shape, np.dtype(np.float32)), context
    if values.tobytes() == wanted.tobytes():
        return
    if expected.hadamard is None:
        quiet = [np.where(np.isnan(array), np.float32(np.nan), array) for array in (values, wanted)]
        problem = first_difference("values", *quiet)
    else:
        largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
        with np.errstate(invalid="ignore"):
            close = np.abs(values - wanted) <= 2.0**-20 * largest
        bad = ~(close | (values == wanted) | (np.isnan(values) & np.isnan(wanted)))
        problem = f"values: {int(bad.sum())} differ" if bad.any() else None
    assert problem is None, f"{adapter.name} {context}: {problem}"


def check_matmul(adapter: Adapter, a: Quantized, b: Quantized, handles: tuple[Any, Any], out_dtype: str) -> None:
    """An adapter's product of the same quantized operands, within both bounds of docs/numerics.md 8.3."""
    expected = reference.scaled_matmul(a, b)
    product = adapter.scaled_matmul(*handles, out_dtype).astype(np.float64)
    assert product.shape == expected.shape
    relative = np.linalg.norm(product - expected) / np.linalg.norm(expected)
    tolerance = adapter.tolerance(a, b)
    assert relative <= tolerance.relative[out_dtype], f"{adapter.name} {a} x {b}: {relative:.2e}"
    magnitudes = np.abs(exact_values(a)) @ np.abs(exact_values(b)).T
    bound = UNIT_OUT[out_dtype] * np.abs(expected) + tolerance.accumulation(a.length) * magnitudes
    bound += SUBNORMAL_OUT[out_dtype]
    excess = np.abs(product - expected) > bound
    assert not excess.any(), f"{adapter.name} {a} x {b}: {int(excess.sum())} elements beyond the elementwise bound"


def exact_values(q: Quantized) -> np.ndarray:
    """float64 element values in operand form, via a product with the identity."""
    return reference.scaled_matmul(_undo_transform_mark(q), np.eye(q.length))


def _undo_transform_mark(q: Quantized) -> Quantized:
    """The operand as it lies in the transformed domain, without saying so."""
    return Quantized(
        q.codes.reshape(q.rows, -1), _matrix_scale(q), q.tensor_scale, q.format, 1, (q.rows, q.length), None
    )


def _matrix_scale(q: Quantized) -> np.ndarray:
    if q.format.is_per_tensor or q.format.is_tile:
        return q.scale
    return q.scale.reshape(q.rows, -1)
