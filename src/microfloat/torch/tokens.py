"""Recipes as strings, the only form in which compiled code carries them.

Dynamo guards a string by its value, so equal recipes never recompile and a changed one always does. The token of a
recipe is derived from its contents, so it means the same in another process.
"""

import json

from microfloat.errors import InvalidValueError
from microfloat.recipes import Recipe

__all__ = ["PLAIN", "canonical", "is_delayed", "is_stochastic", "keeps_x", "recipe_of", "token_of"]

PLAIN = ""
_RECIPES: dict[str, Recipe] = {}
_TOKENS: dict[Recipe, str] = {}
# Comparing recipes costs as much as several launches, so each object is compared once: by its id, the object itself
# (which keeps its id its own), the first recipe that it equals, and the token.
_KNOWN: dict[int, tuple[Recipe, Recipe, str]] = {}
_FIRST: dict[Recipe, Recipe] = {}
_MOST_KNOWN = 512


def canonical(recipe: Recipe) -> Recipe:
    """One object for all equal recipes, so that what is worked out for a recipe may be kept under its id."""
    known = _KNOWN.get(id(recipe))
    return (_learn(recipe) if known is None else known)[1]


def token_of(recipe: Recipe | None) -> str:
    """The token of a recipe; PLAIN for None (high precision)."""
    if recipe is None:
        return PLAIN
    known = _KNOWN.get(id(recipe))
    return (_learn(recipe) if known is None else known)[2]


def _learn(recipe: Recipe) -> tuple[Recipe, Recipe, str]:
    if len(_KNOWN) >= _MOST_KNOWN:  # recipes made anew for every call must not pile up
        _KNOWN.clear()
    known = _KNOWN[id(recipe)] = (recipe, _FIRST.setdefault(recipe, recipe), _make_token(recipe))
    return known


def _make_token(recipe: Recipe) -> str:
    token = _TOKENS.get(recipe)
    if token is None:
        kept = recipe.wgrad.rhs is None
        traits = ("s" if recipe.is_stochastic else "-") + ("d" if recipe.is_delayed else "-") + ("x" if kept else "-")
        try:
            contents = json.dumps(recipe.to_dict(), sort_keys=True)
        except InvalidValueError:  # a callable amax_compute_algo has no contents to write down
            contents = f"recipe {len(_TOKENS)} of this process"
        token = _TOKENS[recipe] = f"{traits} {contents}"
        _RECIPES[token] = recipe
    return token


def recipe_of(token: str) -> Recipe:
    """The recipe that `token_of` named."""
    return _RECIPES[token]


def is_stochastic(token: str) -> bool:
    """Whether the recipe needs a call seed; reads the token only, so that compiled code may ask."""
    return token[0] == "s"


def is_delayed(token: str) -> bool:
    """Whether the recipe carries delayed-scaling state."""
    return token[1] == "d"


def keeps_x(token: str) -> bool:
    """Whether backward reads x itself, because wgrad takes it in high precision."""
    return token[2] == "x"
