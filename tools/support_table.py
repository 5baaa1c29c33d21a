"""What runs where, as `microfloat.torch.explain` answers: short in README.md, with every kernel in docs/recipes.md.

    python tools/support_table.py            # print both
    python tools/support_table.py --write    # rewrite their blocks

A row per exported recipe, a column per kind of device. GPUs are asked for by architecture, so that the table is the
same on every machine that has triton installed.
"""

import re
import sys

import peers_table
from marked_block import ROOT, command, table

import microfloat.torch as mf
from microfloat.recipes import RECIPES, Recipe
from microfloat.torch.convert.explain import Explanation

BLOCK, SHORT = "support table", "recipes by hardware"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "recipes.md"
# Title -> what explain is asked about. Another column is another entry here.
COLUMNS = {"CPU": "cpu", "Ampere": "sm_80", "Ada": "sm_89", "Hopper": "sm_90", "Blackwell": "sm_100"}
UNTRIED = "not yet run"
MEASURED = "Hopper"


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


def short_cell(explanation: Explanation) -> str:
    """One word for all three GEMMs, the least of theirs; * where no such chip has run it."""
    supports = [row.support for row in explanation.rows]
    least = (
        "-" if not all(supports) else "fast" if all(support.accelerated for support in supports) else "runs"
    )  # fmt: skip
    return least + ("*" if any(UNTRIED in support.reason for support in supports) else "")


def short_table() -> str:
    """Recipes by hardware in a word each; on the hardware that was measured, the speed of a decoder layer."""
    rows = []
    for name, make in RECIPES.items():
        recipe, measured = make(), peers_table.layer_ratio(name)
        cells = {title: short_cell(mf.explain(recipe, device)) for title, device in COLUMNS.items()}
        if measured is not None and cells[MEASURED] == "fast":
            cells[MEASURED] = f"{measured:.2f}x"
        rows.append([f"`{name}`", *cells.values()])
    text = (
        "*runs*: operands are decoded before they are multiplied, with the right results and never faster than bf16. "
        "*fast*: the products use the chip's FP8 or block-scaled units. An asterisk: written to the documented "
        "interface and tested on a CPU down to the arguments of each call, but not yet run on such a chip; the GPUs at "
        f"hand were Hoppers. Figures: {peers_table.layer_source()}"
    )
    return f"{table(['recipe', *COLUMNS], rows)}\n\n{text}"


BLOCKS = ((README, SHORT, short_table), (PAGE, BLOCK, support_table))

if __name__ == "__main__":
    sys.exit(command("What runs where.", BLOCKS))
