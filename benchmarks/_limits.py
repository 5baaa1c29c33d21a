"""Limit of a step of a Linear in this very run: its three GEMMs alone, and its casts at the speed of a copy.

The limits of `_targets` rest on GEMM rates of another run; clocks and power differ between runs, so a ratio is judged
beside the limit that its own run allows: bf16's time / (GEMMs on operands at hand + bytes of the casts / copy).
"""

from collections.abc import Callable
from dataclasses import replace

from microfloat.recipes import Cast, Recipe
from microfloat.torch.timing import Maker, matrices

__all__ = ["bare_gemms", "limit_of_run"]

# Bytes per element of x, w and dy that must move: read once, or twice where a global amax comes first, codes written.
CAST_BYTES = {
    "delayed": 4, "current": 6, "row": 6, "block": 4.0625, "mxfp8.folded": 4.0625, "mxfp4.folded": 4.0625,
    "mxfp8.exact": 6, "nvfp4": 8, "nvfp4.folded": 6,
}  # fmt: skip


def bare_gemms(recipe: Recipe, shape: tuple[int, int, int], device: str) -> Callable[[int], None]:
    """fprop, dgrad and wgrad of a recipe on operands that were cast before the clock runs."""
    m, k, n = shape
    made = []
    for gemm, sizes in ((recipe.fprop, (m, k, n)), (recipe.dgrad, (m, n, k)), (recipe.wgrad, (n, m, k))):
        maker = Maker(replace(gemm, lhs=_plain(gemm.lhs), rhs=_plain(gemm.rhs)), device)
        made.append(maker.bound(*matrices(sizes, device)))

    def run(_: int) -> None:
        for product in made:
            product()

    return run


def _plain(cast: Cast | None) -> Cast | None:
    """The cast without noise and without a known scale: neither matters to the GEMM."""
    return None if cast is None else Cast(cast.format, hadamard=cast.hadamard)


def limit_of_run(name: str, shape: tuple[int, int, int], bf16_ms: float, gemms_ms: float, copy: float) -> float | None:
    """The ratio that this run allows; `copy` in GB/s. None for a recipe whose casts are not listed."""
    if name not in CAST_BYTES:
        return None
    m, k, n = shape
    casts_ms = CAST_BYTES[name] * (m * k + m * n + n * k) / copy / 1e6
    return bf16_ms / (gemms_ms + casts_ms)
