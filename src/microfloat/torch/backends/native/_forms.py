"""In which form each operand enters its GEMM on a chip: codes, folded codes, or decoded bfloat16 values.

The decision is a function of the two Casts, the GEMM's path and the chip; `explain` prints it and `prepare_both` acts
on it, so what is said is what runs (docs/numerics.md, section 10).
"""

import functools
from dataclasses import dataclass

import torch

from microfloat.recipes import Cast, Gemm
from microfloat.torch.backends.chips import Chip

__all__ = ["UNTRIED", "Chip", "Route", "chip_of", "route_of"]

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
    family = lhs.format.scale.name
    if family == "FP32":
        return _fp8_route(lhs, rhs, chip)
    if chip.has_block_scales and _has_hardware_blocks(lhs) and _has_hardware_blocks(rhs):
        reason = f"{chip.name} multiplies it on tensor cores; this path is {UNTRIED}"
        return Route("block_scaled", "codes", "codes", _block_scaled_kernel(lhs, rhs), True, reason)
    foldable = family == "E8M0" and lhs.format.block == rhs.format.block == (1, 32) and chip.has_fp8_blocks
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
        reason = f"{chip.name} has no FP8 tensor cores; products are exact, no faster than bfloat16"
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
