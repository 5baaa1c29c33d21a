"""FP8 with one scale per row of each operand."""

from dataclasses import dataclass

from microfloat.arguments import check_bool, check_choice
from microfloat.formats import FP8_ROW, FP8_TENSOR
from microfloat.recipes.core import Cast, Gemm, NamedRecipe
from microfloat.recipes.fp8_format import Format, as_format

__all__ = ["Float8RowScaling"]


@dataclass(frozen=True, init=False)
class Float8RowScaling(NamedRecipe):
    """FP8 E4M3 with one scale per row of every operand, along that operand's own contraction axis.

    `wgrad="high_precision"` runs wgrad on the originals (torchao's rowwise_with_gw_hp; dgrad's w is then per tensor).
    Source: docs/numerics.md, section 6.
    """

    fp8_format: Format
    use_power_2_scales: bool
    # Argument `wgrad`; the attribute of that name is the Gemm.
    wgrad_precision: str

    def __init__(self, fp8_format: Format = Format.E4M3, use_power_2_scales: bool = True, wgrad: str = "fp8") -> None:
        object.__setattr__(self, "fp8_format", as_format(fp8_format, (Format.E4M3,)))
        check_bool("use_power_2_scales", use_power_2_scales)
        object.__setattr__(self, "use_power_2_scales", use_power_2_scales)
        check_choice("wgrad", wgrad, ("fp8", "high_precision"))
        object.__setattr__(self, "wgrad_precision", wgrad)
        self.__post_init__()

    def arguments(self) -> dict[str, object]:
        """The constructor's arguments; `wgrad` under its own name."""
        return {
            "fp8_format": self.fp8_format, "use_power_2_scales": self.use_power_2_scales, "wgrad": self.wgrad_precision
        }  # fmt: skip

    def __repr__(self) -> str:
        return "Float8RowScaling(" + ", ".join(f"{name}={value!r}" for name, value in self.arguments().items()) + ")"

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        rule = "amax_pow2" if self.use_power_2_scales else "amax"
        row = Cast(FP8_ROW, rule)
        if self.wgrad_precision == "fp8":
            return Gemm(row, row), Gemm(row, row), Gemm(row, row)
        return Gemm(row, row), Gemm(row, Cast(FP8_TENSOR, rule)), Gemm(None, None)
