"""microfloat beside TransformerEngine and torchao: the ratios of the pages' tables and of README's picture.

They come from benchmarks/results/peers: README's from one run of `python -m benchmarks peers`, the laboratory's from
older runs of a script outside of this repository. Nothing is measured here. Standard library only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marked_block import ROOT, table

RESULTS = ROOT / "benchmarks" / "results" / "peers"
LIBRARIES = ("microfloat", "TransformerEngine", "torchao")


@dataclass(frozen=True)
class Work:
    """What was measured: a section and a shape in the files.

    `sources`: library -> the file with its rows and the pattern of their names. `base`: the file whose bf16 time all
    ratios are taken to; "" for the ratio that each row has to the bf16 of its own turn. `recipes`: recipe -> its name
    in patterns, and for torchao its own word.
    """

    title: str
    section: str
    shape: str
    sources: Mapping[str, tuple[str, str]]
    base: str = ""
    recipes: Mapping[str, str] = field(default_factory=dict)


_RECIPES = {"delayed": "delayed", "fp8_current": "current", "fp8_block": "block", "mxfp8": "mxfp8.auto"}
_TORCHAO = {"fp8_current": "current", "fp8_row": "row"}
_TORCHAO_WORDS = {"current": "tensorwise", "row": "rowwise"}
LAYER = Work(
    "a Llama decoder layer", "layer", "4x4096 GQA",
    {"microfloat": ("layer", "mf.{}.fuse"), "TransformerEngine": ("layer_te", "te.{}")}, "layer", _RECIPES,
)  # fmt: skip
WORKS = (
    Work("a Linear, 16384 x 4096 to 14336", "linear", "16384x4096x14336",
         {"microfloat": ("pairs_te", "mf.{}"), "TransformerEngine": ("pairs_te", "te.{}")}, "", _RECIPES),
    LAYER,
    Work("a step of a three-layer Llama, compiled", "hf_llama_3x4096_step", "compiled",
         {"microfloat": ("layer_te", "mf.{}.fuse"), "torchao": ("layer_te", "ao.{}")}, "layer_te", _TORCHAO),
    Work("the five Linears of a Llama block", "block", "eager",
         {"microfloat": ("pairs", "mf.{}"), "TransformerEngine": ("pairs_te_block", "te.{}")}, "", _RECIPES),
    Work("a Linear, 16384 x 4096 to 14336; torchao compiled", "linear", "16384x4096x14336",
         {"microfloat": ("all_in_turn", "mf.{}"), "torchao": ("all_in_turn", "ao.{}.compile")}, "", _TORCHAO),
)  # fmt: skip
# Where a row is not in its library's first file.
_OTHERWISE = {("pairs_te", "te.block"): "pairs_te_block", ("pairs_te", "mf.mxfp8.auto"): "pairs",
              ("pairs_te", "mf.block"): "pairs"}  # fmt: skip
REFUSED = {("TransformerEngine", "mxfp8")}


# Work of `benchmarks.peers` -> its title in README's picture.
RUN_WORKS = {"linear": "a Linear, 16384 x 4096 to 14336", "layer": "a Llama decoder layer",
             "model": "a step of twelve layers and the head"}  # fmt: skip
# Candidate of another library in that run -> the recipe that it is beside.
_BESIDE = {"torchao.tensorwise": "current", "te.delayed": "delayed", "te.current": "current", "te.block": "block"}


@dataclass(frozen=True)
class Ratio:
    """bf16's time over that of a library, or None where it was not measured; `refused`: it does not run there."""

    work: str
    recipe: str
    library: str
    value: float | None
    refused: bool = False


def ratios() -> list[Ratio]:
    """Every library on every piece of work under every recipe."""
    found = []
    for work in WORKS:
        for recipe, name in work.recipes.items():
            for library in LIBRARIES:
                value = None
                if library in work.sources:
                    file, pattern = work.sources[library]
                    value = ratio_of(work, file, pattern.format(_TORCHAO_WORDS[name] if library == "torchao" else name))
                found.append(Ratio(work.title, recipe, library, value, (library, recipe) in REFUSED))
    return found


def run_rows() -> list[dict[str, Any]]:
    """The measured rows of README's run."""
    return [row for row in _data("one_run")["rows"] if "median_ms" in row]


