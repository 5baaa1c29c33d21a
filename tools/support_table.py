"""The README's support table, as `microfloat.torch.explain` answers.

    python tools/support_table.py            # print it
    python tools/support_table.py --write    # rewrite the block in README.md

A row per exported recipe, a column per kind of device. For a GPU, explain is asked while torch reports a device of that
compute capability, so the table is the same on every machine that has triton installed.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from unittest import mock

import torch
from marked_block import ROOT, command, table

import microfloat.torch as mf
from microfloat.recipes import RECIPES, Recipe
from microfloat.torch.explain import Explanation

BLOCK = "support table"
# Title -> compute capability of a CUDA device; None is the CPU. Another column is another line here.
COLUMNS = {"CPU": None, "Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0), "Blackwell": (10, 0)}
UNTRIED = "not yet run"


@contextlib.contextmanager
def device_of(capability: tuple[int, int] | None) -> Iterator[torch.device]:
    """A device to ask explain about, present or not: a CUDA device of that compute capability."""
    if capability is None:
        yield torch.device("cpu")
        return
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
    ):
        # An index of its own, because answers about one device may be remembered.
        yield torch.device("cuda", 10 * capability[0] + capability[1])


def formats_text(recipe: Recipe) -> str:
    """The formats of x, w and dy, those of their first use."""
    casts = {"x": recipe.fprop.lhs, "w": recipe.fprop.rhs, "dy": recipe.dgrad.lhs}
    names = {tensor: "high precision" if cast is None else cast.format.name for tensor, cast in casts.items()}
    if len(set(names.values())) == 1:
        return names["x"]
    return ", ".join(f"{tensor}: {name}" for tensor, name in names.items())


def cell(explanation: Explanation, notes: dict[str, int]) -> str:
    """How the GEMMs run and the numbers of the notes that name their kernels; per GEMM where they differ."""
    kernels: dict[str, list[int]] = {}
    gemms: dict[str, list[str]] = {}
    for row in explanation.rows:
        if not row.support.available:
            phrase = "does not run"
        elif not row.support.accelerated:
            phrase = "runs"
        else:
            phrase = "accelerated, untried" if UNTRIED in row.support.reason else "**accelerated**"
        kernel = re.sub(r" \(.*?\)", "", row.kernel)  # formats in brackets stand in the row already
        kernels.setdefault(phrase, []).append(notes.setdefault(f"{row.backend} backend: {kernel}", len(notes) + 1))
        gemms.setdefault(phrase, []).append(row.gemm)
    texts = [
        ("" if len(gemms) == 1 else "/".join(gemms[phrase]) + " ")
        + f"{phrase} ({', '.join(str(number) for number in sorted(set(numbers)))})"
        for phrase, numbers in kernels.items()
    ]
    return "; ".join(texts)


def support_table() -> str:
    """The table and, below it, numbered: the kernels."""
    notes: dict[str, int] = {}
    rows = []
    for name, make in RECIPES.items():
        recipe = make()
        cells = []
        for capability in COLUMNS.values():
            with device_of(capability) as device:
                cells.append(cell(mf.explain(recipe, device), notes))
        rows.append([f"`{name}`", formats_text(recipe), *cells])
    listed = "\n".join(f"{number}. {note}." for note, number in notes.items())
    return f"{table(['recipe', 'formats', *COLUMNS], rows)}\n\n{listed}"


if __name__ == "__main__":
    sys.exit(command("The README's support table.", [(ROOT / "README.md", BLOCK, support_table)]))
