"""Counts of the elements that folding changed, per operand of a layer, and the next step's decision by them.

Casts write their counts where the host reads them, in pinned memory, so that a step neither copies nor waits: a
decision reads the latest count that has arrived. Until one has, the operand folds (docs/numerics.md, section 10).
"""

import threading
import weakref
from collections.abc import Sequence

import torch

from microfloat.chips import Chip
from microfloat.operands import GEMMS, TENSORS
from microfloat.passes import CastInputs
from microfloat.recipes import Gemm, Recipe
from microfloat.routes import Route, Routes, route_of, routes_of
from microfloat.torch.backends.base import capturing

# An MX operand folds as long as at most this share of its elements changes.
LOSSY_LIMIT = 1e-3

# "w later": of a weight that backward casts by itself, apart from forward's words.
_SLOTS, _FORMS = (*TENSORS, "w later"), ("folded", "tiles")
# A count for every slot, form and orientation: a cast of a slot in one form writes two words, row and column.
_WORDS = len(_SLOTS) * len(_FORMS) * 2


class _Pool:
    """Words in pinned memory, handed out to layers. Words of a layer that is gone serve another one only after all GPUs
    have finished, since a cast may still write to them."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._left: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self) -> torch.Tensor:
        """int64 words, zero."""
        with self._lock:
            if not self._free and len(self._left) >= 512 and not capturing():
                for device in range(torch.cuda.device_count()):
                    torch.cuda.synchronize(device)
                self._free, self._left = self._left, []
            if not self._free:
                pages = torch.zeros(
                    (256, _WORDS), dtype=torch.int64, device="cpu", pin_memory=torch.cuda.is_available()
                )
                self._free = list(pages.unbind())
            return self._free.pop().zero_()

    def give_back(self, words: torch.Tensor) -> None:
        """Take back the words of a layer that is gone."""
        self._left.append(words)  # atomic: this may run inside `take`, when the collector does


_POOL = _Pool()


def _index(slot: str, form: str, orientation: str) -> int:
    return (_SLOTS.index(slot) * len(_FORMS) + _FORMS.index(form)) * 2 + (orientation == "column")


def _inputs_of(folded: Sequence[torch.Tensor], tiles: Sequence[torch.Tensor]) -> list[CastInputs]:
    return [CastInputs(folded=one, tiles=other) for one, other in zip(folded, tiles, strict=True)]


class FoldCounts:
    """The latest counts of one layer's operands, by (GEMM, side)."""

    def __init__(self) -> None:
        # Taken when the first cast asks for them, which is not while a CUDA graph is captured.
        self._words: memoryview | None = None
        # GEMM and side -> form, word, elements, most changed ones.
        self._noted: dict[tuple[str, str], tuple[str, int, int, float]] = {}
        self._limits: list[tuple[int, float]] = []
        self._latest: object = None
        self._inputs: list[CastInputs] | None = None
        # Operands that 128x128 tiles changed too much: these stay at 1x128 blocks.
        self.narrow: set[tuple[str, str]] = set()

    def inputs(self, device: int) -> list[CastInputs]:
        """Inputs of the casts of `_SLOTS` on a device (-1: the CPU), with int64 [2] for counts of both operands.

        Casts in a CUDA graph, which repeats them, write to memory of the graph.
        """
        if device >= 0 and torch._C._cuda_isCurrentStreamCapturing():
            own = [torch.empty(2, dtype=torch.int64, device="cuda") for _ in _SLOTS]
            return _inputs_of(own, own)
        if self._inputs is None:
            words = _POOL.take()
            weakref.finalize(self, _POOL.give_back, words).atexit = False
            self._words = memoryview(words.numpy())  # type: ignore[arg-type]
            folded, tiles = words.view(len(_SLOTS), len(_FORMS), 2).unbind(1)
            self._inputs = _inputs_of(folded.unbind(), tiles.unbind())
        return self._inputs

    def note(self, operands: dict[tuple[str, str], tuple[str, str, str, int, float]]) -> None:
        """Remember which operands fold: GEMM and side -> slot, orientation, form, elements, most changed ones."""
        if operands is self._latest:
            return
        self._latest = operands
        # A launch that casts one operand folded and the other in tiles counts both in the words of the folded one.
        folded = {slot for slot, _, form, *_ in operands.values() if form == "folded"}
        for key, (slot, orientation, form, elements, most) in operands.items():
            self._noted[key] = form, _index(slot, "folded" if slot in folded else form, orientation), elements, most
        self._limits = [(word, most) for _, word, _, most in self._noted.values()]

    @property
    def is_quiet(self) -> bool:
        """True where every operand may fold as it would without counts."""
        words = self._words
        return words is None or not (self.narrow or any(words[index] > limit for index, limit in self._limits))

    def exceeded(self, gemm: str, side: str, form: str) -> bool:
        """True where the latest count of this form is above the limit."""
        noted_form, word, _, most = self._noted.get((gemm, side), ("", 0, 0, 0.0))
        return noted_form == form and self._words is not None and self._words[word] > most

    def shares(self) -> dict[str, float]:
        """Share of changed elements per operand, "fprop.lhs" and so on; waits for counts on their way."""
        if self._words is None:
            return {}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {
            f"{gemm}.{side}": self._words[word] / max(elements, 1)
            for (gemm, side), (_, word, elements, _) in self._noted.items()
        }


def routes_after(recipe: Recipe, chip: Chip | None, counts: FoldCounts) -> Routes:
    """The routes of one call of a layer by the counts of its earlier ones: its forward decides, its backward keeps
    them."""
    static = routes_of(recipe, chip)
    if counts.is_quiet or not any("folded" in route.forms for route in static):
        return static
    made = (
        _listened(name, getattr(recipe, name), chip, route, counts) for name, route in zip(GEMMS, static, strict=True)
    )
    return Routes(*made).reading_fprop(recipe)


def _listened(name: str, gemm: Gemm, chip: Chip | None, route: Route, counts: FoldCounts) -> Route:
    """The route of one GEMM by the number of elements that folding changed in the step before."""
    if route.lhs != "folded":
        return route
    if (name, "rhs") in counts.narrow or counts.exceeded(name, "rhs", "tiles"):
        counts.narrow.add((name, "rhs"))
        route = route._replace(rhs="folded")
    lossy = counts.exceeded(name, "lhs", "folded") or (route.rhs == "folded" and counts.exceeded(name, "rhs", "folded"))
    return route_of(gemm, chip, fold=False) if gemm.path == "auto" and lossy else route
