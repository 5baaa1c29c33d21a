"""FP8 recipes: a scale per tensor (from earlier steps or its own amax), per row, or per block."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from microfloat.arguments import check_bool, check_choice
from microfloat.errors import invalid_type, invalid_value, unknown_name
from microfloat.formats import E4M3, E5M2, FP8_ROW, FP8_TENSOR, FP8_TENSOR_E5M2, ElementFormat, FP8_1x128, FP8_128x128
from microfloat.recipes.cast import Cast, Current, Delayed
from microfloat.recipes.core import Gemm, NamedRecipe


class Format(enum.Enum):
    """E4M3 everywhere; HYBRID: E4M3 forward, E5M2 for gradients; E5M2 exists only as a name (no GEMM takes it)."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"

    @property
    def forward(self) -> ElementFormat:
        """Element of x and w."""
        return E5M2 if self is Format.E5M2 else E4M3

    @property
    def backward(self) -> ElementFormat:
        """Element of dy."""
        return E4M3 if self is Format.E4M3 else E5M2

    def __repr__(self) -> str:
        return f"Format.{self.name}"


def as_format(value: object, allowed: tuple[Format, ...]) -> Format:
    """A Format from itself or its name; InvalidValueError for a Format that is not allowed."""
    if isinstance(value, str):
        if value.upper() not in Format.__members__:
            raise unknown_name("fp8_format", value, Format.__members__)
        value = Format[value.upper()]
    if not isinstance(value, Format):
        raise invalid_type("fp8_format", type(value), "recipes.Format.E4M3 or HYBRID, or its name")
    if value not in allowed:
        raise unknown_name("fp8_format", value.name, [choice.name for choice in allowed])
    return value


def _per_tensor(fp8_format: Format, rule: str, scaling: Current | Delayed) -> tuple[Gemm, Gemm, Gemm]:
    """The GEMMs of a recipe with one scale per tensor."""
    forward = Cast(FP8_TENSOR, rule, scaling=scaling)
    gradient = Cast(FP8_TENSOR_E5M2 if fp8_format.backward == E5M2 else FP8_TENSOR, rule, scaling=scaling)
    return Gemm(forward, forward, "fast"), Gemm(gradient, forward), Gemm(gradient, forward)


@dataclass(frozen=True)
class DelayedScaling(NamedRecipe):
    """FP8 with one scale per tensor from a history of amaxes: ``scale_enc = max / A(history) * 2^-margin``.

    The first step uses scale 1. The state is in float32 buffers of the layer. Source: docs/numerics.md 3.3;
    Micikevicius et al. 2022 (arXiv 2209.05433).
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp8_format", as_format(self.fp8_format, (Format.E4M3, Format.HYBRID)))
        object.__setattr__(self, "margin", Delayed(self.margin).margin)
        super().__post_init__()

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        scaling = Delayed(self.margin, self.amax_history_len, self.amax_compute_algo, self.reduce_amax)
        return _per_tensor(self.fp8_format, "amax", scaling)


@dataclass(frozen=True)
class Float8CurrentScaling(NamedRecipe):
    """FP8 with one scale per tensor from its own amax: ``s = max / max(A, amax_epsilon)``; no state.

    `use_power_2_scales` rounds the encode factor down to a power of two. Source: docs/numerics.md 2.3, 3.2.
    """

    _of_peers: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**NamedRecipe._of_peers, "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "use_power_2_scales"}
    )
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
        return _per_tensor(self.fp8_format, rule, Current(self.amax_epsilon))


@dataclass(frozen=True, init=False)
class Float8RowScaling(NamedRecipe):
    """FP8 E4M3 with one scale per row of every operand, along that operand's own contraction axis.

    `wgrad="high_precision"` runs wgrad on the originals (torchao's rowwise_with_gw_hp; dgrad's w is then per tensor).
    `wgrad_precision` is the same under the name of the field, which `dataclasses.replace` passes. Source:
    docs/numerics.md, section 6.
    """

    fp8_format: Format
    use_power_2_scales: bool
    # Argument `wgrad`; the attribute of that name is the Gemm.
    wgrad_precision: str

    def __init__(
        self, fp8_format: Format = Format.E4M3, use_power_2_scales: bool = True, wgrad: str = "fp8", *,
        backward: str | None = None, wgrad_precision: str | None = None,
    ) -> None:  # fmt: skip
        wgrad = wgrad if wgrad_precision is None else wgrad_precision
        object.__setattr__(self, "fp8_format", as_format(fp8_format, (Format.E4M3,)))
        check_bool("use_power_2_scales", use_power_2_scales)
        object.__setattr__(self, "use_power_2_scales", use_power_2_scales)
        check_choice("wgrad", wgrad, ("fp8", "high_precision"))
        object.__setattr__(self, "wgrad_precision", wgrad)
        object.__setattr__(self, "backward", backward)
        self.__post_init__()

    def arguments(self) -> dict[str, object]:
        """The constructor's arguments; `wgrad` under its own name."""
        return {
            "fp8_format": self.fp8_format, "use_power_2_scales": self.use_power_2_scales, "wgrad": self.wgrad_precision,
            "backward": self.backward,
        }  # fmt: skip

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        rule = "amax_pow2" if self.use_power_2_scales else "amax"
        row = Cast(FP8_ROW, rule)
        if self.wgrad_precision == "fp8":
            return Gemm(row, row), Gemm(row, row), Gemm(row, row)
        return Gemm(row, row), Gemm(row, Cast(FP8_TENSOR, rule)), Gemm(None, None)


_FORMATS = {FP8_1x128.block: FP8_1x128, FP8_128x128.block: FP8_128x128}


@dataclass(frozen=True)
class Float8BlockScaling(NamedRecipe):
    """FP8 E4M3 with FP32 scales per 1x128 block of x and dy and per 128x128 tile of w.

    `x`, `w`, `dy` are block shapes, (1, 128) or (128, 128); `use_f32_scales` keeps scales that are not powers of two.
    Source: docs/numerics.md 3.4; DeepSeek-V3 (arXiv 2412.19437).
    """

    _of_peers: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**NamedRecipe._of_peers, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "use_f32_scales"}
    )
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
