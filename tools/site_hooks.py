"""What `make docs` changes in a page before it is rendered: mkdocs calls the functions of this file by their names."""

import re
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "first_steps.ipynb"


def on_files(files: Any, config: Any) -> Any:
    """The files of the site, and the notebook beside the pages, which a browser downloads."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, NOTEBOOK.name, abs_src_path=str(NOTEBOOK)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with plain languages at its fences, and the notebook where the site has it.

    The tag `no-run` is for the tests, and no Markdown of mkdocs.
    """
    markdown = markdown.replace(f"](../examples/{NOTEBOOK.name})", f"]({NOTEBOOK.name})")
    return re.sub(r"^( *```\w+) no-run$", r"\1", markdown, flags=re.MULTILINE)
