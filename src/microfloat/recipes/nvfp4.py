"""NVFP4: four-bit elements, E4M3 scales per 16 under a tensor scale, and the training recipe's three techniques."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

from microfloat._environment import toggle
from microfloat.arguments import check_bool, check_choice
from microfloat.errors import invalid_value
from microfloat.formats import NVFP4, NVFP4_2D, NVFP4_ROW
from microfloat.recipes.cast import Cast, Hadamard
from microfloat.recipes.core import Gemm, NamedRecipe

# field -> environment variable that gives its default when the argument is not given (docs/numerics.md, section 10)
TOGGLES = {
    "disable_rht": "MICROFLOAT_NVFP4_DISABLE_RHT",
    "disable_stochastic_rounding": "MICROFLOAT_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
    "disable_2d_quantization": "MICROFLOAT_NVFP4_DISABLE_2D_QUANTIZATION",
}
_SCOPES = {"none": "", "weights": "w", "activations": "x", "all": "xw"}  # of four-over-six -> its operands


@dataclass(frozen=True)
class NVFP4BlockScaling(NamedRecipe):
    """NVFP4 training: 1x16 blocks for x and dy, 16x16 tiles for w, Hadamard on wgrad, stochastic rounding on dy.

    Each of the first three arguments switches one technique off. Their defaults come from environment variables
    (MICROFLOAT_NVFP4_DISABLE_*), read at construction, and show in the repr. `path`: on a CPU, and on chips that have
    FP8 GEMMs but no NVFP4 GEMMs, "exact" multiplies what was quantized; "folded" rounds it to FP8 first, by at most
    1/21 of an element or 2^-17.9 of the largest value that its group or tile of 128 can hold.

    `row_scaled_activation`: x has a tensor scale for each row (token), the format nvfp4_row. `nvfp4_4over6`: "weights",
    "activations" (x) or "all" take, block by block, the better of mapping the maximum to 6 or to 4, the scale rule
    four_over_six. Neither x can be transformed, so that these need ``disable_rht=True``, or a `backward` without casts.
    Source: docs/numerics.md, sections 2.6, 5 and 9.4; arXiv 2509.25149.
    """

    _of_peers: ClassVar[Mapping[str, str]] = MappingProxyType({
        **NamedRecipe._of_peers, "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "row_scaled_activation",
        "NVTE_NVFP4_4OVER6": "nvfp4_4over6",
    })  # fmt: skip
    disable_rht: bool | None = None
    disable_stochastic_rounding: bool | None = None
    disable_2d_quantization: bool | None = None
    path: str = "exact"
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"

    def __post_init__(self) -> None:
        for name, variable in TOGGLES.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, toggle(variable))
            check_bool(name, getattr(self, name))
        check_choice("path", self.path, ("exact", "folded"))
        check_bool("row_scaled_activation", self.row_scaled_activation)
        check_choice("nvfp4_4over6", self.nvfp4_4over6, tuple(_SCOPES))
        super().__post_init__()

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        hadamard = None if self.disable_rht or self.backward else Hadamard()
        rounding = "nearest" if self.disable_stochastic_rounding else "stochastic"
        chosen = _SCOPES[self.nvfp4_4over6]
        x_rule, w_rule = ("four_over_six" if operand in chosen else None for operand in "xw")
        if hadamard is not None and (self.row_scaled_activation or x_rule):
            name = "row_scaled_activation" if self.row_scaled_activation else "nvfp4_4over6"
            needed = "disable_rht=True, or backward='dequantized'"
            raise invalid_value(name, f"{getattr(self, name)!r} with the Hadamard transform of x in wgrad", needed)
        x = Cast(NVFP4_ROW if self.row_scaled_activation else NVFP4, x_rule)
        w = Cast(NVFP4 if self.disable_2d_quantization else NVFP4_2D, w_rule)
        return (
            Gemm(x, w, "fast", self.path),
            Gemm(Cast(NVFP4, rounding=rounding), w, path=self.path),
            Gemm(Cast(NVFP4, rounding=rounding, hadamard=hadamard), replace(x, hadamard=hadamard), path=self.path),
        )  # fmt: skip
