"""Checks of plain values for the oracle and the front ends: errors name the argument, and results have one form."""

import numbers
import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from microfloat.errors import InvalidValueError, invalid_type, invalid_value, kind_of, unknown_name


def check_int(argument: str, value: object, least: int, most: int) -> int:
    """`value` itself, an int (no bool, no float) in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_type(argument, type(value), f"an int in [{least}, {most}]")
    if not least <= value <= most:
        raise invalid_value(argument, value, f"an int in [{least}, {most}]")
    return value


def as_int(value: Any, error: InvalidValueError) -> int:
    """An integer of any library as an int; raises `error` for other values, True and False included."""
    if isinstance(value, bool):
        raise error
    try:
        return operator.index(value)
    except TypeError:
        raise error from None


def as_path(argument: str, value: Any, needed: str = "a str or a pathlib.Path, that of a file") -> Path:
    """A path as a Path; InvalidTypeError for anything but a str or a path, InvalidValueError for what names nothing."""
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise invalid_type(argument, kind_of(value), needed)
    if not os.fspath(value) or "\0" in os.fspath(value):
        raise invalid_value(argument, repr(value), needed)
    return Path(value)


def check_new_file(argument: str, path: Path) -> None:
    """InvalidValueError for a folder, or a file in one that does not exist: before work whose result would be lost."""
    if path.is_dir():
        raise invalid_value(argument, path, "the name of a file", "This is a folder.")
    if not path.parent.is_dir():
        raise invalid_value(argument, path, "a file in a folder that exists", f"Create {path.parent} first.")


def check_word(argument: str, value: object) -> int:
    """A word of 32 bits as an int; InvalidValueError for anything but an integer in [0, 2^32)."""
    error = invalid_value(argument, repr(value), "an int in [0, 2^32)")
    number = as_int(value, error)
    if not 0 <= number < 1 << 32:
        raise error
    return number


def as_bool(argument: str, value: object) -> bool:
    """True or False of Python or of NumPy as a bool; refuses what `check_bool` refuses."""
    value = bool(value) if isinstance(value, np.bool_) else value
    check_bool(argument, value)
    return value is True


def as_float(argument: str, value: numbers.Real, needed: str = "a number in float32's range") -> float:
    """A real number as a float; InvalidValueError for an integer beyond all floats. `needed` says so in words."""
    try:
        return float(value)
    except OverflowError:
        raise invalid_value(argument, "an integer beyond the range of floats", needed) from None


def check_number(argument: str, value: object, needed: str, least: float, most: float) -> float:
    """`value` as a float in [least, most]; NaN is outside. `needed` says so in words."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise invalid_type(argument, type(value), needed)
    number = as_float(argument, value, needed)
    if not least <= number <= most:
        raise invalid_value(argument, value, needed)
    return number


def check_bool(argument: str, value: object) -> None:
    """Refuse anything but True or False, so that strings such as "false" never switch something on."""
    if not isinstance(value, bool):
        raise invalid_type(argument, type(value), "True or False")


def check_choice(argument: str, value: object, choices: Iterable[str], *, or_none: bool = False) -> None:
    """Refuse a value outside `choices`, naming the nearest. `or_none`: the message offers None too."""
    choices = list(choices)
    if not isinstance(value, str):
        needed = ("None or " if or_none else "") + "one of " + ", ".join(map(repr, choices))
        raise invalid_type(argument, type(value), needed)
    if value not in choices:
        raise unknown_name(argument, value, choices, or_none=or_none)


def check_name(argument: str, value: object) -> None:
    """Refuse anything but a string that is not blank."""
    if not isinstance(value, str):
        raise invalid_type(argument, type(value), "a name, as a string")
    if not value.strip():
        raise invalid_value(argument, repr(value), "a name that is not empty")


def check_keys(argument: str, data: object, keys: Iterable[str], *, all_of_them: bool = True) -> Mapping[str, Any]:
    """`data` itself, a dictionary with exactly these keys, or with some of them."""
    if not isinstance(data, Mapping):
        raise invalid_type(argument, type(data), "a dictionary")
    expected = list(keys)
    unknown = [key for key in data if key not in expected]
    missing = [key for key in expected if key not in data] if all_of_them else []
    if unknown or missing:
        found = [f"without {missing}"] if missing else []
        found += [f"with {unknown}"] if unknown else []
        raise invalid_value(argument, f"a dictionary {' and '.join(found)}", f"the keys {expected} and no others")
    return data


