"""Casts and formats as JSON-ready data, and back."""

import functools
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from microfloat.arguments import check_choice, check_keys
from microfloat.errors import InvalidValueError, invalid_type, invalid_value
from microfloat.formats import FORMATS, ElementFormat, ScaledFormat, ScaleFormat
from microfloat.recipes.cast import Cast, Current, Delayed, Hadamard, Static, as_scaled_format
from microfloat.scale_rules import ScaleRule, TwoLevel


def format_to_data(fmt: ScaledFormat) -> str | dict:
    """The name of a stock format, all numbers of a user's own."""
    return fmt.name if FORMATS.get(fmt.name) == fmt else json.loads(fmt.contents)


def format_from_data(data: str | dict) -> ScaledFormat:
    """The format that `format_to_data` wrote."""
    if isinstance(data, str):
        return as_scaled_format(data)
    parts = check_keys("format", data, _names(ScaledFormat))
    element = ElementFormat(**check_keys("element", parts["element"], _names(ElementFormat)))
    return ScaledFormat(**{**parts, "element": element, "scale": _scale_from_data(parts["scale"])})


def _scale_from_data(data: Mapping[str, Any]) -> ScaleFormat:
    data = check_keys("scale", data, _names(ScaleFormat), all_of_them=False)  # of a stock one the name says all
    return ScaleFormat(**{"name": "", **data})


def _rule_from_data(data: Any) -> Any:
    """The scale rule of a Cast: a name, or all numbers of a rule of a user's own."""
    if not isinstance(data, dict):
        return data
    level, scale = (check_keys("scale_rule", data, _names(ScaleRule))[name] for name in ("two_level", "scale"))
    level = level and TwoLevel(**check_keys("two_level", level, _names(TwoLevel)))
    return ScaleRule(**{**data, "scale": _scale_from_data(scale), "two_level": level})


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
    rule = _rule_from_data(data["scale_rule"])
    return Cast(format_from_data(data["format"]), rule, data["rounding"], hadamard, kind(**numbers))
