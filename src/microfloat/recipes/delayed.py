"""FP8 per tensor, scaled by the amaxes of earlier steps."""

from collections.abc import Callable
from dataclasses import dataclass

from microfloat.formats import E5M2, FP8_TENSOR, FP8_TENSOR_E5M2
from microfloat.recipes.core import Cast, Delayed, Gemm, NamedRecipe
from microfloat.recipes.fp8_format import Format, as_format

__all__ = ["DelayedScaling"]


@dataclass(frozen=True)
class DelayedScaling(NamedRecipe):
    """FP8 with one scale per tensor from a history of amaxes: ``scale_enc = max / A(history) * 2^-margin``.

    The first step uses scale 1. State lives in float32 buffers of the layer. Source: docs/numerics.md 3.3;
    Micikevicius et al. 2022 (arXiv 2209.05433).
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp8_format", as_format(self.fp8_format, (Format.E4M3, Format.HYBRID)))
        super().__post_init__()

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        scaling = Delayed(self.margin, self.amax_history_len, self.amax_compute_algo, self.reduce_amax)
        forward = Cast(FP8_TENSOR, "amax", scaling=scaling)
        hybrid = self.fp8_format.backward == E5M2
        gradient = Cast(FP8_TENSOR_E5M2 if hybrid else FP8_TENSOR, "amax", scaling=scaling)
        return Gemm(forward, forward, "fast"), Gemm(gradient, forward), Gemm(gradient, forward)
