"""The list of all source files in docs/architecture.md; from the first sentences of their docstrings.

python tools/files_table.py           # print it
python tools/files_table.py --write   # rewrite the block in the page
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

from marked_block import ROOT, command, table

PAGE, BLOCK = ROOT / "docs" / "architecture.md", "files"
PACKAGE = ROOT / "src" / "microfloat"

# Comments and the docstring: to parse all of a module for it takes a hundred times as long.
_HEAD = re.compile(r'(?:#[^\n]*\n|\s)*"""(?:[^"\\]|\\.|"(?!""))*"""', re.DOTALL)


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    head = _HEAD.match(path.read_text(encoding="utf-8"))
    text = ast.get_docstring(ast.parse(head[0] if head else "")) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z0-9)`'\"\]])\. |\.$", paragraph)[0].rstrip(":")
    return re.sub(r"\*(\w+)\*", r"\1", sentence).replace("|", "\\|")


def files_by_folder() -> dict[str, list[Path]]:
    """Folder under the package ("" for itself) -> its modules with a docstring; of packages, the `__init__` too."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if first_sentence(path):
            found[path.parent.relative_to(PACKAGE).as_posix().removeprefix(".")].append(path)
    return dict(found)


def files_table() -> str:
    """A table for each folder."""
    parts = []
    for folder, paths in files_by_folder().items():
        rows = [(f"`{path.relative_to(PACKAGE).as_posix()}`", first_sentence(path)) for path in paths]
        parts.append(f"**`src/microfloat/{folder}`**\n\n" + table(("file", "what it holds"), rows))
    return "\n\n".join(parts)


BLOCKS = [(PAGE, BLOCK, files_table)]

if __name__ == "__main__":
    sys.exit(command(__doc__, BLOCKS))
