"""The table of bytes that ranks exchange under each recipe, in docs/distributed.md; from `microfloat.layout`.

python tools/wire_table.py           # print it
python tools/wire_table.py --write   # rewrite the block in the page
"""

import math
import sys

from marked_block import ROOT, command, table

from microfloat.layout import Layout, layout_of
from microfloat.recipes import RECIPES, Cast, from_name

PAGE, BLOCK = ROOT / "docs" / "distributed.md", "bytes on the wire"
SIZE = 4096
COLUMNS = {"x (rows of tokens)": ("fprop", "lhs"), "dy (rows of gradients)": ("dgrad", "lhs"), "w": ("fprop", "rhs")}
_BYTES = {"float32": 4, "bfloat16": 2}


def bytes_of(layout: Layout) -> int:
    """Bytes of the codes, the scales and the tensor scale of an operand."""
    return sum(math.prod(part.shape) * _BYTES.get(part.dtype, 1) for part in layout if part is not None)


def cell(cast: Cast | None) -> str:
    """Bytes per value, and beside bfloat16's two."""
    share = 1.0 if cast is None else bytes_of(layout_of(cast, SIZE, SIZE)) / (2 * SIZE * SIZE)
    return f"{2 * share:.3f} ({share:.2f}x)"


def wire_table() -> str:
    """A row per recipe."""
    rows = [["bf16", *[cell(None)] * len(COLUMNS)]]
    for name in RECIPES:
        recipe = from_name(name)
        rows.append([f"`{name}`", *(cell(recipe.cast(*operand)) for operand in COLUMNS.values())])
    return table(["recipe", *COLUMNS], rows, right=range(1, len(COLUMNS) + 1))


BLOCKS = ((PAGE, BLOCK, wire_table),)

if __name__ == "__main__":
    sys.exit(command(__doc__ or "", BLOCKS))
