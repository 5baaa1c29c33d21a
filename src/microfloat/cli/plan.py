"""`microfloat plan`: a format for each layer, by SQNR, under a budget of bits; written as a Placement."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from microfloat.arguments import check_new_file
from microfloat.cli.hub import Hub, local
from microfloat.cli.output import MOST_LINES, Column, Output, decibel, four, together
from microfloat.errors import invalid_value
from microfloat.formats import ScaledFormat
from microfloat.recipes import Placement, from_name
from microfloat.recipes.placement import fused_group

DEFAULT_FORMATS = "nvfp4,mxfp8,bf16"
# Format -> the recipe that trains and runs it.
RECIPES = {
    "nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp6_e3m2": "mxfp6", "mxfp8": "mxfp8", "fp8_tensor": "fp8_current",
    "fp8_row": "fp8_row", "fp8_128x128": "fp8_block",
}  # fmt: skip
_PLAIN = "bf16"
_COLUMNS = (
    Column("name", "layer", prose=True), Column("tensors", "n", right=True), Column("format"),
    Column("bits", text=four, right=True), Column("sqnr_db", "worst\ndB", decibel, right=True),
)  # fmt: skip


def plan(
    output: Output,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint in high precision.")],
    bits: Annotated[float, typer.Option("--bits", metavar="B", help="Bits per weight, averaged over the cast layers.")],
    format: Annotated[
        str, typer.Option("--format", metavar="NAMES", help="Formats to choose from; bf16 keeps a layer.")
    ] = DEFAULT_FORMATS,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the rules of the Placement.")] = None,
    sample_rows: Annotated[
        int, typer.Option("--sample-rows", min=0, metavar="N", help="Rows of a matrix to measure; 0: all of them.")
    ] = 512,
    hub: Hub = False,
) -> int:  # fmt: skip
    """Choose a format for each layer: the least noise under a budget of bits.

    Layers that are served as one matrix (q, k and v; gate and up) get one format, as do the experts of a layer.

    \b
    microfloat plan model/ --bits 4.8
    microfloat plan model/ --bits 6 --format nvfp4,mxfp6_e3m2,mxfp8 --out placement.json
    microfloat convert model/ model-mixed/ --to microfloat:native --placement placement.json
    """
    from microfloat.checkpoint import load
    from microfloat.checkpoint.families.patterns import module_of
    from microfloat.cli.survey import chosen_formats, survey
    from microfloat.recipes.placement import is_kept

    if not 0 < bits < math.inf:
        raise invalid_value("--bits", bits, "a finite number > 0")
    if out is not None:
        check_new_file("--out", out)
    names = [name.strip().lower() for name in format.split(",")]
    formats = chosen_formats(",".join(name for name in names if name != _PLAIN))
    for fmt in formats:
        if fmt.name not in RECIPES:
            raise invalid_value("--format", fmt.name, f"formats that a recipe runs: {', '.join(RECIPES)}, {_PLAIN}")
    checkpoint = load(local(path, hub))
    layers = [
        name for name in checkpoint
        if len(checkpoint[name].logical_shape) == 2 and not is_kept(module_of(name)) and checkpoint[name].format is None
    ]  # fmt: skip
    if not layers:
        raise invalid_value("PATH", path, "a checkpoint with matrices in high precision", "Convert it to bf16 first.")
    found = survey(checkpoint, output.each("measuring", layers), formats, sample_rows)
    groups: dict[str, list[dict[str, Any]]] = {}
    if broken := [row["name"] for row in found.rows if row["non_finite"]]:
        kept = "kept in high precision, with the layers that share their format"
        output.warn(f"NaN or Inf in {', '.join(broken)}: {kept}")
    for row in found.rows:
        groups.setdefault(_group(row["name"]), []).append(row)
    cost = {fmt.name: fmt.bits_per_element for fmt in formats} | ({_PLAIN: 16.0} if _PLAIN in names else {})
    weights = sum(_size(row) for row in found.rows)
    chosen = allot({key: _choices(rows, formats, cost) for key, rows in groups.items()}, bits * weights)
    least = sum(choice.bits for choice in chosen.values()) / weights
    if least > bits:
        raise invalid_value("--bits", bits, f"{least:.4g} or more, what the smallest of these formats take")
    _show(output, groups, chosen, cost | {_PLAIN: 16.0}, (path, out))
    return 0


def _group(name: str) -> str:
    """A pattern of the layers that get one format: those that are served as one matrix, and the experts of a layer."""
    module = name.removesuffix(".weight")
    experts = re.match(r"(.*\bexperts)\.\d+\.", module)
    return f"{experts[1]}*" if experts else fused_group(module) or module


class Choice(NamedTuple):
    """A format for a group of layers: its bits in all, and the energy of its noise relative to the signal."""

    format: str
    bits: float
    noise: float


def _choices(
    rows: Sequence[Mapping[str, Any]], formats: Sequence[ScaledFormat], cost: Mapping[str, float]
) -> list[Choice]:
    sizes = [_size(row) for row in rows]
    made = [
        Choice(
            fmt.name, sum(sizes) * cost[fmt.name],
            sum(n * 10 ** (-row[fmt.name] / 10) for n, row in zip(sizes, rows, strict=True)),
        )
        for fmt in formats
        if all(row[fmt.name] is not None and not row["non_finite"] for row in rows)
    ]  # fmt: skip
    return made + ([Choice(_PLAIN, sum(sizes) * 16.0, 0.0)] if _PLAIN in cost or not made else [])


def allot(groups: Mapping[str, Sequence[Choice]], budget: float) -> dict[str, Choice]:
    """A choice for each group: step by step the one that removes most noise per bit, while the budget lasts.

    `budget`: bits in all. The result costs more only if the smallest choices already do.
    """
    chosen = {key: min(choices, key=lambda choice: choice.bits) for key, choices in groups.items()}
    left = budget - sum(choice.bits for choice in chosen.values())
    while True:
        steps = [
            ((chosen[key].noise - choice.noise) / (choice.bits - chosen[key].bits), key, choice)
            for key, choices in groups.items() for choice in choices
            if choice.noise < chosen[key].noise and chosen[key].bits < choice.bits <= chosen[key].bits + left
        ]  # fmt: skip
        if not steps:
            return chosen
        _, key, choice = max(steps, key=lambda step: step[0])
        left -= choice.bits - chosen[key].bits
        chosen[key] = choice


def _show(
    output: Output, groups: Mapping[str, list[dict[str, Any]]], chosen: Mapping[str, Choice],
    cost: Mapping[str, float], paths: tuple[Path, Path | None],
) -> None:  # fmt: skip
    rows = [
        {
            "name": row["name"], "format": chosen[key].format, "bits": cost[chosen[key].format], "shape": row["shape"],
            "sqnr_db": row.get(chosen[key].format),
        }
        for key, members in groups.items() for row in members
    ]  # fmt: skip
    output.put(layers=rows)
    shown = list(together(rows, ("format",))) if len(rows) > MOST_LINES else rows
    output.table(None, shown, _COLUMNS, "A format for each layer")
    weights = sum(_size(row) for members in groups.values() for row in members)
    counts = Counter(row["format"] for row in rows)
    (path, out), placement, used = paths, _placement(rows), sum(choice.bits for choice in chosen.values()) / weights
    spoken = ", ".join(f"{number} {name}" for name, number in counts.most_common())
    output.facts({"bits": used, "formats": dict(counts)}, texts={"bits": f"{used:.4g} per weight", "formats": spoken})
    output.put(placement=placement.to_dict())
    if out is not None:
        placement.to_json(out)
        output.say(f"Written: {out}. Next: microfloat convert {path} OUT --to ct:mixed --placement {out}, or")
        output.say(f"in Python mf.quantize_(model, '{out}') to serve, mf.convert(model, '{out}') to train.")


def _placement(rows: Sequence[Mapping[str, Any]]) -> Placement:
    """A rule for each layer that differs from the most common format, and one for the others."""
    ((usual, _),) = Counter(row["format"] for row in rows).most_common(1)
    named = ((_group(row["name"]), row["name"].removesuffix(".weight"), row["format"]) for row in rows)
    formats = {group if group.endswith("*") else name: one for group, name, one in named if one != usual}
    formats["*"] = usual
    return Placement([(name, None if one == _PLAIN else from_name(RECIPES[one])) for name, one in formats.items()])


def _size(row: Mapping[str, Any]) -> int:
    return row["shape"][0] * row["shape"][1]
