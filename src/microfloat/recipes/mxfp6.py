"""MXFP6: six-bit elements, one power-of-two scale per 32."""

from dataclasses import dataclass

from microfloat.arguments import check_choice
from microfloat.formats import MXFP6_E2M3, MXFP6_E3M2
from microfloat.recipes.core import Cast, Gemm, NamedRecipe

__all__ = ["MXFP6BlockScaling"]

_FORMATS = {"E3M2": MXFP6_E3M2, "E2M3": MXFP6_E2M3}


@dataclass(frozen=True)
class MXFP6BlockScaling(NamedRecipe):
    """MXFP6: E3M2 (OCP's choice for training) or E2M3 elements, an E8M0 scale per 1x32 block, six operands alike.

    Source: docs/numerics.md, section 4; OCP Microscaling Formats v1.0.
    """

    element: str = "E3M2"
    scale_rule: str = "rceil"

    def __post_init__(self) -> None:
        object.__setattr__(self, "element", getattr(self.element, "name", self.element))
        check_choice("element", self.element, tuple(_FORMATS))
        super().__post_init__()

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        cast = Cast(_FORMATS[self.element], self.scale_rule)
        return Gemm(cast, cast, "fast"), Gemm(cast, cast), Gemm(cast, cast)
