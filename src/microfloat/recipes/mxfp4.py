"""MXFP4: four-bit elements, one power-of-two scale per 32."""

from dataclasses import dataclass

from microfloat.formats import MXFP4
from microfloat.recipes.core import Cast, Gemm, NamedRecipe

__all__ = ["MXFP4BlockScaling"]


@dataclass(frozen=True)
class MXFP4BlockScaling(NamedRecipe):
    """MXFP4: E2M1 elements, an E8M0 scale per 1x32 block, six operands alike, nearest, no Hadamard.

    Stochastic and Hadamard variants are CustomRecipes. Source: docs/numerics.md, section 4; OCP MX v1.0.
    """

    scale_rule: str = "even"

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        cast = Cast(MXFP4, self.scale_rule)
        return Gemm(cast, cast, "fast"), Gemm(cast, cast), Gemm(cast, cast)
