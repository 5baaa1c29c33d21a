"""Every public name has its entry in docs/api exactly once; `make docs` finds what the entries name."""

import importlib
import re
from collections import Counter

import pytest

from tests.architecture.public_api import SNAPSHOT, parse
from tests.docs.test_code_blocks import ROOT

FOLDER = ROOT / "docs" / "api"
SAME = "The same as "
ROW = re.compile(r"(?:class )?(\w+)")


def entered(text):
    """The names whose entry a page has, those included that are said to be the same object."""
    for line in text.splitlines():
        if line.startswith("      heading: "):
            yield line.removeprefix("      heading: ")
        elif line.startswith(SAME):
            yield from re.findall(r"`([\w.]+)`", line)


def public(text):
    """The names of a snapshot of the public names."""
    for module, rows in parse(text).items():
        for row in rows:
            if not row.startswith(" "):
                yield f"{module}.{ROW.match(row)[1]}"


def test_every_public_name_has_one_entry():
    """Features B11."""
    found = Counter(name for page in sorted(FOLDER.glob("*.md")) for name in entered(page.read_text()))
    assert [name for name, times in found.items() if times > 1] == []
    names = set(public(SNAPSHOT.read_text()))
    assert len(names) > 200
    missing = sorted(names - set(found))
    assert not missing, f"run: python tools/api_pages.py --write, after a line in its PAGES for {missing}"
    modules = {name.rpartition(".")[0] for name in names}
    gone = sorted(name for name in set(found) - names if name.rpartition(".")[0] in modules)
    assert not gone, f"run: python tools/api_pages.py --write, without {gone}"


def test_names_are_found_in_a_page_and_in_a_snapshot():
    page = "## A\n\n::: m.a.f\n    options:\n      heading: m.f\n      toc_label: f\n\nThe same as `m.b.f`, `m.g`.\n"
    assert list(entered(page)) == ["m.f", "m.b.f", "m.g"]
    assert list(public("# x\n\n## m\nclass A(x)\n    A.x\nf(y)\n__version__: str\n")) == ["m.A", "m.f", "m.__version__"]


def test_an_entry_is_of_the_object_that_its_heading_names(monkeypatch):
    """Also where a folder of the library has the name of a function."""
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.syspath_prepend(ROOT / "tools")
    pages = importlib.import_module("api_pages")
    import microfloat.torch as mf

    text = pages.entry("microfloat.torch.convert", mf.convert, [])
    module, _, name = text.splitlines()[0].removeprefix("::: ").rpartition(".")
    assert getattr(importlib.import_module(module), name) is mf.convert
    assert "heading: microfloat.torch.convert" in text
    assert text in (FOLDER / "models.md").read_text()
    assert pages.source_of("microfloat.formats.E2M1", mf.formats.E2M1) == "microfloat.formats.E2M1"
    assert "members: false" in pages.entry("microfloat.formats", mf.formats, [])
