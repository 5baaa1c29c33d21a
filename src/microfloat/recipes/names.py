"""The names of the stock recipes, and how a recipe argument is interpreted."""

import functools
from collections.abc import Callable

from microfloat._environment import state_of
from microfloat.errors import invalid_type, kind_of, unknown_name
from microfloat.formats import ScaledFormat, get_format
from microfloat.recipes.cast import HINTS, Cast
from microfloat.recipes.core import Recipe, register
from microfloat.recipes.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Float8RowScaling
from microfloat.recipes.mx import MXFP4BlockScaling, MXFP6BlockScaling, MXFP8BlockScaling
from microfloat.recipes.nvfp4 import TOGGLES, NVFP4BlockScaling

# Canonical name -> how to make the recipe. A class (its defaults), or a function that returns one frozen value.
RECIPES: dict[str, Callable[[], Recipe]] = {
    "delayed": DelayedScaling,
    "fp8_current": Float8CurrentScaling,
    "fp8_row": Float8RowScaling,
    "fp8_block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "mxfp6": MXFP6BlockScaling,
    "mxfp4": MXFP4BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
FAMILIES = tuple(maker for maker in RECIPES.values() if isinstance(maker, type))
register(*FAMILIES)
# The variables on which a recipe made without arguments depends, and those of which its making warns.
_WATCHED = (
    *TOGGLES.values(), *(name.replace("MICROFLOAT", "NVTE", 1) for name in TOGGLES.values()),
    *sorted({name for family in FAMILIES for name in getattr(family, "_of_peers", ())}),
)  # fmt: skip

# Names that users of torchao and Megatron-LM know (docs/recipes.md).
ALIASES: dict[str, Callable[[], Recipe]] = {
    "tensorwise": Float8CurrentScaling,
    "rowwise": Float8RowScaling,
    "rowwise_with_gw_hp": lambda: Float8RowScaling(wgrad="high_precision"),
    "blockwise": Float8BlockScaling,
    "mxfp8_rceil": MXFP8BlockScaling,
}


def from_name(name: str) -> Recipe:
    """The stock recipe of that name ("nvfp4"), or of another library's name for it ("tensorwise").

    Raises InvalidValueError otherwise, with the nearest known name or, for a format's name, the recipes that use it.
    """
    return _named(name, "name")


def _named(name: str, argument: str) -> Recipe:
    if not isinstance(name, str):
        raise invalid_type(argument, type(name), "a recipe name such as 'mxfp8'")
    maker = RECIPES.get(name) or ALIASES.get(name)
    if maker is None:
        of_class = (f"{name} is the class of {short!r}." for short, one in RECIPES.items() if one.__name__ == name)
        raise unknown_name(argument, name, [*RECIPES, *ALIASES], hint_of_format(name) or next(of_class, ""))
    return _made(maker, state_of(_WATCHED))


@functools.lru_cache(maxsize=256)
def _made(maker: Callable[[], Recipe], toggles: tuple[str | None, ...]) -> Recipe:
    """The recipe that `maker` makes under these toggles of the environment: one object, since recipes are values."""
    return maker()


def as_recipe(recipe: Recipe | str, argument: str = "recipe") -> Recipe:
    """A Recipe from itself or its name; errors call it `argument`."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        return _named(recipe, argument)
    hint = getattr(recipe, "_not_a_recipe", "")
    if isinstance(recipe, type):
        hint = f"Call the class: {recipe.__name__}()." if issubclass(recipe, Recipe) else ""
    elif isinstance(recipe, ScaledFormat | Cast):
        hint = hint_of_format(getattr(recipe, "format", recipe).name, is_format=True)
    raise invalid_type(argument, kind_of(recipe), "a Recipe, such as recipes.MXFP8BlockScaling(), or its name", hint)


def get_default_recipe() -> Recipe:
    """The recipe that ``autocast()`` uses by default: Float8CurrentScaling(), on every device."""
    return Float8CurrentScaling()


def _formats_of(recipe: Recipe) -> list[str]:
    return list(dict.fromkeys(cast.format.name for cast in recipe.casts.values() if cast is not None))


def hint_of_format(name: str, is_format: bool = False) -> str:
    """A hint for the name of a format given as a recipe; "" for any other name, unless it `is_format` all the same."""
    try:
        is_format = is_format or get_format(name) is not None
    except ValueError:
        return ""
    using = ", ".join(repr(recipe) for recipe, make in RECIPES.items() if name in _formats_of(make()))
    if using:
        return f"{name!r} is a format; the recipes that use it: {using}."
    return (
        f"{name!r} is a format that no stock recipe uses. Under one of your own it trains: with gemm = Gemm(format, "
        "format), CustomRecipe(gemm, gemm, gemm) takes it for all six operands."
    )


def hint_of_recipe(name: str) -> str:
    """A hint for the name of a recipe given as a format; "" for any other name."""
    make = RECIPES.get(name) or ALIASES.get(name)
    if make is None:
        return ""
    return f"{name!r} is a recipe; the formats that it uses: {', '.join(map(repr, _formats_of(make())))}."


HINTS.append(hint_of_recipe)
