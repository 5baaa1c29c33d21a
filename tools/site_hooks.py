"""What `make docs` changes in a page before it is rendered: mkdocs calls the functions of this file by their names."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with plain languages at its fences; the tag `no-run` is for the tests, and no Markdown of mkdocs."""
    return re.sub(r"^( *```\w+) no-run$", r"\1", markdown, flags=re.MULTILINE)
