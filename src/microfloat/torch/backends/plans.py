"""Which kernel a GEMM takes on a device, told without running it: what `explain` prints."""

from dataclasses import dataclass

import torch

from microfloat.recipes import Gemm
from microfloat.support import Support
from microfloat.torch.backends import choose, resolve, support
from microfloat.torch.backends.chips import Chip

__all__ = ["GemmPlan", "plan"]


@dataclass(frozen=True)
class GemmPlan:
    """One GEMM on one device: the backend's name, its kernel in words, and what the hardware makes of it."""

    backend: str
    kernel: str
    support: Support


def plan(
    backend: str, device: torch.device, gemm: Gemm, shape: tuple[int, int, int] | None = None, chip: Chip | None = None
) -> GemmPlan:
    """The plan of `gemm` under `backend` ("auto" resolved) on `device`; `shape` is (M, K, N) of this GEMM, or None.

    `chip`: answer for it in place of the one behind `device`, which need not be there.
    """
    if gemm.is_high_precision:
        reason = "the recipe keeps this GEMM in high precision; it runs in the compute dtype"
        return GemmPlan("torch", "torch matmul", Support(True, True, reason))
    name = resolve(backend, device)
    verdict = support(name, device)
    if not verdict:
        return GemmPlan(name, "-", verdict)
    describe = getattr(choose(name, device), "describe", None)
    if describe is not None:
        return describe(gemm, device, shape, chip)
    if None in gemm.casts:
        return GemmPlan(name, "dequantize one operand, torch matmul", verdict)
    precision = "float64" if gemm.accumulate == "exact" else "float32"
    return GemmPlan(name, f"decode to {precision}, {precision} matmul, scales in the epilogue", verdict)
