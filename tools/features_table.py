"""The files of tests in docs/features.md; from what the docstrings of tests say, such as ``Features M5 and S12``.

python tools/features_table.py --write   # refill the last column of the tables in the page
"""

import re
import sys
from collections import defaultdict

from marked_block import ROOT, command, read_block

PAGE, BLOCK = ROOT / "docs" / "features.md", "features"
_NAMED = re.compile(r"\bfeatures\s+((?:[A-Z]\d+(?:,\s+|\s+and\s+|\s+to\s+)?)+)", re.IGNORECASE)
_ROW = re.compile(r"\| ([A-Z]\d+) \| (.*) \| (.*) \|")


def files_of_features() -> dict[str, list[str]]:
    """Code of a feature -> the files under tests/ that name it."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        codes: set[str] = set()
        for listed in _NAMED.findall(path.read_text(encoding="utf-8")):
            codes.update(re.findall(r"[A-Z]\d+", listed))
            for letter, first, last in re.findall(r"([A-Z])(\d+)\s+to\s+[A-Z](\d+)", listed):
                codes.update(f"{letter}{number}" for number in range(int(first), int(last) + 1))
        for code in codes:
            found[code].append(path.relative_to(ROOT / "tests").as_posix())
    return dict(found)


def rows_of_page() -> dict[str, list[str]]:
    """Code -> the files that its row lists, in the page."""
    text = read_block(PAGE.read_text(encoding="utf-8"), BLOCK)
    return {code: re.findall(r"`([^`]+)`", files) for code, _, files in _ROW.findall(text)}


def refilled() -> str:
    """The tables of the page with the files of today."""
    files = files_of_features()
    text = read_block(PAGE.read_text(encoding="utf-8"), BLOCK)

    def row(match: re.Match) -> str:
        listed = ", ".join(f"`{name}`" for name in files.get(match[1], []))
        return f"| {match[1]} | {match[2]} | {listed} |"

    return _ROW.sub(row, text)


BLOCKS = [(PAGE, BLOCK, refilled)]

if __name__ == "__main__":
    sys.exit(command(__doc__, BLOCKS))
