"""What converting a model did, layer by layer: the same report in every front end."""

from collections.abc import Iterator
from dataclasses import dataclass

from microfloat.recipes.core import Recipe
from microfloat.support import text_table

__all__ = ["ConversionReport", "ConversionRow"]


@dataclass(frozen=True)
class ConversionRow:
    """What happened to one layer; `shape` is (out features, in features), or None where a layer has no such form.

    `action`: "converted", "repinned" (it ran a recipe before), "kept" (left out, and runs the recipe that it had),
    "high precision" or "skipped".
    """

    name: str
    shape: tuple[int, int] | None
    action: str
    recipe: Recipe | None
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """One row per linear layer that was looked at; prints as a table.

    `share`: of the model's parameters, those in layers that run a recipe.
    """

    rows: tuple[ConversionRow, ...]
    share: float = 0.0

    @property
    def converted(self) -> list[str]:
        """Names of the layers that now run a recipe."""
        return [row.name for row in self.rows if row.recipe is not None]

    @property
    def skipped(self) -> dict[str, str]:
        """Name -> reason of the layers left in high precision."""
        return {row.name: row.reason for row in self.rows if row.recipe is None}

    def __iter__(self) -> Iterator[ConversionRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        cells: list[tuple[str, ...]] = [("layer", "in -> out", "action", "recipe", "reason")]
        for row in self.rows:
            shape = f"{row.shape[1]} -> {row.shape[0]}" if row.shape else "-"
            recipe = type(row.recipe).__name__ if row.recipe is not None else "-"
            cells.append((row.name or "(root)", shape, row.action, recipe, row.reason))
        total = f"{len(self.converted)} of {len(self.rows)} linear layers run in low precision"
        return "\n".join([*text_table(cells), f"{total}: {self.share:.1%} of the model's parameters."])
