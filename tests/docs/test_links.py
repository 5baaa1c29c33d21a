"""Links between the pages resolve, headings included; the pictures can be drawn again and are small."""

import importlib.util
import re

import pytest

from tests.docs.test_code_blocks import PAGES, ROOT

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
LARGEST_PICTURE = 400_000  # bytes; at the 200 dots per inch that papers ask for, heat maps take the most


def anchors(text):
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


def broken(page):
    """Yield the links of a page that lead nowhere; addresses on the network are not looked up."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    assert not list(broken(page))


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[x](#a-b-c) [y](#nope) ![z](no.png) [w](https://example.com)\n```\n[q](none)\n```\n")
    assert list(broken(page)) == ["#nope", "no.png"]


CITATION = re.compile(r'docs/(\w+\.md),? "([^"]+)"')


def cited_titles(text):
    """(page, title) of every section of a page that source text cites by its title."""
    return CITATION.findall(re.sub(r"\s+", " ", text))


def test_cited_sections_are_there():
    """By the beginning of a heading, or of a paragraph in bold."""
    found = set()
    for folder in ("src", "tests", "tools", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for name, title in cited_titles(path.read_text()):
                found.add(title)
                text = (ROOT / "docs" / name).read_text()
                lead = rf"^(#+ +(\d[\d.]* )?|(\* )?\*\*){re.escape(title)}"
                assert re.search(lead, text, re.MULTILINE), f"{path.relative_to(ROOT)} cites {title!r} of docs/{name}"
    assert "What casts on a GPU" in found


@pytest.mark.slow("draws every picture of the pages")
def test_every_picture_can_be_drawn_again(tmp_path):
    """Features B7."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path)
    committed = sorted((ROOT / "docs" / "pictures").iterdir())
    # Those of the command line are made by the commands that its page shows.
    session = (ROOT / "docs" / "cli.md").read_text()
    by_commands = {f"cli_{name}" for name in re.findall(r"^\$ microfloat .*--plot (\w+\.png)", session, re.MULTILINE)}
    drawn = {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in committed} - by_commands == drawn
    for path in [*committed, *tmp_path.iterdir()]:
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert path.stat().st_size < LARGEST_PICTURE
