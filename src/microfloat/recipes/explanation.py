"""The answer of `explain`, the same in every front end."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from microfloat.recipes.core import Gemm, NamedRecipe, Recipe
from microfloat.support import Notes, Printed, text_table, wrapped

_YES = {True: "yes", False: "no"}


@dataclass(frozen=True)
class CastRow:
    """One quantized operand: its GEMM, its tensor (x, w or dy), its format, what casts it, and why no kernel does."""

    gemm: str
    tensor: str
    format: str
    kernel: str
    reason: str


class Answer(Printed):
    """Base of the front ends' explanations: a table of GEMMs, and a line for operands that are cast in the same way.
    `rows`: dataclasses of gemm, operands, kernel, support (a Support) and the field that `_column` names."""

    recipe: Recipe
    device: str
    rows: tuple[Any, ...]
    casts: tuple[CastRow, ...]
    _column: ClassVar[str]

    @property
    def available(self) -> bool:
        """True if every GEMM runs."""
        return all(row.support.available for row in self.rows)

    @property
    def accelerated(self) -> bool:
        """True if every quantized GEMM runs on tensor cores of its format."""
        return all(row.support.accelerated for row in self.rows)

    def to_dict(self) -> dict:
        """The explanation as JSON-ready data."""
        gemms = [
            {
                "gemm": row.gemm, "operands": row.operands, self._column: getattr(row, self._column),
                "kernel": row.kernel, **asdict(row.support),
            }
            for row in self.rows
        ]  # fmt: skip
        casts = [asdict(row) for row in self.casts]
        return {"recipe": self.recipe.to_dict(), "device": self.device, "gemms": gemms, "casts": casts}

    def __str__(self) -> str:
        notes = Notes()
        cells: list[tuple[str, ...]] = [("GEMM", "operands", self._column, "runs", "accelerated", "kernel, why")]
        for row in self.rows:
            kernel = "" if row.kernel == "-" else f"{row.kernel}: "
            cells.append((
                row.gemm, row.operands, getattr(row, self._column), _YES[row.support.available],
                _YES[row.support.accelerated], notes.number(kernel + row.support.reason),
            ))  # fmt: skip
        # A table of Casts would say it all again in its repr.
        recipe = repr(self.recipe) if isinstance(self.recipe, NamedRecipe) else type(self.recipe).__name__
        lines = [*wrapped(f"{recipe} on {self.device}"), *text_table(cells), *notes.lines()]
        alike: dict[str, list[str]] = {}  # operands that are cast in the same way
        for row in self.casts:
            by = f"{row.kernel}, {row.reason}" if row.reason else row.kernel
            alike.setdefault(by, []).append(f"{row.gemm} {row.tensor}")
        for by, operands in alike.items():
            lines += wrapped(f"cast by {by}: {'all operands' if len(alike) == 1 else ', '.join(operands)}")
        return "\n".join(lines)


def operands_of(gemm: Gemm) -> str:
    """The formats of both operands as text."""
    names = ["high precision" if cast is None else cast.format.name for cast in gemm.casts]
    return " x ".join(names) + (" of fprop" if gemm.from_fprop else "")
