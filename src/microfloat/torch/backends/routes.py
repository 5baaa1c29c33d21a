"""In which form each operand enters its GEMM on a chip: codes, folded codes, or decoded bfloat16 values.

The decision is a function of the two Casts, the GEMM's path and the chip; `explain` prints it and the native backend
acts on it, so what is said is what runs (docs/numerics.md, section 10). Nothing here imports Triton: the answer about a
chip is the same on every machine.
"""

import functools
from dataclasses import dataclass

import torch

from microfloat.chips import Chip
from microfloat.kernels.families import family_of, is_stock
from microfloat.recipes import Cast, Gemm

__all__ = ["OWN_GEMMS", "UNTRIED", "OwnGemm", "Route", "chip_of", "own_gemm_is_faster", "route_of"]

UNTRIED = "not yet run on the hardware"


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """The chip behind a CUDA device."""
    return Chip(torch.cuda.get_device_capability(device))


@dataclass(frozen=True)
class Route:
    """How one GEMM runs: both operands' forms ("codes", "folded", "tiles", "values"), what multiplies them, in words.

    `kind`: what multiplies operands of codes: "fp8", "blocks" (128 elements to a scale), "block_scaled" (MX, NVFP4),
    "values" (decoded to bfloat16 first) or "float32"; "plain" with one operand in high precision.
    """

    kind: str
    lhs: str
    rhs: str
    kernel: str
    accelerated: bool
    reason: str


