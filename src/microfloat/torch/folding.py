"""How many elements folding changed, per operand of a layer, and what the next step makes of it.

Casts write their counts where the host reads them, in pinned memory, so that a step neither copies nor waits: a
decision reads the latest count that has arrived. Until one has, the operand folds (docs/numerics.md, section 10).
"""

import threading
import weakref
from typing import Any

import torch

from microfloat.chips import Chip
from microfloat.operands import GEMMS, TENSORS
from microfloat.recipes import Gemm, Recipe
from microfloat.routes import Route, Routes, route_of

__all__ = ["LOSSY_LIMIT", "FoldCounts", "routes_of"]

# An operand folds as long as at most this share of its elements changes.
LOSSY_LIMIT = 1e-3

_SLOTS, _FORMS = TENSORS, ("folded", "tiles")
# A count for every slot, form and orientation: a cast of a slot in one form writes two words, row and column.
_WORDS = len(_SLOTS) * len(_FORMS) * 2


class _Places:
    """Words in pinned memory, handed out to layers. What a layer leaves behind serves another one only after all GPUs
    have finished, since a cast on its way may still write there."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._left: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self) -> torch.Tensor:
        """int64 words, zero."""
        with self._lock:
            if not self._free and len(self._left) >= 512 and not torch.cuda.is_current_stream_capturing():
                for device in range(torch.cuda.device_count()):
                    torch.cuda.synchronize(device)
                self._free, self._left = self._left, []
            if not self._free:
                pages = torch.zeros((256, _WORDS), dtype=torch.int64, pin_memory=torch.cuda.is_available())
                self._free = list(pages.unbind())
            return self._free.pop().zero_()

    def give_back(self, words: torch.Tensor) -> None:
        """The layer is gone."""
        self._left.append(words)  # atomic: this may run inside `take`, when the collector does


_PLACES = _Places()


def _index(slot: str, form: str, orientation: str) -> int:
    return (_SLOTS.index(slot) * len(_FORMS) + _FORMS.index(form)) * 2 + (orientation == "column")


class FoldCounts:
    """The latest counts of one layer's operands, by (GEMM, side)."""

    def __init__(self) -> None:
        # Taken when the first cast asks for them, which is not while a CUDA graph is captured.
        self._words: Any = None
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        # GEMM and side -> form, word, elements.
        self._noted: dict[tuple[str, str], tuple[str, int, int]] = {}
        self._limits: list[tuple[int, float]] = []
        self._latest: object = None
        self.given: Any = None  # the places as plans hand them on
        # Operands that 128x128 tiles changed too much: these stay at 1x128 blocks.
        self.narrow: set[tuple[str, str]] = set()

    def places(self, slot: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Where casts of a slot write their counts, int64 [2] of the row and of the column operand: those that fold to
        1x128, and those that fold to 128x128. What a CUDA graph repeats writes to memory of its own instead."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            own = torch.empty(2, dtype=torch.int64, device="cuda")
            return own, own
        if self._words is None:
            words = _PLACES.take()
            weakref.finalize(self, _PLACES.give_back, words).atexit = False
            self._words = memoryview(words.numpy())  # type: ignore[arg-type]
            folded, tiles = words.view(len(_SLOTS), len(_FORMS), 2).unbind(1)
            self._pairs = {name: (folded[row], tiles[row]) for row, name in enumerate(_SLOTS)}
        return self._pairs[slot]

    def note(self, operands: dict[tuple[str, str], tuple[str, str, str, int]]) -> None:
        """Remember which operands fold: GEMM and side -> slot, orientation, form, elements."""
        if operands is self._latest:
            return
        self._latest = operands
        for key, (slot, orientation, form, elements) in operands.items():
            self._noted[key] = (form, _index(slot, form, orientation), elements)
        self._limits = [(word, LOSSY_LIMIT * elements) for _, word, elements in self._noted.values()]

    @property
    def is_quiet(self) -> bool:
        """Whether every operand may fold as it would without counts."""
        words = self._words
        return words is None or not (self.narrow or any(words[index] > limit for index, limit in self._limits))

    def exceeded(self, gemm: str, side: str, form: str) -> bool:
        """Whether the latest count of this form is above the limit."""
        known = self._noted.get((gemm, side))
        if known is None or known[0] != form or self._words is None:
            return False
        return self._words[known[1]] > LOSSY_LIMIT * known[2]

    def shares(self) -> dict[str, float]:
        """Share of changed elements per operand, "fprop.lhs" and so on; waits for counts on their way."""
        if self._words is None:
            return {}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {
            f"{gemm}.{side}": self._words[word] / max(elements, 1)
            for (gemm, side), (_, word, elements) in self._noted.items()
        }


# By recipe and chip: the routes of a layer that has not folded yet, and whether any operand folds.
_STATIC: dict[tuple[Recipe, Chip | None], tuple[Routes, bool]] = {}


def routes_of(recipe: Recipe, chip: Chip | None, counts: FoldCounts | None) -> Routes:
    """The routes of one call of a layer: its forward decides, its backward keeps them. `chip` None: no tensor cores."""
    known = _STATIC.get((recipe, chip))
    if known is None:
        static = Routes(*(route_of(getattr(recipe, name), chip) for name in GEMMS))
        known = _STATIC[recipe, chip] = static, any("folded" in route.forms for route in static)
    static, folds = known
    if not folds or counts is None or counts.is_quiet:
        return static
    assert chip is not None
    return Routes(
        *(
            _listened(name, getattr(recipe, name), chip, route, counts)
            for name, route in zip(GEMMS, static, strict=True)
        )
    )


def _listened(name: str, gemm: Gemm, chip: Chip, route: Route, counts: FoldCounts) -> Route:
    """The route of one GEMM after a look at what folding changed in the step before."""
    if route.lhs != "folded":
        return route
    if (name, "rhs") in counts.narrow or counts.exceeded(name, "rhs", "tiles"):
        counts.narrow.add((name, "rhs"))
        route = route._replace(rhs="folded")
    lossy = counts.exceeded(name, "lhs", "folded") or (route.rhs == "folded" and counts.exceeded(name, "rhs", "folded"))
    return route_of(gemm, chip, fold=False) if gemm.path == "auto" and lossy else route