def run_ratios() -> list[Ratio]:
    """Every library in README's run, in its order: compiled bf16's time over that of each; recipes by their ids."""
    found = []
    for row in run_rows():
        work, _, name = row["id"].removeprefix("peers.").partition(".")
        library = {"torchao": "torchao", "te": "TransformerEngine"}.get(name.split(".")[0], "microfloat")
        if name != "bf16":
            found.append(Ratio(RUN_WORKS[work], _BESIDE.get(name, name), library, row["ratio"]))
    return sorted(found, key=lambda ratio: LIBRARIES.index(ratio.library))


def ratio_of(work: Work, file: str, name: str) -> float | None:
    """bf16's time over that of a candidate in a file."""
    row = _row(_OTHERWISE.get((file, name), file), work, name) or _row(file, work, name)
    if row is None or not work.base:
        return row and row["ratio"]
    bf16 = _row(work.base, work, "bf16")
    assert bf16 is not None
    return bf16["ms"] / row["ms"]


def layer_ratio(recipe: str) -> float | None:
    """The decoder layer under `convert(fuse=True)`: how many times as fast as bf16; None where it was not measured."""
    names = {**_RECIPES, "fp8_row": "row", "nvfp4": "nvfp4"}
    return ratio_of(LAYER, "layer", f"mf.{names[recipe]}.fuse") if recipe in names else None


def layer_source() -> str:
    """What the figures of the decoder layer are, and where they come from."""
    data = _data("layer")
    ms = {row["name"]: row["ms"] for row in data["rows"]}
    return (
        f"a Llama decoder layer (4096 wide, 4 x 4096 tokens) under `convert(..., fuse=True)`, forward and backward, "
        f"beside transformers' own in bf16 ({ms['mf.delayed.fuse']:.1f} ms under `delayed`, {ms['bf16']:.1f} in bf16; "
        f"the fused parts alone, all in bf16, {ms['mf.bf16.own']:.1f}): {_provenance(data)}"
    )


def peers_table() -> str:
    """A row per piece of work and recipe."""
    rows, cells = [], {(ratio.work, ratio.recipe, ratio.library): _cell(ratio) for ratio in ratios()}
    for work in WORKS:
        for number, recipe in enumerate(work.recipes):
            first = "" if number else work.title
            rows.append([first, f"`{recipe}`", *(cells[work.title, recipe, library] for library in LIBRARIES)])
    header = ["forward + backward", "recipe", "microfloat", "TransformerEngine 2.20.2", "torchao 0.18"]
    text = (
        "How many times as fast as bf16 in plain PyTorch; -: not measured. Eager, but where it says compiled; the step "
        "of three layers includes AdamW, and there bf16 is compiled too. Each candidate took turns with bf16; in the "
        "last rows all took turns in one run, which slows each. The decoder layer of microfloat is transformers' own "
        "under `convert(..., fuse=True)`, that of TransformerEngine its own `TransformerLayer`; each ran in a process "
        "of its own, since torch's attention is slower once TransformerEngine is imported, and both are compared with "
        "bf16 in the process without it. The script is not part of this repository, so these rows cannot be repeated "
        "from it; `python -m benchmarks linear --only l.torchao` and `python -m benchmarks decoder` measure the same "
        "work of this library, and torchao's."
    )
    where = "\n\n".join(_provenance(_data(name)) for name in ("pairs", "pairs_te", "pairs_te_block", "all_in_turn",
                                                               "layer", "layer_te"))  # fmt: skip
    return f"{table(header, rows, right=range(2, len(header)))}\n\n{text}\n\n{where}"


def _cell(ratio: Ratio) -> str:
    return "refuses" if ratio.refused else "-" if ratio.value is None else f"{ratio.value:.2f}"


def _provenance(data: dict[str, Any]) -> str:
    versions = data["versions"]
    return (
        f"`{data['command']}` on one {data['machine']['gpu']}, {data['date']}; microfloat {versions['microfloat']}, "
        f"torch {versions['torch']}."
    )


def _row(name: str, work: Work, candidate: str) -> dict[str, Any] | None:
    place = work.section, work.shape, candidate
    return next((row for row in _data(name)["rows"] if (row["section"], row["shape"], row["name"]) == place), None)


def _data(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
