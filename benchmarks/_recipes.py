"""The recipes of the benchmarks by their short names, and comparison with the reference."""

import math
from dataclasses import replace

import torch

from microfloat import recipes

__all__ = ["LARGEST_DIFFERENCE", "RECIPES", "difference", "sqnr_db"]

_MXFP4 = recipes.MXFP4BlockScaling()
RECIPES = {
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "row": recipes.Float8RowScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8.folded": recipes.MXFP8BlockScaling(path="folded"),
    "mxfp8.exact": recipes.MXFP8BlockScaling(path="exact"),
    "mxfp4.folded": recipes.CustomRecipe(
        *(replace(gemm, path="folded") for gemm in (_MXFP4.fprop, _MXFP4.dgrad, _MXFP4.wgrad))
    ),
    "nvfp4": recipes.NVFP4BlockScaling(),
}

# Of a GEMM whose operands are the same bytes: two roundings to bfloat16 (1.7e-3 rms each) and the FP8 accumulator of
# Hopper without promotion (1.3e-3); docs/numerics.md 8.3.
LARGEST_DIFFERENCE = 6e-3


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius difference."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def sqnr_db(largest: float) -> float:
    """A relative difference in decibels, at most 200."""
    return min(200.0, -20 * math.log10(max(largest, 1e-10)))
