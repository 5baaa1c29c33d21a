"""microfloat beside TransformerEngine and torchao: the ratios of the pages' tables and of README's picture.

They come from one run of `python -m benchmarks peers`. Nothing is measured here. Standard library only.
"""

import json
from dataclasses import dataclass
from typing import Any

from marked_block import ROOT, table

RESULT = ROOT / "benchmarks" / "results" / "peers" / "one_run.json"
LIBRARIES = ("microfloat", "TransformerEngine", "torchao")
# Work of the run -> its title.
WORKS = {"linear": "a Linear, 16384 x 4096 to 14336", "layer": "a Llama decoder layer",
         "model": "a step of twelve layers and the head"}  # fmt: skip
# Name of a candidate of microfloat -> the recipe.
OURS = {"delayed": "delayed", "current": "fp8_current", "row": "fp8_row", "block": "fp8_block", "mxfp8.folded": "mxfp8",
        "nvfp4.folded": "nvfp4, folded", "nvfp4": "nvfp4"}  # fmt: skip
# Name of another library's candidate -> the candidate of microfloat with the same scales.
BESIDE = {"torchao.tensorwise": "current", "te.delayed": "delayed", "te.current": "current", "te.block": "block"}


@dataclass(frozen=True)
class Ratio:
    """Compiled bf16's time over that of a library under a recipe."""

    work: str
    recipe: str
    library: str
    value: float


def rows() -> dict[tuple[str, str], dict[str, Any]]:
    """(work, candidate) -> its measured row."""
    found = {}
    for row in json.loads(RESULT.read_text(encoding="utf-8"))["rows"]:
        work, _, name = row["id"].removeprefix("peers.").partition(".")
        if "median_ms" in row:
            found[work, name] = row
    return found


def ratios() -> list[Ratio]:
    """Every library on every piece of work under every recipe; the libraries in their order."""
    found = []
    for (work, name), row in rows().items():
        if name != "bf16":
            library = {"torchao": "torchao", "te": "TransformerEngine"}.get(name.split(".")[0], "microfloat")
            found.append(Ratio(WORKS[work], OURS[BESIDE.get(name, name)], library, row["ratio"]))
    return sorted(found, key=lambda ratio: LIBRARIES.index(ratio.library))


def layer_ratio(recipe: str) -> float | None:
    """The decoder layer under `convert(fuse=True)`: how many times as fast as compiled bf16; None: not measured."""
    name = next((name for name, one in OURS.items() if one == recipe), None)
    return None if name is None else rows()["layer", name]["ratio"]


def layer_source() -> str:
    """What the figures of the decoder layer are, and where they come from."""
    ms = {name: row["median_ms"] for (work, name), row in rows().items() if work == "layer"}
    return (
        "a Llama decoder layer (4096 wide, 4 x 4096 tokens) under `convert(..., fuse=True)`, forward and backward, "
        f"beside transformers' own in bf16, compiled ({ms['delayed']:.1f} ms under `delayed`, {ms['bf16']:.1f} in "
        f"bf16): {_provenance()}"
    )


def peers_table() -> str:
    """A row per piece of work and recipe."""
    found = {(ratio.work, ratio.recipe, ratio.library): f"{ratio.value:.2f}" for ratio in ratios()}
    cells = [
        ["" if number else work, f"`{recipe}`", *(found.get((work, recipe, library), "-") for library in LIBRARIES)]
        for work in WORKS.values() for number, recipe in enumerate(OURS.values())
    ]  # fmt: skip
    versions = {row["extra"]["library"].partition(" ")[0]: row["extra"]["library"] for row in rows().values()}
    torchao, te = versions["torchao"], versions["transformer_engine"].partition(" ")[2]
    header = ["forward + backward", "recipe", "microfloat", f"TransformerEngine {te}", torchao]
    text = (
        "How many times as fast as compiled bf16. microfloat and TransformerEngine run eagerly, torchao (tensorwise) "
        "is compiled. -: the library has no such recipe on a Hopper, or the run has no row for it; TransformerEngine "
        "has no way to convert transformers' model, and its decoder layer is its own `TransformerLayer`, where "
        "microfloat's is transformers' under `convert(..., fuse=True)`. Each candidate ran in a process of its own, "
        "since torch's attention is slower once TransformerEngine is imported; Linears and layers took turns, a few "
        "steps each, and the models ran one after the other. "
    )
    return f"{table(header, cells, right=range(2, len(header)))}\n\n{text}{_provenance()}"


def _provenance() -> str:
    row = rows()["linear", "bf16"]
    return (
        f"`python -m benchmarks peers` on one {row['device']}, {row['date']}; torch {row['versions']['torch']} "
        f"(`{RESULT.relative_to(ROOT).as_posix()}`)."
    )
