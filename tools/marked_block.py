"""Generated blocks of Markdown pages: what stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``.

Standard library only.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def markers(name: str) -> tuple[str, str]:
    """The two comment lines that enclose block `name`."""
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def read_block(text: str, name: str) -> str:
    """Text between the markers. Raises ValueError unless both stand there once, in order."""
    opening, closing = markers(name)
    if text.count(opening) != 1 or text.count(closing) != 1 or text.index(opening) > text.index(closing):
        raise ValueError(f"the page needs the lines {opening} and {closing}, once each and in this order")
    return text.split(opening, 1)[1].split(closing, 1)[0].strip("\n")


def write_block(text: str, name: str, content: str) -> str:
    """The page with `content` between the markers, a blank line on either side."""
    read_block(text, name)
    opening, closing = markers(name)
    before, rest = text.split(opening, 1)
    return f"{before}{opening}\n\n{content.strip()}\n\n{closing}{rest.split(closing, 1)[1]}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A Markdown table; columns whose index is in `right` are set flush right."""
    rule = ["---:" if column in right else "---" for column in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def command(description: str, blocks: Sequence[tuple[Path, str, Callable[[], str]]]) -> int:
    """Print the blocks, or write them into their pages (--write), or fail if one is out of date (--check)."""
    parser = argparse.ArgumentParser(description=description)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help="rewrite the blocks in their pages")
    choice.add_argument("--check", action="store_true", help="exit with status 1 if a page is out of date")
    options = parser.parse_args()
    stale = False
    for page, name, make in blocks:
        content = make().strip()
        if not (options.write or options.check):
            print(content, end="\n\n")
            continue
        text = page.read_text(encoding="utf-8")
        changed = read_block(text, name).strip() != content
        stale |= changed
        if options.write and changed:
            page.write_text(write_block(text, name, content), encoding="utf-8")
        state = ("written" if options.write else "out of date") if changed else "up to date"
        print(f"{page.relative_to(ROOT)}, {name}: {state}")
    if options.check and stale:
        print(f"run: python tools/{Path(sys.argv[0]).name} --write")
    return 1 if options.check and stale else 0
