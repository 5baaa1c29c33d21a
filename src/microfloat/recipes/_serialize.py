"""Recipes as JSON-ready dictionaries, and back."""

import functools
import json

from microfloat.errors import InvalidValueError, invalid_type, invalid_value, unknown_name
from microfloat.formats import FORMATS, ElementFormat, ScaledFormat, ScaleFormat
from microfloat.recipes.core import GEMMS, Cast, Current, Delayed, Gemm, Hadamard, NamedRecipe, Recipe

__all__ = ["cast_from_data", "cast_of", "cast_to_data", "format_from_data", "recipe_from_dict", "recipe_to_dict"]


def _format_to_data(fmt: ScaledFormat) -> str | dict:
    """The name of a stock format, all numbers of a user's own."""
    return fmt.name if FORMATS.get(fmt.name) == fmt else json.loads(fmt.contents)


def format_from_data(data: str | dict) -> ScaledFormat:
    if isinstance(data, str):
        if data not in FORMATS:
            raise unknown_name("format", data, FORMATS)
        return FORMATS[data]
    values = dict(data)
    values["element"] = ElementFormat(**values["element"])
    values["scale"] = ScaleFormat(**values["scale"])
    values["block"] = tuple(values["block"])
    return ScaledFormat(**values)


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
    return {**json.loads(cast.contents), "format": _format_to_data(cast.format)}


@functools.lru_cache(maxsize=1024)
def cast_of(contents: str) -> Cast:
    """The Cast whose `contents` these are."""
    cast = cast_from_data(json.loads(contents))
    assert cast is not None
    return cast


def cast_from_data(data: dict | None) -> Cast | None:
    if data is None:
        return None
    scaling = dict(data["scaling"])
    kinds = {"Current": Current, "Delayed": Delayed}
    kind = scaling.pop("kind")
    if kind not in kinds:
        raise unknown_name("scaling.kind", kind, kinds)
    hadamard = Hadamard(**data["hadamard"]) if data["hadamard"] else None
    fmt = format_from_data(data["format"])
    return Cast(fmt, data["scale_rule"], data["rounding"], hadamard, kinds[kind](**scaling))


def recipe_to_dict(recipe: Recipe) -> dict:
    """``{"recipe": class name, "fields": {...}}``; casts are written out for a CustomRecipe."""
    if isinstance(recipe, NamedRecipe):
        fields = {}
        for name, value in recipe.arguments().items():
            if callable(value):
                raise _not_serializable(name, value)
            fields[name] = list(value) if isinstance(value, tuple) else getattr(value, "value", value)
        return {"recipe": type(recipe).__name__, "fields": fields}
    gemms = {}
    for name in GEMMS:
        gemm = getattr(recipe, name)
        gemms[name] = {
            "lhs": cast_to_data(gemm.lhs), "rhs": cast_to_data(gemm.rhs),
            "accumulate": gemm.accumulate, "path": gemm.path,
        }  # fmt: skip
    return {"recipe": type(recipe).__name__, "fields": gemms}


def recipe_from_dict(data: dict) -> Recipe:
    """Rebuild the recipe that `recipe_to_dict` described."""
    from microfloat import recipes

    if not isinstance(data, dict):
        raise invalid_type("data", type(data), "the dictionary that Recipe.to_dict returns")
    if not {"recipe", "fields"} <= data.keys():
        raise invalid_value("data", f"keys {sorted(data)}", "the keys 'recipe' and 'fields'")
    classes = {cls.__name__: cls for cls in (*recipes.FAMILIES, recipes.CustomRecipe, Recipe)}
    if data["recipe"] not in classes:
        raise unknown_name("recipe", data["recipe"], classes)
    cls, fields = classes[data["recipe"]], data["fields"]
    try:
        if issubclass(cls, NamedRecipe):
            return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
        gemms = {
            name: Gemm(cast_from_data(entry["lhs"]), cast_from_data(entry["rhs"]), entry["accumulate"], entry["path"])
            for name, entry in fields.items()
        }
        return cls(**gemms)
    except (KeyError, TypeError) as error:
        raise invalid_value(
            "data", f"fields {sorted(fields)} ({error})", f"what {cls.__name__}.to_dict writes"
        ) from error
