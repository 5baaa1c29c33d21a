"""FP8 with 1x128 blocks and 128x128 weight tiles."""

from dataclasses import dataclass

from microfloat.arguments import check_bool
from microfloat.errors import invalid_value
from microfloat.formats import FP8_1x128, FP8_128x128
from microfloat.recipes.core import Cast, Gemm, NamedRecipe
from microfloat.recipes.fp8_format import Format, as_format

__all__ = ["Float8BlockScaling"]

_FORMATS = {FP8_1x128.block: FP8_1x128, FP8_128x128.block: FP8_128x128}


@dataclass(frozen=True)
class Float8BlockScaling(NamedRecipe):
    """FP8 E4M3 with FP32 scales per 1x128 block of x and dy and per 128x128 tile of w.

    `x`, `w`, `dy` are block shapes, (1, 128) or (128, 128); `use_f32_scales` keeps scales that are no power of two.
    Source: docs/numerics.md 3.4; DeepSeek-V3 (arXiv 2412.19437).
    """

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False
    x: tuple[int, int] = (1, 128)
    w: tuple[int, int] = (128, 128)
    dy: tuple[int, int] = (1, 128)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp8_format", as_format(self.fp8_format, (Format.E4M3,)))
        check_bool("use_f32_scales", self.use_f32_scales)
        for name in ("x", "w", "dy"):
            block = getattr(self, name)
            are_ints = isinstance(block, tuple | list) and all(type(size) is int for size in block)
            if not are_ints or tuple(block) not in _FORMATS:
                raise invalid_value(name, block, "a block of (1, 128) or (128, 128)")
            object.__setattr__(self, name, tuple(block))
        super().__post_init__()

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        rule = "amax" if self.use_f32_scales else "amax_pow2"
        x, w, dy = (Cast(_FORMATS[block], rule) for block in (self.x, self.w, self.dy))
        return Gemm(x, w), Gemm(dy, w), Gemm(dy, x)
