"""Which kernel serves a Cast, as data: asked by launchers, and by `explain` about machines that are not there.

Nothing here imports Triton, so the answer is the same where it is not installed.
"""

import functools

from microfloat.formats import ELEMENTS, ElementFormat
from microfloat.recipes import Cast

__all__ = ["KERNELS", "family_of", "is_stock"]

# family -> what its kernel does, in words
KERNELS = {
    "scaled": "scale per tensor, row or 128x128 tile",
    "blocks": "scale per block of 16, 32, 64 or 128",
    "nvfp4": "scale per 16 under a tensor scale",
}
_BLOCKS = (16, 32, 64, 128)


def is_stock(element: ElementFormat) -> bool:
    """Whether kernels know the numbers of this element."""
    stock = ELEMENTS.get(element.name)
    return stock is element or stock == element


@functools.lru_cache(512)
def family_of(cast: Cast) -> tuple[str, str]:
    """(family, "") of the kernel that serves a Cast, or ("", the reason) where none does."""
    fmt, element = cast.format, cast.format.element
    if not is_stock(element):
        return "", f"element {element.name}, which is not one of the stock elements"
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