def check_sizes(
    argument: str, sizes: object, needed: str, remedy: str = "", *, count: int | None = None,
    kinds: type | tuple[type, ...] = int,
) -> tuple[int, ...]:  # fmt: skip
    """`sizes` as a tuple of `count` sizes that are not negative and of one of `kinds` (an int, a compiler's symbol)."""
    if (
        isinstance(sizes, tuple | list)
        and count in (None, len(sizes))
        and all(isinstance(size, kinds) and not isinstance(size, bool) and size >= 0 for size in sizes)
    ):
        return tuple(sizes)
    raise invalid_value(argument, repr(sizes), needed, remedy)


def check_shape(shape: object) -> tuple[int, int, int]:
    """(M, K, N) of a Linear, or InvalidValueError."""
    needed = "(M, K, N), three sizes of a Linear: rows, in features, out features"
    rows, inputs, outputs = check_sizes("shape", shape, needed, count=3)
    return rows, inputs, outputs


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
    remedy = "Flatten the other axes first, for example x.reshape(-1, x.shape[-1])."
    if -ndim <= number < ndim:
        normal = number % ndim
        if normal == ndim - 1 or ndim == 2:
            return normal
        remedy = f"Make it the last axis first, x.swapaxes({number}, -1), and leave out axis=."
    raise invalid_value(
        "axis", f"{number} for an array of {ndim} axes", "-1, or -2 for an array of exactly two axes", remedy
    )  # fmt: skip


def axes_of(axis: object, ndim: int) -> tuple[int, ...]:
    """The contraction axes that a call of `quantize` names, each >= 0: one, or both of a matrix."""
    if not isinstance(axis, tuple | list):
        return (normalize_axis(axis, ndim),)  # type: ignore[arg-type]
    if len(axis) != 2:
        raise invalid_type("axis", f"a {type(axis).__name__} of {len(axis)}", "an int, or a pair of ints: (-1, -2)")
    if ndim != 2:
        raise invalid_value(
            "axis", f"the pair {tuple(axis)} for an array of {ndim} axes", "one axis, or an array of exactly two axes",
            "Flatten the other axes first, for example x.reshape(-1, x.shape[-1]).",
        )  # fmt: skip
    axes = tuple(normalize_axis(one, 2) for one in axis)
    if axes[0] == axes[1]:
        raise invalid_value("axis", tuple(axis), "two different axes, such as (-1, -2)", "One operand takes one axis.")
    return axes


def for_each(argument: str, value: Any, count: int) -> tuple[Any, ...]:
    """`value` for each of `count` casts; a pair holds a value for each of two."""
    if count == 1 or not isinstance(value, tuple | list):
        return (value,) * count
    if len(value) != 2:
        raise invalid_value(argument, f"{len(value)} values", "one value for both axes, or a pair")
    return tuple(value)


def check_packable(smallest: int, largest: int, bits: int) -> None:
    """Refuse codes that do not fit into `bits` bits."""
    if smallest < 0 or largest >> bits:
        raise invalid_value(
            "codes", f"values from {smallest} to {largest}", f"{bits}-bit codes, one per byte",
            "Bytes that are packed already must not be packed again.",
        )  # fmt: skip


def check_unpacked(largest: int, bits: int, format_name: str, unpack: str) -> None:
    """Refuse stored codes that need more bits than the element has; `unpack` names the function for packed ones."""
    if largest >> bits:
        raise invalid_value(
            "codes", f"a byte of {largest:#x}", f"unpacked {bits}-bit codes for {format_name}, one per byte",
            f"Unpack packed codes first: packed=True, or {unpack}.",
        )  # fmt: skip


def check_packed(length: object, shape: tuple[int, ...], codes: int, data: int) -> None:
    """Refuse a length that does not fit packed bytes of this shape: `codes` codes in `data` bytes."""
    if isinstance(length, bool) or not hasattr(length, "__index__"):
        raise invalid_type("length", type(length), "an int, the number of codes along the last axis")
    number: Any = length
    needed = data * -(-number // codes)
    if number < 0 or not shape or shape[-1] != needed:
        raise invalid_value("length", f"{length} for data of shape {shape}", f"a last axis of {max(needed, 0)} bytes")
