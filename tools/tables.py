"""Every generated table of README.md and docs/, by the tools of this folder.

python tools/tables.py --write   # rewrite them: what `make tables` does
python tools/tables.py --check   # exit with status 1 if a page is out of date
"""

import sys

import api_pages
import evidence_table
import families_table
import features_table
import files_table
import jax_tables
import measured_table
import neighbours_table
import served_table
import shares_table
import support_table
import user_tables
import wire_table
from marked_block import command

TOOLS = (
    user_tables,
    measured_table,
    jax_tables,
    wire_table,
    support_table,
    families_table,
    features_table,
    files_table,
    shares_table,
    evidence_table,
    neighbours_table,
    served_table,
    api_pages,
)
BLOCKS = [block for tool in TOOLS for block in tool.BLOCKS]

if __name__ == "__main__":
    sys.exit(command("Every generated table.", BLOCKS))
