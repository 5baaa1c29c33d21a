"""Which kernels a recipe takes on a device, told without running it: what `explain` prints.

About this machine the answer says what is missing here. About a GPU by name (`chip`) it assumes that all packages are
installed there, and needs none of them here.
"""

from dataclasses import dataclass

import torch

from microfloat.chips import Chip
from microfloat.kernels.families import family_of
from microfloat.operands import GEMMS, OPERANDS
from microfloat.recipes import Cast, Gemm, Recipe
from microfloat.recipes.explanation import CastRow, operands_of
from microfloat.support import Support
from microfloat.torch.backends import resolve, support
from microfloat.torch.backends.routes import UNTRIED, Route, chip_of, own_gemm_is_faster, route_of

__all__ = ["GemmRow", "cast_rows", "gemm_row"]

BY_TORCH = "plain torch ops"


@dataclass(frozen=True)
class GemmRow:
    """One GEMM: what its operands are, which backend and kernel run, and how well the hardware supports it."""

    gemm: str
    operands: str
    backend: str
    kernel: str
    support: Support


def gemm_row(
    recipe: Recipe, name: str, backend: str, device: torch.device, shape: tuple[int, int, int] | None = None,
    chip: Chip | None = None,
) -> GemmRow:  # fmt: skip
    """Backend, kernel and support of the GEMM `name` of `recipe` under `backend` ("auto" resolved) on `device`.

    `shape`: M, K, N of this GEMM, or None. `chip`: answer for it in place of the one behind `device`.
    """
    gemm: Gemm = getattr(recipe, name)
    operands = operands_of(gemm)
    if gemm.is_high_precision:
        reason = "the recipe keeps this GEMM in high precision; it runs in the compute dtype"
        return GemmRow(name, operands, "torch", "torch matmul", Support(True, True, reason))
    backend, verdict = _backend(backend, device, chip)
    refusal = next((why for _, why in _families(gemm) if why), "")
    if verdict and backend == "triton" and refusal:
        verdict = Support(False, False, f"the triton backend has no kernel for {refusal}")
    if not verdict:
        return GemmRow(name, operands, backend, "-", verdict)
    if backend == "native":
        return GemmRow(name, operands, backend, *_native(gemm, device, shape, chip))
    if None in gemm.casts:
        return GemmRow(name, operands, backend, "dequantize one operand, torch matmul", verdict)
    precision = "float64" if gemm.accumulate == "exact" else "float32"
    kernel = f"decode to {precision}, {precision} matmul, scales in the epilogue"
    return GemmRow(name, operands, backend, kernel, verdict)


def cast_rows(recipe: Recipe, backend: str, device: torch.device, chip: Chip | None = None) -> tuple[CastRow, ...]:
    """A row for each quantized operand of `recipe` under `backend` on `device`, or on `chip`."""
    backend, verdict = _backend(backend, device, chip)
    if not verdict:
        return ()
    forms: dict[tuple[str, str], str] = {operand.key: "codes" for operand in OPERANDS}
    if backend == "native":
        there = chip_of(device) if chip is None else chip
        for name in GEMMS:
            route = route_of(getattr(recipe, name), there)
            forms[name, "lhs"], forms[name, "rhs"] = route.lhs, route.rhs
    rows = []
    for name, side, tensor, *_ in OPERANDS:
        cast = recipe.cast(name, side)
        if cast is None:
            continue
        if backend == "reference":
            rows.append(CastRow(name, tensor, cast.format.name, BY_TORCH, ""))
            continue
        # Both operands of a tensor are cast in one pass where they are wanted in one form.
        together = [
            recipe.casts[other.key]
            for other in OPERANDS
            if other.tensor == tensor and forms[other.key] == forms[name, side]
        ]
        refusal = next((why for one in (cast, *together) if one is not None and (why := family_of(one)[1])), "")
        kernel = BY_TORCH if refusal else _kernel_of(cast, forms[name, side])
        rows.append(CastRow(name, tensor, cast.format.name, kernel, f"no kernel for {refusal}" if refusal else ""))
    return tuple(rows)


def _backend(backend: str, device: torch.device, chip: Chip | None) -> tuple[str, Support]:
    """The name behind "auto", and whether it runs: on this machine, or on a complete one with `chip`."""
    if chip is None or backend == "reference":
        name = resolve(backend, device)
        return name, support(name, device)
    if backend == "triton":
        return backend, Support(True, False, "fused cast kernels; GEMMs by torch ops in float32")
    return "native", Support(True, True, "")


def _families(gemm: Gemm) -> list[tuple[str, str]]:
    return [family_of(cast) for cast in gemm.casts if cast is not None]


def _kernel_of(cast: Cast, form: str) -> str:
    """The fused kernel of a cast, by its module in `microfloat.kernels`, and what it writes where that is not codes."""
    if form in ("folded", "tiles"):
        return f"kernels.fold (FP8, {'128x128' if form == 'tiles' else '1x128'} scales)"
    name = f"kernels.{family_of(cast)[0]}"
    return f"{name} (decoded to bfloat16)" if form == "values" else name


def _native(
    gemm: Gemm, device: torch.device, shape: tuple[int, int, int] | None, chip: Chip | None
) -> tuple[str, Support]:
    """The kernel and the support of a GEMM of M, K, N on the native backend."""
    there = chip_of(device) if chip is None else chip
    route = route_of(gemm, there)
    untried = not there.is_tried and UNTRIED not in route.reason
    reason = f"{route.reason}; {UNTRIED}" if untried else route.reason
    kernel = _named(route, gemm, shape, there, None if chip else device)
    return kernel, Support(True, route.accelerated, reason)


def _named(
    route: Route, gemm: Gemm, shape: tuple[int, int, int] | None, chip: Chip, device: torch.device | None
) -> str:
    """The kernel of a route; of GEMMs with 1x128 scales, by whom: see `own_gemm_is_faster`."""
    if route.kind != "blocks" or not chip.has_fp8_blocks:
        return route.kernel
    if shape is None:
        return route.kernel + "; large ones by a kernel of microfloat's (Triton 3.6)"
    m, k, n = shape
    padded = (-(-m // 8) * 8, -(-k // 16) * 16, -(-n // 16) * 16)
    tiles = route.rhs == "tiles" or (route.rhs == "codes" and gemm.casts[1].format.block == (128, 128))  # type: ignore[union-attr]
    e4m3 = all(cast is not None and cast.format.element.name != "E5M2" for cast in gemm.casts)
    if e4m3 and _is_faster(padded, tiles, chip, device):
        own = "microfloat's FP8 GEMM (bfloat16 results)"
        return route.kernel.replace("vendor FP8 GEMM", own)
    return route.kernel


def _is_faster(shape: tuple[int, int, int], tiles: bool, chip: Chip, device: torch.device | None) -> bool:
    if device is None:
        return own_gemm_is_faster(shape, tiles, torch.bfloat16, chip)
    from microfloat.torch.backends.native._block_gemm import is_faster_on

    index = torch.cuda.current_device() if device.index is None else device.index
    return is_faster_on(index, shape, tiles, torch.bfloat16)
