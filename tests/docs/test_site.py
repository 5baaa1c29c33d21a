"""`make docs` builds the site: no dead link, no entry of the API without its object, no page outside the navigation."""

import importlib
import os
import re
import sys

import pytest

from tests import processes
from tests.docs.test_code_blocks import ROOT

UNREAD = re.compile(r"^.*```.*$|^\|.*\|$", re.MULTILINE)
WHY = "builds the site, in an environment that it fills first"


def environment():
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


def shown(page):
    """The text of the article of a page, without its code."""
    article = re.split(r"<article[^>]*>", page, maxsplit=1)[-1].split("</article", 1)[0]
    for tag in ("pre", "code"):
        article = re.sub(rf"<{tag}\b.*?</{tag}>", "", article, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", "", article)


@pytest.mark.slow(WHY)
def test_make_docs_builds_the_site_strictly(tmp_path):
    """Features B11."""
    probe = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    reached = processes.run([*probe, "--retries=1", "--timeout=20", "-d", str(tmp_path / "probe"), "mergedeep"])
    if reached.returncode != 0:
        last = (reached.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"pip cannot install what builds the site, is a package index reachable? {last}")
    settings = [f"PYTHON={sys.executable}", f"DOCS_VENV={tmp_path / 'venv'}", f"SITE={tmp_path / 'site'}"]
    done = processes.run(["make", "docs", *settings], cwd=ROOT, env=environment())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    home = (tmp_path / "site" / "index.html").read_text()
    assert "hf:finegrained_fp8" in home
    assert 'href="first_steps.ipynb"' in home
    assert (tmp_path / "site" / "first_steps.ipynb").read_bytes() == (ROOT / "examples/first_steps.ipynb").read_bytes()
    models = (tmp_path / "site" / "api" / "models.html").read_text()
    assert re.search(r"\bmicrofloat\.torch\.convert\b", models)
    assert "Turn every" in models  # the docstring of the function, not of the folder of its name
    rendered = {path.relative_to(tmp_path): shown(path.read_text()) for path in (tmp_path / "site").rglob("*.html")}
    assert len(rendered) > 30
    unread = {name: found for name, text in rendered.items() if (found := UNREAD.findall(text))}
    assert not unread, "fences, or tables without a blank line before them, stayed Markdown"


def test_fences_have_a_language_alone_on_the_site(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    hooks = importlib.import_module("site_hooks")
    assert hooks.on_page_markdown("a\n```python no-run\n# x\n```\n", page=None) == "a\n```python\n# x\n```\n"
    assert shown("<p>head</p><article>a<pre>| b |</pre><code>```</code> | c |</article>| d |").strip() == "a | c |"


def test_every_style_sheet_is_there():
    """mkdocs itself says nothing of one that is missing."""
    (named,) = re.findall(r"^extra_css: \[(.+)\]$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert all((ROOT / "docs" / name).is_file() for name in named.split(", "))


def test_the_notebook_is_beside_the_pages_of_the_site(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    hooks = importlib.import_module("site_hooks")
    link = "[a](../examples/first_steps.ipynb)"
    assert hooks.on_page_markdown(link, page=None) == "[a](first_steps.ipynb)"
    assert hooks.NOTEBOOK.is_file()
    assert {page.name for page in (ROOT / "docs").rglob("*.md") if link[3:] in page.read_text()} == {
        "index.md", "recipes.md",
    }  # fmt: skip


def test_every_page_stands_in_the_navigation_once():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n", 1)[1].split("\ntheme:\n", 1)[0]
    named = re.findall(r"([\w/]+\.md)$", nav, re.MULTILINE)
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(named) == pages
