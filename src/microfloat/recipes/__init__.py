"""Recipes: frozen values that say which operand of which GEMM gets which Cast.

One file per family; an export line here makes a recipe reachable by name, and with that tested, documented and
measured (docs/adding_a_recipe.md).
"""

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
from microfloat.recipes.names import FAMILIES, RECIPES, from_name, get_default_recipe
from microfloat.recipes.nvfp4 import NVFP4BlockScaling
from microfloat.recipes.placement import Placement

__all__ = [
    "FAMILIES", "RECIPES", "Cast", "Current", "CustomRecipe", "Delayed", "DelayedScaling", "Float8BlockScaling",
    "Float8CurrentScaling", "Float8RowScaling", "Format", "Gemm", "Hadamard", "MXFP4BlockScaling", "MXFP6BlockScaling",
    "MXFP8BlockScaling", "NVFP4BlockScaling", "Placement", "Recipe", "as_cast", "from_name", "get_default_recipe",
]  # fmt: skip
