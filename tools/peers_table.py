"""microfloat beside TransformerEngine and torchao: the ratios of README's table and picture, from results/peers.

Nothing is measured here. Standard library only.
"""

import json
from dataclasses import dataclass
from typing import Any

from marked_block import ROOT, table

RESULTS = ROOT / "benchmarks" / "results" / "peers"
LIBRARIES = ("microfloat", "TransformerEngine", "torchao")

# What was measured -> (section, shape) in the files. The layer of microfloat is that of transformers, converted.
WORK = {
    "Linear, 16384 x 4096 to 14336": ("linear", "16384x4096x14336"),
    "the five Linears of a Llama block": ("block", "eager"),
    "a Llama decoder layer with attention": ("layer", "4x4096 GQA"),
}
# Recipe -> its name in the files; torchao's "tensorwise" scales per tensor from the current amax.
RECIPES = {"delayed": "delayed", "fp8_current": "current", "fp8_block": "block", "mxfp8": "mxfp8.auto"}
TORCHAO = {"fp8_current": "ao.tensorwise.compile"}
# `microfloat.torch.TransformerLayer`, measured in another run beside a layer of the same plain operations.
DECODER = ROOT / "benchmarks" / "results" / "decoder.json"
OWN_LAYER = {
    "delayed": "d.layer.delayed", "fp8_current": "d.layer.current", "fp8_block": "d.layer.block",
    "mxfp8": "d.layer.mxfp8.folded",
}  # fmt: skip
REFUSED = {("TransformerEngine", "mxfp8")}


@dataclass(frozen=True)
class Ratio:
    """bf16's time over that of a library, or None where it was not measured; `refused`: it does not run there.

    `beside`: microfloat's ratio in the same run, where that is not the run of microfloat's own entry.
    """

    work: str
    recipe: str
    library: str
    value: float | None
    refused: bool = False
    beside: float | None = None


def ratios() -> list[Ratio]:
    """Every library on every piece of work under every recipe."""
    ours, theirs, their_blocks, in_turn = (
        _rows(name) for name in ("pairs", "pairs_te", "pairs_te_block", "all_in_turn")
    )
    found = []
    for work, place in WORK.items():
        for recipe, name in RECIPES.items():
            # Measured beside TransformerEngine, where that was done.
            microfloat = theirs.get((*place, f"mf.{name}"), ours.get((*place, f"mf.{name}")))
            te = {**theirs, **their_blocks}.get((*place, f"te.{name}"))
            torchao = in_turn.get((*place, TORCHAO[recipe])) if recipe in TORCHAO else None
            for library, value in zip(LIBRARIES, (microfloat, te, torchao), strict=True):
                beside = in_turn[*place, f"mf.{name}"] if library == "torchao" and value is not None else None
                found.append(Ratio(work, recipe, library, value, (library, recipe) in REFUSED, beside))
    return found


def peers_table() -> str:
    """A row per piece of work and recipe."""
    rows, cells = [], {(ratio.work, ratio.recipe, ratio.library): _cell(ratio) for ratio in ratios()}
    for work in WORK:
        for recipe in RECIPES:
            first = work if recipe == next(iter(RECIPES)) else ""
            rows.append([first, f"`{recipe}`", *(cells[work, recipe, library] for library in LIBRARIES)])
    header = ["forward + backward, eager", "recipe", "microfloat", "TransformerEngine 2.20.2", "torchao 0.18, compiled"]
    data = json.loads((RESULTS / "pairs_te.json").read_text(encoding="utf-8"))
    text = (
        "How many times as fast as bf16 in plain PyTorch (the layer: transformers' own); -: not measured. Each "
        "candidate took turns with bf16, torchao with all candidates in one run, in which microfloat had the figure "
        "beside it. The decoder layer of microfloat is transformers' own, converted layer by layer, and after the "
        "comma `TransformerLayer`, of another run beside a layer of the same plain operations "
        f"(`benchmarks/results/decoder.json`: {_own_layer('delayed')['median_ms']:.1f} ms under delayed scaling); that "
        "of TransformerEngine is its own."
    )
    versions = data["versions"]
    where = (
        f"`{data['command']}` (a script outside this repository; `benchmarks/results/peers`) on one "
        f"{data['machine']['gpu']}, {data['date']}; microfloat {versions['microfloat']}, torch {versions['torch']}."
    )
    return f"{table(header, rows, right=range(2, len(header)))}\n\n{text}\n\n{where}"


def _cell(ratio: Ratio) -> str:
    if ratio.refused:
        return "refuses"
    if ratio.value is None:
        return "-"
    if ratio.library == "microfloat" and WORK[ratio.work][0] == "layer":
        return f"{ratio.value:.2f}, {_own_layer(ratio.recipe)['ratio']:.2f}"
    return f"{ratio.value:.2f}" + ("" if ratio.beside is None else f" (beside {ratio.beside:.2f})")


def _own_layer(recipe: str) -> dict[str, Any]:
    rows = json.loads(DECODER.read_text(encoding="utf-8"))["rows"]
    return next(row for row in rows if row["id"] == OWN_LAYER[recipe])


def _rows(name: str) -> dict[tuple[str, str, str], Any]:
    """(section, shape, candidate) -> ratio."""
    data = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return {(row["section"], row["shape"], row["name"]): row["ratio"] for row in data["rows"]}