@dataclass(frozen=True)
class OwnGemm:
    """The cut of a program of microfloat's FP8 GEMM with 1x128 scales: warpgroups that multiply, parts of 64 rows of
    each, stages of its ring, rows of tiles to go down before the next column, registers of a multiplying thread."""

    warpgroups: int
    parts: int
    stages: int
    group: int
    registers: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of C that one program makes at a time."""
        return 64 * self.warpgroups * self.parts, 128


# By whether the second operand has 128x128 scales ("tiles"); chosen by measurement.
OWN_GEMMS = {False: OwnGemm(2, 2, 4, 8, 240), True: OwnGemm(3, 1, 4, 8, 160)}
# Where it was measured to win: E4M3 to bfloat16 (the kernel's other forms have not run on a GPU yet), long sums, many
# products, and tiles that keep all multiprocessors busy to the end.
_LEAST_LENGTH, _LEAST_PRODUCTS, _LEAST_FILL = 4096, 2**38, 0.95


def own_gemm_is_faster(
    shape: tuple[int, int, int], tiles: bool, dtype: torch.dtype, chip: Chip, processors: int = 132
) -> bool:
    """True if microfloat's FP8 GEMM serves a product of M, K, N in `dtype` and beats the vendor's.

    bfloat16 results, on compute capability 9.0, M a multiple of 4, K and N of 16; from 2^38 products and K of 4096 on,
    where tiles of C come in nearly whole rounds of `processors`. `tiles`: the second operand has 128x128 scales.
    """
    m, k, n = shape
    if chip.capability != (9, 0) or dtype != torch.bfloat16 or m * k * n < _LEAST_PRODUCTS or k < _LEAST_LENGTH:
        return False
    if m % 4 or (k | n) % 16 or m * k >= 2**37 or n * k >= 2**37:
        return False
    rows, columns = OWN_GEMMS[tiles].tile
    rounds = -(-(-(-m // rows) * -(-n // columns)) // processors)
    # The part of all multiprocessors' time that goes into elements of C, if every tile takes equally long.
    return m * n / (rounds * processors * rows * columns) >= _LEAST_FILL


def _gemm_kind(a: tuple[int | None, int | None], b: tuple[int | None, int | None]) -> str | None:
    """Which FP8 GEMM serves operands of these blocks: "tensor", "row", "block", or None for none."""
    wide = {(None, None), (1, None)}
    if a == b == (None, None):
        return "tensor"
    if a in wide and b in wide:
        return "row"
    return "block" if a == (1, 128) and b in ((1, 128), (128, 128)) else None


@functools.cache
def route_of(gemm: Gemm, chip: Chip, fold: bool = True) -> Route:
    """The route of `gemm` on `chip`. `fold`: whether "auto" may fold, given the lossy counts of the step before."""
    lhs, rhs = gemm.casts
    if lhs is None or rhs is None:
        reason = "the recipe keeps one operand in high precision"
        return Route(
            "plain", "codes", "codes", "dequantize one operand, vendor GEMM in the compute dtype", False, reason
        )
    foreign = [cast.format.element.name for cast in (lhs, rhs) if not is_stock(cast.format.element)]
    if foreign:
        reason = f"{foreign[0]} is not one of the stock elements: plain torch ops cast, decode and multiply it"
        return Route("float32", "codes", "codes", "decode to float32, float32 GEMM", False, reason)
    family = lhs.format.scale.name
    if family == "FP32":
        return _fp8_route(lhs, rhs, chip)
    if chip.has_block_scales and _has_hardware_blocks(lhs) and _has_hardware_blocks(rhs):
        reason = f"{chip.name} multiplies it on tensor cores; this path is {UNTRIED}"
        return Route("block_scaled", "codes", "codes", _block_scaled_kernel(lhs, rhs), True, reason)
    foldable = family == "E8M0" and lhs.format.block == rhs.format.block == (1, 32) and chip.has_fp8_blocks
    foldable = foldable and family_of(lhs)[0] == family_of(rhs)[0] == "blocks"
    if not foldable or gemm.path == "exact" or (gemm.path == "auto" and not fold) or lhs.hadamard is not None:
        reason = f"{chip.name} has no {lhs.format.name} tensor cores; products are exact, no faster than bfloat16"
        return Route("values", "values", "values", "decode to bfloat16, vendor GEMM", False, reason)
    reason = f"{chip.name} multiplies FP8: 1x32 scales folded (path={gemm.path!r}); changed elements are counted"
    return Route("blocks", "folded", "tiles", "fold to FP8, vendor FP8 GEMM, 1x128 x 128x128 scales", True, reason)


def _fp8_route(lhs: Cast, rhs: Cast, chip: Chip) -> Route:
    kind = _gemm_kind(lhs.format.block, rhs.format.block)
    eight_bit = lhs.format.element.bits == rhs.format.element.bits == 8
    runs = chip.has_fp8_blocks if kind == "block" else chip.has_fp8 and kind is not None
    if eight_bit and runs:
        kernel = f"vendor FP8 GEMM, {lhs.format.block_text} x {rhs.format.block_text} scales"
        name = "blocks" if kind == "block" else "fp8"
        return Route(name, "codes", "codes", kernel, True, f"{chip.name} multiplies FP8 on tensor cores")
    if kind in ("tensor", "row"):
        missing = f"{chip.name} has no FP8 tensor cores" if eight_bit else "no GEMM multiplies these codes"
        reason = f"{missing}; products are exact, no faster than bfloat16"
        kernel = "decode to bfloat16, vendor GEMM, scales in the epilogue"
        return Route("values", "codes", "codes", kernel, False, reason)
    if _is_power_of_two(lhs) and _is_power_of_two(rhs):
        if chip.has_block_scales:
            reason = f"{chip.name} multiplies it as MXFP8, exactly: scales are powers of two; {UNTRIED}"
            return Route("block_scaled", "codes", "codes", _block_scaled_kernel(lhs, rhs), True, reason)
        reason = f"{chip.name} has no FP8 GEMM for these scales; products are exact, no faster than bfloat16"
        return Route("values", "codes", "codes", "decode to bfloat16, vendor GEMM", False, reason)
    reason = f"no FP8 GEMM takes these scales on {chip.name}"
    return Route("float32", "codes", "codes", "decode to float32, float32 GEMM", False, reason)


def _block_scaled_kernel(lhs: Cast, rhs: Cast) -> str:
    return f"native block-scaled GEMM ({lhs.format.name} x {rhs.format.name})"


def _is_power_of_two(cast: Cast) -> bool:
    """Whether FP8 codes have scales that are powers of two, one for 128 elements or a tile of as many rows."""
    fmt = cast.format
    return cast.rule.power_of_two and fmt.element.bits == 8 and fmt.block in ((1, 128), (128, 128))


def _has_hardware_blocks(cast: Cast) -> bool:
    fmt = cast.format
    if fmt.scale.name == "E8M0":
        return fmt.block == (1, 32)
    return fmt.scale.name == "E4M3" and fmt.block in ((1, 16), (16, 16)) and fmt.tensor_scale != "row"
