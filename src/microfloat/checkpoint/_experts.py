"""Experts of a layer in a file: numbered, or all in one tensor."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from microfloat.checkpoint.records import Finding, some

NUMBERED = re.compile(r"^(?:(?P<layer>.*)\.)?experts\.(?P<number>\d+)\.(?P<weight>.*)\.weight$")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_RESTORE = "Copy or export the checkpoint again, or correct the number in config.json. load(strict=False) reads it."


def expert_findings(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Iterator[Finding]:
    """Errors about experts that are missing, too many, or there twice: all of a layer in one finding.

    `shapes`: of the stored codes or values of every parameter, by its name.
    """
    layers: dict[str, dict[str, set[int]]] = {}
    for found in filter(None, map(NUMBERED.match, shapes)):
        experts = f"{found['layer']}.experts" if found["layer"] else "experts"
        layers.setdefault(experts, {}).setdefault(found["weight"], set()).add(int(found["number"]))
    counts = set(_counts(config))
    said = counts.pop() if len(counts) == 1 else None
    for layer, weights in layers.items():
        every = set().union(*weights.values())
        count = max(every) + 1 if said is None else said
        named = f"of {count}" if said is None else f"of the {count} of config.json"
        for id, words, chosen in (
            ("missing-expert", "are missing", {weight: set(range(count)) - have for weight, have in weights.items()}),
            ("extra-expert", "are too many", {weight: have - set(range(count)) for weight, have in weights.items()}),
        ):
            groups: dict[tuple[int, ...], list[str]] = {}
            for weight, wrong in chosen.items():
                if numbers := tuple(sorted(wrong)):
                    groups.setdefault(numbers, []).append(weight)
            if groups:
                parts = [f"{', '.join(names)} of {_ranges(numbers)}" for numbers, names in groups.items()]
                yield Finding(id, "error", layer, f"{'; '.join(parts)} {words}, {named} experts.", _RESTORE)
    joined: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        layer, _, last = name.removesuffix(".weight").rpartition(".")
        if len(shape) > 2 and (layer == "experts" or layer.endswith(".experts")):
            joined.setdefault(layer, []).append(last)
    both = [layer for layer in layers if layer in joined]
    if both:
        message = (
            f"experts are there twice, numbered and as one tensor ({', '.join(joined[both[0]])}), in {some(both)}."
        )
        yield Finding("two-layouts", "error", both[0], message, "Remove one of the two.")
    elif layers and joined:
        message = (
            f"the experts of {some(list(layers))} are numbered, those of {some(list(joined))} are one tensor each."
        )
        yield Finding("two-layouts", "warn", next(iter(joined)), message, "Engines expect one layout in a model.")


def _counts(config: object) -> Iterator[int]:
    """The numbers of experts that a configuration and those inside it name."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key in _COUNTS and type(value) is int and value > 0:
                yield value
            elif key.endswith("_config") and key != "quantization_config":
                yield from _counts(value)


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers in words, runs of them by their ends."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[1]}" for run in runs)
