"""Every generated table of README.md and docs/, by the tools of this folder.

python tools/tables.py --write   # rewrite them: what `make tables` does
python tools/tables.py --check   # exit with status 1 if a page is out of date
"""

import sys

import jax_tables
import measured_table
import support_table
import wire_table
from marked_block import command

BLOCKS = [*measured_table.BLOCKS, *jax_tables.BLOCKS, *wire_table.BLOCKS, *support_table.BLOCKS]

if __name__ == "__main__":
    sys.exit(command("Every generated table.", BLOCKS))
