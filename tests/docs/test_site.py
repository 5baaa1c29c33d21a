"""`make docs` builds the site: no dead link, no entry of the API without its object, no page outside the navigation."""

import os
import re
import sys

import pytest

from tests import processes
from tests.docs.test_code_blocks import ROOT

WHY = "builds the site, in an environment that it fills first"


def environment():
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


@pytest.mark.slow(WHY)
def test_make_docs_builds_the_site_strictly(tmp_path):
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
    models = (tmp_path / "site" / "api" / "models.html").read_text()
    assert re.search(r"\bmicrofloat\.torch\.convert\b", models)
    assert "Turn every" in models  # the docstring of the function, not of the folder of its name


def test_every_page_stands_in_the_navigation_once():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n", 1)[1].split("\ntheme:\n", 1)[0]
    named = re.findall(r"([\w/]+\.md)$", nav, re.MULTILINE)
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(named) == pages
