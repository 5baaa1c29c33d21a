"""How many elements folding changed, per operand of a layer, and what the next step makes of it.

Counts are copied to the host without waiting; a decision reads the latest one that has arrived, so the hot path never
synchronises. Until one has, the operand folds (docs/numerics.md, section 10).
"""

from dataclasses import dataclass

import torch

from microfloat.recipes import Recipe
from microfloat.torch.backends.native._forms import Chip, route_of

__all__ = ["LOSSY_LIMIT", "FoldCounts", "gemm_forms"]

# An operand folds as long as at most this share of its elements changes.
LOSSY_LIMIT = 1e-3

# tensor and orientation -> GEMM and side that read it
_READERS = {
    ("x", "row"): ("fprop", "lhs"), ("x", "column"): ("wgrad", "rhs"), ("w", "row"): ("fprop", "rhs"),
    ("w", "column"): ("dgrad", "rhs"), ("dy", "row"): ("dgrad", "lhs"), ("dy", "column"): ("wgrad", "lhs"),
}  # fmt: skip


@dataclass
class _Count:
    form: str
    elements: int
    host: torch.Tensor
    arrived: torch.cuda.Event | None
    share: float | None = None

    def latest(self) -> float | None:
        """The share of changed elements, once it has arrived."""
        if self.arrived is not None and self.arrived.query():
            self.share, self.arrived = int(self.host) / max(self.elements, 1), None
        return self.share


class FoldCounts:
    """The latest counts of one layer's operands, by (GEMM, side)."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}
        # Operands that 128x128 tiles changed too much: these stay at 1x128 blocks.
        self.narrow: set[tuple[str, str]] = set()

    def note(self, slot: str, orientation: str, form: str, lossy: torch.Tensor, elements: int) -> None:
        """Start copying a count, int64 (), to the host."""
        if torch.cuda.is_current_stream_capturing():
            return
        key = _READERS[slot, orientation]
        known = self._counts.get(key)
        if known is not None and known.arrived is not None and not known.arrived.query():
            return  # the copy before has not arrived; its buffer must not be overwritten
        host = known.host if known is not None else torch.zeros((), dtype=torch.int64, pin_memory=True)
        host.copy_(lossy, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        share = known.share if known is not None and known.form == form else None
        self._counts[key] = _Count(form, elements, host, arrived, share)

    def exceeded(self, gemm: str, side: str, form: str) -> bool:
        """Whether the latest count of this form is above the limit."""
        known = self._counts.get((gemm, side))
        share = known.latest() if known is not None and known.form == form else None
        return share is not None and share > LOSSY_LIMIT

    def shares(self) -> dict[str, float]:
        """Share of changed elements per operand, "fprop.lhs" and so on; waits for counts on their way."""
        torch.cuda.synchronize()
        return {f"{gemm}.{side}": count.latest() or 0.0 for (gemm, side), count in self._counts.items()}


# Recipes are asked by identity: hashing one costs as much as a launch. The recipe is kept, so its id stays its own.
_STATIC: dict[tuple[int, Chip], tuple[Recipe, dict[str, tuple[str, str]], bool]] = {}


def gemm_forms(recipe: Recipe, chip: Chip, counts: FoldCounts | None) -> dict[str, tuple[str, str]]:
    """The forms of both operands of each GEMM for one call of a layer: its forward decides, its backward keeps them."""
    known = _STATIC.get((id(recipe), chip))
    if known is None or known[0] is not recipe:
        routes = {name: route_of(getattr(recipe, name), chip) for name in ("fprop", "dgrad", "wgrad")}
        static = {name: (route.lhs, route.rhs) for name, route in routes.items()}
        folds = any("folded" in forms for forms in static.values())
        known = _STATIC[id(recipe), chip] = (recipe, static, folds)
    _, static, folds = known
    if not folds or counts is None:
        return static
    return {name: _listened(name, recipe, chip, forms, counts) for name, forms in static.items()}


def _listened(name: str, recipe: Recipe, chip: Chip, forms: tuple[str, str], counts: FoldCounts) -> tuple[str, str]:
    """The forms of one GEMM after a look at what folding changed in the step before."""
    lhs, rhs = forms
    if lhs != "folded":
        return forms
    if (name, "rhs") in counts.narrow or counts.exceeded(name, "rhs", "tiles"):
        counts.narrow.add((name, "rhs"))
        rhs = "folded"
    lossy = counts.exceeded(name, "lhs", "folded") or (rhs == "folded" and counts.exceeded(name, "rhs", "folded"))
    gemm = getattr(recipe, name)
    if gemm.path == "auto" and lossy:
        route = route_of(gemm, chip, fold=False)
        return route.lhs, route.rhs
    return lhs, rhs
