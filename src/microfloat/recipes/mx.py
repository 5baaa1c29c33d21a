"""MX recipes: elements of 8, 6 or 4 bits, one power-of-two scale per 32 along each contraction axis."""

from dataclasses import dataclass

from microfloat.arguments import check_bool, check_choice
from microfloat.formats import E4M3, E5M2, MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8, MXFP8_E5M2, SCALE_E8M0, ScaledFormat
from microfloat.recipes.cast import Cast
from microfloat.recipes.core import Gemm, NamedRecipe
from microfloat.recipes.fp8 import Format, as_format

_TILES = ScaledFormat("mxfp8_2d", E4M3, SCALE_E8M0, (32, 32))


@dataclass(frozen=True)
class MXFP8BlockScaling(NamedRecipe):
    """MXFP8: E4M3 elements (E5M2 gradients with HYBRID), an E8M0 scale per 1x32 block, all six operands cast alike.

    `scale_rule` is one of floor, ceil, even, rceil, oas; `path` says how the GEMM runs on chips that have FP8 GEMMs but
    no MX GEMMs. `enable_2d_quantization`: w has 32x32 tiles, so that fprop and dgrad read the same codes of it. Source:
    docs/numerics.md, sections 4 and 10; OCP Microscaling Formats v1.0; Mishra et al. (arXiv 2506.08027).
    """

    fp8_format: Format = Format.E4M3
    scale_rule: str = "rceil"
    path: str = "auto"
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        check_bool("enable_2d_quantization", self.enable_2d_quantization)
        object.__setattr__(self, "fp8_format", as_format(self.fp8_format, (Format.E4M3, Format.HYBRID)))
        super().__post_init__()

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        forward = Cast(MXFP8, self.scale_rule)
        gradient = Cast(MXFP8_E5M2 if self.fp8_format.backward == E5M2 else MXFP8, self.scale_rule)
        w = Cast(_TILES, self.scale_rule) if self.enable_2d_quantization else forward
        return (
            Gemm(forward, w, "fast", self.path),
            Gemm(gradient, w, "split", self.path),
            Gemm(gradient, forward, "split", self.path),
        )


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


@dataclass(frozen=True)
class MXFP4BlockScaling(NamedRecipe):
    """MXFP4: E2M1 elements, an E8M0 scale per 1x32 block, six operands alike, nearest, no Hadamard.

    Stochastic and Hadamard variants are CustomRecipes. Source: docs/numerics.md, section 4; OCP MX v1.0.
    """

    scale_rule: str = "even"

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        cast = Cast(MXFP4, self.scale_rule)
        return Gemm(cast, cast, "fast"), Gemm(cast, cast), Gemm(cast, cast)
