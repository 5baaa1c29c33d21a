"""`explain` and the availability queries: what runs where and why, before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from microfloat.errors import invalid_type, invalid_value
from microfloat.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from microfloat.recipes.core import GEMMS
from microfloat.support import Support
from microfloat.torch.autocast import as_recipe
from microfloat.torch.backends import check_name
from microfloat.torch.backends.chips import chip_named
from microfloat.torch.backends.plans import GemmPlan, plan
from microfloat.torch.small import Prediction, check_shape, predict

__all__ = [
    "Explanation", "GemmRow", "explain", "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available",
    "is_nvfp4_available",
]  # fmt: skip


@dataclass(frozen=True)
class GemmRow:
    """One GEMM: what its operands are, which backend and kernel run, and how well the hardware supports it."""

    gemm: str
    operands: str
    backend: str
    kernel: str
    support: Support


@dataclass(frozen=True)
class Explanation:
    """What a recipe does on a device: a row per GEMM; prints as a table.

    `prediction`: for a CUDA device and a given shape, whether a Linear of that shape gains from the recipe.
    """

    recipe: Recipe
    device: str
    rows: tuple[GemmRow, ...]
    prediction: Prediction | None = None

    @property
    def accelerated(self) -> bool:
        """Whether every quantized GEMM runs on tensor cores of its format."""
        return all(row.support.accelerated for row in self.rows)

    def to_dict(self) -> dict:
        """The same as JSON-ready data."""
        return {
            "recipe": self.recipe.to_dict(),
            "device": self.device,
            "gemms": [
                {
                    "gemm": row.gemm, "operands": row.operands, "backend": row.backend, "kernel": row.kernel,
                    "available": row.support.available, "accelerated": row.support.accelerated,
                    "reason": row.support.reason,
                }
                for row in self.rows
            ],
            "prediction": None if self.prediction is None else {
                "shape": list(self.prediction.shape), "small": self.prediction.is_small,
                "eager_speed_up": self.prediction.eager, "graph_speed_up": self.prediction.graph,
            },
        }  # fmt: skip

    def __str__(self) -> str:
        header = ("GEMM", "operands", "backend", "kernel", "runs", "accelerated", "why")
        cells: list[tuple[str, ...]] = [header]
        for row in self.rows:
            yes = {True: "yes", False: "no"}
            cells.append((
                row.gemm, row.operands, row.backend, row.kernel, yes[row.support.available],
                yes[row.support.accelerated], row.support.reason,
            ))  # fmt: skip
        widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        if self.prediction is not None:
            lines.append(str(self.prediction))
        return "\n".join([f"{self.recipe!r} on {self.device}", *lines])


def explain(
    recipe: Recipe | str,
    device: torch.device | str | None = None,
    shape: tuple[int, int, int] | None = None,
    *,
    backend: str = "auto",
) -> Explanation:
    """Which backend and kernel each GEMM of `recipe` takes on `device`, whether it is accelerated, and why.

    `device` None: CUDA where there is one, else the CPU. A GPU that this machine lacks goes by its name, its generation
    or its architecture: "h200", "ampere", "sm_100". `shape` (M, K, N) of a Linear: on a CUDA device the answer then
    names the kernel that serves products of that size where it depends on it, and predicts whether low precision pays
    there (docs/performance.md); no precision depends on it by itself, see `convert(skip_small=...)`. Nothing is run.
    For "cuda" on a machine without CUDA the answer is that nothing runs there. Paths that no chip of a kind has run yet
    say so. Raises InvalidTypeError or InvalidValueError for arguments that are none.

    >>> explain("mxfp8", "a100").accelerated
    False
    """
    recipe = as_recipe(recipe)
    chip = chip_named(device) if isinstance(device, str) else None
    target = _device(device) if chip is None else torch.device("cuda")
    check_name(backend)
    if shape is not None:
        shape = check_shape(tuple(shape) if isinstance(shape, Sequence) else shape)
    rows, shapes = [], _gemm_shapes(shape)
    for name in GEMMS:
        gemm = getattr(recipe, name)
        planned = plan(backend, target, gemm, shapes.get(name), chip) if chip or _is_present(target) else _ABSENT
        operands = " x ".join("high precision" if cast is None else cast.format.name for cast in gemm.casts)
        rows.append(GemmRow(name, operands, planned.backend, planned.kernel, planned.support))
    predictable = target.type == "cuda" and (chip is None or chip.is_tried)
    prediction = predict(recipe, shape) if shape is not None and predictable else None
    where = str(target) if chip is None else f"{device} ({chip.name}, {chip.architecture})"
    return Explanation(recipe, where, tuple(rows), prediction)


# The answer for a CUDA device on a machine that has none: nothing can be asked about its hardware.
_ABSENT = GemmPlan("-", "-", Support(False, False, "torch sees no CUDA device on this machine"))


def _gemm_shapes(shape: tuple[int, int, int] | None) -> dict[str, tuple[int, int, int]]:
    """Rows, contraction length and columns of each GEMM of a Linear."""
    if shape is None:
        return {}
    m, k, n = shape
    return {"fprop": (m, k, n), "dgrad": (m, n, k), "wgrad": (n, m, k)}


def _is_present(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.is_available()


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, torch.device | str):
        raise invalid_type("device", type(device), "a torch.device, its name, or None")
    try:
        return torch.device(device)
    except RuntimeError as error:
        needed = (
            "a device that torch knows, such as 'cpu' or 'cuda:0', or a GPU by its name, such as 'h200' or 'sm_100'"
        )
        raise invalid_value("device", repr(device), needed) from error


def _availability(recipe: Recipe, device: torch.device | str | None) -> Support:
    explanation = explain(recipe, device)
    first = explanation.rows[0].support
    available = all(row.support.available for row in explanation.rows)
    return Support(available, explanation.accelerated, first.reason)


def is_fp8_available(device: torch.device | str | None = None) -> Support:
    """Whether per-tensor FP8 runs on `device` (it does everywhere), and whether tensor cores take it.

    The answer unpacks into ``(available, reason)``; its truth value is `available`.
    """
    return _availability(Float8CurrentScaling(), device)


def is_mxfp8_available(device: torch.device | str | None = None) -> Support:
    """The same for MXFP8."""
    return _availability(MXFP8BlockScaling(), device)


def is_fp8_block_scaling_available(device: torch.device | str | None = None) -> Support:
    """The same for FP8 with 1x128 and 128x128 blocks."""
    return _availability(Float8BlockScaling(), device)


def is_nvfp4_available(device: torch.device | str | None = None) -> Support:
    """The same for NVFP4."""
    return _availability(NVFP4BlockScaling(False, False, False), device)
