"""Which kernel serves a Cast, as data: asked by launchers, and by `explain` about machines that are not there.

Nothing here imports Triton, so the answer is the same where it is not installed.
"""

import functools

from microfloat.formats import ELEMENTS, SCALE_E4M3, SCALE_E8M0, SCALE_FP32, ElementFormat
from microfloat.recipes import Cast
from microfloat.scale_rules import TwoLevel, unknown_kind

__all__ = ["family_of", "is_stock"]

# The kinds of scale rules that kernels compute, by the scale format.
_RULE_KINDS = {SCALE_FP32: "ratio", SCALE_E8M0: "threshold", SCALE_E4M3: "two_level"}
_BLOCKS = (16, 32, 64, 128)


def is_stock(element: ElementFormat) -> bool:
    """True for an element whose numbers the kernels know."""
    stock = ELEMENTS.get(element.name)
    return stock is element or stock == element


@functools.lru_cache(512)
def family_of(cast: Cast) -> tuple[str, str]:
    """(family, "") of the kernel that serves a Cast, or ("", the reason) where none does.

    The family is the module of `microfloat.kernels`: "scaled" (a scale per tensor, row or 128x128 tile), "blocks" (per
    block of 16, 32, 64 or 128) or "nvfp4" (per 16 under a tensor scale).
    """
    fmt, element = cast.format, cast.format.element
    if not is_stock(element):
        return "", f"element {element.name}, which is not one of the stock elements"
    if _RULE_KINDS.get(fmt.scale) != cast.rule.kind:
        return "", unknown_kind(cast.rule)
    if cast.rule.two_level is not None and cast.rule.two_level not in _two_levels(cast.rule.two_level):
        return "", f"the constants of the scale rule {cast.rule.name!r}"
    if fmt.scale.name == "E4M3" and fmt.block in ((1, 16), (16, 16)) and element.name == "E2M1":
        return "nvfp4", ""
    if fmt.block in ((None, None), (1, None), (128, 128)) and fmt.scale.name == "FP32" and element.bits == 8:
        return "scaled", ""
    if (
        fmt.block[0] in (1, fmt.block[1])
        and fmt.block[1] in _BLOCKS
        and (element.bits == 8 or fmt.scale.name == "E8M0")
    ):
        return "blocks", ""
    return "", f"block {fmt.block_text} of {fmt.name}"


def _two_levels(level: TwoLevel) -> tuple[TwoLevel, ...]:
    """The rules that kernels compute with this capacity and sixth; the rest of a rule are constants of theirs."""
    capacity, smallest = level.capacity, 2.0**-6
    return (
        TwoLevel(capacity, level.inverse_six or 1.0),
        TwoLevel(capacity, None, smallest),
        TwoLevel(capacity, None, smallest, tensor_scale=False),
        *(TwoLevel(capacity, smallest_amax=capacity * 2.0**-117, four_over_six=error) for error in ("mae", "mse")),
    )
