"""The rows of the study: what is compared with bf16, and which hypothesis it belongs to."""

from dataclasses import replace
from typing import NamedTuple

from microfloat import recipes
from microfloat.formats import NVFP4
from microfloat.recipes import Cast, CustomRecipe, Gemm, Hadamard, NVFP4BlockScaling, Recipe

BASELINE, AGAIN = "bf16", "bf16_again"


class Row(NamedTuple):
    """A recipe of the blocks (None: bf16), one of the head, and the share of the steps from which all is bf16."""

    about: str
    recipe: Recipe | None = None
    head: Recipe | None = None
    bf16_from: float = 1.0
    noise: float = 0.0  # relative, of the initial weights


def four_over_six() -> Recipe:
    """NVFP4 as the stock recipe, but x and w of the forward in 1x16 blocks that choose between maxima of 6 and 4."""
    forward = Cast(NVFP4, "four_over_six")
    dy, hadamard = Cast(NVFP4, rounding="stochastic"), Hadamard()
    turned = Cast(NVFP4, rounding="stochastic", hadamard=hadamard)
    return CustomRecipe(
        fprop=Gemm(forward, forward, "fast"),
        dgrad=Gemm(dy, Cast(NVFP4)),
        wgrad=Gemm(turned, Cast(NVFP4, hadamard=hadamard)),
    )


def ms_eden(mask: int = 0x9E3779B97F4A7C15) -> Recipe:
    """NVFP4 as the stock recipe, but all operands of the backward by MS-EDEN (arXiv 2601.22813) under fixed signs."""
    operand = Cast(NVFP4, rounding="eden", hadamard=Hadamard(64, mask))
    return CustomRecipe(NVFP4BlockScaling().fprop, dgrad=Gemm(operand, operand), wgrad=Gemm(operand, operand))


def exact(recipe: Recipe) -> Recipe:
    """The recipe with products of the quantized values as they are, on every chip."""
    return CustomRecipe(*(replace(gemm, path="exact") for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad)))


# "exact" multiplies the quantized values as they are, also on chips without MX or NVFP4 GEMMs: formats are studied.
ROWS = {
    BASELINE: Row("bfloat16 products"),
    AGAIN: Row("bf16 from weights that differ by one rounding to bfloat16, on the same batches: chance", noise=2.0**-8),
    "mxfp8": Row("MXFP8, all six operands", recipes.MXFP8BlockScaling(path="exact")),
    "nvfp4": Row("NVFP4: 2D weights, stochastic dy, Hadamard on wgrad", NVFP4BlockScaling()),
    "nvfp4_forward": Row("NVFP4 in the forward alone", NVFP4BlockScaling(backward="high_precision")),
    "nvfp4_folded": Row("NVFP4 whose operands are rounded once more, to FP8", NVFP4BlockScaling(path="folded")),
    # One seed each.
    "nvfp4_no_sr": Row("NVFP4, dy rounded to nearest", NVFP4BlockScaling(disable_stochastic_rounding=True)),
    "nvfp4_no_rht": Row("NVFP4 without Hadamard", NVFP4BlockScaling(disable_rht=True)),
    "nvfp4_no_2d": Row("NVFP4, weights in 1x16 blocks", NVFP4BlockScaling(disable_2d_quantization=True)),
    "nvfp4_late_bf16": Row("NVFP4, the last tenth of the steps in bf16", NVFP4BlockScaling(), bf16_from=0.9),
    "nvfp4_four_over_six": Row("NVFP4, 1x16 blocks that choose between maxima of 6 and 4", exact(four_over_six())),
    "nvfp4_ms_eden": Row("NVFP4 forward, MS-EDEN backward with one mask of signs", exact(ms_eden())),
    "mxfp4": Row("MXFP4, all six operands", exact(recipes.MXFP4BlockScaling())),
    "mxfp6": Row("MXFP6, all six operands", exact(recipes.MXFP6BlockScaling())),
    "mxfp8_floor": Row("MXFP8, scales rounded down", recipes.MXFP8BlockScaling(scale_rule="floor", path="exact")),
    "mxfp8_e5m2": Row("MXFP8, dy in E5M2", recipes.MXFP8BlockScaling(fp8_format=recipes.Format.HYBRID, path="exact")),
    "fp8_current": Row("FP8, a scale for each tensor", recipes.Float8CurrentScaling()),
    "fp8_delayed": Row("FP8, scales of earlier steps", recipes.DelayedScaling()),
    "fp8_block": Row("FP8, 1x128 and 128x128 scales", recipes.Float8BlockScaling()),
    "fp8_head": Row("bf16 blocks, the head in FP8", None, recipes.Float8CurrentScaling()),
}
MAIN = ("bf16", "bf16_again", "mxfp8", "nvfp4", "nvfp4_forward", "nvfp4_folded")
