"""Which layers a conversion leaves out, and the report of what it did: the same in every front end."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from microfloat.errors import invalid_type
from microfloat.recipes.core import Recipe
from microfloat.recipes.placement import DEFAULT_EXCLUDE
from microfloat.support import text_table

__all__ = ["ConversionReport", "ConversionRow", "check_exclude", "check_filter", "gates_of_mlps", "why_left_out"]


@dataclass(frozen=True)
class ConversionRow:
    """The outcome for one layer; `shape` is (out features, in features), None for a layer that has no such form.

    `action`: "converted", "repinned", "kept" (left out, and runs the recipe that an earlier `convert` gave it), "high
    precision", "skipped", or "not seen" (weights that belong to no linear layer).
    """

    name: str
    shape: tuple[int, int] | None
    action: str
    recipe: Recipe | None
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """One row per linear layer that was looked at, and what `convert` cannot see; prints as a table.

    `share`: of the model's parameters, those in layers that run a recipe.
    """

    rows: tuple[ConversionRow, ...]
    share: float = 0.0
    unseen: tuple[ConversionRow, ...] = ()

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
        for row in (*self.rows, *self.unseen):
            shape = f"{row.shape[1]} -> {row.shape[0]}" if row.shape else "-"
            recipe = type(row.recipe).__name__ if row.recipe is not None else "-"
            cells.append((row.name or "(root)", shape, row.action, recipe, row.reason))
        total = f"{len(self.converted)} of {len(self.rows)} linear layers run in low precision"
        return "\n".join([*text_table(cells), f"{total}: {self.share:.1%} of the model's parameters."])


def check_exclude(exclude: object) -> tuple[str, ...]:
    """The name patterns in `exclude`; InvalidTypeError for anything else."""
    remedy = "Write exclude=() to exclude nothing."
    if isinstance(exclude, str):
        remedy = f"Write exclude=({exclude!r},)."
    elif callable(exclude):
        remedy = "A function goes to filter=."
    elif isinstance(exclude, Iterable) and getattr(exclude, "ndim", 1):
        patterns = tuple(exclude)
        wrong = next((pattern for pattern in patterns if not isinstance(pattern, str)), None)
        if wrong is None:
            return patterns
        raise invalid_type("exclude", f"{wrong!r} in it", "a sequence of name patterns, such as ('*.lm_head',)")
    raise invalid_type("exclude", type(exclude), "a sequence of name patterns", remedy)


def check_filter(keep: object) -> None:
    """InvalidTypeError for a filter that is neither None nor callable."""
    if keep is not None and not callable(keep):
        remedy = "Name patterns go to exclude=."
        raise invalid_type("filter", type(keep), "a callable (name, module) -> bool", remedy)


def gates_of_mlps(exclude: Sequence[str], shapes: Mapping[str, tuple[int, int] | None]) -> frozenset[str]:
    """The layers called `gate` that the default does not take for routers: those of gated MLPs, beside an `up` of the
    same shape.
    """
    if tuple(exclude) != DEFAULT_EXCLUDE:
        return frozenset()
    gates = {}
    for name, shape in shapes.items():
        path, _, last = name.rpartition(".")
        if last == "gate" and shape is not None:
            gates[name] = [f"{path}.{up}" if path else up for up in ("up", "up_proj")], shape
    return frozenset(name for name, (ups, shape) in gates.items() if any(shapes.get(up) == shape for up in ups))


def why_left_out(
    name: str, module: Any, exclude: Sequence[str], keep: Callable[[str, Any], object] | None,
    gates: frozenset[str] = frozenset(),
) -> str | None:  # fmt: skip
    """Why patterns or the filter leave a layer out, or None. `gates`: `gates_of_mlps`, which stay in."""
    for pattern in exclude:
        if fnmatchcase(name, pattern) and name not in gates:
            rule = "default rule: " if pattern in DEFAULT_EXCLUDE else ""
            return f"{rule}name matches {pattern!r} (exclude=() converts it)"
    if keep is None:
        return None
    try:
        return None if keep(name, module) else "filter returned False"
    except (AttributeError, TypeError) as error:
        raise invalid_type(
            "filter", f"{type(error).__name__} ({error}) for the layer {name!r}", "a callable (name, module) -> bool",
            "The name comes first.",
        ) from error  # fmt: skip
