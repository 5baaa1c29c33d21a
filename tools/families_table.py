"""The table of the families of checkpoints in docs/checkpoints.md; from the rows of `microfloat.checkpoint.families`.

python tools/families_table.py           # print it
python tools/families_table.py --write   # rewrite the block in the page
"""

import sys

from marked_block import ROOT, command, table

from microfloat.checkpoint.families import DIALECTS, Dialect, Family
from microfloat.checkpoint.families.readers import FACTS, SOURCES

PAGE, BLOCK = ROOT / "docs" / "checkpoints.md", "families"
_MOST_TARGETS = 4


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def targets(family: Family) -> str:
    """The targets that are written in a family."""
    names = list(family.writes)
    if len(names) > _MOST_TARGETS:
        return f"`{names[0].partition(':')[0]}:` and the name of any format"
    return _quoted(names) or "only read"


def tensors(family: Family, dialect: Dialect) -> str:
    """The names of the tensors of a parameter P, and the dtype of its scales where that is no usual float."""
    if dialect.parameters is not None:
        return "described in the metadata of the file"
    dtype = {"F8_E8M0": "E8M0", "F8_E4M3": "E4M3"}.get(family.scale[1][-1], "")
    return f"P{family.codes[0]}, P{family.scale[0]}" + (f" ({dtype})" if dtype else "")


def scale_of_tensors(family: Family) -> str:
    """The global scale of a parameter P."""
    if family.tensor_scale is None:
        return ""
    return f"P{family.tensor_scale}, {'divides' if family.divides else 'multiplies'}"


def families_table() -> str:
    """A row per family, in the order in which they are tried."""
    rows: dict[str, list[str]] = {}
    for dialect in DIALECTS:
        method = _quoted(list(dialect.methods[:1]))
        for family in dialect.families:
            made = [f"`{family.name}`", targets(family), tensors(family, dialect), scale_of_tensors(family), method]
            rows.setdefault(family.name, made)
    return table(["family", "targets", "tensors of a parameter P", "global scale", "quant_method"], [*rows.values()])


def readers_table() -> str:
    """A row per fact, in the order of the readers."""
    order = list(SOURCES)
    facts = sorted(FACTS, key=lambda one: order.index(one.reader))
    rows = [[one.reader, one.does, _quoted(one.families.split()), one.what] for one in facts]
    return table(["reader", "does", "families", "about"], rows)


BLOCKS = ((PAGE, BLOCK, families_table), (PAGE, "readers", readers_table))

if __name__ == "__main__":
    sys.exit(command(__doc__ or "", BLOCKS))
