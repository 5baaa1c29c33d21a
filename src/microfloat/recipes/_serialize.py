"""Casts and formats as JSON-ready data, and back."""

import functools
import json
from dataclasses import fields

from microfloat.arguments import check_choice, check_keys
from microfloat.errors import InvalidValueError, invalid_type, invalid_value
from microfloat.formats import FORMATS, ElementFormat, ScaledFormat, ScaleFormat
from microfloat.recipes.cast import Cast, Current, Delayed, Hadamard, Static, as_scaled_format


def format_to_data(fmt: ScaledFormat) -> str | dict:
    """The name of a stock format, all numbers of a user's own."""
    return fmt.name if FORMATS.get(fmt.name) == fmt else json.loads(fmt.contents)


def format_from_data(data: str | dict) -> ScaledFormat:
    """The format that `format_to_data` wrote."""
    if isinstance(data, str):
        return as_scaled_format(data)
    element, scale = (
        cls(**check_keys(name, check_keys("format", data, _names(ScaledFormat))[name], _names(cls)))
        for name, cls in (("element", ElementFormat), ("scale", ScaleFormat))
    )
    return ScaledFormat(**{**data, "element": element, "scale": scale})


def _names(cls: type) -> list[str]:
    return [entry.name for entry in fields(cls)]


def not_serializable(argument: str, value: object) -> InvalidValueError:
    """Build the error for a field that holds a function."""
    return invalid_value(
        argument, f"the callable {value!r}", "'max' or 'most_recent' to serialize",
        "A function cannot be written to a dictionary; set it again after from_dict.",
    )  # fmt: skip


def cast_to_data(cast: Cast | None) -> dict | None:
    """The contents of a Cast, a stock format by its name."""
    if cast is None:
        return None
    algorithm = getattr(cast.scaling, "amax_compute_algo", None)
    if callable(algorithm):
        raise not_serializable("amax_compute_algo", algorithm)
    return {**json.loads(cast.contents), "format": format_to_data(cast.format)}


@functools.lru_cache(maxsize=1024)
def cast_of(contents: str) -> Cast:
    """The Cast whose `contents` these are."""
    cast = cast_from_data(json.loads(contents))
    assert cast is not None
    return cast


def cast_from_data(data: dict | None) -> Cast | None:
    """The Cast that `cast_to_data` wrote."""
    if data is None:
        return None
    check_keys("cast", data, _names(Cast))
    scaling = data["scaling"]
    if not isinstance(scaling, dict):
        raise invalid_type("scaling", type(scaling), "a dictionary")
    kinds = {"Current": Current, "Delayed": Delayed, "Static": Static}
    check_choice("scaling.kind", scaling.get("kind"), kinds)
    kind = kinds[scaling["kind"]]
    numbers = {**check_keys("scaling", scaling, ["kind", *_names(kind)])}
    del numbers["kind"]
    transform = data["hadamard"]
    hadamard = None if transform is None else Hadamard(**check_keys("hadamard", transform, _names(Hadamard)))
    return Cast(format_from_data(data["format"]), data["scale_rule"], data["rounding"], hadamard, kind(**numbers))
