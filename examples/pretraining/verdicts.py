"""Gaps to bf16 over paired seeds, their intervals, and what is said of them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pretraining.rows import AGAIN, BASELINE

CONFIDENCE = 0.95
LOST = 1.0  # nats: a recipe that far away has not been compared, its training has failed
Results = Sequence[dict[str, Any]]


class Gap(NamedTuple):
    """Held-out loss minus bf16's of the same seed: of each seed, their mean, and half the width of its interval."""

    row: str
    gaps: dict[int, float]
    mean: float
    half: float | None

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.half is None else self.mean - self.half


def loss_of(result: dict[str, Any], kind: str | None = None) -> float:
    """Held-out loss of a kind of text; None: the mean over its kinds."""
    return float(np.mean([*result["held_out"].values()])) if kind is None else result["held_out"][kind]


def quantile(confidence: float, freedom: int) -> float:
    """The t with ``P(|T| <= t) = confidence`` under Student's distribution with `freedom` degrees of freedom."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)

    def inside(t: float) -> float:  # with t = sqrt(freedom) tan(a) the density becomes a power of a cosine
        angle = np.linspace(0.0, math.atan(t / math.sqrt(freedom)), 2001)
        return 2 * math.exp(log_scale) * math.sqrt(freedom) * float(np.trapezoid(np.cos(angle) ** (freedom - 1), angle))

    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return (low + high) / 2


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    return quantile(CONFIDENCE, len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def gaps_to(results: Results, base: str = BASELINE, kind: str | None = None) -> dict[str, Gap]:
    """The gap of every row, over the seeds that both it and the base have."""
    losses: dict[str, dict[int, float]] = {}
    for result in results:
        losses.setdefault(result["row"], {})[result["seed"]] = loss_of(result, kind)
    found = {}
    for row, of_seed in losses.items():
        gaps = {
            seed: loss - losses[base][seed] for seed, loss in sorted(of_seed.items()) if seed in losses.get(base, {})
        }
        if row != base and gaps:
            found[row] = Gap(row, gaps, float(np.mean([*gaps.values()])), half_width([*gaps.values()]))
    return found


def chance(gaps: dict[str, Gap]) -> float:
    """The largest distance between two runs of bf16 that differ by a rounding."""
    return max((abs(gap) for gap in gaps[AGAIN].gaps.values()), default=0.0) if AGAIN in gaps else 0.0


def verdict(gap: Gap, yardstick: float) -> str:
    """Words for a gap: fixed before the first run (docs/evidence.md)."""
    if gap.mean > LOST:
        return "did not train"
    if gap.half is None:
        return "one seed: no verdict"
    if gap.mean - gap.half > 0 and gap.mean > yardstick:
        return "costs"
    if gap.mean + gap.half < 0 and -gap.mean > yardstick:
        return "gains"
    return "within chance" if abs(gap.mean) <= yardstick else "undecided"
