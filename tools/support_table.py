"""The README's support table, as `microfloat.torch.explain` answers on this machine.

    python tools/support_table.py            # print it
    python tools/support_table.py --write    # rewrite the block in README.md

A row per exported recipe, a column per device. To cover another device, add it to COLUMNS: explain has to be able to
answer for it on the machine that writes the table, which should have no GPU, so that the answer is the same everywhere.
"""

import sys

from marked_block import ROOT, command, table

import microfloat.torch as mf
from microfloat.recipes import RECIPES, Recipe
from microfloat.torch.explain import Explanation

BLOCK = "support table"
# Title -> the device that explain is asked about.
COLUMNS = {"CPU": "cpu", "CUDA GPU": "cuda"}


def formats_text(recipe: Recipe) -> str:
    """The formats of x, w and dy, those of their first use."""
    casts = {"x": recipe.fprop.lhs, "w": recipe.fprop.rhs, "dy": recipe.dgrad.lhs}
    names = {tensor: "high precision" if cast is None else cast.format.name for tensor, cast in casts.items()}
    if len(set(names.values())) == 1:
        return names["x"]
    return ", ".join(f"{tensor}: {name}" for tensor, name in names.items())


def cell(explanation: Explanation) -> str:
    """How the quantized GEMMs run: one phrase where all three run alike, else one per GEMM."""
    phrases = {}
    for row in explanation.rows:
        if not row.support.available:
            phrases[row.gemm] = "does not run"
        elif row.support.accelerated:
            phrases[row.gemm] = f"**accelerated** ({row.backend})"
        else:
            phrases[row.gemm] = f"runs, not accelerated ({row.backend})"
    if len(set(phrases.values())) == 1:
        return next(iter(phrases.values()))
    return "; ".join(f"{gemm} {phrase}" for gemm, phrase in phrases.items())


def support_table() -> str:
    """The table and, below it, why."""
    rows, reasons = [], {}
    for name, make in RECIPES.items():
        recipe = make()
        cells = []
        for title, device in COLUMNS.items():
            explanation = mf.explain(recipe, device)
            cells.append(cell(explanation))
            for row in explanation.rows:
                reasons.setdefault(row.support.reason, title)
        rows.append([f"`{name}`", f"`{type(recipe).__name__}`", formats_text(recipe), *cells])
    listed = "\n".join(f"* {title}: {reason}." for reason, title in reasons.items())
    return f"{table(['name', 'recipe', 'formats', *COLUMNS], rows)}\n\n{listed}"


if __name__ == "__main__":
    sys.exit(command("The README's support table.", [(ROOT / "README.md", BLOCK, support_table)]))
