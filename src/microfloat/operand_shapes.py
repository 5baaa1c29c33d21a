"""Axes and shapes of quantized arrays: what the oracle and the front ends agree on.

Source: docs/numerics.md, "Operand form of an array" and 7.1.
"""

import operator

from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import ScaledFormat

__all__ = ["codes_shape", "leading_axes", "normalize_axis", "scale_shape"]


def normalize_axis(axis: int, ndim: int) -> int:
    """The contraction axis as an index >= 0: the last axis, or the first of exactly two. Else InvalidValueError."""
    if isinstance(axis, bool):
        raise invalid_type("axis", "bool", "an int: -1, or -2 for a matrix")
    try:
        number = operator.index(axis)
    except TypeError:
        raise invalid_type("axis", type(axis), "an int: -1, or -2 for a matrix") from None
    if ndim == 0 and number in (-1, 0):
        return 0
    if -ndim <= number < ndim:
        normal = number % ndim
        if normal == ndim - 1 or ndim == 2:
            return normal
    raise invalid_value(
        "axis", f"{number} for an array of {ndim} axes", "-1, or -2 for an array of exactly two axes",
        "Flatten the other axes first, for example x.reshape(-1, x.shape[-1]).",
    )  # fmt: skip


def leading_axes(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """What stands in place of R in the shapes of codes and one-row scales."""
    if len(shape) == 2 and axis == 0:
        return (shape[1],)
    return shape[:-1] if len(shape) > 1 else (1,)


def codes_shape(shape: tuple[int, ...], axis: int, last: int) -> tuple[int, ...]:
    """Shape of the codes of an array: its leading axes and `last` bytes."""
    return (*leading_axes(shape, axis), last)


def scale_shape(fmt: ScaledFormat, shape: tuple[int, ...], axis: int, grid: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the stored scales whose operand form has `grid` blocks (docs/numerics.md 7.1)."""
    if fmt.is_per_tensor:
        return ()
    return grid if fmt.is_tile else (*leading_axes(shape, axis), grid[1])
