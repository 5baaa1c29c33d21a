"""Answers about what runs here and how: the value that `explain` shows and every refusal carries."""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

# Columns of what `explain` prints, so that it fits a terminal.
WIDTH = 110


class Printed:
    """Base of reports whose ``repr`` is the text that they print as, also at the end of a cell of a notebook."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Support:
    """An answer: something runs (`available`), on tensor cores of its format (`accelerated`), and the reason.

    Unpacks into ``(available, reason)`` and its truth value is `available`, so both
    ``available, reason = is_nvfp4_available()`` and ``if is_nvfp4_available():`` mean what they say.
    """

    available: bool
    accelerated: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available

    def __iter__(self) -> Iterator[bool | str]:
        return iter((self.available, self.reason))


_Row = TypeVar("_Row")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a name between dots


def alike(rows: Iterable[_Row], key: Callable[[_Row], tuple[str, ...]]) -> list[tuple[str, list[_Row]]]:
    """Groups of rows whose names differ only by numbers, each with the pattern of its names, or a single row's name.

    `key`: the name of a row, and all else in which the rows of a group agree.
    """
    groups: dict[tuple[str, ...], list[_Row]] = {}
    for row in rows:
        name, *others = key(row)
        groups.setdefault((_NUMBER.sub("*", name), *others), []).append(row)
    return [(pattern if len(group) > 1 else key(group[0])[0], group) for (pattern, *_), group in groups.items()]


def text_table(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns; the first row is its header."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def wrapped(text: str, indent: str = "  ") -> list[str]:
    """`text` in lines of at most WIDTH columns, all but the first indented; words stay whole."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


class Notes:
    """Numbered notes below a table: cells hold the number, equal texts share one."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> str:
        """The mark of `text`, such as "(1)"; "" for no text."""
        return f"({self._numbers.setdefault(text, len(self._numbers) + 1)})" if text else ""

    def lines(self) -> list[str]:
        """The notes, one after the other."""
        return [line for text, number in self._numbers.items() for line in wrapped(f"{number}. {text}", "   ")]
