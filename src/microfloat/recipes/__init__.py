"""Recipes: immutable values that say which operand of which GEMM gets which Cast.

There is one file per family. An entry in `names.RECIPES` gives a recipe a name, by which it is also tested, documented
and measured (docs/adding_a_recipe.md).
"""

from microfloat.recipes.cast import Cast, Current, Delayed, Hadamard, Static, as_cast
from microfloat.recipes.core import CustomRecipe, Gemm, Recipe
from microfloat.recipes.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Float8RowScaling, Format
from microfloat.recipes.inference import WeightActivation, WeightOnly
from microfloat.recipes.mx import MXFP4BlockScaling, MXFP6BlockScaling, MXFP8BlockScaling
from microfloat.recipes.names import FAMILIES, RECIPES, from_name, get_default_recipe
from microfloat.recipes.nvfp4 import NVFP4BlockScaling
from microfloat.recipes.placement import Placement
from microfloat.scale_rules import ScaleRule, TwoLevel

__all__ = [
    "FAMILIES", "RECIPES", "Cast", "Current", "CustomRecipe", "Delayed", "DelayedScaling", "Float8BlockScaling",
    "Float8CurrentScaling", "Float8RowScaling", "Format", "Gemm", "Hadamard", "MXFP4BlockScaling", "MXFP6BlockScaling",
    "MXFP8BlockScaling", "NVFP4BlockScaling", "Placement", "Recipe", "ScaleRule", "Static", "TwoLevel",
    "WeightActivation", "WeightOnly", "as_cast", "from_name", "get_default_recipe",
]  # fmt: skip
