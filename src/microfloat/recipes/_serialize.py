"""Recipes as JSON-ready dictionaries, and back."""

import functools
import json
from dataclasses import fields
from typing import Any

from microfloat.arguments import check_choice, check_keys
from microfloat.errors import InvalidValueError, invalid_type, invalid_value
from microfloat.formats import FORMATS, ElementFormat, ScaledFormat, ScaleFormat
from microfloat.operands import GEMMS
from microfloat.recipes.core import (
    Cast,
    Current,
    Delayed,
    Gemm,
    Hadamard,
    NamedRecipe,
    Recipe,
    Static,
    as_scaled_format,
)


def format_to_data(fmt: ScaledFormat) -> str | dict:
    """The name of a stock format, all numbers of a user's own."""
    return fmt.name if FORMATS.get(fmt.name) == fmt else json.loads(fmt.contents)


def format_from_data(data: str | dict) -> ScaledFormat:
    if isinstance(data, str):
        return as_scaled_format(data)
    element, scale = (
        cls(**check_keys(name, check_keys("format", data, _names(ScaledFormat))[name], _names(cls)))
        for name, cls in (("element", ElementFormat), ("scale", ScaleFormat))
    )
    return ScaledFormat(**{**data, "element": element, "scale": scale})


def _names(cls: type) -> list[str]:
    return [entry.name for entry in fields(cls)]


def _not_serializable(argument: str, value: object) -> InvalidValueError:
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
        raise _not_serializable("amax_compute_algo", algorithm)
    return {**json.loads(cast.contents), "format": format_to_data(cast.format)}


@functools.lru_cache(maxsize=1024)
def cast_of(contents: str) -> Cast:
    """The Cast whose `contents` these are."""
    cast = cast_from_data(json.loads(contents))
    assert cast is not None
    return cast


def cast_from_data(data: dict | None) -> Cast | None:
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


def recipe_to_dict(recipe: Recipe) -> dict:
    """``{"recipe": class name, "fields": {...}}``; casts are written out for a CustomRecipe."""
    if isinstance(recipe, NamedRecipe):
        values = {}
        for name, value in recipe.arguments().items():
            if callable(value):
                raise _not_serializable(name, value)
            values[name] = list(value) if isinstance(value, tuple) else getattr(value, "value", value)
        return {"recipe": type(recipe).__name__, "fields": values}
    gemms = {}
    for name in GEMMS:
        gemm = getattr(recipe, name)
        gemms[name] = {
            "lhs": cast_to_data(gemm.lhs), "rhs": cast_to_data(gemm.rhs),
            "accumulate": gemm.accumulate, "path": gemm.path, **({"from_fprop": True} if gemm.from_fprop else {}),
        }  # fmt: skip
    return {"recipe": type(recipe).__name__, "fields": gemms}


def recipe_from_dict(data: dict) -> Recipe:
    """Rebuild the recipe that `recipe_to_dict` described."""
    from microfloat import recipes

    check_keys("data", data, ("recipe", "fields"))
    others = recipes.WeightOnly, recipes.WeightActivation, recipes.CustomRecipe, Recipe
    classes = {cls.__name__: cls for cls in (*recipes.FAMILIES, *others)}
    check_choice("recipe", data["recipe"], classes)
    cls, values = classes[data["recipe"]], data["fields"]
    if issubclass(cls, NamedRecipe):
        check_keys("fields", values, cls().arguments(), all_of_them=False)
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**options)
    check_keys("fields", values, GEMMS)
    gemms = {}
    for name, entry in values.items():
        entry = {"from_fprop": False, **entry} if isinstance(entry, dict) else entry
        check_keys(name, entry, _names(Gemm))
        lhs, rhs = (cast_from_data(entry[side]) for side in ("lhs", "rhs"))
        gemms[name] = Gemm(lhs, rhs, entry["accumulate"], entry["path"], entry["from_fprop"])
    return cls(**gemms)
