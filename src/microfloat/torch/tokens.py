"""Recipes as strings, the only form in which compiled code carries them.

Dynamo guards a string by its value, so equal recipes never recompile and a changed one always does. The token of a
recipe is derived from its contents, so it means the same in another process.
"""

import json

from microfloat.errors import InvalidValueError
from microfloat.recipes import Recipe

__all__ = ["PLAIN", "is_delayed", "is_stochastic", "recipe_of", "token_of"]

PLAIN = ""
_RECIPES: dict[str, Recipe] = {}
_TOKENS: dict[Recipe, str] = {}


def token_of(recipe: Recipe | None) -> str:
    """The token of a recipe; PLAIN for None (high precision)."""
    if recipe is None:
        return PLAIN
    token = _TOKENS.get(recipe)
    if token is None:
        traits = ("s" if recipe.is_stochastic else "-") + ("d" if recipe.is_delayed else "-")
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
