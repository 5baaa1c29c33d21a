"""Which recipe which layer runs: an ordered list of name patterns."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from microfloat.errors import PlacementError, invalid_type
from microfloat.recipes.core import Recipe
from microfloat.recipes.names import as_recipe

__all__ = ["DEFAULT_EXCLUDE", "Placement"]


def _anywhere(*names: str) -> tuple[str, ...]:
    return tuple(pattern for name in names for pattern in (name, f"*.{name}"))


# Layers that published low-precision recipes keep in high precision, as shell patterns over dotted names: heads, the
# routers of mixtures of experts (`gate`, but neither `gate_proj` nor the `gate` beside an `up` of its shape,
# `report.gates_of_mlps`), and adapters, whose rank is too small to gain. `output` and `proj_out` are heads at the top
# of a model only, or under the name that a wrapper gives it.
DEFAULT_EXCLUDE = (
    *_anywhere("lm_head", "lm_head.*", "embed_out", "classifier", "score", "head", "qa_outputs", "output_projection"),
    *_anywhere("predictions.decoder"),
    *(prefix + name for name in ("output", "proj_out") for prefix in ("", "model.", "module.", "_orig_mod.")),
    *_anywhere("router", "router.*", "gate", "gate.wg", "shared_expert_gate"),
    *_anywhere("lora_*"),
)


@dataclass(frozen=True)
class Placement:
    """``Placement([(pattern, Recipe | None), ...])``: the first pattern that matches a module's name decides.

    A pattern is a shell pattern over the dotted name ("blocks.0.*", "*.mlp.*"; "*" also crosses dots), or a regular
    expression after "re:" that must match the whole name. None means high precision. Layers that no pattern matches
    are left as they are. Raises PlacementError, in `resolve`, for patterns that match nothing.
    """

    rules: tuple[tuple[str, Recipe | None], ...]

    def __init__(self, rules: Sequence[tuple[str, Recipe | None]]) -> None:
        checked = []
        if isinstance(rules, dict):
            rules = list(rules.items())
        if not isinstance(rules, list | tuple):
            raise invalid_type("rules", type(rules), "a list of pairs (pattern, Recipe or None), or a dictionary")
        if not rules:
            raise PlacementError("rules: got none, needed at least one pair (pattern, Recipe or None).")
        for index, rule in enumerate(rules):
            if not (isinstance(rule, tuple | list) and len(rule) == 2):
                raise invalid_type(f"rules[{index}]", repr(rule), "a pair (pattern, Recipe or None)")
            pattern, recipe = rule
            if not isinstance(pattern, str):
                raise invalid_type(f"rules[{index}][0]", type(pattern), "a pattern string")
            if recipe is not None:
                recipe = as_recipe(recipe, f"rules[{index}][1]")
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    raise PlacementError(
                        f"rules[{index}][0]: got {pattern!r} ({error}), needed a regular expression after 're:'."
                    ) from error
            checked.append((pattern, recipe))
        object.__setattr__(self, "rules", tuple(checked))

    def resolve(self, names: Iterable[str]) -> dict[str, Recipe | None]:
        """Name -> recipe for every name that a pattern matches; PlacementError lists patterns that match no name."""
        names = list(names)
        unmatched = [pattern for pattern, _ in self.rules if not any(_matches(pattern, name) for name in names)]
        if unmatched:
            shown = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
            raise PlacementError(
                "placement: got patterns that match no layer: " + ", ".join(map(repr, unmatched))
                + f"; needed patterns over these names: {shown or 'none'}. Correct or remove them."
            )  # fmt: skip
        chosen: dict[str, Recipe | None] = {}
        for name in names:
            for pattern, recipe in self.rules:
                if _matches(pattern, name):
                    chosen[name] = recipe
                    break
        return chosen

    def __str__(self) -> str:
        width = max((len(pattern) for pattern, _ in self.rules), default=0)
        return "\n".join(
            f"{pattern.ljust(width)}  {repr(recipe) if recipe else 'high precision'}" for pattern, recipe in self.rules
        )


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)
