"""The README's support table, as `microfloat.torch.explain` answers.

    python tools/support_table.py            # print it
    python tools/support_table.py --write    # rewrite the block in README.md

A row per exported recipe, a column per kind of device. GPUs are asked for by architecture, so that the table is the
same on every machine that has triton installed.
"""

import re
import sys

from marked_block import ROOT, command, table

import microfloat.torch as mf
from microfloat.recipes import RECIPES, Recipe
from microfloat.torch.explain import Explanation

BLOCK = "support table"
# Title -> what explain is asked about. Another column is another entry here.
COLUMNS = {"CPU": "cpu", "Ampere": "sm_80", "Ada": "sm_89", "Hopper": "sm_90", "Blackwell": "sm_100"}
UNTRIED = "not yet run"


def formats_text(recipe: Recipe) -> str:
    """The formats of x, w and dy, those of their first use."""
    casts = {"x": recipe.fprop.lhs, "w": recipe.fprop.rhs, "dy": recipe.dgrad.lhs}
    names = {tensor: "high precision" if cast is None else cast.format.name for tensor, cast in casts.items()}
    if len(set(names.values())) == 1:
        return names["x"]
    return ", ".join(f"{tensor}: {name}" for tensor, name in names.items())


def cell(explanation: Explanation, notes: dict[str, int]) -> str:
    """Routes of the GEMMs and the numbers of the notes that name their kernels; per GEMM where they differ."""
    kernels: dict[str, list[int]] = {}
    gemms: dict[str, list[str]] = {}
    for row in explanation.rows:
        untried = UNTRIED in row.support.reason
        if not row.support.available:
            phrase = "does not run"
        elif not row.support.accelerated:
            phrase = "runs, untried" if untried else "runs"
        else:
            phrase = "accelerated, untried" if untried else "**accelerated**"
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
        cells = [cell(mf.explain(recipe, device), notes) for device in COLUMNS.values()]
        rows.append([f"`{name}`", formats_text(recipe), *cells])
    listed = "\n".join(f"{number}. {note}." for note, number in notes.items())
    return f"{table(['recipe', 'formats', *COLUMNS], rows)}\n\n{listed}"


if __name__ == "__main__":
    sys.exit(command("The README's support table.", [(ROOT / "README.md", BLOCK, support_table)]))
