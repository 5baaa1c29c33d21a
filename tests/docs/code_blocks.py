"""Fenced code blocks of a Markdown file."""

import re
from dataclasses import dataclass
from pathlib import Path

_OPEN = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")


@dataclass(frozen=True)
class CodeBlock:
    path: Path
    line: int  # of the block's first line of code, counted from 1
    info: tuple[str, ...]  # words after the fence: language, then tags
    source: str

    @property
    def padded(self) -> str:
        """The source, moved down so that line numbers of a traceback are those of the file."""
        return "\n" * (self.line - 1) + self.source


def code_blocks(path: Path, language: str | None = None) -> list[CodeBlock]:
    """Fenced blocks of the file in order, all of them or those in one language. Raises ValueError for an open fence."""
    blocks = []
    lines = iter(enumerate(path.read_text().splitlines(), start=1))
    for number, line in lines:
        opening = _OPEN.match(line)
        if not opening:
            continue
        indent, fence = len(opening["indent"]), opening["fence"]
        body: list[str] = []
        for _, inner in lines:
            if inner.strip().startswith(fence) and not inner.strip().strip(fence[0]):
                break
            body.append(inner[min(indent, len(inner) - len(inner.lstrip())) :])
        else:
            raise ValueError(f"{path.name}:{number}: the code block is never closed")
        blocks.append(CodeBlock(path, number + 1, tuple(opening["info"].split()), "\n".join(body) + "\n"))
    return [block for block in blocks if language is None or block.info[:1] == (language,)]
