"""FP8 per tensor, scaled by the amax of the tensor itself."""

from dataclasses import dataclass

from microfloat.arguments import check_bool
from microfloat.formats import E5M2, FP8_TENSOR, FP8_TENSOR_E5M2
from microfloat.recipes.core import Cast, Current, Gemm, NamedRecipe
from microfloat.recipes.fp8_format import Format, as_format

__all__ = ["Float8CurrentScaling"]


@dataclass(frozen=True)
class Float8CurrentScaling(NamedRecipe):
    """FP8 with one scale per tensor from its own amax: ``s = max / max(A, amax_epsilon)``; no state.

    `use_power_2_scales` rounds the encode factor down to a power of two. Source: docs/numerics.md 2.3, 3.2.
    """

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp8_format", as_format(self.fp8_format, (Format.E4M3, Format.HYBRID)))
        check_bool("use_power_2_scales", self.use_power_2_scales)
        object.__setattr__(self, "amax_epsilon", Current(self.amax_epsilon).amax_epsilon)
        super().__post_init__()

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        rule = "amax_pow2" if self.use_power_2_scales else "amax"
        scaling = Current(self.amax_epsilon)
        forward = Cast(FP8_TENSOR, rule, scaling=scaling)
        hybrid = self.fp8_format.backward == E5M2
        gradient = Cast(FP8_TENSOR_E5M2 if hybrid else FP8_TENSOR, rule, scaling=scaling)
        return Gemm(forward, forward, "fast"), Gemm(gradient, forward), Gemm(gradient, forward)
