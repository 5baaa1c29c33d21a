"""The recipes of the benchmarks by their short names, and comparison with the reference."""

import math
from dataclasses import replace

from microfloat import recipes
from microfloat.cli.machine import LARGEST_DIFFERENCE
from microfloat.torch.timing import difference

__all__ = ["LARGEST_DIFFERENCE", "RECIPES", "difference", "sqnr_db"]

# Exported recipe -> its short name here, or the paths it is measured by; what is not listed keeps its name.
_SHORT = {"delayed": "delayed", "fp8_current": "current", "fp8_row": "row", "fp8_block": "block", "nvfp4": "nvfp4"}
_BY_PATH = {"mxfp8": ("folded", "exact"), "mxfp4": ("folded",)}


def _with_path(recipe: recipes.Recipe, path: str) -> recipes.Recipe:
    """The recipe with this path for all its GEMMs."""
    return recipes.CustomRecipe(*(replace(gemm, path=path) for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad)))


def _all() -> dict[str, recipes.Recipe]:
    found = {}
    for name, make in recipes.RECIPES.items():
        paths = _BY_PATH.get(name)
        if paths is None:
            found[_SHORT.get(name, name)] = make()
        else:
            found |= {f"{name}.{path}": _with_path(make(), path) for path in paths}
    return found | {"nvfp4.folded": recipes.NVFP4BlockScaling(path="folded")}


RECIPES = _all()


def sqnr_db(largest: float) -> float:
    """A relative difference in decibels, at most 200."""
    return min(200.0, -20 * math.log10(max(largest, 1e-10)))
