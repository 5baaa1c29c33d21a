"""Recipes: frozen values that say which operand of which GEMM gets which Cast.

One file per family; an export line here makes a recipe reachable by name, and with that tested, documented and
measured (docs/adding_a_recipe.md).
"""

from collections.abc import Callable

from microfloat.errors import invalid_type, unknown_name
from microfloat.recipes.core import Cast, Current, Delayed, Gemm, Hadamard, Recipe, as_cast
from microfloat.recipes.custom import CustomRecipe
from microfloat.recipes.delayed import DelayedScaling
from microfloat.recipes.fp8_block import Float8BlockScaling
from microfloat.recipes.fp8_current import Float8CurrentScaling
from microfloat.recipes.fp8_format import Format
from microfloat.recipes.fp8_row import Float8RowScaling
from microfloat.recipes.mxfp4 import MXFP4BlockScaling
from microfloat.recipes.mxfp6 import MXFP6BlockScaling
from microfloat.recipes.mxfp8 import MXFP8BlockScaling
from microfloat.recipes.nvfp4 import NVFP4BlockScaling
from microfloat.recipes.placement import Placement

__all__ = [
    "FAMILIES", "RECIPES", "Cast", "Current", "CustomRecipe", "Delayed", "DelayedScaling", "Float8BlockScaling",
    "Float8CurrentScaling", "Float8RowScaling", "Format", "Gemm", "Hadamard", "MXFP4BlockScaling", "MXFP6BlockScaling",
    "MXFP8BlockScaling", "NVFP4BlockScaling", "Placement", "Recipe", "as_cast", "from_name", "get_default_recipe",
]  # fmt: skip

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

# Names that users of torchao and Megatron-LM know (docs/recipes.md).
_ALIASES: dict[str, Callable[[], Recipe]] = {
    "tensorwise": Float8CurrentScaling,
    "rowwise": Float8RowScaling,
    "rowwise_with_gw_hp": lambda: Float8RowScaling(wgrad="high_precision"),
    "blockwise": Float8BlockScaling,
    "mxfp8_rceil": MXFP8BlockScaling,
}


def from_name(name: str) -> Recipe:
    """The stock recipe of that name ("nvfp4"), or of a peer's name that resolves to one ("tensorwise").

    Raises InvalidValueError with the nearest known name otherwise.
    """
    if not isinstance(name, str):
        raise invalid_type("name", type(name), "a recipe name such as 'mxfp8'")
    maker = RECIPES.get(name) or _ALIASES.get(name)
    if maker is None:
        raise unknown_name("name", name, [*RECIPES, *_ALIASES])
    return maker()


def get_default_recipe() -> Recipe:
    """The recipe of ``autocast()`` without one: Float8CurrentScaling(), on every device."""
    return Float8CurrentScaling()
