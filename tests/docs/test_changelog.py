"""CHANGELOG.md has the form of Keep a Changelog: released versions with a date, and known headings."""

import re

import microfloat

HEADINGS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Numerics")


def problems(text):
    """Yield the headings that have another form, or stand in another order."""
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    if versions[:1] != ["[Unreleased]"]:
        yield "the first heading is not [Unreleased]"
    yield from (one for one in versions[1:] if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", one))
    for section in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.MULTILINE)
        yield from (kind for kind in kinds if kind not in HEADINGS)
        if [kind for kind in HEADINGS if kind in kinds] != [kind for kind in kinds if kind in HEADINGS]:
            yield f"{kinds}: once each, in the order of {HEADINGS}"


def test_the_changelog_has_its_form(repository):
    text = (repository / "CHANGELOG.md").read_text()
    assert not list(problems(text))
    assert f"## [{microfloat.__version__.partition('+')[0]}] - " in text


def test_another_form_is_found():
    text = "## [Unreleased]\n### Fixed\n### Added\n### Speed\n## 0.2\n"
    assert list(problems(text)) == [
        "0.2",
        "Speed",
        f"['Fixed', 'Added', 'Speed']: once each, in the order of {HEADINGS}",
    ]
    assert list(problems("## [0.1.0] - 2026-01-01\n"))
